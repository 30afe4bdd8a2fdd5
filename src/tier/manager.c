// SPDX-License-Identifier: Apache-2.0
/* Making and unmaking a manager, caches. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/log.h"
#include "bm/registry.h"
#include "tier/manager.h"

#define ALIGN 4096u
#define LET_GO_NS \
    KV_NS_PER_S /* for calls into an object store that hang, before they are left behind */

/* ---- forks ---- */

static _Atomic uint32_t forks;

static void count_fork(void)
{
    atomic_fetch_add(&forks, 1);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

int kvbm_manager_usable(const struct kvbm_manager *m)
{
    if (!m)
        return -EINVAL;
    return m->forks == atomic_load(&forks) ? 0 : -ECHILD;
}

/* ---- options ---- */

static const char *what_is_wrong(const struct kvbm_manager_opts *o)
{
    if (!o->block)
        return "no block layout";
    if ((o->disk || o->object) && (!o->fingerprint || !*o->fingerprint))
        return "a disk or object tier needs a fingerprint of the model";
    if (o->disk && !o->disk_bytes)
        return "a disk tier needs a size";
    if (!o->host_bytes && !o->disk && !o->object)
        return "no tier";
    if (o->host_policy.policy > KVBM_POLICY_NEVER || o->disk_policy.policy > KVBM_POLICY_NEVER ||
        o->object_policy.policy > KVBM_POLICY_NEVER)
        return "no such policy";
    if (o->host_policy.threshold > KVBM_SKETCH_MAX || o->disk_policy.threshold > KVBM_SKETCH_MAX ||
        o->object_policy.threshold > KVBM_SKETCH_MAX)
        return "a threshold must be 1 to 15";
    if (o->object_when_evicted && (o->object_write_through || (!o->host_bytes && !o->disk)))
        return "object_when_evicted needs a host or disk tier, and no object_write_through";
    return NULL;
}

static void set_policy(struct kvbm_tier_policy *policy)
{
    if (policy->policy == KVBM_POLICY_DEFAULT)
        policy->policy = KVBM_POLICY_PRESENCE;
    if (!policy->threshold)
        policy->threshold = 2;
}

/*
 * The blocks of a prompt come into a tier and are let go in any order: in moves that overtake each other, in an index that
 * is read again, one by one as they are fetched. So that its end goes before its beginning, LRU is one of leaves.
 */
static void set_eviction(enum kvbm_eviction *eviction)
{
    if (*eviction == KVBM_EVICT_LRU)
        *eviction = KVBM_EVICT_LINEAGE;
}

static void set_defaults(struct kvbm_manager_opts *o)
{
    set_eviction(&o->host_eviction);
    set_eviction(&o->disk_eviction);
    o->key_len = o->key_len ? o->key_len : 8;
    o->staging_blocks = o->staging_blocks ? o->staging_blocks : 64;
    o->object_blocks = o->object_blocks ? o->object_blocks : 100000;
    o->object_timeout_ms = o->object_timeout_ms ? o->object_timeout_ms : 10000;
    o->max_offload = o->max_offload ? o->max_offload : 16384;
    o->max_jobs = o->max_jobs ? o->max_jobs : 1024;
    set_policy(&o->host_policy);
    set_policy(&o->disk_policy);
    set_policy(&o->object_policy);
}

/* ---- tiers ---- */

static int pool_create(struct kvbm_manager *m, enum kv_tier tier, uint64_t n,
                       enum kvbm_eviction eviction, struct kvbm_pool **ret)
{
    const struct kvbm_pool_opts opts = {.size = sizeof(opts),
                                        .tier = tier,
                                        .n_blocks = (uint32_t)n,
                                        .block_size = m->opts.block->page_size,
                                        .eviction = eviction,
                                        .reject_duplicates = true};

    return n && n < INT32_MAX ? kvbm_pool_create(m->registry, &opts, ret) : -EINVAL;
}

static int open_host(struct kvbm_manager *m)
{
    struct kvbm_layout_config config = {0};
    struct kvbm_layout_shape shape;
    struct kvbm_view view;
    uint64_t n;
    int rc;

    memcpy(&config, m->opts.block, KV_MIN(m->opts.block->size, sizeof(config)));
    config.size = sizeof(config);
    config.kind = KVBM_FULLY_CONTIGUOUS;
    config.alignment = ALIGN;
    config.num_blocks = 2;
    memset(config.tensor_shape, 0, sizeof(config.tensor_shape));
    rc = kvbm_layout_compute(&config, &shape);
    if (rc < 0)
        return rc;
    n = kvbm_staging(m) ? m->opts.staging_blocks : m->opts.host_bytes / shape.block_stride;
    config.num_blocks =
        n + 1; /* so that the last one has its padding, too: whole blocks are read and written */
    m->block_bytes = shape.natural_block_bytes;
    m->stride = shape.block_stride;
    m->host_blocks = n;
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage),
        .kind = m->opts.host_pinned ? KVBM_STORAGE_PINNED : KVBM_STORAGE_SYSTEM,
        .huge_pages = m->opts.huge_pages,
        /* Now, and by several: pages that a copy touches first make it many times slower. */
        .touch_threads = kvbm_staging(m)        ? 0
                         : m->opts.copy_threads ? m->opts.copy_threads
                                                : 8,
        .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);

    rc = n ? kvbm_layout_allocate(&config, &allocator, &m->layout) : -EINVAL;
    if (rc == 0)
        rc = kvbm_layout_block(m->layout, 0, &view);
    m->move_blocks = (uint32_t)KV_MAX(KV_MIN(n / 16, (uint64_t)KVBM_BATCH), UINT64_C(1));
    if (rc == 0) {
        m->host_base = view.addr;
        rc = pool_create(m, KV_TIER_HOST, n, m->opts.host_eviction, &m->host);
    }
    return rc;
}

