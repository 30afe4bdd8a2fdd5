// SPDX-License-Identifier: Apache-2.0
/**
 * A pull JSON reader and a writer.
 *
 * The reader walks the text once, in order, and hands out values as they come: no tree, no
 * allocation, bounded depth, exact over the whole unsigned and signed 64-bit range. It takes RFC
 * 8259 and nothing more. Errors stick: after the first one every call fails with it, and `error`
 * says what and at which byte: -EBADMSG (not JSON: malformed, cut off, not UTF-8), -EINVAL (JSON,
 * but of another type than asked), -ERANGE (a number that doesn't fit), -E2BIG (nested deeper than
 * KV_JSON_MAX_DEPTH), -EMSGSIZE (longer than a buffer or its limit), or what refill returned.
 *
 *     kv_json_object(&j);
 *     while (kv_json_next_key(&j, &key)) {
 *         if (kv_str_eq(key, "block_size"))
 *             n = kv_json_u64(&j, UINT32_MAX);
 *         else
 *             kv_json_skip(&j);
 *     }
 *     rc = kv_json_finish(&j);     // 0, or the sticky error; also refuses trailing text
 *
 * Input is one buffer, or a stream: with a refill function the reader keeps the unread tail of its
 * buffer and asks for more, so that a document of any size is read in bounded memory; then strings
 * and keys are valid only until the next call, and none that is read (rather than skipped) may be
 * longer than the buffer. Both ways give the same values and the same errors.
 *
 * Keys may repeat; which one counts is the caller's business. \u0000 is well-formed and may be
 * skipped, but is never handed out (-EINVAL), since strings end up as C strings.
 */
#ifndef KV_BASE_JSON_H
#define KV_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"

#define KV_JSON_MAX_DEPTH 64
#define KV_JSON_MAX_ESCAPED_KEY 1024 /* keys without escapes may be of any length */
#define KV_JSON_MAX_DOUBLE 1023      /* characters of a number read by kv_json_double */

/** Bytes in a buffer that another object owns. */
struct kv_str {
    const char *p;
    size_t len;
};
static inline bool kv_str_eq(struct kv_str s, const char *text)
{
    size_t len = strlen(text);

    return s.len == len && memcmp(s.p, text, len) == 0;
}

enum kv_json_type {
    KV_JSON_NONE, /* end of the container or of the text, or an error */
    KV_JSON_NULL,
    KV_JSON_BOOL,
    KV_JSON_NUMBER,
    KV_JSON_STRING,
    KV_JSON_ARRAY,
    KV_JSON_OBJECT
};

/** Put up to @size more bytes at @data. Returns their number, 0 at the end, or a negative errno. */
typedef long (*kv_json_refill_fn)(void *arg, char *data, size_t size);

struct kv_json {
    const char *p, *end; /* unread text */
    char *buf;           /* streams: the caller's buffer */
    size_t buf_size;
    kv_json_refill_fn refill;
    void *refill_arg;
    uint64_t consumed; /* bytes of the stream that precede buf */
    const char *start; /* base of buffer offsets */
    uint32_t depth;
    uint64_t is_object; /* bit per level */
    uint64_t has_item;  /* bit per level: a comma is due */
    bool colon_due;     /* a colon must follow: the last token was a key */
    struct kv_error error;
    char key[KV_JSON_MAX_ESCAPED_KEY]; /* a key after resolving its escapes */
};

/** Read @text, which must stay unchanged while it is read. */
void kv_json_init(struct kv_json *j, const void *text, size_t len);
/** Read a stream through @buf, which @refill fills. */
void kv_json_init_stream(struct kv_json *j, char *buf, size_t buf_size, kv_json_refill_fn refill,
                         void *arg);

/** Return the type of the next value without reading it. */
enum kv_json_type kv_json_peek(struct kv_json *j);

/** Enter an object or array. It is left when next_key or next_item returns false. */
bool kv_json_object(struct kv_json *j);
bool kv_json_next_key(struct kv_json *j, struct kv_str *key); /* escapes are resolved */
bool kv_json_array(struct kv_json *j);
bool kv_json_next_item(struct kv_json *j);

/** Read a scalar. A wrong type or range sets the sticky error and returns 0 or false. */
uint64_t kv_json_u64(struct kv_json *j, uint64_t max);
int64_t kv_json_i64(struct kv_json *j);
uint64_t kv_json_bits64(struct kv_json *j); /* a hash: 0..2^64-1, or negative as two's complement */
double kv_json_double(struct kv_json *j);
bool kv_json_bool(struct kv_json *j);
bool kv_json_null(struct kv_json *j); /* true: a null was read; false: nothing was read */

