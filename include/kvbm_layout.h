// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_layout.h: where the bytes of a block lie. Layouts (arithmetic) over storages (memory).
 *
 * A block is [layer][outer][page][inner]: num_layers layers; outer 2 (K and V) or 1 (one tensor for
 * both, as MLA has); page_size tokens; inner_dim elements a token (heads * head_dim). What is
 * contiguous is a region, one (block, layer, outer):
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
 *                                  + block * block_stride + layer * layer_stride + outer * outer_stride
 *
 * A storage must hold data bytes from its aligned address on: data bytes + alignment - 1 always do.
 *
 * Errors are negative errno values, and the reason goes to the log; a failing call changes nothing. A NULL
 * where there must be something is -EINVAL, or, where no error can be returned, 0 or NULL and nothing done.
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

enum kvbm_storage_kind {
    KVBM_STORAGE_SYSTEM = 1,   /* anonymous memory of this process */
    KVBM_STORAGE_PINNED = 2,   /* page-locked host memory that the GPU reads (needs CUDA) */
    KVBM_STORAGE_DEVICE = 3,   /* GPU memory (needs CUDA); addresses aren't the CPU's */
    KVBM_STORAGE_DISK = 4,     /* a file; addresses are offsets in it */
    KVBM_STORAGE_EXTERNAL = 5, /* memory that somebody else owns: an engine's tensors */
    KVBM_STORAGE_NULL = 6      /* addresses without memory, for tests and dry runs */
};
KV_API const char *kvbm_storage_kind_name(enum kvbm_storage_kind kind);

/** A piece of memory or a file. Threads: any, for reading; registrations take a lock. */
struct kvbm_storage;

struct kvbm_storage_opts {
    size_t size;
    enum kvbm_storage_kind kind; /* required */
    uint64_t bytes;              /* required, 1 to 2^62 */
    /* SYSTEM, PINNED: */
    bool huge_pages; /* ask for transparent huge pages; a refusal is no error */
    bool use_numa;   /* place it on numa_node: -ENODEV when there is none such */
    uint32_t numa_node;
    uint32_t touch_threads; /* touch every page before returning, with so many threads; 0: don't */
    /* DEVICE, and EXTERNAL memory of a device: */
    uint32_t device_id;
    /* EXTERNAL: */
    void *memory;              /* not NULL, at least bytes large, outlives the storage */
    enum kvbm_storage_kind of; /* what it is: SYSTEM (also for 0), PINNED or DEVICE */
    /* DISK: */
    const char *path;      /* file to use, created when absent; NULL: a nameless one in directory */
    const char *directory; /* NULL: $KVBM_DISK_DIR, $TMPDIR or /tmp */
    bool direct;           /* O_DIRECT; where the file system refuses it, without (and logged) */
    bool keep;             /* path is left there when the storage is destroyed */
};

/**
 * Memory comes zeroed, a new file reads as zeros and has its blocks reserved (fallocate; where a file
 * system can't, the file is sparse and that is logged). A file has one storage at a time, so layouts of
 * several storages want one allocator each or nameless files. On failure a file is as it was.
 * Returns 0; -EINVAL; -ENOMEM (more than the machine, the cgroup, or the NUMA node has left), -ENOSPC, -EFBIG
 * (never a crash: nothing is over-committed knowingly); -ENODEV without CUDA, the device or the NUMA node; -EBUSY (the file is
 * another storage's, of any process); -EIO and others.
 */
KV_API int kvbm_storage_create(const struct kvbm_storage_opts *opts, struct kvbm_storage **ret);

/** Release registrations, last registered first, then the memory. NULL is a no-op. */
KV_API void kvbm_storage_destroy(struct kvbm_storage *storage);

KV_API enum kvbm_storage_kind kvbm_storage_get_kind(const struct kvbm_storage *storage);
KV_API uint64_t kvbm_storage_bytes(const struct kvbm_storage *storage);
/** Its address: of memory; 0 for a file; some number for NULL. */
KV_API uint64_t kvbm_storage_addr(const struct kvbm_storage *storage);
/** GPU of device memory, file descriptor of a file, else 0. */
KV_API uint64_t kvbm_storage_device_id(const struct kvbm_storage *storage);
/** The same as a pointer, when the CPU may use it; else NULL. */
KV_API void *kvbm_storage_host_memory(const struct kvbm_storage *storage);

