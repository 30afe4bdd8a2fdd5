// SPDX-License-Identifier: Apache-2.0
/*
 * Change the shape of the tree without changing an answer. New chains with the same content replace
 * a chain by one store into its parent; the old chain is retired. tree.h has the rules.
 */
#include <assert.h>
#include <string.h>

#include "index/tree/kids.h"
#include "index/tree/shape.h"

/* Less than the limit, so that a chain cut at the limit isn't joined and cut again. */
#define JOIN_MAX (KVI_CHAIN_MAX / 2)

void kvi_extent_retire(struct kvi_index *ix, uint32_t pos, uint32_t n)
{
    struct kv_retired *object = (struct kv_retired *)(void *)kvi_arena_engines(&ix->arena, pos);

    kv_limbo_retire(&ix->limbo, object, KVI_KIND_EXTENT, (size_t)n * 2 * sizeof(uint64_t));
}

static void set_owner(struct kvi_index *ix, uint32_t extent, struct kvi_chain *chain)
{
    *kvi_arena_engines(&ix->arena, extent) = (uintptr_t)chain;
}

static void copy_blocks(struct kvi_index *ix, const struct kvi_chain *chain, uint32_t extra,
                        uint32_t from, uint32_t to, uint32_t n)
{
    memcpy(kvi_arena_locals(&ix->arena, to), kvi_arena_locals(&ix->arena, from),
           n * sizeof(uint64_t));
    memcpy(kvi_arena_engines(&ix->arena, to), kvi_arena_engines(&ix->arena, from),
           n * sizeof(uint64_t));
    kvi_names_move(ix, chain, extra, from, to, n);
}

static void retire_tmaps(struct kvi_index *ix, const struct kvi_chain *chain)
{
    for (uint32_t i = 0; i < kvi_who_count(chain); i++) {
        uint64_t entry = kvi_who_get(kvi_who_at(chain, i));

        if (!kvi_entry_mask(entry))
            kvi_tmap_retire(ix, kvi_tmap_at(ix, entry));
    }
}

/* Free a chain under construction, which no reader has seen. */
static void discard(struct kvi_index *ix, struct kvi_chain *chain)
{
    if (!chain)
        return;
    for (uint32_t i = 0; i < kvi_who_count(chain); i++) {
        uint64_t entry = kvi_who_get(kvi_who_at(chain, i));

        if (!kvi_entry_mask(entry))
            kvi_tmap_free(ix, kvi_tmap_at(ix, entry));
    }
    kvi_chain_discard(ix, chain);
}

static bool set_parent(void *arg, struct kvi_chain *kid)
{
    kid->parent = arg;
    return true;
}

static void take_kids(struct kvi_chain *chain, const struct kvi_chain *from)
{
    atomic_store_explicit(&chain->kids, atomic_load_explicit(&from->kids, memory_order_relaxed),
                          memory_order_release);
    kvi_kids_each(chain, set_parent, chain);
}

void kvi_cursor_add(struct kvi_index *ix, struct kvi_cursor *cursor)
{
    cursor->next = ix->cursors;
    ix->cursors = cursor;
}

void kvi_cursor_remove(struct kvi_index *ix, const struct kvi_cursor *cursor)
{
    struct kvi_cursor **at = &ix->cursors;

    while (*at != cursor)
        at = &(*at)->next;
    *at = cursor->next;
}

/* -- splitting --------------------------------------------------------------------------------- */

/*
 * Add blocks from..to of @entry as an entry of @chain, which has room. With @room > 0, a mixed
 * entry stays mixed, with room for that many blocks: the caller prepared it for them.
 */
