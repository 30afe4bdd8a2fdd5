// SPDX-License-Identifier: Apache-2.0
/* Dumps of both generations, of failing peers, and names with colons. */
#include "base/unit.h"

#include "base/json/json.h"
#include "event/router/packed_event.h"
#include "indexer/replica/dump_reader.h"

static int read_text(const char *text, struct ki_dump_reader *reader)
{
    struct kv_json json;

    memset(reader, 0, sizeof(*reader));
    kv_json_init(&json, text, strlen(text));
    return ki_dump_read(reader, &json);
}

#define BLOCK(hash, tokens) \
    "{\"block_hash\":" #hash ",\"tokens_hash\":" #tokens ",\"mm_extra_info\":null}"
#define STORED(worker, parent, blocks)                                          \
    "{\"worker_id\":" #worker                                                   \
    ",\"event\":{\"event_id\":0,\"data\":{\"stored\":{\"parent_hash\":" #parent \
    ",\"blocks\":[" blocks "]}},\"dp_rank\":0}}"

static size_t reach(struct ki_dumped_model *m, const uint64_t *hashes, size_t n, uint64_t worker)
{
    struct kvi_matches matches = {0};
    size_t found = 0;

    assert_int_equal(kvi_find(m->index, hashes, n, &matches), 0);
    for (size_t i = 0; i < matches.n; i++)
        if (matches.items[i].holder.worker == worker)
            found = matches.items[i].reach[0];
    kvi_matches_fini(&matches);
    return found;
}

static void single_and_multi_block_events(void **state)
{
    static const uint64_t path[] = {11, 12, 13};
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(
        read_text(
            "{\"m:t\":{\"block_size\":16,\"events\":[" STORED(1, null, BLOCK(1, 11)) "," STORED(
                1, 1, BLOCK(2, 12)) "," STORED(2, null,
                                               BLOCK(18446744073709551615,
                                                     11) "," BLOCK(5, 12) "," BLOCK(6, 13)) "]}}",
            &reader),
        0);
    assert_int_equal(reader.n, 1);
    assert_string_equal(reader.models[0].name, "m");
    assert_string_equal(reader.models[0].tenant, "t");
    assert_int_equal(reader.models[0].block_size, 16);
    assert_int_equal(reach(&reader.models[0], path, 3, 1), 2);
    assert_int_equal(reach(&reader.models[0], path, 3, 2), 3);
    assert_int_equal(reader.events, 3);
    assert_int_equal(reader.blocks, 5);
    ki_dump_reader_fini(&reader);
}

static void names_with_colons(void **state)
{
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(
        read_text("{\"org/m:7b:tenant\":{\"block_size\":1,\"events\":[]},"
                  "\"a:b:c\":{\"block_size\":1,\"model_name\":\"a\",\"tenant_id\":\"b:c\","
                  "\"events\":[]},\"plain\":{\"block_size\":1}}",
                  &reader),
        0);
    assert_int_equal(reader.n, 3);
    assert_string_equal(reader.models[0].name, "org/m:7b");
    assert_string_equal(reader.models[0].tenant, "tenant");
    assert_string_equal(reader.models[1].name, "a");
    assert_string_equal(reader.models[1].tenant, "b:c");
    assert_string_equal(reader.models[2].name, "plain");
    assert_string_equal(reader.models[2].tenant, "default");
    ki_dump_reader_fini(&reader);
}

static const struct ki_mark *mark_at(const struct ki_dump_reader *reader, size_t model, size_t i)
{
    assert_true(i < reader->models[model].marks.len / sizeof(struct ki_mark));
    return (const struct ki_mark *)(const void *)reader->models[model].marks.data + i;
}

