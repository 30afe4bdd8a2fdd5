// SPDX-License-Identifier: Apache-2.0
/*
 * The commit of a store: from the bottom up. It first links new chains, then adds the holder's
 * entries, the deepest first. Until the topmost entry is there, no lookup reaches the others for
 * this holder. Readers therefore see all of the store or nothing. A store in two tiers has this
 * property for each tier.
 *
 *     1. names    lookups don't read them; cutting and splitting do, at the old positions
 *     2. split    two chains with the same content replace one: no answer changes
 *     3. moves    places lost to other names leave, the topmost first
 *     4. growth   the chain's length covers the appended blocks, which nobody has yet
 *     5. chains   the first new chain gets its parent: for a holder of the whole path the one step
 *     6. entries  from the deepest to the topmost, whose step makes all of them reachable
 *
 * Nothing of this can fail. Only records of copies are allocated here (copies.h); without memory a
 * copy is left out and counted.
 */
#include <assert.h>
#include <stdlib.h>

#include "index/tree/kids.h"
#include "index/write/store.h"

/*
 * Forget the copies of the old name of the place: records are found by names, and nobody would ask
 * for this one again. A prepared alias already answers for the place (KVI_NAME_ALIAS); then the old
 * name is the slot's.
 */
static void forget_name(struct kvi_store *store, size_t i, const struct kvi_chain *chain,
                        uint32_t pos)
{
    const _Atomic uint64_t *entry = kvi_who_find(chain, store->holder->id);
    uint32_t off = pos - kvi_chain_run(chain).pos;

    if (!store->holder->n_copies || i >= store->n_path || !entry ||
        kvi_entry_len(kvi_who_get(entry)) <= off)
        return;
    kvi_copies_forget(store->ix, store->holder, kvi_mask_at(store->ix, kvi_who_get(entry), off),
                      store->scratch->naming[i] == KVI_NAME_ALIAS
                          ? *kvi_arena_engines(&store->ix->arena, pos)
                          : kvi_name_of(store->ix, store->holder, pos));
}

static void commit_names(struct kvi_store *store)
{
    for (size_t i = 0; i < store->n; i++) {
        enum kvi_naming naming = store->scratch->naming[i];
        struct kvi_chain *chain;
        uint32_t pos;

        if (naming == KVI_NAME_KEEP || naming == KVI_NAME_TABLE)
            continue;
        pos = kvi_store_pos(store, i, &chain);
        forget_name(store, i, chain, pos);
        if (naming == KVI_NAME_REALIAS)
            kvi_alias_commit(store->ix, store->holder, store->blocks[i].hash, pos,
                             kvi_name_of(store->ix, store->holder, pos));
        if (naming == KVI_NAME_REVERT)
            kvi_aliases_forget(store->ix, store->holder, pos, 1);
        else
            chain->flags |= i < store->n_path ? KVI_ALIASED : KVI_ALIASED | KVI_UNNAMED;
    }
}

/* Split the chain, and point at the halves wherever the store noted the whole one. */
static void commit_split(struct kvi_store *store)
{
    struct kvi_split *split = &store->split;

    kvi_split_commit(store->ix, split);
    for (size_t i = 0; i < store->n_pieces; i++)
        if (store->scratch->pieces[i].chain == split->chain)
            store->scratch->pieces[i].chain = split->head;
    for (size_t i = 0; i < store->n_moves; i++) {
        struct kvi_move *move = &store->scratch->moves[i];

        if (move->chain != split->chain)
            continue;
        move->chain = move->off < split->at ? split->head : split->tail;
        move->off -= move->off < split->at ? 0 : split->at;
    }
    /* Only the parent's entry is needed, and the head has it. */
    if (store->parent == split->chain)
        store->parent = split->head;
    store->at = split->head;
}

