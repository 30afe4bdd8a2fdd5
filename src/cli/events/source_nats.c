// SPDX-License-Identifier: Apache-2.0
/*
 * Messages of a NATS subject. The client's thread queues them; the command's thread takes them out.
 *
 *     libnats' thread ──► queue (bounded) ──► run
 *
 * Of a durable consumer one message at a time is in the queue: libnats' thread waits until run is done
 * with it, since it counts as taken then.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"
#include "cli/events/source_impl.h"
#include "cli/show/bar.h"
#include "plane/nats.h"

#define MAX_QUEUED (64u << 20)       /* bytes of items that wait for run */
#define TURN_NS (200 * KV_NS_PER_MS) /* longest wait before looking for ^C */
#define DEFAULT_SUBJECT "kvasir.>"

struct item {
    STAILQ_ENTRY(item) next;
    uint64_t time_ns;
    size_t n_subject, n_data;
    char bytes[]; /* the subject, then the data */
};

struct nats_source {
    struct kc_source base;
    char url[KC_MAX_FROM]; /* of the server */
    struct kvp_nats *client;
    struct kvp_nats_sub *sub;
    struct kvp_nats_secrets secrets;
    pthread_mutex_t lock; /* guards from here.. */
    pthread_cond_t filled;
    STAILQ_HEAD(items, item) items;
    size_t queued;
    uint64_t missed; /* messages without room in the queue */
    pthread_cond_t done;
    uint64_t n_queued, n_taken; /* messages so far */
    bool closing;
    /* ..to here. */
    char problem[160];
};

static size_t size_of(size_t n_subject, size_t n_data)
{
    return sizeof(struct item) + n_subject + n_data;
}

/* -- the client's thread ----------------------------------------------------------------------- */

/* Queue a message. The lock is held. Returns false when there is no room. */
static bool put(struct nats_source *source, const struct kvp_nats_msg *msg)
{
    size_t n_subject = strlen(msg->subject), size = size_of(n_subject, msg->len);
    struct item *item = NULL;

    if (size <= MAX_QUEUED - source->queued)
        item = malloc(size);
    source->missed += !item;
    if (item) {
        *item = (struct item){.time_ns = kv_wall_ns(), .n_subject = n_subject, .n_data = msg->len};
        memcpy(item->bytes, msg->subject, n_subject);
        if (msg->len)
            memcpy(item->bytes + n_subject, msg->data, msg->len);
        STAILQ_INSERT_TAIL(&source->items, item, next);
        source->queued += size;
        source->n_queued++;
        pthread_cond_signal(&source->filled);
    }
    return item != NULL;
}

static void receive(void *arg, const struct kvp_nats_msg *msg)
{
    struct nats_source *source = arg;

    pthread_mutex_lock(&source->lock);
    if (!put(source, msg) && msg->again)
        *msg->again = true;
    while (msg->again && !*msg->again && source->n_taken < source->n_queued) {
        if (source->closing)
            *msg->again = true;
        else
            pthread_cond_wait(&source->done, &source->lock);
    }
    pthread_mutex_unlock(&source->lock);
}

/* -- the command's thread ---------------------------------------------------------------------- */

/* Take the oldest message, or wait for one until @until_ns. */
static struct item *take(struct nats_source *source, uint64_t until_ns)
{
    struct item *item;

    pthread_mutex_lock(&source->lock);
    if (STAILQ_EMPTY(&source->items))
        kv_cond_wait_until(&source->filled, &source->lock, until_ns);
    item = STAILQ_FIRST(&source->items);
    if (item) {
        STAILQ_REMOVE_HEAD(&source->items, next);
        source->queued -= size_of(item->n_subject, item->n_data);
    }
    pthread_mutex_unlock(&source->lock);
    return item;
}

static void note_taken(struct nats_source *source)
{
    pthread_mutex_lock(&source->lock);
    source->n_taken++;
    pthread_cond_signal(&source->done);
    pthread_mutex_unlock(&source->lock);
}

static int run(struct kc_source *base, uint64_t deadline_ns, kc_message_fn fn, void *arg)
{
    struct nats_source *source = (struct nats_source *)base;
    uint64_t now_ns = kv_now_ns();
    int rc = 0;

    for (; rc == 0 && now_ns < deadline_ns && !kc_bar_interrupted(); now_ns = kv_now_ns()) {
        struct item *item = take(source, KV_MIN(deadline_ns, now_ns + TURN_NS));
        struct kc_message message;

        if (!item)
            continue;
        message = (struct kc_message){.time_ns = item->time_ns,
                                      .from = {source->url, strlen(source->url)},
                                      .n_frames = 2,
                                      .frames = {{item->bytes, item->n_subject},
                                                 {item->bytes + item->n_subject, item->n_data}}};
        rc = fn(arg, &message);
        free(item);
        if (rc <= 0)
            note_taken(source);
    }
    return rc;
}

