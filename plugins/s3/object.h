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
#define S3_PAGE 1000         /* keys in one listing, at most */
#define S3_LARGE (64u << 20) /* beyond it: parts */

/** Encoded request paths, to be freed; NULL: no memory. */
char *s3_chunk_path(const struct s3_config *config, const uint8_t *hash, size_t hash_len);
char *s3_manifest_path(const struct s3_config *config, const char *name);
char *s3_refs_path(const struct s3_config *config, const char *name, const char *id);
/** "r/NAME/" for s3_list; to be freed. */
char *s3_refs_folder(const char *name);
/** From a (decoded) key of a listing, without PREFIX/c/ or PREFIX/m/. The length, or 0. */
size_t s3_chunk_of_key(const char *key, uint8_t ret[S3_MAX_HASH]);
/** From a listing's key without PREFIX/m/ to the manifest's name, in place; false: none of ours. */
bool s3_name_of_key(char *key);

void s3_sum(const void *data, size_t len, char ret[64]);
/** Whether data or (HEAD) length is what the object's sum says. */
bool s3_is_whole(const struct s3_request *request);

/* The following functions free @path. */
/** Get a verified value. Reads it twice before it returns -EBADMSG. */
int s3_get(struct s3_client *client, char *path, uint8_t **ret, size_t *ret_len);
/** -EEXIST: @if_none_match and it was there. */
int s3_put(struct s3_client *client, const struct s3_config *config, char *path, const void *data,
           size_t len, bool if_none_match);
int s3_delete(struct s3_client *client, char *path); /* 0 also when there is none */
/**
 * Delete an object that has these bytes: 1; 0: it doesn't, or is another one by then. The server
 * compares (If-Match); one that ignores the condition deletes what another writer has stored since
 * the comparison here.
 */
int s3_delete_if(struct s3_client *client, char *path, const void *data, size_t len);
/** Make an object new without sending it: copied to itself. -ENOENT. */
int s3_renew(struct s3_client *client, const struct s3_config *config, char *path, const char *sum);

/**
 * All objects under PREFIX + @folder; keys are handed on as they are in the bucket, without them.
 */
int s3_list(struct s3_client *client, const struct s3_config *config, const char *folder,
            unsigned page, s3_listed_fn each, void *arg);

/** The server's clock, by which it says when objects were modified. -ENOTSUP: it doesn't tell. */
int s3_server_time(struct s3_client *client, const struct s3_config *config, int64_t *ret);

#endif
