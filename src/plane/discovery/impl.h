// SPDX-License-Identifier: Apache-2.0
/**
 * Internals of discoveries.
 *
 *   discovery.c  options, state, the thread
 *   table.c      records by name, and the workers that follow from them
 *   file.c       a folder: looks at it again and again; keeps files young
 */
#ifndef KV_PLANE_DISCOVERY_IMPL_H
#define KV_PLANE_DISCOVERY_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/thread/thread.h"
#include "plane/discovery/discovery.h"
#include "plane/etcd.h"

#define KVP_DISCOVERY_MAX 65536    /* records */
#define KVP_DISCOVERY_RECORD 65536 /* bytes of one */

enum kvp_bucket { KVP_SOURCES, KVP_CHANNELS, KVP_N_BUCKETS };

/* -- records by name: one thread --------------------------------------------------------------- */

struct kvp_entry {
    char *name; /* the key, without its bucket */
    enum kvp_bucket bucket;
    uint64_t publisher, worker; /* worker and rank: of a source */
    uint32_t rank;
    char *address;  /* of a channel; NULL: of another kind than ZMQ */
    uint64_t order; /* higher: appeared later */
    uint64_t look;  /* the last look that saw it */
    /* Of a file. */
    int64_t mtime_ns;    /* as the file has it */
    uint64_t changed_ns; /* monotonic: when mtime_ns was seen to change */
    bool expired;        /* nobody keeps it young */
};

/** Zero-initialise. Sorted by bucket and name. */
struct kvp_table {
    struct kvp_entry **items;
    size_t n, capacity;
    char only[3 * KVP_DYNAMO_NAME_MAX + 64]; /* names must begin so */
    bool nats;                               /* sources without a channel are workers, too */
    uint64_t order, look;
    uint64_t
        left_out; /* records of the last look that make no sense, or couldn't be read or kept */
    bool changed; /* since kvp_table_tell */
};

void kvp_table_fini(struct kvp_table *t);
struct kvp_entry *kvp_table_find(const struct kvp_table *t, enum kvp_bucket bucket,
                                 const char *name);
/**
 * Put a record. One that makes no sense, or isn't about its own name, counts as left out; the entry of
 * that name is removed. Returns the entry, or NULL.
 */
struct kvp_entry *kvp_table_put(struct kvp_table *t, enum kvp_bucket bucket, const char *name,
                                const void *json, size_t len);
void kvp_table_remove(struct kvp_table *t, enum kvp_bucket bucket, const char *name);
/** Begin a look at all records; entries whose `look` isn't the table's at its end are removed. */
void kvp_table_begin(struct kvp_table *t);
void kvp_table_end(struct kvp_table *t);
/** Call @fn with all workers. Returns 0 or -ENOMEM (nothing is told). */
int kvp_table_tell(struct kvp_table *t, kvp_discovery_fn fn, void *arg);

/* -- discoveries ------------------------------------------------------------------------------- */

struct kvp_discovery {
    char *folder; /* of files; NULL: etcd */
    struct kvp_etcd_url url;
    char *user, *password, *tls_ca, *tls_cert, *tls_key;
    uint32_t ttl_s;
    const struct kvbm_http_abi *http;

    kvp_discovery_fn fn; /* NULL: announces */
    void *arg;
    struct kvp_table table;
    struct kv_buf names[KVP_N_BUCKETS], values[KVP_N_BUCKETS]; /* announced; empty: none */
    size_t n_announced;

    pthread_t thread;
    struct kv_wake wake; /* signalled once, to stop */
    atomic_bool stop;
    pthread_mutex_t lock; /* of info */
    struct kvp_discovery_info info;
};

/** Return the text before the NAME in a key of the bucket. */
const char *kvp_bucket_prefix(enum kvp_bucket bucket);

void kvp_discovery_failed(struct kvp_discovery *d, const char *what, const char *why);
void kvp_discovery_is(struct kvp_discovery *d, bool current);
/** Tell the workers when something has changed. */
void kvp_discovery_tell(struct kvp_discovery *d);

/** Threads of a folder: run until d->stop. */
void kvp_folder_follow(struct kvp_discovery *d);
void kvp_folder_announce(struct kvp_discovery *d);

#endif
