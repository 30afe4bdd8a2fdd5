// SPDX-License-Identifier: Apache-2.0
/**
 * Files of the file store: written whole into tmp/, read whole and verified, set aside when bad.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <zstd.h>

#include "base/beneath.h"
#include "base/clock.h"
#include "base/log.h"
#include "store/file_impl.h"

#define XATTR "user.kvasir.chunk"

enum {
    EARLY = 256 * 1024, /* files from this size on begin their way to the disk at once */
    USE_S = 60,
    VERIFY_TRIES = 100, /* of a file that others use meanwhile */
    FDS_KEPT = 64       /* per handle: more are opened again for their fsync */
};

int kvs_file_fail(kv_store_v1 *h, int error, const char *what, const char *name)
{
    char where[512], which[512];

    KVS_FILE_ADD(h->errors, 1);
    kv_log_error("store", what, "dir=%s name=%s error=\"%s\"",
                 kv_log_quote(where, sizeof(where), h->dir),
                 kv_log_quote(which, sizeof(which), name ? name : ""), strerror(error));
    return -error;
}

void kvs_file_tmp_name(const kv_store_v1 *h, char ret[KVS_FILE_TMP], uint64_t n)
{
    snprintf(ret, KVS_FILE_TMP, "%s.%" PRIu64, h->writer, n);
}

static void tmp_side_car(const kv_store_v1 *h, char ret[KVS_FILE_TMP + 8], uint64_t n)
{
    snprintf(ret, KVS_FILE_TMP + 8, "tmp/%s.%" PRIu64 ".s", h->writer, n);
}

int kvs_file_write_all(int fd, const void *data, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, (const char *)data + done, len - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        done += (size_t)n;
    }
    return 0;
}

int kvs_file_lock(int fd, int how)
{
    int rc;

    do
        rc = flock(fd, how) < 0 ? -errno : 0;
    while (rc == -EINTR);
    return rc;
}

static bool no_xattrs(int error)
{
    return error == ENOTSUP || error == EOPNOTSUPP || error == EPERM || error == ENOSYS;
}

int kvs_file_side_dir(const kv_store_v1 *h, const char **path)
{
    bool tmp = strncmp(*path, "tmp/", 4) == 0;

    *path = strchr(*path, '/') + 1;
    return tmp ? h->tmp : h->sums;
}

/* A new file, whose name nobody else has: O_EXCL follows no link. */
static int write_synced(kv_store_v1 *h, const char *path, const uint8_t *bytes, size_t len)
{
    int at = kvs_file_side_dir(h, &path);
    int fd = openat(at, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), rc;

    if (fd < 0)
        return -errno;
    rc = kvs_file_write_all(fd, bytes, len);
    if (rc == 0 && fsync(fd) < 0) /* a slow path: these file systems are */
        rc = -errno;
    close(fd);
    return rc;
}

/* In sums/ it appears whole. */
static int write_side_car(kv_store_v1 *h, const char *path, const uint8_t *bytes)
{
    char tmp[KVS_FILE_TMP + 8];
    const char *from = tmp;
    int from_dir, rc;

    if (strncmp(path, "tmp/", 4) == 0)
        return write_synced(h, path, bytes, KVS_FILE_SUM_BYTES);
    tmp_side_car(h, tmp, atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed));
    rc = write_synced(h, tmp, bytes, KVS_FILE_SUM_BYTES);
    from_dir = kvs_file_side_dir(h, &from);
    if (rc == 0) {
        int to_dir = kvs_file_side_dir(h, &path);

        rc = kvs_file_rename(h, from_dir, from, to_dir, path);
    }
    if (rc < 0)
        unlinkat(from_dir, from, 0);
    return rc;
}

int kvs_file_store_sum(kv_store_v1 *h, int fd, const char *side_car, const struct kvs_file_sum *sum)
{
    uint8_t bytes[KVS_FILE_SUM_BYTES];

    kvs_file_sum_encode(bytes, sum);
    if (!atomic_load_explicit(&h->side_car, memory_order_relaxed)) {
        if (fsetxattr(fd, XATTR, bytes, sizeof(bytes), 0) == 0)
            return 0;
        if (!no_xattrs(errno))
            return -errno;
        atomic_store_explicit(&h->side_car, true, memory_order_relaxed);
    }
    if (sum->encoding == KVS_FILE_PACKED)
        return 0; /* the file has it inside */
    return write_side_car(h, side_car, bytes);
}

