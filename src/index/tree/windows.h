// SPDX-License-Identifier: Apache-2.0
/**
 * Windows: cache groups that a match needs beside a holder's own blocks (kv_index.h).
 *
 * Whether a window has a block is a bit of that block, and bits need places. A holder with windows
 * therefore has overlays: hidden holders in the same tree, one for each tier and three windows. An
 * overlay is stored wherever its main holder is. Tree, names, copies, parking and clears work for
 * overlays without change.
 *
 *     tiers of a block there         meaning
 *     bit 0 (KVI_PLACED)             the main holder has it; of a window alone: its place is known
 *     bit 1, 2, 3                    the first, second, third window has it in the overlay's tier
 *
 * A lookup cuts a main holder's match to what all its windows allow (cut.h). An overlay may have
 * less than its main holder, between two steps or because it lags for lack of memory. The match is
 * then shorter, never longer. Without a main holder each overlay has the places of all.
 *
 * A window's block without a known place is parked under its name below a parent that no block has.
 * Holders without windows pay two words each and one test a lookup.
 *
 * Threads: the index's lock. Lookups read struct kvi_windows, which never changes, inside an epoch.
 */
#ifndef KV_INDEX_TREE_WINDOWS_H
#define KV_INDEX_TREE_WINDOWS_H

#include "index/tree/tree.h"

#define KVI_PLACED 0u
#define KVI_OVERLAY_WINDOWS 3u
#define KVI_OVERLAYS ((KVI_MAX_WINDOWS + KVI_OVERLAY_WINDOWS - 1) / KVI_OVERLAY_WINDOWS)

/** A holder's windows. The writer replaces it rather than change what lookups can see. */
struct kvi_windows {
    struct kv_retired retired;
    uint32_t n;
    bool alone;           /* there is no main group: the windows' own blocks are the match */
    bool drops;           /* the engine gives the last matched block up */
    bool main_keeps;      /* ... not that of the main group */
    uint64_t kept_groups; /* ... nor those of these groups, and of any from 64 on: bit 1 << group */
    struct kvi_window items[KVI_MAX_WINDOWS];
    uint8_t order[KVI_MAX_WINDOWS]; /* numbers of items, ordered by group */
    /* How lookups use them, made by kvi_windows_publish. Windows of one description are a kind. */
    uint8_t n_kinds;
    uint8_t kind[KVI_MAX_WINDOWS];  /* of each window, in the order */
    uint8_t first[KVI_MAX_WINDOWS]; /* of each kind, the place of its first window in the order */
    bool inside;                    /* a match may end inside of a window's block */
    bool lower;                     /* there are overlays of tiers below the device */
    bool simple;                    /* runs and states of whole blocks alone, and nothing drops */
    uint32_t align;                 /* a match is a multiple of this many blocks */
    struct kvi_holder *overlays[KV_N_TIERS][KVI_OVERLAYS]; /* NULL: no blocks there */
};

/** Return the holder's windows; NULL: none. */
static inline struct kvi_windows *kvi_windows_of(const struct kvi_holder *holder)
{
    return atomic_load_explicit(&holder->windows, memory_order_acquire);
}

/** Return the number of overlays of each tier that a holder with these windows may have. */
static inline uint32_t kvi_overlays_of(const struct kvi_windows *windows)
{
    return (windows->n + KVI_OVERLAY_WINDOWS - 1) / KVI_OVERLAY_WINDOWS;
}

/** Windows that make up the window's group. */
static inline uint32_t kvi_window_parts(const struct kvi_window *window)
{
    return window->parts ? window->parts : 1;
}

/** Whether the window's group gives the last matched block up. */
static inline bool kvi_window_drops(const struct kvi_windows *windows,
                                    const struct kvi_window *window)
{
    bool keeps =
        window->group < 64 ? windows->kept_groups >> window->group & 1 : windows->kept_groups != 0;

    return windows->drops && !keeps;
}

/** The tier bit of window @number in its overlay. */
static inline uint32_t kvi_window_tier(uint32_t number)
{
    return 1 + number % KVI_OVERLAY_WINDOWS;
}

/** Return the parent under which a block without a place is parked. */
static inline uint64_t kvi_placeless_parent(uint64_t hash)
{
    return kv_mix(hash ^ UINT64_C(0x77696e646f77));
}

