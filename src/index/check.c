// SPDX-License-Identifier: Apache-2.0
/*
 * Check all invariants that hold between calls, by walking everything without recursion. The caller
 * holds the writer's lock.
 */
#include <stdio.h>

#include "index/tree/kids.h"
#include "index/tree/tree.h"

struct check {
    struct kvi_index *ix;
    const char *wrong;
    struct kvi_chain *chain;
    uint64_t n_chains, n_blocks, n_named, n_holder_blocks, n_tmaps, n_aliases;
    uint64_t tiers[KV_N_TIERS];
};

static bool must(struct check *check, bool holds, const char *what)
{
    if (!holds && !check->wrong)
        check->wrong = what;
    return holds;
}

static bool kid_holds(void *arg, struct kvi_chain *kid)
{
    struct check *check = arg;

    must(check, kid->parent == check->chain, "a child names another parent");
    must(check, kvi_who_count(kid) > 0, "a child that nobody holds");
    return true;
}

struct kid_count {
    uint32_t holder, n;
};

static bool count_kid(void *arg, struct kvi_chain *kid)
{
    struct kid_count *count = arg;

    count->n += kvi_who_find(kid, count->holder) != NULL;
    return true;
}

static void check_entry(struct check *check, struct kvi_chain *chain, _Atomic uint64_t *at,
                        uint32_t len)
{
    struct kvi_index *ix = check->ix;
    uint64_t entry = kvi_who_get(at);
    uint32_t id = kvi_entry_holder(entry), n = kvi_entry_len(entry);
    struct kid_count kids = {id, 0};
    const struct kvi_holder *holder = kvi_holder_at(ix, id);

    if (!must(check, holder != NULL, "an entry of no holder"))
        return;
    must(check, kvi_who_find(chain, id) == at, "an entry that isn't found, or twice");
    must(check, n > 0 && n <= len, "an entry's length");
    if (chain->parent->parent) {
        const _Atomic uint64_t *above = kvi_who_find(chain->parent, id);

        must(check, above && kvi_entry_len(kvi_who_get(above)) == kvi_chain_run(chain->parent).len,
             "a holder without all of the chain above");
    }
    kvi_kids_each(chain, count_kid, &kids);
    must(check, kvi_entry_kids(ix, entry) == kids.n, "an entry's count of children");
    if (!kvi_entry_mask(entry)) {
        const struct kvi_tmap *tmap = kvi_tmap_at(ix, entry);

        check->n_tmaps++;
        must(check, chain->flags & KVI_MIXED, "a tmap in a chain that isn't marked so");
        if (!must(check, tmap && tmap->capacity >= n, "a tmap's size"))
            return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t mask = kvi_mask_at(ix, entry, i);

        must(check, mask != 0, "a block in no tier");
        for (int t = 0; t < KV_N_TIERS; t++)
            check->tiers[t] += !holder->main && mask >> t & 1;
        if (holder->n_aliases && kvi_alias_of_place(ix, id, kvi_chain_run(chain).pos + i) >= 0) {
            check->n_aliases++;
            must(check, chain->flags & KVI_ALIASED, "an alias in a chain that isn't marked so");
        }
    }
    if (!holder->main)
        check->n_holder_blocks += n;
}

/* Count the places in the table of names under @hash. */
static uint32_t count_names(const struct kvi_index *ix, uint64_t hash)
{
    struct kvi_probe probe;
    uint32_t pos, n = 0;

    kvi_probe_init(&probe, &ix->names, kv_mix(hash));
    while (kvi_probe_next(&probe, &pos))
        n += *kvi_arena_engines(&ix->arena, pos) == hash;
    return n;
}

static void check_chain(struct check *check, struct kvi_chain *chain)
{
    struct kvi_index *ix = check->ix;
    struct kvi_run run = kvi_chain_run(chain);
    uint32_t n_full = 0, n_who = kvi_who_count(chain);

    must(check, !(chain->version & 1) && !(chain->flags & KVI_DIRTY), "a chain dead or dirty");
    must(check, run.len > 0 && run.len <= chain->capacity && chain->capacity <= KVI_CHAIN_MAX,
         "a chain's length");
    must(check,
         kvi_arena_start(&ix->arena, run.pos) == run.pos - 1 && kvi_owner(ix, run.pos) == chain,
         "a chain's extent has another owner");
    must(check, kvi_arena_size(&ix->arena, run.pos - 1) == 1u + chain->capacity,
         "an extent's size");
    must(check, kvi_kids_find(chain->parent, *kvi_arena_locals(&ix->arena, run.pos)) == chain,
         "a chain that its parent doesn't find");
    for (uint32_t i = 0; i < n_who; i++) {
        n_full += kvi_entry_len(kvi_who_get(kvi_who_at(chain, i))) == run.len;
        check_entry(check, chain, kvi_who_at(chain, i), run.len);
    }
    must(check, n_who > 0 && n_full > 0 && n_full == chain->n_full, "how many have all of a chain");
    for (uint32_t i = 0; i < run.len; i++) {
        bool named =
            kvi_name_in_table(ix, *kvi_arena_engines(&ix->arena, run.pos + i), run.pos + i);

        check->n_named += named;
        must(check,
             count_names(ix, *kvi_arena_engines(&ix->arena, run.pos + i)) < 2 ||
                 chain->flags & KVI_TWINS,
             "a hash of two places in a chain that isn't marked so");
        must(check, named || chain->flags & KVI_UNNAMED, "a block that isn't in the table");
    }
    check->n_chains++;
    check->n_blocks += run.len;
    check->chain = chain;
    kvi_kids_each(chain, kid_holds, check);
}

