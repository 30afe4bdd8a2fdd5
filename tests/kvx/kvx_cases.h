// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_cases.h: random calls over every kind of cache, table and tensor, checked against the
 * reference.
 *
 * All memory of a case lies in arenas: random bytes with room before, between and behind the
 * elements. The reference works on the arenas themselves (what should be), the library on copies
 * (what is); in the end all bytes must agree, so nothing else was touched. Where the copies live is
 * up to `struct kvx_place_hooks`: host memory here, device memory in the CUDA tests, which include
 * this file.
 */
#ifndef KVX_CASES_H
#define KVX_CASES_H

#include <stdio.h>

#include "kvx/kvx_reference.h"

/** A number that the environment gives: KV_TEST_SEED, KV_TEST_SCALE. */
static inline uint64_t case_setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* --------------------------------------------------------------------------------------------- */
/* Random numbers (xorshift64*) */

struct dice {
    uint64_t state;
};

static inline uint64_t roll(struct dice *d)
{
    d->state ^= d->state >> 12;
    d->state ^= d->state << 25;
    d->state ^= d->state >> 27;
    return d->state * UINT64_C(0x2545f4914f6cdd1d);
}

static inline uint32_t below(struct dice *d, uint32_t n)
{
    return (uint32_t)((roll(d) >> 32) * n >> 32);
}

static inline bool chance(struct dice *d, uint32_t percent)
{
    return below(d, 100) < percent;
}

/* --------------------------------------------------------------------------------------------- */
/* Memory */

/** Where the library's copies live. */
struct kvx_place_hooks {
    kvx_memory_type_t memory;
    void *stream;
    void *(*put)(const void *bytes, size_t n);              /* a copy, 256-byte aligned */
    void (*get)(void *bytes, const void *placed, size_t n); /* after all work is done */
    void (*drop)(void *placed);
};

static inline void *host_put(const void *bytes, size_t n)
{
    void *placed = aligned_alloc(256, (n + 511) / 256 * 256);

    if (!placed)
        abort();
    return memcpy(placed, bytes, n);
}

static inline void host_get(void *bytes, const void *placed, size_t n)
{
    memcpy(bytes, placed, n);
}

static const struct kvx_place_hooks host_hooks = {KVX_MEMORY_HOST, NULL, host_put, host_get, free};

enum { GUARD = 192, MAX_ARENAS = 16 };

struct arena {
    char *bytes;
    char *placed;
    size_t n;
};

/* The dimensions that a case is made along; -1 or 0 where it may choose. */
struct kvx_case {
    enum { CASE_WRITE, CASE_PACKED, CASE_RAGGED, CASE_OFFSETS, CASE_COPY, N_CASE_KINDS } kind;
    int layout;  /* 0 NHD, 1 HND, 2 HND_PACKED, 3 CUSTOM4, 4 CUSTOM5 */
    int strides; /* see make_strides */
    kvx_dtype_t cache_dtype, io_dtype;
    bool wide;    /* S64 indices */
    int misalign; /* elements that data starts after an aligned address */
    bool large;
    bool aligned; /* rows and their strides are multiples of 16 bytes: a GPU's wide accesses */
    uint64_t seed;

    struct dice dice;
    struct arena arenas[MAX_ARENAS];
    unsigned n_arenas;
    kvx_cache_desc_t cache, target;
    kvx_write_desc_t write;
    kvx_gather_desc_t gather;
    kvx_block_copy_t copy;
    kvx_options_t options;
    kvx_scale_desc_t scales[4];
    const kvx_scale_desc_t *scale_list[4];
    uint64_t *dropped;
};

static inline void random_bytes(struct dice *d, char *to, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        uint64_t r = roll(d);

        memcpy(to + i, &r, n - i < 8 ? n - i : 8);
    }
}

/** @n bytes between guards, @skew bytes past an aligned address. */
static inline void *arena_add(struct kvx_case *c, size_t n, size_t skew)
{
    struct arena *a = &c->arenas[c->n_arenas++];

    if (c->n_arenas > MAX_ARENAS)
        abort();
    a->n = n + 2 * GUARD + skew;
    a->bytes = aligned_alloc(256, (a->n + 255) / 256 * 256);
    if (!a->bytes)
        abort();
    random_bytes(&c->dice, a->bytes, a->n);
    return a->bytes + GUARD + skew;
}

/** The library's address for one of the reference's. */
static inline void *placed(const struct kvx_case *c, const void *p)
{
    for (unsigned i = 0; i < c->n_arenas; i++) {
        const struct arena *a = &c->arenas[i];

        if (p && (const char *)p >= a->bytes && (const char *)p < a->bytes + a->n)
            return a->placed + ((const char *)p - a->bytes);
    }
    return NULL;
}

/* --------------------------------------------------------------------------------------------- */
/* Tensors */

/**
 * Strides for the n dims of a shape.
 *   0 contiguous                     4 innermost dim not contiguous
 *   1 outermost stride doubled       5 dims in a random order in memory
 *   2 K and V share rows (last dim   6 every dim padded
 *     but one has twice the room)    7 outermost dim backwards
 * Returns the number of elements from the lowest to the highest; *low is where data points in it.
 */
