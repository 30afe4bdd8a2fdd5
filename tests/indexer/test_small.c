// SPDX-License-Identifier: Apache-2.0
/*
 * Groups whose blocks are parts of the registered ones: the tables beside a naive model, through
 * histories of any events; and events that contradict one another, through the applier.
 */
#include "base/unit.h"

#include <errno.h>

#include "event/pack.h"
#include "indexer/parts_model.h"
#include "indexer/view/apply.h"
#include "indexer/view/small/small.h"

#define GROUPS 2
#define NAMES 14

/* -- any operations, beside the model ---------------------------------------------------------- */

struct world {
    struct kvi_index *index;
    struct ki_small small;
    struct parts_model model;
    struct ki_small_group groups[GROUPS];
    uint64_t random;
    size_t asked;
};

static struct kv_holder holder_of(uint32_t rank)
{
    return (struct kv_holder){.worker = 7, .rank = rank};
}

/* Each group of each rank gets the same windows, in the same order. */
static void world_init(struct world *w, uint64_t seed)
{
    memset(w, 0, sizeof(*w));
    w->random = seed;
    assert_int_equal(kvi_create(NULL, &w->index), 0);
    for (uint32_t g = 0; g < GROUPS; g++) {
        struct ki_small_group *group = &w->groups[g];

        group->group = 1 + g;
        group->parts = 2 + (uint32_t)unit_below(&w->random, 3);
        group->need = 1 + (uint32_t)unit_below(&w->random, 4);
        group->drops = unit_below(&w->random, 2);
        for (uint32_t rank = 0; rank < PARTS_MODEL_RANKS; rank++) {
            for (uint32_t part = 0; part < group->parts; part++) {
                struct kvi_window window = {.group = group->group,
                                            .window = 16,
                                            .need = group->need,
                                            .stride = 1,
                                            .part = part,
                                            .parts = group->parts};
                int number = kvi_set_window(w->index, holder_of(rank), &window);

                assert_true(number >= 0);
                group->numbers[part] = (uint32_t)number;
            }
        }
    }
}

static void world_fini(struct world *w)
{
    ki_small_clear(&w->small);
    kvi_destroy(w->index);
}

static bool main_has(struct world *w, uint32_t rank, uint64_t hash)
{
    return kvi_get_block(w->index, kvi_cache_of(holder_of(rank), KV_TIER_DEVICE, 0), hash).copies >
           0;
}

static bool is_lost(const struct ki_small *small)
{
    return ki_doubts_any(&small->lost);
}

static bool lost_rank(const struct ki_small *small, uint32_t rank)
{
    for (size_t i = 0; i < small->lost.n; i++)
        if (small->lost.items[i].rank == rank)
            return true;
    return small->lost.lost;
}

/* Every window has the blocks that the model says, and no other. */
static void compare(struct world *w)
{
    for (uint32_t rank = 0; rank < PARTS_MODEL_RANKS; rank++)
        assert_int_equal(lost_rank(&w->small, rank), w->model.lost[rank]);
    assert_int_equal(w->small.n, parts_model_records(&w->model));
    for (uint32_t rank = 0; rank < PARTS_MODEL_RANKS; rank++) {
        for (uint32_t g = 0; g < GROUPS; g++) {
            const struct ki_small_group *group = &w->groups[g];

            for (uint32_t part = 0; part < group->parts; part++) {
                for (uint64_t hash = 1; hash <= NAMES; hash++) {
                    long copies = kvi_get_block(w->index,
                                                kvi_window_of(holder_of(rank), KV_TIER_DEVICE, 0,
                                                              group->numbers[part]),
                                                hash)
                                      .copies;

                    assert_int_equal(copies > 0, parts_model_has(&w->model, rank, group->group,
                                                                 hash, part, group->parts));
                    w->asked++;
                }
            }
        }
    }
}

static size_t random_hashes(struct world *w, uint64_t *hashes, size_t max)
{
    size_t n = 1 + unit_below(&w->random, max), k = 0;

    for (size_t i = 0; i < n; i++) {
        uint64_t hash = 1 + unit_below(&w->random, NAMES);
        size_t j = 0;

        while (j < k && hashes[j] != hash)
            j++;
        if (j == k) /* the reader refuses events that repeat a hash */
            hashes[k++] = hash;
    }
    return k;
}

