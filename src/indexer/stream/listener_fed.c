// SPDX-License-Identifier: Apache-2.0
/*
 * A listener without a connection: a feeder gives it operations, and sees losses itself; or messages,
 * whose numbers tell the stream of losses.
 *
 *     feeder ──► turn (dumps wait, or are waited for) ──► lock ──► stream, applier, index
 *
 * The pump only ticks such a listener: the start behind a recovery, pauses, absence.
 */
#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "event/reader/reader.h"
#include "indexer/stream/listener_impl.h"
#include "indexer/stream/pump.h"

#define POLL_NS (2 * KV_NS_PER_MS) /* between two looks whether the listener may be written */

/* Take the turn and the lock of a listener that may be written. Returns 0; -ENOENT: it is retired. */
static int begin(struct ki_listener *l)
{
    const struct timespec pause = kv_timespec(POLL_NS);

    for (;;) {
        ki_listener_begin_turn(l);
        pthread_mutex_lock(&l->lock);
        if (l->gone) {
            ki_listener_unlock(l);
            pthread_mutex_unlock(&l->turn);
            return -ENOENT;
        }
        if (l->started && !l->copying)
            return 0;
        ki_listener_unlock(l);
        pthread_mutex_unlock(&l->turn);
        nanosleep(&pause, NULL);
    }
}

static int end(struct ki_listener *l)
{
    ki_listener_unlock(l);
    ki_listener_tell_loss(l);
    pthread_mutex_unlock(&l->turn);
    return 0;
}

int ki_listener_feed_anew(struct ki_listener *l)
{
    int rc = begin(l);

    if (rc < 0)
        return rc;
    ki_listener_show_loss(l); /* before the first block leaves */
    (void)ki_stream_fed_anew(&l->stream);
    ki_applier_purge(&l->applier, l->model->index, true);
    kve_reader_renew(l->applier.reader);
    ki_applier_note_stream_losses(&l->applier, l->stream.losses);
    return end(l);
}

int ki_listener_feed(struct ki_listener *l, const struct kve_batch *batch, uint32_t lost_tiers)
{
    uint64_t now_ns = kv_now_ns();
    int rc = begin(l);

    if (rc < 0)
        return rc;
    ki_stream_fed(&l->stream);
    ki_listener_note_applied(l, ki_applier_put_ops(&l->applier, l->model->index, batch, lost_tiers),
                             now_ns);
    ki_listener_end_writes(l, true, now_ns);
    return end(l);
}

int ki_listener_feed_whole(struct ki_listener *l, bool whole)
{
    int rc = begin(l);

    if (rc < 0)
        return rc;
    ki_stream_fed_whole(&l->stream, whole);
    return end(l);
}

int ki_listener_feed_link(struct ki_listener *l, const char *problem)
{
    int rc = begin(l);

    if (rc < 0)
        return rc;
    l->link = problem ? KI_LINK_DOWN : KI_LINK_UP;
    snprintf(l->last_error, sizeof(l->last_error), "%s", problem ? problem : "");
    ki_stream_fed_link(&l->stream, !problem, kv_now_ns());
    rc = end(l);
    ki_pump_wake(l->pump); /* a deadline has changed */
    return rc;
}

bool ki_listener_has_started(struct ki_listener *l)
{
    bool started;

    pthread_mutex_lock(&l->lock);
    started = l->started;
    pthread_mutex_unlock(&l->lock);
    return started;
}

int ki_listener_feed_message(struct ki_listener *l, const struct kve_message *message)
{
    struct ki_live batch = {.id = ki_listener_identify(message), .payload = message->payload};
    int rc = begin(l);

    if (rc < 0)
        return rc;
    ki_listener_unlock(l); /* the turn is kept: nothing begins to copy meanwhile */
    (void)ki_listener_offer_live(l, &batch, 1, kv_now_ns());
    pthread_mutex_unlock(&l->turn);
    return 0;
}

int ki_listener_feed_reconnected(struct ki_listener *l)
{
    int rc = begin(l);

    if (rc < 0)
        return rc;
    ki_stream_fed_reconnected(&l->stream);
    return end(l);
}
