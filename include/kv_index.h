// SPDX-License-Identifier: Apache-2.0
/**
 * kv_index.h: a prefix index, a compressed prefix tree over block hashes.
 *
 * The index follows which blocks each holder (worker, rank) keeps in each tier. For the block
 * hashes of a prompt it answers how long a prefix each holder could reuse. It is a data structure:
 * no I/O, no threads of its own.
 *
 * Model. For each holder the index keeps a set of blocks arranged in a tree. A block's place is the
 * path of tokens_hash values from the root. Its name is the engine's hash.
 * - Tiers: a block is in one or more tiers of its holder. It leaves a tier with its last copy
 *   there, and the index with its last tier.
 * - Parked blocks: a block counts in answers when the holder has all blocks above it. A block
 *   stored below a missing block, or whose parent is removed, is parked: kept by its name, with its
 *   tiers and copies. It counts again when the hole is filled. max_parked limits parked blocks;
 *   beyond it the index forgets and counts (kvi_stats) a holder's oldest ones.
 * - Names: a hash names one place per holder, and a place has one name per holder, the latest.
 *   A device event that names another place moves the hash: the index forgets the old place and all
 *   below it, unless the same call gives the old place another name. An event of a lower tier moves
 *   nothing: a known block keeps its place and gains the tier.
 * - Copies: engines may keep several copies of a block. kvi_add and kvi_take count copies for each
 *   source (0: the engine's own cache; other numbers: other pools and owners). kvi_store doesn't
 *   count: source 0 has at least one copy of each block stored.
 * - Several hashes in one call (remove, store known) are done one after the other. A store in the
 *   device tier below a block in the tree is done as a whole, other stores part by part.
 * - Two holders may give the same place different hashes. Removals use the holder's own.
 *
 * Threads. Any function may be called from any thread. Writers take one lock per call; clearing a
 * holder releases it in between. kvi_find and kvi_get_stats read without the lock. For each holder
 * and tier, kvi_find sees a reach that was true at some moment of the call. A stopped writer never
 * delays it. When writers change chains on the prompt's path, kvi_find walks again, at most 64
 * times; then it takes the lock for one walk.
 *
 * Errors are negative errno values. A failing call leaves the index as it was.
 */
#ifndef KV_INDEX_H
#define KV_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Send all log lines of libkvindex to @fn (kv_log_fn); NULL: errors and warnings to stderr. */
KV_API void kvi_set_log(kv_log_fn fn, void *arg);

/** A prefix index. Any thread. */
struct kvi_index;

/** Options; set size to sizeof(struct kvi_opts), zero means the default. */
struct kvi_opts {
    size_t size;
    uint64_t max_blocks; /* distinct blocks; 0: 2^32 - 2. Stores beyond it return -ENOSPC. */
    uint64_t max_copies; /* records of copies (32 bytes each); 0: 2^22. Beyond: one copy a block */
    uint64_t max_parked; /* parked blocks of all holders (64 bytes each); 0: 2^21 */
    uint64_t max_parked_holder; /* parked blocks of one holder; 0: 2^17 */
    uint64_t max_holder_blocks; /* blocks of one holder; 0: no limit */
    /* Distinct blocks that will be stored soon: make room in their hash table. 0: unknown. */
    uint64_t expected_blocks;
};
#define KVI_OPTS_INIT KV_INIT_(kvi_opts)

/**
 * Create an empty index. @opts may be NULL. The caller owns *@ret and frees it with kvi_destroy.
 * Returns 0, -EINVAL or -ENOMEM.
 */
KV_API int kvi_create(const struct kvi_opts *opts, struct kvi_index **ret);

/** Free the index and all it holds. No other call may use it any more. NULL is a no-op. */
KV_API void kvi_destroy(struct kvi_index *index);

/**
 * Result of a store. added + duplicate + parked is the number of blocks given, or 0 when max_copies
 * leaves no room to tell the source's blocks from another's (kvi_holder_info counts them as lost).
 */
