// SPDX-License-Identifier: Apache-2.0
/**
 * Pending requests of a handle: puts not yet stored, and prefetched gets not yet taken by a caller.
 * Both are bounded.
 *
 * put_chunk copies the value into a put and returns; put_manifest waits for all puts begun before
 * it. A failed put is kept with its bytes, and each put_manifest tries it again: no manifest is
 * published while a chunk before it is missing. So does a put without room for its own bytes.
 *
 * Thread-safe; one lock.
 */
#ifndef KV_PLUGINS_S3_PENDING_H
#define KV_PLUGINS_S3_PENDING_H

#include "s3/object.h"
#include "s3/seen.h"

struct s3_pending;
/** Create. Borrows all three arguments; stored chunks are noted in @seen. */
int s3_pending_create(struct s3_client *client, const struct s3_config *config,
                      struct s3_seen *seen, struct s3_pending **ret);
void s3_pending_destroy(struct s3_pending *pending); /* call after destroying the client */

/** Callers put larger values by themselves. */
#define S3_BUFFERED (16u << 20)

/**
 * Begin to store a chunk that is missing. Returns 0; 1: another put of it is running; or the error
 * of one of the failed puts that fill the room and failed again. @replace: overwrite an existing
 * object.
 */
int s3_pending_put(struct s3_pending *pending, const uint8_t *hash, size_t hash_len,
                   const void *data, size_t len, bool replace);
/** True when a put of the chunk is running (a failed one is begun again). */
bool s3_pending_has(struct s3_pending *pending, const uint8_t *hash, size_t hash_len);
/**
 * Wait until all puts begun so far are stored. Returns 0 or the error of one that failed. @retry:
 * first begin failed puts again.
 */
int s3_pending_flush(struct s3_pending *pending, bool retry);

/**
 * Drop what is pending of a chunk that its caller deletes, so that no later flush stores it: wait for
 * a put or get of it that runs, then forget a failed put or a prefetched value.
 */
void s3_pending_drop(struct s3_pending *pending, const uint8_t *hash, size_t hash_len);
/**
 * Wait for a put of the chunk that runs. Call it after a deletion: the server may have stored the
 * chunk before it deleted it, and no later put may count on that upload.
 */
void s3_pending_settle(struct s3_pending *pending, const uint8_t *hash, size_t hash_len);

/** Begin to prefetch. Chunks without room are skipped. */
void s3_pending_fetch(struct s3_pending *pending, const uint8_t *hashes, size_t hash_len, size_t n);
/** Take the verified value of a chunk that is being put or prefetched. -ENOENT: it is neither. */
int s3_pending_take(struct s3_pending *pending, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *ret_len);

#endif
