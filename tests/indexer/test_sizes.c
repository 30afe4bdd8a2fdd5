// SPDX-License-Identifier: Apache-2.0
/*
 * Cache groups whose blocks have other sizes than the registered ones, where events name few of their
 * blocks: the main group's hashes of the same step tell which. Registered blocks have 8 tokens; a hash is
 * the number of tokens up to its end.
 */
#include <stdio.h>

#include "indexer/applier_unit.h"

#define BLOCK 8u
#define MOST 64u

static void begin(struct stream *s)
{
    begin_sized(s, BLOCK);
}

/* Describe a store of group @group: blocks of @size tokens with @hashes, in the tokens from @from to @to. */
static const char *stored(char *ret, const char *group, unsigned size, const char *hashes,
                          unsigned from, unsigned to)
{
    char tokens[4 * MOST] = "", parent[16] = "nil";
    size_t n = 0;

    for (unsigned i = from; i < to; i++)
        n += (size_t)snprintf(tokens + n, sizeof(tokens) - n, "%s%u", i > from ? "," : "", i);
    if (from)
        snprintf(parent, sizeof(parent), "%u", from);
    snprintf(
        ret, 1024,
        "{'type': 'BlockStored', 'block_hashes': [%s], 'parent_block_hash': %s, 'token_ids': [%s], "
        "'block_size': %u, 'medium': 'GPU', 'group_idx': %s}",
        hashes, parent, tokens, size, group);
    return ret;
}

static void store(struct stream *s, const char *group, unsigned size, const char *hashes,
                  unsigned from, unsigned to)
{
    char event[1024];

    put(s, stored(event, group, size, hashes, from, to));
}

static void remove_from(struct stream *s, unsigned group, const char *hashes)
{
    char event[256];

    snprintf(event, sizeof(event),
             "{'type': 'BlockRemoved', 'block_hashes': [%s], 'medium': 'GPU', 'group_idx': %u}",
             hashes, group);
    put(s, event);
}

/* Tokens of the prompt 0, 1, 2 ... that the worker has. */
static uint32_t reach(struct stream *s)
{
    uint32_t tokens[MOST];
    uint64_t hashes[MOST / BLOCK];

    for (uint32_t i = 0; i < MOST; i++)
        tokens[i] = i;
    kve_hash_tokens(kve_seed(NULL, 0, NULL, 0), tokens, MOST, BLOCK, 0, hashes);
    return reach_of(s, hashes, MOST / BLOCK, KV_TIER_DEVICE) * BLOCK;
}

static void is(struct stream *s, uint32_t tokens, bool partial)
{
    assert_int_equal(reach(s), tokens);
    assert_int_equal(is_partial(s), partial);
}

#define FULL "0, 'kv_cache_spec_kind': 'full_attention'"
#define SECOND "1, 'kv_cache_spec_kind': 'full_attention'"
#define WINDOW(tokens) \
    "1, 'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': " #tokens
#define STATE "1, 'kv_cache_spec_kind': 'mamba'"

/* Of two halves a block, the engine keeps those before one place alone: not the first, not the last. */
static void test_kept_halves(void **state)
{
    struct stream s;

    (void)state;
    for (int first = 0; first < 2; first++) {
        char main[1024], window[1024], both[2 * 1024 + 8];

        begin(&s);
        stored(main, FULL, 8, "8, 16, 24, 32", 0, 32);
        stored(window, WINDOW(8), 4, "20, 24", 0, 32);
        snprintf(both, sizeof(both), "%s, %s", first ? window : main, first ? main : window);
        put(&s, both); /* the main group's names are those of the same step, whoever comes first */
        is(&s, 24, false);
        store(&s, FULL, 8, "40", 32, 40);
        store(&s, WINDOW(8), 4, "", 32, 40);
        is(&s, 24, false);
        store(&s, WINDOW(8), 4, "36, 40", 32, 40);
        is(&s, 40, false);
        remove_from(&s, 1, "36");
        is(&s, 24, false);
        remove_from(&s, 1, "24");
        is(&s, 0, false);
        end(&s);
    }
}

