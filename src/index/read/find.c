// SPDX-License-Identifier: Apache-2.0
/*
 * Look a prompt up beside a writer that never waits for lookups. tree.h has the rules that make the
 * result right: note the version of every chain on the path before reading the chain, and compare
 * again at the end.
 */
#include "index/read/cut.h"
#include "index/tree/kids.h"

#define PATH_SHORT 32 /* chains of a path that need no allocation */

struct step {
    const struct kvi_chain *chain;
    uint32_t version;
};

/* Index of items by holder, in kvi_matches.scratch. */
struct slots {
    uint64_t call;
    struct step *path; /* used when PATH_SHORT is too small */
    size_t path_capacity;
    struct kvi_share *shares; /* shares of the overlays on the path */
    size_t n_shares, shares_capacity;
    struct windowed {
        const struct kvi_windows *windows;
        size_t item;
        size_t share; /* its deepest share of blocks that may be in lower tiers, or KVI_NO_SHARE */
    } * windowed;     /* items whose holders have windows */
    size_t n_windowed, windowed_capacity;
    size_t n;
    struct slot {
        uint64_t call; /* call that filled the slot; any other call makes it stale */
        /* Of a holder with windows: WINDOWED and its place in windowed. Of an overlay: its deepest share. */
        size_t item;
    } slot[];
};

#define WINDOWED (SIZE_MAX / 2 + 1)

struct find {
    const struct kvi_index *ix;
    const uint64_t *hashes;
    size_t n;
    struct kvi_matches *matches;
    struct slots *slots;
    struct step *path;
    size_t path_capacity, path_len;
    struct kvi_match *met;            /* set by meet_windowed */
    struct kvi_group_matches *groups; /* NULL: not wanted */
    size_t groups_before;             /* items of groups before the lookup */
    struct step path_short[PATH_SHORT];
};

#define DISTURBED 1 /* the walk must begin again */

void kvi_matches_fini(struct kvi_matches *matches)
{
    struct slots *slots = matches->scratch;

    if (slots) {
        free(slots->path);
        free(slots->shares);
        free(slots->windowed);
    }
    free(matches->scratch);
    free(matches->items);
    *matches = (struct kvi_matches){0};
}

static int grow_slots(struct find *find, size_t n)
{
    struct kvi_matches *matches = find->matches;
    struct slots *old = matches->scratch, *slots;
    size_t bytes;

    n = KV_MAX(n + n / 2, (size_t)64);
    bytes = sizeof(*slots) + n * sizeof(slots->slot[0]);
    slots = realloc(old, bytes);
    if (!slots)
        return -ENOMEM;
    if (!old)
        *slots = (struct slots){0};
    memset(&slots->slot[slots->n], 0, (n - slots->n) * sizeof(slots->slot[0]));
    slots->n = n;
    matches->scratch = slots;
    matches->scratch_bytes = bytes;
    find->slots = slots;
    return 0;
}

static int grow_path(struct find *find)
{
    struct slots *slots = find->slots;
    size_t capacity = KV_MAX(find->path_capacity, (size_t)PATH_SHORT) * 2;
    struct step *path = realloc(slots->path, capacity * sizeof(*path));

    if (!path)
        return -ENOMEM;
    if (!slots->path)
        memcpy(path, find->path_short, sizeof(find->path_short));
    slots->path = find->path = path;
    slots->path_capacity = find->path_capacity = capacity;
    return 0;
}

/*
 * Return @array with room for another item after its @n. NULL: out of memory; @array stays valid.
 */
static void *with_room(void *array, size_t *capacity, size_t n, size_t bytes)
{
    void *grown;

    if (n < *capacity)
        return array;
    grown = realloc(array, KV_MAX(2 * n, (size_t)16) * bytes);
    if (grown)
        *capacity = KV_MAX(2 * n, (size_t)16);
    return grown;
}

/* Append an empty item for @holder. Returns 0 or -ENOMEM. */
static inline int add_item(struct find *find, const struct kvi_holder *holder, uint32_t id,
                           struct kvi_match **ret)
{
    struct kvi_matches *matches = find->matches;
    struct kvi_match *item;

    if (matches->n == matches->capacity) {
        size_t capacity = KV_MAX(matches->capacity * 2, (size_t)16);
        struct kvi_match *items = realloc(matches->items, capacity * sizeof(*items));

        if (!items)
            return -ENOMEM;
        matches->items = items;
        matches->capacity = capacity;
    }
    find->slots->slot[id].call = find->slots->call;
    find->slots->slot[id].item = matches->n;
    item = &matches->items[matches->n++];
    *item =
        (struct kvi_match){.holder = holder->key,
                           .blocks = atomic_load_explicit(&holder->blocks, memory_order_relaxed)};
    *ret = item;
    return 0;
}

