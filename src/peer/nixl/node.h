// SPDX-License-Identifier: Apache-2.0
/**
 * Insides of a node: a NIXL agent, its thread, and an arena through which all bytes go.
 *
 *   owner: block ──copy──► arena ══ NIXL WRITE ══► arena ──copy──► block :reader
 *
 * NIXL can't end a transfer: one that was released still moves bytes when its peer thaws. So it gets
 * memory of the arena only, never a program's. What a transfer that was given up may still touch is
 * *lost*: nobody else gets it before the transfer has ended, or the NIXL agent was replaced.
 *
 * The owner writes. With reads, an owner that was frozen meanwhile and whose reader had died was
 * aborted by UCX 1.23 ("Fatal: unexpected error: Endpoint timeout") in 6 of 16 tries; with writes
 * neither side was, in 16.
 *
 * Only the node's thread calls NIXL (but for its begin and end). NIXL's own progress thread is off,
 * since it is never idle: the node's thread drives NIXL while something is sent or received.
 */
#ifndef KVBM_PEER_NIXL_NODE_H
#define KVBM_PEER_NIXL_NODE_H

#include <pthread.h>
#include <sys/queue.h>

#include "base/core/error.h"
#include "peer/module/carrier_abi.h"
#include "peer/nixl/api.h"

#define KVBM_NIXL_CHUNK (1u << 20)
#define KVBM_NIXL_CHUNKS 128u
#define KVBM_NIXL_ARENA ((size_t)KVBM_NIXL_CHUNK * KVBM_NIXL_CHUNKS)
#define KVBM_NIXL_NAME 128

/** A run of chunks. */
struct kvbm_nixl_run {
    uint32_t first, n;
};

TAILQ_HEAD(kvbm_nixl_sends, kvbm_nixl_send);
LIST_HEAD(kvbm_nixl_peers, kvbm_carrier_peer);
LIST_HEAD(kvbm_nixl_receives, kvbm_carrier_receive);

struct kvbm_carrier_node {
    void *agent, *backend, *args, *notes; /* NIXL's */
    char base_name[KVBM_NIXL_NAME - 12];
    uint8_t *arena;
    pthread_t thread;
    bool started;
    struct kvbm_nixl_sends running; /* the node's thread */

    pthread_mutex_t lock;   /* all below */
    pthread_cond_t changed; /* work for the thread */
    bool stopping, replacing;
    bool kicked;   /* sends, or closed connections: look before sleeping */
    bool stuck;    /* the arena had no room since the last replacement */
    uint32_t turn; /* NIXL agents so far; the node's thread changes it */
    void *address; /* of the present agent */
    size_t address_len;
    uint8_t used[KVBM_NIXL_CHUNKS];
    uint32_t n_used, n_lost; /* chunks; lost ones are used, too */
    struct kvbm_nixl_sends waiting;
    struct kvbm_nixl_peers peers;
    struct kvbm_nixl_receives receives, given_up;
};

/** A node's address: this head, then NIXL's metadata. Little-endian. */
#define KVBM_NIXL_HEAD 16 /* address of the arena (8), its bytes (8) */

/* ---- node.c ---- */

int kvbm_nixl_node_create(const struct kvbm_carrier_opts *opts, struct kvbm_carrier_node **ret,
                          char *why, size_t why_size);
void kvbm_nixl_node_destroy(struct kvbm_carrier_node *node);
void *kvbm_nixl_node_address(struct kvbm_carrier_node *node, size_t *len);

/** Take a run of chunks for @bytes, with the lock held. Returns false: there is none. */
bool kvbm_nixl_take(struct kvbm_carrier_node *node, size_t bytes, struct kvbm_nixl_run *ret);

/** Give a run back, with the lock held. */
void kvbm_nixl_give(struct kvbm_carrier_node *node, const struct kvbm_nixl_run *run);

static inline uint8_t *kvbm_nixl_at(const struct kvbm_carrier_node *node,
                                    const struct kvbm_nixl_run *run)
{
    return node->arena + (size_t)run->first * KVBM_NIXL_CHUNK;
}

static inline size_t kvbm_nixl_bytes(const struct kvbm_carrier_message *messages, uint32_t n)
{
    size_t sum = 0;

    for (uint32_t i = 0; i < n; i++) {
        for (size_t j = 0; j < messages[i].n; j++)
            sum += messages[i].pieces[j].iov_len;
    }
    return sum;
}

/* ---- send.c ---- */

int kvbm_nixl_peer_create(struct kvbm_carrier_node *node, const void *address, size_t len,
                          struct kvbm_carrier_peer **ret);
void kvbm_nixl_peer_close(struct kvbm_carrier_peer *peer);
int kvbm_nixl_send(struct kvbm_carrier_peer *peer, uint64_t tag,
                   const struct kvbm_carrier_message *messages, uint32_t n,
                   const struct kvbm_carrier_ends *ends, void *arg);

/** Start sends that wait, look at those that run, free closed peers. The node's thread. */
void kvbm_nixl_run_sends(struct kvbm_carrier_node *node);

/** Forget what ran by the agent that is gone. The node's thread, without the lock. */
void kvbm_nixl_drop_sends(struct kvbm_carrier_node *node);

/* ---- receive.c ---- */

int kvbm_nixl_receive_start(struct kvbm_carrier_node *node,
                            const struct kvbm_carrier_message *messages, uint32_t n, uint64_t *tag,
                            struct kvbm_carrier_receive **ret);
int kvbm_nixl_receive_end(struct kvbm_carrier_receive *receive, bool sent, uint64_t deadline_ns);
void kvbm_nixl_receive_over(struct kvbm_carrier_node *node, uint64_t tag);

/** Free what was given up, with the lock held: the agent that it came by is gone. */
void kvbm_nixl_drop_receives(struct kvbm_carrier_node *node);

#endif
