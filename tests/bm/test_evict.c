// SPDX-License-Identifier: Apache-2.0
/* Eviction order: rules of all policies, then those of each policy. */
#include "base/unit.h"
#include "bm.h"
#include "bm/pool/pool.h"

static const enum kvbm_eviction policies[] = {KVBM_EVICT_LRU, KVBM_EVICT_LFU, KVBM_EVICT_LINEAGE};

/* A pool whose counts of uses no two keys share: the sketch is large, and the tags are the same every time. */
static void open_it(struct bm *bm, const struct kvbm_pool_opts *opts)
{
    bm_open(bm, opts);
    bm->registry->seed = 7;
}

/* Take @n blocks that aren't free, one by one: which of @keys went, in order. */
static void expect_order(struct bm *bm, const uint64_t *keys, size_t n)
{
    size_t n_free = bm_stats(bm->pool).reset_pool_size;
    struct kvbm_mutable *blocks = calloc(n_free + n, sizeof(*blocks));

    assert_int_equal(kvbm_pool_allocate(bm->pool, n_free, blocks, NULL), 0);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i; j < n; j++)
            assert_true(bm_has(bm->pool, keys[j]));
        assert_int_equal(kvbm_pool_allocate(bm->pool, 1, &blocks[n_free + i], NULL), 0);
        if (bm_has(bm->pool, keys[i]))
            fail_msg("key %llu was to go as number %zu", (unsigned long long)keys[i], i);
        assert_int_equal(kvbm_registry_check(bm->registry), 0);
    }
    assert_int_equal(kvbm_pool_release_mutable(bm->pool, blocks, n_free + n), 0);
    free(blocks);
}

/* A block behind @parent (0: none) at @position, inactive at once. */
static void leave_at(struct kvbm_pool *pool, uint64_t key, uint64_t parent, uint32_t position)
{
    struct kvbm_immutable held;

    bm_put_at(pool, 0, parent ? &parent : NULL, position, &key, 1, &held);
    assert_int_equal(kvbm_immutable_release(&held), 0);
}

static void use(struct kvbm_pool *pool, uint64_t key, int n)
{
    struct kvbm_immutable held;

    for (int i = 0; i < n; i++) {
        assert_int_equal(kvbm_pool_match(pool, 0, &key, 1, 0, &held), 1);
        assert_int_equal(kvbm_immutable_release(&held), 0);
    }
}

/* ---- all of them ---- */

static void common(enum kvbm_eviction policy)
{
    struct kvbm_immutable held[3];
    struct bm bm;

    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = 512, .eviction = policy});
    for (uint64_t key = 1; key <= 6; key++)
        bm_leave(bm.pool, key);
    /* unrelated blocks, as often used: the longest ago first; used again: later */
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, &(uint64_t){2}, 1), 1);
    expect_order(&bm, (uint64_t[]){1, 3, 4}, 3);
    /* held ones don't go, and come back as the latest */
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &(uint64_t){5}, 1, KVBM_MATCH_NO_TOUCH, &held[0]),
                     1);
    expect_order(&bm, (uint64_t[]){6, 2}, 2);
    assert_true(bm_has(bm.pool, 5));
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 0);
    assert_int_equal(kvbm_immutable_release(&held[0]), 0);
    expect_order(&bm, (uint64_t[]){5}, 1);
    /* lower priority first, whatever else */
    for (uint64_t key = 1; key <= 5; key++)
        bm_leave(bm.pool, key);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){1}, 1, 64, 0), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){2}, 1, 63, 0), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){3}, 1, 100, 0), 1);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){5}, 1, 0, 0), 1);
    expect_order(&bm, (uint64_t[]){5, 4, 2, 1, 3}, 5);
    /* a sequence that is released at once goes from its end */
    bm_put(bm.pool, (uint64_t[]){1, 2, 3}, 3, held);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 3), 0);
    expect_order(&bm, (uint64_t[]){3, 2, 1}, 3);
    assert_int_equal(bm_stats(bm.pool).evictions, 14);
    bm_close(&bm);
}

static void test_common(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(policies); i++)
        common(policies[i]);
}

