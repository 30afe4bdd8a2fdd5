// SPDX-License-Identifier: Apache-2.0
#include "redis/nodes.h"

#include <poll.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"

#define MIN_PACE ((uint64_t)64 << 10) /* bytes a second */
#define IOV_MAX_HERE 64
#define FIRST_PAUSE_NS (10 * KV_NS_PER_MS)
#define LONGEST_PAUSE_NS (200 * KV_NS_PER_MS)
#define DOWN_FIRST_NS (100 * KV_NS_PER_MS)
#define DOWN_LONGEST_NS KV_NS_PER_S

static bool starts(const struct resp_value *reply, const char *word)
{
    return reply->type == RESP_ERROR && strncmp(reply->str, word, strlen(word)) == 0;
}

int rds_reply_error(const struct resp_value *reply, const char *what)
{
    static const struct {
        const char *word;
        int err;
        const char *meaning;
    } known[] = {{"OOM", -ENOSPC, "the server is out of memory (maxmemory)"},
                 {"NOAUTH", -EACCES, "the server wants a password: set KV_STORE_REDIS_PASSWORD"},
                 {"WRONGPASS", -EACCES, "the server refuses the user or password"},
                 {"NOPERM", -EACCES, "the user may not do this"},
                 {"LOADING", -EAGAIN, "the server is still loading its data"},
                 {"READONLY", -EROFS, "the server is a read-only replica"},
                 {"MISCONF", -EROFS, "the server can't persist and takes no writes"},
                 {"MOVED", -EPROTO, "the server is part of a cluster: use redis+cluster://"}};
    const char *meaning = "the server refused a command";
    char text[300];
    int err = -EIO;

    for (size_t i = 0; i < KV_COUNT(known); i++)
        if (starts(reply, known[i].word)) {
            meaning = known[i].meaning;
            err = known[i].err;
        }
    if (reply->type != RESP_ERROR) {
        meaning = "the server's reply makes no sense";
        err = -EPROTO;
    }
    kv_log_error("redis", meaning, "call=%s reply=%s", what,
                 kv_log_quote(text, sizeof(text), reply->str ? reply->str : ""));
    return err;
}

/* -- nodes ------------------------------------------------------------------------------------- */

static void node_destroy(struct rds_node *node)
{
    if (!node)
        return;
    rds_conn_close(&node->conn);
    free(node->queue);
    free(node);
}

/* The number of the node at @host:@port, made when it is new; negative errno. */
static int find_node(struct rds_net *net, const char *host, unsigned port)
{
    struct rds_node *node;

    for (size_t i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->at.port == port && strcmp(net->nodes[i]->at.host, host) == 0)
            return (int)i;
    if (net->n_nodes == RDS_MAX_NODES || strlen(host) >= sizeof(node->at.host) || port > 65535)
        return -EPROTO;
    node = calloc(1, sizeof(*node));
    if (!node)
        return -ENOMEM;
    node->conn = (struct rds_conn)RDS_CONN_INIT;
    node->at.port = (uint16_t)port;
    memcpy(node->at.host, host, strlen(host) + 1);
    net->nodes[net->n_nodes] = node;
    return (int)net->n_nodes++;
}

int rds_net_init(struct rds_net *net, const struct rds_uri *uri, struct kv_error *error)
{
    memset(net, 0, sizeof(*net));
    net->uri = *uri;
    net->password = getenv("KV_STORE_REDIS_PASSWORD");
    net->user = uri->user[0] ? net->uri.user : getenv("KV_STORE_REDIS_USER");
    if (net->user && !net->user[0])
        net->user = NULL;
    if (net->password && !net->password[0])
        net->password = NULL;
    for (size_t i = 0; i < uri->n_seeds; i++)
        if (find_node(net, uri->seeds[i].host, uri->seeds[i].port) < 0)
            return kv_fail(error, -ENOMEM, 0, "out of memory");
    if (uri->tls) {
        net->tls = rds_tls_create(uri, error);
        if (!net->tls)
            return error->code;
    }
    return 0;
}

