// SPDX-License-Identifier: Apache-2.0
/* Listings, collection and statistics over all members. */
#include "base/core/log.h"
#include "tiered/pack_sweep.h"
#include "tiered/store.h"

struct listing {
    kv_store_each_fn each; /* the caller's */
    void *arg;
    struct trd_keys *seen; /* chunks listed already; NULL: there is one member */
    int stopped;
};

/* List one member. A listing that the caller ended says nothing about the member. */
static int list_at(struct trd_member *member, struct listing *l, kv_store_each_fn each, bool chunks)
{
    struct trd_use use;
    int rc;

    if (!trd_enter(member, &use))
        return -EIO;
    rc = chunks ? kvs_list_chunks(use.store, each, l) : kvs_list(use.store, each, l);
    trd_leave(member, use, l->stopped ? 0 : rc);
    return l->stopped ? l->stopped : rc;
}

static int give_manifest(void *arg, const kv_store_entry *entry)
{
    struct listing *l = arg;
    kv_store_entry shown = *entry;

    if (strncmp(entry->name, TRD_OWN_NAMES, strlen(TRD_OWN_NAMES)) == 0)
        return 0;
    shown.len = UINT64_MAX; /* the manifest may be wrapped */
    return l->stopped = l->each(l->arg, &shown);
}

int trd_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct listing l = {.each = each, .arg = arg};
    int rc = list_at(&self->members[self->config.manifests], &l, give_manifest, false);

    return l.stopped ? l.stopped : trd_done(self, rc);
}

static int give_chunk(void *arg, const kv_store_entry *entry)
{
    struct listing *l = arg;
    int rc = 0;

    if (!trd_is_pack_key(entry->hash, entry->hash_len))
        rc = l->seen ? trd_keys_add(l->seen, entry->hash, entry->hash_len) : 1;

    if (rc != 1)
        return l->stopped = rc;
    return l->stopped = l->each(l->arg, entry);
}

/* List what lies in a member's packs. Called after all single blobs: one that is packed meanwhile is seen
 * here. */
static int list_packs(struct trd_member *member, struct listing *l)
{
    struct trd_packs *packs;
    struct trd_use use;
    int rc = 0;

    if (!trd_enter(member, &use) ||
        trd_leave(member, use, trd_catalog_read(&member->catalog, use.store, 0, NULL)) < 0)
        return -EIO;
    if (trd_is_unsure(&member->catalog))
        return -EIO;
    packs = trd_catalog_hold(&member->catalog);
    for (size_t i = 0; packs && i < packs->n && rc == 0; i++) {
        const struct trd_pack *pack = packs->of[i];

        for (uint32_t k = 0; k < pack->index.n && rc == 0; k++) {
            kv_store_entry entry = {.size = sizeof(entry), .len = pack->index.entries[k].len};

            entry.hash = trd_pack_entry_key(&pack->index, k, &entry.hash_len);
            if (!atomic_load_explicit(&pack->gone[k], memory_order_relaxed))
                rc = give_chunk(l, &entry);
        }
    }
    trd_packs_release(packs);
    return rc;
}

int trd_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct trd_keys seen = {0};
    struct listing l = {.each = each, .arg = arg, .seen = &seen};
    int rc = 0;

    for (size_t i = 0; i < self->n_members && rc == 0; i++)
        rc = list_at(&self->members[i], &l, give_chunk, true);
    for (size_t i = 0; i < self->n_members && rc == 0; i++)
        rc = list_packs(&self->members[i], &l);
    trd_keys_fini(&seen);
    return l.stopped ? l.stopped : trd_done(self, rc);
}

/* -- sweep ------------------------------------------------------------------------------------- */

static int count_one(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(uint64_t *)arg;
    return 0;
}

/* Chunks that a member's sweep keeps: those the caller names, and published packs. */
struct keep {
    kv_store_live_fn live;
    void *arg;
    const struct trd_keys *packs;
};

static int is_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    const struct keep *keep = arg;

    return trd_is_pack_key(hash, hash_len) ? trd_keys_has(keep->packs, hash, hash_len)
                                           : keep->live(keep->arg, hash, hash_len);
}

/* Sweep a member's single blobs, half-written packs among them, then its packs. */
static int sweep_member(struct trd_member *member, struct kvs_store *store, uint64_t linger_ns,
                        uint64_t min_age_s, const struct keep *caller, kv_store_swept *swept)
{
    struct trd_keys packs = {0};
    struct keep keep = {caller->live, caller->arg, &packs};
    int rc = store->ext.sweep_chunks ? 0 : -ENOTSUP;

    if (rc == 0)
        rc = trd_published_packs(store, &packs);
    if (rc == 0)
        rc = store->ext.sweep_chunks(store->backend, min_age_s, is_live, &keep, swept);
    if (rc == 0 && packs.n) {
        swept->kept -= KV_MIN(swept->kept, (uint64_t)packs.n);
        rc =
            trd_sweep_packs(member->config, linger_ns, min_age_s, caller->live, caller->arg, swept);
    }
    trd_keys_fini(&packs);
    return rc;
}