/* Return the deepest share of an overlay so far in this walk, or KVI_NO_SHARE. */
static size_t last_share(const struct slots *slots, uint32_t overlay)
{
    size_t at = overlay < slots->n ? slots->slot[overlay].item : KVI_NO_SHARE;

    return at < slots->n_shares && slots->shares[at].holder == overlay ? at : KVI_NO_SHARE;
}

/* Note a holder with windows for cut_matches. */
static int add_windowed(struct find *find, const struct kvi_holder *holder,
                        const struct kvi_windows *windows, struct kvi_match **ret)
{
    struct slots *slots = find->slots;
    struct windowed *items =
        with_room(slots->windowed, &slots->windowed_capacity, slots->n_windowed, sizeof(*items));
    int rc;

    if (!items)
        return -ENOMEM;
    slots->windowed = items;
    slots->windowed[slots->n_windowed] = (struct windowed){windows, find->matches->n, KVI_NO_SHARE};
    rc = add_item(find, holder, holder->id, ret);
    if (!rc)
        slots->slot[holder->id].item = WINDOWED | slots->n_windowed++;
    return rc;
}

/* Append a share of an overlay, or of a holder with windows. Returns its number, or KVI_NO_SHARE. */
static size_t add_share(struct slots *slots, const struct kvi_share *share)
{
    struct kvi_share *shares =
        with_room(slots->shares, &slots->shares_capacity, slots->n_shares, sizeof(*shares));

    if (!shares)
        return KVI_NO_SHARE;
    slots->shares = shares;
    shares[slots->n_shares] = *share;
    return slots->n_shares++;
}

/*
 * Note for cut_matches in which lower tiers a holder with windows has the @len blocks from @depth on.
 * Returns 0, -ENOMEM or DISTURBED.
 */
__attribute__((noinline)) static int take_main(struct find *find, uint64_t entry, uint32_t depth,
                                               uint32_t len)
{
    uint32_t id = kvi_entry_holder(entry);
    struct windowed *of = &find->slots->windowed[find->slots->slot[id].item & ~WINDOWED];
    const struct kvi_tmap *tmap = NULL;
    size_t share;

    if (kvi_entry_mask(entry) == 1u << KV_TIER_DEVICE) /* they don't count in lower tiers */
        return 0;
    if (!kvi_entry_mask(entry)) {
        tmap = kvi_tmap_at(find->ix, entry);
        if (!tmap || tmap->capacity < len)
            return DISTURBED;
    }
    share = add_share(find->slots, &(struct kvi_share){.tmap = tmap,
                                                       .holder = id,
                                                       .mask = kvi_entry_mask(entry),
                                                       .depth = depth,
                                                       .len = len,
                                                       .above = of->share});
    if (share == KVI_NO_SHARE)
        return -ENOMEM;
    of->share = share;
    return 0;
}

/* Note for cut_matches that an overlay has the first blocks of the @len from @depth on. */
static int take_overlay(struct find *find, const struct kvi_holder *overlay, uint64_t entry,
                        uint32_t depth, uint32_t len)
{
    const struct kvi_windows *windows = kvi_windows_of(overlay->main);
    const struct kvi_tmap *tmap = NULL;
    struct slots *slots = find->slots;
    struct kvi_match *item;
    size_t share;
    int rc = 0;

    if (!windows || atomic_load_explicit(&overlay->hidden, memory_order_acquire))
        return 0;
    if (!kvi_entry_mask(entry)) {
        tmap = kvi_tmap_at(find->ix, entry);
        if (!tmap || tmap->capacity < len)
            return DISTURBED;
    }
    share = add_share(slots, &(struct kvi_share){.tmap = tmap,
                                                 .holder = overlay->id,
                                                 .mask = kvi_entry_mask(entry),
                                                 .depth = depth,
                                                 .len = len,
                                                 .above = last_share(slots, overlay->id)});
    if (share == KVI_NO_SHARE)
        return -ENOMEM;
    slots->slot[overlay->id].item = share;
    if (depth || !windows->alone)
        return 0;
    if (overlay->main->id >= slots->n)
        rc = grow_slots(find, overlay->main->id + 1);
    slots = find->slots;
    if (rc || slots->slot[overlay->main->id].call == slots->call)
        return rc;
    return add_windowed(find, overlay->main, windows, &item);
}

