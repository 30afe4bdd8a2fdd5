// SPDX-License-Identifier: Apache-2.0
/* kvx_ext.h: options and their sizes, layers, adapters, DLPack, backends, threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvx/kvx_reference.h"
#include "kvx/kvx_sample.h"
#include "skip.h"

enum { OK = KVX_STATUS_OK, INV = KVX_STATUS_INVALID_ARGUMENT, UNS = KVX_STATUS_UNSUPPORTED };
enum { RANGE = KVX_STATUS_OUT_OF_RANGE };

/* --------------------------------------------------------------------------------------------- */
/* Options and layers */

static void test_options(void **state)
{
    struct sample *s = malloc(sizeof(*s));
    const kvx_cache_desc_t *caches[] = {&s->cache};
    const kvx_write_desc_t *writes[] = {&s->write};
    kvx_options_t o = {.size = sizeof(o)};
    uint64_t dropped = 0;

    (void)state;
    sample_init(s);
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, NULL, NULL), OK);
    assert_int_equal(kvx_write_kv_layers(caches, writes, 0, &o, NULL), OK);
    assert_int_equal(kvx_write_kv_layers(NULL, NULL, 0, NULL, NULL), OK);
    assert_int_equal(kvx_write_kv_layers(NULL, writes, 1, NULL, NULL), INV);
    assert_int_equal(kvx_write_kv_layers(caches, NULL, 1, NULL, NULL), INV);
    o.size = 4;
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), INV);
    o.size = sizeof(o) + 100; /* newer */
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), OK);
    o.flags = 1U << 31;
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), INV);
    o.flags = 0;
    o.phase = (kvx_phase_t)4;
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), INV);
    o.phase = KVX_PHASE_DECODE;
    o.dropped = (uint64_t *)(void *)((char *)&dropped + 1);
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), UNS);

    /* a short struct's missing fields count as zero: the counter isn't there */
    s->slots[1] = 500;
    o = (kvx_options_t){.size = 8, .flags = KVX_OPTION_DROP_OUT_OF_RANGE, .dropped = &dropped};
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), OK);
    assert_int_equal(dropped, 0);
    for (o.size = 9; o.size < offsetof(kvx_options_t, dropped) + sizeof(o.dropped); o.size++)
        assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), OK);
    assert_int_equal(dropped, 0); /* nor is half of it */
    o.size = sizeof(o);
    assert_int_equal(kvx_write_kv_layers(caches, writes, 1, &o, NULL), OK);
    assert_int_equal(dropped, 1);
    free(s);
}

enum { LAYERS = 70 };

struct layers {
    struct sample s[LAYERS];
    const kvx_cache_desc_t *caches[LAYERS];
    const kvx_write_desc_t *writes[LAYERS];
    const kvx_gather_desc_t *gathers[LAYERS];
};

static struct layers *new_layers(void)
{
    struct layers *l = malloc(sizeof(*l));

    assert_non_null(l);
    for (int i = 0; i < LAYERS; i++) {
        sample_init(&l->s[i]);
        l->s[i].key[0] = (float)i;
        l->s[i].write.slots.slots = l->s[0].slots;
        l->caches[i] = &l->s[i].cache;
        l->writes[i] = &l->s[i].write;
        l->gathers[i] = &l->s[i].gather;
    }
    return l;
}

/* More layers than a plan holds; one in the middle has another layout and its own slots. */
static void test_layers(void **state)
{
    struct layers *l = new_layers();
    uint64_t dropped = 0;
    kvx_options_t o = {.size = sizeof(o), .dropped = &dropped};
    struct sample *odd = &l->s[40];

    (void)state;
    odd->cache.k.layout = odd->cache.v.layout = KVX_LAYOUT_BLOCK_CUSTOM;
    odd->cache.k.stride[1] = odd->cache.v.stride[1] = SAMPLE_DIM; /* HND in memory */
    odd->cache.k.stride[2] = odd->cache.v.stride[2] = SAMPLE_SIZE * SAMPLE_DIM;
    odd->write.slots.slots = odd->slots;
    odd->slots[0] = 7;
    assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, LAYERS, &o, NULL), OK);
    for (int i = 0; i < LAYERS; i++) {
        struct sample *s = &l->s[i];

        for (int t = 0; t < SAMPLE_TOKENS; t++) {
            const int64_t *slots = i == 40 ? odd->slots : l->s[0].slots;

            for (int d = 0; slots[t] >= 0 && d < SAMPLE_ROW; d++) {
                const float *at = (float *)(void *)ref_cache_at(&s->cache.k, slots[t] / SAMPLE_SIZE,
                                                                slots[t] % SAMPLE_SIZE,
                                                                d / SAMPLE_DIM, d % SAMPLE_DIM);

                assert_true(*at == s->key[t * SAMPLE_ROW + d]);
            }
        }
    }
    assert_int_equal(dropped, 0);
    /* back again */
    for (int i = 0; i < LAYERS; i++) {
        memset(l->s[i].key, 0, sizeof(l->s[i].key));
        memset(l->s[i].value, 0, sizeof(l->s[i].value));
    }
    assert_int_equal(kvx_gather_kv_layers(l->caches, l->gathers, LAYERS, &o, NULL), OK);
    /* sequence 0: blocks 2, 0; slot 8 was written from token 5, slot 0 from token 0 (odd: 7) */
    for (int i = 0; i < LAYERS; i++) {
        assert_true(l->s[i].key[1] == (float)(5 * SAMPLE_ROW + 1) + 0.5F);
        assert_true(l->s[i].key[4 * SAMPLE_ROW] == (i == 40 ? 0.0F : (float)i));
    }
    free(l);
}

