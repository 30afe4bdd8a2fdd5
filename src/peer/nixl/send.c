// SPDX-License-Identifier: Apache-2.0
/*
 * Sends: copied into a run of the arena, then written into the reader's. One whose connection is
 * closed goes on until NIXL says that it is over; its run counts as lost.
 */
#include <stdlib.h>
#include <string.h>

#include "base/core/le.h"
#include "base/thread/thread.h"
#include "peer/nixl/node.h"

struct kvbm_carrier_peer {
    LIST_ENTRY(kvbm_carrier_peer) list;
    struct kvbm_carrier_node *node;
    uint64_t arena, bytes;     /* the reader's */
    char name[KVBM_NIXL_NAME]; /* "": not loaded; the node's thread */
    uint32_t turn;             /* of the node, when it was loaded; the node's thread */
    bool failed;               /* the node's thread */
    bool closed;               /* under the node's lock */
    uint32_t n_sends;          /* under the node's lock */
    size_t len;
    uint8_t metadata[];
};

struct kvbm_nixl_send {
    TAILQ_ENTRY(kvbm_nixl_send) list; /* waiting, then running */
    struct kvbm_carrier_peer *peer;
    uint64_t to;
    size_t bytes;
    const struct kvbm_carrier_message *messages;
    uint32_t n;
    const struct kvbm_carrier_ends *ends;
    void *arg;
    struct kvbm_nixl_run run;
    void *request;
    bool copied, lost;
};

/* ---- connections ---- */

int kvbm_nixl_peer_create(struct kvbm_carrier_node *node, const void *address, size_t len,
                          struct kvbm_carrier_peer **ret)
{
    struct kvbm_carrier_peer *peer;

    if (len <= KVBM_NIXL_HEAD)
        return -EPROTO;
    peer = calloc(1, sizeof(*peer) + len - KVBM_NIXL_HEAD);
    if (!peer)
        return -ENOMEM;
    peer->node = node;
    peer->arena = kv_get_le64(address);
    peer->bytes = kv_get_le64((const uint8_t *)address + 8);
    peer->len = len - KVBM_NIXL_HEAD;
    memcpy(peer->metadata, (const uint8_t *)address + KVBM_NIXL_HEAD, peer->len);
    pthread_mutex_lock(&node->lock);
    LIST_INSERT_HEAD(&node->peers, peer, list);
    pthread_mutex_unlock(&node->lock);
    *ret = peer;
    return 0;
}

void kvbm_nixl_peer_close(struct kvbm_carrier_peer *peer)
{
    struct kvbm_carrier_node *node = peer->node;

    pthread_mutex_lock(&node->lock);
    peer->closed = true;
    node->kicked = true;
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->lock);
}

/* Tell whether another connection goes to the same NIXL agent, with the lock held. */
static bool is_shared(const struct kvbm_carrier_peer *peer)
{
    const struct kvbm_carrier_peer *other = NULL;

    LIST_FOREACH(other, &peer->node->peers, list)
    {
        if (other != peer && other->turn == peer->turn && strcmp(other->name, peer->name) == 0)
            return true;
    }
    return false;
}

/* Take a closed connection that nothing is sent over; *@last: the last one to its NIXL agent. */
static struct kvbm_carrier_peer *next_closed(struct kvbm_carrier_node *node, bool *last)
{
    struct kvbm_carrier_peer *peer = NULL;

    pthread_mutex_lock(&node->lock);
    LIST_FOREACH(peer, &node->peers, list)
    {
        if (peer->closed && !peer->n_sends)
            break;
    }
    if (peer) {
        LIST_REMOVE(peer, list);
        *last = !is_shared(peer);
    }
    pthread_mutex_unlock(&node->lock);
    return peer;
}

static void free_closed(struct kvbm_carrier_node *node)
{
    struct kvbm_carrier_peer *peer;
    bool last = false;

    while ((peer = next_closed(node, &last))) {
        if (last && peer->name[0] && node->agent && peer->turn == node->turn)
            (void)kvbm_nixl.invalidate_remote_md(node->agent, peer->name);
        free(peer);
    }
}

