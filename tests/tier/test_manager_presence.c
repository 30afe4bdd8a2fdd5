// SPDX-License-Identifier: Apache-2.0
/* Lookups of keys that only the object store may have, while it is slow, fails, hangs or can't be
 * reached. KVBM_PENDING while asking again makes sense, then KVBM_MISS soon. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <ftw.h>

#define CACHE_BLOCKS 512u
#include "base/core/error.h"
#include "tier/kitchen.h"

#define PATIENCE_NS (2 * KV_NS_PER_S) /* kvbm_manager_lookup's */
#define SLACK_NS (150 * KV_NS_PER_S)  /* of a busy machine, and of sanitizers */

struct told {
    long prefix;
    uint32_t n[KVBM_BUSY + 1]; /* by state */
};

static struct told look(struct world *w, uint64_t first, uint32_t n)
{
    uint64_t keys[CACHE_BLOCKS];
    uint8_t at[CACHE_BLOCKS];
    struct kvbm_chain chain = world_chain(keys);
    struct told told = {0};

    world_keys(first, keys, n);
    told.prefix = kvbm_manager_lookup(w->m, &chain, n, at);
    assert_true(told.prefix >= 0);
    for (uint32_t i = 0; i < n; i++)
        told.n[at[i]]++;
    return told;
}

static bool all(struct world *w, uint64_t first, uint32_t n, enum kvbm_where state)
{
    return look(w, first, n).n[state] == n;
}

static uint64_t unanswered(struct world *w)
{
    return world_stats(w).object_unanswered;
}

/* The store has blocks 1000 to 1000 + @n, and nobody knows. */
static void stored_and_forgotten(struct world *w, uint32_t n, uint32_t timeout_ms)
{
    shaky_start(w, 8 * 128); /* a quarter of them: more than four batches of a prompt */
    for (uint32_t done = 0, some; done < n; done += some) {
        some = n - done < 32 ? n - done : 32;
        kvbm_pool_reset_inactive(kvbm_manager_pool(w->m, KV_TIER_HOST));
        assert_int_equal(world_store(w, 1000 + done, some), some);
        assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
        assert_int_equal(world_stats(w).object.used, done + some); /* none was dropped */
    }
    world_stop(w);
    w->opts.object_timeout_ms = timeout_ms;
    world_start(w);
    world_attach(w, false);
    shaky->exists = 0;
}

/* -- damaged blocks ----------------------------------------------------------------------------- */

static int cut_short(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)at;
    if (type == FTW_F && strstr(path, "/chunks/") && st->st_size > 64)
        assert_int_equal(truncate(path, st->st_size - 1), 0);
    return 0;
}

/* A lookup finds them damaged before any load: they are misses, and each counts as bad once. */
static void test_damaged(void **state)
{
    struct world w;

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    assert_int_equal(nftw(strchr(w.object, '/') + 2, cut_short, 16, FTW_PHYS), 0);
    wait_until(all(&w, 1000, 6, KVBM_MISS));
    assert_int_equal(world_stats(&w).object.bad, 4);
    assert_int_equal(world_stats(&w).object.failed, 0);
    shaky->exists = 0;
    wait_until(all(&w, 1000, 6, KVBM_PENDING) || shaky->exists); /* asked for again */
    wait_until(all(&w, 1000, 6, KVBM_MISS));
    assert_int_equal(world_stats(&w).object.bad, 4);
    world_fini(&w);
}

/* -- a question beside a removal ---------------------------------------------------------------- */

