// SPDX-License-Identifier: Apache-2.0
/*
 * Cost of cache groups in the prefix index: the same fleet with full attention alone, and with a sliding
 * window and a recurrent state beside it. One JSON line per figure.
 *
 *     hybrid_bench [WORKERS [PROMPTS]]      256 781, as many blocks as index_bench has
 *
 * Every worker holds prompts of 64 blocks. The first 20 come from as many prefixes as there are prompts,
 * which all workers hold; the rest is the worker's own. A hybrid's window has the last 8 blocks of each
 * prompt and prefix, its state the last one: what vLLM keeps by default.
 *
 *   memory   bytes by the index's count, per (holder, block). The index takes regions of 2 MiB: one
 *            more or less, as its random seed has it, is 0.16 bytes here, and 0.64 with 64 800
 *   lookup   random prompts, CPU of the thread; ratios of the two in the same round, medians
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "kv_index.h"
#include "support.h"

#define PROMPT 64u
#define PREFIX 20u
#define RUN 8u
#define LOOKUPS 4000u

enum { WINDOW, STATE, N_GROUPS };

struct fleet {
    uint32_t workers, prompts;
    struct kvi_index *ix;
    struct kvi_matches matches;
    uint64_t reach; /* of all lookups */
};

static uint64_t scatter(uint64_t x)
{
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

static void make_prompt(uint32_t worker, uint32_t prompt, struct kv_block *ret)
{
    for (uint32_t i = 0; i < PROMPT; i++) {
        uint64_t id = i < PREFIX
                          ? (uint64_t)prompt << 8
                          : UINT64_C(1) << 63 | (uint64_t)worker << 40 | (uint64_t)prompt << 8;

        ret[i].tokens_hash = scatter(id + i + 1);
        ret[i].hash = scatter(ret[i].tokens_hash + 1);
    }
}

/* Give a group the @n blocks of the prompt before @end. */
static void keep(struct fleet *f, struct kv_holder holder, uint32_t group,
                 const struct kv_block *blocks, uint32_t end, uint32_t n)
{
    uint64_t names[RUN];
    long rc;

    for (uint32_t i = 0; i < n; i++)
        names[i] = blocks[end - n + i].hash;
    rc = kvi_add_known(f->ix, kvi_window_of(holder, KV_TIER_DEVICE, 0, group), names, n);
    if (rc < 0)
        bench_die("kvi_add_known", (int)rc);
}

static void fill(struct fleet *f, bool hybrid)
{
    const struct kvi_window window = {.group = 1, .window = 128, .need = RUN, .stride = 1},
                            state = {.group = 2, .need = 1, .stride = 1, .needs = KV_NEEDS_STATE};
    int rc = kvi_create(NULL, &f->ix);

    for (uint32_t w = 0; !rc && w < f->workers; w++) {
        struct kv_holder holder = {.worker = 1 + w};

        if (hybrid && (kvi_set_window(f->ix, holder, &window) != WINDOW ||
                       kvi_set_window(f->ix, holder, &state) != STATE))
            bench_die("kvi_set_window", 0);
        for (uint32_t p = 0; !rc && p < f->prompts; p++) {
            struct kv_block blocks[PROMPT];

            make_prompt(w, p, blocks);
            rc =
                kvi_add(f->ix, kvi_cache_of(holder, KV_TIER_DEVICE, 0), NULL, blocks, PROMPT, NULL);
            for (uint32_t end = PREFIX; hybrid && end <= PROMPT; end += PROMPT - PREFIX) {
                keep(f, holder, WINDOW, blocks, end, RUN);
                keep(f, holder, STATE, blocks, end, 1);
            }
        }
    }
    if (rc)
        bench_die("the fleet", rc);
}

static double lookups(struct fleet *f, uint64_t seed)
{
    uint64_t prompts[64][PROMPT], before;
    double ns = 0;

    for (uint32_t done = 0; done < LOOKUPS; done += 64) {
        for (uint32_t i = 0; i < 64; i++) {
            uint64_t random = scatter(++seed * UINT64_C(0x9e3779b97f4a7c15));
            struct kv_block blocks[PROMPT];

            make_prompt((uint32_t)(random >> 32) % f->workers, (uint32_t)random % f->prompts,
                        blocks);
            for (uint32_t k = 0; k < PROMPT; k++)
                prompts[i][k] = blocks[k].tokens_hash;
        }
        before = bench_thread_cpu_ns();
        for (uint32_t i = 0; i < 64; i++) {
            if (kvi_find(f->ix, prompts[i], PROMPT, &f->matches))
                bench_die("kvi_find", 0);
            for (size_t k = 0; k < f->matches.n; k++)
                f->reach += f->matches.items[k].reach[KV_TIER_DEVICE];
        }
        ns += (double)(bench_thread_cpu_ns() - before);
    }
    return ns / LOOKUPS;
}

static void show_memory(const struct fleet *f, const char *groups)
{
    struct kvi_stats stats = KVI_STATS_INIT;

    (void)kvi_get_stats(f->ix, &stats);
    bench_line("hybrid",
               "'figure': 'memory', 'groups': '%s', 'holder_blocks': %" PRIu64
               ", 'bytes_per_holder_block': %.2f",
               groups, (uint64_t)f->workers * f->prompts * PROMPT,
               (double)stats.bytes / ((double)f->workers * f->prompts * PROMPT));
}

int main(int argc, char **argv)
{
    struct fleet plain = {0}, hybrid = {0};
    struct bench_samples ns = {0}, ratios = {0};

    bench_usage(argc, argv, "[WORKERS [PROMPTS]]");
    plain.workers = (uint32_t)bench_number(argc, argv, 1, 256);
    plain.prompts = (uint32_t)bench_number(argc, argv, 2, 781);
    hybrid = plain;
    fill(&plain, false);
    fill(&hybrid, true);
    show_memory(&plain, "full");
    show_memory(&hybrid, "full, window, state");
    for (uint64_t round = 0; round < BENCH_ROUNDS_MAX; round++) {
        double one = lookups(&plain, round << 32), other = lookups(&hybrid, round << 32);

        bench_sample(&ns, one);
        bench_sample(&ratios, other / one);
    }
    if (plain.reach != hybrid.reach)
        bench_die("the answers differ", 0);
    bench_line("hybrid", "'figure': 'lookup', 'plain_ns': %.0f, 'hybrid_to_plain': %.3f",
               bench_middle(&ns), bench_middle(&ratios));
    kvi_matches_fini(&plain.matches);
    kvi_matches_fini(&hybrid.matches);
    kvi_destroy(plain.ix);
    kvi_destroy(hybrid.ix);
    return 0;
}