/*
 * Handle an entry of an overlay, or of a holder with windows. find->met is its item, or NULL. Kept out
 * of the common path.
 */
__attribute__((noinline)) static int meet_windowed(struct find *find, uint64_t entry,
                                                   uint32_t depth, uint32_t len)
{
    const struct kvi_holder *holder = kvi_holder_at(find->ix, kvi_entry_holder(entry));
    const struct kvi_windows *windows;
    int rc;

    find->met = NULL;
    if (!holder)
        return DISTURBED;
    if (holder->main)
        return take_overlay(find, holder, entry, depth, len);
    windows = kvi_windows_of(holder);
    if (depth)
        return 0;
    if (!windows)
        return add_item(find, holder, holder->id, &find->met);
    rc = add_windowed(find, holder, windows, &find->met);
    return rc ? rc : take_main(find, entry, depth, len);
}

/*
 * Handle an entry of a holder without an item. Returns 0, -ENOMEM or DISTURBED. *@ret is the item;
 * NULL while the holder is being cleared, when lookups don't see it. The acquire pairs with hide()
 * in clear.c.
 */
static inline int meet(struct find *find, uint64_t entry, uint32_t depth, uint32_t len,
                       struct kvi_match **ret)
{
    uint32_t id = kvi_entry_holder(entry);
    const struct kvi_holder *holder;
    int rc;

    *ret = NULL;
    /*
     * The holder is in this chain but not in those above: a store isn't finished, or a removal has
     * begun.
     */
    if (depth && !find->slots->n_shares && !find->slots->n_windowed)
        return 0;
    holder = kvi_holder_at(find->ix, id);
    if (!holder)
        return DISTURBED;
    if (atomic_load_explicit(&holder->hidden, memory_order_acquire))
        return 0;
    if (depth || KV_UNLIKELY(atomic_load_explicit(&holder->windowed, memory_order_acquire))) {
        rc = meet_windowed(find, entry, depth, len);
        *ret = find->met;
        return rc;
    }
    return add_item(find, holder, id, ret);
}

/* Find the item of an entry's holder, as meet does: most holders have one already. */
static inline int item_of(struct find *find, uint64_t entry, uint32_t depth, uint32_t len,
                          struct kvi_match **ret)
{
    const struct slots *slots = find->slots;
    uint32_t id = kvi_entry_holder(entry);
    size_t at = slots->slot[id].item;
    int rc = 0;

    if (slots->slot[id].call != slots->call)
        return meet(find, entry, depth, len, ret);
    if (KV_UNLIKELY(at & WINDOWED)) {
        rc = take_main(find, entry, depth, len);
        at = slots->windowed[at & ~WINDOWED].item;
    }
    *ret = &find->matches->items[at];
    return rc;
}

/* Return where an entry's blocks from @from on end that a tier of @wanted has. */
static inline uint32_t extend(const struct kvi_tmap *tmap, uint32_t mask, uint32_t from,
                              uint32_t len, uint32_t wanted)
{
    if (!tmap)
        return mask & wanted ? len : from;
    while (from < len && kvi_tmap_get(tmap, from) & wanted)
        from++;
    return from;
}

/*
 * Lengthen each tier's match by an entry's @len blocks from @depth on. Engines look in lower tiers
 * for what follows the device's match, and there alone: behind it, a block that only the device has
 * ends the match.
 */
static inline void lengthen(uint32_t reach[KV_N_TIERS], const struct kvi_tmap *tmap, uint32_t mask,
                            uint32_t depth, uint32_t len)
{
    uint32_t device = 0;

    if (reach[KV_TIER_DEVICE] == depth) {
        device = extend(tmap, mask, 0, len, 1u << KV_TIER_DEVICE);
        reach[KV_TIER_DEVICE] += device;
    }
    for (int t = KV_TIER_DEVICE + 1; t < KV_N_TIERS; t++)
        if (reach[t] == depth)
            reach[t] += extend(tmap, mask, device, len, (2u << t) - (2u << KV_TIER_DEVICE));
}

