// SPDX-License-Identifier: Apache-2.0
/**
 * The little XML that S3 answers with: a pull scanner over a body in memory, and the three answers
 * that matter. Nothing is believed: an answer that breaks off or nests wrongly is -EPROTO, document
 * types are refused. Thread-safe; nothing is kept.
 */
#ifndef KV_PLUGINS_S3_XML_H
#define KV_PLUGINS_S3_XML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define S3_XML_DEPTH 16

enum s3_xml_kind { S3_XML_END, S3_XML_OPEN, S3_XML_CLOSE, S3_XML_TEXT };

struct s3_xml_event {
    enum s3_xml_kind kind;
    const char *p; /* the name without its namespace, or the text as it stands */
    size_t len;
    bool cdata; /* text without entities */
};

struct s3_xml {
    const char *p, *end;
    struct {
        const char *p;
        size_t len;
    } open[S3_XML_DEPTH];
    size_t depth;
    bool closed; /* <a/> still owes its end */
    bool root;   /* there was one */
};

void s3_xml_init(struct s3_xml *xml, const void *data, size_t len);
/** 0 (END at the end of the document) or -EPROTO. */
int s3_xml_next(struct s3_xml *xml, struct s3_xml_event *ret);

/** One object of a listing. */
struct s3_listed {
    char key[3200]; /* as it is in the bucket; room for 1024 bytes percent-encoded */
    uint64_t len;
    int64_t modified_s; /* 0: unknown */
};
typedef int (*s3_listed_fn)(void *arg, const struct s3_listed *object);

/**
 * Read a ListObjectsV2 answer that was asked for with encoding-type=url. The page is checked whole
 * before @each gets its objects. @ret_next gets the continuation token, "" on the last page: what
 * IsTruncated says counts, and a page that doesn't say whether it is the last is refused, since
 * whoever sweeps would take a part for all. Returns what @each returned when not 0, -EPROTO for
 * what is no such answer, -ENOSPC for a token or key beyond all bounds.
 */
int s3_read_listing(const void *data, size_t len, s3_listed_fn each, void *arg, char *ret_next,
                    size_t next_size);

/** Decode %XX in place, and + as a space when @plus; false when it is malformed or has a NUL. */
bool s3_decode(char *text, bool plus);

/** The text of the first element @name (anywhere). 0, -ENOENT, -EPROTO, -ENOSPC. */
int s3_read_element(const void *data, size_t len, const char *name, char *ret, size_t size);

/** Whether the body is an <Error>; its code (cut to fit) in @ret. */
bool s3_read_error(const void *data, size_t len, char *ret, size_t size);

/** Seconds since 1970 of 2026-01-02T03:04:05[.678]Z; 0 when it isn't one. */
int64_t s3_read_time(const char *text);

#endif
