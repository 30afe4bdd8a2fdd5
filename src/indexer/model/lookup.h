// SPDX-License-Identifier: Apache-2.0
/**
 * Look a prompt up: hash its blocks in every form that a model's workers use, and merge the index's
 * answers.
 *
 * An engine that drafts ahead (EAGLE, MTP) hashes each block together with the tokens after it, its
 * lookahead: one token for SGLang's bigrams, 1 to KVE_MAX_LOOKAHEAD for vLLM. A worker has one
 * form; a model may have workers of several. Blocks of two forms never have the same local hash, so
 * each form finds its own workers. A model without lookahead costs one lookup.
 *
 * vLLM hashes a multimodal object with its place in the block, other engines hash it without. The
 * forms with places are tried only for prompts with such objects.
 */
#ifndef KV_INDEXER_MODEL_LOOKUP_H
#define KV_INDEXER_MODEL_LOOKUP_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "kv_index.h"

/** Most tokens after a block that its hash may cover. */
#define KI_MAX_LOOKAHEAD 31

/** A form of hashing as a bit: tokens of lookahead, and whether multimodal objects have places. */
#define KI_FORM(lookahead, placed) (UINT64_C(1) << ((lookahead) + ((placed) ? 32u : 0u)))

/** A multimodal object in a prompt, or the part of one in a block. */
struct ki_mm_object {
    uint64_t identity;
    /* The object's tokens, start <= token < end; end 0: all of block number start. */
    uint64_t start, end;
    /* With end 0: the tokens in that block, from <= token < to; to 0: unknown. */
    uint32_t from, to;
    /* With end 0 and to: place of the object's first token, from the block's start. */
    int64_t place;
};

struct ki_prompt {
    const uint32_t *tokens;
    size_t n;
    uint64_t seed; /* seed of the prompt's namespace */
    uint32_t block_size;
    uint64_t forms;                     /* KI_FORM of each form to try; 0: the plain one */
    const struct ki_mm_object *objects; /* in the order of their starts, none within another */
    size_t n_objects;
};

/** Result of a lookup, used again. Zero-initialise. Thread-confined. */
struct ki_lookup {
    struct kv_buf hashes; /* raw uint64_t of the first form tried */
    size_t n_blocks;      /* blocks in hashes */
    struct kvi_matches matches;
    struct kv_buf other_hashes;
    struct kvi_matches others;
    struct kvi_group_matches *groups; /* gets what kvi_find_groups gives; NULL: not wanted */
};
void ki_lookup_fini(struct ki_lookup *lookup);

/**
 * Look the prompt up. Returns 0 with lookup->matches, one per holder, unordered; -ENOMEM; -E2BIG:
 * too many objects.
 */
int ki_lookup_prompt(struct ki_lookup *lookup, struct kvi_index *index,
                     const struct ki_prompt *prompt);

/** Return the KI_FORM bits that a lookup of @prompt tries. */
uint64_t ki_prompt_forms(const struct ki_prompt *prompt);

/**
 * Hash the prompt's full blocks in the form of one KI_FORM bit: raw uint64_t in @ret. Returns 0, -ENOMEM
 * or -E2BIG.
 */
int ki_prompt_hash(const struct ki_prompt *prompt, uint64_t form, struct kv_buf *ret);

/** Compare two struct kvi_match by worker and rank, for qsort. */
int ki_by_holder(const void *a, const void *b);

#endif
