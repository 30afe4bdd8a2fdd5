// SPDX-License-Identifier: Apache-2.0
#include "base/file/room.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/core/log.h"

int kv_room_for(int fd, uint64_t bytes)
{
    struct statvfs fs;

    if (fstatvfs(fd, &fs) < 0 || !fs.f_blocks)
        return 0;
    /*
     * Count blocks reserved for root as free: when we may not use them, the reservation itself
     * fails.
     */
    return bytes / (fs.f_frsize ? fs.f_frsize : 1) > fs.f_bfree ? -ENOSPC : 0;
}

uint64_t kv_room_had(int fd)
{
    struct stat st;

    return fstat(fd, &st) < 0 ? 0 : (uint64_t)st.st_blocks * 512;
}

static int allocate(int fd, uint64_t bytes, uint64_t now, const char *component)
{
    int rc;

    do
        rc = fallocate(fd, 0, 0, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (rc == 0)
        return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return -errno;
    if (now < bytes && ftruncate(fd, (off_t)bytes) < 0)
        return -errno;
    kv_log_info(component, "the file system can't reserve blocks: a full disk shows in writes",
                NULL);
    return 0;
}

int kv_room_reserve(int fd, uint64_t bytes, const char *component)
{
    struct rlimit limit;
    struct stat st;
    uint64_t had;
    int rc;

    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur)
        return -EFBIG; /* instead of the signal SIGXFSZ */
    if (fstat(fd, &st) < 0)
        return -errno;
    if (bytes > INT64_MAX)
        return -EFBIG;
    had = (uint64_t)st.st_blocks * 512;
    rc = kv_room_for(fd, bytes > had ? bytes - had : 0);
    if (rc == 0)
        rc = allocate(fd, bytes, (uint64_t)st.st_size, component);
    if (rc < 0 && S_ISREG(st.st_mode) && ftruncate(fd, st.st_size) < 0)
        kv_log_warn(component, "a file stays larger than it was", "errno=%d", errno);
    return rc;
}
