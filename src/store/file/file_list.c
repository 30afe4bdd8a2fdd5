// SPDX-License-Identifier: Apache-2.0
/** Listings, presence and sizes of the file store. No lock is held while a callback runs. */
#include <fcntl.h>
#include <unistd.h>

#include "store/file/file_impl.h"

DIR *kvs_file_dir(int at)
{
    int fd = openat(at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);

    if (!dir && fd >= 0)
        close(fd);
    return dir;
}

struct dirent *kvs_file_next(DIR *dir, int *rc)
{
    struct dirent *e;

    errno = 0; /* readdir returns NULL at the end and after a failure */
    e = readdir(dir);
    if (!e && errno)
        *rc = -errno;
    return e;
}

int kvs_file_stat(int dirfd, const char *name, struct stat *ret)
{
    if (fstatat(dirfd, name, ret, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : -errno;
    return S_ISREG(ret->st_mode);
}

static uint64_t used_s(const struct stat *st)
{
    return st->st_mtime > 0 ? (uint64_t)st->st_mtime : 0;
}

static int list_manifest(kv_store_v1 *h, const char *file, kv_store_each_fn each, void *arg)
{
    char name[KVS_FILE_NAME];
    kv_store_entry entry = {.size = sizeof(entry), .name = name};
    struct stat st;
    int rc = kvs_file_name_decode(name, file) < 0 ? 0 : kvs_file_stat(h->root, file, &st);

    if (rc <= 0)
        return rc;
    entry.len = (uint64_t)st.st_size;
    entry.used_s = used_s(&st);
    return each(arg, &entry);
}

int kvs_file_list_manifests(kv_store_v1 *h, kv_store_each_fn each, void *arg)
{
    int rc = h && each ? 0 : -EINVAL;
    struct dirent *e;
    DIR *dir;

    if (rc == 0)
        rc = kvs_file_begin(h);
    if (rc < 0)
        return rc;
    dir = kvs_file_dir(h->root);
    if (!dir)
        return -errno;
    while (rc == 0 && (e = kvs_file_next(dir, &rc)))
        rc = list_manifest(h, e->d_name, each, arg);
    closedir(dir);
    return rc;
}

/* Load the checksum of a file that is in place and has the right length. */
static int stat_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                      struct stat *st, struct kvs_file_sum *ret)
{
    int fd = kvs_file_open_read(h->fan[kvs_file_fan(key)], hex, st), rc;
    char side_car[KVS_FILE_HEX + 8];

    if (fd < 0)
        return fd == -EBADMSG ? -EISDIR : fd; /* an entry that is no file */
    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_load_sum(h, fd, side_car, 0, kvs_file_owner(key, key_len, false), ret);
    close(fd);
    if (rc == -ENODATA && st->st_size > 0) { /* another program's file */
        *ret = (struct kvs_file_sum){.len = (uint64_t)st->st_size};
        return 0;
    }
    if (rc == 0 &&
        (ret->stored != (uint64_t)st->st_size || ret->owner != kvs_file_owner(key, key_len, false)))
        rc = -EBADMSG;
    return rc;
}

static int list_chunk(kv_store_v1 *h, int fan, const char *hex, kv_store_each_fn each, void *arg)
{
    uint8_t key[KVS_FILE_KEY_MAX];
    kv_store_entry entry = {.size = sizeof(entry), .hash = key, .len = UINT64_MAX};
    struct kvs_file_sum sum = {0};
    struct stat st = {0};
    int len, rc;

    if (kvs_file_chunk_name(key, &len, hex) != fan)
        return 0;
    rc = stat_chunk(h, key, (size_t)len, hex, &st, &sum);
    if (rc == -ENOENT || rc == -EISDIR)
        return 0;
    if (rc == 0)
        entry.len = sum.len;
    entry.hash_len = (size_t)len;
    entry.used_s = used_s(&st);
    return each(arg, &entry);
}

static int list_fan(kv_store_v1 *h, int fan, kv_store_each_fn each, void *arg)
{
    struct dirent *e;
    DIR *dir;
    int rc = 0;

    if (h->fan[fan] < 0) /* an incomplete store: the fan-out holds no chunk */
        return 0;
    dir = kvs_file_dir(h->fan[fan]);
    if (!dir)
        return -errno;
    while (rc == 0 && (e = kvs_file_next(dir, &rc)))
        rc = list_chunk(h, fan, e->d_name, each, arg);
    closedir(dir);
    return rc;
}

int kvs_file_list_chunks(kv_store_v1 *h, kv_store_each_fn each, void *arg)
{
    int rc = h && each ? 0 : -EINVAL;

    if (rc == 0)
        rc = kvs_file_begin(h);
    for (int fan = 0; fan < KVS_FILE_FANS && rc == 0; fan++)
        rc = list_fan(h, fan, each, arg);
    return rc;
}

/* Returns 1, 0, KV_STORE_PRESENT_BAD, or a negative errno when a failure hides the answer. */
static int exists(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    struct kvs_file_pending *e;
    char hex[KVS_FILE_HEX];
    struct kvs_file_sum sum;
    struct stat st;
    bool pending;
    int rc;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    pending = e && kvs_file_is_held(e);
    pthread_mutex_unlock(&h->lock);
    if (pending)
        return 1;
    kvs_file_hex(hex, key, key_len);
    rc = stat_chunk(h, key, key_len, hex, &st, &sum);
    if (rc == -EBADMSG || rc == -EISDIR || rc == -ENODATA)
        return KV_STORE_PRESENT_BAD;
    if (rc == -ENOENT)
        return 0;
    /* others fail for now: a caller that takes the chunk for missing may forget it */
    return rc < 0 ? rc : 1;
}

int kvs_file_exists(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n,
                    uint8_t *ret_present)
{
    int rc = n ? kvs_file_check(h, keys, key_len) : 0;

    if (rc == 0 && n)
        rc = kvs_file_begin(h);
    for (size_t i = 0; i < n && rc >= 0; i++) {
        rc = exists(h, keys + i * key_len, key_len);
        if (rc >= 0)
            ret_present[i] = (uint8_t)rc;
    }
    return KV_MIN(rc, 0);
}

/* Set the time of use to now, to the nanosecond: the kernel's own now is the same for milliseconds, and
 * eviction goes by the order. Only the owner may; others get the kernel's. */
static bool mark_used(int dir, const char *hex)
{
    struct timespec times[2];

    if (clock_gettime(CLOCK_REALTIME, &times[0]) == 0) {
        times[1] = times[0];
        if (utimensat(dir, hex, times, AT_SYMLINK_NOFOLLOW) == 0)
            return true;
    }
    return utimensat(dir, hex, NULL, AT_SYMLINK_NOFOLLOW) == 0;
}

int kvs_file_touch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n)
{
    int rc = n ? kvs_file_check(h, keys, key_len) : 0, there = 0;
    char hex[KVS_FILE_HEX];

    if (rc == 0 && n)
        rc = kvs_file_begin(h);
    if (rc == 0 && n)
        rc = kvs_file_deletable(h);
    for (size_t i = 0; i < n && rc == 0; i++) {
        const uint8_t *key = keys + i * key_len;

        kvs_file_hex(hex, key, key_len);
        there += mark_used(h->fan[kvs_file_fan(key)], hex);
    }
    return rc < 0 ? rc : there;
}

