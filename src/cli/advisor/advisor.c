// SPDX-License-Identifier: Apache-2.0
/* `kvasir advisor plan`: what kv-advisor would move, from listings, its state and recorded events. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "advisor/advice.h"
#include "advisor/index/policy.h"
#include "advisor/plan.h"
#include "advisor/state.h"
#include "base/args/args.h"
#include "base/core/xxh.h"
#include "cli/commands.h"
#include "cli/events/record.h"

struct opts {
    const char *events, *state, *policy;
    uint64_t share, reclaim_ms, prefill, block_tokens, gpu_hour_nano, pack_after_ms;
    bool json;
};

enum { SAMPLES = 65536 }; /* blobs that a curve follows */

#define AT(field) offsetof(struct opts, field)
static const struct kv_arg ARGS[] = {
    {.name = "events",
     .type = KV_ARG_STR,
     .offset = AT(events),
     .value = "FILE",
     .help =
         "Take the uses of blobs from FILE, which `kvasir events tail nats://... --record FILE` "
         "wrote."},
    {.name = "state",
     .type = KV_ARG_STR,
     .offset = AT(state),
     .value = "FILE",
     .help = "Begin with what a kv-advisor knows: the FILE of its --state."},
    {.name = "policy",
     .type = KV_ARG_CHOICE,
     .offset = AT(policy),
     .value = "NAME",
     .help = "Which blobs the fast members keep: cost (default), lru, lfu, sieve or s3fifo.",
     .choices = "cost|lru|lfu|sieve|s3fifo"},
    {.name = "share",
     .type = KV_ARG_U64,
     .offset = AT(share),
     .value = "PERCENT",
     .min = 1,
     .max = 100,
     .help = "Share of each member's capacity that blobs may fill (default 90)."},
    {.name = "reclaim-after",
     .type = KV_ARG_TIME,
     .offset = AT(reclaim_ms),
     .value = "TIME",
     .min = 1000,
     .max = UINT64_C(315360000000),
     .help = "Also delete what all publishers have removed for so long (default: nothing)."},
    {.name = "pack-after",
     .type = KV_ARG_TIME,
     .offset = AT(pack_after_ms),
     .value = "TIME",
     .min = 1000,
     .max = UINT64_C(315360000000),
     .help = "Also pack blobs of the last member that weren't used for so long (default: none)."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = AT(json),
     .help = "Print a JSON object instead of text; with --events also what more room would buy, as "
             "GET /advise of kv-advisor."},
    {.name = "prefill",
     .type = KV_ARG_U64,
     .offset = AT(prefill),
     .value = "TOKENS",
     .min = 1,
     .max = UINT32_MAX,
     .help = "Prompt tokens that a GPU computes in a second (default 8000), for that advice."},
    {.name = "block-tokens",
     .type = KV_ARG_U64,
     .offset = AT(block_tokens),
     .value = "TOKENS",
     .min = 1,
     .max = 65536,
     .help = "Tokens of a block (default 16), for that advice."},
    {.name = "gpu-hour",
     .type = KV_ARG_NANO,
     .offset = AT(gpu_hour_nano),
     .value = "PRICE",
     .help = "Price of an hour of a GPU; without it nothing is told in money."},
};

static const char SUMMARY[] =
    "Lists the members of a tiered store, and prints what kv-advisor would copy, remove and\n"
    "delete now, and what that costs. Moves nothing, and keeps no running kv-advisor away.";
static const char FOOTER[] =
    "  kvasir events tail nats://10.0.0.5:4222 --record monday.kve\n"
    "  kvasir advisor plan tiered:/etc/kvasir/kv.conf --events monday.kve\n\n"
    "Exit status: 0 printed; 1 the store or a file can't be read; 2 usage.";

static void usage(FILE *out)
{
    fprintf(out,
            "usage: kvasir advisor plan STORE [OPTION ...]\n\n"
            "  plan  print what kv-advisor would move between the members of a tiered store\n\n"
            "%s\n\n`kvasir advisor plan --help` says more. The service itself is kv-advisor.\n",
            FOOTER);
}

static const struct command {
    const char *name;
} COMMANDS[] = {{"plan"}};

/* -- events ------------------------------------------------------------------------------------ */

static void take(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    kva_feed_take(arg, header, record);
}

/* Apply all messages of a recording. Those that hold no records of the event plane are passed over. */
static int read_events(struct kva_feed *feed, const char *path, struct kv_error *error)
{
    const char *why = "";
    void *data = NULL;
    size_t len = 0, at = KC_RECORD_HEADER;
    struct kc_message message;
    long n = 1;
    int rc = kva_state_load(path, &data, &len);

    if (rc < 0)
        return kv_fail(error, rc, 0, "%.200s: %s", path, strerror(-rc));
    rc = kc_record_check(data, len, &why);
    while (rc == 0 && n > 0) {
        n = kc_record_read((const uint8_t *)data + at, len - at, &message, &why);
        if (n > 0 && message.n_frames)
            (void)kvp_read(message.frames[message.n_frames - 1].data,
                           message.frames[message.n_frames - 1].len, NULL, take, feed);
        rc = n < 0 ? (int)n : 0;
        at += n > 0 ? (size_t)n : 0;
    }
    kva_feed_flush(feed);
    free(data);
    return rc < 0 ? kv_fail(error, rc, 0, "%.200s: %s", path, why) : 0;
}

/* -- the plan ---------------------------------------------------------------------------------- */

