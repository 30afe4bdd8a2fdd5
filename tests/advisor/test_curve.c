// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <math.h>

#include "advisor/worth/curve.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "cli/replay/cache.h"
#include "cli/replay/generate.h"
#include "cli/replay/replay.h"

#define KEYS 400u
#define LONGEST 40u

/* Keys in the order of their last use, the newest first: a cache of c blocks has the first c of them. */
struct naive {
    uint64_t keys[KEYS];
    size_t n;
    uint64_t at[KEYS]; /* references found at each place */
    uint64_t references;
};

static size_t place_of(const struct naive *m, uint64_t key)
{
    size_t i = 0;

    while (i < m->n && m->keys[i] != key)
        i++;
    return i;
}

static void naive_use(struct naive *m, const uint64_t *keys, size_t n)
{
    m->references += n;
    for (size_t i = 0; i < n; i++)
        if (place_of(m, keys[i]) < m->n)
            m->at[place_of(m, keys[i])]++;
    for (size_t i = n; i-- > 0;) {
        size_t place = place_of(m, keys[i]);

        m->n += place == m->n;
        memmove(&m->keys[1], &m->keys[0], place * sizeof(m->keys[0]));
        m->keys[0] = keys[i];
    }
}

static double naive_hits(const struct naive *m, size_t blocks)
{
    uint64_t found = 0;

    for (size_t i = 0; i < KV_MIN(blocks, (size_t)KEYS); i++)
        found += m->at[i];
    return m->references ? (double)found / (double)m->references : 0;
}

/* A prompt: some path of a tree with two branches at each of its first three blocks, of 310 in all. */
static size_t prompt(uint64_t *seed, uint64_t keys[LONGEST])
{
    uint64_t node = 1;
    size_t n = unit_below(seed, LONGEST + 1);

    for (size_t i = 0; i < n; i++) {
        node = i < 3 ? 2 * node + unit_below(seed, 2) : node + 64;
        keys[i] = node;
    }
    return n;
}

static void test_against_a_list(void **state)
{
    uint64_t seed = unit_seed(), keys[LONGEST];
    struct naive *m = calloc(1, sizeof(*m));
    struct kva_curve_info info;
    struct kva_curve *curve;

    (void)state;
    assert_non_null(m);
    assert_int_equal(kva_curve_create(0, &curve), 0);
    for (size_t i = 0, rounds = unit_rounds(4000); i < rounds; i++) {
        size_t n = prompt(&seed, keys), c = unit_below(&seed, KEYS + 2);

        naive_use(m, keys, n);
        assert_int_equal(kva_curve_use(curve, keys, n), 0);
        assert_true(fabs(kva_curve_hits(curve, (double)c) - naive_hits(m, c)) < 1e-12);
    }
    kva_curve_get(curve, &info);
    assert_int_equal(info.references, m->references);
    assert_int_equal(info.followed, m->n);
    assert_true(info.share == 1 && info.distinct == (double)m->n);
    assert_true(kva_curve_hits(curve, info.most) == naive_hits(m, KEYS));
    assert_true(kva_curve_hits(curve, info.most - 1) < kva_curve_hits(curve, info.most));
    kva_curve_destroy(curve);
    free(m);
}

static int use_trace(struct kva_curve *curve, const struct kc_trace *trace)
{
    uint64_t *names = malloc(trace->n_ids * sizeof(*names));
    int rc = 0;

    assert_non_null(names);
    kc_trace_names(trace, names);
    for (size_t i = 0; i < trace->n_requests && !rc; i++)
        rc = kva_curve_use(curve, names + trace->requests[i].first, trace->requests[i].n);
    free(names);
    return rc;
}

/*
 * Simulated caches of some capacities, and the curve with all keys and with few of them. How near few keys
 * come is a matter of chance, and judged of one seed alone.
 */
