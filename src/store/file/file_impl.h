// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the parts of the file store. commit/commit.c explains the directories, why a publication
 * is durable and why a pinned chunk can't vanish.
 *
 * Threads: five locks.
 * - `lock` protects the pending map; never held during I/O.
 * - `known_lock` protects the table of known chunks, `lease_lock` the lease; neither is held while
 *   taking another lock.
 * - `reader_lock` protects the second reader.
 * - `commit` serialises the users of fan-out locks (publication, sweep, eviction): a flock belongs
 *   to the handle's descriptor, so it doesn't exclude two threads of one handle. Take `commit`
 *   before `lock`.
 *
 * A handle belongs to the process that opened it; in a forked child every call returns -ECHILD.
 */
#ifndef KV_STORE_FILE_FILE_IMPL_H
#define KV_STORE_FILE_FILE_IMPL_H

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/metrics/history.h"
#include "store/backend/file.h"
#include "store/backend/parts.h"

enum {
    KVS_FILE_FANS = 16,
    KVS_FILE_KEY_MAX = 120, /* bytes; its hex digits must fit a file name, with room for suffixes */
    KVS_FILE_HEX = 2 * KVS_FILE_KEY_MAX + 1,
    KVS_FILE_NAME = 256,
    KVS_FILE_TMP = 40,    /* writer id, '.', number */
    KVS_FILE_BAD_MAX = 64 /* files kept in bad/; older ones are deleted */
};

enum kvs_file_sync { KVS_FILE_SYNC_AUTO, KVS_FILE_SYNC_FILES, KVS_FILE_SYNC_FS };

struct kvs_file_opts {
    uint64_t limit; /* limit for the bytes of chunk files; 0: none */
    bool existing;  /* fail with -ENOENT instead of making a store */
    int zstd;       /* compression level; 0: store raw */
    enum kvs_file_sync sync;
    bool side_car; /* keep checksums in side-car files, as where xattrs are not supported */
};

/* -- Checksums (file_sum.c; format: docs/formats.md) ------------------------------------------- */

/* First bytes of a checksum; its version, 1 byte, follows. */
#define KVS_FILE_SUM_MAGIC "KVSC"

enum {
    KVS_FILE_SUM_BYTES = 48,
    KVS_FILE_RAW = 0,
    KVS_FILE_PACKED = 1 /* the checksum, then one zstd frame: told from content without it */
};

struct kvs_file_sum {
    uint8_t encoding;
    uint64_t len;    /* bytes of the content as put */
    uint64_t stored; /* bytes of the file */
    uint64_t owner;  /* XXH3-64 of key or name: bytes under a wrong name don't verify */
    uint8_t hash[16];
};

void kvs_file_sum_make(struct kvs_file_sum *ret, uint64_t owner, const void *data, size_t len);
/** Make the checksum of @len bytes in parts. */
void kvs_file_sum_parts(struct kvs_file_sum *ret, uint64_t owner, const struct iovec *parts,
                        size_t n_parts, size_t len);
void kvs_file_sum_encode(uint8_t out[KVS_FILE_SUM_BYTES], const struct kvs_file_sum *sum);
int kvs_file_sum_decode(struct kvs_file_sum *ret, const uint8_t in[KVS_FILE_SUM_BYTES]);
uint64_t kvs_file_owner(const void *key, size_t len, bool manifest);
/**
 * Read @len bytes of @fd from its start into @buf and hash them in the same pass. -EBADMSG: the
 * file is shorter.
 */
int kvs_file_read_hashed(int fd, void *buf, size_t len, uint8_t ret_hash[16]);
/**
 * Read and hash as kvs_file_read_hashed, into parts that have room for @len bytes.
 */
int kvs_file_read_parts(int fd, const struct iovec *parts, size_t n_parts, uint64_t len,
                        uint8_t ret_hash[16]);
