// SPDX-License-Identifier: Apache-2.0
/*
 * Read configuration files: `name = value` lines for the options of a program. Errors name the
 * file, the line, the key and the nearest option.
 */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/ascii.h"

#include "base/args/args_impl.h"

#define MAX_CONFIG (1u << 20)

/*
 * Text of one configuration file. Option values point into it, so it lives as long as the process.
 */
struct text {
    struct text *next;
    char bytes[];
};
static struct text *texts;

static int read_text(const char *path, struct text **ret, struct kv_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = fd < 0 ? -errno : 0;
    struct text *text = NULL, *fitted;
    size_t len = 0;
    ssize_t got = 0;

    if (rc == 0 && !(text = malloc(sizeof(*text) + MAX_CONFIG + 2)))
        rc = -ENOMEM;
    while (rc == 0 && len <= MAX_CONFIG &&
           (got = read(fd, text->bytes + len, MAX_CONFIG + 1 - len)) > 0)
        len += (size_t)got;
    if (rc == 0 && got < 0)
        rc = -errno;
    if (rc == 0 && len > MAX_CONFIG)
        rc = -EFBIG;
    if (fd >= 0)
        close(fd);
    if (rc) {
        free(text);
        return kv_fail(error, rc, 0, "can't read %.200s: %s", path, strerror(-rc));
    }
    text->bytes[len] = '\0';
    fitted = realloc(text, sizeof(*text) + len + 1); /* shrinking can't fail to keep the bytes */
    *ret = fitted ? fitted : text;
    return 0;
}

void kv_args_free_config(void)
{
    while (texts) {
        struct text *next = texts->next;

        free(texts);
        texts = next;
    }
}

/* Cut blanks at both ends of @s, and a comment that follows a blank or begins the line. */
static char *trim(char *s)
{
    char *end;

    for (char *p = s; *p; p++)
        if (*p == '#' && (p == s || kv_is_space(p[-1])))
            *p = '\0';
    while (kv_is_space(*s))
        s++;
    end = s + strlen(s);
    while (end > s && kv_is_space(end[-1]))
        *--end = '\0';
    return s;
}

/* Find the option called @name, written with dashes or underscores. */
static const struct kv_arg *find_key(const struct kv_args_program *program, char *key)
{
    for (char *p = key; *p; p++)
        *p = *p == '_' ? '-' : kv_lower(*p);
    return kv_args_find(program, key, strlen(key));
}

static int read_line(struct kv_args_run *run, char *line, const char *path, unsigned number,
                     struct kv_error *error)
{
    char *equals = strchr(line, '='), *key, *value;
    struct kv_error cause = {0};
    const struct kv_arg *arg;
    const char *nearest;

    if (!equals)
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: expected `name = value`", path, number);
    *equals = '\0';
    key = trim(line);
    value = trim(equals + 1);
    arg = find_key(run->program, key);
    if (!arg) {
        nearest = kv_args_nearest_option(run->program, key, strlen(key));
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: unknown key `%.60s`%s%s%s", path, number, key,
                       nearest ? "; did you mean `" : "", nearest ? nearest : "",
                       nearest ? "`?" : "");
    }
    if (run->in_section && !kv_args_is_choice(run->program->in_sections, arg->name))
        return kv_fail(error, -EINVAL, 0,
                       "%.200s:%u: `%.60s` is of no section: put it above the first", path, number,
                       key);
    if (kv_args_set(run, arg, value, KV_ARGS_CONFIG, &cause) < 0)
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: %.200s", path, number, cause.text);
    if (run->program->note)
        run->program->note(run->values, arg, number);
    return 0;
}

/* Begin the section that @line, `[NAME]`, names: its options are a set of their own. */
static int begin_section(struct kv_args_run *run, char *line, const char *path, unsigned number,
                         struct kv_error *error)
{
    size_t len = strlen(line);
    char *name;

    if (!run->program->section)
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: %s has no sections", path, number,
                       run->program->name);
    if (line[len - 1] != ']')
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: expected `[NAME]`", path, number);
    line[len - 1] = '\0';
    name = trim(line + 1);
    if (!*name)
        return kv_fail(error, -EINVAL, 0, "%.200s:%u: a section without a name", path, number);
    run->values = run->program->section(run->top, name);
    if (!run->values)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    memset(run->given, 0, run->program->n_args * sizeof(*run->given));
    run->in_section = true;
    if (run->program->note)
        run->program->note(run->values, NULL, number);
    return 0;
}

/* Return to the options outside of sections, and to what was given there. */
static void end_sections(struct kv_args_run *run, const struct kv_args_given *top)
{
    if (!run->in_section)
        return;
    run->values = run->top;
    run->in_section = false;
    memcpy(run->given, top, run->program->n_args * sizeof(*top));
}

/* Read the lines of @text, a file's content. Values point into it. */
static int read_lines(struct kv_args_run *run, char *text, const char *path, struct kv_error *error)
{
    struct kv_args_given *top = calloc(run->program->n_args + 1, sizeof(*top));
    unsigned number = 0;
    char *next;
    int rc = 0;

    if (!top)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (char *line = text; line && rc == 0; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        run->line = ++number;
        line = trim(line);
        if (*line == '[') {
            if (!run->in_section)
                memcpy(top, run->given, run->program->n_args * sizeof(*top));
            rc = begin_section(run, line, path, number, error);
        } else if (*line) {
            rc = read_line(run, line, path, number, error);
        }
    }
    if (rc == 0)
        end_sections(run, top);
    free(top);
    return rc;
}

int kv_args_read_config(struct kv_args_run *run, const char *path, struct kv_error *error)
{
    struct text *text = NULL;
    int rc = read_text(path, &text, error);

    if (rc)
        return rc;
    text->next = texts;
    texts = text;
    return read_lines(run, text->bytes, path, error);
}

int kv_args_parse_file(const struct kv_args_program *program, const char *path, void *values,
                       char **ret_text, struct kv_error *error)
{
    struct kv_args_run run = {.program = program, .values = values, .top = values};
    struct text *text = NULL;
    int rc = read_text(path, &text, error);

    *ret_text = NULL;
    if (rc)
        return rc;
    run.given = calloc(program->n_args, sizeof(*run.given));
    rc = run.given ? read_lines(&run, text->bytes, path, error)
                   : kv_fail(error, -ENOMEM, 0, "out of memory");
    free(run.given);
    *ret_text = (char *)text;
    return rc;
}
