// SPDX-License-Identifier: Apache-2.0
/* Batches of an engine's events, and what the index then finds. */
#include "base/unit.h"

#include "event/pack.h"
#include "event/reader/reader.h"
#include "indexer/view/apply.h"

struct stream {
    struct kvi_index *index;
    struct ki_applier applier;
    struct kv_buf bytes;
};

static void begin(struct stream *s, enum ki_report_mode mode)
{
    struct ki_habits habits = {.report_mode = mode};

    memset(s, 0, sizeof(*s));
    assert_int_equal(kvi_create(NULL, &s->index), 0);
    assert_int_equal(ki_applier_init(&s->applier, 7, 0, 4, KI_MM_PLACED), 0);
    ki_applier_set_habits(&s->applier, &habits);
}

static void end(struct stream *s)
{
    ki_applier_fini(&s->applier);
    kvi_destroy(s->index);
    kv_buf_fini(&s->bytes);
}

/* Apply a batch, which is packed from the text. */
#define PUT(s, ...)                                                                       \
    do {                                                                                  \
        kv_buf_clear(&(s)->bytes);                                                        \
        pack(&(s)->bytes, __VA_ARGS__);                                                   \
        assert_int_equal(                                                                 \
            ki_applier_apply(&(s)->applier, (s)->index, (s)->bytes.data, (s)->bytes.len), \
            KI_APPLIED);                                                                  \
    } while (0)

/*
 * Return how many blocks of a prompt that starts with (@first, 1, 1, 1), (@second, 1, 1, 1) @rank has
 * on the device.
 */
static uint32_t reach(struct stream *s, const char *salt, uint32_t rank, uint32_t first,
                      uint32_t second)
{
    const uint32_t tokens[8] = {first, 1, 1, 1, second, 1, 1, 1};
    struct kvi_matches matches = {0};
    uint64_t hashes[2];
    uint32_t n = 0;

    kve_hash_tokens(kve_seed(NULL, 0, salt, strlen(salt)), tokens, 8, 4, 0, hashes);
    assert_int_equal(kvi_find(s->index, hashes, 2, &matches), 0);
    for (size_t i = 0; i < matches.n; i++)
        if (matches.items[i].holder.rank == rank)
            n = matches.items[i].reach[KV_TIER_DEVICE];
    kvi_matches_fini(&matches);
    return n;
}

/* -- groups ------------------------------------------------------------------------------------ */

#define GROUP(number, kind)                                                            \
    "{'type': 'BlockStored', 'block_hashes': [1,2], 'token_ids': [%u,1,1,1,2,1,1,1], " \
    "'block_size': 4, 'medium': 'GPU', 'group_idx': " number ", 'kv_cache_spec_kind': " kind "}"

/*
 * One stream of many ranks, each with a window beside full attention. Removals name only the group's
 * number: each rank's was learned.
 */
static void test_groups_of_many_ranks(void **state)
{
    struct stream s;

    (void)state;
    begin(&s, KI_REPORTS_INCREMENTAL);
    for (uint32_t rank = 0; rank < KI_MAX_RANKS; rank++)
        PUT(&s,
            "[1.0, [" GROUP("0", "'full_attention'") ", " GROUP(
                "1", "'sliding_window', 'kv_cache_spec_sliding_window': 9") "], %u]",
            rank, rank, rank);
    for (uint32_t rank = 0; rank < KI_MAX_RANKS; rank += 341) {
        assert_int_equal(reach(&s, "", rank, rank, 2), 2);
        PUT(&s, "[1.0, [{'type': 'BlockRemoved', 'block_hashes': [2], 'group_idx': 0}], %u]", rank);
        assert_int_equal(reach(&s, "", rank, rank, 2), 1);
        PUT(&s, "[1.0, [{'type': 'BlockRemoved', 'block_hashes': [1], 'group_idx': 1}], %u]", rank);
        assert_int_equal(reach(&s, "", rank, rank, 2), 0);
    }
    assert_false(ki_applier_reasons(&s.applier));
    end(&s);
}

/* A rank with more groups than the reader remembers: full attention counts, the view is partial. */
static void test_too_many_groups(void **state)
{
    struct stream s;

    (void)state;
    begin(&s, KI_REPORTS_INCREMENTAL);
    for (unsigned group = 1; group <= KVE_MAX_GROUPS; group++)
        PUT(&s,
            "[1.0, [{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [], 'medium': 'GPU', "
            "'block_size': 4, 'group_idx': %u, 'kv_cache_spec_kind': 'mamba'}]]",
            group);
    assert_false(kve_reader_has_main(s.applier.reader, 0));
    PUT(&s, "[1.0, [" GROUP("0", "'full_attention'") "]]", 0u);
    assert_true(kve_reader_has_main(s.applier.reader, 0));
    assert_true(ki_applier_reasons(&s.applier));
    end(&s);
}

