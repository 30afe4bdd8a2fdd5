// SPDX-License-Identifier: Apache-2.0
#include "tiered/pack.h"

#include "base/core/clock.h"
#include "base/core/log.h"

enum {
    AT_ONCE = 64,   /* blobs read by one call */
    RESUME_S = 3600 /* a younger pack counts as one of this work */
};

/* Body of a pack's manifest: with bytes, so that a collector that lacks the notes about it deletes nothing. */
#define BODY "KV-TIERED PACK\n"

int trd_packing_init(struct trd_packing *p, struct kvs_store *from, struct kvs_store *to)
{
    *p = (struct trd_packing){.from = from,
                              .to = to,
                              .min_bytes = TRD_PACK_MIN_BYTES,
                              .max_bytes = TRD_PACK_MAX_BYTES,
                              .max_blobs = TRD_PACKED_MAX};
    p->catalog = &p->own;
    trd_catalog_init(&p->own);
    return to->ext.get_ranges && to->ext.list_manifests && to->ext.flush && to->ext.delete_chunk
               ? 0
               : -ENOTSUP;
}

void trd_packing_fini(struct trd_packing *p)
{
    trd_catalog_fini(&p->own);
}

static void step(struct trd_packing *p, enum trd_pack_step at)
{
    if (p->step)
        p->step(p->arg, at);
}

static bool may(const struct trd_packing *p)
{
    return !p->may || p->may(p->arg);
}

int trd_packing_wait(const struct trd_packing *p, uint64_t ns)
{
    struct timespec left = kv_timespec(ns);

    if (p->wait)
        return p->wait(p->arg, ns) ? 0 : -ECANCELED;
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
    return 0;
}

static uint64_t now_s(void)
{
    return kv_wall_ns() / KV_NS_PER_S;
}

/* -- one pack ---------------------------------------------------------------------------------- */

/* Read the pack back, and compare. */
static int verify(struct trd_packing *p, const uint8_t key[TRD_PACK_KEY],
                  const struct kv_buf *bytes)
{
    uint8_t *buf = malloc(KV_MIN(bytes->len, (size_t)TRD_PACK_READ));
    struct iovec part = {.iov_base = buf};
    kv_store_range range = {.hash = key, .hash_len = TRD_PACK_KEY, .parts = &part, .n_parts = 1};
    int rc = buf ? 0 : -ENOMEM;

    for (size_t at = 0; at < bytes->len && rc == 0; at += range.len) {
        range.offset = at;
        range.len = part.iov_len = KV_MIN(bytes->len - at, (size_t)TRD_PACK_READ);
        rc = kvs_get_ranges(p->to, &range, 1);
        rc = rc < 0 ? rc : range.rc;
        if (rc == 0 && memcmp(buf, bytes->data + at, range.len) != 0)
            rc = -EBADMSG;
    }
    free(buf);
    return rc;
}

static int publish(struct trd_packing *p, const struct trd_pack_builder *b)
{
    uint8_t key[TRD_PACK_KEY];
    char name[TRD_PACK_NAME];
    int rc;

    trd_pack_key(b->name.id, key);
    trd_pack_write_name(&b->name, name);
    rc = kvs_put_chunk(p->to, key, sizeof(key), b->bytes.data, b->bytes.len);
    rc = rc < 0 ? rc : kvs_flush(p->to);
    if (rc == 0) {
        step(p, TRD_PACK_WRITTEN);
        rc = verify(p, key, &b->bytes);
    }
    if (rc < 0) { /* nothing names it: a collection removes it, if not this */
        kv_log_error("tiered", "a pack isn't published: it couldn't be written and read back",
                     "store=%s pack=%s error=\"%s\"", p->to->label, name, strerror(-rc));
        kvs_delete_chunk(p->to, key, sizeof(key));
        return rc == -EBADMSG ? -EIO : rc;
    }
    step(p, TRD_PACK_VERIFIED);
    rc = kvs_put_manifest(p->to, name, BODY, strlen(BODY));
    if (rc == 0) {
        step(p, TRD_PACK_PUBLISHED);
        rc = trd_write_mark(p->to);
    }
    if (rc == 0)
        step(p, TRD_PACK_TOLD);
    return rc;
}

int trd_pack_publish(struct trd_packing *p, struct trd_filling *filling)
{
    int rc = trd_pack_end(&filling->builder, KV_MAX(now_s(), filling->created_s));

    if (rc == 0)
        rc = publish(p, &filling->builder);
    if (rc == 0) {
        p->n_packs++;
        p->n_bytes += filling->bytes;
    }
    trd_pack_builder_fini(&filling->builder);
    filling->bytes = filling->created_s = 0;
    return rc == 0 ? trd_pack_begin(&filling->builder) : rc;
}

