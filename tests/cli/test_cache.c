// SPDX-License-Identifier: Apache-2.0
/* The block cache against a naive model: an array ordered by last use, searched linearly. For the
 * leaf-first order the model knows parents, and evicts the least recently used block without
 * children. */
#include "base/unit.h"
#include "cli/replay/cache.h"
#include "cli/replay/random.h"

#define MAX_MODEL 512
#define MAX_CHAIN 24

struct entry {
    uint64_t hash, parent, used;
};

struct model {
    struct entry entries[MAX_MODEL];
    size_t len, capacity;
    uint64_t clock;
    uint64_t evicted[MAX_CHAIN];
    size_t n_evicted;
};

static struct entry *model_find(struct model *m, uint64_t hash)
{
    for (size_t i = 0; i < m->len; i++)
        if (m->entries[i].hash == hash)
            return &m->entries[i];
    return NULL;
}

static bool has_child(const struct model *m, uint64_t hash)
{
    for (size_t i = 0; i < m->len; i++)
        if (m->entries[i].parent == hash)
            return true;
    return false;
}

/* @leaves: only blocks without children may go. Among equals in use the deepest goes, as vLLM frees
 * the end of a request first; with @leaves that follows by itself. */
static void model_evict(struct model *m, bool leaves)
{
    struct entry *victim = NULL;

    for (size_t i = 0; i < m->len; i++) {
        struct entry *e = &m->entries[i];

        if (leaves && has_child(m, e->hash))
            continue;
        if (!victim || e->used < victim->used)
            victim = e;
    }
    m->evicted[m->n_evicted++] = victim->hash;
    *victim = m->entries[--m->len];
}

static void model_insert(struct model *m, uint64_t hash, uint64_t parent, uint64_t used)
{
    m->entries[m->len++] = (struct entry){hash, parent, used};
}

static size_t model_held(struct model *m, const uint64_t *chain, size_t n)
{
    size_t held = 0;

    while (held < n && model_find(m, chain[held]))
        held++;
    return held;
}

static size_t model_use_leaf_first(struct model *m, const uint64_t *chain, size_t n)
{
    size_t held = model_held(m, chain, n), end = n < m->capacity ? n : m->capacity;

    m->clock++;
    m->n_evicted = 0;
    for (size_t i = 0; i < held; i++)
        model_find(m, chain[i])->used = m->clock;
    while (m->len + (end - held) > m->capacity)
        model_evict(m, true);
    for (size_t i = held; i < end; i++)
        model_insert(m, chain[i], i > 0 ? chain[i - 1] : 0, m->clock);
    return held;
}

static size_t model_use_plain(struct model *m, const uint64_t *chain, size_t n)
{
    size_t held = model_held(m, chain, n);

    m->n_evicted = 0;
    for (size_t i = 0; i < n; i++) {
        struct entry *e = model_find(m, chain[i]);

        m->clock++;
        if (e) {
            e->used = m->clock;
            continue;
        }
        if (m->len == m->capacity)
            model_evict(m, false);
        model_insert(m, chain[i], 0, m->clock);
    }
    return held;
}

/* A prompt out of few, so that prefixes are shared; the name of a block depends on all before it.
 */
static size_t random_chain(struct kc_rng *rng, uint64_t *chain, uint32_t variety)
{
    size_t n = 1 + kc_rng_below(rng, MAX_CHAIN);
    uint64_t name = 0;

    for (size_t i = 0; i < n; i++) {
        name = kc_mix(name + 1 + kc_rng_below(rng, i < 4 ? 2 : variety));
        chain[i] = name;
    }
    return n;
}

static int compare_hashes(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return x < y ? -1 : x > y;
}

static void check_same(struct kc_cache *cache, struct model *m, const struct kc_cache_use *use,
                       size_t held)
{
    assert_int_equal(use->held, held);
    assert_int_equal(use->n_evicted, m->n_evicted);
    assert_int_equal(kc_cache_len(cache), m->len);
    for (size_t i = 0; i < m->len; i++)
        assert_int_equal(kc_cache_lookup(cache, &m->entries[i].hash, 1), 1);
    for (size_t i = 0; i < m->n_evicted; i++) /* (plain LRU may have brought it back meanwhile) */
        assert_int_equal(kc_cache_lookup(cache, &use->evicted[i], 1),
                         model_find(m, use->evicted[i]) != NULL);
}

