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
#ifndef KV_INDEXER_HTTP_AUTH_H
#define KV_INDEXER_HTTP_AUTH_H

#include <stdbool.h>
#include <stddef.h>

#include "base/core/error.h"
#include "indexer/http/http.h"

#define KI_TOKEN_MAX 256 /* bytes of a token */
#define KI_TOKENS_MAX 1024

struct ki_auth;

/**
 * Create the rules. @token_file NULL: no tokens. Fails when the file can't be read or holds no
 * token.
 */
int ki_auth_create(const char *token_file, bool insecure, struct ki_auth **ret,
                   struct kv_error *error);
void ki_auth_destroy(struct ki_auth *auth);

/** Read the token file again. On failure the old tokens stay. */
int ki_auth_reload(struct ki_auth *auth, struct kv_error *error);

/** Return true to admit the request; otherwise fill @reply (401 or 403). */
bool ki_auth_admit(struct ki_auth *auth, const struct ki_request *request, struct ki_reply *reply);

/**
 * Return the first token, for peers that share the file; NULL without tokens. The caller frees it.
 */
char *ki_auth_first_token(struct ki_auth *auth);

#endif
