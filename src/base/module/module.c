// SPDX-License-Identifier: Apache-2.0
#include "base/module/module.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/file/own_path.h"

#define FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)

/* Open @folder/@below/@file; NULL when there is none, or when it can't be opened. */
static void *open_in(const char *folder, int len, const char *below, const char *file)
{
    char path[4096];
    int n = snprintf(path, sizeof(path), "%.*s/%s%s", len, folder, below, file);

    return n > 0 && (size_t)n < sizeof(path) && access(path, F_OK) == 0 ? dlopen(path, FLAGS)
                                                                        : NULL;
}

/* Open a library beside the object that contains this code, or in lib/ beside a program's bin/. */
static void *open_beside(const char *file)
{
    const char *slash;
    char code[4096];
    void *library;
    bool is_program;

    if (!kv_own_path((void *)open_beside, code, sizeof(code), &is_program))
        return NULL;
    slash = strrchr(code, '/');
    if (!slash)
        return NULL;
    library = open_in(code, (int)(slash - code), "", file);
    return library ? library : open_in(code, (int)(slash - code), "../lib/", file);
}

void *kv_library_open(const char *file, const char *variable)
{
    const char *asked = secure_getenv(variable);
    void *library;

    if (asked && *asked)
        return dlopen(asked, FLAGS);
    library = open_beside(file);
    return library ? library : dlopen(file, FLAGS);
}

const struct kv_module_head *kv_module_open(const struct kv_module *module)
{
    void *library = kv_library_open(module->library, module->variable), *symbol;
    const char *reason = library ? "it is of another version" : dlerror();
    const struct kv_module_head *found = NULL;
    kv_module_get_fn get = NULL;
    char quoted[512];

    if (library) {
        symbol = dlsym(library, module->symbol);
        memcpy(&get, &symbol, sizeof(get));
        found = get ? get() : NULL;
    }
    if (found && found->size == module->head.size && found->abi == module->head.abi)
        return found;
    kv_log_error(module->component, module->missing, "reason=%s",
                 kv_log_quote(quoted, sizeof(quoted), reason ? reason : "not found"));
    return NULL;
}

/* ---- signals ---- */

void kv_signals_note(struct kv_signals *signals)
{
    for (int i = 1; i < KV_N_SIGNALS; i++)
        signals->known[i] = sigaction(i, NULL, &signals->actions[i]) == 0;
}

void kv_signals_restore(const struct kv_signals *signals)
{
    struct sigaction now;

    for (int i = 1; i < KV_N_SIGNALS; i++) {
        if (signals->known[i] && sigaction(i, NULL, &now) == 0 &&
            now.sa_sigaction != signals->actions[i].sa_sigaction)
            (void)sigaction(i, &signals->actions[i], NULL);
    }
}
