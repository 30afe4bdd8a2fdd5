// SPDX-License-Identifier: Apache-2.0
/** Which cache groups end matches, and where: a part of "explain". */
#ifndef KV_INDEXER_API_CUT_H
#define KV_INDEXER_API_CUT_H

#include "base/json/json.h"
#include "indexer/api/explain.h"
#include "indexer/stream/worker.h"
#include "kv_index.h"

/** A prompt's matches, and what the groups of the ranks with windows allow. Zero-initialise it. */
struct ki_cut {
    struct ki_lookup lookup;
    struct kvi_group_matches groups;
};
void ki_cut_fini(struct ki_cut *cut);

/** Look the question up again, with its groups. Without memory, and for sequence hashes, there are none. */
void ki_cut_find(struct ki_cut *cut, const struct ki_model *model,
                 const struct ki_explain_ask *ask);

/** Return true when cache groups leave nothing of any match, of which there are some. */
bool ki_cut_is_all(const struct ki_cut *cut);

/**
 * Write the member "cut" of one rank, when a cache group shortens its match. Returns false, and writes
 * nothing, when none does.
 */
bool ki_cut_write_one(const struct ki_cut *cut, const struct ki_worker_info *info,
                      uint32_t block_size, struct kv_json_writer *w);

/**
 * Write "cut", the first ranks whose match a cache group shortens, and "cut_ranks", how many there are;
 * nothing where there are none. @infos are @n registrations, n < 0: none.
 */
void ki_cut_write(const struct ki_cut *cut, const struct ki_model *model,
                  const struct ki_worker_info *infos, long n, struct kv_json_writer *w);

#endif
