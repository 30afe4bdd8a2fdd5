// SPDX-License-Identifier: Apache-2.0
/* Messages into memory of this process, and the end of those that come too late. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "peer/ucx/node.h"

enum state { WAITING, RUNNING, ENDED };

/** A message that is expected. */
struct expected {
    struct kvbm_carrier_receive *receive;
    enum state state;
    ucp_ep_h ep; /* that brings it, while it is RUNNING and nobody closes that */
    size_t bytes;
    ucp_dt_iov_t *list; /* of its pieces */
};

struct kvbm_carrier_receive {
    struct kvbm_ucx_command command;
    LIST_ENTRY(kvbm_carrier_receive) table;
    struct kvbm_carrier_node *node;
    uint64_t tag;
    const struct kvbm_carrier_message *messages;
    uint32_t n;
    uint32_t left, running; /* under the node's lock; so are the states */
    int err;
    bool swept; /* given up, and what ran has been closed */
    pthread_cond_t changed;
    struct expected *expected;
    ucp_dt_iov_t *list;
};

static struct kvbm_ucx_receives *bucket_of(struct kvbm_carrier_node *node, uint64_t tag)
{
    return &node->receives[tag % KVBM_UCX_BUCKETS];
}

/* End a message, with the lock held. */
static void end_expected(struct expected *expected, int err)
{
    struct kvbm_carrier_receive *receive = expected->receive;

    if (expected->state == RUNNING)
        receive->running--;
    expected->state = ENDED;
    expected->ep = NULL;
    if (err < 0 && receive->err == 0)
        receive->err = err;
    if (--receive->left == 0 || err < 0 || receive->err < 0)
        pthread_cond_broadcast(&receive->changed);
}

/* ---- the node's thread ---- */

static void on_received(void *request, ucs_status_t status, size_t len, void *arg)
{
    struct expected *expected = arg;
    struct kvbm_carrier_node *node = expected->receive->node;

    if (request) {
        ucp_request_free(request);
        node->n_busy--;
    }
    pthread_mutex_lock(&node->lock);
    end_expected(expected, status != UCS_OK ? -EPIPE : len != expected->bytes ? -EPROTO : 0);
    pthread_mutex_unlock(&node->lock);
}

/* Find what a message is for and let it run; NULL: nobody waits for it. */
static struct expected *claim(struct kvbm_carrier_node *node, const struct kvbm_ucx_head *head,
                              size_t len, ucp_ep_h ep)
{
    struct kvbm_carrier_receive *receive = NULL;
    struct expected *expected = NULL;

    pthread_mutex_lock(&node->lock);
    LIST_FOREACH(receive, bucket_of(node, head->tag), table)
    {
        if (receive->tag == head->tag)
            break;
    }
    if (receive && head->n == receive->n && head->index < receive->n && receive->err == 0 &&
        receive->expected[head->index].state == WAITING)
        expected = &receive->expected[head->index];
    if (expected && expected->bytes != len) {
        end_expected(expected, -EPROTO);
        expected = NULL;
    }
    if (expected) {
        expected->state = RUNNING;
        expected->ep = ep;
        receive->running++;
    }
    pthread_mutex_unlock(&node->lock);
    return expected;
}

/* Copy a short message, which is here already. */
static void copy(struct expected *expected, const uint8_t *data)
{
    const struct kvbm_carrier_message *message =
        &expected->receive->messages[expected - expected->receive->expected];

    for (size_t i = 0; i < message->n; i++) {
        memcpy(message->pieces[i].iov_base, data, message->pieces[i].iov_len);
        data += message->pieces[i].iov_len;
    }
    on_received(NULL, UCS_OK, expected->bytes, expected);
}

ucs_status_t kvbm_ucx_on_message(void *arg, const void *head_at, size_t head_len, void *data,
                                 size_t len, const ucp_am_recv_param_t *param)
{
    struct kvbm_carrier_node *node = arg;
    ucp_request_param_t recv = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                UCP_OP_ATTR_FIELD_USER_DATA |
                                                UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
                                .cb.recv_am = on_received};
    struct expected *expected = NULL;
    struct kvbm_ucx_head head;
    ucs_status_ptr_t request;
    size_t count;
    void *to;

    if (head_len == sizeof(head) && param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) {
        memcpy(&head, head_at, sizeof(head));
        expected = claim(node, &head, len, param->reply_ep);
    }
    if (!expected)
        return UCS_OK; /* UCX tells the sender that it has been taken */
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        copy(expected, data);
        return UCS_OK;
    }
    recv.user_data = expected;
    to = kvbm_ucx_pieces(&expected->receive->messages[head.index], expected->list, &recv, &count);
    request = ucp_am_recv_data_nbx(node->worker, data, to, count, &recv);
    if (UCS_PTR_IS_PTR(request))
        node->n_busy++;
    else
        on_received(NULL, UCS_PTR_RAW_STATUS(request), expected->bytes, expected);
    return UCS_OK;
}

