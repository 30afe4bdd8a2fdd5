// SPDX-License-Identifier: Apache-2.0
/* A worker: takes a batch, uses or opens a handle of the store, and reports the result. */
#include <inttypes.h>

#include "base/core/log.h"
#include "base/thread/thread.h"
#include "store/backend/store.h"
#include "tier/object/impl.h"

/* -- around a call ----------------------------------------------------------------------------- */

/* A call that its caller gave up earlier shows nothing about the store. */
#define PATIENCE_NS (2 * KV_NS_PER_S)

uint64_t kvbm_object_patience_ns(const struct kvbm_object *o)
{
    return KV_MIN(PATIENCE_NS, o->timeout_ns / 2); /* half: batches also wait in the queue */
}

static void begin_call(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;

    w->begun = kv_now_ns();
    w->until = w->batch ? w->batch->until_ : w->begun + o->timeout_ns;
    w->in_call = true;
    w->called = true;
    if (w->until < o->watch_ns)
        pthread_cond_signal(&o->watch);
}

int kvbm_object_enter(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;
    int rc = 0;

    pthread_mutex_lock(&o->lock);
    if (w->cancelled)
        rc = -ECANCELED;
    else if (w->batch && kv_now_ns() >= w->batch->until_)
        rc = -ETIMEDOUT;
    else
        begin_call(w);
    pthread_mutex_unlock(&o->lock);
    return rc;
}

bool kvbm_object_leave(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;
    bool wanted;

    pthread_mutex_lock(&o->lock);
    w->in_call = false;
    wanted = !w->lost && !w->parted;
    pthread_mutex_unlock(&o->lock);
    return wanted;
}

/* -- handles ----------------------------------------------------------------------------------- */

/* Take over the store that kvs_open returned. With the lock. */
static void install(struct kvbm_object_worker *w, struct kvbm_object_handle *h)
{
    struct kvbm_object *o = w->object;

    kvs_backend(h->store, NULL, &h->ext);
    h->refs = 1;
    w->handle = h;
    if (!o->handle && !o->closing) {
        h->refs++;
        o->handle = h;
    }
}

/* Open a handle, by the worker that claimed it. Other workers use that handle, and waiting ones
 * continue. */
static int open_handle(struct kvbm_object_worker *w)
{
    struct kvbm_object_handle *h = calloc(1, sizeof(*h));
    struct kvbm_object *o = w->object;
    int rc = h ? kvbm_object_enter(w) : -ENOMEM;
    bool wanted = true, entered = rc == 0;

    if (entered) {
        rc = kvs_open(o->uri, &h->store);
        if (rc == 0)
            kvs_publishes_by_hand(h->store); /* publish.c: a put that wasn't published has failed */
        w->trouble = rc < 0 ? -EHOSTDOWN : 0;
        wanted = kvbm_object_leave(w);
    }
    w->opened = rc;
    pthread_mutex_lock(&o->lock);
    w->opens = o->opening = o->opening_hangs = false;
    if (rc == 0)
        install(w, KV_STEAL(h));
    pthread_cond_broadcast(&o->work);
    pthread_mutex_unlock(&o->lock);
    free(h);
    if (!wanted)
        return -ETIMEDOUT;
    return entered && rc < 0 ? -EHOSTDOWN : rc;
}

/* Claim a handle. Returns 0: the worker has one, or must open one (opens). With the lock held. */
static int claim_handle(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;

    w->handle = o->handle;
    if (w->handle) {
        w->handle->refs++;
        return 0;
    }
    if (o->opening)
        return -EHOSTDOWN; /* only one worker may hang in an open */
    w->opens = o->opening = true;
    return 0;
}

static void put_handle(struct kvbm_object_worker *w)
{
    struct kvbm_object_handle *h = KV_STEAL(w->handle);
    struct kvbm_object *o = w->object;
    bool last;

    if (!h)
        return;
    pthread_mutex_lock(&o->lock);
    last = --h->refs == 0;
    if (last)
        begin_call(w);
    pthread_mutex_unlock(&o->lock);
    if (!last)
        return;
    kvs_close(h->store);
    free(h);
    kvbm_object_leave(w);
}

