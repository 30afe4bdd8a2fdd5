// SPDX-License-Identifier: Apache-2.0
#include "store/plugin.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"

enum { NAME_MAX_LEN = 128, TEXT_LEN = 512 };

const char *kvs_plugin_check(const kv_store_vtable *table, kv_store_vtable *ret)
{
    kv_store_vtable calls = {0};

    if (!table)
        return "its table is NULL";
    if (table->version < KV_STORE_VERSION_1)
        return "its table has version 0";
    /* A table of version 1 may end before the fields of version 2: they must not even be read. */
    memcpy(&calls, table,
           table->version >= KV_STORE_VERSION_2 ? sizeof(calls)
                                                : offsetof(kv_store_vtable, prefetch_chunks));
    if (!calls.open || !calls.close || !calls.put_chunk || !calls.get_chunk ||
        !calls.put_manifest || !calls.get_manifest || !calls.delete_manifest)
        return "its table lacks a required function";
    *ret = calls;
    return NULL;
}

const char *kvs_plugin_check_ext(const kv_store_ext *ext, kv_store_ext *ret)
{
    if (ext->size < offsetof(kv_store_ext, exists_chunks))
        return "its extension table is too short";
    if (ext->version != KV_STORE_EXT_VERSION)
        return "its extension table has another version";
    memset(ret, 0, sizeof(*ret));
    /* Half a pointer at the end of a table is none. */
    memcpy(ret, ext, KV_MIN(ext->size, sizeof(*ret)) / sizeof(void *) * sizeof(void *));
    ret->size = sizeof(*ret);
    return NULL;
}

/* -- finding the library ----------------------------------------------------------------------- */

/*
 * Never unloaded: libraries below a plugin (TLS, HTTP clients) leave destructors with threads that
 * would run into unmapped code.
 */
static void *load(const char *path)
{
    return dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
}

static int refuse(int rc, const char *what, const char *path, const char *why)
{
    char quoted_path[TEXT_LEN], quoted_why[TEXT_LEN];

    kv_log_error("store", what, "plugin=%s reason=%s",
                 kv_log_quote(quoted_path, sizeof(quoted_path), path),
                 kv_log_quote(quoted_why, sizeof(quoted_why), why));
    return rc;
}

/*
 * Look for libkv_store_@name.so in $KV_STORE_LIBRARY_PATH, then where the loader looks. -ENOENT
 * without a line: the caller may know another name. @why gets the loader's reason.
 */
static int find(const char *name, void **ret, char *why, size_t why_size)
{
    const char *folder = secure_getenv("KV_STORE_LIBRARY_PATH");
    char file[NAME_MAX_LEN], path[4096];
    const char *reason;

    snprintf(file, sizeof(file), KV_STORE_LIBRARY_PREFIX "%s.so", name);
    if (folder && *folder) {
        if (snprintf(path, sizeof(path), "%s/%s", folder, file) >= (int)sizeof(path))
            return refuse(-ENAMETOOLONG, "can't load a plugin", folder, "path too long");
        if (access(path, F_OK) == 0) {
            *ret = load(path);
            return *ret ? 0 : refuse(-EPROTO, "can't load a plugin", path, dlerror());
        }
    }
    *ret = load(file);
    if (*ret)
        return 0;
    reason = dlerror();
    snprintf(why, why_size, "%s", reason ? reason : "not found");
    /* The loader's words are all there is: of a library that lacks another one they name that. */
    return reason && strncmp(reason, file, strlen(file)) != 0
               ? refuse(-EPROTO, "can't load a plugin", file, reason)
               : -ENOENT;
}

/* Name the plugin that serves a scheme without a library of its own name. False: there is none. */
static bool alias(const char *scheme, char *name, size_t size)
{
    size_t len = strcspn(scheme, "+");

    if (strcmp(scheme, "rediss") == 0)
        len = strlen("redis");
    if (len == 0 || len >= size || !scheme[len])
        return false;
    memcpy(name, scheme, len);
    name[len] = '\0';
    if (strcmp(name, "rediss") == 0) /* rediss+cluster */
        name[strlen("redis")] = '\0';
    return true;
}

/* The tables of a library, checked once. */
static const char *read_tables(void *library, struct kvs_plugin *ret)
{
    const kv_store_vtable *(*get_table)(void);
    const kv_store_ext *(*get_ext)(void);
    kv_store_vtable calls;

    *(void **)&get_table = dlsym(library, KV_STORE_VTABLE_SYMBOL);
    *(void **)&get_ext = dlsym(library, KV_STORE_EXT_SYMBOL);
    if (!get_table)
        return "no symbol " KV_STORE_VTABLE_SYMBOL;
    ret->library = library;
    ret->table = get_table();
    ret->ext = get_ext ? get_ext() : NULL;
    return kvs_plugin_check(ret->table, &calls);
}

int kvs_plugin_load(const char *scheme, struct kvs_plugin *ret)
{
    struct kvs_plugin plugin = {0};
    char other[NAME_MAX_LEN], first_why[TEXT_LEN], why[TEXT_LEN];
    const char *wrong;
    void *library;
    int rc;

    rc = find(scheme, &library, first_why, sizeof(first_why));
    if (rc == -ENOENT && alias(scheme, other, sizeof(other)))
        rc = find(other, &library, why, sizeof(why));
    if (rc == -ENOENT)
        return refuse(rc, "no plugin for this scheme", scheme, first_why);
    if (rc)
        return rc;
    wrong = read_tables(library, &plugin);
    if (wrong) {
        dlclose(library);
        return refuse(-EPROTO, "not a kv_store plugin", scheme, wrong);
    }
    *ret = plugin;
    return 0;
}

void kvs_plugin_unload(struct kvs_plugin *plugin)
{
    if (plugin->library)
        dlclose(plugin->library);
    *plugin = (struct kvs_plugin){0};
}