static void get_state(const struct kc_source *base, struct kc_source_state *ret)
{
    struct nats_source *source = (struct nats_source *)(uintptr_t)base;
    struct kvp_nats_stats stats;

    kvp_nats_get_stats(source->client, &stats);
    pthread_mutex_lock(&source->lock);
    *ret = (struct kc_source_state){.connected = stats.connected,
                                    .ever = stats.connections > 0,
                                    .nats = true,
                                    .missed = source->missed + stats.missed};
    pthread_mutex_unlock(&source->lock);
    snprintf(source->problem, sizeof(source->problem), "%s", stats.error);
    if (!stats.connected)
        ret->problem = stats.error[0] ? source->problem : "no answer of the NATS server so far";
}

static void close_source(struct kc_source *base)
{
    struct nats_source *source = (struct nats_source *)base;
    struct item *item;

    pthread_mutex_lock(&source->lock);
    source->closing = true;
    pthread_cond_signal(&source->done);
    pthread_mutex_unlock(&source->lock);
    kvp_nats_unsubscribe(source->sub);
    kvp_nats_close(source->client, 0);
    while ((item = STAILQ_FIRST(&source->items))) {
        STAILQ_REMOVE_HEAD(&source->items, next);
        free(item);
    }
    explicit_bzero(&source->secrets, sizeof(source->secrets));
    pthread_cond_destroy(&source->filled);
    pthread_cond_destroy(&source->done);
    pthread_mutex_destroy(&source->lock);
    free(source);
}

/* -- opening ----------------------------------------------------------------------------------- */

/* Take @url apart: the server's part goes to source->url. Returns the subject; NULL: too long. */
static const char *split(struct nats_source *source, const char *url)
{
    const char *host = strstr(url, "://") + 3, *slash = strchr(host, '/');
    size_t len = slash ? (size_t)(slash - url) : strlen(url);

    if (len >= sizeof(source->url))
        return NULL;
    memcpy(source->url, url, len);
    return slash && slash[1] ? slash + 1 : DEFAULT_SUBJECT;
}

static int connect_to(struct nats_source *source, const char *url, const struct kvp_nats_args *args,
                      const struct kvp_nats_durable *durable, struct kv_error *error)
{
    struct kvp_nats_opts opts = KVP_NATS_OPTS_INIT;
    const char *subject = split(source, url);
    int rc;

    if (!subject)
        return kv_fail(error, -EINVAL, 0, "not a usable URL: too long");
    if (strchr(source->url, '@'))
        return kv_fail(
            error, -EINVAL, 0,
            "not a usable URL: it is printed, so credentials go into --nats-... options");
    rc = kvp_nats_args_read(args, &source->secrets, &opts, error);
    if (rc < 0)
        return rc;
    opts.url = source->url;
    rc = kvp_nats_open(&opts, NULL, NULL, &source->client);
    if (rc == -ENOTSUP)
        return kv_fail(error, rc, 0, "%.150s: NATS needs libkv_nats and libnats", url);
    if (rc < 0)
        return kv_fail(error, rc, 0, "%.150s: %s", url, strerror(-rc));
    if (durable)
        rc = kvp_nats_subscribe_durable(source->client, subject, durable, receive, source,
                                        &source->sub);
    else
        rc = kvp_nats_subscribe(source->client, subject, 0, receive, source, &source->sub);
    if (rc < 0)
        return kv_fail(error, rc, 0, "not a usable %s: %.150s",
                       durable ? "subject, stream or durable name" : "URL, because of its subject",
                       url);
    return 0;
}

int kc_source_open_nats(const char *url, const struct kvp_nats_args *nats,
                        const struct kvp_nats_durable *durable, struct kc_source **ret,
                        struct kv_error *error)
{
    static const struct kc_source_ops ops = {run, get_state, close_source};
    struct nats_source *source = calloc(1, sizeof(*source));
    int rc;

    if (!source)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    source->base.ops = &ops;
    STAILQ_INIT(&source->items);
    pthread_mutex_init(&source->lock, NULL);
    kv_cond_init(&source->filled);
    kv_cond_init(&source->done);
    rc = connect_to(source, url, nats, durable, error);
    if (rc < 0) {
        close_source(&source->base);
        return rc;
    }
    *ret = &source->base;
    return 0;
}