/* A question has seen the keys, and is answered after they were removed: they are misses. */
static void test_removed_meanwhile(void **state)
{
    uint64_t keys[4];
    struct world w;

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    world_keys(1000, keys, 4);
    shaky->hang_answers = true;
    assert_true(all(&w, 1000, 4, KVBM_PENDING));
    wait_until(shaky->exists == 1);
    usleep(20000); /* it has looked by then, most likely: else there is nothing to see */
    assert_int_equal(kvbm_manager_remove(w.m, 0, keys, 4, 30000, NULL), 0);
    shaky->hang_answers = false;
    wait_until(shaky->inside == 0);
    wait_until(look(&w, 5000, 1).n[KVBM_MISS] == 1); /* a later question: the first has ended */
    assert_true(all(&w, 1000, 4, KVBM_MISS));
    world_fini(&w);
}

/* -- a question that fails --------------------------------------------------------------------- */

/* One that fails says nothing of the key: it is asked for again, and isn't a miss meanwhile. */
static void test_one_fails(void **state)
{
    struct world w;
    uint64_t begin;
    bool in_time = true; /* a machine that stops for two seconds is told a miss */

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    shaky->fail_exists_rc = -ECONNRESET;
    shaky->fail_exists_n = 2;
    begin = kv_now_ns();
    while (!all(&w, 1000, 4, KVBM_REMOTE)) {
        uint32_t misses = look(&w, 1000, 4).n[KVBM_MISS];

        in_time &= kv_now_ns() - begin < PATIENCE_NS;
        assert_true(misses == 0 || !in_time);
        assert_true(kv_now_ns() - begin < 60 * KV_NS_PER_S);
        usleep(500);
    }
    in_time &= kv_now_ns() - begin < PATIENCE_NS;
    /* more than 3 where a lookup ran while the pause ended, and asked for some of the keys */
    assert_true((shaky->exists >= 3 && shaky->exists <= 6) || !in_time);
    assert_true(unanswered(&w) == 0 || !in_time);
    world_fini(&w);
}

/* All fail, with what isn't an outage: soon a miss, counted, with few questions; and asked for
 * again later. */
