// SPDX-License-Identifier: Apache-2.0
/** Files of the file store are written whole into tmp/ before they get their names. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>
#include <zstd.h>

#include "base/core/log.h"
#include "base/file/write_all.h"
#include "store/file/file_impl.h"

enum {
    EARLY = 256 * 1024, /* files of at least this many bytes may start writing to disk at once */
    /* descriptors kept per handle; further files are opened again for their fsync */
    FDS_KEPT = 64
};

int kvs_file_fail(kv_store_v1 *h, int error, const char *what, const char *name)
{
    char where[512], which[512];

    KVS_FILE_ADD(h->errors, 1);
    kv_log_error("store", what, "dir=%s%s%s error=\"%s\"",
                 kv_log_quote(where, sizeof(where), h->dir), name ? " name=" : "",
                 name ? kv_log_quote(which, sizeof(which), name) : "", strerror(error));
    return -error;
}

void kvs_file_tmp_name(const kv_store_v1 *h, char ret[KVS_FILE_TMP], uint64_t n)
{
    snprintf(ret, KVS_FILE_TMP, "%s.%" PRIu64, h->writer, n);
}

void kvs_file_tmp_side_car(const kv_store_v1 *h, char ret[KVS_FILE_TMP + 8], uint64_t n)
{
    snprintf(ret, KVS_FILE_TMP + 8, "tmp/%s.%" PRIu64 ".s", h->writer, n);
}

int kvs_file_lock(int fd, int how)
{
    int rc;

    do
        rc = flock(fd, how) < 0 ? -errno : 0;
    while (rc == -EINTR);
    return rc;
}

int kvs_file_lock_root(kv_store_v1 *h)
{
    int fd = openat(h->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0)
        kvs_file_lock(fd, LOCK_SH);
    return fd;
}

/* Choose the bytes to store. Compress where that saves an eighth, and put the checksum before the
 * frame, so that no reader takes a frame for content. The caller frees @ret_owned. */
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

/*
 * Begin to write the file to the disk, so that its publication finds little left. The call blocks
 * while the device has all the work it takes: one thread at a time keeps it busy, others go on
 * copying.
 */
static void begin_writing(kv_store_v1 *h, int fd)
{
    if (atomic_exchange(&h->begins_writing, true))
        return;
    sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE); /* a hint */
    atomic_store(&h->begins_writing, false);
}

/* Note the checksum of a file that is written, and begin to write it to the disk. */
static int complete(kv_store_v1 *h, int fd, uint64_t n, const struct kvs_file_sum *sum)
{
    char side_car[KVS_FILE_TMP + 8];
    int rc;

    kvs_file_tmp_side_car(h, side_car, n);
    rc = kvs_file_store_sum(h, fd, side_car, sum);
    if (rc == 0 && sum->stored >= EARLY)
        begin_writing(h, fd);
    return rc;
}

int kvs_file_write_tmp(kv_store_v1 *h, uint64_t owner, const void *data, size_t len, bool packed,
                       uint64_t *ret_n, struct kvs_file_sum *ret_sum, int *ret_fd)
{
    const struct iovec part = {.iov_base = (void *)data, .iov_len = len};

    return kvs_file_write_tmp_parts(h, owner, &part, 1, len, packed, ret_n, ret_sum, ret_fd);
}

/* Write parts into a new file, as one frame where that saves room. */
static int write_packed(kv_store_v1 *h, int fd, const struct iovec *parts, size_t n_parts,
                        struct kvs_file_sum *sum)
{
    const void *data = n_parts == 1 ? parts->iov_base : NULL, *bytes;
    uint8_t *joined = NULL;
    void *owned = NULL;
    int rc;

    kvs_file_sum_parts(sum, sum->owner, parts, n_parts, sum->len);
    if (n_parts != 1) {
        data = joined = malloc(KV_MAX(sum->len, (uint64_t)1));
        if (!joined)
            return -ENOMEM;
        kvs_parts_gather(parts, n_parts, joined);
    }
    pack(h->opts.zstd, data, sum, &bytes, &owned);
    rc = kv_write_all(fd, bytes, sum->stored);
    free(owned);
    free(joined);
    return rc;
}

int kvs_file_write_tmp_parts(kv_store_v1 *h, uint64_t owner, const struct iovec *parts,
                             size_t n_parts, size_t len, bool packed, uint64_t *ret_n,
                             struct kvs_file_sum *ret_sum, int *ret_fd)
{
    uint64_t n = atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed);
    char name[KVS_FILE_TMP];
    int fd, rc;

    kvs_file_tmp_name(h, name, n);
    fd = openat(h->tmp, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return kvs_file_fail(h, errno, "can't make a file", name);
    *ret_sum = (struct kvs_file_sum){.len = len, .stored = len, .owner = owner};
    rc = packed && h->opts.zstd ? write_packed(h, fd, parts, n_parts, ret_sum)
                                : kvs_file_write_hashed(fd, parts, n_parts, ret_sum->hash);
    if (rc == 0)
        rc = complete(h, fd, n, ret_sum);
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
            rc = -errno; /* file systems that report quotas only at close */
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
        kvs_file_tmp_side_car(h, side_car, n);
        path = side_car;
        at = kvs_file_side_dir(h, &path);
        unlinkat(at, path, 0);
    }
}