/* What makes the same key other bytes. */
static void fingerprint(const struct kvbm_manager *m, char *to, size_t size)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(m->layout);

    snprintf(to, size, "%s|layers=%u outer=%u page=%u inner=%u width=%u dtype=%d order=%d heads=%u",
             m->opts.fingerprint, c->num_layers, c->outer_dim, c->page_size, c->inner_dim,
             c->dtype_width_bytes, (int)c->dtype, (int)c->order, c->num_heads);
}

struct reload {
    struct kvbm_manager *m;
    struct kvbm_mutable *blocks; /* by slot */
    uint64_t refused;
};

static int reload_one(void *arg, const struct kvbm_disk_record *record)
{
    struct reload *reload = arg;
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = record->group,
                               .keys = record->key,
                               .parent = record->parent,
                               .position = record->position};
    struct kvbm_complete complete;
    struct kvbm_immutable held;

    if (kvbm_pool_complete(reload->m->disk, &reload->blocks[record->slot], 1, &chain, &complete)) {
        reload->refused++; /* the same key twice, or at two positions */
        return 0;
    }
    kvbm_pool_register(reload->m->disk, &complete, 1, &held);
    kvbm_immutable_release(&held);
    return 0;
}

/* A new pool hands its blocks out in the order of their numbers. */
static int reload_disk(struct kvbm_manager *m, uint32_t n)
{
    struct reload reload = {.m = m, .blocks = calloc(n, sizeof(*reload.blocks))};
    uint64_t start = kv_now_ns();
    int rc = reload.blocks ? kvbm_pool_allocate(m->disk, n, reload.blocks, NULL) : -ENOMEM;
    long found = 0;

    if (rc == 0) {
        found = kvbm_disk_each(m->disk_store, reload_one, &reload);
        kvbm_pool_release_mutable(m->disk, reload.blocks, n); /* holes are fine */
        kv_log_info("kvbm", "disk tier opened", "blocks=%ld refused=%" PRIu64 " ms=%" PRIu64, found,
                    reload.refused, (kv_now_ns() - start) / KV_NS_PER_MS);
    }
    free(reload.blocks);
    return rc < 0 ? rc : found < 0 ? (int)found : 0;
}

/*
 * Pages that are pinned for the kernel are copied at fork, all at once: a child would take as much memory again, and
 * seconds. It may not use the manager anyway, so it gets none of them.
 */
static void keep_from_children(struct kvbm_manager *m)
{
    struct kvbm_disk_stats stats;

    kvbm_disk_get_stats(m->disk_store, &stats);
    if (stats.registered_bytes &&
        madvise(kvbm_host_address(m, 0), stats.registered_bytes, MADV_DONTFORK) < 0)
        kv_log_warn("kvbm", "registered memory stays with children: each fork copies it",
                    "errno=%d", errno);
}

