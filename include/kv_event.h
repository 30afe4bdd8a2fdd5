// SPDX-License-Identifier: Apache-2.0
/**
 * kv_event.h: read and publish KV cache events in the formats that engines use.
 *
 * Engines (vLLM, SGLang, TensorRT-LLM ...) publish each block that enters or leaves their KV cache,
 * as msgpack batches over ZMQ. This library
 * - decodes every generation of that format into operations on a prefix index,
 * - hashes blocks as routers do,
 * - publishes events in the same format, so that any KV indexer can follow any C engine.
 *
 * Errors are negative errno values. -EPROTO: the message can't be understood.
 * Threads: hash functions and publishers may be used from any thread, a reader from one at a time.
 */
#ifndef KV_EVENT_H
#define KV_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_hash.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Send all log lines of libkvevent to @fn (kv_log_fn); NULL: errors and warnings to stderr. */
KV_API void kve_set_log(kv_log_fn fn, void *arg);

/* ---------------------------------------------------------------------------------------------
 * Reading: bytes of one batch in, operations on an index out.
 */

/** Kind of an operation, with the fields of struct kve_op that it fills. */
enum kve_op_type {
    KVE_OP_STORE,       /* blocks[], parent: a chain of blocks is now in tier */
    KVE_OP_STORE_KNOWN, /* hashes[]: blocks known from an earlier store are now in tier too */
    KVE_OP_REMOVE,      /* hashes[]: these blocks left tier */
    KVE_OP_CLEAR        /* tiers: all blocks of that rank and source left these tiers */
};

/**
 * Cache whose copies of blocks an operation changes. A publisher may hold several copies of one
 * block in one source and tier: each store adds one, each removal takes one away.
 */
enum kve_source_kind {
    KVE_SOURCE_MAIN,  /* the publisher's own full attention: always source 0 */
    KVE_SOURCE_OWNER, /* the same blocks in another owner's cache (a secondary offloading tier) */
    KVE_SOURCE_WINDOW /* a cache group that a match needs beside the main one; see need */
};

/** Longest name of an owner in bytes. The reader cuts a longer one and ends it in its hash. */
#define KVE_MAX_OWNER 63

/** Largest value of parts: the reader leaves out groups with smaller blocks. */
#define KVE_MAX_PARTS 64

/**
 * One source of a reader.
 *
 * A match must satisfy every WINDOW source of its owner. A match of l blocks satisfies one when
 * - l is a multiple of @stride, and
 * - of the blocks at l, l - stride, l - 2 * stride ..., those that @needs asks for are in the source:
 *   with m = l / stride of KV_NEEDS_RUN the last min(need, m), of KV_NEEDS_STATE the last one, of
 *   KV_NEEDS_CHUNK the last m mod need, of KV_NEEDS_ALL all.
 * Where the group's blocks are smaller (@parts of them make up one of the registered size), m is
 * l * parts and counts these. The last part of a block has its hash;
 * nothing else has the hashes of the other parts. A user of the reader that can't follow parts leaves
 * out the operations of such a source, and takes its view of that rank for partial.
 *
 * WINDOW sources hold no blocks of their own. Their stores are KVE_OP_STORE_KNOWN, may come before
 * the store of the same hashes in source 0, and have no hashes where the engine kept none. Stores of a rank that has shown no main group
 * are KVE_OP_STORE when the event has the blocks' places.
 */
struct kve_source {
    enum kve_source_kind kind;
    uint32_t group;  /* WINDOW: number of the cache group */
    uint32_t window; /* WINDOW: length of a sliding window, or of a chunk, in tokens, else 0 */
    uint32_t need;   /* WINDOW: blocks, 1 or more; 1 where @needs asks for no number */
    uint32_t stride; /* 1 or more: blocks of the registered size that one of the group spans */
    uint32_t parts;  /* 1 or more: blocks of the group that make up one of the registered size */
    enum kv_needs needs;           /* WINDOW: what a match needs of it */
    char owner[KVE_MAX_OWNER + 1]; /* name of the owner; empty: the publisher itself */
};