/* Two whole rounds of a pool in one call each, beyond a batch of cache misses. */
static void test_all_at_once(void **state)
{
    enum { MANY = 200 };
    struct kvbm_immutable held[MANY];
    struct kvbm_mutable blocks[MANY];
    uint64_t keys[MANY];
    struct bm bm;
    (void)state;

    for (size_t i = 0; i < KV_COUNT(policies); i++) {
        open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = MANY, .eviction = policies[i]});
        for (uint64_t round = 0; round < 3; round++) {
            for (uint64_t k = 0; k < MANY; k++)
                keys[k] = round << 32 | (k + 1);
            bm_put(bm.pool, keys, MANY, held);
            assert_int_equal(kvbm_pool_release(bm.pool, held, MANY), 0);
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
        }
        assert_int_equal(bm_stats(bm.pool).evictions, 2 * MANY);
        assert_int_equal(kvbm_pool_allocate(bm.pool, MANY - 1, blocks, NULL), 0);
        assert_true(bm_has(bm.pool, keys[0])); /* the root is the last */
        assert_int_equal(kvbm_pool_release_mutable(bm.pool, blocks, MANY - 1), 0);
        bm_close(&bm);
    }
}

/* ---- by use ---- */

/* Uses are counted once each: registered 1, matched or touched 1, everything else 0. */
static void test_lfu_counts(void **state)
{
    struct kvbm_immutable held, clone;
    struct kvbm_weak weak;
    uint64_t padded[KVBM_MAX_KEY / 8] = {1};
    const uint64_t key = 1;
    struct bm bm;
    uint32_t tag;
    (void)state;

    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = 4096, .eviction = KVBM_EVICT_LFU});
    tag = kvbm_tag(bm.registry, 0, padded);
    bm_put(bm.pool, &key, 1, &held);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), 1);
    assert_int_equal(kvbm_immutable_clone(&held, &clone), 0);
    assert_int_equal(kvbm_immutable_downgrade(&held, &weak), 0);
    assert_int_equal(kvbm_immutable_release(&clone), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_weak_upgrade(&weak, &held), 0);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_pool_probe(bm.pool, 0, &key, 1), 1);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &key, 1, KVBM_MATCH_NO_TOUCH, &held), 1);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), 1);
    use(bm.pool, key, 1);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), 2);
    assert_int_equal(kvbm_pool_match_scattered(bm.pool, 0, &key, 1, 0, &held), 1);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), 3);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, &key, 1), 1);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), 4);
    use(bm.pool, key, 20);
    assert_int_equal(kvbm_sketch_count(&bm.pool->sketch, tag), KVBM_SKETCH_MAX);
    bm_close(&bm);
}

/* Four levels: the coldest first, in each the longest ago; a threshold is in the warmer one. */
static void test_lfu_levels(void **state)
{
    static const struct {
        uint8_t thresholds[3];
        int uses[8]; /* besides the registration */
        uint64_t order[8];
    } cases[] = {
        /*                   very hot, hot, hot, warm, warm, cold, cold, very hot */
        {{0, 0, 0}, {14, 13, 7, 6, 2, 1, 0, 20}, {6, 7, 4, 5, 2, 3, 1, 8}},
        {{2, 3, 4}, {3, 2, 1, 0, 0, 1, 2, 9}, {4, 5, 3, 6, 2, 7, 1, 8}},
        {{1, 2, 15}, {0, 13, 14, 1, 0, 1, 0, 14}, {1, 5, 7, 2, 4, 6, 3, 8}},
    };
    (void)state;

    for (size_t c = 0; c < KV_COUNT(cases); c++) {
        struct kvbm_pool_opts opts = {.n_blocks = 4096, .eviction = KVBM_EVICT_LFU};
        struct bm bm;

        memcpy(opts.lfu_thresholds, cases[c].thresholds, 3);
        open_it(&bm, &opts);
        for (uint64_t key = 1; key <= 8; key++) {
            bm_leave(bm.pool, key);
            use(bm.pool, key, cases[c].uses[key - 1]);
        }
        expect_order(&bm, cases[c].order, 8);
        bm_close(&bm);
    }
}

