// SPDX-License-Identifier: Apache-2.0
/**
 * Where a file's checksum is kept: in an extended attribute, at the beginning of a packed file, or
 * in a side-car below sums/ where attributes aren't supported.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/file/beneath.h"
#include "base/file/write_all.h"
#include "store/file/file_impl.h"

#define XATTR "user.kvasir.chunk"

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

/* Write a new file under a name that no other writer uses. O_EXCL follows no link. */
static int write_synced(kv_store_v1 *h, const char *path, const uint8_t *bytes, size_t len)
{
    int at = kvs_file_side_dir(h, &path);
    int fd = openat(at, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), rc;

    if (fd < 0)
        return -errno;
    rc = kv_write_all(fd, bytes, len);
    if (rc == 0 && fsync(fd) < 0) /* slow, but used only on file systems without xattrs */
        rc = -errno;
    close(fd);
    return rc;
}

/* Write a side-car into sums/, where it appears whole. */
static int write_side_car(kv_store_v1 *h, const char *path, const uint8_t *bytes)
{
    char tmp[KVS_FILE_TMP + 8];
    const char *from = tmp;
    int from_dir, rc;

    if (strncmp(path, "tmp/", 4) == 0)
        return write_synced(h, path, bytes, KVS_FILE_SUM_BYTES);
    kvs_file_tmp_side_car(h, tmp, atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed));
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
        return 0; /* the file holds its checksum */
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

/* -ENODATA: the file doesn't begin with a checksum. -EBADMSG: the checksum is of another chunk,
 * another length, or of no encoding that this version knows: then the bytes behind it aren't content. */
static int load_inside(int fd, uint64_t owner, struct kvs_file_sum *ret)
{
    uint8_t bytes[KVS_FILE_SUM_BYTES];
    struct stat st;

    if (pread(fd, bytes, sizeof(bytes), 0) != sizeof(bytes) ||
        memcmp(bytes, KVS_FILE_SUM_MAGIC, 4) != 0)
        return -ENODATA;
    if (kvs_file_sum_decode(ret, bytes) < 0 || ret->encoding != KVS_FILE_PACKED)
        return -EBADMSG;
    if (fstat(fd, &st) < 0 || ret->stored != (uint64_t)st.st_size || ret->owner != owner)
        return -EBADMSG;
    return 0;
}

int kvs_file_load_sum(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
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

static int is_ours(kv_store_v1 *h, const char *file)
{
    char side_car[KVS_FILE_NAME + 16];
    struct kvs_file_sum sum = {0};
    struct stat st;
    int fd = kvs_file_open_read(h->root, file, &st);
    bool fits = false;

    if (fd < 0)
        return fd == -EBADMSG ? -ENOENT : fd;
    kvs_file_manifest_side_car(side_car, file);
    for (int nth = 0; nth < 2; nth++)
        fits |= kvs_file_load_sum(h, fd, side_car, nth, 0, &sum) == 0 &&
                sum.stored == (uint64_t)st.st_size;
    close(fd);
    return fits;
}

int kvs_file_is_ours(kv_store_v1 *h, const char *file)
{
    int rc = is_ours(h, file), fd;

    if (rc != 0)
        return rc;
    fd = kvs_file_lock_root(h); /* another process may be replacing the side-car */
    rc = is_ours(h, file);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Write a manifest's side-car, which is replaced before the manifest. It also holds the checksum of
 * the manifest still in place, which stays if the replacement fails. */
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
        return kvs_file_passing(rc) ? rc : 0; /* no checksum in place that could be lost */
    kvs_file_sum_make(&sum, owner, data, len);
    free(data);
    kvs_file_sum_encode(bytes, &sum);
    kvs_file_tmp_side_car(h, path, n);
    at = kvs_file_side_dir(h, &tmp);
    fd = kv_beneath_file(at, tmp, O_WRONLY | O_APPEND, 0, 0, NULL);
    if (fd < 0)
        return fd;
    rc = kv_write_all(fd, bytes, sizeof(bytes));
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    close(fd);
    return rc;
}
