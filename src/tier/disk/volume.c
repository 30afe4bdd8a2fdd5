// SPDX-License-Identifier: Apache-2.0
/*
 * All volumes of a store: open and close them, reserve their room, read their indexes into memory.
 *
 * Volumes are independent. A missing one keeps its slot numbers, down and without records, while
 * the other volumes serve.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/file/room.h"
#include "tier/disk/impl.h"

enum { CHUNK = 1 << 20 }; /* bytes of the index read at once */

uint8_t *kvbm_disk_record_at(const struct kvbm_disk *disk, uint32_t slot)
{
    const struct kvbm_disk_volume *volume = kvbm_disk_volume_of(disk, slot);

    return volume->image + (size_t)(slot / disk->n_volumes) * volume->header.record_bytes;
}

uint8_t *kvbm_disk_unknown_at(const struct kvbm_disk *disk, uint32_t slot)
{
    return &kvbm_disk_volume_of(disk, slot)->unknown[slot / disk->n_volumes];
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

        if (kvbm_disk_read_all(volume->index_fd, volume->image + at, len, KVBM_DISK_PAGE + at) >= 0)
            continue;
        kv_log_warn("kvbm", "a part of a disk tier's index can't be read", "volume=%u offset=%zu",
                    volume->number, at);
        for (size_t page = 0; page < len; page += KVBM_DISK_PAGE) {
            size_t rest = KV_MIN(len - page, (size_t)KVBM_DISK_PAGE);

            if (kvbm_disk_read_all(volume->index_fd, volume->image + at + page, rest,
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
    uint32_t tokens = kvbm_disk_room_for_tokens(opts->key_len, KV_OPT(opts, block_tokens, 0));

    volume->disk = disk;
    volume->number = number;
    volume->directory_fd = volume->slots_fd = volume->index_fd = -1;
    volume->file = number / disk->n_directories;
    volume->header =
        (struct kvbm_disk_header){.key_len = opts->key_len,
                                  .record_bytes = kvbm_disk_record_bytes(opts->key_len, tokens),
                                  .block_tokens = tokens,
                                  .slot_bytes = opts->slot_bytes};
    kvbm_disk_sum(fingerprint, strlen(fingerprint), volume->header.fingerprint);
}

/* True for errors of a single volume: its disk has died or is absent, full or not ours to use. */
static bool is_missing(int err)
{
    return err == -ENOENT || err == -ENOTDIR || err == -EIO || err == -ENODEV || err == -ESTALE ||
           err == -EROFS || err == -ENOTCONN || err == -EUCLEAN || err == -EACCES ||
           err == -EPERM || err == -EBUSY || err == -ENOSPC || err == -EDQUOT;
}

/* True when a volume beside @volume has files of before: a tier without any is refused where it
 * doesn't fit. */
static bool others_have_blocks(const struct kvbm_disk_volume *volume)
{
    const struct kvbm_disk *disk = volume->disk;
    bool any = false;

    for (uint32_t i = 0; i < disk->n_volumes; i++)
        any |= i != volume->number && !disk->volumes[i].missing && !disk->volumes[i].fresh;
    return any;
}

/* Free the space that new files have reserved. */
static void give_back(struct kvbm_disk_volume *volume)
{
    if (volume->fresh && kvbm_disk_files_empty(volume) < 0)
        kv_log_warn("kvbm", "can't free the space of a new file", "volume=%u", volume->number);
}

/* Mark a missing volume as down and return 0. For other errors return @err. */
static int do_without(struct kvbm_disk_volume *volume, const char *directory, int err)
{
    if (err == 0 || !is_missing(err))
        return err;
    if ((err == -ENOSPC || err == -EDQUOT) && !others_have_blocks(volume))
        return err;
    if (!kvbm_disk_first_of(volume->disk, volume)->missing)
        kv_log_error("kvbm",
                     "a disk tier's volume is missing: its blocks are unavailable until a restart",
                     "volume=%u directory=%s errno=%d error=\"%s\"", volume->number, directory,
                     -err, strerror(-err));
    if (volume->slots_fd >= 0)
        give_back(volume);
    kvbm_disk_files_close(volume);
    volume->missing = true;
    volume->fresh = false;
    atomic_store_explicit(&volume->down, true, memory_order_relaxed);
    return 0;
}

/* Slots that a file of this size has, whose slots have @each bytes. */
static uint32_t slots_in(int fd, uint64_t each, uint32_t most)
{
    struct stat st;

    if (fstat(fd, &st) < 0 || st.st_size < KVBM_DISK_PAGE)
        return 0;
    return (uint32_t)KV_MIN(((uint64_t)st.st_size - KVBM_DISK_PAGE) / each, (uint64_t)most);
}

/* Go on with a volume whose files can't grow: its blocks are served, and its old slots used. */
static int keep_size(struct kvbm_disk_volume *volume, const char *directory, int err)
{
    if ((err != -ENOSPC && err != -EDQUOT) || volume->fresh || !others_have_blocks(volume))
        return err;
    volume->no_room = err;
    volume->n_backed = slots_in(volume->slots_fd, volume->disk->stride, volume->n_slots);
    volume->n_backed = slots_in(volume->index_fd, volume->header.record_bytes, volume->n_backed);
    kv_log_error("kvbm", "a disk tier's volume is too full to grow: it keeps its size",
                 "volume=%u directory=%s slots=%u wanted=%u", volume->number, directory,
                 volume->n_backed, volume->n_slots);
    return 0;
}

static int open_volume(struct kvbm_disk_volume *volume, const char *directory, bool buffered)
{
    int err = volume->fresh ? kvbm_disk_files_empty(volume) : 0;

    if (err == 0 && volume->fresh) /* first: others that wait see whose the files are */
        err = kvbm_disk_files_write_headers(volume);
    if (err == 0)
        err = keep_size(volume, directory, reserve_both(volume));
    if (err == 0)
        err = make_image(volume);
    if (err < 0)
        return err;
    load(volume);
    kvbm_disk_go_direct(volume, buffered);
    return 0;
}

static int find_one(struct kvbm_disk_volume *volume, const struct kvbm_disk_opts *opts)
{
    const char *directory = kvbm_disk_directory_of(volume, opts);
    int err = kvbm_disk_files_open(volume, directory, KV_OPT(opts, name, "cache"));

    return err ? err : kvbm_disk_files_identify(volume);
}

/* True when another volume of the tier is in the same directory: its files are not another
 * process's. */
static bool is_named_twice(const struct kvbm_disk_volume *volume)
{
    const struct kvbm_disk *disk = volume->disk;
    struct stat one, other;
    bool twice = false;

    if (fstat(volume->directory_fd, &one) < 0)
        return false;
    for (uint32_t i = 0; i < disk->n_volumes; i++)
        twice |= i % disk->n_directories != volume->number % disk->n_directories &&
                 fstat(disk->volumes[i].directory_fd, &other) == 0 && one.st_dev == other.st_dev &&
                 one.st_ino == other.st_ino;
    return twice;
}

/* Find the files of the volumes from @from on before any is changed. *ret_first: the error of the
 * first missing volume. */
static int find_volumes(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts, uint32_t from,
                        int *ret_first)
{
    int errs[KVBM_DISK_MAX_ALL];
    bool any = false;

    for (uint32_t i = from; i < disk->n_volumes; i++) {
        prepare(disk, opts, i);
        errs[i] = find_one(&disk->volumes[i], opts);
        any |= !errs[i];
    }
    for (uint32_t i = from; i < disk->n_volumes; i++) {
        struct kvbm_disk_volume *volume = &disk->volumes[i];
        int rc;

        if (errs[i] == -EBUSY && is_named_twice(volume))
            return -EBUSY;
        if (errs[i] == -EBUSY && any) { /* its process may have been ending all the while */
            kvbm_disk_files_close(volume);
            errs[i] = find_one(volume, opts);
        }
        rc = do_without(volume, kvbm_disk_directory_of(volume, opts), errs[i]);
        if (rc < 0)
            return rc;
        *ret_first = *ret_first ? *ret_first : errs[i];
    }
    return 0;
}

/* True when a volume is there in its full size: one that is too full for it serves beside others only. */
static bool any_there(const struct kvbm_disk *disk)
{
    bool any = false;

    for (uint32_t i = 0; i < disk->n_volumes; i++)
        any |= !disk->volumes[i].missing && !disk->volumes[i].no_room;
    return any;
}

/* Wall clock in microseconds, so that records written now are newer than those of a volume that
 * returns later. */
static uint64_t now_us(void)
{
    return kv_wall_ns() / 1000;
}

/* Find the first files of all directories, and then as many more as there are, or shall be. */
static int find_all(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts, int *ret_first)
{
    int err;

    disk->n_volumes = disk->n_directories;
    err = find_volumes(disk, opts, 0, ret_first);
    if (err < 0)
        return err;
    disk->n_files = kvbm_disk_choose_files(disk, opts);
    disk->n_volumes = disk->n_directories * disk->n_files;
    err = find_volumes(disk, opts, disk->n_directories, ret_first);
    for (uint32_t i = 0; i < disk->n_volumes; i++) {
        struct kvbm_disk_volume *volume = &disk->volumes[i];

        volume->n_slots = (disk->n_slots - i + disk->n_volumes - 1) / disk->n_volumes;
        volume->n_backed = volume->n_slots;
    }
    return err;
}

/* Return volume number @n in the order of making: later files first. A process that is killed in
 * between leaves the number of files behind. */
static struct kvbm_disk_volume *in_order(const struct kvbm_disk *disk, uint32_t n)
{
    uint32_t file = disk->n_files - 1 - n / disk->n_directories;

    return &disk->volumes[file * disk->n_directories + n % disk->n_directories];
}

int kvbm_disk_volumes_open(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts)
{
    uint32_t n = 0;
    int first = 0, err;

    disk->volumes =
        calloc((size_t)disk->n_directories * KVBM_DISK_MAX_FILES, sizeof(disk->volumes[0]));
    if (!disk->volumes)
        return -ENOMEM;
    err = find_all(disk, opts, &first);
    for (; n < disk->n_volumes && err == 0; n++) {
        struct kvbm_disk_volume *volume = in_order(disk, n);
        const char *directory = kvbm_disk_directory_of(volume, opts);
        int rc =
            volume->missing ? 0 : open_volume(volume, directory, KV_OPT(opts, buffered, false));

        if (rc == -ENOSPC && volume->beside)
            kv_log_warn("kvbm",
                        "no room for a disk tier beside other models': delete files kvbm-* and "
                        "subdirectories kvbm-* of models no longer used",
                        "volume=%u directory=%s", volume->number, directory);
        err = do_without(volume, directory, rc);
        if (err == 0 && volume->missing)
            err = make_image(volume);
        first = first ? first : rc ? rc : volume->no_room;
    }
    if (err == 0 && !any_there(disk))
        err = first;
    for (uint32_t i = 0; i < n && err < 0; i++) /* the tier isn't opened */
        give_back(in_order(disk, i));
    for (uint32_t i = 0; i < n; i++)
        disk->record_bytes = KV_MAX(disk->record_bytes, disk->volumes[i].header.record_bytes);
    disk->commit = KV_MAX(disk->commit, now_us());
    return err;
}

void kvbm_disk_volumes_close(struct kvbm_disk *disk)
{
    for (uint32_t i = 0; disk->volumes && i < disk->n_volumes; i++) {
        free(disk->volumes[i].image);
        free(disk->volumes[i].busy);
        free(disk->volumes[i].unknown);
        kvbm_disk_files_close(&disk->volumes[i]);
    }
    free(disk->volumes);
}
