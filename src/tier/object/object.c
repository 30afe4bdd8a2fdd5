// SPDX-License-Identifier: Apache-2.0
/* The object tier: opening and closing. impl.h describes its structure. */
#include "tier/object/object.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/thread/thread.h"
#include "store/backend/uri.h"
#include "tier/object/impl.h"

enum {
    THREADS = 4,
    MAX_THREADS = 256,
    QUEUE = 256,
    TIMEOUT_MS = 10000,
    FAILURES = 5,
    REOPEN_MS = 1000,
    MAX_REOPEN_MS = 30000,
    OPEN_WAIT_MS = 1000, /* time after which opening continues in the background */
};

/* -- open -------------------------------------------------------------------------------------- */

static void destroy(struct kvbm_object *o)
{
    pthread_cond_destroy(&o->turn);
    pthread_cond_destroy(&o->idle);
    pthread_cond_destroy(&o->watch);
    pthread_cond_destroy(&o->work);
    pthread_mutex_destroy(&o->lock);
    free(o->unpublished.slots);
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
    pthread_mutex_init(&o->lock, NULL);
    kv_cond_init(&o->work);
    kv_cond_init(&o->watch);
    kv_cond_init(&o->idle);
    kv_cond_init(&o->turn);
}

/* Number of blocks of a call whose values have about @bytes together. */
static uint32_t slice_of(const struct kvbm_object_format *f, uint64_t bytes)
{
    uint64_t fit = bytes / kvbm_object_value_bytes(f);

    return (uint32_t)KV_MIN(KV_MAX(fit, UINT64_C(1)), (uint64_t)KVBM_OBJECT_SLICE);
}

/* True for the built-in file store, where a call costs no round trip (docs/kv-store.md). */
static bool is_path(const char *uri)
{
    struct kvs_uri parts;

    return kvs_uri_parse(uri, &parts, NULL) == 0 && parts.path;
}

static void set_options(struct kvbm_object *o, const struct kvbm_object_opts *opts)
{
    o->n_threads = KV_OPT(opts, n_threads, THREADS);
    o->max_queue = KV_OPT(opts, max_queue, QUEUE);
    o->timeout_ns = KV_OPT(opts, timeout_ms, TIMEOUT_MS) * KV_NS_PER_MS;
    o->breaker.max_failures = KV_OPT(opts, breaker_failures, FAILURES);
    o->breaker.first_wait_ns = KV_OPT(opts, breaker_reopen_ms, REOPEN_MS) * KV_NS_PER_MS;
    o->breaker.max_wait_ns = KV_MAX(o->breaker.first_wait_ns, MAX_REOPEN_MS * KV_NS_PER_MS);
    /* Opening the store counts as a probe. If it fails, the first wait follows. */
    o->breaker.wait_ns = o->breaker.first_wait_ns / 2;
    o->breaker.open = o->breaker.probing = true;
    o->open_rc = -EINPROGRESS;
    kvbm_object_format_init(&o->format, opts->fingerprint, opts->key_len, opts->block_bytes);
    o->slice = slice_of(&o->format, KVBM_OBJECT_SLICE_BYTES);
    o->near_slice = is_path(opts->uri) ? slice_of(&o->format, KVBM_OBJECT_NEAR_BYTES) : o->slice;
    snprintf(o->manifest, sizeof(o->manifest), "kvbm-object-%016" PRIx64,
             kv_xxh64(opts->fingerprint, strlen(opts->fingerprint), 0));
}

static int init_text(struct kvbm_object *o, const struct kvbm_object_opts *opts)
{
    char label[512], quoted[512];
    struct kvs_uri uri;
    const char *why;

    if (kvs_uri_parse(opts->uri, &uri, &why) == 0)
        o->folder = uri.path;
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

/* Start all workers at once: the watcher would take missing ones for lost, and start others. */
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

/* True for errors of an open that a later one may not have: the server can't be reached now. */
static bool may_open_later(int rc)
{
    switch (rc) {
    case -EINPROGRESS:
    case -EIO:
    case -EAGAIN:
    case -EPIPE:
    case -ETIMEDOUT:
    case -ENOTCONN:
    case -ECONNREFUSED:
    case -ECONNRESET:
    case -ECONNABORTED:
    case -EHOSTDOWN:
    case -EHOSTUNREACH:
    case -ENETDOWN:
    case -ENETUNREACH:
        return true;
    default:
        return false;
    }
}

/* Wait for the first open, so that create fails at once for errors that a retry can't cure. */
static int wait_open(struct kvbm_object *o)
{
    uint64_t until = kv_now_ns() + KV_MIN(o->timeout_ns, OPEN_WAIT_MS * KV_NS_PER_MS);
    int rc;

    pthread_mutex_lock(&o->lock);
    while (o->open_rc == -EINPROGRESS && kv_now_ns() < until)
        kv_cond_wait_until(&o->idle, &o->lock, until);
    rc = o->open_rc;
    pthread_mutex_unlock(&o->lock);
    return may_open_later(rc) ? 0 : rc;
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

/* -- accessors --------------------------------------------------------------------------------- */

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

/* -- close ------------------------------------------------------------------------------------- */

/* Abandon workers whose calls hang. Each frees what it holds when its call returns. */
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
        kv_log_warn("kvbm", "calls of the object tier's store hang: abandoned their threads",
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
    kvbm_object_end_queued(o, -ECANCELED, true);
    for (struct kvbm_object_worker *w = o->workers; w; w = w->next)
        w->cancelled = true;
    pthread_cond_broadcast(&o->work);
    pthread_cond_broadcast(&o->turn);
    pthread_cond_signal(&o->watch);
    while (o->workers) {
        if (kv_now_ns() >= until)
            leave_behind(o);
        if (o->workers) /* workers in a callback: wait as long as it takes */
            kv_cond_wait_until(&o->idle, &o->lock, KV_MAX(until, kv_now_ns() + 50 * KV_NS_PER_MS));
    }
    o->stopping = true;
    pthread_cond_signal(&o->watch);
    pthread_mutex_unlock(&o->lock);
    if (o->watching)
        pthread_join(o->watcher, NULL);
    pthread_mutex_lock(&o->lock);
    kvbm_object_unref_unlock(o);
}
