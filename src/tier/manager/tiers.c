// SPDX-License-Identifier: Apache-2.0
/*
 * Parts of a manager: its tiers' pools and stores, and the copier. Opened in the order of `steps`
 * below, each with what it needs from those before it. kvbm_manager_free closes them.
 *
 *   host     blocks in own, shared or the caller's memory │ without host_bytes: staging buffers
 *   disk     a pool whose block numbers are the slots of the disk store; restored from its index
 *   object   a pool of blocks without bytes: the keys that the store is known to have
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/core/log.h"
#include "bm/events/events.h"
#include "bm/registry/registry.h"
#include "bm/storage/storage.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/shape.h"
#include "tier/manager/state/manager.h"

/* divisor: fetches from the object store fill host blocks / OBJECT_SHARE at a time. A store that
 * hangs can't take the whole host tier. */
#define OBJECT_SHARE 4

enum {
    TOLD_AT_ONCE =
        4096,        /* most blocks of the disk whose events wait at a time, when it is opened */
    FOLLOW_MS = 5000 /* longest wait for the events' sinks */
};

/* Create a tier's pool. Duplicates are rejected: a key has one block in each tier. */
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

/* An allocator's function: the caller's memory, whole. */
static int give_memory(void *arg, uint64_t bytes, struct kvbm_storage **ret)
{
    const struct kvbm_manager_opts *opts = arg;
    const struct kvbm_storage_opts storage = {.size = sizeof(storage),
                                              .kind = KVBM_STORAGE_EXTERNAL,
                                              .of = KVBM_STORAGE_SYSTEM,
                                              .memory = opts->host_memory,
                                              .bytes = opts->host_bytes};

    (void)bytes; /* room for an alignment that the caller's memory has */
    return kvbm_storage_create(&storage, ret);
}

static uint32_t touch_threads(const struct kvbm_manager *m)
{
    return m->opts.copy_threads ? m->opts.copy_threads : 8;
}

/* Take the caller's memory of @n blocks. Touches every page without changing a byte: a page that
 * can't be had, behind a file's end or of a full tmpfs, would end the process at a later copy. */
static int take_memory(struct kvbm_manager *m, uint64_t n)
{
    int rc = kvbm_memory_take(m);

    if (rc == 0)
        rc = kvbm_touch(m->opts.host_memory, n * m->stride, touch_threads(m));
    if (rc < 0 && rc != -EBUSY)
        kv_log_warn("kvbm", "manager not created: host_memory has no room for its pages",
                    "errno=%d", -rc);
    return rc;
}

/* Make the layout of host blocks in memory that peers may map. */
static int place_shared(struct kvbm_manager *m, const struct kvbm_layout_config *config)
{
    struct kvbm_layout_shape shape;
    struct kvbm_allocator allocator;
    struct kvbm_shared_opts opts = {.size = sizeof(opts),
                                    .n_blocks = (uint32_t)config->num_blocks,
                                    .huge_pages = m->opts.huge_pages,
                                    .touch_threads = touch_threads(m)};
    int rc = config->num_blocks < INT32_MAX ? kvbm_layout_compute(config, &shape) : -EINVAL;

    if (rc == 0) {
        opts.bytes = shape.required_bytes;
        rc = kvbm_shared_create(&opts, &m->shared);
    }
    if (rc < 0)
        return rc;
    allocator = kvbm_shared_allocator(m->shared);
    return kvbm_layout_allocate(config, &allocator, &m->layout);
}

/* Make the layout of @n host blocks in the caller's memory, or in memory of their own. */
static int place_host(struct kvbm_manager *m, struct kvbm_layout_config *config, uint64_t n)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage),
        .kind = m->opts.host_pinned ? KVBM_STORAGE_PINNED : KVBM_STORAGE_SYSTEM,
        .huge_pages = m->opts.huge_pages,
        /* Touch now, by several threads: a copy that touches pages first is many times slower. */
        .touch_threads = kvbm_staging(m) ? 0 : touch_threads(m),
        .bytes = 1};
    const struct kvbm_allocator given = {
        .size = sizeof(given), .allocate = give_memory, .arg = &m->opts};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    int rc = n ? 0 : -EINVAL;

    if (rc == 0 && m->opts.host_memory)
        rc = take_memory(m, n);
    if (rc < 0)
        return rc;
    /* One more, for the last block's padding: whole blocks are read and written. The caller's
     * memory has that padding: n is host_bytes by the stride. */
    config->num_blocks = m->opts.host_memory ? n : n + 1;
    if (m->opts.host_shared)
        return place_shared(m, config);
    return kvbm_layout_allocate(config, m->opts.host_memory ? &given : &allocator, &m->layout);
}

