// SPDX-License-Identifier: Apache-2.0
#include "base/buf.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

#define MIN_CAPACITY 256

void kv_buf_fini(struct kv_buf *buf)
{
    free(buf->data);
    buf->data = NULL;
    buf->len = buf->capacity = 0;
    buf->error = 0;
}

void kv_buf_clear(struct kv_buf *buf)
{
    buf->len = 0;
    buf->error = 0;
}

static int grow(struct kv_buf *buf, size_t more)
{
    size_t limit = buf->limit ? buf->limit : SIZE_MAX - 1;
    size_t capacity = buf->capacity;
    char *data;

    if (more > limit || buf->len > limit - more)
        return buf->error = -EMSGSIZE;
    capacity = capacity > limit / 2 ? limit : KV_MAX(2 * capacity, MIN_CAPACITY);
    capacity = KV_MIN(KV_MAX(capacity, buf->len + more), limit);
    data = realloc(buf->data, capacity + 1); /* one for the NUL of kv_buf_cstr */
    if (!data)
        return buf->error = -ENOMEM;
    buf->data = data;
    buf->capacity = capacity;
    return 0;
}

int kv_buf_reserve(struct kv_buf *buf, size_t more)
{
    if (KV_UNLIKELY(buf->error))
        return buf->error;
    if (KV_LIKELY(more <= buf->capacity - buf->len))
        return 0;
    return grow(buf, more);
}

void kv_buf_append(struct kv_buf *buf, const void *data, size_t len)
{
    if (len == 0 || kv_buf_reserve(buf, len) < 0)
        return;
    memcpy(buf->data + buf->len, data, len);
    buf->len += len;
}

void kv_buf_puts(struct kv_buf *buf, const char *text)
{
    kv_buf_append(buf, text, strlen(text));
}

void kv_buf_putc(struct kv_buf *buf, char c)
{
    if (kv_buf_reserve(buf, 1) == 0)
        buf->data[buf->len++] = c;
}

void kv_buf_printf(struct kv_buf *buf, const char *fmt, ...)
{
    va_list args;
    size_t room = buf->capacity - buf->len;
    int n;

    if (buf->error)
        return;
    /* The byte kept for the NUL is what vsnprintf ends with. */
    va_start(args, fmt);
    n = vsnprintf(buf->data ? buf->data + buf->len : NULL, buf->data ? room + 1 : 0, fmt, args);
    va_end(args);
    if (n < 0) {
        buf->error = -EINVAL;
        return;
    }
    if (!buf->data || (size_t)n > room) {
        if (kv_buf_reserve(buf, (size_t)n) < 0)
            return;
        if (!buf->data) /* nothing to print, nothing there */
            return;
        va_start(args, fmt);
        vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, args);
        va_end(args);
    }
    buf->len += (size_t)n;
}

static const char digit_pairs[] =
    "00010203040506070809101112131415161718192021222324252627282930313233"
    "34353637383940414243444546474849505152535455565758596061626364656667"
    "6869707172737475767778798081828384858687888990919293949596979899";

/* Digits of @value, ending before @end; returns the first. Two at a time halve the divisions. */
static char *format_u64(char *end, uint64_t value)
{
    while (value >= 100) {
        end -= 2;
        memcpy(end, &digit_pairs[2 * (value % 100)], 2);
        value /= 100;
    }
    if (value >= 10) {
        end -= 2;
        memcpy(end, &digit_pairs[2 * value], 2);
    } else {
        *--end = (char)('0' + value);
    }
    return end;
}

void kv_buf_put_u64(struct kv_buf *buf, uint64_t value)
{
    char text[20];
    char *first = format_u64(text + sizeof(text), value);

    kv_buf_append(buf, first, (size_t)(text + sizeof(text) - first));
}

void kv_buf_put_i64(struct kv_buf *buf, int64_t value)
{
    char text[21];
    char *first =
        format_u64(text + sizeof(text), value < 0 ? 0 - (uint64_t)value : (uint64_t)value);

    if (value < 0)
        *--first = '-';
    kv_buf_append(buf, first, (size_t)(text + sizeof(text) - first));
}

void kv_buf_put_double(struct kv_buf *buf, double value)
{
    char text[32];
    /* 15 digits survive a round trip for every normal double that has that few; %g drops zeros. */
    int digits = fabs(value) < DBL_MIN ? 1 : DBL_DIG;

    for (; digits <= DBL_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    for (char *p = text; *p; p++)
        *p = *p == ',' ? '.' : *p; /* a host program may have chosen such a locale */
    kv_buf_puts(buf, text);
}

const char *kv_buf_cstr(struct kv_buf *buf)
{
    if (buf->error || !buf->data)
        return "";
    buf->data[buf->len] = '\0';
    return buf->data;
}
