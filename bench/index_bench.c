// SPDX-License-Identifier: Apache-2.0
/*
 * The prefix index at the size of a fleet: memory, lookups, writes. One JSON line per figure.
 *
 *     index_bench [WORKERS [BLOCKS_PER_WORKER [SHARED_PERCENT]]]      256 50000, 30 and then 0
 *
 * Every worker holds prompts of 64 blocks, stored one prompt per call, in random order over the
 * fleet. The first SHARED_PERCENT of a prompt come from as many prefixes as a worker has prompts.
 * All workers hold all prefixes; the rest of a prompt is its worker's own.
 *
 *   memory   bytes in use, by the index's count and the process's growth, per (holder, block)
 *   warm     the same prompt again and again; time per call, with the clock's own ("clock")
 *   cold     random prompts over the whole index, none twice in a row
 *   copy     the blocks of some workers, 40 MiB of them, as a dump copies them while it holds these
 *            workers: CPU and time of the longest group
 *   writes   a worker removes its oldest prompt (one call, last block first) and stores a new one
 *
 *   line     what the machine's memory does at that time: random lines of an area as large as the
 *            index (1 GiB at most, huge pages), each read after the one before, or counted up without
 *            a wait. Large indexes are bound by it.
 *
 * The yardstick is one flat hash table with an entry of 16 bytes per (holder, block). A hash of the
 * path and the holder is its key; it doubles at 3/4. It answers for one holder only, and can't find
 * blocks that are no longer reachable.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "index/tree/facts.h"
#include "kv_index.h"
#include "support.h"

#define PROMPT 64
#define SAMPLES 20000
#define WRITE_NS (200 * KV_NS_PER_MS)
#define WINDOWS 21
#define GROUP_BYTES (UINT64_C(40) << 20)
#define LINE_WORDS 8 /* words of 8 bytes in a cache line */

struct fleet {
    uint32_t workers, prompts, shared; /* prompts of each worker; shared blocks of each prompt */
    struct kvi_index *ix;
    struct flat *flat;
    uint32_t *oldest; /* per worker: its prompts are oldest .. oldest + prompts */
    uint64_t random;
};