static int load_side_car(kv_store_v1 *h, const char *path, int nth, uint8_t *bytes)
{
    int at = kvs_file_side_dir(h, &path), fd;
    struct stat st;
    ssize_t n;

    if (at < 0)
        return -ENODATA;
    fd = kvs_file_open_read(at, path, &st);
    if (fd < 0)
        return fd == -ENOENT ? -ENODATA : fd;
    n = pread(fd, bytes, KVS_FILE_SUM_BYTES, (off_t)nth * KVS_FILE_SUM_BYTES);
    close(fd);
    return n == KVS_FILE_SUM_BYTES ? 0 : -EBADMSG;
}

/* -ENODATA: not one that a file begins with. -EBADMSG: of another chunk, or another length. */
static int load_inside(int fd, uint64_t owner, struct kvs_file_sum *ret)
{
    uint8_t bytes[KVS_FILE_SUM_BYTES];
    struct stat st;

    if (pread(fd, bytes, sizeof(bytes), 0) != sizeof(bytes) ||
        kvs_file_sum_decode(ret, bytes) < 0 || ret->encoding != KVS_FILE_PACKED)
        return -ENODATA;
    if (fstat(fd, &st) < 0 || ret->stored != (uint64_t)st.st_size || ret->owner != owner)
        return -EBADMSG;
    return 0;
}

static int load_sum(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
                    struct kvs_file_sum *ret)
{
    uint8_t bytes[KVS_FILE_SUM_BYTES];
    ssize_t n = fgetxattr(fd, XATTR, bytes, sizeof(bytes));
    int inside, rc;

    if (n >= 0)
        return n == KVS_FILE_SUM_BYTES ? kvs_file_sum_decode(ret, bytes) : -EBADMSG;
    if (errno == ERANGE)
        return -EBADMSG;
    if (errno != ENODATA && !no_xattrs(errno))
        return -errno;
    inside = load_inside(fd, owner, ret);
    if (inside == 0)
        return 0;
    rc = load_side_car(h, side_car, nth, bytes);
    if (rc == -ENODATA)
        return inside;
    return rc < 0 ? rc : kvs_file_sum_decode(ret, bytes);
}

int kvs_file_load_sum(kv_store_v1 *h, int fd, const char *side_car, uint64_t owner,
                      struct kvs_file_sum *ret)
{
    return load_sum(h, fd, side_car, 0, owner, ret);
}

int kvs_file_lock_root(kv_store_v1 *h)
{
    int fd = openat(h->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0)
        kvs_file_lock(fd, LOCK_SH);
    return fd;
}

static int is_ours(kv_store_v1 *h, const char *file)
{
    char side_car[KVS_FILE_NAME + 16];
    struct kvs_file_sum sum;
    struct stat st;
    int fd = kvs_file_open_read(h->root, file, &st);
    bool fits = false;

    if (fd < 0)
        return fd == -EBADMSG ? -ENOENT : fd;
    kvs_file_manifest_side_car(side_car, file);
    for (int nth = 0; nth < 2; nth++)
        fits |= load_sum(h, fd, side_car, nth, 0, &sum) == 0 && sum.stored == (uint64_t)st.st_size;
    close(fd);
    return fits;
}

int kvs_file_is_ours(kv_store_v1 *h, const char *file)
{
    int rc = is_ours(h, file), fd;

    if (rc != 0)
        return rc;
    fd = kvs_file_lock_root(h); /* it may be replaced just now */
    rc = is_ours(h, file);
    if (fd >= 0)
        close(fd);
    return rc;
}

/*
 * A manifest's side-car is replaced before the manifest: it names the checksum of the one that is
 * there as well, in case the replacement never comes.
 */
