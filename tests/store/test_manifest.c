// SPDX-License-Identifier: Apache-2.0
/* Manifests: written ones are read, and every other input is refused. */
#include "base/unit.h"
#include "index/random.h"
#include "store/object/manifest.h"

static void make(struct rng *rng, struct kvs_manifest *m, struct kv_buf *bytes)
{
    size_t n = rng_below(rng, 40);
    uint8_t key[16];

    memset(m, 0, sizeof(*m));
    m->format = rng_below(rng, 2) ? KVS_FORMAT_BYTES : KVS_FORMAT_LLAMA;
    m->created_s = rng_next(rng);
    m->fingerprint = rng_below(rng, 2) ? strdup("llama-3-8b f16") : NULL;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < 16; j++)
            key[j] = (uint8_t)rng_next(rng);
        assert_int_equal(kvs_manifest_add(m, key, 1 + rng_below(rng, 1u << 20)), 0);
    }
    for (uint64_t at = 0; at + 4096 <= m->bytes && m->n_weaves < 5; at += 4096)
        assert_int_equal(kvs_manifest_add_weave(m, at, 2, 64 + (uint32_t)(at >> 13), 16), 0);
    *bytes = (struct kv_buf)KV_BUF_INIT;
    assert_int_equal(kvs_manifest_encode(m, bytes), 0);
}

static void drop(struct kvs_manifest *m, struct kv_buf *bytes)
{
    free(m->fingerprint);
    free(m->chunks);
    free(m->weaves);
    kv_buf_fini(bytes);
}

static void test_round_trip(void **state)
{
    struct rng rng = {test_seed()};
    (void)state;

    for (long i = test_rounds(500); i > 0; i--) {
        struct kvs_manifest m, *got;
        struct kv_buf bytes;
        size_t n;

        make(&rng, &m, &bytes);
        assert_int_equal(kvs_manifest_decode(bytes.data, bytes.len, &got), 0);
        assert_int_equal(kvs_manifest_bytes(got), m.bytes);
        assert_int_equal(kvs_manifest_format(got), m.format);
        assert_int_equal(kvs_manifest_created_s(got), m.created_s);
        assert_string_equal(kvs_manifest_fingerprint(got), m.fingerprint ? m.fingerprint : "");
        assert_int_equal(got->n_weaves, m.n_weaves);
        for (size_t w = 0; w < m.n_weaves; w++)
            assert_memory_equal(&got->weaves[w], &m.weaves[w], sizeof(m.weaves[w]));
        kvs_manifest_chunks(got, &n);
        assert_int_equal(n, m.n_chunks);
        for (size_t c = 0; c < n; c++) {
            assert_memory_equal(got->chunks[c].key, m.chunks[c].key, 16);
            assert_int_equal(got->chunks[c].len, m.chunks[c].len);
        }
        kvs_manifest_free(got);
        drop(&m, &bytes);
    }
}

/* Every byte matters, and so does every missing one. */
static void test_damage(void **state)
{
    struct rng rng = {test_seed() + 1};
    struct kvs_manifest m, *got;
    struct kv_buf bytes;
    (void)state;

    do {
        make(&rng, &m, &bytes);
        if (m.n_chunks < 3)
            drop(&m, &bytes);
    } while (m.n_chunks < 3);
    for (size_t i = 0; i < bytes.len; i++) {
        bytes.data[i] ^= 1;
        assert_int_equal(kvs_manifest_decode(bytes.data, bytes.len, &got),
                         i < 8 ? -EMEDIUMTYPE : -EBADMSG);
        bytes.data[i] ^= 1;
        assert_int_equal(kvs_manifest_decode(bytes.data, i, &got), i < 8 ? -EMEDIUMTYPE : -EBADMSG);
    }
    assert_int_equal(kvs_manifest_decode("", 0, &got), -EMEDIUMTYPE);
    drop(&m, &bytes);
}

/* Change @len bytes and put the checksum right: what a writer with a fault, or ill will, makes. */
static int decode_changed(const struct kv_buf *bytes, size_t at, uint64_t value, size_t len)
{
    uint8_t *copy = malloc(bytes->len);
    struct kvs_manifest *got = NULL;
    int rc;

    memcpy(copy, bytes->data, bytes->len);
    for (size_t i = 0; i < len; i++)
        copy[at + i] = (uint8_t)(value >> (8 * i));
    kvs_chunk_key(copy, bytes->len - 16, copy + bytes->len - 16);
    rc = kvs_manifest_decode(copy, bytes->len, &got);
    if (!rc)
        kvs_manifest_free(got);
    free(copy);
    return rc;
}

