// SPDX-License-Identifier: Apache-2.0
#include "tiered/config.h"

#include "base/args/args.h"
#include "base/core/ascii.h"
#include "store/backend/uri.h"

enum { SCHEME_LEN = 7, PATH_LEN = 200 };

#define LINGER_MS 10000
#define PLACES 1000000

/* Options above the sections, or of one section. */
struct part {
    struct part *next;
    const char *name;
    unsigned line, uri_line, manifests_line, puts_lines[KV_ARG_LIST_MAX];
    size_t n; /* of the first part: sections */
    const char *uri, *manifests;
    struct kv_arg_list puts;
    uint64_t capacity, gib_month_nano, request_nano, linger_ms, places, deadline_ms;
    bool read_only;
};

#define ROW(n, t, field) .name = (n), .type = (t), .offset = offsetof(struct part, field)
static const struct kv_arg rows[] = {
    {ROW("puts", KV_ARG_LIST, puts)},
    {ROW("manifests", KV_ARG_STR, manifests)},
    {ROW("linger", KV_ARG_TIME, linger_ms), .min = 1, .max = 3600000},
    {ROW("places", KV_ARG_U64, places), .min = 1, .max = UINT64_C(1) << 32},
    {ROW("uri", KV_ARG_STR, uri)},
    {ROW("capacity", KV_ARG_SIZE, capacity), .min = 1},
    {ROW("cost-gib-month", KV_ARG_NANO, gib_month_nano)},
    {ROW("cost-request", KV_ARG_NANO, request_nano)},
    {ROW("deadline", KV_ARG_TIME, deadline_ms), .min = 1, .max = 3600000},
    {ROW("read-only", KV_ARG_FLAG, read_only)},
};
static const char of_members[] = "uri|capacity|cost-gib-month|cost-request|deadline|read-only";

/* Sections beyond the limit share the last part: only their number counts. */
static void *begin_section(void *values, const char *name)
{
    struct part *top = values, **last = &top->next;

    while (*last && (*last)->next)
        last = &(*last)->next;
    if (*last && top->n <= TRD_MEMBERS_MAX)
        last = &(*last)->next;
    if (!*last)
        *last = calloc(1, sizeof(**last));
    if (!*last)
        return NULL;
    top->n++;
    (*last)->name = name;
    (*last)->capacity = UINT64_MAX;
    return *last;
}

static void note_line(void *values, const struct kv_arg *arg, unsigned line)
{
    struct part *part = values;

    if (!arg)
        part->line = line;
    else if (strcmp(arg->name, "uri") == 0)
        part->uri_line = line;
    else if (strcmp(arg->name, "manifests") == 0)
        part->manifests_line = line;
    else if (strcmp(arg->name, "puts") == 0)
        part->puts_lines[part->puts.n - 1] = line;
}

static const struct kv_args_program format = {
    .name = "tiered",
    .args = rows,
    .n_args = KV_COUNT(rows),
    .section = begin_section,
    .in_sections = of_members,
    .note = note_line,
};

/* -- checks ------------------------------------------------------------------------------------ */

static int wrong(struct kv_error *error, const char *path, unsigned line, const char *what,
                 const char *name)
{
    return kv_fail(error, -EINVAL, 0, "%.*s:%u: %s%s%.60s%s", PATH_LEN / 2, path, line, what,
                   name ? " `" : "", name ? name : "", name ? "`" : "");
}

static bool is_name(const char *name)
{
    size_t len = 0;

    for (; name[len]; len++)
        if (!kv_is_alnum(name[len]) && !strchr("-_.", name[len]))
            return false;
    return len > 0 && len <= TRD_NAME_MAX;
}

static int check_uri(const struct part *part, const char *path, struct kv_error *error)
{
    struct kvs_uri uri;
    const char *why;

    if (!part->uri)
        return wrong(error, path, part->line, "a member without a `uri`:", part->name);
    if (kvs_uri_parse(part->uri, &uri, &why))
        return wrong(error, path, part->uri_line, "not a URI of a store:", why);
    if (uri.path && *part->uri != '/')
        return wrong(error, path, part->uri_line, "a folder is named by its absolute path, not",
                     part->uri);
    return strcmp(uri.scheme, "tiered") == 0
               ? wrong(error, path, part->uri_line, "a member can't be a tiered store", NULL)
               : 0;
}

static int add_member(struct trd_config *config, const struct part *part, const char *path,
                      struct kv_error *error)
{
    int rc;

