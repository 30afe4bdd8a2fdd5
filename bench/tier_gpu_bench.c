// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of 2 MiB (16 tokens, 32 layers, K and V of 64 KiB a layer) between a GPU and pinned
 * memory, by the copier. Beside it, in the same run and in turns: cuMemcpyAsync of as many bytes in
 * one call. One JSON line per figure; all bytes are compared after the way there and back. Needs
 * only a driver, no CUDA toolkit: exit 77 without.
 *
 *   block          a block in one piece on either side, scattered blocks
 *   both           out and in at the same time; beside two streams with a copy each
 *   layers         a storage per layer on the GPU, as engines have: scattered pieces of 64 KiB, one
 *                  block in pinned memory; by each way of copying (kvbm_gpu_copy)
 *   outers         the same with K and V apart: pieces of 32 KiB
 *   heads          the same with heads first in pinned memory: converted on the way
 *   one_block      time of a job of one block
 *   urgent         the same while a large job goes the other way, and while one goes the same way
 *   pieces         scattered pieces of 4 KiB to 2 MiB of the GPU, one piece of pinned memory per
 *                  block; by the kernel (its own build of this program: gpu_tier_bench_kernel, for
 *                  which no piece is too large) and by the copy engines
 *
 * KVBM_GPU_MIB: MiB to move (1024). Arguments choose figures: "tiers", "pieces"; none: all.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "bm/storage/cuda.h"
#include "kvbm_transfer.h"
#include "support.h"
#include "tier/transfer/cuda.h"

enum { ROUNDS = 9, LATENCIES = 200 };
#define BLOCK ((size_t)2 << 20)  /* of all figures but pieces */
#define TOTAL (n_blocks * block) /* bytes moved */

static uint32_t n_blocks, inner;
static size_t block;
static uint32_t *in_order, *scattered, *elsewhere;
static void *streams[2], *events[2];
static int wrong;

static void must(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "tier_gpu_bench: %s: %s\n", what, strerror(-rc));
    exit(1);
}

static void cu(tier_cuda_result code, const char *what)
{
    if (code == 0)
        return;
    fprintf(stderr, "tier_gpu_bench: %s: CUDA error %d\n", what, code);
    exit(1);
}

static double quantile(double *values, size_t n, double q)
{
    qsort(values, n, sizeof(*values), bench_by_value);
    return values[KV_MIN((size_t)(q * (double)n), n - 1)];
}

/* ---- memory ---- */

static struct kvbm_layout *layout_of(enum kvbm_storage_kind memory, enum kvbm_layout_kind kind,
                                     enum kvbm_block_order order)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = memory, .huge_pages = true};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = kind,
                                   .num_blocks = n_blocks,
                                   .num_layers = 32,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .num_heads = 8,
                                   .inner_dim = inner,
                                   .dtype = KVX_DTYPE_BF16,
                                   .alignment = 4096,
                                   .order = order};
    struct kvbm_layout *layout = NULL;

    must(kvbm_layout_allocate(&c, &allocator, &layout), "memory");
    return layout;
}

static char *bytes_of(const struct kvbm_layout *layout)
{
    return kvbm_storage_host_memory(kvbm_layout_storage(layout, 0));
}

static uint64_t address_of(const struct kvbm_layout *layout)
{
    struct kvbm_view view;

    must(kvbm_layout_region(layout, 0, 0, 0, &view), "no address");
    return view.addr;
}

static void fill(struct kvbm_layout *layout)
{
    uint64_t *words = (uint64_t *)(void *)bytes_of(layout), x = 88172645463325252u;
    size_t n = (size_t)kvbm_storage_bytes(kvbm_layout_storage(layout, 0)) / 8;

    for (size_t i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        words[i] = x;
    }
}

/* ---- the two ways ---- */

static struct kvbm_copier *engine_of(enum kvbm_gpu_copy how)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 1, .gpu_copy = how};
    struct kvbm_copier *copier = NULL;

    must(kvbm_copier_create(&opts, &copier), "no copier");
    return copier;
}

static uint64_t submit(struct kvbm_copier *copier, const struct kvbm_layout *src,
                       const struct kvbm_layout *dst, uint32_t n, const uint32_t *from,
                       const uint32_t *to)
{
    struct kvbm_transfer t = {
        .size = sizeof(t), .src = src, .dst = dst, .src_blocks = from, .dst_blocks = to, .n = n};
    int64_t id = kvbm_copier_submit(copier, &t);

    must((int)KV_MIN(id, 0), "not submitted");
    return (uint64_t)id;
}

