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

/* Get the single blobs among @n that @state doesn't have. */
static int get_singles(struct kvs_store *store, const uint8_t *hashes, size_t hash_len, size_t n,
                       const uint8_t *state, struct blobs *ret)
{
    uint8_t *keys = malloc(n * hash_len + 1);
    void **data = calloc(n + 1, sizeof(*data));
    size_t *len = calloc(n + 1, sizeof(*len)), m = 0;
    int rc = keys && data && len ? 0 : -ENOMEM;

    for (size_t i = 0; rc == 0 && i < n; i++)
        if (state[i] != KVS_THERE)
            memcpy(keys + m++ * hash_len, hashes + i * hash_len, hash_len);
    if (rc == 0 && m)
        rc = KV_MIN(kvs_get_chunks(store, keys, hash_len, m, data, len), 0);
    m = 0;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (state[i] == KVS_THERE)
            continue;
        ret->data[i] = data[m];
        ret->len[i] = len[m++];
        if (!ret->data[i] && state[i] == KVS_UNKNOWN)
            ret->len[i] = KVS_LEN_UNKNOWN;
        else if (!ret->data[i] && state[i] == KVS_DAMAGED)
            ret->len[i] = KVS_LEN_BAD;
    }
    free(keys);
    free(data);
    free(len);
    return rc;
}

/* Get blobs from a member's packs, and the others as single ones. */
static int get_packed(struct trd_place place, const void *hashes, size_t hash_len, size_t n,
                      struct blobs *ret)
{
    uint8_t *state = malloc(n + 1);
    int rc = state ? trd_catalog_get_many(place.packs, place.store, hashes, hash_len, n, ret->data,
                                          ret->len, state)
                   : -ENOMEM;

    for (size_t i = 0; rc == 0 && i < n; i++)
        if (state[i] == KVS_MISSING && trd_is_unsure(place.packs))
            state[i] = KVS_UNKNOWN; /* the pack that can't be read may have it */
    if (rc == 0)
        rc = get_singles(place.store, hashes, hash_len, n, state, ret);
    free(state);
    return rc;
}

static int get_blobs(struct trd_place place, const void *hashes, size_t hash_len, size_t n,
                     struct blobs *ret)
{
    *ret = (struct blobs){
        .data = calloc(n + 1, sizeof(*ret->data)), .len = calloc(n + 1, sizeof(*ret->len)), .n = n};
    if (!ret->data || !ret->len)
        return -ENOMEM;
    if (place.packs && trd_may_have_packs(place.packs))
        return get_packed(place, hashes, hash_len, n, ret);
    return KV_MIN(kvs_get_chunks(place.store, hashes, hash_len, n, ret->data, ret->len), 0);
}

static int missing(const struct blobs *blobs, size_t i)
{
    return blobs->data[i]                     ? 0
           : blobs->len[i] == KVS_LEN_BAD     ? -EBADMSG
           : blobs->len[i] == KVS_LEN_UNKNOWN ? -EIO
                                              : -ENOENT;
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

int trd_move_copy(struct trd_place from, struct trd_place to, const void *hashes, size_t hash_len,
                  size_t n, int *ret_each)
{
    struct blobs source, copy = {0};
    int rc = get_blobs(from, hashes, hash_len, n, &source), copied = 0;

    if (rc == 0)
        rc = put_blobs(to.store, hashes, hash_len, &source, ret_each);
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

/* Remove a blob with these bytes: the single one, and those in packs. 1: one was there; 0; an error. */
static int remove_blob(struct kvs_store *from, const struct trd_packs *packs, const uint8_t *hash,
                       size_t hash_len, const void *data, size_t len, bool *noted)
{
    int rc = kvs_delete_chunk_if(from, hash, hash_len, data, len), n;

    if (rc < 0 || !packs)
        return rc;
    n = trd_packs_delete(packs, from, hash, hash_len, data, len);
    *noted |= n > 0;
    return n < 0 ? n : rc == 1 || n > 0;
}

int trd_move_remove(struct trd_place from, struct trd_place to, const void *hashes, size_t hash_len,
                    size_t n, int *ret_each, trd_may_fn may, void *arg)
{
    struct trd_packs *packs = from.packs ? trd_catalog_hold(from.packs) : NULL;
    bool stopped = false, noted = false;
    struct blobs copy;
    int rc = get_blobs(to, hashes, hash_len, n, &copy), removed = 0;

    for (size_t i = 0; rc == 0 && i < n; i++) {
        ret_each[i] = missing(&copy, i);
        stopped = stopped || (may && !may(arg));
        if (stopped)
            ret_each[i] = -ECANCELED;
        else if (ret_each[i] == 0)
            ret_each[i] = remove_blob(from.store, packs, (const uint8_t *)hashes + i * hash_len,
                                      hash_len, copy.data[i], copy.len[i], &noted);
        removed += ret_each[i] == 1;
    }
    if (noted)
        rc = trd_write_mark(from.store);
    trd_packs_release(packs);
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
