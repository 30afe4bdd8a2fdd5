// SPDX-License-Identifier: Apache-2.0
/*
 * The CPU side of a plan: number the rows, cut them into chunks for threads, join them into tiles.
 *
 * The rows of an operation (per layer) are numbered
 *     WRITE   token
 *     GATHER  (sequence * n_beams + beam) * max_seq_len + position
 *     COPY    pair
 *
 * A chunk is a range of these. Within a chunk, rows that are consecutive on both sides become one
 * tile (tile.h): usually a block's worth, more where blocks are consecutive, too.
 */
#include "kvx/host.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "kvx/threads.h"
#include "kvx/tile.h"
#include "kvx_ext.h"

enum {
    CHUNK_BYTES = 1 << 19, /* bytes of K and V that a thread takes at a time */
    /* A call known to be a prefill bypasses the cache from this size on. */
    PREFILL_BYTES = 1 << 20
};

struct job {
    const struct kvx_plan *plan;
    struct kvx_mover mover[2];
    bool flat[2]; /* the last token of a block is followed by the first of the next one */
    bool stream;
    uint64_t n_rows; /* per layer */
    uint64_t chunk_rows;
    uint64_t n_chunks; /* per layer */
};

static void count_drop(const struct kvx_plan *p, uint64_t n)
{
    if (p->dropped && n)
        __atomic_fetch_add(p->dropped, n, __ATOMIC_RELAXED);
}

static const char *scale_base(const char *base, const struct kvx_scale_map *map, int64_t block)
{
    return base ? base + block * map->block : NULL;
}

/* Return true when the token at @next follows the one at @last in memory. */
static bool follows(const struct kvx_plan *p, bool flat, const struct kvx_place *last,
                    const struct kvx_place *next)
{
    if (last->pool != next->pool)
        return false;
    if (last->block == next->block)
        return next->offset == last->offset + 1;
    return flat && next->block == last->block + 1 && next->offset == 0 &&
           last->offset + 1 == p->block_size.value;
}

/* --------------------------------------------------------------------------------------------- */
/* Write */

static void write_tile(const struct job *j, const struct kvx_layer *layer, uint32_t token,
                       uint32_t n, const struct kvx_place *place)
{
    for (int kv = 0; kv < 2; kv++) {
        const struct kvx_plan_side *side = &j->plan->side[kv];
        struct kvx_tile tile = {
            .src = layer->src[kv] + kvx_map_row(&side->src, 0, 0, token, 0),
            .dst = layer->dst[kv] + kvx_map_row(&side->dst, place->block, 0, place->offset, 0),
            .dst_scale = scale_base(layer->dst_scale[kv], &side->dst_scale, place->block),
            .n_tokens = n};

        j->mover[kv].move(&j->mover[kv], &tile);
    }
}

static void write_range(const struct job *j, uint32_t l, uint64_t first, uint64_t end)
{
    const struct kvx_plan *p = j->plan;
    const struct kvx_layer *layer = &p->layer[l];
    bool flat = j->flat[0] && j->flat[1];
    uint32_t token = (uint32_t)first;
    struct kvx_place place, next = {0};
    enum kvx_row row = kvx_slot_place(p, token, &place);
    uint64_t dropped = 0;

    while (token < end) {
        uint32_t last = token + 1;
        struct kvx_place before = place;
        enum kvx_row next_row = KVX_ROW_NONE;

        for (; last < end; last++) {
            next_row = kvx_slot_place(p, last, &next);
            if (row != KVX_ROW_MOVE || next_row != KVX_ROW_MOVE ||
                !follows(p, flat, &before, &next))
                break;
            before = next;
        }
        if (row == KVX_ROW_MOVE)
            write_tile(j, layer, token, last - token, &place);
        dropped += row == KVX_ROW_DROP;
        token = last;
        row = next_row;
        place = next;
    }
    count_drop(p, l == 0 ? dropped : 0);
}

/* --------------------------------------------------------------------------------------------- */
/* Gather */

/* The output rows of one sequence and beam that a chunk covers. */
struct span {
    uint32_t s, w;
    uint32_t first, end; /* positions */
    uint32_t length;     /* positions from here on are padding */
    uint64_t start;      /* RAGGED */
};

static void zero_row(const struct kvx_mover *m, char *row, uint32_t dims)
{
    const struct kvx_map *map = &m->side->dst;

    if (map->run == dims) {
        memset(row, 0, (size_t)dims * m->dst_size);
        return;
    }
    for (uint32_t d = 0; d < dims; d++)
        memset(row + kvx_map_dim(map, d), 0, m->dst_size);
}

