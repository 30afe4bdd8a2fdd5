// SPDX-License-Identifier: Apache-2.0
/*
 * Direct jobs: the disk and the object store read and write a cache's own memory. The model is a set
 * of keys; the bytes of a block follow from its key, and nobody writes into a block that is no job's.
 */
#define CACHE_BLOCKS 128u
#include <fcntl.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "manager_scattered.h"
#include "tier/kitchen.h"

#define BYTES 8192u
#define NOBODY UINT64_MAX

/* ---- blocks of whole pages ---- */

static struct kvbm_layout_config pages(uint32_t bytes)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = N,
                                       .num_layers = 1,
                                       .outer_dim = 1,
                                       .page_size = 1,
                                       .inner_dim = bytes,
                                       .dtype_width_bytes = 1,
                                       .alignment = 4096};
}

/* Give the world blocks of @bytes, before it is started. */
static void with_pages(struct world *w, uint32_t bytes)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);

    kvbm_layout_destroy(w->layout);
    w->block = pages(bytes);
    assert_int_equal(kvbm_layout_allocate(&w->block, &allocator, &w->layout), 0);
}

static uint64_t *words(const struct world *w, uint32_t block)
{
    struct kvbm_view view;

    assert_int_equal(kvbm_layout_block(w->layout, block, &view), 0);
    return (uint64_t *)(uintptr_t)view.addr; // NOLINT(performance-no-int-to-ptr)
}

static void fill(const struct world *w, uint32_t block, uint64_t key)
{
    for (uint32_t i = 0; i < BYTES / 8; i++)
        words(w, block)[i] = key * UINT64_C(0x9e3779b97f4a7c15) + i;
}

static bool holds(const struct world *w, uint32_t block, uint64_t key)
{
    for (uint32_t i = 0; i < BYTES / 8; i++) {
        if (words(w, block)[i] != key * UINT64_C(0x9e3779b97f4a7c15) + i)
            return false;
    }
    return true;
}

/* ---- jobs ---- */

struct direct {
    uint32_t n, blocks[N];
    uint64_t keys[N];
    uint8_t ok[N / 8];
    struct kvbm_done done;
};

static int64_t begin(struct world *w, bool store, struct direct *d, uint64_t deadline_ns)
{
    struct kvbm_chain chain = scattered(d->keys);
    struct kvbm_job job = KVBM_JOB_INIT;

    for (uint32_t i = 0; i < d->n; i++)
        fill(w, d->blocks[i], store ? d->keys[i] : NOBODY);
    memset(d->ok, 0, sizeof(d->ok));
    job.cache = w->cache;
    job.blocks = d->blocks;
    job.ok = d->ok;
    job.deadline_ns = deadline_ns;
    return kvbm_manager_submit_keys(w->m, &chain, d->n, store, &job);
}

/* Check the job's results against the blocks, which nobody writes to any more. */
static void check_ended(struct world *w, const struct direct *d, bool store)
{
    uint32_t n_ok = 0;

    for (uint32_t i = 0; i < d->n; i++) {
        n_ok += bit(d->ok, i);
        if (store || bit(d->ok, i))
            assert_true(holds(w, d->blocks[i], d->keys[i]));
        fill(w, d->blocks[i], NOBODY - 1);
    }
    assert_int_equal(d->done.n, d->n);
    assert_int_equal(d->done.n_ok, n_ok);
    assert_int_equal(d->done.bytes, n_ok * BYTES);
    assert_true(n_ok < d->n || d->done.status == 0 || d->done.status == -ECANCELED);
}

static uint32_t run_job(struct world *w, bool store, struct direct *d)
{
    int64_t id = begin(w, store, d, 0);

    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, LONG_MS, &d->done), 0);
    check_ended(w, d, store);
    return d->done.n_ok;
}

/* Keys [first, first + n), in blocks that aren't in order. */
static struct direct some(uint64_t first, uint32_t n)
{
    struct direct d = {.n = n};

