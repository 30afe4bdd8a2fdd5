// SPDX-License-Identifier: Apache-2.0
/**
 * Model of the JSON reader for the tests and the fuzzer: a checker written straight from RFC 8259,
 * and walks that turn a document into one canonical text, from one buffer or from a stream.
 */
#ifndef KV_TESTS_BASE_JSON_MODEL_H
#define KV_TESTS_BASE_JSON_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/json/json.h"

/* -- the checker ------------------------------------------------------------------------------- */

struct model {
    const unsigned char *p, *end;
};

static inline int model_peek(const struct model *m)
{
    return m->p < m->end ? *m->p : -1;
}

static inline void model_space(struct model *m)
{
    while (m->p < m->end && (*m->p == ' ' || *m->p == '\t' || *m->p == '\n' || *m->p == '\r'))
        m->p++;
}

static inline bool model_word(struct model *m, const char *word)
{
    size_t len = strlen(word);

    if ((size_t)(m->end - m->p) < len || memcmp(m->p, word, len) != 0)
        return false;
    m->p += len;
    return true;
}

static inline bool model_digits(struct model *m)
{
    const unsigned char *first = m->p;

    while (model_peek(m) >= '0' && model_peek(m) <= '9')
        m->p++;
    return m->p > first;
}

static inline bool model_number(struct model *m)
{
    if (model_peek(m) == '-')
        m->p++;
    if (model_peek(m) == '0')
        m->p++;
    else if (!model_digits(m))
        return false;
    if (model_peek(m) == '.' && (m->p++, !model_digits(m)))
        return false;
    if (model_peek(m) == 'e' || model_peek(m) == 'E') {
        m->p++;
        if (model_peek(m) == '+' || model_peek(m) == '-')
            m->p++;
        return model_digits(m);
    }
    return true;
}

static inline long model_hex4(struct model *m)
{
    long value = 0;

    for (int i = 0; i < 4; i++, m->p++) {
        int c = model_peek(m);
        const char *digit = c > 0 ? strchr("0123456789abcdefABCDEF", c) : NULL;
        long n = digit ? digit - "0123456789abcdefABCDEF" : -1;

        if (!digit)
            return -1;
        value = value * 16 + (*(digit) >= 'A' && *digit <= 'F' ? n - 6 : n);
    }
    return value;
}

static inline bool model_escape(struct model *m)
{
    int c = model_peek(m);
    long unit;

    if (c <= 0 || !strchr("\"\\/bfnrtu", c))
        return false;
    m->p++;
    if (c != 'u')
        return true;
    unit = model_hex4(m);
    if (unit < 0 || (unit >= 0xDC00 && unit <= 0xDFFF))
        return false;
    if (unit < 0xD800 || unit > 0xDBFF)
        return true;
    if (!model_word(m, "\\u"))
        return false;
    unit = model_hex4(m);
    return unit >= 0xDC00 && unit <= 0xDFFF;
}

/* Decodes first and judges the code point afterwards: another way than the reader's. */
static inline bool model_utf8(struct model *m)
{
    unsigned first = *m->p++;
    unsigned n = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    static const unsigned least[] = {0, 0x80, 0x800, 0x10000};
    unsigned code = first & (0x3FU >> n);

    if (first < 0xC0 || first >= 0xF8)
        return false;
    for (unsigned i = 0; i < n; i++) {
        int c = model_peek(m);

        if (c < 0x80 || c > 0xBF)
            return false;
        code = code << 6 | ((unsigned)c & 0x3F);
        m->p++;
    }
    return code >= least[n] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
}

static inline bool model_string(struct model *m)
{
    if (model_peek(m) != '"')
        return false;
    m->p++;
    for (;;) {
        int c = model_peek(m);

        if (c < 0x20)
            return false;
        if (c >= 0x80) {
            if (!model_utf8(m))
                return false;
            continue;
        }
        m->p++;
        if (c == '"')
            return true;
        if (c == '\\' && !model_escape(m))
            return false;
    }
}

static inline bool model_value(struct model *m, unsigned depth);

static inline bool model_container(struct model *m, unsigned depth, bool object)
{
    int close = object ? '}' : ']';

    if (depth == KV_JSON_MAX_DEPTH)
        return false;
    m->p++;
    model_space(m);
    if (model_peek(m) == close) {
        m->p++;
        return true;
    }
    for (;;) {
        model_space(m);
        if (object) {
            if (!model_string(m))
                return false;
            model_space(m);
            if (!model_word(m, ":"))
                return false;
        }
        if (!model_value(m, depth + 1))
            return false;
        model_space(m);
        if (model_peek(m) == close) {
            m->p++;
            return true;
        }
        if (!model_word(m, ","))
            return false;
    }
}

static inline bool model_value(struct model *m, unsigned depth)
{
    model_space(m);
    switch (model_peek(m)) {
    case '{':
        return model_container(m, depth, true);
    case '[':
        return model_container(m, depth, false);
    case '"':
        return model_string(m);
    case 't':
        return model_word(m, "true");
    case 'f':
        return model_word(m, "false");
    case 'n':
        return model_word(m, "null");
    default:
        return model_number(m);
    }
}