static void commit_chains(struct kvi_store *store)
{
    struct kvi_index *ix = store->ix;
    struct kvi_chain *first = store->fresh;
    uint64_t n = store->n - store->n_path - store->n_append;

    if (!first)
        return;
    first->parent = store->at;
    kvi_kids_add(ix, store->at, *kvi_arena_locals(&ix->arena, kvi_chain_run(first).pos), first);
    kvi_count(&ix->n_chains, (n + KVI_CHAIN_MAX - 1) / KVI_CHAIN_MAX);
}

/* Return true when the holder has block @i parked in that tier. */
static bool was_parked(const struct kvi_store *store, size_t i)
{
    return store->unparks && store->scratch->parked[i] >> store->tier & 1;
}

/*
 * Count blocks @i.. as entering the tier in the tree. One copy of the implied source needs no
 * record. A run that was parked (store->again) has kept its records.
 */
static void count_entering(struct kvi_store *store, size_t i, size_t n)
{
    if (store->again ||
        (!store->unparks && store->source == store->holder->tier[store->tier].implied))
        return;
    for (; n--; i++) {
        store->stored.lagging +=
            !kvi_copies_add(store->ix, store->holder, store->tier, store->source,
                            store->blocks[i].hash, was_parked(store, i), store->counted);
    }
}

/* Return true when the copies of a block that the holder already has in the tier may change. */
static bool needs_copy(const struct kvi_store *store)
{
    return store->counted ||
           (!store->again && !store->overlay &&
            (store->holder->n_copies || store->source != store->holder->tier[store->tier].implied));
}

/*
 * Add a copy to those of blocks @i.. of the path, from @off on in the entry, that the holder has.
 */
static uint32_t count_held(struct kvi_store *store, size_t i, uint64_t entry, uint32_t off,
                           uint32_t to)
{
    uint32_t n_had = 0;

    for (; off < to; off++, i++) {
        bool had = kvi_mask_at(store->ix, entry, off) >> store->tier & 1;

        n_had += had;
        if (!had)
            count_entering(store, i, 1);
        else if (needs_copy(store))
            (void)kvi_copies_add(store->ix, store->holder, store->tier, store->source,
                                 store->blocks[i].hash, true, store->counted);
    }
    return n_had;
}

/* Add the piece to the holder's entry. Returns true when the holder was not in the chain before. */
static bool commit_piece(struct kvi_store *store, const struct kvi_piece *piece)
{
    struct kvi_index *ix = store->ix;
    struct kvi_chain *chain = piece->chain;
    _Atomic uint64_t *entry = kvi_who_find(chain, store->holder->id);
    uint32_t bit = 1u << store->tier, len, mask, run_len = kvi_chain_run(chain).len;
    uint32_t had, from = piece->from, to = piece->to;
    uint64_t e;

    if (!entry) {
        /* The holder has the parent, so what it lacks of this chain begins at the top. */
        assert(from == 0);
        count_entering(store, piece->first, to);
        kvi_who_add(chain, kvi_entry(store->holder->id, to, bit, 0));
        chain->n_full += to == run_len;
        store->stored.added += to;
        store->n_gained += to;
        return true;
    }
    e = kvi_who_get(entry);
    len = kvi_entry_len(e);
    mask = kvi_entry_mask(e);
    had = count_held(store, piece->first, e, from, KV_MIN(to, len));
    if (to > len)
        count_entering(store, piece->first + (KV_MAX(from, len) - from), to - KV_MAX(from, len));
    store->stored.duplicate += had;
    store->stored.added += to - from - had;
    store->n_gained += KV_MAX(to, len) - len;
    if (to > len || had < to - from) {
        struct kvi_tmap *tmap = mask ? NULL : kvi_tmap_at(ix, e);

        /* Tiers behind the entry's length aren't read: set them before the step that shows them. */
        if (tmap && to > len) {
            kvi_tmap_set(chain, tmap, len, to, 0xf, false);
            kvi_tmap_set(chain, tmap, len, to, bit, true);
        }
        chain->n_full += to > len && to == run_len;
        kvi_who_set(
            chain, entry,
            kvi_entry(store->holder->id, KV_MAX(to, len), mask ? mask | bit : 0, kvi_entry_aux(e)));
        /* The upper blocks get the tier last: until then no match in this tier goes so deep. */
        if (tmap && from < len)
            kvi_tmap_set(chain, tmap, from, KV_MIN(to, len), bit, true);
    }
    kvi_entry_unmix(ix, chain, entry);
    return false;
}

