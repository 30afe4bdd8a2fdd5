// SPDX-License-Identifier: Apache-2.0
/*
 * Mark and sweep over a store that others keep saving to.
 *
 *   t0 ── mark: read all manifests, note what they name ── t1 ── sweep: delete what is not noted
 *                                                                and was not used for `grace`
 *
 * Why no published object loses a chunk. A saver that hits a chunk doesn't write it again. The
 * danger: mark misses the saver's manifest (published after t0), and sweep deletes the chunk. But
 * each put, and each hit, marks the chunk as used now. The sweep keeps chunks used within grace +
 * (now - t0), and checks the time again under the backend's lock before it deletes. So each deleted
 * chunk was last used before t0 - grace, by a save of one of two kinds. Either it had published by
 * t0, and mark read its manifest; or it had been running for longer than the grace period (a day,
 * by default). For such long saves a backend can pin the hits of live handles; the file store does,
 * and checks all hits again before it publishes.
 *
 * Live chunks are kept as hashes of their keys, 16 bytes each. Two keys with the same hash would
 * keep a dead chunk, never delete a live one.
 *
 * Chunks of prefix caches, told by their keys, have an age of their own. A backend's sweep knows one
 * age, so they get a second sweep, in which all other chunks count as alive.
 */
#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/hash/prefix_block.h"
#include "store/backend/store.h"

#define GRACE_S 86400
#define PREFIX_AGE_S (30 * UINT64_C(86400))

/* An open-addressed set of 128-bit hashes. {0, 0} is a free slot, and never a hash (see
 * mark_of). */
struct marks {
    XXH128_hash_t *slots;
    size_t n, capacity; /* a power of two, or 0 */
};

struct gc {
    struct kvs_store *store;
    struct marks live;
    char **names;
    size_t n_names;
    bool opaque_too, dry_run;
    bool blind; /* a manifest may need any chunk, so none may be deleted */
    bool canceled;
    kvs_gc_progress_fn progress;
    void *progress_arg;
    uint64_t n_weighed, n_chunks; /* progress of the sweep; n_chunks 0: the total is unknown */
    uint64_t grace_s, prefix_age_s, start_ns;
    uint64_t n_prefix;    /* chunks of prefix caches that a sweep came across */
    bool sweeps_prefixes; /* a second sweep of the backend, for them alone */
    struct kvs_gc_result result;

    /* dead chunks, collected before deletion where the backend has no sweep_chunks */
    uint8_t *dead;
    size_t dead_len, dead_room;
};

/* -- The set of live chunks -------------------------------------------------------------------- */

static XXH128_hash_t mark_of(const uint8_t *hash, size_t hash_len)
{
    XXH128_hash_t mark = XXH3_128bits(hash, hash_len);

    mark.low64 |= 1;
    return mark;
}

static XXH128_hash_t *slot_of(const struct marks *marks, XXH128_hash_t mark)
{
    size_t i = mark.high64 & (marks->capacity - 1);

    while (marks->slots[i].low64 != 0 && !XXH128_isEqual(marks->slots[i], mark))
        i = (i + 1) & (marks->capacity - 1);
    return &marks->slots[i];
}

static int grow(struct marks *marks)
{
    struct marks wider = {.n = marks->n, .capacity = marks->capacity ? 2 * marks->capacity : 1024};

    wider.slots = calloc(wider.capacity, sizeof(*wider.slots));
    if (!wider.slots)
        return -ENOMEM;
    for (size_t i = 0; i < marks->capacity; i++)
        if (marks->slots[i].low64 != 0)
            *slot_of(&wider, marks->slots[i]) = marks->slots[i];
    free(marks->slots);
    *marks = wider;
    return 0;
}

