// SPDX-License-Identifier: Apache-2.0
/**
 * The policy `scored`, in the form of llm-d's scheduler: weighted scores of 0 to 1, the largest sum
 * wins (cost = - sum).
 *
 *     prefix_weight * held blocks / blocks of the prompt
 *     + queue_weight * (largest - queued) / (largest - smallest), 1 where all are equal
 *     + use_weight   * (1 - context / capacity), 1 where the capacity is unknown
 *     + lora_weight  * (1 adapter loaded, .8 room, else 0), where the request names an adapter
 *
 * queued and context are the selector's own counts, not metrics that were scraped: exact for requests
 * that pass through it, blind for others.
 *
 * Source: llm-d's scorers (prefix cache, queue, KV cache use, LoRA affinity) and their documentation.
 */
#ifndef KV_SELECT_POLICY_SCORED_H
#define KV_SELECT_POLICY_SCORED_H

#include "select/policy/policy.h"

void kvsel_scored(const struct kvsel_view *view, double *cost);

#endif