/* Have NIXL know the reader, unless it does. */
static bool load(struct kvbm_carrier_peer *peer)
{
    struct kvbm_carrier_node *node = peer->node;
    char *name = NULL;

    if (peer->failed || !node->agent)
        return false;
    if (peer->name[0] && peer->turn == node->turn)
        return true;
    if (kvbm_nixl.load_remote_md(node->agent, peer->metadata, peer->len, &name) != KVBM_NIXL_DONE ||
        !name || strlen(name) >= sizeof(peer->name)) {
        free(name);
        return false;
    }
    memcpy(peer->name, name, strlen(name) + 1);
    peer->turn = node->turn;
    free(name);
    return true;
}

/* ---- transfers ---- */

static void *one_desc(uint64_t addr, size_t len)
{
    void *list;

    if (kvbm_nixl.create_xfer_dlist(KVBM_NIXL_DRAM, &list) != KVBM_NIXL_DONE)
        return NULL;
    if (kvbm_nixl.xfer_dlist_add_desc(list, (uintptr_t)addr, len, 0) == KVBM_NIXL_DONE)
        return list;
    (void)kvbm_nixl.destroy_xfer_dlist(list);
    return NULL;
}

static void end_request(struct kvbm_nixl_send *send)
{
    void *request = KV_STEAL(send->request);

    if (!request)
        return;
    (void)kvbm_nixl.release_xfer_req(send->peer->node->agent, request);
    (void)kvbm_nixl.destroy_xfer_req(request);
}

/* Begin to write. Returns a result of NIXL. */
static int post(struct kvbm_nixl_send *send)
{
    struct kvbm_carrier_node *node = send->peer->node;
    void *local = one_desc((uintptr_t)kvbm_nixl_at(node, &send->run), send->bytes);
    void *remote = one_desc(send->to, send->bytes);
    int status = local && remote
                     ? kvbm_nixl.create_xfer_req(node->agent, KVBM_NIXL_OP_WRITE, local, remote,
                                                 send->peer->name, &send->request, node->args)
                     : -1;

    if (status >= 0)
        status = kvbm_nixl.post_xfer_req(node->agent, send->request, node->args);
    else
        send->request = NULL;
    if (local)
        (void)kvbm_nixl.destroy_xfer_dlist(local);
    if (remote)
        (void)kvbm_nixl.destroy_xfer_dlist(remote);
    return status;
}

static void copy_in(const struct kvbm_nixl_send *send)
{
    uint8_t *to = kvbm_nixl_at(send->peer->node, &send->run);

    for (uint32_t i = 0; i < send->n; i++) {
        const struct kvbm_carrier_message *message = &send->messages[i];

        for (size_t j = 0; j < message->n; j++) {
            memcpy(to, message->pieces[j].iov_base, message->pieces[j].iov_len);
            to += message->pieces[j].iov_len;
        }
    }
}

/* ---- sends ---- */

/* Free a send, and give its run back unless bytes of it may still move. */
static void finish(struct kvbm_nixl_send *send, int status)
{
    struct kvbm_carrier_peer *peer = send->peer;
    struct kvbm_carrier_node *node = peer->node;
    bool posted = send->request;

    end_request(send);
    if (!send->copied)
        send->ends->read(send->arg);
    if (status < 0)
        peer->failed = true;
    send->ends->done(send->arg, status >= 0 ? 0 : posted ? -EPIPE : -ENOTCONN);
    pthread_mutex_lock(&node->lock);
    if (send->lost)
        node->n_lost -= send->run.n;
    if (send->run.n && status < 0 && posted)
        node->n_lost += send->run.n;
    else if (send->run.n)
        kvbm_nixl_give(node, &send->run);
    peer->n_sends--;
    node->kicked = true; /* its connection may be over */
    pthread_mutex_unlock(&node->lock);
    free(send);
}

