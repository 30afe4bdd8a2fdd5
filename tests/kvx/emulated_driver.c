// SPDX-License-Identifier: Apache-2.0
/*
 * The calls of CUDA's driver that libkvx_cuda itself makes, as a libcuda.so.1: which context a
 * stream has. The runtime finds none of the others and gives up, so no call goes on to a launch.
 * test_cuda_module.c sets the version and the capture, and reads what was called.
 */
#define EXPORT __attribute__((visibility("default")))

EXPORT extern int driver_version, driver_captures, driver_asked, driver_depth, driver_pushed;

int driver_version = 13000, driver_captures, driver_asked, driver_depth, driver_pushed;

EXPORT int cuDriverGetVersion(int *ret);
EXPORT int cuStreamIsCapturing(void *stream, int *ret);
EXPORT int cuStreamGetCtx(void *stream, void **ret);
EXPORT int cuCtxGetCurrent(void **ret);
EXPORT int cuCtxPushCurrent_v2(void *context);
EXPORT int cuCtxPopCurrent_v2(void **ret);

int cuDriverGetVersion(int *ret)
{
    *ret = driver_version;
    return 0;
}

int cuStreamIsCapturing(void *stream, int *ret)
{
    *ret = driver_captures;
    return stream ? 0 : 1;
}

/* A stream's context is the stream itself. */
int cuStreamGetCtx(void *stream, void **ret)
{
    driver_asked++;
    *ret = stream;
    return 0;
}

int cuCtxGetCurrent(void **ret)
{
    *ret = 0;
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    driver_pushed++;
    driver_depth++;
    return context ? 0 : 1;
}

int cuCtxPopCurrent_v2(void **ret)
{
    driver_depth--;
    *ret = 0;
    return 0;
}
