// SPDX-License-Identifier: Apache-2.0
#include "redis/nodes.h"

#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"

bool rds_reply_is(const struct resp_value *reply, const char *word)
{
    static const char script[] = "ERR Error running script"; /* before Redis 7 */
    const char *inner;

    if (reply->type != RESP_ERROR)
        return false;
    if (strncmp(reply->str, script, sizeof(script) - 1) != 0)
        return strncmp(reply->str, word, strlen(word)) == 0;
    inner = strstr(reply->str, ": -");
    return inner && strncmp(inner + 3, word, strlen(word)) == 0;
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
                 {"NOREPLICAS", -EROFS, "the server has too few replicas to take writes"},
                 {"MISCONF", -EROFS, "the server can't persist and takes no writes"},
                 {"MOVED", -EPROTO, "the server is part of a cluster: use redis+cluster://"}};
    const char *meaning = "the server refused a command";
    char text[300];
    int err = -EIO;

    for (size_t i = 0; i < KV_COUNT(known); i++)
        if (rds_reply_is(reply, known[i].word)) {
            meaning = known[i].meaning;
            err = known[i].err;
        }
    if (reply->type != RESP_ERROR) {
        meaning = "the server's reply is malformed";
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

int rds_find_node(struct rds_net *net, const char *host, unsigned port)
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

/* Copy a secret from the environment, which may change while the handle lives. *ret NULL: unset. */
static int copy_secret(const char *text, char **ret)
{
    *ret = text && text[0] ? strdup(text) : NULL;
    return text && text[0] && !*ret ? -ENOMEM : 0;
}

static void wipe_secret(char *secret)
{
    if (secret)
        explicit_bzero(secret, strlen(secret));
    free(secret);
}

int rds_net_init(struct rds_net *net, const struct rds_uri *uri, struct kv_error *error)
{
    memset(net, 0, sizeof(*net));
    net->uri = *uri;
    net->pid = getpid();
    if (copy_secret(getenv("KV_STORE_REDIS_PASSWORD"), &net->password) < 0 ||
        copy_secret(uri->user[0] ? uri->user : getenv("KV_STORE_REDIS_USER"), &net->user) < 0)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (size_t i = 0; i < uri->n_seeds; i++)
        if (rds_find_node(net, uri->seeds[i].host, uri->seeds[i].port) < 0)
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
    wipe_secret(net->password);
    wipe_secret(net->user);
    memset(net, 0, sizeof(*net));
}

/* -- greeting a server ------------------------------------------------------------------------- */

static int check_greeting(struct rds_net *net, const struct rds_batch *batch)
{
    for (size_t i = 0; i < batch->n; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;

        if (reply->type == RESP_STATUS)
            continue;
        if (rds_reply_is(reply, "LOADING") || rds_reply_is(reply, "MASTERDOWN"))
            return kv_fail(&net->error, -EAGAIN, 0, "%.100s", reply->str);
        /* Show the first word only: some servers repeat the arguments, with the password. */
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
        explicit_bzero(batch.text.data, batch.text.len); /* the text has the password */
    rds_batch_fini(&batch);
    return err;
}

int rds_connect_node(struct rds_net *net, struct rds_node *node, uint64_t deadline_ns)
{
    int err;

    if (node->conn.fd >= 0)
        return 0;
    err = rds_conn_open(&node->conn, &node->at, net->uri.path, net->tls, deadline_ns, &net->error);
    if (err == 0)
        err = greet(net, node, deadline_ns);
    if (err < 0)
        rds_conn_close(&node->conn);
    else
        node->line = ++net->n_lines;
    return err;
}