/* -- salts ------------------------------------------------------------------------------------- */

#define SALTED(hashes, parent, tokens)                                                   \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'parent_block_hash': " parent \
    ", 'token_ids': [" tokens "], 'block_size': 4, 'medium': 'GPU', 'cache_salt': 'me'}"

/* Begin with little room for salts, and a salted block that stays: hash 9, tokens 9,1,1,1. */
static void begin_salted(struct stream *s, enum ki_report_mode mode)
{
    begin(s, mode);
    s->applier.reader->salts.limit = 100;
    PUT(s, "[1.0, [" SALTED("9", "nil", "9,1,1,1") "]]");
}

/* The room sufficed, and a block below the one that stays has its salt. */
static void end_salted(struct stream *s)
{
    assert_int_equal(s->applier.stats.skipped[KVE_SKIP_NAMESPACE], 0);
    assert_false(ki_applier_reasons(&s->applier));
    PUT(s, "[1.0, [{'type': 'BlockStored', 'block_hashes': [8], 'parent_block_hash': 9, "
           "'token_ids': [8,1,1,1], 'block_size': 4, 'medium': 'GPU'}]]");
    assert_int_equal(reach(s, "me", 0, 9, 8), 2);
    assert_int_equal(reach(s, "", 0, 9, 8), 0);
    end(s);
}

/* A reported block may have one copy more: its salt stays until that is removed, too. */
static void test_salts_of_reports(void **state)
{
    struct stream s;

    (void)state;
    begin_salted(&s, KI_REPORTS_FULL);
    for (unsigned h = 1000; h < 2000; h += 10) {
        PUT(&s, "[1.0, [" SALTED("%u,%u", "nil", "%u,1,1,1,1,1,1,1") "]]", h, h + 1, h);
        PUT(&s,
            "[1.0, [" SALTED("%u,%u", "nil", "%u,1,1,1,1,1,1,1") ", " SALTED("%u", "%u",
                                                                             "2,1,1,1") "]]",
            h, h + 1, h, h + 2, h + 1);
        PUT(&s, "[1.0, [{'type': 'BlockRemoved', 'block_hashes': [%u,%u,%u], 'medium': 'GPU'}]]",
            h + 2, h + 1, h);
        assert_true(ki_applier_reasons(&s.applier));
        PUT(&s, "[1.0, [{'type': 'BlockRemoved', 'block_hashes': [%u,%u], 'medium': 'GPU'}]]",
            h + 1, h);
    }
    end_salted(&s);
}

/* A removal that tells the copies left takes all at once. */
static void test_salts_of_copies(void **state)
{
    struct stream s;

    (void)state;
    begin_salted(&s, KI_REPORTS_INCREMENTAL);
    for (unsigned h = 1000; h < 1200; h++) {
        PUT(&s, "[1.0, [" SALTED("%u", "nil", "%u,1,1,1") ", " SALTED("%u", "nil", "%u,1,1,1") "]]",
            h, h, h, h);
        PUT(&s,
            "[1.0, [{'type': 'BlockRemoved', 'block_hashes': [%u], "
            "'remaining_copy_counts': [0], 'medium': 'GPU'}]]",
            h);
    }
    end_salted(&s);
}

/* A clear of the device leaves lower tiers, and with them the salts of the rank. */
static void test_salts_of_clears(void **state)
{
    struct stream s;

    (void)state;
    begin_salted(&s, KI_REPORTS_INCREMENTAL);
    PUT(&s, "[1.0, [{'type': 'BlockStored', 'block_hashes': [9], 'token_ids': [], 'block_size': 0, "
            "'medium': 'CPU'}]]");
    for (unsigned h = 1000; h < 1200; h++) {
        PUT(&s, "[1.0, [" SALTED("%u", "nil", "%u,1,1,1") "]]", h, h);
        if (h % 20 == 0)
            PUT(&s, "[1.0, [['AllBlocksCleared']]]");
    }
    PUT(&s, "[1.0, [" SALTED("9", "nil", "9,1,1,1") "]]");
    end_salted(&s);
}

