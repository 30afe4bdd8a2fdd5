// SPDX-License-Identifier: Apache-2.0
/* `kvasir select`: parse, play, print. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/args.h"
#include "base/json/json.h"
#include "cli/commands.h"
#include "cli/select/select.h"

#define MAX_POLICIES 16
#define DEFAULT_SPEED 8000.0

struct opts {
    struct kv_arg_list policies;
    uint64_t speed, predict_ms, seed;
    bool json;
};

#define AT(field) offsetof(struct opts, field)

static const struct kv_arg ARGS[] = {
    {.name = "policy",
     .type = KV_ARG_LIST,
     .offset = AT(policies),
     .value = "NAMES",
     .help = "Policies to play, separated by commas: adaptive, dynamo, least, round-robin, scored, "
             "prefix, cache-aware. May be given repeatedly. Default: all."},
    {.name = "speed",
     .type = KV_ARG_U64,
     .offset = AT(speed),
     .value = "TOKENS",
     .min = 1,
     .max = UINT32_MAX,
     .help = "Prompt tokens that a worker computes in a second. Default: the median of the log, or "
             "8000 where it has no first tokens."},
    {.name = "predict",
     .type = KV_ARG_TIME,
     .offset = AT(predict_ms),
     .value = "TIME",
     .max = 3600000,
     .help = "Time for which a chosen worker counts as holding the prompt. Default: 2s."},
    {.name = "seed",
     .type = KV_ARG_U64,
     .offset = AT(seed),
     .value = "N",
     .help = "Seed of draws between equal workers. Default: 1."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = AT(json),
     .help = "Print JSON objects, one a line, instead of the table."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir select replay",
    .usage = "LOG [OPTION ...]",
    .brief = "play a decision log of kv-selector with other policies",
    .summary =
        "Reads what kv-selector --decision-log has written (- for standard input), lets each\n"
        "policy choose for the same requests at the same times, and prints a line for each:\n"
        "time to the first token, tokens computed, how even the work is, and how often the\n"
        "choice was the logged one. The first line is of the choices as logged.",
    .footer =
        "A worker computes prompts one after the other. What it holds is what the log says,\n"
        "and what a policy has booked there within --predict.\n\n"
        "Exit status: 0; 1 when the log can't be read or has no booked decision; 2 for a bad\n"
        "command line.\n\n"
        "  kvasir select replay decisions.log --policy adaptive,dynamo",
    .env = "KVASIR_SELECT",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

static bool is_policy(const char *name)
{
    for (size_t i = 0; kvsel_policy_name(i); i++)
        if (strcmp(kvsel_policy_name(i), name) == 0)
            return true;
    return false;
}

/* Copy the names of all policies to play to @ret. Returns their number, or -EINVAL. */
static long list_policies(const struct opts *opts, char ret[MAX_POLICIES][32],
                          struct kv_error *error)
{
    long n = 0;

    for (size_t i = 0; i < opts->policies.n; i++)
        for (const char *at = opts->policies.items[i]; *at; at += strspn(at, ",")) {
            size_t len = strcspn(at, ",");

            if (n == MAX_POLICIES)
                return kv_fail(error, -EINVAL, 0, "--policy: too many");
            (void)snprintf(ret[n], 32, "%.*s", (int)KV_MIN(len, (size_t)31), at);
            if (len > 31 || !is_policy(ret[n]))
                return kv_fail(error, -EINVAL, 0, "--policy: no policy is called '%.31s'", ret[n]);
            n++;
            at += len;
        }
    for (size_t i = 0; opts->policies.n == 0 && kvsel_policy_name(i) && n < MAX_POLICIES; i++)
        (void)snprintf(ret[n++], 32, "%s", kvsel_policy_name(i));
    return n;
}

static void print(const struct opts *opts, const char *name, const struct kc_select_result *r)
{
    double same = 100.0 * (double)r->same / (double)r->n;

    if (opts->json)
        printf("{\"policy\":\"%s\",\"decisions\":%zu,\"mean_ttft_s\":%.4f,\"p99_ttft_s\":%.4f,"
               "\"computed_share\":%.4f,\"imbalance\":%.3f,\"as_logged_percent\":%.1f}\n",
               name, r->n, r->mean_ttft, r->p99_ttft, r->computed, r->imbalance, same);
    else
        printf("%-12s %10.3f %10.3f %9.1f%% %10.2f %9.1f%%\n", name, r->mean_ttft, r->p99_ttft,
               100 * r->computed, r->imbalance, same);
}

static void print_head(const struct opts *opts, const struct kc_select_log *log, double speed)
{
    if (opts->json)
        return;
    printf("%zu booked decisions, %zu without a booking, %zu lines that can't be read; "
           "%.0f tokens/s\n\n%-12s %10s %10s %10s %10s %10s\n",
           log->n, log->unbooked, log->unread, speed, "policy", "TTFT, s", "p99, s", "computed",
           "imbalance", "as logged");
}

static int play_all(const struct opts *opts, const struct kc_select_log *log,
                    char policies[MAX_POLICIES][32], long n)
{
    double speed = opts->speed ? (double)opts->speed : kc_select_log_speed(log);
    struct kc_select_settings settings = {.speed = speed > 0 ? speed : DEFAULT_SPEED,
                                          .predict_ms = opts->predict_ms,
                                          .seed = opts->seed};
    struct kc_select_result result;
    int rc = 0;

    print_head(opts, log, settings.speed);
    for (long i = -1; i < n && rc == 0; i++) {
        rc = kc_select_play(log, i < 0 ? NULL : policies[i], &settings, &result);
        if (rc == 0)
            print(opts, i < 0 ? "(logged)" : policies[i], &result);
    }
    return rc;
}

static int replay_main(int argc, char **argv)
{
    static char policies[MAX_POLICIES][32];
    struct opts opts = {.predict_ms = 2000, .seed = 1};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    struct kc_select_log log;
    long n;
    int rc = kv_args_parse(&PROGRAM, argc, argv, &opts, &rest, &error);

    if (rc > 0)
        return 0;
    n = rc < 0 ? rc : list_policies(&opts, policies, &error);
    if (n >= 0 && rest.n != 1)
        n = kv_fail(&error, -EINVAL, 0, "the name of one LOG is expected");
    if (n < 0) {
        fprintf(stderr, "kvasir select replay: %s\nTry kvasir select replay --help.\n", error.text);
        return 2;
    }
    rc = kc_select_log_read(rest.items[0], &log, &error);
    if (rc == 0 && !log.n)
        rc = kv_fail(&error, -ENODATA, 0, "%.200s: no booked decision in %zu lines", rest.items[0],
                     log.lines);
    if (rc == 0)
        rc = play_all(&opts, &log, policies, n);
    kc_select_log_fini(&log);
    if (rc < 0)
        fprintf(stderr, "kvasir select replay: %s\n", error.text[0] ? error.text : strerror(-rc));
    return rc < 0;
}

static const struct {
    const char *name;
} COMMANDS[] = {{"replay"}};

static void usage(FILE *out)
{
    fputs("usage: kvasir select COMMAND [OPTION ...]\n\n"
          "  replay LOG   play a decision log of kv-selector with other policies\n\n"
          "`kvasir select COMMAND --help` says more.\n",
          out);
}

int kc_select_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir select", COMMANDS, KV_COUNT(COMMANDS),
                                          sizeof(COMMANDS[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : replay_main(argc - 1, argv + 1);
}
