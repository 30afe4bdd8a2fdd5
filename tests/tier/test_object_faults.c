// SPDX-License-Identifier: Apache-2.0
/* The object tier over a store that hangs, fails or is slow: every batch ends in time, once, and
 * with the right status. */
#include "tier/object_unit.h"

/* Blocks that are there, and have been touched: that comes after a get's end, and only once. */
static void put_and_get(struct kvbm_object *o, uint32_t n)
{
    expect(o, KVBM_OBJECT_PUT, 0, n, 0);
    expect(o, KVBM_OBJECT_GET, 0, n, 0);
    wait_until(shaky->touches == 1 && shaky->inside == 0);
}

/* -- order and bounds -------------------------------------------------------------------------- */

static void test_onboarding_first(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *held, *put[2], *get, *look;
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    o = open_with(&opts);
    shaky->hang = true;
    held = submit(o, KVBM_OBJECT_EXISTS, 0, 1, 0);
    wait_until(shaky->inside == 1);
    put[0] = submit(o, KVBM_OBJECT_PUT, 0, 1, 0);
    put[1] = submit(o, KVBM_OBJECT_PUT, 1, 1, 0);
    get = submit(o, KVBM_OBJECT_GET, 5, 1, 0);
    look = submit(o, KVBM_OBJECT_EXISTS, 5, 1, 0);
    assert_int_equal(stats_of(o).queued, 4);
    shaky->hang = false;
    job_wait(put[1]);
    assert_true(get->order < look->order && look->order < put[0]->order &&
                put[0]->order < put[1]->order);
    ends(held, -ENOENT);
    ends(put[0], 0);
    ends(put[1], 0);
    ends(get, -ENOENT);
    ends(look, -ENOENT);
    kvbm_object_close(o);
}

/* Within that the higher priority, then the older. */
static void test_priorities(void **state)
{
    static const int32_t priorities[] = {0, -3, 7, 0, 7, INT32_MIN, 2, -3};
    static const int sequence[] = {2, 4, 6, 0, 3, 1, 7, 5};
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *held, *jobs[KV_COUNT(priorities)], *put;
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    o = open_with(&opts);
    shaky->hang = true;
    held = submit(o, KVBM_OBJECT_EXISTS, 0, 1, 0);
    wait_until(shaky->inside == 1);
    put = job_new(KVBM_OBJECT_PUT, 90, 1, BLOCK);
    put->batch.priority = INT32_MAX;
    assert_int_equal(kvbm_object_submit(o, &put->batch), 0);
    for (size_t i = 0; i < KV_COUNT(jobs); i++) {
        jobs[i] = job_new(KVBM_OBJECT_GET, 10 * i, 1, BLOCK);
        jobs[i]->batch.priority = priorities[i];
        assert_int_equal(kvbm_object_submit(o, &jobs[i]->batch), 0);
    }
    shaky->hang = false;
    job_wait(put);
    for (size_t i = 0; i + 1 < KV_COUNT(jobs); i++)
        assert_true(jobs[sequence[i]]->order < jobs[sequence[i + 1]]->order);
    assert_true(jobs[5]->order < put->order); /* whatever its priority */
    for (size_t i = 0; i < KV_COUNT(jobs); i++)
        ends(jobs[i], -ENOENT);
    ends(held, -ENOENT);
    ends(put, 0);
    kvbm_object_close(o);
}

/* However many offload to a store that takes nothing, one thread is there for those who wait. */
static void test_thread_for_onboarding(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *put[5];
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 2;
    o = open_with(&opts);
    shaky->hang_puts = true;
    for (uint64_t i = 0; i < 5; i++)
        put[i] = submit(o, KVBM_OBJECT_PUT, i, 1, 0);
    wait_until(shaky->inside == 1);
    expect(o, KVBM_OBJECT_GET, 50, 1, -ENOENT);
    expect(o, KVBM_OBJECT_EXISTS, 50, 1, -ENOENT);
    assert_int_equal(shaky->inside, 1);
    shaky->hang_puts = false;
    for (uint64_t i = 0; i < 5; i++)
        ends(put[i], 0);
    kvbm_object_close(o);
}

