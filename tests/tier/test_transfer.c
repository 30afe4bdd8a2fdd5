// SPDX-License-Identifier: Apache-2.0
/* Transfers between layouts of every kind, order, width, layer range and head range, compared with
 * a copy element by element: all bytes to be written, and no others. */
#include <unistd.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "tier/transfer/transfer.h"
#include "transfer_unit.h"

#define ROUNDS 4000

static struct kvbm_copier *copier_of(uint32_t threads)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = threads};
    struct kvbm_copier *copier = NULL;

    assert_int_equal(kvbm_copier_create(&opts, &copier), 0);
    return copier;
}

static struct kvbm_storage_opts system_memory(void)
{
    return (struct kvbm_storage_opts){.size = sizeof(struct kvbm_storage_opts),
                                      .kind = KVBM_STORAGE_SYSTEM};
}

static struct kvbm_layout_config plain(void)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = 8,
                                       .num_layers = 3,
                                       .outer_dim = 2,
                                       .page_size = 4,
                                       .inner_dim = 24,
                                       .num_heads = 4,
                                       .dtype = KVX_DTYPE_F16};
}

static void test_every_pair(void **state)
{
    struct kvbm_storage_opts memory = system_memory();
    struct kvbm_copier *copier = copier_of(2);
    struct rng rng = {test_seed()};
    long done = 0, rounds = test_rounds(ROUNDS);

    (void)state;
    for (long i = 0; i < rounds; i++) {
        struct kvbm_transfer t = {.flow = rng_below(&rng, 2)};
        struct kvbm_layout_config c[2];
        uint32_t src[64], dst[64];
        struct kvbm_layout *a, *b;
        int rc;

        unit_configs(&rng, c);
        a = unit_layout(&c[0], &memory);
        b = unit_layout(&c[1], &memory);
        t.src = a;
        t.dst = b;
        unit_ranges(&rng, &t, src, dst);
        rc = unit_round(copier, &t, &rng);
        assert_int_equal(rc, 0);
        done++;
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
    }
    assert_int_equal(done, rounds);
    kvbm_copier_destroy(copier);
}

/* The same with a file on one side: pages of O_DIRECT that are shared with what isn't to change, and pieces that aren't. */
static void test_files(void **state)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 1, .io_depth = 3};
    struct kvbm_storage_opts memory = system_memory(),
                             file = {.size = sizeof(file), .kind = KVBM_STORAGE_DISK};
    struct kvbm_copier *copiers[2];
    struct rng rng = {test_seed()};
    long refused = 0, rounds = test_rounds(400);

    (void)state;
    for (int i = 0; i < 2; i++) {
        opts.io = i ? KVBM_IO_THREADS : KVBM_IO_AUTO;
        assert_int_equal(kvbm_copier_create(&opts, &copiers[i]), 0);
    }
    for (long i = 0; i < rounds; i++) {
        struct kvbm_transfer t = {.flow = rng_below(&rng, 2)};
        bool to_file = rng_below(&rng, 2), converts;
        struct kvbm_layout_config c[2];
        uint32_t src[64], dst[64];
        struct kvbm_layout *a, *b;
        int rc;

        unit_configs(&rng, c);
        c[0].alignment = rng_below(&rng, 2) ? 4096 : c[0].alignment;
        c[1].alignment = rng_below(&rng, 2) ? 4096 : c[1].alignment;
        file.direct = rng_below(&rng, 2);
        a = unit_layout(&c[0], to_file ? &memory : &file);
        b = unit_layout(&c[1], to_file ? &file : &memory);
        t.src = a;
        t.dst = b;
        unit_ranges(&rng, &t, src, dst);
        rc = unit_round(copiers[i % 2], &t, &rng);
        converts =
            c[0].dtype != c[1].dtype || c[0].order != c[1].order || c[0].order == KVBM_ORDER_NHD;
        assert_true(rc == 0 || (rc == -ENOTSUP && to_file && t.n_heads && converts));
        refused += rc < 0;
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
    }
    assert_true(refused < rounds / 2);
    kvbm_copier_destroy(copiers[0]);
    kvbm_copier_destroy(copiers[1]);
}

