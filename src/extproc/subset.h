// SPDX-License-Identifier: Apache-2.0
/** The candidates that a request's metadata allows. */
#ifndef KV_EXTPROC_SUBSET_H
#define KV_EXTPROC_SUBSET_H

#include <stdbool.h>

#include "base/core/buf.h"
#include "ext_proc.pb-c.h"

/** Endpoints, each with a NUL behind it. Zero-initialise. */
struct kx_subset {
    bool limited; /* only these */
    struct kv_buf texts;
    size_t n;
};

/**
 * Read envoy.lb.subset_hint / x-gateway-destination-endpoint-subset: a list of "ip:port", or a text with
 * commas. Absent: no limit. Endpoints beyond KX_MAX_CANDIDATES are left out. Returns 0 or -ENOMEM.
 */
int kx_subset_read(struct kx_subset *subset, const Kx__Metadata *metadata);

/** Write the endpoints' addresses to @ret, raw const char *. Returns 0 or -ENOMEM. */
int kx_subset_list(const struct kx_subset *subset, struct kv_buf *ret);

#endif
