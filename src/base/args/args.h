// SPDX-License-Identifier: Apache-2.0
/**
 * Command lines, from one table per program. The same rows parse the command line, the environment
 * and a configuration file, check ranges, and print --help, man pages and completions.
 *
 * Later sources win: defaults, --config FILE, environment, command line.
 * - Command line: `--name value` or `--name=value`.
 * - Environment: PREFIX_NAME_WITH_UNDERSCORES. Empty variables count as not set. Kubernetes'
 *   service links (PREFIX_PORT=tcp://...) are ignored. The log warns of other variables with the
 *   prefix that name no option.
 * - Configuration file: `name = value` lines; `#` starts a comment. `[NAME]` begins a section, where
 *   the program has such.
 * - A list option may be given repeatedly: the values of one source add up. Any other option given
 *   twice in one source is an error.
 * - Flags in both: 1, true, yes, on; 0, false, no, off, and in a file also nothing. Other words are
 *   errors.
 *
 * Sizes take KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB; times ms, s, m, h and d.
 */
#ifndef KV_BASE_ARGS_H
#define KV_BASE_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"

enum kv_arg_type {
    KV_ARG_FLAG,   /* bool; no value */
    KV_ARG_STR,    /* const char *; points into argv or the environment */
    KV_ARG_LIST,   /* struct kv_arg_list: the option may be given repeatedly */
    KV_ARG_U64,    /* uint64_t */
    KV_ARG_SIZE,   /* uint64_t, bytes */
    KV_ARG_TIME,   /* uint64_t, milliseconds */
    KV_ARG_NANO,   /* uint64_t, in units of 10^-9; a decimal such as 0.023 */
    KV_ARG_CHOICE, /* const char *; one of the words in `choices`, separated by '|' */
    KV_ARG_GROUP   /* a heading in --help */
};

#define KV_ARG_LIST_MAX 256
struct kv_arg_list {
    const char *items[KV_ARG_LIST_MAX];
    size_t n;
};

struct kv_arg {
    const char *name; /* without the leading dashes */
    enum kv_arg_type type;
    size_t offset;       /* offset of the value in the program's struct */
    const char *value;   /* placeholder in --help, e.g. "PORT" */
    const char *help;    /* one sentence or more; wrapped by --help */
    uint64_t min, max;   /* bounds of a number; max 0: no upper bound */
    const char *choices; /* words of a KV_ARG_CHOICE, separated by '|' */
    bool hidden;         /* accepted, but left out of --help */
};

struct kv_args_program {
    const char *name;    /* "kv-indexer" */
    const char *usage;   /* "[OPTION ...]" */
    const char *brief;   /* what it does in a few words, for the NAME of its manual page */
    const char *summary; /* text above the options */
    const char *footer;  /* text below the options: examples, limits */
    const char *env;     /* prefix of environment variables, or NULL */
    const struct kv_arg *args;
    size_t n_args;
    bool config;            /* offer --config FILE */
    const char *env_others; /* other variables with the prefix that are known: "A|B", or NULL */
    /*
     * Begin section [@name] of the configuration file: return a struct like @values, with defaults, for
     * the options up to the next section; NULL: no memory. Called for each. NULL: no sections.
     */
    void *(*section)(void *values, const char *name);
    const char *in_sections; /* options that may stand in a section: "a|b" */
    /*
     * Take note that line @line of the configuration file gave option @arg, or (NULL) began a section,
     * whose values are @values. For errors that show only when all has been read. NULL: not wanted.
     */
    void (*note)(void *values, const struct kv_arg *arg, unsigned line);
};

/**
 * Fill @values (defaults already in it). Positional arguments go to @rest (NULL: none are allowed).
 * Strings from a configuration file live as long as the process.
 * Returns 0; 1 when --help, --help-man, --help-options or --version was asked for and printed to
 * standard output; -EINVAL, or the errno of a configuration file that can't be read, with @error.
 */
int kv_args_parse(const struct kv_args_program *program, int argc, char **argv, void *values,
                  struct kv_arg_list *rest, struct kv_error *error);

/**
 * Read a configuration file alone, for libraries, which have no command line. Fills @values as
 * kv_args_parse does. The caller owns *@ret_text, into which strings point, and frees it with free()
 * (also after -EINVAL, when it isn't NULL). Any thread. Returns 0; -EINVAL, -EFBIG (over 1 MiB) or
 * the errno of opening it, with @error: "PATH:LINE: reason".
 */
int kv_args_parse_file(const struct kv_args_program *program, const char *path, void *values,
                       char **ret_text, struct kv_error *error);

/** Free the texts of all configuration files: strings from them are gone. For tests and fuzzers. */
void kv_args_free_config(void);

/** Return the word among the @n of @words that @text misspells; NULL: none is near enough. */
const char *kv_args_nearest(const char *text, size_t len, const char *const *words, size_t n);

/**
 * Print on standard error that @program has no command @name, and the nearest of the @n words in
 * @words.
 */
void kv_args_no_command(const char *program, const char *name, const char *const *words, size_t n);

/** Print "@program VERSION" when @word is --version or -V. Returns false for any other word. */
bool kv_args_print_version(const char *program, const char *word);

/**
 * Log a warning of @component for each environment variable that begins with @prefix and whose rest
 * misspells one of the @n of @words. Other variables may be a plugin's own: no warning.
 */
void kv_args_warn_misspelt(const char *component, const char *prefix, const char *const *words,
                           size_t n);

/** Return true when @word is one of the words in @choices, which '|' separates. */
bool kv_args_is_choice(const char *choices, const char *word);

/** Parse a number, a size in bytes or a time in milliseconds. Return 0 or -EINVAL. */
int kv_parse_u64(const char *text, uint64_t *ret);
int kv_parse_size(const char *text, uint64_t *ret);
int kv_parse_time_ms(const char *text, uint64_t *ret);
/** Parse a decimal such as 0.023 in units of 10^-9, of which it has up to nine digits. 0 or -EINVAL. */
int kv_parse_nano(const char *text, uint64_t *ret);

#endif
