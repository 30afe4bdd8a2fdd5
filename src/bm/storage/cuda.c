// SPDX-License-Identifier: Apache-2.0
#include "bm/storage/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define CUDA_OUT_OF_MEMORY 2
#define MAX_DEVICES 64
#define PIN_FLAGS \
    3u /* CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP: for every context, and for kernels */
#define CAPTURE_RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED */

typedef int result_t;      /* CUresult */
typedef void *context_t;   /* CUcontext */
typedef uint64_t devptr_t; /* CUdeviceptr */

static struct {
    result_t (*init)(unsigned flags);
    result_t (*device_get)(int *device, int ordinal);
    result_t (*device_count)(int *ret);
    result_t (*context_state)(int device, unsigned *flags, int *active);
    result_t (*capture_mode)(int *exchange);
    result_t (*retain)(context_t *ret, int device);
    result_t (*push)(context_t context);
    result_t (*pop)(context_t *ret);
    result_t (*alloc)(devptr_t *ret, size_t len);
    result_t (*free)(devptr_t addr);
    result_t (*host_register)(void *memory, size_t len, unsigned flags);
    result_t (*host_unregister)(void *memory);
    result_t (*sync)(void *stream);
    result_t (*memset8)(devptr_t addr, unsigned char value, size_t len);
    result_t (*to_device)(devptr_t to, const void *from, size_t len);
    result_t (*to_host)(void *to, devptr_t from, size_t len);
} cuda;

static const struct {
    const char *name;
    void *slot;
} symbols[] = {
    {"cuInit", &cuda.init},
    {"cuDeviceGet", &cuda.device_get},
    {"cuDeviceGetCount", &cuda.device_count},
    {"cuDevicePrimaryCtxGetState", &cuda.context_state},
    {"cuThreadExchangeStreamCaptureMode", &cuda.capture_mode},
    {"cuDevicePrimaryCtxRetain", &cuda.retain},
    {"cuCtxPushCurrent_v2", &cuda.push},
    {"cuCtxPopCurrent_v2", &cuda.pop},
    {"cuMemAlloc_v2", &cuda.alloc},
    {"cuMemFree_v2", &cuda.free},
    {"cuMemHostRegister_v2", &cuda.host_register},
    {"cuMemHostUnregister", &cuda.host_unregister},
    {"cuStreamSynchronize", &cuda.sync},
    {"cuMemsetD8_v2", &cuda.memset8},
    {"cuMemcpyHtoD_v2", &cuda.to_device},
    {"cuMemcpyDtoH_v2", &cuda.to_host},
};

/* The driver stays loaded: unloading is unsafe once it has threads of its own. */
static bool available;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static context_t contexts[MAX_DEVICES];

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        kv_log_info("kvbm", "no CUDA driver: no pinned or device memory", NULL);
        return;
    }
    for (size_t i = 0; i < KV_COUNT(symbols); i++) {
        void *symbol = dlsym(library, symbols[i].name);

        if (!symbol) {
            kv_log_warn("kvbm", "the CUDA driver is too old", "missing=%s", symbols[i].name);
            return;
        }
        memcpy(symbols[i].slot, &symbol, sizeof(symbol));
    }
    available = cuda.init(0) == 0;
    if (!available)
        kv_log_warn("kvbm", "the CUDA driver doesn't start: no pinned or device memory", NULL);
}

static int check(const char *call, result_t code)
{
    if (code == 0)
        return 0;
    kv_log_warn("kvbm", "CUDA call failed", "call=%s code=%d", call, code);
    return code == CUDA_OUT_OF_MEMORY ? -ENOMEM : -EIO;
}

/* Retain a device's primary context once, until the process ends. */
static int context_of(uint32_t device, context_t *ret)
{
    int ordinal, err = 0;

    if (device >= MAX_DEVICES)
        return -ENODEV;
    pthread_mutex_lock(&contexts_lock);
    if (!contexts[device] && (cuda.device_get(&ordinal, (int)device) != 0 ||
                              cuda.retain(&contexts[device], ordinal) != 0))
        err = -ENODEV;
    *ret = contexts[device];
    pthread_mutex_unlock(&contexts_lock);
    return err;
}

