// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/backend.h"
#include "kvx/log.h"

#define LIBRARY "libkvx_cuda.so.0"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvx_backend *backend; /* written once, before pthread_once returns */

/* Open libkvx_cuda beside the object that contains this code; NULL when that object is unknown. */
static void *open_beside(void)
{
    Dl_info self;
    char path[4096];
    const char *slash;
    int len;

    if (!dladdr((void *)&once, &self) || !self.dli_fname)
        return NULL;
    slash = strrchr(self.dli_fname, '/');
    if (!slash)
        return NULL;
    len = snprintf(path, sizeof(path), "%.*s/" LIBRARY, (int)(slash - self.dli_fname),
                   self.dli_fname);
    return len > 0 && (size_t)len < sizeof(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
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
