// SPDX-License-Identifier: Apache-2.0
/* Learned speeds, sessions and the queue in front. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kv_select.h"

#define SECOND UINT64_C(1000000000)

static struct kv_holder holder_of(uint64_t worker)
{
    return (struct kv_holder){worker, 0};
}

static struct kvsel *make(struct kvsel_opts opts, uint64_t workers)
{
    struct kvsel *s = NULL;

    opts.size = sizeof(opts);
    opts.seed = 1;
    assert_int_equal(kvsel_create(&opts, &s), 0);
    for (uint64_t w = 1; w <= workers; w++) {
        struct kvsel_worker worker = {.size = sizeof(worker), .holder = holder_of(w)};

        assert_int_equal(kvsel_set_worker(s, &worker), 0);
    }
    return s;
}

static void book(struct kvsel *s, const char *id, uint64_t worker, uint64_t tokens, uint64_t now)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = tokens};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = holder_of(worker)};

    choice.uncovered = tokens;
    assert_int_equal(kvsel_book(s, id, strlen(id), &request, &choice, now), 0);
}

/* Let a prompt of 8000 tokens take @seconds at @worker. */
static void sample(struct kvsel *s, uint64_t worker, double seconds)
{
    static uint64_t now = SECOND;

    book(s, "x", worker, 8000, now);
    now += (uint64_t)(seconds * (double)SECOND);
    assert_int_equal(kvsel_first_token(s, "x", 1, now), 0);
    assert_int_equal(kvsel_free(s, "x", 1, KVSEL_DONE, now), 0);
}

static struct kvsel_load load_of(struct kvsel *s, uint64_t worker)
{
    struct kvsel_load load = {0};

    assert_int_equal(kvsel_get_load(s, holder_of(worker), &load), 0);
    return load;
}

/* Three workers at 10,000 tokens a second, one at 4000. Every fifth sample of all is far out. */
static void test_speed(void **state)
{
    struct kvsel *s = make((struct kvsel_opts){0}, 4);

    (void)state;
    for (int i = 0; i < 6; i++)
        sample(s, 4, 2);
    assert_float_equal(load_of(s, 4).factor, 1, 0); /* too few samples */
    for (int i = 0; i < 100; i++) {
        for (uint64_t w = 1; w <= 4; w++) {
            double usual = w == 4 ? 2 : .8 + .05 * (i % 3 - 1); /* a few percent apart */

            sample(s, w, i % 5 ? usual : i % 10 ? 100 * usual : usual / 100);
        }
    }
    for (uint64_t w = 1; w <= 3; w++) {
        assert_float_equal(load_of(s, w).speed, 10000, 800);
        assert_float_equal(load_of(s, w).factor, 1, 0); /* 25 % count as equal */
    }
    assert_float_equal(load_of(s, 4).speed, 4000, 1);
    assert_float_equal(load_of(s, 4).factor, 2.5, .3);
    for (int i = 0; i < 40; i++) /* it gets faster: the old samples go */
        sample(s, 4, .8);
    assert_float_equal(load_of(s, 4).factor, 1, 0);
    kvsel_destroy(s);
}

/* Prompts below 1024 tokens, and no time at all, teach nothing. A stated speed wins. */
static void test_no_sample(void **state)
{
    struct kvsel_worker worker = {.size = sizeof(worker), .holder = holder_of(1), .speed = 500};
    struct kvsel *s = make((struct kvsel_opts){0}, 2);

    (void)state;
    for (int i = 0; i < 20; i++) {
        book(s, "x", 1, 1000, SECOND);
        assert_int_equal(kvsel_first_token(s, "x", 1, 5 * SECOND), 0);
        assert_int_equal(kvsel_free(s, "x", 1, KVSEL_DONE, 5 * SECOND), 0);
        book(s, "x", 1, 8000, SECOND);
        assert_int_equal(kvsel_first_token(s, "x", 1, SECOND), 0);
        assert_int_equal(kvsel_free(s, "x", 1, KVSEL_DONE, SECOND), 0);
    }
    assert_float_equal(load_of(s, 1).speed, 0, 0);
    for (int i = 0; i < 20; i++)
        sample(s, 2, 8);
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    assert_float_equal(load_of(s, 1).factor, 2, 1e-9); /* 1000 of the fleet beside 500 */
    kvsel_destroy(s);
}

/* ---- sessions ---- */

static uint64_t choose(struct kvsel *s, const char *session, enum kvsel_why *why, uint64_t now)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100, .session = session};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    assert_int_equal(kvsel_select(s, &request, now, &choice), 0);
    *why = choice.why;
    return choice.worker.worker;
}

static void book_session(struct kvsel *s, const char *session, uint64_t worker, uint64_t now)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100, .session = session};
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = holder_of(worker)};

    assert_int_equal(kvsel_book(s, session, strlen(session), &request, &choice, now), 0);
}

