// SPDX-License-Identifier: Apache-2.0
/**
 * Discovery: workers appear and leave as sources (--discover, --dynamo) tell of them.
 *
 *     file ────────┐
 *     kubernetes ──┤ the set of workers now       ┌─► register
 *     dns ─────────┼──────────────► reconciler ───┼─► withdraw, and unregister after the grace
 *     etcd ────────┤   (discovery.c)              └─► register anew
 *     dynamo ──────┘
 *
 * A source publishes complete sets. One that can't be read publishes none: its last set stays. Sets of
 * several sources add up; of a rank that several name, the first source on the command line counts.
 *
 * Threads: one a source, one of the reconciler, which alone calls the registry.
 */
#ifndef KV_INDEXER_DISCOVER_DISCOVERY_H
#define KV_INDEXER_DISCOVER_DISCOVERY_H

#include "indexer/options.h"
#include "indexer/registry/registry.h"

struct ki_discovery;

/** Check the text of --discover. Returns 0 or -EINVAL with @error's text. */
int ki_discovery_check(const char *text, struct kv_error *error);

/** Check the text of --dynamo. Returns 0 or -EINVAL with @error's text. */
int ki_dynamo_check(const char *text, struct kv_error *error);

/**
 * Follow the sources of @options and of its sections, of which the texts must live on; there may be none.
 * Returns 0 or a negative errno with @error.
 */
int ki_discovery_start(const struct ki_options *options, struct ki_registry *registry,
                       struct ki_discovery **ret, struct kv_error *error);

/**
 * Follow the sources that @options name now. Those that have changed begin anew, others go on. Workers of
 * removed sources leave with the grace, unless another source names them. Returns 0, or a negative errno
 * with @error: the old sources stay. One thread at a time.
 */
int ki_discovery_reload(struct ki_discovery *discovery, const struct ki_options *options,
                        struct kv_error *error);

/** Stop. The workers stay registered. NULL is a no-op. */
void ki_discovery_stop(struct ki_discovery *discovery);

/** Append the metrics of all sources. @discovery may be NULL. */
void ki_discovery_render(struct ki_discovery *discovery, struct kv_buf *out);

/** State of a source. Texts are owned by the discovery. */
struct ki_source_info {
    const char *name;   /* as given */
    bool current;       /* the last look succeeded */
    char error[160];    /* why it isn't current; "" else */
    uint64_t age_ms;    /* milliseconds since the last look that succeeded; UINT64_MAX: none yet */
    uint64_t sets;      /* sets that were published */
    uint64_t failures;  /* looks that failed */
    uint64_t workers;   /* ranks that it names */
    uint64_t left_out;  /* entries that can't be registered as they are told */
    char why_left[160]; /* the first of them */
    uint64_t conflicts; /* ranks that an earlier source names otherwise */
    uint64_t withdrawn; /* ranks that it has named, within their grace */
    uint64_t refused;   /* ranks that the registry refuses; tried again */
};

struct ki_dynamo_nats_stats;
/**
 * Write the counters of the next source from *@at on that follows NATS, and go behind it. Returns false when
 * there is none. Any thread.
 */
bool ki_discovery_nats(struct ki_discovery *discovery, size_t *at, const char **ret_name,
                       struct ki_dynamo_nats_stats *ret);

/** Write the state of source @at. Returns false when there is none. Any thread. */
bool ki_discovery_info(struct ki_discovery *discovery, size_t at, struct ki_source_info *ret);
/** Return the number of the source that a registered rank comes from; -1: of none. Any thread. */
long ki_discovery_source_of(struct ki_discovery *discovery, uint64_t instance, uint32_t rank);

#endif
