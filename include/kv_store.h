// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store.h: keep large objects (an engine's saved KV state) in any kv_store backend.
 *
 * A URI names a store: a plain path is the built-in durable file store, SCHEME://... is a plugin
 * libkv_store_SCHEME.so. A backend has two namespaces, chunks by key and manifests by name. On top
 * of them this library saves, restores, verifies, lists and collects objects as deduplicated
 * chunks.
 *
 * Errors are negative errno values:
 *   -ENOENT   missing
 *   -EBADMSG  stored bytes did not verify (the library never hands them out)
 *   -EINVAL   arguments or names
 *   -ENOTSUP  the backend lacks the function
 *   -EPROTO   a plugin broke its contract
 *   -EIO      other failures of the backend
 * The library logs the reason in one line (to stderr, or to the function that kvs_set_log set).
 *
 * Threads: any function from any thread, unless its comment says otherwise.
 */
#ifndef KV_STORE_H
#define KV_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "kv_store_abi.h"
#include "kv_store_async.h"
#include "kv_store_ext.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- Stores ---------------------------------------------------------------------------------- */

/** An open store: a backend and the checks around it. Any thread. */
struct kvs_store;

/**
 * Send all log lines of libkvstore to @fn; NULL: errors and warnings to stderr. Call this before
 * any other function of the library. Plugins write their own lines to stderr.
 */
KV_API void kvs_set_log(kv_log_fn fn, void *arg);

/**
 * Open the store that @uri names. The caller owns *@ret and closes it with kvs_close.
 *
 * A plugin is searched in $KV_STORE_LIBRARY_PATH, beside this library, then where the dynamic
 * loader searches. Options of the file store follow its path as
 * ?limit=SIZE&zstd=LEVEL&sync=auto|files|fs (docs/kv-store.md). Returns 0, or
 *   -EINVAL  not a URI, or a URI with a password in it
 *   -ENOENT  no such plugin
 *   -EPROTO  a plugin without the symbol, or with a NULL or incomplete table, or of version 0
 *   -EIO     the backend refused the URI and logged why
 */
KV_API int kvs_open(const char *uri, struct kvs_store **ret);

/**
 * Close a store. No other call may use it any more. NULL is a no-op. Waits for I/O.
 *
 * Chunks put by kvs_put_chunk, kvs_put_chunks and kvs_put_chunks_from that neither a manifest nor
 * kvs_flush has made durable are flushed first. When that fails, an error line says how many chunks
 * are lost; when the backend has no flush, a warning says how many it may drop. Call kvs_flush
 * before to learn the reason as a return value. Chunks of a kvs_save that failed are dropped,
 * unless one of these functions put them as well (also with result 1), and so is all that a program
 * put through kvs_backend. In a child after fork() nothing is flushed: the
 * parent still has the chunks.
 */
KV_API void kvs_close(struct kvs_store *store);

/**
 * Return the backend of a store, for callers that use the ABI themselves. The store owns it and
 * both tables. *@ret_ext is NULL when the backend has no extensions.
 */
KV_API kv_store_v1 *kvs_backend(struct kvs_store *store, const kv_store_vtable **ret_vtable,
                                const kv_store_ext **ret_ext);

/* The calls of the vtable. The library checks every value that a backend returns before it hands it
 * on. Keys are @hash_len bytes. The caller frees outputs with free(). */

/** Store a chunk. Returns 0 when stored; 1 when the key was already there; an error. */
KV_API int kvs_put_chunk(struct kvs_store *store, const void *hash, size_t hash_len,
                         const void *data, size_t len);

/** Get a chunk, malloc'd into *@ret. Returns 0; -ENOENT; -EBADMSG; another error. */
KV_API int kvs_get_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void **ret,
                         size_t *ret_len);

/**
 * Get a chunk in pieces, without an allocation where the backend has stream_chunk, else as one
 * piece. @buf: @room bytes for pieces, at least 1. Returns 0 when all of it was given to @each and
 * verified; what @each returned when not 0; -ENOENT; -EBADMSG; another error.
 */