enum { N_STRIDE_KINDS = 8 };

static inline size_t make_strides(struct dice *d, int kind, kvx_tensor_desc_t *t, int64_t *low)
{
    uint32_t n = t->ndim, order[KVX_MAX_TENSOR_DIMS];
    int64_t next = kind == 4 ? 2 + below(d, 2) : 1, high = 0;

    *low = 0;
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n; kind == 5 && i-- > 1;) {
        uint32_t j = below(d, i + 1), swap = order[i];

        order[i] = order[j];
        order[j] = swap;
    }
    for (uint32_t k = n; k-- > 0;) {
        uint32_t i = order[k];

        if (kind == 1 && k == 0 && n > 1)
            next *= 2;
        if (kind == 2 && k == n - 2)
            next *= 2;
        if (kind == 6 && k != n - 1)
            next += 1 + below(d, 9);
        t->stride[i] = next;
        next *= t->shape[i] ? t->shape[i] : 1;
    }
    if (kind == 7)
        t->stride[0] = -t->stride[0];
    for (uint32_t i = 0; i < n; i++) {
        int64_t reach = t->shape[i] ? (t->shape[i] - 1) * t->stride[i] : 0;

        *(reach < 0 ? low : &high) += reach;
    }
    *low = -*low;
    return (size_t)(*low + high + 1);
}

/* Values that matter: moderate ones, any bits, and what lies at the edges of formats. */
static inline uint32_t random_element(struct dice *d, kvx_dtype_t dtype)
{
    static const float edges[] = {0.0F,       -0.0F,     448.0F,   464.0F,   465.0F,   57344.0F,
                                  61440.0F,   65504.0F,  65519.0F, 65520.0F, 0x1p-9F,  0x1p-10F,
                                  0x1.8p-10F, 0x1p-16F,  0x1p-17F, 0x1p-24F, 0x1p-25F, 0x1.8p-6F,
                                  0x1p-126F,  0x1p-149F, 1.0625F,  1.1875F,  1e30F,    -1e30F};
    uint32_t kind = below(d, 8);

    if (kind == 0)
        return (uint32_t)roll(d);
    if (kind == 1)
        return ref_encode(dtype, edges[below(d, sizeof(edges) / sizeof(edges[0]))]);
    return ref_encode(dtype, (float)ldexp((double)(int32_t)roll(d), -31 + (int)below(d, 12)));
}

static inline void fill_elements(struct kvx_case *c, char *to, size_t n, kvx_dtype_t dtype)
{
    unsigned bytes = ref_format(dtype).bytes;
    size_t plain = n < 4096 ? n : 4096; /* long ones repeat: making values is the slow part */

    for (size_t i = 0; i < plain; i++) {
        uint32_t bits = random_element(&c->dice, dtype);

        memcpy(to + i * bytes, &bits, bytes);
    }
    for (size_t i = plain; i < n; i++)
        memcpy(to + i * bytes, to + (i - plain + below(&c->dice, 7)) * bytes, bytes);
}

/* Give a shaped tensor strides and memory. */
static inline void place_tensor(struct kvx_case *c, kvx_tensor_desc_t *t, int strides, int misalign)
{
    unsigned bytes = ref_format(t->dtype).bytes;
    int64_t low;
    size_t n = make_strides(&c->dice, strides, t, &low);
    size_t partner =
        strides == 2 ? (size_t)t->shape[t->ndim - 1] : 0; /* V's part of the last row */
    char *data = arena_add(c, (n + partner) * bytes, (size_t)misalign * bytes);

    fill_elements(c, data, n + partner, t->dtype);
    t->data = data + low * bytes;
}

static inline kvx_tensor_desc_t new_tensor(kvx_dtype_t dtype, kvx_layout_t layout)
{
    return (kvx_tensor_desc_t){.size = sizeof(kvx_tensor_desc_t),
                               .dtype = dtype,
                               .layout = layout,
                               .memory = KVX_MEMORY_HOST};
}

/* Strides that keep 16 bytes aligned, of those that make_strides knows. */
static inline int aligned_strides(struct dice *d)
{
    static const int kinds[] = {0, 0, 1, 2, 7};

    return kinds[below(d, 5)];
}

static inline uint32_t pick_pack(struct dice *d, uint32_t dim, bool aligned)
{
    static const uint32_t packs[] = {8, 16, 1, 2, 4, 8, 3, 32};
    uint32_t pack = aligned ? 16U << below(d, 2) : packs[below(d, 8)];

    return dim % pack == 0 ? pack : chance(d, 50) ? dim : 1;
}

