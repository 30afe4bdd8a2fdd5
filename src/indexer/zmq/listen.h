// SPDX-License-Identifier: Apache-2.0
/** A socket that publishers connect to. Thread-safe. */
#ifndef KV_INDEXER_ZMQ_LISTEN_H
#define KV_INDEXER_ZMQ_LISTEN_H

#include "base/net/endpoint.h"

/**
 * Listen on the address of @endpoint, which is tcp with a wildcard or a numeric host, for IPv4 and IPv6
 * alike; on a machine without IPv6, for IPv4. Returns a descriptor that doesn't block, or a negative
 * errno (-EADDRINUSE).
 */
int ki_listen(const struct kv_endpoint *endpoint);

#endif
