// SPDX-License-Identifier: Apache-2.0
/*
 * A store in three parts: look (find the places of the blocks, decide what changes; look.c), plan
 * (allocate everything; plan.c), commit (change the tree; can't fail; commit.c). Each of them
 * handles one path: blocks below a parent that the holder has in the tree. This file cuts what
 * callers ask for into such paths:
 *
 *     store_call ──► store_locked ──► store_any ──► store_path       all blocks as one path
 *                         │               └───────► store_by_block   each by itself: in the tree,
 *                         │                                          parked, or a path of new ones
 *                         └──► kvi_overlays_store     the same places in the overlays of windows
 *
 * Invariants: a path is stored whole or not at all. A name is in the tree or parked, never both.
 * Overlays follow their main holder, so a window's match is never longer than the truth.
 */
#include "index/write/store.h"

#include "base/core/clock.h"
#include "index/tree/windows.h"

/*
 * Time after which a series of stores lets other threads go first. It bounds what a writer of
 * another stream waits for a batch of thousands of chains.
 */
#define HOLD_NS 100000

/* -- the call ---------------------------------------------------------------------------------- */

/* Count the places of the path that the holder doesn't have yet. */
static size_t count_gains(const struct kvi_store *store)
{
    size_t n = store->n - store->n_path;

    for (size_t i = 0; i < store->n_pieces; i++) {
        const struct kvi_piece *piece = &store->scratch->pieces[i];
        const _Atomic uint64_t *entry = kvi_who_find(piece->chain, store->holder->id);
        uint32_t len = entry ? kvi_entry_len(kvi_who_get(entry)) : 0;

        n += piece->to - KV_MIN(piece->to, KV_MAX(piece->from, len));
    }
    return n;
}

/*
 * Return true when the holder has none of the blocks, and no parked block comes between them. A
 * parked child of one block takes its place before the next is stored, which may share that place.
 */
static bool is_all_new(const struct kvi_store *store)
{
    if (store->n_moves || store->unparks || count_gains(store) != store->n)
        return false;
    for (size_t i = 0; store->holder->n_parked && i + 1 < store->n; i++)
        if (kvi_parked_child(store->ix, store->holder, store->blocks[i].hash))
            return false;
    return true;
}

/* Return true, and count it, when the store exceeds a limit on blocks. */
static bool exceeds(struct kvi_store *store)
{
    struct kvi_index *ix = store->ix;
    uint64_t max = store->holder ? store->holder->max_blocks : ix->max_holder_blocks, has = 0;
    uint64_t room = ix->max_blocks - atomic_load_explicit(&ix->n_blocks, memory_order_relaxed);
    bool over;

    if (store->holder)
        has = atomic_load_explicit(&store->holder->blocks, memory_order_relaxed);
    if (store->only_new &&
        store->holder) { /* parked blocks may follow one of the blocks, before the next */
        has += store->holder->n_parked;
        room -= KV_MIN(room, store->holder->n_parked);
    }
    over = store->n - store->n_path > room;
    if (!over && has + store->n > max)
        over = !store->holder || has + count_gains(store) > max;
    if (!over || store->only_new) /* the caller will try the blocks one by one */
        return over;
    kvi_count(&ix->n_refused, 1);
    if (store->holder)
        store->holder->n_refused++;
    return true;
}

static struct kvi_holder *writer(const struct kvi_store *store, struct kv_holder key)
{
    return store->overlay ? store->overlay : kvi_holder_await(store->ix, key);
}

/* Look and plan. On failure nothing has changed, and a holder that this call made is gone again. */
static int prepare(struct kvi_store *store, struct kv_holder holder, const uint64_t *parent)
{
    struct kvi_index *ix = store->ix;
    int rc;

    store->holder = writer(store, holder);
    store->parent = &ix->root;
    if (parent) {
        struct kvi_place place;

        if (!store->holder || !kvi_locate(ix, store->holder, *parent, &place, NULL))
            return -ENOENT;
        store->parent = place.chain;
        store->parent_off = place.off;
    }
    if (store->n == 0)
        return 0;
    rc = kvi_store_find(store, parent);
    if (rc)
        return rc;
    if (exceeds(store))
        return -ENOSPC;
    if (!store->holder) {
        rc = kvi_holder_add(ix, holder, &store->holder);
        if (rc)
            return rc;
        store->holder_is_new = true;
    }
    rc = kvi_store_judge(store);
    if (!rc && store->only_new && !is_all_new(store))
        rc = -EEXIST;
    if (!rc)
        rc = kvi_store_plan(store);
    if (rc) {
        kvi_store_cancel(store);
        if (store->holder_is_new)
            kvi_holder_drop(ix, store->holder);
        return rc;
    }
    if (!store->again)
        kvi_copies_imply(store->holder, store->tier, store->source);
    return 0;
}