int kvs_file_keep_sum(kv_store_v1 *h, uint64_t n, const char *file, uint64_t owner)
{
    char path[KVS_FILE_TMP + 8], side_car[KVS_FILE_NAME + 16];
    uint8_t bytes[KVS_FILE_SUM_BYTES], *data = NULL;
    struct kvs_file_sum sum;
    struct stat st;
    const char *tmp = path;
    size_t len = 0;
    int at, fd, rc;

    kvs_file_manifest_side_car(side_car, file);
    rc = kvs_file_read(h, h->root, file, side_car, owner, &data, &len, &st);
    if (rc < 0)
        return kvs_file_passing(rc) ? rc : 0; /* nothing there that could be lost */
    kvs_file_sum_make(&sum, owner, data, len);
    free(data);
    kvs_file_sum_encode(bytes, &sum);
    tmp_side_car(h, path, n);
    at = kvs_file_side_dir(h, &tmp);
    fd = kv_beneath_file(at, tmp, O_WRONLY | O_APPEND, 0, 0, NULL);
    if (fd < 0)
        return fd;
    rc = kvs_file_write_all(fd, bytes, sizeof(bytes));
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    close(fd);
    return rc;
}

/* -- Writing ---------------------------------------------------------------------------------- */

/* The content as it is to be stored: compressed where that saves an eighth, and then behind its
 * checksum, so that nobody takes a frame for content. @ret_owned is freed. */
static void pack(int level, const void *data, struct kvs_file_sum *sum, const void **ret,
                 void **ret_owned)
{
    size_t cap = level ? ZSTD_compressBound(sum->len) : 0, n;
    uint8_t *buf = cap ? malloc(KVS_FILE_SUM_BYTES + cap) : NULL;

    *ret = data;
    *ret_owned = buf;
    if (!buf)
        return;
    n = ZSTD_compress(buf + KVS_FILE_SUM_BYTES, cap, data, sum->len, level);
    if (ZSTD_isError(n) || KVS_FILE_SUM_BYTES + n >= sum->len - sum->len / 8)
        return;
    sum->encoding = KVS_FILE_PACKED;
    sum->stored = KVS_FILE_SUM_BYTES + n;
    kvs_file_sum_encode(buf, sum);
    *ret = buf;
}

static int fill_tmp(kv_store_v1 *h, int fd, uint64_t n, const struct kvs_file_sum *sum,
                    const void *bytes)
{
    char side_car[KVS_FILE_TMP + 8];
    int rc;

    tmp_side_car(h, side_car, n);
    rc = kvs_file_store_sum(h, fd, side_car, sum);
    if (rc == 0)
        rc = kvs_file_write_all(fd, bytes, sum->stored);
    if (rc == 0 && sum->stored >= EARLY)
        sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE); /* a hint */
    return rc;
}

int kvs_file_write_tmp(kv_store_v1 *h, uint64_t owner, const void *data, size_t len, bool packed,
                       uint64_t *ret_n, struct kvs_file_sum *ret_sum, int *ret_fd)
{
    uint64_t n = atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed);
    char name[KVS_FILE_TMP];
    const void *bytes;
    void *owned;
    int fd, rc;

    kvs_file_tmp_name(h, name, n);
    fd = openat(h->tmp, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return kvs_file_fail(h, errno, "can't make a file", name);
    kvs_file_sum_make(ret_sum, owner, data, len);
    pack(packed ? h->opts.zstd : 0, data, ret_sum, &bytes, &owned);
    rc = fill_tmp(h, fd, n, ret_sum, bytes);
    free(owned);
    if (rc == 0)
        KVS_FILE_ADD(h->written, ret_sum->stored);
    if (rc == 0 && ret_fd && atomic_fetch_add(&h->kept_fds, 1) < FDS_KEPT) {
        *ret_fd = fd;
    } else {
        if (rc == 0 && ret_fd) {
            atomic_fetch_sub(&h->kept_fds, 1);
            *ret_fd = -1;
        }
        if (close(fd) < 0 && rc == 0 && errno != EINTR)
            rc = -errno; /* where quotas are only told about now */
    }
    if (rc < 0) {
        kvs_file_drop_tmp(h, n);
        return kvs_file_fail(h, -rc, "can't write a file", name);
    }
    *ret_n = n;
    return 0;
}

