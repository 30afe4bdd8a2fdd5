// SPDX-License-Identifier: Apache-2.0
/**
 * One try of a request: what to send, what curl receives, and what the answer means. The client's
 * thread calls these, and drives request->easy in between.
 */
#ifndef KV_PLUGINS_S3_EXCHANGE_H
#define KV_PLUGINS_S3_EXCHANGE_H

#include "s3/client.h"

enum s3_verdict {
    S3_FINAL,
    S3_AGAIN,  /* retry: the failure may pass */
    S3_SKEWED, /* retry at once, by the server's clock */
    S3_PLAIN   /* retry at once without if_none_match, which this server refuses */
};

/**
 * Make request->easy for a multi handle, signed for our clock plus @skew_s. Returns 0, -ENOMEM or
 * -EIO.
 */
int s3_exchange_begin(const struct s3_config *config, int64_t skew_s, struct s3_request *request);
/** Judge a try and fill in the request's result; @curl_code is curl's CURLcode. */
enum s3_verdict s3_exchange_judge(struct s3_request *request, int curl_code);
/** True when the server refused because the session's keys have expired. */
bool s3_keys_expired(const struct s3_request *request);
/** Free request->easy, which no multi handle holds any more. */
void s3_exchange_end(struct s3_request *request);
/** Clear the answer of the try before. */
void s3_exchange_forget(struct s3_request *request);

#endif
