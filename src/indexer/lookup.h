// SPDX-License-Identifier: Apache-2.0
/**
 * Looking a prompt up: hash its blocks in every form in which a model's workers hash theirs, and
 * merge what the index answers.
 *
 * An engine that drafts ahead (EAGLE, MTP) hashes each block together with the tokens after it, its
 * lookahead: one for SGLang's bigrams, 1 to KVE_MAX_LOOKAHEAD for vLLM. A worker has one form, a
 * model may have workers of several. Blocks of two forms never have the same local hash, so each
 * form finds its own workers. A model without lookahead costs one look.
 *
 * vLLM hashes a multimodal object with its place in the block, other engines without: two forms
 * more, which are asked for prompts with such objects only.
 */
#ifndef KV_INDEXER_LOOKUP_H
#define KV_INDEXER_LOOKUP_H

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "kv_index.h"

/** A form of hashing as a bit: tokens of lookahead, and whether multimodal objects have places. */
#define KI_FORM(lookahead, placed) (UINT64_C(1) << ((lookahead) + ((placed) ? 32u : 0u)))

/** A multimodal object in a prompt, or the part of one in a block. */
struct ki_mm_object {
    uint64_t identity;
    uint64_t start, end; /* its tokens, start <= token < end; end 0: all of block number start */
    uint32_t from, to; /* with end 0: its tokens in that block, from <= token < to; to 0: unknown */
    int64_t place;     /* with end 0 and to: of the object's first token, from the block's start */
};

struct ki_prompt {
    const uint32_t *tokens;
    size_t n;
    uint64_t seed; /* of its namespace */
    uint32_t block_size;
    uint64_t forms;                     /* KI_FORM of each to ask; 0: the plain one */
    const struct ki_mm_object *objects; /* in the order of their starts, none within another */
    size_t n_objects;
};

/** Result of a lookup; reused. Zero-initialise. Thread-confined. */
struct ki_lookup {
    struct kv_buf hashes; /* raw uint64_t: of the first form asked, for explain */
    size_t n_blocks;      /* of these */
    uint32_t lookahead;   /* of these */
    struct kvi_matches matches;
    struct kv_buf other_hashes;
    struct kvi_matches others;
};
void ki_lookup_fini(struct ki_lookup *lookup);

/** Returns 0 with lookup->matches, one per holder, unordered; -ENOMEM; -E2BIG: too many objects. */
int ki_lookup_prompt(struct ki_lookup *lookup, struct kvi_index *index,
                     const struct ki_prompt *prompt);

#endif
