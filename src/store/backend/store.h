// SPDX-License-Identifier: Apache-2.0
/**
 * An open store inside the room: checked copies of the backend's tables, and the checked calls that
 * the public header doesn't have. Threads: as in kv_store.h.
 */
#ifndef KV_STORE_BACKEND_STORE_H
#define KV_STORE_BACKEND_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "kv_store.h"

/* Upper limit for values. A longer one is a backend's mistake. */
#define KVS_VALUE_MAX ((size_t)64 << 30)
/* Upper limit for keys, in bytes: their hex digits must fit into a file name. */
#define KVS_HASH_MAX 120

struct kvs_store {
    kv_store_v1 *backend;
    /* the backend's own table, which may be shorter than this build's */
    const kv_store_vtable *table;
    const kv_store_ext *ext_table; /* NULL: no extensions */
    kv_store_vtable calls;         /* copies; functions that the backend lacks are NULL */
    kv_store_ext ext;
    bool batches; /* puts go in batches: the backend has put_chunks, and gains by it */
    bool by_hand; /* the owner publishes what it puts: close flushes nothing */
    pid_t pid;    /* of the process that opened it */
    _Atomic uint64_t
        unflushed; /* chunks put since the last manifest or flush, without those of saves */
    _Atomic uint32_t saves;  /* running; their chunks may be there and not be published */
    atomic_bool save_failed; /* since the last manifest or flush: as of running ones */
    void *library;           /* dlopen's handle; NULL when built in */
    char *label;             /* the URI without secrets, for logs */
};

/**
 * Open @uri with these tables, which must outlive the store; @ext may be NULL. -EPROTO: a table
 * breaks kv_store_abi.h. When the backend's open fails: -EIO and a log line, or for a @built_in
 * backend, which has logged the reason, its errno.
 */
int kvs_open_with(const kv_store_vtable *table, const kv_store_ext *ext, const char *uri,
                  bool built_in, struct kvs_store **ret);

/**
 * Open as kvs_open does, but make no file store: -ENOENT when its directory is missing. Writes
 * nothing to a directory that holds no store.
 */
int kvs_open_existing(const char *uri, struct kvs_store **ret);

/**
 * Let kvs_close flush nothing: the owner publishes through the backend, and what it has not
 * published is to be dropped.
 */
static inline void kvs_publishes_by_hand(struct kvs_store *store)
{
    store->by_hand = true;
}

/* The puts of a save, which kvs_close drops when the save fails. */
int kvs_put_chunk_of_save(struct kvs_store *store, const void *hash, size_t hash_len,
                          const void *data, size_t len);
int kvs_put_chunks_of_save(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                           const void *const *data, const size_t *len, int *ret_each);

/**
 * Set ret_new[i] to 0 where the backend found chunk i present although its put returned 0, else to 1
 * (new_chunks of kv_store_ext.h). Returns 0, -ENOTSUP or an error.
 */
int kvs_new_chunks(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                   uint8_t *ret_new);

/** Length, and state, of a chunk of which a part of the store gave no answer. */
#define KVS_LEN_UNKNOWN KV_STORE_LEN_UNKNOWN
#define KVS_UNKNOWN KV_STORE_PRESENT_UNKNOWN

/**
 * As kvs_get_chunks and kvs_look, but chunks without an answer fail by themselves: ret[i] is NULL and
 * ret_len[i] KVS_LEN_UNKNOWN, ret_state[i] KVS_UNKNOWN. Those two return -EIO then. Any thread.
 */
int kvs_get_chunks_each(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                        void **ret, size_t *ret_len);
int kvs_look_each(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n,
                  uint8_t *ret_state);

/** Read parts of chunks, as get_ranges of kv_store_ext.h. -ENOTSUP: the backend can't. Any thread. */
int kvs_get_ranges(struct kvs_store *store, kv_store_range *ranges, size_t n);

/**
 * Rewrite chunks of a member into packs, as pack_chunks of kv_store_ext.h. -ENOTSUP: the store has no
 * members. Any thread.
 */
int kvs_pack_chunks(struct kvs_store *store, const kv_store_pack_opts *opts, const void *hashes,
                    size_t hash_len, size_t n, kv_store_packed *ret);

/**
 * Note the results of puts, for kvs_close: of @stored and @hits chunks (0 and 1). A hit is something
 * to lose when a save may have put the chunk, which close drops otherwise. Any thread.
 */
static inline void kvs_note_puts(struct kvs_store *store, size_t stored, size_t hits)
{
    size_t n = stored + (atomic_load(&store->saves) || atomic_load(&store->save_failed) ? hits : 0);

    if (n) /* close, which reads it, comes after all puts */
        atomic_fetch_add_explicit(&store->unflushed, n, memory_order_relaxed);
}

static inline void kvs_note_put(struct kvs_store *store, int rc)
{
    if (rc >= 0)
        kvs_note_puts(store, rc == 0, rc == 1);
}

/** Puts that a manifest or a flush is about to make durable; those meanwhile may need the next one. */
struct kvs_unflushed {
    uint64_t n;
    bool save_failed;
};

static inline struct kvs_unflushed kvs_take_unflushed(struct kvs_store *store)
{
    return (struct kvs_unflushed){
        .save_failed = atomic_exchange(&store->save_failed, false),
        .n = atomic_exchange_explicit(&store->unflushed, 0, memory_order_relaxed)};
}

/** Give it back: the manifest or the flush failed. */
static inline void kvs_give_unflushed(struct kvs_store *store, struct kvs_unflushed before)
{
    kvs_note_puts(store, before.n, 0);
    if (before.save_failed)
        atomic_store(&store->save_failed, true);
}

#endif
