// SPDX-License-Identifier: Apache-2.0
/** The commands of `kvasir store`: names, arguments, options, texts. */
#ifndef KV_CLI_STORE_STORE_COMMANDS_H
#define KV_CLI_STORE_STORE_COMMANDS_H

#include "cli/store/store.h"

struct kc_store_command {
    const char *name;
    int (*run)(struct kc_store_call *call);
    const char *takes; /* names of the positional arguments */
    unsigned min, max; /* least and most of them, after URI */
    const struct kv_arg *args;
    size_t n_args;
    const char *help;
    const char *summary;
};

#define KC_STORE_COMMANDS 11
#define KC_STORE_COMMON_ARGS 2

extern const struct kc_store_command kc_store_commands[KC_STORE_COMMANDS];

/** Options that every command has. */
extern const struct kv_arg kc_store_common_args[KC_STORE_COMMON_ARGS];

#endif
