// SPDX-License-Identifier: Apache-2.0
/*
 * Second part of a store, which can fail. Allocations are invisible (new chains, table entries of
 * blocks without a holder) or neutral (a larger list, a chain moved to where it can grow). A
 * failure half-way therefore changes no answer. kvi_store_cancel takes back what is invisible, and
 * leaves what is neutral.
 *
 * New blocks go to one of two places, which exclude each other:
 *
 *     at the end of a chain    [ a b | new new ]     appended, if nothing is below b; then chains
 *     within a chain           [ a b ] ─┬─ [ c d ]   split behind b, then chains beside c
 *                                       └─ [ new new ]
 *
 * The order of the steps: room for appended blocks comes first, since it may move the chain. Names
 * come last, since the table holds positions and reads a slot's hash when it grows. By then each
 * slot is written, and only a split moves positions, and the names with them.
 */
#include "index/tree/kids.h"
#include "index/write/store.h"

/*
 * Decoding stores a block or two at a time. Without moves, each would become a chain of 64 bytes.
 * A move copies the chain and rewrites its names in the table, so both lengths are bounded.
 */
#define APPEND_BY_MOVING 32u /* longer appends become a new chain */
#define MOVE_MAX 128u        /* longer chains don't move to grow */

/* New chains have one child each: a store adds a path, no branch. */
static struct kvi_chain *next_fresh(const struct kvi_chain *chain)
{
    return kvi_kids_only(chain);
}

uint32_t kvi_store_pos(const struct kvi_store *store, size_t i, struct kvi_chain **ret_chain)
{
    const struct kvi_piece *piece = store->scratch->pieces;
    struct kvi_chain *chain = store->at;
    uint32_t off;

    if (i < store->n_path) {
        while (i >= piece->first + (piece->to - piece->from))
            piece++;
        *ret_chain = piece->chain;
        return kvi_chain_run(piece->chain).pos + piece->from + (uint32_t)(i - piece->first);
    }
    i -= store->n_path;
    /* The block is in the last piece already, but the lookup above stops before it. */
    if (i < store->n_append) {
        *ret_chain = chain;
        return kvi_chain_run(chain).pos + store->off + (uint32_t)i;
    }
    i -= store->n_append;
    off = (uint32_t)(i % KVI_CHAIN_MAX);
    chain = store->fresh;
    for (i /= KVI_CHAIN_MAX; i; i--)
        chain = next_fresh(chain);
    *ret_chain = chain;
    return kvi_chain_run(chain).pos + off;
}

/* -- entries along the path -------------------------------------------------------------------- */

/*
 * Return true when the entry's blocks will differ in their tiers. They don't when the tier is the
 * only one, when all blocks have it already, or when exactly all of them get it.
 */
static bool must_mix(const struct kvi_piece *piece, uint64_t entry, uint32_t bit)
{
    uint32_t mask = kvi_entry_mask(entry), len = kvi_entry_len(entry);

    if (mask == bit || (mask & bit && piece->to <= len))
        return false;
    return !(piece->from == 0 && piece->to == len);
}

static int plan_piece(struct kvi_store *store, const struct kvi_piece *piece)
{
    _Atomic uint64_t *entry = kvi_who_find(piece->chain, store->holder->id);
    uint64_t e;

    if (!entry)
        return kvi_who_reserve(store->ix, piece->chain, 1);
    e = kvi_who_get(entry);
    if (kvi_entry_mask(e) && !must_mix(piece, e, 1u << store->tier))
        return 0;
    return kvi_entry_mix(store->ix, piece->chain, entry, KV_MAX(piece->to, kvi_entry_len(e)));
}

/* -- new blocks -------------------------------------------------------------------------------- */

/*
 * Compute how many new blocks fit behind the end of the chain, after making room. A chain with
 * children can't grow: they hang below its last block, which would be another one.
 */
static int plan_append(struct kvi_store *store, uint32_t *ret)
{
    struct kvi_chain *chain = store->at;
    struct kvi_run run = kvi_chain_run(chain);
    size_t n = store->n - store->n_path;
    uint32_t more, capacity;

    *ret = 0;
    if (!chain->parent || store->off < run.len || kvi_kids_count(chain) || run.len == KVI_CHAIN_MAX)
        return 0;
    more = (uint32_t)KV_MIN(n, (size_t)(KVI_CHAIN_MAX - run.len));
    if (run.len + more > chain->capacity) {
        uint32_t lack = run.len + more - chain->capacity;

        if (kvi_arena_extend(&store->ix->arena, run.pos + chain->capacity, lack)) {
            chain->capacity = (uint16_t)(chain->capacity + lack);
        } else if (more < APPEND_BY_MOVING && run.len < MOVE_MAX) {
            capacity = KV_MIN(run.len + more + run.len / 4 + 1, KVI_CHAIN_MAX);
            if (kvi_chain_move(store->ix, chain, capacity))
                return -ENOMEM;
        } else {
            return 0;
        }
    }
    *ret = more;
    return 0;
}

static void write_blocks(struct kvi_store *store, uint32_t pos, const struct kv_block *blocks,
                         uint32_t n)
{
    uint64_t *locals = kvi_arena_locals(&store->ix->arena, pos);
    uint64_t *engines = kvi_arena_engines(&store->ix->arena, pos);

    for (uint32_t i = 0; i < n; i++) {
        locals[i] = blocks[i].tokens_hash;
        engines[i] = blocks[i].hash;
    }
}

/*
 * Make a chain that the holder has whole. No reader sees it before the commit links the first one.
 * @last: nothing is below it; else the holder is in one child, the next of the new chains.
 */
