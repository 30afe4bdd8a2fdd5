// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store_ext.h: what a backend may offer beyond kv_store_abi.h, found without breaking that ABI:
 * a second optional symbol, kv_store_get_ext, returns a table that starts with its own size. A
 * consumer reads a field only when the table is long enough to have it and the pointer isn't NULL,
 * and does without otherwise. This is Kvasir's own extension, not part of the specification.
 *
 * Functions return 0 (or a count) on success and a negative errno on failure; they are thread-safe
 * like those of the vtable, and take handles that its open returned.
 */
#ifndef KV_STORE_EXT_H
#define KV_STORE_EXT_H

#include "kv_store_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KV_STORE_EXT_SYMBOL "kv_store_get_ext"
#define KV_STORE_EXT_VERSION 1u
#define KV_STORE_LEN_BAD SIZE_MAX /* get_chunks: length of a chunk that did not verify */

/** One object of a listing; what it points to lives for the callback only. */
typedef struct {
    size_t size;
    const char *name;    /* a manifest's; NULL for chunks */
    const uint8_t *hash; /* a chunk's; NULL for manifests */
    size_t hash_len;
    uint64_t len;    /* bytes of content as put; UINT64_MAX when the listing doesn't tell */
    uint64_t used_s; /* last put, hit or touch, seconds since 1970; 0 when unknown */
} kv_store_entry;

/** Return non-zero to end the listing early; the listing returns that value. */
typedef int (*kv_store_each_fn)(void *arg, const kv_store_entry *entry);

/** Whether a chunk must stay. Called with the backend's locks held: no calls back into it. */
typedef int (*kv_store_live_fn)(void *arg, const uint8_t *hash, size_t hash_len);

typedef struct {
    size_t size;               /* as the caller was built */
    uint64_t n_chunks;         /* stored; UINT64_MAX when it would take a listing to know */
    uint64_t n_manifests;      /* likewise */
    uint64_t bytes;            /* likewise */
    uint64_t limit_bytes;      /* 0: none */
    uint64_t puts, put_hits;   /* of this handle: chunks stored; found there already */
    uint64_t gets, get_misses; /* of this handle */
    uint64_t bad_chunks;       /* of this handle: did not verify, set aside */
    uint64_t evicted;          /* of this handle: chunks removed for room */
    uint64_t bytes_written, bytes_read; /* of this handle, as stored */
    uint64_t round_trips;               /* of this handle: waits for a server; 0 for local stores */
    uint64_t errors; /* of this handle: calls that failed for another reason than a miss */
} kv_store_stats;

typedef struct {
    size_t size;
    uint64_t kept, deleted, deleted_bytes, errors;
} kv_store_swept;

typedef struct {
    size_t size;      /* sizeof(kv_store_ext) as the backend was built */
    uint32_t version; /* KV_STORE_EXT_VERSION */
    uint32_t reserved;

    /** ret_present[i] = 1 when chunk i is there (buffered puts of this handle count), else 0. */
    int (*exists_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present);

    /**
     * Many chunks in one go, which may name one more than once. Returns how many were found, which
     * is how many of out_data[0, n) are not NULL then: each a malloc'd buffer of its own, of
     * out_len[i] bytes, that belongs to the consumer; NULL where the chunk is missing or did not
     * verify, where out_len[i] is KV_STORE_LEN_BAD if the backend can tell. A negative return hands out nothing: what is left in out_data is not looked at, and
     * what the backend had allocated it has freed. The consumer sets all of out_data to NULL first.
     */
    int (*get_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len);

    /** Many put_chunk in one go; ret_each[i] (may be NULL) is what put_chunk would return. */
    int (*put_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *data_len, int *ret_each);

    /** Remove a chunk now, whoever may need it; 0 also when there is none. */
    int (*delete_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len);

    int (*list_manifests)(kv_store_v1 *self, kv_store_each_fn each, void *arg);
    int (*list_chunks)(kv_store_v1 *self, kv_store_each_fn each, void *arg);

    /**
     * Chunks that were put or hit on the handle that published manifest @name, as the backend
     * noted them: what a manifest whose format nobody knows may need. -ENOENT: nothing noted.
     */
    int (*list_refs)(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg);

    /** Mark chunks as used now; those not there are skipped. Returns how many were there. */
    int (*touch_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

    /** Make buffered puts durable without a manifest. */
    int (*flush)(kv_store_v1 *self);

    /**
     * Delete chunks not used for @min_age_s seconds that @live refuses; safe against concurrent
     * writers of other handles and processes (a chunk that is hit meanwhile stays).
     */
    int (*sweep_chunks)(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                        kv_store_swept *ret);

    int (*stats)(kv_store_v1 *self, kv_store_stats *ret);
} kv_store_ext;

/** Optional export of a backend. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const kv_store_ext *
kv_store_get_ext(void);

#ifdef __cplusplus
}
#endif

#endif
