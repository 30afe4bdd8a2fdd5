// SPDX-License-Identifier: Apache-2.0
/**
 * Turns of blocking calls that found no host block. They wait in the order of their coming, and
 * hold neither a pin nor a block meanwhile. The oldest one tries again at each change, the others
 * every 20 ms: a call that waits for a silent store doesn't stop those behind it.
 */
#ifndef KVBM_TIER_MANAGER_TURN_H
#define KVBM_TIER_MANAGER_TURN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

struct kvbm_manager;

/** Place of a call among those that wait. Begins as zeros. */
struct kvbm_turn {
    TAILQ_ENTRY(kvbm_turn) next;
    bool waits;        /* in the manager's list */
    uint64_t pause_ns; /* to the next try if nothing changes: doubles with each in vain */
};

/**
 * Wait until it is worth while to look for host blocks again, at most until @deadline_ns, and keep
 * the place. Takes the manager's lock. Returns 0; -ESHUTDOWN (the manager ends and may be freed by
 * now; the place is gone).
 */
int kvbm_turn_wait(struct kvbm_manager *m, struct kvbm_turn *turn, uint64_t deadline_ns);
/**
 * Wait in the same way for something else than a host block, such as another call's pin: without a
 * place, so that no call waits behind this one.
 */
int kvbm_turn_wait_aside(struct kvbm_manager *m, struct kvbm_turn *turn, uint64_t deadline_ns);
/**
 * Let calls go first that wait for host blocks, unless the host tier has @key, so that no block is
 * needed. No-op while none waits. Takes the manager's lock. Returns as kvbm_turn_wait.
 */
int kvbm_turn_give_way(struct kvbm_manager *m, struct kvbm_turn *turn, uint32_t group,
                       const void *key, uint64_t deadline_ns);
/** Give the place up: the call got host blocks, or ends. Takes the manager's lock. */
void kvbm_turn_end(struct kvbm_manager *m, struct kvbm_turn *turn);

#endif
