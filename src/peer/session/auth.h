// SPDX-License-Identifier: Apache-2.0
/**
 * Secrets of an agent: its token, and its TLS context. Cryptography is libkvbm_tls's, which is
 * opened on first use, so that libkvbm links no OpenSSL.
 */
#ifndef KVBM_PEER_SESSION_AUTH_H
#define KVBM_PEER_SESSION_AUTH_H

#include "kvbm_remote.h"
#include "peer/module/tls_abi.h"

#define KVBM_MIN_TOKEN 16
#define KVBM_MAX_TOKEN 4096

struct kvbm_auth {
    const struct kvbm_tls_abi *crypto; /* NULL: neither token nor TLS */
    uint8_t *token;                    /* [token_len], or NULL */
    size_t token_len;
    struct kvbm_tls_context *tls; /* NULL: plain connections */
};

/**
 * Read the token and the certificates that the options name. Returns 0; -ENOTSUP (libkvbm_tls is
 * needed and can't be opened); -EACCES (others can read the token); -EINVAL (too short or too long,
 * no certificate); another error of reading a file. The reason is in the log.
 */
int kvbm_auth_init(struct kvbm_auth *auth, const struct kvbm_agent_opts *opts);
void kvbm_auth_fini(struct kvbm_auth *auth);

/** Open libkvbm_tls, once. Returns NULL without it; one log line says why. */
const struct kvbm_tls_abi *kvbm_tls_get(void);

#endif
