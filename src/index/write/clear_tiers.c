// SPDX-License-Identifier: Apache-2.0
/*
 * Clear some tiers of a holder for one source: an engine that resets its own pool keeps its other
 * tiers.
 *
 * First list the holder's names breadth first from the root; then remove them from the end. So each
 * block is removed before the one above it, and blocks that stay below are parked once. The lock is
 * released between slices, while the holder's own writers wait (kvi_holder_await).
 *
 *     tree     a ── b ── c ── d        a, c in device and host; b, d in device alone
 *     list     a b c d                 cleared from its end: d, c, b, a
 *     d goes, c keeps host, b goes and parks c below it, a keeps host
 *
 * The list stays true without the lock: only the holder's own writers change its names, and they
 * wait. A holder with nothing else than what the call clears goes the cheaper way of kvi_clear.
 */
#include "index/tree/kids.h"
#include "index/tree/windows.h"
#include "index/write/store.h"

#define SLICE 1024u /* names per slice */

struct names {
    struct kvi_index *ix;
    struct kvi_holder *holder;
    uint64_t *items;
    size_t n, capacity;
    size_t n_chains; /* entries in scratch->hanging */
    bool failed;
};

static void list_name(struct names *names, uint64_t name)
{
    if (kvi_mem_grow(&names->ix->mem, (void **)&names->items, &names->capacity, names->n + 1,
                     sizeof(names->items[0])))
        names->failed = true;
    else
        names->items[names->n++] = name;
}

static bool list_chain(void *arg, struct kvi_chain *chain)
{
    struct names *names = arg;
    struct kvi_scratch *scratch = names->ix->scratch;

    if (!kvi_who_find(chain, names->holder->id))
        return true;
    if (kvi_mem_grow(&names->ix->mem, (void **)&scratch->hanging, &scratch->hanging_capacity,
                     names->n_chains + 1, sizeof(scratch->hanging[0]))) {
        names->failed = true;
        return false;
    }
    scratch->hanging[names->n_chains++] = (struct kvi_hanging){chain, 0};
    return true;
}

/*
 * List all names of the holder: parents first, parked blocks last. Breadth first, with the list of
 * chains as its own queue, so that nothing recurses along the depth of the tree.
 */
static void list_names(struct names *names)
{
    struct kvi_index *ix = names->ix;
    uint32_t at = names->holder->oldest;

    kvi_kids_each(&ix->root, list_chain, names);
    for (size_t i = 0; i < names->n_chains && !names->failed; i++) {
        const struct kvi_chain *chain = ix->scratch->hanging[i].chain;
        uint64_t entry = kvi_who_get(kvi_who_find(chain, names->holder->id));
        uint32_t pos = kvi_chain_run(chain).pos;

        for (uint32_t k = 0; k < kvi_entry_len(entry); k++)
            list_name(names, kvi_name_of(ix, names->holder, pos + k));
        if (kvi_entry_kids(ix, entry))
            kvi_kids_each(chain, list_chain, names);
    }
    for (size_t i = 0; i < names->holder->n_parked && !names->failed; i++) {
        list_name(names, ix->parking.items[at].hash);
        at = ix->parking.items[at].newer;
    }
}

int kvi_list_names(struct kvi_index *ix, struct kvi_holder *holder, uint64_t **ret, size_t *ret_n)
{
    struct names names = {.ix = ix, .holder = holder};

    list_names(&names);
    *ret = names.items;
    *ret_n = names.n;
    return names.failed ? -ENOMEM : 0;
}

/*
 * Return true when the holder's windows have blocks only of @source in those tiers, one copy each.
 */
static bool is_all_of_overlays(const struct kvi_holder *holder, uint32_t tiers, uint32_t source)
{
    const struct kvi_windows *windows = kvi_windows_of(holder);
    const struct kvi_holder *overlay;

    KVI_EACH_OVERLAY(windows, overlay)
    {
        if (overlay->n_copies)
            return false;
        for (uint32_t t = 1; t < KV_N_TIERS; t++)
            if (overlay->tier[t].blocks &&
                (!(tiers >> i_overlay / KVI_OVERLAYS & 1) || overlay->tier[t].implied != source))
                return false;
        if (overlay->n_parked && !(tiers >> i_overlay / KVI_OVERLAYS & 1))
            return false;
    }
    return true;
}

