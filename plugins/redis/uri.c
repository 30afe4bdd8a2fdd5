// SPDX-License-Identifier: Apache-2.0
#include "redis/uri.h"

#include <ctype.h>

#include "base/args/args.h"

#define DEFAULT_PORT 6379
#define DEFAULT_TIMEOUT_MS 5000
#define MAX_TIMEOUT_MS 3600000
#define DEFAULT_BYTES ((uint64_t)256 << 20)
#define MAX_DB 1000000

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decode %XX of [@text, @end) into @out. Refuses a NUL, and a text that doesn't fit. */
static int decode(const char *text, const char *end, char *out, size_t size)
{
    size_t n = 0;

    while (text < end) {
        int c = (unsigned char)*text++;

        if (c == '%') {
            int high = text < end ? hex_digit(*text++) : -1;
            int low = text < end ? hex_digit(*text++) : -1;

            if (high < 0 || low < 0)
                return -EINVAL;
            c = 16 * high + low;
        }
        if (c == 0 || n + 1 >= size)
            return -EINVAL;
        out[n++] = (char)c;
    }
    out[n] = '\0';
    return 0;
}

static int parse_number(const char *text, uint64_t max, uint64_t *ret)
{
    uint64_t value;

    if (kv_parse_u64(text, &value) < 0 || value > max)
        return -EINVAL;
    *ret = value;
    return 0;
}

/* Parse host, host:port, [v6] or [v6]:port. */
static int parse_address(const char *text, const char *end, struct rds_address *ret)
{
    const char *host = text, *host_end, *colon;
    char port[8];
    uint64_t number = DEFAULT_PORT;

    if (text < end && *text == '[') {
        host++;
        host_end = memchr(text, ']', (size_t)(end - text));
        if (!host_end)
            return -EINVAL;
        colon = host_end + 1;
    } else {
        colon = memchr(text, ':', (size_t)(end - text));
        host_end = colon ? colon : end;
        colon = host_end;
    }
    if (host == host_end || (colon < end && *colon != ':'))
        return -EINVAL;
    if (colon < end && (decode(colon + 1, end, port, sizeof(port)) < 0 ||
                        parse_number(port, 65535, &number) < 0 || number == 0))
        return -EINVAL;
    ret->port = (uint16_t)number;
    return decode(host, host_end, ret->host, sizeof(ret->host));
}

static int parse_authority(const char *text, const char *end, struct rds_uri *uri,
                           struct kv_error *error)
{
    const char *at = memchr(text, '@', (size_t)(end - text));

    if (at) {
        if (memchr(text, ':', (size_t)(at - text)))
            return kv_fail(error, -EINVAL, 0,
                           "a password doesn't belong in the URI: set KV_STORE_REDIS_PASSWORD");
        if (decode(text, at, uri->user, sizeof(uri->user)) < 0)
            return kv_fail(error, -EINVAL, 0, "invalid user");
        text = at + 1;
    }
    for (;;) {
        const char *comma = memchr(text, ',', (size_t)(end - text));
        const char *stop = comma ? comma : end;

        if (uri->n_seeds == RDS_MAX_SEEDS || (uri->n_seeds == 1 && !uri->cluster))
            return kv_fail(error, -EINVAL, 0, "too many addresses");
        if (parse_address(text, stop, &uri->seeds[uri->n_seeds]) < 0)
            return kv_fail(error, -EINVAL, 0, "invalid address");
        uri->n_seeds++;
        if (!comma)
            return 0;
        text = comma + 1;
    }
}

static int parse_bytes(const char *text, uint64_t *ret)
{
    return kv_parse_size(text, ret) < 0 || *ret == 0 ? -EINVAL : 0;
}

static int set_option(struct rds_uri *uri, const char *name, const char *value)
{
    uint64_t number = 0;
    int err;

    if (strcmp(name, "db") == 0) {
        err = parse_number(value, MAX_DB, &number);
        uri->db = (uint32_t)number;
        return err;
    }
    if (strcmp(name, "timeout_ms") == 0) {
        err = parse_number(value, MAX_TIMEOUT_MS, &number);
        uri->timeout_ms = (uint32_t)number;
        return number == 0 ? -EINVAL : err;
    }
    if (strcmp(name, "buffer") == 0)
        return parse_bytes(value, &uri->buffer_bytes);
    if (strcmp(name, "cache") == 0)
        return parse_bytes(value, &uri->cache_bytes);
    return -ENOENT;
}

