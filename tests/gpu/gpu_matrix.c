// SPDX-License-Identifier: Apache-2.0
/*
 * The matrix of the host tests on device memory, managed memory and pinned host memory; every value
 * of the 16-bit and 8-bit types through every conversion, against the host path. KV_TEST_SCALE:
 * percent of the matrix. KVX_GPU_EXACT=1: exact allocations, for sanitizers. "numbers" as argument:
 * the values only.
 */
#include <time.h>

#include "gpu.h"
#include "kvx/kvx_layers.h"

static uint64_t run(const char *name, struct kvx_place_hooks hooks, uint32_t scale)
{
    struct kvx_matrix m = {.seed = case_setting("KV_TEST_SEED", (uint64_t)time(NULL) * 2654435761U),
                           .scale = scale};

    matrix_run(&m, &hooks);
    printf("%s: %llu cases, %llu failed (KV_TEST_SEED=%llu)\n", name, (unsigned long long)m.n_run,
           (unsigned long long)m.n_failed, (unsigned long long)m.seed);
    fflush(stdout);
    /* indices out of range are dropped on a device, so every case must end well */
    return m.n_failed + (m.n_ok != m.n_run);
}

/* --------------------------------------------------------------------------------------------- */
/* Numbers: 512 tokens of one head with 128 dims, a value each */

enum { TOKENS = 512, DIMS = 128, VALUES = TOKENS * DIMS, BLOCK = 16 };

static kvx_tensor_desc_t tensor(kvx_dtype_t dtype, kvx_memory_type_t memory, void *data, int cache)
{
    kvx_tensor_desc_t t = new_tensor(dtype, cache ? KVX_LAYOUT_BLOCK_NHD : KVX_LAYOUT_BLOCK_CUSTOM);
    int64_t shape[4] = {TOKENS / BLOCK, BLOCK, 1, DIMS}, io[3] = {TOKENS, 1, DIMS};

    t.memory = memory;
    t.ndim = cache ? 4 : 3;
    memcpy(t.shape, cache ? shape : io, t.ndim * sizeof(int64_t));
    t.stride[t.ndim - 1] = 1;
    for (uint32_t i = t.ndim - 1; i > 0; i--)
        t.stride[i - 1] = t.stride[i] * t.shape[i];
    t.data = data;
    return t;
}

/* Write @in (@from) as @to with @scale, into @out; slots are 0, 1, 2... */
static void convert(kvx_memory_type_t memory, void *stream, kvx_dtype_t from, void *in,
                    kvx_dtype_t to, void *out[2], const int64_t *slots, const float *scale)
{
    kvx_cache_desc_t cache = {.size = sizeof(cache),
                              .num_blocks = TOKENS / BLOCK,
                              .block_size = BLOCK,
                              .num_kv_heads = 1,
                              .head_dim = DIMS};
    kvx_write_desc_t write = {.size = sizeof(write)};

    cache.k = tensor(to, memory, out[0], 1);
    cache.v = tensor(to, memory, out[1], 1);
    write.io.size = sizeof(write.io);
    write.io.num_tokens = TOKENS;
    write.io.num_kv_heads = 1;
    write.io.head_dim = DIMS;
    write.io.key = tensor(from, memory, in, 0);
    write.io.value = write.io.key;
    write.slots = (kvx_slot_mapping_t){.size = sizeof(write.slots),
                                       .dtype = KVX_DTYPE_S64,
                                       .token_count = TOKENS,
                                       .invalid_slot = -1,
                                       .slots = slots};
    write.k_scale = scale;
    MUST(kvx_write_kv(&cache, &write, stream) == KVX_STATUS_OK);
}

static void fill(struct dice *d, kvx_dtype_t dtype, void *to)
{
    unsigned bytes = kvx_dtype_size(dtype);

    for (uint32_t i = 0; i < VALUES; i++) {
        uint32_t bits = bytes == 4 ? random_element(d, dtype) : i;

        memcpy((char *)to + (size_t)i * bytes, &bits, bytes);
    }
}

