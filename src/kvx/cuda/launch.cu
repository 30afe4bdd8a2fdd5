// SPDX-License-Identifier: Apache-2.0
/* The backend's table: turn a plan into one launch. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "kvx/backend.h"
#include "kvx/cuda/kernels.cuh"

enum { MAX_DEVICES = 64, MAX_SMALL_BLOCKS = 16, N_OPS = 3 };

/*
 * Blocks of threads that move between device and host memory. The bus needs no more of them, and
 * each takes room and memory accesses from the kernels that run beside.
 */
enum { TRANSFER_BLOCKS = 32 };

/* First toolkit and driver that can capture programmatic launches. */
enum { OVERLAP_VERSION = 12030 };

/* First driver that names the context of a stream which is captured. Older ones end the capture. */
enum { CONTEXT_VERSION = 12050 };

/* Facts about one device that a launch needs, read once, before the first launch on it. */
struct device {
    int ready; /* written last, with release order */
    uint32_t n_multiprocessors;
    uint64_t cache_bytes;
    int overlaps;                              /* supports programmatic launches */
    /* Blocks of KVX_JOB_THREADS that fit on the device at a time. */
    uint32_t large_blocks[N_OPS][KVX_N_PAIRS];
    uint32_t pieces_blocks[N_OPS][KVX_N_PAIRS];
};

static device devices[MAX_DEVICES];
static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;

static const kvx_kernels *kernels_of(uint32_t op)
{
    return op == KVX_OP_WRITE    ? &kvx_write_kernels
           : op == KVX_OP_GATHER ? &kvx_gather_kernels
                                 : &kvx_copy_kernels;
}

/*
 * Translate an error. The CUDA runtime in this library is a private copy (linked statically), so
 * the caller's cudaGetLastError() never sees its errors.
 */
static kvx_status_t translate(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return KVX_STATUS_OK;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction: /* the result for a kernel without an image */
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorNotSupported:
        return KVX_STATUS_UNSUPPORTED;
    default:
        return KVX_STATUS_INTERNAL_ERROR;
    }
}

/* --------------------------------------------------------------------------------------------- */
/* Devices */

static cudaError_t occupancy(const void *kernel, int threads, const device *d, uint32_t *ret)
{
    int blocks = 0;
    cudaError_t error = cudaSuccess;

    if (kernel)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
    *ret = (uint32_t)(blocks > 0 ? blocks : 1) * d->n_multiprocessors;
    return error;
}

/* Load every kernel now, so that a captured launch never has to. */
static cudaError_t load_kernels(device *d)
{
    cudaError_t error = cudaSuccess;

    for (uint32_t op = 0; op < N_OPS; op++) {
        const kvx_kernels *k = kernels_of(op);

        for (uint32_t i = 0; i < KVX_N_PAIRS; i++) {
            uint32_t unused;

            if (error == cudaSuccess)
                error = occupancy(k->large[i], KVX_JOB_THREADS, d, &d->large_blocks[op][i]);
            if (error == cudaSuccess)
                error = occupancy(k->pieces[i], KVX_JOB_THREADS, d, &d->pieces_blocks[op][i]);
            if (error == cudaSuccess) /* more threads than its launch bounds would fail */
                error = occupancy(k->small[i], KVX_JOB_SMALL_THREADS, d, &unused);
        }
    }
    return error;
}

static cudaError_t ask(int id, device *d)
{
    int multiprocessors = 0, cache = 0, major = 0, driver = 0;
    const char *overlap = getenv("KVX_CUDA_OVERLAP");
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, id);

    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    if (error == cudaSuccess)
        error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess)
        return error;
    d->n_multiprocessors = (uint32_t)multiprocessors;
    d->cache_bytes = (uint64_t)cache;
    d->overlaps = major >= 9 && CUDART_VERSION >= OVERLAP_VERSION && driver >= OVERLAP_VERSION &&
                  !(overlap && overlap[0] == '0');
    return load_kernels(d);
}

/* Find a device. Its first call may come in the middle of a capture, which loading must not end. */
static cudaError_t find_device(int id, const device **ret)
{
    device *d = &devices[id];
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaSuccess;

    *ret = d;
    if (__atomic_load_n(&d->ready, __ATOMIC_ACQUIRE)) /* pairs with the store below */
        return cudaSuccess;
    pthread_mutex_lock(&devices_lock);
    if (!d->ready) {
        error = cudaThreadExchangeStreamCaptureMode(&mode);
        if (error == cudaSuccess) {
            error = ask(id, d);
            (void)cudaThreadExchangeStreamCaptureMode(&mode);
        }
        if (error == cudaSuccess)
            __atomic_store_n(&d->ready, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&devices_lock);
    return error;
}

/*
 * Functions of the driver, of the library that the runtime has loaded. cudaStreamGetDevice won't do:
 * it isn't allowed while its stream is captured.
 */
static struct {
    CUresult (*version)(int *ret);
    CUresult (*captures)(CUstream stream, CUstreamCaptureStatus *ret);
    CUresult (*stream_context)(CUstream stream, CUcontext *ret);
    CUresult (*current)(CUcontext *ret);
    CUresult (*pop)(CUcontext *ret);
    CUresult (*push)(CUcontext context); /* NULL: none of them was found */
} driver;
static bool old_driver; /* see CONTEXT_VERSION */
static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

static void find_driver()
{
    static const char *const names[] = {"cuDriverGetVersion", "cuStreamIsCapturing",
                                        "cuStreamGetCtx",     "cuCtxGetCurrent",
                                        "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2"};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found[6] = {};
    int version = 0;

    static_assert(sizeof(driver) == sizeof(found), "a name for each function");
    for (int i = 0; i < 6; i++) {
        found[i] = library ? dlsym(library, names[i]) : nullptr;
        if (!found[i])
            return;
    }
    memcpy(&driver, found, sizeof(driver));
    old_driver = driver.version(&version) != CUDA_SUCCESS || version < CONTEXT_VERSION;
}

/* True when the stream's context may be asked for. It may, unless an old driver captures it. */
static bool may_ask(cudaStream_t stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

    if (!old_driver)
        return true;
    return driver.captures(stream, &status) == CUDA_SUCCESS &&
           status == CU_STREAM_CAPTURE_STATUS_NONE;
}

/*
 * Make the stream's context current where it isn't. The default streams belong to the current one.
 * Returns true when there is one to leave().
 */
static bool enter(cudaStream_t stream)
{
    CUcontext context = nullptr, current = nullptr;

    pthread_once(&driver_once, find_driver);
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread || !driver.push ||
        !may_ask(stream))
        return false;
    if (driver.stream_context(stream, &context) != CUDA_SUCCESS ||
        driver.current(&current) != CUDA_SUCCESS || context == current)
        return false; /* if the device is another one, the launch reports it */
    return driver.push(context) == CUDA_SUCCESS;
}

