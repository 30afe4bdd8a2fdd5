// SPDX-License-Identifier: Apache-2.0
/* Life of the registry, and registration. tables.h has the tables and locks. */
#include "indexer/registry/registry.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/mix.h"
#include "base/core/xxh.h"
#include "indexer/registry/tables.h"
#include "indexer/zmq/place.h"

#define MAX_THREADS 256
#define LOG_LINES 20 /* log lines a second about registrations */

/* -- life -------------------------------------------------------------------------------------- */

static int open_zmq(struct ki_registry *r, uint32_t threads)
{
    /* One I/O thread moves over a GB/s; a few event threads share one. */
    int io_threads = (int)KV_MIN((threads + 3) / 4, 4U);
    /*
     * Each listener has a SUB, the two ends of its monitor and, during a replay, a DEALER; closed
     * sockets linger for a moment.
     */
    int sockets = (int)KV_MIN((uint64_t)r->max_registrations * 8 + 64, UINT64_C(1000000));

    r->env.zmq = zmq_ctx_new();
    if (!r->env.zmq)
        return -errno;
    if (zmq_ctx_set(r->env.zmq, ZMQ_IO_THREADS, io_threads) ||
        (zmq_ctx_set(r->env.zmq, ZMQ_MAX_SOCKETS, sockets) &&
         zmq_ctx_set(r->env.zmq, ZMQ_MAX_SOCKETS, zmq_ctx_get(r->env.zmq, ZMQ_SOCKET_LIMIT))))
        return -errno;
    return 0;
}

