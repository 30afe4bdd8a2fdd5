// SPDX-License-Identifier: Apache-2.0
/**
 * Follow peers: which workers they have registered, and which they have unregistered. A replica
 * behind the same address then answers for the same workers. registry_peers.c has the rules of
 * merging; docs/kv-indexer-streams.md has the view from outside.
 */
#ifndef KV_INDEXER_REPLICA_FOLLOW_H
#define KV_INDEXER_REPLICA_FOLLOW_H

#include <stddef.h>
#include <stdint.h>

#include "base/json/json.h"
#include "http/auth.h"
#include "indexer/registry/registry.h"
#include "indexer/replica/peers.h"

struct ki_peer_entry {
    struct ki_registration registration; /* its strings are owned */
    bool removed;
};

/** A peer's GET /registrations. */
struct ki_peer_document {
    struct ki_peer_entry *entries;
    size_t n, capacity;
    size_t n_removed; /* removals among the n entries */
    uint64_t id, revision;
};

/**
 * Read the document before which @json stands into a zero-initialised @d. Returns 0 or the reader's
 * error. Release with ki_peer_document_fini in either case.
 */
int ki_peer_document_read(struct ki_peer_document *d, struct kv_json *json);
void ki_peer_document_fini(struct ki_peer_document *d);

/**
 * Merge a peer's GET /registrations, before which @json stands: all of it or, when it is invalid,
 * nothing. Returns 0, the reader's error, or 1 when a registration was refused for a reason that may
 * pass (another worker in its way, no room, a clock): the same list may be admitted later.
 */
int ki_follow_read(struct ki_registry *registry, struct kv_json *json, uint64_t *ret_id,
                   uint64_t *ret_revision);

/**
 * Ask @peer once. @token and @ca_file may be NULL, see recovery.h. @id and @revision are from its
 * last answer (0: none yet), and are updated. Returns 0 or 1 as ki_follow_read does, or a negative
 * errno with the reason in @error.
 */
int ki_follow_ask(struct ki_registry *registry, const char *peer, const char *token,
                  const char *ca_file, const _Atomic int *stop, uint64_t *id, uint64_t *revision,
                  struct kv_error *error);

struct ki_follow;

struct ki_follow_opts {
    struct ki_registry *registry;
    struct ki_peers *peers;
    struct kh_auth *auth;
    const char *ca_file;  /* see recovery.h; outlives the thread */
    uint64_t interval_ms; /* between two questions to a peer */
    /* Time after which an unchanged list is merged again that was refused in part; 0: 30 s. */
    uint64_t again_ms;
    /* Blocks that no stream keeps up to date are forgotten after this time. */
    uint64_t age_ms;
};

/** Start a thread that asks all peers again and again. */
int ki_follow_create(const struct ki_follow_opts *opts, struct ki_follow **ret);
void ki_follow_destroy(struct ki_follow *follow); /* NULL is a no-op */

#endif
