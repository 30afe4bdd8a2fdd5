// SPDX-License-Identifier: Apache-2.0
/** Skipping a cmocka test with a reason. Include it behind <cmocka.h>. */
#ifndef KV_TESTS_SKIP_H
#define KV_TESTS_SKIP_H

/** skip_because(format, ...): ends the test and says why, in words that tools/test.sh collects. */
#define skip_because(...)           \
    do {                            \
        print_message("skipped: "); \
        print_message(__VA_ARGS__); \
        print_message("\n");        \
        skip();                     \
    } while (0)

#endif
