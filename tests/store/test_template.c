// SPDX-License-Identifier: Apache-2.0
/* The plugin template keeps every rule of the contract. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv_store.h"
#include "support.h"

static void each(void *arg, const char *check, enum kvs_verdict verdict, const char *detail)
{
    if (verdict == KVS_PASS)
        ++*(int *)arg;
    if (verdict == KVS_FAIL)
        print_error("%s: %s\n", check, detail);
}

static void test_conformance(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    char folder[64], uri[80], path[4096];
    int passed = 0, rc;
    (void)state;

    assert_int_equal(temp_dir(folder, sizeof(folder)), 0);
    snprintf(path, sizeof(path), "%s/examples", build ? build : "build");
    setenv("KV_STORE_LIBRARY_PATH", path, 1);
    snprintf(uri, sizeof(uri), "template://%s", folder);
    rc = kvs_conformance(uri, each, &passed);
    assert_int_equal(remove_dir(folder), 0);
    assert_int_equal(rc, 0);
    assert_true(passed >= 25); /* they ran, and were not left out */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conformance),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
