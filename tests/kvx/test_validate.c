// SPDX-License-Identifier: Apache-2.0
/* The ABI's shape, every malformed call (its status, and no write), and what is left out where a
 * caller asks for that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvx/kvx_sample.h"

enum { OK = KVX_STATUS_OK, INV = KVX_STATUS_INVALID_ARGUMENT, UNS = KVX_STATUS_UNSUPPORTED };
enum { RANGE = KVX_STATUS_OUT_OF_RANGE };

static void test_version(void **state)
{
    kvx_version_t version = {.size = 3};

    (void)state;
    assert_int_equal(kvx_get_version(NULL), INV);
    assert_int_equal(kvx_get_version(&version), OK);
    assert_int_equal(version.size, sizeof(version));
    assert_int_equal(version.abi_major, KVX_ABI_VERSION_MAJOR);
    assert_int_equal(version.abi_minor, KVX_ABI_VERSION_MINOR);
    assert_int_equal(KVX_ABI_VERSION_MAJOR, 1);
    assert_int_equal(KVX_ABI_VERSION_MINOR, 1);
}

/* The published numbers once more, so that editing the header's own assertions doesn't go unseen.
 */
static const size_t abi_sizes[][2] = {
    {sizeof(kvx_version_t), 16},     {sizeof(kvx_tensor_desc_t), 112},
    {sizeof(kvx_pool_desc_t), 32},   {sizeof(kvx_cache_desc_t), 280},
    {sizeof(kvx_block_table_t), 64}, {sizeof(kvx_slot_mapping_t), 32},
    {sizeof(kvx_seq_lens_t), 24},    {sizeof(kvx_kv_io_desc_t), 248},
    {sizeof(kvx_scale_desc_t), 104}, {sizeof(kvx_write_desc_t), 512},
    {sizeof(kvx_gather_desc_t), 352}};
static const int abi_values[][2] = {{KVX_STATUS_OK, 0},
                                    {KVX_STATUS_INVALID_ARGUMENT, 1},
                                    {KVX_STATUS_UNSUPPORTED, 2},
                                    {KVX_STATUS_OUT_OF_RANGE, 3},
                                    {KVX_STATUS_INCOMPATIBLE, 4},
                                    {KVX_STATUS_INTERNAL_ERROR, 5},
                                    {KVX_DTYPE_INVALID, 0},
                                    {KVX_DTYPE_F16, 1},
                                    {KVX_DTYPE_BF16, 2},
                                    {KVX_DTYPE_F32, 3},
                                    {KVX_DTYPE_F8_E4M3, 4},
                                    {KVX_DTYPE_F8_E5M2, 5},
                                    {KVX_DTYPE_S32, 6},
                                    {KVX_DTYPE_S64, 7},
                                    {KVX_DTYPE_U32, 8},
                                    {KVX_DTYPE_U64, 9},
                                    {KVX_DTYPE_U8, 10},
                                    {KVX_MEMORY_UNKNOWN, 0},
                                    {KVX_MEMORY_HOST, 1},
                                    {KVX_MEMORY_DEVICE, 2},
                                    {KVX_MEMORY_UNIFIED, 3},
                                    {KVX_LAYOUT_INVALID, 0},
                                    {KVX_LAYOUT_BLOCK_NHD, 1},
                                    {KVX_LAYOUT_BLOCK_HND, 2},
                                    {KVX_LAYOUT_BLOCK_HND_PACKED, 3},
                                    {KVX_LAYOUT_BLOCK_CUSTOM, 15},
                                    {KVX_BLOCK_TABLE_INVALID, 0},
                                    {KVX_BLOCK_TABLE_PACKED, 1},
                                    {KVX_BLOCK_TABLE_RAGGED, 2},
                                    {KVX_BLOCK_TABLE_KV_OFFSETS, 3},
                                    {KVX_BLOCK_TABLE_FLAG_NONE, 0},
                                    {KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX, 1},
                                    {KVX_SCALE_NONE, 0},
                                    {KVX_SCALE_PER_TENSOR, 1},
                                    {KVX_SCALE_PER_BLOCK, 2},
                                    {KVX_SCALE_PER_HEAD, 3},
                                    {KVX_SCALE_PER_BLOCK_HEAD, 4},
                                    {KVX_MAX_TENSOR_DIMS, 5}};
