// SPDX-License-Identifier: Apache-2.0
/*
 * Dump windows: each holder's rule and windows, then the blocks overlay by overlay, one slice
 * per lock. With a main group, the holder's own blocks tell the places. Blocks of windows alone
 * come with their places, parents first.
 */
#include "index/dump/chosen.h"

#define SLICE 64u /* blocks; each is a place and the windows of an overlay */

struct slice {
    struct kvi_extra items[SLICE * (1 + KVI_OVERLAY_WINDOWS)];
    uint32_t n;
};

struct dump {
    struct kvi_index *ix;
    const struct kvi_chosen *chosen;
    kvi_extra_fn fn;
    void *arg;
    struct slice slice;
};

static void add(struct dump *dump, struct kvi_extra extra)
{
    dump->slice.items[dump->slice.n++] = extra;
}

static int tell(struct dump *dump)
{
    int rc = 0;

    for (uint32_t i = 0; i < dump->slice.n && !rc; i++)
        rc = dump->fn(dump->arg, &dump->slice.items[i]);
    dump->slice.n = 0;
    return rc;
}

/* Find the next chosen holder with windows from id @at on. Returns its id, or UINT32_MAX. */
static uint32_t next_holder(struct dump *dump, uint32_t at, struct kv_holder *ret)
{
    struct kvi_index *ix = dump->ix;

    for (; at < ix->holders.n_used; at++) {
        const struct kvi_holder *holder =
            kvi_is_chosen(dump->chosen, at) ? kvi_holder_at(ix, at) : NULL;
        const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;

        if (!windows)
            continue;
        *ret = holder->key;
        add(dump, (struct kvi_extra){.kind = KVI_EXTRA_RULE,
                                     .holder = *ret,
                                     .alone = windows->alone,
                                     .drops = windows->drops,
                                     .main_keeps = windows->main_keeps,
                                     .kept_groups = windows->kept_groups});
        for (uint32_t i = 0; i < windows->n; i++)
            add(dump, (struct kvi_extra){
                          .kind = KVI_EXTRA_WINDOW, .holder = *ret, .window = windows->items[i]});
        return at;
    }
    return UINT32_MAX;
}

/* Find the place of a block that the overlay has. Returns false when the place is unknown. */
static bool place_of(const struct kvi_index *ix, const struct kvi_holder *overlay, uint64_t hash,
                     struct kvi_extra *ret)
{
    const struct kvi_parked *parked = kvi_parked_find(ix, overlay, hash);
    struct kvi_place place;
    const struct kvi_chain *above;

    if (parked) {
        ret->parent = parked->parent;
        ret->tokens_hash = parked->local;
        ret->has_parent = true;
        return !kvi_is_placeless(overlay, parked);
    }
    if (!kvi_locate(ix, overlay, hash, &place, NULL))
        return false;
    ret->tokens_hash = *kvi_arena_locals(&ix->arena, kvi_place_pos(place));
    above = place.off ? place.chain : place.chain->parent;
    ret->has_parent = above->parent != NULL;
    if (ret->has_parent)
        ret->parent = kvi_name_of(ix, overlay,
                                  kvi_chain_run(above).pos +
                                      (place.off ? place.off : kvi_chain_run(above).len) - 1);
    return true;
}

static void add_block(struct dump *dump, const struct kvi_windows *windows,
                      const struct kvi_holder *overlay, uint32_t at, uint64_t hash)
{
    uint32_t mask = kvi_tiers_of(dump->ix, overlay, hash),
             first = at % KVI_OVERLAYS * KVI_OVERLAY_WINDOWS;
    struct kvi_extra extra = {
        .kind = KVI_EXTRA_PLACE,
        .holder = overlay->key,
        .hash = hash,
        .tier = (enum kv_tier)(at / KVI_OVERLAYS),
        .window = {.group = windows->items[first].group, .part = windows->items[first].part}};

    if (windows->alone && mask && place_of(dump->ix, overlay, hash, &extra))
        add(dump, extra);
    for (uint32_t i = first; i < KV_MIN(windows->n, first + KVI_OVERLAY_WINDOWS); i++) {
        uint32_t bit = kvi_window_tier(i);

        if (!(mask >> bit & 1))
            continue;
        extra = (struct kvi_extra){
            .kind = KVI_EXTRA_WINDOW_BLOCK,
            .holder = overlay->key,
            .hash = hash,
            .tier = (enum kv_tier)(at / KVI_OVERLAYS),
            .window = {.group = windows->items[i].group, .part = windows->items[i].part},
            .copies = kvi_copies_count(dump->ix, overlay, (enum kv_tier)bit, 0, hash)};
        extra.copies = KV_MAX(extra.copies, 1u);
        add(dump, extra);
    }
}

static int dump_overlay(struct dump *dump, struct kv_holder key, uint32_t at)
{
    struct kvi_index *ix = dump->ix;
    struct kvi_holder *overlay;
    uint64_t *names = NULL;
    size_t n = 0, i = 0;
    int rc = 0;

    kvi_lock(ix);
    overlay = kvi_overlay_at(ix, key, at);
    if (overlay)
        rc = kvi_list_names(ix, overlay, &names, &n);
    pthread_mutex_unlock(&ix->lock);
    while (i < n && !rc) {
        kvi_lock(ix);
        overlay = kvi_overlay_at(ix, key, at);
        for (size_t end = KV_MIN(n, i + SLICE); i < end; i++)
            if (overlay)
                add_block(dump, kvi_windows_of(overlay->main), overlay, at, names[i]);
        pthread_mutex_unlock(&ix->lock);
        rc = tell(dump);
    }
    kvi_lock(ix);
    kvi_mem_free(&ix->mem, names);
    pthread_mutex_unlock(&ix->lock);
    return rc;
}

int kvi_dump_windows(struct kvi_index *ix, const struct kvi_chosen *chosen, kvi_extra_fn fn,
                     void *arg)
{
    struct dump *dump = calloc(1, sizeof(*dump));
    struct kv_holder key;
    int rc = 0;

    if (!dump)
        return -ENOMEM;
    *dump = (struct dump){.ix = ix, .chosen = chosen, .fn = fn, .arg = arg};
    for (uint32_t at = 0; at != UINT32_MAX && !rc; at++) {
        kvi_lock(ix);
        at = next_holder(dump, at, &key);
        pthread_mutex_unlock(&ix->lock);
        if (at == UINT32_MAX)
            break;
        rc = tell(dump);
        for (uint32_t i = 0; i < KV_N_TIERS * KVI_OVERLAYS && !rc; i++)
            rc = dump_overlay(dump, key, i);
    }
    free(dump);
    return rc;
}
