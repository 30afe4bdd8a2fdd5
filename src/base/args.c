// SPDX-License-Identifier: Apache-2.0
#include "base/args.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>

#define HELP_COLUMNS 80
#define HELP_INDENT 30

/* -- values ------------------------------------------------------------------------------------ */

/* Digits, then the rest of the text. Refuses overflow. */
static int parse_digits(const char *text, uint64_t *ret, const char **rest)
{
    uint64_t value = 0;
    const char *p = text;

    for (; isdigit((unsigned char)*p); p++) {
        unsigned digit = (unsigned)(*p - '0');

        if (value > (UINT64_MAX - digit) / 10)
            return -EINVAL;
        value = value * 10 + digit;
    }
    if (p == text)
        return -EINVAL;
    *ret = value;
    *rest = p;
    return 0;
}

struct unit {
    const char *name;
    uint64_t factor;
};

static int parse_with_unit(const char *text, const struct unit *units, uint64_t *ret)
{
    const char *rest;
    uint64_t value;

    if (parse_digits(text, &value, &rest))
        return -EINVAL;
    for (; units->name; units++) {
        if (strcmp(rest, units->name) != 0)
            continue;
        if (value > UINT64_MAX / units->factor)
            return -EINVAL;
        *ret = value * units->factor;
        return 0;
    }
    return -EINVAL;
}

int kv_parse_u64(const char *text, uint64_t *ret)
{
    static const struct unit none[] = {{"", 1}, {NULL, 0}};

    return parse_with_unit(text, none, ret);
}

int kv_parse_size(const char *text, uint64_t *ret)
{
    static const struct unit sizes[] = {{"", 1},
                                        {"B", 1},
                                        {"KiB", UINT64_C(1) << 10},
                                        {"MiB", UINT64_C(1) << 20},
                                        {"GiB", UINT64_C(1) << 30},
                                        {"TiB", UINT64_C(1) << 40},
                                        {NULL, 0}};

    return parse_with_unit(text, sizes, ret);
}

int kv_parse_time_ms(const char *text, uint64_t *ret)
{
    static const struct unit times[] = {{"ms", 1},      {"s", 1000}, {"m", 60000},
                                        {"h", 3600000}, {"", 1000},  {NULL, 0}};

    return parse_with_unit(text, times, ret);
}

/* Whether @word is one of `a|b|c`. */
static bool is_choice(const char *choices, const char *word)
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

static int set_number(const struct kv_arg *arg, const char *text, uint64_t *value,
                      struct kv_error *error)
{
    static const char *const forms[] = {[KV_ARG_U64] = "a number",
                                        [KV_ARG_SIZE] = "a size such as 64MiB",
                                        [KV_ARG_TIME] = "a time such as 250ms, 5s or 2m"};
    static const char *const units[] = {
        [KV_ARG_U64] = "", [KV_ARG_SIZE] = " bytes", [KV_ARG_TIME] = " ms"};
    uint64_t number;
    int rc = arg->type == KV_ARG_U64    ? kv_parse_u64(text, &number)
             : arg->type == KV_ARG_SIZE ? kv_parse_size(text, &number)
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
        *(bool *)(void *)at = true;
        return 0;
    case KV_ARG_CHOICE:
        if (!is_choice(arg->choices, text))
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
        return set_number(arg, text, (uint64_t *)(void *)at, error);
    case KV_ARG_GROUP:
        break;
    }
    return -EINVAL;
}

/* -- unknown options --------------------------------------------------------------------------- */

/* Edit distance, for words of up to 31 letters; longer ones are far from everything. */
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

static int unknown_option(const struct kv_args_program *program, const char *name, size_t len,
                          struct kv_error *error)
{
    const char *nearest = NULL;
    unsigned best = (unsigned)KV_MIN(len, (size_t)30) / 3 + 2; /* further off is no typing error */

    for (size_t i = 0; i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];
        unsigned d;

        if (arg->type == KV_ARG_GROUP || arg->hidden)
            continue;
        d = distance(name, len, arg->name);
        if (d < best) {
            best = d;
            nearest = arg->name;
        }
    }
    return kv_fail(error, -EINVAL, 0, "unknown option --%.*s%s%s%s", (int)KV_MIN(len, (size_t)60),
                   name, nearest ? "; did you mean --" : " (see --help)", nearest ? nearest : "",
                   nearest ? "?" : "");
}

