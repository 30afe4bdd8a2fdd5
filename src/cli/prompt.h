// SPDX-License-Identifier: Apache-2.0
/**
 * Prompts from a trace. A trace only names 512-token blocks; each name stands for 512 tokens drawn
 * by a generator that the name seeds, so equal names are equal tokens. Every id becomes a whole
 * block, also the last one, which in the trace is often partly filled: published hit fractions
 * count so.
 */
#ifndef KV_CLI_PROMPT_H
#define KV_CLI_PROMPT_H

#include <stddef.h>
#include <stdint.h>

#define KC_VOCABULARY 128000 /* token ids are below; the size of today's tokenizers */

/** Buffers that calls reuse. Zero-initialise. Thread-confined. */
struct kc_prompt {
    uint32_t *tokens;
    size_t n_tokens;
    uint64_t *chain; /* per engine block: the name of the prefix that ends with it */
    size_t n_blocks;
    uint64_t *trace_chain; /* the same per trace block */
    size_t n_trace_blocks;
    size_t capacity; /* trace blocks that fit */
};

/**
 * Expand @n ids into tokens and the engine's block hashes: chained XXH3 over the tokens, as an
 * engine that hashes with xxhash would name them. @block_size divides 512. @pass makes different
 * prompts of the same ids. Returns 0 or -ENOMEM.
 */
int kc_prompt_expand(struct kc_prompt *prompt, const uint64_t *ids, size_t n, uint64_t pass,
                     uint32_t block_size);
void kc_prompt_fini(struct kc_prompt *prompt);

#endif