/**
 * Read a string. Without escapes the result points to the bytes between the quotes; else to
 * @scratch, whose contents are replaced. The text is valid UTF-8 without NUL. On error the result
 * is empty.
 */
struct kv_str kv_json_str(struct kv_json *j, struct kv_buf *scratch);

/** Copy a string, which must fit with its NUL, to @ret. Else -EMSGSIZE sticks, and @ret is as before. */
void kv_json_copy_str(struct kv_json *j, struct kv_buf *scratch, char *ret, size_t size);
void kv_json_skip(struct kv_json *j); /* one value of any kind */

/**
 * Append a whole array of u32 (token ids) to @ret as raw u32s; @ret's limit bounds it. Returns the
 * number of values. Errors stick: a fraction, a sign, or a value above 2^32-1 with its offset.
 */
size_t kv_json_u32_array(struct kv_json *j, struct kv_buf *ret);
/** Append a whole array of hashes to @ret as raw u64s, read like kv_json_bits64. */
size_t kv_json_bits64_array(struct kv_json *j, struct kv_buf *ret);

/**
 * Read bytes that aren't JSON in the place of a value: after '#', as many as their own format says.
 * _open returns false when another value is there. _take returns the next @n bytes, valid until the
 * next call; NULL and the sticky error at the end of the text. A stream's buffer must hold @n
 * bytes.
 */
bool kv_json_raw_open(struct kv_json *j);
const void *kv_json_raw_take(struct kv_json *j, size_t n);

/** Record an error of the caller's own ("field missing") at the current offset. */
void kv_json_fail(struct kv_json *j, int code, const char *text);
static inline bool kv_json_failed(const struct kv_json *j)
{
    return j->error.code != 0;
}
/**
 * End reading after the top-level value. Returns 0, or the sticky error; text behind the value is
 * one.
 */
int kv_json_finish(struct kv_json *j);
/** The same for text of another program: its errors are -EPROTO, but for -ENOMEM. */
int kv_json_finish_foreign(struct kv_json *j);

/* -- writer ----------------------------------------------------------------------------------- */

/**
 * Write JSON to a kv_buf. The writer adds commas and quotes; the caller is responsible for the
 * structure (asserted in debug builds). Between any two calls the caller may take out->data away
 * and call kv_buf_clear, to write a document of any size in bounded memory. The buffer's error is
 * checked at the end. In strings, U+FFFD replaces each byte that isn't UTF-8. Only characters that
 * must be escaped are, in the short form where one exists: others hash such text and must agree.
 */
struct kv_json_writer {
    struct kv_buf *out;
    uint64_t has_item;
    uint32_t depth;
    bool after_key;
};
void kv_json_writer_init(struct kv_json_writer *w, struct kv_buf *out);
void kv_json_begin_object(struct kv_json_writer *w);
void kv_json_end_object(struct kv_json_writer *w);
void kv_json_begin_array(struct kv_json_writer *w);
void kv_json_end_array(struct kv_json_writer *w);
void kv_json_key(struct kv_json_writer *w, const char *key);
void kv_json_key_u64(struct kv_json_writer *w, uint64_t key);
void kv_json_put_str(struct kv_json_writer *w, const char *text);
void kv_json_put_strn(struct kv_json_writer *w, const char *text, size_t len);
void kv_json_put_u64(struct kv_json_writer *w, uint64_t value);
void kv_json_put_i64(struct kv_json_writer *w, int64_t value);
void kv_json_put_double(struct kv_json_writer *w, double value); /* shortest form; NaN, Inf: null */
void kv_json_put_bool(struct kv_json_writer *w, bool value);
void kv_json_put_null(struct kv_json_writer *w);
/* Write a member of an object: its key and its value. */
void kv_json_member_str(struct kv_json_writer *w, const char *key, const char *value);
void kv_json_member_u64(struct kv_json_writer *w, const char *key, uint64_t value);
void kv_json_member_double(struct kv_json_writer *w, const char *key, double value);
void kv_json_member_bool(struct kv_json_writer *w, const char *key, bool value);
/**
 * Make room for @max bytes of a value's text, for values that are written often. The caller fills
 * it and passes its end to kv_json_raw_end. Returns NULL when the buffer can't grow: don't call
 * kv_json_raw_end then.
 */
char *kv_json_raw_begin(struct kv_json_writer *w, size_t max);
void kv_json_raw_end(struct kv_json_writer *w, const char *end);
void kv_json_put_raw(struct kv_json_writer *w, const char *text, size_t len);

#endif
