// SPDX-License-Identifier: Apache-2.0
/*
 * Declare to the index what the engine's lookup does: which windows a rank has, and which groups
 * give up the last matched block. Lookups cut their matches by that.
 *
 * Invariant: a window is declared before a block of it is stored. A match that ignored it would be
 * longer than the engine's; one that counts an empty window is short for a moment.
 */
#include "indexer/view/apply_impl.h"

#include <errno.h>

/* -- which groups give up the last matched block ----------------------------------------------- */

/* Whether the engine gives up the last matched block of a group; @group -1: unknown. */
static bool gives_up(const struct ki_applier *a, int64_t group)
{
    uint64_t groups = a->habits.eagle_groups;

    return a->habits.eagle_drop && (!groups || group < 0 || (group < 64 && groups >> group & 1));
}

int ki_applier_declare_drops(const struct ki_applier *a, struct kvi_index *index, uint32_t rank)
{
    struct kv_holder holder = {a->instance, rank};
    int64_t main = kve_sources_main_group(&a->reader->sources, rank);
    uint64_t groups = a->habits.eagle_groups;

    if (!a->habits.eagle_drop)
        return 0;
    return kvi_set_keeps(index, holder, !gives_up(a, main), groups ? ~groups : 0);
}

void ki_windows_get(struct kvi_index *index, struct kv_holder holder, struct ki_windows *ret)
{
    ret->n = kvi_get_windows(index, holder, ret->items);
}

/* Whether a window gives up the last matched block: with its group, or another one like it. */
static bool drops_in(const struct ki_applier *a, const struct ki_windows *windows,
                     const struct kvi_window *window)
{
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->window == window->window && w->need == window->need && w->stride == window->stride &&
            w->needs == window->needs && ki_window_parts(w) == ki_window_parts(window) &&
            gives_up(a, w->group))
            return true;
    }
    return false;
}

/* Whether full attention does: the main group, or another one that needs every block. */
static bool full_drops(const struct ki_applier *a, const struct ki_windows *windows, uint32_t rank)
{
    bool drops = gives_up(a, kve_sources_main_group(&a->reader->sources, rank));

    for (int i = 0; i < windows->n && !drops; i++)
        drops = windows->items[i].needs == KV_NEEDS_ALL && drops_in(a, windows, &windows->items[i]);
    return drops;
}

/* Whether full attention of another size than the main group's gives up a block: each gives up its own. */
static bool drops_other_sizes(const struct ki_applier *a, const struct ki_windows *windows)
{
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->needs == KV_NEEDS_ALL && (w->stride > 1 || ki_window_parts(w) > 1) &&
            drops_in(a, windows, w))
            return true;
    }
    return false;
}

bool ki_applier_drops_beyond_main(const struct ki_applier *a, const struct ki_windows *windows,
                                  uint32_t rank)
{
    if (!a->habits.eagle_drop)
        return false;
    if (drops_other_sizes(a, windows))
        return true;
    if (!a->habits.eagle_groups || full_drops(a, windows, rank))
        return false;
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        if (w->needs == KV_NEEDS_RUN && drops_in(a, windows, w))
            return true;
    }
    return false;
}

/* -- windows and sizes of groups --------------------------------------------------------------- */

enum ki_form ki_form_of(const struct ki_applier *a, const struct kve_source *source)
{
    if (source->parts == 1)
        return KI_FORM_BLOCKS;
    if (source->needs == KV_NEEDS_STATE)
        return KI_FORM_NAMES;
    /* With block drop a match may need the first part behind its end. */
    if (source->needs != KV_NEEDS_RUN || a->habits.eagle_drop || source->need >= source->parts ||
        source->parts <= KVI_MAX_WINDOW_PARTS)
        return KI_FORM_PARTS;
    return source->need == 1 ? KI_FORM_NAMES : KI_FORM_TAIL;
}

/* Windows that the index has for the group. */
static uint32_t n_windows(const struct ki_applier *a, const struct kve_source *source)
{
    return ki_form_of(a, source) == KI_FORM_PARTS ? source->parts : 1;
}

/*
 * Give the rank the source's windows, one for each part of a registered block. A group for which
 * the index has no room is left out: the view is partial, as matches may be longer than the
 * engine's.
 */
