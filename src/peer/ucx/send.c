// SPDX-License-Identifier: Apache-2.0
/*
 * Connections to peers, and messages to them. Everything runs on the node's thread, but the calls of
 * the table, which leave commands.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "peer/ucx/node.h"

#define MAX_CONNECTING ((size_t)16 << 20) /* bytes: thousands of peers, whose addresses are short */
#define RENDEZVOUS 8192 /* bytes of a message from which it waits for the receiver's memory */

struct kvbm_carrier_peer {
    struct kvbm_ucx_command command; /* create, close after an error */
    struct kvbm_ucx_command closing;
    struct kvbm_carrier_node *node;
    LIST_ENTRY(kvbm_carrier_peer) list;
    ucp_ep_h ep; /* NULL: not yet, or no more */
    bool failed;
    _Atomic uint32_t references; /* its owner, commands, sends; the last is dropped by the thread */
    size_t len;
    uint8_t address[];
};

/** Messages on their way. */
struct sending {
    struct kvbm_ucx_command command;
    struct kvbm_carrier_peer *peer;
    const struct kvbm_carrier_message *messages;
    uint32_t n, left;
    int err;
    const struct kvbm_carrier_ends *ends;
    void *arg;
    struct kvbm_ucx_head *heads;
    ucp_dt_iov_t *list;
};

static struct kvbm_carrier_peer *peer_get(struct kvbm_carrier_peer *peer)
{
    atomic_fetch_add(&peer->references, 1);
    return peer;
}

static void peer_put(struct kvbm_carrier_peer *peer)
{
    if (atomic_fetch_sub(&peer->references, 1) != 1)
        return;
    LIST_REMOVE(peer, list);
    pthread_mutex_lock(&peer->node->lock);
    peer->node->n_peers--;
    pthread_mutex_unlock(&peer->node->lock);
    free(peer);
}

/* ---- connections ---- */

static void close_endpoint(struct kvbm_carrier_peer *peer)
{
    ucp_ep_h ep = KV_STEAL(peer->ep);

    peer->failed = true;
    if (ep)
        kvbm_ucx_close(peer->node, ep);
}

void kvbm_ucx_close_any(struct kvbm_carrier_node *node, ucp_ep_h ep)
{
    struct kvbm_carrier_peer *peer = NULL;

    /* Where both sides connect to each other, UCX may make one connection of the two. */
    LIST_FOREACH(peer, &node->peers, list)
    {
        if (peer->ep == ep) {
            close_endpoint(peer);
            return;
        }
    }
    kvbm_ucx_close(node, ep);
}

static void run_failed(struct kvbm_ucx_command *command)
{
    struct kvbm_carrier_peer *peer = (struct kvbm_carrier_peer *)(void *)command;

    close_endpoint(peer);
    peer_put(peer);
}

/* UCX calls this within its progress: close later. */
static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct kvbm_carrier_peer *peer = arg;

    (void)ep, (void)status;
    if (peer->failed)
        return;
    peer->failed = true;
    kvbm_ucx_command(peer->node, &peer_get(peer)->command, run_failed);
}

static size_t bytes_of_peer(size_t len)
{
    return sizeof(struct kvbm_carrier_peer) + len;
}

static void run_create(struct kvbm_ucx_command *command)
{
    struct kvbm_carrier_peer *peer = (struct kvbm_carrier_peer *)(void *)command;
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                    .address = (const ucp_address_t *)(const void *)peer->address,
                                    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                    .err_handler = {.cb = on_error, .arg = peer}};

    LIST_INSERT_HEAD(&peer->node->peers, peer, list);
    pthread_mutex_lock(&peer->node->lock);
    peer->node->connecting -= bytes_of_peer(peer->len);
    pthread_mutex_unlock(&peer->node->lock);
    if (ucp_ep_create(peer->node->worker, &params, &peer->ep) != UCS_OK) {
        peer->ep = NULL;
        peer->failed = true;
    }
    peer_put(peer);
}

/* Count a peer, unless too many wait: a peer may ask faster than UCX connects. */
static int count_peer(struct kvbm_carrier_node *node, size_t bytes)
{
    int err = 0;

    pthread_mutex_lock(&node->lock);
    if (node->connecting + bytes > MAX_CONNECTING) {
        err = -EAGAIN;
    } else {
        node->connecting += bytes;
        node->n_peers++;
    }
    pthread_mutex_unlock(&node->lock);
    return err;
}

