// SPDX-License-Identifier: Apache-2.0
/**
 * Signed requests to one server, many at once. One thread drives a curl multi handle; other threads
 * hand it requests, and wait or get a callback.
 *
 * A failure that may pass is retried: broken connections, stalls, 408, 409, 429, 5xx, a wrong
 * clock. The pause before a retry is random and grows, and is at least Retry-After. Retries end
 * when the request's time is over: the configured time since its first try, and one second more for
 * each MiB that the present try has transferred. So a long value may take long, and a very slow
 * server may not. Refused connections are given up earlier: after S3_REFUSED_MS if no answer ever
 * came; else after a quarter of the configured time, as servers are restarted. Redirects are never
 * followed.
 *
 *   s3_submit -> inbox -> waiting (until due and a connection is free) -> curl -> done
 *                            ^------------- try again later ------------------'
 */
#ifndef KV_PLUGINS_S3_CLIENT_H
#define KV_PLUGINS_S3_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/core/buf.h"
#include "s3/config.h"
#include "s3/sign.h"

#define S3_SUM_HEADER "x-amz-meta-kvasir"   /* 1-LENGTH-XXH3: the expected content of an object */
#define S3_MAX_BODY (UINT64_C(5) << 30)     /* of an object */
#define S3_MAX_LISTING (UINT64_C(16) << 20) /* of a page: 1000 keys take 4 MiB at most */
#define S3_MAX_ANSWER (UINT64_C(1) << 20)   /* of any other answer */
#define S3_REFUSED_MS 2000

struct s3_request;
typedef void (*s3_done_fn)(void *arg, struct s3_request *request);

/**
 * A request: filled by the caller, unchanged until done, finished by the caller with
 * s3_request_fini.
 */
struct s3_request {
    /* Input. */
    const char *method;
    char *path;         /* owned */
    char *query;        /* owned, canonical; NULL: none */
    char sum[64];       /* value of S3_SUM_HEADER to send; "": none */
    char *copy_source;  /* owned: copy from this object, with new metadata */
    bool if_none_match; /* only when the object doesn't exist */
    char if_match[96];  /* only when its ETag is this; "": whatever it is */
    /* The root element that an answer below 300 must have, complete: copies and completed uploads
     * may fail after a 200, and the server may pause long before the body. NULL: any body. */
    const char *root;
    uint64_t range_at, range_len; /* read these bytes of the object only; range_len 0: all */
    /* Borrowed memory for the body of a 206, of range_len bytes in all; NULL: it becomes data. */
    const struct iovec *parts;
    size_t n_parts;
    uint64_t max_body; /* a longer answer is -EFBIG; 0: S3_MAX_ANSWER */
    const void *body;  /* borrowed */
    size_t len;
    s3_done_fn done; /* called on the client's thread without a lock; NULL: use s3_wait */
    void *arg;

    /* Result. */
    /* Result: 0, or of statuses -ENOENT 404, -EEXIST 412 to a condition, -EACCES 401 and 403, and
     * -ENOTSUP 501, -ERANGE 416. Keys that have expired are -EACCES. Without an answer: -ETIMEDOUT,
     * -ECONNREFUSED, -ENOMEM, -EFBIG, -ECANCELED (client closed), -EIO. */
    int error;
    int status;    /* of the last answer; 0: none came */
    char code[64]; /* code of <Error>, or the reason of a failed connection */
    uint8_t *data; /* malloc'd, never NULL on success; the caller may take it */
    size_t data_len;
    char etag[96], got_sum[64];
    char region[64];    /* the bucket's, where a refusal names it; "": it doesn't */
    int64_t modified_s; /* Last-Modified; 0: unknown */
    int64_t server_s;   /* Date; 0: unknown */
    uint64_t pause_ns;  /* Retry-After; 0: none */
    uint64_t length;    /* Content-Length; UINT64_MAX: unknown */
    uint64_t got_at;    /* first byte of Content-Range; UINT64_MAX: no, or no valid one */
    uint64_t got_end;   /* its last byte */

    /* Used by the client. */
    struct s3_client *client;
    struct s3_request *next;
    void *easy, *headers;
    char sha256[S3_SHA256_HEX];
    size_t sent, capacity;
    size_t part, part_at;         /* where the next byte of the body goes in parts */
    uint64_t due_ns, deadline_ns; /* deadline: 0 before the first try */
    int64_t signed_s, retry_at_s;
    unsigned tries;
    char before[64]; /* code of the last try that ended otherwise than by time; "": none */
    bool finished, skewed, too_big, cut, no_memory, refused;
};

struct s3_client;
int s3_client_create(const struct s3_config *config, struct s3_client **ret); /* borrows config */
void s3_client_destroy(struct s3_client *client); /* requests left end with -ECANCELED */

void s3_submit(struct s3_client *client, struct s3_request *request);
int s3_wait(struct s3_client *client, struct s3_request *request);
int s3_run(struct s3_client *client, struct s3_request *request); /* submit and wait */
void s3_request_fini(struct s3_request *request);
/* clears the result: the request can be run again */
void s3_request_reset(struct s3_request *request);
uint64_t s3_client_trips(const struct s3_client *client);
/** Return the server's clock minus ours, in seconds, by its last answer; 0 before the first. */
int64_t s3_client_offset_s(const struct s3_client *client);
/** Return the time by the server's clock, as known from its answers. */
int64_t s3_client_now_s(const struct s3_client *client);

#endif
