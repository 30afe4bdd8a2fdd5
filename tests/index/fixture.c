// SPDX-License-Identifier: Apache-2.0
#include "fixture.h"
#include "base/unit.h"
#include "random.h"

const struct kv_holder W0 = {0, 0}, W1 = {1, 0}, W0R1 = {0, 1};

int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    *state = f;
    return kvi_create(NULL, &f->ix);
}

int teardown(void **state)
{
    struct fixture *f = *state;
    const char *wrong = kvi_check(f->ix);

    if (wrong)
        print_error("%s\n", wrong);
    kvi_matches_fini(&f->matches);
    kvi_destroy(f->ix);
    free(f);
    return wrong != NULL;
}

uint64_t roll(uint64_t above, uint64_t local)
{
    return (above ^ local * UINT64_C(0xff51afd7ed558ccd)) * UINT64_C(0xc4ceb9fe1a85ec53) + 1;
}

uint64_t path_hash(const uint64_t *locals, size_t n)
{
    uint64_t hash = 0;

    for (size_t i = 0; i < n; i++)
        hash = roll(hash, locals[i]);
    return hash;
}

int store_part(struct fixture *f, struct kv_holder holder, enum kv_tier tier,
               const uint64_t *locals, size_t from, size_t n, struct kvi_stored *ret)
{
    uint64_t parent = path_hash(locals, from), hash = parent;

    for (size_t i = from; i < n; i++) {
        hash = roll(hash, locals[i]);
        f->blocks[i - from] = (struct kv_block){hash, locals[i]};
    }
    return kvi_store(f->ix, holder, tier, from ? &parent : NULL, f->blocks, n - from, ret);
}

void store(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n)
{
    assert_int_equal(store_part(f, holder, KV_TIER_DEVICE, locals, 0, n, NULL), 0);
}

long remove_block(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n)
{
    uint64_t hash = path_hash(locals, n);

    return kvi_remove(f->ix, holder, KV_TIER_DEVICE, &hash, 1);
}

const struct kvi_match *find(struct fixture *f, struct kv_holder holder, const uint64_t *locals,
                             size_t n)
{
    assert_int_equal(kvi_find(f->ix, locals, n, &f->matches), 0);
    for (size_t i = 0; i < f->matches.n; i++)
        if (f->matches.items[i].holder.worker == holder.worker &&
            f->matches.items[i].holder.rank == holder.rank)
            return &f->matches.items[i];
    return NULL;
}

uint32_t score(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n)
{
    const struct kvi_match *match = find(f, holder, locals, n);

    return match ? match->reach[KV_N_TIERS - 1] : 0;
}

uint64_t n_blocks(struct fixture *f)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    kvi_get_stats(f->ix, &stats);
    return stats.blocks;
}

const uint64_t *sequence(size_t n, size_t fork, uint64_t other)
{
    static uint64_t locals[4][N_MAX];
    static int turn;
    uint64_t *ret = locals[turn++ % 4];

    for (size_t i = 0; i < n; i++)
        ret[i] = i + 1 + (i >= fork ? other * 1000000 : 0);
    return ret;
}

int sum_blocks(void *arg, const struct kvi_dump_run *run)
{
    uint64_t parent = run->parent ? *run->parent : 0, *sum = arg;

    for (size_t i = 0; i < run->n; i++) {
        *sum += rng_scatter(roll(parent, run->blocks[i].hash) ^ run->blocks[i].tokens_hash * 3 ^
                            run->holder.worker << 40 ^ (uint64_t)run->tier << 60);
        parent = run->blocks[i].hash;
    }
    return 0;
}
