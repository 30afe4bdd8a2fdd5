// SPDX-License-Identifier: Apache-2.0
#include "cli/client/token.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Find the token of a line in *@line. Returns its length, 0 when there is none. */
static size_t trim(char **line)
{
    size_t len;

    *line += strspn(*line, " \t");
    len = strcspn(*line, "\r\n");
    while (len && ((*line)[len - 1] == ' ' || (*line)[len - 1] == '\t'))
        len--;
    return **line == '#' ? 0 : len;
}

/* Return true when @text has no character that ends a header line or is forbidden in one. */
static bool is_printable(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (text[i] < 0x21 || text[i] > 0x7e)
            return false;
    return true;
}

static int read_first(FILE *f, const char *file, char *ret, struct kv_error *error)
{
    char line[4096];

    while (fgets(line, sizeof(line), f)) {
        char *text = line;
        size_t len = trim(&text);

        if (!strchr(line, '\n') && !feof(f))
            return kv_fail(error, -EINVAL, 0, "%.150s: a line is too long or has a NUL byte", file);
        if (len == 0)
            continue;
        if (len > KC_TOKEN_MAX || !is_printable(text, len))
            return kv_fail(error, -EINVAL, 0, "%.150s: a token has at most %d bytes and no blanks",
                           file, KC_TOKEN_MAX);
        memcpy(ret, text, len);
        ret[len] = '\0';
        explicit_bzero(line, sizeof(line));
        return 0;
    }
    return kv_fail(error, ferror(f) ? -EIO : -ENOENT, 0,
                   ferror(f) ? "%.150s: can't read" : "%.150s: no token in it", file);
}

int kc_token_read(const char *file, char ret[KC_TOKEN_MAX + 1], struct kv_error *error)
{
    FILE *f = fopen(file, "re");
    int rc;

    if (!f)
        return kv_fail(error, -errno, 0, "%.150s: %s", file, strerror(errno));
    rc = read_first(f, file, ret, error);
    fclose(f);
    return rc;
}
