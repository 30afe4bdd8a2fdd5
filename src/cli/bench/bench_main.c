// SPDX-License-Identifier: Apache-2.0
/* `kvasir bench`: find the benchmark. */
#include <stdio.h>
#include <string.h>

#include "base/args.h"
#include "cli/commands.h"

static const struct bench {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} BENCHES[] = {
    {"tiers", kc_bench_tiers_main, "blocks through the tiers of a block manager and back"},
    {"peers", kc_bench_peers_main, "blocks from another process: shared memory, sockets"},
};

static void usage(FILE *out)
{
    fputs("usage: kvasir bench tiers|peers [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KV_COUNT(BENCHES); i++)
        fprintf(out, "  %-7s %s\n", BENCHES[i].name, BENCHES[i].help);
    fputs("\n`kvasir bench tiers --help` says more.\n", out);
}

/* Answer anything but a benchmark's name. @word is NULL when none was given. */
static int answer(const char *word)
{
    bool help = word && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0);
    const char *names[KV_COUNT(BENCHES)];

    for (size_t i = 0; i < KV_COUNT(BENCHES); i++)
        names[i] = BENCHES[i].name;
    if (word && strcmp(word, "--help-options") == 0) {
        for (size_t i = 0; i < KV_COUNT(BENCHES); i++)
            puts(names[i]);
        return 0;
    }
    if (word && kv_args_print_version("kvasir bench", word))
        return 0;
    if (word && !help)
        kv_args_no_command("kvasir bench", word, names, KV_COUNT(names));
    usage(help ? stdout : stderr);
    return help ? 0 : 2;
}

int kc_bench_main(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < KV_COUNT(BENCHES); i++)
        if (strcmp(argv[1], BENCHES[i].name) == 0)
            return BENCHES[i].run(argc - 1, argv + 1);
    return answer(argc < 2 ? NULL : argv[1]);
}
