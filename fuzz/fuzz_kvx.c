// SPDX-License-Identifier: Apache-2.0
/* Descriptors from bytes. The descriptors of a small valid call lie in a row; the input overwrites
 * some of their bytes (also with special values) and the arrays' contents. For any input: no crash,
 * and no access outside the memory that the descriptors describe by pointers and strides. Pointers
 * are set back into the arenas, as no check can detect invented ones. On any error nothing is
 * written. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/validate.h"
#include "kvx_ext.h"

enum { ARENA = 4096, BLOCKS = 4, SIZE = 4, HEADS = 2, DIM = 8, SEQS = 2, LEN = 6 };

/* All memory that a call may touch. */
struct world {
    _Alignas(64) char k[ARENA];
    char v[ARENA];
    char key[ARENA];
    char value[ARENA];
    char arrays[ARENA];
};

struct call {
    kvx_cache_desc_t cache, target;
    kvx_write_desc_t write;
    kvx_gather_desc_t gather;
    kvx_block_copy_t copy;
    kvx_options_t options;
    kvx_scale_desc_t scale;
};

static void set_tensor(kvx_tensor_desc_t *t, void *data, uint32_t ndim, const int64_t *shape)
{
    int64_t next = 1;

    *t = (kvx_tensor_desc_t){.size = sizeof(*t),
                             .dtype = KVX_DTYPE_F16,
                             .layout = KVX_LAYOUT_BLOCK_NHD,
                             .memory = KVX_MEMORY_HOST,
                             .ndim = ndim,
                             .data = data};
    memcpy(t->shape, shape, ndim * sizeof(*shape));
    for (uint32_t i = ndim; i-- > 0; next *= shape[i])
        t->stride[i] = next;
}

static void set_cache(kvx_cache_desc_t *c, char *k, char *v)
{
    const int64_t shape[] = {BLOCKS, SIZE, HEADS, DIM};

    *c = (kvx_cache_desc_t){.size = sizeof(*c),
                            .num_blocks = BLOCKS,
                            .block_size = SIZE,
                            .num_kv_heads = HEADS,
                            .head_dim = DIM};
    set_tensor(&c->k, k, 4, shape);
    set_tensor(&c->v, v, 4, shape);
    c->pool = (kvx_pool_desc_t){sizeof(c->pool), KVX_MEMORY_HOST, SIZE * HEADS * DIM * 2, k, v};
}

static void set_io(kvx_kv_io_desc_t *io, struct world *w, int64_t tokens)
{
    const int64_t shape[] = {tokens, HEADS, DIM};

    io->size = sizeof(*io);
    set_tensor(&io->key, w->key, 3, shape);
    set_tensor(&io->value, w->value, 3, shape);
    io->num_tokens = (uint32_t)tokens;
    io->num_kv_heads = HEADS;
    io->head_dim = DIM;
}

static void set_call(struct call *c, struct world *w)
{
    memset(c, 0, sizeof(*c));
    set_cache(&c->cache, w->k, w->v);
    set_cache(&c->target, w->key, w->value);
    c->write.size = sizeof(c->write);
    set_io(&c->write.io, w, SEQS * LEN);
    c->write.slots =
        (kvx_slot_mapping_t){sizeof(c->write.slots), KVX_DTYPE_S32, SEQS * LEN, -1, w->arrays};
    c->gather.size = sizeof(c->gather);
    set_io(&c->gather.io, w, SEQS * LEN);
    c->gather.max_seq_len = LEN;
    c->gather.seq_lens =
        (kvx_seq_lens_t){sizeof(c->gather.seq_lens), KVX_DTYPE_S32, SEQS, w->arrays};
    c->gather.block_table = (kvx_block_table_t){.size = sizeof(c->gather.block_table),
                                                .format = KVX_BLOCK_TABLE_PACKED,
                                                .index_dtype = KVX_DTYPE_S32,
                                                .indptr_dtype = KVX_DTYPE_S32,
                                                .seq_count = SEQS,
                                                .beam_width = 1,
                                                .max_blocks_per_seq = 2,
                                                .indices = w->arrays + 256,
                                                .indices_count = 4,
                                                .flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX};
    c->copy = (kvx_block_copy_t){.size = sizeof(c->copy),
                                 .index_dtype = KVX_DTYPE_S32,
                                 .count = 3,
                                 .src_blocks = w->arrays,
                                 .dst_blocks = w->arrays + 64};
    c->options =
        (kvx_options_t){.size = sizeof(c->options), .primary_blocks = 4, .secondary_blocks = 4};
    c->scale = (kvx_scale_desc_t){.size = sizeof(c->scale),
                                  .dtype = KVX_DTYPE_F32,
                                  .granularity = KVX_SCALE_PER_TENSOR,
                                  .data = w->arrays + 512};
}

