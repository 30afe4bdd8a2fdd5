// SPDX-License-Identifier: Apache-2.0
/* Priorities that end, on a clock that the test sets. */
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"
#include "index/random.h"

#define DAY (UINT64_C(24) * 3600 * KV_NS_PER_S)
#define MS_OF_DAY (UINT64_C(24) * 3600 * 1000)

static uint64_t ahead_ns; /* of the kernel's monotonic clock */

/* Instead of the C library's: the block manager's clock is in this program. */
int clock_gettime(clockid_t clock, struct timespec *ret)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, ret);

    if (rc == 0 && clock == CLOCK_MONOTONIC) {
        uint64_t now = (uint64_t)ret->tv_sec * KV_NS_PER_S + (uint64_t)ret->tv_nsec + ahead_ns;

        ret->tv_sec = (time_t)(now / KV_NS_PER_S);
        ret->tv_nsec = (long)(now % KV_NS_PER_S);
    }
    return rc;
}

/* Without events, whose thread waits by the kernel's clock. */
static void open_it(struct bm *bm, const struct kvbm_pool_opts *opts)
{
    *bm = (struct bm){0};
    ahead_ns = 0;
    assert_int_equal(kvbm_registry_create(NULL, &bm->registry), 0);
    bm->pool = bm_pool(bm, opts);
}

static void retain(struct bm *bm, uint64_t key, uint32_t priority, uint64_t ttl_ms)
{
    assert_int_equal(kvbm_pool_retain(bm->pool, 0, &key, 1, priority, ttl_ms), 1);
}

static uint32_t priority_of(struct bm *bm, uint64_t key)
{
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_immutable held;

    assert_int_equal(kvbm_pool_match(bm->pool, 0, &key, 1, KVBM_MATCH_NO_TOUCH, &held), 1);
    assert_int_equal(kvbm_immutable_info(&held, &info), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    return info.priority;
}

/* Of a pool that is 500 days old, and of one that gets as old. */
static void test_years(void **state)
{
    struct bm bm;
    (void)state;

    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = 2});
    bm_leave(bm.pool, 1);
    bm_leave(bm.pool, 2);
    retain(&bm, 1, 90, 3000 * MS_OF_DAY);
    ahead_ns = 500 * DAY;
    retain(&bm, 2, 91, 60000);
    bm_leave(bm.pool, 3); /* the lower one of the two goes, neither has ended */
    assert_false(bm_has(bm.pool, 1));
    assert_int_equal(priority_of(&bm, 2), 91);
    ahead_ns += 59 * KV_NS_PER_S;
    assert_int_equal(priority_of(&bm, 2), 91);
    ahead_ns += 2 * KV_NS_PER_S;
    assert_int_equal(priority_of(&bm, 2), KVBM_PRIORITY_DEFAULT);
    retain(&bm, 2, 92, 3000 * MS_OF_DAY);
    ahead_ns += 2999 * DAY;
    assert_int_equal(priority_of(&bm, 2), 92);
    ahead_ns += 2 * DAY;
    assert_int_equal(priority_of(&bm, 2), KVBM_PRIORITY_DEFAULT);
    retain(&bm, 2, 93, UINT64_MAX);
    retain(&bm, 3, 94, UINT64_MAX / 1000);
    ahead_ns += 20000 * DAY;
    assert_int_equal(priority_of(&bm, 2), 93);
    assert_int_equal(priority_of(&bm, 3), 94);
    bm_close(&bm);
}

