// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <string.h>

#include "base/args/args.h"
#include "cli/whole/whole.h"

#define AT(field) offsetof(struct kc_whole_opts, field)
#define MODELS "llama-3-8b|llama-3-70b|deepseek-v3|qwen3-8b|gpt-oss-20b|tiny|tiny-window"

static const struct kv_arg ARGS[] = {
    {.name = "The workload", .type = KV_ARG_GROUP},
    {.name = "requests",
     .type = KV_ARG_U64,
     .offset = AT(requests),
     .value = "N",
     .min = 1,
     .max = 10000000,
     .help = "First N requests of the trace; a shorter one starts over with new prompts. Default: "
             "90."},
    {.name = "rounds",
     .type = KV_ARG_U64,
     .offset = AT(rounds),
     .value = "N",
     .min = 1,
     .max = 1000,
     .help = "Serve these requests N times: from the second round on, prompts come back that have "
             "left G1 and G2, and are restored. Default: 2."},
    {.name = "duration",
     .type = KV_ARG_TIME,
     .offset = AT(duration_ms),
     .value = "TIME",
     .min = 100,
     .help = "Stop after TIME, whatever requests are left. Default: 40s."},
    {.name = "per-id",
     .type = KV_ARG_U64,
     .offset = AT(per_id),
     .value = "TOKENS",
     .min = 16,
     .max = 512,
     .help = "Tokens that an id of the trace stands for, a multiple of 16. In the trace it is 512; "
             "fewer keep the pattern of reuse and fit the machine. Default: 16."},
    {.name = "max-tokens",
     .type = KV_ARG_U64,
     .offset = AT(max_tokens),
     .value = "TOKENS",
     .min = 16,
     .help = "Longest prompt; longer ones are cut, also to what G1 holds. Default: 384."},
    {.name = "steps",
     .type = KV_ARG_U64,
     .offset = AT(steps),
     .value = "N",
     .max = 1024,
     .help = "Decode steps of a request: each writes a token, gathers the whole context, and "
             "compares it. Default: 4."},
    {.name = "seed",
     .type = KV_ARG_U64,
     .offset = AT(seed),
     .value = "N",
     .help = "Seed of the generated workload. Default: 1."},
    {.name = "The cluster", .type = KV_ARG_GROUP},
    {.name = "workers",
     .type = KV_ARG_U64,
     .offset = AT(workers),
     .value = "N",
     .min = 1,
     .max = KC_PLAN_WORKERS,
     .help = "Engine workers, a process each. Default: 4."},
    {.name = "model",
     .type = KV_ARG_CHOICE,
     .offset = AT(model),
     .value = "NAME",
     .choices = MODELS,
     .help = "Shape of the K/V: llama-3-8b (128 KiB a token), llama-3-70b, deepseek-v3 (MLA), "
             "qwen3-8b (G1 in HND order), gpt-oss-20b (every other layer has a window of 128 "
             "tokens), tiny, or tiny-window. Default: llama-3-8b."},
    {.name = "g1",
     .type = KV_ARG_SIZE,
     .offset = AT(g1),
     .value = "SIZE",
     .help = "Memory of a worker that stands for the device's. Default: 160MiB."},
    {.name = "g2",
     .type = KV_ARG_SIZE,
     .offset = AT(g2),
     .value = "SIZE",
     .help = "Host tier of a worker. Default: 320MiB."},
    {.name = "g3",
     .type = KV_ARG_SIZE,
     .offset = AT(g3),
     .value = "SIZE",
     .help = "Disk tier of a worker; 0: none. Default: 512MiB."},
    {.name = "store",
     .type = KV_ARG_STR,
     .offset = AT(store),
     .value = "URI",
     .help =
         "Object store (G4): any kv_store URI; `redis`: a redis-server of the run's own; `none`. "
         "Default: a file store in --dir."},
    {.name = "peers",
     .type = KV_ARG_CHOICE,
     .offset = AT(peers_name),
     .value = "shm|tcp|off",
     .choices = "shm|tcp|off",
     .help = "How workers read each other's blocks. Default: shm."},
    {.name = "nats",
     .type = KV_ARG_FLAG,
     .offset = AT(nats),
     .help = "Publish the events over NATS, too (needs nats-server); the indexer follows both, and "
             "both views must be right."},
    {.name = "policy",
     .type = KV_ARG_CHOICE,
     .offset = AT(policy_name),
     .value = "NAME",
     .choices = "match|round-robin|least",
     .help =
         "Routing: match (fewest blocks to compute and load, by /query, plus what the worker has "
         "to do), round-robin, or least (shortest queue). Default: match."},
    {.name = "dir",
     .type = KV_ARG_STR,
     .offset = AT(dir),
     .value = "DIR",
     .help = "Folder for disk tiers, file store, sockets and logs, which is kept. Default: one in "
             "$TMPDIR or /tmp, which is removed."},
    {.name = "indexer",
     .type = KV_ARG_STR,
     .offset = AT(indexer),
     .value = "PATH",
     .help = "The kv-indexer to start. Default: the one next to this program, or on the PATH."},
    {.name = "Faults, evenly spaced over the run", .type = KV_ARG_GROUP},
    {.name = "kill",
     .type = KV_ARG_STR,
     .offset = AT(kill),
     .value = "LIST",
     .help = "kill -9, and start again: worker, indexer, store (with --store redis), nats (with "
             "--nats); several with commas between."},
    {.name = "freeze",
     .type = KV_ARG_STR,
     .offset = AT(freeze),
     .value = "LIST",
     .help = "Stop for --freeze-time, and go on: worker, indexer."},
    {.name = "full-disk",
     .type = KV_ARG_FLAG,
     .offset = AT(full_disk),
     .help = "Let all writes to files of the workers fail for --freeze-time."},
    {.name = "freeze-time",
     .type = KV_ARG_TIME,
     .offset = AT(freeze_ms),
     .value = "TIME",
     .help = "Default: 2s."},
    {.name = "times",
     .type = KV_ARG_U64,
     .offset = AT(times),
     .value = "N",
     .min = 1,
     .max = 1000,
     .help =
         "Inject each fault N times; the run gets further rounds where it is too short. Default: "
         "1."},
    {.name = "flip",
     .type = KV_ARG_CHOICE,
     .offset = AT(flip_name),
     .value = "gathered|host",
     .choices = "gathered|host",
     .help = "For tests: each worker changes one byte in gathered memory or in its host tier. The "
             "comparison must find it, and the run fails."},
    {.name = "The report", .type = KV_ARG_GROUP},
    {.name = "prefill",
     .type = KV_ARG_U64,
     .offset = AT(prefill),
     .value = "TOKENS",
     .min = 1,
     .help = "Prompt tokens a second that an engine computes: time to first token saved is the hit "
             "tokens divided by it, less the time to load them. Default: 8000."},
    {.name = "settle",
     .type = KV_ARG_TIME,
     .offset = AT(settle_ms),
     .value = "TIME",
     .help = "Longest wait until the books agree at the end. Default: 30s."},
    {.name = "watchdog",
     .type = KV_ARG_TIME,
     .offset = AT(watchdog_ms),
     .value = "TIME",
     .min = 1000,
     .max = 86400000,
     .help =
         "Longest time that a worker may take for an answer. One that takes longer hangs: it is "
         "ended, and the run fails and says what it did last. Default: 150s."},
    {.name = "json",
     .type = KV_ARG_STR,
     .offset = AT(json),
     .value = "FILE",
     .help = "Write the figures as JSON; - for standard output, instead of the table."},
    {.name = "html",
     .type = KV_ARG_STR,
     .offset = AT(html),
     .value = "FILE",
     .help = "Write a page with plots, which needs nothing else."},
    {.name = "quiet", .type = KV_ARG_FLAG, .offset = AT(quiet), .help = "No progress."},
    {.name = "Another replay", .type = KV_ARG_GROUP},
    {.name = "only",
     .type = KV_ARG_CHOICE,
     .offset = AT(only),
     .value = "index",
     .choices = "index",
     .help = "Replay through the indexer alone, with simulated engines and no K/V bytes: see "
             "`kvasir replay --only index --help`."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir replay",
    .usage = "[OPTION ...] [TRACE.jsonl]",
    .brief = "run the whole system on a request trace, and check every byte",
    .summary =
        "Runs the whole system on a request trace (Mooncake format; without one, a generated\n"
        "workload): engine workers with real K/V bytes in four tiers, their events over ZMQ\n"
        "to a live kv-indexer, requests routed by its answers, blocks read from other workers,\n"
        "disks and a store. Every byte that is gathered is compared with what it must be, and\n"
        "at the end the books of workers, indexer and store must agree.",
    .footer =
        "Exit status: 0; 1 when a byte was wrong, the books differ, or something failed; 2 for\n"
        "a bad command line; 130 when interrupted.\n\n"
        "  kvasir replay --html report.html traces/conversation_trace.jsonl\n"
        "  kvasir replay --kill worker,indexer --freeze worker\n"
        "  kvasir replay --model deepseek-v3 --peers tcp --store redis --nats\n"
        "  kvasir replay --only index traces/conversation_trace.jsonl",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

/* Add the faults "VERB word" of a list of words to the mask. */
static int add_faults(const char *verb, const char *list, uint32_t *faults, struct kv_error *error)
{
    for (const char *at = list; at && *at; at += strcspn(at, ","), at += *at == ',') {
        size_t len = strcspn(at, ","), begin = strlen(verb) + 1;
        uint32_t found = 0;

        for (uint32_t i = 0; i < KC_N_FAULTS; i++)
            if (strncmp(kc_fault_names[i], verb, begin - 1) == 0 &&
                strlen(kc_fault_names[i]) == begin + len &&
                strncmp(kc_fault_names[i] + begin, at, len) == 0)
                found = 1u << i;
        if (!found)
            return kv_fail(error, -EINVAL, 0, "--%s: there is no '%.*s'", verb, (int)len, at);
        *faults |= found;
    }
    return 0;
}

static int check(const struct kc_whole_opts *o, const struct kv_arg_list *rest,
                 struct kv_error *error)
{
    if (rest->n > 1)
        return kv_fail(error, -EINVAL, 0, "one trace at a time: %.80s, %.80s", rest->items[0],
                       rest->items[1]);
    if (o->per_id % 16 || 512 % o->per_id)
        return kv_fail(error, -EINVAL, 0, "--per-id is 16, 32, 64, 128, 256 or 512");
    if (o->faults & 1u << KC_FAULT_KILL_NATS && !o->nats)
        return kv_fail(error, -EINVAL, 0, "--kill nats goes with --nats");
    if (o->faults & 1u << KC_FAULT_KILL_STORE && (!o->store || strcmp(o->store, "redis") != 0))
        return kv_fail(error, -EINVAL, 0,
                       "--kill store goes with --store redis: a file store has no "
                       "process; --full-disk fails its writes");
    return 0;
}

int kc_whole_options(int argc, char **argv, struct kc_whole_opts *ret, struct kv_error *error)
{
    struct kc_whole_opts o = {.model = "llama-3-8b",
                              .policy_name = "match",
                              .peers_name = "shm",
                              .requests = 90,
                              .rounds = 2,
                              .duration_ms = 40000,
                              .workers = 4,
                              .g1 = (uint64_t)160 << 20,
                              .g2 = (uint64_t)320 << 20,
                              .g3 = (uint64_t)512 << 20,
                              .per_id = 16,
                              .max_tokens = 384,
                              .steps = 4,
                              .prefill = 8000,
                              .seed = 1,
                              .settle_ms = 30000,
                              .watchdog_ms = 150000,
                              .times = 1,
                              .freeze_ms = 2000};
    struct kv_arg_list rest = {.n = 0};
    int rc = kv_args_parse(&PROGRAM, argc, argv, &o, &rest, error);

    if (rc != 0)
        return rc;
    o.faults = o.full_disk ? 1u << KC_FAULT_FULL_DISK : 0;
    rc = add_faults("kill", o.kill, &o.faults, error);
    rc = rc == 0 ? add_faults("freeze", o.freeze, &o.faults, error) : rc;
    rc = rc == 0 ? check(&o, &rest, error) : rc;
    if (rc < 0)
        return rc;
    o.trace = rest.n > 0 ? rest.items[0] : NULL;
    o.policy = strcmp(o.policy_name, "least") == 0         ? KC_ROUTE_LEAST
               : strcmp(o.policy_name, "round-robin") == 0 ? KC_ROUTE_ROUND_ROBIN
                                                           : KC_ROUTE_MATCH;
    *ret = o;
    return 0;
}
