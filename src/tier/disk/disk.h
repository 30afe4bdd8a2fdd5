// SPDX-License-Identifier: Apache-2.0
/**
 * The disk tier's bytes: slots of one size in a file per volume, and an index beside it that
 * survives SIGKILL and power cuts (docs/formats.md, "Disk tier").
 *
 *   <directory>/kvbm-<name>.slots   header (4096 bytes), then slots of slot_bytes, at multiples of
 *                                   4096
 *   <directory>/kvbm-<name>.index   header (4096 bytes), then a record per slot
 *
 * Slot i lies in volume i % n_volumes. Each volume has an identity of its own, and its files say
 * all that is needed to take it over: volumes may come in another order, be missing, and be joined
 * by new ones. A write is: the old record made invalid, the bytes, a barrier, the new record (key,
 * length, XXH3-128 of the bytes, number of the commit), a barrier. Writers that come at the same
 * time share the barriers. So a record that is there says the truth about bytes that are there, and
 * what doesn't verify nevertheless (-EBADMSG) is a miss whose slot may be used again.
 *
 * Which slot holds what, and which goes next, the tier's pool decides (kvbm_pool.h).
 *
 * Threads: any. done callbacks come from the store's own thread, in the order of completion, and
 * may submit.
 */
#ifndef KVBM_TIER_DISK_DISK_H
#define KVBM_TIER_DISK_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_pool.h"
#include "kvbm_transfer.h"

#define KVBM_MAX_VOLUMES 16

struct kvbm_disk;

struct kvbm_disk_opts {
    size_t size;
    const char *const *directories; /* volumes; one must be there, others may be missing */
    uint32_t n_directories;         /* 1 to KVBM_MAX_VOLUMES */
    const char *name;               /* part of the file names; NULL: "cache" */
    const char *
        fingerprint; /* of the model and the block layout; files of another are emptied. NULL: "" */
    uint32_t key_len;
    uint64_t slot_bytes; /* of a block, at most 1 GiB; the file has it rounded up to 4096 */
    uint32_t n_slots;    /* of all volumes together */
    enum kvbm_io io;
    uint32_t io_depth;
    bool buffered;  /* no O_DIRECT */
    bool volatile_; /* no barriers: after a power cut blocks may be missing, never wrong */
    void *
        memory; /* to be registered with io_uring: where most blocks lie, until close. NULL: none */
    uint64_t memory_bytes;
};

/**
 * Open or create. The files are locked (-EBUSY: another has them, and
 * still after a second, in which the kernel lets go of a killed process's). What is there is taken
 * over when fingerprint, key_len and slot_bytes are the same, in any order of directories; n_slots
 * and n_directories may differ (a file grows, or records beyond its end are dropped). -ENOSPC when
 * the volumes have no room for n_slots.
 *
 * A volume is missing when its directory isn't there, or its files can't be read (-EIO, -EROFS...):
 * its slots aren't usable, the log says so, stats count it as down. When all are missing, open
 * returns why the first one is. Files that aren't this program's to change are refused: -ELOOP
 * (symbolic link), -EMLINK (hard link), -EPERM (another owner's), -EISDIR, -ENXIO.
 */
int kvbm_disk_open(const struct kvbm_disk_opts *opts, struct kvbm_disk **ret);
/** Waits for what was submitted. NULL is a no-op. A child after fork() may call only this, which frees memory and
 * descriptors there; while it keeps these, the files stay locked. */
void kvbm_disk_close(struct kvbm_disk *disk);

/** A committed block found at opening, oldest commit first. Borrowed for the call. */
struct kvbm_disk_record {
    uint32_t slot;
    uint32_t group;
    uint32_t position;
    uint64_t commit;
    uint64_t len;
    const void *key;
    const void *parent; /* NULL: the first of its sequence */
};
/** Returns how many, or what @each returned (non-zero ends it). */
long kvbm_disk_each(struct kvbm_disk *disk,
                    int (*each)(void *arg, const struct kvbm_disk_record *record), void *arg);

/** One block to read or write. The caller's until done, its buffer and keys too. */
struct kvbm_disk_io {
    uint32_t slot;
    uint32_t group;
    uint32_t position;  /* write */
    const void *key;    /* read: what must be there, else -ENOENT */
    const void *parent; /* write; NULL: none */
    void *data;         /* it and len multiples of 4096, else a copy is made */
    uint64_t len;       /* 1 to slot_bytes; read: must be the length written, else -EBADMSG */
    int status; /* 0; -EBADMSG did not verify; -ENOENT; -EIO; -ENOSPC; -ECANCELED; -ETIMEDOUT; -ENOMEM;
                 * -EBUSY: the slot is being written. A failed write leaves an empty slot */
};

struct kvbm_disk_batch {
    bool write;
    enum kvbm_flow flow; /* onboarding before offloading */
    int32_t
        priority; /* of reads of one flow that haven't begun: the higher first, then the older */
    uint64_t deadline_ns; /* what hasn't begun by then: -ETIMEDOUT. 0: none */
    struct kvbm_disk_io *ios;
    uint32_t n;
    void (*done)(struct kvbm_disk_batch *batch);
    void *arg;
    struct kvbm_disk_batch *next_; /* the store's */
};

/** Queue a batch, of which no slot is written twice. Returns 0; -EAGAIN when too much waits already (65,536 blocks);
 * -EINVAL; -ENOMEM; -ESHUTDOWN (closing, or a child after fork()). done isn't called then. */
int kvbm_disk_submit(struct kvbm_disk *disk, struct kvbm_disk_batch *batch);
/** Cancel a batch: operations not begun end with -ECANCELED; done is called as always. */
void kvbm_disk_cancel(struct kvbm_disk *disk, struct kvbm_disk_batch *batch);

/** The slots' records are made invalid, durably. For keys that were reset. Blocks; not from a done
 * callback. -EBUSY: one is being written (the others are forgotten all the same). */
int kvbm_disk_forget(struct kvbm_disk *disk, const uint32_t *slots, size_t n);

struct kvbm_disk_stats {
    uint64_t reads, writes, bytes_read, bytes_written;
    uint64_t bad;                   /* did not verify */
    uint64_t failed;                /* for another reason */
    uint64_t barriers;              /* of data and index */
    uint64_t queued;                /* batches now */
    uint32_t volumes, volumes_down; /* down: missing, or too many errors; not used until reopened */
    uint64_t registered_bytes;      /* of memory, with io_uring; 0: none, or the kernel wouldn't */
    uint64_t fixed;                 /* reads and writes that used it */
};
void kvbm_disk_get_stats(struct kvbm_disk *disk, struct kvbm_disk_stats *ret);
/** The volume of this slot is in use. */
bool kvbm_disk_usable(struct kvbm_disk *disk, uint32_t slot);

#endif