/* After a purge the index lacks blocks that the engine still has: their salts stay. */
static void test_salts_of_purged_blocks(void **state)
{
    struct stream s;
    uint32_t rank = 0;

    (void)state;
    for (int only_rank = 0; only_rank < 2; only_rank++) {
        begin_salted(&s, KI_REPORTS_INCREMENTAL);
        if (only_rank)
            ki_applier_purge_ranks(&s.applier, s.index, &rank, 1);
        else
            ki_applier_purge(&s.applier, s.index, false);
        s.applier.reader->salts.n_new = 40000; /* a sweep is due */
        PUT(&s, "[1.0, [" SALTED("5", "nil", "5,1,1,1") "]]");
        assert_non_null(kve_salts_find(&s.applier.reader->salts, 0, 9));
        /* Another process's are swept again. */
        ki_applier_purge(&s.applier, s.index, true);
        s.applier.reader->salts.n_new = 40000;
        PUT(&s, "[1.0, [" SALTED("6", "nil", "6,1,1,1") "]]");
        assert_null(kve_salts_find(&s.applier.reader->salts, 0, 9));
        end(&s);
    }
}

/* -- copies ------------------------------------------------------------------------------------ */

#define STORED(hashes, parent, tokens, more)                                             \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'parent_block_hash': " parent \
    ", 'token_ids': [" tokens "], 'block_size': 4, 'medium': 'GPU'" more "}"
#define REMOVED(hashes) "{'type': 'BlockRemoved', 'block_hashes': [" hashes "], 'medium': 'GPU'}"

/*
 * An idle vLLM gets one prompt of whole blocks again and again: it evicts an old copy of the last
 * block, and computes a new one. An engine that announces only the last copy's removal says the same.
 */
static void one_prompt_for_ever(enum ki_report_mode mode, const char *kind, bool is_vllm)
{
    struct stream s;

    begin(&s, mode);
    PUT(&s, "[1.0, [" STORED("5,6", "nil", "5,1,1,1,6,1,1,1", "%s") "]]", kind);
    PUT(&s, "[1.0, [" STORED("6", "5", "6,1,1,1", "%s") "]]", kind);
    for (int turn = 0; turn < 200; turn++) {
        assert_int_equal(ki_applier_reasons(&s.applier) != 0, turn >= 64 && !is_vllm);
        PUT(&s, "[1.0, [" REMOVED("6") "]]");
        assert_int_equal(reach(&s, "", 0, 5, 6), 2);
        PUT(&s, "[1.0, [" STORED("6", "5", "6,1,1,1", "%s") "]]", kind);
        assert_int_equal(reach(&s, "", 0, 5, 6), 2);
    }
    PUT(&s, "[1.0, [" REMOVED("6") "]]");
    PUT(&s, "[1.0, [" REMOVED("6") "]]"); /* shows that there were two */
    assert_false(ki_applier_reasons(&s.applier));
    assert_int_equal(reach(&s, "", 0, 5, 6), 1);
    end(&s);
}

static void test_one_prompt_for_ever(void **state)
{
    (void)state;
    one_prompt_for_ever(KI_REPORTS_UNKNOWN, "", false);
    one_prompt_for_ever(KI_REPORTS_INCREMENTAL, "", true);
    one_prompt_for_ever(KI_REPORTS_UNKNOWN,
                        ", 'group_idx': 0, 'kv_cache_spec_kind': 'full_attention'", true);
}

/*
 * A request that skips the cache (prompt logprobs) computes two held blocks anew, beside a request
 * that goes on below them. The two together look like a report. Its own copy stays with the other's.
 */
static void test_a_request_that_skips_the_cache(void **state)
{
    static const enum ki_report_mode modes[] = {KI_REPORTS_UNKNOWN, KI_REPORTS_INCREMENTAL,
                                                KI_REPORTS_FULL};
    struct stream s;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(modes); i++) {
        begin(&s, modes[i]);
        PUT(&s, "[1.0, [" STORED("1,2", "nil", "1,1,1,1,2,1,1,1", "") "]]");
        PUT(&s, "[1.0, [" STORED("1,2", "nil", "1,1,1,1,2,1,1,1",
                                 "") ", " STORED("3", "2", "3,1,1,1", "") "]]");
        PUT(&s, "[1.0, [" REMOVED("2") "]]");
        assert_int_equal(reach(&s, "", 0, 1, 2), 2);
        PUT(&s, "[1.0, [" REMOVED("3") "]]");
        if (!ki_applier_reasons(&s.applier))
            assert_int_equal(reach(&s, "", 0, 1, 2), 2);
        /* Without a block below, nothing tells whether there is another copy. */
        PUT(&s, "[1.0, [" STORED("1,2", "nil", "1,1,1,1,2,1,1,1",
                                 "") ", " STORED("3", "2", "3,1,1,1", "") "]]");
        PUT(&s, "[1.0, [" REMOVED("3") ", " REMOVED("2") "]]");
        assert_true(ki_applier_reasons(&s.applier) || reach(&s, "", 0, 1, 2) == 2);
        end(&s);
    }
}

