// SPDX-License-Identifier: Apache-2.0
/* Puts go to the first member of the list that takes them; deletions to all that may have the blob. */
#include "store/backend/check.h"
#include "tiered/store.h"

/* True when another member may take what this one refused. */
static bool passes_on(int rc)
{
    return kv_breaker_counts(rc) || rc == -ENOSPC || rc == -EDQUOT || rc == -EROFS;
}

/* A member has the chunk now, until its publication in its memory or on its disk. */
static void note(kv_store_v1 *self, unsigned member, const uint8_t *hash, size_t hash_len, int rc)
{
    trd_note_put(&self->members[member], hash, hash_len);
    trd_places_note(self->places, hash, hash_len, member);
    atomic_fetch_add_explicit(rc == 1 ? &self->put_hits : &self->puts, 1, memory_order_relaxed);
}

/* -- one --------------------------------------------------------------------------------------- */

typedef int (*put_fn)(struct kvs_store *store, const uint8_t *hash, size_t hash_len,
                      const void *arg);

/* Keys of packs are the store's own. */
static bool is_own_key(const uint8_t *hashes, size_t hash_len, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (trd_is_pack_key(hashes + i * hash_len, hash_len))
            return true;
    return false;
}

static int put_first(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, put_fn put,
                     const void *arg)
{
    int result = self->config.n_puts ? 0 : -EROFS;

    if (is_own_key(hash, hash_len, 1))
        return trd_done(self, -EINVAL);
    if (!self->ever_put)
        atomic_store_explicit(&self->ever_put, true, memory_order_relaxed);
    for (size_t i = 0; i < self->config.n_puts; i++) {
        unsigned at = self->config.puts[i];
        struct trd_member *member = &self->members[at];
        struct trd_use use;
        int rc = -EHOSTDOWN;

        if (trd_is_full(member))
            rc = -ENOSPC;
        else if (trd_enter(member, &use))
            rc = trd_leave(member, use, put(use.store, hash, hash_len, arg));
        if (rc >= 0)
            note(self, at, hash, hash_len, rc);
        if (rc >= 0 || !passes_on(rc))
            return trd_done(self, rc);
        result = result ? result : rc;
    }
    return trd_done(self, result);
}

struct bytes {
    const uint8_t *data;
    size_t len;
};

static int put_bytes(struct kvs_store *store, const uint8_t *hash, size_t hash_len, const void *arg)
{
    const struct bytes *b = arg;

    return kvs_put_chunk_of_save(store, hash, hash_len, b->data, b->len);
}

int trd_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
            size_t data_len)
{
    const struct bytes b = {data, data_len};

    return put_first(self, hash, hash_len, put_bytes, &b);
}

struct parts {
    const struct iovec *parts;
    size_t n;
};

static int put_parts(struct kvs_store *store, const uint8_t *hash, size_t hash_len, const void *arg)
{
    const struct parts *p = arg;
    uint32_t n = (uint32_t)p->n;
    int rc, each = 0;

    rc = kvs_put_chunks_from(store, hash, hash_len, 1, p->parts, &n, &each);
    return rc < 0 ? rc : each;
}

int trd_put_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                  const struct iovec *parts, size_t n_parts)
{
    const struct parts p = {parts, n_parts};

    if (n_parts > KVS_PARTS_MAX)
        return trd_done(self, -EINVAL);
    return put_first(self, hash, hash_len, put_parts, &p);
}

/* -- many -------------------------------------------------------------------------------------- */

/* Chunks that no member has taken yet. */
struct rest {
    uint8_t *hashes;
    const void **data;
    size_t *len, *at, n;
    int *each;
};

static void free_rest(struct rest *r)
{
    free(r->hashes);
    free(r->data);
    free(r->len);
    free(r->at);
    free(r->each);
}

static int make_rest(struct rest *r, const uint8_t *hashes, size_t hash_len, size_t n,
                     const uint8_t *const *data, const size_t *data_len)
{
    *r = (struct rest){.hashes = malloc(n * hash_len + 1),
                       .data = calloc(n + 1, sizeof(*r->data)),
                       .len = calloc(n + 1, sizeof(*r->len)),
                       .at = calloc(n + 1, sizeof(*r->at)),
                       .each = calloc(n + 1, sizeof(*r->each)),
                       .n = n};
    if (!r->hashes || !r->data || !r->len || !r->at || !r->each)
        return -ENOMEM;
    if (n)
        memcpy(r->hashes, hashes, n * hash_len);
    for (size_t i = 0; i < n; i++) {
        r->data[i] = data[i];
        r->len[i] = data_len[i];
        r->at[i] = i;
        r->each[i] = -EROFS; /* where no member takes puts */
    }
    return 0;
}

/* Note what member @at took, and keep the others. */
static void keep_refused(kv_store_v1 *self, unsigned at, struct rest *r, size_t hash_len,
                         int *ret_each)
{
    size_t left = 0;

    for (size_t i = 0; i < r->n; i++) {
        int rc = r->each[i];

        ret_each[r->at[i]] = rc;
        if (rc >= 0)
            note(self, at, r->hashes + i * hash_len, hash_len, rc);
        if (rc >= 0 || !passes_on(rc))
            continue;
        memmove(r->hashes + left * hash_len, r->hashes + i * hash_len, hash_len);
        r->data[left] = r->data[i];
        r->len[left] = r->len[i];
        r->at[left++] = r->at[i];
    }
    r->n = left;
}

