// SPDX-License-Identifier: Apache-2.0
/* The figures of a run: a table for people, JSON for programs. docs/replay.md explains each of them. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json/json.h"
#include "cli/show/format.h"
#include "cli/whole/report.h"
#include "cli/whole/whole.h"

const char *const kc_source_names[KC_N_SOURCES] = {
    [KC_FROM_G1] = "g1",      [KC_FROM_G2] = "g2", [KC_FROM_G3] = "g3",
    [KC_FROM_PEER] = "peers", [KC_FROM_G4] = "g4", [KC_FROM_NOWHERE] = "computed",
};
const char *const kc_source_words[KC_N_SOURCES] = {
    [KC_FROM_G1] = "G1, the worker's own memory",
    [KC_FROM_G2] = "G2, its host tier",
    [KC_FROM_G3] = "G3, its disk",
    [KC_FROM_PEER] = "another worker",
    [KC_FROM_G4] = "G4, the store",
    [KC_FROM_NOWHERE] = "computed",
};
const char *const kc_path_names[KC_N_PATHS] = {
    [KC_PATH_WRITE] = "kvx_write",      [KC_PATH_GATHER] = "kvx_gather",
    [KC_PATH_G1_G2] = "g1_to_g2",       [KC_PATH_G2_G1] = "g2_to_g1",
    [KC_PATH_TO_G3] = "to_g3",          [KC_PATH_FROM_G3] = "from_g3",
    [KC_PATH_TO_G4] = "to_g4",          [KC_PATH_FROM_G4] = "from_g4",
    [KC_PATH_FROM_PEER] = "from_peers",
};
static const char *const phase_names[KC_N_PHASES] = {
    [KC_PHASE_ONBOARD] = "onboard",   [KC_PHASE_WRITE] = "write",     [KC_PHASE_GATHER] = "gather",
    [KC_PHASE_MAKE] = "make_content", [KC_PHASE_COMPARE] = "compare", [KC_PHASE_REST] = "rest",
};
static const char *const checked_tiers[3] = {"disk", "store", "peers"};
static const char *const dropping_tiers[3] = {"g2", "g3", "g4"};

static double ratio(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static double token_bytes(const struct kc_whole *w)
{
    return (double)(kc_shape_token_bytes(&w->plan.shape) * kc_shape_groups(&w->plan.shape));
}

struct kc_figures kc_whole_figures(const struct kc_whole *w)
{
    const struct kc_totals *t = &w->totals;
    struct kc_hist *latency = (struct kc_hist *)&w->latency, *lag = (struct kc_hist *)&w->lag;
    struct kc_figures f = {.seconds = (double)(w->end_ns - w->start_ns) / 1e9};
    uint64_t moved = 0;

    /* A copy reads and writes each byte, and a comparison reads it and makes the other side. */
    for (size_t i = 0; i < KC_N_PATHS; i++)
        moved += 2 * t->path_bytes[i];
    f.moved_rate = ratio((double)(moved + t->checked + t->path_bytes[KC_PATH_WRITE]), f.seconds);
    f.of_memory_rate = ratio(f.moved_rate, w->memory_rate);
    f.checked_rate = ratio((double)t->checked, f.seconds);
    f.hit = ratio((double)(t->n_blocks - t->blocks[KC_FROM_NOWHERE]), (double)t->n_blocks);
    f.query_p50_us = (double)kc_hist_quantile(latency, 0.5) / 1e3;
    f.query_p99_us = (double)kc_hist_quantile(latency, 0.99) / 1e3;
    f.lag_p50_ms = (double)kc_hist_quantile(lag, 0.5) / 1e6;
    f.lag_p99_ms = (double)kc_hist_quantile(lag, 0.99) / 1e6;
    f.saved_ms = 1e3 * ratio(t->saved_seconds, (double)t->requests);
    f.hit_ms = 1e3 * ratio((double)t->hit_tokens, (double)t->requests * (double)w->opts.prefill);
    f.load_rate = ratio((double)t->loaded_tokens * token_bytes(w), (double)t->load_ns / 1e9);
    f.even_rate = (double)w->opts.prefill * token_bytes(w);
    f.without_ms = 1e3 * ratio((double)t->tokens, (double)t->requests * (double)w->opts.prefill);
    f.busy = ratio((double)t->cpu_ns, f.seconds * 1e9);
    return f;
}

bool kc_whole_passed(const struct kc_whole *w)
{
    return w->totals.rows_wrong == 0 && w->totals.checked > 0 && w->books.equal &&
           w->totals.failed == 0;
}