static int add_piece(struct kvi_index *ix, struct kvi_chain *chain, uint64_t entry, uint32_t from,
                     uint32_t to, uint32_t kids, uint32_t room)
{
    uint32_t mask = kvi_mask_at(ix, entry, from), i = from;
    struct kvi_tmap *tmap;

    while (i < to && kvi_mask_at(ix, entry, i) == mask)
        i++;
    if (i == to && !(room && !kvi_entry_mask(entry))) {
        kvi_who_add(chain, kvi_entry(kvi_entry_holder(entry), to - from, mask, kids));
        return 0;
    }
    tmap = kvi_tmap_new(ix, KV_MAX(to - from, room), 0);
    if (!tmap)
        return -ENOMEM;
    tmap->kids = kids;
    for (i = from; i < to; i++)
        kvi_tmap_set(chain, tmap, i - from, i - from + 1, kvi_mask_at(ix, entry, i), true);
    kvi_who_add(chain, kvi_entry(kvi_entry_holder(entry), to - from, 0, tmap->number));
    chain->flags |= KVI_MIXED;
    return 0;
}

static int build_halves(struct kvi_index *ix, struct kvi_split *split, uint32_t holder)
{
    uint32_t n = kvi_who_count(split->chain), at = split->at;
    int rc = 0;

    for (uint32_t i = 0; i < n && !rc; i++) {
        uint64_t entry = kvi_who_get(kvi_who_at(split->chain, i));
        uint32_t len = kvi_entry_len(entry);

        rc = add_piece(ix, split->head, entry, 0, KV_MIN(len, at), len > at,
                       kvi_entry_holder(entry) == holder ? at : 0);
        split->head->n_full += !rc && len >= at;
        if (!rc && len > at)
            rc = add_piece(ix, split->tail, entry, at, len, kvi_entry_kids(ix, entry), 0);
    }
    split->tail->n_full = split->chain->n_full;
    return rc;
}

int kvi_split_prepare(struct kvi_index *ix, struct kvi_chain *chain, uint32_t at, uint32_t holder,
                      struct kvi_split *ret)
{
    uint32_t len = kvi_chain_run(chain).len, n = kvi_who_count(chain);

    assert(at > 0 && at < len && !(chain->flags & KVI_DIRTY));
    *ret = (struct kvi_split){.chain = chain, .at = at, .holder = holder, .extent = KVI_NO_POS};
    ret->head = kvi_chain_new(ix);
    ret->tail = kvi_chain_new(ix);
    if (!ret->head || !ret->tail || kvi_who_reserve(ix, ret->head, n + 1) ||
        kvi_who_reserve(ix, ret->tail, n) || build_halves(ix, ret, holder))
        goto fail;
    ret->extent = kvi_arena_alloc(&ix->arena, 1 + KV_MIN(at, len - at));
    if (ret->extent == KVI_NO_POS)
        goto fail;
    /* Give the head its child now, so that room can be made beside it; the key is already there. */
    kvi_chain_set_run(ret->tail, kvi_chain_run(chain).pos + at, len - at);
    atomic_store_explicit(&ret->head->kids, (uintptr_t)ret->tail, memory_order_relaxed);
    return 0;
fail:
    kvi_split_cancel(ix, ret);
    return -ENOMEM;
}

void kvi_split_cancel(struct kvi_index *ix, struct kvi_split *split)
{
    if (split->head)
        kvi_kids_free(ix, atomic_load_explicit(&split->head->kids, memory_order_relaxed));
    discard(ix, split->head);
    discard(ix, split->tail);
    if (split->extent != KVI_NO_POS)
        kvi_arena_free(&ix->arena, split->extent);
    *split = (struct kvi_split){.extent = KVI_NO_POS};
}

