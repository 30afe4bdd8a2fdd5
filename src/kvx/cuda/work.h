// SPDX-License-Identifier: Apache-2.0
/**
 * work.h: what one thread does. The whole GPU path but for the launch, as plain functions.
 *
 * kernels.cuh wraps kvx_work_thread into kernels, with a constant kind, so that everything about it
 * folds away. tests/kvx/emulated_backend.c calls the same function for every thread of a grid on
 * the CPU. Threads share nothing and never wait for each other.
 *
 * A thread's step through a tile is a sequence of phases over its `unroll` units, so that loads of
 * one phase are all under way before the next phase needs them:
 *
 *   locate   which token, head and dims a unit is (multiplications only)
 *   load     WRITE: where the data lies doesn't depend on the slot
 *   place    read the slot, or the table entry, and compute both addresses; units of one token
 * share it load     otherwise store    convert and store
 */
#ifndef KVX_CUDA_WORK_H
#define KVX_CUDA_WORK_H

#include "kvx/cuda/unit.h"

enum { KVX_MAX_UNROLL = 4 };

/** Part and place in the unit sequence at which a tile starts. */
struct kvx_tile_start {
    uint32_t kv, layer;
    uint64_t group_token; /* in units of 2^token_lanes tokens */
    uint32_t group;       /* in units of 2^unit_lanes units of the token */
};

struct kvx_located {
    uint64_t token;
    uint32_t head, dim;
    uint32_t present; /* 0: padding of the lane rectangle, or beyond the end */
};

/** Addresses of a token's head 0. */
struct kvx_ends {
    uint64_t token; /* token of these addresses; UINT64_MAX: none yet */
    enum kvx_row row;
    int64_t src_block, dst_block; /* for scales */
    const char *src;
    char *dst;
};

/* Position of a GATHER's output. */
struct kvx_position {
    uint32_t sequence, beam, pos, length;
    uint64_t start; /* see kvx_sequence_length */
};

KVX_HD void kvx_tile_begin(const struct kvx_job *job, uint64_t tile, struct kvx_tile_start *ret)
{
    uint64_t of_part = kvx_div(tile, &job->parts);
    uint32_t part = (uint32_t)(tile - of_part * job->parts.value);
    uint64_t group = (of_part << job->tile_log) >> (job->token_lanes + job->unit_lanes);

    ret->kv = part & 1;
    ret->layer = part >> 1;
    ret->group_token = kvx_div(group, &job->groups);
    ret->group = (uint32_t)(group - ret->group_token * job->groups.value);
}

/**
 * Locate the unit of lane @i of the tile. Rectangles are numbered along the units of a token group
 * first.
 */
KVX_HD void kvx_locate(const struct kvx_job *job, const struct kvx_tile_start *start, uint32_t i,
                       struct kvx_located *ret)
{
    uint32_t group = start->group + (i >> (job->token_lanes + job->unit_lanes));
    uint32_t down = kvx_div31(group, &job->groups);
    uint32_t token_lane = i >> job->unit_lanes & ((1U << job->token_lanes) - 1);
    uint32_t unit_lane = i & ((1U << job->unit_lanes) - 1);
    uint32_t unit = ((group - down * job->groups.value) << job->unit_lanes) + unit_lane;

    ret->token = ((start->group_token + down) << job->token_lanes) + token_lane;
    ret->head = kvx_div31(unit, &job->head_units);
    ret->dim = (unit - ret->head * job->head_units.value) * job->unit;
    ret->present = unit < job->n_units && ret->token < job->n_tokens;
}

KVX_HD void kvx_position_of(const struct kvx_job *job, const struct kvx_plan *p, uint64_t token,
                            struct kvx_position *ret)
{
    uint64_t row = kvx_div(token, &job->positions);

    ret->pos = (uint32_t)(token - row * job->positions.value);
    ret->sequence = (uint32_t)kvx_div(row, &job->beams);
    ret->beam = (uint32_t)(row - (uint64_t)ret->sequence * job->beams.value);
    ret->length = kvx_sequence_length(p, ret->sequence, &ret->start);
}

KVX_HD void kvx_place_write(const struct kvx_plan *p, const struct kvx_tile_start *start,
                            struct kvx_ends *ends)
{
    const struct kvx_plan_side *side = &p->side[start->kv];
    struct kvx_place place;

    ends->row = kvx_slot_place(p, (uint32_t)ends->token, &place);
    ends->src_block = 0;
    ends->dst_block = place.block;
    ends->dst = p->layer[start->layer].dst[start->kv] +
                kvx_map_row(&side->dst, place.block, 0, place.offset, 0);
}

