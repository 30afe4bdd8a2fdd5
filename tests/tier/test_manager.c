// SPDX-License-Identifier: Apache-2.0
/* Blocks are offloaded and come back with their bytes, through every set of tiers. */
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "skip.h"
#include "tier/kitchen.h"

/* ---- each tier ---- */

static void test_host(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 16);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_where(&w, 100, 0), KVBM_MISS);
    assert_int_equal(world_store(&w, 100, 10), 10);
    assert_int_equal(world_where(&w, 100, 9), KVBM_READY);
    assert_int_equal(world_store(&w, 100, 10), 0); /* is there */
    assert_int_equal(world_load(&w, 100, 10), 10);
    assert_int_equal(world_load(&w, 100, 12), 10); /* a prefix is of use */
    assert_int_equal(world_load(&w, 500, 3), 0);
    assert_int_equal(world_store(&w, 200, 10), 10); /* 4 of the old ones give way, the last ones */
    assert_int_equal(world_load(&w, 200, 10), 10);
    assert_int_equal(world_load(&w, 100, 10), 6);
    world_fini(&w);
}

/* The host tier is small: what it lost is on the disk, also after a restart. */
static void test_disk(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t first = 1000; first < 6000; first += 1000) {
        assert_int_equal(world_store(&w, first, 10), 10);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    assert_int_equal(world_where(&w, 1000, 3), KVBM_ON_DISK);
    assert_int_equal(world_load(&w, 1000, 10), 10);
    assert_int_equal(world_where(&w, 1000, 3), KVBM_READY);
    assert_int_equal(world_load(&w, 3000, 10), 10);
    assert_int_equal(world_stats(&w).disk.blocks_in, 50);
    assert_true(world_stats(&w).disk.blocks_out >= 18);
    world_stop(&w);

    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_stats(&w).disk.used, 50);
    for (uint64_t first = 1000; first < 6000; first += 1000) {
        assert_int_equal(world_where(&w, first, 9), KVBM_ON_DISK);
        assert_int_equal(world_load(&w, first, 10), 10);
    }
    world_fini(&w);
}

/* Whether a child has this page of ours. */
static bool child_has(const void *page)
{
    unsigned char in_memory;
    pid_t child = fork();
    int status;

    if (child == 0) /* its manager is of no use, and no harm */
        _exit(mincore((void *)(uintptr_t)page, 4096, &in_memory) == 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* The host tier's memory, or the staging buffers, registered with io_uring; a child gets none of
 * it. */
static void registered(uint32_t host_blocks)
{
    struct kvbm_view view;
    struct world w;

    world_init(&w, host_blocks);
    world_with_disk(&w, 100);
    world_start(&w);
    assert_int_equal(world_stats(&w).registered_bytes, 0);
    assert_int_equal(kvbm_layout_block(kvbm_manager_host_layout(w.m), 0, &view), 0);
    assert_true(child_has((const void *)(uintptr_t)view.addr)); // NOLINT(performance-no-int-to-ptr)
    world_stop(&w);

    w.opts.io_registered = true;
    world_start(&w);
    world_attach(&w, false);
    if (!world_stats(&w).registered_bytes) {
        world_fini(&w);
        skip_because("no io_uring here, or it registers no memory (RLIMIT_MEMLOCK)");
    }
    assert_int_equal(world_stats(&w).registered_bytes,
                     (uint64_t)(host_blocks ? host_blocks : 64) * HOST_STRIDE);
    assert_int_equal(kvbm_layout_block(kvbm_manager_host_layout(w.m), 0, &view), 0);
    assert_false(
        child_has((const void *)(uintptr_t)view.addr)); // NOLINT(performance-no-int-to-ptr)
    for (uint64_t first = 1000; first < 6000; first += 1000) {
        assert_int_equal(world_store(&w, first, 10), 10);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    for (uint64_t first = 1000; first < 6000; first += 1000)
        assert_int_equal(world_load(&w, first, 10), 10);
    world_fini(&w);
}

static void test_registered(void **state)
{
    (void)state;
    registered(12);
    registered(0);
}

/* Without a host tier. */
static void test_bypass(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 0);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, false);
    assert_null(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_store(&w, 1000, 40), 40);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_where(&w, 1000, 39), KVBM_ON_DISK);
    assert_int_equal(world_load(&w, 1000, 40), 40);
    assert_int_equal(world_store(&w, 1000, 40), 0);
    assert_int_equal(world_load(&w, 1000, 40), 40);
    world_fini(&w);
}

