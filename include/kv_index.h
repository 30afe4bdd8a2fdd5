// SPDX-License-Identifier: Apache-2.0
/**
 * kv_index.h: who has this prefix. A compressed prefix tree over block hashes.
 *
 * The index follows what each holder (worker, rank) keeps in each tier and answers, for the block
 * hashes of a prompt, how long a prefix each holder could reuse. It is a pure data structure: no I/O,
 * no threads of its own.
 *
 * Model. The index behaves as if it kept, for each holder, a set of blocks arranged in a tree: a
 * block's place is the path of tokens_hash values from the root, its name is the engine's hash.
 * - A block is in one or more tiers of its holder. It leaves a tier with its last copy there, and is
 *   removed with its last tier.
 * - A block counts in answers when all blocks above it are there. One that is stored below a missing
 *   block, or whose parent is removed, is parked: kept by its name, with its tiers and copies, up to
 *   a limit (max_parked). It counts again when the hole is filled. Beyond the limit a holder's oldest
 *   parked blocks are forgotten and counted (kvi_stats).
 * - A hash names one place per holder. A device event that names another place moves it: the old place
 *   and all below it are forgotten, unless the same call gives the place another name. An event of
 *   a lower tier moves nothing: a block that the holder has keeps its place and gains the tier.
 *   A place has one name per holder: the latest.
 * - Engines may keep several copies of a block. kvi_add and kvi_take count them, for each source (the
 *   engine's own cache is 0; other pools and owners have other numbers). kvi_store doesn't count: what
 *   is there stays as it is.
 * - A call that names several hashes (remove, store known) does one after the other. A store in the
 *   device tier below a block in the tree is done as a whole; others go part by part.
 * - Two holders may give the same place different hashes; each one's removes use its own.
 *
 * Threads. Any function may be called from any thread. Writers take one lock per call (clearing lets it go
 * in between). kvi_find and
 * kvi_get_stats read beside them. kvi_find sees, for each holder and tier, a reach that was true during
 * the call; a writer that stands still never holds it up, one that changes chains on the prompt's path
 * meanwhile makes it look again, and after 64 times it takes the lock for one walk, so that it ends.
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

struct kvi_index;

/** Options; set size to sizeof(struct kvi_opts), zero means the default. */
struct kvi_opts {
    size_t size;
    uint64_t max_blocks; /* limit on distinct blocks; 0: 2^32 - 2. Stores beyond it get -ENOSPC. */
    uint64_t max_copies; /* records of copies (32 bytes each); 0: 2^22. Beyond: one copy a block */
    uint64_t max_parked; /* parked blocks of all holders (64 bytes each); 0: 2^21 */
    uint64_t max_parked_holder; /* ... and of one holder; 0: 2^17 */
    uint64_t
        max_holder_blocks; /* limit on the blocks of one holder; 0: none. See kvi_limit_holder */
};

/** Make an empty index. @opts may be NULL. Returns 0, -EINVAL or -ENOMEM. */
KV_API int kvi_create(const struct kvi_opts *opts, struct kvi_index **ret);

/** Free the index and all it holds; NULL is a no-op. The caller must be its last user. */
KV_API void kvi_destroy(struct kvi_index *index);

/** What a store did, for the caller's counters. */
struct kvi_stored {
    size_t added;     /* blocks that the holder didn't have in that tier */
    size_t duplicate; /* blocks that it had; added + duplicate + parked are all of them */
    size_t renamed;   /* of either: the place was known under another hash of this holder */
    size_t parked;    /* neither: blocks below one that is missing */
};

/**
 * @holder now has @n blocks in @tier: a chain that starts below the block named *@parent, or at the
 * root when @parent is NULL. Storing what is there already changes nothing. Where the holder has no such
 * parent, or has it parked, the blocks are parked.
 *
 * @ret may be NULL; it is written on success only.
 * Returns 0; -EINVAL when the parent, a block above it, or a repeated hash occurs among the blocks
 * (nothing is stored), or for arguments that make no sense; -ENOSPC; -ENOMEM.
 */
KV_API int kvi_store(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n,
                     struct kvi_stored *ret);

