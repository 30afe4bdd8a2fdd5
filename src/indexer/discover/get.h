// SPDX-License-Identifier: Apache-2.0
/** A GET of a source, on the source's thread, which ends when the source is stopped. */
#ifndef KV_INDEXER_DISCOVER_GET_H
#define KV_INDEXER_DISCOVER_GET_H

#include "base/core/buf.h"
#include "indexer/discover/source.h"

struct ki_get {
    const char *url;
    const char *token;   /* bearer token; NULL: none */
    const char *ca_file; /* NULL: the system's authorities */
    uint32_t connect_ms;
    uint32_t silence_ms; /* longest time without a byte */
    uint32_t whole_ms;   /* longest time in all; 0: any */
    /** Take bytes of a body of status 200. Returns false to end the request. */
    bool (*data)(void *arg, const char *data, size_t len);
    /** The status is 200: the body follows. NULL: nobody asks. */
    void (*begins)(void *arg);
    void *arg;
};

/**
 * Run the request. Returns the HTTP status, with the first 4 KiB of the body of another status than 200
 * in *@ret_body; -ECANCELED (stopped, or data returned false); -ETIMEDOUT (silence, or no end); -EIO, -ENOMEM with
 * @error's text.
 */
int ki_get_run(struct ki_source *source, const struct ki_get *get, struct kv_buf *ret_body,
               struct kv_error *error);

#endif
