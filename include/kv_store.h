// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store.h: keep large objects (an engine's saved KV state) in any kv_store backend.
 *
 * A store is opened from a URI: a plain path is the built-in durable file store, SCHEME://... is a
 * plugin libkv_store_SCHEME.so. On top of a backend's two namespaces (chunks by key, manifests by
 * name) this library saves and restores objects as deduplicated chunks, verifies, lists and
 * collects them.
 *
 * Errors are negative errno values: -ENOENT missing, -EBADMSG stored bytes did not verify (never
 * handed out), -EINVAL arguments or names, -ENOTSUP the backend can't, -EPROTO a plugin broke its
 * contract, -EIO other backend failures. What happened is said in one line to the log (stderr, or
 * what kvs_set_log set). Unless said otherwise, functions may be called from any thread.
 */
#ifndef KV_STORE_H
#define KV_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -- Stores ---------------------------------------------------------------------------------- */

struct kvs_store;

/**
 * Where the library's log lines go, all of them; NULL: errors and warnings to stderr. @level: 0
 * error, 1 warning, 2 info, 3 debug. Call it before the library is used. Plugins write their own
 * lines, to stderr.
 */
typedef void (*kvs_log_fn)(void *arg, int level, const char *line);
KV_API void kvs_set_log(kvs_log_fn fn, void *arg);

/**
 * Open @uri. A plugin is looked for in $KV_STORE_LIBRARY_PATH, then where the dynamic loader looks.
 * Refused (-EPROTO, with a line that says why): a plugin without the symbol, or with a NULL or
 * incomplete table or one of version 0. -ENOENT: no such plugin. -EINVAL: no URI, or one with a
 * password in it. -EIO: the backend refused it and said why. File store options follow a
 * path as ?limit=SIZE&zstd=LEVEL&sync=auto|files|fs (docs/kv-store.md).
 */
KV_API int kvs_open(const char *uri, struct kvs_store **ret);
KV_API void kvs_close(struct kvs_store *store);

/** The backend below, for callers that speak the ABI themselves. @ret_ext is NULL when it has none. */
KV_API kv_store_v1 *kvs_backend(struct kvs_store *store, const kv_store_vtable **ret_vtable,
                                const kv_store_ext **ret_ext);

/**
 * The vtable's functions, with what a backend returns checked before it is believed. Outputs are
 * freed with free(). kvs_prefetch returns 0 also when the backend has no such call.
 */
KV_API int kvs_put_chunk(struct kvs_store *store, const void *hash, size_t hash_len,
                         const void *data, size_t len);
KV_API int kvs_get_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void **ret,
                         size_t *ret_len);
KV_API int kvs_put_manifest(struct kvs_store *store, const char *name, const void *data,
                            size_t len);
KV_API int kvs_get_manifest(struct kvs_store *store, const char *name, void **ret, size_t *ret_len);
KV_API int kvs_delete_manifest(struct kvs_store *store, const char *name);
KV_API int kvs_prefetch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n);

/**
 * Many chunks in one go where the backend has such calls, else one by one. Keys of @hash_len bytes
 * follow each other, and may come more than once; @n is at most INT_MAX.
 *
 * kvs_get_chunks: ret[i] is malloc'd, the caller's, of ret_len[i] bytes; NULL where the chunk is missing
 * (ret_len[i] 0) or did not verify (KVS_LEN_BAD, where the backend tells the difference). Returns how many
 * were found; on failure nothing is handed out.
 * kvs_put_chunks: ret_each[i] (@ret_each NULL: not wanted) is what kvs_put_chunk would return. Returns
 * 0, or the first failure; what comes after that may or may not have been stored, as ret_each says.
 */
#define KVS_LEN_BAD SIZE_MAX
KV_API int kvs_get_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                          void **ret, size_t *ret_len);
KV_API int kvs_put_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                          const void *const *data, const size_t *len, int *ret_each);