KV_API int kvs_stream_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void *buf,
                            size_t room, kv_store_piece_fn each, void *arg);

/**
 * Publish a manifest under @name and replace the one there, atomically. Makes every chunk that was
 * put before on this store durable and readable. Returns 0 or an error. The file store publishes a
 * manifest of kvs_save that names chunks also when it lost others, put by saves that were given up.
 */
KV_API int kvs_put_manifest(struct kvs_store *store, const char *name, const void *data,
                            size_t len);

/** Get the manifest under @name, malloc'd into *@ret. Returns 0; -ENOENT; another error. */
KV_API int kvs_get_manifest(struct kvs_store *store, const char *name, void **ret, size_t *ret_len);

/** Remove the manifest under @name; its chunks may stay. Returns 0 (also when there is none). */
KV_API int kvs_delete_manifest(struct kvs_store *store, const char *name);

/**
 * Announce that these @n chunks will be read; keys follow each other. Returns 0, also when the
 * backend has no such call; an error changes nothing.
 */
KV_API int kvs_prefetch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n);

/* Many chunks in one call, where the backend has such calls, else one by one. Keys of @hash_len
 * bytes follow each other and may repeat; @n is at most INT_MAX. */

/** Value of ret_len[i] for a chunk that did not verify, from backends that tell it from a miss. */
#define KVS_LEN_BAD SIZE_MAX

/**
 * Get @n chunks. ret[i] becomes a malloc'd buffer of ret_len[i] bytes, which the caller frees. It
 * is NULL for a missing chunk (ret_len[i] is 0) and for one that did not verify (KVS_LEN_BAD).
 * Returns the number of chunks found. On failure nothing is handed out.
 */
KV_API int kvs_get_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                          void **ret, size_t *ret_len);

/**
 * Put @n chunks. ret_each[i] (@ret_each may be NULL) becomes the return value of kvs_put_chunk for
 * chunk i. Returns 0 or the first failure; ret_each tells which later chunks are stored.
 */
KV_API int kvs_put_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                          const void *const *data, const size_t *len, int *ret_each);

/* Many chunks between a store and the caller's memory. A chunk's bytes may lie in several parts
 * (scatter and gather), such as one for K and one for V. @parts names the parts of all @n chunks,
 * one chunk after the other: n_parts[i] of them, 0 to KVS_PARTS_MAX, belong to chunk i. With
 * @n_parts NULL each chunk has one part. The arrays and the memory stay the caller's. A part of no
 * bytes may have a NULL address. */

/** Parts of one chunk, at most. */
#define KVS_PARTS_MAX 65536

/**
 * Get @n chunks into the caller's memory. The store verifies the bytes while it copies them; the
 * file store reads them straight into the parts.
 *
 * ret_each[i] becomes the length of chunk i in bytes: its parts are filled in order up to there,
 * and nothing behind is written. Where the chunk could not be had, ret_each[i] is negative:
 *   -ENOENT    missing
 *   -EBADMSG   did not verify (a backend without extensions: -ENOENT)
 *   -EMSGSIZE  the chunk has more bytes than its parts
 *   another error of the store, of this chunk or of all that were asked for with it. Once the
 *   connection to a server is lost, all later chunks get that error without being asked for.
 * After a failure of chunk i the bytes of its parts mean nothing. Of a backend with batches and
 * without get_parts up to 256 whole chunks are in memory at once: 32 MiB (or one chunk) at most where
 * the parts have the chunks' sizes.
 *
 * A key may repeat. Parts of different chunks must not overlap. Returns the number of chunks got
 * (0 to @n); -EINVAL (arguments: nothing is written).
 */
KV_API int kvs_get_chunks_into(struct kvs_store *store, const void *hashes, size_t hash_len,
                               size_t n, const struct iovec *parts, const uint32_t *n_parts,
                               int64_t *ret_each);

