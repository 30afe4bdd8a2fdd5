// SPDX-License-Identifier: Apache-2.0
/*
 * A volume's two files: find, lock, create or take them over, and their headers.
 *
 * Another fingerprint's files stay as they are: the volume goes into a subdirectory then.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "base/file/beneath.h"
#include "base/file/sync_dir.h"
#include "tier/disk/impl.h"

#define LOCK_PAUSE_NS (10 * KV_NS_PER_MS)
#define LOCK_NS KV_NS_PER_S
/* for files without a header that another process has: it may be making them */
#define MAKER_NS (5 * KV_NS_PER_S)

/* ---- files ---- */

/* Return when a wait ends that all volumes share. The first one to wait begins it. */
static uint64_t end_of(uint64_t *until_ns, uint64_t ns)
{
    if (!*until_ns)
        *until_ns = kv_now_ns() + ns;
    return *until_ns;
}

/* Say that the file system has no locks, without which two processes could write the same slots. */
static int no_locks(const struct kvbm_disk_volume *volume, int error)
{
    char where[512];

    kv_log_error(
        "kvbm",
        "a disk tier needs file locks (flock), which this file system doesn't have: mount it "
        "with them (Lustre: -o flock; NFS: a lock daemon), or name a local disk",
        "directory=%s error=\"%s\"", kv_log_quote(where, sizeof(where), volume->directory),
        strerror(error));
    return -error;
}

/* Lock a file. A killed process may still hold it for a moment, until the kernel has ended the
 * requests of its ring. */
static int lock(struct kvbm_disk_volume *volume, int fd)
{
    for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB) < 0; tries++) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return no_locks(volume, errno);
        if (kv_now_ns() >= end_of(&volume->disk->locks_until_ns, LOCK_NS))
            return -EBUSY;
        if (tries == 1 && !volume->waited)
            kv_log_warn("kvbm", "another process has a disk tier's files: waiting for it",
                        "volume=%u", volume->number);
        volume->waited |= tries == 1;
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
    }
    return 0;
}

static int open_file(struct kvbm_disk_volume *volume, const char *name, const char *kind)
{
    char path[300];
    struct stat st;
    int fd, err;

    err = kvbm_disk_file_name(path, sizeof(path), name, volume->file, kind);
    if (err < 0)
        return err;
    fd = kv_beneath_file(volume->directory_fd, path, O_RDWR | O_CREAT, 0600, 0, NULL);
    if (fd < 0)
        return fd;
    err = lock(volume, fd);
    if (err == 0 && fstat(fd, &st) < 0)
        err = -errno;
    if (err == 0 && !st.st_nlink) /* another process removed the file between open and lock */
        err = -EBUSY;
    if (err < 0) {
        close(fd);
        return err;
    }
    return fd;
}

/* Unlock and close. A child after fork() shares the open file: without the unlock the lock would
 * last as long as the child. */
static void close_locked(const struct kvbm_disk *disk, int *fd)
{
    if (*fd < 0)
        return;
    if (getpid() == disk->process)
        flock(*fd, LOCK_UN);
    close(*fd);
    *fd = -1;
}

/* Open and lock both files in the volume's directory. */
static int open_both(struct kvbm_disk_volume *volume, const char *name)
{
    volume->index_fd = open_file(volume, name, "index");
    if (volume->index_fd < 0)
        return volume->index_fd;
    volume->slots_fd = open_file(volume, name, "slots");
    return volume->slots_fd < 0 ? volume->slots_fd : 0;
}

