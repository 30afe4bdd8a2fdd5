// SPDX-License-Identifier: Apache-2.0
#include "s3/xml.h"

#include <errno.h>
#include <expat.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/ascii.h"
#include "base/core/error.h"

enum {
    MAX_DEPTH = 16,
    MAX_PARTS = 128 << 10, /* elements and attributes; a page of 1000 keys has 16000 */
    MAX_TAG = 64 << 10,    /* bytes, without the piece being read */
    PIECE = 16 << 10       /* bytes read at once: the cost of a tag of any length */
};

/* -- a walk over a document -------------------------------------------------------------------- */

/* Call @closed at the end of each element, with its text when it has no child element. */
struct walk {
    const char *root_wanted; /* NULL: any */
    int (*closed)(struct walk *walk, const char *name, const char *text);
    XML_Parser parser;
    size_t depth; /* 1: the root element */
    size_t parts; /* elements and attributes */
    int error;    /* the first one */
    char root[32];
    bool leaf, cut;  /* leaf: no child element so far; cut: its text didn't fit */
    size_t text_len; /* length of the text of the element opened last */
    char text[sizeof(((struct s3_listed *)0)->key)];
};

static void stop(struct walk *walk, int error)
{
    if (!walk->error)
        walk->error = error;
    XML_StopParser(walk->parser, XML_FALSE);
}

static const char *local_name(const char *name)
{
    const char *colon = strrchr(name, ':');

    return colon ? colon + 1 : name;
}

static void XMLCALL on_open(void *arg, const char *name, const char **attributes)
{
    struct walk *walk = arg;

    walk->leaf = true;
    walk->cut = false;
    walk->text_len = 0;
    for (walk->parts++; *attributes; attributes += 2)
        walk->parts++;
    if (++walk->depth > MAX_DEPTH || walk->parts > MAX_PARTS)
        stop(walk, -EPROTO);
    if (walk->depth > 1)
        return;
    snprintf(walk->root, sizeof(walk->root), "%s", local_name(name));
    if (walk->root_wanted && strcmp(walk->root, walk->root_wanted) != 0)
        stop(walk, -EPROTO);
}

static void XMLCALL on_text(void *arg, const char *text, int len)
{
    struct walk *walk = arg;
    size_t room = sizeof(walk->text) - 1 - walk->text_len, n = (size_t)len;

    if (!walk->leaf)
        return;
    walk->cut |= n > room;
    n = n > room ? room : n;
    memcpy(walk->text + walk->text_len, text, n);
    walk->text_len += n;
}

static void XMLCALL on_close(void *arg, const char *name)
{
    struct walk *walk = arg;
    int error;

    walk->text[walk->leaf ? walk->text_len : 0] = '\0';
    error = walk->error ? 0 : walk->closed(walk, local_name(name), walk->text);
    if (error)
        stop(walk, error);
    walk->leaf = false; /* its parent is no leaf */
    walk->depth--;
}

/* Refuse document types: they define entities, which can grow without bounds. No server needs
 * one. */
static void XMLCALL on_doctype(void *arg, const char *name, const char *system, const char *public,
                               int internal)
{
    (void)name, (void)system, (void)public, (void)internal;
    stop(arg, -EPROTO);
}

/* Return the length of the XML declaration, well-formed or not. */
static size_t declaration(const char *data, size_t len)
{
    const char *end = len > 5 && memcmp(data, "<?xml", 5) == 0 && memchr(" \t\r\n?", data[5], 5)
                          ? memmem(data, len, "?>", 2)
                          : NULL;

    return end ? (size_t)(end + 2 - data) : 0;
}

/* Return where in the text the parser is. Expat 2.9 has given up the function without 64. */
static int64_t parsed(XML_Parser parser)
{
#if XML_MAJOR_VERSION > 2 || XML_MINOR_VERSION >= 9
    return XML_GetCurrentByteIndex64(parser);
#else
    return XML_GetCurrentByteIndex(parser);
#endif
}

/* Feed the parser in pieces, since it collects all attributes of an element before it calls. */
static void feed(struct walk *walk, const char *data, size_t len)
{
    enum XML_Status status;
    size_t at = 0, n;

    do {
        n = KV_MIN(len - at, (size_t)PIECE);
        status = XML_Parse(walk->parser, data + at, (int)n, at + n == len);
        at += n;
        if (status == XML_STATUS_OK && !walk->error &&
            (int64_t)at - parsed(walk->parser) > MAX_TAG + PIECE)
            walk->error = -EPROTO;
    } while (status == XML_STATUS_OK && !walk->error && at < len);
    if (status != XML_STATUS_OK && !walk->error)
        walk->error = XML_GetErrorCode(walk->parser) == XML_ERROR_NO_MEMORY ? -ENOMEM : -EPROTO;
}

/* Parse a document. Returns 0, the first error of a handler, or -EPROTO for one that isn't
 * well-formed. */
static int parse(struct walk *walk, const char *data, size_t len)
{
    size_t skip;

    if (!len)
        return -EPROTO;
    /* some servers send white space to keep a connection alive */
    for (; len > 0 && memchr(" \t\r\n", *data, 4); len--)
        data++;
    skip = declaration(data, len);
    data += skip;
    len -= skip;
    walk->parser = len <= INT_MAX ? XML_ParserCreate("UTF-8") : NULL;
    if (!walk->parser)
        return -ENOMEM;
    XML_SetUserData(walk->parser, walk);
    XML_SetElementHandler(walk->parser, on_open, on_close);
    XML_SetCharacterDataHandler(walk->parser, on_text);
    XML_SetStartDoctypeDeclHandler(walk->parser, on_doctype);
    feed(walk, data, len);
    XML_ParserFree(walk->parser);
    return walk->error;
}

