// SPDX-License-Identifier: Apache-2.0
/**
 * The parts of the file store among themselves. What lies where, and why a publication is durable
 * and a pinned chunk can't vanish, is told once, in file_commit.c.
 *
 * Threads: `lock` protects the pending map and is held for no I/O; `known_lock` what is known of
 * chunks in place, and is held for no other lock; `lease_lock` the lease, likewise. `commit`
 * serialises what takes fan-out locks (publication, sweeping, eviction): flock belongs to this
 * handle's descriptors, so two of its threads would not exclude each other. Order: commit before
 * lock.
 *
 * A handle belongs to the process that opened it; in a forked child every call gives -ECHILD.
 */
#ifndef KV_STORE_FILE_IMPL_H
#define KV_STORE_FILE_IMPL_H

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "base/buf.h"
#include "base/error.h"
#include "store/file.h"

enum {
    KVS_FILE_FANS = 16,
    KVS_FILE_KEY_MAX = 120, /* bytes; hex must fit a file name, with room for suffixes */
    KVS_FILE_HEX = 2 * KVS_FILE_KEY_MAX + 1,
    KVS_FILE_NAME = 256,
    KVS_FILE_TMP = 40,    /* writer id, '.', number */
    KVS_FILE_BAD_MAX = 64 /* files kept in bad/; more are deleted */
};

enum kvs_file_sync { KVS_FILE_SYNC_AUTO, KVS_FILE_SYNC_FILES, KVS_FILE_SYNC_FS };

struct kvs_file_opts {
    uint64_t limit; /* bytes of chunk files; 0: none */
    bool existing;  /* make nothing where there is no store yet */
    int zstd;       /* level; 0: raw */
    enum kvs_file_sync sync;
    bool side_car; /* checksums in files beside, as where xattrs are not supported */
};

/* -- Checksums (file_sum.c; format: docs/formats.md) ------------------------------------------- */

enum {
    KVS_FILE_SUM_BYTES = 48,
    KVS_FILE_RAW = 0,
    KVS_FILE_ZSTD = 1,  /* one frame; read, no longer written: what it is was told outside only */
    KVS_FILE_PACKED = 2 /* the checksum itself, then one frame */
};

struct kvs_file_sum {
    uint8_t encoding;
    uint64_t len;    /* of the content as put */
    uint64_t stored; /* of the file */
    uint64_t owner;  /* XXH3-64 of key or name: bytes under a wrong name don't verify */
    uint8_t hash[16];
};

void kvs_file_sum_make(struct kvs_file_sum *ret, uint64_t owner, const void *data, size_t len);
void kvs_file_sum_encode(uint8_t out[KVS_FILE_SUM_BYTES], const struct kvs_file_sum *sum);
int kvs_file_sum_decode(struct kvs_file_sum *ret, const uint8_t in[KVS_FILE_SUM_BYTES]);
uint64_t kvs_file_owner(const void *key, size_t len, bool manifest);
/** Read @len bytes of @fd at its start into @buf and hash them on the way. -EBADMSG: shorter. */
int kvs_file_read_hashed(int fd, void *buf, size_t len, uint8_t ret_hash[16]);
/** Hash the first @len bytes of @fd. -EBADMSG: it is shorter. */
int kvs_file_hash_file(int fd, uint64_t len, uint8_t ret_hash[16]);
void kvs_file_hash(const void *data, size_t len, uint8_t ret_hash[16]);

/* -- Names (file_name.c) ---------------------------------------------------------------------- */

/** The file name of manifest @name: -EINVAL (empty), -ENAMETOOLONG. */
int kvs_file_name_encode(char ret[KVS_FILE_NAME], const char *name);
/** The manifest's name behind a file name: -EINVAL when no name encodes to it. */
int kvs_file_name_decode(char ret[KVS_FILE_NAME], const char *file);
void kvs_file_hex(char ret[KVS_FILE_HEX], const uint8_t *key, size_t len);
/** Returns the key's length, or -EINVAL when @hex isn't the canonical name of a key. */
int kvs_file_unhex(uint8_t ret[KVS_FILE_KEY_MAX], const char *hex);
/**
 * The number of the fan-out that chunk file @hex belongs to, and its key; -EINVAL: no chunk's name.
 */