static int open_disk(struct kvbm_manager *m)
{
    uint64_t n = m->opts.disk_bytes / m->stride;
    const char *directories[KVBM_MAX_VOLUMES + 1];
    char *list = strdup(m->opts.disk), *at = list, *name, text[1024];
    struct kvbm_disk_opts opts = {.size = sizeof(opts),
                                  .directories = directories,
                                  .fingerprint = text,
                                  .key_len = m->key_len,
                                  .slot_bytes = m->stride,
                                  .n_slots = (uint32_t)n,
                                  .io = m->opts.io,
                                  .io_depth = m->opts.io_depth,
                                  .buffered = m->opts.disk_buffered,
                                  .volatile_ = m->opts.disk_volatile};
    int rc = list ? 0 : -ENOMEM;

    if (m->opts.io_registered) {
        opts.memory = kvbm_host_address(m, 0);
        opts.memory_bytes = m->host_blocks * m->stride;
    }
    fingerprint(m, text, sizeof(text));
    while (rc == 0 && (name = strsep(&at, ":")) != NULL) {
        if (*name && opts.n_directories > KVBM_MAX_VOLUMES - 1)
            rc = -EINVAL;
        else if (*name)
            directories[opts.n_directories++] = name;
    }
    if (rc == 0)
        rc = pool_create(m, KV_TIER_DISK, n, m->opts.disk_eviction, &m->disk);
    if (rc == 0)
        rc = kvbm_disk_open(&opts, &m->disk_store);
    if (rc == 0)
        keep_from_children(m);
    if (rc == 0)
        rc = reload_disk(m, (uint32_t)n);
    free(list);
    return rc;
}

static int open_object(struct kvbm_manager *m)
{
    char text[1024];
    const struct kvbm_object_opts opts = {.size = sizeof(opts),
                                          .uri = m->opts.object,
                                          .fingerprint = text,
                                          .key_len = m->key_len,
                                          .block_bytes = m->block_bytes,
                                          .timeout_ms = m->opts.object_timeout_ms};
    int rc;

    fingerprint(m, text, sizeof(text));
    rc = pool_create(m, KV_TIER_EXTERNAL, m->opts.object_blocks, KVBM_EVICT_LRU, &m->object);
    return rc < 0 ? rc : kvbm_object_open(&opts, &m->object_store);
}

static int open_offers(struct kvbm_manager *m)
{
    const struct kvbm_tier_policy *policies[KV_N_TIERS] = {[KV_TIER_HOST] = &m->opts.host_policy,
                                                           [KV_TIER_DISK] = &m->opts.disk_policy,
                                                           [KV_TIER_EXTERNAL] =
                                                               &m->opts.object_policy};

    for (enum kv_tier tier = KV_TIER_HOST; tier < KV_N_TIERS; tier++) {
        m->down[tier].max_in_flight = 4;
        if (policies[tier]->policy == KVBM_POLICY_FREQUENCY &&
            kvbm_sketch_init(&m->offers[tier], 1u << 20) < 0)
            return -ENOMEM;
    }
    return 0;
}

static int open_all(struct kvbm_manager *m)
{
    const struct kvbm_registry_opts registry = {
        .size = sizeof(registry), .key_len = m->key_len, .events = m->opts.events};
    const struct kvbm_engine_opts engine = {.size = sizeof(engine),
                                            .n_threads = m->opts.copy_threads,
                                            .max_jobs = m->opts.max_jobs,
                                            .max_blocks = KVBM_MAX_PIN, /* no job is too large */
                                            .io = m->opts.io,
                                            .io_depth = m->opts.io_depth,
                                            .gpu_copy = m->opts.gpu_copy};
    int rc = kvbm_registry_create(&registry, &m->registry);

    if (rc == 0)
        rc = kv_wake_open(&m->done_wake);
    if (rc == 0)
        rc = open_host(m);
    if (rc == 0)
        rc = open_offers(m);
    if (rc == 0)
        rc = kvbm_engine_create(&engine, &m->engine);
    if (rc == 0 && m->opts.disk)
        rc = open_disk(m);
    if (rc == 0 && m->opts.object)
        rc = open_object(m);
    if (rc == 0 && m->opts.object && m->opts.object_when_evicted)
        rc = kvbm_write_back_open(m);
    return rc < 0 ? rc : kvbm_mover_start(m);
}