/* Exactly as many threads as asked for, however the first ones come to run. */
static void test_number_of_threads(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    (void)state;

    opts.n_threads = 2;
    for (int round = 0; round < 20; round++) {
        struct job *jobs[4];
        struct kvbm_object *o = open_with(&opts);

        shaky->hang = true;
        for (uint64_t i = 0; i < 4; i++)
            jobs[i] = submit(o, KVBM_OBJECT_EXISTS, i, 1, 0);
        wait_until(shaky->inside == 2);
        usleep(2000);
        assert_int_equal(shaky->inside, 2);
        assert_int_equal(stats_of(o).queued, 2);
        shaky->hang = false;
        for (int i = 0; i < 4; i++)
            ends(jobs[i], -ENOENT);
        kvbm_object_close(o);
    }
}

static void test_queue_is_bounded(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *held, *waiting[3], *more = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    opts.max_queue = 3;
    o = open_with(&opts);
    shaky->hang = true;
    held = submit(o, KVBM_OBJECT_GET, 0, 1, 0);
    wait_until(shaky->inside == 1);
    for (int i = 0; i < 3; i++)
        waiting[i] = submit(o, i == 1 ? KVBM_OBJECT_PUT : KVBM_OBJECT_GET, 9, 1, 0);
    assert_int_equal(kvbm_object_submit(o, &more->batch), -EAGAIN);
    assert_int_equal(stats_of(o).refused, 1);
    kvbm_object_cancel(o, &waiting[1]->batch);
    ends(waiting[1], -ECANCELED);
    assert_int_equal(kvbm_object_submit(o, &more->batch), 0);
    shaky->hang = false;
    ends(held, -ENOENT);
    ends(waiting[0], -ENOENT);
    ends(waiting[2], -ENOENT);
    ends(more, -ENOENT);
    kvbm_object_close(o);
}

/* -- deadlines --------------------------------------------------------------------------------- */

#define LATE_MS 3000 /* time enough for a busy machine to begin all that then hangs */

static void test_hanging(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    opts.breaker_failures = 1000;
    opts.timeout_ms = LATE_MS;
    o = open_with(&opts);
    put_and_get(o, 5);
    for (int turn = 0; turn < 2; turn++) {
        struct job *get, *put, *look;

        shaky->hang = true;
        get = submit(o, KVBM_OBJECT_GET, 0, 5, turn == 0 ? 0 : LATE_MS); /* 0: timeout_ms */
        put = submit(o, KVBM_OBJECT_PUT, 10, 5, LATE_MS);
        look = submit(o, KVBM_OBJECT_EXISTS, 0, 5, LATE_MS);
        ends(get, -ETIMEDOUT); /* its memory is gone before the calls come back */
        ends(put, -ETIMEDOUT);
        ends(look, -ETIMEDOUT);
        assert_int_equal(stats_of(o).left_behind, 3);
        assert_int_equal(shaky->inside, 3);
        shaky->hang = false;
        wait_until(stats_of(o).left_behind == 0);
        expect(o, KVBM_OBJECT_GET, 0, 5, 0);
    }
    assert_int_equal(stats_of(o).late, 30);
    kvbm_object_close(o);
    wait_until(shaky->opens == shaky->closes);
}

/* A deadline that has passed, and one that passes in the queue. */
static void test_late_before_it_began(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *past = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK), *held, *waits;
    struct kvbm_object *o;
    int calls;
    (void)state;

    opts.n_threads = 1;
    o = open_with(&opts);
    past->batch.deadline_ns = 1;
    assert_int_equal(kvbm_object_submit(o, &past->batch), 0);
    job_wait(past);
    assert_int_equal(past->ios[0].status, -ETIMEDOUT);
    job_free(past);
    shaky->hang = true;
    held = submit(o, KVBM_OBJECT_GET, 0, 1, 0);
    wait_until(shaky->inside == 1);
    calls = shaky->get_batches;
    waits = submit(o, KVBM_OBJECT_GET, 0, 1, 30);
    ends(waits, -ETIMEDOUT);
    shaky->hang = false;
    ends(held, -ENOENT);
    assert_int_equal(shaky->get_batches, calls);
    kvbm_object_close(o);
}

/* All threads hang, and those that replaced them: then calls fail at once, until they come back. */
static void test_all_hang(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *job = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    struct kvbm_object *o;
    int rc, n = 0;
    (void)state;

    opts.n_threads = 2;
    opts.breaker_failures = 1000;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->hang = true;
    for (;;) {
        job->batch.deadline_ns = kv_now_ns() + 20 * KV_NS_PER_MS;
        rc = kvbm_object_submit(o, &job->batch);
        if (rc < 0)
            break;
        job_wait(job);
        job->done = 0;
        usleep(5000); /* for the next thread to be there */
        assert_true(++n < 500);
    }
    assert_int_equal(rc, -EHOSTDOWN);
    assert_int_equal(shaky->inside, 4);
    assert_int_equal(stats_of(o).left_behind, 4);
    shaky->hang = false;
    wait_until(stats_of(o).left_behind == 0);
    job->batch.deadline_ns = 0;
    job->done = 0;
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    ends(job, 0);
    kvbm_object_close(o);
}

