// SPDX-License-Identifier: Apache-2.0
#include "base/args/args.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "base/args/args_impl.h"
#include "base/core/ascii.h"
#include "base/core/log.h"

#define MAX_NAMES 96 /* options of a program */

/* -- values ------------------------------------------------------------------------------------ */

bool kv_args_is_choice(const char *choices, const char *word)
{
    size_t len = strlen(word);

    while (*choices) {
        size_t n = strcspn(choices, "|");

        if (n == len && strncmp(choices, word, n) == 0)
            return true;
        choices += n + (choices[n] == '|');
    }
    return false;
}

/* @text NULL: the option stands alone, on the command line. */
static int set_flag(const struct kv_arg *arg, const char *text, bool *value, struct kv_error *error)
{
    static const char *const yes[] = {"1", "true", "yes", "on"};
    static const char *const no[] = {"0", "false", "no", "off", ""};
    bool is_yes = !text, is_no = false;

    for (size_t i = 0; text && i < KV_COUNT(yes); i++)
        is_yes |= kv_casecmp(text, yes[i]) == 0;
    for (size_t i = 0; text && i < KV_COUNT(no); i++)
        is_no |= kv_casecmp(text, no[i]) == 0;
    if (!is_yes && !is_no)
        return kv_fail(error, -EINVAL, 0, "--%s: `%.60s` is not true or false", arg->name, text);
    *value = is_yes;
    return 0;
}

static int set_number(const struct kv_arg *arg, const char *text, uint64_t *value,
                      struct kv_error *error)
{
    static const char *const forms[] = {[KV_ARG_U64] = "a number",
                                        [KV_ARG_SIZE] = "a size such as 64MiB",
                                        [KV_ARG_TIME] = "a time such as 250ms, 5s or 2m",
                                        [KV_ARG_NANO] = "a decimal such as 0.023"};
    static const char *const units[] = {[KV_ARG_U64] = "",
                                        [KV_ARG_SIZE] = " bytes",
                                        [KV_ARG_TIME] = " ms",
                                        [KV_ARG_NANO] = " / 10^9"};
    uint64_t number;
    int rc = arg->type == KV_ARG_U64    ? kv_parse_u64(text, &number)
             : arg->type == KV_ARG_SIZE ? kv_parse_size(text, &number)
             : arg->type == KV_ARG_NANO ? kv_parse_nano(text, &number)
                                        : kv_parse_time_ms(text, &number);

    if (rc)
        return kv_fail(error, -EINVAL, 0, "--%s: `%.60s` is not %s", arg->name, text,
                       forms[arg->type]);
    if (number < arg->min && !arg->max)
        return kv_fail(error, -EINVAL, 0, "--%s: %s is less than %" PRIu64 "%s", arg->name, text,
                       arg->min, units[arg->type]);
    if (number < arg->min || (arg->max && number > arg->max))
        return kv_fail(error, -EINVAL, 0, "--%s: %s is outside %" PRIu64 "..%" PRIu64 "%s",
                       arg->name, text, arg->min, arg->max, units[arg->type]);
    *value = number;
    return 0;
}

static int set_list(const struct kv_arg *arg, const char *text, struct kv_arg_list *list,
                    struct kv_error *error)
{
    if (list->n == KV_ARG_LIST_MAX)
        return kv_fail(error, -EINVAL, 0, "--%s: given more than %d times", arg->name,
                       KV_ARG_LIST_MAX);
    list->items[list->n++] = text;
    return 0;
}

static int set_value(const struct kv_arg *arg, const char *text, void *values,
                     struct kv_error *error)
{
    char *at = (char *)values + arg->offset;

    switch (arg->type) {
    case KV_ARG_FLAG:
        return set_flag(arg, text, (bool *)(void *)at, error);
    case KV_ARG_CHOICE:
        if (!kv_args_is_choice(arg->choices, text))
            return kv_fail(error, -EINVAL, 0, "--%s: `%.60s` is not one of %s", arg->name, text,
                           arg->choices);
        *(const char **)(void *)at = text;
        return 0;
    case KV_ARG_STR:
        *(const char **)(void *)at = text;
        return 0;
    case KV_ARG_LIST:
        return set_list(arg, text, (struct kv_arg_list *)(void *)at, error);
    case KV_ARG_U64:
    case KV_ARG_SIZE:
    case KV_ARG_TIME:
    case KV_ARG_NANO:
        return set_number(arg, text, (uint64_t *)(void *)at, error);
    case KV_ARG_GROUP:
        break;
    }
    return -EINVAL;
}

