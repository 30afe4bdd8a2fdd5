// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_hit.h: the longest hit of a prompt in a model of several cache groups.
 *
 *                     tokens   0    16   32   48   64   80   96
 *     full attention  16 each  [ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][   ]      5 blocks: a hit of at most 80
 *     window of 33    16 each  [   ][ 2 ][ 3 ][   ][ 5 ][ 6 ]      the last 2 of a hit: 48 has them
 *     states          48 each  [      1      ][      2      ]      the one that ends the hit
 *                                             ▲
 *                                             hit: 48 tokens
 *
 * Blocks of each group have keys of their own, in a chain with a number of the group's
 * (kvbm_chain.group). A hit is the longest beginning of the prompt of which every group has the blocks
 * that it needs (struct kv_cache_group). Blocks that a hit doesn't need may be missing. A load brings
 * the needed ones with kvbm_manager_prepare_load or kvbm_cache_load, one call a group.
 *
 * A group's blocks lie in the call's manager, or in one that the group names: groups whose blocks have
 * other forms or numbers of bytes take a manager each, with pools of its own. Threads: any function from
 * any thread. Structs: as in kvbm_manager.h.
 */
#ifndef KVBM_HIT_H
#define KVBM_HIT_H

#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_manager.h"

#ifdef __cplusplus
extern "C" {
#endif

/** In kvbm_hit_group.where: no hit depended on the block, so nobody looked where it is. */
#define KVBM_NOT_LOOKED 255

/** Blocks of one cache group: those of a prompt, from its first token on. */
struct kvbm_hit_group {
    struct kv_cache_group group;
    /* Keys of the blocks in order: key i is that of tokens [i * block_size, (i + 1) * block_size). At
     * position 0 without a parent, or scattered, as they were stored. */
    const struct kvbm_chain *chain;
    size_t n; /* keys, at most 2^32 - 1 */
    /* [n] written: enum kvbm_where of the blocks that were looked at, among them all that the hit needs;
     * KVBM_NOT_LOOKED of the rest. */
    uint8_t *where;
    struct kvbm_manager *manager; /* which has the group's blocks; NULL: the call's manager */
};

/** Options of a hit; set size to sizeof(struct kvbm_hit_opts), zero means the default. */
struct kvbm_hit_opts {
    size_t size;
    uint64_t limit; /* longest hit wanted, in tokens; 0: none but the groups' blocks */
    /* Tokens that the engine's own cache has, with all that its groups need there. Blocks before them
     * aren't looked at, and the hit is this number when the tiers have nothing longer. */
    uint64_t computed;
    /* Tokens: longer hits end at multiples of it. A multiple of each group's block size; 0: the least
     * one. */
    uint32_t unit;
};
#define KVBM_HIT_OPTS_INIT KV_INIT_(kvbm_hit_opts)

/** A hit; set size to sizeof(struct kvbm_hit). */
struct kvbm_hit {
    size_t size;
    uint64_t tokens;  /* the longest hit that needs no block which is KVBM_MISS */
    uint64_t sure;    /* the longest one that needs no KVBM_PENDING block either; at most tokens */
    uint64_t pending; /* blocks that the hit of @tokens needs and that are KVBM_PENDING */
};
#define KVBM_HIT_INIT KV_INIT_(kvbm_hit)

/** Consecutive blocks of a group. */
struct kvbm_hit_blocks {
    size_t first, n;
};

/**
 * Find the longest hit of a prompt, and where its blocks are. Holds and fetches nothing, and never
 * waits. All places are of one moment, in all managers that the groups name.
 *
 * ret_blocks[i] (@ret_blocks may be NULL) becomes the blocks of @groups[i] that a load of ret->tokens
 * brings: those that a hit there needs, without blocks of computed tokens only. @opts may be NULL.
 *
 * Keys of unknown presence are asked for as kvbm_manager_lookup does, 256 a call and manager: first those of
 * KV_NEEDS_ALL in order, up to the first miss; then, of the other groups, from the end of the longest
 * hit that may be downward, also beyond a miss. So ask again while ret->pending isn't 0 and there is
 * time: ret->tokens may fall, ret->sure may rise. A block is gone when it is evicted before it is
 * pinned: prepare the loads of all groups, and where one of them finds less, release them and ask again.
 *
 * Returns 0; -EINVAL (no group, or more than KVBM_MAX_GROUPS; a group or chain that can't be; a
 * unit that is no multiple of a block size, or above 2^32 - 1); -ECHILD. On failure nothing is
 * written.
 */
KV_API int kvbm_manager_hit(struct kvbm_manager *manager, const struct kvbm_hit_group *groups,
                            size_t n_groups, const struct kvbm_hit_opts *opts, struct kvbm_hit *ret,
                            struct kvbm_hit_blocks *ret_blocks);

/**
 * Tell which blocks of @group a hit of @tokens needs, without blocks of the first @computed tokens only.
 * Returns 0; -EINVAL (@tokens is no multiple of the block size; a group that can't be). Reentrant.
 */
KV_API int kvbm_hit_needs(const struct kv_cache_group *group, uint64_t tokens, uint64_t computed,
                          struct kvbm_hit_blocks *ret);

#ifdef __cplusplus
}
#endif
#endif
