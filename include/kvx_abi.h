// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_abi.h: KVX v1.1, the C ABI for paged K/V caches.
 *
 * Source and binary compatible with the published header of that version; the static assertions at
 * the end hold every size, offset and value. What the specification leaves open, and how this
 * library answers, is in docs/kvx.md. What v1.1 can't say (scales when gathering, many layers in
 * one call, copies between caches, threads, adapters) is in kvx_ext.h.
 *
 * In one paragraph: a cache is two paged tensors, K and V. Strides are in elements and are honoured
 * as given. kvx_write_kv scatters rows of tokens into slots (slot = block * block_size + offset);
 * kvx_gather_kv collects the rows of sequences through a block table. Equal dtypes are copied bit
 * by bit; different ones are converted; FP8 is stored = saturate(x / scale), read = stored * scale.
 *
 * Threads: every function may be called from any thread. The library keeps no state of the
 * caller's; concurrent writes to overlapping cache regions are the caller's race.
 *
 * Memory: slots, indices, indptr, lengths and scales lie where the cache lies (HOST, or
 * device-accessible for DEVICE and UNIFIED). Pointers are used until the call returns or, for
 * device memory, until the work queued on the stream has finished.
 */
#ifndef KVX_ABI_H
#define KVX_ABI_H

#include <stddef.h>
#include <stdint.h>

#define KVX_ABI_VERSION_MAJOR 1
#define KVX_ABI_VERSION_MINOR 1

#if defined(_WIN32)
#if defined(KVX_BUILD_DLL)
#define KVX_API __declspec(dllexport)
#elif defined(KVX_USE_DLL)
#define KVX_API __declspec(dllimport)
#else
#define KVX_API
#endif
#elif defined(__GNUC__)
#define KVX_API __attribute__((visibility("default")))
#else
#define KVX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvx_status {
    KVX_STATUS_OK = 0,
    KVX_STATUS_INVALID_ARGUMENT = 1, /* malformed descriptor or field; nothing was moved */
    KVX_STATUS_UNSUPPORTED = 2,      /* well-formed, but not by this library or on this machine */
    KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot or block id out of bounds; nothing was moved */
    KVX_STATUS_INCOMPATIBLE = 4,     /* ABI versions differ */
    KVX_STATUS_INTERNAL_ERROR = 5
} kvx_status_t;

/** abi_patch of kvx_get_version counts releases that change neither structs nor functions. */
typedef struct kvx_version {
    uint32_t size;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint32_t abi_patch;
} kvx_version_t;

typedef enum kvx_dtype {
    KVX_DTYPE_INVALID = 0,
    KVX_DTYPE_F16 = 1,
    KVX_DTYPE_BF16 = 2,
    KVX_DTYPE_F32 = 3,
    KVX_DTYPE_F8_E4M3 = 4, /* the "FN" form: no infinity, NaN 0x7f, largest 448 */
    KVX_DTYPE_F8_E5M2 = 5, /* IEEE form, largest finite 57344 */
    KVX_DTYPE_S32 = 6,
    KVX_DTYPE_S64 = 7,
    KVX_DTYPE_U32 = 8,
    KVX_DTYPE_U64 = 9,
    KVX_DTYPE_U8 = 10
} kvx_dtype_t;

typedef enum kvx_memory_type {
    KVX_MEMORY_UNKNOWN = 0,
    KVX_MEMORY_HOST = 1,
    KVX_MEMORY_DEVICE = 2,
    KVX_MEMORY_UNIFIED = 3 /* managed, or host memory that the device can address */
} kvx_memory_type_t;

typedef enum kvx_layout {
    KVX_LAYOUT_INVALID = 0,
    KVX_LAYOUT_BLOCK_NHD = 1,        /* [num_blocks, block_size, num_kv_heads, head_dim] */
    KVX_LAYOUT_BLOCK_HND = 2,        /* [num_blocks, num_kv_heads, block_size, head_dim] */
    KVX_LAYOUT_BLOCK_HND_PACKED = 3, /* [num_blocks, num_kv_heads, head_dim/p, block_size, p] */
    KVX_LAYOUT_BLOCK_CUSTOM = 15     /* order of NHD (ndim 4) or HND_PACKED (ndim 5), any strides */
} kvx_layout_t;