    if (!is_name(part->name))
        return wrong(error, path, part->line,
                     "a member's name has 1 to 32 letters, digits, `-`, `_` and `.`, unlike",
                     part->name);
    rc = check_uri(part, path, error);
    if (rc)
        return rc;
    for (size_t i = 0; i < config->n_members; i++) {
        if (strcmp(config->members[i].name, part->name) == 0)
            return wrong(error, path, part->line, "two members are called", part->name);
        if (strcmp(config->members[i].uri, part->uri) == 0)
            return wrong(error, path, part->uri_line, "the URI is also that of",
                         config->members[i].name);
    }
    config->members[config->n_members++] =
        (struct trd_member_config){.name = part->name,
                                   .uri = part->uri,
                                   .capacity = part->capacity,
                                   .gib_month_nano = part->gib_month_nano,
                                   .request_nano = part->request_nano,
                                   .deadline_ms = part->deadline_ms,
                                   .read_only = part->read_only};
    return 0;
}

/* Find the member called @name; it must take puts and manifests. */
static int find_member(const struct trd_config *config, const char *name, const char *path,
                       unsigned line, struct kv_error *error)
{
    for (size_t i = 0; i < config->n_members; i++)
        if (strcmp(config->members[i].name, name) == 0)
            return config->members[i].read_only
                       ? wrong(error, path, line, "this member is read-only:", name)
                       : (int)i;
    return wrong(error, path, line, "there is no member", name);
}

static int choose_puts(struct trd_config *config, const struct part *top, const char *path,
                       struct kv_error *error)
{
    for (size_t i = 0; i < top->puts.n; i++) {
        int at = find_member(config, top->puts.items[i], path, top->puts_lines[i], error);

        if (at < 0)
            return at;
        if (memchr(config->puts, at, config->n_puts))
            return wrong(error, path, top->puts_lines[i],
                         "puts go there already:", top->puts.items[i]);
        config->puts[config->n_puts++] = (uint8_t)at;
    }
    for (size_t i = 0; i < config->n_members && !top->puts.n; i++)
        if (!config->members[i].read_only)
            config->puts[config->n_puts++] = (uint8_t)i;
    return 0;
}

static int choose_manifests(struct trd_config *config, const struct part *top, const char *path,
                            struct kv_error *error)
{
    int at = config->n_puts ? config->puts[0] : 0;

    /* a store of members that are all read-only has its manifests anywhere */
    for (size_t i = 0; top->manifests && !config->n_puts && i < config->n_members; i++)
        if (strcmp(config->members[i].name, top->manifests) == 0) {
            config->manifests = (uint8_t)i;
            return 0;
        }
    if (top->manifests)
        at = find_member(config, top->manifests, path, top->manifests_line, error);
    if (at < 0)
        return at;
    config->manifests = (uint8_t)at;
    return 0;
}

static int take(struct trd_config *config, const struct part *top, const char *path,
                struct kv_error *error)
{
    int rc = 0;

    if (top->n == 0)
        return kv_fail(error, -EINVAL, 0, "%.*s: no members: a section [NAME] names each",
                       PATH_LEN / 2, path);
    if (top->n > TRD_MEMBERS_MAX)
        return kv_fail(error, -EINVAL, 0, "%.*s: %zu members, and 16 are the limit", PATH_LEN / 2,
                       path, top->n);
    for (const struct part *part = top->next; part && !rc; part = part->next)
        rc = add_member(config, part, path, error);
    if (!rc)
        rc = choose_puts(config, top, path, error);
    if (!rc)
        rc = choose_manifests(config, top, path, error);
    config->linger_ms = top->linger_ms;
    config->places = top->places;
    return rc;
}

int trd_config_read(const char *path, struct trd_config *ret, struct kv_error *error)
{
    struct part top = {.linger_ms = LINGER_MS, .places = PLACES};
    struct trd_config config = {0};
    int rc = kv_args_parse_file(&format, path, &top, &config.text, error);

    if (!rc)
        rc = take(&config, &top, path, error);
    for (struct part *part = top.next, *next; part; part = next) {
        next = part->next;
        free(part);
    }
    if (rc)
        trd_config_fini(&config);
    else
        *ret = config;
    return rc;
}

void trd_config_fini(struct trd_config *config)
{
    free(config->text);
    config->text = NULL;
}

const char *trd_config_path(const char *uri)
{
    if (strncmp(uri, "tiered:", SCHEME_LEN) != 0)
        return NULL;
    uri += SCHEME_LEN;
    if (strncmp(uri, "//", 2) == 0)
        uri += 2;
    return *uri == '/' ? uri : NULL;
}