struct kvi_stored {
    size_t added;     /* blocks that the holder didn't have in that tier */
    size_t duplicate; /* blocks that it had */
    size_t renamed;   /* of both: places that this holder knew under another hash */
    size_t parked;    /* blocks below a missing one */
    /* Not 0: memory ran out while windows learnt the blocks or a source's first copies were
     * counted. Matches may be shorter than they should be, or blocks stay longer. */
    size_t lagging;
};

/**
 * Store a chain of @n blocks of @holder in @tier. The chain starts below the block named *@parent,
 * or at the root when @parent is NULL.
 *
 * Storing known blocks again changes nothing. Where the holder lacks the parent, or has it parked,
 * the blocks are parked. @ret may be NULL; it is written on success only. Any thread.
 * Returns 0; -EINVAL when a hash is repeated, when the parent or a block above it occurs among the
 * blocks (nothing is stored), or for invalid arguments; -ENOSPC (max_blocks, max_holder_blocks);
 * -ENOMEM.
 */
KV_API int kvi_store(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n,
                     struct kvi_stored *ret);

/** Largest number of a source. */
#define KVI_MAX_SOURCE 65535

/**
 * One cache of a holder: the copies of one source in one tier, in the main cache or in a window
 * (kvi_set_window).
 */
struct kvi_cache {
    struct kv_holder holder;
    enum kv_tier tier;
    uint32_t source; /* 0 to KVI_MAX_SOURCE */
    uint32_t window; /* 0: the main cache; else 1 + the window's number */
};

/** Return the holder's main cache in @tier, or what @source has of it. */
static inline struct kvi_cache kvi_cache_of(struct kv_holder holder, enum kv_tier tier,
                                            uint32_t source)
{
    struct kvi_cache cache = {holder, tier, source, 0};

    return cache;
}

/**
 * Return window @number of the holder in @tier, or what @source has of it. Of a number that no
 * window has, also -1, the result is no cache: calls return -EINVAL, or find nothing.
 */
static inline struct kvi_cache kvi_window_of(struct kv_holder holder, enum kv_tier tier,
                                             uint32_t source, uint32_t number)
{
    struct kvi_cache cache = {holder, tier, source, number + (number < UINT32_MAX)};

    return cache;
}

/**
 * Store a chain as kvi_store does, and count one more copy of each block in @cache.
 *
 * Copies of source 0 are counted. Other sources are stores keyed by hash: a block that they have
 * stays one copy. A window gets the blocks as by kvi_add_known, and all of them count as added; the
 * chain tells their places where the holder has no main group. Any thread. Returns as kvi_store.
 */
KV_API int kvi_add(struct kvi_index *index, struct kvi_cache cache, const uint64_t *parent,
                   const struct kv_block *blocks, size_t n, struct kvi_stored *ret);

/**
 * Put blocks that the holder already has, named by @hashes, into @cache as well: make sure of one
 * copy. Offload events name blocks in this way, without their tokens. The main cache passes over
 * unknown hashes. A window keeps them until they are stored, at most max_parked_holder of them. Any
 * thread. Returns the number of hashes found or kept, 0 to n; -EINVAL; -ENOMEM; of a window also
 * -ENOSPC.
 */
KV_API long kvi_store_known(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
                            size_t n);

/**
 * Put known blocks into @cache as kvi_store_known does, and count one more copy of each, as kvi_add
 * does. Any thread. Returns as kvi_store_known.
 */
KV_API long kvi_add_known(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
                          size_t n);

/**
 * Take one copy of each of the blocks @hashes from @cache.
 *
 * @left, when not NULL, gives for each hash the number of copies that are left instead. A block
 * leaves the tier with the last copy of its last source. Unknown hashes, and blocks without a copy
 * in the cache, are passed over: a call never stops half-way.
 *
 * An engine that announces only the removal of the last copy can't be told for certain from one that
 * announces each: see kvi_holder_info.doubted. Any thread.
 * Returns the number of hashes that were there, 0 to n; -EINVAL; -ENOMEM.
 */
