// SPDX-License-Identifier: Apache-2.0
/*
 * Reading blobs from packs. Those of one pack are read in runs:
 *
 *     pack   │ a │ b │   │ c │                      │ d │
 *     reads  └───────────────┘  a gap below 64 KiB  └───┘
 *
 * All runs of a batch go to the backend in one call, some at a time, and their bytes straight into each
 * blob's memory. Each blob is compared with its checksum in the index. One that differs is read once
 * more, by itself.
 */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "store/object/fetch.h"
#include "tiered/catalog.h"

enum { RUNS = 8 }; /* read at once: 128 MiB at most */

/* -- runs -------------------------------------------------------------------------------------- */

struct run {
    struct trd_packed_read **reads; /* in order of their places */
    size_t n;
    uint64_t from, to;
    uint8_t key[TRD_PACK_KEY];
    struct iovec *parts; /* each blob's own memory, and what is between goes to `gap` */
    size_t n_parts;
    uint8_t *gap;
};

static const struct trd_pack_entry *entry_of(const struct trd_packed_read *read)
{
    return &read->from.pack->index.entries[read->from.entry];
}

static int by_place(const void *a, const void *b)
{
    const struct trd_packed_read *x = *(struct trd_packed_read *const *)a;
    const struct trd_packed_read *y = *(struct trd_packed_read *const *)b;
    const struct trd_pack_entry *ex = entry_of(x), *ey = entry_of(y);

    if (x->from.pack != y->from.pack)
        return (uintptr_t)x->from.pack < (uintptr_t)y->from.pack ? -1 : 1;
    return (ex->offset > ey->offset) - (ex->offset < ey->offset);
}

/* Cut the first run off @reads, which are in order. Returns the number of its reads. A blob that is asked
 * for twice is read twice. */
static size_t cut_run(struct trd_packed_read **reads, size_t n, struct run *ret)
{
    const struct trd_pack *pack = reads[0]->from.pack;
    size_t i;

    *ret = (struct run){.reads = reads, .from = entry_of(reads[0])->offset};
    ret->to = ret->from + entry_of(reads[0])->len;
    for (i = 1; i < n && reads[i]->from.pack == pack; i++) {
        const struct trd_pack_entry *entry = entry_of(reads[i]);
        uint64_t end = entry->offset + entry->len;

        if (entry->offset < ret->to || entry->offset > ret->to + TRD_PACK_GAP ||
            end - ret->from > TRD_PACK_READ)
            break;
        ret->to = end;
    }
    trd_pack_key(pack->name.id, ret->key);
    return ret->n = i;
}

/* Make each blob's memory, and list it with the gaps between. */
static int make_parts(struct run *run)
{
    uint64_t at = run->from;

    run->gap = malloc(TRD_PACK_GAP);
    run->parts = calloc(2 * run->n, sizeof(*run->parts));
    if (!run->gap || !run->parts)
        return -ENOMEM;
    for (size_t i = 0; i < run->n; i++) {
        const struct trd_pack_entry *entry = entry_of(run->reads[i]);

        if (entry->offset > at)
            run->parts[run->n_parts++] = (struct iovec){run->gap, entry->offset - at};
        run->reads[i]->data = malloc(KV_MAX(entry->len, 1u));
        if (!run->reads[i]->data)
            return -ENOMEM;
        run->parts[run->n_parts++] = (struct iovec){run->reads[i]->data, entry->len};
        at = entry->offset + entry->len;
    }
    return 0;
}

/* Judge each blob's bytes. */
static void judge(struct run *run, int rc)
{
    for (size_t i = 0; i < run->n; i++) {
        struct trd_packed_read *read = run->reads[i];

        read->rc = rc == -ERANGE ? -EBADMSG : rc;
        if (rc == 0 && !trd_pack_entry_is(&read->from.pack->index, read->from.entry, read->data))
            read->rc = -EBADMSG;
        if (read->rc)
            free(KV_STEAL(read->data));
    }
    free(run->parts);
    free(run->gap);
}

static void get_tag(struct trd_pack *pack, char ret[KV_STORE_TAG_MAX])
{
    pthread_mutex_lock(&pack->lock);
    memcpy(ret, pack->tag, KV_STORE_TAG_MAX);
    pthread_mutex_unlock(&pack->lock);
}

