// SPDX-License-Identifier: Apache-2.0
#include "kvx/tile.h"

#include <assert.h>
#include <string.h>

enum {
    STAGE_DIMS = 1024,     /* most dims of a staged row */
    STAGE_ELEMENTS = 2048, /* elements of each of the two buffers: 8 KiB */
    STREAM_ROW = 128       /* row size in bytes below which bypassing the cache doesn't pay */
};

static float scale_of(const char *base, const struct kvx_scale_map *map, uint32_t head)
{
    return kvx_scale_at(base, map, 0, head);
}

/* --------------------------------------------------------------------------------------------- */
/* Contiguous rows */

static void copy_row(const struct kvx_mover *m, char *dst, const char *src, size_t n)
{
    if (m->stream)
        m->isa->stream(dst, src, n);
    else
        memmove(dst, src, n); /* a block may be copied onto itself */
}

/* Prefetch the row one step ahead: short rows end before a hardware prefetcher recognises them. */
static void fetch_row(const char *src, size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        __builtin_prefetch(src + i);
}

static void move_rows(const struct kvx_mover *m, const struct kvx_tile *t)
{
    const struct kvx_map *src = &m->side->src, *dst = &m->side->dst;
    size_t bytes = (size_t)m->n_dims * m->src_size;
    uint32_t n_outer = m->head_inner ? t->n_tokens : m->n_heads;
    uint32_t n_inner = m->head_inner ? m->n_heads : t->n_tokens;
    int64_t src_outer = m->head_inner ? src->token : src->head;
    int64_t dst_outer = m->head_inner ? dst->token : dst->head;
    int64_t src_inner = m->head_inner ? src->head : src->token;
    int64_t dst_inner = m->head_inner ? dst->head : dst->token;

    if (m->one_run) {
        copy_row(m, t->dst, t->src, bytes * t->n_tokens);
        return;
    }
    for (uint32_t i = 0; i < n_outer; i++) {
        const char *from = t->src + i * src_outer;
        char *to = t->dst + i * dst_outer;

        for (uint32_t j = 0; j < n_inner; j++) {
            if (m->stream)
                fetch_row(from + src_outer, bytes);
            copy_row(m, to, from, bytes);
            from += src_inner;
            to += dst_inner;
        }
    }
}

