// SPDX-License-Identifier: Apache-2.0
/**
 * ZMQ endpoints: syntax, checked before libzmq sees them. Which are admitted: endpoint_rule.h.
 *
 * Accepted: tcp://HOST:PORT, tcp://[V6]:PORT, ipc://PATH, inproc://NAME; HOST may be an asterisk
 * and PORT an asterisk or 0 (for sockets that bind).
 */
#ifndef KV_BASE_ENDPOINT_H
#define KV_BASE_ENDPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kv_scheme { KV_SCHEME_TCP, KV_SCHEME_IPC, KV_SCHEME_INPROC };

struct kv_endpoint {
    enum kv_scheme scheme;
    char host[256]; /* tcp: without brackets; others: the path or name */
    uint16_t port;  /* tcp; 0 with any_port */
    bool any_port;  /* "*" or 0: chosen at bind */
    bool wildcard;  /* host is "*" */
    bool ipv6;      /* host is a literal in brackets */
};

/**
 * Parse @text. Returns 0 or -EINVAL with *ret_why a fixed phrase: "missing scheme", "missing
 * address", "missing TCP port", "missing TCP host", "missing closing `]`", "invalid TCP port",
 * "invalid TCP host", "unsupported scheme", "too long".
 */
int kv_endpoint_parse(const char *text, struct kv_endpoint *ret, const char **ret_why);

/** Whether @text is a host name: labels of letters, digits, - and _, not all of it digits where an address would have
 * its last number ("10.1", "0x7f000001" and "010.0.0.1" are addresses to some resolvers). */
bool kv_endpoint_is_name(const char *text);

/** The address that a TCP endpoint's host is, IPv4 as ::ffff:0:0/96, without its zone. False: a name or `*`. */
bool kv_endpoint_address(const struct kv_endpoint *endpoint, uint8_t ret[16]);

#endif
