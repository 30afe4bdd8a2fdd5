// SPDX-License-Identifier: Apache-2.0
/* Lenders: offers, and the end of leases. lend.h has the drawing. */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "bm/registry/registry.h"
#include "peer/lease/lend_impl.h"
#include "peer/session/agent.h"

#define SHARE_PERCENT 25
#define MAX_LEASE_MS 60000
#define LINGER_NS (10 * KV_NS_PER_S)

struct kvbm_offer *kvbm_offer_find(const struct kvbm_lender *lender, uint64_t set)
{
    struct kvbm_offer *offer = lender->offers;

    while (offer && offer->facts->id != set)
        offer = offer->next;
    return offer;
}

void kvbm_offer_idle(struct kvbm_offer *offer)
{
    if (--offer->n_busy == 0)
        pthread_cond_broadcast(&offer->lender->changed);
}

void kvbm_lender_wake(struct kvbm_lender *lender)
{
    pthread_cond_broadcast(&lender->changed);
}

/* ---- borrowers ---- */

void kvbm_lessee_free(struct kvbm_lessee_of *lessee)
{
    struct kvbm_lessee_of **at = &lessee->borrower->sets;

    while (*at != lessee)
        at = &(*at)->next;
    *at = lessee->next;
    at = &lessee->offer->lessees;
    while (*at != lessee)
        at = &(*at)->next_of_offer;
    *at = lessee->next_of_offer;
    free(lessee);
}

struct kvbm_session *kvbm_borrower_put(struct kvbm_borrower *borrower)
{
    struct kvbm_session *session = borrower->session;

    if (--borrower->references)
        return NULL;
    while (borrower->sets)
        kvbm_lessee_free(borrower->sets);
    free(borrower);
    return session;
}

/* ---- ends of leases ---- */

void kvbm_loan_end(struct kvbm_offer *offer, struct kvbm_granted *lease, struct kvbm_granted **over)
{
    struct kvbm_granted *ended = kvbm_leases_end(&offer->leases, lease);

    if (!ended)
        return;
    ended->next = *over;
    *over = ended;
}

void kvbm_loan_release(struct kvbm_offer *offer, struct kvbm_granted *lease,
                       struct kvbm_granted **over)
{
    if (!lease->n_uses) {
        kvbm_loan_end(offer, lease, over);
    } else if (!lease->late) { /* else its reader has had some of that time */
        lease->late = true;
        kvbm_leases_renew(&offer->leases, lease, kv_now_ns() + LINGER_NS);
        kvbm_lender_wake(offer->lender);
    }
}

void kvbm_loans_give_back(struct kvbm_lender *lender, struct kvbm_granted *over)
{
    for (struct kvbm_granted *one; (one = over) != NULL;) {
        struct kvbm_loan *loan = one->hold;
        struct kvbm_session *session;

        over = one->next;
        loan->offer->source.unhold(loan->offer->source.arg, loan->hold);
        pthread_mutex_lock(&lender->lock);
        kvbm_offer_idle(loan->offer);
        session = kvbm_borrower_put(loan->borrower);
        pthread_mutex_unlock(&lender->lock);
        kvbm_session_put(session);
        free(loan);
        free(one);
    }
}

/*
 * End the leases of all offers whose time is over. With the lock. A session that is sending blocks of
 * such a lease gets LINGER_NS more to finish. If it hasn't by then, the peer has stopped reading, and the
 * blocks would stay lent: *@stuck becomes a reference to the session, which the caller aborts. Returns
 * the time at which the next lease ends.
 */
static uint64_t end_late(struct kvbm_lender *lender, struct kvbm_granted **over,
                         struct kvbm_session **stuck)
{
    uint64_t now = kv_now_ns(), next = UINT64_MAX;

    for (struct kvbm_offer *offer = lender->offers; offer; offer = offer->next) {
        struct kvbm_granted *first;

        while ((first = kvbm_leases_first(&offer->leases)) != NULL && first->expires_ns <= now &&
               !*stuck) {
            const struct kvbm_loan *loan = first->hold;

            lender->stats.reclaimed += !first->late;
            if (first->n_uses && first->late) {
                *stuck = kvbm_session_get(loan->borrower->session);
                kvbm_loan_end(offer, first, over);
            } else {
                kvbm_loan_release(offer, first, over);
            }
        }
        if (first)
            next = KV_MIN(next, first->expires_ns);
    }
    return next;
}

static void *end_leases(void *arg)
{
    struct kvbm_lender *lender = arg;

    pthread_mutex_lock(&lender->lock);
    while (!lender->stopping) {
        struct kvbm_granted *over = NULL;
        struct kvbm_session *stuck = NULL;
        uint64_t next = end_late(lender, &over, &stuck);

        if (!over && !stuck && kvbm_lender_tell_gone(lender))
            continue;
        if (over || stuck) {
            pthread_mutex_unlock(&lender->lock);
            if (stuck)
                kvbm_session_abort(stuck, -ETIMEDOUT, "it didn't read leased blocks in time");
            kvbm_session_put(stuck);
            kvbm_loans_give_back(lender, over);
            pthread_mutex_lock(&lender->lock);
        } else if (next == UINT64_MAX) {
            pthread_cond_wait(&lender->changed, &lender->lock);
        } else {
            (void)kv_cond_wait_until(&lender->changed, &lender->lock, next);
        }
    }
    pthread_mutex_unlock(&lender->lock);
    return NULL;
}