int kvs_file_chunk_name(uint8_t ret[KVS_FILE_KEY_MAX], int *ret_len, const char *hex);
/** Whether @name is a writer's: 16 lower-case hex digits. */
bool kvs_file_is_writer(const char *name);
/**
 * Whether @name is a file's of a writer in tmp/: the writer's name, '.', a number, ".s" or ".p" at
 * most.
 */
bool kvs_file_is_tmp(const char *name);

/* -- Pending chunks (file_pending.c) ---------------------------------------------------------- */

enum kvs_file_state {
    KVS_FILE_PUT,     /* content in tmp/, not yet in place */
    KVS_FILE_HIT,     /* was in place already; its link in tmp/ keeps it */
    KVS_FILE_SUSPECT, /* PUT, but a sync failed: must be written anew before it is synced again, by
                         the next publication, or by a put */
    KVS_FILE_LOST     /* its bytes are gone: no publication that may need them succeeds until they
                         are put again, found in place, or the chunk is deleted */
};

/* -- What was seen of a chunk in place (file_known.c) ------------------------------------------ */

struct kvs_file_seen {
    uint64_t ino, size;
    int64_t mtime_ns, ctime_ns;
};

struct kvs_file_pending {
    struct kvs_file_pending *next; /* in its bucket */
    enum kvs_file_state state;
    bool known;                /* a hit that was noted as verified and durable, name and all */
    bool same;                 /* a hit that is in place as it was seen */
    bool sure;                 /* what is in place now is verified, and was seen */
    struct kvs_file_seen seen; /* of a hit, or of what was put into place; else zero */
    bool busy;                 /* a publication works on it */
    bool again;                /* put once more meanwhile: stays pinned */
    bool tried;                /* the publication tried to pin it for that */
    bool needed;               /* the publication's manifest names it, or may need all */
    bool gone;                 /* busy, lost or suspect, and put anew: no longer in the map */
    bool leased;               /* a hit that the handle's lease keeps, with no file in tmp/ */
    bool copy;                 /* PUT, of what is in place: it can be neither pinned nor touched */
    bool pinned;               /* has a file in tmp/ */
    int fd;                    /* of that file, kept for fsync; -1 */
    uint64_t tmp;
    struct kvs_file_sum sum;
    size_t key_len;
    uint8_t key[];
};

/** Whether a put of the same chunk counts as a hit. What a failed sync left may be gone. */
static inline bool kvs_file_is_held(const struct kvs_file_pending *e)
{
    return e->state == KVS_FILE_PUT || e->state == KVS_FILE_HIT;
}

struct kvs_file_map {
    struct kvs_file_pending **buckets;
    size_t n_buckets, n;
};

int kvs_file_map_reserve(struct kvs_file_map *map);
struct kvs_file_pending *kvs_file_map_find(const struct kvs_file_map *map, const void *key,
                                           size_t len);
void kvs_file_map_add(struct kvs_file_map *map, struct kvs_file_pending *entry);
void kvs_file_map_remove(struct kvs_file_map *map, const struct kvs_file_pending *entry);
struct kvs_file_pending *kvs_file_pending_new(const void *key, size_t len);

/* -- What was published lately (file_history.c) ------------------------------------------------ */

enum { KVS_FILE_BATCHES = 256 };

struct kvs_file_batch {
    struct kv_buf records; /* of one publication's chunks */
    pid_t thread;          /* that published */
    bool noted;            /* for some manifest of unknown format */
};

struct kvs_file_history {
    struct kvs_file_batch batches[KVS_FILE_BATCHES]; /* a ring */
    size_t oldest, n, bytes;
    _Atomic pid_t user;  /* the first thread that put or published */
    _Atomic bool shared; /* another did, too */
};

/** Note that the calling thread puts or publishes. */
void kvs_file_history_thread(kv_store_v1 *h);
/** Append what an opaque manifest of this thread may need beyond what is pending. */
void kvs_file_history_records(kv_store_v1 *h, struct kv_buf *ret);
/** @entries were published; @noted: for a manifest of unknown format. */
void kvs_file_history_add(kv_store_v1 *h, struct kvs_file_pending *const *entries, size_t n,
                          bool noted);
