// SPDX-License-Identifier: Apache-2.0
/*
 * A dead blob of a pack may have become live since the caller read the manifests: a writer put or hit it.
 * Either there is a single blob with an age of its own. Or the packer has dropped that one, in favour of a
 * pack younger than an hour. So packs younger than the grace time keep all blobs.
 */
#include "tiered/pack_sweep.h"

#include "base/core/clock.h"
#include "base/core/log.h"
#include "tiered/bound.h"

/* -- which packs there are, and when they were used --------------------------------------------- */

static int note_pack(void *arg, const kv_store_entry *entry)
{
    struct trd_pack_name pack;
    uint8_t key[TRD_PACK_KEY];

    if (!trd_pack_read_name(entry->name, &pack))
        return 0;
    trd_pack_key(pack.id, key);
    return KV_MIN(trd_keys_add(arg, key, sizeof(key)), 0);
}

int trd_published_packs(struct kvs_store *store, struct trd_keys *ret)
{
    return store->ext.list_manifests ? kvs_list(store, note_pack, ret) : 0;
}

/* Packs that weren't used since. */
struct old_ones {
    struct trd_keys keys;
    uint64_t before_s;
};

static int note_old(void *arg, const kv_store_entry *entry)
{
    struct old_ones *old = arg;

    if (!trd_is_pack_key(entry->hash, entry->hash_len) || !entry->used_s ||
        entry->used_s > old->before_s)
        return 0;
    return KV_MIN(trd_keys_add(&old->keys, entry->hash, entry->hash_len), 0);
}

/* -- notes of deleted blobs whose pack is gone --------------------------------------------------- */

static int note_gone(void *arg, const kv_store_entry *entry)
{
    uint8_t id[TRD_PACK_ID];
    uint32_t i;

    if (trd_gone_read_name(entry->name, id, &i))
        kv_buf_append(arg, entry->name, strlen(entry->name) + 1);
    return ((struct kv_buf *)arg)->error;
}

/* A sweep that died may have left some. Notes are listed before packs: one of a pack that is published
 * meanwhile isn't among them. */
static int remove_orphans(struct kvs_store *store)
{
    struct kv_buf names = KV_BUF_INIT;
    struct trd_keys packs = {0};
    int rc = kvs_list(store, note_gone, &names);

    if (rc == 0 && names.len)
        rc = trd_published_packs(store, &packs);
    for (size_t at = 0; at < names.len && rc == 0; at += strlen(names.data + at) + 1) {
        uint8_t id[TRD_PACK_ID], key[TRD_PACK_KEY];
        uint32_t i;

        if (trd_gone_read_name(names.data + at, id, &i)) {
            trd_pack_key(id, key);
            if (!trd_keys_has(&packs, key, sizeof(key)))
                rc = kvs_delete_manifest(store, names.data + at);
        }
    }
    trd_keys_fini(&packs);
    kv_buf_fini(&names);
    return rc;
}

enum { TWINS = 64 /* read at once */ };

/* -- one pack ---------------------------------------------------------------------------------- */

/* A pack whose live blobs are in new ones. */
struct rewritten {
    struct trd_pack *pack;
    uint8_t *live; /* of each entry: it was copied */
};

struct sweep {
    struct trd_packing *p;
    const struct trd_packs *packs;
    kv_store_live_fn live;
    void *arg;
    kv_store_swept *swept;
    struct trd_filling filling; /* live blobs of packs that are rewritten */
    uint64_t created_s; /* new packs are at least so young: younger than all rewritten so far */
    struct trd_keys written; /* keys of the new packs */
    struct rewritten *rewritten;
    size_t n_rewritten;
    bool removed; /* some pack */
    int failed;   /* of writing a new pack, which has live blobs of `rewritten`: these stay */
};

/* Judgement of a sweep on an entry. */
enum fate {
    DEAD,
    LIVE,
    TWIN /* a younger pack has the blob, too: it is as good as dead here */
};

/* Blobs of a pack, weighed. */
struct weighed {
    uint8_t *live; /* enum fate of each entry */
    uint32_t n, twins;
    uint64_t bytes, live_bytes;
};

/* Order of packs, the same for all programs: by time, then id. A pack comes behind those it replaces. */
static bool is_younger(const struct trd_pack *a, const struct trd_pack *b)
{
    if (a->index.created_s != b->index.created_s)
        return a->index.created_s > b->index.created_s;
    return memcmp(a->name.id, b->name.id, TRD_PACK_ID) > 0;
}

