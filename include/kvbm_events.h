// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_events.h: publish each block that enters or leaves a tier.
 *
 * A registry writes each change into a bounded queue, in order, while it holds its lock. One thread
 * takes changes out in batches, by size and time, and hands each batch to every sink:
 * - a callback,
 * - a ring to poll,
 * - the ZMQ publisher of kv_event.h, in the engines' format, so that kv-indexer follows a block
 *   manager,
 * - NATS, as records of kv_plane.h,
 * - Dynamo's event plane, over ZMQ or NATS, so that its router does.
 *
 * A change is either "stored in a tier" (first: the key was in no tier before) or "removed from a
 * tier" (last: the key is in no tier now). A consumer of all tiers together needs only first and
 * last.
 *
 * Threads: any function from any thread, unless its comment says otherwise. A NULL pointer that
 * must not be NULL is -EINVAL.
 */
#ifndef KVBM_EVENTS_H
#define KVBM_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_event.h"
#include "kv_plane.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Kinds of change. */
enum kvbm_event_type { KVBM_EVENT_STORED = 1, KVBM_EVENT_REMOVED = 2 };

/** One change. Pointers are valid during the callback; from a ring, until the next drain. */
struct kvbm_event {
    enum kvbm_event_type type;
    enum kv_tier tier;
    bool first; /* STORED: the key was registered in no tier before */
    bool last;  /* REMOVED: it is in no tier now */
    /* STORED: told before, without tokens. Callbacks and rings get no such change; it has the number
     * of the next one. */
    bool again;
    uint32_t group;
    uint32_t key_len;
    const void *key;
    const void *parent; /* STORED: key of the block before; NULL at a sequence's start */
    uint32_t position;  /* in blocks */
    uint32_t n_tokens;  /* STORED: block_size, or 0 when the registration had no tokens */
    const uint32_t *tokens;
    uint64_t sequence; /* number of this change, from 0; dropped changes leave gaps */
    uint64_t time_ns;  /* since the epoch, when the registry wrote it */
};

/** Event manager: the queue of changes, its thread, and its sinks. */
struct kvbm_events;

/** Options of an event manager; set size to sizeof(struct kvbm_events_opts), zero: the default. */
struct kvbm_events_opts {
    size_t size;
    uint32_t max_batch; /* events a batch, at most 65536; 0: 1024 */
    uint32_t window_us; /* microseconds to wait for a batch to fill; 0: 10,000 */
    /* Bytes of queued changes; 0: 16 MiB. Changes beyond it are dropped and counted. */
    uint64_t queue_bytes;
};
#define KVBM_EVENTS_OPTS_INIT KV_INIT_(kvbm_events_opts)

/**
 * Create an event manager and start its thread. @opts may be NULL. The caller owns *@ret and frees
 * it with kvbm_events_destroy. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no thread).
 */
KV_API int kvbm_events_create(const struct kvbm_events_opts *opts, struct kvbm_events **ret);

/**
 * Hand out queued changes, stop the thread, close the sinks, free the manager. NULL is a no-op.
 * Returns 0; -EBUSY while a registry uses it, and -EDEADLK from a sink's callback: nothing is done.
 */
KV_API int kvbm_events_destroy(struct kvbm_events *events);

/** Changes that a sink gets. */
enum kvbm_event_scope {
    KVBM_EVENTS_PER_TIER,    /* all */
    KVBM_EVENTS_CONSOLIDATED /* STORED that are first, REMOVED that are last */
};

/**
 * Take one batch, on the event manager's thread, one call at a time.
 *
 * @lost is the number of changes (of any scope) dropped right before this batch because the queue
 * was full. Each loss is passed once, with @n 0 when the sink's scope has no event behind it. The
 * callback may use registries and pools, but must not add or remove sinks.
 */
typedef void (*kvbm_event_fn)(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost);

/**
 * Add a callback. Returns its id > 0; -EINVAL; -ENOSPC (16 sinks exist); -ENOMEM; -EDEADLK (from a
 * callback).
 */