/* A hot block outlives a scan; some pools' worth of other uses later it isn't that hot any more. */
static void test_lfu_cools(void **state)
{
    struct kvbm_immutable held;
    const uint64_t key = 1;
    uint32_t hot, i;
    struct bm bm;
    (void)state;

    open_it(&bm, &(struct kvbm_pool_opts){.n_blocks = 64, .eviction = KVBM_EVICT_LFU});
    bm_leave(bm.pool, key);
    use(bm.pool, key, 15);
    for (uint64_t other = 0; other < 64; other++)
        bm_leave(bm.pool, 5000 + other);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &key, 1, KVBM_MATCH_NO_TOUCH, &held), 1);
    i = held.handle.block + 1;
    hot = bm.pool->slots[i].level;
    assert_true(hot >= 2);
    assert_int_equal(kvbm_immutable_release(&held), 0);
    for (uint64_t other = 0; other < (uint64_t)64 * KVBM_SKETCH_PERIOD * 4; other++)
        bm_leave(bm.pool, 10000 + other);
    assert_true(bm_has(bm.pool, key)); /* its level is from when it was released last */
    use(bm.pool, key, 1);
    assert_true(bm.pool->slots[i].level < hot);
    bm_close(&bm);
}

/* Counts against exact ones: never less (before anything is halved), and mostly no more. */
static void test_sketch(void **state)
{
    enum { N_KEYS = 1000 };
    struct kvbm_sketch sketch = {0};
    uint32_t exact[N_KEYS] = {0}, more = 0;
    (void)state;

    assert_int_equal(kvbm_sketch_init(&sketch, N_KEYS), 0);
    for (uint32_t i = 0, x = 1; i < 4000; i++) {
        x = x * 1664525 + 1013904223;
        if (exact[x >> 16 & 511] < KVBM_SKETCH_MAX) {
            sketch.uses = 0; /* nothing is halved */
            kvbm_sketch_use(&sketch, (x >> 16 & 511) * 2654435761u);
            exact[x >> 16 & 511]++;
        }
    }
    for (uint32_t i = 0; i < N_KEYS; i++) {
        uint32_t count = kvbm_sketch_count(&sketch, i * 2654435761u);

        assert_true(count >= exact[i]);
        more += count > exact[i];
    }
    assert_true(more < N_KEYS / 10);
    for (uint32_t i = 0; i < KVBM_SKETCH_PERIOD * sketch.n_lines * 8; i++)
        kvbm_sketch_age(&sketch); /* each counter halved once */
    for (uint32_t i = 0; i < N_KEYS; i++)
        assert_true(kvbm_sketch_count(&sketch, i * 2654435761u) >= exact[i] / 2 &&
                    kvbm_sketch_count(&sketch, i * 2654435761u) <= KVBM_SKETCH_MAX / 2);
    kvbm_sketch_fini(&sketch);
}

/* ---- by lineage ---- */

static void open_lineage(struct bm *bm, uint32_t n_blocks)
{
    open_it(bm, &(struct kvbm_pool_opts){.n_blocks = n_blocks, .eviction = KVBM_EVICT_LINEAGE});
}

static void test_lineage_leaves(void **state)
{
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    /* a root, two children, released parent first: leaves still go first */
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 2, 1, 1);
    leave_at(bm.pool, 3, 1, 1);
    leave_at(bm.pool, 4, 3, 2);
    expect_order(&bm, (uint64_t[]){2, 4, 3, 1}, 4);
    bm_close(&bm);
}

/* A parent whose turn has come takes the place of its own age, before younger leaves. */
static void test_lineage_ages(void **state)
{
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 2, 1, 1);
    leave_at(bm.pool, 10, 0, 0);
    expect_order(&bm, (uint64_t[]){2, 1, 10}, 3);
    /* two chains, interleaved: A, X, B (of A), Y (of X) */
    leave_at(bm.pool, 'A', 0, 0);
    leave_at(bm.pool, 'X', 0, 0);
    leave_at(bm.pool, 'B', 'A', 1);
    leave_at(bm.pool, 'Y', 'X', 1);
    expect_order(&bm, (uint64_t[]){'B', 'A', 'Y', 'X'}, 4);
    bm_close(&bm);
}

