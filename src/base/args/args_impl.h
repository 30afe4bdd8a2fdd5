// SPDX-License-Identifier: Apache-2.0
/**
 * args_impl.h: shared by args.c (command line, environment), args_config.c (file) and args_help.c
 * (printing).
 */
#ifndef KV_BASE_ARGS_IMPL_H
#define KV_BASE_ARGS_IMPL_H

#include "base/args/args.h"

/** Source of an option's value. A later source in this list overrides an earlier one. */
enum kv_args_source { KV_ARGS_DEFAULT, KV_ARGS_CONFIG, KV_ARGS_ENVIRONMENT, KV_ARGS_COMMAND_LINE };

/** Where an option's value comes from. */
struct kv_args_given {
    enum kv_args_source source;
    const char *text; /* as written; NULL: a flag alone */
    unsigned line;    /* of the configuration file */
};

/** State of one call of kv_args_parse. */
struct kv_args_run {
    const struct kv_args_program *program;
    void *values; /* of the section that is being read, else top */
    void *top;    /* the caller's */
    bool in_section;
    struct kv_args_given *given; /* one per row */
    unsigned line;               /* the line of the configuration file that is being read */
};

/** Return the option called @name, or NULL. */
const struct kv_arg *kv_args_find(const struct kv_args_program *program, const char *name,
                                  size_t len);
/** Return the shown option that @name misspells, or NULL. */
const char *kv_args_nearest_option(const struct kv_args_program *program, const char *name,
                                   size_t len);
/**
 * Store @text as the value of @arg. Returns 0 or -EINVAL with @error: a wrong value, or a second one
 * of the same source for an option that is no list.
 */
int kv_args_set(struct kv_args_run *run, const struct kv_arg *arg, const char *text,
                enum kv_args_source source, struct kv_error *error);

/** Read the configuration file @path. Returns 0, -EINVAL, -EFBIG or the errno of opening it. */
int kv_args_read_config(struct kv_args_run *run, const char *path, struct kv_error *error);

/** Print --help, the manual page (roff) and one option a line to standard output. */
void kv_args_print_help(const struct kv_args_program *program);
void kv_args_print_man(const struct kv_args_program *program);
void kv_args_print_options(const struct kv_args_program *program);

#endif
