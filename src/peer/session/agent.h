// SPDX-License-Identifier: Apache-2.0
/**
 * Internals of an agent: the sets that it exports, and its directory of peers' sets.
 *
 *   agent ──► exports[]: id, last generation, set (NULL: withdrawn)
 *         └─► peers[], by worker ──► places[], by id ──► set ──► facts (one generation)
 *                                                                  ▲
 *                                               kvbm_remote_blocks ┘ counts a reference
 */
#ifndef KVBM_PEER_SESSION_AGENT_H
#define KVBM_PEER_SESSION_AGENT_H

#include <pthread.h>

#include "peer/session/carrier.h"
#include "peer/set/blockset.h"

struct kvbm_exported {
    uint32_t id;
    uint64_t generation; /* of the latest set of this id, also of one that is gone */
    struct kvbm_blockset *set;
};

/* A place for a set of a peer. It stays when the set is invalidated, for the generation. */
struct kvbm_imported {
    uint32_t id;
    uint64_t generation;         /* the latest one known */
    struct kvbm_remote_set *set; /* NULL: invalidated */
    bool told;                   /* by a session, not imported by the program */
};

struct kvbm_peer {
    uint64_t worker, incarnation;
    char name[KVBM_MAX_AGENT_NAME + 1];
    struct kvbm_imported *places; /* ascending ids */
    uint32_t n;
};

struct kvbm_net;
struct kvbm_lender;
struct kvbm_offer;

struct kvbm_agent {
    char name[KVBM_MAX_AGENT_NAME + 1];
    char fingerprint[KVBM_MAX_FINGERPRINT + 1];
    uint64_t worker, incarnation;
    uint32_t key_len, max_sets;
    uint64_t max_bytes;
    struct kvbm_net *net;                          /* sessions with peers */
    struct kvbm_carrier carriers[KVBM_N_CARRIERS]; /* constant while there are sessions */
    struct kvbm_lender *lender;

    pthread_mutex_t lock; /* all below */
    struct kvbm_exported *exports;
    uint32_t n_exports;
    struct kvbm_peer **peers; /* ascending workers */
    uint32_t n_peers;
    uint32_t n_places; /* of all peers */
    uint64_t bytes;    /* of all peers' sets, as serialised */
    uint32_t n_users;  /* exported sets, lists of remote blocks, leases and opened sessions */
};

struct kvbm_blockset {
    struct kvbm_agent *agent;
    uint32_t id;
    struct kvbm_facts *facts; /* replaced by update, under the agent's lock */
    struct kvbm_offer *offer; /* likewise; NULL: peers can neither lease nor map its blocks */
};

struct kvbm_remote_set {
    struct kvbm_agent *agent;
    struct kvbm_facts *facts; /* replaced by import, under the agent's lock; so are those below */
    uint32_t n_found; /* references of programs (kvbm_remote_set_find); each is an agent's user */
    bool gone;        /* the agent has forgotten it; the last reference frees it */
};

/** Find a peer's set, with the agent locked. Returns NULL when there is none. */
struct kvbm_remote_set *kvbm_find_set(const struct kvbm_agent *agent, uint64_t worker, uint32_t id);

struct kvbm_identity;

/**
 * Import a set that was parsed, and that a session has @told. Consumes @facts. As kvbm_blockset_import, but
 * for a set that was told others may have to make room.
 */
int kvbm_import_facts(struct kvbm_agent *agent, struct kvbm_facts *facts, bool told,
                      struct kvbm_remote_set **ret);

/** Invalidate a set that its owner has withdrawn at @generation, if none later is known. */
void kvbm_import_gone(struct kvbm_agent *agent, uint64_t worker, uint32_t id, uint64_t generation);

/** Forget other incarnations of a peer, with the agent locked. Returns the number of sets. */
long kvbm_drop_earlier(struct kvbm_agent *agent, const struct kvbm_identity *who);

/** Forget this incarnation of a peer, with the agent locked. Returns the number of sets. */
long kvbm_drop_incarnation(struct kvbm_agent *agent, const struct kvbm_identity *who);

/** Forget a peer with its sets, with the agent locked. Returns the number of sets. */
long kvbm_drop_peer(struct kvbm_agent *agent, uint32_t at);

#endif
