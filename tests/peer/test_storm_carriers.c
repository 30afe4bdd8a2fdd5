// SPDX-License-Identifier: Apache-2.0
/*
 * Storms of loads by UCX and NIXL: owner and readers are killed, frozen and started again at random
 * moments. Owner and readers are processes of their own, so that this one opens neither library.
 */
#include "storm.h"

#include "base/core/log.h"

#ifndef HAS_UCX
#define HAS_UCX 0 /* libkvbm_ucx was built */
#endif
#ifndef HAS_UCX_TCP
#define HAS_UCX_TCP 0 /* of UCX 1.14 or later */
#endif
#define N_READERS 2

struct weather {
    const char *transports; /* UCX_TLS */
    uint32_t ucx, nixl;
    bool freezes;
};

static void run(const struct weather *w)
{
    struct rng rng = {test_seed()};
    pid_t owner, readers[N_READERS];
    uint64_t carried;

    print_message("KV_TEST_SEED=%llu, UCX_TLS=%s%s\n", (unsigned long long)rng.state, w->transports,
                  w->nixl ? ", NIXL" : "");
    setenv("UCX_TLS", w->transports, 1);
    setenv("UCX_NET_DEVICES", "lo", 1);
    storm_init();
    storm->ucx = w->ucx;
    storm->nixl = w->nixl;
    storm->no_shared = true;
    owner = storm_start_owner(&rng);
    for (int i = 0; i < N_READERS; i++)
        readers[i] = storm_start_reader(i, &rng);
    for (long i = 0; i < test_rounds(15); i++) {
        storm_let_read(20);
        storm_disturb(&owner, readers, N_READERS, w->freezes, &rng);
    }
    carried = storm->carried_right;
    wait_until(storm->carried_right != carried);
    storm_end(owner, readers, N_READERS);
    storm_fini();
}

static void test_shared_memory(void **state)
{
    const struct weather w = {"posix,sysv,self", KVBM_UCX_REQUIRED, 0, true};

    (void)state;
    run(&w);
}

/* Before UCX 1.14 a peer's death may end a process over its TCP (docs/kvbm-remote.md, "RDMA"). */
static void test_tcp(void **state)
{
    const struct weather w = {"tcp", KVBM_UCX_REQUIRED, 0, true};

    (void)state;
    if (HAS_UCX_TCP || getenv("KV_TEST_UCX_TCP"))
        run(&w);
    else
        print_message("skipped: TCP of UCX before 1.14; KV_TEST_UCX_TCP=1 runs it\n");
}

static void test_nixl(void **state)
{
    const struct weather w = {"tcp", 0, KVBM_NIXL_REQUIRED, true};

    (void)state;
    run(&w);
}

int main(void)
{
    const struct CMUnitTest ucx[] = {
        cmocka_unit_test(test_shared_memory),
        cmocka_unit_test(test_tcp),
    };
    const struct CMUnitTest nixl[] = {cmocka_unit_test(test_nixl)};
    int failed = 0;

#ifdef __SANITIZE_THREAD__
    setenv("UCX_MEM_EVENTS", "no", 0); /* UCX's hooks of mmap and the sanitizer's collide */
#endif
    kv_log_set_level(KV_LOG_ERROR);
    if (HAS_UCX)
        failed += cmocka_run_group_tests(ucx, NULL, NULL);
    else
        printf("skipped: UCX, since this build has no libkvbm_ucx (libucx-dev)\n");
    if (getenv("KV_NIXL_LIB"))
        failed += cmocka_run_group_tests(nixl, NULL, NULL);
    else
        printf("skipped: NIXL, since KV_NIXL_LIB names no libnixl_capi.so\n");
    return failed;
}
