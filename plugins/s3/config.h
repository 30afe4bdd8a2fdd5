// SPDX-License-Identifier: Apache-2.0
/**
 * Configuration from s3://BUCKET/PREFIX?OPTION=VALUE&... and the environment. Secrets come from the
 * environment only, so that no process list and no log shows them.
 */
#ifndef KV_PLUGINS_S3_CONFIG_H
#define KV_PLUGINS_S3_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

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
    unsigned connections;                  /* at once */
    uint64_t timeout_ms;                   /* for one operation, tries included */
    uint64_t stall_ms;                     /* without a byte: one try is given up */
    uint64_t part_bytes;                   /* larger values go up in parts of this size */
};

/** 0, or -EINVAL / -ENOMEM with a sentence that names no secret. */
int s3_config_read(const char *uri, struct s3_config *ret, struct kv_error *error);
void s3_config_fini(struct s3_config *config);

#endif