static const size_t abi_offsets[][2] = {{offsetof(kvx_version_t, size), 0},
                                        {offsetof(kvx_version_t, abi_major), 4},
                                        {offsetof(kvx_version_t, abi_minor), 8},
                                        {offsetof(kvx_version_t, abi_patch), 12},
                                        {offsetof(kvx_tensor_desc_t, size), 0},
                                        {offsetof(kvx_tensor_desc_t, dtype), 4},
                                        {offsetof(kvx_tensor_desc_t, layout), 8},
                                        {offsetof(kvx_tensor_desc_t, memory), 12},
                                        {offsetof(kvx_tensor_desc_t, ndim), 16},
                                        {offsetof(kvx_tensor_desc_t, shape), 24},
                                        {offsetof(kvx_tensor_desc_t, stride), 64},
                                        {offsetof(kvx_tensor_desc_t, data), 104},
                                        {offsetof(kvx_pool_desc_t, size), 0},
                                        {offsetof(kvx_pool_desc_t, memory), 4},
                                        {offsetof(kvx_pool_desc_t, bytes_per_block), 8},
                                        {offsetof(kvx_pool_desc_t, primary), 16},
                                        {offsetof(kvx_pool_desc_t, secondary), 24},
                                        {offsetof(kvx_cache_desc_t, size), 0},
                                        {offsetof(kvx_cache_desc_t, num_blocks), 4},
                                        {offsetof(kvx_cache_desc_t, block_size), 8},
                                        {offsetof(kvx_cache_desc_t, num_kv_heads), 12},
                                        {offsetof(kvx_cache_desc_t, head_dim), 16},
                                        {offsetof(kvx_cache_desc_t, k), 24},
                                        {offsetof(kvx_cache_desc_t, v), 136},
                                        {offsetof(kvx_cache_desc_t, pool), 248},
                                        {offsetof(kvx_block_table_t, size), 0},
                                        {offsetof(kvx_block_table_t, format), 4},
                                        {offsetof(kvx_block_table_t, index_dtype), 8},
                                        {offsetof(kvx_block_table_t, indptr_dtype), 12},
                                        {offsetof(kvx_block_table_t, seq_count), 16},
                                        {offsetof(kvx_block_table_t, beam_width), 20},
                                        {offsetof(kvx_block_table_t, max_blocks_per_seq), 24},
                                        {offsetof(kvx_block_table_t, indices), 32},
                                        {offsetof(kvx_block_table_t, indptr), 40},
                                        {offsetof(kvx_block_table_t, indices_count), 48},
                                        {offsetof(kvx_block_table_t, indptr_count), 52},
                                        {offsetof(kvx_block_table_t, flags), 56},
                                        {offsetof(kvx_slot_mapping_t, size), 0},
                                        {offsetof(kvx_slot_mapping_t, dtype), 4},
                                        {offsetof(kvx_slot_mapping_t, token_count), 8},
                                        {offsetof(kvx_slot_mapping_t, invalid_slot), 16},
                                        {offsetof(kvx_slot_mapping_t, slots), 24},
                                        {offsetof(kvx_seq_lens_t, size), 0},
                                        {offsetof(kvx_seq_lens_t, dtype), 4},
                                        {offsetof(kvx_seq_lens_t, seq_count), 8},
                                        {offsetof(kvx_seq_lens_t, lengths), 16},
                                        {offsetof(kvx_kv_io_desc_t, size), 0},
                                        {offsetof(kvx_kv_io_desc_t, key), 8},
                                        {offsetof(kvx_kv_io_desc_t, value), 120},
                                        {offsetof(kvx_kv_io_desc_t, num_tokens), 232},
                                        {offsetof(kvx_kv_io_desc_t, num_kv_heads), 236},
                                        {offsetof(kvx_kv_io_desc_t, head_dim), 240},
                                        {offsetof(kvx_scale_desc_t, size), 0},
                                        {offsetof(kvx_scale_desc_t, dtype), 4},
                                        {offsetof(kvx_scale_desc_t, granularity), 8},
                                        {offsetof(kvx_scale_desc_t, ndim), 12},
                                        {offsetof(kvx_scale_desc_t, shape), 16},
                                        {offsetof(kvx_scale_desc_t, stride), 56},
                                        {offsetof(kvx_scale_desc_t, data), 96},
                                        {offsetof(kvx_write_desc_t, size), 0},
                                        {offsetof(kvx_write_desc_t, io), 8},
                                        {offsetof(kvx_write_desc_t, slots), 256},
                                        {offsetof(kvx_write_desc_t, k_scale), 288},
                                        {offsetof(kvx_write_desc_t, v_scale), 296},
                                        {offsetof(kvx_write_desc_t, k_scale_desc), 304},
                                        {offsetof(kvx_write_desc_t, v_scale_desc), 408},
                                        {offsetof(kvx_gather_desc_t, size), 0},
                                        {offsetof(kvx_gather_desc_t, io), 8},
                                        {offsetof(kvx_gather_desc_t, block_table), 256},
                                        {offsetof(kvx_gather_desc_t, seq_lens), 320},
                                        {offsetof(kvx_gather_desc_t, max_seq_len), 344}};

static void test_layout_of_structs(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(abi_sizes) / sizeof(abi_sizes[0]); i++)
        assert_int_equal(abi_sizes[i][0], abi_sizes[i][1]);
    for (size_t i = 0; i < sizeof(abi_values) / sizeof(abi_values[0]); i++)
        assert_int_equal(abi_values[i][0], abi_values[i][1]);
    for (size_t i = 0; i < sizeof(abi_offsets) / sizeof(abi_offsets[0]); i++)
        assert_int_equal(abi_offsets[i][0], abi_offsets[i][1]);
}

/* --------------------------------------------------------------------------------------------- */
/* A table of ways to bend a valid call */

#define BEND(name, statement)          \
    static void name(struct sample *s) \
    {                                  \
        statement;                     \
    }

