// SPDX-License-Identifier: Apache-2.0
/*
 * Carry out the stream's decisions (stream.h).
 *
 *     offer ─► stream decides ─► settle: purge, reset, apply ─► end_writes │ unlock ─► follow:
 *              └──────────────── under the listener's lock ───────────────┘  sockets of replays,
 *                                                                            the held batch again
 * Invariants: a batch is decided and enters the index under one hold of the lock, so that a dump or
 * a retirement sees it whole or not at all. Sockets are used without it: opening one may take long.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"
#include "event/reader/reader.h"
#include "indexer/model/chunks.h"
#include "indexer/model/model.h"
#include "indexer/stream/hub.h"
#include "indexer/stream/listener_impl.h"
#include "indexer/stream/pump.h"
#include "indexer/zmq/socket.h"

#define REPLAY_AGE_MS 60000 /* greatest age in milliseconds of an engine's address for a replay */

/* -- the index, under the lock ----------------------------------------------------------------- */

/* Log what has changed since @before. */
static void report(const struct ki_listener *l, const struct ki_stream_stats *before,
                   unsigned steps)
{
    static struct kv_log_rate rate;
    const struct ki_stream_stats *now = &l->stream.stats;
    const char *what = NULL;

    if (now->restarts != before->restarts)
        what = "the engine started over: its blocks are forgotten";
    else if (now->overruns != before->overruns)
        what = "the engine no longer has the missed batches: its blocks are forgotten";
    else if (now->contradictions != before->contradictions)
        what = "the engine removes blocks that it hadn't announced: its blocks are learnt anew";
    else if (now->absences != before->absences)
        what = "no connection for too long (--forget-after): the worker's blocks are forgotten";
    else if (now->resyncs != before->resyncs)
        what = "too many blocks can't be real after losses: they are forgotten and learnt anew";
    else if (now->failed_replays != before->failed_replays)
        what = "no useful answer to replay requests: going on without";
    else if (now->missed != before->missed)
        what = "batches are missing and can't be replayed: the view is partial";
    else if (steps & KI_STEP_REQUEST)
        what = "asking for a replay";
    if (what && kv_log_allowed(&rate, 20))
        kv_log_warn("indexer", what,
                    "worker=%s rank=%" PRIu32 " endpoint=%s position=%" PRIu64 " missed=%" PRIu64
                    " replay_from=%" PRIu64,
                    l->who, l->rank, l->endpoint, l->stream.position, now->missed - before->missed,
                    l->stream.request);
}

void ki_listener_expect_loss(struct ki_listener *l, const uint32_t *ranks, uint32_t n,
                             uint64_t left)
{
    uint64_t held;

    pthread_mutex_lock(&l->lock);
    if (!l->gone && ki_applier_held_of(&l->applier, l->model->index, ranks, n, &held)) {
        l->generation = ki_listener_new_generation(l->env);
        ki_stream_expect_loss(&l->stream, held + left);
    }
    ki_listener_unlock(l);
}

bool ki_listener_learn_anew(struct ki_listener *l, const uint32_t *ranks, uint32_t n)
{
    uint64_t held;
    bool any;

    pthread_mutex_lock(&l->lock);
    any = !l->gone && ki_applier_held_of(&l->applier, l->model->index, ranks, n, &held);
    if (any) {
        l->generation = ki_listener_new_generation(l->env);
        ki_stream_learn_anew(&l->stream, held, kv_now_ns());
        ki_listener_show_loss(l);
        ki_applier_purge_ranks(&l->applier, l->model->index, ranks, n);
    }
    ki_listener_unlock(l);
    return any;
}

/* Behind the lock: tell those who may have lost blocks with this stream's. */
void ki_listener_tell_loss(struct ki_listener *l)
{
    struct ki_loss loss = l->applier.loss;

    if (KV_LIKELY(loss.of == KI_RANKS_NONE))
        return;
    l->applier.loss = (struct ki_loss){.of = KI_RANKS_NONE};
    if (l->env->lost)
        l->env->lost(l->env->lost_arg, l, &loss);
}

