// SPDX-License-Identifier: Apache-2.0
#include "store/uri.h"

#include <stdio.h>

#include "base/error.h"

#define URI_MAX 4096

static int reject(const char **ret_why, const char *why)
{
    if (ret_why)
        *ret_why = why;
    return -EINVAL;
}

static bool is_scheme(const char *text, size_t len)
{
    static const char first[] = "abcdefghijklmnopqrstuvwxyz";
    static const char rest[] = "abcdefghijklmnopqrstuvwxyz0123456789+.-";

    return len > 0 && strchr(first, *text) && strspn(text, rest) >= len;
}

/* After "://", or NULL: @uri is a path. A path that has :// in it is told by how it starts. */
static const char *after_scheme(const char *uri)
{
    const char *sep = strstr(uri, "://");

    return sep && *uri != '/' && *uri != '.' ? sep + 3 : NULL;
}

/* The '@' that ends the user part of an authority, or NULL. */
static const char *user_end(const char *authority)
{
    size_t len = strcspn(authority, "/?#");

    return memrchr(authority, '@', len);
}

int kvs_uri_parse(const char *uri, struct kvs_uri *ret, const char **ret_why)
{
    const char *rest, *at;
    struct kvs_uri out = {0};
    size_t len;

    if (!uri || !*uri)
        return reject(ret_why, "empty");
    if (strlen(uri) >= URI_MAX)
        return reject(ret_why, "too long");
    for (const char *p = uri; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F)
            return reject(ret_why, "control character");
    rest = after_scheme(uri);
    out.path = !rest;
    if (rest) {
        len = (size_t)(rest - uri) - 3;
        if (!is_scheme(uri, len))
            return reject(ret_why, "invalid scheme");
        if (len >= sizeof(out.scheme))
            return reject(ret_why, "too long");
        memcpy(out.scheme, uri, len);
        at = user_end(rest);
        if (at && memchr(rest, ':', (size_t)(at - rest)))
            return reject(ret_why, "password in the URI");
    }
    *ret = out;
    return 0;
}

const char *kvs_uri_redact(const char *uri, char *buf, size_t size)
{
    const char *rest = after_scheme(uri);
    const char *at = rest ? user_end(rest) : NULL;
    const char *shown = at ? at + 1 : rest;

    if (rest)
        snprintf(buf, size, "%.*s%s%.*s", (int)KV_MIN(rest - uri, URI_MAX), uri, at ? "***@" : "",
                 (int)KV_MIN(strcspn(shown, "?#"), URI_MAX), shown);
    else
        snprintf(buf, size, "%s", uri);
    return buf;
}
