// SPDX-License-Identifier: Apache-2.0
/** Create and share models (struct ki_model of registry.h). Thread-safe. */
#ifndef KV_INDEXER_MODEL_H
#define KV_INDEXER_MODEL_H

#include "indexer/registry.h"

/**
 * Create a model with one reference, for the caller. On success it owns @index; NULL: make an empty
 * one.
 */
int ki_model_create(const char *name, const char *tenant, uint32_t block_size,
                    struct kvi_index *index, struct ki_model **ret);
struct ki_model *ki_model_acquire(struct ki_model *model); /* returns @model */

/**
 * Note forms in which the model's blocks were hashed: KI_FORM of each (see lookup.h). Called after
 * the blocks are in the index. Forms are never forgotten: one too many costs a lookup.
 */
void ki_model_note_forms(struct ki_model *model, uint64_t forms);
uint64_t ki_model_forms(const struct ki_model *model);

/** Compare by name, then tenant: <0, 0, >0. */
int ki_model_compare(const struct ki_model *model, const char *name, const char *tenant);

#endif