    for (uint32_t i = 0; i < n; i++) {
        d.keys[i] = first + i;
        d.blocks[i] = (i * 7) % N;
    }
    return d;
}

/* ---- tests ---- */

static void refused(uint32_t bytes, uint32_t host_blocks)
{
    struct direct d = some(1, 4);
    struct world w;

    world_init(&w, host_blocks);
    with_pages(&w, bytes);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(begin(&w, true, &d, 0), -ENOTSUP);
    world_fini(&w);
}

static void test_refused(void **state)
{
    struct direct d = some(1, 4);
    struct kvbm_chain chain = scattered(d.keys);
    struct kvbm_job job = KVBM_JOB_INIT;
    struct world w;
    int64_t id;

    (void)state;
    refused(BYTES, 8);     /* a host tier */
    refused(BYTES + 8, 0); /* no whole pages */
    world_init(&w, 0);
    with_pages(&w, BYTES);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    job.cache = w.cache;
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, &job), -EINVAL);
    id = kvbm_manager_submit_keys(w.m, &chain, 0, true, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, LONG_MS, &d.done), 0);
    assert_int_equal(d.done.n, 0);
    job.blocks = d.blocks;
    d.blocks[3] = N;
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, &job), -EINVAL);
    d.blocks[3] = UINT32_MAX;
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, &job), -EINVAL);
    d.blocks[3] = N - 1;
    job.n_layers = 1;
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, &job), -EINVAL);
    job.n_layers = 0;
    assert_int_equal(kvbm_manager_submit_keys(w.m, NULL, 4, true, &job), -EINVAL);
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &job.pin), 4);
    assert_int_equal(kvbm_manager_submit_keys(w.m, &chain, 4, true, &job), -EINVAL);
    kvbm_pin_release(job.pin);
    world_fini(&w);
}

/* A load that names one block for two keys would spoil both, and the tiers would remove the good
 * records as damaged. It is refused before it begins, and all blocks are still there after it. */
static void block_for_two_keys(bool object)
{
    struct direct stored = some(1, 16), loads;
    struct world w;
    int64_t id;

    world_init(&w, 0);
    with_pages(&w, BYTES);
    if (object)
        with_object(&w);
    else
        world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(run_job(&w, true, &stored), 16);
    for (uint32_t twice = 1; twice < 16; twice += 7) {
        loads = some(1, 16);
        loads.blocks[twice] = loads.blocks[twice - 1];
        assert_int_equal(begin(&w, false, &loads, 0), -EINVAL);
    }
    for (uint32_t again = 0; again < 2; again++) {
        loads = some(1, 16);
        assert_int_equal(run_job(&w, false, &loads), 16);
        assert_int_equal(world_stats(&w).disk.bad + world_stats(&w).object.bad, 0);
        world_stop(&w);
        world_start(&w);
        world_attach(&w, false);
    }
    stored = some(100, 2); /* two keys of a store may have one block */
    stored.keys[1] = stored.keys[0];
    stored.blocks[1] = stored.blocks[0];
    id = begin(&w, true, &stored, 0);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, LONG_MS, &stored.done), 0);
    assert_int_equal(stored.done.n_ok, 2);
    world_fini(&w);
}

static void test_block_for_two_keys(void **state)
{
    (void)state;
    block_for_two_keys(false);
    block_for_two_keys(true);
}

