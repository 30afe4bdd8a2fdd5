// SPDX-License-Identifier: Apache-2.0
/* The object tier: opening, closing, what callers see. Its structure is in object_impl.h. */
#include "tier/object.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/log.h"
#include "base/thread.h"
#include "base/xxh.h"
#include "store/uri.h"
#include "tier/object_impl.h"

enum {
    THREADS = 4,
    MAX_THREADS = 256,
    QUEUE = 256,
    TIMEOUT_MS = 10000,
    FAILURES = 5,
    REOPEN_MS = 1000,
    MAX_REOPEN_MS = 30000,
    OPEN_WAIT_MS = 1000, /* then it goes on in the background */
};

/* -- batches ------------------------------------------------------------------------------------- */

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

void kvbm_object_end(struct kvbm_object *o, struct kvbm_object_batch *batch, int rc)
{
    if (batch->probe_)
        kvbm_breaker_release(&o->breaker); /* it never got to the store */
    kvbm_object_settle(o, batch, rc);
    kvbm_object_ended(o, batch);
}

void kvbm_object_ended(struct kvbm_object *o, struct kvbm_object_batch *batch)
{
    push(&o->ended, batch);
    pthread_cond_signal(&o->watch);
}

static void end_queued(struct kvbm_object *o, int rc, bool probes_too)
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

void kvbm_object_tell(struct kvbm_object *o, bool probe, int rc)
{
    bool opened = kvbm_breaker_tell(&o->breaker, rc == 0, probe, kv_now_ns());
    bool down = o->breaker.open && (opened || probe);

    if (down && !o->said_down)
        kv_log_warn("kvbm", "the object tier's store fails: no calls for a while",
                    "store=%s error=\"%s\" retry_ms=%" PRIu64, o->label, strerror(-rc),
                    o->breaker.wait_ns / KV_NS_PER_MS);
    if (!o->breaker.open && o->said_down)
        kv_log_warn("kvbm", "the object tier's store is back", "store=%s", o->label);
    o->said_down = o->breaker.open && (o->said_down || down);
    if (opened)
        end_queued(o, -EHOSTDOWN, false);
    /* The next one is to try a new handle; whoever uses this one closes it. */
    if (down && o->handle && o->handle->refs > 1) {
        o->handle->refs--;
        o->handle = NULL;
    }
}

/* -- what callers see ------------------------------------------------------------------------------ */

static bool batch_ok(const struct kvbm_object_batch *b)
{
    bool data = b->op != KVBM_OBJECT_EXISTS;

    if (b->op > KVBM_OBJECT_PUT || b->flow > KVBM_ONBOARD || !b->ios || b->n == 0 || !b->done)
        return false;
    for (uint32_t i = 0; i < b->n; i++)
        if (!b->ios[i].key || (data && !b->ios[i].data))
            return false;
    return true;
}

/* 0: it may be queued. */
static int admit(struct kvbm_object *o, struct kvbm_object_batch *batch, uint64_t now_ns)
{
    enum kvbm_gate gate;

    if (o->closing)
        return -ESHUTDOWN;
    if (o->n_able == 0)
        return -EHOSTDOWN;
    if (o->queue[0].n + o->queue[1].n >= o->max_queue)
        return -EAGAIN;
    gate = kvbm_breaker_ask(&o->breaker, now_ns);
    batch->probe_ = gate == KVBM_GATE_PROBE;
    return gate == KVBM_GATE_REFUSE ? -EHOSTDOWN : 0;
}

