// SPDX-License-Identifier: Apache-2.0
/** Helpers for unit tests that wait for other threads, or need a directory of their own. */
#ifndef KV_TESTS_SUPPORT_H
#define KV_TESTS_SUPPORT_H

#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/unit.h"

/**
 * Wait until @condition holds, looking every half a millisecond. Fails with the condition's text after
 * a minute, which only something broken takes.
 */
#define wait_until(condition)                                       \
    do {                                                            \
        uint64_t until_ = kv_now_ns() + UINT64_C(60) * KV_NS_PER_S; \
        while (!(condition)) {                                      \
            if (kv_now_ns() > until_)                               \
                fail_msg("doesn't come to hold: %s", #condition);   \
            usleep(500);                                            \
        }                                                           \
    } while (0)

/** Make an empty directory in $TMPDIR or /tmp, and write its path to @ret. Returns 0, or -1 with errno. */
static inline int temp_dir(char *ret, size_t size)
{
    const char *tmp = getenv("TMPDIR");

    snprintf(ret, size, "%s/kvasir-XXXXXX", tmp && strlen(tmp) + 16 < size ? tmp : "/tmp");
    return mkdtemp(ret) ? 0 : -1;
}

/** Make an empty directory as temp_dir does, but on the disk of the build: /tmp may be memory. */
static inline int disk_dir(char *ret, size_t size)
{
    const char *build = getenv("KV_BUILD_DIR");

    snprintf(ret, size, "%s/kvasir-XXXXXX", build && strlen(build) + 16 < size ? build : "/tmp");
    return mkdtemp(ret) ? 0 : -1;
}

static inline int support_remove(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/** Remove a directory, or a file, with all that is in it. Returns 0, or -1 with errno. */
static inline int remove_dir(const char *path)
{
    return nftw(path, support_remove, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
