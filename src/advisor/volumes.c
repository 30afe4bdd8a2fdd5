// SPDX-License-Identifier: Apache-2.0
#include "advisor/volumes.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "store/backend/store.h"
#include "tiered/pack_sweep.h"

enum { BATCH = 256, PATH_LEN = 4096 };
#define UNTOLD_BYTES 65536 /* of a blob whose size neither its listing nor an event tells */

/* -- locks ------------------------------------------------------------------------------------- */

/* Write the path of a member's lock. Returns false: it has none. */
static bool lock_path(const char *uri, const char *folder, char ret[PATH_LEN])
{
    int n;

    if (*uri == '/')
        n = snprintf(ret, PATH_LEN, "%.*s/.kvasir/advisor.lock", (int)strcspn(uri, "?"), uri);
    else if (folder)
        n = snprintf(ret, PATH_LEN, "%s/kv-advisor-%016" PRIx64 ".lock", folder,
                     (uint64_t)kv_xxh64(uri, strlen(uri), 0));
    else
        return false;
    return n > 0 && n < PATH_LEN;
}

static void unlock_member(struct kva_volumes *volumes, size_t i)
{
    if (volumes->locks[i] >= 0)
        close(volumes->locks[i]);
    volumes->locks[i] = -1;
}

static int lock_member(struct kva_volumes *volumes, size_t i, const char *folder,
                       struct kv_error *error)
{
    const struct trd_member_config *member = &volumes->config.members[i];
    char path[PATH_LEN];
    int fd, rc;

    if (!lock_path(member->uri, folder, path)) {
        if (volumes->opts.lock_later)
            return 0; /* the other lock is enough */
        kv_log_warn("advisor", "no lock: nothing keeps a second advisor away", "member=%s",
                    member->name);
        return 0;
    }
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return kv_fail(error, -errno, 0, "%.200s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        rc = errno == EWOULDBLOCK ? -EBUSY : -errno;
        close(fd);
        return rc == -EBUSY
                   ? kv_fail(error, rc, 0, "another kv-advisor moves blobs of member %.40s",
                             member->name)
                   : kv_fail(error, rc, 0, "%.200s: %s", path, strerror(-rc));
    }
    volumes->locks[i] = fd;
    return 0;
}

/* -- opening ----------------------------------------------------------------------------------- */

/* Two URIs may name one store, where a move would remove the only copy. Returns 1 when @store is that of an open
 * member, whose number goes to @ret_twin. */
static int find_twin(const struct kva_volumes *volumes, size_t i, struct kvs_store *store,
                     size_t *ret_twin)
{
    const struct trd_member_config *members = volumes->config.members;
    int rc = 0;

    for (size_t k = 0; k < volumes->config.n_members && rc == 0; k++) {
        struct kvs_store *other = volumes->stores[k];

        *ret_twin = k;
        if (!other || k == i)
            continue;
        if (!members[i].read_only)
            rc = trd_is_same_store(store, other);
        if (rc == 0 && !members[k].read_only)
            rc = trd_is_same_store(other, store);
    }
    return rc;
}

static void say_absent(struct kva_volumes *volumes, size_t i, const char *why)
{
    if (volumes->absent[i] == KVA_UNTRIED)
        kv_log_error("advisor",
                     "a member can't be opened; its blobs stay where they are until it can",
                     "member=%s reason=\"%s\"", volumes->config.members[i].name, why);
    volumes->absent[i] = KVA_DOWN;
}

/*
 * Open a member, lock it, and let the other threads use it. Returns 0, also when it can't be opened; -EBUSY: another
 * advisor has it; -EINVAL: it is one store with another member; an error of its lock.
 */
static int add_member(struct kva_volumes *volumes, size_t i, struct kv_error *error)
{
    const struct trd_member_config *members = volumes->config.members;
    bool look_only = volumes->opts.look_only;
    struct kvs_store *store = NULL;
    size_t twin = 0;
    int same = 0, rc = trd_open(members[i].uri, look_only, members[i].deadline_ms,
                                &volumes->bounds[i], &store);

    if (rc < 0) {
        say_absent(volumes, i, strerror(-rc));
        return 0;
    }
    if (!look_only && !members[i].read_only && !volumes->opts.lock_later)
        rc = lock_member(volumes, i, volumes->opts.lock_folder, error);
    if (rc == 0 && !look_only)
        same = find_twin(volumes, i, store, &twin);
    if (rc < 0 || same) {
        unlock_member(volumes, i);
        kvs_close(store);
    }
    if (rc < 0)
        return rc;
    if (same == 1)
        return kv_fail(error, -EINVAL, 0, "members %.40s and %.40s are one store", members[i].name,
                       members[twin].name);
    if (same < 0) {
        say_absent(volumes, i, strerror(-same));
        return 0;
    }
    if (volumes->absent[i])
        kv_log_info("advisor", "a member has joined", "member=%s", members[i].name);
    volumes->absent[i] = KVA_UNTRIED;
    atomic_store(&volumes->stores[i], store);
    atomic_store(&volumes->usable[i], members[i].read_only || !volumes->opts.lock_later);
    return 0;
}

