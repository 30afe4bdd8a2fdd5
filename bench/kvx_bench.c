// SPDX-License-Identifier: Apache-2.0
/*
 * Host writes and gathers next to memcpy of the same bytes, measured in turn in the same run.
 *
 * Buffers are larger than the caches (KVX_BENCH_MB, 128 MiB for each of K and V on each side),
 * block tables are random permutations. Bytes count read + written, GB are 1e9. Each figure is the
 * median of KVX_BENCH_ROUNDS (9) rounds; "ratio" is the median of the rounds' own ratios to the
 * memcpy beside them.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kvx_abi.h"
#include "kvx_ext.h"
#include "support.h"

enum { MAX_ROUNDS = 99, HEADS = 8, DIM = 128, BLOCK = 16, MAX_THREADS = 64 };

static uint64_t room; /* bytes of each buffer */
static uint32_t rounds;
static char *paged[2], *rows[2]; /* K, V */

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

/* One thread is timed by its CPU clock, which excludes other work on the machine; several threads
 * by the wall clock. */
static clockid_t timer = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec t;

    clock_gettime(timer, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t random_state = 88172645463325252U;

static uint32_t below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) * n >> 32);
}

static void *buffer(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0x3c, bytes); /* touches all pages; finite in every dtype */
    return p;
}

/* --------------------------------------------------------------------------------------------- */
/* The yardstick */

struct slice {
    char *to;
    const char *from;
    size_t n;
};

static void *copy_slice(void *arg)
{
    struct slice *s = arg;

    memcpy(s->to, s->from, s->n);
    return NULL;
}

