// SPDX-License-Identifier: Apache-2.0
/*
 * A manager's options from a file and the environment: one table of keys.
 *
 *   file    key = value, one a line; # begins a comment
 *   then    KVBM_KEY, the key in capitals: the environment goes before the file
 *
 * A wrong key or value fails the call, and the log names the file, the line and the nearest key: an
 * option that is silently ignored is found much later, by its missing effect. Strings of the result
 * point into one allocation that the caller frees.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/args/args.h"
#include "base/core/ascii.h"
#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "kvbm_manager.h"

#define MAX_FILE 65536

enum kind { SIZE, U32, BOOL, TEXT, POLICY, EVICTION, IO, GPU_COPY };

/* Each key is the name of a field of the options: the manual and the struct needn't be
 * told apart. */
static const struct key {
    const char *name;
    enum kind kind;
    size_t offset;
} keys[] = {
#define KEY(kind, field)                                        \
    {                                                           \
#field, kind, offsetof(struct kvbm_manager_opts, field) \
    }
#define POLICY_KEYS(tier)                                                                          \
    {#tier "_policy", POLICY, offsetof(struct kvbm_manager_opts, tier##_policy.policy)},           \
        {#tier "_threshold", U32, offsetof(struct kvbm_manager_opts, tier##_policy.threshold)},    \
    {                                                                                              \
#tier "_min_priority", U32, offsetof(struct kvbm_manager_opts, tier##_policy.min_priority) \
    }
    KEY(TEXT, fingerprint),
    KEY(SIZE, host_bytes),
    KEY(U32, staging_blocks),
    KEY(EVICTION, host_eviction),
    KEY(BOOL, host_pinned),
    KEY(BOOL, huge_pages),
    POLICY_KEYS(host),
    KEY(TEXT, disk),
    KEY(SIZE, disk_bytes),
    KEY(EVICTION, disk_eviction),
    POLICY_KEYS(disk),
    KEY(BOOL, disk_buffered),
    KEY(BOOL, disk_volatile),
    KEY(TEXT, object),
    KEY(U32, object_blocks),
    KEY(BOOL, object_write_through),
    KEY(U32, object_timeout_ms),
    POLICY_KEYS(object),
    KEY(U32, copy_threads),
    KEY(IO, io),
    KEY(U32, io_depth),
    KEY(U32, max_offload),
    KEY(U32, max_jobs),
    KEY(BOOL, io_registered),
    KEY(GPU_COPY, gpu_copy),
    KEY(BOOL, object_when_evicted),
    KEY(BOOL, host_shared),
    KEY(TEXT, peers),
    KEY(TEXT, peer_token_file),
    KEY(U32, peer_set),
    KEY(U32, peer_timeout_ms),
    KEY(TEXT, indexer),
    KEY(TEXT, indexer_model),
    KEY(TEXT, indexer_tenant),
    KEY(TEXT, indexer_token_file),
    KEY(TEXT, indexer_ca),
    KEY(U32, indexer_timeout_ms),
#undef KEY
#undef POLICY_KEYS
};

static const char *const words[][8] = {
    [POLICY] = {"default", "presence", "frequency", "never"},
    [EVICTION] = {"default", "lru", "lfu", "lineage"},
    [IO] = {"auto", "uring", "threads"},
    [GPU_COPY] = {"auto", "engines", "single"},
};

/* Return the size of a key's field: a struct that ends before it is of an older caller. */
static size_t size_of(const struct key *key)
{
    return key->kind == SIZE   ? sizeof(uint64_t)
           : key->kind == TEXT ? sizeof(char *)
           : key->kind == BOOL ? sizeof(bool)
                               : sizeof(uint32_t);
}

/* Parse one of a kind's words. Its number is that of the enumeration in kvbm_manager.h, so the
 * order of `words` must be the enumerations'. */
static int parse_word(enum kind kind, const char *text, uint32_t *ret)
{
    for (uint32_t i = 0; words[kind][i]; i++) {
        if (!kv_casecmp(text, words[kind][i])) {
            *ret = i;
            return 0;
        }
    }
    return -EINVAL;
}

/* Parse what people write for true and false, in any case. */
static int parse_bool(const char *text, bool *ret)
{
    static const char *const yes[] = {"1", "true", "yes", "on"}, *const no[] = {"0", "false", "no",
                                                                                "off"};

    for (size_t i = 0; i < KV_COUNT(yes); i++) {
        if (!kv_casecmp(text, yes[i]) || !kv_casecmp(text, no[i])) {
            *ret = !kv_casecmp(text, yes[i]);
            return 0;
        }
    }
    return -EINVAL;
}

static int set_number(const struct key *key, const char *text, void *field)
{
    uint64_t number;
    uint32_t small;
    int rc;

    if (key->kind == SIZE) {
        rc = kv_parse_size(text, &number);
        if (rc == 0)
            memcpy(field, &number, sizeof(number));
        return rc;
    }
    if (key->kind == U32) {
        rc = kv_parse_u64(text, &number);
        if (rc == 0 && number > UINT32_MAX)
            rc = -EINVAL;
        small = (uint32_t)number;
    } else {
        rc = parse_word(key->kind, text, &small);
    }
    if (rc == 0)
        memcpy(field, &small, sizeof(small));
    return rc;
}

/* Set an option. -EINVAL also when the caller's struct, of an older version, has no such field. */
static int set(struct kvbm_manager_opts *opts, const struct key *key, const char *text)
{
    void *field = (char *)opts + key->offset;

    if (key->offset + size_of(key) > opts->size)
        return -EINVAL;
    if (key->kind == TEXT) {
        memcpy(field, &text, sizeof(text));
        return 0;
    }
    return key->kind == BOOL ? parse_bool(text, field) : set_number(key, text, field);
}

/* Cut blanks at both ends; \r, too, of files from other systems. */
static char *trimmed(char *text)
{
    size_t len;

    text += strspn(text, " \t");
    len = strlen(text);
    while (len && strchr(" \t\r", text[len - 1]))
        text[--len] = '\0';
    return text;
}

static const struct key *key_of(const char *name)
{
    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        if (!strcmp(keys[i].name, name))
            return &keys[i];
    }
    return NULL;
}

/* Cut a comment, which begins with # at the start of a line or behind a blank: a value may contain
 * #. */
static void cut_comment(char *line)
{
    for (char *at = line; (at = strchr(at, '#')) != NULL; at++) {
        if (at == line || at[-1] == ' ' || at[-1] == '\t') {
            *at = '\0';
            return;
        }
    }
}

/* Log an error in a line: the file, the line, the key and, if misspelt, the nearest key. Text
 * of the file is quoted: it may have blanks and quotes, which end a value in the log. */
static int refuse(const char *file, unsigned number, const char *what, const char *name,
                  const char *value)
{
    const char *names[KV_COUNT(keys)], *nearest = NULL;
    char path[256], key[128], text[128];

    for (size_t i = 0; i < KV_COUNT(keys); i++)
        names[i] = keys[i].name;
    if (!value)
        nearest = kv_args_nearest(name, strlen(name), names, KV_COUNT(names));
    kv_log_error("kvbm", what, "file=%s line=%u key=%s%s%s", kv_log_quote(path, sizeof(path), file),
                 number, kv_log_quote(key, sizeof(key), name),
                 value     ? " value="
                 : nearest ? " nearest="
                           : "",
                 value     ? kv_log_quote(text, sizeof(text), value)
                 : nearest ? nearest
                           : "");
    return -EINVAL;
}

/* Parse one line: "key = value", a comment, both, or nothing. A key that the caller's older struct
 * lacks is refused as an unknown one: nothing would come of it. */
static int set_line(struct kvbm_manager_opts *opts, char *line, const char *file, unsigned number)
{
    char *value, *name;
    const struct key *key;

    cut_comment(line);
    name = trimmed(line);
    if (!*name)
        return 0;
    value = strchr(name, '=');
    if (value)
        *value++ = '\0';
    name = trimmed(name);
    key = key_of(name);
    if (!key || key->offset + size_of(key) > opts->size)
        return refuse(file, number, "configuration: unknown key", name, NULL);
    if (!value)
        return refuse(file, number, "configuration: a key without =", name, "");
    value = trimmed(value);
    return set(opts, key, value) < 0
               ? refuse(file, number, "configuration: not a value of this key", name, value)
               : 0;
}

/* Set all lines up to the first wrong one. Cuts @text into pieces, to which text options point. */
static int set_lines(struct kvbm_manager_opts *opts, const char *file, char *text)
{
    unsigned number = 0;
    char *line;
    int rc = 0;

    while (rc == 0 && (line = strsep(&text, "\n")) != NULL)
        rc = set_line(opts, line, file, ++number);
    return rc;
}

/* Warn of each variable KVBM_* that names no key, with the nearest one. Not an error as in a file:
 * programs of other versions share the environment, and may have keys that this one lacks. */
static void warn_of_environment(void)
{
    char names[KV_COUNT(keys)][32];
    const char *variables[KV_COUNT(keys) + 1] = {
        "DISK_DIR"}; /* of memory in files, in storage_disk.c */

    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        size_t n = 0;

        for (const char *c = keys[i].name; *c && n + 1 < sizeof(names[i]); c++)
            names[i][n++] = kv_upper(*c);
        names[i][n] = '\0';
        variables[i + 1] = names[i];
    }
    kv_args_warn_misspelt("kvbm", "KVBM_", variables, KV_COUNT(variables));
}