static int start_pumps(struct ki_registry *r, uint32_t threads, struct kv_wake *drained)
{
    char name[16];
    int rc;

    r->pumps = calloc(threads, sizeof(*r->pumps));
    if (!r->pumps)
        return -ENOMEM;
    for (; r->n_pumps < threads; r->n_pumps++) {
        snprintf(name, sizeof(name), "ki-event-%" PRIu32, r->n_pumps);
        rc = ki_pump_create(name, drained, &r->pumps[r->n_pumps]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int ki_registry_create(const struct ki_registry_opts *opts, struct ki_registry **ret)
{
    uint32_t threads = opts->threads ? KV_MIN(opts->threads, (uint32_t)MAX_THREADS) : 4;
    struct ki_registry *r = calloc(1, sizeof(*r));
    int rc;

    if (!r)
        return -ENOMEM;
    pthread_mutex_init(&r->admin, NULL);
    pthread_mutex_init(&r->lock, NULL);
    pthread_mutex_init(&r->copies, NULL);
    pthread_cond_init(&r->left, NULL);
    ki_names_init(&r->names);
    r->allow = opts->allow;
    r->max_registrations = opts->max_registrations ? opts->max_registrations : 4096;
    /* A whole fleet may be unregistered between two questions of a peer, beside an hour's others. */
    r->removals.max = KV_MIN((size_t)r->max_registrations + 4096, (size_t)KI_MAX_REMOVED);
    r->env.replay_timeout_ms = opts->replay_timeout_ms ? opts->replay_timeout_ms : 5000;
    r->env.worker_blocks = opts->worker_blocks;
    r->env.stale_after_ms = opts->stale_after_ms;
    r->env.forget_after_ms = opts->forget_after_ms;
    r->max_blocks = opts->max_blocks;
    r->env.backlog.max_bytes = opts->backlog_bytes ? opts->backlog_bytes : 256u << 20;
    r->env.backlog.max_stream_bytes = r->env.backlog.max_bytes / 4;
    r->env.arriving.max_message = KI_MAX_MESSAGE;
    r->env.arriving.max_bytes = KV_MAX(r->env.backlog.max_bytes, 4 * (uint64_t)KI_MAX_MESSAGE);
    /* Must survive as a JSON number. */
    r->id = (kv_secret() ^ kv_wall_ns()) & ((UINT64_C(1) << 53) - 1);
    r->env.mm_keys = opts->ignore_mm_keys      ? KI_MM_IGNORED
                     : opts->ignore_mm_offsets ? KI_MM_WITHOUT_OFFSETS
                                               : KI_MM_PLACED;
    r->env.lost = ki_registry_note_loss;
    r->env.lost_arg = r;
    atomic_init(&r->env.held, opts->start_held);
    rc = kv_resolver_create(NULL, &r->env.resolver);
    if (rc == 0)
        rc = open_zmq(r, threads);
    if (rc == 0)
        rc = start_pumps(r, threads, opts->drained);
    if (rc < 0) {
        ki_registry_destroy(r);
        return rc;
    }
    *ret = r;
    return 0;
}

void ki_registry_destroy(struct ki_registry *registry)
{
    struct ki_registry *r = registry;

    if (!r)
        return;
    for (uint32_t i = 0; i < r->n_pumps; i++)
        ki_pump_destroy(r->pumps[i]);
    free(r->pumps);
    for (size_t i = 0; i < r->n_listeners; i++)
        ki_listener_release(r->listeners[i]);
    free(r->listeners);
    for (size_t i = 0; i < r->n_models; i++)
        ki_model_release(r->models[i]);
    free(r->models);
    ki_positions_fini(&r->positions);
    ki_removals_fini(&r->removals);
    ki_names_fini(&r->names);
    if (r->env.zmq)
        zmq_ctx_term(r->env.zmq);
    kv_resolver_destroy(r->env.resolver);
    pthread_cond_destroy(&r->left);
    pthread_mutex_destroy(&r->copies);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->admin);
    free(r);
}

void ki_registry_go(struct ki_registry *registry)
{
    atomic_store_explicit(&registry->env.held, false, memory_order_release);
    ki_registry_wake(registry);
}

void ki_registry_await_dump(struct ki_registry *registry)
{
    atomic_store_explicit(&registry->env.awaits_dump, true, memory_order_release);
}

/* -- registering ------------------------------------------------------------------------------- */

/* @replay: an endpoint that is only connected to, for all topics. */
static int check_syntax(const char *text, bool replay, struct kv_error *error)
{
    const char *kind = replay ? "replay endpoint" : "ZMQ endpoint";
    struct ki_place place;
    const char *why = "missing address", *rest;

    if (ki_place_parse(text, &place, &why) == 0 && place.endpoint.scheme != KV_SCHEME_INPROC) {
        if (!replay || (!place.binds && !*place.topic))
            return 0;
        why = "it is connected to, and has no topic";
    }
    if (strncmp(text, "inproc://", 9) == 0) /* sockets of this process only */
        return kv_fail(error, -EINVAL, 0, "invalid %s `%.80s`: inproc:// reaches no other process",
                       kind, text);
    rest = strstr(text, "://");
    if (strcmp(why, "unsupported scheme") == 0 && rest)
        return kv_fail(error, -EINVAL, 0, "invalid %s `%.80s`: %s `%.*s`", kind, text, why,
                       (int)KV_MIN(rest - text, 20), text);
    return kv_fail(error, -EINVAL, 0, "invalid %s `%.80s`: %s", kind, text, why);
}

/*
 * Check @text against the rules. check_syntax has accepted it, and the rules were parsed at the
 * start.
 */
static int check_allowed(const struct ki_registry *r, const char *text, struct kv_error *error)
{
    struct ki_place place;

    if (!r->allow || r->allow->n == 0)
        return 0;
    for (size_t i = 0; i < r->allow->n && ki_place_parse(text, &place, NULL) == 0; i++)
        if (ki_place_is_admitted(r->allow->items[i], &place))
            return 0;
    return kv_fail(error, -EACCES, 0, "endpoint `%.80s` is not allowed (see --allow-endpoint)",
                   text);
}

int ki_registry_check(const struct ki_registry *r, const struct ki_registration *reg,
                      struct kv_error *error)
{
    int rc = reg->fed ? 0 : check_syntax(reg->endpoint, false, error);

    if (rc == 0 && reg->replay_endpoint)
        rc = check_syntax(reg->replay_endpoint, true, error);
    if (rc == 0 && reg->block_size == 0)
        rc = kv_fail(error, -EINVAL, 0, "block_size must be at least 1");
    if (rc == 0 && !reg->fed)
        rc = check_allowed(r, reg->endpoint, error);
    if (rc == 0 && reg->replay_endpoint)
        rc = check_allowed(r, reg->replay_endpoint, error);
    return rc;
}

/* Return the instance as the registration calls it, or as it is known. */
static const char *instance_text(struct ki_registry *r, const struct ki_registration *reg,
                                 char text[KI_INSTANCE_TEXT])
{
    return reg->name ? reg->name : ki_registry_instance_text(r, reg->instance, text);
}

static int check_tables(struct ki_registry *r, const struct ki_registration *reg,
                        const struct ki_model *model, struct kv_error *error)
{
    size_t first, end = ki_instance_range(r, reg->instance, &first);
    char text[KI_INSTANCE_TEXT];

    if (first < end) {
        const struct ki_model *owner = r->listeners[first]->model;

        if (ki_model_compare(owner, reg->model, reg->tenant) != 0)
            return kv_fail(error, -EEXIST, 0,
                           "instance %.60s is already registered for model=%.60s tenant=%.60s",
                           instance_text(r, reg, text), owner->name, owner->tenant);
    }
    if (ki_listener_find(r, reg->instance, reg->rank))
        return kv_fail(error, -EEXIST, 0, "instance %.60s dp_rank %" PRIu32 " already registered",
                       instance_text(r, reg, text), reg->rank);
    if (model && model->block_size != reg->block_size)
        return kv_fail(error, -EEXIST, 0,
                       "block_size mismatch for model=%.60s tenant=%.60s: existing=%" PRIu32
                       ", requested=%" PRIu32,
                       reg->model, reg->tenant, model->block_size, reg->block_size);
    if (r->n_listeners >= r->max_registrations)
        return kv_fail(error, -ENOSPC, 0,
                       "too many registrations (the limit is %" PRIu32
                       "; see --max-registrations and the descriptor limit)",
                       r->max_registrations);
    return 0;
}

static struct ki_pump *least_loaded(struct ki_registry *r)
{
    struct ki_pump *best = r->pumps[0];

    for (uint32_t i = 1; i < r->n_pumps; i++)
        if (ki_pump_load(r->pumps[i]) < ki_pump_load(best))
            best = r->pumps[i];
    return best;
}

/* Listeners of one address share its socket, and so an event thread. */
static struct ki_pump *pump_for(struct ki_registry *r, const struct ki_listener *l)
{
    const char *address = l->target.place.address;

    if (l->target.place.binds)
        return r->pumps[kv_xxh64(address, strlen(address), 0) % r->n_pumps];
    return least_loaded(r);
}

/*
 * Drop a model without listeners and without blocks (/query then reports it as unknown). Blocks of
 * a peer's dump stay until their workers are removed.
 */
void ki_registry_drop_if_empty(struct ki_registry *r, struct ki_model *model)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    if (ki_model_find(r, model->name, model->tenant) != model)
        return; /* another change has dropped it while this one's blocks left */
    for (size_t i = 0; i < r->n_listeners; i++)
        if (r->listeners[i]->model == model)
            return;
    kvi_get_stats(model->index, &stats);
    if (stats.holder_blocks)
        return;
    ki_tables_take_model(r, model);
    ki_model_release(model);
}

/* Return true when another listener of the instance brings @rank's blocks, too. */
static bool is_fed_by_sibling(const struct ki_registry *r, const struct ki_listener *l)
{
    size_t first, end = ki_instance_range(r, l->instance, &first);

    for (; first < end; first++)
        if (ki_listener_brings(r->listeners[first], l->rank))
            return true;
    return false;
}

/* Give the listener the position of an earlier registration, or of a peer. */
static void take_position(struct ki_registry *r, struct ki_listener *l)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};
    bool has_blocks = kvi_holder_blocks(l->model->index, holder) > 0, noted_blocks;
    struct ki_snapshot *snapshot = ki_positions_take_snapshot(&r->positions, holder);
    struct ki_mark mark;
    bool seeded = false;

    if (ki_positions_take(&r->positions, holder, &mark, &noted_blocks) && mark.has_position &&
        mark.stream_rank == l->rank) {
        seeded = noted_blocks && has_blocks && snapshot;
        if (seeded)
            ki_snapshot_give(snapshot, l);
        else
            ki_stream_remember(&l->stream, mark.sequence);
    }
    ki_snapshot_free(snapshot);
    if (seeded)
        return;
    /* Forget blocks of unknown age: the stream, or its replay, brings them again. */
    if (has_blocks && !is_fed_by_sibling(r, l))
        kvi_remove_holder(l->model->index, holder);
}

