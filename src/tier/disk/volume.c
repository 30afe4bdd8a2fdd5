// SPDX-License-Identifier: Apache-2.0
/*
 * A volume's two files: find, lock, create or reopen them; read the index into memory.
 *
 * Volumes are independent. A missing one keeps its slot numbers, down and without records, while
 * the other volumes serve.
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

#include "base/beneath.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/le.h"
#include "base/log.h"
#include "base/room.h"
#include "tier/disk/impl.h"

enum {
    CHUNK = 1 << 20, /* bytes of the index read at once */
    LOCK_TRIES = 100,
    LOCK_PAUSE_NS = 10000000,
    MAKER_TRIES = 30 /* of LOCK_TRIES each: files without a header that another process has */
};

uint8_t *kvbm_disk_record_at(const struct kvbm_disk *disk, uint32_t slot)
{
    const struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, slot);

    return volume->image + (size_t)(slot / disk->n_volumes) * volume->header.record_bytes;
}

uint8_t *kvbm_disk_unknown_at(const struct kvbm_disk *disk, uint32_t slot)
{
    return &kvbm_disk_volume_of(disk, slot)->unknown[slot / disk->n_volumes];
}

/* ---- files ---- */

/* Lock a file. A killed process may still hold it for a moment, until the kernel has ended the
 * requests of its ring. */
static int lock(int fd)
{
    for (int tries = 0; flock(fd, LOCK_EX | LOCK_NB) < 0; tries++) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return -errno;
        if (tries == LOCK_TRIES)
            return -EBUSY;
        if (tries == 1)
            kv_log_info("kvbm", "another process has a disk tier's files: retrying for 1 s", NULL);
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
    }
    return 0;
}

static int open_file(int directory, const char *name, const char *kind)
{
    char path[300];
    struct stat st;
    int fd, err;

    if (snprintf(path, sizeof(path), "kvbm-%s.%s", name, kind) >= (int)sizeof(path))
        return -ENAMETOOLONG;
    fd = kv_beneath_file(directory, path, O_RDWR | O_CREAT, 0600, 0, NULL);
    if (fd < 0)
        return fd;
    err = lock(fd);
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
    volume->index_fd = open_file(volume->directory_fd, name, "index");
    if (volume->index_fd < 0)
        return volume->index_fd;
    volume->slots_fd = open_file(volume->directory_fd, name, "slots");
    return volume->slots_fd < 0 ? volume->slots_fd : 0;
}

/* Read @len bytes, or fewer at the file's end. Returns their number. */
static long read_all(int fd, void *memory, size_t len, uint64_t offset)
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

static bool is_one_volume(const struct kvbm_disk_header *a, const struct kvbm_disk_header *b)
{
    return memcmp(a->uuid, b->uuid, 16) == 0 && a->volume == b->volume && a->of == b->of;
}

/* NOBODYS: there is none, or its header isn't written yet, or damaged. */
enum owner { NOBODYS, OURS, OTHERS };

/* Tell whose file @fd is: OTHERS means of another fingerprint, or of blocks of another size. */
static enum owner owner_of(const struct kvbm_disk_volume *volume, int fd, enum kvbm_disk_file kind)
{
    uint8_t page[KVBM_DISK_PAGE];
    struct kvbm_disk_header found;

    if (fd < 0 || read_all(fd, page, sizeof(page), 0) != (long)sizeof(page) ||
        kvbm_disk_header_read(page, kind, &found) < 0)
        return NOBODYS;
    return is_like(&found, &volume->header) ? OURS : OTHERS;
}

/* Look at the files in the volume's directory, which another process may have locked. */
static enum owner owner_of_files(const struct kvbm_disk_volume *volume, const char *name)
{
    static const char *const kinds[] = {[KVBM_DISK_SLOTS] = "slots", [KVBM_DISK_INDEX] = "index"};
    enum owner owner = NOBODYS;

    for (int i = 0; i < 2; i++) {
        enum owner one;
        char path[300];
        int fd;

        snprintf(path, sizeof(path), "kvbm-%s.%s", name, kinds[i]);
        fd = kv_beneath_file(volume->directory_fd, path, O_RDONLY, 0, 0, NULL);
        one = owner_of(volume, fd, (enum kvbm_disk_file)i);
        owner = KV_MAX(owner, one);
        if (fd >= 0)
            close(fd);
    }
    return owner;
}