static void step(struct world *w)
{
    uint32_t rank = (uint32_t)unit_below(&w->random, PARTS_MODEL_RANKS);
    const struct ki_small_group *group = &w->groups[unit_below(&w->random, GROUPS)];
    uint64_t hashes[8], what = unit_below(&w->random, 100);
    uint32_t remaining[8];
    struct kve_op op = {.rank = rank, .tier = KV_TIER_DEVICE, .hashes = hashes};
    struct kvi_index *index = w->index;

    w->small.work = 0;
    op.n = random_hashes(w, hashes, KV_COUNT(hashes));
    op.has_parent = unit_below(&w->random, 3) > 0;
    op.parent = 1 + unit_below(&w->random, NAMES);
    op.n_covered = unit_below(&w->random, 3) ? op.n : unit_below(&w->random, 12);
    op.lookahead = unit_below(&w->random, 2);
    for (size_t i = 0; i < op.n; i++)
        remaining[i] = (uint32_t)unit_below(&w->random, 3);
    op.remaining = unit_below(&w->random, 4) ? NULL : remaining;
    if (what < 45) {
        parts_model_store(&w->model, group, &op, main_has(w, rank, op.parent));
        assert_int_equal(ki_small_store(&w->small, index, holder_of(rank), group, &op), 0);
    } else if (what < 75) {
        for (size_t i = 0; i < op.n; i++)
            parts_model_take(&w->model, rank, group, hashes[i], op.remaining ? &remaining[i] : NULL,
                             main_has(w, rank, hashes[i]));
        assert_int_equal(ki_small_take(&w->small, index, holder_of(rank), group, &op), 0);
    } else if (what < 85) {
        struct kv_block block = {hashes[0], hashes[0]};

        assert_int_equal(kvi_store(index, holder_of(rank), KV_TIER_DEVICE, NULL, &block, 1, NULL),
                         0);
    } else if (what < 97) {
        (void)kvi_remove(index, holder_of(rank), KV_TIER_DEVICE, hashes, op.n);
        for (uint32_t g = 0; g < GROUPS; g++) {
            for (size_t i = 0; i < op.n; i++)
                parts_model_forget(&w->model, rank, &w->groups[g], hashes[i],
                                   main_has(w, rank, hashes[i]));
            assert_int_equal(
                ki_small_forget(&w->small, index, holder_of(rank), &w->groups[g], hashes, op.n), 0);
        }
    } else if (what < 99) {
        kvi_clear(index, holder_of(rank));
        ki_small_clear_rank(&w->small, rank);
        parts_model_clear(&w->model, rank, rank);
    } else {
        for (uint32_t r = 0; r < PARTS_MODEL_RANKS; r++)
            kvi_clear(index, holder_of(r));
        ki_small_clear(&w->small);
        parts_model_clear(&w->model, 0, UINT32_MAX);
    }
}

static void test_any_operations(void **state)
{
    uint64_t seed = unit_seed();
    size_t asked = 0, lost = 0;

    (void)state;
    for (size_t i = 0; i < unit_rounds(600); i++) {
        struct world w;

        world_init(&w, unit_random(&seed));
        for (int k = 0; k < 60; k++) {
            step(&w);
            compare(&w);
        }
        asked += w.asked;
        lost += w.model.lost[0] || w.model.lost[1];
        world_fini(&w);
    }
    print_message("%zu questions, %zu histories with a contradiction\n", asked, lost);
    assert_true(lost > 0);
}

/* -- events that contradict one another -------------------------------------------------------- */

/* Half blocks in group 1: registered blocks of 4 tokens, those of the group of 2. */
#define HALVES                                                                       \
    "'type': 'BlockStored', 'block_size': 2, 'group_idx': 1, 'kv_cache_spec_kind': " \
    "'sliding_window', 'kv_cache_spec_sliding_window': 5, 'medium': 'GPU', 'token_ids': "
