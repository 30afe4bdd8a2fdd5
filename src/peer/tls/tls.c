// SPDX-License-Identifier: Apache-2.0
/*
 * libkvbm_tls: OpenSSL behind tls_abi.h. TLS 1.3 on non-blocking sockets, and HMAC-SHA-256.
 */
#include <errno.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/net/socket_bio.h"
#include "base/net/tls_host.h"
#include "kv_types.h"
#include "peer/module/tls_abi.h"

#define READ_AHEAD (64u << 10) /* bytes of a connection, in one system call */

struct kvbm_tls_context {
    SSL_CTX *openssl;
    BIO_METHOD *socket;
};

struct kvbm_tls_stream {
    SSL *openssl;
};

/* ---- secrets ---- */

static int mac(const void *key, size_t key_len, const void *const *parts, const size_t *lens,
               size_t n, uint8_t ret[32])
{
    EVP_MAC *hmac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    EVP_MAC_CTX *context = hmac ? EVP_MAC_CTX_new(hmac) : NULL;
    char digest[] = "SHA256";
    OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string("digest", digest, 0),
                           OSSL_PARAM_construct_end()};
    size_t len = 0;
    int ok = context && EVP_MAC_init(context, key, key_len, params);

    for (size_t i = 0; ok && i < n; i++)
        ok = lens[i] == 0 || EVP_MAC_update(context, parts[i], lens[i]);
    ok = ok && EVP_MAC_final(context, ret, &len, 32) && len == 32;
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(hmac);
    ERR_clear_error();
    return ok ? 0 : -EIO;
}

static bool equal(const void *a, const void *b, size_t len)
{
    return CRYPTO_memcmp(a, b, len) == 0;
}

/* ---- contexts ---- */

static void context_destroy(struct kvbm_tls_context *context)
{
    if (!context)
        return;
    SSL_CTX_free(context->openssl);
    BIO_meth_free(context->socket);
    free(context);
}

/* Write what went wrong, and OpenSSL's reason. */
static void explain(const char *what, char *why, size_t size)
{
    unsigned long code = ERR_get_error();
    const char *reason = code ? ERR_reason_error_string(code) : NULL;

    snprintf(why, size, "%s%s%s", what, reason ? ": " : "", reason ? reason : "");
    ERR_clear_error();
}

