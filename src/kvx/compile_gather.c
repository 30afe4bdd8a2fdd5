// SPDX-License-Identifier: Apache-2.0
#include "kvx/compile.h"
#include "kvx/compile_parts.h"
#include "kvx/validate.h"

/* Find the rank of an output tensor among the accepted ones, and check its shape. */
static kvx_status_t check_output(const kvx_tensor_desc_t *t, const kvx_cache_desc_t *cache,
                                 const kvx_gather_desc_t *gather, struct kvx_hull *ret)
{
    const kvx_block_table_t *table = &gather->block_table;
    int64_t rows = (int64_t)((uint64_t)table->seq_count * table->beam_width);
    int64_t shape[KVX_MAX_TENSOR_DIMS] = {0};
    uint32_t n = 0;

    if (t->ndim == 3) {
        shape[n++] = gather->io.num_tokens;
    } else if (t->ndim == 4) {
        shape[n++] = rows;
        shape[n++] = gather->max_seq_len;
    } else {
        shape[n++] = table->seq_count;
        shape[n++] = table->beam_width;
        shape[n++] = gather->max_seq_len;
    }
    shape[n++] = cache->num_kv_heads;
    shape[n++] = cache->head_dim;
    return kvx_check_io_tensor(t, n, shape, true, ret);
}

static void table_arrays(const kvx_gather_desc_t *gather, struct kvx_plan *p)
{
    const kvx_block_table_t *table = &gather->block_table;

    p->format = table->format;
    p->indices = table->indices;
    p->indices_wide = table->index_dtype == KVX_DTYPE_S64;
    p->n_indices = table->indices_count;
    if (table->format == KVX_BLOCK_TABLE_RAGGED) {
        p->indptr = table->indptr;
        p->indptr_wide = table->indptr_dtype == KVX_DTYPE_S64;
    }
    p->lengths = gather->seq_lens.lengths;
    p->lengths_wide = gather->seq_lens.dtype == KVX_DTYPE_S64;
    p->n_sequences = table->seq_count;
    p->n_beams = table->beam_width;
    p->max_blocks = table->max_blocks_per_seq;
    p->max_seq_len = gather->max_seq_len;
}

static kvx_status_t gather_scale(const kvx_cache_desc_t *cache, const kvx_options_t *options,
                                 uint32_t layer, int kv, struct kvx_plan *p)
{
    const kvx_scale_desc_t *const *scales = kv ? options->v_scales : options->k_scales;
    const kvx_scale_desc_t *scale = scales ? scales[layer] : NULL;

    if (!p->convert || !kvx_is_fp8(p->src_dtype) || !scale || !scale->data)
        return KVX_STATUS_OK;
    if (p->format == KVX_BLOCK_TABLE_KV_OFFSETS && scale->granularity != KVX_SCALE_PER_TENSOR &&
        scale->granularity != KVX_SCALE_PER_HEAD)
        return KVX_STATUS_UNSUPPORTED; /* two pools use the same block numbers */
    return kvx_scale_map(scale, NULL, cache, &p->side[kv].src_scale, &p->layer[0].src_scale[kv]);
}

static kvx_status_t gather_tensor(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                  int kv, struct kvx_plan *p)
{
    const kvx_tensor_desc_t *io = kv ? &gather->io.value : &gather->io.key;
    const kvx_tensor_desc_t *paged = kv ? &cache->v : &cache->k;
    kvx_tensor_desc_t pool = *paged;

    p->side[kv].dst = kvx_io_map(io, p);
    p->layer[0].dst[kv] = io->data;
    if (p->format != KVX_BLOCK_TABLE_KV_OFFSETS) {
        p->side[kv].src = kvx_cache_map(cache, paged);
        p->layer[0].src[kv] = paged->data;
        return KVX_STATUS_OK;
    }
    /* The block stride is the pool's, and the alignment is that of both pools. */
    pool.shape[0] = 2;
    pool.stride[0] = cache->pool.bytes_per_block / kvx_float_size(pool.dtype);
    pool.data = (void *)((uintptr_t)cache->pool.primary | (uintptr_t)cache->pool.secondary);
    p->side[kv].src = kvx_cache_map(cache, &pool);
    p->layer[0].src[kv] = cache->pool.primary;
    p->layer[0].src_pool = cache->pool.secondary;
    return KVX_STATUS_OK;
}

