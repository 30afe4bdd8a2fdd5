// SPDX-License-Identifier: Apache-2.0
/**
 * Objects on top of requests: get, put and delete them, verified. Each carries the metadata kvasir =
 * 1-LENGTH-XXH3: bytes that differ from it are never handed out. Thread-safe.
 */
#ifndef KV_PLUGINS_S3_OBJECT_H
#define KV_PLUGINS_S3_OBJECT_H

#include "s3/client.h"
#include "s3/keys.h"

#define S3_LARGE (64u << 20) /* larger values are uploaded in parts */

/** Write the sum of a value, as the metadata hold it. */
void s3_sum(const void *data, size_t len, char ret[64]);
/** True when the data (HEAD: the length) match the object's sum. */
bool s3_is_whole(const struct s3_request *request);

/* The following functions free @path. */
/** Get a verified value. Reads it twice before it returns -EBADMSG. */
int s3_get(struct s3_client *client, char *path, uint8_t **ret, size_t *ret_len);
/** Put an object, a large one in parts (upload.c). -EEXIST: with @if_none_match, it exists. */
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

#endif
