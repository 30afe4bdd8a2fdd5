// SPDX-License-Identifier: Apache-2.0
/** Getting an object's chunks, verified; shared by restore and verify. */
#ifndef KVS_FETCH_H
#define KVS_FETCH_H

#include "store/manifest.h"

/**
 * Chunk @ref, malloc'd, of exactly its length and hash. -ENOENT: missing; -EBADMSG: other bytes;
 * else what the backend failed with. Says nothing to the log. Any thread.
 */
int kvs_fetch(struct kvs_store *store, const struct kvs_chunk_ref *ref, void **ret);

/** How many of @n chunks (at least 1) fit into @window bytes, at least 1; they are prefetched. */
size_t kvs_fetch_ahead(struct kvs_store *store, const struct kvs_chunk_ref *chunks, size_t n,
                       uint64_t window);

/** The log line for a chunk that could not be had. */
void kvs_fetch_failed(const char *name, size_t chunk, const struct kvs_chunk_ref *ref, int rc);
/** In words, for reports: "missing", "damaged" or "unreadable". */
const char *kvs_fetch_problem(int rc);

#endif
