// SPDX-License-Identifier: Apache-2.0
/*
 * Quality of decisions, simulated (bench/sim/sim.h): every policy on the same requests. Prints a line for
 * each workload, load and policy: figures in seconds, means over 3 draws, and their ratios to `dynamo`.
 *
 *     select_sim [conversation|synthetic|fanout|agents]... [policies|replicas|speeds|queue|fleets|late]...
 *
 * Without names of workloads, or of parts, it runs all of them.
 *
 * Traces are looked for in $KV_TRACES, traces/ and ../shared/traces/mooncake. Load 1 is the rate at which
 * the policy `dynamo` ends a workload with 48 requests a worker in flight.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim/sim.h"
#include "support.h"

#define CHOICES \
    "[conversation|synthetic|fanout|agents|policies|replicas|speeds|queue|fleets|late]..."
#define DRAWS 3

struct row {
    const char *label, *policy;
    const struct kvsel_params *params;
    bool predict;
};

static const struct kvsel_params llmd = {
    .size = sizeof(llmd), .prefix_weight = 2, .queue_weight = 1, .use_weight = 1};
static const struct kvsel_params fixed = {
    .size = sizeof(fixed), .own_weight = 4, .context_weight = .1};

static const struct row rows[] = {
    {"dynamo", "dynamo", NULL, false},
    {"round-robin", "round-robin", NULL, false},
    {"least", "least", NULL, false},
    {"cache-aware", "cache-aware", NULL, false},
    {"scored", "scored", &llmd, false},
    {"prefix", "prefix", NULL, false},
    {"smg", "smg", NULL, false},
    {"llm-d", "llm-d", NULL, false},
    {"order", "order", NULL, false},
    {"product", "product", NULL, false},
    {"fixed", "adaptive", &fixed, false},
    {"adaptive", "adaptive", NULL, false},
    {"oracle", "oracle", NULL, false},
    {"oracle3", "oracle3", NULL, false},
    {"dynamo, predicting", "dynamo", NULL, true},
    {"order, predicting", "order", NULL, true},
    {"adaptive, predicting", "adaptive", NULL, true},
};

/* Read draw @draw of a workload. Returns false when there is no trace. */
static bool make(const char *name, uint64_t draw, struct sim_workload *ret)
{
    static const char *const folders[] = {NULL, "traces", "../shared/traces/mooncake",
                                          "../../shared/traces/mooncake"};
    char path[512];

    if (strcmp(name, "fanout") == 0) {
        sim_make_fanout(1000, draw, ret);
        return true;
    }
    if (strcmp(name, "agents") == 0) {
        sim_make_agents(1200, draw, ret);
        return true;
    }
    for (size_t i = 0; i < sizeof(folders) / sizeof(*folders); i++) {
        const char *folder = i ? folders[i] : getenv("KV_TRACES");

        snprintf(path, sizeof(path), "%s/%s_trace.jsonl", folder ? folder : ".", name);
        if (access(path, R_OK) == 0)
            return sim_read_trace(path, draw, ret) == 0;
    }
    fprintf(stderr, "select_sim: no %s_trace.jsonl: tools/get-traces.sh downloads it\n", name);
    return false;
}

/* Return the rate of load 1: published for the traces, measured for the others. */
static double full_rate(const char *name, struct sim_settings set)
{
    struct sim_workload w;
    struct sim_result result;

    if (!make(name, 1, &w))
        return 0;
    set.policy = "dynamo";
    set.rate = 0;
    sim_run(&w, &set, &result);
    sim_workload_fini(&w);
    return result.rate;
}

/* Run a setting with all draws. */
static struct sim_result mean_of(const char *name, struct sim_settings set)
{
    struct sim_result mean = {0}, one;
    struct sim_workload w;

    for (uint64_t draw = 1; draw <= DRAWS; draw++) {
        if (!make(name, draw, &w))
            return mean;
        set.seed = draw;
        sim_run(&w, &set, &one);
        sim_workload_fini(&w);
        mean.ttft += one.ttft / DRAWS;
        mean.ttft_p99 += one.ttft_p99 / DRAWS;
        mean.over += one.over / DRAWS;
        mean.over_p99 += one.over_p99 / DRAWS;
        mean.token_s += one.token_s / DRAWS;
        mean.hits += one.hits / DRAWS;
        mean.busiest += one.busiest / DRAWS;
        mean.decision_s += one.decision_s / DRAWS;
    }
    return mean;
}

static void print(const char *name, double load, const char *label, const struct sim_result *r,
                  const struct sim_result *base)
{
    bench_line("select_sim",
               "'workload':'%s','load':%.1f,'policy':'%s','ttft':%.3f,'ttft_p99':%.2f,'over':%.3f,"
               "'over_p99':%.2f,'token_ms':%.1f,'hits':%.3f,'busiest':%.3f,'decision_us':%.2f,"
               "'to_dynamo':[%.2f,%.2f,%.2f]",
               name, load, label, r->ttft, r->ttft_p99, r->over, r->over_p99, r->token_s * 1e3,
               r->hits, r->busiest, r->decision_s * 1e6, r->ttft / base->ttft, r->over / base->over,
               r->over_p99 / base->over_p99);
    fflush(stdout);
}

static const struct sim_settings usual = {.workers = 8, .blocks = 30000, .predict = true};

static void all_policies(const char *name, double full)
{
    for (int percent = 70; percent < 100; percent += 20) {
        double load = percent / 100.0;
        struct sim_result base = {0};

        for (size_t i = 0; full > 0 && i < sizeof(rows) / sizeof(*rows); i++) {
            struct sim_settings set = usual;
            struct sim_result result;

            set.policy = rows[i].policy;
            set.params = rows[i].params;
            set.predict = rows[i].predict;
            set.rate = full * load;
            result = mean_of(name, set);
            if (i == 0)
                base = result;
            print(name, load, rows[i].label, &result, &base);
        }
    }
}

