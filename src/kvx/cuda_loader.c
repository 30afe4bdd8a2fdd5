// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "kvx/backend.h"
#include "kvx/log.h"

#define LIBRARY "libkvx_cuda.so.0"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvx_backend *backend; /* written once, before pthread_once returns */

/*
 * Write the absolute path of the library or program that contains this code: as kv_own_path of
 * base/file/own_path.h, which says why, but this room uses no other.
 */
static bool own_path(char *ret, size_t size)
{
    struct link_map *map;
    Dl_info self;
    ssize_t len;

    if (getauxval(AT_SECURE) || !dladdr1((void *)&once, &self, (void **)&map, RTLD_DL_LINKMAP))
        return false;
    if (*map->l_name)
        return *map->l_name == '/' && snprintf(ret, size, "%s", map->l_name) < (int)size;
    len = readlink("/proc/self/exe", ret, size);
    if (len <= 0 || (size_t)len >= size)
        return false;
    ret[len] = '\0';
    return true;
}

static void *open_in(const char *folder, int len, const char *below)
{
    char path[4096];
    int n = snprintf(path, sizeof(path), "%.*s/%s" LIBRARY, len, folder, below);

    return n > 0 && (size_t)n < sizeof(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* Open libkvx_cuda beside libkvx or the program that has this code, or in lib/ beside its bin/. */
static void *open_beside(void)
{
    const char *slash;
    char code[4096];
    void *library;

    slash = own_path(code, sizeof(code)) ? strrchr(code, '/') : NULL;
    if (!slash)
        return NULL;
    library = open_in(code, (int)(slash - code), "");
    return library ? library : open_in(code, (int)(slash - code), "../lib/");
}

static void *open_library(void)
{
    const char *asked = secure_getenv("KVX_CUDA_LIBRARY");
    void *library;

    if (asked && *asked)
        return dlopen(asked, RTLD_NOW | RTLD_LOCAL);
    library = open_beside();
    return library ? library : dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
}

/* Refuse a library of another build, which would read the plan wrongly. */
static const struct kvx_backend *check(const struct kvx_backend *found)
{
    if (found && found->size >= sizeof(*found) && found->abi == KVX_BACKEND_ABI &&
        found->plan_size == sizeof(struct kvx_plan) && found->run)
        return found;
    kvx_log("device memory: " LIBRARY " is of another version");
    return NULL;
}

static void load(void)
{
    void *library = open_library();
    kvx_backend_fn get = NULL;
    void *symbol;

    if (!library) {
        const char *reason = dlerror();

        kvx_log("device memory is not supported: %s", reason ? reason : LIBRARY " not found");
        return;
    }
    symbol = dlsym(library, KVX_BACKEND_SYMBOL);
    memcpy(&get, &symbol, sizeof(get));
    if (!get) {
        kvx_log("device memory is not supported: no " KVX_BACKEND_SYMBOL " in " LIBRARY);
        dlclose(library);
        return;
    }
    backend = check(get());
    if (!backend)
        dlclose(library);
}

const struct kvx_backend *kvx_backend_get(void)
{
    pthread_once(&once, load);
    return backend;
}
