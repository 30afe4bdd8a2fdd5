// SPDX-License-Identifier: Apache-2.0
/** Shared by the files of the JSON reader; no other file includes this. */
#ifndef KV_BASE_JSON_READER_H
#define KV_BASE_JSON_READER_H

#include "base/json/json.h"

/**
 * Read the integer at j->p (a digit or a minus), within [-2^63, 2^64). Returns false with the error
 * set when the value is another one. *ret_at is the offset of the integer.
 */
bool kv_json_integer_(struct kv_json *j, bool *ret_negative, uint64_t *ret_magnitude,
                      uint64_t *ret_at);

/** Record an error at an offset, unless there is one already. */
void kv_json_fail_at_(struct kv_json *j, uint64_t at, int code, const char *text);

/** Record malformed text at j->p, or text that is cut off there. */
void kv_json_malformed_(struct kv_json *j, const char *text);

/** Record that the value at j->p has another type than @text names, or is malformed. */
void kv_json_unexpected_(struct kv_json *j, const char *text);

/**
 * Append the stream's next bytes to the unread text, which moves: pointers into it are invalid
 * afterwards. Returns false at the end of the text, or when unread text fills the buffer.
 */
bool kv_json_more_(struct kv_json *j);

/** Go to the next value. Returns its first byte, or -1 with an error. */
int kv_json_begin_value_(struct kv_json *j);

/** Check the number at j->p and go behind it (json_numbers.c). *ret_at is its offset. */
bool kv_json_number_(struct kv_json *j, struct kv_str *ret, bool *integer, uint64_t *ret_at);

/* -- stretches of simple numbers (json_array.h), by instruction set ---------------------------- */

#ifdef __x86_64__
size_t kv_json_take_avx2_(struct kv_json *j, struct kv_buf *ret, bool wide);
size_t kv_json_take_avx512_(struct kv_json *j, struct kv_buf *ret, bool wide);

/**
 * Width in bits of the vectors that read arrays: 128, 256, 512; 0: not chosen yet. Tests set it.
 */
extern _Atomic unsigned kv_json_vector_bits_;
#endif

static inline uint64_t kv_json_offset_(const struct kv_json *j)
{
    return j->consumed + (uint64_t)(j->p - j->start);
}

/* -- pieces of text (json_text.c): pure functions over the bytes before @end ------------------- */

/**
 * Return the first byte that isn't a plain character: a quote, backslash, control or non-ASCII
 * byte.
 */
const char *kv_json_skip_plain_(const char *p, const char *end);

/**
 * Decode the escape at @p (a backslash) into *@ret. Returns its length; 0 when it is none; -1 when
 * @end cuts off a possible one. A surrogate must be half of a pair.
 */
int kv_json_escape_(const char *p, const char *end, unsigned *ret);

/**
 * Decode the escapes of @raw, which must be valid, into @out (as long as raw). Returns the length,
 * 0 when one escape is \u0000.
 */
size_t kv_json_unescape_(struct kv_str raw, char *out);

/** Return the end of the number at @p, or the place of its error (*ok is false). */
const char *kv_json_number_end_(const char *p, const char *end, bool *integer, bool *ok);

#endif
