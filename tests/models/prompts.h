// SPDX-License-Identifier: Apache-2.0
/**
 * Prompts for engine models: short token sequences that share prefixes, in a few namespaces, some
 * with an image. New prompts continue earlier ones, as conversations do.
 */
#ifndef KV_TESTS_MODELS_PROMPTS_H
#define KV_TESTS_MODELS_PROMPTS_H

#include "base/unit.h"

#include "kv_event.h"

#define PROMPT_MAX 96
#define PROMPT_HISTORY 48
#define IMAGE_TOKEN 1000 /* stands for an image's tokens, and occurs nowhere else */

static const char *const prompt_loras[] = {NULL, "adapter"};
static const char *const prompt_salts[] = {
    NULL, "tenant", "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff", "adapter"};
static const char *const prompt_images[] = {
    NULL, "cat", "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"};

struct prompt {
    uint32_t tokens[PROMPT_MAX];
    size_t n;
    unsigned lora, salt;             /* of prompt_loras, prompt_salts */
    unsigned image;                  /* of prompt_images, 0: none */
    uint32_t image_start, image_end; /* its tokens */
};

struct prompts {
    uint64_t *random;
    struct prompt past[PROMPT_HISTORY];
    size_t n;
    bool namespaces, images;
    bool
        plain_images; /* images' tokens are those of any text, so that their places alone tell them */
};

static inline bool prompts_one_in(struct prompts *p, unsigned n)
{
    return unit_below(p->random, n) == 0;
}

static inline void prompt_extend(struct prompts *p, struct prompt *prompt, size_t n)
{
    while (n-- && prompt->n < PROMPT_MAX)
        prompt->tokens[prompt->n++] = (uint32_t)unit_below(p->random, 3);
}

static inline void prompt_add_image(struct prompts *p, struct prompt *prompt)
{
    size_t n = 1 + unit_below(p->random, 9);

    prompt->image = 1 + (unsigned)unit_below(p->random, KV_COUNT(prompt_images) - 1);
    prompt->image_start = (uint32_t)prompt->n;
    while (n-- && prompt->n < PROMPT_MAX)
        prompt->tokens[prompt->n++] =
            p->plain_images ? (uint32_t)unit_below(p->random, 2) : IMAGE_TOKEN;
    prompt->image_end = (uint32_t)prompt->n;
}

/* Back to @n tokens; an image that is cut in two goes. */
static inline void prompt_cut(struct prompt *prompt, size_t n)
{
    if (prompt->image && n < prompt->image_end) {
        n = n > prompt->image_start ? prompt->image_start : n;
        prompt->image = 0;
    }
    prompt->n = n;
}

/* An earlier prompt or part of one, or nothing; and something new behind it. */
static inline struct prompt prompts_next(struct prompts *p, size_t block_size)
{
    struct prompt prompt = {.n = 0};

    if (p->n && !prompts_one_in(p, 6)) {
        prompt = p->past[unit_below(p->random, p->n)];
        if (prompts_one_in(p, 2))
            prompt_cut(&prompt, unit_below(p->random, prompt.n + 1));
        if (prompts_one_in(p, 4)) /* exactly full blocks: the engine computes the last one again */
            prompt_cut(&prompt, prompt.n / block_size * block_size);
    } else if (p->namespaces && prompts_one_in(p, 2)) {
        prompt.lora = (unsigned)unit_below(p->random, KV_COUNT(prompt_loras));
        prompt.salt = (unsigned)unit_below(p->random, KV_COUNT(prompt_salts));
    }
    if (p->images && !prompt.image && prompts_one_in(p, 4))
        prompt_add_image(p, &prompt);
    if (!prompt.n || !prompts_one_in(p, 3))
        prompt_extend(p, &prompt, 1 + unit_below(p->random, 4 * block_size));
    return prompt;
}

static inline void prompts_remember(struct prompts *p, const struct prompt *prompt)
{
    if (p->n < PROMPT_HISTORY)
        p->past[p->n++] = *prompt;
    else
        p->past[unit_below(p->random, PROMPT_HISTORY)] = *prompt;
}

static inline size_t prompt_len(const char *text)
{
    return text ? strlen(text) : 0;
}

/* The seed of its namespace, as a router has it. */
static inline uint64_t prompt_seed(const struct prompt *p)
{
    const char *lora = prompt_loras[p->lora], *salt = prompt_salts[p->salt];

    return kve_seed(lora, prompt_len(lora), salt, prompt_len(salt));
}

#endif
