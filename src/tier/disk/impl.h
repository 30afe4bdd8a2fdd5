// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the disk tier's parts: volumes (volume.c) and their files (volume_files.c), opening
 * (open.c), the store's thread (disk.c), its work (work.c), commits (commit.c) and early write-back
 * (flush.c).
 */
#ifndef KVBM_TIER_DISK_IMPL_H
#define KVBM_TIER_DISK_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "tier/disk/disk.h"
#include "tier/disk/format.h"
#include "tier/transfer/io.h"

#define KVBM_DISK_MAX_ALL (KVBM_MAX_VOLUMES * KVBM_DISK_MAX_FILES)

enum kvbm_disk_kind { KVBM_DISK_READ, KVBM_DISK_WRITE, KVBM_DISK_FORGET };

struct kvbm_disk_work;
struct kvbm_disk_volume;

/* A block being read, written or forgotten. */
struct kvbm_disk_op {
    struct kvbm_aio_req req;
    struct kvbm_disk_work *work;
    struct kvbm_disk_io *io;
    struct kvbm_disk_op *next;                                     /* in one list at a time */
    void (*step)(struct kvbm_disk *disk, struct kvbm_disk_op *op); /* called when req is done */
    void *bounce;         /* aligned copy, where direct I/O can't use the caller's memory */
    uint32_t lost_before; /* the volume's n_lost when the op began */
    uint8_t sum[16];      /* write: of the bytes; read: what the record says of them */
    uint8_t got[16];      /* read: of the bytes */
    uint8_t *record;      /* [disk->record_bytes], behind the work's ops */
};

struct kvbm_disk_list {
    struct kvbm_disk_op *first, *last;
    uint32_t n;
};

/* A batch being carried out, or slots being forgotten. */
struct kvbm_disk_work {
    struct kvbm_disk_batch *batch;
    enum kvbm_disk_kind kind;
    uint64_t deadline_ns;
    uint32_t n_left;      /* ops not yet ended */
    uint32_t n_unwritten; /* write: ops whose bytes aren't written yet */
    atomic_bool cancelled;
    struct kvbm_disk_work *prev, *next; /* in disk->works */
    struct kvbm_disk_op ops[];
};

struct kvbm_disk_volume {
    struct kvbm_disk *disk;
    struct kvbm_disk_header header;
    uint32_t
        number;    /* index in disk->volumes: of its directory in the first, then second files... */
    uint32_t file; /* number in its directory */
    int directory_fd, slots_fd, index_fd;
    char *directory;         /* as the caller named it */
    _Atomic bool told_names; /* that its file system can't sync a directory */
    bool direct;
    bool paged; /* in the page cache of a device */
    uint32_t n_slots;
    uint8_t *image;   /* all records; invalid ones are zeros */
    uint8_t *busy;    /* per slot: being written or forgotten */
    uint8_t *unknown; /* per slot: the index file may hold a record that the image lacks */
    uint32_t errors;  /* in a row */
    atomic_bool down; /* out of use: failed too often, or missing at open */
    bool missing, fresh;
    uint32_t n_backed;  /* slots that the files have room for: all, unless they could not grow */
    int no_room;        /* why they could not grow; 0 */
    bool waited;        /* for another process, and said so */
    bool beside;        /* in a subdirectory, because the directory has another model's files */
    uint32_t n_writing; /* blocks begun whose bytes aren't written yet */
    /* blocks of the running commit, and blocks that wait for the next one */
    struct kvbm_disk_list written, committing;
    bool commit_wanted, commit_running;
    uint32_t n_records; /* records being written */
    uint32_t n_lost;    /* barriers that failed */
    struct kvbm_aio_req barrier;
    /* bytes in the page cache: not given to the device yet; being written by the running flush */
    uint64_t dirty, flushing;
    struct kvbm_aio_req flush;
};