/* -- unknown options --------------------------------------------------------------------------- */

/*
 * Return the edit distance of two words of up to 31 letters; longer words are far from every word.
 */
static unsigned distance(const char *a, size_t a_len, const char *b)
{
    unsigned row[32], diagonal, above;
    size_t b_len = strlen(b);

    if (a_len >= KV_COUNT(row) || b_len >= KV_COUNT(row))
        return KV_COUNT(row);
    for (size_t j = 0; j <= b_len; j++)
        row[j] = (unsigned)j;
    for (size_t i = 1; i <= a_len; i++) {
        diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= b_len; j++) {
            above = row[j];
            row[j] = KV_MIN(KV_MIN(row[j], row[j - 1]) + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
        }
    }
    return row[b_len];
}

const char *kv_args_nearest(const char *text, size_t len, const char *const *words, size_t n)
{
    /* A larger distance is another word, not a typing error */
    unsigned best = (unsigned)KV_MIN(len, (size_t)30) / 3 + 2;
    const char *nearest = NULL;

    for (size_t i = 0; i < n; i++) {
        unsigned d = distance(text, len, words[i]);

        if (d < best) {
            best = d;
            nearest = words[i];
        }
    }
    return nearest;
}

void kv_args_no_command(const char *program, const char *name, const char *const *words, size_t n)
{
    const char *nearest = kv_args_nearest(name, strlen(name), words, n);

    fprintf(stderr, "%s: no command \"%.60s\"%s%s%s\n\n", program, name,
            nearest ? "; did you mean \"" : "", nearest ? nearest : "", nearest ? "\"?" : "");
}

const char *kv_args_nearest_option(const struct kv_args_program *program, const char *name,
                                   size_t len)
{
    const char *words[MAX_NAMES];
    size_t n = 0;

    for (size_t i = 0; i < program->n_args && n < MAX_NAMES; i++)
        if (program->args[i].type != KV_ARG_GROUP && !program->args[i].hidden)
            words[n++] = program->args[i].name;
    return kv_args_nearest(name, len, words, n);
}

static int unknown_option(const struct kv_args_program *program, const char *name, size_t len,
                          struct kv_error *error)
{
    const char *nearest = kv_args_nearest_option(program, name, len);

    return kv_fail(error, -EINVAL, 0, "unknown option --%.*s%s%s%s", (int)KV_MIN(len, (size_t)60),
                   name, nearest ? "; did you mean --" : " (see --help)", nearest ? nearest : "",
                   nearest ? "?" : "");
}

const struct kv_arg *kv_args_find(const struct kv_args_program *program, const char *name,
                                  size_t len)
{
    for (size_t i = 0; i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];

        if (arg->type != KV_ARG_GROUP && strlen(arg->name) == len &&
            strncmp(arg->name, name, len) == 0)
            return arg;
    }
    return NULL;
}

static int given_twice(const struct kv_arg *arg, const struct kv_args_given *before,
                       const char *text, struct kv_error *error)
{
    if (before->source == KV_ARGS_CONFIG)
        return kv_fail(error, -EINVAL, 0, "--%s: given on line %u, too: choose one", arg->name,
                       before->line);
    if (!before->text || !text)
        return kv_fail(error, -EINVAL, 0, "--%s: given twice", arg->name);
    return kv_fail(error, -EINVAL, 0, "--%s: given twice, `%.60s` and `%.60s`: choose one",
                   arg->name, before->text, text);
}

int kv_args_set(struct kv_args_run *run, const struct kv_arg *arg, const char *text,
                enum kv_args_source source, struct kv_error *error)
{
    struct kv_args_given *before = &run->given[arg - run->program->args];

