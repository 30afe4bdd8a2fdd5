// SPDX-License-Identifier: Apache-2.0
/**
 * Files of a web page that a program carries: cmake/KvEmbed.cmake turns a folder of plain files into a
 * table of struct kh_file.
 *
 * A page is served to browsers that have shown no token yet, so its files hold no data. It may load
 * from its own server alone: the headers forbid other sources, inline code and frames.
 */
#ifndef KV_HTTP_FILES_H
#define KV_HTTP_FILES_H

#include <stddef.h>

#include "http/http.h"

struct kh_file {
    const char *path; /* of the request */
    const char *type; /* Content-Type */
    const char *etag; /* with its quotes; changes with the contents */
    const char *data;
    const char *end; /* behind the last byte */
};

/** A table that cmake/KvEmbed.cmake has made. */
struct kh_files {
    const struct kh_file *items;
    size_t n;
};

/**
 * Reply with the file of @path: 200, or 304 when the request's If-None-Match names its ETag. 404 when
 * the table lacks it. Any thread.
 */
void kh_files_reply(const struct kh_files *files, const char *path,
                    const struct kh_request *request, struct kh_reply *reply);

#endif
