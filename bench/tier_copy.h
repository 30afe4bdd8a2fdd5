// SPDX-License-Identifier: Apache-2.0
/*
 * Copies in memory: the copier with blocks of 2 MiB, beside as many threads that memcpy the same
 * pieces in the same run, in turns. "G1" is a layout like a GPU's cache, on the host.
 *
 *   copy       G1 (a block in one piece) to G2 and back; also a storage per layer: 64 KiB pieces
 *   convert    the same with heads first on one side
 *   overhead   cost of a block in a job that copies nothing (layouts without memory)
 */
#ifndef KV_BENCH_TIER_COPY_H
#define KV_BENCH_TIER_COPY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_transfer.h"
#include "support.h"

enum { COPY_ROUNDS = 15, COPY_BLOCKS = 192, COPY_MANY = 4096, COPY_THREADS_MAX = 64 };
#define COPY_BLOCK ((size_t)2 << 20)

static inline void copy_must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "tier_copy_bench: %s\n", what);
    exit(1);
}

static inline struct kvbm_layout *copy_layout(enum kvbm_layout_kind kind,
                                              enum kvbm_block_order order,
                                              enum kvbm_storage_kind memory, uint32_t n,
                                              uint32_t heads)
{
    struct kvbm_storage_opts opts = {
        .size = sizeof(opts), .kind = memory, .huge_pages = true, .touch_threads = 2};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_config c = {.size = sizeof(c),
                                   .kind = kind,
                                   .num_blocks = n,
                                   .num_layers = 32,
                                   .outer_dim = 2,
                                   .page_size = 16,
                                   .num_heads = heads,
                                   .inner_dim = 128 * heads,
                                   .dtype = KVX_DTYPE_BF16,
                                   .alignment = 4096,
                                   .order = order};
    struct kvbm_layout *layout;

    copy_must(kvbm_layout_allocate(&c, &allocator, &layout) == 0, "no layout");
    return layout;
}

/* ---- the yardstick: threads that wait, then share pieces ---- */

static struct {
    pthread_barrier_t begin, end;
    char *from, *to;
    const uint32_t *ids;
    _Atomic uint32_t next;
    bool stop;
} copy_crew;

static inline void *copy_worker(void *arg)
{
    (void)arg;
    for (;;) {
        pthread_barrier_wait(&copy_crew.begin);
        if (copy_crew.stop)
            return NULL;
        for (uint32_t i; (i = atomic_fetch_add(&copy_crew.next, 1)) < COPY_BLOCKS;)
            memcpy(copy_crew.to + copy_crew.ids[i] * COPY_BLOCK,
                   copy_crew.from + copy_crew.ids[i] * COPY_BLOCK, COPY_BLOCK);
        pthread_barrier_wait(&copy_crew.end);
    }
}

static inline double copy_by_memcpy(char *from, char *to, const uint32_t *ids)
{
    uint64_t begin;

    copy_crew.from = from;
    copy_crew.to = to;
    copy_crew.ids = ids;
    atomic_store(&copy_crew.next, 0);
    begin = kv_now_ns();
    pthread_barrier_wait(&copy_crew.begin);
    pthread_barrier_wait(&copy_crew.end);
    return (double)(kv_now_ns() - begin);
}

static inline double copy_by_engine(struct kvbm_copier *copier, const struct kvbm_layout *src,
                                    const struct kvbm_layout *dst, const uint32_t *ids, uint32_t n)
{
    struct kvbm_transfer t = {
        .size = sizeof(t), .src = src, .dst = dst, .src_blocks = ids, .dst_blocks = ids, .n = n};
    uint64_t begin = kv_now_ns();
    int64_t id = kvbm_copier_submit(copier, &t);
    struct kvbm_done done;

    copy_must(id > 0, "not submitted");
    copy_must(kvbm_copier_wait(copier, (uint64_t)id, 60000, &done) == 0 && !done.status, "failed");
    return (double)(kv_now_ns() - begin);
}

static inline void copy_figure(struct kvbm_copier *copier, uint32_t n_threads, const char *figure,
                               const char *what, enum kvbm_layout_kind kind,
                               enum kvbm_block_order order, const uint32_t *ids)
{
    struct kvbm_layout *g1 = copy_layout(kind, order, KVBM_STORAGE_SYSTEM, COPY_BLOCKS, 8);
    struct kvbm_layout *g2 =
        copy_layout(KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD, KVBM_STORAGE_SYSTEM, COPY_BLOCKS, 8);
    struct kvbm_layout *yard =
        copy_layout(KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD, KVBM_STORAGE_SYSTEM, COPY_BLOCKS, 8);
    char *to = kvbm_storage_host_memory(kvbm_layout_storage(g2, 0));
    char *from = kvbm_storage_host_memory(kvbm_layout_storage(yard, 0));
    double out[COPY_ROUNDS], back[COPY_ROUNDS], plain[COPY_ROUNDS];
    double bytes = (double)COPY_BLOCKS * (double)COPY_BLOCK, of, there, home;