/* A bad layer among many: none is written. A bad index: counted once, not once per layer. */
static void test_layers_are_all_or_nothing(void **state)
{
    struct layers *l = new_layers();
    uint64_t dropped = 0;
    kvx_options_t o = {.size = sizeof(o), .dropped = &dropped};
    float k0 = l->s[0].k[0];

    (void)state;
    l->s[60].write.io.key.ndim = 2;
    assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, LAYERS, &o, NULL), INV);
    assert_true(l->s[0].k[1] == 0.0F && l->s[0].k[0] == k0);
    l->s[60].write.io.key.ndim = 3;
    l->caches[69] = NULL;
    assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, LAYERS, &o, NULL), INV);
    l->caches[69] = &l->s[69].cache;
    l->s[69].write.slots.slots = l->s[69].slots;
    l->s[69].slots[2] = 16;
    assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, LAYERS, &o, NULL), RANGE);
    assert_true(l->s[0].k[1] == 0.0F);
    l->s[69].write.slots.slots = l->s[0].slots;
    l->s[0].slots[2] = 16;
    l->s[40].cache.k.layout = l->s[40].cache.v.layout = KVX_LAYOUT_BLOCK_CUSTOM;
    l->s[40].cache.k.stride[1] = SAMPLE_DIM; /* other strides: a plan of its own, the same slots */
    l->s[40].cache.k.stride[2] = SAMPLE_SIZE * SAMPLE_DIM;
    o.flags = KVX_OPTION_DROP_OUT_OF_RANGE;
    assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, LAYERS, &o, NULL), OK);
    assert_int_equal(dropped, 1);
    assert_true(l->s[69].k[1] == l->s[69].key[1]);
    free(l);
}

/* --------------------------------------------------------------------------------------------- */
/* Copy */

static void test_copy_errors(void **state)
{
    struct sample *s = malloc(2 * sizeof(*s));
    int32_t src[] = {0, 1}, dst[] = {2, 3};
    kvx_block_copy_t c = {.size = sizeof(c),
                          .index_dtype = KVX_DTYPE_S32,
                          .count = 2,
                          .src_blocks = src,
                          .dst_blocks = dst};
    kvx_cache_desc_t *a = &s[0].cache, *b = &s[1].cache;
    kvx_block_copy_t bad;

    (void)state;
    sample_init(&s[0]);
    sample_init(&s[1]);
#define COPY(change, status)                                               \
    do {                                                                   \
        bad = c;                                                           \
        change;                                                            \
        assert_int_equal(kvx_copy_blocks(a, b, &bad, NULL, NULL), status); \
    } while (0)
    COPY((void)0, OK);
    assert_int_equal(kvx_copy_blocks(NULL, b, &c, NULL, NULL), INV);
    assert_int_equal(kvx_copy_blocks(a, NULL, &c, NULL, NULL), INV);
    assert_int_equal(kvx_copy_blocks(a, b, NULL, NULL, NULL), INV);
    COPY(bad.size = 8, INV);
    COPY(bad.index_dtype = KVX_DTYPE_U32, INV);
    COPY(bad.src_blocks = NULL, INV);
    COPY((bad.src_blocks = NULL, bad.dst_blocks = NULL, bad.count = 0), OK);
    COPY(bad.src_blocks = (char *)src + 1, UNS);
    COPY(bad.src_head = 1, INV);
    COPY((bad.num_heads = 2, bad.src_head = 1), INV);
    COPY((bad.num_heads = 1, bad.src_head = 1, bad.dst_head = 0), OK);
    COPY((bad.num_heads = 1, bad.dst_head = UINT32_MAX), INV);
    COPY(bad.dst_blocks = s[1].k, INV);
    b->v.data = (char *)s[0].v + 64; /* overlaps the source, but isn't it */
    COPY((void)0, INV);
    b->v.data = s[1].v;
    /* inside one cache */
    assert_int_equal(kvx_copy_blocks(a, a, &c, NULL, NULL), OK);
    bad = c;
    bad.num_heads = 1;
    bad.dst_head = 1;
    assert_int_equal(kvx_copy_blocks(a, a, &bad, NULL, NULL), OK);
    src[1] = 4;
    COPY((void)0, RANGE);
    src[1] = -1;
    COPY((void)0, OK);
    b->v.memory = b->k.memory = KVX_MEMORY_DEVICE;
    COPY((void)0, UNS);
    b->v.memory = b->k.memory = KVX_MEMORY_HOST;
    b->block_size = 2;
    b->k.shape[1] = b->v.shape[1] = 2;
    COPY((void)0, UNS);
    free(s);
}

