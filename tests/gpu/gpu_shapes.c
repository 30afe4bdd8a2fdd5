// SPDX-License-Identifier: Apache-2.0
/*
 * The shapes of real models on the GPU, byte for byte the host's results: thousands of tokens in
 * every layout, the cache in the engine's dtype and in FP8 with scales of all four granularities,
 * data that starts beside an aligned address, and tables whose first blocks are gone, as engines
 * with sliding windows have them. An argument chooses models by a part of their names. "kernels"
 * runs each kernel of libkvx_cuda once, and little else: for compute-sanitizer.
 */
#include "gpu.h"

struct model {
    const char *name;
    uint32_t heads, dim, block, tokens;
};

/* KV heads and dims as the models' configurations give them; a rank of several has its share. */
static const struct model models[] = {
    {"Llama-3-8B", 8, 128, 16, 8192},
    {"Llama-3-70B, one rank of 8", 1, 128, 16, 8192},
    {"Qwen3-30B-A3B", 4, 128, 16, 8192},
    {"Qwen3-32B, blocks of 128", 8, 128, 128, 4096},
    {"DeepSeek-V3, latent and rope", 1, 576, 64, 8192},
    {"gpt-oss-20b", 8, 64, 16, 8192},
    {"Gemma-3-27B", 16, 128, 32, 2048},
    {"Phi-3-mini", 32, 96, 16, 2048},
};

enum { SEQUENCES = 8, N_LAYOUTS = 3, PACK = 8, MAX_LAYERS = 2, MAX_PARTS = 2 * MAX_LAYERS };

static const kvx_layout_t layouts[N_LAYOUTS] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                                KVX_LAYOUT_BLOCK_HND_PACKED};

/* One side of a comparison: the host's memory or the GPU's. */
struct place {
    kvx_memory_type_t memory;
    char *cache[MAX_PARTS], *in[MAX_PARTS], *out[MAX_PARTS]; /* K and V of each layer */
    char *target[2];                                         /* a cache to copy blocks to */
    void *slots, *table, *lengths, *scales;
};

struct setting {
    const struct model *model;
    kvx_layout_t layout;
    kvx_dtype_t dtype, io_dtype, target_dtype; /* target_dtype 0: no blocks are copied */
    kvx_scale_granularity_t granularity;
    uint32_t misaligned; /* elements between an aligned address and the data */
    uint32_t layers;
};

static uint32_t n_blocks(const struct model *m)
{
    return m->tokens / m->block + SEQUENCES; /* some stay empty */
}

static size_t io_bytes(const struct setting *s)
{
    return ((size_t)s->model->tokens * s->model->heads * s->model->dim + s->misaligned) *
           kvx_dtype_size(s->io_dtype);
}

static size_t cache_bytes(const struct setting *s, kvx_dtype_t dtype)
{
    size_t row = (size_t)s->model->heads * s->model->dim;

    return (n_blocks(s->model) * s->model->block * row + s->misaligned) * kvx_dtype_size(dtype);
}

static size_t scale_count(const struct setting *s)
{
    return (size_t)n_blocks(s->model) * s->model->heads;
}

/* --------------------------------------------------------------------------------------------- */
/* Descriptors */

static kvx_tensor_desc_t io_tensor(const struct setting *s, const struct place *p, char *data)
{
    const struct model *m = s->model;
    kvx_tensor_desc_t t = new_tensor(s->io_dtype, KVX_LAYOUT_BLOCK_CUSTOM);

    t.memory = p->memory;
    t.ndim = 3;
    t.shape[0] = m->tokens;
    t.shape[1] = m->heads;
    t.shape[2] = m->dim;
    t.stride[0] = (int64_t)m->heads * m->dim;
    t.stride[1] = m->dim;
    t.stride[2] = 1;
    t.data = data + (size_t)s->misaligned * kvx_dtype_size(s->io_dtype);
    return t;
}

static kvx_kv_io_desc_t io_of(const struct setting *s, const struct place *p, char *const *data)
{
    return (kvx_kv_io_desc_t){.size = sizeof(kvx_kv_io_desc_t),
                              .key = io_tensor(s, p, data[0]),
                              .value = io_tensor(s, p, data[1]),
                              .num_tokens = s->model->tokens,
                              .num_kv_heads = s->model->heads,
                              .head_dim = s->model->dim};
}