static void test_object(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 10), 10);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_store(&w, 2000, 10), 10);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_where(&w, 1000, 9), KVBM_REMOTE);
    assert_int_equal(world_load(&w, 1000, 10), 10);
    assert_int_equal(world_load(&w, 2000, 10), 10);
    world_stop(&w);

    world_start(&w); /* nobody remembers, but the store has it */
    world_attach(&w, false);
    wait_until(world_where(&w, 1000, 9) != KVBM_PENDING);
    assert_int_equal(world_where(&w, 1000, 9), KVBM_REMOTE);
    assert_int_equal(world_load(&w, 1000, 12), 10);
    assert_int_equal(world_load(&w, 2000, 10), 10); /* without having been asked for */
    assert_int_equal(world_load(&w, 3000, 10), 0);
    world_fini(&w);
}

/* A write-through job ends when the object store has the blocks. */
static void test_write_through(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 30);
    w.opts.object = w.object;
    w.opts.object_write_through = true;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 20), 20);
    assert_int_equal(world_stats(&w).object.blocks_in, 20);
    world_fini(&w);
}

static void test_all_tiers(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 8);
    world_with_disk(&w, 20);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t first = 1000; first < 9000; first += 1000) {
        assert_int_equal(world_store(&w, first, 8), 8);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    for (uint64_t first = 1000; first < 9000; first += 1000) {
        assert_int_equal(world_load(&w, first, 8), 8);
        assert_int_equal(kvbm_manager_drain(w.m, 30000),
                         0); /* what goes down again holds host blocks */
    }
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 8000, 8), 8);
    assert_true(world_stats(&w).object.blocks_out > 0);
    assert_true(world_stats(&w).disk.blocks_out > 0);
    world_fini(&w);
}

/* ---- pins ---- */

static void test_reserved_is_pending(void **state)
{
    uint64_t keys[6];
    uint32_t blocks[6];
    uint8_t at[6], ok = 0x07;
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *store, *again, *load;
    struct world w;

    (void)state;
    world_init(&w, 16);
    world_start(&w);
    world_keys(100, keys, 6);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &store), 4);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 6, &again),
                     2); /* the rest is on its way */
    assert_int_equal(kvbm_manager_lookup(w.m, &chain, 6, at), 6);
    assert_int_equal(at[0], KVBM_PENDING);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 6, NULL, &load), 6);
    assert_int_equal(kvbm_pin_wait(load, 20), -ETIMEDOUT);
    assert_int_equal(kvbm_pin_blocks(store, blocks), 4);
    for (int i = 0; i < 4; i++)
        memset((void *)world_region(kvbm_manager_host_layout(w.m), blocks[i], 0, 0), i, 64);
    assert_int_equal(kvbm_pin_commit(store, &ok), 3); /* the fourth wasn't written */
    assert_int_equal(kvbm_pin_commit(again, NULL), 2);
    assert_int_equal(kvbm_pin_wait(load, 10000), 0);
    assert_int_equal(kvbm_pin_state(load, at), 3);
    assert_int_equal(at[3], KVBM_MISS);
    assert_int_equal(at[4], KVBM_READY);
    assert_int_equal(kvbm_pin_blocks(load, blocks), 5);
    for (int i = 0; i < 3; i++)
        assert_int_equal(*(uint8_t *)world_region(kvbm_manager_host_layout(w.m), blocks[i], 0, 0),
                         i);
    assert_int_equal(kvbm_manager_destroy(w.m, 0), -EBUSY);
    kvbm_pin_release(store);
    kvbm_pin_release(again);
    kvbm_pin_release(load);
    world_fini(&w);
}

