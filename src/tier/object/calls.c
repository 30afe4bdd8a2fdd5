// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of a batch into the store, a slice of its blocks at a time. Keys and bytes are copied, the
 * call uses the copies, and its results are verified before they are copied out.
 *
 * While a slice is copied, for milliseconds, no other thread ends the batch.
 */
#include "base/core/error.h"
#include "store/backend/store.h"
#include "tier/object/impl.h"
#include "tier/transfer/transfer.h"

/* Number of single calls of a slice that may fail before the rest is skipped: each call to an
 * unreachable store costs its timeout. */
enum { MAX_FAILURES = 3, MAX_DELETES = 32 };

static void note(struct kvbm_object_notes *notes, const uint8_t key[KVBM_OBJECT_CHUNK_KEY])
{
    uint32_t at = notes->n;

    if (at >= KVBM_OBJECT_NOTES)
        return;
    memcpy(notes->keys[at], key, KVBM_OBJECT_CHUNK_KEY);
    notes->n = at + 1;
}

static void name_slice(struct kvbm_object_worker *w, const struct kvbm_object_io *ios, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        kvbm_object_chunk_key(&w->object->format, ios[i].group, ios[i].key, w->keys[i]);
}

/* Judge the store by a slice: only one in which every call failed counts for the breaker. */
static int judge(struct kvbm_object_worker *w, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!kv_breaker_counts(w->rc[i]))
            return 0;
    w->trouble = w->rc[0];
    return w->rc[0];
}

static bool give_up(const struct kvbm_object_worker *w, int rc, int *failures)
{
    if (atomic_load_explicit(&w->abandoned, memory_order_relaxed))
        return true;
    return kv_breaker_counts(rc) && (rc != -EIO || ++*failures >= MAX_FAILURES);
}

static int status_of(int rc)
{
    /* the caller gives these values another meaning */
    return rc == -EINPROGRESS || rc > 0 ? -EIO : rc;
}

/* Make room in the worker's buffer. The buffer is kept, because the kernel would clear the pages of
 * a new one. */
static int make_room(struct kvbm_object_worker *w, size_t bytes)
{
    if (bytes <= w->value_bytes)
        return 0;
    free(KV_STEAL(w->value));
    w->value_bytes = 0;
    w->value = malloc(bytes);
    if (!w->value)
        return -ENOMEM;
    w->value_bytes = bytes;
    return 0;
}

/* -- get and exists ---------------------------------------------------------------------------- */

static void fetch_each(struct kvbm_object_worker *w, uint32_t n)
{
    struct kvs_store *store = w->handle->store;
    int rc = 0, failures = 0;
    bool stop = false;

    kvs_prefetch(store, w->keys, KVBM_OBJECT_CHUNK_KEY, n);
    for (uint32_t i = 0; i < n; i++) {
        if (!stop) {
            rc = kvs_get_chunk(store, w->keys[i], KVBM_OBJECT_CHUNK_KEY, &w->data[i], &w->len[i]);
            stop = give_up(w, rc, &failures);
        }
        w->rc[i] = rc;
        if (rc)
            w->data[i] = NULL;
    }
}

