// SPDX-License-Identifier: Apache-2.0
/* Convert layouts to KVX caches and back: kernels' and engines' description of the same memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/storage/layout.h"

/* ---- to KVX ---- */

static kvx_memory_type_t memory_of(enum kvbm_storage_kind kind)
{
    switch (kind) {
    case KVBM_STORAGE_SYSTEM:
    case KVBM_STORAGE_PINNED:
        return KVX_MEMORY_HOST;
    case KVBM_STORAGE_DEVICE:
        return KVX_MEMORY_DEVICE;
    default:
        return KVX_MEMORY_UNKNOWN;
    }
}

static kvx_tensor_desc_t tensor(const struct kvbm_layout *layout, uint32_t layer, uint32_t outer)
{
    const struct kvbm_layout_config *c = &layout->config;
    const struct kvbm_layout_shape *s = &layout->shape;
    const struct kvbm_place *place = &layout->places[layout->n == 1 ? 0 : layer];
    int64_t heads = c->num_heads, dim = c->inner_dim / c->num_heads, page = c->page_size;
    bool hnd = c->order == KVBM_ORDER_HND;

    return (kvx_tensor_desc_t){
        .size = sizeof(kvx_tensor_desc_t),
        .dtype = c->dtype,
        .layout = hnd ? KVX_LAYOUT_BLOCK_HND : KVX_LAYOUT_BLOCK_NHD,
        .memory = memory_of(place->kind),
        .ndim = 4,
        .shape = {(int64_t)c->num_blocks, hnd ? heads : page, hnd ? page : heads, dim},
        .stride = {(int64_t)(s->block_stride / c->dtype_width_bytes),
                   hnd ? page * dim : heads * dim, dim, 1},
        .data =
            (void *)(uintptr_t)(place->addr + layer * s->layer_stride + outer * s->outer_stride),
    };
}

int kvbm_layout_to_kvx(const struct kvbm_layout *layout, uint32_t layer, kvx_cache_desc_t *ret)
{
    const struct kvbm_layout_config *c;
    kvx_cache_desc_t cache;

    if (!layout || !ret)
        return -EINVAL;
    c = &layout->config;
    if (!c->num_heads || !c->dtype || memory_of(layout->places[0].kind) == KVX_MEMORY_UNKNOWN ||
        !layout->places[0].storage)
        return -EINVAL;
    if (layer >= c->num_layers)
        return -ERANGE;
    if (c->num_blocks > UINT32_MAX || layout->shape.block_stride % c->dtype_width_bytes)
        return -ENOTSUP;
    cache = (kvx_cache_desc_t){
        .size = sizeof(cache),
        .num_blocks = (uint32_t)c->num_blocks,
        .block_size = c->page_size,
        .num_kv_heads = c->num_heads,
        .head_dim = c->inner_dim / c->num_heads,
        .k = tensor(layout, layer, 0),
        .v = tensor(layout, layer, c->outer_dim - 1),
    };
    if (kvx_validate_cache_desc(&cache) != KVX_STATUS_OK) /* integers, or an unsupported position */
        return -ENOTSUP;
    *ret = cache;
    return 0;
}

/* ---- from KVX ---- */

static uint64_t addr_of(const kvx_tensor_desc_t *t)
{
    return (uint64_t)(uintptr_t)t->data;
}

/* True for NHD or HND with contiguous regions. */
static bool packed(const kvx_cache_desc_t *cache, const kvx_tensor_desc_t *t)
{
    int64_t dim = cache->head_dim;
    int64_t inner = t->layout == KVX_LAYOUT_BLOCK_HND ? cache->block_size : cache->num_kv_heads;

    return (t->layout == KVX_LAYOUT_BLOCK_NHD || t->layout == KVX_LAYOUT_BLOCK_HND) &&
           t->ndim == 4 && t->stride[3] == 1 && t->stride[2] == dim &&
           t->stride[1] == inner * dim && t->stride[0] > 0;
}

static bool alike(const kvx_tensor_desc_t *a, const kvx_tensor_desc_t *b)
{
    return a->dtype == b->dtype && a->layout == b->layout && a->memory == b->memory &&
           a->ndim == b->ndim && !memcmp(a->stride, b->stride, sizeof(a->stride[0]) * 4) &&
           !memcmp(a->shape, b->shape, sizeof(a->shape[0]) * 4);
}

static int check_layers(const kvx_cache_desc_t *const *layers, uint32_t n)
{
    const kvx_cache_desc_t *first = layers[0];

    for (uint32_t i = 0; i < n; i++) {
        const kvx_cache_desc_t *cache = layers[i];

        kvx_status_t status = kvx_validate_cache_desc(cache);

        if (status != KVX_STATUS_OK)
            return status == KVX_STATUS_UNSUPPORTED ? -ENOTSUP : -EINVAL;
        if (!packed(cache, &cache->k) || !packed(cache, &cache->v))
            return -ENOTSUP;
        if (!alike(&cache->k, &cache->v) || !alike(&cache->k, &first->k) ||
            cache->num_blocks != first->num_blocks || cache->block_size != first->block_size ||
            cache->num_kv_heads != first->num_kv_heads || cache->head_dim != first->head_dim)
            return -EINVAL;
        if (addr_of(&cache->v) - addr_of(&cache->k) != addr_of(&first->v) - addr_of(&first->k))
            return -EINVAL;
    }
    return 0;
}

