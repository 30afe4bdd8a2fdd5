// SPDX-License-Identifier: Apache-2.0
/* Descriptions of windows, and how lookups of their holders go: see windows.h. */
#include "index/tree/windows.h"

#include <string.h>

#include "base/core/cache_group.h"

/* -- descriptions ------------------------------------------------------------------------------ */

struct kvi_windows *kvi_windows_copy(struct kvi_index *ix, const struct kvi_holder *holder)
{
    const struct kvi_windows *old = kvi_windows_of(holder);
    struct kvi_windows *windows = kvi_mem_alloc(&ix->mem, sizeof(*windows));

    if (windows && old)
        *windows = *old;
    return windows;
}

static bool same_kind(const struct kvi_window *a, const struct kvi_window *b)
{
    return a->need == b->need && a->stride == b->stride && a->window == b->window &&
           a->needs == b->needs && kvi_window_parts(a) == kvi_window_parts(b);
}

/* The multiple at which matches end, with blocks of @stride beside; UINT32_MAX: none can. */
static uint32_t align_with(uint32_t align, uint32_t stride)
{
    uint32_t multiple = align == UINT32_MAX ? 0 : kv_common_multiple(align, KV_MAX(stride, 1u));

    return multiple ? multiple : UINT32_MAX;
}

/*
 * Whether vLLM looks inside of blocks, at the ends of units, which are as small as the smallest blocks:
 * there are states of larger blocks, and all runs and chunks are of units.
 */
static bool ends_inside(const struct kvi_windows *windows)
{
    uint32_t most = 1; /* units of a registered block */
    bool larger = false;

    for (uint32_t i = 0; i < windows->n; i++)
        most = KV_MAX(most, kvi_window_parts(&windows->items[i]));
    for (uint32_t i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if ((w->needs == KV_NEEDS_RUN || w->needs == KV_NEEDS_CHUNK) &&
            (w->stride > 1 || kvi_window_parts(w) != most))
            return false;
        larger |= w->needs == KV_NEEDS_STATE && (w->stride > 1 || most > 1);
    }
    return larger && !windows->alone;
}

/* Whether all windows have blocks of the registered size, and need runs of them, or the last one. */
static bool is_simple(const struct kvi_windows *windows)
{
    for (uint32_t i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->stride > 1 || kvi_window_parts(w) > 1 ||
            (w->needs != KV_NEEDS_RUN && w->needs != KV_NEEDS_STATE))
            return false;
    }
    return !windows->drops;
}

/* Work out what each lookup would. */
static void make_plan(struct kvi_windows *windows)
{
    windows->n_kinds = 0;
    windows->align = 1;
    windows->inside = ends_inside(windows);
    windows->simple = is_simple(windows);
    windows->lower = false;
    for (uint32_t i = KVI_OVERLAYS; i < KV_N_TIERS * KVI_OVERLAYS; i++)
        windows->lower |= windows->overlays[i / KVI_OVERLAYS][i % KVI_OVERLAYS] != NULL;
    for (uint32_t i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[windows->order[i]];
        uint8_t k = 0;

        while (k < windows->n_kinds &&
               !same_kind(&windows->items[windows->order[windows->first[k]]], w))
            k++;
        if (k == windows->n_kinds)
            windows->first[windows->n_kinds++] = (uint8_t)i;
        windows->kind[i] = k;
        if (!windows->inside)
            windows->align = align_with(windows->align, w->stride);
    }
}

void kvi_windows_publish(struct kvi_index *ix, struct kvi_holder *holder,
                         struct kvi_windows *windows)
{
    struct kvi_windows *old = kvi_windows_of(holder);

    make_plan(windows);
    atomic_store_explicit(&holder->windows, windows, memory_order_release);
    atomic_store_explicit(&holder->windowed, true, memory_order_release);
    /*
     * Disturb walks that have passed the holder without windows: they must not end with blocks
     * stored after.
     */
    atomic_fetch_add_explicit(&ix->windows_version, 1, memory_order_release);
    if (old)
        kvi_retire_memory(ix, &old->retired, sizeof(*old));
}

static void sort_groups(struct kvi_windows *windows)
{
    for (uint32_t i = 0; i < windows->n; i++) {
        uint32_t at = i;

        for (; at && windows->items[windows->order[at - 1]].group > windows->items[i].group; at--)
            windows->order[at] = windows->order[at - 1];
        windows->order[at] = (uint8_t)i;
    }
}

/*
 * Return true when the holder's windows of that group have blocks of another size. A block is where it
 * ends: of a window whose blocks turn out to be so many times larger, all that it has keeps its place.
 */
static bool is_reshaped(const struct kvi_windows *windows, const struct kvi_window *window)
{
    for (uint32_t i = 0; windows && i < windows->n; i++)
        if (windows->items[i].group == window->group &&
            (window->stride % windows->items[i].stride ||
             kvi_window_parts(&windows->items[i]) != kvi_window_parts(window)))
            return true;
    return false;
}