/* -- streams that contradict themselves ------------------------------------------------------- */

#define STORE(hashes, parent, tokens, more)                                              \
    "{'type': 'BlockStored', 'block_hashes': [" hashes "], 'parent_block_hash': " parent \
    ", 'token_ids': [" tokens "], 'block_size': 4" more "}"
#define REMOVE(hashes, more) "{'type': 'BlockRemoved', 'block_hashes': [" hashes "]" more "}"
#define ONE "1,1,1,1"
#define TWO "2,1,1,1"

/*
 * Each stream shows by its last batch that the index hasn't what the engine has. A clear of the
 * device ends that.
 */
static void test_contradictions(void **state)
{
    static const struct {
        const char *before, *last;
        bool lower; /* it is about a tier that the clear leaves alone */
    } cases[] = {
        /* a block below one that was removed, or that never was */
        {STORE("1,2", "nil", ONE "," TWO, "") "," REMOVE("2,1", ""), STORE("3", "1", TWO, ""),
         false},
        {STORE("1", "nil", ONE, ""), STORE("3", "9", TWO, ""), false},
        /* a hash at two places */
        {STORE("1,2", "nil", ONE "," TWO, ""), STORE("3,2", "nil", "3,1,1,1," TWO, ""), false},
        {STORE("1,2", "nil", ONE "," TWO, "") "," STORE("3", "nil", "3,1,1,1", ""),
         STORE("2", "3", TWO, ""), false},
        {STORE("1,2", "nil", ONE "," TWO, ", 'medium': 'CPU'"),
         STORE("3,2", "nil", "3,1,1,1," TWO, ", 'medium': 'CPU'"), true},
        /* ... one of which is below the other */
        {STORE("1,2", "nil", ONE "," TWO, ""), STORE("1", "2", ONE, ""), false},
        /* a place with two hashes */
        {STORE("1,2", "nil", ONE "," TWO, ""), STORE("3", "1", TWO, ""), false},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct stream s;

        begin(&s, KI_REPORTS_INCREMENTAL);
        PUT(&s, "[1.0, [%s]]", cases[i].before);
        assert_false(ki_applier_reasons(&s.applier));
        PUT(&s, "[1.0, [%s]]", cases[i].last);
        assert_true(ki_applier_reasons(&s.applier));
        kv_buf_clear(&s.bytes);
        pack(&s.bytes, "[1.0, [['AllBlocksCleared']]]");
        (void)ki_applier_apply(&s.applier, s.index, s.bytes.data, s.bytes.len);
        assert_int_equal(ki_applier_reasons(&s.applier) != 0, cases[i].lower);
        ki_applier_purge(&s.applier, s.index, true);
        assert_false(ki_applier_reasons(&s.applier));
        end(&s);
    }
}

/* None of these does. */
static void test_no_contradictions(void **state)
{
    static const char *const batches[] = {
        STORE("1,2", "nil", ONE "," TWO, "") "," STORE("1", "nil", ONE, ""),
        STORE("2", "1", TWO, ""),
        STORE("1,2", "nil", ONE "," TWO, ", 'medium': 'CPU'"),
        STORE("2", "1", "7,1,1,1", ", 'medium': 'CPU'"), /* tokens without an image's key */
        STORE("8", "7", TWO, ", 'medium': 'CPU'"),       /* a lower tier keeps what it can't use */
        REMOVE("1,2", ", 'medium': 'CPU'"),
        REMOVE("2,2,1,1", ""),
        STORE("1,2", "nil", "5,1,1,1," TWO, ""), /* other blocks by old names */
    };
    struct stream s;

    (void)state;
    begin(&s, KI_REPORTS_INCREMENTAL);
    for (size_t i = 0; i < KV_COUNT(batches); i++) {
        PUT(&s, "[1.0, [%s]]", batches[i]);
        assert_false(ki_applier_reasons(&s.applier));
    }
    end(&s);
}

/* Images are left out of the hashes: places with two hashes are to be expected. */
static void test_images_left_out(void **state)
{
    struct stream s;

    (void)state;
    begin(&s, KI_REPORTS_INCREMENTAL);
    ki_applier_fini(&s.applier);
    assert_int_equal(ki_applier_init(&s.applier, 7, 0, 4, KI_MM_IGNORED), 0);
    PUT(&s, "[1.0, [" STORE("1", "nil", ONE, ", 'extra_keys': [[['a', 0]]]") "]]");
    PUT(&s, "[1.0, [" STORE("2", "nil", ONE, ", 'extra_keys': [[['b', 0]]]") "]]");
    assert_false(ki_applier_reasons(&s.applier));
    end(&s);
}