static int open_host(struct kvbm_manager *m)
{
    struct kvbm_layout_config config = {0};
    struct kvbm_layout_shape shape;
    struct kvbm_view view;
    uint64_t n;
    int rc;

    /* of the caller's layout only the shape of a block counts: host blocks are contiguous and
     * aligned */
    memcpy(&config, m->opts.block, KV_MIN(m->opts.block->size, sizeof(config)));
    config.size = sizeof(config);
    config.kind = KVBM_FULLY_CONTIGUOUS;
    config.alignment = KVBM_HOST_ALIGN;
    config.num_blocks = 2;
    memset(config.tensor_shape, 0, sizeof(config.tensor_shape));
    rc = kvbm_layout_compute(&config, &shape);
    if (rc < 0)
        return rc;
    n = kvbm_staging(m) ? m->opts.staging_blocks : m->opts.host_bytes / shape.block_stride;
    m->block_bytes = shape.natural_block_bytes;
    m->stride = shape.block_stride;
    m->block_tokens = config.page_size;
    m->host_blocks = n;
    if (!n)
        kv_log_warn("kvbm", "host_bytes hold no block", "block_bytes=%" PRIu64, shape.block_stride);
    m->pins.max_object_fetched =
        (uint32_t)KV_MAX(kvbm_staging(m) ? n / 2 : n / OBJECT_SHARE, UINT64_C(1));
    rc = place_host(m, &config, n);
    if (rc == 0)
        rc = kvbm_layout_block(m->layout, 0, &view);
    /* Moves of a host tier's blocks hold a fraction of it; staging buffers are held anyway. */
    m->offload.move_blocks =
        kvbm_staging(m) ? KVBM_BATCH
                        : (uint32_t)KV_MAX(KV_MIN(n / 16, (uint64_t)KVBM_BATCH), UINT64_C(1));
    if (rc == 0) {
        m->host_base = view.addr;
        rc = pool_create(m, KV_TIER_HOST, n, m->opts.host_eviction, &m->host);
    }
    return rc;
}

void kvbm_tier_fingerprint(const char *model, const struct kvbm_layout_config *block,
                           const struct kvbm_shard *shard, char *to, size_t size)
{
    size_t len = (size_t)snprintf(
        to, size, "%s|layers=%u outer=%u page=%u inner=%u width=%u dtype=%d order=%d heads=%u",
        model, block->num_layers, block->outer_dim, block->page_size, block->inner_dim,
        block->dtype_width_bytes, (int)block->dtype, (int)block->order, block->num_heads);

    /* Ranks that hold all heads, or the same ones, have equal bytes. */
    if (shard->axis == KVBM_SHARD_HEADS && shard->total_heads != block->num_heads && len < size)
        snprintf(to + len, size - len, " first_head=%u total_heads=%u", shard->first_head,
                 shard->total_heads);
}

/* Write the manager's own fingerprint: the model's, and the layout that its blocks have. Equal keys
 * of another layout mean other bytes, which a checksum can't show. */
static void fingerprint(const struct kvbm_manager *m, char *to, size_t size)
{
    kvbm_tier_fingerprint(m->opts.fingerprint, kvbm_layout_get_config(m->layout), &m->opts.shard,
                          to, size);
}

struct reloaded {
    uint64_t commit;
    struct kvbm_immutable held;
};

struct reload {
    struct kvbm_manager *m;
    struct kvbm_mutable *blocks; /* by slot number */
    struct reloaded *done;       /* [n] */
    uint64_t n, refused;
    uint64_t at_once; /* blocks whose events may wait: at most half of the queue; 0: no events */
    bool no_wait;     /* the sinks of events hang: go on without them */
};

/* Let the events' sinks follow: the queue has no room for all blocks of a large disk. */
static void let_follow(struct reload *reload)
{
    if (reload->at_once && reload->n % reload->at_once == 0 && !reload->no_wait)
        reload->no_wait = kvbm_events_flush(reload->m->opts.events, FOLLOW_MS) < 0;
}

/* Register one record of the disk's index: its slot is the block of the same number. */
static int reload_one(void *arg, const struct kvbm_disk_record *record)
{
    struct reload *reload = arg;
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = record->group,
                               .keys = record->key,
                               .parent = record->parent,
                               .position = record->position,
                               .tokens = reload->m->opts.events ? record->tokens : NULL};
    struct reloaded *done = &reload->done[reload->n];
    struct kvbm_complete complete;

    if (kvbm_pool_complete(reload->m->disk, &reload->blocks[record->slot], 1, &chain, &complete)) {
        reload->refused++; /* the same key twice, or at two positions */
        return 0;
    }
    done->commit = record->commit;
    kvbm_pool_register(reload->m->disk, &complete, 1, &done->held);
    reload->n++;
    let_follow(reload);
    return 0;
}

