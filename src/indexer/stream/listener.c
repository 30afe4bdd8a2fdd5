// SPDX-License-Identifier: Apache-2.0
/*
 * Life of a listener, and the calls of other threads.
 *
 *     created ─► handed to a pump ─► connected ─► started ─► ... ─► gone ─► closed, released
 *                                  (held: unread)  (reads)       (retire)   (by the pump)
 *
 * Before it starts, it may be seeded with a peer's dump: a position, and other ranks' blocks.
 *
 * Invariants:
 * - `gone` is set under the lock, and each batch enters the index under the lock: after
 *   ki_listener_retire, none does.
 * - Whoever changes under the lock what /query tells leaves by ki_listener_unlock, which publishes
 *   `view`: one word, which queries read without the lock.
 * - The model's n_odd counts the listeners whose view is news. While it is 0, a query asks none.
 */
#include "indexer/stream/listener.h"

#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/clock.h"
#include "base/core/log.h"
#include "event/reader/reader.h"
#include "indexer/model/chunks.h"
#include "indexer/model/model.h"

static struct ki_stream_opts stream_opts(const struct ki_listener_env *env, bool can_replay)
{
    return (struct ki_stream_opts){.can_replay = can_replay,
                                   .max_attempts = 3,
                                   .timeout_ns = env->replay_timeout_ms * KV_NS_PER_MS,
                                   .retry_delay_ns = 100 * KV_NS_PER_MS,
                                   .cooldown_ns = 30 * KV_NS_PER_S,
                                   .resync_ns = 3600 * KV_NS_PER_S,
                                   .idle_ns = 5 * KV_NS_PER_S,
                                   .stale_ns = env->stale_after_ms * KV_NS_PER_MS,
                                   .forget_ns = env->forget_after_ms * KV_NS_PER_MS};
}

uint64_t ki_listener_new_generation(struct ki_listener_env *env)
{
    return atomic_fetch_add_explicit(&env->generations, 1, memory_order_relaxed) + 1;
}

/* A dump that copies the blocks sees the change. */
static void begin_generation(void *arg)
{
    struct ki_listener *l = arg;

    l->generation = ki_listener_new_generation(l->env);
}

/* Return how log lines call the instance. NULL: out of memory. */
static char *who(const struct ki_registration *registration)
{
    char digits[KV_INSTANCE_DIGITS], quoted[KV_INSTANCE_QUOTED];

    return strdup(
        kv_log_quote(quoted, sizeof(quoted),
                     kv_instance_text(registration->instance, registration->name, digits)));
}

int ki_listener_create(struct ki_listener_env *env, const struct ki_registration *registration,
                       struct ki_model *model, struct ki_listener **ret)
{
    struct ki_listener *l = calloc(1, sizeof(*l));
    struct ki_stream_opts opts = stream_opts(env, registration->replay_endpoint != NULL);
    int rc = -ENOMEM;

    if (!l)
        return -ENOMEM;
    pthread_mutex_init(&l->lock, NULL);
    pthread_mutex_init(&l->turn, NULL);
    pthread_mutex_init(&l->gate, NULL);
    atomic_init(&l->refs, 1);
    l->env = env;
    l->instance = registration->instance;
    l->rank = registration->rank;
    l->epoll_fd = -1;
    l->version = registration->version;
    l->by_peer = registration->by_peer;
    l->num_blocks = registration->num_blocks ? registration->num_blocks : env->worker_blocks;
    l->told_blocks = registration->num_blocks;
    l->has_publisher = registration->has_publisher;
    l->publisher = registration->publisher;
    l->fed = registration->fed;
    ki_backlog_init(&l->backlog);
    l->generation = ki_listener_new_generation(env);
    l->who = who(registration);
    l->endpoint = strdup(registration->endpoint);
    if (!l->who || !l->endpoint)
        goto fail;
    if (registration->replay_endpoint) {
        l->replay_endpoint = strdup(registration->replay_endpoint);
        if (!l->replay_endpoint)
            goto fail;
    }
    ki_target_init(&l->target, l->fed ? NULL : l->endpoint);
    ki_target_init(&l->replay_target, l->replay_endpoint);
    if (l->fed && !l->has_publisher) /* the feeder forgets workers that it doesn't hear of */
        opts.forget_ns = 0;
    opts.one_process = l->has_publisher;
    ki_stream_init(&l->stream, &opts);
    rc = ki_applier_init(&l->applier, l->instance, l->rank, model->block_size, l->env->mm_keys);
    if (rc < 0)
        goto fail;
    ki_applier_set_habits(&l->applier, &registration->habits);
    if (l->has_publisher)
        kve_reader_expect(l->applier.reader, l->publisher, l->instance, l->rank);
    l->applier.unordered = l->fed && !l->has_publisher;
    l->applier.who = l->who;
    l->applier.forgets = begin_generation;
    l->applier.forgets_arg = l;
    l->model = model;
    pthread_mutex_lock(&l->lock);
    ki_listener_unlock(l);
    *ret = l;
    return 0;
fail:
    ki_listener_release(l);
    return rc;
}