static void finish(struct kvbm_copier *copier, uint64_t id)
{
    struct kvbm_done done;

    must(kvbm_copier_wait(copier, id, 60000, &done), "doesn't end");
    must(done.status, "failed");
}

static double by_engine(struct kvbm_copier *copier, const struct kvbm_layout *src,
                        const struct kvbm_layout *dst, const uint32_t *from, const uint32_t *to)
{
    uint64_t begin = kv_now_ns();

    finish(copier, submit(copier, src, dst, n_blocks, from, to));
    return (double)(kv_now_ns() - begin);
}

/* Time copies of @each bytes by the driver; a second pair runs at the same time. The device is
 * current. */
static double by_driver(const uint64_t *from, const uint64_t *to, int n, size_t each)
{
    uint64_t begin = kv_now_ns();

    for (int i = 0; i < n; i++) {
        for (size_t at = 0; at < TOTAL; at += each)
            cu(tier_cuda_calls.copy(to[i] + at, from[i] + at, each, streams[i]), "copy");
        cu(tier_cuda_calls.event_record(events[i], streams[i]), "event");
    }
    for (int i = 0; i < n; i++)
        cu(tier_cuda_calls.event_sync(events[i]), "wait");
    return (double)(kv_now_ns() - begin);
}

/* ---- figures ---- */

static const char *const names[] = {"auto", "engines", "single"};

/* Compare bytes in the first and the last round only: comparing takes longer than the transfer. */
static bool compared(int round)
{
    return round == 0 || round == ROUNDS - 1;
}

static void compare(const struct kvbm_layout *host, const struct kvbm_layout *back,
                    const char *figure)
{
    if (memcmp(bytes_of(host), bytes_of(back), TOTAL) == 0)
        return;
    fprintf(stderr, "tier_gpu_bench: %s: other bytes came back\n", figure);
    wrong = 1;
}

static void report(const char *figure, const char *direction, const char *by, double bytes,
                   double *ns, double *copy_ns, double *copies_ns)
{
    double t = quantile(ns, ROUNDS, 0.5), copy = quantile(copy_ns, ROUNDS, 0.5);

    bench_begin("tier_gpu",
                "'figure':'%s','direction':'%s','by':'%s','region':%zu,'bytes':%.0f,"
                "'gb_per_s':%.2f,'copy_gb_per_s':%.2f,'of_copy':%.3f",
                figure, direction, by, block / 64, bytes, bytes / t, bytes / copy, copy / t);
    if (copies_ns)
        bench_more("'of_copies_of_2mib':%.3f", quantile(copies_ns, ROUNDS, 0.5) / t);
    bench_more("'median_of':%d,'correct':%s", ROUNDS, wrong ? "false" : "true");
    bench_end();
}

/* Copy from @host to the GPU, at other places, and back to @back. */
static void there_and_back(const char *figure, struct kvbm_copier *copier, const char *by,
                           enum kvbm_layout_kind kind, const struct kvbm_layout *whole,
                           const struct kvbm_layout *host, const struct kvbm_layout *back,
                           enum kvbm_block_order order)
{
    struct kvbm_layout *cache = layout_of(KVBM_STORAGE_DEVICE, kind, order);
    uint64_t gpu = address_of(whole), cpu = address_of(back);
    double in[ROUNDS], out[ROUNDS], copy_in[ROUNDS], copy_out[ROUNDS], many_in[ROUNDS],
        many_out[ROUNDS], bytes = (double)TOTAL;

    by_engine(copier, host, cache, in_order, scattered); /* warm up: opens lanes, loads kernels */
    for (int i = 0; i < ROUNDS; i++) {
        copy_in[i] = by_driver(&cpu, &gpu, 1, TOTAL);
        many_in[i] = by_driver(&cpu, &gpu, 1, BLOCK);
        in[i] = by_engine(copier, host, cache, in_order, scattered);
        copy_out[i] = by_driver(&gpu, &cpu, 1, TOTAL);
        many_out[i] = by_driver(&gpu, &cpu, 1, BLOCK);
        if (compared(i))
            memset(bytes_of(back), 0, TOTAL);
        out[i] = by_engine(copier, cache, back, scattered, in_order);
        if (compared(i))
            compare(host, back, figure);
    }
    report(figure, "in", by, bytes, in, copy_in, many_in);
    report(figure, "out", by, bytes, out, copy_out, many_out);
    kvbm_layout_destroy(cache);
}

