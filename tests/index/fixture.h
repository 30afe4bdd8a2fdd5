// SPDX-License-Identifier: Apache-2.0
/**
 * An index and the calls that its tests make.
 */
#ifndef TEST_INDEX_FIXTURE_H
#define TEST_INDEX_FIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "index/tree/tree.h"

#define N_MAX 1100

struct fixture {
    struct kvi_index *ix;
    struct kvi_matches matches;
    struct kv_block blocks[N_MAX];
};

extern const struct kv_holder W0, W1, W0R1; /* worker and rank: 0 0, 1 0, 0 1 */

int setup(void **state);

int teardown(void **state);

/** Engine hashes as rolling hashes are: they tell the whole path. */
uint64_t roll(uint64_t above, uint64_t local);

uint64_t path_hash(const uint64_t *locals, size_t n);

/** Store locals[from..n) below locals[0..from). */
int store_part(struct fixture *f, struct kv_holder holder, enum kv_tier tier,
               const uint64_t *locals, size_t from, size_t n, struct kvi_stored *ret);

#define LOCALS(...) ((const uint64_t[]){__VA_ARGS__}), sizeof((const uint64_t[]){__VA_ARGS__}) / 8

void store(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n);

long remove_block(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n);

const struct kvi_match *find(struct fixture *f, struct kv_holder holder, const uint64_t *locals,
                             size_t n);

uint32_t score(struct fixture *f, struct kv_holder holder, const uint64_t *locals, size_t n);

uint64_t n_blocks(struct fixture *f);

/** 1, 2, ... with another value from @fork on. */
const uint64_t *sequence(size_t n, size_t fork, uint64_t other);

/** A sum over blocks: the same however the runs are cut and ordered. */
int sum_blocks(void *arg, const struct kvi_dump_run *run);

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
