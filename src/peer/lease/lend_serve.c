// SPDX-License-Identifier: Apache-2.0
/* Answers to peers' requests about blocks. Handlers run on the agent's event thread. */
#include <fcntl.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/le.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend_impl.h"
#include "peer/session/agent.h"
#include "peer/session/net.h"

/* ---- sessions ---- */

static void begin_session(struct kvbm_session *session)
{
    uint32_t max_effects = 2 * session->net->max_requests;
    struct kvbm_borrower *borrower =
        calloc(1, sizeof(*borrower) + max_effects * sizeof(struct kvbm_effect));

    if (borrower) {
        borrower->references = 1;
        borrower->max_effects = max_effects;
        borrower->session = kvbm_session_get(session);
    }
    *kvbm_session_slot(session, KVBM_LEND_SLOT) = borrower; /* NULL: its leases are -ENOMEM */
}

/* Give all back that a session has: its peer has died, or hung up. */
static void end_session(struct kvbm_lender *lender, struct kvbm_session *session)
{
    void **slot = kvbm_session_slot(session, KVBM_LEND_SLOT);
    struct kvbm_borrower *borrower = KV_STEAL(*slot);
    struct kvbm_granted *over = NULL;

    if (!borrower)
        return;
    pthread_mutex_lock(&lender->lock);
    borrower->gone = true;
    for (struct kvbm_lessee_of *set = borrower->sets; set; set = set->next) {
        while (set->lessee.leases)
            kvbm_loan_end(set->offer, set->lessee.leases, &over);
    }
    pthread_mutex_unlock(&lender->lock);
    kvbm_loans_give_back(lender, over);
    pthread_mutex_lock(&lender->lock);
    session = kvbm_borrower_put(borrower);
    pthread_mutex_unlock(&lender->lock);
    kvbm_session_put(session);
}

static void watch_session(void *arg, struct kvbm_session *session, bool begun)
{
    if (begun)
        begin_session(session);
    else
        end_session(arg, session);
}

/* ---- with the lock held ---- */

/* Find the offer of a set as the peer knows it, and mark it busy. Returns 0; -ENOENT; -ESTALE. */
static int take_offer(const struct kvbm_lender *lender, uint64_t set, uint64_t generation,
                      struct kvbm_offer **ret)
{
    struct kvbm_offer *offer = kvbm_offer_find(lender, set);

    if (!offer || !offer->has_source)
        return -ENOENT;
    if (offer->facts->generation != generation)
        return -ESTALE;
    offer->n_busy++;
    *ret = offer;
    return 0;
}

static struct kvbm_lessee_of *lessee_of(struct kvbm_borrower *borrower, struct kvbm_offer *offer)
{
    struct kvbm_lessee_of *set = borrower->sets;

    while (set && set->offer != offer)
        set = set->next;
    if (set)
        return set;
    set = calloc(1, sizeof(*set));
    if (!set)
        return NULL;
    set->offer = offer;
    set->borrower = borrower;
    set->next = borrower->sets;
    borrower->sets = set;
    set->next_of_offer = offer->lessees;
    offer->lessees = set;
    return set;
}

/* Note that a session wants to hear of keys that are gone. */
static void note_listener(struct kvbm_borrower *borrower, struct kvbm_offer *offer)
{
    struct kvbm_lessee_of *set = borrower ? lessee_of(borrower, offer) : NULL;

    if (set)
        set->asked = true;
}

struct kvbm_granted *kvbm_loan_find(const struct kvbm_borrower *borrower, uint64_t id,
                                    struct kvbm_offer **ret)
{
    struct kvbm_granted *lease = NULL;

    for (struct kvbm_lessee_of *set = borrower ? borrower->sets : NULL; set && !lease;
         set = set->next) {
        lease = kvbm_leases_find(&set->offer->leases, &set->lessee, id);
        *ret = set->offer;
    }
    return lease;
}

/* ---- lookup ---- */

static void serve_lookup(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    uint8_t tiers[KVBM_MAX_ASKED];
    struct kvbm_offer *offer = NULL;
    struct kvbm_asked asked;
    int err = kvbm_asked_read(request->body, request->len, lender->agent->key_len, &asked);

    if (err == 0) {
        pthread_mutex_lock(&lender->lock);
        err = take_offer(lender, asked.set, asked.generation, &offer);
        if (err == 0)
            note_listener(*kvbm_session_slot(session, KVBM_LEND_SLOT), offer);
        pthread_mutex_unlock(&lender->lock);
    }
    if (err != 0) {
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
        return;
    }
    offer->source.lookup(offer->source.arg, asked.group, asked.keys, asked.n, tiers);
    for (uint32_t i = 0; i < asked.n && offer->tells; i++) {
        if (tiers[i] != KVBM_NO_TIER)
            kvbm_told_key(lender->told, offer->source.registry, offer->told_type, asked.group,
                          asked.keys + (size_t)i * lender->agent->key_len, lender->agent->key_len);
    }
    pthread_mutex_lock(&lender->lock);
    kvbm_offer_idle(offer);
    pthread_mutex_unlock(&lender->lock);
    (void)kvbm_session_reply(session, request->id, 0, tiers, asked.n, -1);
}