struct ki_listener *ki_listener_acquire(struct ki_listener *l)
{
    atomic_fetch_add_explicit(&l->refs, 1, memory_order_relaxed);
    return l;
}

void ki_listener_release(struct ki_listener *l)
{
    /* Release pairs with the acquire of the thread that drops the last reference. */
    if (!l || atomic_fetch_sub_explicit(&l->refs, 1, memory_order_acq_rel) != 1)
        return;
    ki_applier_fini(&l->applier);
    ki_model_release(l->model);
    ki_sub_close(&l->sub);
    free(l->held_bytes);
    free(l->who);
    free(l->endpoint);
    free(l->replay_endpoint);
    pthread_mutex_destroy(&l->lock);
    pthread_mutex_destroy(&l->turn);
    pthread_mutex_destroy(&l->gate);
    free(l);
}

/* -- any thread -------------------------------------------------------------------------------- */

void ki_listener_name_rank(struct ki_listener *l)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};

    l->applier.unnamed &= kvi_holder_blocks(l->model->index, holder) == 0;
}

void ki_listener_adopt_rank(struct ki_listener *l, const struct ki_mark *mark)
{
    pthread_mutex_lock(&l->lock);
    if (!ki_applier_note_rank(&l->applier, mark->holder.rank)) {
        kvi_remove_holder(l->model->index, mark->holder);
        ki_stream_lose_contents(&l->stream, kv_now_ns());
    } else if (mark->torn) {
        ki_stream_seed_torn(&l->stream);
    } else {
        ki_stream_seed_cursorless(&l->stream); /* a snapshot may tell the position later */
    }
    ki_listener_unlock(l);
}

bool ki_listener_brings(struct ki_listener *l, uint32_t rank)
{
    bool brings;

    pthread_mutex_lock(&l->lock);
    brings = ki_applier_brings(&l->applier, rank);
    ki_listener_unlock(l);
    return brings;
}

bool ki_listener_retire(struct ki_listener *l, struct ki_mark *ret_position)
{
    const struct kh_stream *s = &l->stream;
    bool known;

    static const uint32_t single[KV_N_TIERS];

    pthread_mutex_lock(&l->lock);
    l->gone = true;
    for (uint32_t i = 0; i < l->applier.n_ranks; i++)
        (void)ki_chunks_set(l->model->chunks, (struct kv_holder){l->instance, l->applier.ranks[i]},
                            single);
    known = ki_stream_has_position(s) || s->before_next;
    *ret_position = (struct ki_mark){
        .holder = {.worker = l->instance, .rank = l->rank},
        .has_position = true,
        .stream_rank = l->rank,
        .sequence = ki_stream_has_position(s) ? s->position : s->before_next - 1,
    };
    ki_listener_unlock(l);
    return known;
}

int ki_listener_set_paused(struct ki_listener *l, bool paused)
{
    int rc = 0;

    pthread_mutex_lock(&l->lock);
    if (l->paused == paused)
        rc = -EALREADY;
    l->paused = paused;
    ki_listener_unlock(l);
    return rc;
}

void ki_listener_set_withdrawn(struct ki_listener *l, bool withdrawn)
{
    pthread_mutex_lock(&l->lock);
    l->withdrawn = withdrawn;
    ki_listener_unlock(l);
}

