// SPDX-License-Identifier: Apache-2.0
/**
 * Functions of CUDA's runtime for the programs of tests/gpu; cudart.c implements them. ABI: the
 * public names.
 */
#ifndef EMULATED_CUDA_RUNTIME_API_H
#define EMULATED_CUDA_RUNTIME_API_H

#include <stddef.h>

#define CUDART_VERSION 13000

typedef enum {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorStreamCaptureUnsupported = 900
} cudaError_t;

typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_graph *cudaGraph_t, *cudaGraphExec_t;
typedef void *cudaEvent_t;
typedef void *cudaGraphNode_t;

#define cudaStreamLegacy ((cudaStream_t)1)
#define cudaStreamPerThread ((cudaStream_t)2)
#define cudaStreamNonBlocking 1u
#define cudaEventDisableTiming 2u
#define cudaHostAllocMapped 2u
#define cudaMemAttachGlobal 1u

typedef enum {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
} cudaMemcpyKind;

typedef enum { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal } cudaCaptureMode;

typedef enum {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice
} cudaMemoryType;

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};

cudaError_t cudaGetDeviceCount(int *ret);
cudaError_t cudaGetDevice(int *ret);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void **ret, size_t len);
cudaError_t cudaMallocManaged(void **ret, size_t len, unsigned flags);
cudaError_t cudaHostAlloc(void **ret, size_t len, unsigned flags);
cudaError_t cudaFree(void *memory);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *memory);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t len, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemset(void *memory, int value, size_t len);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t len, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *ret_n);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventDestroy(cudaEvent_t event);

#endif
