// SPDX-License-Identifier: Apache-2.0
/*
 * First part of a store, which changes no answer: find the blocks that have places, decide what
 * happens to names. Stores that contradict themselves or the holder's tree are refused here, before
 * anything has changed.
 *
 * A path ends where the tree lacks the next block. For a store of b0 to b4 below P:
 *
 *     chain A  [ .. P  b0 b1 ]               piece 0: A, blocks b0 b1
 *                      └──── chain B  [ b2 x y ]     piece 1: B, block b2
 *
 *     n_path = 3, at = B, off = 1: b3 and b4 get new places below b2, beside x
 *
 * Invariant of names, on which all of this file rests: a holder calls one place by one hash, and
 * no other of its places by the same. A hash that the store gives another place therefore leaves
 * the old one, and the holder loses that place with all below it (a move).
 */
#include "index/tree/kids.h"
#include "index/write/store.h"

#define SAME_MAX 8u /* most places in the table under one hash */

/*
 * A hash that occurs twice would name two places. The parent's own would put the parent below
 * itself. The table of hashes is not cleared between calls: entries carry the call's number.
 */
int kvi_store_check(struct kvi_store *store, const uint64_t *parent)
{
    struct kvi_scratch *scratch = store->scratch;
    size_t mask, capacity = 64;

    while (capacity < 2 * store->n)
        capacity *= 2;
    if (capacity > scratch->seen_capacity) {
        if (kvi_mem_grow(&store->ix->mem, (void **)&scratch->seen, &scratch->seen_capacity,
                         capacity, sizeof(scratch->seen[0])))
            return -ENOMEM;
    }
    mask = capacity - 1;
    scratch->call++;
    for (size_t i = 0; i < store->n; i++) {
        uint64_t hash = store->blocks[i].hash;
        size_t at = (size_t)kv_mix(hash) & mask;

        if (parent && hash == *parent)
            return -EINVAL;
        for (; scratch->seen[at].call == scratch->call; at = (at + 1) & mask)
            if (scratch->seen[at].hash == hash)
                return -EINVAL;
        scratch->seen[at] = (struct kvi_seen){hash, scratch->call};
    }
    return 0;
}

/* Count the blocks from @i on that the chain has from @off on. */
static uint32_t match(const struct kvi_store *store, const struct kvi_chain *chain, uint32_t off,
                      size_t i)
{
    struct kvi_run run = kvi_chain_run(chain);
    const uint64_t *locals = kvi_arena_locals(&store->ix->arena, run.pos);
    uint32_t start = off;

    while (off < run.len && i < store->n && locals[off] == store->blocks[i].tokens_hash) {
        off++;
        i++;
    }
    return off - start;
}

/* Follow the blocks down from the parent as far as their places exist. */
static int find_path(struct kvi_store *store)
{
    struct kvi_scratch *scratch = store->scratch;
    struct kvi_chain *chain = store->parent, *kid;
    uint32_t off = chain->parent ? store->parent_off + 1 : 0, n;
    size_t i = 0;

    for (;;) {
        /* Make room for this piece, and one more for blocks that are appended. */
        if (kvi_mem_grow(&store->ix->mem, (void **)&scratch->pieces, &scratch->pieces_capacity,
                         store->n_pieces + 2, sizeof(scratch->pieces[0])))
            return -ENOMEM;
        n = chain->parent ? match(store, chain, off, i) : 0;
        if (n)
            scratch->pieces[store->n_pieces++] = (struct kvi_piece){chain, off, off + n, i};
        i += n;
        off += n;
        if (i == store->n || off < kvi_chain_run(chain).len)
            break;
        /* A lone child is returned for any key, so compare its first block. */
        kid = kvi_kids_find(chain, store->blocks[i].tokens_hash);
        if (!kid || *kvi_arena_locals(&store->ix->arena, kvi_chain_run(kid).pos) !=
                        store->blocks[i].tokens_hash)
            break;
        chain = kid;
        off = 0;
    }
    store->n_path = i;
    store->at = chain;
    store->off = off;
    return 0;
}

static bool on_path(const struct kvi_store *store, struct kvi_place place)
{
    for (size_t i = 0; i < store->n_pieces; i++) {
        const struct kvi_piece *piece = &store->scratch->pieces[i];

        if (piece->chain == place.chain)
            return place.off >= piece->from && place.off < piece->to;
    }
    return false;
}

/* Return true when the store goes below @place. Losing the place would lose the parent, too. */
static bool above_parent(const struct kvi_store *store, struct kvi_place place)
{
    if (place.chain == store->parent)
        return place.off <= store->parent_off;
    for (const struct kvi_chain *c = store->parent->parent; c; c = c->parent)
        if (c == place.chain)
            return true;
    return false;
}

