// SPDX-License-Identifier: Apache-2.0
#include <curl/curl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/args/args.h"
#include "cli/commands.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} COMMANDS[] = {
    {"advise", kc_advise_main, "tell what more room for the cache would bring, from a trace"},
    {"advisor", kc_advisor_main, "tell what kv-advisor would move in a tiered store"},
    {"bench", kc_bench_main, "move blocks through tiers, or from another process, and time it"},
    {"doctor", kc_doctor_main, "ask a kv-indexer and an engine what is wrong, and say what to do"},
    {"events", kc_events_main, "look at KV events of an engine, record them, play them again"},
    {"peer", kc_peer_main, "share blocks with other nodes; look at, lease and read theirs"},
    {"replay", kc_replay_main, "run the whole system on a request trace, and check every byte"},
    {"select", kc_select_main, "play kv-selector's decisions with other policies"},
    {"store", kc_store_main, "save, restore, check and collect objects in a kv_store backend"},
    {"top", kc_top_main, "watch a running kv-indexer: its workers, streams and index"},
};

#define N_COMMANDS KV_COUNT(COMMANDS)

static void usage(FILE *out)
{
    fputs("usage: kvasir COMMAND [OPTION ...]\n\n", out);
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-8s %s\n", COMMANDS[i].name, COMMANDS[i].help);
    fputs("\n`kvasir COMMAND --help` says more. The services themselves are kv-indexer and "
          "kv-selector.\n",
          out);
}

static bool is(const char *word, const char *name, const char *other)
{
    return strcmp(word, name) == 0 || strcmp(word, other) == 0;
}

/* Print words for completions, one a line. */
static void print_words(void)
{
    for (size_t i = 0; i < N_COMMANDS; i++)
        puts(COMMANDS[i].name);
    fputs("help\n--help\n--version\n", stdout);
}

/* Answer --version, help and the lists for completions. Returns false for any other argv[1]. */
static bool answer(int argc, char **argv)
{
    if (argc < 2 || is(argv[1], "--help", "-h") || (argc == 2 && strcmp(argv[1], "help") == 0))
        usage(stdout);
    else if (kv_args_print_version("kvasir", argv[1]))
        return true;
    else if (strcmp(argv[1], "--help-options") == 0)
        print_words();
    else
        return false;
    return true;
}

static int unknown_command(const char *name)
{
    const char *names[N_COMMANDS];

    for (size_t i = 0; i < N_COMMANDS; i++)
        names[i] = COMMANDS[i].name;
    kv_args_no_command("kvasir", name, names, N_COMMANDS);
    usage(stderr);
    return 2;
}

/*
 * Turn `kvasir help X Y` into `kvasir X Y --help`: the words move one to the left. A completion asks
 * for the words behind `help X`: those behind X. Returns the number of arguments.
 */
static int turn_help_round(int argc, char **argv)
{
    static char help[] = "--help";
    bool words = strcmp(argv[argc - 1], "--help-options") == 0;

    memmove(&argv[1], &argv[2], (size_t)(argc - 2) * sizeof(*argv));
    argv[argc - 1] = words ? NULL : help;
    return argc - words;
}

static int run(const struct command *command, int argc, char **argv)
{
    int status;

    curl_global_init(CURL_GLOBAL_DEFAULT);
    status = command->run(argc, argv);
    curl_global_cleanup();
    return status;
}

/* Warn of variables that misspell those which libraries and plugins read for this program. */
static void warn_of_variables(void)
{
    static const char *const store[] = {"LIBRARY_PATH", "REDIS_USER", "REDIS_PASSWORD"};
    static const char *const kvx[] = {"ISA", "CUDA_LIBRARY", "CUDA_OVERLAP"};

    kv_args_warn_misspelt("kvasir", "KV_STORE_", store, KV_COUNT(store));
    kv_args_warn_misspelt("kvasir", "KVX_", kvx, KV_COUNT(kvx));
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (answer(argc, argv))
        return 0;
    if (strcmp(argv[1], "help") == 0)
        argc = turn_help_round(argc, argv);
    if (answer(argc, argv)) /* help --help-options */
        return 0;
    signal(SIGPIPE, SIG_IGN);
    warn_of_variables();
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(argv[1], COMMANDS[i].name) == 0)
            return run(&COMMANDS[i], argc - 1, argv + 1);
    return unknown_command(argv[1]);
}
