// SPDX-License-Identifier: Apache-2.0
/**
 * Test batches as text: pack(&buf, "[1.5, [{'type': 'BlockRemoved', 'block_hashes': [1, -2,
 * x'0011']}], 0]") appends the msgpack of it. Strings in single quotes, x'..' for binary, nil,
 * true, false; %s and the like as in printf.
 */
#ifndef KV_TESTS_EVENT_PACK_H
#define KV_TESTS_EVENT_PACK_H

#include "base/json/msgpack.h"
#include "base/unit.h"

/** Append the bytes of hex digits, up to a quote or the end. Returns where they end. */
const char *pack_hex(struct kv_buf *out, const char *p);

/** Append the msgpack of a text. */
KV_PRINTF(2, 3)
void pack(struct kv_buf *out, const char *fmt, ...);

#endif