int trd_pack_remove(struct trd_packing *p, const struct trd_pack *pack)
{
    uint8_t key[TRD_PACK_KEY];
    char name[TRD_PACK_NAME];
    int rc;

    if (!may(p))
        return -ECANCELED;
    trd_pack_key(pack->name.id, key);
    trd_pack_write_name(&pack->name, name);
    rc = kvs_delete_manifest(p->to, name);
    if (rc < 0)
        return rc;
    step(p, TRD_PACK_REMOVED);
    rc = kvs_delete_chunk(p->to, key, sizeof(key));
    for (uint32_t i = 0; i < pack->index.n && rc == 0; i++)
        if (atomic_load(&pack->gone[i])) {
            trd_gone_write_name(pack->name.id, i, name);
            rc = kvs_delete_manifest(p->to, name);
        }
    if (rc == 0)
        step(p, TRD_PACK_REMOVED);
    return rc;
}

/* -- write ------------------------------------------------------------------------------------- */

/* Work on one list of blobs. */
struct work {
    struct trd_packing *p;
    const uint8_t *hashes;
    size_t hash_len, n;
    int *each;
    struct trd_packs *packs; /* that are there already; NULL: none */
    struct trd_filling filling;
    size_t *in, n_in;  /* blobs in the pack that is being filled */
    uint64_t n_packed; /* in all packs of the member */
    int written;
    bool resumed; /* a pack of before has some of them, and may not have been told */
};

static const uint8_t *key_of(const struct work *w, size_t i)
{
    return w->hashes + i * w->hash_len;
}

/* True when a pack of this work, or of one that was cut off, has the blob. Older packs don't count: a
 * collection may be about to rewrite them. */
static bool find_young(const struct trd_packs *packs, const void *hash, size_t hash_len,
                       struct trd_packed *ret)
{
    size_t at = 0;

    while (packs && trd_packs_next(packs, hash, hash_len, &at, ret)) {
        uint64_t created = ret->pack->index.created_s, now = now_s();

        if (created <= now && now - created < RESUME_S)
            return true;
    }
    return false;
}

/* Finish the pack that is being filled. */
static int finish(struct work *w)
{
    int rc;

    if (w->n_in == 0)
        return 0;
    w->n_packed += w->n_in;
    rc = w->n_packed > w->p->max_blobs ? -EFBIG : trd_pack_publish(w->p, &w->filling);
    for (size_t i = 0; i < w->n_in; i++)
        w->each[w->in[i]] = rc == 0 ? 0 : -EIO;
    if (rc == 0)
        w->written += (int)w->n_in;
    w->n_in = 0;
    return rc;
}

/* Add a blob, and begin another pack first where this one has no room. */
static int add(struct work *w, size_t i, const void *data, size_t len)
{
    int rc = 0;

    if (len > TRD_PACK_BLOB_MAX) {
        w->each[i] = -EMSGSIZE;
        return 0;
    }
    if (w->filling.bytes + len > w->p->max_bytes ||
        trd_pack_is_full(&w->filling.builder, w->hash_len))
        rc = finish(w);
    if (rc < 0)
        return rc;
    trd_pack_add(&w->filling.builder, key_of(w, i), w->hash_len, data, len);
    w->filling.bytes += len;
    w->in[w->n_in++] = i;
    return w->filling.builder.bytes.error || w->filling.builder.entries.error ? -ENOMEM : 0;
}

/* Read the blobs of @at, at most AT_ONCE, and add them. */
static int add_some(struct work *w, const size_t *at, size_t n)
{
    uint8_t keys[AT_ONCE * KVS_HASH_MAX] = {0};
    void *data[AT_ONCE] = {NULL};
    size_t len[AT_ONCE];
    int rc;

    for (size_t i = 0; i < n; i++)
        memcpy(keys + i * w->hash_len, key_of(w, at[i]), w->hash_len);
    rc = kvs_get_chunks(w->p->from, keys, w->hash_len, n, data, len);
    for (size_t i = 0; i < n; i++) {
        if (rc >= 0 && data[i])
            rc = KV_MIN(add(w, at[i], data[i], len[i]), 0);
        else if (rc >= 0)
            w->each[at[i]] = len[i] == KVS_LEN_BAD ? -EBADMSG : -ENOENT;
        free(data[i]);
    }
    return KV_MIN(rc, 0);
}