/* -- a batch ----------------------------------------------------------------------------------- */

static void let_go(struct kvbm_object_worker *w)
{
    w->batch = NULL;
    w->object->n_offloading -= w->offloading;
    w->offloading = false;
}

void kvbm_object_worker_lose(struct kvbm_object_worker *w, int rc)
{
    struct kvbm_object_batch *batch = w->batch;
    struct kvbm_object *o = w->object;
    bool probe = batch ? batch->probe_ : w->opener;

    let_go(w);
    kvbm_object_end_turn(w, false);
    w->lost = true;
    o->opening_hangs |= w->opens;
    w->cancelled = false;
    o->n_able--;
    atomic_store_explicit(&w->abandoned, true, memory_order_relaxed);
    if (batch) {
        kvbm_object_settle(o, batch, rc);
        kvbm_object_ended(o, batch);
    }
    w->told = rc == -ETIMEDOUT && kv_now_ns() - w->begun >= kvbm_object_patience_ns(o);
    if (w->told)
        kvbm_object_tell(o, probe, rc);
    else if (probe)
        kv_breaker_release(&o->breaker);
    pthread_cond_signal(&o->watch);
    pthread_cond_broadcast(&o->work); /* another worker may offload now */
}

void kvbm_object_worker_part(struct kvbm_object_worker *w, int rc)
{
    struct kvbm_object_batch *batch = w->batch;
    struct kvbm_object *o = w->object;

    let_go(w);
    kvbm_object_end_turn(w, false);
    w->cancelled = false;
    w->parted = true;
    w->until = KV_MAX(w->until, w->begun + kvbm_object_patience_ns(o));
    atomic_store_explicit(&w->abandoned, true, memory_order_relaxed);
    kvbm_object_settle(o, batch, rc);
    kvbm_object_ended(o, batch);
    if (batch->probe_)
        kvbm_object_release(o);
    pthread_cond_broadcast(&o->work); /* another worker may offload now */
}

/* Finish the worker's batch. Returns false when the watcher has ended it meanwhile. */
static bool finish(struct kvbm_object_worker *w, int rc)
{
    struct kvbm_object *o = w->object;
    struct kvbm_object_batch *batch;

    pthread_mutex_lock(&o->lock);
    batch = w->batch;
    if (batch) {
        let_go(w);
        kvbm_object_settle(o, batch, rc);
        if (w->called)
            kvbm_object_tell(o, batch->probe_, w->trouble);
        else if (batch->probe_)
            kvbm_object_release(o);
    }
    pthread_mutex_unlock(&o->lock);
    if (batch)
        batch->done(batch);
    return batch != NULL;
}

/* Serve a batch. The lock is held at entry and return. */
static void serve(struct kvbm_object_worker *w, struct kvbm_object_batch *batch)
{
    struct kvbm_object *o = w->object;
    int rc;

    w->batch = batch;
    w->offloading = batch->flow == KVBM_OFFLOAD;
    o->n_offloading += w->offloading;
    w->cancelled = w->called = w->parted = false;
    atomic_store_explicit(&w->abandoned, false, memory_order_relaxed);
    w->trouble = 0;
    w->hits.n = w->bad.n = w->n_deleted = 0;
    rc = claim_handle(w);
    pthread_mutex_unlock(&o->lock);

    if (rc == 0 && !w->handle)
        rc = open_handle(w);
    if (rc == 0)
        rc = kvbm_object_run(w, batch);
    if (finish(w, rc) && w->handle)
        kvbm_object_after(w);
    put_handle(w);
    pthread_mutex_lock(&o->lock);
}