static kvx_cache_desc_t cache_of(const struct setting *s, const struct place *p, kvx_dtype_t dtype,
                                 char *const *data)
{
    kvx_cache_desc_t c = {.size = sizeof(c),
                          .num_blocks = n_blocks(s->model),
                          .block_size = s->model->block,
                          .num_kv_heads = s->model->heads,
                          .head_dim = s->model->dim};

    for (int kv = 0; kv < 2; kv++) {
        kvx_tensor_desc_t *t = kv ? &c.v : &c.k;

        t->size = sizeof(*t);
        MUST(kvx_tensor_canonical(&c, s->layout, PACK, t) == KVX_STATUS_OK);
        t->dtype = dtype;
        t->memory = p->memory;
        t->data = data[kv] + (size_t)s->misaligned * kvx_dtype_size(dtype);
    }
    return c;
}

static kvx_scale_desc_t scale_of(const struct setting *s, const struct place *p)
{
    kvx_scale_desc_t d = {.size = sizeof(d),
                          .dtype = KVX_DTYPE_F32,
                          .granularity = s->granularity,
                          .data = p->scales};
    int64_t blocks = n_blocks(s->model), heads = s->model->heads;

    switch (s->granularity) {
    case KVX_SCALE_PER_BLOCK:
    case KVX_SCALE_PER_HEAD:
        d.ndim = 1;
        d.shape[0] = s->granularity == KVX_SCALE_PER_BLOCK ? blocks : heads;
        d.stride[0] = 1;
        break;
    case KVX_SCALE_PER_BLOCK_HEAD:
        d.ndim = 2;
        d.shape[0] = blocks;
        d.shape[1] = heads;
        d.stride[0] = heads;
        d.stride[1] = 1;
        break;
    default:
        break;
    }
    return d;
}

static kvx_write_desc_t write_of(const struct setting *s, const struct place *p, uint32_t layer)
{
    kvx_write_desc_t w = {.size = sizeof(w), .io = io_of(s, p, p->in + (size_t)layer * 2)};

    w.slots = (kvx_slot_mapping_t){.size = sizeof(w.slots),
                                   .dtype = KVX_DTYPE_S64,
                                   .token_count = s->model->tokens,
                                   .invalid_slot = -1,
                                   .slots = p->slots};
    if (s->granularity)
        w.k_scale_desc = w.v_scale_desc = scale_of(s, p);
    return w;
}

static kvx_gather_desc_t gather_of(const struct setting *s, const struct place *p, uint32_t layer)
{
    const struct model *m = s->model;
    kvx_gather_desc_t g = {.size = sizeof(g), .io = io_of(s, p, p->out + (size_t)layer * 2)};

    g.block_table = (kvx_block_table_t){.size = sizeof(g.block_table),
                                        .format = KVX_BLOCK_TABLE_PACKED,
                                        .index_dtype = KVX_DTYPE_S32,
                                        .seq_count = SEQUENCES,
                                        .beam_width = 1,
                                        .max_blocks_per_seq = m->tokens / m->block / SEQUENCES,
                                        .indices = p->table,
                                        .indices_count = m->tokens / m->block};
    g.seq_lens = (kvx_seq_lens_t){.size = sizeof(g.seq_lens),
                                  .dtype = KVX_DTYPE_S32,
                                  .seq_count = SEQUENCES,
                                  .lengths = p->lengths};
    g.max_seq_len = m->tokens / SEQUENCES;
    return g;
}

/* Copy the first layer's blocks, backwards, to the target cache. */
static kvx_status_t copy(const struct setting *s, const struct place *p,
                         const kvx_cache_desc_t *from, void *stream)
{
    kvx_cache_desc_t to = cache_of(s, p, s->target_dtype, p->target);
    kvx_block_copy_t pairs = {.size = sizeof(pairs),
                              .index_dtype = KVX_DTYPE_S32,
                              .count = s->model->tokens / s->model->block,
                              .src_blocks = p->table,
                              .dst_blocks = p->table};

    return kvx_copy_blocks(from, &to, &pairs, NULL, stream);
}