/* ---- making and unmaking ---- */

static int copy_strings(struct kvbm_manager *m)
{
    const char **texts[] = {&m->opts.fingerprint, &m->opts.disk, &m->opts.object};
    size_t len = 0;
    char *at;

    for (size_t i = 0; i < KV_COUNT(texts); i++)
        len += *texts[i] ? strlen(*texts[i]) + 1 : 0;
    at = m->strings = malloc(len + 1);
    for (size_t i = 0; at && i < KV_COUNT(texts); i++) {
        if (!*texts[i])
            continue;
        len = strlen(*texts[i]) + 1;
        *texts[i] = memcpy(at, *texts[i], len);
        at += len;
    }
    return at ? 0 : -ENOMEM;
}

/* What hangs in the object store is waited for until then. */
static void manager_free(struct kvbm_manager *m, uint64_t deadline)
{
    kvbm_engine_destroy(m->engine);
    kvbm_disk_close(m->disk_store);
    kvbm_object_close_by(m->object_store, deadline);
    for (uint32_t i = 0; i < m->n_quarantine; i++)
        kvbm_mutable_release(&m->quarantine[i]);
    kvbm_pool_destroy(m->object);
    kvbm_pool_destroy(m->disk);
    kvbm_pool_destroy(m->host);
    kvbm_registry_destroy(m->registry);
    kvbm_layout_destroy(m->layout);
    for (enum kv_tier tier = KV_TIER_HOST; tier < KV_N_TIERS; tier++) {
        free(m->down[tier].heap);
        kvbm_sketch_fini(&m->offers[tier]);
    }
    for (struct kvbm_job_ *job = m->done, *next; job; job = next) {
        next = job->next;
        free(job);
    }
    kv_wake_close(&m->done_wake);
    free(m->quarantine);
    free(m->leaving);
    free(m->pending.cells);
    free(m->asked.cells);
    free(m->strings);
    pthread_cond_destroy(&m->changed);
    pthread_cond_destroy(&m->work);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static struct kvbm_manager *manager_new(void)
{
    struct kvbm_manager *m = calloc(1, sizeof(*m));
    pthread_condattr_t attr;

    if (!m)
        return NULL;
    pthread_mutex_init(&m->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&m->work, &attr);
    pthread_cond_init(&m->changed, &attr);
    pthread_condattr_destroy(&attr);
    m->done_wake.fd = -1;
    m->done_tail = &m->done;
    m->inbox_tail = &m->inbox;
    return m;
}

int kvbm_manager_create(const struct kvbm_manager_opts *opts, struct kvbm_manager **ret)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct kvbm_manager *m;
    const char *wrong;
    int rc;

    if (!opts || !ret || opts->size < offsetof(struct kvbm_manager_opts, host_eviction))
        return -EINVAL;
    pthread_once(&once, watch_forks);
    m = manager_new();
    if (!m)
        return -ENOMEM;
    m->forks = atomic_load(&forks);
    memcpy(&m->opts, opts, KV_MIN(opts->size, sizeof(m->opts)));
    wrong = what_is_wrong(&m->opts);
    if (wrong)
        kv_log_warn("kvbm", "no manager", "reason=\"%s\"", wrong);
    set_defaults(&m->opts);
    m->key_len = m->opts.key_len;
    rc = wrong ? -EINVAL : copy_strings(m);
    if (rc == 0)
        rc = open_all(m);
    m->opts.block = NULL; /* the caller's */
    if (rc < 0) {
        manager_free(m, kv_now_ns() + LET_GO_NS);
        return rc;
    }
    *ret = m;
    return 0;
}

/* ---- who has what ---- */

static uint64_t of_pin(const struct kvbm_pin *pin, const struct kvbm_pool *pool)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < pin->n; i++) {
        const struct kvbm_item *item = &pin->items[i];

        n += item->state >= ITEM_FETCHED && item->host.pool == pool;
        n += item->source.pool == pool;
        n += pin->likes && pin->likes[i].handle.pool == pool;
    }
    return n;
}