/** Largest number of a source. */
#define KVI_MAX_SOURCE 65535

/**
 * The same for one more copy of each block, in the pool of @source. Copies of source 0 are counted. Other
 * sources are stores keyed by hash: a block that they have stays one copy.
 */
KV_API int kvi_add(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                   uint32_t source, const uint64_t *parent, const struct kv_block *blocks, size_t n,
                   struct kvi_stored *ret);

/**
 * @holder now has the blocks it already knows by @hashes in @tier as well (an offload event names
 * blocks without their tokens). Returns the number of hashes found, 0..n, or -ENOMEM.
 */
KV_API long kvi_store_known(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                            const uint64_t *hashes, size_t n);

/** The same for one more copy of each block, in the pool of @source: see kvi_add. */
KV_API long kvi_add_known(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                          uint32_t source, const uint64_t *hashes, size_t n);

/**
 * @source of @holder has one copy less of each of the blocks @hashes in @tier; with @left (or NULL), so
 * many are left. A block leaves the tier with the last copy of its last source. Unknown hashes, and
 * blocks of which the source has no copy, are passed over: one call never stops half-way.
 * Returns the number of hashes that were there, 0..n, or -ENOMEM.
 *
 * An engine that announces only the last copy's removal is found out by its stream: blocks that it stores
 * again after a removal that left copies, and no block removed twice in a row. Then one copy counts.
 */
KV_API long kvi_take(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                     uint32_t source, const uint64_t *hashes, const uint32_t *left, size_t n);

/** kvi_take of source 0, without @left. */
KV_API long kvi_remove(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                       const uint64_t *hashes, size_t n);

/**
 * Forget all that this one rank holds, in all tiers. A known rank stays known. Returns 0.
 *
 * In a wide index this takes a while, and goes on in parts: other holders' writers come in between,
 * writers of this holder wait until all of it is done. Lookups see each prompt as before the call or as
 * after it, but one prompt may go before another; counts (of blocks, in stats) go down in steps.
 */
KV_API int kvi_clear(struct kvi_index *index, struct kv_holder holder);

/**
 * Forget what this rank has of @source in the tiers of @tiers (bit 1 << tier): the reset of one pool. Blocks
 * stay where another tier or source has them. Takes as long as as many removals; in parts, like kvi_clear.
 * Returns 0 or -EINVAL. Without memory it forgets all of the rank.
 */
KV_API int kvi_clear_tiers(struct kvi_index *index, struct kv_holder holder, uint32_t tiers,
                           uint32_t source);

/** Forget one rank, or all ranks of a worker; the same in parts. Returns 0 or -ENOENT. */
KV_API int kvi_remove_holder(struct kvi_index *index, struct kv_holder holder);
KV_API int kvi_remove_worker(struct kvi_index *index, uint64_t worker);

/** One holder's share of a prompt. */
struct kvi_match {
    struct kv_holder holder;
    /* Leading blocks found, cumulative: reach[t] counts a prefix whose every block lies in tier t or
     * a nearer one; so reach[0] <= reach[1] <= ... A holder is listed when reach[KV_N_TIERS-1] > 0. */
    uint32_t reach[KV_N_TIERS];
    uint64_t blocks; /* all blocks that this holder has (any tier), at some moment of the call */
};

/** A result buffer that calls reuse. Zero-initialise; kvi_matches_fini frees it. Thread-confined. */
struct kvi_matches {
    struct kvi_match *items; /* unordered, one per holder with at least one leading block */
    size_t n;
    size_t capacity;
    void *scratch; /* the index's own */
    size_t scratch_bytes;
};
KV_API void kvi_matches_fini(struct kvi_matches *matches);

/**
 * Look a prompt up: @tokens_hashes are the local hashes of its @n leading full blocks.
 * Returns 0 (also with no match) or -ENOMEM. Allocates only when @matches has to grow.
 */
KV_API int kvi_find(struct kvi_index *index, const uint64_t *tokens_hashes, size_t n,
                    struct kvi_matches *matches);