/**
 * Put @n chunks from the caller's memory. ret_each[i] (@ret_each may be NULL) becomes the return
 * value of kvs_put_chunk for chunk i. The file store writes parts without joining them, unless it
 * compresses; other backends get a joined copy of chunks of several parts, at most 32 MiB of them
 * (or one chunk) at a time. The bytes must not change during the call.
 *
 * Returns 0, or the first failure: ret_each tells which chunks are stored; -EINVAL (arguments:
 * nothing is stored, ret_each isn't written).
 */
KV_API int kvs_put_chunks_from(struct kvs_store *store, const void *hashes, size_t hash_len,
                               size_t n, const struct iovec *parts, const uint32_t *n_parts,
                               int *ret_each);

/* Extensions (kv_store_ext.h). All return -ENOTSUP when the backend lacks the function and the
 * library can't make it from others. Keys of @hash_len bytes follow each other. */

/** Set ret_present[i] to 1 when chunk i is there, else to 0. Returns 0 or an error. */
KV_API int kvs_exists(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                      uint8_t *ret_present);

/** States of a chunk for kvs_look. */
#define KVS_MISSING 0
#define KVS_THERE 1
#define KVS_DAMAGED 2 /* stored, but damaged as far as a look without its bytes tells */

/**
 * Set ret_state[i] to the state of chunk i: like kvs_exists, to which a damaged chunk is missing.
 * Returns 0 or an error.
 */
KV_API int kvs_look(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                    uint8_t *ret_state);

/** Mark chunks as used now; missing ones are skipped. Returns the number marked, or an error. */
KV_API int kvs_touch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n);

/**
 * Remove a chunk at once, also when manifests need it. From a file store: for good, when the next
 * kvs_flush or kvs_put_manifest has succeeded; a power cut before may bring it back. Returns 0 (also
 * when there is none).
 */
KV_API int kvs_delete_chunk(struct kvs_store *store, const void *hash, size_t hash_len);

/**
 * Remove a chunk whose content is @data of @len bytes, in one step: a chunk that another writer
 * stores meanwhile stays. Returns 1 when it was removed; 0 when the chunk is missing, has other
 * content, or was put on this handle and is not published yet; or an error.
 */
KV_API int kvs_delete_chunk_if(struct kvs_store *store, const void *hash, size_t hash_len,
                               const void *data, size_t len);

/** Call @each for every manifest. Returns 0, an error, or the value with which @each ended it. */
KV_API int kvs_list(struct kvs_store *store, kv_store_each_fn each, void *arg);

/**
 * Call @each for every manifest whose name begins with @prefix. Returns 0, an error, or the value
 * with which @each ended it.
 */
KV_API int kvs_list_prefix(struct kvs_store *store, const char *prefix, kv_store_each_fn each,
                           void *arg);

/** Call @each for every chunk. Returns 0, an error, or the value with which @each ended it. */
KV_API int kvs_list_chunks(struct kvs_store *store, kv_store_each_fn each, void *arg);

/**
 * Make buffered puts durable without a manifest, and in a file store the deletions of chunks on this
 * handle. Returns 0 or an error.
 *
 * The chunks still belong to a save that hasn't ended: a file store's limit, gc and eviction keep
 * them until kvs_put_manifest or kvs_close, at the cost of further links in the directory. A handle
 * that only puts and flushes must publish a manifest now and then; an empty one will do. The
 * manifests of kvs_save release only the chunks that they name.
 */
KV_API int kvs_flush(struct kvs_store *store);

/** Read sizes and counters into *@ret (ret->size is the caller's). Returns 0 or an error. */
KV_API int kvs_stats(struct kvs_store *store, kv_store_stats *ret);

/* -- Snapshots ------------------------------------------------------------------------------- */

/** Rule by which save cuts an object into chunks. */
enum kvs_format {
    KVS_FORMAT_AUTO,  /* by its first bytes */
    KVS_FORMAT_BYTES, /* content-defined cuts: any bytes */
    KVS_FORMAT_LLAMA  /* llama.cpp state: cut per layer, K or V, and range of tokens */
};

