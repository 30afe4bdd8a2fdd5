// SPDX-License-Identifier: Apache-2.0
/* Functions of kv_store_ext.h with checked results. Those that a backend lacks are made from the
 * ABI's own calls where possible. */
#include <limits.h>

#include "base/core/error.h"
#include "store/backend/check.h"
#include "store/backend/parts.h"

/* -- one chunk in pieces ----------------------------------------------------------------------- */

struct stream {
    kv_store_piece_fn each;
    void *arg;
    uint64_t next; /* expected offset of the next piece */
    int stopped;   /* return value of each() or of the check; the backend must return the same */
    bool broken;
};

static int check_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct stream *s = arg;

    if (s->stopped) /* the backend ignores that it was stopped */
        return s->stopped;
    s->broken = (offset != 0 && offset != s->next) || (!piece && len > 0);
    if (s->broken)
        return s->stopped = -EPROTO;
    s->next = offset + len;
    return s->stopped = s->each(s->arg, offset, piece, len);
}

static int stream_by_get(struct kvs_store *store, const void *hash, size_t hash_len,
                         kv_store_piece_fn each, void *arg)
{
    size_t len = 0;
    void *data;
    int rc = kvs_get_chunk(store, hash, hash_len, &data, &len);

    if (rc < 0)
        return rc;
    rc = each(arg, 0, data, len);
    free(data);
    return rc;
}

int kvs_stream_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void *buf,
                     size_t room, kv_store_piece_fn each, void *arg)
{
    struct stream s = {.each = each, .arg = arg};
    int rc;

    if (!kvs_hashes_ok(hash, hash_len, 1) || !buf || room == 0 || !each)
        return -EINVAL;
    if (!store->ext.stream_chunk)
        return stream_by_get(store, hash, hash_len, each, arg);
    rc = store->ext.stream_chunk(store->backend, hash, hash_len, buf, room, check_piece, &s);
    if (s.broken)
        return kvs_broken(store, "stream_chunk", "pieces out of order");
    return s.stopped ? s.stopped : kvs_check_rc(store, "stream_chunk", rc, 0);
}

/* -- many chunks ------------------------------------------------------------------------------- */

static const uint8_t *hash_at(const void *hashes, size_t hash_len, size_t i)
{
    return (const uint8_t *)hashes + i * hash_len;
}

static void drop(void **values, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(values[i]);
        values[i] = NULL;
    }
}

static int by_address(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t) * (void *const *)a, y = (uintptr_t) * (void *const *)b;

    return (x > y) - (x < y);
}

static bool has_twins(void *const *values, size_t n)
{
    void **sorted = calloc(n, sizeof(*sorted));
    bool found = !sorted; /* no table of indices: search one by one */
    size_t m = 0;

    for (size_t i = 0; sorted && i < n; i++)
        if (values[i])
            sorted[m++] = values[i];
    if (m > 1)
        qsort(sorted, m, sizeof(*sorted), by_address);
    for (size_t i = 1; i < m && !found; i++)
        found = sorted[i] == sorted[i - 1];
    free(sorted);
    return found;
}

/* Set to NULL each buffer that stands for two chunks, since it can be freed only once. Returns true
 * when there was one. */
static bool drop_twins(void **values, size_t n)
{
    bool found = false;

    if (!has_twins(values, n))
        return false;
    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; values[i] && j < n; j++)
            if (values[j] == values[i]) {
                values[j] = NULL;
                found = true;
            }
    return found;
}

/* Check the result of the backend's own get_chunks, which returned @found. After success its
 * buffers in @ret are ours to free, whatever else is wrong. */
static int check_batch(const struct kvs_store *store, int found, size_t n, void **ret,
                       const size_t *len)
{
    const char *wrong = NULL;
    bool twins = drop_twins(ret, n);
    size_t seen = 0;

    for (size_t i = 0; i < n && !wrong; i++) {
        wrong = ret[i] ? kvs_check_value(&ret[i], len[i]) : NULL;
        seen += ret[i] != NULL;
    }
    if (twins)
        wrong = "one buffer for two chunks";
    else if (!wrong && (size_t)found != seen)
        wrong = "wrong count";
    return wrong ? kvs_broken(store, "get_chunks", wrong) : found;
}

