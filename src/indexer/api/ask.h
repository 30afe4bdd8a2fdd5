// SPDX-License-Identifier: Apache-2.0
/** The question of a query, from its body to its matches: /query, /query_by_hash and /explain ask it. */
#ifndef KV_INDEXER_API_ASK_H
#define KV_INDEXER_API_ASK_H

#include "indexer/api/explain.h"
#include "indexer/service.h"

/**
 * Find the model that the body names; with "default" where it names no tenant. NULL: @reply has the 404.
 * Release with ki_model_release.
 */
struct ki_model *ki_ask_model(struct ki_service *service, struct ki_body *body,
                              struct kh_reply *reply);

/**
 * Look up the body's token_ids in @model: matches are in @scratch->lookup, unordered, cut to chunks.
 * @prompt and @ask become the question; both point into @scratch. Returns false when @reply has the error.
 */
bool ki_ask_tokens(const struct ki_model *model, struct ki_scratch *scratch,
                   struct ki_prompt *prompt, struct ki_explain_ask *ask, struct kh_reply *reply);

/** The same for block_hashes or sequence_hashes. */
bool ki_ask_hashes(const struct ki_model *model, struct ki_scratch *scratch,
                   struct ki_explain_ask *ask, struct kh_reply *reply);

#endif