/* A half that stays while the other goes and comes back is still the same block's. */
static void test_a_half_that_stays(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16", 0, 16);
    store(&s, WINDOW(8), 4, "12, 16", 0, 16);
    is(&s, 16, false);
    remove_from(&s, 1, "16");
    is(&s, 0, false);
    store(&s, WINDOW(8), 4, "16", 0, 16); /* as the engine would after a window that begins there */
    is(&s, 16, false);
    remove_from(&s, 1, "16, 12");
    assert_int_equal(s.applier.small.n, 0);
    end(&s);
}

/* Where nothing tells which blocks are kept, the view says so. */
static void test_unknown_halves(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16, 24", 0, 24);
    store(&s, WINDOW(13), 4, "16, 20, 24", 0,
          24); /* half of the second block: is the other there? */
    assert_true(is_partial(&s));
    end(&s);
    begin(&s);
    store(&s, FULL, 8, "8, 16, 24", 0, 24);
    store(&s, WINDOW(8), 4, "12, 99", 0, 24); /* ends with no block of the main group */
    assert_true(is_partial(&s));
    end(&s);
}

/* A window of 1 token blocks beside blocks of 8, and one of 64 parts: the tail of each block counts. */
static void test_many_parts(void **state)
{
    struct stream s;

    (void)state;
    begin_sized(&s, 16);
    store(&s, FULL, 16, "16, 32", 0, 32);
    store(&s, WINDOW(3), 1, "31, 32", 0, 32); /* of 16 parts a match needs two */
    assert_false(is_partial(&s));
    assert_int_equal(s.applier.small.n, 2);
    remove_from(&s, 1, "31");
    store(&s, WINDOW(3), 1, "15, 16, 31, 32", 0, 32);
    remove_from(&s, 1, "31, 16, 15, 32, 32");
    assert_int_equal(s.applier.small.n, 0);
    assert_false(is_partial(&s));
    store(&s,
          "1, 'lookahead_token_ids': [[1], [2]], 'kv_cache_spec_kind': 'sliding_window', "
          "'kv_cache_spec_sliding_window': 3",
          1, "31, 32", 0, 32); /* ends anywhere */
    assert_true(is_partial(&s));
    end(&s);
}

/* Tails before the main group is known: nothing tells where blocks end, later neither. */
static void test_many_parts_first(void **state)
{
    struct stream s;

    (void)state;
    begin_sized(&s, 16);
    store(&s, WINDOW(3), 1, "15, 16", 0, 16);
    assert_true(is_partial(&s));
    store(&s, FULL, 16, "16, 32", 0, 32);
    assert_true(is_partial(&s));
    end(&s);
}

/* Blocks of another size than the group's: their hashes are those of no part. */
static void test_blocks_of_another_size(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16", 0, 16);
    store(&s, WINDOW(5), 4, "8", 0, 8);
    is(&s, 8, false);
    store(&s, "1", 2, "14, 16", 12, 16); /* by an event without a kind */
    assert_true(is_partial(&s));
    end(&s);
}

/* With block drop each part of a block has a window: the index has no room for so many. */
static void test_many_parts_with_block_drop(void **state)
{
    struct stream s;

    (void)state;
    begin_sized(&s, 16);
    ki_applier_set_habits(
        &s.applier, &(struct ki_habits){.report_mode = KI_REPORTS_INCREMENTAL, .eagle_drop = true});
    for (int i = 0; i < 2; i++) {
        store(&s, WINDOW(3), 1, "15, 16", 0, 16); /* the group is left out, the batch isn't lost */
        assert_true(is_partial(&s));
        store(&s, FULL, 16, "16", 0, 16);
        assert_true(is_partial(&s));
    }
    end(&s);
}

/* Of a state's smaller blocks, those count that end with a registered block. */
static void test_smaller_states(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16, 24", 0, 24);
    store(&s, STATE, 4, "12, 16", 0, 24);
    is(&s, 16, false);
    store(&s, STATE, 4, "20", 0, 24);
    is(&s, 16, false);
    remove_from(&s, 1, "12, 20");
    is(&s, 16, false);
    store(&s, STATE, 4, "28", 24, 28); /* the engine resumes inside of a block */
    is(&s, 16, true);
    end(&s);
}

