// SPDX-License-Identifier: Apache-2.0
/* Turn a framework's tensors into descriptors: DLPack, and the caches of engines. */
#include <string.h>

#include "kvx/validate.h"

/* --------------------------------------------------------------------------------------------- */
/* DLPack: the struct that all versions so far share, from its specification */

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape;
    const int64_t *strides; /* in elements; NULL: row-major */
    uint64_t byte_offset;
};
_Static_assert(sizeof(struct dl_tensor) == 48 && offsetof(struct dl_tensor, shape) == 24,
               "DLTensor on 64-bit machines");

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_E4M3FN = 10, DL_E5M2 = 12 };
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };

static kvx_dtype_t dtype_of(const struct dl_tensor *t)
{
    static const struct {
        uint8_t code, bits;
        kvx_dtype_t dtype;
    } known[] = {{DL_FLOAT, 16, KVX_DTYPE_F16},   {DL_FLOAT, 32, KVX_DTYPE_F32},
                 {DL_BFLOAT, 16, KVX_DTYPE_BF16}, {DL_E4M3FN, 8, KVX_DTYPE_F8_E4M3},
                 {DL_E5M2, 8, KVX_DTYPE_F8_E5M2}, {DL_INT, 32, KVX_DTYPE_S32},
                 {DL_INT, 64, KVX_DTYPE_S64},     {DL_UINT, 32, KVX_DTYPE_U32},
                 {DL_UINT, 64, KVX_DTYPE_U64},    {DL_UINT, 8, KVX_DTYPE_U8}};

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].code == t->code && known[i].bits == t->bits)
            return known[i].dtype;
    }
    return KVX_DTYPE_INVALID;
}

static kvx_memory_type_t memory_of(const struct dl_tensor *t)
{
    switch (t->device_type) {
    case DL_CPU:
    case DL_CUDA_HOST:
        return KVX_MEMORY_HOST;
    case DL_CUDA:
        return KVX_MEMORY_DEVICE;
    case DL_CUDA_MANAGED:
        return KVX_MEMORY_UNIFIED;
    default:
        return KVX_MEMORY_UNKNOWN;
    }
}

/* Set the strides of a contiguous tensor. Returns false when they don't fit 64 bits. */
static bool set_contiguous(kvx_tensor_desc_t *t)
{
    int64_t next = 1;

    for (uint32_t i = t->ndim; i-- > 0;) {
        t->stride[i] = next;
        if (t->shape[i] > 1 && __builtin_mul_overflow(next, t->shape[i], &next))
            return false;
    }
    return true;
}