static void test_deadline_storm(void **state)
{
    enum { JOBS = 300 };
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    uint64_t random = unit_seed(), n_ok = 0, n_late = 0;
    struct job *jobs[JOBS];
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 3;
    opts.breaker_failures = 1000000;
    opts.max_queue = 1000;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 20, 0);
    shaky->delay_us = 2000;
    for (int i = 0; i < JOBS; i++) {
        enum kvbm_object_op op = (enum kvbm_object_op)unit_below(&random, 3);

        jobs[i] = job_new(op, unit_below(&random, 10), 1 + (uint32_t)unit_below(&random, 8), BLOCK);
        jobs[i]->batch.deadline_ns = kv_now_ns() + unit_below(&random, 60 * KV_NS_PER_MS);
        if (kvbm_object_submit(o, &jobs[i]->batch) < 0)
            jobs[i]->done = -1; /* all hang, for the moment */
    }
    for (int i = 0; i < JOBS; i++) {
        if (jobs[i]->done >= 0) {
            job_wait(jobs[i]);
            assert_true(jobs[i]->done_ns < jobs[i]->batch.deadline_ns + SLACK_NS);
            n_ok += jobs[i]->ios[0].status == 0;
            n_late += jobs[i]->ios[0].status == -ETIMEDOUT;
            assert_true(
                jobs[i]->ios[0].status == 0 || jobs[i]->ios[0].status == -ETIMEDOUT ||
                /* being put again, or by a put that was late: see unpublished.c */
                (jobs[i]->ios[0].status == -ENOENT && jobs[i]->batch.op != KVBM_OBJECT_PUT));
        }
        job_free(jobs[i]);
    }
    print_message("%d ok, %d late\n", (int)n_ok, (int)n_late);
    shaky->delay_us = 0;
    wait_until(stats_of(o).left_behind == 0);
    expect(o, KVBM_OBJECT_GET, 0, 20, 0);
    kvbm_object_close(o);
}

/* -- the breaker ------------------------------------------------------------------------------- */

static int try_once(struct kvbm_object *o)
{
    struct job *job = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    int rc = kvbm_object_submit(o, &job->batch);

    if (rc == 0) {
        job_wait(job);
        rc = job->ios[0].status;
    }
    job_free(job);
    return rc;
}

static void test_breaker(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    uint64_t opened_ns = 0, begun_ns = 0;
    bool in_time = true; /* else one may have been let through already */
    int calls;
    (void)state;

    opts.breaker_failures = 3;
    opts.breaker_reopen_ms = 200;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->fail_rc = -ECONNRESET;
    assert_int_equal(try_once(o), -ECONNRESET);
    assert_int_equal(try_once(o), -ECONNRESET);
    shaky->fail_rc = 0;
    assert_int_equal(try_once(o), 0); /* not in a row */
    shaky->fail_rc = -ECONNRESET;
    for (int i = 0; i < 3; i++) {
        assert_false(stats_of(o).open);
        opened_ns = kv_now_ns();
        assert_int_equal(try_once(o), -ECONNRESET);
    }
    assert_true(stats_of(o).open);
    assert_int_equal(stats_of(o).opened, 1);
    calls = shaky->get_batches;
    for (int i = 0; i < 50; i++) {
        int rc = try_once(o);

        in_time = kv_now_ns() < opened_ns + 200 * KV_NS_PER_MS;
        if (!in_time)
            break;
        assert_int_equal(rc, -EHOSTDOWN);
        assert_int_equal(shaky->get_batches, calls); /* nobody was bothered */
        assert_true(stats_of(o).refused > (uint64_t)i);
    }

    /* One is let through after 200 ms, over a new handle, and fails: the next one after 400. */
    wait_until((begun_ns = kv_now_ns(), try_once(o)) == -ECONNRESET);
    assert_true(kv_now_ns() >= opened_ns + 190 * KV_NS_PER_MS);
    opened_ns = begun_ns;
    if (in_time)
        assert_int_equal(shaky->get_batches, calls + 1);
    assert_true(shaky->opens >= 2);
    wait_until(try_once(o) == -ECONNRESET);
    assert_true(kv_now_ns() >= opened_ns + 380 * KV_NS_PER_MS);
    assert_int_equal(stats_of(o).opened, 1);

    shaky->fail_rc = 0;
    wait_until(try_once(o) == 0);
    assert_false(stats_of(o).open);
    for (int i = 0; i < 20; i++)
        assert_int_equal(try_once(o), 0);
    kvbm_object_close(o);
    assert_int_equal(shaky->opens, shaky->closes);
}

