// SPDX-License-Identifier: Apache-2.0
/** PATH[?limit=SIZE&zstd=LEVEL&sync=auto|files|fs&sums=auto|files&create=yes|no]. */
#include <stdio.h>

#include "base/args/args.h"
#include "base/core/log.h"
#include "store/file/file_impl.h"

static const struct {
    const char *name, *wanted; /* the values it may have, for people */
} known[] = {{"limit", "a size, such as 100GiB"},
             {"zstd", "0 to 19"},
             {"sync", "auto, files or fs"},
             {"sums", "auto or files"},
             {"create", "yes or no"}};

static int parse_level(const char *text, int *ret)
{
    char *end;
    long level = strtol(text, &end, 10);

    if (text[0] < '0' || text[0] > '9' || *end || level > 19)
        return -EINVAL;
    *ret = (int)level;
    return 0;
}

static int parse_one(const char *key, const char *value, struct kvs_file_opts *ret)
{
    static const char *const syncs[] = {"auto", "files", "fs"};

    if (strcmp(key, "limit") == 0)
        return kv_parse_size(value, &ret->limit);
    if (strcmp(key, "zstd") == 0)
        return parse_level(value, &ret->zstd);
    if (strcmp(key, "sums") == 0 && (!strcmp(value, "auto") || !strcmp(value, "files"))) {
        ret->side_car = value[0] == 'f';
        return 0;
    }
    if (strcmp(key, "create") == 0 && (!strcmp(value, "yes") || !strcmp(value, "no"))) {
        ret->existing = value[0] == 'n';
        return 0;
    }
    if (strcmp(key, "sync") == 0) {
        for (size_t i = 0; i < KV_COUNT(syncs); i++) {
            if (strcmp(value, syncs[i]) == 0) {
                ret->sync = (enum kvs_file_sync)i;
                return 0;
            }
        }
    }
    return -EINVAL;
}

/* Log what is wrong with an option. @value is NULL when it has none. */
static int refuse(const char *key, const char *value)
{
    char name[128], text[128], names[64] = "";
    size_t len = 0;

    kv_log_quote(name, sizeof(name), key);
    for (size_t i = 0; i < KV_COUNT(known); i++) {
        if (strcmp(key, known[i].name) == 0) {
            kv_log_error("store", "an option has a value that it can't have",
                         "option=%s value=%s wanted=\"%s\"", name,
                         kv_log_quote(text, sizeof(text), value ? value : ""), known[i].wanted);
            return -EINVAL;
        }
        len += (size_t)snprintf(names + len, sizeof(names) - len, "%s%s", i ? ", " : "",
                                known[i].name);
    }
    kv_log_error("store", "unknown option", "option=%s known=\"%s\"", name, names);
    return -EINVAL;
}

/* Split @uri into path and options. A '?' without a '=' behind it is part of the path. */
int kvs_file_options(const char *uri, char **ret_dir, struct kvs_file_opts *ret)
{
    char *dir = strdup(uri), *mark, *save = NULL;

    *ret = (struct kvs_file_opts){0};
    if (!dir)
        return -ENOMEM;
    mark = strrchr(dir, '?');
    if (mark && strchr(mark, '=')) {
        *mark++ = '\0';
        for (char *key = strtok_r(mark, "&", &save); key; key = strtok_r(NULL, "&", &save)) {
            char *value = strchr(key, '=');

            if (value)
                *value++ = '\0';
            if (!value || parse_one(key, value, ret) < 0) {
                int rc = refuse(key, value);

                free(dir);
                return rc;
            }
        }
    }
    if (!*dir) {
        free(dir);
        kv_log_error("store", "a store needs a path", NULL);
        return -EINVAL;
    }
    *ret_dir = dir;
    return 0;
}
