// SPDX-License-Identifier: Apache-2.0
/**
 * The policy `adaptive`, Kvasir's own and the default. In tokens to compute:
 *
 *     cost = factor * (waiting + weight * uncovered + extra) + context_weight * context
 *     weight = min(max_own_weight, 1 + busy / (1 - busy) / missing)    or own_weight where it is set
 *
 * - busy: share of workers with waiting tokens. missing: share of prompts' tokens that their workers
 *   had to compute. Both are smoothed over 200 decisions.
 * - The weight is the delay that computing one token causes. The token's own request waits for it. Until
 *   the worker is idle again, busy / (1 - busy) tokens of later prompts arrive and wait, too: a queue's
 *   busy period. Where most workers are idle, hardly anybody else waits.
 * - Workers compute only the share missing of those later prompts. So each token that waits stands for
 *   1 / missing tokens of prompts that are delayed.
 * - The division by missing keeps fleets stable that live on their caches. Where nine tenths of prompts
 *   are held, few workers have waiting tokens, and busy alone gives a weight near 1: sessions leave for
 *   workers with less context. Each move evicts other sessions' blocks. When hits no longer suffice for
 *   the load, queues and the weight grow, but no worker holds the prompts any more: this state lasts.
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
