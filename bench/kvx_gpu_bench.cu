// SPDX-License-Identifier: Apache-2.0
/*
 * libkvx on a GPU: one JSON line per figure. Bytes are read + written, GB are 1e9 bytes. The
 * yardstick, measured in the same run, is the faster of cudaMemcpyAsync and a plain 16-byte copy
 * kernel over as many bytes. Blocks lie in random order, and working sets are far beyond the L2
 * cache. Every figure is the median of ROUNDS measurements with events. The copied bytes are
 * compared with the expected ones, so that no figure comes from doing nothing (for decode chains,
 * tests/gpu/gpu_graph.c does that).
 *
 *   kvx_gpu_bench [TOKENS]     default 262144: 1 GiB of bf16 K and V, 2 GiB working set
 *
 * KVX_CUDA_OVERLAP=0 turns programmatic launches off (see docs/kvx-cuda.md).
 */
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
enum { ROUNDS = 9, BLOCK = 16, HEADS = 8, DIM = 128, SEQUENCES = 64, DECODE = 64, CHAIN = 200 };

cudaStream_t stream;
uint32_t n_tokens = 262144;
int failures;

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

/* Median seconds of one call. Work is queued in batches, so that launching isn't what is measured.
 */
template <typename F> double measure(F call, int per_round)
{
    std::vector<double> seconds;
    cudaEvent_t begin, end;

    GPU(cudaEventCreate(&begin));
    GPU(cudaEventCreate(&end));
    call();
    call();
    for (int round = 0; round < ROUNDS; round++) {
        float ms = 0;

        GPU(cudaEventRecord(begin, stream));
        for (int i = 0; i < per_round; i++)
            call();
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

/* A device copy of @bytes read + written: GB/s. */
double yardstick(size_t bytes)
{
    on_device<uint4> from(bytes / 2 / sizeof(uint4)), to(bytes / 2 / sizeof(uint4));
    unsigned blocks = (unsigned)((from.n + 1023) / 1024);
    double by_engine, by_kernel;

    GPU(cudaMemset(from.at, 0x5a, from.n * sizeof(uint4)));
    by_engine = measure(
        [&] {
            GPU(cudaMemcpyAsync(to.at, from.at, from.n * sizeof(uint4), cudaMemcpyDeviceToDevice,
                                stream));
        },
        4);
    by_kernel =
        measure([&] { copy_vectors<<<blocks, 256, 0, stream>>>(to.at, from.at, from.n); }, 4);
    GPU(cudaGetLastError());
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"device_copy\",\"bytes\":%zu,"
                "\"memcpy_gb_per_s\":%.1f,\"kernel_gb_per_s\":%.1f,\"median_of\":%d}\n",
                bytes, (double)bytes / by_engine / 1e9, (double)bytes / by_kernel / 1e9, ROUNDS);
    return (double)bytes / std::min(by_engine, by_kernel) / 1e9;
}

void report(const char *figure, const char *layout, double bytes, double seconds, double copy,
            bool good)
{
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"%s\",\"layout\":\"%s\",\"tokens\":%u,"
                "\"bytes\":%.0f,\"us\":%.2f,\"gb_per_s\":%.1f,\"copy_gb_per_s\":%.1f,"
                "\"of_copy\":%.3f,\"correct\":%s,\"median_of\":%d}\n",
                figure, layout, n_tokens, bytes, seconds * 1e6, bytes / seconds / 1e9, copy,
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

    kvx_write_desc_t write(kvx_dtype_t dtype) const
    {
        kvx_write_desc_t w = {};

        w.size = sizeof(w);
        w.io = io_pair(in_k.at, in_v.at, n_tokens, dtype);
        w.slots.size = sizeof(w.slots);
        w.slots.dtype = KVX_DTYPE_S64;
        w.slots.token_count = n_tokens;
        w.slots.invalid_slot = -1;
        w.slots.slots = slots.at;
        return w;
    }

    kvx_gather_desc_t gather(kvx_dtype_t dtype) const
    {
        kvx_gather_desc_t g = {};

        g.size = sizeof(g);
        g.io = io_pair(out_k.at, out_v.at, n_tokens, dtype);
        g.block_table.size = sizeof(g.block_table);
        g.block_table.format = KVX_BLOCK_TABLE_PACKED;
        g.block_table.index_dtype = KVX_DTYPE_S32;
        g.block_table.seq_count = SEQUENCES;
        g.block_table.beam_width = 1;
        g.block_table.max_blocks_per_seq = n_tokens / SEQUENCES / BLOCK;
        g.block_table.indices = table.at;
        g.block_table.indices_count = n_tokens / BLOCK;
        g.seq_lens.size = sizeof(g.seq_lens);
        g.seq_lens.dtype = KVX_DTYPE_S32;
        g.seq_lens.seq_count = SEQUENCES;
        g.seq_lens.lengths = lengths.at;
        g.max_seq_len = n_tokens / SEQUENCES;
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

/* --------------------------------------------------------------------------------------------- */

void bench_layout(const setup &s, const char *name, kvx_layout_t layout, uint32_t pack, double copy)
{
    kvx_cache_desc_t cache =
        cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, pack, KVX_DTYPE_BF16);
    kvx_write_desc_t write = s.write(KVX_DTYPE_BF16);
    kvx_gather_desc_t gather = s.gather(KVX_DTYPE_BF16);
    double bytes = (double)s.elements * 2 * 2 * 2; /* K and V, read and written, 2 bytes each */
    double writing, gathering;
    bool good;

    s.poison();
    writing = measure([&] { must("write", kvx_write_kv(&cache, &write, stream)); }, 4);
    gathering = measure([&] { must("gather", kvx_gather_kv(&cache, &gather, stream)); }, 4);
    good = s.returned();
    report("write_bf16", name, bytes, writing, copy, good);
    report("gather_bf16", name, bytes, gathering, copy, good);
}

/*
 * bf16 to E4M3 and back. Values that FP8 holds come back as they were; so the input is made of
 * such: what a first round trip gave. With a scale that is no power of two they needn't, which is
 * why the check runs with 0.5 and the measurement with 0.37.
 */
void bench_fp8(const setup &s, const char *name, kvx_layout_t layout, double copy)
{
    kvx_cache_desc_t cache =
        cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, 0, KVX_DTYPE_F8_E4M3);
    kvx_write_desc_t write = s.write(KVX_DTYPE_BF16);
    kvx_gather_desc_t gather = s.gather(KVX_DTYPE_BF16);
    on_device<float> scales(std::vector<float>{0.5F, 0.37F});
    kvx_scale_desc_t scale = {};
    const kvx_scale_desc_t *list[1] = {&scale};
    const kvx_cache_desc_t *caches[1] = {&cache};
    const kvx_gather_desc_t *gathers[1] = {&gather};
    kvx_options_t options = {};
    double bytes = (double)s.elements * 2 * (2 + 1), writing, gathering;
    bool good;
    auto do_write = [&] { must("write", kvx_write_kv(&cache, &write, stream)); };
    auto do_gather = [&] {
        must("gather", kvx_gather_kv_layers(caches, gathers, 1, &options, stream));
    };

    scale.size = sizeof(scale);
    scale.dtype = KVX_DTYPE_F32;
    scale.granularity = KVX_SCALE_PER_TENSOR;
    options.size = sizeof(options);
    options.k_scales = options.v_scales = list;
    scale.data = write.k_scale = write.v_scale = scales.at;
    s.poison();
    do_write();
    do_gather();
    GPU(cudaMemcpyAsync(s.in_k.at, s.out_k.at, s.elements * 2, cudaMemcpyDeviceToDevice, stream));
    GPU(cudaMemcpyAsync(s.in_v.at, s.out_v.at, s.elements * 2, cudaMemcpyDeviceToDevice, stream));
    s.poison();
    do_write();
    do_gather();
    good = s.returned();
    scale.data = write.k_scale = write.v_scale = scales.at + 1;
    writing = measure(do_write, 4);
    gathering = measure(do_gather, 4);
    report("write_bf16_to_e4m3", name, bytes, writing, copy, good);
    report("gather_e4m3_to_bf16", name, bytes, gathering, copy, good);
}

/* All blocks of an NHD cache into an HND cache, at other places. */
void bench_copy(const setup &s, double copy)
{
    uint32_t blocks = n_tokens / BLOCK;
    kvx_cache_desc_t from =
        cache_of(s.cache_k.at, s.cache_v.at, blocks, KVX_LAYOUT_BLOCK_NHD, 0, KVX_DTYPE_BF16);
    kvx_cache_desc_t to =
        cache_of(s.out_k.at, s.out_v.at, blocks, KVX_LAYOUT_BLOCK_HND, 0, KVX_DTYPE_BF16);
    on_device<uint16_t> back_k(s.elements), back_v(s.elements);
    kvx_cache_desc_t back =
        cache_of(back_k.at, back_v.at, blocks, KVX_LAYOUT_BLOCK_NHD, 0, KVX_DTYPE_BF16);
    std::vector<int32_t> shuffled = s.at.table;
    on_device<int32_t> other(std::vector<int32_t>(shuffled.rbegin(), shuffled.rend()));
    kvx_block_copy_t pairs = {};
    double seconds;
    bool good;

    pairs.size = sizeof(pairs);
    pairs.index_dtype = KVX_DTYPE_S32;
    pairs.count = blocks;
    pairs.src_blocks = s.table.at;
    pairs.dst_blocks = other.at;
    fill<<<2048, 256, 0, stream>>>(s.cache_k.at, s.elements, 3);
    fill<<<2048, 256, 0, stream>>>(s.cache_v.at, s.elements, 4);
    GPU(cudaGetLastError());
    seconds =
        measure([&] { must("copy", kvx_copy_blocks(&from, &to, &pairs, nullptr, stream)); }, 4);
    std::swap(pairs.src_blocks, pairs.dst_blocks);
    must("copy back", kvx_copy_blocks(&to, &back, &pairs, nullptr, stream));
    good = same(s.cache_k, back_k) && same(s.cache_v, back_v);
    report("copy_blocks_nhd_to_hnd", "nhd,hnd", (double)s.elements * 2 * 2 * 2, seconds, copy,
           good);
}

/* --------------------------------------------------------------------------------------------- */
/* Decode steps: CHAIN launches in one graph, to other slots each time */

void bench_decode(const setup &s, const char *name, kvx_layout_t layout, uint32_t layers)
{
    kvx_cache_desc_t cache =
        cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, 0, KVX_DTYPE_BF16);
    std::vector<kvx_write_desc_t> writes(CHAIN, s.write(KVX_DTYPE_BF16));
    std::vector<const kvx_cache_desc_t *> caches(layers, &cache);
    std::vector<kvx_cache_desc_t> parts(layers, cache);
    kvx_options_t options = {};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    double seconds;
    const char *overlap = std::getenv("KVX_CUDA_OVERLAP");

    options.size = sizeof(options);
    options.phase = KVX_PHASE_DECODE;
    for (uint32_t l = 0; l < layers; l++) { /* layers: disjoint ranges of blocks of the one cache */
        uint32_t each = n_tokens / BLOCK / layers;

        parts[l].num_blocks = each;
        parts[l].k.shape[0] = parts[l].v.shape[0] = each;
        parts[l].k.data = (char *)cache.k.data + (size_t)l * each * BLOCK * HEADS * DIM * 2;
        parts[l].v.data = (char *)cache.v.data + (size_t)l * each * BLOCK * HEADS * DIM * 2;
        caches[l] = &parts[l];
    }
    std::vector<int64_t> slots(CHAIN * DECODE);
    std::mt19937 random(3);
    for (int64_t &slot : slots)
        slot = random() % (n_tokens / layers);
    on_device<int64_t> device_slots(slots);
    GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < CHAIN; i++) {
        std::vector<const kvx_write_desc_t *> list(layers, &writes[i]);
        size_t first = (size_t)i * DECODE * HEADS * DIM;

        writes[i].io = io_pair(s.in_k.at + first, s.in_v.at + first, DECODE, KVX_DTYPE_BF16);
        writes[i].slots.token_count = DECODE;
        writes[i].slots.slots = device_slots.at + i * DECODE;
        must("decode", kvx_write_kv_layers(caches.data(), list.data(), layers, &options, stream));
    }
    GPU(cudaStreamEndCapture(stream, &graph));