KVX_HD void kvx_place_gather(const struct kvx_job *job, const struct kvx_plan *p,
                             const struct kvx_tile_start *start, struct kvx_ends *ends)
{
    const struct kvx_plan_side *side = &p->side[start->kv];
    const struct kvx_layer *layer = &p->layer[start->layer];
    struct kvx_position at;
    struct kvx_place place = {0, 0, 0};

    kvx_position_of(job, p, ends->token, &at);
    ends->row = KVX_ROW_NONE;
    if (at.pos < at.length)
        ends->row = kvx_table_place(p, start->kv, at.sequence, at.beam, at.pos, at.start, &place);
    ends->dst = layer->dst[start->kv] + kvx_map_row(&side->dst, at.sequence, at.beam, at.pos, 0);
    if (ends->row != KVX_ROW_MOVE)
        return;
    ends->src_block = place.block;
    ends->dst_block = 0;
    ends->src = (place.pool ? layer->src_pool : layer->src[start->kv]) +
                kvx_map_row(&side->src, place.block, 0, place.offset, 0);
}

KVX_HD void kvx_place_copy(const struct kvx_plan *p, const struct kvx_tile_start *start,
                           struct kvx_ends *ends)
{
    const struct kvx_plan_side *side = &p->side[start->kv];
    const struct kvx_layer *layer = &p->layer[start->layer];
    uint32_t pair = (uint32_t)kvx_div(ends->token, &p->block_size);
    uint32_t offset = (uint32_t)(ends->token - (uint64_t)pair * p->block_size.value);

    ends->row = kvx_pair_place(p, pair, &ends->src_block, &ends->dst_block);
    if (ends->row != KVX_ROW_MOVE)
        return;
    ends->src = layer->src[start->kv] + kvx_map_row(&side->src, ends->src_block, 0, offset, 0);
    ends->dst = layer->dst[start->kv] + kvx_map_row(&side->dst, ends->dst_block, 0, offset, 0);
}

KVX_HD void kvx_place(struct kvx_kind kind, const struct kvx_job *job, const struct kvx_plan *p,
                      const struct kvx_tile_start *start, uint64_t token, struct kvx_ends *ends)
{
    if (token == ends->token)
        return;
    ends->token = token;
    if (kind.op == KVX_OP_WRITE)
        kvx_place_write(p, start, ends);
    else if (kind.op == KVX_OP_GATHER)
        kvx_place_gather(job, p, start, ends);
    else
        kvx_place_copy(p, start, ends);
}

/** Return the source of a WRITE's token, which doesn't depend on the slot. */
KVX_HD const char *kvx_write_source(const struct kvx_plan *p, const struct kvx_tile_start *start,
                                    uint64_t token)
{
    return p->layer[start->layer].src[start->kv] + (int64_t)token * p->side[start->kv].src.token;
}

/** Count a dropped token once (see kvx_table_drop_counts): the thread with its first unit does. */
KVX_HD void kvx_count_drop(struct kvx_kind kind, const struct kvx_job *job,
                           const struct kvx_plan *p, const struct kvx_tile_start *start,
                           const struct kvx_located *unit)
{
    struct kvx_position at;

    if (!p->dropped || start->layer || unit->head || unit->dim)
        return;
    if (kind.op == KVX_OP_GATHER) {
        kvx_position_of(job, p, unit->token, &at);
        if (!kvx_table_drop_counts(p, start->kv, at.sequence, at.beam, at.pos, at.start))
            return;
    } else if (start->kv) {
        return;
    }
    /* A COPY counts pairs of blocks, not tokens. */
    if (kind.op == KVX_OP_COPY &&
        kvx_div(unit->token, &p->block_size) * p->block_size.value != unit->token)
        return;
        /* Of the device's scope: over PCIe, a GPU's atomics on host memory have no other. */
#ifdef __CUDA_ARCH__
    atomicAdd((unsigned long long *)p->dropped, 1ULL);
#else
    __atomic_fetch_add(p->dropped, 1, __ATOMIC_RELAXED);
#endif
}

/* --------------------------------------------------------------------------------------------- */
/* Moving one unit; @row is where its head's first dim lies */

/* Return the elements of a unit that is converted. */
KVX_HD uint32_t kvx_kind_elements(struct kvx_kind kind)
{
    uint32_t less = kind.src_size < kind.dst_size ? kind.src_size : kind.dst_size;
    uint32_t more = kind.src_size < kind.dst_size ? kind.dst_size : kind.src_size;

    return KVX_UNIT_BYTES / (kind.whole ? less : more);
}

