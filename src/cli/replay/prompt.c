// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/prompt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/xxh.h"
#include "cli/replay/random.h"
#include "cli/replay/trace.h"

void kc_prompt_fini(struct kc_prompt *prompt)
{
    free(prompt->tokens);
    free(prompt->chain);
    free(prompt->trace_chain);
    memset(prompt, 0, sizeof(*prompt));
}

/* Make room for @n trace blocks, at the smallest block size. */
static int reserve(struct kc_prompt *prompt, size_t n)
{
    size_t capacity = prompt->capacity ? prompt->capacity : 64;

    if (n <= prompt->capacity)
        return 0;
    while (capacity < n)
        capacity *= 2;
    kc_prompt_fini(prompt);
    prompt->tokens = malloc(capacity * KC_TRACE_BLOCK * sizeof(*prompt->tokens));
    prompt->chain = malloc(capacity * KC_TRACE_BLOCK * sizeof(*prompt->chain));
    prompt->trace_chain = malloc(capacity * sizeof(*prompt->trace_chain));
    if (!prompt->tokens || !prompt->chain || !prompt->trace_chain) {
        kc_prompt_fini(prompt);
        return -ENOMEM;
    }
    prompt->capacity = capacity;
    return 0;
}

static void expand_block(uint64_t seed, uint32_t *tokens)
{
    struct kc_rng rng = {.state = seed};

    for (size_t i = 0; i < KC_TRACE_BLOCK; i += 2) {
        uint64_t x = kc_rng_u64(&rng);

        tokens[i] = (uint32_t)(((x >> 32) * KC_VOCABULARY) >> 32);
        tokens[i + 1] = (uint32_t)(((x & UINT32_MAX) * KC_VOCABULARY) >> 32);
    }
}

int kc_prompt_expand(struct kc_prompt *prompt, const uint64_t *ids, size_t n, uint64_t pass,
                     uint32_t block_size)
{
    uint64_t name = 0;
    int rc = reserve(prompt, n);

    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n; i++)
        expand_block(kc_mix(ids[i] + 1) + kc_mix(pass), prompt->tokens + i * KC_TRACE_BLOCK);
    prompt->n_tokens = n * KC_TRACE_BLOCK;
    prompt->n_blocks = prompt->n_tokens / block_size;
    for (size_t i = 0; i < prompt->n_blocks; i++) {
        name = kv_xxh64(prompt->tokens + i * block_size, block_size * sizeof(uint32_t), name);
        prompt->chain[i] = name;
    }
    prompt->n_trace_blocks = n;
    kc_trace_chain(ids, n, pass, prompt->trace_chain);
    return 0;
}