static int parse_option(const char *text, const char *end, struct rds_uri *uri,
                        struct kv_error *error)
{
    const struct {
        const char *name;
        char *out;
        size_t size;
    } texts[] = {{"prefix", uri->prefix, sizeof(uri->prefix)},
                 {"cacert", uri->cacert, sizeof(uri->cacert)},
                 {"cert", uri->cert, sizeof(uri->cert)},
                 {"key", uri->key, sizeof(uri->key)}};
    const char *equal = memchr(text, '=', (size_t)(end - text));
    char name[16], value[32];
    int err;

    if (!equal || decode(text, equal, name, sizeof(name)) < 0)
        return kv_fail(error, -EINVAL, 0, "options are NAME=VALUE");
    for (size_t i = 0; i < KV_COUNT(texts); i++)
        if (strcmp(name, texts[i].name) == 0)
            return decode(equal + 1, end, texts[i].out, texts[i].size) < 0
                       ? kv_fail(error, -EINVAL, 0, "invalid value of option %s", name)
                       : 0;
    if (strcmp(name, "password") == 0)
        return kv_fail(error, -EINVAL, 0,
                       "a password doesn't belong in the URI: set KV_STORE_REDIS_PASSWORD");
    err = decode(equal + 1, end, value, sizeof(value));
    if (err == 0)
        err = set_option(uri, name, value);
    if (err == -ENOENT)
        return kv_fail(error, -EINVAL, 0, "unknown option %s", name);
    return err < 0 ? kv_fail(error, err, 0, "invalid value of option %s", name) : 0;
}

static int parse_options(const char *text, struct rds_uri *uri, struct kv_error *error)
{
    while (*text) {
        size_t len = strcspn(text, "&");
        int err = parse_option(text, text + len, uri, error);

        if (err < 0)
            return err;
        text += len + (text[len] == '&');
    }
    return 0;
}

static int parse_path(const char *text, const char *end, struct rds_uri *uri,
                      struct kv_error *error)
{
    char db[16];
    uint64_t number;

    while (end > text && end[-1] == '/')
        end--; /* consumers may add or remove the slash */
    if (text == end)
        return 0;
    if (decode(text + 1, end, db, sizeof(db)) < 0 || parse_number(db, MAX_DB, &number) < 0)
        return kv_fail(error, -EINVAL, 0, "the path must be the number of a database");
    uri->db = (uint32_t)number;
    return 0;
}

/* Return the part behind "://", or NULL. */
static const char *parse_scheme(const char *text, struct rds_uri *uri, bool *ret_unix)
{
    static const struct {
        const char *name;
        bool tls, cluster, local;
    } schemes[] = {
        {"redis://", false, false, false},        {"valkey://", false, false, false},
        {"rediss://", true, false, false},        {"redis+cluster://", false, true, false},
        {"rediss+cluster://", true, true, false}, {"redis+unix://", false, false, true}};

    for (size_t i = 0; i < KV_COUNT(schemes); i++)
        if (strncmp(text, schemes[i].name, strlen(schemes[i].name)) == 0) {
            uri->tls = schemes[i].tls;
            uri->cluster = schemes[i].cluster;
            *ret_unix = schemes[i].local;
            return text + strlen(schemes[i].name);
        }
    return NULL;
}

int rds_uri_parse(const char *text, struct rds_uri *ret, struct kv_error *error)
{
    const char *end, *slash;
    bool local = false;
    int err = 0;

    memset(ret, 0, sizeof(*ret));
    ret->timeout_ms = DEFAULT_TIMEOUT_MS;
    ret->buffer_bytes = ret->cache_bytes = DEFAULT_BYTES;
    text = parse_scheme(text, ret, &local);
    if (!text)
        return kv_fail(error, -EINVAL, 0, "not a URI of this backend");
    end = text + strcspn(text, "?");
    if (local) {
        if (*text != '/' || decode(text, end, ret->path, sizeof(ret->path)) < 0)
            return kv_fail(error, -EINVAL, 0, "invalid path of a socket");
        ret->n_seeds = 1;
    } else {
        slash = memchr(text, '/', (size_t)(end - text));
        err = parse_authority(text, slash ? slash : end, ret, error);
        if (err == 0 && slash)
            err = parse_path(slash, end, ret, error);
    }
    if (err == 0 && *end)
        err = parse_options(end + 1, ret, error);
    if (err == 0 && ret->cluster && ret->db != 0)
        err = kv_fail(error, -EINVAL, 0, "a cluster has no database but 0");
    return err;
}
