// SPDX-License-Identifier: Apache-2.0
/*
 * How much a load of blocks slows a kernel that runs beside it, and the kernel the load. Blocks of
 * 32 layers move between pinned memory and a cache on the GPU, which has a storage per layer. K and
 * V of a layer are 16 or 64 KiB each; a third load moves whole blocks. One kernel is a matrix product
 * on the tensor cores, which keeps the multiprocessors busy. The other sums up weights, which keeps
 * the memory busy, as a decode step does. One JSON line per pair of kernel and load; exit 77 without
 * a GPU.
 */
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include "kvbm_transfer.h"

#define GPU(call)                                                              \
    do {                                                                       \
        cudaError_t gpu_error = (call);                                        \
        if (gpu_error != cudaSuccess) {                                        \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                         cudaGetErrorString(gpu_error));                       \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)

namespace
{
enum { MOST_BLOCKS = 128, ROUNDS = 75, SIDE = 4096, TILE = 128, DEPTH = 32 };
constexpr size_t TOTAL = (size_t)128 << 20, WEIGHTS = (size_t)1 << 30; /* bytes of a job */

cudaStream_t stream;

/* --------------------------------------------------------------------------------------------- */
/* Kernels */

/* c = a * b for square bf16 matrices; 8 warps make a tile of 128 x 128, each 32 x 64 of it. */
__global__ void __launch_bounds__(256)
    multiply(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *c)
{
    using namespace nvcuda::wmma;
    __shared__ __align__(32) __nv_bfloat16 left[TILE][DEPTH + 8], right[DEPTH][TILE + 8];
    fragment<accumulator, 16, 16, 16, float> sum[2][4];
    fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> x[2];
    fragment<matrix_b, 16, 16, 16, __nv_bfloat16, row_major> y;
    unsigned warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * 64;
    size_t top = (size_t)blockIdx.y * TILE, at = (size_t)blockIdx.x * TILE;

    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            fill_fragment(sum[i][j], 0.0F);
    for (size_t k = 0; k < SIDE; k += DEPTH) {
        for (unsigned i = threadIdx.x; i < TILE * DEPTH / 8; i += 256) {
            unsigned r = i / (DEPTH / 8), q = i % (DEPTH / 8) * 8;
            unsigned r2 = i / (TILE / 8), q2 = i % (TILE / 8) * 8;

            *(uint4 *)&left[r][q] = *(const uint4 *)&a[(top + r) * SIDE + k + q];
            *(uint4 *)&right[r2][q2] = *(const uint4 *)&b[(k + r2) * SIDE + at + q2];
        }
        __syncthreads();
        for (unsigned d = 0; d < DEPTH; d += 16) {
            for (int i = 0; i < 2; i++)
                load_matrix_sync(x[i], &left[row + i * 16][d], DEPTH + 8);
            for (int j = 0; j < 4; j++) {
                load_matrix_sync(y, &right[d][column + j * 16], TILE + 8);
                for (int i = 0; i < 2; i++)
                    mma_sync(sum[i][j], x[i], y, sum[i][j]);
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            store_matrix_sync(&c[(top + row + i * 16) * SIDE + at + column + j * 16], sum[i][j],
                              SIDE, mem_row_major);
}

__global__ void __launch_bounds__(512) read_weights(const uint4 *weights, size_t n, unsigned *ret)
{
    unsigned sum = 0;

    for (size_t i = blockIdx.x * (size_t)512 + threadIdx.x; i < n; i += (size_t)gridDim.x * 512) {
        uint4 v = __ldcs(weights + i);

        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678)
        *ret = sum;
}

struct work {
    __nv_bfloat16 *a, *b;
    float *c;
    uint4 *weights;
    unsigned *sum;
    int processors;

    work()
    {
        cudaDeviceProp prop;

        GPU(cudaGetDeviceProperties(&prop, 0));
        processors = prop.multiProcessorCount;
        GPU(cudaMalloc(&a, (size_t)SIDE * SIDE * 2));
        GPU(cudaMalloc(&b, (size_t)SIDE * SIDE * 2));
        GPU(cudaMalloc(&c, (size_t)SIDE * SIDE * 4));
        GPU(cudaMalloc(&weights, WEIGHTS));
        GPU(cudaMalloc(&sum, 4));
        GPU(cudaMemset(a, 0x3c, (size_t)SIDE * SIDE * 2));
        GPU(cudaMemset(b, 0x3d, (size_t)SIDE * SIDE * 2));
        GPU(cudaMemset(weights, 0x5b, WEIGHTS));
    }
    void run(bool product) const
    {
        if (product)
            multiply<<<dim3(SIDE / TILE, SIDE / TILE), 256, 0, stream>>>(a, b, c);
        else
            read_weights<<<processors * 4, 512, 0, stream>>>(weights, WEIGHTS / sizeof(uint4), sum);
        GPU(cudaGetLastError());
    }
};

/* Median microseconds of a kernel; each starts when the one before has ended. */
double time_kernel(const work &w, bool product)
{
    std::vector<double> us;
    cudaEvent_t begin, end;

    GPU(cudaEventCreate(&begin));
    GPU(cudaEventCreate(&end));
    for (int i = 0; i < ROUNDS + 3; i++) {
        float ms;

        GPU(cudaEventRecord(begin, stream));
        w.run(product);
        w.run(product);
        GPU(cudaEventRecord(end, stream));
        GPU(cudaEventSynchronize(end));
        GPU(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3)
            us.push_back(ms * 1e3 / 2);
    }
    GPU(cudaEventDestroy(begin));
    GPU(cudaEventDestroy(end));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

/* --------------------------------------------------------------------------------------------- */
/* Loads */

/* @region: bytes of a layer's K or V in a block. */
kvbm_layout *layout_of(kvbm_storage_kind memory, kvbm_layout_kind kind, size_t region)
{
    kvbm_storage_opts opts = {};
    kvbm_layout_config c = {};
    kvbm_layout *layout = nullptr;

    opts.size = sizeof(opts);
    opts.kind = memory;
    kvbm_allocator allocator = kvbm_allocator_of(&opts);
    c.size = sizeof(c);
    c.kind = kind;
    c.num_blocks = TOTAL / (region * 64);
    c.num_layers = 32;
    c.outer_dim = 2;
    c.page_size = 16;
    c.num_heads = 4;
    c.inner_dim = (uint32_t)(region / 32);
    c.dtype = KVX_DTYPE_BF16;
    c.alignment = 4096;
    if (kvbm_layout_allocate(&c, &allocator, &layout) < 0) {
        std::fprintf(stderr, "tier_busy_bench: no memory\n");
        std::exit(1);
    }
    return layout;
}

/* Moves blocks over and over, two jobs at a time, from begin() to end(). */
struct load {
    const kvbm_layout *src, *dst;
    kvbm_copier *copier = nullptr;
    uint32_t n, from[MOST_BLOCKS], to[MOST_BLOCKS];
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> moved{0};
    std::thread thread;

    load(const kvbm_layout *source, const kvbm_layout *target, kvbm_gpu_copy how)
        : src(source), dst(target), n((uint32_t)kvbm_layout_get_config(source)->num_blocks)
    {
        kvbm_copier_opts opts = {};

        opts.size = sizeof(opts);
        opts.n_threads = 1;
        opts.gpu_copy = how;
        if (kvbm_copier_create(&opts, &copier) < 0)
            std::exit(1);
        for (uint32_t i = 0; i < n; i++) {
            from[i] = i;
            to[i] = (i * 37) % n; /* n is a power of two */
        }
    }
    ~load()
    {
        kvbm_copier_destroy(copier);
    }
    uint64_t submit()
    {
        kvbm_transfer t = {};
        int64_t id;

        t.size = sizeof(t);
        t.src = src;
        t.dst = dst;
        t.src_blocks = from;
        t.dst_blocks = to;
        t.n = n;
        id = kvbm_copier_submit(copier, &t);
        if (id < 0)
            std::exit(1);
        return (uint64_t)id;
    }
    void finish(uint64_t id)
    {
        kvbm_done done;

        if (kvbm_copier_wait(copier, id, 60000, &done) < 0 || done.status < 0) {
            std::fprintf(stderr, "tier_busy_bench: a load failed\n");
            std::exit(1);
        }
        moved += TOTAL;
    }
    void begin()
    {
        stop = false;
        thread = std::thread([this] {
            uint64_t first = submit();

            while (!stop) {
                uint64_t second = submit();

                finish(first);
                first = second;
            }
            finish(first);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    void end()
    {
        stop = true;
        thread.join();
    }
};

double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void bench(const work &w, const char *name, const char *direction, load *loads[2])
{
    static const char *const kernels[] = {"read_weights", "matrix_product"};
    double alone_gb = 0;

    for (int product = -1; product < 2; product++) {
        double alone = product < 0 ? 0 : time_kernel(w, product), with = 0, start, gb;
        uint64_t before = 0, after = 0;

        for (int i = 0; i < 2 && loads[i]; i++)
            loads[i]->begin();
        for (int i = 0; i < 2 && loads[i]; i++)
            before += loads[i]->moved;
        start = seconds();
        if (product < 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(150));
        else
            with = time_kernel(w, product);
        for (int i = 0; i < 2 && loads[i]; i++)
            after += loads[i]->moved;
        gb = (double)(after - before) / (seconds() - start) / 1e9;
        for (int i = 0; i < 2 && loads[i]; i++)
            loads[i]->end();
        if (product < 0) {
            alone_gb = gb;
            continue;
        }
        std::printf("{\"bench\":\"tier_busy\",\"load\":\"%s\",\"direction\":\"%s\",\"kernel\":\"%s\","
                    "\"us_alone\":%.1f,\"us_beside\":%.1f,\"slower\":%.3f,\"gb_per_s\":%.2f,"
                    "\"gb_per_s_alone\":%.2f,\"median_of\":%d}\n",
                    name, direction, kernels[product], alone, with, with / alone, gb, alone_gb,
                    ROUNDS);
        std::fflush(stdout);
    }
}

void run_pieces(const work &w, size_t region, kvbm_gpu_copy how, const char *name)
{
    kvbm_layout *host = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, region),
                *back = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, region),
                *layers = layout_of(KVBM_STORAGE_DEVICE, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, region),
                *more = layout_of(KVBM_STORAGE_DEVICE, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, region);

    std::memset(kvbm_storage_host_memory(kvbm_layout_storage(host, 0)), 0x3f, TOTAL);
    {
        load in(host, layers, how), out(more, back, how);
        load *only_in[2] = {&in, nullptr}, *only_out[2] = {&out, nullptr}, *both[2] = {&in, &out};

        bench(w, name, "in", only_in);
        bench(w, name, "out", only_out);
        bench(w, name, "both", both);
    }
    for (kvbm_layout *layout : {host, back, layers, more})
        kvbm_layout_destroy(layout);
}

void run_whole(const work &w)
{
    kvbm_layout *host = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, 32768),
                *whole = layout_of(KVBM_STORAGE_DEVICE, KVBM_FULLY_CONTIGUOUS, 32768);

    {
        load in(host, whole, KVBM_GPU_AUTO);
        load *only[2] = {&in, nullptr};

        bench(w, "whole blocks of 2 MiB", "in", only);
    }
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(whole);
}
} // namespace

int main(int argc, char **argv)
{
    int n = 0;

    if (argc > 1) {
        bool help = !std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h");

        std::fprintf(help ? stdout : stderr, "usage: %s\n", program_invocation_short_name);
        return help ? 0 : 2;
    }
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        std::printf("skipped: no CUDA device\n");
        return 77;
    }
    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    {
        work w;

        run_pieces(w, 16384, KVBM_GPU_AUTO, "16 KiB, kernel");
        run_pieces(w, 16384, KVBM_GPU_ENGINES, "16 KiB, engines");
        run_pieces(w, 65536, KVBM_GPU_AUTO, "64 KiB, engines");
        run_whole(w);
    }
    return 0;
}
