// SPDX-License-Identifier: Apache-2.0
/**
 * Carriers move the bytes of leased blocks between agents: UCX (libkvbm_ucx, src/peer/ucx, which
 * holds all that needs UCX) and NIXL (src/peer/nixl). Each gives one table of calls. libkvbm and
 * libkvbm_ucx come from one build; `abi` refuses another one's.
 *
 *   owner                                              reader
 *   peer_create(address of the reader) ── connects ──► (nothing to do)
 *   send(messages under one tag) ─────────────────────► receive_start(memory): tag ... receive_end
 *
 * A node has a thread of its own, which sleeps while nothing moves. Any thread may call; ends of
 * sends run on the node's thread.
 */
#ifndef KVBM_PEER_MODULE_CARRIER_ABI_H
#define KVBM_PEER_MODULE_CARRIER_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/module/module.h"

#define KVBM_CARRIER_ABI 2
#define KVBM_UCX_SYMBOL "kvbm_ucx_get_abi" /* a kv_module_get_fn */
#define KVBM_UCX_LIBRARY "libkvbm_ucx.so.0"

struct kvbm_carrier_node;
struct kvbm_carrier_peer;
struct kvbm_carrier_receive;

/** Options of a node. */
struct kvbm_carrier_opts {
    bool loopback; /* only this machine's peers, unless UCX_NET_DEVICES says otherwise */
    /* Take a line of the carrier's log; @error: not only a warning. Any thread. */
    void (*log)(bool error, const char *text);
    const char
        *name; /* unlike those of all nodes that it meets: the agent's, and its incarnation */
};

/** Memory of one message, as pieces. */
struct kvbm_carrier_message {
    const struct iovec *pieces;
    size_t n;
};

/** Ends of a send. Each runs once, in this order, on the node's thread. */
struct kvbm_carrier_ends {
    void (*read)(void *arg);          /* lists and memory are the caller's again */
    void (*done)(void *arg, int err); /* all is sent: 0; -EPIPE; others: nothing was */
};

struct kvbm_carrier_abi {
    struct kv_module_head head;

    /**
     * Make a node and start its thread. Returns 0, with a risk that the program should know of in @why,
     * if any; -ENOTSUP with the reason in @why; -ENOMEM.
     */
    int (*node_create)(const struct kvbm_carrier_opts *opts, struct kvbm_carrier_node **ret,
                       char *why, size_t why_size);
    /** End a node: without receives. Waits until closed peers are gone. */
    void (*node_destroy)(struct kvbm_carrier_node *node);
    /** Return a copy of the address that peers of this node connect to, or NULL; free it. */
    void *(*node_address)(struct kvbm_carrier_node *node, size_t *len);

    /**
     * Begin to connect to the node of an address. Returns 0; -ENOMEM; -EAGAIN (too many wait to be
     * connected to). Failures show in sends.
     */
    int (*peer_create)(struct kvbm_carrier_node *node, const void *address, size_t len,
                       struct kvbm_carrier_peer **ret);
    /** Close a connection and free it. Its sends end sooner or later. Doesn't wait. */
    void (*peer_close)(struct kvbm_carrier_peer *peer);
    /**
     * Send @n messages under @tag. Lists and memory stay the caller's to keep until @ends->read;
     * @ends itself is read until its done. Returns 0; -ENOMEM or -EPROTO (@tag, lengths): no end runs.
     */
    int (*send)(struct kvbm_carrier_peer *peer, uint64_t tag,
                const struct kvbm_carrier_message *messages, uint32_t n,
                const struct kvbm_carrier_ends *ends, void *arg);

    /**
     * Take @n messages into memory: those that the peer sends under *@tag. The lists are read until
     * receive_end has returned. Returns 0; -ENOMEM; -EIO (no random numbers); -ENOBUFS (too much is
     * received, or was given up, at this time).
     */
    int (*receive_start)(struct kvbm_carrier_node *node,
                         const struct kvbm_carrier_message *messages, uint32_t n, uint64_t *tag,
                         struct kvbm_carrier_receive **ret);
    /**
     * End a receive and free it. After the call not one byte of its memory changes any more.
     * @sent: the peer has told that all is sent; wait until @deadline_ns (CLOCK_MONOTONIC) for what
     * is on its way. Otherwise give the receive up. Returns 0; -ETIMEDOUT; -EPROTO (other lengths);
     * -EPIPE (the connection has failed).
     */
    int (*receive_end)(struct kvbm_carrier_receive *receive, bool sent, uint64_t deadline_ns);
    /** Note that the peer has sent all of a receive that was given up. NULL: no need to know. */
    void (*receive_over)(struct kvbm_carrier_node *node, uint64_t tag);
};

#endif
