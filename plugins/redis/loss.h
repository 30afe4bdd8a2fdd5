// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks that the handle dropped though their puts had succeeded: a full server refused them, or
 * they were too large for it, and a failed save must not burden the next one.
 *
 * A publication takes the chunks of every thread, and any thread may put for the one that publishes
 * (kvs_async). So threads don't tell whose chunks were dropped; their keys do:
 *
 *  - A manifest of ours that lists chunks fails while it lists a dropped one, and only then.
 *  - The needs of any other manifest are unknown. After a drop one such publication of each thread
 *    fails. The same goes for flushes.
 *  - A dropped chunk that is put again is forgotten here. Without any, nothing fails.
 *  - A chunk of a save in progress that the handle's user deleted counts for the first rule only.
 *
 * A save takes less than an hour: threads without a number at the time of a drop are told for so
 * long. Not thread-safe.
 */
#ifndef KV_REDIS_LOSS_H
#define KV_REDIS_LOSS_H

#include "base/core/buf.h"
#include "redis/entry.h"

/** Limit of keys remembered. With more, manifests of ours are treated like all others, too. */
#define RDS_MAX_DROPPED ((size_t)1 << 17)

enum rds_told { RDS_PUBLICATION, RDS_FLUSH, RDS_TOLD_KINDS };

struct rds_loss {
    struct rds_table dropped; /* keys of dropped chunks that were not put again */
    struct rds_table deleted; /* keys of deleted chunks that were not put again; not all of many */
    bool many;                /* some of them are not in the table, so the loss never ends */
    uint64_t newest;          /* number of the last thread that had one at the latest drop */
    uint64_t since_s;         /* of the latest drop, by kv_now_ns */
    struct kv_buf told[RDS_TOLD_KINDS]; /* uint64_t each: threads that had their failure since */
};

/** Note a dropped chunk. @newest: number of the last thread that has one. */
void rds_loss_note(struct rds_loss *loss, const void *hash, size_t hash_len, uint64_t newest);

/** Note a deleted chunk of a save in progress. */
void rds_loss_deleted(struct rds_loss *loss, const void *hash, size_t hash_len);

/** Note that a chunk was put again. */
void rds_loss_put(struct rds_loss *loss, const void *hash, size_t hash_len);

/** Note that thread @by has its failure for another reason. */
void rds_loss_told(struct rds_loss *loss, enum rds_told kind, uint64_t by);

/**
 * True when thread @by must fail for the loss now. Without memory it fails the next time, too.
 */
bool rds_loss_tell(struct rds_loss *loss, enum rds_told kind, uint64_t by);

/**
 * True when the publication of a manifest by thread @by must fail for the loss. *@ret_listed: it
 * lists a lost chunk, and fails until that is put again.
 */
bool rds_loss_refuses(struct rds_loss *loss, const void *manifest, size_t len, uint64_t by,
                      bool *ret_listed);

void rds_loss_fini(struct rds_loss *loss);

#endif
