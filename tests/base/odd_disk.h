// SPDX-License-Identifier: Apache-2.0
/**
 * A file system that can't sync a directory, has no locks, or shows a lock to one host only: fsync()
 * and flock() of this program fail on request. keep_odd_lines() is a log sink for what is said of it.
 * Included by one file of a program.
 */
#ifndef KV_TESTS_BASE_ODD_DISK_H
#define KV_TESTS_BASE_ODD_DISK_H

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/log.h"

#define ODD_DISK_REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static _Atomic int dir_sync_error, flock_error; /* what the calls fail with; 0: they work */
static _Atomic bool flock_excludes_nobody;
static int n_lines;
static char lines[8000]; /* of level warning and above */

int fsync(int fd)
{
    struct stat st;

    if (dir_sync_error && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        errno = dir_sync_error;
        return -1;
    }
    return ODD_DISK_REAL(int, fsync, (int))(fd);
}

int flock(int fd, int how)
{
    if (flock_error) {
        errno = flock_error;
        return -1;
    }
    return flock_excludes_nobody ? 0 : ODD_DISK_REAL(int, flock, (int, int))(fd, how);
}

static void keep_odd_lines(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    size_t used = strlen(lines);

    (void)arg;
    if (level > KV_LOG_WARN)
        return;
    snprintf(lines + used, sizeof(lines) - used, "%.*s\n", (int)len, line);
    n_lines++;
}

static void no_lines(void)
{
    n_lines = 0;
    lines[0] = '\0';
}

#endif