static void streams_and_unknown_fields(void **state)
{
    const struct ki_snapshot *s;
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(
        read_text("{\"m:t\":{\"later\":{\"x\":[1,{}]},\"streams\":["
                  "{\"worker_id\":8,\"seq\":3},"
                  "{\"worker_id\":7,\"dp_rank\":2,\"ranks\":[5,2],\"seq\":18446744073709551615,"
                  "\"timestamp\":1.5,\"reasons\":[\"missed_batches\"],\"more\":0}],"
                  "\"block_size\":4}}",
                  &reader),
        0);
    assert_int_equal(reader.models[0].n_snapshots, 2); /* sorted */
    s = reader.models[0].snapshots[0];
    assert_int_equal(s->instance, 7);
    assert_int_equal(s->rank, 2);
    assert_true(s->has_position && s->state.sequence == UINT64_MAX);
    assert_true(s->state.timestamp == 1.5);
    assert_int_equal(s->state.reasons, KI_BECAUSE(MISSED));
    s = reader.models[0].snapshots[1];
    assert_int_equal(s->state.sequence, 3);
    assert_int_equal(s->state.reasons, KI_BECAUSE(PEER)); /* it says nothing of them */
    assert_int_equal(reader.models[0].marks.len, 3 * sizeof(struct ki_mark));
    assert_int_equal(mark_at(&reader, 0, 0)->holder.worker, 8);
    assert_int_equal(mark_at(&reader, 0, 0)->stream_rank, 0);
    assert_int_equal(mark_at(&reader, 0, 1)->holder.rank, 5);
    assert_int_equal(mark_at(&reader, 0, 1)->stream_rank, 2);
    assert_true(mark_at(&reader, 0, 1)->sequence == UINT64_MAX);
    ki_dump_reader_fini(&reader);
}

static void an_error_entry_leaves_the_model_out(void **state)
{
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(read_text("{\"m:t\":{\"error\":\"index gone\"},\"n:t\":{\"block_size\":4,"
                               "\"events\":[]}}",
                               &reader),
                     0);
    assert_true(reader.models[0].failed);
    assert_false(reader.models[1].failed);
    ki_dump_reader_fini(&reader);
}

#define STREAM(worker, rank, fields, events)                                        \
    "{\"worker_id\":" #worker ",\"dp_rank\":" #rank ",\"ranks\":[" #rank "]" fields \
    ",\"events\":[" events "]}"

/* Every holder of a dump gets one entry; those of no stream, and of one without a position, are torn. */
static void what_is_told_of_holders(void **state)
{
    // clang-format off
    static const char text[] =
        "{\"m:t\":{\"block_size\":4,"
        "\"streams\":[" STREAM(2, 3, ",\"seq\":5", STORED(1, null, BLOCK(2, 12)) ","
                                                    STORED(2, null, BLOCK(2, 12))) ","
                        STREAM(4, 0, "", STORED(4, null, BLOCK(2, 12))) ","
                        "{\"worker_id\":5,\"seq\":1,\"ranks\":[0,1,2]},"
                        "{\"worker_id\":5,\"dp_rank\":1,\"seq\":2,\"ranks\":[1,2]}]}}";
    // clang-format on
    static const struct {
        uint64_t worker;
        uint32_t rank, stream;
        bool has_position, torn;
    } marks[] = {
        {1, 0, 0, false, true}, /* in another worker's stream */
        {2, 0, 0, false, true}, /* a rank that the stream doesn't name */
        {2, 3, 3, true, false}, {4, 0, 0, false, true},
        {5, 0, 0, true, false}, {5, 1, 1, true, false}, /* the rank's own stream */
        {5, 2, 0, true, false},                         /* the first of two others */
    };
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(read_text(text, &reader), 0);
    assert_int_equal(reader.models[0].marks.len, KV_COUNT(marks) * sizeof(struct ki_mark));
    for (size_t i = 0; i < KV_COUNT(marks); i++) {
        const struct ki_mark *mark = mark_at(&reader, 0, i);

        assert_int_equal(mark->holder.worker, marks[i].worker);
        assert_int_equal(mark->holder.rank, marks[i].rank);
        assert_int_equal(mark->stream_rank, marks[i].stream);
        assert_int_equal(mark->has_position, marks[i].has_position);
        assert_int_equal(mark->torn, marks[i].torn);
    }
    ki_dump_reader_fini(&reader);
}

