// SPDX-License-Identifier: Apache-2.0
/* Offloading: its order, its drops, and its events and statistics. */
#include <poll.h>

#include "base/unit.h"
#include "tier/kitchen.h"

#define KEYS 6u

/* ---- a world whose events are drained ---- */

struct told {
    struct world w;
    struct kvbm_events *events;
    struct kvbm_event_ring *ring;
};

static void told_init(struct told *t, uint32_t host_blocks)
{
    const struct kvbm_events_opts opts = {.size = sizeof(opts), .window_us = 100};

    assert_int_equal(kvbm_events_create(&opts, &t->events), 0);
    assert_true(kvbm_events_add_ring(t->events, KVBM_EVENTS_PER_TIER, 0, &t->ring) > 0);
    world_init(&t->w, host_blocks);
    t->w.opts.events = t->events;
}

static void told_fini(struct told *t)
{
    world_fini(&t->w);
    assert_int_equal(kvbm_events_destroy(t->events), 0);
}

/* Take the keys of events about @tier since the last call, oldest first. All must be of @type, with
 * @edge as first or last. */
static uint32_t drain(struct told *t, enum kvbm_event_type type, enum kv_tier tier, bool edge,
                      uint64_t *keys)
{
    struct kvbm_event events[64];
    uint32_t n = 0;
    uint64_t lost;
    long got;

    assert_int_equal(kvbm_events_flush(t->events, 30000), 0);
    got = kvbm_event_ring_drain(t->ring, events, 64, &lost);
    assert_int_equal(lost, 0);
    for (long i = 0; i < got; i++) {
        if (events[i].tier == KV_TIER_DEVICE)
            continue;
        assert_int_equal(events[i].type, type);
        assert_int_equal(events[i].tier, tier);
        assert_int_equal(type == KVBM_EVENT_STORED ? events[i].first : events[i].last, edge);
        assert_int_equal(events[i].key_len, sizeof(uint64_t));
        memcpy(&keys[n++], events[i].key, sizeof(uint64_t));
    }
    return n;
}

static void expect_told(struct told *t, enum kvbm_event_type type, enum kv_tier tier, bool edge,
                        uint64_t first, uint32_t n)
{
    uint64_t keys[64];

    assert_int_equal(drain(t, type, tier, edge, keys), n);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = 0;

        while (i < n && keys[i] != first + k)
            i++;
        assert_true(i < n);
    }
}

/* An engine's connector hears of each tier what came and went. */
static void test_events(void **state)
{
    struct told t;

    (void)state;
    told_init(&t, 8);
    t.w.opts.disk = t.w.disk;
    t.w.opts.disk_bytes = 8u * HOST_STRIDE;
    t.w.opts.disk_policy = (struct kvbm_tier_policy){.policy = KVBM_POLICY_FREQUENCY};
    world_start(&t.w);
    world_attach(&t.w, false);
    assert_int_equal(world_store(&t.w, 100, 4), 4);
    assert_int_equal(kvbm_manager_drain(t.w.m, 30000), 0);
    expect_told(&t, KVBM_EVENT_STORED, KV_TIER_HOST, true, 100, 4);
    kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_HOST));
    expect_told(&t, KVBM_EVENT_REMOVED, KV_TIER_HOST, true, 100, 4);

    assert_int_equal(world_store(&t.w, 100, 4), 4); /* the second time: it goes down, too */
    assert_int_equal(kvbm_manager_drain(t.w.m, 30000), 0);
    {
        struct kvbm_event events[16];
        uint32_t host = 0, disk = 0;

        assert_int_equal(kvbm_events_flush(t.events, 30000), 0);
        assert_int_equal(kvbm_event_ring_drain(t.ring, events, 16, NULL), 8);
        for (int i = 0; i < 8; i++) {
            host += events[i].tier == KV_TIER_HOST && events[i].first;
            disk += events[i].tier == KV_TIER_DISK && !events[i].first;
        }
        assert_int_equal(host, 4);
        assert_int_equal(disk, 4);
    }
    kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_HOST));
    expect_told(&t, KVBM_EVENT_REMOVED, KV_TIER_HOST, false, 100, 4);
    assert_int_equal(world_load(&t.w, 100, 4), 4);
    expect_told(&t, KVBM_EVENT_STORED, KV_TIER_HOST, false, 100, 4);
    kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_DISK));
    expect_told(&t, KVBM_EVENT_REMOVED, KV_TIER_DISK, false, 100, 4);
    told_fini(&t);
}

