// SPDX-License-Identifier: Apache-2.0
/* The GPU path without a GPU. Each thread's work in each kernel is plain functions
 * (kvx/cuda/work.h). emulated_backend.c runs them here, one thread after the other, over the same
 * matrix and against the same reference as the host path. Only the launch itself and the hardware's
 * conversions need a GPU. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvx/backend.h"
#include "kvx/cuda/work.h"
#include "kvx/kvx_cases.h"
#include "kvx/kvx_layers.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCALE 10
#else
#define SCALE 50
#endif

static uint64_t seed(void)
{
    return case_setting("KV_TEST_SEED", (uint64_t)getpid() * 2654435761U + 1);
}

/* --------------------------------------------------------------------------------------------- */

static const struct kvx_place_hooks device_hooks = {KVX_MEMORY_DEVICE, NULL, host_put, host_get,
                                                    free};

static void test_layers(void **state)
{
    (void)state;
    for (unsigned kind = 0; kind < 4; kind++) {
        assert_true(layers_agree(&device_hooks, 2, kind));
        assert_true(layers_agree(&device_hooks, 33, kind));
        assert_true(layers_agree(&device_hooks, 70, kind));
    }
    for (unsigned kind = 0; kind < 8; kind++) {
        assert_true(copies_agree(&device_hooks, 6, kind));
        assert_true(copies_agree(&device_hooks, 70, kind));
    }
}

