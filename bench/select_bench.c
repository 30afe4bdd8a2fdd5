// SPDX-License-Identifier: Apache-2.0
/*
 * Speed of libkvselect: a decision with the matches given, and a booking's walk, for fleets of several
 * sizes. The yardstick is a loop that does no more than read all matches.
 *
 *     select_bench [workers [policy]]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv_select.h"
#include "support.h"

#define PROMPT_BLOCKS 512
#define BLOCK 16
#define ROUNDS 5

struct bench {
    struct kvsel *selector;
    struct kvi_match *matches;
    uint64_t hashes[PROMPT_BLOCKS];
    uint32_t n;
    uint64_t now;
};

/* A fleet where every worker holds a part of the prompt and runs a few requests of others. */
static void make(struct bench *b, uint32_t workers, const char *policy)
{
    struct kvsel_opts opts = {.size = sizeof(opts), .policy = policy, .seed = 1};

    if (kvsel_create(&opts, &b->selector) != 0)
        bench_die("kvsel_create", 0);
    b->n = workers;
    b->now = 1;
    b->matches = calloc(workers, sizeof(*b->matches));
    if (!b->matches)
        bench_die("memory", 0);
    for (uint32_t i = 0; i < PROMPT_BLOCKS; i++)
        b->hashes[i] = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    for (uint32_t w = 0; w < workers; w++) {
        struct kvsel_worker worker = {.size = sizeof(worker), .holder = {w * 7919 + 1, 0}};
        struct kvsel_request request = {.size = sizeof(request), .tokens = 1000 + w % 500};
        struct kvsel_choice choice = {.size = sizeof(choice), .worker = worker.holder};

        b->matches[w].holder = worker.holder;
        for (int t = 0; t < KV_N_TIERS; t++)
            b->matches[w].reach[t] = 1 + w * 31 % PROMPT_BLOCKS;
        if (kvsel_set_worker(b->selector, &worker) != 0)
            bench_die("kvsel_set_worker", 0);
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t id[2] = {w, k};

            choice.uncovered = w * 13 % 900;
            if (kvsel_book(b->selector, (char *)id, sizeof(id), &request, &choice, b->now) != 0)
                bench_die("kvsel_book", 0);
        }
    }
}

static struct kvsel_request request_of(const struct bench *b)
{
    return (struct kvsel_request){.size = sizeof(struct kvsel_request),
                                  .tokens = PROMPT_BLOCKS * BLOCK,
                                  .hashes = b->hashes,
                                  .n_hashes = PROMPT_BLOCKS,
                                  .matches = b->matches,
                                  .n_matches = b->n};
}

static void choose(struct bench *b)
{
    struct kvsel_request request = request_of(b);
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;

    if (kvsel_select(b->selector, &request, ++b->now, &choice) != 0)
        bench_die("kvsel_select", 0);
}

static void walk(struct bench *b)
{
    struct kvsel_request request = request_of(b);
    struct kvsel_choice choice = {.size = sizeof(choice), .worker = b->matches[0].holder};

    b->now += 1000;
    if (kvsel_book(b->selector, "walk", 4, &request, &choice, b->now) != 0 ||
        kvsel_first_token(b->selector, "walk", 4, b->now + 1) != 0 ||
        kvsel_free(b->selector, "walk", 4, KVSEL_LOST, b->now + 2) != 0)
        bench_die("a booking", 0);
}

static volatile uint64_t sink;

static void read_matches(struct bench *b)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < b->n; i++)
        sum += b->matches[i].holder.worker + b->matches[i].reach[KV_N_TIERS - 1];
    sink = sum;
}

static double measure(struct bench *b, void (*fn)(struct bench *b), uint64_t times)
{
    double rounds[ROUNDS];

    for (int i = 0; i < ROUNDS; i++) {
        double start = bench_cpu_ns();

        for (uint64_t k = 0; k < times; k++)
            fn(b);
        rounds[i] = (bench_cpu_ns() - start) / (double)times;
    }
    return bench_median(rounds, ROUNDS);
}

static void run(uint32_t workers, const char *policy)
{
    struct bench b = {0};
    double chosen, walked, read;

    make(&b, workers, policy);
    chosen = measure(&b, choose, 2000000 / (workers + 60));
    walked = measure(&b, walk, 20000);
    read = measure(&b, read_matches, 2000000 / (workers + 60));
    bench_line("select_bench",
               "'workers':%" PRIu32 ",'policy':'%s','decision_us':%.3f,'booking_us':%.3f,"
               "'read_matches_us':%.3f",
               workers, policy, chosen / 1e3, walked / 1e3, read / 1e3);
    kvsel_destroy(b.selector);
    free(b.matches);
}

int main(int argc, char **argv)
{
    static const uint32_t sizes[] = {4, 64, 1024, 4096};

    bench_usage(argc, argv, "[workers [policy]]");
    if (argc > 1) {
        run((uint32_t)bench_number(argc, argv, 1, 64), argc > 2 ? argv[2] : "adaptive");
        return 0;
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        for (size_t k = 0; kvsel_policy_name(k); k++)
            run(sizes[i], kvsel_policy_name(k));
}