/*
 * Depth of relaxed capture mode. While any thread captures a graph in the default mode, waits and
 * queries of other threads make that capture fail. Threads in relaxed mode are exempt. A thread is
 * relaxed between enter and leave only, because it may be the caller's.
 */
static _Thread_local int entered, mode_before;

static int begin_relaxed(void)
{
    int mode = CAPTURE_RELAXED, err = 0;

    if (!entered)
        err = check("cuThreadExchangeStreamCaptureMode", cuda.capture_mode(&mode));
    if (err < 0)
        return err;
    if (!entered++)
        mode_before = mode;
    return 0;
}

static void end_relaxed(void)
{
    if (!--entered)
        cuda.capture_mode(&mode_before);
}

static bool usable(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return available;
}

int kvbm_cuda_enter(uint32_t device)
{
    context_t context;
    int err;

    if (!usable() || context_of(device, &context) < 0)
        return -ENODEV;
    err = begin_relaxed();
    if (err < 0)
        return err;
    err = check("cuCtxPushCurrent", cuda.push(context));
    if (err < 0)
        end_relaxed();
    return err;
}

static bool in_use(uint32_t device)
{
    unsigned flags;
    int ordinal, active = 0;

    return cuda.device_get(&ordinal, (int)device) == 0 &&
           cuda.context_state(ordinal, &flags, &active) == 0 && active;
}

int kvbm_cuda_enter_any(uint32_t device, uint32_t *ret)
{
    int n = 0;

    if (!usable())
        return -ENODEV;
    if (cuda.device_count(&n) == 0 && device < (uint32_t)n && !in_use(device)) {
        for (uint32_t i = 0; i < (uint32_t)n; i++) {
            if (!in_use(i))
                continue;
            device = i;
            break;
        }
    }
    if (ret)
        *ret = device;
    return kvbm_cuda_enter(device);
}

void kvbm_cuda_leave(void)
{
    context_t context;

    cuda.pop(&context);
    end_relaxed();
}

int kvbm_cuda_alloc(size_t len, uint64_t *ret)
{
    return check("cuMemAlloc", cuda.alloc(ret, len));
}

int kvbm_cuda_free(uint64_t addr)
{
    return check("cuMemFree", cuda.free(addr));
}

/* Lock host memory, and exclude it from fork. fork() would have to copy every locked page at once;
 * on kernels that don't, the parent would write to another page than the GPU reads. */
int kvbm_cuda_pin(void *memory, size_t len)
{
    int err = check("cuMemHostRegister", cuda.host_register(memory, len, PIN_FLAGS));

    if (err == 0 && madvise(memory, len, MADV_DONTFORK) < 0)
        kv_log_info("kvbm", "a fork will copy pinned memory", "errno=%d", errno);
    return err;
}

int kvbm_cuda_unpin(void *memory)
{
    return check("cuMemHostUnregister", cuda.host_unregister(memory));
}

/* Wait until the default stream is done. A memset, or a copy from unlocked memory, may return
 * before the GPU's memory has changed, and other streams don't wait for it. */
static int settle(void)
{
    return check("cuStreamSynchronize", cuda.sync(NULL));
}

int kvbm_cuda_zero(uint64_t addr, size_t len)
{
    int err = check("cuMemsetD8", cuda.memset8(addr, 0, len));

    return err < 0 ? err : settle();
}

int kvbm_cuda_to_device(uint64_t to, const void *from, size_t len)
{
    int err = check("cuMemcpyHtoD", cuda.to_device(to, from, len));

    return err < 0 ? err : settle();
}

int kvbm_cuda_to_host(void *to, uint64_t from, size_t len)
{
    return check("cuMemcpyDtoH", cuda.to_host(to, from, len));
}
