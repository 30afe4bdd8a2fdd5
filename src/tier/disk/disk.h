// SPDX-License-Identifier: Apache-2.0
/**
 * The disk tier's bytes: slots of one size in a file per volume, and an index beside it that
 * survives SIGKILL and power cuts (docs/formats.md, "Disk tier").
 *
 *   <directory>/kvbm-<name>.slots   header (4096 bytes), then slots of slot_bytes, at multiples of
 *                                   4096
 *   <directory>/kvbm-<name>.index   header (4096 bytes), then a record per slot
 *   <directory>/kvbm-<name>.2.slots, kvbm-<name>.2.index ...: second and later files, each pair a
 *                                   volume of its own
 *
 * Slot i lies in volume i % n_volumes. Each volume has an identity of its own, and its files hold
 * all that is needed to open it again: volumes may come in another order, be missing, or be new. A
 * write has five steps: invalidate the old record, write the bytes, a barrier, write the new record
 * (key, length, XXH3-128 of the bytes, number of the commit), a barrier. Concurrent writers share
 * the barriers. So a valid record describes bytes that are on the disk. Bytes that don't verify
 * nevertheless (-EBADMSG) are a miss, and the slot may be used again.
 *
 * The tier's pool decides which slot holds which block, and which one is evicted next
 * (kvbm_pool.h).
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
#define KVBM_DISK_MAX_FILES 4

struct kvbm_disk;

struct kvbm_disk_opts {
    size_t size;
    const char *const *directories; /* volumes; at least one must exist */
    uint32_t n_directories;         /* 1 to KVBM_MAX_VOLUMES */
    const char *name;               /* part of the file names; NULL: "cache" */
    /* of the model and the block layout; where a directory has files of another one, a subdirectory
     * of it is used. NULL: "" */
    const char *fingerprint;
    uint32_t key_len;
    uint64_t slot_bytes; /* bytes of a block, at most 1 GiB; the file rounds them up to 4096 */
    uint32_t n_slots;    /* of all volumes together */
    /* tokens of a block, which records shall keep; 0: none. Files of before keep what they have room for,
     * and records of more than 4 KiB none. */
    uint32_t block_tokens;
    /* slots files of each directory, at most KVBM_DISK_MAX_FILES; directories that have a tier's files
     * keep their number. 0: several in the page cache, where threads copy, else 1 */
    uint32_t n_files;
    enum kvbm_io io;
    uint32_t io_depth;
    bool buffered;  /* use the page cache: no O_DIRECT */
    bool volatile_; /* no barriers: after a power cut blocks may be missing, never wrong */
    /* memory that holds most blocks, to be registered with io_uring; mapped until close. NULL:
     * none */
    void *memory;
    uint64_t memory_bytes;
};

/**
 * Open a store, or create its files. The files are locked: -EBUSY when another process has them.
 * Waits 1 s for the kernel to release those of a killed process, and 5 s for a process that may be
 * making them. Existing files are kept when fingerprint, key_len and slot_bytes are equal, in any
 * order of directories. n_slots and n_directories may differ: a file grows, or records beyond its
 * end are dropped. -ENOSPC when the volumes have no room for n_slots and none has files of before.
 *
 * A volume is missing when its directory doesn't exist, or its files can't be read (-EIO, -EROFS,
 * -EACCES...). So it is when its files belong to another owner (-EPERM) or process (-EBUSY), or have
 * no room (-ENOSPC). Its slots aren't usable, the log says so, and the statistics count it as down.
 * When all volumes are missing, open returns the first one's error. Files that belong to something
 * else are refused: -ELOOP (symbolic link), -EMLINK (hard link), -EISDIR, -ENXIO.
 */
int kvbm_disk_open(const struct kvbm_disk_opts *opts, struct kvbm_disk **ret);
/**
 * Wait for submitted batches and close. NULL is a no-op. After fork() a child may call only this
 * function, to free memory and descriptors; until it does, the files stay locked.
 */
void kvbm_disk_close(struct kvbm_disk *disk);

/** Files of a disk tier, as kvbm_disk_look found them. */
struct kvbm_disk_seen {
    bool found;                /* there are such files; all below is of them */
    bool ours;                 /* their fingerprint is the one asked for */
    uint32_t key_len, n_slots; /* slots of all the directory's files */
    uint64_t slot_bytes;
};
/**
 * Read whose files @directory has, those of @fingerprint first, without opening, locking or making
 * any: another process may use them. @name NULL: "cache". Returns 0, also when there are none; or an
 * error of opening the directory.
 */
int kvbm_disk_look(const char *directory, const char *name, const char *fingerprint,
                   struct kvbm_disk_seen *ret);

/** A committed block found at opening. Borrowed for the call. */
struct kvbm_disk_record {
    uint32_t slot;
    uint32_t group;
    uint32_t position;
    uint64_t commit;
    uint64_t len;
    const void *key;
    const void *parent;     /* key of the block before it; NULL: the first of its sequence */
    const uint32_t *tokens; /* opts->block_tokens of them; NULL: not known */
};
/**
 * Call @each for all committed blocks by positions, so that parents come before their children, and of one
 * position the oldest commit first. Returns their number, or the non-zero value with which @each ended the walk.
 */