/* Write all tokens, gather them, copy blocks. Returns the first status that isn't OK. */
static kvx_status_t run(const struct setting *s, const struct place *p, void *stream)
{
    kvx_scale_desc_t scale = scale_of(s, p);
    const kvx_scale_desc_t *scales[] = {&scale, &scale};
    kvx_options_t options = {.size = sizeof(options), .flags = KVX_OPTION_ZERO_PADDING};
    kvx_cache_desc_t cache[MAX_LAYERS];
    kvx_write_desc_t write[MAX_LAYERS];
    kvx_gather_desc_t gather[MAX_LAYERS];
    const kvx_cache_desc_t *caches[MAX_LAYERS];
    const kvx_write_desc_t *writes[MAX_LAYERS];
    const kvx_gather_desc_t *gathers[MAX_LAYERS];
    kvx_status_t status;

    for (uint32_t l = 0; l < s->layers; l++) {
        cache[l] = cache_of(s, p, s->dtype, p->cache + (size_t)l * 2);
        write[l] = write_of(s, p, l);
        gather[l] = gather_of(s, p, l);
        caches[l] = &cache[l];
        writes[l] = &write[l];
        gathers[l] = &gather[l];
    }
    if (s->granularity)
        options.k_scales = options.v_scales = scales;
    status = kvx_write_kv_layers(caches, writes, s->layers, &options, stream);
    if (status == KVX_STATUS_OK)
        status = kvx_gather_kv_layers(caches, gathers, s->layers, &options, stream);
    if (status == KVX_STATUS_OK && s->target_dtype)
        status = copy(s, p, &cache[0], stream);
    return status;
}

/* --------------------------------------------------------------------------------------------- */
/* Memory */

/* Finite values, mostly within FP8's range, a few beyond it; FP8 has any bits. */
static void fill_tokens(struct dice *d, kvx_dtype_t dtype, char *to, size_t n)
{
    unsigned bytes = kvx_dtype_size(dtype);

    for (size_t i = 0; i + bytes <= n; i += bytes) {
        uint64_t r = roll(d);
        uint32_t value = (uint32_t)((r & 0x807f) | (112 + (r >> 20) % 26) << 7); /* bf16 */

        if (dtype == KVX_DTYPE_F16)
            value = (uint32_t)((r & 0x83ff) | (1 + (r >> 20) % 26) << 10);
        else if (dtype == KVX_DTYPE_F32)
            value = value << 16 | (uint32_t)(r >> 40 & 0xffff);
        memcpy(to + i, &value, bytes);
    }
}

static void shuffle(struct dice *d, int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = below(d, i);
        int32_t swap = ids[i - 1];

        ids[i - 1] = ids[j];
        ids[j] = swap;
    }
}

/*
 * Give each sequence its share of random blocks. Every tenth token isn't written, and the tables of
 * odd sequences begin with blocks that are gone.
 */
static void make_indices(struct dice *d, const struct model *m, struct place *host)
{
    uint32_t n = n_blocks(m), each = m->tokens / m->block / SEQUENCES;
    int32_t *ids = malloc(n * sizeof(*ids));
    int64_t *slots = malloc(m->tokens * sizeof(*slots));
    int32_t *lengths = malloc(SEQUENCES * sizeof(*lengths));

    MUST(ids && slots && lengths);
    shuffle(d, ids, n);
    for (uint32_t t = 0; t < m->tokens; t++)
        slots[t] = chance(d, 10) ? -1 : (int64_t)ids[t / m->block] * m->block + t % m->block;
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        lengths[i] = (int32_t)(m->tokens / SEQUENCES - below(d, m->block * 2));
        for (uint32_t b = 0; i % 2 && b < each / 3; b++)
            ids[i * each + b] = -1;
    }
    host->slots = slots;
    host->table = ids;
    host->lengths = lengths;
}

static void make_scales(struct dice *d, const struct setting *s, struct place *host)
{
    float *scales = malloc(scale_count(s) * sizeof(*scales));

    MUST(scales);
    for (size_t i = 0; i < scale_count(s); i++)
        scales[i] = ldexpf(1.0F + (float)below(d, 1000) / 1000.0F, (int)below(d, 12) - 9);
    host->scales = scales;
}

static char *make_filled(size_t bytes, int with)
{
    char *made = malloc(bytes);

    MUST(made);
    return memset(made, with, bytes);
}

