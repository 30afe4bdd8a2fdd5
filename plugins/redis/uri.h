// SPDX-License-Identifier: Apache-2.0
/**
 * URI of this backend:
 *
 *     redis://[user@]host[:port][/db]         also valkey://
 *     rediss://[user@]host[:port][/db]        the same over TLS
 *     redis+cluster://host[:port],host...     seeds of a cluster; rediss+cluster:// over TLS
 *     redis+unix:///path/of/socket?db=N
 *
 * with ?prefix=TEXT, timeout_ms=N, buffer=SIZE, cache=SIZE, db=N, cacert=, cert=, key= (PEM files).
 * %XX is decoded in all parts. Secrets are refused here: they come from $KV_STORE_REDIS_PASSWORD
 * (and $KV_STORE_REDIS_USER).
 */
#ifndef KV_REDIS_URI_H
#define KV_REDIS_URI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

#define RDS_MAX_SEEDS 16
#define RDS_HOST_SIZE 256

struct rds_address {
    char host[RDS_HOST_SIZE]; /* a name, or an address without brackets; "" for a unix socket */
    uint16_t port;
};

struct rds_uri {
    bool tls, cluster;
    char path[108]; /* of a unix socket, or "" */
    struct rds_address seeds[RDS_MAX_SEEDS];
    size_t n_seeds;
    char user[128];
    uint32_t db;
    char prefix[128];
    uint32_t timeout_ms;
    uint64_t buffer_bytes, cache_bytes;
    char cacert[1024], cert[1024], key[1024];
};

/** Parse @uri. Returns 0, or -EINVAL with @error. */
int rds_uri_parse(const char *uri, struct rds_uri *ret, struct kv_error *error);

#endif
