// SPDX-License-Identifier: Apache-2.0
/**
 * Recovery: fill the indexes from a peer's GET /dump before live events are applied.
 *
 * The first peer with a complete and valid dump wins. An incomplete dump of another peer is thrown
 * away whole. A peer that doesn't send soon has the next ones asked beside it, up to eight at once. The dump is read as a stream: beside the index, a few MiB of memory for any size.
 * Format: docs/formats.md.
 */
#ifndef KV_INDEXER_REPLICA_RECOVERY_H
#define KV_INDEXER_REPLICA_RECOVERY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "indexer/registry/registry.h"

struct ki_recovery_opts {
    size_t size;
    const char *token;   /* bearer token for the peers; NULL: none */
    const char *ca_file; /* for https peers; NULL: the system's certificates */
    /*
     * Longest wait for the workers' sockets before asking, so that the dump covers the time of
     * connecting, in milliseconds; 0: 1000.
     */
    uint32_t slow_join_ms;
    uint32_t connect_ms; /* 0: 5000 */
    uint32_t
        stall_ms; /* give up a peer that is silent, or sends below 32 KB/s, so long; 0: 10000 */
    uint32_t total_ms;       /* give up a peer that takes longer in all; 0: 600000 */
    uint64_t max_bytes;      /* limit of the indexes' memory; 0: half of the machine's */
    uint64_t max_blocks;     /* limit of distinct blocks of a model's index; 0: none */
    const _Atomic int *stop; /* non-zero: give up (a signal handler's flag); NULL: never */
};

/** Result of a recovery. */
struct ki_recovery_result {
    char peer[256]; /* the peer's URL (cut to fit), "" when no peer served */
    uint64_t models, events, blocks;
    uint64_t torn;    /* ranks with an incomplete dump: partial until replayed */
    uint64_t orphans; /* events without their parent */
    /* Models left out: an error at the peer, or refused by the registry. */
    uint64_t skipped_models;
    uint64_t bytes;
    double seconds;
};

/**
 * Ask @urls in order, several at once when the first ones are slow. The registry must have been created with start_held; the caller releases it
 * afterwards, whatever the result. Returns 0, -ENOENT when no peer could serve (the registry is
 * unchanged), -ECANCELED. @ret may be NULL.
 */
int ki_recover(struct ki_registry *registry, const char *const *urls, size_t n,
               const struct ki_recovery_opts *opts, struct ki_recovery_result *ret);

#endif
