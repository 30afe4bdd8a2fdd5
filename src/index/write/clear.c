// SPDX-License-Identifier: Apache-2.0
/*
 * Clear whole holders, slice by slice, without the lock between slices: a wide root, or a large
 * tree below one system prompt, takes long, and other holders' writers mustn't wait. The holder's
 * own writers do wait (kvi_holder_await): else a reader could see their latest blocks go and
 * earlier ones stay.
 *
 * A small tree is dropped from its top, so lookups see all of it or nothing. Between slices every
 * invariant holds: a holder in a chain is also in the chain above. Hence a large tree is dropped
 * from below, one small tree at a time, while a flag of the holder hides it from lookups. A cursor,
 * which other writers keep valid, marks the place:
 *
 *     at ── chain whose children are being dropped; sets before `order` are done
 *     ├── small: drop it        ├── large: go down to it     no child left: go up; now it is small
 */
#include "index/tree/kids.h"
#include "index/tree/windows.h"

#define SLICE 256u   /* cost of a slice; dropping one chain costs 1 */
#define PARKED 1024u /* parked blocks that one slice forgets */
#define SET_COST 32u /* cost of walking one set of children */
#define SMALL 64u    /* most chains of a tree that is dropped from its top */
#define SCAN 1024u   /* most children that cost_of visits, the holder's or not */

struct tree {
    uint32_t holder, n; /* n > SMALL: the tree is large */
    /* Children of this chain with blocks of the holder that the walk hasn't seen yet. */
    uint64_t left;
    uint64_t n_scanned;
    const struct kvi_chain *chain[SMALL];
};

static uint64_t kids_of(const struct kvi_index *ix, uint64_t entry)
{
    uint32_t kids = kvi_entry_kids(ix, entry);

    return kids == KVI_AUX_MAX ? UINT64_MAX : kids;
}

static bool add_to_tree(void *arg, struct kvi_chain *kid)
{
    struct tree *tree = arg;

    if (!kvi_who_find(kid, tree->holder))
        return true;
    if (tree->n == SMALL) {
        tree->n++;
        return false;
    }
    tree->chain[tree->n++] = kid;
    return --tree->left > 0;
}

/* Compute the cost of dropping the holder from @top and all below; 0 for a large tree. */
static uint32_t cost_of(const struct kvi_index *ix, uint32_t holder, const struct kvi_chain *top)
{
    struct tree tree;

    tree.holder = holder;
    tree.n = 1;
    tree.n_scanned = 0;
    tree.chain[0] = top;
    for (uint32_t i = 0; i < tree.n; i++) {
        tree.left = kids_of(ix, kvi_who_get(kvi_who_find(tree.chain[i], holder)));
        if (!tree.left)
            continue;
        tree.n_scanned += kvi_kids_count(tree.chain[i]);
        if (tree.left > SMALL || tree.n_scanned > SCAN)
            return 0;
        kvi_kids_each(tree.chain[i], add_to_tree, &tree);
        if (tree.n > SMALL)
            return 0;
    }
    return tree.n + (uint32_t)tree.n_scanned / 16;
}

struct slice {
    struct kvi_drop drop;
    uint32_t left; /* cost that is left in the slice */
    bool stopped;  /* the slice ended before the children did */
    struct kvi_chain *large;
};

static void spend(struct slice *slice, uint32_t cost)
{
    slice->left -= KV_MIN(slice->left, cost);
}

static bool drop_tree(void *arg, struct kvi_chain *kid)
{
    struct slice *slice = arg;
    uint32_t holder = slice->drop.holder->id, cost;
    bool more;

    if (!kvi_who_find(kid, holder))
        return true;
    cost = cost_of(slice->drop.ix, holder, kid);
    if (cost) {
        more = kvi_drop_kid(&slice->drop, kid);
        spend(slice, cost);
    } else {
        slice->large = kid;
        more = false;
    }
    slice->stopped = !more || !slice->left;
    return !slice->stopped;
}

/*
 * Hide the whole tree from lookups. A lookup that noted the version before checks it again, and
 * then sees the flag.
 */
static void hide(struct kvi_holder *holder, struct kvi_chain *top)
{
    atomic_store_explicit(&holder->hidden, true, memory_order_release);
    kvi_chain_bump(top);
}

/*
 * Drop children from the cursor's set on, until the children or the slice end, or a child's tree is
 * large. @n is the number of children with blocks of the holder, at least 1. Returns how many are
 * left.
 */
static uint64_t drop_kids(struct slice *slice, struct kvi_cursor *cursor, uint64_t n)
{
    const struct kvi_chain *seen = slice->drop.ix->dirty_tail;

    slice->drop.left = n;
    slice->stopped = false;
    slice->large = NULL;
    spend(slice, SET_COST);
    kvi_kids_some(cursor->at, &cursor->order, drop_tree, slice);
    n = slice->drop.left;
    kvi_drop_below_queued(&slice->drop, seen);
    if (slice->large) {
        if (!cursor->at->parent)
            hide(slice->drop.holder, slice->large);
        cursor->at = slice->large;
        cursor->order = 0;
    } else if (!slice->stopped && !cursor->order) {
        n = 0; /* the walk saw all of them, even if their number was unknown */
    }
    return n;
}

