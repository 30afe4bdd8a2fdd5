// SPDX-License-Identifier: Apache-2.0
/**
 * kv_hash.h: local and sequence hashes of blocks of tokens, as routers and engines compute them.
 *
 * XXH3-64 over the tokens as little-endian u32, seeded with the namespace. The formulas are those
 * of Dynamo's router. libkvindex and libkvevent export these functions: a router needs no ZMQ.
 * All functions are pure: any thread, no allocation.
 */
#ifndef KV_HASH_H
#define KV_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Seed of the base namespace: no adapter, no salt. */
#define KVE_SEED UINT64_C(1337)

/**
 * Compute the seed for a LoRA adapter and a cache salt: 1337 + xxh3(lora, 0) + xxh3(salt, 1).
 * A term is left out when its string is NULL or empty. Additions wrap at 2^64.
 */
KV_API uint64_t kve_seed(const char *lora, size_t lora_len, const char *salt, size_t salt_len);

/**
 * Compute the local hash of one block: XXH3-64 of @n tokens, followed by the @n_mm identities of
 * the multimodal objects in the block (kve_mm_identity). Identities are hashed in ascending order,
 * in whatever order @mm lists them. @n_mm is 0 for text and has no upper limit.
 */
KV_API uint64_t kve_hash_block(uint64_t seed, const uint32_t *tokens, size_t n, const uint64_t *mm,
                               size_t n_mm);

/**
 * Compute the local hashes of all full blocks of a prompt of @n tokens.
 *
 * Each hash covers block_size + @lookahead tokens, at a stride of block_size. @lookahead is 0, or 1
 * for engines that draft ahead (EAGLE, MTP). @ret has room for n / block_size hashes.
 * Returns the number of hashes written; 0 when @block_size is 0.
 */
KV_API size_t kve_hash_tokens(uint64_t seed, const uint32_t *tokens, size_t n, uint32_t block_size,
                              uint32_t lookahead, uint64_t *ret);

/**
 * Compute the identity of a multimodal object from the name that engines give it. A name of 64 hex
 * digits is a digest: its first 64 bits. Any other name: its XXH3-64.
 */
KV_API uint64_t kve_mm_identity(const char *id, size_t len);

/**
 * Compute the identity of a multimodal object together with its place, as vLLM's block hashes cover
 * it. @offset is the position of the object's first token in the block, below 0 when the object
 * starts in an earlier block.
 */
KV_API uint64_t kve_mm_placed(uint64_t identity, int64_t offset);

/**
 * Compute the sequence hashes of @n blocks from their local hashes: s[0] = local[0], s[i] =
 * xxh3(le64(s[i-1]) || le64(local[i]), 1337). @ret has room for @n hashes and may be @local.
 */
KV_API void kve_sequence_hashes(const uint64_t *local, size_t n, uint64_t *ret);

#ifdef __cplusplus
}
#endif
#endif
