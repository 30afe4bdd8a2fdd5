// SPDX-License-Identifier: Apache-2.0
/**
 * Field values of a msgpack body. A failed reader returns zeros and stays failed. A value of
 * another type, or out of range, is -EINVAL or -ERANGE: the field's fault. Malformed msgpack has
 * another code.
 */
#ifndef KV_INDEXER_API_BODY_MSGPACK_H
#define KV_INDEXER_API_BODY_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h" /* struct kv_str */
#include "base/json/msgpack.h"

/**
 * Record an error unless @fits: the field's fault when a value of another type stands here, the
 * text's when none does.
 */
bool ki_msgpack_expect(struct kv_msgpack *m, bool fits, const char *text);

uint64_t ki_msgpack_uint(struct kv_msgpack *m, uint64_t max);
struct kv_str ki_msgpack_str(struct kv_msgpack *m);
bool ki_msgpack_bool(struct kv_msgpack *m);
/** Append an array of integers, or one bin of little-endian integers. */
void ki_msgpack_u32s(struct kv_buf *ret, struct kv_msgpack *m);
void ki_msgpack_bits64s(struct kv_buf *ret, struct kv_msgpack *m);

#endif