/** Write parts one behind the other, and hash them. */
int kvs_file_write_hashed(int fd, const struct iovec *parts, size_t n_parts, uint8_t ret_hash[16]);
/** Hash the first @len bytes of @fd. -EBADMSG: the file is shorter. */
int kvs_file_hash_file(int fd, uint64_t len, uint8_t ret_hash[16]);
void kvs_file_hash(const void *data, size_t len, uint8_t ret_hash[16]);

/* -- Names (file_name.c) ---------------------------------------------------------------------- */

/** Encode manifest name @name as a file name. -EINVAL: empty; -ENAMETOOLONG. */
int kvs_file_name_encode(char ret[KVS_FILE_NAME], const char *name);
/** Decode a file name to a manifest's name. -EINVAL: no name encodes to it. */
int kvs_file_name_decode(char ret[KVS_FILE_NAME], const char *file);
void kvs_file_hex(char ret[KVS_FILE_HEX], const uint8_t *key, size_t len);
/**
 * Decode @hex to a key. Returns the key's length, or -EINVAL when @hex isn't the canonical name of
 * a key.
 */
int kvs_file_unhex(uint8_t ret[KVS_FILE_KEY_MAX], const char *hex);
/**
 * Decode the name of chunk file @hex. Returns the number of its fan-out, with key and length in
 * @ret and @ret_len, or -EINVAL when it is no chunk's name.
 */
int kvs_file_chunk_name(uint8_t ret[KVS_FILE_KEY_MAX], int *ret_len, const char *hex);
/** True when @name is a writer's: 16 lower-case hex digits. */
bool kvs_file_is_writer(const char *name);
/**
 * True when @name is that of a writer's file in tmp/: the writer's name, '.', a number, and at most
 * ".s" or ".p".
 */
bool kvs_file_is_tmp(const char *name);

/* -- Pending chunks (file_pending.c) ---------------------------------------------------------- */

enum kvs_file_state {
    KVS_FILE_PUT, /* content in tmp/, not yet in place */
    KVS_FILE_HIT, /* in place before the put; a link in tmp/, or a lease, keeps it */
    /* PUT, but a sync failed: the next publication, or a put, must write it anew before it is
     * synced */
    KVS_FILE_SUSPECT,
    /* its bytes are gone: no publication that may need them succeeds until the chunk is put again,
     * found in place, or deleted */
    KVS_FILE_LOST
};

/* -- What was seen of a chunk in place (file_known.c) ------------------------------------------ */

struct kvs_file_seen {
    uint64_t ino, size;
    int64_t mtime_ns, ctime_ns;
    bool
        inside; /* the file itself holds the checksum that it was verified by: no side-car counts */
    bool last;  /* ctime_ns is that of our last change to the file */
};

struct kvs_file_pending {
    struct kvs_file_pending *next; /* next entry of its bucket */
    enum kvs_file_state state;
    bool known;                /* a hit noted as verified and durable, with its name */
    bool same;                 /* a hit whose file hasn't changed since it was seen */
    bool sure;                 /* the chunk in place is verified, and its state noted in `seen` */
    struct kvs_file_seen seen; /* state of a hit's file, or of the file put into place; else zero */
    bool busy;                 /* a publication works on it */
    /* puts since the last manifest that needed the chunk: it stays pending until a manifest has
     * named it, or a failed save has taken it back, as often as it was put */
    uint64_t puts;
    uint64_t taken; /* those of them that the publication under way is for */
    /* a publication that it stays pending after has put it into place, durably, and pinned it;
     * nobody has put it since */
    bool settled;
    bool tried;  /* the publication tried to pin it for those that come after */
    bool needed; /* the publication's manifest names it, or may need all chunks */
    /* isn't in the map while busy: lost or suspect, and put anew; or named by the manifest and
     * not pending */
    bool gone;
    bool leased; /* a hit that the handle's lease keeps, with no file in tmp/ */
    /* PUT with a copy of the chunk in place, which can be neither pinned nor touched */
    bool copy;
    bool pinned; /* has a file in tmp/ */
    int fd;      /* descriptor of the file in tmp/, kept for fsync; -1 */
    uint64_t tmp;
    struct kvs_file_sum sum;
    size_t key_len;
    uint8_t key[];
};

