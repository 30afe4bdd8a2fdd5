// SPDX-License-Identifier: Apache-2.0
#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"

#define CUDA_OUT_OF_MEMORY 2
#define MAX_DEVICES 64
#define PIN_PORTABLE 1 /* CU_MEMHOSTREGISTER_PORTABLE: for every context */

typedef int result_t;      /* CUresult */
typedef void *context_t;   /* CUcontext */
typedef uint64_t devptr_t; /* CUdeviceptr */

static struct {
    result_t (*init)(unsigned flags);
    result_t (*device_get)(int *device, int ordinal);
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

/* The driver stays loaded: it can't be unloaded safely once it has threads of its own. */
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

/* A device's primary context, retained for as long as the process lives. */
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

int kvbm_cuda_enter(uint32_t device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    context_t context;

    pthread_once(&once, load);
    if (!available || context_of(device, &context) < 0)
        return -ENODEV;
    return check("cuCtxPushCurrent", cuda.push(context));
}

void kvbm_cuda_leave(void)
{
    context_t context;

    cuda.pop(&context);
}

int kvbm_cuda_alloc(size_t len, uint64_t *ret)
{
    return check("cuMemAlloc", cuda.alloc(ret, len));
}

int kvbm_cuda_free(uint64_t addr)
{
    return check("cuMemFree", cuda.free(addr));
}

int kvbm_cuda_pin(void *memory, size_t len)
{
    return check("cuMemHostRegister", cuda.host_register(memory, len, PIN_PORTABLE));
}

int kvbm_cuda_unpin(void *memory)
{
    return check("cuMemHostUnregister", cuda.host_unregister(memory));
}

/*
 * A memset, and a copy from memory that isn't locked, may return before the GPU's memory has changed; other
 * streams than the default one would not wait for it.
 */
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