/* Blocks of a state that are larger: the engine resumes at keys inside of them, too. */
static void test_larger_states(void **state)
{
    struct stream s;

    (void)state;
    for (int first = 0; first < 2; first++) {
        begin(&s);
        store(&s, FULL, 8, "8, 16, 24, 32, 40", 0, 40);
        if (first)
            store(&s, STATE, 8, "8", 0, 8); /* looks like a block until a larger one comes */
        if (first)
            is(&s, 8, false);
        store(&s, STATE, 32, "32", 0, 32);
        is(&s, 32, false);
        store(&s, STATE, 8, "40", 32, 40);
        is(&s, 40, false);
        remove_from(&s, 1, "40, 32");
        is(&s, first ? 8 : 0, false);
        end(&s);
    }
}

/* A second full attention of larger blocks, whose last block has a key inside. */
static void test_second_full_attention(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16, 24, 32, 40", 0, 40);
    store(&s, SECOND, 16, "16, 32", 0, 32);
    store(&s, SECOND, 8, "40", 32, 40); /* no match ends there */
    is(&s, 32, false);
    remove_from(&s, 1, "16");
    is(&s, 0, false);
    end(&s);
    begin(&s); /* smaller ones: all of them count, and keys inside of them don't */
    store(&s, FULL, 8, "8, 16, 24", 0, 24);
    store(&s, SECOND, 4, "4, 8, 12, 16", 0, 16);
    is(&s, 16, false);
    store(&s, SECOND, 2, "18", 16, 18);
    is(&s, 16, false);
    remove_from(&s, 1, "12");
    is(&s, 8, false);
    end(&s);
    begin(&s);
    store(&s, FULL, 8, "8", 0, 8);
    store(&s, SECOND, 4, "4", 0, 4); /* a key, or a block: nothing else has come of the group */
    assert_true(is_partial(&s));
    end(&s);
}

/* With block drop each full attention gives up a block of its own size. */
static void test_block_drop_of_two_sizes(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    ki_applier_set_habits(
        &s.applier, &(struct ki_habits){.report_mode = KI_REPORTS_INCREMENTAL, .eagle_drop = true});
    store(&s, FULL, 8, "8, 16, 24, 32", 0, 32);
    assert_false(is_partial(&s));
    store(&s, SECOND, 16, "16, 32", 0, 32);
    assert_true(is_partial(&s));
    end(&s);
}

/* A state's keys inside of registered blocks, where the engine resumes, and at their ends. */
static void test_keys_of_states(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16", 0, 16);
    store(&s, STATE, 8, "16", 0, 16);
    is(&s, 16, false);
    store(&s, STATE, 4, "20", 16, 20);
    assert_true(is_partial(&s));
    end(&s);
}

/* A state before the main group's batch of the same step finds its place when that comes. */
static void test_a_state_that_comes_first(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8", 0, 8);
    store(&s, STATE, 4, "4, 8", 0, 8);
    is(&s, 8, false);
    store(&s, STATE, 4, "16", 8, 16);
    store(&s, FULL, 8, "16", 8, 16);
    is(&s, 16, false);
    end(&s);
}

/* Beside windows of the smallest blocks, states of larger ones end inside, too. */
static void test_states_beside_small_windows(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    store(&s, FULL, 8, "8, 16, 24", 0, 24);
    store(&s, WINDOW(5), 4, "4, 8, 12, 16, 20, 24", 0, 24);
    store(&s, "2, 'kv_cache_spec_kind': 'mamba'", 16, "16", 0, 16);
    is(&s, 16, false);
    store(&s, "2, 'kv_cache_spec_kind': 'mamba'", 8, "24", 16, 24);
    is(&s, 24, false);
    end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kept_halves),
        cmocka_unit_test(test_a_half_that_stays),
        cmocka_unit_test(test_unknown_halves),
        cmocka_unit_test(test_many_parts),
        cmocka_unit_test(test_many_parts_first),
        cmocka_unit_test(test_blocks_of_another_size),
        cmocka_unit_test(test_many_parts_with_block_drop),
        cmocka_unit_test(test_smaller_states),
        cmocka_unit_test(test_larger_states),
        cmocka_unit_test(test_second_full_attention),
        cmocka_unit_test(test_block_drop_of_two_sizes),
        cmocka_unit_test(test_keys_of_states),
        cmocka_unit_test(test_a_state_that_comes_first),
        cmocka_unit_test(test_states_beside_small_windows),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
