// SPDX-License-Identifier: Apache-2.0
/* Layouts: known figures, and addresses compared with a walk over every element. */
#include <stdlib.h>

#include "base/unit.h"
#include "layout_unit.h"
#include "starve.h"

/* ---- figures ---- */

static void test_known_figures(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
    struct kvbm_layout_shape s;
    (void)state;

    assert_int_equal(kvbm_layout_compute(&c, &s), 0);
    assert_int_equal(s.kind, KVBM_FULLY_CONTIGUOUS);
    assert_int_equal(s.n_storages, 1);
    assert_int_equal(s.region_bytes, 208);
    assert_int_equal(s.outer_stride, 208);
    assert_int_equal(s.layer_stride, 416);
    assert_int_equal(s.natural_block_bytes, 2080);
    assert_int_equal(s.block_stride, 2304);
    assert_int_equal(s.data_bytes, 6 * 2304 + 2080);
    assert_int_equal(s.required_bytes, 6 * 2304 + 2080 + 255);
    c.alignment = 0;
    c.dtype_width_bytes = 0; /* 2 bytes, no alignment */
    assert_int_equal(kvbm_layout_compute(&c, &s), 0);
    assert_int_equal(s.block_stride, 1040);
    assert_int_equal(s.data_bytes, 7 * 1040);
    assert_int_equal(s.required_bytes, 7 * 1040);
}

static void test_known_figures_separate(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS);
    struct kvbm_layout_shape s;
    (void)state;

    assert_int_equal(kvbm_layout_compute(&c, &s), 0);
    assert_int_equal(s.n_storages, 5);
    assert_int_equal(s.block_stride, 256);
    assert_int_equal(s.outer_stride, 256 * 7);
    assert_int_equal(s.layer_stride, 0);
    assert_int_equal(s.data_bytes, 256 * 7 * 2);
    assert_int_equal(s.natural_block_bytes, 2080);
    c.kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS;
    assert_int_equal(kvbm_layout_compute(&c, &s), 0);
    assert_int_equal(s.block_stride, 512);
    assert_int_equal(s.outer_stride, 208);
    assert_int_equal(s.layer_stride, 0);
    assert_int_equal(s.data_bytes, 512 * 7);
    assert_int_equal(s.required_bytes, 512 * 7 + 255);
}

/* ---- a walk over every element in the order of each kind ---- */

struct walk {
    const struct kvbm_layout *layout;
    const struct kvbm_layout_config *c;
    uint64_t at;  /* of the next element */
    uint64_t end; /* of the last one */
};

static void begin_storage(struct walk *w, uint32_t layer)
{
    w->at = kvbm_storage_addr(kvbm_layout_storage(w->layout, layer));
    while (w->at % w->c->alignment)
        w->at++;
}

static void end_storage(const struct walk *w, uint32_t layer, bool padded)
{
    const struct kvbm_layout_shape *s = kvbm_layout_get_shape(w->layout);
    const struct kvbm_storage *storage = kvbm_layout_storage(w->layout, layer);
    uint64_t begin = kvbm_storage_addr(storage);

    while (begin % w->c->alignment)
        begin++;
    assert_int_equal((padded ? w->at : w->end) - begin, s->data_bytes);
    assert_true(begin + s->data_bytes <= kvbm_storage_addr(storage) + kvbm_storage_bytes(storage));
}

static void walk_region(struct walk *w, uint64_t block, uint32_t layer, uint32_t outer)
{
    struct kvbm_view view;
    uint64_t first = w->at;

    for (uint32_t i = 0; i < w->c->page_size; i++) {
        for (uint32_t e = 0; e < w->c->inner_dim; e++)
            w->at += w->c->dtype_width_bytes;
    }
    w->end = w->at;
    assert_int_equal(kvbm_layout_region(w->layout, block, layer, outer, &view), 0);
    assert_int_equal(view.addr, first);
    assert_int_equal(view.len, w->at - first);
    assert_int_equal(view.kind, KVBM_STORAGE_NULL);
    assert_int_equal(view.storage, kvbm_layout_get_shape(w->layout)->n_storages == 1 ? 0 : layer);
}

