// SPDX-License-Identifier: Apache-2.0
/* Notices through their text and back; the log with followers that keep up, and one that doesn't; ends. */
#include <errno.h>
#include <stdlib.h>

#include "base/unit.h"
#include "selector/notice.h"
#include "selector/notices.h"
#include "selector/selector.h"

enum { TURNS = 2000, HASHES = 40 };

static uint64_t any(uint64_t *seed)
{
    uint64_t below = unit_below(seed, 3) ? 1000 : UINT64_MAX;

    return unit_below(seed, below);
}

/* Fill @text, of @size bytes, with characters that JSON escapes, too. */
static const char *text_of(uint64_t *seed, char *text, size_t size)
{
    static const char letters[] = "ab\"\\\n\t/\x01 z";
    size_t n = 1 + unit_below(seed, size - 1);

    for (size_t i = 0; i < n; i++)
        text[i] = letters[unit_below(seed, sizeof(letters) - 1)];
    text[n] = '\0';
    return text;
}

static void check_text(const char *got, const char *wanted)
{
    assert_int_equal(!got, !wanted);
    if (wanted)
        assert_string_equal(got, wanted);
}

static void check_equal(const struct ksel_notice *got, const struct ksel_notice *wanted)
{
    assert_int_equal(got->kind, wanted->kind);
    assert_int_equal(got->at_ns, wanted->at_ns);
    assert_int_equal(got->origin, wanted->origin);
    assert_int_equal(got->stamp, wanted->stamp);
    assert_int_equal(got->id_len, wanted->id_len);
    check_text(got->id, wanted->id);
    check_text(got->model, wanted->model);
    check_text(got->group, wanted->group);
    check_text(got->lora, wanted->lora);
    check_text(got->session, wanted->session);
    assert_int_equal(got->block_size, wanted->block_size);
    assert_int_equal(got->worker.worker, wanted->worker.worker);
    assert_int_equal(got->worker.rank, wanted->worker.rank);
    assert_int_equal(got->paired, wanted->paired);
    assert_int_equal(got->prefill.worker, wanted->prefill.worker);
    assert_int_equal(got->prefill.rank, wanted->prefill.rank);
    assert_int_equal(got->first_token, wanted->first_token);
    assert_int_equal(got->lost, wanted->lost);
    assert_int_equal(got->tokens, wanted->tokens);
    assert_int_equal(got->uncovered, wanted->uncovered);
    assert_int_equal(got->output, wanted->output);
    assert_int_equal(got->created_ns, wanted->created_ns);
    assert_int_equal(got->progress_ns, wanted->progress_ns);
    assert_int_equal(got->n_hashes, wanted->n_hashes);
    for (size_t i = 0; wanted->hashes && i < got->n_hashes; i++)
        assert_int_equal(got->hashes[i], wanted->hashes[i * wanted->stride + wanted->stride - 1]);
}