static int by_commit(const void *a, const void *b)
{
    const struct reloaded *x = a, *y = b;

    if (x->commit != y->commit)
        return x->commit < y->commit ? -1 : 1;
    return x->held.handle.block < y->held.handle.block ? -1 : 1;
}

/* Release the blocks in the order in which they are to be evicted: those written longest ago first. */
static void release_reloaded(struct reload *reload)
{
    qsort(reload->done, reload->n, sizeof(reload->done[0]), by_commit);
    for (uint64_t i = 0; i < reload->n; i++)
        kvbm_immutable_release(&reload->done[i].held);
}

/* Return blocks to the pool, except those of missing volumes, which stay out of use. */
static void keep_usable(struct kvbm_manager *m, struct kvbm_mutable *blocks, uint32_t n)
{
    for (uint32_t slot = 0; slot < n; slot++) {
        if (!blocks[slot].handle.pool || kvbm_disk_usable(m->disk_store, slot))
            continue;
        kvbm_quarantine(m, blocks[slot]);
        blocks[slot] = (struct kvbm_mutable){0};
    }
    kvbm_pool_release_mutable(m->disk, blocks, n); /* holes are allowed */
}

/*
 * Restore the disk pool from the index. A new pool's blocks come in the order of their numbers. All
 * of them are taken, so that blocks[s] is the block of slot s; those without a record go back. Parents
 * are told first: followers may drop a block whose parent they don't know.
 */
static int reload_disk(struct kvbm_manager *m, uint32_t n)
{
    struct reload reload = {.m = m,
                            .blocks = calloc(n, sizeof(*reload.blocks)),
                            .done = calloc(n, sizeof(*reload.done))};
    uint64_t start = kv_now_ns();
    int rc = reload.blocks && reload.done ? kvbm_pool_allocate(m->disk, n, reload.blocks, NULL)
                                          : -ENOMEM;
    long found = 0;

    if (m->opts.events)
        reload.at_once =
            KV_MIN(kvbm_events_capacity(m->opts.events, m->key_len, m->block_tokens) / 2 + 1,
                   (uint64_t)TOLD_AT_ONCE);
    if (rc == 0) {
        found = kvbm_disk_each(m->disk_store, reload_one, &reload);
        release_reloaded(&reload);
        keep_usable(m, reload.blocks, n);
        kv_log_info("kvbm", "disk tier opened", "blocks=%ld refused=%" PRIu64 " ms=%" PRIu64, found,
                    reload.refused, (kv_now_ns() - start) / KV_NS_PER_MS);
    }
    free(reload.blocks);
    free(reload.done);
    return rc < 0 ? rc : found < 0 ? (int)found : 0;
}

/* Exclude registered memory from fork. The kernel copies pinned pages at fork: a child would take
 * as much memory again, and seconds. A child may not use the manager anyway. Memory of the caller
 * stays with its children: they may be the engine's processes, and shared pages aren't copied. */
static void keep_from_children(struct kvbm_manager *m)
{
    struct kvbm_disk_stats stats;

    kvbm_disk_get_stats(m->disk_store, &stats);
    if (stats.registered_bytes && !m->opts.host_memory &&
        madvise(kvbm_host_address(m, 0), stats.registered_bytes, MADV_DONTFORK) < 0)
        kv_log_warn("kvbm", "registered memory stays with children: each fork copies it",
                    "errno=%d", errno);
}

