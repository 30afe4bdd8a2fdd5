// SPDX-License-Identifier: Apache-2.0
/*
 * A dump walks the tree depth first, in the children's own order. It holds the lock for one chain,
 * or for some of a chain's holders, at a time. Between two steps it is only a cursor in the index's
 * list. A writer that splits, joins or removes the chain moves the cursor along. So no step has to
 * find its way back, and blocks that stay are reported exactly once.
 *
 * A dump of some holders leaves out each chain that none of them has: a holder in a chain has all of
 * the chains above it, so nothing below is theirs either.
 */
#include "index/dump/chosen.h"
#include "index/tree/kids.h"

#define BATCH 32u   /* holders whose piece of a chain one step copies */
#define AHEAD 2048u /* children of a wide chain that are sorted in advance */
#define FETCH 8u    /* children by which prefetches are ahead */
#define SKIPS 256u  /* children that one step leaves out */

/* One holder's piece of the chain. */
struct piece {
    struct kv_holder key;
    uint32_t from, len; /* report blocks from..len now */
    bool has_parent;
    uint64_t parent; /* the holder's name for the block above the chain */
    bool renamed;    /* the holder has names of its own, in `blocks` */
    uint8_t mask[KVI_CHAIN_MAX];
    struct kv_block blocks[KVI_CHAIN_MAX];
};

struct dump {
    struct kvi_index *ix;
    const struct kvi_chosen *chosen;
    struct kvi_cursor cursor;
    uint64_t *ids; /* holder << 32 | place in the list, sorted */
    size_t ids_capacity;
    const struct kvi_chain *wide; /* chain whose next children are in ahead */
    size_t n_ahead, at_ahead;
    struct kvi_kid_key ahead[AHEAD];
    uint32_t n_pieces;
    struct kv_block blocks[KVI_CHAIN_MAX]; /* under the names of most holders */
    struct piece piece[BATCH];
};

