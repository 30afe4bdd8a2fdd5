// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir events replay`: recordings, and replay endpoints of engines. play.c publishes recordings.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/net/endpoint.h"
#include "cli/events/events.h"
#include "cli/events/record.h"
#include "cli/events/source.h"
#include "cli/show/bar.h"

#define TURN_MS 200 /* longest wait before looking for ^C */

/* -- files ------------------------------------------------------------------------------------- */

/* Read a record into @buf. Returns as kc_record_read does, or an errno of reading. */
static long read_record(FILE *file, struct kv_buf *buf, struct kc_message *ret,
                        const char **ret_why)
{
    uint8_t head[8];
    size_t n = fread(head, 1, sizeof(head), file), more;

    kv_buf_clear(buf);
    kv_buf_append(buf, head, n);
    more = n == sizeof(head) ? KV_MIN(kv_get_le(head, 4), (uint64_t)KC_RECORD_MAX) : 0;
    if (kv_buf_reserve(buf, more) < 0)
        return -ENOMEM;
    if (more)
        buf->len += fread(buf->data + buf->len, 1, more, file);
    return ferror(file) ? -EIO : kc_record_read(buf->data, buf->len, ret, ret_why);
}

static int read_header(FILE *file, const char **ret_why)
{
    uint8_t header[KC_RECORD_HEADER];

    return kc_record_check(header, fread(header, 1, sizeof(header), file), ret_why);
}

int kc_events_read_file(struct kc_events_call *call, FILE *file, kc_message_fn fn, void *arg)
{
    struct kv_buf buf = KV_BUF_INIT;
    const char *why = "can't be read";
    struct kc_message message;
    long n = read_header(file, &why);
    int rc = 0;

    while (n >= 0 && rc == 0 && !kc_bar_interrupted()) {
        n = read_record(file, &buf, &message, &why);
        if (n <= 0)
            break;
        rc = fn(arg, &message);
    }
    kv_buf_fini(&buf);
    if (n < 0)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->url, why);
    return rc;
}

static int print_file(struct kc_events_call *call, FILE *file)
{
    int rc = kc_events_begin(call);

    if (rc == 0)
        rc = kc_events_read_file(call, file, kc_events_take, call);
    if (rc == 0 && kc_bar_interrupted())
        rc = KC_EVENTS_INTERRUPTED;
    return kc_events_end(call, rc);
}

/* -- replay endpoints -------------------------------------------------------------------------- */

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

/* Print an answer as the live message that it repeats. Returns 0 or an exit status. */
static int take_answer(struct kc_events_call *call, const struct answer *answer, bool *ret_end)
{
    uint8_t number[KVE_SEQUENCE_BYTES];
    struct kc_message message = {.time_ns = kv_wall_ns(), .from = {call->url, strlen(call->url)}};
    struct kve_message m;

    *ret_end = false;
    if (kve_message_parse_replay(answer->spans, answer->n, &m) < 0) {
        message.n_frames = answer->n;
        memcpy(message.frames, answer->spans, sizeof(message.frames));
        return kc_events_take(call, &message);
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
    return kc_events_take(call, &message);
}

static int no_answer(const struct kc_events_call *call)
{
    return kc_events_fail(call, KC_EVENTS_UNREACHED,
                          "%s: no answer; is that an engine's replay endpoint?", call->url);
}

/* Send the request. Returns 0, -EAGAIN (nobody to send it to) or another errno. */
static int request(const struct kc_events_call *call, void *socket)
{
    struct kve_replay_request request;

    kve_replay_request_init(&request, call->opts.from);
    for (size_t i = 0; i < 2; i++)
        if (zmq_send(socket, request.frames[i].data, request.frames[i].len,
                     ZMQ_DONTWAIT | (i ? 0 : ZMQ_SNDMORE)) < 0)
            return -errno;
    return 0;
}

static int ask(struct kc_events_call *call, void *socket)
{
    uint64_t end_ns = kv_ns_after(kv_now_ns(), call->opts.timeout_ms);
    struct answer answer;
    bool end = false;
    int rc = request(call, socket);

    while (!end && !kc_bar_interrupted()) {
        if (rc == 0)
            rc = receive(socket, &answer);
        if (rc == 0) {
            rc = take_answer(call, &answer, &end);
            free_answer(&answer);
            if (rc)
                return rc;
            end_ns = kv_ns_after(kv_now_ns(), call->opts.timeout_ms);
            continue;
        }
        if (rc != -EAGAIN && rc != -EINTR)
            return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->url, zmq_strerror(-rc));
        if (kv_now_ns() >= end_ns)
            return no_answer(call);
        rc = 0;
    }
    return end ? 0 : KC_EVENTS_INTERRUPTED;
}

static int replay_url(struct kc_events_call *call)
{
    struct kv_endpoint endpoint;
    const char *why = NULL;
    int turn = TURN_MS, none = 0, rc;
    void *zmq, *socket;

    if (kv_endpoint_parse_peer(call->url, &endpoint, &why) < 0)
        return kc_events_fail(call, KC_EVENTS_USAGE, "not a usable URL: %.150s: %s", call->url,
                              why);
    zmq = zmq_ctx_new();
    socket = zmq ? zmq_socket(zmq, ZMQ_DEALER) : NULL;
    if (!socket || zmq_setsockopt(socket, ZMQ_RCVTIMEO, &turn, sizeof(turn)) ||
        zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof(none)) ||
        (endpoint.ipv6 && zmq_setsockopt(socket, ZMQ_IPV6, &(int){1}, sizeof(int))) ||
        zmq_connect(socket, call->url))
        rc = kc_events_fail(call, KC_EVENTS_UNREACHED, "%s: %s", call->url, zmq_strerror(errno));
    else
        rc = kc_events_begin(call);
    if (rc == 0)
        rc = kc_events_end(call, ask(call, socket));
    if (socket)
        zmq_close(socket);
    if (zmq)
        zmq_ctx_term(zmq);
    return rc;
}

int kc_events_replay(struct kc_events_call *call)
{
    FILE *file;
    int rc;

    if (strstr(call->url, "://")) {
        if (call->opts.to)
            return kc_events_fail(call, KC_EVENTS_USAGE, "--to is for files");
        return replay_url(call);
    }
    if (call->opts.to && (call->opts.record || call->opts.json))
        return kc_events_fail(call, KC_EVENTS_USAGE, "--to prints and records nothing");
    file = strcmp(call->url, "-") == 0 ? stdin : fopen(call->url, "re");
    if (!file)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->url, strerror(errno));
    rc = call->opts.to ? kc_events_play(call, file) : print_file(call, file);
    if (file != stdin)
        fclose(file);
    return rc;
}