static void zero_rows(const struct job *j, char *base, int kv, const struct span *span,
                      uint32_t first, uint32_t end)
{
    const struct kvx_plan *p = j->plan;
    const struct kvx_map *map = &p->side[kv].dst;

    if (!p->zero_padding)
        return;
    for (uint32_t pos = first; pos < end; pos++) {
        for (uint32_t h = 0; h < p->n_heads; h++)
            zero_row(&j->mover[kv], base + kvx_map_row(map, span->s, span->w, pos, h), p->head_dim);
    }
}

/*
 * Return the number of positions from @pos on (below @end) with the same answer and consecutive
 * places.
 */
static uint32_t gather_run(const struct job *j, int kv, const struct span *span, uint32_t pos,
                           uint32_t end, enum kvx_row *row, struct kvx_place *place)
{
    const struct kvx_plan *p = j->plan;
    struct kvx_place before, next;
    uint32_t last = pos;

    *row = kvx_table_place(p, (uint32_t)kv, span->s, span->w, pos, span->start, place);
    before = *place;
    for (;;) {
        /* A block id holds for the rest of the block; only RAGGED has an id for each token. */
        uint32_t step =
            p->format == KVX_BLOCK_TABLE_RAGGED ? 1 : p->block_size.value - before.offset;

        if (step >= end - last)
            return end - pos;
        last += step;
        before.offset += step - 1;
        if (kvx_table_place(p, (uint32_t)kv, span->s, span->w, last, span->start, &next) !=
                KVX_ROW_MOVE ||
            *row != KVX_ROW_MOVE || !follows(p, j->flat[kv], &before, &next))
            return last - pos;
        before = next;
    }
}

static uint64_t gather_span(const struct job *j, const struct kvx_layer *layer, int kv,
                            const struct span *span)
{
    const struct kvx_plan *p = j->plan;
    const struct kvx_plan_side *side = &p->side[kv];
    uint32_t end = span->end < span->length ? span->end : span->length;
    uint32_t pos = span->first, n;
    uint64_t dropped = 0;

    for (; pos < end; pos += n) {
        struct kvx_place place;
        enum kvx_row row;

        n = gather_run(j, kv, span, pos, end, &row, &place);
        if (row == KVX_ROW_MOVE) {
            const char *base = place.pool ? layer->src_pool : layer->src[kv];
            struct kvx_tile tile = {
                .src = base + kvx_map_row(&side->src, place.block, 0, place.offset, 0),
                .dst = layer->dst[kv] + kvx_map_row(&side->dst, span->s, span->w, pos, 0),
                .src_scale = scale_base(layer->src_scale[kv], &side->src_scale, place.block),
                .n_tokens = n};

            j->mover[kv].move(&j->mover[kv], &tile);
            continue;
        }
        if (row == KVX_ROW_DROP &&
            kvx_table_drop_counts(p, (uint32_t)kv, span->s, span->w, pos, span->start))
            dropped += n;
        zero_rows(j, layer->dst[kv], kv, span, pos, pos + n);
    }
    if (pos < span->end)
        zero_rows(j, layer->dst[kv], kv, span, pos, span->end);
    return dropped;
}

static void gather_range(const struct job *j, uint32_t l, uint64_t first, uint64_t end)
{
    const struct kvx_plan *p = j->plan;
    uint64_t dropped = 0;

    while (first < end) {
        uint64_t sequence = first / p->max_seq_len, begin = sequence * p->max_seq_len;
        struct span span = {.s = (uint32_t)(sequence / p->n_beams),
                            .w = (uint32_t)(sequence % p->n_beams),
                            .first = (uint32_t)(first - begin)};

        span.end = end - begin < p->max_seq_len ? (uint32_t)(end - begin) : p->max_seq_len;
        span.length = kvx_sequence_length(p, span.s, &span.start);
        dropped += gather_span(j, &p->layer[l], 0, &span);
        dropped += gather_span(j, &p->layer[l], 1, &span);
        first = begin + span.end;
    }
    count_drop(p, l == 0 ? dropped : 0);
}

/* --------------------------------------------------------------------------------------------- */
/* Copy */

static void copy_range(const struct job *j, uint32_t l, uint64_t first, uint64_t end)
{
    const struct kvx_plan *p = j->plan;
    const struct kvx_layer *layer = &p->layer[l];
    uint64_t dropped = 0;

    for (uint64_t i = first; i < end; i++) {
        int64_t src, dst;
        enum kvx_row row = kvx_pair_place(p, (uint32_t)i, &src, &dst);

        dropped += row == KVX_ROW_DROP;
        if (row != KVX_ROW_MOVE)
            continue;
        for (int kv = 0; kv < 2; kv++) {
            const struct kvx_plan_side *side = &p->side[kv];
            struct kvx_tile tile = {
                .src = layer->src[kv] + src * side->src.block,
                .dst = layer->dst[kv] + dst * side->dst.block,
                .src_scale = scale_base(layer->src_scale[kv], &side->src_scale, src),
                .dst_scale = scale_base(layer->dst_scale[kv], &side->dst_scale, dst),
                .n_tokens = p->block_size.value};

            j->mover[kv].move(&j->mover[kv], &tile);
        }
    }
    count_drop(p, l == 0 ? dropped : 0);
}