/* While one is on its way to see, the others are refused; what waited when it opened has failed. */
static void test_half_open(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *held, *waits, *probe;
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    opts.breaker_failures = 1;
    opts.breaker_reopen_ms = 50;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->hang = true;
    held = submit(o, KVBM_OBJECT_GET, 0, 1, 0);
    wait_until(shaky->inside == 1);
    waits = submit(o, KVBM_OBJECT_GET, 0, 1, 0);
    shaky->fail_rc = -ETIMEDOUT;
    shaky->hang = false;
    ends(held, -ETIMEDOUT);
    ends(waits, -EHOSTDOWN);

    shaky->fail_rc = 0;
    shaky->hang = true;
    probe = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    wait_until(kvbm_object_submit(o, &probe->batch) == 0);
    wait_until(shaky->inside == 1);
    usleep(150 * 1000);
    assert_int_equal(try_once(o), -EHOSTDOWN);
    kvbm_object_cancel(o,
                       &probe->batch); /* says nothing of the store: the next one may try at once */
    ends(probe, -ECANCELED);
    shaky->hang = false;
    wait_until(try_once(o) == 0);
    assert_false(stats_of(o).open);
    kvbm_object_close(o);
}

/* The breaker is open, and the one that goes to see is in the store's open. Returns that one. */
static struct job *reopening(struct kvbm_object *o)
{
    struct job *probe = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    int opens = shaky->opens;

    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->fail_rc = -ECONNRESET;
    assert_int_equal(try_once(o), -ECONNRESET);
    assert_true(stats_of(o).open);
    shaky->fail_rc = 0;
    shaky->hang_open = true;
    wait_until(kvbm_object_submit(o, &probe->batch) == 0);
    wait_until(shaky->opens == opens + 1);
    return probe;
}

static struct kvbm_object *open_nervous(void)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);

    opts.breaker_failures = 1;
    opts.breaker_reopen_ms = 50;
    opts.max_queue = 4;
    return open_with(&opts);
}

/* Puts wait for a store that comes back; gets don't wait. */
static void test_puts_wait_for_reopening(void **state)
{
    struct kvbm_object *o = open_nervous();
    struct job *probe = reopening(o), *put[4], *more = job_new(KVBM_OBJECT_PUT, 50, 1, BLOCK);
    (void)state;

    for (uint64_t i = 0; i < 4; i++)
        put[i] = submit(o, KVBM_OBJECT_PUT, 10 + i, 1, 0);
    assert_int_equal(kvbm_object_submit(o, &more->batch), -EAGAIN);
    assert_int_equal(try_once(o), -EAGAIN);
    kvbm_object_cancel(o, &put[1]->batch);
    ends(put[1], -ECANCELED);
    assert_int_equal(try_once(o), -EHOSTDOWN);
    put[1] = submit(o, KVBM_OBJECT_PUT, 11, 1, 30);
    ends(put[1], -ETIMEDOUT);
    usleep(20000);
    assert_int_equal(stats_of(o).queued, 3);
    shaky->hang_open = false;
    ends(put[0], 0);
    ends(put[2], 0);
    ends(put[3], 0);
    ends(probe, 0);
    assert_int_equal(stats_of(o).opened, 1);
    expect(o, KVBM_OBJECT_GET, 12, 2, 0);
    job_free(more);
    kvbm_object_close(o);
}

static void test_reopening_fails(void **state)
{
    struct kvbm_object *o = open_nervous();
    struct job *probe = reopening(o), *put[2];
    (void)state;

    put[0] = submit(o, KVBM_OBJECT_PUT, 10, 1, 0);
    put[1] = submit(o, KVBM_OBJECT_PUT, 11, 1, 0);
    shaky->refuse_open = true;
    shaky->hang_open = false;
    ends(put[0], -EHOSTDOWN);
    ends(put[1], -EHOSTDOWN);
    ends(probe, -EHOSTDOWN);
    shaky->refuse_open = false;
    wait_until(try_once(o) == 0);
    kvbm_object_close(o);
}

/* When the one that went to see gives up before it has seen anything, one of those that wait
 * goes. */