/*
 * Walk depth first along kvi_kids_next. The way back up uses the order of the child that the walk
 * leaves.
 */
static void walk(struct check *check)
{
    struct kvi_chain *chain = &check->ix->root;
    uint64_t order;
    bool after = false;

    check->chain = chain;
    kvi_kids_each(chain, kid_holds, check);
    for (;;) {
        uint64_t found;
        struct kvi_chain *kid = kvi_kids_next(check->ix, chain, after ? &order : NULL, &found);

        if (kid) {
            check_chain(check, kid);
            chain = kid;
            after = false;
        } else if (chain->parent) {
            order = kvi_kids_order(*kvi_arena_locals(&check->ix->arena, kvi_chain_run(chain).pos));
            chain = chain->parent;
            after = true;
        } else {
            return;
        }
        if (check->wrong)
            return;
    }
}

static void check_totals(struct check *check)
{
    struct kvi_index *ix = check->ix;
    uint64_t blocks = 0;

    must(check, check->n_chains == ix->n_chains, "the count of chains");
    must(check, check->n_blocks == ix->n_blocks, "the count of blocks");
    must(check, check->n_holder_blocks == ix->n_holder_blocks, "the count of holder blocks");
    must(check, check->n_named == ix->names.n, "names of blocks that aren't there");
    must(check, check->n_tmaps == ix->tmaps.n_live, "tmaps that no entry has");
    must(check, check->n_aliases == ix->n_aliases, "aliases of places that aren't held");
    must(check, ix->alias_names.n == ix->n_aliases && ix->alias_places.n == ix->n_aliases,
         "the alias tables");
    must(check,
         ix->holder_ids.n == ix->n_holders && ix->holders.n_live == ix->n_holders + ix->n_overlays,
         "the count of holders");
    for (int t = 0; t < KV_N_TIERS; t++)
        must(check, check->tiers[t] == ix->n_tier_blocks[t], "the count of blocks in a tier");
    for (uint32_t id = 0; id < ix->holders.n_used; id++) {
        const struct kvi_holder *holder = kvi_holder_at(ix, id);
        struct kid_count roots = {id, 0};

        if (!holder)
            continue;
        kvi_kids_each(&ix->root, count_kid, &roots);
        must(check, roots.n == holder->n_roots, "a holder's top-level chains");
        blocks += holder->main ? 0 : holder->blocks;
    }
    must(check, blocks == ix->n_holder_blocks, "the holders' blocks");
    must(check, !ix->dirty_head && !ix->dirty_tail, "a queue that isn't empty");
}

/* Check the records in the tables beside the tree. */
static void check_beside(struct check *check)
{
    struct kvi_index *ix = check->ix;
    uint64_t n_parked = 0, n_copies = 0, n_seen = 0;
    struct kvi_place place;

    for (uint32_t id = 0; id < ix->holders.n_used; id++) {
        const struct kvi_holder *holder = kvi_holder_at(ix, id);

        if (!holder)
            continue;
        n_parked += holder->n_parked;
        n_copies += holder->n_copies;
        for (uint64_t i = 0, at = holder->oldest; i < holder->n_parked; i++) {
            const struct kvi_parked *parked = &ix->parking.items[at];

            at = parked->newer;
            n_seen++;
            must(check, parked->mask && parked->holder == id, "a parked block in no tier");
            must(check, kvi_parked_find(ix, holder, parked->hash) == parked,
                 "a parked block that isn't found");
            must(check, !kvi_locate(ix, holder, parked->hash, &place, NULL),
                 "a block parked and in the tree");
            must(check, !kvi_locate(ix, holder, parked->parent, &place, NULL),
                 "a block parked below one in the tree");
        }
    }
    must(check, n_parked == ix->parking.n && n_seen == n_parked, "the count of parked blocks");
    must(check, ix->parking.by_name.n == n_parked, "the table of parked blocks");
    must(check, n_copies == ix->copies.n && ix->copies.by_hash.n == n_copies,
         "the count of copies");
    for (size_t i = 0; i < ix->copies.n; i++) {
        const struct kvi_copy *copy = &ix->copies.items[i];
        const struct kvi_holder *holder = kvi_holder_at(ix, copy->holder);
        const struct kvi_parked *parked;
        uint32_t mask = 0;

        if (!must(check, holder != NULL, "a copy of no holder"))
            return;
        parked = kvi_parked_find(ix, holder, copy->hash);
        if (parked)
            mask = parked->mask;
        else if (kvi_locate(ix, holder, copy->hash, &place, NULL))
            mask = kvi_mask_at(ix, kvi_who_get(place.entry), place.off);
        must(check, mask >> copy->tier & 1 && copy->count, "copies of a block that isn't there");
    }
}

const char *kvi_check(struct kvi_index *ix)
{
    struct check check = {.ix = ix};

    kvi_lock(ix);
    walk(&check);
    if (!check.wrong)
        check_totals(&check);
    if (!check.wrong)
        check_beside(&check);
    pthread_mutex_unlock(&ix->lock);
    return check.wrong;
}
