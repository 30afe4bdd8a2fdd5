// SPDX-License-Identifier: Apache-2.0
/*
 * The page of a run: figures, plots and the JSON itself in one file that loads nothing. Each figure is
 * a <data> element whose data-of names its member in the JSON, so that a test can compare them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/buf.h"
#include "cli/show/format.h"
#include "cli/whole/report.h"

enum { WIDTH = 640, HEIGHT = 240, LEFT = 56, RIGHT = 12, TOP = 12, BOTTOM = 28, SERIES = 6 };

static const char STYLE[] =
    ":root{color-scheme:light "
    "dark;--bg:#fff;--fg:#1f2328;--dim:#57606a;--line:#d8dee4;--card:#f6f8fa;"
    "--c0:#0969da;--c1:#1a7f37;--c2:#9a6700;--c3:#8250df;--c4:#bc4c00;--c5:#8c959f}"
    "@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9198a1;--line:#"
    "30363d;"
    "--card:#151b23;--c0:#4493f8;--c1:#3fb950;--c2:#d29922;--c3:#ab7df8;--c4:#db6d28;--c5:#656c76}}"
    "body{margin:0 auto;padding:24px;max-width:1360px;background:var(--bg);color:var(--fg);"
    "font:15px/1.45 system-ui,sans-serif}h1{font-size:22px;margin:0 0 4px}p{margin:4px 0;"
    "color:var(--dim)}.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr))"
    ";"
    "gap:12px;margin:18px 0}.tile,figure{background:var(--card);border:1px solid var(--line);"
    "border-radius:8px;padding:12px}.tile span{display:block;color:var(--dim);font-size:13px}"
    ".tile data{font-size:20px}.good{color:var(--c1)}.bad{color:#d1242f}main{display:grid;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,560px),1fr));gap:16px}figure{margin:0}"
    "figcaption{font-weight:600;margin-bottom:6px}svg{width:100%;height:auto}svg text{font:11px "
    "system-ui,sans-serif;fill:var(--dim)}.grid{stroke:var(--line)}.key{display:flex;flex-wrap:"
    "wrap;"
    "gap:4px 14px;font-size:13px;color:var(--dim)}.key "
    "i{display:inline-block;width:10px;height:10px;"
    "border-radius:2px;margin-right:5px}polyline{fill:none;stroke-width:2}"
    "table{border-collapse:collapse;width:100%}td{padding:3px 8px;border-top:1px solid var(--line)}"
    "td:last-child{text-align:right}.bar{height:10px;background:var(--c0);border-radius:2px}";

/* Text of others, which may be anything. */
static void put_text(struct kv_buf *out, const char *text)
{
    for (; *text; text++) {
        if (strchr("<>&\"'", *text) || (unsigned char)*text < ' ')
            kv_buf_printf(out, "&#%d;", (unsigned char)*text < ' ' ? ' ' : *text);
        else
            kv_buf_putc(out, *text);
    }
}

static void put_data(struct kv_buf *out, const char *of, double value, const char *text)
{
    kv_buf_printf(out, "<data data-of=\"%s\" value=\"", of);
    kv_buf_put_double(out, value);
    kv_buf_printf(out, "\">%s</data>", text);
}

static void put_tile(struct kv_buf *out, const char *label, const char *of, double value,
                     const char *text)
{
    kv_buf_printf(out, "<div class=\"tile\"><span>%s</span>", label);
    put_data(out, of, value, text);
    kv_buf_puts(out, "</div>\n");
}

/* ---- plots over time ---- */

/* Return series @k at sample @i; negative: none. */
typedef double (*value_fn)(const struct kc_whole *w, size_t i, size_t k);

struct plot {
    const char *title, *unit;
    const char *names[SERIES];
    size_t n;
    value_fn value;
    bool stacked;
};

/* Blocks from source @k as a share of all since the sample before; where no request ended between them,
 * the share before that. */
static double hits_at(const struct kc_whole *w, size_t i, size_t k)
{
    uint64_t all = 0, from = 0;

    for (size_t at = i + 1; at-- > 0 && all == 0;) {
        const struct kc_sample *now = &w->samples[at], *before = &w->samples[at ? at - 1 : 0];

        for (size_t s = 0; s < KC_N_SOURCES; s++)
            all += now->blocks[s] - (at ? before->blocks[s] : 0);
        from = now->blocks[k] - (at ? before->blocks[k] : 0);
    }
    return all ? 100.0 * (double)from / (double)all : 0;
}

