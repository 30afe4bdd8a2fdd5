// SPDX-License-Identifier: Apache-2.0
/* Layouts as KVX caches and back: the kernels write rows at the addresses of the layout. */
#include <stdlib.h>

#include "base/unit.h"
#include "layout_unit.h"
#include "starve.h"

#define BLOCKS 6
#define LAYERS 3
#define PAGE 4
#define HEADS 2
#define DIM 5
#define ROW (HEADS * DIM)
#define TOKENS (BLOCKS * PAGE)

static struct kvbm_layout_config config_for_kvx(enum kvbm_layout_kind kind, uint32_t outer_dim,
                                                enum kvbm_block_order order)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = kind,
                                       .num_blocks = BLOCKS,
                                       .num_layers = LAYERS,
                                       .outer_dim = outer_dim,
                                       .page_size = PAGE,
                                       .inner_dim = ROW,
                                       .num_heads = HEADS,
                                       .dtype = KVX_DTYPE_F32,
                                       .order = order,
                                       .alignment = 64};
}

/* ---- rows through KVX ---- */

/* A number for every element; small integers are exact, and no two are alike. */
static float element(uint32_t layer, int v, uint32_t token, uint32_t head, uint32_t dim)
{
    return (float)((((layer * 2 + (uint32_t)v) * TOKENS + token) * HEADS + head) * DIM + dim + 1);
}

static kvx_tensor_desc_t rows_of(float *rows)
{
    return (kvx_tensor_desc_t){.size = sizeof(kvx_tensor_desc_t),
                               .dtype = KVX_DTYPE_F32,
                               .layout = KVX_LAYOUT_INVALID,
                               .memory = KVX_MEMORY_HOST,
                               .ndim = 3,
                               .shape = {TOKENS, HEADS, DIM},
                               .stride = {ROW, DIM, 1},
                               .data = rows};
}

static kvx_kv_io_desc_t io_of(float *k, float *v)
{
    return (kvx_kv_io_desc_t){.size = sizeof(kvx_kv_io_desc_t),
                              .key = rows_of(k),
                              .value = rows_of(v),
                              .num_tokens = TOKENS,
                              .num_kv_heads = HEADS,
                              .head_dim = DIM};
}

static void write_rows(const kvx_cache_desc_t *cache, float *k, float *v)
{
    int64_t slots[TOKENS];
    kvx_write_desc_t write = {.size = sizeof(write), .io = io_of(k, v)};

    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    write.slots = (kvx_slot_mapping_t){.size = sizeof(write.slots),
                                       .dtype = KVX_DTYPE_S64,
                                       .token_count = TOKENS,
                                       .invalid_slot = -1,
                                       .slots = slots};
    assert_int_equal(kvx_write_kv(cache, &write, NULL), KVX_STATUS_OK);
}

static void gather_rows(const kvx_cache_desc_t *cache, float *k, float *v)
{
    int32_t blocks[BLOCKS], length = TOKENS;
    kvx_gather_desc_t gather = {.size = sizeof(gather), .io = io_of(k, v), .max_seq_len = TOKENS};

    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = i;
    gather.block_table = (kvx_block_table_t){.size = sizeof(gather.block_table),
                                             .format = KVX_BLOCK_TABLE_PACKED,
                                             .index_dtype = KVX_DTYPE_S32,
                                             .seq_count = 1,
                                             .beam_width = 1,
                                             .max_blocks_per_seq = BLOCKS,
                                             .indices = blocks,
                                             .indices_count = BLOCKS};
    gather.seq_lens = (kvx_seq_lens_t){.size = sizeof(gather.seq_lens),
                                       .dtype = KVX_DTYPE_S32,
                                       .seq_count = 1,
                                       .lengths = &length};
    assert_int_equal(kvx_gather_kv(cache, &gather, NULL), KVX_STATUS_OK);
}

