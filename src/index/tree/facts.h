// SPDX-License-Identifier: Apache-2.0
/**
 * Calls of the indexer beyond kv_index.h, by which it stays exact: rules of lookups, places of windows'
 * blocks, single blocks, chains that are new to their holder, and all facts for a replica.
 *
 * No library exports these functions. Errors and threads are as in kv_index.h.
 */
#ifndef KV_INDEX_TREE_FACTS_H
#define KV_INDEX_TREE_FACTS_H

#include "kv_index.h"

/**
 * A hint: a store of these blocks follows soon, after other work. Fetches the memory that it will
 * read; says and changes nothing.
 */
void kvi_store_soon(struct kvi_index *index, const struct kv_block *blocks, size_t n);

/** A chain of blocks that are new to @holder, for kvi_add_chains. */
struct kvi_new_chain {
    struct kv_holder holder;
    bool has_parent;
    uint64_t parent; /* with has_parent: name of the block above the first; else that is the root */
    const struct kv_block *blocks;
    size_t n;
};

/**
 * Store @n chains of new blocks, one after another, as kvi_add does in KV_TIER_DEVICE and source 0.
 * The result is the same as that of storing their blocks one by one.
 *
 * The calls of other threads wait meanwhile, but no longer than 0.1 ms and one chain. Any thread.
 * Returns how many chains were stored; @ret, unless NULL, gets the sums over these. A chain enters
 * the index whole or not at all, and the first that can't be stored ends the call; *@ret_rc tells
 * why: -EEXIST when @holder has one of its blocks, in the tree or parked, or a parked child of one;
 * -ENOENT when it lacks the parent; otherwise as kvi_store. 0 when all were stored.
 */
size_t kvi_add_chains(struct kvi_index *index, const struct kvi_new_chain *chains, size_t n,
                      struct kvi_stored *ret, int *ret_rc);

/**
 * Say that @holder, known or not, has no main group (@alone), or has one: alone, matches are made
 * of its windows' blocks. Returns 0, -ENOMEM or -ENOSPC. Any thread.
 */
int kvi_set_alone(struct kvi_index *index, struct kv_holder holder, bool alone);

/**
 * Say that the engine of @holder, known or not, gives up the last block that it finds (EAGLE
 * without lookahead hashes), for as long as the holder is known. Matches become one block shorter;
 * a window has to have that block, too. Some groups give up none: the main group (@main), and
 * windows of the groups whose bits 1 << group are in @groups; unless it is 0, so do all groups from
 * 64 on. Replaces what was said before; false and 0: all groups give one up. Windows of one
 * description do together when one of their groups does. Returns 0, -ENOMEM or -ENOSPC. Any thread.
 */
int kvi_set_keeps(struct kvi_index *index, struct kv_holder holder, bool main, uint64_t groups);

/** Copy the windows of @holder to @ret, which has room for KVI_MAX_WINDOWS. Returns their number, or -ENOENT
 * for an unknown holder. Any thread. */
int kvi_get_windows(struct kvi_index *index, struct kv_holder holder, struct kvi_window *ret);

/** State of one block in one cache. */
struct kvi_block_info {
    uint32_t copies;   /* in the cache, also of a parked block; 0: it doesn't have the block */
    bool has_children; /* of the main cache: the holder has a block right below it in that tier */
};

/** Return the state of the block @hash in @cache: zeros for an unknown one. Any thread. */
struct kvi_block_info kvi_get_block(struct kvi_index *index, struct kvi_cache cache, uint64_t hash);

/**
 * Return true when @holder has the block @hash at all: in any tier and source, in the tree, parked, or
 * in a window. Any thread.
 */
bool kvi_holds(struct kvi_index *index, struct kv_holder holder, uint64_t hash);

/** Where a holder's own blocks of a prompt end. Windows may cut the match shorter. */
struct kvi_stop {
    struct kv_holder holder;
    uint32_t reach; /* leading blocks of the prompt that the holder has, in any tier */
    bool goes_on;   /* has other blocks right behind them (reach 0: any blocks at all) */
    bool waits; /* lacks the next block, and has a parked one with the tokens of that behind it */
};

/**
 * Tell for every holder where its part of the prompt with the local hashes @hashes ends. For people:
 * holds the lock for a pass over all holders of the prompt's chains. Returns the number of holders, with
 * *@ret for free(), or -ENOMEM. Any thread.
 */
long kvi_find_stops(struct kvi_index *index, const uint64_t *hashes, size_t n,
                    struct kvi_stop **ret);

/**
 * Find the prompt that kvi_find_named finds: copy to *@ret, for free(), the local hashes from its start to
 * the deepest known block. *@ret_known becomes how many leading @hashes are known; the last of these
 * names that block. Returns the number of local hashes, 0 when no hash is known, or -ENOMEM. Any thread.
 */