/* -- components ------------------------------------------------------------------------------- */

#define BOTH ", 'component_types': ['FULL', 'SWA']"
#define FULL ", 'component_types': ['FULL']"

/* The view is partial exactly while some block lacks a component. */
static void test_blocks_without_components(void **state)
{
    static const struct {
        const char *batch;
        bool partial;
        uint32_t reach;
    } steps[] = {
        {STORE("1,2", "nil", ONE "," TWO, BOTH), false, 2},
        {STORE("2", "1", TWO, FULL), true, 2},
        {REMOVE("2", ""), false, 1}, /* one removal ends it */
        {STORE("2", "1", TWO, FULL), true, 2},
        {STORE("2", "1", TWO, BOTH), false, 2},
        {REMOVE("2", ", 'component_types': ['SWA']"), true, 2},
        {STORE("1,2", "nil", ONE "," TWO, FULL), true, 2},
        {STORE("1", "nil", ONE, BOTH), true, 2},
        {STORE("1,2", "nil", ONE "," TWO, BOTH), false, 2},
        {STORE("1,2", "nil", ONE "," TWO, FULL), true, 2},
        {REMOVE("2", ""), true, 1},
        {"['AllBlocksCleared']", false, 0},
        {STORE("1", "nil", ONE, FULL), true, 1},
    };
    struct stream s;

    (void)state;
    begin(&s, KI_REPORTS_UNKNOWN);
    for (size_t i = 0; i < KV_COUNT(steps); i++) {
        kv_buf_clear(&s.bytes);
        pack(&s.bytes, "[1.0, [%s]]", steps[i].batch);
        (void)ki_applier_apply(&s.applier, s.index, s.bytes.data, s.bytes.len);
        assert_int_equal(ki_applier_reasons(&s.applier) != 0, steps[i].partial);
        assert_int_equal(reach(&s, "", 0, 1, 2), steps[i].reach);
    }
    ki_applier_purge_ranks(&s.applier, s.index, &(uint32_t){0}, 1);
    assert_false(ki_applier_reasons(&s.applier));
    end(&s);
}

/* -- clears of a tier ------------------------------------------------------------------------- */

/* Only a clear that leaves no tier out says that the cache is empty. */
static void test_clears_that_name_a_tier(void **state)
{
    static const struct {
        const char *store, *clear;
        enum ki_applied applied;
    } cases[] = {
        {STORE("1", "nil", ONE, ""), "['AllBlocksCleared', 'CPU_PINNED']", KI_APPLIED},
        {STORE("1", "nil", ONE, ""), "['AllBlocksCleared', 'GPU']", KI_APPLIED_CLEARED},
        {REMOVE("1", ""), "['AllBlocksCleared', 'CPU_PINNED']",
         KI_APPLIED}, /* empty all the same */
        {STORE("1", "nil", ONE, ", 'medium': 'CPU_PINNED'"), "['AllBlocksCleared', 'CPU_PINNED']",
         KI_APPLIED},
        {STORE("1", "nil", ONE, ", 'medium': 'CPU_PINNED'"), "['AllBlocksCleared']",
         KI_APPLIED_CLEARED},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct stream s;

        begin(&s, KI_REPORTS_INCREMENTAL);
        PUT(&s, "[1.0, [%s]]", cases[i].store);
        kv_buf_clear(&s.bytes);
        pack(&s.bytes, "[1.0, [%s]]", cases[i].clear);
        assert_int_equal(ki_applier_apply(&s.applier, s.index, s.bytes.data, s.bytes.len),
                         cases[i].applied);
        end(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups_of_many_ranks),
        cmocka_unit_test(test_too_many_groups),
        cmocka_unit_test(test_salts_of_reports),
        cmocka_unit_test(test_salts_of_copies),
        cmocka_unit_test(test_salts_of_clears),
        cmocka_unit_test(test_salts_of_purged_blocks),
        cmocka_unit_test(test_one_prompt_for_ever),
        cmocka_unit_test(test_a_request_that_skips_the_cache),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_no_contradictions),
        cmocka_unit_test(test_images_left_out),
        cmocka_unit_test(test_blocks_without_components),
        cmocka_unit_test(test_clears_that_name_a_tier),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
