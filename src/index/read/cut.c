// SPDX-License-Identifier: Apache-2.0
/*
 * Cut a match to the blocks that all cache groups can serve, as vLLM's hybrid cache coordinator
 * does. Each kind of group in turn shortens the match to the longest that it can serve, until all
 * agree. Which blocks before its end a match needs is the table of kinds, kv_needs_first.
 *
 * A window's blocks may be parts of a block: a unit is one block of the window, be it a part, a block
 * or several. Beside states with larger blocks a match may end inside of blocks, where a group has a
 * key that ends there.
 *
 * Below the device, engines look up what follows the device's hit, and there alone: of the blocks behind
 * the hit, those count that a lower tier has, not those that only the device has. Chunked attention is
 * looked up like a window of a chunk there.
 *
 * Groups of one description answer together: each of them must have the block. Where the engine
 * drops the last matched block (EAGLE), a group that does looks one block beyond the match and gives that up
 * again; a kind does so once, and anew when another one shortened the match. States never drop, and no
 * engine drops with chunks.
 */
#include "index/read/cut.h"

#include "base/core/cache_group.h"

struct cut {
    struct kvi_view *view;
    int tier;      /* this tier and nearer ones count */
    uint32_t base; /* hit of the device: blocks from here on, in lower tiers only */
    const struct kvi_windows *windows;
};

static const struct kvi_window *window_at(const struct cut *cut, uint32_t i)
{
    return &cut->windows->items[cut->windows->order[i]];
}

/* The first tier that counts. */
static int first_tier(const struct cut *cut)
{
    return cut->tier ? KV_TIER_DEVICE + 1 : KV_TIER_DEVICE;
}

/*
 * The share of an overlay that begins with block @p of the prompt or before it, or KVI_NO_SHARE. Fast for
 * questions in ascending or descending order of @p.
 */
static inline size_t share_before(struct kvi_view *view, int tier, uint32_t overlay, uint32_t p)
{
    size_t *at = &view->at[tier][overlay];

    if (*at == KVI_NO_SHARE || view->shares[*at].depth + view->shares[*at].len <= p)
        *at = view->last[tier][overlay];
    while (*at != KVI_NO_SHARE && view->shares[*at].depth > p)
        *at = view->shares[*at].above;
    return *at;
}

/* Return true when window @number has block @p of the prompt in @tier. */
static bool has_in(struct kvi_view *view, int tier, uint32_t number, uint32_t p)
{
    size_t at = share_before(view, tier, number / KVI_OVERLAY_WINDOWS, p);
    const struct kvi_share *s = at == KVI_NO_SHARE ? NULL : &view->shares[at];

    if (!s || p - s->depth >= s->len)
        return false;
    return (s->tmap ? kvi_tmap_get(s->tmap, p - s->depth) : s->mask) >> kvi_window_tier(number) & 1;
}

/* Blocks that a unit of the window spans. Where matches end inside of states' blocks, each place counts. */
static uint32_t stride_of(const struct cut *cut, const struct kvi_window *w)
{
    return cut->windows->inside && w->needs == KV_NEEDS_STATE ? 1 : w->stride;
}

/* Whether all groups like window @kind have the block that ends with block @p of the prompt. */
static bool has_end(struct cut *cut, uint32_t kind, uint32_t p, uint32_t part)
{
    const struct kvi_windows *windows = cut->windows;

    if (p < cut->base)
        return true;
    for (uint32_t i = kind; i < windows->n; i++) {
        bool found = false;

        if (windows->kind[i] != windows->kind[kind] || window_at(cut, i)->part != part)
            continue;
        for (int t = first_tier(cut); t <= cut->tier && !found; t++)
            found = has_in(cut->view, t, windows->order[i], p);
        if (!found)
            return false;
    }
    return true;
}

/* Whether all groups like window @kind have unit @u. */
static bool has(struct cut *cut, uint32_t kind, uint32_t u)
{
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t parts = kvi_window_parts(w), stride = stride_of(cut, w);

    return has_end(cut, kind, parts > 1 ? u / parts : u * stride + stride - 1, u % parts);
}