static inline void shape_cache_tensor(struct kvx_case *c, const kvx_cache_desc_t *cache, int layout,
                                      kvx_tensor_desc_t *t)
{
    static const kvx_layout_t layouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                           KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM,
                                           KVX_LAYOUT_BLOCK_CUSTOM};
    int64_t nhd[] = {cache->num_blocks, cache->block_size, cache->num_kv_heads, cache->head_dim};
    int64_t hnd[] = {cache->num_blocks, cache->num_kv_heads, cache->block_size, cache->head_dim};

    t->layout = layouts[layout];
    t->ndim = layout == 2 || layout == 4 ? 5 : 4;
    memcpy(t->shape, layout == 1 ? hnd : nhd, sizeof(nhd));
    if (t->ndim == 5) {
        t->shape[4] = pick_pack(&c->dice, cache->head_dim, c->aligned);
        t->shape[2] = cache->head_dim / t->shape[4];
        t->shape[1] = cache->num_kv_heads;
        t->shape[3] = cache->block_size;
    }
}

static inline void make_cache(struct kvx_case *c, kvx_cache_desc_t *cache, int layout, int strides,
                              kvx_dtype_t dtype)
{
    cache->size = sizeof(*cache);
    cache->k = new_tensor(dtype, KVX_LAYOUT_INVALID);
    shape_cache_tensor(c, cache, layout, &cache->k);
    place_tensor(c, &cache->k, strides, c->misalign);
    cache->v = new_tensor(dtype, KVX_LAYOUT_INVALID);
    shape_cache_tensor(c, cache, layout, &cache->v);
    if (strides == 2 && memcmp(cache->v.shape, cache->k.shape, sizeof(cache->k.shape)) == 0) {
        memcpy(cache->v.stride, cache->k.stride, sizeof(cache->k.stride));
        cache->v.data = (char *)cache->k.data +
                        cache->k.shape[cache->k.ndim - 1] * (int64_t)ref_format(dtype).bytes;
        return;
    }
    place_tensor(c, &cache->v, strides, c->misalign);
}

static inline void pick_sizes(struct kvx_case *c)
{
    static const uint32_t blocks[] = {1, 2, 3, 4, 5, 8, 16, 17};
    static const uint32_t dims[] = {1, 2, 3, 7, 8, 16, 24, 32, 40, 64, 80, 96, 128};
    struct dice *d = &c->dice;
    uint32_t block = blocks[below(d, 8)];

    if (c->kind == CASE_OFFSETS)
        block = 1U << below(d, 5);
    c->cache.block_size = c->large ? 16 : block;
    c->cache.num_blocks = c->large ? 24 : 1 + below(d, 9);
    c->cache.num_kv_heads = c->large ? 8 : 1 + below(d, 4);
    c->cache.head_dim = c->large ? 128 : dims[below(d, 13)];
    if (c->aligned)
        c->cache.head_dim = 16 * (1 + below(d, 9));
    if (!c->large && !c->aligned &&
        chance(d, 1)) /* around the longest row that the CPU path stages */
        c->cache.head_dim = 1016 + 8 * below(d, 3) + below(d, 2);
}

static inline void make_io_tensor(struct kvx_case *c, kvx_tensor_desc_t *t, uint32_t rank,
                                  const int64_t *rows)
{
    static const int kinds[] = {0, 0, 0, 1, 2, 4, 5, 6, 7};

    *t = new_tensor(c->io_dtype,
                    chance(&c->dice, 50) ? KVX_LAYOUT_BLOCK_CUSTOM : KVX_LAYOUT_INVALID);
    t->ndim = rank;
    for (uint32_t i = 0; i < rank - 2; i++)
        t->shape[i] = rows[i];
    t->shape[rank - 2] = c->cache.num_kv_heads;
    t->shape[rank - 1] = c->cache.head_dim;
    if (c->aligned)
        place_tensor(c, t, aligned_strides(&c->dice), 0);
    else
        place_tensor(c, t, c->large ? 0 : kinds[below(&c->dice, 9)],
                     chance(&c->dice, 70) ? 0 : (int)below(&c->dice, 5));
}

static inline void make_io(struct kvx_case *c, kvx_kv_io_desc_t *io, uint32_t rank,
                           const int64_t *rows)
{
    io->size = sizeof(*io);
    io->num_tokens = 1;
    for (uint32_t i = 0; i < rank - 2; i++)
        io->num_tokens *= (uint32_t)rows[i];
    io->num_kv_heads = c->cache.num_kv_heads;
    io->head_dim = c->cache.head_dim;
    make_io_tensor(c, &io->key, rank, rows);
    make_io_tensor(c, &io->value, rank, rows);
}

static inline void *new_indices(struct kvx_case *c, const int64_t *values, uint64_t n, bool wide)
{
    char *data = arena_add(c, n * (wide ? 8 : 4), 0);

    for (uint64_t i = 0; i < n; i++) {
        int32_t narrow = (int32_t)values[i];

        if (wide)
            memcpy(data + i * 8, &values[i], 8);
        else
            memcpy(data + i * 4, &narrow, 4);
    }
    return data;
}

