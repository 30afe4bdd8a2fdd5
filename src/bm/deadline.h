// SPDX-License-Identifier: Apache-2.0
/** Deadlines of callers: times of CLOCK_MONOTONIC. */
#ifndef KVBM_BM_DEADLINE_H
#define KVBM_BM_DEADLINE_H

#include <errno.h>
#include <inttypes.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"

/* Half a century and a whole one: times since 1970 are so far ahead of a clock that began at boot. Later
 * ones, such as INT64_MAX, mean that there is no deadline. */
#define KVBM_FAR_NS (UINT64_C(50) * 365 * 86400 * KV_NS_PER_S)
#define KVBM_NEVER_NS (2 * KVBM_FAR_NS)

/**
 * Check a deadline; 0 and those of a century ahead: none. Returns 0; -EINVAL: it lies decades ahead, as
 * that of another clock does (CLOCK_REALTIME), and would never pass. The log says so.
 */
static inline int kvbm_deadline_check(uint64_t deadline_ns)
{
    uint64_t now = kv_now_ns(), ahead = deadline_ns - KV_MIN(deadline_ns, now);

    if (ahead < KVBM_FAR_NS || ahead >= KVBM_NEVER_NS)
        return 0;
    kv_log_warn("kvbm", "a deadline is of another clock: CLOCK_MONOTONIC is meant",
                "deadline_ns=%" PRIu64 " now_ns=%" PRIu64, deadline_ns, now);
    return -EINVAL;
}

#endif
