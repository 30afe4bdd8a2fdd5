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
 * Writes and gathers are measured with TOKENS tokens a call and with 8192. Decode-sized writes
 * stand beside empty kernels, in a CUDA graph and launched one by one. KVX_CUDA_OVERLAP=0 turns
 * programmatic launches off (see docs/kvx-cuda.md).
 */
#include "kvx_gpu.cuh"

namespace
{
void bench_layout(const setup &s, const slice &part, const char *name, kvx_layout_t layout,
                  uint32_t pack, double copy)
{
    kvx_cache_desc_t cache =
        cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, pack, KVX_DTYPE_BF16);
    double bytes = (double)part.tokens * HEADS * DIM * 2 * 2 * 2; /* K and V, read and written */
    double writing, gathering;
    bool good;

    s.poison();
    writing = measure(
        [&](int i) {
            kvx_write_desc_t write = s.write(part.first(i), part.tokens);

            must("write", kvx_write_kv(&cache, &write, stream));
        },
        part.calls());
    gathering = measure(
        [&](int i) {
            kvx_gather_desc_t gather = s.gather(part.first(i), part.tokens);

            must("gather", kvx_gather_kv(&cache, &gather, stream));
        },
        part.calls());
    good = s.returned();
    report("write_bf16", name, part, bytes, writing, copy, good);
    report("gather_bf16", name, part, bytes, gathering, copy, good);
}

/* --------------------------------------------------------------------------------------------- */
/* FP8 */

struct granularity {
    const char *name;
    kvx_scale_granularity_t kind;
    uint32_t blocks, heads; /* number of scales along each; 0: one for all */
};

kvx_scale_desc_t scale_of(const granularity &g, const float *at)
{
    kvx_scale_desc_t scale = {};
    uint32_t shape[2] = {g.blocks, g.heads};

    scale.size = sizeof(scale);
    scale.dtype = KVX_DTYPE_F32;
    scale.granularity = g.kind;
    for (uint32_t n : shape) {
        if (n)
            scale.shape[scale.ndim++] = n;
    }
    for (uint32_t i = scale.ndim; i-- > 0;)
        scale.stride[i] = i + 1 < scale.ndim ? scale.shape[i + 1] : 1;
    scale.data = at;
    return scale;
}

/* An FP8 cache and its scales, written and gathered part by part. */
struct fp8_cache {
    const setup &s;
    const slice &part;
    kvx_cache_desc_t cache;
    kvx_scale_desc_t scale;

    void write(int i) const
    {
        kvx_write_desc_t w = s.write(part.first(i), part.tokens);

        w.k_scale_desc = w.v_scale_desc = scale;
        must("write", kvx_write_kv(&cache, &w, stream));
    }
    void gather(int i) const
    {
        kvx_gather_desc_t g = s.gather(part.first(i), part.tokens);
        const kvx_scale_desc_t *scales[1] = {&scale};
        const kvx_cache_desc_t *caches[1] = {&cache};
        const kvx_gather_desc_t *gathers[1] = {&g};
        kvx_options_t options = {};

        options.size = sizeof(options);
        options.k_scales = options.v_scales = scales;
        must("gather", kvx_gather_kv_layers(caches, gathers, 1, &options, stream));
    }
    void all_parts() const
    {
        for (uint32_t i = 0; i < part.parts(); i++)
            write((int)i);
        for (uint32_t i = 0; i < part.parts(); i++)
            gather((int)i);
    }
};

/*
 * bf16 to E4M3 and back. Values that FP8 holds come back as they were; so the input is made of
 * such: what a first round trip gave. With a scale that is no power of two they needn't, which is
 * why the check runs with 0.5 and the measurement with 0.37.
 */
void bench_fp8(const setup &s, const slice &part, const char *name, kvx_layout_t layout,
               const granularity &g, double copy)
{
    size_t n = (size_t)std::max(g.blocks, 1U) * std::max(g.heads, 1U);
    on_device<float> exact(std::vector<float>(n, 0.5F)), other(std::vector<float>(n, 0.37F));
    fp8_cache fp8{s, part,
                  cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, 0,
                           KVX_DTYPE_F8_E4M3),
                  scale_of(g, exact.at)};
    double bytes = (double)part.tokens * HEADS * DIM * 2 * (2 + 1), writing, gathering;
    char figure[64];
    bool good;

    s.poison();
    fp8.all_parts();
    GPU(cudaMemcpyAsync(s.in_k.at, s.out_k.at, s.elements * 2, cudaMemcpyDeviceToDevice, stream));
    GPU(cudaMemcpyAsync(s.in_v.at, s.out_v.at, s.elements * 2, cudaMemcpyDeviceToDevice, stream));
    s.poison();
    fp8.all_parts();
    good = s.returned();
    fp8.scale.data = other.at;
    writing = measure([&](int i) { fp8.write(i); }, part.calls());
    gathering = measure([&](int i) { fp8.gather(i); }, part.calls());
    std::snprintf(figure, sizeof(figure), "write_bf16_to_e4m3_per_%s", g.name);
    report(figure, name, part, bytes, writing, copy, good);
    std::snprintf(figure, sizeof(figure), "gather_e4m3_to_bf16_per_%s", g.name);
    report(figure, name, part, bytes, gathering, copy, good);
}