    for (int i = 0; i < COPY_ROUNDS; i++) {
        out[i] = copy_by_engine(copier, g1, g2, ids, COPY_BLOCKS);
        plain[i] = copy_by_memcpy(from, to, ids);
        back[i] = copy_by_engine(copier, g2, g1, ids, COPY_BLOCKS);
    }
    of = bench_median(plain, COPY_ROUNDS);
    there = bench_median(out, COPY_ROUNDS);
    home = bench_median(back, COPY_ROUNDS);
    bench_line("tier.copy",
               "'figure':'%s','what':'%s','threads':%u,'gb_per_s':%.2f,'back_gb_per_s':%.2f,'"
               "memcpy_gb_per_s':%.2f,'of_memcpy':%.3f,'back_of_memcpy':%.3f",
               figure, what, n_threads, bytes / there, bytes / home, bytes / of, of / there,
               of / home);
    kvbm_layout_destroy(g1);
    kvbm_layout_destroy(g2);
    kvbm_layout_destroy(yard);
}

/* Run jobs of @n blocks, each waited for. Measures all threads' CPU time. */
static inline void copy_overhead(const uint32_t *ids, uint32_t n)
{
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = 1};
    struct kvbm_layout *a =
        copy_layout(KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD, KVBM_STORAGE_NULL, COPY_MANY, 8);
    struct kvbm_layout *b =
        copy_layout(KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD, KVBM_STORAGE_NULL, COPY_MANY, 8);
    uint32_t jobs = 20000 / n + 1;
    double each[COPY_ROUNDS];
    struct kvbm_copier *copier;

    copy_must(kvbm_copier_create(&opts, &copier) == 0, "no copier");
    for (int i = 0; i < COPY_ROUNDS; i++) {
        uint64_t begin = kv_clock_ns_(CLOCK_PROCESS_CPUTIME_ID);

        for (uint32_t k = 0; k < jobs; k++)
            copy_by_engine(copier, a, b, ids, n);
        each[i] = (double)(kv_clock_ns_(CLOCK_PROCESS_CPUTIME_ID) - begin) / jobs / n;
    }
    bench_line("tier.copy", "'figure':'overhead','blocks_per_job':%u,'ns_per_block':%.1f", n,
               bench_median(each, COPY_ROUNDS));
    kvbm_copier_destroy(copier);
    kvbm_layout_destroy(a);
    kvbm_layout_destroy(b);
}

static inline void tier_copy_bench(void)
{
    uint32_t n_threads = (uint32_t)KV_MIN(KV_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L), 8L);
    struct kvbm_copier_opts opts = {.size = sizeof(opts), .n_threads = n_threads};
    struct kvbm_copier *copier;
    pthread_t threads[COPY_THREADS_MAX];
    uint32_t ids[COPY_BLOCKS], many[COPY_MANY];

    for (uint32_t i = 0; i < COPY_BLOCKS; i++)
        ids[i] = i * 77 % COPY_BLOCKS; /* scattered */
    for (uint32_t i = 0; i < COPY_MANY; i++)
        many[i] = i;
    pthread_barrier_init(&copy_crew.begin, NULL, n_threads + 1);
    pthread_barrier_init(&copy_crew.end, NULL, n_threads + 1);
    for (uint32_t i = 0; i < n_threads; i++)
        copy_must(pthread_create(&threads[i], NULL, copy_worker, NULL) == 0, "no thread");
    copy_must(kvbm_copier_create(&opts, &copier) == 0, "no copier");
    copy_figure(copier, n_threads, "copy", "block to block", KVBM_FULLY_CONTIGUOUS, KVBM_ORDER_NHD,
                ids);
    copy_figure(copier, n_threads, "copy", "storage per layer to block",
                KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, KVBM_ORDER_NHD, ids);
    copy_figure(copier, n_threads, "convert", "heads first, block to block", KVBM_FULLY_CONTIGUOUS,
                KVBM_ORDER_HND, ids);
    copy_figure(copier, n_threads, "convert", "heads first, storage per layer to block",
                KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, KVBM_ORDER_HND, ids);
    copy_overhead(many, 1);
    copy_overhead(many, 64);
    copy_overhead(many, 4096);
    kvbm_copier_destroy(copier);
    copy_crew.stop = true;
    pthread_barrier_wait(&copy_crew.begin);
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
}

#endif