static void pad(struct walk *w)
{
    while (w->at % w->c->alignment)
        w->at++;
}

static void walk_fully(struct walk *w)
{
    begin_storage(w, 0);
    for (uint64_t b = 0; b < w->c->num_blocks; b++) {
        pad(w);
        for (uint32_t l = 0; l < w->c->num_layers; l++) {
            for (uint32_t o = 0; o < w->c->outer_dim; o++)
                walk_region(w, b, l, o);
        }
    }
    end_storage(w, 0, false);
}

static void walk_outer(struct walk *w)
{
    for (uint32_t l = 0; l < w->c->num_layers; l++) {
        begin_storage(w, l);
        for (uint32_t o = 0; o < w->c->outer_dim; o++) {
            for (uint64_t b = 0; b < w->c->num_blocks; b++) {
                walk_region(w, b, l, o);
                pad(w);
            }
        }
        end_storage(w, l, true);
    }
}

static void walk_block(struct walk *w)
{
    for (uint32_t l = 0; l < w->c->num_layers; l++) {
        begin_storage(w, l);
        for (uint64_t b = 0; b < w->c->num_blocks; b++) {
            for (uint32_t o = 0; o < w->c->outer_dim; o++)
                walk_region(w, b, l, o);
            pad(w);
        }
        end_storage(w, l, true);
    }
}

/* A view of more than a region: of all of these, and only where they lie one behind the other. */
static void check_layer_view(const struct kvbm_layout *layout, uint64_t block, uint32_t layer)
{
    uint32_t outer_dim = kvbm_layout_get_config(layout)->outer_dim;
    struct kvbm_view first, last, view;

    assert_int_equal(kvbm_layout_region(layout, block, layer, 0, &first), 0);
    assert_int_equal(kvbm_layout_region(layout, block, layer, outer_dim - 1, &last), 0);
    if (last.addr - first.addr != (outer_dim - 1) * first.len) {
        assert_int_equal(kvbm_layout_layer(layout, block, layer, &view), -ENOTSUP);
        return;
    }
    assert_int_equal(kvbm_layout_layer(layout, block, layer, &view), 0);
    assert_int_equal(view.addr, first.addr);
    assert_int_equal(view.len, outer_dim * first.len);
    assert_int_equal(view.storage, first.storage);
}

static void check_block_view(const struct kvbm_layout *layout, uint64_t block)
{
    const struct kvbm_layout_config *c = kvbm_layout_get_config(layout);
    const struct kvbm_layout_shape *s = kvbm_layout_get_shape(layout);
    struct kvbm_view first, last, view;

    assert_int_equal(kvbm_layout_region(layout, block, 0, 0, &first), 0);
    assert_int_equal(kvbm_layout_region(layout, block, c->num_layers - 1, c->outer_dim - 1, &last),
                     0);
    if (s->n_storages > 1 || last.addr + last.len - first.addr != s->natural_block_bytes) {
        assert_int_not_equal(c->kind, KVBM_FULLY_CONTIGUOUS);
        assert_int_equal(kvbm_layout_block(layout, block, &view), -ENOTSUP);
        return;
    }
    assert_int_equal(kvbm_layout_block(layout, block, &view), 0);
    assert_int_equal(view.addr, first.addr);
    assert_int_equal(view.len, s->natural_block_bytes);
}

static void walk_all(struct walk *w)
{
    if (w->c->kind == KVBM_FULLY_CONTIGUOUS)
        walk_fully(w);
    else if (w->c->kind == KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS)
        walk_outer(w);
    else
        walk_block(w);
    for (uint64_t b = 0; b < w->c->num_blocks; b++) {
        check_block_view(w->layout, b);
        for (uint32_t l = 0; l < w->c->num_layers; l++)
            check_layer_view(w->layout, b, l);
    }
}