/* Move the smaller half to the new extent; the other stays in place. */
static void split_blocks(struct kvi_index *ix, const struct kvi_split *split)
{
    struct kvi_chain *chain = split->chain, *head = split->head, *tail = split->tail;
    struct kvi_run run = kvi_chain_run(chain);
    uint32_t at = split->at, rest = run.len - at, fresh = split->extent + 1;

    if (at <= rest) {
        copy_blocks(ix, chain, split->holder, run.pos, fresh, at);
        set_owner(ix, split->extent, head);
        kvi_chain_set_run(head, fresh, at);
        head->capacity = (uint16_t)at;
        /*
         * Turn the slot of the head's last block into the tail's header. Readers only look at
         * locals.
         */
        kvi_arena_cut(&ix->arena, run.pos + at - 1);
        set_owner(ix, run.pos + at - 1, tail);
        kvi_chain_set_run(tail, run.pos + at, rest);
        tail->capacity = (uint16_t)(chain->capacity - at);
        kvi_extent_retire(ix, run.pos - 1, at);
    } else {
        copy_blocks(ix, chain, split->holder, run.pos + at, fresh, rest);
        set_owner(ix, split->extent, tail);
        kvi_chain_set_run(tail, fresh, rest);
        tail->capacity = (uint16_t)rest;
        kvi_arena_cut(&ix->arena, run.pos + at);
        set_owner(ix, run.pos - 1, head);
        kvi_chain_set_run(head, run.pos, at);
        head->capacity = (uint16_t)at;
        kvi_extent_retire(ix, run.pos + at, chain->capacity - at);
    }
}

static void move_cursors(struct kvi_index *ix, const struct kvi_chain *from, uint32_t above,
                         struct kvi_chain *to, int32_t shift)
{
    for (struct kvi_cursor *c = ix->cursors; c; c = c->next) {
        if (c->at != from || c->emitted < above)
            continue;
        c->at = to;
        c->emitted = (uint32_t)((int32_t)c->emitted + shift);
        c->holder = 0;
    }
}

void kvi_split_commit(struct kvi_index *ix, struct kvi_split *split)
{
    struct kvi_chain *chain = split->chain, *head = split->head, *tail = split->tail;
    uint64_t key = kvi_first_local(ix, chain);

    split_blocks(ix, split);
    head->flags |= chain->flags;
    tail->flags |= chain->flags;
    head->parent = chain->parent;
    tail->parent = head;
    take_kids(tail, chain);
    kvi_kids_replace(chain->parent, key, head);
    move_cursors(ix, chain, split->at, tail, -(int32_t)split->at);
    move_cursors(ix, chain, 0, head, 0);
    retire_tmaps(ix, chain);
    kvi_chain_retire(ix, chain);
    kvi_count(&ix->n_chains, 1);
}

int kvi_chain_move(struct kvi_index *ix, struct kvi_chain *chain, uint32_t capacity)
{
    struct kvi_run run = kvi_chain_run(chain);
    uint32_t extent = kvi_arena_alloc(&ix->arena, capacity + 1);

    if (extent == KVI_NO_POS)
        return -ENOMEM;
    copy_blocks(ix, chain, UINT32_MAX, run.pos, extent + 1, run.len);
    set_owner(ix, extent, chain);
    kvi_chain_set_run(chain, extent + 1, run.len);
    kvi_chain_bump(chain);
    kvi_extent_retire(ix, run.pos - 1, 1u + chain->capacity);
    chain->capacity = (uint16_t)capacity;
    return 0;
}

/* -- joining ----------------------------------------------------------------------------------- */

/* Add @upper and @lower (0: none) of the same holder to @chain as one entry. */
static int add_joint(struct kvi_index *ix, struct kvi_chain *chain, uint64_t upper, uint64_t lower)
{
    uint32_t len = kvi_entry_len(upper), more = lower ? kvi_entry_len(lower) : 0;
    uint32_t kids = lower ? kvi_entry_kids(ix, lower) : 0, mask = kvi_entry_mask(upper);
    struct kvi_tmap *tmap;

    if (!lower)
        return add_piece(ix, chain, upper, 0, len, 0, 0);
    if (mask && mask == kvi_entry_mask(lower)) {
        kvi_who_add(chain, kvi_entry(kvi_entry_holder(upper), len + more, mask, kids));
        return 0;
    }
    tmap = kvi_tmap_new(ix, len + more, 0);
    if (!tmap)
        return -ENOMEM;
    tmap->kids = kids;
    for (uint32_t i = 0; i < len + more; i++)
        kvi_tmap_set(chain, tmap, i, i + 1,
                     i < len ? kvi_mask_at(ix, upper, i) : kvi_mask_at(ix, lower, i - len), true);
    kvi_who_add(chain, kvi_entry(kvi_entry_holder(upper), len + more, 0, tmap->number));
    chain->flags |= KVI_MIXED;
    return 0;
}

