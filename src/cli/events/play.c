// SPDX-License-Identifier: Apache-2.0
/*
 * Recordings, published again: over ZMQ by a publisher that is bound here, over NATS to the subjects
 * that the messages had.
 *
 *     file ──► message ──► wait until it is due ──► send_zmq | send_nats, again and again while
 *                                                   there is no room
 */
#include <errno.h>
#include <string.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "cli/events/events.h"
#include "cli/events/source.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"
#include "plane/nats.h"

#define TURN_MS 200  /* longest wait before looking for ^C */
#define ROOM_MS 5    /* between attempts to queue a message for NATS */
#define END_MS 10000 /* for what is queued to leave, at the end */

struct player {
    struct kc_events_call *call;
    int (*send)(struct player *player, const struct kc_message *message);
    void *socket;
    struct kvp_nats *nats;
    uint64_t first_ns, start_ns; /* recorded time of the first message, and when it was sent */
    uint64_t n;
};

/* -- pace -------------------------------------------------------------------------------------- */

static void sleep_ms(uint64_t ms)
{
    struct timespec pause = kv_timespec(ms * KV_NS_PER_MS);

    nanosleep(&pause, NULL);
}

/* Wait until the message is due. Returns false after ^C. */
static bool await_time(struct player *player, uint64_t time_ns)
{
    uint64_t due_ns;

    if (!player->n) {
        player->first_ns = time_ns;
        player->start_ns = kv_now_ns();
    }
    due_ns = player->start_ns + (time_ns > player->first_ns ? time_ns - player->first_ns : 0);
    while (!player->call->opts.fast && !kc_bar_interrupted()) {
        int64_t left_ms = kv_ms_until(due_ns, kv_now_ns());

        if (left_ms == 0)
            break;
        sleep_ms((uint64_t)KV_MIN(left_ms, (int64_t)TURN_MS));
    }
    return !kc_bar_interrupted();
}

static int play(void *arg, const struct kc_message *message)
{
    struct player *player = arg;
    int rc;

    if (!await_time(player, message->time_ns))
        return KC_EVENTS_INTERRUPTED;
    rc = player->send(player, message);
    player->n += rc == 0;
    return rc;
}

/* -- ZMQ --------------------------------------------------------------------------------------- */

static int send_zmq(struct player *player, const struct kc_message *message)
{
    for (size_t i = 0; i < message->n_frames; i++) {
        const struct kve_span *frame = &message->frames[i];
        int more = i + 1 < message->n_frames ? ZMQ_SNDMORE : 0;

        while (zmq_send(player->socket, frame->data, frame->len, more) < 0) {
            if (kc_bar_interrupted())
                return KC_EVENTS_INTERRUPTED;
            if (errno != EAGAIN && errno != EINTR)
                return kc_events_fail(player->call, KC_EVENTS_FAILED, "%s: %s",
                                      player->call->opts.to, zmq_strerror(errno));
        }
    }
    return 0;
}

/* Wait for the first subscription. Returns 0 or an exit status. */
static int await_subscriber(struct player *player, const char *endpoint)
{
    uint8_t byte;

    fprintf(stderr, "waiting for a subscriber at %s\n", endpoint);
    while (zmq_recv(player->socket, &byte, 1, 0) < 0) {
        if (kc_bar_interrupted())
            return KC_EVENTS_INTERRUPTED;
        if (errno != EAGAIN && errno != EINTR)
            return kc_events_fail(player->call, KC_EVENTS_FAILED, "%s: %s", endpoint,
                                  zmq_strerror(errno));
    }
    return 0;
}

/* Bind a publisher that neither drops messages nor waits longer than TURN_MS. */
static int bind_publisher(struct player *player, void *zmq, char endpoint[KC_MAX_FROM])
{
    int on = 1, turn = TURN_MS, linger = END_MS;
    size_t size = KC_MAX_FROM;
    const char *to = player->call->opts.to;

    player->socket = zmq_socket(zmq, ZMQ_XPUB);
    if (!player->socket || zmq_setsockopt(player->socket, ZMQ_XPUB_NODROP, &on, sizeof(on)) ||
        zmq_setsockopt(player->socket, ZMQ_SNDTIMEO, &turn, sizeof(turn)) ||
        zmq_setsockopt(player->socket, ZMQ_RCVTIMEO, &turn, sizeof(turn)) ||
        zmq_setsockopt(player->socket, ZMQ_LINGER, &linger, sizeof(linger)) ||
        zmq_bind(player->socket, to) ||
        zmq_getsockopt(player->socket, ZMQ_LAST_ENDPOINT, endpoint, &size))
        return kc_events_fail(player->call, KC_EVENTS_UNREACHED, "%s: %s", to, zmq_strerror(errno));
    return 0;
}

