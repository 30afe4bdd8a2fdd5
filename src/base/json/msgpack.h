// SPDX-License-Identifier: Apache-2.0
/**
 * A pull reader and a writer for msgpack.
 *
 * The reader hands out values in order from one buffer. It checks every length against the bytes
 * left before it uses the length (an array of n elements needs at least n bytes). It never
 * allocates, and passes over nesting of any depth without recursion. Errors stick, as in json.h.
 * Strings and binaries point into the input.
 */
#ifndef KV_BASE_MSGPACK_H
#define KV_BASE_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h" /* struct kv_str */

enum kv_msgpack_type {
    KV_MSGPACK_NONE, /* end of input, or an error */
    KV_MSGPACK_NIL,
    KV_MSGPACK_BOOL,
    KV_MSGPACK_UINT, /* any non-negative integer */
    KV_MSGPACK_INT,  /* a negative integer */
    KV_MSGPACK_FLOAT,
    KV_MSGPACK_STR,
    KV_MSGPACK_BIN,
    KV_MSGPACK_ARRAY,
    KV_MSGPACK_MAP,
    KV_MSGPACK_EXT
};

struct kv_msgpack {
    const uint8_t *p, *end, *start;
    struct kv_error error;
};

void kv_msgpack_init(struct kv_msgpack *m, const void *data, size_t len);
enum kv_msgpack_type kv_msgpack_peek(const struct kv_msgpack *m);

uint32_t kv_msgpack_array(struct kv_msgpack *m); /* number of elements that follow */
uint32_t kv_msgpack_map(struct kv_msgpack *m);   /* number of key/value pairs */
uint64_t kv_msgpack_u64(struct kv_msgpack *m);
int64_t kv_msgpack_i64(struct kv_msgpack *m);
uint64_t kv_msgpack_bits64(struct kv_msgpack *m); /* unsigned, or negative as two's complement */
double kv_msgpack_double(struct kv_msgpack *m);   /* floats and integers */
bool kv_msgpack_bool(struct kv_msgpack *m);
bool kv_msgpack_nil(struct kv_msgpack *m); /* true: a nil was read; false: nothing was read */
struct kv_str kv_msgpack_str(struct kv_msgpack *m);
struct kv_str kv_msgpack_bin(struct kv_msgpack *m);
void kv_msgpack_skip(struct kv_msgpack *m); /* skips one value with all its contents */

/** Append @n integers of 0..2^32-1 to @ret, which has room for @n. Fast path for token ids. */
bool kv_msgpack_u32s(struct kv_msgpack *m, uint32_t n, uint32_t *ret);

static inline bool kv_msgpack_failed(const struct kv_msgpack *m)
{
    return m->error.code != 0;
}
void kv_msgpack_fail(struct kv_msgpack *m, int code, const char *text);

/* -- writer: appends the shortest encoding of each value --------------------------------------- */
void kv_msgpack_put_nil(struct kv_buf *out);
void kv_msgpack_put_bool(struct kv_buf *out, bool value);
void kv_msgpack_put_u64(struct kv_buf *out, uint64_t value);
void kv_msgpack_put_i64(struct kv_buf *out, int64_t value);
void kv_msgpack_put_double(struct kv_buf *out, double value);
void kv_msgpack_put_str(struct kv_buf *out, const char *text);
void kv_msgpack_put_strn(struct kv_buf *out, const char *text, size_t len);
void kv_msgpack_put_bin(struct kv_buf *out, const void *data, size_t len);
void kv_msgpack_put_array(struct kv_buf *out, uint32_t n);
void kv_msgpack_put_map(struct kv_buf *out, uint32_t n);
/** Append @n integers without an array header. Fast path for tokens and hashes. */
void kv_msgpack_put_u32s(struct kv_buf *out, const uint32_t *values, size_t n);
void kv_msgpack_put_u64s(struct kv_buf *out, const uint64_t *values, size_t n);

#endif
