// SPDX-License-Identifier: Apache-2.0
#include "base/net/endpoint_rule.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/core/error.h"

static int reject(const char **ret_why, const char *why)
{
    if (ret_why)
        *ret_why = why;
    return -EINVAL;
}

/* Read a decimal number up to @max and move *@p behind it. */
static bool read_number(const char **p, unsigned long max, unsigned long *ret)
{
    const char *start = *p;
    unsigned long value = 0;

    while (kv_is_digit(**p) && *p - start < 5)
        value = value * 10 + (unsigned long)(*(*p)++ - '0');
    *ret = value;
    return *p > start && value <= max && !kv_is_digit(**p);
}

/* Parse the ports of a rule: "", ":*", ":PORT" or ":FIRST-LAST". */
static bool parse_ports(const char *text, struct kv_endpoint_rule *ret)
{
    unsigned long first, last;

    ret->first_port = 0;
    ret->last_port = UINT16_MAX;
    if (!*text || strcmp(text, ":*") == 0)
        return true;
    if (*text++ != ':' || !read_number(&text, UINT16_MAX, &first))
        return false;
    last = first;
    if (*text == '-') {
        text++;
        if (!read_number(&text, UINT16_MAX, &last))
            return false;
    }
    ret->first_port = (uint16_t)first;
    ret->last_port = (uint16_t)last;
    return !*text && first <= last;
}

static void map_ipv4(const struct in_addr *in, uint8_t ret[16])
{
    memset(ret, 0, 10);
    ret[10] = ret[11] = 0xff;
    memcpy(ret + 12, &in->s_addr, 4);
}

static bool bit_at(const uint8_t net[16], unsigned bit)
{
    return net[bit / 8] >> (7 - bit % 8) & 1;
}

/*
 * Parse ADDRESS or ADDRESS/BITS. Refuse set bits behind the network's: 10.0.0.5/16 may mean a
 * network or an address.
 */
static int parse_net(char *text, bool ipv6, struct kv_endpoint_rule *ret, const char **ret_why)
{
    unsigned long max = ipv6 ? 128 : 32, bits = max;
    char *slash = strchr(text, '/');
    struct in6_addr in6;
    struct in_addr in;

    if (slash) {
        const char *p = slash + 1;

        *slash = '\0';
        if (!read_number(&p, max, &bits) || *p)
            return reject(ret_why, "invalid length of a network");
    }
    if (inet_pton(ipv6 ? AF_INET6 : AF_INET, text, ipv6 ? (void *)&in6 : (void *)&in) != 1)
        return reject(ret_why, "invalid address");
    if (ipv6)
        memcpy(ret->net, &in6, 16);
    else
        map_ipv4(&in, ret->net);
    ret->bits = (unsigned)(bits + (ipv6 ? 0 : 96));
    ret->kind = KV_RULE_NET;
    for (unsigned i = ret->bits; i < 128; i++)
        if (bit_at(ret->net, i))
            return reject(ret_why, "the address has bits behind its network's length");
    return 0;
}

/* Parse "10.*" as 10.0.0.0/8: 1 to 3 numbers, then one asterisk. */
static int parse_octets(const char *text, struct kv_endpoint_rule *ret, const char **ret_why)
{
    struct in_addr in = {0};
    unsigned long octet;
    unsigned n = 0;

    while (n < 4 && kv_is_digit(*text)) {
        if (!read_number(&text, 255, &octet) || *text++ != '.')
            return reject(ret_why, "invalid address");
        ((uint8_t *)&in.s_addr)[n++] = (uint8_t)octet;
    }
    if (n == 0 || n > 3 || strcmp(text, "*") != 0)
        return reject(ret_why, "an asterisk stands for whole numbers of an address");
    map_ipv4(&in, ret->net);
    ret->bits = 96 + 8 * n;
    ret->kind = KV_RULE_NET;
    return 0;
}

/* Copy @host in lower case, without a final dot. */
static void fold(const char *host, char ret[256])
{
    size_t len = strlen(host);

    if (len && host[len - 1] == '.')
        len--;
    for (size_t i = 0; i < len; i++)
        ret[i] = kv_lower(host[i]);
    ret[len] = '\0';
}

static int parse_name(const char *host, struct kv_endpoint_rule *ret, const char **ret_why)
{
    bool domain = host[0] == '*' && host[1] == '.';

    if (!kv_endpoint_is_name(domain ? host + 2 : host))
        return reject(ret_why, strchr(host, '*') ? "an asterisk stands for whole labels in front"
                                                 : "invalid host name");
    fold(domain ? host + 1 : host, ret->text);
    ret->kind = domain ? KV_RULE_DOMAIN : KV_RULE_NAME;
    return 0;
}

