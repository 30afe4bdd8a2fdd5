// SPDX-License-Identifier: Apache-2.0
/*
 * The block manager at the size of a large cache. One JSON line per figure.
 *
 *     kvbm_bench [FIGURE [BLOCKS]]      all of them; 1000000
 *
 * The pool holds prompts of 1008 blocks, registered and released 16 blocks at a time, alternating
 * between prompts. Keys are random. "shuffled": the free blocks (and the yardstick's heap) were
 * shuffled first, as in a pool that has run for years. Neighbours in a prompt or a list are then
 * not neighbours in memory. "in order": a new pool. Figures without either word are shuffled.
 *
 *   cycle     allocate 16, complete, register, release, match again, release: with free blocks
 *             left, and full (each allocation evicts)
 *   threads   the same by two threads on one pool, relative to one; wall clock, in turns
 *   match     1000 blocks of a prompt not used lately; and again at once
 *   evict     allocate 16 from a full pool, between other calls; one after another ("drain")
 *   memory    by the pool's statistics, and by the process's growth
 *   hash      tokens to block and sequence hashes
 *   latency   one cache miss in as much memory as a pool's bookkeeping: every figure waits for it
 *
 * Per block, and except for threads in the thread's own time, as other programs may be running.
 * Each figure is the median of windows; the yardstick (kvbm_naive.h) does the same in the same run.
 */
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kvbm_naive.h"
#include "kvbm_pool.h"
#include "kvbm_tokens.h"
#include "support.h"

#define BATCH 16
#define CHUNKS 63 /* batches a prompt */
#define PROMPT (BATCH * CHUNKS)
#define MATCH 1000
#define WINDOWS 41
#define OPEN 64 /* prompts that grow at a time, once the pool is filled */

static const char *const policies[] = {"lru", "lfu", "lineage"};
static bool shuffled = true; /* as described above */

static const char *memory_name(void)
{
    return shuffled ? "shuffled" : "in order";
}