/* Blocks of more layers than a plan holds; one in the middle has other pairs. All, or none. */
static void test_copy_layers(void **state)
{
    struct layers *from = new_layers(), *to = new_layers();
    int32_t src[] = {0, 3}, dst[] = {2, 1}, other[] = {2, 0};
    kvx_block_copy_t copies[LAYERS];
    const kvx_block_copy_t *list[LAYERS];
    uint64_t dropped = 0;
    kvx_options_t o = {.size = sizeof(o), .dropped = &dropped};
    const size_t block = SAMPLE_SIZE * SAMPLE_ROW;

    (void)state;
    for (int i = 0; i < LAYERS; i++) {
        copies[i] = (kvx_block_copy_t){.size = sizeof(copies[i]),
                                       .index_dtype = KVX_DTYPE_S32,
                                       .count = 2,
                                       .src_blocks = src,
                                       .dst_blocks = i == 40 ? other : dst};
        list[i] = &copies[i];
        for (size_t e = 0; e < 4 * block; e++) {
            from->s[i].k[e] = (float)(i * 1000 + (int)e);
            from->s[i].v[e] = -from->s[i].k[e];
        }
    }
#define COPY_LAYERS(status)                                                                    \
    assert_int_equal(kvx_copy_blocks_layers(from->caches, to->caches, list, LAYERS, &o, NULL), \
                     status)
    assert_int_equal(kvx_copy_blocks_layers(NULL, NULL, NULL, 0, &o, NULL), OK);
    assert_int_equal(kvx_copy_blocks_layers(from->caches, NULL, list, 1, &o, NULL), INV);
    assert_int_equal(kvx_copy_blocks_layers(NULL, to->caches, list, 1, &o, NULL), INV);
    assert_int_equal(kvx_copy_blocks_layers(from->caches, to->caches, NULL, 1, &o, NULL), INV);
    list[69] = NULL;
    COPY_LAYERS(INV);
    list[69] = &copies[69];
    to->caches[33] = NULL;
    COPY_LAYERS(INV);
    to->caches[33] = &to->s[33].cache;
    to->s[5].cache.k.memory = to->s[5].cache.v.memory = KVX_MEMORY_DEVICE;
    COPY_LAYERS(UNS);
    to->s[5].cache.k.memory = to->s[5].cache.v.memory = KVX_MEMORY_HOST;
    other[1] = 4;
    COPY_LAYERS(RANGE);
    for (int i = 0; i < LAYERS; i++)
        assert_true(to->s[i].k[2 * block + 1] == 0.0F && to->s[i].v[block + 1] == 0.0F);
    o.flags = KVX_OPTION_DROP_OUT_OF_RANGE;
    COPY_LAYERS(OK);
    assert_int_equal(dropped, 1);
    src[1] = 5; /* counted once before layer 40, once in it, once behind it */
    COPY_LAYERS(OK);
    assert_int_equal(dropped, 4);
    src[1] = 3;
    for (int i = 0; i < LAYERS; i++) {
        struct sample *a = &from->s[i], *b = &to->s[i];

        assert_memory_equal(&b->k[2 * block], a->k, block * sizeof(float));
        assert_memory_equal(&b->v[2 * block], a->v, block * sizeof(float));
        assert_int_equal(memcmp(&b->k[block], &a->k[3 * block], block * sizeof(float)) == 0,
                         i != 40);
    }
    free(from);
    free(to);
}

/* A token that only the smaller one of two caches has no room for is counted, in either order. */
static void test_dropped_by_a_smaller_layer(void **state)
{
    struct layers *l = new_layers();

    (void)state;
    l->s[0].slots[2] = 13; /* below 16; not below 8 */
    l->s[0].slots[4] = -1;
    l->s[0].slots[5] = 0;
    for (int small = 0; small < 2; small++) {
        uint64_t dropped = 0;
        kvx_options_t o = {
            .size = sizeof(o), .flags = KVX_OPTION_DROP_OUT_OF_RANGE, .dropped = &dropped};
        kvx_cache_desc_t *cache = &l->s[small].cache;

        cache->num_blocks = 2;
        cache->k.shape[0] = cache->v.shape[0] = 2;
        assert_int_equal(kvx_write_kv_layers(l->caches, l->writes, 2, &o, NULL), OK);
        assert_int_equal(dropped, 1);
        cache->num_blocks = SAMPLE_BLOCKS;
        cache->k.shape[0] = cache->v.shape[0] = SAMPLE_BLOCKS;
    }
    free(l);
}

/* --------------------------------------------------------------------------------------------- */
/* Adapters: an engine's own indexing must find what kvx writes */

static kvx_tensor_desc_t engine_tensor(void *data, uint32_t ndim, const int64_t *shape)
{
    kvx_tensor_desc_t t = {
        .dtype = KVX_DTYPE_F32, .memory = KVX_MEMORY_HOST, .ndim = ndim, .data = data};
    int64_t next = 1;

    memcpy(t.shape, shape, ndim * sizeof(*shape));
    for (uint32_t i = ndim; i-- > 0; next *= shape[i])
        t.stride[i] = next;
    return t;
}

enum { NB = SAMPLE_BLOCKS, BS = SAMPLE_SIZE, NH = SAMPLE_HEADS, HS = SAMPLE_DIM, X = 4 };