/* Make different numbers of different numbers, the same in every run. */
static uint64_t scatter(uint64_t x)
{
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

static uint64_t next_random(struct fleet *fleet)
{
    return scatter(++fleet->random * UINT64_C(0x9e3779b97f4a7c15));
}

/* Return the bytes of memory that this process has. */
static size_t resident(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    if (!file || fscanf(file, "%*u %lu", &pages) != 1)
        bench_die("no /proc/self/statm", 0);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void make_prompt(const struct fleet *fleet, uint32_t worker, uint32_t prompt,
                        struct kv_block *ret)
{
    for (uint32_t i = 0; i < PROMPT; i++) {
        uint64_t id = i < fleet->shared
                          ? (uint64_t)(prompt % fleet->prompts) << 8
                          : UINT64_C(1) << 63 | (uint64_t)worker << 40 | (uint64_t)prompt << 8;

        ret[i].tokens_hash = scatter(id + i + 1);
        ret[i].hash = scatter(ret[i].tokens_hash + 1);
    }
}

static void locals_of(const struct kv_block *blocks, uint64_t *ret)
{
    for (uint32_t i = 0; i < PROMPT; i++)
        ret[i] = blocks[i].tokens_hash;
}

/* -- the yardstick ----------------------------------------------------------------------------- */

struct flat {
    struct flat_entry {
        uint64_t key, hash; /* key 0: empty */
    } * entries;
    size_t capacity, n;
};

static uint64_t flat_key(uint64_t path, uint32_t holder)
{
    return scatter(path ^ (uint64_t)holder << 32) | 1;
}

static struct flat_entry *flat_find(const struct flat *flat, uint64_t key)
{
    size_t i = key >> 20 & (flat->capacity - 1);

    while (flat->entries[i].key && flat->entries[i].key != key)
        i = (i + 1) & (flat->capacity - 1);
    return &flat->entries[i];
}

static void flat_add(struct flat *flat, uint64_t key, uint64_t hash)
{
    if (flat->n * 4 >= flat->capacity * 3) {
        struct flat old = *flat;

        flat->capacity = old.capacity ? old.capacity * 2 : 1024;
        flat->entries = calloc(flat->capacity, sizeof(*flat->entries));
        if (!flat->entries)
            bench_die("no memory", 0);
        for (size_t i = 0; i < old.capacity; i++)
            if (old.entries[i].key)
                *flat_find(flat, old.entries[i].key) = old.entries[i];
        free(old.entries);
    }
    flat->n++;
    *flat_find(flat, key) = (struct flat_entry){key, hash};
}

static void flat_store(struct flat *flat, uint32_t worker, const struct kv_block *blocks)
{
    uint64_t path = 0;

    for (uint32_t i = 0; i < PROMPT; i++) {
        path = scatter(path + blocks[i].tokens_hash);
        flat_add(flat, flat_key(path, worker), blocks[i].hash);
    }
}

static void flat_remove(struct flat *flat, uint32_t worker, const struct kv_block *blocks)
{
    uint64_t path = 0;

    for (uint32_t k = 0; k < PROMPT; k++) {
        struct flat_entry *gone, *next;

        path = scatter(path + blocks[k].tokens_hash);
        gone = next = flat_find(flat, flat_key(path, worker));
        for (;;) { /* close the gap */
            size_t at, home;

            if (++next == flat->entries + flat->capacity)
                next = flat->entries;
            if (!next->key)
                break;
            at = (size_t)(next - flat->entries);
            home = next->key >> 20 & (flat->capacity - 1);
            if (((at - home) & (flat->capacity - 1)) >=
                ((at - (size_t)(gone - flat->entries)) & (flat->capacity - 1))) {
                *gone = *next;
                gone = next;
            }
        }
        gone->key = 0;
        flat->n--;
    }
}

static uint32_t flat_lookup(const struct flat *flat, uint32_t worker, const uint64_t *locals)
{
    uint64_t path = 0;
    uint32_t i = 0;

    for (; i < PROMPT; i++) {
        path = scatter(path + locals[i]);
        if (!flat_find(flat, flat_key(path, worker))->key)
            break;
    }
    return i;
}

/* -- one operation on either table ------------------------------------------------------------- */

static void store_prompt(struct fleet *fleet, uint32_t worker, uint32_t prompt)
{
    struct kv_block blocks[PROMPT];

    make_prompt(fleet, worker, prompt, blocks);
    if (fleet->flat)
        flat_store(fleet->flat, worker, blocks);
    else if (kvi_store(fleet->ix, (struct kv_holder){worker, 0}, KV_TIER_DEVICE, NULL, blocks,
                       PROMPT, NULL))
        bench_die("kvi_store", 0);
}

static void remove_prompt(struct fleet *fleet, uint32_t worker, uint32_t prompt)
{
    struct kv_block blocks[PROMPT];
    uint64_t hashes[PROMPT];

    make_prompt(fleet, worker, prompt, blocks);
    for (uint32_t i = 0; i < PROMPT; i++)
        hashes[i] = blocks[PROMPT - 1 - i].hash;
    if (fleet->flat)
        flat_remove(fleet->flat, worker, blocks);
    else if (kvi_remove(fleet->ix, (struct kv_holder){worker, 0}, KV_TIER_DEVICE, hashes, PROMPT) !=
             PROMPT)
        bench_die("kvi_remove", 0);
}

/* -- figures ----------------------------------------------------------------------------------- */

static void figure(const struct fleet *fleet, const char *what, const char *unit, double value,
                   const char *more)
{
    bench_begin("index",
                "'what':'%s','%s':%.4g,'engine':'%s','workers':%u,'blocks_per_worker':%u,'shared_"
                "percent':%u",
                what, unit, value, fleet->flat ? "flat table" : "kvindex", fleet->workers,
                fleet->prompts * PROMPT, fleet->shared * 100 / PROMPT);
    if (more)
        bench_more("%s", more);
    bench_end();
}

static void fill(struct fleet *fleet)
{
    uint64_t n = (uint64_t)fleet->workers * fleet->prompts, start, blocks = n * PROMPT;
    uint32_t *order = malloc(n * sizeof(*order));
    size_t before;
    char more[160];

    if (!order)
        bench_die("no memory", 0);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t k = next_random(fleet) % (i + 1);

        order[i] = order[k];
        order[k] = (uint32_t)i;
    }
    before = resident();
    start = bench_thread_cpu_ns();
    for (uint64_t i = 0; i < n; i++)
        store_prompt(fleet, order[i] % fleet->workers, order[i] / fleet->workers);
    start = bench_thread_cpu_ns() - start;
    figure(fleet, "fill", "blocks_per_s", (double)blocks * 1e9 / (double)start, NULL);
    if (fleet->flat) {
        figure(fleet, "memory", "bytes_per_holder_block",
               (double)(fleet->flat->capacity * sizeof(struct flat_entry)) / (double)blocks, NULL);
    } else {
        struct kvi_stats stats = {.size = sizeof(stats)};

        kvi_get_stats(fleet->ix, &stats);
        snprintf(more, sizeof(more),
                 "\"holder_blocks\":%" PRIu64 ",\"blocks\":%" PRIu64 ",\"chains\":%" PRIu64
                 ",\"bytes_per_block\":%.4g",
                 stats.holder_blocks, stats.blocks, stats.chains,
                 (double)stats.bytes / (double)stats.blocks);
        figure(fleet, "memory", "bytes_per_holder_block",
               (double)stats.bytes / (double)stats.holder_blocks, more);
    }
    figure(fleet, "memory_rss", "bytes_per_holder_block",
           (double)(resident() - before) / (double)blocks, NULL);
    free(order);
}

static void percentiles(const struct fleet *fleet, const char *what, double *ns, size_t n,
                        uint64_t clock_ns)
{
    char more[160];

    qsort(ns, n, sizeof(*ns), bench_by_value);
    snprintf(more, sizeof(more),
             "\"p90_ns\":%.0f,\"p99_ns\":%.0f,\"p999_ns\":%.0f,\"clock_ns\":%" PRIu64,
             ns[n * 9 / 10], ns[n * 99 / 100], ns[n * 999 / 1000], clock_ns);
    figure(fleet, what, "p50_ns", ns[n / 2], more);
}

static uint64_t clock_cost(void)
{
    uint64_t start = kv_now_ns();

    for (int i = 0; i < 1000; i++)
        (void)kv_now_ns();
    return (kv_now_ns() - start) / 1000;
}

/* Look up @n blocks of a prompt: all, or only the shared ones. */
static void lookups(struct fleet *fleet, const char *what, bool cold, uint32_t n)
{
    static double ns[SAMPLES];
    struct kvi_matches matches = {0};
    struct kv_block blocks[PROMPT];
    uint64_t locals[PROMPT], sum = 0;

    for (size_t i = 0; i < SAMPLES; i++) {
        uint32_t worker = cold ? (uint32_t)(next_random(fleet) % fleet->workers) : 1;
        uint32_t prompt = cold ? (uint32_t)(next_random(fleet) % fleet->prompts) : 1;
        uint64_t start;

        make_prompt(fleet, worker, fleet->oldest[worker] + prompt, blocks);
        locals_of(blocks, locals);
        start = kv_now_ns();
        if (fleet->flat)
            sum += flat_lookup(fleet->flat, worker, locals);
        else if (kvi_find(fleet->ix, locals, n, &matches))
            bench_die("kvi_find", 0);
        ns[i] = (double)(kv_now_ns() - start);
        for (size_t k = 0; k < matches.n; k++)
            sum +=
                matches.items[k].reach[0] == n && matches.items[k].holder.worker == worker ? n : 0;
    }
    if (sum != (uint64_t)SAMPLES * n)
        bench_die("a lookup didn't find its prompt", 0);
    kvi_matches_fini(&matches);
    percentiles(fleet, what, ns, SAMPLES, clock_cost());
}

/* Measure writes in steady state: each call removes as many blocks as it adds. Other programs share
 * caches and memory, so print the best window beside the median. */
static void writes(struct fleet *fleet)
{
    static double rate[WINDOWS];
    char more[80];

    for (int w = 0; w < WINDOWS; w++) {
        uint64_t start = bench_thread_cpu_ns(), n = 0, spent;

        while ((spent = bench_thread_cpu_ns() - start) < WRITE_NS) {
            for (int i = 0; i < 64; i++, n += 2 * PROMPT) {
                uint32_t worker = (uint32_t)(next_random(fleet) % fleet->workers);
                uint32_t oldest = fleet->oldest[worker]++;

                remove_prompt(fleet, worker, oldest);
                store_prompt(fleet, worker, oldest + fleet->prompts);
            }
        }
        rate[w] = (double)n * 1e9 / (double)spent;
    }
    qsort(rate, WINDOWS, sizeof(rate[0]), bench_by_value);
    snprintf(more, sizeof(more), "\"best_of_%d\":%.4g", WINDOWS, rate[WINDOWS - 1]);
    figure(fleet, "writes", "blocks_per_s", rate[WINDOWS / 2], more);
}

/*
 * Touch @n random lines of @n_lines (a power of two). @wait: each address needs the content of the
 * line before. Returns the nanoseconds a line.
 */
static double touch_lines(struct fleet *fleet, uint64_t *words, uint64_t n_lines, uint64_t n,
                          bool wait)
{
    uint64_t random = next_random(fleet), start = bench_thread_cpu_ns();

    for (uint64_t i = 0; i < n; i++) {
        uint64_t *line = words + (random & (n_lines - 1)) * LINE_WORDS;

        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        random ^= random >> 33;
        if (wait)
            random += *line;
        else
            ++*line;
    }
    start = bench_thread_cpu_ns() - start;
    words[0] = random; /* so that the loop has a result */
    return (double)start / (double)n;
}

/* Measure the memory itself, with an area about as large as the index. */
static void lines(struct fleet *fleet)
{
    uint64_t bytes = UINT64_C(16) * fleet->workers * fleet->prompts * PROMPT, area = 1 << 21;
    uint64_t *words;
    char more[80];
    double read_ns, add_ns;

    while (area < bytes && area < UINT64_C(1) << 30)
        area *= 2;
    words = mmap(NULL, area, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED)
        bench_die("no memory", 0);
    (void)madvise(words, area, MADV_HUGEPAGE);
    memset(words, 0, area);
    add_ns = touch_lines(fleet, words, area / 64, 10000000, false);
    memset(words, 0, area);
    read_ns = touch_lines(fleet, words, area / 64, 1000000, true);
    snprintf(more, sizeof(more), "\"add_ns\":%.4g,\"mib\":%" PRIu64, add_ns, area >> 20);
    figure(fleet, "line", "read_ns", read_ns, more);
    munmap(words, area);
}

static int copy_run(void *arg, const struct kvi_dump_run *told)
{
    kv_buf_append(arg, told, sizeof(*told));
    kv_buf_append(arg, told->blocks, told->n * sizeof(*told->blocks));
    return 0;
}

static int copy_extra(void *arg, const struct kvi_extra *extra)
{
    kv_buf_append(arg, extra, sizeof(*extra));
    return 0;
}

static uint64_t cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * KV_NS_PER_S + (uint64_t)t.tv_nsec;
}