/* ---- for people ---- */

struct style {
    const char *bold, *good, *bad, *plain;
};

static void table_head(const struct kc_whole *w, const struct kc_figures *f, const struct style *s)
{
    printf("%sThe whole system on %s%s%s\n", s->bold, kc_trace_title(w->opts.trace),
           w->interrupted ? ", interrupted" : "", s->plain);
    printf("  %s requests of %s tokens in the mean, in %s; K/V of %s, %s a token\n",
           kc_count(w->totals.requests).s,
           kc_count(w->totals.requests ? w->totals.tokens / w->totals.requests : 0).s,
           kc_span(f->seconds).s, w->plan.shape.name, kc_bytes(token_bytes(w)).s);
    printf("  %u workers with %s in G1, %s in G2, %s in G3 each; routed by %s\n\n",
           w->plan.n_workers, kc_bytes((double)w->opts.g1).s, kc_bytes((double)w->opts.g2).s,
           kc_bytes((double)w->opts.g3).s, w->opts.policy_name);
}

static void table_sources(const struct kc_whole *w, const struct style *s)
{
    const struct kc_totals *t = &w->totals;

    printf("%s  Prompt blocks found in                   blocks   fraction%s\n", s->bold, s->plain);
    for (size_t i = 0; i < KC_N_SOURCES; i++)
        printf("    %-28s %17s     %6.4f\n", kc_source_words[i], kc_count(t->blocks[i]).s,
               ratio((double)t->blocks[i], (double)t->n_blocks));
    putchar('\n');
}

static void table_bytes(const struct kc_whole *w, const struct kc_figures *f, const struct style *s)
{
    const uint64_t *path = w->totals.path_bytes;

    printf("%s  Bytes%s     written %s, gathered %s; G1 to G2 %s, back %s\n", s->bold, s->plain,
           kc_bytes((double)path[KC_PATH_WRITE]).s, kc_bytes((double)path[KC_PATH_GATHER]).s,
           kc_bytes((double)path[KC_PATH_G1_G2]).s, kc_bytes((double)path[KC_PATH_G2_G1]).s);
    printf("            disk: in %s, out %s; store: in %s, out %s; from workers %s\n",
           kc_bytes((double)path[KC_PATH_TO_G3]).s, kc_bytes((double)path[KC_PATH_FROM_G3]).s,
           kc_bytes((double)path[KC_PATH_TO_G4]).s, kc_bytes((double)path[KC_PATH_FROM_G4]).s,
           kc_bytes((double)path[KC_PATH_FROM_PEER]).s);
    printf("%s  Memory%s    %s/s read and written, %.0f %% of memcpy on all cores (%s/s)\n",
           s->bold, s->plain, kc_bytes(f->moved_rate).s, 100 * f->of_memory_rate,
           kc_bytes(w->memory_rate).s);
}

static void table_time(const struct kc_whole *w, const struct style *s)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < KC_N_PHASES; i++)
        sum += w->totals.phase_ns[i];
    printf("%s  Time%s      of the workers:", s->bold, s->plain);
    for (size_t i = 0; i < KC_N_PHASES; i++)
        printf(" %s %.0f %%%s", phase_names[i],
               100 * ratio((double)w->totals.phase_ns[i], (double)sum),
               i + 1 < KC_N_PHASES ? "," : "\n");
}

static void table_service(const struct kc_whole *w, const struct kc_figures *f,
                          const struct style *s)
{
    printf("%s  Queries%s   p50 %s, p99 %s", s->bold, s->plain,
           kc_duration((uint64_t)(f->query_p50_us * 1e3)).s,
           kc_duration((uint64_t)(f->query_p99_us * 1e3)).s);
    if (w->totals.unanswered)
        printf("; %s without an answer", kc_count(w->totals.unanswered).s);
    printf("\n%s  Event lag%s p50 %.1f ms, p99 %.1f ms from registration to the indexer's answer\n",
           s->bold, s->plain, f->lag_p50_ms, f->lag_p99_ms);
    printf("%s  Prefill%s   %.0f of %.0f ms of a prompt were found, at %s tokens/s\n", s->bold,
           s->plain, f->hit_ms, f->without_ms, kc_count(w->opts.prefill).s);
    printf("%s  TTFT%s      %.0f ms less in the mean", s->bold, s->plain, f->saved_ms);
    if (f->load_rate > 0)
        printf("; hits beyond G1 loaded at %s/s, and at %s/s a load is as fast as that prefill",
               kc_bytes(f->load_rate).s, kc_bytes(f->even_rate).s);
    putchar('\n');
}