enum { KVX_MAX_TENSOR_DIMS = 5 };

/** A tensor; shape in layout order, strides in elements. */
typedef struct kvx_tensor_desc {
    uint32_t size;
    kvx_dtype_t dtype;
    kvx_layout_t layout;
    kvx_memory_type_t memory;
    uint32_t ndim;
    int64_t shape[KVX_MAX_TENSOR_DIMS];
    int64_t stride[KVX_MAX_TENSOR_DIMS];
    void *data;
} kvx_tensor_desc_t;

/** Pools of blocks, for KVX_BLOCK_TABLE_KV_OFFSETS; otherwise not looked at, not even size. */
typedef struct kvx_pool_desc {
    uint32_t size;
    kvx_memory_type_t memory;
    uint32_t bytes_per_block; /* of one K block or one V block */
    void *primary;
    void *secondary; /* may be NULL */
} kvx_pool_desc_t;

typedef struct kvx_cache_desc {
    uint32_t size;
    uint32_t num_blocks;
    uint32_t block_size;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    kvx_tensor_desc_t k;
    kvx_tensor_desc_t v;
    kvx_pool_desc_t pool;
} kvx_cache_desc_t;

typedef enum kvx_block_table_format {
    KVX_BLOCK_TABLE_INVALID = 0,
    KVX_BLOCK_TABLE_PACKED = 1,    /* [seq_count, max_blocks_per_seq] block ids */
    KVX_BLOCK_TABLE_RAGGED = 2,    /* one block id per token, indptr[seq_count + 1] */
    KVX_BLOCK_TABLE_KV_OFFSETS = 3 /* [seq_count, beam_width, 2, max_blocks_per_seq] pool indices */
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags {
    KVX_BLOCK_TABLE_FLAG_NONE = 0,
    KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0 /* bit 31 selects the secondary pool, -1 is none */
} kvx_block_table_flags_t;

typedef struct kvx_block_table {
    uint32_t size;
    kvx_block_table_format_t format;
    kvx_dtype_t index_dtype;
    kvx_dtype_t indptr_dtype;
    uint32_t seq_count;
    uint32_t beam_width;
    uint32_t max_blocks_per_seq;
    const void *indices;
    const void *indptr;
    uint32_t indices_count;
    uint32_t indptr_count;
    uint32_t flags;
} kvx_block_table_t;

/** Slots; a negative one and invalid_slot itself (set it: 0 would name slot 0) are not written. */
typedef struct kvx_slot_mapping {
    uint32_t size;
    kvx_dtype_t dtype;
    uint32_t token_count;
    int64_t invalid_slot;
    const void *slots;
} kvx_slot_mapping_t;

typedef struct kvx_seq_lens {
    uint32_t size;
    kvx_dtype_t dtype;
    uint32_t seq_count;
    const void *lengths;
} kvx_seq_lens_t;

/**
 * Rows of tokens: [num_tokens, num_kv_heads, head_dim], any strides. A gather also takes
 * [seq_count, max_seq_len, heads, dim] and [seq_count, beam_width, max_seq_len, heads, dim].
 */
typedef struct kvx_kv_io_desc {
    uint32_t size;
    kvx_tensor_desc_t key;
    kvx_tensor_desc_t value;
    uint32_t num_tokens;
    uint32_t num_kv_heads;
    uint32_t head_dim;
} kvx_kv_io_desc_t;

typedef enum kvx_scale_granularity {
    KVX_SCALE_NONE = 0,
    KVX_SCALE_PER_TENSOR = 1,    /* one value: ndim 0, or [1] */
    KVX_SCALE_PER_BLOCK = 2,     /* [num_blocks] */
    KVX_SCALE_PER_HEAD = 3,      /* [num_kv_heads] */
    KVX_SCALE_PER_BLOCK_HEAD = 4 /* [num_blocks, num_kv_heads] */
} kvx_scale_granularity_t;

/** Scales are F32. Strides in elements; 0 repeats. */
typedef struct kvx_scale_desc {
    uint32_t size;
    kvx_dtype_t dtype;
    kvx_scale_granularity_t granularity;
    uint32_t ndim;
    int64_t shape[KVX_MAX_TENSOR_DIMS];
    int64_t stride[KVX_MAX_TENSOR_DIMS];
    const void *data;
} kvx_scale_desc_t;

/** k_scale and v_scale are one F32 each, used when the scale descriptors have no data. */
typedef struct kvx_write_desc {
    uint32_t size;
    kvx_kv_io_desc_t io;
    kvx_slot_mapping_t slots;
    const void *k_scale;
    const void *v_scale;
    kvx_scale_desc_t k_scale_desc;
    kvx_scale_desc_t v_scale_desc;
} kvx_write_desc_t;

typedef struct kvx_gather_desc {
    uint32_t size;
    kvx_kv_io_desc_t io;
    kvx_block_table_t block_table;
    kvx_seq_lens_t seq_lens;
    uint32_t max_seq_len;
} kvx_gather_desc_t;

/**
 * The version of the library. Fills all of @out_version, size included, whatever it held before.
 * INVALID_ARGUMENT for NULL only.
 */
KVX_API kvx_status_t kvx_get_version(kvx_version_t *out_version);

/** Check a cache descriptor by itself; touches neither the data nor a device. */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache);

