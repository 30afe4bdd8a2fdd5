// SPDX-License-Identifier: Apache-2.0
/* The table of salted blocks against a plain list, in few slots so that runs are long and wrap. */
#include "base/unit.h"

#include <errno.h>

#include "event/reader/salts.h"

#define HASHES 40
#define RANKS 3
#define LIMIT 60

struct model {
    struct kve_salt_entry entries[RANKS][HASHES]; /* by rank and hash; state 0: not there */
    size_t n;
};

static void model_put(struct model *model, uint32_t rank, uint64_t hash, uint64_t salt,
                      unsigned tier)
{
    struct kve_salt_entry *entry = &model->entries[rank][hash];

    if (!entry->state) {
        *entry = (struct kve_salt_entry){.salt = salt, .state = KVE_SALT_BLOCK};
        model->n++;
    }
    entry->copies[tier] += entry->copies[tier] < UINT8_MAX;
    entry->ambiguous |= entry->salt != salt;
}

static void model_remove(struct model *model, uint32_t rank, uint64_t hash, unsigned tier)
{
    struct kve_salt_entry *entry = &model->entries[rank][hash];
    static const uint8_t none[KV_N_TIERS];

    if (!entry->state)
        return;
    entry->copies[tier] -= entry->copies[tier] > 0 && entry->copies[tier] < UINT8_MAX;
    if (memcmp(entry->copies, none, sizeof(none)) == 0) {
        entry->state = KVE_SALT_FREE;
        model->n--;
    }
}

static void model_clear(struct model *model, uint32_t rank)
{
    for (size_t i = 0; i < HASHES; i++) {
        model->n -= model->entries[rank][i].state != 0;
        model->entries[rank][i].state = KVE_SALT_FREE;
    }
}

/* The publisher has what the bits of the model's blocks say: about half of them. */
static bool model_held(void *arg, uint32_t rank, uint64_t hash)
{
    const uint64_t *bits = arg;

    return *bits >> (rank * 13 + hash) % 64 & 1;
}

static void model_sweep(struct model *model, uint64_t bits)
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        for (uint64_t hash = 0; hash < HASHES; hash++) {
            struct kve_salt_entry *entry = &model->entries[rank][hash];

            if (!entry->state || model_held(&bits, rank, hash))
                continue;
            entry->state = KVE_SALT_FREE;
            model->n--;
        }
    }
}

static void compare(const struct kve_salts *salts, const struct model *model)
{
    assert_int_equal(salts->n, model->n);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        for (uint64_t hash = 0; hash < HASHES; hash++) {
            const struct kve_salt_entry *want = &model->entries[rank][hash];
            const struct kve_salt_entry *got = kve_salts_find(salts, rank, hash);

            assert_int_equal(got != NULL, want->state != 0);
            if (!got)
                continue;
            assert_memory_equal(got->copies, want->copies, sizeof(got->copies));
            assert_int_equal(got->ambiguous, want->ambiguous);
            assert_true(got->salt == want->salt);
        }
    }
}

/* Sweep, slice by slice, until a whole sweep finds nothing: one may miss what it moves. */
static void sweep_all(struct kve_salts *salts, kve_salts_held_fn held, void *arg)
{
    size_t before;

    do {
        before = salts->n;
        do
            kve_salts_sweep(salts, 0, held, arg);
        while (salts->sweeping);
    } while (salts->n != before);
}