/* Set the options that the environment names. Their strings go to @text, which has room for all. */
static int set_environment(struct kvbm_manager_opts *opts, char *text)
{
    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        char name[64] = "KVBM_";
        const char *value;
        size_t n = strlen(name);

        for (const char *c = keys[i].name; *c; c++)
            name[n++] = kv_upper(*c);
        name[n] = '\0';
        value = getenv(name);
        if (!value || !*value) /* empty counts as not set, as for the programs */
            continue;
        /* the caller was compiled for an older library without this option */
        if (keys[i].offset + size_of(&keys[i]) > opts->size) {
            kv_log_warn("kvbm", "configuration: variable ignored, the program is too old for it",
                        "name=%s", name);
            continue;
        }
        value = strcpy(text, value); /* need() counted the room */
        text += strlen(value) + 1;
        if (set(opts, &keys[i], value) < 0) {
            kv_log_error("kvbm", "configuration: not a value of the variable", "name=%s", name);
            return -EINVAL;
        }
    }
    return 0;
}

/* Return the room that the values of all variables KVBM_* need, at most. Counted before, since a
 * string that grew would move, and options point into it. */
static size_t need_of_environment(void)
{
    size_t need = 1;

    for (char **at = environ; *at; at++)
        need += strncmp(*at, "KVBM_", 5) ? 0 : strlen(*at) + 1;
    return need;
}