/* ---- directories ---- */

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
    if (made && fsync(volume->directory_fd) < 0)
        kv_log_warn("kvbm", "a new directory may be gone after a power cut", "directory=%s", name);
    if (make)
        kv_log_warn("kvbm",
                    "the disk tier's files are another model's: using a subdirectory, which takes "
                    "disk_bytes more",
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
    int err = -EBUSY;

    for (int tries = 0; err == -EBUSY && tries < MAKER_TRIES; tries++) {
        enum owner owner = owner_of_files(volume, name);

        if (owner == OTHERS)
            return 1;
        err = open_both(volume, name); /* tries for 1 s by itself */
        if (err == -EBUSY)
            unlock_both(volume);
        if (owner == OURS)
            break;
    }
    /* Another process may have been first, made them for another model and ended since the look. */
    if (err == 0 && owner_of(volume, volume->index_fd, KVBM_DISK_INDEX) == OTHERS) {
        unlock_both(volume);
        return 1;
    }
    return err;
}

/*
 * Open the files of a volume. Another fingerprint's files stay: the volume goes into a subdirectory
 * then, which later opens prefer.
 */
static int open_files(struct kvbm_disk_volume *volume, const char *directory, const char *name)
{
    int err;

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

/* Check a volume's headers. Returns 1: both are valid, agree, and fit the options; 0: no. A file
 * that can't be read is an error, so that a loose cable doesn't empty a volume. */
static int take_over(struct kvbm_disk_volume *volume)
{
    const int fds[] = {[KVBM_DISK_SLOTS] = volume->slots_fd, [KVBM_DISK_INDEX] = volume->index_fd};
    uint8_t page[KVBM_DISK_PAGE];
    struct kvbm_disk_header found[2];

    for (int i = 0; i < 2; i++) {
        long len = read_all(fds[i], page, sizeof(page), 0);

        if (len < 0)
            return (int)len;
        if (len < (long)sizeof(page) ||
            kvbm_disk_header_read(page, (enum kvbm_disk_file)i, &found[i]) < 0 ||
            !is_like(&found[i], &volume->header))
            return 0;
    }
    if (!is_one_volume(&found[0], &found[1]))
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
static int make_empty(struct kvbm_disk_volume *volume)
{
    if (ftruncate(volume->index_fd, 0) < 0 || fdatasync(volume->index_fd) < 0 ||
        ftruncate(volume->slots_fd, 0) < 0)
        return -errno;
    return 0;
}

static int write_headers(struct kvbm_disk_volume *volume)
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
    if (err == 0 && (fsync(volume->index_fd) < 0 || fsync(volume->directory_fd) < 0))
        err = -errno;
    return err;
}

/* ---- room ---- */

/* Give a file its length and reserve the space. Cuts off, durably, the rest of a longer file of
 * another configuration: removed keys may have had records there. */
static int reserve(int fd, uint64_t bytes)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    if ((uint64_t)st.st_size > bytes)
        return ftruncate(fd, (off_t)bytes) < 0 || fdatasync(fd) < 0 ? -errno : 0;
    return kv_room_reserve(fd, bytes, "kvbm");
}

static uint64_t still_wanted(int fd, uint64_t bytes)
{
    uint64_t had = kv_room_had(fd);

    return bytes > had ? bytes - had : 0;
}

static int reserve_both(struct kvbm_disk_volume *volume)
{
    uint64_t index = KVBM_DISK_PAGE + (uint64_t)volume->n_slots * volume->header.record_bytes;
    uint64_t slots = KVBM_DISK_PAGE + volume->n_slots * volume->disk->stride;
    int err = kv_room_for(volume->slots_fd, still_wanted(volume->index_fd, index) +
                                                still_wanted(volume->slots_fd, slots));

    if (err == 0)
        err = reserve(volume->index_fd, index);
    return err < 0 ? err : reserve(volume->slots_fd, slots);
}

static void go_direct(struct kvbm_disk_volume *volume)
{
    int flags = fcntl(volume->slots_fd, F_GETFL);

    volume->direct = flags >= 0 && fcntl(volume->slots_fd, F_SETFL, flags | O_DIRECT) == 0;
    if (!volume->direct)
        kv_log_info("kvbm", "the file system has no direct I/O: through the page cache", "errno=%d",
                    errno);
}

