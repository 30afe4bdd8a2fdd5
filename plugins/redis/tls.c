// SPDX-License-Identifier: Apache-2.0
#include "redis/tls.h"

#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/socket.h>

struct rds_tls {
    SSL_CTX *context;
    BIO_METHOD *socket;
};

/* -- a socket BIO with MSG_NOSIGNAL: the host's SIGPIPE handling must not matter --------------- */

static int bio_fd(BIO *bio)
{
    return (int)(intptr_t)BIO_get_data(bio);
}

static int after_io(BIO *bio, ssize_t n, int retry)
{
    BIO_clear_retry_flags(bio);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        BIO_set_flags(bio, retry | BIO_FLAGS_SHOULD_RETRY);
    return (int)n;
}

static int bio_write(BIO *bio, const char *data, int len)
{
    return after_io(bio, send(bio_fd(bio), data, (size_t)len, MSG_NOSIGNAL), BIO_FLAGS_WRITE);
}

static int bio_read(BIO *bio, char *data, int len)
{
    return after_io(bio, recv(bio_fd(bio), data, (size_t)len, 0), BIO_FLAGS_READ);
}

static long bio_ctrl(BIO *bio, int command, long number, void *pointer)
{
    (void)bio;
    (void)number;
    (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

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
    tls->socket = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kv_store socket");
    if (!tls->context || !tls->socket)
        goto fail;
    BIO_meth_set_write(tls->socket, bio_write);
    BIO_meth_set_read(tls->socket, bio_read);
    BIO_meth_set_ctrl(tls->socket, bio_ctrl);
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

static int name_peer(SSL *ssl, const char *host)
{
    X509_VERIFY_PARAM *param = SSL_get0_param(ssl);

    if (X509_VERIFY_PARAM_set1_ip_asc(param, host) == 1)
        return 1;
    ERR_clear_error(); /* text may be a host name, not an address */
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

SSL *rds_tls_session(struct rds_tls *tls, int fd, const char *host)
{
    SSL *ssl = SSL_new(tls->context);
    BIO *bio = ssl ? BIO_new(tls->socket) : NULL;

    if (!bio) {
        SSL_free(ssl);
        return NULL;
    }
    BIO_set_data(bio, (void *)(intptr_t)fd);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl, bio, bio);
    SSL_set_connect_state(ssl);
    if (!name_peer(ssl, host)) {
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