/* Read @len bytes, or fewer at the file's end. Returns their number. */
long kvbm_disk_read_all(int fd, void *memory, size_t len, uint64_t offset)
{
    size_t got = 0;

    while (got < len) {
        ssize_t n = pread(fd, (char *)memory + got, len - got, (off_t)(offset + got));

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    return (long)got;
}

static int write_all(int fd, const void *memory, size_t len, uint64_t offset)
{
    while (len) {
        ssize_t n = pwrite(fd, memory, len, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        memory = (const char *)memory + n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

/* ---- headers ---- */

static bool is_like(const struct kvbm_disk_header *found, const struct kvbm_disk_header *want)
{
    return found->key_len == want->key_len && found->slot_bytes == want->slot_bytes &&
           memcmp(found->fingerprint, want->fingerprint, 16) == 0;
}

static enum kvbm_disk_owner owner_of(const struct kvbm_disk_volume *volume, int fd,
                                     enum kvbm_disk_file kind)
{
    uint8_t page[KVBM_DISK_PAGE];
    struct kvbm_disk_header found;

    if (fd < 0 || kvbm_disk_read_all(fd, page, sizeof(page), 0) != (long)sizeof(page) ||
        kvbm_disk_header_read(page, kind, &found) < 0)
        return KVBM_DISK_NOBODYS;
    return is_like(&found, &volume->header) ? KVBM_DISK_OURS : KVBM_DISK_OTHERS;
}

enum kvbm_disk_owner kvbm_disk_files_owner(const struct kvbm_disk_volume *volume, const char *name,
                                           uint32_t file)
{
    static const char *const kinds[] = {[KVBM_DISK_SLOTS] = "slots", [KVBM_DISK_INDEX] = "index"};
    enum kvbm_disk_owner owner = KVBM_DISK_NOBODYS;

    for (int i = 0; i < 2; i++) {
        enum kvbm_disk_owner one;
        char path[300];
        int fd;

        if (kvbm_disk_file_name(path, sizeof(path), name, file, kinds[i]) < 0)
            break;
        fd = kv_beneath_file(volume->directory_fd, path, O_RDONLY, 0, 0, NULL);
        one = owner_of(volume, fd, (enum kvbm_disk_file)i);
        owner = KV_MAX(owner, one);
        if (fd >= 0)
            close(fd);
    }
    return owner;
}

/* ---- directories ---- */

static int sync_directory(struct kvbm_disk_volume *volume)
{
    return kv_sync_dir(volume->directory_fd, &volume->told_names, "kvbm", volume->directory);
}

/* Go on in the subdirectory for this fingerprint and size of blocks. @make false: when there is one,
 * else -ENOENT. */
static int enter_own(struct kvbm_disk_volume *volume, const char *directory, bool make)
{
    uint8_t both[16 + 16], sum[16];
    char name[32];
    bool made = false;
    int fd;

    memcpy(both, volume->header.fingerprint, 16);
    kv_put_le64(both + 16, volume->header.key_len);
    kv_put_le64(both + 24, volume->header.slot_bytes);
    kvbm_disk_sum(both, sizeof(both), sum);
    snprintf(name, sizeof(name), "kvbm-%02x%02x%02x%02x%02x%02x%02x%02x", sum[0], sum[1], sum[2],
             sum[3], sum[4], sum[5], sum[6], sum[7]);
    fd = kv_beneath_dir(volume->directory_fd, name, make ? 0700 : 0, &made);
    if (fd < 0)
        return fd;
    if (made && sync_directory(volume) < 0)
        kv_log_warn("kvbm", "a new directory may be gone after a power cut", "directory=%s", name);
    if (make)
        kv_log_warn(
            "kvbm",
            "the disk tier's files are another model's or rank's: using a subdirectory, which "
            "takes disk_bytes more",
            "volume=%u directory=%s subdirectory=%s", volume->number, directory, name);
    close(volume->directory_fd);
    volume->directory_fd = fd;
    volume->beside = true;
    return 0;
}

static void unlock_both(struct kvbm_disk_volume *volume)
{
    close_locked(volume->disk, &volume->slots_fd);
    close_locked(volume->disk, &volume->index_fd);
}

/* Open both files, or tell that they are another fingerprint's: 1. A process that is just making
 * them has the locks before it has written whose they are: wait for that. */
static int open_ours(struct kvbm_disk_volume *volume, const char *name)
{
    int err;

    for (;;) {
        enum kvbm_disk_owner owner = kvbm_disk_files_owner(volume, name, 0);

        if (owner == KVBM_DISK_OTHERS)
            return 1;
        err = open_both(volume, name);
        if (err != -EBUSY)
            break;
        unlock_both(volume);
        if (owner == KVBM_DISK_OURS ||
            kv_now_ns() >= end_of(&volume->disk->makers_until_ns, MAKER_NS))
            break;
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
    }
    /* Another process may have been first, made them for another model and ended since the look. */
    if (err == 0 && owner_of(volume, volume->index_fd, KVBM_DISK_INDEX) == KVBM_DISK_OTHERS) {
        unlock_both(volume);
        return 1;
    }
    return err;
}

/* Open second or later files, where the directory's first ones are. */
static int open_later(struct kvbm_disk_volume *volume, const char *name)
{
    const struct kvbm_disk_volume *first = kvbm_disk_first_of(volume->disk, volume);

    if (first->missing)
        return -ENOENT;
    volume->directory_fd = fcntl(first->directory_fd, F_DUPFD_CLOEXEC, 0);
    if (volume->directory_fd < 0)
        return -errno;
    volume->beside = first->beside;
    return open_both(volume, name);
}

/*
 * Open the files of a volume. Another fingerprint's files stay: the volume goes into a subdirectory
 * then, which later opens prefer.
 */
int kvbm_disk_files_open(struct kvbm_disk_volume *volume, const char *directory, const char *name)
{
    int err;

    free(volume->directory);
    volume->directory = strdup(directory);
    if (!volume->directory)
        return -ENOMEM;
    if (volume->file)
        return open_later(volume, name);
    volume->directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (volume->directory_fd < 0)
        return -errno;
    err = enter_own(volume, directory, false);
    if (err != -ENOENT)
        return err < 0 ? err : open_both(volume, name);
    err = open_ours(volume, name);
    if (err <= 0)
        return err;
    err = enter_own(volume, directory, true);
    return err < 0 ? err : open_both(volume, name);
}

static int refuse_later(const struct kvbm_disk_volume *volume, uint32_t version)
{
    kv_log_error("kvbm",
                 "a disk tier's files are of a later version than this program knows: nothing is "
                 "changed; use that version, or delete them",
                 "volume=%u directory=%s version=%u", volume->number, volume->directory, version);
    return -EPROTONOSUPPORT;
}

/* Check a volume's headers. Returns 1: both are valid, agree, and fit the options; 0: no. A file
 * that can't be read is an error, so that a loose cable doesn't empty a volume; so is one of a later
 * version. */
static int take_over(struct kvbm_disk_volume *volume)
{
    const int fds[] = {[KVBM_DISK_SLOTS] = volume->slots_fd, [KVBM_DISK_INDEX] = volume->index_fd};
    uint8_t page[KVBM_DISK_PAGE];
    struct kvbm_disk_header found[2];
    bool fits = true;

    for (int i = 0; i < 2; i++) {
        long len = kvbm_disk_read_all(fds[i], page, sizeof(page), 0);
        int rc;

        if (len < 0)
            return (int)len;
        rc = len < (long)sizeof(page)
                 ? -EBADMSG
                 : kvbm_disk_header_read(page, (enum kvbm_disk_file)i, &found[i]);
        if (rc == -EPROTONOSUPPORT)
            return refuse_later(volume, found[i].version);
        fits = fits && rc == 0 && is_like(&found[i], &volume->header);
    }
    if (!fits)
        return 0;
    if (memcmp(found[0].uuid, found[1].uuid, 16) != 0 ||
        found[0].block_tokens != found[1].block_tokens)
        return 0;
    volume->header = found[0];
    return 1;
}

static bool is_empty(const struct kvbm_disk_volume *volume)
{
    struct stat index, slots;

    return fstat(volume->index_fd, &index) == 0 && fstat(volume->slots_fd, &slots) == 0 &&
           !index.st_size && !slots.st_size;
}

/* Empty a volume. Empties the index first, so that no record outlives the header it belongs to. */
int kvbm_disk_files_empty(struct kvbm_disk_volume *volume)
{
    if (ftruncate(volume->index_fd, 0) < 0 || fdatasync(volume->index_fd) < 0 ||
        ftruncate(volume->slots_fd, 0) < 0)
        return -errno;
    return 0;
}

int kvbm_disk_files_write_headers(struct kvbm_disk_volume *volume)
{
    uint8_t page[KVBM_DISK_PAGE];
    int err;

    kvbm_disk_header_write(&volume->header, KVBM_DISK_SLOTS, page);
    err = write_all(volume->slots_fd, page, sizeof(page), 0);
    if (err == 0 && fsync(volume->slots_fd) < 0)
        err = -errno;
    kvbm_disk_header_write(&volume->header, KVBM_DISK_INDEX, page);
    if (err == 0)
        err = write_all(volume->index_fd, page, sizeof(page), 0);
    if (err == 0 && fsync(volume->index_fd) < 0)
        err = -errno;
    return err == 0 ? sync_directory(volume) : err;
}

int kvbm_disk_files_identify(struct kvbm_disk_volume *volume)
{
    int ours = take_over(volume);

    if (ours != 0)
        return KV_MIN(ours, 0);
    volume->fresh = true;
    if (!is_empty(volume))
        kv_log_warn("kvbm", "a disk tier's files are damaged: emptied", "volume=%u",
                    volume->number);
    return getrandom(volume->header.uuid, sizeof(volume->header.uuid), 0) ==
                   (ssize_t)sizeof(volume->header.uuid)
               ? 0
               : -EAGAIN;
}

void kvbm_disk_files_close(struct kvbm_disk_volume *volume)
{
    unlock_both(volume);
    if (volume->directory_fd >= 0)
        close(volume->directory_fd);
    volume->directory_fd = -1;
    free(volume->directory);
    volume->directory = NULL;
}
