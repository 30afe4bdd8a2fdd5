// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of sessions: agents that listen, sessions, a service that echoes. */
#ifndef KV_TEST_SESSION_UNIT_H
#define KV_TEST_SESSION_UNIT_H

#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "peer/session/session.h"
#include "peer_unit.h"
#include "support.h"

#define SOON_NS (UINT64_C(60) * KV_NS_PER_S) /* deadline of what must succeed */
#define ECHO 60                              /* service: the body comes back */

static inline uint64_t soon(void)
{
    return kv_now_ns() + SOON_NS;
}

static inline uint64_t in_ms(uint64_t ms)
{
    return kv_now_ns() + ms * KV_NS_PER_MS;
}

/** Options of an agent that listens at @endpoint (NULL: nowhere). */
static inline struct kvbm_agent_opts session_opts(const char *name, const char *const *endpoint)
{
    return (struct kvbm_agent_opts){.size = sizeof(struct kvbm_agent_opts),
                                    .name = name,
                                    .fingerprint = "model",
                                    .listen = endpoint,
                                    .n_listen = endpoint && *endpoint ? 1 : 0,
                                    .keepalive_ms = SOON_NS / KV_NS_PER_MS,
                                    .handshake_ms = SOON_NS / KV_NS_PER_MS};
}

static inline struct kvbm_agent *agent_of(const struct kvbm_agent_opts *opts)
{
    struct kvbm_agent *agent = NULL;

    assert_int_equal(kvbm_agent_create(opts, &agent), 0);
    return agent;
}

static inline struct kvbm_agent *agent_at(const char *name, const char *endpoint)
{
    struct kvbm_agent_opts opts = session_opts(name, &endpoint);

    return agent_of(&opts);
}

/** Return the endpoint that an agent has bound, in a static buffer. */
static inline const char *endpoint_of(const struct kvbm_agent *agent)
{
    static char text[256];

    assert_true(kvbm_agent_endpoint(agent, 0, text, sizeof(text), NULL) > 0);
    return text;
}

/** Return "unix:" and a path that no other test has, in a static buffer. */
static inline const char *unix_endpoint(void)
{
    static char text[80];
    static int n;

    snprintf(text, sizeof(text), "unix:/tmp/kvbm-test-%d-%d", (int)getpid(), n++);
    return text;
}

static inline int open_with(struct kvbm_agent *agent, const char *endpoint, uint32_t n_data,
                            char why[256], struct kvbm_session **ret)
{
    const struct kvbm_session_opts opts = {.size = sizeof(opts),
                                           .timeout_ms = SOON_NS / KV_NS_PER_MS,
                                           .n_data = n_data,
                                           .why = why,
                                           .why_size = why ? 256 : 0};

    return kvbm_session_open(agent, endpoint, &opts, ret);
}

static inline struct kvbm_session *open_session(struct kvbm_agent *agent,
                                                const struct kvbm_agent *to, uint32_t n_data)
{
    struct kvbm_session *session = NULL;

    assert_int_equal(open_with(agent, endpoint_of(to), n_data, NULL, &session), 0);
    return session;
}

static inline void serve_echo(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    if (request->id)
        (void)kvbm_session_reply(session, request->id, (int32_t)request->len, request->body,
                                 request->len, request->fd);
}

#endif