/**
 * True when another put of this chunk counts as a hit. After a failed sync the bytes may be gone.
 */
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
/** Free the buckets, not the entries. */
void kvs_file_map_fini(struct kvs_file_map *map);
struct kvs_file_pending *kvs_file_pending_new(const void *key, size_t len);

/* -- What was published lately (file_history.c) ------------------------------------------------ */

struct kvs_file_batch {
    struct kv_buf records; /* records of one publication's chunks */
    uint64_t thread;       /* kv_thread_number() of the one that published */
    bool noted;            /* a manifest of unknown format has noted them */
    bool opaque;           /* the publication was of such a manifest */
};

struct kvs_file_history {
    struct kvs_file_batch batches[KV_HISTORY_PUBLICATIONS]; /* ring buffer */
    size_t oldest, n, bytes;
    _Atomic uint64_t user; /* kv_thread_number() of the first thread that put or published */
    _Atomic bool shared;   /* another thread did, too */
};

/** Note that the calling thread puts or publishes. */
void kvs_file_history_thread(kv_store_v1 *h);
/**
 * Append the published chunks that an opaque manifest of this thread may need, besides pending
 * ones.
 */
void kvs_file_history_records(kv_store_v1 *h, struct kv_buf *ret);
/** Note that @entries were published. @noted: for a manifest of unknown format. */
void kvs_file_history_add(kv_store_v1 *h, struct kvs_file_pending *const *entries, size_t n,
                          bool noted);
void kvs_file_history_fini(kv_store_v1 *h);

struct kvs_file_table;
struct kvs_file_note {
    const uint8_t *key;
    size_t key_len;
    struct kvs_file_seen seen; /* a ctime that isn't of our last change is looked up */
};
struct kvs_file_seen kvs_file_see(const struct stat *st);
/** True when both describe the same file, with no write and no new time of use in between. */
bool kvs_file_unchanged(const struct kvs_file_seen *a, const struct kvs_file_seen *b);
/**
 * True when the chunk in place is unchanged since a handle noted it as verified and durable, with
 * its name; then sets @seen->inside. Any thread.
 */
bool kvs_file_known(kv_store_v1 *h, const uint8_t *key, size_t key_len, struct kvs_file_seen *seen);
/**
 * Note chunks that are verified and durable under their names. This handle must not change them any
 * more: removing a pin changes their ctime. Any thread.
 */
void kvs_file_remember(kv_store_v1 *h, const struct kvs_file_note *notes, size_t n);
/**
 * Forget that a chunk was verified: it can't be read any more. The handle's next put verifies it.
 * Any thread.
 */
void kvs_file_forget(kv_store_v1 *h, const uint8_t *key, size_t key_len);
void kvs_file_known_free(struct kvs_file_table *table);

/* -- Leases (file_lease.c) --------------------------------------------------------------------- */

enum { KVS_FILE_LEASE_S = 120 };

/**
 * Protect the chunk in place from deleters until kvs_file_lease_end, and mark it as used. -ENOENT:
 * the chunk is gone. After any other error pin it instead (-EWOULDBLOCK: a deleter holds its
 * fan-out; -ETIME: the handle's lease is past half its time). Any thread.
 */
int kvs_file_lease(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex);
/** End the lease of an entry. A no-op without one. Any thread. */
void kvs_file_lease_end(kv_store_v1 *h, struct kvs_file_pending *e);
/** End the leases of @n entries, whose `leased` flags the caller has cleared. Any thread. */
void kvs_file_leases_end(kv_store_v1 *h, size_t n);
/** Initialise the lease of a new writer: none. */
void kvs_file_lease_none(kv_store_v1 *h);
/**
 * Read the begin of the oldest lease, in ns: deleters must keep chunks used then or later.
 * INT64_MAX: no lease; INT64_MIN: the leases can't be read. Call with the fan-out's flock held, or
 * delete only chunks that weren't used since the call.
 */
