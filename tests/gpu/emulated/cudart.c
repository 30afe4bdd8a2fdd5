// SPDX-License-Identifier: Apache-2.0
/* CUDA's runtime without a GPU, so that the programs of tests/gpu can be tried without one. Their
 * results then say nothing about the kernels; only the programs themselves are tested. Based on the
 * driver of tests/tier/emulated_cuda.c; streams run all work at once. During a capture a stream
 * accepts only the calls that emulated_record() takes (from tests/kvx/emulated_backend.c): a graph
 * is a list of such calls. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"

#define EXPORT __attribute__((visibility("default")))

enum { NODES = 1024, DEVICES = 2 };

/* The driver's. */
int cuMemAlloc_v2(uint64_t *ret, size_t len);
int cuMemFree_v2(uint64_t addr);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **ret);
int cuDevicePrimaryCtxRetain(void **ret, int device);
int cuEventCreate(void **ret, unsigned flags);
int cuEventDestroy_v2(void *event);
int cuEventRecord(void *event, void *stream);
void emulated_cuda_happen(void *event);
int emulated_cuda_kind(uint64_t addr);
int emulated_cuda_capture(int on);

struct node {
    void (*run)(const void *what);
    void *what;
};

struct emulated_graph {
    size_t n, users;
    struct node nodes[NODES];
};

/* Streams may also be the driver's, which are something else: by their addresses. */
struct emulated_stream {
    int nothing;
};
enum { CAPTURES = 8 };
static struct {
    cudaStream_t stream;
    struct emulated_graph *graph;
} captured[CAPTURES];
static pthread_mutex_t captured_lock = PTHREAD_MUTEX_INITIALIZER;

static _Thread_local int device;
static _Thread_local cudaError_t last;

static cudaError_t say(cudaError_t error)
{
    if (error)
        last = error;
    return error;
}

static struct emulated_graph *graph_of(cudaStream_t stream)
{
    struct emulated_graph *graph = NULL;

    pthread_mutex_lock(&captured_lock);
    for (int i = 0; i < CAPTURES && stream; i++) {
        if (captured[i].stream == stream)
            graph = captured[i].graph;
    }
    pthread_mutex_unlock(&captured_lock);
    return graph;
}

static int captures(cudaStream_t stream)
{
    return graph_of(stream) != NULL;
}

/* ---- devices ---- */

EXPORT cudaError_t cudaGetDeviceCount(int *ret)
{
    *ret = DEVICES;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *ret)
{
    *ret = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int id)
{
    if (id < 0 || id >= DEVICES)
        return say(cudaErrorInvalidValue);
    device = id;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last;

    last = cudaSuccess;
    return error;
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess                         ? "no error"
           : error == cudaErrorMemoryAllocation         ? "out of memory"
           : error == cudaErrorStreamCaptureUnsupported ? "not while a stream is captured"
                                                        : "invalid argument";
}

/* ---- memory ---- */

EXPORT cudaError_t cudaMalloc(void **ret, size_t len)
{
    void *context;
    uint64_t addr = 0;
    int rc;

    if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxPushCurrent_v2(context))
        return say(cudaErrorInvalidValue);
    rc = cuMemAlloc_v2(&addr, len);
    cuCtxPopCurrent_v2(&context);
    *ret = (void *)(uintptr_t)addr;
    return say(rc ? cudaErrorMemoryAllocation : cudaSuccess);
}

EXPORT cudaError_t cudaMallocManaged(void **ret, size_t len, unsigned flags)
{
    return flags == cudaMemAttachGlobal ? cudaMalloc(ret, len) : say(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaHostAlloc(void **ret, size_t len, unsigned flags)
{
    (void)flags;
    return cudaMalloc(ret, len);
}

EXPORT cudaError_t cudaFree(void *memory)
{
    return say(memory && cuMemFree_v2((uintptr_t)memory) ? cudaErrorInvalidValue : cudaSuccess);
}

EXPORT cudaError_t cudaFreeHost(void *memory)
{
    return cudaFree(memory);
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *memory)
{
    ret->type = (cudaMemoryType)emulated_cuda_kind((uintptr_t)memory);
    ret->device = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t len, cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    (void)kind;
    if (captures(stream))
        return say(cudaErrorStreamCaptureUnsupported);
    memcpy(to, from, len);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *memory, int value, size_t len)
{
    memset(memory, value, len);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *memory, int value, size_t len, cudaStream_t stream)
{
    return captures(stream) ? say(cudaErrorStreamCaptureUnsupported)
                            : cudaMemset(memory, value, len);
}

/* ---- streams, graphs ---- */

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags)
{
    *ret = calloc(1, sizeof(**ret));
    return say(*ret && flags == cudaStreamNonBlocking ? cudaSuccess : cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return captures(stream) ? say(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaCaptureMode mode)
{
    struct emulated_graph *graph = calloc(1, sizeof(*graph));
    int begun = 0;

    if (!graph || captures(stream))
        abort();
    if (mode == cudaStreamCaptureModeGlobal)
        emulated_cuda_capture(1);
    graph->users = 1;
    pthread_mutex_lock(&captured_lock);
    for (int i = 0; i < CAPTURES && !begun; i++) {
        if (captured[i].stream)
            continue;
        captured[i].stream = stream;
        captured[i].graph = graph;
        begun = 1;
    }
    pthread_mutex_unlock(&captured_lock);
    return say(begun ? cudaSuccess : cudaErrorInvalidValue);
}

/** Whether a call was put into a graph instead of being done. @what is copied. */
EXPORT int emulated_record(void *stream, void (*run)(const void *what), const void *what,
                           size_t len);
int emulated_record(void *stream, void (*run)(const void *what), const void *what, size_t len)
{
    struct emulated_graph *graph = graph_of(stream);
    struct node node = {run, NULL};

    if (!graph)
        return 0;
    node.what = malloc(len);
    if (!node.what || graph->n == NODES)
        abort();
    memcpy(node.what, what, len);
    graph->nodes[graph->n++] = node;
    return 1;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    *ret = graph_of(stream);
    pthread_mutex_lock(&captured_lock);
    for (int i = 0; i < CAPTURES; i++) {
        if (captured[i].stream == stream)
            captured[i].stream = NULL;
    }
    pthread_mutex_unlock(&captured_lock);
    if (emulated_cuda_capture(0)) /* somebody did what invalidates it */
        return say(cudaErrorStreamCaptureUnsupported);
    return say(*ret ? cudaSuccess : cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *ret_n)
{
    (void)nodes;
    *ret_n = graph->n;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t graph,
                                        unsigned long long flags)
{
    graph->users++;
    *ret = graph;
    return say(flags ? cudaErrorInvalidValue : cudaSuccess);
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    if (captures(stream))
        return say(cudaErrorStreamCaptureUnsupported);
    for (size_t i = 0; i < exec->n; i++)
        exec->nodes[i].run(exec->nodes[i].what);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (--graph->users)
        return cudaSuccess;
    for (size_t i = 0; i < graph->n; i++)
        free(graph->nodes[i].what);
    free(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return cudaGraphDestroy(exec);
}

/* ---- events: the engine asks the driver for them ---- */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    return say(cuEventCreate(ret, flags) ? cudaErrorInvalidValue : cudaSuccess);
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (captures(stream) || cuEventRecord(event, NULL))
        return say(cudaErrorInvalidValue);
    emulated_cuda_happen(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return say(cuEventDestroy_v2(event) ? cudaErrorInvalidValue : cudaSuccess);
}
