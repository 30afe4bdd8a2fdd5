// SPDX-License-Identifier: Apache-2.0
/**
 * Calls between libkvbm and libkvbm_tls (src/peer/tls), which holds all that needs OpenSSL. Both
 * come from one build; `abi` refuses another one's.
 */
#ifndef KVBM_PEER_MODULE_TLS_ABI_H
#define KVBM_PEER_MODULE_TLS_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/module/module.h"

#define KVBM_TLS_ABI 1
#define KVBM_TLS_SYMBOL "kvbm_tls_get_abi" /* a kv_module_get_fn */
#define KVBM_TLS_LIBRARY "libkvbm_tls.so.0"

struct kvbm_tls_context;
struct kvbm_tls_stream;

/** Files of a context. */
struct kvbm_tls_files {
    const char *cert, *key; /* PEM; key NULL: in cert */
    const char *ca;         /* NULL: peers' certificates aren't verified */
};

struct kvbm_tls_abi {
    struct kv_module_head head;

    /** HMAC-SHA-256 of @n parts. Returns 0 or -EIO. */
    int (*mac)(const void *key, size_t key_len, const void *const *parts, const size_t *lens,
               size_t n, uint8_t ret[32]);
    /** Compare secrets in constant time. */
    bool (*equal)(const void *a, const void *b, size_t len);
    /** Overwrite a secret. */
    void (*wipe)(void *secret, size_t len);

    /** Make a context. Returns 0; -EINVAL with the reason in @why. */
    int (*context_create)(const struct kvbm_tls_files *files, struct kvbm_tls_context **ret,
                          char *why, size_t why_size);
    void (*context_destroy)(struct kvbm_tls_context *context);

    /** Begin TLS on a non-blocking socket. @host (NULL: any) must be in the listener's certificate. */
    int (*stream_create)(struct kvbm_tls_context *context, int fd, bool is_opener, const char *host,
                         struct kvbm_tls_stream **ret);
    void (*stream_destroy)(struct kvbm_tls_stream *stream);
    /** Go on with the handshake. Returns 0; -EAGAIN; -EACCES (certificates) or -EPROTO, with @why. */
    int (*handshake)(struct kvbm_tls_stream *stream, char *why, size_t why_size);
    /** Read or write. Returns bytes; 0: closed; -EAGAIN; another error. */
    ssize_t (*read)(struct kvbm_tls_stream *stream, void *to, size_t len);
    ssize_t (*write)(struct kvbm_tls_stream *stream, const void *from, size_t len);
    /** Derive 32 bytes that both ends of this connection share, and nobody else. */
    int (*binding)(struct kvbm_tls_stream *stream, uint8_t ret[32]);
};

#endif