static bool is_same(const struct trd_pack *a, uint32_t i, const struct trd_packed *b)
{
    const struct trd_pack_index *x = &a->index, *y = &b->pack->index;

    return x->entries[i].len == y->entries[b->entry].len &&
           trd_pack_entries_equal(x, i, y, b->entry);
}

/* Find the same blob in a younger pack. */
static bool find_twin(const struct sweep *s, const struct trd_pack *pack, uint32_t i,
                      struct trd_packed *ret)
{
    size_t len, at = 0;
    const uint8_t *key = trd_pack_entry_key(&pack->index, i, &len);

    while (trd_packs_next(s->packs, key, len, &at, ret))
        if (is_younger(ret->pack, pack) && is_same(pack, i, ret))
            return true;
    return false;
}

static void count_one(struct weighed *w, const struct trd_pack *pack, uint32_t i, enum fate fate)
{
    w->live[i] = (uint8_t)fate;
    w->n += fate == LIVE;
    w->twins += fate == TWIN;
    w->live_bytes += fate == LIVE ? pack->index.entries[i].len : 0;
}

static int weigh(const struct sweep *s, const struct trd_pack *pack, struct weighed *ret)
{
    const struct trd_pack_index *index = &pack->index;
    struct trd_packed twin;

    *ret = (struct weighed){.live = calloc(index->n + (size_t)1, 1)};
    if (!ret->live)
        return -ENOMEM;
    for (uint32_t i = 0; i < index->n; i++) {
        size_t len;
        const uint8_t *key = trd_pack_entry_key(index, i, &len);
        bool live = !atomic_load(&pack->gone[i]) && s->live(s->arg, key, len);

        count_one(ret, pack, i, !live ? DEAD : find_twin(s, pack, i, &twin) ? TWIN : LIVE);
        ret->bytes += index->entries[i].len;
    }
    return 0;
}

/* Before the sweep relies on twins it reads them: those that can't be read make their entries live again. */
static int read_twins(const struct sweep *s, const struct trd_pack *pack, struct weighed *w)
{
    struct trd_packed_read reads[TWINS];
    uint32_t at[TWINS], n = 0;
    int rc = 0;

    for (uint32_t i = 0; w->twins && i <= pack->index.n && rc == 0; i++) {
        if (i < pack->index.n && w->live[i] == TWIN && find_twin(s, pack, i, &reads[n].from))
            at[n++] = i;
        if (n < TWINS && i < pack->index.n)
            continue;
        rc = trd_packs_get(s->p->to, reads, n);
        for (uint32_t k = 0; k < n && rc == 0; k++) {
            free(reads[k].data);
            if (reads[k].rc == 0)
                continue;
            w->twins--;
            count_one(w, pack, at[k], LIVE);
        }
        n = 0;
    }
    return rc;
}

/* Publish the pack that is being filled, and begin the next. */
static int publish(struct sweep *s)
{
    uint8_t key[TRD_PACK_KEY];
    int rc;

    trd_pack_key(s->filling.builder.name.id, key);
    s->filling.created_s = s->created_s;
    rc = trd_keys_add(&s->written, key, sizeof(key));
    return s->failed = rc < 0 ? rc : trd_pack_publish(s->p, &s->filling);
}

/* Add a blob to the pack that is being filled; publish that first when it is full. */
static int add(struct sweep *s, const struct trd_pack_index *index, uint32_t i, const void *data)
{
    size_t key_len, len = index->entries[i].len;
    const uint8_t *key = trd_pack_entry_key(index, i, &key_len);
    int rc = 0;

    if ((s->filling.bytes && s->filling.bytes + len > s->p->max_bytes) ||
        trd_pack_is_full(&s->filling.builder, key_len))
        rc = publish(s);
    if (rc < 0)
        return rc;
    trd_pack_add(&s->filling.builder, key, key_len, data, len);
    s->filling.bytes += len;
    return s->filling.builder.bytes.error || s->filling.builder.entries.error ? -ENOMEM : 0;
}

/* Read the live blobs, and add them when all could be read. -EBADMSG: one couldn't. */
static int copy_live(struct sweep *s, struct trd_pack *pack, const struct weighed *w)
{
    struct trd_packed_read *reads = calloc(w->n + (size_t)1, sizeof(*reads));
    size_t n = 0;
    int rc = reads ? s->failed : -ENOMEM;

    s->created_s = KV_MAX(s->created_s, pack->index.created_s + 1);
    for (uint32_t i = 0; rc == 0 && i < pack->index.n; i++)
        if (w->live[i] == LIVE)
            reads[n++].from = (struct trd_packed){pack, i};
    if (rc == 0)
        rc = trd_packs_get(s->p->to, reads, n);
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = reads[i].rc;
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = add(s, &pack->index, reads[i].from.entry, reads[i].data);
    for (size_t i = 0; i < n; i++)
        free(reads[i].data);
    free(reads);
    return rc;
}

