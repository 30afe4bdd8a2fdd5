// SPDX-License-Identifier: Apache-2.0
#include "redis/tls.h"

#include <openssl/err.h>
#include <stdio.h>

#include "base/net/socket_bio.h"
#include "base/net/tls_host.h"

struct rds_tls {
    SSL_CTX *context;
    BIO_METHOD *socket;
};

/* -- contexts and sessions --------------------------------------------------------------------- */

static int load_certificates(SSL_CTX *context, const struct rds_uri *uri, struct kv_error *error)
{
    const char *key = uri->key[0] ? uri->key : uri->cert; /* one file may hold both */

    if (uri->cacert[0] ? !SSL_CTX_load_verify_locations(context, uri->cacert, NULL)
                       : !SSL_CTX_set_default_verify_paths(context))
        return kv_fail(error, -EINVAL, 0, "the authorities' certificates can't be loaded");
    if (uri->cert[0] && (SSL_CTX_use_certificate_chain_file(context, uri->cert) != 1 ||
                         SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1))
        return kv_fail(error, -EINVAL, 0, "the client's certificate or key can't be loaded");
    return 0;
}

struct rds_tls *rds_tls_create(const struct rds_uri *uri, struct kv_error *error)
{
    struct rds_tls *tls = calloc(1, sizeof(*tls));

    kv_fail(error, -ENOMEM, 0, "out of memory");
    if (!tls)
        return NULL;
    tls->context = SSL_CTX_new(TLS_client_method());
    tls->socket = kv_socket_bio_method();
    if (!tls->context || !tls->socket)
        goto fail;
    SSL_CTX_set_min_proto_version(tls->context, TLS1_2_VERSION);
    SSL_CTX_set_verify(tls->context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(tls->context,
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    if (load_certificates(tls->context, uri, error) < 0)
        goto fail;
    return tls;
fail:
    ERR_clear_error();
    rds_tls_destroy(tls);
    return NULL;
}

void rds_tls_destroy(struct rds_tls *tls)
{
    if (!tls)
        return;
    SSL_CTX_free(tls->context);
    BIO_meth_free(tls->socket);
    free(tls);
}

SSL *rds_tls_session(struct rds_tls *tls, int fd, const char *host)
{
    SSL *ssl = SSL_new(tls->context);
    BIO *bio = ssl ? kv_socket_bio_new(tls->socket, fd) : NULL;

    if (!bio) {
        SSL_free(ssl);
        return NULL;
    }
    SSL_set_bio(ssl, bio, bio);
    SSL_set_connect_state(ssl);
    if (!kv_tls_demand_host(ssl, host)) {
        SSL_free(ssl);
        return NULL;
    }
    return ssl;
}

void rds_tls_explain(SSL *ssl, char *text, size_t size)
{
    long verdict = SSL_get_verify_result(ssl);
    unsigned long code = ERR_get_error();

    if (verdict != X509_V_OK)
        snprintf(text, size, "%s", X509_verify_cert_error_string(verdict));
    else if (code != 0)
        ERR_error_string_n(code, text, size);
    else
        snprintf(text, size, "the connection was closed");
    ERR_clear_error();
}
