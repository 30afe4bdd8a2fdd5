// SPDX-License-Identifier: Apache-2.0
/**
 * Follow publishers of Dynamo's event plane on NATS (--dynamo-nats): one subscription, whose messages go
 * to the listeners of the registered ranks.
 *
 *     envelope ──► route of its publisher ──► ki_listener_feed_message
 *                  └─ not registered yet: kept, up to 64 MiB of all publishers
 *
 * A message without a route, of a publisher that has no record in the discovery, is passed over.
 *
 * Threads: any, one call of set or tick at a time.
 */
#ifndef KV_INDEXER_DISCOVER_DYNAMO_NATS_H
#define KV_INDEXER_DISCOVER_DYNAMO_NATS_H

#include "indexer/options.h"
#include "indexer/registry/registry.h"
#include "plane/discovery/discovery.h"
#include "plane/nats.h"

struct ki_dynamo_nats;

struct ki_dynamo_nats_opts {
    const char *url;
    const char *subject;              /* may have wildcards */
    const struct kvp_nats_args *args; /* credentials */
    struct ki_registry *registry;
};

/** Begin to follow. Doesn't wait for a server. Returns 0, or a negative errno with @error. */
int ki_dynamo_nats_open(const struct ki_dynamo_nats_opts *opts, struct ki_dynamo_nats **ret,
                        struct kv_error *error);
/** End, and drop what is kept. NULL is a no-op. */
void ki_dynamo_nats_close(struct ki_dynamo_nats *d);

/** Replace the routes: those of @workers without an address. Returns 0 or -ENOMEM: nothing changes. */
int ki_dynamo_nats_set(struct ki_dynamo_nats *d, const struct kvp_dynamo_worker *workers, size_t n);

/** Find the listeners of ranks that were registered meanwhile, and tell listeners of the server's state. */
void ki_dynamo_nats_tick(struct ki_dynamo_nats *d);

struct ki_dynamo_nats_stats {
    uint64_t messages;  /* handed to listeners, at once or later */
    uint64_t strangers; /* passed over: no record names their publisher */
    uint64_t bad;       /* passed over: no envelopes of events */
    uint64_t dropped;   /* kept messages for which there was no room */
    uint64_t kept_bytes;
    struct kvp_nats_stats nats;
};
void ki_dynamo_nats_get_stats(struct ki_dynamo_nats *d, struct ki_dynamo_nats_stats *ret);

#endif