/* ---- the index ---- */

/* Drop the records of an unreadable place of the index. The file may hold them still. */
static void lose_image(struct kvbm_disk_volume *volume, size_t at, size_t len)
{
    memset(volume->image + at, 0, len);
    memset(volume->unknown + at / volume->header.record_bytes, 1,
           len / volume->header.record_bytes);
}

/* Read the index as far as possible; an unreadable place costs its own page. */
static void read_image(struct kvbm_disk_volume *volume, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t len = KV_MIN(bytes - at, (size_t)CHUNK);

        if (read_all(volume->index_fd, volume->image + at, len, KVBM_DISK_PAGE + at) >= 0)
            continue;
        kv_log_warn("kvbm", "a part of a disk tier's index can't be read", "volume=%u offset=%zu",
                    volume->number, at);
        for (size_t page = 0; page < len; page += KVBM_DISK_PAGE) {
            size_t rest = KV_MIN(len - page, (size_t)KVBM_DISK_PAGE);

            if (read_all(volume->index_fd, volume->image + at + page, rest,
                         KVBM_DISK_PAGE + at + page) < 0)
                lose_image(volume, at + page, rest);
        }
    }
}

static int make_image(struct kvbm_disk_volume *volume)
{
    size_t bytes = (size_t)volume->n_slots * volume->header.record_bytes;

    volume->image = calloc(1, bytes ? bytes : 1);
    volume->busy = calloc(1, volume->n_slots + 1);
    volume->unknown = calloc(1, volume->n_slots + 1);
    return volume->image && volume->busy && volume->unknown ? 0 : -ENOMEM;
}

/* Sync an existing index: a process that ended may have zeroed records that it hadn't synced yet. A
 * removal of their keys finds none, and must be durable. Returns false when the sync failed. */
static bool settle(const struct kvbm_disk_volume *volume)
{
    if (volume->fresh || volume->disk->volatile_ || fdatasync(volume->index_fd) == 0)
        return true;
    kv_log_warn("kvbm", "a disk tier's index can't be synced", "volume=%u errno=%d", volume->number,
                errno);
    return false;
}

static void load(struct kvbm_disk_volume *volume)
{
    struct kvbm_disk *disk = volume->disk;
    uint32_t record_bytes = volume->header.record_bytes;
    struct kvbm_disk_entry entry;
    bool settled = settle(volume);

    read_image(volume, (size_t)volume->n_slots * record_bytes);
    for (uint32_t i = 0; i < volume->n_slots; i++) {
        uint8_t *record = volume->image + (size_t)i * record_bytes;

        if (!kvbm_disk_record_read(&volume->header, i, record, &entry)) {
            memset(record, 0, record_bytes);
            volume->unknown[i] |= !settled; /* the disk may have one: a removal zeroes it again */
        } else if (entry.commit >= disk->commit) {
            disk->commit = entry.commit;
        }
    }
}

/* ---- all volumes ---- */

static void prepare(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts, uint32_t number)
{
    struct kvbm_disk_volume *volume = &disk->volumes[number];
    const char *fingerprint = KV_OPT(opts, fingerprint, "");

    volume->disk = disk;
    volume->number = number;
    volume->directory_fd = volume->slots_fd = volume->index_fd = -1;
    volume->n_slots = (disk->n_slots - number + disk->n_volumes - 1) / disk->n_volumes;
    volume->header =
        (struct kvbm_disk_header){.key_len = opts->key_len,
                                  .record_bytes = kvbm_disk_record_bytes(opts->key_len),
                                  .slot_bytes = opts->slot_bytes,
                                  .of = 1};
    kvbm_disk_sum(fingerprint, strlen(fingerprint), volume->header.fingerprint);
}

/* True for errors of a disk that has died or is absent, as opposed to errors that an operator must
 * correct. */
static bool is_missing(int err)
{
    return err == -ENOENT || err == -ENOTDIR || err == -EIO || err == -ENODEV || err == -ESTALE ||
           err == -EROFS || err == -ENOTCONN || err == -EUCLEAN;
}