/* All blocks of an NHD cache into an HND cache, at other places. */
void bench_copy(const setup &s, const slice &part, double copy)
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
        measure([&](int) { must("copy", kvx_copy_blocks(&from, &to, &pairs, nullptr, stream)); }, 4);
    std::swap(pairs.src_blocks, pairs.dst_blocks);
    must("copy back", kvx_copy_blocks(&to, &back, &pairs, nullptr, stream));
    good = same(s.cache_k, back_k) && same(s.cache_v, back_v);
    report("copy_blocks_nhd_to_hnd", "nhd,hnd", part, (double)s.elements * 2 * 2 * 2, seconds, copy,
           good);
}

/* --------------------------------------------------------------------------------------------- */
/* Decode steps: chains of launches, to other slots each time, beside chains of empty kernels */

enum { CHAIN = 200, MOST_DECODE = 256, SMALL = 8192 };

__global__ void nothing()
{
}

__global__ void nothing_overlapped()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

void launch_nothing(bool overlap)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(1);
    config.blockDim = dim3(64);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap;
    GPU(cudaLaunchKernelEx(&config, overlap ? nothing_overlapped : nothing));
}

struct chain_times {
    double in_graph, one_by_one; /* seconds per launch */
};

/* Time a chain of CHAIN launches, captured into a graph and queued one after the other. */
template <typename F> chain_times time_chain(F launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    chain_times ret;

    GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < CHAIN; i++)
        launch(i);
    GPU(cudaStreamEndCapture(stream, &graph));
#if CUDART_VERSION >= 12000
    GPU(cudaGraphInstantiate(&exec, graph, 0));
#else
    GPU(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
#endif
    ret.in_graph = measure([&](int) { GPU(cudaGraphLaunch(exec, stream)); }, 5) / CHAIN;
    ret.one_by_one = measure(
                         [&](int) {
                             for (int i = 0; i < CHAIN; i++)
                                 launch(i);
                         },
                         1) /
                     CHAIN;
    GPU(cudaGraphExecDestroy(exec));
    GPU(cudaGraphDestroy(graph));
    return ret;
}

/* The faster empty kernel, of those with and without programmatic launch. */
chain_times bench_empty()
{
    chain_times plain = time_chain([](int) { launch_nothing(false); });
    chain_times overlapped = time_chain([](int) { launch_nothing(true); });

    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"empty_kernel\",\"in_graph_us\":%.3f,"
                "\"one_by_one_us\":%.3f,\"overlapped_in_graph_us\":%.3f,"
                "\"overlapped_one_by_one_us\":%.3f,\"launches\":%d,\"median_of\":%d}\n",
                plain.in_graph * 1e6, plain.one_by_one * 1e6, overlapped.in_graph * 1e6,
                overlapped.one_by_one * 1e6, CHAIN, ROUNDS);
    return {std::min(plain.in_graph, overlapped.in_graph),
            std::min(plain.one_by_one, overlapped.one_by_one)};
}

/* Layers: disjoint ranges of blocks of the one cache. */
std::vector<kvx_cache_desc_t> layers_of(const kvx_cache_desc_t &cache, uint32_t layers)
{
    std::vector<kvx_cache_desc_t> parts(layers, cache);
    uint32_t each = n_tokens / BLOCK / layers;

    for (uint32_t l = 0; l < layers; l++) {
        size_t skip = (size_t)l * each * BLOCK * HEADS * DIM * 2;

        parts[l].num_blocks = each;
        parts[l].k.shape[0] = parts[l].v.shape[0] = each;
        parts[l].k.data = (char *)cache.k.data + skip;
        parts[l].v.data = (char *)cache.v.data + skip;
    }
    return parts;
}