/* Backends may renew an object by a copy to itself: another version of the same bytes, as the blobs'
 * checksums tell. */
static void set_tag(struct trd_pack *pack, const char tag[KV_STORE_TAG_MAX])
{
    pthread_mutex_lock(&pack->lock);
    memcpy(pack->tag, tag, KV_STORE_TAG_MAX);
    pthread_mutex_unlock(&pack->lock);
}

/* Read runs whose object has another version than the one known: read that. */
static void read_renewed(struct kvs_store *store, kv_store_range *ranges, struct run *const *of,
                         size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (ranges[i].rc != -ESTALE)
            continue;
        ranges[i].tag[0] = '\0';
        if (kvs_get_ranges(store, &ranges[i], 1) >= 0 && ranges[i].rc == 0)
            set_tag(of[i]->reads[0]->from.pack, ranges[i].tag);
    }
}

static int read_runs(struct kvs_store *store, struct run *runs, size_t n)
{
    kv_store_range ranges[RUNS] = {{.hash = NULL}};
    struct run *of[RUNS];
    size_t n_ranges = 0;
    int rc = 0;

    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = make_parts(&runs[i]);
        if (runs[i].to == runs[i].from) /* empty blobs */
            continue;
        of[n_ranges] = &runs[i];
        ranges[n_ranges] = (kv_store_range){.hash = runs[i].key,
                                            .hash_len = TRD_PACK_KEY,
                                            .offset = runs[i].from,
                                            .len = (size_t)(runs[i].to - runs[i].from),
                                            .parts = runs[i].parts,
                                            .n_parts = runs[i].n_parts};
        get_tag(runs[i].reads[0]->from.pack, ranges[n_ranges++].tag);
    }
    if (rc == 0)
        rc = kvs_get_ranges(store, ranges, n_ranges);
    if (rc >= 0)
        read_renewed(store, ranges, of, n_ranges);
    for (size_t i = 0, k = 0; i < n; i++) {
        bool asked = k < n_ranges && of[k] == &runs[i];

        judge(&runs[i], rc < 0 ? rc : asked ? ranges[k].rc : 0);
        k += asked;
    }
    return KV_MIN(rc, 0);
}

static void say_bad(const struct kvs_store *store, const struct trd_packed_read *read)
{
    static struct kv_log_rate rate;
    char name[TRD_PACK_NAME];

    trd_pack_write_name(&read->from.pack->name, name);
    if (kv_log_allowed(&rate, 10))
        kv_log_error("tiered", "a blob's bytes in a pack are not those that were packed",
                     "store=%s pack=%s entry=%u", store->label, name, (unsigned)read->from.entry);
}

/* Read the blobs that didn't verify once more, each by itself. */
static void read_again(struct kvs_store *store, struct trd_packed_read *reads, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct trd_packed_read *read = &reads[i];
        struct run run;

        if (read->rc != -EBADMSG)
            continue;
        cut_run(&read, 1, &run);
        read_runs(store, &run, 1);
        if (read->rc == -EBADMSG)
            say_bad(store, read);
    }
}

int trd_packs_get(struct kvs_store *store, struct trd_packed_read *reads, size_t n)
{
    struct trd_packed_read **order = calloc(n + 1, sizeof(*order));
    struct run runs[RUNS];
    size_t n_runs = 0;
    int rc = order ? 0 : -ENOMEM;

    for (size_t i = 0; i < n; i++) {
        reads[i].data = NULL;
        reads[i].rc = -EIO;
        if (order)
            order[i] = &reads[i];
    }
    if (rc == 0 && n)
        qsort(order, n, sizeof(*order), by_place);
    for (size_t at = 0; at < n && rc == 0;) {
        at += cut_run(order + at, n - at, &runs[n_runs++]);
        if (n_runs == RUNS || at == n) {
            rc = read_runs(store, runs, n_runs);
            n_runs = 0;
        }
    }
    if (rc == 0)
        read_again(store, reads, n);
    free(order);
    for (size_t i = 0; rc < 0 && i < n; i++)
        free(KV_STEAL(reads[i].data));
    return rc;
}

