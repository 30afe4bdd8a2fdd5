// SPDX-License-Identifier: Apache-2.0
/**
 * Choose the worker that serves a prompt. All in blocks and in trace time, so that a replay at full
 * speed routes like one at the trace's own pace:
 *
 *     cost(w) = (blocks of the prompt - overlap(w)) + backlog(w)
 *
 * The cost is the blocks that the worker must compute for the prompt, plus those that it must
 * compute before. The cheapest worker wins; on a tie the one with the fewest requests, then the
 * first. A worker's backlog grows by the blocks that it did not hold, and shrinks at its prefill
 * speed.
 *
 * Pure and thread-confined.
 */
#ifndef KV_CLI_REPLAY_ROUTE_H
#define KV_CLI_REPLAY_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#include "cli/client/client.h"
#include "cli/replay/random.h"

#define KC_MAX_WORKERS 1024

enum kc_policy { KC_PREFIX, KC_ROUND_ROBIN, KC_RANDOM };

struct kc_router {
    enum kc_policy policy;
    uint32_t n_workers;
    double blocks_per_ms; /* prefill speed of one worker */
    struct kc_rng rng;
    uint64_t n_routed;
    struct {
        double backlog; /* in blocks, at @at_ms */
        double at_ms;
        uint64_t requests;
    } workers[KC_MAX_WORKERS];
};

void kc_router_init(struct kc_router *router, enum kc_policy policy, uint32_t n_workers,
                    double blocks_per_ms, uint64_t seed);

/** Return the blocks that @worker must still compute at @now_ms. */
double kc_router_backlog(const struct kc_router *router, uint32_t worker, double now_ms);

/** Choose a worker for a prompt of @n blocks. @beliefs NULL (the indexer is away): no overlaps. */
uint32_t kc_router_pick(const struct kc_router *router, double now_ms, size_t n,
                        const struct kc_belief *beliefs);

/** Give @worker a prompt of which it must compute @missing blocks. */
void kc_router_assign(struct kc_router *router, uint32_t worker, double now_ms, size_t missing);

#endif