/* Forget the blocks when the batch just applied shows that too many can't be real. */
static void judge(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_applier *a = &l->applier;
    uint64_t before = l->stream.stats.contradictions;
    struct ki_evidence e = {.unknown = ki_applier_unexplained(a),
                            .removed = a->last.removed,
                            .full = a->last.full,
                            .capacity = l->num_blocks * ki_applier_n_brought(a)};

    if (l->stream.lossy || e.unknown)
        e.held = ki_applier_held(a, l->model->index);
    if (ki_stream_judge(&l->stream, &e, now_ns) & KI_STEP_PURGE) {
        ki_listener_show_loss(l);
        ki_applier_purge(a, l->model->index, false);
    }
    if (l->stream.stats.contradictions != before)
        ki_applier_contradicted(a);
}

/* Note how a batch, or the waiting stores, changed the completeness of the view. */
void ki_listener_note_applied(struct ki_listener *l, enum ki_applied applied, uint64_t now_ns)
{
    switch (applied) {
    case KI_APPLIED:
        break;
    case KI_APPLIED_PART:
        ki_stream_lose_contents(&l->stream, now_ns);
        break;
    case KI_APPLIED_CLEARED:
        if (ki_applier_knows_ranks(&l->applier))
            ki_stream_mark_whole(&l->stream);
        break;
    }
    if (l->stream.healed &&
        (kve_reader_has_lower(l->applier.reader) || ki_applier_has_new_rank(&l->applier)))
        ki_stream_note_more(&l->stream, now_ns);
    judge(l, now_ns);
    ki_listener_tell_chunks(l);
}

void ki_listener_tell_chunks(struct ki_listener *l)
{
    const struct ki_applier *a = &l->applier;
    uint32_t blocks[KV_N_TIERS];

    if (KV_LIKELY(memcmp(l->told_chunk, a->reader->chunk, sizeof(l->told_chunk)) == 0 &&
                  l->told_ranks == a->n_ranks))
        return;
    memcpy(l->told_chunk, a->reader->chunk, sizeof(l->told_chunk));
    l->told_ranks = a->n_ranks;
    for (int t = 0; t < KV_N_TIERS; t++)
        blocks[t] = l->told_chunk[t] == KVE_CHUNK_VARIES ? 0 : l->told_chunk[t];
    for (uint32_t i = 0; i < a->n_ranks; i++)
        if (ki_chunks_set(l->model->chunks, (struct kv_holder){l->instance, a->ranks[i]}, blocks) <
            0)
            l->told_ranks = 0; /* try again with the next batch */
}

/* End of a series of writes, before the lock is released. */
void ki_listener_end_writes(struct ki_listener *l, bool applied, uint64_t now_ns)
{
    if (!applied)
        return;
    ki_listener_note_applied(l, ki_applier_flush(&l->applier, l->model->index), now_ns);
    ki_model_note_forms(l->model, l->applier.forms);
    l->last_event_ns = kv_wall_ns();
}

/*
 * Carry out in the index what the stream has decided. Report the changes since *@before, and update
 * it.
 */
static void settle(struct ki_listener *l, struct ki_stream_stats *before, unsigned steps,
                   struct kve_span payload, uint64_t now_ns)
{
    if (steps & KI_STEP_PURGE) {
        ki_listener_show_loss(l); /* before the first block leaves */
        ki_applier_purge(&l->applier, l->model->index, steps & KI_STEP_RESET);
    }
    if (steps & KI_STEP_RESET && !l->unnumbered) /* another process, whose messages have numbers */
        l->applier.unnumbered = false;
    if (steps & KI_STEP_RESET) /* and purged: the index has no source of the stream's any more */
        kve_reader_renew(l->applier.reader);
    ki_applier_note_stream_losses(&l->applier, l->stream.losses);
    if (steps & KI_STEP_APPLY)
        ki_listener_note_applied(
            l, ki_applier_put(&l->applier, l->model->index, payload.data, payload.len), now_ns);
    if (KV_LIKELY(steps == KI_STEP_APPLY && before->missed == l->stream.stats.missed &&
                  before->resyncs == l->stream.stats.resyncs))
        return;
    report(l, before, steps);
    *before = l->stream.stats;
}

