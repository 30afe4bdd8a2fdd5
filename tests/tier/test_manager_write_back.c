// SPDX-License-Identifier: Apache-2.0
/* object_when_evicted: blocks go to the object store before the last tier above it evicts them. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <sys/wait.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"

static void tiers(struct world *w, uint32_t host_blocks, uint32_t disk_blocks)
{
    world_init(w, host_blocks);
    if (disk_blocks) {
        w->opts.disk = w->disk;
        w->opts.disk_bytes = (uint64_t)disk_blocks * HOST_STRIDE;
        w->opts.disk_volatile = true;
    }
    w->opts.object = w->object;
    w->opts.object_when_evicted = true;
}

static void begin(struct world *w, uint32_t host_blocks, uint32_t disk_blocks)
{
    tiers(w, host_blocks, disk_blocks);
    world_start(w);
    world_attach(w, false);
}

static void settle(struct world *w)
{
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
}

/* @n sequences of 8 blocks, from 1000, 2000 ... on. */
static void store_some(struct world *w, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        assert_int_equal(world_store(w, 1000 * i, 8), 8);
        settle(w);
    }
}

static void all_there(struct world *w, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        assert_int_equal(world_load(w, 1000 * i, 8), 8);
        settle(w);
    }
}

/* ---- from the host tier ---- */

static void test_host(void **state)
{
    struct kvbm_manager_stats stats;
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    store_some(&w, 1, 6); /* a quarter is free still */
    stats = world_stats(&w);
    assert_int_equal(stats.object.blocks_in, 0);
    assert_int_equal(stats.object.queued, 0);
    store_some(&w, 7, 2);
    stats = world_stats(&w);
    assert_int_equal(stats.host.used,
                     64); /* nothing was evicted, but what comes next was written */
    assert_in_range(stats.object.blocks_in, 8, 20);
    assert_int_equal(world_where(&w, 1000, 7), KVBM_READY);
    store_some(&w, 9, 12);
    stats = world_stats(&w);
    assert_int_equal(stats.object.dropped, 0);
    assert_in_range(stats.object.blocks_in, 96, 96 + 24); /* what is evicted, and a little ahead */
    assert_int_equal(world_where(&w, 1000, 0), KVBM_REMOTE);
    assert_int_equal(world_where(&w, 20000, 0), KVBM_READY);
    all_there(&w, 1, 20);
    assert_int_equal(world_stats(&w).object.dropped, 0);
    world_fini(&w);
}

/* Blocks being written back delay no eviction, and the oldest stays the oldest. */
static void test_order_is_kept(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    store_some(&w, 1, 8);
    assert_true(world_stats(&w).object.blocks_in >= 8);
    assert_int_equal(world_load(&w, 1000, 8), 8); /* is used: young again */
    store_some(
        &w, 9,
        2); /* writes end in any order, so that two sequences of one look may change places */
    for (uint64_t i = 1; i <= 10; i++) {
        if (i != 3 && i != 4)
            assert_int_equal(world_where(&w, 1000 * i, 0), i == 2 ? KVBM_REMOTE : KVBM_READY);
    }
    assert_int_equal(world_where(&w, 1000, 7), KVBM_READY);
    world_fini(&w);
}

/* A block that is reset before its turn is not written back. */
static void test_forgotten(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    for (int i = 0; i < 20; i++) {
        store_some(&w, 1, 5);
        kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    }
    assert_int_equal(world_stats(&w).object.blocks_in, 0);
    world_fini(&w);
}

/* A block that came from the object store isn't written there again. */
static void test_not_again(void **state)
{
    uint64_t written;
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    store_some(&w, 1, 20);
    all_there(&w, 1, 20);
    written = world_stats(&w).object.blocks_in;
    assert_int_equal(written, 160);
    all_there(&w, 1, 20);
    all_there(&w, 1, 20);
    assert_int_equal(world_stats(&w).object.blocks_in, written);
    world_fini(&w);
}

/* At the end the host tier's blocks leave it, too. */
static void test_destroy_writes(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 64, 0);
    store_some(&w, 1, 6);
    assert_int_equal(world_stats(&w).object.blocks_in, 0);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, false);
    all_there(&w, 1, 6);
    assert_int_equal(world_stats(&w).object.blocks_out, 48);
    world_fini(&w);
}