/* Return the bytes of a whole unit, on the side with elements of @size bytes (0: bits). */
KVX_HD uint32_t kvx_whole_bytes(struct kvx_kind kind, uint32_t size)
{
    return size ? kvx_kind_elements(kind) * size : (uint32_t)KVX_UNIT_BYTES;
}

KVX_HD void kvx_unit_load(struct kvx_kind kind, const struct kvx_job *job, uint32_t kv,
                          const struct kvx_map *map, const char *row, uint32_t dim, uint32_t *word)
{
    uint32_t bytes, piece = job->piece[kv][0], n = job->n_pieces[kv][0];

    if (kind.whole) {
        kvx_load_whole(word, row + kvx_map_dim(map, dim), kvx_whole_bytes(kind, kind.src_size),
                       job->stream);
        return;
    }
    bytes = piece * job->src_size;
    if (bytes == 16)
        kvx_load(word, row + kvx_map_dim(map, dim), 16, 0);
    else if (bytes == 8)
        kvx_load_pieces(word, row, map, dim, piece, n, 8);
    else if (bytes == 4)
        kvx_load_pieces(word, row, map, dim, piece, n, 4);
    else if (bytes == 2)
        kvx_load_pieces(word, row, map, dim, piece, n, 2);
    else
        kvx_load_pieces(word, row, map, dim, piece, n, 1);
}

KVX_HD void kvx_unit_store(struct kvx_kind kind, const struct kvx_job *job, uint32_t kv,
                           const struct kvx_map *map, char *row, uint32_t dim, const uint32_t *word)
{
    uint32_t bytes, piece = job->piece[kv][1], n = job->n_pieces[kv][1];

    if (kind.whole) {
        kvx_store_whole(row + kvx_map_dim(map, dim), word, kvx_whole_bytes(kind, kind.dst_size),
                        job->stream);
        return;
    }
    bytes = piece * job->dst_size;
    if (bytes == 16)
        kvx_store(row + kvx_map_dim(map, dim), word, 16, 0);
    else if (bytes == 8)
        kvx_store_pieces(row, map, dim, piece, n, 8, word);
    else if (bytes == 4)
        kvx_store_pieces(row, map, dim, piece, n, 4, word);
    else if (bytes == 2)
        kvx_store_pieces(row, map, dim, piece, n, 2, word);
    else
        kvx_store_pieces(row, map, dim, piece, n, 1, word);
}

/* Return the address of the scale of a block and head; NULL: none. */
KVX_HD const float *kvx_scale_of(const char *base, const struct kvx_scale_map *map, int64_t block,
                                 uint32_t head)
{
    return base ? (const float *)(base + block * map->block + head * map->head) : NULL;
}

/** State of one unit that a thread keeps between the load phase and the store phase. */
struct kvx_in_flight {
    struct kvx_located at;
    uint32_t word[KVX_UNIT_WORDS];
    uint32_t row; /* enum kvx_row */
    int64_t src_block, dst_block;
    const char *src;
    char *dst;
};

KVX_HD void kvx_unit_finish(struct kvx_kind kind, const struct kvx_job *job,
                            const struct kvx_plan *p, const struct kvx_tile_start *start,
                            struct kvx_in_flight *u)
{
    const struct kvx_plan_side *side = &p->side[start->kv];
    const struct kvx_layer *layer = &p->layer[start->layer];
    char *row = u->dst + u->at.head * side->dst.head;
    uint32_t target[KVX_UNIT_WORDS] = {0};