KV_API int kvbm_events_add_callback(struct kvbm_events *events, enum kvbm_event_scope scope,
                                    kvbm_event_fn fn, void *arg);

/** Ring of the latest events. One thread polls it. */
struct kvbm_event_ring;

/**
 * Add a ring of at most @bytes (0: 1 MiB; an event takes 48 bytes and its tokens). The event
 * manager owns *@ret; it is valid until the sink is removed or the manager destroyed. Returns as
 * kvbm_events_add_callback.
 */
KV_API int kvbm_events_add_ring(struct kvbm_events *events, enum kvbm_event_scope scope,
                                uint64_t bytes, struct kvbm_event_ring **ret);
/**
 * Take up to @max events out of a ring, oldest first. *@lost (may be NULL) becomes the number of
 * events overwritten or dropped since the last call. One thread at a time. Returns the number of
 * events taken.
 */
KV_API long kvbm_event_ring_drain(struct kvbm_event_ring *ring, struct kvbm_event *ret, size_t max,
                                  uint64_t *lost);

/** Options of a ZMQ sink; set size to sizeof(struct kvbm_zmq_opts), zero means the default. */
struct kvbm_zmq_opts {
    size_t size;
    const struct kve_publisher_opts *publisher; /* required: endpoint, replay, topic, rank ... */
    enum kvbm_event_scope scope;
    uint32_t block_size;                /* required: tokens per block of the events */
    const char *lora_name, *cache_salt; /* of all events; UTF-8; NULL: none */
};
#define KVBM_ZMQ_OPTS_INIT KV_INIT_(kvbm_zmq_opts)

/**
 * Publish changes over ZMQ in the engines' format (kv_event.h).
 *
 * - Block hashes: a key of 8 bytes is a number in this machine's byte order. Of any other key the
 *   last 8 bytes are, as a big-endian number.
 * - Consecutive stored blocks of one chain become one event, as do consecutive removals from one
 *   tier.
 * - Consolidated events name the device's medium for all tiers. A block whose first event had no
 *   tokens is published again with the first tokens that come; after a loss, any block is.
 * - Stored blocks whose tokens show another size than block_size are left out.
 * - After a loss (in this manager's queue or in the publisher's) the sink publishes a clear, and
 *   leaves a sequence gap. Followers then know fewer blocks than the tiers hold, never more.
 *
 * *@ret (may be NULL) becomes the publisher, for its endpoints and statistics. The sink owns it.
 * Returns an id as kvbm_events_add_callback; -EINVAL also for names that aren't UTF-8; an error of
 * kve_publisher_create.
 */
KV_API int kvbm_events_add_zmq(struct kvbm_events *events, const struct kvbm_zmq_opts *opts,
                               struct kve_publisher **ret);

/** Options of a NATS sink; set size to sizeof(struct kvbm_nats_opts), zero means the default. */
struct kvbm_nats_opts {
    size_t size;
    const struct kvp_nats_opts *server; /* required */
    /* Names in the subject kvasir.CLUSTER.MODEL.TENANT.WORKER (kvp_subject); worker is required. */
    const char *cluster, *model, *tenant, *worker;
    const char *fingerprint; /* of model and layout, as an object tier's; NULL: zeros in headers */
    uint64_t block_bytes;    /* of a block, for the records; 0: not told */
    /* Names of the volumes in which the tiers' blocks lie; NULL: "CLUSTER/WORKER/TIER". Publishers
     * that share a store give it one name. */
    const char *volumes[KV_N_TIERS];
    const char *lora_name, *cache_salt; /* of all events, for tokens_hash; NULL: none */
    uint32_t window_ms;                 /* longest wait of an event for its message; 0: 10,000 */
    uint32_t
        max_bytes; /* of a message, 1 KiB to 512 KiB: a fuller one is sent at once; 0: 64 KiB */
    uint64_t max_blocks; /* whose prefix and tokens_hash are remembered, 48 bytes each; 0: 2^24 */
    bool json;           /* JSON in place of binary records */
    /* Publish events by JetStream: a stream must have the subject. Each message has an id. */
    bool jetstream;
};
#define KVBM_NATS_OPTS_INIT KV_INIT_(kvbm_nats_opts)

