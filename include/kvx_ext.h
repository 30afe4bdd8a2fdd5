// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_ext.h: extensions of libkvx beyond KVX v1.1. The rules of kvx_abi.h hold here too.
 *
 * Every struct starts with its size, set by the caller. A larger (newer) struct is accepted. Fields
 * that a smaller kvx_options_t lacks count as zero; every other struct must have its full size.
 * Zero always means the default.
 */
#ifndef KVX_EXT_H
#define KVX_EXT_H

#include "kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Write and gather with options, for many layers at once.
 */

/** Phase of inference that a call belongs to. A hint: it may change speed, never results. */
typedef enum kvx_phase {
    KVX_PHASE_AUTO = 0,
    KVX_PHASE_PREFILL = 1, /* many consecutive tokens; don't keep them in caches */
    KVX_PHASE_DECODE = 2,  /* few tokens, read again soon */
    KVX_PHASE_TRANSFER = 3 /* blocks between device and host memory, beside other work: use few of
                              the device's processors */
} kvx_phase_t;

/** gather: fill rows beyond a sequence's length, and rows of null blocks, with zero bits. */
#define KVX_OPTION_ZERO_PADDING (UINT32_C(1) << 0)
/** HOST calls leave out indices out of range and count them, as calls on device memory do. */
#define KVX_OPTION_DROP_OUT_OF_RANGE (UINT32_C(1) << 1)

typedef struct kvx_options {
    uint32_t size;  /* sizeof(kvx_options_t) */
    uint32_t flags; /* KVX_OPTION_...; an unknown one is INVALID_ARGUMENT */
    kvx_phase_t phase;
    uint32_t reserved; /* 0 */
    /**
     * NULL, or a counter to which every token (block, for a copy) left out because its index was
     * out of range is added; layers of one size that follow each other with the same slots or table
     * count it once. It lies where the cache lies and is added to atomically, so calls on the host,
     * or on one device, may share it; on device memory it is complete when the stream is.
     */
    uint64_t *dropped;
    /** KV_OFFSETS: number of K or V blocks in each pool; an index beyond it is out of range. 0: not
     * known. */
    uint64_t primary_blocks;
    uint64_t secondary_blocks;
    /** gather from an FP8 cache: value = stored * scale. NULL: no scale. One per layer. */
    const kvx_scale_desc_t *const *k_scales;
    const kvx_scale_desc_t *const *v_scales;
} kvx_options_t;

/**
 * kvx_write_kv for @n_layers caches in one call: caches[i] gets writes[i]. All are checked before
 * the first is written. Layers that have the same geometry and the same slots (which is usual) are
 * moved together, in one launch on a device. @options may be NULL. n_layers = 0 is OK.
 */
KVX_API kvx_status_t kvx_write_kv_layers(const kvx_cache_desc_t *const *caches,
                                         const kvx_write_desc_t *const *writes, uint32_t n_layers,
                                         const kvx_options_t *options, void *stream);

/**
 * kvx_gather_kv for @n_layers caches in one call: gathers[i] is filled from caches[i]. All are
 * checked before the first is filled. @options may be NULL. n_layers = 0 is OK.
 */
KVX_API kvx_status_t kvx_gather_kv_layers(const kvx_cache_desc_t *const *caches,
                                          const kvx_gather_desc_t *const *gathers,
                                          uint32_t n_layers, const kvx_options_t *options,
                                          void *stream);

/* ---------------------------------------------------------------------------------------------
 * Blocks from cache to cache.
 */

/**
 * Pairs of blocks. Layouts, strides and dtypes of the two caches may differ, block_size and
 * head_dim may not. num_kv_heads may differ when a range of heads is given (moving between
 * tensor-parallel degrees).
 */
