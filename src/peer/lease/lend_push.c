// SPDX-License-Identifier: Apache-2.0
/* Leased blocks by carriers, the owner's side. Handlers run on the agent's event thread. */
#include "base/core/le.h"
#include "peer/lease/lend_impl.h"
#include "peer/session/agent.h"

#define MAX_ADDRESS 65536 /* bytes of a node's address */

/* ---- connections ---- */

static const struct {
    uint16_t connect, push;
} types[KVBM_N_CARRIERS] = {
    [KVBM_BY_UCX] = {KVBM_ASK_UCX, KVBM_ASK_PUSH},
    [KVBM_BY_NIXL] = {KVBM_ASK_NIXL, KVBM_ASK_NIXL_PUSH},
};

/* Find the carrier that a request is about. */
static enum kvbm_by by_of(const struct kvbm_request *request)
{
    return request->type == KVBM_ASK_UCX || request->type == KVBM_ASK_PUSH ? KVBM_BY_UCX
                                                                           : KVBM_BY_NIXL;
}

static void disconnect(struct kvbm_lender *lender, struct kvbm_session *session, enum kvbm_by by)
{
    const struct kvbm_carrier *carrier = kvbm_agent_carrier(lender->agent, by);
    void **slot = kvbm_session_slot(session, KVBM_CARRIER_SLOT + by);
    struct kvbm_carrier_peer *peer = KV_STEAL(*slot);

    if (peer)
        carrier->abi->peer_close(peer);
}

static void watch_session(void *arg, struct kvbm_session *session, bool begun)
{
    for (int by = 0; by < KVBM_N_CARRIERS && !begun; by++)
        disconnect(arg, session, by);
}