/* Give the listener the ranks of a peer's dump that have no stream but this one. */
static void take_dumped_ranks(struct ki_registry *r, struct ki_listener *l)
{
    const struct ki_position *p = ki_positions_next(&r->positions, l->instance, NULL), *next;

    for (; p; p = next) {
        struct ki_mark mark = p->mark;
        bool has_blocks = p->has_blocks;

        next = ki_positions_next(&r->positions, l->instance, p);
        if (!has_blocks || (mark.has_position && mark.stream_rank != l->rank))
            continue;
        ki_positions_take(&r->positions, mark.holder, &mark, &has_blocks);
        ki_listener_adopt_rank(l, &mark);
    }
}

/*
 * Forget an instance's blocks in other models' dumps: an instance belongs to one model, so no
 * stream keeps those up to date.
 */
static void forget_elsewhere(struct ki_registry *r, uint64_t instance, const struct ki_model *model)
{
    for (size_t i = r->n_models; i-- > 0;)
        if (r->models[i] != model && kvi_remove_worker(r->models[i]->index, instance) == 0)
            ki_registry_drop_if_empty(r, r->models[i]);
}

/* Return a reference to @known, or make a new model. */
static int model_for(const struct ki_registry *r, const struct ki_registration *reg,
                     struct ki_model *known, struct ki_model **ret)
{
    struct kvi_opts opts = {.size = sizeof(opts), .max_blocks = r->max_blocks};
    struct kvi_index *index;
    int rc;