static void put_rest(kv_store_v1 *self, unsigned at, struct rest *r, size_t hash_len, int *ret_each)
{
    struct trd_member *member = &self->members[at];
    struct trd_use use;
    int rc = -EHOSTDOWN;

    if (trd_is_full(member))
        rc = -ENOSPC;
    else if (trd_enter(member, &use)) {
        rc = kvs_put_chunks_of_save(use.store, r->hashes, hash_len, r->n, r->data, r->len, r->each);
        trd_leave(member, use, rc);
        rc = 0; /* each has its own */
    }
    for (size_t i = 0; rc < 0 && i < r->n; i++)
        r->each[i] = rc;
    keep_refused(self, at, r, hash_len, ret_each);
}

int trd_put_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                 const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    struct rest rest;
    int rc = kvs_hashes_ok(hashes, hash_len, n) && !is_own_key(hashes, hash_len, n) ? 0 : -EINVAL;
    int *each = calloc(n + 1, sizeof(*each));

    if (rc == 0)
        rc = make_rest(&rest, hashes, hash_len, n, data, data_len);
    else
        rest = (struct rest){0};
    if (!each)
        rc = -ENOMEM;
    atomic_store_explicit(&self->ever_put, true, memory_order_relaxed);
    for (size_t i = 0; rc == 0 && i < n; i++)
        each[i] = -EROFS;
    for (size_t i = 0; rc == 0 && i < self->config.n_puts && rest.n; i++)
        put_rest(self, self->config.puts[i], &rest, hash_len, each);
    for (size_t i = 0; i < n && (ret_each || rc == 0); i++) {
        if (rc == 0 && each[i] < 0)
            rc = each[i];
        if (ret_each)
            ret_each[i] = each ? each[i] : rc;
    }
    free_rest(&rest);
    free(each);
    return trd_done(self, rc);
}

/* -- what a put turned out to be --------------------------------------------------------------- */

int trd_new_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                   uint8_t *ret_new)
{
    memset(ret_new, 1, n);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *hash = hashes + i * hash_len;
        int at = trd_places_find(self->places, hash, hash_len);
        struct trd_use use;
        uint8_t fresh;

        if (at < 0 || at >= (int)self->n_members || !trd_enter(&self->members[at], &use))
            continue;
        if (trd_leave(&self->members[at], use,
                      kvs_new_chunks(use.store, hash, hash_len, 1, &fresh)) == 0)
            ret_new[i] = fresh; /* from the member's memory: one by one costs nothing */
    }
    return 0;
}

/* -- deletions --------------------------------------------------------------------------------- */

struct deletion {
    const uint8_t *hash;
    size_t hash_len;
    const uint8_t *data; /* NULL: whatever the content */
    size_t len;
};

/* Delete from a member's packs. Returns the number of packs that had it. */
static int delete_packed(struct trd_member *member, struct kvs_store *store,
                         const struct deletion *d)
{
    uint8_t state = KVS_MISSING;
    int rc;

    if (!member->config->read_only)
        return trd_catalog_delete(&member->catalog, store, d->hash, d->hash_len, d->data, d->len);
    rc = trd_catalog_look(&member->catalog, store, 0, d->hash, d->hash_len, 1, &state);
    return rc < 0 ? rc : state == KVS_MISSING ? 0 : -EROFS;
}

/* Delete single blobs from one member. Returns 1 when a conditional deletion removed it. */
static int delete_at(struct trd_member *member, struct kvs_store *store, const struct deletion *d)
{
    uint8_t state = KVS_MISSING;
    int rc = member->config->read_only ? -EROFS
             : d->data ? kvs_delete_chunk_if(store, d->hash, d->hash_len, d->data, d->len)
                       : kvs_delete_chunk(store, d->hash, d->hash_len);
    int look;

    if (rc != -EROFS && rc != -ENOTSUP)
        return rc;
    look = trd_look(store, d->hash, d->hash_len, 1, &state);
    return look < 0 ? look : state == KVS_MISSING ? 0 : rc;
}

static int delete_everywhere(kv_store_v1 *self, const struct deletion *d)
{
    int result = 0, removed = 0;

    for (size_t i = 0; i < self->n_members; i++) {
        struct trd_member *member = &self->members[i];
        struct trd_use use;
        int rc = -EIO, packed;
        bool
            unsure; /* a pack can't be read: it may have the blob, and says nothing of the member */

        if (trd_enter(member, &use)) {
            packed = delete_packed(member, use.store, d);
            unsure = packed == -EIO && trd_is_unsure(&member->catalog);
            rc = packed < 0 && !unsure ? packed : delete_at(member, use.store, d);
            trd_leave(member, use, rc);
            rc = rc >= 0 && unsure ? packed : rc;
            removed |= d->data && packed > 0;
        }
        removed |= rc == 1;
        if (rc < 0 && result == 0)
            result = kv_breaker_counts(rc) ? -EIO : rc;
    }
    trd_places_forget(self->places, d->hash, d->hash_len);
    return trd_done(self, result < 0 ? result : removed);
}

int trd_delete(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    const struct deletion d = {.hash = hash, .hash_len = hash_len};

    return delete_everywhere(self, &d);
}

int trd_delete_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                  size_t len)
{
    const struct deletion d = {hash, hash_len, data ? data : (const uint8_t *)"", len};

    return delete_everywhere(self, &d);
}
