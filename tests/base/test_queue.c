// SPDX-License-Identifier: Apache-2.0

#include <errno.h>
#include <pthread.h>

#include "base/core/clock.h"
#include "base/thread/queue.h"
#include "base/unit.h"

static void test_order_and_bound(void **state)
{
    struct kv_queue *queue;
    int got[8];

    (void)state;
    assert_int_equal(kv_queue_create(0, 1, &queue), -EINVAL);
    assert_int_equal(kv_queue_create(sizeof(int), 3, &queue), 0);
    assert_int_equal(kv_queue_pop(queue, got, 8, 0), -ETIMEDOUT);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 3; i++)
            assert_int_equal(kv_queue_push(queue, &(int){round * 3 + i}), 0);
        assert_int_equal(kv_queue_push(queue, &(int){99}), -EAGAIN);
        assert_int_equal(kv_queue_len(queue), 3);
        assert_int_equal(kv_queue_pop(queue, got, 2, 0), 2);
        assert_int_equal(got[1], round * 3 + 1);
        assert_int_equal(kv_queue_pop(queue, got, 8, 0), 1);
        assert_int_equal(got[0], round * 3 + 2);
    }
    kv_queue_push(queue, &(int){1});
    kv_queue_close(queue);
    assert_int_equal(kv_queue_push(queue, &(int){2}), -EPIPE);
    assert_int_equal(kv_queue_pop(queue, got, 8, kv_now_ns() + KV_NS_PER_S), 1);
    assert_int_equal(kv_queue_pop(queue, got, 8, kv_now_ns() + KV_NS_PER_S), -EPIPE);
    kv_queue_destroy(queue);
    kv_queue_destroy(NULL);
}

static void test_deadline(void **state)
{
    struct kv_queue *queue;
    uint64_t start = kv_now_ns();
    int got;

    (void)state;
    assert_int_equal(kv_queue_create(sizeof(int), 1, &queue), 0);
    assert_int_equal(kv_queue_pop(queue, &got, 1, start + 30 * KV_NS_PER_MS), -ETIMEDOUT);
    assert_true(kv_now_ns() - start >= 30 * KV_NS_PER_MS);
    kv_queue_destroy(queue);
}

enum { PER_PRODUCER = 20000 };

static void *produce(void *arg)
{
    for (int i = 1; i <= PER_PRODUCER;) {
        if (kv_queue_push(arg, &i) == 0)
            i++;
        else
            sched_yield();
    }
    return NULL;
}

static void test_threads(void **state)
{
    struct kv_queue *queue;
    pthread_t producers[3];
    int64_t sum = 0, n = 0;
    int got[16];

    (void)state;
    assert_int_equal(kv_queue_create(sizeof(int), 64, &queue), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&producers[i], NULL, produce, queue), 0);
    while (n < 3 * (int64_t)PER_PRODUCER) {
        long taken = kv_queue_pop(queue, got, 16, kv_now_ns() + 10 * KV_NS_PER_S);

        assert_true(taken > 0);
        for (long i = 0; i < taken; i++)
            sum += got[i];
        n += taken;
    }
    assert_int_equal(sum, 3 * (int64_t)PER_PRODUCER * (PER_PRODUCER + 1) / 2);
    for (int i = 0; i < 3; i++)
        pthread_join(producers[i], NULL);
    kv_queue_destroy(queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_bound),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_threads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
