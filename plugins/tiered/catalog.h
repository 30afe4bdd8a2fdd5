// SPDX-License-Identifier: Apache-2.0
/**
 * The packs of one member, as a handle knows them: which blob is in which pack, and where. All of it
 * comes from the member: a listing of its manifests names the packs, and each pack has its index.
 *
 *     kv-tiered-packs            the mark: a manifest of Kvasir's format without chunks, whose fingerprint
 *                                is another random number whenever packs came or went
 *     kv-tiered-pack-ID-L-T      a published pack; its chunk has the key of ID
 *     kv-tiered-gone-ID-N        entry N of the pack is deleted
 *
 * A miss is certain for this reason. Who packs writes the mark behind the pack's manifest, and removes
 * single blobs `linger` later. So a reader that finds a single blob gone finds a new mark,
 * unless it has seen that one within `linger` before: then it knows the pack.
 *
 * A catalog takes about 110 bytes a blob. Any thread.
 */
#ifndef KV_TIERED_CATALOG_H
#define KV_TIERED_CATALOG_H

#include <pthread.h>
#include <stdatomic.h>

#include "store/backend/store.h"
#include "tiered/pack_format.h"

#define TRD_MARK "kv-tiered-packs"
#define TRD_MARK_LEN 16

/** Blobs in packs of one member: packers add no more. Readers take twice as many, as collections rewrite packs,
 * and several packers may be at work; more are an error. */
#define TRD_PACKED_MAX ((uint64_t)1 << 24)

/** Blobs of a batch that are nearer to each other than this are read together, with what is between. */
#define TRD_PACK_GAP ((uint64_t)64 << 10)
/** Bytes of one read. Several reads of a batch are under way at once. */
#define TRD_PACK_READ ((uint64_t)16 << 20)

/** A pack whose index was read. Shared between catalogs' states by count. */
struct trd_pack {
    atomic_uint refs;
    struct trd_pack_name name;
    struct trd_pack_index index;
    _Atomic uint8_t *gone; /* for each entry: it is deleted */
    atomic_bool missing;   /* its chunk wasn't there when it was read last */
    pthread_mutex_t lock;  /* guards tag */
    char tag[KV_STORE_TAG_MAX];
};

/** All packs at one moment; never changes but for `gone`. */
struct trd_packs {
    atomic_uint refs;
    struct trd_pack **of;
    size_t n;
    uint64_t n_entries;
    struct trd_pack_slot *slots; /* open addressing by the key's hash; pack UINT32_MAX: free */
    size_t n_slots;
};

enum trd_catalog_state {
    TRD_UNREAD, /* nobody has looked yet */
    TRD_NO_PACKS,
    TRD_PACKS,
    TRD_CANT /* the member can't have packs: its backend doesn't read parts */
};

struct trd_catalog {
    _Atomic int state; /* enum trd_catalog_state */
    _Atomic uint64_t
        checked_ns;          /* when the mark was read last; 0: never, or it is to be read again */
    pthread_mutex_t lock;    /* guards packs */
    struct trd_packs *packs; /* not NULL with TRD_PACKS */
    pthread_mutex_t reading; /* one thread reads packs; guards what follows */
    uint8_t mark[TRD_MARK_LEN];
    atomic_bool has_mark; /* written with reading held, and read by anybody */
    atomic_bool
        unsure; /* an index couldn't be read for now: what no place has may be in that pack */
    atomic_bool
        stale; /* an index couldn't be read, or a pack is gone: list whatever the mark says */
};

/** Begin, for a store whose backend has these extensions. */
void trd_catalog_init(struct trd_catalog *catalog);
void trd_catalog_fini(struct trd_catalog *catalog);

/**
 * Read what has changed, unless that was done @max_age_ns ago or later. Sets *@ret_changed (may be
 * NULL) when packs came or went. Returns 0 or an error of the member: then nothing has changed. A pack
 * whose index is damaged counts as one without blobs, with a line in the log; so does one whose index
 * can't be read, and the catalog is unsure then.
 */
int trd_catalog_read(struct trd_catalog *catalog, struct kvs_store *store, uint64_t max_age_ns,
                     bool *ret_changed);
/** As trd_catalog_read, the first time only. */
int trd_catalog_begin(struct trd_catalog *catalog, struct kvs_store *store);