/* Use an entry: the holder has the first blocks of the @len from @depth on. */
static int take_entry(struct find *find, uint64_t entry, uint32_t depth, uint32_t len)
{
    uint32_t id = kvi_entry_holder(entry), mask = kvi_entry_mask(entry);
    const struct kvi_tmap *tmap = NULL;
    struct kvi_match *item;
    int rc = 0;

    len = KV_MIN(len, kvi_entry_len(entry));
    if (KV_UNLIKELY(id >= find->slots->n))
        rc = grow_slots(find, id + 1);
    if (rc)
        return rc;
    rc = item_of(find, entry, depth, len, &item);
    if (rc || !item)
        return rc;
    if (!mask) {
        tmap = kvi_tmap_at(find->ix, entry);
        if (!tmap || tmap->capacity < len)
            return DISTURBED;
    }
    lengthen(item->reach, tmap, mask, depth, len);
    return 0;
}

static int take_entries(struct find *find, const struct kvi_chain *chain, uint32_t depth,
                        uint32_t len)
{
    uint64_t first = kvi_who_get(&chain->who[0]), second;
    const struct kvi_list *list;
    uint32_t n;
    int rc = 0;

    if (first & KVI_ENTRY_VALID) {
        second = kvi_who_get(&chain->who[1]);
        rc = take_entry(find, first, depth, len);
        return rc || !second ? rc : take_entry(find, second, depth, len);
    }
    list = (const struct kvi_list *)(uintptr_t)first;
    n = list ? atomic_load_explicit(&list->n, memory_order_acquire) : 0;
    for (uint32_t i = 0; i < n && !rc; i++)
        rc = take_entry(find, kvi_who_get(&list->entry[i]), depth, len);
    return rc;
}

/* Note where the overlays of a tier lie on the path. A holder of windows alone has their blocks. */
static void look_at_overlays(const struct slots *slots, const struct kvi_windows *windows,
                             uint32_t tier, struct kvi_view *view, struct kvi_match *item)
{
    for (uint32_t k = 0; k < kvi_overlays_of(windows); k++) {
        const struct kvi_holder *overlay = windows->overlays[tier][k];
        size_t last = overlay ? last_share(slots, overlay->id) : KVI_NO_SHARE;

        view->last[tier][k] = view->at[tier][k] = last;
        view->below |= tier && last != KVI_NO_SHARE;
        if (overlay && windows->alone)
            item->blocks =
                KV_MAX(item->blocks, atomic_load_explicit(&overlay->blocks, memory_order_relaxed));
    }
}

/* Cut the matches of holders with windows to what the windows allow. Returns 0 or -ENOMEM. */
__attribute__((noinline)) static int cut_matches(struct find *find)
{
    struct slots *slots = find->slots;
    struct kvi_matches *matches = find->matches;
    size_t kept = 0;
    int rc = 0;

    for (size_t i = 0; i < slots->n_windowed && !rc; i++) {
        const struct kvi_windows *windows = slots->windowed[i].windows;
        struct kvi_match *item = &matches->items[slots->windowed[i].item];
        bool below = slots->windowed[i].share != KVI_NO_SHARE;
        uint32_t n_tiers = below || windows->lower || windows->alone ? KV_N_TIERS : 1;
        struct kvi_view view;

        view.windows = windows;
        view.shares = slots->shares;
        view.main = slots->windowed[i].share;
        view.n = (uint32_t)find->n;
        view.below = below;
        for (uint32_t t = 0; t < n_tiers; t++)
            look_at_overlays(slots, windows, t, &view, item);
        if (find->groups)
            rc = kvi_add_groups(find->groups, &view, item->holder, item->reach);
        kvi_cut_reach(&view, item->reach);
    }
    for (size_t i = 0; i < matches->n; i++) {
        if (!matches->items[i].reach[KV_N_TIERS - 1])
            continue;
        if (kept != i)
            matches->items[kept] = matches->items[i];
        kept++;
    }
    matches->n = kept;
    return rc;
}

static uint32_t match(const struct find *find, struct kvi_run run, size_t depth)
{
    const struct kvi_page *page = kvi_arena_page(&find->ix->arena, run.pos);
    const uint64_t *locals = page->locals + kvi_slot_of(run.pos), *wanted = find->hashes + depth;
    uint32_t len = (uint32_t)KV_MIN((size_t)run.len, find->n - depth), i = 0;

    while (i < len && locals[i] == wanted[i])
        i++;
    return i;
}

static void call_hook(const struct kvi_index *ix, const struct kvi_chain *chain)
{
    void (*hook)(void *arg, const struct kvi_chain *chain) = ix->find_hook;

    if (KV_UNLIKELY(hook != NULL))
        hook(ix->find_hook_arg, chain);
}