static void test_session(void **state)
{
    struct kvsel *s = make(
        (struct kvsel_opts){.session_ns = 10 * SECOND, .session_waiting = 5000, .max_sessions = 2},
        2);
    enum kvsel_why why;

    (void)state;
    book_session(s, "chat", 1, SECOND);
    book(s, "some", 1, 5000, SECOND); /* 2 is idle, and yet: */
    assert_int_equal(choose(s, "chat", &why, 2 * SECOND), 1);
    assert_int_equal(why, KVSEL_BY_SESSION);
    assert_int_equal(choose(s, "", &why, 2 * SECOND), 2);
    assert_int_equal(choose(s, "chat", &why, 11 * SECOND), 2); /* its time is over */
    assert_int_equal(kvsel_free(s, "chat", 4, KVSEL_DONE, 11 * SECOND), 0);
    book_session(s, "chat", 1, 11 * SECOND);
    book(s, "more", 1, 1, 11 * SECOND);
    assert_int_equal(choose(s, "chat", &why, 12 * SECOND), 2); /* too much waits there */
    assert_int_equal(kvsel_free(s, "some", 4, KVSEL_DONE, 12 * SECOND), 0);
    assert_int_equal(choose(s, "chat", &why, 12 * SECOND), 1);
    book_session(s, "b", 2, 12 * SECOND);
    book_session(s, "c", 2, 12 * SECOND); /* the oldest of three is forgotten */
    choose(s, "chat", &why, 12 * SECOND);
    assert_int_not_equal(why, KVSEL_BY_SESSION);
    assert_int_equal(kvsel_remove_worker(s, holder_of(2)), 0);
    assert_int_equal(choose(s, "b", &why, 12 * SECOND), 1);
    kvsel_destroy(s);
}

/* ---- the queue ---- */

static int put(struct kvsel *s, uint64_t ticket, uint64_t tokens, uint32_t priority, uint64_t now)
{
    struct kvsel_request request = {.size = sizeof(request), .tokens = tokens};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    request.priority = priority;
    assert_int_equal(kvsel_select(s, &request, now, &choice), -EAGAIN);
    return kvsel_queue_put(s, ticket, &request, now);
}

static uint64_t next(struct kvsel *s, uint64_t now)
{
    uint64_t ticket = 0;
    int rc = kvsel_queue_next(s, now, &ticket);

    assert_true(rc == 0 || rc == -EAGAIN);
    return ticket;
}

static void test_queue(void **state)
{
    struct kvsel_opts opts = {.queue_waiting = 100, .queue_max = 4, .queue_max_tokens = 1000};
    struct kvsel_request request = {.size = sizeof(request), .tokens = 1, .released = true};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel *s = make(opts, 1);
    uint64_t late = 0;

    (void)state;
    book(s, "a", 1, 100, SECOND);
    assert_int_equal(put(s, 1, 300, 0, SECOND), 0);
    assert_int_equal(put(s, 2, 10, 0, SECOND + 1), 0);
    assert_int_equal(put(s, 3, 20, 5, SECOND + 2), 0);
    assert_int_equal(put(s, 3, 20, 5, SECOND + 2), -EEXIST);
    assert_int_equal(put(s, 4, 671, 0, SECOND + 3), -ENOBUFS); /* tokens */
    assert_int_equal(put(s, 4, 30, 0, SECOND + 3), 0);
    assert_int_equal(put(s, 5, 1, 0, SECOND + 4), -ENOBUFS);             /* requests */
    assert_int_equal(next(s, 2 * SECOND), 0);                            /* no room */
    assert_int_equal(kvsel_select(s, &request, 2 * SECOND, &choice), 0); /* one that mustn't wait */
    assert_int_equal(kvsel_queue_drop(s, 2), 0);
    assert_int_equal(kvsel_queue_drop(s, 2), -ENOENT);
    assert_int_equal(kvsel_first_token(s, "a", 1, 2 * SECOND), 0);
    request.released = false;
    assert_int_equal(kvsel_select(s, &request, 2 * SECOND, &choice), -EAGAIN); /* others first */
    assert_int_equal(next(s, 2 * SECOND), 3);
    assert_int_equal(next(s, 2 * SECOND), 1);
    assert_int_equal(kvsel_queue_late(s, 60 * SECOND, &late), -EAGAIN);
    assert_int_equal(kvsel_queue_late(s, 61 * SECOND + 3, &late), 0);
    assert_int_equal(late, 4);
    assert_int_equal(kvsel_select(s, &request, 2 * SECOND, &choice), 0);
    kvsel_destroy(s);
}

