// SPDX-License-Identifier: Apache-2.0
#include "s3/xml.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void s3_xml_init(struct s3_xml *xml, const void *data, size_t len)
{
    memset(xml, 0, sizeof(*xml));
    xml->p = data ? data : "";
    xml->end = xml->p + (data ? len : 0);
}

static bool starts(const struct s3_xml *xml, const char *text)
{
    size_t len = strlen(text);

    return (size_t)(xml->end - xml->p) >= len && memcmp(xml->p, text, len) == 0;
}

/* Behind the next @text; NULL when there is none. */
static const char *behind(const struct s3_xml *xml, const char *text)
{
    const char *found = memmem(xml->p, (size_t)(xml->end - xml->p), text, strlen(text));

    return found ? found + strlen(text) : NULL;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static int close_element(struct s3_xml *xml, struct s3_xml_event *ret)
{
    xml->depth--;
    ret->kind = S3_XML_CLOSE;
    ret->p = xml->open[xml->depth].p;
    ret->len = xml->open[xml->depth].len;
    return 0;
}

/* The name at xml->p, without a namespace; moves behind it. */
static int take_name(struct s3_xml *xml, const char **ret, size_t *ret_len)
{
    const char *start = xml->p;

    for (; xml->p < xml->end && !is_space(*xml->p) && *xml->p != '>' && *xml->p != '/'; xml->p++)
        if (*xml->p == ':')
            start = xml->p + 1;
        else if (*xml->p == '<' || *xml->p == '&' || *xml->p == '=')
            return -EPROTO;
    if (xml->p == start)
        return -EPROTO;
    *ret = start;
    *ret_len = (size_t)(xml->p - start);
    return 0;
}

/* From behind an element's name to behind its '>'; attributes are passed over. */
static int pass_attributes(struct s3_xml *xml, bool *ret_empty)
{
    char quote = 0;

    for (; xml->p < xml->end; xml->p++) {
        char c = *xml->p;

        if (quote) {
            quote = c == quote ? 0 : quote;
        } else if (c == '"' || c == '\'') {
            quote = c;
        } else if (c == '<') {
            return -EPROTO;
        } else if (c == '>') {
            *ret_empty = xml->p[-1] == '/';
            xml->p++;
            return 0;
        }
    }
    return -EPROTO;
}

static int take_tag(struct s3_xml *xml, struct s3_xml_event *ret)
{
    const char *name;
    size_t len;
    bool end = xml->p[1] == '/', empty;

    xml->p += end ? 2 : 1;
    if (take_name(xml, &name, &len) || pass_attributes(xml, &empty))
        return -EPROTO;
    if (end) {
        if (xml->depth == 0 || xml->open[xml->depth - 1].len != len ||
            memcmp(xml->open[xml->depth - 1].p, name, len) != 0)
            return -EPROTO;
        return close_element(xml, ret);
    }
    if (xml->depth == S3_XML_DEPTH || (xml->depth == 0 && xml->root))
        return -EPROTO;
    xml->root = true;
    xml->open[xml->depth].p = name;
    xml->open[xml->depth++].len = len;
    xml->closed = empty;
    *ret = (struct s3_xml_event){S3_XML_OPEN, name, len, false};
    return 0;
}

static int take_cdata(struct s3_xml *xml, struct s3_xml_event *ret)
{
    const char *end;

    xml->p += strlen("<![CDATA[");
    end = behind(xml, "]]>");
    if (!end || xml->depth == 0)
        return -EPROTO;
    *ret = (struct s3_xml_event){S3_XML_TEXT, xml->p, (size_t)(end - 3 - xml->p), true};
    xml->p = end;
    return 0;
}

static int take_text(struct s3_xml *xml, struct s3_xml_event *ret)
{
    const char *end = memchr(xml->p, '<', (size_t)(xml->end - xml->p));

    if (!end)
        return -EPROTO;
    *ret = (struct s3_xml_event){S3_XML_TEXT, xml->p, (size_t)(end - xml->p), false};
    xml->p = end;
    return 0;
}

int s3_xml_next(struct s3_xml *xml, struct s3_xml_event *ret)
{
    if (xml->closed) {
        xml->closed = false;
        return close_element(xml, ret);
    }
    while (true) {
        while (xml->depth == 0 && xml->p < xml->end && is_space(*xml->p))
            xml->p++;
        if (xml->p == xml->end) {
            *ret = (struct s3_xml_event){S3_XML_END, xml->p, 0, false};
            return xml->depth == 0 && xml->root ? 0 : -EPROTO;
        }
        if (starts(xml, "<![CDATA["))
            return take_cdata(xml, ret);
        if (starts(xml, "<?") || starts(xml, "<!--")) {
            xml->p = behind(xml, xml->p[1] == '?' ? "?>" : "-->");
            if (xml->p)
                continue;
            xml->p = xml->end;
            return -EPROTO;
        }
        if (starts(xml, "<!") || xml->end - xml->p < 2)
            return -EPROTO;
        if (*xml->p == '<')
            return take_tag(xml, ret);
        return xml->depth ? take_text(xml, ret) : -EPROTO;
    }
}

/* @code as UTF-8; the number of bytes. */
static size_t put_utf8(unsigned long code, char ret[4])
{
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;

    for (size_t i = n - 1; i > 0; i--, code >>= 6)
        ret[i] = (char)(0x80 | (code & 0x3f));
    ret[0] = (char)((n == 1 ? 0 : first[n]) | code);
    return n;
}

/* One entity at @p (which is '&'), decoded; returns its length, 0 when it isn't one we know. */
static size_t decode_entity(const char *p, size_t len, char ret[4], size_t *ret_len)
{
    static const struct {
        const char *text;
        char c;
    } known[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
    const char *end = memchr(p, ';', len < 12 ? len : 12);
    unsigned long code;
    char *stop;

    *ret_len = 1;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (len >= strlen(known[i].text) && memcmp(p, known[i].text, strlen(known[i].text)) == 0) {
            *ret = known[i].c;
            return strlen(known[i].text);
        }
    if (!end || end - p < 3 || p[1] != '#')
        return 0;
    code = p[2] == 'x' ? strtoul(p + 3, &stop, 16) : strtoul(p + 2, &stop, 10);
    if (stop != end || code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    *ret_len = put_utf8(code, ret);
    return (size_t)(end - p) + 1;
}

/* Append a text event to the string in @ret. -ENOSPC, -EPROTO. */
static int add_text(const struct s3_xml_event *event, char *ret, size_t size)
{
    size_t at = strlen(ret);

    for (size_t i = 0; i < event->len;) {
        char bytes[4] = {event->p[i]};
        size_t step = 1, n = 1;

        if (event->p[i] == '&' && !event->cdata)
            step = decode_entity(event->p + i, event->len - i, bytes, &n);
        if (step == 0 || bytes[0] == '\0')
            return -EPROTO;
        if (at + n >= size)
            return -ENOSPC;
        memcpy(ret + at, bytes, n);
        at += n;
        ret[at] = '\0';
        i += step;
    }
    return 0;
}

static bool is(const struct s3_xml_event *event, const char *name)
{
    return event->len == strlen(name) && memcmp(event->p, name, event->len) == 0;
}

/* The text up to the end of the element that was just opened; elements within are passed over. */
static int take_content(struct s3_xml *xml, char *ret, size_t size)
{
    size_t depth = xml->depth;
    struct s3_xml_event event;
    int error;

    ret[0] = '\0';
    while ((error = s3_xml_next(xml, &event)) == 0 && xml->depth >= depth)
        if (event.kind == S3_XML_TEXT && xml->depth == depth)
            if ((error = add_text(&event, ret, size)))
                return error;
    return error;
}

int s3_read_element(const void *data, size_t len, const char *name, char *ret, size_t size)
{
    struct s3_xml_event event;
    struct s3_xml xml;

    s3_xml_init(&xml, data, len);
    while (true) {
        if (s3_xml_next(&xml, &event))
            return -EPROTO;
        if (event.kind == S3_XML_END)
            return -ENOENT;
        if (event.kind == S3_XML_OPEN && is(&event, name))
            return take_content(&xml, ret, size);
    }
}

bool s3_read_error(const void *data, size_t len, char *ret, size_t size)
{
    struct s3_xml_event event;
    struct s3_xml xml;

    ret[0] = '\0';
    s3_xml_init(&xml, data, len);
    if (s3_xml_next(&xml, &event) || event.kind != S3_XML_OPEN || !is(&event, "Error"))
        return false;
    if (s3_read_element(data, len, "Code", ret, size) && ret[0] == '\0')
        snprintf(ret, size, "unknown");
    return true;
}

int64_t s3_read_time(const char *text)
{
    struct tm tm = {0};
    const char *end = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
    int64_t when;

    if (!end || (*end != 'Z' && *end != '.'))
        return 0;
    when = (int64_t)timegm(&tm);
    return when > 0 ? when : 0;
}

bool s3_decode(char *text, bool plus)
{
    char *to = text, hex[3] = "";

    for (; *text; text++, to++) {
        *to = plus && *text == '+' ? ' ' : *text;
        if (*text != '%')
            continue;
        if (!isxdigit((unsigned char)text[1]) || !isxdigit((unsigned char)text[2]))
            return false;
        memcpy(hex, text + 1, 2);
        *to = (char)strtoul(hex, NULL, 16);
        if (*to == '\0')
            return false;
        text += 2;
    }
    *to = '\0';
    return true;
}

static int take_object(struct s3_xml *xml, struct s3_listed *ret)
{
    size_t depth = xml->depth;
    struct s3_xml_event event;
    char text[64], *end;
    int error;

    memset(ret, 0, sizeof(*ret));
    ret->len = UINT64_MAX;
    while ((error = s3_xml_next(xml, &event)) == 0 && xml->depth >= depth) {
        if (event.kind != S3_XML_OPEN)
            continue;
        if (is(&event, "Key")) {
            error = take_content(xml, ret->key, sizeof(ret->key));
        } else if (is(&event, "Size")) {
            error = take_content(xml, text, sizeof(text));
            ret->len = strtoull(text, &end, 10);
            if (!error && (end == text || *end))
                error = -EPROTO;
        } else if (is(&event, "LastModified")) {
            error = take_content(xml, text, sizeof(text));
            ret->modified_s = s3_read_time(text);
        }
        if (error)
            return error;
    }
    return error ? error : ret->key[0] ? 0 : -EPROTO;
}

/* Facts about a page of a listing. */
struct page {
    bool told, more, encoded;
    char *next; /* the caller's */
    size_t next_size;
};

static int take_fact(struct s3_xml *xml, const struct s3_xml_event *event, struct page *page)
{
    char text[16];
    int error = 0;

    if (is(event, "NextContinuationToken"))
        return take_content(xml, page->next, page->next_size);
    if (is(event, "IsTruncated")) {
        error = take_content(xml, text, sizeof(text));
        page->told = true;
        page->more = !error && strcmp(text, "true") == 0;
        if (!error && !page->more && strcmp(text, "false") != 0)
            error = -EPROTO;
    } else if (is(event, "EncodingType")) {
        error = take_content(xml, text, sizeof(text));
        page->encoded = !error && strcmp(text, "url") == 0;
    }
    return error;
}

static int take_page(const void *data, size_t len, struct page *page)
{
    struct s3_xml_event event;
    struct s3_xml xml;
    int error;

    s3_xml_init(&xml, data, len);
    if (s3_xml_next(&xml, &event) || event.kind != S3_XML_OPEN || !is(&event, "ListBucketResult"))
        return -EPROTO;
    while ((error = s3_xml_next(&xml, &event)) == 0 && event.kind != S3_XML_END) {
        if (event.kind == S3_XML_OPEN && xml.depth == 2)
            error = take_fact(&xml, &event, page);
        if (error)
            return error;
    }
    if (!error && (!page->told || (page->more && !page->next[0])))
        error = -EPROTO;
    if (!page->more)
        page->next[0] = '\0';
    return error;
}

int s3_read_listing(const void *data, size_t len, s3_listed_fn each, void *arg, char *ret_next,
                    size_t next_size)
{
    struct page page = {.next = ret_next, .next_size = next_size};
    struct s3_xml_event event;
    struct s3_listed object;
    struct s3_xml xml;
    int error;

    ret_next[0] = '\0';
    error = take_page(data, len, &page);
    s3_xml_init(&xml, data, len);
    while (!error && (error = s3_xml_next(&xml, &event)) == 0 && event.kind != S3_XML_END) {
        if (event.kind != S3_XML_OPEN || xml.depth != 2 || !is(&event, "Contents"))
            continue;
        error = take_object(&xml, &object);
        if (!error && page.encoded && !s3_decode(object.key, true))
            error = -EPROTO;
        if (!error)
            error = each(arg, &object);
    }
    return error;
}
