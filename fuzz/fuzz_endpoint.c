// SPDX-License-Identifier: Apache-2.0
/*
 * Endpoints and allow patterns. What is accepted can be written back and parses the same; what
 * isn't gets one of the known phrases. Patterns match as the definition says.
 */
#include <stdio.h>

#include "base/endpoint.h"
#include "base/error.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void check_accepted(const struct kv_endpoint *e)
{
    static const char *const schemes[] = {"tcp", "ipc", "inproc"};
    struct kv_endpoint again;
    char text[300], port[8];

    require(memchr(e->host, '\0', sizeof(e->host)) != NULL && e->host[0] != '\0');
    require(e->scheme == KV_SCHEME_TCP || (!e->ipv6 && !e->wildcard && e->port == 0));
    require(!e->any_port || e->port == 0);
    snprintf(port, sizeof(port), e->any_port ? "*" : "%u", (unsigned)e->port);
    snprintf(text, sizeof(text), "%s://%s%s%s%s%s", schemes[e->scheme], e->ipv6 ? "[" : "", e->host,
             e->ipv6 ? "]" : "", e->scheme == KV_SCHEME_TCP ? ":" : "",
             e->scheme == KV_SCHEME_TCP ? port : "");
    require(kv_endpoint_parse(text, &again, NULL) == 0);
    require(again.scheme == e->scheme && again.port == e->port && again.any_port == e->any_port &&
            again.wildcard == e->wildcard && again.ipv6 == e->ipv6 &&
            strcmp(again.host, e->host) == 0);
}

static void check_refused(const char *why)
{
    static const char *const phrases[] = {
        "missing scheme",   "missing address",     "missing TCP port",
        "missing TCP host", "missing closing `]`", "invalid TCP port",
        "invalid TCP host", "unsupported scheme",  "too long"};

    for (size_t i = 0; i < KV_COUNT(phrases); i++)
        if (strcmp(why, phrases[i]) == 0)
            return;
    abort();
}

/* By the definition: row[i] tells whether the pattern so far matches the first i bytes. */
static bool matches(const char *pattern, const char *text)
{
    size_t len = strlen(text);
    bool *row = calloc(len + 1, sizeof(*row)), result;

    require(row != NULL);
    row[0] = true;
    for (; *pattern; pattern++) {
        bool before = row[0];

        row[0] = *pattern == '*' && row[0];
        for (size_t i = 1; i <= len; i++) {
            bool above = row[i];

            row[i] = *pattern == '*' ? above || row[i - 1] : before && *pattern == text[i - 1];
            before = above;
        }
    }
    result = row[len];
    free(row);
    return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_endpoint endpoint;
    const char *why = NULL;
    char text[1024], *pattern;

    if (size >= sizeof(text))
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    pattern = strchr(text, '\n'); /* second line: a pattern */
    if (pattern)
        *pattern++ = '\0';
    if (kv_endpoint_parse(text, &endpoint, &why) == 0)
        check_accepted(&endpoint);
    else
        check_refused(why);
    if (pattern)
        require(kv_pattern_match(pattern, text) == matches(pattern, text));
    return 0;
}
