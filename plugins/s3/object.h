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

/* -- Whether a put is kept -- */

#define S3_LOOKS 3 /* looks at an object that was just put: some servers show it late */

/** A put of an object, as a look at the object judges it. */
struct s3_put_try {
    char sum[64];       /* of what was put */
    int64_t began_s;    /* by the server's clock */
    bool if_none_match; /* another writer's object counts as well */
    bool refused;       /* the server answered 412: it says that there is an object */
};

/**
 * Judge the answer to a HEAD of an object that the server says it has: it took a PUT, or answered
 * 412 to one. True when an object is there that is whole, and is the one put or a later one. Answers
 * alone prove nothing: gateways drop what they took, and some servers count a deleted object of a
 * bucket with versions as one that exists.
 */
bool s3_is_kept(const struct s3_put_try *put, const struct s3_request *head);
/**
 * Prepare HEAD @head for another look after a pause, when it found nothing of what the server took.
 * @n: looks made so far. False: it found something, failed, or was the last.
 */
bool s3_look_again(const struct s3_put_try *put, struct s3_request *head, unsigned n);
/**
 * Return the error of a put that isn't kept, by its last look @head, and log it. -ENOENT, not
 * logged: the put was refused without reason; send it again without a condition.
 */
int s3_not_kept(const struct s3_put_try *put, const struct s3_request *head);
/** Look for an object. @path: borrowed. Returns 0 or what s3_not_kept returns. */
int s3_confirm(struct s3_client *client, const char *path, const struct s3_put_try *put);

/* The following functions free @path. */
/** Get a verified value. Reads it twice before it returns -EBADMSG. */
int s3_get(struct s3_client *client, char *path, uint8_t **ret, size_t *ret_len);
/**
 * Put an object, a large one in parts (upload.c), and look that it is kept. -EEXIST: with
 * @if_none_match, a whole one exists.
 */
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