/* -- stretches of equal blocks ----------------------------------------------------------------- */

/* Blocks in a row with the same answer: those that end with a block of the prompt, going back. */
struct stretch {
    bool has;
    uint32_t n;
};

/* The blocks of a tmap that end with @i and have bit @bit as it has. */
static inline struct stretch in_tmap(const struct kvi_tmap *tmap, uint32_t i, uint32_t bit)
{
    struct stretch s = {kvi_tmap_get(tmap, i) >> bit & 1, 0};

    while (s.n <= i) {
        uint32_t at = i - s.n, in_word = at % 16 + 1;
        uint64_t word = atomic_load_explicit(&tmap->word[at / 16], memory_order_acquire) >> bit,
                 others = (s.has ? ~word : word) & UINT64_C(0x1111111111111111);

        others <<= 4 * (16 - in_word); /* block @at at the top */
        if (others) {
            s.n += (uint32_t)__builtin_clzll(others) / 4;
            break;
        }
        s.n += in_word;
    }
    return s;
}

/* The stretch of window @number on the device that ends with block @p. */
static inline struct stretch stretch_in(struct kvi_view *view, uint32_t number, uint32_t p)
{
    size_t at = share_before(view, KV_TIER_DEVICE, number / KVI_OVERLAY_WINDOWS, p);
    uint32_t bit = kvi_window_tier(number), in;
    const struct kvi_share *s;

    if (at == KVI_NO_SHARE)
        return (struct stretch){false, p + 1};
    s = &view->shares[at];
    if (p - s->depth >= s->len)
        return (struct stretch){false, p + 1 - s->depth - s->len};
    in = p - s->depth;
    if (s->tmap)
        return in_tmap(s->tmap, in, bit);
    return (struct stretch){s->mask >> bit & 1, in + 1};
}

/*
 * Whether stretches answer for a kind: whole blocks, each of which is a place, on the device. Not for
 * chunks: between blocks that aren't there a chunk may end, where a match needs none of them.
 */
static bool is_plain(const struct cut *cut, const struct kvi_window *w)
{
    return cut->tier == KV_TIER_DEVICE && stride_of(cut, w) == 1 && kvi_window_parts(w) == 1 &&
           w->needs != KV_NEEDS_CHUNK;
}

/* The stretch of all windows of a kind together that ends with block @p. */
static struct stretch stretch_of(struct cut *cut, uint32_t kind, uint32_t p)
{
    const struct kvi_windows *windows = cut->windows;
    struct stretch all = stretch_in(cut->view, windows->order[kind], p);

    for (uint32_t i = kind + 1; i < windows->n; i++) {
        struct stretch s;

        if (windows->kind[i] != windows->kind[kind])
            continue;
        s = stretch_in(cut->view, windows->order[i], p);
        if (s.has != all.has)
            all = s.has ? all : s;
        else
            all.n = s.has ? KV_MIN(all.n, s.n) : KV_MAX(all.n, s.n);
    }
    return all;
}

/* -- what each kind can serve ------------------------------------------------------------------ */

/* Whether @units of the window end where a match may. */
static bool is_aligned(const struct cut *cut, const struct kvi_window *w, uint32_t units)
{
    return (uint64_t)units * stride_of(cut, w) %
               ((uint64_t)cut->windows->align * kvi_window_parts(w)) ==
           0;
}

/* The longest match of at most @units of the window that ends where one may, in units. */
static uint32_t align(const struct cut *cut, const struct kvi_window *w, uint32_t units)
{
    if (cut->windows->align == 1 && kvi_window_parts(w) == 1)
        return units;
    while (units && !is_aligned(cut, w, units))
        units--;
    return units;
}

/* The first unit that a match of @units needs. Chunks are looked up like windows below the device. */
static uint32_t first_of(const struct cut *cut, const struct kvi_window *w, uint32_t units)
{
    bool run = cut->tier && w->needs == KV_NEEDS_CHUNK;

    return (uint32_t)kv_needs_first(run ? KV_NEEDS_RUN : w->needs, w->need, units);
}