/* Remove the stored blocks from the parked ones, and give them the tiers that they had there. */
static void unpark(struct kvi_store *store)
{
    for (size_t i = 0; store->unparks && i < store->n; i++) {
        struct kvi_parked *parked;

        if (!store->scratch->parked[i])
            continue;
        parked = kvi_parked_find(store->ix, store->holder, store->blocks[i].hash);
        if (parked)
            kvi_unpark(store->ix, store->holder, parked);
        kvi_give(store->ix, store->holder, store->blocks[i].hash, store->scratch->parked[i]);
    }
}

int kvi_store_again(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                    uint64_t parent, const struct kv_block *blocks, size_t n)
{
    struct kvi_store store = {
        .ix = ix, .scratch = ix->scratch, .tier = tier, .blocks = blocks, .n = n, .again = true};
    int rc;

    store.overlay = holder->main ? holder : NULL;
    rc = prepare(&store, holder->key, &parent);

    if (rc == 0)
        kvi_store_commit(&store);
    kvi_settle(ix);
    return rc;
}

/* -- blocks without a place -------------------------------------------------------------------- */

/* Add tiers to block @i, whose place, in the tree or parked, this store doesn't decide. */
static void gain(struct kvi_store *store, size_t i, uint32_t mask)
{
    bool had = mask >> store->tier & 1;
    struct kvi_parked *parked = kvi_parked_find(store->ix, store->holder, store->blocks[i].hash);

    if (parked)
        parked->mask |= 1u << store->tier;
    else
        kvi_give(store->ix, store->holder, store->blocks[i].hash, 1u << store->tier);
    store->stored.added += !had;
    store->stored.duplicate += had;
    store->stored.lagging += !kvi_copies_add(store->ix, store->holder, store->tier, store->source,
                                             store->blocks[i].hash, had, store->counted);
}

void kvi_store_count_moved(struct kvi_store *store, uint64_t n)
{
    store->holder->n_moved += n;
    if (KV_UNLIKELY(n > 0))
        kvi_count(&store->ix->n_moved, n);
}

/* Return true when the block right above the one at @place isn't called @parent. */
static bool is_below_another(const struct kvi_store *store, struct kvi_place place, uint64_t parent)
{
    const struct kvi_chain *chain = place.chain;
    uint32_t pos;

    if (place.off) {
        pos = kvi_place_pos(place) - 1;
    } else {
        chain = chain->parent;
        if (chain == &store->ix->root)
            return true;
        pos = kvi_chain_run(chain).pos + kvi_chain_run(chain).len - 1;
    }
    return kvi_name_of(store->ix, store->holder, pos) != parent;
}

/* Park block @i: its parent is in no place of the tree. kvi_park counts what it has no room for. */
static void park(struct kvi_store *store, uint64_t parent, size_t i)
{
    const struct kvi_parked *parked =
        kvi_parked_find(store->ix, store->holder, store->blocks[i].hash);
    uint32_t bit = 1u << store->tier;
    bool had = parked && parked->mask & bit;

    store->stored.parked++;
    if (!kvi_park(store->ix, store->holder, parent, store->blocks[i], bit))
        return;
    store->stored.lagging += !kvi_copies_add(store->ix, store->holder, store->tier, store->source,
                                             store->blocks[i].hash, had, store->counted);
}

/* -- the call ---------------------------------------------------------------------------------- */

/*
 * Store one chain of blocks below a parent that the holder has in the tree. Settling comes before
 * attaching: stores of parked runs split chains, and a chain in the queue can't be split.
 */