/* Open the disk tier: its pool, its store, and what earlier runs have left there. */
static int open_disk(struct kvbm_manager *m)
{
    uint64_t n = m->opts.disk_bytes / m->stride;
    const char *directories[KVBM_MAX_VOLUMES + 1];
    char *list = strdup(m->opts.disk), *at = list, *name, text[4096];
    struct kvbm_disk_opts opts = {.size = sizeof(opts),
                                  .directories = directories,
                                  .fingerprint = text,
                                  .key_len = m->key_len,
                                  .slot_bytes = m->stride,
                                  .n_slots = (uint32_t)n,
                                  .block_tokens = m->opts.events ? m->block_tokens : 0,
                                  .io = m->opts.io,
                                  .io_depth = m->opts.io_depth,
                                  .buffered = m->opts.disk_buffered,
                                  .volatile_ = m->opts.disk_volatile};
    int rc = list ? 0 : -ENOMEM;

    /* the kernel keeps the host blocks pinned: reads and writes needn't pin them each time */
    if (m->opts.io_registered) {
        opts.memory = kvbm_host_address(m, 0);
        opts.memory_bytes = m->host_blocks * m->stride;
    }
    /* colons separate the directories: each is a volume */
    fingerprint(m, text, sizeof(text));
    while (rc == 0 && (name = strsep(&at, ":")) != NULL) {
        if (*name && opts.n_directories > KVBM_MAX_VOLUMES - 1)
            rc = -EINVAL;
        else if (*name)
            directories[opts.n_directories++] = name;
    }
    if (rc == -EINVAL)
        kv_log_warn("kvbm", "too many disk directories", "most=%d", KVBM_MAX_VOLUMES);
    if (rc == 0 && (!n || n > UINT32_MAX - 1)) {
        kv_log_warn("kvbm", "disk_bytes hold no block, or too many",
                    "block_bytes=%" PRIu64 " blocks=%" PRIu64, m->stride, n);
        rc = -EINVAL;
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

/* Open the object tier. Its pool begins empty: what the store has is asked for when it is looked
 * up. */
static int open_object(struct kvbm_manager *m)
{
    char text[4096];
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

/* Set the limits of the offload queues. Frequency policies get a sketch of 2^20 counters: a fixed
 * size, however many keys are offered. */
static int open_offers(struct kvbm_manager *m)
{
    const struct kvbm_tier_policy *policies[KV_N_TIERS] = {[KV_TIER_HOST] = &m->opts.host_policy,
                                                           [KV_TIER_DISK] = &m->opts.disk_policy,
                                                           [KV_TIER_EXTERNAL] =
                                                               &m->opts.object_policy};

    for (enum kv_tier tier = KV_TIER_HOST; tier < KV_N_TIERS; tier++) {
        m->offload.queues[tier].max_in_flight = 4;
        if (policies[tier]->policy == KVBM_POLICY_FREQUENCY &&
            kvbm_sketch_init(&m->offload.offers[tier], 1u << 20) < 0)
            return -ENOMEM;
    }
    return 0;
}

int kvbm_tiers_open(struct kvbm_manager *m)
{
    const struct kvbm_registry_opts registry = {
        .size = sizeof(registry), .key_len = m->key_len, .events = m->opts.events};
    const struct kvbm_copier_opts copier = {.size = sizeof(copier),
                                            .n_threads = m->opts.copy_threads,
                                            .max_jobs = m->opts.max_jobs,
                                            /* every pin fits into one job */
                                            .max_blocks = KVBM_MAX_PIN,
                                            .io = m->opts.io,
                                            .io_depth = m->opts.io_depth,
                                            .gpu_copy = m->opts.gpu_copy};
    static const char *const steps[] = {"registry", "wake-up",   "host tier",   "policies",
                                        "copier",   "disk tier", "object tier", "write-back",
                                        "promises", "peers",     "mover"};
    size_t step = 0;
    /* `step` counts what has been opened: the log names the part that failed */
    int rc = kvbm_registry_create(&registry, &m->registry);

    if (rc == 0 && ++step)
        rc = kv_wake_open(&m->jobs.done_wake);
    /* before pools exist; for the disk's records */
    if (rc == 0 && m->opts.disk && m->opts.events)
        rc = kvbm_registry_keep_tokens(m->registry, m->opts.block->page_size);
    if (rc == 0 && ++step)
        rc = open_host(m);
    if (rc == 0 && ++step)
        rc = open_offers(m);
    if (rc == 0 && ++step)
        rc = kvbm_copier_create(&copier, &m->copier);
    if (rc == 0 && ++step && m->opts.disk)
        rc = open_disk(m);
    if (rc == 0 && ++step && m->opts.object)
        rc = open_object(m);
    if (rc == 0 && ++step && m->opts.object && m->opts.object_when_evicted)
        rc = kvbm_write_back_open(m);
    if (rc == 0 && ++step)
        rc = kvbm_promises_open(m);
    if (rc == 0 && ++step)
        rc = kvbm_manager_open_peers(m);
    if (rc == 0 && ++step)
        rc = kvbm_mover_start(m);
    if (rc < 0)
        kv_log_warn("kvbm", "manager not created: a part of it can't be opened",
                    "part=\"%s\" error=\"%s\"", steps[step], strerror(-rc));
    return rc;
}
