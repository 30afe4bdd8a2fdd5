// SPDX-License-Identifier: Apache-2.0
/* Storage in a file. Space is reserved at creation, so that a full disk is reported then and not
 * when a block is written. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/file/room.h"
#include "bm/storage/storage.h"

#define DIRECT_ALIGNMENT 4096

/* ---- creating the file ---- */

static const char *directory_of(const struct kvbm_storage_opts *opts)
{
    const char *names[] = {opts->directory, getenv("KVBM_DISK_DIR"), getenv("TMPDIR"), "/tmp"};

    for (size_t i = 0;; i++) {
        if (names[i] && *names[i])
            return names[i];
    }
}

/* Open a file without a name, or one whose name is removed at once. */
static int open_nameless(const char *directory)
{
    char path[4096];
    int fd = open(directory, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);

    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd < 0 ? -errno : fd;
    if (snprintf(path, sizeof(path), "%s/kvbm-XXXXXX", directory) >= (int)sizeof(path))
        return -ENAMETOOLONG;
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    unlink(path);
    return fd;
}

/* Open a file; *@made: it is new. Refuse a file that another storage uses, as the two would
 * overwrite each other. */
static int open_named(const char *path, bool *made)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct stat st;

    *made = fd >= 0;
    if (fd < 0 && errno == EEXIST)
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    /* without a name: its storage removed it between our open and our lock */
    if ((flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) ||
        (fstat(fd, &st) == 0 && !st.st_nlink)) {
        close(fd);
        return -EBUSY;
    }
    return fd;
}

static bool go_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags >= 0 && fcntl(fd, F_SETFL, flags | O_DIRECT) == 0)
        return true;
    kv_log_info("kvbm", "the file system has no direct I/O: through the page cache", "errno=%d",
                errno);
    return false;
}

static int disk_open(struct kvbm_storage *storage, const struct kvbm_storage_opts *opts)
{
    uint64_t bytes = opts->bytes;
    bool made = false;
    int err;

    if (opts->direct) /* direct I/O transfers whole pages, also at the end */
        bytes = (bytes + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    if (opts->path && !opts->keep) {
        storage->path = strdup(opts->path);
        if (!storage->path)
            return -ENOMEM;
    }
    storage->fd = opts->path ? open_named(opts->path, &made) : open_nameless(directory_of(opts));
    err = storage->fd < 0 ? storage->fd : kv_room_reserve(storage->fd, bytes, "kvbm");
    if (err < 0) {
        if (made && err != -EBUSY) /* -EBUSY: another storage has locked it meanwhile */
            unlink(opts->path);
        if (storage->fd >= 0)
            close(storage->fd);
        free(storage->path);
        storage->path = NULL;
        return err;
    }
    storage->direct = opts->direct && go_direct(storage->fd);
    return 0;
}

static void disk_close(struct kvbm_storage *storage)
{
    if (storage->path)
        unlink(storage->path); /* with the lock held: after close() another storage may use it */
    close(storage->fd);
}

/* ---- copies: whole pages through an aligned buffer when I/O is direct ---- */

static int transfer(int fd, bool writing, void *memory, size_t len, uint64_t offset)
{
    char *at = memory;

    while (len) {
        ssize_t n =
            writing ? pwrite(fd, at, len, (off_t)offset) : pread(fd, at, len, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0) /* all of it was reserved, so another program has cut the file */
            return -EIO;
        at += n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

/* Transfer a range through whole pages: read them and, with @from, change and write them. */
static int bounce(const struct kvbm_storage *storage, uint64_t offset, void *to, const void *from,
                  size_t len)
{
    uint64_t first = offset / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    size_t whole =
        (offset + len - first + DIRECT_ALIGNMENT - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    void *pages;
    int err;

    if (posix_memalign(&pages, DIRECT_ALIGNMENT, whole) != 0)
        return -ENOMEM;
    err = transfer(storage->fd, false, pages, whole, first);
    if (err == 0 && to)
        memcpy(to, (char *)pages + (offset - first), len);
    if (err == 0 && from) {
        memcpy((char *)pages + (offset - first), from, len);
        err = transfer(storage->fd, true, pages, whole, first);
    }
    free(pages);
    return err;
}

static int disk_read(const struct kvbm_storage *storage, uint64_t offset, void *to, size_t len)
{
    return storage->direct ? bounce(storage, offset, to, NULL, len)
                           : transfer(storage->fd, false, to, len, offset);
}

static int disk_write(struct kvbm_storage *storage, uint64_t offset, const void *from, size_t len)
{
    return storage->direct ? bounce(storage, offset, NULL, from, len)
                           : transfer(storage->fd, true, (void *)(uintptr_t)from, len, offset);
}

const struct kvbm_storage_ops kvbm_storage_disk = {
    .open = disk_open,
    .close = disk_close,
    .read = disk_read,
    .write = disk_write,
};