/* K with the scale, V without; host and device must give the same bytes. */
static uint64_t compare(struct dice *d, struct kvx_place_hooks *hooks, kvx_dtype_t from,
                        kvx_dtype_t to, float scale)
{
    size_t in_bytes = VALUES * (size_t)kvx_dtype_size(from);
    size_t out_bytes = VALUES * (size_t)kvx_dtype_size(to);
    int64_t slots[TOKENS];
    char *in = malloc(in_bytes), *found = malloc(out_bytes), *poison = calloc(1, out_bytes);
    void *host[2] = {calloc(1, out_bytes), calloc(1, out_bytes)}, *device[2];
    void *device_in, *device_slots, *device_scale;
    uint64_t bad = 0;

    MUST(in && found && poison && host[0] && host[1]);
    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    fill(d, from, in);
    convert(KVX_MEMORY_HOST, NULL, from, in, to, host, slots, &scale);
    device_in = hooks->put(in, in_bytes);
    device_slots = hooks->put(slots, sizeof(slots));
    device_scale = hooks->put(&scale, sizeof(scale));
    device[0] = hooks->put(poison, out_bytes);
    device[1] = hooks->put(poison, out_bytes);
    convert(hooks->memory, hooks->stream, from, device_in, to, device, device_slots, device_scale);
    for (int kv = 0; kv < 2; kv++) {
        hooks->get(found, device[kv], out_bytes);
        if (memcmp(found, host[kv], out_bytes) != 0 && !bad++)
            fprintf(stderr, "numbers: dtype %d to %d, scale %a, differ\n", (int)from, (int)to,
                    kv ? 1.0 : (double)scale);
        hooks->drop(device[kv]);
        free(host[kv]);
    }
    hooks->drop(device_in);
    hooks->drop(device_slots);
    hooks->drop(device_scale);
    free(in);
    free(found);
    free(poison);
    return bad;
}

static uint64_t run_numbers(struct kvx_place_hooks *hooks)
{
    static const float scales[] = {1.0F,  0.0123F,  3.0F,  0x1.fffffep0F,
                                   96.0F, 0x1p-70F, -2.0F, 0.0F};
    struct dice d = {12345};
    uint64_t n = 0, bad = 0;

    for (int from = 1; from <= 5; from++) {
        for (int to = 1; to <= 5; to++) {
            for (unsigned s = 0; s < 8; s++, n++)
                bad += compare(&d, hooks, (kvx_dtype_t)from, (kvx_dtype_t)to, scales[s]);
        }
    }
    printf("numbers: %llu conversions of %d values, %llu failed\n", (unsigned long long)n, VALUES,
           (unsigned long long)bad);
    return bad;
}

static uint64_t run_layers(const struct kvx_place_hooks *hooks)
{
    static const uint32_t counts[] = {1, 2, 5, 32, 33, 70};
    uint64_t bad = 0;

    for (unsigned i = 0; i < 6; i++) {
        for (unsigned kind = 0; kind < 4; kind++)
            bad += !layers_agree(hooks, counts[i], kind);
        for (unsigned kind = 0; kind < 8; kind++)
            bad += !copies_agree(hooks, counts[i], kind);
    }
    printf("layers: 72 calls of up to 70 layers, %llu failed\n", (unsigned long long)bad);
    return bad;
}

int main(int argc, char **argv)
{
    uint32_t scale = (uint32_t)case_setting("KV_TEST_SCALE", 100);
    struct kvx_place_hooks hooks;
    uint64_t bad = 0;

    gpu_need();
    hooks = gpu_hooks(KVX_MEMORY_DEVICE, 0);
    if (argc > 1 && strcmp(argv[1], "numbers") == 0)
        return run_numbers(&hooks) != 0;
    bad += run("device", hooks, scale);
    bad += run_layers(&hooks);
    bad += scale >= 10 ? run_numbers(&hooks) : 0;
    hooks = gpu_hooks(KVX_MEMORY_UNIFIED, 0);
    bad += run("unified (managed)", hooks, scale / 20 + 1);
    hooks = gpu_hooks(KVX_MEMORY_UNIFIED, 1);
    bad += run("unified (pinned host)", hooks, scale / 20 + 1);
    return bad != 0;
}
