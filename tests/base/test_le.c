// SPDX-License-Identifier: Apache-2.0
#include "base/le.h"
#include "base/own_manifest.h"
#include "base/unit.h"

static void test_le64(void **state)
{
    const uint8_t bytes[8] = {1, 2, 3, 4, 5, 6, 7, 0x88};
    uint8_t out[8];

    (void)state;
    assert_true(kv_get_le64(bytes) == UINT64_C(0x8807060504030201));
    kv_put_le64(out, UINT64_C(0x8807060504030201));
    assert_memory_equal(out, bytes, 8);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_le64),
        cmocka_unit_test(test_own_manifest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
