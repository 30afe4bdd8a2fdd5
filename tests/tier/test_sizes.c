// SPDX-License-Identifier: Apache-2.0
/*
 * Callers compiled with another version of the headers: every struct of kvbm*.h that says its size
 * is handed in with every size that an older version could have had, down to the smallest, and with
 * a larger one. Behind the struct lies a page that may not be touched, so that a read or a write
 * beyond its size ends the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <poll.h>
#include <sys/mman.h>

#include "kvbm.h"
#include "manager_world.h"

#define STEP sizeof(size_t) /* such structs end at multiples of it */
#define NEWER 64            /* bytes more than there are today */
#define UNTOUCHED 0xa5

/* Structs without a size never change: callers hold them by value, in arrays or within others. */
#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(struct kvbm_handle) == 16, "handles");
_Static_assert(sizeof(struct kvbm_mutable) == 16, "handles");
_Static_assert(sizeof(struct kvbm_complete) == 16, "handles");
_Static_assert(sizeof(struct kvbm_immutable) == 16, "handles");
_Static_assert(sizeof(struct kvbm_weak) == 16, "handles");
_Static_assert(sizeof(struct kvbm_shortage) == 16, "kvbm_pool_allocate");
_Static_assert(sizeof(struct kvbm_fill) == 12, "kvbm_mutable_fill");
_Static_assert(sizeof(struct kvbm_reset_result) == 24, "kvbm_pool_reset_keys");
_Static_assert(sizeof(struct kvbm_named_registry) == 16, "kvbm_metrics");
_Static_assert(sizeof(struct kvbm_event) == 72, "arrays of callbacks and rings");
_Static_assert(sizeof(struct kvbm_mm_run) == 24, "kvbm_block_hash_mm");
_Static_assert(sizeof(struct kvbm_hash128) == 16, "kvbm_positional_hash");
_Static_assert(sizeof(struct kvbm_token_block) == 40, "kvbm_sequence_block");
_Static_assert(sizeof(struct kvbm_layout_shape) == 64, "kvbm_layout_compute");
_Static_assert(sizeof(struct kvbm_view) == 40, "kvbm_layout_region");
_Static_assert(sizeof(struct kvbm_done) == 56, "kvbm_manager_poll");
_Static_assert(sizeof(struct kvbm_tier_policy) == 12, "within kvbm_manager_opts");
_Static_assert(sizeof(struct kvbm_tier_stats) == 312, "within kvbm_manager_stats");
#endif

static struct {
    struct world w; /* with a pool, and one key stored */
    struct kvbm_events *events;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_immutable held;
    struct kvbm_copier *copier;
    struct kvbm_layout *other; /* like the cache's */
    char *wall;                /* not to be touched from here on */
} t;

static uint64_t key_ = 77, next_key = 1000;
static uint32_t block_ = 3, other_block = 5;
static uint8_t ok_[1];

/* ---- what takes a struct ---- */

static int registry(void *opts)
{
    struct kvbm_registry *made = NULL;
    int rc = kvbm_registry_create(opts, &made);

    return rc < 0 ? rc : kvbm_registry_destroy(made);
}

static int pool(void *opts)
{
    struct kvbm_pool *made = NULL;
    int rc = kvbm_pool_create(t.registry, opts, &made);

    return rc < 0 ? rc : kvbm_pool_destroy(made);
}

static int init_sequence(void *start)
{
    struct kvbm_mutable block;
    int rc;

    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &block, NULL), 0);
    rc = kvbm_mutable_init_sequence(&block, start);
    kvbm_mutable_release(&block);
    return rc;
}

static int complete(void *chain)
{
    struct kvbm_complete done;
    struct kvbm_mutable block;
    int rc;

    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &block, NULL), 0);
    rc = kvbm_pool_complete(t.pool, &block, 1, chain, &done);
    if (rc == 0)
        kvbm_complete_release(&done);
    else
        kvbm_mutable_release(&block);
    return rc;
}

static int storage(void *opts)
{
    struct kvbm_storage *made = NULL;
    int rc = kvbm_storage_create(opts, &made);

    if (rc == 0)
        kvbm_storage_destroy(made);
    return rc;
}

