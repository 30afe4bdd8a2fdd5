// SPDX-License-Identifier: Apache-2.0
/**
 * Field values of a msgpack body. A failed reader returns zeros and stays failed; a value of
 * another type, or out of range, is -EINVAL or -ERANGE and thus the field's fault, what isn't
 * msgpack is not.
 */
#ifndef KV_INDEXER_BODY_MSGPACK_H
#define KV_INDEXER_BODY_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/json.h" /* struct kv_str */
#include "base/msgpack.h"

/** When another type stands here that is the field's fault; when nothing does, the text's. */
bool ki_msgpack_expect(struct kv_msgpack *m, bool fits, const char *text);

uint64_t ki_msgpack_uint(struct kv_msgpack *m, uint64_t max);
struct kv_str ki_msgpack_str(struct kv_msgpack *m);
bool ki_msgpack_bool(struct kv_msgpack *m);
/** Append an array of integers, or one bin of little-endian ones. */
void ki_msgpack_u32s(struct kv_buf *ret, struct kv_msgpack *m);
void ki_msgpack_bits64s(struct kv_buf *ret, struct kv_msgpack *m);

#endif
