// SPDX-License-Identifier: Apache-2.0
/**
 * The policy `adaptive`, Kvasir's own and the default. In tokens to compute:
 *
 *     cost = factor * (waiting + weight * uncovered + extra) + context_weight * context
 *     weight = min(max_own_weight, 1 / (1 - busy))         or own_weight where it is set
 *
 * - The request's own tokens weigh more the fewer workers are idle. Under load, computing what another
 *   worker holds delays all later requests; with idle workers it delays nobody.
 * - Running requests slow a worker down a little: each step reads their context.
 * - factor is 1 but for workers that are slower or faster than the others (speed.h).
 *
 * Source: simulations of routing policies over request traces; bench/select_sim repeats them.
 */
#ifndef KV_SELECT_POLICY_ADAPTIVE_H
#define KV_SELECT_POLICY_ADAPTIVE_H

#include "select/policy/policy.h"

void kvsel_adaptive(const struct kvsel_view *view, double *cost);

#endif
