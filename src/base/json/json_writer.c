// SPDX-License-Identifier: Apache-2.0
#include <assert.h>
#include <math.h>

#include "base/core/utf8.h"
#include "base/json/json_reader.h"

void kv_json_writer_init(struct kv_json_writer *w, struct kv_buf *out)
{
    *w = (struct kv_json_writer){.out = out};
}

/*
 * Make room for the @n bytes of a value, behind the comma that separates it from the value before.
 * The caller fills it and passes its end to wrote(). Returns NULL when the buffer can't grow.
 */
static inline char *place(struct kv_json_writer *w, size_t n)
{
    bool comma = !w->after_key && (w->has_item & 1);
    char *p;

    w->after_key = false;
    w->has_item |= 1;
    if (kv_buf_reserve(w->out, comma + n) < 0)
        return NULL;
    p = w->out->data + w->out->len;
    *p = ',';
    return p + comma;
}

static inline void wrote(struct kv_json_writer *w, const char *end)
{
    w->out->len = (size_t)(end - w->out->data);
}

/* Write the comma in front of a value of unknown length. */
static void separate(struct kv_json_writer *w)
{
    char *p = place(w, 1);

    if (p)
        wrote(w, p);
}

static void begin(struct kv_json_writer *w, char bracket)
{
    char *p = place(w, 1);

    assert(w->depth < KV_JSON_MAX_DEPTH - 1);
    w->depth++;
    w->has_item <<= 1;
    if (!p)
        return;
    *p = bracket;
    wrote(w, p + 1);
}

static void end(struct kv_json_writer *w, char bracket)
{
    assert(w->depth > 0 && !w->after_key);
    w->depth--;
    w->has_item >>= 1;
    kv_buf_putc(w->out, bracket);
}

void kv_json_begin_object(struct kv_json_writer *w)
{
    begin(w, '{');
}

void kv_json_end_object(struct kv_json_writer *w)
{
    end(w, '}');
}

void kv_json_begin_array(struct kv_json_writer *w)
{
    begin(w, '[');
}

void kv_json_end_array(struct kv_json_writer *w)
{
    end(w, ']');
}

static void put_escape(struct kv_buf *out, unsigned char c)
{
    static const char hex[] = "0123456789abcdef";
    char text[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};

    switch (c) {
    case '"':
    case '\\':
        text[1] = (char)c;
        break;
    case '\b':
        text[1] = 'b';
        break;
    case '\f':
        text[1] = 'f';
        break;
    case '\n':
        text[1] = 'n';
        break;
    case '\r':
        text[1] = 'r';
        break;
    case '\t':
        text[1] = 't';
        break;
    default:
        kv_buf_append(out, text, 6);
        return;
    }
    kv_buf_append(out, text, 2);
}

static void put_escaped(struct kv_buf *out, const char *text, size_t len)
{
    const char *stop = text + len, *plain = text;

    while (text < stop) {
        unsigned char c = (unsigned char)*text;
        int n = c < 0x80 ? 1 : kv_utf8_sequence(text, stop);

        if (KV_LIKELY(n > 0 && c >= 0x20 && c != '"' && c != '\\')) {
            text += n;
            continue;
        }
        kv_buf_append(out, plain, (size_t)(text - plain));
        if (n <= 0)
            kv_buf_puts(out, "\xEF\xBF\xBD");
        else
            put_escape(out, c);
        plain = ++text;
    }
    kv_buf_append(out, plain, (size_t)(text - plain));
}

/* Write @text in quotes, and @after behind the closing one. */
static void put_quoted(struct kv_json_writer *w, const char *text, size_t len, bool colon)
{
    char *p = place(w, len + 2 + colon);

    if (!p)
        return;
    *p++ = '"';
    if (KV_LIKELY(kv_json_skip_plain_(text, text + len) == text + len)) {
        memcpy(p, text, len);
        p += len;
    } else {
        wrote(w, p);
        put_escaped(w->out, text, len);
        if (kv_buf_reserve(w->out, 1 + colon) < 0)
            return;
        p = w->out->data + w->out->len;
    }
    *p++ = '"';
    if (colon)
        *p++ = ':';
    wrote(w, p);
}

void kv_json_key(struct kv_json_writer *w, const char *key)
{
    put_quoted(w, key, strlen(key), true);
    w->after_key = true;
}

void kv_json_key_u64(struct kv_json_writer *w, uint64_t key)
{
    char *p = place(w, KV_U64_TEXT_MAX + 3);

    if (p) {
        *p++ = '"';
        p += kv_u64_text(p, key);
        *p++ = '"';
        *p++ = ':';
        wrote(w, p);
    }
    w->after_key = true;
}

void kv_json_put_str(struct kv_json_writer *w, const char *text)
{
    kv_json_put_strn(w, text, strlen(text));
}

void kv_json_put_strn(struct kv_json_writer *w, const char *text, size_t len)
{
    put_quoted(w, text, len, false);
}

void kv_json_put_u64(struct kv_json_writer *w, uint64_t value)
{
    char *p = place(w, KV_U64_TEXT_MAX);

    if (p)
        wrote(w, p + kv_u64_text(p, value));
}

void kv_json_put_i64(struct kv_json_writer *w, int64_t value)
{
    separate(w);
    kv_buf_put_i64(w->out, value);
}

void kv_json_put_double(struct kv_json_writer *w, double value)
{
    if (!isfinite(value)) {
        kv_json_put_null(w);
        return;
    }
    separate(w);
    kv_buf_put_double(w->out, value);
}

void kv_json_put_bool(struct kv_json_writer *w, bool value)
{
    separate(w);
    kv_buf_puts(w->out, value ? "true" : "false");
}

void kv_json_put_null(struct kv_json_writer *w)
{
    separate(w);
    kv_buf_puts(w->out, "null");
}

void kv_json_member_str(struct kv_json_writer *w, const char *key, const char *value)
{
    kv_json_key(w, key);
    kv_json_put_str(w, value);
}

void kv_json_member_u64(struct kv_json_writer *w, const char *key, uint64_t value)
{
    kv_json_key(w, key);
    kv_json_put_u64(w, value);
}

void kv_json_member_double(struct kv_json_writer *w, const char *key, double value)
{
    kv_json_key(w, key);
    kv_json_put_double(w, value);
}

void kv_json_member_bool(struct kv_json_writer *w, const char *key, bool value)
{
    kv_json_key(w, key);
    kv_json_put_bool(w, value);
}

void kv_json_put_raw(struct kv_json_writer *w, const char *text, size_t len)
{
    separate(w);
    kv_buf_append(w->out, text, len);
}

char *kv_json_raw_begin(struct kv_json_writer *w, size_t max)
{
    return place(w, max);
}

void kv_json_raw_end(struct kv_json_writer *w, const char *end)
{
    wrote(w, end);
}