typedef struct kvx_block_copy {
    uint32_t size;           /* sizeof(kvx_block_copy_t) */
    kvx_dtype_t index_dtype; /* S32 or S64 */
    uint32_t count;          /* pairs */
    uint32_t src_head;       /* first head to read */
    uint32_t dst_head;       /* first head to write */
    uint32_t num_heads;      /* 0: all, which then must be equally many */
    const void *src_blocks;  /* block ids of the source; a negative one skips the pair */
    const void *dst_blocks;  /* block ids of the target, each at most once */
    /**
     * Scales of FP8 caches, NULL: none. With none at all, equal dtypes are copied bit by bit (and
     * the scales, if there are any, are the caller's to copy). Otherwise stored = saturate(source *
     * src_scale / dst_scale).
     */
    const kvx_scale_desc_t *src_k_scale, *src_v_scale;
    const kvx_scale_desc_t *dst_k_scale, *dst_v_scale;
} kvx_block_copy_t;

/**
 * Copy blocks of @src to blocks of @dst. Both on HOST, or both device-accessible; otherwise
 * UNSUPPORTED. The two may be one cache, described alike, when no target block is a source block of
 * another pair (or it isn't defined which of its contents is read) and the head ranges are equal or
 * apart; caches that overlap in any other way are INVALID_ARGUMENT. Of the options, flags and
 * dropped count. Indices out of range: as in kvx_write_kv.
 */
KVX_API kvx_status_t kvx_copy_blocks(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                                     const kvx_block_copy_t *copy, const kvx_options_t *options,
                                     void *stream);

/**
 * kvx_copy_blocks for @n_layers pairs of caches in one call: copies[i] moves blocks of srcs[i] to
 * dsts[i]. All are checked before the first block is moved. Layers of the same geometry whose copies
 * name the same arrays of blocks are moved together, in one launch on a device. Layers are moved in
 * any order and at the same time, so no layer may write what another one reads or writes; this isn't
 * checked. n_layers = 0 is OK.
 */
KVX_API kvx_status_t kvx_copy_blocks_layers(const kvx_cache_desc_t *const *srcs,
                                            const kvx_cache_desc_t *const *dsts,
                                            const kvx_block_copy_t *const *copies,
                                            uint32_t n_layers, const kvx_options_t *options,
                                            void *stream);

/* ---------------------------------------------------------------------------------------------
 * The process: threads and messages.
 */

/** More threads than this are never used. */
#define KVX_MAX_THREADS 256

/**
 * Let calls on HOST memory that move at least @min_bytes (read + written; 0: 1 MiB) use up to
 * @n_threads threads, the caller's included. The default is 1: the library starts no thread of its
 * own until asked. Helpers are started when first needed, sleep in between, and are shared by all
 * callers; a call that finds them busy does its work alone. Lowering the number ends helpers that
 * are too many. INVALID_ARGUMENT for 0 or more than KVX_MAX_THREADS. Thread-safe. After fork() the
 * child starts anew.
 */
KVX_API kvx_status_t kvx_set_threads(uint32_t n_threads, uint64_t min_bytes);

/** Number of threads that kvx_set_threads allowed; 1 by default. Thread-safe. */
KVX_API uint32_t kvx_get_threads(void);

/** Name of the instruction set that moves HOST memory: "avx512", "avx2", "neon" or "scalar". */
KVX_API const char *kvx_host_isa(void);

/**
 * Receives each log line of the library, without newline. @level: 0 error, 1 warning, 2 info,
 * 3 debug. The function must not call the library. The same type as kv_log_fn of kv_types.h.
 */
typedef void (*kvx_log_fn)(void *arg, int level, const char *line);

/** Send log lines to @fn; NULL sends them to standard error, the default. Thread-safe. */
KVX_API void kvx_set_log(kvx_log_fn fn, void *arg);

/** Name of @status: "OK", "INVALID_ARGUMENT", ...; "UNKNOWN" for any other number. */
KVX_API const char *kvx_status_name(kvx_status_t status);

/* ---------------------------------------------------------------------------------------------
 * From a framework's tensors to a descriptor.
 */

/**
 * Describe a DLPack tensor (@dl_tensor is a DLTensor *, of any DLPack version up to 1.x; it is
 * read, not kept). @layout and the tensor's own shape, strides and device go to @ret. kDLCPU and
 * kDLCUDAHost become HOST, kDLCUDA DEVICE, kDLCUDAManaged UNIFIED. INVALID_ARGUMENT for NULL, more
 * than five dimensions, or lanes; UNSUPPORTED for other devices and element types. @ret is written
 * on OK only.
 */
