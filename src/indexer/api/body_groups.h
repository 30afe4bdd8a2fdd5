// SPDX-License-Identifier: Apache-2.0
/**
 * Cache groups of a registration, in its JSON and msgpack, in the option --groups, and in what
 * replicas tell each other:
 *
 *   [{"group": 1, "kind": "chunked_local_attention", "block_size": 16, "window": 0, "chunk": 8192}]
 *
 * Errors stick to the reader, as those of other fields.
 */
#ifndef KV_INDEXER_API_BODY_GROUPS_H
#define KV_INDEXER_API_BODY_GROUPS_H

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/json/json.h"
#include "base/json/msgpack.h"
#include "event/reader/sources.h"

void ki_told_read_json(struct kv_json *json, struct kv_buf *unescaped, struct kve_told *ret);
void ki_told_read_msgpack(struct kv_msgpack *m, struct kve_told *ret);

/** Read the text of an option. Returns 0 or -EINVAL with @error's text. */
int ki_told_read_text(const char *text, struct kve_told *ret, struct kv_error *error);

/**
 * Write cache groups as a listener knows them, those of registered blocks of @block_size: kind, block
 * size, and what a match needs.
 */
void ki_groups_write(const struct kve_listed_group *groups, uint32_t n, uint32_t block_size,
                     struct kv_json_writer *w);

/** The name of the group's kind, by vLLM's names. */
const char *ki_group_kind_name(const struct kve_group *g);

/** Write the array. */
void ki_told_write(const struct kve_told *told, struct kv_json_writer *w);

/** Check all groups beside registered blocks of @block_size. Returns 0 or -EINVAL with @error's text. */
int ki_told_check(const struct kve_told *told, uint32_t block_size, struct kv_error *error);

#endif