static void test_reopening_is_cancelled(void **state)
{
    struct kvbm_object *o = open_nervous();
    struct job *probe = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK), *put[2];
    (void)state;

    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->fail_rc = -ECONNRESET;
    assert_int_equal(try_once(o), -ECONNRESET);
    shaky->fail_rc = 0;
    shaky->hang = true;
    wait_until(kvbm_object_submit(o, &probe->batch) == 0);
    wait_until(shaky->inside == 1);
    put[0] = submit(o, KVBM_OBJECT_PUT, 10, 1, 0);
    put[1] = submit(o, KVBM_OBJECT_PUT, 11, 1, 0);
    kvbm_object_cancel(o, &probe->batch);
    ends(probe, -ECANCELED);
    wait_until(shaky->inside == 2);
    usleep(20000);
    assert_int_equal(shaky->inside, 2); /* one of them alone */
    assert_int_equal(stats_of(o).queued, 1);
    shaky->hang = false;
    ends(put[0], 0);
    ends(put[1], 0);
    assert_false(stats_of(o).open);
    kvbm_object_close(o);
}

/* The breaker has closed, because one that began before came back, while the store is still being
 * opened. */
static void test_opening_behind_a_closed_breaker(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    struct job *slow, *probe, *put, *get;
    (void)state;

    opts.breaker_failures = 1;
    opts.breaker_reopen_ms = 50;
    o = open_with(&opts);
    shaky->hang_puts = true;
    slow = submit(o, KVBM_OBJECT_PUT, 20, 1, 0);
    wait_until(shaky->inside == 1);
    shaky->fail_rc = -ECONNRESET;
    assert_int_equal(try_once(o), -ECONNRESET);
    shaky->fail_rc = 0;
    shaky->hang_open = true;
    probe = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
    wait_until(kvbm_object_submit(o, &probe->batch) == 0);
    wait_until(shaky->opens == 2);
    shaky->hang_puts = false;
    ends(slow, 0);
    assert_false(stats_of(o).open);
    put = submit(o, KVBM_OBJECT_PUT, 10, 1, 0);
    get = submit(o, KVBM_OBJECT_GET, 20, 1, 0);
    usleep(20000);
    assert_int_equal(stats_of(o).queued, 2);
    shaky->hang_open = false;
    ends(get, 0);
    ends(put, 0);
    ends(probe, -ENOENT);
    assert_int_equal(shaky->opens, 2);
    kvbm_object_close(o);
}

/* Callers that give up a slow store's calls early don't shut it down for others. */
static void test_impatience_is_no_outage(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *held;
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 2;
    opts.breaker_failures = 1;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->hang = true;
    for (int i = 0; i < 5; i++) /* more than there are threads and replacements */
        ends(submit(o, KVBM_OBJECT_GET, 0, 1, 10), -ETIMEDOUT);
    shaky->hang = false;
    expect(o, KVBM_OBJECT_GET, 0, 1, 0);
    shaky->hang_publications = true;
    held = submit(o, KVBM_OBJECT_PUT, 10, 1, 0);
    wait_until(shaky->inside == 1);
    ends(submit(o, KVBM_OBJECT_PUT, 11, 1, 10), -ETIMEDOUT);
    shaky->hang_publications = false;
    ends(held, 0);
    assert_int_equal(stats_of(o).opened, 0);
    kvbm_object_close(o);
}

/* Loads with little time, of a store that hangs: the breaker opens when it has been silent for long. */
static void hangs_for_the_impatient(struct kvbm_object *o)
{
    shaky->hang = true;
    for (int calls = 0; stats_of(o).opened == 0; calls++) {
        struct job *load = job_new(KVBM_OBJECT_GET, 0, 1, BLOCK);
        int rc;

        load->batch.deadline_ns = kv_now_ns() + 50 * KV_NS_PER_MS;
        rc = kvbm_object_submit(o, &load->batch);
        if (rc == 0)
            job_wait(load);
        assert_true(rc == 0 || rc == -EHOSTDOWN);
        job_free(load);
        assert_true(calls < 100);
    }
    shaky->hang = false;
}

/* Calls that hang count, however early their callers gave up. */
static void test_silence_is_an_outage(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    opts.breaker_failures = 1;
    opts.timeout_ms = 400;
    o = open_with(&opts);
    shaky->hang = true;
    ends(submit(o, KVBM_OBJECT_GET, 0, 1, 1000), -ETIMEDOUT);
    assert_int_equal(stats_of(o).opened, 1);
    shaky->hang = false;
    kvbm_object_close(o);

    opts.timeout_ms = 4000;
    o = open_with(&opts);
    hangs_for_the_impatient(o);
    kvbm_object_close(o);

    opts.n_threads = 2;
    opts.breaker_failures = 3;
    o = open_with(&opts);
    hangs_for_the_impatient(o);
    kvbm_object_close(o);
}

