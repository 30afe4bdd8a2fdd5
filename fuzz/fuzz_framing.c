// SPDX-License-Identifier: Apache-2.0
/*
 * Headers of HTTP requests, as libmicrohttpd hands them on: line by line, with NUL in place of blanks and
 * line ends, and with patience for wrong ones. The judge accepts only what a strict reader of the
 * original bytes accepts, too, and both see the same body.
 */
#include <ctype.h>
#include <stdbool.h>
#include <string.h>
#include <strings.h>

#include "base/core/error.h"
#include "http/framing.h"
#include "require.h"

#define MOST 8192

/* ---- a strict reader ---- */

struct strict {
    bool ok;
    unsigned n_lengths, n_encodings;
    uint64_t length;
};

static bool is_token(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (!isalnum((unsigned char)text[i]) && (!text[i] || !strchr("!#$%&'*+-.^_`|~", text[i])))
            return false;
    }
    return len > 0;
}

static bool is_value(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (((unsigned char)text[i] < 0x20 && text[i] != '\t') || text[i] == 0x7f)
            return false;
    }
    return true;
}

static void strict_line(struct strict *s, const char *line, size_t len)
{
    const char *colon = memchr(line, ':', len);
    size_t name = colon ? (size_t)(colon - line) : 0, at = name + 1;

    s->ok = s->ok && colon && is_token(line, name) && is_value(line + at, len - at);
    if (!s->ok)
        return;
    while (at < len && (line[at] == ' ' || line[at] == '\t'))
        at++;
    if (name == 17 && strncasecmp(line, "Transfer-Encoding", name) == 0)
        s->n_encodings++;
    if (name != 14 || strncasecmp(line, "Content-Length", name) != 0)
        return;
    s->n_lengths++;
    s->length = 0;
    s->ok = at < len && len - at <= 19;
    for (; s->ok && at < len; at++) {
        s->ok = line[at] >= '0' && line[at] <= '9';
        s->length = s->length * 10 + (uint64_t)(line[at] - '0');
    }
}

/* Read the lines behind the request line, up to the empty one, with which the bytes end. */
static struct strict read_strictly(const char *at, size_t len)
{
    struct strict s = {.ok = true};

    while (s.ok) {
        const char *end = memmem(at, len, "\r\n", 2);
        size_t line = end ? (size_t)(end - at) : 0;

        s.ok = end;
        if (s.ok && line == 0) {
            s.ok = len == 2;
            break;
        }
        if (s.ok)
            strict_line(&s, at, line);
        at += line + 2;
        len -= s.ok ? line + 2 : 0;
    }
    s.ok = s.ok && s.n_lengths <= 1 && s.n_encodings <= 1 && s.n_lengths + s.n_encodings <= 1;
    return s;
}

/* ---- the library ---- */

/* Find the end of a line, by LF or CRLF, and put NULs there. Returns what follows, or NULL. */
static char *cut_line(char *at, char *end, size_t *len)
{
    char *lf = memchr(at, '\n', (size_t)(end - at));

    if (!lf)
        return NULL;
    *len = (size_t)(lf - at);
    *lf = '\0';
    if (*len && lf[-1] == '\r') {
        lf[-1] = '\0';
        --*len;
    }
    return lf + 1;
}

/* Hand a line on as the library does. Returns false where it would refuse. */
static bool hand_on(struct kh_framing *f, char *line)
{
    char *colon = strchr(line, ':'), *value; /* not behind a NUL */
    size_t value_len;

    if (!colon)
        return false;
    *colon = '\0';
    value = colon + 1;
    while (*value == ' ' || *value == '\t')
        value++;
    value_len = strlen(value); /* a NUL within cuts it off */
    kh_framing_header(f, line, strlen(line), value_len ? value : "", value_len);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char original[MOST], copy[MOST];
    struct kh_framing f = {0};
    char *at, *version, *end;
    struct strict strict;
    size_t len, first;

    /* libmicrohttpd before 1.0 leaves two NULs of NUL and LF, as of CR and LF: nobody can tell. */
    if (size > MOST - 1 || memchr(data, '\0', size))
        return 0;
    memcpy(original, data, size);
    memcpy(copy, data, size);
    original[size] = copy[size] = '\0';
    end = copy + size;
    at = cut_line(copy, end, &first);
    version = at && strlen(copy) == first ? strrchr(copy, ' ') : NULL;
    if (!version)
        return 0;
    *version++ = '\0';
    if (strcmp(version, "HTTP/1.0") != 0 && strcmp(version, "HTTP/1.1") != 0)
        return 0;
    kh_framing_expect_whole(&f, copy, size, version);
    strict = read_strictly(original + (at - copy), size - (size_t)(at - copy));
    for (char *line = at; (at = cut_line(line, end, &len)); line = at) {
        if (len == 0)
            break;
        if (!hand_on(&f, line))
            return 0;
    }
    if (!at || kh_framing_problem(&f, version)) /* without its empty line it isn't handed on */
        return 0;
    REQUIRE(strict.ok && original[first] == '\r');
    REQUIRE(strict.n_lengths == f.n_lengths && strict.n_encodings == f.n_encodings);
    REQUIRE(!f.n_lengths || f.content_length == strict.length);
    return 0;
}
