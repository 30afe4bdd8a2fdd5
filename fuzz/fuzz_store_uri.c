// SPDX-License-Identifier: Apache-2.0
/* Store URIs. An accepted scheme is a safe part of a file name; the form for logs has no user,
 * password or query; a refusal has one of the known phrases. */
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "store/uri.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void check_accepted(const char *text, const struct kvs_uri *uri)
{
    size_t len = strlen(uri->scheme);
    const char *authority, *at;

    require(uri->path == (len == 0));
    if (uri->path) {
        require(!strstr(text, "://") || *text == '/' || *text == '.');
        return;
    }
    require(strncmp(text, uri->scheme, len) == 0 && strncmp(text + len, "://", 3) == 0);
    require(!strpbrk(uri->scheme, "/\\: \t%_") && *uri->scheme >= 'a' && *uri->scheme <= 'z');
    authority = text + len + 3;
    at = memrchr(authority, '@', strcspn(authority, "/?#"));
    require(!at || !memchr(authority, ':', (size_t)(at - authority)));
}

static void check_refused(const char *why)
{
    static const char *const phrases[] = {"empty", "invalid scheme", "too long",
                                          "control character", "password in the URI"};

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
    rest = strstr(text, "://");
    behind = shown + (rest + 3 - text);
    require(!strpbrk(behind, "?#"));
    at = memrchr(rest + 3, '@', strcspn(rest + 3, "/?#"));
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
    }
    return 0;
}
