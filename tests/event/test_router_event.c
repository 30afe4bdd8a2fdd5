// SPDX-License-Identifier: Apache-2.0
/* RouterEvent JSON: both generations are read, the older one is written, and reading inverts
 * writing. */
#include "base/unit.h"

#include "event/router/packed_event.h"
#include "event/router/router_event.h"

static struct kve_router_scratch scratch;

static int read_event(const char *text, struct kve_router_event *ret)
{
    struct kv_json json;
    int rc;

    kv_json_init(&json, text, strlen(text));
    rc = kve_router_event_read(&json, &scratch, ret);
    return rc ? rc : kv_json_finish(&json);
}

static void test_read_first_generation(void **state)
{
    struct kve_router_event ev;

    (void)state;
    assert_int_equal(
        read_event(
            "{\"worker_id\":18446744073709551615,\"event\":{\"event_id\":7,\"data\":{\"stored\":{"
            "\"parent_hash\":null,\"blocks\":[{\"block_hash\":18446744073709551614,"
            "\"tokens_hash\":9143094415614847814,\"mm_extra_info\":null}]}},\"dp_rank\":3}}",
            &ev),
        0);
    assert_true(ev.holder.worker == UINT64_MAX);
    assert_int_equal(ev.holder.rank, 3);
    assert_int_equal(ev.event_id, 7);
    assert_int_equal(ev.type, KVE_OP_STORE);
    assert_int_equal(ev.tier, KV_TIER_DEVICE);
    assert_false(ev.has_parent);
    assert_int_equal(ev.n, 1);
    assert_true(ev.blocks[0].hash == UINT64_MAX - 1);
    assert_true(ev.blocks[0].tokens_hash == UINT64_C(9143094415614847814));
    assert_int_equal(read_event("{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":{\"removed\":{"
                                "\"block_hashes\":[1,-1,3]}},\"dp_rank\":0}}",
                                &ev),
                     0);
    assert_int_equal(ev.type, KVE_OP_REMOVE);
    assert_int_equal(ev.n, 3);
    assert_true(ev.hashes[1] == UINT64_MAX);
    assert_int_equal(
        read_event(
            "{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":\"cleared\",\"dp_rank\":5}}", &ev),
        0);
    assert_int_equal(ev.type, KVE_OP_CLEAR);
    assert_int_equal(ev.holder.rank, 5);
    assert_int_equal(ev.n, 0);
}

/* Later keys, any order, several blocks, the defaults of what is missing. */
static void test_read_later_generations(void **state)
{
    static const char *const tiers[] = {"device", "host_pinned", "disk", "external"};
    struct kve_router_event ev;
    char text[1024];

    (void)state;
    for (int tier = 0; tier < KV_N_TIERS; tier++) {
        snprintf(
            text, sizeof(text),
            " { \"storage_tier\" : \"%s\", \"state_source\":{\"a\":[1,{}]}, \"event\": { \"data\": "
            "{\"stored\": {\"start_position\": 4, \"blocks\": [ {\"mm_extra_info\": "
            "{\"mm_objects\":"
            "[{\"mm_hash\":1,\"offsets\":[[0,2]]}]}, \"tokens_hash\": 2, \"block_hash\": 1},"
            "{\"block_hash\":3,\"tokens_hash\":4}], \"parent_hash\": 77}}, \"session_id\":null},"
            "\"residency_domain\":\"worker\", \"worker_id\": 6 } ",
            tiers[tier]);
        assert_int_equal(read_event(text, &ev), 0);
        assert_int_equal(ev.tier, tier);
        assert_true(ev.holder.worker == 6);
        assert_int_equal(ev.holder.rank, 0);
        assert_int_equal(ev.event_id, 0);
        assert_true(ev.has_parent);
        assert_true(ev.parent == 77);
        assert_int_equal(ev.n, 2);
        assert_true(ev.blocks[0].hash == 1 && ev.blocks[0].tokens_hash == 2);
        assert_true(ev.blocks[1].hash == 3 && ev.blocks[1].tokens_hash == 4);
    }
    assert_int_equal(read_event("{\"worker_id\":1,\"event\":{\"data\":{\"cleared\":null}}}", &ev),
                     0);
    assert_int_equal(ev.type, KVE_OP_CLEAR);
    assert_int_equal(
        read_event("{\"worker_id\":1,\"event\":{\"data\":{\"stored\":{\"blocks\":[]}}}}", &ev), 0);
    assert_int_equal(ev.n, 0);
    assert_false(ev.has_parent);
}

static void test_refused(void **state)
{
    static const char *const bad[] = {
        "",
        "null",
        "[]",
        "{}",
        "{\"worker_id\":1}",
        "{\"event\":{\"data\":\"cleared\"}}",
        "{\"worker_id\":-1,\"event\":{\"data\":\"cleared\"}}",
        "{\"worker_id\":1,\"event\":{}}",
        "{\"worker_id\":1,\"event\":{\"data\":\"stored\"}}",
        "{\"worker_id\":1,\"event\":{\"data\":{}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"moved\":{}}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"stored\":{}}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"removed\":{}}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"removed\":{\"block_hashes\":[1.5]}}}}",
        ("{\"worker_id\":1,\"event\":{\"data\":{\"removed\":{\"block_hashes\":[1]},\"cleared\":"
         "null}"
         "}}"),
        "{\"worker_id\":1,\"event\":{\"data\":{\"stored\":{\"blocks\":[{\"block_hash\":1}]}}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"stored\":{\"blocks\":[{\"tokens_hash\":1}]}}}}",
        "{\"worker_id\":1,\"event\":{\"data\":{\"stored\":{\"blocks\":[7]}}}}",
        "{\"worker_id\":1,\"event\":{\"dp_rank\":4294967296,\"data\":\"cleared\"}}",
        "{\"worker_id\":1,\"event\":{\"data\":\"cleared\"},\"storage_tier\":\"tape\"}",
        "{\"worker_id\":1,\"event\":{\"data\":\"cleared\"}",
        "{\"worker_id\":18446744073709551616,\"event\":{\"data\":\"cleared\"}}",
    };
    struct kve_router_event ev = {.event_id = 4711};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        if (read_event(bad[i], &ev) >= 0)
            fail_msg("accepted: %s", bad[i]);
        assert_int_equal(ev.event_id, 4711);
    }
}

