// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "cli/commands.h"
#include "cli/store/store_commands.h"
#include "store/backend/store.h"
#include "store/backend/uri.h"

static const char FOOTER[] =
    "URI is a directory, SCHEME://... of a plugin libkv_store_SCHEME.so, or\n"
    "tiered:/FILE, whose file names several of these as one.\n\n"
    "Exit status: 0 done; 1 damage found, or a check failed; 2 usage; 3 the store can't be\n"
    "opened or doesn't answer; 4 no such object; 5 another failure; 130 interrupted.";

static void usage(FILE *out)
{
    fputs("usage: kvasir store COMMAND URI [ARGUMENT ...] [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KC_STORE_COMMANDS; i++)
        fprintf(out, "  %-11s %-14s %s\n", kc_store_commands[i].name, kc_store_commands[i].takes,
                kc_store_commands[i].help);
    fprintf(out,
            "\n%s\n\n"
            "  kvasir store save ~/kv chat-42 slot0.bin\n"
            "  kvasir store restore ~/kv chat-42 slot0.bin\n"
            "  tar c cache | kvasir store save s3://bucket/kv nightly -\n"
            "  kvasir store gc ~/kv --dry-run\n\n"
            "`kvasir store COMMAND --help` says more, and so does kvasir-store(1).\n",
            FOOTER);
}

/* Parse the options of all commands and @command's own. */
static int parse(const struct kc_store_command *command, int argc, char **argv,
                 struct kc_store_call *call, struct kv_arg_list *rest, struct kv_error *error)
{
    struct kv_arg args[16];
    char name[64], takes[64];
    struct kv_args_program program = {.name = name,
                                      .usage = takes,
                                      .brief = command->help,
                                      .summary = command->summary,
                                      .footer = FOOTER,
                                      .args = args};

    snprintf(name, sizeof(name), "kvasir store %s", command->name);
    snprintf(takes, sizeof(takes), "%s [OPTION ...]", command->takes);
    for (size_t i = 0; i < command->n_args; i++)
        args[program.n_args++] = command->args[i];
    for (size_t i = 0; i < KC_STORE_COMMON_ARGS; i++)
        args[program.n_args++] = kc_store_common_args[i];
    return kv_args_parse(&program, argc, argv, &call->opts, rest, error);
}

/* True for commands that may create a store. Others must not make one of a mistyped path. */
static bool makes_store(const struct kc_store_command *command)
{
    return command->run == kc_store_save || command->run == kc_store_bench;
}

static int run(const struct kc_store_command *command, struct kc_store_call *call)
{
    int rc = 0, status;

    if (command->run != kc_store_conformance)
        rc = makes_store(command) ? kvs_open(call->uri, &call->store)
                                  : kvs_open_existing(call->uri, &call->store);
    if (rc < 0)
        return kc_store_fail_open(call, rc);
    kc_bar_catch_signals();
    status = command->run(call);
    if (fflush(stdout) != 0 && status == KC_STORE_OK)
        status = KC_STORE_FAILED;
    kvs_close(call->store);
    return status;
}

static int start(const struct kc_store_command *command, int argc, char **argv)
{
    struct kc_store_call call = {.command = command->name, .bar.label = command->name};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    int rc = parse(command, argc, argv, &call, &rest, &error), status;

    if (rc == 0 && (rest.n < command->min + 1 || rest.n > command->max + 1))
        rc = kv_fail(&error, -EINVAL, 0, "wants %s; --help says more", command->takes);
    if (rc < 0)
        fprintf(stderr, "kvasir store %s: %s\n", command->name, error.text);
    if (rc != 0)
        return rc < 0 ? KC_STORE_USAGE : KC_STORE_OK;
    call.bar.quiet = call.opts.quiet;
    call.uri = rest.items[0];
    call.name = rest.n > 1 ? rest.items[1] : NULL;
    call.file = rest.n > 2 ? rest.items[2] : NULL;
    kvs_uri_redact(call.uri, call.label, sizeof(call.label));
    status = run(command, &call);
    kv_buf_fini(&call.out);
    return status;
}

int kc_store_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir store", kc_store_commands, KC_STORE_COMMANDS,
                                          sizeof(kc_store_commands[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : start(&kc_store_commands[found], argc - 1, argv + 1);
}
