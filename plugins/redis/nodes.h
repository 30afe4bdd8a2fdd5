// SPDX-License-Identifier: Apache-2.0
/**
 * The servers behind a handle: one, or the nodes of a cluster with the table of who has which slot.
 * rds_net_run takes a batch to them and brings every reply back, over reconnects (all our commands
 * may be repeated), redirections and moments in which a server isn't ready.
 *
 * Time: a call gives up when nothing has moved for timeout_ms, when less than 64 KiB/s have moved
 * beyond timeout_ms, or when no server could be had for timeout_ms. After that the servers count as
 * down: for a moment (100 ms, doubling to 1 s) calls fail at once, and then have one try each until
 * one succeeds, so that a dead server doesn't cost its timeout again and again.
 *
 * Not thread-safe: the handle's lock is held.
 */
#ifndef KV_REDIS_NODES_H
#define KV_REDIS_NODES_H

#include "redis/batch.h"
#include "redis/conn.h"

#define RDS_MAX_NODES 256
#define RDS_N_SLOTS 16384

struct rds_node {
    struct rds_address at;
    struct rds_conn conn;
    size_t *queue; /* commands of this round, by number */
    size_t n_queue, queue_capacity;
    size_t n_sent, sent_offset; /* whole commands; bytes of the next one */
    size_t n_got;
    int error; /* why this round ended early here */
};

struct rds_net {
    struct rds_uri uri;
    const char *user, *password; /* NULL: none; the environment's */
    struct rds_tls *tls;
    struct rds_node *nodes[RDS_MAX_NODES]; /* the first ones are the URI's seeds */
    size_t n_nodes;
    int16_t slots[RDS_N_SLOTS];
    bool mapped;       /* slots are filled */
    bool down;         /* the last call failed for want of a server */
    uint64_t retry_ns; /* not before, when down */
    uint64_t pause_ns;
    struct kv_error error; /* the last problem, in words */
    uint64_t round_trips, sent, received;
};

int rds_net_init(struct rds_net *net, const struct rds_uri *uri, struct kv_error *error);
void rds_net_fini(struct rds_net *net);

/** 0: every command has its reply (which may be an error's); else a negative errno, logged. */
int rds_net_run(struct rds_net *net, struct rds_batch *batch);

/** The nodes that have slots; all there are without a cluster. Fills the map first. */
int rds_net_owners(struct rds_net *net, int16_t *ret, size_t *ret_n);

/** A server's error reply as errno, logged with @what was asked. */
int rds_reply_error(const struct resp_value *reply, const char *what);

#endif