static struct place make_host(struct dice *d, const struct setting *s)
{
    struct place p = {.memory = KVX_MEMORY_HOST};

    for (uint32_t i = 0; i < 2 * s->layers; i++) {
        p.cache[i] = make_filled(cache_bytes(s, s->dtype), 0x3a);
        p.in[i] = make_filled(io_bytes(s), 0);
        p.out[i] = make_filled(io_bytes(s), 0xa5);
        fill_tokens(d, s->io_dtype, p.in[i], io_bytes(s));
    }
    for (uint32_t i = 0; i < 2 && s->target_dtype; i++)
        p.target[i] = make_filled(cache_bytes(s, s->target_dtype), 0x3b);
    make_indices(d, s->model, &p);
    make_scales(d, s, &p);
    return p;
}

static struct place put_all(const struct kvx_place_hooks *hooks, const struct setting *s,
                            const struct place *host)
{
    const struct model *m = s->model;
    struct place p = {.memory = hooks->memory};

    for (uint32_t i = 0; i < 2 * s->layers; i++) {
        p.cache[i] = hooks->put(host->cache[i], cache_bytes(s, s->dtype));
        p.in[i] = hooks->put(host->in[i], io_bytes(s));
        p.out[i] = hooks->put(host->out[i], io_bytes(s));
    }
    for (uint32_t i = 0; i < 2 && s->target_dtype; i++)
        p.target[i] = hooks->put(host->target[i], cache_bytes(s, s->target_dtype));
    p.slots = hooks->put(host->slots, m->tokens * sizeof(int64_t));
    p.table = hooks->put(host->table, m->tokens / m->block * sizeof(int32_t));
    p.lengths = hooks->put(host->lengths, SEQUENCES * sizeof(int32_t));
    p.scales = hooks->put(host->scales, scale_count(s) * sizeof(float));
    return p;
}

static bool same(const struct kvx_place_hooks *hooks, const char *host, const char *placed,
                 size_t bytes)
{
    char *found = malloc(bytes);
    bool equal;

    MUST(found);
    hooks->get(found, placed, bytes);
    equal = memcmp(found, host, bytes) == 0;
    free(found);
    return equal;
}

static void drop_all(const struct kvx_place_hooks *hooks, const struct setting *s,
                     struct place *host, struct place *p)
{
    for (uint32_t i = 0; i < 2 * s->layers; i++) {
        hooks->drop(p->cache[i]);
        hooks->drop(p->in[i]);
        hooks->drop(p->out[i]);
        free(host->cache[i]);
        free(host->in[i]);
        free(host->out[i]);
    }
    for (uint32_t i = 0; i < 2 && s->target_dtype; i++) {
        hooks->drop(p->target[i]);
        free(host->target[i]);
    }
    hooks->drop(p->slots);
    hooks->drop(p->table);
    hooks->drop(p->lengths);
    hooks->drop(p->scales);
    free(host->slots);
    free(host->table);
    free(host->lengths);
    free(host->scales);
}

/* --------------------------------------------------------------------------------------------- */

static bool agree(const struct kvx_place_hooks *hooks, struct dice *d, const struct setting *s)
{
    struct place host = make_host(d, s), device = put_all(hooks, s, &host);
    kvx_status_t here = run(s, &host, NULL), there = run(s, &device, hooks->stream);
    bool equal = here == KVX_STATUS_OK && there == KVX_STATUS_OK;

    for (uint32_t i = 0; i < 2 * s->layers && equal; i++)
        equal = same(hooks, host.cache[i], device.cache[i], cache_bytes(s, s->dtype)) &&
                same(hooks, host.out[i], device.out[i], io_bytes(s));
    for (uint32_t i = 0; i < 2 && s->target_dtype && equal; i++)
        equal = same(hooks, host.target[i], device.target[i], cache_bytes(s, s->target_dtype));
    if (!equal)
        fprintf(stderr, "%s: layout %d, dtypes %d %d %d, scales %d, %u misaligned: %s, %s\n",
                s->model->name, (int)s->layout, (int)s->io_dtype, (int)s->dtype,
                (int)s->target_dtype, (int)s->granularity, s->misaligned, kvx_status_name(here),
                kvx_status_name(there));
    drop_all(hooks, s, &host, &device);
    return equal;
}