int kva_volumes_join(struct kva_volumes *volumes, size_t *ret_missing)
{
    int n = 0;

    *ret_missing = 0;
    for (size_t i = 0; i < volumes->config.n_members; i++) {
        struct kv_error error = {0};
        int rc;

        if (volumes->stores[i] || volumes->absent[i] == KVA_REFUSED)
            continue;
        rc = add_member(volumes, i, &error);
        if (rc == -EINVAL) {
            kv_log_error("advisor", "a member is left out", "reason=\"%s\"", error.text);
            volumes->absent[i] = KVA_REFUSED;
        } else if (rc < 0) {
            say_absent(volumes, i, error.text);
        }
        n += volumes->stores[i] != NULL;
        *ret_missing += !volumes->stores[i] && volumes->absent[i] == KVA_DOWN;
    }
    return n;
}

void kva_volumes_lock(struct kva_volumes *volumes)
{
    for (size_t i = 0; i < volumes->config.n_members; i++) {
        struct kv_error error = {0};

        if (!volumes->stores[i] || atomic_load(&volumes->usable[i]))
            continue;
        if (lock_member(volumes, i, volumes->opts.lock_folder, &error) == 0)
            atomic_store(&volumes->usable[i], true);
        else if (!volumes->said_locked[i])
            kv_log_warn("advisor", "a member is left alone", "reason=\"%s\"", error.text);
        volumes->said_locked[i] = !atomic_load(&volumes->usable[i]);
    }
}

void kva_volumes_unlock(struct kva_volumes *volumes)
{
    for (size_t i = 0; i < volumes->config.n_members; i++) {
        if (!volumes->stores[i] || volumes->config.members[i].read_only)
            continue;
        atomic_store(&volumes->usable[i], false);
        unlock_member(volumes, i);
    }
}

int kva_volumes_open(const struct kva_volumes_opts *opts, struct kva_volumes *ret,
                     struct kv_error *error)
{
    bool any = false;
    int rc;

    memset(ret, 0, sizeof(*ret));
    for (size_t i = 0; i < KVA_MEMBERS; i++) {
        ret->locks[i] = -1;
        trd_catalog_init(&ret->packs[i]);
    }
    ret->opts = *opts;
    rc = trd_config_read(opts->path, &ret->config, error);
    for (size_t i = 0; i < ret->config.n_members && rc == 0; i++) {
        rc = add_member(ret, i, error);
        any |= ret->stores[i] != NULL;
    }
    if (rc == 0 && !any)
        rc = kv_fail(error, -EHOSTDOWN, 0, "%.200s: no member can be opened", opts->path);
    if (rc < 0)
        kva_volumes_close(ret);
    return rc;
}

void kva_volumes_close(struct kva_volumes *volumes)
{
    for (size_t i = 0; i < volumes->config.n_members; i++) {
        kvs_close(volumes->stores[i]);
        volumes->stores[i] = NULL;
        trd_bound_destroy(volumes->bounds[i]);
        volumes->bounds[i] = NULL;
        unlock_member(volumes, i);
    }
    for (size_t i = 0; i < KVA_MEMBERS; i++)
        trd_catalog_fini(&volumes->packs[i]);
    trd_config_fini(&volumes->config);
    volumes->config.n_members = 0;
}

uint64_t kva_volumes_id(const struct kva_volumes *volumes)
{
    uint64_t id = 0;

    for (size_t i = 0; i < volumes->config.n_members; i++)
        id = kv_xxh64(volumes->config.members[i].uri, strlen(volumes->config.members[i].uri), id);
    return id;
}

void kva_volumes_index_opts(const struct kva_volumes *volumes, unsigned share,
                            struct kva_index_opts *ret)
{
    ret->n_members = volumes->config.n_members;
    ret->fixed = 0;
    for (size_t i = 0; i < ret->n_members; i++) {
        const struct trd_member_config *member = &volumes->config.members[i];

        ret->limit[i] = member->capacity == UINT64_MAX
                            ? UINT64_MAX
                            : member->capacity / 100 * share + member->capacity % 100 * share / 100;
        if (member->read_only || (volumes->opts.look_only && !volumes->stores[i]))
            ret->fixed |= (uint16_t)(1u << i);
    }
}

