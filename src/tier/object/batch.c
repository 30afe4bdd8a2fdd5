// SPDX-License-Identifier: Apache-2.0
/* Batches of the object tier: queues, completion, calls of callers. */
#include <inttypes.h>
#include <unistd.h>

#include "base/core/log.h"
#include "tier/object/impl.h"

/* -- batches ----------------------------------------------------------------------------------- */

static void push(struct kvbm_object_list *list, struct kvbm_object_batch *batch)
{
    batch->next_ = NULL;
    if (list->tail)
        list->tail->next_ = batch;
    else
        list->head = batch;
    list->tail = batch;
    list->n++;
}

/* Queue a batch behind the last one of equal or higher priority. */
static void push_in_order(struct kvbm_object_list *list, struct kvbm_object_batch *batch)
{
    struct kvbm_object_batch **at = &list->head;

    if (list->tail && list->tail->priority >= batch->priority)
        at = &list->tail->next_;
    while (*at && (*at)->priority >= batch->priority)
        at = &(*at)->next_;
    batch->next_ = *at;
    *at = batch;
    if (!batch->next_)
        list->tail = batch;
    list->n++;
}

struct kvbm_object_batch *kvbm_object_pop(struct kvbm_object_list *list)
{
    struct kvbm_object_batch *batch = list->head;

    if (!batch)
        return NULL;
    list->head = batch->next_;
    if (!list->head)
        list->tail = NULL;
    list->n--;
    return batch;
}

bool kvbm_object_unqueue(struct kvbm_object_list *list, const struct kvbm_object_batch *batch)
{
    struct kvbm_object_batch *prev = NULL;

    for (struct kvbm_object_batch *b = list->head; b; prev = b, b = b->next_) {
        if (b != batch)
            continue;
        if (prev)
            prev->next_ = b->next_;
        else
            list->head = b->next_;
        if (list->tail == b)
            list->tail = prev;
        list->n--;
        return true;
    }
    return false;
}

static void count(struct kvbm_object *o, enum kvbm_object_op op, int status)
{
    struct kvbm_object_stats *s = &o->stats;
    bool answered = status >= 0 || status == -ENOENT || status == -EBADMSG;

    s->gets += op == KVBM_OBJECT_GET && answered;
    s->exists += op == KVBM_OBJECT_EXISTS && answered;
    s->bad += status == -EBADMSG;
    s->late += status == -ETIMEDOUT;
    s->cancelled += status == -ECANCELED;
    s->failed += !answered && status != -ETIMEDOUT && status != -ECANCELED;
    if (op == KVBM_OBJECT_GET && status == 0) {
        s->hits++;
        s->bytes_read += o->format.block_bytes;
    }
    if (op == KVBM_OBJECT_PUT && status == KVBM_OBJECT_STORED) {
        s->puts++;
        s->bytes_written += o->format.block_bytes;
    }
    s->already += op == KVBM_OBJECT_PUT && status == KVBM_OBJECT_ALREADY;
}

void kvbm_object_settle(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc)
{
    for (uint32_t i = 0; i < batch->n; i++) {
        struct kvbm_object_io *io = &batch->ios[i];

        if (io->status == -EINPROGRESS || (io->status > 0 && rc < 0))
            io->status = rc < 0 ? rc : -EIO;
        count(o, batch->op, io->status);
        io->status = KV_MIN(io->status, 0);
    }
}

void kvbm_object_release(struct kvbm_object *o)
{
    kv_breaker_release(&o->breaker);
    pthread_cond_signal(&o->work);
}

void kvbm_object_end(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc)
{
    if (batch->probe_)
        kvbm_object_release(o);
    kvbm_object_settle(o, batch, rc);
    kvbm_object_ended(o, batch);
}

void kvbm_object_ended(struct kvbm_object *o, struct kvbm_object_batch *batch)
{
    push(&o->ended, batch);
    pthread_cond_signal(&o->watch);
}

void kvbm_object_end_queued(struct kvbm_object *o, int rc, bool probes_too)
{
    for (int flow = 0; flow < 2; flow++) {
        struct kvbm_object_batch *b, *next;

        for (b = o->queue[flow].head; b; b = next) {
            next = b->next_;
            if (b->probe_ && !probes_too)
                continue;
            kvbm_object_unqueue(&o->queue[flow], b);
            kvbm_object_end(o, b, rc);
        }
    }
}

void kvbm_object_retire(struct kvbm_object *o, const struct kvbm_object_handle *h)
{
    if (o->handle == h && h->refs > 1) {
        o->handle->refs--;
        o->handle = NULL;
    }
}