struct kvbm_disk {
    struct kvbm_aio *aio;
    pid_t process;
    uint32_t depth, n_volumes, n_slots;
    uint32_t n_directories, n_files; /* files: of each directory; a volume each */
    uint64_t stride;
    uint32_t
        block_tokens; /* as the store was opened with: files of before may have room for none */
    uint32_t record_bytes; /* the most of all volumes: files of before may have shorter records */
    bool volatile_;
    bool sums; /* this store computes checksums on its own thread; else the executor does on its */
    /* open: ends of the waits for other processes' files, of all volumes; 0: nobody has waited */
    uint64_t locks_until_ns, makers_until_ns;
    struct kvbm_disk_volume *volumes;
    pthread_t thread;
    bool started;
    /* Guards the volumes' images and unknown, which only the store's thread writes. */
    pthread_mutex_t image_lock;

    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t wake;
    struct kvbm_disk_work *works;
    struct kvbm_disk_list arrived;
    struct kvbm_aio_req *ended; /* completed requests, newest first */
    uint64_t n_blocks;          /* of all works */
    bool sweep, stop;
    struct kvbm_disk_stats stats;

    /* used by the store's thread only */
    struct kvbm_disk_list reads[2], writes[2]; /* waiting ops, by flow */
    struct kvbm_disk_list blocked; /* writes and forgets of slots that another op works on */
    uint32_t n_reading, n_writing;
    uint64_t commit;
    struct kvbm_aio_req *submits; /* requests to submit at the end of a turn */
    struct kvbm_disk_list to_sum; /* submitted writes whose checksums are still to be computed */
    bool deadlines;               /* a waiting op has a deadline */
    /* bytes of all volumes in the page cache that the devices lack; where a volume's flush begins;
     * where writes wait */
    uint64_t dirty, flush_at, max_dirty;
};

void kvbm_disk_push(struct kvbm_disk_list *list, struct kvbm_disk_op *op);
struct kvbm_disk_op *kvbm_disk_shift(struct kvbm_disk_list *list);

/* volume.c */
int kvbm_disk_volumes_open(struct kvbm_disk *disk, const struct kvbm_disk_opts *opts);
void kvbm_disk_volumes_close(struct kvbm_disk *disk);
uint8_t *kvbm_disk_record_at(const struct kvbm_disk *disk, uint32_t slot);
/* Return the slot's unknown flag. */
uint8_t *kvbm_disk_unknown_at(const struct kvbm_disk *disk, uint32_t slot);

static inline struct kvbm_disk_volume *kvbm_disk_volume_of(const struct kvbm_disk *disk,
                                                           uint32_t slot)
{
    return &disk->volumes[slot % disk->n_volumes];
}

/* True when the volume's records have room for the blocks' tokens. */
static inline bool kvbm_disk_keeps_tokens(const struct kvbm_disk *disk,
                                          const struct kvbm_disk_volume *volume)
{
    return disk->block_tokens && volume->header.block_tokens == disk->block_tokens;
}

/* True when the volume's files have room for the slot. */
static inline bool kvbm_disk_is_backed(const struct kvbm_disk *disk, uint32_t slot)
{
    return slot / disk->n_volumes < kvbm_disk_volume_of(disk, slot)->n_backed;
}

/* Return the volume with the first files of the same directory. */
static inline struct kvbm_disk_volume *kvbm_disk_first_of(const struct kvbm_disk *disk,
                                                          const struct kvbm_disk_volume *volume)
{
    return &disk->volumes[volume->number % disk->n_directories];
}

static inline const char *kvbm_disk_directory_of(const struct kvbm_disk_volume *volume,
                                                 const struct kvbm_disk_opts *opts)
{
    return opts->directories[volume->number % volume->disk->n_directories];
}

/* files.c */
/* Choose how many files each directory has, whose first ones are open: as many as there are of this
 * tier; for a new one by @wanted, or by what is fastest. */
uint32_t kvbm_disk_choose_files(const struct kvbm_disk *disk, const struct kvbm_disk_opts *opts);
/* Write the name of a directory's file number @file of @kind ("slots" or "index"). Returns 0 or
 * -ENAMETOOLONG. */
int kvbm_disk_file_name(char *ret, size_t size, const char *name, uint32_t file, const char *kind);
/* Use direct I/O for the slots, unless @buffered, or where there is none. Sets direct and paged. */
void kvbm_disk_go_direct(struct kvbm_disk_volume *volume, bool buffered);

/* volume_files.c */
/* NOBODYS: there is none, or its header isn't written yet, or damaged. OTHERS: of another
 * fingerprint, or of blocks of another size. */
enum kvbm_disk_owner { KVBM_DISK_NOBODYS, KVBM_DISK_OURS, KVBM_DISK_OTHERS };
/* Look whose the files number @file in the volume's directory are. Another process may have them. */
enum kvbm_disk_owner kvbm_disk_files_owner(const struct kvbm_disk_volume *volume, const char *name,
                                           uint32_t file);