/* -- blobs in packs ---------------------------------------------------------------------------- */

struct trd_place kva_volumes_place(struct kva_volumes *volumes, unsigned member)
{
    return (struct trd_place){.store = volumes->stores[member], .packs = &volumes->packs[member]};
}

uint8_t kva_volumes_look(struct kva_volumes *volumes, unsigned member, const uint8_t *key)
{
    struct trd_place place = kva_volumes_place(volumes, member);
    uint8_t single = KVS_MISSING, packed = KVS_MISSING;
    uint64_t linger_ns = volumes->config.linger_ms * KV_NS_PER_MS;

    if (kvs_look(place.store, key, KVA_KEY, 1, &single) < 0)
        return KVS_UNKNOWN;
    if (single == KVS_MISSING &&
        trd_catalog_look(place.packs, place.store, linger_ns, key, KVA_KEY, 1, &packed) < 0)
        return KVS_UNKNOWN;
    if (single == KVS_MISSING && packed == KVS_MISSING && trd_is_unsure(place.packs))
        return KVS_UNKNOWN;
    return single != KVS_MISSING ? single : packed;
}

/* -- scans ------------------------------------------------------------------------------------- */

struct listed {
    uint8_t key[KVA_KEY];
    uint64_t bytes;
    uint32_t used_s;
    bool packed;
};

struct scan {
    struct kva_world *world;
    atomic_bool *stop;
    unsigned member;
    struct listed batch[BATCH];
    size_t n;
    uint64_t foreign, foreign_bytes;
    uint64_t packed_bytes;   /* of blobs in packs that the index tracks: part of foreign_bytes */
    struct kv_buf pack_keys; /* of packs' chunks, listed before the member's manifests */
};

static void flush(struct scan *scan)
{
    struct kva_index *index = scan->world->index;

    pthread_mutex_lock(&scan->world->lock);
    for (size_t i = 0; i < scan->n; i++) {
        const struct listed *l = &scan->batch[i];
        bool guess = l->bytes == UINT64_MAX && !kva_index_find(index, l->key);

        /* a refusal is in the index's statistics */
        if (l->packed)
            (void)kva_index_found_packed(index, scan->member, l->key, l->bytes);
        else
            (void)kva_index_found(index, scan->member, l->key, guess ? UNTOLD_BYTES : l->bytes,
                                  l->used_s);
    }
    pthread_mutex_unlock(&scan->world->lock);
    scan->n = 0;
}

static int take_chunk(void *arg, const kv_store_entry *entry)
{
    struct scan *scan = arg;
    struct listed *to = &scan->batch[scan->n];

    if (entry->hash_len != KVA_KEY) {
        bool pack = trd_is_pack_key(entry->hash, entry->hash_len);

        scan->foreign += !pack;
        if (pack)
            kv_buf_append(&scan->pack_keys, entry->hash, entry->hash_len);
        scan->foreign_bytes += entry->len == UINT64_MAX ? UNTOLD_BYTES : entry->len;
    } else {
        memcpy(to->key, entry->hash, KVA_KEY);
        to->bytes = entry->len;
        to->used_s = (uint32_t)KV_MIN(entry->used_s, (uint64_t)UINT32_MAX);
        to->packed = false;
        if (++scan->n == BATCH)
            flush(scan);
    }
    return atomic_load_explicit(scan->stop, memory_order_relaxed) ? -ECANCELED : 0;
}

/* Take the blobs of a pack. */
static void take_pack(struct scan *scan, const struct trd_pack *pack)
{
    for (uint32_t i = 0; i < pack->index.n; i++) {
        size_t len;
        const uint8_t *key = trd_pack_entry_key(&pack->index, i, &len);

        if (len != KVA_KEY || atomic_load_explicit(&pack->gone[i], memory_order_relaxed))
            continue;
        scan->batch[scan->n] = (struct listed){.bytes = pack->index.entries[i].len, .packed = true};
        memcpy(scan->batch[scan->n].key, key, KVA_KEY);
        scan->packed_bytes += pack->index.entries[i].len;
        if (++scan->n == BATCH)
            flush(scan);
    }
}

