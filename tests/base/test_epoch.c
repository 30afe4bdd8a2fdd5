// SPDX-License-Identifier: Apache-2.0
/* Reclamation: memory that a reader may see is not freed, and all memory is freed in the end. */
#include "base/thread/epoch.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"

#define ALIVE UINT64_C(0xa11fe)
#define DEAD UINT64_C(0xdead)

struct object {
    struct kv_retired retired;
    uint64_t alive; /* plain on purpose: thread sanitizer must see reads and the free as ordered */
    uint64_t number;
};

static size_t n_freed;
static uint64_t kinds;

static void free_object(void *arg, struct kv_retired *retired, unsigned kind)
{
    struct object *object = (struct object *)(void *)retired;

    (void)arg;
    assert_true(object->alive == ALIVE);
    object->alive = DEAD;
    kinds |= UINT64_C(1) << kind;
    n_freed++;
    free(object);
}

static struct object *make(uint64_t number)
{
    struct object *object = malloc(sizeof(*object));

    assert_non_null(object);
    object->alive = ALIVE;
    object->number = number;
    return object;
}

static void retire(struct kv_limbo *limbo, struct object *object)
{
    kv_limbo_retire(limbo, &object->retired, object->number % 8, sizeof(*object));
}

static void start(struct kv_limbo *limbo, size_t soft, size_t hard)
{
    n_freed = 0;
    kinds = 0;
    kv_limbo_init(limbo, soft, hard, free_object, NULL);
}

/* -- one thread ------------------------------------------------------------------------------- */

static void test_freed_without_readers(void **state)
{
    struct kv_limbo limbo;

    (void)state;
    start(&limbo, 0, SIZE_MAX);
    for (uint64_t i = 0; i < 8; i++)
        retire(&limbo, make(i));
    assert_int_equal(limbo.bytes, 8 * sizeof(struct object));
    kv_limbo_collect(&limbo, 1);
    assert_int_equal(n_freed, 8);
    assert_int_equal(kinds, 0xff);
    assert_int_equal(limbo.bytes, 0);
    kv_limbo_collect(&limbo, 1);
    kv_limbo_fini(&limbo);
}

static void test_a_reader_holds_what_it_may_see(void **state)
{
    struct kv_limbo limbo;

    (void)state;
    start(&limbo, 0, SIZE_MAX);
    assert_int_equal(kv_epoch_enter(), 0);
    assert_int_equal(kv_epoch_enter(), 0); /* nested */
    for (uint64_t i = 0; i < 100; i++) {
        retire(&limbo, make(i));
        kv_limbo_collect(&limbo, 1);
    }
    kv_epoch_exit();
    kv_limbo_collect(&limbo, 1);
    assert_int_equal(n_freed, 0); /* all of it was unlinked after the reader came */
    kv_epoch_exit();
    kv_limbo_collect(&limbo, 1);
    assert_int_equal(n_freed, 100);
    kv_limbo_fini(&limbo);
}

static void test_little_may_wait(void **state)
{
    struct kv_limbo limbo;
    size_t most = 0;

    (void)state;
    start(&limbo, 10 * sizeof(struct object), SIZE_MAX);
    for (uint64_t i = 0; i < 1000; i++) {
        retire(&limbo, make(i));
        kv_limbo_collect(&limbo, 0);
        most = KV_MAX(most, limbo.bytes);
    }
    assert_in_range(most, 10 * sizeof(struct object), 14 * sizeof(struct object));
    kv_limbo_fini(&limbo);
    assert_int_equal(n_freed, 1000);
}

/* Much goes at once where nobody reads: no later call may come. */
static void test_much_does_not_wait(void **state)
{
    struct kv_limbo limbo;

    (void)state;
    start(&limbo, 10 * sizeof(struct object), SIZE_MAX);
    for (uint64_t i = 0; i < 1000; i++)
        retire(&limbo, make(i));
    kv_limbo_collect(&limbo, 0);
    assert_int_equal(n_freed, 1000);
    assert_int_equal(limbo.bytes, 0);
    kv_limbo_fini(&limbo);
}