/* Pinned blocks aren't evicted: a store that needs their room gets KVBM_BUSY. */
static void test_pinned_stays(void **state)
{
    uint64_t keys[10], other[10];
    uint8_t at[10];
    struct kvbm_chain chain = world_chain(keys), want = world_chain(other);
    struct kvbm_pin *load, *store;
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 10);
    world_keys(900, other, 10);
    assert_int_equal(world_store(&w, 100, 10), 10);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 10, NULL, &load), 10);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &want, 10, &store), 2);
    kvbm_pin_state(store, at);
    assert_int_equal(at[1], KVBM_PENDING);
    assert_int_equal(at[2], KVBM_BUSY);
    kvbm_pin_release(store); /* nothing was written: nothing is there */
    assert_int_equal(world_where(&w, 900, 0), KVBM_MISS);
    assert_int_equal(kvbm_pin_state(load, at), 10);
    kvbm_pin_release(load);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &want, 10, &store), 10);
    kvbm_pin_release(store);
    world_fini(&w);
}

/* Many callers want the same blocks from the disk: they are read once. */
static void test_fetched_once(void **state)
{
    uint64_t keys[10];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pins[8];
    struct world w;

    (void)state;
    world_init(&w, 20);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 10), 10);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_keys(100, keys, 10);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    for (int i = 0; i < 8; i++)
        assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 10, NULL, &pins[i]), 10);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(kvbm_pin_wait(pins[i], 30000), 0);
        assert_int_equal(kvbm_pin_state(pins[i], NULL), 10);
        kvbm_pin_release(pins[i]);
    }
    assert_int_equal(world_stats(&w).disk.blocks_out, 10);
    world_fini(&w);
}

/* ---- caches with a pool ---- */

static void test_offload_and_onboard(void **state)
{
    uint64_t keys[12];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_mutable blocks[12];
    struct kvbm_complete complete[12];
    struct kvbm_immutable held[12];
    struct pollfd ready;
    struct world w;

    (void)state;
    world_init(&w, 32);
    world_with_disk(&w, 100);
    world_start(&w);
    world_attach(&w, true);
    world_keys(100, keys, 12);
    assert_int_equal(kvbm_pool_allocate(w.pool, 10, blocks, NULL), 0);
    for (int i = 0; i < 10; i++)
        world_fill(&w, blocks[i].handle.block, keys[i]);
    assert_int_equal(kvbm_pool_complete(w.pool, blocks, 10, &chain, complete), 0);
    assert_int_equal(kvbm_pool_register(w.pool, complete, 10, held), 0);
    assert_int_equal(kvbm_manager_offload(w.cache, held, 10, 0), 10);
    assert_int_equal(kvbm_pool_release(w.pool, held, 10), 0);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(kvbm_pool_reset_inactive(w.pool), 10);
    world_wipe(&w);
    assert_int_equal(world_where(&w, 100, 9), KVBM_READY);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 12, 30000, held), 10);
    for (int i = 0; i < 10; i++)
        assert_true(world_holds(&w, held[i].handle.block, keys[i]));
    ready = (struct pollfd){.fd = kvbm_manager_fd(w.m), .events = POLLIN};
    assert_int_equal(poll(&ready, 1, 0), 0); /* there is nothing to be polled */
    assert_int_equal(kvbm_pool_release(w.pool, held, 10), 0);
    /* From the disk, half of it being in the cache. */
    assert_int_equal(kvbm_pool_reset_keys(w.pool, 0, keys + 5, 5, NULL), 0);
    assert_int_equal(kvbm_pool_reset(kvbm_manager_pool(w.m, KV_TIER_HOST)), 0);
    assert_int_equal(kvbm_manager_onboard(w.cache, &chain, 10, 30000, held), 10);
    for (int i = 0; i < 10; i++)
        assert_true(world_holds(&w, held[i].handle.block, keys[i]));
    assert_int_equal(kvbm_pool_release(w.pool, held, 10), 0);
    world_fini(&w);
}