/* Note the packs that no manifest names, and since when. */
static int note_strays(struct kva_volumes *volumes, struct scan *scan)
{
    const uint8_t *keys = (const uint8_t *)scan->pack_keys.data;
    size_t n = scan->pack_keys.len / TRD_PACK_KEY, m = 0;
    struct kva_stray now[KVA_STRAYS];
    struct trd_keys published = {0};
    int rc = n ? trd_published_packs(volumes->stores[scan->member], &published) : 0;

    for (size_t i = 0; i < n && rc == 0 && m < KVA_STRAYS; i++) {
        if (trd_keys_has(&published, keys + i * TRD_PACK_KEY, TRD_PACK_KEY))
            continue;
        memcpy(now[m].key, keys + i * TRD_PACK_KEY, TRD_PACK_KEY);
        now[m++].since_ns = kv_now_ns();
    }
    trd_keys_fini(&published);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&scan->world->lock);
    for (size_t i = 0; i < m; i++)
        for (size_t k = 0; k < volumes->strays[scan->member].n; k++)
            if (memcmp(volumes->strays[scan->member].of[k].key, now[i].key, TRD_PACK_KEY) == 0)
                now[i].since_ns = volumes->strays[scan->member].of[k].since_ns;
    memcpy(volumes->strays[scan->member].of, now, m * sizeof(*now));
    volumes->strays[scan->member].n = m;
    pthread_mutex_unlock(&scan->world->lock);
    return 0;
}

/* Take all blobs in packs of a member, behind its single ones. */
static int scan_packs(struct kva_volumes *volumes, struct scan *scan)
{
    struct trd_catalog *catalog = &volumes->packs[scan->member];
    int rc = trd_catalog_read(catalog, volumes->stores[scan->member], 0, NULL);
    struct trd_packs *packs;

    if (rc < 0)
        return rc;
    if (trd_is_unsure(catalog))
        return -EIO; /* what isn't found may be in the pack that can't be read */
    packs = trd_catalog_hold(catalog);
    for (size_t i = 0; packs && i < packs->n; i++)
        take_pack(scan, packs->of[i]);
    trd_packs_release(packs);
    flush(scan);
    scan->foreign_bytes -= KV_MIN(scan->foreign_bytes, scan->packed_bytes);
    return note_strays(volumes, scan);
}

/* List one member. Returns 0 or an error. */
static int scan_member(struct kva_volumes *volumes, struct scan *scan)
{
    unsigned m = scan->member;
    int rc;

    if (!volumes->stores[m])
        return -EHOSTDOWN;
    scan->n = 0;
    scan->foreign = scan->foreign_bytes = scan->packed_bytes = 0;
    scan->pack_keys = (struct kv_buf)KV_BUF_INIT;
    rc = kvs_list_chunks(volumes->stores[m], take_chunk, scan);
    flush(scan);
    if (rc == 0)
        rc = scan->pack_keys.error ? -ENOMEM : scan_packs(volumes, scan);
    kv_buf_fini(&scan->pack_keys);
    if (rc == 0) {
        atomic_store(&volumes->foreign[m], scan->foreign);
        atomic_store(&volumes->listed[m], true);
        pthread_mutex_lock(&scan->world->lock);
        kva_index_reserve(scan->world->index, m, scan->foreign_bytes);
        pthread_mutex_unlock(&scan->world->lock);
    } else if (rc != -ECANCELED) {
        kv_log_warn("advisor", "a member can't be listed", "member=%s reason=\"%s\"",
                    volumes->config.members[m].name, strerror(-rc));
    }
    return rc;
}

int kva_volumes_scan(struct kva_volumes *volumes, struct kva_world *world, atomic_bool *stop)
{
    struct scan scan = {.world = world, .stop = stop};
    uint16_t listed = 0;
    int n = 0, rc;

    pthread_mutex_lock(&world->lock);
    rc = kva_index_scan_begin(world->index);
    pthread_mutex_unlock(&world->lock);
    if (rc < 0)
        return rc;
    for (scan.member = 0; scan.member < volumes->config.n_members && rc != -ECANCELED;
         scan.member++) {
        rc = scan_member(volumes, &scan);
        listed |= (uint16_t)((rc == 0) << scan.member);
        n += rc == 0;
    }
    if (rc == -ECANCELED)
        listed = 0; /* nothing is known to be gone */
    pthread_mutex_lock(&world->lock);
    kva_index_scan_end(world->index, listed);
    pthread_mutex_unlock(&world->lock);
    atomic_store(&volumes->unlisted, volumes->config.n_members - (size_t)n);
    if (rc == -ECANCELED)
        return rc;
    atomic_fetch_add(&volumes->scans, 1);
    return n;
}
