// SPDX-License-Identifier: Apache-2.0
#include "layout_unit.h"
#include "base/unit.h"

struct kvbm_layout_config known_config(enum kvbm_layout_kind kind)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kind,
                                       .num_blocks = 7,
                                       .num_layers = 5,
                                       .outer_dim = 2,
                                       .page_size = 4,
                                       .inner_dim = 13,
                                       .dtype_width_bytes = 4,
                                       .alignment = 256};
}

struct kvbm_layout_config random_config(struct rng *rng)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};

    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kinds[rng_below(rng, 3)],
                                       .num_blocks = 1 + rng_below(rng, 9),
                                       .num_layers = 1 + rng_below(rng, 6),
                                       .outer_dim = 1 + rng_below(rng, 2),
                                       .page_size = 1u << rng_below(rng, 5),
                                       .inner_dim = 1 + rng_below(rng, 20),
                                       .dtype_width_bytes = 1u << rng_below(rng, 4),
                                       .alignment = 1u << rng_below(rng, 13)};
}

struct kvbm_storage *external(void *memory, uint64_t bytes)
{
    struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_EXTERNAL, .bytes = bytes, .memory = memory};
    struct kvbm_storage *storage = NULL;

    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    return storage;
}

struct kvbm_layout *allocate(const struct kvbm_layout_config *config, enum kvbm_storage_kind kind)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = kind};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout *layout = NULL;

    assert_int_equal(kvbm_layout_allocate(config, &allocator, &layout), 0);
    return layout;
}

void same_config(const struct kvbm_layout_config *a, const struct kvbm_layout_config *b)
{
    assert_int_equal(a->size, b->size);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->num_blocks, b->num_blocks);
    assert_int_equal(a->num_layers, b->num_layers);
    assert_int_equal(a->outer_dim, b->outer_dim);
    assert_int_equal(a->page_size, b->page_size);
    assert_int_equal(a->inner_dim, b->inner_dim);
    assert_int_equal(a->dtype_width_bytes, b->dtype_width_bytes);
    assert_int_equal(a->alignment, b->alignment);
    assert_int_equal(a->num_heads, b->num_heads);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->order, b->order);
}

void same_shape(const struct kvbm_layout_shape *a, const struct kvbm_layout_shape *b)
{
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->n_storages, b->n_storages);
    assert_int_equal(a->region_bytes, b->region_bytes);
    assert_int_equal(a->outer_stride, b->outer_stride);
    assert_int_equal(a->layer_stride, b->layer_stride);
    assert_int_equal(a->block_stride, b->block_stride);
    assert_int_equal(a->natural_block_bytes, b->natural_block_bytes);
    assert_int_equal(a->data_bytes, b->data_bytes);
    assert_int_equal(a->required_bytes, b->required_bytes);
}

static void same_tensor(const kvx_tensor_desc_t *a, const kvx_tensor_desc_t *b)
{
    assert_ptr_equal(a->data, b->data);
    assert_int_equal(a->size, b->size);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->layout, b->layout);
    assert_int_equal(a->memory, b->memory);
    assert_int_equal(a->ndim, b->ndim);
    assert_memory_equal(a->shape, b->shape, sizeof(a->shape));
    assert_memory_equal(a->stride, b->stride, sizeof(a->stride));
}

void same_cache(const kvx_cache_desc_t *a, const kvx_cache_desc_t *b)
{
    assert_int_equal(a->size, b->size);
    assert_int_equal(a->num_blocks, b->num_blocks);
    assert_int_equal(a->block_size, b->block_size);
    assert_int_equal(a->num_kv_heads, b->num_kv_heads);
    assert_int_equal(a->head_dim, b->head_dim);
    same_tensor(&a->k, &b->k);
    same_tensor(&a->v, &b->v);
    assert_int_equal(a->pool.size, b->pool.size);
    assert_int_equal(a->pool.memory, b->pool.memory);
}
