// SPDX-License-Identifier: Apache-2.0
/*
 * The value of a chunk (docs/formats.md, "Object tier"):
 *
 *   0  "KVBMOBJ\n"    12  length of the header, 128    24  length of the block       48  XXH3-128
 *      of the rest
 *   8  version        16  group  20  length of the key  32  XXH3-128 of fingerprint   64  key,
 *      zeros   128  block
 *
 * All of the header but the checksum follows from what is asked for: a reader makes it anew and
 * compares.
 */
#include "base/hash.h"
#include "tier/object/impl.h"

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

/* Compute the checksum of the header, with zeros in its place, and the block. */
static void sum(const uint8_t header[KVBM_OBJECT_HEADER], const void *block, size_t len,
                uint8_t ret[16])
{
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    kv_hash_update(&state, header, KVBM_OBJECT_HEADER);
    kv_hash_update(&state, block, len);
    kv_hash_done(&state, ret);
}

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
        /* the copy is summed: the caller's bytes might change in between */
        kv_hash_update(&state, to + at, n);
    }
    kv_hash_done(&state, found);
    memcpy(ret + SUM, found, sizeof(found));
}

const void *kvbm_object_unseal(const struct kvbm_object_format *f, uint32_t group, const void *key,
                               const void *value, size_t len)
{
    uint8_t header[KVBM_OBJECT_HEADER], want[16];
    const uint8_t *bytes = value;

    if (len != kvbm_object_value_bytes(f))
        return NULL;
    make_header(f, group, key, header);
    if (memcmp(bytes, header, SUM) != 0 ||
        memcmp(bytes + KEY, header + KEY, sizeof(header) - KEY) != 0)
        return NULL;
    sum(header, bytes + KVBM_OBJECT_HEADER, f->block_bytes, want);
    return memcmp(bytes + SUM, want, sizeof(want)) == 0 ? bytes + KVBM_OBJECT_HEADER : NULL;
}
