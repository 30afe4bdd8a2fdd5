// SPDX-License-Identifier: Apache-2.0
/* Scan JSON strings and numbers, without knowledge of documents or streams. */
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/core/utf8.h"
#include "base/json/json_reader.h"

const char *kv_json_skip_plain_(const char *p, const char *end)
{
#ifdef __SSE2__
    for (; end - p >= 16; p += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)p);
        __m128i special = _mm_cmplt_epi8(v, _mm_set1_epi8(0x20)); /* signed: 0x80 and up too */
        unsigned mask;

        special = _mm_or_si128(special, _mm_cmpeq_epi8(v, _mm_set1_epi8('"')));
        special = _mm_or_si128(special, _mm_cmpeq_epi8(v, _mm_set1_epi8('\\')));
        mask = (unsigned)_mm_movemask_epi8(special);
        if (mask)
            return p + __builtin_ctz(mask);
    }
#endif
    while (p < end && (unsigned char)*p >= 0x20 && (unsigned char)*p < 0x80 && *p != '"' &&
           *p != '\\')
        p++;
    return p;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/*
 * Read the four digits of a \u escape. Returns the unit; -1 when @end cuts it off; -2 without
 * digits.
 */
static int hex_unit(const char *p, const char *end)
{
    int unit = 0;

    for (int i = 0; i < 4; i++) {
        int digit;

        if (p + i >= end)
            return -1;
        digit = hex_digit(p[i]);
        if (digit < 0)
            return -2;
        unit = unit << 4 | digit;
    }
    return unit;
}

int kv_json_escape_(const char *p, const char *end, unsigned *ret)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *name;
    int high, low;

    if (end - p < 2)
        return -1;
    if (p[1] != 'u') {
        name = p[1] ? strchr(names, p[1]) : NULL;
        *ret = name ? (unsigned char)values[name - names] : 0;
        return name ? 2 : 0;
    }
    high = hex_unit(p + 2, end);
    if (high < 0)
        return high == -1 ? -1 : 0;
    *ret = (unsigned)high;
    if (high < 0xD800 || high > 0xDFFF)
        return 6;
    if (high > 0xDBFF)
        return 0;
    if (end - p < 8)
        return (end - p > 6 && p[6] != '\\') ? 0 : -1;
    if (p[6] != '\\' || p[7] != 'u')
        return 0;
    low = hex_unit(p + 8, end);
    if (low == -1)
        return -1;
    if (low < 0xDC00 || low > 0xDFFF)
        return 0;
    *ret = 0x10000 + ((unsigned)(high - 0xD800) << 10) + (unsigned)(low - 0xDC00);
    return 12;
}

size_t kv_json_unescape_(struct kv_str raw, char *out)
{
    const char *p = raw.p, *end = raw.p + raw.len;
    size_t len = 0;

    while (p < end) {
        const char *q = memchr(p, '\\', (size_t)(end - p));
        size_t plain = (size_t)((q ? q : end) - p);
        unsigned code = 0;

        memcpy(out + len, p, plain);
        len += plain;
        p += plain;
        if (p == end)
            break;
        p += kv_json_escape_(p, end, &code);
        if (code == 0)
            return 0;
        len += (size_t)kv_utf8_encode(out + len, code);
    }
    return len;
}

static inline bool is_digit(const char *p, const char *end)
{
    return p < end && *p >= '0' && *p <= '9';
}

/* Pass over digits. *ok is false when there is none. */
static const char *digits(const char *p, const char *end, bool *ok)
{
    *ok = is_digit(p, end);
    while (is_digit(p, end))
        p++;
    return p;
}

const char *kv_json_number_end_(const char *p, const char *end, bool *integer, bool *ok)
{
    *integer = true;
    if (p < end && *p == '-')
        p++;
    if (p < end && *p == '0') {
        *ok = !is_digit(++p, end);
    } else {
        p = digits(p, end, ok);
    }
    if (*ok && p < end && *p == '.') {
        *integer = false;
        p = digits(p + 1, end, ok);
    }
    if (*ok && p < end && (*p == 'e' || *p == 'E')) {
        *integer = false;
        p++;
        if (p < end && (*p == '+' || *p == '-'))
            p++;
        p = digits(p, end, ok);
    }
    return p;
}