/* ---- a queue that waits: a job that wasn't polled leaves offloading none ---- */

static uint64_t stop_queue(struct world *w)
{
    static uint32_t block = CACHE_BLOCKS - 1;
    static uint64_t key = 999;
    const struct kvbm_chain chain = world_chain(&key);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = &block};
    struct pollfd ready = {.fd = kvbm_manager_fd(w->m), .events = POLLIN};
    int64_t id;

    assert_int_equal(w->opts.max_jobs, 1);
    assert_true(kvbm_manager_prepare_load(w->m, &chain, 1, NULL, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(poll(&ready, 1, 30000), 1);
    return (uint64_t)id;
}

static void let_queue_go(struct world *w, uint64_t id)
{
    struct kvbm_done done;

    assert_int_equal(kvbm_manager_wait(w->m, id, 0, &done), 0);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
}

/* Registered in the cache's pool, each a sequence of its own. */
static void put(struct world *w, const uint64_t *keys, uint32_t n, struct kvbm_immutable *held)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct kvbm_chain chain = world_chain(&keys[i]);
        struct kvbm_complete complete;
        struct kvbm_mutable block;

        assert_int_equal(kvbm_pool_allocate(w->pool, 1, &block, NULL), 0);
        world_fill(w, block.handle.block, keys[i]);
        assert_int_equal(kvbm_pool_complete(w->pool, &block, 1, &chain, &complete), 0);
        assert_int_equal(kvbm_pool_register(w->pool, &complete, 1, &held[i]), 0);
    }
}

/* Higher priorities first, the older first among equals, whatever the order of the calls. */
static void test_queue_order(void **state)
{
    static const int32_t priorities[KEYS] = {0, 7, -3, 7, 0, 40};
    static const uint64_t keys[KEYS] = {100, 200, 300, 400, 500, 600};
    static const uint64_t order[KEYS] = {600, 200, 400, 100, 500, 300};
    struct kvbm_immutable held[KEYS];
    uint64_t told[64], id;
    struct told t;

    (void)state;
    told_init(&t, 16);
    t.w.opts.max_jobs = 1;
    world_start(&t.w);
    world_attach(&t.w, true);
    put(&t.w, keys, KEYS, held);
    id = stop_queue(&t.w);
    for (uint32_t i = 0; i < KEYS; i++)
        assert_int_equal(kvbm_manager_offload(t.w.cache, &held[i], 1, priorities[i]), 1);
    assert_int_equal(world_stats(&t.w).host.queued, KEYS);
    assert_int_equal(kvbm_manager_drain(t.w.m, 20), -ETIMEDOUT);
    let_queue_go(&t.w, id);
    assert_int_equal(drain(&t, KVBM_EVENT_STORED, KV_TIER_HOST, false, told), KEYS);
    for (uint32_t i = 0; i < KEYS; i++)
        assert_int_equal(told[i], order[i]);
    for (uint32_t i = 0; i < KEYS; i++)
        assert_int_equal(world_load(&t.w, keys[i], 1), 1);
    assert_int_equal(kvbm_pool_release(t.w.pool, held, KEYS), 0);
    told_fini(&t);
}

/* The queue holds nothing: what is evicted while it waits is dropped and counted, and what has
 * taken its block since doesn't go down in its place. */