static void run_model(const struct kvx_place_hooks *hooks, struct dice *d, const struct model *m,
                      unsigned *n, unsigned *bad)
{
    for (int layout = 0; layout < N_LAYOUTS; layout++) {
        struct setting s = {.model = m,
                            .layout = layouts[layout],
                            .dtype = KVX_DTYPE_BF16,
                            .io_dtype = KVX_DTYPE_BF16,
                            .layers = 1};

        for (s.misaligned = 0; s.misaligned < 2; s.misaligned++, (*n)++)
            *bad += !agree(hooks, d, &s);
        s.misaligned = 0;
        s.dtype = KVX_DTYPE_F8_E4M3;
        for (int g = KVX_SCALE_PER_TENSOR; g <= KVX_SCALE_PER_BLOCK_HEAD; g++, (*n)++) {
            s.granularity = (kvx_scale_granularity_t)g;
            *bad += !agree(hooks, d, &s);
        }
        s.dtype = KVX_DTYPE_F8_E5M2;
        s.misaligned = 3;
        *bad += !agree(hooks, d, &s);
        (*n)++;
    }
}

/*
 * Run every kernel: each pair of element sizes by itself (one layer: the kernel for small jobs; two:
 * the one for large jobs; beside an aligned address: the one that moves pieces).
 */
static unsigned run_kernels(const struct kvx_place_hooks *hooks, struct dice *d)
{
    static const kvx_dtype_t pairs[][2] = {
        {KVX_DTYPE_BF16, KVX_DTYPE_BF16},      {KVX_DTYPE_F32, KVX_DTYPE_BF16},
        {KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3},    {KVX_DTYPE_BF16, KVX_DTYPE_F32},
        {KVX_DTYPE_BF16, KVX_DTYPE_F16},       {KVX_DTYPE_BF16, KVX_DTYPE_F8_E4M3},
        {KVX_DTYPE_F8_E5M2, KVX_DTYPE_F32},    {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F16},
        {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2}};
    static const struct model small = {"kernels", 2, 128, 16, 512},
                              large = {"kernels", 8, 128, 16, 4096}; /* 4 MiB of bf16 a copy */
    unsigned n = 0, bad = 0;

    for (unsigned i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        for (unsigned shape = 0; shape < 3; shape++, n++) {
            struct setting s = {.model = &small,
                                .layout = layouts[i % 2],
                                .io_dtype = pairs[i][0],
                                .dtype = pairs[i][1],
                                .target_dtype = pairs[i][0],
                                .layers = shape == 1 ? 2 : 1,
                                .misaligned = shape == 2};

            bad += !agree(hooks, d, &s);
        }
    }
    bad += !agree(hooks, d,
                  &(struct setting){.model = &large,
                                    .layout = KVX_LAYOUT_BLOCK_NHD,
                                    .io_dtype = KVX_DTYPE_BF16,
                                    .dtype = KVX_DTYPE_BF16,
                                    .target_dtype = KVX_DTYPE_BF16,
                                    .layers = 1});
    printf("kernels: %u settings, %u differ\n", n + 1, bad);
    return bad;
}

int main(int argc, char **argv)
{
    struct dice d = {case_setting("KV_TEST_SEED", 4711) | 1};
    struct kvx_place_hooks hooks;
    unsigned total = 0;

    gpu_need();
    hooks = gpu_hooks(KVX_MEMORY_DEVICE, 0);
    if (argc < 2 || strcmp(argv[1], "kernels") == 0)
        total += run_kernels(&hooks, &d);
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        struct model m = models[i];
        unsigned n = 0, bad = 0;

        if (argc > 1 && !strstr(m.name, argv[1]))
            continue;
        if (case_setting("KV_TEST_SCALE", 100) < 20) /* a sanitizer or an emulated GPU */
            m.tokens = m.block * SEQUENCES * 2;
        run_model(&hooks, &d, &m, &n, &bad);
        printf("%s (%u heads of %u, %u tokens): %u settings, %u differ\n", m.name, m.heads, m.dim,
               m.tokens, n, bad);
        total += bad;
    }
    MUST(cudaGetLastError() == cudaSuccess);
    return total != 0;
}
