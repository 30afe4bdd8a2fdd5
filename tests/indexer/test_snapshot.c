// SPDX-License-Identifier: Apache-2.0
/* Snapshots of a stream: taken from one listener, written, read, and given to another. */
#include "base/unit.h"

#include <errno.h>

#include "base/json/json.h"
#include "indexer/stream/listener.h"

/* A listener that follows nobody, with a position. */
static struct ki_model no_model; /* it counts the listeners that have something to tell */

static void open_listener(struct ki_listener *l, uint64_t sequence, bool partial)
{
    struct ki_stream_opts opts = {0};

    if (!no_model.index)
        assert_int_equal(kvi_create(NULL, &no_model.index), 0);
    memset(l, 0, sizeof(*l));
    l->instance = 7;
    l->model = &no_model;
    assert_int_equal(pthread_mutex_init(&l->lock, NULL), 0);
    assert_int_equal(ki_applier_init(&l->applier, 7, 0, 4, KI_MM_PLACED), 0);
    ki_stream_init(&l->stream, &opts);
    ki_stream_seed(&l->stream, sequence, 0, partial);
}

static void close_listener(struct ki_listener *l)
{
    ki_applier_fini(&l->applier);
    pthread_mutex_destroy(&l->lock);
}

static struct ki_snapshot *read_text(const char *text, size_t len)
{
    struct ki_snapshot *s;
    struct kv_json json;
    struct kv_str key;

    assert_int_equal(ki_snapshot_create(&s), 0);
    kv_json_init(&json, text, len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        assert_true(ki_snapshot_read(s, &json, key));
    assert_int_equal(kv_json_finish(&json), 0);
    return s;
}

/* Knowledge of @from, as a dump tells it. */
static struct ki_snapshot *told(const struct ki_listener *from)
{
    struct kv_buf text = KV_BUF_INIT;
    struct ki_snapshot *taken, *read;
    struct kv_json_writer w;

    assert_int_equal(ki_snapshot_take(from, &taken), 0);
    kv_json_writer_init(&w, &text);
    kv_json_begin_object(&w);
    ki_snapshot_write(taken, &w);
    kv_json_key(&w, "ranges");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < ki_snapshot_n_ranges(taken); i++)
        ki_snapshot_write_range(ki_snapshot_range(taken, i), &w);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    read = read_text(text.data, text.len);
    assert_false(read->unusable);
    assert_int_equal(read->ranks.len, taken->ranks.len);
    ki_snapshot_free(taken);
    kv_buf_fini(&text);
    return read;
}

static void hand_over(struct ki_listener *from, struct ki_listener *to)
{
    struct ki_snapshot *s = told(from);

    ki_snapshot_give(s, to);
    ki_snapshot_free(s);
}

/* Each fact of a state comes through a dump, alone and beside all others. */
static void every_fact(void **state)
{
    const unsigned all = 2 * KI_FACT_BEHIND - 1;
    struct ki_listener a, b;
    struct ki_state at;

    (void)state;
    for (unsigned bit = 1; bit <= KI_FACT_BEHIND; bit *= 2)
        for (int i = 0; i < 2; i++) {
            unsigned facts = (i ? all & ~bit : bit) & ~KI_FACT_ADRIFT;

            open_listener(&a, 5, false);
            open_listener(&b, 5, false);
            ki_state_give(&(struct ki_state){.facts = facts}, &a);
            assert_int_equal(a.applier.has_windows, (facts & KI_FACT_WINDOWS) != 0);
            assert_int_equal(a.applier.retains, (facts & KI_FACT_RETAINS) != 0);
            assert_int_equal(a.stream.healed, (facts & KI_FACT_HEALED) != 0);
            assert_int_equal(a.stream.behind, (facts & KI_FACT_BEHIND) != 0);
            ki_state_take(&a, &at); /* a seeded stream has no connection */
            assert_int_equal(at.facts, facts | KI_FACT_ADRIFT);
            hand_over(&a, &b);
            ki_state_take(&b, &at);
            assert_int_equal(at.facts, facts | KI_FACT_ADRIFT);
            close_listener(&a);
            close_listener(&b);
        }
}

/* A restart forgets the blocks of all ranks that the origin's stream has brought. */
static void which_ranks_it_brings(void **state)
{
    struct ki_listener a, b;

    (void)state;
    open_listener(&a, 5, false);
    open_listener(&b, 5, false);
    assert_true(ki_applier_note_rank(&a.applier, 3));
    assert_true(ki_applier_note_rank(&a.applier, 9));
    hand_over(&a, &b);
    assert_true(ki_applier_brings(&b.applier, 3));
    assert_true(ki_applier_brings(&b.applier, 9));
    assert_int_equal(b.applier.n_ranks, 3);
    assert_int_equal(b.applier.n_cleared, ki_applier_n_brought(&b.applier));
    close_listener(&a);
    close_listener(&b);
}

