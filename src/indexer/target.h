// SPDX-License-Identifier: Apache-2.0
/**
 * Where a socket connects to. libzmq resolves host names on its I/O thread, where one silent name
 * server holds up every stream; so names are resolved here, by threads of their own
 * (base/resolve.h), and libzmq gets numeric addresses. Thread-confined.
 */
#ifndef KV_INDEXER_TARGET_H
#define KV_INDEXER_TARGET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/endpoint.h"
#include "base/resolve.h"

struct ki_target {
    const char *where; /* to hand to libzmq; NULL until it is known */
    const char *given; /* the endpoint as registered */
    bool named;        /* its host is a name */
    struct kv_endpoint endpoint;
    unsigned turn; /* which of the name's addresses is tried */
    char text[96]; /* the numeric endpoint */
};

/** @endpoint outlives the target; NULL makes one that is never asked. */
void ki_target_init(struct ki_target *target, const char *endpoint);

/**
 * Set target->where, from an answer that is at most @max_age_ms old. Returns 0, -EINPROGRESS (ask
 * again soon), or another errno of kv_resolver_ask.
 */
int ki_target_find(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms);

/** Whether another address than target->where, which doesn't answer, is to be tried now: the name has moved or, with
 * @others, has several. ki_target_find then gives it. Returns 1, 0, or what ki_target_find does. */
int ki_target_turn(struct ki_target *target, struct kv_resolver *resolver, uint64_t max_age_ms,
                   bool others);

#endif