/* Return the least alignment that gives @stride for @natural bytes; 0 when none does. */
static uint64_t alignment_of(uint64_t natural, uint64_t stride)
{
    for (uint64_t a = 1; a && a <= stride; a *= 2) {
        if ((natural + a - 1) / a * a == stride)
            return a;
    }
    return 0;
}

/* True when a block holds its layers one behind the other: K and V of a layer, then the next
 * layer. */
static bool in_one_block(const kvx_cache_desc_t *const *layers, uint32_t n, uint64_t layer_stride)
{
    for (uint32_t i = 1; i < n; i++) {
        if (addr_of(&layers[i]->k) - addr_of(&layers[i - 1]->k) != layer_stride)
            return false;
    }
    return n > 1;
}

/* Find the first kind with these strides, and set kind and alignment. With a single block several
 * kinds have them and are equivalent. */
static int find_kind(const kvx_cache_desc_t *const *layers, uint32_t n,
                     struct kvbm_layout_config *c)
{
    uint64_t between = addr_of(&layers[0]->v) - addr_of(&layers[0]->k);
    uint64_t region = (uint64_t)c->page_size * c->inner_dim * c->dtype_width_bytes;
    uint64_t stride = (uint64_t)layers[0]->k.stride[0] * c->dtype_width_bytes;
    uint64_t layer = region * c->outer_dim;
    bool together = !between || between == region;
    const struct {
        enum kvbm_layout_kind kind;
        bool fits;
        uint64_t natural; /* bytes that block_stride steps over */
    } kinds[] = {
        {KVBM_FULLY_CONTIGUOUS, together && in_one_block(layers, n, layer), layer * n},
        {KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, together, layer},
        {KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, between == stride * c->num_blocks, region},
    };

    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        uint64_t alignment = kinds[i].fits ? alignment_of(kinds[i].natural, stride) : 0;

        if (!alignment || alignment > UINT32_MAX)
            continue;
        c->kind = kinds[i].kind;
        c->alignment = (uint32_t)alignment;
        return 0;
    }
    return -ENOTSUP;
}

static int config_of(const kvx_cache_desc_t *const *layers, uint32_t n,
                     struct kvbm_layout_config *c)
{
    const kvx_cache_desc_t *first = layers[0];

    if ((uint64_t)first->num_kv_heads * first->head_dim > UINT32_MAX)
        return -ENOTSUP;
    *c = (struct kvbm_layout_config){
        .size = sizeof(*c),
        .num_blocks = first->num_blocks,
        .num_layers = n,
        .outer_dim = addr_of(&first->v) == addr_of(&first->k) ? 1 : 2,
        .page_size = first->block_size,
        .inner_dim = first->num_kv_heads * first->head_dim,
        .dtype_width_bytes = kvbm_dtype_bytes(first->k.dtype),
        .num_heads = first->num_kv_heads,
        .dtype = first->k.dtype,
        .order = first->k.layout == KVX_LAYOUT_BLOCK_HND ? KVBM_ORDER_HND : KVBM_ORDER_NHD,
    };
    return find_kind(layers, n, c);
}

/* Use an engine's memory as the storage of layer @i. Its first block begins where the storage
 * does. */
static int adopt(struct kvbm_layout *layout, uint32_t i, const kvx_cache_desc_t *cache)
{
    struct kvbm_storage_opts opts = {
        .size = sizeof(opts),
        .kind = KVBM_STORAGE_EXTERNAL,
        .bytes = layout->shape.data_bytes,
        .memory = cache->k.data,
        .of = cache->k.memory == KVX_MEMORY_DEVICE ? KVBM_STORAGE_DEVICE : KVBM_STORAGE_SYSTEM,
    };
    struct kvbm_place *place = &layout->places[i];
    int err;

    if (addr_of(&cache->k) % layout->config.alignment)
        return -ENOTSUP; /* blocks are aligned to each other, but not in memory */
    err = kvbm_storage_create(&opts, &place->storage);
    if (err < 0)
        return err;
    *place = (struct kvbm_place){
        .addr = addr_of(&cache->k),
        .storage_addr = addr_of(&cache->k),
        .storage_bytes = opts.bytes,
        .device_id = kvbm_storage_device_id(place->storage),
        .kind = kvbm_storage_get_kind(place->storage),
        .storage = place->storage,
    };
    return 0;
}

int kvbm_layout_from_kvx(const kvx_cache_desc_t *const *layers, uint32_t num_layers,
                         struct kvbm_layout **ret)
{
    struct kvbm_layout_config config;
    struct kvbm_layout *layout = NULL;
    int err = layers && num_layers && ret ? check_layers(layers, num_layers) : -EINVAL;

    if (err == 0)
        err = config_of(layers, num_layers, &config);
    if (err == 0)
        err = kvbm_layout_new(&config, &layout);
    if (err != 0)
        return err;
    layout->owns_storages = true;
    for (uint32_t i = 0; err == 0 && i < layout->n; i++)
        err = adopt(layout, i, layers[i]);
    if (err < 0) {
        kvbm_layout_destroy(layout);
        return err;
    }
    *ret = layout;
    return 0;
}
