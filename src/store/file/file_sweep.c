// SPDX-License-Identifier: Apache-2.0
/**
 * Deleting chunks: on demand, by age, and for room. Each deletion happens under a flock on its
 * fan-out directory, which publications hold shared while they link chunks into place. Files with
 * more than one link are pinned (commit/commit.c), and spared.
 *
 * .kvasir/used holds the bytes of all chunk files (little-endian u64), updated by every process; it
 * is approximate after a crash, and each scan corrects it. The file is missing until a handle sets
 * a limit.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "store/file/file_impl.h"

/* -- Bytes in use ------------------------------------------------------------------------------ */

static int used_open(kv_store_v1 *h, int flags)
{
    if (h->used_fd < 0)
        h->used_fd = kvs_file_open_own(h, h->house, "used", O_RDWR | flags, NULL);
    return h->used_fd < 0 ? h->used_fd : 0;
}

static bool used_load(kv_store_v1 *h, uint64_t *ret)
{
    return pread(h->used_fd, ret, sizeof(*ret), 0) == sizeof(*ret);
}

void kvs_file_used_add(kv_store_v1 *h, int64_t delta)
{
    uint64_t used;

    if (delta == 0 || used_open(h, 0) < 0 || kvs_file_lock(h->used_fd, LOCK_EX) < 0)
        return;
    if (used_load(h, &used)) {
        used = delta < 0 && used < (uint64_t)-delta ? 0 : used + (uint64_t)delta;
        if (pwrite(h->used_fd, &used, sizeof(used), 0) != sizeof(used) &&
            ftruncate(h->used_fd, 0) < 0) /* no count is better than a wrong one */
            kvs_file_fail(h, errno, "can't note the bytes in use", "used");
    }
    flock(h->used_fd, LOCK_UN);
}

static void used_set(kv_store_v1 *h, uint64_t used)
{
    if (used_open(h, O_CREAT) == 0 && pwrite(h->used_fd, &used, sizeof(used), 0) < 0)
        kvs_file_fail(h, errno, "can't note the bytes in use", "used");
}

/* -- One chunk --------------------------------------------------------------------------------- */

/* True when a save of this handle relies on the chunk: its lease doesn't protect it from this
 * process. */
static bool is_pending(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    struct kvs_file_pending *e;
    bool pending;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    pending = e && e->state != KVS_FILE_LOST;
    pthread_mutex_unlock(&h->lock);
    return pending;
}

/* Unlink @hex, whose fan-out's flock is held, and its side-car. */
static int remove_file(kv_store_v1 *h, int fan, const char *hex)
{
    char side_car[KVS_FILE_HEX + 8];

    if (unlinkat(h->fan[fan], hex, 0) < 0)
        return -errno;
    kvs_file_chunk_side_car(side_car, hex);
    unlinkat(h->sums, strchr(side_car, '/') + 1, 0);
    return 0;
}

static void drop_pending(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    struct kvs_file_pending *e;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    if (e) {
        kvs_file_map_remove(&h->map, e);
        h->releases++;
    }
    pthread_mutex_unlock(&h->lock);
    kvs_file_pending_free(h, e);
}

/* Remove the chunk in place, whose fan-out's flock is held. */
static int remove_in_place(kv_store_v1 *h, int fan, const char *hex)
{
    struct stat st;
    int rc;

    if (fstatat(h->fan[fan], hex, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    rc = S_ISREG(st.st_mode) ? remove_file(h, fan, hex) : -ENOENT;
    if (rc == 0)
        kvs_file_used_add(h, -(int64_t)st.st_size);
    return rc;
}

static bool holds(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                  const uint8_t *data, size_t len)
{
    char side_car[KVS_FILE_HEX + 8];
    uint8_t *found;
    struct stat st;
    bool same;
    size_t n;

    kvs_file_chunk_side_car(side_car, hex);
    if (kvs_file_read(h, h->fan[kvs_file_fan(key)], hex, side_car,
                      kvs_file_owner(key, key_len, false), &found, &n, &st) < 0)
        return false;
    same = n == len && (len == 0 || memcmp(found, data, len) == 0);
    free(found);
    return same;
}

/*
 * Delete a chunk; with @data only if it is in place, nobody has put it here, and it has these @len
 * bytes. Returns 1 when it was deleted. The flock keeps other writers from the key between the
 * comparison and the removal.
 */
static int delete_locked(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                         const uint8_t *data, size_t len)
{
    int fan = kvs_file_fan(key), rc = -ENOENT;

    kvs_file_lock(h->fan[fan], LOCK_EX);
    if (!data || (!is_pending(h, key, key_len) && holds(h, key, key_len, hex, data, len))) {
        drop_pending(h, key, key_len);
        rc = remove_in_place(h, fan, hex);
        h->unsynced[fan] = true; /* of a missing chunk, too: another handle may have removed it */
    }
    flock(h->fan[fan], LOCK_UN);
    return rc == -ENOENT ? 0 : rc < 0 ? rc : 1;
}

static int delete_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const uint8_t *data,
                        size_t len)
{
    int rc = kvs_file_check(h, key, key_len);
    char hex[KVS_FILE_HEX];

    if (rc == 0)
        rc = kvs_file_begin(h);
    if (rc == 0)
        rc = kvs_file_deletable(h);
    if (rc < 0)
        return rc;
    kvs_file_hex(hex, key, key_len);
    pthread_mutex_lock(&h->commit);
    rc = delete_locked(h, key, key_len, hex, data, len);
    pthread_mutex_unlock(&h->commit);
    kvs_file_reader_forget(h);
    return rc < 0 ? kvs_file_fail(h, -rc, "can't delete a chunk", hex) : rc;
}

int kvs_file_delete_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    int rc = delete_chunk(h, key, key_len, NULL, 0);

    return rc < 0 ? rc : 0;
}