/* Random batches, keys twice in some, against a set, with restarts; by disk, object store, both. */
static void against_a_set(bool disk, bool object, bool vol, uint64_t *rng)
{
    enum { KEYS = 150 };
    bool there[KEYS] = {false};
    struct world w;

    world_init(&w, 0);
    with_pages(&w, BYTES);
    if (disk)
        world_with_disk(&w, 2 * KEYS);
    w.opts.disk_volatile = vol;
    if (object)
        with_object(&w);
    world_start(&w);
    world_attach(&w, false);
    for (size_t round = 0; round < unit_rounds(30); round++) {
        bool store = unit_below(rng, 2);
        uint8_t at[N];
        struct direct d = some(0, 1 + (uint32_t)unit_below(rng, 80));
        uint32_t n = 0;

        for (uint32_t i = 0; i < d.n; i++)
            d.keys[i] = unit_below(rng, KEYS);
        lookup(&w, d.keys, d.n, at);
        for (uint32_t i = 0; i < d.n; i++) {
            n += store || there[d.keys[i]];
            there[d.keys[i]] |= store;
        }
        assert_int_equal(run_job(&w, store, &d), n);
        lookup(&w, d.keys, d.n, at);
        for (uint32_t i = 0; i < d.n; i++)
            assert_int_equal(at[i] != KVBM_MISS, there[d.keys[i]]);
        if (unit_below(rng, 10) == 0)
            restart(&w);
    }
    assert_int_equal(world_stats(&w).host.blocks_in, 0);
    world_fini(&w);
}

static void test_against_a_set(void **state)
{
    uint64_t rng = unit_seed();

    (void)state;
    against_a_set(true, false, false, &rng);
    against_a_set(true, false, true, &rng);
    against_a_set(false, true, false, &rng);
    against_a_set(true, true, false, &rng);
}

/* Zero a word in the middle of @key's block in the file of the disk tier. */
static void damage(const struct world *w, uint64_t key)
{
    uint64_t word = key * UINT64_C(0x9e3779b97f4a7c15) + 64, found = 0, zero = 0;
    off_t at = 4096 + 512;
    char path[256];
    int fd;

    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", w->disk);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    while (pread(fd, &found, 8, at) == 8 && found != word)
        at += BYTES;
    assert_int_equal(found, word);
    assert_int_equal(pwrite(fd, &zero, 8, at), 8);
    close(fd);
}

/* Bytes on the disk are damaged: that key's bit is 0, and the others' bytes are there. */
static void test_damaged(void **state)
{
    struct direct d = some(100, 32);
    struct world w;

    (void)state;
    world_init(&w, 0);
    with_pages(&w, BYTES);
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(run_job(&w, true, &d), 32);
    world_stop(&w);
    damage(&w, 107);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(run_job(&w, false, &d), 31);
    assert_false(bit(d.ok, 7));
    assert_int_equal(world_stats(&w).disk.bad, 1);
    assert_int_equal(run_job(&w, true, &d), 32); /* stores it anew */
    assert_int_equal(run_job(&w, false, &d), 32);
    world_fini(&w);
}

static void start_shaky(struct world *w)
{
    memset(shaky, 0, sizeof(*shaky));
    world_init(w, 0);
    with_pages(w, BYTES);
    snprintf(w->object, sizeof(w->object), "shaky://%s/object", w->dir);
    w->opts.object = w->object;
    w->opts.object_timeout_ms = LONG_MS;
    w->opts.max_offload = N;
    world_start(w);
    world_attach(w, false);
}

/* While the object store hangs, what has not begun ends by a cancel or a deadline. What has begun
 * keeps its job, since it may still write into its blocks, until the store answers. */
static void test_a_store_that_hangs(void **state)
{
    struct direct jobs[4];
    struct world w;

    (void)state;
    for (int stores = 0; stores < 2; stores++) {
        int64_t ids[4];

        start_shaky(&w);
        for (uint32_t j = 0; j < 4; j++) {
            jobs[j] = some(1000 * (j + 1), 32);
            for (uint32_t i = 0; i < 32; i++)
                jobs[j].blocks[i] = 32 * j + i;
            if (!stores)
                assert_int_equal(run_job(&w, true, &jobs[j]), 32);
        }
        *(stores ? &shaky->hang_puts : &shaky->hang) = true;
        for (uint32_t j = 0; j < 4; j++) {
            ids[j] = begin(&w, stores, &jobs[j], j == 2 ? kv_now_ns() + 50 * KV_NS_PER_MS : 0);
            assert_true(ids[j] > 0);
        }
        wait_until(shaky->inside > 0);
        assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)ids[3]), 0);
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[0], 1, NULL), -ETIMEDOUT);
        usleep(60000);
        *(stores ? &shaky->hang_puts : &shaky->hang) = false;
        for (uint32_t j = 0; j < 4; j++) {
            assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[j], LONG_MS, &jobs[j].done), 0);
            check_ended(&w, &jobs[j], stores);
            assert_true(j >= 2 || jobs[j].done.n_ok == 32);
        }
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[0], 1, NULL), -ENOENT);
        world_fini(&w);
    }
}