static inline void make_scale(struct kvx_case *c, const kvx_cache_desc_t *cache,
                              kvx_scale_desc_t *s, bool by_block)
{
    static const float some[] = {1.0F, 0.5F, 0.0123F, 3.7F, 0.333333F, 2.0F, 1e-3F, 96.0F};
    uint32_t granularity = 1 + below(&c->dice, 4);
    kvx_tensor_desc_t shape = {.dtype = KVX_DTYPE_F32};
    int64_t low;
    size_t n;
    char *data;

    if (!by_block && granularity % 2 == 0)
        granularity--;
    shape.ndim = granularity == 1 ? below(&c->dice, 2) : granularity == 4 ? 2 : 1;
    shape.shape[0] = granularity == 1   ? 1
                     : granularity == 3 ? cache->num_kv_heads
                                        : cache->num_blocks;
    shape.shape[1] = cache->num_kv_heads;
    n = make_strides(&c->dice, (int)below(&c->dice, N_STRIDE_KINDS), &shape, &low);
    data = arena_add(c, n * 4, 0);
    for (size_t i = 0; i < n; i++)
        memcpy(data + 4 * i, &some[below(&c->dice, 8)], 4);
    *s = (kvx_scale_desc_t){.size = sizeof(*s),
                            .dtype = KVX_DTYPE_F32,
                            .granularity = (kvx_scale_granularity_t)granularity,
                            .ndim = shape.ndim,
                            .data = data + low * 4};
    memcpy(s->shape, shape.shape, sizeof(s->shape));
    memcpy(s->stride, shape.stride, sizeof(s->stride));
}

/* --------------------------------------------------------------------------------------------- */
/* Calls */

