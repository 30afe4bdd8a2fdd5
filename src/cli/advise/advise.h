// SPDX-License-Identifier: Apache-2.0
/** `kvasir advise`: what more room for the KV cache would bring, from a trace of requests. */
#ifndef KV_CLI_ADVISE_ADVISE_H
#define KV_CLI_ADVISE_ADVISE_H

#include <stdbool.h>
#include <stdio.h>

#include "advisor/worth/worth.h"
#include "base/args/args.h"
#include "base/core/buf.h"
#include "cli/replay/trace.h"

#define KC_ADVISE_MAX_TIERS 16

/** A tier of the command line: NAME=SIZE[:PRICE]. */
struct kc_advise_tier {
    char name[32];
    uint64_t bytes;
    double price; /* of a GiB in a month; 0: none given */
    struct kva_tier_worth worth;
};

struct kc_advise_opts {
    const char *trace; /* NULL: a generated workload */
    uint64_t samples, token_bytes, prefill, seed;
    uint64_t gpu_hour; /* 10^-9 */
    struct kv_arg_list tier_texts;
    const char *json, *svg;
};

struct kc_advice {
    struct kc_advise_opts opts;
    struct kc_advise_tier tiers[KC_ADVISE_MAX_TIERS];
    size_t n_tiers;
    struct kc_trace_stats trace;
    bool has_times; /* else rates are those of the whole trace */
    struct kva_curve *curve;
    struct kva_curve_info info;
    struct kva_terms terms;
};

/**
 * Parse the command line. Returns 0; 1 when the call is answered already; a negative errno with
 * @error.
 */
int kc_advise_options(int argc, char **argv, struct kc_advice *ret, struct kv_error *error);

/** Append the report for people, as JSON, and the curve as SVG. Out of memory: @out->error. */
void kc_advise_text(const struct kc_advice *advice, struct kv_buf *out);
void kc_advise_json(const struct kc_advice *advice, struct kv_buf *out);
void kc_advise_svg(const struct kc_advice *advice, struct kv_buf *out);

#endif