KV_API long kvi_take(struct kvi_index *index, struct kvi_cache cache, const uint64_t *hashes,
                     const uint32_t *left, size_t n);

/**
 * Take one copy of each of the blocks @hashes from source 0 of the main cache. Any thread.
 * Returns the number of hashes that were there, 0 to n; -EINVAL; -ENOMEM.
 */
KV_API long kvi_remove(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                       const uint64_t *hashes, size_t n);

/**
 * Forget all blocks of one rank, in all tiers. A known rank stays known. Returns 0.
 *
 * A large holder is cleared in parts. Between parts other holders' writers run; writers of this
 * holder wait until the end. A lookup sees each prompt as before the call or as after it, one
 * prompt possibly earlier than another. Counts (of blocks, in stats) fall in steps. Any thread.
 */
KV_API int kvi_clear(struct kvi_index *index, struct kv_holder holder);

/**
 * Forget the copies of one rank in @source, in the tiers of @tiers (bit 1 << tier): one pool was
 * reset. Blocks stay where another tier or source has them.
 *
 * Takes as long as the same number of removals, in parts as kvi_clear. Any thread.
 * Returns 0 or -EINVAL. When memory is short it forgets the whole rank instead.
 */
KV_API int kvi_clear_tiers(struct kvi_index *index, struct kv_holder holder, uint32_t tiers,
                           uint32_t source);

/**
 * Forget one rank and all its blocks, in parts as kvi_clear. Any thread.
 * Returns 0; -ENOENT when the rank is unknown.
 */
KV_API int kvi_remove_holder(struct kvi_index *index, struct kv_holder holder);

/**
 * Forget all ranks of a worker and their blocks, in parts as kvi_clear. Any thread.
 * Returns 0; -ENOENT when the worker has no rank in the index.
 */
KV_API int kvi_remove_worker(struct kvi_index *index, uint64_t worker);

/* ---------------------------------------------------------------------------------------------
 * Windows: cache groups that a match needs beside the holder's own blocks. struct kvi_cache names
 * one in a tier.
 */

/** Largest number of windows of one holder. */
#define KVI_MAX_WINDOWS 24

/** Greatest number of parts of a block: kvi_window.parts. */
#define KVI_MAX_WINDOW_PARTS 8

/**
 * A window of a holder. A match of l blocks counts only when l is a multiple of @stride, and the
 * window has those of every stride-th block before l that @needs asks for. With m = l / stride:
 *
 *     KV_NEEDS_RUN     the last min(need, m)
 *     KV_NEEDS_STATE   the last one
 *     KV_NEEDS_CHUNK   the last m mod need: of a chunk of need blocks, those before l
 *     KV_NEEDS_ALL     all m
 *
 * The formula is that of struct kv_cache_group (kv_types.h), in blocks of the index.
 *
 * A group with smaller blocks has a window for each of the @parts that make up a block; m is then
 * l * parts, and counts parts.
 *
 * A holder with a state of larger blocks than the smallest ones, whose runs and chunks are of the
 * smallest, resumes inside of the states' blocks: l is any number then. A state has to be in its
 * window at l. KV_NEEDS_ALL asks for all blocks up to l, and where l is inside of one, for a block of
 * the window that ends at l.
 *
 * Lookups follow vLLM's hybrid cache coordinator. Below the device they follow its offloading
 * connector, which looks for a run of need blocks where attention is chunked.
 */
struct kvi_window {
    uint32_t group;  /* the engine's number of the group, which orders lookups */
    uint32_t window; /* length in tokens; windows of different length are looked up separately */
    uint32_t need;   /* blocks, 1 or more; 1 where the formula has none */
    uint32_t stride; /* 1 or more */
    enum kv_needs needs; /* blocks that a match needs of it */
    uint32_t part;       /* which part of each block, 0 to parts - 1 */
    uint32_t parts;      /* 0 or 1: whole blocks; more only with stride 1 */
};