/* A stream that can't be in the state that its dump tells is read from the beginning; others aren't hurt. */
static void a_stream_that_cannot_be(void **state)
{
    static const char *const states[] = {
        "\"groups\":[{\"group\":1,\"kind\":\"window\",\"window\":0,\"need\":4294967295,\"stride\":"
        "0}]",
        "\"sources\":[{\"owner\":\"\"}]",
        "\"sources\":[{\"owner\":"
        "\"0123456789012345678901234567890123456789012345678901234567890123\"}]",
        "\"sources\":[{\"owner\":\"\"},{\"owner\":\"a\"}],\"salts\":[[1,2,0,0,1,0,0,0]]",
        "\"salts\":[[1,2,0]]",
    };
    char text[1024];
    struct ki_dump_reader reader;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(states); i++) {
        snprintf(text, sizeof(text),
                 "{\"m:t\":{\"block_size\":4,\"streams\":["
                 "{\"worker_id\":1,\"ranks\":[0,1],\"seq\":7,%s}," STREAM(
                     2, 0, ",\"seq\":8", STORED(2, null, BLOCK(2, 12))) "]}}",
                 states[i]);
        if (read_text(text, &reader) < 0)
            fail_msg("one stream makes the dump unreadable: %s", states[i]);
        assert_true(reader.models[0].snapshots[0]->unusable);
        assert_true(mark_at(&reader, 0, 0)->torn);
        assert_true(mark_at(&reader, 0, 1)->torn); /* of the same stream */
        assert_false(mark_at(&reader, 0, 2)->torn);
        assert_int_equal(mark_at(&reader, 0, 2)->sequence, 8);
        ki_dump_reader_fini(&reader);
    }
}

/* A stream that is told twice was so at two batches: neither counts. */
static void a_stream_that_is_told_twice(void **state)
{
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(read_text("{\"m:t\":{\"block_size\":4,\"streams\":["
                               "{\"worker_id\":1,\"seq\":7},{\"worker_id\":2,\"seq\":1},"
                               "{\"worker_id\":1,\"seq\":5}]}}",
                               &reader),
                     0);
    assert_int_equal(reader.models[0].n_snapshots, 2);
    assert_true(reader.models[0].snapshots[0]->torn);
    assert_false(reader.models[0].snapshots[1]->torn);
    assert_true(mark_at(&reader, 0, 0)->torn);
    ki_dump_reader_fini(&reader);
}

/* Ranks with windows that can't be: their stream is torn. Others aren't hurt. */
static void windows_that_cannot_be(void **state)
{
#define WINDOW(group, part, parts)                                                               \
    "{\"worker_id\":1,\"group\":" #group ",\"window\":5,\"need\":2,\"stride\":1,\"part\":" #part \
    ",\"parts\":" #parts "}"
#define EIGHT(group)                                                                    \
    WINDOW(group, 0, 8)                                                                 \
    "," WINDOW(group, 1, 8) "," WINDOW(group, 2, 8) "," WINDOW(group, 3, 8) "," WINDOW( \
        group, 4, 8) "," WINDOW(group, 5, 8) "," WINDOW(group, 6, 8) "," WINDOW(group, 7, 8)
    static const char *const cases[] = {
        WINDOW(1, 0, 2) "," WINDOW(1, 1, 2) "," WINDOW(1, 0, 1),
        WINDOW(1, 0, 1) "," WINDOW(1, 0, 2) "," WINDOW(1, 1, 2),
        EIGHT(1) "," EIGHT(2) "," EIGHT(3) "," EIGHT(4),
        WINDOW(1, 0, 9),
        WINDOW(1, 4294967295, 4294967295),
    };
    static const uint64_t path[] = {12};
    struct ki_dump_reader reader;
    char text[8192];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        snprintf(
            text, sizeof(text),
            "{\"m:t\":{\"block_size\":4,\"streams\":["
            "{\"worker_id\":1,\"seq\":5,\"events\":[" STORED(
                1, null, BLOCK(2, 12)) "],\"extras\":["
                                       "{\"worker_id\":1,\"alone\":false,\"eagle_drop\":"
                                       "true},%s]}," STREAM(2, 0, ",\"seq\":6",
                                                            STORED(2, null, BLOCK(2, 12))) "]}}",
            cases[i]);
        if (read_text(text, &reader) < 0)
            fail_msg("one rank makes the dump unreadable: case %zu", i);
        assert_true(mark_at(&reader, 0, 0)->torn);
        assert_true(reader.models[0].snapshots[0]->torn);
        assert_false(mark_at(&reader, 0, 1)->torn);
        assert_int_equal(reach(&reader.models[0], path, 1, 2), 1);
        ki_dump_reader_fini(&reader);
    }
#undef EIGHT
#undef WINDOW
}