#define CACHE(X)                                                                                   \
    X(cache_size_short, s->cache.size = sizeof(s->cache) - 4, INV)                                 \
    X(cache_size_newer, s->cache.size = sizeof(s->cache) + 64, OK)                                 \
    X(no_blocks, s->cache.num_blocks = 0, INV)                                                     \
    X(no_block_size, s->cache.block_size = 0, INV)                                                 \
    X(no_heads, s->cache.num_kv_heads = 0, INV)                                                    \
    X(no_dim, s->cache.head_dim = 0, INV)                                                          \
    X(layouts_differ, s->cache.v.layout = KVX_LAYOUT_BLOCK_HND, INV)                               \
    X(dtypes_differ, s->cache.v.dtype = KVX_DTYPE_F16, INV)                                        \
    X(k_size_short, s->cache.k.size = 100, INV)                                                    \
    X(v_size_short, s->cache.v.size = 0, INV)                                                      \
    X(k_size_newer, s->cache.k.size = 120, OK)                                                     \
    X(dtype_index, s->cache.k.dtype = s->cache.v.dtype = KVX_DTYPE_S32, INV)                       \
    X(dtype_bytes, s->cache.k.dtype = s->cache.v.dtype = KVX_DTYPE_U8, INV)                        \
    X(dtype_none, s->cache.k.dtype = s->cache.v.dtype = KVX_DTYPE_INVALID, INV)                    \
    X(dtype_wild, s->cache.k.dtype = s->cache.v.dtype = (kvx_dtype_t)77, INV)                      \
    X(k_no_data, s->cache.k.data = NULL, INV)                                                      \
    X(v_no_data, s->cache.v.data = NULL, INV)                                                      \
    X(ndim_0, s->cache.k.ndim = 0, INV)                                                            \
    X(ndim_3, s->cache.k.ndim = 3, INV)                                                            \
    X(ndim_5, s->cache.v.ndim = 5, INV)                                                            \
    X(ndim_6, s->cache.k.ndim = 6, INV)                                                            \
    X(shape_blocks, s->cache.k.shape[0]++, INV)                                                    \
    X(shape_negative, s->cache.k.shape[0] = -4, INV)                                               \
    X(shape_size, s->cache.v.shape[1]--, INV)                                                      \
    X(shape_dim, s->cache.v.shape[3] = 4, INV)                                                     \
    X(layout_none, s->cache.k.layout = s->cache.v.layout = KVX_LAYOUT_INVALID, UNS)                \
    X(layout_wild, s->cache.k.layout = s->cache.v.layout = (kvx_layout_t)77, UNS)                  \
    X(layout_custom, s->cache.k.layout = s->cache.v.layout = KVX_LAYOUT_BLOCK_CUSTOM, OK)          \
    X(memory_unknown, s->cache.k.memory = s->cache.v.memory = KVX_MEMORY_UNKNOWN, INV)             \
    X(memory_wild, s->cache.v.memory = (kvx_memory_type_t)77, INV)                                 \
    X(memory_mixed, s->cache.v.memory = KVX_MEMORY_DEVICE, UNS)                                    \
    X(stride_zero, s->cache.k.stride[1] = 0, INV)                                                  \
    X(stride_overflow, s->cache.k.stride[0] = INT64_MAX / 2, INV)                                  \
    X(stride_minimum, s->cache.k.stride[0] = INT64_MIN, INV)                                       \
    X(stride_below_zero, s->cache.k.stride[0] = INT64_MIN / 64, INV)                               \
    X(data_odd, s->cache.k.data = (char *)s->k + 2, UNS)                                           \
    X(data_at_the_end, s->cache.k.data = (void *)(UINTPTR_MAX - 15), INV)                          \
    X(head_dim_huge, huge_dim(s), UNS)                                                             \
    X(stride_other, s->cache.num_blocks = 2; s->cache.k.shape[0] = 2; s->cache.v.shape[0] = 2;     \
      s->cache.k.stride[0] += 8, OK)                                                               \
    X(pack_0, packed(s, 0), INV)                                                                   \
    X(pack_negative, packed(s, -8), INV)                                                           \
    X(pack_3, packed(s, 3), INV)                                                                   \
    X(pack_4, packed(s, 4), OK)                                                                    \
    X(pack_1, packed(s, 1), OK)                                                                    \
    X(pack_8, packed(s, 8), OK)                                                                    \
    X(pack_shape, packed(s, 4); s->cache.v.shape[2] = 3, INV)                                      \
    X(pack_ndim, packed(s, 4); s->cache.v.ndim = 4, INV)                                           \
    X(packs_differ, packed(s, 4); packed_v(s, 1), OK)                                              \
    X(custom_5, packed(s, 4); s->cache.k.layout = s->cache.v.layout = KVX_LAYOUT_BLOCK_CUSTOM, OK) \
    X(custom_3, s->cache.k.layout = s->cache.v.layout = KVX_LAYOUT_BLOCK_CUSTOM;                   \
      s->cache.k.ndim = 3, UNS)                                                                    \
    X(hnd, make_hnd(s), OK)                                                                        \
    X(hnd_as_nhd, make_hnd(s); s->cache.k.layout = s->cache.v.layout = KVX_LAYOUT_BLOCK_NHD, INV)  \
    X(pool_left_zero, memset(&s->cache.pool, 0, sizeof(s->cache.pool)), OK)                        \
    X(pool_garbage, memset(&s->cache.pool, 0xa5, sizeof(s->cache.pool)), OK)