/* Where the engine keeps (kv, block, offset, head, dim), by its own documentation. */
static size_t engine_index(kvx_engine_layout_t e, size_t kv, size_t b, size_t o, size_t h, size_t d)
{
    size_t v_part = (size_t)NB * NH * HS * BS;

    switch (e) {
    case KVX_ENGINE_VLLM_KV_FIRST: /* [2, nb, bs, nh, hs] */
        return (((kv * NB + b) * BS + o) * NH + h) * HS + d;
    case KVX_ENGINE_VLLM_BLOCKS_FIRST: /* [nb, 2, bs, nh, hs] */
        return (((b * 2 + kv) * BS + o) * NH + h) * HS + d;
    case KVX_ENGINE_VLLM_PACKED: /* [nb, nh, bs, 2 hs] */
        return (((b * NH + h) * BS + o) * 2 + kv) * HS + d;
    case KVX_ENGINE_FLASHINFER_HND: /* [nb, 2, nh, bs, hs] */
        return (((b * 2 + kv) * NH + h) * BS + o) * HS + d;
    case KVX_ENGINE_SPLIT_NHD:
        return kv * v_part + ((b * BS + o) * NH + h) * HS + d;
    case KVX_ENGINE_SPLIT_HND:
        return kv * v_part + ((b * NH + h) * BS + o) * HS + d;
    default: /* K [nb, nh, hs/x, bs, x], V [nb, nh, hs, bs] */
        return kv ? v_part + ((b * NH + h) * HS + d) * BS + o
                  : (((b * NH + h) * (HS / X) + d / X) * BS + o) * X + d % X;
    }
}

static void test_engines(void **state)
{
    static const int64_t shapes[][5] = {
        {2, NB, BS, NH, HS}, {NB, 2, BS, NH, HS}, {NB, NH, BS, 2 * HS},   {NB, 2, NH, BS, HS},
        {NB, BS, NH, HS},    {NB, NH, BS, HS},    {NB, NH, HS / X, BS, X}};
    static const int64_t v_shape[] = {NB, NH, HS, BS};
    static const uint32_t ndims[] = {5, 5, 4, 5, 4, 4, 5};
    float *memory = calloc((size_t)2 * NB * BS * NH * HS, sizeof(float));
    struct sample *s = malloc(sizeof(*s));

    (void)state;
    for (int e = KVX_ENGINE_VLLM_KV_FIRST; e <= KVX_ENGINE_PAGED; e++) {
        kvx_tensor_desc_t kv = engine_tensor(memory, ndims[e - 1], shapes[e - 1]), v = kv;
        bool two = e >= KVX_ENGINE_SPLIT_NHD;

        sample_init(s);
        v.data = memory + (size_t)NB * NH * HS * BS;
        if (e == KVX_ENGINE_PAGED)
            v = engine_tensor(v.data, 4, v_shape);
        assert_int_equal(kvx_cache_from_engine((kvx_engine_layout_t)e, &kv, two ? &v : NULL,
                                               KVX_DTYPE_INVALID, &s->cache),
                         OK);
        assert_int_equal(kvx_write_kv(&s->cache, &s->write, NULL), OK);
        for (size_t t = 0; t < SAMPLE_TOKENS; t++) {
            size_t slot = (size_t)s->slots[t];

            for (size_t i = 0; s->slots[t] >= 0 && i < SAMPLE_ROW; i++) {
                size_t k_at =
                    engine_index((kvx_engine_layout_t)e, 0, slot / BS, slot % BS, i / HS, i % HS);
                size_t v_at =
                    engine_index((kvx_engine_layout_t)e, 1, slot / BS, slot % BS, i / HS, i % HS);

                assert_true(memory[k_at] == s->key[t * SAMPLE_ROW + i]);
                assert_true(memory[v_at] == s->value[t * SAMPLE_ROW + i]);
            }
        }
        /* the wrong number of tensors, and shapes of another engine */
        assert_int_equal(kvx_cache_from_engine((kvx_engine_layout_t)e, &kv, two ? NULL : &v,
                                               KVX_DTYPE_INVALID, &s->cache),
                         INV);
        kv.shape[0] = -1;
        assert_int_equal(kvx_cache_from_engine((kvx_engine_layout_t)e, &kv, two ? &v : NULL,
                                               KVX_DTYPE_INVALID, &s->cache),
                         INV);
    }
    free(memory);
    free(s);
}

/* vLLM's HND: NHD shape, permuted strides; as many heads as tokens, where guessing would go wrong.
 */
static void test_engine_permuted_and_bytes(void **state)
{
    static uint8_t memory[2 * 3 * 4 * 4 * 16];
    const int64_t shape[] = {2, 3, 4, 4, 16};
    kvx_tensor_desc_t kv = engine_tensor(memory, 5, shape);
    kvx_cache_desc_t cache;

    (void)state;
    kv.dtype = KVX_DTYPE_U8;
    kv.stride[2] = 16;     /* token */
    kv.stride[3] = 4 * 16; /* head */
    assert_int_equal(
        kvx_cache_from_engine(KVX_ENGINE_VLLM_KV_FIRST, &kv, NULL, KVX_DTYPE_F8_E4M3, &cache), OK);
    assert_int_equal(cache.k.layout, KVX_LAYOUT_BLOCK_NHD);
    assert_int_equal(cache.k.dtype, KVX_DTYPE_F8_E4M3);
    assert_int_equal(cache.k.stride[1], 16);
    assert_int_equal(cache.k.stride[2], 64);
    assert_ptr_equal(cache.v.data, memory + 3 * 4 * 4 * 16);
    assert_int_equal(
        kvx_cache_from_engine(KVX_ENGINE_VLLM_KV_FIRST, &kv, NULL, KVX_DTYPE_INVALID, &cache), INV);
    assert_int_equal(
        kvx_cache_from_engine(KVX_ENGINE_VLLM_KV_FIRST, &kv, NULL, KVX_DTYPE_F16, &cache), INV);
    assert_int_equal(kvx_cache_from_engine(KVX_ENGINE_NONE, &kv, NULL, KVX_DTYPE_F8_E4M3, &cache),
                     INV);
    assert_int_equal(kvx_cache_from_engine(KVX_ENGINE_VLLM_KV_FIRST, NULL, NULL, 0, &cache), INV);
}