static int add(struct marks *marks, const uint8_t *hash, size_t hash_len)
{
    XXH128_hash_t mark = mark_of(hash, hash_len), *slot;

    if (2 * marks->n >= marks->capacity && grow(marks) < 0)
        return -ENOMEM;
    slot = slot_of(marks, mark);
    marks->n += slot->low64 == 0;
    *slot = mark;
    return 0;
}

static bool is_marked(const struct gc *gc, const uint8_t *hash, size_t hash_len)
{
    return gc->live.n > 0 && slot_of(&gc->live, mark_of(hash, hash_len))->low64 != 0;
}

/* Report progress. Returns 0, or -ECANCELED to stop, which sticks. */
static int tell(struct gc *gc, enum kvs_gc_phase phase, uint64_t done, uint64_t total)
{
    if (!gc->canceled && gc->progress)
        gc->canceled = gc->progress(gc->progress_arg, phase, done, total) != 0;
    return gc->canceled ? -ECANCELED : 0;
}

/* Liveness callback. A backend's sweep can't be stopped early, so after a cancellation every chunk
 * counts as alive. */
static int is_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    struct gc *gc = arg;
    bool prefix = kv_prefix_is_key(hash, hash_len);

    if (gc->sweeps_prefixes)
        return !prefix || tell(gc, KVS_GC_SWEEP, gc->n_weighed, gc->n_chunks) != 0 ||
               is_marked(gc, hash, hash_len);
    gc->n_prefix += prefix;
    return tell(gc, KVS_GC_SWEEP, ++gc->n_weighed, gc->n_chunks) != 0 || prefix ||
           is_marked(gc, hash, hash_len);
}

/* -- Mark -------------------------------------------------------------------------------------- */

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct gc *gc = arg;
    char **names;

    if (!entry->name)
        return 0;
    names = realloc(gc->names, (gc->n_names + 1) * sizeof(*names));
    if (!names)
        return -ENOMEM;
    gc->names = names;
    names[gc->n_names] = strdup(entry->name);
    if (!names[gc->n_names])
        return -ENOMEM;
    gc->n_names++;
    return 0;
}

static int mark_ref(void *arg, const kv_store_entry *entry)
{
    struct gc *gc = arg;

    return entry->hash ? add(&gc->live, entry->hash, entry->hash_len) : 0;
}

/* True when the manifest was deleted after it was listed. */
static bool is_gone(struct gc *gc, const char *name)
{
    struct kvs_manifest *manifest;
    int rc = kvs_manifest_get(gc->store, name, &manifest);

    if (rc == 0)
        kvs_manifest_free(manifest);
    return rc == -ENOENT;
}

/* Mark for a manifest of another format: all chunks that its savers put or hit, if the backend
 * noted them. */
static int mark_opaque(struct gc *gc, const char *name)
{
    char quoted[512];
    int rc;

    gc->result.opaque_manifests++;
    if (gc->opaque_too)
        return 0;
    rc = gc->store->ext.list_refs ? gc->store->ext.list_refs(gc->store->backend, name, mark_ref, gc)
                                  : -ENOENT;
    if (rc == -ENOENT && is_gone(gc, name))
        return 0;
    if (rc == -ENOENT || rc == -ENOTSUP) {
        if (!gc->blind)
            kv_log_warn("store", "nothing is deleted: the chunks of this manifest are unknown",
                        "name=%s", kv_log_quote(quoted, sizeof(quoted), name));
        gc->blind = true;
        return 0;
    }
    return KV_MIN(rc, 0);
}

static int mark_manifest(struct gc *gc, const char *name)
{
    struct kvs_manifest *manifest;
    const struct kvs_chunk_ref *chunks;
    char quoted[512];
    size_t n;
    int rc = kvs_manifest_get(gc->store, name, &manifest);

    if (rc == -ENOENT) /* deleted after it was listed */
        return 0;
    if (rc == -EMEDIUMTYPE)
        return mark_opaque(gc, name);
    if (rc < 0) {
        kv_log_error("store", "collection stopped: a manifest can't be read",
                     "name=%s error=\"%s\"", kv_log_quote(quoted, sizeof(quoted), name),
                     strerror(-rc));
        return rc;
    }
    chunks = kvs_manifest_chunks(manifest, &n);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = add(&gc->live, chunks[i].key, sizeof(chunks[i].key));
    kvs_manifest_free(manifest);
    return rc;
}

