// SPDX-License-Identifier: Apache-2.0
/**
 * The servers behind a handle: one, or the nodes of a cluster with the table of who has which slot.
 * rds_net_run takes a batch to them and brings every reply back, over reconnects (all our commands
 * may be repeated), redirections and moments in which a server isn't ready.
 *
 * Time: a call gives up when nothing has moved for timeout_ms, when less than 64 KiB/s have moved
 * beyond timeout_ms, or when no server could be had for timeout_ms: all of them together, for each
 * has but its share of what is left. After that the servers count as
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
    uint64_t line; /* the number of the connection, from 1 */
    size_t *queue; /* commands of this round, by number */
    size_t n_queue, queue_capacity;
    size_t n_sent, sent_offset; /* whole commands; bytes of the next one */
    size_t n_got;
    int error; /* why this round ended early here */
};

struct rds_net {
    struct rds_uri uri;
    char *user, *password; /* NULL: none; copies, wiped in the end */
    struct rds_tls *tls;
    struct rds_node *nodes[RDS_MAX_NODES]; /* the first ones are the URI's seeds */
    size_t n_nodes;
    int16_t slots[RDS_N_SLOTS];
    bool mapped;       /* slots are filled, though maybe with holes */
    bool stuck;        /* the last round ended since nothing moved for timeout_ms */
    bool down;         /* the last call failed for want of a server */
    uint64_t retry_ns; /* not before, when down */
    uint64_t pause_ns;
    struct kv_error error; /* the last problem, in words */
    uint64_t round_trips, sent, received, n_lines;
};

int rds_net_init(struct rds_net *net, const struct rds_uri *uri, struct kv_error *error);
void rds_net_fini(struct rds_net *net);

/** 0: every command has its reply (which may be an error's); else a negative errno, logged. */
int rds_net_run(struct rds_net *net, struct rds_batch *batch);

/**
 * The nodes that have slots; all there are without a cluster. Fills the map first: with a slot that
 * nobody has it fails, for a listing without that slot's keys would be wrong.
 */
int rds_net_owners(struct rds_net *net, int16_t *ret, size_t *ret_n);

/** Whether @reply is an error that begins with @word. */
bool rds_reply_is(const struct resp_value *reply, const char *word);

/** A server's error reply as errno, logged with @what was asked. */
int rds_reply_error(const struct resp_value *reply, const char *what);

/* -- of nodes.c, map.c and rounds.c between themselves ----------------------------------------- */

/** The number of the node at @host:@port, made when it is new; negative errno. */
int rds_find_node(struct rds_net *net, const char *host, unsigned port);

/** Connected and greeted, or closed and a negative errno with net->error. */
int rds_connect_node(struct rds_net *net, struct rds_node *node, uint64_t deadline_ns);

/** Ask who has which slot, until all are known or all nodes were asked. 0: net->slots has some. */
int rds_refresh_map(struct rds_net *net, uint64_t deadline_ns);

/** A slot that nobody is known to have, or -1. */
int rds_find_hole(const struct rds_net *net);

/** When the first of @n must have ended, for the others to have as much until @deadline_ns. */
uint64_t rds_share_of(uint64_t deadline_ns, size_t n);

/** Follow a MOVED or ASK reply of @from: the command is sent elsewhere in the next round. */
int rds_redirect(struct rds_net *net, struct rds_node *from, struct rds_cmd *cmd);

#endif