/**
 * Fill @buf with up to @cap bytes of the object. Return their number; 0 at the end of the object; a
 * negative errno to give up.
 */
typedef int64_t (*kvs_read_fn)(void *arg, void *buf, size_t cap);

/** Take @len verified bytes of the object, in order. Return 0; a negative errno to give up. */
typedef int (*kvs_write_fn)(void *arg, const void *data, size_t len);

/** Report @done of @total bytes (0: unknown). Return non-zero to give up (-ECANCELED). */
typedef int (*kvs_progress_fn)(void *arg, uint64_t done, uint64_t total);

/** Options of kvs_save; set size to sizeof(struct kvs_save_opts), zero means the default. */
struct kvs_save_opts {
    size_t size;
    enum kvs_format format;
    uint32_t chunk_bytes;    /* average chunk; 0: 1 MiB */
    uint32_t chunk_tokens;   /* tokens per range of a llama.cpp state; 0: 128 */
    uint64_t total_bytes;    /* length of the object for progress; 0: unknown */
    const char *fingerprint; /* of the model; kept in the manifest, compared by restore */
    kvs_progress_fn progress;
    void *progress_arg;
    /* Read what the store has of the object's chunks before the manifest is published, and store
     * damaged or unreadable chunks anew. false: the backend judges its chunks. The file store then
     * reads those that changed since they were verified; Redis and S3 look at length and checksum as
     * noted, and miss bytes that another program changed in place. */
    bool verify;
};
#define KVS_SAVE_OPTS_INIT KV_INIT_(kvs_save_opts)

/** Result of kvs_save and kvs_restore. */
struct kvs_result {
    size_t size;
    uint64_t bytes;      /* length of the object */
    uint64_t n_chunks;   /* chunks of the object */
    uint64_t new_chunks; /* save: chunks that the store did not have */
    uint64_t new_bytes;  /* save: bytes in those */
    uint64_t manifest_bytes;
    enum kvs_format format; /* LLAMA only when a state of llama.cpp was found in the object */
    /* save: bytes cut as a state of llama.cpp; the others were cut by content. 0: all were */
    uint64_t parsed_bytes;
};
#define KVS_RESULT_INIT KV_INIT_(kvs_result)

/**
 * Save an object under @name. @read supplies its bytes. @opts and @ret may be NULL.
 *
 * Memory is bounded by a few chunks, and by 32 MiB with a plugin that takes many chunks at once,
 * whatever the length of the object. An invalid name (empty, or refused by a backend with
 * extensions) is refused before the first read. Returns 0: the object can be restored, with the
 * file store also after a power cut. On failure the previous object of that name is still there:
 * -EINVAL or -ENAMETOOLONG (name), -ECANCELED (progress gave up), the negative value of @read,
 * -EBADMSG (opts->verify: a damaged chunk that can't be replaced), or an error of the store.
 */
KV_API int kvs_save(struct kvs_store *store, const char *name, kvs_read_fn read, void *arg,
                    const struct kvs_save_opts *opts, struct kvs_result *ret);

/**
 * Save the @len bytes at @data under @name: kvs_save without a callback. total_bytes of @opts is
 * ignored. @data stays the caller's, and must not change meanwhile; NULL is allowed when @len is 0.
 *
 * Returns what kvs_save returns; -EINVAL also when @data is NULL and @len is not 0.
 */
KV_API int kvs_save_buffer(struct kvs_store *store, const char *name, const void *data, size_t len,
                           const struct kvs_save_opts *opts, struct kvs_result *ret);

/** Options of kvs_restore; set size to sizeof(struct kvs_restore_opts), zero means the default. */
struct kvs_restore_opts {
    size_t size;
    const char *fingerprint; /* -ESTALE when the object has another one; NULL: any */
    uint32_t window_bytes;   /* bytes requested, and held, at once; 0: 64 MiB */
    /* Read and verify every chunk before @write sees the first byte. Reads the object twice, but a
     * damaged object then fails before @write is called. */
    bool verify_first;
    kvs_progress_fn progress;
    void *progress_arg;
    /* Range of the object, in bytes: only chunks that hold some of it are read. length 0: to the
     * object's end */
    uint64_t offset, length;
};
#define KVS_RESTORE_OPTS_INIT KV_INIT_(kvs_restore_opts)

