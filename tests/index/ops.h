// SPDX-License-Identifier: Apache-2.0
/** Random operations, applied to an index and to the model, and compared. */
#ifndef KV_TEST_INDEX_OPS_H
#define KV_TEST_INDEX_OPS_H

#include "index/tree/tree.h"
#include "model.h"
#include "random.h"

#define OPS_MAX_BLOCKS 700

/** The kind of world the operations play in. */
struct ops_profile {
    const char *name;
    uint32_t n_workers, n_ranks;
    uint32_t n_locals;     /* tokens hashes to choose from where paths diverge */
    uint32_t n_hashes;     /* engine hashes for the colliding kind */
    uint32_t max_blocks;   /* per store */
    uint32_t n_hash_seeds; /* engines name blocks by path and seed */
    uint32_t chaos;        /* percent of blocks with a random small hash */
    uint32_t diverge;      /* percent of blocks off the trunk */
    uint32_t grow;         /* percent of stores among operations */
    uint32_t n_tiers;
    bool copies;  /* counted, of several sources */
    bool forgets; /* nothing is parked */
};

struct ops {
    const struct ops_profile *profile;
    struct rng rng;
    struct kvi_index *ix;
    struct model *model;
    struct kvi_matches matches;
    struct kv_block blocks[OPS_MAX_BLOCKS];
    uint64_t hashes[OPS_MAX_BLOCKS], prompt[OPS_MAX_BLOCKS];
    size_t prompt_len;
    bool one_hash; /* in each call by hash */
    bool whole;    /* stores in the device tier alone, which are done as a whole */
    bool one_call; /* each store is one call, not chains and a rest */
    bool starve;   /* try each call with its first allocation refused, its second, ... */
    long n_starved;
};

const char *ops_one(struct ops *ops);

/** A prompt along something that somebody holds, then off it. */
const char *ops_query(struct ops *ops);

const char *ops_check(struct ops *ops);

/** Go on with a copy made from a dump. */
const char *ops_reload(struct ops *ops);

struct ops *ops_new(const struct ops_profile *profile);

/** An index and a model that are empty. */
void ops_begin(struct ops *ops);

/** After the @i-th operation: fails the test where something is @wrong. */
void ops_judge(const struct ops *ops, long i, const char *wrong);

void ops_free(struct ops *ops);

#endif
