// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.h"

#include <string.h>

#include "base/args/args.h"

enum { MAX_COMMANDS = 32 };

static size_t names_of(const struct kc_group *group, const char *ret[MAX_COMMANDS])
{
    size_t n = group->n < MAX_COMMANDS ? group->n : MAX_COMMANDS;

    for (size_t i = 0; i < n; i++)
        ret[i] = *(const char *const *)((const char *)group->commands + i * group->stride);
    return n;
}

long kc_find_command(const struct kc_group *group, int argc, char **argv, int *ret_status)
{
    const char *word = argc < 2 ? "" : argv[1], *names[MAX_COMMANDS];
    size_t n = names_of(group, names);

    for (size_t i = 0; i < n; i++)
        if (strcmp(word, names[i]) == 0)
            return (long)i;
    *ret_status = 0;
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        group->usage(stdout);
    } else if (strcmp(word, "--help-options") == 0) {
        for (size_t i = 0; i < n; i++)
            puts(names[i]);
    } else if (!kv_args_print_version(group->program, word)) {
        if (argc > 1)
            kv_args_no_command(group->program, word, names, n);
        group->usage(stderr);
        *ret_status = 2;
    }
    return -1;
}
