// SPDX-License-Identifier: Apache-2.0
/**
 * A naive model of kv_index.h: for each holder an unordered list of its blocks, in the tree or
 * parked, each with its tiers, copies and name. Every lookup searches the list. Slow, and easy to
 * verify. Used by the tests and the fuzzer.
 */
#ifndef KV_TEST_INDEX_MODEL_H
#define KV_TEST_INDEX_MODEL_H

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv_index.h"

/* Places are interned: a number for each path that was ever mentioned. 0 is the root. */
struct model_place {
    uint32_t parent;
    uint64_t local;
    uint32_t next_same; /* hash chain */
};

#define MODEL_SOURCES 3

/* In the tree at @place, or parked below the name @parent. */
struct model_block {
    uint64_t name;
    uint32_t place, mask;
    bool parked;
    uint64_t parent, local, seq; /* parked */
    uint32_t copies[KV_N_TIERS][MODEL_SOURCES];
    bool taken[KV_N_TIERS]; /* of source 0: the last event was a removal, and copies are left */
};

struct model_holder {
    struct kv_holder key;
    struct model_block *blocks;
    size_t n, capacity;
    struct {
        uint32_t implied, n_stored_again;
        bool each; /* some block was removed twice in a row */
    } tier[KV_N_TIERS];
};

#define MODEL_BUCKETS 65536

struct model {
    struct model_place *places;
    uint32_t n_places, places_capacity;
    uint32_t bucket[MODEL_BUCKETS];
    struct model_holder *holders;
    size_t n_holders;
    bool forgets; /* nothing is parked */
    uint64_t seq;
};

struct model *model_new(void);

void model_free(struct model *m);

uint32_t model_child(struct model *m, uint32_t parent, uint64_t local);

struct model_holder *model_holder(struct model *m, struct kv_holder key, bool add);

int model_add(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
              bool counted, const uint64_t *parent, const struct kv_block *blocks, size_t n,
              struct kvi_stored *ret);

long model_add_known(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
                     bool counted, const uint64_t *hashes, size_t n);

long model_take(struct model *m, struct kv_holder key, enum kv_tier tier, uint32_t source,
                const uint64_t *hashes, const uint32_t *left, size_t n);

/** The same with copies that aren't counted, of source 0. */
int model_store(struct model *m, struct kv_holder key, enum kv_tier tier, const uint64_t *parent,
                const struct kv_block *blocks, size_t n, struct kvi_stored *ret);

long model_store_known(struct model *m, struct kv_holder key, enum kv_tier tier,
                       const uint64_t *hashes, size_t n);

long model_remove(struct model *m, struct kv_holder key, enum kv_tier tier, const uint64_t *hashes,
                  size_t n);

/** Return the right value of kvi_holder_info.doubted. */
uint64_t model_doubted(const struct model_holder *h);

void model_clear(struct model *m, struct kv_holder key);

void model_clear_tiers(struct model *m, struct kv_holder key, uint32_t tiers, uint32_t source);

int model_remove_holders(struct model *m, uint64_t worker, const uint32_t *rank);

/** One holder's answer. */
void model_find(struct model *m, const struct model_holder *h, const uint64_t *hashes, size_t n,
                uint32_t reach[KV_N_TIERS]);

extern char model_text[256];

#define MODEL_DIFFERS(...) (snprintf(model_text, sizeof(model_text), __VA_ARGS__), model_text)

const char *model_compare_find(struct model *m, struct kvi_index *ix, struct kvi_matches *matches,
                               const uint64_t *hashes, size_t n);

const char *model_compare_stats(struct model *m, struct kvi_index *ix);

#endif