static void test_walk(void **state)
{
    struct rng rng = {test_seed()};
    (void)state;

    for (long round = test_rounds(2000); round > 0; round--) {
        struct kvbm_layout_config c = random_config(&rng);
        struct kvbm_layout *layout = allocate(&c, KVBM_STORAGE_NULL);
        struct walk w = {.layout = layout, .c = &c};

        walk_all(&w);
        kvbm_layout_destroy(layout);
    }
}

/* Storages at any address, none of them aligned. */
static void test_unaligned_storages(void **state)
{
    struct rng rng = {test_seed() + 1};
    char *memory = malloc(1 << 16);
    (void)state;

    assert_non_null(memory);
    for (long round = test_rounds(2000); round > 0; round--) {
        struct kvbm_layout_config c = random_config(&rng);
        struct kvbm_storage *storage;
        struct kvbm_layout *layout = NULL;
        struct kvbm_layout_shape s;
        struct kvbm_view first, last;
        char *at = memory + rng_below(&rng, 5000);
        uint64_t skipped;

        c.num_layers = 1;
        assert_int_equal(kvbm_layout_compute(&c, &s), 0);
        skipped = -(uintptr_t)at % c.alignment;
        if (s.required_bytes > 1 << 15)
            continue;
        storage = external(at, s.data_bytes + skipped);
        assert_int_equal(kvbm_layout_create(&c, &storage, 1, &layout), 0);
        assert_int_equal(kvbm_layout_region(layout, 0, 0, 0, &first), 0);
        assert_int_equal(first.addr, (uintptr_t)at + skipped);
        assert_int_equal(kvbm_layout_region(layout, c.num_blocks - 1, 0, c.outer_dim - 1, &last),
                         0);
        assert_true(last.addr + last.len <= (uintptr_t)at + skipped + s.data_bytes);
        kvbm_layout_destroy(layout);
        kvbm_storage_destroy(storage);
        layout = NULL;
        if (s.data_bytes + skipped == 1)
            continue;
        storage = external(at, s.data_bytes + skipped - 1); /* one byte too small */
        assert_int_equal(kvbm_layout_create(&c, &storage, 1, &layout), -EINVAL);
        assert_null(layout);
        kvbm_storage_destroy(storage);
    }
    free(memory);
}

/* Data written through every region is there when all have been written. */
static void test_memory(void **state)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};
    (void)state;

    for (size_t k = 0; k < KV_COUNT(kinds); k++) {
        struct kvbm_layout_config c = known_config(kinds[k]);
        struct kvbm_layout *layout;
        struct kvbm_view view;

        c.alignment = 1u << 16; /* more than a page */
        layout = allocate(&c, KVBM_STORAGE_SYSTEM);
        for (int pass = 0; pass < 2; pass++) {
            for (uint32_t i = 0; i < 70; i++) {
                assert_int_equal(kvbm_layout_region(layout, i / 10, i / 2 % 5, i % 2, &view), 0);
                assert_int_equal(view.kind, KVBM_STORAGE_SYSTEM);
                if (i % 2 == 0 && kinds[k] != KVBM_FULLY_CONTIGUOUS)
                    assert_int_equal(view.addr % c.alignment, 0);
                if (!pass)
                    memset((void *)(uintptr_t)view.addr, (int)i + 1, view.len);
                for (uint64_t at = 0; pass && at < view.len; at++)
                    assert_int_equal(((unsigned char *)(uintptr_t)view.addr)[at], i + 1);
            }
        }
        kvbm_layout_destroy(layout);
    }
}

/* ---- what is refused ---- */

