// SPDX-License-Identifier: Apache-2.0
/**
 * A latency histogram in fixed memory: 32 steps per power of two, so a quantile is at most 3.2 %
 * above the true value. Recording is one relaxed atomic add. Any thread may call all functions.
 */
#ifndef KV_CLI_REPLAY_HIST_H
#define KV_CLI_REPLAY_HIST_H

#include <stdatomic.h>
#include <stdint.h>

#define KC_HIST_STEPS 32
#define KC_HIST_BUCKETS (KC_HIST_STEPS * 60)

struct kc_hist {
    _Atomic uint64_t buckets[KC_HIST_BUCKETS];
    _Atomic uint64_t n, max;
};

void kc_hist_record(struct kc_hist *hist, uint64_t value);

/** Return an upper bound of the @q quantile (0..1), 0 when nothing was recorded. */
uint64_t kc_hist_quantile(struct kc_hist *hist, double q);

#endif
