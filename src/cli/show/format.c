// SPDX-License-Identifier: Apache-2.0
#include "cli/show/format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct kc_text kc_count(uint64_t n)
{
    char digits[24];
    struct kc_text text = {""};
    size_t len, out = 0;

    snprintf(digits, sizeof(digits), "%" PRIu64, n);
    len = strlen(digits);
    for (size_t i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0)
            text.s[out++] = ',';
        text.s[out++] = digits[i];
    }
    return text;
}

struct kc_text kc_bytes(double n)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    struct kc_text text;
    unsigned unit = 0;

    while (n >= 1024 && unit < 4) {
        n /= 1024;
        unit++;
    }
    snprintf(text.s, sizeof(text.s), unit == 0 ? "%.0f %s" : "%.1f %s", n, units[unit]);
    return text;
}

struct kc_text kc_duration(uint64_t ns)
{
    struct kc_text text;

    if (ns < 1000000)
        snprintf(text.s, sizeof(text.s), "%.0f us", (double)ns / 1e3);
    else if (ns < 1000000000)
        snprintf(text.s, sizeof(text.s), "%.*f ms", ns < 10000000 ? 2 : 1, (double)ns / 1e6);
    else
        snprintf(text.s, sizeof(text.s), "%.1f s", (double)ns / 1e9);
    return text;
}

struct kc_text kc_span(double seconds)
{
    struct kc_text text;

    if (seconds < 10)
        snprintf(text.s, sizeof(text.s), "%.1f s", seconds);
    else if (seconds < 120)
        snprintf(text.s, sizeof(text.s), "%.0f s", seconds);
    else if (seconds < 7200)
        snprintf(text.s, sizeof(text.s), "%.0f min", seconds / 60);
    else
        snprintf(text.s, sizeof(text.s), "%.1f h", seconds / 3600);
    return text;
}

struct kc_text kc_scaled(double n)
{
    struct kc_text text;

    if (n < 1e4)
        snprintf(text.s, sizeof(text.s), "%.0f", n);
    else if (n < 1e6)
        snprintf(text.s, sizeof(text.s), "%.1f k", n / 1e3);
    else if (n < 1e9)
        snprintf(text.s, sizeof(text.s), "%.1f M", n / 1e6);
    else
        snprintf(text.s, sizeof(text.s), "%.2f G", n / 1e9);
    return text;
}