static void fetch(struct kvbm_object_worker *w, uint32_t n)
{
    const kv_store_ext *ext = w->handle->ext;
    int rc;

    memset(w->data, 0, sizeof(w->data));
    if (!ext || !ext->get_chunks) {
        fetch_each(w, n);
        return;
    }
    rc = kvs_get_chunks_each(w->handle->store, w->keys, KVBM_OBJECT_CHUNK_KEY, n, w->data, w->len);
    if (rc == -EIO && n > 1) { /* a block that can't be read must not fail the others */
        fetch_each(w, n);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        w->rc[i] = rc < 0                         ? rc
                   : w->data[i]                   ? 0
                   : w->len[i] == KVS_LEN_BAD     ? -EBADMSG
                   : w->len[i] == KVS_LEN_UNKNOWN ? -EIO
                                                  : -ENOENT;
}

/* Free a slice's values, but keep the one at the highest address until the next slice has its
 * values. If all were freed, the allocator would return the pages to the kernel (glibc trims the
 * top of its heap), which would clear them again. That cost more than reading, verifying and
 * copying the bytes. */
static void drop(struct kvbm_object_worker *w, uint32_t n)
{
    uint32_t top = n;

    for (uint32_t i = 0; i < n; i++)
        if (w->data[i] && (top == n || (uintptr_t)w->data[i] > (uintptr_t)w->data[top]))
            top = i;
    if (top < n) {
        void *kept = w->kept;

        w->kept = w->data[top];
        w->data[top] = kept;
    }
    for (uint32_t i = 0; i < n; i++)
        free(KV_STEAL(w->data[i]));
}

/* Verify a value, then copy its block to the caller's memory (NULL: nowhere). */
static void deliver(struct kvbm_object_worker *w, uint32_t i, struct kvbm_object_io *io, void *to)
{
    const struct kvbm_object_format *f = &w->object->format;
    const void *block;

    io->status = status_of(w->rc[i]);
    if (io->status < 0)
        return;
    block = kvbm_object_unseal(f, io->group, io->key, w->data[i], w->len[i]);
    if (block && to)
        tier_copy(to, block, f->block_bytes);
    io->status = block ? 0 : -EBADMSG;
    note(block ? &w->hits : &w->bad, w->keys[i]);
}

/* -- get in pieces ----------------------------------------------------------------------------- */

/* A value arriving in pieces: each piece is summed and copied while it is in the CPU's cache. */
struct incoming {
    struct kvbm_object_worker *w;
    struct kvbm_object_opening value;
    const struct kvbm_object_io *io;
    int ends; /* status that the batch ends with; 0: continue */
};

static void begin_value(struct incoming *in)
{
    kvbm_object_open_value(&in->value, &in->w->object->format, in->io->group, in->io->key,
                           in->io->data);
}

/* Take a piece, between two parts of the store's call, while no other thread may end the batch.
 * Pieces of a wrong value are ignored but accepted: only at the value's end does the store know
 * that its own bytes are damaged and set them aside. */
static int on_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct incoming *in = arg;

    if (!kvbm_object_leave(in->w)) {
        in->ends = -ETIMEDOUT;
        return in->ends;
    }
    if (offset == 0)
        begin_value(in);
    kvbm_object_open_piece(&in->value, piece, len);
    in->ends = kvbm_object_enter(in->w);
    return in->ends;
}

/* Stream one block and set its status. Returns the store's result. */
static int stream(struct kvbm_object_worker *w, struct incoming *in, struct kvbm_object_io *io,
                  const uint8_t *key)
{
    bool whole;
    int rc;

    rc = kvs_stream_chunk(w->handle->store, key, KVBM_OBJECT_CHUNK_KEY, w->value, KVBM_OBJECT_PIECE,
                          on_piece, in);
    if (!kvbm_object_leave(w))
        in->ends = -ETIMEDOUT;
    if (in->ends < 0)
        return rc;
    whole = rc == 0 && kvbm_object_value_whole(&in->value);
    io->status = whole ? 0 : rc < 0 ? status_of(rc) : -EBADMSG;
    if (whole)
        note(&w->hits, key);
    else if (rc == 0)
        note(&w->bad, key);
    return rc;
}

static int stream_slice(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n)
{
    struct incoming in = {.w = w};
    int rc = make_room(w, KVBM_OBJECT_PIECE), failures = 0;
    bool stop = false;

    for (uint32_t i = 0; i < n && rc >= 0; i++) {
        if (!stop) {
            in.io = &ios[i];
            begin_value(&in); /* done before the call, as the caller owns the block's key */
            rc = kvbm_object_enter(w);
            if (rc < 0)
                break;
            w->rc[i] = stream(w, &in, &ios[i], w->keys[i]);
            rc = in.ends;
            stop = give_up(w, w->rc[i], &failures);
        } else {
            w->rc[i] = w->rc[i - 1];
            ios[i].status = status_of(w->rc[i]);
        }
    }
    return rc < 0 ? rc : judge(w, n);
}

/* -- get and exists, a slice ------------------------------------------------------------------- */