static int declare_source(struct ki_applier *a, struct kvi_index *index, uint32_t rank,
                          const struct kve_source *source)
{
    struct kv_holder holder = {a->instance, rank};
    struct kvi_window window = {.group = source->group,
                                .window = source->window,
                                .need = source->need,
                                .stride = source->stride,
                                .needs = source->needs,
                                .parts = n_windows(a, source)};
    struct ki_windows all;
    bool crowded = window.parts > KVI_MAX_WINDOW_PARTS;
    int rc = 0;

    a->has_windows = true;
    if (ki_form_of(a, source) == KI_FORM_TAIL)
        window.need = 1; /* block with its whole tail */
    for (; !crowded && window.part < window.parts && rc >= 0; window.part++)
        rc = kvi_set_window(index, holder, &window);
    if (crowded || (rc == -ENOSPC && kvi_get_windows(index, holder, all.items) > 0)) {
        ki_doubts_add(&a->doubts, rank, 0, KI_WHY_CROWDED);
        rc = 0;
    }
    return rc < 0 ? rc : kvi_set_alone(index, holder, !kve_reader_has_main(a->reader, rank));
}

bool ki_shows_size(const struct kve_op *op, const struct kve_source *source)
{
    return op->tier == KV_TIER_DEVICE && !source->owner[0] &&
           (op->type == KVE_OP_STORE || op->type == KVE_OP_STORE_KNOWN);
}

int ki_applier_declare_windows(struct ki_applier *a, struct kvi_index *index,
                               const struct kve_batch *batch)
{
    struct kve_source source;
    bool reshaped = false;
    int rc = 0, lost = 0;

    for (size_t i = 0; i < batch->n_ops && !rc; i++) {
        const struct kve_op *op = &batch->ops[i];

        if (!ki_applier_is_window(a, op, &source) || !ki_applier_note_rank(a, op->rank))
            continue;
        rc = ki_applier_end_run(a, index);
        lost = rc < 0 ? rc : lost; /* stores of batches before: the windows come all the same */
        rc = 0;
        if (ki_shows_size(op, &source))
            rc = declare_source(a, index, op->rank, &source);
        else if (a->has_windows)
            rc = kvi_set_alone(index, (struct kv_holder){a->instance, op->rank},
                               !kve_reader_has_main(a->reader, op->rank));
        if (rc == -EEXIST && !reshaped) {
            reshaped = true;
            ki_applier_purge(a, index, true);
            i = SIZE_MAX; /* the windows declared so far are gone, too */
            rc = 0;
        }
    }
    if (reshaped)
        return -EEXIST;
    return rc ? rc : lost;
}

int ki_windows_find(const struct ki_applier *a, const struct ki_windows *windows,
                    const struct kve_source *source, struct ki_small_group *ret)
{
    uint32_t found = 0, n = n_windows(a, source);

    *ret =
        (struct ki_small_group){.group = source->group,
                                .need = source->needs == KV_NEEDS_RUN ? source->need : UINT32_MAX,
                                .parts = source->parts,
                                .tail = ki_form_of(a, source) == KI_FORM_TAIL};
    if (n == 1)
        ret->parts = ret->tail ? source->need : 1;
    if (source->parts > KV_COUNT(ret->numbers))
        return -ENOENT;
    for (int i = 0; i < windows->n; i++) {
        const struct kvi_window *w = &windows->items[i];

        /* Before the batch showed the size of the group's blocks, a key inside of one stood for it. */
        if (w->group != source->group || ki_window_parts(w) != n || w->stride % source->stride)
            continue;
        ret->numbers[w->part] = (uint32_t)i;
        ret->drops |= drops_in(a, windows, w);
        found++;
    }
    return found == n ? 0 : -ENOENT;
}

int ki_windows_find_size(const struct ki_applier *a, const struct ki_windows *windows,
                         const struct kve_source *source, struct ki_small_group *ret)
{
    struct kve_source other = *source;

    for (int i = 0; i < windows->n; i++) {
        if (windows->items[i].group != source->group)
            continue;
        other.need = windows->items[i].need;
        other.needs = windows->items[i].needs;
        other.stride = windows->items[i].stride;
        other.parts = ki_window_parts(&windows->items[i]);
        return ki_windows_find(a, windows, &other, ret);
    }
    return -ENOENT;
}