/* A replica judges later reports, and events that may be reports, as the origin does. */
static void what_reports_are(void **state)
{
    struct ki_listener a, b;

    (void)state;
    for (unsigned i = 0; i < 2u * 2u * 3u * 2u; i++) {
        open_listener(&a, 5, false);
        open_listener(&b, 5, false);
        a.applier.reports.seen = i & 1;
        a.applier.reports.suspects = i & 2;
        a.applier.reports.mode = (enum ki_report_mode)(i / 4 % 3);
        a.applier.reports.trusted = i >= 12;
        hand_over(&a, &b);
        assert_int_equal(b.applier.reports.seen, a.applier.reports.seen);
        assert_int_equal(b.applier.reports.suspects, a.applier.reports.suspects);
        assert_int_equal(b.applier.reports.mode, a.applier.reports.mode);
        assert_int_equal(b.applier.reports.trusted, a.applier.reports.trusted);
        close_listener(&a);
        close_listener(&b);
    }
}

static void what_the_registration_tells_stays(void **state)
{
    struct ki_listener a, b;

    (void)state;
    open_listener(&a, 5, false);
    open_listener(&b, 5, false);
    a.applier.reports.mode = KI_REPORTS_INCREMENTAL;
    b.applier.reports.mode = KI_REPORTS_FULL;
    hand_over(&a, &b);
    assert_int_equal(b.applier.reports.mode, KI_REPORTS_FULL);
    close_listener(&a);
    close_listener(&b);
}

/* A replica is partial for the reasons for which the origin is. */
static void partial_at_that_moment(void **state)
{
    struct ki_listener a;
    struct ki_snapshot *s;

    (void)state;
    for (int reason = 0; reason < 3; reason++) {
        open_listener(&a, 5, reason == 1);
        a.stream.base = KI_BASE_OWN; /* the process is known */
        if (reason == 2)
            ki_doubts_add(&a.applier.doubts, 0, 0, KI_WHY_CLEAR);
        s = told(&a);
        assert_int_equal(s->state.reasons != 0, reason > 0);
        ki_snapshot_free(s);
        close_listener(&a);
    }
}

/* A clear that leaves tiers alone has ended a loss: of which tier it was, shows later, also to a replica. */
static void a_loss_that_a_clear_ended(void **state)
{
    struct ki_listener a, b;

    (void)state;
    for (int healed = 0; healed < 2; healed++) {
        open_listener(&a, 5, healed);
        open_listener(&b, 5, false);
        ki_stream_mark_whole(&a.stream);
        a.stream.contact = KI_CONTACT_MET;
        assert_false(ki_stream_reasons(&a.stream));
        hand_over(&a, &b);
        ki_stream_note_more(&b.stream, 1);
        assert_int_equal(ki_stream_reasons(&b.stream) != 0, healed);
        close_listener(&a);
        close_listener(&b);
    }
}

/*
 * Batches that the origin still lacks were published before a replica's connection, perhaps. It has them
 * when the next batch has come, or its own replay service has answered.
 */
static void an_origin_that_was_behind(void **state)
{
    const struct ki_batch_id next = {.sequence = 6, .digest = 1, .timestamp = 1};
    struct ki_backlog_budget budget = {.max_bytes = 1 << 20, .max_stream_bytes = 1 << 20};
    struct ki_listener a, b;

    (void)state;
    for (int waits = 0; waits < 2; waits++) {
        open_listener(&a, 5, false);
        open_listener(&b, 5, false);
        ki_backlog_init(&a.backlog);
        if (waits)
            assert_int_equal(ki_backlog_put(&a.backlog, &budget, &next, false, "", 0), 0);
        else
            a.stream.behind = true;
        hand_over(&a, &b);
        assert_true(ki_stream_reasons(&b.stream) & KI_BECAUSE(REPLAYING));
        assert_int_equal(ki_stream_live(&b.stream, &next, false, 1), KI_STEP_APPLY);
        assert_false(ki_stream_reasons(&b.stream) & KI_BECAUSE(REPLAYING));
        ki_backlog_clear(&a.backlog, &budget);
        close_listener(&a);
        close_listener(&b);
    }
}