    if (u->row == KVX_ROW_MOVE && kind.src_size) {
        const float *src_scale = NULL, *dst_scale = NULL;

        /* Only FP8 caches have scales, and an IO tensor is no cache. */
        if (kind.src_size == 1 && kind.op != KVX_OP_WRITE)
            src_scale = kvx_scale_of(layer->src_scale[start->kv], &side->src_scale, u->src_block,
                                     u->at.head);
        if (kind.dst_size == 1 && kind.op != KVX_OP_GATHER)
            dst_scale = kvx_scale_of(layer->dst_scale[start->kv], &side->dst_scale, u->dst_block,
                                     u->at.head);
        kvx_unit_convert(kvx_kind_elements(kind), p->src_dtype, kind.src_size, p->dst_dtype,
                         kind.dst_size, src_scale, dst_scale, u->word, target);
        kvx_unit_store(kind, job, start->kv, &side->dst, row, u->at.dim, target);
    } else if (u->row == KVX_ROW_MOVE) {
        kvx_unit_store(kind, job, start->kv, &side->dst, row, u->at.dim, u->word);
    } else if (kind.op == KVX_OP_GATHER && p->zero_padding) {
        kvx_unit_store(kind, job, start->kv, &side->dst, row, u->at.dim, target);
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Tiles */

/**
 * Return @tile, or the next tile of this block with work when @tile lies wholly in the padding of a
 * GATHER's row. Padding can be most of the output, so it is skipped at once.
 */
KVX_HD uint64_t kvx_skip_padding(const struct kvx_job *job, const struct kvx_plan *p, uint64_t tile,
                                 const struct kvx_tile_start *start, uint64_t n_blocks)
{
    uint64_t first = start->group_token << job->token_lanes, end, next;
    struct kvx_position at;

    if (p->zero_padding || first >= job->n_tokens)
        return tile;
    kvx_position_of(job, p, first, &at);
    if (at.pos < at.length)
        return tile;
    /* Continue with the tile of the next row's first token and first unit, of part 0. */
    end = (first - at.pos + job->positions.value) >> job->token_lanes;
    next = (end * job->groups.value << (job->token_lanes + job->unit_lanes)) >> job->tile_log;
    next *= job->parts.value;
    return next <= tile ? tile : tile + kvx_div(next - tile, &job->blocks) * n_blocks;
}

KVX_HD void kvx_work_tile(struct kvx_kind kind, const struct kvx_job *job, const struct kvx_plan *p,
                          const struct kvx_tile_start *start, uint32_t thread)
{
    const struct kvx_plan_side *side = &p->side[start->kv];
    uint32_t first = thread / KVX_WARP * (KVX_WARP * kind.unroll) + thread % KVX_WARP;
    struct kvx_in_flight unit[KVX_MAX_UNROLL];
    struct kvx_ends ends;

    ends.token = UINT64_MAX;
    ends.row = KVX_ROW_NONE;
    ends.src_block = ends.dst_block = 0;
    ends.src = NULL;
    ends.dst = NULL;
    KVX_UNROLL
    for (uint32_t u = 0; u < kind.unroll; u++) {
        kvx_locate(job, start, first + u * KVX_WARP, &unit[u].at);
        KVX_UNROLL
        for (uint32_t w = 0; w < KVX_UNIT_WORDS; w++)
            unit[u].word[w] = 0;
        if (kind.op == KVX_OP_WRITE && unit[u].at.present)
            kvx_unit_load(kind, job, start->kv, &side->src,
                          kvx_write_source(p, start, unit[u].at.token) +
                              unit[u].at.head * side->src.head,
                          unit[u].at.dim, unit[u].word);
    }
    KVX_UNROLL
    for (uint32_t u = 0; u < kind.unroll; u++) {
        unit[u].row = KVX_ROW_NONE;
        if (!unit[u].at.present)
            continue;
        kvx_place(kind, job, p, start, unit[u].at.token, &ends);
        unit[u].row = ends.row;
        unit[u].src = ends.src;
        unit[u].dst = ends.dst;
        unit[u].src_block = ends.src_block;
        unit[u].dst_block = ends.dst_block;
        if (ends.row == KVX_ROW_DROP)
            kvx_count_drop(kind, job, p, start, &unit[u].at);
    }
    KVX_UNROLL
    for (uint32_t u = 0; u < kind.unroll && kind.op != KVX_OP_WRITE; u++) {
        if (unit[u].row == KVX_ROW_MOVE)
            kvx_unit_load(kind, job, start->kv, &side->src,
                          unit[u].src + unit[u].at.head * side->src.head, unit[u].at.dim,
                          unit[u].word);
    }
    KVX_UNROLL
    for (uint32_t u = 0; u < kind.unroll; u++) {
        if (unit[u].at.present)
            kvx_unit_finish(kind, job, p, start, &unit[u]);
    }
}

/** Run thread @thread of block @block, of @n_blocks blocks of job->threads threads. */
KVX_HD void kvx_work_thread(struct kvx_kind kind, const struct kvx_job *job,
                            const struct kvx_plan *p, uint32_t block, uint32_t n_blocks,
                            uint32_t thread)
{
    for (uint64_t tile = block; tile < job->n_tiles; tile += n_blocks) {
        struct kvx_tile_start start;

        kvx_tile_begin(job, tile, &start);
        if (kind.op == KVX_OP_GATHER) {
            uint64_t next = kvx_skip_padding(job, p, tile, &start, n_blocks);

            if (next != tile) {
                tile = next - n_blocks;
                continue;
            }
        }
        kvx_work_tile(kind, job, p, &start, thread);
    }
}

#endif
