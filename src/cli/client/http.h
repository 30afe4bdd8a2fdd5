// SPDX-License-Identifier: Apache-2.0
/** One keep-alive HTTP connection to a kv-indexer. Thread-confined. */
#ifndef KV_CLI_CLIENT_HTTP_H
#define KV_CLI_CLIENT_HTTP_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"

struct kc_http;

/**
 * Create a connection to @url: "http://host:port"; a slash at its end is dropped. @token: bearer
 * token to send, or NULL. Returns 0, -EINVAL or -ENOMEM.
 */
int kc_http_create(const char *url, const char *token, struct kc_http **ret);
/** Trust an https server by the PEM authorities in @file instead of the system's. */
void kc_http_set_cacert(struct kc_http *http, const char *file);
void kc_http_destroy(struct kc_http *http);
#define KC_HTTP_TIMEOUT_MS 30000u /* default timeout of a request */
/** Give up a request after @timeout_ms, connecting included. Default: KC_HTTP_TIMEOUT_MS. */
void kc_http_set_timeout(struct kc_http *http, uint64_t timeout_ms);
/** Kind of failure of a request. */
enum kc_http_trouble {
    KC_HTTP_FINE,    /* the server answered */
    KC_HTTP_NAME,    /* the host's name is not known */
    KC_HTTP_REFUSED, /* nobody listens there */
    KC_HTTP_HUNG_UP, /* the server closed the connection before an answer */
    KC_HTTP_SILENT,  /* no answer within the timeout */
    KC_HTTP_TLS,     /* the server's certificate is not trusted, or it speaks no TLS */
    KC_HTTP_NO_HTTP, /* what came is no HTTP */
    KC_HTTP_FAILED   /* another failure */
};
/** Return what happened to the last request. */
enum kc_http_trouble kc_http_trouble(const struct kc_http *http);
/** Return the Date header of the last answer in seconds since the epoch; -1: it had none. */
int64_t kc_http_date(const struct kc_http *http);
/** Return the end of a message about @status: "; " and what to do about a 401, else "". */
const char *kc_http_advice(const struct kc_http *http, int status);
/** The URL for people: without user and password. */
const char *kc_http_url(const struct kc_http *http);

enum kc_body { KC_BODY_NONE, KC_BODY_JSON, KC_BODY_MSGPACK };

/**
 * Send a GET (KC_BODY_NONE) or POST. The answer's body stays valid until the next request. Returns
 * the status (200, 404, ...) or, with @error, -ECONNREFUSED (no server, or the connection broke),
 * -ETIMEDOUT, -EMSGSIZE (a body above 256 MiB), -ENOMEM or -EIO.
 */
int kc_http_request(struct kc_http *http, const char *path, enum kc_body type, const void *body,
                    size_t len, const struct kv_buf **ret_body, struct kv_error *error);

#endif