static void both(struct kvbm_copier *copier, const struct kvbm_layout *whole,
                 const struct kvbm_layout *host, const struct kvbm_layout *back)
{
    struct kvbm_layout *other =
        layout_of(KVBM_STORAGE_DEVICE, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
    uint64_t from[2] = {address_of(whole), address_of(host)},
             to[2] = {address_of(back), address_of(other)};
    double ns[ROUNDS], copy_ns[ROUNDS], many_ns[ROUNDS];

    by_engine(copier, host, whole, in_order, scattered);
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t begin, out, in;

        copy_ns[i] = by_driver(from, to, 2, TOTAL);
        many_ns[i] = by_driver(from, to, 2, BLOCK);
        if (compared(i))
            memset(bytes_of(back), 0, TOTAL);
        begin = kv_now_ns();
        out = submit(copier, whole, back, n_blocks, scattered, in_order);
        in = submit(copier, host, other, n_blocks, in_order, elsewhere);
        finish(copier, out);
        finish(copier, in);
        ns[i] = (double)(kv_now_ns() - begin);
        if (compared(i))
            compare(host, back, "both");
    }
    memset(bytes_of(back), 0, TOTAL);
    by_engine(copier, other, back, elsewhere, in_order);
    compare(host, back, "both, in");
    report("both", "out and in", "auto", 2.0 * (double)TOTAL, ns, copy_ns, many_ns);
    kvbm_layout_destroy(other);
}

/* ---- waiting ---- */

static void latency(const char *figure, struct kvbm_copier *copier, const char *by,
                    const struct kvbm_layout *src, const struct kvbm_layout *dst,
                    const struct kvbm_layout *busy_src, const struct kvbm_layout *busy_dst)
{
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = src,
                              .dst = dst,
                              .src_blocks = in_order,
                              .dst_blocks = in_order,
                              .n = 1,
                              .flow = KVBM_ONBOARD};
    double us[LATENCIES];
    uint64_t busy = 0;

    for (int i = 0; i < LATENCIES; i++) {
        struct kvbm_done done;
        uint64_t begin;
        int64_t id;

        if (busy_src && (!busy || kvbm_copier_wait(copier, busy, 0, &done) != -ETIMEDOUT))
            busy = submit(copier, busy_src, busy_dst, n_blocks, scattered, in_order);
        begin = kv_now_ns();
        id = kvbm_copier_submit(copier, &t);
        must((int)KV_MIN(id, 0), "not submitted");
        finish(copier, (uint64_t)id);
        us[i] = (double)(kv_now_ns() - begin) / 1e3;
    }
    if (busy)
        finish(copier, busy);
    bench_line("tier_gpu", "'figure':'%s','by':'%s','us':%.1f,'p99_us':%.1f", figure, by,
               quantile(us, LATENCIES, 0.5), quantile(us, LATENCIES, 0.99));
}

static void run(const struct kvbm_layout *whole, struct kvbm_layout *host,
                const struct kvbm_layout *back)
{
    struct kvbm_layout *layers =
        layout_of(KVBM_STORAGE_DEVICE, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, KVBM_ORDER_NHD);

    for (int how = KVBM_GPU_AUTO; how <= (int)KVBM_GPU_SINGLE; how++) {
        struct kvbm_copier *copier = engine_of((enum kvbm_gpu_copy)how);

        if (how == KVBM_GPU_AUTO) {
            there_and_back("block", copier, names[how], KVBM_FULLY_CONTIGUOUS, whole, host, back,
                           KVBM_ORDER_NHD);
            both(copier, whole, host, back);
            there_and_back("heads", copier, names[how], KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, whole,
                           host, back, KVBM_ORDER_HND);
            latency("one_block", copier, "whole", host, whole, NULL, NULL);
            latency("urgent", copier, "other way busy", host, whole, whole, back);
            latency("urgent", copier, "same way busy", host, layers, host, whole);
        }
        there_and_back("layers", copier, names[how], KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, whole,
                       host, back, KVBM_ORDER_NHD);
        there_and_back("outers", copier, names[how], KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, whole,
                       host, back, KVBM_ORDER_NHD);
        latency("one_block", copier, names[how], host, layers, NULL, NULL);
        kvbm_copier_destroy(copier);
    }
    kvbm_layout_destroy(layers);
}