/*
 * The longest match within the first @max units that windows like @kind can serve, in units: from the
 * end downward over the units that it needs. A miss: each shorter match that ends behind the unit needs
 * it, too, so the next one that may be ends there.
 */
static uint32_t serve(struct cut *cut, uint32_t kind, uint32_t max)
{
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t units = align(cut, w, max), at = units;
    bool plain = is_plain(cut, w);

    while (at > first_of(cut, w, units)) {
        struct stretch s = {true, 1};

        if (plain)
            s = stretch_of(cut, kind, at - 1);
        else
            s.has = has(cut, kind, at - 1);
        at -= KV_MIN(s.n, at);
        if (!s.has)
            at = units = align(cut, w, at);
    }
    return units;
}

/*
 * The same for engines that give the last matched block up: the longest match before which the kind has
 * one unit more, behind its end. Of a match from the first unit on, engines give up one where it may end.
 */
static uint32_t serve_dropping(struct cut *cut, uint32_t kind, uint32_t max)
{
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t run = 0, units;

    for (uint32_t u = max; u-- > 0;) {
        if (!has(cut, kind, u))
            run = 0;
        else if (run || is_aligned(cut, w, u))
            run++;
        if (run && u == first_of(cut, w, u + run - 1) && run > w->need)
            return u + run - 1;
    }
    units = align(cut, w, run);
    return units ? align(cut, w, units - 1) : units;
}

/* Units of the window that @blocks have room for, one more with @beyond, within the prompt. */
static uint32_t units_of(const struct cut *cut, const struct kvi_window *w, uint32_t blocks,
                         bool beyond)
{
    uint32_t parts = kvi_window_parts(w), all = cut->view->n,
             stride = KV_MAX(stride_of(cut, w), 1u);

    return KV_MIN(blocks * parts / stride + beyond, all * parts / stride);
}

/* Whether windows like @kind give up the last matched block: together, when one of their groups does. */
static bool drops(const struct cut *cut, uint32_t kind)
{
    const struct kvi_windows *windows = cut->windows;

    for (uint32_t i = kind; windows->drops && i < windows->n; i++)
        if (windows->kind[i] == windows->kind[kind] && kvi_window_drops(windows, window_at(cut, i)))
            return true;
    return false;
}

/* Whether full attention does: the main group, and others that need every block. */
static bool full_drops(const struct cut *cut)
{
    const struct kvi_windows *windows = cut->windows;
    bool found = windows->drops && !windows->main_keeps;

    for (uint32_t k = 0; windows->drops && k < cut->windows->n_kinds; k++)
        found |= window_at(cut, cut->windows->first[k])->needs == KV_NEEDS_ALL &&
                 drops(cut, cut->windows->first[k]);
    return found;
}

/* The longest match within @reach that a window without an end can serve. */
static uint32_t serve_full(struct cut *cut, uint32_t kind, uint32_t reach)
{
    const struct kvi_window *w = window_at(cut, kind);
    uint32_t end = units_of(cut, w, reach, false), whole;

    if (is_plain(cut, w)) {
        for (uint32_t b = end; b;) {
            struct stretch s = stretch_of(cut, kind, b - 1);

            end = s.has ? end : b - s.n;
            b -= s.n;
        }
        return end;
    }
    for (uint32_t b = end; b-- > 0;)
        if (!has(cut, kind, b))
            end = b;
    whole = end * w->stride / kvi_window_parts(w);
    for (uint32_t l = KV_MIN(reach, whole + w->stride - 1); cut->windows->inside && l > whole; l--)
        if (has_end(cut, kind, l - 1, 0))
            return l;
    return KV_MIN(reach, whole);
}

