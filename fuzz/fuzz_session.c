// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions with a hostile peer. The first byte chooses:
 *
 *   even   frames and greetings are parsed; what is accepted is written alike
 *   odd    the rest is all that an opener says to a listening agent
 *   3 mod 4  the rest is what a listener says to an opening agent, in two pieces: the first at once,
 *          the second (its length: two bytes) behind the agent's first request
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "peer/wire.h"
#include "require.h"

#define ECHO 60
#define ROOM 100000

static struct kvbm_agent *owner, *reader;
static char at[108], fake[108];
static int listener;

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

static void say(int fd, const uint8_t *data, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = send(fd, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n <= 0)
            return; /* closed, or not read: enough */
        done += (size_t)n;
    }
}

static void hear_end(int fd)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    uint8_t bytes[4096];

    while (poll(&polled, 1, 20) == 1 && recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
        ;
}

static void talk_to_owner(const uint8_t *data, size_t size)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    snprintf(to.sun_path, sizeof(to.sun_path), "%s", at + strlen("unix:"));
    REQUIRE(connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0);
    say(fd, data, size);
    (void)shutdown(fd, SHUT_WR);
    hear_end(fd);
    close(fd);
}

/* Open a session with the fuzzer, and ask it. Nothing behind the room, or late, is written. */
static void *ask_main(void *arg)
{
    const struct kvbm_session_opts opts = {.size = sizeof(opts), .timeout_ms = 50};
    static uint8_t memory[ROOM + 1];
    struct iovec to[] = {{memory, 100}, {memory + 100, ROOM - 100}};
    struct kvbm_session *session;
    struct kvbm_reply reply;
    uint8_t before[64];

    (void)arg;
    if (kvbm_session_open(reader, fake, &opts, &session) < 0)
        return NULL;
    memory[ROOM] = 42;
    (void)kvbm_session_call_into(session, ECHO, "", 0, to, 2, kv_now_ns() + 20 * KV_NS_PER_MS,
                                 NULL);
    memcpy(before, memory, sizeof(before));
    if (kvbm_session_call(session, ECHO, "", 0, -1, kv_now_ns() + 5 * KV_NS_PER_MS, &reply) == 0)
        kvbm_reply_fini(&reply);
    REQUIRE(memory[ROOM] == 42 && memcmp(before, memory, sizeof(before)) == 0);
    (void)kvbm_session_close(session);
    return NULL;
}

static void talk_to_reader(const uint8_t *data, size_t size)
{
    struct pollfd polled = {.fd = listener, .events = POLLIN};
    size_t second = size >= 2 ? (size_t)data[0] | (size_t)data[1] << 8 : 0;
    pthread_t thread;
    int fd = -1;

    data += size >= 2 ? 2 : size;
    size -= size >= 2 ? 2 : size;
    second = second < size ? second : size;
    REQUIRE(pthread_create(&thread, NULL, ask_main, NULL) == 0);
    if (poll(&polled, 1, 1000) == 1)
        fd = accept(listener, NULL, NULL);
    if (fd >= 0) {
        say(fd, data, size - second);
        hear_end(fd);
        say(fd, data + size - second, second);
        hear_end(fd);
        close(fd);
    }
    pthread_join(thread, NULL);
}

/* ---- the fuzzer ---- */

static void quiet(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level, (void)line, (void)len;
}

static void begin(void)
{
    const char *const where[] = {at};
    struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = "owner", .worker = 1};
    struct sockaddr_un to = {.sun_family = AF_UNIX};

    kv_log_set_sink(quiet, NULL);
    snprintf(at, sizeof(at), "unix:/tmp/fuzz-session-%d", (int)getpid());
    snprintf(fake, sizeof(fake), "unix:/tmp/fuzz-session-%d-fake", (int)getpid());
    opts.listen = where;
    opts.n_listen = 1;
    REQUIRE(kvbm_agent_create(&opts, &owner) == 0);
    REQUIRE(kvbm_agent_serve(owner, ECHO, serve_echo, NULL) == 0);
    opts = (struct kvbm_agent_opts){.size = sizeof(opts), .name = "reader", .worker = 2};
    REQUIRE(kvbm_agent_create(&opts, &reader) == 0);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(to.sun_path, sizeof(to.sun_path), "%s", fake + strlen("unix:"));
    (void)unlink(to.sun_path);
    REQUIRE(bind(listener, (struct sockaddr *)&to, sizeof(to)) == 0);
    REQUIRE(listen(listener, 8) == 0);
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
