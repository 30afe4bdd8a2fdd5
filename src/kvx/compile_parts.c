// SPDX-License-Identifier: Apache-2.0
/* Parts of a plan that the three operations share: maps, scales, the head. */
#include "kvx/compile_parts.h"

#include <string.h>

#include "kvx/compile.h"
#include "kvx/validate.h"

int64_t kvx_step(const kvx_tensor_desc_t *t, uint32_t i)
{
    return t->shape[0] > 0 && t->shape[i] > 1 ? t->stride[i] * (int64_t)kvx_float_size(t->dtype)
                                              : 0;
}

static uint32_t alignment(uint64_t bits)
{
    return (uint32_t)((bits | 64) & -(bits | 64));
}

/*
 * Bring a map to its simplest form and fill in run and align. Consecutive chunks are one run;
 * chunks of one element are a strided row. The alignment includes @base.
 */
static void finish_map(struct kvx_map *m, uint32_t pack, uint32_t dims, uint32_t size,
                       uintptr_t base)
{
    bool whole = pack == dims || m->chunk == (int64_t)pack * size;

    if (pack == 1 && dims > 1) {
        m->elem = m->chunk;
        pack = dims;
        whole = true;
    }
    if (dims == 1)
        m->elem = size;
    if (whole && (m->elem == (int64_t)size || pack == 1)) {
        m->elem = size;
        pack = dims;
    }
    if (pack == dims)
        m->chunk = 0;
    m->run = m->elem == (int64_t)size ? pack : 1;
    m->pack = kvx_divisor_make(pack);
    m->align = alignment((uint64_t)base | (uint64_t)m->block | (uint64_t)m->beam |
                         (uint64_t)m->token | (uint64_t)m->head | (uint64_t)m->chunk |
                         (m->run == 1 && dims > 1 ? (uint64_t)m->elem : 0));
}

struct kvx_map kvx_cache_map(const kvx_cache_desc_t *cache, const kvx_tensor_desc_t *t)
{
    struct kvx_map m = {.block = kvx_step(t, 0)};
    uint32_t pack = cache->head_dim;

    if (t->ndim == 5) {
        m.head = kvx_step(t, 1);
        m.chunk = kvx_step(t, 2);
        m.token = kvx_step(t, 3);
        m.elem = kvx_step(t, 4);
        pack = (uint32_t)t->shape[4];
    } else {
        bool hnd = t->layout == KVX_LAYOUT_BLOCK_HND;

        m.token = kvx_step(t, hnd ? 2 : 1);
        m.head = kvx_step(t, hnd ? 1 : 2);
        m.elem = kvx_step(t, 3);
    }
    finish_map(&m, pack, cache->head_dim, kvx_float_size(t->dtype), (uintptr_t)t->data);
    return m;
}

struct kvx_map kvx_io_map(const kvx_tensor_desc_t *t, const struct kvx_plan *p)
{
    uint32_t last = t->ndim - 1;
    struct kvx_map m = {
        .token = kvx_step(t, last - 2), .head = kvx_step(t, last - 1), .elem = kvx_step(t, last)};

    if (p->op == KVX_OP_GATHER && t->ndim == 3) {
        m.beam = p->n_beams > 1 ? m.token * p->max_seq_len : 0;
        m.block = p->n_sequences > 1 ? m.token * p->max_seq_len * p->n_beams : 0;
    } else if (t->ndim == 4) {
        m.beam = p->n_beams > 1 ? kvx_step(t, 0) : 0;
        m.block = p->n_sequences > 1 ? kvx_step(t, 0) * p->n_beams : 0;
    } else if (t->ndim == 5) {
        m.block = kvx_step(t, 0);
        m.beam = kvx_step(t, 1);
    }
    finish_map(&m, p->head_dim, p->head_dim, kvx_float_size(t->dtype), (uintptr_t)t->data);
    return m;
}

void kvx_plan_start(struct kvx_plan *p, enum kvx_op op, const kvx_cache_desc_t *cache,
                    const kvx_options_t *options)
{
    /* Padding, too: plans are compared as bytes. Layers beyond the first are written when joined. */
    memset(p, 0, offsetof(struct kvx_plan, layer) + sizeof(p->layer[0]));
    p->size = sizeof(*p);
    p->op = op;
    p->phase = (uint32_t)options->phase;
    p->device = (uint32_t)kvx_memory_class(cache->k.memory);
    p->n_layers = 1;
    p->n_heads = cache->num_kv_heads;
    p->head_dim = cache->head_dim;
    p->block_size = kvx_divisor_make(cache->block_size);
    p->dropped = options->dropped;
}

