// SPDX-License-Identifier: Apache-2.0
/* Batches between a store and the caller's memory: kvs_get_chunks_into, kvs_put_chunks_from. */
#include <limits.h>

#include "base/core/error.h"
#include "store/backend/check.h"
#include "store/backend/parts.h"
#include "store/object/fetch.h"

/* Chunks of one call of a backend's batch functions, at most; the bytes bound its memory. */
enum { BATCH = 256, BATCH_BYTES = 32 << 20 };

/* Chunks of the caller. */
struct batch {
    struct kvs_store *store;
    const uint8_t *hashes;
    size_t hash_len, n;
    const struct iovec *parts;
    const uint32_t *n_parts; /* NULL: 1 each */
};

/* One chunk of it. */
struct chunk {
    const uint8_t *hash;
    const struct iovec *parts;
    size_t n_parts, len; /* len: of all parts */
};

/* A walk over the chunks in order. */
struct walk {
    const struct batch *b;
    size_t i, part;
};

/* False: the end, or (wrong) parts that can't be. */
static bool next(struct walk *w, struct chunk *ret, bool *wrong)
{
    const struct batch *b = w->b;

    if (w->i == b->n)
        return false;
    ret->hash = b->hashes + w->i * b->hash_len;
    ret->parts = b->parts ? b->parts + w->part : NULL;
    ret->n_parts = b->n_parts ? b->n_parts[w->i] : 1;
    *wrong = ret->n_parts > KVS_PARTS_MAX || (ret->n_parts && !b->parts) ||
             !kvs_parts_len(ret->parts, ret->n_parts, KVS_VALUE_MAX, &ret->len);
    w->i++;
    w->part += ret->n_parts;
    return !*wrong;
}

static bool is_valid(const struct batch *b)
{
    struct walk w = {b, 0, 0};
    struct chunk chunk;
    bool wrong = !b->store || !kvs_hashes_ok(b->hashes, b->hash_len, b->n) || b->n > INT_MAX;

    while (!wrong && next(&w, &chunk, &wrong))
        ;
    return !wrong;
}

/* The following chunks, as many as go in one call of the backend. Returns their number. */
static size_t gather_window(struct walk *w, struct chunk chunks[BATCH])
{
    size_t n = 0, bytes = 0;
    bool wrong;

    while (n < BATCH && bytes < BATCH_BYTES) {
        struct walk before = *w;

        if (!next(w, &chunks[n], &wrong))
            break;
        if (n && chunks[n].len > BATCH_BYTES - bytes) {
            *w = before;
            break;
        }
        bytes += chunks[n++].len;
    }
    return n;
}

/* -- get --------------------------------------------------------------------------------------- */

/* A value that came as a whole goes into the chunk's parts. */
static int64_t spread(const struct chunk *chunk, const void *data, size_t len)
{
    struct kvs_cursor at = {0};

    if (len > chunk->len)
        return -EMSGSIZE;
    kvs_parts_scatter(chunk->parts, chunk->n_parts, &at, data, len);
    return (int64_t)len;
}

static int64_t get_one(struct kvs_store *store, const struct chunk *chunk, size_t hash_len)
{
    size_t len = 0;
    int64_t rc;
    void *data;

    if (store->ext.get_parts) {
        rc = kvs_check_rc(store, "get_parts",
                          store->ext.get_parts(store->backend, chunk->hash, hash_len, chunk->parts,
                                               chunk->n_parts, &len),
                          0);
        if (rc == 0 && len > chunk->len)
            return kvs_broken(store, "get_parts", "a chunk longer than its parts");
        return rc == 0 ? (int64_t)len : rc;
    }
    rc = kvs_get_chunk(store, chunk->hash, hash_len, &data, &len);
    if (rc)
        return rc;
    rc = spread(chunk, data, len);
    free(data);
    return rc;
}

/* Returns an error that all later chunks would get as well, or 0. */
static int get_singly(const struct batch *b, struct walk *w, int64_t *ret)
{
    struct chunk chunk;
    bool wrong;

    while (next(w, &chunk, &wrong)) {
        int64_t *rc = &ret[w->i - 1];

        *rc = get_one(b->store, &chunk, b->hash_len);
        if (*rc < 0 && kvs_is_outage((int)*rc))
            return (int)*rc;
    }
    return 0;
}