static uint64_t of_move(const struct kvbm_move *move, const struct kvbm_pool *pool)
{
    uint64_t n = 0;

    for (uint32_t k = 0; k < move->n; k++)
        n += (uint64_t)(move->like[k].handle.pool == pool) + (move->target[k].handle.pool == pool) +
             (move->bounce[k].handle.pool == pool);
    return n;
}

/* Whether there are handles on the pool that aren't our own. */
static bool is_held(const struct kvbm_manager *m, struct kvbm_pool *pool)
{
    uint64_t n = pool ? kvbm_pool_handles(pool) : 0, own = pool == m->disk ? m->n_quarantine : 0;

    if (!n)
        return false;
    for (const struct kvbm_pin *pin = m->pins; pin; pin = pin->next)
        own += of_pin(pin, pool);
    for (const struct kvbm_move *move = m->moves; move; move = move->next)
        own += of_move(move, pool);
    if (n > own)
        kv_log_warn("kvbm", "manager not destroyed: blocks of a pool are held",
                    "pool=%s handles=%" PRIu64, pool->name, n - own);
    return n > own;
}

static bool has_pools(struct kvbm_manager *m)
{
    const struct kvbm_pool *pool;

    kvbm_lock(m->registry);
    for (pool = m->registry->pools; pool; pool = pool->next) {
        if (pool != m->host && pool != m->disk && pool != m->object)
            break;
    }
    kvbm_unlock(m->registry);
    return pool != NULL;
}

/* Pins and handles of the caller's, pools of his in our registry. */
static bool in_use(struct kvbm_manager *m)
{
    for (const struct kvbm_pin *pin = m->pins; pin; pin = pin->next) {
        if (!pin->released)
            return true;
    }
    return has_pools(m) || is_held(m, m->host) || is_held(m, m->disk) || is_held(m, m->object);
}

/* ---- the end ---- */

/* Until the deadline things go on, then they are cut short. */
static void wind_down(struct kvbm_manager *m, uint64_t deadline)
{
    uint64_t before = 0;
    int rc = 0;

    m->stopping = true;
    /* Again for what was under way at first, and for what the queue had no room for, as long as that gets on. */
    for (int round = 0; rc == 0 && (round < 2 || m->stats.object.blocks_in != before); round++) {
        before = m->stats.object.blocks_in;
        kvbm_write_back_all(m);
        while (rc == 0 && (m->n_jobs || m->running > m->n_asks || !kvbm_offload_idle(m)))
            rc = kvbm_manager_wait_change(m, deadline);
    }
    kvbm_offload_drop_all(m);
    kvbm_object_cancel_all(m->object_store); /* questions, too: nobody hears the answers */
    for (struct kvbm_pin *pin = m->pins; pin; pin = pin->next)
        kvbm_fetch_cancel(pin);
    for (struct kvbm_job_ *job = m->jobs; job; job = job->next) {
        job->cancelled = true;
        if (job->engine_id)
            kvbm_engine_cancel(m->engine, job->engine_id);
    }
}

/*
 * What is with a disk or a GPU can't be taken back, and its memory is theirs until they answer. One that doesn't in time
 * keeps the manager: nothing of it may be freed.
 */
static int stop(struct kvbm_manager *m, uint64_t deadline)
{
    int rc = in_use(m) ? -EBUSY : 0;

    if (rc < 0)
        return rc;
    wind_down(m, deadline);
    rc = kvbm_mover_end(m, KV_MAX(deadline, kv_now_ns() + LET_GO_NS));
    if (rc < 0)
        kv_log_error("kvbm", "manager not destroyed: a disk or a GPU doesn't answer",
                     "waiting=%" PRIu32, m->running);
    else if (in_use(m)) /* of a call that was on its way */
        rc = kvbm_mover_start(m) < 0 ? -EAGAIN : -EBUSY;
    m->stopping = rc == 0;
    return rc;
}

int kvbm_manager_destroy(struct kvbm_manager *m, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc;

    if (!m || kvbm_manager_usable(m) < 0)
        return 0;
    kvbm_manager_enter(m);
    rc = stop(m, deadline);
    kvbm_manager_leave(m);
    if (rc < 0)
        return rc;
    while (m->caches)
        kvbm_manager_detach(m->caches);
    manager_free(m, KV_MAX(deadline, kv_now_ns() + LET_GO_NS));
    return 0;
}