static int play_zmq(struct player *player, FILE *file)
{
    char endpoint[KC_MAX_FROM];
    void *zmq = zmq_ctx_new();
    int rc, none = 0;

    if (!zmq)
        return kc_events_fail(player->call, KC_EVENTS_FAILED, "out of memory");
    player->send = send_zmq;
    rc = bind_publisher(player, zmq, endpoint);
    if (rc == 0)
        rc = await_subscriber(player, endpoint);
    if (rc == 0)
        rc = kc_events_read_file(player->call, file, play, player);
    if (player->socket) {
        if (rc)
            zmq_setsockopt(player->socket, ZMQ_LINGER, &none, sizeof(none));
        zmq_close(player->socket);
    }
    zmq_ctx_term(zmq);
    return rc;
}

/* -- NATS -------------------------------------------------------------------------------------- */

static int send_nats(struct player *player, const struct kc_message *message)
{
    char subject[KC_MAX_TOPIC + 1];
    struct kvp_nats_msg msg = {.subject = subject};
    int rc = -EINVAL;

    if (message->n_frames == 2 && message->frames[0].len <= KC_MAX_TOPIC) {
        memcpy(subject, message->frames[0].data, message->frames[0].len);
        subject[message->frames[0].len] = '\0';
        msg.data = message->frames[1].data;
        msg.len = message->frames[1].len;
        while ((rc = kvp_nats_publish(player->nats, &msg)) == -EAGAIN && !kc_bar_interrupted())
            sleep_ms(ROOM_MS);
    }
    if (rc == -EAGAIN)
        return KC_EVENTS_INTERRUPTED;
    if (rc == -EINVAL)
        return kc_events_fail(player->call, KC_EVENTS_FAILED,
                              "a message that didn't come over NATS has no usable subject");
    return rc < 0 ? kc_events_fail(player->call, KC_EVENTS_FAILED, "%s", strerror(-rc)) : 0;
}

static int play_nats(struct player *player, FILE *file)
{
    const struct kc_events_opts *o = &player->call->opts;
    struct kvp_nats_opts opts = KVP_NATS_OPTS_INIT;
    struct kvp_nats_secrets secrets;
    struct kv_error error = {0};
    int rc;

    if (strchr(o->to, '@')) /* as source_nats.c does */
        return kc_events_fail(player->call, KC_EVENTS_USAGE,
                              "--to: it is printed, so credentials go into --nats-... options");
    rc = kvp_nats_args_read(&o->nats, &secrets, &opts, &error);
    if (rc < 0)
        return kc_events_fail_open(player->call, &error);
    opts.url = o->to;
    rc = kvp_nats_open(&opts, NULL, NULL, &player->nats);
    explicit_bzero(&secrets, sizeof(secrets));
    if (rc < 0)
        return kc_events_fail(player->call, KC_EVENTS_FAILED, "%s: %s", o->to,
                              rc == -ENOTSUP ? "NATS needs libkv_nats and libnats" : strerror(-rc));
    player->send = send_nats;
    rc = kc_events_read_file(player->call, file, play, player);
    if (rc == 0 && kvp_nats_flush(player->nats, END_MS) < 0)
        rc = kc_events_fail(player->call, KC_EVENTS_UNREACHED, "%s: no answer of the NATS server",
                            o->to);
    kvp_nats_close(player->nats, 0);
    return rc;
}

int kc_events_play(struct kc_events_call *call, FILE *file)
{
    struct player player = {.call = call};
    int rc = kc_is_nats(call->opts.to) ? play_nats(&player, file) : play_zmq(&player, file);

    if (rc == 0)
        printf("%s messages published\n", kc_count(player.n).s);
    return rc;
}