/** Extensions; -ENOTSUP when the backend lacks them and they can't be made from the rest. */
KV_API int kvs_exists(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                      uint8_t *ret_present);
KV_API int kvs_touch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n);
KV_API int kvs_delete_chunk(struct kvs_store *store, const void *hash, size_t hash_len);
KV_API int kvs_list(struct kvs_store *store, kv_store_each_fn each, void *arg);
KV_API int kvs_list_chunks(struct kvs_store *store, kv_store_each_fn each, void *arg);
KV_API int kvs_flush(struct kvs_store *store);
KV_API int kvs_stats(struct kvs_store *store, kv_store_stats *ret);

/* -- Snapshots ------------------------------------------------------------------------------- */

/** How an object is cut into chunks. */
enum kvs_format {
    KVS_FORMAT_AUTO,  /* by what its first bytes are */
    KVS_FORMAT_BYTES, /* content-defined cuts: anything */
    KVS_FORMAT_LLAMA  /* llama.cpp sequence state: cut per layer, K or V, and range of tokens */
};

/** Fill @buf with up to @cap bytes of the object; 0: its end; negative errno: give up. */
typedef int64_t (*kvs_read_fn)(void *arg, void *buf, size_t cap);
/** Take @len verified bytes of the object, in order; negative errno: give up. */
typedef int (*kvs_write_fn)(void *arg, const void *data, size_t len);
/** @done of @total bytes (0: unknown). Non-zero: give up (-ECANCELED). */
typedef int (*kvs_progress_fn)(void *arg, uint64_t done, uint64_t total);

struct kvs_save_opts {
    size_t size;
    enum kvs_format format;
    uint32_t chunk_bytes;    /* average chunk; 0: 1 MiB */
    uint32_t chunk_tokens;   /* tokens per range of a llama.cpp state; 0: 256 */
    uint64_t total_bytes;    /* told to progress; 0: unknown */
    const char *fingerprint; /* of the model; kept in the manifest, compared by restore */
    kvs_progress_fn progress;
    void *progress_arg;
};

struct kvs_result {
    size_t size;
    uint64_t bytes;      /* of the object */
    uint64_t n_chunks;   /* it is made of */
    uint64_t new_chunks; /* were not in the store (save) */
    uint64_t new_bytes;  /* likewise */
    uint64_t manifest_bytes;
    enum kvs_format format;
};

/**
 * Save an object read from @read under @name. Memory is bounded by a few chunks, and 32 MiB with a
 * plugin that takes many at once, however large the object. A name that can't be (empty, or refused
 * by a backend with extensions) is -EINVAL or -ENAMETOOLONG before anything is read. When it returns 0 the object can be restored, also (file store) after a power cut; else
 * what was under the name before is still there.
 */
KV_API int kvs_save(struct kvs_store *store, const char *name, kvs_read_fn read, void *arg,
                    const struct kvs_save_opts *opts, struct kvs_result *ret);

struct kvs_restore_opts {
    size_t size;
    const char *fingerprint; /* -ESTALE when the object has another one; NULL: any */
    uint32_t window_bytes;   /* asked for, and held, at once; 0: 64 MiB */
    bool verify_first;       /* every chunk is read and verified before @write sees the first byte:
                              * reads all twice, but a restore then fails before it began */
    kvs_progress_fn progress;
    void *progress_arg;
};

/**
 * Give the object under @name to @write, each chunk verified (XXH3-128, length) before. Progress is
 * told first with 0 bytes done, once the object was found. Of a backend with neither prefetch nor
 * get_chunks, chunks are asked for one by one.
 */
KV_API int kvs_restore(struct kvs_store *store, const char *name, kvs_write_fn write, void *arg,
                       const struct kvs_restore_opts *opts, struct kvs_result *ret);

/* -- Manifests (docs/formats.md) ------------------------------------------------------------- */

struct kvs_chunk_ref {
    uint8_t key[16]; /* XXH3-128 of the bytes, canonical order: key in the store and checksum */
    uint32_t len;
};

