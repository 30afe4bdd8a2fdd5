// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/json/json.h"
#include "cli/advise/advise.h"
#include "cli/show/format.h"

#define ROWS 12
#define BAR 24
#define POINTS_PER_DOUBLING 4

static void print_head(const struct kc_advice *advice, struct kv_buf *out)
{
    const struct kc_trace_stats *trace = &advice->trace;

    kv_buf_printf(out, "Advice for %s\n", kc_trace_title(advice->opts.trace));
    kv_buf_printf(out, "  %s requests, %s blocks of %d tokens, %s of them different",
                  kc_count(trace->requests).s, kc_count(trace->ids).s, KC_TRACE_BLOCK,
                  kc_count(trace->distinct).s);
    if (advice->has_times)
        kv_buf_printf(out, ", %s of traffic", kc_span((double)trace->span_ms / 1000).s);
    kv_buf_printf(out,
                  "\n  a block takes %s, %s a token; a GPU computes %s prompt tokens a second\n",
                  kc_bytes(advice->terms.block_bytes).s,
                  kc_bytes((double)advice->opts.token_bytes).s, kc_count(advice->opts.prefill).s);
    if (!advice->has_times && advice->opts.gpu_hour > 0)
        kv_buf_puts(out, "  the requests have no times: nothing is told in money\n");
    if (advice->info.share < 1)
        kv_buf_printf(out, "  the curve is that of %s sampled blocks, %.1f %% of all\n",
                      kc_count(advice->info.followed).s, 100 * advice->info.share);
}

static void print_row(const struct kc_advice *advice, double bytes, double all, struct kv_buf *out)
{
    struct kva_worth worth;
    char bar[BAR + 1] = "";

    kva_worth_of(advice->curve, &advice->terms, bytes, &worth);
    if (all > 0)
        memset(bar, '#', (size_t)lround(worth.hits / all * BAR));
    kv_buf_printf(out, "  %-11s %6.2f %%  %-*s  %10s  %9s  %8s\n", kc_bytes(bytes).s,
                  100 * worth.hits, BAR, bar, kc_scaled(worth.tokens).s,
                  kc_span(worth.gpu_seconds).s, kc_span(worth.next_gpu_seconds).s);
}

/* The curve from 1/2^11 of the room that finds all on, in powers of two. */
static void print_curve(const struct kc_advice *advice, struct kv_buf *out)
{
    double most = kva_worth_most(advice->curve, &advice->terms), end = 1;
    const char *rate = advice->has_times ? "an hour" : "in all";
    struct kva_worth all;

    while (end < most)
        end *= 2;
    kva_worth_of(advice->curve, &advice->terms, end, &all);
    kv_buf_printf(out, "\n  %-11s %-35s  %10s  %9s  %8s\n", "", "", "tokens", "GPU time",
                  "next GiB");
    kv_buf_printf(out, "  %-11s %-35s  %10s  %9s  %8s\n", "cache", "hit rate", "saved", "saved",
                  "saves");
    kv_buf_printf(out, "  %-11s %-35s  %10s  %9s  %8s\n", "", "", rate, rate, rate);
    for (int i = ROWS - 1; i >= 0; i--)
        if (ldexp(end, -i) >= advice->terms.block_bytes)
            print_row(advice, ldexp(end, -i), all.hits, out);
    kv_buf_printf(out, "\n  knee: %s. Each byte beyond brings less than the average one\n",
                  kc_bytes(kva_worth_knee(advice->curve, &advice->terms)).s);
}

static void print_money(const struct kc_advise_tier *tier, struct kv_buf *out)
{
    kv_buf_printf(out, "  %10.2f  %10.2f", tier->worth.month, tier->worth.cost);
    if (tier->price > 0)
        kv_buf_printf(out, "  %10s  %10.2f", kc_bytes(tier->worth.best).s, tier->worth.best_gain);
}