int kvs_file_delete_chunk_if(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                             const uint8_t *data, size_t len)
{
    return delete_chunk(h, key, key_len, len ? data : (const uint8_t *)"", len);
}

/* -- By age ------------------------------------------------------------------------------------ */

struct sweep {
    kv_store_v1 *h;
    int64_t leased_ns; /* chunks used then or later are leased by a save under way */
    /* seconds; chunks last used then or earlier go. Fixed when the sweep begins. */
    int64_t before_s;
    kv_store_live_fn live;
    void *arg;
    kv_store_swept sums;
};

/* Latest time of use of a dead chunk. After the clock was set back files look new, and stay. */
static int64_t cutoff(uint64_t min_age_s)
{
    int64_t now = (int64_t)(kv_wall_ns() / KV_NS_PER_S);

    if (min_age_s == 0)
        return INT64_MAX;
    return min_age_s > (uint64_t)now ? -1 : now - (int64_t)min_age_s;
}

static void sweep_one(struct sweep *s, int fan, const char *hex)
{
    uint8_t key[KVS_FILE_KEY_MAX];
    struct stat st;
    int len, rc = kvs_file_chunk_name(key, &len, hex) == fan
                      ? kvs_file_stat(s->h->fan[fan], hex, &st)
                      : 0;

    if (rc < 0) {
        s->sums.errors++;
        kvs_file_fail(s->h, -rc, "can't look at a chunk", hex);
    }
    if (rc <= 0)
        return;
    if (st.st_nlink > 1 || st.st_mtime > s->before_s ||
        kvs_file_see(&st).mtime_ns >= s->leased_ns || is_pending(s->h, key, (size_t)len) ||
        (s->live && s->live(s->arg, key, (size_t)len))) {
        s->sums.kept++;
        return;
    }
    rc = remove_file(s->h, fan, hex);
    if (rc == 0) {
        s->sums.deleted++;
        s->sums.deleted_bytes += (uint64_t)st.st_size;
    } else {
        s->sums.errors++;
        kvs_file_fail(s->h, -rc, "can't delete a chunk", hex);
    }
}

static int sweep_fan(struct sweep *s, int fan)
{
    struct dirent *e;
    DIR *dir;
    int rc = 0;

    if (s->h->fan[fan] < 0) /* an incomplete store: the fan-out holds no chunk */
        return 0;
    dir = kvs_file_dir(s->h->fan[fan]);
    if (!dir)
        return -errno;
    kvs_file_lock(s->h->fan[fan], LOCK_EX);
    s->leased_ns = kvs_file_leased_since(s->h);
    while ((e = kvs_file_next(dir, &rc)))
        sweep_one(s, fan, e->d_name);
    flock(s->h->fan[fan], LOCK_UN);
    closedir(dir);
    return rc;
}

int kvs_file_sweep(kv_store_v1 *h, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                   kv_store_swept *ret)
{
    struct sweep s = {.h = h,
                      .before_s = cutoff(min_age_s),
                      .live = live,
                      .arg = arg,
                      .sums = {.size = sizeof(s.sums)}};
    int rc = h && ret && ret->size >= sizeof(size_t) ? 0 : -EINVAL;

    if (rc == 0)
        rc = kvs_file_begin(h);
    if (rc == 0 && h->house >= 0) /* h->house < 0: no store, nothing to delete */
        rc = kvs_file_deletable(h);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&h->commit);
    for (int fan = 0; fan < KVS_FILE_FANS && rc == 0; fan++)
        rc = sweep_fan(&s, fan);
    kvs_file_used_add(h, -(int64_t)s.sums.deleted_bytes);
    pthread_mutex_unlock(&h->commit);
    kvs_file_reader_forget(h);
    s.sums.size = ret->size;
    memcpy(ret, &s.sums, KV_MIN(ret->size, sizeof(s.sums)));
    return rc;
}