/*
 * Add the path's pieces from the bottom up. A chain that the holder newly enters counts as a child
 * in the one above.
 */
static void commit_path(struct kvi_store *store)
{
    bool below = store->fresh != NULL;
    struct kvi_chain *top = store->n_pieces ? store->scratch->pieces[0].chain->parent : store->at;

    for (size_t i = store->n_pieces; i-- > 0;) {
        const struct kvi_piece *piece = &store->scratch->pieces[i];
        bool entered = commit_piece(store, piece);

        if (below)
            kvi_entry_count_kid(store->ix, kvi_who_find(piece->chain, store->holder->id), 1);
        below = entered;
    }
    if (!below)
        return;
    if (top->parent)
        kvi_entry_count_kid(store->ix, kvi_who_find(top, store->holder->id), 1);
    else
        store->holder->n_roots++;
}

static int compare_moves(const void *a, const void *b)
{
    const struct kvi_move *x = a, *y = b;

    return (x->depth > y->depth) - (x->depth < y->depth);
}

static void sort_moves(struct kvi_store *store)
{
    for (size_t i = 0; i < store->n_moves; i++) {
        struct kvi_move *move = &store->scratch->moves[i];

        move->depth = move->off;
        for (const struct kvi_chain *c = move->chain->parent; c->parent; c = c->parent)
            move->depth += kvi_chain_run(c).len;
    }
    qsort(store->scratch->moves, store->n_moves, sizeof(store->scratch->moves[0]), compare_moves);
}

/*
 * Remove the places that lose their names to others. This precedes every addition: a block that the
 * store makes reachable may be above one of them, and no reader may see both. The topmost place
 * goes first, so that none is seen to lose only a part.
 */
static void commit_moves(struct kvi_store *store)
{
    if (store->n_moves > 1)
        sort_moves(store);
    kvi_store_count_moved(store, store->n_moves);
    for (size_t i = 0; i < store->n_moves; i++) {
        const struct kvi_move *move = &store->scratch->moves[i];
        _Atomic uint64_t *entry = kvi_who_find(move->chain, store->holder->id);

        if (entry && kvi_entry_len(kvi_who_get(entry)) > move->off)
            kvi_cut(store->ix, store->holder, move->chain, entry, move->off, true);
    }
}

/* After growth nobody has the chain's last block, so n_full is 0 until commit_path counts it. */
void kvi_store_commit(struct kvi_store *store)
{
    struct kvi_index *ix = store->ix;
    size_t n_new = store->n - store->n_path;
    size_t in_chains = n_new - store->n_append;

    commit_names(store);
    if (store->split.chain)
        commit_split(store);
    commit_moves(store);
    count_entering(store, store->n_path + store->n_append, in_chains);
    if (store->n_append) {
        struct kvi_run run = kvi_chain_run(store->at);

        store->at->flags |= store->twins ? KVI_TWINS : 0;
        kvi_chain_set_run(store->at, run.pos, run.len + store->n_append);
        kvi_chain_bump(store->at);
        store->at->n_full = 0;
    }
    commit_chains(store);
    commit_path(store);
    store->stored.added += in_chains;
    store->n_gained += in_chains;
    kvi_count(&ix->n_blocks, n_new);
    kvi_account_places(ix, store->holder, store->n_gained);
    kvi_account_tier(ix, store->holder, store->tier, store->stored.added);
}