/* ---- from the disk ---- */

static void from_disk(uint32_t host_blocks)
{
    struct kvbm_manager_stats stats;
    struct world w;

    tiers(&w, host_blocks, 64);
    w.opts.staging_blocks = 32;
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 6);
    assert_int_equal(world_stats(&w).object.blocks_in, 0); /* the disk has it */
    store_some(&w, 7, 14);
    stats = world_stats(&w);
    assert_int_equal(stats.object.dropped, 0);
    assert_in_range(stats.object.blocks_in, 96, 96 + 24);
    assert_int_equal(stats.disk.blocks_out, stats.object.blocks_in); /* it was read from there */
    assert_int_equal(world_where(&w, 1000, 0), KVBM_REMOTE);
    all_there(&w, 1, 20);
    world_stop(&w);
    assert_int_equal(kvbm_manager_create(&w.opts, &w.m), 0);
    world_attach(&w, false);
    all_there(&w, 1, 20);
    world_fini(&w);
}

static void test_disk(void **state)
{
    (void)state;
    from_disk(24);
}

static void test_disk_without_a_host_tier(void **state)
{
    (void)state;
    from_disk(0);
}

/* Blocks that the disk's policy refuses are written back from the host tier. */
static void test_past_the_disk(void **state)
{
    struct world w;

    (void)state;
    tiers(&w, 64, 64);
    w.opts.disk_policy.policy = KVBM_POLICY_NEVER;
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 20);
    assert_int_equal(world_stats(&w).disk.blocks_in, 0);
    assert_int_equal(world_stats(&w).object.dropped, 0);
    all_there(&w, 1, 20);
    world_fini(&w);
}

/* A block that the disk can't read any more doesn't get there. */
static void test_damaged(void **state)
{
    char path[200];
    struct world w;
    FILE *file;

    (void)state;
    begin(&w, 24, 64);
    store_some(&w, 1, 5);
    settle(&w);
    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", w.dir);
    file = fopen(path, "r+");
    assert_non_null(file);
    for (long slot = 0; slot < 8; slot++) { /* the first sequence's */
        fseek(file, 4096 + slot * (long)HOST_STRIDE + 777, SEEK_SET);
        fputc(0x55, file);
    }
    fclose(file);
    store_some(&w, 6, 15);
    assert_in_range(world_stats(&w).disk.bad, 7, 8); /* a byte may have been that */
    assert_in_range(world_load(&w, 1000, 8), 0, 1);
    all_there(&w, 2, 19);
    world_fini(&w);
}

/* ---- policies, limits, faults ---- */

static void test_policy(void **state)
{
    struct world w;

    (void)state;
    tiers(&w, 64, 0);
    w.opts.object_policy =
        (struct kvbm_tier_policy){.policy = KVBM_POLICY_FREQUENCY, .threshold = 2};
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 20);
    assert_int_equal(world_stats(&w).object.blocks_in, 0);
    assert_true(world_stats(&w).object.filtered >= 96);
    store_some(&w, 1, 10); /* leave for the second time, then */
    store_some(&w, 30, 10);
    assert_true(world_stats(&w).object.blocks_in >= 72);
    assert_int_equal(world_stats(&w).object.dropped, 0);
    world_fini(&w);
}

static void shaky_world(struct world *w, uint32_t host_blocks, uint32_t disk_blocks)
{
    memset(shaky, 0, sizeof(*shaky));
    tiers(w, host_blocks, disk_blocks);
    snprintf(w->object, sizeof(w->object), "shaky://%s/object", w->dir);
    w->opts.object_timeout_ms = 100000;
    world_start(w);
    world_attach(w, false);
}

/* The store hangs: nobody waits for it, what can't be kept is dropped and counted, what is held is
 * little. */