static struct kvi_chain *new_chain(struct kvi_store *store, const struct kv_block *blocks,
                                   uint32_t n, bool last)
{
    struct kvi_index *ix = store->ix;
    struct kvi_chain *chain = kvi_chain_new(ix);
    uint32_t extent;

    if (!chain)
        return NULL;
    extent = kvi_arena_alloc(&ix->arena, 1 + n);
    if (extent == KVI_NO_POS) {
        kvi_chain_free(ix, chain);
        return NULL;
    }
    *kvi_arena_engines(&ix->arena, extent) = (uintptr_t)chain;
    kvi_chain_set_run(chain, extent + 1, n);
    chain->capacity = (uint16_t)n;
    chain->flags = store->twins ? KVI_TWINS : 0;
    write_blocks(store, extent + 1, blocks, n);
    chain->n_full = 1;
    atomic_store_explicit(&chain->who[0],
                          kvi_entry(store->holder->id, n, 1u << store->tier, last ? 0 : 1),
                          memory_order_relaxed);
    return chain;
}

static int plan_chains(struct kvi_store *store)
{
    struct kvi_chain *above = NULL;

    for (size_t i = store->n_path + store->n_append; i < store->n; i += KVI_CHAIN_MAX) {
        uint32_t n = (uint32_t)KV_MIN(store->n - i, (size_t)KVI_CHAIN_MAX);
        struct kvi_chain *chain = new_chain(store, store->blocks + i, n, i + n == store->n);

        if (!chain)
            return -ENOMEM;
        chain->parent = above;
        if (above)
            atomic_store_explicit(&above->kids, (uintptr_t)chain, memory_order_relaxed);
        else
            store->fresh = chain;
        above = chain;
    }
    return 0;
}

/* -- names ------------------------------------------------------------------------------------- */

/*
 * Enter the names of all blocks. No other call finds them before the commit or the cancel: lookups
 * read no names, and writers wait for the lock.
 */
static int plan_names(struct kvi_store *store)
{
    const uint8_t *naming = store->scratch->naming;
    struct kvi_chain *chain;

    for (size_t i = 0; i < store->n; i++) {
        uint32_t pos;
        int rc = 0;

        if (naming[i] == KVI_NAME_TABLE) {
            rc = kvi_name_insert(store->ix, store->blocks[i].hash, kvi_store_pos(store, i, &chain));
        } else if (naming[i] == KVI_NAME_ALIAS || naming[i] == KVI_NAME_REALIAS) {
            pos = kvi_store_pos(store, i, &chain);
            rc = kvi_alias_prepare(store->ix, store->holder, store->blocks[i].hash, pos,
                                   naming[i] == KVI_NAME_REALIAS);
        }
        if (rc)
            return rc;
        store->n_named = i + 1;
    }
    return 0;
}

static void cancel_names(struct kvi_store *store)
{
    const uint8_t *naming = store->scratch->naming;
    struct kvi_chain *chain;

    while (store->n_named) {
        size_t i = --store->n_named;
        uint32_t pos;

        if (naming[i] == KVI_NAME_TABLE) {
            kvi_names_erase(store->ix, kvi_store_pos(store, i, &chain), 1);
        } else if (naming[i] == KVI_NAME_ALIAS || naming[i] == KVI_NAME_REALIAS) {
            pos = kvi_store_pos(store, i, &chain);
            kvi_alias_rollback(store->ix, store->holder, store->blocks[i].hash, pos,
                               naming[i] == KVI_NAME_REALIAS);
        }
    }
}

/* -- all of it --------------------------------------------------------------------------------- */

/* Make the appended blocks part of the last piece. */
static int plan_path(struct kvi_store *store)
{
    struct kvi_piece *last = store->scratch->pieces + store->n_pieces - 1;
    int rc = 0;

    if (store->n_append) {
        if (!store->n_pieces || last->chain != store->at) {
            *++last = (struct kvi_piece){store->at, store->off, store->off, store->n_path};
            store->n_pieces++;
        }
        last->to += store->n_append;
    }
    for (size_t i = 0; !rc && i < store->n_pieces; i++)
        rc = plan_piece(store, &store->scratch->pieces[i]);
    return rc;
}

int kvi_store_plan(struct kvi_store *store)
{
    struct kvi_index *ix = store->ix;
    uint32_t len = kvi_chain_run(store->at).len;
    bool divides = store->n_path < store->n && store->off < len;
    int rc = 0;

    if (store->n_path < store->n)
        rc = plan_append(store, &store->n_append);
    if (!rc)
        rc = plan_path(store);
    if (!rc && divides)
        rc = kvi_split_prepare(ix, store->at, store->off, store->holder->id, &store->split);
    /* Readers stop at the chain's length, which the commit raises. */
    if (!rc && store->n_append)
        write_blocks(store, kvi_chain_run(store->at).pos + len, store->blocks + store->n_path,
                     store->n_append);
    if (!rc)
        rc = plan_chains(store);
    if (!rc && store->fresh)
        rc = kvi_kids_reserve(ix, divides ? store->split.head : store->at,
                              *kvi_arena_locals(&ix->arena, kvi_chain_run(store->fresh).pos));
    return rc ? rc : plan_names(store);
}

void kvi_store_cancel(struct kvi_store *store)
{
    struct kvi_index *ix = store->ix;

    cancel_names(store);
    while (store->fresh) {
        struct kvi_chain *chain = store->fresh;

        store->fresh = next_fresh(chain);
        kvi_arena_free(&ix->arena, kvi_chain_run(chain).pos - 1);
        kvi_chain_free(ix, chain);
    }
    if (store->split.chain)
        kvi_split_cancel(ix, &store->split);
}