static int store_placed(struct kvi_store *store, struct kv_holder key, const uint64_t *parent)
{
    int rc = prepare(store, key, parent);

    if (rc || !store->n)
        return rc;
    kvi_store_commit(store);
    unpark(store);
    kvi_settle(store->ix);
    if (store->holder->n_parked)
        kvi_attach(store->ix, store->holder, store->blocks, store->n);
    return 0;
}

static void add_up(struct kvi_stored *sum, const struct kvi_stored *more)
{
    sum->added += more->added;
    sum->duplicate += more->duplicate;
    sum->renamed += more->renamed;
    sum->parked += more->parked;
    sum->lagging += more->lagging;
}

/* Store the call's blocks from @i on with @store's settings, and add up the results. */
static int store_path(struct kvi_store *all, struct kv_holder key, const uint64_t *parent, size_t i,
                      size_t n)
{
    struct kvi_store path = {.ix = all->ix,
                             .scratch = all->scratch,
                             .overlay = all->overlay,
                             .tier = all->tier,
                             .source = all->source,
                             .counted = all->counted,
                             .only_new = all->only_new,
                             .blocks = all->blocks + i,
                             .n = n};
    int rc = store_placed(&path, key, parent);

    all->holder = path.holder ? path.holder : all->holder;
    if (rc)
        return rc;
    add_up(&all->stored, &path.stored);
    return 0;
}

/*
 * Return the tiers in which the holder has a block, 0: none. *@ret_placed: the block is in the
 * tree.
 */
static uint32_t tiers_of(const struct kvi_store *store, uint64_t hash, bool *ret_placed)
{
    const struct kvi_parked *parked;
    struct kvi_place place;

    *ret_placed = kvi_locate(store->ix, store->holder, hash, &place, NULL);
    if (*ret_placed)
        return kvi_mask_at(store->ix, kvi_who_get(place.entry), place.off);
    parked = kvi_parked_find(store->ix, store->holder, hash);
    return parked && !kvi_is_placeless(store->holder, parked) ? parked->mask : 0;
}

/* Count the blocks from @i on that the holder doesn't have. */
static size_t count_strangers(const struct kvi_store *store, size_t i)
{
    size_t first = i;
    bool placed;

    for (; i < store->n; i++) {
        kvi_locate_ahead(store->ix, &store->blocks[first].hash, sizeof(store->blocks[0]), i - first,
                         store->n - first);
        if (tiers_of(store, store->blocks[i].hash, &placed))
            break;
    }
    return i - first;
}

/*
 * Store block by block where one path can't do it: below a parent that isn't in the tree, and in
 * lower tiers, whose events name no places that are to be believed. For each block:
 *
 *     the holder has it, lower tier       it gains the tier where it is
 *     it is in the tree, its parent not   it gains the tier where it is
 *     its parent isn't in the tree        it is parked
 *     else                                it is stored, with those behind it
 */
static int store_by_block(struct kvi_store *store, struct kv_holder key, const uint64_t *parent)
{
    size_t n;
    int rc = 0;

    for (size_t i = 0; i < store->n && !rc; i += n) {
        struct kvi_place place;
        bool hangs = parent && !kvi_locate(store->ix, store->holder, *parent, &place, NULL), placed;
        uint32_t mask = tiers_of(store, store->blocks[i].hash, &placed);

        n = 1;
        if (mask && (store->keeps || (hangs && placed))) {
            if (placed && parent &&
                kvi_locate(store->ix, store->holder, store->blocks[i].hash, &place, NULL))
                kvi_store_count_moved(store, is_below_another(store, place, *parent));
            gain(store, i, mask);
        } else if (hangs) {
            park(store, *parent, i);
        } else {
            n = store->keeps ? count_strangers(store, i) : store->n - i;
            rc = store_path(store, key, parent, i, n);
        }
        parent = &store->blocks[i + n - 1].hash;
    }
    return rc;
}

/*
 * Return true when the blocks' copies can be told from those of the tier's implied source: each
 * block may need a record for both.
 */
static bool may_tell_source(const struct kvi_store *store)
{
    const struct kvi_holder_tier *t = &store->holder->tier[store->tier];

    if (store->source == t->implied || (!t->blocks && !store->holder->n_parked))
        return true;
    return !store->only_new && kvi_copies_have_room(store->ix, 2 * store->n);
}

