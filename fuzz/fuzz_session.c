// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions with a hostile peer. The first byte chooses:
 *
 *   even   frames and greetings are parsed; what is accepted is written alike
 *   odd    the rest is all that an opener says to a listening agent
 *   3 mod 4  the rest is what a listener says to an opening agent, in two pieces: the first at once,
 *          the second (its length: two bytes) behind the agent's first requests
 */
#include "agents.h"

#define ECHO 60
#define ROOM 100000

static struct kvbm_agent *owner, *reader;

/* ---- parsers ---- */

static void parse(const uint8_t *data, size_t size)
{
    struct kvbm_challenge challenge;
    struct kvbm_hello hello;
    struct kvbm_frame frame;

    if (size >= KVBM_FRAME_BYTES && kvbm_frame_parse(data, &frame) == 0) {
        uint8_t again[KVBM_FRAME_BYTES];

        kvbm_frame_write(&frame, again);
        REQUIRE(memcmp(again, data, sizeof(again)) == 0);
        REQUIRE(frame.len <= 8u << 20 && frame.type && frame.type < KVBM_N_TYPES);
    }
    if (kvbm_hello_parse(data, size, &hello) == 0) {
        struct kv_buf again = KV_BUF_INIT;

        kvbm_hello_write(&hello, &again);
        REQUIRE(again.len == size && memcmp(again.data, data, size) == 0);
        kv_buf_fini(&again);
    }
    if (kvbm_challenge_parse(data, size, &challenge) == 0) {
        uint8_t again[KVBM_CHALLENGE_BYTES];

        kvbm_challenge_write(&challenge, again);
        REQUIRE(memcmp(again, data, sizeof(again)) == 0);
    }
}

/* ---- conversations ---- */

static void serve_echo(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    if (request->id)
        (void)kvbm_session_reply(session, request->id, 0, request->body, request->len, request->fd);
}

static uint8_t heard[1 << 16];

static void talk_to_owner(const uint8_t *data, size_t size)
{
    int fd = fuzz_connect(owner, false, NULL);

    fuzz_say(owner, fd, data, size);
    (void)fuzz_hear(owner, fd, heard, sizeof(heard));
    fuzz_hang_up(owner, fd);
}

/* Ask for memory, and give up after the first piece: nothing behind the room, or late, is written. */
static void ask_into(struct kvbm_session *session, int fd, const uint8_t *late, size_t size)
{
    static uint8_t memory[ROOM + 1], before[ROOM];
    struct iovec to[] = {{memory, 100}, {memory + 100, ROOM - 100}};
    struct kvbm_call *into = NULL, *body = NULL;
    struct kvbm_reply reply;

    memory[ROOM] = 42;
    (void)kvbm_call_start(session, ECHO, "", 0, -1, to, 2, &into);
    (void)kvbm_call_start(session, ECHO, "", 0, -1, NULL, 0, &body);
    fuzz_say(reader, fd, late, size / 2);
    if (into)
        (void)kvbm_call_wait(into, 0, NULL);
    memcpy(before, memory, sizeof(before));
    fuzz_say(reader, fd, late + size / 2, size - size / 2);
    if (body && kvbm_call_wait(body, 0, &reply) >= 0)
        kvbm_reply_fini(&reply);
    REQUIRE(memory[ROOM] == 42 && memcmp(before, memory, sizeof(before)) == 0);
}

static void talk_to_reader(const uint8_t *data, size_t size)
{
    size_t second = size >= 2 ? (size_t)data[0] | (size_t)data[1] << 8 : 0;
    struct kvbm_session *session;
    int fd = fuzz_connect(reader, true, &session);

    data += size >= 2 ? 2 : size;
    size -= size >= 2 ? 2 : size;
    second = second < size ? second : size;
    fuzz_say(reader, fd, data, size - second);
    ask_into(session, fd, data + size - second, second);
    (void)fuzz_hear(reader, fd, heard, sizeof(heard));
    fuzz_hang_up(reader, fd);
    kvbm_session_put(session);
}

/* ---- the fuzzer ---- */

static void begin(void)
{
    owner = fuzz_agent("owner", 1);
    REQUIRE(kvbm_agent_serve(owner, ECHO, serve_echo, NULL) == 0);
    reader = fuzz_agent("reader", 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!owner)
        begin();
    if (size < 1)
        return 0;
    if (data[0] % 2 == 0)
        parse(data + 1, size - 1);
    else if (data[0] % 4 == 1)
        talk_to_owner(data + 1, size - 1);
    else
        talk_to_reader(data + 1, size - 1);
    return 0;
}
