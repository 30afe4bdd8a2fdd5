// SPDX-License-Identifier: Apache-2.0
/* One blob: where it was seen last, then everywhere. */
#include "base/core/clock.h"
#include "store/backend/check.h"
#include "store/backend/parts.h"
#include "store/object/fetch.h"
#include "tiered/store.h"

enum { PASSES = 3 };

/* True for answers that end the search. */
static bool is_final(int rc)
{
    return rc == 0 || rc == -EMSGSIZE || rc == -ECANCELED || rc == -EINVAL || rc == -ECHILD;
}

/* Ask one place of a member: its packs, or single blobs. */
static int ask_packs(struct trd_member *member, struct kvs_store *store, const uint8_t *hash,
                     size_t hash_len, const struct trd_how *how)
{
    void *data;
    size_t len;
    int rc = trd_catalog_get(&member->catalog, store, hash, hash_len, &data, &len);

    return rc == 0 ? how->take(how->arg, data, len) : rc;
}

/* Ask a member. @packs_only: not for single blobs. */
static int ask(kv_store_v1 *self, unsigned i, const uint8_t *hash, size_t hash_len, bool packs_only,
               const struct trd_how *how)
{
    struct trd_member *member = &self->members[i];
    int rc = -ENOENT, packed = -ENOENT;
    struct trd_use use;
    bool of_pack;

    if (!trd_enter(member, &use))
        return -EHOSTDOWN;
    if (trd_may_have_packs(&member->catalog))
        packed = ask_packs(member, use.store, hash, hash_len, how);
    if (KV_LIKELY(!is_final(packed) && !packs_only))
        rc = how->try(use.store, hash, hash_len, how->arg);
    of_pack = rc == -ENOENT && trd_unanswered(packed) && !kvs_is_outage(packed);
    if (rc == -ENOENT)
        rc = packed;
    /* one bad pack says nothing about the member, unless single blobs can't be had, either */
    trd_leave(member, use, of_pack ? 0 : rc);
    if (rc == 0)
        trd_places_note(self->places, hash, hash_len, i);
    return rc;
}

/* Ask all members once. Returns 1 when all lack the blob. */
static int pass(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int but,
                const struct trd_how *how)
{
    bool failed = false, bad = false;

    for (size_t i = 0; i < self->n_members; i++) {
        int rc = ask(self, (unsigned)i, hash, hash_len, (int)i == but, how);

        if (is_final(rc))
            return rc;
        failed |= trd_unanswered(rc);
        bad |= rc == -EBADMSG;
    }
    return failed ? -EIO : bad ? -EBADMSG : 1;
}

int trd_packs_look_again(kv_store_v1 *self, bool *ret_changed)
{
    for (size_t i = 0; i < self->n_members; i++) {
        struct trd_member *member = &self->members[i];
        struct trd_use use;

        if (!trd_enter(member, &use) ||
            trd_leave(member, use,
                      trd_catalog_read(&member->catalog, use.store, self->linger_ns, ret_changed)) <
                0 ||
            trd_is_unsure(&member->catalog))
            return -EIO;
    }
    return 0;
}

int trd_find(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int but,
             const struct trd_how *how)
{
    int place = trd_places_find(self->places, hash, hash_len), rc, miss = -ENOENT;

    if (place >= 0 && place < (int)self->n_members && place != but) {
        rc = ask(self, (unsigned)place, hash, hash_len, false, how);
        if (KV_LIKELY(is_final(rc)))
            return rc;
        miss = rc == -EBADMSG ? rc : miss; /* the member has set it aside: it lacks it now */
    }
    for (int i = 0; i < PASSES; i++) {
        uint64_t begin = kv_now_ns();
        bool changed = false;

        rc = pass(self, hash, hash_len, but, how);
        if (rc <= 0 && rc != -EBADMSG)
            return rc;
        miss = rc == -EBADMSG ? rc : miss;
        if (kv_now_ns() - begin > self->linger_ns)
            continue; /* a blob may have moved meanwhile */
        rc = trd_packs_look_again(self, &changed);
        if (rc < 0 || !changed)
            return rc < 0 ? rc : miss;
    } /* the answers took too long each time, or packs have changed each time */
    return -EIO;
}

static int count_get(kv_store_v1 *self, int rc)
{
    atomic_fetch_add_explicit(&self->gets, 1, memory_order_relaxed);
    if (rc == -ENOENT)
        atomic_fetch_add_explicit(&self->get_misses, 1, memory_order_relaxed);
    if (rc == -EBADMSG)
        atomic_fetch_add_explicit(&self->bad_chunks, 1, memory_order_relaxed);
    return trd_done(self, rc);
}

