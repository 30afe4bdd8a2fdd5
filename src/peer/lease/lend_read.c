// SPDX-License-Identifier: Apache-2.0
/* Leased blocks through the session, the owner's side. Handlers run on the agent's event thread. */
#include "base/core/clock.h"
#include "base/core/le.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend_impl.h"
#include "peer/session/agent.h"

/* Blocks that a session sends from memory. */
struct sending {
    struct kvbm_lender *lender;
    struct kvbm_offer *offer;
    struct kvbm_granted *lease;
    struct kvbm_use use;
    size_t n_pieces;
    struct iovec *pieces; /* the first is sums, when they are wanted */
    uint8_t *sums;
    uint64_t bytes; /* of blocks in the pieces */
};

static void free_sending(struct sending *sending)
{
    free(sending->pieces);
    free(sending->sums);
    free(sending);
}

void kvbm_loan_unuse(struct kvbm_lender *lender, struct kvbm_offer *offer,
                     struct kvbm_granted *lease, uint64_t bytes)
{
    struct kvbm_granted *over;

    pthread_mutex_lock(&lender->lock);
    lender->stats.read_bytes += bytes;
    over = kvbm_leases_unuse(&offer->leases, lease);
    if (over)
        over->next = NULL;
    else if (lease->late && !lease->n_uses)
        kvbm_loan_end(offer, lease, &over);
    pthread_mutex_unlock(&lender->lock);
    kvbm_loans_give_back(lender, over);
}

/* Nothing reads the pieces any more. */
static void sent(void *arg)
{
    struct sending *sending = arg;

    pthread_mutex_lock(&sending->lender->lock);
    LIST_REMOVE(&sending->use, list);
    pthread_mutex_unlock(&sending->lender->lock);
    kvbm_loan_unuse(sending->lender, sending->offer, sending->lease, sending->bytes);
    free_sending(sending);
}

/* Add a piece, or lengthen the last one. */
static void add_piece(struct sending *sending, void *from, size_t len)
{
    struct iovec *last = sending->n_pieces ? &sending->pieces[sending->n_pieces - 1] : NULL;

    if (last && (char *)last->iov_base + last->iov_len == from) {
        last->iov_len += len;
        return;
    }
    sending->pieces[sending->n_pieces++] = (struct iovec){from, len};
}

/* Name the pieces of a block, and hash it. Its numbers were checked when it was leased. */
static void add_block(struct sending *sending, uint32_t block, uint8_t *sum)
{
    const struct kvbm_layout *layout = sending->offer->facts->layout;
    struct kvbm_view view;
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    (void)XXH3_128bits_reset(&state);
    for (uint32_t layer = 0; layer < layout->config.num_layers; layer++) {
        for (uint32_t outer = 0; outer < layout->config.outer_dim; outer++) {
            (void)kvbm_layout_region(layout, block, layer, outer, &view);
            add_piece(sending, (void *)(uintptr_t)view.addr, view.len);
            if (sum)
                kv_hash_update(&state, (void *)(uintptr_t)view.addr, view.len);
        }
    }
    if (sum)
        kv_hash_done(&state, sum);
}

/* Gather what a request wants from a lease in use. */
static int gather(struct sending *sending, const struct kvbm_wanted *wanted)
{
    const struct kvbm_layout *layout = sending->offer->facts->layout;
    uint64_t regions = (uint64_t)layout->config.num_layers * layout->config.outer_dim;
    uint64_t n_pieces = wanted->n * regions + 1;

    if (n_pieces > KVBM_MAX_PIECES ||
        (wanted->n > 1 && layout->shape.region_bytes * regions * wanted->n > KVBM_MAX_READ_BYTES))
        return -EMSGSIZE;
    sending->pieces = calloc(n_pieces, sizeof(*sending->pieces));
    sending->sums = malloc((size_t)wanted->n * KVBM_SUM_BYTES);
    if (!sending->pieces || !sending->sums)
        return -ENOMEM;
    if (wanted->sums)
        add_piece(sending, sending->sums, (size_t)wanted->n * KVBM_SUM_BYTES);
    for (uint32_t i = 0; i < wanted->n; i++) {
        uint32_t place = (uint32_t)kv_get_le(wanted->places + (size_t)i * 4, 4);

        add_block(sending, sending->lease->blocks[place],
                  wanted->sums ? sending->sums + (size_t)i * KVBM_SUM_BYTES : NULL);
    }
    sending->bytes = layout->shape.region_bytes * regions * wanted->n;
    return 0;
}

int kvbm_loan_use(const struct kvbm_borrower *borrower, const struct kvbm_wanted *wanted,
                  struct kvbm_offer **offer, struct kvbm_granted **ret)
{
    struct kvbm_granted *lease = kvbm_loan_find(borrower, wanted->id, offer);
    enum kvbm_storage_kind kind;

    if (!lease || lease->late || lease->expires_ns <= kv_now_ns())
        return -ESTALE;
    kind = (*offer)->facts->layout->places[0].kind;
    if (kind != KVBM_STORAGE_SYSTEM && kind != KVBM_STORAGE_PINNED)
        return -EOPNOTSUPP; /* memory that this thread can't read */
    for (uint32_t i = 0; i < wanted->n; i++) {
        uint32_t place = (uint32_t)kv_get_le(wanted->places + (size_t)i * 4, 4);

        if (place >= lease->n || lease->blocks[place] == KVBM_NO_BLOCK)
            return -ERANGE;
    }
    *ret = lease;
    kvbm_leases_use(lease);
    return 0;
}

void kvbm_serve_read(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    struct sending *sending = calloc(1, sizeof(*sending));
    struct kvbm_wanted wanted;
    int err = sending ? kvbm_wanted_read(request->body, request->len, &wanted) : -ENOMEM;

    if (err == 0) {
        sending->lender = lender;
        pthread_mutex_lock(&lender->lock);
        err = kvbm_loan_use(*kvbm_session_slot(session, KVBM_LEND_SLOT), &wanted, &sending->offer,
                            &sending->lease);
        if (err == 0) {
            struct kvbm_loan *loan = sending->lease->hold;

            sending->use.request = request->id;
            LIST_INSERT_HEAD(&loan->uses, &sending->use, list);
            lender->stats.reads++;
        }
        pthread_mutex_unlock(&lender->lock);
    }
    if (err != 0) {
        free(sending);
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
        return;
    }
    err = gather(sending, &wanted);
    if (err < 0) {
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
        sent(sending);
        return;
    }
    (void)kvbm_session_reply_from(session, request->id, 0, sending->pieces, sending->n_pieces, sent,
                                  sending);
}
