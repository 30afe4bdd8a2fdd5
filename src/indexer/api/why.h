// SPDX-License-Identifier: Apache-2.0
/** Why the match of each rank ends where it does: the ranks of POST /explain. */
#ifndef KV_INDEXER_API_WHY_H
#define KV_INDEXER_API_WHY_H

#include "indexer/api/cut.h"
#include "indexer/api/explain.h"

enum ki_why {
#define KI_WHY(id, ...) KI_WHY_##id,
#include "indexer/api/why.def"
#undef KI_WHY
    KI_N_WHYS
};

struct ki_why_info {
    const char *name, *text;
};
const struct ki_why_info *ki_why_info(enum ki_why why);

/** The question of one prompt, and what the index has of it. Zero-initialise. */
struct ki_why_ask {
    const struct ki_model *model;
    const struct ki_explain_ask *ask;
    const struct kvi_matches *matches; /* ordered by ki_by_holder */
    size_t n;     /* blocks of the prompt, also before the first one named by a sequence hash */
    size_t first; /* block that the first hash of the request names */
    size_t n_stops;
    struct kvi_stop *stops; /* of all holders, ordered by holder */
    struct ki_cut cut;
    /* Matches of the first block without adapter, without salt, without both. */
    struct kvi_matches elsewhere[3];
};

/** Look up what the matches leave open. Returns 0, -ENOMEM or -E2BIG; free it in any case. */
int ki_why_find(struct ki_why_ask *why);
void ki_why_fini(struct ki_why_ask *why);

/** Return the longest match of a rank in any tier, in blocks. */
uint32_t ki_why_reach(const struct ki_why_ask *why, const struct ki_worker_info *info);

/** Write the object of one registered rank. */
void ki_why_write(const struct ki_why_ask *why, const struct ki_worker_info *info,
                  struct kv_json_writer *w);

#endif