static int storage_like(void *opts)
{
    const struct kvbm_allocator allocator = kvbm_allocator_of(opts);
    struct kvbm_storage *made = NULL;
    int rc = allocator.allocate(allocator.arg, 4096, &made);

    if (rc == 0)
        kvbm_storage_destroy(made);
    return rc;
}

static int layout_of(const struct kvbm_layout_config *config,
                     const struct kvbm_allocator *allocator)
{
    struct kvbm_layout *made = NULL;
    int rc = kvbm_layout_allocate(config, allocator, &made);

    if (rc == 0)
        kvbm_layout_destroy(made);
    return rc;
}

static int allocate(void *allocator)
{
    return layout_of(&t.w.block, allocator);
}

static int config(void *config)
{
    const struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_shape shape;
    int rc = kvbm_layout_compute(config, &shape);

    assert_int_equal(layout_of(config, &allocator), rc);
    return rc;
}

static int sequence(void *opts)
{
    struct kvbm_sequence *made = NULL;
    int rc = kvbm_sequence_create(opts, &made);

    kvbm_sequence_destroy(made);
    return rc;
}

static int events(void *opts)
{
    struct kvbm_events *made = NULL;
    int rc = kvbm_events_create(opts, &made);

    return rc < 0 ? rc : kvbm_events_destroy(made);
}

static int zmq(void *opts)
{
    int id = kvbm_events_add_zmq(t.events, opts, NULL);

    return id < 0 ? id : kvbm_events_remove_sink(t.events, id);
}

static int copier(void *opts)
{
    struct kvbm_copier *made = NULL;
    int rc = kvbm_copier_create(opts, &made);

    kvbm_copier_destroy(made);
    return rc;
}