static void test_out_of_range(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
    struct kvbm_view view;
    (void)state;

    for (int separate = 0; separate < 2; separate++) {
        struct kvbm_layout *layout;

        view.addr = 77;
        c.kind = separate ? KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS : KVBM_FULLY_CONTIGUOUS;
        layout = allocate(&c, KVBM_STORAGE_NULL);
        assert_int_equal(kvbm_layout_region(layout, 7, 0, 0, &view), -ERANGE);
        assert_int_equal(kvbm_layout_region(layout, UINT64_MAX, 0, 0, &view), -ERANGE);
        assert_int_equal(kvbm_layout_region(layout, 0, 5, 0, &view), -ERANGE);
        assert_int_equal(kvbm_layout_region(layout, 0, UINT32_MAX, 0, &view), -ERANGE);
        assert_int_equal(kvbm_layout_region(layout, 0, 0, 2, &view), -ERANGE);
        assert_int_equal(kvbm_layout_layer(layout, 7, 0, &view), -ERANGE);
        assert_int_equal(kvbm_layout_layer(layout, 0, 5, &view), -ERANGE);
        assert_int_equal(kvbm_layout_block(layout, 7, &view), separate ? -ENOTSUP : -ERANGE);
        assert_int_equal(view.addr, 77);
        assert_int_equal(kvbm_layout_region(layout, 6, 4, 1, &view), 0);
        assert_null(kvbm_layout_storage(layout, 5));
        assert_non_null(kvbm_layout_storage(layout, 4));
        kvbm_layout_destroy(layout);
    }
}

static int compute(struct kvbm_layout_config c)
{
    struct kvbm_layout_shape s = {.region_bytes = 77}, untouched = s;
    struct kvbm_layout *layout = NULL;
    struct kvbm_storage *none[1] = {NULL};
    int rc = kvbm_layout_compute(&c, &s);

    if (rc < 0) {
        assert_memory_equal(&s, &untouched, sizeof(s));
        assert_int_equal(kvbm_layout_create(&c, none, 1, &layout), rc);
        assert_null(layout);
    }
    return rc;
}

#define WITH(field, value)                                                    \
    ({                                                                        \
        struct kvbm_layout_config with = known_config(KVBM_FULLY_CONTIGUOUS); \
        with.field = (value);                                                 \
        compute(with);                                                        \
    })

static void test_contradictions(void **state)
{
    struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
    struct kvbm_layout_shape s;
    (void)state;

    assert_int_equal(WITH(alignment, 3), -EINVAL);
    assert_int_equal(WITH(alignment, 255), -EINVAL);
    assert_int_equal(WITH(num_blocks, 0), -EINVAL);
    assert_int_equal(WITH(num_layers, 0), -EINVAL);
    assert_int_equal(WITH(num_layers, KVBM_MAX_LAYERS + 1), -EINVAL);
    assert_int_equal(WITH(num_layers, KVBM_MAX_LAYERS), 0);
    assert_int_equal(WITH(outer_dim, 0), -EINVAL);
    assert_int_equal(WITH(outer_dim, 3), -EINVAL);
    assert_int_equal(WITH(page_size, 0), -EINVAL);
    assert_int_equal(WITH(page_size, 12), -EINVAL);
    assert_int_equal(WITH(inner_dim, 0), -EINVAL);
    assert_int_equal(WITH(dtype_width_bytes, 3), -EINVAL);
    assert_int_equal(WITH(dtype_width_bytes, 16), -EINVAL);
    assert_int_equal(WITH(num_heads, 2), -EINVAL); /* of 13 elements */
    assert_int_equal(WITH(num_heads, 13), 0);
    assert_int_equal(WITH(dtype, KVX_DTYPE_F16), -EINVAL); /* in 4 bytes */
    assert_int_equal(WITH(dtype, KVX_DTYPE_F32), 0);
    assert_int_equal(WITH(dtype, (kvx_dtype_t)99), -EINVAL);
    assert_int_equal(WITH(order, KVBM_ORDER_HND), -EINVAL); /* of how many heads? */
    assert_int_equal(WITH(order, (enum kvbm_block_order)2), -EINVAL);
    assert_int_equal(WITH(kind, (enum kvbm_layout_kind)0), -EINVAL);
    assert_int_equal(WITH(kind, (enum kvbm_layout_kind)5), -EINVAL);
    assert_int_equal(WITH(kind, KVBM_LAYER_SEPARATE), -EINVAL); /* which of the two? */
    assert_int_equal(WITH(size, 8), -EINVAL);
    assert_int_equal(WITH(size, offsetof(struct kvbm_layout_config, dtype_width_bytes)), 0);
    assert_int_equal(kvbm_layout_compute(NULL, &s), -EINVAL);
    assert_int_equal(kvbm_layout_compute(&c, NULL), -EINVAL);
}

