// SPDX-License-Identifier: Apache-2.0
/**
 * Copies of a model's streams for a dump, each as it is at one batch: what the stream knows, and its
 * ranks' blocks.
 *
 *     hold some instances -> copy what their streams know -> copy their blocks in one pass of the index
 *         -> let the streams go on -> hand the copies out
 *
 * Streams of an instance may bring the same rank: all of them are held together. While they are held,
 * their live batches wait in the backlog (stream/listener.h). The larger a group is, the longer it is
 * held, and the fewer passes a dump takes: about 10M blocks in 4 groups, of 0.15 s each. While one group
 * is handed out the next one is copied: memory has two of them.
 *
 * Streams whose blocks change all the same (an unregistration, a rank that another stream loses) are
 * copied again, three times at most, and then left out.
 */
#ifndef KV_INDEXER_REPLICA_DUMP_COPY_H
#define KV_INDEXER_REPLICA_DUMP_COPY_H

#include "indexer/registry/registry.h"

/** A group is complete with so many streams, or bytes of copied blocks; it has an instance at least. */
#define KI_GROUP_STREAMS 256
#define KI_GROUP_BYTES (40u << 20)

/** A stream and its blocks, copied. */
struct ki_copied {
    struct ki_snapshot *snapshot;
    struct kv_buf runs, extras; /* of its blocks: ki_copied_run, ki_copied_extra */
};

/** Read the run of blocks at *@at, and move *@at behind it. Returns false at the end. */
bool ki_copied_run(const struct ki_copied *c, size_t *at, struct kvi_dump_run *ret);
/** The same for a fact that runs of blocks can't say. */
bool ki_copied_extra(const struct ki_copied *c, size_t *at, struct kvi_extra *ret);

typedef int (*ki_copied_fn)(void *arg, const struct ki_copied *c);
/**
 * Pass a copy of each stream of @model to @fn, one after the other, also of workers known only from a
 * peer's dump. No stream is held meanwhile. A non-zero return of @fn stops. Returns that value, 0 or
 * -ENOMEM. Any thread.
 */
int ki_dump_copy(struct ki_registry *registry, const struct ki_model *model, ki_copied_fn fn,
                 void *arg);

#endif