/** Whether the text is exactly one JSON value, nested at most KV_JSON_MAX_DEPTH deep. */
static inline bool model_accepts(const void *text, size_t len)
{
    struct model m = {text, (const unsigned char *)text + len};

    if (!model_value(&m, 0))
        return false;
    model_space(&m);
    return m.p == m.end;
}

/* -- walks ------------------------------------------------------------------------------------- */

/** How a walk reads what it meets. */
enum walk {
    WALK_SKIP,    /* skip the whole value */
    WALK_ALL,     /* everything; numbers as doubles */
    WALK_BITS,    /* everything; numbers as bits64 */
    WALK_ITEMS,   /* arrays that start with a number: item by item with kv_json_u64 */
    WALK_U32S,    /* the same with kv_json_u32_array */
    WALK_HASHES,  /* ... item by item with kv_json_bits64 */
    WALK_BITS64S, /* ... with kv_json_bits64_array */
    N_WALKS
};

static inline void walk_text(struct kv_str s, struct kv_buf *out)
{
    kv_buf_printf(out, "%zu<", s.len);
    kv_buf_append(out, s.p, s.len);
    kv_buf_putc(out, '>');
}

static inline void walk_array(struct kv_json *j, enum walk walk, struct kv_buf *out)
{
    struct kv_buf values = KV_BUF_INIT;
    bool u32 = walk == WALK_ITEMS || walk == WALK_U32S;
    size_t n = 0;

    if (walk == WALK_U32S) {
        n = kv_json_u32_array(j, &values);
    } else if (walk == WALK_BITS64S) {
        n = kv_json_bits64_array(j, &values);
    } else {
        kv_json_array(j);
        while (kv_json_next_item(j)) {
            uint64_t wide = u32 ? kv_json_u64(j, UINT32_MAX) : kv_json_bits64(j);
            uint32_t narrow = (uint32_t)wide;

            if (kv_json_failed(j))
                break;
            kv_buf_append(&values, u32 ? (void *)&narrow : (void *)&wide, u32 ? 4 : 8);
            n++;
        }
    }
    kv_buf_printf(out, "[%zu:", n);
    kv_buf_append(out, values.data, values.len);
    kv_buf_fini(&values);
}

static inline void walk_value(struct kv_json *j, enum walk walk, struct kv_buf *scratch,
                              struct kv_buf *out)
{
    enum kv_json_type type = kv_json_peek(j);
    struct kv_str key;

    kv_buf_printf(out, "%d", (int)type);
    switch (type) {
    case KV_JSON_OBJECT:
        kv_json_object(j);
        while (kv_json_next_key(j, &key)) {
            walk_text(key, out);
            walk_value(j, walk, scratch, out);
        }
        break;
    case KV_JSON_ARRAY:
        if (walk >= WALK_ITEMS) {
            walk_array(j, walk, out);
            break;
        }
        kv_json_array(j);
        while (kv_json_next_item(j))
            walk_value(j, walk, scratch, out);
        break;
    case KV_JSON_STRING:
        walk_text(kv_json_str(j, scratch), out);
        break;
    case KV_JSON_NUMBER:
        if (walk == WALK_ALL)
            kv_buf_printf(out, "%.17g", kv_json_double(j));
        else
            kv_buf_put_u64(out, kv_json_bits64(j));
        break;
    case KV_JSON_BOOL:
        kv_buf_puts(out, kv_json_bool(j) ? "T" : "F");
        break;
    case KV_JSON_NULL:
        kv_buf_puts(out, kv_json_null(j) ? "N" : "?");
        break;
    default:
        kv_json_skip(j); /* says what is wrong */
    }
}

/** Walk the document and close with its error, offset and text. */
static inline void walk_document(struct kv_json *j, enum walk walk, struct kv_buf *out)
{
    struct kv_buf scratch = KV_BUF_INIT;

    if (walk == WALK_SKIP)
        kv_json_skip(j);
    else
        walk_value(j, walk, &scratch, out);
    kv_json_finish(j);
    kv_buf_printf(out, "|%d@%zu %s", j->error.code, j->error.offset, j->error.text);
    kv_buf_fini(&scratch);
}

/** A stream over a text, in pieces of @piece bytes (0: sizes that vary). */
struct pieces {
    const char *p;
    size_t left, piece;
    uint32_t random;
};

static inline long next_piece(void *arg, char *data, size_t size)
{
    struct pieces *pieces = arg;
    size_t n = pieces->piece;

    if (n == 0) {
        pieces->random = pieces->random * 1664525 + 1013904223;
        n = 1 + (pieces->random >> 24) % 40;
    }
    n = KV_MIN(KV_MIN(n, size), pieces->left);
    if (n > 0)
        memcpy(data, pieces->p, n);
    pieces->p += n;
    pieces->left -= n;
    return (long)n;
}

#endif
