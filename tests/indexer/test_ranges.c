// SPDX-License-Identifier: Apache-2.0
/*
 * Ranges beside the lowest and highest numbers of copies that a block can have; and what they make of
 * the index.
 */
#include <stdlib.h>

#include "base/unit.h"

#include "base/core/error.h"
#include "indexer/view/ranges.h"

#define RANKS 3
#define CHAINS 20
#define DEPTH 3

static const struct kvi_window window = {.group = 1, .window = 8, .need = 2, .stride = 1};

static struct kvi_cache cache_of(uint32_t rank, uint32_t number)
{
    return (struct kvi_cache){{.worker = 7, .rank = rank}, KV_TIER_DEVICE, 0, number};
}

/* -- beside a plain list ----------------------------------------------------------------------- */

/* One block of one cache: of the engine's copies, and of the index's. */
struct naive {
    uint32_t lo, hi, count;
};

struct lists {
    struct kvi_index *index;
    struct ki_ranges r;
    struct naive blocks[RANKS][2][CHAINS][DEPTH]; /* main cache, window */
    uint32_t n_real;
};

static struct kv_block block_at(size_t chain, size_t depth)
{
    uint64_t hash = 1 + chain * DEPTH + depth;

    return (struct kv_block){hash, 1000 + hash};
}

/* An operation on blocks @from to @to - 1 of a chain, of the cache of @rank. */
struct step {
    struct kvi_cache cache;
    struct naive *naive;
    struct kv_block blocks[DEPTH];
    uint64_t hashes[DEPTH];
    struct kve_op store, known, remove;
};

static void step_init(struct lists *l, uint64_t *random, struct step *ret)
{
    uint32_t rank = (uint32_t)unit_below(random, RANKS), number = (uint32_t)unit_below(random, 2);
    size_t chain = unit_below(random, CHAINS);

    *ret = (struct step){.cache = cache_of(rank, number), .naive = l->blocks[rank][number][chain]};
    for (size_t i = 0; i < DEPTH; i++) {
        ret->blocks[i] = block_at(chain, i);
        ret->hashes[i] = ret->blocks[i].hash;
    }
    ret->store = (struct kve_op){.type = KVE_OP_STORE, .rank = rank, .blocks = ret->blocks};
    ret->known = (struct kve_op){.type = KVE_OP_STORE_KNOWN, .rank = rank, .hashes = ret->hashes};
    ret->remove = (struct kve_op){.type = KVE_OP_REMOVE, .rank = rank, .hashes = ret->hashes};
}

/* The engine has the main block at @depth: an absent one comes back with those above it. */
static void held(struct step *s, size_t depth)
{
    bool absent;

    do {
        struct naive *b = &s->naive[depth];

        absent = !b->count;
        b->lo = KV_MAX(b->lo, 1u);
        b->count = KV_MAX(b->count, 1u);
    } while (absent && depth && !s->naive[--depth].count);
}

/* An event from the root, of new copies or a report; @counted: it counts as the first. */
static void maybe(struct lists *l, struct step *s, size_t n, bool counted)
{
    s->store.n = s->known.n = n;
    for (size_t i = 0; i < n; i++)
        if (!s->cache.window && (counted ? !s->naive[i].count : !s->naive[i].hi))
            return; /* no report: the engine, or the index, lacks the block */
    if (counted)
        assert_int_equal(kvi_add_known(l->index, s->cache, s->hashes, n), n);
    else if (!s->cache.window)
        assert_int_equal(
            kvi_store(l->index, s->cache.holder, KV_TIER_DEVICE, NULL, s->blocks, n, NULL), 0);
    ki_ranges_maybe(&l->r, l->index, &s->cache, s->cache.window ? &s->known : &s->store, counted);
    for (size_t i = 0; i < n; i++) {
        struct naive *b = &s->naive[i];

        b->hi++;
        b->count += counted;
        if (s->cache.window)
            continue;
        b->count = KV_MAX(b->count, 1u);
        b->lo = KV_MAX(b->lo, 1u);
    }
}