static enum ki_listener_status status_of(const struct ki_listener *l)
{
    if (l->withdrawn)
        return KI_WITHDRAWN;
    if (l->paused)
        return KI_PAUSED;
    if (l->link == KI_LINK_DOWN)
        return l->last_error[0] ? KI_FAILED : KI_PENDING;
    if (!l->started || l->link == KI_LINK_NEW)
        return KI_PENDING;
    return l->stream.state == KI_STREAM_LIVE ? KI_ACTIVE : KI_REPLAYING;
}

/* -- what /query tells ------------------------------------------------------------------------- */

/* A view that is no news is 0; others have a bit beside their contents. */
#define VIEW_ODD UINT64_C(1)
#define VIEW_STATUS 1  /* shift of the status */
#define VIEW_REASONS 8 /* shift of the reasons */

_Static_assert(KI_UNREGISTERED < 1 << (VIEW_REASONS - VIEW_STATUS), "there is room for the status");

ki_reasons ki_listener_reasons(const struct ki_listener *l)
{
    return ki_stream_reasons(&l->stream) | ki_applier_reasons(&l->applier);
}

ki_reasons ki_listener_reasons_of_replicas(const struct ki_listener *l)
{
    return ki_reasons_told(ki_stream_reasons(&l->stream) |
                               ki_applier_reasons_of_replicas(&l->applier),
                           KI_TOLD_ALWAYS);
}

static void publish(struct ki_listener *l, uint64_t view)
{
    uint64_t before = atomic_load_explicit(&l->view, memory_order_relaxed);

    if (KV_LIKELY(view == before))
        return;
    /* Release pairs with ki_listener_view: whoever sees the view sees the index that it is about. */
    atomic_store_explicit(&l->view, view, memory_order_release);
    if (!view != !before)
        atomic_fetch_add_explicit(&l->model->n_odd, view ? 1 : -1u, memory_order_release);
}

void ki_listener_show(struct ki_listener *l)
{
    enum ki_listener_status status = status_of(l);
    ki_reasons reasons = ki_listener_reasons(l);

    if (l->gone || (status == KI_ACTIVE && !reasons))
        publish(l, 0);
    else
        publish(l, VIEW_ODD | (uint64_t)status << VIEW_STATUS | reasons << VIEW_REASONS);
}

void ki_listener_show_loss(struct ki_listener *l)
{
    publish(l,
            VIEW_ODD | (uint64_t)status_of(l) << VIEW_STATUS | KI_BECAUSE(LEAVING) << VIEW_REASONS);
}

void ki_listener_unlock(struct ki_listener *l)
{
    ki_listener_show(l);
    pthread_mutex_unlock(&l->lock);
}

bool ki_listener_view(const struct ki_listener *l, enum ki_listener_status *ret_status,
                      ki_reasons *ret_reasons)
{
    uint64_t view = atomic_load_explicit(&l->view, memory_order_acquire);

    *ret_status = (enum ki_listener_status)((view & ((1u << VIEW_REASONS) - 1)) >> VIEW_STATUS);
    *ret_reasons = view >> VIEW_REASONS;
    return view != 0;
}

void ki_listener_change_model(struct ki_listener *l, struct ki_model *model)
{
    struct ki_model *old;

    pthread_mutex_lock(&l->lock);
    publish(l, 0); /* counted by the old model; unlocking counts it in the new one */
    old = l->model;
    l->model = model;
    ki_listener_unlock(l);
    ki_model_release(old);
}

/* List the rank's cache groups. Without memory there are none. */
static void list_groups(struct ki_listener *l, struct ki_worker_info *ret)
{
    struct kve_sources *sources = &l->applier.reader->sources;
    struct kve_listed_group groups[KVE_MAX_LISTED];

    if (!sources->groups.n && !sources->told.n)
        return;
    ret->n_groups = kve_sources_list(sources, l->rank, l->model->block_size, groups);
    ret->groups = malloc(KV_MAX(ret->n_groups, 1u) * sizeof(*groups));
    if (ret->groups)
        memcpy(ret->groups, groups, ret->n_groups * sizeof(*groups));
    else
        ret->n_groups = 0;
}

/* Timestamps from this on are in milliseconds: in seconds they would be in the year 5138. */
#define MILLISECONDS 1e11