    if (source == KV_ARGS_CONFIG && before->source > source)
        return 0;
    if (before->source == source && arg->type != KV_ARG_LIST)
        return given_twice(arg, before, text, error);
    /* Replace a list that a weaker source gave (enum kv_args_source) instead of adding to it. */
    if (arg->type == KV_ARG_LIST && before->source < source)
        ((struct kv_arg_list *)(void *)((char *)run->values + arg->offset))->n = 0;
    *before = (struct kv_args_given){source, text, run->line};
    return set_value(arg, text, run->values, error);
}

/* -- parsing ----------------------------------------------------------------------------------- */

/*
 * Return true for a variable that Kubernetes sets. A service called like the program puts
 * NAME_PORT=tcp://10.0.0.1:8090 into every container: a link to that service, not this program's
 * port.
 */
static bool is_service_link(const struct kv_arg *arg, const char *text)
{
    return strcmp(arg->name, "port") == 0 && strstr(text, "://");
}

/* Return the variable of @option, and its name; NULL when it isn't set, or is empty. */
static const char *from_environment(const struct kv_args_program *program, const char *option,
                                    char *ret_name, size_t size)
{
    const char *text;

    snprintf(ret_name, size, "%s_%s", program->env, option);
    for (char *p = ret_name; *p; p++)
        *p = *p == '-' ? '_' : kv_upper(*p);
    text = getenv(ret_name);
    return text && *text ? text : NULL;
}

static int read_environment(struct kv_args_run *run, struct kv_error *error)
{
    const struct kv_args_program *program = run->program;
    char name[128];

    for (size_t i = 0; program->env && i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];
        const char *text;
        int rc;

        if (arg->type == KV_ARG_GROUP)
            continue;
        text = from_environment(program, arg->name, name, sizeof(name));
        if (!text || is_service_link(arg, text))
            continue;
        rc = kv_args_set(run, arg, text, KV_ARGS_ENVIRONMENT, error);
        if (rc) {
            struct kv_error cause = error ? *error : (struct kv_error){0};

            return kv_fail(error, rc, 0, "%s: %.120s", name, cause.text);
        }
    }
    return 0;
}

/* Return true for a variable that no option reads, but Kubernetes or the caller does. */
static bool is_known_variable(const struct kv_args_program *program, const char *rest, size_t len)
{
    char word[64], option[64];

    if (len >= sizeof(word) || strncmp(rest, "SERVICE_", 8) == 0 || strncmp(rest, "PORT_", 5) == 0)
        return true;
    for (size_t i = 0; i <= len; i++) {
        word[i] = i < len ? rest[i] : '\0';
        option[i] = word[i] == '_' ? '-' : kv_lower(word[i]);
    }
    return kv_args_find(program, option, len) || (program->config && strcmp(word, "CONFIG") == 0) ||
           (program->env_others && kv_args_is_choice(program->env_others, word));
}

static void warn_of_unknown_variables(const struct kv_args_program *program)
{
    size_t prefix = program->env ? strlen(program->env) : 0;

    for (char **entry = environ; prefix && entry && *entry; entry++) {
        const char *rest = *entry + prefix + 1;
        char name[128], quoted[160];

        if (strncmp(*entry, program->env, prefix) != 0 || (*entry)[prefix] != '_' ||
            is_known_variable(program, rest, strcspn(rest, "=")))
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)KV_MIN(strcspn(*entry, "="), sizeof(name) - 1),
                 *entry);
        kv_log_warn(program->name, "an environment variable names no option", "variable=%s",
                    kv_log_quote(quoted, sizeof(quoted), name));
    }
}

void kv_args_warn_misspelt(const char *component, const char *prefix, const char *const *words,
                           size_t n)
{
    for (char **entry = environ; entry && *entry; entry++) {
        const char *rest = *entry + strlen(prefix), *nearest;
        char name[128], quoted[160];
        size_t len;

        if (strncmp(*entry, prefix, strlen(prefix)) != 0)
            continue;
        len = strcspn(rest, "=");
        nearest = kv_args_nearest(rest, len, words, n);
        if (!nearest || (strlen(nearest) == len && strncmp(nearest, rest, len) == 0))
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)KV_MIN(strcspn(*entry, "="), sizeof(name) - 1),
                 *entry);
        kv_log_warn(component, "an environment variable that nothing reads",
                    "variable=%s nearest=%s%s", kv_log_quote(quoted, sizeof(quoted), name), prefix,
                    nearest);
    }
}