/* -- replays ----------------------------------------------------------------------------------- */

void ki_listener_close_replay(struct ki_listener *l)
{
    l->replay_again_ns = 0;
    ki_socket_close(l->dealer, l->epoll_fd);
    l->dealer = NULL;
    l->dealer_ready = false;
}

/* Use a new socket for each request, so that no message of an older answer arrives through it. */
void ki_listener_open_replay(struct ki_listener *l, uint64_t now_ns)
{
    int rc;

    ki_listener_close_replay(l);
    rc = ki_target_find(&l->replay_target, l->env->resolver, REPLAY_AGE_MS);
    if (rc == -EINPROGRESS) { /* at most until the request's deadline */
        l->replay_again_ns = now_ns + KI_RESOLVE_POLL_NS;
        return;
    }
    if (rc == 0)
        rc = ki_socket_open(l->env->zmq, ZMQ_DEALER, l->replay_target.where, KI_REPLAY_QUEUE,
                            KI_MAX_MESSAGE, l->epoll_fd, KI_PUMP_DEALER(l), &l->dealer);
    if (rc == 0)
        rc = ki_socket_connect(l->dealer, l->replay_target.where);
    if (rc == 0)
        rc = ki_socket_request(l->dealer, l->stream.request);
    if (rc < 0) { /* the request's deadline will end the attempt */
        kv_log_warn("indexer", "can't ask for a replay", "worker=%s error=\"%s\"", l->who,
                    zmq_strerror(-rc));
        ki_listener_close_replay(l);
        return;
    }
    l->dealer_ready = true;
}

/* -- offers ------------------------------------------------------------------------------------ */

/* Keep a copy of a batch until a replay ends. Without memory it is lost, which shows as a gap. */
static void hold(struct ki_listener *l, const struct ki_live *batch)
{
    l->held = (struct ki_live){.id = batch->id};
    l->held_bytes = malloc(batch->payload.len + 1);
    l->holding = l->held_bytes != NULL;
    if (!l->holding)
        return;
    memcpy(l->held_bytes, batch->payload.data, batch->payload.len);
    l->held.payload = (struct kve_span){l->held_bytes, batch->payload.len};
}

/*
 * A batch that waited may have come over a connection that is lost by now. The stream takes such a
 * batch for news of a connection: tell it that there has been none since @since_ns.
 */
static void note_still_lost(struct ki_listener *l, uint64_t since_ns, uint64_t now_ns)
{
    if (ki_listener_is_open(l) && l->sub.state != KI_SUB_UP && l->stream.connected)
        ki_stream_disconnected(&l->stream, since_ns ? since_ns : now_ns);
}

/* Offer batches under one lock, until one needs more than the index. Returns its steps. */
static unsigned offer(struct ki_listener *l, struct ki_live *batches, size_t n, uint64_t now_ns,
                      size_t *ret_done)
{
    struct ki_stream_stats before;
    unsigned steps = 0, all = 0;
    uint64_t absent_ns;
    size_t i = 0;

    pthread_mutex_lock(&l->lock);
    before = l->stream.stats;
    absent_ns = l->stream.absent_ns;
    while (i < n && !l->gone && !(steps & (KI_STEP_HOLD | KI_STEP_REQUEST | KI_STEP_RESUME))) {
        struct ki_live *batch = &batches[i++];

        steps = ki_stream_live(&l->stream, &batch->id, batch->reconnected, now_ns);
        settle(l, &before, steps, batch->payload, now_ns);
        all |= steps;
    }
    ki_listener_end_writes(l, all & KI_STEP_APPLY, now_ns);
    note_still_lost(l, absent_ns, now_ns);
    *ret_done = l->gone ? n : i;
    ki_listener_unlock(l);
    ki_listener_tell_loss(l);
    if (steps & KI_STEP_HOLD)
        hold(l, &batches[i - 1]);
    return steps;
}

