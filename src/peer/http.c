// SPDX-License-Identifier: Apache-2.0
/* Open libkvbm_http. libkvbm doesn't link libcurl: most programs never need it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "http_abi.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvbm_http_abi *http; /* written once, before pthread_once returns */

/* Open @folder/@below/libkvbm_http. Never unloaded: a thread may wait in it for a name server. */
static void *open_in(const char *folder, int len, const char *below)
{
    char path[4096];
    int n = snprintf(path, sizeof(path), "%.*s/%s" KVBM_HTTP_LIBRARY, len, folder, below);

    return n > 0 && (size_t)n < sizeof(path) && access(path, F_OK) == 0
               ? dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
               : NULL;
}

/* Open the library: as asked; beside the object that contains this code, or in lib/ beside a
 * program's folder; or where the loader finds it. */
static void *open_library(void)
{
    const char *asked = secure_getenv("KVBM_HTTP_LIBRARY"), *slash = NULL;
    void *library = NULL;
    Dl_info self;

    if (asked && *asked)
        return dlopen(asked, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (dladdr((void *)&once, &self) && self.dli_fname)
        slash = strrchr(self.dli_fname, '/');
    if (slash) {
        library = open_in(self.dli_fname, (int)(slash - self.dli_fname), "");
        if (!library)
            library = open_in(self.dli_fname, (int)(slash - self.dli_fname), "../lib/");
    }
    return library ? library : dlopen(KVBM_HTTP_LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
}

static void load(void)
{
    void *library = open_library(), *symbol;
    const char *reason = library ? "it is of another version" : dlerror();
    const struct kvbm_http_abi *found = NULL;
    kvbm_http_get_fn get = NULL;
    char quoted[512];

    if (library) {
        symbol = dlsym(library, KVBM_HTTP_SYMBOL);
        memcpy(&get, &symbol, sizeof(get));
        found = get ? get() : NULL;
    }
    if (found && found->size == sizeof(*found) && found->abi == KVBM_HTTP_ABI)
        http = found;
    else
        kv_log_error("kvbm", "etcd needs " KVBM_HTTP_LIBRARY, "reason=%s",
                     kv_log_quote(quoted, sizeof(quoted), reason ? reason : "not found"));
}

const struct kvbm_http_abi *kvbm_http_load(void)
{
    pthread_once(&once, load);
    return http;
}