/* A store that is full, or refuses to be written, is there nevertheless. */
static void test_full_is_no_outage(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    opts.breaker_failures = 1;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 3, 0);
    shaky->fail_puts_rc = -ENOSPC;
    for (int i = 0; i < 5; i++)
        expect(o, KVBM_OBJECT_PUT, 10, 3, -ENOSPC);
    shaky->fail_puts_rc = -EROFS;
    expect(o, KVBM_OBJECT_PUT, 10, 3, -EROFS);
    expect(o, KVBM_OBJECT_GET, 0, 3, 0);
    assert_int_equal(stats_of(o).failed, 18);
    shaky->fail_puts_rc = 0;
    expect(o, KVBM_OBJECT_PUT, 10, 3, 0);
    kvbm_object_close(o);
}

/* -- cancellation ------------------------------------------------------------------------------ */

static void test_cancel_in_a_call(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    opts.n_threads = 1;
    o = open_with(&opts);
    put_and_get(o, 3);
    for (int op = 0; op < 3; op++) {
        struct job *job;

        shaky->hang = true;
        job = submit(o, (enum kvbm_object_op)op, 0, 3, 0);
        wait_until(shaky->inside == 1);
        kvbm_object_cancel(o, &job->batch);
        kvbm_object_cancel(o, &job->batch);
        ends(job, -ECANCELED); /* while it hangs: the memory is the caller's again */
        assert_int_equal(shaky->inside, 1);
        shaky->hang = false;
        wait_until(stats_of(o).left_behind == 0);
        expect(o, KVBM_OBJECT_GET, 0, 3, 0);
    }
    assert_int_equal(stats_of(o).cancelled, 9);
    assert_int_equal(stats_of(o).opened, 0); /* which says nothing of the store */
    kvbm_object_close(o);
}

/* Threads hang, also those that replaced others: all batches end, and close waits no longer than
 * its timeout. */
static void test_cancel_all(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct job *jobs[12];
    struct kvbm_object *o;
    uint64_t begin_ns;
    (void)state;

    opts.n_threads = 2;
    opts.timeout_ms = 100000;
    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    shaky->hang = true;
    begin_ns = kv_now_ns();
    for (int round = 0; round < 2; round++) { /* two threads, two in their place */
        for (size_t i = 0; i < KV_COUNT(jobs); i++)
            jobs[i] = submit(o, (enum kvbm_object_op)(i % 3), i, 1, 0);
        wait_until(shaky->inside == 2 * (round + 1));
        kvbm_object_cancel_all(o);
        for (size_t i = 0; i < KV_COUNT(jobs); i++)
            ends(jobs[i], -ECANCELED);
        assert_int_equal(stats_of(o).left_behind, 2 * (round + 1));
    }
    kvbm_object_close_by(o, kv_now_ns() + 50 * KV_NS_PER_MS);
    assert_true(kv_now_ns() - begin_ns < 90 * KV_NS_PER_S); /* and not timeout_ms */
    shaky->hang = false;
    wait_until(shaky->inside == 0 && shaky->opens == shaky->closes);
}

/* Finished operations keep their status, others are cancelled; without spare threads after the
 * call. */
static void test_cancel_between_calls(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    uint32_t n = 2 * KVBM_OBJECT_SLICE + 10;
    struct kvbm_object *o;
    struct job *job;
    int seen;
    (void)state;

    o = open_with(&opts);
    expect(o, KVBM_OBJECT_PUT, 0, n, 0);
    shaky->delay_us = 50000;
    seen = shaky->get_batches;
    job = submit(o, KVBM_OBJECT_GET, 0, n, 0);
    wait_until(shaky->get_batches == seen + 2); /* in the second of three */
    kvbm_object_cancel(o, &job->batch);
    job_wait(job);
    assert_int_equal(job->ios[0].status, 0);
    assert_int_equal(job->ios[KVBM_OBJECT_SLICE - 1].status, 0);
    assert_int_equal(job->ios[n - 1].status, -ECANCELED);
    job_free(job);
    shaky->delay_us = 0;
    kvbm_object_close(o);
    assert_int_equal(shaky->get_batches, seen + 2);
}