static void run_random(enum kc_cache_order order, uint32_t capacity, struct kc_rng *rng)
{
    struct kc_cache *cache;
    struct model m = {.capacity = capacity};
    uint64_t chain[MAX_CHAIN];
    struct kc_cache_use use;

    assert_int_equal(kc_cache_create(capacity, order, &cache), 0);
    for (int round = 0; round < 400; round++) {
        size_t n = random_chain(rng, chain, 3), held;

        if (order == KC_LEAF_FIRST)
            held = model_use_leaf_first(&m, chain, n);
        else
            held = model_use_plain(&m, chain, n);
        assert_int_equal(kc_cache_use(cache, chain, n, &use), 0);
        check_same(cache, &m, &use, held);
        if (order == KC_PLAIN_LRU) { /* one at a time, so the order is defined, too */
            if (use.n_evicted > 0)
                assert_memory_equal(use.evicted, m.evicted, use.n_evicted * sizeof(uint64_t));
            continue;
        }
        assert_int_equal(use.end, n < capacity ? n : capacity);
        for (size_t i = 0; i < m.len; i++) /* what is left is a set of prefixes */
            assert_true(m.entries[i].parent == 0 || model_find(&m, m.entries[i].parent));
        if (use.n_evicted > 0) {
            uint64_t evicted[MAX_CHAIN];

            memcpy(evicted, use.evicted, use.n_evicted * sizeof(uint64_t));
            qsort(evicted, use.n_evicted, sizeof(uint64_t), compare_hashes);
            qsort(m.evicted, m.n_evicted, sizeof(uint64_t), compare_hashes);
            assert_memory_equal(evicted, m.evicted, m.n_evicted * sizeof(uint64_t));
        }
    }
    kc_cache_destroy(cache);
}

static void test_random(void **state)
{
    struct kc_rng rng = {.state = unit_seed()};

    (void)state;
    for (unsigned i = 0, rounds = (unsigned)unit_rounds(80); i < rounds; i++) {
        run_random(KC_LEAF_FIRST, 1 + kc_rng_below(&rng, 200), &rng);
        run_random(KC_PLAIN_LRU, 1 + kc_rng_below(&rng, 200), &rng);
    }
}

static void test_leaf_goes_first(void **state)
{
    const uint64_t a[] = {1, 2, 3}, b[] = {1, 2, 4}, c[] = {9};
    struct kc_cache *cache;
    struct kc_cache_use use;

    (void)state;
    assert_int_equal(kc_cache_create(4, KC_LEAF_FIRST, &cache), 0);
    assert_int_equal(kc_cache_use(cache, a, 3, &use), 0);
    assert_int_equal(use.held, 0);
    assert_int_equal(kc_cache_use(cache, b, 3, &use), 0);
    assert_int_equal(use.held, 2);
    assert_int_equal(use.n_evicted, 0);
    assert_int_equal(kc_cache_use(cache, c, 1, &use), 0);
    assert_int_equal(use.n_evicted, 1);
    assert_int_equal(use.evicted[0], 3);
    assert_int_equal(kc_cache_lookup(cache, a, 3), 2);
    assert_int_equal(kc_cache_lookup(cache, b, 3), 3);
    kc_cache_destroy(cache);
}

static void test_prompt_larger_than_the_cache(void **state)
{
    const uint64_t chain[] = {1, 2, 3, 4, 5};
    struct kc_cache *cache;
    struct kc_cache_use use;

    (void)state;
    assert_int_equal(kc_cache_create(3, KC_LEAF_FIRST, &cache), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kc_cache_use(cache, chain, 5, &use), 0);
        assert_int_equal(use.held, i == 0 ? 0 : 3);
        assert_int_equal(use.end, 3);
        assert_int_equal(use.n_evicted, 0);
    }
    assert_int_equal(kc_cache_lookup(cache, chain, 5), 3);
    kc_cache_destroy(cache);
}

static void test_unlimited_and_clear(void **state)
{
    struct kc_cache *cache;
    struct kc_cache_use use;

    (void)state;
    assert_int_equal(kc_cache_create(0, KC_LEAF_FIRST, &cache), 0);
    for (int round = 0; round < 2; round++) {
        for (uint64_t i = 1; i <= 50000; i++) {
            assert_int_equal(kc_cache_use(cache, &i, 1, &use), 0);
            assert_int_equal(use.held, 0);
        }
        assert_int_equal(kc_cache_len(cache), 50000);
        for (uint64_t i = 1; i <= 50000; i++)
            assert_int_equal(kc_cache_lookup(cache, &i, 1), 1);
        kc_cache_clear(cache);
        assert_int_equal(kc_cache_len(cache), 0);
    }
    kc_cache_destroy(cache);
    kc_cache_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_leaf_goes_first),
        cmocka_unit_test(test_prompt_larger_than_the_cache),
        cmocka_unit_test(test_unlimited_and_clear),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
