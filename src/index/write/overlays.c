// SPDX-License-Identifier: Apache-2.0
/*
 * The overlays of the tree that hold the blocks of windows: see windows.h. An overlay is a hidden
 * holder that has a place wherever its main holder has a block:
 *
 *     main holder    a ── b ── c          windows' bits in the overlay
 *     its overlay       a ── b ── c          a: -    b: W1    c: W1 W2
 *
 * Invariant: an overlay may have fewer places than its main holder, and then a match is shorter. It
 * may have more, and then only memory is lost: lookups walk the main holder's blocks. Later stores
 * repair both:
 *
 *     fewer    the overlay lags; a later store copies all places anew (lag, copy_places)
 *     more     the main holder forgot blocks at a limit; a sweep removes their places
 */
#include "index/tree/windows.h"

#include "index/tree/kids.h"
#include "index/write/store.h"

#define MAX_LAG_WAIT (1u << 12) /* stores */
#define MIN_SWEEP 256u          /* blocks */

/* Twice the main holder's limit: places of forgotten blocks may fill half until the next sweep. */
static uint64_t overlay_limit(const struct kvi_holder *holder)
{
    return holder->max_blocks > UINT64_MAX / 2 ? UINT64_MAX : 2 * holder->max_blocks;
}

void kvi_overlays_lose(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash)
{
    struct kvi_holder *overlay;

    /* The queue of dirty chains belongs to one holder at a time: see kvi_drop_below_queued. */
    kvi_settle(ix);
    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        (void)kvi_take_one(ix, overlay, KVI_PLACED, 0, hash, 0);
        kvi_settle(ix);
    }
}

static void drop_overlay(struct kvi_index *ix, struct kvi_holder *overlay)
{
    kvi_dir_remove(&ix->holders, overlay->id);
    kvi_retire_memory(ix, &overlay->retired, sizeof(*overlay));
    ix->n_overlays--;
}

void kvi_overlays_drop(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder *overlay;

    if (!windows)
        return;
    atomic_store_explicit(&holder->windows, NULL, memory_order_release);
    KVI_EACH_OVERLAY(windows, overlay)
    drop_overlay(ix, overlay);
    kvi_retire_memory(ix, &windows->retired, sizeof(*windows));
}

/* The chains of a holder, parents first. */
struct chains {
    struct kvi_index *ix;
    uint32_t holder;
    const struct kvi_chain **items;
    size_t n, capacity;
    bool failed;
};

static bool list_chain(void *arg, struct kvi_chain *chain)
{
    struct chains *chains = arg;

    if (!kvi_who_find(chain, chains->holder))
        return true;
    if (kvi_mem_grow(&chains->ix->mem, (void **)(void *)&chains->items, &chains->capacity,
                     chains->n + 1, sizeof(chains->items[0])))
        chains->failed = true;
    else
        chains->items[chains->n++] = chain;
    return !chains->failed;
}

/*
 * Store the holder's blocks of one chain in the overlay, under the holder's names. The overlay has
 * the block above already: chains come parents first.
 */
static int copy_chain(struct kvi_index *ix, const struct kvi_holder *holder,
                      struct kvi_holder *overlay, const struct kvi_chain *chain)
{
    uint32_t len = kvi_entry_len(kvi_who_get(kvi_who_find(chain, holder->id)));
    uint32_t pos = kvi_chain_run(chain).pos;
    const uint64_t *locals = kvi_arena_locals(&ix->arena, pos);
    struct kv_block blocks[KVI_CHAIN_MAX];
    uint64_t parent = 0;

    if (chain->parent->parent) {
        struct kvi_run above = kvi_chain_run(chain->parent);

        parent = kvi_name_of(ix, holder, above.pos + above.len - 1);
    }
    for (uint32_t i = 0; i < len; i++)
        blocks[i] = (struct kv_block){kvi_name_of(ix, holder, pos + i), locals[i]};
    return kvi_store_places(ix, overlay, false, chain->parent->parent ? &parent : NULL, blocks,
                            len);
}

