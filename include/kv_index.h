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
 * - A block may only be stored under the root or under a block that the same holder has.
 * - A block is in one or more tiers of its holder. Losing its last tier removes it, and with it
 *   everything that holder has below it: what can't be reached any more is forgotten, never counted
 *   again when the gap is filled, and its memory is returned.
 * - A hash names one place per holder: stored again elsewhere, it moves (the old place is removed,
 *   unless the same call gives it another name). A place has one name per holder: the latest.
 * - A call that names several hashes (remove, store known) does one after the other; a store is done as
 *   a whole.
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
};

/** Make an empty index. @opts may be NULL. Returns 0, -EINVAL or -ENOMEM. */
KV_API int kvi_create(const struct kvi_opts *opts, struct kvi_index **ret);

/** Free the index and all it holds; NULL is a no-op. The caller must be its last user. */
KV_API void kvi_destroy(struct kvi_index *index);

/** What a store did, for the caller's counters. */
struct kvi_stored {
    size_t added;     /* blocks that the holder didn't have in that tier */
    size_t duplicate; /* blocks that it had; added + duplicate are all of them */
    size_t renamed;   /* of either: the place was known under another hash of this holder */
};

/**
 * @holder now has @n blocks in @tier: a chain that starts below the block named *@parent, or at the
 * root when @parent is NULL. Storing what is there already changes nothing.
 *
 * @ret may be NULL; it is written on success only.
 * Returns 0; -ENOENT when the holder has no such parent (nothing is stored); -EINVAL when the
 * parent, a block above it, or a repeated hash occurs among the blocks (nothing is stored), or for
 * arguments that make no sense; -ENOSPC; -ENOMEM.
 */
KV_API int kvi_store(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                     const uint64_t *parent, const struct kv_block *blocks, size_t n,
                     struct kvi_stored *ret);

/**
 * @holder now has the blocks it already knows by @hashes in @tier as well (an offload event names
 * blocks without their tokens). Returns the number of hashes found, 0..n, or -ENOMEM.
 */
KV_API long kvi_store_known(struct kvi_index *index, struct kv_holder holder, enum kv_tier tier,
                            const uint64_t *hashes, size_t n);

/**
 * @holder no longer has the blocks @hashes in @tier. Unknown hashes are passed over: one call never
 * stops half-way. Returns the number of hashes that were there, 0..n, or -ENOMEM.
 */
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
};
KV_API void kvi_get_stats(struct kvi_index *index, struct kvi_stats *ret);

/** Blocks that @holder has (any tier), 0 when it is unknown. */
KV_API uint64_t kvi_holder_blocks(struct kvi_index *index, struct kv_holder holder);

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

#ifdef __cplusplus
}
#endif
#endif