static void test_limit(void **state)
{
    struct kve_router_scratch small = {.items = {.limit = 64}};
    struct kve_router_event ev;
    struct kv_json json;
    const char *text =
        "{\"worker_id\":1,\"event\":{\"data\":{\"removed\":{\"block_hashes\":[1,2,3,4,5,6,7,"
        "8,9,10,11,12,13,14,15,16,17,18,19,20]}}}}";

    (void)state;
    kv_json_init(&json, text, strlen(text));
    assert_true(kve_router_event_read(&json, &small, &ev) < 0);
    kve_router_scratch_fini(&small);
}

static void test_written_text(void **state)
{
    static const struct kv_block blocks[] = {{1, 2}, {UINT64_MAX, 4}};
    static const uint64_t hashes[] = {5, 6};
    struct kve_router_event ev = {.holder = {1, 2}, .event_id = 3, .blocks = blocks, .n = 2};
    struct kv_buf out = KV_BUF_INIT;
    struct kv_json_writer writer;

    (void)state;
    kv_json_writer_init(&writer, &out);
    kv_json_begin_array(&writer);
    kve_router_event_write(&writer, &ev);
    ev = (struct kve_router_event){
        .holder = {1, 0}, .type = KVE_OP_REMOVE, .hashes = hashes, .n = 2, .tier = KV_TIER_DISK};
    kve_router_event_write(&writer, &ev);
    ev = (struct kve_router_event){.holder = {1, 0}, .type = KVE_OP_CLEAR};
    kve_router_event_write(&writer, &ev);
    kv_json_end_array(&writer);
    assert_string_equal(
        kv_buf_cstr(&out),
        "[{\"worker_id\":1,\"event\":{\"event_id\":3,\"data\":{\"stored\":{\"parent_hash\":null,"
        "\"blocks\":["
        "{\"block_hash\":1,\"tokens_hash\":2,\"mm_extra_info\":null},{\"block_hash\":"
        "18446744073709551615,"
        "\"tokens_hash\":4,\"mm_extra_info\":null}]}},\"dp_rank\":2}},"
        "{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":{\"removed\":{\"block_hashes\":[5,6]}}"
        ","
        "\"dp_rank\":0},\"storage_tier\":\"disk\"},"
        "{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":\"cleared\",\"dp_rank\":0}}]");
    kv_buf_fini(&out);
}

/* An event that is written is read as the same event. */
static void test_round_trip(void **state)
{
    uint64_t random = unit_seed();
    size_t rounds = unit_rounds(2000);
    struct kv_buf out = KV_BUF_INIT;

    (void)state;
    for (size_t round = 0; round < rounds; round++) {
        struct kv_block blocks[20];
        uint64_t hashes[20];
        struct kve_router_event ev = {0}, got;
        struct kv_json_writer writer;

        ev.holder.worker = unit_random(&random) >> unit_below(&random, 64);
        ev.holder.rank = (uint32_t)unit_below(&random, 5);
        ev.event_id = unit_random(&random) >> unit_below(&random, 64);
        ev.type = (enum kve_op_type[]){KVE_OP_STORE, KVE_OP_REMOVE, KVE_OP_CLEAR}[round % 3];
        ev.n = ev.type == KVE_OP_CLEAR ? 0 : unit_below(&random, 20);
        ev.tier = ev.type == KVE_OP_CLEAR ? KV_TIER_DEVICE : (enum kv_tier)unit_below(&random, 4);
        ev.has_parent = ev.type == KVE_OP_STORE && unit_below(&random, 2);
        ev.parent = ev.has_parent ? unit_random(&random) : 0;
        for (size_t i = 0; i < ev.n; i++) {
            hashes[i] = unit_random(&random) >> unit_below(&random, 64);
            blocks[i] = (struct kv_block){hashes[i], unit_random(&random)};
        }
        kv_buf_clear(&out);
        kv_json_writer_init(&writer, &out);
        ev.blocks = blocks;
        ev.hashes = hashes;
        kve_router_event_write(&writer, &ev);
        assert_int_equal(read_event(kv_buf_cstr(&out), &got), 0);
        assert_true(got.holder.worker == ev.holder.worker && got.event_id == ev.event_id);
        assert_int_equal(got.holder.rank, ev.holder.rank);
        assert_int_equal(got.type, ev.type);
        assert_int_equal(got.tier, ev.tier);
        assert_int_equal(got.has_parent, ev.has_parent);
        assert_true(got.parent == ev.parent);
        assert_int_equal(got.n, ev.n);
        if (ev.n && ev.type == KVE_OP_STORE)
            assert_memory_equal(got.blocks, blocks, ev.n * sizeof(*blocks));
        else if (ev.n)
            assert_memory_equal(got.hashes, hashes, ev.n * sizeof(*hashes));
    }
    kv_buf_fini(&out);
}

static int teardown(void **state)
{
    (void)state;
    kve_router_scratch_fini(&scratch);
    return 0;
}

/* The usual text of a block is read by itself: with the same result as any other text of it. */
static void test_usual_text(void **state)
{
    static const struct {
        const char *hash;
        uint64_t want;
        bool ok;
    } cases[] = {{"0", 0, true},
                 {"7", 7, true},
                 {"18446744073709551615", UINT64_MAX, true},
                 {"18446744073709551616", 0, false},
                 {"99999999999999999999999", 0, false},
                 {"-1", UINT64_MAX, true},
                 {"01", 0, false},
                 {"", 0, false},
                 {"1.5", 0, false},
                 {"null", 0, false}};
    static const char *const tails[] = {",\"mm_extra_info\":null}", ", \"mm_extra_info\":null}",
                                        "}"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases) * KV_COUNT(tails); i++) {
        const char *hash = cases[i / KV_COUNT(tails)].hash;
        struct kve_router_event ev;
        char text[300];

        snprintf(text, sizeof(text),
                 "{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":{\"stored\":{\"blocks\":["
                 "{\"block_hash\":3,\"tokens_hash\":4,\"mm_extra_info\":null},"
                 "{\"block_hash\":%s,\"tokens_hash\":%s%s]}}}}",
                 hash, hash, tails[i % KV_COUNT(tails)]);
        if ((read_event(text, &ev) == 0) != cases[i / KV_COUNT(tails)].ok)
            fail_msg("%s", text);
        if (cases[i / KV_COUNT(tails)].ok)
            assert_true(ev.n == 2 && ev.blocks[1].hash == cases[i / KV_COUNT(tails)].want &&
                        ev.blocks[1].tokens_hash == ev.blocks[1].hash);
    }
}

/* -- packed ------------------------------------------------------------------------------------ */

struct pieces {
    const char *data;
    size_t left, piece;
};

static long next_piece(void *arg, char *data, size_t size)
{
    struct pieces *p = arg;
    size_t n = KV_MIN(KV_MIN(size, p->piece), p->left);

    memcpy(data, p->data, n);
    p->data += n;
    p->left -= n;
    return (long)n;
}

enum { PACKED_EVENTS = 200 };

/* Random stores, some with the blocks of the one before, or fewer of them. */
static void make_stores(uint64_t *random, struct kve_router_event *events, struct kv_block *blocks)
{
    for (size_t e = 0; e < PACKED_EVENTS; e++, blocks += KVE_PACKED_BLOCKS) {
        bool again = e && unit_random(random) % 3 == 0;

        events[e] = (struct kve_router_event){
            .holder = {unit_random(random), (uint32_t)unit_random(random)},
            .type = KVE_OP_STORE,
            .tier = unit_random(random) % KV_N_TIERS,
            .has_parent = unit_random(random) % 2,
            .blocks = blocks,
            .n = 1 + unit_random(random) % (again ? events[e - 1].n : KVE_PACKED_BLOCKS),
        };
        if (events[e].has_parent)
            events[e].parent = unit_random(random);
        for (size_t i = 0; i < events[e].n; i++)
            blocks[i] = again ? events[e - 1].blocks[i]
                              : (struct kv_block){unit_random(random), unit_random(random)};
    }
}

static void check_same(const struct kve_router_event *a, const struct kve_router_event *b)
{
    assert_true(a->holder.worker == b->holder.worker && a->holder.rank == b->holder.rank);
    assert_true(a->type == b->type && a->tier == b->tier && a->has_parent == b->has_parent);
    assert_true(a->parent == b->parent && a->n == b->n);
    assert_memory_equal(a->blocks, b->blocks, a->n * sizeof(a->blocks[0]));
}

/* Packed events are read back, in pieces of any size; the previous event stays valid meanwhile. */
static void test_packed_round_trip(void **state)
{
    static struct kv_block blocks[PACKED_EVENTS * KVE_PACKED_BLOCKS];
    static struct kve_router_event events[PACKED_EVENTS];
    static char buffer[16384];
    struct kve_packed writer = {.n = 0}, reader = {.n = 0};
    struct kve_router_event got[2];
    struct kv_buf out = KV_BUF_INIT;
    uint64_t random = unit_seed();
    struct pieces pieces;
    struct kv_json json;

    (void)state;
    make_stores(&random, events, blocks);
    kv_buf_puts(&out, "#");
    for (size_t e = 0; e < PACKED_EVENTS; e++)
        kve_packed_write(&writer, &out, &events[e]);
    kve_packed_end(&out);
    pieces = (struct pieces){out.data, out.len, 1 + unit_random(&random) % 20000};
    kv_json_init_stream(&json, buffer, sizeof(buffer), next_piece, &pieces);
    assert_true(kv_json_raw_open(&json));
    for (size_t e = 0; e < PACKED_EVENTS; e++) {
        assert_int_equal(kve_packed_read(&reader, &json, &got[e % 2]), 1);
        check_same(&got[e % 2], &events[e]);
        if (e)
            check_same(&got[(e - 1) % 2], &events[e - 1]);
    }
    assert_int_equal(kve_packed_read(&reader, &json, &got[0]), 0);
    assert_int_equal(kv_json_finish(&json), 0);
    kv_buf_fini(&out);
}

/* Records that make no sense: too many blocks, an unknown tier or flag, a repeat of what isn't there. */
static void test_packed_refused(void **state)
{
    static const struct {
        uint8_t n[2], tier, flags;
    } bad[] = {{{1, 2}, 0, 0}, {{1, 0}, KV_N_TIERS, 0}, {{1, 0}, 0, 4}, {{1, 0}, 0, 2}};
    struct kve_router_event ev;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        uint8_t text[1 + KVE_PACKED_HEADER + 16] = {'#'};
        struct kve_packed packed = {.n = 0};
        struct kv_json json;

        memcpy(text + 21, bad[i].n, 2);
        text[23] = bad[i].tier;
        text[24] = bad[i].flags;
        kv_json_init(&json, text, sizeof(text));
        assert_true(kv_json_raw_open(&json));
        assert_int_equal(kve_packed_read(&packed, &json, &ev), -EPROTO);
        kv_json_init(&json, text, KVE_PACKED_HEADER);
        assert_true(kv_json_raw_open(&json));
        assert_int_equal(kve_packed_read(&packed, &json, &ev), -EBADMSG); /* cut off */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read_first_generation),
        cmocka_unit_test(test_read_later_generations),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_written_text),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_usual_text),
        cmocka_unit_test(test_packed_round_trip),
        cmocka_unit_test(test_packed_refused),
    };

    return cmocka_run_group_tests(tests, NULL, teardown);
}