/* -- gets -------------------------------------------------------------------------------------- */

/* A pack that was there is gone: the next look reads which there are now. */
static void expect_changes(struct trd_catalog *catalog, struct trd_pack *pack)
{
    atomic_store(&pack->missing, true);
    atomic_store(&catalog->stale, true);
    atomic_store_explicit(&catalog->checked_ns, 0, memory_order_release);
}

/* Add up the answers of a blob's places: a pack's failure counts when no other place has the blob. */
static int worse(int before, int rc)
{
    if (before == -ENOENT || rc == 0)
        return rc;
    return rc == -ENOENT || before == -EIO ? before : rc;
}

static int get_from(struct trd_catalog *catalog, struct kvs_store *store,
                    const struct trd_packs *packs, const void *hash, size_t hash_len, void **ret,
                    size_t *ret_len)
{
    struct trd_packed_read read;
    size_t at = 0;
    int result = -ENOENT;

    while (result != 0 && trd_packs_next(packs, hash, hash_len, &at, &read.from)) {
        int rc = trd_packs_get(store, &read, 1);

        rc = rc < 0 ? rc : read.rc;
        if (rc == 0) {
            *ret = read.data;
            *ret_len = entry_of(&read)->len;
        } else if (rc == -ENOENT) {
            expect_changes(catalog, read.from.pack);
        }
        result = worse(result, rc);
    }
    return result;
}

int trd_catalog_get(struct trd_catalog *catalog, struct kvs_store *store, const void *hash,
                    size_t hash_len, void **ret, size_t *ret_len)
{
    struct trd_packs *packs;
    int rc = trd_catalog_begin(catalog, store);

    if (rc < 0)
        return rc;
    packs = trd_catalog_hold(catalog);
    if (!packs)
        return -ENOENT;
    rc = get_from(catalog, store, packs, hash, hash_len, ret, ret_len);
    trd_packs_release(packs);
    return rc;
}

/* Read the first place of each blob, all together; @at: which of the batch each is. */
static int get_first(struct kvs_store *store, const struct trd_packs *packs, const uint8_t *hashes,
                     size_t hash_len, size_t n, struct trd_packed_read *reads, size_t *at)
{
    size_t n_reads = 0;
    int rc;

    for (size_t i = 0; i < n; i++) {
        size_t step = 0;

        if (!trd_packs_next(packs, hashes + i * hash_len, hash_len, &step, &reads[n_reads].from))
            continue;
        at[n_reads++] = i;
    }
    rc = trd_packs_get(store, reads, n_reads);
    return rc < 0 ? rc : (int)n_reads;
}

int trd_catalog_get_many(struct trd_catalog *catalog, struct kvs_store *store,
                         const uint8_t *hashes, size_t hash_len, size_t n, void **data, size_t *len,
                         uint8_t *ret_state)
{
    struct trd_packs *packs = NULL;
    struct trd_packed_read *reads = NULL;
    size_t *at = NULL;
    int rc = trd_catalog_begin(catalog, store), error = 0;

    memset(ret_state, KVS_MISSING, n);
    if (rc < 0 || !(packs = trd_catalog_hold(catalog)))
        return rc;
    reads = calloc(n + 1, sizeof(*reads));
    at = calloc(n + 1, sizeof(*at));
    rc = reads && at ? get_first(store, packs, hashes, hash_len, n, reads, at) : -ENOMEM;
    for (int i = 0; i < rc; i++) {
        size_t k = at[i];

        if (reads[i].rc == 0) {
            data[k] = reads[i].data;
            len[k] = entry_of(&reads[i])->len;
        } else { /* another pack may have it */
            reads[i].rc =
                get_from(catalog, store, packs, hashes + k * hash_len, hash_len, &data[k], &len[k]);
        }
        ret_state[k] = reads[i].rc == 0          ? KVS_THERE
                       : reads[i].rc == -EBADMSG ? KVS_DAMAGED
                       : reads[i].rc == -ENOENT  ? KVS_MISSING
                                                 : KVS_UNKNOWN;
        if (kvs_is_outage(reads[i].rc))
            error = reads[i].rc;
    }
    for (size_t i = 0; error && i < n; i++)
        if (ret_state[i] == KVS_THERE)
            free(KV_STEAL(data[i]));
    trd_packs_release(packs);
    free(reads);
    free(at);
    return rc < 0 ? rc : error;
}