/**
 * Give @holder, known or not, a window. Replaces its window of the same group and part. Any
 * thread.
 * Returns the window's number, which stays as long as the holder is known; -EINVAL, also for more
 * than KVI_MAX_WINDOW_PARTS parts; -EEXIST when the group's windows have another number of parts, or a
 * stride that the new one is no multiple of (kvi_remove_holder first: their blocks would get another
 * meaning); -ENOMEM; -ENOSPC (no room for all parts of the group within KVI_MAX_WINDOWS, or too many
 * holders).
 */
KV_API int kvi_set_window(struct kvi_index *index, struct kv_holder holder,
                          const struct kvi_window *window);

/** Matched prefix of a prompt on one holder. */
struct kvi_match {
    struct kv_holder holder;
    /* Leading blocks found, cumulative by tier: the first reach[0] lie on the device, and those
     * from there to reach[t] in tiers 1 to t, whether or not the device has them. So reach[0] <=
     * reach[1] <= ... A holder is listed when reach[KV_N_TIERS - 1] > 0. With windows, their blocks
     * have to lie there, too. */
    uint32_t reach[KV_N_TIERS];
    uint64_t blocks; /* all blocks of this holder (any tier), at some moment of the call */
};

/**
 * Result buffer that calls reuse. Zero-initialise it; kvi_matches_fini frees it. Thread-confined.
 */
struct kvi_matches {
    struct kvi_match *items; /* unordered, one per holder with at least one leading block */
    size_t n;
    size_t capacity;
    void *scratch; /* the index's own */
    size_t scratch_bytes;
};

/** Free a result buffer and zero it. The struct itself is the caller's. */
KV_API void kvi_matches_fini(struct kvi_matches *matches);

/**
 * Look a prompt up: @tokens_hashes are the local hashes of its @n leading full blocks.
 *
 * @matches is overwritten. Allocates only when @matches has to grow. Any thread, each with a buffer
 * of its own. Returns 0 (also without a match) or -ENOMEM.
 */
KV_API int kvi_find(struct kvi_index *index, const uint64_t *tokens_hashes, size_t n,
                    struct kvi_matches *matches);

/** Value of kvi_group_match.group: the holder's own blocks; of windows alone, those of any window. */
#define KVI_OWN_BLOCKS UINT32_MAX

/** The match that one cache group of a holder with windows allows. */
struct kvi_group_match {
    struct kv_holder holder;
    uint32_t group;      /* as in struct kvi_window, or KVI_OWN_BLOCKS */
    enum kv_needs needs; /* what a match needs of it; KV_NEEDS_ALL of the holder's own blocks */
    /* The match, as in struct kvi_match, if the holder's own blocks and this group were all. */
    uint32_t reach[KV_N_TIERS];
};

/** Result buffer that calls reuse: see struct kvi_matches. */
struct kvi_group_matches {
    struct kvi_group_match *items;
    size_t n;
    size_t capacity;
};

/** Free a result buffer and zero it. The struct itself is the caller's. */
KV_API void kvi_group_matches_fini(struct kvi_group_matches *groups);

/**
 * Look a prompt up as kvi_find does, and tell in @groups which cache groups shorten matches: for each
 * holder with windows that has the first block, what its own blocks allow, then each of its groups,
 * by number; of lengths at which a match may end beside all of them. A match is no longer than the
 * shortest of these. It is shorter where no length suits all groups together.
 *
 * @groups is appended to, @matches overwritten. Takes about as long for each group as kvi_find for the
 * holder. Returns and threads as kvi_find.
 */
KV_API int kvi_find_groups(struct kvi_index *index, const uint64_t *tokens_hashes, size_t n,
                           struct kvi_matches *matches, struct kvi_group_matches *groups);

