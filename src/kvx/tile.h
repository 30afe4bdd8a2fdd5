// SPDX-License-Identifier: Apache-2.0
/**
 * tile.h: move a run of consecutive tokens, all heads, on the CPU.
 *
 * Every operation consists of tiles: tokens at a constant stride on both sides. The two maps
 * decide, once per plan and tensor, how a tile moves:
 *
 *   rows      equal dtypes, both rows contiguous: copies, of whole tiles where heads and tokens are
 *             contiguous, too
 *   units     equal dtypes, one side (or both alike) in chunks: a transposition of chunks
 *   convert   both rows contiguous: one conversion per row, or per token or tile where they join
 *   staged    all else with up to STAGE_DIMS dims: rows are collected, converted and distributed
 *             through two small buffers
 *   elements  the rest (enormous rows in chunks): one element at a time
 */
#ifndef KVX_TILE_H
#define KVX_TILE_H

#include "kvx/isa/isa.h"
#include "kvx/plan.h"

struct kvx_tile {
    const char *src; /* row of the first token and head */
    char *dst;
    const char *src_scale; /* scale of the tile's block and head 0; NULL: 1 */
    const char *dst_scale;
    uint32_t n_tokens;
};

struct kvx_mover {
    void (*move)(const struct kvx_mover *mover, const struct kvx_tile *tile);
    const struct kvx_isa *isa;
    const struct kvx_plan_side *side;
    kvx_dtype_t src_dtype, dst_dtype;
    uint32_t src_size, dst_size; /* bytes per element */
    kvx_convert_fn convert;      /* NULL: equal dtypes */
    bool stream;
    bool head_inner;        /* visit all heads of a token before the next token */
    uint32_t n_heads;       /* after joining */
    uint64_t n_dims;        /* dims of a joined row */
    bool one_run;           /* joined rows of a tile are consecutive, too */
    struct kvx_units units; /* units and staged: a template */
};

/** Prepare a mover. @stream: the target won't be read soon. */
void kvx_mover_init(struct kvx_mover *mover, const struct kvx_plan *plan, int kv, bool stream);

#endif