/* @k 0: the time saved; 1: the prefill of the hits. */
static double saved_at(const struct kc_whole *w, size_t i, size_t k)
{
    const struct kc_sample *s = &w->samples[i];
    double seconds = s->saved_seconds;

    if (k) {
        uint64_t hits = 0;

        for (size_t from = 0; from < KC_FROM_NOWHERE; from++)
            hits += s->blocks[from];
        seconds = (double)(hits * w->plan.shape.page_size) / (double)w->opts.prefill;
    }
    return s->requests ? 1e3 * seconds / (double)s->requests : 0;
}

static double lag_at(const struct kc_whole *w, size_t i, size_t k)
{
    (void)k;
    return w->samples[i].lag_ms;
}

static double query_at(const struct kc_whole *w, size_t i, size_t k)
{
    (void)k;
    return w->samples[i].query_us;
}

static double memory_at(const struct kc_whole *w, size_t i, size_t k)
{
    const struct kc_sample *s = &w->samples[i];

    return (double)(k ? s->indexer_bytes : s->worker_bytes) / (1 << 20);
}

static double rate_at(const struct kc_whole *w, size_t i, size_t k)
{
    static const enum kc_path paths[SERIES] = {KC_PATH_GATHER, KC_PATH_WRITE,     KC_PATH_G1_G2,
                                               KC_PATH_G2_G1,  KC_PATH_FROM_PEER, KC_PATH_FROM_G4};
    const struct kc_sample *now = &w->samples[i], *before = &w->samples[i ? i - 1 : 0];
    double seconds = now->seconds - (i ? before->seconds : 0);
    uint64_t bytes = now->path_bytes[paths[k]] - (i ? before->path_bytes[paths[k]] : 0);

    return seconds > 0 ? (double)bytes / seconds / (1 << 20) : 0;
}

static const struct plot PLOTS[] = {
    {"Where prompt blocks came from",
     "%",
     {"G1", "G2", "G3", "peers", "G4", "computed"},
     6,
     hits_at,
     true},
    {"Time to first token saved, mean so far",
     "ms",
     {"saved", "prefill of the hits"},
     2,
     saved_at,
     false},
    {"Bytes moved by path",
     "MiB/s",
     {"gathered", "written", "G1 to G2", "G2 to G1", "peers", "from G4"},
     6,
     rate_at,
     false},
    {"Event lag", "ms", {"mean of the interval"}, 1, lag_at, false},
    {"Latency of /query", "us", {"mean of the interval"}, 1, query_at, false},
    {"Resident memory", "MiB", {"workers together", "indexer"}, 2, memory_at, false},
};

struct scale {
    double step, most, seconds; /* step: between lines, 1, 2, 2.5 or 5 by a power of ten */
};

/* Return the smallest round step of which @n reach @most. */
static double round_step(double most, int n)
{
    static const double steps[] = {1, 2, 2.5, 5};
    double power = 1e-9;

    for (;; power *= 10)
        for (size_t i = 0; i < KV_COUNT(steps); i++)
            if (power > 1e15 || steps[i] * power * n >= most * (1 - 1e-9))
                return steps[i] * power;
}

/* Return how many digits behind the point tell @step apart. */
static int digits_of(double step)
{
    int n = 0;

    while (n < 6 && (double)(uint64_t)(step * (1 + 1e-9)) < step * (1 - 1e-9)) {
        step *= 10;
        n++;
    }
    return n;
}

static struct scale scale_of(const struct kc_whole *w, const struct plot *p)
{
    struct scale s = {.most = p->stacked ? 100 : 1e-3, .seconds = 1e-9};

    for (size_t i = 0; i < w->n_samples; i++) {
        s.seconds = KV_MAX(s.seconds, w->samples[i].seconds);
        for (size_t k = 0; k < p->n && !p->stacked; k++)
            s.most = KV_MAX(s.most, p->value(w, i, k));
    }
    s.step = round_step(s.most, 4);
    s.most = 4 * s.step;
    return s;
}

static double x_of(const struct scale *s, double seconds)
{
    return LEFT + seconds / s->seconds * (WIDTH - LEFT - RIGHT);
}

static double y_of(const struct scale *s, double v)
{
    return HEIGHT - BOTTOM - v / s->most * (HEIGHT - TOP - BOTTOM);
}

static void put_axes(struct kv_buf *out, const struct scale *s)
{
    double tick = round_step(s->seconds, 5);

    for (int i = 0; i <= 4; i++)
        kv_buf_printf(out,
                      "<path class=\"grid\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" "
                      "text-anchor=\"end\">%.*f</text>",
                      LEFT, y_of(s, s->step * i), WIDTH - RIGHT, LEFT - 6, y_of(s, s->step * i) + 4,
                      digits_of(s->step), s->step * i);
    for (int i = 0; i <= 5 && tick * i <= s->seconds; i++)
        kv_buf_printf(out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"%s\">%.*f s</text>",
                      x_of(s, tick * i), HEIGHT - 8,
                      x_of(s, tick * i) < WIDTH - 4 * RIGHT ? "middle" : "end", digits_of(tick),
                      tick * i);
}

