// SPDX-License-Identifier: Apache-2.0
/**
 * Agents without a thread, whose peer is the fuzzer: it holds the other end of each connection, and
 * makes the agent serve what has come. Nothing waits, so that thousands of conversations a second are
 * possible.
 */
#ifndef KV_FUZZ_AGENTS_H
#define KV_FUZZ_AGENTS_H

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/log.h"
#include "peer/session/net.h"
#include "require.h"

enum { FUZZ_ROUNDS = 1000 }; /* a conversation that goes on for longer is a fault */

static inline void fuzz_quiet(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level, (void)line, (void)len;
}

/** Make an agent that neither listens nor opens: it has no thread. */
static inline struct kvbm_agent *fuzz_agent(const char *name, uint64_t worker)
{
    const struct kvbm_agent_opts opts = {.size = sizeof(opts), .name = name, .worker = worker};
    struct kvbm_agent *agent = NULL;

    kv_log_set_sink(fuzz_quiet, NULL);
    REQUIRE(kvbm_agent_create(&opts, &agent) == 0);
    return agent;
}

/** Have an agent serve all that has come. */
static inline void fuzz_turns(struct kvbm_agent *agent)
{
    int rounds = 0;

    while (kvbm_net_turn(agent->net))
        REQUIRE(++rounds < FUZZ_ROUNDS);
}

/** Give an agent a connection, and return its other end. *@ret (may be NULL) gets a reference. */
static inline int fuzz_connect(struct kvbm_agent *agent, bool is_opener, struct kvbm_session **ret)
{
    struct kvbm_session *session;
    int fds[2];

    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    REQUIRE(kvbm_session_create(agent->net, fds[0], true, is_opener, "fuzz", &session) == 0);
    kvbm_session_attach(session);
    if (ret)
        *ret = session;
    else
        kvbm_session_put(session);
    fuzz_turns(agent);
    return fds[1];
}

/** Send bytes and have them served. What the agent doesn't take is left out. */
static inline void fuzz_say(struct kvbm_agent *agent, int fd, const void *data, size_t size)
{
    const char *at = data;

    for (int tries = 0; size && tries < FUZZ_ROUNDS; tries++) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);

        fuzz_turns(agent);
        if (n < 0 && errno != EAGAIN)
            return;
        at += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
}

/** Read what the agent has said, as far as there is room. Returns the number of bytes. */
static inline size_t fuzz_hear(struct kvbm_agent *agent, int fd, uint8_t *to, size_t room)
{
    size_t sum = 0;

    fuzz_turns(agent);
    while (sum < room) {
        ssize_t n = recv(fd, to + sum, room - sum, 0);

        if (n <= 0)
            break;
        sum += (size_t)n;
        fuzz_turns(agent); /* more may have waited for room */
    }
    return sum;
}

/** Close the other end, and have the agent end its session. */
static inline void fuzz_hang_up(struct kvbm_agent *agent, int fd)
{
    close(fd);
    fuzz_turns(agent);
}

/** Append a frame. */
static inline void fuzz_add_frame(struct kv_buf *to, uint16_t type, uint64_t id, const void *body,
                                  size_t len)
{
    const struct kvbm_frame frame = {.type = type, .id = id, .len = (uint32_t)len, .total = len};
    uint8_t head[KVBM_FRAME_BYTES];

    kvbm_frame_write(&frame, head);
    kv_buf_append(to, head, sizeof(head));
    kv_buf_append(to, body, len);
}

/** Say all that was appended, and have it served. */
static inline void fuzz_say_frames(struct kvbm_agent *agent, int fd, struct kv_buf *frames)
{
    REQUIRE(!frames->error);
    fuzz_say(agent, fd, frames->data, frames->len);
    kv_buf_fini(frames);
}

/** Say a whole frame. */
static inline void fuzz_frame(struct kvbm_agent *agent, int fd, uint16_t type, uint64_t id,
                              const void *body, size_t len)
{
    struct kv_buf bytes = KV_BUF_INIT;

    fuzz_add_frame(&bytes, type, id, body, len);
    fuzz_say_frames(agent, fd, &bytes);
}

/** Do an opener's handshake with an agent without a token. Returns the connection. */
static inline int fuzz_open(struct kvbm_agent *agent, const char *name, uint64_t worker)
{
    struct kvbm_hello hello = {.oldest = 1,
                               .newest = 1,
                               .who = {.worker = worker, .incarnation = 99},
                               .key_len = 8,
                               .max_requests = 8};
    const uint8_t mac[KVBM_MAC_BYTES] = {0};
    struct kv_buf body = KV_BUF_INIT, frames = KV_BUF_INIT;
    int fd = fuzz_connect(agent, false, NULL);

    strcpy(hello.who.name, name);
    kvbm_hello_write(&hello, &body);
    fuzz_add_frame(&frames, KVBM_HELLO, 0, body.data, body.len);
    fuzz_add_frame(&frames, KVBM_PROOF, 0, mac, sizeof(mac)); /* the answers are left unread */
    fuzz_add_frame(&frames, KVBM_READY, 0, NULL, 0);
    kv_buf_fini(&body);
    fuzz_say_frames(agent, fd, &frames);
    return fd;
}

#endif
