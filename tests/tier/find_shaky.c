// SPDX-License-Identifier: Apache-2.0
#include "tier/find_shaky.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct shaky *shaky;

void find_shaky(void)
{
    const char *build = getenv("KV_BUILD_DIR");
    char path[4096];
    void *library;

    snprintf(path, sizeof(path), "%s/tests/plugins", build ? build : "build");
    setenv("KV_STORE_LIBRARY_PATH", path, 1);
    snprintf(path, sizeof(path), "%s/tests/plugins/libkv_store_shaky.so", build ? build : "build");
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    shaky = library ? dlsym(library, "shaky") : NULL;
    if (!shaky) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}