/* Every element type has the width that KVX gives it, also when the width isn't said. */
static void test_dtypes(void **state)
{
    static const uint32_t widths[] = {
        [KVX_DTYPE_F16] = 2,     [KVX_DTYPE_BF16] = 2, [KVX_DTYPE_F32] = 4, [KVX_DTYPE_F8_E4M3] = 1,
        [KVX_DTYPE_F8_E5M2] = 1, [KVX_DTYPE_S32] = 4,  [KVX_DTYPE_S64] = 8, [KVX_DTYPE_U32] = 4,
        [KVX_DTYPE_U64] = 8,     [KVX_DTYPE_U8] = 1};
    (void)state;

    for (kvx_dtype_t dtype = KVX_DTYPE_F16; dtype <= KVX_DTYPE_U8; dtype++) {
        struct kvbm_layout_config c = known_config(KVBM_FULLY_CONTIGUOUS);
        struct kvbm_layout_shape s;

        c.dtype = dtype;
        for (c.dtype_width_bytes = 1; c.dtype_width_bytes <= 8; c.dtype_width_bytes *= 2)
            assert_int_equal(compute(c), c.dtype_width_bytes == widths[dtype] ? 0 : -EINVAL);
        c.dtype_width_bytes = 0;
        assert_int_equal(kvbm_layout_compute(&c, &s), 0);
        assert_int_equal(s.region_bytes, 52 * widths[dtype]);
    }
}

/* Beyond 2^62 bytes nothing is computed; right below it everything is. */
static void test_overflow(void **state)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};
    (void)state;

    for (size_t k = 0; k < KV_COUNT(kinds); k++) {
        struct kvbm_layout_config c = known_config(kinds[k]);
        struct kvbm_layout_shape s;

        c.num_blocks = UINT64_MAX;
        assert_int_equal(compute(c), -EOVERFLOW);
        c = known_config(kinds[k]);
        c.page_size = 1u << 31;
        c.inner_dim = UINT32_MAX;
        assert_int_equal(compute(c), -EOVERFLOW);
        c.num_blocks = 1; /* no stride is multiplied */
        assert_int_equal(compute(c), -EOVERFLOW);
        c = known_config(kinds[k]);
        c.page_size = 1;
        c.inner_dim = 1;
        c.dtype_width_bytes = 8;
        c.num_layers = 1;
        c.outer_dim = 1;
        c.alignment = 1;
        c.num_blocks = UINT64_C(1) << 59; /* 2^62 bytes and not one more */
        assert_int_equal(kvbm_layout_compute(&c, &s), 0);
        assert_true(s.data_bytes == UINT64_C(1) << 62);
        c.num_blocks++;
        assert_int_equal(compute(c), -EOVERFLOW);
        c.num_blocks--;
        c.alignment = 2; /* room to align is beyond it */
        assert_int_equal(compute(c), -EOVERFLOW);
    }
}

/* ---- which kind ---- */

#define REFUSED 0
#define ANY KVBM_LAYER_SEPARATE
#define BLOCK KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS
#define OUTER KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS

