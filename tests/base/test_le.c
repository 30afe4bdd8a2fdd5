// SPDX-License-Identifier: Apache-2.0
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/file/own_manifest.h"
#include "base/unit.h"

static void test_le64(void **state)
{
    const uint8_t bytes[8] = {1, 2, 3, 4, 5, 6, 7, 0x88};
    uint8_t out[8];

    (void)state;
    assert_true(kv_get_le64(bytes) == UINT64_C(0x8807060504030201));
    kv_put_le64(out, UINT64_C(0x8807060504030201));
    assert_memory_equal(out, bytes, 8);
    assert_true(kv_get_le(bytes, 0) == 0);
    assert_true(kv_get_le(bytes, 1) == 1);
    assert_true(kv_get_le(bytes + 5, 3) == 0x880706);
}

/* Another program's manifest, one of a later version, and a short one are opaque. */
static void test_own_manifest(void **state)
{
    (void)state;
    assert_true(kv_is_own_manifest("KVS-OBJ\n\1\0more", 14));
    assert_true(kv_is_own_manifest("KVS-OBJ\n\1\0", 10));
    assert_false(kv_is_own_manifest("KVS-OBJ\n\1\0", 9));
    assert_false(kv_is_own_manifest("KVS-OBJ\n\2\0", 10));
    assert_false(kv_is_own_manifest("KVS-OBJ\n\1\1", 10));
    assert_false(kv_is_own_manifest("KVS-OBJX\1\0", 10));
    assert_false(kv_is_own_manifest("", 0));
}

/* Chunks behind a header of 50 bytes and a fingerprint of 3; then every count one too high. */
static void test_own_chunks(void **state)
{
    uint8_t data[50 + 3 + 2 * KV_OWN_CHUNK + KV_OWN_SUM] = KV_OWN_MAGIC "\1";
    const size_t counts[] = {12, 32, 44};
    struct kv_own_chunks chunks = {0};

    (void)state;
    data[12] = 50;
    data[32] = 2;
    data[44] = 3;
    assert_true(kv_own_manifest_chunks(data, sizeof(data), &chunks));
    assert_ptr_equal(chunks.first, data + 53);
    assert_int_equal(chunks.n, 2);
    for (size_t i = 0; i < KV_COUNT(counts); i++) {
        data[counts[i]]++;
        assert_false(kv_own_manifest_chunks(data, sizeof(data), &chunks));
        data[counts[i]]--;
        data[counts[i] + 3] = 0xff; /* nor do sums overflow */
        assert_false(kv_own_manifest_chunks(data, sizeof(data), &chunks));
        data[counts[i] + 3] = 0;
    }
    data[39] = 0xff;
    assert_false(kv_own_manifest_chunks(data, sizeof(data), &chunks));
    data[39] = 0;
    for (size_t len = 0; len < sizeof(data); len++)
        assert_false(kv_own_manifest_chunks(data, len, &chunks));
    data[12] = 47;
    assert_false(kv_own_manifest_chunks(data, sizeof(data), &chunks));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_le64),
        cmocka_unit_test(test_own_manifest),
        cmocka_unit_test(test_own_chunks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