/* A file that was cut: what is beyond its end is missing, and said to be; the rest comes. */
static void test_cut_file(void **state)
{
    struct kvbm_layout_config c = plain();
    struct kvbm_storage_opts memory = system_memory(),
                             file = {.size = sizeof(file), .kind = KVBM_STORAGE_DISK};
    struct kvbm_copier *copier = copier_of(1);
    struct kvbm_layout *a, *b;
    uint32_t ids[64];
    struct rng rng = {test_seed()};
    uint8_t ok[8];

    (void)state;
    c.num_blocks = 64;
    c.alignment = 4096;
    for (uint32_t i = 0; i < 64; i++)
        ids[i] = 63 - i; /* each a piece of its own */
    for (int direct = 0; direct < 2; direct++) {
        struct kvbm_transfer t = {
            .size = sizeof(t), .src_blocks = ids, .dst_blocks = ids, .n = 64, .ok = ok};
        struct bytes from, want, got;
        struct kvbm_done done;
        bool lost[64];
        int64_t id;

        file.direct = direct;
        a = unit_layout(&c, &file);
        b = unit_layout(&c, &memory);
        unit_fill(a, &rng, false);
        unit_fill(b, &rng, false);
        from = unit_snapshot(a);
        want = unit_snapshot(b);
        t.src = a;
        t.dst = b;
        for (int i = 0; i < 64; i++)
            lost[i] = ids[i] >= 40;
        unit_apply(&t, &from, &want, lost);
        assert_int_equal(ftruncate((int)kvbm_storage_device_id(kvbm_layout_storage(a, 0)),
                                   (off_t)(40 * kvbm_layout_get_shape(a)->block_stride)),
                         0);
        id = kvbm_copier_submit(copier, &t);
        assert_true(id > 0);
        assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
        assert_int_equal(done.status, -EIO);
        assert_int_equal(done.n_ok, 40);
        got = unit_snapshot(b);
        for (uint32_t i = 0; i < 64; i++) {
            size_t at = (size_t)(ids[i] * kvbm_layout_get_shape(b)->block_stride);

            assert_int_equal(ok[i / 8] >> i % 8 & 1, !lost[i]);
            if (!lost[i])
                assert_memory_equal(got.at + at, want.at + at,
                                    kvbm_layout_get_shape(b)->natural_block_bytes);
        }
        free(from.at);
        free(want.at);
        free(got.at);
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
    }
    kvbm_copier_destroy(copier);
}

/* A block larger than a chunk is shared by layers, many small ones by number. */
static void test_large_and_many(void **state)
{
    static const struct {
        uint32_t layers, page, inner, blocks;
    } shapes[] = {{40, 16, 8192, 3}, {1, 16, 131072, 2}, {7, 32, 65536, 2}, {1, 1, 8, 5000}};
    struct kvbm_storage_opts memory = system_memory();
    struct kvbm_copier *copier = copier_of(3);
    struct rng rng = {test_seed()};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(shapes); i++) {
        struct kvbm_layout_config c = {.size = sizeof(c),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = shapes[i].blocks,
                                       .num_layers = shapes[i].layers,
                                       .outer_dim = 2,
                                       .page_size = shapes[i].page,
                                       .inner_dim = shapes[i].inner,
                                       .num_heads = 8};
        struct kvbm_layout *a = unit_layout(&c, &memory), *b;
        uint32_t *ids = calloc(shapes[i].blocks, sizeof(*ids));
        size_t len = (size_t)kvbm_layout_get_shape(a)->data_bytes;
        struct kvbm_done done;
        struct kvbm_transfer t = {.size = sizeof(t), .src = a, .n = shapes[i].blocks};
        struct kvbm_layout *back = unit_layout(&c, &memory);
        uint8_t *ok = malloc((t.n + 7) / 8);
        int64_t id;

        c.order = KVBM_ORDER_HND;
        c.kind = KVBM_LAYER_SEPARATE;
        c.tensor_shape[0] = 2;
        c.tensor_shape[1] = shapes[i].blocks;
        if (shapes[i].blocks == 2)
            c.kind = KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS;
        b = unit_layout(&c, &memory);
        for (uint32_t k = 0; k < t.n; k++)
            ids[k] = k;
        for (size_t k = 0; k < len / 8; k++)
            ((uint64_t *)kvbm_storage_host_memory(kvbm_layout_storage(a, 0)))[k] = rng_next(&rng);
        t.src_blocks = t.dst_blocks = ids;
        t.ok = ok;
        t.dst = b;
        id = kvbm_copier_submit(copier, &t);
        assert_true(id > 0);
        assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
        assert_int_equal(done.n_ok, t.n);
        assert_int_equal(done.bytes, len);
        t.src = b;
        t.dst = back;
        id = kvbm_copier_submit(copier, &t);
        assert_true(id > 0);
        assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
        for (uint32_t k = 0; k < t.n; k++)
            assert_true(ok[k / 8] >> k % 8 & 1);
        assert_memory_equal(kvbm_storage_host_memory(kvbm_layout_storage(a, 0)),
                            kvbm_storage_host_memory(kvbm_layout_storage(back, 0)), len);
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
        kvbm_layout_destroy(back);
        free(ids);
        free(ok);
    }
    kvbm_copier_destroy(copier);
}

/* ---- pieces ---- */