void kvs_file_drop_tmp(kv_store_v1 *h, uint64_t n)
{
    char name[KVS_FILE_TMP], side_car[KVS_FILE_TMP + 8];
    const char *path;
    int at;

    kvs_file_tmp_name(h, name, n);
    unlinkat(h->tmp, name, 0);
    if (atomic_load_explicit(&h->side_car, memory_order_relaxed)) {
        tmp_side_car(h, side_car, n);
        path = side_car;
        at = kvs_file_side_dir(h, &path);
        unlinkat(at, path, 0);
    }
}

/* -- Reading ---------------------------------------------------------------------------------- */

static bool all_zero(const uint8_t *data, size_t len)
{
    return len == 0 || (data[0] == 0 && memcmp(data, data + 1, len - 1) == 0);
}

static int unpack(const struct kvs_file_sum *sum, uint8_t **data, uint8_t hash[16])
{
    size_t head = sum->encoding == KVS_FILE_PACKED ? KVS_FILE_SUM_BYTES : 0, n;
    uint8_t *buf;

    if (ZSTD_getFrameContentSize(*data + head, sum->stored - head) != sum->len)
        return -EBADMSG;
    buf = malloc(KV_MAX(sum->len, (uint64_t)1));
    if (!buf)
        return -ENOMEM;
    n = ZSTD_decompress(buf, sum->len, *data + head, sum->stored - head);
    if (ZSTD_isError(n) || n != sum->len) {
        free(buf);
        return -EBADMSG;
    }
    kvs_file_hash(buf, n, hash);
    free(*data);
    *data = buf;
    return 0;
}

static int verify(const struct kvs_file_sum *sum, uint64_t owner, uint8_t **data, uint8_t hash[16])
{
    int rc = sum->encoding == KVS_FILE_RAW ? 0 : unpack(sum, data, hash);

    if (rc < 0)
        return rc;
    return sum->owner == owner && memcmp(hash, sum->hash, 16) == 0 ? 0 : -EBADMSG;
}

/* Deleted since it was opened: its side-car went with it, and what it was can't be told any
 * more. */
static bool is_deleted(int fd)
{
    struct stat st;

    return fstat(fd, &st) < 0 || st.st_nlink == 0;
}

/* Read an open chunk or manifest and verify it. Files of other programs have no checksum: for them
 * only the traces of a power cut can be detected. */
static int read_open(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
                     uint64_t size, uint8_t **ret, size_t *ret_len)
{
    struct kvs_file_sum sum = {0};
    int known = load_sum(h, fd, side_car, nth, owner, &sum), rc;
    uint8_t hash[16];

    if (known < 0 && known != -ENODATA)
        return known;
    if (known == -ENODATA && is_deleted(fd))
        return -ENOENT;
    if (known == 0 && (sum.stored != size || sum.owner != owner))
        return -EBADMSG;
    if (size > SIZE_MAX / 2)
        return -EFBIG;
    *ret = malloc(KV_MAX(size, (uint64_t)1));
    if (!*ret)
        return -ENOMEM;
    rc = kvs_file_read_hashed(fd, *ret, size, hash);
    if (rc == 0 && known == 0)
        rc = verify(&sum, owner, ret, hash);
    else if (rc == 0 && all_zero(*ret, size))
        rc = -EBADMSG;
    *ret_len = known == 0 ? sum.len : size;
    return rc;
}

/* Whether nobody wrote to the file after it was read: a new time of use would hide that. */
static bool is_as_read(const struct stat *now, const struct stat *st)
{
    struct kvs_file_seen a = kvs_file_see(now), b = kvs_file_see(st);

    return kvs_file_unchanged(&a, &b) && a.ctime_ns == b.ctime_ns;
}

/* Eviction takes what was not used for longest; once a minute is exact enough for it. */
bool kvs_file_note_use(kv_store_v1 *h, int dirfd, const char *name, struct stat *st)
{
    struct timespec times[2];
    struct stat now;

    /* Another name may be another program's; a pinned chunk's publication notes its use. */
    if (kvs_file_deletable(h) < 0 || st->st_nlink != 1 ||
        (int64_t)(kv_wall_ns() / KV_NS_PER_S) - st->st_mtime <= USE_S ||
        fstatat(dirfd, name, &now, AT_SYMLINK_NOFOLLOW) < 0 || !is_as_read(&now, st) ||
        clock_gettime(CLOCK_REALTIME, &times[0]) < 0)
        return false;
    times[1] = times[0];
    st->st_mtim = times[0];
    return utimensat(dirfd, name, times, AT_SYMLINK_NOFOLLOW) == 0;
}