void kvbm_object_tell(struct kvbm_object *o, bool probe, int rc)
{
    bool was_open = o->breaker.open;
    bool opened = kv_breaker_tell(&o->breaker, rc == 0, probe, kv_now_ns());
    bool down = o->breaker.open && (opened || probe);

    if (down && !o->said_down)
        kv_log_warn("kvbm", "the object tier's store fails: breaker opened",
                    "store=%s error=\"%s\" retry_ms=%" PRIu64, o->label, strerror(-rc),
                    o->breaker.wait_ns / KV_NS_PER_MS);
    if (!o->breaker.open && o->said_down)
        kv_log_warn("kvbm", "the object tier's store answers: breaker closed", "store=%s",
                    o->label);
    o->said_down = o->breaker.open && (o->said_down || down);
    if (down)
        kvbm_object_end_queued(o, -EHOSTDOWN, false);
    if (!o->breaker.open && was_open)
        pthread_cond_broadcast(&o->work); /* puts have waited for the probe's result */
    if (down && o->handle)
        kvbm_object_retire(o, o->handle);
}

/* -- callers' calls ---------------------------------------------------------------------------- */

static bool batch_ok(const struct kvbm_object_batch *b)
{
    bool data = b->op == KVBM_OBJECT_GET || b->op == KVBM_OBJECT_PUT;

    if (b->op > KVBM_OBJECT_DELETE || b->flow > KVBM_ONBOARD || !b->ios || b->n == 0 || !b->done)
        return false;
    for (uint32_t i = 0; i < b->n; i++)
        if (!b->ios[i].key || (data && !b->ios[i].data))
            return false;
    return true;
}

/* Decide whether a batch may be queued; 0: yes. Puts wait while a probe is under way, which may
 * take long when the store is being opened anew: otherwise they would be dropped just before it
 * answers. */
static int admit(struct kvbm_object *o, struct kvbm_object_batch *batch, uint64_t now_ns)
{
    enum kv_gate gate;

    if (o->closing)
        return -ESHUTDOWN;
    if (o->n_able == 0)
        return -EHOSTDOWN;
    if (o->queue[0].n + o->queue[1].n >= o->max_queue)
        return -EAGAIN;
    gate = kv_breaker_ask(&o->breaker, now_ns);
    batch->probe_ = gate == KV_GATE_PROBE;
    if (gate == KV_GATE_REFUSE && batch->op == KVBM_OBJECT_PUT && batch->flow == KVBM_OFFLOAD)
        return o->breaker.probing ? 0 : -EHOSTDOWN;
    return gate == KV_GATE_REFUSE ? -EHOSTDOWN : 0;
}

int kvbm_object_submit(struct kvbm_object *o, struct kvbm_object_batch *batch)
{
    uint64_t now_ns = kv_now_ns();
    int rc;

    if (!o || !batch || !batch_ok(batch))
        return -EINVAL;
    if (o->pid != getpid()) /* in a child another thread may have held the lock at fork */
        return -ECHILD;
    for (uint32_t i = 0; i < batch->n; i++)
        batch->ios[i].status = -EINPROGRESS;
    pthread_mutex_lock(&o->lock);
    rc = admit(o, batch, now_ns);
    if (rc < 0) {
        o->stats.refused++;
    } else {
        batch->until_ = batch->deadline_ns ? batch->deadline_ns : now_ns + o->timeout_ns;
        push_in_order(&o->queue[batch->flow], batch);
        pthread_cond_signal(&o->work);
        if (batch->until_ < o->watch_ns)
            pthread_cond_signal(&o->watch);
    }
    pthread_mutex_unlock(&o->lock);
    return rc;
}

void kvbm_object_cancel(struct kvbm_object *o, struct kvbm_object_batch *batch)
{
    if (!o || o->pid != getpid())
        return;
    pthread_mutex_lock(&o->lock);
    if (kvbm_object_unqueue(&o->queue[0], batch) || kvbm_object_unqueue(&o->queue[1], batch))
        kvbm_object_end(o, batch, -ECANCELED);
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next) {
        if (w->batch != batch)
            continue;
        w->cancelled = true; /* the watcher ends the batch */
        pthread_cond_signal(&o->watch);
        pthread_cond_broadcast(&o->turn);
    }
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_cancel_all(struct kvbm_object *o)
{
    if (!o || o->pid != getpid())
        return;
    pthread_mutex_lock(&o->lock);
    kvbm_object_end_queued(o, -ECANCELED, true);
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next) {
        if (w->batch && w->in_call)
            kvbm_object_worker_lose(w, -ECANCELED);
        else if (w->batch)
            w->cancelled = true; /* the worker ends the batch before its next call */
    }
    pthread_cond_broadcast(&o->turn);
    pthread_mutex_unlock(&o->lock);
}