/** One operation. The reader owns all pointers; they are valid until its next call. */
struct kve_op {
    enum kve_op_type type;
    /* Not used by KVE_OP_CLEAR. Blocks of a group whose home is below the device (docs/events.md, rule
     * 3) count as on the device there. */
    enum kv_tier tier;
    uint32_t rank; /* data-parallel rank: the batch's, else the reader's */
    /* KVE_OP_STORE, and KVE_OP_STORE_KNOWN of a source with parts: false for a chain at the root,
     * and the block hash of the block before. */
    bool has_parent;
    uint64_t parent;
    const struct kv_block *blocks; /* KVE_OP_STORE: n blocks */
    const uint64_t *hashes;        /* KVE_OP_STORE_KNOWN, KVE_OP_REMOVE: n block hashes */
    size_t n;
    /* 0: the publisher's own main cache; other numbers: kve_reader_source. */
    uint32_t source;
    /* KVE_OP_STORE: tokens behind each block that its local hash covers as well: 0, or 1 and more
     * when the engine drafts ahead (EAGLE, MTP). */
    uint32_t lookahead;
    /* KVE_OP_CLEAR: bit 1 << tier of each tier to empty. With source 0 the publisher's WINDOW
     * sources are emptied as well, other owners' sources are not. */
    uint32_t tiers;
    /* KVE_OP_CLEAR: may have emptied either the device or the pool of a connector below it. @tiers has
     * one of the two. Or only one of the device's pool and that of a group at home below it, which
     * both count as the device. */
    bool unsure;
    bool placed; /* KVE_OP_STORE: some block is hashed with kve_mm_placed identities */
    /* The publisher tells the components of blocks (component_types), and has one copy of a block. */
    bool single;
    /* Such blocks lack a component that others have: nothing tells which prompts they serve. A
     * KVE_OP_STORE_KNOWN of this kind only says so. */
    bool incomplete;
    /* KVE_OP_STORE_KNOWN of a source with parts: blocks of the group that the event's tokens cover, of
     * which hashes has n, in order; 0 when the event is about blocks of another size. lookahead tells
     * only whether there is any. */
    size_t n_covered;
    /* KVE_OP_REMOVE: for each hash, the copies that source and tier still have. NULL when the event
     * doesn't tell. */
    const uint32_t *remaining;
};

/** Reason for leaving out an event, or part of one. kve_skip_name gives its name. */
enum kve_skip {
    KVE_SKIP_MALFORMED,    /* not an event: wrong shape or types */
    KVE_SKIP_UNKNOWN_TYPE, /* an event type this reader doesn't know */
    KVE_SKIP_BLOCK_SIZE,   /* block_size differs from the registered one */
    /* Fewer tokens than its blocks need: the reader keeps the blocks that fit. Or a block's worth
     * of tokens too many: it keeps none, because it can't tell which tokens belong to which
     * block. */
    KVE_SKIP_TOKEN_COUNT,
    KVE_SKIP_DUPLICATE_HASH, /* a hash twice, or the parent among its own children */
    KVE_SKIP_GROUP,          /* a cache group of a kind that can't be followed */
    KVE_SKIP_MEDIUM,         /* a storage medium with an unknown name */
    KVE_SKIP_REMOTE,         /* not held by this worker (locality) */
    /* The cache salt isn't known, because the parent is unknown or ambiguous; or the reader has no
     * room to remember it (max_salted). */
    KVE_SKIP_NAMESPACE,
    KVE_SKIP_TOO_LARGE,  /* over the reader's limits (max_events, max_tokens) */
    KVE_SKIP_SOURCE,     /* more owners and groups than a reader tells apart */
    KVE_SKIP_EXTRA_KEYS, /* extra keys of an unknown form: leaves out the blocks from there on */
    KVE_N_SKIPS
};

/** Return the name of a reason, as metrics and logs print it; a static string, never NULL. */
KV_API const char *kve_skip_name(enum kve_skip skip);

/** A decoded batch. The reader owns all pointers; they are valid until its next call. */
struct kve_batch {
    double timestamp; /* seconds since the epoch as published; 0 when absent */
    bool has_rank;    /* the batch names its data-parallel rank (ops carry the effective one) */
    uint32_t rank;    /* that rank; 0 without has_rank */
    const struct kve_op *ops;
    size_t n_ops;
    size_t n_events;               /* events as published, including those left out */
    size_t n_blocks;               /* blocks and hashes in all ops */
    uint32_t skipped[KVE_N_SKIPS]; /* events left out of this batch, by reason */
};

