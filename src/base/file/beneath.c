// SPDX-License-Identifier: Apache-2.0
#include "base/file/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RACES = 8 }; /* attempts while other processes rename folders of the path */

/*
 * Return @error as openat2 would report it. Without openat2, O_DIRECTORY on a symbolic link fails
 * with -ENOTDIR instead of -ELOOP.
 */
static int reason(int at, const char *name, int error)
{
    struct stat st;

    if (error == ENOTDIR && fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode))
        return -ELOOP;
    return -error;
}

static int open_part(int at, const char *name, int flags, mode_t mode)
{
    int fd;

    if (strcmp(name, "..") == 0)
        return -EXDEV;
    do
        fd = openat(at, name, flags | O_NOFOLLOW | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd < 0 ? reason(at, name, errno) : fd;
}

int kv_beneath_steps(int at, const char *path, int flags, mode_t mode)
{
    char copy[PATH_MAX], *part = copy, *slash;
    int own = -1, fd;

    if (path[0] == '/')
        return -EXDEV;
    if (!path[0])
        return -ENOENT;
    if (strlen(path) >= sizeof(copy))
        return -ENAMETOOLONG;
    strcpy(copy, path);
    while ((slash = strchr(part, '/'))) {
        *slash = '\0';
        fd = *part ? open_part(at, part, O_PATH | O_DIRECTORY, 0) : -1;
        if (*part && own >= 0)
            close(own);
        if (*part && fd < 0)
            return fd;
        if (*part)
            at = own = fd;
        part = slash + 1;
    }
    fd = open_part(at, *part ? part : ".", flags, mode);
    if (own >= 0)
        close(own);
    return fd;
}

int kv_beneath_open(int at, const char *path, int flags, mode_t mode)
{
    struct open_how how = {.flags = (unsigned)(flags | O_CLOEXEC),
                           .mode = flags & O_CREAT ? mode : 0,
                           .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH};
    long fd = -1;

    if (!strchr(path, '/')) /* a single part: O_NOFOLLOW alone refuses symbolic links */
        return open_part(at, path, flags, mode);
    for (int i = 0; i < RACES && fd < 0; i++) {
        fd = syscall(SYS_openat2, at, path, &how, sizeof(how));
        if (fd < 0 && errno != EINTR && errno != EAGAIN)
            break;
    }
    /*
     * ENOSYS: an old kernel. EPERM: a container's filter refuses the unknown call, or the file's
     * permissions refuse us; the fallback finds out which.
     */
    if (fd < 0 && (errno == ENOSYS || errno == EPERM))
        return kv_beneath_steps(at, path, flags, mode);
    return fd < 0 ? -errno : (int)fd;
}

/* Find the owner of the directory that holds the last part of @path. */
static int directory_owner(int at, const char *path, uid_t *ret)
{
    const char *slash = strrchr(path, '/');
    char copy[PATH_MAX] = ".";
    struct stat st;
    int fd, rc = 0;

    if (slash) {
        /* The path was opened, hence fits PATH_MAX */
        memcpy(copy, path, (size_t)(slash - path) + 1);
        copy[slash - path + 1] = '\0';
    }
    fd = kv_beneath_open(at, copy, O_PATH | O_DIRECTORY, 0);
    if (fd < 0)
        return fd;
    if (fstat(fd, &st) < 0)
        rc = -errno;
    else
        *ret = st.st_uid;
    close(fd);
    return rc;
}

static int check(int at, const char *path, const struct stat *st, unsigned allow)
{
    uid_t owner = 0;
    int rc;

    if (S_ISDIR(st->st_mode))
        return -EISDIR;
    if (!S_ISREG(st->st_mode))
        return -ENXIO;
    if (!(allow & KV_BENEATH_ANY_LINKS) && st->st_nlink > 1)
        return -EMLINK;
    if ((allow & KV_BENEATH_ANY_OWNER) || st->st_uid == geteuid())
        return 0;
    rc = directory_owner(at, path, &owner);
    if (rc < 0)
        return rc;
    return st->st_uid == owner ? 0 : -EPERM;
}

/* Clear O_NONBLOCK: with it, io_uring fails reads that aren't in memory with -EAGAIN. */
static int settle(int fd, int flags)
{
    int now = fcntl(fd, F_GETFL);

    if (now < 0 || (!(flags & O_NONBLOCK) && fcntl(fd, F_SETFL, now & ~O_NONBLOCK) < 0))
        return -errno;
    if ((flags & O_TRUNC) && ftruncate(fd, 0) < 0)
        return -errno;
    return 0;
}

int kv_beneath_file(int at, const char *path, int flags, mode_t mode, unsigned allow,
                    struct stat *ret_st)
{
    int fd = kv_beneath_open(at, path, (flags & ~O_TRUNC) | O_NONBLOCK | O_NOCTTY, mode), rc;
    struct stat st;

    if (fd < 0)
        return fd;
    rc = fstat(fd, &st) < 0 ? -errno : check(at, path, &st, allow);
    if (rc == 0)
        rc = settle(fd, flags);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    if (ret_st)
        *ret_st = st;
    return fd;
}

int kv_beneath_dir(int at, const char *name, mode_t make_mode, bool *ret_made)
{
    int fd = kv_beneath_open(at, name, O_RDONLY | O_DIRECTORY, 0);

    if (fd != -ENOENT || !make_mode)
        return fd;
    if (mkdirat(at, name, make_mode) < 0 && errno != EEXIST)
        return -errno;
    if (ret_made)
        *ret_made = true;
    return kv_beneath_open(at, name, O_RDONLY | O_DIRECTORY, 0);
}
