// SPDX-License-Identifier: Apache-2.0
/** Say where a blob is, why, and what would move it. */
#ifndef KV_ADVISOR_EXPLAIN_H
#define KV_ADVISOR_EXPLAIN_H

#include "advisor/volumes.h"
#include "base/json/json.h"

/** Read a key of 32 hexadecimal digits. Returns false: it is none. */
bool kva_parse_key(struct kv_str text, uint8_t ret[KVA_KEY]);
/**
 * Write a blob as an object; @w is at its place. The caller holds the world's lock. Returns false when the
 * index doesn't track it: nothing is written.
 */
bool kva_explain(struct kva_volumes *volumes, const struct kva_index *index, const char *policy,
                 const uint8_t key[KVA_KEY], uint32_t now_s, struct kv_json_writer *w);

#endif