static int write_all(struct work *w)
{
    size_t at[AT_ONCE], n = 0;
    struct trd_packed place;
    int rc = 0;

    for (size_t i = 0; i < w->n && rc == 0; i++) {
        if (trd_is_pack_key(key_of(w, i), w->hash_len)) {
            w->each[i] = -ENOENT;
        } else if (find_young(w->packs, key_of(w, i), w->hash_len, &place)) {
            w->each[i] = 0;
            w->written++;
            w->resumed = true;
        } else {
            at[n++] = i;
        }
        if (n == AT_ONCE) {
            rc = add_some(w, at, n);
            n = 0;
        }
    }
    if (rc == 0 && n)
        rc = add_some(w, at, n);
    if (rc == 0 && w->filling.bytes >= w->p->min_bytes)
        return finish(w);
    for (size_t i = 0; rc == 0 && i < w->n_in; i++)
        w->each[w->in[i]] = -EAGAIN;
    return rc;
}

/* Read the packs that are there, also those of a program that died before it wrote the first mark. */
static int read_catalog(struct trd_packing *p)
{
    int rc = trd_catalog_read(p->catalog, p->to, 0, NULL);

    if (rc == 0 && !atomic_load(&p->catalog->has_mark)) {
        rc = trd_write_mark(p->to);
        rc = rc < 0 ? rc : trd_catalog_read(p->catalog, p->to, 0, NULL);
    }
    return rc;
}

int trd_pack_write(struct trd_packing *p, const void *hashes, size_t hash_len, size_t n,
                   int *ret_each)
{
    struct work w = {.p = p, .hashes = hashes, .hash_len = hash_len, .n = n, .each = ret_each};
    int rc;

    if (n && (!hashes || hash_len == 0 || hash_len > KVS_HASH_MAX))
        return -EINVAL;
    for (size_t i = 0; i < n; i++)
        ret_each[i] = -EIO;
    p->min_bytes = p->min_bytes ? p->min_bytes : TRD_PACK_MIN_BYTES;
    p->max_bytes = p->max_bytes ? KV_MIN(p->max_bytes, TRD_PACK_MAX_BYTES) : TRD_PACK_MAX_BYTES;
    rc = read_catalog(p);
    w.in = calloc(n + 1, sizeof(*w.in));
    if (rc == 0)
        rc = w.in ? trd_pack_begin(&w.filling.builder) : -ENOMEM;
    if (rc == 0) {
        w.packs = trd_catalog_hold(p->catalog);
        w.n_packed = w.packs ? w.packs->n_entries : 0;
        rc = write_all(&w);
        trd_packs_release(w.packs);
    }
    if (rc == 0 && w.resumed)
        rc = trd_write_mark(p->to);
    trd_pack_builder_fini(&w.filling.builder);
    free(w.in);
    return rc < 0 ? rc : w.written;
}

/* -- drop -------------------------------------------------------------------------------------- */

/* Remove the single blobs of @at whose bytes @reads has. */
static int drop_some(struct trd_packing *p, const uint8_t *hashes, size_t hash_len,
                     const size_t *at, struct trd_packed_read *reads, size_t n, int *ret_each)
{
    int rc = trd_packs_get(p->to, reads, n), removed = 0;

    for (size_t i = 0; rc == 0 && i < n; i++) {
        struct trd_pack_index *index = &reads[i].from.pack->index;
        int *each = &ret_each[at[i]];

        *each = reads[i].rc;
        if (*each == 0 && !may(p))
            rc = *each = -ECANCELED;
        if (*each == 0)
            *each = kvs_delete_chunk_if(p->from, hashes + at[i] * hash_len, hash_len, reads[i].data,
                                        index->entries[reads[i].from.entry].len);
        if (*each == 1) {
            removed++;
            step(p, TRD_PACK_DROPPED);
        }
    }
    for (size_t i = 0; i < n; i++)
        free(reads[i].data);
    return rc < 0 ? rc : removed;
}

int trd_pack_drop(struct trd_packing *p, const void *hashes, size_t hash_len, size_t n,
                  int *ret_each)
{
    struct trd_packed_read reads[AT_ONCE];
    struct trd_packs *packs;
    size_t at[AT_ONCE], m = 0;
    int rc, removed = 0;

    if (n && (!hashes || hash_len == 0 || hash_len > KVS_HASH_MAX))
        return -EINVAL;
    rc = trd_catalog_read(p->catalog, p->to, 0, NULL);
    packs = rc == 0 ? trd_catalog_hold(p->catalog) : NULL;
    for (size_t i = 0; i < n && rc >= 0; i++) {
        const uint8_t *hash = (const uint8_t *)hashes + i * hash_len;

        ret_each[i] = -ENOENT;
        if (find_young(packs, hash, hash_len, &reads[m].from))
            at[m++] = i;
        if (m == AT_ONCE || (m && i + 1 == n)) {
            rc = drop_some(p, hashes, hash_len, at, reads, m, ret_each);
            removed += KV_MAX(rc, 0);
            m = 0;
        }
    }
    trd_packs_release(packs);
    return rc < 0 ? rc : removed;
}
