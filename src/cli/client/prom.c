// SPDX-License-Identifier: Apache-2.0
#include "cli/client/prom.h"

#include <stdlib.h>
#include <string.h>

void kc_prom_init(struct kc_prom *prom, const char *text, size_t len)
{
    prom->p = text;
    prom->end = text ? text + len : text;
}

/* Find the end of the label set: the brace outside of quotes, or NULL. */
static const char *labels_end(const char *p, const char *end)
{
    bool quoted = false;

    for (; p < end; p++) {
        if (quoted && *p == '\\' && p + 1 < end)
            p++;
        else if (*p == '"')
            quoted = !quoted;
        else if (*p == '}' && !quoted)
            return p;
    }
    return NULL;
}

static bool parse_sample(const char *p, const char *end, struct kc_sample *ret)
{
    const char *name = p, *close;
    char number[64], *stop;
    size_t len;

    while (p < end && *p != '{' && *p != ' ')
        p++;
    if (p == name || p == end)
        return false;
    ret->name = (struct kv_str){name, (size_t)(p - name)};
    ret->labels = (struct kv_str){p, 0};
    if (*p == '{') {
        close = labels_end(p + 1, end);
        if (!close)
            return false;
        ret->labels = (struct kv_str){p + 1, (size_t)(close - p - 1)};
        p = close + 1;
    }
    while (p < end && *p == ' ')
        p++;
    len = (size_t)(end - p);
    if (len == 0 || len >= sizeof(number))
        return false;
    memcpy(number, p, len);
    number[len] = '\0';
    ret->value = strtod(number, &stop);
    return stop != number;
}

bool kc_prom_next(struct kc_prom *prom, struct kc_sample *ret)
{
    while (prom->p < prom->end) {
        const char *line = prom->p;
        const char *newline = memchr(line, '\n', (size_t)(prom->end - line));
        const char *end = newline ? newline : prom->end;

        prom->p = newline ? newline + 1 : prom->end;
        if (line < end && *line != '#' && parse_sample(line, end, ret))
            return true;
    }
    return false;
}

/* Copy a quoted value that starts after its quote. Returns the place behind the closing quote. */
static const char *copy_value(const char *p, const char *end, char *ret, size_t size)
{
    size_t n = 0;

    for (; p < end && *p != '"'; p++) {
        char c = *p;

        if (c == '\\' && p + 1 < end) {
            p++;
            c = *p;
            if (c == 'n')
                c = '\n';
        }
        if (ret && n + 1 < size)
            ret[n++] = c;
    }
    if (ret && size > 0)
        ret[n] = '\0';
    return p < end ? p + 1 : end;
}

bool kc_sample_label(const struct kc_sample *sample, const char *name, char *ret, size_t size)
{
    const char *p = sample->labels.p, *end = p + sample->labels.len;
    size_t len = strlen(name);

    while (p < end) {
        const char *equals = memchr(p, '=', (size_t)(end - p));
        bool found;

        if (!equals || equals + 1 >= end || equals[1] != '"')
            return false;
        found = (size_t)(equals - p) == len && memcmp(p, name, len) == 0;
        p = copy_value(equals + 2, end, found ? ret : NULL, size);
        if (found)
            return true;
        while (p < end && (*p == ',' || *p == ' '))
            p++;
    }
    return false;
}
