// SPDX-License-Identifier: Apache-2.0
/*
 * Hit rate over capacity (advisor/worth/curve.h): time of a reference, and the largest difference between a
 * curve of samples and the exact one. Yardstick in the same run: one simulated cache of one capacity,
 * of the many that a curve stands for.
 *
 *     curve_bench [TRACE.jsonl]    Mooncake format; without one, a generated workload
 */
#include <math.h>
#include <stdlib.h>

#include "advisor/worth/curve.h"
#include "base/core/error.h"
#include "cli/replay/cache.h"
#include "cli/replay/generate.h"
#include "support.h"

enum { ROUNDS = 5, SIZES = 400 };

/* All prompts, each block named by its prefix. */
struct load {
    struct kc_trace trace;
    uint64_t *names; /* as trace.ids */
};

static void read_load(struct load *load, const char *path)
{
    const struct kc_generate_opts opts = {.seed = 1, .n_requests = KC_GENERATE_REQUESTS};
    struct kv_error error = {0};
    int rc = path ? kc_trace_read(path, &load->trace, &error) : kc_generate(&opts, &load->trace);

    if (rc)
        bench_die(error.text[0] ? error.text : "no workload", rc);
    load->names = malloc(load->trace.n_ids * sizeof(*load->names));
    if (!load->names)
        bench_die("names", -ENOMEM);
    kc_trace_names(&load->trace, load->names);
}

static struct kva_curve *draw(const struct load *load, uint32_t samples, double *ret_ns)
{
    struct kva_curve *curve;
    double start = bench_cpu_ns();
    int rc = kva_curve_create(samples, &curve);

    for (size_t i = 0; i < load->trace.n_requests && !rc; i++)
        rc = kva_curve_use(curve, load->names + load->trace.requests[i].first,
                           load->trace.requests[i].n);
    if (rc)
        bench_die("a curve", rc);
    *ret_ns = (bench_cpu_ns() - start) / (double)load->trace.n_ids;
    return curve;
}

static double simulate(const struct load *load, uint64_t blocks)
{
    struct kc_cache_use use;
    struct kc_cache *cache;
    double start = bench_cpu_ns();
    int rc = kc_cache_create(blocks, KC_LEAF_FIRST, &cache);

    for (size_t i = 0; i < load->trace.n_requests && !rc; i++)
        rc = kc_cache_use(cache, load->names + load->trace.requests[i].first,
                          load->trace.requests[i].n, &use);
    if (rc)
        bench_die("a cache", rc);
    kc_cache_destroy(cache);
    return (bench_cpu_ns() - start) / (double)load->trace.n_ids;
}

static double largest_error(const struct kva_curve *curve, const struct kva_curve *exact)
{
    struct kva_curve_info info;
    double worst = 0;

    kva_curve_get(exact, &info);
    for (int i = 1; i <= SIZES; i++) {
        double even = info.most * i / SIZES, grown = pow(info.most, (double)i / SIZES);

        worst = fmax(worst, fabs(kva_curve_hits(curve, even) - kva_curve_hits(exact, even)));
        worst = fmax(worst, fabs(kva_curve_hits(curve, grown) - kva_curve_hits(exact, grown)));
    }
    return worst;
}

static void measure(const struct load *load, uint32_t samples, double cache_ns)
{
    struct bench_samples times = {.n = 0};
    struct kva_curve *curve = NULL, *exact;
    struct kva_curve_info info;
    double ns;

    for (int i = 0; i < ROUNDS; i++) {
        kva_curve_destroy(curve);
        curve = draw(load, samples, &ns);
        bench_sample(&times, ns);
    }
    exact = draw(load, 0, &ns);
    kva_curve_get(curve, &info);
    bench_line("curve",
               "'samples': %u, 'share': %.3f, 'ns_a_reference': %.1f, 'of_one_cache': %.2f, "
               "'largest_error': %.5f",
               samples, info.share, bench_middle(&times), bench_middle(&times) / cache_ns,
               largest_error(curve, exact));
    kva_curve_destroy(curve);
    kva_curve_destroy(exact);
}

int main(int argc, char **argv)
{
    static const uint32_t samples[] = {0, 65536, 16384, 4096};
    struct bench_samples caches = {.n = 0};
    struct load load = {.names = NULL};

    bench_usage(argc, argv, "[TRACE.jsonl]");
    read_load(&load, argc > 1 ? argv[1] : NULL);
    for (int i = 0; i < ROUNDS; i++)
        bench_sample(&caches, simulate(&load, 30000));
    bench_line("curve", "'references': %zu, 'one_cache_ns_a_reference': %.1f", load.trace.n_ids,
               bench_middle(&caches));
    for (size_t i = 0; i < KV_COUNT(samples); i++)
        measure(&load, samples[i], bench_middle(&caches));
    free(load.names);
    kc_trace_fini(&load.trace);
    return 0;
}
