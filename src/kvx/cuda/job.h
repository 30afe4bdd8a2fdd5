// SPDX-License-Identifier: Apache-2.0
/**
 * job.h: how the work of a plan is cut up for a grid of threads.
 *
 * The smallest piece of work is a unit: some elements of one (token, head), 16 bytes of them on the
 * side with the narrower elements. So a unit that is converted is 32 or 64 bytes on the other side,
 * and what a thread computes once per unit (its place, its scale) serves more bytes. Units of a
 * token are numbered through its heads, tokens as the plan numbers its rows:
 *
 *     token 0:  | head 0: u u u u | head 1: u u u u | ...      n_units per token
 *     token 1:  | head 0: u u u u | ...
 *
 * and the whole sequence is cut into tiles of `threads * unroll` units. A block of threads takes
 * tile after tile (a persistent grid); a tile belongs to one part, K or V of one layer, and the
 * same tile of all parts comes in a row, so that the slots and table entries it needs are in the
 * cache. Within a tile each warp owns a stretch of 32 * unroll units and every step takes 32
 * neighbours: 512 contiguous bytes where the layouts allow it, and mostly of one token, which is
 * then looked up once.
 *
 * Lanes. In a layout where the next token is nearer than the next unit (HND_PACKED), 32 neighbours
 * would touch 32 distant places. There a warp takes a small rectangle instead, 2^token_lanes tokens
 * times 2^unit_lanes units, such that both sides see stretches of at least one 32-byte sector:
 *
 *     IO       |tttt|    4 units: 64 bytes of each of 8 tokens
 *     PACKED   |tttttttt|  8 tokens: 128 bytes of each of 4 chunks
 *
 * Access. Where both sides' units are contiguous and aligned, a unit moves by 16-byte loads and
 * stores. Otherwise it is 16 bytes at most on the wider side, and falls into pieces (down to one
 * element) on the side that needs them.
 *
 * Any number of blocks covers all tiles; kvx_job_set_blocks says how many there are.
 */
#ifndef KVX_CUDA_JOB_H
#define KVX_CUDA_JOB_H

#include "kvx/plan.h"
#include "kvx_ext.h"

enum {
    KVX_WARP = 32,
    KVX_UNIT_BYTES = 16,
    KVX_JOB_THREADS = 256,      /* threads per block, for large jobs */
    KVX_JOB_SMALL_THREADS = 128 /* for small jobs: spread over more multiprocessors */
};

/** Compile-time constants of a kernel. All other numbers are in the job. */
struct kvx_kind {
    uint32_t op;                 /* enum kvx_op */
    uint32_t src_size, dst_size; /* bytes per element of a conversion; 0: copy bits */
    uint32_t whole;              /* 16-byte accesses on either side */
    uint32_t unroll;             /* units per thread in flight */
};

#ifdef __cplusplus
#define KVX_CONSTANT constexpr
#else
#define KVX_CONSTANT
#endif

/** Return the elements of a unit of 16-byte accesses that is converted between these sizes. */
KVX_HD KVX_CONSTANT uint32_t kvx_whole_unit(uint32_t src_size, uint32_t dst_size)
{
    return KVX_UNIT_BYTES / (src_size < dst_size ? src_size : dst_size);
}

/**
 * Return the units per thread in flight of a large job: 4 of 16 bytes on either side, 2 of larger
 * ones or of pieces. @src_size, @dst_size: as in kvx_kind, 0 for bits.
 */
KVX_HD KVX_CONSTANT uint32_t kvx_large_unroll(uint32_t whole, uint32_t src_size, uint32_t dst_size)
{
    return whole && src_size == dst_size ? 4 : 2;
}

struct kvx_job {
    uint64_t n_tokens;        /* tokens as the plan's op counts them; COPY: pairs * block_size */
    uint64_t n_tiles;         /* tiles of all parts */
    uint32_t n_units;         /* units per token */
    uint32_t unit;            /* elements per unit */
    uint32_t whole;           /* see kvx_kind */
    uint32_t threads, unroll; /* powers of two */
    uint32_t tile_log;        /* tile = threads * unroll = 2^tile_log units */
    uint32_t token_lanes, unit_lanes; /* log2 of each */
    uint32_t stream;                  /* the data won't be used soon: bypass the cache */
    uint32_t src_size, dst_size;
    struct kvx_divisor parts;      /* K and V of all layers */
    struct kvx_divisor groups;     /* per token: n_units, in steps of 2^unit_lanes */
    struct kvx_divisor head_units; /* units per head */
    struct kvx_divisor positions;  /* GATHER: max_seq_len */
    struct kvx_divisor beams;
    struct kvx_divisor blocks; /* blocks of the grid */
    uint32_t piece[2][2];      /* elements per access: [K, V][src, dst] */
    uint32_t n_pieces[2][2];   /* accesses per unit */
};