int64_t kvs_file_leased_since(kv_store_v1 *h);

/* -- Reading ahead (file_ahead.c) -------------------------------------------------------------- */

struct kvs_file_ahead;
struct kvs_file_ahead_get {
    uint64_t begin_ns; /* 0: the chunk was not prefetched */
    int stream;
};
int kvs_file_prefetch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
/** Call before and after a get. A slow get announces the next prefetched chunks to the kernel. */
void kvs_file_ahead_begin(kv_store_v1 *h, struct kvs_file_ahead_get *ret, const uint8_t *key,
                          size_t key_len);
void kvs_file_ahead_end(kv_store_v1 *h, const struct kvs_file_ahead_get *get, size_t len);
void kvs_file_ahead_free(struct kvs_file_ahead *a);

/* -- A second reader (file_reader.c) ----------------------------------------------------------- */

struct kvs_file_reader;
/** Start to read and verify a prefetch's chunks, on a thread of the handle. */
void kvs_file_reader_begin(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
/**
 * Take a chunk that the second reader has read and verified; false when it has not. The caller
 * frees @ret. @ret_st is the file's state before it was read. Any thread.
 */
bool kvs_file_reader_take(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint8_t **ret,
                          size_t *ret_len, struct stat *ret_st);
/**
 * Drop all chunks that the second reader has read: some may have been deleted since. Any thread.
 */
void kvs_file_reader_forget(kv_store_v1 *h);
/** Join the second reader's thread. Call before closing the handle's descriptors. */
void kvs_file_reader_stop(kv_store_v1 *h);

/* -- The folder on the disk (file_follow.c) ----------------------------------------------------- */

enum { KVS_FILE_TOLD = 256 };

struct kvs_file_places {
    _Atomic uint64_t root, chunks, house; /* device and inode of each, mixed; 0: unknown */
    _Atomic bool told_moved;
    _Atomic uint64_t turn; /* counts how often the folders were made or opened again */
    /* Under `commit`: threads that were told that pending chunks were lost at turn `lost`, which was
     * at `lost_ns`, when `newest` was the highest number of a thread; the ring's next place is `next`. */
    uint64_t lost, lost_ns, newest;
    struct {
        uint64_t thread, turn;
    } told[KVS_FILE_TOLD];
    size_t next;
};

/**
 * Follow the store's path when its folders were removed, or replaced by others, beneath the handle:
 * make and open them again. Call without a lock. @fan: fan-out that the caller is going to use; -1:
 * all. Returns 1: done; 0: nothing has changed; or a negative errno, logged.
 */
int kvs_file_follow(kv_store_v1 *h, int fan);
/** Begin a call: 0, -ECHILD in a forked child, or an error of kvs_file_follow. */
int kvs_file_begin(kv_store_v1 *h);
/** Note which folders the handle's descriptors are of. */
void kvs_file_places_note(kv_store_v1 *h);
/**
 * True once for each thread when chunks that it may have put were lost with their folder. A flush,
 * or a manifest that may need any chunk, must fail then. Call under `commit`.
 */
bool kvs_file_owes(kv_store_v1 *h);
/** Open root and folders of @h, whose descriptors are -1. Returns 0 or a negative errno. */
int kvs_file_open_folders(kv_store_v1 *h);
void kvs_file_close_folders(kv_store_v1 *h);
/** Set all descriptors to -1. */
void kvs_file_no_folders(kv_store_v1 *h);

/* -- The handle ------------------------------------------------------------------------------- */

struct kv_store_v1 {
    pid_t pid;
    char *dir;  /* path for messages */
    char *path; /* the same, absolute: the process may change its folder */
    struct kvs_file_opts opts;
    _Atomic int refuses;     /* errno that puts fail with; 0: the store can be written */
    _Atomic bool side_car;   /* xattrs turned out not to be supported */
    _Atomic bool no_links;   /* hard links turned out not to be supported */
    bool syncfs_tells;       /* syncfs reports errors here (Linux 5.8) */
    _Atomic bool told_names; /* that directories can't be synced here */
    /* Descriptors of folders, -1: missing. Other threads use them without a lock; a folder that is
     * replaced beneath keeps its number (file_follow.c). */
    int root, house, tmp, writers, bad, refs, sums;
    int fan[KVS_FILE_FANS];
    struct kvs_file_places places; /* which folders the descriptors are of */
    bool refs_unsynced;            /* after a power cut, a name in refs/ may be the old one */
    /* the publication under way let refs/ grow so far that it must compact it */
    bool refs_grown;
    int used_fd; /* .kvasir/used: bytes of chunk files, counted by all processes */
    int writer_fd;
    char writer[17];
    bool no_locks;  /* flocks don't work here */
    int64_t born_s; /* when the writer began, by the file system's clock; 0: it hasn't */
    _Atomic uint64_t next_tmp;
    _Atomic int kept_fds;
    _Atomic bool begins_writing; /* a thread is in begin_writing (file_io.c) */
    pthread_mutex_t lock, commit, known_lock, lease_lock, reader_lock;
    /* Fan-outs with deletions that may not be durable; under commit. */
    bool unsynced[KVS_FILE_FANS];
    size_t leases;                /* number of hits that the lease protects; under lease_lock */
    int64_t lease_ns;             /* begin of the lease; under lease_lock */
    int lease_fan[KVS_FILE_FANS]; /* descriptors, opened when needed: -1 before; under lease_lock */
    struct kvs_file_map map;
    struct kvs_file_history history;

    struct kvs_file_table *known;   /* NULL before the first note; under known_lock */
    struct kvs_file_ahead *ahead;   /* NULL before the first prefetch; under lock */
    struct kvs_file_reader *reader; /* NULL before the first prefetch; under reader_lock */
    uint64_t releases;              /* kvs_file_releases(); under lock */
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
/** Write the path of the side-car of tmp file @n, below .kvasir/. */
void kvs_file_tmp_side_car(const kv_store_v1 *h, char ret[KVS_FILE_TMP + 8], uint64_t n);
/**
 * Take a flock (LOCK_SH, LOCK_EX) or release it (LOCK_UN). Continues after signals, as a host's
 * handlers may lack SA_RESTART. Negative errno where flocks aren't supported; callers then go on
 * without.
 */
int kvs_file_lock(int fd, int how);
/**
 * Take a shared flock on DIR, as every reader of a manifest with a side-car does. Returns a
 * descriptor to close; -1: none.
 */
int kvs_file_lock_root(kv_store_v1 *h);
/**
 * Check that chunks and manifests can be written. Returns 0 or -EROFS, -EACCES, -EPERM. A full file
 * system (-ENOSPC, -EDQUOT) is checked anew by each call.
 */
int kvs_file_writable(kv_store_v1 *h);
/** Check that chunks and manifests can be deleted, which a full file system still allows. */
int kvs_file_deletable(kv_store_v1 *h);
/** True when @error says that a file system has no room for one more file. */
static inline bool kvs_file_full(int error)
{
    return error == ENOSPC || error == EDQUOT;
}
/* -- Writers (file_writer.c) -------------------------------------------------------------------- */

enum { KVS_FILE_FOREIGN_S = 7 * 86400 }; /* unchanged for so long, other hosts' files are litter */

/** True when a writer's process has ended; its file in writers/ is removed then. */
bool kvs_file_writer_dead(kv_store_v1 *h, const char *id);
/**
 * Make this handle a writer, under the id that it has or a new one; call under `commit`. Returns 0
 * or a negative errno.
 */
int kvs_file_become_writer(kv_store_v1 *h);
/** Remove the files of dead writers. */
void kvs_file_sweep_writers(kv_store_v1 *h);
/** Sync a folder of the store. 0 also where the file system can't. */
int kvs_file_sync_dir(kv_store_v1 *h, int fd);

/** Write a new file in tmp/ with its checksum. @ret_fd (may be NULL) stays open for fsync. */
int kvs_file_write_tmp(kv_store_v1 *h, uint64_t owner, const void *data, size_t len, bool pack,
                       uint64_t *ret_n, struct kvs_file_sum *ret_sum, int *ret_fd);
/** Write @len bytes in parts into a new file in tmp/. Parts are joined first when zstd is on. */
int kvs_file_write_tmp_parts(kv_store_v1 *h, uint64_t owner, const struct iovec *parts,
                             size_t n_parts, size_t len, bool pack, uint64_t *ret_n,
                             struct kvs_file_sum *ret_sum, int *ret_fd);
/** Unlink tmp file @n and its side-car. */
void kvs_file_drop_tmp(kv_store_v1 *h, uint64_t n);

static inline int kvs_file_fan(const uint8_t *key)
{
    return key[0] >> 4;
}

/* -- Where checksums are kept (file_mark.c) ---------------------------------------------------- */

/** Split a side-car's path, "tmp/NAME" or "sums/NAME", into that folder's descriptor and NAME. */
int kvs_file_side_dir(const kv_store_v1 *h, const char **path);
/**
 * Load the checksum of an open file of chunk @owner. @nth: which one of a manifest's side-car,
 * which may hold two (0, 1). -ENODATA: none (another program's file); -EBADMSG: invalid. With a
 * side-car, file and checksum match only under the flock.
 */
int kvs_file_load_sum(kv_store_v1 *h, int fd, const char *side_car, int nth, uint64_t owner,
                      struct kvs_file_sum *ret);
int kvs_file_store_sum(kv_store_v1 *h, int fd, const char *side_car,
                       const struct kvs_file_sum *sum);
/**
 * Add the checksum of the manifest in place to the side-car of tmp file @n, which will replace it.
 */
int kvs_file_keep_sum(kv_store_v1 *h, uint64_t n, const char *file, uint64_t owner);
/**
 * Check that manifest @file carries a checksum of ours that fits. Returns 1, 0, or -errno
 * (-ENOENT).
 */
int kvs_file_is_ours(kv_store_v1 *h, const char *file);

/* -- Reading (file_read.c) --------------------------------------------------------------------- */

/** Verified content of a file, as a whole or in pieces. */
struct kvs_file_value {
    uint8_t *data; /* malloc'd; NULL: the content was handed out in pieces */
    size_t len;
    /* Called with pieces of unpacked content, read into @buf of @room bytes, before the whole is
     * verified. A non-zero return ends the reading. NULL: return the content as a whole. */
    kv_store_piece_fn each;
    void *arg;
    uint8_t *buf;
    size_t room;
    /* Gets content that isn't packed straight into @n_parts parts, which have room for @room bytes.
     * -EMSGSIZE when it is longer; @len is set. NULL: content as above. */
    const struct iovec *parts;
    size_t n_parts;
};

/**
 * Open @name in directory @dirfd for reading. -EBADMSG: the entry is a link, folder, pipe or
 * device, which kvs_file_set_aside can move. Sets @ret_st after success and after -EBADMSG.
 */
int kvs_file_open_read(int dirfd, const char *name, struct stat *ret_st);
/**
 * Read a file and verify it. @side_car: path of its checksum in sums/, where side-cars are in use.
 * -ENOENT; -EBADMSG: did not verify. Sets @ret_st also after -EBADMSG.
 */
int kvs_file_read_value(kv_store_v1 *h, int dirfd, const char *name, const char *side_car,
                        uint64_t owner, struct kvs_file_value *value, struct stat *ret_st);
/**
 * Copy @value's data to its parts, when it has any, and free the data. Returns 0 or -EMSGSIZE.
 */
int kvs_file_value_scatter(struct kvs_file_value *value);
/** Read and verify into a new buffer, which the caller frees; otherwise as kvs_file_read_value. */
int kvs_file_read(kv_store_v1 *h, int dirfd, const char *name, const char *side_car, uint64_t owner,
                  uint8_t **ret, size_t *ret_len, struct stat *ret_st);
/** Read and hash @len bytes of a file in pieces, each handed to value->each when that is set. */
int kvs_file_read_pieces(int fd, uint64_t len, const struct kvs_file_value *value,
                         uint8_t ret_hash[16]);
/**
 * Mark the file as used, at most once a minute. Returns true when it was marked, with the new time
 * in @st.
 */
bool kvs_file_note_use(kv_store_v1 *h, int dirfd, const char *name, struct stat *st);
/**
 * Verify chunk file @hex in fan-out directory @dirfd without handing out its content. -ENODATA: it
 * has no checksum of ours; other returns as kvs_file_read. @ret_st is the file's state, equal
 * before and after reading.
 */
int kvs_file_verify(kv_store_v1 *h, int dirfd, const char *hex, uint64_t owner,
                    struct stat *ret_st);
/** True when @rc is a failure of this process or machine, not of the file that was read. */
static inline bool kvs_file_passing(int rc)
{
    return rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM;
}

/* -- Setting aside (file_aside.c) -------------------------------------------------------------- */

/**
 * Move a file that did not verify to bad/. -EAGAIN: it was replaced meanwhile, or may be good after
 * all.
 */
int kvs_file_set_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st);
/**
 * Open a file of the store's own in @dirfd; @flags may create it. Another entry of that name is
 * moved to bad/ first, and *ret_moved (may be NULL) set: a link, a folder, a pipe, or another
 * program's file under a second name.
 */
int kvs_file_open_own(kv_store_v1 *h, int dirfd, const char *name, int flags, bool *ret_moved);
/** Rename a file over @to. A folder of that name is moved to bad/ first. */
int kvs_file_rename(kv_store_v1 *h, int from_dir, const char *from, int to_dir, const char *to);

/* -- The parts of the backend ----------------------------------------------------------------- */

/* checks the arguments of a chunk call */
int kvs_file_check(kv_store_v1 *h, const void *key, size_t len);
int kvs_file_put_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const uint8_t *data,
                       size_t len);