/* ---- lenders ---- */

int kvbm_lender_create(struct kvbm_agent *agent, struct kvbm_lender **ret)
{
    struct kvbm_lender *lender = calloc(1, sizeof(*lender));
    int err;

    if (!lender)
        return -ENOMEM;
    lender->agent = agent;
    pthread_mutex_init(&lender->lock, NULL);
    kv_cond_init(&lender->changed);
    lender->told = kvbm_told_create(lender);
    err = lender->told ? kvbm_lender_serve(lender) : -ENOMEM;
    if (err < 0) {
        kvbm_lender_destroy(lender);
        return err;
    }
    *ret = lender;
    return 0;
}

void kvbm_lender_destroy(struct kvbm_lender *lender)
{
    if (!lender)
        return;
    pthread_mutex_lock(&lender->lock);
    lender->stopping = true;
    kvbm_lender_wake(lender);
    pthread_mutex_unlock(&lender->lock);
    if (lender->started)
        pthread_join(lender->thread, NULL);
    kvbm_told_end(lender->told);
    pthread_cond_destroy(&lender->changed);
    pthread_mutex_destroy(&lender->lock);
    free(lender);
}

/* Start the thread with the first offer that can be leased. */
static int start_thread(struct kvbm_lender *lender)
{
    int err = 0;

    pthread_mutex_lock(&lender->lock);
    if (!lender->started)
        err = kv_thread_start(&lender->thread, "kvbm-leases", end_leases, lender);
    lender->started = lender->started || err == 0;
    pthread_mutex_unlock(&lender->lock);
    return err;
}

void kvbm_lender_get_stats(struct kvbm_lender *lender, struct kvbm_lender_stats *ret)
{
    pthread_mutex_lock(&lender->lock);
    *ret = lender->stats;
    ret->leases_now = ret->blocks_now = 0;
    for (const struct kvbm_offer *offer = lender->offers; offer; offer = offer->next) {
        ret->leases_now += offer->leases.n_leases + offer->leases.n_ended;
        ret->blocks_now += offer->leases.n_held;
    }
    pthread_mutex_unlock(&lender->lock);
}

/* ---- offers ---- */

static int refuse(const char *why)
{
    kv_log_error("kvbm", "a block set can't be lent", "why=\"%s\"", why);
    return -EINVAL;
}

static int read_source(const struct kvbm_block_source *source, uint32_t key_len,
                       struct kvbm_offer *offer)
{
    if (!source)
        return 0;
    if (!kv_sized(source, "kvbm_block_source"))
        return -EINVAL;
    if (source->size < offsetof(struct kvbm_block_source, registry) || !source->lookup ||
        !source->hold || !source->unhold)
        return refuse("its source lacks a function");
    memcpy(&offer->source, source, KV_MIN(source->size, sizeof(offer->source)));
    if (offer->source.registry && offer->source.registry->key_len != key_len)
        return refuse("its source's keys have another length than the agent's");
    offer->has_source = true;
    return 0;
}

/* Make the table of leases of an offer with a source. */
static int make_leases(const struct kvbm_blockset_opts *opts, struct kvbm_offer *offer)
{
    uint64_t n = opts->layout->config.num_blocks;
    uint32_t percent = KV_OPT(opts, lease_share, SHARE_PERCENT);
    kvbm_generation_t *table = offer->shared ? offer->shared->table : NULL;

    if (percent > 100 || n >= KVBM_NO_BLOCK)
        return refuse("its share is above 100 percent, or it has too many blocks");
    if (!table) {
        table = offer->own_table = calloc(n, sizeof(*table));
        if (!table)
            return -ENOMEM;
    }
    return kvbm_leases_init(&offer->leases, (uint32_t)n,
                            (uint32_t)KV_MAX(n * percent / 100, UINT64_C(1)), table);
}

/* Have peers told of keys that the source's registry drops. Without that they find out themselves. */
static void name_told(const struct kvbm_blockset_opts *opts, struct kvbm_offer *offer)
{
    int err = kvbm_told_type(offer->source.registry, &offer->told_type);

    offer->tells = err == 0;
    if (err < 0)
        kv_log_warn("kvbm", "peers won't hear of keys that are gone", "set=%u error=\"%s\"",
                    opts->id, strerror(-err));
}

static void free_offer(struct kvbm_offer *offer)
{
    kvbm_leases_fini(&offer->leases);
    kv_buf_fini(&offer->gone);
    kvbm_facts_put(offer->facts);
    free(offer->own_table);
    free(offer);
}

int kvbm_offer_create(struct kvbm_lender *lender, const struct kvbm_blockset_opts *opts,
                      struct kvbm_offer **ret)
{
    const struct kvbm_block_source *source = KV_OPT(opts, source, NULL);
    const struct kvbm_shared *shared = KV_OPT(opts, shared, NULL);
    struct kvbm_offer *offer;
    int err;