static void open_first(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;
    int rc = claim_handle(w);

    pthread_mutex_unlock(&o->lock);
    if (rc == 0)
        rc = open_handle(w);
    put_handle(w);
    pthread_mutex_lock(&o->lock);
    if (!w->lost)
        kvbm_object_tell(o, true, rc);
    w->opener = false;
    o->open_rc = w->opened;
    pthread_cond_broadcast(&o->idle);
}

/* While the breaker is open: take the batch that is the probe. When a probe gave up before it had
 * an answer, a put that has waited for it becomes the probe. */
static struct kvbm_object_batch *take_probe(struct kvbm_object *o)
{
    struct kvbm_object_batch *batch;

    for (int flow = KVBM_ONBOARD; flow >= KVBM_OFFLOAD; flow--) {
        for (batch = o->queue[flow].head; batch; batch = batch->next_) {
            if (batch->probe_ && kvbm_object_unqueue(&o->queue[flow], batch))
                return batch;
        }
    }
    if (!o->queue[KVBM_OFFLOAD].head || kv_breaker_ask(&o->breaker, kv_now_ns()) != KV_GATE_PROBE)
        return NULL;
    batch = kvbm_object_pop(&o->queue[KVBM_OFFLOAD]);
    batch->probe_ = true;
    return batch;
}

/* Take the next batch. Puts leave one thread free for gets, for which requests wait. */
static struct kvbm_object_batch *take(struct kvbm_object *o)
{
    struct kvbm_object_batch *batch;

    if (o->breaker.open)
        return take_probe(o);
    if (o->opening && !o->opening_hangs && !o->handle)
        return NULL; /* wait: the store is being opened */
    batch = kvbm_object_pop(&o->queue[KVBM_ONBOARD]);
    if (!batch && o->n_offloading < KV_MAX(o->n_threads - 1, 1U))
        batch = kvbm_object_pop(&o->queue[KVBM_OFFLOAD]);
    return batch;
}

/* -- threads ----------------------------------------------------------------------------------- */

/* True when the worker continues. A worker given up as lost continues when there are too few. */
static bool go_on(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;

    if (o->closing)
        return false;
    if (!w->lost)
        return true;
    if (o->n_able >= o->n_threads)
        return false;
    w->lost = false;
    o->n_able++;
    atomic_store_explicit(&w->abandoned, false, memory_order_relaxed);
    return true;
}

/* Leave as a worker: the lock is held at entry and released. The first worker to leave at closing
 * takes the tier's handle with it. */
static void depart(struct kvbm_object_worker *w)
{
    struct kvbm_object *o = w->object;

    if (o->closing && o->handle) {
        w->handle = KV_STEAL(o->handle);
        pthread_mutex_unlock(&o->lock);
        put_handle(w);
        pthread_mutex_lock(&o->lock);
    }
    o->n_able -= !w->lost;
    w->gone = true;
    if (w->detached)
        kvbm_object_worker_free(w);
    pthread_cond_signal(&o->watch);
    kvbm_object_unref_unlock(o);
}

static void *work(void *arg)
{
    struct kvbm_object_worker *w = arg;
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    if (w->opener)
        open_first(w);
    while (go_on(w)) {
        struct kvbm_object_batch *batch = take(o);

        if (batch)
            serve(w, batch);
        else
            pthread_cond_wait(&o->work, &o->lock);
    }
    depart(w);
    return NULL;
}

void kvbm_object_worker_free(struct kvbm_object_worker *w)
{
    if (w) {
        free(w->value);
        free(w->kept);
        free(w->putting);
    }
    free(w);
}

int kvbm_object_worker_start(struct kvbm_object *o, bool opener)
{
    struct kvbm_object_worker *w = calloc(1, sizeof(*w));
    int rc;

    if (!w)
        return -ENOMEM;
    w->object = o;
    w->opener = opener;
    rc = kv_thread_start(&w->thread, "kvbm-object", work, w);
    if (rc < 0) {
        kvbm_object_worker_free(w);
        return rc;
    }
    w->next = o->workers;
    o->workers = w;
    o->n_workers++;
    o->n_able++;
    o->refs++;
    return 0;
}
