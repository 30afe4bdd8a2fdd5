// SPDX-License-Identifier: Apache-2.0
/** TLS over a non-blocking socket that never raises SIGPIPE (OpenSSL's own socket writes would). */
#ifndef KV_REDIS_TLS_H
#define KV_REDIS_TLS_H

#include <openssl/ssl.h>

#include "redis/uri.h"

struct rds_tls;

/**
 * Make a context with the certificates that @uri names, else the system's authorities. Returns NULL
 * with @error.
 */
struct rds_tls *rds_tls_create(const struct rds_uri *uri, struct kv_error *error);
void rds_tls_destroy(struct rds_tls *tls);

/**
 * Make a client session on @fd, whose server must show a certificate for @host. NULL: out of
 * memory.
 */
SSL *rds_tls_session(struct rds_tls *tls, int fd, const char *host);

/** Write the reason of the last failed handshake. */
void rds_tls_explain(SSL *ssl, char *text, size_t size);

#endif
