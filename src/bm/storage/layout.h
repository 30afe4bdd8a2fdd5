// SPDX-License-Identifier: Apache-2.0
/** Internals of a layout: its arithmetic, and where its storages begin. */
#ifndef KVBM_BM_STORAGE_LAYOUT_H
#define KVBM_BM_STORAGE_LAYOUT_H

#include "kvbm_layout.h"

/**
 * Properties of a storage that layout arithmetic needs; for another process's storage nothing else
 * is known.
 */
struct kvbm_place {
    uint64_t addr; /* aligned up: where block 0 begins */
    uint64_t storage_addr, storage_bytes;
    uint64_t device_id;
    enum kvbm_storage_kind kind;
    struct kvbm_storage *storage; /* NULL when deserialised */
};

struct kvbm_layout {
    struct kvbm_layout_config config;
    struct kvbm_layout_shape shape;
    bool owns_storages;
    uint32_t n;
    struct kvbm_place places[];
};

/** Make a layout of @n places without addresses; shape and config are filled in. */
int kvbm_layout_new(const struct kvbm_layout_config *config, struct kvbm_layout **ret);

/**
 * Convert the config to this build's struct: defaults filled in, fields that an older caller lacks
 * zeroed.
 */
int kvbm_layout_config_read(const struct kvbm_layout_config *config,
                            struct kvbm_layout_config *ret);

uint32_t kvbm_dtype_bytes(kvx_dtype_t dtype); /* 0: not an element type */

/** True for the element types that can be converted into each other. */
static inline bool kvbm_dtype_is_float(kvx_dtype_t dtype)
{
    return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2 || dtype == KVX_DTYPE_F16 ||
           dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32;
}

#endif