static int store_any(struct kvi_store *store, struct kv_holder key, const uint64_t *parent)
{
    struct kvi_index *ix = store->ix;
    struct kvi_place place;
    int rc;

    if (!store->n)
        return 0;
    store->holder = writer(store, key);
    if (store->holder && !may_tell_source(store)) {
        if (store->only_new)
            return -EEXIST;
        kvi_copies_lost(ix, store->holder, store->n);
        store->left_out = true;
        return 0;
    }
    /* The usual case: one path. Only a parent that isn't in the tree leads on from here. */
    if (!store->keeps || !store->holder) {
        rc = store_path(store, key, parent, 0, store->n);
        if (rc != -ENOENT || !ix->parking.max_holder || store->only_new)
            return rc;
    }
    rc = kvi_store_check(store, parent);
    if (rc)
        return rc;
    if (parent && !ix->parking.max_holder &&
        !(store->holder && kvi_locate(ix, store->holder, *parent, &place, NULL)))
        return -ENOENT;
    if (!store->holder) {
        rc = kvi_holder_add(ix, key, &store->holder);
        if (rc)
            return rc;
    }
    kvi_copies_imply(store->holder, store->tier, store->source);
    return store_by_block(store, key, parent);
}

int kvi_store_places(struct kvi_index *ix, struct kvi_holder *overlay, bool keeps,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n)
{
    struct kvi_store store = {.ix = ix,
                              .scratch = ix->scratch,
                              .overlay = overlay,
                              .keeps = keeps,
                              .tier = KVI_PLACED,
                              .blocks = blocks,
                              .n = n};

    return store_any(&store, overlay->key, parent);
}

/*
 * Return true when a refused store, which did nothing, may be tried again: the holder's windows had
 * places of forgotten blocks, which are gone now.
 */
static bool makes_room(struct kvi_store *store)
{
    struct kvi_stored *stored = &store->stored;

    if (!store->holder || stored->added + stored->duplicate + stored->parked ||
        !kvi_overlays_sweep(store->ix, store->holder))
        return false;
    if (store->only_new) /* the refusal wasn't counted */
        return true;
    kvi_count(&store->ix->n_refused, (uint64_t)-1);
    store->holder->n_refused--;
    return true;
}

static bool is_valid(const struct kvi_store *store)
{
    return (unsigned)store->tier < KV_N_TIERS && (!store->n || store->blocks) &&
           store->n <= UINT32_MAX / 2 && store->source <= KVI_MAX_SOURCE;
}

/*
 * Store, with a second attempt when windows' forgotten places took the room. The overlays come
 * last: a block that only the main holder has is beyond each window's match, which is short, not
 * wrong.
 */
static int store_locked(struct kvi_store *store, struct kv_holder key, const uint64_t *parent)
{
    struct kvi_index *ix = store->ix;
    struct kvi_store fresh;
    int rc;

    store->scratch = ix->scratch;
    store->keeps = store->tier != KV_TIER_DEVICE;
    fresh = *store;
    rc = store_any(store, key, parent);
    if (rc == -ENOSPC && makes_room(store)) {
        *store = fresh;
        rc = store_any(store, key, parent);
    }
    if (!rc && store->n && !store->left_out && store->holder && kvi_windows_of(store->holder))
        store->stored.lagging +=
            kvi_overlays_store(ix, store->holder, store->keeps, parent, store->blocks, store->n);
    return rc;
}

/*
 * Add the blocks to a window by their names. Where it has no main group beside it, the overlays
 * learn the places first, unless the parent has none: then nobody has told what the chain begins
 * with (its salt), and local hashes computed without that would lead to another place.
 */
