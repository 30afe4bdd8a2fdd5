// SPDX-License-Identifier: Apache-2.0
/* The watcher: ends late batches, replaces threads that hang, joins threads that have ended, and
 * calls done for batches that no worker finished. It never calls into the store, so only a callback
 * can delay it. */
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tier/object/impl.h"

/* End the batch of a worker in a call, if the call is late or was cancelled. Unless the store has been
 * silent for long, the call probably returns soon: the last threads wait for it. */
static void check_call(struct kvbm_object_worker *w, uint64_t now_ns)
{
    struct kvbm_object *o = w->object;
    bool late = w->until <= now_ns;

    if (late && (o->closing || !w->batch || now_ns - w->begun >= kvbm_object_patience_ns(o)))
        kvbm_object_worker_lose(w, -ETIMEDOUT);
    else if (!w->batch || o->closing || !(late || w->cancelled))
        return;
    else if (o->n_workers < 2 * o->n_threads && !w->opens)
        kvbm_object_worker_lose(w, late ? -ETIMEDOUT : -ECANCELED); /* another takes its place */
    else
        kvbm_object_worker_part(w, late ? -ETIMEDOUT : -ECANCELED);
}

/* Tell the breaker of a call that was left behind early, once the store has been silent for long.
 * Returns the time to look again. */
static uint64_t check_lost(struct kvbm_object_worker *w, uint64_t now_ns)
{
    uint64_t patient_ns = w->begun + kvbm_object_patience_ns(w->object);

    if (w->told || w->object->closing)
        return UINT64_MAX;
    if (now_ns < patient_ns)
        return patient_ns;
    w->told = true;
    kvbm_object_tell(w->object, false, -ETIMEDOUT);
    return UINT64_MAX;
}

/* End the batches past their deadline. Returns the next deadline. */
static uint64_t expire(struct kvbm_object *o, uint64_t now_ns)
{
    uint64_t next_ns = now_ns + 10 * KV_NS_PER_S;

    for (int flow = 0; flow < 2; flow++) {
        struct kvbm_object_batch *b, *after;

        for (b = o->queue[flow].head; b; b = after) {
            after = b->next_;
            if (b->until_ > now_ns) {
                next_ns = KV_MIN(next_ns, b->until_);
                continue;
            }
            kvbm_object_unqueue(&o->queue[flow], b);
            kvbm_object_end(o, b, -ETIMEDOUT);
        }
    }
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next) {
        if (!w->in_call)
            continue;
        if (w->lost) {
            next_ns = KV_MIN(next_ns, check_lost(w, now_ns));
            continue;
        }
        check_call(w, now_ns);
        if (!w->lost)
            next_ns = KV_MIN(next_ns, w->until);
    }
    return next_ns;
}

/* Replace workers that hang, up to n_threads. When no thread can be started, try later. */
static uint64_t top_up(struct kvbm_object *o, uint64_t now_ns, uint64_t next_ns)
{
    while (!o->closing && o->n_able < o->n_threads && o->n_workers < 2 * o->n_threads)
        if (kvbm_object_worker_start(o, false) < 0)
            return KV_MIN(next_ns, now_ns + 100 * KV_NS_PER_MS);
    return next_ns;
}

static struct kvbm_object_worker *take_gone(struct kvbm_object *o)
{
    for (struct kvbm_object_worker **at = &o->workers; *at; at = &(*at)->next) {
        struct kvbm_object_worker *w = *at;

        if (!w->gone)
            continue;
        *at = w->next;
        o->n_workers--;
        return w;
    }
    return NULL;
}

/* Do one task that must run without the lock. Returns false when there was none. */
static bool attend(struct kvbm_object *o)
{
    struct kvbm_object_worker *gone = take_gone(o);
    struct kvbm_object_batch *ended = gone ? NULL : kvbm_object_pop(&o->ended);

    if (!gone && !ended)
        return false;
    pthread_mutex_unlock(&o->lock);
    if (gone)
        pthread_join(gone->thread, NULL);
    kvbm_object_worker_free(gone);
    if (ended)
        ended->done(ended);
    pthread_mutex_lock(&o->lock);
    if (gone)
        pthread_cond_broadcast(&o->idle);
    return true;
}

void *kvbm_object_watch(void *arg)
{
    struct kvbm_object *o = arg;

    pthread_mutex_lock(&o->lock);
    for (;;) {
        uint64_t now_ns = kv_now_ns(), next_ns = expire(o, now_ns);

        next_ns = top_up(o, now_ns, next_ns);
        if (attend(o))
            continue;
        if (o->stopping)
            break;
        o->watch_ns = next_ns;
        kv_cond_wait_until(&o->watch, &o->lock, next_ns);
        o->watch_ns = 0; /* no wake-up needed: the watcher is awake and checks anyway */
    }
    kvbm_object_unref_unlock(o);
    return NULL;
}