static uint64_t pieces_of(const struct kvbm_layout *src, const struct kvbm_layout *dst,
                          const uint32_t *from, const uint32_t *to, uint32_t n, uint32_t n_layers)
{
    struct kvbm_copier *copier = copier_of(1);
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = src,
                              .dst = dst,
                              .src_blocks = from,
                              .dst_blocks = to,
                              .n = n,
                              .n_layers = n_layers};
    int64_t id = kvbm_copier_submit(copier, &t);
    struct kvbm_copier_stats stats = {.size = sizeof(stats)};
    struct kvbm_done done;

    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
    assert_int_equal(done.status, 0);
    kvbm_copier_get_stats(copier, &stats);
    assert_int_equal(stats.blocks, n);
    kvbm_copier_destroy(copier);
    return stats.pieces;
}

/* Neighbours on both sides are one piece; and only these. */
static void test_joining(void **state)
{
    struct kvbm_storage_opts memory = system_memory();
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = KVBM_FULLY_CONTIGUOUS,
                                   .num_blocks = 16,
                                   .num_layers = 4,
                                   .outer_dim = 2,
                                   .page_size = 4,
                                   .inner_dim = 24};
    const uint32_t up[] = {3, 4, 5, 6}, gap[] = {3, 4, 6, 7}, down[] = {6, 5, 4, 3};
    struct kvbm_layout *whole = unit_layout(&c, &memory), *also = unit_layout(&c, &memory), *padded,
                       *outer, *block, *outer2;

    (void)state;
    c.alignment = 4096;
    padded = unit_layout(&c, &memory);
    c.alignment = 0;
    c.kind = KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS;
    outer = unit_layout(&c, &memory);
    outer2 = unit_layout(&c, &memory);
    c.kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS;
    block = unit_layout(&c, &memory);
    assert_int_equal(pieces_of(whole, also, up, up, 4, 0), 1);
    assert_int_equal(pieces_of(whole, also, up, gap, 4, 0), 2);
    assert_int_equal(pieces_of(whole, also, down, down, 4, 0), 4);
    assert_int_equal(pieces_of(whole, also, up, up, 4, 3), 4); /* not all layers: a hole between */
    assert_int_equal(pieces_of(whole, padded, up, up, 4, 0), 4);
    assert_int_equal(pieces_of(padded, whole, up, up, 4, 0), 4);
    assert_int_equal(pieces_of(whole, block, up, up, 4, 0), 4 * 4);
    assert_int_equal(pieces_of(block, block == outer ? outer : whole, up, up, 4, 2), 4 * 2);
    assert_int_equal(pieces_of(outer, outer2, up, up, 4, 0), 4 * 2); /* all blocks of a K or V */
    assert_int_equal(pieces_of(outer, block, up, up, 4, 0), 4 * 2 * 4);
    assert_int_equal(pieces_of(whole, outer, up, up, 4, 0), 4 * 2 * 4);
    kvbm_layout_destroy(whole);
    kvbm_layout_destroy(also);
    kvbm_layout_destroy(padded);
    kvbm_layout_destroy(outer);
    kvbm_layout_destroy(outer2);
    kvbm_layout_destroy(block);
}

/* ---- what is refused ---- */

static void refuses(struct kvbm_copier *copier, const struct kvbm_transfer *t, int err)
{
    assert_int_equal(kvbm_copier_submit(copier, t), err);
}

