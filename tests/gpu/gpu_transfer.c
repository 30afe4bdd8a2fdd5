// SPDX-License-Identifier: Apache-2.0
/*
 * The transfer copier on a GPU: every pair of layouts between device and pinned memory, device and
 * device, device and pageable memory, compared element by element; a stream of the caller's and its
 * event; both directions at once; beside a capture.
 */
#include <errno.h>
#include <stdint.h>

#include "gpu.h"
#include "tier/transfer/cuda.h"
#include "tier/transfer_unit.h"

/* Check libkvbm's own declarations of the driver's types against the toolkit's header. */
#ifndef EMULATED_CUDA_RUNTIME_API_H
#include <cuda.h>
#if CUDA_VERSION >= 12080
_Static_assert(sizeof(struct tier_cuda_attributes) == sizeof(CUmemcpyAttributes), "attributes");
_Static_assert(offsetof(struct tier_cuda_attributes, flags) == offsetof(CUmemcpyAttributes, flags),
               "flags");
_Static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1, "order");
#endif
_Static_assert(sizeof(CUdeviceptr) == 8 && CUDA_ERROR_NOT_READY == 600 &&
                   CUDA_ERROR_NOT_SUPPORTED == 801 && CU_STREAM_CAPTURE_MODE_RELAXED == 2 &&
                   (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == 3 &&
                   (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING) == 3,
               "numbers");
#endif

static struct kvbm_storage_opts device = {.size = sizeof(device), .kind = KVBM_STORAGE_DEVICE};
static struct kvbm_storage_opts pinned = {.size = sizeof(pinned), .kind = KVBM_STORAGE_PINNED};
static struct kvbm_storage_opts plain = {.size = sizeof(plain), .kind = KVBM_STORAGE_SYSTEM};

static struct kvbm_copier *copier_of(enum kvbm_gpu_copy how)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 2, .gpu_copy = how};
    struct kvbm_copier *copier = NULL;

    MUST(kvbm_copier_create(&opts, &copier) == 0);
    return copier;
}

/* Every way to copy: the kernel, the GPU's copy engines with many pieces a call or with one. */
static void check_matrix(void)
{
    struct kvbm_copier *copiers[] = {copier_of(KVBM_GPU_AUTO), copier_of(KVBM_GPU_ENGINES),
                                     copier_of(KVBM_GPU_SINGLE)};
    struct kvbm_storage_opts *pairs[][2] = {{&device, &pinned},
                                            {&pinned, &device},
                                            {&device, &device},
                                            {&device, &plain},
                                            {&plain, &device}};
    struct rng rng = {test_seed()};
    long moved[5] = {0}, refused = 0, rounds = test_rounds(1500);

    for (long i = 0; i < rounds; i++) {
        struct kvbm_transfer t = {.flow = rng_below(&rng, 2)};
        uint32_t pair = rng_below(&rng, 5), src[64], dst[64];
        struct kvbm_layout_config c[2];
        struct kvbm_layout *a, *b;
        int rc;

        unit_configs(&rng, c);
        a = unit_layout(&c[0], pairs[pair][0]);
        b = unit_layout(&c[1], pairs[pair][1]);
        t.src = a;
        t.dst = b;
        unit_ranges(&rng, &t, src, dst);
        rc = unit_round(copiers[i % 3], &t, &rng);
        MUST(rc == 0 || (rc == -ENOTSUP && pair > 2)); /* a GPU doesn't convert pageable memory */
        moved[pair] += rc == 0;
        refused += rc != 0;
        kvbm_layout_destroy(a);
        kvbm_layout_destroy(b);
    }
    for (int pair = 0; pair < 5; pair++)
        MUST(moved[pair] > 0 || rounds < 100);
    for (int i = 0; i < 3; i++)
        kvbm_copier_destroy(copiers[i]);
    printf("transfers: %ld pairs of layouts, %ld refused: ok\n", rounds, refused);
}

static struct kvbm_layout *blocks_of(struct kvbm_storage_opts *like, enum kvbm_layout_kind kind)
{
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = kind,
                                   .num_blocks = 64,
                                   .num_layers = 32,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .inner_dim = 1024};

    return unit_layout(&c, like);
}

/* The copy reads bytes that the caller's stream writes before the event, and none written after
 * it. */
static void check_event(struct kvbm_copier *copier)
{
    struct kvbm_layout *src = blocks_of(&device, KVBM_FULLY_CONTIGUOUS),
                       *dst = blocks_of(&pinned, KVBM_FULLY_CONTIGUOUS);
    size_t len = (size_t)kvbm_layout_get_shape(src)->data_bytes;
    char *from = (char *)(uintptr_t)kvbm_storage_addr(kvbm_layout_storage(src, 0));
    unsigned char *to = kvbm_storage_host_memory(kvbm_layout_storage(dst, 0));
    int rounds = (int)test_rounds(20) + 1, memsets = (int)test_rounds(200) + 1;
    uint32_t ids[64];
    struct kvbm_transfer t = {
        .size = sizeof(t), .src = src, .dst = dst, .src_blocks = ids, .dst_blocks = ids, .n = 64};
    cudaStream_t stream;
    cudaEvent_t event;

    for (uint32_t i = 0; i < 64; i++)
        ids[i] = i;
    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    GPU(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int round = 1; round <= rounds; round++) {
        struct kvbm_done done;
        int64_t id;

        for (int i = 0; i < memsets; i++) /* keeps the stream busy for a while */
            GPU(cudaMemsetAsync(from, 0xEE, len, stream));
        GPU(cudaMemsetAsync(from, round, len, stream));
        GPU(cudaEventRecord(event, stream));
        t.ready_event = event;
        id = kvbm_copier_submit(copier, &t);
        MUST(id > 0);
        MUST(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done) == 0 && done.status == 0);
        for (size_t i = 0; i < len; i += 4093)
            MUST(to[i] == round);
    }
    GPU(cudaEventDestroy(event));
    GPU(cudaStreamDestroy(stream));
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
    printf("transfers wait for events: ok\n");
}

