// SPDX-License-Identifier: Apache-2.0
/* The manager over an object store that hangs, or answers late. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include "tier/kitchen.h"

/* ---- an end while the store hangs ---- */

/* Into blocks of its own as far as the cache has them: several run at once. */
static int64_t load_in_background(struct world *w, uint64_t first, uint32_t n)
{
    static uint32_t next;
    uint64_t keys[CACHE_BLOCKS];
    uint32_t blocks[CACHE_BLOCKS];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks};
    int64_t id;

    world_keys(first, keys, n);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = next++ % CACHE_BLOCKS;
    assert_true(kvbm_manager_prepare_load(w->m, &chain, n, NULL, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    return id;
}

/* @calls: how many calls of each kind hang. */
static void end_while_it_hangs(int calls)
{
    struct world w;
    uint64_t begin;

    shaky_start(&w, 32);
    shaky->hang = true;
    for (int i = 0; i < calls; i++) { /* asks, gets, puts */
        assert_int_equal(world_where(&w, 10000 + 100 * (uint64_t)i, 3), KVBM_PENDING);
        if (i > 0)
            load_in_background(&w, 20000 + 100 * (uint64_t)i, 2);
        if (i > 1)
            assert_int_equal(world_store(&w, 30000 + 100 * (uint64_t)i, 1), 1);
    }
    wait_until(shaky->inside >= (calls < 4 ? calls : 4));
    begin = kv_now_ns();
    assert_int_equal(world_destroy(&w, 500), 0);
    /* 500 ms for what runs, some to let go; not object_timeout_ms */
    assert_true(kv_now_ns() - begin < 40 * KV_NS_PER_S);
    shaky->hang = false;
    wait_until(shaky->inside == 0 && shaky->opens == shaky->closes);
    usleep(20000); /* those threads are detached: their last instructions */
    world_fini(&w);
}

static void test_end_while_asked(void **state)
{
    (void)state;
    end_while_it_hangs(1);
}

/* More than there are threads, those that replace others too. */
static void test_end_while_all_hang(void **state)
{
    (void)state;
    end_while_it_hangs(12);
}

/* ---- "isn't there", which was true when it was seen ---- */

static void forget_host(struct world *w)
{
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST));
}

static void test_asked_before_it_came(void **state)
{
    struct world w;

    (void)state;
    shaky_start(&w, 32);
    shaky->hang_answers = true;
    assert_int_equal(world_where(&w, 1000, 7), KVBM_PENDING);
    wait_until(shaky->exists == 1 && shaky->inside == 1);
    usleep(50000); /* it has looked */
    assert_int_equal(world_store(&w, 1000, 4), 4);
    forget_host(&w);
    assert_int_equal(world_where(&w, 1000, 3), KVBM_REMOTE);
    shaky->hang_answers = false;
    wait_until(world_where(&w, 1000, 7) ==
               KVBM_MISS); /* the answer has come; those weren't stored */
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(world_where(&w, 1000, i), KVBM_REMOTE);
    assert_int_equal(world_load(&w, 1000, 8), 4);
    world_fini(&w);
}

/* Without a host tier a block that was stored can be asked for before the store has it. */
static void test_got_before_it_came(void **state)
{
    struct kvbm_done done;
    struct world w;
    int64_t id;

    (void)state;
    shaky_start(&w, 0);
    shaky->hang_puts = true;
    assert_int_equal(world_store(&w, 1000, 4), 4);
    wait_until(shaky->put_batches + shaky->puts > 0);
    shaky->hang_answers = true;
    id = load_in_background(&w, 1000, 4);
    wait_until(shaky->get_batches + shaky->gets > 0);
    usleep(50000);
    shaky->hang_puts = false;
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    shaky->hang_answers = false;
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 4); /* it was looked for again */
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(world_where(&w, 1000, i), KVBM_REMOTE);
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* A cancelled job whose pin was let go takes the fetches with it that only it wanted. */
static void test_cancel_ends_fetches(void **state)
{
    struct world w;
    struct kvbm_done done;
    uint64_t begin;
    int64_t id;

    (void)state;
    shaky_start(&w, 32);
    assert_int_equal(world_store(&w, 1000, 20), 20);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    shaky->hang = true;
    id = load_in_background(&w, 1000, 20);
    wait_until(shaky->inside > 0);
    begin = kv_now_ns();
    assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)id), 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, -ECANCELED);
    assert_int_equal(world_stats(&w).jobs_cancelled, 1);
    wait_until(world_stats(&w).pins_now == 0);
    assert_true(kv_now_ns() - begin < 40 * KV_NS_PER_S); /* not only at the store's deadline */
    shaky->hang = false;
    world_fini(&w);
}

/* A pin's deadline is its fetches', too: what hasn't come by then is done without, and what has is
 * of use. */
