// SPDX-License-Identifier: Apache-2.0
/*
 * Without a host tier several stores of a key may be on their way at a time. One of them writes it:
 * a second copy in a tier would evict another block there.
 */
#include "base/unit.h"
#include "tier/kitchen.h"

enum { N = 8, LONG_MS = 60000 };

static void start(struct world *w)
{
    shaky_start(w, 0);
    shaky->hang_puts = true;
}

/* With a disk tier, too, which doesn't hang. */
static void start_with_disk(struct world *w)
{
    start(w);
    world_stop(w);
    world_with_disk(w, 64);
    world_start(w);
    world_attach(w, false);
}

/* Ends what hangs, and waits for all that is queued. */
static void let_go(struct world *w)
{
    shaky->hang_puts = false;
    assert_int_equal(kvbm_manager_drain(w->m, LONG_MS), 0);
}

static void test_one_writes(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    assert_int_equal(world_store(&w, 1, N), N);
    wait_until(shaky->inside > 0);
    for (int i = 0; i < 5; i++)
        assert_int_equal(world_store(&w, 1, N), N);
    assert_int_equal(world_store(&w, 100, N), N); /* others aren't held up */
    assert_int_equal(world_stats(&w).object.queued, 5 * N);
    let_go(&w);
    assert_int_equal(world_stats(&w).object.blocks_in, 2 * N);
    assert_int_equal(world_stats(&w).object.queued, 0);
    assert_int_equal(world_load(&w, 1, N), N);
    world_fini(&w);
}

/* The first fails: the next one brings the blocks. */
static void test_the_next_one_writes(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    assert_int_equal(world_store(&w, 1, N), N);
    wait_until(shaky->inside > 0);
    assert_int_equal(world_store(&w, 1, N), N);
    shaky->fail_publications = 1;
    let_go(&w);
    assert_int_equal(world_stats(&w).object.blocks_in, N);
    assert_int_equal(world_load(&w, 1, N), N);
    world_fini(&w);
}

/* Submit a store of @n keys with write-through. */
static int64_t submit(struct world *w, uint64_t first, uint32_t n)
{
    uint32_t blocks[N];
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks};
    int64_t id;

    world_keys(first, keys, n);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = i;
        world_fill(w, i, keys[i]);
    }
    assert_int_equal(kvbm_manager_prepare_store(w->m, &chain, n, &job.pin), n);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

static int status_of(struct world *w, int64_t id)
{
    struct kvbm_done done;

    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, LONG_MS, &done), 0);
    return done.status;
}

/* Entries that wait for a move have their place in the queue: later ones are refused, and the
 * waiting ones aren't when they join the queue again. */
static void test_places_are_kept(void **state)
{
    int64_t moving, waiting, refused;
    struct world w;

    (void)state;
    memset(shaky, 0, sizeof(*shaky));
    world_init(&w, 0);
    snprintf(w.object, sizeof(w.object), "shaky://%s/object", w.dir);
    w.opts.object = w.object;
    w.opts.object_timeout_ms = 100000;
    w.opts.object_write_through = true;
    w.opts.max_offload = N;
    shaky->hang_puts = true;
    world_start(&w);
    world_attach(&w, false);
    moving = submit(&w, 1, N);
    wait_until(shaky->inside > 0 && world_stats(&w).object.queued == 0);
    waiting = submit(&w, 1, N);
    wait_until(world_stats(&w).object.queued == N);
    refused = submit(&w, 100, N);
    assert_int_equal(status_of(&w, refused), -EREMOTEIO);
    shaky->hang_puts = false;
    assert_int_equal(status_of(&w, moving), 0);
    assert_int_equal(status_of(&w, waiting), 0);
    assert_int_equal(world_stats(&w).object.dropped, N);
    world_fini(&w);
}

/* Destroyed while one moves and others wait for it. */
static void test_destroyed(void **state)
{
    struct world w;
    int rc;

    (void)state;
    start(&w);
    for (int i = 0; i < 4; i++)
        assert_int_equal(world_store(&w, 1, N), N);
    wait_until(shaky->inside > 0);
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    rc = kvbm_manager_destroy(w.m, 1);
    shaky->hang_puts = false;
    if (rc == -ETIMEDOUT)
        rc = kvbm_manager_destroy(w.m, LONG_MS);
    assert_int_equal(rc, 0);
    w.m = NULL;
    w.cache = NULL;
    world_fini(&w);
}

/* A blocking store waits for its own blocks: those of others, which hang, are none of its business. */
static void test_others_hang(void **state)
{
    uint64_t key = 200, start;
    uint32_t block = 20;
    struct kvbm_chain chain = world_chain(&key);
    struct world w;

    (void)state;
    start_with_disk(&w);
    assert_int_equal(world_store(&w, 1, N), N);
    wait_until(shaky->inside > 0);
    start = kv_now_ns();
    world_fill(&w, block, key);
    assert_int_equal(kvbm_cache_store(w.cache, &chain, 1, &block, 20000), 1);
    assert_true(kv_now_ns() - start < 15 * KV_NS_PER_S);
    let_go(&w);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_writes),      cmocka_unit_test(test_the_next_one_writes),
        cmocka_unit_test(test_places_are_kept), cmocka_unit_test(test_others_hang),
        cmocka_unit_test(test_destroyed),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
