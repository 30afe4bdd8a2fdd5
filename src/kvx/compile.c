// SPDX-License-Identifier: Apache-2.0
#include "kvx/compile.h"

#include <string.h>

#include "kvx/validate.h"

#define TRY(expression)                         \
    do {                                        \
        kvx_status_t try_status = (expression); \
        if (try_status != KVX_STATUS_OK)        \
            return try_status;                  \
    } while (0)

/* --------------------------------------------------------------------------------------------- */
/* Maps */

/*
 * Return the byte stride of dim @i. A stride that no access uses counts as 0 and can't reduce the
 * alignment. So does every stride of a tensor without tokens, which no function has checked.
 */
static int64_t step(const kvx_tensor_desc_t *t, uint32_t i)
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

static struct kvx_map cache_map(const kvx_cache_desc_t *cache, const kvx_tensor_desc_t *t)
{
    struct kvx_map m = {.block = step(t, 0)};
    uint32_t pack = cache->head_dim;

    if (t->ndim == 5) {
        m.head = step(t, 1);
        m.chunk = step(t, 2);
        m.token = step(t, 3);
        m.elem = step(t, 4);
        pack = (uint32_t)t->shape[4];
    } else {
        bool hnd = t->layout == KVX_LAYOUT_BLOCK_HND;

        m.token = step(t, hnd ? 2 : 1);
        m.head = step(t, hnd ? 1 : 2);
        m.elem = step(t, 3);
    }
    finish_map(&m, pack, cache->head_dim, kvx_float_size(t->dtype), (uintptr_t)t->data);
    return m;
}

/*
 * Map a write's input, or a gather's output of any rank; rows [n_sequences, n_beams, n_positions].
 */
static struct kvx_map io_map(const kvx_tensor_desc_t *t, const struct kvx_plan *p)
{
    uint32_t last = t->ndim - 1;
    struct kvx_map m = {
        .token = step(t, last - 2), .head = step(t, last - 1), .elem = step(t, last)};

    if (p->op == KVX_OP_GATHER && t->ndim == 3) {
        m.beam = p->n_beams > 1 ? m.token * p->max_seq_len : 0;
        m.block = p->n_sequences > 1 ? m.token * p->max_seq_len * p->n_beams : 0;
    } else if (t->ndim == 4) {
        m.beam = p->n_beams > 1 ? step(t, 0) : 0;
        m.block = p->n_sequences > 1 ? step(t, 0) * p->n_beams : 0;
    } else if (t->ndim == 5) {
        m.block = step(t, 0);
        m.beam = step(t, 1);
    }
    finish_map(&m, p->head_dim, p->head_dim, kvx_float_size(t->dtype), (uintptr_t)t->data);
    return m;
}

/* --------------------------------------------------------------------------------------------- */
/* Parts that the operations share */

static void start(struct kvx_plan *p, enum kvx_op op, const kvx_cache_desc_t *cache,
                  const kvx_options_t *options)
{
    memset(p, 0, sizeof(*p)); /* clears padding, too: plans are compared as bytes */
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

/* Map the scale of one cache side, from a descriptor, a plain pointer, or neither. */
static kvx_status_t scale_map(const kvx_scale_desc_t *scale, const void *plain,
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

/* Check that the memory read and the memory written have no byte in common. */
static kvx_status_t apart(const struct kvx_hull *read, size_t n, const struct kvx_hull written[2])
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
    if (ret->phase > KVX_PHASE_DECODE || ret->reserved)
        return KVX_STATUS_INVALID_ARGUMENT;
    return (uintptr_t)ret->dropped % sizeof(uint64_t) ? KVX_STATUS_UNSUPPORTED : KVX_STATUS_OK;
}

/* --------------------------------------------------------------------------------------------- */
/* Write */

static kvx_status_t write_tensor(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                 int kv, struct kvx_plan *p)
{
    const kvx_tensor_desc_t *io = kv ? &write->io.value : &write->io.key;
    const kvx_tensor_desc_t *paged = kv ? &cache->v : &cache->k;

    p->side[kv].src = io_map(io, p);
    p->side[kv].dst = cache_map(cache, paged);
    p->layer[0].src[kv] = io->data;
    p->layer[0].dst[kv] = paged->data;
    if (!p->convert || !kvx_is_fp8(p->dst_dtype))
        return KVX_STATUS_OK;
    return scale_map(kv ? &write->v_scale_desc : &write->k_scale_desc,
                     kv ? write->v_scale : write->k_scale, cache, &p->side[kv].dst_scale,
                     &p->layer[0].dst_scale[kv]);
}

kvx_status_t kvx_compile_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                               const kvx_options_t *options, struct kvx_plan *ret)
{
    struct kvx_hull caches[2], reads[3];
    int64_t shape[3];

    if (!cache || !write || write->size < sizeof(*write))
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(kvx_check_cache(cache, caches));
    TRY(kvx_check_io(&write->io, cache));
    shape[0] = write->io.num_tokens;
    shape[1] = cache->num_kv_heads;
    shape[2] = cache->head_dim;
    TRY(kvx_check_io_tensor(&write->io.key, 3, shape, false, &reads[0]));
    TRY(kvx_check_io_tensor(&write->io.value, 3, shape, false, &reads[1]));
    TRY(kvx_check_slots(&write->slots, write->io.num_tokens));
    TRY(kvx_array_hull(write->slots.slots, write->slots.token_count,
                       kvx_index_size(write->slots.dtype), &reads[2]));
    TRY(apart(reads, 3, caches));

    start(ret, KVX_OP_WRITE, cache, options);
    ret->src_dtype = write->io.key.dtype;
    ret->dst_dtype = cache->k.dtype;
    ret->convert = ret->src_dtype != ret->dst_dtype;
    ret->n_tokens = write->io.num_tokens;
    ret->slots = write->slots.slots;
    ret->slots_wide = write->slots.dtype == KVX_DTYPE_S64;
    ret->invalid_slot = write->slots.invalid_slot;
    ret->n_slots = (uint64_t)cache->num_blocks * cache->block_size;
    TRY(write_tensor(cache, write, 0, ret));
    return write_tensor(cache, write, 1, ret);
}