/** A NATS sink, for its statistics. */
struct kvbm_nats_sink;

/**
 * Publish changes over NATS, as the records of kv_plane.h (docs/event-plane.md).
 *
 * - A message goes out when it is full, when its first event has waited for window_ms, and at
 *   kvbm_events_flush. A window without events sends an ALIVE message.
 * - No server, or a slow one, delays nobody. Messages wait in a queue (queue_bytes of @server); those
 *   that find it full are dropped and counted. A loss, also one in this manager's queue, leaves a
 *   gap in the messages' numbers.
 * - Requests on SUBJECT.snapshot are answered with all blocks of all registries that use @events, by
 *   a thread of the sink's own. A registry is locked for 1024 blocks at a time.
 *
 * *@ret (may be NULL) becomes the sink; it is valid until the sink is removed or the manager
 * destroyed. Either waits up to 1 s until a server has all messages, and for calls to it that are under
 * way: two connections end, each within twice the timeout_ms of @server (an attempt to connect: once
 * for each server of its URL). Returns an id as kvbm_events_add_callback;
 * -EINVAL; -ENAMETOOLONG (the subject); -ENOTSUP (no libkv_nats); -EAGAIN (no thread).
 */
KV_API int kvbm_events_add_nats(struct kvbm_events *events, const struct kvbm_nats_opts *opts,
                                struct kvbm_nats_sink **ret);

/** Counters of a NATS sink since its start. */
struct kvbm_nats_stats {
    size_t size;                       /* the caller's */
    uint64_t records, messages, bytes; /* queued for the server */
    uint64_t lost;                     /* events lost in the manager's queue */
    uint64_t dropped;   /* records in messages that the client's queue had no room for */
    uint64_t forgotten; /* blocks beyond max_blocks: their records lack prefix and tokens */
    uint64_t snapshots, snapshots_failed; /* answered to the end; given up */
    uint64_t queued_bytes;                /* of messages that wait for the server now */
    uint64_t connections;                 /* to servers so far: more than one after a loss */
    bool connected;
};
#define KVBM_NATS_STATS_INIT KV_INIT_(kvbm_nats_stats)

/** Read the counters. Returns 0; -EINVAL. */
KV_API int kvbm_nats_get_stats(struct kvbm_nats_sink *sink, struct kvbm_nats_stats *ret);

/**
 * Write the counters as Prometheus text, with a label publisher: the sink's subject. Writes and
 * returns as kvbm_registry_metrics.
 */
KV_API long kvbm_nats_metrics(struct kvbm_nats_sink *sink, char *to, size_t cap);

/**
 * Options of a sink for Dynamo's event plane; set size to sizeof(struct kvbm_dynamo_opts), zero means the
 * default. All strings are copied.
 */
struct kvbm_dynamo_opts {
    size_t size;
    /* Required: the deployment's discovery: "etcd://HOST:PORT[,HOST:PORT...]", "etcds://..." or
     * "file:///FOLDER" (DYN_DISCOVERY_BACKEND=file). */
    const char *discovery;
    const char *endpoint; /* required: of the Dynamo worker, "NAMESPACE.COMPONENT.ENDPOINT" */
    uint64_t worker;      /* required: its id (in etcd: the lease under which it is registered) */
    uint32_t rank;        /* its data-parallel rank */
    uint32_t block_size;  /* required: tokens per block of the events */
    /* Required, one of the two: the plane is NATS, or ZMQ with an address to bind, such as
     * "tcp://10.0.0.5:*". */
    const struct kvp_nats_opts *nats;
    const char *address;
    const char *advertise; /* ZMQ: host that the discovery tells; required where address has none */
    enum kvbm_event_scope scope;
    const char *lora_name, *cache_salt;      /* of all events; UTF-8; NULL: none */
    const char *user, *password;             /* of etcd; NULL: none */
    const char *tls_ca, *tls_cert, *tls_key; /* of etcd; PEM files */
    /* Records in etcd outlive this process by so long, in seconds; 0: 10, at most 3600. Files always
     * do by 10 s: followers wait no longer. */
    uint32_t ttl_s;
};
#define KVBM_DYNAMO_OPTS_INIT KV_INIT_(kvbm_dynamo_opts)