static void copies(struct fleet *fleet)
{
    uint64_t group = KV_MAX(GROUP_BYTES / (fleet->prompts * PROMPT * sizeof(struct kv_block)), 1u);
    struct kv_holder *holders = calloc(fleet->workers, sizeof(*holders));
    uint64_t most_ns = 0, most_cpu_ns = 0;
    char more[80];

    for (uint32_t first = 0; holders && first < fleet->workers; first += (uint32_t)group) {
        size_t n = KV_MIN(group, (uint64_t)fleet->workers - first);
        uint64_t from_cpu_ns = cpu_ns(), from_ns = kv_now_ns();
        struct kv_buf copy = KV_BUF_INIT;

        for (uint32_t i = 0; i < n; i++)
            holders[i] = (struct kv_holder){first + i, 0};
        if (kvi_dump_holders(fleet->ix, holders, n, copy_run, copy_extra, &copy) || copy.error)
            bench_die("kvi_dump_holders", 0);
        most_ns = KV_MAX(most_ns, kv_now_ns() - from_ns);
        most_cpu_ns = KV_MAX(most_cpu_ns, cpu_ns() - from_cpu_ns);
        kv_buf_fini(&copy);
    }
    snprintf(more, sizeof(more), "\"s\":%.3f,\"group_workers\":%" PRIu64,
             (double)most_ns / KV_NS_PER_S, group);
    figure(fleet, "copy", "cpu_s", (double)most_cpu_ns / KV_NS_PER_S, more);
    free(holders);
}