/** Return the largest power of two that divides @value and isn't above @most (a power of two). */
static inline uint32_t kvx_job_power(uint32_t value, uint32_t most)
{
    uint32_t power = (value | most) & -(value | most);

    return power < most ? power : most;
}

/** Return the number of elements of a unit that one access takes on this side. */
static inline uint32_t kvx_job_piece(const struct kvx_map *m, uint32_t unit, uint32_t size)
{
    uint32_t by_run = kvx_job_power(m->run, unit);
    uint32_t by_align = m->align / size ? m->align / size : 1;

    return by_run < by_align ? by_run : by_align;
}

/**
 * Return log2 of the tokens that a warp takes side by side, judging by one side. 0 unless
 * neighbours in the token direction touch and neighbours in the unit direction are less than two
 * sectors.
 */
static inline uint32_t kvx_job_side_lanes(const struct kvx_map *m, uint32_t dims, uint32_t piece,
                                          uint32_t size)
{
    uint64_t along = (uint64_t)(m->run == dims ? dims : piece) * size, step;
    uint32_t lanes = 0;

    if (m->run == dims && m->head == (int64_t)along)
        return 0; /* heads continue the row */
    step = m->token < 0 ? 0 - (uint64_t)m->token : (uint64_t)m->token;
    if (along >= 64 || step > along)
        return 0;
    while (lanes < 4 && along << lanes < 128)
        lanes++;
    return lanes;
}

static inline void kvx_job_lanes(const struct kvx_plan *p, struct kvx_job *job)
{
    uint32_t most = 0;

    for (int kv = 0; kv < 2; kv++) {
        uint32_t src =
            kvx_job_side_lanes(&p->side[kv].src, p->head_dim, job->piece[kv][0], job->src_size);
        uint32_t dst =
            kvx_job_side_lanes(&p->side[kv].dst, p->head_dim, job->piece[kv][1], job->dst_size);

        most = src > most ? src : most;
        most = dst > most ? dst : most;
    }
    job->token_lanes = most;
    job->unit_lanes = most ? 5 - most : 0;
    while (job->unit_lanes && 1U << job->unit_lanes > job->n_units) {
        job->unit_lanes--;
        job->token_lanes++;
    }
}

/* True when units of @unit elements are contiguous and aligned to 16 bytes on this side. */
static inline uint32_t kvx_job_side_whole(const struct kvx_map *m, uint32_t unit)
{
    return kvx_job_power(m->run, unit) == unit && m->align >= KVX_UNIT_BYTES;
}

/**
 * Choose the unit and its accesses: 16-byte accesses on both sides, or pieces. A COPY that converts
 * is rare, so pieces serve it.
 */
static inline void kvx_job_unit(const struct kvx_plan *p, struct kvx_job *job)
{
    uint32_t wide = job->src_size > job->dst_size ? job->src_size : job->dst_size;
    uint32_t unit = kvx_whole_unit(job->src_size, job->dst_size);
    uint32_t whole = !(p->op == KVX_OP_COPY && p->convert) && p->head_dim % unit == 0;

    for (int kv = 0; kv < 2; kv++)
        whole &=
            kvx_job_side_whole(&p->side[kv].src, unit) & kvx_job_side_whole(&p->side[kv].dst, unit);
    job->whole = whole;
    job->unit = whole ? unit : kvx_job_power(p->head_dim, KVX_UNIT_BYTES / wide);
    for (int kv = 0; kv < 2; kv++) {
        job->piece[kv][0] =
            whole ? unit : kvx_job_piece(&p->side[kv].src, job->unit, job->src_size);
        job->piece[kv][1] =
            whole ? unit : kvx_job_piece(&p->side[kv].dst, job->unit, job->dst_size);
        for (int end = 0; end < 2; end++)
            job->n_pieces[kv][end] = job->unit / job->piece[kv][end];
    }
}