static void store_hangs(uint32_t host_blocks, uint32_t disk_blocks)
{
    struct kvbm_manager_stats stats;
    struct world w;
    uint64_t start;

    shaky_world(&w, host_blocks, disk_blocks);
    store_some(&w, 1, 6);
    shaky->hang_puts = true;
    start = kv_now_ns();
    for (uint64_t i = 7; i <= 60; i++)
        assert_int_equal(world_store(&w, 1000 * i, 8), 8);
    assert_true(kv_now_ns() - start < 90 * KV_NS_PER_S); /* and not 100 s for each batch */
    wait_until(shaky->inside > 0);
    stats = world_stats(&w);
    assert_int_equal(stats.object.blocks_in, 0);
    assert_true(stats.object.queued <= w.opts.max_offload + 16384);
    assert_int_equal(world_load(&w, 60000, 8), 8);
    shaky->hang_puts = false;
    settle(&w);
    stats = world_stats(&w);
    assert_true(stats.object.dropped > 100);
    assert_true(stats.object.blocks_in > 0);
    for (uint64_t i = 1; i <= 60; i++) {
        world_load(&w, 1000 * i, 8); /* compares what is there */
        settle(&w);
    }
    world_fini(&w);
}

static void test_hanging_store(void **state)
{
    (void)state;
    store_hangs(64, 0);
}

static void test_hanging_store_behind_a_disk(void **state)
{
    (void)state;
    store_hangs(24, 64);
}

/* A block whose write-back failed is tried again until it is evicted. */
static void test_tried_again(void **state)
{
    struct world w;

    (void)state;
    shaky_world(&w, 64, 0);
    shaky->fail_puts_rc = -5;
    store_some(&w, 1, 8);
    assert_true(world_stats(&w).object.failed >= 8);
    assert_int_equal(world_stats(&w).object.blocks_in, 0);
    shaky->fail_puts_rc = 0;
    sleep(1); /* the breaker */
    for (int i = 0; i < 600 && world_stats(&w).object_down; i++) {
        world_where(&w, 900000 + i, 0); /* asks */
        usleep(100000);
    }
    store_some(&w, 9, 12);
    assert_true(world_stats(&w).object.blocks_in > 48);
    world_fini(&w);
}

/* A store that has no room is no outage: it isn't tried again and again while nothing happens. */
static void test_full_store(void **state)
{
    struct world w;
    int puts, rounds = 0;

    (void)state;
    shaky_world(&w, 64, 0);
    world_stop(&w);
    w.opts.max_offload = 4;
    world_start(&w);
    world_attach(&w, false);
    shaky->fail_puts_rc = -ENOSPC;
    for (uint64_t i = 1; i <= 8; i++)
        assert_int_equal(world_store(&w, 1000 * i, 8), 8);
    do { /* each block is tried once, which takes a busy machine some time */
        puts = shaky->puts + shaky->put_batches;
        usleep(500000);
        assert_true(++rounds < 120);
    } while (shaky->puts + shaky->put_batches > puts + 4);
    shaky->fail_puts_rc = 0;
    store_some(&w, 9, 8);
    all_there(&w, 9, 8);
    assert_true(world_stats(&w).object.blocks_in >= 32);
    world_fini(&w);
}

/* The manager's end waits as long as it was told to. */
static void test_destroy_of_a_hanging_store(void **state)
{
    struct world w;
    uint64_t start;

    (void)state;
    shaky_world(&w, 64, 0);
    world_stop(&w);
    w.opts.object_timeout_ms = 1000; /* a call that has begun can't be broken off */
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 6);
    shaky->hang_puts = true;
    assert_int_equal(kvbm_cache_detach(w.cache), 0);
    w.cache = NULL;
    start = kv_now_ns();
    assert_int_equal(kvbm_manager_destroy(w.m, 300), 0);
    assert_in_range((kv_now_ns() - start) / KV_NS_PER_MS, 290, 60000);
    shaky->hang_puts = false;
    w.m = NULL;
    world_fini(&w);
}

static void test_options(void **state)
{
    struct kvbm_manager_opts opts = {.size = sizeof(opts)};
    struct kvbm_manager *m;
    char *strings;
    struct world w;

    (void)state;
    setenv("KVBM_OBJECT_WHEN_EVICTED", "yes", 1);
    assert_int_equal(kvbm_manager_configure(&opts, NULL, &strings), 0);
    unsetenv("KVBM_OBJECT_WHEN_EVICTED");
    assert_true(opts.object_when_evicted);
    free(strings);
    tiers(&w, 0, 0);
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL); /* leave what? */
    w.opts.host_bytes = 16u * HOST_STRIDE;
    w.opts.object_write_through = true;
    assert_int_equal(kvbm_manager_create(&w.opts, &m), -EINVAL);
    w.opts.object_write_through = false;
    world_start(&w);
    world_stop(&w);
    w.opts.object = NULL; /* nowhere to go: nothing happens */
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 4);
    assert_int_equal(world_stats(&w).object.dropped, 0);
    world_fini(&w);
}