/* Open and lock a volume's files in @directory, or in its subdirectory for this fingerprint. Second
 * and later files are where the first ones are. */
int kvbm_disk_files_open(struct kvbm_disk_volume *volume, const char *directory, const char *name);
/* Take over the files' header when both agree and fit the options, else mark the volume fresh. */
int kvbm_disk_files_identify(struct kvbm_disk_volume *volume);
/* Empty both files. Empties the index first, so that no record outlives its header. */
int kvbm_disk_files_empty(struct kvbm_disk_volume *volume);
int kvbm_disk_files_write_headers(struct kvbm_disk_volume *volume);
/* Unlock and close the files and the directory. */
void kvbm_disk_files_close(struct kvbm_disk_volume *volume);
/* Read @len bytes, or fewer at the file's end. Returns their number or an error. */
long kvbm_disk_read_all(int fd, void *memory, size_t len, uint64_t offset);

/* newest.c: of several records of one key, drop all but the newest. Returns 0 or -ENOMEM. */
int kvbm_disk_keep_newest(struct kvbm_disk *disk);

/* Decode the record of a slot, given its number among all volumes. Returns false when it is
 * invalid. */
static inline bool kvbm_disk_record_of(const struct kvbm_disk *disk, uint32_t slot,
                                       const uint8_t *record, struct kvbm_disk_entry *ret)
{
    return kvbm_disk_record_read(&kvbm_disk_volume_of(disk, slot)->header, slot / disk->n_volumes,
                                 record, ret);
}

/* work.c; called by the store's thread only */
void kvbm_disk_begin(struct kvbm_disk *disk);
void kvbm_disk_sweep(struct kvbm_disk *disk);
void kvbm_disk_sums(struct kvbm_disk *disk);
/* Judge a volume by the result of an operation: count failures, take it out of use after too many. */
void kvbm_disk_judge(struct kvbm_disk_volume *volume, int status);
/* Zero a slot's record in memory. The file's is unknown until a commit has the slot. */
void kvbm_disk_zero_record(struct kvbm_disk *disk, uint32_t slot);
/* Write op->record to the index, then step. */
void kvbm_disk_write_record(struct kvbm_disk *disk, struct kvbm_disk_op *op,
                            void (*step)(struct kvbm_disk *disk, struct kvbm_disk_op *op));
/* End a write or a forget, whose slot others may then use. */
void kvbm_disk_end_write(struct kvbm_disk *disk, struct kvbm_disk_op *op, int status);

static inline bool kvbm_disk_is_write(const struct kvbm_disk_op *op)
{
    return op->work->kind == KVBM_DISK_WRITE;
}

/* True for forgetting a record that an earlier failure left unknown. */
static inline bool kvbm_disk_is_retry(const struct kvbm_disk_op *op)
{
    return op->work->kind == KVBM_DISK_FORGET && op->io->commit_ == KVBM_DISK_UNKNOWN;
}

/* commit.c; called by the store's thread only */
void kvbm_disk_commits(struct kvbm_disk *disk);
void kvbm_disk_barrier_done(struct kvbm_disk *disk, struct kvbm_aio_req *req);

/* flush.c; called by the store's thread only, but init */
void kvbm_disk_flush_init(struct kvbm_disk *disk);
/* Note bytes written to a volume's page cache. Begins to write them to the device, when there are many. */
void kvbm_disk_note_dirty(struct kvbm_disk *disk, struct kvbm_disk_volume *volume, uint64_t bytes);
void kvbm_disk_flush_done(struct kvbm_disk *disk, struct kvbm_aio_req *req);

/* True when writes wait for a flush. */
static inline bool kvbm_disk_is_dirty(const struct kvbm_disk *disk)
{
    return disk->dirty >= disk->max_dirty;
}

/* disk.c: the store's thread, until close and the end of all work; @arg: the store */
void *kvbm_disk_run(void *arg);
/* disk.c: end an op; the last one ends its batch */
void kvbm_disk_finish(struct kvbm_disk *disk, struct kvbm_disk_op *op, int status);
/* callback of all requests: hands them to the store's thread */
void kvbm_disk_io_done(struct kvbm_aio_req *req);
void kvbm_disk_hand_in(struct kvbm_disk *disk, struct kvbm_aio_req *req);

#endif
