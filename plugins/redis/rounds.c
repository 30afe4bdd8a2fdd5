// SPDX-License-Identifier: Apache-2.0
/* Run a batch in rounds until every command has its reply. */
#include <poll.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "redis/nodes.h"

#define MIN_PACE ((uint64_t)64 << 10) /* bytes a second */
#define IOV_MAX_HERE 64
#define FIRST_PAUSE_NS (10 * KV_NS_PER_MS)
#define LONGEST_PAUSE_NS (200 * KV_NS_PER_MS)
#define DOWN_FIRST_NS (100 * KV_NS_PER_MS)
#define DOWN_LONGEST_NS KV_NS_PER_S

/* -- one round: send all, receive all ---------------------------------------------------------- */

/* Queue a command for the owner of its slot. Without a known owner it waits for the next round. */
static int enqueue(struct rds_net *net, struct rds_batch *batch, size_t i)
{
    struct rds_cmd *cmd = &batch->cmds[i];
    int at = cmd->node >= 0 ? cmd->node : net->uri.cluster ? net->slots[cmd->slot] : 0;
    struct rds_node *node;
    size_t *queue;

    if (at < 0) {
        net->mapped = false; /* ask again: the slot may have an owner by then */
        kv_fail(&net->error, -EAGAIN, 0, "no node has slot %u", cmd->slot);
        return 0;
    }
    node = net->nodes[at];
    if (node->n_queue == node->queue_capacity) {
        size_t capacity = KV_MAX(2 * node->queue_capacity, (size_t)64);

        queue = realloc(node->queue, capacity * sizeof(*queue));
        if (!queue)
            return -ENOMEM;
        node->queue = queue;
        node->queue_capacity = capacity;
    }
    cmd->asked = cmd->refused = false;
    node->queue[node->n_queue++] = i;
    return 0;
}

static bool node_busy(const struct rds_node *node)
{
    return node->error == 0 && node->n_got < node->n_queue;
}

/* Send as much as the socket takes now. Adjacent pieces are joined. */
static int push(struct rds_node *node, const struct rds_batch *batch)
{
    while (node->n_sent < node->n_queue) {
        struct iovec iov[IOV_MAX_HERE];
        size_t next = node->n_sent, offset = node->sent_offset;
        int n = 0;
        ssize_t sent;

        while (next < node->n_queue && n + 4 <= IOV_MAX_HERE) {
            int first = n;

            n += rds_batch_pieces(batch, node->queue[next++], offset, iov + n, IOV_MAX_HERE - n);
            offset = 0;
            if (first > 0 && first < n &&
                (char *)iov[first - 1].iov_base + iov[first - 1].iov_len == iov[first].iov_base) {
                iov[first - 1].iov_len += iov[first].iov_len;
                memmove(iov + first, iov + first + 1, (size_t)(n - first - 1) * sizeof(*iov));
                n--;
            }
        }
        sent = rds_conn_send(&node->conn, iov, n);
        if (sent <= 0)
            return (int)sent;
        node->sent_offset += (size_t)sent;
        while (node->n_sent < node->n_queue) {
            size_t len = rds_batch_wire_len(batch, node->queue[node->n_sent]);

            if (node->sent_offset < len)
                break;
            node->sent_offset -= len;
            node->n_sent++;
        }
    }
    return 0;
}

/* Keep a replica's refusal: it is the reply when no other server is found in time. */
static void keep_refusal(struct rds_net *net, struct rds_node *node, struct rds_cmd *cmd)
{
    kv_fail(&net->error, -EROFS, 0, "%.100s", cmd->reply.str);
    net->mapped = false; /* a fail-over has made it a replica */
    node->leave = cmd->refused = true;
}

/* Classify a reply: an answer, a redirection, or "try again". */
static int settle(struct rds_net *net, struct rds_node *node, struct rds_cmd *cmd)
{
    static const struct {
        const char *word;
        bool leave;
    } later[] = {{"LOADING", true},
                 {"MASTERDOWN", true},
                 {"TRYAGAIN", false},
                 {"CLUSTERDOWN", false},
                 {"BUSY ", false}};
    int err = 0;

    if (net->uri.cluster && !cmd->fixed &&
        (rds_reply_is(&cmd->reply, "MOVED ") || rds_reply_is(&cmd->reply, "ASK "))) {
        err = rds_redirect(net, node, cmd);
        resp_value_fini(&cmd->reply);
        return err;
    }
    if (rds_reply_is(&cmd->reply, "READONLY") || rds_reply_is(&cmd->reply, "NOREPLICAS")) {
        keep_refusal(net, node, cmd);
        return 0;
    }
    for (size_t i = 0; i < KV_COUNT(later); i++)
        if (rds_reply_is(&cmd->reply, later[i].word)) {
            kv_fail(&net->error, -EAGAIN, 0, "%.100s", cmd->reply.str);
            net->mapped = false;
            node->leave |= later[i].leave;
            resp_value_fini(&cmd->reply);
            return 0;
        }
    cmd->done = true;
    return 0;
}