int kvs_file_put_parts(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       const struct iovec *parts, size_t n_parts);
/**
 * Get a chunk. The caller chooses in @value between a whole and pieces, and frees its data after
 * success.
 */
int kvs_file_get_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       struct kvs_file_value *value);
/** Write the path of a chunk's side-car below .kvasir/, where xattrs aren't supported. */
void kvs_file_chunk_side_car(char ret[KVS_FILE_HEX + 8], const char *hex);
void kvs_file_manifest_side_car(char ret[KVS_FILE_NAME + 16], const char *file);
/** False when side-cars are in use and that of manifest @file would have too long a name. */
bool kvs_file_manifest_fits(kv_store_v1 *h, const char *file);
/**
 * Pin: make a second link in tmp/ to the chunk in place. Returns 0 without one where links aren't
 * supported. -ENOENT: the chunk is missing.
 */
int kvs_file_pin(kv_store_v1 *h, const uint8_t *key, const char *hex, struct kvs_file_pending *e);
/** True when @error says that this file system, or this file, can't have (more) hard links. */
static inline bool kvs_file_no_link(int error)
{
    return error == EPERM || error == ENOTSUP || error == ENOSYS || error == EMLINK;
}
/** Unlink the tmp/ file of an entry that no map holds any more. */
void kvs_file_unpin(kv_store_v1 *h, struct kvs_file_pending *e);
/** Close the entry's descriptor, unlink its file in tmp/, free it. NULL is a no-op. */
void kvs_file_pending_free(kv_store_v1 *h, struct kvs_file_pending *e);
/** Make pending chunks durable and, unless @name is NULL, publish a manifest. */
int kvs_file_publish(kv_store_v1 *h, const char *name, const void *data, size_t len);
/**
 * Move or link a pending chunk into place and mark it as used; call with the fan-out's flock.
 * -ENOENT, -EBADMSG: its bytes turned out to be gone; -EIO: the entry is KVS_FILE_LOST.
 */
