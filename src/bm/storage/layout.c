// SPDX-License-Identifier: Apache-2.0
/* The arithmetic of layouts (formulas: kvbm_layout.h) and their views. */
#include "bm/storage/layout.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define MAX_BYTES (UINT64_C(1) << 62)

/* ---- the config ---- */

static int refuse(const char *reason)
{
    static struct kv_log_rate rate; /* peers' block sets come here, too */

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("kvbm", "layout not created", "reason=\"%s\"", reason);
    return -EINVAL;
}

static bool power_of_two(uint64_t n)
{
    return n && !(n & (n - 1));
}

uint32_t kvbm_dtype_bytes(kvx_dtype_t dtype)
{
    switch (dtype) {
    case KVX_DTYPE_F8_E4M3:
    case KVX_DTYPE_F8_E5M2:
    case KVX_DTYPE_U8:
        return 1;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
        return 2;
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
        return 4;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
        return 8;
    default:
        return 0;
    }
}

static int check_elements(const struct kvbm_layout_config *c)
{
    if (!power_of_two(c->dtype_width_bytes) || c->dtype_width_bytes > 8)
        return refuse("dtype_width_bytes must be 1, 2, 4 or 8");
    if (c->dtype && kvbm_dtype_bytes(c->dtype) != c->dtype_width_bytes)
        return refuse("dtype has another width than dtype_width_bytes");
    if (c->num_heads && c->inner_dim % c->num_heads)
        return refuse("num_heads must divide inner_dim");
    if ((unsigned)c->order > KVBM_ORDER_HND)
        return refuse("no such order");
    if (c->order == KVBM_ORDER_HND && !c->num_heads)
        return refuse("order HND needs num_heads");
    return 0;
}

static int check_extents(const struct kvbm_layout_config *c)
{
    if (!c->num_blocks || !c->num_layers || !c->inner_dim)
        return refuse("num_blocks, num_layers and inner_dim must be 1 or more");
    if (c->num_layers > KVBM_MAX_LAYERS)
        return refuse("more than 65536 layers");
    if (c->outer_dim < 1 || c->outer_dim > 2)
        return refuse("outer_dim must be 1 or 2");
    if (!power_of_two(c->page_size))
        return refuse("page_size must be a power of two");
    if (!power_of_two(c->alignment))
        return refuse("alignment must be a power of two");
    return 0;
}

/* Return the layer-separate kind of an engine's tensor, or 0. One extent of the tensor must be K
 * and V; any other extent of 2 or more is refused. Where all K come first, V begins behind all
 * blocks of the tensor, whether the layout uses them or not. */
static enum kvbm_layout_kind kind_of_shape(const struct kvbm_layout_config *c)
{
    const uint64_t *shape = c->tensor_shape;
    bool block = shape[0] >= c->num_blocks && (c->outer_dim == 1 || shape[1] == c->outer_dim);
    bool outer = shape[0] == c->outer_dim &&
                 (c->outer_dim == 1 ? shape[1] >= c->num_blocks : shape[1] == c->num_blocks);

    if (block && outer && c->kind != KVBM_LAYER_SEPARATE)
        return c->kind;
    if (block && outer && c->outer_dim > 1)
        return 0; /* [2, 2, ...] */
    return block   ? KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS
           : outer ? KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS
                   : 0;
}

static int resolve_kind(struct kvbm_layout_config *c)
{
    enum kvbm_layout_kind said = 0;

    if (c->kind < KVBM_FULLY_CONTIGUOUS || c->kind > KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS)
        return refuse("no such kind");
    if (c->kind == KVBM_FULLY_CONTIGUOUS)
        return 0;
    if (c->tensor_shape[0] || c->tensor_shape[1]) {
        said = kind_of_shape(c);
        if (!said)
            return refuse("tensor_shape is neither [num_blocks, outer_dim] nor the reverse");
    }
    if (c->kind == KVBM_LAYER_SEPARATE && !said)
        return refuse("layer_separate needs tensor_shape, or say which of the two");
    if (c->kind != KVBM_LAYER_SEPARATE && said && said != c->kind)
        return refuse("tensor_shape contradicts the kind");
    if (c->kind == KVBM_LAYER_SEPARATE)
        c->kind = said;
    return 0;
}

int kvbm_layout_config_read(const struct kvbm_layout_config *config, struct kvbm_layout_config *ret)
{
    struct kvbm_layout_config c = {0};
    int err;

    if (!kv_sized(config, "kvbm_layout_config") ||
        config->size < offsetof(struct kvbm_layout_config, dtype_width_bytes))
        return -EINVAL;
    memcpy(&c, config, KV_MIN(config->size, sizeof(c)));
    c.size = sizeof(c);
    if (!c.dtype_width_bytes)
        c.dtype_width_bytes = c.dtype ? kvbm_dtype_bytes(c.dtype) : 2;
    if (!c.alignment)
        c.alignment = 1;
    err = check_extents(&c);
    if (err == 0)
        err = check_elements(&c);
    if (err == 0)
        err = resolve_kind(&c);
    if (err == 0)
        *ret = c;
    return err;
}

