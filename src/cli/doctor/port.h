// SPDX-License-Identifier: Apache-2.0
/**
 * Tell who listens at a ZMQ endpoint: connect, greet as ZMTP 3 asks, and read what comes, up to the peer's
 * READY, which names its socket's type. We send no READY: a peer of another type than ours would
 * close before it tells its own.
 */
#ifndef KV_CLI_DOCTOR_PORT_H
#define KV_CLI_DOCTOR_PORT_H

#include <stdint.h>

#include "base/net/endpoint.h"

enum kc_port {
    KC_PORT_ZMTP,     /* a ZMQ socket; its type is known */
    KC_PORT_NAME,     /* the host has no address */
    KC_PORT_REFUSED,  /* no connection: refused, or no answer */
    KC_PORT_HANGS_UP, /* closed without a byte */
    KC_PORT_OTHER     /* no ZMTP: silent, or other bytes */
};

struct kc_port_answer {
    enum kc_port what;
    char type[16];  /* ZMTP: "PUB", "ROUTER"...; "" where the peer names none */
    char said[120]; /* what was measured, a phrase */
};

/** Connect to @endpoint, and wait up to @timeout_ms for each step. */
void kc_port_ask(const struct kv_endpoint *endpoint, uint64_t timeout_ms,
                 struct kc_port_answer *ret);

/**
 * Read the first bytes that a peer sent. Returns 1 when they tell what it is, *@ret; 0 when more are
 * needed. Any bytes give an answer once there are KC_PORT_BYTES of them.
 */
#define KC_PORT_BYTES 512
int kc_port_read(const uint8_t *bytes, size_t len, struct kc_port_answer *ret);

#endif
