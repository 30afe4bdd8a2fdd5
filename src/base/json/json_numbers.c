// SPDX-License-Identifier: Apache-2.0
/* The numbers of the JSON reader. */
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/json/json_reader.h"

/* Check the number at j->p and go behind it. */
bool kv_json_number_(struct kv_json *j, struct kv_str *ret, bool *integer, uint64_t *ret_at)
{
    size_t len;
    bool ok;

    do { /* `more` moves the text, even at the end of the stream */
        len = (size_t)(kv_json_number_end_(j->p, j->end, integer, &ok) - j->p);
    } while (len == (size_t)(j->end - j->p) && kv_json_more_(j));
    *ret = (struct kv_str){j->p, len};
    *ret_at = kv_json_offset_(j);
    j->p += len;
    if (!ok)
        kv_json_malformed_(j, "malformed number");
    return !j->error.code;
}

bool kv_json_integer_(struct kv_json *j, bool *ret_negative, uint64_t *ret_magnitude,
                      uint64_t *ret_at)
{
    struct kv_str text;
    uint64_t value = 0;
    bool integer;

    if (!kv_json_number_(j, &text, &integer, ret_at))
        return false;
    if (!integer) {
        kv_json_fail_at_(j, *ret_at, -EINVAL, "expected an integer");
        return false;
    }
    *ret_negative = text.p[0] == '-';
    for (size_t i = *ret_negative; i < text.len; i++) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(text.p[i] - '0'), &value))
            goto range;
    }
    if (*ret_negative && value > UINT64_C(1) << 63)
        goto range;
    *ret_magnitude = value;
    return true;
range:
    kv_json_fail_at_(j, *ret_at, -ERANGE, "number out of range");
    return false;
}

/* Read an integer as two's complement. Returns false with the error set. */
static bool integer_value(struct kv_json *j, bool *ret_negative, uint64_t *ret, uint64_t *ret_at)
{
    int c = kv_json_begin_value_(j);

    if (c != '-' && (c < '0' || c > '9')) {
        kv_json_unexpected_(j, "expected an integer");
        return false;
    }
    if (!kv_json_integer_(j, ret_negative, ret, ret_at))
        return false;
    if (*ret_negative)
        *ret = 0 - *ret;
    return true;
}

uint64_t kv_json_u64(struct kv_json *j, uint64_t max)
{
    uint64_t value, at;
    bool negative;

    if (!integer_value(j, &negative, &value, &at))
        return 0;
    if (negative || value > max) {
        kv_json_fail_at_(j, at, -ERANGE, "number out of range");
        return 0;
    }
    return value;
}

int64_t kv_json_i64(struct kv_json *j)
{
    uint64_t value, at;
    bool negative;

    if (!integer_value(j, &negative, &value, &at))
        return 0;
    if (!negative && value > INT64_MAX) {
        kv_json_fail_at_(j, at, -ERANGE, "number out of range");
        return 0;
    }
    return (int64_t)value;
}

uint64_t kv_json_bits64(struct kv_json *j)
{
    uint64_t value, at;
    bool negative;

    return integer_value(j, &negative, &value, &at) ? value : 0;
}

double kv_json_double(struct kv_json *j)
{
    char copy[KV_JSON_MAX_DOUBLE + 1];
    struct kv_str text;
    bool integer;
    double value;
    uint64_t at;
    locale_t c_locale = kv_c_locale();
    int c = kv_json_begin_value_(j);

    if (c != '-' && (c < '0' || c > '9')) {
        kv_json_unexpected_(j, "expected a number");
        return 0;
    }
    if (!kv_json_number_(j, &text, &integer, &at))
        return 0;
    if (text.len > KV_JSON_MAX_DOUBLE) {
        kv_json_fail_at_(j, at, -ERANGE, "number has too many digits");
        return 0;
    }
    memcpy(copy, text.p, text.len);
    copy[text.len] = '\0';
    /* some locales have a comma for the decimal point */
    value = c_locale ? strtod_l(copy, NULL, c_locale) : strtod(copy, NULL);
    if (isinf(value)) {
        kv_json_fail_at_(j, at, -ERANGE, "number out of range");
        return 0;
    }
    return value;
}
