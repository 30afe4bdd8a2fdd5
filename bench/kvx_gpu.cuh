// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_gpu.cuh: helpers of kvx_gpu_bench: memory, timing by events, yardsticks, descriptors of a
 * cache whose blocks lie in random order.
 *
 * A figure of few tokens goes through all parts of the large arrays in turn. So neither the figure
 * nor its yardstick finds its data in the L2 cache.
 */
#ifndef KVX_GPU_CUH
#define KVX_GPU_CUH

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#include "kvx_ext.h"

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
enum { ROUNDS = 9, BLOCK = 16, HEADS = 8, DIM = 128, SEQUENCES = 64 };

cudaStream_t stream;
uint32_t n_tokens = 262144; /* of the arrays; a multiple of SEQUENCES * BLOCK */
int failures;

/* Tokens of one call, and how many such calls go through the arrays once. */
struct slice {
    uint32_t tokens;

    uint32_t parts() const
    {
        return n_tokens / tokens;
    }
    /* First token of the part that call @i takes. */
    size_t first(int i) const
    {
        return (size_t)((uint32_t)i % parts()) * tokens;
    }
    /* Calls in a measured batch: some milliseconds. */
    int calls() const
    {
        return (int)std::max(4U, 4 * parts());
    }
};

[[noreturn]] void die(const char *what, kvx_status_t status)
{
    std::fprintf(stderr, "%s: %s\n", what, kvx_status_name(status));
    std::exit(1);
}

void must(const char *what, kvx_status_t status)
{
    if (status != KVX_STATUS_OK)
        die(what, status);
}

/* --------------------------------------------------------------------------------------------- */

