// SPDX-License-Identifier: Apache-2.0
#include "base/net/endpoint.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/un.h>

#include "base/core/ascii.h"
#include "base/core/error.h"

static int reject(const char **ret_why, const char *why)
{
    if (ret_why)
        *ret_why = why;
    return -EINVAL;
}

/* Parse a decimal port 0..65535 that fills all of @text. */
static bool parse_port(const char *text, uint16_t *ret)
{
    unsigned long value = 0;

    if (!*text || strlen(text) > 5)
        return false;
    for (; *text; text++) {
        if (!kv_is_digit(*text))
            return false;
        value = value * 10 + (unsigned long)(*text - '0');
    }
    if (value > UINT16_MAX)
        return false;
    *ret = (uint16_t)value;
    return true;
}

static bool has_only_name_characters(const char *text)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";

    return *text && text[strspn(text, allowed)] == '\0';
}

/*
 * Return true when a resolver may read @label, the last of a host name, as a number (decimal,
 * octal, hexadecimal).
 */
static bool is_number(const char *label, size_t len)
{
    const char *digits = "0123456789";

    if (len >= 2 && label[0] == '0' && (label[1] == 'x' || label[1] == 'X')) {
        label += 2;
        len -= 2;
        digits = "0123456789abcdefABCDEF";
    }
    return strspn(label, digits) >= len;
}

bool kv_endpoint_is_name(const char *text)
{
    const char *label = text;

    if (!has_only_name_characters(text))
        return false;
    for (;;) {
        size_t len = strcspn(label, ".");
        bool last = !label[len] || !label[len + 1]; /* a final dot belongs to no label */

        if (len == 0)
            return false;
        if (last)
            return !is_number(label, len);
        label += len + 1;
    }
}

bool kv_endpoint_address(const struct kv_endpoint *endpoint, uint8_t ret[16])
{
    char host[sizeof(endpoint->host)];
    struct in_addr in;

    if (endpoint->scheme != KV_SCHEME_TCP)
        return false;
    memcpy(host, endpoint->host, sizeof(host));
    if (endpoint->ipv6) {
        host[strcspn(host, "%")] = '\0';
        return inet_pton(AF_INET6, host, ret) == 1;
    }
    if (inet_pton(AF_INET, host, &in) != 1)
        return false;
    memset(ret, 0, 10);
    ret[10] = ret[11] = 0xff;
    memcpy(ret + 12, &in.s_addr, 4);
    return true;
}

/*
 * Return true for a host name or an address. libzmq accepts more forms (source addresses, say),
 * which no request may use.
 */
static bool is_host(const struct kv_endpoint *endpoint)
{
    const char *zone = strchr(endpoint->host, '%');
    uint8_t address[16];

    if (endpoint->wildcard && !endpoint->ipv6)
        return true;
    if (!kv_endpoint_address(endpoint, address))
        return !endpoint->ipv6 && kv_endpoint_is_name(endpoint->host);
    return !zone || has_only_name_characters(zone + 1);
}

static int parse_tcp(const char *address, struct kv_endpoint *ret, const char **ret_why)
{
    const char *host = address, *colon;
    size_t host_len;

    if (*address == '[') {
        const char *close = strchr(address, ']');

        if (!close)
            return reject(ret_why, "missing closing `]`");
        host = address + 1;
        host_len = (size_t)(close - host);
        colon = close[1] == ':' ? close + 1 : NULL;
        ret->ipv6 = true;
    } else {
        colon = strrchr(address, ':');
        host_len = colon ? (size_t)(colon - address) : strlen(address);
    }
    if (!colon || !colon[1])
        return reject(ret_why, "missing TCP port");
    if (host_len == 0)
        return reject(ret_why, "missing TCP host");
    if (strcmp(colon + 1, "*") != 0 && !parse_port(colon + 1, &ret->port))
        return reject(ret_why, "invalid TCP port");
    ret->any_port = ret->port == 0;
    memcpy(ret->host, host, host_len);
    ret->host[host_len] = '\0';
    ret->wildcard = strcmp(ret->host, "*") == 0;
    return is_host(ret) ? 0 : reject(ret_why, "invalid TCP host");
}

int kv_endpoint_parse(const char *text, struct kv_endpoint *ret, const char **ret_why)
{
    static const struct {
        const char *prefix;
        enum kv_scheme scheme;
    } schemes[] = {
        {"tcp://", KV_SCHEME_TCP}, {"ipc://", KV_SCHEME_IPC}, {"inproc://", KV_SCHEME_INPROC}};
    struct kv_endpoint endpoint = {0};
    const char *address = NULL;
    int rc;

    if (!strstr(text, "://"))
        return reject(ret_why, "missing scheme");
    for (size_t i = 0; i < KV_COUNT(schemes); i++) {
        if (strncmp(text, schemes[i].prefix, strlen(schemes[i].prefix)) == 0) {
            address = text + strlen(schemes[i].prefix);
            endpoint.scheme = schemes[i].scheme;
        }
    }
    if (!address)
        return reject(ret_why, "unsupported scheme");
    if (!*address)
        return reject(ret_why, "missing address");
    if (strlen(address) >= sizeof(endpoint.host) ||
        (endpoint.scheme == KV_SCHEME_IPC &&
         strlen(address) >= sizeof(((struct sockaddr_un *)NULL)->sun_path)))
        return reject(ret_why, "too long");
    if (endpoint.scheme == KV_SCHEME_TCP) {
        rc = parse_tcp(address, &endpoint, ret_why);
        if (rc)
            return rc;
    } else {
        memcpy(endpoint.host, address, strlen(address) + 1);
    }
    *ret = endpoint;
    return 0;
}

/* Return true for 0.0.0.0 and [::]. */
static bool is_unspecified(const struct kv_endpoint *endpoint)
{
    static const uint8_t v6[16] = {0}, v4[16] = {[10] = 0xff, [11] = 0xff};
    uint8_t address[16];

    return kv_endpoint_address(endpoint, address) &&
           (memcmp(address, v6, 16) == 0 || memcmp(address, v4, 16) == 0);
}

int kv_endpoint_parse_peer(const char *text, struct kv_endpoint *ret, const char **ret_why)
{
    struct kv_endpoint endpoint;
    int rc = kv_endpoint_parse(text, &endpoint, ret_why);

    if (rc)
        return rc;
    if (endpoint.wildcard || strcmp(endpoint.host, "*") == 0)
        return reject(ret_why, "`*` is no host to connect to");
    if (is_unspecified(&endpoint))
        return reject(ret_why,
                      "this address is for sockets that listen: name the machine to connect to");
    if (endpoint.any_port)
        return reject(ret_why, "no port to connect to");
    *ret = endpoint;
    return 0;
}
