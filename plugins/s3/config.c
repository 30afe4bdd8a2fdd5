// SPDX-License-Identifier: Apache-2.0
#include "s3/config.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/ascii.h"
#include "base/core/buf.h"
#include "s3/sign.h"

#define MAX_CONNECTIONS 256
#define MAX_PREFIX 200 /* S3's keys end at 1024 bytes, and names may grow to 750 */
#define MAX_SECONDS 3600
#define MIN_PART_MIB 5 /* S3's own limit */
#define MAX_PART_MIB 1024

/* Values from the URI and the environment, before they are combined. */
struct wishes {
    char *endpoint, *region, *style, *cacert;
    unsigned long connections, seconds, part_mib;
};

static const char *environment(const char *name, const char *other, const char *fallback)
{
    const char *text = getenv(name);

    if ((!text || !*text) && other)
        text = getenv(other);
    return text && *text ? text : fallback;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Copy @text with %XX decoded. NULL for control characters, bad escapes, or out of memory. */
static char *decode(const char *text, size_t len)
{
    char *ret = malloc(len + 1);
    size_t n = 0;

    for (size_t i = 0; ret && i < len; i++) {
        int c = (unsigned char)text[i];

        if (c == '%') {
            int high = i + 2 < len ? hex_digit(text[i + 1]) : -1;
            int low = i + 2 < len ? hex_digit(text[i + 2]) : -1;

            c = high < 0 || low < 0 ? 0 : high * 16 + low;
            i += 2;
        }
        if (c < 0x20 || c == 0x7f) {
            free(ret);
            return NULL;
        }
        ret[n++] = (char)c;
    }
    if (ret)
        ret[n] = '\0';
    return ret;
}

static int read_number(const char *text, unsigned long min, unsigned long max, unsigned long *ret)
{
    char *end;

    *ret = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && *ret >= min && *ret <= max ? 0 : -EINVAL;
}

static int set(char **slot, char **value)
{
    free(*slot);
    *slot = KV_STEAL(*value);
    return 0;
}

static int read_option(const char *name, size_t len, char **value, struct wishes *ret)
{
#define IS(text) (len == strlen(text) && memcmp(name, text, len) == 0)
    if (IS("endpoint"))
        return set(&ret->endpoint, value);
    if (IS("region"))
        return set(&ret->region, value);
    if (IS("cacert"))
        return **value ? set(&ret->cacert, value) : -EINVAL;
    if (IS("style"))
        return strcmp(*value, "path") != 0 && strcmp(*value, "virtual") != 0
                   ? -EINVAL
                   : set(&ret->style, value);
    if (IS("connections"))
        return read_number(*value, 1, MAX_CONNECTIONS, &ret->connections);
    if (IS("timeout"))
        return read_number(*value, 1, MAX_SECONDS, &ret->seconds);
    if (IS("part"))
        return read_number(*value, MIN_PART_MIB, MAX_PART_MIB, &ret->part_mib);
#undef IS
    return -EINVAL;
}

static int read_options(const char *query, struct wishes *ret, struct kv_error *error)
{
    while (*query) {
        size_t len = strcspn(query, "&"), name_len = strcspn(query, "=&");
        char *value = NULL;
        int failed = -EINVAL;

        if (name_len < len && name_len > 0) {
            value = decode(query + name_len + 1, len - name_len - 1);
            failed = value ? read_option(query, name_len, &value, ret) : -EINVAL;
        }
        free(value);
        if (failed)
            return kv_fail(error, -EINVAL, 0,
                           "option \"%.*s\": known are endpoint=URL, region=NAME, "
                           "style=path|virtual, connections=1-256, timeout=SECONDS, part=5-1024, "
                           "cacert=FILE",
                           (int)KV_MIN(name_len, (size_t)40), query);
        query += len + (query[len] == '&');
    }
    return 0;
}

static int read_bucket(const char *text, size_t len, char **ret, struct kv_error *error)
{
    if (memchr(text, '@', len) || memchr(text, ':', len))
        return kv_fail(error, -EINVAL, 0,
                       "keys don't belong in the URI: set AWS_ACCESS_KEY_ID and "
                       "AWS_SECRET_ACCESS_KEY; a server goes into ?endpoint=");
    if (len < 1 || len > 255 || text[0] == '.' ||
        strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") < len)
        return kv_fail(error, -EINVAL, 0, "no bucket in s3://BUCKET/PREFIX");
    *ret = strndup(text, len);
    return *ret ? 0 : kv_fail(error, -ENOMEM, 0, "no memory");
}

static int read_prefix(const char *text, size_t len, char **ret, struct kv_error *error)
{
    struct kv_buf framed = KV_BUF_INIT;

    while (len && *text == '/') {
        text++;
        len--;
    }
    while (len && text[len - 1] == '/')
        len--;
    kv_buf_printf(&framed, "/%.*s/", (int)KV_MIN(len, (size_t)MAX_PREFIX), text);
    if (len > MAX_PREFIX || strstr(kv_buf_cstr(&framed), "/./") ||
        strstr(kv_buf_cstr(&framed), "/../") || (len && strstr(kv_buf_cstr(&framed), "//"))) {
        kv_buf_fini(&framed);
        return kv_fail(error, -EINVAL, 0,
                       "the prefix is too long, or has a part that is empty, "
                       "\".\" or \"..\"");
    }
    *ret = len ? strdup(kv_buf_cstr(&framed) + 1) : strdup("");
    kv_buf_fini(&framed);
    return *ret ? 0 : kv_fail(error, -ENOMEM, 0, "no memory");
}

/* Split http[s]://HOST[:PORT][/]. */
static int split_endpoint(const char *text, char *scheme, size_t scheme_size, const char **ret_host,
                          size_t *ret_len)
{
    const char *host = strstr(text, "://");
    size_t len;

    if (!host || (kv_ncasecmp(text, "http://", 7) != 0 && kv_ncasecmp(text, "https://", 8) != 0))
        return -EINVAL;
    snprintf(scheme, scheme_size, "%s", kv_ncasecmp(text, "https", 5) == 0 ? "https" : "http");
    host += 3;
    len = strcspn(host, "/");
    if (len == 0 || len > 255 || (host[len] == '/' && host[len + 1]) ||
        strcspn(host, "@?# \\\"") < len)
        return -EINVAL;
    *ret_host = host;
    *ret_len = len;
    return 0;
}

/* curl leaves a scheme's own port out of the Host header, and both sides must sign the same. */
static size_t without_default_port(const char *scheme, const char *host, size_t len)
{
    const char *port = strcmp(scheme, "https") == 0 ? ":443" : ":80";
    size_t port_len = strlen(port);

    return len > port_len && memcmp(host + len - port_len, port, port_len) == 0 ? len - port_len
                                                                                : len;
}

static int place(const struct wishes *wishes, struct s3_config *ret, struct kv_error *error)
{
    char aws[160], scheme[8];
    const char *given = wishes->endpoint, *host;
    struct kv_buf base = KV_BUF_INIT;
    bool virtual;
    size_t len;

    if (!given)
        given = environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", NULL);
    snprintf(aws, sizeof(aws), "https://s3.%.100s.amazonaws.com", ret->region);
    if (split_endpoint(given ? given : aws, scheme, sizeof(scheme), &host, &len))
        return kv_fail(error, -EINVAL, 0, "the endpoint is not http[s]://HOST[:PORT]");
    len = without_default_port(scheme, host, len);
    /* A dot in a bucket's name breaks the certificate of BUCKET.HOST. */
    virtual = wishes->style ? strcmp(wishes->style, "virtual") == 0
                            : !given && !strchr(ret->bucket, '.');
    if (asprintf(&ret->host, "%s%s%.*s", virtual ? ret->bucket : "", virtual ? "." : "", (int)len,
                 host) < 0)
        ret->host = NULL;
    if (!ret->host || asprintf(&ret->endpoint, "%s://%s", scheme, ret->host) < 0)
        ret->endpoint = NULL;
    kv_buf_putc(&base, '/');
    if (!virtual) {
        s3_encode(&base, ret->bucket, strlen(ret->bucket), 0);
        kv_buf_putc(&base, '/');
    }
    ret->root = base.error ? NULL : strdup(kv_buf_cstr(&base));
    s3_encode(&base, ret->prefix, strlen(ret->prefix), 1);
    ret->base = base.error ? NULL : strdup(kv_buf_cstr(&base));
    kv_buf_fini(&base);
    return ret->endpoint && ret->root && ret->base ? 0 : kv_fail(error, -ENOMEM, 0, "no memory");
}

static int take_authorities(struct wishes *wishes, struct s3_config *ret, struct kv_error *error)
{
    const char *given = environment("AWS_CA_BUNDLE", NULL, NULL);

    ret->cacert = KV_STEAL(wishes->cacert);
    if (!ret->cacert && given) {
        ret->cacert = strdup(given);
        if (!ret->cacert)
            return kv_fail(error, -ENOMEM, 0, "no memory");
    }
    if (ret->cacert && access(ret->cacert, R_OK) < 0)
        return kv_fail(error, -EINVAL, 0, "authorities in %.200s: %s", ret->cacert,
                       strerror(errno));
    return 0;
}

static int take_keys(struct s3_config *ret, struct kv_error *error)
{
    const char *access_key = getenv("AWS_ACCESS_KEY_ID");
    const char *secret_key = getenv("AWS_SECRET_ACCESS_KEY");
    const char *token = environment("AWS_SESSION_TOKEN", NULL, NULL);

    if (!access_key || !*access_key || !secret_key || !*secret_key)
        return kv_fail(error, -EINVAL, 0,
                       "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set");
    if (strpbrk(access_key, "\r\n") || (token && strpbrk(token, "\r\n")))
        return kv_fail(error, -EINVAL, 0, "a key in the environment has a line break");
    ret->access_key = strdup(access_key);
    ret->secret_key = strdup(secret_key);
    ret->token = token ? strdup(token) : NULL;
    return ret->access_key && ret->secret_key && (ret->token || !token)
               ? 0
               : kv_fail(error, -ENOMEM, 0, "no memory");
}

int s3_config_read(const char *uri, struct s3_config *ret, struct kv_error *error)
{
    struct wishes wishes = {.connections = 16, .seconds = 60, .part_mib = 16};
    size_t bucket_len, path_len;
    int failed;

    memset(ret, 0, sizeof(*ret));
    if (!uri || strncmp(uri, "s3://", 5) != 0)
        return kv_fail(error, -EINVAL, 0, "not s3://BUCKET/PREFIX");
    uri += 5;
    bucket_len = strcspn(uri, "/?");
    path_len = strcspn(uri + bucket_len, "?");
    failed = read_bucket(uri, bucket_len, &ret->bucket, error);
    if (!failed)
        failed = read_prefix(uri + bucket_len, path_len, &ret->prefix, error);
    uri += bucket_len + path_len;
    if (!failed && *uri == '?')
        failed = read_options(uri + 1, &wishes, error);
    if (!failed) {
        ret->region =
            strdup(wishes.region ? wishes.region
                                 : environment("AWS_REGION", "AWS_DEFAULT_REGION", "us-east-1"));
        if (!ret->region)
            failed = kv_fail(error, -ENOMEM, 0, "no memory");
        else if (strlen(ret->region) > 60 || strpbrk(ret->region, "/ \r\n"))
            failed = kv_fail(error, -EINVAL, 0, "not a region's name");
    }
    if (!failed)
        failed = place(&wishes, ret, error);
    if (!failed)
        failed = take_keys(ret, error);
    if (!failed)
        failed = take_authorities(&wishes, ret, error);
    ret->connections = (unsigned)wishes.connections;
    ret->timeout_ms = wishes.seconds * 1000;
    ret->stall_ms = KV_MAX(ret->timeout_ms / 4, 1000u);
    ret->part_bytes = wishes.part_mib << 20;
    free(wishes.endpoint);
    free(wishes.region);
    free(wishes.style);
    free(wishes.cacert);
    if (failed)
        s3_config_fini(ret);
    return failed;
}

void s3_config_fini(struct s3_config *config)
{
    if (config->secret_key)
        explicit_bzero(config->secret_key, strlen(config->secret_key));
    free(config->bucket);
    free(config->prefix);
    free(config->endpoint);
    free(config->host);
    free(config->root);
    free(config->base);
    free(config->region);
    free(config->access_key);
    free(config->secret_key);
    free(config->token);
    free(config->cacert);
    memset(config, 0, sizeof(*config));
}