/** Return the tokens of a plan; UINT64_MAX: more than can be addressed. */
static inline uint64_t kvx_job_tokens(const struct kvx_plan *p)
{
    uint64_t n;

    switch (p->op) {
    case KVX_OP_WRITE:
        return p->n_tokens;
    case KVX_OP_COPY:
        return (uint64_t)p->n_pairs * p->block_size.value;
    default:
        n = (uint64_t)p->n_sequences * p->n_beams; /* io.num_tokens has 32 bits */
        return __builtin_mul_overflow(n, (uint64_t)p->max_seq_len, &n) ? UINT64_MAX : n;
    }
}

/**
 * Choose threads, and units per thread: all units at once where that fits on the device, else many
 * units in flight per thread. @n_lanes: units of all parts, padded to whole lane rectangles.
 */
static inline void kvx_job_shape(const struct kvx_plan *p, struct kvx_job *job, uint64_t n_lanes,
                                 uint32_t n_multiprocessors)
{
    uint32_t units;

    job->threads = KVX_JOB_THREADS;
    job->unroll = kvx_large_unroll(job->whole, p->convert ? job->src_size : 0,
                                   p->convert ? job->dst_size : 0);
    if (job->whole && p->n_layers == 1 && n_lanes <= (uint64_t)n_multiprocessors * 1024) {
        job->threads = KVX_JOB_SMALL_THREADS;
        job->unroll = 1;
    }
    while (job->threads > 64 && n_lanes / (job->threads * job->unroll) < n_multiprocessors)
        job->threads /= 2;
    for (units = job->threads * job->unroll; units > 1; units >>= 1)
        job->tile_log++;
}

/**
 * Cut @p up for a device with @n_multiprocessors whose cache has @cache_bytes. Returns 0, or -1
 * when the numbers exceed what a device could hold. A job with n_tiles = 0 has no work.
 */
static inline int kvx_job_make(const struct kvx_plan *p, uint32_t n_multiprocessors,
                               uint64_t cache_bytes, struct kvx_job *job)
{
    uint32_t head_units;
    uint64_t units, groups, rectangles, tiles;

    memset(job, 0, sizeof(*job));
    job->src_size = kvx_float_size(p->src_dtype);
    job->dst_size = kvx_float_size(p->dst_dtype);
    if (!job->src_size || !job->dst_size)
        return -1;
    kvx_job_unit(p, job);
    job->n_tokens = kvx_job_tokens(p);
    head_units = p->head_dim / job->unit;
    units = (uint64_t)head_units * p->n_heads;
    if (units >= 1U << 30 || job->n_tokens >= (uint64_t)1 << 62)
        return -1;
    job->n_units = (uint32_t)units;
    kvx_job_lanes(p, job);
    groups = (units + ((uint64_t)1 << job->unit_lanes) - 1) >> job->unit_lanes;
    rectangles = (job->n_tokens + ((uint64_t)1 << job->token_lanes) - 1) >> job->token_lanes;
    if (__builtin_mul_overflow(rectangles, groups, &units) || units >= (uint64_t)1 << 50)
        return -1;
    units <<= job->token_lanes + job->unit_lanes;
    kvx_job_shape(p, job, units * 2 * p->n_layers, n_multiprocessors);
    tiles = (units + ((uint64_t)1 << job->tile_log) - 1) >> job->tile_log;
    job->n_tiles = tiles * 2 * p->n_layers;
    job->blocks = kvx_divisor_make(1);
    job->parts = kvx_divisor_make(2 * p->n_layers);
    job->groups = kvx_divisor_make((uint32_t)groups);
    job->head_units = kvx_divisor_make(head_units);
    job->positions = kvx_divisor_make(p->op == KVX_OP_GATHER ? p->max_seq_len : 1);
    job->beams = kvx_divisor_make(p->op == KVX_OP_GATHER ? p->n_beams : 1);
    job->stream =
        p->phase != KVX_PHASE_DECODE && units * 2 * p->n_layers >= cache_bytes / KVX_UNIT_BYTES / 2;
    return 0;
}

static inline void kvx_job_set_blocks(struct kvx_job *job, uint32_t n_blocks)
{
    job->blocks = kvx_divisor_make(n_blocks);
}

/** Return the kernel specialisation that runs @job. */
static inline struct kvx_kind kvx_job_kind(const struct kvx_plan *p, const struct kvx_job *job)
{
    struct kvx_kind kind = {p->op, 0, 0, job->whole, job->unroll};

    if (p->convert) {
        kind.src_size = job->src_size;
        kind.dst_size = job->dst_size;
    }
    return kind;
}

#endif
