// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer`: parse and dispatch. */
#include <stdio.h>
#include <string.h>

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

static int unknown_command(const char *name)
{
    const char *names[KC_PEER_COMMANDS];

    for (size_t i = 0; i < KC_PEER_COMMANDS; i++)
        names[i] = kc_peer_commands[i].name;
    kv_args_no_command("kvasir peer", name, names, KC_PEER_COMMANDS);
    usage(stderr);
    return KC_PEER_USAGE;
}

int kc_peer_main(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return KC_PEER_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return KC_PEER_OK;
    }
    if (strcmp(argv[1], "--help-options") == 0) {
        for (size_t i = 0; i < KC_PEER_COMMANDS; i++)
            puts(kc_peer_commands[i].name);
        return KC_PEER_OK;
    }
    if (kv_args_print_version("kvasir peer", argv[1]))
        return KC_PEER_OK;
    for (size_t i = 0; i < KC_PEER_COMMANDS; i++)
        if (strcmp(argv[1], kc_peer_commands[i].name) == 0)
            return start(&kc_peer_commands[i], argc - 1, argv + 1);
    return unknown_command(argv[1]);
}
