// SPDX-License-Identifier: Apache-2.0
/** Getting an object's chunks, verified; shared by restore and verify. */
#ifndef KVS_FETCH_H
#define KVS_FETCH_H

#include "store/manifest.h"

/**
 * Chunks that are about to be read, in order: those that one request for many is worth.
 *
 *     backend has            a window is                     a take is
 *     prefetch_chunks        announced, comes meanwhile      a get_chunk, from the backend's memory
 *     else get_chunks        fetched in one go, held here    free; a get_chunk for what didn't come
 *     neither                nothing                         a get_chunk
 *
 * prefetch_chunks goes first because it overlaps: the first chunks are handed on while the last
 * ones are under way. Begin with {0}; one thread at a time.
 */
struct kvs_window {
    const struct kvs_chunk_ref *chunks; /* the caller's */
    size_t n;
    void **data; /* [n] malloc'd, NULL where it didn't come; NULL: nothing is held */
    size_t *len;
};

/**
 * How many of @n chunks (at least 1) fit into @max_bytes, at least 1. They are asked for, and what
 * was held before is dropped. Failing to ask for many is no failure: the takes then ask one by one.
 * A backend that is away, or breaks its contract, is: negative.
 */
int kvs_window_begin(struct kvs_window *w, struct kvs_store *store,
                     const struct kvs_chunk_ref *chunks, size_t n, uint64_t max_bytes);
/** As kvs_fetch, for chunk @i of the window. */
int kvs_window_take(struct kvs_window *w, struct kvs_store *store, size_t i, void **ret);
void kvs_window_fini(struct kvs_window *w);

/**
 * Chunk @ref, malloc'd, of exactly its length and hash. -ENOENT: missing; -EBADMSG: other bytes;
 * else what the backend failed with. Says nothing to the log. Any thread.
 */
int kvs_fetch(struct kvs_store *store, const struct kvs_chunk_ref *ref, void **ret);

/** The log line for a chunk that could not be had. */
void kvs_fetch_failed(const char *name, size_t chunk, const struct kvs_chunk_ref *ref, int rc);
/** In words, for reports: "missing", "damaged" or "unreadable". */
const char *kvs_fetch_problem(int rc);
/**
 * A chunk was missing (@rc, -ENOENT) of an object whose manifest was there. From a backend without
 * extensions that may as well be a failure: if it doesn't give the manifest any more either, -EIO.
 */
int kvs_second_opinion(struct kvs_store *store, const char *name, int rc);
/** The store is away: that says nothing about what it holds. */
bool kvs_is_outage(int rc);

#endif