/**
 * Look a prompt up by the hashes that engines give its blocks, as events carry them.
 *
 * @hashes are those of @n consecutive blocks of one prompt, from any block on. Each must name the
 * whole prefix up to its block, as sequence hashes do. The deepest block that some holder calls so
 * tells the prompt, and @matches becomes as kvi_find gives it: reaches count from the prompt's
 * start. Holders that call a block by another hash are found, too. Takes the lock for some
 * microseconds. Where not all hashes are known, it looks one up for each holder that has other names
 * than the first one: 0.1 ms for some thousands of such holders, and up to 1 ms where each knows more
 * hashes than the one before. Any thread, each with a buffer of its own. Returns 0 (also without a
 * match) or -ENOMEM.
 */
KV_API int kvi_find_named(struct kvi_index *index, const uint64_t *hashes, size_t n,
                          struct kvi_matches *matches);

/** Sizes of an index, for metrics. */
struct kvi_stats {
    size_t size;
    uint64_t holders;
    uint64_t chains;                  /* compressed nodes of the tree */
    uint64_t blocks;                  /* distinct places in the tree */
    uint64_t holder_blocks;           /* sum over holders of the places they hold */
    uint64_t tier_blocks[KV_N_TIERS]; /* the same by tier (a block in two tiers counts in both) */
    uint64_t bytes;                   /* memory in use, all of it */
    uint64_t parked;                  /* parked blocks */
    uint64_t parked_forgotten;        /* blocks forgotten for max_parked, since creation */
    uint64_t copies;                  /* records of blocks with more than one copy */
    uint64_t refused;                 /* stores that returned -ENOSPC, since creation */
    uint64_t copies_uncounted;        /* copies not counted for max_copies, since creation */
    uint64_t doubts;                  /* times that kvi_holder_info.doubted rose, since creation */
    uint64_t moved;                   /* see kvi_holder_info; of all holders, since creation */
};
#define KVI_STATS_INIT KV_INIT_(kvi_stats)

/**
 * Read the index's sizes into *@ret, as far as its size reaches. Takes no lock. Any thread.
 * Returns 0; -EINVAL (a NULL, or a size that is not set).
 */
KV_API int kvi_get_stats(struct kvi_index *index, struct kvi_stats *ret);

/**
 * Return the number of blocks of @holder (any tier), without parked ones; 0 when it is unknown.
 * Any thread.
 */
KV_API uint64_t kvi_holder_blocks(struct kvi_index *index, struct kv_holder holder);

/** Counts of the blocks of one rank; set size to sizeof(struct kvi_holder_info). */
struct kvi_holder_info {
    size_t size;
    uint64_t blocks;                  /* as kvi_holder_blocks returns */
    uint64_t tier_blocks[KV_N_TIERS]; /* the same by tier */
    uint64_t parked;                  /* blocks below a missing one */
    uint64_t copies;                  /* records of blocks with more than one copy */
    uint64_t refused;                 /* stores that returned -ENOSPC, since creation */
    /* Copies of blocks left out since the holder was last cleared: for max_parked,
     * max_parked_holder or max_copies, or for want of memory. Removals of copies that the index lacks
     * are taken for theirs, and subtracted. While there are any, matches may be shorter than they
     * should be. */
    uint64_t lost;
    /* Tiers, windows counted apart, in which the engine may announce only the removal of a block's last
     * copy: it stores blocks again behind removals that left copies, and has removed none twice in a
     * row since the holder was last cleared. Matches may be longer than they should be then. */
    uint64_t doubted;
    /* Of a holder without a main group: blocks of its windows of which no event has told the place, or
     * that of a block above. Matches are shorter than they should be. */
    uint64_t placeless;
    /* Names for which a store gave another place than the holder had, since creation: the names of one
     * place each never do. */
    uint64_t moved;
};
#define KVI_HOLDER_INFO_INIT KV_INIT_(kvi_holder_info)

/**
 * Read the counts of @holder into *@ret. Any thread. Returns 0; -ENOENT when it is unknown; -EINVAL
 * (ret->size).
 */
KV_API int kvi_get_holder(struct kvi_index *index, struct kv_holder holder,
                          struct kvi_holder_info *ret);

#ifdef __cplusplus
}
#endif
#endif
