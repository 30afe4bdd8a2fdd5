// SPDX-License-Identifier: Apache-2.0
/** Insides of a reader's lease, for borrow.c and read.c. */
#ifndef KVBM_PEER_LEASE_BORROW_H
#define KVBM_PEER_LEASE_BORROW_H

#include "peer/lease/ask.h"
#include "peer/lease/lend.h"
#include "peer/set/blockset.h"

struct kvbm_lease {
    struct kvbm_session *session; /* a reference */
    struct kvbm_facts *facts;     /* a reference: the set's generation that was asked */
    uint64_t id;
    _Atomic uint64_t expires_ns;
    const struct kvbm_mapped *mapped; /* of facts; NULL: read through the session */
    uint32_t n;
    uint64_t *generations; /* [n] */
    uint32_t *blocks;      /* [n]; KVBM_NO_BLOCK: a key without one */
};

/** Pairs to read, checked. */
struct kvbm_reading {
    struct kvbm_lease *lease;
    const struct kvbm_layout *to;
    const uint32_t *places, *to_blocks;
    uint32_t n;
    uint64_t deadline_ns;
    bool sums;
    uint8_t *ok;
    uint32_t without; /* carriers that aren't to be used: a bit for each enum kvbm_by */
    const struct kvbm_carrier *by; /* NULL: through the session's sockets */
    uint16_t push;                 /* the carrier's type of request */
};

/**
 * Get the facts of a peer's set, as this agent has imported it, with a reference for the caller.
 * Returns 0, -ENOENT or -ESTALE.
 */
int kvbm_facts_of(struct kvbm_session *session, uint32_t id, struct kvbm_facts **ret);

/** Tell whether a question about keys is one that a peer takes. */
bool kvbm_may_ask(const struct kvbm_session *session, uint32_t group, const void *keys, size_t n);

/** Tell whether blocks of two layouts have the same regions. */
bool kvbm_same_blocks(const struct kvbm_layout_config *a, const struct kvbm_layout_config *b);

/** Copy from shared memory. Returns the number of blocks that are right. */
long kvbm_read_shared(const struct kvbm_reading *reading);

/**
 * Have the owner send, by a carrier or through the session. *@why (may be NULL) becomes 0, or the error of the
 * first request that has failed: the rest wasn't asked for. Returns the number of blocks that are
 * right, or -ENOMEM.
 */
long kvbm_read_sent(const struct kvbm_reading *reading, int *why);

/**
 * As kvbm_read_sent, by a carrier that both sides have; what it doesn't bring comes through the
 * session.
 */
long kvbm_read_best(const struct kvbm_reading *reading);

#endif
