// SPDX-License-Identifier: Apache-2.0
/**
 * The policy `dynamo`, the formula of Dynamo 1.6's selection service. In blocks:
 *
 *     cost = prefill_scale * max(0, waiting + uncovered) / block_size + decode
 *            + request_weight * requests
 *     decode = distinct blocks of all prompts that run on the worker, with this one's new ones
 *
 * overlap_credit < 1 counts held tokens for less. Extra tokens count as tokens to compute.
 *
 * Source: ai-dynamo/dynamo lib/kv-router, and its service as it answers.
 */
#ifndef KV_SELECT_POLICY_DYNAMO_H
#define KV_SELECT_POLICY_DYNAMO_H

#include "select/policy/policy.h"

void kvsel_dynamo(const struct kvsel_view *view, double *cost);

#endif
