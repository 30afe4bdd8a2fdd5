// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer`: parse and dispatch. */
#include <stdio.h>

#include "cli/commands.h"
#include "cli/peer/peer.h"
#include "cli/show/bar.h"

static const char FOOTER[] =
    "ENDPOINT is unix:/PATH or tcp:HOST:PORT.\n\n"
    "Exit status: 0 done; 1 a block didn't come, or came with wrong bytes; 2 usage; 3 no session:\n"
    "nobody there, or refused; 5 another failure; 130 interrupted.";

static void usage(FILE *out)
{
    fputs("usage: kvasir peer COMMAND [ENDPOINT] [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KC_PEER_COMMANDS; i++)
        fprintf(out, "  %-6s %-9s %s\n", kc_peer_commands[i].name,
                kc_peer_commands[i].run == kc_peer_share ? "" : "ENDPOINT",
                kc_peer_commands[i].help);
    fprintf(out,
            "\n%s\n\n"
            "  kvasir peer share --demo 256 --listen tcp:127.0.0.1:7300\n"
            "  kvasir peer look tcp:127.0.0.1:7300\n"
            "  kvasir peer read tcp:127.0.0.1:7300\n\n"
            "`kvasir peer COMMAND --help` says more.\n",
            FOOTER);
}

/* Parse the options of all commands and @command's own. */
static int parse(const struct kc_peer_command *command, int argc, char **argv,
                 struct kc_peer_opts *opts, struct kv_arg_list *rest, struct kv_error *error)
{
    struct kv_arg args[32];
    char name[64], takes[64];
    struct kv_args_program program = {.name = name,
                                      .usage = takes,
                                      .brief = command->help,
                                      .summary = command->summary,
                                      .footer = FOOTER,
                                      .args = args};

    snprintf(name, sizeof(name), "kvasir peer %s", command->name);
    snprintf(takes, sizeof(takes), "%s [OPTION ...]", command->takes);
    for (size_t i = 0; i < command->n_args; i++)
        args[program.n_args++] = command->args[i];
    for (size_t i = 0; i < KC_PEER_COMMON_ARGS; i++)
        args[program.n_args++] = kc_peer_common_args[i];
    return kv_args_parse(&program, argc, argv, opts, rest, error);
}

static int start(const struct kc_peer_command *command, int argc, char **argv)
{
    struct kc_peer_opts opts = {.set = KC_PEER_SET};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    size_t wanted = command->run == kc_peer_share ? 0 : 1;
    int rc = parse(command, argc, argv, &opts, &rest, &error), status;

    if (rc == 0 && rest.n != wanted)
        rc = kv_fail(&error, -EINVAL, 0, "wants %s; --help says more", command->takes);
    if (rc < 0)
        return kc_peer_fail(command->name, KC_PEER_USAGE, "%s", error.text);
    if (rc != 0)
        return KC_PEER_OK;
    kc_bar_catch_signals();
    status = command->run(&opts, wanted ? rest.items[0] : NULL);
    return fflush(stdout) != 0 && status == KC_PEER_OK ? KC_PEER_FAILED : status;
}

int kc_peer_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir peer", kc_peer_commands, KC_PEER_COMMANDS,
                                          sizeof(kc_peer_commands[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : start(&kc_peer_commands[found], argc - 1, argv + 1);
}