/** Copy between a storage of any kind and host memory; for tests and small things. Blocks.
 * Returns 0, -ERANGE, -ENXIO (NULL), -EIO... */
KV_API int kvbm_storage_read(const struct kvbm_storage *storage, uint64_t offset, void *to,
                             size_t len);
KV_API int kvbm_storage_write(struct kvbm_storage *storage, uint64_t offset, const void *from,
                              size_t len);

/**
 * Tie something that must go before the memory goes (an RDMA registration, a CUDA host registration)
 * to the storage under @name; release(@arg) is called once, at unregister or destroy.
 * Returns 0, -EEXIST, -ENOMEM.
 */
KV_API int kvbm_storage_register(struct kvbm_storage *storage, const char *name,
                                 void (*release)(void *arg), void *arg);
/** The registration's arg, or NULL. */
KV_API void *kvbm_storage_registration(const struct kvbm_storage *storage, const char *name);
/** Release it now. Returns 0 or -ENOENT. */
KV_API int kvbm_storage_unregister(struct kvbm_storage *storage, const char *name);

/**
 * Where storages come from. A layout asks for what it needs; an engine that has its own arena hands in
 * its own functions.
 */
struct kvbm_allocator {
    size_t size;
    int (*allocate)(void *arg, uint64_t bytes, struct kvbm_storage **ret);
    void *arg;
};

/** allocate() that creates storages like *@opts, bytes apart; @opts must outlive the allocator. */
KV_API struct kvbm_allocator kvbm_allocator_of(const struct kvbm_storage_opts *opts);

/* ---------------------------------------------------------------------------------------------
 * Layouts.
 */

#define KVBM_MAX_LAYERS 65536

enum kvbm_layout_kind {
    KVBM_FULLY_CONTIGUOUS = 1,
    KVBM_LAYER_SEPARATE = 2, /* which of the two below: told from tensor_shape */
    KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS = 3,
    KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS = 4
};

/** "fully_contiguous", "layer_separate", "layer_separate_outer_contiguous", "..._block_contiguous". */
KV_API const char *kvbm_layout_kind_name(enum kvbm_layout_kind kind);
/** The same from text, '_' and '-' and case not counting. Returns 0 or -EINVAL. */
KV_API int kvbm_layout_kind_parse(const char *text, enum kvbm_layout_kind *ret);

/** How the elements of a region lie; what conversion between tiers needs to know. */
enum kvbm_block_order {
    KVBM_ORDER_NHD = 0, /* [page][head][head_dim] */
    KVBM_ORDER_HND = 1  /* [head][page][head_dim] */
};

struct kvbm_layout_config {
    size_t size;
    enum kvbm_layout_kind kind;  /* required */
    uint64_t num_blocks;         /* >= 1 */
    uint32_t num_layers;         /* 1 to KVBM_MAX_LAYERS */
    uint32_t outer_dim;          /* 1 or 2 */
    uint32_t page_size;          /* tokens per block: a power of two */
    uint32_t inner_dim;          /* elements per token: num_heads * head_dim */
    uint32_t dtype_width_bytes;  /* 1, 2, 4 or 8; 0: 2 */
    uint32_t alignment;          /* of blocks, a power of two; 0: 1 */
    uint32_t num_heads;          /* 0: not known; else it divides inner_dim */
    kvx_dtype_t dtype;           /* 0: not known; else its width is dtype_width_bytes */
    enum kvbm_block_order order; /* HND needs num_heads */
    /**
     * LAYER_SEPARATE: the first two extents of the engine's tensor of a layer, to tell
     * [blocks, outer, ...] (shape[0] >= num_blocks) from [outer, blocks, ...] (shape[1] == num_blocks:
     * V begins behind all of the tensor's blocks). What is neither, or could be both, is refused, and
     * with one of the two kinds given a shape that says the other: both are equally large, and to
     * mistake them would corrupt silently. With outer_dim 1 [blocks, page, ...] is the former, too.
     * 0, 0: not known.
     */
    uint64_t tensor_shape[2];
};

/** The arithmetic of a config, without memory. */
struct kvbm_layout_shape {
    enum kvbm_layout_kind kind; /* resolved */
    uint32_t n_storages;        /* 1 or num_layers */
    uint64_t region_bytes;
    uint64_t outer_stride, layer_stride, block_stride; /* bytes; layer_stride 0 when separate */
    uint64_t natural_block_bytes;                      /* one block without padding, all layers */
    uint64_t data_bytes;     /* of each storage, from its aligned address */
    uint64_t required_bytes; /* data_bytes + alignment - 1 */
};

