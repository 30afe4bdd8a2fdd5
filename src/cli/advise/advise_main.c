// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/advise/advise.h"
#include "cli/commands.h"
#include "cli/replay/generate.h"

/* Make the curve of a trace, the requests one after the other. */
static int draw(struct kc_advice *advice, const struct kc_trace *trace)
{
    uint64_t *names = malloc((trace->n_ids + 1) * sizeof(*names));
    int rc = names ? kva_curve_create((uint32_t)advice->opts.samples, &advice->curve) : -ENOMEM;

    if (names)
        kc_trace_names(trace, names);
    for (size_t i = 0; i < trace->n_requests && !rc; i++)
        rc = kva_curve_use(advice->curve, names + trace->requests[i].first, trace->requests[i].n);
    free(names);
    return rc;
}

static void judge(struct kc_advice *advice)
{
    const struct kc_advise_opts *opts = &advice->opts;
    const struct kc_trace_stats *trace = &advice->trace;
    double before = 0;

    kva_curve_get(advice->curve, &advice->info);
    advice->has_times = trace->span_ms > 0;
    advice->terms = (struct kva_terms){
        .block_bytes = (double)opts->token_bytes * KC_TRACE_BLOCK,
        .block_tokens = trace->ids
                            ? trace->mean_input * (double)trace->requests / (double)trace->ids
                            : KC_TRACE_BLOCK,
        .hours = advice->has_times ? (double)trace->span_ms / 3600e3 : 1,
        .prefill = (double)opts->prefill,
        /* without times nothing is known of a month */
        .gpu_hour = advice->has_times ? (double)opts->gpu_hour / 1e9 : 0,
    };
    for (size_t i = 0; i < advice->n_tiers; i++) {
        struct kc_advise_tier *tier = &advice->tiers[i];

        kva_worth_of_tier(advice->curve, &advice->terms, before, (double)tier->bytes, tier->price,
                          &tier->worth);
        before += (double)tier->bytes;
    }
}

static int read_trace(struct kc_advice *advice, struct kv_error *error)
{
    const struct kc_generate_opts generate = {.seed = advice->opts.seed,
                                              .n_requests = KC_GENERATE_REQUESTS};
    struct kc_trace trace = {0};
    int rc = advice->opts.trace ? kc_trace_read(advice->opts.trace, &trace, error)
                                : kc_generate(&generate, &trace);

    if (rc == 0)
        rc = kc_trace_measure(&trace, &advice->trace);
    if (rc == 0)
        rc = draw(advice, &trace);
    kc_trace_fini(&trace);
    if (rc == 0)
        judge(advice);
    else if (!error->text[0])
        (void)kv_fail(error, rc, 0, "%s", strerror(-rc));
    return rc;
}

/* Write what @print appends to a file, - for standard output. */
static int write_to(const struct kc_advice *advice,
                    void (*print)(const struct kc_advice *, struct kv_buf *), const char *path,
                    struct kv_error *error)
{
    bool own = strcmp(path, "-") != 0;
    struct kv_buf out = KV_BUF_INIT;
    FILE *file = own ? fopen(path, "w") : stdout;
    int rc = file ? 0 : -errno;

    if (file) {
        print(advice, &out);
        rc = out.error;
        if (!rc && (fwrite(out.data, 1, out.len, file) != out.len || fflush(file)))
            rc = errno ? -errno : -EIO;
        if (own && fclose(file) && !rc)
            rc = -errno;
    }
    kv_buf_fini(&out);
    return rc ? kv_fail(error, rc, 0, "can't write %.200s: %s", own ? path : "standard output",
                        strerror(-rc))
              : 0;
}

int kc_advise_main(int argc, char **argv)
{
    struct kv_error error = {0};
    struct kc_advice advice;
    int rc = kc_advise_options(argc, argv, &advice, &error), status = rc < 0 ? 2 : 0;

    if (rc == 0) {
        rc = read_trace(&advice, &error);
        if (!rc && advice.opts.svg)
            rc = write_to(&advice, kc_advise_svg, advice.opts.svg, &error);
        if (!rc && advice.opts.json)
            rc = write_to(&advice, kc_advise_json, advice.opts.json, &error);
        if (!rc && (!advice.opts.json || strcmp(advice.opts.json, "-") != 0))
            rc = write_to(&advice, kc_advise_text, "-", &error);
        status = rc < 0;
        kva_curve_destroy(advice.curve);
    }
    if (rc < 0)
        fprintf(stderr, "kvasir advise: %s\n", error.text);
    return status;
}
