// SPDX-License-Identifier: Apache-2.0
/*
 * Requests that their reader has given up when they were answered already. A reader gives up at a
 * deadline, also while this side stands still; then the request and its CANCEL are read together, and
 * the reader knows nothing of a lease that was granted meanwhile, nor of a renewal.
 *
 *   LEASE or RENEW ──► answer, and a note of what was done
 *   CANCEL ──────────► the lease is released, or ends when it did before
 *
 * Threads of a reader may renew a lease at the same time, and one of them give up. The notes of the
 * lease's earlier renewals then hold the end that the later one was granted: it isn't undone with them.
 *
 * A reader has at most max_requests requests open. While an answer is on its way to the reader, those
 * may be answered, and as many again. So twice as many notes are enough.
 */
#include "peer/lease/lend_impl.h"

void kvbm_effect_note(struct kvbm_borrower *borrower, uint64_t request,
                      const struct kvbm_granted *lease, uint64_t before_ns)
{
    borrower->effects[borrower->n_effects++ % borrower->max_effects] =
        (struct kvbm_effect){.request = request, .lease = lease->id, .before_ns = before_ns};
}

/* Return the @i-th of the last notes, newest first, or NULL. */
static struct kvbm_effect *effect_at(struct kvbm_borrower *borrower, uint64_t i)
{
    uint64_t n = KV_MIN(borrower->n_effects, (uint64_t)borrower->max_effects);

    return i < n ? &borrower->effects[(borrower->n_effects - 1 - i) % borrower->max_effects] : NULL;
}

void kvbm_effects_hold(struct kvbm_borrower *borrower, const struct kvbm_granted *lease,
                       uint64_t until_ns)
{
    struct kvbm_effect *effect;

    for (uint64_t i = 0; (effect = effect_at(borrower, i)) != NULL; i++) {
        if (effect->lease == lease->id && effect->before_ns)
            effect->before_ns = KV_MAX(effect->before_ns, until_ns);
    }
}

/* Find the note of a request, with the lock held. */
static struct kvbm_effect *find(struct kvbm_borrower *borrower, uint64_t request)
{
    struct kvbm_effect *effect;

    for (uint64_t i = 0; (effect = effect_at(borrower, i)) != NULL; i++) {
        if (effect->request == request)
            break;
    }
    return effect;
}

/* Undo what is noted, with the lock held. */
static void undo(struct kvbm_borrower *borrower, struct kvbm_effect *effect,
                 struct kvbm_granted **over)
{
    struct kvbm_offer *offer;
    struct kvbm_granted *lease = kvbm_loan_find(borrower, effect->lease, &offer);

    effect->request = 0; /* no request's id */
    if (!lease || lease->late)
        return;
    if (!effect->before_ns) {
        kvbm_loan_release(offer, lease, over);
        return;
    }
    if (effect->before_ns >= lease->expires_ns)
        return; /* a later renewal holds */
    kvbm_leases_renew(&offer->leases, lease, effect->before_ns);
    kvbm_lender_wake(offer->lender);
}

void kvbm_serve_cancel(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    struct kvbm_borrower *borrower = *kvbm_session_slot(session, KVBM_LEND_SLOT);
    struct kvbm_granted *over = NULL;
    struct kvbm_effect *effect;

    if (!borrower || !request->id)
        return;
    pthread_mutex_lock(&lender->lock);
    effect = find(borrower, request->id);
    if (effect)
        undo(borrower, effect, &over);
    pthread_mutex_unlock(&lender->lock);
    kvbm_loans_give_back(lender, over);
}
