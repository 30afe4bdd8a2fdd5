// SPDX-License-Identifier: Apache-2.0
/** Nkeys of NATS: Ed25519 keys in base32, with a prefix that names their kind and a CRC-16. */
#ifndef KV_PLANE_NATS_NKEY_H
#define KV_PLANE_NATS_NKEY_H

#include <stddef.h>

#define KVP_NKEY 57 /* bytes of a public key's text, with its NUL */

/**
 * Compute the public key of the seed in a file, which begins with the seed or has it in a line of its
 * own. Returns 0; an error of open or read; -EBADMSG (no seed); -EIO (OpenSSL).
 */
int kvp_nkey_public(const char *file, char ret[KVP_NKEY]);

#endif
