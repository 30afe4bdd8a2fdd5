// SPDX-License-Identifier: Apache-2.0
/*
 * Two tables, both sorted arrays: models by (name, tenant), listeners by (instance, rank). They are
 * small (thousands), looked up by halving, and already in the order in which they are shown.
 *
 * Two locks. `admin` is held through a whole change (register, unregister, adopt), which may take
 * long, as when a worker's million blocks leave the index. `lock` is held only to look something up
 * or to put it in or take it out, so a query never waits for a change. The tables are written under
 * both, so either suffices for reading. Order: admin, lock, a listener's lock, a pump's.
 */
#include "indexer/registry.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endpoint.h"
#include "base/log.h"
#include "indexer/listener.h"
#include "indexer/model.h"
#include "indexer/positions.h"
#include "indexer/pump.h"

#define MAX_THREADS 256

struct ki_registry {
    struct ki_listener_env env;
    const struct kv_arg_list *allow;
    uint32_t max_registrations;
    struct ki_pump **pumps;
    uint32_t n_pumps;

    pthread_mutex_t admin, lock;
    struct ki_model **models;
    size_t n_models, models_capacity;
    struct ki_listener **listeners;
    size_t n_listeners, listeners_capacity;
    struct ki_positions positions; /* under admin alone */
};

/* -- life
 * ------------------------------------------------------------------------------------------- */

static int open_zmq(struct ki_registry *r, uint32_t threads)
{
    /* One I/O thread moves over a GB/s; a few event threads share one. */
    int io_threads = (int)KV_MIN((threads + 3) / 4, 4);
    /* A SUB and, while a replay runs, a DEALER each; closed ones leave a moment later. */
    int sockets = (int)KV_MIN((uint64_t)r->max_registrations * 4 + 64, 1000000);

    r->env.zmq = zmq_ctx_new();
    if (!r->env.zmq)
        return -errno;
    if (zmq_ctx_set(r->env.zmq, ZMQ_IO_THREADS, io_threads) ||
        (zmq_ctx_set(r->env.zmq, ZMQ_MAX_SOCKETS, sockets) &&
         zmq_ctx_set(r->env.zmq, ZMQ_MAX_SOCKETS, zmq_ctx_get(r->env.zmq, ZMQ_SOCKET_LIMIT))))
        return -errno;
    return 0;
}

