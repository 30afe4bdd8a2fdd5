// SPDX-License-Identifier: Apache-2.0
/**
 * Letters, digits and words of ASCII, whatever locale the host program has chosen: in Turkish ones
 * the functions of <ctype.h> and <strings.h> know no pair of i and I, and printf may write a comma
 * for the decimal point. Bytes above 127 are neither letters nor spaces.
 */
#ifndef KV_BASE_ASCII_H
#define KV_BASE_ASCII_H

#include <locale.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/** Return true for equal texts, and for two that aren't given (NULL). */
static inline bool kv_same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

static inline char kv_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c + ('a' - 'A')) : c;
}

static inline char kv_upper(char c)
{
    return c >= 'a' && c <= 'z' ? (char)(c - ('a' - 'A')) : c;
}

static inline bool kv_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline bool kv_is_xdigit(char c)
{
    return kv_is_digit(c) || (kv_lower(c) >= 'a' && kv_lower(c) <= 'f');
}

static inline bool kv_is_alnum(char c)
{
    return kv_is_digit(c) || (kv_lower(c) >= 'a' && kv_lower(c) <= 'z');
}

static inline bool kv_is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/** Compare the first @n characters without regard to case, as strncasecmp. */
static inline int kv_ncasecmp(const char *a, const char *b, size_t n)
{
    for (; n; n--, a++, b++) {
        unsigned char x = (unsigned char)kv_lower(*a), y = (unsigned char)kv_lower(*b);

        if (x != y || !x)
            return x - y;
    }
    return 0;
}

/** Compare without regard to case, as strcasecmp. */
static inline int kv_casecmp(const char *a, const char *b)
{
    return kv_ncasecmp(a, b, (size_t)-1);
}

/** Return the C locale, for uselocale and strtod_l; (locale_t)0: out of memory. Any thread. */
locale_t kv_c_locale(void);

#endif