/* Return the error that writes to a full disk get; "": no disk is full. */
static const char *full_disk_by(const struct kc_whole *w)
{
    if (!(w->opts.faults & 1u << KC_FAULT_FULL_DISK))
        return "";
    return w->small.bytes ? "ENOSPC" : "EFBIG";
}

static void table_faults(const struct kc_whole *w, const struct style *s)
{
    bool any = false;

    for (size_t i = 0; i < KC_N_FAULTS; i++) {
        if (!w->faults_injected[i])
            continue;
        printf("%s%s %u x %s", any ? "," : "", any ? "" : s->bold, w->faults_injected[i],
               kc_fault_names[i]);
        if (i == KC_FAULT_FULL_DISK)
            printf(" (%s)", full_disk_by(w));
        any = true;
    }
    if (any)
        printf("%s; %s requests served again\n", s->plain, kc_count(w->totals.again).s);
    if (w->small.why[0])
        printf("            no file system to fill: %s\n", w->small.why);
    for (size_t i = 0; i < 3; i++)
        if (w->totals.bad[i])
            printf("    %s blocks of %s did not verify: misses, not wrong bytes\n",
                   kc_count(w->totals.bad[i]).s, checked_tiers[i]);
}

static void table_books(const struct kc_whole *w, const struct style *s)
{
    const struct kc_books *b = &w->books;

    printf("%s  Books%s     ", s->bold, s->plain);
    if (!b->done)
        printf("not compared\n");
    else if (b->equal)
        printf("%sequal%s: %s copies of %s blocks at workers and indexer%s; %s in the store; "
               "settled in "
               "%" PRIu64 " ms\n",
               s->good, s->plain, kc_count(b->copies).s, kc_count(b->keys).s,
               b->nats ? ", over ZMQ and NATS" : "", kc_count(b->stored).s, b->settle_ms);
    else
        printf("%sDIFFER%s: of %s copies the indexer lacks %s and has %s more; the store lacks %s\n"
               "            first: %s\n",
               s->bad, s->plain, kc_count(b->copies).s,
               kc_count(b->indexer_lacks + b->nats_lacks).s,
               kc_count(b->indexer_extra + b->nats_extra).s, kc_count(b->store_lacks).s, b->first);
}

static void table_loose(const struct kc_whole *w)
{
    if (w->books.loose)
        printf("            %s copies more whose prompts are gone before them: the indexer hides "
               "them\n",
               kc_count(w->books.loose).s);
}

static void table_verdict(const struct kc_whole *w, const struct kc_figures *f,
                          const struct style *s)
{
    const struct kc_totals *t = &w->totals;

    printf("%s  Verified%s  %s of K/V, %s/s: ", s->bold, s->plain, kc_bytes((double)t->checked).s,
           kc_bytes(f->checked_rate).s);
    if (t->rows_wrong == 0)
        printf("%severy byte right%s\n", s->good, s->plain);
    else
        printf("%s%s rows WRONG%s\n            first: %s\n", s->bad, kc_count(t->rows_wrong).s,
               s->plain, t->wrong);
    if (t->failed)
        printf("%s  Failed%s    %s requests\n", s->bad, s->plain, kc_count(t->failed).s);
}

static int print_table(const struct kc_whole *w, const struct kc_figures *f, struct kv_error *error)
{
    struct style style = {"", "", "", ""};

    if (isatty(STDOUT_FILENO))
        style = (struct style){"\033[1m", "\033[32m", "\033[1;31m", "\033[0m"};
    table_head(w, f, &style);
    table_sources(w, &style);
    table_bytes(w, f, &style);
    table_time(w, &style);
    table_service(w, f, &style);
    table_faults(w, &style);
    table_books(w, &style);
    table_loose(w);
    table_verdict(w, f, &style);
    if (fflush(stdout) != 0 || ferror(stdout))
        return kv_fail(error, -EIO, 0, "can't write standard output");
    return 0;
}

/* ---- for programs ---- */

static void put_counts(struct kv_json_writer *j, const char *name, const char *const *names,
                       const uint64_t *values, size_t n)
{
    kv_json_key(j, name);
    kv_json_begin_object(j);
    for (size_t i = 0; i < n; i++)
        kv_json_member_u64(j, names[i], values[i]);
    kv_json_end_object(j);
}