int kvs_file_open_read(int dirfd, const char *name, struct stat *ret_st)
{
    int fd = openat(dirfd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY), error;

    *ret_st = (struct stat){0};
    if (fd >= 0 && fstat(fd, ret_st) == 0 && S_ISREG(ret_st->st_mode))
        return fd;
    error = errno;
    if (fd >= 0)
        close(fd);
    if (fd < 0 && error != ELOOP && error != ENXIO) /* links; sockets and devices */
        return -error;
    return fstatat(dirfd, name, ret_st, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : -EBADMSG;
}

int kvs_file_read(kv_store_v1 *h, int dirfd, const char *name, const char *side_car, uint64_t owner,
                  uint8_t **ret, size_t *ret_len, struct stat *ret_st)
{
    int fd = kvs_file_open_read(dirfd, name, ret_st), rc;
    uint8_t *data = NULL;
    size_t len = 0;

    if (fd == -EBADMSG && dirfd == h->root)
        return -ENOENT; /* beside manifests there may be anything */
    if (fd < 0)
        return fd;
    rc = read_open(h, fd, side_car, 0, owner, (uint64_t)ret_st->st_size, &data, &len);
    if (rc == -EBADMSG && dirfd == h->root) { /* a side-car may name a second one */
        free(data);
        data = NULL;
        rc = read_open(h, fd, side_car, 1, owner, (uint64_t)ret_st->st_size, &data, &len);
    }
    close(fd);
    if (rc < 0) {
        free(data);
        return rc;
    }
    KVS_FILE_ADD(h->read, ret_st->st_size);
    *ret = data;
    *ret_len = len;
    return 0;
}

static int verify_open(kv_store_v1 *h, int fd, const char *hex, uint64_t owner, uint64_t size)
{
    char side_car[KVS_FILE_HEX + 8];
    struct kvs_file_sum sum = {0};
    uint8_t hash[16], *data = NULL;
    size_t len;
    int rc;

    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_load_sum(h, fd, side_car, owner, &sum);
    if (rc < 0)
        return rc;
    if (sum.stored != size || sum.owner != owner)
        return -EBADMSG;
    if (sum.encoding != KVS_FILE_RAW) {
        rc = read_open(h, fd, side_car, 0, owner, size, &data, &len);
        free(data);
        return rc;
    }
    rc = kvs_file_hash_file(fd, size, hash);
    return rc < 0 ? rc : memcmp(hash, sum.hash, 16) == 0 ? 0 : -EBADMSG;
}

int kvs_file_verify(kv_store_v1 *h, int dirfd, const char *hex, uint64_t owner, struct stat *ret_st)
{
    int fd = kvs_file_open_read(dirfd, hex, ret_st), rc = -EBADMSG;
    bool changed = true;

    if (fd < 0)
        return fd;
    /* Another publication may have noted its use meanwhile, or somebody may have written: look again. */
    for (int i = 0; i < VERIFY_TRIES && changed; i++) {
        struct kvs_file_seen before = kvs_file_see(ret_st), now;

        rc = verify_open(h, fd, hex, owner, (uint64_t)ret_st->st_size);
        if (rc < 0 || fstat(fd, ret_st) < 0)
            break;
        now = kvs_file_see(ret_st);
        changed = !kvs_file_unchanged(&before, &now);
    }
    if (rc == 0 && changed)
        rc = -EBADMSG;
    if (rc == 0)
        KVS_FILE_ADD(h->read, ret_st->st_size);
    close(fd);
    return rc;
}

/* -- Setting aside ---------------------------------------------------------------------------- */

static int count_bad(kv_store_v1 *h)
{
    DIR *dir = kvs_file_dir(h->bad);
    int n = 0;

    if (!dir)
        return KVS_FILE_BAD_MAX;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

/* Whether it is still there: else it was replaced meanwhile, or set aside by another. */
static bool is_same(int dirfd, const char *name, const struct stat *st)
{
    struct stat now;

    return fstatat(dirfd, name, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_ino == st->st_ino;
}

static int to_bad(kv_store_v1 *h, int dirfd, const char *name)
{
    char aside[KVS_FILE_NAME + 8];

    snprintf(aside, sizeof(aside), "%.200s.%.8s.%" PRIu64, name, *h->writer ? h->writer : "full",
             atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed));
    return renameat(dirfd, name, h->bad, aside) < 0 ? -errno : 0;
}

/* Move a damaged file to bad/. Entries that aren't files are never deleted: they aren't the
 * store's. */
static void move_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    int rc;

    if (S_ISREG(st->st_mode) && count_bad(h) >= KVS_FILE_BAD_MAX)
        rc = unlinkat(dirfd, name, 0) < 0 ? -errno : 0;
    else
        rc = to_bad(h, dirfd, name);
    if (rc < 0)
        kvs_file_fail(h, -rc, "can't set a bad file aside", name);
    else if (S_ISREG(st->st_mode) && dirfd != h->root && dirfd != h->tmp)
        kvs_file_used_add(h, -(int64_t)st->st_size);
}

/* @name isn't the store's file. Returns 0 when it is out of the way. */
static int clear_way(kv_store_v1 *h, int dirfd, const char *name)
{
    char where[512], which[512];
    int rc = to_bad(h, dirfd, name);

    if (rc == 0)
        kv_log_warn("store", "moved aside: not a file of this store", "dir=%s name=%s",
                    kv_log_quote(where, sizeof(where), h->dir),
                    kv_log_quote(which, sizeof(which), name));
    return rc;
}

int kvs_file_open_own(kv_store_v1 *h, int dirfd, const char *name, int flags, bool *ret_moved)
{
    int fd = kv_beneath_file(dirfd, name, flags, 0666, KV_BENEATH_ANY_OWNER, NULL);

    if (fd != -ELOOP && fd != -EISDIR && fd != -ENXIO && fd != -EMLINK)
        return fd;
    if (kvs_file_deletable(h) < 0 || clear_way(h, dirfd, name) < 0)
        return fd;
    if (ret_moved)
        *ret_moved = true;
    return kv_beneath_file(dirfd, name, flags, 0666, KV_BENEATH_ANY_OWNER, NULL);
}

int kvs_file_rename(kv_store_v1 *h, int from_dir, const char *from, int to_dir, const char *to)
{
    if (renameat(from_dir, from, to_dir, to) == 0)
        return 0;
    if (errno != EISDIR || clear_way(h, to_dir, to) < 0)
        return -errno;
    return renameat(from_dir, from, to_dir, to) < 0 ? -errno : 0;
}

/* A side-car may have been replaced between the looks at it and at its file: not under our flock.
 * And what can't be looked at now may be good. */
static bool may_be_good(kv_store_v1 *h, int dirfd, const char *name)
{
    char side_car[KVS_FILE_HEX + 8];
    uint8_t key[KVS_FILE_KEY_MAX], *data = NULL;
    int len = dirfd == h->tmp ? -1 : kvs_file_unhex(key, name);
    struct stat st;
    size_t n;
    int rc;

    if (len < 0)
        return false;
    kvs_file_chunk_side_car(side_car, name);
    rc = kvs_file_read(h, dirfd, name, side_car, kvs_file_owner(key, (size_t)len, false), &data, &n,
                       &st);
    free(data);
    return rc == 0 || kvs_file_passing(rc);
}

static int set_aside_locked(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    char where[512], which[512];

    if (!is_same(dirfd, name, st) || may_be_good(h, dirfd, name))
        return -EAGAIN;
    KVS_FILE_ADD(h->bad_chunks, 1);
    kv_log_error("store", "stored bytes don't verify", "dir=%s name=%s",
                 kv_log_quote(where, sizeof(where), h->dir),
                 kv_log_quote(which, sizeof(which), name));
    if (kvs_file_deletable(h) == 0)
        move_aside(h, dirfd, name, st);
    return 0;
}

int kvs_file_set_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    int rc;

    pthread_mutex_lock(&h->commit); /* flocks are the handle's, not the thread's */
    kvs_file_lock(dirfd, LOCK_EX);
    rc = set_aside_locked(h, dirfd, name, st);
    flock(dirfd, LOCK_UN);
    pthread_mutex_unlock(&h->commit);
    return rc;
}