/* New copies of the block at @depth. */
static void stored(struct lists *l, struct step *s, size_t depth)
{
    const uint64_t *parent = depth && !s->cache.window ? &s->hashes[depth - 1] : NULL;

    if (parent && !s->naive[depth - 1].hi)
        return;
    s->store.blocks += depth;
    s->known.hashes += depth;
    s->store.n = s->known.n = 1;
    if (parent) {
        assert_int_equal(ki_ranges_prove(&l->r, l->index, &s->cache, *parent), 0);
        held(s, depth - 1);
    }
    if (s->cache.window)
        assert_int_equal(kvi_add_known(l->index, s->cache, s->known.hashes, 1), 1);
    else
        assert_int_equal(kvi_add(l->index, s->cache, parent, s->store.blocks, 1, NULL), 0);
    ki_ranges_stored(&l->r, l->index, &s->cache, s->cache.window ? &s->known : &s->store);
    s->naive[depth].lo++;
    s->naive[depth].hi++;
    s->naive[depth].count++;
}

/* Remove a copy of the block at @depth; @exact: the event tells that @left are left. */
static void removed(struct lists *l, struct step *s, size_t depth, bool exact, uint32_t left)
{
    struct naive *b = &s->naive[depth];
    bool child = !s->cache.window && depth + 1 < DEPTH && b[1].hi, parent = child && b[1].count;

    if (!b->hi || (parent && b->count < 2 && b->hi == b->count) ||
        (child && (exact ? !left : b->hi < 2)))
        return; /* engines evict children first */
    s->remove.hashes += depth;
    s->remove.n = 1;
    s->remove.remaining = exact ? &left : NULL;
    assert_int_equal(ki_ranges_take(&l->r, l->index, &s->cache, &s->remove),
                     !exact || b->count || left);
    if (exact) {
        if (left && !s->cache.window)
            held(s, depth);
        *b = (struct naive){left, left, left};
        return;
    }
    l->n_real += b->count == 1 && !b->lo && b->hi == 1;
    b->lo = KV_MAX(b->lo, 1u) - 1;
    b->hi--;
    if (b->count == 1 && parent)
        b->lo = 1;
    else
        b->count -= b->count > 0;
}

static void check(struct lists *l)
{
    size_t n = 0, n_open = 0, n_absent = 0;

    for (uint32_t rank = 0; rank < RANKS; rank++) {
        for (uint32_t number = 0; number < 2; number++) {
            const struct kvi_cache cache = cache_of(rank, number);

            for (size_t at = 0; at < CHAINS * DEPTH; at++) {
                const struct naive *b = &l->blocks[rank][number][at / DEPTH][at % DEPTH];
                uint64_t hash = block_at(at / DEPTH, at % DEPTH).hash;
                const struct ki_range *e = ki_ranges_find(&l->r, &cache, hash);

                assert_int_equal(kvi_get_block(l->index, cache, hash).copies, b->count);
                assert_int_equal(e ? e->more : 0, b->hi - b->count);
                assert_int_equal(e ? e->fewer : 0, b->count - b->lo);
                assert_int_equal(e && e->open, b->hi && !b->lo);
                n += e != NULL;
                n_open += b->hi && !b->lo;
                n_absent += b->hi && !b->count;
            }
        }
    }
    assert_int_equal(l->r.n, n);
    assert_int_equal(l->r.n_open, n_open);
    assert_int_equal(l->r.n_absent, n_absent);
    assert_int_equal(l->r.n_real, l->n_real);
}

static void any_step(struct lists *l, uint64_t *random)
{
    size_t depth = unit_below(random, DEPTH);
    struct step s;

    step_init(l, random, &s);
    switch (unit_below(random, 8)) {
    case 0:
        maybe(l, &s, depth + 1, false);
        break;
    case 1:
        maybe(l, &s, depth + 1, true);
        break;
    case 2:
    case 3:
        stored(l, &s, depth);
        break;
    case 4:
        if (unit_below(random, 4) == 0) {
            removed(l, &s, depth, true, (uint32_t)unit_below(random, 3));
            break;
        } /* fallthrough */
    default:
        removed(l, &s, depth, false, 0);
    }
}