static void test_gone_meanwhile(void **state)
{
    static const uint64_t keys[KEYS] = {100, 200, 300, 400, 500, 600},
                          others[KEYS] = {101, 201, 301, 401, 501, 601};
    struct kvbm_immutable held[KEYS];
    struct world w;
    uint64_t id;

    (void)state;
    world_init(&w, 16);
    w.opts.max_jobs = 1;
    world_start(&w);
    world_attach(&w, true);
    put(&w, keys, KEYS, held);
    id = stop_queue(&w);
    assert_int_equal(kvbm_manager_offload(w.cache, held, KEYS, 0), KEYS);
    assert_int_equal(kvbm_pool_release(w.pool, held, KEYS), 0);
    assert_int_equal(kvbm_pool_reset_inactive(w.pool), KEYS); /* none was held by the queue */
    put(&w, others, KEYS, held);
    let_queue_go(&w, id);
    assert_int_equal(world_stats(&w).host.dropped, KEYS);
    assert_int_equal(world_stats(&w).host.blocks_in, 0);
    for (uint32_t i = 0; i < KEYS; i++) {
        assert_int_equal(world_where(&w, keys[i], 0), KVBM_MISS);
        assert_int_equal(world_where(&w, others[i], 0), KVBM_MISS);
    }
    assert_int_equal(kvbm_pool_release(w.pool, held, KEYS), 0);
    world_fini(&w);
}

/* The same on the way from the host tier down: a store that hangs holds what is being written, and
 * no more. */
static void test_evicted_while_waiting(void **state)
{
    uint32_t waiting;
    struct world w;

    (void)state;
    world_init(&w, 16);
    snprintf(w.object, sizeof(w.object), "shaky://%s/object", w.dir);
    w.opts.object = w.object;
    world_start(&w);
    world_attach(&w, false);
    shaky->hang_puts = true;
    assert_int_equal(world_store(&w, 100, 12), 12);
    waiting = (uint32_t)world_stats(&w).object.queued;
    assert_in_range(waiting, 1, 11);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST)), waiting);
    shaky->hang_puts = false;
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_stats(&w).object.dropped, waiting);
    assert_int_equal(world_stats(&w).object.blocks_in, 12 - waiting);
    world_fini(&w);
}

/* The queue is bounded: those beyond are dropped and counted, the others go. */
static void test_queue_is_full(void **state)
{
    static const uint64_t keys[KEYS] = {100, 200, 300, 400, 500, 600};
    struct kvbm_immutable held[KEYS];
    struct world w;
    uint64_t id;

    (void)state;
    world_init(&w, 16);
    w.opts.max_jobs = 1;
    w.opts.max_offload = 4;
    world_start(&w);
    world_attach(&w, true);
    put(&w, keys, KEYS, held);
    id = stop_queue(&w);
    assert_int_equal(kvbm_manager_offload(w.cache, held, KEYS, 0), 4);
    assert_int_equal(world_stats(&w).host.dropped, 2);
    let_queue_go(&w, id);
    for (uint32_t i = 0; i < KEYS; i++)
        assert_int_equal(world_where(&w, keys[i], 0), i < 4 ? KVBM_READY : KVBM_MISS);
    assert_int_equal(kvbm_pool_release(w.pool, held, KEYS), 0);
    world_fini(&w);
}

/* A target whose blocks are all held takes nothing: dropped, counted, and nobody waits; later ones
 * go again. */
static void test_target_is_full(void **state)
{
    uint64_t keys[3];
    struct kvbm_immutable held[3];
    struct world w;

    (void)state;
    world_init(&w, 16);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 3u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 3);
    assert_int_equal(world_store(&w, 100, 3), 3);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(kvbm_pool_match(kvbm_manager_pool(w.m, KV_TIER_DISK), 0, keys, 3, 0, held), 3);
    assert_int_equal(world_store(&w, 200, 3), 3);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_stats(&w).disk.dropped, 3);
    assert_int_equal(world_stats(&w).disk.blocks_in, 3);
    assert_int_equal(world_load(&w, 200, 3), 3);
    assert_int_equal(kvbm_pool_release(kvbm_manager_pool(w.m, KV_TIER_DISK), held, 3), 0);
    assert_int_equal(world_store(&w, 300, 3), 3);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(world_stats(&w).disk.blocks_in, 6);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_where(&w, 300, 2), KVBM_ON_DISK);
    assert_int_equal(world_where(&w, 200, 2), KVBM_MISS);
    world_fini(&w);
}

