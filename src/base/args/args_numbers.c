// SPDX-License-Identifier: Apache-2.0
/* Numbers, sizes and times as options, files and environment variables write them. */
#include <errno.h>
#include <string.h>

#include "base/core/ascii.h"

#include "base/args/args.h"

/*
 * Parse the decimal digits at the start of @text; *rest is the text behind them. Returns
 * -EINVAL without a digit or on overflow.
 */
static int parse_digits(const char *text, uint64_t *ret, const char **rest)
{
    uint64_t value = 0;
    const char *p = text;

    for (; kv_is_digit(*p); p++) {
        unsigned digit = (unsigned)(*p - '0');

        if (value > (UINT64_MAX - digit) / 10)
            return -EINVAL;
        value = value * 10 + digit;
    }
    if (p == text)
        return -EINVAL;
    *ret = value;
    *rest = p;
    return 0;
}

struct unit {
    const char *name;
    uint64_t factor;
};

static int parse_with_unit(const char *text, const struct unit *units, uint64_t *ret)
{
    const char *rest;
    uint64_t value;

    if (parse_digits(text, &value, &rest))
        return -EINVAL;
    for (; units->name; units++) {
        if (strcmp(rest, units->name) != 0)
            continue;
        if (value > UINT64_MAX / units->factor)
            return -EINVAL;
        *ret = value * units->factor;
        return 0;
    }
    return -EINVAL;
}

int kv_parse_u64(const char *text, uint64_t *ret)
{
    static const struct unit none[] = {{"", 1}, {NULL, 0}};

    return parse_with_unit(text, none, ret);
}

int kv_parse_size(const char *text, uint64_t *ret)
{
    static const struct unit sizes[] = {{"", 1},
                                        {"B", 1},
                                        {"K", UINT64_C(1) << 10},
                                        {"M", UINT64_C(1) << 20},
                                        {"G", UINT64_C(1) << 30},
                                        {"T", UINT64_C(1) << 40},
                                        {"KB", 1000},
                                        {"kB", 1000},
                                        {"MB", 1000000},
                                        {"GB", 1000000000},
                                        {"TB", UINT64_C(1000000000000)},
                                        {"KiB", UINT64_C(1) << 10},
                                        {"MiB", UINT64_C(1) << 20},
                                        {"GiB", UINT64_C(1) << 30},
                                        {"TiB", UINT64_C(1) << 40},
                                        {NULL, 0}};

    return parse_with_unit(text, sizes, ret);
}

int kv_parse_time_ms(const char *text, uint64_t *ret)
{
    static const struct unit times[] = {{"ms", 1},       {"s", 1000}, {"m", 60000}, {"h", 3600000},
                                        {"d", 86400000}, {"", 1000},  {NULL, 0}};

    return parse_with_unit(text, times, ret);
}

int kv_parse_nano(const char *text, uint64_t *ret)
{
    uint64_t whole, part = 0, unit = 1000000000;
    const char *p;

    if (parse_digits(text, &whole, &p) || whole > UINT64_MAX / unit - 1)
        return -EINVAL;
    whole *= unit;
    if (*p == '.') {
        for (p++; kv_is_digit(*p) && unit > 1; p++) {
            unit /= 10;
            part += unit * (uint64_t)(*p - '0');
        }
        if (p[-1] == '.')
            return -EINVAL;
    }
    if (*p)
        return -EINVAL;
    *ret = whole + part;
    return 0;
}