/* Every element of every region, found by hand. */
static void check_regions(const struct kvbm_layout *layout, uint32_t layer)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);

    for (uint32_t i = 0; i < BLOCKS * c->outer_dim; i++) {
        uint32_t block = i / c->outer_dim, outer = i % c->outer_dim;
        struct kvbm_view view;
        const float *at;

        assert_int_equal(kvbm_layout_region(layout, block, layer, outer, &view), 0);
        assert_int_equal(view.len, PAGE * ROW * sizeof(float));
        at = (const float *)(uintptr_t)view.addr;
        for (uint32_t e = 0; e < PAGE * ROW; e++, at++) {
            uint32_t token = c->order == KVBM_ORDER_HND ? e / DIM % PAGE : e / ROW;
            uint32_t head = c->order == KVBM_ORDER_HND ? e / DIM / PAGE : e / DIM % HEADS;

            assert_true(*at == element(layer, (int)outer, block * PAGE + token, head, e % DIM));
        }
    }
}

static void check_through_kvx(const struct kvbm_layout *layout)
{
    static float k[TOKENS * ROW], v[TOKENS * ROW], got_k[TOKENS * ROW], got_v[TOKENS * ROW];
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    kvx_cache_desc_t cache;

    for (int pass = 0; pass < 2; pass++) { /* all layers are written before any is read */
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            for (uint32_t i = 0; i < TOKENS * ROW; i++) {
                k[i] = element(layer, 0, i / ROW, i / DIM % HEADS, i % DIM);
                v[i] = element(layer, (int)c->outer_dim - 1, i / ROW, i / DIM % HEADS, i % DIM);
            }
            assert_int_equal(kvbm_layout_to_kvx(layout, layer, &cache), 0);
            assert_int_equal(kvx_validate_cache_desc(&cache), KVX_STATUS_OK);
            if (!pass) {
                write_rows(&cache, k, c->outer_dim == 1 ? k : v);
                continue;
            }
            check_regions(layout, layer);
            gather_rows(&cache, got_k, got_v);
            assert_memory_equal(got_k, k, sizeof(k));
            assert_memory_equal(got_v, v, sizeof(v));
        }
    }
}

static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                              KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                              KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};

static void test_rows_land_there(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(kinds) * 4; i++) {
        struct kvbm_layout_config c =
            config_for_kvx(kinds[i / 4], 1 + i % 2, i / 2 % 2 ? KVBM_ORDER_HND : KVBM_ORDER_NHD);
        struct kvbm_layout *layout = allocate(&c, KVBM_STORAGE_SYSTEM);

        check_through_kvx(layout);
        kvbm_layout_destroy(layout);
    }
}

/* ---- to KVX and back ---- */

static void same_regions(const struct kvbm_layout *a, const struct kvbm_layout *b)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(a);
    struct kvbm_view va, vb;

    for (uint64_t i = 0; i < c->num_blocks * c->num_layers * c->outer_dim; i++) {
        uint32_t outer = (uint32_t)(i % c->outer_dim);
        uint32_t layer = (uint32_t)(i / c->outer_dim % c->num_layers);
        uint64_t block = i / c->outer_dim / c->num_layers;

        assert_int_equal(kvbm_layout_region(a, block, layer, outer, &va), 0);
        assert_int_equal(kvbm_layout_region(b, block, layer, outer, &vb), 0);
        assert_true(va.addr == vb.addr && va.len == vb.len);
    }
}

