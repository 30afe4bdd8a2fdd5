// SPDX-License-Identifier: Apache-2.0
/**
 * The file store's own checksums. Consumers choose the keys, which need not be hashes of the bytes.
 * Only a checksum tells a zero-filled, shortened or misplaced file from a good one.
 */
#include <fcntl.h>
#include <unistd.h>

#include "base/core/le.h"
#include "base/core/xxh.h"
#include "base/hash/hash.h"
#include "store/file/file_impl.h"

enum { PARTS = 64 }; /* of one system call */

void kvs_file_hash(const void *data, size_t len, uint8_t ret_hash[16])
{
    kv_hash(data, len, ret_hash);
}

uint64_t kvs_file_owner(const void *key, size_t len, bool manifest)
{
    return kv_xxh64(key, len, manifest ? 1 : 0);
}

void kvs_file_sum_make(struct kvs_file_sum *ret, uint64_t owner, const void *data, size_t len)
{
    *ret = (struct kvs_file_sum){.len = len, .stored = len, .owner = owner};
    kvs_file_hash(data, len, ret->hash);
}

void kvs_file_sum_parts(struct kvs_file_sum *ret, uint64_t owner, const struct iovec *parts,
                        size_t n_parts, size_t len)
{
    XXH3_state_t state;

    if (n_parts == 1) {
        kvs_file_sum_make(ret, owner, parts->iov_base, len);
        return;
    }
    *ret = (struct kvs_file_sum){.len = len, .stored = len, .owner = owner};
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    for (size_t i = 0; i < n_parts; i++)
        if (parts[i].iov_len)
            kv_hash_update(&state, parts[i].iov_base, parts[i].iov_len);
    kv_hash_done(&state, ret->hash);
}

void kvs_file_sum_encode(uint8_t out[KVS_FILE_SUM_BYTES], const struct kvs_file_sum *sum)
{
    memcpy(out, KVS_FILE_SUM_MAGIC "\1", 5);
    out[5] = sum->encoding;
    out[6] = out[7] = 0;
    kv_put_le64(out + 8, sum->len);
    kv_put_le64(out + 16, sum->stored);
    kv_put_le64(out + 24, sum->owner);
    memcpy(out + 32, sum->hash, 16);
}

int kvs_file_sum_decode(struct kvs_file_sum *ret, const uint8_t in[KVS_FILE_SUM_BYTES])
{
    if (memcmp(in, KVS_FILE_SUM_MAGIC "\1", 5) != 0 || in[5] > KVS_FILE_PACKED || in[6] || in[7])
        return -EBADMSG;
    ret->encoding = in[5];
    ret->len = kv_get_le64(in + 8);
    ret->stored = kv_get_le64(in + 16);
    ret->owner = kv_get_le64(in + 24);
    memcpy(ret->hash, in + 32, 16);
    if (ret->encoding == KVS_FILE_RAW && ret->len != ret->stored)
        return -EBADMSG;
    if (ret->encoding == KVS_FILE_PACKED && ret->stored < KVS_FILE_SUM_BYTES)
        return -EBADMSG;
    return 0;
}

/* Read and hash @len bytes of a file, a piece at a time. Pieces go one behind the other into
 * @whole, or each into value->buf for value->each (NULL: hash only). */
static int read_hashed(int fd, uint8_t *whole, const struct kvs_file_value *value, uint64_t len,
                       uint8_t ret_hash[16])
{
    size_t piece = KV_MIN(value ? value->room : SIZE_MAX, kv_hash_piece());
    XXH3_state_t state;
    uint64_t done = 0;
    int rc = 0;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    while (done < len && rc == 0) {
        uint8_t *to = value ? value->buf : &whole[done];
        ssize_t n = pread(fd, to, KV_MIN(len - done, (uint64_t)piece), (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EBADMSG;
        kv_hash_update(&state, to, (size_t)n);
        if (value && value->each)
            rc = value->each(value->arg, done, to, (size_t)n);
        done += (uint64_t)n;
    }
    kv_hash_done(&state, ret_hash);
    return rc;
}

int kvs_file_read_hashed(int fd, void *buf, size_t len, uint8_t ret_hash[16])
{
    return read_hashed(fd, buf, NULL, len, ret_hash);
}

int kvs_file_read_parts(int fd, const struct iovec *parts, size_t n_parts, uint64_t len,
                        uint8_t ret_hash[16])
{
    struct kvs_cursor at = {0};
    XXH3_state_t state;
    uint64_t done = 0;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    while (done < len) {
        struct iovec to[PARTS];
        size_t some;
        int n = kvs_parts_pieces(parts, n_parts, at, KV_MIN(len - done, (uint64_t)kv_hash_piece()),
                                 to, PARTS, &some);
        ssize_t got = preadv(fd, to, n, (off_t)done);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EBADMSG;
        done += (uint64_t)got;
        kvs_parts_skip(parts, n_parts, &at, (size_t)got);
        for (int i = 0; i < n && got > 0; got -= (ssize_t)to[i++].iov_len)
            kv_hash_update(&state, to[i].iov_base, KV_MIN((size_t)got, to[i].iov_len));
    }
    kv_hash_done(&state, ret_hash);
    return 0;
}

int kvs_file_write_hashed(int fd, const struct iovec *parts, size_t n_parts, uint8_t ret_hash[16])
{
    struct kvs_cursor at = {0};
    struct iovec from[PARTS];
    XXH3_state_t state;
    size_t some;
    int n;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    while ((n = kvs_parts_pieces(parts, n_parts, at, kv_hash_piece(), from, PARTS, &some)) > 0) {
        ssize_t got = writev(fd, from, n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EIO;
        kvs_parts_skip(parts, n_parts, &at, (size_t)got);
        for (int i = 0; i < n && got > 0; got -= (ssize_t)from[i++].iov_len)
            kv_hash_update(&state, from[i].iov_base, KV_MIN((size_t)got, from[i].iov_len));
    }
    kv_hash_done(&state, ret_hash);
    return 0;
}

int kvs_file_read_pieces(int fd, uint64_t len, const struct kvs_file_value *value,
                         uint8_t ret_hash[16])
{
    return read_hashed(fd, NULL, value, len, ret_hash);
}

int kvs_file_hash_file(int fd, uint64_t len, uint8_t ret_hash[16])
{
    const size_t room = (size_t)KV_MIN(KV_MAX(len, UINT64_C(1)), (uint64_t)kv_hash_piece());
    const struct kvs_file_value value = {.buf = malloc(room), .room = room};
    int rc = value.buf ? read_hashed(fd, NULL, &value, len, ret_hash) : -ENOMEM;

    free(value.buf);
    return rc;
}