static void test_beside_lists(void **state)
{
    uint64_t random = unit_seed();
    struct lists *l = calloc(1, sizeof(*l));

    (void)state;
    assert_non_null(l);
    assert_int_equal(kvi_create(NULL, &l->index), 0);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        assert_int_equal(kvi_set_window(l->index, cache_of(rank, 0).holder, &window), 0);
    for (size_t i = 0; i < unit_rounds(40000); i++) {
        any_step(l, &random);
        if (unit_below(&random, 2000) == 0) {
            uint32_t rank = (uint32_t)unit_below(&random, RANKS);

            ki_ranges_clear_rank(&l->r, rank);
            assert_int_equal(kvi_clear(l->index, cache_of(rank, 0).holder), 0);
            memset(l->blocks[rank], 0, sizeof(l->blocks[rank]));
        }
        if (i % 20 == 0)
            check(l);
    }
    check(l);
    assert_true(l->n_real > 10 || unit_rounds(40000) < 40000);
    ki_ranges_clear(&l->r);
    assert_int_equal(l->r.n, 0);
    kvi_destroy(l->index);
    free(l);
}

/* -- what events mean -------------------------------------------------------------------------- */

struct world {
    struct kvi_index *index;
    struct ki_ranges r;
    struct kvi_cache main, window;
    struct kv_block blocks[3];
};

static bool is_in_doubt(const struct ki_ranges *r)
{
    return r->n_open || ki_doubts_any(&r->lost);
}

/* Events that may be reports name the first @n blocks. */
static void may_report(struct world *w, size_t n)
{
    const struct kve_op op = {.type = KVE_OP_STORE, .blocks = w->blocks, .n = n};

    assert_int_equal(kvi_store(w->index, w->main.holder, KV_TIER_DEVICE, NULL, w->blocks, n, NULL),
                     0);
    ki_ranges_maybe(&w->r, w->index, &w->main, &op, false);
}

/* A chain of three blocks; the first may have @possible copies more. */
static void begin(struct world *w, unsigned possible)
{
    *w = (struct world){
        .main = cache_of(0, 0), .window = cache_of(0, 1), .blocks = {{11, 1}, {12, 2}, {13, 3}}};
    assert_int_equal(kvi_create(NULL, &w->index), 0);
    assert_int_equal(kvi_store(w->index, w->main.holder, KV_TIER_DEVICE, NULL, w->blocks, 3, NULL),
                     0);
    while (possible--)
        may_report(w, 1);
}

static void end(struct world *w)
{
    ki_ranges_clear(&w->r);
    kvi_destroy(w->index);
}

static long take(struct world *w, const struct kvi_cache *cache, uint64_t hash)
{
    const struct kve_op op = {.type = KVE_OP_REMOVE, .hashes = &hash, .n = 1};

    return ki_ranges_take(&w->r, w->index, cache, &op);
}

/* Evict the chain, from its end. */
static void take_all(struct world *w)
{
    for (uint64_t hash = 13; hash > 10; hash--)
        assert_int_equal(take(w, &w->main, hash), 1);
}

static size_t found(struct world *w)
{
    static const uint64_t prompt[] = {1, 2, 3};
    struct kvi_matches matches = {0};
    size_t n;

    assert_int_equal(kvi_find(w->index, prompt, 3, &matches), 0);
    n = matches.n ? matches.items[0].reach[KV_TIER_DEVICE] : 0;
    kvi_matches_fini(&matches);
    return n;
}

/* Engines evict children first: who still has some has a copy of the block. */
static void test_children_prove_a_copy(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 1);
    assert_int_equal(take(&w, &w.main, 11), 1);
    assert_int_equal(found(&w), 3);
    assert_int_equal(w.r.n, 0);
    take_all(&w);
    assert_int_equal(found(&w), 0);
    assert_false(is_in_doubt(&w.r));
    end(&w);
}