static void test_against_a_list(void **state)
{
    uint64_t random = unit_seed();
    size_t rounds = unit_rounds(200);

    (void)state;
    for (size_t round = 0; round < rounds; round++) {
        struct model model = {0};
        struct kve_salts salts;

        kve_salts_init(&salts, LIMIT);
        /* Every hash in every tenth round starts at one of few places. */
        salts.secret = round % 10 ? unit_random(&random) | 1 : UINT64_MAX;
        for (int step = 0; step < 300; step++) {
            uint32_t rank = (uint32_t)unit_below(&random, RANKS);
            uint64_t hash = unit_below(&random, HASHES), salt = 1 + unit_below(&random, 2);
            enum kv_tier tier = (enum kv_tier)unit_below(&random, KV_N_TIERS);
            uint64_t what = unit_below(&random, 100);

            if (round % 3 == 2 && salts.generation < UINT16_MAX - 5 && salts.n)
                salts.generation = UINT16_MAX - 5; /* they come to an end soon */
            if (what < 55) {
                int rc = kve_salts_reserve(&salts, 1);

                assert_int_equal(rc, model.n == LIMIT ? -ENOSPC : 0);
                if (rc)
                    continue;
                kve_salts_put(&salts, rank, hash, salt, tier);
                model_put(&model, rank, hash, salt, tier);
            } else if (what < 98 - round % 2 * 8) {
                kve_salts_remove(&salts, rank, hash, tier);
                model_remove(&model, rank, hash, tier);
            } else if (what == 98) {
                uint64_t bits = unit_random(&random);

                sweep_all(&salts, model_held, &bits);
                model_sweep(&model, bits);
            } else {
                kve_salts_clear(&salts, rank, true);
                model_clear(&model, rank);
            }
            compare(&salts, &model);
        }
        kve_salts_reset(&salts);
        assert_int_equal(salts.n, 0);
        assert_null(salts.slots);
        kve_salts_fini(&salts);
    }
}

/* Returned memory: an empty table has none. */
static void test_memory_is_returned(void **state)
{
    struct kve_salts salts;

    (void)state;
    kve_salts_init(&salts, 1000000);
    assert_int_equal(kve_salts_reserve(&salts, 1000001), -ENOSPC);
    assert_int_equal(kve_salts_reserve(&salts, 100000), 0);
    for (uint64_t i = 0; i < 100000; i++)
        kve_salts_put(&salts, 0, i * 0x100000000u, 7, KV_TIER_HOST);
    assert_true(salts.capacity <= 4 * 100000 / 3 * 2);
    for (uint64_t i = 0; i < 100000; i++)
        kve_salts_remove(&salts, 0, i * 0x100000000u, KV_TIER_HOST);
    assert_int_equal(salts.n, 0);
    assert_null(salts.slots);
    kve_salts_fini(&salts);
}

/*
 * As many clears as a batch may hold, and then some, each of a rank that has a block, beside a rank
 * that has many; more than there are generations. A count, not a time: a clear that looked at the
 * table would look at 150000 times 131072 slots.
 */
static void test_clears_are_cheap(void **state)
{
    const uint64_t n_clears = 150000, n_kept = 50000;
    struct kve_salts salts;

    (void)state;
    kve_salts_init(&salts, n_kept + 10);
    assert_int_equal(kve_salts_reserve(&salts, n_kept), 0);
    for (uint64_t i = 0; i < n_kept; i++)
        kve_salts_put(&salts, 0, i, 7, KV_TIER_DEVICE);
    for (uint64_t i = 0; i < n_clears; i++) {
        uint32_t rank = 1 + (uint32_t)(i % 3);
        uint64_t hash = i % 2 ? i : 5; /* the same again, and another each time */

        assert_int_equal(kve_salts_reserve(&salts, 1), 0);
        assert_null(kve_salts_find(&salts, rank, hash));
        kve_salts_put(&salts, rank, hash, i, KV_TIER_DEVICE);
        assert_true(kve_salts_find(&salts, rank, hash)->salt == i);
        kve_salts_clear(&salts, rank, true);
        assert_null(kve_salts_find(&salts, rank, hash));
        kve_salts_clear(&salts, rank, true);
    }
    assert_int_equal(salts.n, n_kept);
    assert_true(salts.capacity <= 4 * n_kept);
    assert_true(salts.moves <= 16 * n_clears);
    for (uint64_t i = 0; i < n_kept; i++)
        assert_true(kve_salts_find(&salts, 0, i)->salt == 7);
    kve_salts_clear(&salts, 0, true);
    assert_null(salts.slots);
    kve_salts_fini(&salts);
}