/**
 * Restore the object under @name, or a range of it. @write gets its bytes in order, each chunk
 * verified (XXH3-128, length). @opts and @ret may be NULL. @ret tells the bytes
 * that @write got and the chunks that were read.
 *
 * progress is called first with 0 bytes done, once the object is found. Chunks are requested one by
 * one when the backend has neither prefetch nor get_chunks.
 * Returns 0; -ENOENT; -EBADMSG; -ESTALE (another fingerprint); -ERANGE (the object doesn't hold the
 * range); -ECANCELED (progress gave up); the negative value of @write; another error of the store.
 */
KV_API int kvs_restore(struct kvs_store *store, const char *name, kvs_write_fn write, void *arg,
                       const struct kvs_restore_opts *opts, struct kvs_result *ret);

/**
 * Restore the object under @name into a buffer: kvs_restore without a callback. *@ret and *@ret_len
 * are set on success only; the caller frees *@ret, which is not NULL for an empty object either.
 * progress of @opts is called as by kvs_restore.
 *
 * Returns what kvs_restore returns; -ENOMEM when there is no memory for the object.
 */
KV_API int kvs_restore_buffer(struct kvs_store *store, const char *name, void **ret,
                              size_t *ret_len, const struct kvs_restore_opts *opts);

/* -- Manifests (docs/formats.md) ------------------------------------------------------------- */

/** One chunk of an object. */
struct kvs_chunk_ref {
    uint8_t key[16]; /* XXH3-128 of the bytes, canonical order: key in the store and checksum */
    uint32_t len;    /* bytes */
};

/** A decoded manifest. Immutable: any thread. */
struct kvs_manifest;

/**
 * Get and decode the manifest under @name. The caller frees *@ret with kvs_manifest_free.
 * Returns 0; -ENOENT; -EMEDIUMTYPE (not a manifest of this library); -EBADMSG (damaged).
 */
KV_API int kvs_manifest_get(struct kvs_store *store, const char *name, struct kvs_manifest **ret);

/** Free a manifest. NULL is a no-op. */
KV_API void kvs_manifest_free(struct kvs_manifest *manifest);

/** Return the chunks of the object in order, *@ret_n of them. The manifest owns the array. */
KV_API const struct kvs_chunk_ref *kvs_manifest_chunks(const struct kvs_manifest *m, size_t *ret_n);

/** Return the length of the object in bytes. */
KV_API uint64_t kvs_manifest_bytes(const struct kvs_manifest *m);

/** Return the rule by which the object was cut. */
KV_API enum kvs_format kvs_manifest_format(const struct kvs_manifest *m);

/** Return the model's fingerprint, "" when there is none. The manifest owns the string. */
KV_API const char *kvs_manifest_fingerprint(const struct kvs_manifest *m);

/** Return the time at which the object was saved, in seconds since 1970. */
KV_API uint64_t kvs_manifest_created_s(const struct kvs_manifest *m);

/* -- Care ------------------------------------------------------------------------------------ */

/** Result of kvs_verify. */
struct kvs_verify_result {
    size_t size;
    uint64_t manifests, opaque_manifests, bad_manifests;
    /* missing: needed by an object, or snapshots of prefix caches that lack a part */
    uint64_t chunks, missing_chunks, bad_chunks, bytes;
    uint64_t prefix_chunks; /* of prefix caches (kv_llama.h); those of objects aren't in it */
    uint64_t bad_prefix_chunks;
};
#define KVS_VERIFY_RESULT_INIT KV_INIT_(kvs_verify_result)

/** Report one problem in words. */
typedef void (*kvs_report_fn)(void *arg, const char *line);

