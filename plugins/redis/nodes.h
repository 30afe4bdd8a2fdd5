// SPDX-License-Identifier: Apache-2.0
/**
 * The servers behind a handle: one, or a cluster's nodes with the map of slots. rds_net_run sends a
 * batch to them and collects every reply. It handles reconnects (all commands may be repeated),
 * redirections, and servers that are not ready for a moment.
 *
 * Time: a call gives up in three cases: no byte has moved for timeout_ms; less than 64 KiB/s have
 * moved beyond timeout_ms; no server could be reached for timeout_ms (all servers together, as each
 * gets only its share of the time left). After that the servers count as down: for 100 ms, doubling
 * to 1 s, calls fail at once. Then each call makes one try until one succeeds, so that a dead
 * server doesn't cost its timeout again and again.
 *
 * Not thread-safe: call with the handle's lock.
 */
#ifndef KV_REDIS_NODES_H
#define KV_REDIS_NODES_H

#include <sys/types.h>

#include "redis/batch.h"
#include "redis/conn.h"

#define RDS_MAX_NODES 256
#define RDS_N_SLOTS 16384

struct rds_node {
    struct rds_address at;
    struct rds_conn conn;
    uint64_t line; /* number of the connection, from 1 */
    size_t *queue; /* commands of this round, by number */
    size_t n_queue, queue_capacity;
    size_t n_sent, sent_offset; /* whole commands sent; bytes sent of the next one */
    size_t n_got;
    bool leave; /* the server can't serve now: its address may lead to another one */
    int error;  /* error that ended this round for the node */
};

struct rds_net {
    struct rds_uri uri;
    char *user, *password; /* NULL: none; copies, wiped at the end */
    struct rds_tls *tls;
    pid_t pid; /* the process that opened it: a child's commands would mix with its parent's */
    struct rds_node *nodes[RDS_MAX_NODES]; /* the first ones are the URI's seeds */
    size_t n_nodes;
    int16_t slots[RDS_N_SLOTS];
    bool mapped;       /* slots are filled, possibly with holes */
    bool stuck;        /* the last round ended because no byte moved for timeout_ms */
    bool down;         /* the last call found no server */
    uint64_t retry_ns; /* when down: time of the next try */
    uint64_t pause_ns;
    uint64_t refused_ns; /* until then, a replica's refusal is believed after one new connection */
    struct kv_error error; /* the last problem, in words */
    uint64_t round_trips, sent, received, n_lines;
};

int rds_net_init(struct rds_net *net, const struct rds_uri *uri, struct kv_error *error);
void rds_net_fini(struct rds_net *net);

/**
 * Run a batch. Returns 0 when every command has its reply (which may be an error reply); else a
 * negative errno, logged. -ECHILD: in a forked child, which must leave the connections alone.
 */
int rds_net_run(struct rds_net *net, struct rds_batch *batch);

/**
 * List the nodes that have slots; without a cluster, the server. Fills the map first. Fails when a
 * slot has no owner, as a listing without that slot's keys would be wrong.
 */
int rds_net_owners(struct rds_net *net, int16_t *ret, size_t *ret_n);

/** True when @reply is an error that begins with @word, also one of a command in a script. */
bool rds_reply_is(const struct resp_value *reply, const char *word);

/** Convert a server's error reply to errno, and log it with @what was asked. */
int rds_reply_error(const struct resp_value *reply, const char *what);

/* -- shared by nodes.c, map.c and rounds.c ----------------------------------------------------- */

/** Find or add the node at @host:@port. Returns its number or a negative errno. */
int rds_find_node(struct rds_net *net, const char *host, unsigned port);

/**
 * Connect and greet a node. Returns 0, or closes it and returns a negative errno with net->error.
 */
int rds_connect_node(struct rds_net *net, struct rds_node *node, uint64_t deadline_ns);

/**
 * Ask for the slot map, until it is complete or all nodes were asked. Returns 0 when net->slots has
 * some.
 */
int rds_refresh_map(struct rds_net *net, uint64_t deadline_ns);

/** Return a slot without a known owner, or -1. */
int rds_find_hole(const struct rds_net *net);

/** Return the deadline of the first of @n steps that share the time until @deadline_ns equally. */
uint64_t rds_share_of(uint64_t deadline_ns, size_t n);

/** Follow a MOVED or ASK reply of @from: the next round sends the command to the named node. */
int rds_redirect(struct rds_net *net, struct rds_node *from, struct rds_cmd *cmd);

#endif
