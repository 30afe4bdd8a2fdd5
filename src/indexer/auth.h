// SPDX-License-Identifier: Apache-2.0
/**
 * Access to the service. Three modes:
 *   - tokens (--auth-token-file): every request but /health needs `Authorization: Bearer TOKEN`;
 *   - open (--insecure): everybody;
 *   - neither: only this machine; others get 403 and a line that says what to do. Host, and Origin
 *     where a browser sends one, must name this machine too: a page of another site may have its
 *     own name resolve to 127.0.0.1 (DNS rebinding), and then the browser connects from here.
 * Thread-safe.
 */
#ifndef KV_INDEXER_AUTH_H
#define KV_INDEXER_AUTH_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "indexer/http.h"

#define KI_TOKEN_MAX 256 /* bytes of a token */
#define KI_TOKENS_MAX 1024

struct ki_auth;

/** @token_file NULL: no tokens. Fails when the file can't be read or holds no token. */
int ki_auth_create(const char *token_file, bool insecure, struct ki_auth **ret,
                   struct kv_error *error);
void ki_auth_destroy(struct ki_auth *auth);

/** Read the token file again; on failure the old tokens stay. */
int ki_auth_reload(struct ki_auth *auth, struct kv_error *error);

/** Whether the request may go on; otherwise @reply is filled (401 or 403). */
bool ki_auth_admit(struct ki_auth *auth, const struct ki_request *request, struct ki_reply *reply);

/** The first token, for asking peers that share the file; NULL without tokens. Free it. */
char *ki_auth_first_token(struct ki_auth *auth);

#endif