static int get_batch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                     void **ret, size_t *ret_len)
{
    int rc, found = store->ext.get_chunks(store->backend, hashes, hash_len, n, (uint8_t **)ret,
                                          ret_len);

    /* after a failure the backend still owns its buffers and may have freed them: don't read
     * them */
    if (found < 0) {
        memset(ret, 0, n * sizeof(*ret));
        return kvs_check_rc(store, "get_chunks", found, 0);
    }
    rc = check_batch(store, found, n, ret, ret_len);
    if (rc < 0)
        drop(ret, n);
    for (size_t i = 0; i < n; i++)
        if (!ret[i] && ret_len[i] != KVS_LEN_BAD && ret_len[i] != KVS_LEN_UNKNOWN)
            ret_len[i] = 0; /* a backend may leave any length there */
    return rc;
}

int kvs_get_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                   void **ret, size_t *ret_len)
{
    int rc = kvs_get_chunks_each(store, hashes, hash_len, n, ret, ret_len);

    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (!ret[i] && ret_len[i] == KVS_LEN_UNKNOWN) {
            drop(ret, n);
            rc = -EIO;
        }
    return rc;
}

int kvs_get_chunks_each(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                        void **ret, size_t *ret_len)
{
    int found = 0;

    if (!kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    memset(ret, 0, n * sizeof(*ret));
    memset(ret_len, 0, n * sizeof(*ret_len));
    if (n > 0 && store->ext.get_chunks)
        return get_batch(store, hashes, hash_len, n, ret, ret_len);
    for (size_t i = 0; i < n; i++) {
        int rc = kvs_get_chunk(store, hash_at(hashes, hash_len, i), hash_len, &ret[i], &ret_len[i]);

        if (rc && rc != -ENOENT && rc != -EBADMSG) {
            drop(ret, i);
            return rc;
        }
        if (rc)
            ret_len[i] = rc == -EBADMSG ? KVS_LEN_BAD : 0;
        found += rc == 0;
    }
    return found;
}

/* Put by the backend's own put_chunks. Chunks without an answer count as failed. */
static int put_batch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                     const void *const *data, const size_t *len, int *ret_each)
{
    int rc;

    for (size_t i = 0; ret_each && i < n; i++)
        ret_each[i] = -EIO;
    rc = store->ext.put_chunks(store->backend, hashes, hash_len, n, (const uint8_t *const *)data,
                               len, ret_each);
    rc = kvs_check_rc(store, "put_chunks", rc, (int)n);
    rc = KV_MIN(rc, 0);
    for (size_t i = 0; ret_each && i < n; i++) {
        ret_each[i] = kvs_check_rc(store, "put_chunks", ret_each[i], 1);
        if (ret_each[i] < 0 && rc == 0)
            rc = ret_each[i];
    }
    return rc;
}

/* True for values that a backend may see. The others are put one by one, where each is checked, and
 * an empty one gets a pointer. */
static bool have_bytes(const void *const *data, const size_t *len, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!data[i] || len[i] > KVS_VALUE_MAX)
            return false;
    return true;
}