struct kvs_manifest;
/** -ENOENT; -EMEDIUMTYPE: not one of this library's; -EBADMSG: damaged. */
KV_API int kvs_manifest_get(struct kvs_store *store, const char *name, struct kvs_manifest **ret);
/** From bytes (borrowed for the call). */
KV_API int kvs_manifest_decode(const void *data, size_t len, struct kvs_manifest **ret);
KV_API void kvs_manifest_free(struct kvs_manifest *manifest);
KV_API const struct kvs_chunk_ref *kvs_manifest_chunks(const struct kvs_manifest *m, size_t *ret_n);
KV_API uint64_t kvs_manifest_bytes(const struct kvs_manifest *m);
KV_API enum kvs_format kvs_manifest_format(const struct kvs_manifest *m);
KV_API const char *kvs_manifest_fingerprint(const struct kvs_manifest *m); /* "" when none */
KV_API uint64_t kvs_manifest_created_s(const struct kvs_manifest *m);

/* -- Care ------------------------------------------------------------------------------------ */

struct kvs_verify_result {
    size_t size;
    uint64_t manifests, opaque_manifests, bad_manifests;
    uint64_t chunks, missing_chunks, bad_chunks, bytes;
};

/** One problem found, in words; NULL to only count. */
typedef void (*kvs_report_fn)(void *arg, const char *line);

/**
 * Read and check one object (@name), or all of the store (NULL). 0 also when problems were found.
 * -ECANCELED when @progress gave up; @ret has what was checked until then. In the lines, names are
 * quoted where they hold anything that a terminal should not see.
 */
KV_API int kvs_verify(struct kvs_store *store, const char *name, kvs_report_fn report,
                      kvs_progress_fn progress, void *arg, struct kvs_verify_result *ret);

/** What collection is at: reading manifests (counted), then looking at chunks (counted). */
enum kvs_gc_phase { KVS_GC_MARK, KVS_GC_SWEEP };
/** @total 0: unknown. Non-zero: give up. Called with the backend's locks held: no calls into it. */
typedef int (*kvs_gc_progress_fn)(void *arg, enum kvs_gc_phase phase, uint64_t done,
                                  uint64_t total);

struct kvs_gc_opts {
    size_t size;
    uint64_t grace_s; /* chunks used within it stay; 0: 86400. KVS_GC_NO_GRACE: none */
    bool opaque_too;  /* also what only manifests of unknown format may need */
    bool dry_run;
    kvs_gc_progress_fn progress;
    void *progress_arg;
};
#define KVS_GC_NO_GRACE UINT64_MAX

struct kvs_gc_result {
    size_t size;
    uint64_t live_chunks, deleted_chunks, deleted_bytes, opaque_manifests, errors;
};

/**
 * Delete chunks that no manifest needs. A manifest that can't be read stops it (-EBADMSG) rather
 * than count as empty; what an opaque manifest may need stays unless @opaque_too. -ECANCELED when
 * progress gave up: nothing that is needed went, and @ret counts what did go until then.
 */
KV_API int kvs_gc(struct kvs_store *store, const struct kvs_gc_opts *opts,
                  struct kvs_gc_result *ret);

/* -- Conformance ----------------------------------------------------------------------------- */

enum kvs_verdict {
    KVS_PASS,
    KVS_FAIL,  /* against the specification, or against kv_store_ext.h where that is offered */
    KVS_SKIP,  /* doesn't apply */
    KVS_ADVICE /* the specification allows it, but consumers fare better without */
};
typedef void (*kvs_check_fn)(void *arg, const char *check, enum kvs_verdict verdict,
                             const char *detail);

/**
 * Run every check of the specification's vendor checklist, and more, against what @uri names; it
 * writes and deletes objects whose names start with "kvs-conformance-", and such as "chunks" and
 * "../x" where there are none. @each is told each check's outcome, with a reason unless it passed.
 * Returns the number of failed checks (advice is no failure), or a negative errno when the backend
 * can't be opened at all.
 */
KV_API int kvs_conformance(const char *uri, kvs_check_fn each, void *arg);

#ifdef __cplusplus
}
#endif

#endif