/* Read one `--name[=value]` at argv[*at]. Moves *at over a value in the next argument. */
static int read_option(struct kv_args_run *run, int argc, char **argv, int *at,
                       struct kv_error *error)
{
    const char *name = argv[*at] + 2, *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct kv_arg *arg = kv_args_find(run->program, name, len);
    const char *value = equals ? equals + 1 : NULL;

    if (run->program->config && len == 6 && strncmp(name, "config", 6) == 0) {
        *at += value ? 0 : 1; /* kv_args_read_config has read the file */
        return 0;
    }
    if (!arg)
        return unknown_option(run->program, name, len, error);
    if (arg->type == KV_ARG_FLAG && value)
        return kv_fail(error, -EINVAL, 0, "--%s takes no value", arg->name);
    if (arg->type != KV_ARG_FLAG && !value) {
        if (*at + 1 >= argc)
            return kv_fail(error, -EINVAL, 0, "--%s needs a value (%s)", arg->name,
                           arg->value ? arg->value : "VALUE");
        value = argv[++*at];
    }
    return kv_args_set(run, arg, value, KV_ARGS_COMMAND_LINE, error);
}

/*
 * Return the configuration file: --config on the command line, else in the environment. NULL: none.
 */
static int config_file(const struct kv_args_program *program, int argc, char **argv,
                       const char **ret, struct kv_error *error)
{
    char name[128];

    *ret = NULL;
    if (!program->config)
        return 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--config=", 9) == 0)
            *ret = argv[i] + 9;
        else if (strcmp(argv[i], "--config") == 0 && i + 1 == argc)
            return kv_fail(error, -EINVAL, 0, "--config needs a value (FILE)");
        else if (strcmp(argv[i], "--config") == 0)
            *ret = argv[++i];
    }
    if (!*ret && program->env)
        *ret = from_environment(program, "config", name, sizeof(name));
    return 0;
}

bool kv_args_print_version(const char *program, const char *word)
{
    bool asked = strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0;

    if (asked)
        printf("%s %s\n", program, KV_VERSION);
    return asked;
}

/*
 * Print the text that @word (--help, --version ...) asks for. Returns false when @word is no such
 * option.
 */
static bool print_asked(const struct kv_args_program *program, const char *word)
{
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
        kv_args_print_help(program);
    else if (strcmp(word, "--help-man") == 0)
        kv_args_print_man(program);
    else if (strcmp(word, "--help-options") == 0)
        kv_args_print_options(program);
    else
        return kv_args_print_version(program->name, word);
    return true;
}

static int read_words(struct kv_args_run *run, int argc, char **argv, struct kv_arg_list *rest,
                      struct kv_error *error)
{
    static const struct kv_arg positional = {.name = "argument"};
    bool only_rest = false;
    int rc = 0;

    for (int i = 1; rc == 0 && i < argc; i++) {
        const char *word = argv[i];

        if (only_rest || word[0] != '-' || word[1] == '\0')
            rc = rest ? set_list(&positional, word, rest, error)
                      : kv_fail(error, -EINVAL, 0, "unexpected argument `%.60s`", word);
        else if (strcmp(word, "--") == 0)
            only_rest = true;
        else if (print_asked(run->program, word))
            return 1;
        else if (word[1] != '-')
            rc = kv_fail(error, -EINVAL, 0, "unknown option %.60s (see --help)", word);
        else
            rc = read_option(run, argc, argv, &i, error);
    }
    return rc;
}

int kv_args_parse(const struct kv_args_program *program, int argc, char **argv, void *values,
                  struct kv_arg_list *rest, struct kv_error *error)
{
    struct kv_args_given *given = calloc(program->n_args + 1, sizeof(*given));
    struct kv_args_run run = {.program = program, .values = values, .top = values, .given = given};
    const char *config = NULL;
    int rc = given ? 0 : -ENOMEM;

    if (rc == 0)
        rc = config_file(program, argc, argv, &config, error);
    if (rc == 0 && config)
        rc = kv_args_read_config(&run, config, error);
    if (rc == 0)
        rc = read_environment(&run, error);
    if (rc == 0)
        rc = read_words(&run, argc, argv, rest, error);
    if (rc == 0)
        warn_of_unknown_variables(program);
    free(given);
    return rc;
}
