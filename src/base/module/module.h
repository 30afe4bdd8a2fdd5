// SPDX-License-Identifier: Apache-2.0
/**
 * Libraries of this build that are opened on first use, since most programs need neither OpenSSL,
 * libcurl, UCX nor NATS. Each gives one table of calls. Libraries of others are opened by the same
 * rules. Rooms that use this link ${CMAKE_DL_LIBS}; base doesn't.
 */
#ifndef KV_BASE_MODULE_MODULE_H
#define KV_BASE_MODULE_MODULE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** First member of every table. Another build's size or ABI number differs. */
struct kv_module_head {
    size_t size; /* bytes of the whole table */
    uint32_t abi;
};

/** Type of the one function that a library exports. */
typedef const struct kv_module_head *(*kv_module_get_fn)(void);

struct kv_module {
    const char *component;      /* of the log line */
    const char *library;        /* file name */
    const char *variable;       /* environment variable that may name another file */
    const char *symbol;         /* a kv_module_get_fn */
    const char *missing;        /* event of the log line when the library can't be used */
    struct kv_module_head head; /* beginning of the table */
};

/**
 * Open a library and never unload it: libraries below it leave destructors of threads. The first
 * file counts that exists: the one that @variable names; beside the library or program that contains
 * this code; in ../lib beside it; where the loader finds it. Programs with raised privileges, and
 * libraries that were opened by a relative path, look only where the loader finds it.
 * Returns the table, or NULL with one log line.
 */
const struct kv_module_head *kv_module_open(const struct kv_module *module);

/**
 * Open a library that isn't of this build, by the same rules; @file and @variable as in kv_module.
 * Returns a handle for dlsym, or NULL: see dlerror.
 */
void *kv_library_open(const char *file, const char *variable);

enum { KV_N_SIGNALS = 32 }; /* UCX takes none of the real-time ones */

/** Handlers of signals. UCX installs its own as it is loaded (SIGSEGV, SIGHUP ...). */
struct kv_signals {
    bool known[KV_N_SIGNALS];
    struct sigaction actions[KV_N_SIGNALS];
};

/** Note the program's handlers before a library is loaded that may replace them. */
void kv_signals_note(struct kv_signals *signals);

/** Set handlers again that are others than noted. */
void kv_signals_restore(const struct kv_signals *signals);

#endif
