// SPDX-License-Identifier: Apache-2.0
#include "base/thread/thread.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"

struct start {
    void *(*fn)(void *);
    void *arg;
    char name[16];
};

static void *run(void *arg)
{
    struct start start = *(struct start *)arg;

    free(arg);
    pthread_setname_np(pthread_self(), start.name);
    return start.fn(start.arg);
}

int kv_thread_start(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg)
{
    struct start *start = malloc(sizeof(*start));
    sigset_t all, old;
    pthread_t thread;
    int rc;

    if (!start)
        return -ENOMEM;
    start->fn = fn;
    start->arg = arg;
    snprintf(start->name, sizeof(start->name), "%.15s", name);

    /* A thread inherits the mask: block all signals before it starts, so that none reaches it. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    rc = pthread_create(&thread, NULL, run, start);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        free(start);
        return -rc;
    }
    *ret = thread;
    return 0;
}

static _Atomic uint64_t last_number;

uint64_t kv_thread_number(void)
{
    static _Thread_local uint64_t number;

    if (number == 0)
        number = atomic_fetch_add(&last_number, 1) + 1;
    return number;
}

uint64_t kv_thread_newest(void)
{
    return atomic_load(&last_number);
}

void kv_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;

    /* Errors of these are of attributes that don't exist and of clocks that can't be waited on. */
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

int kv_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    const struct timespec until = kv_timespec(deadline_ns);

    return -pthread_cond_timedwait(cond, lock, &until);
}

int kv_wake_open(struct kv_wake *wake)
{
    wake->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return wake->fd < 0 ? -errno : 0;
}

void kv_wake_close(struct kv_wake *wake)
{
    if (wake->fd >= 0)
        close(wake->fd);
    wake->fd = -1;
}

void kv_wake_signal(struct kv_wake *wake)
{
    int saved = errno; /* a signal handler may call this function */
    uint64_t one = 1;
    ssize_t n;

    /* A write fails only on a full counter, when a wake-up is pending already. */
    do {
        n = write(wake->fd, &one, sizeof(one));
    } while (n < 0 && errno == EINTR);
    errno = saved;
}

void kv_wake_clear(struct kv_wake *wake)
{
    uint64_t count;
    ssize_t n;

    do {
        n = read(wake->fd, &count, sizeof(count));
    } while (n < 0 && errno == EINTR);
}
