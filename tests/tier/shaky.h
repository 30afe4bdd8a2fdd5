// SPDX-License-Identifier: Apache-2.0
/**
 * Controls of shaky_plugin.c: shaky://PATH is the file store in PATH, which hangs, fails, is slow
 * or lies as the test sets it.
 */
#ifndef TESTS_TIER_SHAKY_H
#define TESTS_TIER_SHAKY_H

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

struct shaky {
    /* what to do; all are read at each call */
    _Atomic bool hang, hang_puts, hang_open, hang_close; /* until it becomes false */
    _Atomic bool hang_exists, hang_publications, hang_deletes;
    _Atomic int hang_publication; /* this one by number, from 1 on, while it is set; 0: none */
    _Atomic int hang_at;       /* in streams: before piece number so much, from 1 on; 0: nowhere */
    _Atomic int pass;          /* so many calls don't hang, while others do */
    _Atomic bool hang_answers; /* gets and exists have looked, and don't say what they saw */
    _Atomic bool refuse_open;
    _Atomic int fail_rc;        /* returned by every call but open; 0: none */
    _Atomic int fail_puts_rc;   /* likewise by puts */
    _Atomic int fail_last_rc;   /* of the last chunk of a put of several, which isn't stored */
    _Atomic int fail_exists_rc; /* likewise by exists, so many times more: */
    _Atomic int fail_exists_n;
    _Atomic int fail_publications; /* so many more fail, with EIO or: */
    _Atomic int fail_publications_rc;
    _Atomic int
        bad_ranges; /* parts of chunks fail with EIO whose keys have these bytes 8 and 9, + 1; 0: none */
    _Atomic int delay_us;
    _Atomic int
        lie; /* gets: 1 a bit is wrong, 2 the last byte is missing, 3 somebody else's value */
    _Atomic int
        ext; /* at open: 0 all, 1 none, 2 without batches and exists, 3 the ABI's version 1 alone, 4 all and streams */

    /* what happened */
    _Atomic int last_get; /* how many the last call for several gets wanted */
    _Atomic int opens, closes, inside, gets, get_batches, puts, put_batches, exists, prefetches,
        publications, deletes, touches, streams;
};

/** Let stores be opened by "shaky:", and return the plugin's controls. Ends the program without it. */
static inline struct shaky *shaky_find(void)
{
    const char *build = getenv("KV_BUILD_DIR");
    char path[4096];
    void *library;
    struct shaky *found;

    snprintf(path, sizeof(path), "%s/tests/plugins", build ? build : "build");
    setenv("KV_STORE_LIBRARY_PATH", path, 1);
    snprintf(path, sizeof(path), "%s/tests/plugins/libkv_store_shaky.so", build ? build : "build");
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    found = library ? dlsym(library, "shaky") : NULL;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

#endif
