// SPDX-License-Identifier: Apache-2.0
#include "store/backend/plugin.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/file/own_path.h"

enum { NAME_MAX_LEN = 128, TEXT_LEN = 512 };

const char *kvs_plugin_check(const kv_store_vtable *table, kv_store_vtable *ret)
{
    kv_store_vtable calls = {0};

    if (!table)
        return "its table is NULL";
    if (table->version < KV_STORE_VERSION_1)
        return "its table has version 0";
    /* A table of version 1 may end before the fields of version 2: don't even read them. */
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
    /* Ignore half a pointer at the end of a table. */
    memcpy(ret, ext, KV_MIN(ext->size, sizeof(*ret)) / sizeof(void *) * sizeof(void *));
    ret->size = sizeof(*ret);
    return NULL;
}

/* -- finding the library ----------------------------------------------------------------------- */

/* Load a plugin and never unload it: libraries below it (TLS, HTTP clients) leave thread
 * destructors that would run unmapped code. */
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

/* Load @folder/@file if that file exists, valid or not; -ENOENT without a log line if it doesn't. A
 * dangling link counts as a file, and a folder that can't be searched may have the file. */
static int load_from(const char *folder, const char *file, void **ret)
{
    struct stat stat;
    char path[4096];

    if (snprintf(path, sizeof(path), "%s/%s", folder, file) >= (int)sizeof(path))
        return refuse(-ENAMETOOLONG, "can't load a plugin", folder, "path too long");
    if (lstat(path, &stat) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return -ENOENT;
    *ret = load(path);
    return *ret ? 0 : refuse(-EPROTO, "can't load a plugin", path, dlerror());
}

/* True when only the system, the caller and the owner of @code can have put files into a folder. */
static bool is_trusted(const char *folder, const char *code)
{
    struct stat dir, file;

    if (stat(folder, &dir) != 0 || dir.st_mode & S_IWOTH)
        return false;
    return dir.st_uid == 0 || dir.st_uid == geteuid() ||
           (stat(code, &file) == 0 && file.st_uid == dir.st_uid);
}

/*
 * Find the folder of plugins that were installed, or built, with this code: the one of
 * libkvstore.so, or the library folder beside that of the statically linked program. False where
 * kv_own_path finds none, and when other users can write to the folder.
 */
static bool own_folder(char *ret, size_t size)
{
    char code[4096];
    bool is_program;
    const char *slash;

    if (!kv_own_path((void *)own_folder, code, sizeof(code), &is_program))
        return false;
    slash = strrchr(code, '/');
    if (!slash || snprintf(ret, size, "%.*s%s", (int)(slash - code), code,
                           is_program ? "/" KVS_LIBRARIES_OF_PROGRAMS : "") >= (int)size)
        return false;
    return is_trusted(ret, code);
}

enum place { ASKED_FOR, BESIDE, LOADER, N_PLACES };

/* Look for libkv_store_@name.so in one place. -ENOENT without a log line, since the caller may try
 * another place or name. @why gets the loader's reason. */
static int find(enum place place, const char *name, void **ret, char *why, size_t why_size)
{
    const char *folder = secure_getenv("KV_STORE_LIBRARY_PATH");
    char file[NAME_MAX_LEN], own[4096];
    const char *reason;

    snprintf(file, sizeof(file), KV_STORE_LIBRARY_PREFIX "%s.so", name);
    if (place == ASKED_FOR)
        return folder && *folder ? load_from(folder, file, ret) : -ENOENT;
    if (place == BESIDE)
        return own_folder(own, sizeof(own)) ? load_from(own, file, ret) : -ENOENT;
    *ret = load(file);
    if (*ret)
        return 0;
    reason = dlerror();
    snprintf(why, why_size, "%s", reason ? reason : "not found");
    /* Report the loader's reason as it is: it names a missing dependency, too. */
    return reason && strncmp(reason, file, strlen(file)) != 0
               ? refuse(-EPROTO, "can't load a plugin", file, reason)
               : -ENOENT;
}

/* Name the plugin that serves a scheme without a library of its own name. False: none does. */
static bool alias(const char *scheme, char *name, size_t size)
{
    size_t len = strcspn(scheme, "+");

    if (strcmp(scheme, "rediss") == 0)
        len = strlen("redis");
    if (len == 0 || len >= size || !scheme[len])
        return false;
    memcpy(name, scheme, len);
    name[len] = '\0';
    if (strcmp(name, "rediss") == 0) /* scheme rediss+cluster */
        name[strlen("redis")] = '\0';
    return true;
}

/* Read the tables of a library and check them once. */
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
    bool has_alias = alias(scheme, other, sizeof(other));
    const char *wrong;
    void *library;
    int rc = -ENOENT;

    for (enum place place = ASKED_FOR; rc == -ENOENT && place < N_PLACES; place++) {
        rc = find(place, scheme, &library, first_why, sizeof(first_why));
        if (rc == -ENOENT && has_alias)
            rc = find(place, other, &library, why, sizeof(why));
    }
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