template <typename T> struct on_device {
    T *at = nullptr;
    size_t n = 0;

    explicit on_device(size_t count) : n(count)
    {
        GPU(cudaMalloc(&at, n * sizeof(T)));
    }
    explicit on_device(const std::vector<T> &from) : on_device(from.size())
    {
        GPU(cudaMemcpy(at, from.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    on_device(const on_device &) = delete;
    ~on_device()
    {
        cudaFree(at);
    }
};

/* Finite bf16 values of moderate size, another one everywhere. */
__global__ void fill(uint16_t *to, size_t n, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u ^ seed;

        x ^= x >> 15;
        x *= 2246822519u;
        x ^= x >> 13;
        to[i] = (uint16_t)((x & 0x807f) | (120 + (x >> 8) % 12) << 7);
    }
}

__global__ void count_differences(const uint16_t *a, const uint16_t *b, size_t n,
                                  unsigned long long *ret)
{
    unsigned long long found = 0;

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        found += a[i] != b[i];
    if (found)
        atomicAdd(ret, found);
}

__global__ void __launch_bounds__(256) copy_vectors(uint4 *to, const uint4 *from, size_t n)
{
    size_t i = (blockIdx.x * (size_t)256 * 4) + threadIdx.x;
    uint4 v[4];

#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + u * 256 < n)
            v[u] = __ldcs(from + i + u * 256);
#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + u * 256 < n)
            __stcs(to + i + u * 256, v[u]);
}

bool same(const on_device<uint16_t> &a, const on_device<uint16_t> &b)
{
    on_device<unsigned long long> n(std::vector<unsigned long long>{0});
    unsigned long long found = 1;

    count_differences<<<1024, 256, 0, stream>>>(a.at, b.at, std::min(a.n, b.n), n.at);
    GPU(cudaGetLastError());
    GPU(cudaStreamSynchronize(stream));
    GPU(cudaMemcpy(&found, n.at, sizeof(found), cudaMemcpyDeviceToHost));
    return found == 0;
}

/*
 * Return median seconds of one call. Calls are queued in batches, so that launching isn't what is
 * measured; each gets its number.
 */
template <typename F> double measure(F call, int per_round)
{
    std::vector<double> seconds;
    cudaEvent_t begin, end;

    GPU(cudaEventCreate(&begin));
    GPU(cudaEventCreate(&end));
    call(0);
    call(1);
    for (int round = 0; round < ROUNDS; round++) {
        float ms = 0;

        GPU(cudaEventRecord(begin, stream));
        for (int i = 0; i < per_round; i++)
            call(i);
        GPU(cudaEventRecord(end, stream));
        GPU(cudaEventSynchronize(end));
        GPU(cudaEventElapsedTime(&ms, begin, end));
        seconds.push_back(ms / 1e3 / per_round);
    }
    GPU(cudaEventDestroy(begin));
    GPU(cudaEventDestroy(end));
    std::sort(seconds.begin(), seconds.end());
    return seconds[ROUNDS / 2];
}

/* --------------------------------------------------------------------------------------------- */

/* Return GB/s of a device copy of K and V of @s, read + written. */
double yardstick(const slice &s)
{
    size_t row = (size_t)HEADS * DIM * 2 * 2 / sizeof(uint4), n = s.tokens * row;
    on_device<uint4> from(n_tokens * row), to(n_tokens * row);
    unsigned blocks = (unsigned)((n + 1023) / 1024);
    double by_engine, by_kernel, bytes = (double)n * sizeof(uint4) * 2;

    GPU(cudaMemset(from.at, 0x5a, from.n * sizeof(uint4)));
    by_engine = measure(
        [&](int i) {
            GPU(cudaMemcpyAsync(to.at + s.first(i) * row, from.at + s.first(i) * row,
                                n * sizeof(uint4), cudaMemcpyDeviceToDevice, stream));
        },
        s.calls());
    by_kernel = measure(
        [&](int i) {
            copy_vectors<<<blocks, 256, 0, stream>>>(to.at + s.first(i) * row,
                                                     from.at + s.first(i) * row, n);
        },
        s.calls());
    GPU(cudaGetLastError());
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"device_copy\",\"tokens\":%u,\"bytes\":%.0f,"
                "\"memcpy_gb_per_s\":%.1f,\"kernel_gb_per_s\":%.1f,\"median_of\":%d}\n",
                s.tokens, bytes, bytes / by_engine / 1e9, bytes / by_kernel / 1e9, ROUNDS);
    return bytes / std::min(by_engine, by_kernel) / 1e9;
}

void report(const char *figure, const char *layout, const slice &s, double bytes, double seconds,
            double copy, bool good)
{
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"%s\",\"layout\":\"%s\",\"tokens\":%u,"
                "\"bytes\":%.0f,\"us\":%.2f,\"gb_per_s\":%.1f,\"copy_gb_per_s\":%.1f,"
                "\"of_copy\":%.3f,\"correct\":%s,\"median_of\":%d}\n",
                figure, layout, s.tokens, bytes, seconds * 1e6, bytes / seconds / 1e9, copy,
                bytes / seconds / 1e9 / copy, good ? "true" : "false", ROUNDS);
    std::fflush(stdout);
    failures += !good;
}

/* --------------------------------------------------------------------------------------------- */
/* Descriptors */

kvx_tensor_desc_t io(void *data, uint32_t tokens, kvx_dtype_t dtype)
{
    kvx_tensor_desc_t t = {};

    t.size = sizeof(t);
    t.dtype = dtype;
    t.layout = KVX_LAYOUT_BLOCK_CUSTOM;
    t.memory = KVX_MEMORY_DEVICE;
    t.ndim = 3;
    t.shape[0] = tokens;
    t.shape[1] = HEADS;
    t.shape[2] = DIM;
    t.stride[0] = HEADS * DIM;
    t.stride[1] = DIM;
    t.stride[2] = 1;
    t.data = data;
    return t;
}

kvx_kv_io_desc_t io_pair(void *k, void *v, uint32_t tokens, kvx_dtype_t dtype)
{
    kvx_kv_io_desc_t d = {};

    d.size = sizeof(d);
    d.key = io(k, tokens, dtype);
    d.value = io(v, tokens, dtype);
    d.num_tokens = tokens;
    d.num_kv_heads = HEADS;
    d.head_dim = DIM;
    return d;
}