#define MAIN_BLOCKS                                                                  \
    "'type': 'BlockStored', 'block_size': 4, 'group_idx': 0, 'kv_cache_spec_kind': " \
    "'full_attention', 'medium': 'GPU', 'token_ids': "

struct stream {
    struct kvi_index *index;
    uint32_t rank; /* of the next events */
    size_t n_forgets;
    struct ki_applier applier;
};

static void stream_init(struct stream *s, bool drops)
{
    s->n_forgets = 0;
    s->rank = 0;
    assert_int_equal(kvi_create(NULL, &s->index), 0);
    assert_int_equal(ki_applier_init(&s->applier, 7, 0, 4, KI_MM_PLACED), 0);
    ki_applier_set_habits(&s->applier, &(struct ki_habits){.eagle_drop = drops});
}

static void stream_fini(struct stream *s)
{
    ki_applier_fini(&s->applier);
    kvi_destroy(s->index);
}

KV_PRINTF(2, 3)
static enum ki_applied event(struct stream *s, const char *fmt, ...)
{
    struct kv_buf payload = KV_BUF_INIT;
    enum ki_applied applied;
    char text[4096];
    va_list args;

    va_start(args, fmt);
    assert_in_range(vsnprintf(text, sizeof(text), fmt, args), 1, sizeof(text) - 1);
    va_end(args);
    pack(&payload, "[1.5, [{%s}], %u]", text, s->rank);
    applied = ki_applier_apply(&s->applier, s->index, payload.data, payload.len);
    kv_buf_fini(&payload);
    return applied;
}

static void removed(struct stream *s, const char *hashes)
{
    (void)event(s, "'type': 'BlockRemoved', 'block_hashes': [%s], 'group_idx': 1", hashes);
}

/* One hash as the part of one block and the last part of another. */
static void test_part_and_whole(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    assert_false(is_lost(&s.applier.small));
    (void)event(&s, HALVES "[5,6,7,8], 'block_hashes': [12, 10]");
    assert_true(is_lost(&s.applier.small));
    removed(&s, "11");
    removed(&s, "10, 12, 11");
    stream_fini(&s);

    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    (void)event(&s, HALVES "[5,6,7,8], 'block_hashes': [11, 12]");
    removed(&s, "11");
    removed(&s, "11");
    removed(&s, "12");
    assert_true(is_lost(&s.applier.small));
    stream_fini(&s);
}

/* Windows alone: the engine resumes behind a block that is shorter than a registered one. */
static void test_alone(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2], 'block_hashes': [10]");
    assert_true(ki_applier_reasons(&s.applier) & KI_BECAUSE(SMALL_ALONE));
    removed(&s, "10");
    assert_false(ki_applier_reasons(&s.applier) & KI_BECAUSE(SMALL_ALONE));
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    assert_true(ki_applier_reasons(&s.applier) & KI_BECAUSE(SMALL_ALONE));
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    assert_false(ki_applier_reasons(&s.applier) & KI_BECAUSE(SMALL_ALONE));
    stream_fini(&s);
}

/* A group that announces its blocks one by one, and goes on below one that has left. */
static void test_one_by_one(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2], 'block_hashes': [10]");
    removed(&s, "10");
    (void)event(&s, HALVES "[3,4], 'block_hashes': [11], 'parent_block_hash': 10");
    assert_true(is_lost(&s.applier.small));
    (void)event(&s, HALVES "[5,6], 'block_hashes': [12], 'parent_block_hash': 11");
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    removed(&s, "12, 11, 10");
    stream_fini(&s);
}

/* The blocks are there when the applier says that it will forget them. */
static void see_windows(void *arg)
{
    struct stream *s = arg;

    s->n_forgets++;
    assert_int_equal(
        kvi_get_block(s->index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 11).copies, 1);
}

