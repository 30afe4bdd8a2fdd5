// SPDX-License-Identifier: Apache-2.0
#include "http/framing.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

static bool is_token(const char *text, size_t len)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";

    if (len == 0)
        return false;
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && !memchr(marks, text[i], sizeof(marks) - 1))
            return false;
    return true;
}

/*
 * Accept no control characters: some programs take a lone CR for the end of the line, others a NUL
 * for the end of the value.
 */
static bool is_field_value(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (((unsigned char)text[i] < ' ' && text[i] != '\t') || text[i] == 0x7f)
            return false;
    return true;
}

static bool is_named(const char *name, size_t len, const char *wanted)
{
    return len == strlen(wanted) && strncasecmp(name, wanted, len) == 0;
}

/* Read digits only: programs read signs, blanks and lists in different ways. */
static bool read_length(const char *text, size_t len, uint64_t *ret)
{
    uint64_t value = 0;

    if (len == 0 || len > 18)
        return false;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(text[i] - '0');
    }
    *ret = value;
    return true;
}

/* Return true for a line's end at @at: CRLF, of which two NULs are left. */
static bool is_line_end(const struct kh_framing *f, const char *at)
{
    return f->end - at >= 2 && at[0] == '\0' && at[1] == '\0';
}

static bool is_inside(const struct kh_framing *f, const char *at, size_t len)
{
    return at >= f->next && at <= f->end && len <= (size_t)(f->end - at);
}

void kh_framing_expect_whole(struct kh_framing *f, const char *start, size_t len,
                             const char *version)
{
    f->next = start;
    f->end = start + len;
    if (!is_inside(f, version, strlen(version)) || !is_line_end(f, version + strlen(version)))
        f->gap = true;
    else
        f->next = version + strlen(version) + 2;
}

/*
 *   next                             next
 *   │name│NUL│blanks│value│NUL│NUL│  │...        the NULs were ':', CR and LF
 */
static bool is_next(struct kh_framing *f, const char *name, size_t name_len, const char *value,
                    size_t value_len)
{
    const char *at = name + name_len;

    if (name != f->next || !is_inside(f, name, name_len + 1) || *at++ != '\0')
        return false;
    if (value_len == 0) { /* the library may then point to a constant */
        while (at < f->end && (*at == ' ' || *at == '\t'))
            at++;
    } else {
        if (!is_inside(f, value, value_len) || value < at ||
            strspn(at, " \t") != (size_t)(value - at))
            return false;
        at = value + value_len;
    }
    if (!is_line_end(f, at))
        return false;
    f->next = at + 2;
    return true;
}

void kh_framing_header(struct kh_framing *f, const char *name, size_t name_len, const char *value,
                       size_t value_len)
{
    if (f->end && !f->gap)
        f->gap = !is_next(f, name, name_len, value, value_len);
    if (!is_token(name, name_len) || !is_field_value(value, value_len)) {
        f->malformed = true;
    } else if (is_named(name, name_len, "Content-Length")) {
        f->n_lengths++;
        f->malformed |= !read_length(value, value_len, &f->content_length);
    } else if (is_named(name, name_len, "Transfer-Encoding")) {
        f->n_encodings++;
        f->malformed |= strcasecmp(value, "chunked") != 0;
    } else if (is_named(name, name_len, "Host")) {
        f->n_hosts++;
        f->host = value;
    } else if (is_named(name, name_len, "Origin")) {
        f->origin = f->origin ? "" : value;
    } else if (is_named(name, name_len, "Content-Type")) {
        f->content_type = value;
    } else if (is_named(name, name_len, "Authorization")) {
        f->malformed |= f->authorization != NULL;
        f->authorization = value;
    } else if (is_named(name, name_len, "Expect")) {
        f->expects = true;
    }
}

const char *kh_framing_problem(const struct kh_framing *f, const char *version)
{
    if (f->malformed)
        return "malformed header";
    if (f->end && (f->gap || f->end - f->next != 2 || !is_line_end(f, f->next)))
        return "NUL, folded line or line end without CR in the header";
    if (f->n_lengths > 1)
        return "more than one Content-Length";
    if (f->n_encodings > 1)
        return "more than one Transfer-Encoding";
    if (f->n_lengths && f->n_encodings)
        return "both Content-Length and Transfer-Encoding";
    if (f->n_encodings && strcmp(version, "HTTP/1.1") != 0)
        return "Transfer-Encoding before HTTP/1.1";
    if (f->n_hosts > 1)
        return "more than one Host";
    return NULL;
}