/* Time memcpy of @bytes (read + written), half of it for K and half for V. */
static double yardstick(uint64_t bytes, uint32_t n_threads)
{
    struct slice slices[2][MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    double start = now();

    for (int kv = 0; kv < 2; kv++) {
        size_t n = bytes / 4, part = n / n_threads;

        for (uint32_t i = 0; i < n_threads; i++)
            slices[kv][i] = (struct slice){paged[kv] + i * part, rows[kv] + i * part, part};
        for (uint32_t i = 1; i < n_threads; i++)
            pthread_create(&threads[i], NULL, copy_slice, &slices[kv][i]);
        copy_slice(&slices[kv][0]);
        for (uint32_t i = 1; i < n_threads; i++)
            pthread_join(threads[i], NULL);
    }
    return now() - start;
}

/* --------------------------------------------------------------------------------------------- */
/* The figures */

struct figure {
    const char *name;
    bool gather;
    kvx_layout_t layout;
    uint32_t pack;
    kvx_dtype_t cache, io;
    bool scattered; /* write: each token to a random slot, instead of whole blocks in a row */
    uint32_t heads;
    double target;
};

struct setup {
    const struct figure *figure;
    kvx_cache_desc_t desc;
    kvx_write_desc_t write;
    kvx_gather_desc_t gather;
    int64_t *slots;
    int32_t *table, *lengths;
    uint64_t bytes; /* read + written */
};

static kvx_tensor_desc_t io_tensor(const struct figure *f, char *data, uint32_t tokens)
{
    return (kvx_tensor_desc_t){.size = sizeof(kvx_tensor_desc_t),
                               .dtype = f->io,
                               .memory = KVX_MEMORY_HOST,
                               .ndim = 3,
                               .shape = {tokens, f->heads, DIM},
                               .stride = {(int64_t)f->heads * DIM, DIM, 1},
                               .data = data};
}

static uint32_t *permutation(uint32_t n)
{
    uint32_t *p = malloc(n * sizeof(*p));

    for (uint32_t i = 0; i < n; i++)
        p[i] = i;
    for (uint32_t i = n; i-- > 1;) {
        uint32_t j = below(i + 1), swap = p[i];

        p[i] = p[j];
        p[j] = swap;
    }
    return p;
}

static void set_cache(struct setup *s, uint32_t blocks)
{
    const struct figure *f = s->figure;
    kvx_tensor_desc_t *tensors[] = {&s->desc.k, &s->desc.v};

    s->desc.size = sizeof(s->desc);
    s->desc.num_blocks = blocks;
    s->desc.block_size = BLOCK;
    s->desc.num_kv_heads = f->heads;
    s->desc.head_dim = DIM;
    for (int kv = 0; kv < 2; kv++) {
        kvx_tensor_canonical(&s->desc, f->layout, f->pack, tensors[kv]);
        tensors[kv]->dtype = f->cache;
        tensors[kv]->memory = KVX_MEMORY_HOST;
        tensors[kv]->data = paged[kv];
    }
}

static void set_up(struct setup *s, const struct figure *f)
{
    uint32_t widest = kvx_dtype_size(f->io) > kvx_dtype_size(f->cache) ? kvx_dtype_size(f->io)
                                                                       : kvx_dtype_size(f->cache);
    uint32_t blocks = (uint32_t)(room / ((uint64_t)widest * f->heads * DIM * BLOCK));
    uint32_t tokens = blocks * BLOCK, *order = permutation(f->scattered ? tokens : blocks);

    memset(s, 0, sizeof(*s));
    s->figure = f;
    set_cache(s, blocks);
    s->slots = malloc(tokens * sizeof(*s->slots));
    s->table = malloc(blocks * sizeof(*s->table));
    s->lengths = malloc(sizeof(*s->lengths));
    s->lengths[0] = (int32_t)tokens;
    for (uint32_t i = 0; i < tokens; i++)
        s->slots[i] = f->scattered ? order[i] : (int64_t)order[i / BLOCK] * BLOCK + i % BLOCK;
    for (uint32_t i = 0; i < blocks; i++)
        s->table[i] = (int32_t)order[i];
    free(order);
    s->write = (kvx_write_desc_t){
        .size = sizeof(s->write),
        .io = {.size = sizeof(s->write.io),
               .key = io_tensor(f, rows[0], tokens),
               .value = io_tensor(f, rows[1], tokens),
               .num_tokens = tokens,
               .num_kv_heads = f->heads,
               .head_dim = DIM},
        .slots = {sizeof(kvx_slot_mapping_t), KVX_DTYPE_S64, tokens, -1, s->slots}};
    s->gather =
        (kvx_gather_desc_t){.size = sizeof(s->gather),
                            .io = s->write.io,
                            .block_table = {.size = sizeof(kvx_block_table_t),
                                            .format = KVX_BLOCK_TABLE_PACKED,
                                            .index_dtype = KVX_DTYPE_S32,
                                            .seq_count = 1,
                                            .beam_width = 1,
                                            .max_blocks_per_seq = blocks,
                                            .indices = s->table,
                                            .indices_count = blocks},
                            .seq_lens = {sizeof(kvx_seq_lens_t), KVX_DTYPE_S32, 1, s->lengths},
                            .max_seq_len = tokens};
    s->bytes =
        (uint64_t)tokens * f->heads * DIM * 2 * (kvx_dtype_size(f->io) + kvx_dtype_size(f->cache));
}

static void tear_down(struct setup *s)
{
    free(s->slots);
    free(s->table);
    free(s->lengths);
}

static double once(const struct setup *s)
{
    double start = now();
    kvx_status_t status = s->figure->gather ? kvx_gather_kv(&s->desc, &s->gather, NULL)
                                            : kvx_write_kv(&s->desc, &s->write, NULL);

    if (status != KVX_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", s->figure->name, kvx_status_name(status));
        exit(1);
    }
    return now() - start;
}

static void measure(const struct figure *f, uint32_t n_threads)
{
    double mine[MAX_ROUNDS], copies[MAX_ROUNDS], ratios[MAX_ROUNDS];
    struct setup s;

    timer = n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    set_up(&s, f);
    kvx_set_threads(n_threads, 0);
    (void)once(&s);
    (void)yardstick(s.bytes, n_threads);
    for (uint32_t i = 0; i < rounds; i++) {
        copies[i] = yardstick(s.bytes, n_threads);
        mine[i] = once(&s);
        ratios[i] = copies[i] / mine[i];
    }
    bench_line("kvx",
               "'figure':'%s','threads':%u,'isa':'%s','row_bytes':%u,'gb_per_s':%.2f,'memcpy_gb_"
               "per_s':%.2f,'ratio':%.3f,'target':%.2f,'mib_per_buffer':%llu,'rounds':%u",
               f->name, n_threads, kvx_host_isa(), DIM * kvx_dtype_size(f->cache),
               (double)s.bytes / bench_median(mine, rounds) * 1e-9,
               (double)s.bytes / bench_median(copies, rounds) * 1e-9, bench_median(ratios, rounds),
               f->target, (unsigned long long)(room >> 20), rounds);
    tear_down(&s);
}

/* Measure a decode step, 64 tokens to random slots: mostly the cost of a call. */
static void measure_decode(void)
{
    static const struct figure f = {"decode write NHD bf16, 64 tokens",
                                    false,
                                    KVX_LAYOUT_BLOCK_NHD,
                                    0,
                                    KVX_DTYPE_BF16,
                                    KVX_DTYPE_BF16,
                                    true,
                                    HEADS,
                                    0};
    double times[MAX_ROUNDS];
    struct setup s;
    const uint32_t calls = 1000;

    timer = CLOCK_THREAD_CPUTIME_ID;
    set_up(&s, &f);
    kvx_set_threads(1, 0);
    s.write.io.num_tokens = s.write.slots.token_count = 64;
    s.write.io.key.shape[0] = s.write.io.value.shape[0] = 64;
    for (uint32_t i = 0; i < rounds; i++) {
        double start = now();

        for (uint32_t k = 0; k < calls; k++) {
            s.write.slots.slots = s.slots + (uint64_t)k * 64 % (s.desc.num_blocks * BLOCK - 64);
            (void)kvx_write_kv(&s.desc, &s.write, NULL);
        }
        times[i] = (now() - start) / calls;
    }
    bench_line("kvx", "'figure':'%s','threads':1,'us_per_call':%.2f,'bytes':%u", f.name,
               bench_median(times, rounds) * 1e6, 64 * HEADS * DIM * 2 * 2 * 2);
    tear_down(&s);
}

static const struct figure figures[] = {
    {"write NHD bf16", false, KVX_LAYOUT_BLOCK_NHD, 0, 2, 2, false, HEADS, 0.85},
    {"write NHD bf16, scattered tokens", false, KVX_LAYOUT_BLOCK_NHD, 0, 2, 2, true, HEADS, 0.85},
    {"write NHD bf16, 1 head, scattered tokens", false, KVX_LAYOUT_BLOCK_NHD, 0, 2, 2, true, 1,
     0.85},
    {"write HND bf16", false, KVX_LAYOUT_BLOCK_HND, 0, 2, 2, false, HEADS, 0.85},
    {"gather NHD bf16", true, KVX_LAYOUT_BLOCK_NHD, 0, 2, 2, false, HEADS, 0.85},
    {"gather HND bf16", true, KVX_LAYOUT_BLOCK_HND, 0, 2, 2, false, HEADS, 0.85},
    {"write HND_PACKED 8 bf16", false, KVX_LAYOUT_BLOCK_HND_PACKED, 8, 2, 2, false, HEADS, 0.5},
    {"gather HND_PACKED 8 bf16", true, KVX_LAYOUT_BLOCK_HND_PACKED, 8, 2, 2, false, HEADS, 0.5},
    {"write NHD f16 to e4m3", false, KVX_LAYOUT_BLOCK_NHD, 0, 4, 1, false, HEADS, 0.4},
    {"gather NHD e4m3 to f16", true, KVX_LAYOUT_BLOCK_NHD, 0, 4, 1, false, HEADS, 0.4},
    {"write HND f16 to e4m3", false, KVX_LAYOUT_BLOCK_HND, 0, 4, 1, false, HEADS, 0.4},
    {"gather HND e4m3 to f16", true, KVX_LAYOUT_BLOCK_HND, 0, 4, 1, false, HEADS, 0.4},
    {"write HND_PACKED 16 f16 to e4m3", false, KVX_LAYOUT_BLOCK_HND_PACKED, 16, 4, 1, false, HEADS,
     0},
    {"write HND_PACKED 1 bf16", false, KVX_LAYOUT_BLOCK_HND_PACKED, 1, 2, 2, false, HEADS, 0},
};

int main(int argc, char **argv)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n_threads = cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (uint32_t)cores;
    const char *only = getenv("KVX_BENCH_ONLY");

    bench_usage(argc, argv, NULL);
    room = setting("KVX_BENCH_MB", 128) << 20;
    rounds = (uint32_t)setting("KVX_BENCH_ROUNDS", 9);
    rounds = rounds < 1 ? 1 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
    for (int kv = 0; kv < 2; kv++) {
        paged[kv] = buffer(room);
        rows[kv] = buffer(room);
    }
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        if (only && !strstr(figures[i].name, only))
            continue;
        measure(&figures[i], 1);
        if (n_threads > 1)
            measure(&figures[i], n_threads);
    }
    measure_decode();
    return 0;
}
