// SPDX-License-Identifier: Apache-2.0
/**
 * Generate a workload when there is no trace: multi-turn sessions that share system prompts, shaped
 * like the Mooncake conversation trace (docs/replay.md compares the two).
 */
#ifndef KV_CLI_REPLAY_GENERATE_H
#define KV_CLI_REPLAY_GENERATE_H

#include "cli/replay/trace.h"

#define KC_GENERATE_REQUESTS 12000 /* about as many as the conversation trace has */

struct kc_generate_opts {
    uint64_t seed;
    size_t n_requests; /* exact number of requests */
};

/**
 * Generate a trace. Returns 0, -EINVAL, -EMSGSIZE or -ENOMEM. The same seed makes the same trace.
 */
int kc_generate(const struct kc_generate_opts *opts, struct kc_trace *ret);

#endif
