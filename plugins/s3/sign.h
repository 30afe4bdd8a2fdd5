// SPDX-License-Identifier: Apache-2.0
/**
 * AWS Signature Version 4, header form, as S3 requires it: the path is signed as it is sent
 * (encoded once). libcurl 7.88's signer is unsuitable: it doesn't sort the query, and hashes an
 * empty body for uploads. Stateless and thread-safe.
 */
#ifndef KV_PLUGINS_S3_SIGN_H
#define KV_PLUGINS_S3_SIGN_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/core/buf.h"

#define S3_SHA256_HEX 65 /* with its NUL */
#define S3_STAMP 17      /* 20130524T000000Z and its NUL */

struct s3_header {
    const char *name; /* lower case */
    const char *value;
};

struct s3_signing {
    const char *method;
    const char *path;  /* encoded, from '/' on */
    const char *query; /* canonical: encoded, sorted by name, each NAME=VALUE; "" for none */
    const struct s3_header *headers; /* all are signed; sorted by name, no name twice */
    size_t n_headers;
    const char *payload_sha256; /* lower case hex */
    const char *stamp;          /* s3_stamp of the signing time */
    const char *region, *service;
    const char *access_key, *secret_key;
};

void s3_stamp(time_t when, char ret[S3_STAMP]);
/** Hash to lower case hex. -EIO when the library fails. */
int s3_sha256_hex(const void *data, size_t len, char ret[S3_SHA256_HEX]);
/** Append the value of an Authorization header to @ret. Returns 0, -ENOMEM or -EIO. */
int s3_sign(const struct s3_signing *in, struct kv_buf *ret);

/** Append @text with all characters but A-Za-z0-9-._~ as %XX. @slashes: keep '/'. */
void s3_encode(struct kv_buf *ret, const char *text, size_t len, int slashes);
void s3_hex(struct kv_buf *ret, const void *data, size_t len);

#endif