/**
 * Reader of the batches of one publisher. Between batches it remembers which cache groups are full
 * attention, and the salts of salted chains. Thread-confined: one thread at a time.
 */
struct kve_reader;

/** Options of a reader; set size to sizeof(struct kve_reader_opts), zero means the default. */
struct kve_reader_opts {
    size_t size;
    uint32_t block_size; /* required: tokens per block that events must have */
    uint32_t rank;       /* rank of batches that don't name one */
    uint32_t max_events; /* per batch; 0: 65536 */
    uint32_t max_tokens; /* per event, and as many hashes; 0: 4 Mi */
    uint32_t max_salted; /* blocks whose salt is remembered (32 to 85 bytes each); 0: 1 Mi */
    /* Leave multimodal objects of extra_keys out of the hashes, as Dynamo 1.6 does. Blocks that
     * differ only in them then count as equal. */
    bool ignore_mm_keys;
    /* Hash multimodal objects of extra_keys by their names alone, without their places. */
    bool ignore_mm_offsets;
};
#define KVE_READER_OPTS_INIT KV_INIT_(kve_reader_opts)

/**
 * Create a reader. The caller owns *@ret and frees it with kve_reader_destroy.
 * Returns 0; -EINVAL (options, block_size 0); -ENOMEM.
 */
KV_API int kve_reader_create(const struct kve_reader_opts *opts, struct kve_reader **ret);

/** Free a reader and everything its operations point to. NULL is a no-op. */
KV_API void kve_reader_destroy(struct kve_reader *reader);

/**
 * Decode one payload of @len bytes into *@ret: a batch of an engine, or an envelope of Dynamo's event
 * plane (docs/event-plane.md), whose blocks are hashed already.
 *
 * An event that can't be used is left out and counted in ret->skipped; the rest of the batch is
 * decoded. On failure @ret is unwritten, and the caller must apply nothing of the payload.
 * Returns 0; -EPROTO when the payload isn't a batch (or is cut short, or no msgpack); -ENOMEM.
 */
KV_API int kve_reader_decode(struct kve_reader *reader, const void *payload, size_t len,
                             struct kve_batch *ret);

/**
 * Forget all that batches have told, because the publisher restarted. Sources keep their numbers:
 * blocks announced under them may still be held.
 */
KV_API void kve_reader_reset(struct kve_reader *reader);

/**
 * Describe source @i of this reader's operations. Source 0 always exists.
 * Returns 0; -ENOENT when no operation has named source @i yet.
 */
KV_API int kve_reader_source(const struct kve_reader *reader, uint32_t i, struct kve_source *ret);

/* ---------------------------------------------------------------------------------------------
 * Publishing: a ZMQ PUB socket with sequence numbers, and a ROUTER that replays recent batches.
 */

/** One event to publish, of at most 4 Mi hashes and tokens. Pointers are borrowed for the call. */
struct kve_event {
    size_t size; /* the same in all events of an array: the step from one to the next */
    enum { KVE_STORED, KVE_REMOVED, KVE_CLEARED } type;
    enum kv_tier tier;
    const uint64_t *hashes; /* n_hashes block hashes; STORED and REMOVED */
    size_t n_hashes;
    const uint64_t *parent; /* STORED: block hash of the block before; NULL for the root */
    /* STORED: n_hashes * block_size tokens. NULL for blocks published before, which are now in tier
     * as well. */
    const uint32_t *tokens;
    size_t n_tokens;
    uint32_t block_size;
    const char *lora_name;  /* NULL: none */
    const char *cache_salt; /* NULL: none */
    int32_t group;          /* cache group; -1: the event names none */
};
#define KVE_EVENT_INIT KV_INIT_(kve_event)

/** Encoding of events: tagged maps (vLLM >= 0.24) or positional arrays (before). */
enum kve_encoding { KVE_ENCODING_MAP, KVE_ENCODING_ARRAY };

/** Framing of replay answers: with the topic (vLLM >= 0.26) or without (before, SGLang). */
enum kve_replay_framing { KVE_REPLAY_WITH_TOPIC, KVE_REPLAY_WITHOUT_TOPIC };

