// SPDX-License-Identifier: Apache-2.0
#include "base/thread/thread.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>

#include "base/unit.h"

struct seen {
    char name[16];
    bool blocked;
    struct kv_wake *wake;
};

static void *look(void *arg)
{
    struct seen *seen = arg;
    sigset_t mask;

    pthread_getname_np(pthread_self(), seen->name, sizeof(seen->name));
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    seen->blocked = sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGINT) == 1;
    if (seen->wake)
        kv_wake_signal(seen->wake);
    return seen;
}

static void named_and_masked(void **state)
{
    struct seen seen = {.wake = NULL};
    sigset_t before, after;
    pthread_t thread;
    void *result;
    (void)state;

    pthread_sigmask(SIG_SETMASK, NULL, &before);
    assert_int_equal(kv_thread_start(&thread, "a-name-that-is-too-long", look, &seen), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, &seen);
    assert_string_equal(seen.name, "a-name-that-is-");
    assert_true(seen.blocked);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&before, SIGTERM), sigismember(&after, SIGTERM));
}

static void *tell_number(void *arg)
{
    *(uint64_t *)arg = kv_thread_number();
    return NULL;
}

static void numbers(void **state)
{
    uint64_t own = kv_thread_number(), last = own;
    (void)state;

    assert_true(own > 0);
    for (int i = 0; i < 3; i++) { /* pthread_self() would often be the same */
        pthread_t thread;
        uint64_t number = 0;

        assert_int_equal(kv_thread_start(&thread, "number", tell_number, &number), 0);
        pthread_join(thread, NULL);
        assert_true(number > last);
        assert_int_equal(kv_thread_newest(), number);
        last = number;
    }
    assert_int_equal(kv_thread_number(), own);
}

static bool readable(const struct kv_wake *wake, int timeout_ms)
{
    struct pollfd fd = {.fd = wake->fd, .events = POLLIN};

    return poll(&fd, 1, timeout_ms) == 1 && fd.revents == POLLIN;
}

static void wakes(void **state)
{
    struct kv_wake wake;
    struct seen seen = {.wake = &wake};
    pthread_t thread;
    (void)state;

    assert_int_equal(kv_wake_open(&wake), 0);
    assert_false(readable(&wake, 0));
    assert_int_equal(kv_thread_start(&thread, "waker", look, &seen), 0);
    assert_true(readable(&wake, 10000));
    pthread_join(thread, NULL);
    errno = 77;
    for (int i = 0; i < 1000; i++)
        kv_wake_signal(&wake);
    assert_int_equal(errno, 77);
    assert_true(readable(&wake, 0)); /* stays until cleared, however often it was signalled */
    kv_wake_clear(&wake);
    assert_false(readable(&wake, 0));
    kv_wake_clear(&wake); /* does not block */
    kv_wake_close(&wake);
    kv_wake_close(&wake);
    assert_int_equal(wake.fd, -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(named_and_masked),
        cmocka_unit_test(numbers),
        cmocka_unit_test(wakes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