void rds_net_fini(struct rds_net *net)
{
    for (size_t i = 0; i < net->n_nodes; i++)
        node_destroy(net->nodes[i]);
    rds_tls_destroy(net->tls);
    memset(net, 0, sizeof(*net));
}

/* -- a connection's first words ---------------------------------------------------------------- */

static int check_greeting(struct rds_net *net, const struct rds_batch *batch)
{
    for (size_t i = 0; i < batch->n; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;

        if (reply->type == RESP_STATUS)
            continue;
        if (starts(reply, "LOADING") || starts(reply, "MASTERDOWN"))
            return kv_fail(&net->error, -EAGAIN, 0, "%.100s", reply->str);
        /* The first word only: some servers repeat the arguments, the password among them. */
        if (reply->type == RESP_ERROR)
            return kv_fail(&net->error, -EACCES, 0, "%.*s in reply to AUTH or SELECT",
                           (int)KV_MIN(strcspn(reply->str, " "), (size_t)40), reply->str);
        return kv_fail(&net->error, -EACCES, 0, "unexpected reply to AUTH, SELECT");
    }
    return 0;
}

static int greet(struct rds_net *net, struct rds_node *node, uint64_t deadline_ns)
{
    struct rds_batch batch = {0};
    struct resp_value replies[2];
    char db[16];
    int err;

    if (net->password) {
        rds_batch_begin(&batch, net->user ? 3 : 2);
        rds_batch_word(&batch, "AUTH");
        if (net->user)
            rds_batch_word(&batch, net->user);
        rds_batch_word(&batch, net->password);
    }
    if (net->uri.db != 0) {
        snprintf(db, sizeof(db), "%u", net->uri.db);
        rds_batch_begin(&batch, 2);
        rds_batch_word(&batch, "SELECT");
        rds_batch_word(&batch, db);
    }
    err = batch.error;
    if (err == 0 && batch.n > 0) {
        net->round_trips++;
        err = rds_conn_talk(&node->conn, batch.text.data, batch.text.len, replies, batch.n,
                            deadline_ns);
        if (err < 0)
            kv_fail(&net->error, err, 0, "%s", strerror(-err));
        for (size_t i = 0; err == 0 && i < batch.n; i++)
            batch.cmds[i].reply = replies[i];
    }
    if (err == 0)
        err = check_greeting(net, &batch);
    if (batch.text.data)
        explicit_bzero(batch.text.data, batch.text.len); /* the password */
    rds_batch_fini(&batch);
    return err;
}

static int connect_node(struct rds_net *net, struct rds_node *node)
{
    uint64_t deadline_ns = kv_now_ns() + net->uri.timeout_ms * KV_NS_PER_MS;
    int err;

    if (node->conn.fd >= 0)
        return 0;
    err = rds_conn_open(&node->conn, &node->at, net->uri.path, net->tls, deadline_ns, &net->error);
    if (err == 0)
        err = greet(net, node, deadline_ns);
    if (err < 0)
        rds_conn_close(&node->conn);
    return err;
}

/* -- who has which slot ------------------------------------------------------------------------ */

/* One row of CLUSTER SLOTS: first, last, [host, port, ...], replicas. */
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
    /* No name: where the answer comes from. */
    host = owner->items[0].type == RESP_BULK && owner->items[0].len > 0 ? owner->items[0].str
                                                                        : teller->at.host;
    node = find_node(net, host, (unsigned)owner->items[1].num);
    if (node < 0)
        return node;
    for (int64_t slot = v->items[0].num; slot <= v->items[1].num; slot++)
        net->slots[slot] = (int16_t)node;
    return 0;
}