static void packed_tensor(kvx_tensor_desc_t *t, int64_t pack)
{
    int64_t chunks = pack > 0 ? SAMPLE_DIM / pack : 1, size = SAMPLE_SIZE;
    int64_t shape[] = {SAMPLE_BLOCKS, SAMPLE_HEADS, chunks, size, pack};
    int64_t stride[] = {SAMPLE_HEADS * chunks * size * pack, chunks * size * pack, size * pack,
                        pack, 1};

    t->layout = KVX_LAYOUT_BLOCK_HND_PACKED;
    t->ndim = 5;
    memcpy(t->shape, shape, sizeof(shape));
    memcpy(t->stride, stride, sizeof(stride));
}

static void packed(struct sample *s, int64_t pack)
{
    packed_tensor(&s->cache.k, pack);
    packed_tensor(&s->cache.v, pack);
}

static void packed_v(struct sample *s, int64_t pack)
{
    packed_tensor(&s->cache.v, pack);
}

static void make_hnd(struct sample *s)
{
    kvx_tensor_desc_t *both[] = {&s->cache.k, &s->cache.v};

    for (int i = 0; i < 2; i++) {
        both[i]->layout = KVX_LAYOUT_BLOCK_HND;
        both[i]->shape[1] = SAMPLE_HEADS;
        both[i]->shape[2] = SAMPLE_SIZE;
        both[i]->stride[1] = SAMPLE_SIZE * SAMPLE_DIM;
        both[i]->stride[2] = SAMPLE_DIM;
    }
}

static void huge_dim(struct sample *s)
{
    kvx_tensor_desc_t *both[] = {&s->cache.k, &s->cache.v};

    s->cache.head_dim = UINT32_MAX;
    s->cache.num_blocks = s->cache.block_size = s->cache.num_kv_heads = 1;
    for (int i = 0; i < 2; i++) {
        memcpy(both[i]->shape, (int64_t[]){1, 1, 1, UINT32_MAX}, 4 * sizeof(int64_t));
        both[i]->data = both[0]->data;
    }
}