/** Sizes, for metrics. */
struct kvi_stats {
    uint64_t holders;
    uint64_t chains;                  /* compressed nodes of the tree */
    uint64_t blocks;                  /* distinct places in the tree */
    uint64_t holder_blocks;           /* sum over holders of the places they hold */
    uint64_t tier_blocks[KV_N_TIERS]; /* the same by tier (a block in two tiers counts in both) */
    uint64_t bytes;                   /* memory in use, all of it */
    uint64_t parked;                  /* blocks kept beside the tree, below a missing one */
    uint64_t parked_forgotten;        /* blocks that found no room there, ever */
    uint64_t copies;                  /* records of blocks with more than one copy */
    uint64_t refused;                 /* stores that got -ENOSPC for a limit on blocks, ever */
    uint64_t copies_uncounted;        /* copies that found no room there, ever */
};
KV_API void kvi_get_stats(struct kvi_index *index, struct kvi_stats *ret);

/** Blocks that @holder has (any tier), 0 when it is unknown. Parked blocks don't count. */
KV_API uint64_t kvi_holder_blocks(struct kvi_index *index, struct kv_holder holder);

/**
 * Let @holder, known or not, have at most @max_blocks blocks in the tree (0: max_holder_blocks of the
 * options). Stores beyond it get -ENOSPC and change nothing; the caller then follows a stream that it
 * can't hold, and what it has of the holder is a part. Blocks above the limit stay until they are removed.
 * Parked blocks that find no room when their hole is filled are forgotten and counted.
 * Returns 0, -ENOMEM or -ENOSPC (too many holders).
 */
KV_API int kvi_limit_holder(struct kvi_index *index, struct kv_holder holder, uint64_t max_blocks);

/** Counts of the blocks of one rank. */
struct kvi_holder_info {
    uint64_t blocks;                  /* as in kvi_holder_blocks */
    uint64_t tier_blocks[KV_N_TIERS]; /* the same by tier */
    uint64_t parked;                  /* blocks below a missing one */
    uint64_t copies;                  /* records of blocks with more than one copy */
    uint64_t refused;                 /* stores that got -ENOSPC, ever */
};
/** Returns 0, or -ENOENT when it is unknown. */
KV_API int kvi_get_holder(struct kvi_index *index, struct kv_holder holder,
                          struct kvi_holder_info *ret);

/** A run of a dump: exactly the arguments of one kvi_store call. */
struct kvi_dump_run {
    struct kv_holder holder;
    enum kv_tier tier;
    const uint64_t *parent; /* NULL: root */
    const struct kv_block *blocks;
    size_t n;
};
/** Called per run; a non-zero return stops the dump, which returns that value. */
typedef int (*kvi_dump_fn)(void *arg, const struct kvi_dump_run *run);

/**
 * Enumerate the index as stores that rebuild it, each parent before its children, nearest tier
 * first for each block. Weakly consistent: writers go on in between (the lock is not held during
 * callbacks), so what changes while the dump runs may be in it or not. Uses bounded memory of its own.
 */
KV_API int kvi_dump(struct kvi_index *index, kvi_dump_fn fn, void *arg);

/** Facts about a block that kvi_dump leaves out: parked, or several copies of source 0. */
struct kvi_extra {
    struct kv_holder holder;
    uint64_t hash;
    uint64_t parent,
        tokens_hash;   /* parked: the missing or parked block above, and its own tokens */
    uint32_t tiers;    /* parked: bit 1 << tier; else 0 */
    enum kv_tier tier; /* copies: where */
    uint32_t copies;
};
typedef int (*kvi_extra_fn)(void *arg, const struct kvi_extra *extra);

/**
 * Enumerate what kvi_dump leaves out, to be restored after it: parked blocks, then copies of source 0 where
 * no other source has any. Weakly consistent, as kvi_dump. A non-zero return of @fn stops it.
 */
KV_API int kvi_dump_extras(struct kvi_index *index, kvi_extra_fn fn, void *arg);

/** Apply one of them: park the block, or set the number of copies of one that is there. As kvi_store. */
KV_API int kvi_restore_extra(struct kvi_index *index, const struct kvi_extra *extra);

#ifdef __cplusplus
}
#endif
#endif
