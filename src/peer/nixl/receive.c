// SPDX-License-Identifier: Apache-2.0
/*
 * Receives: the peer writes into a run of the arena, and the reader's thread copies from there once
 * the peer has told that all is sent. A receive that is given up keeps its run: bytes may still come.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/log.h"
#include "peer/nixl/node.h"

struct kvbm_carrier_receive {
    LIST_ENTRY(kvbm_carrier_receive) list; /* receives, or given_up */
    struct kvbm_carrier_node *node;
    uint64_t tag; /* random number << 16, first chunk */
    struct kvbm_nixl_run run;
    bool over; /* the peer sends no more of it */
    const struct kvbm_carrier_message *messages;
    uint32_t n;
};

int kvbm_nixl_receive_start(struct kvbm_carrier_node *node,
                            const struct kvbm_carrier_message *messages, uint32_t n, uint64_t *tag,
                            struct kvbm_carrier_receive **ret)
{
    struct kvbm_carrier_receive *receive = calloc(1, sizeof(*receive));
    uint64_t number;
    bool taken;

    if (!receive)
        return -ENOMEM;
    /* Only the peer that is asked knows the tag: another one can't tell that all of it is sent. */
    if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number)) {
        free(receive);
        return -EIO;
    }
    receive->node = node;
    receive->messages = messages;
    receive->n = n;
    pthread_mutex_lock(&node->lock);
    taken = !node->replacing && kvbm_nixl_take(node, kvbm_nixl_bytes(messages, n), &receive->run);
    if (taken) {
        receive->tag = number << 16 | receive->run.first;
        LIST_INSERT_HEAD(&node->receives, receive, list);
        pthread_cond_broadcast(&node->changed);
    }
    pthread_mutex_unlock(&node->lock);
    if (!taken) {
        free(receive);
        return -ENOBUFS;
    }
    *tag = receive->tag;
    *ret = receive;
    return 0;
}

static void copy_out(const struct kvbm_carrier_receive *receive)
{
    const uint8_t *from = kvbm_nixl_at(receive->node, &receive->run);

    for (uint32_t i = 0; i < receive->n; i++) {
        const struct kvbm_carrier_message *message = &receive->messages[i];

        for (size_t j = 0; j < message->n; j++) {
            memcpy(message->pieces[j].iov_base, from, message->pieces[j].iov_len);
            from += message->pieces[j].iov_len;
        }
    }
}

int kvbm_nixl_receive_end(struct kvbm_carrier_receive *receive, bool sent, uint64_t deadline_ns)
{
    struct kvbm_carrier_node *node = receive->node;
    bool keep;

    (void)deadline_ns; /* NIXL has told the peer that all is here */
    if (sent)
        copy_out(receive);
    pthread_mutex_lock(&node->lock);
    LIST_REMOVE(receive, list);
    keep = !sent && !receive->over;
    if (keep) {
        LIST_INSERT_HEAD(&node->given_up, receive, list);
        node->n_lost += receive->run.n;
        pthread_cond_broadcast(&node->changed);
    } else {
        kvbm_nixl_give(node, &receive->run);
    }
    pthread_mutex_unlock(&node->lock);
    if (!keep)
        free(receive);
    return sent ? 0 : -ETIMEDOUT;
}

/* Free a receive that was given up, with the lock held. */
static void drop(struct kvbm_carrier_receive *receive)
{
    struct kvbm_carrier_node *node = receive->node;

    LIST_REMOVE(receive, list);
    node->n_lost -= receive->run.n;
    kvbm_nixl_give(node, &receive->run);
    free(receive);
}

void kvbm_nixl_receive_over(struct kvbm_carrier_node *node, uint64_t tag)
{
    struct kvbm_carrier_receive *receive = NULL;

    pthread_mutex_lock(&node->lock);
    LIST_FOREACH(receive, &node->receives, list)
    {
        if (receive->tag == tag)
            receive->over = true;
    }
    LIST_FOREACH(receive, &node->given_up, list)
    {
        if (receive->tag == tag)
            break;
    }
    if (receive)
        drop(receive);
    pthread_mutex_unlock(&node->lock);
}

void kvbm_nixl_drop_receives(struct kvbm_carrier_node *node)
{
    struct kvbm_carrier_receive *receive;

    while ((receive = LIST_FIRST(&node->given_up)))
        drop(receive);
}
