// SPDX-License-Identifier: Apache-2.0
/** Shared by the steps of kvi_store: look.c, plan.c (allocates) and commit.c (changes the tree). */
#ifndef KV_INDEX_WRITE_STORE_H
#define KV_INDEX_WRITE_STORE_H

#include "index/tree/tree.h"

/** Blocks of the path in one chain: @from..@to, the first of which is block number @first. */
struct kvi_piece {
    struct kvi_chain *chain;
    uint32_t from, to;
    size_t first;
};

/** Action to take for a block's name. */
enum kvi_naming {
    KVI_NAME_KEEP,
    KVI_NAME_TABLE,   /* a new block: put its name into the table */
    KVI_NAME_ALIAS,   /* add an alias for a place without one of this holder */
    KVI_NAME_REALIAS, /* replace the alias of this holder */
    KVI_NAME_REVERT   /* drop the alias: the slot's name is right */
};

/** An older place of this holder that loses its name, and is removed with it. */
struct kvi_move {
    struct kvi_chain *chain;
    uint32_t off;
    uint64_t depth; /* blocks above it; counted only when there are several moves */
};

/** Arrays that calls reuse. */
struct kvi_scratch {
    struct kvi_piece *pieces;
    size_t pieces_capacity;
    struct kvi_move *moves;
    size_t moves_capacity;
    uint8_t *naming;
    size_t naming_capacity;
    uint8_t *parked; /* tiers in which each block was parked; used when any was */
    size_t parked_capacity;
    uint64_t *names; /* names whose parked children are still to be attached */
    size_t names_capacity;
    struct kv_block *run; /* parked blocks that enter the tree in one store */
    size_t run_capacity;
    struct kvi_hanging {
        const struct kvi_chain *chain;
        uint64_t above; /* name of the block above the chain */
    } * hanging;        /* chains to be parked */
    size_t hanging_capacity;
    uint64_t *hashes; /* hashes of a call, last first */
    size_t hashes_capacity;
    struct kvi_seen {
        uint64_t hash, call;
    } * seen; /* open addressing; entries of earlier calls are stale */
    size_t seen_capacity;
    uint64_t call;
};

struct kvi_store {
    struct kvi_index *ix;
    struct kvi_scratch *scratch;
    struct kvi_holder *holder;
    /* The overlay into which the store goes, see windows.h; NULL: the main holder. */
    struct kvi_holder *overlay;
    /* A block that the holder has keeps its place, whatever place the event gives. */
    bool keeps;
    bool only_new; /* return -EEXIST when the holder has one of the blocks */
    bool holder_is_new;
    bool twins;    /* another place has the hash of one of the new blocks */
    bool counted;  /* blocks that the holder has get one copy more */
    bool again;    /* a store of parked blocks: copies stay as they were */
    bool unparks;  /* scratch->parked belongs to this call */
    bool left_out; /* nothing was stored: the copies can't be recorded */
    enum kv_tier tier;
    uint32_t source;
    const struct kv_block *blocks;
    size_t n;

    struct kvi_chain *parent; /* the path begins below block parent_off of this chain */
    uint32_t parent_off;      /* unused with the root */
    size_t n_pieces, n_moves;
    size_t n_path;        /* blocks of the path whose places exist */
    struct kvi_chain *at; /* new blocks go below block off - 1 of this chain */
    uint32_t off;

    /* Allocated by kvi_store_plan. */
    struct kvi_split split;  /* split.chain: NULL when none is needed */
    uint32_t n_append;       /* blocks appended to the end of `at` */
    struct kvi_chain *fresh; /* new chains for the other blocks, each below the one before */
    size_t n_named;          /* names entered so far, for kvi_store_cancel */
    struct kvi_stored stored;
    size_t n_gained; /* places that the holder gains */
};

/** Check that no hash occurs twice, the parent's included. Returns 0, -EINVAL or -ENOMEM. */
int kvi_store_check(struct kvi_store *store, const uint64_t *parent);
/**
 * Follow the blocks down from the parent (NULL: the root) as far as their places exist. Returns 0,
 * -ENOMEM, or -EINVAL when a hash occurs twice, the parent's included.
 */
int kvi_store_find(struct kvi_store *store, const uint64_t *parent);
/**
 * Decide what happens to each block's name, and which older places are removed. Returns 0, -EINVAL
 * when one of these is the parent or above it, or -ENOMEM.
 */
int kvi_store_judge(struct kvi_store *store);

/** Allocate all that the store needs, without a visible change. Returns 0, -ENOMEM or -ENOSPC. */
int kvi_store_plan(struct kvi_store *store);
/** Undo kvi_store_plan. */
void kvi_store_cancel(struct kvi_store *store);

/** Count names that the store gives another place than the holder had. */
void kvi_store_count_moved(struct kvi_store *store, uint64_t n);

/** Change the tree. */
void kvi_store_commit(struct kvi_store *store);

/** Return the position of block @i, planned or existing, and its chain in *@ret_chain. */
uint32_t kvi_store_pos(const struct kvi_store *store, size_t i, struct kvi_chain **ret_chain);

#endif
