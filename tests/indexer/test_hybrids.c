// SPDX-License-Identifier: Apache-2.0
/*
 * Engines with several cache groups whose events don't tell everything: groups that keep few blocks
 * and name these alone, groups in different tiers, kinds and sizes that can't be followed. A view
 * that answers otherwise than the engine says so from the first such event on.
 */
#include "indexer/applier_unit.h"

static void begin(struct stream *s)
{
    begin_sized(s, 4);
}

/* Blocks of the prompt 1,1,1,1, 2,2,2,2, 3,3,3,3 ... under a salt that the worker has in the tier. */
static uint32_t reach_salted(struct stream *s, const char *salt, enum kv_tier tier)
{
    uint32_t tokens[24];
    uint64_t hashes[6];

    for (uint32_t i = 0; i < KV_COUNT(tokens); i++)
        tokens[i] = 1 + i / 4;
    kve_hash_tokens(kve_seed(NULL, 0, salt, strlen(salt)), tokens, KV_COUNT(tokens), 4, 0, hashes);
    return reach_of(s, hashes, KV_COUNT(hashes), tier);
}

static uint32_t reach(struct stream *s, enum kv_tier tier)
{
    return reach_salted(s, "", tier);
}

#define T123 "1,1,1,1,2,2,2,2,3,3,3,3"
#define T45 "4,4,4,4,5,5,5,5"
#define FULL "0, 'kv_cache_spec_kind': 'full_attention'"
#define WINDOW(number) \
    number ", 'kv_cache_spec_kind': 'sliding_window', 'kv_cache_spec_sliding_window': 9"
#define STATE(number) number ", 'kv_cache_spec_kind': 'mamba'"
#define STORED(group, medium, hashes, parent, tokens)                                           \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'parent_block_hash': " parent        \
    ", 'token_ids': [" tokens "], 'block_size': 4, 'medium': '" medium "', 'group_idx': " group \
    "}"
#define GPU(group, hashes, parent, tokens) STORED(group, "GPU", hashes, parent, tokens)
#define REMOVED(number, hashes)                                                                    \
    "{'type': 'BlockRemoved', 'block_hashes': [" hashes "], 'medium': 'GPU', 'group_idx': " number \
    "}"
#define CLEARED "{'type': 'AllBlocksCleared'}"

/* Windows alone: only an event that names each block of its tokens tells where they are. */
static void test_windows_alone(void **state)
{
    static const char *const ends[] = {REMOVED("0", "2, 3, 5"), CLEARED};
    struct stream s;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(ends); i++) {
        begin(&s);
        put(&s, GPU(WINDOW("0"), "2,3", "nil", T123));
        assert_true(is_partial(&s));
        put(&s, GPU(WINDOW("0"), "4,5", "3", T45)); /* below an unknown place */
        assert_true(is_partial(&s));
        put(&s, REMOVED("0", "4"));
        assert_true(is_partial(&s));
        put(&s, ends[i]); /* no block is left */
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 0);
        put(&s, GPU(WINDOW("0"), "1,2,3", "nil", T123));
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
        put(&s, GPU(WINDOW("0"), "4,5", "3", T45));
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 5);
        end(&s);
    }
}

#define SALTED(number, hashes, tokens)                                                             \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'parent_block_hash': nil, "             \
    "'token_ids': [" tokens "], 'block_size': 4, 'medium': 'GPU', 'extra_keys': [['pepper'], nil," \
    " nil], 'group_idx': " number "}"

/*
 * The salt stands in a chain's first block, which a window leaves out. What is stored below before an
 * event has named that block is hashed without the salt, so it has no place: a later event that places
 * the blocks above doesn't tell it.
 */
static void test_windows_alone_below_an_unknown_salt(void **state)
{
    struct stream s;

    (void)state;
    for (int stored_first = 0; stored_first < 2; stored_first++) {
        begin(&s);
        if (stored_first)
            put(&s, GPU(WINDOW("0"), "2,3", "nil", T123));
        put(&s, GPU(WINDOW("0"), "4,5", "3", T45)); /* of a block that no event may have named */
        assert_true(is_partial(&s));
        put(&s, SALTED(WINDOW("0"), "1,2,3", T123));
        assert_int_equal(reach_salted(&s, "pepper", KV_TIER_DEVICE), 3);
        assert_true(is_partial(&s)); /* the engine has 5 */
        put(&s, GPU(WINDOW("0"), "4,5", "3", T45));
        assert_int_equal(reach_salted(&s, "pepper", KV_TIER_DEVICE), 5);
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 0);
        end(&s);
    }
}

