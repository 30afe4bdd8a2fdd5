// SPDX-License-Identifier: Apache-2.0
/* The registry's table grows in shares: meanwhile every key is found, or not found, correctly. */
#include <dlfcn.h>
#include <pthread.h>

#include "base/unit.h"
#include "bm.h"
#include "bm/registry/registry.h"
#include "bm/storage/memory.h"
#include "index/random.h"
#include "skip.h"

#define N 2600    /* blocks; the table has room for 4/3 keys each, so that parents make it grow */
#define KEYS 6000 /* to choose from */
#define GHOST (UINT64_C(1) << 40)

/* Each key's block, if it has one: staged, registered, or registered and let go. */
enum what { NOTHING, STAGED, HELD, LEFT };

struct world {
    struct bm bm;
    enum what what[KEYS];
    struct kvbm_complete staged[KEYS];
    struct kvbm_immutable held[KEYS];
    size_t n_blocks;
    long n_grown; /* seen while the table grew */
};

/* Cells that haven't moved. */
static size_t left(const struct kvbm_registry *r)
{
    return r->old.buckets ? ((size_t)1 << r->old.bits) - r->old.at : 0;
}

static void stage(struct world *w, uint64_t key)
{
    const struct kvbm_registry *r = w->bm.registry;
    uint64_t parent = GHOST | key;
    struct kvbm_chain chain = {
        .size = sizeof(chain), .keys = &key, .parent = &parent, .position = 1};
    size_t before = left(r), bits = r->table_bits;
    struct kvbm_mutable block;

    assert_int_equal(kvbm_pool_allocate(w->bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_pool_complete(w->bm.pool, &block, 1, &chain, &w->staged[key]), 0);
    if (r->table_bits != bits)
        before = (size_t)1 << bits;
    assert_true(before - left(r) <= 4 * 2 + 64);
    assert_true(before == 0 || before - left(r) > 0);
    w->what[key] = STAGED;
    w->n_blocks++;
}

static void forget(struct world *w, uint64_t key)
{
    struct kvbm_reset_result result;

    if (w->what[key] == STAGED)
        assert_int_equal(kvbm_complete_release(&w->staged[key]), 0);
    if (w->what[key] == HELD)
        assert_int_equal(kvbm_immutable_release(&w->held[key]), 0);
    if (w->what[key] >= HELD) {
        assert_int_equal(kvbm_pool_reset_keys(w->bm.pool, 0, &key, 1, &result), 0);
        assert_int_equal(result.reset, 1);
    }
    w->what[key] = NOTHING;
    w->n_blocks--;
}

/* Do the next operation on a key's block. */
static void step(struct world *w, uint64_t key, bool backwards)
{
    if (w->what[key] == NOTHING && !backwards && w->n_blocks < N) {
        stage(w, key);
    } else if (w->what[key] == STAGED && !backwards) {
        assert_int_equal(kvbm_pool_register(w->bm.pool, &w->staged[key], 1, &w->held[key]), 0);
        w->what[key] = HELD;
    } else if (w->what[key] == HELD && !backwards) {
        assert_int_equal(kvbm_immutable_release(&w->held[key]), 0);
        w->what[key] = LEFT;
    } else if (w->what[key] != NOTHING && backwards) {
        forget(w, key);
    }
}

static void look(struct world *w, uint64_t key)
{
    struct kvbm_immutable block;
    uint8_t tiers;
    bool there = w->what[key] >= HELD;

    assert_int_equal(bm_has(w->bm.pool, key), there);
    assert_int_equal(kvbm_registry_locate(w->bm.registry, 0, &key, 1, &tiers), 0);
    assert_int_equal(tiers != 0, there);
    if (kvbm_pool_match(w->bm.pool, 0, &key, 1, 0, &block) == 1)
        assert_int_equal(kvbm_immutable_release(&block), 0);
    assert_false(bm_has(w->bm.pool, GHOST | key));
}

static void look_at_all(struct world *w)
{
    for (uint64_t key = 0; key < KEYS; key++)
        look(w, key);
    assert_int_equal(kvbm_registry_check(w->bm.registry), 0);
}

static void open_it(struct world *w)
{
    *w = (struct world){0};
    bm_open(&w->bm, &(struct kvbm_pool_opts){.n_blocks = N});
}

static void close_it(struct world *w)
{
    for (uint64_t key = 0; key < KEYS; key++) {
        if (w->what[key])
            forget(w, key);
    }
    assert_int_equal(w->bm.registry->live_entries, 0);
    bm_close(&w->bm);
}

/* More keys until it has grown, with others that go. */
static void test_random(void **state)
{
    static struct world w;
    struct rng rng = {test_seed()};
    (void)state;

    for (long round = test_rounds(8); round > 0; round--) {
        uint32_t bits, forwards = 2 + rng_below(&rng, 10);
        long left_to_do = 40000, looks = 40;

        open_it(&w);
        bits = w.bm.registry->table_bits;
        w.n_grown = 0;
        while (left_to_do-- > 0 &&
               (w.bm.registry->table_bits == bits || w.bm.registry->old.mapped)) {
            step(&w, rng_below(&rng, KEYS), !rng_below(&rng, forwards));
            if (!w.bm.registry->old.buckets)
                continue;
            w.n_grown++;
            look(&w, rng_below(&rng, KEYS));
            if (looks > 0 && rng_below(&rng, 4) == 0 && looks-- > 0)
                look_at_all(&w);
        }
        look_at_all(&w);
        if (forwards > 4) { /* enough come, and it is done before the next time */
            assert_int_equal(w.bm.registry->table_bits, bits + 1);
            assert_null(w.bm.registry->old.buckets);
            assert_int_equal(w.bm.registry->old.mapped, 0);
            assert_true(w.n_grown > 50);
        }
        close_it(&w);
    }
}

/* Grown by calls that add nothing but to the other table's end; and once more in between, by
 * another pool. */
static void test_twice(void **state)
{
    static struct world w;
    struct kvbm_pool *host;
    uint32_t bits;
    uint64_t key = 0;
    (void)state;

#if defined(__SANITIZE_THREAD__)
    skip_because("one thread's work, at ten times the address sanitizer's price: asan has run it");
#endif
    open_it(&w);
    bits = w.bm.registry->table_bits;
    for (; w.bm.registry->table_bits == bits; key++)
        stage(&w, key);
    assert_non_null(w.bm.registry->old.buckets);
    host = bm_pool(&w.bm, &(struct kvbm_pool_opts){.tier = KV_TIER_HOST, .n_blocks = 40000});
    assert_true(w.bm.registry->table_bits > bits + 1);
    assert_int_equal(w.bm.registry->old.bits, bits + 1);
    look_at_all(&w);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    for (; w.bm.registry->old.mapped; key++) {
        stage(&w, key);
        look_at_all(&w);
    }
    close_it(&w);
}

/* A pool can go while its table's cells are still to be moved. */
static void test_ends_meanwhile(void **state)
{
    static struct world w;
    uint32_t bits;
    (void)state;

    open_it(&w);
    bits = w.bm.registry->table_bits;
    for (uint64_t key = 0; w.bm.registry->table_bits == bits; key++) {
        stage(&w, key);
        step(&w, key, false);
    }
    assert_non_null(w.bm.registry->old.buckets);
    close_it(&w);
}

/* Comparing all cells of a bucket at once gives the result of comparing them one by one. */
static void test_bucket(void **state)
{
    struct rng rng = {test_seed()};
    struct kvbm_bucket bucket;
    (void)state;

    for (long round = test_rounds(10000); round > 0; round--) {
        uint32_t value = rng_below(&rng, 4) - 1, found, empty;

        for (uint32_t i = 0; i < KVBM_BUCKET; i++) {
            bucket.tag[i] = rng_below(&rng, 4) - 1;
            bucket.entry[i] = rng_below(&rng, 3);
        }
        found = kvbm_bucket_match(bucket.tag, value);
        empty = kvbm_bucket_empty(&bucket);
        for (uint32_t i = 0; i < KVBM_BUCKET; i++) {
            assert_int_equal(found >> i & 1, bucket.tag[i] == value);
            assert_int_equal(empty >> i & 1, bucket.entry[i] == 0);
        }
        assert_int_equal((found | empty) >> KVBM_BUCKET, 0);
    }
}

static struct kvbm_registry *watched; /* whose lock is free while memory is touched */
static size_t touched_bytes;

/* Instead of the C library's: it looks at the lock, then does it. */
int madvise(void *memory, size_t len, int advice)
{
    int (*real)(void *, size_t, int) = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "madvise");

    if (watched && advice == MADV_POPULATE_WRITE) {
        assert_int_equal(pthread_mutex_trylock(&watched->lock), 0);
        pthread_mutex_unlock(&watched->lock);
        touched_bytes += len;
    }
    return real(memory, len, advice);
}

/* A pool that joins later doesn't stop those that are at work for as long as its memory takes to be
 * touched. */
static void test_touched_without_lock(void **state)
{
    const struct kvbm_pool_opts more = {.tier = KV_TIER_HOST, .n_blocks = 40000};
    struct kvbm_pool *host;
    struct bm bm;
    (void)state;

    bm_open(&bm, NULL);
    watched = bm.registry;
    host = bm_pool(&bm, &more);
    watched = NULL;
    assert_true(touched_bytes >=
                (size_t)more.n_blocks * (KVBM_LINE + sizeof(struct kvbm_bucket) / KVBM_BUCKET));
    assert_int_equal(kvbm_pool_destroy(host), 0);
    bm_close(&bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bucket),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_twice),
        cmocka_unit_test(test_ends_meanwhile),
        cmocka_unit_test(test_touched_without_lock),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
