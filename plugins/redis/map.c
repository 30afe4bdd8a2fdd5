// SPDX-License-Identifier: Apache-2.0
/* The slot map of a cluster: read from the nodes, and corrected by redirections. */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "redis/nodes.h"

#define ASK_AGAIN_NS (100 * KV_NS_PER_MS)

/* Read one row of CLUSTER SLOTS: first, last, [host, port, ...], replicas. */
static int take_range(struct rds_net *net, const struct rds_node *teller,
                      const struct resp_value *v)
{
    const struct resp_value *owner;
    const char *host;
    int node;

    if (v->type != RESP_ARRAY || v->n < 3 || v->items[0].type != RESP_INT ||
        v->items[1].type != RESP_INT || v->items[2].type != RESP_ARRAY)
        return -EPROTO;
    owner = &v->items[2];
    if (v->items[0].num < 0 || v->items[1].num >= RDS_N_SLOTS || owner->n < 2 ||
        owner->items[1].type != RESP_INT || owner->items[1].num < 1 || owner->items[1].num > 65535)
        return -EPROTO;
    /* an empty host means the answering node */
    host = owner->items[0].type == RESP_BULK && owner->items[0].len > 0 ? owner->items[0].str
                                                                        : teller->at.host;
    node = rds_find_node(net, host, (unsigned)owner->items[1].num);
    if (node < 0)
        return node;
    for (int64_t slot = v->items[0].num; slot <= v->items[1].num; slot++)
        if (net->slots[slot] < 0) /* an earlier answer is kept */
            net->slots[slot] = (int16_t)node;
    return 0;
}

static int ask_map(struct rds_net *net, struct rds_node *node, uint64_t deadline_ns)
{
    static const char command[] = "*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n";
    struct resp_value reply;
    int err = rds_connect_node(net, node, deadline_ns);

    if (err < 0)
        return err;
    net->round_trips++;
    err = rds_conn_talk(&node->conn, command, sizeof(command) - 1, &reply, 1, deadline_ns);
    if (err < 0) {
        rds_conn_close(&node->conn);
        return kv_fail(&net->error, err, 0, "%s", strerror(-err));
    }
    if (reply.type != RESP_ARRAY || reply.n == 0)
        err = rds_reply_is(&reply, "NOAUTH") || rds_reply_is(&reply, "NOPERM") ? -EACCES : -EAGAIN;
    for (size_t i = 0; err == 0 && i < reply.n; i++)
        err = take_range(net, node, &reply.items[i]);
    if (err < 0)
        kv_fail(&net->error, err, 0, "%.150s",
                reply.type == RESP_ERROR ? reply.str : "the reply to CLUSTER SLOTS is malformed");
    resp_value_fini(&reply);
    return err;
}

int rds_find_hole(const struct rds_net *net)
{
    for (int i = 0; i < RDS_N_SLOTS; i++)
        if (net->slots[i] < 0)
            return i;
    return -1;
}

uint64_t rds_share_of(uint64_t deadline_ns, size_t n)
{
    uint64_t now = kv_now_ns();

    return now >= deadline_ns || n == 0 ? deadline_ns : now + (deadline_ns - now) / n;
}

/* Ask one node after the other, connected ones first, until the map has no holes: a node that was
 * cut off, or just joined, may know only a part. A node that doesn't answer uses only its share of
 * the time, so that the last of many is still asked. */
int rds_refresh_map(struct rds_net *net, uint64_t deadline_ns)
{
    size_t n = net->n_nodes, left = n; /* asking adds nodes */
    bool asked[RDS_MAX_NODES] = {false}, any = false;
    int err = -EHOSTUNREACH;

    net->mapped = false;
    for (size_t i = 0; i < KV_COUNT(net->slots); i++)
        net->slots[i] = -1;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < n; i++) {
            if (asked[i] || (pass == 0 && net->nodes[i]->conn.fd < 0))
                continue;
            asked[i] = true;
            err = ask_map(net, net->nodes[i], rds_share_of(deadline_ns, left--));
            any |= err == 0;
            if (any && rds_find_hole(net) < 0) {
                net->mapped = true;
                return 0;
            }
        }
    net->mapped = any; /* valid for slots that it has; commands to other slots ask again */
    return any ? 0 : err;
}

/* Fill the whole map, within the time of one call. */
static int whole_map(struct rds_net *net)
{
    uint64_t now = kv_now_ns(), deadline = now + net->uri.timeout_ms * KV_NS_PER_MS;
    int err, hole;

    if (net->pid != getpid())
        return -ECHILD;
    if (net->down && now < net->retry_ns)
        return -EHOSTDOWN;
    for (;;) {
        struct timespec pause = {0, ASK_AGAIN_NS};

        err = rds_refresh_map(net, deadline);
        hole = rds_find_hole(net);
        if (err == 0 && hole >= 0)
            err = kv_fail(&net->error, -EAGAIN, 0, "no node has slot %d", hole);
        if (err == 0 || net->down ||
            (err != -EAGAIN && err != -ETIMEDOUT && err != -ECONNRESET && err != -ECONNREFUSED) ||
            kv_now_ns() >= deadline)
            return err;
        nanosleep(&pause, NULL);
    }
}

int rds_net_owners(struct rds_net *net, int16_t *ret, size_t *ret_n)
{
    bool seen[RDS_MAX_NODES] = {false};
    int err;

    *ret_n = 0;
    if (!net->uri.cluster) {
        ret[(*ret_n)++] = 0;
        return 0;
    }
    err = whole_map(net);
    if (err < 0) {
        kv_log_error("redis", "the cluster's slots can't be read", "reason=\"%s\"",
                     net->error.text);
        return err;
    }
    for (size_t i = 0; i < KV_COUNT(net->slots); i++)
        if (!seen[net->slots[i]]) {
            seen[net->slots[i]] = true;
            ret[(*ret_n)++] = net->slots[i];
        }
    return 0;
}

/* Parse "MOVED slot host:port" or "ASK slot host:port" and redirect the command. */
int rds_redirect(struct rds_net *net, struct rds_node *from, struct rds_cmd *cmd)
{
    bool ask = rds_reply_is(&cmd->reply, "ASK ");
    char *host = strchr(cmd->reply.str, ' ');
    char *colon = strrchr(cmd->reply.str, ':');
    char *end;
    unsigned long port;
    int node;

    host = host ? strchr(host + 1, ' ') : NULL;
    if (!host || !colon || colon < host)
        return kv_fail(&net->error, -EPROTO, 0, "a redirection makes no sense");
    *colon = '\0';
    port = strtoul(colon + 1, &end, 10);
    if (*end || port == 0 || port > 65535)
        return kv_fail(&net->error, -EPROTO, 0, "a redirection makes no sense");
    node = rds_find_node(net, host[1] ? host + 1 : from->at.host, (unsigned)port);
    if (node < 0)
        return kv_fail(&net->error, node, 0, "a redirection to one node too many");
    cmd->asking = ask;
    cmd->node = (int16_t)(ask ? node : -1);
    if (!ask)
        net->slots[cmd->slot] = (int16_t)node;
    return 0;
}
