// SPDX-License-Identifier: Apache-2.0
/*
 * Move blocks between the tree and the parked ones (parked.h).
 *
 * Parking walks a holder's part of a subtree breadth first, before the cut that removes it from the
 * tree. It parks at most the holder's limit of blocks, those nearest to the cut, and forgets the
 * rest.
 *
 * Attaching walks depth first. It stores the parked children of a block in runs. A run goes on
 * while each block has a child with the same tiers; then come the children of the run's last block.
 * No function recurses: a stack holds the names whose children are still to come.
 */
#include "index/tree/kids.h"
#include "index/write/store.h"

#define RUN_MAX 1024u

/* -- parking ----------------------------------------------------------------------------------- */

struct below {
    struct kvi_index *ix;
    struct kvi_holder *holder;
    size_t room; /* number of blocks that may still be parked */
    size_t n;    /* in scratch->hanging */
    uint64_t above, left;
    bool failed;
};

static bool hang(void *arg, struct kvi_chain *kid)
{
    struct below *below = arg;
    struct kvi_scratch *scratch = below->ix->scratch;

    if (!kvi_who_find(kid, below->holder->id))
        return true;
    if (kvi_mem_grow(&below->ix->mem, (void **)&scratch->hanging, &scratch->hanging_capacity,
                     below->n + 1, sizeof(scratch->hanging[0]))) {
        below->failed = true;
        return false;
    }
    scratch->hanging[below->n++] = (struct kvi_hanging){kid, below->above};
    return --below->left > 0;
}

/* Park the holder's blocks of @chain from @off on, and queue the children. */
static void park_piece(struct below *below, const struct kvi_chain *chain, uint32_t off)
{
    struct kvi_index *ix = below->ix;
    uint64_t entry = kvi_who_get(kvi_who_find(chain, below->holder->id));
    uint32_t pos = kvi_chain_run(chain).pos, kids = kvi_entry_kids(ix, entry);
    const uint64_t *locals = kvi_arena_locals(&ix->arena, pos);

    for (uint32_t i = off; i < kvi_entry_len(entry); i++) {
        uint64_t name = kvi_name_of(ix, below->holder, pos + i);
        uint32_t mask = kvi_mask_at(ix, entry, i);

        if (below->room) {
            below->room--;
            (void)kvi_park(ix, below->holder, below->above, (struct kv_block){name, locals[i]},
                           mask);
        } else {
            kvi_parking_lose(ix, below->holder, mask, name);
        }
        below->above = name;
    }
    if (!kids)
        return;
    below->left = kids == KVI_AUX_MAX ? UINT64_MAX : kids;
    kvi_kids_each(chain, hang, below);
}

void kvi_park_below(struct kvi_index *ix, struct kvi_holder *holder, const struct kvi_chain *chain,
                    uint32_t off)
{
    struct below below = {.ix = ix, .holder = holder, .room = ix->parking.max_holder};

    below.above = kvi_name_of(ix, holder, kvi_chain_run(chain).pos + off);
    park_piece(&below, chain, off + 1);
    for (size_t i = 0; i < below.n; i++) {
        struct kvi_hanging next = ix->scratch->hanging[i];

        below.above = next.above;
        park_piece(&below, next.chain, 0);
    }
    if (below.failed) /* blocks not visited are forgotten; records of their copies may stay */
        kvi_parking_lose_more(ix, holder);
}

/* -- attaching --------------------------------------------------------------------------------- */

static bool push_name(struct kvi_index *ix, size_t *n, uint64_t name)
{
    struct kvi_scratch *scratch = ix->scratch;

    if (kvi_mem_grow(&ix->mem, (void **)&scratch->names, &scratch->names_capacity, *n + 1,
                     sizeof(scratch->names[0])))
        return false;
    scratch->names[(*n)++] = name;
    return true;
}

/* Take a run of parked blocks out of their table, each below the one before. Returns its length. */
static size_t take_run(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_parked *parked,
                       uint32_t *ret_mask)
{
    struct kvi_scratch *scratch = ix->scratch;
    size_t n = 0;

    *ret_mask = parked->mask;
    while (parked && parked->mask == *ret_mask && n < RUN_MAX) {
        struct kv_block block = {parked->hash, parked->local};

        if (kvi_mem_grow(&ix->mem, (void **)&scratch->run, &scratch->run_capacity, n + 1,
                         sizeof(scratch->run[0])))
            break;
        scratch->run[n++] = block;
        kvi_unpark(ix, holder, parked);
        parked = kvi_parked_child(ix, holder, block.hash);
    }
    return n;
}

static void give_up(struct kvi_index *ix, struct kvi_holder *holder, size_t n, uint32_t mask)
{
    for (size_t i = 0; i < n; i++)
        kvi_parking_lose(ix, holder, mask, ix->scratch->run[i].hash);
}

/* Attach one run. Returns true when there was one and it is now in the tree. */
static bool attach_run(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
                       size_t *n_names)
{
    struct kvi_parked *parked = kvi_parked_child(ix, holder, parent);
    struct kvi_place place;
    uint32_t mask = 0;
    size_t n;
    int nearest;

    /* Another child has taken the name. */
    if (!parked || !kvi_locate(ix, holder, parent, &place, NULL))
        return false;
    n = take_run(ix, holder, parked, &mask);
    if (!n)
        return false;
    nearest = __builtin_ctz(mask);
    if (kvi_store_again(ix, holder, (enum kv_tier)nearest, parent, ix->scratch->run, n)) {
        give_up(ix, holder, n, mask);
        return true; /* continue with the next child */
    }
    for (size_t i = 0; i < n; i++) {
        if (mask & (mask - 1))
            kvi_give(ix, holder, ix->scratch->run[i].hash, mask);
        (void)push_name(ix, n_names, ix->scratch->run[i].hash);
    }
    return true;
}

void kvi_attach(struct kvi_index *ix, struct kvi_holder *holder, const struct kv_block *blocks,
                size_t n)
{
    size_t n_names = 0;

    for (size_t i = 0; i < n; i++)
        if (kvi_parked_child(ix, holder, blocks[i].hash))
            (void)push_name(ix, &n_names, blocks[i].hash);
    while (n_names && holder->n_parked)
        if (!attach_run(ix, holder, ix->scratch->names[n_names - 1], &n_names))
            n_names--;
}