static void close_files(struct kvbm_disk_volume *volume)
{
    unlock_both(volume);
    if (volume->directory_fd >= 0)
        close(volume->directory_fd);
    volume->directory_fd = -1;
}

/* Mark a missing volume as down and return 0. For other errors return @err. */
static int do_without(struct kvbm_disk_volume *volume, const char *directory, int err)
{
    if (err == 0 || !is_missing(err))
        return err;
    kv_log_error("kvbm",
                 "a disk tier's volume is missing: its blocks are unavailable until a restart",
                 "volume=%u directory=%s errno=%d", volume->number, directory, -err);
    close_files(volume);
    volume->missing = true;
    volume->fresh = false;
    atomic_store_explicit(&volume->down, true, memory_order_relaxed);
    return 0;
}

static int identify(struct kvbm_disk_volume *volume)
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

static int open_volume(struct kvbm_disk_volume *volume, bool buffered)
{
    int err = volume->fresh ? make_empty(volume) : 0;

    if (err == 0 && volume->fresh) /* first: others that wait see whose the files are */
        err = write_headers(volume);
    if (err == 0)
        err = reserve_both(volume);
    if (err == 0)
        err = make_image(volume);
    if (err < 0)
        return err;
    load(volume);
    if (!buffered)
        go_direct(volume);
    return 0;
}

/* Free the space that new files have reserved, because another volume failed and the tier isn't
 * opened. */
static void give_back(struct kvbm_disk *disk, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (disk->volumes[i].fresh && make_empty(&disk->volumes[i]) < 0)
            kv_log_warn("kvbm", "can't free the space of a new file", "volume=%u", i);
}

/* Find all files before any is changed. *ret_first: the error of the first missing volume. */
static int find_volumes(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts, int *ret_first)
{
    for (uint32_t i = 0; i < disk->n_volumes; i++) {
        struct kvbm_disk_volume *volume = &disk->volumes[i];
        int err = open_files(volume, opts->directories[i], KV_OPT(opts, name, "cache")), rc;

        if (err == 0)
            err = identify(volume);
        rc = do_without(volume, opts->directories[i], err);
        if (rc < 0)
            return rc;
        *ret_first = *ret_first ? *ret_first : err;
    }
    return 0;
}

static bool any_there(const struct kvbm_disk *disk)
{
    bool any = false;

    for (uint32_t i = 0; i < disk->n_volumes; i++)
        any |= !disk->volumes[i].missing;
    return any;
}

/* Wall clock in microseconds, so that records written now are newer than those of a volume that
 * returns later. */
static uint64_t now_us(void)
{
    return kv_wall_ns() / 1000;
}

int kvbm_disk_volumes_open(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    uint32_t n = 0;
    int first = 0, err;

    disk->volumes = calloc(disk->n_volumes, sizeof(disk->volumes[0]));
    if (!disk->volumes)
        return -ENOMEM;
    for (uint32_t i = 0; i < disk->n_volumes; i++)
        prepare(disk, opts, i);
    err = find_volumes(disk, opts, &first);
    for (; n < disk->n_volumes && err == 0; n++) {
        struct kvbm_disk_volume *volume = &disk->volumes[n];
        int rc = volume->missing ? 0 : open_volume(volume, KV_OPT(opts, buffered, false));

        if (rc == -ENOSPC && volume->beside)
            kv_log_warn("kvbm",
                        "no room for a disk tier beside other models': delete files kvbm-* and "
                        "subdirectories kvbm-* of models no longer used",
                        "volume=%u directory=%s", volume->number, opts->directories[n]);
        err = do_without(volume, opts->directories[n], rc);
        if (err == 0 && volume->missing)
            err = make_image(volume);
        first = first ? first : rc;
    }
    if (err == 0 && !any_there(disk))
        err = first;
    if (err < 0)
        give_back(disk, n);
    disk->commit = KV_MAX(disk->commit, now_us());
    return err;
}

void kvbm_disk_volumes_close(struct kvbm_disk *disk)
{
    for (uint32_t i = 0; disk->volumes && i < disk->n_volumes; i++) {
        free(disk->volumes[i].image);
        free(disk->volumes[i].busy);
        free(disk->volumes[i].unknown);
        close_files(&disk->volumes[i]);
    }
    free(disk->volumes);
}
