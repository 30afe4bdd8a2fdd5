// SPDX-License-Identifier: Apache-2.0
/* Create and destroy publishers. */
#include <stdlib.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "event/publisher/publisher.h"

#define DEFAULT_BUFFER_BATCHES 10000
#define DEFAULT_BUFFER_BYTES (UINT64_C(256) << 20)
#define DEFAULT_QUEUE_EVENTS 100000
#define DEFAULT_BATCH_EVENTS 256
#define MAX_BATCH_EVENTS 65536              /* limit of subscribers (kve_reader_opts) */
#define MAX_QUEUE_BYTES ((size_t)256 << 20) /* of either queue; a record's length fits 32 bits */
#define SEND_HWM 100000
#define REPLAY_HWM 1000
#define MAX_REQUEST_BYTES 4096

static int zmq_failure(void)
{
    int error = zmq_errno();

    return error > 0 && error < ZMQ_HAUSNUMERO ? -error : -EIO;
}

static int set_option(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof(value)) < 0 ? zmq_failure() : 0;
}

static int open_socket(struct kve_publisher *p, int type, const char *endpoint, bool connect,
                       void **ret_socket, char *ret_endpoint)
{
    size_t len = KVE_MAX_ENDPOINT;
    int rc = 0;
    void *socket;

    *ret_socket = socket = zmq_socket(p->context, type);
    if (!socket)
        return zmq_failure();
    if (strchr(endpoint, '['))
        rc = set_option(socket, ZMQ_IPV6, 1);
    if (!rc)
        rc = set_option(socket, ZMQ_LINGER, type == ZMQ_PUB ? KVE_LINGER_MS : 0);
    if (!rc)
        rc = set_option(socket, ZMQ_SNDHWM, type == ZMQ_PUB ? SEND_HWM : REPLAY_HWM);
    if (!rc)
        rc = set_option(socket, ZMQ_TCP_KEEPALIVE, 1);
    if (!rc && type == ZMQ_ROUTER) {
        int64_t most = MAX_REQUEST_BYTES;

        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof(most));
        rc = set_option(socket, ZMQ_ROUTER_MANDATORY, 1);
    }
    if (!rc && (connect ? zmq_connect : zmq_bind)(socket, endpoint) < 0)
        rc = zmq_failure();
    if (!rc && zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, ret_endpoint, &len) < 0)
        rc = zmq_failure();
    return rc;
}

static int open_sockets(struct kve_publisher *p, const struct kve_publisher_opts *opts)
{
    const char *replay_endpoint = KV_OPT(opts, replay_endpoint, NULL);
    int rc;

    p->context = zmq_ctx_new();
    if (!p->context)
        return zmq_failure();
    rc =
        open_socket(p, ZMQ_PUB, opts->endpoint, KV_OPT(opts, connect, false), &p->pub, p->endpoint);
    if (rc || !replay_endpoint)
        return rc;
    rc = open_socket(p, ZMQ_ROUTER, replay_endpoint, false, &p->router, p->replay_endpoint);
    if (rc)
        return rc;
    return kve_ring_init(&p->ring, KV_OPT(opts, buffer_batches, DEFAULT_BUFFER_BATCHES),
                         KV_OPT(opts, buffer_bytes, DEFAULT_BUFFER_BYTES));
}

static struct kve_publisher *allocate(const struct kve_publisher_opts *opts)
{
    struct kve_publisher *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    p->wake.fd = p->timer = -1;
    p->encoding = KV_OPT(opts, encoding, KVE_ENCODING_MAP);
    p->rank = KV_OPT(opts, rank, 0);
    p->batch_events = KV_OPT(opts, batch_events, DEFAULT_BATCH_EVENTS);
    p->batch_events = KV_MIN(p->batch_events, (uint32_t)MAX_BATCH_EVENTS);
    p->queue_events = KV_OPT(opts, queue_events, DEFAULT_QUEUE_EVENTS);
    p->linger_ns = (uint64_t)KV_OPT(opts, linger_us, 0) * 1000;
    p->sequence = KV_OPT(opts, first_sequence, 0);
    p->pending.events.limit = p->taken.events.limit = MAX_QUEUE_BYTES;
    pthread_mutex_init(&p->lock, NULL);
    kv_cond_init(&p->sent_more);
    return p;
}

int kve_publisher_create(const struct kve_publisher_opts *opts, struct kve_publisher **ret)
{
    const char *topic = KV_OPT(opts, topic, "");
    struct kve_publisher *p;
    int rc = -ENOMEM;

    if (!ret || !kv_sized(opts, "kve_publisher_opts") || !KV_OPT(opts, endpoint, NULL))
        return -EINVAL;
    p = allocate(opts);
    if (!p)
        return -ENOMEM;
    p->topic = strdup(topic);
    if (!p->topic || kv_buf_reserve(&p->pending.lens, 4) < 0 ||
        kv_buf_reserve(&p->taken.lens, 4) < 0)
        goto fail;
    rc = kv_wake_open(&p->wake);
    if (rc)
        goto fail;
    p->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (p->timer < 0) {
        rc = -errno;
        goto fail;
    }
    rc = open_sockets(p, opts);
    if (rc)
        goto fail;
    kve_replay_init(&p->replay, p->router, &p->ring,
                    KV_OPT(opts, replay_framing, KVE_REPLAY_WITH_TOPIC), p->topic);
    rc = kv_thread_start(&p->thread, "kve-publisher", kve_publisher_run, p);
    if (rc)
        goto fail;
    p->started = true;
    *ret = p;
    return 0;
fail:
    kve_publisher_destroy(p);
    return rc;
}

static void stop_thread(struct kve_publisher *p)
{
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    p->stop_ns = kv_now_ns() + KVE_LINGER_MS * KV_NS_PER_MS;
    pthread_mutex_unlock(&p->lock);
    kv_wake_signal(&p->wake);
    pthread_join(p->thread, NULL);
    kve_replay_fini(&p->replay);
}

static void free_queue(struct kve_queue *queue)
{
    kv_buf_fini(&queue->events);
    kv_buf_fini(&queue->lens);
}

void kve_publisher_destroy(struct kve_publisher *publisher)
{
    struct kve_publisher *p = publisher;

    if (!p)
        return;
    if (p->started)
        stop_thread(p);
    kve_ring_fini(&p->ring);
    if (p->pub)
        zmq_close(p->pub);
    if (p->router)
        zmq_close(p->router);
    if (p->context)
        zmq_ctx_term(p->context);
    kv_wake_close(&p->wake);
    if (p->timer >= 0)
        close(p->timer);
    free_queue(&p->pending);
    free_queue(&p->taken);
    pthread_cond_destroy(&p->sent_more);
    pthread_mutex_destroy(&p->lock);
    free(p->topic);
    free(p);
}