void kvs_file_history_fini(kv_store_v1 *h);

struct kvs_file_table;
struct kvs_file_note {
    const uint8_t *key;
    size_t key_len;
    struct kvs_file_seen seen; /* its ctime doesn't count */
};
struct kvs_file_seen kvs_file_see(const struct stat *st);
/** The same file, with nothing written to it and no time of use set. */
bool kvs_file_unchanged(const struct kvs_file_seen *a, const struct kvs_file_seen *b);
/** Whether the chunk in place is as somebody left it who had verified all of it, and made it and its
 * name durable. Any thread. */
bool kvs_file_known(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                    const struct kvs_file_seen *now);
/** Note chunks that are verified, durable under their names, and won't be changed by this handle any
 * more (a pin that is removed changes their ctime). Any thread. */
void kvs_file_remember(kv_store_v1 *h, const struct kvs_file_note *notes, size_t n);
void kvs_file_known_free(struct kvs_file_table *table);

/* -- Leases (file_lease.c) --------------------------------------------------------------------- */

enum { KVS_FILE_LEASE_S = 120 };

/**
 * Keep the chunk in place from deleters until kvs_file_lease_end, and note its use. -ENOENT: it is
 * gone. Any other error: it must be pinned instead (-EWOULDBLOCK: a deleter is at its fan-out;
 * -ETIME: the handle's lease is past half its time). Any thread.
 */
int kvs_file_lease(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex);
/** The entry counts on its lease no longer. A no-op without one. Any thread. */
void kvs_file_lease_end(kv_store_v1 *h, struct kvs_file_pending *e);
/** End the leases of @n entries, whose `leased` the caller has cleared. Any thread. */
void kvs_file_leases_end(kv_store_v1 *h, size_t n);
/** A new writer has no lease. */
void kvs_file_lease_none(kv_store_v1 *h);
/**
 * Time in ns: deleters keep chunks used then or later. INT64_MAX when nobody has a lease, INT64_MIN
 * when the leases can't be read. For a deleter that has the flock, or that deletes only what wasn't
 * used since it looked.
 */
int64_t kvs_file_leased_since(kv_store_v1 *h);

/* -- Reading ahead (file_ahead.c) -------------------------------------------------------------- */

struct kvs_file_ahead;
struct kvs_file_ahead_get {
    uint64_t begin_ns; /* 0: was not prefetched */
    int stream;
};
int kvs_file_prefetch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
/** Around a get: when it was slow, what comes next is announced to the kernel. */
void kvs_file_ahead_begin(kv_store_v1 *h, struct kvs_file_ahead_get *ret, const uint8_t *key,
                          size_t key_len);
void kvs_file_ahead_end(kv_store_v1 *h, const struct kvs_file_ahead_get *get, size_t len);
void kvs_file_ahead_free(struct kvs_file_ahead *a);

/* -- A second reader (file_reader.c) ----------------------------------------------------------- */