static void memory_is_bounded(void **state)
{
    static const char text[] =
        "{\"m:t\":{\"block_size\":4,\"events\":[" STORED(1, null, BLOCK(2, 12)) "]}}";
    struct ki_dump_reader reader = {.max_bytes = 1};
    struct kv_json json;

    (void)state;
    kv_json_init(&json, text, strlen(text));
    assert_int_equal(ki_dump_read(&reader, &json), -EFBIG);
    ki_dump_reader_fini(&reader);
    reader.max_bytes = 1u << 24;
    kv_json_init(&json, text, strlen(text));
    assert_int_equal(ki_dump_read(&reader, &json), 0);
    ki_dump_reader_fini(&reader);
}

static void orphans_are_passed_over(void **state)
{
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(
        read_text("{\"m:t\":{\"block_size\":4,\"events\":[" STORED(1, 99, BLOCK(2, 12)) "]}}",
                  &reader),
        0);
    assert_int_equal(reader.orphans, 1);
    assert_true(mark_at(&reader, 0, 0)->torn); /* its rank lacks a block: nothing else tells */
    assert_false(mark_at(&reader, 0, 0)->has_position);
    ki_dump_reader_fini(&reader);
}

static void extras_are_restored(void **state)
{
    struct ki_dump_reader reader;
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;

    (void)state;
    assert_int_equal(
        read_text(
            "{\"m:t\":{\"block_size\":4,\"streams\":[{\"worker_id\":1,\"seq\":5,\"extras\":["
            "{\"worker_id\":1,\"block_hash\":5,\"parent_hash\":4,\"tokens_hash\":9,\"tiers\":3},"
            "{\"worker_id\":1,\"block_hash\":5,\"tier\":0,\"copies\":2},"
            "{\"worker_id\":1,\"block_hash\":6,\"tier\":0,\"copies\":2}]}]}}",
            &reader),
        0);
    assert_int_equal(kvi_get_holder(reader.models[0].index, (struct kv_holder){1, 0}, &info), 0);
    assert_int_equal(info.parked, 1);
    assert_int_equal(info.copies, 1); /* of a block that is there */
    assert_int_equal(reader.orphans, 0);
    ki_dump_reader_fini(&reader);
}

/* Which sources have a block, and which one is meant where nothing is said. */
static void sources_are_restored(void **state)
{
    static const uint64_t hashes[] = {5, 6};
    struct ki_dump_reader reader;
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    struct kvi_index *ix;

    (void)state;
    assert_int_equal(
        read_text(
            "{\"m:t\":{\"block_size\":4,\"streams\":[{\"worker_id\":1,\"seq\":5,\"events\":"
            "[" STORED(
                1, null,
                BLOCK(5, 11) "," BLOCK(
                    6,
                    12)) "],\"extras\":["
                         "{\"worker_id\":1,\"tier\":0,\"implied_source\":3,\"counting\":1,"
                         "\"stored_again\":9},"
                         "{\"worker_id\":1,\"block_hash\":5,\"tier\":0,\"copies\":2,"
                         "\"sources\":[[0,2],[7,1],[9,1,1]]},"
                         "{\"worker_id\":1,\"block_hash\":77,\"tier\":0,\"sources\":[[4,1]]}]}]}}",
            &reader),
        0);
    ix = reader.models[0].index;
    assert_int_equal(kvi_get_holder(ix, (struct kv_holder){1, 0}, &info), 0);
    assert_int_equal(info.copies, 3);
    assert_int_equal(
        kvi_take(ix, kvi_cache_of((struct kv_holder){1, 0}, KV_TIER_DEVICE, 0), hashes, NULL, 2),
        1);
    assert_int_equal(
        kvi_take(ix, kvi_cache_of((struct kv_holder){1, 0}, KV_TIER_DEVICE, 3), hashes, NULL, 2),
        1);
    assert_int_equal(kvi_holder_blocks(ix, (struct kv_holder){1, 0}), 1);
    assert_int_equal(
        kvi_take(ix, kvi_cache_of((struct kv_holder){1, 0}, KV_TIER_DEVICE, 7), hashes, NULL, 1),
        1);
    assert_int_equal(
        kvi_take(ix, kvi_cache_of((struct kv_holder){1, 0}, KV_TIER_DEVICE, 9), hashes, NULL, 1),
        1);
    assert_int_equal(
        kvi_take(ix, kvi_cache_of((struct kv_holder){1, 0}, KV_TIER_DEVICE, 0), hashes, NULL, 1),
        1);
    assert_int_equal(kvi_holder_blocks(ix, (struct kv_holder){1, 0}), 0);
    ki_dump_reader_fini(&reader);
}