static int get_slice(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n,
                     bool copy)
{
    const kv_store_ext *ext = w->handle->ext;
    int rc;

    if (copy && ext && ext->stream_chunk)
        return stream_slice(w, ios, n);
    rc = kvbm_object_enter(w);
    if (rc < 0)
        return rc;
    fetch(w, n);
    if (kvbm_object_leave(w)) {
        rc = judge(w, n);
        for (uint32_t i = 0; i < n; i++)
            deliver(w, i, &ios[i], copy ? ios[i].data : NULL);
    } else {
        rc = -ETIMEDOUT;
    }
    drop(w, n);
    return rc;
}

/* Remember whether the chunk of @key is damaged. Returns true when that was known before. Collisions
 * in the table count a damaged chunk more than once. */
static bool remember(struct kvbm_object *o, const uint8_t *key, bool damaged)
{
    uint64_t name, *slot;
    bool known;

    memcpy(&name, key, sizeof(name));
    slot = &o->damaged[name % KVBM_OBJECT_DAMAGED];
    pthread_mutex_lock(&o->lock);
    known = *slot == name;
    if (damaged)
        *slot = name;
    else if (known)
        *slot = 0;
    pthread_mutex_unlock(&o->lock);
    return known;
}

/* Get a chunk that looks damaged, and set the block's status by it: the store sets damaged bytes
 * aside when it reads them. A chunk known as damaged is missing. */
static int examine(struct kvbm_object_worker *w, uint32_t i, struct kvbm_object_io *io)
{
    void *value = NULL;
    size_t len = 0;
    int rc = kvbm_object_enter(w);

    if (rc < 0)
        return rc;
    rc = kvs_get_chunk(w->handle->store, w->keys[i], KVBM_OBJECT_CHUNK_KEY, &value, &len);
    if (rc < 0)
        value = NULL;
    if (!kvbm_object_leave(w)) {
        free(value);
        return -ETIMEDOUT;
    }
    if (rc == 0 && !kvbm_object_unseal(&w->object->format, io->group, io->key, value, len)) {
        note(&w->bad, w->keys[i]);
        rc = -EBADMSG;
    }
    free(value);
    if (remember(w->object, w->keys[i], rc == -EBADMSG) && rc == -EBADMSG)
        rc = -ENOENT;
    io->status = status_of(rc);
    if (kv_breaker_counts(rc))
        w->trouble = rc;
    return 0;
}

static int exists_slice(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n)
{
    int rc = kvbm_object_enter(w), found;

    if (rc < 0)
        return rc;
    found = kvs_look_each(w->handle->store, w->keys, KVBM_OBJECT_CHUNK_KEY, n, w->present);
    if (!kvbm_object_leave(w))
        return -ETIMEDOUT;
    if (found == -ENOTSUP) /* without an exists call, a get answers at the price of the bytes */
        return get_slice(w, ios, n, false);
    if (kv_breaker_counts(found))
        w->trouble = found;
    for (uint32_t i = 0; i < n; i++)
        ios[i].status = found < 0                      ? status_of(found)
                        : w->present[i] == KVS_THERE   ? 0
                        : w->present[i] == KVS_DAMAGED ? -EINPROGRESS
                        : w->present[i] == KVS_UNKNOWN ? -EIO
                                                       : -ENOENT;
    for (uint32_t i = 0; i < n && found >= 0; i++) {
        if (w->present[i] == KVS_DAMAGED)
            found = examine(w, i, &ios[i]);
        else if (w->present[i] == KVS_THERE)
            remember(w->object, w->keys[i], false);
    }
    return KV_MIN(found, 0);
}

/* -- put --------------------------------------------------------------------------------------- */

static int seal_slice(struct kvbm_object_worker *w, const struct kvbm_object_io *ios, uint32_t n)
{
    const struct kvbm_object_format *f = &w->object->format;
    size_t each = kvbm_object_value_bytes(f);
    int rc = make_room(w, n * each);

    for (uint32_t i = 0; i < n && rc == 0; i++) {
        w->data[i] = w->value + i * each;
        w->len[i] = each;
        kvbm_object_seal(f, ios[i].group, ios[i].key, ios[i].data, w->data[i]);
    }
    return rc;
}

static void store_each(struct kvbm_object_worker *w, uint32_t n)
{
    int rc = 0, failures = 0;
    bool stop = false;

    for (uint32_t i = 0; i < n; i++) {
        if (!stop) {
            rc = kvs_put_chunk(w->handle->store, w->keys[i], KVBM_OBJECT_CHUNK_KEY, w->data[i],
                               w->len[i]);
            stop = give_up(w, rc, &failures);
        }
        w->rc[i] = stop && rc >= 0 ? -EIO : rc;
    }
}

