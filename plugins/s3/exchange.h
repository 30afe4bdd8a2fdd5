// SPDX-License-Identifier: Apache-2.0
/**
 * One try of a request: what is sent, what curl brings, and what the answer means. The client's
 * thread calls these and drives request->easy in between.
 */
#ifndef KV_PLUGINS_S3_EXCHANGE_H
#define KV_PLUGINS_S3_EXCHANGE_H

#include "s3/client.h"

enum s3_verdict {
    S3_FINAL,
    S3_AGAIN,  /* it may pass */
    S3_SKEWED, /* at once again, by the server's clock */
    S3_PLAIN   /* at once again, without if_none_match, which this server refuses */
};

/** Make request->easy, signed for our clock plus @skew_s, ready for a multi handle. -ENOMEM, -EIO. */
int s3_exchange_begin(const struct s3_config *config, int64_t skew_s, struct s3_request *request);
/** Fill in what came of it; @curl_code is curl's CURLcode. */
enum s3_verdict s3_exchange_judge(struct s3_request *request, int curl_code);
/** Free request->easy, which is in no multi handle any more. */
void s3_exchange_end(struct s3_request *request);
/** Make room for another answer: what came before is forgotten. */
void s3_exchange_forget(struct s3_request *request);

#endif
