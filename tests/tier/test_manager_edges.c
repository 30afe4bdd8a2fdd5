// SPDX-License-Identifier: Apache-2.0
/* Unusual calls: keys at other positions, pins released early, jobs never polled, parts of
 * heads. */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "tier/kitchen.h"

static void forget_host(struct world *w)
{
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST));
}

static uint8_t where_in_the_end(struct world *w, uint64_t first, uint32_t i)
{
    uint8_t at;

    for (int tries = 0; (at = world_where(w, first, i)) == KVBM_PENDING && tries < 500; tries++)
        usleep(10000);
    return at;
}

/* ---- each key is used, also those behind one that isn't there ---- */

static void test_touch_behind_a_gap(void **state)
{
    uint64_t keys[4];
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 4), 4);
    assert_int_equal(world_store(&w, 200, 6), 6);
    world_keys(100, keys, 4);
    assert_int_equal(
        kvbm_pool_reset_keys(kvbm_manager_pool(w.m, KV_TIER_HOST), 0, &keys[1], 1, NULL), 0);
    assert_int_equal(kvbm_manager_touch(w.m, 0, keys, 4), 1);
    assert_int_equal(world_store(&w, 300, 6),
                     6); /* three are free, three of 200.. are the oldest */
    assert_int_equal(world_where(&w, 100, 0), KVBM_READY);
    assert_int_equal(world_where(&w, 100, 2), KVBM_READY);
    assert_int_equal(world_where(&w, 100, 3), KVBM_READY);
    world_fini(&w);
}

/* ---- a key at another position than it was stored with: a miss, not an endless fetch ---- */

static void test_fetched_at_another_position(void **state)
{
    uint64_t keys[2] = {1001, 1001}; /* it is the second of its sequence; and here it is twice */
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    uint8_t at[2];
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    forget_host(&w);
    assert_true(kvbm_manager_prepare_load(w.m, &chain, 2, NULL, &pin) >= 0);
    assert_int_equal(kvbm_pin_wait(pin, 10000), 0);
    assert_int_equal(kvbm_pin_state(pin, at), 0);
    assert_int_equal(at[0], KVBM_MISS);
    kvbm_pin_release(pin);
    assert_int_equal(world_stats(&w).host.blocks_in, 4);
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* The object store says yes, but that can't be remembered: the caller isn't told to ask again for
 * ever. */
static void test_asked_at_another_position(void **state)
{
    uint64_t key = 1001;
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, true);
    assert_int_equal(kvbm_pool_allocate(w.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_pool_complete(w.pool, &block, 1, &chain, &complete), 0);
    assert_int_equal(kvbm_pool_register(w.pool, &complete, 1, &held), 0);
    assert_int_equal(where_in_the_end(&w, 1000, 0), KVBM_REMOTE);
    assert_int_equal(where_in_the_end(&w, 1000, 1), KVBM_MISS);
    kvbm_immutable_release(&held);
    world_fini(&w);
}

/* "Isn't there" is believed for a moment, but not when the block has come there since. */
static void test_stored_after_a_miss(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(where_in_the_end(&w, 1000, 3), KVBM_MISS);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    forget_host(&w);
    assert_int_equal(world_where(&w, 1000, 3), KVBM_REMOTE);
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* ---- a job whose pin was let go, and whose blocks somebody else didn't bring, fetches them itself
 * ---- */

static void test_waits_for_nothing(void **state)
{
    uint64_t keys[4];
    uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct kvbm_pin *store;
    struct kvbm_done done;
    struct world w;
    int64_t id;

    (void)state;
    world_init(&w, 12);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 100u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    world_keys(1000, keys, 4);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    forget_host(&w);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &store), 4);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &job.pin), 4);
    job.cache = w.cache;
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    world_wipe(&w);
    kvbm_pin_release(store); /* nothing was written */
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, 0);
    assert_int_equal(done.n_ok, 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(world_holds(&w, i, keys[i]));
    world_fini(&w);
}