/* ---- lease ---- */

/* Return the number of keys up to the last one with a block, or -EIO for numbers beyond the set. */
static long used(const struct kvbm_offer *offer, const uint32_t *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (blocks[i] != KVBM_NO_BLOCK && blocks[i] >= offer->leases.n_blocks)
            return -EIO;
    }
    while (n && blocks[n - 1] == KVBM_NO_BLOCK)
        n--;
    return n ? (long)n : -ENOENT;
}

/* Write the answer to a granted lease, with the lock held. */
static void tell(const struct kvbm_offer *offer, const struct kvbm_granted *lease, uint32_t time_ms,
                 struct kv_buf *to)
{
    uint8_t *at;

    kvbm_told_write(to, lease->id, time_ms, lease->n);
    if (kv_buf_reserve(to, (size_t)lease->n * 12) < 0)
        return;
    at = (uint8_t *)to->data + to->len;
    for (uint32_t i = 0; i < lease->n; i++, at += 8) {
        uint32_t block = lease->blocks[i];

        /* The generation of a held block doesn't change. */
        kv_put_le64(at, block == KVBM_NO_BLOCK ? 0
                                               : atomic_load_explicit(&offer->leases.table[block],
                                                                      memory_order_relaxed));
    }
    to->len += (size_t)lease->n * 8;
    for (uint32_t i = 0; i < lease->n; i++)
        kvbm_put32(to, lease->blocks[i]);
}

/* Turn a hold into a lease, with the lock held. */
static int grant(struct kvbm_loan *loan, int status, const uint32_t *blocks, struct kv_buf *reply,
                 uint64_t *id)
{
    struct kvbm_offer *offer = loan->offer;
    struct kvbm_lender *lender = offer->lender;
    struct kvbm_granted *lease = NULL;
    uint64_t ends = kv_now_ns() + loan->time_ms * KV_NS_PER_MS;
    long n = status < 0 ? status : used(offer, blocks, loan->n);

    if (n > 0 && (loan->borrower->gone || offer->closed))
        n = loan->borrower->gone ? -EPIPE : -ESTALE;
    kvbm_leases_unreserve(&offer->leases, &loan->lessee->lessee,
                          n > 0 ? loan->n - (uint32_t)n : loan->n);
    if (n <= 0)
        return (int)n;
    if (kvbm_leases_grant(&offer->leases, &loan->lessee->lessee, blocks, (uint32_t)n, loan, ends,
                          &lease) < 0) {
        kvbm_leases_unreserve(&offer->leases, &loan->lessee->lessee, (uint32_t)n);
        return -ENOMEM;
    }
    *id = lease->id;
    kvbm_effect_note(loan->borrower, loan->request, lease, 0);
    lender->stats.leases++;
    tell(offer, lease, loan->time_ms, reply);
    if (kvbm_leases_first(&offer->leases) == lease)
        kvbm_lender_wake(lender);
    return 0;
}

/* Write an answer without a lease: the first @n keys have no block. */
static void tell_none(uint32_t n, uint32_t time_ms, struct kv_buf *to)
{
    kvbm_told_write(to, 0, time_ms, n);
    if (kv_buf_reserve(to, (size_t)n * 12) < 0)
        return;
    memset(to->data + to->len, 0, (size_t)n * 8);
    to->len += (size_t)n * 8;
    for (uint32_t i = 0; i < n; i++)
        kvbm_put32(to, KVBM_NO_BLOCK);
}

/* Answer a request that became no lease. The share may have had room for the first keys only: when
 * none of them has a block, those behind may have some, and the reader asks for them next. */
static void refuse(const struct kvbm_loan *loan, int err)
{
    struct kv_buf reply = KV_BUF_INIT;

    if (err == -ENOENT && loan->n < loan->n_asked) {
        tell_none(loan->n, loan->time_ms, &reply);
        err = reply.error;
    }
    (void)kvbm_session_reply(loan->borrower->session, loan->request, err, reply.data,
                             err ? 0 : reply.len, -1);
    kv_buf_fini(&reply);
}

