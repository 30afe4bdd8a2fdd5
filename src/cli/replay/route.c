// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/route.h"

#include <stdbool.h>
#include <string.h>

void kc_router_init(struct kc_router *router, enum kc_policy policy, uint32_t n_workers,
                    double blocks_per_ms, uint64_t seed)
{
    memset(router, 0, sizeof(*router));
    router->policy = policy;
    router->n_workers = n_workers;
    router->blocks_per_ms = blocks_per_ms;
    router->rng.state = kc_mix(seed + 1);
}

double kc_router_backlog(const struct kc_router *router, uint32_t worker, double now_ms)
{
    double elapsed = now_ms - router->workers[worker].at_ms;
    double left = router->workers[worker].backlog - elapsed * router->blocks_per_ms;

    return elapsed <= 0 ? router->workers[worker].backlog : left > 0 ? left : 0;
}

uint32_t kc_router_pick(const struct kc_router *router, double now_ms, size_t n,
                        const struct kc_belief *beliefs)
{
    struct kc_rng rng = router->rng;
    uint32_t best = 0;
    double best_cost = 0;

    if (router->policy == KC_ROUND_ROBIN)
        return (uint32_t)(router->n_routed % router->n_workers);
    if (router->policy == KC_RANDOM)
        return kc_rng_below(&rng, router->n_workers);
    for (uint32_t w = 0; w < router->n_workers; w++) {
        double overlap = beliefs ? (double)KV_MIN(beliefs[w].overlap, n) : 0;
        double cost = (double)n - overlap + kc_router_backlog(router, w, now_ms);

        if (w > 0 &&
            (cost > best_cost ||
             (cost == best_cost && router->workers[w].requests >= router->workers[best].requests)))
            continue;
        best = w;
        best_cost = cost;
    }
    return best;
}

void kc_router_assign(struct kc_router *router, uint32_t worker, double now_ms, size_t missing)
{
    router->workers[worker].backlog = kc_router_backlog(router, worker, now_ms) + (double)missing;
    router->workers[worker].at_ms = KV_MAX(now_ms, router->workers[worker].at_ms);
    router->workers[worker].requests++;
    router->n_routed++;
    kc_rng_u64(&router->rng); /* the next random pick */
}