/** Returns 0; -EINVAL (a contradiction, with its reason in the log); -EOVERFLOW (beyond 2^62). */
KV_API int kvbm_layout_compute(const struct kvbm_layout_config *config,
                               struct kvbm_layout_shape *ret);

/** A layout over its storages. Immutable after creation; any thread. */
struct kvbm_layout;

/**
 * Over @n storages that the caller keeps (n_storages of the shape, all of one kind and device), or
 * that the allocator provides and the layout then owns. -EINVAL also when a storage is too small.
 */
KV_API int kvbm_layout_create(const struct kvbm_layout_config *config,
                              struct kvbm_storage *const *storages, size_t n,
                              struct kvbm_layout **ret);
KV_API int kvbm_layout_allocate(const struct kvbm_layout_config *config,
                                const struct kvbm_allocator *allocator, struct kvbm_layout **ret);
KV_API void kvbm_layout_destroy(struct kvbm_layout *layout); /* NULL is a no-op */

KV_API const struct kvbm_layout_config *kvbm_layout_get_config(const struct kvbm_layout *layout);
KV_API const struct kvbm_layout_shape *kvbm_layout_get_shape(const struct kvbm_layout *layout);
/** Storage of a layer (the only one when fully contiguous). NULL: no such layer, or deserialised. */
KV_API struct kvbm_storage *kvbm_layout_storage(const struct kvbm_layout *layout, uint32_t layer);

/** Bytes in one piece. */
struct kvbm_view {
    uint64_t addr; /* file offset on disk */
    uint64_t len;
    enum kvbm_storage_kind kind;
    uint64_t device_id;
    uint32_t storage; /* which of the layout's storages */
};

/** One region. Returns 0; -ERANGE for a block, layer or outer that isn't (the log says which). */
KV_API int kvbm_layout_region(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                              uint32_t outer, struct kvbm_view *ret);
/** All outers of a layer. -ENOTSUP when they don't lie together (outer-contiguous, outer_dim 2). */
KV_API int kvbm_layout_layer(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                             struct kvbm_view *ret);
/** A whole block without padding. -ENOTSUP unless it is fully contiguous or of one region. */
KV_API int kvbm_layout_block(const struct kvbm_layout *layout, uint64_t block,
                             struct kvbm_view *ret);

/**
 * A layer as a KVX cache, which is what engines' kernels and kvx_copy_blocks take: K is outer 0, V
 * outer 1 (outer_dim 1: both are outer 0). The layout must know num_heads and dtype and lie in memory
 * of this process. Returns 0, -EINVAL (it doesn't), -ERANGE (no such layer), -ENOTSUP (what KVX has no
 * caches of: strides that don't fit the descriptor, integers, elements not aligned to their width).
 */
KV_API int kvbm_layout_to_kvx(const struct kvbm_layout *layout, uint32_t layer,
                              kvx_cache_desc_t *ret);

/**
 * The config of a layout over the tensors of an engine, described layer by layer as KVX caches, with
 * their storages (EXTERNAL, created here, owned by the layout). UNIFIED memory counts as the host's;
 * of DEVICE memory KVX doesn't say which device, and 0 is assumed. -EINVAL when they differ in more than
 * their addresses; -ENOTSUP for strides that are no layout of ours, and blocks not aligned as they are
 * to each other.
 */
KV_API int kvbm_layout_from_kvx(const kvx_cache_desc_t *const *layers, uint32_t num_layers,
                                struct kvbm_layout **ret);

/**
 * Write a layout down for another process or machine: config, addresses, memory kinds (docs/formats.md,
 * "Layouts"). Returns the length; -ENOSPC when @cap is too small (*@needed, may be NULL, says how much).
 */
KV_API long kvbm_layout_serialise(const struct kvbm_layout *layout, void *to, size_t cap,
                                  size_t *needed);
/**
 * And read it: same addresses, no storages of this process (kvbm_layout_storage is NULL).
 * Returns 0; -EPROTO (not one, cut short, checksum, contradictions); -EPROTONOSUPPORT (a newer version).
 */
KV_API int kvbm_layout_deserialise(const void *data, size_t len, struct kvbm_layout **ret);

#ifdef __cplusplus
}
#endif
#endif