/* Blocks of one size, then of another: none of the old ones count, and the view says so. */
static void test_another_size(void **state)
{
    struct kvi_window windows[KVI_MAX_WINDOWS];
    struct stream s;

    (void)state;
    stream_init(&s, false);
    s.applier.forgets = see_windows;
    s.applier.forgets_arg = &s;
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    assert_int_equal(kvi_get_windows(s.index, holder_of(0), windows), 2);
    assert_int_equal(event(&s, "'type': 'BlockStored', 'block_size': 4, 'group_idx': 1, "
                               "'kv_cache_spec_kind': 'sliding_window', "
                               "'kv_cache_spec_sliding_window': 5, 'token_ids': [1,2,3,4], "
                               "'block_hashes': [11]"),
                     KI_APPLIED_PART);
    assert_int_equal(kvi_get_windows(s.index, holder_of(0), windows), 1);
    assert_int_equal(windows[0].parts, 1);
    assert_int_equal(
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 11).copies, 1);
    assert_int_equal(s.applier.small.n, 0);
    assert_int_equal(event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]"), KI_APPLIED_PART);
    assert_int_equal(kvi_get_windows(s.index, holder_of(0), windows), 2);
    removed(&s, "11, 10");
    assert_int_equal(s.applier.small.n, 0);
    assert_int_equal(s.n_forgets, 2);
    stream_fini(&s);
}

/* Offloaded blocks of another size change nothing on the device; the view says that it lacks them. */
static void test_another_size_below(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    assert_int_equal(event(&s, "'type': 'BlockStored', 'block_size': 4, 'group_idx': 1, 'medium': "
                               "'CPU', 'kv_cache_spec_kind': 'sliding_window', "
                               "'kv_cache_spec_sliding_window': 5, 'token_ids': [1,2,3,4], "
                               "'block_hashes': [11]"),
                     KI_APPLIED);
    assert_true(ki_applier_reasons(&s.applier));
    assert_false(is_lost(&s.applier.small));
    assert_int_equal(
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 11).copies, 1);
    removed(&s, "11, 10");
    assert_int_equal(
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 11).copies, 0);
    assert_int_equal(s.applier.small.n, 0);
    stream_fini(&s);
}

/* A kindless event of a learned group, whose blocks have another size, covers none of its blocks. */
static void test_size_without_kind(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    (void)event(&s, "'type': 'BlockStored', 'block_size': 1, 'group_idx': 1, 'token_ids': [5,6], "
                    "'block_hashes': [12, 13], 'parent_block_hash': 11");
    assert_true(is_lost(&s.applier.small));
    stream_fini(&s);
}

/* Without a main group, a kindless event with whole registered blocks isn't one of halves. */
static void test_whole_without_kind(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    removed(&s, "11, 10");
    assert_false(ki_applier_reasons(&s.applier));
    (void)event(&s, "'type': 'BlockStored', 'block_size': 4, 'group_idx': 1, 'token_ids': "
                    "[1,2,3,4], 'block_hashes': [12]");
    assert_true(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* Quarters in group 1, whose window ends before the block behind the match. */
#define QUARTERS                                                                     \
    "'type': 'BlockStored', 'block_size': 1, 'group_idx': 1, 'kv_cache_spec_kind': " \
    "'sliding_window', 'kv_cache_spec_sliding_window': 2, 'medium': 'GPU', 'token_ids': "

/* A block that begins behind a part which has left, and before which a match needs another one. */
static void test_part_behind_a_hole(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, true);
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4,5,6,7,8], 'block_hashes': [14, 18]");
    (void)event(&s, QUARTERS "[1,2,3,4], 'block_hashes': [11, 12, 13, 14]");
    (void)event(&s, QUARTERS "[5,6,7], 'block_hashes': [15, 16, 17], 'parent_block_hash': 14");
    assert_false(ki_applier_reasons(&s.applier));
    removed(&s, "16");
    (void)event(&s, QUARTERS "[8], 'block_hashes': [18], 'parent_block_hash': 17");
    assert_true(
        ki_applier_reasons(&s.applier) ||
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 18).copies > 0);
    stream_fini(&s);
}