/* -- For room ---------------------------------------------------------------------------------- */

struct candidate {
    int64_t used_ns;
    uint64_t len;
    int fan;
    char *hex;
};

struct scan {
    struct candidate *list;
    size_t n, capacity;
    uint64_t bytes; /* bytes of all chunk files, pinned ones included */
};

static void scan_fini(struct scan *scan)
{
    for (size_t i = 0; i < scan->n; i++)
        free(scan->list[i].hex);
    free(scan->list);
}

static int scan_add(struct scan *scan, int fan, const char *hex, const struct stat *st)
{
    scan->bytes += (uint64_t)st->st_size;
    if (st->st_nlink > 1)
        return 0;
    if (scan->n == scan->capacity) {
        size_t capacity = scan->capacity ? 2 * scan->capacity : 256;
        struct candidate *list = realloc(scan->list, capacity * sizeof(*list));

        if (!list)
            return -ENOMEM;
        scan->list = list;
        scan->capacity = capacity;
    }
    scan->list[scan->n] =
        (struct candidate){kvs_file_see(st).mtime_ns, (uint64_t)st->st_size, fan, strdup(hex)};
    if (!scan->list[scan->n].hex)
        return -ENOMEM;
    scan->n++;
    return 0;
}

static int scan_fan(kv_store_v1 *h, int fan, struct scan *scan)
{
    DIR *dir = kvs_file_dir(h->fan[fan]);
    uint8_t key[KVS_FILE_KEY_MAX];
    struct dirent *e;
    struct stat st;
    int rc = 0, len;

    if (!dir)
        return -errno;
    while (rc == 0 && (e = kvs_file_next(dir, &rc))) {
        /* a file that can't be looked at stays, and must not stop every save */
        if (kvs_file_chunk_name(key, &len, e->d_name) == fan &&
            kvs_file_stat(h->fan[fan], e->d_name, &st) > 0)
            rc = scan_add(scan, fan, e->d_name, &st);
    }
    closedir(dir);
    return rc;
}

static int older(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;

    return (x->used_ns > y->used_ns) - (x->used_ns < y->used_ns);
}

/* Evict one chunk unless it was used or pinned since the scan. */
static bool evict_one(kv_store_v1 *h, const struct candidate *c)
{
    uint8_t key[KVS_FILE_KEY_MAX];
    bool gone = false;
    struct stat st;
    int len;

    if (kvs_file_chunk_name(key, &len, c->hex) != c->fan || is_pending(h, key, (size_t)len))
        return false;
    kvs_file_lock(h->fan[c->fan], LOCK_EX);
    if (fstatat(h->fan[c->fan], c->hex, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_nlink == 1 &&
        kvs_file_see(&st).mtime_ns == c->used_ns)
        gone = remove_file(h, c->fan, c->hex) == 0;
    flock(h->fan[c->fan], LOCK_UN);
    return gone;
}

static int evict(kv_store_v1 *h, uint64_t coming)
{
    uint64_t target = h->opts.limit / 10 * 9, n_gone = 0;
    struct scan scan = {0};
    int rc = 0;

    for (int fan = 0; fan < KVS_FILE_FANS && rc == 0; fan++)
        rc = scan_fan(h, fan, &scan);
    if (rc == 0 && scan.bytes + coming > h->opts.limit) {
        int64_t leased_ns = kvs_file_leased_since(h); /* read after the scan: file_lease.c */

        target = coming < target ? target - coming : 0;
        if (scan.n)
            qsort(scan.list, scan.n, sizeof(*scan.list), older);
        for (size_t i = 0; i < scan.n && scan.bytes > target && scan.list[i].used_ns < leased_ns;
             i++) {
            if (evict_one(h, &scan.list[i])) {
                scan.bytes -= scan.list[i].len;
                n_gone++;
            }
        }
    }
    if (rc == 0)
        used_set(h, scan.bytes);
    KVS_FILE_ADD(h->evicted, n_gone);
    scan_fini(&scan);
    return rc;
}

int kvs_file_make_room(kv_store_v1 *h, uint64_t coming)
{
    uint64_t used;

    if (!h->opts.limit)
        return 0;
    if (used_open(h, O_CREAT) == 0 && used_load(h, &used) && used + coming <= h->opts.limit)
        return 0;
    return evict(h, coming);
}