kvx_cache_desc_t cache_of(void *k, void *v, uint32_t blocks, kvx_layout_t layout, uint32_t pack,
                          kvx_dtype_t dtype)
{
    kvx_cache_desc_t c = {};

    c.size = sizeof(c);
    c.num_blocks = blocks;
    c.block_size = BLOCK;
    c.num_kv_heads = HEADS;
    c.head_dim = DIM;
    c.k.size = sizeof(c.k);
    c.k.dtype = dtype;
    c.k.memory = KVX_MEMORY_DEVICE;
    c.k.data = k;
    must("kvx_tensor_canonical", kvx_tensor_canonical(&c, layout, pack, &c.k));
    c.k.dtype = dtype;
    c.k.memory = KVX_MEMORY_DEVICE;
    c.k.data = k;
    c.v = c.k;
    c.v.data = v;
    return c;
}

/* Blocks in random order; every token of a sequence in its place. */
struct placement {
    std::vector<int32_t> table; /* [SEQUENCES, n_tokens / SEQUENCES / BLOCK] */
    std::vector<int64_t> slots;
    std::vector<int32_t> lengths;

    placement() : table(n_tokens / BLOCK), slots(n_tokens), lengths(SEQUENCES, n_tokens / SEQUENCES)
    {
        std::mt19937 random(7);

        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), random);
        for (uint32_t t = 0; t < n_tokens; t++)
            slots[t] = (int64_t)table[t / BLOCK] * BLOCK + t % BLOCK;
    }
};

struct setup {
    placement at;
    on_device<int32_t> table{at.table}, lengths{at.lengths};
    on_device<int64_t> slots{at.slots};
    size_t elements = (size_t)n_tokens * HEADS * DIM;
    on_device<uint16_t> in_k{elements}, in_v{elements}, out_k{elements}, out_v{elements};
    on_device<uint16_t> cache_k{elements}, cache_v{elements};

    setup()
    {
        fill<<<2048, 256, 0, stream>>>(in_k.at, elements, 1);
        fill<<<2048, 256, 0, stream>>>(in_v.at, elements, 2);
        GPU(cudaGetLastError());
        GPU(cudaStreamSynchronize(stream));
    }

    /* Write @tokens tokens from @first on. */
    kvx_write_desc_t write(size_t first, uint32_t tokens) const
    {
        size_t at = first * HEADS * DIM;
        kvx_write_desc_t w = {};

        w.size = sizeof(w);
        w.io = io_pair(in_k.at + at, in_v.at + at, tokens, KVX_DTYPE_BF16);
        w.slots.size = sizeof(w.slots);
        w.slots.dtype = KVX_DTYPE_S64;
        w.slots.token_count = tokens;
        w.slots.invalid_slot = -1;
        w.slots.slots = slots.at + first;
        return w;
    }

    /* Gather the sequences of @tokens tokens from @first on: whole ones. */
    kvx_gather_desc_t gather(size_t first, uint32_t tokens) const
    {
        uint32_t each = n_tokens / SEQUENCES;
        size_t at = first * HEADS * DIM;
        kvx_gather_desc_t g = {};

        g.size = sizeof(g);
        g.io = io_pair(out_k.at + at, out_v.at + at, tokens, KVX_DTYPE_BF16);
        g.block_table.size = sizeof(g.block_table);
        g.block_table.format = KVX_BLOCK_TABLE_PACKED;
        g.block_table.index_dtype = KVX_DTYPE_S32;
        g.block_table.seq_count = tokens / each;
        g.block_table.beam_width = 1;
        g.block_table.max_blocks_per_seq = each / BLOCK;
        g.block_table.indices = table.at + first / BLOCK;
        g.block_table.indices_count = tokens / BLOCK;
        g.seq_lens.size = sizeof(g.seq_lens);
        g.seq_lens.dtype = KVX_DTYPE_S32;
        g.seq_lens.seq_count = tokens / each;
        g.seq_lens.lengths = lengths.at;
        g.max_seq_len = each;
        return g;
    }

    void poison() const
    {
        GPU(cudaMemsetAsync(out_k.at, 0xff, elements * 2, stream));
        GPU(cudaMemsetAsync(out_v.at, 0xff, elements * 2, stream));
        GPU(cudaMemsetAsync(cache_k.at, 0xff, elements * 2, stream));
        GPU(cudaMemsetAsync(cache_v.at, 0xff, elements * 2, stream));
    }

    bool returned() const
    {
        return same(in_k, out_k) && same(in_v, out_v);
    }
};
} // namespace

#endif