/* An engine's tensor says which of the two it is, and never the other one. */
static void test_tensor_shapes(void **state)
{
    static const struct {
        uint64_t num_blocks, shape[2];
        uint32_t outer_dim;
        enum kvbm_layout_kind kind;
        int resolved;
    } cases[] = {
        {7, {7, 2}, 2, ANY, BLOCK},     {7, {2, 7}, 2, ANY, OUTER},
        {7, {9, 2}, 2, ANY, BLOCK},   /* more blocks than we use */
        {7, {2, 9}, 2, ANY, REFUSED}, /* V begins behind all nine */
        {7, {2, 9}, 2, OUTER, REFUSED}, {7, {6, 2}, 2, ANY, REFUSED},
        {7, {2, 6}, 2, ANY, REFUSED},   {7, {7, 16}, 2, ANY, REFUSED}, /* K and V lie further in */
        {7, {7, 16}, 1, ANY, BLOCK},                                   /* there is one only */
        {7, {1, 7}, 1, ANY, OUTER},     {7, {1, 9}, 1, ANY, OUTER},
        {2, {2, 2}, 2, ANY, REFUSED}, /* either */
        {2, {2, 2}, 2, BLOCK, BLOCK},   {2, {2, 2}, 2, OUTER, OUTER},
        {1, {2, 1}, 2, ANY, OUTER}, /* not [blocks, outer], though there are two of them */
        {1, {1, 2}, 2, ANY, BLOCK},     {1, {1, 1}, 1, ANY, BLOCK},
        {7, {7, 2}, 2, BLOCK, BLOCK},   {7, {7, 2}, 2, OUTER, REFUSED},
        {7, {2, 7}, 2, OUTER, OUTER},   {7, {2, 7}, 2, BLOCK, REFUSED},
        {7, {0, 0}, 2, OUTER, OUTER},   {7, {0, 0}, 2, BLOCK, BLOCK},
        {7, {0, 0}, 2, ANY, REFUSED},
    };
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kvbm_layout_config c = known_config(cases[i].kind);
        struct kvbm_layout_shape s;
        int rc;

        c.num_blocks = cases[i].num_blocks;
        c.outer_dim = cases[i].outer_dim;
        memcpy(c.tensor_shape, cases[i].shape, sizeof(c.tensor_shape));
        rc = kvbm_layout_compute(&c, &s);
        if (rc != (cases[i].resolved ? 0 : -EINVAL) ||
            (rc == 0 && (int)s.kind != cases[i].resolved))
            fail_msg("case %zu: %d, kind %d", i, rc, rc ? 0 : (int)s.kind);
    }
}

/* ---- storages ---- */