/* ---- policies ---- */

static void test_policies(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 40);
    world_with_disk(&w, 100);
    w.opts.disk_policy = (struct kvbm_tier_policy){.policy = KVBM_POLICY_FREQUENCY, .threshold = 2};
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 10), 10);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_stats(&w).disk.blocks_in, 0);
    assert_int_equal(world_stats(&w).disk.filtered, 10);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_store(&w, 100, 5), 5); /* the second time */
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_stats(&w).disk.blocks_in, 5);
    world_stop(&w);

    w.opts.disk_policy = (struct kvbm_tier_policy){.min_priority = KVBM_PRIORITY_DEFAULT + 1};
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 300, 5), 5);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_where(&w, 300, 0), KVBM_READY);
    assert_int_equal(world_stats(&w).disk.blocks_in, 0);
    world_stop(&w);

    w.opts.host_policy.policy = KVBM_POLICY_NEVER;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 400, 5), 0);
    assert_int_equal(world_stats(&w).host.filtered, 5);
    world_fini(&w);
}

/* ---- faults ---- */

static void flip(const char *dir, const char *name, long offset)
{
    char path[200];
    unsigned char byte;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    close(fd);
}

/* A flipped bit on the disk is a miss; the object store has the block still. */
static void test_damaged(void **state)
{
    for (int object = 0; object < 2; object++) {
        struct world w;

        (void)state;
        world_init(&w, 12);
        world_with_disk(&w, 100);
        w.opts.object = object ? w.object : NULL;
        world_start(&w);
        world_attach(&w, false);
        assert_int_equal(world_store(&w, 1000, 10), 10);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        world_stop(&w);
        for (long slot = 0; slot < 10; slot++) {
            if (slot == 4)
                flip(w.dir, "kvbm-cache.slots", 4096 + slot * (long)HOST_STRIDE + 777);
        }
        world_start(&w);
        world_attach(&w, false);
        assert_int_equal(world_load(&w, 1000, 10) == 10, object);
        assert_int_equal(world_stats(&w).disk.bad, 1);
        assert_int_equal(world_stats(&w).disk.used + world_stats(&w).disk.queued >= 9, 1);
        world_fini(&w);
    }
}

/* Another model's blocks aren't ours. */
static void test_fingerprint(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_with_disk(&w, 100);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 1000, 10), 10);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_stop(&w);
    w.opts.fingerprint = "another";
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_load(&w, 1000, 10), 0);
    world_fini(&w);
}

static void test_busy_directory(void **state)
{
    struct kvbm_manager *second = NULL;
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_with_disk(&w, 100);
    world_start(&w);
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    assert_null(second);
    world_fini(&w);
}

/* A policy means the same in a manager as in a pool; only the default differs. */
static void test_eviction(void **state)
{
    static const struct {
        enum kvbm_eviction asked;
        const char *told;
    } each[] = {{KVBM_EVICT_DEFAULT, "lineage eviction"},
                {KVBM_EVICT_LRU, "LRU eviction"},
                {KVBM_EVICT_LFU, "LFU eviction"},
                {KVBM_EVICT_LINEAGE, "lineage eviction"}};

    (void)state;
    for (size_t i = 0; i < sizeof(each) / sizeof(each[0]); i++) {
        char *text = NULL;
        struct world w;
        size_t len;
        FILE *to;

        world_init(&w, 4);
        w.opts.host_eviction = each[i].asked;
        world_start(&w);
        to = open_memstream(&text, &len);
        assert_non_null(to);
        assert_int_equal(kvbm_pool_dump(kvbm_manager_pool(w.m, KV_TIER_HOST), to, 0), 0);
        fclose(to);
        assert_non_null(strstr(text, each[i].told));
        free(text);
        world_fini(&w);
    }
}