void bench_decode(const setup &s, const char *name, kvx_layout_t layout, uint32_t tokens,
                  uint32_t layers, const chain_times &empty)
{
    kvx_cache_desc_t cache =
        cache_of(s.cache_k.at, s.cache_v.at, n_tokens / BLOCK, layout, 0, KVX_DTYPE_BF16);
    std::vector<kvx_cache_desc_t> parts = layers_of(cache, layers);
    std::vector<const kvx_cache_desc_t *> caches;
    std::vector<kvx_write_desc_t> writes;
    std::vector<const kvx_write_desc_t *> list;
    std::vector<int64_t> slots((size_t)CHAIN * tokens);
    const char *overlap = std::getenv("KVX_CUDA_OVERLAP");
    kvx_options_t options = {};
    std::mt19937 random(3);
    chain_times t;

    options.size = sizeof(options);
    options.phase = KVX_PHASE_DECODE;
    for (const kvx_cache_desc_t &part : parts)
        caches.push_back(&part);
    for (int64_t &slot : slots)
        slot = random() % (n_tokens / layers);
    on_device<int64_t> device_slots(slots);
    /* A layer's tokens lie where they lay a step before: in the L2 cache, as a model leaves them. */
    for (uint32_t l = 0; l < layers; l++)
        writes.push_back(s.write((size_t)l * tokens, tokens));
    for (const kvx_write_desc_t &write : writes)
        list.push_back(&write);
    t = time_chain([&](int i) {
        for (kvx_write_desc_t &write : writes)
            write.slots.slots = device_slots.at + (size_t)i * tokens;
        must("decode", kvx_write_kv_layers(caches.data(), list.data(), layers, &options, stream));
    });
    std::printf("{\"bench\":\"kvx_gpu\",\"figure\":\"decode_write\",\"layout\":\"%s\","
                "\"tokens\":%u,\"layers\":%u,\"launches\":%d,\"in_graph_us\":%.3f,"
                "\"of_empty_in_graph\":%.2f,\"one_by_one_us\":%.3f,\"of_empty_one_by_one\":%.2f,"
                "\"overlap\":%s,\"median_of\":%d}\n",
                name, tokens, layers, CHAIN, t.in_graph * 1e6, t.in_graph / empty.in_graph,
                t.one_by_one * 1e6, t.one_by_one / empty.one_by_one,
                overlap && overlap[0] == '0' ? "false" : "true", ROUNDS);
    std::fflush(stdout);
}

void bench_decodes(const setup &s)
{
    static const uint32_t sizes[] = {1, 8, 64, MOST_DECODE};
    chain_times empty = bench_empty();

    for (uint32_t tokens : sizes) {
        bench_decode(s, "nhd", KVX_LAYOUT_BLOCK_NHD, tokens, 1, empty);
        bench_decode(s, "nhd", KVX_LAYOUT_BLOCK_NHD, tokens, 32, empty);
    }
    bench_decode(s, "hnd", KVX_LAYOUT_BLOCK_HND, 64, 1, empty);
    bench_decode(s, "hnd", KVX_LAYOUT_BLOCK_HND, 64, 32, empty);
}

/* --------------------------------------------------------------------------------------------- */

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
void bench_slice(const setup &s, const slice &part)
{
    static const granularity per_tensor = {"tensor", KVX_SCALE_PER_TENSOR, 0, 0};
    const granularity others[] = {{"head", KVX_SCALE_PER_HEAD, 0, HEADS},
                                  {"block", KVX_SCALE_PER_BLOCK, n_tokens / BLOCK, 0},
                                  {"block_head", KVX_SCALE_PER_BLOCK_HEAD, n_tokens / BLOCK, HEADS}};
    double copy = yardstick(part);

    bench_layout(s, part, "nhd", KVX_LAYOUT_BLOCK_NHD, 0, copy);
    bench_layout(s, part, "hnd", KVX_LAYOUT_BLOCK_HND, 0, copy);
    bench_layout(s, part, "hnd_packed8", KVX_LAYOUT_BLOCK_HND_PACKED, 8, copy);
    bench_layout(s, part, "hnd_packed1", KVX_LAYOUT_BLOCK_HND_PACKED, 1, copy);
    bench_fp8(s, part, "nhd", KVX_LAYOUT_BLOCK_NHD, per_tensor, copy);
    bench_fp8(s, part, "hnd", KVX_LAYOUT_BLOCK_HND, per_tensor, copy);
    for (const granularity &g : others)
        bench_fp8(s, part, "nhd", KVX_LAYOUT_BLOCK_NHD, g, copy);
    if (part.tokens == n_tokens)
        bench_copy(s, part, copy);
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
        n_tokens = (uint32_t)std::strtoul(argv[1], nullptr, 0) / SMALL * SMALL;
    if (n_tokens < SEQUENCES * BLOCK * BLOCK || SMALL % (n_tokens / SEQUENCES)) {
        std::fprintf(stderr, "TOKENS: a power of two from 16384 to %d\n", SMALL * SEQUENCES);
        return 2;
    }
    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    describe_device();
    {
        setup s;

        bench_slice(s, {n_tokens});
        bench_decodes(s);
        bench_slice(s, {SMALL});
    }
    return failures != 0;
}