static void written_and_read_they_are_equal(void **state)
{
    struct ksel_notice_reader reader = {0};
    struct kv_buf line = KV_BUF_INIT;
    uint64_t seed = unit_seed(), hashes[HASHES * 4];
    char id[30], model[20], group[20], lora[20], session[20];

    (void)state;
    for (int turn = 0; turn < TURNS; turn++) {
        struct ksel_notice n = {.kind = KSEL_NOTICE_FIRST_TOKEN + (int)unit_below(&seed, 3)}, got;

        n.at_ns = any(&seed);
        n.origin = any(&seed) | 1;
        n.stamp = any(&seed);
        n.id = text_of(&seed, id, sizeof(id));
        n.id_len = strlen(id);
        n.output = any(&seed);
        n.lost = unit_below(&seed, 2);
        n.stride = 1 + unit_below(&seed, 4);
        if (unit_below(&seed, 2)) {
            n.kind = KSEL_NOTICE_BOOKED;
            n.model = text_of(&seed, model, sizeof(model));
            n.group = text_of(&seed, group, sizeof(group));
            n.lora = unit_below(&seed, 2) ? text_of(&seed, lora, sizeof(lora)) : NULL;
            n.session = unit_below(&seed, 2) ? text_of(&seed, session, sizeof(session)) : NULL;
            n.block_size = 1 + (uint32_t)unit_below(&seed, 512);
            n.worker = (struct kv_holder){any(&seed), (uint32_t)unit_below(&seed, 9)};
            n.paired = unit_below(&seed, 2);
            if (n.paired)
                n.prefill = (struct kv_holder){any(&seed), (uint32_t)unit_below(&seed, 9)};
            n.first_token = unit_below(&seed, 2);
            n.tokens = any(&seed);
            n.uncovered = any(&seed);
            n.created_ns = any(&seed);
            n.progress_ns = any(&seed);
            n.n_hashes = unit_below(&seed, HASHES);
            n.hashes = hashes;
            for (size_t i = 0; i < HASHES * 4; i++)
                hashes[i] = any(&seed);
        }
        kv_buf_clear(&line);
        ksel_notice_write(&n, &line);
        assert_int_equal(line.data[line.len - 1], '\n');
        assert_null(memchr(line.data, '\n', line.len - 1));
        assert_int_equal(ksel_notice_read(&reader, (struct kv_str){line.data, line.len - 1}, &got),
                         0);
        check_equal(&got, &n);
        /* Cut anywhere, it is none. */
        assert_int_equal(
            ksel_notice_read(&reader, (struct kv_str){line.data, unit_below(&seed, line.len - 1)},
                             &got),
            -EPROTO);
    }
    kv_buf_fini(&line);
    ksel_notice_reader_fini(&reader);
}

static void what_is_none(void **state)
{
    static const char *const lines[] = {
        "",
        "[]",
        "{\"kind\":\"booked\",\"id\":\"r\",\"origin\":1}",
        "{\"kind\":\"booked\",\"id\":\"r\",\"origin\":1,\"model_name\":\"m\",\"block_size\":16}",
        "{\"kind\":\"freed\",\"origin\":1}",
        "{\"kind\":\"freed\",\"id\":\"r\"}",
        "{\"kind\":\"hello\"}",
        "{\"kind\":\"freed\",\"id\":\"r\",\"origin\":-1}",
        "{\"kind\":1}",
    };
    static const char later[] = "{\"kind\":\"of later versions\",\"x\":{\"y\":[1]},\"origin\":3}";
    struct ksel_notice_reader reader = {0};
    struct ksel_notice n;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(lines); i++)
        assert_int_equal(ksel_notice_read(&reader, (struct kv_str){lines[i], strlen(lines[i])}, &n),
                         -EPROTO);
    assert_int_equal(ksel_notice_read(&reader, (struct kv_str){later, sizeof(later) - 1}, &n), 0);
    assert_int_equal(n.kind, KSEL_NOTICE_OTHER);
    ksel_notice_reader_fini(&reader);
}

static void ignore(void *arg)
{
    (void)arg;
}

static struct kh_pipe *pipe_of(void)
{
    const struct kh_pipe_reader reader = {ignore, ignore, NULL};
    struct kh_pipe *pipe;

    assert_int_equal(kh_pipe_create(64, &reader, &pipe), 0);
    return pipe;
}

