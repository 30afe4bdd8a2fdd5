// SPDX-License-Identifier: Apache-2.0
/**
 * Recovery: fill the indexes from a peer's GET /dump before live events are applied.
 *
 * The first peer whose whole dump arrives and parses wins; what another one sent until it failed is
 * thrown away, so a partial dump never stays. The dump is read as a stream: beside the index itself
 * a few MiB of memory, whatever its size. Format: docs/formats.md.
 */
#ifndef KV_INDEXER_RECOVERY_H
#define KV_INDEXER_RECOVERY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "indexer/registry.h"

struct ki_recovery_opts {
    size_t size;
    const char *token;       /* bearer token for the peers; NULL: none */
    const char *ca_file;     /* for https peers; NULL: the system's certificates */
    uint32_t slow_join_ms;   /* wait so long at most for the workers' sockets before asking, so that
                                 the dump covers what they missed while connecting; 0: 1000 */
    uint32_t connect_ms;     /* 0: 5000 */
    uint32_t stall_ms;       /* give a peer up that sends nothing for so long; 0: 10000 */
    uint32_t total_ms;       /* or takes longer than this altogether; 0: 600000 */
    uint64_t max_bytes;      /* memory that the indexes may take; 0: half of the machine's */
    uint64_t max_blocks;     /* distinct blocks of a model's index; 0: no bound */
    const _Atomic int *stop; /* non-zero: give up (a signal handler's flag); NULL: none */
};

/** Result of a recovery. */
struct ki_recovery_result {
    char peer[256]; /* its URL (cut to fit), "" when no peer served */
    uint64_t models, events, blocks;
    uint64_t torn;           /* ranks whose dump lacks something: partial until replayed */
    uint64_t orphans;        /* events whose parent changed while the peer dumped */
    uint64_t skipped_models; /* the peer had an error for them, or the registry refused them */
    uint64_t bytes;
    double seconds;
};

/**
 * Ask @urls in order. The registry must have been created with start_held; the caller lets it go
 * afterwards, whatever this returns. Returns 0, -ENOENT when no peer could serve (the registry is
 * untouched), -ECANCELED. @ret may be NULL.
 */
int ki_recover(struct ki_registry *registry, const char *const *urls, size_t n,
               const struct ki_recovery_opts *opts, struct ki_recovery_result *ret);

#endif