#define WRITE(X)                                                                                  \
    X(write_size, s->write.size = sizeof(s->write) - 1, INV)                                      \
    X(write_size_newer, s->write.size = sizeof(s->write) + 8, OK)                                 \
    X(io_size, s->write.io.size = 8, INV)                                                         \
    X(io_heads, s->write.io.num_kv_heads = 1, INV)                                                \
    X(io_no_heads, s->write.io.num_kv_heads = 0, INV)                                             \
    X(io_dim, s->write.io.head_dim = 16, INV)                                                     \
    X(key_size, s->write.io.key.size = 111, INV)                                                  \
    X(value_size, s->write.io.value.size = 0, INV)                                                \
    X(key_dtype, s->write.io.key.dtype = KVX_DTYPE_S32, INV)                                      \
    X(value_dtype_differs, s->write.io.value.dtype = KVX_DTYPE_F16, INV)                          \
    X(both_f16, s->write.io.key.dtype = s->write.io.value.dtype = KVX_DTYPE_F16, OK)              \
    X(both_u8, s->write.io.key.dtype = s->write.io.value.dtype = KVX_DTYPE_U8, INV)               \
    X(key_ndim, s->write.io.key.ndim = 4, INV)                                                    \
    X(key_ndim_0, s->write.io.key.ndim = 0, INV)                                                  \
    X(key_ndim_9, s->write.io.key.ndim = 9, INV)                                                  \
    X(key_tokens, s->write.io.key.shape[0]++, INV)                                                \
    X(value_heads, s->write.io.value.shape[1] = 1, INV)                                           \
    X(key_null, s->write.io.key.data = NULL, INV)                                                 \
    X(value_null, s->write.io.value.data = NULL, INV)                                             \
    X(key_odd, s->write.io.key.data = (char *)s->key + 1, UNS)                                    \
    X(key_stride, s->write.io.key.stride[0] = SAMPLE_ROW + 3, OK)                                 \
    X(key_broadcast, s->write.io.key.stride[1] = 0, OK)                                           \
    X(key_overflow, s->write.io.key.stride[0] = INT64_MAX, INV)                                   \
    X(io_memory_unknown, s->write.io.key.memory = KVX_MEMORY_UNKNOWN, INV)                        \
    X(io_memory_device, s->write.io.value.memory = KVX_MEMORY_DEVICE, UNS)                        \
    X(io_layout_ignored, s->write.io.value.layout = (kvx_layout_t)99, OK)                         \
    X(slots_size, s->write.slots.size = 31, INV)                                                  \
    X(slots_dtype_u32, s->write.slots.dtype = KVX_DTYPE_U32, INV)                                 \
    X(slots_dtype_f32, s->write.slots.dtype = KVX_DTYPE_F32, INV)                                 \
    X(slots_count, s->write.slots.token_count--, INV)                                             \
    X(slots_null, s->write.slots.slots = NULL, INV)                                               \
    X(slots_odd, s->write.slots.slots = (char *)s->slots + 4, UNS)                                \
    X(slot_end, s->slots[5] = SAMPLE_BLOCKS * SAMPLE_SIZE, RANGE)                                 \
    X(slot_last, s->slots[5] = SAMPLE_BLOCKS * SAMPLE_SIZE - 1, OK)                               \
    X(slot_huge, s->slots[0] = INT64_MAX, RANGE)                                                  \
    X(slot_minimum, s->slots[0] = INT64_MIN, OK)                                                  \
    X(slot_beyond_is_invalid, s->slots[0] = 99; s->write.slots.invalid_slot = 99, OK)             \
    X(no_tokens, make_empty(s), OK)                                                               \
    X(no_tokens_in_cache, make_empty(s); s->write.io.key.data = s->k + 32, OK)                    \
    X(no_tokens_wild_stride, make_empty(s); s->write.io.key.stride[1] = INT64_MAX, OK)            \
    X(input_in_cache, s->write.io.key.data = s->k + 32, INV)                                      \
    X(input_is_cache, s->write.io.value.data = s->v, INV)                                         \
    X(one_tensor, s->cache.v.data = s->k, INV)                                                    \
    X(one_tensor_one_input, s->cache.v.data = s->k; s->write.io.value.data = s->key, OK)          \
    X(empty_on_a_device, make_empty(s); on_a_device(s), OK)                                       \
    X(empty_one_tensor, make_empty(s); s->cache.v.data = s->k; s->write.io.key.data = s->key, OK) \
    X(slots_in_cache, s->write.slots.slots = s->v, INV)                                           \
    X(scale_desc_left_zero, s->write.k_scale = s->key, OK)                                        \
    X(scale_unused, s->write.k_scale_desc.data = (void *)3, OK)                                   \
    X(scale_short, fp8(s)->size = 12, INV)                                                        \
    X(scale_short_no_data, fp8(s)->size = 12; s->write.k_scale_desc.data = NULL, INV)             \
    X(scale_size_0, fp8(s)->size = 0, INV)                                                        \
    X(scale_valid, fp8(s), OK)                                                                    \
    X(scale_none, fp8(s)->granularity = KVX_SCALE_NONE, INV)                                      \
    X(scale_wild, fp8(s)->granularity = (kvx_scale_granularity_t)9, INV)                          \
    X(scale_f16, fp8(s)->dtype = KVX_DTYPE_F16, UNS)                                              \
    X(scale_s32, fp8(s)->dtype = KVX_DTYPE_S32, INV)                                              \
    X(scale_ndim, fp8(s)->ndim = 2, INV)                                                          \
    X(scale_shape, fp8(s)->shape[0]++, INV)                                                       \
    X(scale_block_head, *fp8(s) = block_head(s), OK)                                              \
    X(scale_block_head_shape, *fp8(s) = block_head(s); s->write.k_scale_desc.shape[1] = 1, INV)   \
    X(scale_odd, fp8(s)->data = (char *)s->key + 2, UNS)                                          \
    X(scale_overflow, fp8(s)->stride[0] = INT64_MAX, INV)                                         \
    X(scale_pointer_odd, fp8(s)->data = NULL; s->write.k_scale = (char *)s->key + 1, UNS)

static void make_empty(struct sample *s)
{
    s->write.io.num_tokens = 0;
    s->write.io.key.shape[0] = s->write.io.value.shape[0] = 0;
    s->write.io.key.data = s->write.io.value.data = NULL;
    s->write.slots.token_count = 0;
    s->write.slots.slots = NULL;
}

static void on_a_device(struct sample *s)
{
    s->cache.k.memory = s->cache.v.memory = KVX_MEMORY_DEVICE;
    s->write.io.key.memory = s->write.io.value.memory = KVX_MEMORY_DEVICE;
}

static kvx_scale_desc_t *fp8(struct sample *s)
{
    kvx_scale_desc_t scale = {.size = sizeof(scale),
                              .dtype = KVX_DTYPE_F32,
                              .granularity = KVX_SCALE_PER_HEAD,
                              .ndim = 1,
                              .shape = {SAMPLE_HEADS},
                              .stride = {1},
                              .data = s->key};

    s->cache.k.dtype = s->cache.v.dtype = KVX_DTYPE_F8_E4M3;
    s->write.k_scale_desc = scale;
    return &s->write.k_scale_desc;
}

static kvx_scale_desc_t block_head(struct sample *s)
{
    kvx_scale_desc_t scale = {.size = sizeof(scale),
                              .dtype = KVX_DTYPE_F32,
                              .granularity = KVX_SCALE_PER_BLOCK_HEAD,
                              .ndim = 2,
                              .shape = {SAMPLE_BLOCKS, SAMPLE_HEADS},
                              .stride = {1, SAMPLE_BLOCKS},
                              .data = s->key};

    return scale;
}