/* --------------------------------------------------------------------------------------------- */

static void do_chunk(void *arg, uint64_t chunk)
{
    const struct job *j = arg;
    uint32_t layer = (uint32_t)(chunk / j->n_chunks);
    uint64_t first = chunk % j->n_chunks * j->chunk_rows;
    uint64_t end = j->n_rows - first < j->chunk_rows ? j->n_rows : first + j->chunk_rows;

    switch (j->plan->op) {
    case KVX_OP_WRITE:
        write_range(j, layer, first, end);
        break;
    case KVX_OP_GATHER:
        gather_range(j, layer, first, end);
        break;
    default:
        copy_range(j, layer, first, end);
        break;
    }
    if (j->stream)
        j->mover[0].isa->fence();
}

static uint64_t count_rows(const struct kvx_plan *p)
{
    switch (p->op) {
    case KVX_OP_WRITE:
        return p->n_tokens;
    case KVX_OP_GATHER:
        return (uint64_t)p->n_sequences * p->n_beams * p->max_seq_len;
    default:
        return p->n_pairs;
    }
}

/* Return the bytes of all rows, saturated: only the magnitude matters. */
static uint64_t product(uint64_t a, uint64_t b)
{
    uint64_t result;

    return __builtin_mul_overflow(a, b, &result) ? UINT64_MAX / 4 : result;
}

/*
 * Decide whether stores bypass the cache. They gain when the target doesn't fit into the cache (no
 * line has to be read first), and lose when the target is read soon. Hence: above half the
 * last-level cache, sooner for a prefill, never for a decode.
 */
static bool should_stream(const struct kvx_plan *p, uint64_t written)
{
    static _Atomic long cache_bytes; /* read once; threads that race read the same value */
    long known;

    if (p->phase == KVX_PHASE_DECODE)
        return false;
    if (p->phase == KVX_PHASE_PREFILL)
        return written >= PREFILL_BYTES;
    known = atomic_load_explicit(&cache_bytes, memory_order_relaxed);
    if (known == 0) {
        known = sysconf(_SC_LEVEL3_CACHE_SIZE);
        known = known > 0 ? known : 32L << 20;
        atomic_store_explicit(&cache_bytes, known, memory_order_relaxed);
    }
    return written >= (uint64_t)known / 2;
}

static bool is_flat(const struct kvx_plan *p, int kv)
{
    const struct kvx_plan_side *side = &p->side[kv];
    const struct kvx_map *paged = p->op == KVX_OP_WRITE ? &side->dst : &side->src;

    return paged->block == paged->token * (int64_t)p->block_size.value && !side->src_scale.block &&
           !side->dst_scale.block;
}

/*
 * Return a number of rows, at least 1: whole blocks, so that no tile is cut, where a chunk holds
 * one.
 */
static uint64_t rows_per_chunk(const struct kvx_plan *p, uint64_t row_bytes)
{
    uint64_t rows = CHUNK_BYTES / (row_bytes + 1) + 1;

    if (p->op != KVX_OP_COPY && rows > p->block_size.value)
        rows = kvx_div(rows, &p->block_size) * p->block_size.value;
    return rows ? rows : 1;
}

void kvx_host_run(const struct kvx_plan *plan)
{
    struct job j = {.plan = plan, .n_rows = count_rows(plan)};
    uint64_t row = product((uint64_t)plan->n_heads * 2, plan->head_dim);
    uint64_t written, both;

    if (plan->op == KVX_OP_COPY)
        row = product(row, plan->block_size.value);
    written =
        product(product(row, kvx_float_size(plan->dst_dtype)), product(j.n_rows, plan->n_layers));
    row = product(row, kvx_float_size(plan->src_dtype) + kvx_float_size(plan->dst_dtype));
    both = product(row, product(j.n_rows, plan->n_layers));
    if (j.n_rows == 0)
        return;
    j.stream = should_stream(plan, written);
    for (int kv = 0; kv < 2; kv++) {
        kvx_mover_init(&j.mover[kv], plan, kv, j.stream);
        j.flat[kv] = is_flat(plan, kv);
    }
    j.chunk_rows = rows_per_chunk(plan, row);
    j.n_chunks = (j.n_rows + j.chunk_rows - 1) / j.chunk_rows;
    kvx_parallel(do_chunk, &j, j.n_chunks * plan->n_layers, both);
}