/* Many ends at once: each call carries out its share, and blocks whose end has come go before live ones. */
static void test_share(void **state)
{
    enum { MANY = 5000, LIVE = 8 };
    struct kvbm_mutable *blocks = calloc(MANY, sizeof(*blocks));
    size_t taken = 0;
    struct bm bm;
    (void)state;

    assert_non_null(blocks);
    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = MANY});
    for (uint64_t key = 0; key < MANY; key++) {
        bm_leave(bm.pool, key);
        retain(&bm, key, key < LIVE ? 60 : 90, key < LIVE ? 3600000 : 100 + key % 7);
    }
    assert_int_equal(bm.pool->retained.n, MANY);
    ahead_ns = KV_NS_PER_S;
    assert_int_equal(priority_of(&bm, MANY - 1), KVBM_PRIORITY_DEFAULT); /* this one, no other */
    assert_int_equal(bm.pool->retained.n, MANY - 1);
    for (size_t n = 1; taken < MANY - LIVE; taken += n, n = n % 150 + 13) {
        size_t before = bm.pool->retained.n, ended, most;

        n = KV_MIN(n, MANY - LIVE - taken);
        assert_int_equal(kvbm_pool_allocate(bm.pool, n, blocks + taken, NULL), 0);
        ended = before - bm.pool->retained.n;
        most = n + (n + 63) / 64 * KVBM_RETAIN_MORE;
        assert_true(ended <= most);
        assert_true(ended == most || bm.pool->retained.n == LIVE);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    for (uint64_t key = 0; key < LIVE; key++)
        assert_int_equal(priority_of(&bm, key), 60);
    assert_int_equal(bm.pool->retained.n, LIVE);
    assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, taken), 0);
    bm_close(&bm);
    free(blocks);
}

#define HOUR_NS (3600 * KV_NS_PER_S) /* so long that the test's own time doesn't matter */
#define KEYS 300

/* The end of each key in hours, 0: none. */
static size_t count(const uint64_t *when, uint64_t *earliest)
{
    size_t n = 0;

    *earliest = UINT64_MAX;
    for (size_t i = 0; i < KEYS; i++) {
        n += when[i] != 0;
        *earliest = when[i] ? KV_MIN(*earliest, when[i]) : *earliest;
    }
    return n;
}

/* Carry one end out: it is one of the earliest. */
static void end_one(struct bm *bm, uint64_t *when, uint64_t now)
{
    uint64_t earliest, n_ended = 0;
    size_t n = count(when, &earliest);

    kvbm_retain_expire(bm->pool, 1);
    assert_int_equal(bm->pool->retained.n, n - (earliest <= now));
    for (uint64_t key = 0; key < KEYS; key++) {
        uint32_t i = (uint32_t)key + 1; /* its slot, as it always had */

        if (!when[key] || bm->pool->slots[i].flags & SLOT_RETAINED)
            continue;
        assert_int_equal(when[key], earliest);
        assert_int_equal(bm->pool->slots[i].priority, KVBM_PRIORITY_DEFAULT);
        when[key] = 0;
        n_ended++;
    }
    assert_int_equal(n_ended, earliest <= now);
}

/* Any order of ends, changes of them, and blocks that go: the earliest is always carried out first. */
static void test_random(void **state)
{
    uint64_t when[KEYS] = {0}, now = 0;
    struct rng rng = {test_seed()};
    struct bm bm;
    (void)state;

    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = KEYS});
    for (uint64_t key = 0; key < KEYS; key++)
        bm_leave(bm.pool, key);
    for (long round = test_rounds(6000); round > 0; round--) {
        uint64_t key = rng_below(&rng, KEYS), ttl = rng_below(&rng, 500), earliest;
        uint32_t what = rng_below(&rng, 8);

        if (what == 0) {
            now += rng_below(&rng, 10);
            ahead_ns = now * HOUR_NS;
        } else if (what == 1) { /* its next life is in the block that it had, the only free one */
            assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, &key, 1, NULL), 0);
            bm_leave(bm.pool, key);
            when[key] = 0;
        } else if (what == 2) {
            uint32_t priority = priority_of(&bm, key);

            assert_true(!when[key] || priority == (when[key] <= now ? 35 : 70));
            when[key] = when[key] <= now ? 0 : when[key];
        } else if (what < 6) {
            retain(&bm, key, 70, ttl * HOUR_NS / KV_NS_PER_MS);
            when[key] = ttl ? now + ttl : 0;
        } else {
            end_one(&bm, when, now);
        }
        assert_int_equal(bm.pool->retained.n, count(when, &earliest));
        if (round % 16 == 0)
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    bm_close(&bm);
}

