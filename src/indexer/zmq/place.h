// SPDX-License-Identifier: Apache-2.0
// A worker's endpoint as it is registered: [bind:]ENDPOINT[#TOPIC].
//
//     tcp://engine:5557                  connect to the engine's publisher
//     bind:tcp://*:5557                  the publisher connects: listen there, on every address or one
//     ...#kv@pod@model                   follow the messages of this topic only (tcp)
//
// Publishers that connect to one address are told apart by their topic.
#ifndef KV_INDEXER_ZMQ_PLACE_H
#define KV_INDEXER_ZMQ_PLACE_H

#include <stdbool.h>

#include "base/net/endpoint.h"

struct ki_place {
    bool binds;
    struct kv_endpoint endpoint;
    char address[320]; /* the endpoint's text, alone */
    const char *topic; /* points into the parsed text; "": every topic */
};

/** Parse @text. Returns 0, or -EINVAL with *@ret_why a fixed phrase. */
int ki_place_parse(const char *text, struct ki_place *ret, const char **ret_why);

/**
 * Check a rule of --allow-endpoint: as in endpoint_rule.h, behind `bind:` for addresses to listen on.
 * Returns 0, or -EINVAL with *@ret_why a fixed phrase.
 */
int ki_place_check_rule(const char *rule, const char **ret_why);
/** Return true when @rule, which ki_place_check_rule accepts, admits @place. */
bool ki_place_is_admitted(const char *rule, const struct ki_place *place);

#endif
