// SPDX-License-Identifier: Apache-2.0
/* Requests: a subscription to a subject of their own, on which the answer comes. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "plane/nats.h"

struct answer {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    int err; /* -EINPROGRESS: none yet */
    void *data;
    size_t len;
};

int kvp_nats_inbox(char ret[KVP_INBOX])
{
    uint64_t random[2];

    if (getrandom(random, sizeof(random), 0) != sizeof(random))
        return -EIO;
    snprintf(ret, KVP_INBOX, "_INBOX.%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    return 0;
}

/* Keep the first answer. */
static void on_answer(void *arg, const struct kvp_nats_msg *msg)
{
    struct answer *answer = arg;

    pthread_mutex_lock(&answer->lock);
    if (answer->err == -EINPROGRESS) {
        answer->data = msg->nobody ? NULL : malloc(msg->len + 1);
        answer->err = msg->nobody ? -ENOENT : answer->data ? 0 : -ENOMEM;
        if (answer->data && msg->len)
            memcpy(answer->data, msg->data, msg->len);
        answer->len = msg->len;
        pthread_cond_signal(&answer->cond);
    }
    pthread_mutex_unlock(&answer->lock);
}

static void wait_for(struct answer *answer, uint32_t timeout_ms)
{
    uint64_t due = kv_ns_after(kv_now_ns(), timeout_ms);
    int err = 0;

    pthread_mutex_lock(&answer->lock);
    while (answer->err == -EINPROGRESS && err == 0)
        err = kv_cond_wait_until(&answer->cond, &answer->lock, due);
    if (answer->err == -EINPROGRESS)
        answer->err = -ETIMEDOUT;
    pthread_mutex_unlock(&answer->lock);
}

int kvp_nats_request(struct kvp_nats *nats, const char *subject, const void *data, size_t len,
                     uint32_t timeout_ms, void **ret, size_t *ret_len)
{
    struct answer answer = {.lock = PTHREAD_MUTEX_INITIALIZER, .err = -EINPROGRESS};
    struct kvp_nats_sub *sub = NULL;
    char inbox[KVP_INBOX];
    int err = kvp_nats_inbox(inbox);

    if (err < 0)
        return err;
    kv_cond_init(&answer.cond);
    err = kvp_nats_subscribe(nats, inbox, 0, on_answer, &answer, &sub);
    if (err == 0)
        err = kvp_nats_publish(
            nats,
            &(struct kvp_nats_msg){.subject = subject, .reply = inbox, .data = data, .len = len});
    if (err == 0)
        wait_for(&answer, timeout_ms);
    kvp_nats_unsubscribe(sub); /* no answer comes behind this */
    err = err < 0 ? err : answer.err;
    if (err == 0) {
        *ret = answer.data;
        *ret_len = answer.len;
    }
    pthread_cond_destroy(&answer.cond);
    pthread_mutex_destroy(&answer.lock);
    return err;
}