static struct kvi_chain *build_joint(struct kvi_index *ix, const struct kvi_chain *upper,
                                     const struct kvi_chain *lower)
{
    uint32_t n = kvi_who_count(upper);
    struct kvi_chain *chain = kvi_chain_new(ix);

    if (!chain || kvi_who_reserve(ix, chain, n))
        goto fail;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t entry = kvi_who_get(kvi_who_at(upper, i));
        _Atomic uint64_t *below = kvi_who_find(lower, kvi_entry_holder(entry));

        if (add_joint(ix, chain, entry, below ? kvi_who_get(below) : 0))
            goto fail;
    }
    return chain;
fail:
    discard(ix, chain);
    return NULL;
}

static void join_cursors(struct kvi_index *ix, const struct kvi_chain *upper,
                         const struct kvi_chain *lower, struct kvi_chain *chain)
{
    uint32_t len = kvi_chain_run(upper).len, rest = kvi_chain_run(lower).len;

    for (struct kvi_cursor *c = ix->cursors; c; c = c->next) {
        if (c->at != upper || !c->after)
            continue;
        if (c->order < kvi_kids_order(kvi_first_local(ix, lower))) { /* the lower is to come */
            c->after = false;
            continue;
        }
        c->emitted = len + rest; /* the lower chain is done */
        c->order = UINT64_MAX;
        c->at = chain;
        c->holder = 0;
    }
    move_cursors(ix, upper, 0, chain, 0);
    move_cursors(ix, lower, 0, chain, (int32_t)len);
}

struct kvi_chain *kvi_chain_join(struct kvi_index *ix, struct kvi_chain *upper)
{
    struct kvi_chain *lower = upper->parent ? kvi_kids_only(upper) : NULL, *chain;
    struct kvi_run first = kvi_chain_run(upper), rest;
    uint32_t extent;

    if (!lower || (upper->flags | lower->flags) & KVI_DIRTY)
        return upper;
    rest = kvi_chain_run(lower);
    if (first.len + rest.len > JOIN_MAX)
        return upper;
    chain = build_joint(ix, upper, lower);
    if (!chain)
        return upper;
    extent = kvi_arena_alloc(&ix->arena, 1 + first.len + rest.len);
    if (extent == KVI_NO_POS) {
        discard(ix, chain);
        return upper;
    }
    copy_blocks(ix, upper, UINT32_MAX, first.pos, extent + 1, first.len);
    copy_blocks(ix, lower, UINT32_MAX, rest.pos, extent + 1 + first.len, rest.len);
    set_owner(ix, extent, chain);
    kvi_chain_set_run(chain, extent + 1, first.len + rest.len);
    chain->capacity = (uint16_t)(first.len + rest.len);
    chain->n_full = lower->n_full;
    chain->flags |= upper->flags | lower->flags;
    chain->parent = upper->parent;
    take_kids(chain, lower);
    kvi_kids_replace(chain->parent, kvi_first_local(ix, chain), chain);
    join_cursors(ix, upper, lower, chain);
    retire_tmaps(ix, upper);
    retire_tmaps(ix, lower);
    kvi_extent_retire(ix, first.pos - 1, 1u + upper->capacity);
    kvi_extent_retire(ix, rest.pos - 1, 1u + lower->capacity);
    kvi_chain_retire(ix, upper);
    kvi_chain_retire(ix, lower);
    kvi_count(&ix->n_chains, (uint64_t)-1);
    return chain;
}
