// SPDX-License-Identifier: Apache-2.0
/* `kvasir bench`: find the benchmark. */
#include "base/core/error.h"
#include "cli/commands.h"

static const struct bench {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} BENCHES[] = {
    {"tiers", kc_bench_tiers_main, "blocks through the tiers of a block manager and back"},
    {"peers", kc_bench_peers_main, "blocks from another process: shared memory, sockets"},
    {"tiered", kc_bench_tiered_main, "gets through a tiered store, and prompts from packs"},
};

static void usage(FILE *out)
{
    fputs("usage: kvasir bench tiers|peers|tiered [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KV_COUNT(BENCHES); i++)
        fprintf(out, "  %-7s %s\n", BENCHES[i].name, BENCHES[i].help);
    fputs("\n`kvasir bench tiers --help` says more.\n", out);
}

int kc_bench_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir bench", BENCHES, KV_COUNT(BENCHES),
                                          sizeof(BENCHES[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : BENCHES[found].run(argc - 1, argv + 1);
}
