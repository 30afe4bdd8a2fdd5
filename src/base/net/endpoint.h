// SPDX-License-Identifier: Apache-2.0
/**
 * Parse ZMQ endpoints and check their syntax before libzmq sees them. endpoint_rule.h decides which
 * endpoints are admitted.
 *
 * Accepted: tcp://HOST:PORT, tcp://[V6]:PORT, ipc://PATH, inproc://NAME. HOST may be an asterisk;
 * PORT may be an asterisk or 0 (for sockets that bind).
 */
#ifndef KV_BASE_ENDPOINT_H
#define KV_BASE_ENDPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kv_scheme { KV_SCHEME_TCP, KV_SCHEME_IPC, KV_SCHEME_INPROC };

struct kv_endpoint {
    enum kv_scheme scheme;
    char host[256]; /* tcp: the host without brackets; others: the path or name */
    uint16_t port;  /* tcp only; 0 with any_port */
    bool any_port;  /* the port is "*" or 0: the system chooses at bind */
    bool wildcard;  /* the host is "*" */
    bool ipv6;      /* the host is an IPv6 literal in brackets */
};

/**
 * Parse @text. Returns 0 or -EINVAL with *ret_why a fixed phrase: "missing scheme", "missing
 * address", "missing TCP port", "missing TCP host", "missing closing `]`", "invalid TCP port",
 * "invalid TCP host", "unsupported scheme", "too long".
 */
int kv_endpoint_parse(const char *text, struct kv_endpoint *ret, const char **ret_why);

/**
 * Parse @text as kv_endpoint_parse does, for a socket that connects. Returns -EINVAL for a host or
 * port that only a socket which binds can have, too; *@ret_why says so.
 */
int kv_endpoint_parse_peer(const char *text, struct kv_endpoint *ret, const char **ret_why);

/**
 * Return true when @text is a host name: labels of letters, digits, - and _. The last label must
 * not be a number: some resolvers take "10.1", "0x7f000001" and "010.0.0.1" for addresses.
 */
bool kv_endpoint_is_name(const char *text);

/**
 * Convert a TCP endpoint's literal address to 16 bytes (IPv4 as ::ffff:0:0/96), without its zone.
 * Returns false for a name or `*`.
 */
bool kv_endpoint_address(const struct kv_endpoint *endpoint, uint8_t ret[16]);

#endif