static int start_pumps(struct ki_registry *r, uint32_t threads)
{
    char name[16];
    int rc;

    r->pumps = calloc(threads, sizeof(*r->pumps));
    if (!r->pumps)
        return -ENOMEM;
    for (; r->n_pumps < threads; r->n_pumps++) {
        snprintf(name, sizeof(name), "ki-event-%" PRIu32, r->n_pumps);
        rc = ki_pump_create(name, &r->pumps[r->n_pumps]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int ki_registry_create(const struct ki_registry_opts *opts, struct ki_registry **ret)
{
    uint32_t threads = opts->threads ? KV_MIN(opts->threads, MAX_THREADS) : 4;
    struct ki_registry *r = calloc(1, sizeof(*r));
    int rc;

    if (!r)
        return -ENOMEM;
    pthread_mutex_init(&r->admin, NULL);
    pthread_mutex_init(&r->lock, NULL);
    r->allow = opts->allow;
    r->max_registrations = opts->max_registrations ? opts->max_registrations : 4096;
    r->env.replay_timeout_ms = opts->replay_timeout_ms ? opts->replay_timeout_ms : 5000;
    atomic_init(&r->env.held, opts->start_held);
    rc = open_zmq(r, threads);
    if (rc == 0)
        rc = start_pumps(r, threads);
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
    if (r->env.zmq)
        zmq_ctx_term(r->env.zmq);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->admin);
    free(r);
}

static void wake_pumps(struct ki_registry *r)
{
    for (uint32_t i = 0; i < r->n_pumps; i++)
        ki_pump_wake(r->pumps[i]);
}

void ki_registry_go(struct ki_registry *registry)
{
    atomic_store_explicit(&registry->env.held, false, memory_order_release);
    wake_pumps(registry);
}

/* -- tables
 * ------------------------------------------------------------------------------------------ */

/* An array of pointers with room for one more than @n; NULL: out of memory, and nothing has
 * changed. */
static void *grow(void *items, size_t n, size_t *capacity)
{
    size_t more = *capacity ? *capacity * 2 : 16;
    void *grown;

    if (n < *capacity)
        return items;
    grown = realloc(items, more * sizeof(void *));
    if (grown)
        *capacity = more;
    return grown;
}

static size_t model_bound(const struct ki_registry *r, const char *name, const char *tenant)
{
    size_t lo = 0, hi = r->n_models;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (ki_model_compare(r->models[mid], name, tenant) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static struct ki_model *model_find(const struct ki_registry *r, const char *name,
                                   const char *tenant)
{
    size_t at = model_bound(r, name, tenant);

    if (at < r->n_models && ki_model_compare(r->models[at], name, tenant) == 0)
        return r->models[at];
    return NULL;
}

/* First listener not before (instance, rank). */
static size_t listener_bound(const struct ki_registry *r, uint64_t instance, uint32_t rank)
{
    size_t lo = 0, hi = r->n_listeners;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct ki_listener *l = r->listeners[mid];

        if (l->instance < instance || (l->instance == instance && l->rank < rank))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The listeners of an instance are neighbours: [*ret_first, returned). */
static size_t instance_range(const struct ki_registry *r, uint64_t instance, size_t *ret_first)
{
    size_t at = listener_bound(r, instance, 0);

    *ret_first = at;
    while (at < r->n_listeners && r->listeners[at]->instance == instance)
        at++;
    return at;
}

static struct ki_listener *listener_find(const struct ki_registry *r, uint64_t instance,
                                         uint32_t rank)
{
    size_t at = listener_bound(r, instance, rank);

    if (at < r->n_listeners && r->listeners[at]->instance == instance &&
        r->listeners[at]->rank == rank)
        return r->listeners[at];
    return NULL;
}

struct ki_model *ki_registry_model(struct ki_registry *registry, const char *name,
                                   const char *tenant)
{
    struct ki_model *model;

    pthread_mutex_lock(&registry->lock);
    model = model_find(registry, name, tenant);
    if (model)
        ki_model_acquire(model);
    pthread_mutex_unlock(&registry->lock);
    return model;
}

long ki_registry_models(struct ki_registry *registry, struct ki_model ***ret)
{
    struct ki_model **models;
    size_t n;

    pthread_mutex_lock(&registry->lock);
    n = registry->n_models;
    models = calloc(n + 1, sizeof(struct ki_model *));
    for (size_t i = 0; models && i < n; i++)
        models[i] = ki_model_acquire(registry->models[i]);
    pthread_mutex_unlock(&registry->lock);
    if (!models)
        return -ENOMEM;
    *ret = models;
    return (long)n;
}

/* -- registering
 * --------------------------------------------------------------------------------------- */

static int check_syntax(const char *text, const char *kind, struct kv_error *error)
{
    struct kv_endpoint endpoint;
    const char *why = "missing address", *rest;

    if (kv_endpoint_parse(text, &endpoint, &why) == 0)
        return 0;
    rest = strstr(text, "://");
    if (strcmp(why, "unsupported scheme") == 0 && rest)
        return kv_fail(error, -EINVAL, 0, "invalid %s `%.80s`: %s `%.*s`", kind, text, why,
                       (int)KV_MIN(rest - text, 20), text);
    return kv_fail(error, -EINVAL, 0, "invalid %s `%.80s`: %s", kind, text, why);
}

static int check_allowed(const struct ki_registry *r, const char *text, struct kv_error *error)
{
    if (!r->allow || r->allow->n == 0)
        return 0;
    for (size_t i = 0; i < r->allow->n; i++)
        if (kv_pattern_match(r->allow->items[i], text))
            return 0;
    return kv_fail(error, -EACCES, 0, "endpoint `%.80s` is not allowed (see --allow-endpoint)",
                   text);
}

static int check_request(const struct ki_registry *r, const struct ki_registration *reg,
                         struct kv_error *error)
{
    int rc = check_syntax(reg->endpoint, "ZMQ endpoint", error);

    if (rc == 0 && reg->replay_endpoint)
        rc = check_syntax(reg->replay_endpoint, "replay endpoint", error);
    if (rc == 0 && reg->block_size == 0)
        rc = kv_fail(error, -EINVAL, 0, "block_size must be at least 1");
    if (rc == 0)
        rc = check_allowed(r, reg->endpoint, error);
    if (rc == 0 && reg->replay_endpoint)
        rc = check_allowed(r, reg->replay_endpoint, error);
    return rc;
}

static int check_tables(const struct ki_registry *r, const struct ki_registration *reg,
                        const struct ki_model *model, struct kv_error *error)
{
    size_t first, end = instance_range(r, reg->instance, &first);

    if (first < end) {
        const struct ki_model *owner = r->listeners[first]->model;

        if (ki_model_compare(owner, reg->model, reg->tenant) != 0)
            return kv_fail(error, -EEXIST, 0,
                           "instance %" PRIu64
                           " is already registered for model=%.60s tenant=%.60s",
                           reg->instance, owner->name, owner->tenant);
    }
    if (listener_find(r, reg->instance, reg->rank))
        return kv_fail(error, -EEXIST, 0,
                       "instance %" PRIu64 " dp_rank %" PRIu32 " already registered", reg->instance,
                       reg->rank);
    if (model && model->block_size != reg->block_size)
        return kv_fail(error, -EEXIST, 0,
                       "block_size mismatch for model=%.60s tenant=%.60s: existing=%" PRIu32
                       ", requested=%" PRIu32,
                       reg->model, reg->tenant, model->block_size, reg->block_size);
    if (r->n_listeners >= r->max_registrations)
        return kv_fail(error, -ENOSPC, 0,
                       "too many registrations (the limit is %" PRIu32 "; see --max-registrations)",
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

/* Where an earlier registration, or a peer, had got to in this stream. */
static void take_position(struct ki_registry *r, struct ki_listener *l)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};
    struct ki_position position;

    if (!ki_positions_take(&r->positions, holder, &position))
        return;
    if (position.has_blocks && kvi_holder_blocks(l->model->index, holder))
        ki_stream_seed(&l->stream, position.mark.sequence, position.mark.timestamp,
                       position.mark.partial);
    else
        ki_stream_remember(&l->stream, position.mark.sequence);
}

/* Put both in; a reserved table can't fail. */
static void publish(struct ki_registry *r, struct ki_listener *l, bool new_model)
{
    size_t at;

    pthread_mutex_lock(&r->lock);
    if (new_model) {
        at = model_bound(r, l->model->name, l->model->tenant);
        memmove(r->models + at + 1, r->models + at, (r->n_models - at) * sizeof(*r->models));
        r->models[at] = ki_model_acquire(l->model);
        r->n_models++;
    }
    at = listener_bound(r, l->instance, l->rank);
    memmove(r->listeners + at + 1, r->listeners + at,
            (r->n_listeners - at) * sizeof(*r->listeners));
    r->listeners[at] = l;
    r->n_listeners++;
    pthread_mutex_unlock(&r->lock);
}

/* Under `lock`: readers look at what realloc moves. */
static int reserve_tables(struct ki_registry *r)
{
    void *models, *listeners = NULL;

    pthread_mutex_lock(&r->lock);
    models = grow(r->models, r->n_models, &r->models_capacity);
    if (models) {
        r->models = models;
        listeners = grow(r->listeners, r->n_listeners, &r->listeners_capacity);
        if (listeners)
            r->listeners = listeners;
    }
    pthread_mutex_unlock(&r->lock);
    return listeners ? 0 : -ENOMEM;
}

/* A reference to @known, or a new model. */
static int model_for(const struct ki_registration *reg, struct ki_model *known,
                     struct ki_model **ret)
{
    if (!known)
        return ki_model_create(reg->model, reg->tenant, reg->block_size, NULL, ret);
    *ret = ki_model_acquire(known);
    return 0;
}

static int register_locked(struct ki_registry *r, const struct ki_registration *reg,
                           struct kv_error *error)
{
    struct ki_model *known = model_find(r, reg->model, reg->tenant), *model = NULL;
    struct ki_listener *l = NULL;
    int rc = check_tables(r, reg, known, error);

    if (rc < 0)
        return rc;
    rc = reserve_tables(r);
    if (rc == 0)
        rc = model_for(reg, known, &model);
    if (rc == 0)
        rc = ki_listener_create(&r->env, reg, model, &l);
    if (!l) {
        ki_model_release(model);
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    }
    take_position(r, l);
    publish(r, l, !known);
    ki_pump_add(least_loaded(r), ki_listener_acquire(l));
    return 0;
}

int ki_registry_register(struct ki_registry *registry, const struct ki_registration *registration,
                         struct kv_error *error)
{
    int rc = check_request(registry, registration, error);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&registry->admin);
    rc = register_locked(registry, registration, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}

/* -- unregistering
 * --------------------------------------------------------------------------------------- */

/* A model that nobody feeds and that has nothing to say is gone (and /query says so). What a peer's
 * dump brought stays until its workers are removed. */
static void drop_model_if_empty(struct ki_registry *r, struct ki_model *model)
{
    struct kvi_stats stats;
    size_t at;

    for (size_t i = 0; i < r->n_listeners; i++)
        if (r->listeners[i]->model == model)
            return;
    kvi_get_stats(model->index, &stats);
    if (stats.holder_blocks)
        return;
    pthread_mutex_lock(&r->lock);
    at = model_bound(r, model->name, model->tenant);
    memmove(r->models + at, r->models + at + 1, (r->n_models - at - 1) * sizeof(*r->models));
    r->n_models--;
    pthread_mutex_unlock(&r->lock);
    ki_model_release(model);
}

/* Blocks of ranks that a leaving listener brought and that no other listener of the instance feeds.
 */
static void remove_ranks(struct ki_registry *r, const struct ki_listener *l)
{
    for (uint32_t i = 0; i < l->applier.n_ranks; i++) {
        struct kv_holder holder = {.worker = l->instance, .rank = l->applier.ranks[i]};

        if (!listener_find(r, l->instance, holder.rank))
            kvi_remove_holder(l->model->index, holder);
    }
}

/* Listeners [first, end) of one instance leave, all of them or one of several. */
static void retire_range(struct ki_registry *r, size_t first, size_t end, bool whole)
{
    size_t n = end - first;
    struct ki_listener *one = r->listeners[first];
    struct ki_model *model = ki_model_acquire(one->model);
    uint64_t instance = one->instance;
    struct ki_watermark position;

    for (size_t i = first; i < end; i++)
        if (ki_listener_retire(r->listeners[i], &position))
            ki_positions_note(&r->positions, &position, false);
    for (; n; n--) {
        struct ki_listener *l = r->listeners[first];

        pthread_mutex_lock(&r->lock);
        memmove(r->listeners + first, r->listeners + first + 1,
                (r->n_listeners - first - 1) * sizeof(struct ki_listener *));
        r->n_listeners--;
        pthread_mutex_unlock(&r->lock);
        if (!whole)
            remove_ranks(r, l);
        ki_pump_wake(l->pump);
        ki_listener_release(l);
    }
    if (whole) {
        kvi_remove_worker(model->index, instance);
        ki_positions_blocks_left(&r->positions, instance, NULL);
    }
    drop_model_if_empty(r, model);
    ki_model_release(model);
}

/* An instance without a listener: its blocks, if any, came with a peer's dump. */
static int remove_dumped(struct ki_registry *r, uint64_t instance, const char *name,
                         const char *tenant, const uint32_t *rank)
{
    int found = -ENOENT;

    for (size_t i = r->n_models; i-- > 0;) {
        struct ki_model *model = r->models[i];
        struct kv_holder holder = {.worker = instance, .rank = rank ? *rank : 0};
        int rc;

        if (strcmp(model->name, name) != 0 || (tenant && strcmp(model->tenant, tenant) != 0))
            continue;
        rc = rank ? kvi_remove_holder(model->index, holder)
                  : kvi_remove_worker(model->index, instance);
        if (rc < 0)
            continue;
        found = 0;
        ki_positions_blocks_left(&r->positions, instance, rank);
        drop_model_if_empty(r, model);
    }
    return found;
}

static int unregister_locked(struct ki_registry *r, uint64_t instance, const char *name,
                             const char *tenant, const uint32_t *rank, struct kv_error *error)
{
    size_t first, end = instance_range(r, instance, &first);
    const struct ki_model *owner;
    bool whole;

    if (first == end) {
        if (remove_dumped(r, instance, name, tenant, rank) == 0)
            return 0;
        return kv_fail(error, -ENOENT, 0, "instance %" PRIu64 " not found", instance);
    }
    owner = r->listeners[first]->model;
    if (strcmp(owner->name, name) != 0 || (tenant && strcmp(owner->tenant, tenant) != 0))
        return kv_fail(error, -ENOENT, 0,
                       "instance %" PRIu64 " is registered for model=%.60s tenant=%.60s", instance,
                       owner->name, owner->tenant);
    whole = !rank || end - first == 1;
    if (rank) {
        if (!listener_find(r, instance, *rank))
            return kv_fail(error, -ENOENT, 0, "instance %" PRIu64 " dp_rank %" PRIu32 " not found",
                           instance, *rank);
        first = listener_bound(r, instance, *rank);
        end = first + 1;
    }
    retire_range(r, first, end, whole);
    return 0;
}

int ki_registry_unregister(struct ki_registry *registry, uint64_t instance, const char *model,
                           const char *tenant, const uint32_t *rank, struct kv_error *error)
{
    int rc;

    pthread_mutex_lock(&registry->admin);
    rc = unregister_locked(registry, instance, model, tenant, rank, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}

/* -- looking at listeners
 * ------------------------------------------------------------------------------- */

/* A copy of the table with references, so that nobody waits for `lock` while a batch is applied. */
static long snapshot(struct ki_registry *r, struct ki_listener ***ret)
{
    struct ki_listener **listeners;
    size_t n;

    pthread_mutex_lock(&r->lock);
    n = r->n_listeners;
    listeners = calloc(n + 1, sizeof(struct ki_listener *));
    for (size_t i = 0; listeners && i < n; i++)
        listeners[i] = ki_listener_acquire(r->listeners[i]);
    pthread_mutex_unlock(&r->lock);
    if (!listeners)
        return -ENOMEM;
    *ret = listeners;
    return (long)n;
}

static void snapshot_free(struct ki_listener **listeners, long n)
{
    for (long i = 0; i < n; i++)
        ki_listener_release(listeners[i]);
    free(listeners);
}

const char *ki_listener_status_name(enum ki_listener_status status)
{
    static const char *const names[] = {"pending", "active", "replaying", "paused", "failed"};

    return (size_t)status < KV_COUNT(names) ? names[status] : "unknown";
}

long ki_registry_workers(struct ki_registry *registry, struct ki_worker_info **ret)
{
    struct ki_listener **listeners;
    struct ki_worker_info *infos;
    long n = snapshot(registry, &listeners);
    bool complete = true;

    if (n < 0)
        return n;
    infos = calloc((size_t)n + 1, sizeof(*infos));
    for (long i = 0; infos && i < n; i++) {
        ki_listener_info(listeners[i], &infos[i]);
        complete &= infos[i].endpoint && infos[i].model && infos[i].tenant;
    }
    snapshot_free(listeners, n);
    if (!infos || !complete) {
        if (infos)
            ki_worker_infos_free(infos, n);
        return -ENOMEM;
    }
    *ret = infos;
    return n;
}

void ki_worker_infos_free(struct ki_worker_info *infos, long n)
{
    for (long i = 0; i < n; i++) {
        free(infos[i].endpoint);
        free(infos[i].replay_endpoint);
        free(infos[i].model);
        free(infos[i].tenant);
        free(infos[i].last_error);
    }
    free(infos);
}

static int set_paused(struct ki_registry *r, uint64_t instance, const uint32_t *rank, bool paused)
{
    struct ki_listener **listeners;
    long n = snapshot(r, &listeners);
    int rc = -ENOENT;

    if (n < 0)
        return (int)n;
    for (long i = 0; i < n; i++) {
        int one;

        if (listeners[i]->instance != instance || (rank && listeners[i]->rank != *rank))
            continue;
        one = ki_listener_set_paused(listeners[i], paused);
        if (rc != 0)
            rc = one;
    }
    snapshot_free(listeners, n);
    wake_pumps(r);
    return rc;
}

int ki_registry_pause(struct ki_registry *registry, uint64_t instance, const uint32_t *rank)
{
    return set_paused(registry, instance, rank, true);
}

int ki_registry_resume(struct ki_registry *registry, uint64_t instance, const uint32_t *rank)
{
    return set_paused(registry, instance, rank, false);
}

long ki_registry_watermarks(struct ki_registry *registry, const struct ki_model *model,
                            struct ki_watermark **ret)
{
    struct ki_listener **listeners;
    struct ki_watermark *items = NULL;
    size_t n = 0, capacity = 0;
    long n_listeners = snapshot(registry, &listeners);
    bool ok = true;

    if (n_listeners < 0)
        return n_listeners;
    for (long i = 0; ok && i < n_listeners; i++)
        if (ki_listener_feeds(listeners[i], model))
            ok = ki_listener_watermarks(listeners[i], &items, &n, &capacity);
    snapshot_free(listeners, n_listeners);
    if (!ok) {
        free(items);
        return -ENOMEM;
    }
    *ret = items;
    return (long)n;
}

/* -- adopting a peer's index
 * ------------------------------------------------------------------------------ */

static int check_adoptable(const struct ki_registry *r, const struct ki_model *known,
                           uint32_t block_size, struct kv_error *error)
{
    struct kvi_stats stats;

    if (!atomic_load_explicit(&r->env.held, memory_order_relaxed))
        return kv_fail(error, -EBUSY, 0, "live events are being applied already");
    if (!known)
        return 0;
    if (known->block_size != block_size)
        return kv_fail(error, -EEXIST, 0,
                       "block_size mismatch for model=%.60s tenant=%.60s: existing=%" PRIu32
                       ", dumped=%" PRIu32,
                       known->name, known->tenant, known->block_size, block_size);
    kvi_get_stats(known->index, &stats);
    if (stats.holder_blocks)
        return kv_fail(error, -EEXIST, 0, "model=%.60s tenant=%.60s has blocks already",
                       known->name, known->tenant);
    return 0;
}

static const struct ki_watermark *mark_of(const struct ki_watermark *marks, size_t n,
                                          const struct ki_listener *l)
{
    for (size_t i = 0; i < n; i++)
        if (marks[i].holder.worker == l->instance && marks[i].holder.rank == l->rank)
            return &marks[i];
    return NULL;
}

/* The streams go on where the dump ends. They are held, so none is ahead of it. */
static void move_listener(struct ki_listener *l, struct ki_model *model,
                          const struct ki_watermark *mark)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};
    struct ki_model *old;

    pthread_mutex_lock(&l->lock);
    old = l->model;
    l->model = ki_model_acquire(model);
    if (mark)
        ki_stream_seed(&l->stream, mark->sequence, mark->timestamp, mark->partial);
    else if (kvi_holder_blocks(model->index, holder))
        ki_stream_seed_cursorless(&l->stream);
    pthread_mutex_unlock(&l->lock);
    ki_model_release(old);
}

/* A rank without a registration: its only feeder's, or of a worker that may register later. */
static void adopt_stray_mark(struct ki_registry *r, const struct ki_watermark *mark)
{
    size_t first, end = instance_range(r, mark->holder.worker, &first);

    if (listener_find(r, mark->holder.worker, mark->holder.rank))
        return;
    if (end - first == 1) {
        pthread_mutex_lock(&r->listeners[first]->lock);
        ki_applier_note_rank(&r->listeners[first]->applier, mark->holder.rank);
        pthread_mutex_unlock(&r->listeners[first]->lock);
        return;
    }
    ki_positions_note(&r->positions, mark, true);
}

static void replace_model(struct ki_registry *r, struct ki_model *known, struct ki_model *model)
{
    size_t at = model_bound(r, model->name, model->tenant);

    pthread_mutex_lock(&r->lock);
    if (!known) {
        memmove(r->models + at + 1, r->models + at, (r->n_models - at) * sizeof(*r->models));
        r->n_models++;
    }
    r->models[at] = model;
    pthread_mutex_unlock(&r->lock);
    ki_model_release(known);
}

static int adopt_locked(struct ki_registry *r, const char *name, const char *tenant,
                        uint32_t block_size, struct kvi_index *index,
                        const struct ki_watermark *marks, size_t n, struct kv_error *error)
{
    struct ki_model *known = model_find(r, name, tenant), *model = NULL;
    int rc = check_adoptable(r, known, block_size, error);

    if (rc < 0)
        return rc;
    rc = reserve_tables(r);
    if (rc == 0)
        rc = ki_model_create(name, tenant, block_size, index, &model);
    if (rc < 0)
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    for (size_t i = 0; i < r->n_listeners; i++)
        if (r->listeners[i]->model == known)
            move_listener(r->listeners[i], model, mark_of(marks, n, r->listeners[i]));
    for (size_t i = 0; i < n; i++)
        adopt_stray_mark(r, &marks[i]);
    replace_model(r, known, model);
    return 0;
}

int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index,
                      const struct ki_watermark *watermarks, size_t n, struct kv_error *error)
{
    int rc;

    if (block_size == 0)
        return kv_fail(error, -EINVAL, 0, "block_size must be at least 1");
    pthread_mutex_lock(&registry->admin);
    rc = adopt_locked(registry, model, tenant, block_size, index, watermarks, n, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}
