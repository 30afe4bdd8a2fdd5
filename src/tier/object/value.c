// SPDX-License-Identifier: Apache-2.0
/*
 * The value of a chunk (docs/formats.md, "Object tier"):
 *
 *    0  "KVBMOBJ\n"         20  length of the key             48  XXH3-128 of the rest
 *    8  version             24  length of the block           64  key, zeros
 *   12  header length, 128  32  XXH3-128 of the fingerprint  128  block
 *   16  group
 *
 * All of the header except the checksum follows from the request: a reader makes the header anew
 * and compares.
 */
#include "base/hash/hash.h"
#include "tier/object/impl.h"
#include "tier/transfer/transfer.h"

enum { VERSION = 1, SUM = 48, KEY = 64 };

static void put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static void put_u64(uint8_t *at, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static void put_hash(uint8_t *at, XXH128_hash_t hash)
{
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(at, canonical.digest, sizeof(canonical.digest));
}

void kvbm_object_format_init(struct kvbm_object_format *ret, const char *fingerprint,
                             uint32_t key_len, uint64_t block_bytes)
{
    put_hash(ret->fingerprint, XXH3_128bits(fingerprint, strlen(fingerprint)));
    ret->key_len = key_len;
    ret->block_bytes = block_bytes;
}

/* Fill the header, with a checksum of zero. */
static void make_header(const struct kvbm_object_format *f, uint32_t group, const void *key,
                        uint8_t ret[KVBM_OBJECT_HEADER])
{
    memset(ret, 0, KVBM_OBJECT_HEADER);
    memcpy(ret, "KVBMOBJ\n", 8);
    put_u32(ret + 8, VERSION);
    put_u32(ret + 12, KVBM_OBJECT_HEADER);
    put_u32(ret + 16, group);
    put_u32(ret + 20, f->key_len);
    put_u64(ret + 24, f->block_bytes);
    memcpy(ret + 32, f->fingerprint, 16);
    memcpy(ret + KEY, key, f->key_len);
}

void kvbm_object_chunk_key(const struct kvbm_object_format *f, uint32_t group, const void *key,
                           uint8_t ret[KVBM_OBJECT_CHUNK_KEY])
{
    uint8_t header[KVBM_OBJECT_HEADER];

    make_header(f, group, key, header);
    put_hash(ret, XXH3_128bits(header, sizeof(header)));
}

size_t kvbm_object_value_bytes(const struct kvbm_object_format *f)
{
    return KVBM_OBJECT_HEADER + (size_t)f->block_bytes;
}

/* Bytes are copied and summed in pieces that stay in the second-level cache. */
enum { PIECE = 64 * 1024 };

void kvbm_object_seal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                      const void *block, uint8_t *ret)
{
    uint8_t found[16], *to = ret + KVBM_OBJECT_HEADER;
    XXH3_state_t state;

    make_header(f, group, key, ret);
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    kv_hash_update(&state, ret, KVBM_OBJECT_HEADER);
    for (uint64_t at = 0, n; at < f->block_bytes; at += n) {
        n = KV_MIN(f->block_bytes - at, (uint64_t)PIECE);
        memcpy(to + at, (const uint8_t *)block + at, n);
        /* sum the copy: the caller's bytes might change in between */
        kv_hash_update(&state, to + at, n);
    }
    kv_hash_done(&state, found);
    memcpy(ret + SUM, found, sizeof(found));
}

/* -- reading ----------------------------------------------------------------------------------- */

void kvbm_object_open_value(struct kvbm_object_opening *ret, const struct kvbm_object_format *f,
                            uint32_t group, const void *key, void *to)
{
    ret->format = f;
    ret->to = to;
    ret->got = 0;
    ret->wrong = false;
    make_header(f, group, key, ret->want);
    XXH3_INITSTATE(&ret->state);
    XXH3_128bits_reset(&ret->state);
    kv_hash_update(&ret->state, ret->want, KVBM_OBJECT_HEADER);
}

static bool header_fits(const struct kvbm_object_opening *value)
{
    return memcmp(value->header, value->want, SUM) == 0 &&
           memcmp(value->header + KEY, value->want + KEY, KVBM_OBJECT_HEADER - KEY) == 0;
}

/* Take the part of the header that the piece has. Returns its length. */
static size_t take_header(struct kvbm_object_opening *value, const void *piece, size_t len)
{
    size_t n = value->got < KVBM_OBJECT_HEADER ? KVBM_OBJECT_HEADER - (size_t)value->got : 0;

    n = KV_MIN(n, len);
    if (n == 0)
        return 0;
    memcpy(value->header + value->got, piece, n);
    value->got += n;
    value->wrong |= value->got == KVBM_OBJECT_HEADER && !header_fits(value);
    return n;
}

bool kvbm_object_open_piece(struct kvbm_object_opening *value, const void *piece, size_t len)
{
    size_t n = take_header(value, piece, len);
    const uint8_t *bytes = (const uint8_t *)piece + n;

    len -= n;
    value->wrong |= len > kvbm_object_value_bytes(value->format) - value->got;
    if (value->wrong || len == 0)
        return !value->wrong;
    if (value->to)
        tier_copy(value->to + (value->got - KVBM_OBJECT_HEADER), bytes, len);
    kv_hash_update(&value->state, bytes, len);
    value->got += len;
    return true;
}

bool kvbm_object_value_whole(struct kvbm_object_opening *value)
{
    uint8_t sum[16];

    kv_hash_done(&value->state, sum);
    value->wrong |= value->got != kvbm_object_value_bytes(value->format) ||
                    memcmp(value->header + SUM, sum, sizeof(sum)) != 0;
    return !value->wrong;
}

const void *kvbm_object_unseal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                               const void *value, size_t len)
{
    struct kvbm_object_opening opening;

    kvbm_object_open_value(&opening, f, group, key, NULL);
    return kvbm_object_open_piece(&opening, value, len) && kvbm_object_value_whole(&opening)
               ? (const uint8_t *)value + KVBM_OBJECT_HEADER
               : NULL;
}

bool kvbm_object_fits(const struct kvbm_object_format *f, const uint8_t *chunk_key,
                      const void *value, size_t len)
{
    static const uint8_t zeros[16];
    uint8_t header[KVBM_OBJECT_HEADER], found[16];
    XXH3_state_t state;

    if (len != kvbm_object_value_bytes(f))
        return false;
    memcpy(header, value, sizeof(header));
    memcpy(header + SUM, zeros, sizeof(zeros));
    put_hash(found, XXH3_128bits(header, sizeof(header)));
    if (memcmp(found, chunk_key, KVBM_OBJECT_CHUNK_KEY) != 0)
        return false;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    kv_hash_update(&state, header, sizeof(header));
    kv_hash_update(&state, (const uint8_t *)value + sizeof(header), len - sizeof(header));
    kv_hash_done(&state, found);
    return memcmp((const uint8_t *)value + SUM, found, sizeof(found)) == 0;
}
