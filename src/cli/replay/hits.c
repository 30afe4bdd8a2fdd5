// SPDX-License-Identifier: Apache-2.0
/*
 * --check-hits: compute the hits of one cache of a given size, without indexer or network, beside
 * the figures published for the traces. Equal figures show that this program reads traces and
 * counts hits as others do: textbook LRU over the references, with a partly filled last block
 * counted as a block.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/replay/cache.h"
#include "cli/replay/replay.h"
#include "cli/show/format.h"

#define N_SIZES 7
static const uint64_t SIZES[N_SIZES] = {1000, 5000, 10000, 30000, 50000, 100000, 0};

static const struct known {
    const char *name;
    uint64_t requests, ids, distinct; /* by which a published trace is recognised */
    double hits[N_SIZES];
} KNOWN[] = {
    {"Mooncake FAST'25 conversation",
     12031,
     288500,
     182790,
     {.0445, .1104, .2112, .3257, .3546, .3637, .3664}},
    {"Mooncake FAST'25 synthetic",
     3993,
     121877,
     43924,
     {.0825, .2791, .4235, .6242, .6396, .6396, .6396}},
};

static const struct known *recognise(const struct kc_trace_stats *stats)
{
    for (size_t i = 0; i < KV_COUNT(KNOWN); i++)
        if (KNOWN[i].requests == stats->requests && KNOWN[i].ids == stats->ids &&
            KNOWN[i].distinct == stats->distinct)
            return &KNOWN[i];
    return NULL;
}

int kc_hit_fraction(const struct kc_trace *trace, uint64_t blocks, enum kc_cache_order order,
                    double *ret)
{
    struct kc_cache *cache = NULL;
    struct kc_cache_use use;
    uint64_t *names = malloc((trace->n_ids + 1) * sizeof(*names)), found = 0;
    int rc = names ? kc_cache_create(blocks, order, &cache) : -ENOMEM;

    if (names)
        kc_trace_names(trace, names);
    for (size_t i = 0; i < trace->n_requests && rc == 0; i++) {
        const struct kc_request *request = &trace->requests[i];

        rc = kc_cache_use(cache, names + request->first, request->n, &use);
        found += rc == 0 ? use.held : 0;
    }
    free(names);
    kc_cache_destroy(cache);
    if (rc == 0)
        *ret = trace->n_ids ? (double)found / (double)trace->n_ids : 0;
    return rc;
}

static void print_head(const struct kc_trace_stats *stats, const struct known *known,
                       const char *name)
{
    printf("%s\n", known ? known->name : name);
    printf("  %s requests, %s blocks of %d tokens, %s distinct, %s of traffic\n",
           kc_count(stats->requests).s, kc_count(stats->ids).s, KC_TRACE_BLOCK,
           kc_count(stats->distinct).s, kc_span((double)stats->span_ms / 1000).s);
    printf("  input %.0f tokens in the mean, median %" PRIu32 ", longest %s; output %.0f\n\n",
           stats->mean_input, stats->median_input, kc_count(stats->max_input).s,
           stats->mean_output);
    printf("  blocks        LRU   leaf first%s\n", known ? "   published" : "");
}

/* Print one row. Returns false when it differs from the published figure. */
static bool print_row(const struct kc_trace *trace, const struct kc_trace_stats *stats,
                      const struct known *known, size_t i)
{
    double plain = 0, leaf = 0;
    bool good;

    if (kc_hit_fraction(trace, SIZES[i], KC_PLAIN_LRU, &plain) < 0 ||
        kc_hit_fraction(trace, SIZES[i], KC_LEAF_FIRST, &leaf) < 0) {
        fprintf(stderr, "kvasir replay: out of memory\n");
        return false;
    }
    good = !known || fabs(plain - known->hits[i]) < 0.00005 + 1e-9;
    /* Without a limit every repeated prefix hits: no published figure is needed. */
    if (SIZES[i] == 0 && (fabs(plain - stats->reuse) > 1e-12 || fabs(leaf - stats->reuse) > 1e-12))
        good = false;
    printf("  %-9s  %6.4f       %6.4f", SIZES[i] ? kc_count(SIZES[i]).s : "unlimited", plain, leaf);
    if (known)
        printf("       %6.4f", known->hits[i]);
    puts(good ? "" : "   DIFFERS");
    return good;
}

int kc_check_hits(const struct kc_trace *trace, const struct kc_trace_stats *stats,
                  const char *name)
{
    const struct known *known = recognise(stats);
    bool good = true;

    print_head(stats, known, name);
    for (size_t i = 0; i < N_SIZES; i++)
        good = print_row(trace, stats, known, i) && good;
    return good ? 0 : 1;
}