struct kvs_file_reader;
/** Read and verify what a prefetch names, on a thread of the handle. */
void kvs_file_reader_begin(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
/** Take a chunk that the second reader has read and verified: false when it has not. @ret is the
 * caller's to free, @ret_st the file's state before it was read. Any thread. */
bool kvs_file_reader_take(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint8_t **ret,
                          size_t *ret_len, struct stat *ret_st);
/** Drop what the second reader has read: chunks may have been deleted since. Any thread. */
void kvs_file_reader_forget(kv_store_v1 *h);
/** Join its thread; before the handle's descriptors are closed. */
void kvs_file_reader_stop(kv_store_v1 *h);

/* -- The handle ------------------------------------------------------------------------------- */

struct kv_store_v1 {
    pid_t pid;
    char *dir; /* for messages */
    struct kvs_file_opts opts;
    _Atomic int refuses;   /* the errno that puts fail with; 0: the store can be written */
    _Atomic bool side_car; /* xattrs turned out not to be supported */
    _Atomic bool no_links; /* nor hard links */
    bool syncfs_tells;     /* syncfs reports errors here (Linux 5.8) */
    int root, house, tmp, writers, bad, refs, sums;
    int fan[KVS_FILE_FANS];
    bool refs_unsynced; /* a name in refs/ may be the old one after a power cut */
    bool refs_grown;    /* by the publication under way, so far that it is to compact them */
    int used_fd;        /* .kvasir/used: bytes of chunk files, all processes */
    int writer_fd;
    char writer[17];
    _Atomic uint64_t next_tmp;
    _Atomic int kept_fds;
    pthread_mutex_t lock, commit, known_lock, lease_lock, reader_lock;
    size_t leases;                /* hits that count on the lease, which began at */
    int64_t lease_ns;             /* this time; under lease_lock, as is */
    int lease_fan[KVS_FILE_FANS]; /* opened when needed: -1 before */
    struct kvs_file_map map;
    struct kvs_file_history history;

    struct kvs_file_table *known;   /* NULL before the first; under known_lock */
    struct kvs_file_ahead *ahead;   /* NULL before the first; under lock */
    struct kvs_file_reader *reader; /* NULL before the first; under reader_lock */
    _Atomic uint64_t puts, put_hits, gets, get_misses, bad_chunks, evicted, written, read, errors;
};

#define KVS_FILE_ADD(counter, n) \
    atomic_fetch_add_explicit(&(counter), (uint64_t)(n), memory_order_relaxed)

/** Log "@what: name=... error=..." and return -@error. */
int kvs_file_fail(kv_store_v1 *h, int error, const char *what, const char *name);
int kvs_file_options(const char *uri, char **ret_dir, struct kvs_file_opts *ret);
kv_store_v1 *kvs_file_open(const char *uri);
void kvs_file_close(kv_store_v1 *h);

/* -- Files (file_io.c) ------------------------------------------------------------------------ */

void kvs_file_tmp_name(const kv_store_v1 *h, char ret[KVS_FILE_TMP], uint64_t n);
/** Path of the side-car of tmp file @n below .kvasir/. */
void kvs_file_tmp_side_car(const kv_store_v1 *h, char ret[KVS_FILE_TMP + 8], uint64_t n);
/**
 * A flock (LOCK_SH, LOCK_EX, or LOCK_UN), waited for whatever signals come: a host's handlers may
 * be without SA_RESTART. Negative errno where there are none; callers then do without.
 */
int kvs_file_lock(int fd, int how);
/** A flock on DIR shared by all who read a manifest with its side-car; to be closed. -1: none. */
int kvs_file_lock_root(kv_store_v1 *h);
/**
 * Whether chunks and manifests can be written: 0, or the negative errno that says why not: -EROFS,
 * -EACCES, -EPERM, or -ENOSPC and -EDQUOT for a full file system, where it is tried again.
 */
int kvs_file_writable(kv_store_v1 *h);
/** Whether chunks and manifests can be deleted: also where a full file system takes no more. */
int kvs_file_deletable(kv_store_v1 *h);
/** Whether @error says that a file system has no room for one more file. */
static inline bool kvs_file_full(int error)
{
    return error == ENOSPC || error == EDQUOT;
}
/** Whether a writer's process is gone; its file in writers/ is removed then. */
bool kvs_file_writer_dead(kv_store_v1 *h, const char *id);
/** Make this handle a writer, under `commit`; 0 or a negative errno. */
int kvs_file_become_writer(kv_store_v1 *h);

/** Write a new file in tmp/ with its checksum; @ret_fd (may be NULL) stays open for fsync. */
int kvs_file_write_tmp(kv_store_v1 *h, uint64_t owner, const void *data, size_t len, bool pack,
                       uint64_t *ret_n, struct kvs_file_sum *ret_sum, int *ret_fd);
/** Unlink tmp file @n, and its side-car. */
void kvs_file_drop_tmp(kv_store_v1 *h, uint64_t n);
int kvs_file_write_all(int fd, const void *data, size_t len);

static inline int kvs_file_fan(const uint8_t *key)
{
    return key[0] >> 4;
}

/* -- Where checksums are kept (file_mark.c) ---------------------------------------------------- */

/** Split a side-car's path, "tmp/NAME" or "sums/NAME", into that folder and NAME. */
int kvs_file_side_dir(const kv_store_v1 *h, const char **path);
/**
 * The checksum kept for an open file, of chunk @owner. @nth: of a manifest's side-car, which may
 * hold two (0, 1). -ENODATA: none (a foreign file); -EBADMSG: nonsense. Where it is in a side-car,
 * chunk and checksum are a pair only under the flock.
 */
int kvs_file_load_sum(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
                      struct kvs_file_sum *ret);
int kvs_file_store_sum(kv_store_v1 *h, int fd, const char *side_car,
                       const struct kvs_file_sum *sum);
/** Add the checksum of the manifest in place to the side-car of tmp file @n, which replaces it. */
int kvs_file_keep_sum(kv_store_v1 *h, uint64_t n, const char *file, uint64_t owner);
/** Whether manifest @file carries a checksum of ours that fits: 1, 0, or -errno (-ENOENT). */
int kvs_file_is_ours(kv_store_v1 *h, const char *file);

/* -- Reading (file_read.c) --------------------------------------------------------------------- */

/** Verified content of a file, as a whole or in pieces. */
struct kvs_file_value {
    uint8_t *data; /* malloc'd; NULL: given in pieces */
    size_t len;
    /* Gets content that isn't packed in pieces, read into @buf of @room bytes, before all of it is
     * verified. Ends the reading by -ECANCELED. NULL: content as a whole. */
    kv_store_piece_fn each;
    void *arg;
    uint8_t *buf;
    size_t room;
};

/**
 * Open what stands in directory @dirfd as @name for reading, wherever a chunk may be. -EBADMSG: it
 * is no file, but a link, folder, pipe or device, which is left for kvs_file_set_aside. @ret_st is
 * set for both.
 */
int kvs_file_open_read(int dirfd, const char *name, struct stat *ret_st);
/**
 * Read and verify. @side_car: the name of the checksum in sums/, where that is in use.
 * -ENOENT; -EBADMSG: did not verify. @ret_st is set also with -EBADMSG.
 */
int kvs_file_read_value(kv_store_v1 *h, int dirfd, const char *name, const char *side_car,
                        uint64_t owner, struct kvs_file_value *value, struct stat *ret_st);
/** The same into a new buffer, which the caller frees. */
int kvs_file_read(kv_store_v1 *h, int dirfd, const char *name, const char *side_car, uint64_t owner,
                  uint8_t **ret, size_t *ret_len, struct stat *ret_st);
/** Read and hash @len bytes of a file in pieces for value->each, or for nobody. */
int kvs_file_read_pieces(int fd, uint64_t len, const struct kvs_file_value *value,
                         uint8_t ret_hash[16]);
/** Note that the file was used, once a minute. Returns whether it was, with the new time in @st. */
bool kvs_file_note_use(kv_store_v1 *h, int dirfd, const char *name, struct stat *st);
/**
 * Read and verify chunk file @hex in fan-out directory @dirfd without handing it out. 0, -ENODATA:
 * it has no checksum of ours; else as kvs_file_read. @ret_st is how it was before and after.
 */
int kvs_file_verify(kv_store_v1 *h, int dirfd, const char *hex, uint64_t owner,
                    struct stat *ret_st);
/**
 * Whether @rc tells of this process, or the machine, and nothing of the file that was looked at.
 */
static inline bool kvs_file_passing(int rc)
{
    return rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM;
}

/* -- Setting aside (file_aside.c) -------------------------------------------------------------- */

/**
 * Move what did not verify to bad/. -EAGAIN: it was replaced meanwhile, or may be good after all.
 */
int kvs_file_set_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st);
/** Open a file of the store's own in @dirfd, made when @flags say so. What isn't one (a link, a
 * folder, a pipe, another program's file under a second name) is moved to bad/ first. *ret_moved
 * (may be NULL): that happened. */
