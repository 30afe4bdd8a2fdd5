// SPDX-License-Identifier: Apache-2.0
/** UTF-8 by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef KV_BASE_UTF8_H
#define KV_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/**
 * Return the length of the sequence at @p: 1 to 4; 0: invalid; -1: a valid beginning that @end cuts
 * off. @p < @end.
 */
static inline int kv_utf8_sequence(const char *p, const char *end)
{
    const unsigned char *s = (const unsigned char *)p;
    size_t left = (size_t)(end - p);
    unsigned char low = 0x80, high = 0xBF; /* bounds of the second byte */
    int len;

    if (s[0] < 0x80)
        return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4)
        return 0;
    len = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (s[0] == 0xE0)
        low = 0xA0;
    else if (s[0] == 0xED)
        high = 0x9F;
    else if (s[0] == 0xF0)
        low = 0x90;
    else if (s[0] == 0xF4)
        high = 0x8F;
    if (left < 2)
        return -1;
    if (s[1] < low || s[1] > high)
        return 0;
    for (int i = 2; i < len; i++) {
        if ((size_t)i >= left)
            return -1;
        if (s[i] < 0x80 || s[i] > 0xBF)
            return 0;
    }
    return len;
}

/** Return true when all of @text is valid UTF-8. */
static inline bool kv_utf8_valid(const char *text)
{
    const char *end = text + strlen(text);
    int n = 1;

    for (; text < end && n > 0; text += n)
        n = kv_utf8_sequence(text, end);
    return n > 0;
}

/** Encode @code (a scalar value) into @out, room for 4. Returns the number of bytes. */
static inline int kv_utf8_encode(char *out, unsigned code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}

#endif
