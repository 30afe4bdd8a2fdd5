// SPDX-License-Identifier: Apache-2.0
#include "http/pipe.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"

/* A reader as the HTTP library has it: parked until woken. */
struct loop {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    int parked; /* parks less wakes */
};

static void park(void *arg)
{
    struct loop *loop = arg;

    pthread_mutex_lock(&loop->lock);
    loop->parked++;
    pthread_mutex_unlock(&loop->lock);
}

static void wake(void *arg)
{
    struct loop *loop = arg;

    pthread_mutex_lock(&loop->lock);
    loop->parked--;
    pthread_cond_signal(&loop->woken);
    pthread_mutex_unlock(&loop->lock);
}

static long read_waiting(struct loop *loop, struct kh_pipe *pipe, void *data, size_t size)
{
    for (;;) {
        long n = kh_pipe_read(pipe, data, size);

        if (n != -EAGAIN)
            return n;
        pthread_mutex_lock(&loop->lock);
        while (loop->parked > 0)
            pthread_cond_wait(&loop->woken, &loop->lock);
        pthread_mutex_unlock(&loop->lock);
    }
}

struct fixture {
    struct loop loop;
    struct kh_pipe *pipe;
    size_t total;
    uint64_t seed;
    int written; /* what the writer's last write returned */
};

static struct fixture *setup(size_t capacity)
{
    struct fixture *f = calloc(1, sizeof(*f));
    const struct kh_pipe_reader reader = {park, wake, &f->loop};

    pthread_mutex_init(&f->loop.lock, NULL);
    pthread_cond_init(&f->loop.woken, NULL);
    assert_int_equal(kh_pipe_create(capacity, &reader, &f->pipe), 0);
    return f;
}

static void teardown(struct fixture *f)
{
    kh_pipe_destroy(f->pipe);
    free(f);
}

static void *write_sequence(void *arg)
{
    struct fixture *f = arg;
    uint8_t data[977];

    for (size_t done = 0; done < f->total && f->written == 0;) {
        size_t n = 1 + unit_below(&f->seed, sizeof(data));

        n = KV_MIN(n, f->total - done);

        for (size_t i = 0; i < n; i++)
            data[i] = (uint8_t)((done + i) * 31 >> 3);
        f->written = kh_pipe_write(f->pipe, data, n);
        done += n;
    }
    kh_pipe_end(f->pipe, true);
    return NULL;
}

static void bytes_arrive_in_order(void **state)
{
    static const size_t capacities[] = {1, 7, 64, 4096};
    uint64_t random = unit_seed();

    (void)state;
    for (size_t c = 0; c < KV_COUNT(capacities); c++) {
        struct fixture *f = setup(capacities[c]);
        uint8_t data[1500];
        pthread_t writer;
        size_t got = 0;
        long n;

        f->seed = random;
        f->total = capacities[c] < 10 ? 20000 : 1000000;
        pthread_create(&writer, NULL, write_sequence, f);
        while ((n = read_waiting(&f->loop, f->pipe, data, 1 + unit_below(&random, sizeof(data)))) >
               0)
            for (long i = 0; i < n; i++, got++)
                assert_int_equal(data[i], (uint8_t)(got * 31 >> 3));
        assert_int_equal(n, 0);
        assert_int_equal(got, f->total);
        pthread_join(writer, NULL);
        assert_int_equal(f->written, 0);
        teardown(f);
    }
}

static void a_reader_that_leaves_ends_the_writer(void **state)
{
    struct fixture *f = setup(100);
    pthread_t writer;
    char data[10];

    (void)state;
    f->total = SIZE_MAX / 2;
    pthread_create(&writer, NULL, write_sequence, f);
    assert_true(read_waiting(&f->loop, f->pipe, data, sizeof(data)) > 0);
    usleep(20000); /* now it waits for room */
    kh_pipe_cancel(f->pipe);
    pthread_join(writer, NULL);
    assert_int_equal(f->written, -EPIPE);
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), -EIO);
    teardown(f);
}

static void breaking_off_is_no_end(void **state)
{
    struct fixture *f = setup(100);
    char data[10];

    (void)state;
    assert_int_equal(kh_pipe_write(f->pipe, "abc", 3), 0);
    kh_pipe_end(f->pipe, false);
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), 3);
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), -EIO);
    teardown(f);
}

static void a_parked_reader_is_woken_once(void **state)
{
    struct fixture *f = setup(100);
    char data[10];

    (void)state;
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), -EAGAIN);
    assert_int_equal(f->loop.parked, 1);
    kh_pipe_write(f->pipe, "a", 1);
    kh_pipe_write(f->pipe, "b", 1);
    assert_int_equal(f->loop.parked, 0);
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), 2);
    assert_int_equal(kh_pipe_read(f->pipe, data, sizeof(data)), -EAGAIN);
    kh_pipe_cancel(f->pipe);
    assert_int_equal(f->loop.parked, 0);
    teardown(f);
}

static void *wait_for_ever(void *arg)
{
    struct fixture *f = arg;

    f->written = kh_pipe_wait(f->pipe, kv_now_ns() + 3600 * KV_NS_PER_S);
    return NULL;
}

static void an_idle_writer_is_nudged_or_told(void **state)
{
    struct fixture *f = setup(100);
    pthread_t writer;

    (void)state;
    assert_int_equal(kh_pipe_wait(f->pipe, kv_now_ns() + KV_NS_PER_MS), 0); /* its time is over */
    kh_pipe_nudge(f->pipe);                                                 /* before the wait */
    assert_null(wait_for_ever(f));
    assert_int_equal(f->written, 0);
    for (int cancel = 0; cancel < 2; cancel++) {
        assert_int_equal(pthread_create(&writer, NULL, wait_for_ever, f), 0);
        (cancel ? kh_pipe_cancel : kh_pipe_nudge)(f->pipe);
        pthread_join(writer, NULL);
        assert_int_equal(f->written, cancel ? -EPIPE : 0);
    }
    teardown(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_arrive_in_order),
        cmocka_unit_test(a_reader_that_leaves_ends_the_writer),
        cmocka_unit_test(breaking_off_is_no_end),
        cmocka_unit_test(a_parked_reader_is_woken_once),
        cmocka_unit_test(an_idle_writer_is_nudged_or_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
