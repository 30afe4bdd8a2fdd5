// SPDX-License-Identifier: Apache-2.0
/** Names of TLS peers, for OpenSSL. A header alone, since base links no OpenSSL. */
#ifndef KV_BASE_TLS_HOST_H
#define KV_BASE_TLS_HOST_H

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdbool.h>

/**
 * Demand that the peer's certificate is for @host, an address or a name. A name is also sent to the
 * peer (SNI). False: no memory.
 */
static inline bool kv_tls_demand_host(SSL *ssl, const char *host)
{
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1)
        return true;
    ERR_clear_error(); /* @host is a name, not an address */
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

#endif
