// SPDX-License-Identifier: Apache-2.0
/** Models: create and share them. Thread-safe. */
#ifndef KV_INDEXER_MODEL_MODEL_H
#define KV_INDEXER_MODEL_MODEL_H

#include <stdint.h>

#include "kv_index.h"

struct ki_chunks;

/**
 * One (model_name, tenant_id). Reference-counted and immutable, unlike its index. Adopting a peer's
 * index replaces the model; holders of the old model keep using the old one. A model is dropped
 * when its last registration has left and its index is empty.
 */
struct ki_model {
    const char *name;
    const char *tenant;
    uint32_t block_size;
    _Atomic uint32_t n_odd; /* streams that aren't active, or have a partial view */
    _Atomic uint64_t forms; /* KI_FORM (lookup.h) of each form in which its workers hash blocks */
    struct kvi_index *index;
    struct ki_chunks *chunks; /* of its workers' lower tiers */
};

/**
 * Create a model with one reference, for the caller. On success it owns @index; NULL: make an empty
 * one.
 */
int ki_model_create(const char *name, const char *tenant, uint32_t block_size,
                    struct kvi_index *index, struct ki_model **ret);
struct ki_model *ki_model_acquire(struct ki_model *model); /* returns @model */
void ki_model_release(struct ki_model *model);

/**
 * Note forms in which the model's blocks were hashed: KI_FORM of each (see lookup.h). Called after
 * the blocks are in the index. Forms are never forgotten: one too many costs a lookup.
 */
void ki_model_note_forms(struct ki_model *model, uint64_t forms);
uint64_t ki_model_forms(const struct ki_model *model);

/** Compare by name, then tenant: <0, 0, >0. */
int ki_model_compare(const struct ki_model *model, const char *name, const char *tenant);

#endif
