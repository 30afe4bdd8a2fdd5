// SPDX-License-Identifier: Apache-2.0
/**
 * plan.h: a validated call, compiled into plain numbers.
 *
 * compile_*.c turn descriptors into a plan. All checks that need no array content are done, strides
 * are bytes, divisions are multiplications, and optional fields have their defaults. host.c
 * executes plans on the CPU and libkvx_cuda on a GPU; neither reads a descriptor. Both use the
 * resolving functions below to decide which row goes where, so the CPU tests cover that part of the
 * GPU's code.
 *
 * A plan moves rows: head_dim elements of one (token, head), for K (kv = 0) and V (kv = 1), in each
 * of n_layers layers. `src` and `dst` are maps (address.h):
 *
 * | op     | src         | dst       | one row per                              | resolved by     |
 * |--------|-------------|-----------|------------------------------------------|-----------------|
 * | WRITE  | IO tensor   | cache     | token of n_tokens                        | kvx_slot_place  |
 * | GATHER | cache, pool | IO tensor | (sequence, beam, position < max_seq_len) | kvx_table_place |
 * | COPY   | cache       | cache     | (pair of n_pairs, offset in the block)   | kvx_pair_place  |
 *
 * Elements of equal dtypes are copied byte for byte when convert is 0. Otherwise
 *     dst = encode(dst_dtype, decode(src_dtype, src) * src_scale / dst_scale)
 * in F32, in this order, each operation rounded; a scale whose base pointer is NULL is left out.
 * Only FP8 cache sides have a scale, indexed by the block id and head of that side.
 *
 * Results of a resolving function for a row:
 *   KVX_ROW_MOVE  move the row
 *   KVX_ROW_NONE  don't move it (negative or invalid slot, padding, null block). dst keeps its
 *                 bytes, except that a GATHER with zero_padding stores zero bits.
 *   KVX_ROW_DROP  an index is out of range: as NONE, and count the row in *dropped when that isn't
 *                 NULL. check.c checks host plans beforehand, so on a host this only happens when
 *                 the caller asked for it.
 *
 * A plan may be passed to a kernel by value (it is below 4 KiB). It is valid only during the call:
 * its pointers are the caller's.
 */
#ifndef KVX_PLAN_H
#define KVX_PLAN_H

#include "kvx/address.h"

/** Most layers of one plan; longer lists become several plans. */
#define KVX_PLAN_LAYERS 32

enum kvx_op { KVX_OP_WRITE, KVX_OP_GATHER, KVX_OP_COPY };

enum kvx_row { KVX_ROW_MOVE, KVX_ROW_NONE, KVX_ROW_DROP };

/** Base pointers of one layer, [0] for K and [1] for V. */
struct kvx_layer {
    const char *src[2];   /* GATHER from pools: the primary pool, twice */
    const char *src_pool; /* GATHER from pools: the secondary pool or NULL */
    char *dst[2];
    const char *src_scale[2]; /* NULL: no scale */
    const char *dst_scale[2];
};

/** Addressing of K, or V; the same for every layer. */
struct kvx_plan_side {
    struct kvx_map src, dst;
    struct kvx_scale_map src_scale, dst_scale;
};

struct kvx_plan {
    uint32_t size; /* sizeof(struct kvx_plan): checked when a backend is loaded */
    uint32_t op;   /* enum kvx_op */
    /* kvx_phase_t, a hint: many small rows or few large ones. Never changes results. */
    uint32_t phase;
    uint32_t device; /* 1: all memory is device-accessible, and the backend runs the plan */
    kvx_dtype_t src_dtype, dst_dtype;
    uint32_t convert;      /* 0: copy bytes (dtypes are equal) */
    uint32_t zero_padding; /* GATHER: zero the rows that don't move */

    uint32_t n_layers, n_heads, head_dim;
    uint32_t none;                 /* 0, no hole: kvx_plan_merge compares bytes */
    struct kvx_divisor block_size; /* tokens per block, in .value */

    /* WRITE */
    uint32_t n_tokens;
    uint32_t slots_wide; /* 1: S64 */
    int64_t invalid_slot;
    uint64_t n_slots; /* slots of the cache: num_blocks * block_size, at most 2^63 */
    const void *slots;

    /* GATHER */
    uint32_t format; /* kvx_block_table_format_t */
    uint32_t indices_wide, indptr_wide, lengths_wide;
    uint32_t n_sequences, n_beams; /* rows of the output: n_sequences * n_beams * max_seq_len */
    uint32_t max_seq_len;
    uint32_t max_blocks; /* per sequence: row length of PACKED and KV_OFFSETS tables */
    uint32_t n_indices;
    uint32_t pad;
    const void *indices, *indptr, *lengths;
    /*
     * Upper bounds of valid pool indices (UINT64_MAX: not known); [1] is 0 without a secondary
     * pool.
     */
    uint64_t pool_blocks[2];

    /* COPY */
    uint32_t n_pairs;
    uint32_t pairs_wide;
    const void *src_blocks, *dst_blocks;

    uint64_t n_src_blocks; /* blocks of the cache: GATHER (PACKED, RAGGED), COPY */
    uint64_t n_dst_blocks; /* blocks of the cache: COPY */
    uint64_t *dropped;     /* NULL, or a counter in the cache's memory; added to atomically */

    struct kvx_plan_side side[2];
    struct kvx_layer layer[KVX_PLAN_LAYERS];
};

KVX_ABI_ASSERT(sizeof(struct kvx_plan) <= 4000); /* a kernel's arguments have 4 KiB */