static void print_tiers(const struct kc_advice *advice, struct kv_buf *out)
{
    bool money = advice->terms.gpu_hour > 0;
    const char *rate = advice->has_times ? "an hour" : "in all";

    kv_buf_printf(out, "\n  %-12s %-10s  %8s  %8s  %9s  %8s%s\n", "", "", "", "hits", "GPU time",
                  "next GiB", money ? "       saves       costs   best size       gains" : "");
    kv_buf_printf(out, "  %-12s %-10s  %8s  %8s  %9s  %8s%s\n", "tier", "size", "hits", "so far",
                  rate, rate, money ? "     a month     a month    by price     a month" : "");
    for (size_t i = 0; i < advice->n_tiers; i++) {
        const struct kc_advise_tier *tier = &advice->tiers[i];

        kv_buf_printf(out, "  %-12s %-10s  %6.2f %%  %6.2f %%  %9s  %8s", tier->name,
                      kc_bytes((double)tier->bytes).s, 100 * tier->worth.hits,
                      100 * tier->worth.total.hits, kc_span(tier->worth.gpu_seconds).s,
                      kc_span(tier->worth.total.next_gpu_seconds).s);
        if (money)
            print_money(tier, out);
        kv_buf_puts(out, "\n");
    }
}

void kc_advise_text(const struct kc_advice *advice, struct kv_buf *out)
{
    print_head(advice, out);
    print_curve(advice, out);
    if (advice->n_tiers)
        print_tiers(advice, out);
}

/* -- JSON -------------------------------------------------------------------------------------- */

static void put_worth(const struct kva_worth *worth, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "bytes", (uint64_t)worth->bytes);
    kv_json_member_double(w, "hit_rate", worth->hits);
    kv_json_member_double(w, "tokens_saved", worth->tokens);
    kv_json_member_double(w, "gpu_seconds_saved", worth->gpu_seconds);
    kv_json_member_double(w, "next_gib_gpu_seconds", worth->next_gpu_seconds);
    kv_json_member_double(w, "saved_month", worth->month);
}

static void put_tier(const struct kc_advise_tier *tier, struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "name", tier->name);
    kv_json_member_u64(w, "bytes", tier->bytes);
    kv_json_member_double(w, "hit_rate", tier->worth.hits);
    kv_json_member_double(w, "gpu_seconds_saved", tier->worth.gpu_seconds);
    kv_json_member_double(w, "saved_month", tier->worth.month);
    kv_json_member_double(w, "cost_month", tier->worth.cost);
    kv_json_member_u64(w, "best_bytes", (uint64_t)tier->worth.best);
    kv_json_member_double(w, "best_gain_month", tier->worth.best_gain);
    kv_json_key(w, "with_faster");
    kv_json_begin_object(w);
    put_worth(&tier->worth.total, w);
    kv_json_end_object(w);
    kv_json_end_object(w);
}

static void put_curve(const struct kc_advice *advice, struct kv_json_writer *w)
{
    double most = kva_worth_most(advice->curve, &advice->terms);
    double block = advice->terms.block_bytes, factor = exp2(1.0 / POINTS_PER_DOUBLING);
    struct kva_worth worth;

    kv_json_key(w, "curve");
    kv_json_begin_array(w);
    for (double n = 1, bytes = 0; bytes < most; n = KV_MAX(n + 1, round(n * factor))) {
        bytes = KV_MIN(n * block, most);
        kva_worth_of(advice->curve, &advice->terms, bytes, &worth);
        kv_json_begin_object(w);
        put_worth(&worth, w);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

void kc_advise_json(const struct kc_advice *advice, struct kv_buf *out)
{
    struct kv_json_writer writer, *w = &writer;

    kv_json_writer_init(w, out);
    kv_json_begin_object(w);
    kv_json_member_str(w, "workload", kc_trace_title(advice->opts.trace));
    kv_json_member_u64(w, "requests", advice->trace.requests);
    kv_json_member_u64(w, "blocks", advice->trace.ids);
    kv_json_member_u64(w, "distinct", advice->trace.distinct);
    kv_json_member_double(w, "hours", advice->terms.hours);
    kv_json_member_str(w, "rates", advice->has_times ? "hour" : "all");
    kv_json_member_u64(w, "block_bytes", (uint64_t)advice->terms.block_bytes);
    kv_json_member_u64(w, "prefill", advice->opts.prefill);
    kv_json_member_double(w, "sampled_share", advice->info.share);
    kv_json_member_u64(w, "knee_bytes", (uint64_t)kva_worth_knee(advice->curve, &advice->terms));
    put_curve(advice, w);
    kv_json_key(w, "tiers");
    kv_json_begin_array(w);
    for (size_t i = 0; i < advice->n_tiers; i++)
        put_tier(&advice->tiers[i], w);
    kv_json_end_array(w);
    kv_json_end_object(w);
    kv_buf_puts(out, "\n");
}