static void run(uint32_t workers, uint32_t blocks, uint32_t shared_percent, bool flat)
{
    struct fleet fleet = {
        .workers = workers, .prompts = blocks / PROMPT, .shared = PROMPT * shared_percent / 100};
    struct flat table = {0};

    fleet.oldest = calloc(workers, sizeof(*fleet.oldest));
    fleet.flat = flat ? &table : NULL;
    if (!fleet.oldest || (!flat && kvi_create(NULL, &fleet.ix)))
        bench_die("no memory", 0);
    fill(&fleet);
    lookups(&fleet, "find_warm", false, PROMPT);
    lookups(&fleet, "find_cold", true, PROMPT);
    if (fleet.shared && !flat) {
        lookups(&fleet, "find_warm_all_workers", false, fleet.shared);
        lookups(&fleet, "find_cold_all_workers", true, fleet.shared);
    }
    lines(&fleet);
    if (!flat)
        copies(&fleet);
    writes(&fleet);
    lines(&fleet);
    if (!flat) {
        struct kvi_stats stats = {.size = sizeof(stats)};

        lookups(&fleet, "find_cold_after_writes", true, PROMPT);
        kvi_get_stats(fleet.ix, &stats);
        figure(&fleet, "memory_after_writes", "bytes_per_holder_block",
               (double)stats.bytes / (double)stats.holder_blocks, NULL);
    }
    kvi_destroy(fleet.ix);
    free(table.entries);
    free(fleet.oldest);
}

int main(int argc, char **argv)
{
    bench_usage(argc, argv, "[WORKERS [BLOCKS_PER_WORKER [SHARED_PERCENT]]]");

    uint32_t workers = (uint32_t)bench_number(argc, argv, 1, 256);
    uint32_t blocks = (uint32_t)bench_number(argc, argv, 2, 50000);

    if (workers < 2 || blocks < 2 * PROMPT)
        bench_die("at least 2 workers with 128 blocks each", 0);
    if (argc > 3) {
        run(workers, blocks, (uint32_t)bench_number(argc, argv, 3, 30) % 100, false);
        return 0;
    }
    run(workers, blocks, 30, false);
    run(workers, blocks, 0, false);
    run(workers, blocks, 30, true);
    return 0;
}