int kvbm_object_submit(struct kvbm_object *o, struct kvbm_object_batch *batch)
{
    uint64_t now_ns = kv_now_ns();
    int rc;

    if (!o || !batch || !batch_ok(batch))
        return -EINVAL;
    if (o->pid != getpid()) /* the lock may be somebody's who isn't here */
        return -ECHILD;
    for (uint32_t i = 0; i < batch->n; i++)
        batch->ios[i].status = -EINPROGRESS;
    pthread_mutex_lock(&o->lock);
    rc = admit(o, batch, now_ns);
    if (rc < 0) {
        o->stats.refused++;
    } else {
        batch->until_ = batch->deadline_ns ? batch->deadline_ns : now_ns + o->timeout_ns;
        push(&o->queue[batch->flow], batch);
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
        w->cancelled = true; /* the watcher ends it when there is a thread to spare */
        pthread_cond_signal(&o->watch);
    }
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_cancel_all(struct kvbm_object *o)
{
    if (!o || o->pid != getpid())
        return;
    pthread_mutex_lock(&o->lock);
    end_queued(o, -ECANCELED, true);
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next) {
        if (w->batch && w->in_call)
            kvbm_object_worker_lose(w, -ECANCELED);
        else if (w->batch)
            w->cancelled = true; /* it ends before its next call */
    }
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_get_stats(struct kvbm_object *o, struct kvbm_object_stats *ret)
{
    memset(ret, 0, sizeof(*ret));
    if (o->pid != getpid())
        return;
    pthread_mutex_lock(&o->lock);
    *ret = o->stats;
    ret->queued = o->queue[0].n + o->queue[1].n;
    ret->open = o->breaker.open;
    ret->opened = o->breaker.opened;
    for (const struct kvbm_object_worker *w = o->workers; w; w = w->next)
        ret->left_behind += w->lost && !w->gone;
    pthread_mutex_unlock(&o->lock);
}

/* -- open ------------------------------------------------------------------------------------------ */

static void destroy(struct kvbm_object *o)
{
    pthread_cond_destroy(&o->idle);
    pthread_cond_destroy(&o->watch);
    pthread_cond_destroy(&o->work);
    pthread_mutex_destroy(&o->lock);
    free(o->uri);
    free(o->fingerprint);
    free(o->label);
    free(o);
}

void kvbm_object_unref_unlock(struct kvbm_object *o)
{
    bool last = --o->refs == 0;

    pthread_mutex_unlock(&o->lock);
    if (last)
        destroy(o);
}

static void init_sync(struct kvbm_object *o)
{
    pthread_condattr_t attr;

    pthread_mutex_init(&o->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&o->work, &attr);
    pthread_cond_init(&o->watch, &attr);
    pthread_cond_init(&o->idle, &attr);
    pthread_condattr_destroy(&attr);
}

static void set_options(struct kvbm_object *o, const struct kvbm_object_opts *opts)
{
    uint64_t fit;

    o->n_threads = KV_OPT(opts, n_threads, THREADS);
    o->max_queue = KV_OPT(opts, max_queue, QUEUE);
    o->timeout_ns = KV_OPT(opts, timeout_ms, TIMEOUT_MS) * KV_NS_PER_MS;
    o->breaker.max_failures = KV_OPT(opts, breaker_failures, FAILURES);
    o->breaker.first_wait_ns = KV_OPT(opts, breaker_reopen_ms, REOPEN_MS) * KV_NS_PER_MS;
    o->breaker.max_wait_ns = KV_MAX(o->breaker.first_wait_ns, MAX_REOPEN_MS * KV_NS_PER_MS);
    /* until the store has been opened, which counts as a probe; should that fail, the first wait */
    o->breaker.wait_ns = o->breaker.first_wait_ns / 2;
    o->breaker.open = o->breaker.probing = true;
    o->open_rc = -EINPROGRESS;
    kvbm_object_format_init(&o->format, opts->fingerprint, opts->key_len, opts->block_bytes);
    fit = KVBM_OBJECT_SLICE_BYTES / kvbm_object_value_bytes(&o->format);
    o->slice = (uint32_t)KV_MIN(KV_MAX(fit, 1), (uint64_t)KVBM_OBJECT_SLICE);
    snprintf(o->manifest, sizeof(o->manifest), "kvbm-object-%016" PRIx64,
             kv_xxh64(opts->fingerprint, strlen(opts->fingerprint), 0));
}

static int init_text(struct kvbm_object *o, const struct kvbm_object_opts *opts)
{
    char label[512], quoted[512];

    o->uri = strdup(opts->uri);
    o->fingerprint = strdup(opts->fingerprint);
    kvs_uri_redact(opts->uri, label, sizeof(label));
    o->label = strdup(kv_log_quote(quoted, sizeof(quoted), label));
    return o->uri && o->fingerprint && o->label ? 0 : -ENOMEM;
}

static bool options_ok(const struct kvbm_object_opts *opts)
{
    const char *why;
    struct kvs_uri uri;

    return opts && opts->size >= offsetof(struct kvbm_object_opts, n_threads) && opts->uri &&
           kvs_uri_parse(opts->uri, &uri, &why) == 0 && opts->fingerprint && *opts->fingerprint &&
           strnlen(opts->fingerprint, KVBM_OBJECT_FINGERPRINT_MAX + 1) <=
               KVBM_OBJECT_FINGERPRINT_MAX &&
           opts->key_len >= 4 && opts->key_len <= KVBM_MAX_KEY && opts->block_bytes > 0 &&
           opts->block_bytes <= KVBM_OBJECT_MAX_BLOCK && KV_OPT(opts, n_threads, 0) <= MAX_THREADS;
}

/* All at once: the watcher would take those that aren't there yet for lost, and start others. */
static int start(struct kvbm_object *o)
{
    int rc;

    pthread_mutex_lock(&o->lock);
    rc = kv_thread_start(&o->watcher, "kvbm-obj-watch", kvbm_object_watch, o);
    o->watching = rc == 0;
    o->refs += o->watching;
    for (uint32_t i = 0; i < o->n_threads && rc == 0; i++)
        rc = kvbm_object_worker_start(o, i == 0);
    pthread_mutex_unlock(&o->lock);
    return rc;
}

/* What a later try won't change is told now. */
static int wait_open(struct kvbm_object *o)
{
    uint64_t until = kv_now_ns() + KV_MIN(o->timeout_ns, OPEN_WAIT_MS * KV_NS_PER_MS);
    int rc;

    pthread_mutex_lock(&o->lock);
    while (o->open_rc == -EINPROGRESS && kv_now_ns() < until)
        kvbm_object_wait(&o->idle, &o->lock, until);
    rc = o->open_rc;
    pthread_mutex_unlock(&o->lock);
    return rc == -EINPROGRESS || rc == -EIO || rc == -ETIMEDOUT ? 0 : rc;
}

int kvbm_object_open(const struct kvbm_object_opts *opts, struct kvbm_object **ret)
{
    struct kvbm_object *o;
    int rc;

    if (!options_ok(opts) || !ret)
        return -EINVAL;
    o = calloc(1, sizeof(*o));
    if (!o)
        return -ENOMEM;
    init_sync(o);
    o->pid = getpid();
    o->refs = 1;
    set_options(o, opts);
    rc = init_text(o, opts);
    if (rc == 0)
        rc = start(o);
    if (rc == 0)
        rc = wait_open(o);
    if (rc < 0)
        goto fail;
    *ret = o;
    return 0;

fail:
    kvbm_object_close(o);
    return rc;
}

/* -- close ----------------------------------------------------------------------------------------- */

/* From now on they are on their own: what they hold goes when they come back. */
static void leave_behind(struct kvbm_object *o)
{
    struct kvbm_object_worker **at = &o->workers;
    uint32_t n = 0;

    while (*at) {
        struct kvbm_object_worker *w = *at;

        if (!w->in_call || w->gone) {
            at = &w->next;
            continue;
        }
        if (!w->lost)
            kvbm_object_worker_lose(w, -ETIMEDOUT);
        w->detached = true;
        pthread_detach(w->thread);
        *at = w->next;
        o->n_workers--;
        n++;
    }
    if (n)
        kv_log_warn("kvbm", "calls of the object tier's store hang: their threads are left behind",
                    "store=%s threads=%" PRIu32, o->label, n);
}

void kvbm_object_close(struct kvbm_object *o)
{
    if (o)
        kvbm_object_close_by(o, kv_now_ns() + o->timeout_ns);
}

void kvbm_object_close_by(struct kvbm_object *o, uint64_t deadline_ns)
{
    uint64_t until;

    if (!o || o->pid != getpid())
        return;
    pthread_mutex_lock(&o->lock);
    until = KV_MIN(deadline_ns, kv_now_ns() + o->timeout_ns);
    o->closing = true;
    end_queued(o, -ECANCELED, true);
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next)
        w->cancelled = true;
    pthread_cond_broadcast(&o->work);
    pthread_cond_signal(&o->watch);
    while (o->workers) {
        if (kv_now_ns() >= until)
            leave_behind(o);
        if (o->workers) /* those in a callback are waited for as long as it takes */
            kvbm_object_wait(&o->idle, &o->lock, KV_MAX(until, kv_now_ns() + 50 * KV_NS_PER_MS));
    }
    o->stopping = true;
    pthread_cond_signal(&o->watch);
    pthread_mutex_unlock(&o->lock);
    if (o->watching)
        pthread_join(o->watcher, NULL);
    pthread_mutex_lock(&o->lock);
    kvbm_object_unref_unlock(o);
}
