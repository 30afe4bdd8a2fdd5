// SPDX-License-Identifier: Apache-2.0
#include "base/json/json.h"

#include <assert.h>

#include "base/core/utf8.h"
#include "base/json/json_reader.h"

void kv_json_init(struct kv_json *j, const void *text, size_t len)
{
    memset(j, 0, offsetof(struct kv_json, key));
    j->p = j->start = text;
    j->end = j->p + len;
}

void kv_json_init_stream(struct kv_json *j, char *buf, size_t buf_size, kv_json_refill_fn refill,
                         void *arg)
{
    kv_json_init(j, buf, 0);
    j->buf = buf;
    j->buf_size = buf_size;
    j->refill = refill;
    j->refill_arg = arg;
}

/* -- errors ------------------------------------------------------------------------------------ */

void kv_json_fail_at_(struct kv_json *j, uint64_t at, int code, const char *text)
{
    if (j->error.code == 0)
        kv_fail(&j->error, code, (size_t)at, "%s", text);
}

void kv_json_fail(struct kv_json *j, int code, const char *text)
{
    kv_json_fail_at_(j, kv_json_offset_(j), code, text);
}

/* Record malformed text at j->p, or text that is cut off there. */
void kv_json_malformed_(struct kv_json *j, const char *text)
{
    kv_json_fail(j, -EBADMSG, j->p < j->end ? text : "unexpected end of the text");
}

/* -- input ------------------------------------------------------------------------------------- */

/*
 * Append the stream's next bytes to the unread text, which moves to the start of the buffer:
 * pointers into it are invalid afterwards. Returns false at the end of the text, or when unread
 * text fills the buffer.
 */
bool kv_json_more_(struct kv_json *j)
{
    size_t left = (size_t)(j->end - j->p);
    long n;

    if (!j->refill || j->error.code)
        return false;
    if (left == j->buf_size) {
        kv_json_fail(j, -EMSGSIZE, "a string or number is longer than the buffer");
        return false;
    }
    j->consumed += (uint64_t)(j->p - j->buf);
    memmove(j->buf, j->p, left);
    j->p = j->start = j->buf;
    j->end = j->buf + left;
    n = j->refill(j->refill_arg, j->buf + left, j->buf_size - left);
    if (n <= 0) {
        j->refill = NULL;
        if (n < 0)
            kv_json_fail(j, (int)n, "reading the input failed");
        return false;
    }
    j->end += n;
    return true;
}

/* Return the byte at j->p, or -1 at the end. */
static inline int current(struct kv_json *j)
{
    return KV_LIKELY(j->p < j->end) || kv_json_more_(j) ? (unsigned char)*j->p : -1;
}

static inline int skip_space(struct kv_json *j)
{
    for (;;) {
        int c = current(j);

        if (c != ' ' && c != '\n' && c != '\r' && c != '\t')
            return c;
        j->p++;
    }
}

/* Go to the next value. Returns its first byte, or -1 with an error. */
int kv_json_begin_value_(struct kv_json *j)
{
    int c;

    if (KV_UNLIKELY(j->error.code))
        return -1;
    c = skip_space(j);
    if (j->colon_due) {
        if (c != ':') {
            kv_json_malformed_(j, "expected ':'");
            return -1;
        }
        j->colon_due = false;
        j->p++;
        c = skip_space(j);
    }
    if (c < 0)
        kv_json_malformed_(j, NULL);
    return c;
}

enum kv_json_type kv_json_peek(struct kv_json *j)
{
    if (j->error.code || (skip_space(j) < 0 && !j->colon_due))
        return KV_JSON_NONE;
    switch (kv_json_begin_value_(j)) {
    case '{':
        return KV_JSON_OBJECT;
    case '[':
        return KV_JSON_ARRAY;
    case '"':
        return KV_JSON_STRING;
    case 't':
    case 'f':
        return KV_JSON_BOOL;
    case 'n':
        return KV_JSON_NULL;
    case '-':
    case '0' ... '9':
        return KV_JSON_NUMBER;
    default:
        return KV_JSON_NONE;
    }
}

static void skip_scalar(struct kv_json *j);

/*
 * Record that the value at j->p has another type than @text names. Reads a scalar to its end first:
 * `nul` is malformed, not of another type. A container is judged by its bracket.
 */
void kv_json_unexpected_(struct kv_json *j, const char *text)
{
    uint64_t at = kv_json_offset_(j);
    int c = current(j);

    if (c != '{' && c != '[')
        skip_scalar(j); /* its error, if any, is the first and stays */
    kv_json_fail_at_(j, at, -EINVAL, text);
}

