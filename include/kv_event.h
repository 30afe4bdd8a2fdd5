// SPDX-License-Identifier: Apache-2.0
/**
 * kv_event.h: KV cache events, read and published in the formats that engines speak.
 *
 * Engines (vLLM, SGLang, TensorRT-LLM, ...) publish what enters and leaves their KV cache as
 * msgpack batches over ZMQ. This library decodes every generation of that format, turns events into
 * operations on a prefix index, hashes blocks the way routers do, and publishes events of its own
 * in the same format, so that any C engine can be followed by any KV indexer.
 *
 * Errors are negative errno values (-EPROTO: a message that can't be understood).
 */
#ifndef KV_EVENT_H
#define KV_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------
 * Block hashing. XXH3-64 over the tokens as little-endian u32, seeded with the namespace.
 */

/** Seed of the base namespace. */
#define KVE_SEED UINT64_C(1337)

/**
 * The seed for a LoRA adapter and a cache salt: 1337 + xxh3(lora, 0) + xxh3(salt, 1), each term
 * left out when its string is NULL or empty. Additions wrap.
 */
KV_API uint64_t kve_seed(const char *lora, size_t lora_len, const char *salt, size_t salt_len);

/**
 * Local hash of one block: @n tokens and the identities of the multimodal objects that lie in it
 * (appended in ascending order; @n_mm is 0 for text). Any @n_mm is allowed.
 */
KV_API uint64_t kve_hash_block(uint64_t seed, const uint32_t *tokens, size_t n, const uint64_t *mm,
                               size_t n_mm);

/**
 * Local hashes of all full blocks of a prompt: windows of block_size + @lookahead tokens at a stride
 * of block_size. Engines that draft ahead (EAGLE, MTP) hash their blocks so. @ret has room for
 * n / block_size hashes. Returns their number; 0 when block_size is 0.
 */
KV_API size_t kve_hash_tokens(uint64_t seed, const uint32_t *tokens, size_t n, uint32_t block_size,
                              uint32_t lookahead, uint64_t *ret);

/**
 * The identity of a multimodal object that engines name by a string: the first 64 bits of a digest
 * of 64 hex digits, else XXH3 of the name.
 */
KV_API uint64_t kve_mm_identity(const char *id, size_t len);

/**
 * The identity of an object together with its place: @offset is its first token's position in the
 * block, below 0 when the object starts in an earlier block. vLLM's block hashes cover that place.
 */
KV_API uint64_t kve_mm_placed(uint64_t identity, int64_t offset);

/** Rolling sequence hashes: s[0] = local[0], s[i] = xxh3(le64(s[i-1]) || le64(local[i]), 1337). */
KV_API void kve_sequence_hashes(const uint64_t *local, size_t n, uint64_t *ret);

/* ---------------------------------------------------------------------------------------------
 * Reading: bytes of one batch in, operations on an index out.
 */

enum kve_op_type {
    KVE_OP_STORE,       /* blocks[], parent */
    KVE_OP_STORE_KNOWN, /* hashes[]: blocks known from an earlier store are now in tier too */
    KVE_OP_REMOVE,      /* hashes[] */
    KVE_OP_CLEAR        /* everything of that rank and source in tiers */
};

/**
 * Whose copies of blocks an operation is about. A publisher may hold several copies of one block in
 * one source and tier: each store adds one, each removal takes one away.
 */
enum kve_source_kind {
    KVE_SOURCE_MAIN,  /* the publisher's own full attention: always source 0 */
    KVE_SOURCE_OWNER, /* the same blocks in a cache of another owner (a secondary offloading tier) */
    KVE_SOURCE_WINDOW /* a cache group that a match needs beside the main one; see need */
};

/** Longest name of an owner. A longer one is cut and ends in the hash of all of it. */
#define KVE_MAX_OWNER 63

/** A window without an end: a second full-attention group. */
#define KVE_NEED_ALL UINT32_MAX

/**
 * One source of a reader. Sources of kind WINDOW hold no blocks of their own: a match of l blocks
 * counts only when l is a multiple of @stride and, of the blocks at l, l - stride, l - 2 * stride
 * ..., the last min(need, l / stride) are in the source, too. All WINDOW sources of one owner
 * must agree. Their stores are always KVE_OP_STORE_KNOWN, and may come before the store of the
 * same hashes in source 0.
 */
struct kve_source {
    enum kve_source_kind kind;
    uint32_t group;  /* WINDOW: the cache group's number */
    uint32_t window; /* WINDOW: of a sliding window its length in tokens, else 0 */
    uint32_t need;   /* WINDOW: blocks, 1 or more (1: one recurrent state), or KVE_NEED_ALL */
    uint32_t stride; /* blocks of the registered size that one block of the group spans; 1 */
    char owner[KVE_MAX_OWNER + 1]; /* empty: the publisher */
};