/* Blocks that another pin reserved and never writes delay no pin or job beyond its deadline. */
static void test_deadline_of_waiting(void **state)
{
    uint64_t keys[4];
    uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *store;
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_keys(1000, keys, 4);
    assert_int_equal(world_store(&w, 1000, 2), 2);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &store), 2);
    for (int way = 0; way < 2; way++) {
        uint64_t deadline = kv_now_ns() + KV_NS_PER_S;
        struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = way ? 0 : deadline};
        struct kvbm_job job = {.size = sizeof(job),
                               .cache = w.cache,
                               .blocks = blocks,
                               .deadline_ns = way ? deadline : 0};
        struct kvbm_done done;
        int64_t id;

        world_wipe(&w);
        assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 4, &opts, &job.pin), 4);
        usleep(way ? 0 : 10000); /* the mover sleeps */
        id = kvbm_manager_submit(w.m, &job);
        assert_true(id > 0);
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 60000, &done), 0);
        assert_true(kv_now_ns() >= deadline);
        assert_int_equal(done.status, way ? -ETIMEDOUT : 0);
        assert_int_equal(done.n_ok, way ? 0 : 2); /* what is there is there */
        assert_int_equal(world_holds(&w, 1, keys[1]), !way);
        kvbm_pin_release(job.pin);
    }
    kvbm_pin_release(store);
    world_fini(&w);
}

/* ---- jobs ---- */

static void registered(struct world *w, uint64_t *keys, uint32_t n, struct kvbm_immutable *held)
{
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_mutable blocks[CACHE_BLOCKS];
    struct kvbm_complete complete[CACHE_BLOCKS];

    assert_int_equal(kvbm_pool_allocate(w->pool, n, blocks, NULL), 0);
    for (uint32_t i = 0; i < n; i++)
        world_fill(w, blocks[i].handle.block, keys[i]);
    assert_int_equal(kvbm_pool_complete(w->pool, blocks, n, &chain, complete), 0);
    assert_int_equal(kvbm_pool_register(w->pool, complete, n, held), 0);
}

/* Jobs that haven't been polled leave offloading no room; it goes on once they are. */
static void test_offload_after_poll(void **state)
{
    uint64_t keys[4], more[4];
    uint32_t blocks[4] = {8, 9, 10, 11};
    struct kvbm_chain chain = world_chain(more);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct kvbm_immutable held[4];
    struct kvbm_done done;

    (void)state;
    for (int way = 0; way < 2; way++) {
        struct pollfd ready = {.events = POLLIN};
        struct world w;
        int64_t id;

        world_init(&w, 32);
        w.opts.max_jobs = 1;
        world_start(&w);
        world_attach(&w, true);
        world_keys(100, keys, 4);
        world_keys(200, more, 4);
        registered(&w, keys, 4, held);
        assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &job.pin), 4);
        job.cache = w.cache;
        id = kvbm_manager_submit(w.m, &job);
        assert_true(id > 0);
        kvbm_pin_release(job.pin);
        ready.fd = kvbm_manager_fd(w.m);
        assert_int_equal(poll(&ready, 1, 30000), 1);
        assert_int_equal(kvbm_manager_offload(w.cache, held, 4, 0), 4);
        assert_int_equal(kvbm_manager_drain(w.m, 20), -ETIMEDOUT);
        if (way == 0)
            assert_int_equal(kvbm_manager_poll(w.m, &done, 1), 1);
        else
            assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 0, &done), 0);
        assert_int_equal(kvbm_manager_drain(w.m, 10000), 0);
        assert_int_equal(world_where(&w, 100, 3), KVBM_READY);
        assert_int_equal(kvbm_pool_release(w.pool, held, 4), 0);
        world_fini(&w);
    }
}