/* ---- the arithmetic ---- */

/* Return a * b, or MAX_BYTES + 1 when it is larger; further products then stay larger. */
static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;

    return __builtin_mul_overflow(a, b, &product) || product > MAX_BYTES ? MAX_BYTES + 1 : product;
}

static uint64_t align_up(uint64_t n, uint64_t alignment)
{
    return (n + alignment - 1) & ~(alignment - 1);
}

static void compute_strides(const struct kvbm_layout_config *c, struct kvbm_layout_shape *s)
{
    switch (c->kind) {
    case KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS:
        s->block_stride = align_up(s->region_bytes, c->alignment);
        s->outer_stride = times(s->block_stride, c->num_blocks);
        s->data_bytes = times(s->outer_stride, c->outer_dim);
        break;
    case KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS:
        s->outer_stride = s->region_bytes;
        s->block_stride = align_up(times(s->region_bytes, c->outer_dim), c->alignment);
        s->data_bytes = times(s->block_stride, c->num_blocks);
        break;
    default:
        s->outer_stride = s->region_bytes;
        s->layer_stride = times(s->region_bytes, c->outer_dim);
        s->block_stride = align_up(s->natural_block_bytes, c->alignment);
        s->data_bytes = times(s->block_stride, c->num_blocks - 1) + s->natural_block_bytes;
    }
}

static int compute(const struct kvbm_layout_config *c, struct kvbm_layout_shape *s)
{
    *s = (struct kvbm_layout_shape){
        .kind = c->kind,
        .n_storages = c->kind == KVBM_FULLY_CONTIGUOUS ? 1 : c->num_layers,
    };
    s->region_bytes = times(times(c->page_size, c->inner_dim), c->dtype_width_bytes);
    s->natural_block_bytes = times(times(s->region_bytes, c->outer_dim), c->num_layers);
    compute_strides(c, s);
    s->required_bytes = s->data_bytes + c->alignment - 1;
    if (s->natural_block_bytes > MAX_BYTES || s->required_bytes > MAX_BYTES ||
        s->outer_stride > MAX_BYTES) {
        refuse("larger than 2^62 bytes");
        return -EOVERFLOW;
    }
    return 0;
}

int kvbm_layout_compute(const struct kvbm_layout_config *config, struct kvbm_layout_shape *ret)
{
    struct kvbm_layout_config c;
    struct kvbm_layout_shape s;
    int err = ret ? kvbm_layout_config_read(config, &c) : -EINVAL;

    if (err == 0)
        err = compute(&c, &s);
    if (err == 0)
        *ret = s;
    return err;
}

/* ---- layouts ---- */

int kvbm_layout_new(const struct kvbm_layout_config *config, struct kvbm_layout **ret)
{
    struct kvbm_layout_config c;
    struct kvbm_layout_shape s;
    struct kvbm_layout *layout;
    int err = kvbm_layout_config_read(config, &c);

    if (err == 0)
        err = compute(&c, &s);
    if (err != 0)
        return err;
    layout = calloc(1, sizeof(*layout) + s.n_storages * sizeof(layout->places[0]));
    if (!layout)
        return -ENOMEM;
    layout->config = c;
    layout->shape = s;
    layout->n = s.n_storages;
    *ret = layout;
    return 0;
}

static int place(struct kvbm_layout *layout, uint32_t i, struct kvbm_storage *storage)
{
    struct kvbm_place *p = &layout->places[i];
    uint64_t skipped;

    if (!storage)
        return -EINVAL;
    p->storage = storage;
    p->kind = kvbm_storage_get_kind(storage);
    p->device_id = kvbm_storage_device_id(storage);
    p->storage_addr = kvbm_storage_addr(storage);
    p->storage_bytes = kvbm_storage_bytes(storage);
    p->addr = align_up(p->storage_addr, layout->config.alignment);
    skipped = p->addr - p->storage_addr;
    if (p->kind != layout->places[0].kind ||
        (p->kind != KVBM_STORAGE_DISK && p->device_id != layout->places[0].device_id))
        return refuse("its storages are of several kinds or devices");
    if (p->storage_bytes < skipped || p->storage_bytes - skipped < layout->shape.data_bytes) {
        kv_log_warn("kvbm", "storage too small", "have=%" PRIu64 " need=%" PRIu64, p->storage_bytes,
                    layout->shape.data_bytes + skipped);
        return -EINVAL;
    }
    return 0;
}