long kvbm_disk_each(struct kvbm_disk *disk,
                    int (*each)(void *arg, const struct kvbm_disk_record *record), void *arg);

/** One block to read or write. The store uses it, its buffer and its keys until done. */
struct kvbm_disk_io {
    uint32_t slot;
    uint32_t group;
    uint32_t position;      /* write: index of the block in its sequence */
    const void *key;        /* read: the key that the slot must hold, else -ENOENT */
    const void *parent;     /* write: key of the block before; NULL: none */
    const uint32_t *tokens; /* write: opts->block_tokens of them; NULL: not known */
    void *data;             /* copied unless its address and len are multiples of 4096 */
    uint64_t len;           /* 1 to slot_bytes; read: the length that was written, else -EBADMSG */
    /* Result: 0; -EBADMSG: did not verify; -ENOENT; -EIO; -ENOSPC; -ECANCELED; -ETIMEDOUT; -ENOMEM.
     * A failed write leaves an empty slot. */
    int status;
    uint64_t commit_; /* used by the store */
};

struct kvbm_disk_batch {
    bool write;
    enum kvbm_flow flow; /* onboarding goes before offloading */
    int32_t priority;    /* order of waiting reads of one flow: higher first, then older */
    /* operations that haven't begun by then end with -ETIMEDOUT. 0: no deadline */
    uint64_t deadline_ns;
    struct kvbm_disk_io *ios;
    uint32_t n;
    void (*done)(struct kvbm_disk_batch *batch);
    void *arg;
    struct kvbm_disk_batch *next_; /* used by the store */
};

/**
 * Queue a batch, in which no slot may be written twice. A write of a slot that another batch writes,
 * or that is being forgotten, waits for its end. Returns 0; -EAGAIN: too many blocks wait
 * already (65,536); -EINVAL; -ENOMEM; -ESHUTDOWN (closing, or a child after fork()). After an error
 * done isn't called.
 */
int kvbm_disk_submit(struct kvbm_disk *disk, struct kvbm_disk_batch *batch);
/** Cancel a batch: operations not begun end with -ECANCELED; done is called as always. */
void kvbm_disk_cancel(struct kvbm_disk *disk, struct kvbm_disk_batch *batch);

/** Commit of a slot whose record in the index file is unknown. */
#define KVBM_DISK_UNKNOWN UINT64_MAX

/** A slot that holds a key, or may hold one in its file. */
struct kvbm_disk_found {
    uint32_t slot;
    /* of its record: a slot has no two records of one commit; or KVBM_DISK_UNKNOWN */
    uint64_t commit;
    uint8_t key[KVBM_MAX_KEY]; /* not set for KVBM_DISK_UNKNOWN */
};
/**
 * Find, from slot *@slot on, at most @max slots that hold a key of @group which is @wanted, whatever
 * the tier's pool knows of them: evicted blocks leave their records behind. *@slot becomes the slot
 * to go on from. Returns their number: less than @max at the end. @wanted runs under a lock.
 *
 * Finds as well, whatever their keys, slots whose record in the file is unknown: a record is being
 * written or zeroed there, or that failed, or its place couldn't be read at opening.
 */
size_t kvbm_disk_find(struct kvbm_disk *disk, uint32_t group,
                      bool (*wanted)(const void *arg, const void *key), const void *arg,
                      uint32_t *slot, struct kvbm_disk_found *ret, size_t max);

/**
 * Invalidate the slots' records durably, for keys that were reset. @commits[i]: only when the record
 * of slot i is still of that commit, or still unknown; NULL: whatever they hold. Waits for writes of
 * the slots that are under way. Slots that fail become unknown. Blocks; don't call it from a done
 * callback. Returns 0; the first error, after which all other slots are forgotten; -EAGAIN, -EINVAL,
 * -ENOMEM or -ESHUTDOWN: none is.
 */
int kvbm_disk_forget(struct kvbm_disk *disk, const uint32_t *slots, const uint64_t *commits,
                     size_t n);

struct kvbm_disk_stats {
    uint64_t reads, writes, bytes_read, bytes_written;
    uint64_t bad;      /* blocks that did not verify */
    uint64_t failed;   /* blocks that failed for another reason */
    uint64_t barriers; /* barriers of data and index files */
    uint64_t queued;   /* batches queued now */
    /* directories; down: with a file that is missing, or out of use until reopened after too many
     * errors */
    uint32_t volumes, volumes_down;
    /* memory registered with io_uring; 0: none was given, or the kernel refused */
    uint64_t registered_bytes;
    uint64_t fixed; /* reads and writes that used registered memory */
};
void kvbm_disk_get_stats(struct kvbm_disk *disk, struct kvbm_disk_stats *ret);
/** True when the volume of this slot is in use, and has room for the slot. */
bool kvbm_disk_usable(struct kvbm_disk *disk, uint32_t slot);

#endif