/* A removal says that the engine has further copies of a block that nobody announced. */
static void test_unknown_copies(void **state)
{
    static const char *const events[] = {
        "'type': 'BlockRemoved', 'block_hashes': [20], 'group_idx': 1, 'remaining_copy_counts': "
        "[0]",
        "'type': 'BlockRemoved', 'block_hashes': [20], 'group_idx': 1, 'remaining_copy_counts': "
        "[1]",
    };
    struct stream s;

    (void)state;
    for (int first = 0; first < 2; first++) { /* with a table of the group, and without */
        stream_init(&s, false);
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
        if (first)
            (void)event(&s, "'type': 'AllBlocksCleared'");
        for (int i = 0; i < 2; i++) {
            (void)event(&s, "%s", events[i]);
            assert_int_equal(ki_applier_reasons(&s.applier) != 0, i);
        }
        stream_fini(&s);
    }
}

/* A registration that names all the groups it can says the same as one that names none. */
static void test_all_groups_drop(void **state)
{
    struct stream s;

    (void)state;
    for (int named = 0; named < 2; named++) {
        stream_init(&s, true);
        ki_applier_set_habits(
            &s.applier,
            &(struct ki_habits){.eagle_drop = true, .eagle_groups = named ? UINT64_MAX : 0});
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        (void)event(&s, "'type': 'BlockStored', 'block_size': 2, 'group_idx': 70, "
                        "'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 2,"
                        " 'medium': 'GPU', 'token_ids': [1,2,3,4], 'block_hashes': [11]");
        assert_true(ki_applier_reasons(&s.applier)); /* one half is missing */
        stream_fini(&s);
    }
}

/* Windows alone give up a block, until another group of full attention does, too. */
static void test_drops_beyond_main(void **state)
{
    static const char full[] = "'type': 'BlockStored', 'block_size': 4, 'group_idx': 2, "
                               "'kv_cache_spec_kind': 'full_attention', 'medium': 'GPU', "
                               "'token_ids': [1,2,3,4], 'block_hashes': [11]";
    struct stream s;

    (void)state;
    for (int clears = 0; clears < 2; clears++) {
        stream_init(&s, true);
        ki_applier_set_habits(&s.applier,
                              &(struct ki_habits){.eagle_drop = true, .eagle_groups = 6});
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        assert_false(ki_applier_reasons(&s.applier));
        (void)event(&s, "'type': 'BlockStored', 'block_size': 4, 'group_idx': 1, "
                        "'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 5,"
                        " 'medium': 'GPU', 'token_ids': [1,2,3,4], 'block_hashes': [11]");
        assert_true(ki_applier_reasons(&s.applier));
        (void)event(&s, "%s", clears ? "'type': 'AllBlocksCleared'" : full);
        assert_false(ki_applier_reasons(&s.applier));
        stream_fini(&s);
    }
}

