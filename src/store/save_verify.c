// SPDX-License-Identifier: Apache-2.0
/*
 * Saves with `verify`: the bytes of a chunk that the store has are compared with the object's before
 * its put counts as a hit. A get makes the backend drop or mark what is damaged, so that the put
 * stores the chunk anew; what the backend takes for right, and isn't, is deleted here.
 */
#include "store/save_verify.h"

#include "base/log.h"

/* Delete a chunk that verified with other bytes than the object's: a put would take it for the same. */
static void drop_other(struct kvs_store *store, const uint8_t key[16], const void *bytes,
                       size_t len)
{
    int rc = kvs_delete_chunk_if(store, key, 16, bytes, len);

    if (rc == -ENOTSUP)
        rc = kvs_delete_chunk(store, key, 16);
    if (rc < 0)
        kv_log_warn("store", "a chunk with other bytes than its key's can't be deleted", "error=%d",
                    -rc);
}

/* Set same[i] to whether the store gives chunk i with the object's bytes. */
static int compare(struct kvs_store *store, const struct kvs_own_chunks *own, bool *same)
{
    void *found[KVS_OWN_CHUNKS];
    size_t lens[KVS_OWN_CHUNKS];
    int rc = kvs_get_chunks(store, own->keys, 16, own->n, found, lens);

    for (size_t i = 0; rc >= 0 && i < own->n; i++) {
        same[i] =
            found[i] && lens[i] == own->lens[i] && memcmp(found[i], own->data[i], lens[i]) == 0;
        if (found[i] && !same[i])
            drop_other(store, own->keys[i], found[i], lens[i]);
        free(found[i]);
    }
    return KV_MIN(rc, 0);
}

int kvs_compare_before(struct kvs_store *store, const struct kvs_own_chunks *own, bool *same)
{
    return compare(store, own, same);
}

int kvs_compare_after(struct kvs_store *store, const struct kvs_own_chunks *own, const bool *same)
{
    uint8_t keys[KVS_OWN_CHUNKS][16];
    const void *data[KVS_OWN_CHUNKS];
    size_t lens[KVS_OWN_CHUNKS];
    struct kvs_own_chunks doubt = {.keys = keys, .data = data, .lens = lens};
    bool mended[KVS_OWN_CHUNKS];
    int rc;

    for (size_t i = 0; i < own->n; i++) {
        if (same[i])
            continue;
        memcpy(keys[doubt.n], own->keys[i], 16);
        data[doubt.n] = own->data[i];
        lens[doubt.n++] = own->lens[i];
    }
    rc = doubt.n ? compare(store, &doubt, mended) : 0;
    for (size_t i = 0; rc == 0 && i < doubt.n; i++)
        rc = mended[i] ? 0 : -EBADMSG;
    return rc;
}