static void test_all_fail(void **state)
{
    struct world w;
    uint64_t begin;

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    shaky->fail_exists_rc = -ENOMEM;
    shaky->fail_exists_n = 1 << 30;
    begin = kv_now_ns();
    assert_true(all(&w, 1000, 4, KVBM_PENDING));
    while (!all(&w, 1000, 4, KVBM_MISS)) {
        assert_true(kv_now_ns() - begin < PATIENCE_NS + SLACK_NS);
        usleep(500);
    }
    assert_true(kv_now_ns() - begin > KV_NS_PER_S);
    assert_true(shaky->exists < 60);
    /* the last question may still have been under way; on a machine that stops for two seconds
     * another one ends in between */
    wait_until(unanswered(&w) >= 4);
    assert_false(world_stats(&w).object_down);
    shaky->fail_exists_n = 0;
    wait_until(all(&w, 1000, 4, KVBM_REMOTE));
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* -- one that hangs ---------------------------------------------------------------------------- */

/* Long before its own deadline it is a miss, for loads too; the answer counts when it comes. */
static void test_hangs(void **state)
{
    struct world w;
    uint64_t begin;

    (void)state;
    stored_and_forgotten(&w, 4, 60000);
    shaky->hang_exists = true;
    begin = kv_now_ns();
    assert_true(all(&w, 1000, 4, KVBM_PENDING));
    while (!all(&w, 1000, 4, KVBM_MISS)) {
        assert_true(kv_now_ns() - begin < PATIENCE_NS + SLACK_NS);
        usleep(500);
    }
    assert_true(kv_now_ns() - begin > KV_NS_PER_S);
    assert_int_equal(world_load(&w, 1000, 4), 0); /* nor does it wait */
    assert_int_equal(shaky->gets + shaky->get_batches, 0);
    assert_int_equal(shaky->exists, 1);
    shaky->hang_exists = false;
    wait_until(all(&w, 1000, 4, KVBM_REMOTE));
    assert_int_equal(world_load(&w, 1000, 4), 4);
    assert_int_equal(shaky->exists, 1);
    world_fini(&w);
}

/* With less time for a batch than that, it is a miss after that. */
static void test_short_timeout(void **state)
{
    struct world w;
    uint64_t begin, awake_ns = 0; /* without the time in which a busy machine ran others */

    (void)state;
    stored_and_forgotten(&w, 4, 100);
    shaky->hang_exists = true;
    begin = kv_now_ns();
    while (!all(&w, 1000, 4, KVBM_MISS)) {
        usleep(500);
        awake_ns += KV_MIN(kv_now_ns() - begin, 20 * KV_NS_PER_MS);
        begin = kv_now_ns();
        assert_true(awake_ns < PATIENCE_NS);
    }
    wait_until(unanswered(&w) == 4);
    shaky->hang_exists = false;
    wait_until(all(&w, 1000, 4, KVBM_REMOTE));
    world_fini(&w);
}

/* More questions than can wait: the others aren't known either. */
static void test_queue_is_full(void **state)
{
    struct world w;
    uint64_t key = 100000;

    (void)state;
    stored_and_forgotten(&w, 4, 60000);
    shaky->hang_exists = true;
    for (int i = 0; i < 40; i++, key += 256) /* 8 questions each, of 256 that may wait */
        assert_true(all(&w, key, 256, KVBM_PENDING));
    assert_true(all(&w, 1000, 4, KVBM_PENDING));
    shaky->hang_exists = false;
    wait_until(all(&w, 1000, 4, KVBM_REMOTE));
    world_fini(&w);
}

/* -- one that isn't asked ---------------------------------------------------------------------- */

static void test_breaker_is_open(void **state)
{
    struct world w;
    uint64_t before;
    int asked;

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    shaky->fail_rc = -ECONNRESET;
    for (uint64_t key = 100000; !world_stats(&w).object_down; key += 100, usleep(2000)) {
        assert_true(look(&w, key, 4).prefix >= 0);
        assert_true(key < 200000);
    }
    before = unanswered(&w);
    asked = shaky->exists;
    for (int i = 0; i < 100; i++) /* the one that is let through to see isn't waited for either */
        assert_true(all(&w, 1000, 4, KVBM_MISS));
    wait_until(unanswered(&w) >= before + 4); /* usually each time */
    assert_true(shaky->exists <= asked + 1);
    assert_int_equal(look(&w, 1000, 512).n[KVBM_PENDING], 0);
    shaky->fail_rc = 0;
    wait_until(look(&w, 1000, 4).n[KVBM_PENDING] == 0 && all(&w, 1000, 4, KVBM_REMOTE));
    assert_int_equal(world_load(&w, 1000, 4), 4);
    world_fini(&w);
}

/* -- many keys --------------------------------------------------------------------------------- */

/* More keys than one call asks for aren't known yet; the next call asks for more. */
static void test_long_prompt(void **state)
{
    struct world w;
    struct told told;

    (void)state;
    stored_and_forgotten(&w, 500, 0);
    told = look(&w, 1000, 512);
    assert_int_equal(told.n[KVBM_PENDING], 512);
    assert_int_equal(told.prefix, 512);
    wait_until(look(&w, 1000, 512).n[KVBM_REMOTE] == 500);
    wait_until(look(&w, 1000, 512).n[KVBM_PENDING] == 0);
    assert_int_equal(look(&w, 1000, 512).prefix, 500);
    assert_int_equal(shaky->exists, 16);
    world_fini(&w);
}

/* Absence is remembered for all keys of several prompts: a lookup that asks again and again would
 * let its caller wait for ever. */
static void test_absence_is_remembered(void **state)
{
    struct world w;

    (void)state;
    stored_and_forgotten(&w, 1, 0);
    for (uint64_t prompt = 0; prompt < 8; prompt++) {
        uint64_t begin = kv_now_ns();
        int calls = 0;

        while (look(&w, 1000000 * (prompt + 1), 256).n[KVBM_PENDING]) {
            calls++;
            assert_true(kv_now_ns() - begin < KV_NS_PER_S + SLACK_NS);
            usleep(1000);
        }
        assert_true(calls > 0);
    }
    assert_int_equal(shaky->exists, 8 * 8);
    world_fini(&w);
}

/* -- how often the store is called ------------------------------------------------------------- */

#define PROMPT 128u

static void nothing_was_called(void)
{
    shaky->exists = shaky->prefetches = 0;
    shaky->gets = shaky->get_batches = 0;
}

/* Four questions about a prompt's 128 blocks, and four calls to get them; those at the same
 * time. */
static void test_calls_of_a_prompt(void **state)
{
    struct world w;
    uint64_t keys[PROMPT];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    (void)state;
    stored_and_forgotten(&w, PROMPT, 0);
    nothing_was_called();
    shaky->hang = true;
    assert_int_equal(look(&w, 1000, PROMPT).n[KVBM_PENDING], PROMPT);
    wait_until(shaky->inside == 4);
    assert_int_equal(look(&w, 1000, PROMPT).n[KVBM_PENDING], PROMPT);
    shaky->hang = false;
    wait_until(all(&w, 1000, PROMPT, KVBM_REMOTE));
    assert_int_equal(shaky->exists, 4);
    wait_until(shaky->inside == 0);
    shaky->hang = true;
    world_keys(1000, keys, PROMPT);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, PROMPT, NULL, &pin), PROMPT);
    wait_until(shaky->inside == 4);
    shaky->hang = false;
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    assert_int_equal(kvbm_pin_state(pin, NULL), PROMPT);
    kvbm_pin_release(pin);
    assert_int_equal(shaky->get_batches, 4);
    assert_int_equal(shaky->exists, 4);
    assert_int_equal(shaky->gets, 0);
    assert_int_equal(world_load(&w, 1000, PROMPT), PROMPT); /* and compares every byte */
    world_fini(&w);
}

