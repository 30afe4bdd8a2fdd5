// SPDX-License-Identifier: Apache-2.0
/**
 * Ask engines to tokenize: one thread, several transfers at a time, a deadline for each, and a breaker
 * that stops asking for a while after failures.
 */
#ifndef KV_EXTPROC_TOKENIZE_H
#define KV_EXTPROC_TOKENIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"

#define KX_MAX_URL 512

struct kx_tokenizer;

/** A question. The asker owns it until fn, which the tokenizer's thread calls once. */
struct kx_question {
    char url[KX_MAX_URL];  /* of /tokenize */
    struct kv_buf request; /* JSON */
    uint64_t deadline_ns;
    struct kv_buf tokens; /* the answer: raw uint32_t */
    /* @rc: 0; -ETIMEDOUT; -ECANCELED: the tokenizer is being destroyed; another negative errno. */
    void (*fn)(struct kx_question *question, int rc);
    struct kx_question *next; /* the tokenizer's, as what follows */
    bool probe;               /* the breaker waits for its end */
    void *easy;
    struct kv_buf answer;
};

int kx_tokenizer_create(struct kx_tokenizer **ret);
/** End all questions with -ECANCELED. NULL is a no-op. */
void kx_tokenizer_destroy(struct kx_tokenizer *tokenizer);

/**
 * Ask. Returns 0: fn will be called; -EAGAIN: too many questions wait, or the last ones failed: fn isn't
 * called.
 */
int kx_tokenizer_ask(struct kx_tokenizer *tokenizer, struct kx_question *question);

#endif
