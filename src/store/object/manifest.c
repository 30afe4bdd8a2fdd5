// SPDX-License-Identifier: Apache-2.0
/*
 * Manifest bytes (little-endian; docs/formats.md has the table):
 *
 *     magic 8 | version 2 | format 2 | header_len 4 | bytes 8 | created_s 8 | n_chunks 8 |
 *     n_weaves 4 | fingerprint_len 4 | (header_len - 48 bytes a later writer added) |
 *     fingerprint | n_chunks * (key 16, len 4) | n_weaves * 24 | XXH3-128 of all before, 16
 *
 * Reading checks everything: the checksum first, then every count against the bytes left, then that
 * lengths add up and weaves lie inside the object, in order.
 */
#include "store/object/manifest.h"

#include "base/file/own_manifest.h"
#include "base/hash/hash.h"

enum { HEADER = KV_OWN_HEADER, CHUNK = KV_OWN_CHUNK, WEAVE = 24, SUM = KV_OWN_SUM };

void kvs_chunk_key(const void *data, size_t len, uint8_t ret[16])
{
    kv_hash(data, len, ret);
}

/* -- building ---------------------------------------------------------------------------------- */

/* Grow an array by doubling when it has no room for one more than @n elements. NULL: out of memory,
 * the array is unchanged. */
static void *grow(void *array, size_t n, size_t *capacity, size_t size)
{
    size_t more = *capacity ? *capacity * 2 : 64;

    if (n < *capacity)
        return array;
    array = reallocarray(array, more, size);
    if (array)
        *capacity = more;
    return array;
}

int kvs_manifest_add(struct kvs_manifest *m, const uint8_t key[16], uint32_t len)
{
    struct kvs_chunk_ref *chunks =
        grow(m->chunks, m->n_chunks, &m->chunks_capacity, sizeof(*chunks));

    if (!chunks)
        return -ENOMEM;
    m->chunks = chunks;
    if (m->bytes + len < m->bytes)
        return -EFBIG;
    memcpy(m->chunks[m->n_chunks].key, key, 16);
    m->chunks[m->n_chunks++].len = len;
    m->bytes += len;
    return 0;
}

int kvs_manifest_add_weave(struct kvs_manifest *m, uint64_t offset, uint32_t rows,
                           uint32_t row_bytes, uint32_t piece_bytes)
{
    struct kvs_weave *last = m->n_weaves ? &m->weaves[m->n_weaves - 1] : NULL;
    struct kvs_weave *weaves;

    if (last && last->rows == rows && last->row_bytes == row_bytes &&
        last->piece_bytes == piece_bytes && last->n < UINT32_MAX &&
        last->offset + kvs_weave_region(last) * last->n == offset) {
        last->n++;
        return 0;
    }
    weaves = grow(m->weaves, m->n_weaves, &m->weaves_capacity, sizeof(*weaves));
    if (!weaves)
        return -ENOMEM;
    m->weaves = weaves;
    weaves[m->n_weaves++] = (struct kvs_weave){offset, rows, row_bytes, piece_bytes, 1};
    return 0;
}

static void put_le(struct kv_buf *buf, uint64_t value, size_t bytes)
{
    uint8_t le[8];

    for (size_t i = 0; i < bytes; i++)
        le[i] = (uint8_t)(value >> (8 * i));
    kv_buf_append(buf, le, bytes);
}

int kvs_manifest_encode(const struct kvs_manifest *m, struct kv_buf *ret)
{
    size_t fingerprint_len = m->fingerprint ? strlen(m->fingerprint) : 0;
    uint8_t sum[SUM];

    if (fingerprint_len > KVS_FINGERPRINT_MAX)
        return -EINVAL;
    kv_buf_append(ret, KV_OWN_MAGIC, KV_OWN_MAGIC_LEN);
    put_le(ret, KV_OWN_VERSION, 2);
    put_le(ret, (uint64_t)m->format, 2);
    put_le(ret, HEADER, 4);
    put_le(ret, m->bytes, 8);
    put_le(ret, m->created_s, 8);
    put_le(ret, m->n_chunks, 8);
    put_le(ret, m->n_weaves, 4);
    put_le(ret, fingerprint_len, 4);
    kv_buf_append(ret, m->fingerprint, fingerprint_len);
    for (size_t i = 0; i < m->n_chunks; i++) {
        kv_buf_append(ret, m->chunks[i].key, 16);
        put_le(ret, m->chunks[i].len, 4);
    }
    for (size_t i = 0; i < m->n_weaves; i++) {
        put_le(ret, m->weaves[i].offset, 8);
        put_le(ret, m->weaves[i].rows, 4);
        put_le(ret, m->weaves[i].row_bytes, 4);
        put_le(ret, m->weaves[i].piece_bytes, 4);
        put_le(ret, m->weaves[i].n, 4);
    }
    if (ret->error)
        return ret->error;
    kvs_chunk_key(ret->data, ret->len, sum);
    kv_buf_append(ret, sum, sizeof(sum));
    return ret->error;
}

/* -- reading ----------------------------------------------------------------------------------- */

static int read_chunks(struct kvs_manifest *m, const uint8_t *at, size_t n)
{
    m->chunks = n ? malloc(n * sizeof(*m->chunks)) : NULL;
    if (n && !m->chunks)
        return -ENOMEM;
    m->chunks_capacity = n;
    for (size_t i = 0; i < n; i++, at += CHUNK) {
        uint32_t len = (uint32_t)kv_get_le(at + 16, 4);
        int rc = len ? kvs_manifest_add(m, at, len) : -EBADMSG;

        if (rc)
            return rc == -ENOMEM ? rc : -EBADMSG;
    }
    return 0;
}

