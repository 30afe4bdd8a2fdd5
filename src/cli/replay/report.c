// SPDX-License-Identifier: Apache-2.0
/*
 * Show the figures of a run, as a table for people or as JSON. docs/replay.md explains each of
 * them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json/json.h"
#include "cli/replay/replay.h"
#include "cli/show/format.h"

/* Figures that both forms show. */
struct figures {
    double seconds;
    struct kc_engine_stats engines; /* sum over all engines */
    uint64_t p50, p99, max;         /* in nanoseconds */
    double found, random, unlimited;
    double bytes_per_block;
    const char *workload;
};

static double ratio(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static struct figures gather(struct kc_replay *replay)
{
    const struct kc_shadow *shadow = &replay->shadow;
    struct figures f = {.seconds = (double)(replay->end_ns - replay->start_ns) / 1e9};

    for (uint64_t w = 0; w < replay->opts.workers; w++) {
        struct kc_engine_stats one;

        kc_engine_get_stats(replay->engines[w], &one);
        f.engines.batches += one.batches;
        f.engines.events += one.events;
        f.engines.dropped_events += one.dropped_events;
        f.engines.replay_requests += one.replay_requests;
        f.engines.replayed_batches += one.replayed_batches;
        f.engines.stored_blocks += one.stored_blocks;
        f.engines.evicted_blocks += one.evicted_blocks;
        f.engines.blocks += one.blocks;
    }
    f.p50 = kc_hist_quantile(&replay->latency, 0.5);
    f.p99 = kc_hist_quantile(&replay->latency, 0.99);
    f.max = atomic_load(&replay->latency.max);
    f.found = ratio((double)replay->counts.found, (double)replay->counts.asked);
    f.random = ratio((double)shadow->found_random, (double)shadow->asked);
    f.unlimited = ratio((double)shadow->found_unlimited, (double)shadow->asked);
    f.bytes_per_block = ratio((double)replay->index.bytes, (double)f.engines.blocks);
    f.workload = kc_trace_title(replay->opts.trace);
    return f;
}

/* -- for people ------------------------------------------------------------------------------- */

struct style {
    const char *bold, *good, *bad, *plain;
};

static void table_head(const struct kc_replay *replay, const struct figures *f,
                       const struct style *s)
{
    const struct kc_replay_opts *opts = &replay->opts;
    const struct kc_counts *c = &replay->counts;

    printf("%sReplay of %s%s%s\n", s->bold, f->workload, replay->interrupted ? ", interrupted" : "",
           s->plain);
    printf("  %s requests of %s tokens in the mean, %s of traffic in %s\n", kc_count(c->requests).s,
           kc_count(c->requests ? c->tokens / c->requests : 0).s, kc_span(c->trace_ms / 1000).s,
           kc_span(f->seconds).s);
    printf("  %s worker%s, ", kc_count(opts->workers).s, opts->workers > 1 ? "s" : "");
    if (opts->blocks > 0)
        printf("each with %s blocks of %" PRIu64 " tokens", kc_count(opts->blocks).s,
               opts->block_size);
    else
        printf("unlimited, in blocks of %" PRIu64 " tokens", opts->block_size);
    printf(", routed by %s\n\n", opts->policy == KC_PREFIX ? "prefix and load" : opts->policy_name);
}

static void row(const char *name, const char *value)
{
    printf("    %-28s %17s", name, value);
}

static void table_cache(const struct kc_replay *replay, const struct figures *f,
                        const struct style *s)
{
    const struct kc_counts *c = &replay->counts;

    printf("%s  Cache                                    blocks   fraction%s\n", s->bold, s->plain);
    row("asked for", kc_count(c->asked).s);
    putchar('\n');
    row("found", kc_count(c->found).s);
    printf("     %6.4f\n", f->found);
    row("found if routed at random", "");
    printf("     %6.4f\n", f->random);
    row("found in one endless cache", "");
    printf("     %6.4f\n\n", f->unlimited);
}

static void answer_row(const char *name, uint64_t n, uint64_t of)
{
    row(name, kc_count(n).s);
    printf("     %6.4f", ratio((double)n, (double)of));
}

static void table_answers(const struct kc_replay *replay, const struct style *s)
{
    const struct kc_counts *c = &replay->counts;

    printf("%s  Answers as routed                      requests   fraction   blocks off%s\n",
           s->bold, s->plain);
    answer_row("exact", c->exact, c->requests);
    putchar('\n');
    answer_row("exact about every worker", c->all_exact, c->requests);
    putchar('\n');
    answer_row("too low: stores pending", c->under, c->requests);
    printf("   %10s\n", kc_count(c->under_blocks).s);
    answer_row("too high: removals pending", c->over, c->requests);
    printf("   %10s\n\n", kc_count(c->over_blocks).s);
}

static void event_row(const char *name, uint64_t n, double seconds)
{
    row(name, kc_count(n).s);
    printf("   %8s\n", kc_scaled(ratio((double)n, seconds)).s);
}

static void table_events(const struct kc_replay *replay, const struct figures *f,
                         const struct style *s)
{
    const struct kc_engine_stats *e = &f->engines;

    printf("%s  Events                                    total    per sec%s\n", s->bold, s->plain);
    event_row("events", e->events, f->seconds);
    event_row("blocks stored", e->stored_blocks, f->seconds);
    event_row("blocks removed", e->evicted_blocks, f->seconds);
    if (e->replayed_batches > 0)
        event_row("batches sent again", e->replayed_batches, f->seconds);
    if (e->dropped_events > 0)
        event_row("dropped by a full queue", e->dropped_events, f->seconds);
    if (replay->generation > 0) {
        row("indexer came back", kc_count(replay->generation).s);
        putchar('\n');
    }
    putchar('\n');
}

static void table_service(struct kc_replay *replay, const struct figures *f, const struct style *s)
{
    const struct kc_index_figures *index = &replay->index;

    printf("%s  Queries%s   p50 %s   p99 %s   max %s   %s/s   (%s)\n", s->bold, s->plain,
           kc_duration(f->p50).s, kc_duration(f->p99).s, kc_duration(f->max).s,
           kc_scaled(ratio((double)replay->counts.requests, f->seconds)).s,
           replay->opts.msgpack ? "msgpack" : "JSON");
    printf("%s  Index%s     %s holder-blocks", s->bold, s->plain, kc_count(f->engines.blocks).s);
    if (index->known)
        printf(", %s: %.1f bytes each", kc_bytes((double)index->bytes).s, f->bytes_per_block);
    if (index->rss > 0)
        printf("; process %s", kc_bytes((double)index->rss).s);
    putchar('\n');
}

static void table_verdict(const struct kc_replay *replay, const struct style *s)
{
    const struct kc_verdict *v = &replay->verdict;

    printf("%s  Final state%s  ", s->bold, s->plain);
    if (!v->done)
        printf("not compared\n");
    else if (v->wrong == 0)
        printf("%s prompts x %s workers compared: %sall equal%s, settled in %" PRIu64 " ms\n",
               kc_count(v->prompts).s, kc_count(replay->opts.workers).s, s->good, s->plain,
               v->settle_ms);
    else
        printf("%s%s of %s comparisons WRONG%s\n    %s\n", s->bad, kc_count(v->wrong).s,
               kc_count(v->comparisons).s, s->plain, v->first);
    if (replay->opts.lockstep && replay->counts.lockstep_wrong > 0)
        printf("  %s%s answers in lockstep WRONG%s\n    %s\n", s->bad,
               kc_count(replay->counts.lockstep_wrong).s, s->plain, v->first);
}

/* Print the table. Returns 0, or -EIO when standard output can't be written. */
static int print_table(struct kc_replay *replay, const struct figures *f, struct kv_error *error)
{
    struct style style = {"", "", "", ""};

    if (isatty(STDOUT_FILENO))
        style = (struct style){"\033[1m", "\033[32m", "\033[1;31m", "\033[0m"};
    table_head(replay, f, &style);
    table_cache(replay, f, &style);
    table_answers(replay, &style);
    table_events(replay, f, &style);
    table_service(replay, f, &style);
    table_verdict(replay, &style);
    if (fflush(stdout) != 0 || ferror(stdout))
        return kv_fail(error, -EIO, 0, "can't write standard output");
    return 0;
}

/* -- for programs ----------------------------------------------------------------------------- */

static void json_options(const struct kc_replay *replay, struct kv_json_writer *w)
{
    const struct kc_replay_opts *opts = &replay->opts;

    kv_json_key(w, "options");
    kv_json_begin_object(w);
    kv_json_member_u64(w, "workers", opts->workers);
    kv_json_member_u64(w, "blocks", opts->blocks);
    kv_json_member_u64(w, "block_size", opts->block_size);
    kv_json_member_u64(w, "clients", opts->clients);
    kv_json_member_u64(w, "rate", opts->rate);
    kv_json_member_u64(w, "prefill", opts->prefill);
    kv_json_member_u64(w, "seed", opts->seed);
    kv_json_member_str(w, "policy", opts->policy_name);
    kv_json_member_bool(w, "msgpack", opts->msgpack);
    kv_json_member_bool(w, "lockstep", opts->lockstep);
    kv_json_end_object(w);
}

static void json_counts(const struct kc_replay *replay, const struct figures *f,
                        struct kv_json_writer *w)
{
    const struct kc_counts *c = &replay->counts;

    kv_json_member_u64(w, "requests", c->requests);
    kv_json_member_u64(w, "tokens", c->tokens);
    kv_json_member_double(w, "seconds", f->seconds);
    kv_json_member_double(w, "trace_seconds", c->trace_ms / 1000);
    kv_json_member_u64(w, "blocks_asked", c->asked);
    kv_json_member_u64(w, "blocks_found", c->found);
    kv_json_member_double(w, "hit_fraction", f->found);
    kv_json_member_double(w, "hit_fraction_random", f->random);
    kv_json_member_double(w, "hit_fraction_unlimited", f->unlimited);
    kv_json_member_u64(w, "answers_exact", c->exact);
    kv_json_member_u64(w, "answers_over", c->over);
    kv_json_member_u64(w, "answers_under", c->under);
    kv_json_member_u64(w, "answers_all_exact", c->all_exact);
    kv_json_member_u64(w, "blocks_believed", c->believed);
    kv_json_member_u64(w, "blocks_held", c->held);
    kv_json_member_u64(w, "over_blocks", c->over_blocks);
    kv_json_member_u64(w, "under_blocks", c->under_blocks);
    kv_json_member_double(w, "answers_exact_fraction",
                          ratio((double)c->exact, (double)c->requests));
    kv_json_member_u64(w, "lockstep_wrong", c->lockstep_wrong);
    kv_json_member_u64(w, "indexer_came_back", replay->generation);
}

static void json_events(const struct figures *f, struct kv_json_writer *w)
{
    const struct kc_engine_stats *e = &f->engines;

    kv_json_member_u64(w, "events", e->events);
    kv_json_member_u64(w, "batches", e->batches);
    kv_json_member_u64(w, "dropped_events", e->dropped_events);
    kv_json_member_u64(w, "replay_requests", e->replay_requests);
    kv_json_member_u64(w, "replayed_batches", e->replayed_batches);
    kv_json_member_double(w, "events_per_second", ratio((double)e->events, f->seconds));
    kv_json_member_u64(w, "blocks_stored", e->stored_blocks);
    kv_json_member_u64(w, "blocks_removed", e->evicted_blocks);
    kv_json_member_double(w, "query_p50_us", (double)f->p50 / 1e3);
    kv_json_member_double(w, "query_p99_us", (double)f->p99 / 1e3);
    kv_json_member_double(w, "query_max_us", (double)f->max / 1e3);
}

static void json_index(const struct kc_replay *replay, const struct figures *f,
                       struct kv_json_writer *w)
{
    const struct kc_index_figures *index = &replay->index;
    const struct kc_verdict *v = &replay->verdict;

    kv_json_member_u64(w, "holder_blocks", f->engines.blocks);
    if (index->known) {
        kv_json_member_u64(w, "index_bytes", index->bytes);
        kv_json_member_double(w, "bytes_per_holder_block", f->bytes_per_block);
    }
    if (index->rss > 0)
        kv_json_member_u64(w, "indexer_rss", index->rss);
    kv_json_member_bool(w, "verified", v->done);
    kv_json_member_u64(w, "verified_prompts", v->prompts);
    kv_json_member_u64(w, "comparisons", v->comparisons);
    kv_json_member_u64(w, "wrong", v->wrong);
    kv_json_member_u64(w, "settle_ms", v->settle_ms);
    kv_json_key(w, "first_difference");
    if (v->first[0])
        kv_json_put_str(w, v->first);
    else
        kv_json_put_null(w);
}

static void write_json(const struct kc_replay *replay, const struct figures *f, struct kv_buf *out)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "workload", f->workload);
    kv_json_member_bool(&w, "interrupted", replay->interrupted);
    json_options(replay, &w);
    json_counts(replay, f, &w);
    json_events(f, &w);
    json_index(replay, f, &w);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}

static int save_json(const char *path, const struct kv_buf *text, struct kv_error *error)
{
    FILE *file = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");
    int rc = 0;

    if (!file)
        return kv_fail(error, -errno, 0, "can't write %.120s: %s", path, strerror(errno));
    if (fwrite(text->data, 1, text->len, file) != text->len)
        rc = -EIO;
    if ((file == stdout ? fflush(file) : fclose(file)) != 0)
        rc = -EIO;
    return rc < 0 ? kv_fail(error, rc, 0, "can't write %.120s", path) : 0;
}

int kc_report(struct kc_replay *replay, struct kv_error *error)
{
    struct figures f = gather(replay);
    struct kv_buf text = KV_BUF_INIT;
    int rc = 0;

    if (!replay->opts.json || strcmp(replay->opts.json, "-") != 0)
        rc = print_table(replay, &f, error);
    if (replay->opts.json) {
        int rc_json;

        write_json(replay, &f, &text);
        rc_json = text.error ? kv_fail(error, text.error, 0, "out of memory")
                             : save_json(replay->opts.json, &text, error);
        rc = rc ? rc : rc_json;
    }
    kv_buf_fini(&text);
    return rc;
}
