// SPDX-License-Identifier: Apache-2.0
/** The connection to NATS: records of all publishers, into a feed. Threads: open and close by the owner. */
#ifndef KV_ADVISOR_FOLLOW_H
#define KV_ADVISOR_FOLLOW_H

#include "advisor/options.h"
#include "advisor/volumes.h"
#include "plane/follow.h"

struct kva_follow;

/** Start to follow @options->nats into @world->feed. Returns as kvp_follow_open, with @error. */
int kva_follow_open(const struct kva_options *options, struct kva_world *world,
                    struct kva_follow **ret, struct kv_error *error);
void kva_follow_close(struct kva_follow *follow); /* NULL is a no-op */
/** Apply records that wait, and forget publishers that are silent. Call it several times a second. */
void kva_follow_tick(struct kva_follow *follow);
void kva_follow_get_stats(struct kva_follow *follow, struct kvp_follow_stats *ret);

#endif