static void test_open_until_the_last_possible_copy_goes(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 2);
    take_all(&w);
    assert_true(is_in_doubt(&w.r));
    assert_int_equal(found(&w), 0);
    assert_int_equal(take(&w, &w.main, 11), 1);
    assert_true(is_in_doubt(&w.r));
    assert_int_equal(take(&w, &w.main, 11), 1);
    assert_false(is_in_doubt(&w.r));
    assert_int_equal(take(&w, &w.main, 11), 0);
    end(&w);
}

static void test_a_chain_comes_back_from_its_top(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 0);
    may_report(&w, 3);
    take_all(&w);
    assert_int_equal(w.r.n_open, 3);
    assert_int_equal(ki_ranges_prove(&w.r, w.index, &w.main, 12), 0);
    assert_int_equal(found(&w), 2);
    assert_int_equal(w.r.n_open, 1);
    may_report(&w, 3); /* one event more: the third is there, others may have a copy more */
    assert_int_equal(w.r.n_open, 0);
    assert_int_equal(w.r.n, 3);
    end(&w);
}

/* Removals of blocks with and without ranges in one event, parents last. */
static void test_an_event_of_all(void **state)
{
    static const uint64_t hashes[] = {13, 12, 11};
    const struct kve_op op = {.type = KVE_OP_REMOVE, .hashes = hashes, .n = 3};
    struct world w;

    (void)state;
    begin(&w, 0);
    may_report(&w, 2);
    assert_int_equal(ki_ranges_take(&w.r, w.index, &w.main, &op), 3);
    assert_int_equal(w.r.n_open, 2);
    assert_int_equal(w.r.n_absent, 2);
    assert_int_equal(ki_ranges_take(&w.r, w.index, &w.main, &op), 2);
    assert_int_equal(w.r.n, 0);
    end(&w);
}

static void test_windows_have_no_proof(void **state)
{
    static const uint64_t names[] = {11, 12};
    const struct kve_op op = {.type = KVE_OP_STORE_KNOWN, .hashes = names, .n = 2};
    struct world w;

    (void)state;
    begin(&w, 0);
    assert_int_equal(kvi_set_window(w.index, w.main.holder, &window), 0);
    assert_int_equal(kvi_add_known(w.index, w.window, names, 1), 1);
    ki_ranges_maybe(&w.r, w.index, &w.window, &op, false);
    assert_int_equal(w.r.n_open, 1);
    assert_int_equal(take(&w, &w.window, 11), 1);
    assert_int_equal(w.r.n_open, 2);
    assert_int_equal(kvi_get_block(w.index, w.window, 11).copies, 0);
    assert_int_equal(take(&w, &w.window, 11), 1);
    assert_int_equal(w.r.n_open, 1);
    assert_int_equal(kvi_add_known(w.index, w.window, names, 2), 2);
    ki_ranges_stored(&w.r, w.index, &w.window, &op);
    assert_int_equal(w.r.n_open, 0);
    end(&w);
}

/*
 * An event that names blocks by hash alone brings back no absent one, and one that the index has lost by
 * itself (a limit) is none of those found.
 */
static void test_what_the_index_lacks(void **state)
{
    static const uint64_t names[] = {11};
    const struct kve_op known = {.type = KVE_OP_STORE_KNOWN, .hashes = names, .n = 1};
    struct world w;

    (void)state;
    begin(&w, 2);
    take_all(&w);
    assert_int_equal(kvi_add_known(w.index, w.main, names, 1), 0);
    ki_ranges_stored(&w.r, w.index, &w.main, &known);
    assert_int_equal(w.r.n_open, 1);
    assert_int_equal(w.r.n_absent, 1);
    end(&w);
    begin(&w, 1);
    assert_int_equal(kvi_take(w.index, w.main, (const uint64_t[]){13, 12, 11}, NULL, 3), 3);
    assert_int_equal(take(&w, &w.main, 11), 0);
    assert_int_equal(w.r.n_open, 1);
    assert_int_equal(take(&w, &w.main, 11), 1);
    assert_int_equal(w.r.n, 0);
    end(&w);
}