static void move_convert(const struct kvx_mover *m, const struct kvx_tile *t)
{
    const struct kvx_plan_side *side = m->side;
    uint32_t n_outer = m->head_inner ? t->n_tokens : m->n_heads;
    uint32_t n_inner = m->head_inner ? m->n_heads : t->n_tokens;

    if (m->one_run) {
        m->convert(t->dst, t->src, (size_t)m->n_dims * t->n_tokens,
                   scale_of(t->src_scale, &side->src_scale, 0),
                   scale_of(t->dst_scale, &side->dst_scale, 0), m->stream);
        return;
    }
    for (uint32_t i = 0; i < n_outer; i++) {
        for (uint32_t j = 0; j < n_inner; j++) {
            uint32_t h = m->head_inner ? j : i, token = m->head_inner ? i : j;

            m->convert(t->dst + token * side->dst.token + h * side->dst.head,
                       t->src + token * side->src.token + h * side->src.head, m->n_dims,
                       scale_of(t->src_scale, &side->src_scale, h),
                       scale_of(t->dst_scale, &side->dst_scale, h), m->stream);
        }
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Chunked rows */

static void move_rectangle(const struct kvx_mover *m, const struct kvx_units *u)
{
    if (u->size == 16)
        m->isa->units16(u);
    else
        kvx_units_scalar(u);
}

static void move_units(const struct kvx_mover *m, const struct kvx_tile *t)
{
    struct kvx_units u = m->units;

    u.n_tokens = t->n_tokens;
    for (uint32_t h = 0; h < m->n_heads; h++) {
        u.src = t->src + h * m->side->src.head;
        u.dst = t->dst + h * m->side->dst.head;
        move_rectangle(m, &u);
    }
}

/*
 * Describe one end of a staged move: rows of a map on one side, consecutive rows of @dims elements
 * on the other.
 */
static struct kvx_units stage_units(const struct kvx_map *map, uint32_t dims, uint32_t size)
{
    struct kvx_units u = {.size = map->run * size, .n_units = dims / map->run};

    u.src_step = map->run == dims              ? 0
                 : map->pack.value == dims     ? map->elem
                 : map->run == map->pack.value ? map->chunk
                                               : 0;
    u.dst_step = (int64_t)u.size;
    u.src_token = map->token;
    u.dst_token = (int64_t)dims * size;
    return u;
}

static void turn_around(struct kvx_units *u)
{
    int64_t step = u->src_step, token = u->src_token;

    u->src_step = u->dst_step;
    u->src_token = u->dst_token;
    u->dst_step = step;
    u->dst_token = token;
}

/* Return false for chunks whose elements are strided: they are rare and move one by one. */
static bool is_regular(const struct kvx_map *map, uint32_t dims)
{
    return map->pack.value == dims || map->run == map->pack.value;
}

static void move_staged(const struct kvx_mover *m, const struct kvx_tile *t)
{
    _Alignas(64) char collected[STAGE_ELEMENTS * 4], converted[STAGE_ELEMENTS * 4];
    const struct kvx_plan_side *side = m->side;
    uint32_t dims = (uint32_t)m->n_dims, most = STAGE_ELEMENTS / dims;
    struct kvx_units in = stage_units(&side->src, dims, m->src_size);
    struct kvx_units out = stage_units(&side->dst, dims, m->dst_size);

    turn_around(&out);
    out.stream = m->stream;
    for (uint64_t first = 0; first < t->n_tokens; first += most) {
        uint32_t n = t->n_tokens - first < most ? (uint32_t)(t->n_tokens - first) : most;

        in.n_tokens = n;
        out.n_tokens = n;
        for (uint32_t h = 0; h < m->n_heads; h++) {
            in.src = t->src + first * side->src.token + h * side->src.head;
            in.dst = collected;
            move_rectangle(m, &in);
            out.src = collected;
            if (m->convert) {
                m->convert(converted, collected, (size_t)n * dims,
                           scale_of(t->src_scale, &side->src_scale, h),
                           scale_of(t->dst_scale, &side->dst_scale, h), false);
                out.src = converted;
            }
            out.dst = t->dst + first * side->dst.token + h * side->dst.head;
            move_rectangle(m, &out);
        }
    }
}

/* Apart, so that a compiler can't multiply by scales of 1: see kvx_scaled. */
static __attribute__((noinline)) float scaled(float value, float src_scale, float dst_scale)
{
    return kvx_scaled(value, src_scale, dst_scale);
}

static void convert_element(const struct kvx_mover *m, const char *src, char *dst, float src_scale,
                            float dst_scale)
{
    float value = kvx_decode(m->src_dtype, src);

    if (src_scale != 1.0F || dst_scale != 1.0F)
        value = scaled(value, src_scale, dst_scale);
    kvx_encode(m->dst_dtype, value, dst);
}

static void move_row_elements(const struct kvx_mover *m, const char *src, char *dst,
                              float src_scale, float dst_scale)
{
    for (uint32_t d = 0; d < m->n_dims; d++) {
        const char *from = src + kvx_map_dim(&m->side->src, d);
        char *to = dst + kvx_map_dim(&m->side->dst, d);

        if (m->convert)
            convert_element(m, from, to, src_scale, dst_scale);
        else
            memcpy(to, from, m->src_size);
    }
}

static void move_elements(const struct kvx_mover *m, const struct kvx_tile *t)
{
    const struct kvx_plan_side *side = m->side;

    for (uint32_t h = 0; h < m->n_heads; h++) {
        float src_scale = scale_of(t->src_scale, &side->src_scale, h);
        float dst_scale = scale_of(t->dst_scale, &side->dst_scale, h);

        for (uint32_t i = 0; i < t->n_tokens; i++)
            move_row_elements(m, t->src + i * side->src.token + h * side->src.head,
                              t->dst + i * side->dst.token + h * side->dst.head, src_scale,
                              dst_scale);
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Which of them */

/* Join consecutive heads into longer rows, then consecutive tokens. */
static void join(struct kvx_mover *m)
{
    const struct kvx_plan_side *side = m->side;
    int64_t src_row = (int64_t)m->n_dims * m->src_size, dst_row = (int64_t)m->n_dims * m->dst_size;
    bool alike = !side->src_scale.head && !side->dst_scale.head;

    if (m->n_heads > 1 && (!alike || side->src.head != src_row || side->dst.head != dst_row))
        return;
    m->n_dims *= m->n_heads;
    src_row *= m->n_heads;
    dst_row *= m->n_heads;
    m->n_heads = 1;
    m->one_run = side->src.token == src_row && side->dst.token == dst_row;
}

/*
 * Return true when both sides step through their chunks at a constant stride, in units that neither
 * cuts.
 */
static bool units_fit(struct kvx_mover *m, uint32_t dims)
{
    const struct kvx_map *src = &m->side->src, *dst = &m->side->dst;
    uint32_t run = src->run < dst->run ? src->run : dst->run;
    const struct kvx_map *maps[2] = {src, dst};
    int64_t steps[2];

    for (int i = 0; i < 2; i++) {
        if (maps[i]->pack.value == dims)
            steps[i] = maps[i]->elem * run;
        else if (maps[i]->run == run && maps[i]->pack.value == run)
            steps[i] = maps[i]->chunk;
        else
            return false;
    }
    m->units = (struct kvx_units){.src_step = steps[0],
                                  .dst_step = steps[1],
                                  .src_token = src->token,
                                  .dst_token = dst->token,
                                  .n_units = dims / run,
                                  .size = run * m->src_size,
                                  .stream = m->stream};
    return true;
}

void kvx_mover_init(struct kvx_mover *mover, const struct kvx_plan *plan, int kv, bool stream)
{
    const struct kvx_plan_side *side = &plan->side[kv];
    uint32_t dims = plan->head_dim;
    bool whole = side->src.run == dims && side->dst.run == dims;

    *mover = (struct kvx_mover){.isa = kvx_isa_get(),
                                .side = side,
                                .src_dtype = plan->src_dtype,
                                .dst_dtype = plan->dst_dtype,
                                .src_size = kvx_float_size(plan->src_dtype),
                                .dst_size = kvx_float_size(plan->dst_dtype),
                                .stream = stream,
                                .n_heads = plan->n_heads,
                                .n_dims = dims};
    if (plan->convert)
        mover->convert = mover->isa->convert[plan->src_dtype][plan->dst_dtype];
    assert(mover->src_size && mover->dst_size);
    if (whole) {
        join(mover);
        /* Read in the order of memory. Stores may jump, since no instruction waits for them. */
        mover->head_inner = side->src.head < side->src.token;
        mover->move = plan->convert ? move_convert : move_rows;
        if (mover->n_dims * mover->dst_size < STREAM_ROW)
            mover->stream = false;
    } else if (!plan->convert && units_fit(mover, dims)) {
        mover->move = move_units;
    } else if (dims <= STAGE_DIMS && is_regular(&side->src, dims) && is_regular(&side->dst, dims)) {
        mover->move = move_staged;
    } else {
        mover->move = move_elements;
    }
}
