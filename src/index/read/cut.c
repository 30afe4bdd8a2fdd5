// SPDX-License-Identifier: Apache-2.0
/*
 * Cut a match to the blocks that all cache groups can serve, as vLLM's hybrid cache coordinator
 * does. Each kind of group in turn shortens the match to the longest that it can serve, until all
 * agree:
 *
 *     full attention, and windows without an end    every block up to the end
 *     sliding window                                the last `need` before the end, or all from 0
 *     recurrent state                               the block before the end
 *
 * A window's blocks may be parts of a block: a unit is one block of the window, be it a part, a block
 * or several.
 *
 * Below the device, engines look up what follows the device's hit, and there alone: of the blocks behind
 * the hit, those count that a lower tier has, not those that only the device has.
 *
 * Groups of one description answer together: each of them must have the block. Where the engine
 * drops the last matched block (EAGLE), a group that does looks one block beyond the match and gives that up
 * again; a kind does so once, and anew when another one shortened the match. States never drop.
 */
#include "index/read/cut.h"

struct cut {
    struct kvi_view *view;
    int tier;       /* this tier and nearer ones count */
    uint32_t base;  /* hit of the device: blocks from here on, in lower tiers only */
    uint32_t align; /* a match is a multiple of this many blocks */
    uint32_t first[KVI_MAX_WINDOWS]; /* first window of each kind, in the order */
    uint32_t n_kinds;
};

static bool same_kind(const struct kvi_window *a, const struct kvi_window *b)
{
    return a->need == b->need && a->stride == b->stride && a->window == b->window &&
           a->state == b->state && kvi_window_parts(a) == kvi_window_parts(b);
}

static const struct kvi_window *window_at(const struct cut *cut, uint32_t i)
{
    return &cut->view->windows->items[cut->view->windows->order[i]];
}

/* The first tier that counts. */
static int first_tier(const struct cut *cut)
{
    return cut->tier ? KV_TIER_DEVICE + 1 : KV_TIER_DEVICE;
}

/*
 * Return true when window @number has block @p of the prompt in @tier. Fast for questions in
 * ascending or descending order of @p.
 */
static bool has_in(struct kvi_view *view, int tier, uint32_t number, uint32_t p)
{
    uint32_t overlay = number / KVI_OVERLAY_WINDOWS, bit = kvi_window_tier(number);
    size_t *at = &view->at[tier][overlay];
    const struct kvi_share *s;

    if (*at == KVI_NO_SHARE || view->shares[*at].depth + view->shares[*at].len <= p)
        *at = view->last[tier][overlay];
    while (*at != KVI_NO_SHARE && view->shares[*at].depth > p)
        *at = view->shares[*at].above;
    if (*at == KVI_NO_SHARE)
        return false;
    s = &view->shares[*at];
    if (p - s->depth >= s->len)
        return false;
    return (s->tmap ? kvi_tmap_get(s->tmap, p - s->depth) : s->mask) >> bit & 1;
}

/* Whether all groups like window @kind have unit @u. */
static bool has(struct cut *cut, uint32_t kind, uint32_t u)
{
    const struct kvi_windows *windows = cut->view->windows;
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t parts = kvi_window_parts(w), part = u % parts,
             p = parts > 1 ? u / parts : u * w->stride + w->stride - 1;

    if (p < cut->base)
        return true;
    for (uint32_t i = kind; i < windows->n; i++) {
        bool found = false;

        if (!same_kind(window_at(cut, i), w) || window_at(cut, i)->part != part)
            continue;
        for (int t = first_tier(cut); t <= cut->tier && !found; t++)
            found = has_in(cut->view, t, windows->order[i], p);
        if (!found)
            return false;
    }
    return true;
}

/* Whether @units of the window end where a match may. */
static bool is_aligned(const struct cut *cut, const struct kvi_window *w, uint32_t units)
{
    return (uint64_t)units * w->stride % ((uint64_t)cut->align * kvi_window_parts(w)) == 0;
}

/* The longest match within the first @max units that a window can serve, in blocks. */
static uint32_t serve(struct cut *cut, uint32_t kind, uint32_t max, bool drop)
{
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t parts = kvi_window_parts(w), run = 0, units, wanted = w->need + drop;

    for (uint32_t u = max; u-- > 0;) {
        if (!has(cut, kind, u)) {
            run = 0;
            continue;
        }
        if (!run && !is_aligned(cut, w, drop ? u : u + 1))
            continue;
        if (++run == wanted)
            return (u + run - drop) * w->stride / parts;
    }
    if (w->state) /* one state is enough, however short the match */
        return 0;
    for (units = run; units && !is_aligned(cut, w, units); units--)
        ;
    if (drop && units)
        for (units--; units && !is_aligned(cut, w, units); units--)
            ;
    return units * w->stride / parts;
}

/* Units of the window that @blocks have room for, one more with @beyond, within the prompt. */
static uint32_t units_of(const struct cut *cut, const struct kvi_window *w, uint32_t blocks,
                         bool beyond)
{
    uint32_t parts = kvi_window_parts(w), all = cut->view->n, stride = KV_MAX(w->stride, 1u);

    return KV_MIN(blocks * parts / stride + beyond, all * parts / stride);
}