int kvbm_layout_create(const struct kvbm_layout_config *config,
                       struct kvbm_storage *const *storages, size_t n, struct kvbm_layout **ret)
{
    struct kvbm_layout *layout;
    int err = storages && ret ? kvbm_layout_new(config, &layout) : -EINVAL;

    if (err != 0)
        return err;
    if (n != layout->n)
        err = refuse("another number of storages than layers");
    for (uint32_t i = 0; err == 0 && i < layout->n; i++)
        err = place(layout, i, storages[i]);
    if (err < 0) {
        free(layout);
        return err;
    }
    *ret = layout;
    return 0;
}

int kvbm_layout_allocate(const struct kvbm_layout_config *config,
                         const struct kvbm_allocator *allocator, struct kvbm_layout **ret)
{
    struct kvbm_layout *layout;
    int err = -EINVAL;

    if (ret && kv_sized(allocator, "kvbm_allocator") &&
        allocator->size >= offsetof(struct kvbm_allocator, arg) + sizeof(void *) &&
        allocator->allocate)
        err = kvbm_layout_new(config, &layout);
    if (err != 0)
        return err;
    layout->owns_storages = true;
    for (uint32_t i = 0; err == 0 && i < layout->n; i++) {
        struct kvbm_storage *storage = NULL;

        err = allocator->allocate(allocator->arg, layout->shape.required_bytes, &storage);
        if (err == 0)
            err = place(layout, i, storage);
    }
    if (err != 0) {
        kvbm_layout_destroy(layout);
        return err < 0 ? err : -EINVAL; /* a caller's allocator may return anything */
    }
    *ret = layout;
    return 0;
}

void kvbm_layout_destroy(struct kvbm_layout *layout)
{
    if (!layout)
        return;
    for (uint32_t i = layout->n; layout->owns_storages && i-- > 0;)
        kvbm_storage_destroy(layout->places[i].storage);
    free(layout);
}

const struct kvbm_layout_config *kvbm_layout_get_config(const struct kvbm_layout *layout)
{
    return layout ? &layout->config : NULL;
}

const struct kvbm_layout_shape *kvbm_layout_get_shape(const struct kvbm_layout *layout)
{
    return layout ? &layout->shape : NULL;
}

struct kvbm_storage *kvbm_layout_storage(const struct kvbm_layout *layout, uint32_t layer)
{
    if (!layout || layer >= layout->config.num_layers)
        return NULL;
    return layout->places[layout->n == 1 ? 0 : layer].storage;
}

/* ---- views ---- */

static int out_of_range(const char *what, uint64_t i, uint64_t n)
{
    kv_log_warn("kvbm", "block, layer or outer out of range", "%s=%" PRIu64 " of=%" PRIu64, what, i,
                n);
    return -ERANGE;
}

static int view(const struct kvbm_layout *layout, uint64_t block, uint32_t layer, uint32_t outer,
                uint64_t len, struct kvbm_view *ret)
{
    const struct kvbm_layout_config *c = &layout->config;
    const struct kvbm_layout_shape *s = &layout->shape;
    uint32_t at = layout->n == 1 ? 0 : layer;

    if (block >= c->num_blocks)
        return out_of_range("block", block, c->num_blocks);
    if (layer >= c->num_layers)
        return out_of_range("layer", layer, c->num_layers);
    if (outer >= c->outer_dim)
        return out_of_range("outer", outer, c->outer_dim);
    *ret = (struct kvbm_view){
        .addr = layout->places[at].addr + block * s->block_stride + layer * s->layer_stride +
                outer * s->outer_stride,
        .len = len,
        .kind = layout->places[at].kind,
        .device_id = layout->places[at].device_id,
        .storage = at,
    };
    return 0;
}

int kvbm_layout_region(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                       uint32_t outer, struct kvbm_view *ret)
{
    if (!layout || !ret)
        return -EINVAL;
    return view(layout, block, layer, outer, layout->shape.region_bytes, ret);
}

int kvbm_layout_layer(const struct kvbm_layout *layout, uint64_t block, uint32_t layer,
                      struct kvbm_view *ret)
{
    if (!layout || !ret)
        return -EINVAL;
    if (layout->config.outer_dim > 1 && layout->shape.outer_stride != layout->shape.region_bytes)
        return -ENOTSUP;
    return view(layout, block, layer, 0, layout->shape.region_bytes * layout->config.outer_dim,
                ret);
}

int kvbm_layout_block(const struct kvbm_layout *layout, uint64_t block, struct kvbm_view *ret)
{
    if (!layout || !ret)
        return -EINVAL;
    if (layout->n > 1)
        return -ENOTSUP;
    if (layout->config.outer_dim > 1 && layout->shape.outer_stride != layout->shape.region_bytes)
        return -ENOTSUP;
    return view(layout, block, 0, 0, layout->shape.natural_block_bytes, ret);
}
