// SPDX-License-Identifier: Apache-2.0
/**
 * Make prompts from a trace. A trace only names 512-token blocks. Each name stands for 512 tokens
 * from a generator that the name seeds, so equal names give equal tokens. Every id becomes a whole
 * block. In the trace the last block is often partly filled, but published hit fractions count it
 * as a block, too.
 */
#ifndef KV_CLI_REPLAY_PROMPT_H
#define KV_CLI_REPLAY_PROMPT_H

#include <stddef.h>
#include <stdint.h>

#define KC_VOCABULARY 128000 /* upper bound of token ids: the size of today's tokenizers */

/** Buffers that calls reuse. Zero-initialise. Thread-confined. */
struct kc_prompt {
    uint32_t *tokens;
    size_t n_tokens;
    uint64_t *chain; /* per engine block: hash of the prefix that ends with it */
    size_t n_blocks;
    uint64_t *trace_chain; /* the same per trace block */
    size_t n_trace_blocks;
    size_t capacity; /* in trace blocks */
};

/**
 * Expand @n ids into tokens and the engine's block hashes: chained XXH3 over the tokens, like an
 * engine that hashes with xxhash. @block_size divides 512. @pass makes different prompts of the
 * same ids. Returns 0 or -ENOMEM.
 */
int kc_prompt_expand(struct kc_prompt *prompt, const uint64_t *ids, size_t n, uint64_t pass,
                     uint32_t block_size);
void kc_prompt_fini(struct kc_prompt *prompt);

#endif
