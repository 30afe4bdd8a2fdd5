// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/replay_options.h"

#include <inttypes.h>
#include <string.h>

#include "base/args/args.h"
#include "cli/replay/trace.h"

#define AT(field) offsetof(struct kc_replay_opts, field)
#define DEFAULT_WORKER_TOKENS (UINT64_C(1) << 20)

static const struct kv_arg ARGS[] = {
    {.name = "The workload", .type = KV_ARG_GROUP},
    {.name = "requests",
     .type = KV_ARG_U64,
     .offset = AT(requests),
     .value = "N",
     .help = "Stop after N requests. A trace shorter than that starts over, each time with new "
             "prompts of the same shape. Default: the trace once."},
    {.name = "seconds",
     .type = KV_ARG_U64,
     .offset = AT(seconds),
     .value = "N",
     .help = "Stop after N seconds, starting over as often as it takes."},
    {.name = "rate",
     .type = KV_ARG_U64,
     .offset = AT(rate),
     .value = "N",
     .max = 1000000,
     .help = "Replay N times as fast as the trace happened. Default: as fast as possible."},
    {.name = "seed",
     .type = KV_ARG_U64,
     .offset = AT(seed),
     .value = "N",
     .help = "Seed of the generator, of random routing and of the choice of prompts to verify. "
             "Default: 1."},
    {.name = "The cluster", .type = KV_ARG_GROUP},
    {.name = "workers",
     .type = KV_ARG_U64,
     .offset = AT(workers),
     .value = "N",
     .min = 1,
     .max = KC_MAX_WORKERS,
     .help = "Simulated engines. Default: 8."},
    {.name = "blocks",
     .type = KV_ARG_U64,
     .offset = AT(blocks),
     .value = "N",
     .max = UINT64_MAX,
     .help =
         "Blocks that each worker's cache holds, 0: unlimited. Default: as many as hold 1048576 "
         "tokens."},
    {.name = "block-size",
     .type = KV_ARG_U64,
     .offset = AT(block_size),
     .value = "TOKENS",
     .min = 16,
     .max = KC_TRACE_BLOCK,
     .help = "Tokens per block of the engines: 16, 32, 64, 128, 256 or 512. Default: 16."},
    {.name = "policy",
     .type = KV_ARG_CHOICE,
     .offset = AT(policy_name),
     .value = "NAME",
     .choices = "prefix|round-robin|random",
     .help = "Routing: prefix (least work, counting cached blocks as the indexer answers; "
             "docs/replay.md has the formula), round-robin or random. Default: prefix."},
    {.name = "prefill",
     .type = KV_ARG_U64,
     .offset = AT(prefill),
     .value = "TOKENS",
     .min = 1,
     .max = UINT32_MAX,
     .help = "Tokens per second that a worker computes; sets how load counts against overlap. "
             "Default: 8000."},
    {.name = "own-hashes",
     .type = KV_ARG_FLAG,
     .offset = AT(own_hashes),
     .help = "Each worker names blocks by hashes of its own, like engines with different seeds."},
    {.name = "replay-buffer",
     .type = KV_ARG_U64,
     .offset = AT(buffer_batches),
     .value = "BATCHES",
     .min = 1,
     .max = UINT32_MAX,
     .help =
         "Event batches that each worker keeps for the indexer to ask for again. Default: 1000."},
    {.name = "The indexer", .type = KV_ARG_GROUP},
    {.name = "indexer",
     .type = KV_ARG_STR,
     .offset = AT(indexer),
     .value = "PATH",
     .help =
         "The kv-indexer to start, with default options: KV_INDEXER_* and DYN_* variables don't "
         "reach it. Default: the one next to this program, else on the PATH."},
    {.name = "url",
     .type = KV_ARG_STR,
     .offset = AT(url),
     .value = "URL",
     .help =
         "Use a running kv-indexer instead of starting one. Workers and queries are of a tenant "
         "of this run alone; other workers, also of the same model, are left as they are."},
    {.name = "auth-token-file",
     .type = KV_ARG_STR,
     .offset = AT(auth_token_file),
     .value = "FILE",
     .help = "Send the first line of FILE to the indexer as bearer token."},
    {.name = "cacert",
     .type = KV_ARG_STR,
     .offset = AT(cacert),
     .value = "FILE",
     .help = "Trust the indexer by the PEM authorities in FILE instead of the system's."},
    {.name = "model",
     .type = KV_ARG_STR,
     .offset = AT(model),
     .value = "NAME",
     .help = "Model name to register under. Default: kvasir-replay."},
    {.name = "clients",
     .type = KV_ARG_U64,
     .offset = AT(clients),
     .value = "N",
     .min = 1,
     .max = 64,
     .help = "Requests in flight at a time. With one, the run is repeatable. Default: 1."},
    {.name = "msgpack",
     .type = KV_ARG_FLAG,
     .offset = AT(msgpack),
     .help = "Send /query bodies as msgpack instead of JSON."},
    {.name = "What is checked and shown", .type = KV_ARG_GROUP},
    {.name = "verify",
     .type = KV_ARG_U64,
     .offset = AT(verify),
     .value = "N",
     .max = 1000000,
     .help = "At the end, compare the indexer with the truth for N prompts and all workers. "
             "Default: 256."},
    {.name = "settle",
     .type = KV_ARG_TIME,
     .offset = AT(settle_ms),
     .value = "TIME",
     .help = "Longest wait until the two are equal. Default: 10s."},
    {.name = "lockstep",
     .type = KV_ARG_FLAG,
     .offset = AT(lockstep),
     .help = "Let the indexer catch up after every request: then every answer must be exact, and "
             "one that isn't makes the run fail."},
    {.name = "check-hits",
     .type = KV_ARG_FLAG,
     .offset = AT(check_hits),
     .help = "No indexer: hit fractions of one cache of several sizes, compared with the published "
             "ones when the trace is known."},
    {.name = "json",
     .type = KV_ARG_STR,
     .offset = AT(json),
     .value = "FILE",
     .help = "Write the figures as JSON; - for standard output, instead of the table."},
    {.name = "quiet", .type = KV_ARG_FLAG, .offset = AT(quiet), .help = "No progress."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir replay --only index",
    .usage = "[OPTION ...] [TRACE.jsonl]",
    .brief = "replay a request trace through a live kv-indexer alone, and check it",
    .summary = "Replays a request trace (Mooncake format; without one, a generated workload)\n"
               "through a live kv-indexer: simulated engines publish the events of their caches\n"
               "over ZMQ, every request asks /query and goes where the answer says, and what\n"
               "that worker then really holds is compared with the answer.",
    .footer = "Exit status: 0; 1 when something failed or the final state is wrong; 2 for a bad\n"
              "command line; 130 when interrupted.\n\n"
              "  kvasir replay --only index traces/conversation_trace.jsonl\n"
              "  kvasir replay --only index --requests 2000 --policy random\n"
              "  kvasir replay --only index --url http://127.0.0.1:8090 --rate 60 trace.jsonl\n"
              "  kvasir replay --only index --check-hits trace.jsonl",
    .env = "KVASIR_REPLAY",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

static int check(const struct kc_replay_opts *opts, const struct kv_arg_list *rest,
                 struct kv_error *error)
{
    if (rest->n > 1)
        return kv_fail(error, -EINVAL, 0, "one trace at a time: %.80s, %.80s", rest->items[0],
                       rest->items[1]);
    if (KC_TRACE_BLOCK % opts->block_size != 0)
        return kv_fail(error, -EINVAL, 0, "--block-size %" PRIu64 " does not divide %d",
                       opts->block_size, KC_TRACE_BLOCK);
    if (opts->url && opts->indexer)
        return kv_fail(error, -EINVAL, 0, "--url and --indexer: one or the other");
    if (opts->auth_token_file && !opts->url)
        return kv_fail(error, -EINVAL, 0, "--auth-token-file needs --url");
    if (opts->cacert && !opts->url)
        return kv_fail(error, -EINVAL, 0, "--cacert needs --url");
    if (opts->check_hits && (opts->url || opts->indexer || opts->json))
        return kv_fail(error, -EINVAL, 0, "--check-hits goes without --url, --indexer and --json");
    if (opts->lockstep && opts->clients > 1)
        return kv_fail(error, -EINVAL, 0, "--lockstep needs --clients 1");
    return 0;
}

int kc_replay_options(int argc, char **argv, struct kc_replay_opts *ret, struct kv_error *error)
{
    struct kc_replay_opts opts = {
        .model = "kvasir-replay",
        .policy_name = "prefix",
        .workers = 8,
        .blocks = UINT64_MAX,
        .block_size = 16,
        .clients = 1,
        .prefill = 8000,
        .seed = 1,
        .verify = 256,
        .settle_ms = 10000,
        .buffer_batches = 1000,
    };
    struct kv_arg_list rest = {.n = 0};
    int rc = kv_args_parse(&PROGRAM, argc, argv, &opts, &rest, error);

    if (rc != 0)
        return rc;
    rc = check(&opts, &rest, error);
    if (rc == 0 && opts.auth_token_file)
        rc = kc_token_read(opts.auth_token_file, opts.token, error);
    if (rc < 0)
        return rc;
    opts.trace = rest.n > 0 ? rest.items[0] : NULL;
    opts.policy = strcmp(opts.policy_name, "random") == 0        ? KC_RANDOM
                  : strcmp(opts.policy_name, "round-robin") == 0 ? KC_ROUND_ROBIN
                                                                 : KC_PREFIX;
    if (opts.blocks == UINT64_MAX)
        opts.blocks = DEFAULT_WORKER_TOKENS / opts.block_size;
    *ret = opts;
    return 0;
}