/* Return true when the holder has only blocks of @source in those tiers, one copy each. */
static bool is_all(const struct kvi_index *ix, const struct kvi_holder *holder, uint32_t tiers,
                   uint32_t source)
{
    uint32_t at = holder->oldest;

    if (holder->n_copies || !is_all_of_overlays(holder, tiers, source))
        return false;
    for (uint32_t t = 0; t < KV_N_TIERS; t++)
        if (tiers >> t & 1 ? holder->tier[t].implied != source : holder->tier[t].blocks > 0)
            return false;
    for (size_t i = 0; i < holder->n_parked; i++) {
        if (ix->parking.items[at].mask & ~tiers)
            return false;
        at = ix->parking.items[at].newer;
    }
    return true;
}

/* Remove the listed names' copies. Returns 0 or -ENOMEM. */
static int take_all(struct names *names, uint32_t tiers, uint32_t source)
{
    struct kvi_index *ix = names->ix;
    size_t n = 0;

    for (; names->n; names->n--) {
        uint64_t name = names->items[names->n - 1];

        for (uint32_t t = 0; t < KV_N_TIERS; t++)
            if (tiers >> t & 1 &&
                kvi_take_one(ix, names->holder, (enum kv_tier)t, source, name, 0) < 0)
                return -ENOMEM;
        if (names->holder->main)
            kvi_overlay_tidy(ix, names->holder, name);
        if (++n % SLICE == 0) {
            kvi_unlock(ix);
            kvi_lock_in_turn(ix);
        }
    }
    return 0;
}

/*
 * Remove the copies of @source in these tiers from the holder's windows. Returns 0 or -ENOMEM. An
 * overlay belongs to one tier; its own tier bits are windows (windows.h), and all but KVI_PLACED go.
 */
static int take_overlays(struct kvi_index *ix, const struct kvi_holder *holder, uint32_t tiers,
                         uint32_t source)
{
    const uint32_t windows = ((1u << KV_N_TIERS) - 1) & ~(1u << KVI_PLACED);
    struct kvi_holder *overlay;
    int rc = 0;

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        struct names names = {.ix = ix, .holder = overlay};

        if (rc || !(tiers >> i_overlay / KVI_OVERLAYS & 1))
            continue;
        kvi_settle(ix); /* the queue holds chains of one holder at a time */
        list_names(&names);
        rc = names.failed ? -ENOMEM : take_all(&names, windows, source);
        kvi_mem_free(&ix->mem, names.items);
    }
    return rc;
}

/* Forget losses and doubts of a holder without blocks: an empty cache has lost nothing. */
static void be_sound(struct kvi_holder *holder)
{
    struct kvi_holder *overlay;

    holder->n_lost = 0;
    holder->lost_more = false;
    kvi_copies_forget_doubt(holder);
    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    kvi_copies_forget_doubt(overlay);
}

/* Return true when neither the holder nor an overlay has any block left. */
static bool is_empty(const struct kvi_holder *holder)
{
    const struct kvi_holder *overlay;
    uint64_t n = holder->n_parked + atomic_load_explicit(&holder->blocks, memory_order_relaxed);

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        n += overlay->n_parked + atomic_load_explicit(&overlay->blocks, memory_order_relaxed);
    }
    return n == 0;
}

int kvi_clear_tiers(struct kvi_index *index, struct kv_holder holder, uint32_t tiers,
                    uint32_t source)
{
    struct names names = {.ix = index};
    int rc = 0;
    bool all;

    if (source > KVI_MAX_SOURCE)
        return -EINVAL;
    tiers &= (1u << KV_N_TIERS) - 1;
    kvi_lock(index);
    names.holder = kvi_holder_await(index, holder);
    if (names.holder) {
        names.holder->clearing = &names;
        all = is_all(index, names.holder, tiers, source);
        if (!all)
            list_names(&names);
        rc = names.failed ? -ENOMEM : take_all(&names, tiers, source);
        kvi_mem_free(&index->mem, names.items);
        if (!all && !rc)
            rc = take_overlays(index, names.holder, tiers, source);
        /*
         * All goes by kvi_clear's way; also when memory is short, rather than keep blocks that may
         * be gone. Still under the mark: a store that came before it would be lost in any tier.
         */
        if (all || rc) {
            kvi_settle(index);
            kvi_clear_marked(index, names.holder);
        }
        if (is_empty(names.holder))
            be_sound(names.holder);
        names.holder->clearing = NULL;
        pthread_cond_broadcast(&index->cleared);
    }
    kvi_unlock(index);
    return 0;
}
