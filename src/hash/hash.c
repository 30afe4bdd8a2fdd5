// SPDX-License-Identifier: Apache-2.0
/*
 * XXH3-64 over tokens as little-endian u32, which on a little-endian machine is the caller's array
 * as it lies: nothing is copied. Blocks of the usual sizes get a length known at compile time, so
 * that the hash is a few dozen inlined instructions; blocks above 240 bytes share one secret, which
 * XXH3 would otherwise derive from the seed anew for each.
 */
#include "kv_hash.h"

#include <endian.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/xxh.h"
#include "hash/digest.h"

#define DIGEST_DIGITS 64 /* a 256-bit digest in hex */
#define MM_CHUNK 64      /* multimodal identities sorted at a time */

uint64_t kve_seed(const char *lora, size_t lora_len, const char *salt, size_t salt_len)
{
    uint64_t seed = KVE_SEED;

    if (lora && lora_len)
        seed += kv_xxh64(lora, lora_len, 0);
    if (salt && salt_len)
        seed += kv_xxh64(salt, salt_len, 1);
    return seed;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool kve_digest(const char *id, size_t len, uint64_t *ret)
{
    uint64_t value = 0;

    if (len != DIGEST_DIGITS)
        return false;
    for (size_t i = 0; i < len; i++) {
        int digit = hex_digit(id[i]);

        if (digit < 0)
            return false;
        if (i < 16)
            value = value << 4 | (uint64_t)digit;
    }
    *ret = value;
    return true;
}

uint64_t kve_mm_identity(const char *id, size_t len)
{
    uint64_t identity;

    return kve_digest(id, len, &identity) ? identity : kv_xxh64(id, len, 0);
}

uint64_t kve_mm_placed(uint64_t identity, int64_t offset)
{
    uint64_t both[2] = {htole64(identity), htole64((uint64_t)offset)};

    return kv_xxh64(both, sizeof(both), KVE_SEED);
}

/* -- one block --------------------------------------------------------------------------------- */

static void add_tokens(XXH3_state_t *state, const uint32_t *tokens, size_t n)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    XXH3_64bits_update(state, tokens, n * sizeof(*tokens));
#else
    for (size_t i = 0; i < n; i++) {
        uint32_t le = htole32(tokens[i]);

        XXH3_64bits_update(state, &le, sizeof(le));
    }
#endif
}

/* Where a selection stands: everything ordered before (value, index) has been taken. */
struct cursor {
    uint64_t value;
    size_t index;
    bool any;
};

static bool is_before(const struct cursor *at, uint64_t value, size_t index)
{
    return at->any && (value < at->value || (value == at->value && index <= at->index));
}

/* The next up to MM_CHUNK identities in ascending order, equal ones by index. Returns their number.
 */
static size_t next_smallest(const uint64_t *mm, size_t n, struct cursor *at, uint64_t *values)
{
    size_t indexes[MM_CHUNK];
    size_t k = 0;

    for (size_t i = 0; i < n; i++) {
        size_t j = k;

        if (is_before(at, mm[i], i))
            continue;
        if (k == MM_CHUNK && mm[i] >= values[k - 1])
            continue;
        if (k < MM_CHUNK)
            k++;
        else
            j = k - 1;
        for (; j > 0 && values[j - 1] > mm[i]; j--) {
            values[j] = values[j - 1];
            indexes[j] = indexes[j - 1];
        }
        values[j] = mm[i];
        indexes[j] = i;
    }
    if (k)
        *at = (struct cursor){values[k - 1], indexes[k - 1], true};
    return k;
}

static uint64_t hash_with_mm(uint64_t seed, const uint32_t *tokens, size_t n, const uint64_t *mm,
                             size_t n_mm)
{
    struct cursor at = {0};
    uint64_t values[MM_CHUNK];
    XXH3_state_t state;
    size_t k;

    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, seed);
    add_tokens(&state, tokens, n);
    for (size_t done = 0; done < n_mm; done += k) {
        k = next_smallest(mm, n_mm, &at, values);
        for (size_t i = 0; i < k; i++)
            values[i] = htole64(values[i]);
        XXH3_64bits_update(&state, values, k * sizeof(*values));
    }
    return XXH3_64bits_digest(&state);
}

uint64_t kve_hash_block(uint64_t seed, const uint32_t *tokens, size_t n, const uint64_t *mm,
                        size_t n_mm)
{
    if (n_mm || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__)
        return hash_with_mm(seed, tokens, n, mm, n_mm);
    return kv_xxh64(tokens, n * sizeof(*tokens), seed);
}

/* -- all blocks of a prompt -------------------------------------------------------------------- */

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
/* @bytes is a constant at each call, so that the length's branches are gone after inlining. */
__attribute__((always_inline)) static inline void hash_runs(uint64_t seed, const uint32_t *tokens,
                                                            size_t bytes, size_t stride,
                                                            size_t n_blocks, uint64_t *ret)
{
    for (size_t i = 0; i < n_blocks; i++)
        ret[i] = kv_xxh64(tokens + i * stride, bytes, seed);
}

static void hash_long_runs(uint64_t seed, const uint32_t *tokens, size_t bytes, size_t stride,
                           size_t n_blocks, uint64_t *ret)
{
    unsigned char secret[XXH3_SECRET_DEFAULT_SIZE];

    XXH3_generateSecret_fromSeed(secret, seed);
    for (size_t i = 0; i < n_blocks; i++)
        ret[i] =
            XXH3_64bits_withSecretandSeed(tokens + i * stride, bytes, secret, sizeof(secret), seed);
}
#endif

size_t kve_hash_tokens(uint64_t seed, const uint32_t *tokens, size_t n, uint32_t block_size,
                       uint32_t lookahead, uint64_t *ret)
{
    size_t window = (size_t)block_size + lookahead;
    size_t n_blocks;

    if (!block_size || n < window)
        return 0;
    n_blocks = (n - (window - block_size)) / block_size;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (window == 16)
        hash_runs(seed, tokens, 64, block_size, n_blocks, ret);
    else if (window == 32)
        hash_runs(seed, tokens, 128, block_size, n_blocks, ret);
    else if (window > 60)
        hash_long_runs(seed, tokens, window * sizeof(*tokens), block_size, n_blocks, ret);
    else
        hash_runs(seed, tokens, window * sizeof(*tokens), block_size, n_blocks, ret);
#else
    for (size_t i = 0; i < n_blocks; i++)
        ret[i] = kve_hash_block(seed, tokens + i * block_size, window, NULL, 0);
#endif
    return n_blocks;
}

void kve_sequence_hashes(const uint64_t *local, size_t n, uint64_t *ret)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t link[2] = {i ? htole64(ret[i - 1]) : 0, htole64(local[i])};

        ret[i] = i ? kv_xxh64(link, sizeof(link), KVE_SEED) : local[i];
    }
}