/* States alone, of which a chunk keeps the last. */
static void test_states_alone(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, GPU(STATE("0"), "", "nil", T123));
    assert_false(is_partial(&s)); /* the engine has nothing */
    put(&s, GPU(STATE("0"), "5", "3", T45));
    assert_true(is_partial(&s));
    end(&s);
}

/* Full attention tells the places, whichever event comes first. */
static void test_windows_beside_full_attention(void **state)
{
    struct stream s;

    (void)state;
    for (int first = 0; first < 2; first++) {
        begin(&s);
        put(&s, first ? GPU(WINDOW("1"), "2,3", "nil", T123) ", " GPU(FULL, "1,2,3", "nil", T123)
                      : GPU(FULL, "1,2,3", "nil", T123) ", " GPU(WINDOW("1"), "2,3", "nil", T123));
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
        end(&s);
    }
}

/* An event without hashes: the group is there, and the engine can't resume before it keeps a block. */
static void test_a_group_that_kept_nothing(void **state)
{
    static const char *const groups[] = {GPU(STATE("1"), "", "nil", T123),
                                         GPU(WINDOW("1"), "", "nil", T123)};
    struct stream s;

    (void)state;
    for (size_t i = 0; i < 2 * KV_COUNT(groups); i++) {
        begin(&s);
        if (i % 2) {
            put(&s, groups[i / 2]);
            put(&s, GPU(FULL, "1,2,3", "nil", T123));
        } else {
            put(&s, GPU(FULL, "1,2,3", "nil", T123));
            assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
            put(&s, groups[i / 2]);
        }
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 0);
        put(&s, i / 2 ? GPU(WINDOW("1"), "2,3", "nil", T123) : GPU(STATE("1"), "3", "nil", T123));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
        end(&s);
    }
}

/* Of groups that keep few blocks, reports of held blocks can't always be told from copies. */
static void test_reports_of_a_group_that_kept_nothing(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    ki_applier_set_habits(&s.applier, &(struct ki_habits){.report_mode = KI_REPORTS_FULL});
    put(&s, GPU(FULL, "1,2,3", "nil", T123) ", " GPU(WINDOW("1"), "2,3", "nil", T123));
    assert_false(is_partial(&s));
    put(&s, GPU(FULL, "4,5", "3", T45) ", " GPU(WINDOW("1"), "", "3", T45));
    assert_true(is_partial(&s));
    end(&s);
}

/*
 * A request stores two blocks, of which the window keeps the first; another one reports that and goes
 * on below. The window has the block once.
 */
static void test_a_report_behind_copies(void **state)
{
    static const enum ki_report_mode modes[] = {KI_REPORTS_UNKNOWN, KI_REPORTS_FULL};
    struct stream s;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(modes); i++) {
        begin(&s);
        ki_applier_set_habits(&s.applier, &(struct ki_habits){.report_mode = modes[i]});
        put(&s,
            GPU(FULL, "1,2", "nil", "1,1,1,1,2,2,2,2") ", " GPU(
                WINDOW("1"), "1", "nil",
                "1,1,1,1,2,2,2,2") ", " GPU(FULL, "1", "nil",
                                            "1,1,1,1") ", " GPU(WINDOW("1"), "1", "nil",
                                                                "1,1,1,1") ", " GPU(FULL, "2", "1",
                                                                                    "2,2,2,2"));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 1);
        put(&s, REMOVED("1", "1"));
        assert_true(is_partial(&s) || reach(&s, KV_TIER_DEVICE) == 0);
        end(&s);
    }
}

/*
 * Windows alone that keep the last blocks of a prompt: nothing tells their places before a report does,
 * which names a block that the engine hasn't.
 */
