// SPDX-License-Identifier: Apache-2.0
/** Fetch an object's chunks and verify them; shared by restore and verify. */
#ifndef KVS_OBJECT_FETCH_H
#define KVS_OBJECT_FETCH_H

#include "store/object/manifest.h"

/**
 * A window: the next chunks to read, in order, as many as one request should ask for.
 *
 *     backend has            a window is                     a take is
 *     prefetch_chunks        announced, comes meanwhile      a get_chunk, from the backend's memory
 *     else get_chunks        fetched in one go, held here    free; a get_chunk for what didn't come
 *     neither                nothing                         a get_chunk
 *
 * prefetch_chunks is preferred because it overlaps: the caller uses the first chunks while the last
 * ones still arrive. Begin with {0}; one thread at a time.
 */
struct kvs_window {
    const struct kvs_chunk_ref *chunks; /* owned by the caller */
    size_t n;
    void **data; /* [n] malloc'd, NULL for a chunk that didn't come; NULL: no chunk is held */
    size_t *len;
};

/**
 * Start a window over the first of @n chunks (at least 1) that fit into @max_bytes; at least one.
 * Drops the chunks of the window before and asks the backend for the new ones. Returns their
 * number. A failed request is no error, since the takes then ask one by one; negative only when the
 * backend is unreachable (kvs_is_outage) or breaks the ABI.
 */
int kvs_window_begin(struct kvs_window *w, struct kvs_store *store,
                     const struct kvs_chunk_ref *chunks, size_t n, uint64_t max_bytes);
/** Take chunk @i of the window; otherwise as kvs_fetch. */
int kvs_window_take(struct kvs_window *w, struct kvs_store *store, size_t i, void **ret);
void kvs_window_fini(struct kvs_window *w);

/**
 * Get chunk @ref into a malloc'd buffer, of exactly its length and hash. Returns -ENOENT: missing;
 * -EBADMSG: other bytes; else the backend's error. Logs nothing. Any thread.
 */
int kvs_fetch(struct kvs_store *store, const struct kvs_chunk_ref *ref, void **ret);

/** Log that a chunk of object @name could not be read. */
void kvs_fetch_failed(const char *name, size_t chunk, const struct kvs_chunk_ref *ref, int rc);
/** The problem in one word, for reports: "missing", "damaged" or "unreadable". */
const char *kvs_fetch_problem(int rc);
/**
 * Decide whether a missing chunk (@rc, -ENOENT) of an object whose manifest was there is an outage.
 * A backend without extensions reports both alike: when the manifest can't be read again either,
 * -EIO.
 */
int kvs_second_opinion(struct kvs_store *store, const char *name, int rc);
/** True for errors of an unreachable store, which say nothing about its content. */
bool kvs_is_outage(int rc);
/** True for a refusal to this user, which says nothing of the bytes. */
bool kvs_is_denied(int rc);

#endif
