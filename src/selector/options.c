// SPDX-License-Identifier: Apache-2.0
#include "selector/options.h"

#include "kv_select.h"
#include "selector/envoy.h"

#define AT(field) offsetof(struct ksel_options, field)

static const struct kv_arg arguments[] = {
    {.name = "Choosing", .type = KV_ARG_GROUP},
    {"policy", KV_ARG_CHOICE, AT(policy), "NAME",
     "Policy that weighs the workers: adaptive (default), dynamo, least, round-robin, scored, "
     "prefix or cache-aware. A request may name another one.",
     0, 0, "adaptive|dynamo|least|round-robin|scored|prefix|cache-aware", false},
    {"partial-trust", KV_ARG_NANO, AT(partial_trust), "SHARE",
     "Share of a prompt's match that counts at a worker without a live event stream, which is one "
     "without a connection for --stale-after (default 0.5).",
     0, UINT64_C(1000000000), NULL, false},
    {"predict", KV_ARG_TIME, AT(predict_ms), "TIME",
     "Time for which a chosen worker counts as holding the prompt before its events say so "
     "(default 2s; 0: never).",
     0, 3600000, NULL, false},
    {"booking-expiry", KV_ARG_TIME, AT(booking_expiry_ms), "TIME",
     "Free a booking without progress for this time, and count and log it (default 300s). "
     "Progress is prefill_complete and output_block.",
     1, 86400000, NULL, false},
    {"max-bookings", KV_ARG_U64, AT(max_bookings), "N",
     "Bookings of a model at a time; beyond, answer 503 (default 1048576).", 1, 1 << 28, NULL,
     false},
    {"max-waiting", KV_ARG_U64, AT(max_waiting), "TOKENS",
     "Answer 429 while each worker that fits the request has so many tokens to compute before "
     "their "
     "first token (default 0: never).",
     0, UINT64_C(1) << 40, NULL, false},
    {"session-affinity", KV_ARG_TIME, AT(session_ms), "TIME",
     "Keep the requests of a session_id at one worker for this time after each booking, unless "
     "that worker is overloaded (default 0: no affinity).",
     0, UINT64_C(31536000000), NULL, false},
    {"selection-cache-ttl", KV_ARG_TIME, AT(cache_ms), "TIME",
     "Time for which POST /reservations can book the choice of an earlier /select by its id alone "
     "(default 120s; 0: never).",
     0, 86400000, NULL, false},
    {"selection-cache-max-entries", KV_ARG_U64, AT(cache_entries), "N",
     "Choices of /select that are kept for that (default 4096); the oldest make room.", 1, 1 << 24,
     NULL, false},
    {"decision-log", KV_ARG_STR, AT(decision_log), "FILE",
     "Append a JSON line to FILE for each decision: all candidates with their terms, and who was "
     "left out and why; and for each first token and end. kvasir select replay reads it. POST "
     "/reopen_logs or SIGHUP after a rotation.",
     0, 0, NULL, false},
    {"decision-sample", KV_ARG_U64, AT(decision_sample), "N",
     "Log one of N requests, by a hash of its id (default 1: all).", 1, 1 << 30, NULL, false},
    {.name = "Envoy", .type = KV_ARG_GROUP},
    {"ext-proc", KV_ARG_STR, AT(ext_proc), "HOST:PORT",
     "Serve Envoy's external processing there (gRPC without TLS), and grpc.health.v1: an endpoint "
     "picker of the Gateway API Inference Extension.",
     0, 0, NULL, false},
    {"ext-proc-insecure", KV_ARG_FLAG, AT(ext_proc_insecure), NULL,
     "Let --ext-proc listen on other than loopback addresses: every machine that reaches it may "
     "use it.",
     0, 0, NULL, false},
    {"ext-proc-fallbacks", KV_ARG_U64, AT(ext_proc_fallbacks), "N",
     "Name so many further workers behind the chosen one, for Envoy's override_host policy and its "
     "retries (default 0: clusters of the kind ORIGINAL_DST take one alone).",
     0, 8, NULL, false},
    {"ext-proc-model", KV_ARG_STR, AT(ext_proc_model), "NAME",
     "Model whose workers take the requests that name none, or one that isn't registered: an "
     "adapter of it (default: the only model there is).",
     0, 0, NULL, false},
    {"ext-proc-target-port", KV_ARG_U64, AT(ext_proc_target_port), "PORT",
     "Port of the workers whose record has no endpoint, at the address of their event stream.", 1,
     65535, NULL, false},
    {"ext-proc-tokenizer", KV_ARG_STR, AT(ext_proc_tokenizer), "URL",
     "Engine whose /tokenize turns prompts into token ids: a URL, workers (default: by turns) or "
     "none (the load alone decides).",
     0, 0, NULL, false},
    {"ext-proc-tokenize-timeout", KV_ARG_TIME, AT(ext_proc_tokenize_ms), "TIME",
     "Time after which a request is routed by the load alone (default 200ms).", 1, 60000, NULL,
     false},
};

static const char summary[] =
    "Chooses the LLM worker for each prompt and books it: a kv-indexer, whose endpoints it has\n"
    "all, with the selection API of Dynamo's select service beside them.";

static const char footer[] =
    "Examples:\n"
    "  kv-selector\n"
    "      Start empty on port 8092; workers are added with POST /workers or /register.\n"
    "  kv-selector --block-size 16 --model-name llama --workers 1=tcp://w1:5557,2=tcp://w2:5557\n"
    "      Choose between two workers, which the router knows as 1 and 2.\n"
    "  curl localhost:8092/select_and_reserve -H 'Content-Type: application/json' \\\n"
    "       -d '{\"model_name\":\"llama\",\"selection_id\":\"r1\",\"token_ids\":[1,2,3]}'\n"
    "  curl -X POST localhost:8092/reservations/r1/prefill_complete\n"
    "  curl -X DELETE localhost:8092/reservations/r1\n"
    "      Choose and book, tell of the first token, and of the end.\n"
    "\n"
    "TIME is a number with ms, s, m, h or d; a bare number is seconds. Signals, limits and memory\n"
    "are those of kv-indexer(1); a booking takes about 300 bytes and 2 for each 16 tokens.\n";

static void defaults(struct ki_options *options)
{
    struct ksel_options *o = (struct ksel_options *)options;

    options->port = 8092;
    o->policy = "adaptive";
    o->partial_trust = UINT64_C(500000000);
    o->predict_ms = 2000;
    o->booking_expiry_ms = 300000;
    o->max_bookings = 1 << 20;
    o->cache_ms = 120000;
    o->cache_entries = 4096;
    o->decision_sample = 1;
    o->ext_proc_tokenizer = "workers";
    o->ext_proc_tokenize_ms = 200;
}

static int check(const struct ki_options *options, struct kv_error *error)
{
    const struct ksel_options *o = (const struct ksel_options *)options;

    if (o->decision_log && !*o->decision_log)
        return kv_fail(error, -EINVAL, 0, "--decision-log: the name of a file is missing");
    return ksel_envoy_check(o, error);
}

const struct ki_program ksel_program = {
    .name = "kv-selector",
    .brief = "choose the LLM worker for each prompt, and book it",
    .summary = summary,
    .footer = footer,
    .env = "KV_SELECTOR",
    .port = "8092",
    .args = arguments,
    .n_args = KV_COUNT(arguments),
    .size = sizeof(struct ksel_options),
    .defaults = defaults,
    .check = check,
};