static int transfer(void *transfer)
{
    int64_t id = kvbm_copier_submit(t.copier, transfer);
    struct kvbm_done done;

    if (id < 0)
        return (int)id;
    assert_int_equal(kvbm_copier_wait(t.copier, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 1);
    return done.status;
}

static int manager(void *opts)
{
    struct kvbm_manager *made = NULL;
    int rc = kvbm_manager_create(opts, &made);

    return rc < 0 ? rc : kvbm_manager_destroy(made, 10000);
}

static int manager_of_block(void *config)
{
    struct kvbm_manager_opts opts = {
        .size = sizeof(opts), .block = config, .host_bytes = UINT64_C(8) * HOST_STRIDE};

    return manager(&opts);
}

static int cache(void *opts)
{
    struct kvbm_cache *made = NULL;
    int rc = kvbm_cache_attach(t.w.m, opts, &made);

    return rc < 0 ? rc : kvbm_cache_detach(made);
}

static int lookup(void *chain)
{
    long n = kvbm_manager_lookup(t.w.m, chain, 1, NULL);

    return n < 0 ? (int)n : 0;
}

static int pinned(long n, struct kvbm_pin *pin)
{
    kvbm_pin_release(pin);
    return n < 0 ? (int)n : 0;
}

static int prepare_load(void *chain)
{
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_load(t.w.m, chain, 1, NULL, &pin);

    return pinned(n, pin);
}

static int prepare_store(void *chain)
{
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_store(t.w.m, chain, 1, &pin);

    return pinned(n, pin);
}

static int onboard(void *chain)
{
    struct kvbm_immutable held;
    long n = kvbm_manager_onboard(t.w.cache, chain, 1, 10000, &held);

    if (n == 1)
        kvbm_immutable_release(&held);
    return n < 0 ? (int)n : 0;
}

static int load_opts(void *opts)
{
    const struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_pin *pin = NULL;
    long n = kvbm_manager_prepare_load(t.w.m, &chain, 1, opts, &pin);

    return pinned(n, pin);
}

static int load_blocks_opts(void *opts)
{
    struct kvbm_pin *pin = NULL;
    struct kvbm_immutable found;
    long n;

    assert_int_equal(
        kvbm_pool_match(kvbm_manager_pool(t.w.m, KV_TIER_HOST), 0, &key_, 1, 0, &found), 1);
    n = kvbm_manager_prepare_load_blocks(t.w.m, &found, 1, opts, &pin);
    kvbm_immutable_release(&found);
    return pinned(n, pin);
}

static int job(void *memory)
{
    const struct kvbm_chain chain = world_chain(&next_key);
    struct kvbm_job *job = memory;
    struct kvbm_done done;
    int64_t id;

    if (job->size < offsetof(struct kvbm_job, cache)) /* there is no pin to be written */
        return (int)kvbm_manager_submit(t.w.m, job);
    next_key++;
    assert_int_equal(kvbm_manager_prepare_store(t.w.m, &chain, 1, &job->pin), 1);
    id = kvbm_manager_submit(t.w.m, job);
    kvbm_pin_release(job->pin);
    job->pin = NULL;
    if (id < 0)
        return (int)id;
    assert_int_equal(kvbm_manager_wait(t.w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 1);
    return done.status;
}

static int block_info(void *ret)
{
    return kvbm_immutable_info(&t.held, ret);
}

static int pool_stats(void *ret)
{
    return kvbm_pool_get_stats(t.pool, ret);
}

static int events_stats(void *ret)
{
    return kvbm_events_get_stats(t.events, ret);
}

static int copier_stats(void *ret)
{
    return kvbm_copier_get_stats(t.copier, ret);
}

static int manager_stats(void *ret)
{
    return kvbm_manager_get_stats(t.w.m, ret);
}

/* ---- the table ---- */

#define OPTIONAL 0 /* all of it is: nothing is refused */
#define UP_TO(type, field) \
    ((offsetof(struct type, field) + sizeof(((struct type *)0)->field) + STEP - 1) / STEP * STEP)

static struct kvbm_storage_opts storage_ = {.kind = KVBM_STORAGE_SYSTEM,
                                            .bytes = 10000,
                                            .huge_pages = true,
                                            .touch_threads = 1,
                                            .path = "unused",
                                            .directory = "unused",
                                            .direct = true,
                                            .keep = true};
static struct kvbm_allocator allocator_;
static struct kvbm_layout_config block;
static struct kve_publisher_opts publisher = {.size = sizeof(publisher),
                                              .endpoint = "tcp://127.0.0.1:*"};
static struct kvbm_registry_opts registry_ = {.key_len = 16};
static struct kvbm_pool_opts pool_ = {.name = "sizes",
                                      .tier = KV_TIER_DISK,
                                      .groups = 4,
                                      .n_blocks = 5,
                                      .block_size = PAGE,
                                      .eviction = KVBM_EVICT_LFU,
                                      .lfu_thresholds = {2, 3, 4},
                                      .reject_duplicates = true,
                                      .reset_on_release = true,
                                      .track_handles = true};
static struct kvbm_block_start start = {.salt_hash = 5, .chain = KVBM_CHAIN_SEED_SALT};
static uint32_t tokens[PAGE];
static struct kvbm_chain chain_ = {.keys = &key_, .tokens = tokens};
static struct kvbm_sequence_opts sequence_ = {
    .block_size = 16, .salt_hash = 5, .chain = KVBM_CHAIN_SEED_SALT, .max_tokens = 100};
static struct kvbm_events_opts events_ = {.max_batch = 5, .window_us = 100, .queue_bytes = 65536};
static struct kvbm_zmq_opts zmq_ = {.publisher = &publisher,
                                    .scope = KVBM_EVENTS_CONSOLIDATED,
                                    .block_size = PAGE,
                                    .lora_name = "a",
                                    .cache_salt = "b"};
static struct kvbm_copier_opts copier_ = {.n_threads = 1,
                                          .max_jobs = 3,
                                          .max_blocks = 9,
                                          .io = KVBM_IO_THREADS,
                                          .io_depth = 2,
                                          .gpu_copy = KVBM_GPU_SINGLE};
static struct kvbm_transfer transfer_ = {.src_blocks = &block_,
                                         .dst_blocks = &other_block,
                                         .n = 1,
                                         .first_layer = 1,
                                         .n_layers = 1,
                                         .n_heads = HEADS,
                                         .flow = KVBM_ONBOARD,
                                         .priority = 5,
                                         .deadline_ns = UINT64_MAX,
                                         .ok = ok_,
                                         .tag = 5};
static struct kvbm_manager_opts manager_, with_disk;
static struct kvbm_cache_opts cache_ = {.n_heads = HEADS};
static struct kvbm_pin_opts pin_ = {.deadline_ns = UINT64_MAX, .no_fetch = true};
static struct kvbm_job job_ = {
    .blocks = &block_, .priority = 5, .deadline_ns = UINT64_MAX, .ok = ok_, .tag = 5};

static const struct row {
    const char *name;
    size_t size;  /* today's */
    size_t least; /* what a caller must have; below: -EINVAL */
    void *like;   /* with its fields; NULL: it is written */
    int (*call)(void *struct_);
    size_t from; /* smaller ones aren't tried: as the row above */
} rows[] = {
    {"registry", sizeof(registry_), OPTIONAL, &registry_, registry, 0},
    {"pool", sizeof(pool_), UP_TO(kvbm_pool_opts, block_size), &pool_, pool, 0},
    {"block_start", sizeof(start), OPTIONAL, &start, init_sequence, 0},
    {"chain, complete", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, complete, 0},
    {"chain, lookup", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, lookup, 0},
    {"chain, load", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, prepare_load, 0},
    {"chain, store", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, prepare_store, 0},
    {"chain, onboard", sizeof(chain_), UP_TO(kvbm_chain, position), &chain_, onboard, 0},
    {"storage", sizeof(storage_), UP_TO(kvbm_storage_opts, bytes), &storage_, storage, 0},
    {"storage, alike", sizeof(storage_), UP_TO(kvbm_storage_opts, kind), &storage_, storage_like,
     0},
    {"allocator", sizeof(allocator_), UP_TO(kvbm_allocator, arg), &allocator_, allocate, 0},
    {"layout", sizeof(block), UP_TO(kvbm_layout_config, inner_dim), &block, config, 0},
    {"layout, manager", sizeof(block), UP_TO(kvbm_layout_config, inner_dim), &block,
     manager_of_block, 0},
    {"sequence", sizeof(sequence_), UP_TO(kvbm_sequence_opts, block_size), &sequence_, sequence, 0},
    {"events", sizeof(events_), OPTIONAL, &events_, events, 0},
    {"zmq", sizeof(zmq_), UP_TO(kvbm_zmq_opts, block_size), &zmq_, zmq, 0},
    {"copier", sizeof(copier_), OPTIONAL, &copier_, copier, 0},
    {"transfer", sizeof(transfer_), UP_TO(kvbm_transfer, n), &transfer_, transfer, 0},
    {"manager", sizeof(manager_), UP_TO(kvbm_manager_opts, staging_blocks), &manager_, manager, 0},
    {"manager, disk", sizeof(with_disk), OPTIONAL, &with_disk, manager,
     UP_TO(kvbm_manager_opts, disk_bytes)},
    {"cache", sizeof(cache_), UP_TO(kvbm_cache_opts, layout), &cache_, cache, 0},
    {"pin, load", sizeof(pin_), OPTIONAL, &pin_, load_opts, 0},
    {"pin, load_blocks", sizeof(pin_), OPTIONAL, &pin_, load_blocks_opts, 0},
    {"job", sizeof(job_), UP_TO(kvbm_job, blocks), &job_, job, 0},
    {"block_info", sizeof(struct kvbm_block_info), STEP, NULL, block_info, 0},
    {"pool_stats", sizeof(struct kvbm_pool_stats), STEP, NULL, pool_stats, 0},
    {"events_stats", sizeof(struct kvbm_events_stats), STEP, NULL, events_stats, 0},
    {"copier_stats", sizeof(struct kvbm_copier_stats), STEP, NULL, copier_stats, 0},
    {"manager_stats", sizeof(struct kvbm_manager_stats), STEP, NULL, manager_stats, 0},
};

/* ---- trying it ---- */

/* A struct of @size bytes right before the wall, with as much of @like as there is. */
static void *place(size_t size, const void *like, size_t len)
{
    char *at = t.wall - (size < STEP ? STEP : size); /* the size itself is always there */

    memset(t.wall - 4096, UNTOUCHED, 4096);
    if (like)
        memcpy(at, like, len < size ? len : size);
    memcpy(at, &size, sizeof(size));
    return at;
}

static bool untouched(const char *at, size_t len)
{
    while (len && (unsigned char)*at == UNTOUCHED)
        at++, len--;
    return !len;
}

static void try_given(const struct row *row, size_t size)
{
    char *at = place(size, row->like, row->size), before[4096];
    int rc;

    memcpy(before, t.wall - sizeof(before), sizeof(before));
    rc = row->call(at);
    if (rc != (size < row->least ? -EINVAL : 0))
        fail_msg("%s of %zu bytes: %d", row->name, size, rc);
    if (memcmp(before, t.wall - sizeof(before), sizeof(before)) != 0)
        fail_msg("%s of %zu bytes was changed", row->name, size);
}

static void try_written(const struct row *row, size_t size, const char *whole)
{
    char *at = place(size, NULL, 0);
    size_t known = size < row->size ? size : row->size, told;
    int rc = row->call(at);

    memcpy(&told, at, sizeof(told));
    if (rc != (size < STEP ? -EINVAL : 0) || told != size)
        fail_msg("%s of %zu bytes: %d", row->name, size, rc);
    if (!untouched(t.wall - 4096, (size_t)(at - t.wall + 4096)))
        fail_msg("%s of %zu bytes: written before it", row->name, size);
    if (size >= STEP && memcmp(at + STEP, whole + STEP, known - STEP) != 0)
        fail_msg("%s of %zu bytes: not what is there", row->name, size);
    if (size > known && !untouched(at + known, size - known))
        fail_msg("%s of %zu bytes: more was written than there is", row->name, size);
}

static void test_sizes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct row *row = &rows[i];
        char whole[4096];

        assert_true(row->size % STEP == 0 && row->size + NEWER <= sizeof(whole));
        if (!row->like) {
            memset(whole, 0, sizeof(whole));
            memcpy(whole, &row->size, sizeof(row->size));
            assert_int_equal(row->call(whole), 0);
        }
        for (size_t size = row->from; size <= row->size + NEWER; size += STEP) {
            if (row->like)
                try_given(row, size);
            else
                try_written(row, size, whole);
        }
    }
}