static bool is_poor(const struct weighed *w)
{
    return w->n == 0 || 2 * w->live_bytes < w->bytes;
}

static int sweep_pack(struct sweep *s, struct trd_pack *pack)
{
    struct weighed w;
    int rc = weigh(s, pack, &w);

    if (rc == 0 && is_poor(&w))
        rc = read_twins(s, pack, &w);
    if (rc == 0 && w.n == 0 && w.twins == 0) {
        rc = trd_pack_remove(s->p, pack);
        s->removed = true;
    } else if (rc == 0 && is_poor(&w)) {
        if (s->p->pay && !s->p->pay(s->p->arg, w.n, w.live_bytes))
            rc = -ECANCELED;
        rc = rc < 0 ? rc : copy_live(s, pack, &w);
        if (rc == 0) {
            s->rewritten[s->n_rewritten++] = (struct rewritten){pack, w.live};
            w.live = NULL; /* end_rewriting needs it */
        }
    } else if (rc == 0) {
        w.n = pack->index.n; /* its dead blobs stay */
        w.live_bytes = w.bytes;
    }
    if (rc == 0) {
        s->swept->kept += w.n;
        s->swept->deleted += pack->index.n - w.n;
        s->swept->deleted_bytes += w.bytes - w.live_bytes;
    } else if (rc != -ENOMEM && rc != -ECANCELED) { /* it stays */
        kv_log_error("tiered", "a pack wasn't swept", "store=%s error=\"%s\"", s->p->to->label,
                     strerror(-rc));
        s->swept->kept += pack->index.n;
        s->swept->errors++;
    }
    free(w.live);
    return rc == -ENOMEM || rc == -ECANCELED ? rc : 0;
}

/* -- all packs --------------------------------------------------------------------------------- */

/* Note a blob as deleted in this sweep's packs. Others' may have it since it was put anew: it stays there. */
static int delete_copies(struct sweep *s, const struct trd_packs *packs, const void *hash,
                         size_t hash_len)
{
    struct trd_packed place;
    size_t at = 0;
    int rc = 0;

    while (rc == 0 && packs && trd_packs_next(packs, hash, hash_len, &at, &place)) {
        uint8_t key[TRD_PACK_KEY];

        trd_pack_key(place.pack->name.id, key);
        if (trd_keys_has(&s->written, key, sizeof(key)))
            rc = trd_packed_delete(&place, s->p->to);
    }
    return rc;
}

/* A blob that was deleted from an old pack while it was copied goes from the new one, too. */
static int repeat_deletions(struct sweep *s, const struct trd_packs *packs,
                            const struct rewritten *old, bool *ret_any)
{
    const struct trd_pack *pack = old->pack;
    int rc = 0;

    for (uint32_t i = 0; i < pack->index.n && rc == 0; i++) {
        size_t len;
        const uint8_t *key = trd_pack_entry_key(&pack->index, i, &len);

        if (old->live[i] != LIVE || !atomic_load(&pack->gone[i]))
            continue;
        *ret_any = true;
        rc = trd_is_unsure(s->p->catalog) ? -EIO : delete_copies(s, packs, key, len);
    }
    return rc;
}

/* Repeat the deletions of all old packs, by a catalog that was read now. */
static int repeat_all(struct sweep *s)
{
    int rc = trd_catalog_read(s->p->catalog, s->p->to, 0, NULL);
    struct trd_packs *packs = rc == 0 ? trd_catalog_hold(s->p->catalog) : NULL;
    bool any = false;

    for (size_t i = 0; i < s->n_rewritten && rc == 0; i++)
        rc = repeat_deletions(s, packs, &s->rewritten[i], &any);
    trd_packs_release(packs);
    return rc == 0 && any ? trd_write_mark(s->p->to) : rc;
}

/* Publish the rest, and remove the old packs when readers have had time to learn of the new ones. */
static int end_rewriting(struct sweep *s, uint64_t linger_ns)
{
    int rc = s->failed;

    if (rc == 0 && s->filling.builder.n)
        rc = publish(s);
    if (rc == 0 && s->n_rewritten) {
        rc = trd_packing_wait(s->p, linger_ns);
        rc = rc < 0 ? rc : repeat_all(s);
    }
    for (size_t i = 0; i < s->n_rewritten && rc == 0; i++)
        rc = trd_pack_remove(s->p, s->rewritten[i].pack);
    return rc == 0 && (s->removed || s->n_rewritten) ? trd_write_mark(s->p->to) : rc;
}

