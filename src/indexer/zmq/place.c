// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/place.h"

#include <string.h>

#include "base/core/error.h"
#include "base/net/endpoint_rule.h"

static const char bind_prefix[] = "bind:";
#define PREFIX_LEN (sizeof(bind_prefix) - 1)

static bool has_prefix(const char *text)
{
    return strncmp(text, bind_prefix, PREFIX_LEN) == 0;
}

static int reject(const char **ret_why, const char *why)
{
    if (ret_why)
        *ret_why = why;
    return -EINVAL;
}

/* Parse an address to listen on. */
static int parse_bound(struct ki_place *place, const char **ret_why)
{
    uint8_t address[16];
    int rc = kv_endpoint_parse(place->address, &place->endpoint, ret_why);

    if (rc < 0)
        return rc;
    if (place->endpoint.scheme != KV_SCHEME_TCP)
        return reject(ret_why, "only tcp:// can be listened on");
    if (place->endpoint.any_port)
        return reject(ret_why, "no port to listen on");
    if (!place->endpoint.wildcard && !kv_endpoint_address(&place->endpoint, address))
        return reject(ret_why, "a name is nothing to listen on: use * or an address");
    return 0;
}

int ki_place_parse(const char *text, struct ki_place *ret, const char **ret_why)
{
    const char *start, *end;

    ret->binds = has_prefix(text);
    start = ret->binds ? text + PREFIX_LEN : text;
    /* A path may have any character. */
    end = strncmp(start, "tcp://", 6) == 0 ? strchrnul(start, '#') : start + strlen(start);
    if ((size_t)(end - start) >= sizeof(ret->address))
        return reject(ret_why, "too long");
    memcpy(ret->address, start, (size_t)(end - start));
    ret->address[end - start] = '\0';
    ret->topic = *end ? end + 1 : end;
    if (*end && !*ret->topic)
        return reject(ret_why, "no topic behind `#`");
    return ret->binds ? parse_bound(ret, ret_why)
                      : kv_endpoint_parse_peer(ret->address, &ret->endpoint, ret_why);
}

int ki_place_check_rule(const char *rule, const char **ret_why)
{
    struct kv_endpoint_rule parsed;

    return kv_endpoint_rule_parse(rule + (has_prefix(rule) ? PREFIX_LEN : 0), &parsed, ret_why);
}

bool ki_place_is_admitted(const char *rule, const struct ki_place *place)
{
    bool binds = has_prefix(rule);
    struct kv_endpoint_rule parsed;

    if (kv_endpoint_rule_parse(rule + (binds ? PREFIX_LEN : 0), &parsed, NULL) < 0)
        return false;
    return (binds == place->binds || (!binds && parsed.kind == KV_RULE_ALL)) &&
           kv_endpoint_rule_admits(&parsed, &place->endpoint);
}