/* The batch no longer counts as the first of its connection: the stream has heard of that. */
static unsigned offer_held(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_live held = l->held;
    void *bytes = KV_STEAL(l->held_bytes);
    unsigned steps;
    size_t done;

    l->holding = false;
    steps = offer(l, &held, 1, now_ns, &done);
    free(bytes);
    return steps;
}

void ki_listener_follow(struct ki_listener *l, unsigned steps, uint64_t now_ns)
{
    while (steps & (KI_STEP_REQUEST | KI_STEP_RESUME)) {
        if (steps & KI_STEP_REQUEST)
            ki_listener_open_replay(l, now_ns);
        if (!(steps & KI_STEP_RESUME))
            return;
        ki_listener_close_replay(l);
        if (!l->holding)
            return;
        steps = offer_held(l, now_ns);
    }
}

size_t ki_listener_offer_live(struct ki_listener *l, struct ki_live *batches, size_t n,
                              uint64_t now_ns)
{
    size_t done;

    ki_listener_follow(l, offer(l, batches, n, now_ns, &done), now_ns);
    return done;
}

void ki_listener_offer_replayed(struct ki_listener *l, const struct ki_batch_id *id,
                                const struct kve_message *message, uint64_t now_ns)
{
    struct ki_stream_stats before;
    unsigned steps = 0;

    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        before = l->stream.stats;
        if (!message)
            steps = ki_stream_replay_failed(&l->stream, now_ns);
        else if (message->is_end)
            steps = ki_stream_replay_end(&l->stream, now_ns);
        else
            steps = ki_stream_replayed(&l->stream, id, now_ns);
        settle(l, &before, steps, message ? message->payload : (struct kve_span){0}, now_ns);
        ki_listener_end_writes(l, steps & KI_STEP_APPLY, now_ns);
    }
    ki_listener_unlock(l);
    ki_listener_tell_loss(l);
    ki_listener_follow(l, steps, now_ns);
}

void ki_listener_tick_stream(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_stream_stats before;
    unsigned steps = 0;

    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        before = l->stream.stats;
        steps = ki_stream_tick(&l->stream, now_ns);
        settle(l, &before, steps, (struct kve_span){0}, now_ns);
    }
    ki_listener_unlock(l);
    ki_listener_tell_loss(l);
    ki_listener_follow(l, steps, now_ns);
}

void ki_listener_tick_absence(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_stream_stats before;
    unsigned steps = 0;

    pthread_mutex_lock(&l->lock);
    /* Acquire: as in ki_listener_tick. What recovery adopts can't be stale before it is here. */
    if (atomic_load_explicit(&l->env->held, memory_order_acquire))
        l->stream.absent_ns = 0;
    else if (!l->gone) {
        before = l->stream.stats;
        if (ki_hub_may_be_back(l))
            ki_stream_may_be_back(&l->stream, now_ns);
        steps = ki_stream_tick_absence(&l->stream, now_ns);
        settle(l, &before, steps, (struct kve_span){0}, now_ns);
    }
    if (steps & KI_STEP_PURGE && l->applier.loss.of != KI_RANKS_NONE)
        l->applier.loss.own = l->applier.loss.absent = true;
    ki_listener_unlock(l);
    ki_listener_tell_loss(l);
    if (!(steps & KI_STEP_PURGE))
        return;
    ki_listener_close_replay(l);
    ki_listener_drop_held(l);
}

void ki_listener_drop_held(struct ki_listener *l)
{
    free(l->held_bytes);
    l->held_bytes = NULL;
    l->holding = false;
    ki_backlog_clear(&l->backlog, &l->env->backlog);
}
