// SPDX-License-Identifier: Apache-2.0
/**
 * The handle, and what the two tables share: the vtable (store.c, fetch.c, publish.c) and the
 * extensions (ext.c, list.c, sweep.c).
 *
 * Puts stay in memory. put_manifest sends one script that looks for every chunk of the save and
 * sets the manifest only when all are there: that is all of a warm save. When some are missing, a
 * second pipeline carries them and the script again. In a cluster, whose scripts can't see all
 * slots, and where scripts aren't allowed: a look for each chunk, then the missing ones, then the
 * manifest, each step after all replies of the one before.
 *
 * One lock guards everything; hashing and copying happen outside.
 */
#ifndef KV_REDIS_STORE_H
#define KV_REDIS_STORE_H

#include <pthread.h>

#include "kv_store_ext.h"
#include "redis/entry.h"
#include "redis/history.h"
#include "redis/loss.h"
#include "redis/nodes.h"

#define RDS_MAX_NAME 1024
#define RDS_KEY_SIZE (128 + 2 + 2 * RDS_MAX_HASH + RDS_MAX_NAME)
#define RDS_BATCH_GETS 256 /* values asked for at once */
#define RDS_MAX_NAMES \
    ((size_t)1 << 20) /* remembered; beyond that all unneeded ones are forgotten */

struct kv_store_v1 {
    pthread_mutex_t lock;
    struct rds_net net;
    struct rds_table table;
    struct rds_arena arena;  /* values of refs */
    struct rds_entry **refs; /* of the save in progress, in the order of their puts */
    size_t n_refs, refs_capacity;
    uint64_t buffered;  /* bytes of values of refs */
    uint64_t cached;    /* bytes of values of others; at most the option "cache" */
    uint64_t usual_len; /* of the last value that was put or prefetched */
    struct rds_loss loss;
    bool no_scripts; /* the server refused one */
    struct rds_history history;
    kv_store_stats stats;
};

/**
 * The server's key of a chunk ("c:" and hex), a manifest ("m:") or the set of chunks it may need
 * ("u:"; "r:" what former writers noted in its place); returns its length.
 */
size_t rds_chunk_key(const kv_store_v1 *self, const uint8_t *hash, size_t hash_len, char *key);
size_t rds_name_key(const kv_store_v1 *self, char kind, const char *name, char *key);

/** Arguments that can be served: 0 or -EINVAL, said in the log. */
int rds_check_hash(const uint8_t *hash, size_t hash_len);

/**
 * Send what is missing of the save in progress, then @manifest (@name NULL: none). Locked. When the
 * server is unreachable the save stays, for another try. -ENOSPC: it stays too when other threads
 * put chunks of it, whose publications would succeed without them; else it is dropped.
 */
int rds_publish(kv_store_v1 *self, const char *name, const char *manifest, size_t manifest_len);

/** Number of the calling thread, never 0 and never that of a thread that has ended. */
uint64_t rds_thread(void);
/** The highest number that a thread has. */
uint64_t rds_newest_thread(void);

/** Whether one command may name any keys: there is one node, or the prefix puts all in one slot. */
bool rds_one_node(const kv_store_v1 *self);

/**
 * Ask by a script whether a chunk is there, which marks it as used; the reply is the server's time,
 * negative when it isn't.
 */
void rds_add_use(kv_store_v1 *self, struct rds_batch *batch, const uint8_t *hash, size_t hash_len);

/** Of rds_table_purge: only a name, which may be forgotten. */
bool rds_idle_name(const struct rds_entry *entry);

/** Whether the server doesn't let us run scripts. */
bool rds_no_script(const struct resp_value *reply);

/** A reply to TIME, seconds and microseconds: 0 or -EPROTO. */
int rds_read_time(const struct resp_value *reply, int64_t *ret_us);

/**
 * Each name of a kind ('c', 'm') in order and once, without prefix; the callback may call back.
 * Locks.
 */
typedef int (*rds_name_fn)(void *arg, const char *name);
int rds_each_name(kv_store_v1 *self, char kind, rds_name_fn each, void *arg);

/** The key that @hex tells; its length, 0 when it isn't one of ours. */
size_t rds_parse_hex(const char *hex, uint8_t *hash);

/** fetch.c: gets of the vtable; a manifest's value too. */
int rds_get_value(kv_store_v1 *self, const char *key, size_t key_len, char **ret, size_t *ret_len);
int rds_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                  size_t *out_len);
int rds_delete_chunk_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                        const uint8_t *data, size_t len);
int rds_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n);

/** list.c and sweep.c: of the extension table. */
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

/** Count a failed call, pass its error on. */
int rds_failed(kv_store_v1 *self, int err);

#endif