/* ---- the end ---- */

/* A store job that is under way when the end begins. */
static void test_destroy_writes_what_is_under_way(void **state)
{
    uint64_t keys[8], one = 1;
    uint32_t blocks[8];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct world w;
    int fds[2];

    (void)state;
    begin(&w, 64, 0);
    assert_int_equal(pipe(fds), 0);
    job.cache = w.cache;
    job.ready_fd = fds[0];
    world_keys(1000, keys, 8);
    for (uint32_t i = 0; i < 8; i++) {
        blocks[i] = i;
        world_fill(&w, i, keys[i]);
    }
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 8, &job.pin), 8);
    assert_true(kvbm_manager_submit(w.m, &job) > 0);
    kvbm_pin_release(job.pin);
    if (fork() == 0) {
        usleep(300000);
        _exit(write(fds[1], &one, sizeof(one)) != sizeof(one));
    }
    assert_int_equal(world_destroy(&w, 20000), 0);
    wait(NULL);
    close(fds[0]);
    close(fds[1]);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_load(&w, 1000, 8), 8);
    world_fini(&w);
}

/* More blocks than the queue takes at a time. */
static void test_destroy_writes_many(void **state)
{
    struct world w;

    (void)state;
    tiers(&w, 256, 0);
    w.opts.max_offload = 32;
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 20);
    assert_true(world_stats(&w).object.blocks_in < 100);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, false);
    all_there(&w, 1, 20);
    world_fini(&w);
}

static void ask_until(struct world *w, bool down)
{
    for (int i = 0; i < 1200 && world_stats(w).object_down != down; i++) {
        world_where(w, 800000 + 100 * (uint64_t)i, 0); /* asks */
        usleep(50000);
    }
    assert_int_equal(world_stats(w).object_down, down);
}

/* Blocks listed for write-back while the store was down, and not evicted, are written back
 * later. */
static void test_told_of_in_an_outage(void **state)
{
    struct world w;

    (void)state;
    shaky_world(&w, 256, 0);
    shaky->fail_rc = -5;
    ask_until(&w, true);
    store_some(&w, 1, 32);
    assert_int_equal(world_stats(&w).object.blocks_in, 0);
    assert_int_equal(world_stats(&w).host.used, 256);
    shaky->fail_rc = 0;
    sleep(1); /* the breaker */
    ask_until(&w, false);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, false);
    all_there(&w, 1, 32);
    world_fini(&w);
}

/* A fetch that nobody wants any more ends, although the store hangs. */
static void test_cancel_then_release(void **state)
{
    uint64_t keys[8];
    uint32_t blocks[8];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct kvbm_done done;
    struct world w;
    int64_t id;

    (void)state;
    shaky_world(&w, 64, 0);
    store_some(&w, 1, 20);
    shaky->hang = true;
    job.cache = w.cache;
    world_keys(1000, keys, 8);
    for (uint32_t i = 0; i < 8; i++)
        blocks[i] = i;
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 8, NULL, &job.pin), 8);
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)id), 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 60000, &done), 0);
    assert_int_equal(done.status, -ECANCELED);
    wait_until(!world_stats(&w).pins_now); /* the store would hang for 100 s */
    shaky->hang = false;
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_order_is_kept),
        cmocka_unit_test(test_forgotten),
        cmocka_unit_test(test_not_again),
        cmocka_unit_test(test_destroy_writes),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_disk_without_a_host_tier),
        cmocka_unit_test(test_past_the_disk),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_hanging_store),
        cmocka_unit_test(test_hanging_store_behind_a_disk),
        cmocka_unit_test(test_tried_again),
        cmocka_unit_test(test_full_store),
        cmocka_unit_test(test_destroy_of_a_hanging_store),
        cmocka_unit_test(test_destroy_writes_what_is_under_way),
        cmocka_unit_test(test_destroy_writes_many),
        cmocka_unit_test(test_told_of_in_an_outage),
        cmocka_unit_test(test_cancel_then_release),
        cmocka_unit_test(test_options),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