/* Plans of both kinds of accesses must have run, converting and not: the matrix is what shows that they are right. */
static void check_accesses(void)
{
    void *library = dlopen(getenv("KVX_CUDA_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    unsigned(*n)[2][2] = library ? dlsym(library, "emulated_plans") : NULL;

    assert_non_null(n);
    for (int op = KVX_OP_WRITE; op <= KVX_OP_COPY; op++) {
        for (int convert = 0; convert < 2; convert++) {
            assert_true(n[op][0][convert] >= 1);
            if (op != KVX_OP_COPY || !convert) /* such a copy always moves pieces */
                assert_true(n[op][1][convert] >= 5);
        }
    }
    dlclose(library);
}

static void test_matrix(void **state)
{
    struct kvx_matrix m = {.seed = seed(),
                           .scale = (uint32_t)case_setting("KV_TEST_SCALE", 100) * SCALE / 100 + 1};

    (void)state;
    assert_non_null(kvx_backend_get());
    assert_string_equal(kvx_backend_get()->name, "emulated");
    matrix_run(&m, &device_hooks);
    printf("%llu cases, %llu failed (KV_TEST_SEED=%llu)\n", (unsigned long long)m.n_run,
           (unsigned long long)m.n_failed, (unsigned long long)m.seed);
    assert_int_equal(m.n_failed, 0);
    assert_int_equal(m.n_out_of_range, 0); /* on a device: dropped and counted */
    assert_true(m.n_ok >= 50);
    check_accesses();
}

/* --------------------------------------------------------------------------------------------- */
/* Every unit of every token of every part belongs to exactly one thread. */

/* A plan whose shape is all that matters. @chunked: as HND_PACKED, so lanes form rectangles. */
static struct kvx_plan shape_plan(struct dice *d, bool chunked)
{
    struct kvx_plan p = {.op = KVX_OP_WRITE,
                         .src_dtype = KVX_DTYPE_BF16,
                         .dst_dtype = KVX_DTYPE_BF16,
                         .n_layers = 1 + below(d, 3),
                         .n_heads = 1 + below(d, 9),
                         .head_dim = 8 * (1 + below(d, 17)),
                         .n_tokens = 1 + below(d, 70)};

    p.block_size = kvx_divisor_make(16);
    for (int kv = 0; kv < 2; kv++) {
        struct kvx_map *src = &p.side[kv].src, *dst = &p.side[kv].dst;

        src->run = dst->run = p.head_dim;
        src->align = dst->align = 64;
        src->elem = dst->elem = 2;
        src->head = dst->head = (int64_t)p.head_dim * 2;
        src->token = dst->token = src->head * p.n_heads;
        src->pack = dst->pack = kvx_divisor_make(p.head_dim);
        if (chunked) {
            dst->run = 8;
            dst->token = 16;
            dst->chunk = 256;
            dst->pack = kvx_divisor_make(8);
        }
    }
    return p;
}

static void visit_tile(const struct kvx_plan *p, const struct kvx_job *job, uint64_t tile,
                       uint8_t *seen)
{
    struct kvx_tile_start start;
    struct kvx_located at;

    kvx_tile_begin(job, tile, &start);
    assert_true(start.layer < p->n_layers);
    for (uint32_t i = 0; i < 1U << job->tile_log; i++) {
        uint64_t n;

        kvx_locate(job, &start, i, &at);
        if (!at.present)
            continue;
        assert_true(at.token < p->n_tokens && at.head < p->n_heads && at.dim < p->head_dim);
        assert_int_equal(at.dim % job->unit, 0);
        n = ((start.layer * 2 + start.kv) * p->n_tokens + at.token) * p->n_heads + at.head;
        n = (n * p->head_dim + at.dim) / job->unit;
        assert_int_equal(seen[n]++, 0);
    }
}

static void test_every_unit_once(void **state)
{
    struct dice d = {seed() | 1};
    int n_rectangles = 0;

    (void)state;
    for (int round = 0; round < 300; round++) {
        struct kvx_plan p = shape_plan(&d, round % 2);
        struct kvx_job job;
        size_t n = (size_t)2 * p.n_layers * p.n_tokens * p.n_heads * p.head_dim;
        uint8_t *seen;

        assert_int_equal(kvx_job_make(&p, below(&d, 4) * 5, 1 << 20, &job), 0);
        assert_true(job.token_lanes + job.unit_lanes == (job.token_lanes ? 5 : 0));
        n_rectangles += job.token_lanes > 0;
        assert_int_equal(1U << job.tile_log, job.threads * job.unroll);
        n /= job.unit;
        seen = calloc(n, 1);
        assert_non_null(seen);
        for (uint64_t tile = 0; tile < job.n_tiles; tile++)
            visit_tile(&p, &job, tile, seen);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(seen[i], 1);
        free(seen);
    }
    assert_in_range(n_rectangles, 100, 150);
}

/* The shapes that the numbers in docs/kvx-cuda.md are about. */
static void test_shapes(void **state)
{
    struct dice d = {1};
    struct kvx_plan p = shape_plan(&d, false);
    struct kvx_job job;

    (void)state;
    p.n_layers = 1;
    p.n_heads = 8;
    p.head_dim = 128;
    p.n_tokens = 64; /* a decode step */
    for (int kv = 0; kv < 2; kv++)
        p.side[kv].src.run = p.side[kv].dst.run = 128;
    assert_int_equal(kvx_job_make(&p, 132, 50 << 20, &job), 0);
    assert_int_equal(job.unroll, 1);
    assert_true(job.n_tiles >= 128); /* all multiprocessors take part */
    assert_true(kvx_job_kind(&p, &job).whole);
    p.n_tokens = 1 << 18; /* 2 GiB read and written */
    assert_int_equal(kvx_job_make(&p, 132, 50 << 20, &job), 0);
    assert_int_equal(job.unroll, 4);
    assert_int_equal(job.threads, 256);
    assert_int_equal(job.stream, 1);
    assert_int_equal(job.n_tiles << job.tile_log, (uint64_t)p.n_tokens * 2 * 8 * 16);
}

/* A tile that is stepped over: no unit of it exists below its sequence's length. */
static void check_padding(const struct kvx_job *job, uint64_t tile, const int32_t *lengths,
                          uint32_t len)
{
    struct kvx_tile_start start;
    struct kvx_located at;

    if (tile >= job->n_tiles)
        return;
    kvx_tile_begin(job, tile, &start);
    for (uint32_t i = 0; i < 1U << job->tile_log; i++) {
        kvx_locate(job, &start, i, &at);
        assert_false(at.present && (int64_t)(at.token % len) < lengths[at.token / len]);
    }
}

/*
 * A gather that is nearly all padding: a block of threads looks at no more tiles than there is
 * work, plus two for each row, and never steps over work.
 */
static bool skip_padding(struct dice *d, bool chunked)
{
    enum { ROWS = 6, LEN = 39997 }; /* odd: rectangles of tokens reach over the ends of rows */
    int32_t lengths[ROWS] = {100, 0, LEN, 1, 0, 3}, table[ROWS] = {0};
    struct kvx_plan p = shape_plan(d, chunked);
    struct kvx_job job;
    uint32_t n_blocks = 1 + below(d, 3);
    uint64_t n_work = 0, n_seen = 0;

    p.op = KVX_OP_GATHER;
    p.format = KVX_BLOCK_TABLE_PACKED;
    p.n_layers = p.n_beams = p.max_blocks = 1;
    p.n_sequences = ROWS;
    p.max_seq_len = LEN;
    p.lengths = lengths;
    p.indices = table;
    assert_int_equal(kvx_job_make(&p, 2, 1 << 20, &job), 0);
    kvx_job_set_blocks(&job, n_blocks);
    for (uint32_t block = 0; block < n_blocks; block++) {
        uint64_t tile = block;

        while (tile < job.n_tiles) {
            struct kvx_tile_start start;
            uint64_t next;

            kvx_tile_begin(&job, tile, &start);
            next = kvx_skip_padding(&job, &p, tile, &start, n_blocks);
            assert_true(next >= tile && next % n_blocks == block);
            n_seen++;
            for (uint64_t over = tile; over < next; over += n_blocks)
                check_padding(&job, over, lengths, LEN);
            tile = next == tile ? tile + n_blocks : next;
        }
    }
    n_work = (job.n_tiles / ROWS) * (100 + LEN + 1 + 3) / LEN;
    assert_true(n_seen <= n_work + (uint64_t)2 * ROWS * 3 + 16);
    assert_true(job.n_tiles > 2 * n_seen);
    return job.token_lanes > 0;
}

static void test_padding(void **state)
{
    struct dice d = {seed() | 1};
    int n_rectangles = 0;

    (void)state;
    for (int round = 0; round < 40; round++)
        n_rectangles += skip_padding(&d, round % 2);
    assert_in_range(n_rectangles, 10, 20);
}

/* Too much for any device is refused, not wrapped around. */
static void test_limits(void **state)
{
    struct dice d = {1};
    struct kvx_plan p = shape_plan(&d, false);
    struct kvx_job job;

    (void)state;
    p.n_heads = UINT32_MAX;
    p.head_dim = 1 << 20;
    assert_int_equal(kvx_job_make(&p, 132, 1 << 20, &job), -1);
    p.n_heads = 1 << 12;
    p.op = KVX_OP_COPY;
    p.n_pairs = UINT32_MAX;
    p.block_size = kvx_divisor_make(UINT32_MAX);
    assert_int_equal(kvx_job_make(&p, 132, 1 << 20, &job), -1);
    p.op = KVX_OP_GATHER;
    p.n_sequences = p.n_beams = p.max_seq_len = UINT32_MAX;
    assert_int_equal(kvx_job_make(&p, 132, 1 << 20, &job), -1);
}

/* --------------------------------------------------------------------------------------------- */
/* Divisions by multiplication */

static void check_quotient(float x, float d, float reciprocal)
{
    volatile float exact = x / d;
    float q = kvx_quotient(x, d, reciprocal);

    if (kvx_f32_to_e4m3(q) != kvx_f32_to_e4m3(exact) ||
        kvx_f32_to_e5m2(q) != kvx_f32_to_e5m2(exact))
        fail_msg("%a / %a: %a, expected %a", (double)x, (double)d, (double)q, (double)exact);
}

/* All elements of a unit at once, as kernels divide them. */
static void check_unit(const float x[16], float d)
{
    float value[16];

    memcpy(value, x, sizeof(value));
    kvx_unit_scale(16, value, NULL, &d);
    for (int i = 0; i < 16; i++) {
        volatile float exact = x[i] / d;

        if (kvx_f32_to_e4m3(value[i]) != kvx_f32_to_e4m3(exact) ||
            kvx_f32_to_e5m2(value[i]) != kvx_f32_to_e5m2(exact))
            fail_msg("%a / %a: %a, expected %a", (double)x[i], (double)d, (double)value[i],
                     (double)exact);
    }
}

/* Units of moderate values, of values around the boundaries, and of any bits. */
static void check_units(struct dice *dice, float d)
{
    for (uint32_t round = 0; round < 64; round++) {
        float x[16];

        for (int i = 0; i < 16; i++) {
            uint32_t bits = (uint32_t)roll(dice);
            uint8_t byte = (uint8_t)(bits % 126);
            float edge = (kvx_e4m3_to_f32(byte) + kvx_e4m3_to_f32((uint8_t)(byte + 1))) / 2 * d;

            x[i] = round % 4 == 0   ? kvx_bits_float(bits)
                   : round % 4 == 1 ? kvx_bits_float(kvx_float_bits(edge) + bits % 7 - 3)
                                    : kvx_bf16_to_f32((uint16_t)bits);
            if (round % 4 == 3 && !(fabsf(x[i]) < 0x1p20F))
                x[i] = kvx_bits_float(bits & 0x80000000); /* tame, with both zeros */
        }
        if (round % 8 == 7)
            x[round / 8] = round % 16 == 7 ? INFINITY : -0x1p64F;
        check_unit(x, d);
    }
}

/* A value whose quotient is too large, behind one that a signed sum would take away from it. */
static void check_opposites(float d)
{
    for (int at = 1; at < 16; at++) {
        for (int eighths = 0; eighths < 8; eighths++) {
            float x[16] = {at % 2 ? -0x1p63F : 0x1p63F};

            x[at] = ldexpf(1.0F + (float)eighths / 8, 64) * (at % 2 ? 1.0F : -1.0F);
            check_unit(x, d);
        }
    }
}

/* Just about every boundary between FP8 values times @d, where a wrong last bit would show. */
static void check_boundaries(float d, float reciprocal)
{
    for (uint32_t byte = 0; byte < 127; byte++) {
        float edges[2] = {
            (kvx_e4m3_to_f32((uint8_t)byte) + kvx_e4m3_to_f32((uint8_t)(byte + 1))) / 2,
            (kvx_e5m2_to_f32((uint8_t)byte) + kvx_e5m2_to_f32((uint8_t)(byte + 1))) / 2};

        for (int i = 0; i < 2; i++) {
            float x = edges[i] * d;

            for (int step = -3; step <= 3 && x > 0 && x < 0x1p120F; step++)
                check_quotient(kvx_bits_float(kvx_float_bits(x) + (uint32_t)step), d, reciprocal);
        }
    }
}

static void test_quotients(void **state)
{
    static const float special[] = {
        1.0F, 3.0F, 0x1p-64F, 0x1p64F, 0x1.fffffep0F, 0x1.fffffep-64F, 0x1.4p-64F, 0x1.000002p-64F};
    const uint32_t n_special = sizeof(special) / sizeof(special[0]);
    struct dice dice = {seed() | 1};
    uint32_t rounds =
        (uint32_t)(200 * case_setting("KV_TEST_SCALE", 100) * SCALE / 10000) + n_special + 1;

    (void)state;
    for (uint32_t round = 0; round < rounds; round++) {
        float d = round < n_special
                      ? special[round]
                      : ldexpf(1.0F + (float)(roll(&dice) >> 41) * 0x1p-23F,
                               (int)below(&dice, round % 2 ? 127 : 16) - (round % 2 ? 63 : 8));
        float reciprocal = 1.0F / d;

        assert_true(kvx_is_plain_divisor(d));
        check_boundaries(d, reciprocal);
        check_units(&dice, d);
        check_opposites(d);
        check_units(&dice, ldexpf(1.0F, (int)below(&dice, 129) - 64)); /* a power of two */
        for (uint32_t half = 0; half < 65536; half += round < 8 ? 1 : 7) {
            check_quotient(kvx_f16_to_f32((uint16_t)half), d, reciprocal);
            check_quotient(kvx_bf16_to_f32((uint16_t)half), d, reciprocal);
            check_quotient(kvx_bits_float((uint32_t)roll(&dice)), d, reciprocal);
        }
    }
    assert_false(kvx_is_plain_divisor(0.0F));
    assert_false(kvx_is_plain_divisor(-1.0F));
    assert_false(kvx_is_plain_divisor(NAN));
    assert_false(kvx_is_plain_divisor(INFINITY));
}

/* Odd divisors beyond the plain ones: both ways through kvx_unit_scale give what the definition
 * says. */
static void test_scales(void **state)
{
    static const float scales[] = {0.0F, -0.0F, -3.0F, NAN, INFINITY, 0x1p-100F, 0x1p100F, 0.7F};
    static const float values[] = {0.0F, -0.0F, 1.0F, -1.0F, 448.0F, 1e30F, INFINITY, NAN};

    (void)state;
    for (int s = 0; s < 8; s++) {
        float value[8];

        memcpy(value, values, sizeof(value));
        kvx_unit_scale(8, value, &scales[7], &scales[s]);
        for (int i = 0; i < 8; i++) {
            volatile float product = values[i] * scales[7], exact = product / scales[s];

            assert_int_equal(kvx_f32_to_e4m3(value[i]), kvx_f32_to_e4m3(exact));
            assert_int_equal(kvx_f32_to_e5m2(value[i]), kvx_f32_to_e5m2(exact));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_unit_once), cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_padding),         cmocka_unit_test(test_limits),
        cmocka_unit_test(test_quotients),       cmocka_unit_test(test_scales),
        cmocka_unit_test(test_layers),          cmocka_unit_test(test_matrix),
    };
    const char *build = getenv("KV_BUILD_DIR");
    char path[4096];

    snprintf(path, sizeof(path), "%s/tests/libkvx_emulated.so", build ? build : "build");
    setenv("KVX_CUDA_LIBRARY", path, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
