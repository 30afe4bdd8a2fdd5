// SPDX-License-Identifier: Apache-2.0
/**
 * Request traces in the format of the Mooncake FAST'25 release: JSON lines {"timestamp": ms,
 * "input_length": tokens, "output_length": tokens, "hash_ids": [id, ...]}. One id names a block of
 * 512 input tokens. Equal ids at the start of two requests are an equal prefix.
 */
#ifndef KV_CLI_REPLAY_TRACE_H
#define KV_CLI_REPLAY_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

#define KC_TRACE_BLOCK 512 /* tokens per hash id */
#define KC_TRACE_MAX_LINE (UINT32_C(4) << 20)
#define KC_TRACE_MAX_IDS (UINT64_C(1) << 28) /* 2 GiB of ids */

struct kc_request {
    uint64_t timestamp_ms;
    uint32_t input_length;
    uint32_t output_length;
    size_t first; /* its ids are trace->ids[first .. first + n) */
    uint32_t n;
};

struct kc_trace {
    struct kc_request *requests; /* by timestamp */
    size_t n_requests, request_capacity;
    uint64_t *ids;
    size_t n_ids, id_capacity;
};

/**
 * Read a whole file ("-": standard input). On failure @error has the reason, with the line number.
 * Returns 0, -ENOENT and other errors of opening it, -EPROTO (not a trace), -EMSGSIZE, -ENOMEM.
 */
int kc_trace_read(const char *path, struct kc_trace *ret, struct kv_error *error);

/** Parse one line into @trace. Returns 0, -EPROTO, -EMSGSIZE, -ENOMEM; on failure nothing is added.
 */
int kc_trace_parse_line(struct kc_trace *trace, const char *line, size_t len,
                        struct kv_error *error);

/**
 * Add a request with room for @n ids at *ret_ids, for the caller to fill. Returns 0, -EMSGSIZE or
 * -ENOMEM.
 */
int kc_trace_add(struct kc_trace *trace, const struct kc_request *request, uint64_t **ret_ids);

void kc_trace_fini(struct kc_trace *trace);

/**
 * Name the prefixes of a request, one name per id: equal where all ids up to there are equal. (In
 * the published traces an id has only one predecessor, so the ids alone would do.) Chains that
 * start with another @start have no names in common.
 */
void kc_trace_chain(const uint64_t *ids, size_t n, uint64_t start, uint64_t *ret);

/** Name the prefixes of all requests: ret[i] is that of trace->ids[i], of n_ids. */
void kc_trace_names(const struct kc_trace *trace, uint64_t *ret);

/** The name of a workload for people: that of its file. @path NULL: a generated one. */
const char *kc_trace_title(const char *path);

/** Statistics of a trace. */
struct kc_trace_stats {
    uint64_t requests, ids;
    uint64_t distinct; /* prefixes that end in different blocks */
    uint64_t max_input;
    double mean_input, mean_output;
    uint32_t median_input;
    uint64_t span_ms;
    double reuse; /* fraction of ids that an unlimited cache would find: (ids - distinct) / ids */
};
/** Compute the statistics. Returns 0 or -ENOMEM. */
int kc_trace_measure(const struct kc_trace *trace, struct kc_trace_stats *ret);

#endif