static void test_refused(void **state)
{
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};
    struct kvbm_manager *m = NULL;
    struct kvbm_cache *attached;
    struct kvbm_pin *pin;
    uint64_t key = 1;
    struct kvbm_chain chain = world_chain(&key),
                      bad = {.size = sizeof(bad), .keys = &key, .position = 1};
    struct world w;

    (void)state;
    world_init(&w, 12);
    assert_int_equal(kvbm_manager_create(NULL, &m), -EINVAL);
    w.opts.block = NULL;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.block = &w.block;
    w.opts.disk = w.disk;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL); /* no size */
    w.opts.disk_bytes = 1;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL); /* not a block */
    w.opts.disk_bytes = 1 << 20;
    w.opts.fingerprint = "";
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.fingerprint = "x";
    w.opts.disk = "/nonexistent";
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -ENOENT);
    w.opts.disk = NULL;
    w.opts.disk_policy.threshold = 16;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.disk_policy.threshold = 0;
    w.opts.object_policy.min_priority = KVBM_PRIORITY_MAX + 1;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.object_policy.min_priority = KVBM_PRIORITY_MAX;
    w.opts.host_eviction = (enum kvbm_eviction)(KVBM_EVICT_LINEAGE + 1);
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.host_eviction = KVBM_EVICT_DEFAULT;
    world_start(&w);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &bad, 1, NULL, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load(NULL, &chain, 1, NULL, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 1, NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_store(w.m, NULL, 1, &pin), -EINVAL);
    assert_int_equal(kvbm_manager_lookup(w.m, &bad, 1, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_submit(w.m, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_cancel(w.m, 77), -ENOENT);
    assert_int_equal(kvbm_manager_wait(w.m, 77, 0, NULL), -ENOENT);
    assert_int_equal(kvbm_cache_attach(w.m, &cache, &attached), -EINVAL);
    assert_int_equal(kvbm_manager_destroy(NULL, 0), 0);
    world_fini(&w);
}

/* Another order of heads and tokens in the cache. */
static void load_in_order(kvx_dtype_t host, kvx_dtype_t cache)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_cache_opts opts = {.size = sizeof(opts)};
    struct kvbm_layout_config config;
    struct kvbm_layout *hnd, *nhd;
    struct kvbm_cache *other, *mine;
    struct world w;

    world_init(&w, 12);
    w.block.dtype = host;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 5), 5);
    config = w.block;
    config.order = KVBM_ORDER_HND;
    config.dtype = cache;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &hnd), 0);
    opts.layout = hnd;
    assert_int_equal(kvbm_cache_attach(w.m, &opts, &other), 0);
    nhd = w.layout;
    mine = w.cache;
    w.layout = hnd;
    w.cache = other;

    uint64_t keys[5];
    uint32_t blocks[5] = {7, 3, 9, 1, 0};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = other, .blocks = blocks};
    struct kvbm_done done;

    world_keys(100, keys, 5);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 5, NULL, &job.pin), 5);
    int64_t id = kvbm_manager_submit(w.m, &job);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 5);
    for (uint32_t b = 0; b < 5; b++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const uint16_t *at = world_region(hnd, blocks[b], layer, 1);

            for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t t = 0; t < PAGE; t++)
                    for (uint32_t d = 0; d < HEAD_DIM; d++)
                        assert_int_equal(
                            at[(h * PAGE + t) * HEAD_DIM + d],
                            world_element(keys[b], layer, 1, (t * HEADS + h) * HEAD_DIM + d));
        }
    }
    w.layout = nhd;
    w.cache = mine;
    assert_int_equal(kvbm_cache_detach(other), 0);
    kvbm_layout_destroy(hnd);
    world_fini(&w);
}

static void test_order(void **state)
{
    (void)state;
    load_in_order(KVX_DTYPE_F16, KVX_DTYPE_F16);
}

/* Elements only move: nobody needs to know what they are. */
static void test_order_without_dtype(void **state)
{
    (void)state;
    load_in_order((kvx_dtype_t)0, (kvx_dtype_t)0);
    load_in_order((kvx_dtype_t)0, KVX_DTYPE_F16);
    load_in_order(KVX_DTYPE_F16, (kvx_dtype_t)0);
}