/* Blocks retained in the cache's pool pass min_priority, and keep their priority when offloaded. */
static void test_priorities_go_down(void **state)
{
    uint64_t keys[8];
    struct kvbm_immutable held[8];
    struct world w;

    (void)state;
    world_init(&w, 32);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 100u * HOST_STRIDE;
    w.opts.host_policy.min_priority = w.opts.disk_policy.min_priority = 60;
    world_start(&w);
    world_attach(&w, true);
    world_keys(100, keys, 8);
    registered(&w, keys, 8, held);
    assert_int_equal(kvbm_pool_retain(w.pool, 0, keys, 4, 80, 0), 4);
    assert_int_equal(kvbm_manager_offload(w.cache, held, 8, 0), 8);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(kvbm_pool_release(w.pool, held, 8), 0);
    assert_int_equal(world_where(&w, 100, 3), KVBM_READY);
    assert_int_equal(world_where(&w, 100, 4), KVBM_MISS);
    assert_int_equal(world_stats(&w).host.filtered, 4);
    forget_host(&w);
    assert_int_equal(world_where(&w, 100, 3), KVBM_ON_DISK);
    assert_int_equal(world_load(&w, 100, 8), 4);
    world_fini(&w);
}

static uint32_t host_priority(struct world *w, const uint64_t *key)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held;

    assert_int_equal(kvbm_pool_match(kvbm_manager_pool(w->m, KV_TIER_HOST), 0, key, 1,
                                     KVBM_MATCH_NO_TOUCH, &held),
                     1);
    assert_int_equal(kvbm_immutable_info(&held, &info), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    return info.priority;
}

/* And what is retained for a while isn't retained for ever down there. */
static void test_priorities_end_down_there(void **state)
{
    const uint64_t ttl_ms = 1000;
    struct kvbm_immutable held[8];
    uint64_t keys[8], end;
    struct world w;

    (void)state;
    world_init(&w, 32);
    world_start(&w);
    world_attach(&w, true);
    world_keys(100, keys, 8);
    registered(&w, keys, 8, held);
    assert_int_equal(kvbm_pool_retain(w.pool, 0, keys, 3, 80, ttl_ms), 3);
    assert_int_equal(kvbm_pool_retain(w.pool, 0, keys + 3, 3, 80, 0), 3);
    end = kv_now_ns() + (ttl_ms + 2) * KV_NS_PER_MS; /* ends are rounded up, once on the way */
    assert_int_equal(kvbm_manager_offload(w.cache, held, 8, 0), 8);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    while (kv_now_ns() < end)
        usleep(1000);
    for (size_t i = 0; i < 8; i++)
        assert_int_equal(host_priority(&w, &keys[i]), i >= 3 && i < 6 ? 80 : KVBM_PRIORITY_DEFAULT);
    assert_int_equal(kvbm_pool_release(w.pool, held, 8), 0);
    world_fini(&w);
}

struct poller {
    struct world *w;
    _Atomic bool stop;
    _Atomic long polled;
};

static void *poll_all(void *arg)
{
    struct poller *poller = arg;
    struct kvbm_done done[8];

    while (!poller->stop)
        poller->polled += kvbm_manager_poll(poller->w->m, done, 8);
    return NULL;
}

/* An engine's thread polls while others onboard: what they wait for isn't taken from them. */
static void test_onboard_beside_poll(void **state)
{
    uint64_t keys[8];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_immutable held[8];
    struct poller poller = {0};
    struct world w;
    pthread_t thread;

    (void)state;
    world_init(&w, 32);
    world_start(&w);
    world_attach(&w, true);
    world_keys(100, keys, 8);
    registered(&w, keys, 8, held);
    assert_int_equal(kvbm_manager_offload(w.cache, held, 8, 0), 8);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(kvbm_pool_release(w.pool, held, 8), 0);
    poller.w = &w;
    assert_int_equal(pthread_create(&thread, NULL, poll_all, &poller), 0);
    for (int i = 0; i < 300; i++) {
        assert_int_equal(kvbm_pool_reset_inactive(w.pool), 8);
        world_wipe(&w);
        assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 8, 30000, held), 8);
        for (int k = 0; k < 8; k++)
            assert_true(world_holds(&w, held[k].handle.block, keys[k]));
        assert_int_equal(kvbm_pool_release(w.pool, held, 8), 0);
    }
    poller.stop = true;
    pthread_join(thread, NULL);
    assert_int_equal(poller.polled, 0);
    world_fini(&w);
}