/* A trunk that splits, and splits again: what branches share goes when the last branch has gone. */
static void leave_tree(struct bm *bm)
{
    leave_at(bm->pool, 1, 0, 0);
    leave_at(bm->pool, 2, 1, 1);
    leave_at(bm->pool, 3, 2, 2);
    leave_at(bm->pool, 4, 3, 3);
    leave_at(bm->pool, 30, 2, 2); /* from 2 */
    leave_at(bm->pool, 40, 3, 3); /* from 3 */
    leave_at(bm->pool, 41, 3, 3);
}

static void test_lineage_splits(void **state)
{
    const uint64_t trunk[] = {1, 2, 3}, branch[] = {1, 2, 30};
    struct kvbm_immutable held[2];
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    leave_tree(&bm);
    expect_order(&bm, (uint64_t[]){4, 30, 40, 41, 3, 2, 1}, 7);

    /* one branch is held: the trunk below it doesn't wait for it, its own parent is found as long as it is there */
    leave_tree(&bm);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, (uint64_t[]){30, 41}, 2, 0, held), 2);
    expect_order(&bm, (uint64_t[]){4, 40, 3}, 3);
    assert_int_equal(kvbm_pool_probe(bm.pool, 0, trunk, 3), 2);
    assert_int_equal(kvbm_pool_probe(bm.pool, 0, branch, 3), 3);
    /* released, 30 is a leaf again, and 2 is none; 41 has a ghost for a parent, which comes back between */
    assert_int_equal(kvbm_pool_release(bm.pool, held, 2), 0); /* 41, then 30 */
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    leave_at(bm.pool, 3, 2, 2);
    expect_order(&bm, (uint64_t[]){41, 30, 3, 2, 1}, 5);

    /* a branch grows anew from the middle while the other is evicted */
    leave_tree(&bm);
    expect_order(&bm, (uint64_t[]){4, 30}, 2);
    leave_at(bm.pool, 30, 2, 2);
    leave_at(bm.pool, 31, 30, 3);
    expect_order(&bm, (uint64_t[]){40, 41, 3, 31, 30, 2, 1}, 7);
    assert_int_equal(bm.registry->live_entries, 0);
    bm_close(&bm);
}

static void test_lineage_ghosts(void **state)
{
    struct kvbm_immutable held;
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    leave_at(bm.pool, 3, 2, 2); /* out of order: its parent comes later, and the parent's parent */
    leave_at(bm.pool, 2, 1, 1);
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 9, 0, 0);
    expect_order(&bm, (uint64_t[]){3, 2, 1, 9}, 4);
    assert_int_equal(bm.registry->live_entries, 0);

    /* a parent that is held is no leaf's hindrance, a child that is held isn't a child to wait for */
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 2, 1, 1);
    assert_int_equal(kvbm_pool_match(bm.pool, 0, &(uint64_t){2}, 1, 0, &held), 1);
    expect_order(&bm, (uint64_t[]){1}, 1);
    leave_at(bm.pool, 1, 0, 0); /* it was a ghost; now it's back, and has a child again */
    assert_int_equal(kvbm_immutable_release(&held), 0);
    expect_order(&bm, (uint64_t[]){2, 1}, 2);

    /* the middle of a chain goes by name: its child has a ghost, its parent is a leaf */
    for (uint64_t i = 1; i <= 3; i++)
        leave_at(bm.pool, i, i - 1, (uint32_t)i - 1);
    assert_int_equal(kvbm_pool_reset_keys(bm.pool, 0, &(uint64_t){2}, 1, NULL), 0);
    expect_order(&bm, (uint64_t[]){1, 3}, 2);
    assert_int_equal(bm.registry->live_entries, 0);
    bm_close(&bm);
}

