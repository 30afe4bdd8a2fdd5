// SPDX-License-Identifier: Apache-2.0
/** A source of discovery, as the reconciler sees it. */
#ifndef KV_INDEXER_DISCOVER_SOURCE_H
#define KV_INDEXER_DISCOVER_SOURCE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/thread/thread.h"
#include "indexer/discover/discovery.h"
#include "indexer/discover/dynamo_nats.h"
#include "indexer/discover/found.h"

struct ki_source;

/** A kind of source. */
struct ki_source_ops {
    const char *scheme; /* with its colon; what follows it is `where` */
    const char *form;   /* for errors: "file:PATH" */
    /** Check `where`. Returns 0 or -EINVAL with @error's text. */
    int (*check)(const char *where, struct kv_error *error);
    /** Prepare. NULL: nothing to do. Returns 0 or a negative errno with @error. */
    int (*open)(struct ki_source *source, struct kv_error *error);
    /** Publish sets until ki_source_is_stopped. On the source's thread. */
    void (*run)(struct ki_source *source);
    /** Free what open has made, after the thread has ended. NULL: nothing to do. */
    void (*close)(struct ki_source *source);
    /** Read the counters of its NATS. Returns false when it follows none. NULL: it never does. */
    bool (*nats_stats)(const struct ki_source *source, struct ki_dynamo_nats_stats *ret);
    bool at_once; /* workers leave without a grace */
};

extern const struct ki_source_ops ki_source_file, ki_source_kubernetes, ki_source_dns,
    ki_source_etcd, ki_source_etcds, ki_source_dynamo;

struct ki_source {
    const struct ki_source_ops *ops;
    struct ki_discovery *of;
    const char *name;  /* as given */
    const char *where; /* the part behind the scheme */
    struct ki_options
        options; /* a copy, with the NATS credentials of the command line's part; texts live on */
    struct ki_found base; /* what is said of workers by default */
    struct kv_wake wake;  /* readable: stop */
    atomic_bool stop;     /* set before wake is signalled */
    pthread_t thread;
    bool has_thread;

    /* Under the discovery's lock: */
    struct ki_found_set incoming;
    bool has_incoming, current;
    uint64_t current_ns; /* time of the last look that succeeded; 0: none yet */
    uint64_t sets, failures, workers, left_out, conflicts, withdrawn, refused;
    char error[160], why_left[160];

    struct ki_found_set set; /* the reconciler's */
    void *own;               /* the kind's own state, from open to close */
};

/** Publish the workers now, which the discovery takes over: *@set is empty then. */
void ki_source_publish(struct ki_source *source, struct ki_found_set *set);
/** Note that a look has confirmed the last set. */
void ki_source_confirm(struct ki_source *source);
/** Note that the source can't be read. Its last set stays. Logs, unless for the same reason as before. */
void ki_source_failed(struct ki_source *source, const char *fmt, ...) KV_PRINTF(2, 3);
/** Return true when the source shall end. */
static inline bool ki_source_is_stopped(struct ki_source *source)
{
    return atomic_load_explicit(&source->stop, memory_order_acquire);
}
/** Wait until @fd (-1: none) is readable, for @ms at most, or for the stop. */
void ki_source_wait(struct ki_source *source, int fd, int ms);

#endif