#if CUDART_VERSION >= 12000
    GPU(cudaGraphInstantiate(&exec, graph, 0));
#else
    GPU(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
#endif
    seconds = measure([&] { GPU(cudaGraphLaunch(exec, stream)); }, 5) / CHAIN;
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"decode_write_in_graph\",\"layout\":\"%s\","
                "\"tokens\":%d,\"layers\":%u,\"launches\":%d,\"us_per_launch\":%.3f,"
                "\"us_per_layer\":%.3f,\"overlap\":%s,\"median_of\":%d}\n",
                name, DECODE, layers, CHAIN, seconds * 1e6, seconds * 1e6 / layers,
                overlap && overlap[0] == '0' ? "false" : "true", ROUNDS);
    std::fflush(stdout);
    GPU(cudaGraphExecDestroy(exec));
    GPU(cudaGraphDestroy(graph));
}

void describe_device()
{
    cudaDeviceProp prop;
    int driver = 0, runtime = 0;

    GPU(cudaGetDeviceProperties(&prop, 0));
    GPU(cudaDriverGetVersion(&driver));
    GPU(cudaRuntimeGetVersion(&runtime));
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"device\",\"name\":\"%s\",\"sm\":%d,"
                "\"multiprocessors\":%d,\"l2_bytes\":%d,\"memory_bytes\":%zu,\"driver\":%d,"
                "\"runtime\":%d}\n",
                prop.name, prop.major * 10 + prop.minor, prop.multiProcessorCount, prop.l2CacheSize,
                prop.totalGlobalMem, driver, runtime);
}
} // namespace

