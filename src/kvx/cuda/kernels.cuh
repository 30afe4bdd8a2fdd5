// SPDX-License-Identifier: Apache-2.0
/**
 * kernels.cuh: work.h as kernels.
 *
 * A launch carries the job and the plan by value. Nothing has to be uploaded before or kept until
 * the launch runs, and a captured graph holds its own copy. Most of a plan is its list of layers,
 * so small launches carry a plan cut off after the first.
 */
#ifndef KVX_CUDA_KERNELS_CUH
#define KVX_CUDA_KERNELS_CUH

#include <cstddef>

#include "kvx/cuda/work.h"

template <unsigned n_layers> struct kvx_launch {
    kvx_job job;
    alignas(8) unsigned char plan[offsetof(kvx_plan, layer) + n_layers * sizeof(kvx_layer)];
};

static_assert(sizeof(kvx_launch<KVX_PLAN_LAYERS>) <= 4096, "kernel parameters of every device");

/*
 * Let short launches overlap: much of their time is waiting for the previous one to drain. With
 * programmatic launches (sm_90) this launch may be set up meanwhile, and lets the next one do the
 * same. No memory is touched before all work queued earlier is finished and visible. Both
 * instructions have no effect in an ordinary launch.
 */
__device__ __forceinline__ void kvx_overlap_launches()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/** Kernel for large jobs: units in flight per thread, and mostly 768 threads per multiprocessor. */
template <kvx_op op, unsigned src_size, unsigned dst_size>
__global__ void __launch_bounds__(KVX_JOB_THREADS, src_size == 1 && dst_size == 1 ? 2 : 3)
    kvx_move_large(const __grid_constant__ kvx_launch<KVX_PLAN_LAYERS> a)
{
    constexpr kvx_kind kind = {op, src_size, dst_size, 1, kvx_large_unroll(1, src_size, dst_size)};

    kvx_overlap_launches();
    kvx_work_thread(kind, &a.job, reinterpret_cast<const kvx_plan *>(a.plan), blockIdx.x, gridDim.x,
                    threadIdx.x);
}

/** Kernel for jobs of a few microseconds: as many threads as units. */
template <kvx_op op, unsigned src_size, unsigned dst_size>
__global__ void __launch_bounds__(KVX_JOB_SMALL_THREADS)
    kvx_move_small(const __grid_constant__ kvx_launch<1> a)
{
    constexpr kvx_kind kind = {op, src_size, dst_size, 1, 1};

    kvx_overlap_launches();
    kvx_work_thread(kind, &a.job, reinterpret_cast<const kvx_plan *>(a.plan), blockIdx.x, gridDim.x,
                    threadIdx.x);
}

/** Kernel that moves units in pieces: any layout, stride and alignment. */
template <kvx_op op, unsigned src_size, unsigned dst_size>
__global__ void __launch_bounds__(KVX_JOB_THREADS, 3)
    kvx_move_pieces(const __grid_constant__ kvx_launch<KVX_PLAN_LAYERS> a)
{
    constexpr kvx_kind kind = {op, src_size, dst_size, 0, kvx_large_unroll(0, src_size, dst_size)};

    kvx_work_thread(kind, &a.job, reinterpret_cast<const kvx_plan *>(a.plan), blockIdx.x, gridDim.x,
                    threadIdx.x);
}

/** Pairs of element sizes, in the order of kvx_pair_index. */
enum { KVX_N_PAIRS = 9 };

/** Kernels of one operation. kvx_job_make never asks for a NULL one. */
struct kvx_kernels {
    const void *large[KVX_N_PAIRS], *small[KVX_N_PAIRS], *pieces[KVX_N_PAIRS];
};

/* Return 0 for bits, then pairs from 4, 2, 1 bytes. 4 to 4 is always bits: F32 has no scales. */
inline unsigned kvx_pair_index(unsigned src_size, unsigned dst_size)
{
    return src_size == 0   ? 0
           : src_size == 4 ? (dst_size == 2 ? 1 : 2)
           : src_size == 2 ? (dst_size == 4   ? 3
                              : dst_size == 2 ? 4
                                              : 5)
                           : (dst_size == 4   ? 6
                              : dst_size == 2 ? 7
                                              : 8);
}

#define KVX_KERNELS_OF(kernel, op)                                            \
    {                                                                         \
        (const void *)&kernel<op, 0, 0>, (const void *)&kernel<op, 4, 2>,     \
            (const void *)&kernel<op, 4, 1>, (const void *)&kernel<op, 2, 4>, \
            (const void *)&kernel<op, 2, 2>, (const void *)&kernel<op, 2, 1>, \
            (const void *)&kernel<op, 1, 4>, (const void *)&kernel<op, 1, 2>, \
            (const void *)&kernel<op, 1, 1>                                   \
    }

extern const kvx_kernels kvx_write_kernels, kvx_gather_kernels, kvx_copy_kernels;

#endif