static void test_lies(void **state)
{
    struct kvs_manifest m = {.format = KVS_FORMAT_LLAMA};
    struct kv_buf bytes = KV_BUF_INIT;
    uint8_t key[16] = {7};
    size_t weave;
    (void)state;

    for (int i = 0; i < 3; i++)
        assert_int_equal(kvs_manifest_add(&m, key, 1000), 0);
    assert_int_equal(kvs_manifest_add_weave(&m, 1000, 4, 100, 30), 0);
    assert_int_equal(kvs_manifest_add_weave(&m, 1400, 4, 100, 30), 0);
    assert_int_equal(m.n_weaves, 1);
    assert_int_equal(kvs_manifest_encode(&m, &bytes), 0);
    weave = bytes.len - 16 - 24;

    assert_int_equal(decode_changed(&bytes, 24, 5, 8), 0); /* another time: nothing to doubt */
    assert_int_equal(decode_changed(&bytes, 8, 2, 2), -EMEDIUMTYPE); /* another version */
    assert_int_equal(decode_changed(&bytes, 10, 0, 2), -EBADMSG);    /* format */
    assert_int_equal(decode_changed(&bytes, 10, 3, 2), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, 12, 47, 4), -EBADMSG); /* header */
    assert_int_equal(decode_changed(&bytes, 12, UINT32_MAX, 4), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, 16, 2999, 8), -EBADMSG); /* bytes */
    assert_int_equal(decode_changed(&bytes, 32, 2, 8), -EBADMSG);    /* chunks */
    assert_int_equal(decode_changed(&bytes, 32, UINT64_MAX, 8), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, 40, 0, 4), -EBADMSG); /* weaves */
    assert_int_equal(decode_changed(&bytes, 40, UINT32_MAX, 4), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, 44, 20, 4), -EBADMSG);      /* fingerprint */
    assert_int_equal(decode_changed(&bytes, 48 + 16, 0, 4), -EBADMSG);  /* a chunk of nothing */
    assert_int_equal(decode_changed(&bytes, weave, 2201, 8), -EBADMSG); /* beyond the end */
    assert_int_equal(decode_changed(&bytes, weave, UINT64_MAX - 700, 8), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, weave + 8, 0, 4), -EBADMSG); /* rows */
    assert_int_equal(decode_changed(&bytes, weave + 8, UINT32_MAX, 4), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, weave + 12, 29, 4), -EBADMSG); /* row < piece */
    assert_int_equal(decode_changed(&bytes, weave + 16, 0, 4), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, weave + 20, 6, 4), -EBADMSG);
    assert_int_equal(decode_changed(&bytes, weave + 20, 0, 4), -EBADMSG);
    drop(&m, &bytes);
}

/* A longer header of this version, as a later writer may make it, is read all the same. */
static void test_longer_header(void **state)
{
    struct kvs_manifest m = {.format = KVS_FORMAT_BYTES}, *got;
    struct kv_buf bytes = KV_BUF_INIT, longer = KV_BUF_INIT;
    uint8_t key[16] = {7}, sum[16];
    (void)state;

    assert_int_equal(kvs_manifest_add(&m, key, 1000), 0);
    assert_int_equal(kvs_manifest_encode(&m, &bytes), 0);
    bytes.data[12] = 48 + 5;
    kv_buf_append(&longer, bytes.data, 48);
    kv_buf_append(&longer, "fresh", 5);
    kv_buf_append(&longer, bytes.data + 48, bytes.len - 48 - 16);
    kvs_chunk_key(longer.data, longer.len, sum);
    kv_buf_append(&longer, sum, 16);
    assert_int_equal(kvs_manifest_decode(longer.data, longer.len, &got), 0);
    assert_int_equal(kvs_manifest_bytes(got), 1000);
    kvs_manifest_free(got);
    kv_buf_fini(&longer);
    drop(&m, &bytes);
}

static void test_weaves(void **state)
{
    struct rng rng = {test_seed() + 2};
    (void)state;

    for (long i = test_rounds(200); i > 0; i--) {
        struct kvs_weave w = {.rows = 1 + rng_below(&rng, 20),
                              .row_bytes = 1 + rng_below(&rng, 90)};
        size_t len = kvs_weave_region(&w);
        uint8_t *plain = malloc(len), *woven = malloc(len), *back = malloc(len);

        w.piece_bytes = 1 + rng_below(&rng, w.row_bytes);
        for (size_t j = 0; j < len; j++)
            plain[j] = (uint8_t)rng_next(&rng);
        kvs_weave_into(&w, plain, woven);
        /* Byte by byte, as the format says it. */
        for (size_t row = 0; row < w.rows; row++)
            for (size_t at = 0; at < w.row_bytes; at++) {
                size_t column = at / w.piece_bytes * w.piece_bytes;
                size_t width = KV_MIN(w.piece_bytes, w.row_bytes - column);

                assert_int_equal(woven[column * w.rows + row * width + at - column],
                                 plain[row * w.row_bytes + at]);
            }
        kvs_weave_out_of(&w, woven, back);
        assert_memory_equal(plain, back, len);
        free(plain);
        free(woven);
        free(back);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_damage),
        cmocka_unit_test(test_lies),       cmocka_unit_test(test_longer_header),
        cmocka_unit_test(test_weaves),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
