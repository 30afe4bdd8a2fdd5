// SPDX-License-Identifier: Apache-2.0
/*
 * Saves with `verify`: the bytes of a chunk that the store has are compared with the object's before
 * its put counts as a hit. A get makes the backend drop or mark what is damaged or unreadable, so that
 * the put stores the chunk anew; what the backend takes for right, and isn't, is deleted here.
 */
#include "store/object/save_verify.h"

#include "base/core/log.h"
#include "store/object/fetch.h"

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

/* Get the chunks one by one. Those that can't be had stay NULL; *@ret_unread is the error of one that
 * is there and can't be read. Returns an error that says nothing of the chunks. */
static int get_each(struct kvs_store *store, const struct kvs_own_chunks *own, void **ret,
                    size_t *ret_lens, int *ret_unread)
{
    for (size_t i = 0; i < own->n; i++) {
        int rc = kvs_get_chunk(store, own->keys[i], 16, &ret[i], &ret_lens[i]);

        if (rc < 0)
            ret[i] = NULL;
        if (rc == -ENOMEM || kvs_is_outage(rc)) {
            while (i-- > 0)
                free(ret[i]);
            return rc;
        }
        if (rc < 0 && rc != -ENOENT && rc != -EBADMSG)
            *ret_unread = rc;
    }
    return 0;
}

/* True when a failed request may be about one of its chunks. A server (which gets chunks together)
 * that fails otherwise than by a refusal does so for each chunk, after all its retries. */
static bool is_of_a_chunk(const struct kvs_store *store, int rc)
{
    bool together = store->ext.get_chunks && !store->ext.get_parts;

    return rc < 0 && rc != -ENOMEM && !kvs_is_outage(rc) && (kvs_is_denied(rc) || !together);
}

/* Set same[i] to whether the store gives chunk i with the object's bytes. *@ret_unread (0 before) is
 * the error of a chunk that can't be read, and so isn't the same. */
static int compare(struct kvs_store *store, const struct kvs_own_chunks *own, bool *same,
                   int *ret_unread)
{
    void *found[KVS_OWN_CHUNKS];
    size_t lens[KVS_OWN_CHUNKS];
    int rc = kvs_get_chunks(store, own->keys, 16, own->n, found, lens);

    if (is_of_a_chunk(store, rc))
        rc = get_each(store, own, found, lens, ret_unread);
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
    int unread = 0;

    return compare(store, own, same, &unread);
}

int kvs_compare_after(struct kvs_store *store, const struct kvs_own_chunks *own, const bool *same)
{
    uint8_t keys[KVS_OWN_CHUNKS][16];
    const void *data[KVS_OWN_CHUNKS];
    size_t lens[KVS_OWN_CHUNKS];
    struct kvs_own_chunks doubt = {.keys = keys, .data = data, .lens = lens};
    bool mended[KVS_OWN_CHUNKS];
    int unread = 0, rc;

    for (size_t i = 0; i < own->n; i++) {
        if (same[i])
            continue;
        memcpy(keys[doubt.n], own->keys[i], 16);
        data[doubt.n] = own->data[i];
        lens[doubt.n++] = own->lens[i];
    }
    rc = doubt.n ? compare(store, &doubt, mended, &unread) : 0;
    for (size_t i = 0; rc == 0 && i < doubt.n; i++)
        rc = mended[i] ? 0 : unread ? unread : -EBADMSG;
    return rc;
}
