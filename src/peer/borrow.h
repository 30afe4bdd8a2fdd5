// SPDX-License-Identifier: Apache-2.0
/** Insides of a reader's lease, for borrow.c and fetch.c. */
#ifndef KVBM_PEER_BORROW_H
#define KVBM_PEER_BORROW_H

#include "blockset.h"
#include "lend.h"

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
struct kvbm_fetch {
    struct kvbm_lease *lease;
    const struct kvbm_layout *to;
    const uint32_t *places, *to_blocks;
    uint32_t n;
    uint64_t deadline_ns;
    bool sums;
    uint8_t *ok;
};

/** Copy from shared memory. Returns the number of blocks that are right. */
long kvbm_fetch_shared(const struct kvbm_fetch *fetch);

/** Copy through the session. Returns the number of blocks that are right, or -ENOMEM. */
long kvbm_fetch_sent(const struct kvbm_fetch *fetch);

#endif