/* Copy the places of a holder's blocks into its new overlay. Returns 0 or an error of kvi_store. */
static int copy_places(struct kvi_index *ix, const struct kvi_holder *holder,
                       struct kvi_holder *overlay)
{
    struct chains chains = {.ix = ix, .holder = holder->id};
    struct kvi_place place;
    uint32_t at = holder->oldest;
    int rc = 0;

    if (holder->n_roots)
        kvi_kids_each(&ix->root, list_chain, &chains);
    for (size_t i = 0; i < chains.n && !chains.failed && !rc; i++) {
        rc = copy_chain(ix, holder, overlay, chains.items[i]);
        kvi_kids_each(chains.items[i], list_chain, &chains);
    }
    kvi_mem_free(&ix->mem, (void *)chains.items);
    for (size_t i = 0; i < holder->n_parked; i++) {
        struct kvi_parked parked = ix->parking.items[at];

        const struct kv_block block = {parked.hash, parked.local};

        if (!kvi_is_placeless(holder, &parked) &&
            !kvi_locate(ix, overlay, parked.hash, &place, NULL))
            (void)kvi_store_places(ix, overlay, false, &parked.parent, &block, 1);
        at = ix->parking.items[at].newer;
    }
    return chains.failed ? -ENOMEM : rc;
}

static uint64_t overlay_size(const struct kvi_holder *overlay)
{
    return atomic_load_explicit(&overlay->blocks, memory_order_relaxed);
}

/*
 * Return the holder or overlay that knows the most places. With windows alone, the main holder has
 * no block; the overlays know the places, and one that lagged knows fewer.
 */
static const struct kvi_holder *knows_places(const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *overlay, *best = NULL;

    KVI_EACH_OVERLAY(windows && windows->alone ? windows : NULL, overlay)
    {
        if (!best || overlay_size(overlay) > overlay_size(best))
            best = overlay;
    }
    return best ? best : holder;
}

void kvi_overlay_forget_places(struct kvi_index *ix, const struct kvi_holder *holder,
                               struct kvi_holder *overlay)
{
    uint64_t *names = NULL;
    size_t n;

    (void)kvi_list_names(ix, overlay, &names,
                         &n); /* places that it lacks stay until the next sweep */
    kvi_settle(ix);           /* the queue of dirty chains belongs to one holder at a time */
    while (n--)
        if (!kvi_tiers_of(ix, holder, names[n]))
            (void)kvi_take_one(ix, overlay, KVI_PLACED, 0, names[n], 0);
    kvi_mem_free(&ix->mem, names);
    kvi_settle(ix);
    overlay->swept_to = overlay_size(overlay) + overlay->n_parked;
}

/*
 * Return true when the overlay has doubled since the last sweep: such places may be the cause. A
 * sweep reads the whole overlay, so its cost is spread over as many stores as the overlay had
 * blocks.
 */
static bool needs_sweep(const struct kvi_holder *overlay)
{
    return overlay_size(overlay) + overlay->n_parked > 2 * overlay->swept_to + MIN_SWEEP;
}

bool kvi_overlays_sweep(struct kvi_index *ix, const struct kvi_holder *holder)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder *overlay;
    bool freed = false;

    KVI_EACH_OVERLAY(windows && !windows->alone ? windows : NULL, overlay)
    {
        uint64_t before = overlay_size(overlay);

        if (before + overlay->n_parked <= overlay->swept_to)
            continue;
        kvi_overlay_forget_places(ix, holder, overlay);
        freed |= overlay_size(overlay) < before;
    }
    return freed;
}

/*
 * Note that the overlay lacks blocks of its holder. A later store copies all of them: a list of
 * those missing would need the memory that lacks. The number of stores until then doubles with each
 * failure, since each attempt reads all of the holder.
 */
static void lag(struct kvi_holder *overlay)
{
    overlay->lag_wait = overlay->lagging ? KV_MIN(2 * overlay->lag_wait + 1, MAX_LAG_WAIT) : 0;
    overlay->lag_left = overlay->lag_wait;
    overlay->lagging = true;
}

