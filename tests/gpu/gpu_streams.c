// SPDX-License-Identifier: Apache-2.0
/*
 * Many host threads, each with its own stream and memory, call at once, the first calls of the
 * process included. A call leaves the current device as it is.
 */
#include <pthread.h>

#include "gpu.h"
#include "kvx/kvx_layers.h"

enum { THREADS = 8, ROUNDS = 25 };

static void *call_often(void *arg)
{
    unsigned id = *(unsigned *)arg;
    struct kvx_place_hooks hooks;
    cudaStream_t stream;

    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    hooks = gpu_thread_hooks(stream);
    for (unsigned round = 0; round < ROUNDS; round++)
        MUST(layers_agree(&hooks, 1 + (id * 7 + round) % 12, (id + round) % 4));
    GPU(cudaStreamDestroy(stream));
    return NULL;
}

static void test_threads(void)
{
    pthread_t thread[THREADS];
    unsigned id[THREADS];

    for (unsigned i = 0; i < THREADS; i++) {
        id[i] = i;
        MUST(pthread_create(&thread[i], NULL, call_often, &id[i]) == 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        MUST(pthread_join(thread[i], NULL) == 0);
    printf("threads: %d threads, each %d calls on its own stream, agree\n", THREADS, ROUNDS);
}

/* The default streams: NULL, and the two special handles. */
static void test_default_streams(void)
{
    const cudaStream_t streams[] = {NULL, cudaStreamLegacy, cudaStreamPerThread};

    for (unsigned i = 0; i < 3; i++) {
        struct kvx_place_hooks hooks = gpu_thread_hooks(streams[i]);

        MUST(layers_agree(&hooks, 3, i));
    }
    printf("default streams: agree\n");
}

/* A stream of another device than the current one. */
static void test_devices(void)
{
    struct layers_call call;
    cudaStream_t stream;
    char *memory[6];
    void *arrays[3];
    int n = 0, current = -1;

    GPU(cudaGetDeviceCount(&n));
    if (n < 2) {
        printf("devices: skipped, there is only one\n");
        return;
    }
    GPU(cudaSetDevice(1));
    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned i = 0; i < 6; i++)
        GPU(cudaMalloc((void **)&memory[i], layers_bytes(0, i)));
    for (unsigned i = 0; i < 3; i++) {
        GPU(cudaMalloc(&arrays[i], 4096));
        GPU(cudaMemset(arrays[i], 0xff, 4096)); /* no slot, no length */
    }
    GPU(cudaSetDevice(0));
    layers_describe(&call, memory, KVX_MEMORY_DEVICE, 0, arrays[0], arrays[1], arrays[2]);
    MUST(layers_run(&call, 1, true, NULL, stream) == KVX_STATUS_OK);
    GPU(cudaGetDevice(&current));
    MUST(current == 0);
    GPU(cudaStreamSynchronize(stream));
    printf("devices: a stream of device 1 used while 0 is current\n");
}

int main(void)
{
    gpu_need();
    test_threads();
    test_default_streams();
    test_devices();
    return 0;
}
