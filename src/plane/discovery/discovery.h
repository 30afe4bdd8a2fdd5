// SPDX-License-Identifier: Apache-2.0
/**
 * Dynamo's discovery, in etcd or in a folder: follow who publishes events, or announce a publisher.
 *
 *   etcd://HOST:PORT[,HOST:PORT...][/NS[/COMP[/EP]]]   etcds:// with TLS; a path narrows what is followed
 *   file://FOLDER                                      files named as the keys; Dynamo's "file" backend
 *
 * Both keep a thread, which reconnects and looks again for as long as it lives. A server that doesn't
 * answer changes nothing: what was known stays.
 */
#ifndef KV_PLANE_DISCOVERY_H
#define KV_PLANE_DISCOVERY_H

#include "base/core/error.h"
#include "plane/dynamo.h"

/** A publisher: a worker's rank that can be followed. */
struct kvp_dynamo_worker {
    uint64_t publisher;
    uint64_t worker;
    uint32_t rank;
    const char *address; /* NULL: it publishes on NATS */
};

/** Place of a discovery, and how to get there. */
struct kvp_discovery_opts {
    const char *where;                       /* required: as above */
    const char *user, *password;             /* of etcd; NULL: none */
    const char *tls_ca, *tls_cert, *tls_key; /* PEM files; NULL: the system's, none */
    /* Of announced records, at most 3600; 0: 10. In a folder they outlive this process by 10 s. */
    uint32_t ttl_s;
    bool nats; /* tell sources without a channel, too: they publish on NATS */
};

/**
 * Write the subject on which publishers of the discovery @where publish on NATS; '*' for each name that
 * its path leaves open. Returns 0; -EINVAL (no such @where); -ENOMEM.
 */
#define KVP_DYNAMO_SUBJECT (3 * KVP_DYNAMO_NAME_MAX + 64)
int kvp_discovery_subject(const char *where, char ret[KVP_DYNAMO_SUBJECT]);

/** Check @where. Returns 0, or -EINVAL with @error's text. */
int kvp_discovery_check(const char *where, struct kv_error *error);

struct kvp_discovery;

/**
 * Take all workers that can be followed, sorted by (worker, rank), one publisher for each: the one that
 * appeared last. @unreachable is the number of sources without a channel that aren't told. On the
 * discovery's thread, whenever something has changed.
 */
typedef void (*kvp_discovery_fn)(void *arg, const struct kvp_dynamo_worker *workers, size_t n,
                                 size_t unreachable);

/**
 * Follow. Doesn't wait for a server. Returns 0; -EINVAL or -ENOTSUP (no libkvbm_http) with @error's
 * text; -ENOMEM; -EAGAIN (no thread).
 */
int kvp_discovery_follow(const struct kvp_discovery_opts *opts, kvp_discovery_fn fn, void *arg,
                         struct kvp_discovery **ret, struct kv_error *error);

/**
 * Announce a publisher, until kvp_discovery_close takes the records away, or this process has been dead
 * for ttl_s (in a folder: for 10 s). @channel NULL: no channel (NATS). Both are copied. Returns as
 * kvp_discovery_follow.
 */
int kvp_discovery_announce(const struct kvp_discovery_opts *opts,
                           const struct kvp_dynamo_source *source,
                           const struct kvp_dynamo_channel *channel, struct kvp_discovery **ret,
                           struct kv_error *error);

/** State of a discovery, at any time. */
struct kvp_discovery_info {
    bool current;      /* what is known is up to date; announced records are there */
    uint64_t failures; /* requests and looks that failed */
    uint64_t left_out; /* records that make no sense, or that couldn't be read or kept */
    char error[128];   /* the last failure; empty while current */
};
void kvp_discovery_get_info(struct kvp_discovery *d, struct kvp_discovery_info *ret);

/** Stop the thread and free @d. Announced records are taken away. NULL is a no-op. Not from its callback. */
void kvp_discovery_close(struct kvp_discovery *d);

#endif
