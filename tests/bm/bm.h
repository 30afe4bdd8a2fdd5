// SPDX-License-Identifier: Apache-2.0
/** Shared by the tests of pools: a registry with pools, keys by number, a record of all events. */
/*
 * Which test holds which of the original's cases (names as there; "-": what moves between tiers or
 * nodes):
 *
 *   block_pool_state, _blocking          pool: state, blocking; the fifth token: pool: state,
 *                                        lifecycle: table
 *   evict_leaves, parent_child           pool: evict_leaves; evict: lineage_leaves, guide:
 *                                        leaf_first
 *   match_return, touch                  pool: match_return, match_repeated, touch, touch_chain
 *   duplicates allowed, disabled         pool: duplicates, duplicates_rejected, duplicates_together
 *   priorities, lifecycle, matching      evict: common; lifecycle: table; pool: match_return
 *   single handle, several, none         events: single_handle, one_register_is_one_batch,
 *                                        nothing_is_no_batch
 *   removed handle                       events: single_handle; lifecycle: table
 *   capacity lifecycle                   pool: capacity; evict: all_at_once, lfu_levels; model
 *   frequency counted once               evict: lfu_counts
 *   eager transition, races              pool_threads: all of it; pool: revive
 *   allocation rollback                  pool: shortage, fifo; pool_starved
 *   reset_inactive_pool                  pool: reset
 *   lineage                              evict: lineage_leaves, _ages (B, A, Y, X), _ghosts, _long,
 *                                        _splits
 *   size validation, ids, determinism    pool: options; lifecycle: table; hash: formulas
 *   batching, order of events            events: order, batches_by_size, batches_by_window
 *   layouts                              layout, layout_wire: exact_bytes, round_trip
 *   offload, onboard, managers           -
 *
 * Hashes of all vectors: hash (and pool: blocking, lifecycle: hashes, through a pool). Not there:
 * the lineage hash, of which the original has three definitions. Invariants: model; check breaks
 * each of them.
 */
#ifndef KV_TEST_BM_H
#define KV_TEST_BM_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "kvbm_events.h"
#include "kvbm_pool.h"
#include "kvbm_tokens.h"

#define BM_BLOCK 4 /* tokens per block */

struct bm {
    struct kvbm_events *events;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_event *told; /* key and parent hold a key's 8 bytes each */
    size_t n_told;
};

/** Append the events to the struct bm @arg: a callback of its events. */
void bm_record(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost);

/** Wait until bm->told has every event published so far. */
size_t bm_told(struct bm *bm);

/** Key of the @i-th recorded event. */
uint64_t bm_told_key(const struct bm *bm, size_t i);

/** Create one more pool in the registry; fields of @more that are 0 are those of bm_open. */
struct kvbm_pool *bm_pool(struct bm *bm, const struct kvbm_pool_opts *more);

/** A registry with one pool: 7 blocks of 4 tokens, unless @opts says otherwise. */
void bm_open(struct bm *bm, const struct kvbm_pool_opts *opts);

/** Check the registry's invariants and destroy all of it. */
void bm_close(struct bm *bm);

/** Statistics, whose states must add up to the pool's blocks. */
struct kvbm_pool_stats bm_stats(struct kvbm_pool *pool);

/** Blocks that an allocation could get. */
size_t bm_available(struct kvbm_pool *pool);

/** Blocks that hold keys[0..n), which come behind @parent at @position: complete, not registered. */
int bm_complete_at(struct kvbm_pool *pool, uint32_t group, const uint64_t *parent,
                   uint32_t position, const uint64_t *keys, size_t n, struct kvbm_complete *ret);

/** The same, registered: @ret holds them. */
void bm_put_at(struct kvbm_pool *pool, uint32_t group, const uint64_t *parent, uint32_t position,
               const uint64_t *keys, size_t n, struct kvbm_immutable *ret);

/** The same for the first blocks of a sequence. */
void bm_put(struct kvbm_pool *pool, const uint64_t *keys, size_t n, struct kvbm_immutable *ret);

/** One first block of a sequence, held by nobody: inactive. */
void bm_leave(struct kvbm_pool *pool, uint64_t key);

/** Whether the pool has a block of this key. */
bool bm_has(struct kvbm_pool *pool, uint64_t key);

/** Take @n blocks and give them back: evicts, when there are fewer free ones. */
void bm_churn(struct kvbm_pool *pool, size_t n);

#endif