/* Loaded without having been asked for: no questions. */
static void test_calls_of_a_load(void **state)
{
    struct world w;

    (void)state;
    stored_and_forgotten(&w, PROMPT, 0);
    nothing_was_called();
    assert_int_equal(world_load(&w, 1000, PROMPT), PROMPT);
    assert_int_equal(shaky->get_batches, 4);
    assert_int_equal(shaky->exists + shaky->gets, 0);
    world_fini(&w);
}

/* A backend without calls for many is told what will be wanted before it is got one by one. */
static void test_calls_without_batches(void **state)
{
    struct world w;

    (void)state;
    stored_and_forgotten(&w, PROMPT, 0);
    world_stop(&w);
    shaky->ext = 2;
    world_start(&w);
    world_attach(&w, false);
    nothing_was_called();
    assert_int_equal(world_load(&w, 1000, PROMPT), PROMPT);
    assert_int_equal(shaky->prefetches, 4);
    assert_int_equal(shaky->gets, PROMPT);
    assert_int_equal(shaky->get_batches + shaky->exists, 0);
    world_fini(&w);
}

/* -- whose blocks come first ------------------------------------------------------------------- */

static struct kvbm_pin *pin_of(struct world *w, uint64_t first, uint32_t n, int32_t priority)
{
    uint64_t keys[PROMPT];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .priority = priority};
    struct kvbm_pin *pin = NULL;

    world_keys(first, keys, n);
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, n, &opts, &pin), n);
    return pin;
}

/* One more call may come back: the next one begins, which wants @n blocks. */
static void next_call_wants(int n)
{
    int calls = shaky->get_batches;

    shaky->pass = 1;
    wait_until(shaky->get_batches == calls + 1);
    assert_int_equal(shaky->last_get, n);
}

/* All threads are busy for others; what waits goes by the pins' priorities, and those of jobs that
 * wait for pins. */