/* Ranges come with their stream. */
static void ranges(void **state)
{
    static const char text[] =
        "{\"m:t\":{\"block_size\":4,\"streams\":[{\"worker_id\":1,\"seq\":5,\"facts\":[],"
        "\"ranges\":[{\"block_hash\":5,\"fewer\":2,\"window\":1,\"open\":true},"
        "{\"dp_rank\":3,\"block_hash\":6,\"more\":1,\"tokens_hash\":7,"
        "\"parent_hash\":8},{\"block_hash\":9}]}]}}";
    const struct ki_range *range;
    const struct ki_snapshot *s;
    struct ki_dump_reader reader;

    (void)state;
    assert_int_equal(read_text(text, &reader), 0);
    s = reader.models[0].snapshots[0];
    assert_int_equal(s->state.facts, 0);
    assert_int_equal(ki_snapshot_n_ranges(s), 2); /* the last one says nothing */
    range = ki_snapshot_range(s, 0);
    assert_true(range->fewer == 2 && !range->more && range->open);
    assert_int_equal(range->window, 1);
    range = ki_snapshot_range(s, 1);
    assert_int_equal(range->rank, 3);
    assert_int_equal(range->more, 1);
    assert_true(range->has_parent && range->parent == 8 && range->tokens_hash == 7);
    ki_dump_reader_fini(&reader);
}

static int count_extra(void *arg, const struct kvi_extra *extra)
{
    *(size_t *)arg += extra->n_sources;
    return 0;
}

/* A block has as many sources as a stream at most, and is told on about once. */
static void many_sources_of_a_block(void **state)
{
    struct kv_buf text = KV_BUF_INIT;
    struct ki_dump_reader reader;
    struct kv_json json;

    (void)state;
    for (unsigned n = 64; n <= 65; n++) {
        size_t told = 0;

        kv_buf_clear(&text);
        kv_buf_puts(&text,
                    "{\"m:t\":{\"block_size\":4,\"streams\":[{\"worker_id\":1,\"seq\":5,\"events\":"
                    "[" STORED(1, null, BLOCK(5, 11)) "],\"extras\":[{\"worker_id\":1,\"tier\":0,"
                                                      "\"block_hash\":5,\"sources\":[");
        for (unsigned i = 0; i < n; i++)
            kv_buf_printf(&text, "%s[%u,2]", i ? "," : "", i + 1);
        kv_buf_puts(&text, "]}]}]}}");
        memset(&reader, 0, sizeof(reader));
        kv_json_init(&json, text.data, text.len);
        assert_int_equal(ki_dump_read(&reader, &json) == 0, n == 64);
        if (n == 64)
            assert_int_equal(kvi_dump_extras(reader.models[0].index, count_extra, &told), 0);
        assert_true(n > 64 || told == 64);
        ki_dump_reader_fini(&reader);
    }
    kv_buf_fini(&text);
}

/* Events in binary, in the place of the array, after the number of blocks to come. */
static void packed_events(void **state)
{
    static const struct kv_block blocks[] = {{1, 11}, {2, 12}};
    static const uint64_t path[] = {11, 12};
    struct kve_packed packed = {.n = 0};
    struct kv_buf text = KV_BUF_INIT;
    struct ki_dump_reader reader;
    struct kv_json json;

    (void)state;
    kv_buf_puts(&text,
                "{\"m:t\":{\"block_size\":16,\"expected_blocks\":100000,\"packed_events\":#");
    for (uint64_t worker = 1; worker <= 2; worker++)
        kve_packed_write(
            &packed, &text,
            &(struct kve_router_event){
                .holder = {worker, 0}, .type = KVE_OP_STORE, .blocks = blocks, .n = 3 - worker});
    kve_packed_end(&text);
    kv_buf_puts(&text, ",\"later\":[]}}");
    for (size_t cut = 0; cut <= 1; cut++) { /* whole, or without the end */
        memset(&reader, 0, sizeof(reader));
        kv_json_init(&json, text.data, text.len - cut);
        assert_int_equal(ki_dump_read(&reader, &json), cut ? -EBADMSG : 0);
        assert_int_equal(reach(&reader.models[0], path, 2, 1), 2);
        assert_int_equal(reach(&reader.models[0], path, 2, 2), 1);
        assert_int_equal(reader.events, 2);
        assert_int_equal(reader.blocks, 3);
        ki_dump_reader_fini(&reader);
    }
    kv_buf_fini(&text);
}