/* Any layout that KVX can say: described, and recognised as what it is. */
static void test_round_trip(void **state)
{
    static const kvx_dtype_t dtypes[] = {KVX_DTYPE_F16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3};
    struct rng rng = {test_seed()};
    (void)state;

    for (long round = test_rounds(1000); round > 0; round--) {
        struct kvbm_layout_config c = random_config(&rng);
        kvx_cache_desc_t caches[6], again;
        const kvx_cache_desc_t *layers[6];
        struct kvbm_layout *layout, *back = NULL;

        c.dtype = dtypes[rng_below(&rng, 3)];
        c.dtype_width_bytes = 0;
        c.num_heads = 1 + rng_below(&rng, 4);
        c.inner_dim = c.num_heads * (1 + rng_below(&rng, 8));
        c.order = rng_below(&rng, 2) ? KVBM_ORDER_HND : KVBM_ORDER_NHD;
        c.alignment = KV_MAX(c.alignment, 4u);
        layout = allocate(&c, KVBM_STORAGE_SYSTEM);
        for (uint32_t i = 0; i < c.num_layers; i++) {
            assert_int_equal(kvbm_layout_to_kvx(layout, i, &caches[i]), 0);
            layers[i] = &caches[i];
        }
        assert_int_equal(kvbm_layout_from_kvx(layers, c.num_layers, &back), 0);
        same_regions(layout, back);
        assert_int_equal(kvbm_layout_get_config(back)->dtype, c.dtype);
        assert_int_equal(kvbm_layout_get_config(back)->order, c.order);
        assert_int_equal(kvbm_layout_get_config(back)->num_heads, c.num_heads);
        for (uint32_t i = 0; i < c.num_layers; i++) {
            assert_int_equal(kvbm_layout_to_kvx(back, i, &again), 0);
            same_cache(&again, &caches[i]);
        }
        kvbm_layout_destroy(back);
        kvbm_layout_destroy(layout);
    }
}

/* ---- tensors as engines make them ---- */

enum dim { NOTHING, B, L, O, P, H, D }; /* blocks, layers, K and V, page, heads, head_dim */

struct engine {
    const char *name;
    enum dim order[6]; /* outermost first */
    bool hnd;
    uint32_t outer_dim;
    enum kvbm_layout_kind kind;
};

static const struct engine engines[] = {
    {"vLLM [2, nblocks, page, heads, dim]",
     {O, B, P, H, D},
     false,
     2,
     KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS},
    {"vLLM [nblocks, 2, page, heads, dim]",
     {B, O, P, H, D},
     false,
     2,
     KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS},
    {"HND [nblocks, 2, heads, page, dim]",
     {B, O, H, P, D},
     true,
     2,
     KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS},
    {"HND [2, nblocks, heads, page, dim]",
     {O, B, H, P, D},
     true,
     2,
     KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS},
    {"MLA [nblocks, page, 1, dim]", {B, P, H, D}, false, 1, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS},
    {"all layers of a block together", {B, L, O, P, H, D}, false, 2, KVBM_FULLY_CONTIGUOUS},
    {"all layers together, MLA", {B, L, P, H, D}, false, 1, KVBM_FULLY_CONTIGUOUS},
};

static int64_t extent(const struct engine *e, enum dim d, int64_t blocks)
{
    const int64_t extents[] = {1, blocks, LAYERS, e->outer_dim, PAGE, HEADS, DIM};

    return extents[d];
}

/* Elements from one to the next along @d, in a tensor packed in the engine's order. */
static int64_t step(const struct engine *e, enum dim d, int64_t blocks)
{
    int64_t n = 1;

    for (int i = 5; i >= 0; i--) {
        if (e->order[i] == d)
            return n;
        n *= extent(e, e->order[i], blocks);
    }
    return 0; /* it has no such dimension */
}

static kvx_cache_desc_t describe(const struct engine *e, int64_t blocks, float *base)
{
    kvx_cache_desc_t cache = {.size = sizeof(cache),
                              .num_blocks = (uint32_t)blocks,
                              .block_size = PAGE,
                              .num_kv_heads = HEADS,
                              .head_dim = DIM};

    cache.k =
        (kvx_tensor_desc_t){.size = sizeof(cache.k),
                            .dtype = KVX_DTYPE_F32,
                            .layout = e->hnd ? KVX_LAYOUT_BLOCK_HND : KVX_LAYOUT_BLOCK_NHD,
                            .memory = KVX_MEMORY_HOST,
                            .ndim = 4,
                            .shape = {blocks, e->hnd ? HEADS : PAGE, e->hnd ? PAGE : HEADS, DIM},
                            .stride = {step(e, B, blocks), step(e, e->hnd ? H : P, blocks),
                                       step(e, e->hnd ? P : H, blocks), 1},
                            .data = base};
    cache.v = cache.k;
    cache.v.data = base + step(e, O, blocks);
    return cache;
}

