// SPDX-License-Identifier: Apache-2.0
/**
 * A GET whose body the caller reads at its own pace; the rest stays with the sender (at most 256
 * KiB wait here). Thread-confined.
 */
#ifndef KV_INDEXER_REPLICA_FETCH_H
#define KV_INDEXER_REPLICA_FETCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

struct ki_fetch;

struct ki_fetch_opts {
    const char *url;
    const char *token;   /* bearer token, or NULL */
    const char *accept;  /* type of body to ask for, or NULL */
    const char *ca_file; /* or NULL */
    uint32_t connect_ms, total_ms;
    uint32_t
        stall_ms;  /* longest silence, and longest time in which less comes than KI_SLOWEST_... */
    bool trickles; /* the body is sent as it comes about: only silence ends it */
    const _Atomic int *stop; /* or NULL */
};

int ki_fetch_open(const struct ki_fetch_opts *opts, struct ki_fetch **ret);
void ki_fetch_close(struct ki_fetch *fetch); /* NULL is a no-op */

/**
 * Read up to @size bytes of the body (a kv_json_refill_fn). Returns their number; 0 at the end;
 * -EIO (refused, broken off, not a 200), -ETIMEDOUT, -ECANCELED.
 */
long ki_fetch_read(void *fetch, char *data, size_t size);

/**
 * Wait for up to @ms milliseconds, to learn whether the server sends. Returns true once 64 KiB, or the
 * whole body, can be read without waiting, or the transfer has failed (the next read says why).
 */
bool ki_fetch_proceeds(struct ki_fetch *fetch, int ms);

uint64_t ki_fetch_bytes(const struct ki_fetch *fetch);
/** Return the reason of the last read's failure; "" without one. */
const char *ki_fetch_error(const struct ki_fetch *fetch);

#endif
