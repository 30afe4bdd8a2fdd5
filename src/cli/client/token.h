// SPDX-License-Identifier: Apache-2.0
/** The bearer token of --auth-token-file. */
#ifndef KV_CLI_CLIENT_TOKEN_H
#define KV_CLI_CLIENT_TOKEN_H

#include "base/core/error.h"

#define KC_TOKEN_MAX 256

/**
 * Read the first token of a file like kv-indexer's --auth-token-file: one a line; blank lines and
 * lines that start with # are skipped. Returns 0, -EINVAL, -ENOENT (no token), or the error of
 * reading the file; @error names the file, never the token.
 */
int kc_token_read(const char *file, char ret[KC_TOKEN_MAX + 1], struct kv_error *error);

#endif
