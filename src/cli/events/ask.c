// SPDX-License-Identifier: Apache-2.0
#include "cli/events/ask.h"

#include <errno.h>
#include <string.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/net/endpoint.h"
#include "cli/show/bar.h"

#define TURN_MS 200 /* longest wait before looking for ^C */

/* A replay that is being read. */
struct asking {
    const char *url;
    uint64_t from, timeout_ms;
    kc_message_fn fn;
    void *arg;
};

/* A whole answer. */
struct answer {
    zmq_msg_t frames[KVE_MAX_FRAMES];
    struct kve_span spans[KVE_MAX_FRAMES];
    size_t n; /* may be more than KVE_MAX_FRAMES */
};

static void free_answer(struct answer *answer)
{
    for (size_t i = 0; i < KV_MIN(answer->n, (size_t)KVE_MAX_FRAMES); i++)
        zmq_msg_close(&answer->frames[i]);
    answer->n = 0;
}

/* Receive an answer. Returns 0 or -errno; -EAGAIN: none in TURN_MS. */
static int receive(void *socket, struct answer *ret)
{
    bool more = true;

    for (ret->n = 0; more; ret->n++) {
        zmq_msg_t beyond, *frame = &beyond;

        if (ret->n < KVE_MAX_FRAMES)
            frame = &ret->frames[ret->n];
        zmq_msg_init(frame);
        if (zmq_msg_recv(frame, socket, 0) < 0) {
            int rc = -errno;

            zmq_msg_close(frame);
            free_answer(ret);
            return rc;
        }
        more = zmq_msg_more(frame);
        if (frame == &beyond)
            zmq_msg_close(frame);
        else
            ret->spans[ret->n] = (struct kve_span){zmq_msg_data(frame), zmq_msg_size(frame)};
    }
    return 0;
}

/* Hand over an answer as the live message that it repeats. Returns what the function returned. */
static int take_answer(const struct asking *asking, const struct answer *answer, bool *ret_end)
{
    uint8_t number[KVE_SEQUENCE_BYTES];
    struct kc_message message = {.time_ns = kv_wall_ns(),
                                 .from = {asking->url, strlen(asking->url)}};
    struct kve_message m;

    *ret_end = false;
    if (kve_message_parse_replay(answer->spans, answer->n, &m) < 0) {
        message.n_frames = answer->n;
        memcpy(message.frames, answer->spans, sizeof(message.frames));
        return asking->fn(asking->arg, &message);
    }
    if (m.is_end) {
        *ret_end = true;
        return 0;
    }
    kve_sequence_put(number, m.sequence);
    message.n_frames = 3;
    message.frames[0] = m.topic;
    message.frames[1] = (struct kve_span){number, sizeof(number)};
    message.frames[2] = m.payload;
    return asking->fn(asking->arg, &message);
}

/* Send the request. Returns 0, -EAGAIN (nobody to send it to) or another errno. */
static int request(const struct asking *asking, void *socket)
{
    struct kve_replay_request request;

    kve_replay_request_init(&request, asking->from);
    for (size_t i = 0; i < 2; i++)
        if (zmq_send(socket, request.frames[i].data, request.frames[i].len,
                     ZMQ_DONTWAIT | (i ? 0 : ZMQ_SNDMORE)) < 0)
            return -errno;
    return 0;
}

static int talk(const struct asking *asking, void *socket, struct kv_error *error)
{
    uint64_t end_ns = kv_ns_after(kv_now_ns(), asking->timeout_ms);
    struct answer answer;
    bool end = false;
    int rc = request(asking, socket);

    while (!end && !kc_bar_interrupted()) {
        if (rc == 0)
            rc = receive(socket, &answer);
        if (rc == 0) {
            rc = take_answer(asking, &answer, &end);
            free_answer(&answer);
            if (rc)
                return rc;
            end_ns = kv_ns_after(kv_now_ns(), asking->timeout_ms);
            continue;
        }
        if (rc != -EAGAIN && rc != -EINTR)
            return kv_fail(error, rc, 0, "%.150s: %s", asking->url, zmq_strerror(-rc));
        if (kv_now_ns() >= end_ns)
            return kv_fail(error, -ETIMEDOUT, 0,
                           "%.120s: no answer; is that an engine's replay endpoint?", asking->url);
        rc = 0;
    }
    return end ? 0 : kv_fail(error, -EINTR, 0, "interrupted");
}

int kc_ask_replays(const char *url, uint64_t from, uint64_t timeout_ms, kc_message_fn fn, void *arg,
                   struct kv_error *error)
{
    const struct asking asking = {url, from, timeout_ms, fn, arg};
    struct kv_endpoint endpoint;
    const char *why = NULL;
    int turn = TURN_MS, none = 0, rc;
    void *zmq, *socket;

    if (kv_endpoint_parse_peer(url, &endpoint, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "not a usable URL: %.120s: %s", url, why);
    zmq = zmq_ctx_new();
    socket = zmq ? zmq_socket(zmq, ZMQ_DEALER) : NULL;
    if (!socket || zmq_setsockopt(socket, ZMQ_RCVTIMEO, &turn, sizeof(turn)) ||
        zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof(none)) ||
        (endpoint.ipv6 && zmq_setsockopt(socket, ZMQ_IPV6, &(int){1}, sizeof(int))) ||
        zmq_connect(socket, url))
        rc = kv_fail(error, -ECONNREFUSED, 0, "%.150s: %s", url, zmq_strerror(errno));
    else
        rc = talk(&asking, socket, error);
    if (socket)
        zmq_close(socket);
    if (zmq)
        zmq_ctx_term(zmq);
    return rc;
}
