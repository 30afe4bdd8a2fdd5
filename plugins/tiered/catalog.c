// SPDX-License-Identifier: Apache-2.0
#include "tiered/catalog.h"

#include <stdio.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/hash/hash.h"
#include "store/object/fetch.h"
#include "store/object/manifest.h"

enum { AT_ONCE = 16 }; /* indexes read by one call */

struct trd_pack_slot {
    uint64_t hash;
    uint32_t pack, entry;
};

/* -- life of packs ----------------------------------------------------------------------------- */

static void pack_release(struct trd_pack *pack)
{
    if (atomic_fetch_sub_explicit(&pack->refs, 1, memory_order_acq_rel) > 1)
        return;
    trd_pack_index_fini(&pack->index);
    pthread_mutex_destroy(&pack->lock);
    free((void *)pack->gone);
    free(pack);
}

void trd_packs_release(struct trd_packs *packs)
{
    if (!packs || atomic_fetch_sub_explicit(&packs->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (size_t i = 0; i < packs->n; i++)
        pack_release(packs->of[i]);
    free(packs->of);
    free(packs->slots);
    free(packs);
}

struct trd_packs *trd_catalog_hold(struct trd_catalog *catalog)
{
    struct trd_packs *packs;

    if (!trd_has_packs(catalog))
        return NULL;
    pthread_mutex_lock(&catalog->lock);
    packs = catalog->packs;
    if (packs)
        atomic_fetch_add_explicit(&packs->refs, 1, memory_order_relaxed);
    pthread_mutex_unlock(&catalog->lock);
    return packs;
}

void trd_catalog_init(struct trd_catalog *catalog)
{
    *catalog = (struct trd_catalog){.state = TRD_UNREAD};
    pthread_mutex_init(&catalog->lock, NULL);
    pthread_mutex_init(&catalog->reading, NULL);
}

void trd_catalog_fini(struct trd_catalog *catalog)
{
    trd_packs_release(catalog->packs);
    pthread_mutex_destroy(&catalog->lock);
    pthread_mutex_destroy(&catalog->reading);
}

/* -- the table --------------------------------------------------------------------------------- */

static uint64_t hash_of(const void *key, size_t key_len)
{
    return XXH3_64bits(key, key_len);
}

static int make_table(struct trd_packs *packs)
{
    packs->n_slots = 16;
    while (packs->n_slots < 2 * packs->n_entries)
        packs->n_slots *= 2;
    packs->slots = malloc(packs->n_slots * sizeof(*packs->slots));
    if (!packs->slots)
        return -ENOMEM;
    for (size_t i = 0; i < packs->n_slots; i++)
        packs->slots[i].pack = UINT32_MAX;
    for (uint32_t p = 0; p < packs->n; p++)
        for (uint32_t e = 0; e < packs->of[p]->index.n; e++) {
            size_t len, at;
            const uint8_t *key = trd_pack_entry_key(&packs->of[p]->index, e, &len);
            uint64_t hash = hash_of(key, len);

            for (at = hash & (packs->n_slots - 1); packs->slots[at].pack != UINT32_MAX;)
                at = (at + 1) & (packs->n_slots - 1);
            packs->slots[at] = (struct trd_pack_slot){hash, p, e};
        }
    return 0;
}

bool trd_packs_next(const struct trd_packs *packs, const void *hash, size_t hash_len, size_t *at,
                    struct trd_packed *ret)
{
    uint64_t want = hash_of(hash, hash_len);

    for (;; ++*at) {
        const struct trd_pack_slot *slot = &packs->slots[(want + *at) & (packs->n_slots - 1)];
        const uint8_t *key;
        size_t len;

        if (slot->pack == UINT32_MAX)
            return false;
        if (slot->hash != want)
            continue;
        ret->pack = packs->of[slot->pack];
        ret->entry = slot->entry;
        key = trd_pack_entry_key(&ret->pack->index, slot->entry, &len);
        if (len != hash_len || memcmp(key, hash, len) != 0 ||
            atomic_load_explicit(&ret->pack->gone[slot->entry], memory_order_relaxed))
            continue;
        ++*at;
        return true;
    }
}

/* -- reading the member ------------------------------------------------------------------------ */

/* Names of packs that a listing of the member's manifests has. */
struct found {
    struct kv_buf packs; /* struct trd_pack_name */
    struct kv_buf gone;  /* struct gone */
};

struct gone {
    uint8_t id[TRD_PACK_ID];
    uint32_t entry;
};

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct found *found = arg;
    struct trd_pack_name pack = {.len = 0};
    struct gone gone = {.entry = 0};

    if (trd_pack_read_name(entry->name, &pack))
        kv_buf_append(&found->packs, &pack, sizeof(pack));
    else if (trd_gone_read_name(entry->name, gone.id, &gone.entry))
        kv_buf_append(&found->gone, &gone, sizeof(gone));
    return found->packs.error || found->gone.error ? -ENOMEM : 0;
}

/* Packs that a catalog lacks: damaged ones, and those that can't be read for now. */
struct lacks {
    bool damaged, unread;
};

static struct trd_pack *find_pack(const struct trd_packs *packs, const uint8_t id[TRD_PACK_ID])
{
    for (size_t i = 0; packs && i < packs->n; i++)
        if (memcmp(packs->of[i]->name.id, id, TRD_PACK_ID) == 0)
            return packs->of[i];
    return NULL;
}

static void say_bad(const struct kvs_store *store, const struct trd_pack_name *pack, int rc)
{
    static struct kv_log_rate rate;
    char name[TRD_PACK_NAME];

    trd_pack_write_name(pack, name);
    if (kv_log_allowed(&rate, 10))
        kv_log_error("tiered", "a pack's index can't be read: its blobs can't be had",
                     "store=%s pack=%s error=\"%s\"", store->label, name, strerror(-rc));
}

/* Make a pack of its tail, which it takes. */
static int make_pack(const struct trd_pack_name *name, uint8_t *tail, const char *tag,
                     struct trd_pack **ret)
{
    struct trd_pack *pack = calloc(1, sizeof(*pack));
    int rc;

    if (!pack) {
        free(tail);
        return -ENOMEM;
    }
    rc = trd_pack_index_read(name, tail, &pack->index);
    if (rc == 0) {
        pack->gone = calloc(pack->index.n + (size_t)1, 1);
        rc = pack->gone ? 0 : -ENOMEM;
    }
    if (rc < 0) {
        trd_pack_index_fini(&pack->index);
        free(pack);
        return rc;
    }
    pack->refs = 1;
    pack->name = *name;
    memcpy(pack->tag, tag, sizeof(pack->tag));
    pthread_mutex_init(&pack->lock, NULL);
    *ret = pack;
    return 0;
}

/*
 * Read the indexes of at most AT_ONCE packs. rc_each[i] becomes 0; -ENOENT: the pack is gone by now;
 * -EBADMSG, -EPROTO, -ERANGE: it is damaged; an error of the member.
 */
static int read_tails(struct kvs_store *store, const struct trd_pack_name *const *names, size_t n,
                      struct trd_pack **ret, int *rc_each)
{
    kv_store_range ranges[AT_ONCE] = {{.hash = NULL}};
    struct iovec parts[AT_ONCE];
    uint8_t keys[AT_ONCE][TRD_PACK_KEY];
    int rc = 0;

    for (size_t i = 0; i < n; i++) {
        trd_pack_key(names[i]->id, keys[i]);
        ranges[i] = (kv_store_range){.hash = keys[i],
                                     .hash_len = TRD_PACK_KEY,
                                     .offset = names[i]->len - names[i]->tail_len,
                                     .len = names[i]->tail_len,
                                     .parts = &parts[i],
                                     .n_parts = 1};
        parts[i] = (struct iovec){malloc(names[i]->tail_len), names[i]->tail_len};
        rc = parts[i].iov_base ? rc : -ENOMEM;
    }
    if (rc == 0)
        rc = kvs_get_ranges(store, ranges, n);
    for (size_t i = 0; i < n; i++) {
        rc_each[i] = rc < 0 ? rc : ranges[i].rc;
        if (rc_each[i] == 0)
            rc_each[i] = make_pack(names[i], parts[i].iov_base, ranges[i].tag, &ret[i]);
        else
            free(parts[i].iov_base);
    }
    return KV_MIN(rc, 0);
}

static bool is_damage(int rc)
{
    return rc == -EBADMSG || rc == -EPROTO || rc == -ERANGE;
}

/* Read an index that looked damaged once more: one bad read is no proof. */
static int read_again(struct kvs_store *store, const struct trd_pack_name *name,
                      struct trd_pack **ret)
{
    int rc_each = 0, rc = read_tails(store, &name, 1, ret, &rc_each);

    return rc < 0 ? rc : rc_each;
}

/* An error of one pack: the other packs, and the member, may be sound. */
static bool is_of_one(int rc)
{
    return !kvs_is_outage(rc) && rc != -ENOMEM && rc != -EINVAL && rc != -ECHILD && rc != -ENOTSUP;
}

/* Read the packs of @names, and add them to @packs, which has room. */
static int add_new(struct kvs_store *store, const struct trd_pack_name *const *names, size_t n,
                   struct trd_packs *packs, struct lacks *ret_lacks)
{
    struct trd_pack *made[AT_ONCE] = {NULL};
    int rc_each[AT_ONCE] = {0}, rc = read_tails(store, names, n, made, rc_each);

    for (size_t i = 0; i < n; i++) {
        if (is_damage(rc_each[i]))
            rc_each[i] = read_again(store, names[i], &made[i]);
        if (rc_each[i] == 0) {
            packs->of[packs->n++] = made[i];
            packs->n_entries += made[i]->index.n;
        } else if (is_damage(rc_each[i])) {
            say_bad(store, names[i], rc_each[i]);
            ret_lacks->damaged = true;
        } else if (rc_each[i] != -ENOENT && is_of_one(rc_each[i])) {
            say_bad(store, names[i], rc_each[i]);
            ret_lacks->unread = true;
        } else if (rc_each[i] != -ENOENT && rc == 0) { /* -ENOENT: deleted since the listing */
            rc = rc_each[i];
        }
    }
    return rc;
}

/* Put together what is known already and what is new. */
static int gather(struct kvs_store *store, const struct found *found, const struct trd_packs *old,
                  struct trd_packs *packs, struct lacks *ret_lacks)
{
    const struct trd_pack_name *all = (const struct trd_pack_name *)(void *)found->packs.data;
    const struct gone *gone = (const struct gone *)(void *)found->gone.data;
    const struct trd_pack_name *fresh[AT_ONCE];
    size_t n = found->packs.len / sizeof(*all), n_fresh = 0;
    int rc = 0;

    packs->of = calloc(n + 1, sizeof(*packs->of));
    if (!packs->of)
        return -ENOMEM;
    for (size_t i = 0; i < n && rc == 0; i++) {
        struct trd_pack *known = find_pack(old, all[i].id);

        if (known && !atomic_load(&known->missing)) {
            atomic_fetch_add_explicit(&known->refs, 1, memory_order_relaxed);
            packs->of[packs->n++] = known;
            packs->n_entries += known->index.n;
        } else {
            fresh[n_fresh++] = &all[i];
        }
        if (n_fresh == AT_ONCE || (n_fresh && i + 1 == n)) {
            rc = add_new(store, fresh, n_fresh, packs, ret_lacks);
            n_fresh = 0;
        }
        if (rc == 0 && packs->n_entries > 2 * TRD_PACKED_MAX)
            rc = -EFBIG;
    }
    if (rc == 0 && n_fresh)
        rc = add_new(store, fresh, n_fresh, packs, ret_lacks);
    for (size_t i = 0; i < found->gone.len / sizeof(*gone); i++) {
        struct trd_pack *pack = find_pack(packs, gone[i].id);

        if (pack && gone[i].entry < pack->index.n)
            atomic_store_explicit(&pack->gone[gone[i].entry], 1, memory_order_relaxed);
    }
    return rc < 0 ? rc : make_table(packs);
}

/* List the member's packs and read the indexes of new ones. With `reading` held. */
static int reload(struct trd_catalog *catalog, struct kvs_store *store)
{
    struct found found = {KV_BUF_INIT, KV_BUF_INIT};
    struct trd_packs *packs = calloc(1, sizeof(*packs)), *old = catalog->packs;
    struct lacks lacks = {false, false};
    int rc = packs ? kvs_list(store, note_name, &found) : -ENOMEM;

    if (packs)
        packs->refs = 1;
    if (rc == 0)
        rc = gather(store, &found, old, packs, &lacks);
    kv_buf_fini(&found.packs);
    kv_buf_fini(&found.gone);
    if (rc < 0) {
        trd_packs_release(packs);
        return rc;
    }
    atomic_store(&catalog->stale, lacks.damaged || lacks.unread);
    atomic_store_explicit(&catalog->unsure, lacks.unread, memory_order_release);
    pthread_mutex_lock(&catalog->lock);
    catalog->packs = packs;
    pthread_mutex_unlock(&catalog->lock);
    trd_packs_release(old);
    /* with trd_has_packs */
    atomic_store_explicit(&catalog->state, packs->n ? TRD_PACKS : TRD_NO_PACKS,
                          memory_order_release);
    return 0;
}

/* Read the mark, as a checksum. Returns 0 with *@ret_has. */
static int read_mark(struct kvs_store *store, uint8_t ret[TRD_MARK_LEN], bool *ret_has)
{
    void *data;
    size_t len;
    int rc = kvs_get_manifest(store, TRD_MARK, &data, &len);

    memset(ret, 0, TRD_MARK_LEN);
    *ret_has = rc == 0;
    if (rc == -ENOENT)
        return 0;
    if (rc < 0)
        return rc;
    kv_hash(data, len, ret);
    free(data);
    return 0;
}

int trd_write_random(struct kvs_store *store, const char *name)
{
    char text[2 * TRD_MARK_LEN + 1];
    struct kvs_manifest mark = {.format = KVS_FORMAT_BYTES, .fingerprint = text};
    struct kv_buf bytes = KV_BUF_INIT;
    uint8_t number[TRD_MARK_LEN];
    int rc;

    if (getrandom(number, sizeof(number), 0) != (ssize_t)sizeof(number))
        return -EIO;
    for (size_t i = 0; i < sizeof(number); i++)
        snprintf(text + 2 * i, 3, "%02x", number[i]);
    rc = kvs_manifest_encode(&mark, &bytes);
    if (rc == 0)
        rc = kvs_put_manifest(store, name, bytes.data, bytes.len);
    kv_buf_fini(&bytes);
    return rc;
}

int trd_write_mark(struct kvs_store *store)
{
    return trd_write_random(store, TRD_MARK);
}

/* With `reading` held. */
static int read_changes(struct trd_catalog *catalog, struct kvs_store *store, bool *ret_changed)
{
    uint64_t begin = kv_now_ns();
    uint8_t mark[TRD_MARK_LEN];
    bool has, same;
    int rc = read_mark(store, mark, &has);

    if (rc < 0)
        return rc;
    same = atomic_load(&catalog->state) != TRD_UNREAD && has == atomic_load(&catalog->has_mark) &&
           memcmp(mark, catalog->mark, sizeof(mark)) == 0 && !atomic_load(&catalog->stale);
    if (!same && has) {
        rc = reload(catalog, store);
    } else if (!same) {
        atomic_store_explicit(&catalog->state, TRD_NO_PACKS, memory_order_release);
        atomic_store(&catalog->stale, false);
        atomic_store_explicit(&catalog->unsure, false, memory_order_release);
    }
    if (rc < 0)
        return rc;
    *ret_changed |= !same;
    atomic_store(&catalog->has_mark, has);
    memcpy(catalog->mark, mark, sizeof(mark));
    atomic_store_explicit(&catalog->checked_ns, begin, memory_order_release);
    return 0;
}

static bool is_young(struct trd_catalog *catalog, uint64_t max_age_ns)
{
    uint64_t checked = atomic_load_explicit(&catalog->checked_ns, memory_order_acquire);

    return checked && max_age_ns && kv_now_ns() - checked <= max_age_ns;
}

int trd_catalog_read(struct trd_catalog *catalog, struct kvs_store *store, uint64_t max_age_ns,
                     bool *ret_changed)
{
    bool changed = false;
    int rc = 0;

    if (atomic_load(&catalog->state) == TRD_CANT || is_young(catalog, max_age_ns))
        return 0;
    if (!store->ext.get_ranges || !store->ext.list_manifests) {
        atomic_store(&catalog->state, TRD_CANT);
        return 0;
    }
    pthread_mutex_lock(&catalog->reading);
    if (!is_young(catalog, max_age_ns)) /* another thread may have read it meanwhile */
        rc = read_changes(catalog, store, &changed);
    pthread_mutex_unlock(&catalog->reading);
    if (ret_changed)
        *ret_changed |= changed;
    return rc;
}

int trd_catalog_begin(struct trd_catalog *catalog, struct kvs_store *store)
{
    if (KV_LIKELY(atomic_load_explicit(&catalog->state, memory_order_acquire) != TRD_UNREAD))
        return 0;
    return trd_catalog_read(catalog, store, UINT64_MAX, NULL);
}