static inline uint32_t common_divisor(uint32_t a, uint32_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

/* Distinct slots in an order that has runs, jumps, blocks that follow each other, and holes. */
static inline void make_write(struct kvx_case *c)
{
    uint32_t n_slots = c->cache.num_blocks * c->cache.block_size;
    uint32_t n = c->large ? n_slots : below(&c->dice, n_slots + 1);
    int64_t rows[] = {n}, *slots = malloc((n + 1) * sizeof(*slots));
    uint32_t first = below(&c->dice, n_slots), step = chance(&c->dice, 60) ? 1 : 7;

    while (common_divisor(n_slots, step) != 1)
        step += 2; /* a step that is coprime visits each slot once */
    for (uint32_t i = 0; i < n; i++)
        slots[i] = (int64_t)((first + (uint64_t)i * step) % n_slots);
    c->write.slots.invalid_slot = chance(&c->dice, 50) || !n ? -1 : slots[below(&c->dice, n)];
    for (uint32_t i = 0; i < n; i++) {
        if (chance(&c->dice, c->large ? 1 : 10))
            slots[i] = chance(&c->dice, 50) ? c->write.slots.invalid_slot : -1 - (int64_t)i;
        else if (chance(&c->dice, c->options.flags || chance(&c->dice, 1) ? 8 : 0))
            slots[i] = n_slots + below(&c->dice, 3) * (c->wide ? (int64_t)1 << 40 : 5);
    }
    c->write.size = sizeof(c->write);
    c->write.slots.size = sizeof(c->write.slots);
    c->write.slots.dtype = c->wide ? KVX_DTYPE_S64 : KVX_DTYPE_S32;
    c->write.slots.token_count = n;
    c->write.slots.slots = new_indices(c, slots, n, c->wide);
    free(slots);
    make_io(c, &c->write.io, 3, rows);
    if (chance(&c->dice, 40)) {
        make_scale(c, &c->cache, &c->write.k_scale_desc, true);
        make_scale(c, &c->cache, &c->write.v_scale_desc, true);
    } else if (chance(&c->dice, 50)) {
        make_scale(c, &c->cache, &c->scales[0], false);
        c->write.k_scale = c->scales[0].data;
        c->write.v_scale = chance(&c->dice, 50) ? c->write.k_scale : NULL;
    }
}

static inline int64_t random_block(struct kvx_case *c)
{
    uint32_t bad = c->options.flags & KVX_OPTION_DROP_OUT_OF_RANGE ? 6 : 0;

    if (c->kind == CASE_OFFSETS) {
        bool second = c->cache.pool.secondary ? chance(&c->dice, 40) : chance(&c->dice, bad);
        uint64_t limit = second ? c->options.secondary_blocks : c->options.primary_blocks;

        if (chance(&c->dice, 5))
            return -1;
        if (chance(&c->dice, bad))
            return (int64_t)(limit + below(&c->dice, 9)) | (second ? INT32_MIN : 0);
        return (int64_t)below(&c->dice, (uint32_t)limit ? (uint32_t)limit : 1) |
               (second ? INT32_MIN : 0);
    }
    if (chance(&c->dice, 3))
        return -1 - (int64_t)below(&c->dice, 5);
    if (chance(&c->dice, bad))
        return c->cache.num_blocks + below(&c->dice, 4);
    return below(&c->dice, c->cache.num_blocks);
}

/* Ids of a sequence: random, or following each other. */
static inline int64_t next_block(struct kvx_case *c, int64_t before)
{
    if (chance(&c->dice, 40) && before >= 0 && before + 1 < c->cache.num_blocks &&
        c->kind != CASE_OFFSETS)
        return before + 1;
    return random_block(c);
}

static inline void make_ragged(struct kvx_case *c, kvx_block_table_t *t, const int64_t *lengths)
{
    int64_t *indptr = malloc(((size_t)t->seq_count + 1) * sizeof(*indptr)), total = 0;
    int64_t *ids;
    bool wide = chance(&c->dice, 50);

    for (uint32_t s = 0; s < t->seq_count; s++) {
        indptr[s] = total;
        total += lengths[s] + below(&c->dice, 3);
    }
    indptr[t->seq_count] = total;
    ids = malloc(((size_t)total + 1) * sizeof(*ids));
    for (uint32_t s = 0; s < t->seq_count; s++) {
        for (int64_t i = indptr[s]; i < indptr[s + 1]; i++)
            ids[i] = (i - indptr[s]) % c->cache.block_size && !chance(&c->dice, 2)
                         ? ids[i - 1]
                         : next_block(c, i ? ids[i - 1] : -1);
    }
    t->indices_count = (uint32_t)total;
    t->indices = new_indices(c, ids, (uint64_t)total, c->wide);
    t->indptr_count = t->seq_count + 1;
    t->indptr_dtype = wide ? KVX_DTYPE_S64 : KVX_DTYPE_S32;
    t->indptr = new_indices(c, indptr, t->indptr_count, wide);
    free(indptr);
    free(ids);
}

static inline void make_rectangle(struct kvx_case *c, kvx_block_table_t *t)
{
    uint32_t n = t->seq_count * t->max_blocks_per_seq;
    int64_t *ids;

    if (c->kind == CASE_OFFSETS)
        n *= 2 * t->beam_width;
    ids = malloc(n * sizeof(*ids));
    for (uint32_t i = 0; i < n; i++)
        ids[i] = next_block(c, i ? ids[i - 1] : -1);
    t->indices_count = n;
    t->indices = new_indices(c, ids, n, c->wide);
    free(ids);
}

/* Pools that hold more blocks than num_blocks says, with room between them. */
static inline void make_pools(struct kvx_case *c)
{
    unsigned bytes = ref_format(c->cache_dtype).bytes;
    int64_t most = 0;

    for (int kv = 0; kv < 2; kv++) {
        kvx_tensor_desc_t *t = kv ? &c->cache.v : &c->cache.k;
        int64_t end = 1;

        for (uint32_t i = 1; i < t->ndim; i++)
            end += (t->shape[i] - 1) * t->stride[i];
        most = end > most ? end : most;
    }
    c->cache.pool.size = sizeof(c->cache.pool);
    c->cache.pool.memory = KVX_MEMORY_HOST;
    c->cache.pool.bytes_per_block = (uint32_t)most * bytes + bytes * below(&c->dice, 9);
    if (c->aligned)
        c->cache.pool.bytes_per_block = (c->cache.pool.bytes_per_block + 15) / 16 * 16;
    c->options.primary_blocks = 3 + below(&c->dice, 9);
    c->options.secondary_blocks = 2 + below(&c->dice, 5);
    c->cache.pool.primary =
        arena_add(c, c->cache.pool.bytes_per_block * c->options.primary_blocks, 0);
    if (chance(&c->dice, 70))
        c->cache.pool.secondary =
            arena_add(c, c->cache.pool.bytes_per_block * c->options.secondary_blocks,
                      c->aligned ? 16 : bytes);
}

static inline void make_gather(struct kvx_case *c)
{
    kvx_gather_desc_t *g = &c->gather;
    kvx_block_table_t *t = &g->block_table;
    int64_t lengths[8], rows3[1], rows4[2], rows5[3];
    bool wide = chance(&c->dice, 50);
    uint32_t rank = 3 + below(&c->dice, 3);

    if (c->kind == CASE_OFFSETS)
        make_pools(c);
    g->size = sizeof(*g);
    t->size = sizeof(*t);
    t->seq_count = 1 + below(&c->dice, 5);
    t->beam_width = c->kind == CASE_OFFSETS ? 1 + below(&c->dice, 3) : 1;
    t->max_blocks_per_seq = 1 + below(&c->dice, c->large ? 8 : 4);
    g->max_seq_len = 1 + below(&c->dice, t->max_blocks_per_seq * c->cache.block_size + 3);
    for (uint32_t s = 0; s < t->seq_count; s++) {
        uint32_t most = t->max_blocks_per_seq * c->cache.block_size;

        lengths[s] = chance(&c->dice, 20) ? most : below(&c->dice, most + 1);
        if (chance(&c->dice, c->options.flags ? 10 : 1))
            lengths[s] += 3;
    }
    t->format = c->kind == CASE_PACKED   ? KVX_BLOCK_TABLE_PACKED
                : c->kind == CASE_RAGGED ? KVX_BLOCK_TABLE_RAGGED
                                         : KVX_BLOCK_TABLE_KV_OFFSETS;
    c->wide = c->wide && c->kind != CASE_OFFSETS;
    t->index_dtype = c->wide ? KVX_DTYPE_S64 : KVX_DTYPE_S32;
    t->flags = c->kind == CASE_OFFSETS ? KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX : 0;
    if (c->kind == CASE_RAGGED)
        make_ragged(c, t, lengths);
    else
        make_rectangle(c, t);
    if (c->kind == CASE_RAGGED && chance(&c->dice, 2))
        lengths[0] += 4; /* more than its indices */
    g->seq_lens = (kvx_seq_lens_t){.size = sizeof(g->seq_lens),
                                   .dtype = wide ? KVX_DTYPE_S64 : KVX_DTYPE_S32,
                                   .seq_count = t->seq_count,
                                   .lengths = new_indices(c, lengths, t->seq_count, wide)};
    rows3[0] = (int64_t)t->seq_count * t->beam_width * g->max_seq_len;
    rows4[0] = (int64_t)t->seq_count * t->beam_width;
    rows5[0] = t->seq_count;
    rows5[1] = t->beam_width;
    rows4[1] = rows5[2] = g->max_seq_len;
    make_io(c, &g->io, rank, rank == 3 ? rows3 : rank == 4 ? rows4 : rows5);
    if (chance(&c->dice, 60)) {
        for (int i = 0; i < 2; i++) {
            make_scale(c, &c->cache, &c->scales[i], c->kind != CASE_OFFSETS);
            c->scale_list[i] = &c->scales[i];
        }
        c->options.k_scales = &c->scale_list[0];
        c->options.v_scales = &c->scale_list[1];
    }
}

static inline void make_copy(struct kvx_case *c)
{
    kvx_block_copy_t *p = &c->copy;
    uint32_t more = below(&c->dice, 3), n = 0;
    int64_t from[16], to[16];

    c->target.block_size = c->cache.block_size;
    c->target.head_dim = c->cache.head_dim;
    c->target.num_blocks = 1 + below(&c->dice, 9);
    c->target.num_kv_heads = c->cache.num_kv_heads + more;
    make_cache(c, &c->target, (int)below(&c->dice, 5),
               c->aligned ? aligned_strides(&c->dice) : (int)below(&c->dice, N_STRIDE_KINDS),
               c->io_dtype);
    for (uint32_t i = 0; i < c->target.num_blocks; i++) {
        if (chance(&c->dice, 30))
            continue;
        from[n] = random_block(c);
        to[n++] = i + (chance(&c->dice, c->options.flags ? 5 : 0) ? 100 : 0);
    }
    p->size = sizeof(*p);
    p->index_dtype = c->wide ? KVX_DTYPE_S64 : KVX_DTYPE_S32;
    p->count = n;
    p->src_blocks = new_indices(c, from, n, c->wide);
    p->dst_blocks = new_indices(c, to, n, c->wide);
    if (more || chance(&c->dice, 50)) {
        p->num_heads = 1 + below(&c->dice, c->cache.num_kv_heads);
        p->src_head = below(&c->dice, c->cache.num_kv_heads - p->num_heads + 1);
        p->dst_head = below(&c->dice, c->target.num_kv_heads - p->num_heads + 1);
    }
    if (chance(&c->dice, 60)) {
        make_scale(c, &c->cache, &c->scales[0], true);
        make_scale(c, &c->cache, &c->scales[1], true);
        make_scale(c, &c->target, &c->scales[2], true);
        make_scale(c, &c->target, &c->scales[3], true);
        p->src_k_scale = &c->scales[0];
        p->src_v_scale = chance(&c->dice, 80) ? &c->scales[1] : NULL;
        p->dst_k_scale = chance(&c->dice, 80) ? &c->scales[2] : NULL;
        p->dst_v_scale = &c->scales[3];
    }
}

static inline void case_make(struct kvx_case *c)
{
    c->dice.state = c->seed | 1;
    c->options.size = sizeof(c->options);
    if (chance(&c->dice, 25))
        c->options.flags |= KVX_OPTION_DROP_OUT_OF_RANGE;
    if (chance(&c->dice, 30))
        c->options.flags |= KVX_OPTION_ZERO_PADDING;
    c->options.phase = (kvx_phase_t)below(&c->dice, 4);
    c->dropped = arena_add(c, sizeof(*c->dropped), 0);
    *c->dropped = 5;
    c->options.dropped = chance(&c->dice, 80) ? c->dropped : NULL;
    pick_sizes(c);
    make_cache(c, &c->cache, c->layout, c->kind == CASE_OFFSETS && c->strides == 7 ? 6 : c->strides,
               c->cache_dtype);
    if (c->kind == CASE_WRITE)
        make_write(c);
    else if (c->kind == CASE_COPY)
        make_copy(c);
    else
        make_gather(c);
}

/* --------------------------------------------------------------------------------------------- */
/* Running a case */

static inline void place_tensor_desc(const struct kvx_case *c, kvx_tensor_desc_t *t,
                                     kvx_memory_type_t memory)
{
    t->data = placed(c, t->data);
    t->memory = memory;
}

static inline kvx_cache_desc_t place_cache(const struct kvx_case *c, const kvx_cache_desc_t *cache,
                                           kvx_memory_type_t memory)
{
    kvx_cache_desc_t copy = *cache;

    place_tensor_desc(c, &copy.k, memory);
    place_tensor_desc(c, &copy.v, memory);
    copy.pool.memory = memory;
    copy.pool.primary = placed(c, copy.pool.primary);
    copy.pool.secondary = placed(c, copy.pool.secondary);
    return copy;
}

static inline kvx_status_t call_library(const struct kvx_case *c,
                                        const struct kvx_place_hooks *hooks)
{
    kvx_cache_desc_t cache = place_cache(c, &c->cache, hooks->memory);
    kvx_cache_desc_t target = place_cache(c, &c->target, hooks->memory);
    const kvx_cache_desc_t *caches[] = {&cache};
    kvx_write_desc_t write = c->write;
    kvx_gather_desc_t gather = c->gather;
    const kvx_write_desc_t *writes[] = {&write};
    const kvx_gather_desc_t *gathers[] = {&gather};
    kvx_block_copy_t copy = c->copy;
    kvx_options_t options = c->options;
    kvx_scale_desc_t scales[4];
    const kvx_scale_desc_t *lists[4] = {&scales[0], &scales[1], &scales[2], &scales[3]};
    kvx_kv_io_desc_t *io = c->kind == CASE_WRITE ? &write.io : &gather.io;

    for (int i = 0; i < 4; i++) {
        scales[i] = c->scales[i];
        scales[i].data = placed(c, scales[i].data);
    }
    options.dropped = placed(c, options.dropped);
    options.k_scales = options.k_scales ? &lists[0] : NULL;
    options.v_scales = options.v_scales ? &lists[1] : NULL;
    place_tensor_desc(c, &io->key, hooks->memory);
    place_tensor_desc(c, &io->value, hooks->memory);
    switch (c->kind) {
    case CASE_WRITE:
        write.slots.slots = placed(c, write.slots.slots);
        write.k_scale = placed(c, write.k_scale);
        write.v_scale = placed(c, write.v_scale);
        write.k_scale_desc.data = placed(c, write.k_scale_desc.data);
        write.v_scale_desc.data = placed(c, write.v_scale_desc.data);
        if (!options.flags && !options.phase && !options.dropped)
            return kvx_write_kv(&cache, &write, hooks->stream);
        return kvx_write_kv_layers(caches, writes, 1, &options, hooks->stream);
    case CASE_COPY:
        copy.src_blocks = placed(c, copy.src_blocks);
        copy.dst_blocks = placed(c, copy.dst_blocks);
        copy.src_k_scale = copy.src_k_scale ? lists[0] : NULL;
        copy.src_v_scale = copy.src_v_scale ? lists[1] : NULL;
        copy.dst_k_scale = copy.dst_k_scale ? lists[2] : NULL;
        copy.dst_v_scale = copy.dst_v_scale ? lists[3] : NULL;
        return kvx_copy_blocks(&cache, &target, &copy, &options, hooks->stream);
    default:
        gather.block_table.indices = placed(c, gather.block_table.indices);
        gather.block_table.indptr = placed(c, gather.block_table.indptr);
        gather.seq_lens.lengths = placed(c, gather.seq_lens.lengths);
        if (!options.flags && !options.k_scales && !options.dropped && c->kind != CASE_OFFSETS)
            return kvx_gather_kv(&cache, &gather, hooks->stream);
        return kvx_gather_kv_layers(caches, gathers, 1, &options, hooks->stream);
    }
}

static inline kvx_status_t call_reference(struct kvx_case *c, bool drop)
{
    uint64_t dropped = 0;
    kvx_options_t options = c->options;
    kvx_status_t status;

    if (drop)
        options.flags |= KVX_OPTION_DROP_OUT_OF_RANGE;
    drop = (options.flags & KVX_OPTION_DROP_OUT_OF_RANGE) != 0;
    if (c->kind == CASE_WRITE)
        status = ref_write(&c->cache, &c->write, drop, &dropped);
    else if (c->kind == CASE_COPY)
        status = ref_copy(&c->cache, &c->target, &c->copy, drop, &dropped);
    else
        status = ref_gather(&c->cache, &c->gather, &options, &dropped);
    if (c->options.dropped)
        *c->dropped += dropped;
    return status;
}

static inline void case_describe(const struct kvx_case *c, FILE *to)
{
    fprintf(
        to,
        "kind=%d layout=%d strides=%d cache=%d io=%d wide=%d misalign=%d large=%d aligned=%d "
        "seed=%#llx | blocks=%u size=%u heads=%u dim=%u pack=%lld flags=%u phase=%u tokens=%u\n",
        (int)c->kind, c->layout, c->strides, (int)c->cache_dtype, (int)c->io_dtype, c->wide,
        c->misalign, c->large, c->aligned, (unsigned long long)c->seed, c->cache.num_blocks,
        c->cache.block_size, c->cache.num_kv_heads, c->cache.head_dim,
        (long long)c->cache.k.shape[4], c->options.flags, (unsigned)c->options.phase,
        c->kind == CASE_WRITE ? c->write.io.num_tokens : c->gather.io.num_tokens);
}

/**
 * Make the case, run it both ways, compare every byte. On device memory indices out of range are
 * never an error. Returns true when all agree; says what doesn't. *@status receives the library's.
 */
static inline bool case_run(struct kvx_case *c, const struct kvx_place_hooks *hooks,
                            kvx_status_t *status)
{
    kvx_status_t expected;
    bool good = true;

    case_make(c);
    for (unsigned i = 0; i < c->n_arenas; i++)
        c->arenas[i].placed = hooks->put(c->arenas[i].bytes, c->arenas[i].n);
    *status = call_library(c, hooks);
    expected = call_reference(c, hooks->memory != KVX_MEMORY_HOST);
    if (*status != expected) {
        fprintf(stderr, "status %d, expected %d: ", (int)*status, (int)expected);
        good = false;
    }
    for (unsigned i = 0; i < c->n_arenas; i++) {
        struct arena *a = &c->arenas[i];
        char *found = malloc(a->n);
        size_t at = 0;

        hooks->get(found, a->placed, a->n);
        while (good && at < a->n && found[at] == a->bytes[at])
            at++;
        if (good && at < a->n) {
            fprintf(stderr, "arena %u of %u differs at %zu of %zu (%02x, expected %02x): ", i,
                    c->n_arenas, at, a->n, (unsigned char)found[at], (unsigned char)a->bytes[at]);
            good = false;
        }
        free(found);
        hooks->drop(a->placed);
        free(a->bytes);
    }
    if (!good)
        case_describe(c, stderr);
    return good;
}

/* --------------------------------------------------------------------------------------------- */
/* The matrix */

struct kvx_matrix {
    uint64_t seed;
    uint32_t scale; /* percent of all combinations */
    uint64_t n_run, n_ok, n_out_of_range, n_failed;
};

static inline void matrix_one(struct kvx_matrix *m, const struct kvx_place_hooks *hooks,
                              struct kvx_case *c)
{
    kvx_status_t status;

    m->n_run++;
    if (!case_run(c, hooks, &status))
        m->n_failed++;
    else if (status == KVX_STATUS_OK)
        m->n_ok++;
    else
        m->n_out_of_range++;
}

/*
 * Every kind x layout x dtype pair, aligned. Of the other cases few are, and of these few convert.
 * Never less than a fifth of these.
 */
static inline void matrix_aligned(struct kvx_matrix *m, const struct kvx_place_hooks *hooks,
                                  struct dice *pick)
{
    for (uint32_t i = 0; i < N_CASE_KINDS * 5 * 25 * 2 && m->n_failed < 20; i++) {
        uint32_t n = i;
        struct kvx_case c = {.seed = roll(pick), .aligned = true};

        c.kind = n % N_CASE_KINDS;
        n /= N_CASE_KINDS;
        c.layout = (int)(n % 5);
        n /= 5;
        c.cache_dtype = (kvx_dtype_t)(1 + n % 5);
        n /= 5;
        c.io_dtype = (kvx_dtype_t)(1 + n % 5);
        c.strides = aligned_strides(pick);
        c.wide = chance(pick, 50);
        if (m->scale < 100 && !chance(pick, m->scale > 20 ? m->scale : 20))
            continue;
        matrix_one(m, hooks, &c);
    }
}

/** Every kind x layout x strides x dtype pair x index dtype x alignment, each with random sizes. */
static inline void matrix_run(struct kvx_matrix *m, const struct kvx_place_hooks *hooks)
{
    struct dice pick = {m->seed | 1};

    for (uint32_t i = 0; i < N_CASE_KINDS * 5 * N_STRIDE_KINDS * 25 * 2 * 2 && m->n_failed < 20;
         i++) {
        uint32_t n = i;
        struct kvx_case c = {.seed = roll(&pick)};

        c.kind = n % N_CASE_KINDS;
        n /= N_CASE_KINDS;
        c.layout = (int)(n % 5);
        n /= 5;
        c.strides = (int)(n % N_STRIDE_KINDS);
        n /= N_STRIDE_KINDS;
        c.cache_dtype = (kvx_dtype_t)(1 + n % 5);
        n /= 5;
        c.io_dtype = (kvx_dtype_t)(1 + n % 5);
        n /= 5;
        c.wide = n % 2;
        c.misalign = n / 2 % 2 ? 1 + (int)below(&pick, 7) : 0;
        if (m->scale < 100 && !chance(&pick, m->scale))
            continue;
        matrix_one(m, hooks, &c);
    }
    matrix_aligned(m, hooks, &pick);
    for (uint32_t i = 0; i < 5 * 5 * m->scale / 100 + 3 && m->n_failed < 20; i++) {
        static const kvx_dtype_t pairs[][2] = {{KVX_DTYPE_F16, KVX_DTYPE_F16},
                                               {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F16},
                                               {KVX_DTYPE_BF16, KVX_DTYPE_BF16},
                                               {KVX_DTYPE_F8_E4M3, KVX_DTYPE_BF16},
                                               {KVX_DTYPE_F32, KVX_DTYPE_F32}};
        struct kvx_case c = {.seed = roll(&pick), .large = true};
        uint32_t n;

        c.kind = i % N_CASE_KINDS;
        c.layout = (int)(i / N_CASE_KINDS % 5);
        n = (i + i / 5) % 5; /* not the same pair for each kind */
        c.cache_dtype = pairs[n][0];
        c.io_dtype = pairs[n][1];
        c.wide = true;
        matrix_one(m, hooks, &c);
    }
}

#endif