/* Ranges mean to the replica what they mean to the origin. */
static void ranges(void **state)
{
    static const struct ki_range said[] = {
        {.hash = 11, .tokens_hash = 1, .more = 1},
        {.hash = 12, .tokens_hash = 2, .parent = 11, .has_parent = true, .more = 2, .open = true},
        {.hash = 13, .window = 2, .fewer = 1, .open = true},
        {.hash = 13, .window = 3, .fewer = 3, .more = 1},
    };
    struct ki_listener a, b;

    (void)state;
    open_listener(&a, 5, false);
    open_listener(&b, 5, false);
    for (size_t i = 0; i < KV_COUNT(said); i++)
        ki_ranges_restore(&a.applier.ranges, &said[i]);
    a.applier.ranges.n_real = 7;
    hand_over(&a, &b);
    assert_int_equal(b.applier.ranges.n, KV_COUNT(said));
    assert_int_equal(b.applier.ranges.n_open, 2);
    assert_int_equal(b.applier.ranges.n_absent, 1);
    assert_int_equal(b.applier.ranges.n_real, 7);
    for (size_t i = 0; i < KV_COUNT(said); i++) {
        const struct kvi_cache cache = {.window = said[i].window};
        const struct ki_range *e = ki_ranges_find(&b.applier.ranges, &cache, said[i].hash);

        assert_non_null(e);
        assert_int_equal(e->more, said[i].more);
        assert_int_equal(e->fewer, said[i].fewer);
        assert_int_equal(e->tokens_hash, said[i].tokens_hash);
        assert_int_equal(e->has_parent, said[i].has_parent);
        assert_int_equal(e->parent, said[i].parent);
        assert_int_equal(e->open, said[i].open);
        assert_int_equal(e->absent, said[i].open && !said[i].fewer);
    }
    close_listener(&a);
    close_listener(&b);
}

/* A peer may tell any number. One that grows behind it is still one that the next replica can read. */
static void numbers_without_end(void **state)
{
    const struct ki_range said = {.hash = 11, .window = 1, .more = 1u << 31, .fewer = UINT32_MAX};
    const struct kvi_cache cache = {.window = 1};
    const struct ki_range *e;
    struct ki_listener a, b;

    (void)state;
    open_listener(&a, 5, false);
    open_listener(&b, 5, false);
    ki_ranges_restore(&a.applier.ranges, &said);
    hand_over(&a, &b);
    e = ki_ranges_find(&b.applier.ranges, &cache, 11);
    assert_non_null(e);
    assert_int_equal(e->more, INT32_MAX);
    assert_int_equal(e->fewer, INT32_MAX);
    close_listener(&a);
    close_listener(&b);
}

/* The blocks of a torn snapshot aren't all there: the stream is read from its beginning. */
static void torn_and_unusable(void **state)
{
    struct ki_snapshot *s;
    struct ki_listener a;

    (void)state;
    for (int i = 0; i < 3; i++) {
        open_listener(&a, 5, false);
        a.applier.has_windows = true;
        s = told(&a);
        s->torn = i == 1;
        s->unusable = i == 2;
        close_listener(&a);
        open_listener(&a, 5, false);
        ki_snapshot_give(s, &a);
        assert_int_equal(a.stream.torn, i > 0);
        assert_int_equal(a.applier.has_windows, i < 2);
        ki_snapshot_free(s);
        close_listener(&a);
    }
}

/* A stream that has brought nothing has nothing to hand over; one without a position, its ranks. */
static void without_a_position(void **state)
{
    struct ki_listener a;
    struct ki_snapshot *s;

    (void)state;
    open_listener(&a, 5, false);
    a.stream.base = KI_BASE_EMPTY;
    assert_int_equal(ki_snapshot_take(&a, &s), -ENODATA);
    a.stream.base = KI_BASE_UNPLACED;
    assert_int_equal(ki_snapshot_take(&a, &s), 0);
    assert_false(s->has_position);
    assert_int_equal(ki_snapshot_n_ranks(s), 1);
    ki_snapshot_free(s);
    close_listener(&a);
}

/* Where a dump tells less, the worse is taken for true. */
static void what_a_dump_leaves_out(void **state)
{
    static const char text[] = "{\"worker_id\":7,\"seq\":5}";
    struct ki_snapshot *s = read_text(text, strlen(text));

    (void)state;
    assert_true(s->has_position);
    assert_true(s->state.reasons);
    assert_int_equal(s->state.facts, KI_FACT_SUSPECTS);
    assert_int_equal(s->state.report_mode, KI_REPORTS_UNKNOWN);
    ki_snapshot_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fact),
        cmocka_unit_test(which_ranks_it_brings),
        cmocka_unit_test(what_reports_are),
        cmocka_unit_test(what_the_registration_tells_stays),
        cmocka_unit_test(partial_at_that_moment),
        cmocka_unit_test(a_loss_that_a_clear_ended),
        cmocka_unit_test(an_origin_that_was_behind),
        cmocka_unit_test(ranges),
        cmocka_unit_test(numbers_without_end),
        cmocka_unit_test(torn_and_unusable),
        cmocka_unit_test(without_a_position),
        cmocka_unit_test(what_a_dump_leaves_out),
    };

    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    kvi_destroy(no_model.index);
    return failed;
}