/** Options of a publisher; set size to sizeof(struct kve_publisher_opts), zero: the default. */
struct kve_publisher_opts {
    size_t size;
    const char *endpoint;        /* PUB, e.g. "tcp://127.0.0.1:*"; bound unless connect is set */
    const char *replay_endpoint; /* ROUTER; NULL: no replay */
    const char *topic;           /* NULL: "" */
    bool connect;                /* connect the PUB socket instead of binding it */
    enum kve_encoding encoding;
    enum kve_replay_framing replay_framing;
    uint32_t rank;           /* data_parallel_rank of the batches */
    uint32_t buffer_batches; /* batches kept for replay; 0: 10000. See buffer_bytes */
    uint32_t queue_events;   /* events that wait to be sent, at most; 0: 100000. Also 256 MiB */
    uint32_t batch_events;   /* events a batch, 1 to 65536; 0: 256. Also 4 MiB */
    uint32_t linger_us;      /* microseconds to wait for a batch to fill; 0: send at once */
    uint64_t first_sequence; /* number of the first batch */
    uint64_t buffer_bytes;   /* bytes kept for replay, at most; 0: 256 MiB */
};
#define KVE_PUBLISHER_OPTS_INIT KV_INIT_(kve_publisher_opts)

/** Publisher of one engine's events. Any thread. */
struct kve_publisher;

/** Counters of a publisher since its creation. */
struct kve_publisher_stats {
    size_t size;
    uint64_t events;         /* accepted */
    uint64_t dropped_events; /* refused because the queue was full; they leave a sequence gap */
    uint64_t batches;        /* sent; the next sequence number is first_sequence + this + gaps */
    uint64_t replay_requests;
    uint64_t replayed_batches;
};
#define KVE_PUBLISHER_STATS_INIT KV_INIT_(kve_publisher_stats)

/**
 * Bind (or connect) the sockets and start the publisher's thread. The caller owns *@ret and frees
 * it with kve_publisher_destroy. Strings of @opts are copied. Returns 0; -EINVAL (options,
 * endpoint); -ENOMEM; -EADDRINUSE and other errors of the sockets.
 */
KV_API int kve_publisher_create(const struct kve_publisher_opts *opts, struct kve_publisher **ret);

/**
 * Send queued events for up to about 1 s, stop the thread, close the sockets, free the publisher.
 * No other call may use it any more. NULL is a no-op.
 */
KV_API void kve_publisher_destroy(struct kve_publisher *publisher);

/**
 * Queue @n events in order. Never blocks. Any thread.
 *
 * When the queue is full the events are dropped, and the publisher skips a sequence number, so that
 * every subscriber sees a gap.
 * Returns 0; -EAGAIN (the events were dropped); -EINVAL; -ENOMEM.
 */
KV_API int kve_publisher_publish(struct kve_publisher *publisher, const struct kve_event *events,
                                 size_t n);

/**
 * Announce that the caller lost @n events before it could publish them. The publisher skips a
 * sequence number and counts them as dropped. Any thread. Returns 0 or -EINVAL.
 */
KV_API int kve_publisher_lost(struct kve_publisher *publisher, uint64_t n);

/**
 * Wait up to @timeout_ms until ZMQ has all events queued before. Any thread.
 * Returns 0 or -ETIMEDOUT.
 */
KV_API int kve_publisher_flush(struct kve_publisher *publisher, uint32_t timeout_ms);

/**
 * Return the PUB endpoint as bound, with the port filled in. The publisher owns the string, which
 * is valid until destroy.
 */
KV_API const char *kve_publisher_endpoint(const struct kve_publisher *publisher);

/**
 * Return the replay endpoint as bound, with the port filled in. The publisher owns the string,
 * which is valid until destroy. NULL without a replay socket.
 */
KV_API const char *kve_publisher_replay_endpoint(const struct kve_publisher *publisher);

/**
 * Read the publisher's counters into *@ret, as far as its size reaches. Any thread.
 * Returns 0; -EINVAL (a NULL, or a size that is not set).
 */
KV_API int kve_publisher_get_stats(struct kve_publisher *publisher,
                                   struct kve_publisher_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