static void test_storage_counts(void **state)
{
    struct kvbm_layout_config c = known_config(BLOCK);
    struct kvbm_storage *storages[6];
    struct kvbm_layout *layout = NULL;
    struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = KVBM_STORAGE_NULL, .bytes = 1 << 20};
    (void)state;

    for (size_t i = 0; i < 6; i++)
        assert_int_equal(kvbm_storage_create(&opts, &storages[i]), 0);
    assert_int_equal(kvbm_layout_create(&c, storages, 4, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_create(&c, storages, 6, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_create(&c, storages, 0, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_create(&c, NULL, 5, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_create(&c, storages, 5, NULL), -EINVAL);
    assert_null(layout);
    assert_int_equal(kvbm_layout_create(&c, storages, 5, &layout), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_ptr_equal(kvbm_layout_storage(layout, i), storages[i]);
    kvbm_layout_destroy(layout); /* and the storages are still the caller's */
    layout = NULL;
    c.kind = KVBM_FULLY_CONTIGUOUS;
    assert_int_equal(kvbm_layout_create(&c, storages, 5, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_create(&c, storages, 1, &layout), 0);
    assert_ptr_equal(kvbm_layout_storage(layout, 4), storages[0]);
    kvbm_layout_destroy(layout);
    for (size_t i = 0; i < 6; i++)
        kvbm_storage_destroy(storages[i]);
    kvbm_layout_destroy(NULL);
}

static void test_mixed_storages(void **state)
{
    struct kvbm_layout_config c = known_config(BLOCK);
    struct kvbm_storage_opts null = {
        .size = sizeof(null), .kind = KVBM_STORAGE_NULL, .bytes = 1 << 16};
    struct kvbm_storage_opts device = {.size = sizeof(device),
                                       .kind = KVBM_STORAGE_EXTERNAL,
                                       .of = KVBM_STORAGE_DEVICE,
                                       .bytes = 1 << 16,
                                       .memory = (void *)4096};
    struct kvbm_storage *s[2];
    struct kvbm_layout *layout = NULL;
    (void)state;

    c.num_layers = 2;
    assert_int_equal(kvbm_storage_create(&null, &s[0]), 0);
    assert_int_equal(kvbm_storage_create(&device, &s[1]), 0);
    assert_int_equal(kvbm_layout_create(&c, s, 2, &layout), -EINVAL); /* two kinds */
    kvbm_storage_destroy(s[0]);
    device.device_id = 1;
    assert_int_equal(kvbm_storage_create(&device, &s[0]), 0);
    assert_int_equal(kvbm_layout_create(&c, s, 2, &layout), -EINVAL); /* two devices */
    kvbm_storage_destroy(s[0]);
    s[0] = NULL;
    assert_int_equal(kvbm_layout_create(&c, s, 2, &layout), -EINVAL);
    kvbm_storage_destroy(s[1]);
    assert_null(layout);
}

/* ---- allocators ---- */

struct source {
    int calls, refuse_at, answer;
    uint64_t bytes, give;
    int live;
};

static void gone(void *arg)
{
    ((struct source *)arg)->live--;
}

static int give(void *arg, uint64_t bytes, struct kvbm_storage **ret)
{
    struct source *source = arg;
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = KVBM_STORAGE_NULL};

    source->bytes = bytes;
    if (++source->calls == source->refuse_at)
        return source->answer;
    opts.bytes = source->give ? source->give : bytes;
    assert_int_equal(kvbm_storage_create(&opts, ret), 0);
    assert_int_equal(kvbm_storage_register(*ret, "source", gone, source), 0);
    source->live++;
    return 0;
}

/* All that it gave is given back, whether the layout was made or not. */
static void test_allocators(void **state)
{
    struct source source = {0};
    struct kvbm_allocator allocator = {sizeof(allocator), give, &source};
    struct kvbm_layout_config c = known_config(OUTER);
    struct kvbm_layout *layout = NULL;
    (void)state;

    assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), 0);
    assert_int_equal(source.calls, 5);
    assert_int_equal(source.live, 5);
    assert_int_equal(source.bytes, kvbm_layout_get_shape(layout)->required_bytes);
    kvbm_layout_destroy(layout);
    assert_int_equal(source.live, 0);
    layout = NULL;
    for (int at = 1; at <= 5; at++) {
        source = (struct source){.refuse_at = at, .answer = -ENOSPC};
        assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -ENOSPC);
        assert_int_equal(source.live, 0);
        source = (struct source){.refuse_at = at, .answer = 0}; /* success, and nothing given */
        assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
        source = (struct source){.refuse_at = at, .answer = 12}; /* neither */
        assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
        assert_int_equal(source.live, 0);
    }
    source = (struct source){.give = 256 * 7 * 2 - 1};
    assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
    assert_int_equal(source.live, 0);
    allocator.size = 8;
    assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
    allocator = (struct kvbm_allocator){.size = sizeof(allocator)};
    assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
    assert_int_equal(kvbm_layout_allocate(&c, NULL, &layout), -EINVAL);
    allocator = kvbm_allocator_of(NULL);
    assert_int_equal(kvbm_layout_allocate(&c, &allocator, &layout), -EINVAL);
    assert_null(layout);
}

static void test_starved(void **state)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_config c = known_config(OUTER);
    struct kvbm_layout *layout = NULL;
    long n = 0;
    int rc;
    (void)state;

    do {
        starve_at(++n);
        rc = kvbm_layout_allocate(&c, &allocator, &layout);
        assert_int_equal(rc, starved() ? -ENOMEM : 0);
        assert_true(rc == 0 || !layout);
    } while (rc);
    starve_at(0);
    assert_int_equal(n, 1 + 5 * 2 + 1); /* the layout, five storages and their memory */
    kvbm_layout_destroy(layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_figures),  cmocka_unit_test(test_known_figures_separate),
        cmocka_unit_test(test_walk),           cmocka_unit_test(test_unaligned_storages),
        cmocka_unit_test(test_memory),         cmocka_unit_test(test_out_of_range),
        cmocka_unit_test(test_contradictions), cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_overflow),       cmocka_unit_test(test_tensor_shapes),
        cmocka_unit_test(test_storage_counts), cmocka_unit_test(test_mixed_storages),
        cmocka_unit_test(test_allocators),     cmocka_unit_test(test_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