static int mark(struct gc *gc)
{
    int rc = kvs_list(gc->store, note_name, gc);

    for (size_t i = 0; i < gc->n_names && rc >= 0; i++) {
        rc = mark_manifest(gc, gc->names[i]);
        if (rc >= 0)
            rc = tell(gc, KVS_GC_MARK, i + 1, gc->n_names);
    }
    return KV_MIN(rc, 0);
}

/* -- Sweep ------------------------------------------------------------------------------------- */

/* Compute the age below which chunks stay: the grace period before the mark began. */
static uint64_t min_age_s(const struct gc *gc, bool prefix)
{
    uint64_t elapsed_ns = kv_now_ns() - gc->start_ns;
    uint64_t age_s = prefix ? gc->prefix_age_s : gc->grace_s;

    return age_s ? age_s + KV_MIN((elapsed_ns + KV_NS_PER_S - 1) / KV_NS_PER_S, UINT64_MAX - age_s)
                 : 0;
}

/* True when a chunk is within the grace period, by this machine's clock. Chunks of unknown age
 * count as young, unless there is no grace period. */
static bool is_young(const struct gc *gc, uint64_t used_s, bool prefix)
{
    uint64_t now_s = kv_wall_ns() / KV_NS_PER_S, age_s = min_age_s(gc, prefix);

    return age_s && (used_s == 0 || used_s > now_s || now_s - used_s < age_s);
}

static int remember(struct gc *gc, const kv_store_entry *entry)
{
    size_t need = gc->dead_len + sizeof(uint64_t) + 1 + entry->hash_len;
    uint64_t len = entry->len == UINT64_MAX ? 0 : entry->len;
    uint8_t *dead = gc->dead;

    if (entry->hash_len > UINT8_MAX)
        return 0;
    if (need > gc->dead_room) {
        dead = realloc(dead, 2 * need);
        if (!dead)
            return -ENOMEM;
        gc->dead = dead;
        gc->dead_room = 2 * need;
    }
    memcpy(dead + gc->dead_len, &len, sizeof(len));
    dead[gc->dead_len + sizeof(len)] = (uint8_t)entry->hash_len;
    memcpy(dead + gc->dead_len + sizeof(len) + 1, entry->hash, entry->hash_len);
    gc->dead_len = need;
    return 0;
}

/* Decide about one chunk of a listing. */
static int weigh(void *arg, const kv_store_entry *entry)
{
    struct gc *gc = arg;
    bool prefix;

    if (!entry->hash)
        return 0;
    if (tell(gc, KVS_GC_SWEEP, ++gc->n_weighed, gc->n_chunks))
        return -ECANCELED;
    prefix = kv_prefix_is_key(entry->hash, entry->hash_len);
    if (is_marked(gc, entry->hash, entry->hash_len) || is_young(gc, entry->used_s, prefix)) {
        gc->result.live_chunks++;
        return 0;
    }
    if (gc->dry_run) {
        gc->result.deleted_chunks++;
        gc->result.deleted_bytes += entry->len == UINT64_MAX ? 0 : entry->len;
        return 0;
    }
    return remember(gc, entry);
}

/* List, weigh and delete chunks one by one, for backends without sweep_chunks; only the grace
 * period protects running saves then. Also the dry run. */
