// SPDX-License-Identifier: Apache-2.0
/**
 * Insides of a node. Its thread alone calls UCX; the others leave commands.
 *
 *   send ────────► command ──► endpoint of a peer ──► active message per block: tag, index
 *   receive_start ─► table by tag ◄── on_message ──► ucp_am_recv_data_nbx ──► on_received
 *   receive_end ──► command: close the endpoints that still bring messages of it
 */
#ifndef KVBM_PEER_UCX_NODE_H
#define KVBM_PEER_UCX_NODE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <ucp/api/ucp.h>

#include "base/thread/thread.h"
#include "peer/module/carrier_abi.h"

#define KVBM_UCX_BUCKETS 256
#define KVBM_UCX_MESSAGE 1 /* id of the active message */

/** Work that a thread leaves for the node's. */
struct kvbm_ucx_command {
    TAILQ_ENTRY(kvbm_ucx_command) list;
    void (*run)(struct kvbm_ucx_command *command);
};
TAILQ_HEAD(kvbm_ucx_commands, kvbm_ucx_command);
LIST_HEAD(kvbm_ucx_receives, kvbm_carrier_receive);
LIST_HEAD(kvbm_ucx_peers, kvbm_carrier_peer);

struct kvbm_carrier_node {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *address;
    size_t address_len;
    int event_fd; /* UCX's */
    struct kv_wake wake;
    pthread_t thread;
    bool started;
    uint32_t n_busy;             /* requests under way; the node's thread */
    struct kvbm_ucx_peers peers; /* the node's thread */
    atomic_bool kicked;          /* commands wait */

    pthread_mutex_t lock; /* all below */
    bool stopping;
    uint32_t n_peers;
    size_t connecting; /* bytes of peers that the node's thread hasn't connected to yet */
    struct kvbm_ucx_commands commands;
    struct kvbm_ucx_receives receives[KVBM_UCX_BUCKETS];
};

/** Header of an active message. Both sides have one byte order: UCX's own headers do, too. */
struct kvbm_ucx_head {
    uint64_t tag;
    uint32_t index, n;
};

/** Leave a command; the node's thread runs it soon. */
void kvbm_ucx_command(struct kvbm_carrier_node *node, struct kvbm_ucx_command *command,
                      void (*run)(struct kvbm_ucx_command *command));

/** Close an endpoint at once, which ends its requests. The node's thread. */
void kvbm_ucx_close(struct kvbm_carrier_node *node, ucp_ep_h ep);

/** As kvbm_ucx_close, of an endpoint that may be the one of a peer. */
void kvbm_ucx_close_any(struct kvbm_carrier_node *node, ucp_ep_h ep);

/** Describe pieces for UCX: @ret's buffer, and *@count. @list has room for @message's pieces. */
void *kvbm_ucx_pieces(const struct kvbm_carrier_message *message, ucp_dt_iov_t *list,
                      ucp_request_param_t *param, size_t *count);

/* ---- send.c ---- */

int kvbm_ucx_peer_create(struct kvbm_carrier_node *node, const void *address, size_t len,
                         struct kvbm_carrier_peer **ret);
void kvbm_ucx_peer_close(struct kvbm_carrier_peer *peer);
int kvbm_ucx_send(struct kvbm_carrier_peer *peer, uint64_t tag,
                  const struct kvbm_carrier_message *messages, uint32_t n,
                  const struct kvbm_carrier_ends *ends, void *arg);

/* ---- receive.c ---- */

int kvbm_ucx_receive_start(struct kvbm_carrier_node *node,
                           const struct kvbm_carrier_message *messages, uint32_t n, uint64_t *tag,
                           struct kvbm_carrier_receive **ret);
int kvbm_ucx_receive_end(struct kvbm_carrier_receive *receive, bool sent, uint64_t deadline_ns);
/** Take a message that has arrived: an ucp_am_recv_callback_t. */
ucs_status_t kvbm_ucx_on_message(void *arg, const void *head, size_t head_len, void *data,
                                 size_t len, const ucp_am_recv_param_t *param);

#endif