/**
 * Read and check the object @name, or all of the store (NULL).
 *
 * All of the store includes the chunks of prefix caches (kv_llama.h), where the backend lists chunks.
 * @report (NULL: count only) gets a line for each problem; names that hold control characters are
 * quoted in it. @ret counts what was checked.
 * Returns 0, also when there are problems; -ECANCELED when @progress gave up (@ret counts what was
 * checked until then); -EACCES or -EPERM when this user may not read all of it (@ret counts the
 * rest, and @report got a line for each); an error of the store.
 */
KV_API int kvs_verify(struct kvs_store *store, const char *name, kvs_report_fn report,
                      kvs_progress_fn progress, void *arg, struct kvs_verify_result *ret);

/** Phase of a collection: reading manifests (counted), then visiting chunks (counted). */
enum kvs_gc_phase { KVS_GC_MARK, KVS_GC_SWEEP };

/**
 * Report progress of a collection; @total 0: unknown. Return non-zero to give up. Called with the
 * backend's locks held: the callback must not call the backend.
 */
typedef int (*kvs_gc_progress_fn)(void *arg, enum kvs_gc_phase phase, uint64_t done,
                                  uint64_t total);

/** Options of kvs_gc; set size to sizeof(struct kvs_gc_opts), zero means the default. */
struct kvs_gc_opts {
    size_t size;
    uint64_t grace_s; /* chunks used within these seconds stay; 0: 86400. KVS_GC_NO_GRACE: none */
    bool opaque_too;  /* delete also chunks that only manifests of unknown format may need */
    bool dry_run;     /* count, delete nothing */
    kvs_gc_progress_fn progress;
    void *progress_arg;
    /* Chunks of prefix caches (kv_llama.h) that weren't loaded or saved for so many seconds go; 0: 30
     * days; UINT64_MAX: never. grace_s isn't about them. */
    uint64_t prefix_age_s;
};
#define KVS_GC_OPTS_INIT KV_INIT_(kvs_gc_opts)

/** Value of grace_s: chunks stay only while a manifest needs them. */
#define KVS_GC_NO_GRACE UINT64_MAX

/** Result of kvs_gc. */
struct kvs_gc_result {
    size_t size;
    uint64_t live_chunks, deleted_chunks, deleted_bytes, opaque_manifests, errors;
};
#define KVS_GC_RESULT_INIT KV_INIT_(kvs_gc_result)

/**
 * Delete chunks that no manifest needs, and chunks of prefix caches by their age. @opts and @ret may
 * be NULL.
 *
 * Chunks that a manifest of unknown format may need stay, unless opts->opaque_too.
 * Returns 0; -EBADMSG when a manifest can't be read (nothing is deleted); -ECANCELED when progress
 * gave up (@ret counts what was deleted until then); an error of the store.
 */
KV_API int kvs_gc(struct kvs_store *store, const struct kvs_gc_opts *opts,
                  struct kvs_gc_result *ret);

/* -- Conformance ----------------------------------------------------------------------------- */

/** Outcome of one conformance check. */
enum kvs_verdict {
    KVS_PASS,
    KVS_FAIL,  /* against the specification, or against kv_store_ext.h where that is offered */
    KVS_SKIP,  /* doesn't apply */
    KVS_ADVICE /* the specification allows it, but consumers fare better without */
};

/** Report the outcome of one check. @detail is the reason, "" or NULL for KVS_PASS. */
typedef void (*kvs_check_fn)(void *arg, const char *check, enum kvs_verdict verdict,
                             const char *detail);

/**
 * Check the backend that @uri names against the specification's vendor checklist and more.
 *
 * Writes and deletes objects whose names start with "kvs-conformance-", and others such as "chunks"
 * and "../x" where no object has that name. @each gets the outcome of every check.
 * Returns the number of failed checks (advice is no failure), or a negative errno when the backend
 * can't be opened.
 */
KV_API int kvs_conformance(const char *uri, kvs_check_fn each, void *arg);

#ifdef __cplusplus
}
#endif

#endif
