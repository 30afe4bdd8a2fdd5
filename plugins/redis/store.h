// SPDX-License-Identifier: Apache-2.0
/**
 * The handle, shared by the vtable (store.c, fetch.c, publish.c) and the extension table (ext.c,
 * list.c, sweep.c).
 *
 * Puts stay in memory. put_manifest sends one script that looks for every chunk of the save and
 * sets the manifest only when all exist; a warm save needs nothing else. When some are missing, a
 * second pipeline carries them and the script again. Without scripts (a cluster, whose scripts see
 * one slot only, or a server that refuses them) there are three steps. They are: look for each
 * chunk, send the missing ones, set the manifest; each begins after all replies of the step before.
 *
 * One lock guards everything; hashing and copying happen outside.
 */
#ifndef KV_REDIS_STORE_H
#define KV_REDIS_STORE_H

#include <pthread.h>

#include "base/thread/thread.h"
#include "kv_store_ext.h"
#include "redis/entry.h"
#include "redis/history.h"
#include "redis/loss.h"
#include "redis/nodes.h"

#define RDS_MAX_NAME 1024
#define RDS_KEY_SIZE (128 + 2 + 2 * RDS_MAX_HASH + RDS_MAX_NAME)
#define RDS_BATCH_GETS 256 /* values requested at once */
#define RDS_MAX_NAMES \
    ((size_t)1 << 20) /* keys remembered; beyond this, unneeded ones are forgotten */

struct kv_store_v1 {
    pthread_mutex_t lock;
    struct rds_net net;
    struct rds_table table;
    struct rds_arena arena;  /* memory of refs' values */
    struct rds_entry **refs; /* chunks of the save in progress, in any order */
    size_t n_refs, refs_capacity;
    uint64_t buffered;  /* bytes of refs' values */
    uint64_t cached;    /* bytes of other values; at most the option "cache" */
    uint64_t usual_len; /* length of the last value put or prefetched */
    struct rds_loss loss;
    bool no_scripts; /* the server refused a script */
    struct rds_history history;
    kv_store_stats stats;
};

/**
 * Write the server's key of a chunk ("c:" and hex), a manifest ("m:") or the set of chunks that it
 * may need ("u:"). Returns its length.
 */
size_t rds_chunk_key(const kv_store_v1 *self, const uint8_t *hash, size_t hash_len, char *key);
size_t rds_name_key(const kv_store_v1 *self, char kind, const char *name, char *key);

/** Check arguments. Returns 0, or -EINVAL with a log line. */
int rds_check_hash(const uint8_t *hash, size_t hash_len);

/**
 * Send the missing chunks of the save in progress, then @manifest (@name NULL: none). Call with the
 * lock. When the server is unreachable the save is kept for another try. -ENOSPC: it stays too when
 * other threads put chunks of it, whose publications would succeed without them; else it is
 * dropped. -EIO: chunks that are too large for the server are dropped, the others kept.
 */
int rds_publish(kv_store_v1 *self, const char *name, const char *manifest, size_t manifest_len);

/** Append an entry to the chunks of the save in progress. Returns 0 or -ENOMEM. */
int rds_push_ref(kv_store_v1 *self, struct rds_entry *entry);

/**
 * Drop a chunk that its caller deletes, with what a put of it left here: no publication sends it
 * again. A manifest of ours that lists it is refused until it is put again. Call with the lock.
 */
void rds_forget_chunk(kv_store_v1 *self, struct rds_entry *entry);

/**
 * True when one command may name any keys: there is one node, or the prefix puts all keys in one
 * slot.
 */
bool rds_one_node(const kv_store_v1 *self);

/**
 * Add a command that asks for a chunk by a script, which marks it as used. The reply is the
 * server's time, negative when the chunk is missing.
 */
void rds_add_use(kv_store_v1 *self, struct rds_batch *batch, const uint8_t *hash, size_t hash_len);

/** For rds_table_purge: true for an entry that is only a key and may be forgotten. */
bool rds_idle_name(const struct rds_entry *entry);

/** True when the reply says that the server doesn't allow scripts. */
bool rds_no_script(const struct resp_value *reply);

/** Read a reply to TIME, as microseconds. Returns 0 or -EPROTO. */
int rds_read_time(const struct resp_value *reply, int64_t *ret_us);

/**
 * Call @each for each name of a kind ('c', 'm'), sorted and once, without prefix. The callback may
 * call the store. Takes the lock.
 */
typedef int (*rds_name_fn)(void *arg, const char *name);
int rds_each_name(kv_store_v1 *self, char kind, rds_name_fn each, void *arg);

/** Decode @hex to a key. Returns its length, 0 when it isn't a key of ours. */
size_t rds_parse_hex(const char *hex, uint8_t *hash);

/** fetch.c: gets of the vtable; also used for manifests. */
int rds_get_value(kv_store_v1 *self, const char *key, size_t key_len, char **ret, size_t *ret_len);
int rds_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                  size_t *out_len);
int rds_delete_chunk_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                        const uint8_t *data, size_t len);
int rds_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

/** list.c and sweep.c: calls of the extension table. */
int rds_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int rds_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int rds_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg);
int rds_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                     kv_store_swept *ret);

/**
 * Report that a chunk's @value did not verify. A value with our trailer that is still there is
 * removed, because a later put would take the trailer for a stored chunk. Without scripts this
 * handle's next save sends the chunk again. A value of another program stays until the next put.
 * Takes the lock.
 */
void rds_drop_bad(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const char *value,
                  size_t len);

/** Count a failed call and return its error. */
int rds_failed(kv_store_v1 *self, int err);

#endif