static void test_trtllm(void **state)
{
    struct sample *s = malloc(sizeof(*s));
    kvx_trtllm_pools_t pools = {.size = sizeof(pools),
                                .memory = KVX_MEMORY_HOST,
                                .dtype = KVX_DTYPE_F32,
                                .num_kv_heads = SAMPLE_HEADS,
                                .head_dim = SAMPLE_DIM,
                                .tokens_per_block = SAMPLE_SIZE};
    /* [2, 1, 2, 2]: K and V blocks interleaved, as the manager of one layer numbers them */
    const int32_t offsets[] = {4, 0, 5, 1, 6, INT32_MIN + 2, 7, INT32_MIN + 3};
    kvx_cache_desc_t cache;

    (void)state;
    sample_init(s);
    for (size_t i = 0; i < sizeof(s->k) / sizeof(s->k[0]); i++) {
        s->k[i] = (float)i;
        s->v[i] = 10000.0F + (float)i;
    }
    pools.primary = s->k;
    pools.secondary = s->v;
    assert_int_equal(kvx_cache_from_trtllm(&pools, &cache), OK);
    assert_int_equal(cache.pool.bytes_per_block, SAMPLE_SIZE * SAMPLE_ROW * 4);
    assert_int_equal(
        kvx_table_from_trtllm(offsets, SAMPLE_SEQS, 1, SAMPLE_MAX_BLOCKS, &s->gather.block_table),
        OK);
    assert_int_equal(kvx_gather_kv(&cache, &s->gather, NULL), OK);
    /* sequence 1, position 5 (block 1, offset 1), head 1, dim 3: K from secondary block 2, V from 3
     */
    for (int kv = 0; kv < 2; kv++) {
        const float *out = kv ? s->value : s->key;
        float expected =
            10000.0F + (float)((((2 + kv) * SAMPLE_HEADS + 1) * SAMPLE_SIZE + 1) * SAMPLE_DIM + 3);

        assert_true(out[(SAMPLE_MAX_LEN + 5) * SAMPLE_ROW + SAMPLE_DIM + 3] == expected);
    }
    pools.tokens_per_block = 3;
    assert_int_equal(kvx_cache_from_trtllm(&pools, &cache), INV);
    pools.tokens_per_block = 0;
    assert_int_equal(kvx_cache_from_trtllm(&pools, &cache), INV);
    pools.tokens_per_block = 1U << 31;
    assert_int_equal(kvx_cache_from_trtllm(&pools, &cache), UNS);
    pools.size = 8;
    assert_int_equal(kvx_cache_from_trtllm(&pools, &cache), INV);
    assert_int_equal(
        kvx_table_from_trtllm(offsets, UINT32_MAX, UINT32_MAX, UINT32_MAX, &s->gather.block_table),
        INV);
    assert_int_equal(kvx_table_from_trtllm(NULL, 1, 1, 1, &s->gather.block_table), INV);
    free(s);
}

static void test_dlpack(void **state)
{
    struct {
        void *data;
        int32_t device_type, device_id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } t;
    static float memory[64];
    int64_t shape[] = {2, 3, 4, 2}, strides[] = {24, 4, 1, 12};
    kvx_tensor_desc_t d;

    (void)state;
    memset(&t, 0, sizeof(t));
    t.data = memory;
    t.device_type = 1;
    t.ndim = 4;
    t.code = 2;
    t.bits = 32;
    t.lanes = 1;
    t.shape = shape;
    t.byte_offset = 8;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), OK);
    assert_ptr_equal(d.data, memory + 2);
    assert_int_equal(d.dtype, KVX_DTYPE_F32);
    assert_int_equal(d.memory, KVX_MEMORY_HOST);
    assert_int_equal(d.stride[0], 24);
    assert_int_equal(d.stride[2], 2);
    t.strides = strides;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), OK);
    assert_int_equal(d.stride[3], 12);
    t.device_type = 2;
    t.code = 4;
    t.bits = 16;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), OK);
    assert_int_equal(d.memory, KVX_MEMORY_DEVICE);
    assert_int_equal(d.dtype, KVX_DTYPE_BF16);
    t.code = 10;
    t.bits = 8;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), OK);
    assert_int_equal(d.dtype, KVX_DTYPE_F8_E4M3);
    t.code = 11; /* FNUZ: another format */
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), UNS);
    t.code = 12;
    t.device_type = 10; /* ROCm */
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), UNS);
    t.device_type = 13;
    t.lanes = 2;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), INV);
    t.lanes = 1;
    t.ndim = 6;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), INV);
    t.ndim = 4;
    shape[1] = -3;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), INV);
    t.strides = NULL;
    shape[1] = shape[2] = shape[3] = INT64_MAX / 2;
    assert_int_equal(kvx_tensor_from_dlpack(&t, KVX_LAYOUT_BLOCK_NHD, &d), INV);
    assert_int_equal(kvx_tensor_from_dlpack(NULL, KVX_LAYOUT_BLOCK_NHD, &d), INV);
}