/* Beside a plain buffer: a follower gets all bytes in order, or is told that some are lost. */
static void followers_get_all_or_know(void **state)
{
    enum { SIZE = 300 };
    struct ksel_notices log;
    struct kh_pipe *pipes[2] = {pipe_of(), pipe_of()};
    struct ksel_follower quick = {.pipe = pipes[0]}, slow = {.pipe = pipes[1]};
    struct kv_buf all = KV_BUF_INIT, got = KV_BUF_INIT, late = KV_BUF_INIT;
    uint64_t seed = unit_seed();
    char line[100];

    (void)state;
    ksel_notices_init(&log, SIZE);
    ksel_notices_add(&log, "before", 6);
    assert_int_equal(ksel_notices_join(&log, &quick), 0);
    assert_int_equal(ksel_notices_take(&log, &quick, &got, 99), 0);
    assert_int_equal(ksel_notices_join(&log, &slow), 0);
    assert_int_equal(ksel_notices_followers(&log), 2);
    for (int turn = 0; turn < TURNS; turn++) {
        size_t len = 1 + unit_below(&seed, sizeof(line));

        for (size_t i = 0; i < len; i++)
            line[i] = (char)unit_below(&seed, 256);
        ksel_notices_add(&log, line, len);
        kv_buf_append(&all, line, len);
        if (all.len - got.len + sizeof(line) > SIZE || unit_below(&seed, 2))
            while (ksel_notices_take(&log, &quick, &got, 1 + unit_below(&seed, 70)) > 0)
                continue;
    }
    while (ksel_notices_take(&log, &quick, &got, 99) > 0)
        continue;
    assert_int_equal(got.len, all.len);
    assert_memory_equal(got.data, all.data, all.len);
    assert_int_equal(ksel_notices_take(&log, &slow, &late, 99), -EOVERFLOW);
    assert_int_equal(late.len, 0);
    ksel_notices_leave(&log, &slow);
    ksel_notices_add(&log, line, 5);
    ksel_notices_end(&log);
    assert_int_equal(ksel_notices_take(&log, &quick, &got, 99), 5);
    assert_int_equal(ksel_notices_take(&log, &quick, &got, 99), -EPIPE);
    ksel_notices_leave(&log, &quick);
    ksel_notices_fini(&log);
    kv_buf_fini(&all);
    kv_buf_fini(&got);
    kh_pipe_destroy(pipes[0]);
    kh_pipe_destroy(pipes[1]);
}

/* Of ends the last KSEL_ENDS are known, each by both its numbers. */
static void ends_are_remembered(void **state)
{
    static struct ksel s;
    uint64_t n = 2 * KSEL_ENDS + 77;

    (void)state;
    assert_false(ksel_has_ended(&s, 1, 1));
    for (uint64_t i = 0; i < n; i++)
        ksel_remember_end(&s.peers, i % 3, i, "id", 2, false);
    for (uint64_t i = 0; i < n; i++) {
        assert_int_equal(ksel_has_ended(&s, i % 3, i), i >= n - KSEL_ENDS);
        assert_false(ksel_has_ended(&s, i % 3 + 1, i));
    }
    for (size_t i = 0; i < KSEL_ENDS; i++)
        free(s.peers.ends[i].id);
    free(s.peers.ends);
}

/* Clocks that run apart for ten days are still known to a millisecond, whatever is delayed on the way. */
static void clocks_run_apart(void **state)
{
    static struct ksel s;
    struct ksel_peer peer = {.s = &s};
    const uint64_t step = UINT64_C(250000000), steps = 10 * 86400 * 4;
    struct ksel_notice n = {.kind = KSEL_NOTICE_HELLO, .origin = 1};

    (void)state;
    pthread_mutex_init(&s.lock, NULL);
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t now = i * step, delay = i % 3 ? UINT64_C(5000000) : 0;

        n.at_ns = now - now / 10000; /* 100 ppm slower */
        ksel_hear(&peer, &n, now + delay);
        n.kind = KSEL_NOTICE_ALIVE;
        if ((int64_t)(peer.offset_ns - now / 10000) > 1000000)
            fail_msg("step %lu: offset %lu", (unsigned long)i, (unsigned long)peer.offset_ns);
    }
    assert_true(peer.offset_ns + 1000000 > steps * step / 10000);
    assert_int_equal(s.peers.heard, 0); /* none told of a booking */
    pthread_mutex_destroy(&s.lock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_and_read_they_are_equal),
        cmocka_unit_test(what_is_none),
        cmocka_unit_test(followers_get_all_or_know),
        cmocka_unit_test(ends_are_remembered),
        cmocka_unit_test(clocks_run_apart),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