/* Take the next send that can begin, or that can't ever: without a run then. */
static struct kvbm_nixl_send *next_send(struct kvbm_carrier_node *node)
{
    struct kvbm_nixl_send *send;

    pthread_mutex_lock(&node->lock);
    send = TAILQ_FIRST(&node->waiting);
    if (send && !send->peer->closed && !send->peer->failed &&
        !kvbm_nixl_take(node, send->bytes, &send->run))
        send = NULL;
    if (send)
        TAILQ_REMOVE(&node->waiting, send, list);
    pthread_mutex_unlock(&node->lock);
    return send;
}

static void start(struct kvbm_nixl_send *send)
{
    struct kvbm_carrier_node *node = send->peer->node;
    int status = -1;

    if (send->run.n && load(send->peer)) {
        copy_in(send);
        send->ends->read(send->arg);
        send->copied = true;
        status = post(send);
    }
    if (status == KVBM_NIXL_RUNS)
        TAILQ_INSERT_TAIL(&node->running, send, list);
    else
        finish(send, status);
}

/* Count the run of a send whose connection is closed as lost. */
static void abandon(struct kvbm_nixl_send *send)
{
    struct kvbm_carrier_node *node = send->peer->node;

    pthread_mutex_lock(&node->lock);
    if (send->peer->closed && !send->lost) {
        node->n_lost += send->run.n;
        send->lost = true;
    }
    pthread_mutex_unlock(&node->lock);
}

void kvbm_nixl_run_sends(struct kvbm_carrier_node *node)
{
    struct kvbm_nixl_send *send, *next;

    while ((send = next_send(node)))
        start(send);
    for (send = TAILQ_FIRST(&node->running); send; send = next) {
        int status = kvbm_nixl.get_xfer_status(node->agent, send->request);

        next = TAILQ_NEXT(send, list);
        if (status == KVBM_NIXL_RUNS) {
            abandon(send);
            continue;
        }
        TAILQ_REMOVE(&node->running, send, list);
        finish(send, status);
    }
    free_closed(node);
}

void kvbm_nixl_drop_sends(struct kvbm_carrier_node *node)
{
    struct kvbm_nixl_send *send;

    while ((send = TAILQ_FIRST(&node->running))) {
        TAILQ_REMOVE(&node->running, send, list);
        finish(send, -1);
    }
    free_closed(node);
}

/* Find where a tag's bytes go. Returns 0, or -EPROTO: outside the reader's arena. */
static int place(const struct kvbm_carrier_peer *peer, uint64_t tag, size_t bytes, uint64_t *ret)
{
    uint64_t at = (tag & 0xffff) * KVBM_NIXL_CHUNK;

    if (at > peer->bytes || bytes > peer->bytes - at || bytes > KVBM_NIXL_ARENA || !bytes)
        return -EPROTO;
    *ret = peer->arena + at;
    return 0;
}

int kvbm_nixl_send(struct kvbm_carrier_peer *peer, uint64_t tag,
                   const struct kvbm_carrier_message *messages, uint32_t n,
                   const struct kvbm_carrier_ends *ends, void *arg)
{
    struct kvbm_carrier_node *node = peer->node;
    struct kvbm_nixl_send *send = calloc(1, sizeof(*send));
    int err = send ? 0 : -ENOMEM;

    if (err == 0)
        err = place(peer, tag, kvbm_nixl_bytes(messages, n), &send->to);
    if (err < 0) {
        free(send);
        return err;
    }
    send->peer = peer;
    send->bytes = kvbm_nixl_bytes(messages, n);
    send->messages = messages;
    send->n = n;
    send->ends = ends;
    send->arg = arg;
    pthread_mutex_lock(&node->lock);
    peer->n_sends++;
    TAILQ_INSERT_TAIL(&node->waiting, send, list);
    node->kicked = true;
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->lock);
    return 0;
}
