// SPDX-License-Identifier: Apache-2.0
/**
 * Metrics of GET /metrics: request counters kept here, and the state of listeners, indexes,
 * connections and the process, read at each scrape. docs/kv-indexer.md lists every family.
 */
#ifndef KV_INDEXER_TELEMETRY_H
#define KV_INDEXER_TELEMETRY_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "http/http.h"
#include "indexer/registry/registry.h"

struct ki_telemetry;

/** Create the metrics. @routes must outlive them; their paths are the `endpoint` labels. */
int ki_telemetry_create(const struct kh_route *routes, size_t n_routes, struct ki_telemetry **ret);
void ki_telemetry_destroy(struct ki_telemetry *telemetry);

/** Count a request whose reply is being sent. */
void ki_telemetry_request(struct ki_telemetry *telemetry, const struct kh_request *request,
                          unsigned status);
/** Count a query of @blocks full blocks, whose best match has @matched. */
void ki_telemetry_query(struct ki_telemetry *telemetry, uint64_t blocks, uint64_t matched);

/**
 * Append the whole exposition. @all: each worker's series also where there are many workers; else of
 * such only whether there is a connection, the age of the last event, and what is wrong.
 */
void ki_telemetry_render(struct ki_telemetry *telemetry, struct ki_registry *registry,
                         struct kh_http *http, bool all, struct kv_buf *out);
/** Append the metrics that aren't counted by a ki_telemetry; @http may be NULL. */
void ki_telemetry_render_state(struct ki_registry *registry, struct kh_http *http, bool all,
                               struct kv_buf *out);

#endif
