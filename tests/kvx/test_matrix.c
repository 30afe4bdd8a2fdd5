// SPDX-License-Identifier: Apache-2.0
/* All combinations against the reference, once per instruction set. A process chooses its
 * instruction set once, so each runs in a child. Without a test library, so that the program also
 * runs where there is none. */
#include <sys/wait.h>
#include <unistd.h>

#include "kvx/kvx_cases.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SCALE 12
#else
#define SCALE 100
#endif

static int run_all(const char *what, const struct kvx_place_hooks *hooks, uint64_t seed,
                   uint32_t scale)
{
    struct kvx_matrix m = {.seed = seed, .scale = scale};

    kvx_set_threads(3, 1);
    matrix_run(&m, hooks);
    printf("%s: %llu cases, %llu moved, %llu out of range, %llu failed (KV_TEST_SEED=%llu)\n", what,
           (unsigned long long)m.n_run, (unsigned long long)m.n_ok,
           (unsigned long long)m.n_out_of_range, (unsigned long long)m.n_failed,
           (unsigned long long)seed);
    fflush(stdout);
    kvx_set_threads(1, 0);
    /* a matrix that never moves anything, or never sees a bad index, tests nothing */
    if (hooks->memory == KVX_MEMORY_HOST && m.n_run > 2000 && !m.n_out_of_range)
        return 1;
    return m.n_failed || m.n_ok < m.n_run / 2;
}

static int run_host(const char *isa, uint64_t seed, uint32_t scale)
{
    setenv("KVX_ISA", isa, 1);
    return run_all(kvx_host_isa(), &host_hooks, seed, scale);
}

/* Device memory, with the model backend in the place of libkvx_cuda. */
static int run_device(uint64_t seed, uint32_t scale)
{
    const char *build = getenv("KV_BUILD_DIR");
    struct kvx_place_hooks hooks = host_hooks;
    char path[4096];
    int bad;

    if (!build) {
        puts("skipped: the model backend (KV_BUILD_DIR isn't set)");
        return 0;
    }
    snprintf(path, sizeof(path), "%s/tests/libkvx_model.so", build);
    setenv("KVX_CUDA_LIBRARY", path, 1);
    hooks.memory = KVX_MEMORY_DEVICE;
    bad = run_all("device model", &hooks, seed, scale);
    hooks.memory = KVX_MEMORY_UNIFIED;
    return bad | run_all("unified model", &hooks, seed + 1, scale / 8 + 1);
}

int main(void)
{
    static const char *const isas[] = {"", "avx2", "scalar"};
    uint64_t seed = case_setting("KV_TEST_SEED", (uint64_t)getpid() * 2654435761U + 1);
    uint32_t scale = (uint32_t)case_setting("KV_TEST_SCALE", 100) * SCALE / 100;
    int bad = 0;

    for (unsigned i = 0; i < 4; i++) {
        int status = 0;
        pid_t child = fork();

        if (child == 0)
            _exit(i < 3 ? run_host(isas[i], seed + i, i ? scale / 4 + 1 : scale + 1)
                        : run_device(seed + i, scale / 4 + 1));
        if (child < 0 || waitpid(child, &status, 0) < 0 || status)
            bad = 1;
    }
    return bad;
}
