// SPDX-License-Identifier: Apache-2.0
// Rules that admit endpoints (--allow-endpoint). A rule is compared with a parsed endpoint, never with its text, so
// that no spelling of a foreign address looks like an admitted one.
//
//     *                              every endpoint
//     tcp://*                        every TCP endpoint
//     tcp://NAME                     one host name, in any case, with or without a final dot
//     tcp://*.DOMAIN                 host names below DOMAIN; DOMAIN itself isn't below it
//     tcp://ADDRESS  tcp://NET/BITS  an IPv4 address or network
//     tcp://10.0.*                   the same as tcp://10.0.0.0/16: whole numbers only
//     tcp://[ADDRESS]  tcp://[NET/BITS]  the same for IPv6
//     ipc://PATH  ipc://FOLDER/*     one path; every path below a folder (ipc://*: every path)
//
// TCP rules may end in :PORT, :FIRST-LAST or :*; without, every port is admitted. Networks admit addresses only: a
// host name may resolve to anything. ::ffff:10.0.0.1 is 10.0.0.1.
#ifndef KV_BASE_ENDPOINT_RULE_H
#define KV_BASE_ENDPOINT_RULE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/net/endpoint.h"

enum kv_rule_kind {
    KV_RULE_ALL,
    KV_RULE_HOSTS,  /* every TCP host */
    KV_RULE_NAME,   /* text is the host name */
    KV_RULE_DOMAIN, /* text is the end of the names, with its first dot */
    KV_RULE_NET,
    KV_RULE_PATH, /* text is the path */
    KV_RULE_BELOW /* text is the folder with its final slash; empty: every path */
};

struct kv_endpoint_rule {
    enum kv_rule_kind kind;
    char text[256];  /* host names in lower case, without a final dot */
    uint8_t net[16]; /* IPv4 as ::ffff:0:0/96 */
    unsigned bits;   /* length of the network's prefix in bits */
    uint16_t first_port, last_port;
};

/** Parse @text. Returns 0, or -EINVAL with *ret_why a fixed phrase. */
int kv_endpoint_rule_parse(const char *text, struct kv_endpoint_rule *ret, const char **ret_why);

/** Return true when @rule admits @endpoint, which kv_endpoint_parse has filled. */
bool kv_endpoint_rule_admits(const struct kv_endpoint_rule *rule,
                             const struct kv_endpoint *endpoint);

#endif