/* --------------------------------------------------------------------------------------------- */
/* Device memory without a device; each in a process of its own, for a library is loaded once */

static void count_line(void *arg, int level, const char *line)
{
    (void)line, (void)level;
    ++*(int *)arg;
}

/* Layers in host and in device memory: refused before the first is written. */
static int mixed_layers(void)
{
    struct sample *host = malloc(sizeof(*host)), *device = malloc(sizeof(*device));
    const kvx_cache_desc_t *caches[] = {&host->cache, &device->cache};
    const kvx_write_desc_t *writes[] = {&host->write, &device->write};
    int bad;

    sample_init(host);
    sample_init(device);
    device->cache.k.memory = device->cache.v.memory = KVX_MEMORY_DEVICE;
    device->write.io.key.memory = device->write.io.value.memory = KVX_MEMORY_DEVICE;
    bad = kvx_write_kv_layers(caches, writes, 2, NULL, NULL) != KVX_STATUS_UNSUPPORTED;
    bad |= host->k[0] == host->key[0];
    free(host);
    free(device);
    return bad;
}

static int device_call(const char *library, const char *mode, int expected, int lines_expected)
{
    struct sample *s = malloc(sizeof(*s));
    int lines = 0, stream = 42, bad = 0;

    setenv("KVX_CUDA_LIBRARY", library, 1);
    setenv("KVX_MODEL", mode, 1);
    kvx_set_log(count_line, &lines);
    sample_init(s);
    s->cache.k.memory = s->cache.v.memory = KVX_MEMORY_DEVICE;
    s->write.io.key.memory = s->write.io.value.memory = KVX_MEMORY_UNIFIED;
    bad |= (int)kvx_write_kv(&s->cache, &s->write, &stream) != expected;
    bad |= stream != (expected == OK ? 43 : 42); /* handed through */
    bad |= (int)kvx_write_kv(&s->cache, &s->write, NULL) != expected;
    bad |= (s->k[0] == s->key[0]) != (expected == OK);
    s->write.io.key.ndim = 1; /* told before anything is loaded or queued */
    bad |= kvx_write_kv(&s->cache, &s->write, NULL) != KVX_STATUS_INVALID_ARGUMENT;
    bad |= lines != lines_expected;
    bad |= mixed_layers();
    free(s);
    return bad;
}

static void in_a_child(const char *library, const char *mode, int expected, int lines)
{
    int status = 0;
    pid_t child = fork();

    assert_true(child >= 0);
    if (child == 0)
        _exit(device_call(library, mode, expected, lines));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void test_backends(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    char model[4096], other[4096];

    (void)state;
    in_a_child("/nonexistent/libkvx_cuda.so", "", UNS, 1);
    if (!build)
        skip_because("KV_BUILD_DIR isn't set");
    snprintf(model, sizeof(model), "%s/tests/libkvx_model.so", build);
    snprintf(other, sizeof(other), "%s/lib/libkvx.so", build); /* a library, but no backend */
    in_a_child(model, "", OK, 0);
    in_a_child(model, "refuse", UNS, 1);
    in_a_child(other, "", UNS, 1);
}

static const char *in_folder(const char *folder, const char *name)
{
    static char path[4096];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

/* Make @folder, a template of mkdtemp: this program as bin/test, and a backend in lib/. */
static void install(char *folder, const char *build)
{
    char model[4096];

    assert_non_null(mkdtemp(folder));
    assert_int_equal(mkdir(in_folder(folder, "bin"), 0700), 0);
    assert_int_equal(mkdir(in_folder(folder, "lib"), 0700), 0);
    snprintf(model, sizeof(model), "%s/tests/libkvx_model.so", build);
    assert_int_equal(symlink(model, in_folder(folder, "lib/libkvx_cuda.so.0")), 0);
    assert_int_equal(linkat(AT_FDCWD, "/proc/self/exe", AT_FDCWD, in_folder(folder, "bin/test"),
                            AT_SYMLINK_FOLLOW),
                     0);
}

static void uninstall(const char *folder)
{
    static const char *const made[] = {"bin/test", "lib/libkvx_cuda.so.0", "bin", "lib", ""};

    for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); i++)
        (void)remove(in_folder(folder, made[i]));
}

/* A program that a shell has found in PATH, with libkvx in it, finds the backend in its ../lib. */
static void test_backend_of_a_program(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    char folder[2048];
    int status = -1;
    pid_t child;

    (void)state;
    if (!build)
        skip_because("KV_BUILD_DIR isn't set");
    snprintf(folder, sizeof(folder), "%s/tests/kvx-XXXXXX", build);
    install(folder, build);
    child = fork();
    if (child == 0) {
        execl(in_folder(folder, "bin/test"), "test", "device", (char *)NULL);
        _exit(126);
    }
    waitpid(child, &status, 0);
    uninstall(folder);
    assert_int_equal(status, 0);
}

/* --------------------------------------------------------------------------------------------- */
/* Threads */

