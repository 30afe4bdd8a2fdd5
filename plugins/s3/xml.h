// SPDX-License-Identifier: Apache-2.0
/**
 * Three XML answers of S3: a page of a listing, one element, an error. expat parses them. Returns
 * -EPROTO for an answer that breaks off or isn't well-formed, has a document type, or has more
 * elements and attributes than any server sends. An XML declaration is skipped: all text is UTF-8.
 * Thread-safe; no state is kept.
 */
#ifndef KV_PLUGINS_S3_XML_H
#define KV_PLUGINS_S3_XML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** One object of a listing. */
struct s3_listed {
    char key[3200]; /* as in the bucket; room for 1024 bytes percent-encoded */
    uint64_t len;
    int64_t modified_s; /* 0: unknown */
};
typedef int (*s3_listed_fn)(void *arg, const struct s3_listed *object);

/**
 * Read a ListObjectsV2 answer that was asked for with encoding-type=url. The page is checked whole
 * before @each gets its objects. @ret_next gets the continuation token, "" on the last page.
 * IsTruncated decides which page is the last; a page without it is refused, since a sweep would
 * take a part for the whole. Returns what @each returned when not 0, -EPROTO for another document,
 * -ENOSPC for a token or key that is too long, or -ENOMEM.
 */
int s3_read_listing(const void *data, size_t len, s3_listed_fn each, void *arg, char *ret_next,
                    size_t next_size);

/** Decode %XX in place, and + as a space when @plus; false when it is malformed or has a NUL. */
bool s3_decode(char *text, bool plus);

/**
 * Read the text of the first element @name, anywhere in a complete answer. Returns 0, -ENOENT,
 * -EPROTO, -ENOSPC (with the part that fits), -ENOMEM.
 */
int s3_read_element(const void *data, size_t len, const char *name, char *ret, size_t size);

/** Check that an answer is complete and its root element is @root. Returns 0, -EPROTO, -ENOMEM. */
int s3_check_root(const void *data, size_t len, const char *root);

/**
 * True when the body is an <Error>. @ret gets its code (cut to fit), "unknown" when it has none.
 * The body may break off behind the code.
 */
bool s3_read_error(const void *data, size_t len, char *ret, size_t size);

/** Parse 2026-01-02T03:04:05[.678]Z to seconds since 1970; 0 when it isn't such a time. */
int64_t s3_read_time(const char *text);

#endif
