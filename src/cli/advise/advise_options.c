// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "cli/advise/advise.h"

#define AT(field) offsetof(struct kc_advise_opts, field)

static const struct kv_arg ARGS[] = {
    {.name = "The cache", .type = KV_ARG_GROUP},
    {.name = "tier",
     .type = KV_ARG_LIST,
     .offset = AT(tier_texts),
     .value = "NAME=SIZE[:PRICE]",
     .help = "A tier there is or might be, from the fastest to the slowest: --tier hbm=40GiB "
             "--tier dram=1TiB:2.5. PRICE is that of a GiB in a month, in the currency of "
             "--gpu-hour. May be given repeatedly."},
    {.name = "token-bytes",
     .type = KV_ARG_SIZE,
     .offset = AT(token_bytes),
     .value = "SIZE",
     .min = 1,
     .max = UINT64_C(1) << 40,
     .help = "K and V of one token, in all layers, on all ranks together. Default: 128KiB, as of "
             "Llama 3.1 8B in 16 bits (32 layers x 8 heads x 128 x 2 x 2 bytes)."},
    {.name = "The engine", .type = KV_ARG_GROUP},
    {.name = "prefill",
     .type = KV_ARG_U64,
     .offset = AT(prefill),
     .value = "TOKENS",
     .min = 1,
     .max = UINT32_MAX,
     .help = "Prompt tokens that a GPU computes in a second. Default: 8000."},
    {.name = "gpu-hour",
     .type = KV_ARG_NANO,
     .offset = AT(gpu_hour),
     .value = "PRICE",
     .help = "Price of an hour of a GPU; without it nothing is told in money."},
    {.name = "The curve", .type = KV_ARG_GROUP},
    {.name = "samples",
     .type = KV_ARG_U64,
     .offset = AT(samples),
     .value = "N",
     .max = KVA_MAX_SAMPLES,
     .help = "Blocks that are followed at a time, of more a fair sample; 0: all. Default: 65536."},
    {.name = "seed",
     .type = KV_ARG_U64,
     .offset = AT(seed),
     .value = "N",
     .help = "Seed of the generated workload. Default: 1."},
    {.name = "What is written", .type = KV_ARG_GROUP},
    {.name = "json",
     .type = KV_ARG_STR,
     .offset = AT(json),
     .value = "FILE",
     .help = "Write the figures as JSON; - for standard output, instead of the report."},
    {.name = "svg",
     .type = KV_ARG_STR,
     .offset = AT(svg),
     .value = "FILE",
     .help = "Draw the curve."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir advise",
    .usage = "[OPTION ...] [TRACE.jsonl]",
    .brief = "what more room for the KV cache would bring",
    .summary = "Reads a trace of requests (Mooncake format, - for standard input; without one, a\n"
               "generated workload) and tells for every capacity of a prefix cache which share of\n"
               "the prompts' blocks it would find, how many tokens and how much GPU time that\n"
               "saves, and what the next GiB would bring; for each tier what it brings, and which\n"
               "size pays most.",
    .footer = "Exit status: 0; 1 when the trace can't be read or a file not written; 2 for a bad\n"
              "command line.\n\n"
              "  kvasir advise trace.jsonl\n"
              "  kvasir advise --gpu-hour 2.5 --tier hbm=40GiB --tier dram=1TiB:2.5 trace.jsonl\n"
              "  kvasir advise --svg curve.svg --json - trace.jsonl",
    .env = "KVASIR_ADVISE",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

/* Parse NAME=SIZE[:PRICE]. */
static int parse_tier(const char *text, struct kc_advise_tier *ret, struct kv_error *error)
{
    const char *is = strchr(text, '='), *colon = is ? strchr(is, ':') : NULL;
    size_t name = is ? (size_t)(is - text) : 0;
    size_t size = is ? (colon ? (size_t)(colon - is - 1) : strlen(is + 1)) : 0;
    char bytes[32];
    uint64_t nano = 0;

    *ret = (struct kc_advise_tier){.bytes = 0};
    if (name == 0 || name >= sizeof(ret->name) || size == 0 || size >= sizeof(bytes))
        return kv_fail(error, -EINVAL, 0, "--tier %.60s: NAME=SIZE or NAME=SIZE:PRICE is expected",
                       text);
    memcpy(ret->name, text, name);
    memcpy(bytes, is + 1, size);
    bytes[size] = 0;
    if (kv_parse_size(bytes, &ret->bytes) < 0 || ret->bytes > UINT64_C(1) << 60)
        return kv_fail(error, -EINVAL, 0, "--tier %.60s: %s is no size", text, bytes);
    if (colon && kv_parse_nano(colon + 1, &nano) < 0)
        return kv_fail(error, -EINVAL, 0, "--tier %.60s: %.30s is no price", text, colon + 1);
    ret->price = (double)nano / 1e9;
    return 0;
}

static int parse_tiers(struct kc_advice *advice, struct kv_error *error)
{
    const struct kv_arg_list *texts = &advice->opts.tier_texts;

    if (texts->n > KC_ADVISE_MAX_TIERS)
        return kv_fail(error, -EINVAL, 0, "more than %d tiers", KC_ADVISE_MAX_TIERS);
    for (size_t i = 0; i < texts->n; i++) {
        struct kc_advise_tier *tier = &advice->tiers[i];
        int rc = parse_tier(texts->items[i], tier, error);

        if (rc < 0)
            return rc;
        for (size_t k = 0; k < i; k++)
            if (strcmp(advice->tiers[k].name, tier->name) == 0)
                return kv_fail(error, -EINVAL, 0, "two tiers are called %s", tier->name);
        advice->n_tiers++;
    }
    return 0;
}

int kc_advise_options(int argc, char **argv, struct kc_advice *ret, struct kv_error *error)
{
    struct kv_arg_list rest = {.n = 0};
    int rc;

    *ret = (struct kc_advice){
        .opts = {.samples = 65536, .token_bytes = 128 << 10, .prefill = 8000, .seed = 1}};
    rc = kv_args_parse(&PROGRAM, argc, argv, &ret->opts, &rest, error);
    if (rc != 0)
        return rc;
    if (rest.n > 1)
        return kv_fail(error, -EINVAL, 0, "one trace at a time: %.80s, %.80s", rest.items[0],
                       rest.items[1]);
    ret->opts.trace = rest.n ? rest.items[0] : NULL;
    return parse_tiers(ret, error);
}