static int ask_map(struct rds_net *net, struct rds_node *node)
{
    static const char command[] = "*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n";
    struct resp_value reply;
    int err = connect_node(net, node);

    if (err < 0)
        return err;
    net->round_trips++;
    err = rds_conn_talk(&node->conn, command, sizeof(command) - 1, &reply, 1,
                        kv_now_ns() + net->uri.timeout_ms * KV_NS_PER_MS);
    if (err < 0) {
        rds_conn_close(&node->conn);
        return kv_fail(&net->error, err, 0, "%s", strerror(-err));
    }
    if (reply.type != RESP_ARRAY || reply.n == 0)
        err = starts(&reply, "NOAUTH") || starts(&reply, "NOPERM") ? -EACCES : -EAGAIN;
    for (size_t i = 0; i < KV_COUNT(net->slots); i++)
        net->slots[i] = -1;
    for (size_t i = 0; err == 0 && i < reply.n; i++)
        err = take_range(net, node, &reply.items[i]);
    if (err < 0)
        kv_fail(&net->error, err, 0, "%.150s",
                reply.type == RESP_ERROR ? reply.str : "the reply to CLUSTER SLOTS makes no sense");
    resp_value_fini(&reply);
    return err;
}

static int refresh_map(struct rds_net *net)
{
    size_t n = net->n_nodes; /* asking makes more */
    int err = -EHOSTUNREACH;

    for (size_t i = 0; i < n; i++) {
        err = ask_map(net, net->nodes[i]);
        if (err == 0) {
            net->mapped = true;
            return 0;
        }
    }
    return err;
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
    err = refresh_map(net);
    if (err < 0) {
        kv_log_error("redis", "the cluster can't be asked", "reason=\"%s\"", net->error.text);
        return err;
    }
    for (size_t i = 0; i < KV_COUNT(net->slots); i++)
        if (net->slots[i] >= 0 && !seen[net->slots[i]]) {
            seen[net->slots[i]] = true;
            ret[(*ret_n)++] = net->slots[i];
        }
    return 0;
}

/* -- one round: send all, receive all ---------------------------------------------------------- */

static int enqueue(struct rds_net *net, struct rds_batch *batch, size_t i)
{
    struct rds_cmd *cmd = &batch->cmds[i];
    int at = cmd->node >= 0 ? cmd->node : net->uri.cluster ? net->slots[cmd->slot] : 0;
    struct rds_node *node;
    size_t *queue;

    if (at < 0)
        return kv_fail(&net->error, -EAGAIN, 0, "no node has slot %u", cmd->slot);
    node = net->nodes[at];
    if (node->n_queue == node->queue_capacity) {
        size_t capacity = KV_MAX(2 * node->queue_capacity, 64);

        queue = realloc(node->queue, capacity * sizeof(*queue));
        if (!queue)
            return -ENOMEM;
        node->queue = queue;
        node->queue_capacity = capacity;
    }
    cmd->asked = false;
    node->queue[node->n_queue++] = i;
    return 0;
}

static bool node_busy(const struct rds_node *node)
{
    return node->error == 0 && node->n_got < node->n_queue;
}

/* As much as the socket takes now. Pieces that lie side by side go as one. */
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

/* MOVED slot host:port, ASK slot host:port. */
static int redirect(struct rds_net *net, struct rds_node *from, struct rds_cmd *cmd)
{
    bool ask = starts(&cmd->reply, "ASK ");
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
    node = find_node(net, host[1] ? host + 1 : from->at.host, (unsigned)port);
    if (node < 0)
        return kv_fail(&net->error, node, 0, "a redirection to one node too many");
    cmd->asking = ask;
    cmd->node = (int16_t)(ask ? node : -1);
    if (!ask)
        net->slots[cmd->slot] = (int16_t)node;
    return 0;
}