static void test_a_report_tells_places(void **state)
{
    static const enum ki_report_mode modes[] = {KI_REPORTS_UNKNOWN, KI_REPORTS_FULL};
    static const char kept[] = GPU(WINDOW("0"), "2,3", "nil", T123),
                      report[] = GPU(WINDOW("0"), "1,2,3", "nil", T123) ", " GPU(WINDOW("0"), "4,5",
                                                                                 "3", T45);
    struct stream s;

    (void)state;
    for (size_t i = 0; i < 2 * KV_COUNT(modes); i++) {
        char both[sizeof(kept) + sizeof(report) + 2];

        begin(&s);
        ki_applier_set_habits(&s.applier, &(struct ki_habits){.report_mode = modes[i / 2]});
        (void)snprintf(both, sizeof(both), "%s, %s", kept, report);
        if (i % 2)
            put(&s, kept);
        put(&s, i % 2 ? report : both);
        assert_true(is_partial(&s));
        end(&s);
    }
}

#define BELOW(hashes, parent, tokens) STORED(FULL, "CPU", hashes, parent, tokens)
#define INDEXER(hashes, parent, tokens) \
    GPU("2, 'kv_cache_spec_kind': 'mla_attention'", hashes, parent, tokens)
#define REMOVED_BELOW(hashes) \
    "{'type': 'BlockRemoved', 'block_hashes': [" hashes "], 'medium': 'CPU', 'group_idx': 0}"

/* HiSparse: one group lives below the device, one on it. The engine resumes from what both have. */
static void test_groups_in_different_tiers(void **state)
{
    static const char below[] = BELOW("1,2,3", "nil", T123),
                      device[] = INDEXER("1,2,3", "nil", T123);
    struct stream s;

    (void)state;
    for (int order = 0; order < 3; order++) {
        begin(&s);
        if (order == 0)
            put(&s, BELOW("1,2,3", "nil", T123) ", " INDEXER("1,2,3", "nil", T123));
        if (order == 1)
            put(&s, INDEXER("1,2,3", "nil", T123) ", " BELOW("1,2,3", "nil", T123));
        if (order == 2) {
            put(&s, device);
            assert_false(is_partial(&s));
            put(&s, below);
        }
        assert_false(is_partial(&s));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
        put(&s, INDEXER("4,5", "3", T45));
        assert_int_equal(reach(&s, KV_TIER_HOST), 3);
        put(&s, BELOW("4,5", "3", T45));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 5);
        put(&s, REMOVED("2", "5"));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 4);
        put(&s, REMOVED_BELOW("4,3"));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 2);
        assert_int_equal(reach(&s, KV_TIER_HOST), 2);
        assert_false(is_partial(&s));
        put(&s, GPU(FULL, "1", "nil", "1,1,1,1")); /* the group comes to the device after all */
        assert_true(is_partial(&s));               /* what it has there isn't known */
        put(&s, CLEARED);
        put(&s, GPU(FULL, "1", "nil", "1,1,1,1") ", " INDEXER("1,2,3", "nil", T123));
        assert_int_equal(reach(&s, KV_TIER_DEVICE), 1);
        end(&s);
    }
}

/* Blocks below came in a batch of their own, before the device's: they count as offloaded. */
static void test_a_home_that_shows_late(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, BELOW("1,2,3", "nil", T123));
    assert_true(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_HOST), 3);
    put(&s, INDEXER("1,2,3", "nil", T123));
    assert_true(is_partial(&s));
    put(&s, CLEARED ", " CLEARED);
    assert_false(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_HOST), 0);
    put(&s, INDEXER("1,2,3", "nil", T123));
    put(&s, BELOW("1,2", "nil", "1,1,1,1,2,2,2,2"));
    assert_false(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_DEVICE), 2);
    end(&s);
}

/* Two groups of an engine that loads blocks from a store, and shows them on the device afterwards. */
static void test_loaded_blocks(void **state)
{
    static const char loaded[] = BELOW("1,2,3", "nil", T123) ", " STORED(
        "1, 'kv_cache_spec_kind': 'full_attention'", "CPU", "1,2,3", "nil", T123);
    static const char both[] = GPU("1, 'kv_cache_spec_kind': 'full_attention'", "1,2,3", "nil",
                                   T123) ", " GPU(FULL, "1,2,3", "nil", T123);
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, loaded);
    assert_true(is_partial(&s));
    put(&s, both);
    assert_false(ki_applier_reasons(&s.applier) & KI_BECAUSE(UNKNOWN_GROUP));
    put(&s, REMOVED("0", "3") ", " REMOVED("1", "3"));
    assert_int_equal(reach(&s, KV_TIER_DEVICE), 2);
    end(&s);
}