    *ret = NULL;
    if ((!source && !shared) || !opts->layout)
        return 0;
    offer = calloc(1, sizeof(*offer));
    if (!offer)
        return -ENOMEM;
    offer->lender = lender;
    offer->max_lease_ms = KV_OPT(opts, max_lease_ms, MAX_LEASE_MS);
    offer->shared = shared;
    err = read_source(source, lender->agent->key_len, offer);
    if (err == 0 && shared && !kvbm_shared_holds(shared, opts->layout))
        err = refuse("its layout isn't in its shared memory");
    if (err == 0 && source)
        err = make_leases(opts, offer);
    if (err == 0 && source && offer->source.registry)
        name_told(opts, offer);
    if (err == 0 && source)
        err = start_thread(lender);
    if (err < 0) {
        free_offer(offer);
        return err;
    }
    *ret = offer;
    return 0;
}

void kvbm_offer_begin(struct kvbm_offer *offer, struct kvbm_facts *facts)
{
    struct kvbm_lender *lender;

    if (!offer)
        return;
    lender = offer->lender;
    pthread_mutex_lock(&lender->lock);
    offer->facts = kvbm_facts_get(facts);
    offer->next = lender->offers;
    lender->offers = offer;
    pthread_mutex_unlock(&lender->lock);
}

/* Take an offer out of its lender's list, with the lock held; one that hasn't begun isn't in it. */
static void unlist(struct kvbm_offer *offer)
{
    struct kvbm_offer **at = &offer->lender->offers;

    while (*at && *at != offer)
        at = &(*at)->next;
    if (*at)
        *at = offer->next;
}

/* Next step of the end of an offer. */
struct ending {
    struct kvbm_granted *over;    /* give these back */
    struct kvbm_session *session; /* a reference, or NULL: take @request back, or abort it */
    uint64_t request;
};

/* Find a reply of a loan that wasn't taken back. */
static struct kvbm_use *next_use(const struct kvbm_loan *loan)
{
    struct kvbm_use *use = LIST_FIRST(&loan->uses);

    while (use && use->taken_back)
        use = LIST_NEXT(use, list);
    return use;
}

/*
 * End the leases of an offer, with the lock held. Those that a session reads begin nothing new, and end
 * once their replies are taken back. What a carrier sends can't be: after @patience_ns its session is
 * aborted.
 */
static void end_loans(struct kvbm_offer *offer, uint64_t patience_ns, struct ending *next)
{
    struct kvbm_leases *leases = &offer->leases;

    for (uint32_t i = leases->n_leases; i-- > 0;) {
        struct kvbm_granted *lease = leases->heap[i];
        const struct kvbm_loan *loan = lease->hold;
        struct kvbm_use *use = next_use(loan);

        lease->late = true;
        if (!lease->n_uses) {
            kvbm_loan_end(offer, lease, &next->over);
        } else if (use) {
            next->session = kvbm_session_get(loan->borrower->session);
            next->request = use->request;
            use->taken_back = true;
            return;
        }
    }
    if (leases->n_leases && !next->over && kv_now_ns() >= patience_ns) {
        const struct kvbm_loan *loan = leases->heap[0]->hold;

        next->session = kvbm_session_get(loan->borrower->session);
        kvbm_loan_end(offer, leases->heap[0], &next->over);
    }
}

/* Do what is next, without the lock. */
static void do_next(struct kvbm_lender *lender, const struct ending *next)
{
    if (next->session && next->request)
        kvbm_session_take_back(next->session, next->request, -ESTALE);
    else if (next->session)
        kvbm_session_abort(next->session, -ESHUTDOWN, "the set that it reads is withdrawn");
    kvbm_session_put(next->session);
    kvbm_loans_give_back(lender, next->over);
}

void kvbm_offer_destroy(struct kvbm_offer *offer)
{
    struct kvbm_lender *lender = offer ? offer->lender : NULL;
    uint64_t patience_ns = kv_now_ns() + LINGER_NS;

    if (!offer)
        return;
    pthread_mutex_lock(&lender->lock);
    offer->closed = true;
    unlist(offer);
    while (offer->n_busy) {
        struct ending next = {0};

        end_loans(offer, patience_ns, &next);
        if (next.over || next.session) {
            pthread_mutex_unlock(&lender->lock);
            do_next(lender, &next);
            pthread_mutex_lock(&lender->lock);
        } else if (offer->leases.n_leases) {
            (void)kv_cond_wait_until(&lender->changed, &lender->lock, patience_ns);
        } else {
            pthread_cond_wait(&lender->changed, &lender->lock);
        }
    }
    while (offer->lessees)
        kvbm_lessee_free(offer->lessees);
    pthread_mutex_unlock(&lender->lock);
    free_offer(offer);
}

bool kvbm_offer_transport(const struct kvbm_offer *offer, struct kvbm_transport_key *ret)
{
    if (!offer || !offer->shared)
        return false;
    *ret = (struct kvbm_transport_key){
        .transport = KVBM_TRANSPORT_SHM, .len = KVBM_SHARED_ID, .key = offer->shared->id};
    return true;
}
