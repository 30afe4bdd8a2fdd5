// SPDX-License-Identifier: Apache-2.0
/** Names of multimodal objects that are digests. */
#ifndef KVE_HASH_DIGEST_H
#define KVE_HASH_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Whether @id is a 256-bit digest in hex; *@ret is its first 64 bits then. */
bool kve_digest(const char *id, size_t len, uint64_t *ret);

#endif