static void go_up(const struct kvi_index *ix, struct kvi_cursor *cursor)
{
    cursor->order = kvi_kids_order(*kvi_arena_locals(&ix->arena, kvi_chain_run(cursor->at).pos));
    cursor->at = cursor->at->parent;
}

static void drop_slice(struct kvi_index *ix, struct kvi_holder *holder, struct kvi_cursor *cursor)
{
    struct slice slice = {.drop = {.ix = ix, .holder = holder}, .left = SLICE};

    /*
     * The chain was joined with its child, whose children are not done: the cursor is behind the
     * joint.
     */
    if (!cursor->after || cursor->order == UINT64_MAX)
        cursor->order = 0;
    while (slice.left && holder->n_roots) {
        struct kvi_chain *at = cursor->at;
        _Atomic uint64_t *entry = at->parent ? kvi_who_find(at, holder->id) : NULL;
        uint64_t n = entry ? kids_of(ix, kvi_who_get(entry)) : holder->n_roots, left;

        /*
         * Other writers may have joined the chain with one below that the holder had left, and
         * split both.
         */
        if (n == 0 || (at->parent && !entry)) {
            go_up(ix, cursor);
            continue;
        }
        left = drop_kids(&slice, cursor, n);
        if (!entry)
            holder->n_roots = left;
        else if (n != UINT64_MAX || left == 0)
            kvi_entry_set_kids(ix, entry, (uint32_t)left);
    }
    cursor->after = true;
    /* A split moves the cursor to the lower half. */
    cursor->emitted = kvi_chain_run(cursor->at).len;
}

/*
 * Clear the holder. The caller holds the lock and has marked @holder as being cleared by this call.
 */
static void drop_all(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_cursor cursor = {.at = &ix->root, .after = true};

    kvi_cursor_add(ix, &cursor);
    while (holder->n_roots || holder->n_parked) {
        drop_slice(ix, holder, &cursor);
        (void)kvi_parked_forget(ix, holder, PARKED);
        kvi_unlock(ix); /* settles the queue, which is empty for the next slice */
        kvi_lock_in_turn(ix);
    }
    atomic_store_explicit(&holder->hidden, false,
                          memory_order_release); /* the holder has no block to show */
    kvi_cursor_remove(ix, &cursor);
    /* Frees the garbage of many slices; the next write may never come. */
    kv_limbo_collect(&ix->limbo, 1);
}

void kvi_clear_marked(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_holder *overlay;

    drop_all(ix, holder);
    kvi_copies_forget_doubt(holder);
    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    {
        drop_all(ix, overlay);
        kvi_copies_forget_doubt(overlay);
    }
    holder->n_lost = 0;
    holder->lost_more = false;
}

/*
 * Clear the holder called @key; @leave drops the holder itself, too. Returns false when @key is
 * unknown.
 */
static bool clear_holder(struct kvi_index *ix, struct kv_holder key, bool leave)
{
    struct kvi_holder *who;

    kvi_lock(ix);
    who = kvi_holder_await(ix, key);
    if (who) {
        who->clearing = &who;
        kvi_clear_marked(ix, who);
        who->clearing = NULL;
        if (leave)
            kvi_holder_drop(ix, who);
        pthread_cond_broadcast(&ix->cleared);
    }
    kvi_unlock(ix);
    return who != NULL;
}

int kvi_clear(struct kvi_index *index, struct kv_holder holder)
{
    (void)clear_holder(index, holder, false);
    return 0;
}

/*
 * Wait until no other call clears a rank of the worker. Then mark all its ranks, before the first
 * one is cleared. Returns their number.
 */
static size_t mark_worker(struct kvi_index *ix, uint64_t worker, const void *call)
{
    size_t n = 0;

    for (uint32_t id = 0; id < ix->holders.n_used; id++) {
        const struct kvi_holder *who = kvi_holder_at(ix, id);

        if (!who || who->main || who->key.worker != worker || !who->clearing)
            continue;
        (void)kvi_holder_await(ix, who->key);
        id = UINT32_MAX; /* start again */
    }
    for (uint32_t id = 0; id < ix->holders.n_used; id++) {
        struct kvi_holder *who = kvi_holder_at(ix, id);

        if (!who || who->main || who->key.worker != worker)
            continue;
        who->clearing = call;
        n++;
    }
    return n;
}

int kvi_remove_holder(struct kvi_index *index, struct kv_holder holder)
{
    return clear_holder(index, holder, true) ? 0 : -ENOENT;
}

int kvi_remove_worker(struct kvi_index *index, uint64_t worker)
{
    struct kvi_holder *who;
    size_t n = 0;

    kvi_lock(index);
    n = mark_worker(index, worker, &n);
    for (uint32_t id = 0; n && id < index->holders.n_used; id++) {
        who = kvi_holder_at(index, id);
        if (who && who->clearing == &n)
            kvi_clear_marked(index, who);
    }
    for (uint32_t id = 0; n && id < index->holders.n_used; id++) { /* mark all ranks at once */
        who = kvi_holder_at(index, id);
        if (who && who->clearing == &n)
            kvi_holder_drop(index, who);
    }
    pthread_cond_broadcast(&index->cleared);
    kvi_unlock(index);
    return n ? 0 : -ENOENT;
}
