// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks leased from an owner in another process. One JSON line per figure.
 *
 *     lend_bench [FIGURE...]      shm, tcp, lease (lend.h), manager (lend_manager.h), ends
 *                                 (lend_ucx.h); and only when they are named: tls (lend_tls.h; needs
 *                                 libkvbm_tls and the openssl program), ucx (needs libkvbm_ucx)
 *
 * Each yardstick is in the same rounds; medians.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "lend.h"
#include "lend_manager.h"
#include "lend_tls.h"
#include "lend_ucx.h"
#include "support.h"

static const struct lend_case cases[] = {
    {.name = "2 MiB x 32", .block_bytes = UINT64_C(2) << 20, .batch = 32},
    {.name = "64 KiB x 64", .block_bytes = UINT64_C(64) << 10, .batch = 64},
};

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[shm|tcp|manager|tls|ucx|ends|lease]...");
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        if (bench_chosen(argc, argv, "shm"))
            lend_shm(cases[i]);
        if (bench_chosen(argc, argv, "tcp"))
            lend_tcp(cases[i]);
        if (argc > 1 && bench_chosen(argc, argv, "tls"))
            lend_tls(cases[i]);
        if (argc > 1 && bench_chosen(argc, argv, "ucx"))
            lend_ucx(cases[i]);
        if (bench_chosen(argc, argv, "manager"))
            lend_through_manager(cases[i]);
    }
    if (bench_chosen(argc, argv, "ends")) {
        lend_ends_of(cases[0], false);
        lend_ends_of(cases[0], true);
    }
    if (bench_chosen(argc, argv, "lease"))
        lend_leases();
    return 0;
}
