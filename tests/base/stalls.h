// SPDX-License-Identifier: Apache-2.0
/**
 * Lateness of a call, less the time that the machine took from it: a frozen process, and threads that
 * wait for a core, can't be in time. Two clocks count that time:
 *
 * - a sentinel thread sleeps for 1 ms again and again, and adds up by how much it wakes late, where that
 *   is more than 1 ms. It sees a frozen process and a machine that stands still, but the scheduler
 *   prefers threads that sleep much, so it hardly sees other programs;
 * - the kernel counts for each thread how long it was ready and had no core (second number of
 *   /proc/self/task/TID/schedstat). That sees other programs.
 */
#ifndef KV_TESTS_BASE_STALLS_H
#define KV_TESTS_BASE_STALLS_H

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"

/** A call may come so long after its deadline, without stalls. */
#define STALLS_LATE_NS (100 * KV_NS_PER_MS)
#define STALLS_THREADS 4 /* that a call's end may need, one after the other */

/* Of this process: time by which the sentinel woke late, and how often it woke. */
static atomic_uint_fast64_t stalls_ns, stalls_ticks;

/** Time that a process lost so far, by both clocks. */
struct stalls {
    uint64_t asleep_ns; /* the sentinel's */
    uint64_t queued_ns; /* the kernel's, sum of all threads */
};

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

/** Return how long the thread @tid of this process has waited for a core; 0: it has ended. */
static inline uint64_t stalls_queued_of(const char *tid)
{
    char path[64], text[96];
    uint64_t queued = 0;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/self/task/%.16s/schedstat", tid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    (void)sscanf(text, "%*u %lu", &queued);
    return queued;
}

/** Return the time that this process has lost so far: before a call. */
static inline struct stalls stalls_so_far(void)
{
    struct stalls s = {.asleep_ns = atomic_load(&stalls_ns)};
    DIR *tasks = opendir("/proc/self/task");

    for (const struct dirent *e; tasks && (e = readdir(tasks));)
        s.queued_ns += *e->d_name == '.' ? 0 : stalls_queued_of(e->d_name);
    if (tasks)
        closedir(tasks);
    return s;
}

/** Return how late a call that has come back now is, less what was lost since @before. */
static inline uint64_t stalls_lateness(uint64_t deadline_ns, const struct stalls *before)
{
    uint64_t now = kv_now_ns(), late = now > deadline_ns ? now - deadline_ns : 0, lost;
    struct stalls after;

    if (late <= STALLS_LATE_NS)
        return late;
    /* Let the sentinel count a stall that has only just ended. */
    for (uint64_t until = atomic_load(&stalls_ticks) + 2; atomic_load(&stalls_ticks) < until;)
        usleep(500);
    after = stalls_so_far();
    lost = STALLS_THREADS * (after.asleep_ns - before->asleep_ns);
    lost += after.queued_ns - KV_MIN(after.queued_ns, before->queued_ns);
    return late - KV_MIN(late, lost);
}

#endif