static uint32_t priority_held(const struct kvbm_immutable *held)
{
    struct kvbm_block_info info = {.size = sizeof(info)};

    assert_int_equal(kvbm_immutable_info(held, &info), 0);
    return info.priority;
}

/* A block of another tier takes over a priority and its end, but none whose end has come. */
static void test_adopted(void **state)
{
    struct kvbm_mutable fresh[4];
    struct kvbm_immutable held[4], ours[4], first;
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct kvbm_pool *host;
    struct bm bm;
    (void)state;

    open_it(&bm, NULL);
    host = bm_pool(&bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST});
    bm_put(bm.pool, (uint64_t[]){1, 2, 3, 4}, 4, held);
    bm_put_at(host, 0, &(uint64_t){3}, 3, &(uint64_t){4}, 1, &first);
    assert_int_equal(kvbm_pool_retain(host, 0, &(uint64_t){4}, 1, 35, 3000), 1); /* says nothing */
    retain(&bm, 1, 80, 1000);
    retain(&bm, 2, 70, 5000000);
    retain(&bm, 3, 60, 0);
    retain(&bm, 4, 50, UINT64_MAX); /* longer than can be said */
    ahead_ns = 2 * KV_NS_PER_S;
    assert_int_equal(kvbm_pool_allocate(host, 4, fresh, NULL), 0);
    assert_int_equal(kvbm_pool_adopt(host, fresh, 4, held, ours), 0);
    assert_int_equal(priority_held(&ours[0]), KVBM_PRIORITY_DEFAULT);
    assert_int_equal(priority_held(&ours[1]), 70);
    assert_int_equal(kvbm_immutable_info(&ours[1], &info), 0);
    assert_true(info.priority_until_ns > kv_now_ns() + 4990 * KV_NS_PER_S);
    assert_true(info.priority_until_ns < kv_now_ns() + 5000 * KV_NS_PER_S);
    assert_int_equal(kvbm_immutable_info(&ours[2], &info), 0);
    assert_int_equal(info.priority_until_ns, 0);
    assert_int_equal(kvbm_immutable_info(&held[3], &info), 0);
    assert_int_equal(info.priority_until_ns, 0);
    ahead_ns += 4900 * KV_NS_PER_S;
    assert_int_equal(priority_held(&ours[1]), 70); /* the rest of its time, not all of it again */
    ahead_ns += 200 * KV_NS_PER_S;
    assert_int_equal(priority_held(&held[1]), KVBM_PRIORITY_DEFAULT);
    assert_int_equal(priority_held(&ours[1]), KVBM_PRIORITY_DEFAULT);
    assert_int_equal(priority_held(&ours[2]), 60); /* for ever, as there */
    assert_int_equal(priority_held(&ours[3]), 50); /* without the end that the default had here */
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 4), 0);
    assert_int_equal(kvbm_pool_release(host, ours, 4), 0);
    assert_int_equal(kvbm_immutable_release(&first), 0);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    bm_close(&bm);
}

enum { CHAIN = 8, TAKEN = 3 };

/* @n blocks go: the chain keeps its beginning. */
static void end_goes(struct bm *bm, const uint64_t *keys, size_t n, size_t there)
{
    struct kvbm_mutable taken[CHAIN];

    assert_int_equal(kvbm_pool_allocate(bm->pool, n, taken, NULL), 0);
    assert_int_equal(kvbm_pool_probe(bm->pool, 0, keys, CHAIN), there);
    assert_int_equal(kvbm_pool_release_mutable(bm->pool, taken, n), 0);
}

static void leave_chain(struct bm *bm, const uint64_t *keys)
{
    struct kvbm_immutable held[CHAIN];

    bm_put(bm->pool, keys, CHAIN, held);
    assert_int_equal(kvbm_pool_release(bm->pool, held, CHAIN), 0);
}

/* A chain that is retained, for ever or for a time: its end goes before its beginning, with every policy. */
static void test_end_first(void **state)
{
    static const uint64_t keys[CHAIN] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const uint64_t ttls[] = {0, 5000};
    struct bm bm;
    (void)state;

    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        for (size_t i = 0; i < KV_COUNT(ttls); i++) {
            open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = CHAIN,
                                                  .eviction = (enum kvbm_eviction)policy});
            leave_chain(&bm, keys);
            assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, CHAIN, 80, ttls[i]), CHAIN);
            end_goes(&bm, keys, TAKEN, CHAIN - TAKEN);
            bm_close(&bm);
        }
    }
}