static struct kvbm_layout *adopt(const struct engine *e, int64_t blocks, float *memory,
                                 kvx_cache_desc_t caches[LAYERS])
{
    const kvx_cache_desc_t *layers[LAYERS];
    struct kvbm_layout *layout = NULL;
    int64_t each = blocks * e->outer_dim * PAGE * ROW;

    for (int l = 0; l < LAYERS; l++) { /* separate tensors lie 64 elements apart */
        bool together = step(e, L, blocks) != 0;

        caches[l] =
            describe(e, blocks, memory + (together ? l * step(e, L, blocks) : l * (each + 64)));
        layers[l] = &caches[l];
    }
    assert_int_equal(kvbm_layout_from_kvx(layers, LAYERS, &layout), 0);
    return layout;
}

static void test_engines(void **state)
{
    size_t bytes = sizeof(float) * (LAYERS * (BLOCKS * 2 * PAGE * ROW + 64));
    float *memory = malloc(bytes);
    (void)state;

    assert_non_null(memory);
    for (size_t i = 0; i < KV_COUNT(engines); i++) {
        kvx_cache_desc_t caches[LAYERS], again;
        struct kvbm_layout *layout = adopt(&engines[i], BLOCKS, memory, caches);

        assert_int_equal(kvbm_layout_get_config(layout)->kind, engines[i].kind);
        assert_int_equal(kvbm_layout_get_config(layout)->outer_dim, engines[i].outer_dim);
        assert_int_equal(kvbm_layout_get_config(layout)->alignment, 1);
        for (uint32_t l = 0; l < LAYERS; l++) {
            assert_int_equal(kvbm_layout_to_kvx(layout, l, &again), 0);
            same_cache(&again, &caches[l]);
        }
        memset(memory, 0, bytes);
        check_through_kvx(layout);
        kvbm_layout_destroy(layout);
    }
    free(memory);
}

/* One block: strides over blocks mean nothing, and every engine's tensor is still a layout. */
static void test_one_block(void **state)
{
    float *memory = calloc(LAYERS * (2 * PAGE * ROW + 64), sizeof(float));
    (void)state;

    assert_non_null(memory);
    for (size_t i = 0; i < KV_COUNT(engines); i++) {
        kvx_cache_desc_t caches[LAYERS];
        struct kvbm_layout *layout = adopt(&engines[i], 1, memory, caches);
        struct kvbm_view view;

        for (uint32_t l = 0; l < LAYERS; l++) {
            assert_int_equal(kvbm_layout_region(layout, 0, l, 0, &view), 0);
            assert_int_equal(view.addr, (uintptr_t)caches[l].k.data);
            assert_int_equal(kvbm_layout_region(layout, 0, l, engines[i].outer_dim - 1, &view), 0);
            assert_int_equal(view.addr, (uintptr_t)caches[l].v.data);
        }
        kvbm_layout_destroy(layout);
    }
    free(memory);
}

/* ---- what is refused ---- */

#define REFUSES(error, change)                                                   \
    do {                                                                         \
        kvx_cache_desc_t caches[LAYERS], *c = &caches[1];                        \
        const kvx_cache_desc_t *layers[LAYERS];                                  \
        struct kvbm_layout *refused = NULL;                                      \
                                                                                 \
        kvbm_layout_destroy(adopt(&engines[1], BLOCKS, memory, caches));         \
        for (int l = 0; l < LAYERS; l++)                                         \
            layers[l] = &caches[l];                                              \
        change;                                                                  \
        (void)c;                                                                 \
        assert_int_equal(kvbm_layout_from_kvx(layers, LAYERS, &refused), error); \
        assert_null(refused);                                                    \
    } while (0)

