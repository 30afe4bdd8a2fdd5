// SPDX-License-Identifier: Apache-2.0
#include "kvx/validate.h"

#include <string.h>

#include "kvx/numeric.h"

bool kvx_hulls_meet(const struct kvx_hull *a, const struct kvx_hull *b)
{
    return a->low < a->high && b->low < b->high && a->low < b->high && b->low < a->high;
}

kvx_status_t kvx_array_hull(const void *data, uint64_t count, uint32_t size, struct kvx_hull *ret)
{
    uint64_t bytes;

    ret->low = (uintptr_t)data;
    if (__builtin_mul_overflow(count, (uint64_t)size, &bytes) ||
        __builtin_add_overflow(ret->low, bytes, &ret->high))
        return KVX_STATUS_INVALID_ARGUMENT;
    return KVX_STATUS_OK;
}

/*
 * Compute the offsets of the lowest and the highest element in bytes. Returns false when they don't
 * fit.
 */
static bool extent(const kvx_tensor_desc_t *tensor, int64_t size, int64_t *low, int64_t *high)
{
    *low = 0;
    *high = 0;
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        int64_t reach;
        int64_t *end;

        if (tensor->shape[i] <= 1)
            continue;
        if (__builtin_mul_overflow(tensor->shape[i] - 1, tensor->stride[i], &reach) ||
            __builtin_mul_overflow(reach, size, &reach))
            return false;
        end = reach < 0 ? low : high;
        if (__builtin_add_overflow(*end, reach, end))
            return false;
    }
    return true;
}

kvx_status_t kvx_check_extent(const kvx_tensor_desc_t *tensor, bool written, struct kvx_hull *ret)
{
    uint32_t size = kvx_float_size(tensor->dtype);
    uintptr_t data = (uintptr_t)tensor->data;
    int64_t low, high;

    *ret = (struct kvx_hull){data, data};
    if (size == 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0)
            return KVX_STATUS_OK;
    }
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (written && tensor->shape[i] > 1 && tensor->stride[i] == 0)
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    if (!extent(tensor, size, &low, &high) || __builtin_add_overflow(high, (int64_t)size, &high))
        return KVX_STATUS_INVALID_ARGUMENT;
    if (data < (uintptr_t)0 - (uintptr_t)low && low < 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    ret->low = data + (uintptr_t)low;
    if (__builtin_add_overflow(data, (uintptr_t)high, &ret->high))
        return KVX_STATUS_INVALID_ARGUMENT;
    return data % size ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_OK;
}

int kvx_memory_class(kvx_memory_type_t memory)
{
    switch (memory) {
    case KVX_MEMORY_HOST:
        return 0;
    case KVX_MEMORY_DEVICE:
    case KVX_MEMORY_UNIFIED:
        return 1;
    default:
        return -1;
    }
}

uint32_t kvx_index_size(kvx_dtype_t dtype)
{
    return dtype == KVX_DTYPE_S64 ? 8 : dtype == KVX_DTYPE_S32 ? 4 : 0;
}

/*
 * Check the shape against the layout; shape[2] and shape[4] of packed layouts follow the tensor's
 * pack.
 */
static kvx_status_t check_shape(const kvx_cache_desc_t *c, const kvx_tensor_desc_t *t)
{
    int64_t want[KVX_MAX_TENSOR_DIMS] = {c->num_blocks, c->block_size, c->num_kv_heads,
                                         c->head_dim};
    bool packed = t->layout == KVX_LAYOUT_BLOCK_HND_PACKED ||
                  (t->layout == KVX_LAYOUT_BLOCK_CUSTOM && t->ndim == 5);

    if (packed) {
        int64_t pack = t->shape[4];

        if (t->ndim != 5 || pack <= 0 || c->head_dim % pack)
            return KVX_STATUS_INVALID_ARGUMENT;
        want[1] = c->num_kv_heads;
        want[2] = c->head_dim / pack;
        want[3] = c->block_size;
        want[4] = pack;
    } else if (t->layout == KVX_LAYOUT_BLOCK_CUSTOM && t->ndim != 4) {
        return KVX_STATUS_UNSUPPORTED;
    } else if (t->ndim != 4) {
        return KVX_STATUS_INVALID_ARGUMENT;
    } else if (t->layout == KVX_LAYOUT_BLOCK_HND) {
        want[1] = c->num_kv_heads;
        want[2] = c->block_size;
    }
    for (uint32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] != want[i])
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    return KVX_STATUS_OK;
}

static kvx_status_t check_cache_tensor(const kvx_cache_desc_t *cache, const kvx_tensor_desc_t *t,
                                       struct kvx_hull *ret)
{
    kvx_status_t status;