/** One operation; what it points to lives until the reader's next call. */
struct kve_op {
    enum kve_op_type type;
    enum kv_tier tier;
    uint32_t rank;
    bool has_parent;
    uint64_t parent;
    const struct kv_block *blocks; /* KVE_OP_STORE */
    const uint64_t *hashes;        /* KVE_OP_STORE_KNOWN, KVE_OP_REMOVE */
    size_t n;
    uint32_t source;    /* 0: the publisher's own main cache; else see kve_reader_source */
    uint32_t lookahead; /* KVE_OP_STORE: tokens after each block that its local hash covers, too;
                         * 0, or 1 and more when the engine drafts ahead (EAGLE, MTP) */
    uint32_t tiers;     /* KVE_OP_CLEAR: bit 1 << tier of each tier to empty. With source 0 also of
                         * the WINDOW sources of the publisher, not of other owners' sources */
    bool placed;        /* KVE_OP_STORE: some block is hashed with kve_mm_placed identities */
    const uint32_t *remaining; /* KVE_OP_REMOVE: for each hash, the copies that source and tier
                                * still have; NULL when the event doesn't say */
};

/** Why an event, or part of one, was left out. Names: kve_skip_name. */
enum kve_skip {
    KVE_SKIP_MALFORMED,    /* not an event: wrong shape or types */
    KVE_SKIP_UNKNOWN_TYPE, /* a type this reader doesn't know */
    KVE_SKIP_BLOCK_SIZE,   /* block_size differs from the registered one */
    KVE_SKIP_TOKEN_COUNT,  /* fewer tokens than its blocks need: the blocks that fit are kept; or a
                            * block's worth too many: none is, it can't be told which they are */
    KVE_SKIP_DUPLICATE_HASH, /* a hash twice, or the parent among its own children */
    KVE_SKIP_GROUP,          /* a cache group of a kind that can't be followed */
    KVE_SKIP_MEDIUM,         /* a storage medium with an unknown name */
    KVE_SKIP_REMOTE,         /* not held by this worker (locality) */
    KVE_SKIP_NAMESPACE,      /* its cache salt can't be told: the parent is unknown or ambiguous; or
                              * can't be remembered (max_salted) */
    KVE_SKIP_TOO_LARGE,      /* over the reader's limits */
    KVE_SKIP_SOURCE,         /* more owners and groups than a reader tells apart */
    KVE_SKIP_EXTRA_KEYS,     /* extra keys that aren't understood: its blocks from there on */
    KVE_N_SKIPS
};
KV_API const char *kve_skip_name(enum kve_skip skip);

/** A decoded batch; valid until the reader's next call. */
struct kve_batch {
    double timestamp; /* seconds since the epoch as published; 0 when absent */
    bool has_rank;    /* the batch names its data-parallel rank (ops carry the effective one) */
    uint32_t rank;
    const struct kve_op *ops;
    size_t n_ops;
    size_t n_events;               /* as published, including those left out */
    size_t n_blocks;               /* blocks and hashes in ops */
    uint32_t skipped[KVE_N_SKIPS]; /* events left out of this batch, by reason */
};

/**
 * Reads the batches of one publisher. Keeps what must be remembered between batches: which cache
 * groups are full attention, and the salts of salted chains. Thread-confined.
 */
struct kve_reader;

struct kve_reader_opts {
    size_t size;
    uint32_t block_size; /* required: blocks of events must have it */
    uint32_t rank;       /* rank of batches that don't name one */
    uint32_t max_events; /* per batch; 0: 65536 */
    uint32_t max_tokens; /* per event, and as many hashes; 0: 4 Mi */
    uint32_t max_salted; /* blocks whose salt is remembered (32 to 85 bytes each); 0: 1 Mi */
    bool ignore_mm_keys; /* hash no multimodal objects of extra_keys, as Dynamo 1.6 doesn't: blocks
                          * that differ in them alone are then taken for the same */
    bool
        ignore_mm_offsets; /* hash the objects of extra_keys by their names, without their places */
};

KV_API int kve_reader_create(const struct kve_reader_opts *opts, struct kve_reader **ret);
KV_API void kve_reader_destroy(struct kve_reader *reader);

/**
 * Decode one payload. A bad event is left out and counted in ret->skipped; it costs neither the
 * batch nor what follows. Returns 0; -EPROTO when it isn't a batch at all (or, being cut short or
 * promising more than it has, no msgpack at all); -ENOMEM. Then @ret is unwritten and nothing of
 * the payload is to be applied.
 */
KV_API int kve_reader_decode(struct kve_reader *reader, const void *payload, size_t len,
                             struct kve_batch *ret);

/** Forget what was remembered (the publisher restarted). Sources keep their numbers. */
KV_API void kve_reader_reset(struct kve_reader *reader);

