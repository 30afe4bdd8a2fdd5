// SPDX-License-Identifier: Apache-2.0
/** Files of the file store are read whole and verified. */
#include <fcntl.h>
#include <unistd.h>
#include <zstd.h>

#include "base/core/clock.h"
#include "store/file/file_impl.h"

enum {
    USE_S = 60,
    VERIFY_TRIES = 100 /* attempts to verify a file that others use meanwhile */
};

static bool all_zero(const uint8_t *data, size_t len)
{
    return len == 0 || (data[0] == 0 && memcmp(data, data + 1, len - 1) == 0);
}

static int unpack(const struct kvs_file_sum *sum, uint8_t **data, uint8_t hash[16])
{
    const uint8_t *frame = *data + KVS_FILE_SUM_BYTES;
    size_t len = sum->stored - KVS_FILE_SUM_BYTES, n;
    uint8_t *buf;

    if (ZSTD_getFrameContentSize(frame, len) != sum->len)
        return -EBADMSG;
    buf = malloc(KV_MAX(sum->len, (uint64_t)1));
    if (!buf)
        return -ENOMEM;
    n = ZSTD_decompress(buf, sum->len, frame, len);
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

/* True when the open file was deleted: its side-car went with it, so its checksum is unknown. */
static bool is_deleted(int fd)
{
    struct stat st;

    return fstat(fd, &st) < 0 || st.st_nlink == 0;
}

int kvs_file_value_scatter(struct kvs_file_value *value)
{
    struct kvs_cursor at = {0};
    int rc = value->parts && value->len > value->room ? -EMSGSIZE : 0;

    if (!value->parts || !value->data)
        return rc;
    if (rc == 0)
        kvs_parts_scatter(value->parts, value->n_parts, &at, value->data, value->len);
    free(KV_STEAL(value->data));
    return rc;
}

static int read_whole(int fd, uint64_t size, struct kvs_file_value *value, uint8_t hash[16])
{
    value->data = malloc(KV_MAX(size, (uint64_t)1));
    return value->data ? kvs_file_read_hashed(fd, value->data, size, hash) : -ENOMEM;
}

/* True for a file of zeros that was never written to. Reading it would take its length of memory. */
static bool is_hole(int fd, uint64_t size)
{
    struct stat st;

    return size > 1 << 20 && fstat(fd, &st) == 0 && st.st_blocks == 0;
}

/* Read an open chunk or manifest and verify it. Files of other programs have no checksum; in them
 * only the traces of a power cut can be detected. */
static int read_open(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
                     uint64_t size, struct kvs_file_value *value)
{
    struct kvs_file_sum sum = {0};
    int known = kvs_file_load_sum(h, fd, side_car, nth, owner, &sum), rc;
    uint8_t hash[16];

    if (known < 0 && known != -ENODATA)
        return known;
    if (known == -ENODATA && is_deleted(fd))
        return -ENOENT;
    if (known == 0 && (sum.stored != size || sum.owner != owner))
        return -EBADMSG;
    if (size > SIZE_MAX / 2)
        return -EFBIG;
    if (known == -ENODATA && is_hole(fd, size))
        return -EBADMSG;
    value->len = known == 0 ? sum.len : size;
    if (value->parts && value->len > value->room)
        return -EMSGSIZE;
    if (value->parts && known == 0 && sum.encoding == KVS_FILE_RAW)
        rc = kvs_file_read_parts(fd, value->parts, value->n_parts, size, hash);
    else if (value->each && known == 0 && sum.encoding == KVS_FILE_RAW)
        rc = kvs_file_read_pieces(fd, size, value, hash);
    else
        rc = read_whole(fd, size, value, hash);
    if (rc == 0 && known == 0)
        rc = verify(&sum, owner, &value->data, hash);
    else if (rc == 0 && all_zero(value->data, size))
        rc = -EBADMSG;
    if (rc != 0)
        free(KV_STEAL(value->data));
    return rc == 0 ? kvs_file_value_scatter(value) : rc;
}

/* True when the file wasn't written to after it was read; setting a new time of use would hide such
 * a write. */
static bool is_as_read(const struct stat *now, const struct stat *st)
{
    struct kvs_file_seen a = kvs_file_see(now), b = kvs_file_see(st);

    return kvs_file_unchanged(&a, &b) && a.ctime_ns == b.ctime_ns;
}

/* Mark a chunk as used, at most once a minute. Eviction, which removes the least recently used,
 * needs no better resolution. */
bool kvs_file_note_use(kv_store_v1 *h, int dirfd, const char *name, struct stat *st)
{
    struct timespec times[2];
    struct stat now;

    /* A second name may be another program's. A pinned chunk is marked by its publication. */
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
    int fd, error;

    *ret_st = (struct stat){0};
    if (dirfd < 0) /* a folder that couldn't be opened, and why */
        return dirfd;
    fd = openat(dirfd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    error = fd < 0 || fstat(fd, ret_st) < 0 ? errno : 0;
    if (error == 0 && S_ISREG(ret_st->st_mode))
        return fd;
    if (fd >= 0)
        close(fd);
    if (error && error != ELOOP && error != ENXIO) /* ELOOP: links; ENXIO: sockets and devices */
        return -error;
    return fstatat(dirfd, name, ret_st, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : -EBADMSG;
}

int kvs_file_read_value(kv_store_v1 *h, int dirfd, const char *name, const char *side_car,
                        uint64_t owner, struct kvs_file_value *value, struct stat *ret_st)
{
    int fd = kvs_file_open_read(dirfd, name, ret_st), rc;

    if (fd == -EBADMSG && dirfd == h->root)
        return -ENOENT; /* the root may hold other entries beside manifests */
    if (fd < 0)
        return fd;
    rc = read_open(h, fd, side_car, 0, owner, (uint64_t)ret_st->st_size, value);
    if (rc == -EBADMSG && dirfd == h->root) /* the side-car may hold a second checksum */
        rc = read_open(h, fd, side_car, 1, owner, (uint64_t)ret_st->st_size, value);
    close(fd);
    if (rc == 0)
        KVS_FILE_ADD(h->read, ret_st->st_size);
    return rc;
}

int kvs_file_read(kv_store_v1 *h, int dirfd, const char *name, const char *side_car, uint64_t owner,
                  uint8_t **ret, size_t *ret_len, struct stat *ret_st)
{
    struct kvs_file_value value = {0};
    int rc = kvs_file_read_value(h, dirfd, name, side_car, owner, &value, ret_st);

    if (rc == 0) {
        *ret = value.data;
        *ret_len = value.len;
    }
    return rc;
}

static int verify_open(kv_store_v1 *h, int fd, const char *hex, uint64_t owner, uint64_t size)
{
    char side_car[KVS_FILE_HEX + 8];
    struct kvs_file_value value = {0};
    struct kvs_file_sum sum = {0};
    uint8_t hash[16];
    int rc;

    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_load_sum(h, fd, side_car, 0, owner, &sum);
    if (rc < 0)
        return rc;
    if (sum.stored != size || sum.owner != owner)
        return -EBADMSG;
    if (sum.encoding != KVS_FILE_RAW) {
        rc = read_open(h, fd, side_car, 0, owner, size, &value);
        free(value.data);
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
    /* A changed file was marked as used by a publication, or written to: verify again. */
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
