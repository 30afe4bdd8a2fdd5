// SPDX-License-Identifier: Apache-2.0
/**
 * "explain": true in a query makes the answer explain its match. The usual complaint is "hit rate
 * 0, no error".
 */
#ifndef KV_INDEXER_API_EXPLAIN_H
#define KV_INDEXER_API_EXPLAIN_H

#include <stddef.h>
#include <stdint.h>

#include "base/json/json.h"
#include "http/http.h"
#include "indexer/api/body.h"
#include "indexer/model/lookup.h"
#include "indexer/registry/registry.h"

struct ki_service;

struct ki_explain_ask {
    const uint64_t *hashes; /* local hashes of the prompt's full blocks */
    size_t n;
    const struct ki_prompt *prompt; /* NULL for /query_by_hash */
    bool named;                     /* hashes are sequence hashes */
    const struct ki_body *body;
};

/** Append the member "explain" where @writer stands. */
void ki_explain(struct ki_service *service, const struct ki_model *model,
                const struct ki_explain_ask *ask, const struct kvi_matches *matches,
                struct kv_json_writer *writer);

/**
 * Look up the first block of @ask's prompt as if it had been asked with this adapter and salt (NULL: none):
 * @ret is overwritten. Returns 0, -ENOMEM or -E2BIG.
 */
int ki_explain_first_block(const struct ki_model *model, const struct ki_explain_ask *ask,
                           const char *lora, const char *salt, struct kvi_matches *ret);

/** Set @reply to the 404 of an unknown model: error, hint, the known ones; @explain: the reason, too. */
void ki_explain_unknown(struct ki_service *service, const char *model, const char *tenant,
                        bool explain, struct kh_reply *reply);

/**
 * Write two members: how many events were left out, by reason, and, where some named unknown media, how
 * many named which.
 */
void ki_explain_skipped(struct kv_json_writer *w, const uint64_t skipped[KVE_N_SKIPS],
                        const struct kve_unknown_media *media);

#endif