/* A duplicate of a chain, staged blocks and the same keys in another tier don't count as children. */
static void test_lineage_others(void **state)
{
    struct kvbm_immutable held[2], duplicates[2], elsewhere[2];
    struct kvbm_complete staged[2];
    struct kvbm_pool *host;
    uint64_t keys[2] = {1, 2};
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    host = bm_pool(&bm, &(struct kvbm_pool_opts){
                            .tier = KV_TIER_HOST, .n_blocks = 4, .eviction = KVBM_EVICT_LINEAGE});
    bm_put(bm.pool, keys, 2, held);
    bm_put(bm.pool, keys, 2, duplicates);
    bm_put(host, keys, 2, elsewhere);
    assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, keys, 2, staged), 0);
    assert_int_equal(kvbm_pool_release(host, elsewhere, 2), 0);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 2), 0); /* the duplicates lean on them */
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_immutable_release(&duplicates[0]), 0);
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, 1);
    bm_churn(bm.pool, 4); /* the parent goes: its child is held */
    assert_int_equal(kvbm_pool_probe(bm.pool, 0, keys, 2), 0);
    assert_int_equal(kvbm_pool_probe(host, 0, keys, 2), 2);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    bm_churn(host, 3);
    assert_int_equal(kvbm_pool_probe(host, 0, keys, 2), 1);
    assert_int_equal(kvbm_pool_register(bm.pool, staged, 2, held), 0);
    assert_int_equal(kvbm_pool_release(bm.pool, held, 2), 0);
    assert_int_equal(kvbm_immutable_release(&duplicates[1]), 0);
    expect_order(&bm, (uint64_t[]){2, 1}, 2);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    bm_close(&bm);
}

/* Long chains, without recursion and whatever the order of release. */
static void test_lineage_long(void **state)
{
    enum { LONG = 1000 };
    struct kvbm_immutable *held = calloc(LONG, sizeof(*held));
    uint64_t *keys = calloc(LONG, sizeof(*keys));
    struct kvbm_mutable block[LONG];
    struct bm bm;
    (void)state;

    for (uint64_t i = 0; i < LONG; i++)
        keys[i] = i + 1;
    for (int backwards = 0; backwards < 2; backwards++) {
        open_lineage(&bm, LONG);
        bm_put(bm.pool, keys, LONG, held);
        for (int i = 0; i < LONG; i++)
            assert_int_equal(kvbm_immutable_release(&held[backwards ? LONG - 1 - i : i]), 0);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        for (int i = LONG; i-- > 0;) {
            assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block[i], NULL), 0);
            assert_int_equal(kvbm_pool_probe(bm.pool, 0, keys, LONG), i);
        }
        assert_int_equal(bm.registry->live_entries, 0);
        assert_int_equal(kvbm_pool_release_mutable(bm.pool, block, LONG), 0);
        bm_close(&bm);
    }
    free(held);
    free(keys);
}

/*
 * Far more releases than there are age classes: what is older than the oldest class goes before all
 * that is younger, and parents that become leaves then still find their place.
 */
static void test_lineage_ages_out(void **state)
{
    struct bm bm;
    (void)state;

    open_lineage(&bm, 8);
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 2, 1, 1); /* 1 is no leaf until this goes */
    leave_at(bm.pool, 3, 0, 0);
    leave_at(bm.pool, 4, 0, 0);
    assert_int_equal(kvbm_pool_retain(bm.pool, 0, &(uint64_t){4}, 1, 90, 0), 1);
    leave_at(bm.pool, 5, 0, 0);
    for (uint64_t i = 0; i < 40000; i++) {
        assert_int_equal(kvbm_pool_touch(bm.pool, 0, &(uint64_t){5}, 1), 1);
        if (i % 1999 == 0)
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    leave_at(bm.pool, 6, 0, 0);
    assert_int_equal(kvbm_pool_touch(bm.pool, 0, &(uint64_t){5}, 1), 1);
    /* 1, 2 and 3 are all older than any class; 1 comes when 2 has gone, behind 3 at most */
    expect_order(&bm, (uint64_t[]){2}, 1);
    bm_churn(bm.pool, 8 - 3);
    assert_false(bm_has(bm.pool, 1));
    assert_false(bm_has(bm.pool, 3));
    expect_order(&bm, (uint64_t[]){6, 5, 4}, 3);
    bm_close(&bm);
}