/* Count the windows that the holder lacks of the window's group, whose blocks have the same size. */
static uint32_t count_missing(const struct kvi_windows *windows, const struct kvi_window *window)
{
    uint32_t n = kvi_window_parts(window);

    for (uint32_t i = 0; windows && i < windows->n; i++)
        n -= windows->items[i].group == window->group;
    return n;
}

static int set_window(struct kvi_index *ix, struct kvi_holder *holder,
                      const struct kvi_window *window)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    uint32_t i = 0;

    if (is_reshaped(windows, window))
        return -EEXIST;
    while (windows && i < windows->n &&
           (windows->items[i].group != window->group || windows->items[i].part != window->part))
        i++;
    if (windows && i < windows->n && memcmp(&windows->items[i], window, sizeof(*window)) == 0)
        return (int)i;
    if ((!windows || i == windows->n) && i + count_missing(windows, window) > KVI_MAX_WINDOWS)
        return -ENOSPC;
    windows = kvi_windows_copy(ix, holder);
    if (!windows)
        return -ENOMEM;
    windows->items[i] = *window;
    windows->n = KV_MAX(windows->n, i + 1);
    sort_groups(windows);
    kvi_windows_publish(ix, holder, windows);
    return (int)i;
}

int kvi_begin(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret)
{
    kvi_lock(ix);
    *ret = kvi_holder_await(ix, key);
    return *ret ? 0 : kvi_holder_add(ix, key, ret);
}

int kvi_set_window(struct kvi_index *index, struct kv_holder key, const struct kvi_window *window)
{
    struct kvi_holder *holder;
    int rc;

    if (!window->need || window->needs > KV_NEEDS_ALL || !window->stride ||
        window->part >= kvi_window_parts(window) || window->parts > KVI_MAX_WINDOW_PARTS ||
        (window->stride > 1 && window->parts > 1))
        return -EINVAL;
    rc = kvi_begin(index, key, &holder);
    if (!rc)
        rc = set_window(index, holder, window);
    kvi_unlock(index);
    return rc;
}

int kvi_get_windows(struct kvi_index *index, struct kv_holder key, struct kvi_window *ret)
{
    const struct kvi_holder *holder;
    const struct kvi_windows *windows;
    int n = -ENOENT;

    kvi_lock(index);
    holder = kvi_holder_find(index, key);
    windows = holder ? kvi_windows_of(holder) : NULL;
    if (holder)
        n = windows ? (int)windows->n : 0;
    for (int i = 0; i < n; i++)
        ret[i] = windows->items[i];
    pthread_mutex_unlock(&index->lock);
    return n;
}

/* -- how lookups of a holder go ---------------------------------------------------------------- */

/* The rule of a holder without windows is all zero. */
struct rule {
    bool alone, drops, main_keeps;
    uint64_t kept_groups;
};

static struct rule rule_of(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);

    return windows ? (struct rule){windows->alone, windows->drops, windows->main_keeps,
                                   windows->kept_groups}
                   : (struct rule){0};
}

static int set_rule(struct kvi_index *ix, struct kvi_holder *holder, struct rule rule)
{
    struct rule old = rule_of(holder);
    struct kvi_windows *windows;
    struct kvi_holder *overlay;
    bool has_main = old.alone && !rule.alone;

    if (old.alone == rule.alone && old.drops == rule.drops && old.main_keeps == rule.main_keeps &&
        old.kept_groups == rule.kept_groups)
        return 0;
    windows = kvi_windows_copy(ix, holder);
    if (!windows)
        return -ENOMEM;
    windows->alone = rule.alone;
    windows->drops = rule.drops;
    windows->main_keeps = rule.main_keeps;
    windows->kept_groups = rule.kept_groups;
    kvi_windows_publish(ix, holder, windows);
    KVI_EACH_OVERLAY(has_main ? windows : NULL, overlay)
    {
        kvi_overlay_forget_places(ix, holder, overlay);
    }
    return 0;
}

int kvi_set_alone(struct kvi_index *index, struct kv_holder key, bool alone)
{
    struct kvi_holder *holder;
    int rc = kvi_begin(index, key, &holder);

    if (!rc) {
        struct rule rule = rule_of(holder);

        rule.alone = alone;
        rc = set_rule(index, holder, rule);
    }
    kvi_unlock(index);
    return rc;
}

int kvi_set_keeps(struct kvi_index *index, struct kv_holder key, bool main, uint64_t groups)
{
    struct kvi_holder *holder;
    int rc = kvi_begin(index, key, &holder);

    if (!rc)
        rc = set_rule(index, holder, (struct rule){rule_of(holder).alone, true, main, groups});
    kvi_unlock(index);
    return rc;
}

uint64_t kvi_windows_blocks(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *overlay;
    uint64_t blocks = 0;

    KVI_EACH_OVERLAY(windows && windows->alone ? windows : NULL, overlay)
    blocks = KV_MAX(blocks, atomic_load_explicit(&overlay->blocks, memory_order_relaxed));
    return blocks;
}

uint64_t kvi_windows_placeless(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *overlay;
    uint64_t parked = 0;

    KVI_EACH_OVERLAY(windows && windows->alone ? windows : NULL, overlay)
    parked += overlay->n_parked;
    return parked;
}
