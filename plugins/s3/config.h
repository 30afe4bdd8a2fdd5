// SPDX-License-Identifier: Apache-2.0
/**
 * Configuration from s3://BUCKET/PREFIX?OPTION=VALUE&... and the environment. Secrets come from the
 * environment only, so that no process list and no log shows them.
 */
#ifndef KV_PLUGINS_S3_CONFIG_H
#define KV_PLUGINS_S3_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

struct s3_config {
    char *bucket;
    char *prefix;   /* "" or "a/b/", not encoded */
    char *endpoint; /* scheme://host[:port], no slash at its end; the bucket in it when virtual */
    char *host;     /* value of the Host header */
    char *root;     /* encoded path of the bucket: "/BUCKET/" or "/" */
    char *base;     /* root + encoded prefix */
    char *region;
    char *access_key, *secret_key, *token; /* token may be NULL */
    char *cacert;                          /* PEM file of authorities; NULL: the system's */
    unsigned connections;                  /* connections at once */
    uint64_t timeout_ms;                   /* for one operation, with retries */
    uint64_t stall_ms;                     /* time without a byte after which a try ends */
    uint64_t part_bytes;                   /* larger values are uploaded in parts of this size */
};

/**
 * Read the configuration. Returns 0, or -EINVAL or -ENOMEM with a sentence in @error that has no
 * secret.
 */
int s3_config_read(const char *uri, struct s3_config *ret, struct kv_error *error);
void s3_config_fini(struct s3_config *config);

#endif
