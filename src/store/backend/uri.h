// SPDX-License-Identifier: Apache-2.0
/** Store URIs: a plain path, or SCHEME://... for a plugin. The backend parses the rest. */
#ifndef KV_STORE_BACKEND_URI_H
#define KV_STORE_BACKEND_URI_H

#include <stdbool.h>
#include <stddef.h>

#define KVS_SCHEME_MAX 32

struct kvs_uri {
    bool path;                   /* no scheme: the built-in file store */
    char scheme[KVS_SCHEME_MAX]; /* "" for paths */
};

/**
 * Parse @uri. Returns 0, or -EINVAL with a fixed phrase in *ret_why: one of those in
 * fuzz/fuzz_store_uri.c, which has to know them all.
 */
int kvs_uri_parse(const char *uri, struct kvs_uri *ret, const char **ret_why);

/**
 * Write @uri for logs and messages: without user, password and query, cut to @size. Returns @buf.
 * Hides everything that may be a password: "***@" may also stand for a host, port and path.
 */
const char *kvs_uri_redact(const char *uri, char *buf, size_t size);

#endif