/* ---- looking at it ---- */

struct kvbm_registry *kvbm_manager_registry(struct kvbm_manager *m)
{
    return m ? m->registry : NULL;
}

struct kvbm_pool *kvbm_manager_pool(struct kvbm_manager *m, enum kv_tier tier)
{
    if (!m)
        return NULL;
    return tier == KV_TIER_HOST       ? (kvbm_staging(m) ? NULL : m->host)
           : tier == KV_TIER_DISK     ? m->disk
           : tier == KV_TIER_EXTERNAL ? m->object
                                      : NULL;
}

const struct kvbm_layout *kvbm_manager_host_layout(struct kvbm_manager *m)
{
    return m ? m->layout : NULL;
}

/* ---- caches ---- */

static const char *what_differs(const struct kvbm_layout_config *host,
                                const struct kvbm_layout_config *cache, uint32_t n_heads,
                                uint32_t first_head)
{
    bool known = host->num_heads && cache->num_heads && host->dtype && cache->dtype;

    if (cache->num_layers != host->num_layers || cache->outer_dim != host->outer_dim ||
        cache->page_size != host->page_size)
        return "layers, outer or page_size differ";
    if (cache->inner_dim == host->inner_dim &&
        cache->dtype_width_bytes == host->dtype_width_bytes && cache->order == host->order &&
        cache->dtype == host->dtype && !n_heads && !first_head)
        return NULL;
    if (!known)
        return "to be converted, both must say num_heads and dtype";
    if (cache->inner_dim / cache->num_heads != host->inner_dim / host->num_heads)
        return "head_dim differs";
    if (n_heads > cache->num_heads ||
        (uint64_t)first_head + (n_heads ? n_heads : cache->num_heads) > host->num_heads)
        return "heads beyond the host tier's";
    return NULL;
}

int kvbm_manager_attach(struct kvbm_manager *m, const struct kvbm_cache_opts *opts,
                        struct kvbm_cache **ret)
{
    int rc = kvbm_manager_usable(m);
    struct kvbm_cache *cache;
    const char *wrong;

    if (rc < 0)
        return rc;
    if (!opts || !ret || opts->size < offsetof(struct kvbm_cache_opts, pool) || !opts->layout)
        return -EINVAL;
    cache = calloc(1, sizeof(*cache));
    if (!cache)
        return -ENOMEM;
    cache->manager = m;
    cache->layout = opts->layout;
    cache->pool = KV_OPT(opts, pool, NULL);
    cache->first_head = KV_OPT(opts, first_head, 0);
    cache->n_heads = KV_OPT(opts, n_heads, 0);
    if (!cache->n_heads && kvbm_layout_get_config(opts->layout)->num_heads !=
                               kvbm_layout_get_config(m->layout)->num_heads)
        cache->n_heads = kvbm_layout_get_config(opts->layout)->num_heads;
    cache->partial =
        cache->n_heads && cache->n_heads != kvbm_layout_get_config(m->layout)->num_heads;
    wrong = what_differs(kvbm_layout_get_config(m->layout), kvbm_layout_get_config(cache->layout),
                         cache->n_heads, cache->first_head);
    if (!wrong && cache->pool && cache->pool->registry != m->registry)
        wrong = "the pool is of another registry";
    if (wrong) {
        kv_log_warn("kvbm", "cache not attached", "reason=\"%s\"", wrong);
        free(cache);
        return -EINVAL;
    }
    kvbm_manager_enter(m);
    cache->next = m->caches;
    m->caches = cache;
    kvbm_manager_leave(m);
    *ret = cache;
    return 0;
}

int kvbm_manager_detach(struct kvbm_cache *cache)
{
    struct kvbm_manager *m = cache ? cache->manager : NULL;
    int rc = cache ? kvbm_manager_usable(m) : 0;
    struct kvbm_cache **at;

    if (!cache || rc < 0)
        return rc;
    kvbm_manager_enter(m);
    if (cache->n_jobs) {
        rc = -EBUSY;
    } else {
        for (at = &m->caches; *at != cache; at = &(*at)->next)
            ;
        *at = cache->next;
        free(cache);
    }
    kvbm_manager_leave(m);
    return rc;
}
