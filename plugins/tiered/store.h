// SPDX-License-Identifier: Apache-2.0
/**
 * The handle of a tiered store, and its calls by file:
 *
 *   store.c    open, close, the tables      find.c     one blob: ask the members for it
 *   put.c      puts, and what they leave    batch.c    many blobs: split by member
 *   publish.c  manifests, flush             list.c     listings, sweep, statistics
 *   catalog.c  packs of a member            pack_get.c reading them
 *   bound.c    members' deadlines
 *
 * A miss is certain for this reason (find.c, batch.c). A mover copies a blob to its target, and removes it
 * from its source `linger` later or more. Say a reader asks all members within `linger`, and each
 * says that it lacks the blob:
 *
 *     target    asked: not yet copied
 *                 │        ├─ copied ────────── linger ──────────┤
 *     source      │                                              ├─ removed
 *                 │                                              │     asked: gone
 *                 ├──────────── more than linger between the two asks ─┤
 *
 * Then no move has hidden the blob, and it is missing. Asks that took longer are repeated. A member's
 * packs (catalog.h) are another place in it, which is asked from memory.
 */
#ifndef KV_TIERED_STORE_H
#define KV_TIERED_STORE_H

#include "tiered/member.h"
#include "tiered/places.h"

struct kv_store_v1 {
    struct trd_config config;
    struct trd_member members[TRD_MEMBERS_MAX];
    size_t n_members;
    struct trd_places *places;
    uint64_t linger_ns;
    bool near; /* all members are folders, without deadlines */
    atomic_bool ever_put;
    /* counters of kv_store_stats */
    _Atomic uint64_t puts, put_hits, gets, get_misses, bad_chunks, errors;
};

/** Count @rc in the handle's errors unless it is a miss; returns it. */
int trd_done(kv_store_v1 *self, int rc);

/* -- find.c ------------------------------------------------------------------------------------ */

/** Ask a member for a blob. Returns 0 (found), -ENOENT, -EBADMSG, -EMSGSIZE, -ECANCELED (to stop), or an
 * error. */
typedef int (*trd_try_fn)(struct kvs_store *store, const uint8_t *hash, size_t hash_len, void *arg);

/** Take a blob that lay in a pack, and its malloc'd bytes. Returns as trd_try_fn. */
typedef int (*trd_take_fn)(void *arg, void *data, size_t len);

/** How to get a blob. */
struct trd_how {
    trd_try_fn try;
    trd_take_fn take;
    void *arg;
};

/**
 * Ask for a blob: where it was seen last, then the other members. @but: a member of which only the packs
 * are asked; -1: none. Returns 0; -ENOENT when every member lacks it; -EBADMSG; -EIO when a member that may have
 * it can't be asked; what else @try returned.
 */
int trd_find(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int but,
             const struct trd_how *how);

/**
 * Read what has changed in members' packs, where that was last done more than `linger` ago. Sets
 * *@ret_changed when it tells of packs that came or went. Returns 0; -EIO: a member didn't answer.
 */
int trd_packs_look_again(kv_store_v1 *self, bool *ret_changed);

/** Get a chunk, malloc'd into *@ret, from any member but @but. Returns as trd_find. */
int trd_get_elsewhere(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int but, void **ret,
                      size_t *ret_len);

/** The calls of the tables for one chunk. */
int trd_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
            size_t *out_len);
int trd_stream(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf, size_t room,
               kv_store_piece_fn each, void *arg);
int trd_get_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                  const struct iovec *parts, size_t n_parts, size_t *out_len);

/* -- batch.c ----------------------------------------------------------------------------------- */

int trd_exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
               uint8_t *ret_present);
int trd_get_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                 uint8_t **out_data, size_t *out_len);
int trd_touch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);
int trd_prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

/** Say for @n keys what one member has of them: kvs_look, or gets where the backend lacks it. */
int trd_look(struct kvs_store *store, const uint8_t *hashes, size_t hash_len, size_t n,
             uint8_t *ret_state);

/* -- put.c ------------------------------------------------------------------------------------- */

int trd_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
            size_t data_len);
int trd_put_parts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                  const struct iovec *parts, size_t n_parts);
int trd_put_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                 const uint8_t *const *data, const size_t *data_len, int *ret_each);
int trd_new_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                   uint8_t *ret_new);
int trd_delete(kv_store_v1 *self, const uint8_t *hash, size_t hash_len);
int trd_delete_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                  size_t len);

/* -- publish.c --------------------------------------------------------------------------------- */

int trd_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t data_len);
int trd_get_manifest(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len);
int trd_delete_manifest(kv_store_v1 *self, const char *name);
int trd_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg);
int trd_flush(kv_store_v1 *self);

/* -- pack_call.c ------------------------------------------------------------------------------- */

int trd_pack_chunks(kv_store_v1 *self, const kv_store_pack_opts *opts, const uint8_t *hashes,
                    size_t hash_len, size_t n, kv_store_packed *ret);

/* -- list.c ------------------------------------------------------------------------------------ */

int trd_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int trd_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int trd_sweep(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
              kv_store_swept *ret);
int trd_stats(kv_store_v1 *self, kv_store_stats *ret);

#endif