/* Print one setting of the policy @policy beside dynamo's usual one. */
static void one(const char *name, double full, double load, const char *label,
                struct sim_settings set, const struct sim_result *base)
{
    struct sim_result result;

    set.rate = full * load;
    result = mean_of(name, set);
    print(name, load, label, &result, base ? base : &result);
}

static struct sim_result base_of(const char *name, double full, double load, const char *policy)
{
    struct sim_settings set = usual;

    set.policy = policy;
    set.rate = full * load;
    return mean_of(name, set);
}

/* Replicas by turns, whose bookings the others know after a while: ratios to one. */
static void replicas(const char *name, double full)
{
    static const double delays[] = {0, .001, .005, .02, .05};
    char label[32];

    for (int percent = 70; percent < 100; percent += 20) {
        double load = percent / 100.0;
        struct sim_result alone = base_of(name, full, load, "adaptive");
        struct sim_settings set = usual;

        set.policy = "adaptive";
        set.replicas = 3;
        for (size_t i = 0; i < sizeof(delays) / sizeof(*delays); i++) {
            set.delay_s = delays[i];
            snprintf(label, sizeof(label), "3 replicas, %g ms", delays[i] * 1e3);
            one(name, full, load, label, set, &alone);
        }
        set.delay_s = -1;
        one(name, full, load, "3 replicas, never", set, &alone);
    }
}

/* Two of eight workers at half speed, learned and not. */
static void speeds(const char *name, double full)
{
    for (int percent = 50; percent < 80; percent += 20) {
        double load = percent / 100.0;
        struct sim_settings set = usual;
        struct sim_result base;

        set.policy = "adaptive";
        set.slow = 2;
        set.rate = full * load;
        base = mean_of(name, set);
        print(name, load, "2 slow", &base, &base);
        set.learn = true;
        one(name, full, load, "2 slow, learned", set, &base);
        set.slow = 0;
        base = base_of(name, full, load, "adaptive");
        one(name, full, load, "none slow, learned", set, &base);
    }
}

/* Requests held in front while all workers have 8192 waiting tokens. */
static void queues(const char *name, double full)
{
    struct sim_result base = base_of(name, full, .9, "adaptive");
    struct sim_settings set = usual;

    set.policy = "adaptive";
    set.queue_waiting = 8192;
    one(name, full, .9, "held, fcfs", set, &base);
    set.order = KVSEL_SHORTEST;
    one(name, full, .9, "held, shortest", set, &base);
}

/* Other fleets; load 1 grows with the number of workers. */
static void fleets(const char *name, double full)
{
    static const struct {
        const char *label;
        uint32_t workers, blocks;
    } kinds[] = {{"4 workers", 4, 30000}, {"32 workers", 32, 30000}, {"120,000 blocks", 8, 120000}};

    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
        for (int percent = 70; percent < 100; percent += 20) {
            double load = percent / 100.0;
            struct sim_settings set = usual;
            struct sim_result base;

            set.workers = kinds[i].workers;
            set.blocks = kinds[i].blocks;
            set.policy = "dynamo";
            set.rate = full * load * set.workers / 8;
            base = mean_of(name, set);
            set.policy = "adaptive";
            one(name, full * set.workers / 8, load, kinds[i].label, set, &base);
        }
    }
}

/* Events that come late, with and without predictions. */
static void late_events(const char *name, double full)
{
    static const char *const policies[] = {"dynamo", "order", "adaptive"};
    char label[64];

    for (int percent = 70; percent < 100; percent += 20) {
        double load = percent / 100.0;
        for (size_t i = 0; i < 2 * sizeof(policies) / sizeof(*policies); i++) {
            struct sim_settings set = usual;

            set.policy = policies[i / 2];
            set.predict = i % 2;
            set.late_s = 1;
            snprintf(label, sizeof(label), "%s%s, events 1 s late", set.policy,
                     set.predict ? ", predicting" : "");
            one(name, full, load, label, set, NULL);
        }
    }
}

static const struct {
    const char *name;
    void (*run)(const char *workload, double full);
    bool traces, bursts;
} parts[] = {{"policies", all_policies, true, true}, {"replicas", replicas, true, false},
             {"speeds", speeds, true, false},        {"queue", queues, true, false},
             {"fleets", fleets, true, false},        {"late", late_events, false, true}};

int main(int argc, char **argv)
{
    static const char *const names[] = {"conversation", "synthetic", "fanout", "agents"};
    static const double published[] = {5.58, 5.33, 0, 0};
    bool any_part = false;

    bench_usage(argc, argv, CHOICES);
    for (size_t k = 0; argc > 1 && k < sizeof(parts) / sizeof(*parts); k++)
        any_part = any_part || bench_chosen(argc, argv, parts[k].name);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        bool named = false;
        double full = 0;

        for (size_t k = 0; argc > 1 && k < sizeof(names) / sizeof(*names); k++)
            named = named || bench_chosen(argc, argv, names[k]);
        if (named && !bench_chosen(argc, argv, names[i]))
            continue;
        full = full_rate(names[i], usual);
        if (full <= 0)
            continue; /* no trace */
        bench_line("select_sim", "'workload':'%s','full_rate':%.2f,'used':%.2f", names[i], full,
                   published[i] > 0 ? published[i] : full);
        full = published[i] > 0 ? published[i] : full;
        for (size_t k = 0; k < sizeof(parts) / sizeof(*parts); k++)
            if ((i < 2 ? parts[k].traces : parts[k].bursts) &&
                (!any_part || bench_chosen(argc, argv, parts[k].name)))
                parts[k].run(names[i], full);
    }
}