long kvi_named_path(struct kvi_index *index, const uint64_t *hashes, size_t n, uint64_t **ret,
                    size_t *ret_known);

/** A run of a dump: the arguments of one kvi_store call. Valid during the callback. */
struct kvi_dump_run {
    struct kv_holder holder;
    enum kv_tier tier;
    const uint64_t *parent; /* NULL: root */
    const struct kv_block *blocks;
    size_t n;
};

/**
 * Callback of kvi_dump, once per run. A non-zero return stops the dump, which returns that value.
 */
typedef int (*kvi_dump_fn)(void *arg, const struct kvi_dump_run *run);

/**
 * Enumerate the index as stores that rebuild it: each parent before its children, the nearest tier
 * of a block first.
 *
 * Weakly consistent: the lock is not held during callbacks, so the dump may or may not contain what
 * writers change meanwhile. Uses bounded memory of its own. Any thread.
 * Returns 0; -ENOMEM; or the value with which @fn stopped it.
 */
int kvi_dump(struct kvi_index *index, kvi_dump_fn fn, void *arg);

/** Kinds of facts that kvi_dump_extras tells. */
enum kvi_extra_kind {
    KVI_EXTRA_BLOCK,        /* a block is parked, or has several copies of source 0 */
    KVI_EXTRA_RULE,         /* how lookups of a holder go */
    KVI_EXTRA_WINDOW,       /* a holder's window */
    KVI_EXTRA_PLACE,        /* where a block lies, of a holder without a main group */
    KVI_EXTRA_WINDOW_BLOCK, /* a window has a block */
    KVI_EXTRA_TIER,         /* what is known of the sources of a tier */
    KVI_EXTRA_COPIES        /* which sources have a block, and how many copies each */
};

/** Copies that one source has of a block. */
struct kvi_source_copies {
    uint32_t source, copies;
    bool taken; /* the last event about them was a removal */
};

/** Facts about a holder or a block that kvi_dump leaves out. */
struct kvi_extra {
    struct kv_holder holder;
    uint64_t hash;
    uint64_t parent;      /* parked, place: hash of the block above */
    uint64_t tokens_hash; /* parked, place: local hash of its own tokens */
    uint32_t tiers;       /* parked: bit 1 << tier of each tier; else 0 */
    enum kv_tier tier;    /* copies, place, window block: tier that has them */
    uint32_t copies;      /* copies, window block: their number in source 0 */
    enum kvi_extra_kind kind;
    bool has_parent;          /* place: not at the root */
    bool alone, drops;        /* rule: see kvi_set_alone, kvi_set_keeps */
    bool main_keeps;          /* rule: see kvi_set_keeps */
    uint64_t kept_groups;     /* rule: the same */
    struct kvi_window window; /* window; of a place and a window block its group */
    bool in_window;           /* tier, copies: of the window with the group in @window */
    /* Tier: source of the blocks about which no copies are told; whether the removal of
     * each copy is announced (1) or that isn't known (0); evidence against it. */
    uint32_t implied, counting, stored_again;
    const struct kvi_source_copies *sources; /* copies: all that have any; the callback's */
    size_t n_sources;
};

/** Callback of kvi_dump_extras, once per fact. A non-zero return stops the enumeration. */
typedef int (*kvi_extra_fn)(void *arg, const struct kvi_extra *extra);

/**
 * Enumerate the facts that kvi_dump leaves out, to be restored after its runs in this order: parked
 * blocks, windows and their blocks, tiers, copies. A fact about copies replaces what was told before
 * of that block. Weakly consistent, as kvi_dump. Any thread. Returns 0; -ENOMEM; or the value with
 * which @fn stopped it.
 */
int kvi_dump_extras(struct kvi_index *index, kvi_extra_fn fn, void *arg);

/**
 * Enumerate the blocks of @n @holders alone, and the facts that @fn leaves out, as kvi_dump and then
 * kvi_dump_extras do. Exact as long as nobody writes these holders' blocks meanwhile: others may be
 * written. Unknown holders are passed over. Any thread. Returns as kvi_dump.
 */
int kvi_dump_holders(struct kvi_index *index, const struct kv_holder *holders, size_t n,
                     kvi_dump_fn fn, kvi_extra_fn extra_fn, void *arg);

/**
 * Apply one fact of kvi_dump_extras: park the block, set the copies of a known block, or tell a window
 * or tier. Any thread. Returns as kvi_store.
 */
int kvi_restore_extra(struct kvi_index *index, const struct kvi_extra *extra);

#endif
