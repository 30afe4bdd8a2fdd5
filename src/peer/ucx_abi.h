// SPDX-License-Identifier: Apache-2.0
/**
 * Calls between libkvbm and libkvbm_ucx (src/peer/ucx), which holds all that needs UCX. Both come
 * from one build; `abi` refuses another one's.
 *
 *   owner                                              reader
 *   peer_create(address of the reader) ── connects ──► (nothing to do)
 *   send(messages under one tag) ──── rendezvous ────► receive_start(tag, memory) ... receive_end
 *
 * A node is one UCX worker with a thread of its own, which sleeps while nothing moves. Any thread may
 * call; @done runs on the node's thread.
 */
#ifndef KVBM_PEER_UCX_ABI_H
#define KVBM_PEER_UCX_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "module.h"

#define KVBM_UCX_ABI 1
#define KVBM_UCX_SYMBOL "kvbm_ucx_get_abi" /* a kvbm_module_get_fn */
#define KVBM_UCX_LIBRARY "libkvbm_ucx.so.0"

struct kvbm_ucx_node;
struct kvbm_ucx_peer;
struct kvbm_ucx_receive;

/** Options of a node. */
struct kvbm_ucx_opts {
    bool loopback; /* only this machine's peers, unless UCX_NET_DEVICES says otherwise */
    /* Take a line of UCX's log; @error: not only a warning. Any thread. */
    void (*log)(bool error, const char *text);
};

/** Memory of one message, as pieces. */
struct kvbm_ucx_message {
    const struct iovec *pieces;
    size_t n;
};

struct kvbm_ucx_abi {
    struct kvbm_module_head head;

    /** Make a node and start its thread. Returns 0; -ENOTSUP with the reason in @why; -ENOMEM. */
    int (*node_create)(const struct kvbm_ucx_opts *opts, struct kvbm_ucx_node **ret, char *why,
                       size_t why_size);
    /** End a node: without receives. Waits until closed peers are gone. */
    void (*node_destroy)(struct kvbm_ucx_node *node);
    /** Return the address that peers of this node connect to. */
    const void *(*node_address)(const struct kvbm_ucx_node *node, size_t *len);

    /** Begin to connect to the node of an address. Returns 0 or -ENOMEM; failures show in sends. */
    int (*peer_create)(struct kvbm_ucx_node *node, const void *address, size_t len,
                       struct kvbm_ucx_peer **ret);
    /** Close a connection and free it. Its sends end with -EPIPE. Doesn't wait. */
    void (*peer_close)(struct kvbm_ucx_peer *peer);
    /**
     * Send @n messages under @tag. Lists and memory stay the caller's until @done(arg, 0 or an error)
     * has run: once, and only if the call returns 0. Otherwise -ENOMEM.
     */
    int (*send)(struct kvbm_ucx_peer *peer, uint64_t tag, const struct kvbm_ucx_message *messages,
                uint32_t n, void (*done)(void *arg, int err), void *arg);

    /**
     * Take the @n messages of @tag into memory. The lists are read until receive_end has returned.
     * Returns 0 or -ENOMEM.
     */
    int (*receive_start)(struct kvbm_ucx_node *node, uint64_t tag,
                         const struct kvbm_ucx_message *messages, uint32_t n,
                         struct kvbm_ucx_receive **ret);
    /**
     * Wait for all messages until @deadline_ns (CLOCK_MONOTONIC), and free the receive. What still
     * moves then is ended by closing its connection: after the call not one byte changes any more.
     * Returns 0; -ETIMEDOUT; -EPROTO (other lengths); -EPIPE (the connection has failed).
     */
    int (*receive_end)(struct kvbm_ucx_receive *receive, uint64_t deadline_ns);
};

#endif