/* More blocks than the copier takes at a time by default. */
static void test_large_job(void **state)
{
    enum { N = 65536 + 100 };
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout_config config = {.size = sizeof(config),
                                        .kind = KVBM_FULLY_CONTIGUOUS,
                                        .num_blocks = N,
                                        .num_layers = 1,
                                        .outer_dim = 1,
                                        .page_size = 1,
                                        .inner_dim = 8,
                                        .dtype_width_bytes = 1};
    struct kvbm_manager_opts opts = {
        .size = sizeof(opts), .block = &config, .host_bytes = UINT64_C(4096) * N};
    struct kvbm_cache_opts cache_opts = {.size = sizeof(cache_opts)};
    uint64_t *keys = malloc(N * sizeof(*keys));
    uint32_t *blocks = malloc(N * sizeof(*blocks));
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct kvbm_layout *layout;
    struct kvbm_manager *m;
    struct kvbm_done done;
    int64_t id;

    (void)state;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    assert_int_equal(kvbm_manager_create(&opts, &m), 0);
    cache_opts.layout = layout;
    assert_int_equal(kvbm_cache_attach(m, &cache_opts, &job.cache), 0);
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = i + 1;
        blocks[i] = i;
    }
    assert_int_equal(kvbm_manager_prepare_store(m, &chain, N, &job.pin), N);
    id = kvbm_manager_submit(m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(m, (uint64_t)id, 60000, &done), 0);
    assert_int_equal(done.n_ok, N);
    assert_int_equal(kvbm_manager_destroy(m, 10000), 0);
    assert_int_equal(kvbm_cache_detach(job.cache), 0);
    kvbm_layout_destroy(layout);
    free(keys);
    free(blocks);
}

/* ---- a source that isn't ready while the copier is full ---- */

/* The descriptor is the caller's again once submit has returned, even if the job can't begin before
 * others have ended: another one of its number, which is readable, says nothing about these
 * bytes. */
static void test_ready_fd_closed_while_stalled(void **state)
{
    enum { MANY = 1 << 20 };
    uint64_t key = 500, *keys = malloc(MANY * sizeof(*keys));
    uint32_t *blocks = malloc(MANY * sizeof(*blocks)), source = 0;
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_cache_opts opts = {.size = sizeof(opts)};
    struct kvbm_chain chain = world_chain(keys), one = world_chain(&key);
    struct kvbm_job load = {.size = sizeof(load), .blocks = blocks};
    struct kvbm_job store = {.size = sizeof(store), .blocks = &source};
    int ready, mine, other;
    struct kvbm_layout *layout;
    struct kvbm_done done;
    int64_t large, id;
    struct world w;

    (void)state;
    world_init(&w, 8);
    w.block.num_layers = w.block.outer_dim = w.block.page_size = w.block.num_heads = 1;
    w.block.inner_dim = 32;
    w.block.num_blocks = MANY;
    w.opts.copy_threads = 1;
    assert_int_equal(kvbm_layout_allocate(&w.block, &allocator, &layout), 0);
    world_start(&w);
    opts.layout = layout;
    assert_int_equal(kvbm_cache_attach(w.m, &opts, &w.cache), 0);
    store.cache = load.cache = w.cache;
    assert_int_equal(kvbm_manager_prepare_store(w.m, &one, 1, &store.pin), 1);
    id = kvbm_manager_submit(w.m, &store);
    kvbm_pin_release(store.pin);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    for (uint32_t i = 0; i < MANY; i++) {
        keys[i] = key;
        blocks[i] = i;
    }
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, MANY, NULL, &load.pin), MANY);
    key = 600;
    assert_int_equal(kvbm_manager_prepare_store(w.m, &one, 1, &store.pin), 1);
    ready = eventfd(0, EFD_CLOEXEC);
    mine = dup(ready);
    store.ready_fd = ready;
    large = kvbm_manager_submit(w.m, &load); /* as many blocks as the copier takes */
    id = kvbm_manager_submit(w.m, &store);
    close(ready);
    other = eventfd(1, EFD_CLOEXEC);
    assert_true(large > 0 && id > 0 && other == ready);
    kvbm_pin_release(load.pin);
    kvbm_pin_release(store.pin);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)large, 60000, &done), 0);
    assert_int_equal(done.n_ok, MANY);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 100, &done), -ETIMEDOUT);
    assert_int_equal(eventfd_write(mine, 1), 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, 0);
    close(mine);
    close(other);
    world_fini(&w);
    kvbm_layout_destroy(layout);
    free(blocks);
    free(keys);
}