static void test_poll(void **state)
{
    uint64_t keys[4];
    uint32_t blocks[4] = {0, 1, UINT32_MAX, 3};
    uint8_t ok = 0xff;
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks, .ok = &ok, .tag = 42};
    struct pollfd ready;
    struct kvbm_done done[2];
    struct world w;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 4);
    ready = (struct pollfd){.fd = kvbm_manager_fd(w.m), .events = POLLIN};
    assert_int_equal(poll(&ready, 1, 0), 0);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &job.pin), 4);
    job.cache = w.cache;
    assert_true(kvbm_manager_submit(w.m, &job) > 0);
    assert_int_equal(kvbm_pin_commit(job.pin, NULL) == -EBUSY || poll(&ready, 1, 30000) == 1, 1);
    assert_int_equal(poll(&ready, 1, 30000), 1);
    assert_int_equal(kvbm_manager_poll(w.m, done, 2), 1);
    assert_int_equal(done[0].tag, 42);
    assert_int_equal(done[0].n, 3);
    assert_int_equal(done[0].n_ok, 3);
    assert_int_equal(ok & 0x0f, 0x0b); /* the one that was left out isn't there */
    assert_int_equal(poll(&ready, 1, 0), 0);
    kvbm_pin_release(job.pin);
    world_fini(&w);
}