static int read_state(const struct opts *opts, const struct kva_volumes *volumes,
                      struct kva_index *index, struct kv_error *error)
{
    void *data = NULL;
    size_t len = 0;
    long rc = kva_state_load(opts->state, &data, &len);

    if (rc == 0)
        rc = kva_state_read(index, kva_volumes_id(volumes), opts->policy, data, len);
    free(data);
    return rc < 0 ? kv_fail(error, (int)rc, 0, "%.200s: %s", opts->state,
                            rc == -ESTALE            ? "it is of other members"
                            : rc == -EBADMSG         ? "no state of kv-advisor, or a damaged one"
                            : rc == -EPROTONOSUPPORT ? "it is of a later version of kv-advisor"
                                                     : strerror((int)-rc))
                  : 0;
}

static int learn(const struct opts *opts, struct kva_volumes *volumes, struct kva_world *world,
                 struct kva_advice **ret_advice, struct kv_error *error)
{
    struct kva_index_opts index = {.policy = kva_policy_find(opts->policy)};
    atomic_bool stop = false;
    int rc;

    kva_volumes_index_opts(volumes, (unsigned)opts->share, &index);
    rc = kva_index_create(&index, &world->index);
    if (rc == 0)
        rc = kva_feed_create(world->index, &world->feed);
    if (rc == 0)
        rc = kva_advice_create(SAMPLES, ret_advice);
    if (rc == 0)
        kva_feed_set_advice(world->feed, *ret_advice);
    if (rc < 0)
        return kv_fail(error, rc, 0, "%s",
                       rc == -EINVAL ? "no member may be written to" : strerror(-rc));
    if (opts->state)
        rc = read_state(opts, volumes, world->index, error);
    if (rc == 0 && opts->events)
        rc = read_events(world->feed, opts->events, error);
    if (rc == 0 && kva_volumes_scan(volumes, world, &stop) <= 0)
        rc = kv_fail(error, -EIO, 0, "no member can be listed");
    return rc;
}

static void print(const struct opts *opts, struct kva_volumes *volumes, struct kva_world *world,
                  const struct kva_advice *advice)
{
    const struct kva_advice_terms terms = {.prefill = (double)opts->prefill,
                                           .gpu_hour = (double)opts->gpu_hour_nano / 1e9,
                                           .block_tokens = (double)opts->block_tokens,
                                           .share = (unsigned)opts->share};
    const struct kva_packing packing = {.idle_s = (uint32_t)(opts->pack_after_ms / 1000)};
    struct kva_index_stats stats;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_json_writer w;
    struct kva_plan plan;

    kva_plan_make(volumes, world, (uint32_t)(opts->reclaim_ms / 1000), &packing, &plan);
    kva_index_get_stats(world->index, &stats);
    if (opts->json) {
        kv_json_writer_init(&w, &out);
        kv_json_begin_object(&w);
        kva_plan_json(volumes, &stats, &plan, &w);
        if (opts->events)
            kva_advice_json(advice, volumes, &terms, &w);
        kv_json_end_object(&w);
        kv_buf_putc(&out, '\n');
    } else {
        kva_plan_text(volumes, &stats, &plan, &out);
    }
    fwrite(out.data, 1, out.len, stdout);
    kv_buf_fini(&out);
}

static int run(const struct opts *opts, const char *path, struct kv_error *error)
{
    const struct kva_volumes_opts look = {.path = path, .look_only = true};
    struct kva_world world = {.index = NULL};
    struct kva_advice *advice = NULL;
    struct kva_volumes volumes;
    int rc = kva_volumes_open(&look, &volumes, error);

    if (rc < 0)
        return rc;
    pthread_mutex_init(&world.lock, NULL);
    rc = learn(opts, &volumes, &world, &advice, error);
    if (rc == 0)
        print(opts, &volumes, &world, advice);
    kva_feed_destroy(world.feed);
    kva_advice_destroy(advice);
    kva_index_destroy(world.index);
    kva_volumes_close(&volumes);
    pthread_mutex_destroy(&world.lock);
    if (rc == 0 && fflush(stdout))
        rc = kv_fail(error, -EIO, 0, "can't write standard output");
    return rc;
}

static int plan_main(int argc, char **argv)
{
    const struct kv_args_program program = {.name = "kvasir advisor plan",
                                            .usage = "STORE [OPTION ...]",
                                            .brief = "print what kv-advisor would move",
                                            .summary = SUMMARY,
                                            .footer = FOOTER,
                                            .args = ARGS,
                                            .n_args = KV_COUNT(ARGS)};
    struct opts opts = {.policy = "cost", .share = 90, .prefill = 8000, .block_tokens = 16};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    const char *path = NULL;
    int rc = kv_args_parse(&program, argc, argv, &opts, &rest, &error), status = 2;

    if (rc > 0)
        return 0;
    if (rc == 0 && rest.n == 1)
        path = *rest.items[0] == '/' ? rest.items[0] : trd_config_path(rest.items[0]);
    if (rc == 0 && !path)
        rc = kv_fail(&error, -EINVAL, 0, "wants a tiered store: tiered:/FILE; --help says more");
    if (rc == 0) {
        rc = run(&opts, path, &error);
        status = rc < 0;
    }
    if (rc < 0)
        fprintf(stderr, "kvasir advisor plan: %s\n", error.text);
    return status;
}

int kc_advisor_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir advisor", COMMANDS, KV_COUNT(COMMANDS),
                                          sizeof(COMMANDS[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : plan_main(argc - 1, argv + 1);
}