int kvs_file_place(kv_store_v1 *h, struct kvs_file_pending *e);
/** Rename tmp file @n to manifest @file and sync its directory; call under `commit`. */
int kvs_file_reveal(kv_store_v1 *h, uint64_t n, const char *file);
int kvs_file_get_manifest(kv_store_v1 *h, const char *name, uint8_t **ret, size_t *ret_len);
int kvs_file_delete_manifest(kv_store_v1 *h, const char *name);
/** Open a stream of a directory's entries, with a position of its own. */
DIR *kvs_file_dir(int at);
/** Return the next entry, or NULL at the end and when the directory can't be read: *@rc gets the errno. */
struct dirent *kvs_file_next(DIR *dir, int *rc);
/**
 * Stat directory entry @name, which may be gone by now. Returns 1 for a regular file; 0 for other
 * entries and for none; a negative errno when the file system doesn't tell.
 */
int kvs_file_stat(int dirfd, const char *name, struct stat *ret);
int kvs_file_list_manifests(kv_store_v1 *h, kv_store_each_fn each, void *arg);
int kvs_file_list_chunks(kv_store_v1 *h, kv_store_each_fn each, void *arg);
int kvs_file_exists(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n,
                    uint8_t *ret_present);
int kvs_file_touch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n);
int kvs_file_stats(kv_store_v1 *h, kv_store_stats *ret);
int kvs_file_get_ranges(kv_store_v1 *h, kv_store_range *ranges, size_t n);
int kvs_file_delete_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len);
int kvs_file_delete_chunk_if(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                             const uint8_t *data, size_t len);
int kvs_file_sweep(kv_store_v1 *h, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                   kv_store_swept *ret);
/** Add @delta to the bytes of chunk files that all processes count; call under `commit`. */
void kvs_file_used_add(kv_store_v1 *h, int64_t delta);
/**
 * Evict chunks until @coming more bytes fit below the limit, if there is one; call under `commit`.
 */
