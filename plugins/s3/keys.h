// SPDX-License-Identifier: Apache-2.0
/**
 * Keys in a bucket (docs/formats.md), and the paths of requests for them:
 *
 *     PREFIX/c/HH/HEX    a chunk; HEX is its key, HH the first two digits
 *     PREFIX/m/NAME      a manifest; all but A-Za-z0-9-._~ and a leading dot as %XX
 *     PREFIX/r/NAME/...  what it may need (s3/refs.h)
 */
#ifndef KV_PLUGINS_S3_KEYS_H
#define KV_PLUGINS_S3_KEYS_H

#include "base/core/buf.h"
#include "s3/config.h"

#define S3_MAX_HASH 120

/** Return an encoded request path, which the caller frees; NULL: out of memory. */
char *s3_chunk_path(const struct s3_config *config, const uint8_t *hash, size_t hash_len);
char *s3_manifest_path(const struct s3_config *config, const char *name);
char *s3_refs_path(const struct s3_config *config, const char *name, const char *id);
/** Return "r/NAME/" for s3_list; the caller frees it. */
char *s3_refs_folder(const char *name);
/**
 * Decode a chunk's key from a listing, without PREFIX/c/. Returns its length, 0 when it is no
 * chunk.
 */
size_t s3_chunk_of_key(const char *key, uint8_t ret[S3_MAX_HASH]);
/**
 * Decode a manifest's name in place, from a listing's key without PREFIX/m/; false: not a name of
 * ours.
 */
bool s3_name_of_key(char *key);
/** True for the last part of the key of an object of notes, HANDLE-N (s3/refs.h). */
bool s3_is_note(const char *id);

/** Return the text of @buf, which the caller frees, and empty @buf. NULL: out of memory. */
char *s3_take_text(struct kv_buf *buf);

#endif