#define TABLE s->gather.block_table
#define GATHER(X)                                                                                  \
    X(gather_size, s->gather.size = 348, INV)                                                      \
    X(gather_io_size, s->gather.io.size = 0, INV)                                                  \
    X(max_len_0, s->gather.max_seq_len = 0, INV)                                                   \
    X(max_len_other, s->gather.max_seq_len = 7, INV)                                               \
    X(num_tokens_other, s->gather.io.num_tokens = 13, INV)                                         \
    X(out_dtype, s->gather.io.key.dtype = s->gather.io.value.dtype = KVX_DTYPE_BF16, OK)           \
    X(out_null, s->gather.io.value.data = NULL, INV)                                               \
    X(out_rank_2, s->gather.io.value.ndim = 2, INV)                                                \
    X(out_rank_6, s->gather.io.value.ndim = 6, INV)                                                \
    X(out_rank_4, rank_4(s), OK)                                                                   \
    X(out_rank_4_shape, rank_4(s); s->gather.io.key.shape[0] = 3, INV)                             \
    X(out_broadcast, s->gather.io.key.stride[0] = 0, INV)                                          \
    X(out_in_cache, s->gather.io.key.data = s->k, INV)                                             \
    X(out_is_out, s->gather.io.value.data = s->key, INV)                                           \
    X(out_is_out_of_one_tensor, s->cache.v.data = s->k; s->gather.io.value.data = s->key, OK)      \
    X(out_on_table, s->gather.io.key.data = s->indices, INV)                                       \
    X(table_size, TABLE.size = 0, INV)                                                             \
    X(table_format, TABLE.format = KVX_BLOCK_TABLE_INVALID, INV)                                   \
    X(table_format_wild, TABLE.format = (kvx_block_table_format_t)4, INV)                          \
    X(table_dtype, TABLE.index_dtype = KVX_DTYPE_U32, INV)                                         \
    X(table_no_seqs, TABLE.seq_count = 0, INV)                                                     \
    X(table_no_blocks, TABLE.max_blocks_per_seq = 0, INV)                                          \
    X(table_beam_0, TABLE.beam_width = 0, INV)                                                     \
    X(table_beam_2, TABLE.beam_width = 2, INV)                                                     \
    X(table_count, TABLE.indices_count++, INV)                                                     \
    X(table_null, TABLE.indices = NULL, INV)                                                       \
    X(table_odd, TABLE.indices = (char *)s->indices + 2, UNS)                                      \
    X(table_indptr, TABLE.indptr = s->indptr, INV)                                                 \
    X(table_indptr_count, TABLE.indptr_count = 3, INV)                                             \
    X(table_overflow, TABLE.seq_count = TABLE.max_blocks_per_seq = 65536; TABLE.indices_count = 0; \
      s->gather.seq_lens.seq_count = 65536, INV)                                                   \
    X(table_id_end, s->indices[1] = SAMPLE_BLOCKS, RANGE)                                          \
    X(table_id_huge, s->indices[0] = INT32_MAX, RANGE)                                             \
    X(table_id_negative, s->indices[1] = -7, OK)                                                   \
    X(table_id_unused, s->lengths[0] = 4; s->indices[1] = 1000, OK)                                \
    X(lens_size, s->gather.seq_lens.size = 16, INV)                                                \
    X(lens_dtype, s->gather.seq_lens.dtype = KVX_DTYPE_U64, INV)                                   \
    X(lens_count, s->gather.seq_lens.seq_count = 3, INV)                                           \
    X(lens_null, s->gather.seq_lens.lengths = NULL, INV)                                           \
    X(lens_negative, s->lengths[1] = -1, INV)                                                      \
    X(lens_0, s->lengths[1] = 0, OK)                                                               \
    X(lens_over_max, s->lengths[1] = 1000, OK)                                                     \
    X(lens_over_table, s->gather.max_seq_len = 9; s->gather.io.num_tokens = 18;                    \
      s->gather.io.key.shape[0] = s->gather.io.value.shape[0] = 18; s->lengths[1] = 9, RANGE)      \
    X(ragged, sample_ragged(s), OK)                                                                \
    X(ragged_beam, sample_ragged(s); TABLE.beam_width = 2, INV)                                    \
    X(ragged_no_indptr, sample_ragged(s); TABLE.indptr = NULL, INV)                                \
    X(ragged_indptr_count, sample_ragged(s); TABLE.indptr_count = 2, INV)                          \
    X(ragged_indptr_dtype, sample_ragged(s); TABLE.indptr_dtype = KVX_DTYPE_INVALID, INV)          \
    X(ragged_null, sample_ragged(s); TABLE.indices = NULL, INV)                                    \
    X(ragged_no_max_blocks, sample_ragged(s); TABLE.max_blocks_per_seq = 0, INV)                   \
    X(ragged_count, sample_ragged(s); TABLE.indices_count = 12, INV)                               \
    X(ragged_start, sample_ragged(s); s->indptr[0] = 1, INV)                                       \
    X(ragged_backwards, sample_ragged(s); s->indptr[1] = 12, INV)                                  \
    X(ragged_id, sample_ragged(s); s->indices[10] = 4, RANGE)                                      \
    X(ragged_short, sample_ragged(s); s->lengths[0] = 6, RANGE)                                    \
    X(ragged_longer, sample_ragged(s); s->lengths[0] = 2, OK)                                      \
    X(offsets, sample_offsets(s), OK)                                                              \
    X(offsets_s64, sample_offsets(s); TABLE.index_dtype = KVX_DTYPE_S64, INV)                      \
    X(offsets_flag, sample_offsets(s); TABLE.flags = 0, INV)                                       \
    X(offsets_flags_more, sample_offsets(s); TABLE.flags |= 0x80, OK)                              \
    X(offsets_beam_0, sample_offsets(s); TABLE.beam_width = 0, INV)                                \
    X(offsets_count, sample_offsets(s); TABLE.indices_count = 4, INV)                              \
    X(offsets_not_power, sample_offsets(s); not_a_power(s), INV)                                   \
    X(offsets_no_pool, sample_offsets(s); s->cache.pool.size = 0, INV)                             \
    X(offsets_no_bytes, sample_offsets(s); s->cache.pool.bytes_per_block = 0, INV)                 \
    X(offsets_few_bytes, sample_offsets(s); s->cache.pool.bytes_per_block -= 4, INV)               \
    X(offsets_odd_bytes, sample_offsets(s); s->cache.pool.bytes_per_block += 2, UNS)               \
    X(offsets_no_primary, sample_offsets(s); s->cache.pool.primary = NULL, INV)                    \
    X(offsets_pool_memory, sample_offsets(s); s->cache.pool.memory = KVX_MEMORY_UNKNOWN, INV)      \
    X(offsets_pool_device, sample_offsets(s); s->cache.pool.memory = KVX_MEMORY_DEVICE, UNS)       \
    X(offsets_no_secondary, sample_offsets(s); s->cache.pool.secondary = NULL, RANGE)              \
    X(offsets_null_index, sample_offsets(s); s->indices[0] = -1, OK)                               \
    X(offsets_out_in_pool, sample_offsets(s); s->gather.io.key.data = s->k, INV)                   \
    X(offsets_out_in_second, sample_offsets(s); s->gather.io.value.data = s->v, INV)               \
    X(offsets_overflow, sample_offsets(s); TABLE.seq_count = s->gather.seq_lens.seq_count = 65536; \
      TABLE.beam_width = 32768; TABLE.indices_count = 0, INV)                                      \
    X(max_len_overflow, s->gather.max_seq_len = 1U << 31; s->gather.io.num_tokens = 0;             \
      s->gather.io.key.shape[0] = s->gather.io.value.shape[0] = 0, INV)                            \
    X(offsets_indptr, sample_offsets(s); TABLE.indptr = s->indptr, INV)