static void leave(bool entered)
{
    CUcontext unused;

    if (entered)
        (void)driver.pop(&unused);
}

/* --------------------------------------------------------------------------------------------- */
/* Launches */

template <unsigned n_layers>
static cudaError_t launch(const kvx_job *job, const kvx_plan *plan, const void *kernel,
                          uint32_t n_blocks, bool overlap, cudaStream_t stream)
{
    kvx_launch<n_layers> a = {};
    void *arguments[] = {&a};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};

    a.job = *job;
    memcpy(a.plan, plan, offsetof(kvx_plan, layer) + plan->n_layers * sizeof(kvx_layer));
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(job->threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

/*
 * Return the number of blocks of threads. A GATHER takes as many as fit, which walk over the tiles:
 * each steps over padding at once. For the others a block per tile is faster by some percent.
 */
static uint32_t count_blocks(const device *d, const kvx_plan *plan, const kvx_job *job,
                             const kvx_kind &kind, unsigned pair)
{
    uint32_t limit = !kind.whole        ? d->pieces_blocks[plan->op][pair]
                     : kind.unroll == 1 ? d->n_multiprocessors * MAX_SMALL_BLOCKS
                     : plan->op == KVX_OP_GATHER ? d->large_blocks[plan->op][pair]
                                                 : INT32_MAX;

    if (plan->phase == KVX_PHASE_TRANSFER && limit > TRANSFER_BLOCKS)
        limit = TRANSFER_BLOCKS;
    return job->n_tiles < limit ? (uint32_t)job->n_tiles : limit;
}

/* True when a job of several layers takes so few microseconds that its launch matters. */
static bool is_short(const device *d, const kvx_job *job)
{
    return job->n_tiles <= (uint64_t)d->n_multiprocessors * 16;
}

static kvx_status_t run_on(const device *d, const kvx_plan *plan, cudaStream_t stream)
{
    const kvx_kernels *kernels = kernels_of(plan->op);
    kvx_job job;
    kvx_kind kind;
    unsigned pair;
    uint32_t n_blocks;
    bool legacy = !stream || stream == cudaStreamLegacy; /* waits for other streams: no overlap */

    if (kvx_job_make(plan, d->n_multiprocessors, d->cache_bytes, &job) != 0)
        return KVX_STATUS_UNSUPPORTED;
    if (job.n_tiles == 0)
        return KVX_STATUS_OK;
    kind = kvx_job_kind(plan, &job);
    pair = kvx_pair_index(kind.src_size, kind.dst_size);
    n_blocks = count_blocks(d, plan, &job, kind, pair);
    kvx_job_set_blocks(&job, n_blocks);
    if (!kind.whole)
        return translate(
            launch<KVX_PLAN_LAYERS>(&job, plan, kernels->pieces[pair], n_blocks, false, stream));
    if (kind.unroll == 1)
        return translate(
            launch<1>(&job, plan, kernels->small[pair], n_blocks, d->overlaps && !legacy, stream));
    return translate(launch<KVX_PLAN_LAYERS>(&job, plan, kernels->large[pair], n_blocks,
                                             d->overlaps && !legacy && is_short(d, &job), stream));
}

static kvx_status_t run(const kvx_plan *plan, void *opaque)
{
    cudaStream_t stream = (cudaStream_t)opaque;
    bool entered = enter(stream);
    const device *d = nullptr;
    int id = 0;
    cudaError_t error = cudaGetDevice(&id);
    kvx_status_t status;

    if (error == cudaSuccess && id >= MAX_DEVICES) {
        leave(entered);
        return KVX_STATUS_UNSUPPORTED;
    }
    if (error == cudaSuccess)
        error = find_device(id, &d);
    status = error == cudaSuccess ? run_on(d, plan, stream) : translate(error);
    leave(entered);
    return status;
}

static const kvx_backend backend = {sizeof(kvx_backend), KVX_BACKEND_ABI, sizeof(kvx_plan), "cuda",
                                    run};

extern "C" KVX_API const kvx_backend *kvx_backend_v1(void)
{
    return &backend;
}
