// SPDX-License-Identifier: Apache-2.0
/**
 * Access to the service. Three modes:
 *   - tokens (--auth-token-file): every request but /health needs `Authorization: Bearer TOKEN`;
 *   - open (--insecure): every client is admitted;
 *   - neither: only clients on this machine; others get 403 and a line that says what to do.
 *
 * In the last mode Host, and Origin where a browser sends one, must name this machine, too. A page
 * of another site may make its own name resolve to 127.0.0.1 (DNS rebinding), and then the browser
 * connects from here. Thread-safe.
 */
#ifndef KV_HTTP_AUTH_H
#define KV_HTTP_AUTH_H

#include <stdbool.h>
#include <stddef.h>

#include "base/core/error.h"
#include "http/http.h"

#define KH_TOKEN_MAX 256 /* bytes of a token */
#define KH_TOKENS_MAX 1024

struct kh_auth;

/**
 * Create the rules. @token_file NULL: no tokens. Fails when the file can't be read or holds no
 * token.
 */
int kh_auth_create(const char *token_file, bool insecure, struct kh_auth **ret,
                   struct kv_error *error);
void kh_auth_destroy(struct kh_auth *auth);

/** Read the token file again. On failure the old tokens stay. */
int kh_auth_reload(struct kh_auth *auth, struct kv_error *error);

/** Return true to admit the request; otherwise fill @reply (401 or 403). */
bool kh_auth_admit(struct kh_auth *auth, const struct kh_request *request, struct kh_reply *reply);

/**
 * Return the first token, for peers that share the file; NULL without tokens. The caller frees it.
 */
char *kh_auth_first_token(struct kh_auth *auth);

#endif