/* A removal that leaves copies of an absent block, for which the index has no room, fails. */
static void test_no_room_for_copies_left(void **state)
{
    static const struct kv_block others[] = {{21, 4}, {22, 5}, {23, 6}};
    static const uint64_t name = 11;
    static const uint32_t left = 1;
    const struct kve_op op = {.type = KVE_OP_REMOVE, .hashes = &name, .remaining = &left, .n = 1};
    struct kvi_opts opts = KVI_OPTS_INIT;
    struct world w;

    (void)state;
    begin(&w, 1);
    kvi_destroy(w.index);
    opts.max_blocks = 3;
    assert_int_equal(kvi_create(&opts, &w.index), 0);
    assert_int_equal(kvi_store(w.index, w.main.holder, KV_TIER_DEVICE, NULL, w.blocks, 1, NULL), 0);
    assert_int_equal(take(&w, &w.main, 11), 1);
    assert_int_equal(w.r.n_open, 1);
    assert_int_equal(kvi_store(w.index, w.main.holder, KV_TIER_DEVICE, NULL, others, 3, NULL), 0);
    assert_int_equal(ki_ranges_take(&w.r, w.index, &w.main, &op), -ENOSPC);
    assert_int_equal(w.r.n_open, 1);
    end(&w);
}

/* Once counted copies are trusted, only copies that aren't counted are in doubt. */
static void test_trust(void **state)
{
    const struct kve_op op = {
        .type = KVE_OP_STORE_KNOWN, .hashes = (const uint64_t[]){11, 12}, .n = 2};
    struct world w;

    (void)state;
    begin(&w, 1);
    assert_int_equal(kvi_add_known(w.index, w.main, op.hashes, 2), 2);
    ki_ranges_maybe(&w.r, w.index, &w.main, &op, true);
    w.r.n_real = 5;
    assert_int_equal(w.r.n, 2);
    ki_doubts_add(&w.r.lost, 1, 0, KI_LOST_FEWER);
    ki_doubts_add(&w.r.lost, 2, 0, KI_LOST_FEWER | KI_LOST_MORE);
    w.r.lost.lost = KI_LOST_FEWER;
    ki_ranges_trust(&w.r);
    assert_int_equal(ki_doubts_all(&w.r.lost), KI_LOST_MORE);
    assert_int_equal(w.r.lost.n, 1);
    assert_int_equal(w.r.n, 1);
    assert_int_equal(w.r.n_real, 0);
    assert_int_equal(ki_ranges_find(&w.r, &w.main, 11)->more, 1);
    assert_int_equal(ki_ranges_find(&w.r, &w.main, 11)->fewer, 0);
    end(&w);
}

static void test_bounded(void **state)
{
    struct world w;

    (void)state;
    begin(&w, 0);
    for (uint64_t i = 0; i <= KI_MAX_RANGES; i++) {
        const struct kv_block block = {.hash = i, .tokens_hash = i};
        const struct kve_op op = {.type = KVE_OP_STORE, .blocks = &block, .n = 1};

        assert_false(is_in_doubt(&w.r));
        ki_ranges_maybe(&w.r, w.index, &w.main, &op, false);
    }
    assert_int_equal(w.r.n, KI_MAX_RANGES);
    assert_true(is_in_doubt(&w.r));
    ki_ranges_clear_rank(&w.r, 1);
    assert_true(is_in_doubt(&w.r));
    ki_ranges_clear_rank(&w.r, 0);
    assert_false(is_in_doubt(&w.r));
    end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside_lists),
        cmocka_unit_test(test_children_prove_a_copy),
        cmocka_unit_test(test_open_until_the_last_possible_copy_goes),
        cmocka_unit_test(test_a_chain_comes_back_from_its_top),
        cmocka_unit_test(test_an_event_of_all),
        cmocka_unit_test(test_windows_have_no_proof),
        cmocka_unit_test(test_what_the_index_lacks),
        cmocka_unit_test(test_no_room_for_copies_left),
        cmocka_unit_test(test_trust),
        cmocka_unit_test(test_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
