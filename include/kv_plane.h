// SPDX-License-Identifier: Apache-2.0
/**
 * kv_plane.h: the event plane, on which block managers publish the life of their blocks over NATS
 * (docs/event-plane.md).
 *
 * kvbm_events.h publishes; this header holds what publishers and subscribers share.
 *
 * Threads: any function from any thread.
 */
#ifndef KV_PLANE_H
#define KV_PLANE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- servers ---- */

/**
 * Options of a connection to NATS; set size to sizeof(struct kvp_nats_opts), zero means the default.
 * All strings are copied. Of the four credentials (user and password, token, nkey_file, creds_file)
 * one at most may be given. Files are read again at every connection, so that a renewed credential
 * counts without a restart.
 */
struct kvp_nats_opts {
    size_t size;
    /* Required: nats://HOST:PORT or tls://HOST:PORT; of a cluster several, with commas between. */
    const char *url;
    const char *name; /* shown in the server's list of connections; NULL: "kvasir" */

    const char *user, *password;
    const char *token;
    const char *nkey_file;  /* the seed of a user's nkey ("SU...") */
    const char *creds_file; /* a user's JWT and seed, as nsc writes them */

    const char *tls_ca; /* PEM file; NULL: the system's authorities. Giving it demands TLS. */
    const char *tls_cert, *tls_key; /* PEM files of this client; both or none */

    uint64_t queue_bytes;  /* messages that wait for the server; 0: 64 MiB. More are dropped. */
    uint32_t reconnect_ms; /* between attempts to connect; 0: 1000 */
    uint32_t timeout_ms;   /* of one attempt, of a write, of a JetStream acknowledgement; 0: 2000 */
};
#define KVP_NATS_OPTS_INIT KV_INIT_(kvp_nats_opts)

/* ---- subjects ---- */

#define KVP_MAX_SUBJECT 200 /* bytes of a publisher's subject, with its NUL */

/**
 * Write the subject of a publisher, "kvasir.CLUSTER.MODEL.TENANT.WORKER", to @ret. Bytes other than
 * letters, digits, - and _ become %XX, an empty or NULL name becomes %. Names that differ give
 * subjects that differ, and no name is a wildcard. Returns the length; -ENAMETOOLONG.
 */
KV_API long kvp_subject(const char *cluster, const char *model, const char *tenant,
                        const char *worker, char ret[KVP_MAX_SUBJECT]);

/* ---- records ---- */

/** Return the id of a volume, XXH3-64 of its name: a record's storage_location. */
KV_API uint64_t kvp_volume(const char *name);

/**
 * Return a key as a number: 8 bytes in this machine's order; of longer keys the last 8 bytes,
 * big-endian, as events over ZMQ name a block.
 */
KV_API uint64_t kvp_key_number(const void *key, uint32_t len);

/** Kinds of message. */
enum kvp_kind {
    KVP_EVENTS = 1,   /* what has changed */
    KVP_SNAPSHOT = 2, /* a part of all that the publisher has: one KVP_STORE for a block and tier */
    KVP_ALIVE = 3     /* no change: sent in every quiet window, so that a loss shows */
};

/** Beginning of a message. */
struct kvp_header {
    size_t size;
    enum kvp_kind kind;
    uint32_t n_records;
    char publisher[KVP_MAX_SUBJECT]; /* its subject */
    uint64_t incarnation;            /* random, new for every start of the publisher */
    /* EVENTS: number of this message, from 0. ALIVE: of the next one. SNAPSHOT: of the first one
     * whose changes belong behind the snapshot. */
    uint64_t sequence;
    uint64_t part;    /* SNAPSHOT: number of this part, from 0 */
    bool last;        /* SNAPSHOT: no part follows */
    uint64_t request; /* SNAPSHOT: the number in the request that it answers */
    uint64_t time_ns; /* since the epoch, by the publisher's clock */
    /* XXH3-128, canonical, of the fingerprint of model and layout, as an object tier's values hold
     * it: with it, group, key and block_bytes a subscriber computes a block's key in a store. */
    uint8_t fingerprint[16];
};
#define KVP_HEADER_INIT KV_INIT_(kvp_header)

/** Event of a block, the specification's KVEvent. */
enum kvp_event { KVP_STORE = 1, KVP_REMOVE = 2 };
struct kvp_record {
    enum kvp_event event; /* event_type */
    enum kv_tier tier;
    bool first; /* STORE: the block was in no tier before */
    bool last;  /* REMOVE: it is in no tier now */
    bool has_prefix, has_tokens_hash;
    uint32_t group;
    uint32_t key_len;     /* 4 to 64 */
    const void *key;      /* sequence_hash; valid during the callback, as parent is */
    const void *parent;   /* key of the block before; NULL: a first block, or not told (REMOVE) */
    uint32_t position;    /* in blocks, from the chain's first one; 0 also where not told */
    uint64_t prefix;      /* prefix_hash: kvp_key_number of the chain's first block */
    uint64_t tokens_hash; /* kve_hash_block of the block's tokens */
    uint64_t block_bytes; /* block_size; 0: not told */
    uint64_t volume;      /* storage_location: kvp_volume of the tier's name */
    uint64_t reserved[2]; /* 0 */
};

/** Take one record of a message. */
typedef void (*kvp_record_fn)(void *arg, const struct kvp_header *header,
                              const struct kvp_record *record);

/**
 * Read a message, binary or JSON (docs/formats.md, "Event plane"). A message is checked as a whole
 * before the first record is handed out. @ret becomes the header. @ret and @fn may be NULL. A pure
 * function.
 * Returns 0; -EBADMSG (no such message, or a damaged one); -EPROTONOSUPPORT (a newer version);
 * -EINVAL (@ret has no size).
 */
KV_API int kvp_read(const void *data, size_t len, struct kvp_header *ret, kvp_record_fn fn,
                    void *arg);

#ifdef __cplusplus
}
#endif
#endif