/* Each tier evicts as it was told to: of four blocks used alike but for one that was used often,
 * long ago. */
static void evicted_by(enum kvbm_eviction host, enum kvbm_eviction disk, bool host_keeps,
                       bool disk_keeps)
{
    struct kvbm_pool *pools[2];
    uint64_t keys[4];
    struct world w;

    world_init(&w, 4);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 4u * HOST_STRIDE;
    w.opts.host_eviction = host;
    w.opts.disk_eviction = disk;
    world_start(&w);
    world_attach(&w, false);
    pools[0] = kvbm_manager_pool(w.m, KV_TIER_HOST);
    pools[1] = kvbm_manager_pool(w.m, KV_TIER_DISK);
    for (uint32_t i = 0; i < 4; i++) { /* each a sequence of its own */
        keys[i] = 100 * (i + 1);
        assert_int_equal(world_store(&w, keys[i], 1), 1);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    for (int i = 0; i < 8; i++)
        assert_int_equal(kvbm_manager_touch(w.m, 0, &keys[0], 1), 1);
    for (int i = 1; i < 4; i++)
        assert_int_equal(kvbm_manager_touch(w.m, 0, &keys[i], 1), 1);
    assert_int_equal(world_store(&w, 900, 1), 1);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    for (int i = 0; i < 2; i++) {
        struct kvbm_immutable held;
        long found = kvbm_pool_match(pools[i], 0, &keys[0], 1, KVBM_MATCH_NO_TOUCH, &held);

        assert_int_equal(found, i ? disk_keeps : host_keeps);
        if (found)
            kvbm_immutable_release(&held);
    }
    world_fini(&w);
}

static void test_evictions(void **state)
{
    (void)state;
    evicted_by(KVBM_EVICT_LRU, KVBM_EVICT_LFU, false, true);
    evicted_by(KVBM_EVICT_LFU, KVBM_EVICT_LRU, true, false);
}

/* ---- numbers ---- */

static void expect_line(struct world *w, const char *line)
{
    static char text[1 << 18];
    long len = kvbm_manager_metrics(w->m, text, sizeof(text));

    assert_in_range(len, 1, sizeof(text) - 1);
    if (!strstr(text, line))
        print_message("%s\n%s", line, text);
    assert_non_null(strstr(text, line));
}

/* Hits, misses, bytes, times and what waits, by tier. */
static void test_numbers(void **state)
{
    char line[128];
    struct world w;

    (void)state;
    world_init(&w, 16);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 16u * HOST_STRIDE;
    snprintf(w.object, sizeof(w.object), "shaky://%s/object", w.dir);
    w.opts.object = w.object;
    w.opts.object_timeout_ms = 200;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 4), 4);
    assert_int_equal(world_load(&w, 100, 4), 4);
    expect_line(&w, "\nkvbm_tier_hits_total{tier=\"host\"} 4\n");
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 100, 4), 4);
    expect_line(&w, "\nkvbm_tier_hits_total{tier=\"disk\"} 4\n");
    expect_line(&w, "\nkvbm_tier_blocks_out_total{tier=\"disk\"} 4\n");
    snprintf(line, sizeof(line), "\nkvbm_tier_bytes_out_total{tier=\"disk\"} %u\n",
             4 * BLOCK_BYTES);
    expect_line(&w, line);
    expect_line(&w, "\nkvbm_tier_fetch_seconds_count{tier=\"disk\"} 1\n");
    expect_line(&w, "\nkvbm_tier_fetch_seconds_bucket{tier=\"disk\",le=\"+Inf\"} 1\n");
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_DISK));
    assert_int_equal(world_load(&w, 100, 4), 4);
    expect_line(&w, "\nkvbm_tier_hits_total{tier=\"external\"} 4\n");
    expect_line(&w, "\nkvbm_tier_fetch_seconds_count{tier=\"external\"} 1\n");
    assert_int_equal(world_load(&w, 900, 2), 0);
    expect_line(&w, "\nkvbm_tier_misses_total{tier=\"host\"} 2\n");
    expect_line(&w, "\nkvbm_jobs_total 5\n");
    expect_line(&w, "\nkvbm_pins 0\n");

    /* A store that hangs: what waits for it is counted, then it is said to be down. */
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    expect_line(&w, "\nkvbm_object_down 0\n");
    shaky->hang = shaky->hang_puts = true;
    for (uint64_t first = 2000; first < 2016; first++)
        assert_int_equal(world_store(&w, first, 1), 1);
    assert_true(world_stats(&w).object.queued > 0);
    snprintf(line, sizeof(line), "\nkvbm_tier_queued_blocks{tier=\"external\"} ");
    expect_line(&w, line);
    for (int i = 0; !world_stats(&w).object_down && i < 1000; i++)
        usleep(10000);
    expect_line(&w, "\nkvbm_object_down 1\n");
    shaky->hang = shaky->hang_puts = false;
    world_fini(&w);
}

