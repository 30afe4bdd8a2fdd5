// SPDX-License-Identifier: Apache-2.0
/*
 * Saving an object: cut it, name each chunk by its bytes, put each, and publish the manifest last.
 * A reader then sees the object whole or not at all. Memory holds one chunk, the window that it is
 * cut from, and the manifest (20 bytes a chunk).
 *
 * A backend with put_chunks gets up to BATCH_CHUNKS chunks and BATCH_BYTES bytes in one call, which
 * costs it one round trip. Those bytes are copied, since the cutter's window moves on. Larger
 * chunks are put alone.
 */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "store/backend/file.h"
#include "store/backend/store.h"
#include "store/object/cut.h"
#include "store/object/save_verify.h"

enum { BATCH_CHUNKS = KVS_OWN_CHUNKS, BATCH_BYTES = 32 << 20, PLAIN_MAX = 128 };

/* Chunks cut and not yet put: the last n of the manifest. */
struct batch {
    uint8_t *bytes; /* grows to BATCH_BYTES */
    size_t len, room, n;
    uint8_t keys[BATCH_CHUNKS][16];
    size_t lens[BATCH_CHUNKS];
};

struct saving {
    struct kvs_store *store;
    const char *name;
    const struct kvs_save_opts *opts;
    struct kvs_cutter cutter;
    struct kvs_manifest manifest;
    struct batch *batch; /* NULL: chunks are put one by one */
    struct kvs_result result;
    uint8_t *stored; /* per chunk of the manifest: 1 when its put stored it; NULL: not wanted */
    size_t stored_room;
    size_t n_put;      /* chunks of the manifest that were put */
    uint64_t releases; /* of the file store, before the first put: kvs_file_releases */
};

static int refuse_at(const struct saving *save, size_t chunk, int rc, const char *what)
{
    char name[256];

    kv_log_error("store", what, "object=%s chunk=%zu error=%d",
                 kv_log_quote(name, sizeof(name), save->name), chunk, -rc);
    return rc;
}

static int refuse(const struct saving *save, int rc, const char *what)
{
    return refuse_at(save, save->manifest.n_chunks, rc, what);
}

/* Note the answer @rc to the put of chunk @i. */
static int note_put(struct saving *save, size_t i, int rc)
{
    if (rc < 0)
        return refuse_at(save, i, rc, "a chunk can't be stored");
    save->n_put++;
    if (rc == 0) {
        save->result.new_chunks++;
        save->result.new_bytes += save->manifest.chunks[i].len;
        if (i < save->stored_room)
            save->stored[i] = 1;
    }
    return 0;
}

/* -- many at once ------------------------------------------------------------------------------ */

static int put_one_by_one(struct saving *save, const uint8_t *const *data)
{
    const struct batch *b = save->batch;
    size_t first = save->manifest.n_chunks - b->n;
    int rc = 0;

    for (size_t i = 0; i < b->n && !rc; i++)
        rc = note_put(save, first + i,
                      kvs_put_chunk_of_save(save->store, b->keys[i], 16, data[i], b->lens[i]));
    return rc;
}

static int put_at_once(struct saving *save, const uint8_t *const *data)
{
    struct batch *b = save->batch;
    size_t first = save->manifest.n_chunks - b->n;
    int each[BATCH_CHUNKS], rc;

    if (b->n < 2)
        return put_one_by_one(save, data);
    rc = kvs_put_chunks_of_save(save->store, b->keys, 16, b->n, (const void *const *)data, b->lens,
                                each);
    if (rc == -ENOTSUP) /* this store's put_chunks turned out to be unsupported */
        return put_one_by_one(save, data);
    for (size_t i = 0; i < b->n; i++)
        if (rc < 0 && each[i] < 0)
            return note_put(save, first + i, rc);
        else if (rc >= 0)
            note_put(save, first + i, each[i]);
    return rc < 0 ? note_put(save, first, rc) : 0;
}

