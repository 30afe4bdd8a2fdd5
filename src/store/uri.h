// SPDX-License-Identifier: Apache-2.0
/** Store URIs: a plain path, or SCHEME://... for a plugin. The rest is the backend's business. */
#ifndef KV_STORE_URI_H
#define KV_STORE_URI_H

#include <stdbool.h>
#include <stddef.h>

#define KVS_SCHEME_MAX 32

struct kvs_uri {
    bool path;                   /* no scheme: the built-in file store */
    char scheme[KVS_SCHEME_MAX]; /* "" for paths */
};

/**
 * Parse @uri. Returns 0 or -EINVAL with *ret_why a fixed phrase: "empty", "invalid scheme",
 * "too long", "control character", "password in the URI".
 */
int kvs_uri_parse(const char *uri, struct kvs_uri *ret, const char **ret_why);

/**
 * @uri for people: without user, password and query, cut to @size. Returns @buf. What may be a
 * password is hidden also where it needn't be one: "***@" may stand for a host, port and path.
 */
const char *kvs_uri_redact(const char *uri, char *buf, size_t size);

#endif