/* Return true when a lagging overlay that may have been full has room again. */
static bool has_shrunk(const struct kvi_holder *overlay)
{
    return overlay->swept_to && 2 * (overlay_size(overlay) + overlay->n_parked) < overlay->swept_to;
}

/*
 * Store the holder's blocks in its overlay. A lagging overlay first copies all the others when its
 * time has come.
 */
static void store_in_overlay(struct kvi_index *ix, struct kvi_holder *holder,
                             struct kvi_holder *overlay, bool keeps, const uint64_t *parent,
                             const struct kv_block *blocks, size_t n)
{
    int rc;

    overlay->max_blocks = overlay_limit(holder);
    if (overlay->lagging && overlay->lag_left && !has_shrunk(overlay)) {
        overlay->lag_left--;
        return;
    }
    if (!kvi_windows_of(holder)->alone && (overlay->lagging || needs_sweep(overlay)))
        kvi_overlay_forget_places(ix, holder, overlay);
    if (overlay->lagging)
        rc = copy_places(ix, knows_places(holder), overlay);
    else
        rc = kvi_store_places(ix, overlay, keeps, parent, blocks, n);
    if (rc == -ENOMEM || rc == -ENOSPC) /* other errors: the main holder reports them */
        lag(overlay);
    else
        overlay->lagging = false;
}

size_t kvi_overlays_store(struct kvi_index *ix, struct kvi_holder *holder, bool keeps,
                          const uint64_t *parent, const struct kv_block *blocks, size_t n)
{
    struct kvi_holder *overlay;
    size_t lagging = 0;

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        store_in_overlay(ix, holder, overlay, keeps, parent, blocks, n);
        lagging += overlay->lagging;
    }
    return lagging;
}

/* Make an overlay and fill it. Lookups see it when the caller publishes windows that have it. */
static int add_overlay(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_holder **slot)
{
    struct kvi_holder *overlay = kvi_mem_alloc(&ix->mem, sizeof(*overlay));
    int rc;

    if (!overlay)
        return -ENOMEM;
    overlay->key = holder->key;
    overlay->main = holder;
    atomic_init(&overlay->windowed, true);
    overlay->max_blocks = overlay_limit(holder);
    rc = kvi_dir_add(&ix->holders, overlay, KVI_MAX_HOLDERS, &overlay->id);
    if (rc) {
        kvi_mem_free(&ix->mem, overlay);
        return rc;
    }
    ix->n_overlays++;
    *slot = overlay;
    if (copy_places(ix, knows_places(holder), overlay))
        lag(overlay);
    return 0;
}

struct kvi_holder *kvi_overlay_at(const struct kvi_index *ix, struct kv_holder key, uint32_t at)
{
    const struct kvi_holder *holder = kvi_holder_find(ix, key);
    const struct kvi_windows *windows = holder ? kvi_windows_of(holder) : NULL;

    return windows ? windows->overlays[at / KVI_OVERLAYS][at % KVI_OVERLAYS] : NULL;
}

int kvi_overlay_find(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint32_t number, bool add, struct kvi_holder **ret)
{
    struct kvi_windows *windows = kvi_windows_of(holder);
    struct kvi_holder **slot;
    int rc;

    if (!windows || number >= windows->n)
        return -EINVAL;
    *ret = windows->overlays[tier][number / KVI_OVERLAY_WINDOWS];
    if (*ret || !add)
        return 0;
    windows = kvi_windows_copy(ix, holder);
    if (!windows)
        return -ENOMEM;
    slot = &windows->overlays[tier][number / KVI_OVERLAY_WINDOWS];
    rc = add_overlay(ix, holder, slot);
    if (rc) {
        kvi_mem_free(&ix->mem, windows);
        return rc;
    }
    kvi_windows_publish(ix, holder, windows);
    *ret = *slot;
    return 0;
}