static void json_options(const struct kc_whole *w, struct kv_json_writer *j)
{
    kv_json_key(j, "options");
    kv_json_begin_object(j);
    kv_json_member_str(j, "model", w->plan.shape.name);
    kv_json_member_u64(j, "workers", w->plan.n_workers);
    kv_json_member_u64(j, "g1_blocks", w->plan.g1_blocks);
    kv_json_member_u64(j, "g2_blocks", w->plan.g2_blocks);
    kv_json_member_u64(j, "g3_blocks", w->plan.g3_blocks);
    kv_json_member_u64(j, "block_bytes", kc_shape_block_bytes(&w->plan.shape));
    kv_json_member_u64(j, "per_id", w->plan.per_id);
    kv_json_member_u64(j, "steps", w->plan.steps);
    kv_json_member_u64(j, "prefill", w->opts.prefill);
    kv_json_member_str(j, "policy", w->opts.policy_name);
    kv_json_member_str(j, "peers", w->opts.peers_name);
    kv_json_member_bool(j, "nats", w->opts.nats);
    kv_json_end_object(j);
}

static void json_totals(const struct kc_whole *w, struct kv_json_writer *j)
{
    const struct kc_totals *t = &w->totals;
    uint64_t faults[KC_N_FAULTS];

    for (size_t i = 0; i < KC_N_FAULTS; i++)
        faults[i] = w->faults_injected[i];
    kv_json_member_u64(j, "requests", t->requests);
    kv_json_member_u64(j, "requests_failed", t->failed);
    kv_json_member_u64(j, "requests_again", t->again);
    kv_json_member_u64(j, "tokens", t->tokens);
    kv_json_member_u64(j, "hit_tokens", t->hit_tokens);
    kv_json_member_u64(j, "blocks", t->n_blocks);
    put_counts(j, "blocks_from", kc_source_names, t->blocks, KC_N_SOURCES);
    put_counts(j, "bytes", kc_path_names, t->path_bytes, KC_N_PATHS);
    put_counts(j, "phase_ns", phase_names, t->phase_ns, KC_N_PHASES);
    put_counts(j, "bad", checked_tiers, t->bad, 3);
    put_counts(j, "dropped", dropping_tiers, t->dropped, 3);
    put_counts(j, "faults", kc_fault_names, faults, KC_N_FAULTS);
    kv_json_member_str(j, "full_disk", full_disk_by(w));
    kv_json_member_str(j, "no_small_disk", w->small.why);
    kv_json_member_u64(j, "bytes_verified", t->checked);
    kv_json_member_u64(j, "rows_wrong", t->rows_wrong);
    kv_json_member_str(j, "first_wrong", t->wrong);
    kv_json_member_u64(j, "queries", t->queries);
    kv_json_member_u64(j, "queries_unanswered", t->unanswered);
    kv_json_member_u64(j, "events_dropped", t->events_dropped);
}

static void json_figures(const struct kc_whole *w, const struct kc_figures *f,
                         struct kv_json_writer *j)
{
    kv_json_member_double(j, "seconds", f->seconds);
    kv_json_member_double(j, "hit_fraction", f->hit);
    kv_json_member_double(j, "verified_per_second", f->checked_rate);
    kv_json_member_double(j, "moved_per_second", f->moved_rate);
    kv_json_member_double(j, "memory_per_second", w->memory_rate);
    kv_json_member_double(j, "of_memory_rate", f->of_memory_rate);
    kv_json_member_double(j, "worker_cores", f->busy);
    kv_json_member_double(j, "query_p50_us", f->query_p50_us);
    kv_json_member_double(j, "query_p99_us", f->query_p99_us);
    kv_json_member_double(j, "lag_p50_ms", f->lag_p50_ms);
    kv_json_member_double(j, "lag_p99_ms", f->lag_p99_ms);
    kv_json_member_double(j, "ttft_saved_ms", f->saved_ms);
    kv_json_member_double(j, "ttft_without_ms", f->without_ms);
    kv_json_member_double(j, "hit_ms", f->hit_ms);
    kv_json_member_double(j, "load_per_second", f->load_rate);
    kv_json_member_double(j, "even_per_second", f->even_rate);
    kv_json_member_u64(j, "slow_loads", w->totals.slow_loads);
}