/* Compare chunks of the object with what the store has, where the caller asked for it: before their
 * put, and after it those that weren't the same. */
static int compare(struct saving *save, const struct kvs_own_chunks *own, bool *same, bool before)
{
    int rc = 0;

    if (KV_OPT(save->opts, verify, false))
        rc = before ? kvs_compare_before(save->store, own, same)
                    : kvs_compare_after(save->store, own, same);
    return rc < 0 ? refuse_at(save, save->manifest.n_chunks - own->n, rc,
                              "what the store has of this object's chunks doesn't verify")
                  : 0;
}

static int put_batch(struct saving *save)
{
    struct batch *b = save->batch;
    const uint8_t *data[BATCH_CHUNKS];
    const struct kvs_own_chunks own = {(const uint8_t(*)[16])b->keys, (const void *const *)data,
                                       b->lens, b->n};
    bool same[BATCH_CHUNKS] = {false};
    size_t at = 0;
    int rc;

    for (size_t i = 0; i < b->n; at += b->lens[i++])
        data[i] = b->bytes + at;
    rc = compare(save, &own, same, true);
    if (!rc)
        rc = put_at_once(save, data);
    return rc ? rc : compare(save, &own, same, false);
}

/* Put the manifest's last chunk alone. */
static int put_alone(struct saving *save, const uint8_t key[1][16], const void *data, size_t len)
{
    const struct kvs_own_chunks own = {key, &data, &len, 1};
    bool same = false;
    int rc = compare(save, &own, &same, true);

    if (!rc)
        rc = note_put(save, save->manifest.n_chunks - 1,
                      kvs_put_chunk_of_save(save->store, key[0], 16, data, len));
    return rc ? rc : compare(save, &own, &same, false);
}

static int flush(struct saving *save)
{
    int rc = save->batch && save->batch->n ? put_batch(save) : 0;

    if (save->batch)
        save->batch->n = save->batch->len = 0;
    return rc;
}

/* Make room for @len more bytes. The batch is empty, or the bytes fit below its limit. */
static int make_room(struct batch *b, size_t len)
{
    size_t room = KV_MAX(b->len + len, KV_MIN(2 * b->room, (size_t)BATCH_BYTES));
    uint8_t *bytes;

    if (b->len + len <= b->room)
        return 0;
    bytes = realloc(b->bytes, room);
    if (!bytes)
        return -ENOMEM;
    b->bytes = bytes;
    b->room = room;
    return 0;
}

/* Add chunk @i, the manifest's last, to the batch. */
static int gather(struct saving *save, const uint8_t *data, size_t len)
{
    struct batch *b = save->batch;
    int rc = make_room(b, len);

    if (rc)
        return rc;
    memcpy(b->bytes + b->len, data, len);
    memcpy(b->keys[b->n], save->manifest.chunks[save->manifest.n_chunks - 1].key, 16);
    b->lens[b->n++] = len;
    b->len += len;
    return 0;
}

/* -- what was new ------------------------------------------------------------------------------ */

/* Make room for notes of more chunks. Without memory, later chunks count as their puts said. */
static void more_stored(struct saving *save)
{
    size_t room = KV_MAX(2 * save->stored_room, (size_t)BATCH_CHUNKS);
    uint8_t *stored = realloc(save->stored, room);

    if (!stored)
        return;
    memset(stored + save->stored_room, 0, room - save->stored_room);
    save->stored = stored;
    save->stored_room = room;
}