static const char *load_files(SSL_CTX *openssl, const struct kvbm_tls_files *files)
{
    if (SSL_CTX_use_certificate_chain_file(openssl, files->cert) != 1)
        return "the certificate can't be loaded";
    if (SSL_CTX_use_PrivateKey_file(openssl, files->key ? files->key : files->cert,
                                    SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(openssl) != 1)
        return "the key can't be loaded, or isn't the certificate's";
    if (files->ca && SSL_CTX_load_verify_locations(openssl, files->ca, NULL) != 1)
        return "the authority's certificate can't be loaded";
    return NULL;
}

static int context_create(const struct kvbm_tls_files *files, struct kvbm_tls_context **ret,
                          char *why, size_t why_size)
{
    struct kvbm_tls_context *context = calloc(1, sizeof(*context));
    const char *wrong = "out of memory";

    if (!context)
        return -ENOMEM;
    context->openssl = SSL_CTX_new(TLS_method());
    context->socket = kv_socket_bio_method();
    if (!context->openssl || !context->socket)
        goto fail;
    SSL_CTX_set_min_proto_version(context->openssl, TLS1_3_VERSION);
    SSL_CTX_set_num_tickets(context->openssl, 0); /* no session is resumed */
    SSL_CTX_set_read_ahead(context->openssl, 1);
    SSL_CTX_set_default_read_buffer_len(context->openssl, READ_AHEAD);
    SSL_CTX_set_mode(context->openssl,
                     SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_verify(
        context->openssl,
        files->ca ? SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT : SSL_VERIFY_NONE, NULL);
    wrong = load_files(context->openssl, files);
    if (wrong)
        goto fail;
    *ret = context;
    return 0;

fail:
    explain(wrong, why, why_size);
    context_destroy(context);
    return -EINVAL;
}

/* ---- streams ---- */

static void stream_destroy(struct kvbm_tls_stream *stream)
{
    if (!stream)
        return;
    SSL_free(stream->openssl);
    free(stream);
}

static int stream_create(struct kvbm_tls_context *context, int fd, bool is_opener, const char *host,
                         struct kvbm_tls_stream **ret)
{
    struct kvbm_tls_stream *stream = calloc(1, sizeof(*stream));
    BIO *bio;

    if (!stream)
        return -ENOMEM;
    stream->openssl = SSL_new(context->openssl);
    bio = stream->openssl ? kv_socket_bio_new(context->socket, fd) : NULL;
    if (!bio)
        goto fail;
    SSL_set_bio(stream->openssl, bio, bio);
    if (is_opener)
        SSL_set_connect_state(stream->openssl);
    else
        SSL_set_accept_state(stream->openssl);
    if (host && !kv_tls_demand_host(stream->openssl, host))
        goto fail;
    *ret = stream;
    return 0;

fail:
    ERR_clear_error();
    stream_destroy(stream);
    return -ENOMEM;
}

/* True when the peer has refused this side's certificate. */
static bool is_about_certificates(unsigned long code)
{
    switch (ERR_GET_REASON(code)) {
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
        return true;
    default:
        return false;
    }
}

/* Map the result @rc of a call to an errno. Leaves OpenSSL's queue of errors as it is. */
static int error_of(struct kvbm_tls_stream *stream, int rc)
{
    int saved = errno;

    switch (SSL_get_error(stream->openssl, rc)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
        return -EAGAIN;
    case SSL_ERROR_ZERO_RETURN:
        return 0;
    case SSL_ERROR_SYSCALL:
        return saved == ECONNRESET ? -EPIPE : -saved;
    default:
        if (ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING)
            return 0;
        return is_about_certificates(ERR_peek_error()) ? -EACCES : -EPROTO;
    }
}

static int handshake(struct kvbm_tls_stream *stream, char *why, size_t why_size)
{
    long verdict;
    int rc, err;

    ERR_clear_error();
    errno = 0;
    rc = SSL_do_handshake(stream->openssl);
    if (rc == 1)
        return 0;
    err = error_of(stream, rc);
    if (err == -EAGAIN)
        return err;
    verdict = SSL_get_verify_result(stream->openssl);
    if (verdict != X509_V_OK)
        snprintf(why, why_size, "TLS: %s", X509_verify_cert_error_string(verdict));
    else if (ERR_GET_REASON(ERR_peek_error()) == SSL_R_WRONG_VERSION_NUMBER)
        snprintf(why, why_size, "TLS on one side only");
    else
        explain(err == 0 ? "the peer closed during the TLS handshake" : "TLS", why, why_size);
    if (ERR_GET_REASON(ERR_peek_error()) == SSL_R_WRONG_VERSION_NUMBER)
        err = -EPROTONOSUPPORT;
    ERR_clear_error();
    return err ? err : -EPIPE;
}

static ssize_t stream_read(struct kvbm_tls_stream *stream, void *to, size_t len)
{
    ssize_t err;
    int rc;

    ERR_clear_error();
    errno = 0;
    rc = SSL_read(stream->openssl, to, len > INT_MAX ? INT_MAX : (int)len);
    if (rc > 0)
        return rc;
    err = error_of(stream, rc);
    ERR_clear_error();
    return err;
}

static ssize_t stream_write(struct kvbm_tls_stream *stream, const void *from, size_t len)
{
    ssize_t err;
    int rc;

    ERR_clear_error();
    errno = 0;
    rc = SSL_write(stream->openssl, from, len > INT_MAX ? INT_MAX : (int)len);
    if (rc > 0)
        return rc;
    err = error_of(stream, rc);
    ERR_clear_error();
    return err;
}

static int binding(struct kvbm_tls_stream *stream, uint8_t ret[32])
{
    static const char label[] = "EXPORTER-kvasir-session";

    return SSL_export_keying_material(stream->openssl, ret, 32, label, sizeof(label) - 1, NULL, 0,
                                      0) == 1
               ? 0
               : -EIO;
}

KV_API const struct kv_module_head *kvbm_tls_get_abi(void);

const struct kv_module_head *kvbm_tls_get_abi(void)
{
    static const struct kvbm_tls_abi abi = {.head = {sizeof(abi), KVBM_TLS_ABI},
                                            .mac = mac,
                                            .equal = equal,
                                            .wipe = OPENSSL_cleanse,
                                            .context_create = context_create,
                                            .context_destroy = context_destroy,
                                            .stream_create = stream_create,
                                            .stream_destroy = stream_destroy,
                                            .handshake = handshake,
                                            .read = stream_read,
                                            .write = stream_write,
                                            .binding = binding};

    return &abi.head;
}