static void test_thread_settings(void **state)
{
    (void)state;
    assert_int_equal(kvx_get_threads(), 1);
    assert_int_equal(kvx_set_threads(0, 0), INV);
    assert_int_equal(kvx_set_threads(KVX_MAX_THREADS + 1, 0), INV);
    assert_int_equal(kvx_set_threads(4, 0), OK);
    assert_int_equal(kvx_get_threads(), 4);
    assert_int_equal(kvx_set_threads(1, 0), OK);
}

enum { N_CALLERS = 4, BIG_BLOCKS = 256, BIG_SIZE = 16, BIG_ROW = 512, ROUNDS = 6 };

struct caller {
    pthread_t thread;
    kvx_cache_desc_t cache;
    int32_t *slots, *ids;
    float *key, *value, *out_k, *out_v;
    int number;
    int bad;
};

static kvx_tensor_desc_t rows(float *data, int64_t n)
{
    kvx_tensor_desc_t t = engine_tensor(data, 3, (int64_t[]){n, 1, BIG_ROW});

    t.size = sizeof(t);
    return t;
}

/* Callers share one cache, each with blocks of its own (every N_CALLERS-th one). */
static void *work(void *arg)
{
    struct caller *c = arg;
    const int64_t n = BIG_BLOCKS / N_CALLERS * BIG_SIZE;
    kvx_kv_io_desc_t in = {sizeof(in), rows(c->key, n), rows(c->value, n), (uint32_t)n, 1, BIG_ROW};
    kvx_kv_io_desc_t out = {sizeof(out), rows(c->out_k, n), rows(c->out_v, n), (uint32_t)n, 1,
                            BIG_ROW};
    int32_t length = (int32_t)n;
    kvx_write_desc_t write = {.size = sizeof(write), .io = in};
    kvx_gather_desc_t gather = {.size = sizeof(gather), .io = out, .max_seq_len = (uint32_t)n};

    write.slots =
        (kvx_slot_mapping_t){sizeof(write.slots), KVX_DTYPE_S32, (uint32_t)n, -1, c->slots};
    gather.seq_lens = (kvx_seq_lens_t){sizeof(gather.seq_lens), KVX_DTYPE_S32, 1, &length};
    gather.block_table = (kvx_block_table_t){.size = sizeof(gather.block_table),
                                             .format = KVX_BLOCK_TABLE_PACKED,
                                             .index_dtype = KVX_DTYPE_S32,
                                             .seq_count = 1,
                                             .beam_width = 1,
                                             .max_blocks_per_seq = BIG_BLOCKS / N_CALLERS,
                                             .indices = c->ids,
                                             .indices_count = BIG_BLOCKS / N_CALLERS};
    for (int round = 0; round < ROUNDS; round++) {
        for (int64_t i = 0; i < n * BIG_ROW; i++) {
            c->key[i] = (float)(i + c->number + round);
            c->value[i] = -c->key[i];
        }
        if (c->number == 0)
            kvx_set_threads(1 + (uint32_t)round % 3, 1);
        c->bad |= kvx_write_kv(&c->cache, &write, NULL) != KVX_STATUS_OK;
        c->bad |= kvx_gather_kv(&c->cache, &gather, NULL) != KVX_STATUS_OK;
        c->bad |= memcmp(c->out_k, c->key, (size_t)n * BIG_ROW * sizeof(float)) != 0;
        c->bad |= memcmp(c->out_v, c->value, (size_t)n * BIG_ROW * sizeof(float)) != 0;
    }
    return NULL;
}

static int many_callers(void)
{
    const size_t n = BIG_BLOCKS / N_CALLERS * BIG_SIZE, bytes = n * BIG_ROW * sizeof(float);
    struct caller callers[N_CALLERS];
    char *k = malloc(bytes * N_CALLERS), *v = malloc(bytes * N_CALLERS);
    int bad = 0;

    kvx_set_threads(3, 1);
    for (int i = 0; i < N_CALLERS; i++) {
        struct caller *c = &callers[i];

        *c = (struct caller){.number = i};
        c->cache = (kvx_cache_desc_t){.size = sizeof(c->cache),
                                      .num_blocks = BIG_BLOCKS,
                                      .block_size = BIG_SIZE,
                                      .num_kv_heads = 1,
                                      .head_dim = BIG_ROW};
        kvx_tensor_canonical(&c->cache, KVX_LAYOUT_BLOCK_HND, 0, &c->cache.k);
        c->cache.k.dtype = KVX_DTYPE_F32;
        c->cache.k.memory = KVX_MEMORY_HOST;
        c->cache.v = c->cache.k;
        c->cache.k.data = k;
        c->cache.v.data = v;
        c->slots = malloc(n * sizeof(int32_t));
        c->ids = malloc(n * sizeof(int32_t));
        for (size_t b = 0; b < BIG_BLOCKS / N_CALLERS; b++) {
            c->ids[b] = (int32_t)(b * N_CALLERS) + i;
            for (int o = 0; o < BIG_SIZE; o++)
                c->slots[b * BIG_SIZE + (size_t)o] = c->ids[b] * BIG_SIZE + o;
        }
        c->key = malloc(bytes);
        c->value = malloc(bytes);
        c->out_k = malloc(bytes);
        c->out_v = malloc(bytes);
        if (pthread_create(&c->thread, NULL, work, c) != 0)
            abort();
    }
    for (int i = 0; i < N_CALLERS; i++) {
        struct caller *c = &callers[i];

        pthread_join(c->thread, NULL);
        bad |= c->bad;
        free(c->slots);
        free(c->ids);
        free(c->key);
        free(c->value);
        free(c->out_k);
        free(c->out_v);
    }
    free(k);
    free(v);
    return bad;
}