/* Read a file of at most MAX_FILE bytes: more is not a configuration. */
static int read_file(const char *path, struct kv_buf *to)
{
    FILE *file = fopen(path, "re");
    char chunk[4096];
    size_t n;
    int rc = file ? 0 : -errno;

    while (file && (n = fread(chunk, 1, sizeof(chunk), file)) > 0)
        kv_buf_append(to, chunk, n);
    if (file && ferror(file))
        rc = -EIO;
    if (file)
        fclose(file);
    return rc < 0 ? rc : to->error;
}

int kvbm_manager_configure(struct kvbm_manager_opts *opts, const char *file, char **ret_strings)
{
    struct kv_buf text = {.limit = MAX_FILE};
    struct kvbm_manager_opts out = {0};
    char *strings = NULL;
    int rc;

    if (!ret_strings || !kv_sized(opts, "kvbm_manager_opts"))
        return -EINVAL;
    memcpy(&out, opts, KV_MIN(opts->size, sizeof(out)));
    rc = file ? read_file(file, &text) : 0;
    /* a NUL would hide the rest of the file */
    if (rc == 0 && memchr(text.data ? text.data : "", '\0', text.len))
        rc = -EINVAL;
    if (rc == 0) {
        strings = malloc(text.len + 1 + need_of_environment());
        rc = strings ? 0 : -ENOMEM;
    }
    if (rc == 0) {
        memcpy(strings, kv_buf_cstr(&text), text.len + 1);
        rc = set_lines(&out, file ? file : "", strings);
    }
    if (rc == 0) {
        warn_of_environment();
        rc = set_environment(&out, strings + text.len + 1);
    }
    kv_buf_fini(&text);
    if (rc < 0) {
        free(strings);
        return rc;
    }
    /* only now: a failing call leaves the options as they were */
    KV_GIVE(opts, &out);
    *ret_strings = strings;
    return 0;
}