/* A graph of the strictest kind is captured while a copier starts, waits for events, copies and
 * ends. */
static void check_capture(void)
{
    cudaStream_t stream;
    cudaEvent_t event;
    cudaGraph_t graph;
    struct kvbm_copier *copier;
    struct kvbm_layout *src, *dst;
    uint32_t ids[] = {3, 0, 7};
    struct kvbm_transfer t = {.size = sizeof(t), .src_blocks = ids, .dst_blocks = ids, .n = 3};
    struct kvbm_done done;
    int64_t id;

    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    GPU(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    GPU(cudaEventRecord(event, stream));
    GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    src = blocks_of(&device, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS);
    dst = blocks_of(&pinned, KVBM_FULLY_CONTIGUOUS);
    copier = copier_of(KVBM_GPU_AUTO);
    t.src = src;
    t.dst = dst;
    t.ready_event = event;
    for (int i = 0; i < 2; i++) {
        id = kvbm_copier_submit(copier, &t);
        MUST(id > 0);
        MUST(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done) == 0 && done.status == 0);
        t.src = dst;
        t.dst = src;
    }
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(src);
    kvbm_layout_destroy(dst);
    GPU(cudaStreamEndCapture(stream, &graph));
    GPU(cudaGraphDestroy(graph));
    GPU(cudaEventDestroy(event));
    GPU(cudaStreamDestroy(stream));
    printf("transfers beside a capture: ok\n");
}

/* Scattered layers of many blocks to whole blocks and back, both directions at once. */
static void check_both_directions(struct kvbm_copier *copier)
{
    struct kvbm_layout *cache = blocks_of(&device, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS),
                       *host = blocks_of(&pinned, KVBM_FULLY_CONTIGUOUS),
                       *back = blocks_of(&pinned, KVBM_FULLY_CONTIGUOUS);
    uint32_t low[32], high[32];
    struct rng rng = {test_seed()};
    struct kvbm_transfer out = {.size = sizeof(out),
                                .src = cache,
                                .dst = back,
                                .src_blocks = low,
                                .dst_blocks = low,
                                .n = 32},
                         in = {.size = sizeof(in),
                               .src = host,
                               .dst = cache,
                               .src_blocks = high,
                               .dst_blocks = high,
                               .n = 32,
                               .flow = KVBM_ONBOARD};
    struct bytes from, to, want_out, want_in;

    for (uint32_t i = 0; i < 32; i++) {
        low[i] = (i * 5) % 32;
        high[i] = 32 + (i * 7) % 32;
    }
    unit_fill(cache, &rng, false);
    unit_fill(host, &rng, false);
    from = unit_snapshot(cache);
    to = unit_snapshot(host);
    want_in = unit_snapshot(cache);
    want_out = unit_snapshot(back);
    unit_apply(&out, &from, &want_out, NULL);
    unit_apply(&in, &to, &want_in, NULL);
    for (int round = 0; round < 5; round++) {
        struct kvbm_done done;
        int64_t a = kvbm_copier_submit(copier, &out), b = kvbm_copier_submit(copier, &in);
        struct bytes got;

        MUST(a > 0 && b > 0);
        MUST(kvbm_copier_wait(copier, (uint64_t)a, 60000, &done) == 0 && done.status == 0);
        MUST(kvbm_copier_wait(copier, (uint64_t)b, 60000, &done) == 0 && done.status == 0);
        got = unit_snapshot(back);
        MUST(memcmp(got.at, want_out.at, got.len) == 0);
        free(got.at);
        got = unit_snapshot(cache);
        MUST(memcmp(got.at, want_in.at, got.len) == 0);
        free(got.at);
    }
    free(from.at), free(to.at), free(want_in.at), free(want_out.at);
    kvbm_layout_destroy(cache);
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(back);
    printf("transfers in both directions: ok\n");
}

static bool chosen(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc < 2;
}

/* Arguments choose among "events", "both", "matrix", "capture"; none: all. */
int main(int argc, char **argv)
{
    struct kvbm_copier *copier;

    gpu_need();
    GPU(cudaSetDevice(0));
    copier = copier_of(KVBM_GPU_AUTO);
    if (chosen(argc, argv, "events"))
        check_event(copier);
    if (chosen(argc, argv, "both"))
        check_both_directions(copier);
    kvbm_copier_destroy(copier);
    if (chosen(argc, argv, "matrix"))
        check_matrix();
    if (chosen(argc, argv, "capture"))
        check_capture();
    GPU(cudaDeviceSynchronize());
    return 0;
}
