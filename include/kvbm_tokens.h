// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_tokens.h: token sequences, cut into blocks, and the hashes that name them.
 *
 * A token is a u32. A block is block_size consecutive tokens of one sequence. Hashes are XXH3-64 of
 * little-endian bytes (the formulas are those of Dynamo's lib/tokens, vectors in tests/bm):
 *
 *   salt hash     = XXH3(salt bytes, seed 0)
 *   block hash    = XXH3(the block's tokens, seed = salt hash)         what the block says
 *   sequence hash = block hash                                          of a sequence's first block
 *                 = XXH3(le64(sequence hash before) || le64(block hash), seed S)      of any other
 *
 * S is 0 (KVBM_CHAIN_SEED_ZERO, the current convention) or the salt hash (KVBM_CHAIN_SEED_SALT, the
 * older one); the two agree when the salt hash is 0. A sequence hash stands for the whole prefix up to
 * and with its block, and is what blocks are registered under.
 *
 * Errors are negative errno values; a failing call changes nothing. A NULL where there must be something is
 * -EINVAL, or, where no error can be returned, 0 or NULL and nothing done.
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

/** Tokens per block: a power of two, 1 to this. */
#define KVBM_MAX_BLOCK_SIZE 1024

enum kvbm_chain_seed { KVBM_CHAIN_SEED_ZERO, KVBM_CHAIN_SEED_SALT };

/** XXH3 of @len bytes, seed 0. @len may be 0: 3244421341483603138. */
KV_API uint64_t kvbm_salt_hash(const void *salt, size_t len);

/**
 * The salt hash of a request's cache salt and LoRA adapter: XXH3 of the compact JSON object
 * {"salt":...,"lora_name":...} in that order, members that are NULL or empty left out, strings escaped
 * as JSON demands and no further. Both are UTF-8. Returns 0, -EINVAL (no UTF-8), -ENOMEM.
 */
KV_API int kvbm_salt_hash_json(const char *salt, const char *lora_name, uint64_t *ret);

/** Hash of one block of @n tokens. */
KV_API uint64_t kvbm_block_hash(uint64_t salt_hash, const uint32_t *tokens, size_t n);

/** A multimodal object in a prompt: tokens [start, start + n) stand for it. */
struct kvbm_mm_run {
    uint64_t hash;  /* the object's identity */
    uint64_t start; /* position in the sequence, in tokens */
    uint64_t n;     /* tokens */
};

/**
 * Hash of the block at sequence position @first (in tokens) into which multimodal runs reach. Each token
 * becomes a frame of 13 bytes, [0, token le32, 0 le64] or, in a run, [1, offset in run le32, run hash
 * le64]; without a run's token in the block it is kvbm_block_hash. @runs ascend and don't overlap.
 */
KV_API uint64_t kvbm_block_hash_mm(uint64_t salt_hash, const uint32_t *tokens, size_t n,
                                   uint64_t first, const struct kvbm_mm_run *runs, size_t n_runs);

/** The sequence hash that follows @parent (NULL: the first block). */
KV_API uint64_t kvbm_sequence_hash(const uint64_t *parent, uint64_t block_hash, uint64_t salt_hash,
                                   enum kvbm_chain_seed chain);

/**
 * Hash all n / block_size full blocks of @tokens. @parent: the sequence hash before them, NULL at the
 * start. @block_hashes and @sequence_hashes have room for as many values; either may be NULL.
 * Returns their number; 0 when @block_size is 0.
 */
KV_API size_t kvbm_hash_tokens(const uint32_t *tokens, size_t n, uint32_t block_size,
                               uint64_t salt_hash, enum kvbm_chain_seed chain,
                               const uint64_t *parent, uint64_t *block_hashes,
                               uint64_t *sequence_hashes);

/**
 * Positional sequence hash, 128 bits: high = [mode:2][position:8|16|24|31][block hash, low 54|46|38|31
 * bits], low = sequence hash; the mode is the least that holds the position. Sorts by position within a
 * mode. @position < 2^31, else -EINVAL.
 */
struct kvbm_hash128 {
    uint64_t high, low;
};
KV_API int kvbm_positional_hash(uint64_t sequence_hash, uint64_t block_hash, uint64_t position,
                                struct kvbm_hash128 *ret);

/* ---------------------------------------------------------------------------------------------
 * Sequences.
 */

/** A growing and shrinking list of tokens with the hashes of its full blocks. Thread-confined. */
struct kvbm_sequence;

struct kvbm_sequence_opts {
    size_t size;
    uint32_t block_size; /* required: a power of two, 1 to KVBM_MAX_BLOCK_SIZE */
    uint64_t salt_hash;
    enum kvbm_chain_seed chain;
    size_t max_tokens; /* limit on the length; 0: 2^32 - 1 */
};

/** One full block of a sequence. @tokens lives until the sequence is changed. */
struct kvbm_token_block {
    const uint32_t *tokens; /* block_size */
    uint64_t block_hash;
    uint64_t sequence_hash;
    uint64_t parent; /* sequence hash of the block before; nothing when position is 0 */
    size_t position; /* in blocks */
};

/** Returns 0, -EINVAL (no such block size or chain), -ENOMEM. */
KV_API int kvbm_sequence_create(const struct kvbm_sequence_opts *opts, struct kvbm_sequence **ret);
KV_API void kvbm_sequence_destroy(struct kvbm_sequence *sequence); /* NULL is a no-op */

/** Add one token. Returns 1 when it filled a block, else 0; -ENOSPC over max_tokens, -ENOMEM. */
KV_API int kvbm_sequence_append(struct kvbm_sequence *sequence, uint32_t token);

/**
 * Add @n tokens, none of them the sequence's own, all or none. Returns the number of blocks they filled;
 * -EINVAL (no tokens), -ENOSPC over max_tokens, -ENOMEM.
 */
KV_API long kvbm_sequence_extend(struct kvbm_sequence *sequence, const uint32_t *tokens, size_t n);

/** Take the last token off; @ret may be NULL. Returns 0 or -ENODATA (empty). */
KV_API int kvbm_sequence_pop(struct kvbm_sequence *sequence, uint32_t *ret);

/** Keep the first @len tokens. Returns 0 or -ERANGE (there are fewer). */
KV_API int kvbm_sequence_truncate(struct kvbm_sequence *sequence, size_t len);

/** Take the last @n tokens off. Returns 0 or -ERANGE (there are fewer). */
KV_API int kvbm_sequence_unwind(struct kvbm_sequence *sequence, size_t n);

/** Take everything off. */
KV_API void kvbm_sequence_clear(struct kvbm_sequence *sequence);

KV_API size_t kvbm_sequence_len(const struct kvbm_sequence *sequence);      /* tokens */
KV_API size_t kvbm_sequence_n_blocks(const struct kvbm_sequence *sequence); /* full blocks */

/** Tokens behind the last full block: *@n of them, 0 to block_size - 1. */
KV_API const uint32_t *kvbm_sequence_tail(const struct kvbm_sequence *sequence, size_t *n);

/** Full block @i. Returns 0 or -ERANGE. */
KV_API int kvbm_sequence_block(const struct kvbm_sequence *sequence, size_t i,
                               struct kvbm_token_block *ret);

/** Tokens [start, start + n), valid until the sequence is changed. NULL when they aren't all there
 * (n 0 behind the last one are). */
KV_API const uint32_t *kvbm_sequence_tokens(const struct kvbm_sequence *sequence, size_t start,
                                            size_t n);

/** Sequence hashes of all full blocks in order (kvbm_sequence_n_blocks), until it is changed. */
KV_API const uint64_t *kvbm_sequence_hashes(const struct kvbm_sequence *sequence);

#ifdef __cplusplus
}
#endif
#endif