static int add_manifest(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(uint64_t *)arg;
    return 0;
}

/* Count the chunks of a fan-out from names and sizes, without reading checksums. */
static int count_fan(kv_store_v1 *h, int fan, kv_store_stats *ret)
{
    uint8_t key[KVS_FILE_KEY_MAX];
    struct dirent *e;
    struct stat st;
    int len, rc = 0;
    DIR *dir;

    if (h->fan[fan] < 0) /* an incomplete store: the fan-out holds no chunk */
        return 0;
    dir = kvs_file_dir(h->fan[fan]);
    if (!dir)
        return -errno;
    while (rc == 0 && (e = kvs_file_next(dir, &rc))) {
        rc = kvs_file_chunk_name(key, &len, e->d_name) == fan
                 ? kvs_file_stat(h->fan[fan], e->d_name, &st)
                 : 0;
        if (rc > 0) {
            ret->n_chunks++;
            ret->bytes += (uint64_t)st.st_size;
            rc = 0;
        }
    }
    closedir(dir);
    return rc;
}

int kvs_file_stats(kv_store_v1 *h, kv_store_stats *ret)
{
    kv_store_stats all = {.size = sizeof(all)};
    int rc = h && ret && ret->size >= sizeof(size_t) ? 0 : -EINVAL;
    size_t size = rc == 0 ? KV_MIN(ret->size, sizeof(all)) : 0;

    if (rc == 0)
        rc = kvs_file_list_manifests(h, add_manifest, &all.n_manifests);
    for (int fan = 0; fan < KVS_FILE_FANS && rc == 0; fan++)
        rc = count_fan(h, fan, &all);
    if (rc < 0)
        return rc;
    all.limit_bytes = h->opts.limit;
    all.puts = atomic_load(&h->puts);
    all.put_hits = atomic_load(&h->put_hits);
    all.gets = atomic_load(&h->gets);
    all.get_misses = atomic_load(&h->get_misses);
    all.bad_chunks = atomic_load(&h->bad_chunks);
    all.evicted = atomic_load(&h->evicted);
    all.bytes_written = atomic_load(&h->written);
    all.bytes_read = atomic_load(&h->read);
    all.errors = atomic_load(&h->errors);
    all.size = ret->size;
    memcpy(ret, &all, size);
    return 0;
}
