// SPDX-License-Identifier: Apache-2.0
/**
 * The hash of hash tables over keys that come from outside: block hashes, tokens, ids of workers.
 *
 * The hash has a secret of the process, so that nobody can choose keys that collide: with a known hash,
 * 20,000 such blocks of one publisher hold an index's lock for a second. Mixed values differ from
 * process to process and from library to library: they are never stored, sent or compared outside.
 */
#ifndef KV_BASE_MIX_H
#define KV_BASE_MIX_H

#include <stdint.h>

/** Drawn when the library is loaded, read-only since (tests/fixed_secret.c sets another). */
extern struct kv_mix_secret {
    uint64_t flip, factor; /* factor is odd */
} kv_mix_secret;

/** Return a random odd number; before the kernel has entropy (early boot), a fixed one. */
uint64_t kv_secret(void);

static inline uint64_t kv_mix_fold(uint64_t a, uint64_t b)
{
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/**
 * Mix the bits of a key: any bits of the result spread keys as random numbers would.
 *
 * The first product has the secret. Alone it would leave keys at even distances in clumps, with one
 * secret in a hundred; the second one spreads these (tests/base/test_mix.c).
 */
static inline uint64_t kv_mix(uint64_t x)
{
    return kv_mix_fold(kv_mix_fold(x ^ kv_mix_secret.flip, kv_mix_secret.factor),
                       UINT64_C(0xd6e8feb86659fd93));
}

#endif
