// SPDX-License-Identifier: Apache-2.0
/* Transports of UCX that UCX_TLS names: agents warn of TCP before 1.14. */
#define CARRIER ucx
#define CARRIER_REQUIRED KVBM_UCX_REQUIRED
#include "base/unit.h"
#include "carrier_unit.h"

#ifndef HAS_UCX
#define HAS_UCX 0 /* libkvbm_ucx was built */
#endif
#ifndef HAS_UCX_TCP
#define HAS_UCX_TCP 0 /* of UCX 1.14 or later */
#endif

static void test_warning(void **state)
{
    static const struct {
        const char *list;
        unsigned warnings;
    } cases[] = {
        {NULL, 0},   {"posix,sysv,self", 0}, {"tcp", 1}, {"self,tcp", 1},
        {"^cma", 1}, {"^cma,tcp,knem", 0},   {"all", 1},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        if (cases[i].list)
            setenv("UCX_TLS", cases[i].list, 1);
        else
            unsetenv("UCX_TLS");
        lines[0] = '\0';
        assert_int_equal(kvbm_agent_destroy(carried_agent("one", NULL)), 0);
        assert_int_equal(lines_with("UCX may end this process"),
                         HAS_UCX_TCP ? 0 : cases[i].warnings);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_warning),
    };

    return begin_with_ucx(HAS_UCX) ? cmocka_run_group_tests(tests, NULL, NULL) : 0;
}