/* Apply changes of 4 bytes each: where (2), which value, and how many bytes of it. */
static void bend(struct call *c, const uint8_t *data, size_t n)
{
    static const int64_t values[] = {
        0,  1,  -1,  2,         3,         4,          5,         8,         15,
        16, 64, 255, INT32_MAX, INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN, (int64_t)1 << 33};
    char *bytes = (char *)c;

    for (; n >= 4; data += 4, n -= 4) {
        size_t width = (size_t)4 << (data[3] & 1);
        size_t at = ((size_t)data[0] | (size_t)data[1] << 8) % (sizeof(*c) - 8) & ~(width - 1);
        int64_t value = values[data[2] % (sizeof(values) / sizeof(values[0]))];

        if (data[2] >= 128)
            value = data[2] - 192;
        memcpy(bytes + at, &value, width);
    }
}

static bool inside(const void *p, const struct world *w)
{
    return (const char *)p >= (const char *)w && (const char *)p < (const char *)(w + 1);
}

/* Point an array to one that has the length in the descriptor: a caller's array would have it. */
static void fix_pointer(const void **p, const struct world *w, uint64_t count, uint32_t size)
{
    if (*p && !inside(*p, w))
        *p = w->arrays;
    if (*p &&
        (count > ARENA || count * size > (uint64_t)((const char *)(w + 1) - (const char *)*p)))
        *p = NULL;
}

/* Give no data to a tensor that describes more memory than there is: NULL may always be refused. */
static void fix_tensor(kvx_tensor_desc_t *t, struct world *w)
{
    struct kvx_hull hull;

    if (t->memory == KVX_MEMORY_DEVICE || t->memory == KVX_MEMORY_UNIFIED)
        t->memory = KVX_MEMORY_HOST;
    if (t->data && !inside(t->data, w))
        t->data = w->value;
    if (!t->data || !kvx_dtype_size(t->dtype) || t->ndim > KVX_MAX_TENSOR_DIMS)
        return;
    if (t->dtype > KVX_DTYPE_F8_E5M2 || kvx_check_extent(t, false, &hull) != KVX_STATUS_OK)
        return;
    if (hull.low < (uintptr_t)w || hull.high > (uintptr_t)(w + 1))
        t->data = NULL;
}

static void fix_cache(kvx_cache_desc_t *c, struct world *w)
{
    kvx_pool_desc_t *pool = &c->pool;

    fix_tensor(&c->k, w);
    fix_tensor(&c->v, w);
    pool->memory = KVX_MEMORY_HOST;
    if (pool->primary)
        pool->primary = w->k;
    if (pool->secondary)
        pool->secondary = w->v;
    if (pool->bytes_per_block > ARENA / 4)
        pool->bytes_per_block = 0;
}

static void fix_scale(kvx_scale_desc_t *s, struct world *w)
{
    kvx_tensor_desc_t view = {.dtype = KVX_DTYPE_F32, .memory = KVX_MEMORY_HOST, .ndim = s->ndim};

    memcpy(view.shape, s->shape, sizeof(view.shape));
    memcpy(view.stride, s->stride, sizeof(view.stride));
    view.data = s->data ? w->arrays + 512 : NULL;
    fix_tensor(&view, w);
    s->data = view.data;
}

