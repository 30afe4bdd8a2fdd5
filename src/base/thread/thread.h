// SPDX-License-Identifier: Apache-2.0
/** Named threads, condition variables with deadlines, and an eventfd to stop or wake threads. */
#ifndef KV_BASE_THREAD_H
#define KV_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/**
 * Start a thread called @name (15 characters at most are kept) with all signals blocked. Returns 0
 * or a negative errno. Its owner ends it with pthread_join.
 */
int kv_thread_start(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg);

/**
 * Return a number for the calling thread: not 0, and never that of a thread that has ended, as
 * pthread_self() may be.
 */
uint64_t kv_thread_number(void);
/** Return the highest number of a thread so far. */
uint64_t kv_thread_newest(void);

/** Initialize @cond for kv_cond_wait_until. Can't fail: glibc and musl allocate nothing for it. */
void kv_cond_init(pthread_cond_t *cond);
/**
 * Wait, with @lock held, for a signal or until @deadline_ns (kv_now_ns). Returns 0 or -ETIMEDOUT.
 * Like pthread_cond_wait, may return 0 without a signal.
 */
int kv_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns);

/** A wake-up on a file descriptor, for poll. */
struct kv_wake {
    int fd; /* readable while signalled; -1 when closed */
};
int kv_wake_open(struct kv_wake *wake); /* 0 or a negative errno; fd is -1 then */
void kv_wake_close(struct kv_wake *wake);
void kv_wake_signal(struct kv_wake *wake); /* async-signal-safe */
void kv_wake_clear(struct kv_wake *wake);

#endif