/* Forget an endpoint that is being closed: other receives end with it. With the lock held. */
static void forget(struct kvbm_carrier_node *node, ucp_ep_h ep)
{
    for (uint32_t b = 0; b < KVBM_UCX_BUCKETS; b++) {
        struct kvbm_carrier_receive *receive = NULL;

        LIST_FOREACH(receive, &node->receives[b], table)
        {
            for (uint32_t i = 0; i < receive->n; i++) {
                if (receive->expected[i].ep == ep)
                    receive->expected[i].ep = NULL;
            }
        }
    }
}

/* Close what still brings messages of a receive that was given up. */
static void run_sweep(struct kvbm_ucx_command *command)
{
    struct kvbm_carrier_receive *receive = (struct kvbm_carrier_receive *)(void *)command;
    struct kvbm_carrier_node *node = receive->node;

    for (uint32_t i = 0; i < receive->n; i++) {
        ucp_ep_h ep;

        pthread_mutex_lock(&node->lock);
        ep = receive->expected[i].ep;
        if (ep)
            forget(node, ep);
        pthread_mutex_unlock(&node->lock);
        if (ep)
            kvbm_ucx_close_any(node, ep);
    }
    pthread_mutex_lock(&node->lock);
    receive->swept = true;
    pthread_cond_broadcast(&receive->changed);
    pthread_mutex_unlock(&node->lock);
}

/* ---- any thread ---- */

static void receive_free(struct kvbm_carrier_receive *receive)
{
    pthread_cond_destroy(&receive->changed);
    free(receive->expected);
    free(receive->list);
    free(receive);
}

static int receive_create(struct kvbm_carrier_node *node,
                          const struct kvbm_carrier_message *messages, uint32_t n,
                          struct kvbm_carrier_receive **ret)
{
    struct kvbm_carrier_receive *receive = calloc(1, sizeof(*receive));
    size_t n_pieces = 0;

    for (uint32_t i = 0; i < n; i++)
        n_pieces += messages[i].n;
    if (!receive)
        return -ENOMEM;
    kv_cond_init(&receive->changed);
    receive->expected = calloc(n + 1, sizeof(*receive->expected));
    receive->list = calloc(n_pieces + 1, sizeof(*receive->list));
    if (!receive->expected || !receive->list) {
        receive_free(receive);
        return -ENOMEM;
    }
    receive->node = node;
    receive->messages = messages;
    receive->n = receive->left = n;
    *ret = receive;
    return 0;
}

int kvbm_ucx_receive_start(struct kvbm_carrier_node *node,
                           const struct kvbm_carrier_message *messages, uint32_t n, uint64_t *tag,
                           struct kvbm_carrier_receive **ret)
{
    struct kvbm_carrier_receive *receive = NULL;
    int err = receive_create(node, messages, n, &receive);
    ucp_dt_iov_t *list;

    if (err < 0)
        return err;
    if (getrandom(&receive->tag, sizeof(receive->tag), 0) != (ssize_t)sizeof(receive->tag)) {
        receive_free(receive);
        return -EIO;
    }
    list = receive->list;
    for (uint32_t i = 0; i < n; i++) {
        receive->expected[i] = (struct expected){.receive = receive, .list = list};
        for (size_t j = 0; j < messages[i].n; j++)
            receive->expected[i].bytes += messages[i].pieces[j].iov_len;
        list += messages[i].n;
    }
    pthread_mutex_lock(&node->lock);
    LIST_INSERT_HEAD(bucket_of(node, receive->tag), receive, table);
    pthread_mutex_unlock(&node->lock);
    *tag = receive->tag;
    *ret = receive;
    return 0;
}

int kvbm_ucx_receive_end(struct kvbm_carrier_receive *receive, bool sent, uint64_t deadline_ns)
{
    struct kvbm_carrier_node *node = receive->node;
    int err;

    pthread_mutex_lock(&node->lock);
    while (sent && receive->left && receive->err == 0 &&
           kv_cond_wait_until(&receive->changed, &node->lock, deadline_ns) == 0)
        ;
    if (receive->left && receive->err == 0)
        receive->err = -ETIMEDOUT; /* claims nothing more from here on */
    if (receive->running) {
        pthread_mutex_unlock(&node->lock);
        kvbm_ucx_command(node, &receive->command, run_sweep);
        pthread_mutex_lock(&node->lock);
        while (receive->running || !receive->swept)
            pthread_cond_wait(&receive->changed, &node->lock);
    }
    LIST_REMOVE(receive, table);
    err = receive->err;
    pthread_mutex_unlock(&node->lock);
    receive_free(receive);
    return err;
}