/** Sink for Dynamo's event plane. The event manager owns it. */
struct kvbm_dynamo;

/**
 * Publish changes on Dynamo's event plane, so that its router, and kv-indexer --dynamo, follow the
 * block manager (docs/event-plane.md).
 *
 * - The router believes a publisher whose records are in the discovery. The sink keeps them there,
 *   while etcd is away, too: it puts them again. The worker's model card is the worker's own.
 * - Block hashes are as in kvbm_events_add_zmq; tokens are hashed (kve_hash_block). A copy in a further
 *   tier is told by the tokens of the first. Blocks of groups beside 0, that no tier got with tokens, or
 *   whose tokens show another size than block_size are left out.
 * - Tiers: device, host_pinned, disk, external. Consolidated events name the device.
 * - After a loss (in this manager's queue, or in that of NATS) the sink publishes "cleared": followers
 *   then know fewer blocks than the tiers hold, never more. Event numbers have no gap.
 * - Nothing waits for subscribers: ZMQ drops what a subscriber is too slow for, and numbers show it.
 *
 * *@ret (may be NULL) becomes the sink, for its statistics, until it is removed. Returns an id as
 * kvbm_events_add_callback; -EINVAL also for names that aren't UTF-8, an endpoint, a discovery or an
 * address that can't be (the log says which); -ENOTSUP (no libkvbm_http for etcd, no libkv_nats);
 * -EADDRINUSE and other errors of the socket; -EIO (no random numbers).
 */
KV_API int kvbm_events_add_dynamo(struct kvbm_events *events, const struct kvbm_dynamo_opts *opts,
                                  struct kvbm_dynamo **ret);

/** State of such a sink, and counters since its creation. */
struct kvbm_dynamo_stats {
    size_t size;        /* the caller's */
    uint64_t publisher; /* its number */
    uint64_t events;    /* published, "cleared" included */
    uint64_t messages, bytes;
    uint64_t losses;   /* times that "cleared" was published for lost changes */
    uint64_t left_out; /* changes without tokens, of another block size or group */
    bool announced;    /* the discovery has the records, by the latest news */
    uint64_t discovery_failures;
    char address[256]; /* ZMQ: as the discovery tells it; else "" */
};
#define KVBM_DYNAMO_STATS_INIT KV_INIT_(kvbm_dynamo_stats)

/** Read them. Any thread. Returns 0; -EINVAL (NULL, or ret->size is 0). */
KV_API int kvbm_dynamo_get_stats(struct kvbm_dynamo *dynamo, struct kvbm_dynamo_stats *ret);

/**
 * Remove a sink. Waits for its running callback; hold no lock that the callback waits for. No
 * callback of it runs after the return. Returns 0; -ENOENT (removed before, or never added);
 * -EINVAL (@events is NULL, or @id is not above 0); -EDEADLK (from a callback).
 */
KV_API int kvbm_events_remove_sink(struct kvbm_events *events, int id);

/**
 * Wait up to @timeout_ms until every sink has all changes written before the call, and NATS sinks
 * have queued them for their servers.
 * Returns 0; -ETIMEDOUT; -EDEADLK (from a callback).
 */
KV_API int kvbm_events_flush(struct kvbm_events *events, uint32_t timeout_ms);

/** Counters of an event manager since its creation. */
struct kvbm_events_stats {
    size_t size;               /* the caller's */
    uint64_t written, dropped; /* events; dropped ones count as written, too */
    uint64_t batches;          /* handed out */
    uint64_t queued_bytes;     /* bytes in the queue now */
};
#define KVBM_EVENTS_STATS_INIT KV_INIT_(kvbm_events_stats)

/** Read the counters. Returns 0; -EINVAL (NULL, or ret->size is 0). */
KV_API int kvbm_events_get_stats(struct kvbm_events *events, struct kvbm_events_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