/* Copy the text as far as it fits; -ENOSPC when it is longer. */
static int copy_text(const struct walk *walk, char *ret, size_t size)
{
    return snprintf(ret, size, "%s", walk->text) >= (int)size || walk->cut ? -ENOSPC : 0;
}

/* -- one element ------------------------------------------------------------------------------- */

struct element {
    struct walk walk;
    const char *name;
    char *ret;
    size_t size;
    bool found;
};

static int element_closed(struct walk *walk, const char *name, const char *text)
{
    struct element *e = (struct element *)walk;

    (void)text;
    if (e->found || strcmp(name, e->name) != 0)
        return 0;
    e->found = true;
    return copy_text(walk, e->ret, e->size);
}

int s3_read_element(const void *data, size_t len, const char *name, char *ret, size_t size)
{
    struct element e = {.walk = {.closed = element_closed}, .name = name, .ret = ret, .size = size};
    int error = parse(&e.walk, data, len);

    return error ? error : e.found ? 0 : -ENOENT;
}

static int nothing_closed(struct walk *walk, const char *name, const char *text)
{
    (void)walk, (void)name, (void)text;
    return 0;
}

int s3_check_root(const void *data, size_t len, const char *root)
{
    struct walk walk = {.closed = nothing_closed, .root_wanted = root};

    return parse(&walk, data, len);
}

bool s3_read_error(const void *data, size_t len, char *ret, size_t size)
{
    struct element e = {.walk = {.closed = element_closed, .root_wanted = "Error"},
                        .name = "Code",
                        .ret = ret,
                        .size = size};

    ret[0] = '\0';
    (void)parse(&e.walk, data, len);
    if (strcmp(e.walk.root, "Error") != 0)
        return false;
    if (!ret[0])
        snprintf(ret, size, "unknown");
    return true;
}

/* -- values ------------------------------------------------------------------------------------ */

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
        if (!kv_is_xdigit(text[1]) || !kv_is_xdigit(text[2]))
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

static int read_size(const char *text, uint64_t *ret)
{
    char *end;

    *ret = strtoull(text, &end, 10); /* UINT64_MAX when it is too large */
    return kv_is_digit(*text) && *end == '\0' && *ret != UINT64_MAX ? 0 : -EPROTO;
}

/* -- a listing --------------------------------------------------------------------------------- */

/* A listing's page. It is read twice: first for its facts, some of which may follow the objects;
 * then for the objects. */
struct page {
    struct walk walk;
    s3_listed_fn each; /* NULL: the first reading */
    void *arg;
    bool told, more, encoded;
    char *next; /* the caller's buffer */
    size_t next_size;
    struct s3_listed object; /* filled while it is read */
};

static int take_field(struct page *page, const char *name, const char *text)
{
    if (strcmp(name, "Key") == 0)
        return copy_text(&page->walk, page->object.key, sizeof(page->object.key));
    if (strcmp(name, "Size") == 0)
        return read_size(text, &page->object.len);
    if (strcmp(name, "LastModified") == 0)
        page->object.modified_s = s3_read_time(text);
    return 0;
}

static int take_object(struct page *page)
{
    struct s3_listed *object = &page->object;

    if (!object->key[0])
        return -EPROTO;
    if (!page->each)
        return 0;
    if (page->encoded && !s3_decode(object->key, true))
        return -EPROTO;
    return page->each(page->arg, object);
}

static int take_fact(struct page *page, const char *name, const char *text)
{
    if (strcmp(name, "NextContinuationToken") == 0)
        return copy_text(&page->walk, page->next, page->next_size);
    if (strcmp(name, "EncodingType") == 0)
        page->encoded = strcmp(text, "url") == 0;
    if (strcmp(name, "IsTruncated") != 0)
        return 0;
    page->told = true;
    page->more = strcmp(text, "true") == 0;
    return page->more || strcmp(text, "false") == 0 ? 0 : -EPROTO;
}

static int page_closed(struct walk *walk, const char *name, const char *text)
{
    struct page *page = (struct page *)walk;
    int error = 0;

    if (walk->depth == 3)
        return take_field(page, name, text);
    if (walk->depth != 2)
        return 0;
    error = strcmp(name, "Contents") == 0 ? take_object(page) : take_fact(page, name, text);
    page->object = (struct s3_listed){.len = UINT64_MAX}; /* fields of other elements are dropped */
    return error;
}

static int read_page(struct page *page, const void *data, size_t len, s3_listed_fn each)
{
    page->walk = (struct walk){.closed = page_closed, .root_wanted = "ListBucketResult"};
    page->object = (struct s3_listed){.len = UINT64_MAX};
    page->each = each;
    return parse(&page->walk, data, len);
}

int s3_read_listing(const void *data, size_t len, s3_listed_fn each, void *arg, char *ret_next,
                    size_t next_size)
{
    struct page page = {.next = ret_next, .next_size = next_size, .arg = arg};
    int error;

    ret_next[0] = '\0';
    error = read_page(&page, data, len, NULL);
    if (!error && (!page.told || (page.more && !ret_next[0])))
        error = -EPROTO;
    if (!error)
        error = read_page(&page, data, len, each);
    if (!page.more)
        ret_next[0] = '\0';
    return error;
}