/* What a reply is to the command: its answer, a redirection, or "not now". */
static int settle(struct rds_net *net, struct rds_node *node, struct rds_cmd *cmd)
{
    static const char *const later[] = {"LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN"};
    int err = 0;

    if (net->uri.cluster && !cmd->fixed &&
        (starts(&cmd->reply, "MOVED ") || starts(&cmd->reply, "ASK "))) {
        err = redirect(net, node, cmd);
        resp_value_fini(&cmd->reply);
        return err;
    }
    for (size_t i = 0; i < KV_COUNT(later); i++)
        if (starts(&cmd->reply, later[i]) ||
            (net->uri.cluster && starts(&cmd->reply, "READONLY"))) { /* a fail-over */
            kv_fail(&net->error, -EAGAIN, 0, "%.100s", cmd->reply.str);
            net->mapped = false;
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
        int rc = rds_conn_recv(&node->conn, &reply);

        if (rc <= 0)
            return rc;
        if (cmd->asking && !cmd->asked) {
            cmd->asked = true;
            resp_value_fini(&reply);
            continue;
        }
        cmd->reply = reply;
        node->n_got++;
        rc = settle(net, node, cmd);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Send and receive what can be now; returns bytes moved. */
static uint64_t serve(struct rds_net *net, struct rds_node *node, struct rds_batch *batch)
{
    uint64_t sent = node->conn.sent, received = node->conn.received;
    int err;

    node->conn.extra = 0;
    err = push(node, batch);
    if (err == 0)
        err = pull(net, node, batch);
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

/* Until some busy node can move, or @deadline_ns. */
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
    for (size_t i = 0; i < net->n_nodes; i++)
        if (node_busy(net->nodes[i])) {
            net->nodes[i]->error =
                kv_fail(&net->error, -ETIMEDOUT, 0, "no answer from the server in time");
            rds_conn_close(&net->nodes[i]->conn); /* late replies must not meet later commands */
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

/* Returns how many commands have no reply yet, or the errno of what repeating can't mend. */
static int64_t round_trip(struct rds_net *net, struct rds_batch *batch)
{
    int64_t left = 0;
    int err = 0;

    for (size_t i = 0; i < net->n_nodes; i++) {
        struct rds_node *node = net->nodes[i];

        node->n_queue = node->n_sent = node->sent_offset = node->n_got = 0;
        node->error = 0;
    }
    for (size_t i = 0; i < batch->n; i++)
        if (!batch->cmds[i].done && (err = enqueue(net, batch, i)) < 0)
            return err == -EAGAIN ? 1 : err;
    for (size_t i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->n_queue > 0)
            net->nodes[i]->error = connect_node(net, net->nodes[i]);
    net->round_trips++;
    exchange(net, batch);
    for (size_t i = 0; i < batch->n; i++)
        left += !batch->cmds[i].done;
    for (size_t i = 0; i < net->n_nodes; i++)
        if (net->nodes[i]->error == -EACCES || net->nodes[i]->error == -ENOMEM ||
            net->nodes[i]->error == -EPROTO)
            err = net->nodes[i]->error;
        else if (net->nodes[i]->error < 0)
            net->mapped = false;          /* somebody else may have its slots now */
    for (size_t i = 0; i < batch->n; i++) /* an ASK holds for one attempt */
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

int rds_net_run(struct rds_net *net, struct rds_batch *batch)
{
    uint64_t pause_ns = 0, timeout_ns = net->uri.timeout_ms * KV_NS_PER_MS;
    uint64_t now = kv_now_ns(), deadline = now + timeout_ns;
    int64_t left = (int64_t)batch->n, before;
    unsigned rounds = 0;

    if (batch->error)
        return batch->error;
    if (net->down && now < net->retry_ns)
        return -EHOSTDOWN;
    while (left > 0) {
        before = left;
        kv_fail(&net->error, -EAGAIN, 0, "not all could be done");
        left = net->uri.cluster && !net->mapped ? refresh_map(net) : 0;
        if (left == 0)
            left = round_trip(net, batch);
        if (left == -EACCES || left == -ENOMEM || left == -EPROTO)
            return give_up(net, (int)left);
        if (left < 0)
            left = before;
        now = kv_now_ns();
        if (left > 0 && left < before) {
            deadline = now + timeout_ns;
            pause_ns = 0;
        }
        if (left > 0 && (net->down || now >= deadline || net->error.code == -ETIMEDOUT ||
                         (net->uri.cluster && ++rounds > 1000)))
            return give_up(net, net->error.code);
        if (left > 0 && pause_ns > 0)
            pause_for(KV_MIN(pause_ns, deadline - now));
        pause_ns = KV_MIN(KV_MAX(2 * pause_ns, FIRST_PAUSE_NS), LONGEST_PAUSE_NS);
    }
    net->down = false;
    return 0;
}
