// SPDX-License-Identifier: Apache-2.0
/** The reconciler: from what sources name to what is registered. */
#ifndef KV_INDEXER_DISCOVER_RECONCILE_H
#define KV_INDEXER_DISCOVER_RECONCILE_H

#include "indexer/discover/source.h"

enum ki_followed_state {
    KI_FOLLOWED,  /* registered by this discovery, and named by a source */
    KI_GOING,     /* registered and withdrawn: no source names it; until_ns: unregistered */
    KI_REFUSED,   /* the registry refuses it; until_ns: tried again */
    KI_LEFT_ALONE /* a client has unregistered it, or registered it otherwise: the client's, until
                   * the sources tell of it otherwise, or no more */
};

#define KI_SOURCE_GONE SIZE_MAX

/** A rank that a source names, or has named. */
struct ki_followed {
    struct ki_found found; /* texts are owned */
    /* Number of the source that counts; KI_SOURCE_GONE. Written without the lock, too. */
    _Atomic size_t source;
    _Atomic enum ki_followed_state state; /* the reconciler's thread writes it without the lock */
    uint64_t until_ns;
};

struct ki_discovery {
    struct ki_registry *registry;
    uint64_t grace_ns;
    pthread_t thread; /* there is none while there are no sources */
    bool has_thread;
    struct ki_source gone; /* stands for those that a reload has removed */

    pthread_mutex_t lock;
    pthread_cond_t woken; /* used with lock: a set has come, or stop */
    bool stop;
    /* In the order of the command line. ki_discovery_reload replaces them under the lock, while there is
     * no thread of the reconciler, which reads them without it. */
    struct ki_source **sources;
    size_t n_sources;
    uint64_t hold_ns; /* until then ranks of removed sources wait for the first sets of new ones */
    /* Replaced by the reconciler's thread under the lock, sorted by (instance, rank). Other threads
     * read it under the lock: which ranks it has, their source and state. */
    struct ki_followed *followed;
    size_t n_followed;
    uint64_t revision; /* of the registry, as last looked at; of the reconciler's thread */
};

/** Thread of the reconciler; @arg is a struct ki_discovery. */
void *ki_reconcile_run(void *arg);
void ki_reconcile_fini(struct ki_discovery *d);

#endif
