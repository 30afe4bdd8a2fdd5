// SPDX-License-Identifier: Apache-2.0
/* Fetches that a released pin leaves behind: those that another pin waits for go on. */
#include "base/unit.h"

#include "tier/kitchen.h"

#define MOST 64              /* keys of one store: the cache's blocks */
#define MANY_KEYS (2 * MOST) /* fetched at once */
#define MANY_PINS 800

/* A manager with @n keys in the object store alone, which hangs from now on. */
static void start(struct world *w, uint32_t n)
{
    shaky_start(w, 4 * n);
    for (uint32_t i = 0; i < n; i += MOST)
        assert_int_equal(world_store(w, 1000 + i, n < MOST ? n : MOST), n < MOST ? n : MOST);
    assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    assert_true(kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST)) > 0);
    shaky->hang = true;
    shaky->gets = shaky->get_batches = shaky->streams = 0;
}

static struct kvbm_pin *load(struct world *w, uint64_t first, uint32_t n, uint32_t timeout_ms)
{
    struct kvbm_pin_opts opts = {.size = sizeof(opts)};
    struct kvbm_pin *pin;
    uint64_t keys[MANY_KEYS];
    struct kvbm_chain chain = world_chain(keys);

    world_keys(first, keys, n);
    if (timeout_ms)
        opts.deadline_ns = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, n, &opts, &pin), n);
    return pin;
}

static int fetches(void)
{
    return shaky->gets + shaky->get_batches + shaky->streams;
}

/* The caller that began the fetch gives up. The one that waits gets the blocks of that fetch. */
static void test_goes_on_for_another(void **state)
{
    struct kvbm_pin *first, *second;
    struct world w;

    (void)state;
    start(&w, 4);
    first = load(&w, 1000, 4, 0);
    wait_until(shaky->inside > 0);
    second = load(&w, 1000, 4, 0);
    kvbm_pin_release(first);
    shaky->hang = false;
    assert_int_equal(kvbm_pin_wait(second, 30000), 0);
    assert_int_equal(kvbm_pin_state(second, NULL), 4);
    kvbm_pin_release(second);
    wait_until(shaky->inside == 0);
    assert_int_equal(fetches(), 1);
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* Once the last pin that waits is gone, too, or has waited long enough, the fetch ends. */
static void test_ends_with_the_last(void **state)
{
    struct kvbm_pin *first, *second;
    struct world w;
    uint64_t begin;

    (void)state;
    for (int late = 0; late < 2; late++) {
        start(&w, 4);
        first = load(&w, 1000, 4, 0);
        wait_until(shaky->inside > 0);
        second = load(&w, 1000, 4, late ? 50 : 0);
        begin = kv_now_ns();
        kvbm_pin_release(first);
        if (late) {
            assert_int_equal(kvbm_pin_wait(second, 30000), 0);
        } else {
            assert_int_equal(world_stats(&w).pins_now, 2);
            kvbm_pin_release(second);
        }
        wait_until(world_stats(&w).pins_now == (unsigned)late);
        assert_true(kv_now_ns() - begin < 40 * KV_NS_PER_S); /* not at the store's deadline */
        if (late)
            kvbm_pin_release(second);
        shaky->hang = false;
        wait_until(shaky->inside == 0);
        world_fini(&w);
    }
}

/* A cancelled job's fetch goes on for another pin, as a released pin's does. */
static void test_cancelled_job(void **state)
{
    struct kvbm_pin *second;
    struct kvbm_done done;
    struct world w;
    uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    int64_t id;

    (void)state;
    start(&w, 4);
    job.cache = w.cache;
    job.pin = load(&w, 1000, 4, 0);
    wait_until(shaky->inside > 0);
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    second = load(&w, 1000, 4, 0);
    assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)id), 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, -ECANCELED);
    shaky->hang = false;
    assert_int_equal(kvbm_pin_wait(second, 30000), 0);
    assert_int_equal(kvbm_pin_state(second, NULL), 4);
    kvbm_pin_release(second);
    assert_int_equal(fetches(), 1);
    wait_until(shaky->inside == 0);
    world_fini(&w);
}

static uint64_t thread_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * KV_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* The end of a wait takes about as long as its begin, however many other pins wait. */
static void test_many_wait(void **state)
{
    static struct kvbm_pin *pins[MANY_PINS];
    struct kvbm_pin *first;
    struct world w;
    uint64_t begin, loads, releases;

    (void)state;
    start(&w, MANY_KEYS);
    first = load(&w, 1000, MANY_KEYS, 0);
    wait_until(shaky->inside > 0);
    begin = thread_ns();
    for (int i = 0; i < MANY_PINS; i++)
        pins[i] = load(&w, 1000, MANY_KEYS, 0);
    loads = thread_ns() - begin;
    kvbm_pin_release(first); /* its fetches are looked at from here on */
    begin = thread_ns();
    for (int i = 0; i < MANY_PINS; i++)
        kvbm_pin_release(pins[i]);
    releases = thread_ns() - begin;
    assert_true(releases < 4 * loads);
    wait_until(world_stats(&w).pins_now == 0); /* the last one has cancelled the fetches */
    shaky->hang = false;
    wait_until(shaky->inside == 0);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goes_on_for_another),
        cmocka_unit_test(test_ends_with_the_last),
        cmocka_unit_test(test_cancelled_job),
        cmocka_unit_test(test_many_wait),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
