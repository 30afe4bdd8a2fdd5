// SPDX-License-Identifier: Apache-2.0
#include <assert.h>
#include <math.h>

#include "base/json.h"
#include "base/utf8.h"

void kv_json_writer_init(struct kv_json_writer *w, struct kv_buf *out)
{
    *w = (struct kv_json_writer){.out = out};
}

/* What comes before a value. */
static void separate(struct kv_json_writer *w)
{
    if (w->after_key)
        w->after_key = false;
    else if (w->has_item & 1)
        kv_buf_putc(w->out, ',');
    w->has_item |= 1;
}

static void begin(struct kv_json_writer *w, char bracket)
{
    separate(w);
    assert(w->depth < KV_JSON_MAX_DEPTH - 1);
    w->depth++;
    w->has_item <<= 1;
    kv_buf_putc(w->out, bracket);
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

static void put_quoted(struct kv_buf *out, const char *text, size_t len)
{
    const char *stop = text + len, *plain = text;

    kv_buf_putc(out, '"');
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
    kv_buf_putc(out, '"');
}

void kv_json_key(struct kv_json_writer *w, const char *key)
{
    kv_json_put_strn(w, key, strlen(key));
    kv_buf_putc(w->out, ':');
    w->after_key = true;
}

void kv_json_key_u64(struct kv_json_writer *w, uint64_t key)
{
    separate(w);
    kv_buf_putc(w->out, '"');
    kv_buf_put_u64(w->out, key);
    kv_buf_append(w->out, "\":", 2);
    w->after_key = true;
}

void kv_json_put_str(struct kv_json_writer *w, const char *text)
{
    kv_json_put_strn(w, text, strlen(text));
}

void kv_json_put_strn(struct kv_json_writer *w, const char *text, size_t len)
{
    separate(w);
    put_quoted(w->out, text, len);
}

void kv_json_put_u64(struct kv_json_writer *w, uint64_t value)
{
    separate(w);
    kv_buf_put_u64(w->out, value);
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

void kv_json_put_raw(struct kv_json_writer *w, const char *text, size_t len)
{
    separate(w);
    kv_buf_append(w->out, text, len);
}