static void shuffle(uint32_t *ids, uint64_t seed);

/* Choose the number and size of blocks, of 64 regions each: a layer's K or V. */
static void set_blocks(size_t total, size_t region)
{
    block = region * 64;
    inner = (uint32_t)(region / 32); /* 16 tokens of 2 bytes */
    n_blocks = (uint32_t)(total / block);
    for (uint32_t i = 0; i < n_blocks; i++)
        in_order[i] = i;
    shuffle(scattered, 1);
    shuffle(elsewhere, 2);
}

static void run_tiers(size_t total)
{
    struct kvbm_layout *whole, *host, *back;

    set_blocks(total, BLOCK / 64);
    whole = layout_of(KVBM_STORAGE_DEVICE, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
    host = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
    back = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
    fill(host);
    run(whole, host, back);
    kvbm_layout_destroy(whole);
    kvbm_layout_destroy(host);
    kvbm_layout_destroy(back);
}

static void run_pieces(size_t total)
{
    static const size_t regions[] = {4096,      16 << 10,  32 << 10, 64 << 10,
                                     128 << 10, 256 << 10, 1 << 20,  2 << 20};

    for (size_t i = 0; i < KV_COUNT(regions); i++) {
        struct kvbm_layout *whole, *host, *back;

        set_blocks(KV_MAX(total, regions[i] * 128), regions[i]);
        whole = layout_of(KVBM_STORAGE_DEVICE, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
        host = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
        back = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD);
        fill(host);
        for (int how = KVBM_GPU_AUTO; how <= (int)KVBM_GPU_ENGINES; how++) {
            struct kvbm_copier *copier = engine_of((enum kvbm_gpu_copy)how);

            there_and_back("pieces", copier, names[how], KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                           whole, host, back, KVBM_ORDER_NHD);
            kvbm_copier_destroy(copier);
        }
        kvbm_layout_destroy(whole);
        kvbm_layout_destroy(host);
        kvbm_layout_destroy(back);
    }
}

static void shuffle(uint32_t *ids, uint64_t seed)
{
    for (uint32_t i = 0; i < n_blocks; i++)
        ids[i] = i;
    for (uint32_t i = n_blocks; i > 1; i--) {
        uint32_t swap = ids[i - 1], at;

        seed = seed * 6364136223846793005u + 1442695040888963407u;
        at = (uint32_t)((seed >> 33) % i);
        ids[i - 1] = ids[at];
        ids[at] = swap;
    }
}

int main(int argc, char **argv)
{
    const char *mib = getenv("KVBM_GPU_MIB");
    size_t total = (size_t)(mib ? strtoul(mib, NULL, 10) : 1024) << 20, most;

    bench_usage(argc, argv, "[tiers|pieces]...");
    if (total > (size_t)1 << 40) {
        fprintf(stderr, "KVBM_GPU_MIB: more than a TiB\n");
        return 2;
    }
    if (total < BLOCK || !tier_cuda_usable() || kvbm_cuda_enter(0) < 0) {
        printf("skipped: no CUDA device\n");
        return 77;
    }
    bench_line("tier_gpu", "'figure':'driver','batches':'%s'",
               tier_cuda_calls.batch      ? "13.0"
               : tier_cuda_calls.batch_12 ? "12.8"
                                          : "none");
    most = total / ((size_t)4096 * 64) + 1;
    in_order = calloc(most, sizeof(*in_order));
    scattered = calloc(most, sizeof(*scattered));
    elsewhere = calloc(most, sizeof(*elsewhere));
    if (!in_order || !scattered || !elsewhere)
        must(-ENOMEM, "numbers");
    for (int i = 0; i < 2; i++) {
        cu(tier_cuda_calls.stream_create(&streams[i], 1), "stream");
        cu(tier_cuda_calls.event_create(&events[i], 3), "event");
    }
    if (bench_chosen(argc, argv, "tiers"))
        run_tiers(total);
    if (bench_chosen(argc, argv, "pieces"))
        run_pieces(total / 4);
    for (int i = 0; i < 2; i++) {
        cu(tier_cuda_calls.event_destroy(events[i]), "event");
        cu(tier_cuda_calls.stream_destroy(streams[i]), "stream");
    }
    kvbm_cuda_leave();
    return wrong;
}