kvx_status_t kvx_tensor_from_dlpack(const void *dl_tensor, kvx_layout_t layout,
                                    kvx_tensor_desc_t *ret)
{
    const struct dl_tensor *in = dl_tensor;
    kvx_tensor_desc_t t = {.size = sizeof(t), .layout = layout};

    if (!in || !ret || in->ndim < 0 || in->ndim > KVX_MAX_TENSOR_DIMS || in->lanes != 1 ||
        (in->ndim && !in->shape))
        return KVX_STATUS_INVALID_ARGUMENT;
    t.dtype = dtype_of(in);
    t.memory = memory_of(in);
    if (t.dtype == KVX_DTYPE_INVALID || t.memory == KVX_MEMORY_UNKNOWN)
        return KVX_STATUS_UNSUPPORTED;
    t.ndim = (uint32_t)in->ndim;
    if (t.ndim)
        memcpy(t.shape, in->shape, t.ndim * sizeof(t.shape[0]));
    for (uint32_t i = 0; i < t.ndim; i++) {
        if (t.shape[i] < 0)
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    if (in->strides && t.ndim)
        memcpy(t.stride, in->strides, t.ndim * sizeof(t.stride[0]));
    else if (!set_contiguous(&t))
        return KVX_STATUS_INVALID_ARGUMENT;
    t.data = in->data ? (char *)in->data + in->byte_offset : NULL;
    *ret = t;
    return KVX_STATUS_OK;
}

/* --------------------------------------------------------------------------------------------- */
/* Canonical tensors */

static void set_shape(kvx_tensor_desc_t *t, kvx_layout_t layout, uint32_t ndim,
                      const int64_t *shape)
{
    t->size = sizeof(*t);
    t->layout = layout;
    t->ndim = ndim;
    memcpy(t->shape, shape, ndim * sizeof(*shape));
}

kvx_status_t kvx_tensor_canonical(const kvx_cache_desc_t *cache, kvx_layout_t layout, uint32_t pack,
                                  kvx_tensor_desc_t *ret)
{
    kvx_tensor_desc_t t = {0};
    int64_t n, size, heads, dim;

    if (!cache || !ret)
        return KVX_STATUS_INVALID_ARGUMENT;
    n = cache->num_blocks;
    size = cache->block_size;
    heads = cache->num_kv_heads;
    dim = cache->head_dim;
    if (layout == KVX_LAYOUT_BLOCK_NHD)
        set_shape(&t, layout, 4, (int64_t[]){n, size, heads, dim});
    else if (layout == KVX_LAYOUT_BLOCK_HND)
        set_shape(&t, layout, 4, (int64_t[]){n, heads, size, dim});
    else if (layout == KVX_LAYOUT_BLOCK_HND_PACKED && pack && dim % pack == 0)
        set_shape(&t, layout, 5, (int64_t[]){n, heads, dim / pack, size, pack});
    else
        return KVX_STATUS_INVALID_ARGUMENT;
    if (!set_contiguous(&t))
        return KVX_STATUS_INVALID_ARGUMENT;
    ret->size = t.size;
    ret->layout = t.layout;
    ret->ndim = t.ndim;
    memcpy(ret->shape, t.shape, sizeof(t.shape));
    memcpy(ret->stride, t.stride, sizeof(t.stride));
    return KVX_STATUS_OK;
}

/* --------------------------------------------------------------------------------------------- */
/* Engines */

/* Return @t without dim @dim, at index @index of it. */
static kvx_tensor_desc_t select_dim(const kvx_tensor_desc_t *t, uint32_t dim, int64_t index)
{
    kvx_tensor_desc_t view = *t;
    /* Compute without signs: validation finds a stride that leads outside. */
    uint64_t skip = (uint64_t)index * (uint64_t)t->stride[dim] * kvx_dtype_size(t->dtype);

    view.data = (void *)((uintptr_t)t->data + skip);
    view.ndim--;
    for (uint32_t i = dim; i < view.ndim; i++) {
        view.shape[i] = t->shape[i + 1];
        view.stride[i] = t->stride[i + 1];
    }
    view.shape[view.ndim] = view.stride[view.ndim] = 0;
    return view;
}

/* Split one tensor whose dim @dim is the pair (K, V). */
static bool split_pair(const kvx_tensor_desc_t *kv, uint32_t dim, kvx_cache_desc_t *c)
{
    if (kv->ndim != 5 || kv->shape[dim] != 2)
        return false;
    c->k = select_dim(kv, dim, 0);
    c->v = select_dim(kv, dim, 1);
    return true;
}

/* Split rows of double length into K and V. */
static bool split_rows(const kvx_tensor_desc_t *kv, kvx_cache_desc_t *c)
{
    uint64_t half;

    if (kv->ndim != 4 || kv->shape[3] <= 0 || kv->shape[3] % 2)
        return false;
    c->k = *kv;
    c->k.shape[3] /= 2;
    c->v = c->k;
    half = (uint64_t)c->k.shape[3] * (uint64_t)kv->stride[3] * kvx_dtype_size(kv->dtype);
    c->v.data = (void *)((uintptr_t)kv->data + half);
    return true;
}

/* V [blocks, heads, dim, block_size] is packed with one element a chunk. */
static bool split_paged(const kvx_tensor_desc_t *k, const kvx_tensor_desc_t *v, kvx_cache_desc_t *c)
{
    if (!v || k->ndim != 5 || v->ndim != 4)
        return false;
    c->k = *k;
    c->v = *v;
    c->v.ndim = 5;
    c->v.shape[4] = c->v.stride[4] = 1;
    return true;
}

static bool split(kvx_engine_layout_t engine, const kvx_tensor_desc_t *kv,
                  const kvx_tensor_desc_t *v, kvx_cache_desc_t *c)
{
    switch (engine) {
    case KVX_ENGINE_VLLM_KV_FIRST:
        return !v && split_pair(kv, 0, c);
    case KVX_ENGINE_VLLM_BLOCKS_FIRST:
    case KVX_ENGINE_FLASHINFER_HND:
        return !v && split_pair(kv, 1, c);
    case KVX_ENGINE_VLLM_PACKED:
        return !v && split_rows(kv, c);
    case KVX_ENGINE_SPLIT_NHD:
    case KVX_ENGINE_SPLIT_HND:
        if (!v || kv->ndim != 4 || v->ndim != 4)
            return false;
        c->k = *kv;
        c->v = *v;
        return true;
    case KVX_ENGINE_PAGED:
        return split_paged(kv, v, c);
    default:
        return false;
    }
}

static kvx_layout_t layout_of(kvx_engine_layout_t engine)
{
    switch (engine) {
    case KVX_ENGINE_PAGED:
        return KVX_LAYOUT_BLOCK_HND_PACKED;
    case KVX_ENGINE_VLLM_PACKED:
    case KVX_ENGINE_FLASHINFER_HND:
    case KVX_ENGINE_SPLIT_HND:
        return KVX_LAYOUT_BLOCK_HND;
    default:
        return KVX_LAYOUT_BLOCK_NHD;
    }
}

/* Take the four sizes from K's shape. Returns false when one doesn't fit. */
static bool take_sizes(kvx_cache_desc_t *c)
{
    const int64_t *s = c->k.shape;
    int64_t blocks = s[0], size = s[1], heads = s[2], dim = s[3];

    if (c->k.layout != KVX_LAYOUT_BLOCK_NHD) {
        heads = s[1];
        size = s[2];
    }
    if (c->k.ndim == 5) {
        size = s[3];
        if (__builtin_mul_overflow(s[2], s[4], &dim))
            return false;
    }
    if (((blocks | size | heads | dim) >> 32) != 0) /* negative ones, too */
        return false;
    c->num_blocks = (uint32_t)blocks;
    c->block_size = (uint32_t)size;
    c->num_kv_heads = (uint32_t)heads;
    c->head_dim = (uint32_t)dim;
    return true;
}

static void finish_tensor(kvx_tensor_desc_t *t, kvx_layout_t layout, kvx_dtype_t dtype)
{
    t->size = sizeof(*t);
    t->layout = layout;
    if (t->dtype == KVX_DTYPE_U8 && dtype != KVX_DTYPE_INVALID)
        t->dtype = dtype;
}

kvx_status_t kvx_cache_from_engine(kvx_engine_layout_t engine, const kvx_tensor_desc_t *kv,
                                   const kvx_tensor_desc_t *v, kvx_dtype_t dtype,
                                   kvx_cache_desc_t *ret)
{
    kvx_cache_desc_t c = {.size = sizeof(c)};
    kvx_status_t status;

    if (!kv || !ret || (dtype != KVX_DTYPE_INVALID && kvx_dtype_size(dtype) != 1) || !kv->data)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (!split(engine, kv, v, &c))
        return KVX_STATUS_INVALID_ARGUMENT;
    finish_tensor(&c.k, layout_of(engine), dtype);
    finish_tensor(&c.v, layout_of(engine), dtype);
    if (!take_sizes(&c))
        return KVX_STATUS_INVALID_ARGUMENT;
    status = kvx_validate_cache_desc(&c);
    if (status == KVX_STATUS_OK)
        *ret = c;
    return status;
}

kvx_status_t kvx_cache_from_trtllm(const kvx_trtllm_pools_t *pools, kvx_cache_desc_t *ret)
{
    kvx_cache_desc_t c = {.size = sizeof(c)};
    uint64_t bytes;
    kvx_status_t status;

    if (!pools || !ret || pools->size < sizeof(*pools) || pools->reserved)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (pools->tokens_per_block & (pools->tokens_per_block - 1))
        return KVX_STATUS_INVALID_ARGUMENT;
    c.num_blocks = pools->num_blocks ? pools->num_blocks : 1;
    c.block_size = pools->tokens_per_block;
    c.num_kv_heads = pools->num_kv_heads;
    c.head_dim = pools->head_dim;
    c.k.dtype = pools->dtype;
    c.k.memory = pools->memory;
    c.k.data = pools->primary;
    status = kvx_tensor_canonical(&c, KVX_LAYOUT_BLOCK_HND, 0, &c.k);
    c.v = c.k;
    if (status == KVX_STATUS_OK)
        status = kvx_validate_cache_desc(&c);
    if (status != KVX_STATUS_OK)
        return status;
    if (__builtin_mul_overflow((uint64_t)c.block_size * c.num_kv_heads,
                               (uint64_t)c.head_dim * kvx_dtype_size(pools->dtype), &bytes) ||
        bytes > UINT32_MAX)
        return KVX_STATUS_UNSUPPORTED;
    c.pool = (kvx_pool_desc_t){.size = sizeof(c.pool),
                               .memory = pools->memory,
                               .bytes_per_block = (uint32_t)bytes,
                               .primary = pools->primary,
                               .secondary = pools->secondary};
    *ret = c;
    return KVX_STATUS_OK;
}

kvx_status_t kvx_table_from_trtllm(const void *indices, uint32_t seq_count, uint32_t beam_width,
                                   uint32_t max_blocks_per_seq, kvx_block_table_t *ret)
{
    uint64_t count = (uint64_t)seq_count * beam_width;

    if (!indices || !ret || !count || !max_blocks_per_seq ||
        __builtin_mul_overflow(count, (uint64_t)max_blocks_per_seq * 2, &count) ||
        count > UINT32_MAX)
        return KVX_STATUS_INVALID_ARGUMENT;
    *ret = (kvx_block_table_t){.size = sizeof(*ret),
                               .format = KVX_BLOCK_TABLE_KV_OFFSETS,
                               .index_dtype = KVX_DTYPE_S32,
                               .seq_count = seq_count,
                               .beam_width = beam_width,
                               .max_blocks_per_seq = max_blocks_per_seq,
                               .indices = indices,
                               .indices_count = (uint32_t)count,
                               .flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX};
    return KVX_STATUS_OK;
}
