// SPDX-License-Identifier: Apache-2.0
/**
 * Lending: how an agent answers its peers' lookups and leases, and sends leased blocks.
 *
 *   session ──► borrower ──► lessee (per set) ──► leases (lease.h)
 *                                 ▲                 │ hold
 *   block set ──► offer ──────────┘                 ▼
 *                   │                             loan ──► hold of the source
 *                   └──► source, shared memory
 *
 * A loan lives from the request until the source's hold is given back. The lender's lock guards all
 * of it; sources and sessions are called without the lock. One thread ends leases whose time is over:
 * it sleeps while there are none.
 */
#ifndef KVBM_PEER_LEASE_LEND_H
#define KVBM_PEER_LEASE_LEND_H

#include "peer/lease/lease.h"
#include "peer/session/session.h"
#include "peer/set/blockset.h"

/** Types of requests and notes (docs/formats.md). The numbers are stable (wire). */
enum kvbm_block_request {
    KVBM_ASK_LOOKUP = 16,
    KVBM_ASK_LEASE = 17,
    KVBM_ASK_RENEW = 18,
    KVBM_ASK_RELEASE = 19, /* a note, too */
    KVBM_ASK_READ = 20,
    KVBM_ASK_MEMORY = 21,
    KVBM_TELL_GONE = 22, /* a note */
    KVBM_ASK_UCX = 23,   /* connect by UCX; as a note: disconnect */
    KVBM_ASK_PUSH = 24,  /* read by UCX */
    KVBM_ASK_NIXL = 25,  /* as KVBM_ASK_UCX, by NIXL */
    KVBM_ASK_NIXL_PUSH = 26,
    KVBM_TELL_PUSHED = 27 /* a note: what a reader has given up is sent */
};

#define KVBM_LEND_SLOT 0    /* of kvbm_session_slot */
#define KVBM_CARRIER_SLOT 1 /* and the next ones, by enum kvbm_by */
#define KVBM_LEASE_MS 10000
#define KVBM_MAX_READ_BYTES (4u << 20) /* of one request, unless it is for one block */
#define KVBM_MAX_PUSH_BYTES (8u << 20) /* the same by a carrier; readers ask for as much */

struct kvbm_lender;
struct kvbm_offer;

/** Serve an agent's sessions: before its first one. Returns 0, -ENOMEM or -ENOSPC. */
int kvbm_lender_create(struct kvbm_agent *agent, struct kvbm_lender **ret);

/** Free a lender, after the agent's event thread and its offers. NULL is a no-op. */
void kvbm_lender_destroy(struct kvbm_lender *lender);

/**
 * Make an offer of a set: *@ret is NULL when its options name neither a source nor shared memory.
 * Nobody sees it before kvbm_offer_begin. Returns 0; -EINVAL (options); -ENOMEM; -EAGAIN (no thread).
 */
int kvbm_offer_create(struct kvbm_lender *lender, const struct kvbm_blockset_opts *opts,
                      struct kvbm_offer **ret);

/** Offer @facts, of which the offer takes a reference of its own. NULL @offer is a no-op. */
void kvbm_offer_begin(struct kvbm_offer *offer, struct kvbm_facts *facts);

/**
 * End all leases of an offer, wait until all holds are given back, free it. Sessions that still send
 * its blocks are aborted. NULL is a no-op. Not with the agent's lock held.
 */
void kvbm_offer_destroy(struct kvbm_offer *offer);

/** Describe an offer's shared memory as a transport. Returns false when it has none. */
bool kvbm_offer_transport(const struct kvbm_offer *offer, struct kvbm_transport_key *ret);

/**
 * Queue keys of a set for a note to the peers that asked about the set: they are gone. Any thread,
 * with any lock but the lender's. Returns 0 or -ENOENT.
 */
int kvbm_lender_gone(struct kvbm_lender *lender, uint32_t set, uint32_t group, const void *keys,
                     size_t n);

/** The same for a key that a registry has dropped: of all sets whose sources name that registry. */
void kvbm_lender_gone_from(struct kvbm_lender *lender, const struct kvbm_registry *registry,
                           uint32_t group, const void *key);

/** Numbers of a lender, for tests and metrics. */
struct kvbm_lender_stats {
    uint64_t leases_now, blocks_now; /* blocks held by leases */
    uint64_t leases, reclaimed, refused;
    uint64_t reads, read_bytes; /* bytes of blocks handed to sessions and carriers */
    uint64_t pushes;            /* reads by carriers */
    uint64_t gone;              /* keys told to be gone */
};
void kvbm_lender_get_stats(struct kvbm_lender *lender, struct kvbm_lender_stats *ret);

#endif