static int sweep_by_list(struct gc *gc)
{
    int rc = kvs_list_chunks(gc->store, weigh, gc);

    for (size_t at = 0; at < gc->dead_len && rc >= 0;) {
        uint8_t hash_len = gc->dead[at + sizeof(uint64_t)];
        uint64_t len;

        memcpy(&len, gc->dead + at, sizeof(len));
        at += sizeof(uint64_t) + 1;
        rc = tell(gc, KVS_GC_SWEEP, gc->n_weighed, gc->n_chunks);
        if (rc)
            break;
        if (kvs_delete_chunk(gc->store, gc->dead + at, hash_len) < 0) {
            gc->result.errors++;
        } else {
            gc->result.deleted_chunks++;
            gc->result.deleted_bytes += len;
        }
        at += hash_len;
    }
    return KV_MIN(rc, 0);
}

/* Count the chunks, as the total for the sweep's progress. */
static uint64_t count_chunks(const struct gc *gc)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    return gc->progress && kvs_stats(gc->store, &stats) == 0 && stats.n_chunks != UINT64_MAX
               ? stats.n_chunks
               : 0;
}

/* Let the backend sweep, once more when there are chunks of prefix caches. */
static int sweep_by_backend(struct gc *gc)
{
    kv_store_swept swept = {.size = sizeof(swept)}, aged = {.size = sizeof(aged)};
    int rc =
        gc->store->ext.sweep_chunks(gc->store->backend, min_age_s(gc, false), is_live, gc, &swept);

    gc->sweeps_prefixes = true;
    /* The first doesn't come across chunks within the grace period. */
    if (rc >= 0 && (gc->n_prefix || gc->prefix_age_s < gc->grace_s) && !gc->canceled)
        rc = gc->store->ext.sweep_chunks(gc->store->backend, min_age_s(gc, true), is_live, gc,
                                         &aged);
    gc->result.live_chunks = swept.kept - KV_MIN(swept.kept, aged.deleted);
    gc->result.deleted_chunks = swept.deleted + aged.deleted;
    gc->result.deleted_bytes = swept.deleted_bytes + aged.deleted_bytes;
    gc->result.errors = swept.errors + aged.errors;
    return rc < 0 ? rc : gc->canceled ? -ECANCELED : 0;
}

static int sweep(struct gc *gc)
{

    if (gc->blind)
        return 0;
    if (!gc->dry_run && !gc->store->ext.sweep_chunks && !gc->store->ext.delete_chunk)
        return -ENOTSUP;
    gc->n_chunks = count_chunks(gc);
    if (gc->dry_run || !gc->store->ext.sweep_chunks)
        return sweep_by_list(gc);
    return sweep_by_backend(gc);
}

int kvs_gc(struct kvs_store *store, const struct kvs_gc_opts *opts, struct kvs_gc_result *ret)
{
    uint64_t grace_s = KV_OPT(opts, grace_s, GRACE_S);
    struct gc gc = {.store = store,
                    .opaque_too = KV_OPT(opts, opaque_too, false),
                    .dry_run = KV_OPT(opts, dry_run, false),
                    .grace_s = grace_s == KVS_GC_NO_GRACE ? 0 : grace_s,
                    .progress = KV_OPT(opts, progress, NULL),
                    .progress_arg = KV_OPT(opts, progress_arg, NULL),
                    .prefix_age_s = KV_OPT(opts, prefix_age_s, PREFIX_AGE_S),
                    .start_ns = kv_now_ns()};
    int rc;

    if (!store || !kv_sized_or_null(opts, "kvs_gc_opts") || !kv_sized_or_null(ret, "kvs_gc_result"))
        return -EINVAL;
    rc = mark(&gc);
    if (rc == 0)
        rc = sweep(&gc);
    if ((rc == 0 || rc == -ECANCELED) && ret) {
        gc.result.size = ret->size;
        memcpy(ret, &gc.result, KV_MIN(ret->size, sizeof(gc.result)));
    }
    for (size_t i = 0; i < gc.n_names; i++)
        free(gc.names[i]);
    free(gc.names);
    free(gc.live.slots);
    free(gc.dead);
    return rc;
}
