// SPDX-License-Identifier: Apache-2.0
/**
 * Pending requests of a handle: puts not yet stored, and prefetched gets not yet fetched by a
 * caller. Both are bounded.
 *
 *   put_chunk copies into a put and goes on; put_manifest waits for all puts begun before it. A put
 *   that failed stays, with its bytes, and is tried again by each put_manifest: none succeeds while
 *   a chunk before it is missing.
 *
 * Thread-safe; one lock.
 */
#ifndef KV_PLUGINS_S3_PENDING_H
#define KV_PLUGINS_S3_PENDING_H

#include "s3/object.h"
#include "s3/seen.h"

struct s3_pending;
/** Borrows all three; what was stored is noted in @seen. */
int s3_pending_create(struct s3_client *client, const struct s3_config *config,
                      struct s3_seen *seen, struct s3_pending **ret);
void s3_pending_destroy(struct s3_pending *pending); /* after the client */

/** Larger values are put by the caller itself. */
#define S3_BUFFERED (16u << 20)

/**
 * Begin to store a chunk that isn't there. 0; 1: another put of it is under way; -EIO: what failed
 * before fills the room. @replace: also over what is there.
 */
int s3_pending_put(struct s3_pending *pending, const uint8_t *hash, size_t hash_len,
                   const void *data, size_t len, bool replace);
/** Whether a put of it is under way (a failed one is begun again). */
bool s3_pending_has(struct s3_pending *pending, const uint8_t *hash, size_t hash_len);
/** Wait until all puts begun until now are stored; the error of one that is not. @retry: those that
 * failed before are begun again first. */
int s3_pending_flush(struct s3_pending *pending, bool retry);

/** Begin to fetch; what there is no room for is left out. */
void s3_pending_fetch(struct s3_pending *pending, const uint8_t *hashes, size_t hash_len, size_t n);
/** A chunk that is under way in either direction, verified; -ENOENT: it is not. */
int s3_pending_take(struct s3_pending *pending, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *ret_len);

#endif