static void must(bool ok, const char *what)
{
    if (!ok)
        bench_die(what, 0);
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static size_t resident(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    must(file && fscanf(file, "%*u %lu", &pages) == 1, "no /proc/self/statm");
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* Nanoseconds of reading the clock; subtracted from each timed window. */
static double clock_cost(void)
{
    double each[WINDOWS];

    for (size_t w = 0; w < WINDOWS; w++) {
        uint64_t begin = bench_thread_cpu_ns(), end = begin;

        for (size_t i = 0; i < 1000; i++)
            end = bench_thread_cpu_ns();
        each[w] = (double)(end - begin) / 1000;
    }
    return bench_median(each, WINDOWS);
}

/* ---- data: chunks of prompts ---- */

struct chunk {
    uint64_t keys[BATCH], parent;
    uint32_t position;
};

/* Prompts that grow in random turns. */
struct source {
    uint64_t random, next_prompt, last_prompt;
    struct {
        uint64_t prompt;
        uint32_t chunks;
    } * open;
    size_t n_open;
};

static uint64_t key_of(uint64_t prompt, uint32_t position)
{
    return mix(prompt << 16 | position);
}

static void source_init(struct source *s, uint64_t first, uint64_t last, size_t n_open)
{
    *s = (struct source){.random = first, .next_prompt = first, .last_prompt = last};
    s->open = calloc(n_open, sizeof(*s->open));
    must(s->open, "no memory");
    for (; s->n_open < n_open && s->next_prompt < last; s->n_open++)
        s->open[s->n_open].prompt = s->next_prompt++;
}

static bool source_next(struct source *s, struct chunk *ret)
{
    size_t i;

    if (!s->n_open)
        return false;
    i = mix(++s->random * UINT64_C(0x9e3779b97f4a7c15)) % s->n_open;
    ret->position = s->open[i].chunks * BATCH;
    ret->parent = ret->position ? key_of(s->open[i].prompt, ret->position - 1) : 0;
    for (uint32_t k = 0; k < BATCH; k++)
        ret->keys[k] = key_of(s->open[i].prompt, ret->position + k);
    if (++s->open[i].chunks < CHUNKS)
        return true;
    if (s->next_prompt < s->last_prompt) {
        s->open[i].prompt = s->next_prompt++;
        s->open[i].chunks = 0;
    } else {
        s->open[i] = s->open[--s->n_open];
    }
    return true;
}

/* ---- calls on either pool ---- */

struct bench {
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct naive *naive; /* used instead, if not NULL */
    uint32_t n_blocks;
    uint64_t n_prompts; /* number of prompts that filled it */
};

/* Handles of one batch, in either pool. */
struct held {
    struct kvbm_mutable mutable[BATCH];
    struct kvbm_complete complete[BATCH];
    struct kvbm_immutable immutable[BATCH];
    uint32_t blocks[BATCH];
    struct naive_node *nodes[BATCH];
};

static void allocate(struct bench *b, struct held *h)
{
    if (b->naive)
        naive_allocate(b->naive, BATCH, h->blocks);
    else
        must(!kvbm_pool_allocate(b->pool, BATCH, h->mutable, NULL), "allocate");
}

static void fill_and_register(struct bench *b, struct held *h, const struct chunk *c)
{
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .keys = c->keys,
                               .parent = c->position ? &c->parent : NULL,
                               .position = c->position};

    if (b->naive) {
        naive_register(b->naive, c->keys, BATCH, h->blocks, h->nodes);
        return;
    }
    must(!kvbm_pool_complete(b->pool, h->mutable, BATCH, &chain, h->complete), "complete");
    must(!kvbm_pool_register(b->pool, h->complete, BATCH, h->immutable), "register");
}

static void release(struct bench *b, struct held *h)
{
    if (b->naive)
        naive_release(b->naive, h->nodes, BATCH);
    else
        must(!kvbm_pool_release(b->pool, h->immutable, BATCH), "release");
}

static void match_again(struct bench *b, struct held *h, const struct chunk *c)
{
    long n = b->naive ? (long)naive_match(b->naive, c->keys, BATCH, h->nodes)
                      : kvbm_pool_match(b->pool, 0, c->keys, BATCH, 0, h->immutable);

    must(n == BATCH, "match");
}

static void cycle(struct bench *b, const struct chunk *c)
{
    struct held h;

    allocate(b, &h);
    fill_and_register(b, &h, c);
    release(b, &h);
    match_again(b, &h, c);
    release(b, &h);
}

/* Put the free blocks, and the naive pool's free memory, into random order. */
static void shuffle(struct bench *b)
{
    uint32_t *order = calloc(b->n_blocks, sizeof(*order));
    struct kvbm_mutable *all = calloc(b->n_blocks, sizeof(*all));
    struct naive_node **nodes = calloc(b->n_blocks, sizeof(*nodes));

    must(order && all && nodes, "no memory");
    for (uint32_t i = 0, j; i < b->n_blocks; i++) {
        j = (uint32_t)(mix(i) % (i + 1));
        order[i] = order[j];
        order[j] = i;
        nodes[i] = b->naive ? malloc(sizeof(**nodes)) : NULL;
    }
    if (!b->naive)
        must(!kvbm_pool_allocate(b->pool, b->n_blocks, all, NULL), "allocate");
    for (uint32_t i = 0; i < b->n_blocks; i++) {
        if (!b->naive)
            must(!kvbm_mutable_release(&all[order[i]]), "release");
        free(nodes[order[i]]);
    }
    free(order);
    free(all);
    free(nodes);
}

static void open_pool(struct bench *b, uint32_t n_blocks, enum kvbm_eviction policy, bool naive)
{
    struct kvbm_pool_opts opts = {
        .size = sizeof(opts), .n_blocks = n_blocks, .block_size = 16, .eviction = policy};

    *b = (struct bench){.n_blocks = n_blocks};
    if (naive) {
        b->naive = malloc(sizeof(*b->naive));
        must(b->naive, "no memory");
        naive_init(b->naive, n_blocks, policy != KVBM_EVICT_LRU);
    } else {
        must(!kvbm_registry_create(NULL, &b->registry), "registry");
        must(!kvbm_pool_create(b->registry, &opts, &b->pool), "pool");
    }
    if (shuffled)
        shuffle(b);
}

static void close_pool(struct bench *b)
{
    if (b->naive) {
        naive_fini(b->naive);
        free(b->naive);
        return;
    }
    must(!kvbm_registry_check(b->registry), "the registry is broken");
    must(!kvbm_pool_destroy(b->pool) && !kvbm_registry_destroy(b->registry), "destroy");
}

/* Fill until no block is free. */
static void fill(struct bench *b)
{
    struct source source;
    struct chunk c;
    struct held h;

    b->n_prompts = b->n_blocks / PROMPT;
    source_init(&source, 0, b->n_prompts, b->n_prompts);
    for (uint32_t n = 0; n + BATCH <= b->n_blocks; n += BATCH) {
        if (!source_next(&source, &c)) { /* the rest is a part of another prompt */
            free(source.open);
            source_init(&source, b->n_prompts, b->n_prompts + 1, 1);
            must(source_next(&source, &c), "no more prompts");
        }
        allocate(b, &h);
        fill_and_register(b, &h, &c);
        release(b, &h);
    }
    free(source.open);
    b->n_prompts++;
}

/* Prepare prompts that follow those of fill. */
static void source_more(struct source *s, const struct bench *b, uint64_t stream)
{
    uint64_t first = (stream + 1) << 32 | b->n_prompts;

    source_init(s, first, first + (UINT64_C(1) << 31), OPEN);
}

/* ---- cycle ---- */

/* Return nanoseconds per block. The chunks are made beforehand. */
static double cycle_window(struct bench *b, struct source *source, struct chunk *chunks, size_t n)
{
    uint64_t begin;

    for (size_t i = 0; i < n; i++)
        must(source_next(source, &chunks[i]), "no more prompts");
    begin = bench_thread_cpu_ns();
    for (size_t i = 0; i < n; i++)
        cycle(b, &chunks[i]);
    return (double)(bench_thread_cpu_ns() - begin) / (double)(n * BATCH);
}

static double cycle_run(uint32_t n_blocks, bool full, bool naive)
{
    size_t n = n_blocks / BATCH / (WINDOWS + 1);
    struct chunk *chunks = calloc(n, sizeof(*chunks));
    double each[WINDOWS];
    struct source source;
    struct bench b;

    must(n && chunks, "too few blocks");
    open_pool(&b, n_blocks, KVBM_EVICT_LRU, naive);
    if (full)
        fill(&b);
    source_more(&source, &b, 0);
    for (size_t w = 0; w < WINDOWS; w++)
        each[w] = cycle_window(&b, &source, chunks, n);
    close_pool(&b);
    free(source.open);
    free(chunks);
    return bench_median(each, WINDOWS);
}

static void bench_cycle(uint32_t n_blocks)
{
    for (int full = 0; full < 2; full++) {
        double ours = cycle_run(n_blocks, full, false), naive = cycle_run(n_blocks, full, true);

        bench_line(
            "kvbm",
            "'figure':'kvbm_cycle','pool':'%s','memory':'%s','blocks':%u,'batch':%d,'eviction':'"
            "lru','clock':'thread','windows':%d,'ns_per_block':%.1f,'blocks_per_s':%.0f,'target_"
            "blocks_per_s':5000000,'naive_ns_per_block':%.1f,'of_naive':%.2f",
            full ? "full" : "has free blocks", memory_name(), n_blocks, BATCH, WINDOWS, ours,
            1e9 / ours, naive, ours / naive);
    }
}

/* ---- threads ---- */

#define PER_ROUND 4000 /* batches of a thread */

struct worker {
    struct bench *bench;
    struct source source;
    struct chunk *chunks;
    pthread_barrier_t *start;
    uint64_t begin, end, cpu;
};

static void *work(void *arg)
{
    struct worker *w = arg;

    for (size_t i = 0; i < PER_ROUND; i++)
        must(source_next(&w->source, &w->chunks[i]), "no more prompts");
    pthread_barrier_wait(w->start);
    w->begin = kv_now_ns();
    w->cpu = bench_thread_cpu_ns();
    for (size_t i = 0; i < PER_ROUND; i++)
        cycle(w->bench, &w->chunks[i]);
    w->cpu = bench_thread_cpu_ns() - w->cpu;
    w->end = kv_now_ns();
    return NULL;
}

/* Return blocks per second of all threads together; *cpu: nanoseconds of their own time per
 * block. */
static double threads_round(struct worker *workers, unsigned n, double *cpu)
{
    pthread_t threads[2];
    pthread_barrier_t start;
    uint64_t begin = UINT64_MAX, end = 0, spent = 0;

    pthread_barrier_init(&start, NULL, n);
    for (unsigned i = 0; i < n; i++) {
        workers[i].start = &start;
        must(!pthread_create(&threads[i], NULL, work, &workers[i]), "pthread_create");
    }
    for (unsigned i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        begin = KV_MIN(begin, workers[i].begin);
        end = KV_MAX(end, workers[i].end);
        spent += workers[i].cpu;
    }
    pthread_barrier_destroy(&start);
    *cpu = (double)spent / ((double)n * PER_ROUND * BATCH);
    return (double)n * PER_ROUND * BATCH * 1e9 / (double)(end - begin);
}

static void bench_threads(uint32_t n_blocks)
{
    for (int naive = 0; naive < 2; naive++) {
        double one[WINDOWS], two[WINDOWS], ratio[WINDOWS], cpu_one[WINDOWS], cpu_two[WINDOWS];
        struct worker workers[2] = {0};
        struct bench b;

        open_pool(&b, n_blocks, KVBM_EVICT_LRU, naive);
        fill(&b);
        for (unsigned i = 0; i < 2; i++) {
            workers[i].bench = &b;
            workers[i].chunks = calloc(PER_ROUND, sizeof(*workers[i].chunks));
            must(workers[i].chunks, "no memory");
            source_more(&workers[i].source, &b, i);
        }
        for (size_t w = 0; w < WINDOWS; w++) {
            one[w] = threads_round(workers, 1, &cpu_one[w]);
            two[w] = threads_round(workers, 2, &cpu_two[w]);
            ratio[w] = two[w] / one[w];
        }
        bench_line("kvbm",
                   "'figure':'kvbm_threads','of':'%s','blocks':%u,'batch':%d,'clock':'wall','"
                   "windows':%d,'one_blocks_per_s':%.0f,'two_blocks_per_s':%.0f,'two_of_one':%.2f,'"
                   "target':0.9,'cpu_ns_per_block':[%.1f,%.1f]",
                   naive ? "naive" : "kvbm", n_blocks, BATCH, WINDOWS, bench_median(one, WINDOWS),
                   bench_median(two, WINDOWS), bench_median(ratio, WINDOWS),
                   bench_median(cpu_one, WINDOWS), bench_median(cpu_two, WINDOWS));
        for (unsigned i = 0; i < 2; i++) {
            free(workers[i].chunks);
            free(workers[i].source.open);
        }
        close_pool(&b);
    }
}

/* ---- match ---- */

struct match_times {
    double cold, warm, release;
};

static struct match_times match_run(uint32_t n_blocks, bool naive)
{
    static struct kvbm_immutable handles[MATCH];
    static struct naive_node *nodes[MATCH];
    static uint64_t keys[MATCH];
    struct bench b;
    size_t n;

    open_pool(&b, n_blocks, KVBM_EVICT_LRU, naive);
    fill(&b);
    n = n_blocks / PROMPT;
    must(n, "too few blocks");

    double *cold = calloc(n, sizeof(*cold)), *warm = calloc(n, sizeof(*warm));
    double *back = calloc(n, sizeof(*back));

    must(cold && warm && back, "no memory");
    for (size_t i = 0; i < n; i++) { /* odd steps: each prompt once */
        uint64_t prompt = i * 7919 % n, t[5];
        long found[2];

        for (uint32_t k = 0; k < MATCH; k++)
            keys[k] = key_of(prompt, k);
        for (int again = 0; again < 2; again++) {
            t[2 * again] = bench_thread_cpu_ns();
            found[again] = naive ? (long)naive_match(b.naive, keys, MATCH, nodes)
                                 : kvbm_pool_match(b.pool, 0, keys, MATCH, 0, handles);
            t[2 * again + 1] = bench_thread_cpu_ns();
            if (naive)
                naive_release(b.naive, nodes, MATCH);
            else
                must(!kvbm_pool_release(b.pool, handles, MATCH), "release");
            t[4] = again ? t[4] : bench_thread_cpu_ns();
        }
        must(found[0] == MATCH && found[1] == MATCH, "match");
        cold[i] = (double)(t[1] - t[0]) / MATCH;
        warm[i] = (double)(t[3] - t[2]) / MATCH;
        back[i] = (double)(t[4] - t[1]) / MATCH;
    }
    close_pool(&b);

    struct match_times ret = {bench_median(cold, n), bench_median(warm, n), bench_median(back, n)};

    free(cold);
    free(warm);
    free(back);
    return ret;
}

static void bench_match(uint32_t n_blocks)
{
    struct match_times ours = match_run(n_blocks, false), naive = match_run(n_blocks, true);

    bench_line(
        "kvbm",
        "'figure':'kvbm_match','memory':'%s','blocks':%u,'prefix':%d,'state':'inactive','clock':'"
        "thread','prompts':%u,'ns_per_block':%.1f,'target_ns':60,'again_ns':%.1f,'release_ns':%.1f,"
        "'naive_ns':%.1f,'naive_again_ns':%.1f,'naive_release_ns':%.1f,'of_naive':%.2f",
        memory_name(), n_blocks, MATCH, n_blocks / PROMPT, ours.cold, ours.warm, ours.release,
        naive.cold, naive.warm, naive.release, ours.cold / naive.cold);
}

/* ---- evict ---- */

struct evict_times {
    double among_others, drain;
};

static double evict_window(struct bench *b, struct source *source, size_t n, double clock)
{
    double spent = 0;

    for (size_t i = 0; i < n; i++) {
        struct chunk c;
        struct held h;
        uint64_t begin;

        must(source_next(source, &c), "no more prompts");
        begin = bench_thread_cpu_ns();
        allocate(b, &h);
        spent += (double)(bench_thread_cpu_ns() - begin) - clock;
        fill_and_register(b, &h, &c);
        release(b, &h);
    }
    return spent / (double)(n * BATCH);
}

static struct evict_times evict_run(uint32_t n_blocks, enum kvbm_eviction policy, bool naive)
{
    size_t n = KV_MIN(n_blocks / BATCH / (WINDOWS + 1) / 2, (size_t)2000);
    struct held *held = calloc(n * WINDOWS, sizeof(*held));
    double among[WINDOWS], drain[WINDOWS], clock = clock_cost();
    struct source source;
    struct bench b;

    must(n && held, "too few blocks");
    memset(held, 1, n * WINDOWS * sizeof(*held)); /* touch its pages */
    open_pool(&b, n_blocks, policy, naive);
    fill(&b);
    source_more(&source, &b, 0);
    for (size_t w = 0; w < WINDOWS; w++)
        among[w] = evict_window(&b, &source, n, clock);
    for (size_t w = 0; w < WINDOWS; w++) {
        uint64_t begin = bench_thread_cpu_ns();

        for (size_t i = 0; i < n; i++)
            allocate(&b, &held[w * n + i]);
        drain[w] = (double)(bench_thread_cpu_ns() - begin) / (double)(n * BATCH);
    }
    for (size_t i = 0; i < n * WINDOWS && !naive; i++)
        must(!kvbm_pool_release_mutable(b.pool, held[i].mutable, BATCH), "release");
    close_pool(&b);
    free(source.open);
    free(held);
    return (struct evict_times){bench_median(among, WINDOWS), bench_median(drain, WINDOWS)};
}

static void bench_evict(uint32_t only)
{
    static const uint32_t sizes[] = {10000, 100000, 1000000, 10000000};

    for (size_t s = 0; s < KV_COUNT(sizes); s++) {
        struct evict_times naive[2];

        if (only && sizes[s] != only)
            continue;
        naive[0] = evict_run(sizes[s], KVBM_EVICT_LRU, true);
        naive[1] = evict_run(sizes[s], KVBM_EVICT_LINEAGE, true);
        for (unsigned p = 0; p < KV_COUNT(policies); p++) {
            struct evict_times ours =
                evict_run(sizes[s], (enum kvbm_eviction)(KVBM_EVICT_LRU + p), false);

            bench_line(
                "kvbm",
                "'figure':'kvbm_evict','eviction':'%s','blocks':%u,'batch':%d,'clock':'thread','"
                "windows':%d,'ns_per_block':%.1f,'drain_ns':%.1f,'target_ns':150,'naive_list_ns':%."
                "1f,'naive_set_ns':%.1f,'naive_list_drain_ns':%.1f,'naive_set_drain_ns':%.1f",
                policies[p], sizes[s], BATCH, WINDOWS, ours.among_others, ours.drain,
                naive[0].among_others, naive[1].among_others, naive[0].drain, naive[1].drain);
        }
    }
}

/* ---- memory ---- */

static void bench_memory(uint32_t n_blocks)
{
    for (unsigned p = 0; p < KV_COUNT(policies); p++) {
        size_t before = resident();
        struct kvbm_pool_stats stats = {.size = sizeof(stats)};
        struct source source;
        struct chunk c;
        struct bench b;

        open_pool(&b, n_blocks, (enum kvbm_eviction)(KVBM_EVICT_LRU + p), false);
        fill(&b);
        source_more(&source, &b, 0);
        for (uint32_t i = 0; i < n_blocks / BATCH; i++) { /* one full turn */
            must(source_next(&source, &c), "no more prompts");
            cycle(&b, &c);
        }
        kvbm_pool_get_stats(b.pool, &stats);
        bench_line("kvbm",
                   "'figure':'kvbm_memory','eviction':'%s','blocks':%u,'key_len':8,'bytes_per_"
                   "block':%.1f,'resident_per_block':%.1f,'target':128",
                   policies[p], n_blocks, (double)stats.metadata_bytes / n_blocks,
                   (double)(resident() - before) / n_blocks);
        free(source.open);
        close_pool(&b);
    }
}

/* ---- hash ---- */

#define TOKENS (1u << 20)

static double hash_window(const uint32_t *tokens, uint64_t *blocks, uint64_t *sequences)
{
    uint64_t begin = bench_thread_cpu_ns();

    must(kvbm_hash_tokens(tokens, TOKENS, 16, 7, KVBM_CHAIN_SEED_ZERO, NULL, blocks, sequences) ==
             TOKENS / 16,
         "hash");
    return TOKENS * 4.0 / (double)(bench_thread_cpu_ns() - begin);
}

static double read_window(const uint32_t *tokens, uint64_t *sum)
{
    uint64_t begin = bench_thread_cpu_ns();

    for (size_t i = 0; i < TOKENS; i++)
        *sum += tokens[i];
    return TOKENS * 4.0 / (double)(bench_thread_cpu_ns() - begin);
}

static void bench_hash(void)
{
    uint32_t *tokens = malloc(TOKENS * sizeof(*tokens));
    uint64_t *hashes = malloc(TOKENS / 16 * 2 * sizeof(*hashes)), sum = 0;
    double hash[WINDOWS], read[WINDOWS];

    must(tokens && hashes, "no memory");
    for (size_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(mix(i) % 200000);
    for (size_t w = 0; w < WINDOWS; w++) {
        hash[w] = hash_window(tokens, hashes, hashes + TOKENS / 16);
        read[w] = read_window(tokens, &sum);
    }
    bench_line("kvbm",
               "'figure':'kvbm_hash','tokens':%u,'block_size':16,'clock':'thread','windows':%d,'gb_"
               "per_s':%.2f,'target':1,'read_gb_per_s':%.2f,'sum':%u",
               TOKENS, WINDOWS, bench_median(hash, WINDOWS), bench_median(read, WINDOWS),
               (unsigned)(sum & 1));
    free(tokens);
    free(hashes);
}

/* ---- latency ---- */

struct line {
    struct line *next;
    char rest[56];
};

/* Visit all lines once, in random order; each names the next, so that accesses can't overlap. */
static void bench_latency(uint32_t n_blocks)
{
    size_t n = (size_t)n_blocks * 2, len = n * sizeof(struct line), per = n / WINDOWS;
    struct line *lines =
        mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct line *at = lines;
    double each[WINDOWS];

    must(lines != MAP_FAILED && per, "no memory");
    madvise(lines, len, MADV_HUGEPAGE);
    for (size_t i = 0; i < n; i++)
        lines[i].next = &lines[i];
    for (size_t i = n - 1, j; i > 0; i--) { /* one cycle through all (Sattolo) */
        struct line *next = lines[i].next;

        j = mix(i) % i;
        lines[i].next = lines[j].next;
        lines[j].next = next;
    }
    for (size_t w = 0; w < WINDOWS; w++) {
        uint64_t begin = bench_thread_cpu_ns();

        for (size_t i = 0; i < per; i++)
            at = at->next;
        each[w] = (double)(bench_thread_cpu_ns() - begin) / (double)per;
    }
    bench_line("kvbm",
               "'figure':'kvbm_latency','mib':%zu,'clock':'thread','windows':%d,'ns':%.1f,'at':%d",
               len >> 20, WINDOWS, bench_median(each, WINDOWS), at == lines);
    munmap(lines, len);
}

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[all|cycle|match|threads|evict|memory|latency|hash [BLOCKS]]");

    const char *figure = argc > 1 ? argv[1] : "all";
    uint32_t n_blocks = (uint32_t)bench_number(argc, argv, 2, 0);
    uint32_t n = n_blocks ? n_blocks : 1000000;
    bool all = !strcmp(figure, "all");

    /* large blocks go back to the kernel, and leave the heap unchanged */
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < 2; i++) {
        shuffled = i;
        if (all || !strcmp(figure, "cycle"))
            bench_cycle(n);
        if (all || !strcmp(figure, "match"))
            bench_match(n);
    }
    if (all || !strcmp(figure, "threads"))
        bench_threads(n);
    if (all || !strcmp(figure, "evict"))
        bench_evict(n_blocks);
    if (all || !strcmp(figure, "memory"))
        bench_memory(n);
    if (all || !strcmp(figure, "latency"))
        bench_latency(n);
    if (all || !strcmp(figure, "hash"))
        bench_hash();
    return 0;
}
