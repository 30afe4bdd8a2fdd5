// SPDX-License-Identifier: Apache-2.0
/** Shared by the steps of kvi_store: look.c, plan.c (allocates) and store.c (changes the tree). */
#ifndef KV_INDEX_STORE_H
#define KV_INDEX_STORE_H

#include "index/tree.h"

/** Blocks of the path that lie in one chain: @from..@to, the first of them block number @first. */
struct kvi_piece {
    struct kvi_chain *chain;
    uint32_t from, to;
    size_t first;
};

/** Action to take for a block's name. */
enum kvi_naming {
    KVI_NAME_KEEP,
    KVI_NAME_TABLE,   /* a new block, its name goes into the table */
    KVI_NAME_ALIAS,   /* an alias for a place that has none of this holder */
    KVI_NAME_REALIAS, /* in place of the one it has */
    KVI_NAME_REVERT   /* the alias goes: the slot's name is right */
};

/** An older place of this holder that loses its name, and with it goes. */
struct kvi_move {
    struct kvi_chain *chain;
    uint32_t off;
    uint64_t depth; /* blocks above it; counted only when there are several */
};

/** Arrays that calls reuse. */
struct kvi_scratch {
    struct kvi_piece *pieces;
    size_t pieces_capacity;
    struct kvi_move *moves;
    size_t moves_capacity;
    uint8_t *naming;
    size_t naming_capacity;
    uint8_t *parked; /* tiers in which each block was parked, when any was */
    size_t parked_capacity;
    uint64_t *names; /* whose parked children are still to be attached */
    size_t names_capacity;
    struct kv_block *run; /* parked blocks that go into the tree in one store */
    size_t run_capacity;
    struct kvi_hanging {
        const struct kvi_chain *chain;
        uint64_t above; /* name of the block above it */
    } * hanging;        /* chains to be parked */
    size_t hanging_capacity;
    uint64_t *hashes; /* of a call, last first */
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
    struct kvi_holder *part; /* the store is one of places for it: see windows.h */
    bool keeps;    /* a block that the holder has keeps its place, wherever the event puts it */
    bool only_new; /* -EEXIST when the holder has one of the blocks */
    bool holder_is_new;
    bool twins;   /* another place has the hash of one of the new blocks */
    bool counted; /* blocks that it has get one copy more */
    bool again;   /* of parked blocks: copies are as they were */
    bool unparks; /* scratch->parked is of this call */
    enum kv_tier tier;
    uint32_t source;
    const struct kv_block *blocks;
    size_t n;

    struct kvi_chain *parent; /* where the path begins: below block parent_off of it */
    uint32_t parent_off;      /* unused with the root */
    size_t n_pieces, n_moves;
    size_t n_path;        /* blocks whose places exist */
    struct kvi_chain *at; /* the others go below block off - 1 of it */
    uint32_t off;

    /* Allocated by kvi_store_plan. */
    struct kvi_split split;  /* split.chain: NULL when none is needed */
    uint32_t n_append;       /* blocks that go on at the end of `at` */
    struct kvi_chain *fresh; /* chains for the rest, each below the one before */
    size_t n_named;          /* names that were put into place, for taking them back */
    struct kvi_stored stored;
    size_t n_gained; /* places that the holder newly has */
};

/** Whether a hash is there twice, the parent counted. Returns 0, -EINVAL or -ENOMEM. */
int kvi_store_check(struct kvi_store *store, const uint64_t *parent);
/** Follow the blocks down from the parent, as far as their places exist. Returns 0, -ENOMEM, or
 * -EINVAL when a hash is there twice, that of the parent (NULL: root) counted. */
int kvi_store_find(struct kvi_store *store, const uint64_t *parent);
/** Decide what becomes of each block's name, and which older places go. Returns 0, -EINVAL when one
 * is the parent or above it, or -ENOMEM. */
int kvi_store_judge(struct kvi_store *store);

/** Allocate all that the store needs, changing nothing that can be seen. Returns 0 or -ENOMEM,
 * -ENOSPC. */
int kvi_store_plan(struct kvi_store *store);
/** Undo it. */
void kvi_store_cancel(struct kvi_store *store);

/** Where block @i of the store lies (its chain in @ret_chain), planned or existing. */
uint32_t kvi_store_pos(const struct kvi_store *store, size_t i, struct kvi_chain **ret_chain);

#endif