    if (known) {
        *ret = ki_model_acquire(known);
        return 0;
    }
    rc = kvi_create(&opts, &index);
    if (rc < 0)
        return rc;
    rc = ki_model_create(reg->model, reg->tenant, reg->block_size, index, ret);
    if (rc < 0)
        kvi_destroy(index);
    return rc;
}

int ki_registry_register_locked(struct ki_registry *r, const struct ki_registration *reg,
                                struct kv_error *error)
{
    struct ki_model *known = ki_model_find(r, reg->model, reg->tenant), *model = NULL;
    struct ki_listener *l = NULL;
    int rc = check_tables(r, reg, known, error);

    if (rc < 0)
        return rc;
    rc = ki_tables_reserve(r);
    if (rc == 0)
        rc = model_for(r, reg, known, &model);
    if (rc == 0)
        rc = ki_listener_create(&r->env, reg, model, &l);
    if (!l) {
        ki_model_release(model);
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    }
    rc = ki_registry_note_name(r, reg->instance, reg->name, error);
    if (rc < 0) {
        ki_listener_release(l);
        return rc;
    }
    if (!l->version)
        l->version = ki_registry_next_version(r);
    ki_registry_changed(r);
    forget_elsewhere(r, l->instance, model);
    take_position(r, l);
    take_dumped_ranks(r, l);
    if (!known)
        ki_tables_put_model(r, ki_model_acquire(model));
    ki_tables_put_listener(r, l);
    ki_pump_add(pump_for(r, l), ki_listener_acquire(l));
    return 0;
}

static void log_registered(struct ki_registry *r, const struct ki_registration *reg)
{
    static struct kv_log_rate rate;
    char text[KI_INSTANCE_TEXT], worker[KV_INSTANCE_QUOTED], model[120];

    if (kv_log_allowed(&rate, LOG_LINES))
        kv_log_info("indexer", "worker registered",
                    "worker=%s rank=%" PRIu32 " endpoint=%s model=%s",
                    kv_log_quote(worker, sizeof(worker), instance_text(r, reg, text)), reg->rank,
                    reg->endpoint, kv_log_quote(model, sizeof(model), reg->model));
}

/*
 * Keep a rank that discovery has withdrawn and that is registered as it is: whoever does so has taken it
 * over. Returns false for any other rank.
 */
static bool keep_withdrawn(struct ki_registry *r, const struct ki_registration *reg)
{
    struct ki_listener *l = ki_listener_find(r, reg->instance, reg->rank);
    const char *replay = reg->replay_endpoint ? reg->replay_endpoint : "";
    enum ki_listener_status status;
    ki_reasons reasons;

    if (!l || !ki_listener_view(l, &status, &reasons) || status != KI_WITHDRAWN ||
        ki_model_compare(l->model, reg->model, reg->tenant) != 0 ||
        l->model->block_size != reg->block_size || strcmp(l->endpoint, reg->endpoint) != 0 ||
        strcmp(l->replay_endpoint ? l->replay_endpoint : "", replay) != 0)
        return false;
    ki_listener_set_withdrawn(l, false);
    ki_registry_changed(r);
    return true;
}

int ki_registry_register(struct ki_registry *registry, const struct ki_registration *registration,
                         struct kv_error *error)
{
    int rc = ki_registry_check(registry, registration, error);

    if (rc < 0)
        return rc;
    ki_registry_lock_for(registry, registration->instance);
    if (ki_registry_is_peers(registry, registration))
        rc = ki_registry_note_name(registry, registration->instance, registration->name, error);
    else if (!keep_withdrawn(registry, registration))
        rc = ki_registry_register_locked(registry, registration, error);
    if (rc == 0)
        log_registered(registry, registration);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}