/* Connect to the reader's node, instead of an earlier time; without an address: disconnect. */
static void serve_connect(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    const enum kvbm_by by = by_of(request);
    const struct kvbm_carrier *carrier = kvbm_agent_carrier(lender->agent, by);
    void **slot = kvbm_session_slot(session, KVBM_CARRIER_SLOT + by);
    struct kvbm_carrier_peer *peer = NULL;
    int err = request->len <= MAX_ADDRESS ? 0 : -EPROTO;

    disconnect(lender, session, by);
    if (err == 0 && request->len)
        err = carrier->abi->peer_create(carrier->node, request->body, request->len, &peer);
    *slot = peer;
    if (request->id)
        (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
}

/* ---- blocks ---- */

/* Blocks that a carrier sends, and that are hashed meanwhile: the later end answers. */
struct pushing {
    struct kvbm_lender *lender;
    struct kvbm_offer *offer;
    struct kvbm_granted *lease; /* NULL: none in use */
    struct kvbm_session *session;
    uint64_t request, tag;
    bool tells;          /* the reader wants to hear of the end, also after it has given up */
    atomic_uint reading; /* hash and carrier, which read the blocks */
    atomic_uint left;
    atomic_int err;
    uint32_t n;
    uint64_t bytes; /* of the blocks */
    size_t n_sums;  /* bytes */
    uint8_t *sums;
    struct iovec *pieces;
    struct kvbm_carrier_message *messages;
};

static void unuse(struct pushing *pushing, uint64_t bytes)
{
    if (pushing->lease)
        kvbm_loan_unuse(pushing->lender, pushing->offer, pushing->lease, bytes);
    pushing->lease = NULL;
}

static void free_pushing(struct pushing *pushing)
{
    unuse(pushing, 0);
    kvbm_session_put(pushing->session);
    free(pushing->sums);
    free(pushing->pieces);
    free(pushing->messages);
    free(pushing);
}

/* End one of the two that read the blocks: behind both the lease isn't in use any more. */
static void end_reading(struct pushing *pushing)
{
    if (atomic_fetch_sub(&pushing->reading, 1) == 1)
        unuse(pushing, pushing->bytes);
}

/* Tell the reader, which may have given up, that nothing comes any more; -EPIPE: nobody knows. */
static void tell_pushed(const struct pushing *pushing, int err)
{
    struct kv_buf body = KV_BUF_INIT;

    if (!pushing->tells || err == -EPIPE)
        return;
    kvbm_number_write(&body, pushing->tag);
    if (!body.error)
        (void)kvbm_session_note(pushing->session, KVBM_TELL_PUSHED, body.data, body.len);
    kv_buf_fini(&body);
}

/* End one of the two halves. */
static void end_half(struct pushing *pushing, int err)
{
    if (err < 0)
        atomic_store(&pushing->err, err);
    if (atomic_fetch_sub(&pushing->left, 1) > 1)
        return;
    err = atomic_load(&pushing->err);
    (void)kvbm_session_reply(pushing->session, pushing->request, err, pushing->sums,
                             err < 0 ? 0 : pushing->n_sums, -1);
    tell_pushed(pushing, err);
    free_pushing(pushing);
}

static void blocks_read(void *arg)
{
    end_reading(arg);
}

static void sent(void *arg, int err)
{
    end_half(arg, err);
}

/* Name the memory of a block: one message, whose pieces are as long as they can be. */
static void add_block(const struct kvbm_layout *layout, uint32_t block,
                      struct kvbm_carrier_message *message, struct iovec *pieces)
{
    struct kvbm_view view;
    size_t n = 0;

    for (uint32_t layer = 0; layer < layout->config.num_layers; layer++) {
        for (uint32_t outer = 0; outer < layout->config.outer_dim; outer++) {
            struct iovec *last = n ? &pieces[n - 1] : NULL;

            (void)kvbm_layout_region(layout, block, layer, outer, &view);
            if (last && (uintptr_t)last->iov_base + last->iov_len == view.addr)
                last->iov_len += view.len;
            else
                pieces[n++] = (struct iovec){(void *)(uintptr_t)view.addr, view.len};
        }
    }
    *message = (struct kvbm_carrier_message){pieces, n};
}

/* Gather what a request wants from a lease in use. This thread hashes it: its bytes have a limit. */
static int gather(struct pushing *pushing, const struct kvbm_wanted *wanted)
{
    const struct kvbm_layout *layout = pushing->offer->facts->layout;
    uint64_t regions = (uint64_t)layout->config.num_layers * layout->config.outer_dim;
    uint64_t bytes = wanted->n * regions * layout->shape.region_bytes;

    if (wanted->n * regions > KVBM_MAX_PIECES || (wanted->n > 1 && bytes > KVBM_MAX_PUSH_BYTES))
        return -EMSGSIZE;
    pushing->n = wanted->n;
    pushing->bytes = bytes;
    pushing->n_sums = wanted->sums ? (size_t)wanted->n * KVBM_SUM_BYTES : 0;
    pushing->sums = malloc(pushing->n_sums + 1);
    pushing->pieces = calloc(wanted->n * regions, sizeof(*pushing->pieces));
    pushing->messages = calloc(wanted->n, sizeof(*pushing->messages));
    if (!pushing->sums || !pushing->pieces || !pushing->messages)
        return -ENOMEM;
    for (uint32_t i = 0; i < wanted->n; i++) {
        uint32_t place = (uint32_t)kv_get_le(wanted->places + (size_t)i * 4, 4);

        add_block(layout, pushing->lease->blocks[place], &pushing->messages[i],
                  pushing->pieces + i * regions);
    }
    return 0;
}

static void hash(const struct pushing *pushing)
{
    for (uint32_t i = 0; i < pushing->n; i++) {
        const struct kvbm_carrier_message *message = &pushing->messages[i];
        XXH3_state_t state;

        XXH3_INITSTATE(&state);
        (void)XXH3_128bits_reset(&state);
        for (size_t j = 0; j < message->n; j++)
            kv_hash_update(&state, message->pieces[j].iov_base, message->pieces[j].iov_len);
        kv_hash_done(&state, pushing->sums + (size_t)i * KVBM_SUM_BYTES);
    }
}

/* Send what was gathered. Consumes @pushing. */
static void push(struct pushing *pushing, struct kvbm_carrier_peer *peer,
                 const struct kvbm_carrier_abi *abi)
{
    static const struct kvbm_carrier_ends ends = {blocks_read, sent};
    int err;

    atomic_init(&pushing->reading, 2);
    atomic_init(&pushing->left, 2);
    err = abi->send(peer, pushing->tag, pushing->messages, pushing->n, &ends, pushing);
    if (err < 0) {
        end_reading(pushing);
        end_half(pushing, err);
    }
    if (pushing->n_sums)
        hash(pushing);
    end_reading(pushing);
    end_half(pushing, 0);
}

static void serve_push(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_lender *lender = arg;
    const enum kvbm_by by = by_of(request);
    struct kvbm_carrier_peer *peer = *kvbm_session_slot(session, KVBM_CARRIER_SLOT + by);
    const struct kvbm_carrier_abi *abi = kvbm_agent_carrier(lender->agent, by)->abi;
    struct pushing *pushing = calloc(1, sizeof(*pushing));
    struct kvbm_wanted wanted;
    uint64_t tag = 0;
    int err = pushing ? kvbm_pushed_read(request->body, request->len, &wanted, &tag) : -ENOMEM;

    if (err == 0 && !peer)
        err = -ENOTCONN;
    if (pushing) {
        pushing->lender = lender;
        pushing->session = kvbm_session_get(session);
        pushing->request = request->id;
        pushing->tag = tag;
        pushing->tells = abi->receive_over;
    }
    if (err == 0) {
        pthread_mutex_lock(&lender->lock);
        err = kvbm_loan_use(*kvbm_session_slot(session, KVBM_LEND_SLOT), &wanted, &pushing->offer,
                            &pushing->lease);
        lender->stats.reads += err == 0;
        lender->stats.pushes += err == 0;
        pthread_mutex_unlock(&lender->lock);
    }
    if (err == 0)
        err = gather(pushing, &wanted);
    if (err == 0) {
        push(pushing, peer, abi);
        return;
    }
    (void)kvbm_session_reply(session, request->id, err, NULL, 0, -1);
    if (pushing) {
        tell_pushed(pushing, err);
        free_pushing(pushing);
    }
}

/* The owner has sent all of a read that this side has given up. */
static void take_pushed(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    const struct kvbm_lender *lender = arg;
    const struct kvbm_carrier *nixl = kvbm_agent_carrier(lender->agent, KVBM_BY_NIXL);
    uint64_t tag;

    (void)session;
    if (!request->id && kvbm_number_read(request->body, request->len, &tag) == 0)
        nixl->abi->receive_over(nixl->node, tag);
    if (request->id)
        (void)kvbm_session_reply(session, request->id, -EPROTO, NULL, 0, -1);
}

int kvbm_lender_serve_carriers(struct kvbm_lender *lender)
{
    int err = kvbm_agent_watch(lender->agent, watch_session, lender);

    for (int by = 0; by < KVBM_N_CARRIERS && err == 0; by++) {
        if (!kvbm_agent_carrier(lender->agent, by))
            continue;
        err = kvbm_agent_serve(lender->agent, types[by].connect, serve_connect, lender);
        if (err == 0)
            err = kvbm_agent_serve(lender->agent, types[by].push, serve_push, lender);
    }
    if (err == 0 && kvbm_agent_carrier(lender->agent, KVBM_BY_NIXL))
        err = kvbm_agent_serve(lender->agent, KVBM_TELL_PUSHED, take_pushed, lender);
    return err;
}