static void store(struct kvbm_object_worker *w, uint32_t n)
{
    const kv_store_ext *ext = w->handle->ext;
    int rc;

    if (!ext || !ext->put_chunks) {
        store_each(w, n);
        return;
    }
    rc = kvs_put_chunks(w->handle->store, w->keys, KVBM_OBJECT_CHUNK_KEY, n,
                        (const void *const *)w->data, w->len, w->rc);
    for (uint32_t i = 0; i < n && rc < 0; i++) /* blocks that put_chunks did not reach or answer */
        if (w->rc[i] == -EIO)
            w->rc[i] = rc;
}

static int put_slice(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n)
{
    int rc = seal_slice(w, ios, n);

    if (rc == 0)
        rc = kvbm_object_enter(w);
    if (rc < 0)
        return rc;
    rc = kvbm_object_put_begins(w, n);
    if (rc == 0) {
        store(w, n);
        kvbm_object_put_found(w, n); /* also when nobody waits for the batch any more */
    }
    if (!kvbm_object_leave(w))
        return -ETIMEDOUT;
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < n; i++) {
        ios[i].status = w->rc[i] == 0   ? KVBM_OBJECT_STORED
                        : w->rc[i] == 1 ? KVBM_OBJECT_ALREADY
                                        : status_of(w->rc[i]);
        if (w->rc[i] >= 0)
            remember(w->object, w->keys[i], false);
    }
    return judge(w, n);
}

/* Return true when blocks of the batch wait for a publication. */
static bool any_put(struct kvbm_object_worker *w, const struct kvbm_object_batch *batch)
{
    bool any = false;

    w->put_failed = false;
    for (uint32_t i = 0; i < batch->n; i++) {
        any |= batch->ios[i].status > 0;
        w->put_failed |= batch->ios[i].status < 0;
    }
    return any;
}

/* -- bad values -------------------------------------------------------------------------------- */

/* Delete the chunk if its value is still one that the tier refuses: another batch may have deleted
 * it meanwhile, and a put stored the block. A backend without conditional deletes may lose that
 * block between the look and the deletion. */
static void delete_one(struct kvbm_object_worker *w, const uint8_t *key)
{
    struct kvs_store *store = w->handle->store;
    void *value;
    size_t len;

    if (kvs_get_chunk(store, key, KVBM_OBJECT_CHUNK_KEY, &value, &len) < 0)
        return;
    if (!kvbm_object_fits(&w->object->format, key, value, len) &&
        kvs_delete_chunk_if(store, key, KVBM_OBJECT_CHUNK_KEY, value, len) == -ENOTSUP)
        kvs_delete_chunk(store, key, KVBM_OBJECT_CHUNK_KEY);
    free(value);
}

/* Delete values that the store returned and the tier refused, or no put would replace them, since
 * their keys exist. Do it before the batch ends, as its caller may put the blocks next. */
static int delete_bad(struct kvbm_object_worker *w)
{
    uint32_t n = KV_MIN(w->bad.n, (uint32_t)MAX_DELETES);
    int rc;

    if (w->n_deleted >= n)
        return 0;
    rc = kvbm_object_enter(w);
    if (rc < 0)
        return rc;
    for (; w->n_deleted < n && !atomic_load_explicit(&w->abandoned, memory_order_relaxed);
         w->n_deleted++)
        delete_one(w, w->bad.keys[w->n_deleted]);
    return kvbm_object_leave(w) ? 0 : -ETIMEDOUT;
}

/* Delete values for a caller. */
static int delete_slice(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n)
{
    int rc = kvbm_object_enter(w), failures = 0;
    bool stop = false;

    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < n; i++) {
        if (!stop) {
            rc = kvs_delete_chunk(w->handle->store, w->keys[i], KVBM_OBJECT_CHUNK_KEY);
            stop = give_up(w, rc, &failures);
        }
        w->rc[i] = stop && rc >= 0 ? -EIO : rc;
    }
    if (!kvbm_object_leave(w))
        return -ETIMEDOUT;
    kvbm_object_deleted(w, n);
    for (uint32_t i = 0; i < n; i++)
        ios[i].status = status_of(w->rc[i]);
    return judge(w, n);
}