static void json_books(const struct kc_whole *w, struct kv_json_writer *j)
{
    const struct kc_books *b = &w->books;

    kv_json_key(j, "books");
    kv_json_begin_object(j);
    kv_json_member_bool(j, "done", b->done);
    kv_json_member_bool(j, "equal", b->equal);
    kv_json_member_bool(j, "nats", b->nats);
    kv_json_member_bool(j, "store", b->store);
    kv_json_member_u64(j, "keys", b->keys);
    kv_json_member_u64(j, "copies", b->copies);
    kv_json_member_u64(j, "indexer_lacks", b->indexer_lacks);
    kv_json_member_u64(j, "indexer_extra", b->indexer_extra);
    kv_json_member_u64(j, "loose", b->loose);
    kv_json_member_u64(j, "window_copies", b->window_copies);
    kv_json_member_u64(j, "nats_lacks", b->nats_lacks);
    kv_json_member_u64(j, "nats_extra", b->nats_extra);
    kv_json_member_u64(j, "stored", b->stored);
    kv_json_member_u64(j, "chunks", b->chunks);
    kv_json_member_u64(j, "store_lacks", b->store_lacks);
    kv_json_member_u64(j, "settle_ms", b->settle_ms);
    kv_json_member_str(j, "first_difference", b->first);
    kv_json_end_object(j);
}

static void json_samples(const struct kc_whole *w, struct kv_json_writer *j)
{
    kv_json_key(j, "samples");
    kv_json_begin_array(j);
    for (size_t i = 0; i < w->n_samples; i++) {
        const struct kc_sample *s = &w->samples[i];

        kv_json_begin_object(j);
        kv_json_member_double(j, "seconds", s->seconds);
        kv_json_member_u64(j, "requests", s->requests);
        put_counts(j, "blocks_from", kc_source_names, s->blocks, KC_N_SOURCES);
        put_counts(j, "bytes", kc_path_names, s->path_bytes, KC_N_PATHS);
        kv_json_member_u64(j, "bytes_verified", s->checked);
        kv_json_member_double(j, "saved_seconds", s->saved_seconds);
        kv_json_member_double(j, "lag_ms", s->lag_ms);
        kv_json_member_double(j, "query_us", s->query_us);
        kv_json_member_u64(j, "worker_bytes", s->worker_bytes);
        kv_json_member_u64(j, "indexer_bytes", s->indexer_bytes);
        kv_json_end_object(j);
    }
    kv_json_end_array(j);
}

static void write_json(const struct kc_whole *w, const struct kc_figures *f, struct kv_buf *out)
{
    struct kv_json_writer j;

    kv_json_writer_init(&j, out);
    kv_json_begin_object(&j);
    kv_json_member_str(&j, "workload", kc_trace_title(w->opts.trace));
    kv_json_member_bool(&j, "passed", kc_whole_passed(w));
    kv_json_member_bool(&j, "interrupted", w->interrupted);
    json_options(w, &j);
    json_totals(w, &j);
    json_figures(w, f, &j);
    json_books(w, &j);
    json_samples(w, &j);
    kv_json_end_object(&j);
    kv_buf_putc(out, '\n');
}

static int save(const char *path, const struct kv_buf *text, struct kv_error *error)
{
    FILE *file = strcmp(path, "-") == 0 ? stdout : fopen(path, "we");
    int rc = 0;

    if (text->error)
        rc = -ENOMEM;
    if (!file)
        return kv_fail(error, -errno, 0, "can't write %.120s: %s", path, strerror(errno));
    if (rc == 0 && fwrite(text->data, 1, text->len, file) != text->len)
        rc = -EIO;
    if ((file == stdout ? fflush(file) : fclose(file)) != 0)
        rc = -EIO;
    return rc < 0 ? kv_fail(error, rc, 0, "can't write %.120s: %s", path, strerror(-rc)) : 0;
}

int kc_whole_report(struct kc_whole *w, struct kv_error *error)
{
    struct kc_figures f = kc_whole_figures(w);
    struct kv_buf json = KV_BUF_INIT, html = KV_BUF_INIT;
    int rc = 0;

    write_json(w, &f, &json);
    if (!w->opts.json || strcmp(w->opts.json, "-") != 0)
        rc = print_table(w, &f, error);
    if (rc == 0 && w->opts.json)
        rc = save(w->opts.json, &json, error);
    if (rc == 0 && w->opts.html) {
        kc_whole_html(w, &json, &html);
        rc = save(w->opts.html, &html, error);
    }
    kv_buf_fini(&json);
    kv_buf_fini(&html);
    return rc;
}
