// SPDX-License-Identifier: Apache-2.0
/** Compare what the store has of a save's chunks with the object's bytes. Internal to the room. */
#ifndef KV_STORE_OBJECT_SAVE_VERIFY_H
#define KV_STORE_OBJECT_SAVE_VERIFY_H

#include "store/backend/store.h"

#define KVS_OWN_CHUNKS 256

/** Chunks of an object, at most KVS_OWN_CHUNKS, with their bytes. */
struct kvs_own_chunks {
    const uint8_t (*keys)[16];
    const void *const *data;
    const size_t *lens;
    size_t n;
};

/**
 * Read the chunks before they are put. Sets same[i] to whether the store has chunk i with these bytes.
 * Chunks with other bytes don't count as present in the next put, and ones that can't be read are
 * not the same. Returns 0 or an error of the store.
 */
int kvs_compare_before(struct kvs_store *store, const struct kvs_own_chunks *own, bool *same);

/**
 * Read the chunks that were not the @same before their put. Returns 0; -EBADMSG when the store still
 * gives other bytes for one, or none; an error of the store.
 */
int kvs_compare_after(struct kvs_store *store, const struct kvs_own_chunks *own, const bool *same);

#endif