/* Sweep one member, and add to @sums. */
static void sweep_at(struct trd_member *member, uint64_t linger_ns, uint64_t min_age_s,
                     const struct keep *caller, kv_store_swept *sums)
{
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_use use;
    int rc = -EHOSTDOWN;

    if (trd_enter(member, &use)) {
        rc = sweep_member(member, use.store, linger_ns, min_age_s, caller, &swept);
        trd_leave(member, use, rc);
    }
    if (rc < 0) {
        kv_log_error("tiered", "a member wasn't swept", "member=%s error=\"%s\"",
                     member->config->name, strerror(-rc));
        sums->errors++;
        return;
    }
    sums->kept += swept.kept;
    sums->deleted += swept.deleted;
    sums->deleted_bytes += swept.deleted_bytes;
    sums->errors += swept.errors;
}

int trd_sweep(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
              kv_store_swept *ret)
{
    const struct keep caller = {.live = live, .arg = arg};
    kv_store_swept sums = {.size = ret->size};
    unsigned with = 0;
    uint64_t n = 0;

    for (size_t i = 0; i < self->n_members; i++) {
        uint64_t before = sums.kept;

        if (!self->members[i].config->read_only)
            sweep_at(&self->members[i], self->linger_ns, min_age_s, &caller, &sums);
        with += sums.kept > before;
    }
    /* Count once the chunks that two members have kept. */
    if (with > 1 && trd_list_chunks(self, count_one, &n) == 0)
        sums.kept = KV_MIN(sums.kept, n);
    memcpy(ret, &sums, KV_MIN(ret->size, sizeof(sums)));
    return 0;
}

/* -- statistics -------------------------------------------------------------------------------- */

static uint64_t add(uint64_t sum, uint64_t more)
{
    return sum == UINT64_MAX || more == UINT64_MAX ? UINT64_MAX : sum + more;
}

/* True when packs make the number of chunks another than what the member tells. */
static bool any_packs(kv_store_v1 *self)
{
    bool any = false;

    for (size_t i = 0; i < self->n_members; i++)
        any |= trd_has_packs(&self->members[i].catalog);
    return any;
}

/* Add what a member tells. Without its answer the totals are unknown. */
static void add_member(struct trd_member *member, kv_store_stats *sums)
{
    kv_store_stats stats = {.size = sizeof(stats)};
    struct trd_use use;
    int rc = -EHOSTDOWN;

    if (trd_enter(member, &use))
        rc = trd_leave(member, use, kvs_stats(use.store, &stats));
    if (rc < 0)
        stats = (kv_store_stats){
            .n_chunks = UINT64_MAX, .n_manifests = UINT64_MAX, .bytes = UINT64_MAX};
    sums->n_chunks = add(sums->n_chunks, stats.n_chunks);
    sums->n_manifests = add(sums->n_manifests, stats.n_manifests);
    sums->bytes = add(sums->bytes, stats.bytes);
    sums->evicted += stats.evicted;
    sums->bytes_written += stats.bytes_written;
    sums->bytes_read += stats.bytes_read;
    sums->round_trips += stats.round_trips;
}

int trd_stats(kv_store_v1 *self, kv_store_stats *ret)
{
    kv_store_stats sums = {.size = ret->size};

    for (size_t i = 0; i < self->n_members; i++)
        add_member(&self->members[i], &sums);
    if (self->n_members > 1 ||
        any_packs(self)) /* copies count once, and companions don't: a listing tells */
        sums.n_chunks = sums.n_manifests = UINT64_MAX;
    sums.puts = atomic_load_explicit(&self->puts, memory_order_relaxed);
    sums.put_hits = atomic_load_explicit(&self->put_hits, memory_order_relaxed);
    sums.gets = atomic_load_explicit(&self->gets, memory_order_relaxed);
    sums.get_misses = atomic_load_explicit(&self->get_misses, memory_order_relaxed);
    sums.bad_chunks = atomic_load_explicit(&self->bad_chunks, memory_order_relaxed);
    sums.errors = atomic_load_explicit(&self->errors, memory_order_relaxed);
    memcpy(ret, &sums, KV_MIN(ret->size, sizeof(sums)));
    return 0;
}