static void cancel_self(struct kvbm_object_batch *batch)
{
    struct job *job = batch->arg;

    kvbm_object_cancel((struct kvbm_object *)(uintptr_t)job->first,
                       batch); /* has ended: no effect */
    job_done(batch);
}

static void test_cancel_when_done(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o = open_with(&opts);
    struct job *job = job_new(KVBM_OBJECT_EXISTS, 0, 1, BLOCK);
    (void)state;

    job->first = (uint64_t)(uintptr_t)o;
    job->batch.done = cancel_self;
    assert_int_equal(kvbm_object_submit(o, &job->batch), 0);
    job_wait(job);
    kvbm_object_cancel(o, &job->batch);
    ends(job, -ENOENT);
    kvbm_object_close(o);
}

/* -- opening and closing ----------------------------------------------------------------------- */

static void test_away_when_opened(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    struct kvbm_object *o;
    (void)state;

    opts.breaker_reopen_ms = 30;
    shaky->refuse_open = true;
    o = open_with(&opts);
    assert_true(stats_of(o).open);
    assert_int_equal(try_once(o), -EHOSTDOWN);
    shaky->refuse_open = false;
    wait_until(try_once(o) == -ENOENT);
    assert_false(stats_of(o).open);
    kvbm_object_close(o);
}

static void test_hangs_when_opened(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    uint64_t begin_ns = kv_now_ns();
    struct kvbm_object *o;
    (void)state;

    opts.timeout_ms = 100;
    opts.breaker_reopen_ms = 30;
    shaky->hang_open = true;
    o = open_with(&opts);
    assert_true(kv_now_ns() - begin_ns < SLACK_NS);
    assert_int_equal(try_once(o), -EHOSTDOWN);
    wait_until(stats_of(o).left_behind == 1);
    for (int i = 0; i < 20; i++) { /* nobody else hangs in it */
        assert_int_equal(try_once(o), -EHOSTDOWN);
        usleep(10000);
    }
    assert_int_equal(shaky->opens, 1);
    shaky->hang_open = false;
    wait_until(try_once(o) == -ENOENT);
    kvbm_object_close(o);

    shaky->hang_open = true;
    o = open_with(&opts);
    begin_ns = kv_now_ns();
    kvbm_object_close(o); /* is not kept waiting either */
    assert_true(kv_now_ns() - begin_ns < SLACK_NS);
    shaky->hang_open = false;
    wait_until(shaky->opens == shaky->closes);
}

static void test_close_while_busy(void **state)
{
    for (int hangs = 0; hangs < 2; hangs++) {
        struct kvbm_object_opts opts;
        struct kvbm_object *o;
        struct job *jobs[30];
        uint64_t begin_ns;
        int n_ok = 0;

        fresh_folder(state);
        opts = default_opts(shaky_uri);
        opts.timeout_ms = 1000;
        o = open_with(&opts);
        expect(o, KVBM_OBJECT_PUT, 0, 30, 0);
        shaky->hang = hangs;
        shaky->delay_us = 60000;
        for (uint64_t i = 0; i < KV_COUNT(jobs); i++)
            jobs[i] = submit(o, i % 3 ? KVBM_OBJECT_GET : KVBM_OBJECT_PUT, i, 1, 0);
        wait_until(shaky->inside == 4); /* one of them is a get at least */
        begin_ns = kv_now_ns();
        kvbm_object_close(o);
        assert_true(kv_now_ns() - begin_ns < SLACK_NS);
        for (size_t i = 0; i < KV_COUNT(jobs); i++) {
            int status = jobs[i]->ios[0].status;

            assert_int_equal(jobs[i]->done, 1); /* before close returned */
            assert_true(status == 0 || status == -ECANCELED || (hangs && status == -ETIMEDOUT));
            n_ok += status == 0;
            job_free(jobs[i]);
        }
        assert_true(hangs ? n_ok == 0 : n_ok > 0);
        shaky->hang = false;
        wait_until(shaky->inside == 0 && shaky->opens == shaky->closes);
    }
}

/* -- many at once ------------------------------------------------------------------------------ */

struct producer {
    pthread_t thread;
    struct kvbm_object *o;
    uint64_t random;
    uint64_t n_done[3], n_refused;
    bool wrong;
};

