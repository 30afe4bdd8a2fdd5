// SPDX-License-Identifier: Apache-2.0
#include "base/args/instance.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/args/args.h"
#include "base/core/error.h"
#include "base/core/utf8.h"
#include "base/core/xxh.h"

static int refuse(const char **ret_why, const char *why)
{
    if (ret_why)
        *ret_why = why;
    return -EINVAL;
}

static bool is_digits(const char *text, size_t len)
{
    size_t n = 0;

    while (n < len && text[n] >= '0' && text[n] <= '9')
        n++;
    return n == len && n > 0;
}

/* Read digits alone. Returns false for leading zeros and for 2^64 and more. */
static bool read_number(const char *digits, size_t len, uint64_t *ret)
{
    char text[KV_INSTANCE_DIGITS];

    if (len >= sizeof(text) || (len > 1 && digits[0] == '0'))
        return false;
    memcpy(text, digits, len);
    text[len] = '\0';
    return kv_parse_u64(text, ret) == 0;
}

/* Return true for UTF-8 without control characters: U+0000 to U+001F and U+007F to U+009F. */
static bool is_printable(const char *text, size_t len)
{
    const char *end = text + len;

    while (text < end) {
        const unsigned char *s = (const unsigned char *)text;
        int n = kv_utf8_sequence(text, end);

        if (n <= 0 || s[0] < ' ' || s[0] == 0x7F || (s[0] == 0xC2 && s[1] < 0xA0))
            return false;
        text += n;
    }
    return true;
}

int kv_instance_parse(const char *text, size_t len, uint64_t *ret_number, const char **ret_why)
{
    uint64_t number;

    if (is_digits(text, len)) {
        if (!read_number(text, len, &number))
            return refuse(ret_why, "digits alone are a number from 0 to 18446744073709551615, "
                                   "without leading zeros");
        *ret_number = number;
        return KV_INSTANCE_NUMBER;
    }
    if (len == 0 || len > KV_INSTANCE_NAME_MAX)
        return refuse(ret_why, "a name has 1 to 253 bytes");
    if (!is_printable(text, len))
        return refuse(ret_why, "a name is UTF-8 without control characters");
    *ret_number = kv_xxh64(text, len, 0) | KV_INSTANCE_NAMED;
    return KV_INSTANCE_NAME;
}

bool kv_instance_is(uint64_t number, const char *text, size_t len)
{
    uint64_t own;

    return kv_instance_parse(text, len, &own, NULL) == KV_INSTANCE_NAME && own == number;
}

const char *kv_instance_text(uint64_t number, const char *name, char digits[KV_INSTANCE_DIGITS])
{
    if (name)
        return name;
    snprintf(digits, KV_INSTANCE_DIGITS, "%" PRIu64, number);
    return digits;
}