/* ---- configuring: what is given is written, too ---- */

static void write_line(const char *path, const char *line)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(line, file);
    assert_int_equal(fclose(file), 0);
}

/* A key of the file is set where there is room for it, and else as one that isn't known. */
static void try_configure(const char *line, size_t offset, size_t len, size_t size)
{
    char *at = place(size, NULL, 0), *strings = NULL, path[128];
    size_t told;
    int rc;

    snprintf(path, sizeof(path), "%s/configuration", t.w.dir);
    write_line(path, line);
    rc = kvbm_manager_configure((struct kvbm_manager_opts *)(void *)at, path, &strings);
    assert_int_equal(rc, offset + len <= size ? 0 : -EINVAL);
    memcpy(&told, at, sizeof(told));
    assert_int_equal(told, size);
    for (size_t i = STEP; i < size; i++) {
        if (rc < 0 || i < offset || i >= offset + len)
            assert_int_equal((unsigned char)at[i], UNTOUCHED);
    }
    if (rc == 0)
        assert_false(untouched(at + offset, len));
    free(strings);
}

static void test_configure(void **state)
{
#define FIELD(name) \
    offsetof(struct kvbm_manager_opts, name), sizeof(((struct kvbm_manager_opts *)0)->name)
    const size_t all = sizeof(struct kvbm_manager_opts);
    char *strings = NULL;

    (void)state;
    for (size_t size = STEP; size <= all + NEWER; size += STEP) {
        try_configure("host_bytes = 1GiB\n", FIELD(host_bytes), size);
        try_configure("host_threshold = 3\n", FIELD(host_policy.threshold), size);
        try_configure("disk = /somewhere\n", FIELD(disk), size);
        try_configure("io_registered = yes\n", FIELD(io_registered), size);
        try_configure("gpu_copy = single\n", FIELD(gpu_copy), size);
    }
    /* A variable of the environment may be meant for another program. */
    assert_int_equal(setenv("KVBM_GPU_COPY", "single", 1), 0);
    for (size_t size = 0; size <= all + NEWER; size += STEP) {
        struct kvbm_manager_opts *opts = place(size, NULL, 0);

        assert_int_equal(kvbm_manager_configure(opts, NULL, &strings), size ? 0 : -EINVAL);
        if (size >= all)
            assert_int_equal(opts->gpu_copy, KVBM_GPU_SINGLE);
        else if (size)
            assert_true(untouched((char *)opts + STEP, size - STEP));
        free(strings);
        strings = NULL;
    }
    unsetenv("KVBM_GPU_COPY");
}