/**
 * Write the K and V rows of tokens to their slots. On HOST memory the call returns when it is done,
 * and either all rows are written or (any status but OK) none. On DEVICE and UNIFIED memory the
 * work is queued on @stream (a CUDA stream; NULL: the default one), nothing is waited for or
 * allocated, and slots out of range are left out (kvx_ext.h counts them).
 */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                  void *stream);

/**
 * Gather the first min(length, max_seq_len) tokens of each sequence. Rows beyond a sequence's
 * length are left as they were (kvx_ext.h can zero them). Completion and errors as in kvx_write_kv.
 */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                   void *stream);

/* The published layout, on LP64 and LLP64; a compiler flag such as -fshort-enums would break it. */
#if defined(__cplusplus) && __cplusplus >= 201103L
#define KVX_ABI_ASSERT(condition) static_assert(condition, #condition)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define KVX_ABI_ASSERT(condition) _Static_assert(condition, #condition)
#else
#define KVX_ABI_ASSERT(condition) extern int kvx_abi_unchecked
#endif
#define KVX_ABI_AT(type, field, offset) KVX_ABI_ASSERT(offsetof(type, field) == (offset))

KVX_ABI_ASSERT(sizeof(void *) == 8);
KVX_ABI_ASSERT(sizeof(kvx_status_t) == 4 && sizeof(kvx_dtype_t) == 4);
KVX_ABI_ASSERT(sizeof(kvx_memory_type_t) == 4 && sizeof(kvx_layout_t) == 4);
KVX_ABI_ASSERT(sizeof(kvx_block_table_format_t) == 4 && sizeof(kvx_block_table_flags_t) == 4);
KVX_ABI_ASSERT(sizeof(kvx_scale_granularity_t) == 4);
KVX_ABI_ASSERT(KVX_STATUS_OK == 0 && KVX_STATUS_INVALID_ARGUMENT == 1);
KVX_ABI_ASSERT(KVX_STATUS_UNSUPPORTED == 2 && KVX_STATUS_OUT_OF_RANGE == 3);
KVX_ABI_ASSERT(KVX_STATUS_INCOMPATIBLE == 4 && KVX_STATUS_INTERNAL_ERROR == 5);
KVX_ABI_ASSERT(KVX_DTYPE_INVALID == 0 && KVX_DTYPE_F16 == 1);
KVX_ABI_ASSERT(KVX_DTYPE_BF16 == 2 && KVX_DTYPE_F32 == 3);
KVX_ABI_ASSERT(KVX_DTYPE_F8_E4M3 == 4 && KVX_DTYPE_F8_E5M2 == 5);
KVX_ABI_ASSERT(KVX_DTYPE_S32 == 6 && KVX_DTYPE_S64 == 7);
KVX_ABI_ASSERT(KVX_DTYPE_U32 == 8 && KVX_DTYPE_U64 == 9);
KVX_ABI_ASSERT(KVX_DTYPE_U8 == 10);
KVX_ABI_ASSERT(KVX_MEMORY_UNKNOWN == 0 && KVX_MEMORY_HOST == 1);
KVX_ABI_ASSERT(KVX_MEMORY_DEVICE == 2 && KVX_MEMORY_UNIFIED == 3);
KVX_ABI_ASSERT(KVX_LAYOUT_INVALID == 0 && KVX_LAYOUT_BLOCK_NHD == 1);
KVX_ABI_ASSERT(KVX_LAYOUT_BLOCK_HND == 2 && KVX_LAYOUT_BLOCK_HND_PACKED == 3);
KVX_ABI_ASSERT(KVX_LAYOUT_BLOCK_CUSTOM == 15);
KVX_ABI_ASSERT(KVX_BLOCK_TABLE_INVALID == 0 && KVX_BLOCK_TABLE_PACKED == 1);
KVX_ABI_ASSERT(KVX_BLOCK_TABLE_RAGGED == 2 && KVX_BLOCK_TABLE_KV_OFFSETS == 3);
KVX_ABI_ASSERT(KVX_BLOCK_TABLE_FLAG_NONE == 0 && KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX == 1);
KVX_ABI_ASSERT(KVX_SCALE_NONE == 0 && KVX_SCALE_PER_TENSOR == 1);
KVX_ABI_ASSERT(KVX_SCALE_PER_BLOCK == 2 && KVX_SCALE_PER_HEAD == 3);
KVX_ABI_ASSERT(KVX_SCALE_PER_BLOCK_HEAD == 4);
KVX_ABI_ASSERT(KVX_MAX_TENSOR_DIMS == 5);
KVX_ABI_ASSERT(sizeof(kvx_version_t) == 16);
KVX_ABI_AT(kvx_version_t, size, 0);
KVX_ABI_AT(kvx_version_t, abi_major, 4);
KVX_ABI_AT(kvx_version_t, abi_minor, 8);
KVX_ABI_AT(kvx_version_t, abi_patch, 12);
KVX_ABI_ASSERT(sizeof(kvx_tensor_desc_t) == 112);
KVX_ABI_AT(kvx_tensor_desc_t, size, 0);
KVX_ABI_AT(kvx_tensor_desc_t, dtype, 4);
KVX_ABI_AT(kvx_tensor_desc_t, layout, 8);
KVX_ABI_AT(kvx_tensor_desc_t, memory, 12);
KVX_ABI_AT(kvx_tensor_desc_t, ndim, 16);
KVX_ABI_AT(kvx_tensor_desc_t, shape, 24);
KVX_ABI_AT(kvx_tensor_desc_t, stride, 64);
KVX_ABI_AT(kvx_tensor_desc_t, data, 104);
KVX_ABI_ASSERT(sizeof(kvx_pool_desc_t) == 32);
KVX_ABI_AT(kvx_pool_desc_t, size, 0);
KVX_ABI_AT(kvx_pool_desc_t, memory, 4);
KVX_ABI_AT(kvx_pool_desc_t, bytes_per_block, 8);
KVX_ABI_AT(kvx_pool_desc_t, primary, 16);
KVX_ABI_AT(kvx_pool_desc_t, secondary, 24);
KVX_ABI_ASSERT(sizeof(kvx_cache_desc_t) == 280);
KVX_ABI_AT(kvx_cache_desc_t, size, 0);
KVX_ABI_AT(kvx_cache_desc_t, num_blocks, 4);
KVX_ABI_AT(kvx_cache_desc_t, block_size, 8);
KVX_ABI_AT(kvx_cache_desc_t, num_kv_heads, 12);
KVX_ABI_AT(kvx_cache_desc_t, head_dim, 16);
KVX_ABI_AT(kvx_cache_desc_t, k, 24);
KVX_ABI_AT(kvx_cache_desc_t, v, 136);
KVX_ABI_AT(kvx_cache_desc_t, pool, 248);
KVX_ABI_ASSERT(sizeof(kvx_block_table_t) == 64);
KVX_ABI_AT(kvx_block_table_t, size, 0);
KVX_ABI_AT(kvx_block_table_t, format, 4);
KVX_ABI_AT(kvx_block_table_t, index_dtype, 8);
KVX_ABI_AT(kvx_block_table_t, indptr_dtype, 12);
KVX_ABI_AT(kvx_block_table_t, seq_count, 16);
KVX_ABI_AT(kvx_block_table_t, beam_width, 20);
KVX_ABI_AT(kvx_block_table_t, max_blocks_per_seq, 24);
KVX_ABI_AT(kvx_block_table_t, indices, 32);
KVX_ABI_AT(kvx_block_table_t, indptr, 40);
KVX_ABI_AT(kvx_block_table_t, indices_count, 48);
KVX_ABI_AT(kvx_block_table_t, indptr_count, 52);
KVX_ABI_AT(kvx_block_table_t, flags, 56);
KVX_ABI_ASSERT(sizeof(kvx_slot_mapping_t) == 32);
KVX_ABI_AT(kvx_slot_mapping_t, size, 0);
KVX_ABI_AT(kvx_slot_mapping_t, dtype, 4);
KVX_ABI_AT(kvx_slot_mapping_t, token_count, 8);
KVX_ABI_AT(kvx_slot_mapping_t, invalid_slot, 16);
KVX_ABI_AT(kvx_slot_mapping_t, slots, 24);
KVX_ABI_ASSERT(sizeof(kvx_seq_lens_t) == 24);
KVX_ABI_AT(kvx_seq_lens_t, size, 0);
KVX_ABI_AT(kvx_seq_lens_t, dtype, 4);
KVX_ABI_AT(kvx_seq_lens_t, seq_count, 8);
KVX_ABI_AT(kvx_seq_lens_t, lengths, 16);
KVX_ABI_ASSERT(sizeof(kvx_kv_io_desc_t) == 248);
KVX_ABI_AT(kvx_kv_io_desc_t, size, 0);
KVX_ABI_AT(kvx_kv_io_desc_t, key, 8);
KVX_ABI_AT(kvx_kv_io_desc_t, value, 120);
KVX_ABI_AT(kvx_kv_io_desc_t, num_tokens, 232);
KVX_ABI_AT(kvx_kv_io_desc_t, num_kv_heads, 236);
KVX_ABI_AT(kvx_kv_io_desc_t, head_dim, 240);
KVX_ABI_ASSERT(sizeof(kvx_scale_desc_t) == 104);
KVX_ABI_AT(kvx_scale_desc_t, size, 0);
KVX_ABI_AT(kvx_scale_desc_t, dtype, 4);
KVX_ABI_AT(kvx_scale_desc_t, granularity, 8);
KVX_ABI_AT(kvx_scale_desc_t, ndim, 12);
KVX_ABI_AT(kvx_scale_desc_t, shape, 16);
KVX_ABI_AT(kvx_scale_desc_t, stride, 56);
KVX_ABI_AT(kvx_scale_desc_t, data, 96);
KVX_ABI_ASSERT(sizeof(kvx_write_desc_t) == 512);
KVX_ABI_AT(kvx_write_desc_t, size, 0);
KVX_ABI_AT(kvx_write_desc_t, io, 8);
KVX_ABI_AT(kvx_write_desc_t, slots, 256);
KVX_ABI_AT(kvx_write_desc_t, k_scale, 288);
KVX_ABI_AT(kvx_write_desc_t, v_scale, 296);
KVX_ABI_AT(kvx_write_desc_t, k_scale_desc, 304);
KVX_ABI_AT(kvx_write_desc_t, v_scale_desc, 408);
KVX_ABI_ASSERT(sizeof(kvx_gather_desc_t) == 352);
KVX_ABI_AT(kvx_gather_desc_t, size, 0);
KVX_ABI_AT(kvx_gather_desc_t, io, 8);
KVX_ABI_AT(kvx_gather_desc_t, block_table, 256);
KVX_ABI_AT(kvx_gather_desc_t, seq_lens, 320);
KVX_ABI_AT(kvx_gather_desc_t, max_seq_len, 344);

#ifdef __cplusplus
}
#endif
#endif
