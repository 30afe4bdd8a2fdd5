// SPDX-License-Identifier: Apache-2.0
#include "store/backend/uri.h"

#include <stdio.h>

#include "base/core/error.h"

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

/* Backends whose URI names a file by its absolute path: "tiered:/x". */
static const char *const of_files[] = {"tiered"};

/* Return the length of the scheme of "tiered:/x", which needs no "//"; 0: another URI. */
static size_t file_scheme(const char *uri)
{
    size_t len = strcspn(uri, ":");

    for (size_t i = 0; i < KV_COUNT(of_files); i++)
        if (strlen(of_files[i]) == len && memcmp(uri, of_files[i], len) == 0 &&
            strncmp(uri + len, ":/", 2) == 0)
            return len;
    return 0;
}

/* Return the part behind "://", or behind "tiered:", or NULL when @uri is a path. A path with :// in
 * it begins with / or a dot. *@ret_len: length of the scheme. */
static const char *after_scheme(const char *uri, size_t *ret_len)
{
    const char *sep = strstr(uri, "://");
    size_t len = file_scheme(uri);

    *ret_len = len;
    if (len)
        return uri + len + 1 + (strncmp(uri + len, "://", 3) == 0 ? 2 : 0);
    if (!sep || *uri == '/' || *uri == '.')
        return NULL;
    *ret_len = (size_t)(sep - uri);
    return sep + 3;
}

/*
 * Return the part behind "file:/" and "redis:": of a URI mistyped, which would be a folder of that
 * name and hide on a disk what belongs elsewhere. Such a folder is "./file:/x". NULL: a path.
 */
static const char *after_colon(const char *path)
{
    size_t len = strcspn(path, ":/");

    if (path[len] != ':' || !is_scheme(path, len))
        return NULL;
    return path + len + 1 + strspn(path + len + 1, "/");
}

/*
 * The end of user and password. Found by the way people write URIs rather than by RFC 3986:
 * passwords contain '/', '?', '#' and '@' although they must not.
 *
 *     user@host/path            the user ends at the '@' of the authority
 *     us@er:pass@host           a ':' before that '@': at the last one anywhere
 *     user:pass/w@rd@host       "user:" and an '@' anywhere behind: at the last one
 *     host:6379/a@b             a port and a path, or a password that begins with digits?
 */
struct secret {
    const char *at;   /* the '@' that ends it; NULL: none */
    bool password;    /* there surely is a password */
    bool hides_query; /* a '?' or '#' lies before the '@': part of the query, or of the password */
};

static struct secret find_secret(const char *rest)
{
    size_t authority = strcspn(rest, "/?#");
    const char *at = memrchr(rest, '@', authority), *last = strrchr(rest, '@');
    const char *host = at ? at + 1 : rest;
    const char *bracket = *host == '[' ? strchr(host, ']') : NULL;
    const char *name = bracket && bracket < rest + authority ? bracket : host;
    const char *colon = name + strcspn(name, ":/?#@");
    bool inside = at && memchr(rest, ':', (size_t)(at - rest)), port;

    if (!last || (!inside && *colon != ':'))
        return (struct secret){.at = at};
    port = *colon == ':' && colon + 1 + strspn(colon + 1, "0123456789") >= rest + authority;
    return (struct secret){.at = last,
                           .password = inside || (!port && last > colon),
                           .hides_query = rest + strcspn(rest, "?#") < last};
}

int kvs_uri_parse(const char *uri, struct kvs_uri *ret, const char **ret_why)
{
    const char *rest;
    struct kvs_uri out = {0};
    size_t len;

    if (!uri || !*uri)
        return reject(ret_why, "empty");
    if (strlen(uri) >= URI_MAX)
        return reject(ret_why, "too long");
    for (const char *p = uri; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F)
            return reject(ret_why, "control character");
    rest = after_scheme(uri, &len);
    out.path = !rest;
    if (!rest && after_colon(uri))
        return reject(ret_why, "neither SCHEME://... nor a path: a folder of that name is ./NAME");
    if (rest) {
        if (!is_scheme(uri, len))
            return reject(ret_why, "invalid scheme");
        if (len >= sizeof(out.scheme))
            return reject(ret_why, "too long");
        if (len == strlen("file") && memcmp(uri, "file", len) == 0)
            return reject(ret_why, "a directory is named by its path, without file://");
        memcpy(out.scheme, uri, len);
        if (find_secret(rest).password)
            return reject(ret_why, "password in the URI");
    }
    *ret = out;
    return 0;
}

const char *kvs_uri_redact(const char *uri, char *buf, size_t size)
{
    size_t len;
    const char *rest = after_scheme(uri, &len), *shown;
    struct secret secret;

    if (!rest)
        rest = after_colon(uri); /* refused, and shown in the refusal */
    if (!rest) {
        snprintf(buf, size, "%s", uri);
        return buf;
    }
    secret = find_secret(rest);
    shown = secret.hides_query ? "" : secret.at ? secret.at + 1 : rest;
    snprintf(buf, size, "%.*s%s%.*s", (int)KV_MIN(rest - uri, URI_MAX), uri,
             secret.hides_query ? "***"
             : secret.at        ? "***@"
                                : "",
             (int)KV_MIN(strcspn(shown, "?#"), (size_t)URI_MAX), shown);
    return buf;
}