kvx_status_t kvx_scale_map(const kvx_scale_desc_t *scale, const void *plain,
                           const kvx_cache_desc_t *cache, struct kvx_scale_map *map,
                           const char **base)
{
    *base = plain;
    if ((uintptr_t)plain % sizeof(float))
        return KVX_STATUS_UNSUPPORTED;
    if (!scale || !scale->data)
        return scale && scale->size && scale->size < sizeof(*scale) ? KVX_STATUS_INVALID_ARGUMENT
                                                                    : KVX_STATUS_OK;
    TRY(kvx_check_scale(scale, cache));
    *base = scale->data;
    if (scale->granularity == KVX_SCALE_PER_BLOCK || scale->granularity == KVX_SCALE_PER_BLOCK_HEAD)
        map->block = scale->shape[0] > 1 ? scale->stride[0] * (int64_t)sizeof(float) : 0;
    if (scale->granularity == KVX_SCALE_PER_HEAD)
        map->head = scale->shape[0] > 1 ? scale->stride[0] * (int64_t)sizeof(float) : 0;
    if (scale->granularity == KVX_SCALE_PER_BLOCK_HEAD)
        map->head = scale->shape[1] > 1 ? scale->stride[1] * (int64_t)sizeof(float) : 0;
    return KVX_STATUS_OK;
}

bool kvx_plan_is_empty(const struct kvx_plan *plan)
{
    return (plan->op == KVX_OP_WRITE && plan->n_tokens == 0) ||
           (plan->op == KVX_OP_COPY && plan->n_pairs == 0);
}

kvx_status_t kvx_check_two(const struct kvx_plan *plan)
{
    const struct kvx_layer *layer = &plan->layer[0];
    bool one_source = layer->src[0] == layer->src[1] && plan->format != KVX_BLOCK_TABLE_KV_OFFSETS;

    if (layer->dst[0] != layer->dst[1] || one_source || kvx_plan_is_empty(plan))
        return KVX_STATUS_OK;
    return KVX_STATUS_INVALID_ARGUMENT;
}

kvx_status_t kvx_check_apart(const struct kvx_hull *read, size_t n,
                             const struct kvx_hull written[2])
{
    for (size_t i = 0; i < n; i++) {
        if (kvx_hulls_meet(&read[i], &written[0]) || kvx_hulls_meet(&read[i], &written[1]))
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    return KVX_STATUS_OK;
}

kvx_status_t kvx_read_options(const kvx_options_t *options, kvx_options_t *ret)
{
    uint32_t size;

    memset(ret, 0, sizeof(*ret));
    if (!options)
        return KVX_STATUS_OK;
    size = options->size < sizeof(*ret) ? options->size : (uint32_t)sizeof(*ret);
    if (size < sizeof(options->size) + sizeof(options->flags))
        return KVX_STATUS_INVALID_ARGUMENT;
    /* Copy whole fields only: four of 4 bytes, then all of 8. */
    memcpy(ret, options, size & ~(size < offsetof(kvx_options_t, dropped) ? 3U : 7U));
    if (ret->flags & ~(KVX_OPTION_ZERO_PADDING | KVX_OPTION_DROP_OUT_OF_RANGE))
        return KVX_STATUS_INVALID_ARGUMENT;
    if (ret->phase > KVX_PHASE_TRANSFER || ret->reserved)
        return KVX_STATUS_INVALID_ARGUMENT;
    return (uintptr_t)ret->dropped % sizeof(uint64_t) ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_OK;
}

/* Reduce both maps' alignment to the common one. */
static void same_alignment(struct kvx_map *a, struct kvx_map *b)
{
    uint32_t align = alignment(a->align | b->align);

    a->align = align;
    b->align = align;
}

static bool scales_differ(const struct kvx_layer *a, const struct kvx_layer *b)
{
    bool differ = false;

    for (int kv = 0; kv < 2; kv++)
        differ |= !a->src_scale[kv] != !b->src_scale[kv] || !a->dst_scale[kv] != !b->dst_scale[kv];
    return differ;
}

bool kvx_plan_merge(struct kvx_plan *plan, struct kvx_plan *layer)
{
    struct kvx_plan_side sides[2];

    if (plan->n_layers == KVX_PLAN_LAYERS || scales_differ(&plan->layer[0], &layer->layer[0]))
        return false;
    memcpy(sides, plan->side, sizeof(sides));
    for (int kv = 0; kv < 2; kv++) {
        same_alignment(&sides[kv].src, &layer->side[kv].src);
        same_alignment(&sides[kv].dst, &layer->side[kv].dst);
    }
    layer->n_layers = plan->n_layers;
    layer->dropped = plan->dropped;
    if (memcmp(plan, layer, offsetof(struct kvx_plan, side)) != 0 ||
        memcmp(sides, layer->side, sizeof(sides)) != 0)
        return false;
    memcpy(plan->side, sides, sizeof(sides));
    plan->layer[plan->n_layers++] = layer->layer[0];
    return true;
}
