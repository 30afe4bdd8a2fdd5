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

#define KI_N_LATENCIES 25 /* buckets of a request's duration; the last has no bound */

/** Counts of queries since the start, of /query and /query_by_hash. */
struct ki_query_counts {
    uint64_t hits, misses; /* answers with and without a match */
    uint64_t blocks;       /* full blocks asked for */
    uint64_t matched;      /* blocks of the longest match of each query */
    uint64_t latency[KI_N_LATENCIES];
};

/** Create the metrics. @routes must outlive them; their paths are the `endpoint` labels. */
int ki_telemetry_create(const struct kh_route *routes, size_t n_routes, struct ki_telemetry **ret);
void ki_telemetry_destroy(struct ki_telemetry *telemetry);

/** Count a request whose reply is being sent. */
void ki_telemetry_request(struct ki_telemetry *telemetry, const struct kh_request *request,
                          unsigned status);
/** Count a query of @blocks full blocks, whose best match has @matched. */
void ki_telemetry_query(struct ki_telemetry *telemetry, uint64_t blocks, uint64_t matched);

/** Read the counts of queries. Any thread. */
void ki_telemetry_queries(struct ki_telemetry *telemetry, struct ki_query_counts *ret);
/**
 * Return the duration in seconds below which the part @q (0 to 1) of the requests in @latency lie, as
 * Prometheus's histogram_quantile has it: evenly spread in a bucket. Negative: there are none.
 */
double ki_latency_quantile(const uint64_t latency[KI_N_LATENCIES], double q);
/** Return the process's resident memory in bytes; 0: unknown. */
uint64_t ki_resident_bytes(void);

/**
 * Append the whole exposition. @all: each worker's series also where there are many workers; else of
 * such only whether there is a connection, the age of the last event, and what is wrong.
 */
void ki_telemetry_render(struct ki_telemetry *telemetry, struct ki_registry *registry,
                         struct kh_http *http, bool all, struct kv_buf *out);
/** Append the metrics that aren't counted by a ki_telemetry; @http may be NULL. */
void ki_telemetry_render_state(struct ki_registry *registry, struct kh_http *http, bool all,
                               struct kv_buf *out);

/** A limit of the service: what the options ask for, and what the descriptor limit leaves of it. */
struct ki_limit {
    const char *option; /* its name, without dashes */
    uint64_t wanted, is;
};
/** Append the limits, and the number of descriptors that the process may have. */
void ki_telemetry_render_limits(const struct ki_limit *limits, size_t n, struct kv_buf *out);

#endif