int main(int argc, char **argv)
{
    int n = 0;

    if (argc > 1 && (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h"))) {
        std::printf("usage: kvx_gpu_bench [TOKENS]\n");
        return 0;
    }
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        std::printf("skipped: no CUDA device\n");
        return 77;
    }
    if (argc > 1)
        n_tokens =
            (uint32_t)std::strtoul(argv[1], nullptr, 0) / (SEQUENCES * BLOCK) * (SEQUENCES * BLOCK);
    if (n_tokens < CHAIN * DECODE) {
        std::fprintf(stderr, "at least %d tokens\n", CHAIN * DECODE);
        return 2;
    }
    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    describe_device();
    {
        double copy = yardstick((size_t)n_tokens * HEADS * DIM * 2 * 2 * 2);
        setup s;

        bench_layout(s, "nhd", KVX_LAYOUT_BLOCK_NHD, 0, copy);
        bench_layout(s, "hnd", KVX_LAYOUT_BLOCK_HND, 0, copy);
        bench_layout(s, "hnd_packed8", KVX_LAYOUT_BLOCK_HND_PACKED, 8, copy);
        bench_layout(s, "hnd_packed1", KVX_LAYOUT_BLOCK_HND_PACKED, 1, copy);
        bench_copy(s, copy);
        bench_decode(s, "nhd", KVX_LAYOUT_BLOCK_NHD, 1);
        bench_decode(s, "hnd", KVX_LAYOUT_BLOCK_HND, 1);
        bench_decode(s, "nhd", KVX_LAYOUT_BLOCK_NHD, 32);
        bench_fp8(s, "nhd", KVX_LAYOUT_BLOCK_NHD, copy);
        bench_fp8(s, "hnd", KVX_LAYOUT_BLOCK_HND, copy);
    }
    return failures != 0;
}
