// SPDX-License-Identifier: Apache-2.0
/*
 * Turns and ticks of the event thread: what it does next, and when.
 *
 *     news from a socket ──► service: read, note the connection ────┐
 *     a timer, a wake-up ──► tick: connect, start, ask, forget ─────┴─► the next deadline_ns
 *
 * Invariant: both end by computing deadline_ns from every timer that there is. A timer that were
 * left out would run only when something else happens, so on a quiet stream never.
 */
#include "indexer/stream/listener_impl.h"

/* Return the earlier of two times; 0 is never. */
static uint64_t earlier(uint64_t a_ns, uint64_t b_ns)
{
    return !a_ns || (b_ns && b_ns < a_ns) ? b_ns : a_ns;
}

/*
 * Return the time of the stream's next timer; 0: never. With the lock: a recovery seeds streams, and a
 * sibling's loss has them learn anew, both from other threads.
 */
static uint64_t stream_deadline(struct ki_listener *l)
{
    uint64_t deadline_ns;

    pthread_mutex_lock(&l->lock);
    deadline_ns = l->copying ? 0 : ki_stream_absence_deadline(&l->stream);
    if (l->started && !l->copying && !l->detached && ki_listener_is_open(l))
        deadline_ns = earlier(deadline_ns, ki_stream_deadline(&l->stream));
    pthread_mutex_unlock(&l->lock);
    return deadline_ns;
}

/* Return the time of the next tick; 0: never. */
static uint64_t next_deadline(struct ki_listener *l)
{
    uint64_t deadline_ns = stream_deadline(l);

    if (l->detached)
        return deadline_ns;
    if (!ki_listener_is_open(l))
        return earlier(deadline_ns, l->retry_at_ns);
    deadline_ns = earlier(deadline_ns, l->replay_again_ns);
    deadline_ns = earlier(deadline_ns, l->sub.deadline_ns);
    if (l->target.named || l->target.place.binds)
        deadline_ns = earlier(deadline_ns, l->look_again_ns);
    if (l->link_told == KI_TOLD_NOTHING)
        deadline_ns = earlier(deadline_ns, l->silent_ns);
    return deadline_ns;
}

bool ki_listener_service(struct ki_listener *l, uint64_t now_ns)
{
    bool more;

    ki_listener_begin_turn(l);
    more = ki_listener_read(l, now_ns);
    ki_listener_note_link(l, now_ns);
    ki_listener_tell_dropped(l, now_ns);
    ki_listener_tell_connection(l, now_ns);
    l->deadline_ns = next_deadline(l);
    pthread_mutex_unlock(&l->turn);
    return more;
}

static void start(struct ki_listener *l, uint64_t now_ns)
{
    pthread_mutex_lock(&l->lock);
    l->started = true;
    l->ups_at_start = l->sub.ups;
    ki_applier_note_losses(&l->applier, l->model->index);
    ki_listener_tell_chunks(l);
    ki_stream_start(&l->stream, now_ns);
    ki_listener_unlock(l);
}

/* Return false for a retired listener. Closes the sockets of one that has just been paused. */
static bool stays(struct ki_listener *l)
{
    bool gone, paused;

    pthread_mutex_lock(&l->lock);
    gone = l->gone;
    paused = l->paused;
    ki_listener_unlock(l);
    if (!gone && paused && !l->detached)
        ki_listener_disconnect(l);
    l->detached = paused;
    return !gone;
}

/* Acquire pairs with ki_registry_go: a thread that sees this flag sees what recovery adopted. */
static bool may_start(const struct ki_listener *l)
{
    return !l->started && !l->copying && !atomic_load_explicit(&l->env->held, memory_order_acquire);
}

static bool tick(struct ki_listener *l, uint64_t now_ns)
{
    if (!stays(l))
        return false;
    if (l->fed) {
        if (may_start(l))
            start(l, now_ns);
    } else if (ki_listener_is_open(l))
        ki_listener_reconnect(l, now_ns);
    else if (!l->detached && now_ns >= l->retry_at_ns)
        ki_listener_connect(l, now_ns);
    if (ki_listener_is_open(l)) {
        if (may_start(l))
            start(l, now_ns);
        if (l->replay_again_ns && now_ns >= l->replay_again_ns)
            ki_listener_open_replay(l, now_ns);
        ki_listener_tell_dropped(l, now_ns);
        if (l->started && !l->copying)
            ki_listener_tick_stream(l, now_ns);
        ki_listener_tell_connection(l, now_ns);
    }
    if (!l->copying)
        ki_listener_tick_absence(l, now_ns);
    l->deadline_ns = next_deadline(l);
    return true;
}

bool ki_listener_tick(struct ki_listener *l, uint64_t now_ns)
{
    bool stayed;

    ki_listener_begin_turn(l);
    stayed = tick(l, now_ns);
    pthread_mutex_unlock(&l->turn);
    return stayed;
}

void ki_listener_close(struct ki_listener *l)
{
    ki_listener_disconnect(l);
}