static bool weave_ok(const struct kvs_weave *w, uint64_t from, uint64_t to)
{
    uint64_t region = (uint64_t)w->rows * w->row_bytes; /* 32 bits each: no overflow */

    return w->n && region && region <= KVS_WEAVE_MAX && w->piece_bytes &&
           w->piece_bytes <= w->row_bytes && w->offset >= from && w->offset <= to &&
           region * w->n <= to - w->offset; /* 25 + 32 bits */
}

static int read_weaves(struct kvs_manifest *m, const uint8_t *at, size_t n)
{
    uint64_t from = 0;

    m->weaves = n ? malloc(n * sizeof(*m->weaves)) : NULL;
    if (n && !m->weaves)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++, at += WEAVE) {
        struct kvs_weave *w = &m->weaves[i];

        *w = (struct kvs_weave){kv_get_le(at, 8), (uint32_t)kv_get_le(at + 8, 4),
                                (uint32_t)kv_get_le(at + 12, 4), (uint32_t)kv_get_le(at + 16, 4),
                                (uint32_t)kv_get_le(at + 20, 4)};
        if (!weave_ok(w, from, m->bytes))
            return -EBADMSG;
        from = w->offset + (uint64_t)kvs_weave_region(w) * w->n;
    }
    m->n_weaves = m->weaves_capacity = n;
    return 0;
}

static int read_body(struct kvs_manifest *m, const uint8_t *data, size_t len)
{
    uint64_t header = kv_get_le(data + 12, 4), n_chunks = kv_get_le(data + 32, 8);
    uint64_t n_weaves = kv_get_le(data + 40, 4), fingerprint = kv_get_le(data + 44, 4);
    size_t room = len - SUM;
    int rc;

    if (header < HEADER || header > room || fingerprint > KVS_FINGERPRINT_MAX ||
        n_chunks > len / CHUNK ||
        header + fingerprint + n_chunks * CHUNK + n_weaves * WEAVE != room)
        return -EBADMSG;
    m->format = (enum kvs_format)kv_get_le(data + 10, 2);
    m->created_s = kv_get_le(data + 24, 8);
    if (m->format != KVS_FORMAT_BYTES && m->format != KVS_FORMAT_LLAMA)
        return -EBADMSG;
    data += header;
    if (memchr(data, 0, fingerprint))
        return -EBADMSG;
    m->fingerprint = strndup((const char *)data, fingerprint);
    if (!m->fingerprint)
        return -ENOMEM;
    data += fingerprint;
    rc = read_chunks(m, data, n_chunks);
    return rc ? rc : read_weaves(m, data + n_chunks * CHUNK, n_weaves);
}

int kvs_manifest_decode(const void *bytes, size_t len, struct kvs_manifest **ret)
{
    const uint8_t *data = bytes;
    struct kvs_manifest *m;
    uint8_t sum[SUM];
    int rc;

    if (len < KV_OWN_MAGIC_LEN || memcmp(data, KV_OWN_MAGIC, KV_OWN_MAGIC_LEN) != 0)
        return -EMEDIUMTYPE;
    if (len < HEADER + SUM)
        return -EBADMSG;
    kvs_chunk_key(data, len - SUM, sum);
    if (memcmp(sum, data + len - SUM, SUM) != 0)
        return -EBADMSG;
    if (kv_get_le(data + 8, 2) != KV_OWN_VERSION)
        return -EMEDIUMTYPE; /* whole, of another version: opaque, like other programs' manifests */
    m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    rc = read_body(m, data, len);
    if (!rc && m->bytes != kv_get_le(data + 16, 8))
        rc = -EBADMSG;
    if (rc) {
        kvs_manifest_free(m);
        return rc;
    }
    *ret = m;
    return 0;
}

void kvs_manifest_free(struct kvs_manifest *m)
{
    if (!m)
        return;
    free(m->fingerprint);
    free(m->chunks);
    free(m->weaves);
    free(m);
}

const struct kvs_chunk_ref *kvs_manifest_chunks(const struct kvs_manifest *m, size_t *ret_n)
{
    *ret_n = m->n_chunks;
    return m->chunks;
}

uint64_t kvs_manifest_bytes(const struct kvs_manifest *m)
{
    return m->bytes;
}

enum kvs_format kvs_manifest_format(const struct kvs_manifest *m)
{
    return m->format;
}

const char *kvs_manifest_fingerprint(const struct kvs_manifest *m)
{
    return m->fingerprint ? m->fingerprint : "";
}

uint64_t kvs_manifest_created_s(const struct kvs_manifest *m)
{
    return m->created_s;
}

/* -- weaves ------------------------------------------------------------------------------------ */

void kvs_weave_into(const struct kvs_weave *w, const uint8_t *plain, uint8_t *woven)
{
    for (size_t at = 0; at < w->row_bytes; at += w->piece_bytes) {
        size_t piece = KV_MIN(w->piece_bytes, w->row_bytes - at);

        for (size_t row = 0; row < w->rows; row++, woven += piece)
            memcpy(woven, plain + row * w->row_bytes + at, piece);
    }
}

void kvs_weave_out_of(const struct kvs_weave *w, const uint8_t *woven, uint8_t *plain)
{
    for (size_t at = 0; at < w->row_bytes; at += w->piece_bytes) {
        size_t piece = KV_MIN(w->piece_bytes, w->row_bytes - at);

        for (size_t row = 0; row < w->rows; row++, woven += piece)
            memcpy(plain + row * w->row_bytes + at, woven, piece);
    }
}
