// SPDX-License-Identifier: Apache-2.0
/**
 * A figure of TLS for lend_bench: as lend.h's tcp, with TLS 1.3 on both sides.
 *
 *   peer_tls   fetch leased blocks. Yardstick: the raw pair over OpenSSL, SSL_write and SSL_read of
 *              whole blocks on blocking sockets, with the same certificates and the same cipher
 */
#ifndef BENCH_LEND_TLS_H
#define BENCH_LEND_TLS_H

#include <openssl/ssl.h>

#include "../tests/peer/certificates.h"
#include "lend.h"

static SSL_CTX *lend_tls_context;
static SSL *lend_tls_stream; /* of the raw pair, in either process */

/* Shake hands before the first bytes: the reader's are a request. */
static bool lend_tls_begin(int fd, bool out)
{
    lend_tls_stream = SSL_new(lend_tls_context);
    return lend_tls_stream && SSL_set_fd(lend_tls_stream, fd) == 1 &&
           (out ? SSL_connect(lend_tls_stream) : SSL_accept(lend_tls_stream)) == 1;
}

static bool lend_tls_move(int fd, struct iovec *pieces, int n, bool out)
{
    if (!lend_tls_stream && !lend_tls_begin(fd, out))
        return false;
    for (int i = 0; i < n; i++) {
        for (size_t at = 0, len; at < pieces[i].iov_len; at += len) {
            char *bytes = (char *)pieces[i].iov_base + at;
            size_t rest = pieces[i].iov_len - at;

            if ((out ? SSL_write_ex(lend_tls_stream, bytes, rest, &len)
                     : SSL_read_ex(lend_tls_stream, bytes, rest, &len)) != 1)
                return false;
        }
    }
    return true;
}

static void lend_tls_load(const struct certificates *files)
{
    lend_tls_context = SSL_CTX_new(TLS_method());
    if (!lend_tls_context || SSL_CTX_set_min_proto_version(lend_tls_context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_use_certificate_chain_file(lend_tls_context, files->cert) != 1 ||
        SSL_CTX_use_PrivateKey_file(lend_tls_context, files->key, SSL_FILETYPE_PEM) != 1)
        bench_die("no context of TLS", 0);
}

static void lend_tls(struct lend_case of)
{
    struct lend_bench b = {.of = of};
    struct lend_costs yard = {.gbs = {.n = 0}}, plain = yard, summed = yard;
    struct certificates files = {.folder = ""};

    if (!certificates_make(&files))
        bench_die("the openssl program makes no certificates", 0);
    lend_tls_load(&files);
    b.of.tcp = true;
    b.of.tls = &files;
    b.of.move = lend_tls_move;
    b.of.n_blocks = (uint32_t)(LEND_BYTES / of.block_bytes);
    lend_open(&b);
    certificates_remove(&files);
    (void)lend_pass_read(&b, true, true);
    (void)lend_pass_raw(&b);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        lend_add(&yard, &b, lend_pass_raw(&b));
        lend_add(&plain, &b, lend_pass_read(&b, false, false));
        lend_add(&summed, &b, lend_pass_read(&b, false, true));
    }
    lend_print_fetch("peer_tls", SSL_get_cipher(lend_tls_stream), &b, &yard, &plain, &summed);
    lend_close(&b);
    SSL_free(KV_STEAL(lend_tls_stream));
    SSL_CTX_free(KV_STEAL(lend_tls_context));
}

#endif
