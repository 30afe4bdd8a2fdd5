// SPDX-License-Identifier: Apache-2.0
/**
 * Threads that must still learn of a loss: a full server refused chunks, and the handle dropped
 * them.
 *
 * A publication includes the chunks of every thread, so any thread may publish for the one whose
 * chunks were dropped. After a loss these publications fail, once for each thread:
 *
 *  - the next one, whichever thread makes it;
 *  - those of the threads that put the dropped chunks;
 *  - those of threads that put or published before the loss;
 *  - for an hour, those of other threads without a put in the save: library threads may have put
 *    their chunks (kvs_async).
 *
 * The loss is over once every thread that put dropped chunks has had its failure. Not thread-safe.
 */
#ifndef KV_REDIS_LOSS_H
#define KV_REDIS_LOSS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

#define RDS_MAX_LOSERS 32

struct rds_loss {
    uint64_t losers[RDS_MAX_LOSERS]; /* numbers of threads that put dropped chunks */
    size_t n_losers;
    bool unknown;       /* further threads did, so the loss never ends */
    uint64_t since_s;   /* of the latest drop, by kv_now_ns */
    struct kv_buf told; /* uint64_t each: threads whose publications failed since the latest drop */
    uint64_t newest;    /* threads up to this number had put or published */
};

/** Note a dropped chunk. @by: number of the thread that put it, 0: unknown; @newest: see above. */
void rds_loss_note(struct rds_loss *loss, uint64_t by, uint64_t newest);

/**
 * True when this publication of thread @by must fail. @puts: it put chunks of the save in progress.
 * Without memory its next publication fails, too.
 */
bool rds_loss_tell(struct rds_loss *loss, uint64_t by, bool puts);

void rds_loss_fini(struct rds_loss *loss);

#endif
