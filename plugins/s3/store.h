// SPDX-License-Identifier: Apache-2.0
/** The handle, shared by the files that fill the plugin's tables. */
#ifndef KV_PLUGINS_S3_STORE_H
#define KV_PLUGINS_S3_STORE_H

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "s3/object.h"
#include "s3/pending.h"
#include "s3/refs.h"
#include "s3/seen.h"

enum s3_counter { PUTS, PUT_HITS, GETS, MISSES, BAD, WRITTEN, READ, ERRORS, N_COUNTERS };

struct kv_store_v1 {
    pid_t pid; /* process that opened it */
    struct s3_config config;
    struct s3_client *client;
    struct s3_seen *seen;
    struct s3_pending *pending;
    struct s3_refs *refs;
    _Atomic uint64_t counters[N_COUNTERS];
};

static inline void s3_count(kv_store_v1 *self, enum s3_counter counter, uint64_t n)
{
    atomic_fetch_add_explicit(&self->counters[counter], n, memory_order_relaxed);
}

/** Count a failure other than a miss. Returns @error. */
static inline int s3_failed(kv_store_v1 *self, int error)
{
    if (error < 0 && error != -ENOENT)
        s3_count(self, ERRORS, 1);
    return error;
}

/**
 * True in a forked child, where calls return -ECHILD: it has neither the client's thread nor the
 * threads that may have held locks.
 */
static inline bool s3_in_child(const kv_store_v1 *self)
{
    return self->pid != getpid();
}

static inline bool s3_bad_hash(const void *hash, size_t len)
{
    return !hash || len == 0 || len > S3_MAX_HASH;
}

#define S3_MAX_NAME \
    250 /* of manifests; three times that, a prefix and an id stay below S3's 1024 */

static inline bool s3_bad_name(const char *name)
{
    return !name || !*name || strlen(name) > S3_MAX_NAME;
}

/* sweep.c and s3.c: calls of kv_store_ext.h. */
int s3_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int s3_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg);
int s3_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg);
int s3_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                    kv_store_swept *ret);
int s3_delete_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len);

#endif