/* ---- configuration ---- */

/* Each key that the page lists can be set, in a file and in the environment. */
static void test_every_key(void **state)
{
    static const char *const values[][2] = {{"fingerprint", "x"},
                                            {"host_bytes", "3MiB"},
                                            {"staging_blocks", "9"},
                                            {"host_eviction", "lfu"},
                                            {"disk_eviction", "lineage"},
                                            {"host_pinned", "yes"},
                                            {"huge_pages", "on"},
                                            {"disk", "/a"},
                                            {"disk_bytes", "1GiB"},
                                            {"disk_buffered", "true"},
                                            {"disk_volatile", "1"},
                                            {"object", "/o"},
                                            {"object_blocks", "77"},
                                            {"object_write_through", "yes"},
                                            {"object_when_evicted", "yes"},
                                            {"object_timeout_ms", "5"},
                                            {"host_policy", "never"},
                                            {"disk_policy", "frequency"},
                                            {"object_policy", "never"},
                                            {"host_threshold", "3"},
                                            {"disk_threshold", "4"},
                                            {"object_threshold", "5"},
                                            {"host_min_priority", "6"},
                                            {"disk_min_priority", "7"},
                                            {"object_min_priority", "8"},
                                            {"copy_threads", "3"},
                                            {"io", "threads"},
                                            {"io_depth", "5"},
                                            {"io_registered", "yes"},
                                            {"gpu_copy", "single"},
                                            {"max_offload", "11"},
                                            {"max_jobs", "12"}};
    const struct kvbm_manager_opts none = {.size = sizeof(none)};

    (void)state;
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        struct kvbm_manager_opts from_file = none, from_environment = none;
        char path[] = "/tmp/kvbm-conf-XXXXXX", line[128], name[64] = "KVBM_", *strings;
        int fd = mkstemp(path),
            n = snprintf(line, sizeof(line), "%s = %s\n", values[i][0], values[i][1]);

        assert_int_equal(write(fd, line, (size_t)n), n);
        close(fd);
        assert_int_equal(kvbm_manager_configure(&from_file, path, &strings), 0);
        unlink(path);
        assert_true(memcmp(&from_file, &none, sizeof(none)) != 0);
        free(strings);
        for (n = 0; values[i][0][n]; n++)
            name[5 + n] = values[i][0][n] == '_' ? '_' : (char)(values[i][0][n] - 'a' + 'A');
        setenv(name, values[i][1], 1);
        assert_int_equal(kvbm_manager_configure(&from_environment, NULL, &strings), 0);
        unsetenv(name);
        assert_true(memcmp(&from_environment, &none, sizeof(none)) != 0);
        free(strings);
    }
}

static int restore(void **state)
{
    (void)state;
    shaky->hang = shaky->hang_puts = false;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_queue_order),
        cmocka_unit_test(test_gone_meanwhile),
        cmocka_unit_test_teardown(test_evicted_while_waiting, restore),
        cmocka_unit_test(test_queue_is_full),
        cmocka_unit_test(test_target_is_full),
        cmocka_unit_test(test_evictions),
        cmocka_unit_test_teardown(test_numbers, restore),
        cmocka_unit_test(test_every_key),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
