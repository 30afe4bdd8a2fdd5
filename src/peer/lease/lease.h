// SPDX-License-Identifier: Apache-2.0
/**
 * Leases that an owner has granted: which blocks of a set are held for whom, and until when.
 *
 *   lessee (a session) ──► leases ──► blocks ──► held[block]: number of leases that have it
 *                            ▲                        │ the last one ends
 *        heap, by expiry ────┘                        ▼
 *                                               generation[block] + 1, then the source's hold ends
 *
 * A lease is reserved before its blocks are held, so that no moment sees more than the owner's share
 * held; it is granted when they are. It ends by release, with its session, or by its time. An
 * ended lease that a transport still sends from stays held until the transport is done with it.
 *
 * A generation changes at the end of a block's last lease, before the caller may give the block
 * back. A reader that still copies then finds another generation than it was granted.
 *
 * No locks: the caller has one around every call, and gives holds back after it has let it go.
 */
#ifndef KVBM_PEER_LEASE_LEASE_H
#define KVBM_PEER_LEASE_LEASE_H

#include "peer/set/shared.h"

#define KVBM_NO_BLOCK UINT32_MAX

/** A lease. */
struct kvbm_granted {
    struct kvbm_granted *prev, *next; /* of its lessee; next also: list of the ended */
    struct kvbm_lessee *lessee;       /* NULL: ended */
    uint64_t id, expires_ns;
    uint32_t heap_at;
    uint32_t n_uses; /* transports that read its blocks now */
    bool late;  /* over by its time or its reader; ends with its last use: nothing new begins */
    void *hold; /* the source's */
    uint32_t n;
    uint32_t blocks[]; /* KVBM_NO_BLOCK: a key without a block */
};

/** A session, to the table. Zeroed by its owner. */
struct kvbm_lessee {
    struct kvbm_granted *leases;
    uint32_t n_references; /* blocks of its leases, and reserved ones */
    uint32_t n_leases;
};

/** A place of the table of leases: the lease of an id, or the next free place. */
struct kvbm_lease_place {
    struct kvbm_granted *lease; /* NULL: free */
    uint32_t next_free;
};

struct kvbm_leases {
    uint32_t n_blocks, max_blocks;
    uint32_t n_held;     /* blocks with a lease */
    uint32_t n_reserved; /* blocks that may become held soon */
    uint32_t *held;      /* [n_blocks] */
    kvbm_generation_t *table;
    struct kvbm_lease_place *places;
    uint32_t n_places, free; /* free: first free place, KVBM_NO_BLOCK none */
    struct kvbm_granted **heap;
    uint32_t n_leases; /* in the heap */
    uint32_t n_ended;  /* ended ones that a transport still reads */
};

/**
 * Make a table for @n_blocks blocks, of which @max_blocks may be held. @table (the set's shared
 * memory) holds the generations and outlives the leases. Returns 0 or -ENOMEM.
 */
int kvbm_leases_init(struct kvbm_leases *leases, uint32_t n_blocks, uint32_t max_blocks,
                     kvbm_generation_t *table);

/** Free a table without leases. */
void kvbm_leases_fini(struct kvbm_leases *leases);

/**
 * Reserve up to @n blocks, before the source holds them. Returns their number, 0 when the share, the
 * session's part or its number of leases is reached. A grant or kvbm_leases_unreserve uses it up.
 */
uint32_t kvbm_leases_reserve(struct kvbm_leases *leases, struct kvbm_lessee *lessee, uint32_t n);
void kvbm_leases_unreserve(struct kvbm_leases *leases, struct kvbm_lessee *lessee, uint32_t n);

/**
 * Grant a lease of @n reserved blocks that @hold now holds. Returns 0; -ENOMEM (nothing has changed:
 * unreserve, and give the hold back). The table owns *@ret.
 */
int kvbm_leases_grant(struct kvbm_leases *leases, struct kvbm_lessee *lessee,
                      const uint32_t *blocks, uint32_t n, void *hold, uint64_t expires_ns,
                      struct kvbm_granted **ret);

/** Find a lease of a lessee. NULL: no such lease, another's, or it has ended. */
struct kvbm_granted *kvbm_leases_find(const struct kvbm_leases *leases,
                                      const struct kvbm_lessee *lessee, uint64_t id);

/** Set the end of a lease. */
void kvbm_leases_renew(struct kvbm_leases *leases, struct kvbm_granted *lease, uint64_t expires_ns);

/** Return the lease whose time ends first; NULL: there is none. */
struct kvbm_granted *kvbm_leases_first(const struct kvbm_leases *leases);

/** Keep a lease's blocks held, though it may end, until kvbm_leases_unuse. */
void kvbm_leases_use(struct kvbm_granted *lease);

/**
 * Let a used lease go. Returns the lease when it had ended meanwhile: give its hold back, and free()
 * it. NULL: it lives on, or others use it.
 */
struct kvbm_granted *kvbm_leases_unuse(struct kvbm_leases *leases, struct kvbm_granted *lease);

/**
 * End a lease. Returns it: give its hold back, and free() it. NULL: a transport uses it, and
 * kvbm_leases_unuse will return it.
 */
struct kvbm_granted *kvbm_leases_end(struct kvbm_leases *leases, struct kvbm_granted *lease);

#endif