/* The time of a retained chain ends, some of it by each call: the end of the chain goes first again. */
static void test_end_first_when_over(void **state)
{
    enum { LONG = 300, STEP = 7, ALL = 280 };
    struct kvbm_immutable held[LONG];
    struct kvbm_mutable taken[ALL];
    uint64_t keys[LONG];
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < LONG; i++)
        keys[i] = 10 + i;
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        open_it(&bm,
                &(struct kvbm_pool_opts){.n_blocks = LONG, .eviction = (enum kvbm_eviction)policy});
        bm_put(bm.pool, keys, LONG, held);
        assert_int_equal(kvbm_pool_release(bm.pool, held, LONG), 0);
        assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, LONG, 80, 5000), LONG);
        ahead_ns += 6 * KV_NS_PER_S;
        for (size_t n = 0; n < ALL; n += STEP) {
            assert_int_equal(kvbm_pool_allocate(bm.pool, STEP, taken + n, NULL), 0);
            assert_int_equal(kvbm_pool_probe(bm.pool, 0, keys, LONG), LONG - n - STEP);
        }
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        assert_int_equal(kvbm_pool_release_mutable(bm.pool, taken, ALL), 0);
        bm_close(&bm);
    }
}

/* Keys without a sequence, retained in one call: as after a release, the last one goes first. */
static void test_scattered_when_over(void **state)
{
    struct kvbm_immutable held[CHAIN], ours[CHAIN];
    struct kvbm_complete complete[CHAIN];
    struct kvbm_mutable fresh[CHAIN];
    struct kvbm_pool *host;
    uint64_t keys[CHAIN];
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < CHAIN; i++)
        keys[i] = 50 + i * 7 % CHAIN;
    for (int policy = KVBM_EVICT_LRU; policy <= KVBM_EVICT_LINEAGE; policy++) {
        struct kvbm_pool_opts opts = {.n_blocks = CHAIN, .eviction = (enum kvbm_eviction)policy};
        struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .scattered = true};

        open_it(&bm, &opts);
        opts.tier = KV_TIER_HOST;
        host = bm_pool(&bm, &opts);
        assert_int_equal(kvbm_pool_allocate(bm.pool, CHAIN, fresh, NULL), 0);
        assert_int_equal(kvbm_pool_complete(bm.pool, fresh, CHAIN, &chain, complete), 0);
        assert_int_equal(kvbm_pool_register(bm.pool, complete, CHAIN, held), 0);
        assert_int_equal(kvbm_pool_retain(bm.pool, 0, keys, CHAIN, 80, 5000), CHAIN);
        assert_int_equal(kvbm_pool_allocate(host, CHAIN, fresh, NULL), 0);
        assert_int_equal(kvbm_pool_adopt(host, fresh, CHAIN, held, ours), 0);
        assert_int_equal(kvbm_pool_release(bm.pool, held, CHAIN), 0);
        assert_int_equal(kvbm_pool_release(host, ours, CHAIN), 0);
        ahead_ns += 6 * KV_NS_PER_S;
        end_goes(&bm, keys, TAKEN, CHAIN - TAKEN);
        assert_int_equal(kvbm_pool_allocate(host, TAKEN, fresh, NULL), 0); /* adopted: as there */
        assert_int_equal(kvbm_pool_probe(host, 0, keys, CHAIN), CHAIN - TAKEN);
        assert_int_equal(kvbm_pool_release_mutable(host, fresh, TAKEN), 0);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        assert_int_equal(kvbm_pool_destroy(host), 0);
        bm_close(&bm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_years),
        cmocka_unit_test(test_share),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_adopted),
        cmocka_unit_test(test_end_first),
        cmocka_unit_test(test_end_first_when_over),
        cmocka_unit_test(test_scattered_when_over),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
