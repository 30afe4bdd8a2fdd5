// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_tokens.h: token sequences, cut into blocks, and the hashes that name them.
 *
 * A token is a u32. A block is block_size consecutive tokens of one sequence. Hashes are XXH3-64 of
 * little-endian bytes, by the formulas of Dynamo's lib/tokens (vectors in tests/bm):
 *
 *   salt hash     = XXH3(salt bytes, seed 0)
 *   block hash    = XXH3(the block's tokens, seed = salt hash)
 *   sequence hash = block hash                                          of a sequence's first block
 *                 = XXH3(le64(sequence hash before) || le64(block hash), seed S)      of any other
 *
 * S is 0 (KVBM_CHAIN_SEED_ZERO, the current convention) or the salt hash (KVBM_CHAIN_SEED_SALT, the
 * older one); the two agree when the salt hash is 0. A sequence hash names the whole prefix up to
 * and including its block. Pools register blocks under it.
 *
 * Errors are negative errno values; a failing call changes nothing. A NULL pointer that must not be
 * NULL is -EINVAL; a function without an error value does nothing and returns 0 or NULL. Threads:
 * hash functions from any thread, a sequence from one at a time.
 */
#ifndef KVBM_TOKENS_H
#define KVBM_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Send all log lines of libkvbm to @fn (kv_log_fn), also those of the parts of libkvstore,
 * libkvevent and libkvx within it; NULL: errors and warnings to stderr. Call this before any other
 * function of the library.
 */
KV_API void kvbm_set_log(kv_log_fn fn, void *arg);

/** Largest number of tokens per block. Block sizes are powers of two. */
#define KVBM_MAX_BLOCK_SIZE 1024

/** Seed S of sequence hashes: 0, or the salt hash. */
enum kvbm_chain_seed { KVBM_CHAIN_SEED_ZERO, KVBM_CHAIN_SEED_SALT };

/** Compute the salt hash: XXH3 of @len bytes, seed 0. For @len 0 it is 3244421341483603138. */
KV_API uint64_t kvbm_salt_hash(const void *salt, size_t len);

/**
 * Compute the salt hash of a request's cache salt and LoRA adapter, as Dynamo does.
 *
 * The hash is the XXH3 of the compact JSON object {"salt":...,"lora_name":...}, members in that
 * order. A member that is NULL or empty is left out; strings are escaped only where JSON demands
 * it. Returns 0; -EINVAL (a string is not UTF-8); -ENOMEM.
 */
KV_API int kvbm_salt_hash_json(const char *salt, const char *lora_name, uint64_t *ret);

/** Compute the block hash of @n tokens. */
KV_API uint64_t kvbm_block_hash(uint64_t salt_hash, const uint32_t *tokens, size_t n);

/** Multimodal object in a prompt, in place of tokens [start, start + n). */
struct kvbm_mm_run {
    uint64_t hash;  /* the object's identity */
    uint64_t start; /* position in the sequence, in tokens */
    uint64_t n;     /* tokens */
};

/**
 * Compute the block hash of @n tokens at sequence position @first (in tokens), with multimodal
 * runs.
 *
 * Each token is hashed as a frame of 13 bytes: [0, token le32, 0 le64], or inside a run [1, offset
 * in run le32, run hash le64]. A block without a token of a run hashes as kvbm_block_hash. @runs
 * ascend and don't overlap.
 */
KV_API uint64_t kvbm_block_hash_mm(uint64_t salt_hash, const uint32_t *tokens, size_t n,
                                   uint64_t first, const struct kvbm_mm_run *runs, size_t n_runs);

/** Compute the sequence hash of a block from its parent's, *@parent (NULL: the first block). */
KV_API uint64_t kvbm_sequence_hash(const uint64_t *parent, uint64_t block_hash, uint64_t salt_hash,
                                   enum kvbm_chain_seed chain);

/**
 * Hash all n / block_size full blocks of @tokens.
 *
 * @parent is the sequence hash of the block before them, NULL at the start. @block_hashes and
 * @sequence_hashes have room for n / block_size values; either may be NULL.
 * Returns the number of full blocks; 0 when @block_size is 0.
 */
KV_API size_t kvbm_hash_tokens(const uint32_t *tokens, size_t n, uint32_t block_size,
                               uint64_t salt_hash, enum kvbm_chain_seed chain,
                               const uint64_t *parent, uint64_t *block_hashes,
                               uint64_t *sequence_hashes);

/** A hash of 128 bits. */
struct kvbm_hash128 {
    uint64_t high, low;
};

/**
 * Compute the positional sequence hash of a block, as Dynamo does.
 *
 * high = [mode:2][position:8|16|24|31][low 54|46|38|31 bits of the block hash], low = sequence
 * hash. The mode is the smallest that holds @position. Hashes sort by position within a mode.
 * Returns 0; -EINVAL (@position is 2^31 or more).
 */
KV_API int kvbm_positional_hash(uint64_t sequence_hash, uint64_t block_hash, uint64_t position,
                                struct kvbm_hash128 *ret);

/* ---------------------------------------------------------------------------------------------
 * Sequences.
 */

/** List of tokens that grows and shrinks, with the hashes of its full blocks. Thread-confined. */
struct kvbm_sequence;

/** Options of a sequence; set size to sizeof(struct kvbm_sequence_opts), zero: the default. */
struct kvbm_sequence_opts {
    size_t size;
    uint32_t block_size; /* required: a power of two, 1 to KVBM_MAX_BLOCK_SIZE */
    uint64_t salt_hash;
    enum kvbm_chain_seed chain;
    size_t max_tokens; /* limit on the length; 0: 2^32 - 1 */
};
#define KVBM_SEQUENCE_OPTS_INIT KV_INIT_(kvbm_sequence_opts)

/** One full block of a sequence. @tokens is valid until the sequence changes. */
struct kvbm_token_block {
    const uint32_t *tokens; /* block_size */
    uint64_t block_hash;
    uint64_t sequence_hash;
    uint64_t parent; /* sequence hash of the block before; undefined when position is 0 */
    size_t position; /* in blocks */
};

/**
 * Create an empty sequence. The caller owns *@ret and frees it with kvbm_sequence_destroy.
 * Returns 0; -EINVAL (no such block size or chain); -ENOMEM.
 */
KV_API int kvbm_sequence_create(const struct kvbm_sequence_opts *opts, struct kvbm_sequence **ret);

/** Free a sequence. NULL is a no-op. */
KV_API void kvbm_sequence_destroy(struct kvbm_sequence *sequence);

/** Add one token. Returns 1 when it filled a block, else 0; -ENOSPC (max_tokens); -ENOMEM. */
KV_API int kvbm_sequence_append(struct kvbm_sequence *sequence, uint32_t token);

/**
 * Add @n tokens, all or none. @tokens must not point into the sequence.
 * Returns the number of blocks they filled; -EINVAL (NULL tokens); -ENOSPC (max_tokens); -ENOMEM.
 */
KV_API long kvbm_sequence_extend(struct kvbm_sequence *sequence, const uint32_t *tokens, size_t n);

/** Remove the last token and store it in *@ret (may be NULL). Returns 0 or -ENODATA (empty). */
KV_API int kvbm_sequence_pop(struct kvbm_sequence *sequence, uint32_t *ret);

/** Keep the first @len tokens. Returns 0 or -ERANGE (the sequence is shorter). */
KV_API int kvbm_sequence_truncate(struct kvbm_sequence *sequence, size_t len);

/** Remove the last @n tokens. Returns 0 or -ERANGE (the sequence is shorter). */
KV_API int kvbm_sequence_unwind(struct kvbm_sequence *sequence, size_t n);

/** Remove all tokens. */
KV_API void kvbm_sequence_clear(struct kvbm_sequence *sequence);

/** Return the length in tokens. */
KV_API size_t kvbm_sequence_len(const struct kvbm_sequence *sequence);

/** Return the number of full blocks. */
KV_API size_t kvbm_sequence_n_blocks(const struct kvbm_sequence *sequence);

/**
 * Return the tokens behind the last full block, *@n of them: 0 to block_size - 1. Valid until the
 * sequence changes.
 */
KV_API const uint32_t *kvbm_sequence_tail(const struct kvbm_sequence *sequence, size_t *n);

/** Describe full block @i. Returns 0; -ERANGE (no such full block). */
KV_API int kvbm_sequence_block(const struct kvbm_sequence *sequence, size_t i,
                               struct kvbm_token_block *ret);

/**
 * Return tokens [start, start + n), valid until the sequence changes. NULL when the sequence is
 * shorter than start + n.
 */
KV_API const uint32_t *kvbm_sequence_tokens(const struct kvbm_sequence *sequence, size_t start,
                                            size_t n);

/**
 * Return the sequence hashes of all full blocks in order (kvbm_sequence_n_blocks of them), valid
 * until the sequence changes.
 */
KV_API const uint64_t *kvbm_sequence_hashes(const struct kvbm_sequence *sequence);

#ifdef __cplusplus
}
#endif
#endif