static void test_many_callers(void **state)
{
    (void)state;
    assert_int_equal(many_callers(), 0);
    kvx_set_threads(1, 0);
}

/*
 * A child has no helpers of its parent's, and must get its own: waiting for those would never end.
 */
static void test_fork(void **state)
{
    pid_t child;
    int status = 0;

    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip_because("the thread sanitizer lets no child of a process with threads start some");
#endif
    assert_int_equal(many_callers(), 0);
    kvx_set_threads(3, 1);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(120);
        _exit(many_callers());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(many_callers(), 0); /* and the parent keeps its own */
    kvx_set_threads(1, 0);
}

/* One call that is large enough for helpers, by way of @write_kv. */
static bool big_write(kvx_status_t (*write_kv)(const kvx_cache_desc_t *, const kvx_write_desc_t *,
                                               void *))
{
    enum { BLOCKS = 64, N = BLOCKS * BIG_SIZE };
    float *memory = calloc((size_t)N * BIG_ROW, 4 * sizeof(float));
    int32_t *slots = malloc(N * sizeof(*slots));
    kvx_cache_desc_t cache = {.size = sizeof(cache),
                              .num_blocks = BLOCKS,
                              .block_size = BIG_SIZE,
                              .num_kv_heads = 1,
                              .head_dim = BIG_ROW};
    kvx_write_desc_t w = {.size = sizeof(w)};
    bool good;

    for (int32_t i = 0; i < N; i++)
        slots[i] = N - 1 - i;
    for (size_t i = 0; i < (size_t)2 * N * BIG_ROW; i++)
        memory[i] = (float)i;
    kvx_tensor_canonical(&cache, KVX_LAYOUT_BLOCK_NHD, 0, &cache.k);
    cache.k.dtype = KVX_DTYPE_F32;
    cache.k.memory = KVX_MEMORY_HOST;
    cache.v = cache.k;
    cache.k.data = memory + (size_t)2 * N * BIG_ROW;
    cache.v.data = memory + (size_t)3 * N * BIG_ROW;
    w.io = (kvx_kv_io_desc_t){
        sizeof(w.io), rows(memory, N), rows(memory + (size_t)N * BIG_ROW, N), N, 1, BIG_ROW};
    w.slots = (kvx_slot_mapping_t){sizeof(w.slots), KVX_DTYPE_S32, N, -1, slots};
    good =
        write_kv(&cache, &w, NULL) == KVX_STATUS_OK &&
        memcmp(cache.v.data, memory + (size_t)(2 * N - 1) * BIG_ROW, BIG_ROW * sizeof(float)) == 0;
    free(memory);
    free(slots);
    return good;
}

static void find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);

    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof(symbol));
}

/* The library may go while its helpers sleep; a fork afterwards must not call into it. */
static void test_unload(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    char path[4096];

    (void)state;
    if (!build)
        skip_because("KV_BUILD_DIR isn't set");
    snprintf(path, sizeof(path), "%s/lib/libkvx.so", build);
    for (int round = 0; round < 3; round++) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        kvx_status_t (*set_threads)(uint32_t, uint64_t);
        kvx_status_t (*write_kv)(const kvx_cache_desc_t *, const kvx_write_desc_t *, void *);
        int status = 0;
        pid_t child;

        assert_non_null(library);
        find(library, "kvx_set_threads", &set_threads);
        find(library, "kvx_write_kv", &write_kv);
        assert_int_equal(set_threads(4, 1), OK);
        assert_true(big_write(write_kv));
        assert_int_equal(dlclose(library), 0);
        assert_null(dlopen(path, RTLD_NOW | RTLD_NOLOAD));
        child = fork();
        assert_true(child >= 0);
        if (child == 0)
            _exit(0);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(kvx_status_name(KVX_STATUS_OK), "OK");
    assert_string_equal(kvx_status_name(KVX_STATUS_INTERNAL_ERROR), "INTERNAL_ERROR");
    assert_string_equal(kvx_status_name((kvx_status_t)-1), "UNKNOWN");
    assert_int_equal(kvx_dtype_size(KVX_DTYPE_F8_E5M2), 1);
    assert_int_equal(kvx_dtype_size(KVX_DTYPE_S64), 8);
    assert_int_equal(kvx_dtype_size(KVX_DTYPE_INVALID), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_layers_are_all_or_nothing),
        cmocka_unit_test(test_copy_errors),
        cmocka_unit_test(test_copy_layers),
        cmocka_unit_test(test_dropped_by_a_smaller_layer),
        cmocka_unit_test(test_engines),
        cmocka_unit_test(test_engine_permuted_and_bytes),
        cmocka_unit_test(test_trtllm),
        cmocka_unit_test(test_dlpack),
        cmocka_unit_test(test_backends),
        cmocka_unit_test(test_backend_of_a_program),
        cmocka_unit_test(test_thread_settings),
        cmocka_unit_test(test_many_callers),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_unload),
        cmocka_unit_test(test_names),
    };

    if (argc == 2 && strcmp(argv[1], "device") == 0)
        return device_call("", "", OK, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
