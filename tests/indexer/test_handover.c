// SPDX-License-Identifier: Apache-2.0
/* Handover of a stream's state: taken from one listener, written, read, and given to another. */
#include "base/unit.h"

#include "base/json.h"
#include "indexer/registry/handover.h"
#include "indexer/registry/tables.h"

/* A listener that follows nobody, with a position. */
static struct ki_model no_model; /* it counts the listeners that have something to tell */

static void open_listener(struct ki_listener *l, uint64_t sequence, bool partial)
{
    struct ki_stream_opts opts = {0};

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

/* Knowledge of @from, as a dump tells it. */
static struct ki_handover *told(struct ki_listener *from)
{
    struct kv_buf text = KV_BUF_INIT;
    struct ki_handover *taken, *read;
    struct kv_json_writer w;
    struct kv_json json;

    assert_int_equal(ki_handover_take(from, &taken), 0);
    kv_json_writer_init(&w, &text);
    kv_json_begin_object(&w);
    ki_handover_write(taken, &w);
    kv_json_end_object(&w);
    assert_int_equal(ki_handover_create(&read), 0);
    kv_json_init(&json, text.data, text.len);
    ki_handover_read(read, &json);
    assert_int_equal(kv_json_finish(&json), 0);
    assert_false(read->unusable);
    ki_handover_free(taken);
    kv_buf_fini(&text);
    return read;
}

static void hand_over(struct ki_listener *from, struct ki_listener *to)
{
    struct ki_handover *h = told(from);

    ki_handover_give(h, to);
    ki_handover_free(h);
}

/* Each fact of a state comes through a dump, alone and beside all others. */
static void every_fact(void **state)
{
    const unsigned all = 2 * KI_FACT_ADRIFT - 1;
    struct ki_listener a, b;
    struct ki_state at;

    (void)state;
    for (unsigned bit = 1; bit <= KI_FACT_ADRIFT; bit *= 2)
        for (int i = 0; i < 2; i++) {
            unsigned facts = (i ? all & ~bit : bit) & ~KI_FACT_ADRIFT;

            open_listener(&a, 5, false);
            open_listener(&b, 5, false);
            ki_state_give(&(struct ki_state){.facts = facts}, &a);
            assert_int_equal(a.applier.has_windows, (facts & KI_FACT_WINDOWS) != 0);
            assert_int_equal(a.applier.retains, (facts & KI_FACT_RETAINS) != 0);
            assert_int_equal(a.stream.healed, (facts & KI_FACT_HEALED) != 0);
            ki_state_take(&a, &at); /* a seeded stream has no connection */
            assert_int_equal(at.facts, facts | KI_FACT_ADRIFT);
            hand_over(&a, &b);
            ki_state_take(&b, &at);
            assert_int_equal(at.facts, facts | KI_FACT_ADRIFT);
            close_listener(&a);
            close_listener(&b);
        }
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

/* The reasons for which a watermark is partial hold for the stream at its own moment, too. */
static void partial_at_that_moment(void **state)
{
    struct ki_listener a;
    struct ki_handover *h;

    (void)state;
    for (int reason = 0; reason < 3; reason++) {
        open_listener(&a, 5, reason == 1);
        a.stream.base = KI_BASE_OWN; /* the process is known */
        if (reason == 2)
            ki_doubts_add(&a.applier.doubts, 0, 0, KI_WHY_CLEAR);
        h = told(&a);
        assert_int_equal(h->state.reasons != 0, reason > 0);
        ki_handover_free(h);
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
        assert_false(ki_stream_reasons(&a.stream));
        hand_over(&a, &b);
        ki_stream_note_more(&b.stream, 1);
        assert_int_equal(ki_stream_reasons(&b.stream) != 0, healed);
        close_listener(&a);
        close_listener(&b);
    }
}

/* State of another batch is of no use, and the stream is read from its beginning. */
static void another_position(void **state)
{
    struct ki_listener a, b;

    (void)state;
    open_listener(&a, 5, false);
    open_listener(&b, 6, false);
    a.applier.has_windows = true;
    hand_over(&a, &b);
    assert_false(b.applier.has_windows);
    assert_true(b.stream.torn);
    close_listener(&a);
    close_listener(&b);
}

/* Where a dump tells less, the worse is taken for true. */
static void what_a_dump_leaves_out(void **state)
{
    static const char text[] = "{\"worker_id\":7,\"seq\":5}";
    struct ki_handover *h;
    struct kv_json json;

    (void)state;
    assert_int_equal(ki_handover_create(&h), 0);
    kv_json_init(&json, text, strlen(text));
    ki_handover_read(h, &json);
    assert_int_equal(kv_json_finish(&json), 0);
    assert_true(h->state.reasons);
    assert_int_equal(h->state.facts, KI_FACT_SUSPECTS);
    assert_int_equal(h->state.report_mode, KI_REPORTS_UNKNOWN);
    ki_handover_free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_fact),
        cmocka_unit_test(what_reports_are),
        cmocka_unit_test(what_the_registration_tells_stays),
        cmocka_unit_test(partial_at_that_moment),
        cmocka_unit_test(a_loss_that_a_clear_ended),
        cmocka_unit_test(another_position),
        cmocka_unit_test(what_a_dump_leaves_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
