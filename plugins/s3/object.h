// SPDX-License-Identifier: Apache-2.0
/**
 * Objects on top of requests: where they lie, how they are verified, values in one piece or in
 * parts, listings. Keys in a bucket (docs/formats.md):
 *
 *     PREFIX/c/HH/HEX    a chunk; HEX is its key, HH the first two digits
 *     PREFIX/m/NAME      a manifest; all but A-Za-z0-9-._~ and a leading dot as %XX
 *     PREFIX/r/NAME/...  what it may need (s3/refs.h)
 *
 * Each carries the metadata kvasir = 1-LENGTH-XXH3: bytes that differ from it are never handed out.
 * Thread-safe.
 */
#ifndef KV_PLUGINS_S3_OBJECT_H
#define KV_PLUGINS_S3_OBJECT_H

#include "s3/client.h"
#include "s3/xml.h"

#define S3_MAX_HASH 120
#define S3_PAGE 1000         /* upper limit for keys of one page */
#define S3_LARGE (64u << 20) /* larger values are uploaded in parts */

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

void s3_sum(const void *data, size_t len, char ret[64]);
/** True when the data (HEAD: the length) match the object's sum. */
bool s3_is_whole(const struct s3_request *request);

/* The following functions free @path. */
/** Get a verified value. Reads it twice before it returns -EBADMSG. */
int s3_get(struct s3_client *client, char *path, uint8_t **ret, size_t *ret_len);
/** Put an object. -EEXIST: with @if_none_match, it exists. */
int s3_put(struct s3_client *client, const struct s3_config *config, char *path, const void *data,
           size_t len, bool if_none_match);
int s3_delete(struct s3_client *client, char *path); /* 0 also for a missing object */
/**
 * Delete an object that has these bytes: 1; 0: it doesn't, or is another one by then. The server
 * compares (If-Match); one that ignores the condition deletes what another writer has stored since
 * the comparison here.
 */
int s3_delete_if(struct s3_client *client, char *path, const void *data, size_t len);
/** Renew an object's age by copying it to itself. -ENOENT. */
int s3_renew(struct s3_client *client, const struct s3_config *config, char *path, const char *sum);

/** List all objects under PREFIX + @folder. Keys are handed out decoded, without both. */
int s3_list(struct s3_client *client, const struct s3_config *config, const char *folder,
            unsigned page, s3_listed_fn each, void *arg);

/** Get the server's clock, which sets objects' ages. -ENOTSUP: the server has no Date. */
int s3_server_time(struct s3_client *client, const struct s3_config *config, int64_t *ret);

#endif