static void fix(struct call *c, struct world *w)
{
    kvx_block_table_t *t = &c->gather.block_table;

    fix_cache(&c->cache, w);
    fix_cache(&c->target, w);
    fix_tensor(&c->write.io.key, w);
    fix_tensor(&c->write.io.value, w);
    fix_tensor(&c->gather.io.key, w);
    fix_tensor(&c->gather.io.value, w);
    fix_pointer(&c->write.slots.slots, w, c->write.slots.token_count, 8);
    fix_pointer(&c->gather.seq_lens.lengths, w, c->gather.seq_lens.seq_count, 8);
    fix_pointer(&t->indices, w, t->indices_count, 8);
    if (t->format == KVX_BLOCK_TABLE_RAGGED && !t->indptr)
        t->indptr = w->arrays + 1024;
    fix_pointer(&t->indptr, w, t->indptr_count, 8);
    fix_pointer(&c->copy.src_blocks, w, c->copy.count, 8);
    fix_pointer(&c->copy.dst_blocks, w, c->copy.count, 8);
    c->write.k_scale = c->write.k_scale ? w->arrays + 512 : NULL;
    c->write.v_scale = c->write.v_scale ? w->arrays + 516 : NULL;
    fix_scale(&c->write.k_scale_desc, w);
    fix_scale(&c->write.v_scale_desc, w);
    fix_scale(&c->scale, w);
    c->copy.src_k_scale = c->copy.src_k_scale ? &c->scale : NULL;
    c->copy.src_v_scale = c->copy.src_v_scale ? &c->scale : NULL;
    c->copy.dst_k_scale = c->copy.dst_k_scale ? &c->scale : NULL;
    c->copy.dst_v_scale = c->copy.dst_v_scale ? &c->scale : NULL;
    c->options.dropped = c->options.dropped ? (uint64_t *)(void *)(w->arrays + ARENA - 8) : NULL;
    if (!c->options.primary_blocks || c->options.primary_blocks > 4)
        c->options.primary_blocks = 4;
    if (!c->options.secondary_blocks || c->options.secondary_blocks > 4)
        c->options.secondary_blocks = 4;
    c->options.k_scales = c->options.v_scales = NULL;
}

static kvx_status_t call_one(struct call *c, uint8_t which)
{
    const kvx_cache_desc_t *caches[] = {&c->cache, &c->cache};
    const kvx_write_desc_t *writes[] = {&c->write, &c->write};
    const kvx_gather_desc_t *gathers[] = {&c->gather, &c->gather};
    const kvx_scale_desc_t *scales[] = {&c->scale, &c->scale};
    uint32_t n = which & 8 ? 2 : 1;

    switch (which & 3) {
    case 0:
        return kvx_write_kv_layers(caches, writes, n, &c->options, NULL);
    case 1:
        if (which & 4)
            c->options.k_scales = c->options.v_scales = scales;
        return kvx_gather_kv_layers(caches, gathers, n, &c->options, NULL);
    case 2:
        return kvx_copy_blocks(&c->cache, &c->target, &c->copy, &c->options, NULL);
    default:
        return kvx_validate_cache_desc(&c->cache);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct world world, before;
    struct call call;
    size_t arrays;

    if (n < 4)
        return 0;
    arrays = data[1];
    if (arrays > n - 4)
        arrays = n - 4;
    memset(&world, 0x3c, sizeof(world));
    memset(world.arrays, 0, sizeof(world.arrays));
    for (size_t i = 0; i < arrays; i++) /* small numbers, some of them negative, in every array */
        world.arrays[i % 8 * 64 + i / 8 * 4] = (char)data[4 + i];
    set_call(&call, &world);
    bend(&call, data + 4 + arrays, n - 4 - arrays);
    fix(&call, &world);
    memcpy(&before, &world, sizeof(before));
    if (call_one(&call, data[0]) != KVX_STATUS_OK && memcmp(&before, &world, sizeof(before)) != 0)
        abort();
    return 0;
}