/* -- whole ------------------------------------------------------------------------------------- */

struct value {
    void *data;
    size_t len;
};

static int get_from(struct kvs_store *store, const uint8_t *hash, size_t hash_len, void *arg)
{
    struct value *value = arg;

    return trd_get_chunk(store, hash, hash_len, &value->data, &value->len);
}

static int take_value(void *arg, void *data, size_t len)
{
    *(struct value *)arg = (struct value){data, len};
    return 0;
}

int trd_get_elsewhere(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int but, void **ret,
                      size_t *ret_len)
{
    struct value value;
    const struct trd_how how = {get_from, take_value, &value};
    int rc = trd_find(self, hash, hash_len, but, &how);

    if (rc == 0) {
        *ret = value.data;
        *ret_len = value.len;
    }
    return rc;
}

int trd_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
            size_t *out_len)
{
    struct value value;
    const struct trd_how how = {get_from, take_value, &value};
    int rc = count_get(self, trd_find(self, hash, hash_len, -1, &how));

    if (rc == 0) {
        *out_data = value.data;
        *out_len = value.len;
    }
    return rc;
}

/* -- in pieces --------------------------------------------------------------------------------- */

struct stream {
    uint8_t *buf;
    size_t room;
    kv_store_piece_fn each;
    void *arg;
    int stopped; /* return value of each(), when not 0 */
};

static int give(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct stream *s = arg;

    return s->stopped = s->each(s->arg, offset, piece, len);
}

static int take_pieces(void *arg, void *data, size_t len)
{
    struct stream *s = arg;

    give(s, 0, data, len);
    free(data);
    return s->stopped ? -ECANCELED : 0;
}

static int stream_from(struct kvs_store *store, const uint8_t *hash, size_t hash_len, void *arg)
{
    struct stream *s = arg;
    struct value value;
    int rc;

    if (store->ext.stream_chunk) {
        rc = kvs_stream_chunk(store, hash, hash_len, s->buf, s->room, give, s);
        return s->stopped ? -ECANCELED : rc;
    }
    rc = trd_get_chunk(store, hash, hash_len, &value.data, &value.len);
    if (rc)
        return rc;
    return take_pieces(s, value.data, value.len);
}

int trd_stream(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf, size_t room,
               kv_store_piece_fn each, void *arg)
{
    struct stream s = {buf, room, each, arg, 0};
    const struct trd_how how = {stream_from, take_pieces, &s};
    int rc;

    if (!buf || !room || !each)
        return -EINVAL;
    rc = trd_find(self, hash, hash_len, -1, &how);
    return s.stopped ? s.stopped : count_get(self, rc);
}

/* -- into parts -------------------------------------------------------------------------------- */

struct into {
    const struct iovec *parts;
    size_t n_parts, room, len;
};

static int take_into(void *arg, void *data, size_t len)
{
    struct into *to = arg;
    struct kvs_cursor at = {0};
    int rc = len > to->room ? -EMSGSIZE : 0;

    to->len = len;
    if (!rc)
        kvs_parts_scatter(to->parts, to->n_parts, &at, data, len);
    free(data);
    return rc;
}

static int read_into(struct kvs_store *store, const uint8_t *hash, size_t hash_len, void *arg)
{
    struct into *to = arg;
    struct value value;
    int rc;

    if (store->ext.get_parts) {
        rc = store->ext.get_parts(store->backend, hash, hash_len, to->parts, to->n_parts, &to->len);
        return kvs_check_rc(store, "get_parts", rc, 0);
    }
    rc = trd_get_chunk(store, hash, hash_len, &value.data, &value.len);
    return rc ? rc : take_into(to, value.data, value.len);
}

int trd_get_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                  const struct iovec *parts, size_t n_parts, size_t *out_len)
{
    struct into to = {.parts = parts, .n_parts = n_parts};
    const struct trd_how how = {read_into, take_into, &to};
    int rc;

    if (!out_len || (!parts && n_parts) || !kvs_parts_len(parts, n_parts, SIZE_MAX / 2, &to.room))
        return -EINVAL;
    rc = count_get(self, trd_find(self, hash, hash_len, -1, &how));
    if (rc == 0 || rc == -EMSGSIZE)
        *out_len = to.len;
    return rc;
}