static const struct kv_arg *find_arg(const struct kv_args_program *program, const char *name,
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

/* -- help -------------------------------------------------------------------------------------- */

/* Words of @text, wrapped, the first line continuing at column @at. Newlines are kept. */
static void print_wrapped(const char *text, int at, int indent)
{
    while (*text) {
        size_t n = strcspn(text, " \n");

        if (at > indent && at + 1 + (int)n > HELP_COLUMNS) {
            printf("\n%*s", indent, "");
            at = indent;
        } else if (at > indent) {
            putchar(' ');
            at++;
        }
        printf("%.*s", (int)n, text);
        at += (int)n;
        text += n;
        if (*text == '\n') {
            printf("\n%*s", text[1] ? indent : 0, "");
            at = indent;
        }
        text += *text != '\0';
    }
    putchar('\n');
}

static void print_option(const char *name, const char *value, const char *help)
{
    int at = printf("  --%s%s%s", name, value ? " " : "", value ? value : "");

    if (at > HELP_INDENT - 2) {
        putchar('\n');
        at = 0;
    }
    printf("%*s", HELP_INDENT - at, "");
    print_wrapped(help, HELP_INDENT, HELP_INDENT);
}

static void print_help(const struct kv_args_program *program)
{
    printf("usage: %s %s\n\n%s\n", program->name, program->usage, program->summary);
    for (size_t i = 0; i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];

        if (arg->hidden)
            continue;
        if (arg->type == KV_ARG_GROUP)
            printf("\n%s:\n", arg->name);
        else
            print_option(arg->name, arg->type == KV_ARG_FLAG ? NULL : arg->value, arg->help);
    }
    print_option("version", NULL, "Print the version and exit.");
    print_option("help", NULL, "Print this text and exit.");
    if (program->env)
        printf("\nIn the environment, --some-option is %s_SOME_OPTION.\n", program->env);
    if (program->footer)
        printf("\n%s\n", program->footer);
}

/* -- parsing ----------------------------------------------------------------------------------- */

static bool env_is_true(const char *text)
{
    return strcmp(text, "0") != 0 && strcasecmp(text, "false") != 0 &&
           strcasecmp(text, "no") != 0 && strcasecmp(text, "off") != 0 && *text;
}

/* For a service called like the program, Kubernetes puts NAME_PORT=tcp://10.0.0.1:8090 into every
 * container: that is a link to it, not a port for it. */
static bool is_service_link(const struct kv_arg *arg, const char *text)
{
    return strcmp(arg->name, "port") == 0 && strstr(text, "://");
}

static int read_environment(const struct kv_args_program *program, void *values,
                            struct kv_error *error)
{
    char name[128];

    for (size_t i = 0; program->env && i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];
        const char *text;
        int rc;

        if (arg->type == KV_ARG_GROUP)
            continue;
        snprintf(name, sizeof(name), "%s_%s", program->env, arg->name);
        for (char *p = name; *p; p++)
            *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
        text = getenv(name);
        if (!text || (arg->type == KV_ARG_FLAG && !env_is_true(text)) || is_service_link(arg, text))
            continue;
        rc = set_value(arg, text, values, error);
        if (rc) {
            struct kv_error cause = error ? *error : (struct kv_error){0};

            return kv_fail(error, rc, 0, "%s: %.120s", name, cause.text);
        }
    }
    return 0;
}

/* One `--name[=value]` at argv[*at]; moves *at over a value of its own. */
static int read_option(const struct kv_args_program *program, int argc, char **argv, int *at,
                       void *values, bool *seen, struct kv_error *error)
{
    const char *name = argv[*at] + 2, *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct kv_arg *arg = find_arg(program, name, len);
    const char *value = equals ? equals + 1 : NULL;

    if (!arg)
        return unknown_option(program, name, len, error);
    if (arg->type == KV_ARG_FLAG && value)
        return kv_fail(error, -EINVAL, 0, "--%s takes no value", arg->name);
    if (arg->type != KV_ARG_FLAG && !value) {
        if (*at + 1 >= argc)
            return kv_fail(error, -EINVAL, 0, "--%s needs a value (%s)", arg->name,
                           arg->value ? arg->value : "VALUE");
        value = argv[++*at];
    }
    /* The command line replaces a list from the environment rather than adding to it. */
    if (arg->type == KV_ARG_LIST && !seen[arg - program->args])
        ((struct kv_arg_list *)(void *)((char *)values + arg->offset))->n = 0;
    seen[arg - program->args] = true;
    return set_value(arg, value, values, error);
}

int kv_args_parse(const struct kv_args_program *program, int argc, char **argv, void *values,
                  struct kv_arg_list *rest, struct kv_error *error)
{
    KV_AUTO(kv_autofree) bool *seen = calloc(program->n_args + 1, sizeof(*seen));
    bool only_rest = false;
    int rc = seen ? read_environment(program, values, error) : -ENOMEM;

    for (int i = 1; rc == 0 && i < argc; i++) {
        const char *word = argv[i];

        if (only_rest || word[0] != '-' || word[1] == '\0') {
            static const struct kv_arg positional = {.name = "argument"};

            rc = rest ? set_list(&positional, word, rest, error)
                      : kv_fail(error, -EINVAL, 0, "unexpected argument `%.60s`", word);
        } else if (strcmp(word, "--") == 0) {
            only_rest = true;
        } else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help(program);
            return 1;
        } else if (strcmp(word, "--version") == 0) {
            printf("%s %s\n", program->name, KV_VERSION);
            return 1;
        } else if (word[1] != '-') {
            rc = kv_fail(error, -EINVAL, 0, "unknown option %.60s (see --help)", word);
        } else {
            rc = read_option(program, argc, argv, &i, values, seen, error);
        }
    }
    return rc;
}
