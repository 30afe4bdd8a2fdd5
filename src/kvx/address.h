// SPDX-License-Identifier: Apache-2.0
/**
 * address.h: where an element of a paged tensor lies. Written once, for C and CUDA.
 *
 * Every tensor here, a cache in any layout or an IO tensor of any rank, is one linear map from
 * (block, beam, token, head, dim) to a byte offset:
 *
 *     block * m.block + beam * m.beam + token * m.token + head * m.head
 *         + (dim / pack) * m.chunk + (dim % pack) * m.elem
 *
 * | tensor              | block     | beam    | token | head | chunk | elem | pack |
 * |---------------------|-----------|---------|-------|------|-------|------|------|
 * | cache NHD, CUSTOM4  | s0        | 0       | s1    | s2   | 0     | s3   | D    |
 * | cache HND           | s0        | 0       | s2    | s1   | 0     | s3   | D    |
 * | HND_PACKED, CUSTOM5 | s0        | 0       | s3    | s1   | s2    | s4   | p    |
 * | pool (KV_OFFSETS)   | bytes/blk | 0       | by layout, as above                |
 * | write input         | 0         | 0       | s0    | s1   | 0     | s2   | D    |
 * | gather output 3D    | M*W*token | M*token | s0    | s1   | 0     | s2   | D    |
 * | gather output 4D    | W*beam    | s0      | s1    | s2   | 0     | s3   | D    |
 * | gather output 5D    | s0        | s1      | s2    | s3   | 0     | s4   | D    |
 *
 * (s0, s1, ... are the tensor's strides, in bytes; D = head_dim, M = max_seq_len, W = beam_width).
 * "block" of a gather output is its sequence, "token" of a cache is the offset in the block.
 */
#ifndef KVX_ADDRESS_H
#define KVX_ADDRESS_H

#include "kvx/numeric.h"

/**
 * Division by an invariant. Exact for numerators below 2^63 (kvx_div) or 2^31 (kvx_div31), without
 * a hardware division. For a divisor that is no power of two, with c = ceil(log2 d), the magic
 * number ceil(2^(63+c) / d) has an error below 2^c, small enough for 63-bit numerators.
 */
struct kvx_divisor {
    uint64_t magic;   /* 0: the divisor is a power of two */
    uint32_t magic31; /* magic number for 31-bit numerators */
    uint32_t shift;
    uint32_t value;
    uint32_t pad;
};

/** Prepare a division by @value, which is not 0. On the host. */
static inline struct kvx_divisor kvx_divisor_make(uint32_t value)
{
    __extension__ typedef unsigned __int128 wide;
    struct kvx_divisor d = {0, 0, 0, value, 0};
    uint32_t log;

    if (value <= 1)
        return d;
    log = 32 - (uint32_t)__builtin_clz(value - 1); /* rounded up */
    d.shift = log;
    if ((value & (value - 1)) == 0)
        return d;
    d.shift = log - 1;
    d.magic = (uint64_t)((((wide)1 << (63 + log)) + value - 1) / value);
    d.magic31 = (uint32_t)((((uint64_t)1 << (31 + log)) + value - 1) / value);
    return d;
}

KVX_HD uint64_t kvx_mulhi64(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    __extension__ typedef unsigned __int128 wide;

    return (uint64_t)((wide)a * b >> 64);
#endif
}

KVX_HD uint64_t kvx_div(uint64_t n, const struct kvx_divisor *d)
{
    return (d->magic ? kvx_mulhi64(n, d->magic) : n) >> d->shift;
}

KVX_HD uint32_t kvx_div31(uint32_t n, const struct kvx_divisor *d)
{
    return (d->magic31 ? (uint32_t)((uint64_t)n * d->magic31 >> 32) : n) >> d->shift;
}

/** A map as in the table above; all strides in bytes. */
struct kvx_map {
    int64_t block, beam, token, head, chunk, elem;
    struct kvx_divisor pack; /* dims per chunk; head_dim where there is one chunk */
    uint32_t run;            /* number of contiguous dims from each multiple of run on (>= 1) */
    uint32_t align;          /* largest power of two <= 64 that divides every address of a run */
};

/** Return the offset of the first dim of a row. */
KVX_HD int64_t kvx_map_row(const struct kvx_map *m, int64_t block, uint32_t beam, uint32_t token,
                           uint32_t head)
{
    return block * m->block + beam * m->beam + token * m->token + head * m->head;
}

/** Return the offset of a dim within its row. */
KVX_HD int64_t kvx_map_dim(const struct kvx_map *m, uint32_t dim)
{
    uint32_t chunk = kvx_div31(dim, &m->pack);

    return chunk * m->chunk + (int64_t)(dim - chunk * m->pack.value) * m->elem;
}

/** Strides of scales in bytes (0: independent of that number); the base is in kvx_layer. */
struct kvx_scale_map {
    int64_t block, head;
};

KVX_HD float kvx_scale_at(const void *base, const struct kvx_scale_map *m, int64_t block,
                          uint32_t head)
{
    float scale = 1.0F;

    if (base)
        memcpy(&scale, (const char *)base + block * m->block + head * m->head, sizeof(scale));
    return scale;
}

/** Return element @i of an array of S32 (@wide 0) or S64 (@wide 1). */
KVX_HD int64_t kvx_index_at(const void *array, uint32_t wide, uint64_t i)
{
    return wide ? ((const int64_t *)array)[i] : (int64_t)((const int32_t *)array)[i];
}

#endif
