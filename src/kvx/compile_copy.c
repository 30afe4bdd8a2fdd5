// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kvx/compile.h"
#include "kvx/compile_parts.h"
#include "kvx/validate.h"

/* Map one end of a copy: a cache tensor from head @head on, and its base. */
static struct kvx_map copy_end(const kvx_cache_desc_t *cache, int kv, uint32_t head, char **base)
{
    kvx_tensor_desc_t t = kv ? cache->v : cache->k;
    uint32_t dim = t.ndim == 5 || t.layout == KVX_LAYOUT_BLOCK_HND ? 1 : 2;

    t.data = (char *)t.data + kvx_step(&t, dim) * head;
    *base = t.data;
    return kvx_cache_map(cache, &t);
}

static kvx_status_t copy_scale(const kvx_scale_desc_t *scale, const kvx_cache_desc_t *cache,
                               uint32_t head, struct kvx_scale_map *map, const char **base)
{
    if (!kvx_is_fp8(cache->k.dtype))
        return KVX_STATUS_OK;
    TRY(kvx_scale_map(scale, NULL, cache, map, base));
    if (*base)
        *base += map->head * head;
    return KVX_STATUS_OK;
}

static kvx_status_t copy_tensor(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                                const kvx_block_copy_t *copy, int kv, struct kvx_plan *p)
{
    struct kvx_plan_side *side = &p->side[kv];
    struct kvx_layer *layer = &p->layer[0];
    char *from;

    side->src = copy_end(src, kv, copy->src_head, &from);
    layer->src[kv] = from;
    side->dst = copy_end(dst, kv, copy->dst_head, &layer->dst[kv]);
    TRY(copy_scale(kv ? copy->src_v_scale : copy->src_k_scale, src, copy->src_head,
                   &side->src_scale, &layer->src_scale[kv]));
    TRY(copy_scale(kv ? copy->dst_v_scale : copy->dst_k_scale, dst, copy->dst_head,
                   &side->dst_scale, &layer->dst_scale[kv]));
    if (layer->src_scale[kv] || layer->dst_scale[kv])
        p->convert = 1;
    return KVX_STATUS_OK;
}

static bool same_tensor(const kvx_tensor_desc_t *a, const kvx_tensor_desc_t *b)
{
    return a->data == b->data && a->dtype == b->dtype && a->layout == b->layout &&
           a->ndim == b->ndim && memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0 &&
           memcmp(a->stride, b->stride, a->ndim * sizeof(a->stride[0])) == 0;
}

/*
 * Check that source and target have no byte in common. One cache may be both, where the blocks of a
 * pair differ. Then the heads must be equal or disjoint: a range that overlaps itself would be
 * copied onto itself.
 */
static kvx_status_t check_overlap(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                                  const kvx_block_copy_t *copy, uint32_t n_heads)
{
    struct kvx_hull from[2], to[2];
    uint32_t a = copy->src_head, b = copy->dst_head;

    TRY(kvx_check_cache(src, from));
    TRY(kvx_check_cache(dst, to));
    if (kvx_check_apart(from, 2, to) == KVX_STATUS_OK)
        return KVX_STATUS_OK;
    if (!same_tensor(&src->k, &dst->k) || !same_tensor(&src->v, &dst->v))
        return KVX_STATUS_INVALID_ARGUMENT;
    return a == b || (a < b ? b - a : a - b) >= n_heads ? KVX_STATUS_OK
                                                        : KVX_STATUS_INVALID_ARGUMENT;
}

static kvx_status_t check_copy(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                               const kvx_block_copy_t *copy, uint32_t n_heads)
{
    struct kvx_hull unused[2], to[2], pairs[2];
    uint32_t size = kvx_index_size(copy->index_dtype);

    TRY(kvx_check_cache(src, unused));
    TRY(kvx_check_cache(dst, to));
    if (!size || (copy->count && (!copy->src_blocks || !copy->dst_blocks)) ||
        src->head_dim != dst->head_dim)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (!copy->num_heads &&
        (src->num_kv_heads != dst->num_kv_heads || copy->src_head || copy->dst_head))
        return KVX_STATUS_INVALID_ARGUMENT;
    if ((uint64_t)copy->src_head + n_heads > src->num_kv_heads ||
        (uint64_t)copy->dst_head + n_heads > dst->num_kv_heads)
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(kvx_array_hull(copy->src_blocks, copy->count, size, &pairs[0]));
    TRY(kvx_array_hull(copy->dst_blocks, copy->count, size, &pairs[1]));
    TRY(kvx_check_apart(pairs, 2, to));
    TRY(check_overlap(src, dst, copy, n_heads));
    if (((uintptr_t)copy->src_blocks | (uintptr_t)copy->dst_blocks) % size)
        return KVX_STATUS_UNSUPPORTED;
    if (src->block_size != dst->block_size ||
        kvx_memory_class(src->k.memory) != kvx_memory_class(dst->k.memory))
        return KVX_STATUS_UNSUPPORTED;
    return KVX_STATUS_OK;
}

kvx_status_t kvx_compile_copy(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                              const kvx_block_copy_t *copy, const kvx_options_t *options,
                              struct kvx_plan *ret)
{
    uint32_t n_heads;

    if (!src || !dst || !copy || copy->size < sizeof(*copy))
        return KVX_STATUS_INVALID_ARGUMENT;
    n_heads = copy->num_heads ? copy->num_heads : src->num_kv_heads;
    TRY(check_copy(src, dst, copy, n_heads));
    kvx_plan_start(ret, KVX_OP_COPY, src, options);
    ret->n_heads = n_heads;
    ret->src_dtype = src->k.dtype;
    ret->dst_dtype = dst->k.dtype;
    ret->convert = ret->src_dtype != ret->dst_dtype;
    ret->n_pairs = copy->count;
    ret->pairs_wide = copy->index_dtype == KVX_DTYPE_S64;
    ret->src_blocks = copy->src_blocks;
    ret->dst_blocks = copy->dst_blocks;
    ret->n_src_blocks = src->num_blocks;
    ret->n_dst_blocks = dst->num_blocks;
    TRY(copy_tensor(src, dst, copy, 0, ret));
    TRY(copy_tensor(src, dst, copy, 1, ret));
    return kvx_check_two(ret);
}