static void rank_4(struct sample *s)
{
    kvx_tensor_desc_t *both[] = {&s->gather.io.key, &s->gather.io.value};

    for (int i = 0; i < 2; i++) {
        both[i]->ndim = 4;
        memcpy(both[i]->shape, (int64_t[]){SAMPLE_SEQS, SAMPLE_MAX_LEN, SAMPLE_HEADS, SAMPLE_DIM},
               4 * sizeof(int64_t));
        memcpy(both[i]->stride, (int64_t[]){SAMPLE_MAX_LEN * SAMPLE_ROW, SAMPLE_ROW, SAMPLE_DIM, 1},
               4 * sizeof(int64_t));
    }
}

/* The same cache, seen as blocks of 3 tokens. */
static void not_a_power(struct sample *s)
{
    s->cache.block_size = 3;
    s->cache.k.shape[1] = s->cache.v.shape[1] = 3;
}

#define FUNCTION(name, statement, status) BEND(name, statement)
#define ROW(name, statement, status) {#name, name, status},
CACHE(FUNCTION)
WRITE(FUNCTION)
GATHER(FUNCTION)

struct bend {
    const char *name;
    void (*fn)(struct sample *s);
    int status;
};
static const struct bend of_cache[] = {CACHE(ROW)};
static const struct bend of_write[] = {WRITE(ROW)};
static const struct bend of_gather[] = {GATHER(ROW)};

static void expect(const char *what, const char *call, int status, int expected)
{
    if (status != expected)
        fail_msg("%s, %s: %s, expected %s", what, call, kvx_status_name((kvx_status_t)status),
                 kvx_status_name((kvx_status_t)expected));
}

/* Compare everything after a failed call: it may not touch a byte. */
static void call_and_compare(const struct bend *bend, bool gather, int expected)
{
    struct sample *s = malloc(sizeof(*s)), *before = malloc(sizeof(*s));
    kvx_status_t status;

    assert_non_null(s);
    assert_non_null(before);
    sample_init(s);
    bend->fn(s);
    memcpy(before, s, sizeof(*s));
    status = gather ? kvx_gather_kv(&s->cache, &s->gather, NULL)
                    : kvx_write_kv(&s->cache, &s->write, NULL);
    expect(bend->name, gather ? "gather" : "write", (int)status, expected);
    if (status != KVX_STATUS_OK && memcmp(before, s, sizeof(*s)) != 0)
        fail_msg("%s: failed, but memory changed", bend->name);
    free(s);
    free(before);
}

static void test_cache(void **state)
{
    (void)state;
    assert_int_equal(kvx_validate_cache_desc(NULL), INV);
    for (size_t i = 0; i < sizeof(of_cache) / sizeof(of_cache[0]); i++) {
        struct sample *s = malloc(sizeof(*s));

        assert_non_null(s);
        sample_init(s);
        of_cache[i].fn(s);
        expect(of_cache[i].name, "validate", (int)kvx_validate_cache_desc(&s->cache),
               of_cache[i].status);
        free(s);
        call_and_compare(&of_cache[i], true,
                         strncmp(of_cache[i].name, "stride_other", 12) ? of_cache[i].status
                                                                       : RANGE);
        if (of_cache[i].status != OK)
            call_and_compare(&of_cache[i], false, of_cache[i].status);
    }
}

