// SPDX-License-Identifier: Apache-2.0
/**
 * How late a call came back, less what isn't its own fault: a frozen process and a loaded machine can't
 * be in time. A thread sleeps for 1 ms again and again, and adds up by how much it wakes late, where that
 * is more than 1 ms. The end of a call passes several threads, each of which may wait as long for a core.
 */
#ifndef KV_TESTS_BASE_STALLS_H
#define KV_TESTS_BASE_STALLS_H

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/unit.h"

/** A call may come so long after its deadline, without stalls. */
#define STALLS_LATE_NS (100 * KV_NS_PER_MS)
#define STALLS_THREADS 4 /* that a call's end may need, one after the other */

/* Of this process: time by which the watcher woke late, and how often it woke. */
static atomic_uint_fast64_t stalls_ns, stalls_ticks;

static inline void *stalls_watch(void *arg)
{
    for (uint64_t from = kv_now_ns(), now;; from = now) {
        usleep(1000);
        now = kv_now_ns();
        /* Each sleep is some 0.1 ms late: over a call of 20 s that would excuse seconds. */
        if (now - from > 2 * KV_NS_PER_MS)
            atomic_fetch_add(&stalls_ns, now - from - KV_NS_PER_MS);
        atomic_fetch_add(&stalls_ticks, 1);
    }
    return arg;
}

/** Begin to watch; the thread runs until the process ends. */
static inline void stalls_begin(void)
{
    pthread_t watcher;

    assert_int_equal(pthread_create(&watcher, NULL, stalls_watch, NULL), 0);
    pthread_detach(watcher);
}

/** Return the time by which this process was stalled so far: before a call. */
static inline uint64_t stalls_so_far(void)
{
    return atomic_load(&stalls_ns);
}

/** Return how late a call that has come back now is, less stalls since @before. */
static inline uint64_t stalls_lateness(uint64_t deadline_ns, uint64_t before)
{
    uint64_t now = kv_now_ns(), late = now > deadline_ns ? now - deadline_ns : 0, allowed;

    if (late <= STALLS_LATE_NS)
        return late;
    /* Let the watcher count a stall that has only just ended. */
    for (uint64_t until = atomic_load(&stalls_ticks) + 2; atomic_load(&stalls_ticks) < until;)
        usleep(500);
    allowed = STALLS_THREADS * (atomic_load(&stalls_ns) - before);
    return late - KV_MIN(late, allowed);
}

#endif
