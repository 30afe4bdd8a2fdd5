// SPDX-License-Identifier: Apache-2.0
/*
 * Last step of a call: trim, remove, or join with a neighbour each chain that lost holders. Until
 * then these chains wait in a queue.
 */
#include "index/tree/kids.h"
#include "index/tree/shape.h"

void kvi_mark_dirty(struct kvi_index *ix, struct kvi_chain *chain)
{
    if (chain->flags & KVI_DIRTY)
        return;
    chain->flags |= KVI_DIRTY;
    chain->link.word = 0;
    if (ix->dirty_tail)
        ix->dirty_tail->link.word = (uintptr_t)chain;
    else
        ix->dirty_head = chain;
    ix->dirty_tail = chain;
}

/* Cut a chain to its first @keep blocks, as no holder has the others. */
static void trim(struct kvi_index *ix, struct kvi_chain *chain, uint32_t keep)
{
    struct kvi_run run = kvi_chain_run(chain);

    kvi_names_erase(ix, run.pos + keep, run.len - keep);
    kvi_chain_set_run(chain, run.pos, keep);
    kvi_chain_bump(chain);
    kvi_arena_cut(&ix->arena, run.pos + keep);
    kvi_extent_retire(ix, run.pos + keep, chain->capacity - keep);
    chain->capacity = (uint16_t)keep;
    kvi_count(&ix->n_blocks, (uint64_t)keep - run.len);
}

static void trim_to_longest(struct kvi_index *ix, struct kvi_chain *chain)
{
    uint32_t n = kvi_who_count(chain), longest = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t len = kvi_entry_len(kvi_who_get(kvi_who_at(chain, i)));

        if (len > longest) {
            longest = len;
            chain->n_full = 0;
        }
        chain->n_full += len == longest;
    }
    trim(ix, chain, longest);
}

static void unmix(struct kvi_index *ix, struct kvi_chain *chain)
{
    bool mixed = false;

    for (uint32_t i = 0; i < kvi_who_count(chain); i++) {
        kvi_entry_unmix(ix, chain, kvi_who_at(chain, i));
        mixed = mixed || !kvi_entry_mask(kvi_who_get(kvi_who_at(chain, i)));
    }
    if (!mixed)
        chain->flags &= (uint8_t)~KVI_MIXED;
}

static void remove_chain(struct kvi_index *ix, struct kvi_chain *chain)
{
    struct kvi_run run = kvi_chain_run(chain);
    uint64_t key = kvi_first_local(ix, chain);

    kvi_names_erase(ix, run.pos, run.len);
    kvi_kids_remove(ix, chain->parent, key);
    for (struct kvi_cursor *c = ix->cursors; c; c = c->next) {
        if (c->at != chain)
            continue;
        c->at = chain->parent;
        c->after = true;
        c->order = kvi_kids_order(key);
        c->emitted = kvi_chain_run(chain->parent).len;
        c->holder = 0;
    }
    kvi_chain_retire(ix, chain);
    kvi_extent_retire(ix, run.pos - 1, 1u + chain->capacity);
    kvi_count(&ix->n_blocks, (uint64_t)0 - run.len);
    kvi_count(&ix->n_chains, (uint64_t)-1);
}

static void settle_chain(struct kvi_index *ix, struct kvi_chain *chain)
{
    while (kvi_who_count(chain) == 0) {
        struct kvi_chain *parent = chain->parent;

        /* The children are in the queue; the last of them queues this chain again. */
        if (kvi_kids_count(chain))
            return;
        remove_chain(ix, chain);
        chain = parent;
        if (!chain->parent || chain->flags & KVI_DIRTY)
            return;
    }
    if (chain->n_full == 0)
        trim_to_longest(ix, chain);
    if (chain->flags & KVI_MIXED)
        unmix(ix, chain);
    kvi_who_shrink(ix, chain);
    if (kvi_kids_only(chain->parent) == chain) {
        struct kvi_chain *parent = chain->parent, *joint = kvi_chain_join(ix, parent);

        chain = joint != parent ? joint : chain;
    }
    (void)kvi_chain_join(ix, chain);
}

void kvi_settle(struct kvi_index *ix)
{
    while (ix->dirty_head) {
        struct kvi_chain *chain = ix->dirty_head;

        ix->dirty_head = (struct kvi_chain *)chain->link.word;
        if (!ix->dirty_head)
            ix->dirty_tail = NULL;
        chain->flags &= (uint8_t)~KVI_DIRTY;
        settle_chain(ix, chain);
    }
}
