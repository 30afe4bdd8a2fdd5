// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_layout.h: where the bytes of blocks lie. Layouts (arithmetic) over storages (memory).
 *
 * A block is [layer][outer][page][inner]: num_layers layers; outer 2 (K and V) or 1 (one tensor for
 * both, as MLA has); page_size tokens; inner_dim elements a token (heads * head_dim). A region is
 * one (block, layer, outer), and always contiguous:
 *
 *   region        = page_size * inner_dim * dtype_width
 *
 *   KVBM_FULLY_CONTIGUOUS: one storage, [block][layer][outer]
 *     outer_stride = region,  layer_stride = region * outer_dim
 *     natural      = num_layers * layer_stride
 *     block_stride = align_up(natural, alignment)
 *     data bytes   = (num_blocks - 1) * block_stride + natural          (the last isn't padded)
 *
 *   KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS: a storage per layer, [outer][block]
 *     block_stride = align_up(region, alignment),  outer_stride = block_stride * num_blocks
 *     data bytes   = outer_stride * outer_dim                            (of each layer)
 *
 *   KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS: a storage per layer, [block][outer]
 *     outer_stride = region,  block_stride = align_up(region * outer_dim, alignment)
 *     data bytes   = block_stride * num_blocks
 *
 *   address(block, layer, outer) = storage address aligned up to alignment
 *                                  + block * block_stride + layer * layer_stride + outer *
 *                                  outer_stride
 *
 * A storage must hold data bytes from its aligned address on; data bytes + alignment - 1 always
 * suffice.
 *
 * Errors are negative errno values, with the reason in the log; a failing call changes nothing. A
 * NULL pointer that must not be NULL is -EINVAL; a function without an error value does nothing and
 * returns 0 or NULL. Threads: any function from any thread; nothing may use an object while another
 * thread destroys it.
 */
#ifndef KVBM_LAYOUT_H
#define KVBM_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Storages.
 */

/** Kinds of storage. The numbers are stable (serialised layouts). */
enum kvbm_storage_kind {
    KVBM_STORAGE_SYSTEM = 1,   /* anonymous memory of this process */
    KVBM_STORAGE_PINNED = 2,   /* page-locked host memory that the GPU reads (needs CUDA) */
    KVBM_STORAGE_DEVICE = 3,   /* GPU memory (needs CUDA); addresses aren't the CPU's */
    KVBM_STORAGE_DISK = 4,     /* a file; addresses are offsets in it */
    KVBM_STORAGE_EXTERNAL = 5, /* memory that the caller owns: an engine's tensors */
    KVBM_STORAGE_NULL = 6      /* addresses without memory, for tests and dry runs */
};

/** A piece of memory or a file. Any thread; registrations take a lock. */
struct kvbm_storage;

/** Options of a storage; set size to sizeof(struct kvbm_storage_opts), zero means the default. */
struct kvbm_storage_opts {
    size_t size;
    enum kvbm_storage_kind kind; /* required */
    uint64_t bytes;              /* required, 1 to 2^62 */
    /* SYSTEM, PINNED: */
    bool huge_pages; /* ask for transparent huge pages; a refusal is no error */
    bool use_numa;   /* place the memory on numa_node; -ENODEV when there is no such node */
    uint32_t numa_node;
    uint32_t touch_threads; /* threads that touch every page before create returns; 0: none */
    /* DEVICE, and EXTERNAL memory of a device: */
    uint32_t device_id;
    /* EXTERNAL: */
    void *memory;              /* not NULL, at least bytes long, outlives the storage */
    enum kvbm_storage_kind of; /* kind of that memory: SYSTEM (also for 0), PINNED or DEVICE */
    /* DISK: */
    const char *path;      /* file to use, created when absent; NULL: a nameless one in directory */
    const char *directory; /* NULL: $KVBM_DISK_DIR, $TMPDIR or /tmp */
    bool direct;           /* O_DIRECT; without it (logged) where the file system refuses it */
    bool keep;             /* leave the file at path when the storage is destroyed */
};
#define KVBM_STORAGE_OPTS_INIT KV_INIT_(kvbm_storage_opts)

/**
 * Create a storage. The caller owns *@ret and frees it with kvbm_storage_destroy.
 *
 * Memory is zeroed. A new file reads as zeros and has its blocks reserved (fallocate). Where the
 * file system can't reserve, the file is sparse, which is logged. A file has one storage at a time,
 * so a layout of several storages needs nameless files, or an allocator for each. On failure a file
 * is unchanged. Returns 0, or
 *   -EINVAL  invalid options
 *   -ENOMEM  more than the machine, the cgroup or the NUMA node has left; memory is not
 *            over-committed
 *   -ENOSPC, -EFBIG  the file system can't hold the file
 *   -ENODEV  no CUDA, no such device, or no such NUMA node
 *   -EBUSY   another storage, of any process, uses the file
 *   -EIO and other errors of the system
 */
KV_API int kvbm_storage_create(const struct kvbm_storage_opts *opts, struct kvbm_storage **ret);

/** Release registrations, last registered first, then the memory. NULL is a no-op. */
KV_API void kvbm_storage_destroy(struct kvbm_storage *storage);

/** Return the kind of a storage. */
KV_API enum kvbm_storage_kind kvbm_storage_get_kind(const struct kvbm_storage *storage);

/** Return the length of a storage in bytes. */
KV_API uint64_t kvbm_storage_bytes(const struct kvbm_storage *storage);

/** Return the address of memory; 0 for a file; a made-up number for KVBM_STORAGE_NULL. */
KV_API uint64_t kvbm_storage_addr(const struct kvbm_storage *storage);

/** Return the GPU of device memory, the file descriptor of a file, else 0. */
KV_API uint64_t kvbm_storage_device_id(const struct kvbm_storage *storage);

/** Return the memory of a storage that the CPU may access; NULL for other kinds. */
KV_API void *kvbm_storage_host_memory(const struct kvbm_storage *storage);

/**
 * Copy @len bytes at @offset of a storage of any kind to host memory. Blocks; for tests and small
 * copies. Returns 0; -ERANGE; -ENXIO (KVBM_STORAGE_NULL); -EIO and other errors of the system.
 */
KV_API int kvbm_storage_read(const struct kvbm_storage *storage, uint64_t offset, void *to,
                             size_t len);

/**
 * Copy @len bytes of host memory to @offset of a storage of any kind. Blocks; for tests and small
 * copies. Returns 0; -ERANGE; -ENXIO (KVBM_STORAGE_NULL); -EIO and other errors of the system.
 */
KV_API int kvbm_storage_write(struct kvbm_storage *storage, uint64_t offset, const void *from,
                              size_t len);

/**
 * Tie a resource to the storage that must be released before its memory, such as an RDMA or a CUDA
 * host registration. release(@arg) is called once, by unregister or destroy. Returns 0; -EEXIST
 * (@name is registered); -ENOMEM.
 */
KV_API int kvbm_storage_register(struct kvbm_storage *storage, const char *name,
                                 void (*release)(void *arg), void *arg);
/** Return the arg of a registration; NULL when @name is not registered. */
KV_API void *kvbm_storage_registration(const struct kvbm_storage *storage, const char *name);

/** Release a registration now. Returns 0; -ENOENT (@name is not registered). */
KV_API int kvbm_storage_unregister(struct kvbm_storage *storage, const char *name);

/**
 * Source of storages for layouts. An engine with its own arena passes its own function.
 */
struct kvbm_allocator {
    size_t size;
    int (*allocate)(void *arg, uint64_t bytes, struct kvbm_storage **ret);
    void *arg;
};
#define KVBM_ALLOCATOR_INIT KV_INIT_(kvbm_allocator)

/**
 * Return an allocator that creates storages with *@opts and the requested bytes. @opts must outlive
 * the allocator.
 */
KV_API struct kvbm_allocator kvbm_allocator_of(const struct kvbm_storage_opts *opts);

/* ---------------------------------------------------------------------------------------------
 * Layouts.
 */

/** Largest num_layers. */
#define KVBM_MAX_LAYERS 65536

/** Kinds of layout; the formulas are above. The numbers are stable (serialised layouts). */
enum kvbm_layout_kind {
    KVBM_FULLY_CONTIGUOUS = 1,
    KVBM_LAYER_SEPARATE = 2, /* one of the two below, decided from tensor_shape */
    KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS = 3,
    KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS = 4
};

/** Order of the elements of a region. Copies between layouts of different order convert. */
enum kvbm_block_order {
    KVBM_ORDER_NHD = 0, /* [page][head][head_dim] */
    KVBM_ORDER_HND = 1  /* [head][page][head_dim] */
};

/** Config of a layout; set size to sizeof(struct kvbm_layout_config). */
struct kvbm_layout_config {
    size_t size;
    enum kvbm_layout_kind kind;  /* required */
    uint64_t num_blocks;         /* >= 1 */
    uint32_t num_layers;         /* 1 to KVBM_MAX_LAYERS */
    uint32_t outer_dim;          /* 1 or 2 */
    uint32_t page_size;          /* tokens per block: a power of two */
    uint32_t inner_dim;          /* elements per token: num_heads * head_dim */
    uint32_t dtype_width_bytes;  /* 1, 2, 4 or 8; 0: 2 */
    uint32_t alignment;          /* of blocks in bytes, a power of two; 0: 1 */
    uint32_t num_heads;          /* a divisor of inner_dim; 0: unknown */
    kvx_dtype_t dtype;           /* of width dtype_width_bytes; 0: unknown */
    enum kvbm_block_order order; /* HND needs num_heads */
    /**
     * LAYER_SEPARATE: the first two extents of the engine's tensor of a layer. They tell [blocks,
     * outer, ...] (shape[0] >= num_blocks) from [outer, blocks, ...] (shape[1] == num_blocks: V
     * begins behind all K blocks). 0, 0: unknown.
     *
     * A shape that is neither, or could be both, is refused. So is a shape that contradicts one of
     * the two explicit kinds: both have the same length, and the wrong one would corrupt silently.
     * With outer_dim 1, [blocks, page, ...] counts as [blocks, outer, ...].
     */
    uint64_t tensor_shape[2];
};
#define KVBM_LAYOUT_CONFIG_INIT KV_INIT_(kvbm_layout_config)

/** Sizes and strides of a config, without memory. */
struct kvbm_layout_shape {
    enum kvbm_layout_kind kind; /* resolved: not LAYER_SEPARATE */
    uint32_t n_storages;        /* 1 or num_layers */
    uint64_t region_bytes;
    uint64_t outer_stride, layer_stride, block_stride; /* bytes; layer_stride 0 when separate */
    uint64_t natural_block_bytes;                      /* one block without padding, all layers */
    uint64_t data_bytes;     /* of each storage, from its aligned address */
    uint64_t required_bytes; /* data_bytes + alignment - 1 */
};

/**
 * Compute sizes and strides of a config. Returns 0; -EINVAL (a contradiction, logged); -EOVERFLOW
 * (beyond 2^62 bytes).
 */
KV_API int kvbm_layout_compute(const struct kvbm_layout_config *config,
                               struct kvbm_layout_shape *ret);

/** A layout over its storages. Immutable after creation: any thread. */
struct kvbm_layout;

/**
 * Create a layout over @n storages (n_storages of the shape, all of one kind and device). The
 * caller keeps the storages, which must outlive the layout; it frees *@ret with
 * kvbm_layout_destroy. Returns 0; -EINVAL (config, number of storages, or one too small);
 * -EOVERFLOW; -ENOMEM.
 */
KV_API int kvbm_layout_create(const struct kvbm_layout_config *config,
                              struct kvbm_storage *const *storages, size_t n,
                              struct kvbm_layout **ret);

/**
 * Create a layout over storages that @allocator provides. The layout owns the storages; the caller
 * frees *@ret with kvbm_layout_destroy. Returns 0; -EINVAL; -EOVERFLOW; -ENOMEM; an error of the
 * allocator.
 */
KV_API int kvbm_layout_allocate(const struct kvbm_layout_config *config,
                                const struct kvbm_allocator *allocator, struct kvbm_layout **ret);

/** Free a layout and the storages that it owns. NULL is a no-op. */
KV_API void kvbm_layout_destroy(struct kvbm_layout *layout);

/** Return the config of a layout, with defaults filled in. The layout owns it. */
KV_API const struct kvbm_layout_config *kvbm_layout_get_config(const struct kvbm_layout *layout);

/** Return sizes and strides of a layout. The layout owns them. */
KV_API const struct kvbm_layout_shape *kvbm_layout_get_shape(const struct kvbm_layout *layout);

/**
 * Return the storage of a layer (the only one when fully contiguous). NULL: no such layer, or a
 * deserialised layout.
 */
KV_API struct kvbm_storage *kvbm_layout_storage(const struct kvbm_layout *layout, uint32_t layer);

/** A contiguous run of bytes. */
struct kvbm_view {
    uint64_t addr; /* file offset on disk */
    uint64_t len;
    enum kvbm_storage_kind kind;
    uint64_t device_id;
    uint32_t storage; /* number of the layout's storage */
};

/** Locate one region. Returns 0; -ERANGE (no such block, layer or outer; logged). */
KV_API int kvbm_layout_region(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                              uint32_t outer, struct kvbm_view *ret);

/**
 * Locate all outers of a layer of a block. Returns 0; -ERANGE; -ENOTSUP when they aren't contiguous
 * (outer-contiguous, outer_dim 2).
 */
KV_API int kvbm_layout_layer(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                             struct kvbm_view *ret);

/**
 * Locate a whole block without padding. Returns 0; -ERANGE; -ENOTSUP unless the layout is fully
 * contiguous or has one region a block.
 */
KV_API int kvbm_layout_block(const struct kvbm_layout *layout, uint64_t block,
                             struct kvbm_view *ret);

/**
 * Describe a layer as a KVX cache, as engines' kernels and kvx_copy_blocks take it. K is outer 0, V
 * is outer 1. With outer_dim 1 both are outer 0; a write then gives one tensor for key and value.
 * Returns 0, or
 *   -EINVAL   num_heads or dtype is unknown, or the layout is not in memory of this process
 *   -ERANGE   no such layer
 *   -ENOTSUP  KVX can't describe it: strides, integer elements, elements not aligned to their width
 */
KV_API int kvbm_layout_to_kvx(const struct kvbm_layout *layout, uint32_t layer,
                              kvx_cache_desc_t *ret);

/**
 * Create a layout over an engine's tensors, described layer by layer as KVX caches. The layout owns
 * the EXTERNAL storages that it creates; the engine keeps the memory, which must outlive the
 * layout.
 *
 * UNIFIED memory counts as the host's. KVX doesn't name the device of DEVICE memory: device 0 is
 * assumed. Returns 0; -EINVAL (layers differ in more than their addresses); -ENOTSUP (strides that
 * no layout kind has, or addresses of layers not aligned alike); -ENOMEM.
 */
KV_API int kvbm_layout_from_kvx(const kvx_cache_desc_t *const *layers, uint32_t num_layers,
                                struct kvbm_layout **ret);

/**
 * Serialise a layout for another process or machine: config, addresses, memory kinds
 * (docs/formats.md, "Layouts"). *@needed (may be NULL) becomes the length. Returns the length;
 * -ENOSPC (@cap is less).
 */
KV_API long kvbm_layout_serialise(const struct kvbm_layout *layout, void *to, size_t cap,
                                  size_t *needed);

/**
 * Create a layout from its serialised form: the same addresses, without storages in this process
 * (kvbm_layout_storage returns NULL). The caller frees *@ret with kvbm_layout_destroy. Returns 0;
 * -EPROTO (not a layout, cut short, wrong checksum, contradictions); -EPROTONOSUPPORT (a newer
 * version); -ENOMEM.
 */
KV_API int kvbm_layout_deserialise(const void *data, size_t len, struct kvbm_layout **ret);

#ifdef __cplusplus
}
#endif
#endif