/* Several stores of the same keys at a time: the store is asked to keep each block once, and all jobs
 * end when it has; one with a deadline ends by then. */
static void test_twice(void **state)
{
    struct direct jobs[4];
    int64_t ids[4];
    struct world w;

    (void)state;
    start_shaky(&w);
    shaky->hang_puts = true;
    for (uint32_t j = 0; j < 4; j++) {
        jobs[j] = some(1, 32);
        for (uint32_t i = 0; i < 32; i++)
            jobs[j].blocks[i] = 32 * j + i;
        ids[j] = begin(&w, true, &jobs[j], j == 3 ? kv_now_ns() + 20 * KV_NS_PER_MS : 0);
        assert_true(ids[j] > 0);
    }
    wait_until(shaky->inside > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[3], LONG_MS, &jobs[3].done), 0);
    check_ended(&w, &jobs[3], true);
    assert_int_equal(jobs[3].done.n_ok, 0);
    shaky->hang_puts = false;
    for (uint32_t j = 0; j < 3; j++) {
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[j], LONG_MS, &jobs[j].done), 0);
        check_ended(&w, &jobs[j], true);
        assert_int_equal(jobs[j].done.n_ok, 32);
    }
    assert_int_equal(world_stats(&w).object.blocks_in, 32);
    world_fini(&w);
}

/* Many jobs at a time, with cancels and deadlines at any moment, over a store that fails, lies and
 * is slow: each ends once, tells the truth, and leaves its blocks alone afterwards. */
static void test_storm(void **state)
{
    enum { JOBS = 8, EACH = N / JOBS };
    uint64_t rng = unit_seed(), next = 1;
    struct direct jobs[JOBS];
    bool stores[JOBS];
    int64_t ids[JOBS] = {0};
    struct world w;

    (void)state;
    start_shaky(&w);
    world_stop(&w);
    world_with_disk(&w, 200);
    w.opts.max_offload = 40;
    world_start(&w);
    world_attach(&w, false);
    for (size_t round = 0; round < unit_rounds(600); round++) {
        uint32_t j = (uint32_t)unit_below(&rng, JOBS);

        if (unit_below(&rng, 20) == 0) {
            shaky->fail_rc = unit_below(&rng, 3) ? 0 : -EIO;
            shaky->lie = (int)unit_below(&rng, 4);
            shaky->delay_us = (int)unit_below(&rng, 2) * 2000;
        }
        if (ids[j]) {
            if (unit_below(&rng, 3) == 0)
                kvbm_manager_cancel(w.m, (uint64_t)ids[j]);
            assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[j], LONG_MS, &jobs[j].done), 0);
            check_ended(&w, &jobs[j], stores[j]);
            ids[j] = 0;
            continue;
        }
        stores[j] = unit_below(&rng, 2);
        jobs[j] = some(0, 1 + (uint32_t)unit_below(&rng, EACH));
        for (uint32_t i = 0; i < jobs[j].n; i++) {
            jobs[j].keys[i] =
                stores[j] && unit_below(&rng, 3) ? next++ : 1 + unit_below(&rng, next);
            jobs[j].blocks[i] = EACH * j + i;
        }
        ids[j] = begin(&w, stores[j], &jobs[j],
                       unit_below(&rng, 3) ? 0 : kv_now_ns() + unit_below(&rng, 3000000));
        assert_true(ids[j] > 0);
    }
    shaky->delay_us = 0;
    assert_int_equal(world_destroy(&w, LONG_MS), 0); /* with jobs under way */
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_against_a_set),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_a_store_that_hangs),
        cmocka_unit_test(test_twice),
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_block_for_two_keys),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