int kvs_file_open_own(kv_store_v1 *h, int dirfd, const char *name, int flags, bool *ret_moved);
/** Rename a file over @to, where a folder may be in the way: that moves to bad/. */
int kvs_file_rename(kv_store_v1 *h, int from_dir, const char *from, int to_dir, const char *to);

/* -- The parts of the backend ----------------------------------------------------------------- */

int kvs_file_check(kv_store_v1 *h, const void *key, size_t len); /* arguments of a chunk call */
int kvs_file_put_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const uint8_t *data,
                       size_t len);
/** Get a chunk. The caller sets how @value wants it, and frees its data, on success. */
int kvs_file_get_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       struct kvs_file_value *value);
/** The file of a chunk's checksum below .kvasir/, where xattrs aren't supported. */
void kvs_file_chunk_side_car(char ret[KVS_FILE_HEX + 8], const char *hex);
void kvs_file_manifest_side_car(char ret[KVS_FILE_NAME + 16], const char *file);
/**
 * A second link in tmp/ to the chunk in place; none where links can't be made. -ENOENT: it isn't
 * there.
 */
int kvs_file_pin(kv_store_v1 *h, const uint8_t *key, const char *hex, struct kvs_file_pending *e);
/** Whether @error says that this file system, or this file, can't have (more) hard links. */
static inline bool kvs_file_no_link(int error)
{
    return error == EPERM || error == ENOTSUP || error == ENOSYS || error == EMLINK;
}
/** Unlink the file in tmp/ of an entry that is in no map any more. */
void kvs_file_unpin(kv_store_v1 *h, struct kvs_file_pending *e);
/** Close, unlink in tmp/, free. NULL is a no-op. */
void kvs_file_pending_free(kv_store_v1 *h, struct kvs_file_pending *e);
/** Make pending chunks durable and, unless @name is NULL, publish a manifest. */
int kvs_file_publish(kv_store_v1 *h, const char *name, const void *data, size_t len);
/**
 * Move or link a pending chunk into place and note its use, under flocks on the fan-outs. -ENOENT,
 * -EBADMSG: its bytes are gone. -EIO: they are known to be.
 */