static void *produce(void *arg)
{
    struct producer *p = arg;

    for (size_t round = 0; round < unit_rounds(300); round++) {
        enum kvbm_object_op op = (enum kvbm_object_op)unit_below(&p->random, 3);
        uint32_t n = 1 + (uint32_t)unit_below(&p->random, 6);
        struct job *job = job_new(op, unit_below(&p->random, 50), n, BLOCK);
        uint32_t group = (uint32_t)unit_below(&p->random, 2);

        job_set_group(job, group);
        if (unit_below(&p->random, 3) == 0)
            job->batch.deadline_ns = kv_now_ns() + unit_below(&p->random, 5 * KV_NS_PER_MS);
        if (kvbm_object_submit(p->o, &job->batch) < 0) {
            p->n_refused++;
            job->done = 1;
        } else {
            if (unit_below(&p->random, 5) == 0)
                kvbm_object_cancel(p->o, &job->batch);
            while (!job->done)
                usleep(50);
            p->n_done[op] += n;
        }
        for (uint32_t i = 0; i < n; i++) {
            int status = job->ios[i].status;

            p->wrong |= !job_is_right(job, i);
            p->wrong |= status != 0 && status != -ENOENT && status != -ETIMEDOUT &&
                        status != -ECANCELED && status != -EINPROGRESS;
        }
        free(job->data);
        free(job);
    }
    return NULL;
}

static void test_many_producers(void **state)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);
    uint64_t random = unit_seed(), asked = 0, told;
    struct producer producers[6] = {{0}};
    struct kvbm_object_stats stats;
    struct kvbm_object *o;
    (void)state;

    opts.breaker_failures = 1000000;
    opts.n_threads = 3;
    o = open_with(&opts);
    for (size_t i = 0; i < KV_COUNT(producers); i++) {
        producers[i].o = o;
        producers[i].random = random + 1000 * i;
        assert_int_equal(pthread_create(&producers[i].thread, NULL, produce, &producers[i]), 0);
    }
    for (size_t i = 0; i < KV_COUNT(producers); i++) {
        pthread_join(producers[i].thread, NULL);
        assert_false(producers[i].wrong);
        for (int op = 0; op < 3; op++)
            asked += producers[i].n_done[op];
    }
    stats = stats_of(o);
    told = stats.gets + stats.exists + stats.puts + stats.already + stats.failed + stats.late +
           stats.cancelled;
    assert_int_equal(told, asked); /* each block ended as one thing */
    assert_true(stats.hits > 0 && stats.puts > 0 && stats.bad == 0 && stats.failed == 0);
    assert_int_equal(stats.queued, 0);
    kvbm_object_close(o);
    wait_until(shaky->opens == shaky->closes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_onboarding_first, fresh_folder),
        cmocka_unit_test_setup(test_priorities, fresh_folder),
        cmocka_unit_test_setup(test_thread_for_onboarding, fresh_folder),
        cmocka_unit_test_setup(test_number_of_threads, fresh_folder),
        cmocka_unit_test_setup(test_queue_is_bounded, fresh_folder),
        cmocka_unit_test_setup(test_hanging, fresh_folder),
        cmocka_unit_test_setup(test_late_before_it_began, fresh_folder),
        cmocka_unit_test_setup(test_all_hang, fresh_folder),
        cmocka_unit_test_setup(test_deadline_storm, fresh_folder),
        cmocka_unit_test_setup(test_breaker, fresh_folder),
        cmocka_unit_test_setup(test_half_open, fresh_folder),
        cmocka_unit_test_setup(test_puts_wait_for_reopening, fresh_folder),
        cmocka_unit_test_setup(test_reopening_fails, fresh_folder),
        cmocka_unit_test_setup(test_reopening_is_cancelled, fresh_folder),
        cmocka_unit_test_setup(test_opening_behind_a_closed_breaker, fresh_folder),
        cmocka_unit_test_setup(test_impatience_is_no_outage, fresh_folder),
        cmocka_unit_test_setup(test_silence_is_an_outage, fresh_folder),
        cmocka_unit_test_setup(test_full_is_no_outage, fresh_folder),
        cmocka_unit_test_setup(test_cancel_all, fresh_folder),
        cmocka_unit_test_setup(test_cancel_in_a_call, fresh_folder),
        cmocka_unit_test_setup(test_cancel_between_calls, fresh_folder),
        cmocka_unit_test_setup(test_cancel_when_done, fresh_folder),
        cmocka_unit_test_setup(test_away_when_opened, fresh_folder),
        cmocka_unit_test_setup(test_hangs_when_opened, fresh_folder),
        cmocka_unit_test_setup(test_close_while_busy, fresh_folder),
        cmocka_unit_test_setup(test_many_producers, fresh_folder),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
