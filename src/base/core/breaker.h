// SPDX-License-Identifier: Apache-2.0
/**
 * A breaker: stops asking a store or peer that fails, and lets one call through from time to time to
 * learn whether it works again. Not thread-safe: its owner has a lock.
 */
#ifndef KV_BASE_BREAKER_H
#define KV_BASE_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

struct kv_breaker {
    uint32_t max_failures;
    uint64_t first_wait_ns, max_wait_ns;
    uint32_t failures; /* in a row */
    bool open, probing;
    uint64_t wait_ns, next_ns; /* while open: time until the next probe, and its moment */
    uint64_t opened;           /* how often it opened */
};

enum kv_gate { KV_GATE_REFUSE, KV_GATE_PASS, KV_GATE_PROBE };
/** Ask for permission to make a call. A probe must end with tell or release. */
enum kv_gate kv_breaker_ask(struct kv_breaker *b, uint64_t now_ns);
/** Report how a call ended. Returns true when that opened the breaker (again). */
bool kv_breaker_tell(struct kv_breaker *b, bool ok, bool probe, uint64_t now_ns);
/** Report that the probe never reached the store: the next call may be the probe. */
void kv_breaker_release(struct kv_breaker *b);
/** True when a result means that the store doesn't work, as opposed to a problem of the request. */
bool kv_breaker_counts(int rc);

#endif