int kvs_file_place(kv_store_v1 *h, struct kvs_file_pending *e);
/** Rename tmp file @n to manifest @file, and sync its directory; under `commit`. */
int kvs_file_reveal(kv_store_v1 *h, uint64_t n, const char *file);
int kvs_file_get_manifest(kv_store_v1 *h, const char *name, uint8_t **ret, size_t *ret_len);
int kvs_file_delete_manifest(kv_store_v1 *h, const char *name);
/** A stream of a directory's entries, independent of others of it. */
DIR *kvs_file_dir(int at);
int kvs_file_list_manifests(kv_store_v1 *h, kv_store_each_fn each, void *arg);
int kvs_file_list_chunks(kv_store_v1 *h, kv_store_each_fn each, void *arg);
int kvs_file_exists(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n,
                    uint8_t *ret_present);
int kvs_file_touch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
int kvs_file_stats(kv_store_v1 *h, kv_store_stats *ret);
int kvs_file_delete_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len);
int kvs_file_sweep(kv_store_v1 *h, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                   kv_store_swept *ret);
/** Bytes of chunk files came or went (all processes' count); under `commit`. */
void kvs_file_used_add(kv_store_v1 *h, int64_t delta);
/** Where there is a limit: evict until @coming bytes fit; under `commit`. */
int kvs_file_make_room(kv_store_v1 *h, uint64_t coming);
void kvs_file_add_record(struct kv_buf *buf, const uint8_t *key, size_t len);
/**
 * Note that manifest file @file may need what @records name; @ret_fd (-1 before) is to be synced
 * and closed. Until kvs_file_refs_done nobody, of any process, forgets what was noted. Under
 * `commit`.
 */
int kvs_file_note_refs(kv_store_v1 *h, const char *file, struct kv_buf *records, int *ret_fd);
/** The publication that noted refs is over, one way or the other; may compact. */
void kvs_file_refs_done(kv_store_v1 *h, const char *file);
/** Keep publications that note refs out while one is deleted; under `commit`. */
void kvs_file_refs_lock(kv_store_v1 *h);
void kvs_file_refs_unlock(kv_store_v1 *h);
void kvs_file_forget_refs(kv_store_v1 *h, const char *file);
int kvs_file_list_refs(kv_store_v1 *h, const char *name, kv_store_each_fn each, void *arg);
/** Put the pending files on disk: one barrier. On failure none of them may be trusted. @ret_whole:
 * it was a syncfs. */
int kvs_file_barrier(kv_store_v1 *h, const int *fds, const uint64_t *tmps, size_t n, uint64_t bytes,
                     bool *ret_whole);

#endif