static int pull(struct rds_net *net, struct rds_node *node, struct rds_batch *batch)
{
    while (node->n_got < node->n_queue) {
        struct rds_cmd *cmd = &batch->cmds[node->queue[node->n_got]];
        struct resp_value reply = {0};
        int rc;

        node->conn.parser.room = batch->room;
        rc = rds_conn_recv(&node->conn, &reply);

        if (rc <= 0)
            return rc;
        if (cmd->asking && !cmd->asked) {
            cmd->asked = true;
            resp_value_fini(&reply);
            continue;
        }
        resp_value_fini(&cmd->reply);
        cmd->reply = reply;
        cmd->line = node->line;
        node->n_got++;
        rc = settle(net, node, cmd);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Send and receive as much as possible now. Returns the bytes moved. */
static uint64_t serve(struct rds_net *net, struct rds_node *node, struct rds_batch *batch)
{
    uint64_t sent = node->conn.sent, received = node->conn.received;
    int err, pulled;

    node->conn.extra = 0;
    err = push(node, batch);
    /* A server that refuses a command may answer and close the connection while the command is still
     * being sent: take the answer. */
    pulled = pull(net, node, batch);
    err = err < 0 ? err : pulled;
    net->sent += node->conn.sent - sent;
    net->received += node->conn.received - received;
    sent = node->conn.sent + node->conn.received - sent - received;
    if (err < 0) {
        node->error = err;
        if (err != -EPROTO || net->error.code != -EPROTO)
            kv_fail(&net->error, err, 0, "%s", strerror(-err));
        rds_conn_close(&node->conn);
    }
    return sent;
}

/* Wait until a busy node can send or receive, or @deadline_ns. */
static int await(struct rds_net *net, uint64_t deadline_ns)
{
    struct pollfd fds[RDS_MAX_NODES];
    nfds_t n = 0;
    int64_t ms = kv_ms_until(deadline_ns, kv_now_ns());

    for (size_t i = 0; i < net->n_nodes; i++) {
        const struct rds_node *node = net->nodes[i];
        short events = (short)(POLLIN | node->conn.extra);

        if (!node_busy(node))
            continue;
        if (node->n_sent < node->n_queue)
            events |= POLLOUT;
        fds[n++] = (struct pollfd){node->conn.fd, events, 0};
    }
    return n == 0 || ms == 0 ? 0 : poll(fds, n, (int)KV_MIN(ms, 1000));
}

static bool any_busy(const struct rds_net *net)
{
    for (size_t i = 0; i < net->n_nodes; i++)
        if (node_busy(net->nodes[i]))
            return true;
    return false;
}

static void time_out(struct rds_net *net)
{
    net->stuck = true;
    for (size_t i = 0; i < net->n_nodes; i++)
        if (node_busy(net->nodes[i])) {
            net->nodes[i]->error =
                kv_fail(&net->error, -ETIMEDOUT, 0, "no answer from the server in time");
            /* late replies must not be taken for replies to later commands */
            rds_conn_close(&net->nodes[i]->conn);
        }
}

static void exchange(struct rds_net *net, struct rds_batch *batch)
{
    uint64_t timeout_ns = net->uri.timeout_ms * KV_NS_PER_MS, start = kv_now_ns();
    uint64_t moved = 0, last = start;

    while (any_busy(net)) {
        uint64_t before = moved;
        uint64_t deadline;

        for (size_t i = 0; i < net->n_nodes; i++)
            if (node_busy(net->nodes[i]))
                moved += serve(net, net->nodes[i], batch);
        if (moved > before)
            last = kv_now_ns();
        deadline = KV_MIN(last, start + moved / MIN_PACE * KV_NS_PER_S) + timeout_ns;
        if (kv_now_ns() >= deadline)
            time_out(net);
        else
            await(net, deadline);
    }
}

/* Connect the nodes with queued commands. Nodes that don't answer share the time until
 * @deadline_ns. */
static void connect_queued(struct rds_net *net, uint64_t deadline_ns)
{
    size_t left = 0;

    for (size_t i = 0; i < net->n_nodes; i++)
        left += net->nodes[i]->n_queue > 0 && net->nodes[i]->conn.fd < 0;
    for (size_t i = 0; i < net->n_nodes; i++) {
        struct rds_node *node = net->nodes[i];

        if (node->n_queue > 0 && node->conn.fd < 0)
            node->error = rds_connect_node(net, node, rds_share_of(deadline_ns, left--));
    }
}

/* Returns the number of commands without a reply, or the errno of a problem that repetition can't
 * solve. */
static int64_t round_trip(struct rds_net *net, struct rds_batch *batch, uint64_t deadline_ns)
{
    int64_t left = 0;
    int err = 0;

    net->stuck = false;
    for (size_t i = 0; i < net->n_nodes; i++) {
        struct rds_node *node = net->nodes[i];

        node->n_queue = node->n_sent = node->sent_offset = node->n_got = 0;
        node->error = 0;
        node->leave = false;
    }
    for (size_t i = 0; i < batch->n; i++)
        if (!batch->cmds[i].done && (err = enqueue(net, batch, i)) < 0)
            return err;
    connect_queued(net, deadline_ns);
    net->round_trips++;
    exchange(net, batch);
    for (size_t i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->leave)
            rds_conn_close(&net->nodes[i]->conn);
    for (size_t i = 0; i < batch->n; i++)
        left += !batch->cmds[i].done;
    for (size_t i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->error == -EACCES || net->nodes[i]->error == -ENOMEM ||
            net->nodes[i]->error == -EPROTO)
            err = net->nodes[i]->error;
        else if (net->nodes[i]->error < 0)
            net->mapped = false;          /* another node may have its slots now */
    for (size_t i = 0; i < batch->n; i++) /* an ASK is valid for one attempt */
        if (!batch->cmds[i].done && batch->cmds[i].asked) {
            batch->cmds[i].asking = false;
            batch->cmds[i].node = -1;
        }
    return left > 0 && err < 0 ? err : left;
}

/* -- rounds until all is done ------------------------------------------------------------------ */

static void pause_for(uint64_t ns)
{
    struct timespec ts = {(time_t)(ns / KV_NS_PER_S), (long)(ns % KV_NS_PER_S)};

    nanosleep(&ts, NULL);
}

static int give_up(struct rds_net *net, int err)
{
    char text[400];

    net->pause_ns = net->down ? KV_MIN(2 * net->pause_ns, DOWN_LONGEST_NS) : DOWN_FIRST_NS;
    net->retry_ns = kv_now_ns() + net->pause_ns;
    net->down = true;
    kv_log_error("redis", "the server can't be used", "server=%s port=%u reason=%s",
                 net->uri.path[0] ? net->uri.path : net->uri.seeds[0].host, net->uri.seeds[0].port,
                 kv_log_quote(text, sizeof(text), net->error.text));
    return err;
}

/* Take replicas' refusals as replies, where all that is left has one. */
static bool take_refusals(struct rds_net *net, struct rds_batch *batch)
{
    for (size_t i = 0; i < batch->n; i++)
        if (!batch->cmds[i].done && !batch->cmds[i].refused)
            return false;
    for (size_t i = 0; i < batch->n; i++)
        batch->cmds[i].done = true;
    net->refused_ns = kv_now_ns() + net->uri.timeout_ms * KV_NS_PER_MS;
    return true;
}

int rds_net_run(struct rds_net *net, struct rds_batch *batch)
{
    uint64_t pause_ns = 0, timeout_ns = net->uri.timeout_ms * KV_NS_PER_MS;
    uint64_t now = kv_now_ns(), deadline = now + timeout_ns;
    int64_t left = (int64_t)batch->n, before;
    unsigned rounds = 0;
    bool over;

    if (batch->error)
        return batch->error;
    if (net->pid != getpid())
        return -ECHILD;
    if (net->down && now < net->retry_ns)
        return -EHOSTDOWN;
    while (left > 0) {
        before = left;
        kv_fail(&net->error, -EAGAIN, 0, "not all could be done");
        left = net->uri.cluster && !net->mapped ? rds_refresh_map(net, deadline) : 0;
        if (left == 0)
            left = round_trip(net, batch, deadline);
        if (left == -EACCES || left == -ENOMEM || left == -EPROTO)
            return give_up(net, (int)left);
        if (left < 0)
            left = before;
        now = kv_now_ns();
        if (left > 0 && left < before) {
            deadline = now + timeout_ns;
            pause_ns = 0;
        }
        over = net->down || now >= deadline || net->stuck;
        rounds++;
        if (left > 0 && (over || (now < net->refused_ns && rounds > 1)) &&
            take_refusals(net, batch))
            break;
        if (left > 0 && (over || (net->uri.cluster && rounds > 1000)))
            return give_up(net, net->error.code);
        if (left > 0 && pause_ns > 0)
            pause_for(KV_MIN(pause_ns, deadline - now));
        pause_ns = KV_MIN(KV_MAX(2 * pause_ns, FIRST_PAUSE_NS), LONGEST_PAUSE_NS);
    }
    net->down = false;
    return 0;
}