/* The backend's batches: their buffers are copied and freed, a window at a time. */
static int get_by_windows(const struct batch *b, struct walk *w, int64_t *ret)
{
    void *data[BATCH];
    size_t len[BATCH], n;
    struct chunk chunks[BATCH];

    while ((n = gather_window(w, chunks)) > 0) {
        int64_t *each = &ret[w->i - n];
        int rc = kvs_get_chunks_each(b->store, chunks->hash, b->hash_len, n, data, len);
        bool singly = rc < 0 && rc != -EPROTO && !kvs_is_outage(rc); /* others may do better */

        for (size_t i = 0; i < n; i++) {
            each[i] = singly                      ? get_one(b->store, &chunks[i], b->hash_len)
                      : rc < 0                    ? rc
                      : data[i]                   ? spread(&chunks[i], data[i], len[i])
                      : len[i] == KVS_LEN_BAD     ? -EBADMSG
                      : len[i] == KVS_LEN_UNKNOWN ? -EIO
                                                  : -ENOENT;
            if (rc >= 0)
                free(data[i]);
        }
        if (rc < 0 && kvs_is_outage(rc))
            return rc;
    }
    return 0;
}

int kvs_get_chunks_into(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                        const struct iovec *parts, const uint32_t *n_parts, int64_t *ret_each)
{
    const struct batch b = {store, hashes, hash_len, n, parts, n_parts};
    struct walk w = {&b, 0, 0};
    int rc, found = 0;

    if ((n && !ret_each) || !is_valid(&b))
        return -EINVAL;
    if (store->ext.get_chunks && !store->ext.get_parts)
        rc = get_by_windows(&b, &w, ret_each);
    else
        rc = get_singly(&b, &w, ret_each);
    for (size_t i = w.i; i < n; i++)
        ret_each[i] = rc;
    for (size_t i = 0; i < n; i++)
        found += ret_each[i] >= 0;
    return found;
}

/* -- put --------------------------------------------------------------------------------------- */

static int put_parts(const struct batch *b, const struct chunk *chunk)
{
    struct kvs_store *store = b->store;
    int rc;

    if (chunk->n_parts == 1 || !store->ext.put_parts)
        return kvs_put_chunk(store, chunk->hash, b->hash_len,
                             chunk->n_parts ? chunk->parts->iov_base : NULL, chunk->len);
    rc = kvs_check_rc(store, "put_parts",
                      store->ext.put_parts(store->backend, chunk->hash, b->hash_len, chunk->parts,
                                           chunk->n_parts),
                      1);
    kvs_note_put(store, rc);
    return rc;
}

/* Each by itself, to a backend that takes parts. */
static int put_singly(const struct batch *b, int *ret_each)
{
    struct walk w = {b, 0, 0};
    struct chunk chunk;
    int result = 0;
    bool wrong;

    while (next(&w, &chunk, &wrong)) {
        int rc = put_parts(b, &chunk);

        if (ret_each)
            ret_each[w.i - 1] = rc;
        if (rc < 0 && result == 0)
            result = rc;
    }
    return result;
}

/* Put a window. @joined: the bytes of its chunks of several parts. */
static int put_window(const struct batch *b, const struct chunk *chunks, size_t n, uint8_t *joined,
                      int *ret_each)
{
    const void *data[BATCH];
    size_t len[BATCH];

    for (size_t i = 0; i < n; i++) {
        len[i] = chunks[i].len;
        data[i] = chunks[i].n_parts == 1 ? chunks[i].parts->iov_base : joined;
        if (chunks[i].n_parts != 1) {
            kvs_parts_gather(chunks[i].parts, chunks[i].n_parts, joined);
            joined += len[i];
        }
    }
    return kvs_put_chunks(b->store, chunks->hash, b->hash_len, n, data, len, ret_each);
}

static int put_by_windows(const struct batch *b, int *ret_each)
{
    struct walk w = {b, 0, 0};
    struct chunk chunks[BATCH];
    int result = 0;
    size_t n;

    while ((n = gather_window(&w, chunks)) > 0) {
        int *each = ret_each ? &ret_each[w.i - n] : NULL, rc;
        uint8_t *joined;
        size_t bytes = 1;

        for (size_t i = 0; i < n; i++)
            bytes += chunks[i].n_parts == 1 ? 0 : chunks[i].len;
        joined = malloc(bytes);
        rc = joined ? put_window(b, chunks, n, joined, each) : -ENOMEM;
        for (size_t i = 0; !joined && each && i < n; i++)
            each[i] = rc;
        free(joined);
        if (rc < 0 && result == 0)
            result = rc;
    }
    return result;
}

int kvs_put_chunks_from(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                        const struct iovec *parts, const uint32_t *n_parts, int *ret_each)
{
    const struct batch b = {store, hashes, hash_len, n, parts, n_parts};

    if (!is_valid(&b))
        return -EINVAL;
    return store->ext.put_parts ? put_singly(&b, ret_each) : put_by_windows(&b, ret_each);
}
