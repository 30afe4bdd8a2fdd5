// SPDX-License-Identifier: Apache-2.0
#include "store/fetch.h"

#include <stdio.h>

#include "base/log.h"

/* Keys of one prefetch at most: a bound on its request, whatever the chunks' size. */
enum { MAX_AHEAD = 4096 };

int kvs_fetch(struct kvs_store *store, const struct kvs_chunk_ref *ref, void **ret)
{
    uint8_t key[16];
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_get_chunk(store, ref->key, sizeof(ref->key), &data, &len);

    if (rc)
        return rc < 0 ? rc : -EPROTO;
    if (len == ref->len)
        kvs_chunk_key(data, len, key);
    if (len != ref->len || memcmp(key, ref->key, sizeof(key)) != 0) {
        free(data);
        return -EBADMSG;
    }
    *ret = data;
    return 0;
}

size_t kvs_fetch_ahead(struct kvs_store *store, const struct kvs_chunk_ref *chunks, size_t n,
                       uint64_t window)
{
    uint8_t few[256 * 16], *keys = few;
    uint64_t bytes = chunks[0].len;
    size_t fit = 1;

    while (fit < n && fit < MAX_AHEAD && bytes + chunks[fit].len <= window)
        bytes += chunks[fit++].len;
    if (fit > sizeof(few) / 16)
        keys = malloc(fit * 16);
    if (!keys)
        return fit; /* a hint, after all */
    for (size_t i = 0; i < fit; i++)
        memcpy(keys + i * 16, chunks[i].key, 16);
    kvs_prefetch(store, keys, 16, fit);
    if (keys != few)
        free(keys);
    return fit;
}

const char *kvs_fetch_problem(int rc)
{
    return rc == -ENOENT ? "missing" : rc == -EBADMSG ? "damaged" : "unreadable";
}

void kvs_fetch_failed(const char *name, size_t chunk, const struct kvs_chunk_ref *ref, int rc)
{
    char quoted[256], key[33];

    for (size_t i = 0; i < 16; i++)
        snprintf(key + 2 * i, 3, "%02x", ref->key[i]);
    kv_log_error("store", "an object can't be restored: a chunk of it can't be had",
                 "object=%s chunk=%zu problem=%s key=%s error=%d",
                 kv_log_quote(quoted, sizeof(quoted), name), chunk, kvs_fetch_problem(rc), key,
                 -rc);
}