/** Place of a row in the cache. */
struct kvx_place {
    int64_t block; /* index into the cache, or into pool @pool */
    uint32_t offset;
    uint32_t pool; /* 1: secondary */
};

/** Resolve a WRITE: find the slot of token @token. The same for K, V and all layers. */
KVX_HD enum kvx_row kvx_slot_place(const struct kvx_plan *p, uint32_t token, struct kvx_place *ret)
{
    int64_t slot = kvx_index_at(p->slots, p->slots_wide, token);
    uint64_t block;

    ret->block = 0;
    ret->offset = 0;
    ret->pool = 0;
    if (slot < 0 || slot == p->invalid_slot)
        return KVX_ROW_NONE;
    if ((uint64_t)slot >= p->n_slots)
        return KVX_ROW_DROP;
    block = kvx_div((uint64_t)slot, &p->block_size);
    ret->block = (int64_t)block;
    ret->offset = (uint32_t)((uint64_t)slot - block * p->block_size.value);
    return KVX_ROW_MOVE;
}

/**
 * Return the positions of sequence @s in a GATHER, at most max_seq_len. A RAGGED table ends at its
 * indptr, whatever the length says. *@start receives the sequence's first index (RAGGED).
 */
KVX_HD uint32_t kvx_sequence_length(const struct kvx_plan *p, uint32_t s, uint64_t *start)
{
    int64_t length = kvx_index_at(p->lengths, p->lengths_wide, s);

    *start = 0;
    if (p->format == KVX_BLOCK_TABLE_RAGGED) {
        int64_t first = kvx_index_at(p->indptr, p->indptr_wide, s);
        int64_t end = kvx_index_at(p->indptr, p->indptr_wide, (uint64_t)s + 1);

        if (first < 0 || end < first || end > (int64_t)p->n_indices)
            return 0;
        *start = (uint64_t)first;
        length = length < end - first ? length : end - first;
    }
    if (length < 0)
        return 0;
    return length < (int64_t)p->max_seq_len ? (uint32_t)length : p->max_seq_len;
}

/** Decode the pool index @raw of a KV_OFFSETS table. */
KVX_HD enum kvx_row kvx_pool_place(const struct kvx_plan *p, uint32_t raw, struct kvx_place *ret)
{
    if (raw == 0xffffffffU) /* a placeholder: no block */
        return KVX_ROW_NONE;
    ret->pool = raw >> 31;
    ret->block = (int64_t)(raw & 0x7fffffff);
    return (uint64_t)ret->block < p->pool_blocks[ret->pool] ? KVX_ROW_MOVE : KVX_ROW_DROP;
}

/**
 * Resolve a GATHER: find position @pos (below the sequence's length) of sequence @s, beam @w, for K
 * or V. @start is from kvx_sequence_length.
 */
KVX_HD enum kvx_row kvx_table_place(const struct kvx_plan *p, uint32_t kv, uint32_t s, uint32_t w,
                                    uint32_t pos, uint64_t start, struct kvx_place *ret)
{
    uint32_t logical = (uint32_t)kvx_div(pos, &p->block_size);
    int64_t id;

    ret->block = 0;
    ret->pool = 0;
    ret->offset = pos - logical * p->block_size.value;
    if (p->format == KVX_BLOCK_TABLE_RAGGED) {
        id = kvx_index_at(p->indices, p->indices_wide, start + pos);
    } else {
        uint64_t row = s;

        if (logical >= p->max_blocks)
            return KVX_ROW_DROP;
        if (p->format == KVX_BLOCK_TABLE_KV_OFFSETS) {
            row = ((uint64_t)s * p->n_beams + w) * 2 + kv;
            return kvx_pool_place(p, ((const uint32_t *)p->indices)[row * p->max_blocks + logical],
                                  ret);
        }
        id = kvx_index_at(p->indices, p->indices_wide, row * p->max_blocks + logical);
    }
    if (id < 0)
        return KVX_ROW_NONE;
    if ((uint64_t)id >= p->n_src_blocks)
        return KVX_ROW_DROP;
    ret->block = id;
    return KVX_ROW_MOVE;
}

/**
 * Resolve a COPY: find the two blocks of pair @i. A negative id on either side makes it no pair.
 */
KVX_HD enum kvx_row kvx_pair_place(const struct kvx_plan *p, uint32_t i, int64_t *src, int64_t *dst)
{
    *src = kvx_index_at(p->src_blocks, p->pairs_wide, i);
    *dst = kvx_index_at(p->dst_blocks, p->pairs_wide, i);
    if (*src < 0 || *dst < 0)
        return KVX_ROW_NONE;
    if ((uint64_t)*src >= p->n_src_blocks || (uint64_t)*dst >= p->n_dst_blocks)
        return KVX_ROW_DROP;
    return KVX_ROW_MOVE;
}

/**
 * Return true when a row answered with DROP counts in *dropped (ask for layer 0 and head 0 only). A
 * token counts once, however many layers and heads it has. A token of a KV_OFFSETS gather counts
 * once when its K index, its V index or both are bad. A pair of blocks counts once. WRITE and COPY:
 * @kv is 0.
 */
KVX_HD int kvx_table_drop_counts(const struct kvx_plan *p, uint32_t kv, uint32_t s, uint32_t w,
                                 uint32_t pos, uint64_t start)
{
    struct kvx_place other;

    if (kv == 0)
        return 1;
    return p->format == KVX_BLOCK_TABLE_KV_OFFSETS &&
           kvx_table_place(p, 0, s, w, pos, start, &other) != KVX_ROW_DROP;
}

#endif