/* --------------------------------------------------------------------------------------------- */
/* Gather */

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
    return scale_map(scale, NULL, cache, &p->side[kv].src_scale, &p->layer[0].src_scale[kv]);
}

static kvx_status_t gather_tensor(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                  int kv, struct kvx_plan *p)
{
    const kvx_tensor_desc_t *io = kv ? &gather->io.value : &gather->io.key;
    const kvx_tensor_desc_t *paged = kv ? &cache->v : &cache->k;
    kvx_tensor_desc_t pool = *paged;

    p->side[kv].dst = io_map(io, p);
    p->layer[0].dst[kv] = io->data;
    if (p->format != KVX_BLOCK_TABLE_KV_OFFSETS) {
        p->side[kv].src = cache_map(cache, paged);
        p->layer[0].src[kv] = paged->data;
        return KVX_STATUS_OK;
    }
    /* The block stride is the pool's, and the alignment is that of both pools. */
    pool.shape[0] = 2;
    pool.stride[0] = cache->pool.bytes_per_block / kvx_float_size(pool.dtype);
    pool.data = (void *)((uintptr_t)cache->pool.primary | (uintptr_t)cache->pool.secondary);
    p->side[kv].src = cache_map(cache, &pool);
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
    return apart(reads, 5, outputs);
}

kvx_status_t kvx_compile_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                const kvx_options_t *options, uint32_t layer, struct kvx_plan *ret)
{
    if (!cache || !gather || gather->size < sizeof(*gather))
        return KVX_STATUS_INVALID_ARGUMENT;
    TRY(check_gather(cache, gather, options));
    start(ret, KVX_OP_GATHER, cache, options);
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
    return KVX_STATUS_OK;
}

/* Reduce both maps' alignment to the common one. */
static void same_alignment(struct kvx_map *a, struct kvx_map *b)
{
    uint32_t align = alignment(a->align | b->align);

    a->align = align;
    b->align = align;
}

bool kvx_plan_merge(struct kvx_plan *plan, const struct kvx_plan *layer)
{
    struct kvx_plan a = *plan, b = *layer;

    if (plan->n_layers == KVX_PLAN_LAYERS)
        return false;
    for (int kv = 0; kv < 2; kv++) {
        same_alignment(&a.side[kv].src, &b.side[kv].src);
        same_alignment(&a.side[kv].dst, &b.side[kv].dst);
        if (!a.layer[0].src_scale[kv] != !b.layer[0].src_scale[kv] ||
            !a.layer[0].dst_scale[kv] != !b.layer[0].dst_scale[kv])
            return false;
    }
    b.n_layers = a.n_layers;
    b.dropped = a.dropped;
    if (memcmp(&a, &b, offsetof(struct kvx_plan, layer)) != 0)
        return false;
    memcpy(plan, &a, sizeof(a));
    plan->layer[plan->n_layers++] = layer->layer[0];
    return true;
}

/* --------------------------------------------------------------------------------------------- */
/* Copy */

/* Map one end of a copy: a cache tensor from head @head on, and its base. */
static struct kvx_map copy_end(const kvx_cache_desc_t *cache, int kv, uint32_t head, char **base)
{
    kvx_tensor_desc_t t = kv ? cache->v : cache->k;
    uint32_t dim = t.ndim == 5 || t.layout == KVX_LAYOUT_BLOCK_HND ? 1 : 2;

    t.data = (char *)t.data + step(&t, dim) * head;
    *base = t.data;
    return cache_map(cache, &t);
}

static kvx_status_t copy_scale(const kvx_scale_desc_t *scale, const kvx_cache_desc_t *cache,
                               uint32_t head, struct kvx_scale_map *map, const char **base)
{
    if (!kvx_is_fp8(cache->k.dtype))
        return KVX_STATUS_OK;
    TRY(scale_map(scale, NULL, cache, map, base));
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
    if (apart(from, 2, to) == KVX_STATUS_OK)
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
    TRY(apart(pairs, 2, to));
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
    start(ret, KVX_OP_COPY, src, options);
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
    return copy_tensor(src, dst, copy, 1, ret);
}