/* Waiting for itself to leave would never end: what is above the hard limit stays for the next time. */
static void test_no_reader_waits_for_itself(void **state)
{
    struct kv_limbo limbo;

    (void)state;
    start(&limbo, 0, 10 * sizeof(struct object));
    assert_int_equal(kv_epoch_enter(), 0);
    for (uint64_t i = 0; i < 100; i++) {
        retire(&limbo, make(i));
        kv_limbo_collect(&limbo, (int)(i % 2));
    }
    assert_int_equal(n_freed, 0);
    kv_epoch_exit();
    kv_limbo_collect(&limbo, 0);
    assert_true(limbo.bytes <= 10 * sizeof(struct object));
    assert_true(n_freed >= 90);
    kv_limbo_fini(&limbo);
    assert_int_equal(n_freed, 100);
}

/* -- many ------------------------------------------------------------------------------------- */

enum { READERS = 3, SHELVES = 4 };
static struct object *_Atomic shelf[SHELVES];
static _Atomic bool done;

static void *read_shelves(void *arg)
{
    uint64_t reads = 0, wrong = 0, newest[SHELVES] = {0};

    (void)arg;
    while (!atomic_load_explicit(&done, memory_order_relaxed)) {
        if (kv_epoch_enter())
            return (void *)1;
        for (int i = 0; i < 8; i++, reads++) {
            const struct object *object =
                atomic_load_explicit(&shelf[reads % SHELVES], memory_order_acquire);

            if (reads % 7 == 0)
                sched_yield(); /* holding it */
            wrong += object->alive != ALIVE || object->number < newest[reads % SHELVES];
            newest[reads % SHELVES] = object->number;
        }
        kv_epoch_exit();
    }
    return (void *)(uintptr_t)wrong;
}

/* Replaces objects for as many rounds, or until the time is over on a busy machine. */
static void test_readers_beside_a_writer(void **state)
{
    uint64_t random = unit_seed(), until = kv_now_ns() + 20 * KV_NS_PER_S, i;
    pthread_t threads[READERS];
    struct kv_limbo limbo;
    uint64_t wrong = 0;

    (void)state;
    start(&limbo, 4 * sizeof(struct object), 100 * sizeof(struct object));
    atomic_store(&done, false);
    for (int s = 0; s < SHELVES; s++)
        atomic_store(&shelf[s], make(0));
    for (int t = 0; t < READERS; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, read_shelves, NULL), 0);
    for (i = 1; i <= unit_rounds(200000) && kv_now_ns() < until; i++) {
        retire(&limbo, atomic_exchange_explicit(&shelf[unit_below(&random, SHELVES)], make(i),
                                                memory_order_acq_rel));
        kv_limbo_collect(&limbo, unit_below(&random, 16) == 0);
        assert_true(limbo.bytes <= 100 * sizeof(struct object)); /* it waits for readers at that */
    }
    atomic_store(&done, true);
    for (int t = 0; t < READERS; t++) {
        void *result;

        pthread_join(threads[t], &result);
        wrong += (uintptr_t)result;
    }
    assert_int_equal(wrong, 0);
    for (int s = 0; s < SHELVES; s++)
        retire(&limbo, atomic_exchange(&shelf[s], NULL));
    kv_limbo_collect(&limbo, 1);
    assert_int_equal(n_freed, i - 1 + SHELVES);
    kv_limbo_fini(&limbo);
}

/* A thread that ends inside a read section doesn't hold up the rest for ever. */
static void *enter_and_end(void *arg)
{
    return kv_epoch_enter() ? arg : NULL;
}

static void test_threads_come_and_go(void **state)
{
    struct kv_limbo limbo;

    (void)state;
    start(&limbo, 0, SIZE_MAX);
    for (uint64_t i = 0; i < 200; i++) {
        pthread_t thread;
        void *result;

        assert_int_equal(pthread_create(&thread, NULL, enter_and_end, &limbo), 0);
        retire(&limbo, make(i));
        pthread_join(thread, &result);
        assert_null(result);
    }
    kv_limbo_collect(&limbo, 1);
    assert_int_equal(n_freed, 200);
    kv_limbo_fini(&limbo);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_freed_without_readers),
        cmocka_unit_test(test_a_reader_holds_what_it_may_see),
        cmocka_unit_test(test_little_may_wait),
        cmocka_unit_test(test_much_does_not_wait),
        cmocka_unit_test(test_no_reader_waits_for_itself),
        cmocka_unit_test(test_readers_beside_a_writer),
        cmocka_unit_test(test_threads_come_and_go),
    };

    alarm(240); /* an epoch that never moves would keep the writer waiting for ever */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