static int parse_tcp(const char *address, struct kv_endpoint_rule *ret, const char **ret_why)
{
    bool ipv6 = *address == '[';
    const char *host = address + ipv6, *end = ipv6 ? strchr(host, ']') : strchrnul(host, ':');
    char copy[256];

    if (!end)
        return reject(ret_why, "missing closing `]`");
    if (!parse_ports(end + ipv6, ret))
        return reject(ret_why, "invalid TCP port");
    snprintf(copy, sizeof(copy), "%.*s", (int)(end - host), host);
    if (!*copy)
        return reject(ret_why, "missing TCP host");
    if (ipv6 || strchr(copy, '/'))
        return parse_net(copy, ipv6, ret, ret_why);
    if (strcmp(copy, "*") == 0) {
        ret->kind = KV_RULE_HOSTS;
        return 0;
    }
    if (kv_is_digit(*copy) && strchr(copy, '*'))
        return parse_octets(copy, ret, ret_why);
    if (kv_endpoint_is_name(copy))
        return parse_name(copy, ret, ret_why);
    return kv_is_digit(*copy) ? parse_net(copy, false, ret, ret_why)
                              : parse_name(copy, ret, ret_why);
}

/* Return true when no part of @path is empty, "." or "..". */
static bool is_plain_path(const char *path)
{
    for (;;) {
        size_t len = strcspn(path, "/");

        if (len == 0 || (len == 1 && *path == '.') || (len == 2 && memcmp(path, "..", 2) == 0))
            return false;
        if (!path[len])
            return true;
        path += len + 1;
    }
}

static int parse_ipc(const char *path, struct kv_endpoint_rule *ret, const char **ret_why)
{
    size_t len = strlen(path);
    bool below = path[len - 1] == '*' && (len == 1 || path[len - 2] == '/');

    if (memchr(path, '*', len - below))
        return reject(ret_why, "an asterisk stands for all that is in a folder");
    snprintf(ret->text, sizeof(ret->text), "%.*s", (int)(len - below), path);
    ret->kind = below ? KV_RULE_BELOW : KV_RULE_PATH;
    return 0;
}

int kv_endpoint_rule_parse(const char *text, struct kv_endpoint_rule *ret, const char **ret_why)
{
    struct kv_endpoint_rule rule = {.kind = KV_RULE_ALL};
    const char *address = strstr(text, "://");
    int rc = 0;

    if (!address && strcmp(text, "*") != 0)
        return reject(ret_why, "missing scheme");
    if (address) {
        address += 3;
        if (!*address)
            return reject(ret_why, "missing address");
        if (strlen(address) >= sizeof(rule.text))
            return reject(ret_why, "too long");
        if (strncmp(text, "tcp://", 6) == 0)
            rc = parse_tcp(address, &rule, ret_why);
        else if (strncmp(text, "ipc://", 6) == 0)
            rc = parse_ipc(address, &rule, ret_why);
        else
            rc = reject(ret_why, "unsupported scheme");
    }
    if (rc == 0)
        *ret = rule;
    return rc;
}

/* -- admission --------------------------------------------------------------------------------- */

static bool is_in_net(const struct kv_endpoint_rule *rule, const struct kv_endpoint *e)
{
    uint8_t address[16];

    if (!kv_endpoint_address(e, address))
        return false;
    for (unsigned i = 0; i < rule->bits; i++)
        if (bit_at(address, i) != bit_at(rule->net, i))
            return false;
    return true;
}

static bool has_host(const struct kv_endpoint_rule *rule, const struct kv_endpoint *e)
{
    char host[256];
    size_t len, tail = strlen(rule->text);

    if (rule->kind == KV_RULE_HOSTS)
        return true;
    if (rule->kind == KV_RULE_NET)
        return is_in_net(rule, e);
    if (e->ipv6 || e->wildcard)
        return false;
    fold(e->host, host);
    len = strlen(host);
    if (rule->kind == KV_RULE_NAME)
        return strcmp(host, rule->text) == 0;
    return rule->kind == KV_RULE_DOMAIN && len > tail && strcmp(host + len - tail, rule->text) == 0;
}

static bool has_path(const struct kv_endpoint_rule *rule, const struct kv_endpoint *e)
{
    size_t len = strlen(rule->text);

    if (rule->kind == KV_RULE_PATH)
        return strcmp(e->host, rule->text) == 0;
    return rule->kind == KV_RULE_BELOW && strncmp(e->host, rule->text, len) == 0 &&
           (len == 0 || is_plain_path(e->host + len));
}

bool kv_endpoint_rule_admits(const struct kv_endpoint_rule *rule,
                             const struct kv_endpoint *endpoint)
{
    if (rule->kind == KV_RULE_ALL)
        return true;
    if (endpoint->scheme == KV_SCHEME_IPC)
        return has_path(rule, endpoint);
    return endpoint->scheme == KV_SCHEME_TCP && endpoint->port >= rule->first_port &&
           endpoint->port <= rule->last_port && has_host(rule, endpoint);
}