/* ---- a world of each ---- */

static void open_registry(void)
{
    const struct kvbm_registry_opts opts = {.size = sizeof(opts)};
    const struct kvbm_pool_opts pool_opts = {
        .size = sizeof(pool_opts), .tier = KV_TIER_HOST, .n_blocks = 8, .block_size = PAGE};
    struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_complete done;
    struct kvbm_mutable free_;

    assert_int_equal(kvbm_registry_create(&opts, &t.registry), 0);
    assert_int_equal(kvbm_pool_create(t.registry, &pool_opts, &t.pool), 0);
    assert_int_equal(kvbm_pool_allocate(t.pool, 1, &free_, NULL), 0);
    assert_int_equal(kvbm_pool_complete(t.pool, &free_, 1, &chain, &done), 0);
    assert_int_equal(kvbm_pool_register(t.pool, &done, 1, &t.held), 0);
}

static void open_manager(void)
{
    world_init(&t.w, 64);
    world_start(&t.w);
    world_attach(&t.w, true);
    assert_int_equal(world_store(&t.w, key_, 1), 1);
    block = t.w.block;
    cache_.layout = t.w.layout;
    cache_.pool = t.w.pool;
    job_.cache = t.w.cache;
    transfer_.src = t.w.layout;
    manager_ = (struct kvbm_manager_opts){.block = &t.w.block,
                                          .fingerprint = "test",
                                          .key_len = 16,
                                          .events = t.events,
                                          .host_bytes = UINT64_C(8) * HOST_STRIDE,
                                          .staging_blocks = 4,
                                          .host_eviction = KVBM_EVICT_LINEAGE,
                                          .huge_pages = true,
                                          .host_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .disk_eviction = KVBM_EVICT_LFU,
                                          .disk_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .object_blocks = 100,
                                          .object_timeout_ms = 100,
                                          .object_policy = {KVBM_POLICY_FREQUENCY, 3, 10},
                                          .copy_threads = 1,
                                          .io = KVBM_IO_THREADS,
                                          .io_depth = 2,
                                          .max_offload = 10,
                                          .max_jobs = 10,
                                          .gpu_copy = KVBM_GPU_SINGLE};
    with_disk = manager_;
    with_disk.disk = t.w.disk;
    with_disk.disk_bytes = UINT64_C(8) * HOST_STRIDE;
    with_disk.disk_buffered = with_disk.disk_volatile = true;
}

static int setup(void **state)
{
    const struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    static struct kvbm_storage_opts like = {
        .size = sizeof(like), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)state;
    assert_true(pages != MAP_FAILED);
    t.wall = pages + 4096;
    assert_int_equal(mprotect(t.wall, 4096, PROT_NONE), 0);
    assert_int_equal(kvbm_events_create(NULL, &t.events), 0);
    assert_int_equal(kvbm_copier_create(NULL, &t.copier), 0);
    open_registry();
    open_manager();
    allocator_ = kvbm_allocator_of(&like);
    assert_int_equal(kvbm_layout_allocate(&t.w.block, &allocator, &t.other), 0);
    transfer_.dst = t.other;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvbm_copier_destroy(t.copier);
    kvbm_layout_destroy(t.other);
    kvbm_immutable_release(&t.held);
    assert_int_equal(kvbm_pool_destroy(t.pool), 0);
    assert_int_equal(kvbm_registry_destroy(t.registry), 0);
    world_fini(&t.w);
    assert_int_equal(kvbm_events_destroy(t.events), 0);
    munmap(t.wall - 4096, 8192);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_configure),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