static void test_deadline_of_a_fetch(void **state)
{
    uint64_t keys[20], begin;
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin_opts opts = {.size = sizeof(opts)};
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    shaky_start(&w, 32);
    world_keys(1000, keys, 20);
    assert_int_equal(world_store(&w, 1000, 20), 20);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(
        kvbm_pool_reset_keys(kvbm_manager_pool(w.m, KV_TIER_HOST), 0, keys + 7, 13, NULL), 0);
    shaky->hang = true;
    begin = kv_now_ns();
    opts.deadline_ns = begin + 100 * KV_NS_PER_MS;
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 20, &opts, &pin), 20);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    assert_in_range(kv_now_ns() - begin, 100 * KV_NS_PER_MS,
                    40 * KV_NS_PER_S); /* not the store's */
    assert_int_equal(kvbm_pin_state(pin, NULL), 7);
    kvbm_pin_release(pin);
    shaky->hang = false;
    wait_until(shaky->inside == 0);
    world_fini(&w);
}

/* Blocks behind a miss are of no use to a prompt: once a batch has missed, no more are got. */
static void test_nothing_behind_a_miss(void **state)
{
    enum { BATCH = 32, WINDOW = 4, LONG = BATCH * WINDOW * 3 };
    uint64_t keys[LONG];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    shaky_start(&w, LONG);
    world_keys(1000, keys, LONG);
    assert_int_equal(world_store(&w, 1000, 8), 8);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_true(kvbm_manager_prepare_load(w.m, &chain, LONG, NULL, &pin) > 0);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    assert_int_equal(kvbm_pin_state(pin, NULL), 8);
    assert_in_range(world_stats(&w).object.misses, 1, BATCH * WINDOW);
    kvbm_pin_release(pin);
    world_fini(&w);
}

/* The object store has blocks 1000 to 1005, and no other tier does. */
static void start_with_six(struct world *w, uint32_t host_blocks)
{
    shaky_start(w, host_blocks);
    assert_int_equal(world_store(w, 1000, 6), 6);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST));
}

/* A key known to be absent costs none of the blocks before it: fetches beyond the share of host
 * blocks continue when the first ones end. */
static void test_share_before_a_miss(void **state)
{
    struct world w;

    (void)state;
    start_with_six(&w, 16); /* share: 4 blocks */
    wait_until(world_where(&w, 1000, 6) == KVBM_MISS);
    assert_int_equal(world_load(&w, 1000, 8), 6);
    world_fini(&w);
}

/* Blocks before a miss that another pin reserved, and released without their bytes, are fetched. */
static void test_reserved_before_a_miss(void **state)
{
    uint64_t keys[8];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *store, *load;
    struct world w;

    (void)state;
    start_with_six(&w, 64);
    world_keys(1000, keys, 8);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &store), 4);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 8, NULL, &load), 8);
    wait_until(world_stats(&w).object.misses == 2);
    kvbm_pin_release(store);
    assert_int_equal(kvbm_pin_wait(load, 30000), 0);
    assert_int_equal(kvbm_pin_state(load, NULL), 6);
    kvbm_pin_release(load);
    world_fini(&w);
}

/* ---- the share of fetches ---- */

enum { PROMPT = 24, SMALL = 32, PINS = 12, EACH = 16 };

static void store_and_keep(struct world *w)
{
    shaky_start(w, SMALL);
    assert_int_equal(world_store(w, 1000, PROMPT), PROMPT);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
}

static long still_there(struct world *w)
{
    uint64_t keys[PROMPT];

    world_keys(1000, keys, PROMPT);
    return kvbm_pool_probe(kvbm_manager_pool(w->m, KV_TIER_HOST), 0, keys, PROMPT);
}

static struct kvbm_pin *begin_load(struct world *w, uint64_t first, int32_t priority)
{
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .priority = priority};
    uint64_t keys[EACH];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin = NULL;

    world_keys(first, keys, EACH);
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, EACH, &opts, &pin), EACH);
    return pin;
}

static size_t host_in_flight(struct world *w)
{
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    kvbm_pool_get_stats(kvbm_manager_pool(w->m, KV_TIER_HOST), &stats);
    return stats.inflight_mutable;
}

/* A store that hangs: what is asked of it, however much, leaves the prompts in a small host tier
 * alone. */
static void test_frozen_store_evicts_little(void **state)
{
    struct kvbm_pin *pins[PINS];
    struct world w;

    (void)state;
    store_and_keep(&w);
    shaky->hang = true;
    for (uint64_t i = 0; i < PINS; i++)
        pins[i] = begin_load(&w, 10000 + 100 * i, 0);
    wait_until(shaky->inside > 0);
    assert_int_equal(host_in_flight(&w), SMALL / 4);
    assert_int_equal(still_there(&w), PROMPT);
    assert_int_equal(world_load(&w, 1000, PROMPT), PROMPT);
    shaky->hang = false;
    for (int i = 0; i < PINS; i++) {
        assert_int_equal(kvbm_pin_wait(pins[i], 30000), 0);
        assert_int_equal(kvbm_pin_state(pins[i], NULL), 0); /* nobody has put those */
        kvbm_pin_release(pins[i]);
    }
    assert_int_equal(host_in_flight(&w), 0);
    world_fini(&w);
}