int kvs_put_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                   const void *const *data, const size_t *len, int *ret_each)
{
    size_t stored = 0, hits = 0;
    int rc;

    if (!kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    rc = kvs_put_chunks_of_save(store, hashes, hash_len, n, data, len, ret_each);
    for (size_t i = 0; ret_each && i < n; i++) {
        stored += ret_each[i] == 0;
        hits += ret_each[i] == 1;
    }
    kvs_note_puts(store, ret_each ? stored : n, hits);
    return rc;
}

int kvs_put_chunks_of_save(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                           const void *const *data, const size_t *len, int *ret_each)
{
    int result = 0;

    if (!kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    if (n > 0 && store->ext.put_chunks && have_bytes(data, len, n))
        return put_batch(store, hashes, hash_len, n, data, len, ret_each);
    for (size_t i = 0; i < n; i++) {
        int rc =
            kvs_put_chunk_of_save(store, hash_at(hashes, hash_len, i), hash_len, data[i], len[i]);

        if (ret_each)
            ret_each[i] = rc;
        if (rc < 0 && result == 0)
            result = rc;
    }
    return result;
}

int kvs_look(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
             uint8_t *ret_state)
{
    int rc = kvs_look_each(store, hashes, hash_len, n, ret_state);

    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (ret_state[i] == KVS_UNKNOWN)
            rc = -EIO;
    return rc;
}

int kvs_look_each(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                  uint8_t *ret_state)
{
    int rc;

    if (!kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    if (!store->ext.exists_chunks)
        return -ENOTSUP; /* get_chunk would answer, but it transfers all bytes */
    if (n == 0)
        return 0;
    rc = store->ext.exists_chunks(store->backend, hashes, hash_len, n, ret_state);
    rc = kvs_check_rc(store, "exists_chunks", rc, (int)n);
    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (ret_state[i] > KVS_UNKNOWN)
            return kvs_broken(store, "exists_chunks", "neither there, missing nor damaged");
    return KV_MIN(rc, 0);
}

int kvs_exists(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
               uint8_t *ret_present)
{
    int rc = kvs_look(store, hashes, hash_len, n, ret_present);

    for (size_t i = 0; rc >= 0 && i < n; i++)
        ret_present[i] = ret_present[i] == KVS_THERE;
    return rc;
}

int kvs_touch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n)
{
    int rc;

    if (!kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    if (n == 0 || !store->ext.touch_chunks)
        return 0;
    rc = store->ext.touch_chunks(store->backend, hashes, hash_len, n);
    return kvs_check_rc(store, "touch_chunks", rc, (int)n);
}

int kvs_delete_chunk(struct kvs_store *store, const void *hash, size_t hash_len)
{
    int rc;

    if (!kvs_hashes_ok(hash, hash_len, 1))
        return -EINVAL;
    if (!store->ext.delete_chunk)
        return -ENOTSUP;
    rc = kvs_check_rc(store, "delete_chunk",
                      store->ext.delete_chunk(store->backend, hash, hash_len), 0);
    return rc == -ENOENT ? 0 : rc;
}

int kvs_delete_chunk_if(struct kvs_store *store, const void *hash, size_t hash_len,
                        const void *data, size_t len)
{
    int rc;

    if (!kvs_hashes_ok(hash, hash_len, 1) || (!data && len))
        return -EINVAL;
    if (!store->ext.delete_chunk_if)
        return -ENOTSUP;
    rc = store->ext.delete_chunk_if(store->backend, hash, hash_len, data ? data : "", len);
    return kvs_check_rc(store, "delete_chunk_if", rc, 1);
}

int kvs_new_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                   uint8_t *ret_new)
{
    int rc;

    if (!store->ext.new_chunks)
        return -ENOTSUP;
    rc = store->ext.new_chunks(store->backend, hashes, hash_len, n, ret_new);
    rc = kvs_check_rc(store, "new_chunks", rc, 0);
    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (ret_new[i] > 1)
            return kvs_broken(store, "new_chunks", "neither new nor found");
    return rc;
}

/* -- listings ---------------------------------------------------------------------------------- */

struct listing {
    const struct kvs_store *store;
    const char *call;
    kv_store_each_fn each;
    void *arg;
    bool chunks;
    int stopped; /* return value of each() or of the check; the backend must return the same */
};

/* Convert an entry to this build's struct: a backend's may be shorter or longer. */
static int check_entry(void *arg, const kv_store_entry *entry)
{
    struct listing *l = arg;
    kv_store_entry known = {.len = UINT64_MAX};
    bool ok = entry && entry->size >= offsetof(kv_store_entry, len);

    if (l->stopped) /* the backend ignores that it was stopped */
        return l->stopped;
    if (ok) {
        memcpy(&known, entry, KV_MIN(entry->size, sizeof(known)) / 8 * 8);
        known.size = sizeof(known);
        ok = l->chunks ? known.hash && known.hash_len > 0 && known.hash_len <= KVS_HASH_MAX
                       : known.name && *known.name;
    }
    l->stopped = ok ? l->each(l->arg, &known) : kvs_broken(l->store, l->call, "broken entry");
    return l->stopped;
}

static int list(struct kvs_store *store, bool chunks, kv_store_each_fn each, void *arg)
{
    int (*fn)(kv_store_v1 *, kv_store_each_fn, void *) =
        chunks ? store->ext.list_chunks : store->ext.list_manifests;
    struct listing l = {.store = store, .each = each, .arg = arg, .chunks = chunks};
    int rc;

    if (!fn)
        return -ENOTSUP;
    l.call = chunks ? "list_chunks" : "list_manifests";
    rc = fn(store->backend, check_entry, &l);
    return l.stopped ? l.stopped : kvs_check_rc(store, l.call, rc, 0);
}

int kvs_list(struct kvs_store *store, kv_store_each_fn each, void *arg)
{
    return list(store, false, each, arg);
}

struct prefixed {
    const char *prefix;
    size_t len;
    kv_store_each_fn each;
    void *arg;
};

static int each_prefixed(void *arg, const kv_store_entry *entry)
{
    const struct prefixed *p = arg;

    return strncmp(entry->name, p->prefix, p->len) == 0 ? p->each(p->arg, entry) : 0;
}

int kvs_list_prefix(struct kvs_store *store, const char *prefix, kv_store_each_fn each, void *arg)
{
    struct prefixed p = {.prefix = prefix, .each = each, .arg = arg};

    if (!prefix)
        return -EINVAL;
    p.len = strlen(prefix);
    return kvs_list(store, each_prefixed, &p);
}

int kvs_list_chunks(struct kvs_store *store, kv_store_each_fn each, void *arg)
{
    return list(store, true, each, arg);
}

/* -- parts of chunks --------------------------------------------------------------------------- */

static bool are_ranges(const kv_store_range *ranges, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const kv_store_range *r = &ranges[i];
        size_t room = 0;

        if (!kvs_hashes_ok(r->hash, r->hash_len, 1) || !r->parts ||
            !kvs_parts_len(r->parts, r->n_parts, SIZE_MAX / 2, &room) || room != r->len ||
            r->len == 0 || r->len > KVS_VALUE_MAX || r->offset > KVS_VALUE_MAX ||
            !memchr(r->tag, 0, KV_STORE_TAG_MAX))
            return false;
    }
    return true;
}

int kvs_get_ranges(struct kvs_store *store, kv_store_range *ranges, size_t n)
{
    size_t found = 0;
    int rc;

    if (!store || (!ranges && n) || n > INT_MAX || !are_ranges(ranges, n))
        return -EINVAL;
    if (!store->ext.get_ranges)
        return -ENOTSUP;
    for (size_t i = 0; i < n; i++)
        ranges[i].rc = -EIO; /* where the backend gives no answer */
    rc = n ? store->ext.get_ranges(store->backend, ranges, n) : 0;
    rc = kvs_check_rc(store, "get_ranges", rc, (int)n);
    for (size_t i = 0; rc >= 0 && i < n; i++) {
        ranges[i].rc = kvs_check_rc(store, "get_ranges", ranges[i].rc, 0);
        ranges[i].tag[KV_STORE_TAG_MAX - 1] = '\0';
        found += ranges[i].rc == 0;
    }
    if (rc >= 0 && (size_t)rc != found)
        return kvs_broken(store, "get_ranges", "wrong count");
    return rc;
}

int kvs_pack_chunks(struct kvs_store *store, const kv_store_pack_opts *opts, const void *hashes,
                    size_t hash_len, size_t n, kv_store_packed *ret)
{
    if (!store || !kv_sized(opts, "kv_store_pack_opts") || !kv_sized(ret, "kv_store_packed") ||
        !kvs_hashes_ok(hashes, hash_len, n) || n > INT_MAX)
        return -EINVAL;
    if (!store->ext.pack_chunks)
        return -ENOTSUP;
    return kvs_check_rc(store, "pack_chunks",
                        store->ext.pack_chunks(store->backend, opts, hashes, hash_len, n, ret), 0);
}

/* -- the rest ---------------------------------------------------------------------------------- */

int kvs_flush(struct kvs_store *store)
{
    struct kvs_unflushed before;
    int rc;

    if (!store->ext.flush)
        return 0;
    before = kvs_take_unflushed(store);
    rc = kvs_check_rc(store, "flush", store->ext.flush(store->backend), 0);
    if (rc < 0)
        kvs_give_unflushed(store, before);
    return rc;
}

int kvs_stats(struct kvs_store *store, kv_store_stats *ret)
{
    kv_store_stats stats = {.size = sizeof(stats)};
    size_t size;
    int rc;

    if (!store || !kv_sized(ret, "kv_store_stats"))
        return -EINVAL;
    if (!store->ext.stats)
        return -ENOTSUP;
    rc = kvs_check_rc(store, "stats", store->ext.stats(store->backend, &stats), 0);
    if (rc)
        return rc;
    size = KV_MIN(ret->size, sizeof(stats));
    memcpy(ret, &stats, size);
    ret->size = size;
    return 0;
}