static void against_caches(uint64_t seed, bool judge_sampled)
{
    static const uint64_t sizes[] = {500, 1000, 4000, 16000, 40000};
    struct kc_generate_opts opts = {.seed = seed, .n_requests = 3000};
    struct kva_curve *exact, *sampled;
    struct kva_curve_info info;
    struct kc_trace trace = {0};

    assert_int_equal(kc_generate(&opts, &trace), 0);
    assert_int_equal(kva_curve_create(0, &exact), 0);
    assert_int_equal(kva_curve_create(8192, &sampled), 0);
    assert_int_equal(use_trace(exact, &trace), 0);
    assert_int_equal(use_trace(sampled, &trace), 0);
    kva_curve_get(sampled, &info);
    assert_true(info.followed == 8192 && info.share < 1);
    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        double truth;

        assert_int_equal(kc_hit_fraction(&trace, sizes[i], KC_LEAF_FIRST, &truth), 0);
        print_message("%7llu blocks: cache %.4f, curve %.4f, of %.0f %% of the keys %.4f\n",
                      (unsigned long long)sizes[i], truth, kva_curve_hits(exact, (double)sizes[i]),
                      100 * info.share, kva_curve_hits(sampled, (double)sizes[i]));
        assert_true(fabs(kva_curve_hits(exact, (double)sizes[i]) - truth) < 0.004);
        assert_true(!judge_sampled ||
                    fabs(kva_curve_hits(sampled, (double)sizes[i]) - truth) < 0.03);
    }
    kva_curve_destroy(sampled);
    kva_curve_destroy(exact);
    kc_trace_fini(&trace);
}

static void test_against_caches(void **state)
{
    (void)state;
    against_caches(unit_seed(), false);
    against_caches(1, true);
}

/* Few samples of many keys, again and again: the ranks' heap and the moments hold together. */
static void test_few_samples(void **state)
{
    uint64_t seed = unit_seed(), keys[LONGEST];
    struct kva_curve_info info, before = {.share = 1};
    struct kva_curve *curve;

    (void)state;
    assert_int_equal(kva_curve_create(5, &curve), 0);
    for (size_t i = 0, rounds = unit_rounds(20000); i < rounds; i++) {
        size_t n = 1 + unit_below(&seed, LONGEST);
        uint64_t first = unit_below(&seed, 1000) * 1000;

        for (size_t k = 0; k < n; k++)
            keys[k] = first + k;
        assert_int_equal(kva_curve_use(curve, keys, n), 0);
        kva_curve_get(curve, &info);
        assert_true(info.followed <= 5 && info.share <= before.share);
        before = info;
    }
    assert_true(info.share < 0.01 && info.share > 0);
    for (double c = 1, last = 0; c < 1e6; c *= 1.5) {
        double hits = kva_curve_hits(curve, c);

        assert_true(hits >= last && hits <= 1);
        last = hits;
    }
    kva_curve_destroy(curve);
}

static void test_limits(void **state)
{
    struct kva_curve *curve;
    struct kva_curve_info info;
    uint64_t key = 7;

    (void)state;
    assert_int_equal(kva_curve_create(KVA_MAX_SAMPLES + 1, &curve), -EINVAL);
    assert_int_equal(kva_curve_create(1, &curve), 0);
    assert_true(kva_curve_hits(curve, 10) == 0);
    assert_int_equal(kva_curve_use(curve, &key, 0), 0);
    assert_int_equal(kva_curve_use(curve, &key, 1), 0);
    assert_int_equal(kva_curve_use(curve, &key, 1), 0);
    assert_true(kva_curve_hits(curve, 0) == 0);
    assert_true(kva_curve_hits(curve, 1) == 0.5);
    kva_curve_get(curve, &info);
    assert_true(info.references == 2 && info.most == 1 && info.share == 1);
    kva_curve_destroy(curve);
    kva_curve_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_list),
        cmocka_unit_test(test_against_caches),
        cmocka_unit_test(test_few_samples),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