/* Fewest tokens first, but one that has waited for 5 s before all. */
static void test_shortest(void **state)
{
    struct kvsel *s =
        make((struct kvsel_opts){.queue_waiting = 100, .queue_order = KVSEL_SHORTEST}, 1);

    (void)state;
    book(s, "a", 1, 100, SECOND);
    assert_int_equal(put(s, 1, 300, 0, SECOND), 0);
    assert_int_equal(put(s, 2, 200, 0, 2 * SECOND), 0);
    assert_int_equal(put(s, 3, 100, 0, 2 * SECOND), 0);
    assert_int_equal(put(s, 4, 150, 0, 2 * SECOND), 0);
    assert_int_equal(kvsel_free(s, "a", 1, KVSEL_DONE, 2 * SECOND), 0);
    assert_int_equal(next(s, 3 * SECOND), 3);
    assert_int_equal(next(s, 6 * SECOND), 1);
    assert_int_equal(next(s, 6 * SECOND), 4);
    assert_int_equal(next(s, 6 * SECOND), 2);
    assert_int_equal(next(s, 6 * SECOND), 0);
    kvsel_destroy(s);
}

/* A request that is stuck behind larger priorities doesn't keep those from their turn by age. */
static void test_shortest_of_priorities(void **state)
{
    struct kvsel *s =
        make((struct kvsel_opts){.queue_waiting = 100, .queue_order = KVSEL_SHORTEST}, 1);

    (void)state;
    book(s, "a", 1, 100, SECOND);
    assert_int_equal(put(s, 1, 300, 0, SECOND), 0);
    assert_int_equal(put(s, 2, 200, 5, SECOND), 0);
    assert_int_equal(put(s, 3, 100, 5, 6 * SECOND), 0);
    assert_int_equal(kvsel_free(s, "a", 1, KVSEL_DONE, 6 * SECOND), 0);
    assert_int_equal(next(s, SECOND / 2), 3); /* a time that is too early makes nobody old */
    assert_int_equal(put(s, 4, 100, 5, 6 * SECOND), 0);
    assert_int_equal(next(s, 6 * SECOND), 2);
    assert_int_equal(next(s, 6 * SECOND), 4);
    assert_int_equal(next(s, 6 * SECOND), 1);
    kvsel_destroy(s);
}

/* Pairs wait for a worker that computes prompts: one that decodes is idle, and no room for them. */
static void test_queue_of_pairs(void **state)
{
    struct kvsel *s = make((struct kvsel_opts){.queue_waiting = 100}, 2);
    struct kvsel_request pair = {.size = sizeof(pair), .tokens = 1000, .stage = KVSEL_PAIR};
    struct kvsel_worker worker = {.size = sizeof(worker), .roles = KVSEL_PREFILL};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    (void)state;
    worker.holder = holder_of(1);
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    worker.holder = holder_of(2);
    worker.roles = KVSEL_DECODE;
    assert_int_equal(kvsel_set_worker(s, &worker), 0);
    book(s, "a", 1, 100, SECOND);
    assert_int_equal(kvsel_select(s, &pair, SECOND, &choice), -EAGAIN);
    assert_int_equal(kvsel_queue_put(s, 1, &pair, SECOND), 0);
    assert_int_equal(next(s, SECOND), 0);
    assert_int_equal(kvsel_free(s, "a", 1, KVSEL_DONE, SECOND), 0);
    assert_int_equal(next(s, SECOND), 1);
    kvsel_destroy(s);
}

/* The largest times stand for ever; they don't wrap. */
static void test_endless_times(void **state)
{
    struct kvsel_opts opts = {.queue_waiting = 100,
                              .queue_max_wait_ns = UINT64_MAX,
                              .session_ns = UINT64_MAX,
                              .predict_ns = UINT64_MAX - 1};
    struct kvsel *s = make(opts, 2);
    struct kvsel_request request = {.size = sizeof(request), .tokens = 100};
    struct kvsel_stats stats = KVSEL_STATS_INIT;
    uint64_t hashes[4] = {1, 2, 3, 4}, ticket = 0;
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = holder_of(1)};
    enum kvsel_why why;

    (void)state;
    book_session(s, "chat", 1, SECOND);
    assert_int_equal(choose(s, "chat", &why, 9 * SECOND), 1);
    assert_int_equal(why, KVSEL_BY_SESSION);
    request.hashes = hashes;
    request.n_hashes = 4;
    assert_int_equal(kvsel_book(s, "p", 1, &request, &choice, SECOND), 0);
    kvsel_expire(s, 9 * SECOND, NULL, NULL);
    assert_int_equal(kvsel_get_stats(s, &stats), 0);
    assert_int_equal(stats.predictions, 1);
    assert_int_equal(kvsel_queue_put(s, 1, &request, SECOND), 0);
    assert_int_equal(kvsel_queue_late(s, 9 * SECOND, &ticket), -EAGAIN);
    kvsel_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_speed),          cmocka_unit_test(test_no_sample),
        cmocka_unit_test(test_session),        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_shortest),       cmocka_unit_test(test_shortest_of_priorities),
        cmocka_unit_test(test_queue_of_pairs), cmocka_unit_test(test_endless_times),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