int kvbm_ucx_peer_create(struct kvbm_carrier_node *node, const void *address, size_t len,
                         struct kvbm_carrier_peer **ret)
{
    struct kvbm_carrier_peer *peer = calloc(1, bytes_of_peer(len));
    int err = peer ? count_peer(node, bytes_of_peer(len)) : -ENOMEM;

    if (err < 0) {
        free(peer);
        return err;
    }
    peer->node = node;
    peer->len = len;
    memcpy(peer->address, address, len);
    atomic_init(&peer->references, 1);
    kvbm_ucx_command(node, &peer_get(peer)->command, run_create);
    *ret = peer;
    return 0;
}

static void run_close(struct kvbm_ucx_command *command)
{
    struct kvbm_carrier_peer *peer =
        (struct kvbm_carrier_peer *)(void *)((char *)command -
                                             offsetof(struct kvbm_carrier_peer, closing));

    close_endpoint(peer);
    peer_put(peer);
}

void kvbm_ucx_peer_close(struct kvbm_carrier_peer *peer)
{
    kvbm_ucx_command(peer->node, &peer->closing, run_close);
}

/* ---- messages ---- */

static void end_sending(struct sending *sending)
{
    struct kvbm_carrier_peer *peer = sending->peer;

    sending->ends->read(sending->arg);
    sending->ends->done(sending->arg, sending->err);
    free(sending->heads);
    free(sending->list);
    free(sending);
    peer_put(peer);
}

static void end_message(struct sending *sending, ucs_status_t status)
{
    if (status != UCS_OK)
        sending->err = -EPIPE;
    if (--sending->left == 0)
        end_sending(sending);
}

static void on_sent(void *request, ucs_status_t status, void *arg)
{
    ucp_request_free(request);
    ((struct sending *)arg)->peer->node->n_busy--;
    end_message(arg, status);
}

static size_t bytes_of(const struct kvbm_carrier_message *message)
{
    size_t sum = 0;

    for (size_t i = 0; i < message->n; i++)
        sum += message->pieces[i].iov_len;
    return sum;
}

/* Send message @i. Completion may come within. */
static void send_one(struct sending *sending, uint32_t i, ucp_dt_iov_t *list)
{
    const struct kvbm_carrier_message *message = &sending->messages[i];
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_REPLY,
                                 .cb.send = on_sent,
                                 .user_data = sending};
    size_t count;
    const void *from = kvbm_ucx_pieces(message, list, &param, &count);
    ucs_status_ptr_t request;

    param.flags |= bytes_of(message) < RENDEZVOUS ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
    request = ucp_am_send_nbx(sending->peer->ep, KVBM_UCX_MESSAGE, &sending->heads[i],
                              sizeof(sending->heads[i]), from, count, &param);
    if (UCS_PTR_IS_PTR(request))
        sending->peer->node->n_busy++;
    else
        end_message(sending, UCS_PTR_RAW_STATUS(request));
}

static void run_send(struct kvbm_ucx_command *command)
{
    struct sending *sending = (struct sending *)(void *)command;
    ucp_dt_iov_t *list = sending->list;

    sending->left++; /* this function's */
    for (uint32_t i = 0; i < sending->n; i++) {
        if (!sending->peer->ep || sending->peer->failed)
            end_message(sending, UCS_ERR_CANCELED);
        else
            send_one(sending, i, list);
        list += sending->messages[i].n;
    }
    end_message(sending, UCS_OK);
}

int kvbm_ucx_send(struct kvbm_carrier_peer *peer, uint64_t tag,
                  const struct kvbm_carrier_message *messages, uint32_t n,
                  const struct kvbm_carrier_ends *ends, void *arg)
{
    struct sending *sending = calloc(1, sizeof(*sending));
    size_t n_pieces = 0;

    for (uint32_t i = 0; i < n; i++)
        n_pieces += messages[i].n;
    if (sending) {
        sending->heads = calloc(n + 1, sizeof(*sending->heads));
        sending->list = calloc(n_pieces + 1, sizeof(*sending->list));
    }
    if (!sending || !sending->heads || !sending->list) {
        if (sending) {
            free(sending->heads);
            free(sending->list);
        }
        free(sending);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++)
        sending->heads[i] = (struct kvbm_ucx_head){.tag = tag, .index = i, .n = n};
    sending->peer = peer_get(peer);
    sending->messages = messages;
    sending->n = sending->left = n;
    sending->ends = ends;
    sending->arg = arg;
    kvbm_ucx_command(peer->node, &sending->command, run_send);
    return 0;
}
