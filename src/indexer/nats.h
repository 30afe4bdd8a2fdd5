// SPDX-License-Identifier: Apache-2.0
/**
 * Follow the block managers that publish on NATS (--nats): a registration for each publisher, made with
 * its first snapshot, and removed when it is silent for --nats-silence.
 */
#ifndef KV_INDEXER_NATS_H
#define KV_INDEXER_NATS_H

#include "indexer/options.h"
#include "indexer/registry/registry.h"
#include "plane/follow.h"

struct ki_nats;

/**
 * Start to follow. *@ret is NULL when no --nats is given. The registry and @options must outlive it.
 * Returns 0, or a negative errno with @error.
 */
int ki_nats_start(const struct ki_options *options, struct ki_registry *registry,
                  struct ki_nats **ret, struct kv_error *error);

/** Read the follower's counters: sums over all publishers. */
void ki_nats_get_stats(struct ki_nats *nats, struct kvp_follow_stats *ret);
/** Append the metrics. @nats may be NULL. */
void ki_nats_render(struct ki_nats *nats, struct kv_buf *out);

/** Stop following. Registrations stay. NULL is a no-op. */
void ki_nats_stop(struct ki_nats *nats);

#endif
