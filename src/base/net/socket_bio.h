// SPDX-License-Identifier: Apache-2.0
/**
 * A BIO over a socket that never raises SIGPIPE, as OpenSSL's own does: the host's handling of that
 * signal must not matter. A header alone, since base links no OpenSSL.
 */
#ifndef KV_BASE_SOCKET_BIO_H
#define KV_BASE_SOCKET_BIO_H

#include <errno.h>
#include <openssl/bio.h>
#include <stdint.h>
#include <sys/socket.h>

static inline int kv_socket_bio_fd(BIO *bio)
{
    return (int)(intptr_t)BIO_get_data(bio);
}

static inline int kv_socket_bio_done(BIO *bio, ssize_t n, int retry)
{
    BIO_clear_retry_flags(bio);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        BIO_set_flags(bio, retry | BIO_FLAGS_SHOULD_RETRY);
    return (int)n;
}

static inline int kv_socket_bio_write(BIO *bio, const char *data, int len)
{
    ssize_t n = send(kv_socket_bio_fd(bio), data, (size_t)len, MSG_NOSIGNAL);

    return kv_socket_bio_done(bio, n, BIO_FLAGS_WRITE);
}

static inline int kv_socket_bio_read(BIO *bio, char *data, int len)
{
    ssize_t n = recv(kv_socket_bio_fd(bio), data, (size_t)len, 0);

    return kv_socket_bio_done(bio, n, BIO_FLAGS_READ);
}

static inline long kv_socket_bio_ctrl(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

/** Make the method of such BIOs. Free it with BIO_meth_free after the last one. NULL: no memory. */
static inline BIO_METHOD *kv_socket_bio_method(void)
{
    BIO_METHOD *method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");

    if (!method)
        return NULL;
    BIO_meth_set_write(method, kv_socket_bio_write);
    BIO_meth_set_read(method, kv_socket_bio_read);
    BIO_meth_set_ctrl(method, kv_socket_bio_ctrl);
    return method;
}

/** Make a BIO on @fd, which stays the caller's. NULL: no memory. */
static inline BIO *kv_socket_bio_new(const BIO_METHOD *method, int fd)
{
    BIO *bio = BIO_new(method);

    if (!bio)
        return NULL;
    BIO_set_data(bio, (void *)(intptr_t)fd);
    BIO_set_init(bio, 1);
    return bio;
}

#endif
