// SPDX-License-Identifier: Apache-2.0
/**
 * Which worker serves a prompt. All in blocks and in trace time, so that a replay at full speed
 * routes as one at the trace's own pace:
 *
 *     cost(w) = (blocks of the prompt - overlap(w)) + backlog(w)
 *
 * what would have to be computed for it there, after what that worker still has to compute. The
 * cheapest worker gets it; on a tie the one that got fewest requests, then the first. A worker's
 * backlog grows by the blocks it did not hold and shrinks at its prefill speed.
 *
 * Pure and thread-confined.
 */
#ifndef KV_CLI_ROUTE_H
#define KV_CLI_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#include "cli/client.h"
#include "cli/random.h"

#define KC_MAX_WORKERS 1024

enum kc_policy { KC_PREFIX, KC_ROUND_ROBIN, KC_RANDOM };

struct kc_router {
    enum kc_policy policy;
    uint32_t n_workers;
    double blocks_per_ms; /* prefill speed of one worker */
    struct kc_rng rng;
    uint64_t n_routed;
    struct {
        double backlog; /* blocks, at @at_ms */
        double at_ms;
        uint64_t requests;
    } workers[KC_MAX_WORKERS];
};

void kc_router_init(struct kc_router *router, enum kc_policy policy, uint32_t n_workers,
                    double blocks_per_ms, uint64_t seed);

/** Blocks that @worker still has to compute at @now_ms. */
double kc_router_backlog(const struct kc_router *router, uint32_t worker, double now_ms);

/** Choose a worker for a prompt of @n blocks. @beliefs NULL (the indexer is away): no overlaps. */
uint32_t kc_router_pick(const struct kc_router *router, double now_ms, size_t n,
                        const struct kc_belief *beliefs);

/** @worker got a prompt and had to compute @missing blocks of it. */
void kc_router_assign(struct kc_router *router, uint32_t worker, double now_ms, size_t missing);

#endif
