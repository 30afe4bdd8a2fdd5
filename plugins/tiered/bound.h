// SPDX-License-Identifier: Apache-2.0
/**
 * A store whose calls end by a deadline. Each call runs on a thread of this module, in memory of its own:
 *
 *     caller    ├─ copy arguments ─┬──── wait, at most the deadline ────┬─ take results, or -ETIMEDOUT
 *     worker                       └─ call the backend ─────────────────┴──────────┐ late: drop results
 *
 * A call that is given up runs on, and never touches its caller's memory. While one does, every other call
 * is refused with -EHOSTDOWN: calls that are asked for later never overtake it, and no more threads
 * hang than had calls under way. A late write may still take effect, as after any timeout.
 *
 * A listing or a sweep is late when no entry came within the deadline.
 */
#ifndef KV_TIERED_BOUND_H
#define KV_TIERED_BOUND_H

#include "store/backend/store.h"

struct trd_bound;

/**
 * Open the store @uri; @existing: as kvs_open_existing. @deadline_ms 0: without a deadline, and *@bound isn't used.
 * Else *@bound, NULL at the first call, is of all calls for the store. Returns 0 with a store, for kvs_close,
 * before trd_bound_destroy; -ETIMEDOUT, -EHOSTDOWN (an attempt is still under way); errors of kvs_open. One
 * store at a time. A backend with a deadline is asked without stream_chunk, get_parts and put_parts, which
 * lend out callers' memory.
 */
int trd_open(const char *uri, bool existing, uint64_t deadline_ms, struct trd_bound **bound,
             struct kvs_store **ret);

/**
 * End it. Calls that were given up end later, and the last one closes the store. Until then this library
 * stays loaded. NULL is a no-op.
 */
void trd_bound_destroy(struct trd_bound *bound);

#endif
