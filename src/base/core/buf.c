// SPDX-License-Identifier: Apache-2.0
#include "base/core/buf.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

#include "base/core/ascii.h"

#define MIN_CAPACITY ((size_t)256)

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

int kv_buf_grow_(struct kv_buf *buf, size_t more)
{
    size_t limit = buf->limit ? buf->limit : SIZE_MAX - 1;
    size_t capacity = buf->capacity;
    char *data;

    if (more > limit || buf->len > limit - more)
        return buf->error = -EMSGSIZE;
    capacity = capacity > limit / 2 ? limit : KV_MAX(2 * capacity, MIN_CAPACITY);
    capacity = KV_MIN(KV_MAX(capacity, buf->len + more), limit);
    data = realloc(buf->data, capacity + 1); /* one byte more, for the NUL of kv_buf_cstr */
    if (!data)
        return buf->error = -ENOMEM;
    buf->data = data;
    buf->capacity = capacity;
    return 0;
}

void kv_buf_puts(struct kv_buf *buf, const char *text)
{
    kv_buf_append(buf, text, strlen(text));
}

void kv_buf_printf(struct kv_buf *buf, const char *fmt, ...)
{
    size_t room = buf->capacity - buf->len;
    locale_t before;
    va_list args;
    int n;

    if (buf->error)
        return;
    before = uselocale(kv_c_locale()); /* the host's may write a comma for the decimal point */
    /* vsnprintf's NUL goes into the byte that every buffer keeps for it. */
    va_start(args, fmt);
    n = vsnprintf(buf->data ? buf->data + buf->len : NULL, buf->data ? room + 1 : 0, fmt, args);
    va_end(args);
    if (n < 0)
        buf->error = -EINVAL;
    else if ((!buf->data || (size_t)n > room) && kv_buf_reserve(buf, (size_t)n) == 0 && buf->data) {
        va_start(args, fmt);
        vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, args);
        va_end(args);
    }
    uselocale(before);
    if (!buf->error && buf->data) /* NULL: an empty text in a buffer without memory */
        buf->len += (size_t)n;
}

static const char digit_pairs[] =
    "00010203040506070809101112131415161718192021222324252627282930313233"
    "34353637383940414243444546474849505152535455565758596061626364656667"
    "6869707172737475767778798081828384858687888990919293949596979899";

static unsigned count_digits(uint64_t value)
{
    static const uint64_t powers[20] = {0,
                                        UINT64_C(10),
                                        UINT64_C(100),
                                        UINT64_C(1000),
                                        UINT64_C(10000),
                                        UINT64_C(100000),
                                        UINT64_C(1000000),
                                        UINT64_C(10000000),
                                        UINT64_C(100000000),
                                        UINT64_C(1000000000),
                                        UINT64_C(10000000000),
                                        UINT64_C(100000000000),
                                        UINT64_C(1000000000000),
                                        UINT64_C(10000000000000),
                                        UINT64_C(100000000000000),
                                        UINT64_C(1000000000000000),
                                        UINT64_C(10000000000000000),
                                        UINT64_C(100000000000000000),
                                        UINT64_C(1000000000000000000),
                                        UINT64_C(10000000000000000000)};
    /* number of bits * log10(2), rounded down: exact, or one too small */
    unsigned n = (64 - (unsigned)__builtin_clzll(value | 1)) * 1233 >> 12;

    return n + (value >= powers[n]);
}

/* Write the @n decimal digits of @value. Two digits a division halve the number of divisions. */
static void write_digits(char *ret, size_t n, uint64_t value)
{
    char *end = ret + n;

    while (value >= 100) {
        end -= 2;
        memcpy(end, &digit_pairs[2 * (value % 100)], 2);
        value /= 100;
    }
    if (value >= 10)
        memcpy(ret, &digit_pairs[2 * value], 2);
    else
        *ret = (char)('0' + value);
}

size_t kv_u64_text(char *ret, uint64_t value)
{
    size_t n = count_digits(value);

    write_digits(ret, n, value);
    return n;
}

void kv_buf_put_u64(struct kv_buf *buf, uint64_t value)
{
    size_t n = count_digits(value);

    if (kv_buf_reserve(buf, n) < 0)
        return;
    write_digits(buf->data + buf->len, n, value);
    buf->len += n;
}

void kv_buf_put_i64(struct kv_buf *buf, int64_t value)
{
    char text[1 + KV_U64_TEXT_MAX] = {'-'};
    bool minus = value < 0;
    size_t n = kv_u64_text(text + minus, minus ? 0 - (uint64_t)value : (uint64_t)value);

    kv_buf_append(buf, text, minus + n);
}

void kv_buf_put_double(struct kv_buf *buf, double value)
{
    /* Gcc 11 warns of a smaller array: it assumes that @digits may be any number */
    char text[48];
    /*
     * Every normal double of at most 15 digits survives a round trip with 15; %g drops trailing
     * zeros.
     */
    int digits = fabs(value) < DBL_MIN ? 1 : DBL_DIG;
    locale_t before = uselocale(kv_c_locale());

    for (; digits <= DBL_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    uselocale(before);
    kv_buf_puts(buf, text);
}

const char *kv_buf_cstr(struct kv_buf *buf)
{
    if (buf->error || !buf->data)
        return "";
    buf->data[buf->len] = '\0';
    return buf->data;
}