/* A listener that joins late sees an offloaded block first: its size says nothing about the device. */
static void test_below_first(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    s.applier.forgets = see_windows;
    s.applier.forgets_arg = &s;
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    assert_int_equal(event(&s, "'type': 'BlockStored', 'block_size': 4, 'group_idx': 1, 'medium': "
                               "'CPU', 'kv_cache_spec_kind': 'sliding_window', "
                               "'kv_cache_spec_sliding_window': 5, 'token_ids': [], "
                               "'block_hashes': [9]"),
                     KI_APPLIED);
    assert_true(ki_applier_reasons(&s.applier));
    assert_int_equal(event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]"), KI_APPLIED);
    assert_int_equal(s.n_forgets, 0);
    assert_int_equal(
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 0), 11).copies, 1);
    assert_true(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* A contradiction counts until its rank's device is cleared, whatever other ranks do. */
static void test_lost_ranks(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false); /* registered as rank 0 */
    for (s.rank = 3; s.rank <= 4; s.rank++) {
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    }
    s.rank = 3;
    (void)event(&s, HALVES "[5,6,7,8], 'block_hashes': [12, 10]");
    assert_true(ki_applier_reasons(&s.applier));
    s.rank = 4;
    (void)event(&s, "'type': 'AllBlocksCleared'");
    assert_true(ki_applier_reasons(&s.applier));
    s.rank = 3;
    (void)event(&s, "'type': 'AllBlocksCleared'");
    assert_false(ki_applier_reasons(&s.applier));
    for (s.rank = 3; s.rank <= 4; s.rank++) {
        (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
        (void)event(&s, HALVES "[5,6,7,8], 'block_hashes': [12, 10]");
    }
    for (s.rank = 4; s.rank >= 3; s.rank--) {
        assert_true(ki_applier_reasons(&s.applier));
        (void)event(&s, "'type': 'AllBlocksCleared'");
    }
    assert_false(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* The device is cleared; what the group has in lower tiers stays unknown, though main has nothing. */
static void test_lost_below(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    (void)event(&s, "'type': 'BlockStored', 'block_hashes': [11], 'token_ids': [], 'block_size': "
                    "4, 'medium': 'CPU', 'group_idx': 0");
    (void)event(&s, "'type': 'BlockStored', 'block_hashes': [10, 11], 'token_ids': [], "
                    "'block_size': 2, 'medium': 'CPU', 'group_idx': 1");
    assert_true(ki_applier_reasons(&s.applier));
    (void)event(&s, "'type': 'AllBlocksCleared'");
    assert_true(ki_applier_reasons(&s.applier));
    (void)event(&s,
                "'type': 'BlockRemoved', 'block_hashes': [11], 'medium': 'CPU', 'group_idx': 0");
    /* The tree is empty, but the engine's lower tiers may hold what no event has placed. */
    assert_int_equal(event(&s, "'type': 'AllBlocksCleared'"), KI_APPLIED);
    assert_true(ki_applier_reasons(&s.applier));
    ki_applier_purge(&s.applier, s.index, true);
    assert_false(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* A clear that empties lower tiers ends doubts about these, of its own rank and owner alone. */
static void test_lost_below_ends(void **state)
{
    static const char halves[] = "'type': 'BlockStored', 'block_hashes': [10, 11], 'token_ids': [],"
                                 " 'block_size': 2, 'medium': '%s', 'group_idx': 1%s";
    struct stream s;

    (void)state;
    stream_init(&s, false);
    for (s.rank = 0; s.rank < 2; s.rank++) {
        (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        (void)event(&s, "'type': 'BlockStored', 'block_hashes': [11], 'token_ids': [], "
                        "'block_size': 4, 'medium': 'CPU_PINNED', 'group_idx': 0");
        (void)event(&s, halves, "CPU_PINNED", "");
    }
    s.rank = 1;
    (void)event(&s, halves, "CPU", ", 'ownership': 'mooncake'");
    for (s.rank = 0; s.rank < 2; s.rank++) {
        assert_true(ki_applier_reasons(&s.applier));
        (void)event(&s, "'type': 'AllBlocksCleared'");
    }
    s.rank = 1;
    assert_true(ki_applier_reasons(&s.applier));
    (void)event(&s, "'type': 'AllBlocksCleared', 'ownership': 'other'");
    assert_true(ki_applier_reasons(&s.applier));
    (void)event(&s, "'type': 'AllBlocksCleared', 'ownership': 'mooncake'");
    assert_false(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* Parts that many blocks share: a batch can't keep the stream busy for ever. */
static void test_shared_part(void **state)
{
    const struct ki_small_group group = {.group = 1, .need = 1, .parts = 2, .numbers = {0, 1}};
    const size_t n_blocks = 3000;
    uint64_t hashes[2] = {1, 0};
    struct kve_op op = {.type = KVE_OP_STORE_KNOWN, .hashes = hashes, .n = 2, .n_covered = 2};
    struct ki_small small = {0};
    struct kvi_index *index;

    (void)state;
    assert_int_equal(kvi_create(NULL, &index), 0);
    for (uint32_t part = 0; part < 2; part++)
        assert_int_equal(
            kvi_set_window(
                index, holder_of(0),
                &(struct kvi_window){.group = 1, .need = 1, .stride = 1, .part = part, .parts = 2}),
            part);
    for (size_t i = 0; i < n_blocks; i++) {
        hashes[1] = 2 + i;
        small.work = 0;
        assert_int_equal(ki_small_store(&small, index, holder_of(0), &group, &op), 0);
    }
    assert_int_equal(small.n, n_blocks + 1);
    small.work = KI_MAX_SMALL_WORK - 2 * n_blocks + 1;
    for (size_t i = 0; i < n_blocks; i++) { /* the oldest first */
        hashes[1] = 2 + i;
        op = (struct kve_op){.type = KVE_OP_REMOVE, .hashes = hashes + 1, .n = 1};
        assert_int_equal(ki_small_take(&small, index, holder_of(0), &group, &op), 0);
    }
    assert_true(is_lost(&small));
    ki_small_clear(&small);
    kvi_destroy(index);
}

/* A peer's dump with a group of more parts than any engine's: refused, and harmless. */
static void test_restored_parts(void **state)
{
    struct kvi_extra extra = {.kind = KVI_EXTRA_WINDOW,
                              .holder = holder_of(0),
                              .window = {.group = 1, .window = 5, .need = 2, .stride = 1}};
    struct stream s;

    (void)state;
    for (extra.window.parts = 2; extra.window.parts <= KVI_MAX_WINDOWS + 1; extra.window.parts++) {
        bool fits = extra.window.parts <= KVI_MAX_WINDOW_PARTS;

        stream_init(&s, true);
        (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
        for (extra.window.part = 0; extra.window.part < extra.window.parts; extra.window.part++)
            assert_int_equal(kvi_restore_extra(s.index, &extra), fits ? 0 : -EINVAL);
        (void)event(&s, "'type': 'BlockRemoved', 'block_hashes': [11], 'group_idx': 1, "
                        "'kv_cache_spec_kind': 'sliding_window', "
                        "'kv_cache_spec_sliding_window': 5");
        (void)event(&s, "'type': 'BlockRemoved', 'block_hashes': [11], 'group_idx': 0");
        stream_fini(&s);
    }
}

/* A full table makes the view partial; it is no loss of batches, which a resync would heal. */
static void test_full_table(void **state)
{
    struct stream s;
    size_t n;

    (void)state;
    stream_init(&s, false);
    (void)event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [11]");
    (void)event(&s, HALVES "[1,2,3,4], 'block_hashes': [10, 11]");
    n = s.applier.small.n;
    s.applier.small.n = KI_MAX_SMALL - 1; /* as if other blocks filled it */
    assert_int_equal(event(&s, HALVES "[5,6,7,8], 'block_hashes': [12, 13]"), KI_APPLIED);
    assert_true(is_lost(&s.applier.small));
    assert_int_equal(s.applier.small.n, KI_MAX_SMALL);
    assert_int_equal(event(&s, HALVES "[5,6,7,8], 'block_hashes': [14, 15]"), KI_APPLIED);
    s.applier.small.n = n + 1;
    removed(&s, "10, 11, 12, 13");
    assert_int_equal(s.applier.small.n, 0);
    stream_fini(&s);
}

/* Blocks of @parts parts in a group; the registered ones have 4 tokens. */
static enum ki_applied window_event(struct stream *s, int group, int parts)
{
    static const char *const hashes[] = {[1] = "14", [2] = "12, 14", [4] = "11, 12, 13, 14"};

    return event(s,
                 "'type': 'BlockStored', 'block_size': %d, 'group_idx': %d, 'kv_cache_spec_kind': "
                 "'sliding_window', 'kv_cache_spec_sliding_window': 5, 'medium': 'GPU', "
                 "'token_ids': [1,2,3,4], 'block_hashes': [%s]",
                 4 / parts, group, hashes[parts]);
}

/* More windows than a holder has: whole groups are left out, and the view is partial, nothing more. */
static void test_many_windows(void **state)
{
    struct kvi_window windows[KVI_MAX_WINDOWS];
    uint32_t of_group[10] = {0};
    struct stream s;
    int n;

    (void)state;
    stream_init(&s, false);
    assert_int_equal(event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [14]"), KI_APPLIED);
    for (int group = 1; group <= 5; group++) /* 20 windows */
        assert_int_equal(window_event(&s, group, 4), KI_APPLIED);
    assert_int_equal(window_event(&s, 6, 2), KI_APPLIED);
    assert_false(ki_applier_reasons(&s.applier));
    for (int round = 0; round < 2; round++) {
        assert_int_equal(window_event(&s, 7, 4), KI_APPLIED); /* 2 are free */
        assert_true(ki_applier_reasons(&s.applier));
        assert_int_equal(window_event(&s, 8, 1), KI_APPLIED);
    }
    assert_int_equal(event(&s, "'type': 'BlockRemoved', 'block_hashes': [14], 'group_idx': 7"),
                     KI_APPLIED);
    assert_false(is_lost(&s.applier.small) || ki_doubts_has(&s.applier.doubts, KI_WHY_TIERS));
    n = kvi_get_windows(s.index, holder_of(0), windows);
    assert_int_equal(n, 23);
    for (int i = 0; i < n; i++)
        of_group[windows[i].group]++;
    assert_int_equal(of_group[6], 2);
    assert_int_equal(of_group[7], 0);
    assert_int_equal(of_group[8], 1);
    assert_int_equal(
        kvi_get_block(s.index, kvi_window_of(holder_of(0), KV_TIER_DEVICE, 0, 22), 14).copies, 2);
    assert_int_equal(event(&s, "'type': 'AllBlocksCleared'"), KI_APPLIED_CLEARED);
    assert_false(ki_applier_reasons(&s.applier)); /* nothing is held */
    assert_int_equal(window_event(&s, 7, 4), KI_APPLIED);
    assert_true(ki_applier_reasons(&s.applier));
    ki_applier_purge(&s.applier, s.index, true);
    assert_false(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

/* A limit of the index makes answers partial until a clear; it is no loss of batches. */
static void test_limits(void **state)
{
    struct stream s;

    (void)state;
    stream_init(&s, false);
    kvi_destroy(s.index);
    assert_int_equal(kvi_create(&(struct kvi_opts){.size = sizeof(struct kvi_opts),
                                                   .max_copies = 1,
                                                   .max_parked_holder = 1},
                                &s.index),
                     0);
    for (int i = 0; i < 2; i++) { /* two copies of two blocks */
        assert_false(ki_applier_reasons(&s.applier));
        assert_int_equal(event(&s, MAIN_BLOCKS "[1,2,3,4,5,6,7,8], 'block_hashes': [11, 12]"),
                         KI_APPLIED);
    }
    assert_true(ki_applier_reasons(&s.applier));
    assert_int_equal(s.applier.left_out, 1);
    assert_int_equal(event(&s, "'type': 'AllBlocksCleared'"), KI_APPLIED_CLEARED);
    assert_false(ki_applier_reasons(&s.applier));
    assert_int_equal(s.applier.left_out, 0);
    assert_int_equal(
        event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [13], 'parent_block_hash': 9"),
        KI_APPLIED);
    assert_true(ki_applier_reasons(&s.applier)); /* its parent was never stored */
    assert_int_equal(s.applier.left_out, 0);
    assert_int_equal(
        event(&s, MAIN_BLOCKS "[1,2,3,4], 'block_hashes': [14], 'parent_block_hash': 9"),
        KI_APPLIED);
    assert_int_equal(s.applier.left_out, 1);
    ki_applier_purge(&s.applier, s.index, false);
    assert_false(ki_applier_reasons(&s.applier));
    stream_fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_operations),
        cmocka_unit_test(test_part_and_whole),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_one_by_one),
        cmocka_unit_test(test_another_size),
        cmocka_unit_test(test_size_without_kind),
        cmocka_unit_test(test_whole_without_kind),
        cmocka_unit_test(test_part_behind_a_hole),
        cmocka_unit_test(test_unknown_copies),
        cmocka_unit_test(test_all_groups_drop),
        cmocka_unit_test(test_drops_beyond_main),
        cmocka_unit_test(test_below_first),
        cmocka_unit_test(test_lost_below_ends),
        cmocka_unit_test(test_lost_below),
        cmocka_unit_test(test_another_size_below),
        cmocka_unit_test(test_shared_part),
        cmocka_unit_test(test_restored_parts),
        cmocka_unit_test(test_lost_ranks),
        cmocka_unit_test(test_full_table),
        cmocka_unit_test(test_many_windows),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