/* Note a chain on the path and its version, so that a change during the walk is seen. */
static int note_step(struct find *find, const struct kvi_chain *chain, uint32_t version)
{
    int rc = find->path_len == find->path_capacity ? grow_path(find) : 0;

    if (!rc)
        find->path[find->path_len++] = (struct step){chain, version};
    return rc;
}

/* True when no chain on the path has changed, nor the holders' windows since version @windows. */
static bool is_undisturbed(const struct find *find, uint64_t windows)
{
    for (size_t i = 0; i < find->path_len; i++)
        if (atomic_load_explicit(&find->path[i].chain->version, memory_order_acquire) !=
            find->path[i].version)
            return false;
    return atomic_load_explicit(&find->ix->windows_version, memory_order_acquire) == windows;
}

/* Walk once from the root. Returns 0, -ENOMEM or DISTURBED. */
static int walk(struct find *find)
{
    const struct kvi_chain *chain = &find->ix->root;
    size_t depth = 0;
    uint64_t windows = atomic_load_explicit(&find->ix->windows_version, memory_order_acquire);
    int rc = 0;

    find->matches->n = 0;
    if (find->groups)
        find->groups->n = find->groups_before;
    find->path_len = 0;
    find->slots->call++;
    find->slots->n_shares = find->slots->n_windowed = 0;
    while (depth < find->n) {
        struct kvi_run run;
        uint32_t version, len;

        chain = kvi_kids_find(chain, find->hashes[depth]);
        if (!chain)
            break;
        call_hook(find->ix, chain);
        version = atomic_load_explicit(&chain->version, memory_order_acquire);
        if (version & 1) /* a dead chain keeps its last content, but chains below it change */
            return DISTURBED;
        run = kvi_chain_run(chain);
        len = match(find, run, depth);
        if (!len)
            break;
        rc = note_step(find, chain, version);
        if (!rc)
            rc = take_entries(find, chain, (uint32_t)depth, len);
        if (rc)
            return rc;
        depth += len;
        if (len < run.len)
            break;
    }
    if (KV_UNLIKELY(find->slots->n_windowed > 0))
        rc = cut_matches(find);
    call_hook(find->ix, NULL);
    if (rc)
        return rc;
    return is_undisturbed(find, windows) ? 0 : DISTURBED;
}

/*
 * Lock out the writer for one walk after too many disturbed walks, so that every lookup ends. Leave
 * the epoch first: the writer may be waiting for readers to leave. While the lock is held, it frees
 * nothing.
 */
static int walk_alone(struct find *find, struct kvi_index *index)
{
    int rc;

    kvi_lock(index);
    rc = walk(find);
    atomic_fetch_add_explicit(&index->n_walks_alone, 1, memory_order_relaxed);
    pthread_mutex_unlock(&index->lock);
    return rc;
}

int kvi_find_groups(struct kvi_index *index, const uint64_t *tokens_hashes, size_t n,
                    struct kvi_matches *matches, struct kvi_group_matches *groups)
{
    struct find find = {.ix = index,
                        .hashes = tokens_hashes,
                        .n = KV_MIN(n, (size_t)UINT32_MAX),
                        .matches = matches,
                        .groups = groups,
                        .groups_before = groups ? groups->n : 0,
                        .slots = matches->scratch,
                        .path_capacity = PATH_SHORT};
    int rc = find.slots ? 0 : grow_slots(&find, 1), tries = 0;

    find.path = find.path_short;
    if (!rc && find.slots->path) {
        find.path = find.slots->path;
        find.path_capacity = find.slots->path_capacity;
    }
    if (!rc)
        rc = kv_epoch_enter();
    if (rc)
        return rc;
    do /* wait until the writer has changed this very path */
        rc = walk(&find);
    while (rc == DISTURBED && ++tries < KVI_FIND_TRIES);
    kv_epoch_exit();
    if (rc == DISTURBED)
        rc = walk_alone(&find, index);
    if (rc)
        matches->n = 0;
    if (rc && groups)
        groups->n = find.groups_before;
    for (size_t i = 0; i < matches->n; i++)
        matches->items[i].blocks =
            KV_MAX(matches->items[i].blocks, (uint64_t)matches->items[i].reach[KV_N_TIERS - 1]);
    return rc;
}

int kvi_find(struct kvi_index *index, const uint64_t *tokens_hashes, size_t n,
             struct kvi_matches *matches)
{
    return kvi_find_groups(index, tokens_hashes, n, matches, NULL);
}