/* Pins that are let go give their blocks back at once, also when all threads hang; those that
 * starve end, too. */
static void test_blocks_come_back(void **state)
{
    struct kvbm_pin *pins[PINS];
    struct world w;
    uint64_t begin;

    (void)state;
    store_and_keep(&w);
    shaky->hang = true;
    begin = kv_now_ns();
    for (uint64_t round = 0; round < 6; round++) {
        for (uint64_t i = 0; i < PINS; i++)
            pins[i] = begin_load(&w, 10000 + 10000 * round + 100 * i, 0);
        assert_true(host_in_flight(&w) <= SMALL / 4);
        for (int i = 0; i < PINS; i++)
            kvbm_pin_release(pins[i]);
        wait_until(world_stats(&w).pins_now == 0);
        assert_int_equal(host_in_flight(&w), 0);
        assert_int_equal(still_there(&w), PROMPT);
    }
    assert_true(kv_now_ns() - begin < 90 * KV_NS_PER_S); /* the store's own deadline: 100 s each */
    shaky->hang = false;
    wait_until(shaky->inside == 0);
    assert_int_equal(world_store(&w, 5000, 4), 4); /* all of it works as before */
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(world_load(&w, 5000, 4), 4);
    world_fini(&w);
}

/* A store that answers: pins beyond the share wait for it, the more important ones first, and get
 * all they asked for. */
static void test_share_goes_round(void **state)
{
    enum { N = 2 };
    struct kvbm_pin *pins[N];
    struct world w;

    (void)state;
    shaky_start(&w, SMALL + 8);
    for (uint64_t i = 0; i < PINS; i++) {
        assert_int_equal(world_store(&w, 1000 * (i + 1), EACH), EACH);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    for (uint64_t round = 0; round < PINS / N; round++) {
        kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
        for (uint64_t i = 0; i < N; i++)
            pins[i] = begin_load(&w, 1000 * (round * N + i + 1), (int32_t)i);
        for (int i = N; i-- > 0;) {
            assert_int_equal(kvbm_pin_wait(pins[i], 30000), 0);
            assert_int_equal(kvbm_pin_state(pins[i], NULL), EACH);
        }
        for (int i = 0; i < N; i++)
            kvbm_pin_release(pins[i]);
    }
    world_fini(&w);
}

/* The same of jobs whose pins were let go. */
static void test_share_for_jobs(void **state)
{
    int64_t ids[PINS];
    struct kvbm_done done;
    struct world w;

    (void)state;
    shaky_start(&w, PINS * 4);
    for (uint64_t i = 0; i < PINS; i++) {
        assert_int_equal(world_store(&w, 1000 * (i + 1), 4), 4);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    shaky->hang = true;
    for (uint64_t i = 0; i < PINS; i++)
        ids[i] = load_in_background(&w, 1000 * (i + 1), 4);
    assert_int_equal(host_in_flight(&w), PINS);
    shaky->hang = false;
    for (int i = 0; i < PINS; i++) {
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)ids[i], 30000, &done), 0);
        assert_int_equal(done.n_ok, 4);
    }
    world_fini(&w);
}

/* A pin that starves ends at its deadline, as one that is being served. */
static void test_starved_until_deadline(void **state)
{
    struct kvbm_pin_opts opts = {.size = sizeof(opts)};
    uint64_t keys[EACH], begin;
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *hog, *starved;
    struct world w;

    (void)state;
    store_and_keep(&w);
    shaky->hang = true;
    hog = begin_load(&w, 10000, 0);
    world_keys(20000, keys, EACH);
    begin = kv_now_ns();
    opts.deadline_ns = begin + 100 * KV_NS_PER_MS;
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, EACH, &opts, &starved), EACH);
    assert_int_equal(kvbm_pin_wait(starved, 30000), 0);
    assert_in_range(kv_now_ns() - begin, 100 * KV_NS_PER_MS, 40 * KV_NS_PER_S);
    assert_int_equal(kvbm_pin_state(starved, NULL), 0);
    kvbm_pin_release(starved);
    kvbm_pin_release(hog);
    shaky->hang = false;
    wait_until(shaky->inside == 0);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancel_ends_fetches),
        cmocka_unit_test(test_end_while_asked),
        cmocka_unit_test(test_end_while_all_hang),
        cmocka_unit_test(test_asked_before_it_came),
        cmocka_unit_test(test_got_before_it_came),
        cmocka_unit_test(test_deadline_of_a_fetch),
        cmocka_unit_test(test_nothing_behind_a_miss),
        cmocka_unit_test(test_share_before_a_miss),
        cmocka_unit_test(test_reserved_before_a_miss),
        cmocka_unit_test(test_frozen_store_evicts_little),
        cmocka_unit_test(test_blocks_come_back),
        cmocka_unit_test(test_share_goes_round),
        cmocka_unit_test(test_share_for_jobs),
        cmocka_unit_test(test_starved_until_deadline),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
