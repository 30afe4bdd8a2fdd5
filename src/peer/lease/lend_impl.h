// SPDX-License-Identifier: Apache-2.0
/** Insides of a lender, for the files lend*.c. */
#ifndef KVBM_PEER_LEASE_LEND_IMPL_H
#define KVBM_PEER_LEASE_LEND_IMPL_H

#include <pthread.h>
#include <sys/queue.h>

#include "base/core/buf.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend.h"
#include "peer/lease/told.h"

/** Effect of a request on a lease: its reader may give up a request that is answered already. */
struct kvbm_effect {
    uint64_t request, lease;
    uint64_t before_ns; /* the lease's end without a renewal; 0: the request made the lease */
};

/** A session that asks, as long as it is open or one of its loans lives. */
struct kvbm_borrower {
    struct kvbm_session *session; /* a reference */
    uint32_t references;          /* the session's hooks, loans */
    bool gone;                    /* the session has ended */
    struct kvbm_lessee_of *sets;
    uint64_t n_effects; /* ever; the last max_effects are known */
    uint32_t max_effects;
    struct kvbm_effect effects[];
};

/** Leases of one session in one set. Freed with the borrower, or with the offer. */
struct kvbm_lessee_of {
    struct kvbm_lessee lessee;
    struct kvbm_offer *offer;
    struct kvbm_borrower *borrower;
    bool asked;                  /* has looked up keys: hears of those that are gone */
    struct kvbm_lessee_of *next; /* of the borrower */
    struct kvbm_lessee_of *next_of_offer;
};

struct kvbm_offer {
    struct kvbm_lender *lender;
    struct kvbm_offer *next;
    struct kvbm_facts *facts; /* NULL before it begins */
    struct kvbm_block_source source;
    bool has_source, closed;
    const struct kvbm_shared *shared;
    kvbm_generation_t *own_table; /* without shared memory */
    struct kvbm_leases leases;
    uint32_t max_lease_ms;
    bool tells;         /* keys have attachments of type told_type */
    uint32_t told_type; /* in the source's registry */
    struct kv_buf gone; /* of each key that is to be told to be gone: group (4 bytes), key */
    struct kvbm_lessee_of *lessees;
    uint32_t n_busy; /* loans, handlers and answers that use it, or its lender, without the lock */
};

/** A reply that a session sends from a loan's blocks. */
struct kvbm_use {
    LIST_ENTRY(kvbm_use) list;
    uint64_t request;
    bool taken_back;
};

/** A request for a lease, then the hold behind it. */
struct kvbm_loan {
    LIST_HEAD(kvbm_uses, kvbm_use) uses; /* under the lender's lock */
    struct kvbm_offer *offer;
    struct kvbm_borrower *borrower;
    struct kvbm_lessee_of *lessee;
    uint64_t request;
    uint32_t n, n_asked, time_ms; /* n: keys from the first on for which the share has room */
    void *hold;                   /* the source's */
};

struct kvbm_lender {
    struct kvbm_agent *agent;
    pthread_mutex_t lock;   /* all below, and all offers and borrowers */
    pthread_cond_t changed; /* an earlier end, a stop, or an offer that isn't busy any more */
    struct kvbm_offer *offers;
    struct kvbm_told *told;
    pthread_t thread;
    bool started, stopping;
    struct kvbm_lender_stats stats;
};

/** Find an offer by its set, with the lock held. */
struct kvbm_offer *kvbm_offer_find(const struct kvbm_lender *lender, uint64_t set);

/**
 * End a lease with the lock held, and add its loan to @over, unless a transport uses it.
 */
void kvbm_loan_end(struct kvbm_offer *offer, struct kvbm_granted *lease,
                   struct kvbm_granted **over);

/**
 * End a lease with its last use, or now without one, as kvbm_loan_end. A session that still sends from the
 * lease has LINGER_NS for that. With the lock held.
 */
void kvbm_loan_release(struct kvbm_offer *offer, struct kvbm_granted *lease,
                       struct kvbm_granted **over);

/** Give back the holds of ended leases, and free them. Without the lock. */
void kvbm_loans_give_back(struct kvbm_lender *lender, struct kvbm_granted *over);

/** An offer is used no more by a handler or a loan. With the lock held. */
void kvbm_offer_idle(struct kvbm_offer *offer);

/** Free what a session has of a set: no lease, and no loan. With the lock held. */
void kvbm_lessee_free(struct kvbm_lessee_of *lessee);

/** Drop a reference, with the lock held. Returns a session to put without the lock, or NULL. */
struct kvbm_session *kvbm_borrower_put(struct kvbm_borrower *borrower);

/** Find a lease of a session, whatever its set, with the lock held. NULL: none, or no @borrower. */
struct kvbm_granted *kvbm_loan_find(const struct kvbm_borrower *borrower, uint64_t id,
                                    struct kvbm_offer **ret);

/**
 * Find the lease that a request reads and check its places, with the lock held. The lease's blocks
 * stay held until kvbm_loan_unuse. Returns 0; -ESTALE; -ERANGE; -EOPNOTSUPP (not the CPU's memory).
 */
int kvbm_loan_use(const struct kvbm_borrower *borrower, const struct kvbm_wanted *wanted,
                  struct kvbm_offer **offer, struct kvbm_granted **ret);

/** Let a lease in use go, of which @bytes were sent. Without the lock, from any thread. */
void kvbm_loan_unuse(struct kvbm_lender *lender, struct kvbm_offer *offer,
                     struct kvbm_granted *lease, uint64_t bytes);

/** Note what a request has done to a lease, with the lock held. */
void kvbm_effect_note(struct kvbm_borrower *borrower, uint64_t request,
                      const struct kvbm_granted *lease, uint64_t before_ns);

/** Keep the undoing of earlier renewals from ending a lease before @until_ns. With the lock held. */
void kvbm_effects_hold(struct kvbm_borrower *borrower, const struct kvbm_granted *lease,
                       uint64_t until_ns);

/** Undo what a request has done that its reader has given up (lend_undo.c). A kvbm_serve_fn. */
void kvbm_serve_cancel(void *arg, struct kvbm_session *session, struct kvbm_request *request);

/** Tell the thread that a lease may end earlier than it waits for. With the lock held. */
void kvbm_lender_wake(struct kvbm_lender *lender);

/**
 * Send a note of keys that are gone, if some are queued. Called and returns with the lock. Returns
 * whether there was one.
 */
bool kvbm_lender_tell_gone(struct kvbm_lender *lender);

/** Serve the requests of an agent. Returns 0 or a negative errno. */
int kvbm_lender_serve(struct kvbm_lender *lender);

/** Send leased blocks through the session (lend_read.c). A kvbm_serve_fn; @arg is the lender. */
void kvbm_serve_read(void *arg, struct kvbm_session *session, struct kvbm_request *request);

/** Serve those about the agent's carriers, too (lend_push.c). */
int kvbm_lender_serve_carriers(struct kvbm_lender *lender);

#endif