/* -- containers -------------------------------------------------------------------------------- */

static bool open_container(struct kv_json *j, char bracket, const char *text)
{
    int c = kv_json_begin_value_(j);

    if (c != bracket) {
        kv_json_unexpected_(j, text);
        return false;
    }
    if (j->depth == KV_JSON_MAX_DEPTH) {
        kv_json_fail(j, -E2BIG, "nested too deeply");
        return false;
    }
    j->is_object = j->is_object << 1 | (bracket == '{');
    j->has_item <<= 1;
    j->depth++;
    j->p++;
    return true;
}

/* Go to the next item of the innermost container. Returns false when the container has ended. */
static bool next(struct kv_json *j, char bracket)
{
    int c;

    if (KV_UNLIKELY(j->error.code))
        return false;
    assert(j->depth > 0 && (j->is_object & 1) == (bracket == '}'));
    c = skip_space(j);
    if (j->colon_due) {
        kv_json_malformed_(j, "expected ':'");
        return false;
    }
    if (c == bracket) {
        j->p++;
        j->depth--;
        j->is_object >>= 1;
        j->has_item >>= 1;
        return false;
    }
    if (j->has_item & 1) {
        if (c != ',') {
            kv_json_malformed_(j, bracket == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
            return false;
        }
        j->p++;
        c = skip_space(j);
    }
    j->has_item |= 1;
    if (c < 0)
        kv_json_malformed_(j, NULL);
    return c >= 0;
}

bool kv_json_object(struct kv_json *j)
{
    return open_container(j, '{', "expected an object");
}

bool kv_json_array(struct kv_json *j)
{
    return open_container(j, '[', "expected an array");
}

bool kv_json_next_item(struct kv_json *j)
{
    return next(j, ']');
}

/* -- strings ----------------------------------------------------------------------------------- */

/*
 * Check the string at j->p (its opening quote) and go behind it. With @ret, keep its bytes together
 * in the buffer and hand them out. Without, pass over a string of any length in a small buffer.
 */
static bool string(struct kv_json *j, struct kv_str *ret, bool *ret_escapes)
{
    size_t at = 1; /* offset from j->p */
    unsigned code;
    int n;

    if (ret)
        *ret_escapes = false;
    for (;;) {
        const char *q = kv_json_skip_plain_(j->p + at, j->end);

        at = (size_t)(q - j->p);
        n = -1;
        if (q < j->end && *q == '"')
            break;
        if (q < j->end && *q == '\\') {
            n = kv_json_escape_(q, j->end, &code);
            if (ret)
                *ret_escapes = true;
        } else if (q < j->end) {
            n = (unsigned char)*q < 0x20 ? 0 : kv_utf8_sequence(q, j->end);
        }
        if (n > 0) {
            at += (size_t)n;
            continue;
        }
        if (n == 0 || !ret) {
            j->p = q;
            at = 0;
        }
        if (n == 0) {
            kv_json_malformed_(j, *q == '\\'                 ? "bad escape in a string"
                                  : (unsigned char)*q < 0x20 ? "control character in a string"
                                                             : "invalid UTF-8");
            return false;
        }
        if (!kv_json_more_(j)) {
            j->p = j->end;
            kv_json_malformed_(j, NULL);
            return false;
        }
    }
    if (ret)
        *ret = (struct kv_str){j->p + 1, at - 1};
    j->p += at + 1;
    return true;
}

bool kv_json_next_key(struct kv_json *j, struct kv_str *key)
{
    bool escapes = false;
    uint64_t at;

    if (!next(j, '}'))
        return false;
    at = kv_json_offset_(j);
    if (*j->p != '"') {
        kv_json_malformed_(j, "expected a key");
        return false;
    }
    if (!string(j, key, &escapes))
        return false;
    j->colon_due = true;
    if (KV_LIKELY(!escapes))
        return true;
    if (key->len > sizeof(j->key)) {
        kv_json_fail_at_(j, at, -EMSGSIZE, "a key with escapes is too long");
        return false;
    }
    key->len = kv_json_unescape_(*key, j->key);
    key->p = j->key;
    if (key->len == 0)
        kv_json_fail_at_(j, at, -EINVAL, "NUL in a key");
    return key->len > 0;
}

struct kv_str kv_json_str(struct kv_json *j, struct kv_buf *scratch)
{
    const struct kv_str none = {"", 0};
    struct kv_str raw;
    bool escapes;
    uint64_t at;

    if (kv_json_begin_value_(j) != '"') {
        kv_json_unexpected_(j, "expected a string");
        return none;
    }
    at = kv_json_offset_(j);
    if (!string(j, &raw, &escapes))
        return none;
    if (KV_LIKELY(!escapes))
        return raw;
    kv_buf_clear(scratch);
    if (kv_buf_reserve(scratch, raw.len) < 0) {
        kv_json_fail_at_(j, at, scratch->error, "a string is too long");
        return none;
    }
    scratch->len = kv_json_unescape_(raw, scratch->data);
    if (scratch->len == 0) {
        kv_json_fail_at_(j, at, -EINVAL, "NUL in a string");
        return none;
    }
    return (struct kv_str){scratch->data, scratch->len};
}

void kv_json_copy_str(struct kv_json *j, struct kv_buf *scratch, char *ret, size_t size)
{
    struct kv_str text = kv_json_str(j, scratch);

    if (text.len >= size) {
        kv_json_fail(j, -EMSGSIZE, "a string is too long");
        return;
    }
    memcpy(ret, text.p, text.len);
    ret[text.len] = '\0';
}

/* -- the rest ---------------------------------------------------------------------------------- */

static bool literal(struct kv_json *j, const char *text)
{
    for (; *text; text++, j->p++) {
        if (current(j) != (unsigned char)*text) {
            kv_json_malformed_(j, "expected a value");
            return false;
        }
    }
    return true;
}

bool kv_json_bool(struct kv_json *j)
{
    int c = kv_json_begin_value_(j);

    if (c == 't')
        return literal(j, "true");
    if (c == 'f')
        literal(j, "false");
    else
        kv_json_unexpected_(j, "expected true or false");
    return false;
}

bool kv_json_null(struct kv_json *j)
{
    return kv_json_begin_value_(j) == 'n' && literal(j, "null");
}

static void skip_scalar(struct kv_json *j)
{
    struct kv_str text;
    bool integer;
    uint64_t at;
    int c = kv_json_begin_value_(j);

    switch (c) {
    case '"':
        string(j, NULL, NULL);
        break;
    case 't':
    case 'f':
        literal(j, c == 't' ? "true" : "false");
        break;
    case 'n':
        literal(j, "null");
        break;
    case '-':
    case '0' ... '9':
        kv_json_number_(j, &text, &integer, &at);
        break;
    default:
        kv_json_malformed_(j, "expected a value");
    }
}

/*
 * Go to the next value of a container, over the key in an object. Returns false when the container
 * has ended.
 */
static bool skip_to_item(struct kv_json *j)
{
    if (!(j->is_object & 1))
        return next(j, ']');
    if (!next(j, '}'))
        return false;
    if (*j->p != '"') {
        kv_json_malformed_(j, "expected a key");
        return false;
    }
    j->colon_due = string(j, NULL, NULL);
    return j->colon_due;
}

void kv_json_skip(struct kv_json *j)
{
    uint32_t outside = j->depth;
    bool item = true; /* the container's next item may be a value */

    do {
        int c = item ? kv_json_begin_value_(j) : 0;

        if (c == '{')
            open_container(j, '{', NULL);
        else if (c == '[')
            open_container(j, '[', NULL);
        else if (item)
            skip_scalar(j);
        item = j->depth > outside && skip_to_item(j);
    } while (!j->error.code && j->depth > outside);
}

/* -- bytes that aren't JSON -------------------------------------------------------------------- */

bool kv_json_raw_open(struct kv_json *j)
{
    int c = kv_json_begin_value_(j);

    if (c != '#') {
        if (c >= 0)
            kv_json_unexpected_(j, "expected '#'");
        return false;
    }
    j->p++;
    return true;
}

const void *kv_json_raw_take(struct kv_json *j, size_t n)
{
    const char *bytes;

    while (KV_UNLIKELY((size_t)(j->end - j->p) < n)) {
        if (!kv_json_more_(j)) {
            kv_json_fail(j, -EBADMSG, "unexpected end of the text");
            return NULL;
        }
    }
    if (KV_UNLIKELY(j->error.code))
        return NULL;
    bytes = j->p;
    j->p += n;
    return bytes;
}

int kv_json_finish(struct kv_json *j)
{
    if (!j->error.code && (j->depth > 0 || j->colon_due))
        kv_json_fail(j, -EBADMSG, "the value was not read to its end");
    if (!j->error.code && skip_space(j) >= 0)
        kv_json_fail(j, -EBADMSG, "text after the value");
    return j->error.code;
}

int kv_json_finish_foreign(struct kv_json *j)
{
    int rc = kv_json_finish(j);

    return rc == 0 || rc == -ENOMEM ? rc : -EPROTO;
}