/* A reset tells a clear of each pool. One clear alone may be of either. */
static void test_clears_of_two_pools(void **state)
{
    static const char both[] = INDEXER("1,2,3", "nil", T123) ", " BELOW("1,2,3", "nil", T123);
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, both);
    put(&s, CLEARED ", " CLEARED);
    assert_false(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_HOST), 0);
    put(&s, INDEXER("1,2,3", "nil", T123));
    assert_int_equal(reach(&s, KV_TIER_HOST), 0);
    put(&s, BELOW("1,2,3", "nil", T123));
    assert_false(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
    put(&s, CLEARED);
    assert_true(is_partial(&s));
    put(&s, CLEARED ", " CLEARED ", " CLEARED); /* the third one again of one pool */
    assert_true(is_partial(&s));
    put(&s, CLEARED ", " CLEARED);
    assert_false(is_partial(&s));
    put(&s, both);
    assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
    assert_false(is_partial(&s));
    end(&s);
}

/* Offloaded blocks of a group on the device count for themselves: with those of a group at home below nobody knows. */
static void test_a_home_beside_offloading(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, INDEXER("1,2,3", "nil", T123) ", " BELOW("1,2,3", "nil", T123));
    put(&s, STORED("2, 'kv_cache_spec_kind': 'mla_attention'", "CPU", "1,2,3", "nil", T123));
    assert_true(is_partial(&s));
    assert_int_equal(reach(&s, KV_TIER_DEVICE), 3);
    end(&s);
}

/* Windows may be offloaded without having been on the device's list: below alone, they aren't at home there. */
static void test_windows_below(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, GPU(FULL, "1,2,3", "nil", T123));
    put(&s, STORED(WINDOW("1"), "CPU", "1,2,3", "nil", T123));
    assert_true(is_partial(&s));
    end(&s);
}

/* Blocks that the engine offloads were on the device before. Another owner's tell nothing. */
static void test_offloading(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, GPU(FULL, "1,2,3", "nil", T123) ", " STORED(FULL, "CPU", "1,2,3", "nil", T123));
    assert_false(is_partial(&s));
    put(&s, REMOVED("0", "3,2,1"));
    assert_int_equal(reach(&s, KV_TIER_HOST), 3);
    assert_false(is_partial(&s));
    put(&s, STORED(FULL ", 'ownership': 'mooncake'", "CPU", "1,2,3", "nil", T123));
    assert_false(is_partial(&s));
    end(&s);
}

/* Chunked local attention needs blocks from its chunk's start on; its events don't tell where that is. */
static void test_chunked_local_attention(void **state)
{
    struct stream s;

    (void)state;
    begin(&s);
    put(&s, GPU(FULL, "1,2,3", "nil", T123) ", " GPU(
                "1, 'kv_cache_spec_kind': 'chunked_local_attention'", "1,2,3", "nil", T123));
    assert_true(is_partial(&s));
    end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows_alone),
        cmocka_unit_test(test_windows_alone_below_an_unknown_salt),
        cmocka_unit_test(test_states_alone),
        cmocka_unit_test(test_windows_beside_full_attention),
        cmocka_unit_test(test_a_group_that_kept_nothing),
        cmocka_unit_test(test_reports_of_a_group_that_kept_nothing),
        cmocka_unit_test(test_a_report_behind_copies),
        cmocka_unit_test(test_a_report_tells_places),
        cmocka_unit_test(test_groups_in_different_tiers),
        cmocka_unit_test(test_a_home_that_shows_late),
        cmocka_unit_test(test_loaded_blocks),
        cmocka_unit_test(test_clears_of_two_pools),
        cmocka_unit_test(test_a_home_beside_offloading),
        cmocka_unit_test(test_windows_below),
        cmocka_unit_test(test_offloading),
        cmocka_unit_test(test_chunked_local_attention),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
