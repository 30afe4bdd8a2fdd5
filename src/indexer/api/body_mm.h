// SPDX-License-Identifier: Apache-2.0
/**
 * Multimodal objects of a query, in one of two fields.
 *
 *   mm_objects      [{"id": "...", "offset": 5, "length": 576}, ...]: where the object's tokens are in
 *                   the prompt; "mm_hash": 7 instead of "id" names it by its 64-bit identity
 *   block_mm_infos  [null, {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 3]]}]}, ...]: per block, as
 *                   in events; "offsets" has the object's tokens in the block, [from, to)
 *
 * Both append struct ki_mm_object to a buffer. Errors stick to the reader, as those of other
 * fields.
 */
#ifndef KV_INDEXER_API_BODY_MM_H
#define KV_INDEXER_API_BODY_MM_H

#include "base/core/buf.h"
#include "base/json/json.h"
#include "base/json/msgpack.h"

void ki_mm_read_json(struct kv_json *json, bool infos, struct kv_buf *unescaped,
                     struct kv_buf *ret);
void ki_mm_read_msgpack(struct kv_msgpack *m, bool infos, struct kv_buf *ret);

/**
 * Sort the objects by their starts, and compute the places of those named per block. An object that
 * begins a block continues the same one at the end of the block before. Returns NULL, or the fault:
 * an object without length, two that overlap, or one that ends beyond @n_tokens.
 */
const char *ki_mm_sort(struct kv_buf *objects, size_t n_tokens, uint32_t block_size);

#endif