static void test_write(void **state)
{
    struct sample s;

    (void)state;
    sample_init(&s);
    assert_int_equal(kvx_write_kv(NULL, &s.write, NULL), INV);
    assert_int_equal(kvx_write_kv(&s.cache, NULL, NULL), INV);
    for (size_t i = 0; i < sizeof(of_write) / sizeof(of_write[0]); i++)
        call_and_compare(&of_write[i], false, of_write[i].status);
}

static void test_gather(void **state)
{
    struct sample s;

    (void)state;
    sample_init(&s);
    assert_int_equal(kvx_gather_kv(NULL, &s.gather, NULL), INV);
    assert_int_equal(kvx_gather_kv(&s.cache, NULL, NULL), INV);
    for (size_t i = 0; i < sizeof(of_gather) / sizeof(of_gather[0]); i++)
        call_and_compare(&of_gather[i], true, of_gather[i].status);
}

/* An index array with one bad element at the very end: found before the first row moves. */
static void test_nothing_moves_before_the_check(void **state)
{
    struct sample s;

    (void)state;
    sample_init(&s);
    s.slots[SAMPLE_TOKENS - 1] = 16;
    assert_int_equal(kvx_write_kv(&s.cache, &s.write, NULL), RANGE);
    for (size_t i = 0; i < sizeof(s.k) / sizeof(s.k[0]); i++)
        assert_true(s.k[i] == 0 && s.v[i] == 0);
}

/* Gather from two caches in one call; returns the tokens left out. */
static uint64_t dropped_by(const struct sample *first, const struct sample *second)
{
    const kvx_cache_desc_t *caches[] = {&first->cache, &second->cache};
    const kvx_gather_desc_t *gathers[] = {&first->gather, &second->gather};
    uint64_t dropped = 0;
    const kvx_options_t o = {
        .size = sizeof(o), .flags = KVX_OPTION_DROP_OUT_OF_RANGE, .dropped = &dropped};

    assert_int_equal(kvx_gather_kv_layers(caches, gathers, 2, &o, NULL), OK);
    return dropped;
}

/* Two gathers of one sample's arrays, ragged or packed. */
static void share_table(struct sample *pair, bool ragged)
{
    for (int i = 0; i < 2; i++) {
        sample_init(&pair[i]);
        if (ragged)
            sample_ragged(&pair[i]);
        pair[i].gather.block_table.indices = pair[0].indices;
        pair[i].gather.seq_lens.lengths = pair[0].lengths;
    }
}

/* Layers whose tables are other views of the same array count their tokens themselves. */
static void test_dropped_by_other_tables(void **state)
{
    struct sample *pair = malloc(2 * sizeof(*pair));
    kvx_gather_desc_t *g = &pair[0].gather;

    (void)state;
    share_table(pair, false);
    pair[0].indices[3] = 99; /* the last two tokens of the second sequence */
    assert_int_equal(dropped_by(&pair[0], &pair[1]), 2); /* the same table */
    g->block_table.seq_count = g->seq_lens.seq_count = 1;
    g->block_table.indices_count = SAMPLE_MAX_BLOCKS;
    g->io.num_tokens = SAMPLE_MAX_LEN;
    g->io.key.shape[0] = g->io.value.shape[0] = SAMPLE_MAX_LEN;
    assert_int_equal(dropped_by(&pair[0], &pair[1]), 2);
    assert_int_equal(dropped_by(&pair[1], &pair[0]), 2);

    share_table(pair, false); /* {2, 0, 3, 1, 0 ...} is {2, 3 and more, 0, 0} in 64 bits */
    pair[1].gather.block_table.index_dtype = KVX_DTYPE_S64;
    assert_int_equal(dropped_by(&pair[0], &pair[1]), 1);

    share_table(pair, true);
    pair[0].indices[5] = 99; /* of no sequence, or the first token of the second one */
    pair[0].indptr[1] = 6;
    assert_int_equal(dropped_by(&pair[0], &pair[1]), 1);
    free(pair);
}

/* A sequence that is longer than its part of a RAGGED table: no index is out of range. */
static void test_dropped_ragged(void **state)
{
    struct sample *pair = malloc(2 * sizeof(*pair));

    (void)state;
    share_table(pair, true);
    pair[0].lengths[0] = SAMPLE_MAX_LEN; /* it has five indices */
    assert_int_equal(kvx_gather_kv(&pair[0].cache, &pair[0].gather, NULL), RANGE);
    assert_int_equal(dropped_by(&pair[0], &pair[1]), 0);
    free(pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_version),
                                       cmocka_unit_test(test_layout_of_structs),
                                       cmocka_unit_test(test_cache),
                                       cmocka_unit_test(test_write),
                                       cmocka_unit_test(test_gather),
                                       cmocka_unit_test(test_nothing_moves_before_the_check),
                                       cmocka_unit_test(test_dropped_by_other_tables),
                                       cmocka_unit_test(test_dropped_ragged)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