static void test_urgent_pins_first(void **state)
{
    uint32_t blocks[40];
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks, .priority = 9};
    struct kvbm_pin *pins[5];
    struct kvbm_done done;
    struct world w;
    int64_t id;

    (void)state;
    stored_and_forgotten(&w, 1, 0);
    nothing_was_called();
    shaky->hang = true;
    pins[0] = pin_of(&w, 100000, PROMPT, 0); /* nobody has any of these */
    wait_until(shaky->inside == 4);
    pins[1] = pin_of(&w, 200000, 1, 0);
    pins[2] = pin_of(&w, 300000, 2, -1);
    pins[3] = pin_of(&w, 400000, 3, 5);
    pins[4] = pin_of(&w, 500000, 4, 0);
    job.pin = pins[4]; /* too late for what has been asked for */
    job.cache = w.cache;
    for (uint32_t i = 0; i < 4; i++)
        blocks[i] = i;
    id = kvbm_manager_submit(w.m, &job);
    assert_true(id > 0);
    next_call_wants(3);
    next_call_wants(1);
    next_call_wants(4);
    next_call_wants(2);
    shaky->hang = false;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(kvbm_pin_wait(pins[i], 30000), 0);
        kvbm_pin_release(pins[i]);
    }
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, 0);
    world_fini(&w);
}

/* More keys in doubt than are remembered, at the same time. */
static void test_many_prompts_hang(void **state)
{
    enum { PROMPTS = 300 };
    bool waits[PROMPTS]; /* until it is told: absence is forgotten within a slow machine's turn */
    struct world w;
    uint64_t begin;
    int left = PROMPTS;

    (void)state;
    stored_and_forgotten(&w, 4, 60000);
    shaky->hang_exists = true;
    for (int i = 0; i < PROMPTS; i++)
        waits[i] = true;
    begin = kv_now_ns();
    while (left && kv_now_ns() - begin < PATIENCE_NS + SLACK_NS) {
        left = 0;
        for (int i = 0; i < PROMPTS; i++) {
            waits[i] = waits[i] && look(&w, 100000 + 256 * (uint64_t)i, 256).prefix > 0;
            left += waits[i];
        }
        usleep(5000);
    }
    shaky->hang_exists = false;
    world_fini(&w);
    assert_int_equal(left, 0);
}

/* A store that answers at once, and hasn't any of it: each of many prompts that wait beside each
 * other is told so soon. */
static void test_many_prompts_cold(void **state)
{
    enum { PROMPTS = 600 };
    bool waits[PROMPTS];
    struct world w;
    uint64_t begin;
    int left = PROMPTS;

    (void)state;
    stored_and_forgotten(&w, 4, 0);
    for (int i = 0; i < PROMPTS; i++)
        waits[i] = true;
    begin = kv_now_ns();
    while (left && kv_now_ns() - begin < PATIENCE_NS + SLACK_NS) {
        left = 0;
        for (int i = 0; i < PROMPTS; i++) {
            waits[i] = waits[i] && look(&w, 1000000 + 256 * (uint64_t)i, 256).prefix > 0;
            left += waits[i];
        }
        usleep(20000);
    }
    world_fini(&w);
    assert_int_equal(left, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_removed_meanwhile),
        cmocka_unit_test(test_one_fails),
        cmocka_unit_test(test_all_fail),
        cmocka_unit_test(test_hangs),
        cmocka_unit_test(test_short_timeout),
        cmocka_unit_test(test_queue_is_full),
        cmocka_unit_test(test_many_prompts_hang),
        cmocka_unit_test(test_many_prompts_cold),
        cmocka_unit_test(test_breaker_is_open),
        cmocka_unit_test(test_calls_of_a_prompt),
        cmocka_unit_test(test_calls_of_a_load),
        cmocka_unit_test(test_calls_without_batches),
        cmocka_unit_test(test_urgent_pins_first),
        cmocka_unit_test(test_long_prompt),
        cmocka_unit_test(test_absence_is_remembered),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