/** True when a pack's index couldn't be read: a blob that is found nowhere may be in it. */
static inline bool trd_is_unsure(struct trd_catalog *catalog)
{
    return atomic_load_explicit(&catalog->unsure, memory_order_acquire);
}

/** True when blobs may be in packs there. */
static inline bool trd_has_packs(struct trd_catalog *catalog)
{
    return atomic_load_explicit(&catalog->state, memory_order_acquire) == TRD_PACKS;
}

static inline bool trd_may_have_packs(struct trd_catalog *catalog)
{
    int state = atomic_load_explicit(&catalog->state, memory_order_acquire);

    return state == TRD_PACKS || state == TRD_UNREAD;
}

/** Hold all packs; NULL: there are none. trd_packs_release gives them back. */
struct trd_packs *trd_catalog_hold(struct trd_catalog *catalog);
void trd_packs_release(struct trd_packs *packs);

/** A blob in a pack. */
struct trd_packed {
    struct trd_pack *pack;
    uint32_t entry;
};

/**
 * Step through the places of a blob, from *@at on, at first 0. False: that was the last. Deleted entries
 * are passed over.
 */
bool trd_packs_next(const struct trd_packs *packs, const void *hash, size_t hash_len, size_t *at,
                    struct trd_packed *ret);

/** A blob to be read. */
struct trd_packed_read {
    struct trd_packed from;
    void *data; /* malloc'd when rc is 0 */
    int rc;     /* -ENOENT: the pack is gone; -EBADMSG: twice not the bytes packed; another error */
};

/** Read and verify blobs, neighbours together. Returns 0 or an error that leaves all unanswered. */
int trd_packs_get(struct kvs_store *store, struct trd_packed_read *reads, size_t n);

/* -- for gets of a member (pack_get.c) -- */

/**
 * Get a blob from the member's packs, malloc'd. Returns 0, -ENOENT, -EBADMSG or an error. The first call
 * on a handle reads the catalog.
 */
int trd_catalog_get(struct trd_catalog *catalog, struct kvs_store *store, const void *hash,
                    size_t hash_len, void **ret, size_t *ret_len);

/**
 * As trd_catalog_get for many; state[i]: KVS_MISSING, KVS_THERE, KVS_DAMAGED, KVS_UNKNOWN (its pack can't be
 * read for now). Returns 0 or an error of the member as a whole.
 */
int trd_catalog_get_many(struct trd_catalog *catalog, struct kvs_store *store,
                         const uint8_t *hashes, size_t hash_len, size_t n, void **data, size_t *len,
                         uint8_t *ret_state);

/** Set KVS_THERE for blobs that are in packs, by a catalog not older than @max_age_ns. */
int trd_catalog_look(struct trd_catalog *catalog, struct kvs_store *store, uint64_t max_age_ns,
                     const uint8_t *hashes, size_t hash_len, size_t n, uint8_t *ret_state);

/** Mark the packs of these blobs as used. Returns 0 or an error. */
int trd_catalog_touch(struct trd_catalog *catalog, struct kvs_store *store, const uint8_t *hashes,
                      size_t hash_len, size_t n);

/** Note a blob as deleted in one pack. The caller writes the mark. Returns 0 or an error. */
int trd_packed_delete(const struct trd_packed *place, struct kvs_store *store);

/**
 * Note a blob as deleted in all packs that have it; with @data only where it has these bytes. The caller
 * writes the mark when it has noted all. Returns the number of packs that had it, or an error.
 */
int trd_packs_delete(const struct trd_packs *packs, struct kvs_store *store, const void *hash,
                     size_t hash_len, const void *data, size_t len);

/**
 * Delete a blob from all packs, for all handles that read the mark from here on; with @data only where
 * it has these bytes. Returns the number of packs that had it, or an error.
 */
int trd_catalog_delete(struct trd_catalog *catalog, struct kvs_store *store, const void *hash,
                       size_t hash_len, const void *data, size_t len);

/** Write a new mark: packs have come or gone. Collections of the member know that it needs no chunk. */
int trd_write_mark(struct kvs_store *store);
/** Write such a manifest of another name: no two have the same bytes. */
int trd_write_random(struct kvs_store *store, const char *name);

#endif
