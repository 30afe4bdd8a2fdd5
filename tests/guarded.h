// SPDX-License-Identifier: Apache-2.0
/**
 * Arrays that end where no memory is: a function that reads or writes beyond a caller's array ends the
 * test, in every build.
 */
#ifndef KV_TESTS_GUARDED_H
#define KV_TESTS_GUARDED_H

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/unit.h"

/** Memory of one array; zero it before the first use. */
struct guarded {
    char *map;
    size_t mapped;
};

/** Return memory of exactly @bytes, a copy of @from (NULL: zeroed). It replaces what @g had. */
static inline void *guard(struct guarded *g, const void *from, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rest = (bytes + page - 1) / page * page;
    char *at;

    if (g->mapped != rest + page) {
        if (g->map)
            assert_int_equal(munmap(g->map, g->mapped), 0);
        g->mapped = rest + page;
        g->map = mmap(NULL, g->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(g->map != MAP_FAILED);
        assert_int_equal(mprotect(g->map + rest, page, PROT_NONE), 0);
    }
    at = g->map + rest - bytes;
    if (from && bytes)
        memcpy(at, from, bytes);
    else if (bytes)
        memset(at, 0, bytes);
    return at;
}

static inline void unguard(struct guarded *g)
{
    if (g->map)
        assert_int_equal(munmap(g->map, g->mapped), 0);
    *g = (struct guarded){0};
}

#endif