/**
 * Describe source @i, as named by an operation of this reader. Returns 0, or -ENOENT when no
 * operation has named it yet (0 always exists).
 */
KV_API int kve_reader_source(const struct kve_reader *reader, uint32_t i, struct kve_source *ret);

/* ---------------------------------------------------------------------------------------------
 * Publishing: ZMQ PUB with sequence numbers, and a ROUTER that replays recent batches.
 */

/** One event to publish, of at most 4 Mi hashes and tokens. Pointers are borrowed for the call. */
struct kve_event {
    size_t size; /* sizeof(struct kve_event) */
    enum { KVE_STORED, KVE_REMOVED, KVE_CLEARED } type;
    enum kv_tier tier;
    const uint64_t *hashes; /* n_hashes block hashes, stored and removed */
    size_t n_hashes;
    const uint64_t *parent; /* stored: NULL for the root */
    const uint32_t
        *tokens; /* stored: n_hashes * block_size tokens, or none: known blocks, now in tier */
    size_t n_tokens;
    uint32_t block_size;
    const char *lora_name;  /* NULL: none */
    const char *cache_salt; /* NULL: none */
    int32_t group;          /* cache group, -1: not said */
};

/** Event encodings: tagged maps (vLLM >= 0.24) or positional arrays (before). */
enum kve_encoding { KVE_ENCODING_MAP, KVE_ENCODING_ARRAY };

/** Framing of replay answers: with the topic (vLLM >= 0.26) or without (before, SGLang). */
enum kve_replay_framing { KVE_REPLAY_WITH_TOPIC, KVE_REPLAY_WITHOUT_TOPIC };

struct kve_publisher_opts {
    size_t size;
    const char *endpoint;        /* PUB, e.g. "tcp://127.0.0.1:*"; bound unless connect is set */
    const char *replay_endpoint; /* ROUTER; NULL: no replay */
    const char *topic;           /* NULL: "" */
    bool connect;                /* connect the PUB socket instead of binding it */
    enum kve_encoding encoding;
    enum kve_replay_framing replay_framing;
    uint32_t rank;           /* data_parallel_rank of the batches */
    uint32_t buffer_batches; /* kept for replay; 0: 10000 */
    uint32_t queue_events;   /* bound on events waiting to be sent; 0: 100000. Also 256 MiB */
    uint32_t batch_events;   /* at most so many events a batch; 0: 256. Also 65536, and 4 MiB */
    uint32_t linger_us;      /* wait so long for a batch to fill; 0: send what is there */
    uint64_t first_sequence;
    uint64_t buffer_bytes; /* and at most so many bytes are kept for replay; 0: 256 MiB */
};

struct kve_publisher;

/** What a publisher has done so far. */
struct kve_publisher_stats {
    uint64_t events;         /* accepted */
    uint64_t dropped_events; /* refused because the queue was full; they leave a sequence gap */
    uint64_t batches;        /* sent; the next sequence number is first_sequence + this + gaps */
    uint64_t replay_requests;
    uint64_t replayed_batches;
};

/** Bind (or connect) and start the publisher's thread. Returns 0, -EINVAL, -EADDRINUSE, -ENOMEM...
 */
KV_API int kve_publisher_create(const struct kve_publisher_opts *opts, struct kve_publisher **ret);

/** Send what is queued (at most ~1 s), stop the thread, close. NULL is a no-op. */
KV_API void kve_publisher_destroy(struct kve_publisher *publisher);

/**
 * Queue events, in order. Never blocks: when the queue is full the events are dropped, and a
 * sequence number is spent on them so that every subscriber sees a gap. Thread-safe. Returns 0,
 * -EAGAIN when they were dropped, -EINVAL, -ENOMEM.
 */
KV_API int kve_publisher_publish(struct kve_publisher *publisher, const struct kve_event *events,
                                 size_t n);

/**
 * @n events were lost before they came here: a sequence number is spent on them, as on those that the
 * queue has no room for, and they count as dropped. Thread-safe. Returns 0 or -EINVAL.
 */
KV_API int kve_publisher_lost(struct kve_publisher *publisher, uint64_t n);

/** Wait until all queued events were handed to ZMQ. Returns 0 or -ETIMEDOUT. */
KV_API int kve_publisher_flush(struct kve_publisher *publisher, uint32_t timeout_ms);

/** The endpoints actually bound (the port filled in); valid as long as the publisher. NULL: none.
 */
KV_API const char *kve_publisher_endpoint(const struct kve_publisher *publisher);
KV_API const char *kve_publisher_replay_endpoint(const struct kve_publisher *publisher);

KV_API void kve_publisher_get_stats(struct kve_publisher *publisher,
                                    struct kve_publisher_stats *ret);

#ifdef __cplusplus
}
#endif
#endif