KVX_API kvx_status_t kvx_tensor_from_dlpack(const void *dl_tensor, kvx_layout_t layout,
                                            kvx_tensor_desc_t *ret);

/** How engines keep K and V. Shapes as the engine's tensors have them; any strides. */
typedef enum kvx_engine_layout {
    KVX_ENGINE_NONE = 0,
    /** vLLM, K and V in one tensor [2, blocks, block_size, heads, dim] */
    KVX_ENGINE_VLLM_KV_FIRST = 1,
    /** vLLM and FlashInfer, one tensor [blocks, 2, block_size, heads, dim] */
    KVX_ENGINE_VLLM_BLOCKS_FIRST = 2,
    /** vLLM, one tensor [blocks, heads, block_size, 2 * dim]: V lies after K in each row */
    KVX_ENGINE_VLLM_PACKED = 3,
    /** FlashInfer in HND order, one tensor [blocks, 2, heads, block_size, dim] */
    KVX_ENGINE_FLASHINFER_HND = 4,
    /** TGI flashinfer and flashdecoding, SGLang: K and V each [blocks, block_size, heads, dim] */
    KVX_ENGINE_SPLIT_NHD = 5,
    /** TGI on CPU (IPEX): K and V each [blocks, heads, block_size, dim] */
    KVX_ENGINE_SPLIT_HND = 6,
    /** TGI paged, vLLM paged: K [blocks, heads, dim/x, block_size, x], V [blocks, heads, dim,
       block_size] */
    KVX_ENGINE_PAGED = 7
} kvx_engine_layout_t;

/**
 * Describe an engine's cache. @kv is the one tensor, or K; @v is V where they are two, NULL
 * otherwise.
 * @dtype replaces the tensors' own when they are U8 (engines keep FP8 as bytes); INVALID keeps it.
 * Only shape, stride, ndim, dtype, memory and data of the tensors are read. The result has passed
 * kvx_validate_cache_desc, or the status says why not; @ret is written on OK only.
 *
 * HND in vLLM is NHD with permuted strides: describe it as NHD, the strides carry the order.
 */
KVX_API kvx_status_t kvx_cache_from_engine(kvx_engine_layout_t engine, const kvx_tensor_desc_t *kv,
                                           const kvx_tensor_desc_t *v, kvx_dtype_t dtype,
                                           kvx_cache_desc_t *ret);

/** TensorRT-LLM: pools of K or V blocks [heads, tokens_per_block, dim], addressed by KVCacheIndex.
 */
typedef struct kvx_trtllm_pools {
    uint32_t size; /* sizeof(kvx_trtllm_pools_t) */
    kvx_memory_type_t memory;
    kvx_dtype_t dtype;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t tokens_per_block; /* a power of two */
    uint32_t num_blocks;       /* of the primary pool, K and V blocks counted separately; 0: 1 */
    uint32_t reserved;         /* 0 */
    void *primary;             /* of the layer */
    void *secondary;           /* NULL: none */
} kvx_trtllm_pools_t;

/** Describe @pools as a cache, for gathers through a KV_OFFSETS table. Writes @ret on OK only. */
KVX_API kvx_status_t kvx_cache_from_trtllm(const kvx_trtllm_pools_t *pools, kvx_cache_desc_t *ret);

/**
 * Fill a KV_OFFSETS block table for @indices [seq_count, beam_width, 2, max_blocks_per_seq].
 * INVALID_ARGUMENT when a number is 0 or the product doesn't fit.
 */
KVX_API kvx_status_t kvx_table_from_trtllm(const void *indices, uint32_t seq_count,
                                           uint32_t beam_width, uint32_t max_blocks_per_seq,
                                           kvx_block_table_t *ret);

/** Bytes of one element, 0 for an invalid dtype. */
KVX_API uint32_t kvx_dtype_size(kvx_dtype_t dtype);

/** Fill @ret with the canonical (contiguous) shape and strides; @pack is for HND_PACKED only. */
KVX_API kvx_status_t kvx_tensor_canonical(const kvx_cache_desc_t *cache, kvx_layout_t layout,
                                          uint32_t pack, kvx_tensor_desc_t *ret);

#ifdef __cplusplus
}
#endif
#endif