static void put_line(const struct kc_whole *w, const struct plot *p, const struct scale *s,
                     size_t k, struct kv_buf *out)
{
    kv_buf_printf(out, "<polyline stroke=\"var(--c%zu)\" points=\"", k);
    for (size_t i = 0; i < w->n_samples; i++) {
        double v = p->value(w, i, k);

        if (v >= 0)
            kv_buf_printf(out, "%.1f,%.1f ", x_of(s, w->samples[i].seconds), y_of(s, v));
    }
    kv_buf_puts(out, "\"/>");
}

/* Draw series @k on top of those before it, as an area. */
static void put_area(const struct kc_whole *w, const struct plot *p, const struct scale *s,
                     size_t k, struct kv_buf *out)
{
    double low[SERIES * 64], sum;
    size_t n = KV_MIN(w->n_samples, KV_COUNT(low));

    kv_buf_printf(out, "<polygon fill=\"var(--c%zu)\" points=\"", k);
    for (size_t i = 0; i < n; i++) {
        low[i] = 0;
        for (size_t b = 0; b < k; b++)
            low[i] += p->value(w, i, b);
        sum = low[i] + p->value(w, i, k);
        kv_buf_printf(out, "%.1f,%.1f ", x_of(s, w->samples[i].seconds), y_of(s, sum));
    }
    for (size_t i = n; i-- > 0;)
        kv_buf_printf(out, "%.1f,%.1f ", x_of(s, w->samples[i].seconds), y_of(s, low[i]));
    kv_buf_puts(out, "\"/>");
}

static void put_plot(const struct kc_whole *w, const struct plot *p, struct kv_buf *out)
{
    struct scale s = scale_of(w, p);

    kv_buf_printf(out,
                  "<figure><figcaption>%s, %s</figcaption><svg viewBox=\"0 0 %d %d\" role=\"img\" "
                  "aria-label=\"%s over time\">",
                  p->title, p->unit, WIDTH, HEIGHT, p->title);
    put_axes(out, &s);
    for (size_t k = 0; k < p->n; k++) {
        if (p->stacked)
            put_area(w, p, &s, k, out);
        else
            put_line(w, p, &s, k, out);
    }
    kv_buf_puts(out, "</svg><div class=\"key\">");
    for (size_t k = 0; k < p->n; k++)
        kv_buf_printf(out, "<span><i style=\"background:var(--c%zu)\"></i>%s</span>", k,
                      p->names[k]);
    kv_buf_puts(out, "</div></figure>\n");
}

/* ---- tables ---- */

static void put_table(struct kv_buf *out, const char *title, const char *of,
                      const char *const *names, const char *const *words, const uint64_t *values,
                      size_t n, bool bytes)
{
    uint64_t most = 1;
    char path[64];

    for (size_t i = 0; i < n; i++)
        most = KV_MAX(most, values[i]);
    kv_buf_printf(out, "<figure><figcaption>%s</figcaption><table>", title);
    for (size_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s.%s", of, names[i]);
        kv_buf_printf(out,
                      "<tr><td>%s</td><td width=\"40%%\"><div class=\"bar\" style=\"width:%.1f%%\">"
                      "</div></td><td>",
                      words[i], 100.0 * (double)values[i] / (double)most);
        put_data(out, path, (double)values[i],
                 bytes ? kc_bytes((double)values[i]).s : kc_count(values[i]).s);
        kv_buf_puts(out, "</td></tr>");
    }
    kv_buf_puts(out, "</table></figure>\n");
}

static void put_verdict(const struct kc_whole *w, struct kv_buf *out)
{
    const struct kc_totals *t = &w->totals;
    struct kc_figures f = kc_whole_figures(w);

    kv_buf_printf(out, "<h1>The whole system on ");
    put_text(out, kc_trace_title(w->opts.trace));
    kv_buf_printf(out, ": <span class=\"%s\">%s</span></h1>\n", kc_whole_passed(w) ? "good" : "bad",
                  kc_whole_passed(w) ? "every byte right, books equal" : "failed");
    kv_buf_printf(
        out,
        "<p>%u workers, K/V of %s, routed by %s. Time to first token is by a model: a prefill "
        "of %" PRIu64
        " tokens/s, less the measured time to load hits. At %s/s a load is as fast as "
        "that prefill; here hits beyond G1 loaded at %s/s, by the cores that are engines, "
        "too.</p>\n",
        w->plan.n_workers, w->plan.shape.name, w->opts.policy_name, w->opts.prefill,
        kc_bytes(f.even_rate).s, kc_bytes(f.load_rate).s);
    if (t->rows_wrong || w->books.first[0]) {
        kv_buf_puts(out, "<p class=\"bad\">");
        put_text(out, t->rows_wrong ? t->wrong : w->books.first);
        kv_buf_puts(out, "</p>\n");
    }
}