/* Compare the time of the last batch with the time at which it was applied. */
static void measure_lag(const struct ki_listener *l, struct ki_worker_info *ret)
{
    double published = l->stream.timestamp, lag;

    if (published <= 0 || !l->last_event_ns)
        return;
    if (published < MILLISECONDS)
        published *= 1000;
    lag = (double)l->last_event_ns / KV_NS_PER_MS - published;
    ret->has_lag = lag > -1e15 && lag < 1e15; /* else it is no time at all */
    ret->lag_ms = ret->has_lag ? (int64_t)lag : 0;
}

void ki_listener_info(struct ki_listener *l, struct ki_worker_info *ret)
{
    const struct kh_stream *s = &l->stream;
    const struct ki_apply_stats *a = &l->applier.stats;
    uint64_t now_ns = kv_now_ns();

    pthread_mutex_lock(&l->lock);
    *ret = (struct ki_worker_info){
        .instance = l->instance,
        .rank = l->rank,
        .version = l->version,
        .num_blocks = l->told_blocks,
        .habits = l->applier.habits,
        .learned_report_mode = ki_applier_learned_mode(&l->applier),
        .block_size = l->model->block_size,
        .endpoint = strdup(l->endpoint),
        .replay_endpoint = l->replay_endpoint ? strdup(l->replay_endpoint) : NULL,
        .model = strdup(l->model->name),
        .tenant = strdup(l->model->tenant),
        .status = status_of(l),
        .fed = l->fed,
        .connected = l->link != KI_LINK_DOWN,
        .stale = ki_stream_is_absent(s, now_ns),
        .absent_ms = s->absent_ns && !s->connected
                         ? (now_ns - KV_MIN(s->absent_ns, now_ns)) / KV_NS_PER_MS
                         : 0,
        .last_error = l->last_error[0] ? strdup(l->last_error) : NULL,
        .has_sequence = ki_stream_has_position(s),
        .last_sequence = s->position,
        .last_event_ns = l->last_event_ns,
        .batches = a->batches,
        .events = a->events,
        .blocks = a->blocks,
        .bytes = a->bytes,
        .gaps = s->stats.gaps,
        .missed_batches = s->stats.missed,
        .replays = s->stats.replays,
        .failed_replays = s->stats.failed_replays,
        .replayed_batches = s->stats.replayed,
        .overruns = s->stats.overruns,
        .restarts = s->stats.restarts,
        .absences = s->stats.absences,
        .resyncs = s->stats.resyncs,
        .reopened = l->reopened,
        .duplicates = s->stats.duplicates,
        .malformed = a->malformed,
        .orphans = a->orphans,
        .rejected = a->rejected,
        .held = kvi_holder_blocks(l->model->index, (struct kv_holder){l->instance, l->rank}),
        .left_out = l->applier.left_out,
        .reasons = ki_listener_reasons(l),
        .unnumbered = l->applier.unnumbered,
        .odd_frames = l->odd_frames,
        .event_block_size = l->applier.reader->other_block_size,
        .unknown_media = l->applier.reader->unknown_media,
    };
    memcpy(ret->skipped, a->skipped, sizeof(ret->skipped));
    measure_lag(l, ret);
    list_groups(l, ret);
    ki_listener_unlock(l);
}

/* -- dumps ------------------------------------------------------------------------------------- */

void ki_listener_begin_turn(struct ki_listener *l)
{
    pthread_mutex_lock(&l->gate);
    pthread_mutex_lock(&l->turn);
    pthread_mutex_unlock(&l->gate);
}

int ki_listener_hold(struct ki_listener *l, struct ki_snapshot **ret, uint64_t *ret_generation)
{
    int rc = -ENODATA;

    *ret = NULL;
    ki_listener_begin_turn(l);
    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        rc = ki_snapshot_take(l, ret);
        rc = rc == -ENODATA ? 0 : rc;
        *ret_generation = l->generation;
    }
    if (!rc)
        l->copying++;
    ki_listener_unlock(l);
    pthread_mutex_unlock(&l->turn);
    return rc;
}

bool ki_listener_let_go(struct ki_listener *l, uint64_t generation)
{
    bool valid;

    pthread_mutex_lock(&l->lock);
    valid = !l->gone && l->generation == generation;
    l->copying--;
    ki_listener_unlock(l);
    return valid;
}