/* Give a loan back that became no lease. */
static void drop_loan(struct kvbm_loan *loan, bool held)
{
    struct kvbm_lender *lender = loan->offer->lender;
    struct kvbm_session *session;

    if (held)
        loan->offer->source.unhold(loan->offer->source.arg, loan->hold);
    pthread_mutex_lock(&lender->lock);
    lender->stats.refused++;
    kvbm_offer_idle(loan->offer);
    session = kvbm_borrower_put(loan->borrower);
    pthread_mutex_unlock(&lender->lock);
    kvbm_session_put(session);
    free(loan);
}

/* Answer a granted lease; a peer that has given the request up doesn't know its lease. */
static void answer(struct kvbm_lender *lender, struct kvbm_borrower *borrower, uint64_t request,
                   uint64_t id, const struct kv_buf *reply)
{
    int err = kvbm_session_reply(borrower->session, request, reply->error, reply->data,
                                 reply->error ? 0 : reply->len, -1);
    struct kvbm_granted *lease, *over = NULL;
    struct kvbm_offer *offer;

    if (err == 0 && !reply->error)
        return;
    pthread_mutex_lock(&lender->lock);
    lease = kvbm_loan_find(borrower, id, &offer);
    if (lease)
        kvbm_loan_release(offer, lease, &over); /* a peer that guesses its number may read it */
    pthread_mutex_unlock(&lender->lock);
    kvbm_loans_give_back(lender, over);
}

/*
 * The source has held the blocks of a request for a lease: on any thread, at any time. The loan's count
 * of the offer ends with its lease, perhaps at once. A count of this function's own keeps offer and
 * lender until the last lines.
 */
static void held(void *to, int status, const uint32_t *blocks, void *hold)
{
    struct kvbm_loan *loan = to;
    struct kvbm_borrower *borrower = loan->borrower;
    struct kvbm_offer *offer = loan->offer;
    struct kvbm_lender *lender = offer->lender;
    struct kv_buf reply = KV_BUF_INIT;
    uint64_t request = loan->request, id = 0;
    struct kvbm_session *session;
    int err;

    loan->hold = hold;
    pthread_mutex_lock(&lender->lock);
    offer->n_busy++;
    borrower->references++;
    err = grant(loan, status, blocks, &reply, &id);
    pthread_mutex_unlock(&lender->lock);
    if (err < 0) {
        refuse(loan, err);
        drop_loan(loan, status == 0);
    } else {
        answer(lender, borrower, request, id, &reply);
    }
    pthread_mutex_lock(&lender->lock);
    session = kvbm_borrower_put(borrower);
    kvbm_offer_idle(offer); /* once unlocked, another thread may free both */
    pthread_mutex_unlock(&lender->lock);
    kvbm_session_put(session);
    kv_buf_fini(&reply);
}

/* Make a loan for a request, with the lock held: reserve its blocks. */
static int open_loan(struct kvbm_lender *lender, struct kvbm_borrower *borrower,
                     const struct kvbm_asked *asked, struct kvbm_loan *loan)
{
    struct kvbm_offer *offer;
    int err = take_offer(lender, asked->set, asked->generation, &offer);

    if (err < 0)
        return err;
    loan->offer = offer;
    loan->lessee = lessee_of(borrower, offer);
    loan->n =
        loan->lessee ? kvbm_leases_reserve(&offer->leases, &loan->lessee->lessee, asked->n) : 0;
    if (!loan->n) {
        kvbm_offer_idle(offer);
        lender->stats.refused++;
        return loan->lessee ? -ENOSPC : -ENOMEM;
    }
    loan->n_asked = asked->n;
    loan->time_ms =
        KV_MIN(asked->time_ms ? asked->time_ms : (uint32_t)KVBM_LEASE_MS, offer->max_lease_ms);
    loan->borrower = borrower;
    borrower->references++;
    return 0;
}

static void serve_lease(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    struct kvbm_borrower *borrower = *kvbm_session_slot(session, KVBM_LEND_SLOT);
    struct kvbm_loan *loan = calloc(1, sizeof(*loan));
    struct kvbm_asked asked;
    int err = loan && borrower
                  ? kvbm_asked_read(request->body, request->len, lender->agent->key_len, &asked)
                  : -ENOMEM;

    if (err == 0) {
        loan->request = request->id;
        pthread_mutex_lock(&lender->lock);
        err = open_loan(lender, borrower, &asked, loan);
        pthread_mutex_unlock(&lender->lock);
    }
    if (err != 0) {
        free(loan);
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
        return;
    }
    loan->offer->source.hold(loan->offer->source.arg, asked.group, asked.keys, loan->n, held, loan);
}

