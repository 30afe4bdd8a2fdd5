// SPDX-License-Identifier: Apache-2.0
#include "indexer/zmq/target.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/core/error.h"

void ki_target_init(struct ki_target *target, const char *endpoint)
{
    uint8_t address[16];

    memset(target, 0, sizeof(*target));
    if (!endpoint)
        return;
    target->place.topic = "";
    if (ki_place_parse(endpoint, &target->place, NULL) < 0) {
        target->where = endpoint; /* which connecting refuses */
        return;
    }
    target->named = target->place.endpoint.scheme == KV_SCHEME_TCP && !target->place.binds &&
                    !kv_endpoint_address(&target->place.endpoint, address);
    target->where = target->named ? NULL : target->place.address;
}

static void write_endpoint(const struct ki_target *target, const struct kv_address *address,
                           char *ret, size_t size)
{
    bool ipv6 = address->family == AF_INET6;

    snprintf(ret, size, "tcp://%s%s%s:%u", ipv6 ? "[" : "", address->text, ipv6 ? "]" : "",
             (unsigned)target->place.endpoint.port);
}

int ki_target_find(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms)
{
    struct kv_addresses found;
    int rc;

    if (!target->named)
        return 0;
    rc = kv_resolver_ask(resolver, target->place.endpoint.host, max_age_ms, &found);
    if (rc < 0)
        return rc;
    write_endpoint(target, &found.items[target->turn % found.n], target->text,
                   sizeof(target->text));
    target->where = target->text;
    return 0;
}

int ki_target_turn(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms,
                   bool others)
{
    char text[sizeof(target->text)];
    struct kv_addresses found;
    int rc;

    if (!target->named || !target->where)
        return 0;
    rc = kv_resolver_ask(resolver, target->place.endpoint.host, max_age_ms, &found);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < found.n; i++) {
        write_endpoint(target, &found.items[i], text, sizeof(text));
        if (strcmp(text, target->where) != 0)
            continue;
        target->turn = others ? (i + 1) % found.n : i;
        return target->turn != i;
    }
    target->turn = 0;
    return 1;
}