/* Age classes are counted in 32 bits: what is older than where they go round is older still. */
static void test_lineage_ages_round(void **state)
{
    struct bm bm;
    (void)state;

    for (uint64_t before = 0; before < 12; before++) {
        open_lineage(&bm, 8);
        bm.pool->evict.tick = (UINT64_C(1) << 32) - before;
        bm.pool->evict.base = bm.pool->evict.tick - 4000;
        leave_at(bm.pool, 'A', 0, 0);
        leave_at(bm.pool, 'X', 0, 0);
        leave_at(bm.pool, 'B', 'A', 1);
        leave_at(bm.pool, 'Y', 'X', 1);
        for (uint64_t i = 0; i < 200; i++) /* the ring moves on, over the older ones */
            leave_at(bm.pool, 'Z', 0, 0);
        assert_int_equal(kvbm_registry_check(bm.registry), 0);
        expect_order(&bm, (uint64_t[]){'B', 'A', 'Y', 'X', 'Z'}, 5);
        bm_close(&bm);
    }
}

/* Classes span four pools' worth of releases: three later, two blocks of different classes still are. */
static void test_lineage_span(void **state)
{
    enum { MANY = 2048 };
    struct bm bm;
    (void)state;

    open_lineage(&bm, MANY);
    leave_at(bm.pool, 1, 0, 0);
    leave_at(bm.pool, 2, 1, 1);
    leave_at(bm.pool, 3, 0, 0);
    leave_at(bm.pool, 4, 0, 0);
    for (uint64_t i = 0; i < 3 * MANY; i++)
        assert_int_equal(kvbm_pool_touch(bm.pool, 0, &(uint64_t){4}, 1), 1);
    expect_order(&bm, (uint64_t[]){2, 1, 3, 4}, 4); /* 1 comes when 2 has gone, to its own place */
    bm_close(&bm);
}

/* Blocks of every age class, taken out from the middle while the ring of classes turns. */
static void test_lineage_ring(void **state)
{
    enum { MANY = 1024 };
    struct bm bm;
    (void)state;

    open_lineage(&bm, MANY);
    for (uint64_t i = 0; i < MANY; i++)
        bm_leave(bm.pool, 1 + i);
    for (uint64_t turn = 0; turn < 20000;
         turn++) { /* an old one is used, a middle one is renewed */
        uint64_t key = 1 + turn * 7 % (MANY / 2);

        assert_int_equal(kvbm_pool_touch(bm.pool, 0, &key, 1), 1);
        if (turn % 4999 == 0)
            assert_int_equal(kvbm_registry_check(bm.registry), 0);
    }
    /* the upper half wasn't touched for 20,000 releases: it goes first, in its order of old */
    for (uint64_t i = MANY / 2; i < MANY; i += 64) {
        bm_churn(bm.pool, bm_stats(bm.pool).reset_pool_size + 64);
        assert_false(bm_has(bm.pool, 1 + i));
        if (i + 64 < MANY)
            assert_true(bm_has(bm.pool, 1 + i + 64));
    }
    assert_int_equal(bm_stats(bm.pool).inactive_pool_size, MANY / 2);
    bm_close(&bm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_common),         cmocka_unit_test(test_all_at_once),
        cmocka_unit_test(test_lfu_counts),     cmocka_unit_test(test_lfu_levels),
        cmocka_unit_test(test_lfu_cools),      cmocka_unit_test(test_sketch),
        cmocka_unit_test(test_lineage_leaves), cmocka_unit_test(test_lineage_ages),
        cmocka_unit_test(test_lineage_ghosts), cmocka_unit_test(test_lineage_others),
        cmocka_unit_test(test_lineage_long),   cmocka_unit_test(test_lineage_ages_out),
        cmocka_unit_test(test_lineage_ring),   cmocka_unit_test(test_lineage_splits),
        cmocka_unit_test(test_lineage_span),   cmocka_unit_test(test_lineage_ages_round),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
