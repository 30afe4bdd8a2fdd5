// SPDX-License-Identifier: Apache-2.0
/** Listings of a bucket. Thread-safe. */
#ifndef KV_PLUGINS_S3_LIST_H
#define KV_PLUGINS_S3_LIST_H

#include "s3/client.h"
#include "s3/xml.h"

#define S3_PAGE 1000 /* upper limit for keys of one page */

/** List all objects under PREFIX + @folder. Keys are handed out decoded, without both. */
int s3_list(struct s3_client *client, const struct s3_config *config, const char *folder,
            unsigned page, s3_listed_fn each, void *arg);

/** Get the server's clock, which sets objects' ages. -ENOTSUP: the server has no Date. */
int s3_server_time(struct s3_client *client, const struct s3_config *config, int64_t *ret);

#endif