/* A block's salt goes with its last copy; a clear of the device keeps those of other tiers. */
static void test_copies(void **state)
{
    struct kve_salts salts;

    (void)state;
    kve_salts_init(&salts, 100);
    assert_int_equal(kve_salts_reserve(&salts, 10), 0);
    kve_salts_put(&salts, 0, 1, 7, KV_TIER_DEVICE);
    kve_salts_put(&salts, 0, 1, 7, KV_TIER_DEVICE);
    kve_salts_remove(&salts, 0, 1, KV_TIER_HOST); /* where it isn't */
    kve_salts_remove(&salts, 0, 1, KV_TIER_DEVICE);
    assert_non_null(kve_salts_find(&salts, 0, 1));
    kve_salts_clear(&salts, 0, false);
    assert_null(kve_salts_find(&salts, 0, 1));
    for (int i = 0; i < 300; i++) {
        assert_int_equal(kve_salts_reserve(&salts, 1), 0);
        kve_salts_put(&salts, 0, 2, 7, KV_TIER_HOST);
    }
    for (int i = 0; i < 300; i++)
        kve_salts_remove(&salts, 0, 2, KV_TIER_HOST);
    kve_salts_clear(&salts, 0, false);
    assert_non_null(kve_salts_find(&salts, 0, 2)); /* more copies than are counted */
    kve_salts_clear(&salts, 0, true);
    assert_null(kve_salts_find(&salts, 0, 2));
    kve_salts_fini(&salts);
}

static bool none_held(void *arg, uint32_t rank, uint64_t hash)
{
    (void)rank;
    (void)hash;
    ++*(size_t *)arg;
    return false;
}

static bool all_held(void *arg, uint32_t rank, uint64_t hash)
{
    (void)none_held(arg, rank, hash);
    return true;
}

/* Sweeps, when they are due: none of a table that may be right, then few visits for each new block. */
static void test_sweeps(void **state)
{
    const size_t limit = 400000;
    struct kve_salts salts;
    size_t visits = 0, added = 0;

    (void)state;
    kve_salts_init(&salts, limit);
    assert_false(kve_salts_want_sweep(&salts));
    while (kve_salts_reserve(&salts, 1) == 0) {
        size_t before = visits;

        if (kve_salts_want_sweep(&salts))
            kve_salts_sweep(&salts, salts.n, all_held, &visits);
        assert_true(visits - before < 10000); /* a slice, whatever the table's size */
        kve_salts_put(&salts, 0, added++, 7, KV_TIER_DEVICE);
        assert_true(!visits || added > limit / 8 * 7);
    }
    assert_int_equal(salts.n, limit);
    assert_true(visits > 0 && visits <= 2 * added);
    assert_int_equal(kve_salts_reserve(&salts, limit / 4), -ENOSPC);
    assert_true(kve_salts_want_sweep(&salts)); /* a full table, too, is swept again */
    while (kve_salts_want_sweep(&salts))
        kve_salts_sweep(&salts, limit, none_held, &visits);
    assert_int_equal(salts.n, 0);
    assert_null(salts.slots);
    for (added = 0; !kve_salts_want_sweep(&salts); added++) {
        assert_int_equal(kve_salts_reserve(&salts, 1), 0);
        kve_salts_put(&salts, 0, added, 7, KV_TIER_DEVICE);
    }
    assert_true(added < limit / 4);
    do
        kve_salts_sweep(&salts, added - 1, none_held, &visits); /* one too many, at the least */
    while (salts.sweeping);
    assert_int_equal(salts.n, 0);
    kve_salts_fini(&salts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_a_list),   cmocka_unit_test(test_memory_is_returned),
        cmocka_unit_test(test_clears_are_cheap), cmocka_unit_test(test_copies),
        cmocka_unit_test(test_sweeps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