/* -- looks, touches, deletions ----------------------------------------------------------------- */

int trd_catalog_look(struct trd_catalog *catalog, struct kvs_store *store, uint64_t max_age_ns,
                     const uint8_t *hashes, size_t hash_len, size_t n, uint8_t *ret_state)
{
    struct trd_packs *packs = NULL;
    struct trd_packed place;
    int rc = trd_may_have_packs(catalog) ? trd_catalog_read(catalog, store, max_age_ns, NULL) : 0;

    memset(ret_state, KVS_MISSING, n);
    if (rc < 0 || !(packs = trd_catalog_hold(catalog)))
        return rc;
    for (size_t i = 0; i < n; i++) {
        size_t at = 0;

        if (trd_packs_next(packs, hashes + i * hash_len, hash_len, &at, &place))
            ret_state[i] = KVS_THERE;
    }
    trd_packs_release(packs);
    return 0;
}

int trd_catalog_touch(struct trd_catalog *catalog, struct kvs_store *store, const uint8_t *hashes,
                      size_t hash_len, size_t n)
{
    struct trd_packs *packs = trd_catalog_hold(catalog);
    struct trd_pack *last = NULL;
    struct trd_packed place;
    int rc = 0;

    for (size_t i = 0; packs && i < n && rc >= 0; i++) {
        uint8_t key[TRD_PACK_KEY];
        size_t at = 0;

        /* all packs that have it: a sweep may remove it from any but one of them */
        while (rc >= 0 && trd_packs_next(packs, hashes + i * hash_len, hash_len, &at, &place)) {
            if (place.pack == last)
                continue;
            last = place.pack; /* neighbours lie in one pack */
            trd_pack_key(last->name.id, key);
            rc = kvs_touch(store, key, sizeof(key), 1);
        }
    }
    trd_packs_release(packs);
    return KV_MIN(rc, 0);
}

/* True when the blob has these bytes there; NULL: any. */
static bool has_bytes(const struct trd_packed *place, const void *data, size_t len)
{
    const struct trd_pack_index *index = &place->pack->index;

    return !data || (index->entries[place->entry].len == len &&
                     trd_pack_entry_is(index, place->entry, data));
}

int trd_packed_delete(const struct trd_packed *place, struct kvs_store *store)
{
    char name[TRD_PACK_NAME];
    int rc;

    trd_gone_write_name(place->pack->name.id, place->entry, name);
    rc = kvs_put_manifest(store, name, "", 0);
    if (rc == 0)
        atomic_store_explicit(&place->pack->gone[place->entry], 1, memory_order_relaxed);
    return rc;
}

int trd_packs_delete(const struct trd_packs *packs, struct kvs_store *store, const void *hash,
                     size_t hash_len, const void *data, size_t len)
{
    struct trd_packed place;
    size_t at = 0;
    int n = 0, rc = 0;

    while (rc == 0 && packs && trd_packs_next(packs, hash, hash_len, &at, &place)) {
        if (!has_bytes(&place, data, len))
            continue;
        rc = trd_packed_delete(&place, store);
        n += rc == 0;
    }
    return rc < 0 ? rc : n;
}

int trd_catalog_delete(struct trd_catalog *catalog, struct kvs_store *store, const void *hash,
                       size_t hash_len, const void *data, size_t len)
{
    struct trd_packs *packs = NULL;
    int n, rc = trd_may_have_packs(catalog) ? trd_catalog_read(catalog, store, 0, NULL) : 0;

    if (rc < 0 || !(packs = trd_catalog_hold(catalog)))
        return rc;
    n = trd_packs_delete(packs, store, hash, hash_len, data, len);
    rc = n > 0 ? trd_write_mark(store) : n;
    trd_packs_release(packs);
    return rc < 0                   ? rc
           : trd_is_unsure(catalog) ? -EIO
                                    : n; /* a pack may have it that can't be read */
}
