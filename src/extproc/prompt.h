// SPDX-License-Identifier: Apache-2.0
/** The prompt of a request body in OpenAI's form: token ids, or what an engine's /tokenize asks for. */
#ifndef KV_EXTPROC_PROMPT_H
#define KV_EXTPROC_PROMPT_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

enum kx_prompt_kind {
    KX_PROMPT_NONE,   /* none that is understood */
    KX_PROMPT_TOKENS, /* tokens */
    KX_PROMPT_TEXT    /* text or messages: request */
};

/** Zero-initialise; used again. */
struct kx_prompt {
    enum kx_prompt_kind kind;
    struct kv_buf model;   /* text; see kv_buf_cstr */
    struct kv_buf tokens;  /* raw uint32_t */
    struct kv_buf request; /* JSON for POST /tokenize */
    uint64_t guess;        /* of the prompt's tokens: a quarter of its bytes */
};
void kx_prompt_fini(struct kx_prompt *prompt);

/**
 * Read @body: `prompt` (a string, or an array of token ids) or `messages`, with the members that decide what
 * a template makes of them. A body that is no JSON, or has neither, is KX_PROMPT_NONE. Returns 0 or -ENOMEM.
 */
int kx_prompt_read(struct kx_prompt *prompt, const void *body, size_t len);

/**
 * Read an answer of /tokenize: append its `tokens`, raw uint32_t, to @ret. Returns 0; -EPROTO: none in it;
 * -ENOMEM.
 */
int kx_tokens_read(const void *answer, size_t len, struct kv_buf *ret);

#endif
