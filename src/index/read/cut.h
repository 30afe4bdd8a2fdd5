// SPDX-License-Identifier: Apache-2.0
/**
 * Cut matches to what the holder's windows allow. For lookups: reads the notes of a walk, inside
 * the walk's epoch.
 */
#ifndef KV_INDEX_READ_CUT_H
#define KV_INDEX_READ_CUT_H

#include "index/tree/windows.h"

#define KVI_NO_SHARE SIZE_MAX

/** The share of an overlay, or of a main holder, in one chain of the path. */
struct kvi_share {
    const struct kvi_tmap *tmap; /* NULL: all blocks have the tiers of mask */
    uint32_t holder, mask;
    uint32_t depth, len; /* the share is blocks depth..depth + len of the prompt */
    size_t above;        /* the same holder's share of the chain above, or KVI_NO_SHARE */
};

/**
 * The windows of one main holder along the path. Of last and at the first kvi_overlays_of count, and of tiers
 * below the device only where something may be in them, or the holder has windows alone.
 */
struct kvi_view {
    const struct kvi_windows *windows;
    const struct kvi_share *shares;
    size_t last[KV_N_TIERS][KVI_OVERLAYS]; /* each overlay's deepest share, or KVI_NO_SHARE */
    size_t at[KV_N_TIERS][KVI_OVERLAYS];   /* share that answered the last question */
    size_t main;                           /* the main holder's deepest share, or KVI_NO_SHARE */
    uint32_t n;                            /* blocks of the prompt */
    bool below; /* on the path, something of the holder's is in a lower tier */
};

/**
 * Shorten @reach, the blocks that the main holder has in each tier. For a holder of windows alone,
 * compute it.
 */
void kvi_cut_reach(struct kvi_view *view, uint32_t reach[KV_N_TIERS]);

/**
 * Append what each cache group of @holder allows by itself. @reach is as kvi_cut_reach gets it. Returns
 * 0 or -ENOMEM.
 */
int kvi_add_groups(struct kvi_group_matches *groups, const struct kvi_view *view,
                   struct kv_holder holder, const uint32_t reach[KV_N_TIERS]);

#endif
