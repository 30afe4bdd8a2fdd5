// SPDX-License-Identifier: Apache-2.0
/**
 * Reasons for which answers about a rank may be wrong, as bits of a set. The view is partial exactly
 * when its set isn't empty; nothing else says so. reasons.def has the table.
 */
#ifndef KV_INDEXER_VIEW_REASONS_H
#define KV_INDEXER_VIEW_REASONS_H

#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h"

enum ki_reason {
#define KI_REASON(id, ...) KI_REASON_##id,
#include "indexer/view/reasons.def"
#undef KI_REASON
    KI_N_REASONS
};

typedef uint64_t ki_reasons;

/** The set of one reason: KI_BECAUSE(STALE). */
#define KI_BECAUSE(id) (UINT64_C(1) << KI_REASON_##id)

/** Something may be missing, until a view is whole: see reasons.def. */
#define KI_REASONS_LOST (2 * KI_BECAUSE(TORN) - 1)

enum ki_told { KI_TOLD_ALWAYS, KI_TOLD_BLOCKS, KI_TOLD_NEVER };

struct ki_reason_info {
    const char *name;
    enum ki_told told;
    const char *set_by, *ended_by;
};

const struct ki_reason_info *ki_reason_info(enum ki_reason reason);

/** Return those of the reasons that a replica learns as @told. */
ki_reasons ki_reasons_told(ki_reasons reasons, enum ki_told told);

/** Write ["missed_batches"]. */
void ki_reasons_write(struct kv_json_writer *w, ki_reasons reasons);
/** Read such a list. Names that this version doesn't know count as PEER. */
ki_reasons ki_reasons_read(struct kv_json *json);

#endif
