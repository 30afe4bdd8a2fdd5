// SPDX-License-Identifier: Apache-2.0
/** Shared by bound.c (threads, and the waiting) and bound_call.c (the tables, and what a call does). */
#ifndef KV_TIERED_BOUND_CALL_H
#define KV_TIERED_BOUND_CALL_H

#include <pthread.h>
#include <sys/queue.h>

#include "tiered/bound.h"

enum trd_op {
    TRD_OPEN,
    TRD_PUT,
    TRD_GET,
    TRD_PUT_MANIFEST,
    TRD_GET_MANIFEST,
    TRD_DELETE_MANIFEST,
    TRD_PREFETCH,
    TRD_EXISTS,
    TRD_GET_MANY,
    TRD_PUT_MANY,
    TRD_DELETE,
    TRD_DELETE_IF,
    TRD_LIST_MANIFESTS,
    TRD_LIST_CHUNKS,
    TRD_LIST_REFS,
    TRD_TOUCH,
    TRD_FLUSH,
    TRD_SWEEP,
    TRD_STATS,
    TRD_NEW,
    TRD_RANGES,
    TRD_CLOSE
};

/** A call: its arguments, copied, and its results. */
struct trd_call {
    STAILQ_ENTRY(trd_call) entry;
    enum trd_op op;
    pthread_mutex_t lock; /* guards what follows, up to rc; held while a callback runs */
    pthread_cond_t ended;
    bool done, given_up;
    uint64_t progress_ns; /* when it began, or last called back */
    int rc;

    struct kvs_store *opened; /* OPEN */
    uint8_t *hashes;          /* @n keys of @hash_len bytes */
    size_t hash_len, n;
    char *name;     /* of a manifest */
    void **data;    /* @n values; of puts and gets */
    size_t *len;    /* of each */
    uint8_t *state; /* EXISTS, NEW: of each */
    int *each;      /* PUT_MANY: of each */
    kv_store_range *ranges;
    struct iovec *parts; /* of each range: one, in memory of the call */
    kv_store_each_fn fn;
    kv_store_live_fn live;
    void *arg; /* of fn and live: the caller's, used only with `lock` held and unless given up */
    uint64_t min_age_s;
    kv_store_swept swept;
    kv_store_stats stats;
};

/** Make a call with @n keys, copied. NULL: no memory. */
struct trd_call *trd_call_make(enum trd_op op, const void *hashes, size_t hash_len, size_t n);
void trd_call_free(struct trd_call *call); /* NULL is a no-op */
/** Do it, on a worker's thread; @uri and @existing are for TRD_OPEN. Returns its result. */
int trd_call_do(struct trd_call *call, struct kvs_store *store, const char *uri, bool existing);

/**
 * Let a worker do the call, and wait for its end. Returns its result, -ETIMEDOUT, -EHOSTDOWN, -ECHILD or -ENOMEM
 * (also for NULL). *@call becomes NULL when the worker has the call now; else the caller frees it.
 */
int trd_bound_run(struct trd_bound *bound, struct trd_call **call);

/** Make the store whose backend is @bound: the tables' functions that @inner has. -ENOMEM. */
int trd_bound_wrap(struct trd_bound *bound, const struct kvs_store *inner, struct kvs_store **ret);

#endif