/* Whether windows like @kind give up the last matched block: together, when one of their groups does. */
static bool drops(const struct cut *cut, uint32_t kind)
{
    const struct kvi_windows *windows = cut->view->windows;

    for (uint32_t i = kind; windows->drops && i < windows->n; i++)
        if (same_kind(window_at(cut, i), window_at(cut, kind)) &&
            kvi_window_drops(windows, window_at(cut, i)))
            return true;
    return false;
}

/* Whether full attention does: the main group, and others that need every block. */
static bool full_drops(const struct cut *cut)
{
    const struct kvi_windows *windows = cut->view->windows;
    bool found = windows->drops && !windows->main_keeps;

    for (uint32_t k = 0; windows->drops && k < cut->n_kinds; k++)
        found |= window_at(cut, cut->first[k])->need == KVI_NEED_ALL && drops(cut, cut->first[k]);
    return found;
}

/* Cut @reach to the blocks that every full-attention group has. */
static uint32_t cut_full(struct cut *cut, uint32_t reach)
{
    for (uint32_t k = 0; k < cut->n_kinds; k++) {
        const struct kvi_window *w = window_at(cut, cut->first[k]);
        uint32_t end = units_of(cut, w, reach, false);

        if (w->need != KVI_NEED_ALL)
            continue;
        for (uint32_t b = end; b-- > 0;)
            if (!has(cut, cut->first[k], b))
                end = b;
        reach = KV_MIN(reach, end * w->stride / kvi_window_parts(w));
    }
    return reach;
}

static bool is_alone(const struct kvi_view *view)
{
    return view->windows->alone && view->windows->n;
}

static uint32_t agree(struct cut *cut, uint32_t reach)
{
    uint32_t verified = 0, hit = cut_full(cut, reach), now = hit;

    if (!is_alone(cut->view)) {
        hit -= full_drops(cut) && hit;
        hit -= hit % KV_MAX(cut->align, 1u);
    }
    do {
        hit = KV_MIN(hit, now);
        now = hit;
        for (uint32_t k = 0; k < cut->n_kinds; k++) {
            const struct kvi_window *w = window_at(cut, cut->first[k]);
            bool drop = drops(cut, cut->first[k]) && !(verified >> k & 1),
                 beyond = drop && !w->state;
            uint32_t served;

            if (w->need == KVI_NEED_ALL)
                continue;
            served = serve(cut, cut->first[k], units_of(cut, w, now, beyond), beyond);
            if (drop)
                verified |= 1u << k;
            else if (served < now)
                verified = 0;
            now = served;
        }
    } while (now < hit);
    return now;
}

static uint32_t common_multiple(uint32_t a, uint32_t b)
{
    uint32_t x = a, y = KV_MAX(b, 1u);

    while (y) {
        uint32_t rest = x % y;

        x = y;
        y = rest;
    }
    return (uint64_t)a / x * b > UINT32_MAX ? UINT32_MAX : a / x * b;
}

/* Return the number of blocks on the path, for holders of windows alone. */
static uint32_t path_length(const struct kvi_view *view)
{
    uint32_t length = 0;

    for (size_t i = 0; i < (size_t)KV_N_TIERS * KVI_OVERLAYS; i++) {
        size_t last = view->last[i / KVI_OVERLAYS][i % KVI_OVERLAYS];

        if (last != KVI_NO_SHARE)
            length = KV_MAX(length, view->shares[last].depth + view->shares[last].len);
    }
    return length;
}

/* Return how many blocks from the first on the main holder has, behind the base in lower tiers. */
static uint32_t main_length(const struct cut *cut)
{
    uint32_t wanted = (2u << cut->tier) - (1u << first_tier(cut)), end = cut->base;
    const struct kvi_share *s = NULL;

    for (;; end++) {
        if (!s || s->depth + s->len <= end) {
            size_t at = cut->view->main;

            while (at != KVI_NO_SHARE && cut->view->shares[at].depth > end)
                at = cut->view->shares[at].above;
            s = at == KVI_NO_SHARE ? NULL : &cut->view->shares[at];
        }
        if (!s || end - s->depth >= s->len ||
            !((s->tmap ? kvi_tmap_get(s->tmap, end - s->depth) : s->mask) & wanted))
            return end;
    }
}

void kvi_cut_reach(struct kvi_view *view, uint32_t reach[KV_N_TIERS])
{
    const struct kvi_windows *windows = view->windows;
    struct cut cut = {.view = view, .align = 1};
    uint32_t all = is_alone(view) ? path_length(view) : 0;

    memcpy(view->at, view->last, sizeof(view->at));
    for (uint32_t i = 0; i < windows->n; i++) {
        uint32_t k = 0;

        while (k < cut.n_kinds && !same_kind(window_at(&cut, cut.first[k]), window_at(&cut, i)))
            k++;
        if (k == cut.n_kinds)
            cut.first[cut.n_kinds++] = i;
        cut.align = common_multiple(cut.align, window_at(&cut, i)->stride);
    }
    for (int t = 0; t < KV_N_TIERS; t++) {
        uint32_t had = is_alone(view) ? all : reach[t];

        cut.tier = t;
        if (t && !is_alone(view) && had)
            had = main_length(&cut);
        reach[t] = had ? agree(&cut, had) : 0;
        if (t)
            reach[t] = KV_MAX(reach[t], reach[t - 1]);
        else
            cut.base = reach[0];
    }
}
