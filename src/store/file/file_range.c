// SPDX-License-Identifier: Apache-2.0
/* Parts of chunks. A part of a chunk as it lies in the folder is read from its file; of a chunk that is
 * compressed, or not yet published, all is read and verified. */
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "store/file/file_impl.h"

/* Versions: the file, by what stays when it is marked as used. A file that takes the place of another
 * has another inode, or the same at a later time. */
static int make_tag(int fd, char ret[KV_STORE_TAG_MAX])
{
    struct statx st = {0};

    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO | STATX_SIZE | STATX_BTIME,
              &st) < 0)
        return -errno;
    snprintf(ret, KV_STORE_TAG_MAX, "%x.%x-%" PRIx64 "-%" PRIx64 "-%" PRIx64 ".%x",
             st.stx_dev_major, st.stx_dev_minor, (uint64_t)st.stx_ino, (uint64_t)st.stx_size,
             (uint64_t)st.stx_btime.tv_sec, st.stx_btime.tv_nsec);
    return 0;
}

/* Compare with the version that the caller wants, or tell it. */
static int check_tag(kv_store_range *range, const char *tag)
{
    if (range->tag[0])
        return strcmp(range->tag, tag) == 0 ? 0 : -ESTALE;
    snprintf(range->tag, sizeof(range->tag), "%s", tag);
    return 0;
}

static int check_end(const kv_store_range *range, uint64_t len)
{
    return range->offset > len || range->len > len - range->offset ? -ERANGE : 0;
}

/* Read one part. */
static int read_part(int fd, uint64_t offset, uint8_t *buf, size_t len)
{
    size_t at = 0;

    while (at < len) {
        ssize_t n = pread(fd, buf + at, len - at, (off_t)(offset + at));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -ERANGE;
        at += (size_t)n;
    }
    return 0;
}

/* Read as many parts as fit into one call, and the rest one by one. */
static int read_at(int fd, const kv_store_range *range)
{
    uint64_t offset = range->offset;
    size_t i = 0;
    int rc = 0;

    while (i < range->n_parts && rc == 0) {
        size_t n = KV_MIN(range->n_parts - i, (size_t)IOV_MAX), end = i + n;
        ssize_t got = preadv(fd, range->parts + i, (int)n, (off_t)offset);

        if (got < 0 && errno != EINTR)
            return -errno;
        for (got = KV_MAX(got, 0); i < end && rc == 0; i++) {
            const struct iovec *part = &range->parts[i];
            size_t have = KV_MIN((size_t)got, part->iov_len);

            if (have < part->iov_len)
                rc = read_part(fd, offset + have, (uint8_t *)part->iov_base + have,
                               part->iov_len - have);
            got -= (ssize_t)have;
            offset += part->iov_len;
        }
    }
    return rc;
}

static int read_file(kv_store_v1 *h, int fd, kv_store_range *range, const char *hex, uint64_t size)
{
    uint64_t owner = kvs_file_owner(range->hash, range->hash_len, false);
    char side_car[KVS_FILE_HEX + 8], tag[KV_STORE_TAG_MAX];
    struct kvs_file_sum sum = {0};
    int rc;

    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_load_sum(h, fd, side_car, 0, owner, &sum);
    if (rc < 0 && rc != -ENODATA)
        return rc;
    if (rc == 0 && sum.encoding != KVS_FILE_RAW)
        return -EAGAIN;
    if (rc == 0 && (sum.stored != size || sum.owner != owner))
        return -EBADMSG;
    rc = make_tag(fd, tag);
    if (rc == 0)
        rc = check_tag(range, tag);
    if (rc == 0)
        rc = check_end(range, size);
    return rc < 0 ? rc : read_at(fd, range);
}

/* Read all of the chunk, where its file doesn't have its bytes as they are. Its content is the version. */
static int read_whole(kv_store_v1 *h, kv_store_range *range)
{
    struct kvs_file_value value = {0};
    struct kvs_cursor at = {0};
    char tag[KV_STORE_TAG_MAX];
    uint8_t hash[16];
    int rc = kvs_file_get_chunk(h, range->hash, range->hash_len, &value);

    if (rc < 0)
        return rc;
    kvs_file_hash(value.data, value.len, hash);
    snprintf(tag, sizeof(tag), "w-");
    for (size_t i = 0; i < sizeof(hash); i++)
        snprintf(tag + 2 + 2 * i, 3, "%02x", hash[i]);
    rc = check_tag(range, tag);
    if (rc == 0)
        rc = check_end(range, value.len);
    if (rc == 0)
        kvs_parts_scatter(range->parts, range->n_parts, &at, value.data + range->offset,
                          range->len);
    free(value.data);
    return rc;
}

static int read_range(kv_store_v1 *h, kv_store_range *range)
{
    int dir = h->fan[kvs_file_fan(range->hash)], fd, rc;
    char hex[KVS_FILE_HEX];
    struct stat st;

    kvs_file_hex(hex, range->hash, range->hash_len);
    fd = kvs_file_open_read(dir, hex, &st);
    if (fd == -ENOENT)
        return read_whole(h, range); /* pending, or in a folder that was moved */
    if (fd < 0)
        return fd;
    rc = read_file(h, fd, range, hex, (uint64_t)st.st_size);
    close(fd);
    if (rc == -EAGAIN)
        return read_whole(h, range);
    if (rc == 0) {
        kvs_file_note_use(h, dir, hex, &st);
        KVS_FILE_ADD(h->gets, 1);
        KVS_FILE_ADD(h->read, range->len);
    }
    return rc;
}

int kvs_file_get_ranges(kv_store_v1 *h, kv_store_range *ranges, size_t n)
{
    int found = 0;

    for (size_t i = 0; i < n; i++) {
        int rc = kvs_file_check(h, ranges[i].hash, ranges[i].hash_len);

        if (rc < 0 || !ranges[i].parts || !ranges[i].len)
            return rc < 0 ? rc : -EINVAL;
    }
    for (size_t i = 0; i < n; i++) {
        ranges[i].rc = read_range(h, &ranges[i]);
        found += ranges[i].rc == 0;
    }
    return found;
}
