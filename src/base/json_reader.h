// SPDX-License-Identifier: Apache-2.0
/** Between the files of the JSON reader; nobody else includes this. */
#ifndef KV_BASE_JSON_READER_H
#define KV_BASE_JSON_READER_H

#include "base/json.h"

/**
 * The integer at j->p (a digit or a minus), within [-2^63, 2^64). Returns false with the error set
 * when it isn't one; *ret_at is where it began.
 */
bool kv_json_integer_(struct kv_json *j, bool *ret_negative, uint64_t *ret_magnitude,
                      uint64_t *ret_at);

/** Record an error at an offset, unless there is one already. */
void kv_json_fail_at_(struct kv_json *j, uint64_t at, int code, const char *text);

/* -- stretches of simple numbers (json_array.h), by instruction set ---------------------------- */

#ifdef __x86_64__
size_t kv_json_take_avx2_(struct kv_json *j, struct kv_buf *ret, bool wide);
size_t kv_json_take_avx512_(struct kv_json *j, struct kv_buf *ret, bool wide);

/** Width of the vectors that arrays are read with: 128, 256, 512; 0: not chosen yet. Tests set it. */
extern _Atomic unsigned kv_json_vector_bits_;
#endif

static inline uint64_t kv_json_offset_(const struct kv_json *j)
{
    return j->consumed + (uint64_t)(j->p - j->start);
}

/* -- pieces of text (json_text.c): pure functions over the bytes before @end ------------------- */

/** The first byte that is more than a plain character: quote, backslash, control, not ASCII. */
const char *kv_json_skip_plain_(const char *p, const char *end);

/**
 * The escape at @p (a backslash): its length, and what it stands for. 0 when it is none, -1 when
 * @end cuts off what might become one. A surrogate must be half of a pair.
 */
int kv_json_escape_(const char *p, const char *end, unsigned *ret);

/**
 * Resolve the escapes of @raw, which must be right, into @out (as long as raw). Returns the length,
 * 0 when one is \u0000.
 */
size_t kv_json_unescape_(struct kv_str raw, char *out);

/** Where the number at @p ends, or where it goes wrong (not @ok). */
const char *kv_json_number_end_(const char *p, const char *end, bool *integer, bool *ok);

#endif