/* ---- renew and release ---- */

/* Let a lease end later, with the lock held. Never earlier: its reader may count on what it has. */
static void renew(struct kvbm_borrower *borrower, uint64_t request, struct kvbm_offer *offer,
                  struct kvbm_granted *lease, uint32_t time_ms)
{
    uint64_t before = lease->expires_ns, after = kv_now_ns() + time_ms * KV_NS_PER_MS;

    kvbm_effects_hold(borrower, lease, after);
    if (after <= before)
        return;
    kvbm_leases_renew(&offer->leases, lease, after);
    kvbm_effect_note(borrower, request, lease, before);
    kvbm_lender_wake(offer->lender);
}

static void serve_renew(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    struct kvbm_borrower *borrower = *kvbm_session_slot(session, KVBM_LEND_SLOT);
    struct kv_buf reply = KV_BUF_INIT;
    struct kvbm_granted *lease;
    struct kvbm_offer *offer;
    uint32_t time_ms;
    uint64_t id;
    int err = kvbm_renewal_read(request->body, request->len, &id, &time_ms);

    if (err == 0) {
        pthread_mutex_lock(&lender->lock);
        lease = kvbm_loan_find(borrower, id, &offer);
        if (lease && lease->late)
            lease = NULL;
        if (lease) {
            time_ms = KV_MIN(time_ms ? time_ms : (uint32_t)KVBM_LEASE_MS, offer->max_lease_ms);
            renew(borrower, request->id, offer, lease, time_ms);
        }
        pthread_mutex_unlock(&lender->lock);
        err = lease ? 0 : -ESTALE;
    }
    if (err == 0) {
        kvbm_renewal_write(&reply, 0, time_ms);
        err = reply.error;
    }
    (void)kvbm_session_reply(session, request->id, err, reply.data, err ? 0 : reply.len, -1);
    kv_buf_fini(&reply);
}

static void serve_release(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    struct kvbm_granted *lease = NULL, *over = NULL;
    struct kvbm_offer *offer;
    uint64_t id;
    int err = kvbm_number_read(request->body, request->len, &id);

    if (err == 0) {
        pthread_mutex_lock(&lender->lock);
        lease = kvbm_loan_find(*kvbm_session_slot(session, KVBM_LEND_SLOT), id, &offer);
        if (lease)
            kvbm_loan_release(offer, lease, &over);
        pthread_mutex_unlock(&lender->lock);
        kvbm_loans_give_back(lender, over);
        err = lease ? 0 : -ESTALE;
    }
    if (request->id)
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
}

/* ---- shared memory ---- */

static void serve_memory(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    uint8_t id[KVBM_SHARED_ID] = {0};
    uint64_t set;
    int err = kvbm_number_read(request->body, request->len, &set), fd = -1;

    if (err == 0 && !kvbm_session_takes_fds(session))
        err = -EOPNOTSUPP;
    if (err == 0) {
        const struct kvbm_offer *offer;

        pthread_mutex_lock(&lender->lock);
        offer = kvbm_offer_find(lender, set);
        err = offer && offer->shared ? 0 : -ENOENT;
        if (err == 0) {
            memcpy(id, offer->shared->id, sizeof(id));
            fd = fcntl(offer->shared->fd, F_DUPFD_CLOEXEC, 0);
            err = fd < 0 ? -errno : 0;
        }
        pthread_mutex_unlock(&lender->lock);
    }
    (void)kvbm_session_reply(session, request->id, err, id, err ? 0 : sizeof(id), fd);
    if (fd >= 0)
        close(fd);
}

/* ---- the service ---- */

static const struct {
    uint16_t type;
    kvbm_serve_fn fn;
} services[] = {
    {KVBM_ASK_LOOKUP, serve_lookup},  {KVBM_ASK_LEASE, serve_lease},
    {KVBM_ASK_RENEW, serve_renew},    {KVBM_ASK_RELEASE, serve_release},
    {KVBM_ASK_MEMORY, serve_memory},  {KVBM_ASK_READ, kvbm_serve_read},
    {KVBM_CANCEL, kvbm_serve_cancel},
};

int kvbm_lender_serve(struct kvbm_lender *lender)
{
    int err = kvbm_agent_watch(lender->agent, watch_session, lender);

    for (size_t i = 0; i < KV_COUNT(services) && err == 0; i++)
        err = kvbm_agent_serve(lender->agent, services[i].type, services[i].fn, lender);
    return err == 0 ? kvbm_lender_serve_carriers(lender) : err;
}