static void put_tiles(const struct kc_whole *w, struct kv_buf *out)
{
    const struct kc_totals *t = &w->totals;
    struct kc_figures f = kc_whole_figures(w);
    char text[64];

    kv_buf_puts(out, "<div class=\"tiles\">\n");
    put_tile(out, "verified", "bytes_verified", (double)t->checked, kc_bytes((double)t->checked).s);
    put_tile(out, "rows wrong", "rows_wrong", (double)t->rows_wrong, kc_count(t->rows_wrong).s);
    put_tile(out, "requests", "requests", (double)t->requests, kc_count(t->requests).s);
    snprintf(text, sizeof(text), "%.1f %%", 100 * f.hit);
    put_tile(out, "prompt blocks found", "hit_fraction", f.hit, text);
    snprintf(text, sizeof(text), "%.1f ms of %.1f", f.hit_ms, f.without_ms);
    put_tile(out, "prefill found", "hit_ms", f.hit_ms, text);
    snprintf(text, sizeof(text), "%.1f ms", f.saved_ms);
    put_tile(out, "time to first token saved", "ttft_saved_ms", f.saved_ms, text);
    snprintf(text, sizeof(text), "%.1f ms", f.lag_p99_ms);
    put_tile(out, "event lag, p99", "lag_p99_ms", f.lag_p99_ms, text);
    put_tile(out, "query, p99", "query_p99_us", f.query_p99_us,
             kc_duration((uint64_t)(f.query_p99_us * 1e3)).s);
    snprintf(text, sizeof(text), "%.0f %%", 100 * f.of_memory_rate);
    put_tile(out, "of the machine's memcpy", "of_memory_rate", f.of_memory_rate, text);
    put_tile(out, "copies in the books", "books.copies", (double)w->books.copies,
             kc_count(w->books.copies).s);
    put_tile(out, "blocks in the store", "books.stored", (double)w->books.stored,
             kc_count(w->books.stored).s);
    kv_buf_puts(out, "</div>\n");
}

/* The JSON, in a form that can't end the element it is in. */
static void put_json(const struct kv_buf *json, struct kv_buf *out)
{
    kv_buf_puts(out, "<script type=\"application/json\" id=\"figures\">");
    for (size_t i = 0; i < json->len; i++) {
        if (json->data[i] == '<')
            kv_buf_puts(out, "\\u003c");
        else
            kv_buf_putc(out, json->data[i]);
    }
    kv_buf_puts(out, "</script>\n");
}

void kc_whole_html(const struct kc_whole *w, const struct kv_buf *json, struct kv_buf *out)
{
    static const char *const path_words[KC_N_PATHS] = {[KC_PATH_WRITE] = "written by kvx",
                                                       [KC_PATH_GATHER] = "gathered by kvx",
                                                       [KC_PATH_G1_G2] = "G1 to G2",
                                                       [KC_PATH_G2_G1] = "G2 to G1",
                                                       [KC_PATH_TO_G3] = "to disk",
                                                       [KC_PATH_FROM_G3] = "from disk",
                                                       [KC_PATH_TO_G4] = "to the store",
                                                       [KC_PATH_FROM_G4] = "from the store",
                                                       [KC_PATH_FROM_PEER] = "from other workers"};

    kv_buf_printf(out,
                  "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
                  "name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>Kvasir "
                  "replay</title><style>%s</style></head><body>\n",
                  STYLE);
    put_verdict(w, out);
    put_tiles(w, out);
    kv_buf_puts(out, "<main>\n");
    for (size_t i = 0; i < KV_COUNT(PLOTS); i++)
        put_plot(w, &PLOTS[i], out);
    put_table(out, "Prompt blocks by source", "blocks_from", kc_source_names, kc_source_words,
              w->totals.blocks, KC_N_SOURCES, false);
    put_table(out, "Bytes by path, in all", "bytes", kc_path_names, path_words,
              w->totals.path_bytes, KC_N_PATHS, true);
    kv_buf_puts(out, "</main>\n");
    put_json(json, out);
    kv_buf_puts(out, "</body></html>\n");
}