static inline bool kvi_is_placeless(const struct kvi_holder *holder,
                                    const struct kvi_parked *parked)
{
    return holder->main && parked->parent == kvi_placeless_parent(parked->hash);
}

/**
 * Give the blocks that @holder stored the same places in its overlays. Returns the number of
 * lagging overlays.
 */
size_t kvi_overlays_store(struct kvi_index *ix, struct kvi_holder *holder, bool keeps,
                          const uint64_t *parent, const struct kv_block *blocks, size_t n);
/**
 * Remove from the overlays the places of blocks that @holder has forgotten at a limit. Returns true
 * when that made room.
 */
bool kvi_overlays_sweep(struct kvi_index *ix, const struct kvi_holder *holder);
/** Remove the block from the overlays: @holder, which has windows, doesn't have it any more. */
void kvi_overlays_lose(struct kvi_index *ix, struct kvi_holder *holder, uint64_t hash);
/** Free the empty overlays of a holder and its windows. */
void kvi_overlays_drop(struct kvi_index *ix, struct kvi_holder *holder);
/**
 * Tidy up after an overlay lost a window's bit. With windows alone, all overlays forget a block
 * that none of them has, and the places that only led to it.
 */
void kvi_overlay_tidy(struct kvi_index *ix, struct kvi_holder *overlay, uint64_t hash);
/**
 * Find the overlay of window @number in @tier. With @add, make it when it is missing; else *@ret is
 * NULL. Returns 0, -EINVAL, or an error of kvi_store.
 */
int kvi_overlay_find(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint32_t number, bool add, struct kvi_holder **ret);
/**
 * Where the index keeps the blocks of a cache: which holder has them, and in which of its tiers.
 */
struct kvi_spot {
    struct kvi_holder *main;   /* the cache's holder; NULL: unknown */
    struct kvi_holder *holder; /* of a window the overlay; NULL: the cache has no block */
    enum kv_tier tier;
};
/**
 * Find the spot of a cache. With @add, make a window's overlay, and its holder, when they are
 * missing. Returns 0, -EINVAL, or with @add an error of kvi_store.
 */
int kvi_spot_find(struct kvi_index *ix, const struct kvi_cache *cache, bool add,
                  struct kvi_spot *ret);
/**
 * Give an overlay the places of a chain, of a holder without a main group. The index knows a place
 * as long as a window has a block there or below. Returns false when the overlay lags.
 */
bool kvi_overlay_place(struct kvi_index *ix, const struct kvi_spot *spot, enum kv_tier tier,
                       const uint64_t *parent, const struct kv_block *blocks, size_t n);
/** Return true when some overlay of the holder has the block in the tree. */
bool kvi_overlays_locate(const struct kvi_index *ix, const struct kvi_holder *holder,
                         uint64_t hash);
/** Return overlay @at (tier * KVI_OVERLAYS + number) of a holder, or NULL. */
struct kvi_holder *kvi_overlay_at(const struct kvi_index *ix, struct kv_holder key, uint32_t at);
/** Blocks of a holder without a main group, else 0. */
uint64_t kvi_windows_blocks(const struct kvi_holder *holder);

/** Blocks of a holder without a main group whose place isn't known, else 0. */
uint64_t kvi_windows_placeless(const struct kvi_holder *holder);

/** Copy the holder's windows, to change and publish them. NULL: out of memory. */
struct kvi_windows *kvi_windows_copy(struct kvi_index *ix, const struct kvi_holder *holder);
void kvi_windows_publish(struct kvi_index *ix, struct kvi_holder *holder,
                         struct kvi_windows *windows);
/**
 * Remove places without blocks of the holder: from before its main group was known, or of blocks
 * forgotten at a limit.
 */
void kvi_overlay_forget_places(struct kvi_index *ix, const struct kvi_holder *holder,
                               struct kvi_holder *overlay);

/** Run the statement for each overlay of the holder. */
#define KVI_EACH_OVERLAY(windows, overlay)                                                        \
    for (uint32_t i_overlay = 0; (windows) && i_overlay < KV_N_TIERS * KVI_OVERLAYS; i_overlay++) \
        if (((overlay) =                                                                          \
                 (windows)->overlays[i_overlay / KVI_OVERLAYS][i_overlay % KVI_OVERLAYS]) != NULL)

#endif