/* A child of fork can't use it, and its exit does no harm. */
static void test_fork(void **state)
{
    struct world w;
    int status;
    pid_t child;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    child = fork();
    if (child == 0) {
        uint64_t key = 1;
        struct kvbm_chain chain = world_chain(&key);
        bool refused = kvbm_manager_lookup(w.m, &chain, 1, NULL) == -ECHILD &&
                       kvbm_manager_destroy(w.m, 0) == 0;

        _exit(refused ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(world_store(&w, 100, 5), 5);
    world_fini(&w);
}

/* ---- configuration, metrics ---- */

static char last_line[512];

static void keep_line(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg;
    (void)level;
    snprintf(last_line, sizeof(last_line), "%.*s", (int)len, line);
}

/* An error in a file names the file, the line, the key, and the nearest key or the value. */
static void test_configure_errors(void **state)
{
    static const struct {
        const char *text, *wanted[4];
    } cases[] = {
        {"disk_byts = 1GiB\n", {"unknown key", "line=1", "key=disk_byts", "nearest=disk_bytes"}},
        {"# fine\nhost_bytes = much\n", {"not a value", "line=2", "key=host_bytes", "value=much"}},
        {"\n\nhost_bytes\n", {"without =", "line=3", "key=host_bytes", "file=/"}},
    };
    struct kvbm_manager_opts opts = {.size = sizeof(opts)};
    char *strings;

    (void)state;
    kv_log_set_sink(keep_line, NULL);
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        char path[] = "/tmp/kvbm-configure-XXXXXX";
        int fd = mkstemp(path);

        assert_true(fd >= 0);
        assert_int_equal(write(fd, cases[i].text, strlen(cases[i].text)), strlen(cases[i].text));
        assert_int_equal(kvbm_manager_configure(&opts, path, &strings), -EINVAL);
        for (size_t k = 0; k < KV_COUNT(cases[i].wanted); k++)
            assert_non_null(strstr(last_line, cases[i].wanted[k]));
        close(fd);
        unlink(path);
    }
    kv_log_set_sink(NULL, NULL);
}

static void test_configure(void **state)
{
    struct kvbm_manager_opts opts = {.size = sizeof(opts), .io_depth = 7};
    char *strings, path[] = "/tmp/kvbm-conf-XXXXXX";
    static const char good[] =
        "# tiers\nhost_bytes = 2GiB # of 64\n disk=/a:/b\t#two\ndisk_bytes = 64MiB\n"
        "host_eviction = lineage\ndisk_policy = frequency # presence\n\t # disk = /c\n"
        "disk_threshold = 3\nobject = redis://h/a#b # that one has its own\n"
        "huge_pages = yes\n\nio = threads\nio_registered = yes\n"
        "gpu_copy = engines\n";
    int fd = mkstemp(path);

    (void)state;
    assert_int_equal(write(fd, good, sizeof(good) - 1), sizeof(good) - 1);
    setenv("KVBM_DISK_BYTES", "128MiB", 1);
    setenv("KVBM_HOST_BYTES", "", 1); /* as if it weren't set */
    assert_int_equal(kvbm_manager_configure(&opts, path, &strings), 0);
    assert_int_equal(opts.host_bytes, UINT64_C(2) << 30);
    assert_string_equal(opts.disk, "/a:/b");
    assert_string_equal(opts.object, "redis://h/a#b");
    assert_int_equal(opts.disk_bytes, 128 << 20);
    assert_int_equal(opts.host_eviction, KVBM_EVICT_LINEAGE);
    assert_int_equal(opts.disk_policy.policy, KVBM_POLICY_FREQUENCY);
    assert_int_equal(opts.disk_policy.threshold, 3);
    assert_true(opts.huge_pages);
    assert_int_equal(opts.io, KVBM_IO_THREADS);
    assert_true(opts.io_registered);
    assert_int_equal(opts.gpu_copy, KVBM_GPU_ENGINES);
    assert_int_equal(opts.io_depth, 7);
    free(strings);
    setenv("KVBM_DISK_BYTE", "1GiB", 1);
    last_line[0] = '\0';
    kv_log_set_sink(keep_line, NULL);
    assert_int_equal(kvbm_manager_configure(&opts, NULL, &strings), 0);
    kv_log_set_sink(NULL, NULL);
    assert_non_null(strstr(last_line, "variable=KVBM_DISK_BYTE nearest=KVBM_DISK_BYTES"));
    unsetenv("KVBM_HOST_BYTES");
    unsetenv("KVBM_DISK_BYTE");
    free(strings);
    setenv("KVBM_DISK_BYTES", "much", 1);
    assert_int_equal(kvbm_manager_configure(&opts, path, &strings), -EINVAL);
    unsetenv("KVBM_DISK_BYTES");
    assert_int_equal(kvbm_manager_configure(&opts, "/nonexistent", &strings), -ENOENT);
    assert_int_equal(write(fd, "nosuch = 1\n", 11), 11);
    assert_int_equal(kvbm_manager_configure(&opts, path, &strings), -EINVAL);
    close(fd);
    unlink(path);
}

static void test_metrics(void **state)
{
    struct world w;
    char *text;
    long len;

    (void)state;
    world_init(&w, 12);
    world_with_disk(&w, 50);
    world_start(&w);
    world_attach(&w, false);
    world_store(&w, 100, 10);
    kvbm_manager_drain(w.m, 30000);
    len = kvbm_manager_metrics(w.m, NULL, 0);
    assert_true(len > 1000);
    text = calloc(1, (size_t)len + 100);
    assert_int_equal(kvbm_manager_metrics(w.m, text, (size_t)len + 100), len);
    assert_non_null(strstr(text, "\nkvbm_tier_blocks_in_total{tier=\"disk\"} 10\n"));
    assert_non_null(strstr(text, "\nkvbm_tier_capacity_blocks{tier=\"disk\"} 50\n"));
    assert_non_null(strstr(text, "\nkvbm_tier_used_blocks{tier=\"host\"} 10\n"));
    assert_non_null(strstr(text, "\nkvbm_total_blocks{pool=\"disk\"} 50\n"));
    free(text);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_registered),
        cmocka_unit_test(test_bypass),
        cmocka_unit_test(test_object),
        cmocka_unit_test(test_write_through),
        cmocka_unit_test(test_all_tiers),
        cmocka_unit_test(test_reserved_is_pending),
        cmocka_unit_test(test_pinned_stays),
        cmocka_unit_test(test_fetched_once),
        cmocka_unit_test(test_offload_and_onboard),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_busy_directory),
        cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_order_without_dtype),
        cmocka_unit_test(test_poll),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_configure),
        cmocka_unit_test(test_configure_errors),
        cmocka_unit_test(test_metrics),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