/* A peer that expects more than fits gets no more than that, and one that comes late nothing. */
static void expected_blocks_are_bounded(void **state)
{
    struct ki_dump_reader reader = {.max_bytes = 4u << 20};
    struct kv_json json;
    static const char text[] =
        "{\"m:t\":{\"block_size\":4,\"expected_blocks\":18446744073709551615,"
        "\"events\":[" STORED(1, null, BLOCK(2, 12)) "],\"expected_blocks\":7}}";

    (void)state;
    kv_json_init(&json, text, strlen(text));
    assert_int_equal(ki_dump_read(&reader, &json), 0);
    assert_int_equal(kvi_holder_blocks(reader.models[0].index, (struct kv_holder){1, 0}), 1);
    assert_true(reader.done_bytes <= reader.max_bytes);
    ki_dump_reader_fini(&reader);
}

static void what_is_no_dump(void **state)
{
    static const char *const texts[] = {
        "",
        "[]",
        "null",
        "{\"m:t\":[]}",
        "{\"m:t\":{}}",
        "{\"m:t\":{\"block_size\":0,\"events\":[]}}",
        "{\"m:t\":{\"block_size\":4294967296}}",
        "{\"m:t\":{\"block_size\":-1}}",
        "{\"m:t\":{\"block_size\":4,\"events\":{}}}",
        "{\"m:t\":{\"block_size\":4,\"events\":[{}]}}",
        "{\"m:t\":{\"block_size\":4,\"events\":[",
        "{\"m:t\":{\"block_size\":4,\"events\":#]}}",
        "{\"m:t\":{\"block_size\":4,\"packed_events\":[]}}",
        "{\"m:t\":{\"block_size\":4,\"packed_events\":#}}",
        "{\"m:t\":{\"block_size\":4,\"expected_blocks\":-1}}",
        "{\"m:t\":{\"block_size\":4,\"events\":[]}",
        "{\"m:t\":{\"block_size\":4,\"events\":[]}}x",
        "{\"m:t\":{\"block_size\":4,\"streams\":[7]}}",
        "{\"m:t\":{\"block_size\":4,\"streams\":[{\"seq\":-1}]}}",
        "{\"m:t\":{\"block_size\":4,\"streams\":[{\"ranks\":[4294967296]}]}}",
        "{\"m:t\":{\"block_size\":4,\"streams\":[{\"packed_events\":#}]}}",
        "{\"m:t\":{\"block_size\":4,\"model_name\":7}}",
        "{\"m:t\":{\"block_size\":4,\"model_name\":\"a\\u0000b\"}}",
    };
    struct ki_dump_reader reader;

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (read_text(texts[i], &reader) == 0)
            fail_msg("taken for a dump: %s", texts[i]);
        ki_dump_reader_fini(&reader);
    }
    assert_int_equal(read_text("{}", &reader), 0);
    ki_dump_reader_fini(&reader);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(single_and_multi_block_events),
        cmocka_unit_test(names_with_colons),
        cmocka_unit_test(streams_and_unknown_fields),
        cmocka_unit_test(an_error_entry_leaves_the_model_out),
        cmocka_unit_test(what_is_told_of_holders),
        cmocka_unit_test(a_stream_that_cannot_be),
        cmocka_unit_test(windows_that_cannot_be),
        cmocka_unit_test(a_stream_that_is_told_twice),
        cmocka_unit_test(memory_is_bounded),
        cmocka_unit_test(orphans_are_passed_over),
        cmocka_unit_test(extras_are_restored),
        cmocka_unit_test(sources_are_restored),
        cmocka_unit_test(ranges),
        cmocka_unit_test(many_sources_of_a_block),
        cmocka_unit_test(packed_events),
        cmocka_unit_test(expected_blocks_are_bounded),
        cmocka_unit_test(what_is_no_dump),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