/* ---- caches of some of the heads ---- */

static struct kvbm_layout *layout_of(const struct kvbm_layout_config *config)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout *layout;

    assert_int_equal(kvbm_layout_allocate(config, &allocator, &layout), 0);
    return layout;
}

static struct kvbm_layout *half_layout(const struct world *w)
{
    struct kvbm_layout_config config = w->block;

    config.num_heads = HEADS / 2;
    config.inner_dim = HEADS / 2 * HEAD_DIM;
    return layout_of(&config);
}

/* Fill a cache of some heads with the part, from head @first on, of the block with the key. */
static void fill_half(const struct kvbm_layout *layout, uint32_t first, uint64_t key)
{
    const uint32_t half = HEADS / 2 * HEAD_DIM;

    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            uint16_t *at = world_region(layout, 0, layer, outer);

            for (uint32_t t = 0; t < PAGE; t++)
                for (uint32_t i = 0; i < half; i++)
                    at[t * half + i] = world_element(key, layer, outer,
                                                     t * HEADS * HEAD_DIM + first * HEAD_DIM + i);
        }
    }
}

/* A cache is refused whose elements no store could convert into the host tier's. */
static void test_elements_that_arent_converted(void **state)
{
    static const struct {
        kvx_dtype_t host, cache;
        int want;
    } cases[] = {{KVX_DTYPE_U8, KVX_DTYPE_F8_E4M3, -EINVAL},
                 {KVX_DTYPE_F8_E4M3, KVX_DTYPE_U8, -EINVAL},
                 {KVX_DTYPE_U8, KVX_DTYPE_U8, 0},
                 {KVX_DTYPE_U8, KVX_DTYPE_INVALID, 0},
                 {KVX_DTYPE_F8_E5M2, KVX_DTYPE_F8_E4M3, 0}};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kvbm_cache_opts opts = {.size = sizeof(opts)};
        struct kvbm_cache *cache;
        struct kvbm_layout *layout;
        struct world w;

        world_init(&w, 4);
        w.block.dtype = cases[i].host;
        w.block.dtype_width_bytes = 1;
        world_start(&w);
        w.block.dtype = cases[i].cache;
        opts.layout = layout = layout_of(&w.block);
        assert_int_equal(kvbm_cache_attach(w.m, &opts, &cache), cases[i].want);
        if (cases[i].want == 0)
            assert_int_equal(kvbm_cache_detach(cache), 0);
        kvbm_layout_destroy(layout);
        world_fini(&w);
    }
}