/* Take back the counts of @n chunks that the store had after all. */
static void recount(struct saving *save, const uint8_t (*keys)[16], const uint32_t *lens, size_t n)
{
    uint8_t fresh[BATCH_CHUNKS];

    memset(fresh, 1, sizeof(fresh));
    if (!n || kvs_new_chunks(save->store, keys, 16, n, fresh) < 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (!fresh[i]) {
            save->result.new_chunks--;
            save->result.new_bytes -= lens[i];
        }
}

/* Ask a backend that buffers puts which chunks it had: it learned that from the publication. */
static void count_new(struct saving *save)
{
    size_t n_noted = KV_MIN(save->manifest.n_chunks, save->stored_room), n = 0;
    uint8_t keys[BATCH_CHUNKS][16];
    uint32_t lens[BATCH_CHUNKS];

    for (size_t i = 0; i < n_noted; i++) {
        if (!save->stored[i])
            continue;
        memcpy(keys[n], save->manifest.chunks[i].key, 16);
        lens[n++] = save->manifest.chunks[i].len;
        if (n == BATCH_CHUNKS) {
            recount(save, (const uint8_t(*)[16])keys, lens, n);
            n = 0;
        }
    }
    recount(save, (const uint8_t(*)[16])keys, lens, n);
}

/* -- all of it --------------------------------------------------------------------------------- */

static int put(struct saving *save, const uint8_t *data, size_t len)
{
    const struct batch *b = save->batch;
    uint8_t key[1][16];
    int rc = 0;

    kvs_chunk_key(data, len, key[0]);
    if (save->store->ext.new_chunks && save->manifest.n_chunks == save->stored_room)
        more_stored(save);
    if (b && (b->n == BATCH_CHUNKS || b->len + len > BATCH_BYTES))
        rc = flush(save);
    if (!rc)
        rc = kvs_manifest_add(&save->manifest, key[0], (uint32_t)len);
    if (rc)
        return rc;
    if (b && len <= BATCH_BYTES)
        return gather(save, data, len);
    return put_alone(save, (const uint8_t(*)[16])key, data, len);
}

/* Report progress after each chunk, so that a cancellation acts at once. Counts bytes put, not
 * bytes cut. */
static int tell_progress(const struct saving *save)
{
    kvs_progress_fn progress = KV_OPT(save->opts, progress, NULL);
    uint64_t done = save->manifest.bytes - (save->batch ? save->batch->len : 0);

    return progress && progress(KV_OPT(save->opts, progress_arg, NULL), done,
                                KV_OPT(save->opts, total_bytes, 0))
               ? -ECANCELED
               : 0;
}

static int put_all(struct saving *save)
{
    int rc = 1, told = 0;

    while (rc > 0 && !told) {
        const uint8_t *data;
        size_t len;

        rc = kvs_cutter_next(&save->cutter, &save->manifest, &data, &len);
        if (rc < 0)
            return refuse(save, rc, "the object can't be read");
        told = rc ? put(save, data, len) : flush(save);
        if (!told)
            told = tell_progress(save);
    }
    return told;
}

/* Warn of a state whose growth won't be shared: all or some of it was cut by content. */
static void warn_unparsed(const struct saving *save)
{
    const struct kvs_cutter *c = &save->cutter;
    char name[256];

    if (c->told && c->parsed < save->manifest.bytes)
        kv_log_warn(
            "store", "not all of this llama.cpp state was understood: the rest is cut by content",
            "object=%s parsed_bytes=%llu bytes=%llu", kv_log_quote(name, sizeof(name), save->name),
            (unsigned long long)c->parsed, (unsigned long long)save->manifest.bytes);
}

static int publish(struct saving *save)
{
    const char *fingerprint = KV_OPT(save->opts, fingerprint, NULL);
    struct kv_buf bytes = KV_BUF_INIT;
    int rc;

    save->manifest.format = save->cutter.format;
    save->manifest.created_s = kv_wall_ns() / KV_NS_PER_S;
    save->manifest.fingerprint = fingerprint ? strdup(fingerprint) : NULL;
    rc = fingerprint && !save->manifest.fingerprint ? -ENOMEM : 0;
    if (!rc)
        rc = kvs_manifest_encode(&save->manifest, &bytes);
    if (!rc) {
        save->result.manifest_bytes = bytes.len;
        rc = kvs_put_manifest(save->store, save->name, bytes.data, bytes.len);
    }
    kv_buf_fini(&bytes);
    return rc < 0 ? refuse(save, rc, "the object can't be published") : 0;
}

static void tell(const struct saving *save, struct kvs_result *ret)
{
    struct kvs_result result = save->result;

    if (!ret)
        return;
    result.size = ret->size;
    result.bytes = save->manifest.bytes;
    result.n_chunks = save->manifest.n_chunks;
    result.format = save->manifest.format;
    result.parsed_bytes = save->cutter.parsed;
    memcpy(ret, &result, KV_MIN(ret->size, sizeof(result)));
}

/* Drop from the file store what a save that failed has put: it would hold the room that later saves
 * need, until the handle is closed. */
static void take_back(const struct saving *save)
{
    struct kvs_store *store = save->store;

    for (size_t i = 0; i < save->n_put && store->table == kvs_file_vtable(); i++)
        kvs_file_take_back(store->backend, save->manifest.chunks[i].key,
                           sizeof(save->manifest.chunks[i].key), save->releases);
}

/* True for names that every backend takes (the conformance kit checks that). */
static bool is_plain(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    static const char all[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    size_t len = strspn(name, all);

    return len > 0 && len <= PLAIN_MAX && !name[len] && strchr(letters, *name);
}

/* Check that the backend takes the name before it gets gigabytes. Plain names need no check, which
 * saves a round trip. Only a backend with extensions tells a bad name from a missing object; others
 * refuse a bad name at the end. */
static int check_name(const struct saving *save)
{
    void *old = NULL;
    size_t len;
    int rc = *save->name ? 0 : -EINVAL;

    if (!rc && save->store->ext_table && !is_plain(save->name))
        rc = kvs_get_manifest(save->store, save->name, &old, &len);
    free(old);
    return rc == -EINVAL || rc == -ENAMETOOLONG || rc == -EILSEQ
               ? refuse(save, rc, "the store refuses this object name")
               : 0;
}

int kvs_save(struct kvs_store *store, const char *name, kvs_read_fn read, void *arg,
             const struct kvs_save_opts *opts, struct kvs_result *ret)
{
    struct saving save = {.store = store, .name = name, .opts = opts};
    const char *fingerprint = KV_OPT(opts, fingerprint, NULL);
    int rc;

    if (!store || !name || !read || !kv_sized_or_null(opts, "kvs_save_opts") ||
        !kv_sized_or_null(ret, "kvs_result") ||
        (fingerprint && strnlen(fingerprint, KVS_FINGERPRINT_MAX + 1) > KVS_FINGERPRINT_MAX))
        return -EINVAL;
    rc = check_name(&save);
    if (rc)
        return rc;
    atomic_fetch_add(&store->saves, 1);
    if (store->table == kvs_file_vtable())
        save.releases = kvs_file_releases(store->backend);
    /* without memory, chunks are put one by one */
    save.batch = store->batches ? calloc(1, sizeof(*save.batch)) : NULL;
    rc = kvs_cutter_init(&save.cutter, opts, read, arg);
    if (rc)
        refuse(&save, rc, "the object can't be read, or the options are out of range");
    if (!rc)
        rc = put_all(&save);
    if (!rc)
        rc = publish(&save);
    if (!rc) {
        count_new(&save);
        warn_unparsed(&save);
        tell(&save, ret);
    }
    if (rc) {
        take_back(&save);
        atomic_store(&store->save_failed, true);
    }
    atomic_fetch_sub(&store->saves, 1);
    kvs_cutter_fini(&save.cutter);
    if (save.batch)
        free(save.batch->bytes);
    free(save.batch);
    free(save.stored);
    free(save.manifest.fingerprint);
    free(save.manifest.chunks);
    free(save.manifest.weaves);
    return rc;
}
