// SPDX-License-Identifier: Apache-2.0
/**
 * Calls between libkvbm and libkvbm_http (src/peer/http), which holds all that needs libcurl. Both
 * come from one build; `abi` refuses another one's.
 */
#ifndef KV_PLANE_HTTP_ABI_H
#define KV_PLANE_HTTP_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/module/module.h"

#define KVBM_HTTP_ABI 1
#define KVBM_HTTP_SYMBOL "kvbm_http_get_abi" /* a kv_module_get_fn */
#define KVBM_HTTP_LIBRARY "libkvbm_http.so.0"
#define KVBM_HTTP_SLOTS 2 /* requests at a time */

/** A client. One thread uses it. */
struct kvbm_http;

struct kvbm_http_opts {
    const char *ca, *cert, *key; /* PEM files, or NULL */
    /** Take bytes of the answer in @slot. Returns false to end the request. */
    bool (*data)(void *arg, unsigned slot, const void *data, size_t len);
    /** The request in @slot has ended: with an HTTP status, or 0 and @why. */
    void (*end)(void *arg, unsigned slot, unsigned status, const char *why);
    void *arg;
};

struct kvbm_http_post {
    const char *url;
    const char *authorization; /* value of the header, or NULL */
    const void *body;          /* copied */
    size_t len;
    uint32_t connect_ms, timeout_ms; /* timeout_ms 0: none, for streams */
};

struct kvbm_http_abi {
    struct kv_module_head head;

    int (*open)(const struct kvbm_http_opts *opts, struct kvbm_http **ret); /* 0 or -ENOMEM */
    void (*close)(struct kvbm_http *http);
    /** Start a POST in @slot, ending the one that is in it without a call of end. */
    int (*post)(struct kvbm_http *http, unsigned slot, const struct kvbm_http_post *post);
    /** End a request without a call of end. */
    void (*cancel)(struct kvbm_http *http, unsigned slot);
    /**
     * Wait up to @timeout_ms for the network or until @fd (-1: none) is readable, and call data and end. Doesn't
     * wait once one of them was called. They must not call this client.
     */
    void (*poll)(struct kvbm_http *http, int fd, uint32_t timeout_ms);
};

/** Open libkvbm_http, once. Returns NULL without it; one log line says why. */
const struct kvbm_http_abi *kvbm_http_load(void);

#endif
