// SPDX-License-Identifier: Apache-2.0
/** Clocks. Deadlines are absolute monotonic nanoseconds. */
#ifndef KV_BASE_CLOCK_H
#define KV_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define KV_NS_PER_MS UINT64_C(1000000)
#define KV_NS_PER_S UINT64_C(1000000000)

/** Convert nanoseconds of any clock to a timespec, and back. */
static inline struct timespec kv_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / KV_NS_PER_S),
                             .tv_nsec = (long)(ns % KV_NS_PER_S)};
}

static inline uint64_t kv_timespec_ns(const struct timespec *ts)
{
    return (uint64_t)ts->tv_sec * KV_NS_PER_S + (uint64_t)ts->tv_nsec;
}

static inline uint64_t kv_clock_ns_(clockid_t clock)
{
    struct timespec ts;

    clock_gettime(clock, &ts);
    return kv_timespec_ns(&ts);
}

/** Return the monotonic time in nanoseconds. */
static inline uint64_t kv_now_ns(void)
{
    return kv_clock_ns_(CLOCK_MONOTONIC);
}

/** Return the nanoseconds since the epoch (wall clock). */
static inline uint64_t kv_wall_ns(void)
{
    return kv_clock_ns_(CLOCK_REALTIME);
}

/** Return the time @ms after @now_ns; UINT64_MAX, which never comes, when that is too far away. */
static inline uint64_t kv_ns_after(uint64_t now_ns, uint64_t ms)
{
    return ms > (UINT64_MAX - now_ns) / KV_NS_PER_MS ? UINT64_MAX : now_ns + ms * KV_NS_PER_MS;
}

/** Return the milliseconds until @deadline_ns, rounded up; 0 when the deadline has passed. */
static inline int64_t kv_ms_until(uint64_t deadline_ns, uint64_t now_ns)
{
    return deadline_ns <= now_ns
               ? 0
               : (int64_t)((deadline_ns - now_ns + KV_NS_PER_MS - 1) / KV_NS_PER_MS);
}

#endif