int kvs_file_make_room(kv_store_v1 *h, uint64_t coming);
void kvs_file_add_record(struct kv_buf *buf, const uint8_t *key, size_t len);
/**
 * Note that manifest file @file may need the chunks in @records. @empty: the manifest has no bytes,
 * so it needs nothing without records. The caller syncs and closes @ret_fd (-1 before). Until kvs_file_refs_done no process removes such notes. Call under `commit`.
 */
int kvs_file_note_refs(kv_store_v1 *h, const char *file, bool empty, struct kv_buf *records,
                       int *ret_fd);
/** End the noting after the publication succeeded or failed; may compact the file of notes. */
void kvs_file_refs_done(kv_store_v1 *h, const char *file);
/** Exclude publications that note refs while a manifest is deleted; call under `commit`. */
void kvs_file_refs_lock(kv_store_v1 *h);
void kvs_file_refs_unlock(kv_store_v1 *h);
void kvs_file_forget_refs(kv_store_v1 *h, const char *file);
int kvs_file_list_refs(kv_store_v1 *h, const char *name, kv_store_each_fn each, void *arg);
/**
 * Make the pending files durable with one barrier. After a failure none of them can be trusted.
 * @ret_whole: a syncfs was used.
 */
int kvs_file_barrier(kv_store_v1 *h, const int *fds, const uint64_t *tmps, size_t n, uint64_t bytes,
                     bool *ret_whole);

#endif
