// SPDX-License-Identifier: Apache-2.0
/** Find the files that were installed, or built, with the code that asks. */
#ifndef KV_BASE_OWN_PATH_H
#define KV_BASE_OWN_PATH_H

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/auxv.h>
#include <unistd.h>

/**
 * Write the absolute path of the library or program that contains @code to @ret, and whether that is
 * the program to *@ret_is_program. Returns false, with @ret undefined, in three cases:
 * - the program has raised privileges: another user may have linked to it from a folder of theirs;
 * - the library was opened by a relative path, since the current folder may have changed;
 * - the path has @size bytes or more.
 * The name of a program is asked of the kernel: the loader knows it only by argv[0], which the
 * caller of exec chooses. Thread-safe. In a header, since base doesn't link the loader.
 */
static inline bool kv_own_path(const void *code, char *ret, size_t size, bool *ret_is_program)
{
    struct link_map *map;
    Dl_info self;
    ssize_t len;

    if (getauxval(AT_SECURE) || !dladdr1(code, &self, (void **)&map, RTLD_DL_LINKMAP))
        return false;
    *ret_is_program = !*map->l_name;
    if (!*ret_is_program)
        return *map->l_name == '/' && snprintf(ret, size, "%s", map->l_name) < (int)size;
    len = readlink("/proc/self/exe", ret, size);
    if (len <= 0 || (size_t)len >= size)
        return false;
    ret[len] = '\0';
    return true;
}

#endif