static void test_refusals(void **state)
{
    const uint32_t two[] = {1, 2}, twice[] = {3, 3}, beyond[] = {1, 8};
    struct kvbm_storage_opts memory = system_memory(),
                             null = {.size = sizeof(null), .kind = KVBM_STORAGE_NULL};
    struct kvbm_layout_config c = plain();
    struct kvbm_layout *a = unit_layout(&c, &memory), *b = unit_layout(&c, &memory), *other;
    struct kvbm_copier *copier = copier_of(1);
    struct kvbm_transfer ok = {.size = sizeof(ok),
                               .src = a,
                               .dst = b,
                               .src_blocks = two,
                               .dst_blocks = two,
                               .n = 2},
                         t;
    struct kvbm_copier_stats stats = {.size = sizeof(stats)};
    struct kvbm_layout_config other_configs[6];

    (void)state;
    t = ok, t.dst_blocks = twice, refuses(copier, &t, -EINVAL);
    t = ok, t.dst_blocks = beyond, refuses(copier, &t, -EINVAL);
    t = ok, t.src_blocks = beyond, refuses(copier, &t, -EINVAL);
    t = ok, t.n = 0, refuses(copier, &t, -EINVAL);
    t = ok, t.size = 8, refuses(copier, &t, -EINVAL);
    t = ok, t.src = NULL, refuses(copier, &t, -EINVAL);
    t = ok, t.dst = a, refuses(copier, &t, -EINVAL); /* a target that is a source */
    t = ok, t.first_layer = 3, refuses(copier, &t, -EINVAL);
    t = ok, t.first_layer = 1, t.n_layers = 3, refuses(copier, &t, -EINVAL);
    t = ok, t.first_layer = 2, t.n_layers = UINT32_MAX, refuses(copier, &t, -EINVAL);
    t = ok, t.src_head = 1, refuses(copier, &t, -EINVAL);
    t = ok, t.n_heads = 5, refuses(copier, &t, -EINVAL);
    t = ok, t.n_heads = UINT32_MAX, t.src_head = 2, refuses(copier, &t, -EINVAL);
    t = ok, t.n_heads = 2, t.dst_head = 3, refuses(copier, &t, -EINVAL);
    t = ok, t.flow = (enum kvbm_flow)7, refuses(copier, &t, -EINVAL);
    t = ok, t.ready_fd = 999999, refuses(copier, &t, -EBADF);
    t = ok, t.ready_event = &t, refuses(copier, &t, -ENOTSUP);
    for (int i = 0; i < 6; i++)
        other_configs[i] = plain();
    other_configs[0].num_layers = 4;
    other_configs[1].outer_dim = 1;
    other_configs[2].page_size = 8;
    other_configs[3].inner_dim = 48;
    other_configs[4].num_heads = 6;
    other_configs[5].dtype = 0, other_configs[5].dtype_width_bytes = 4; /* width without dtype */
    for (int i = 0; i < 6; i++) {
        other = unit_layout(&other_configs[i], &memory);
        t = ok, t.dst = other, refuses(copier, &t, -EINVAL);
        kvbm_layout_destroy(other);
    }
    other = unit_layout(&c, &null);
    t = ok, t.src = other, refuses(copier, &t, -ENOTSUP);
    t = ok, t.dst = other, refuses(copier, &t, -ENOTSUP);
    kvbm_layout_destroy(other);
    kvbm_copier_get_stats(copier, &stats);
    assert_int_equal(stats.submitted, 0);
    assert_int_equal(stats.jobs_now, 0);
    assert_int_equal(stats.blocks_now, 0);
    kvbm_layout_destroy(a);
    kvbm_layout_destroy(b);
    kvbm_copier_destroy(copier);
}

/* In one layout blocks may be copied to others. */
static void test_within_one(void **state)
{
    struct kvbm_storage_opts memory = system_memory();
    struct kvbm_layout_config c = plain();
    struct kvbm_layout *a = unit_layout(&c, &memory);
    struct kvbm_copier *copier = copier_of(1);
    const uint32_t from[] = {1, 2, 1}, to[] = {4, 3, 7};
    struct kvbm_transfer t = {
        .size = sizeof(t), .src = a, .dst = a, .src_blocks = from, .dst_blocks = to, .n = 3};
    struct rng rng = {test_seed()};
    struct bytes want, got;
    struct kvbm_done done;
    int64_t id;

    (void)state;
    unit_fill(a, &rng, false);
    want = unit_snapshot(a);
    unit_apply(&t, &want, &want, NULL);
    id = kvbm_copier_submit(copier, &t);
    assert_true(id > 0);
    assert_int_equal(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done), 0);
    got = unit_snapshot(a);
    assert_memory_equal(want.at, got.at, got.len);
    free(want.at);
    free(got.at);
    kvbm_layout_destroy(a);
    kvbm_copier_destroy(copier);
}

/* Copies past the cache, at every offset and length around their limits. */
static void test_copy(void **state)
{
    size_t most = (size_t)200 << 10;
    unsigned char *from = malloc(most), *to = malloc(most), *want = malloc(most);
    struct rng rng = {test_seed()};

    (void)state;
    for (size_t i = 0; i < most; i++)
        from[i] = (unsigned char)rng_next(&rng);
    for (long i = 0; i < test_rounds(2000); i++) {
        size_t a = rng_below(&rng, 200), b = rng_below(&rng, 200);
        size_t len = rng_below(&rng, 2) ? (32u << 10) - 100 + rng_below(&rng, 200)
                                        : rng_below(&rng, (uint32_t)(most - 200));

        memset(to, 0x5A, most);
        memset(want, 0x5A, most);
        memcpy(want + b, from + a, len);
        tier_copy(to + b, from + a, len);
        assert_memory_equal(to, want, most);
    }
    free(from);
    free(to);
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pair), cmocka_unit_test(test_files),
        cmocka_unit_test(test_cut_file),   cmocka_unit_test(test_large_and_many),
        cmocka_unit_test(test_joining),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_within_one), cmocka_unit_test(test_copy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
