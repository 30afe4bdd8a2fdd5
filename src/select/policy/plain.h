// SPDX-License-Identifier: Apache-2.0
/**
 * Policies without weights, for comparison and for fleets that need no more.
 *
 *     least          cost = requests that run
 *     round-robin    cost = slots from the one behind the last chosen to this one
 *     prefix         cost = - held tokens, then requests that run
 *     cache-aware    most requests - fewest > balance_absolute, and most > balance_relative * fewest:
 *                        cost = requests that run
 *                    else the longest match > match_threshold * tokens: as prefix
 *                    else cost = context (in place of the size of the worker's tree), then requests
 *
 * Sources: `prefix` is the rule that users write first. `cache-aware` follows the rule of SGLang's
 * router.
 */
#ifndef KV_SELECT_POLICY_PLAIN_H
#define KV_SELECT_POLICY_PLAIN_H

#include "select/policy/policy.h"

void kvsel_least(const struct kvsel_view *view, double *cost);
void kvsel_round_robin(const struct kvsel_view *view, double *cost);
void kvsel_prefix(const struct kvsel_view *view, double *cost);
void kvsel_cache_aware(const struct kvsel_view *view, double *cost);

#endif