/* Make deletions from a folder durable: of its deletes none waits for the disk. */
static int sync_deletes(struct kvbm_object_worker *w, struct kvbm_object_batch *batch)
{
    int rc = kvbm_object_enter(w);

    if (rc < 0)
        return rc;
    rc = kvs_flush(w->handle->store);
    if (!kvbm_object_leave(w))
        return -ETIMEDOUT;
    for (uint32_t i = 0; i < batch->n && rc < 0; i++)
        batch->ios[i].status = batch->ios[i].status ? batch->ios[i].status : status_of(rc);
    return 0;
}

/* -- a batch ----------------------------------------------------------------------------------- */

/* A chunk that was put and isn't published is missing, whatever the handle says that put it. */
static void hide_unpublished(struct kvbm_object_worker *w, struct kvbm_object_io *ios, uint32_t n)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (uint32_t i = 0; i < n; i++)
        if (ios[i].status == 0 && kvbm_object_is_unpublished(o, w->keys[i]))
            ios[i].status = -ENOENT;
    pthread_mutex_unlock(&o->lock);
}

int kvbm_object_run(struct kvbm_object_worker *w, struct kvbm_object_batch *batch)
{
    uint32_t total = batch->n;
    enum kvbm_object_op op = batch->op;
    int rc = 0;

    for (uint32_t at = 0, n; at < total && rc == 0; at += n) {
        struct kvbm_object_io *ios = batch->ios + at;

        n = KV_MIN(total - at, op == KVBM_OBJECT_EXISTS ? w->object->slice : w->object->near_slice);
        name_slice(w, ios, n);
        rc = op == KVBM_OBJECT_GET      ? get_slice(w, ios, n, true)
             : op == KVBM_OBJECT_PUT    ? put_slice(w, ios, n)
             : op == KVBM_OBJECT_EXISTS ? exists_slice(w, ios, n)
                                        : delete_slice(w, ios, n);
        if (rc == 0 && (op == KVBM_OBJECT_GET || op == KVBM_OBJECT_EXISTS))
            hide_unpublished(w, ios, n);
        if (rc == 0)
            rc = delete_bad(w);
    }
    if (op == KVBM_OBJECT_PUT) {
        bool put = rc == 0 && any_put(w, batch);

        rc = put ? kvbm_object_publish(w, batch->until_) : rc;
        kvbm_object_put_ends(w, put && rc == 0);
    }
    if (rc == 0 && op == KVBM_OBJECT_DELETE && w->object->folder)
        rc = sync_deletes(w, batch);
    return rc;
}

/* -- after the batch --------------------------------------------------------------------------- */

/* Choose the hits to mark as used: those not marked lately. Collisions in the table cause a few
 * marks more or less. */
static void choose_touched(struct kvbm_object *o, struct kvbm_object_notes *hits)
{
    uint64_t now_s = kv_now_ns() / KV_NS_PER_S;
    uint32_t n = 0;

    pthread_mutex_lock(&o->lock);
    for (uint32_t i = 0; i < hits->n; i++) {
        uint64_t key, slot;

        memcpy(&key, hits->keys[i], sizeof(key));
        slot = key % KVBM_OBJECT_TOUCHED;
        if (o->touched[slot].key == key && now_s - o->touched[slot].at_s < KVBM_OBJECT_TOUCH_S)
            continue;
        o->touched[slot].key = key;
        o->touched[slot].at_s = now_s;
        memmove(hits->keys[n++], hits->keys[i], KVBM_OBJECT_CHUNK_KEY);
    }
    pthread_mutex_unlock(&o->lock);
    hits->n = n;
}

void kvbm_object_after(struct kvbm_object_worker *w)
{
    struct kvs_store *store = w->handle->store;

    choose_touched(w->object, &w->hits);
    if (w->hits.n == 0 || kvbm_object_enter(w) < 0)
        return;
    kvs_touch(store, w->hits.keys, KVBM_OBJECT_CHUNK_KEY, w->hits.n);
    kvbm_object_leave(w);
}
