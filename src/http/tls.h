// SPDX-License-Identifier: Apache-2.0
/**
 * The certificate of the HTTPS server, which can be reloaded while connections go on. A process has
 * at most one, because libmicrohttpd's callback carries no argument. Thread-safe.
 */
#ifndef KV_HTTP_TLS_H
#define KV_HTTP_TLS_H

#include "base/core/error.h"

struct kh_tls;

/**
 * Read a PEM certificate chain and its private key. Both paths are copied. Returns 0, -ENOENT or
 * another error of reading a file, -EINVAL (not PEM, or not a pair), -EBUSY (the process has one).
 */
int kh_tls_create(const char *cert_file, const char *key_file, struct kh_tls **ret,
                  struct kv_error *error);
/** Free the certificate; no server may use it any more. NULL is a no-op. */
void kh_tls_destroy(struct kh_tls *tls);

/**
 * Read both files again; later connections get the new certificate. Errors as of kh_tls_create; the
 * old certificate then stays.
 */
int kh_tls_reload(struct kh_tls *tls, struct kv_error *error);

/** Return the function for MHD_OPTION_HTTPS_CERT_CALLBACK, which gives the current certificate. */
void *kh_tls_callback(void);

#endif
