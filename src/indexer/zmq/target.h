// SPDX-License-Identifier: Apache-2.0
/**
 * Address of a socket's peer. A host name may take long to resolve, on an event thread or on
 * libzmq's I/O thread, and hold up every stream there. The resolver's threads (base/net/resolve.h)
 * therefore resolve names here, and sockets get numeric addresses. Thread-confined.
 */
#ifndef KV_INDEXER_ZMQ_TARGET_H
#define KV_INDEXER_ZMQ_TARGET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/net/resolve.h"
#include "indexer/zmq/place.h"

struct ki_target {
    const char *where;     /* numeric endpoint to connect to; NULL until it is known */
    bool named;            /* the host is a name */
    struct ki_place place; /* of the endpoint as registered */
    unsigned turn;         /* index of the address to try */
    char text[96];         /* the numeric endpoint */
};

/** Initialise. @endpoint must outlive the target; NULL makes a target that is never resolved. */
void ki_target_init(struct ki_target *target, const char *endpoint);

/**
 * Set target->where, from an answer that is at most @max_age_ms old. Returns 0, -EINPROGRESS (ask
 * again soon), or another errno of kv_resolver_ask.
 */
int ki_target_find(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms);

/**
 * Decide whether to try another address than target->where, which doesn't answer. Another one
 * exists when the name has moved or, with @others, has several addresses. ki_target_find then gives
 * it. Returns 1, 0, or an error of ki_target_find.
 */
int ki_target_turn(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms,
                   bool others);

#endif
