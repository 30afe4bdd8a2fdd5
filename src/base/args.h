// SPDX-License-Identifier: Apache-2.0
/**
 * Command lines, from one table per program: the same rows parse `--name value`, `--name=value` and
 * the environment (PREFIX_NAME_WITH_UNDERSCORES; the command line wins; Kubernetes' service links
 * PREFIX_PORT=tcp://... are passed over), check ranges, and print --help. Sizes take 64KiB/MiB/GiB,
 * times 250ms/5s/2m.
 */
#ifndef KV_BASE_ARGS_H
#define KV_BASE_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum kv_arg_type {
    KV_ARG_FLAG,   /* bool; no value */
    KV_ARG_STR,    /* const char *; points into argv or the environment */
    KV_ARG_LIST,   /* struct kv_arg_list: the option may be given repeatedly */
    KV_ARG_U64,    /* uint64_t */
    KV_ARG_SIZE,   /* uint64_t, bytes */
    KV_ARG_TIME,   /* uint64_t, milliseconds */
    KV_ARG_CHOICE, /* const char *; one of the words in `choices`, separated by '|' */
    KV_ARG_GROUP   /* a heading in --help */
};

#define KV_ARG_LIST_MAX 64
struct kv_arg_list {
    const char *items[KV_ARG_LIST_MAX];
    size_t n;
};

struct kv_arg {
    const char *name; /* without the dashes */
    enum kv_arg_type type;
    size_t offset;       /* of the value in the program's struct */
    const char *value;   /* placeholder in --help, e.g. "PORT" */
    const char *help;    /* one sentence or more; wrapped by --help */
    uint64_t min, max;   /* numbers; max 0: no bound */
    const char *choices; /* KV_ARG_CHOICE */
    bool hidden;         /* accepted, not shown */
};

struct kv_args_program {
    const char *name;    /* "kv-indexer" */
    const char *usage;   /* "[OPTION ...]" */
    const char *summary; /* text above the options */
    const char *footer;  /* text below them: examples, limits */
    const char *env;     /* prefix of environment variables, or NULL */
    const struct kv_arg *args;
    size_t n_args;
};

/**
 * Fill @values (defaults already in it). Positional arguments go to @rest (NULL: none are allowed).
 * Returns 0; 1 when --help or --version was asked for and printed to stdout; -EINVAL with @error.
 */
int kv_args_parse(const struct kv_args_program *program, int argc, char **argv, void *values,
                  struct kv_arg_list *rest, struct kv_error *error);

/** The value parsers, for use elsewhere. 0 or -EINVAL. */
int kv_parse_u64(const char *text, uint64_t *ret);
int kv_parse_size(const char *text, uint64_t *ret);
int kv_parse_time_ms(const char *text, uint64_t *ret);

#endif