/*
 * Compute the hulls of the memory that a gather reads: the cache, or the known part of the pools (a
 * pool has at least one block), and the table's arrays.
 */
static kvx_status_t gather_reads(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                 const kvx_options_t *options, struct kvx_hull reads[5])
{
    const kvx_block_table_t *table = &gather->block_table;
    const kvx_pool_desc_t *pool = &cache->pool;

    if (table->format == KVX_BLOCK_TABLE_KV_OFFSETS) {
        uint64_t first = options->primary_blocks ? options->primary_blocks : 1;
        uint64_t second = options->secondary_blocks ? options->secondary_blocks : 1;

        TRY(kvx_array_hull(pool->primary, first, pool->bytes_per_block, &reads[0]));
        TRY(kvx_array_hull(pool->secondary, pool->secondary ? second : 0, pool->bytes_per_block,
                           &reads[1]));
    }
    TRY(kvx_array_hull(table->indices, table->indices_count, kvx_index_size(table->index_dtype),
                       &reads[2]));
    reads[3] = (struct kvx_hull){0, 0};
    if (table->format == KVX_BLOCK_TABLE_RAGGED)
        TRY(kvx_array_hull(table->indptr, table->indptr_count, kvx_index_size(table->indptr_dtype),
                           &reads[3]));
    return kvx_array_hull(gather->seq_lens.lengths, gather->seq_lens.seq_count,
                          kvx_index_size(gather->seq_lens.dtype), &reads[4]);
}

static kvx_status_t check_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                 const kvx_options_t *options)
{
    struct kvx_hull reads[5], outputs[2];
    uint64_t rows;

    TRY(kvx_check_cache(cache, reads));
    if (!gather->max_seq_len)
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(kvx_check_io(&gather->io, cache));
    TRY(kvx_check_table(&gather->block_table, cache));
    TRY(kvx_check_lengths(&gather->seq_lens, &gather->block_table));
    rows = (uint64_t)gather->block_table.seq_count * gather->block_table.beam_width;
    if (__builtin_mul_overflow(rows, (uint64_t)gather->max_seq_len, &rows) ||
        gather->io.num_tokens != rows)
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(check_output(&gather->io.key, cache, gather, &outputs[0]));
    TRY(check_output(&gather->io.value, cache, gather, &outputs[1]));
    TRY(gather_reads(cache, gather, options, reads));
    return kvx_check_apart(reads, 5, outputs);
}

kvx_status_t kvx_compile_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                const kvx_options_t *options, uint32_t layer, struct kvx_plan *ret)
{
    if (!cache || !gather || gather->size < sizeof(*gather))
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(check_gather(cache, gather, options));
    kvx_plan_start(ret, KVX_OP_GATHER, cache, options);
    ret->src_dtype = cache->k.dtype;
    ret->dst_dtype = gather->io.key.dtype;
    ret->convert = ret->src_dtype != ret->dst_dtype;
    ret->zero_padding = (options->flags & KVX_OPTION_ZERO_PADDING) != 0;
    table_arrays(gather, ret);
    ret->n_src_blocks = cache->num_blocks;
    if (ret->format == KVX_BLOCK_TABLE_KV_OFFSETS) {
        ret->pool_blocks[0] = options->primary_blocks ? options->primary_blocks : UINT64_MAX;
        ret->pool_blocks[1] = options->secondary_blocks ? options->secondary_blocks : UINT64_MAX;
        if (!cache->pool.secondary)
            ret->pool_blocks[1] = 0;
    }
    for (int kv = 0; kv < 2; kv++) {
        TRY(gather_tensor(cache, gather, kv, ret));
        TRY(gather_scale(cache, options, layer, kv, ret));
    }
    return kvx_check_two(ret);
}