static void all_strides(kvx_cache_desc_t *caches, int dim, int64_t stride)
{
    for (int l = 0; l < LAYERS; l++) {
        caches[l].k.stride[dim] = stride;
        caches[l].v.stride[dim] = stride;
    }
}

static void v_first(kvx_cache_desc_t *caches)
{
    for (int l = 0; l < LAYERS; l++) {
        kvx_tensor_desc_t k = caches[l].k;

        caches[l].k = caches[l].v;
        caches[l].v = k;
    }
}

static void test_from_kvx_refuses(void **state)
{
    float *memory = malloc(sizeof(float) * LAYERS * (BLOCKS * 4 * PAGE * ROW + 64));
    struct kvbm_layout *layout = NULL;
    const kvx_cache_desc_t *none[1] = {NULL};
    (void)state;

    assert_non_null(memory);
    REFUSES(-EINVAL, c->num_blocks--);
    REFUSES(-EINVAL, c->size = 0);
    REFUSES(-EINVAL, c->k.stride[0] += ROW);
    REFUSES(-EINVAL, c->v.memory = KVX_MEMORY_UNKNOWN);
    REFUSES(-EINVAL, c->k.memory = c->v.memory = KVX_MEMORY_UNIFIED);
    REFUSES(-EINVAL, c->k.dtype = c->v.dtype = KVX_DTYPE_U8);
    REFUSES(-EINVAL,
            c->v.data = (float *)c->v.data + ROW); /* V elsewhere than in the first layer */
    REFUSES(-EINVAL, layers[2] = NULL);
    REFUSES(-ENOTSUP, c->k.layout = c->v.layout = KVX_LAYOUT_BLOCK_CUSTOM);
    REFUSES(-ENOTSUP, c->k.data = (char *)c->k.data + 1);
    REFUSES(-ENOTSUP, all_strides(caches, 1, ROW + 1));            /* holes between tokens */
    REFUSES(-ENOTSUP, all_strides(caches, 0, 2 * PAGE * ROW - 1)); /* blocks that overlap */
    REFUSES(-ENOTSUP, all_strides(caches, 0, 4 * PAGE * ROW + 1)); /* no power of two makes it */
    REFUSES(-ENOTSUP, v_first(caches));
    assert_int_equal(kvbm_layout_from_kvx(NULL, 1, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_from_kvx(none, 1, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_from_kvx(none, 0, &layout), -EINVAL);
    assert_null(layout);
    free(memory);
}

/* Blocks padded to 512 bytes that begin elsewhere than at a multiple of it. */
static void test_from_kvx_unaligned(void **state)
{
    char *memory = aligned_alloc(512, 64 * 512);
    (void)state;

    assert_non_null(memory);
    for (int offset = 0; offset <= 512; offset += 128) {
        kvx_cache_desc_t caches[LAYERS];
        const kvx_cache_desc_t *layers[LAYERS] = {&caches[0], &caches[1], &caches[2]};
        struct kvbm_layout *layout = NULL;

        for (int l = 0; l < LAYERS; l++)
            caches[l] =
                describe(&engines[4], BLOCKS, (float *)(void *)(memory + l * 5120 + offset));
        all_strides(caches, 0, 512 / 4); /* of which 160 bytes are a region */
        assert_int_equal(kvbm_layout_from_kvx(layers, LAYERS, &layout),
                         offset % 512 ? -ENOTSUP : 0);
        if (layout)
            assert_int_equal(kvbm_layout_get_config(layout)->alignment, 512);
        kvbm_layout_destroy(layout);
    }
    free(memory);
}

static void refuse_to(struct kvbm_layout_config c, enum kvbm_storage_kind kind, int error)
{
    struct kvbm_layout *layout = allocate(&c, kind);
    kvx_cache_desc_t cache = {.size = 77};

    assert_int_equal(kvbm_layout_to_kvx(layout, 0, &cache), error);
    assert_int_equal(cache.size, 77);
    kvbm_layout_destroy(layout);
}

static void test_to_kvx_refuses(void **state)
{
    struct kvbm_layout_config c = config_for_kvx(KVBM_FULLY_CONTIGUOUS, 2, KVBM_ORDER_NHD);
    struct kvbm_layout_config other = c;
    struct kvbm_layout *layout = allocate(&c, KVBM_STORAGE_SYSTEM), *read = NULL;
    char *memory = malloc(1 << 16);
    struct kvbm_storage *storage;
    kvx_cache_desc_t cache;
    uint8_t bytes[1024];
    long len;
    (void)state;

    assert_int_equal(kvbm_layout_to_kvx(layout, LAYERS, &cache), -ERANGE);
    assert_int_equal(kvbm_layout_to_kvx(layout, 0, NULL), -EINVAL);
    assert_int_equal(kvbm_layout_to_kvx(NULL, 0, &cache), -EINVAL);
    len = kvbm_layout_serialise(layout, bytes, sizeof(bytes), NULL);
    assert_true(len > 0);
    assert_int_equal(kvbm_layout_deserialise(bytes, (size_t)len, &read), 0);
    assert_int_equal(kvbm_layout_to_kvx(read, 0, &cache), -EINVAL); /* not this process's memory */
    kvbm_layout_destroy(read);
    kvbm_layout_destroy(layout);
    refuse_to(c, KVBM_STORAGE_NULL, -EINVAL);
    refuse_to(c, KVBM_STORAGE_DISK, -EINVAL);
    other.num_heads = 0;
    refuse_to(other, KVBM_STORAGE_SYSTEM, -EINVAL);
    other = c;
    other.dtype = KVX_DTYPE_INVALID;
    refuse_to(other, KVBM_STORAGE_SYSTEM, -EINVAL);
    other.dtype = KVX_DTYPE_U32;
    other.dtype_width_bytes = 4;
    refuse_to(other, KVBM_STORAGE_SYSTEM, -ENOTSUP);
    assert_non_null(memory);
    c.alignment = 1; /* and the elements at odd addresses */
    storage = external(memory + 1, 60000);
    assert_int_equal(kvbm_layout_create(&c, &storage, 1, &layout), 0);
    assert_int_equal(kvbm_layout_to_kvx(layout, 0, &cache), -ENOTSUP);
    kvbm_layout_destroy(layout);
    kvbm_storage_destroy(storage);
    free(memory);
}

static void test_starved(void **state)
{
    static float memory[LAYERS * (BLOCKS * 2 * PAGE * ROW + 64)];
    kvx_cache_desc_t caches[LAYERS];
    const kvx_cache_desc_t *layers[LAYERS] = {&caches[0], &caches[1], &caches[2]};
    struct kvbm_layout *layout = NULL;
    long n = 0;
    int rc;
    (void)state;

    kvbm_layout_destroy(adopt(&engines[0], BLOCKS, memory, caches));
    do {
        starve_at(++n);
        rc = kvbm_layout_from_kvx(layers, LAYERS, &layout);
        assert_int_equal(rc, starved() ? -ENOMEM : 0);
        assert_true(rc == 0 || !layout);
    } while (rc);
    starve_at(0);
    assert_int_equal(n, 1 + LAYERS + 1);
    kvbm_layout_destroy(layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_land_there),  cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_engines),          cmocka_unit_test(test_one_block),
        cmocka_unit_test(test_from_kvx_refuses), cmocka_unit_test(test_from_kvx_unaligned),
        cmocka_unit_test(test_to_kvx_refuses),   cmocka_unit_test(test_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