/* Check @place, which the holder calls by the hash of a block that gets another place. */
static int judge_move(struct kvi_store *store, struct kvi_place place)
{
    struct kvi_scratch *scratch = store->scratch;

    if (above_parent(store, place))
        return -EINVAL;
    if (on_path(store, place)) /* this store gives the place another name */
        return 0;
    if (kvi_mem_grow(&store->ix->mem, (void **)&scratch->moves, &scratch->moves_capacity,
                     store->n_moves + 1, sizeof(scratch->moves[0])))
        return -ENOMEM;
    scratch->moves[store->n_moves++] = (struct kvi_move){place.chain, place.off, 0};
    return 0;
}

/* Decide the name of block @i, whose place is @off in @chain. @held: the holder has the place. */
static int judge_known(struct kvi_store *store, size_t i, const struct kvi_chain *chain,
                       uint32_t off, bool held)
{
    const struct kvi_index *ix = store->ix;
    uint32_t pos = kvi_chain_run(chain).pos + off;
    uint64_t hash = store->blocks[i].hash;
    bool same = *kvi_arena_engines(&ix->arena, pos) == hash, aliased;
    struct kvi_place place;
    int rc = 0;

    store->scratch->naming[i] = KVI_NAME_KEEP;
    /* No other place can have this name for the holder: skip the search. */
    if (same && !store->holder->n_aliases && (held || !(chain->flags & (KVI_TWINS | KVI_UNNAMED))))
        return 0;
    if (kvi_locate(ix, store->holder, hash, &place, NULL)) {
        if (kvi_place_pos(place) == pos)
            return 0;
        rc = judge_move(store, place);
    }
    /* The slot may have the hash while the table lacks it: then only an alias leads here. */
    same = same && (!(chain->flags & KVI_UNNAMED) || kvi_name_in_table(ix, hash, pos));
    aliased =
        held && store->holder->n_aliases && kvi_alias_of_place(ix, store->holder->id, pos) >= 0;
    store->stored.renamed += held;
    if (same)
        store->scratch->naming[i] = aliased ? KVI_NAME_REVERT : KVI_NAME_KEEP;
    else
        store->scratch->naming[i] = aliased ? KVI_NAME_REALIAS : KVI_NAME_ALIAS;
    return rc;
}

/*
 * Note the tiers in which the blocks are parked, so that the store adds these tiers, too: a block
 * that enters the tree is no longer parked, and would lose them.
 */
static int look_parked(struct kvi_store *store)
{
    struct kvi_scratch *scratch = store->scratch;

    if (!store->holder->n_parked || store->again)
        return 0;
    if (kvi_mem_grow(&store->ix->mem, (void **)&scratch->parked, &scratch->parked_capacity,
                     store->n, sizeof(scratch->parked[0])))
        return -ENOMEM;
    for (size_t i = 0; i < store->n; i++) {
        const struct kvi_parked *parked =
            kvi_parked_find(store->ix, store->holder, store->blocks[i].hash);

        scratch->parked[i] = parked ? (uint8_t)parked->mask : 0;
        store->unparks = store->unparks || parked;
    }
    return 0;
}

/*
 * Decide the name of block @i, which gets a new place. Its hash may already name places of other
 * holders. Their chains are marked even if the store fails later: a mark costs searches, no answer.
 */
static int judge_new(struct kvi_store *store, size_t i)
{
    struct kvi_place place;
    uint32_t n_same;
    int rc = 0;

    if (kvi_locate(store->ix, store->holder, store->blocks[i].hash, &place, &n_same))
        rc = judge_move(store, place);
    if (KV_UNLIKELY(n_same)) {
        kvi_names_note_twins(store->ix, store->blocks[i].hash);
        store->twins = true;
    }
    store->scratch->naming[i] = n_same < SAME_MAX ? KVI_NAME_TABLE : KVI_NAME_ALIAS;
    return rc;
}

int kvi_store_judge(struct kvi_store *store)
{
    struct kvi_scratch *scratch = store->scratch;
    int rc = kvi_mem_grow(&store->ix->mem, (void **)&scratch->naming, &scratch->naming_capacity,
                          store->n, sizeof(scratch->naming[0]));

    for (size_t p = 0; !rc && p < store->n_pieces; p++) {
        const struct kvi_piece *piece = &scratch->pieces[p];
        _Atomic uint64_t *entry = kvi_who_find(piece->chain, store->holder->id);
        uint32_t len = entry ? kvi_entry_len(kvi_who_get(entry)) : 0;

        for (uint32_t off = piece->from; !rc && off < piece->to; off++)
            rc = judge_known(store, piece->first + (off - piece->from), piece->chain, off,
                             off < len);
    }
    for (size_t i = store->n_path; !rc && i < store->n; i++) {
        kvi_locate_ahead(store->ix, &store->blocks[store->n_path].hash, sizeof(store->blocks[0]),
                         i - store->n_path, store->n - store->n_path);
        rc = judge_new(store, i);
    }
    return rc ? rc : look_parked(store);
}

int kvi_store_find(struct kvi_store *store, const uint64_t *parent)
{
    int rc = kvi_store_check(store, parent);

    return rc ? rc : find_path(store);
}
