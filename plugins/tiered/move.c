// SPDX-License-Identifier: Apache-2.0
#include "tiered/move.h"

#include "store/backend/store.h"
#include "tiered/catalog.h"
#include "tiered/member.h"

/* Manifest in the target by which copies become durable; its backend notes them for it. */
#define MOVED TRD_OWN_NAMES "moved"

/* Manifest by which a store is told from another. */
#define SELF TRD_OWN_NAMES "self"

/* Blobs of one member. */
struct blobs {
    void **data;
    size_t *len;
    size_t n;
};

static void free_blobs(struct blobs *blobs)
{
    for (size_t i = 0; blobs->data && i < blobs->n; i++)
        free(blobs->data[i]);
    free(blobs->data);
    free(blobs->len);
}

static int get_blobs(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                     struct blobs *ret)
{
    int rc;

    *ret = (struct blobs){
        .data = calloc(n + 1, sizeof(*ret->data)), .len = calloc(n + 1, sizeof(*ret->len)), .n = n};
    if (!ret->data || !ret->len)
        return -ENOMEM;
    rc = kvs_get_chunks(store, hashes, hash_len, n, ret->data, ret->len);
    return KV_MIN(rc, 0);
}

static int missing(const struct blobs *blobs, size_t i)
{
    return blobs->data[i] ? 0 : blobs->len[i] == KVS_LEN_BAD ? -EBADMSG : -ENOENT;
}

static bool same(const struct blobs *a, const struct blobs *b, size_t i)
{
    return a->len[i] == b->len[i] && memcmp(a->data[i], b->data[i], a->len[i]) == 0;
}

/* Put what the source has to the target. ret_each[i] stays the put's answer, 0 or 1. */
static int put_blobs(struct kvs_store *to, const uint8_t *hashes, size_t hash_len,
                     const struct blobs *from, int *ret_each)
{
    for (size_t i = 0, run; i < from->n; i += run) {
        run = 0; /* a run of blobs that the source has goes in one call */
        while (i + run < from->n && from->data[i + run])
            run++;
        if (run)
            kvs_put_chunks(to, hashes + i * hash_len, hash_len, run,
                           (const void *const *)&from->data[i], &from->len[i], &ret_each[i]);
        else
            ret_each[i] = missing(from, i);
        run += !run;
    }
    return kvs_put_manifest(to, MOVED, "", 0);
}

int trd_move_copy(struct kvs_store *from, struct kvs_store *to, const void *hashes, size_t hash_len,
                  size_t n, int *ret_each)
{
    struct blobs source, copy = {0};
    int rc = get_blobs(from, hashes, hash_len, n, &source), copied = 0;

    if (rc == 0)
        rc = put_blobs(to, hashes, hash_len, &source, ret_each);
    if (rc == 0)
        rc = get_blobs(to, hashes, hash_len, n, &copy);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (ret_each[i] < 0)
            continue;
        if (copy.data[i] && same(&source, &copy, i))
            ret_each[i] = 0;
        else
            ret_each[i] = copy.data[i] && ret_each[i] == 1 ? -EEXIST : -EIO;
        copied += ret_each[i] == 0;
    }
    free_blobs(&source);
    free_blobs(&copy);
    return rc < 0 ? rc : copied;
}

int trd_move_remove(struct kvs_store *from, struct kvs_store *to, const void *hashes,
                    size_t hash_len, size_t n, int *ret_each, trd_may_fn may, void *arg)
{
    struct blobs copy;
    int rc = get_blobs(to, hashes, hash_len, n, &copy), removed = 0;
    bool stopped = false;

    for (size_t i = 0; rc == 0 && i < n; i++) {
        const uint8_t *hash = (const uint8_t *)hashes + i * hash_len;

        ret_each[i] = missing(&copy, i);
        stopped = stopped || (may && !may(arg));
        if (stopped)
            ret_each[i] = -ECANCELED;
        else if (ret_each[i] == 0)
            ret_each[i] = kvs_delete_chunk_if(from, hash, hash_len, copy.data[i], copy.len[i]);
        removed += ret_each[i] == 1;
    }
    free_blobs(&copy);
    return rc < 0 ? rc : removed;
}

int trd_is_same_store(struct kvs_store *a, struct kvs_store *b)
{
    void *ours = NULL, *theirs = NULL;
    size_t our_len = 0, their_len = 0;
    int rc = trd_write_random(a, SELF);

    if (rc < 0)
        return rc;
    rc = kvs_get_manifest(a, SELF, &ours, &our_len);
    if (rc == 0)
        rc = kvs_get_manifest(b, SELF, &theirs, &their_len);
    if (rc == 0)
        rc = our_len == their_len && memcmp(ours, theirs, our_len) == 0;
    free(ours);
    free(theirs);
    kvs_delete_manifest(a, SELF);
    return rc == -ENOENT ? 0 : rc;
}
