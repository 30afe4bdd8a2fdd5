// SPDX-License-Identifier: Apache-2.0
/* Print a program's table of options: --help, a manual page (roff), or words for completions. */
#include <stdio.h>

#include "base/core/ascii.h"

#include "base/args/args_impl.h"

#define HELP_COLUMNS 80
#define HELP_INDENT 30

/* -- help -------------------------------------------------------------------------------------- */

/*
 * Print the words of @text, wrapped. The first line continues at column @at. Newlines in @text are
 * kept.
 */
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

/* Options that every program has, shown behind the program's own. */
static const struct common {
    const char *name, *value, *help;
} COMMON[] = {
    {"config", "FILE",
     "Read options from FILE: `name = value` lines, # starts a comment. Environment and command "
     "line win."},
    {"version", NULL, "Print the version and exit."},
    {"help", NULL, "Print this text and exit."},
};

static const struct common *first_common(const struct kv_args_program *program)
{
    return program->config ? COMMON : COMMON + 1;
}

void kv_args_print_help(const struct kv_args_program *program)
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
    for (const struct common *row = first_common(program); row < COMMON + KV_COUNT(COMMON); row++)
        print_option(row->name, row->value, row->help);
    if (program->env)
        printf("\nIn the environment, --some-option is %s_SOME_OPTION. An empty\n"
               "variable counts as not set.\n",
               program->env);
    if (program->footer)
        printf("\n%s\n", program->footer);
}

/* -- manual pages ------------------------------------------------------------------------------ */

/* Print @text as roff. Escape backslashes, typed dashes, and dots that begin a line. */
static void print_roff(const char *text)
{
    bool begins = true;

    for (; *text; text++) {
        if (*text == '-' || *text == '\\')
            printf("\\%c", *text == '\\' ? 'e' : '-');
        else if (begins && (*text == '.' || *text == '\''))
            printf("\\&%c", *text);
        else
            putchar(*text);
        begins = *text == '\n';
    }
}

static void print_roff_option(const char *name, const char *value, const char *help)
{
    printf(".TP\n\\fB\\-\\-");
    print_roff(name);
    printf("\\fR");
    if (value) {
        printf(" \\fI");
        print_roff(value);
        printf("\\fR");
    }
    putchar('\n');
    print_roff(help);
    putchar('\n');
}

static void print_man_options(const struct kv_args_program *program)
{
    printf(".SH OPTIONS\n");
    for (size_t i = 0; i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];

        if (arg->hidden)
            continue;
        if (arg->type == KV_ARG_GROUP)
            printf(".SS %s\n", arg->name);
        else
            print_roff_option(arg->name, arg->type == KV_ARG_FLAG ? NULL : arg->value, arg->help);
    }
    for (const struct common *row = first_common(program); row < COMMON + KV_COUNT(COMMON); row++)
        print_roff_option(row->name, row->value, row->help);
}

void kv_args_print_man(const struct kv_args_program *program)
{
    char title[64], page[64];

    for (size_t i = 0; i < sizeof(title); i++) {
        char c = i < strlen(program->name) && i + 1 < sizeof(title) ? program->name[i] : '\0';

        page[i] = c == ' ' ? '-' : c;
        title[i] = kv_upper(page[i]);
    }
    printf(".TH %s 1 \"\" \"Kvasir %s\" \"User Commands\"\n.SH NAME\n", title, KV_VERSION);
    print_roff(page);
    printf(" \\- ");
    print_roff(program->brief);
    printf("\n.SH SYNOPSIS\n\\fB%s\\fR ", program->name);
    print_roff(program->usage);
    printf("\n.SH DESCRIPTION\n");
    print_roff(program->summary);
    putchar('\n');
    print_man_options(program);
    if (program->env)
        printf(".SH ENVIRONMENT\nEach option can stand in the environment: \\-\\-some\\-option is "
               "%s_SOME_OPTION. An empty variable counts as not set.\n",
               program->env);
    if (program->footer) {
        printf(".SH NOTES\n.nf\n");
        print_roff(program->footer);
        printf("\n.fi\n");
    }
}

/* -- completions ------------------------------------------------------------------------------- */

void kv_args_print_options(const struct kv_args_program *program)
{
    for (size_t i = 0; i < program->n_args; i++) {
        const struct kv_arg *arg = &program->args[i];

        if (arg->hidden || arg->type == KV_ARG_GROUP)
            continue;
        printf("--%s%s\n", arg->name, arg->type == KV_ARG_FLAG ? "" : "=");
    }
    for (const struct common *row = first_common(program); row < COMMON + KV_COUNT(COMMON); row++)
        printf("--%s%s\n", row->name, row->value ? "=" : "");
}
