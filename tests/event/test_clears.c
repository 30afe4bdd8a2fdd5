// SPDX-License-Identifier: Apache-2.0
/* Which tiers a clear of an engine empties, and which clears leave that open. */
#include "event/reader_unit.h"

#include "event/reader/reader.h"

enum { DEVICE = 1 << KV_TIER_DEVICE, HOST = 1 << KV_TIER_HOST, ALL = (1 << KV_N_TIERS) - 1 };

static void expect_clear(uint32_t source, uint32_t tiers)
{
    const struct kve_op *op = expect_op(KVE_OP_CLEAR, KV_TIER_DEVICE, 0);

    assert_int_equal(op->source, source);
    assert_int_equal(op->tiers, tiers);
}

static void test_clears(void **state)
{

    (void)state;
    event("{'type': 'AllBlocksCleared', 'ownership': 'mooncake'}");
    expect_clear(1, ALL);
    event("['AllBlocksCleared', 'mooncake']");
    expect_clear(1, ALL);
    event("['AllBlocksCleared']");
    expect_clear(0, DEVICE);
    /* vLLM's reset empties its GPU pool alone, SGLang's flush its tiers. */
    event(MAP_1 ", 'medium': 'CPU'}");
    event(MAP_1 ", 'medium': 'STORAGE'}");
    event("{'type': 'AllBlocksCleared'}");
    expect_clear(0, DEVICE);
    event(MAP_1 ", 'medium': 'CPU_PINNED'}");
    event("['AllBlocksCleared', nil]");
    expect_clear(0, DEVICE | HOST);
    event(MAP_1 ", 'medium': 'DISK', 'ownership': 'x'}");
    event("['AllBlocksCleared', 7]");
    expect_clear(0, DEVICE | HOST);
    /* The next process may be vLLM, which keeps its lower tiers. */
    kve_reader_reset(reader);
    event(MAP_1 ", 'medium': 'CPU'}");
    event("['AllBlocksCleared', nil]");
    expect_clear(0, DEVICE);
}

/* SimpleCPUOffloadConnector: a pool below the device that is reset with an event of the same form. */
static void test_clears_of_a_pool(void **state)
{
    static const char local[] = ", 'medium': 'CPU', 'locality': 'LOCAL'}";
    static const struct {
        const char *before, *between, *after;
        uint32_t tiers[2];
        bool unsure[2];
    } cases[] = {
        {"", "", "", {DEVICE, HOST}, {true, true}},
        {"", "", "cpu", {DEVICE, HOST}, {true, true}},
        {"", "", "gpu", {DEVICE, DEVICE}, {false, false}},
        {"cpu", "", "", {HOST, HOST}, {false, false}},
        {"gpu", "", "", {DEVICE, HOST}, {true, true}},
        {"", "gpu", "", {DEVICE, HOST}, {false, true}},
        {"", "gpu", "cpu", {DEVICE, HOST}, {false, true}},
        {"", "cpu", "", {DEVICE, HOST}, {true, false}},
    };

    (void)state;
    event("%s%s", MAP_1, local);
    event("['AllBlocksCleared']");
    assert_int_equal(batch.ops[0].tiers, DEVICE);
    assert_true(batch.ops[0].unsure);
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        const char *parts[] = {cases[i].before, "clear", cases[i].between, "clear", cases[i].after};
        char text[4096];
        int n = snprintf(text, sizeof(text), "[1.5, [");
        size_t cleared = 0;

        for (size_t k = 0; k < KV_COUNT(parts); k++) {
            const char *what = parts[k];

            if (*what)
                n += snprintf(text + n, sizeof(text) - (size_t)n, "%s%s%s",
                              text[n - 1] == '[' ? "" : ", ",
                              *what == 'c' && what[1] == 'l' ? "['AllBlocksCleared']" : MAP_1,
                              *what == 'g'                     ? "}"
                              : *what == 'c' && what[1] == 'p' ? local
                                                               : "");
        }
        snprintf(text + n, sizeof(text) - (size_t)n, "], 0]");
        assert_int_equal(decode(text), 0);
        for (size_t k = 0; k < batch.n_ops; k++) {
            if (batch.ops[k].type != KVE_OP_CLEAR)
                continue;
            assert_int_equal(batch.ops[k].tiers, cases[i].tiers[cleared]);
            assert_int_equal(batch.ops[k].unsure, cases[i].unsure[cleared]);
            cleared++;
        }
        assert_int_equal(cleared, 2);
    }
    /* Another connector's tier says nothing of where it is. */
    event("%s, 'medium': 'CPU'}", MAP_1);
    assert_int_equal(decode("[1.5, [['AllBlocksCleared'], ['AllBlocksCleared']], 0]"), 0);
    assert_int_equal(batch.ops[1].tiers, DEVICE);
    assert_false(batch.ops[0].unsure || batch.ops[1].unsure);
}

/* A clear may name a tier: the others, and the connector's doubtful pools, have nothing to do with it. */
static void test_clears_of_a_tier(void **state)
{
    static const struct {
        const char *event;
        uint32_t tiers;
        uint32_t source;
    } cases[] = {
        {"{'type': 'AllBlocksCleared', 'medium': 'GPU'}", DEVICE, 0},
        {"{'type': 'AllBlocksCleared', 'medium': 'CPU'}", HOST, 0},
        {"['AllBlocksCleared', 'CPU']", HOST, 0},
        {"['AllBlocksCleared', 'DISK']", 1u << KV_TIER_DISK, 0},
        {"{'type': 'AllBlocksCleared', 'medium': 'CPU', 'ownership': 'ssd'}", HOST, 1},
        {"['AllBlocksCleared', 'ssd']", (1u << KV_N_TIERS) - 1, 1}, /* an owner by now */
        {"{'type': 'AllBlocksCleared', 'medium': nil}", DEVICE, 0},
    };

    (void)state;
    event("%s, 'medium': 'CPU', 'locality': 'LOCAL'}", MAP_1);
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        event("%s", cases[i].event);
        assert_int_equal(batch.n_ops, 1);
        assert_int_equal(batch.ops[0].type, KVE_OP_CLEAR);
        assert_int_equal(batch.ops[0].tiers, cases[i].tiers);
        assert_int_equal(batch.ops[0].source, cases[i].source);
        assert_int_equal(batch.ops[0].unsure, i + 1 == KV_COUNT(cases));
    }
    event("{'type': 'AllBlocksCleared', 'medium': 'TAPE'}");
    expect_none(KVE_SKIP_MEDIUM);
    event("{'type': 'AllBlocksCleared', 'locality': 'REMOTE'}");
    expect_none(KVE_SKIP_REMOTE);
}

/* No engine is known by such names: its clear may have emptied the tier or not. */
static void test_clears_of_unknown_meaning(void **state)
{
    (void)state;
    event("%s, 'medium': 'DRAM'}", MAP_1);
    event("['AllBlocksCleared']");
    assert_int_equal(batch.ops[0].tiers, DEVICE);
    assert_int_equal(reader->n_lost, 1);
    assert_int_equal(reader->lost[0].tiers, HOST);
    event("['AllBlocksCleared', 'DRAM']");
    assert_int_equal(batch.ops[0].tiers, HOST);
    assert_int_equal(reader->n_lost, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_clears),
        T(test_clears_of_a_pool),
        T(test_clears_of_a_tier),
        T(test_clears_of_unknown_meaning),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
