// SPDX-License-Identifier: Apache-2.0
#include <curl/curl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cli/replay.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} COMMANDS[] = {
    {"bench", kc_bench_main,
     "move blocks through the tiers of a block manager and back, and time it"},
    {"replay", kc_replay_main, "replay a request trace through a live kv-indexer, and check it"},
    {"store", kc_store_main, "save, restore, check and collect objects in a kv_store backend"},
    {"top", kc_top_main, "watch a running kv-indexer: its workers, streams and index"},
};

static void usage(FILE *out)
{
    fputs("usage: kvasir COMMAND [OPTION ...]\n\n", out);
    for (size_t i = 0; i < sizeof(COMMANDS) / sizeof(COMMANDS[0]); i++)
        fprintf(out, "  %-8s %s\n", COMMANDS[i].name, COMMANDS[i].help);
    fputs("\n`kvasir COMMAND --help` says more. The service itself is kv-indexer.\n", out);
}

int main(int argc, char **argv)
{
    int status = 2;

    if (argc < 2) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        puts("kvasir " KV_VERSION);
        return 0;
    }
    signal(SIGPIPE, SIG_IGN);
    curl_global_init(CURL_GLOBAL_DEFAULT);
    for (size_t i = 0; i < sizeof(COMMANDS) / sizeof(COMMANDS[0]); i++)
        if (strcmp(argv[1], COMMANDS[i].name) == 0) {
            status = COMMANDS[i].run(argc - 1, argv + 1);
            curl_global_cleanup();
            return status;
        }
    fprintf(stderr, "kvasir: no command \"%s\"\n\n", argv[1]);
    usage(stderr);
    curl_global_cleanup();
    return status;
}
