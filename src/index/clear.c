// SPDX-License-Identifier: Apache-2.0
/*
 * Emptying whole holders, slice by slice. The lock is let go in between: going through a wide root,
 * or through all that hangs below one system prompt, takes long, and others' writers shouldn't wait
 * for it. The holder's own do (kvi_holder_await), else one could see what it stored last go, and
 * what it stored before stay.
 *
 * Small trees go from the top, so that lookups see each of them whole or not at all. Between slices
 * all that must hold does: nobody is in a chain without being in the one above. So a large tree
 * goes from below, hidden from lookups by a flag of the holder, small tree by small tree; a cursor,
 * which other writers move along, says where that stands:
 *
 *     at ── chain whose children are being dropped; those in sets before `order` are done
 *     ├── small: dropped          ├── large: down to it          no child left: up; now it is small
 */
#include "index/kids.h"
#include "index/windows.h"

#define SLICE 256u   /* cost of a slice: a chain dropped is 1 */
#define PARKED 1024u /* parked blocks that a slice forgets */
#define SET_COST 32u /* ... a set of children gone through */
#define SMALL 64u    /* chains of a tree that goes from the top */
#define SCAN 1024u   /* children in it that are looked at, the holder's or not */

struct tree {
    uint32_t holder, n; /* n > SMALL: too many */
    uint64_t left;      /* children of this chain that the holder is in, not yet seen */
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
    uint32_t left; /* of SLICE */
    bool stopped;  /* before the end of the children */
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

/* For lookups the whole tree goes now. Who noted the version before looks again, and sees the
 * flag. */
static void hide(struct kvi_holder *holder, struct kvi_chain *top)
{
    atomic_store_explicit(&holder->hidden, true, memory_order_release);
    kvi_chain_bump(top);
}

/* From the set of children where the cursor stands on, until it ends, the slice does, or one is
 * large. @n: children that the holder is in, at least 1. Returns how many are left. */
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
        n = 0; /* all were seen, if the number wasn't known */
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

    /* The chain was joined with its child, which isn't done because the cursor is behind it. */
    if (!cursor->after || cursor->order == UINT64_MAX)
        cursor->order = 0;
    while (slice.left && holder->n_roots) {
        struct kvi_chain *at = cursor->at;
        _Atomic uint64_t *entry = at->parent ? kvi_who_find(at, holder->id) : NULL;
        uint64_t n = entry ? kids_of(ix, kvi_who_get(entry)) : holder->n_roots, left;

        /* Others may have joined the chain with one below, which the holder had left, and split both. */
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
    cursor->emitted = kvi_chain_run(cursor->at).len; /* a split moves it to the lower half */
}

/* With the lock; @holder is marked as being cleared by this call. */
static void drop_all(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_cursor cursor = {.at = &ix->root, .after = true};

    kvi_cursor_add(ix, &cursor);
    while (holder->n_roots || holder->n_parked) {
        drop_slice(ix, holder, &cursor);
        (void)kvi_parked_forget(ix, holder, PARKED);
        kvi_unlock(ix); /* settles: the queue is empty for the next slice */
        kvi_lock_in_turn(ix);
    }
    atomic_store_explicit(&holder->hidden, false,
                          memory_order_release); /* it has nothing left to show */
    kvi_cursor_remove(ix, &cursor);
    kv_limbo_collect(&ix->limbo, 1); /* what many slices left; the next write may never come */
}

/* The same of the holder's windows. */
static void drop_with_parts(struct kvi_index *ix, struct kvi_holder *holder)
{
    struct kvi_holder *part;

    drop_all(ix, holder);
    KVI_EACH_PART(kvi_windows_of(holder), part)
    drop_all(ix, part);
}

/* Drops all that @key holds and, with @leave, the holder itself. False: it is unknown. */
static bool clear_holder(struct kvi_index *ix, struct kv_holder key, bool leave)
{
    struct kvi_holder *who;

    kvi_lock(ix);
    who = kvi_holder_await(ix, key);
    if (who) {
        who->clearing = &who;
        drop_with_parts(ix, who);
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

/* Wait until no other call clears a rank of the worker, then mark them all, before the first one
 * goes. Returns their number. */
static size_t mark_worker(struct kvi_index *ix, uint64_t worker, const void *call)
{
    size_t n = 0;

    for (uint32_t id = 0; id < ix->holders.n_used; id++) {
        const struct kvi_holder *who = kvi_holder_at(ix, id);

        if (!who || who->main || who->key.worker != worker || !who->clearing)
            continue;
        (void)kvi_holder_await(ix, who->key);
        id = UINT32_MAX; /* from the beginning */
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
            drop_with_parts(index, who);
    }
    for (uint32_t id = 0; n && id < index->holders.n_used; id++) { /* all ranks at once */
        who = kvi_holder_at(index, id);
        if (who && who->clearing == &n)
            kvi_holder_drop(index, who);
    }
    pthread_cond_broadcast(&index->cleared);
    kvi_unlock(index);
    return n ? 0 : -ENOENT;
}
