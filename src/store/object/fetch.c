// SPDX-License-Identifier: Apache-2.0
#include "store/object/fetch.h"

#include <stdio.h>

#include "base/core/log.h"
#include "store/backend/store.h"

/* Upper limit for the keys of one request, whatever the chunks' sizes. */
enum { MAX_AHEAD = 4096 };

/* Check that @data is the chunk that @ref names. Takes @data: hands it out in *ret or frees it. */
static int check(const struct kvs_chunk_ref *ref, void *data, size_t len, void **ret)
{
    uint8_t key[16] = {0};

    if (len == ref->len)
        kvs_chunk_key(data, len, key);
    if (len != ref->len || memcmp(key, ref->key, sizeof(key)) != 0) {
        free(data);
        return -EBADMSG;
    }
    *ret = data;
    return 0;
}

int kvs_fetch(struct kvs_store *store, const struct kvs_chunk_ref *ref, void **ret)
{
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_get_chunk(store, ref->key, sizeof(ref->key), &data, &len);

    if (rc)
        return rc < 0 ? rc : -EPROTO;
    return check(ref, data, len, ret);
}

/* -- windows ----------------------------------------------------------------------------------- */

static void drop(struct kvs_window *w)
{
    for (size_t i = 0; w->data && i < w->n; i++)
        free(w->data[i]);
    free(KV_STEAL(w->data));
    free(KV_STEAL(w->len));
    w->n = 0;
}

/* Fetch the whole window by get_chunks. Most failures are left to the takes, which report the
 * reason; returns only those that asking again can't mend. */
static int hold(struct kvs_window *w, struct kvs_store *store, const uint8_t *keys)
{
    int rc;

    w->data = calloc(w->n, sizeof(*w->data));
    w->len = calloc(w->n, sizeof(*w->len));
    rc = w->data && w->len ? kvs_get_chunks(store, keys, 16, w->n, w->data, w->len) : -ENOMEM;
    if (rc >= 0)
        return 0;
    free(KV_STEAL(w->data));
    free(KV_STEAL(w->len));
    return rc == -EPROTO || kvs_is_outage(rc) ? rc : 0;
}

static int ask(struct kvs_window *w, struct kvs_store *store)
{
    bool ahead = store->calls.prefetch_chunks, batch = store->ext.get_chunks && w->n > 1;
    uint8_t *keys = ahead || batch ? malloc(w->n * 16) : NULL;
    int rc = 0;

    if (!keys)
        return 0; /* kvs_window_take gets the chunks one by one */
    for (size_t i = 0; i < w->n; i++)
        memcpy(keys + i * 16, w->chunks[i].key, 16);
    if ((!ahead || kvs_prefetch(store, keys, 16, w->n) < 0) && batch)
        rc = hold(w, store, keys);
    free(keys);
    return rc;
}

int kvs_window_begin(struct kvs_window *w, struct kvs_store *store,
                     const struct kvs_chunk_ref *chunks, size_t n, uint64_t max_bytes)
{
    uint64_t bytes = chunks[0].len;
    size_t fit = 1;
    int rc;

    while (fit < n && fit < MAX_AHEAD && bytes + chunks[fit].len <= max_bytes)
        bytes += chunks[fit++].len;
    drop(w);
    w->chunks = chunks;
    w->n = fit;
    rc = ask(w, store);
    return rc < 0 ? rc : (int)fit;
}

int kvs_window_take(struct kvs_window *w, struct kvs_store *store, size_t i, void **ret)
{
    void *data = w->data ? KV_STEAL(w->data[i]) : NULL;

    return data ? check(&w->chunks[i], data, w->len[i], ret) : kvs_fetch(store, &w->chunks[i], ret);
}

void kvs_window_fini(struct kvs_window *w)
{
    drop(w);
}

/* -- what went wrong --------------------------------------------------------------------------- */

int kvs_second_opinion(struct kvs_store *store, const char *name, int rc)
{
    void *manifest;
    size_t len;

    if (rc != -ENOENT || store->ext_table)
        return rc;
    if (kvs_get_manifest(store, name, &manifest, &len) != 0)
        return -EIO;
    free(manifest);
    return rc;
}

bool kvs_is_outage(int rc)
{
    return rc == -ECONNREFUSED || rc == -ECONNRESET || rc == -ETIMEDOUT || rc == -EHOSTUNREACH ||
           rc == -EHOSTDOWN || rc == -ENETUNREACH || rc == -ENOTCONN || rc == -EPIPE;
}

bool kvs_is_denied(int rc)
{
    return rc == -EACCES || rc == -EPERM;
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
    kv_log_error("store", "an object can't be restored: a chunk is missing or unreadable",
                 "object=%s chunk=%zu problem=%s key=%s error=%d",
                 kv_log_quote(quoted, sizeof(quoted), name), chunk, kvs_fetch_problem(rc), key,
                 -rc);
}
