// SPDX-License-Identifier: Apache-2.0
/*
 * libkvx_cuda without a GPU: the same job, the same per-thread function, run for every thread of a
 * grid, one after the other, on memory of this process. $KVX_CUDA_LIBRARY makes libkvx load it
 * instead of the real one.
 *
 * The shape of the grid must not matter, so it changes from plan to plan: as many blocks as tiles,
 * a few, or one; the threads of a small launch, or those of a large one.
 */
#include "kvx/backend.h"
#include "kvx/cuda/work.h"

/* Multiprocessors that the device claims to have: 0 makes every job a large one. */
static const uint32_t multiprocessors[] = {132, 0, 1, 7};
static const uint32_t most_blocks[] = {UINT32_MAX, 1, 3, 528, 5};

/** Plans run, by their operation, by the accesses (1: 16 bytes), and by whether they convert. */
__attribute__((visibility("default"))) unsigned emulated_plans[3][2][2];

/* Of tests/gpu/emulated, where that is: graphs. */
__attribute__((weak)) int emulated_record(void *stream, void (*run)(const void *what),
                                          const void *what, size_t len);

static kvx_status_t run(const struct kvx_plan *plan, void *stream);

static void replay(const void *what)
{
    if (run(what, NULL) != KVX_STATUS_OK)
        __builtin_trap();
}

static kvx_status_t run(const struct kvx_plan *plan, void *stream)
{
    static unsigned n_runs; /* tests call from one thread, and others may get any value */
    unsigned turn = __atomic_fetch_add(&n_runs, 1, __ATOMIC_RELAXED);
    uint32_t most = most_blocks[turn % 5], n_blocks;
    struct kvx_job job;
    struct kvx_kind kind;

    if (emulated_record && emulated_record(stream, replay, plan, sizeof(*plan)))
        return KVX_STATUS_OK;
    if (kvx_job_make(plan, multiprocessors[turn % 4], 1 << (turn % 3 * 10), &job) != 0)
        return KVX_STATUS_UNSUPPORTED;
    kind = kvx_job_kind(plan, &job);
    __atomic_fetch_add(&emulated_plans[plan->op][kind.whole][plan->convert], 1, __ATOMIC_RELAXED);
    n_blocks = job.n_tiles < most ? (uint32_t)job.n_tiles : most;
    if (n_blocks)
        kvx_job_set_blocks(&job, n_blocks);
    for (uint32_t block = 0; block < n_blocks; block++) {
        for (uint32_t thread = 0; thread < job.threads; thread++)
            kvx_work_thread(kind, &job, plan, block, n_blocks, thread);
    }
    return KVX_STATUS_OK;
}

static const struct kvx_backend backend = {.size = sizeof(backend),
                                           .abi = KVX_BACKEND_ABI,
                                           .plan_size = sizeof(struct kvx_plan),
                                           .name = "emulated",
                                           .run = run};

const struct kvx_backend *kvx_backend_v1(void)
{
    return &backend;
}