/* Cut @reach to the blocks that every full-attention group has. */
static uint32_t cut_full(struct cut *cut, uint32_t reach)
{
    for (uint32_t k = 0; k < cut->windows->n_kinds; k++)
        if (window_at(cut, cut->windows->first[k])->needs == KV_NEEDS_ALL)
            reach = serve_full(cut, cut->windows->first[k], reach);
    return reach;
}

static bool is_alone(const struct kvi_view *view)
{
    return view->windows->alone && view->windows->n;
}

/*
 * The longest match within @reach that all windows can serve where that is simple (kvi_windows.simple), on the
 * device: each kind goes back over stretches of whole blocks until it has what it needs.
 */
static uint32_t agree_simply(struct cut *cut, uint32_t reach)
{
    const struct kvi_windows *windows = cut->windows;
    uint32_t now = reach, hit;

    do {
        hit = now;
        for (uint32_t k = 0; k < windows->n_kinds; k++) {
            uint32_t kind = windows->first[k], at = now;
            const struct kvi_window *w = window_at(cut, kind);

            while (at > kv_needs_first(w->needs, w->need, now)) {
                struct stretch s = stretch_of(cut, kind, at - 1);

                at -= KV_MIN(s.n, at);
                if (!s.has)
                    now = at;
            }
        }
    } while (now < hit);
    return now;
}

static uint32_t agree(struct cut *cut, uint32_t reach)
{
    uint32_t verified = 0, hit = cut_full(cut, reach), now = hit;

    if (!is_alone(cut->view)) {
        hit -= full_drops(cut) && hit;
        hit -= cut->windows->align > 1 ? hit % cut->windows->align : 0;
    }
    do {
        hit = KV_MIN(hit, now);
        now = hit;
        for (uint32_t k = 0; k < cut->windows->n_kinds; k++) {
            const struct kvi_window *w = window_at(cut, cut->windows->first[k]);
            bool drop = drops(cut, cut->windows->first[k]) && !(verified >> k & 1),
                 beyond = drop && w->needs == KV_NEEDS_RUN;
            uint32_t served, units = units_of(cut, w, now, beyond);

            if (w->needs == KV_NEEDS_ALL)
                continue;
            served = beyond ? serve_dropping(cut, cut->windows->first[k], units)
                            : serve(cut, cut->windows->first[k], units);
            if (kvi_window_parts(w) > 1 || w->stride > 1)
                served = served * stride_of(cut, w) / kvi_window_parts(w);
            if (drop)
                verified |= 1u << k;
            else if (served < now)
                verified = 0;
            now = served;
        }
    } while (now < hit);
    return now;
}

/* Return the number of blocks on the path, for holders of windows alone. */
static uint32_t path_length(const struct kvi_view *view)
{
    uint32_t length = 0;

    for (uint32_t t = 0; t < KV_N_TIERS; t++) {
        for (uint32_t i = 0; i < kvi_overlays_of(view->windows); i++) {
            size_t last = view->last[t][i];

            if (last != KVI_NO_SHARE)
                length = KV_MAX(length, view->shares[last].depth + view->shares[last].len);
        }
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

/* The reach in a tier below the device, from the reach @before in the one above. */
static uint32_t reach_below(struct cut *cut, bool alone, uint32_t all, uint32_t before)
{
    uint32_t had = alone ? all : main_length(cut);

    return had > cut->base ? KV_MAX(before, agree(cut, had)) : before;
}

void kvi_cut_reach(struct kvi_view *view, uint32_t reach[KV_N_TIERS])
{
    struct cut cut = {.view = view, .windows = view->windows};
    bool alone = is_alone(view);
    uint32_t all = alone ? path_length(view) : 0, had = alone ? all : reach[KV_TIER_DEVICE];

    if (had)
        had = view->windows->simple ? agree_simply(&cut, had) : agree(&cut, had);
    reach[KV_TIER_DEVICE] = cut.base = had;
    for (cut.tier = KV_TIER_DEVICE + 1; cut.tier < KV_N_TIERS; cut.tier++)
        reach[cut.tier] =
            view->below ? reach_below(&cut, alone, all, reach[cut.tier - 1]) : reach[cut.tier - 1];
}
