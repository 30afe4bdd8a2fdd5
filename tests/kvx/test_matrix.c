// SPDX-License-Identifier: Apache-2.0
/*
 * All combinations against the reference, once per instruction set (the choice is made once per
 * process, hence the children). No test library: this also runs where there is none.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "kvx/kvx_cases.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCALE 12
#else
#define SCALE 100
#endif

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static int run_all(const char *isa, uint64_t seed, uint32_t scale)
{
    struct kvx_matrix m = {.seed = seed, .scale = scale};

    setenv("KVX_ISA", isa, 1);
    kvx_set_threads(3, 1);
    matrix_run(&m, &host_hooks);
    printf("%s: %llu cases, %llu moved, %llu out of range, %llu failed (KV_TEST_SEED=%llu)\n",
           kvx_host_isa(), (unsigned long long)m.n_run, (unsigned long long)m.n_ok,
           (unsigned long long)m.n_out_of_range, (unsigned long long)m.n_failed,
           (unsigned long long)seed);
    fflush(stdout);
    kvx_set_threads(1, 0);
    /* a matrix that never moves anything, or never sees a bad index, tests nothing */
    return m.n_failed || m.n_ok < m.n_run / 2 || (m.n_run > 2000 && !m.n_out_of_range);
}

int main(void)
{
    static const char *const isas[] = {"", "avx2", "scalar"};
    uint64_t seed = number("KV_TEST_SEED", (uint64_t)getpid() * 2654435761U + 1);
    uint32_t scale = (uint32_t)number("KV_TEST_SCALE", 100) * SCALE / 100;
    int bad = 0;

    for (unsigned i = 0; i < 3; i++) {
        int status = 0;
        pid_t child = fork();

        if (child == 0)
            _exit(run_all(isas[i], seed + i, i ? scale / 4 + 1 : scale + 1));
        if (child < 0 || waitpid(child, &status, 0) < 0 || status)
            bad = 1;
    }
    return bad;
}