static int add_to_window(struct kvi_store *store, const struct kvi_cache *cache,
                         const uint64_t *parent)
{
    struct kvi_index *ix = store->ix;
    struct kvi_scratch *scratch = ix->scratch;
    struct kvi_spot spot;
    long rc = kvi_spot_find(ix, cache, true, &spot);

    if (!rc)
        rc = kvi_mem_grow(&ix->mem, (void **)&scratch->hashes, &scratch->hashes_capacity, store->n,
                          sizeof(scratch->hashes[0]));
    if (rc)
        return (int)rc;
    for (size_t i = 0; i < store->n; i++)
        scratch->hashes[i] = store->blocks[i].hash;
    if (kvi_windows_of(spot.main)->alone &&
        (!parent || kvi_overlays_locate(ix, spot.main, *parent)))
        store->stored.lagging =
            !kvi_overlay_place(ix, &spot, cache->tier, parent, store->blocks, store->n);
    kvi_copies_imply(spot.holder, spot.tier, cache->source);
    rc = kvi_known(ix, spot.holder, spot.tier, cache->source, true, scratch->hashes, store->n);
    store->stored.added = store->n;
    return rc < 0 ? (int)rc : 0;
}

static int store_call(struct kvi_store *store, const struct kvi_cache *cache,
                      const uint64_t *parent, struct kvi_stored *ret)
{
    int rc;

    if (!is_valid(store))
        return -EINVAL;
    kvi_lock(store->ix);
    if (cache->window)
        rc = add_to_window(store, cache, parent);
    else
        rc = store_locked(store, cache->holder, parent);
    kvi_unlock(store->ix);
    if (!rc && ret)
        *ret = store->stored;
    return rc;
}

int kvi_store(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
              const uint64_t *parent, const struct kv_block *blocks, size_t n,
              struct kvi_stored *ret)
{
    struct kvi_store store = {.ix = index, .tier = tier, .blocks = blocks, .n = n};
    const struct kvi_cache cache = kvi_cache_of(holder, tier, 0);

    return store_call(&store, &cache, parent, ret);
}

void kvi_store_soon(struct kvi_index *index, const struct kv_block *blocks, size_t n)
{
    if (!n || pthread_mutex_trylock(&index->lock) != 0)
        return;
    kvi_locate_soon(index, &blocks[0].hash, sizeof(blocks[0]), n);
    pthread_mutex_unlock(&index->lock);
}

int kvi_add(struct kvi_index *index, struct kvi_cache cache, const uint64_t *parent,
            const struct kv_block *blocks, size_t n, struct kvi_stored *ret)
{
    struct kvi_store store = {.ix = index,
                              .tier = cache.tier,
                              .source = cache.source,
                              .counted = true,
                              .blocks = blocks,
                              .n = n};

    return store_call(&store, &cache, parent, ret);
}

/*
 * Store a chain of new blocks, and add the result to *@sum. Anything but new blocks is refused
 * (only_new): the caller then stores this chain by itself, and asks more about each block first.
 */
static int add_chain(struct kvi_index *ix, const struct kvi_new_chain *chain,
                     struct kvi_stored *sum)
{
    struct kvi_store store = {.ix = ix,
                              .tier = KV_TIER_DEVICE,
                              .counted = true,
                              .only_new = true,
                              .blocks = chain->blocks,
                              .n = chain->n};

    int rc;

    if (!is_valid(&store))
        return -EINVAL;
    rc = store_locked(&store, chain->holder, chain->has_parent ? &chain->parent : NULL);
    if (!rc)
        add_up(sum, &store.stored);
    return rc;
}

size_t kvi_add_chains(struct kvi_index *index, const struct kvi_new_chain *chains, size_t n,
                      struct kvi_stored *ret, int *ret_rc)
{
    struct kvi_stored sum = {0};
    uint64_t until_ns;
    size_t i = 0;

    *ret_rc = 0;
    if (ret)
        *ret = sum;
    if (!n)
        return 0;
    kvi_lock(index);
    until_ns = kv_now_ns() + HOLD_NS;
    for (;; i++) {
        if (i + 1 < n && chains[i + 1].n && chains[i + 1].blocks)
            kvi_locate_soon(index, &chains[i + 1].blocks[0].hash, sizeof(struct kv_block),
                            chains[i + 1].n);
        *ret_rc = add_chain(index, &chains[i], &sum);
        if (*ret_rc || i + 1 == n)
            break;
        if (kv_now_ns() < until_ns)
            continue;
        kvi_unlock(index);
        kvi_lock_in_turn(index);
        until_ns = kv_now_ns() + HOLD_NS;
    }
    kvi_unlock(index);
    if (ret)
        *ret = sum;
    return *ret_rc ? i : n;
}