    if (t->size < sizeof(*t) || !kvx_float_size(t->dtype) || !t->data || t->ndim == 0 ||
        t->ndim > KVX_MAX_TENSOR_DIMS)
        return KVX_STATUS_INVALID_ARGUMENT;
    switch (t->layout) {
    case KVX_LAYOUT_BLOCK_NHD:
    case KVX_LAYOUT_BLOCK_HND:
    case KVX_LAYOUT_BLOCK_HND_PACKED:
    case KVX_LAYOUT_BLOCK_CUSTOM:
        break;
    default:
        return KVX_STATUS_UNSUPPORTED;
    }
    status = check_shape(cache, t);
    if (status != KVX_STATUS_OK)
        return status;
    if (kvx_memory_class(t->memory) < 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    return kvx_check_extent(t, true, ret);
}

kvx_status_t kvx_check_cache(const kvx_cache_desc_t *cache, struct kvx_hull ret[2])
{
    kvx_status_t status;

    if (!cache || cache->size < sizeof(*cache) || !cache->num_blocks || !cache->block_size ||
        !cache->num_kv_heads || !cache->head_dim)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (cache->k.layout != cache->v.layout || cache->k.dtype != cache->v.dtype)
        return KVX_STATUS_INVALID_ARGUMENT;
    status = check_cache_tensor(cache, &cache->k, &ret[0]);
    if (status == KVX_STATUS_OK)
        status = check_cache_tensor(cache, &cache->v, &ret[1]);
    if (status != KVX_STATUS_OK)
        return status;
    if (kvx_memory_class(cache->k.memory) != kvx_memory_class(cache->v.memory))
        return KVX_STATUS_UNSUPPORTED;
    /* rows are addressed with 31-bit dims; 4 GiB per row is beyond any model */
    return cache->head_dim > INT32_MAX ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_OK;
}

kvx_status_t kvx_check_io(const kvx_kv_io_desc_t *io, const kvx_cache_desc_t *cache)
{
    int memory = kvx_memory_class(cache->k.memory);

    if (io->size < sizeof(*io) || io->num_kv_heads != cache->num_kv_heads ||
        io->head_dim != cache->head_dim)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (io->key.size < sizeof(io->key) || io->value.size < sizeof(io->value) ||
        !kvx_float_size(io->key.dtype) || io->key.dtype != io->value.dtype)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (kvx_memory_class(io->key.memory) < 0 || kvx_memory_class(io->value.memory) < 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (kvx_memory_class(io->key.memory) != memory || kvx_memory_class(io->value.memory) != memory)
        return KVX_STATUS_UNSUPPORTED;
    return KVX_STATUS_OK;
}

kvx_status_t kvx_check_io_tensor(const kvx_tensor_desc_t *tensor, uint32_t n, const int64_t *shape,
                                 bool written, struct kvx_hull *ret)
{
    bool empty = false;

    if (tensor->ndim != n)
        return KVX_STATUS_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < n; i++) {
        if (tensor->shape[i] != shape[i])
            return KVX_STATUS_INVALID_ARGUMENT;
        empty = empty || shape[i] == 0;
    }
    if (!tensor->data && !empty)
        return KVX_STATUS_INVALID_ARGUMENT;
    return kvx_check_extent(tensor, written, ret);
}

/* Check an array of S32 or S64, which must exist when it has elements. */
static kvx_status_t check_indices(const void *data, kvx_dtype_t dtype, uint64_t count)
{
    uint32_t size = kvx_index_size(dtype);
    struct kvx_hull hull;

    if (!size || (!data && count))
        return KVX_STATUS_INVALID_ARGUMENT;
    if ((uintptr_t)data % size)
        return KVX_STATUS_UNSUPPORTED;
    return kvx_array_hull(data, count, size, &hull);
}

kvx_status_t kvx_check_slots(const kvx_slot_mapping_t *slots, uint32_t n_tokens)
{
    if (slots->size < sizeof(*slots) || slots->token_count != n_tokens)
        return KVX_STATUS_INVALID_ARGUMENT;
    return check_indices(slots->slots, slots->dtype, n_tokens);
}

static kvx_status_t check_ragged(const kvx_block_table_t *t)
{
    kvx_status_t status;

    if (t->beam_width != 1 || !t->indptr || t->indptr_count != (uint64_t)t->seq_count + 1)
        return KVX_STATUS_INVALID_ARGUMENT;
    status = check_indices(t->indptr, t->indptr_dtype, t->indptr_count);
    return status == KVX_STATUS_OK ? check_indices(t->indices, t->index_dtype, t->indices_count)
                                   : status;
}

/*
 * Check PACKED and KV_OFFSETS tables: indices is @rows times max_blocks_per_seq, and there is no
 * indptr.
 */
static kvx_status_t check_rectangle(const kvx_block_table_t *t, uint64_t rows)
{
    uint64_t count;

    if (__builtin_mul_overflow(rows, (uint64_t)t->max_blocks_per_seq, &count) ||
        t->indices_count != count || t->indptr || t->indptr_count)
        return KVX_STATUS_INVALID_ARGUMENT;
    return check_indices(t->indices, t->index_dtype, count);
}

/* Check the blocks of a pool: one must hold all that the layout places in it. */
static kvx_status_t check_pool(const kvx_cache_desc_t *cache)
{
    const kvx_pool_desc_t *pool = &cache->pool;
    uint32_t size = kvx_float_size(cache->k.dtype);

    if (!size || pool->size < sizeof(*pool) || !pool->bytes_per_block || !pool->primary ||
        kvx_memory_class(pool->memory) < 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    for (int kv = 0; kv < 2; kv++) {
        kvx_tensor_desc_t block = kv ? cache->v : cache->k;
        int64_t low, high;

        block.shape[0] = 1;
        if (!extent(&block, size, &low, &high) || low < 0 ||
            high > (int64_t)pool->bytes_per_block - (int64_t)size)
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    if (kvx_memory_class(pool->memory) != kvx_memory_class(cache->k.memory))
        return KVX_STATUS_UNSUPPORTED;
    if (((uintptr_t)pool->primary | (uintptr_t)pool->secondary | pool->bytes_per_block) % size)
        return KVX_STATUS_UNSUPPORTED;
    return KVX_STATUS_OK;
}

static kvx_status_t check_offsets(const kvx_block_table_t *t, const kvx_cache_desc_t *cache)
{
    uint64_t rows;
    kvx_status_t status;

    if (t->index_dtype != KVX_DTYPE_S32 || !(t->flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX) ||
        !t->beam_width || (cache->block_size & (cache->block_size - 1)))
        return KVX_STATUS_INVALID_ARGUMENT;
    if (__builtin_mul_overflow((uint64_t)t->seq_count * t->beam_width, (uint64_t)2, &rows))
        return KVX_STATUS_INVALID_ARGUMENT;
    status = check_rectangle(t, rows);
    return status == KVX_STATUS_OK ? check_pool(cache) : status;
}

kvx_status_t kvx_check_table(const kvx_block_table_t *table, const kvx_cache_desc_t *cache)
{
    if (table->size < sizeof(*table) || !table->seq_count || !table->max_blocks_per_seq)
        return KVX_STATUS_INVALID_ARGUMENT;
    switch (table->format) {
    case KVX_BLOCK_TABLE_PACKED:
        if (table->beam_width != 1)
            return KVX_STATUS_INVALID_ARGUMENT;
        return check_rectangle(table, table->seq_count);
    case KVX_BLOCK_TABLE_RAGGED:
        return check_ragged(table);
    case KVX_BLOCK_TABLE_KV_OFFSETS:
        return check_offsets(table, cache);
    default:
        return KVX_STATUS_INVALID_ARGUMENT;
    }
}

kvx_status_t kvx_check_lengths(const kvx_seq_lens_t *lengths, const kvx_block_table_t *table)
{
    if (lengths->size < sizeof(*lengths) || lengths->seq_count != table->seq_count)
        return KVX_STATUS_INVALID_ARGUMENT;
    return check_indices(lengths->lengths, lengths->dtype, lengths->seq_count);
}

kvx_status_t kvx_check_scale(const kvx_scale_desc_t *scale, const kvx_cache_desc_t *cache)
{
    int64_t want[2] = {cache->num_blocks, cache->num_kv_heads};
    kvx_tensor_desc_t view = {.dtype = KVX_DTYPE_F32, .data = (void *)(uintptr_t)scale->data};
    struct kvx_hull hull;
    uint32_t ndim = 1;

    if (scale->size < sizeof(*scale))
        return KVX_STATUS_INVALID_ARGUMENT;
    switch (scale->granularity) {
    case KVX_SCALE_PER_TENSOR:
        want[0] = 1;
        ndim = scale->ndim ? 1 : 0;
        break;
    case KVX_SCALE_PER_BLOCK:
        break;
    case KVX_SCALE_PER_HEAD:
        want[0] = cache->num_kv_heads;
        break;
    case KVX_SCALE_PER_BLOCK_HEAD:
        ndim = 2;
        break;
    default:
        return KVX_STATUS_INVALID_ARGUMENT;
    }
    if (scale->ndim != ndim || memcmp(scale->shape, want, ndim * sizeof(want[0])) != 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    if (scale->dtype != KVX_DTYPE_F32)
        return kvx_float_size(scale->dtype) ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_INVALID_ARGUMENT;
    view.ndim = ndim;
    memcpy(view.shape, scale->shape, sizeof(view.shape));
    memcpy(view.stride, scale->stride, sizeof(view.stride));
    return kvx_check_extent(&view, false, &hull);
}