/* A block that has some of its heads isn't found before it has them all. */
static void test_some_heads(void **state)
{
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .n_heads = HEADS / 2};
    uint64_t key = 100;
    uint32_t block = 0;
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_job job = {.size = sizeof(job), .blocks = &block};
    struct kvbm_layout *half;
    struct kvbm_cache *cache;
    struct kvbm_done done;
    struct world w;

    (void)state;
    world_init(&w, 4);
    world_start(&w);
    world_attach(&w, false);
    opts.layout = half = half_layout(&w);
    opts.first_head = UINT32_MAX;
    assert_int_equal(kvbm_cache_attach(w.m, &opts, &cache), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &job.pin), 1);
    for (uint32_t first = 0; first < HEADS; first += HEADS / 2) {
        int64_t id;
        uint8_t ok = 0;

        opts.first_head = first;
        assert_int_equal(kvbm_cache_attach(w.m, &opts, &cache), 0);
        fill_half(half, first, key);
        job.cache = cache;
        job.ok = &ok;
        id = kvbm_manager_submit(w.m, &job);
        assert_true(id > 0);
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
        assert_int_equal(done.n_ok, 1);
        assert_int_equal(ok, 1);
        assert_int_equal(world_where(&w, key, 0), KVBM_PENDING);
        assert_int_equal(kvbm_cache_detach(cache), 0);
    }
    assert_int_equal(kvbm_pin_commit(job.pin, NULL), 1);
    kvbm_pin_release(job.pin);
    assert_int_equal(world_load(&w, key, 1), 1); /* and compares every byte */
    kvbm_layout_destroy(half);
    world_fini(&w);
}

/* Why onboarding brings nothing: no room in the cache's pool, or nobody has it. */
static void test_onboard_says_why(void **state)
{
    struct kvbm_mutable all[CACHE_BLOCKS];
    struct kvbm_immutable held[4];
    uint64_t keys[4];
    struct kvbm_chain chain = world_chain(keys);
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, true);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    world_keys(5000, keys, 4);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 4, 30000, held), 0);
    world_keys(1000, keys, 4);
    kvbm_pool_reset_inactive(w.pool);
    assert_int_equal(kvbm_pool_allocate(w.pool, CACHE_BLOCKS, all, NULL), 0);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 4, 30000, held), -ENOSPC);
    assert_int_equal(kvbm_pool_release_mutable(w.pool, all, CACHE_BLOCKS), 0);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 4, 30000, held), 4);
    assert_int_equal(kvbm_pool_release(w.pool, held, 4), 0);
    world_fini(&w);
}

static void count_waiting(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)level, (void)len;
    if (strstr(line, "waiting for it"))
        ++*(int *)arg;
}

/* The disk tier is another's: create waits for a second, and says so. */
static void test_disk_is_anothers(void **state)
{
    struct kvbm_manager *second = NULL;
    uint64_t began;
    int waiting = 0;
    struct world w;

    (void)state;
    kv_log_set_sink(count_waiting, &waiting);
    kv_log_set_level(KV_LOG_WARN); /* the default */
    world_init(&w, 12);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 8u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 4), 4);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    began = kv_now_ns();
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    assert_in_range(kv_now_ns() - began, 900 * KV_NS_PER_MS, 20 * KV_NS_PER_S);
    assert_int_equal(waiting, 1);
    assert_null(second);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
    kv_log_set_level(KV_LOG_WARN);
    kv_log_set_sink(NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_touch_behind_a_gap),
        cmocka_unit_test(test_fetched_at_another_position),
        cmocka_unit_test(test_asked_at_another_position),
        cmocka_unit_test(test_stored_after_a_miss),
        cmocka_unit_test(test_waits_for_nothing),
        cmocka_unit_test(test_deadline_of_waiting),
        cmocka_unit_test(test_offload_after_poll),
        cmocka_unit_test(test_priorities_go_down),
        cmocka_unit_test(test_priorities_end_down_there),
        cmocka_unit_test(test_onboard_beside_poll),
        cmocka_unit_test(test_large_job),
        cmocka_unit_test(test_ready_fd_closed_while_stalled),
        cmocka_unit_test(test_elements_that_arent_converted),
        cmocka_unit_test(test_some_heads),
        cmocka_unit_test(test_onboard_says_why),
        cmocka_unit_test(test_disk_is_anothers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