/* @old: keys of the packs to sweep; NULL: all. */
static int sweep_all(struct sweep *s, const struct trd_packs *packs, const struct trd_keys *old,
                     uint64_t linger_ns)
{
    int rc = trd_pack_begin(&s->filling.builder);

    s->packs = packs;
    s->rewritten = calloc(packs->n + 1, sizeof(*s->rewritten));
    rc = s->rewritten ? rc : -ENOMEM;
    for (size_t i = 0; i < packs->n && rc == 0; i++) {
        uint8_t key[TRD_PACK_KEY];

        trd_pack_key(packs->of[i]->name.id, key);
        if (!old || trd_keys_has(old, key, sizeof(key)))
            rc = sweep_pack(s, packs->of[i]);
        else
            s->swept->kept += packs->of[i]->index.n;
    }
    if (rc == 0)
        rc = end_rewriting(s, linger_ns);
    trd_pack_builder_fini(&s->filling.builder);
    trd_keys_fini(&s->written);
    for (size_t i = 0; i < s->n_rewritten; i++)
        free(s->rewritten[i].live);
    free(s->rewritten);
    return rc;
}

int trd_sweep_packs_of(struct trd_packing *p, uint64_t linger_ns, uint64_t min_age_s,
                       kv_store_live_fn live, void *arg, kv_store_swept *swept)
{
    struct sweep s = {.p = p, .live = live, .arg = arg, .swept = swept};
    uint64_t now_s = kv_wall_ns() / KV_NS_PER_S;
    struct old_ones old = {.before_s = min_age_s ? now_s - KV_MIN(min_age_s, now_s) : UINT64_MAX};
    struct trd_packs *packs;
    int rc = kvs_list_chunks(p->to, note_old, &old);

    if (rc == 0)
        rc = trd_catalog_read(p->catalog, p->to, 0, NULL);
    packs = rc == 0 ? trd_catalog_hold(p->catalog) : NULL;
    if (packs)
        rc = sweep_all(&s, packs, &old.keys, linger_ns);
    trd_packs_release(packs);
    trd_keys_fini(&old.keys);
    return rc == 0 ? remove_orphans(p->to) : rc;
}

static int all_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    (void)arg;
    (void)hash;
    (void)hash_len;
    return 1;
}

int trd_rewrite_packs(struct trd_packing *p, uint64_t linger_ns, kv_store_swept *swept)
{
    struct sweep s = {.p = p, .live = all_live, .swept = swept};
    struct trd_packs *packs;
    int rc = trd_catalog_read(p->catalog, p->to, 0, NULL);

    packs = rc == 0 ? trd_catalog_hold(p->catalog) : NULL;
    if (packs)
        rc = sweep_all(&s, packs, NULL, linger_ns);
    trd_packs_release(packs);
    return rc == 0 ? remove_orphans(p->to) : rc;
}

void trd_weigh_packs(const struct trd_packs *packs, struct trd_weight *ret)
{
    const struct sweep s = {.packs = packs, .live = all_live};

    *ret = (struct trd_weight){.packs = packs ? packs->n : 0};
    for (size_t i = 0; packs && i < packs->n; i++) {
        struct weighed w;

        if (weigh(&s, packs->of[i], &w) == 0) {
            ret->blobs += w.n;
            ret->bytes += w.live_bytes;
            ret->poor += is_poor(&w);
            ret->poor_bytes += is_poor(&w) ? w.live_bytes : 0;
        }
        free(w.live);
    }
}

int trd_sweep_packs(const struct trd_member_config *member, uint64_t linger_ns, uint64_t min_age_s,
                    kv_store_live_fn live, void *arg, kv_store_swept *swept)
{
    struct kvs_store *store = NULL;
    struct trd_bound *bound = NULL;
    struct trd_packing p;
    int rc = trd_open(member->uri, true, member->deadline_ms, &bound, &store);

    if (rc == 0) {
        kvs_publishes_by_hand(store);
        rc = trd_packing_init(&p, store, store);
        if (rc == 0)
            rc = trd_sweep_packs_of(&p, linger_ns, min_age_s, live, arg, swept);
        trd_packing_fini(&p);
    }
    kvs_close(store);
    trd_bound_destroy(bound);
    return rc;
}
