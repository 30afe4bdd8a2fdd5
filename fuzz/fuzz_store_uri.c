// SPDX-License-Identifier: Apache-2.0
/* Store URIs. An accepted scheme is a safe part of a file name; the form for logs has no user,
 * password or query; a refusal has one of the known phrases. */
#include <stdint.h>
#include <stdio.h>

#include "base/core/error.h"
#include "store/backend/uri.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

/* Like "redis:host": refused, and shown without user and password. */
static bool mistyped(const char *text)
{
    size_t len = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789+.-");

    return *text >= 'a' && *text <= 'z' && text[len] == ':' && !strstr(text, "://") &&
           strncmp(text, "tiered:/", 8) != 0;
}

static void check_accepted(const char *text, const struct kvs_uri *uri)
{
    size_t len = strlen(uri->scheme);
    const char *authority, *at;

    require(uri->path == (len == 0));
    if (uri->path) {
        require(!strstr(text, "://") || *text == '/' || *text == '.');
        require(!mistyped(text));
        return;
    }
    require(strncmp(text, uri->scheme, len) == 0 && text[len] == ':');
    require(strncmp(text + len, "://", 3) == 0 || strncmp(text, "tiered:/", 8) == 0);
    require(!strpbrk(uri->scheme, "/\\: \t%_") && *uri->scheme >= 'a' && *uri->scheme <= 'z');
    authority = text + len + (strncmp(text + len, "://", 3) == 0 ? 3 : 1);
    at = memrchr(authority, '@', strcspn(authority, "/?#"));
    require(!at || !memchr(authority, ':', (size_t)(at - authority)));
}

static void check_refused(const char *why)
{
    static const char *const phrases[] = {
        "empty",
        "invalid scheme",
        "too long",
        "control character",
        "neither SCHEME://... nor a path: a folder of that name is ./NAME",
        "a directory is named by its path, without file://",
        "password in the URI"};

    for (size_t i = 0; i < KV_COUNT(phrases); i++)
        if (strcmp(why, phrases[i]) == 0)
            return;
    abort();
}

static void check_redacted(const char *text, const char *shown, bool path)
{
    const char *rest, *at, *behind;

    if (path)
        return;
    rest = strchr(text, ':') + 1;
    rest += strspn(rest, "/");
    if (strncmp(text, "tiered:/", 8) == 0)
        rest = text + (text[8] == '/' ? 9 : 7);
    else if (strstr(text, "://"))
        rest = strstr(text, "://") + 3;
    behind = shown + (rest - text);
    require(!strpbrk(behind, "?#"));
    at = memrchr(rest, '@', strcspn(rest, "/?#"));
    if (at)
        require(strncmp(behind, "***@", 4) == 0 || strcmp(behind, "***") == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[5000], shown[5100], small[16];
    struct kvs_uri uri;
    const char *why = NULL;
    int rc;

    if (size >= sizeof(text))
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    rc = kvs_uri_parse(text, &uri, &why);
    require(kvs_uri_redact(text, shown, sizeof(shown)) == shown);
    kvs_uri_redact(text, small, sizeof(small)); /* cut, and still a string */
    require(memchr(small, '\0', sizeof(small)) != NULL);
    if (rc == 0) {
        check_accepted(text, &uri);
        check_redacted(text, shown, uri.path);
    } else {
        require(rc == -EINVAL);
        check_refused(why);
        check_redacted(text, shown, !mistyped(text));
    }
    return 0;
}
