// SPDX-License-Identifier: Apache-2.0
/* The curve as a picture: capacity on a logarithmic axis, hit rate on a linear one. */
#include <math.h>

#include "cli/advise/advise.h"
#include "cli/show/format.h"

enum { WIDTH = 760, HEIGHT = 420, LEFT = 64, RIGHT = 24, TOP = 56, BOTTOM = 56, POINTS = 240 };

struct picture {
    const struct kc_advice *advice;
    struct kv_buf *out;
    double least, most; /* bytes at the axis' ends */
    double top;         /* hit rate at the upper end */
};

static double x_of(const struct picture *p, double bytes)
{
    double part = log(KV_MAX(bytes, p->least) / p->least) / log(p->most / p->least);

    return LEFT + KV_MIN(part, 1.0) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const struct picture *p, double hits)
{
    return HEIGHT - BOTTOM - hits / p->top * (HEIGHT - TOP - BOTTOM);
}

static double hits_of(const struct picture *p, double bytes)
{
    struct kva_worth worth;

    kva_worth_of(p->advice->curve, &p->advice->terms, bytes, &worth);
    return worth.hits;
}

static void put_grid(const struct picture *p)
{
    double step = p->top > 0.5 ? 0.2 : p->top > 0.2 ? 0.1 : 0.05;
    int doublings = (int)ceil(log2(p->most / p->least)), each = (doublings + 7) / 8;

    for (int i = 0; i * step <= p->top + 1e-9; i++) {
        double y = y_of(p, i * step);

        kv_buf_printf(p->out,
                      "<path class=\"grid\" d=\"M%d %.1fH%d\"/>"
                      "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f %%</text>\n",
                      LEFT, y, WIDTH - RIGHT, LEFT - 8, y + 4, 100 * i * step);
    }
    for (int i = 0; i <= doublings; i += each) {
        double bytes = exp2(ceil(log2(p->least)) + i);

        if (bytes > p->most)
            break;
        kv_buf_printf(p->out,
                      "<path class=\"grid\" d=\"M%.1f %dV%d\"/>"
                      "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                      x_of(p, bytes), TOP, HEIGHT - BOTTOM, x_of(p, bytes), HEIGHT - BOTTOM + 20,
                      kc_bytes(bytes).s);
    }
}

static void put_curve(const struct picture *p)
{
    kv_buf_puts(p->out, "<path class=\"curve\" d=\"");
    for (int i = 0; i <= POINTS; i++) {
        double bytes = p->least * pow(p->most / p->least, (double)i / POINTS);

        kv_buf_printf(p->out, "%c%.1f %.1f", i ? 'L' : 'M', x_of(p, bytes),
                      y_of(p, hits_of(p, bytes)));
    }
    kv_buf_puts(p->out, "\"/>\n");
}

/* Text of the command line, which may be anything. */
static void put_text(const char *text, struct kv_buf *out)
{
    for (; *text; text++) {
        if (*text == '<' || *text == '>' || *text == '&' || (unsigned char)*text < ' ')
            kv_buf_printf(out, "&#%d;", (unsigned char)*text < ' ' ? ' ' : *text);
        else
            kv_buf_printf(out, "%c", *text);
    }
}

static void put_place(const struct picture *p, double bytes, const char *name, int row)
{
    double x = x_of(p, bytes);
    bool left = x > WIDTH - RIGHT - 140;

    kv_buf_printf(
        p->out,
        "<path class=\"place\" d=\"M%.1f %dV%d\"/><circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>"
        "<text class=\"name\" x=\"%.1f\" y=\"%d\" text-anchor=\"%s\">",
        x, TOP, HEIGHT - BOTTOM, x, y_of(p, hits_of(p, bytes)), left ? x - 6 : x + 6,
        HEIGHT - BOTTOM - 10 - 16 * row, left ? "end" : "start");
    put_text(name, p->out);
    kv_buf_printf(p->out, " %.1f %%</text>\n", 100 * hits_of(p, bytes));
}

static void put_places(const struct picture *p)
{
    const struct kc_advice *advice = p->advice;
    double knee = kva_worth_knee(advice->curve, &advice->terms);

    for (size_t i = 0; i < advice->n_tiers; i++) {
        const struct kva_tier_worth *tier = &advice->tiers[i].worth;

        put_place(p, tier->before + tier->bytes, advice->tiers[i].name, (int)i);
    }
    if (knee > 0)
        put_place(p, knee, "knee", (int)advice->n_tiers);
}

void kc_advise_svg(const struct kc_advice *advice, struct kv_buf *out)
{
    double end = KV_MAX(kva_worth_most(advice->curve, &advice->terms), advice->terms.block_bytes);
    struct picture p = {.advice = advice, .out = out, .most = end * 2, .top = 0.05};

    for (size_t i = 0; i < advice->n_tiers; i++)
        p.most = KV_MAX(p.most, advice->tiers[i].worth.before + advice->tiers[i].worth.bytes);
    p.least = KV_MAX(advice->terms.block_bytes, end / 4096);
    while (p.top < hits_of(&p, p.most) && p.top < 1)
        p.top = KV_MIN(1.0, p.top + (p.top < 0.2 ? 0.05 : p.top < 0.5 ? 0.1 : 0.2));
    kv_buf_printf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
        "viewBox=\"0 0 %d %d\">\n<style>text { font: 12px ui-sans-serif, 'DejaVu Sans', "
        "sans-serif; fill: #57606a } .title { font-size: 15px; fill: #1f2328 } .name { fill: "
        "#1f2328; stroke: #ffffff; stroke-width: 4; paint-order: stroke } path { fill: none } "
        ".grid { stroke: #d8dee4 } .curve { stroke: #0969da; "
        "stroke-width: 2.5 } .place { stroke: #bc4c00; stroke-dasharray: 4 3 } circle { "
        "fill: #bc4c00 }</style>\n<rect width=\"100%%\" height=\"100%%\" rx=\"8\" "
        "fill=\"#ffffff\"/>\n<text class=\"title\" x=\"%d\" y=\"26\">Hit rate of the prefix "
        "cache over its capacity</text>\n<text x=\"%d\" y=\"44\">%s requests, %s a "
        "token</text>\n",
        WIDTH, HEIGHT, WIDTH, HEIGHT, LEFT, LEFT, kc_count(advice->trace.requests).s,
        kc_bytes((double)advice->opts.token_bytes).s);
    put_grid(&p);
    put_curve(&p);
    put_places(&p);
    kv_buf_puts(out, "</svg>\n");
}