static int compare_ids(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Sort the chain's chosen holders from cursor.holder on. Returns their number or -ENOMEM. */
static long sort_holders(struct dump *dump, const struct kvi_chain *chain)
{
    uint32_t n = kvi_who_count(chain), kept = 0;

    if (n > dump->ids_capacity) {
        uint64_t *ids = realloc(dump->ids, 2 * n * sizeof(*ids));

        if (!ids)
            return -ENOMEM;
        dump->ids = ids;
        dump->ids_capacity = 2 * (size_t)n;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = kvi_entry_holder(kvi_who_get(kvi_who_at(chain, i)));

        if (id >= dump->cursor.holder && kvi_is_chosen(dump->chosen, id))
            dump->ids[kept++] = (uint64_t)id << 32 | i;
    }
    if (kept > 1)
        qsort(dump->ids, kept, sizeof(dump->ids[0]), compare_ids);
    return kept;
}

static void copy_piece(struct dump *dump, const struct kvi_chain *chain, uint64_t entry)
{
    const struct kvi_index *ix = dump->ix;
    const struct kvi_holder *holder = kvi_holder_at(ix, kvi_entry_holder(entry));
    uint32_t pos = kvi_chain_run(chain).pos;
    struct piece *piece = &dump->piece[dump->n_pieces];

    if (holder->main) /* kvi_dump_windows reports overlays */
        return;
    piece->from = dump->cursor.emitted;
    piece->len = KV_MIN(kvi_entry_len(entry), dump->cursor.upto);
    if (piece->len <= piece->from)
        return;
    piece->key = holder->key;
    piece->has_parent = chain->parent->parent != NULL;
    if (piece->has_parent) {
        struct kvi_run above = kvi_chain_run(chain->parent);

        piece->parent = kvi_name_of(ix, holder, above.pos + above.len - 1);
    }
    piece->renamed = holder->n_aliases > 0;
    for (uint32_t i = 0; i < piece->len; i++) {
        piece->mask[i] = (uint8_t)kvi_mask_at(ix, entry, i);
        if (piece->renamed)
            piece->blocks[i] =
                (struct kv_block){kvi_name_of(ix, holder, pos + i), dump->blocks[i].tokens_hash};
    }
    dump->n_pieces++;
}

/* Copy the next holders' pieces. Returns 0 or -ENOMEM. */
static int copy_chain(struct dump *dump)
{
    struct kvi_cursor *cursor = &dump->cursor;
    const struct kvi_chain *chain = cursor->at;
    struct kvi_run run = kvi_chain_run(chain);
    const uint64_t *locals = kvi_arena_locals(&dump->ix->arena, run.pos);
    const uint64_t *engines = kvi_arena_engines(&dump->ix->arena, run.pos);
    long n = sort_holders(dump, chain), taken = KV_MIN(n, (long)BATCH);

    if (n < 0)
        return (int)n;
    if (!cursor->holder)
        cursor->upto = run.len;
    for (uint32_t i = 0; i < run.len; i++)
        dump->blocks[i] = (struct kv_block){engines[i], locals[i]};
    for (long i = 0; i < taken; i++)
        copy_piece(dump, chain, kvi_who_get(kvi_who_at(chain, (uint32_t)dump->ids[i])));
    if (taken < n) {
        cursor->holder = (uint32_t)(dump->ids[taken - 1] >> 32) + 1;
    } else {
        cursor->holder = 0;
        cursor->emitted = KV_MIN(cursor->upto, run.len);
    }
    return 0;
}

/* Prefetch what the steps to come read of the children sorted before: that is what a walk waits for. */
static void fetch_ahead(const struct dump *dump, const struct kvi_chain *chain)
{
    size_t near = dump->at_ahead + FETCH, far = near + FETCH;
    const struct kvi_arena *arena = &dump->ix->arena;
    struct kvi_chain *kid;

    if (far < dump->n_ahead)
        __builtin_prefetch(kvi_kids_find(chain, dump->ahead[far].key));
    if (near >= dump->n_ahead || !(kid = kvi_kids_find(chain, dump->ahead[near].key)))
        return;
    __builtin_prefetch(kvi_arena_locals(arena, kvi_chain_run(kid).pos));
    __builtin_prefetch(kvi_arena_engines(arena, kvi_chain_run(kid).pos));
}

/*
 * Return the child after cursor.order from the children sorted before, or NULL. Children added
 * since then may be left out. Another chain may have the wide chain's address by now; the list is
 * then forgotten, because the first child of a chain is asked for without an order.
 */
static struct kvi_chain *next_ahead(struct dump *dump, const struct kvi_chain *chain,
                                    uint64_t *ret_order)
{
    while (dump->wide == chain && dump->at_ahead < dump->n_ahead) {
        const struct kvi_kid_key *next = &dump->ahead[dump->at_ahead++];
        struct kvi_chain *kid = kvi_kids_find(chain, next->key);

        fetch_ahead(dump, chain);
        if (next->order <= dump->cursor.order || !kid ||
            *kvi_arena_locals(&dump->ix->arena, kvi_chain_run(kid).pos) != next->key)
            continue;
        *ret_order = next->order;
        return kid;
    }
    return NULL;
}

static struct kvi_chain *next_kid(struct dump *dump, const struct kvi_chain *chain,
                                  uint64_t *ret_order)
{
    const struct kvi_cursor *cursor = &dump->cursor;
    struct kvi_chain *kid = NULL;

    if (!cursor->after) {
        dump->wide = dump->wide == chain ? NULL : dump->wide;
        return kvi_kids_next(dump->ix, chain, NULL, ret_order);
    }
    kid = next_ahead(dump, chain, ret_order);
    if (kid)
        return kid;
    dump->at_ahead = 0;
    dump->n_ahead = kvi_kids_ahead(dump->ix, chain, cursor->order, dump->ahead, AHEAD);
    dump->wide = dump->n_ahead ? chain : NULL;
    kid = next_ahead(dump, chain, ret_order);
    return kid ? kid : kvi_kids_next(dump->ix, chain, &cursor->order, ret_order);
}

/* Return true when a chosen holder has blocks of the chain. */
static bool has_chosen(const struct dump *dump, const struct kvi_chain *chain)
{
    uint32_t n = dump->chosen ? kvi_who_count(chain) : 0;

    for (uint32_t i = 0; i < n; i++)
        if (kvi_is_chosen(dump->chosen, kvi_entry_holder(kvi_who_get(kvi_who_at(chain, i)))))
            return true;
    return !dump->chosen;
}

/*
 * Go to the next chain with blocks to report, or stop in front of it after SKIPS other ones. Returns
 * false at the end.
 */
static bool advance(struct dump *dump)
{
    struct kvi_cursor *cursor = &dump->cursor;

    for (uint32_t skips = 0; skips < SKIPS;) {
        struct kvi_chain *chain = cursor->at, *kid;
        uint64_t order = 0;

        if (chain->parent && cursor->emitted < kvi_chain_run(chain).len)
            return true;
        kid = next_kid(dump, chain, &order);
        if (!kid && !chain->parent)
            return false;
        if (kid && !has_chosen(dump, kid)) {
            cursor->order = order;
            cursor->after = true;
            skips++;
        } else if (kid) {
            cursor->at = kid;
            cursor->after = false;
            cursor->emitted = 0;
        } else {
            cursor->order =
                kvi_kids_order(*kvi_arena_locals(&dump->ix->arena, kvi_chain_run(chain).pos));
            cursor->after = true;
            cursor->at = chain->parent;
            cursor->emitted = kvi_chain_run(cursor->at).len;
        }
        cursor->holder = 0;
    }
    return true;
}

/* Report blocks i..end of a piece, which are in one tier. */
static int tell_run(const struct dump *dump, const struct piece *piece, enum kv_tier tier,
                    uint32_t i, uint32_t end, kvi_dump_fn fn, void *arg)
{
    const struct kv_block *blocks = piece->renamed ? piece->blocks : dump->blocks;
    struct kvi_dump_run run = {piece->key, tier, NULL, blocks + i, end - i};

    if (i > 0)
        run.parent = &blocks[i - 1].hash;
    else if (piece->has_parent)
        run.parent = &piece->parent;
    return fn(arg, &run);
}

/* Report every block in its nearest tier, in order; then the other tiers of blocks in several. */
static int tell_piece(const struct dump *dump, const struct piece *piece, kvi_dump_fn fn, void *arg)
{
    uint32_t end;
    int rc = 0;

    for (uint32_t i = piece->from; i < piece->len && !rc; i = end) {
        int nearest = __builtin_ctz(piece->mask[i]);

        for (end = i + 1; end < piece->len && __builtin_ctz(piece->mask[end]) == nearest; end++)
            ;
        rc = tell_run(dump, piece, (enum kv_tier)nearest, i, end, fn, arg);
    }
    for (int t = 1; t < KV_N_TIERS && !rc; t++) {
        for (uint32_t i = piece->from; i < piece->len && !rc; i = KV_MAX(end, i + 1)) {
            for (end = i; end < piece->len && piece->mask[end] >> t & 1 &&
                          __builtin_ctz(piece->mask[end]) != t;)
                end++;
            if (end > i)
                rc = tell_run(dump, piece, (enum kv_tier)t, i, end, fn, arg);
        }
    }
    return rc;
}

int kvi_dump_runs(struct kvi_index *index, const struct kvi_chosen *chosen, kvi_dump_fn fn,
                  void *arg)
{
    struct dump *dump = malloc(sizeof(*dump));
    bool more = true;
    int rc = 0;

    if (!dump)
        return -ENOMEM;
    dump->ix = index;
    dump->chosen = chosen;
    dump->wide = NULL;
    dump->ids = NULL;
    dump->ids_capacity = 0;
    dump->cursor = (struct kvi_cursor){.at = &index->root};
    kvi_lock(index);
    kvi_cursor_add(index, &dump->cursor);
    while (more && !rc) {
        dump->n_pieces = 0;
        more = advance(dump);
        if (more && dump->cursor.at->parent)
            rc = copy_chain(dump);
        pthread_mutex_unlock(&index->lock);
        for (uint32_t i = 0; i < dump->n_pieces && !rc; i++)
            rc = tell_piece(dump, &dump->piece[i], fn, arg);
        kvi_lock(index);
    }
    kvi_cursor_remove(index, &dump->cursor);
    pthread_mutex_unlock(&index->lock);
    free(dump->ids);
    free(dump);
    return rc;
}

int kvi_dump(struct kvi_index *index, kvi_dump_fn fn, void *arg)
{
    return kvi_dump_runs(index, NULL, fn, arg);
}
