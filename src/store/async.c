// SPDX-License-Identifier: Apache-2.0
/*
 * Requests on threads. A request lies in one of two lists:
 *
 *     open   by priority, then age: has chunks that no thread has claimed, or that threads work on
 *     done   in the order of their ends: its result waits for poll
 *
 * A thread claims some chunks of the first open request that has any left, runs them without the
 * lock, and adds up their results. The thread that ends the last chunk flushes where that is wanted,
 * and moves the request to the done list. One lock guards all of it.
 *
 * A claim goes to the store in steps: of one chunk where the store works on them one by one, so that
 * a cancellation or an outage stops it behind a chunk. An outage leaves out all later chunks of its
 * request, as kvs_get_chunks_into does: else each of them would wait for a dead server.
 */
#include "kv_store_async.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "store/check.h"
#include "store/fetch.h"
#include "store/parts.h"

enum {
    MAX_THREADS = 64,
    DEFAULT_THREADS = 4,
    DEFAULT_REQUESTS = 1024,
    MAX_CHUNKS = 1 << 20,
    /* Of one claim: small for backends of which a call is cheap, so that threads share a request;
     * large where a call costs a round trip. */
    LOCAL_CHUNKS = 64,
    LOCAL_BYTES = 1 << 20,
    REMOTE_CHUNKS = 256,
    REMOTE_BYTES = 32 << 20
};

struct request {
    struct request *next;
    struct kvs_done done;
    int32_t priority;
    bool flush, only_flush, flushing; /* only_flush: it has no chunks; flushing: begun */
    atomic_bool cancelled;            /* read without the lock */
    int64_t *ret_each;                /* the caller's */
    uint8_t *hashes;
    size_t hash_len, n;
    struct iovec *parts;
    uint32_t *n_parts;
    size_t claimed, claimed_parts; /* chunks, and their parts, that threads work on or have ended */
    size_t running;                /* claims under way */
    size_t n_left_out;             /* chunks cancelled */
    size_t first_error;            /* chunk whose error is the status; SIZE_MAX: none */
    uint64_t submit_ns, begin_ns;
};

struct kvs_async {
    pthread_mutex_t lock;
    pthread_cond_t work, ended;
    pid_t pid;
    struct kvs_store *store;
    uint32_t max_requests, n_requests; /* open and done */
    struct request *open;
    struct request *done, **done_tail;
    uint32_t writing, max_writing; /* threads that put, delete or flush */
    uint64_t next_id;
    bool stopping;
    struct kv_wake wake;
    uint32_t n_threads;
    pthread_t threads[MAX_THREADS];
};

/* Chunks [first, first + n) of a request, claimed by one thread. */
struct claim {
    struct request *r;
    size_t first, n, first_part;
};

static bool writes(const struct request *r)
{
    return r->done.op != KVS_OP_GET && r->done.op != KVS_OP_EXISTS;
}

static void free_request(struct request *r)
{
    free(r->hashes);
    free(r->parts);
    free(r->n_parts);
    free(r);
}

/* -- the end of a request ---------------------------------------------------------------------- */

/* With the lock. */
static void finish(struct kvs_async *a, struct request *r)
{
    struct request **at = &a->open;
    uint64_t now = kv_now_ns();

    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    r->next = NULL;
    if (!r->begin_ns)
        r->begin_ns = now;
    if (r->n_left_out || (r->cancelled && r->flush && !r->flushing))
        r->done.status = -ECANCELED;
    r->done.wait_ns = r->begin_ns - r->submit_ns;
    r->done.run_ns = now - r->begin_ns;
    *a->done_tail = r;
    a->done_tail = &r->next;
    kv_wake_signal(&a->wake);
    pthread_cond_broadcast(&a->ended);
}

/* Give the chunks that aren't claimed this result. Returns their number. With the lock. */
static size_t leave_out(struct request *r, int result)
{
    size_t n = r->n - r->claimed;

    for (size_t i = r->claimed; r->ret_each && i < r->n; i++)
        r->ret_each[i] = result;
    r->claimed = r->n;
    return n;
}

/* With the lock. */
static void cancel(struct kvs_async *a, struct request *r)
{
    atomic_store_explicit(&r->cancelled, true, memory_order_relaxed);
    r->n_left_out += leave_out(r, -ECANCELED);
    if (!r->running)
        finish(a, r);
}

/* -- running chunks ---------------------------------------------------------------------------- */

/* Sums of a claim's results. */
struct outcome {
    size_t n_ok, n_left_out, first_error;
    int error, outage; /* outage: 0, or the error that stopped it */
    uint64_t bytes;
};

static size_t parts_of(const struct request *r, size_t i)
{
    return r->n_parts ? r->n_parts[i] : 1;
}

static uint64_t bytes_of(const struct request *r, size_t i, size_t first_part)
{
    uint64_t bytes = 0;

    for (size_t k = 0; k < parts_of(r, i); k++)
        bytes += r->parts[first_part + k].iov_len;
    return bytes;
}

static void run_exists(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const uint8_t *hashes = c->r->hashes + c->first * c->r->hash_len;
    uint8_t present[REMOTE_CHUNKS];
    int rc = kvs_exists(store, hashes, c->r->hash_len, c->n, present);

    for (size_t i = 0; i < c->n; i++)
        each[i] = rc < 0 ? rc : present[i];
}

static void run_put(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const struct request *r = c->r;
    int rcs[REMOTE_CHUNKS];

    for (size_t i = 0; i < c->n; i++)
        rcs[i] = -EINVAL; /* stays when the arguments are wrong */
    kvs_put_chunks_from(store, r->hashes + c->first * r->hash_len, r->hash_len, c->n,
                        r->parts + c->first_part, r->n_parts ? r->n_parts + c->first : NULL, rcs);
    for (size_t i = 0; i < c->n; i++)
        each[i] = rcs[i];
}

static void run_get(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const struct request *r = c->r;
    int rc = kvs_get_chunks_into(store, r->hashes + c->first * r->hash_len, r->hash_len, c->n,
                                 r->parts + c->first_part,
                                 r->n_parts ? r->n_parts + c->first : NULL, each);

    for (size_t i = 0; rc < 0 && i < c->n; i++)
        each[i] = rc;
}

static void run_delete(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const struct request *r = c->r;

    for (size_t i = 0; i < c->n; i++)
        each[i] = kvs_delete_chunk(store, r->hashes + (c->first + i) * r->hash_len, r->hash_len);
}

/* Chunks that the store gets in one call of its own: more than that can't be stopped half-way. */
static size_t step_of(const struct kvs_store *store, enum kvs_op op)
{
    const kv_store_ext *ext = &store->ext;
    bool together = op == KVS_OP_EXISTS ||
                    (op == KVS_OP_GET && ext->get_chunks && !ext->get_parts) ||
                    (op == KVS_OP_PUT && ext->put_chunks && !ext->put_parts);

    return together ? REMOTE_CHUNKS : 1;
}

static void run_step(struct kvs_store *store, const struct claim *step, int64_t *each)
{
    static void (*const fns[])(struct kvs_store *, const struct claim *,
                               int64_t *) = {[KVS_OP_GET] = run_get,
                                             [KVS_OP_PUT] = run_put,
                                             [KVS_OP_EXISTS] = run_exists,
                                             [KVS_OP_DELETE] = run_delete};

    fns[step->r->done.op](store, step, each);
}

/* Add the results of chunks to @o. Returns the number of their parts. */
static size_t add_up(struct outcome *o, const struct claim *step, const int64_t *each)
{
    const struct request *r = step->r;
    size_t part = step->first_part;

    for (size_t i = 0; i < step->n; i++) {
        if (r->done.op == KVS_OP_PUT && each[i] >= 0)
            o->bytes += bytes_of(r, step->first + i, part);
        else if (r->done.op == KVS_OP_GET && each[i] > 0)
            o->bytes += (uint64_t)each[i];
        o->n_ok += r->done.op == KVS_OP_EXISTS ? each[i] == 1 : each[i] >= 0;
        if (each[i] < 0 && (each[i] != -ENOENT || r->done.op == KVS_OP_PUT) &&
            o->first_error == SIZE_MAX) {
            o->first_error = step->first + i;
            o->error = (int)each[i];
        }
        if (each[i] < 0 && kvs_is_outage((int)each[i]))
            o->outage = (int)each[i];
        part += r->parts ? parts_of(r, step->first + i) : 0;
    }
    return part - step->first_part;
}

/* Without the lock. */
static struct outcome run_claim(struct kvs_store *store, const struct claim *c)
{
    struct outcome o = {.first_error = SIZE_MAX};
    struct request *r = c->r;
    size_t most = step_of(store, (enum kvs_op)r->done.op), done = 0;
    struct claim step = *c;
    int64_t each[REMOTE_CHUNKS];

    while (done < c->n && !o.outage && !atomic_load_explicit(&r->cancelled, memory_order_relaxed)) {
        step.first = c->first + done;
        step.n = KV_MIN(c->n - done, most);
        run_step(store, &step, each + done);
        step.first_part += add_up(&o, &step, each + done);
        done += step.n;
    }
    o.n_left_out = o.outage ? 0 : c->n - done;
    for (; done < c->n; done++)
        each[done] = o.outage ? o.outage : -ECANCELED;
    if (r->ret_each)
        memcpy(r->ret_each + c->first, each, c->n * sizeof(*each));
    return o;
}

/* With the lock. Claim chunks of the first request that has some left. False: there is no work. */
static bool claim_some(struct kvs_async *a, struct claim *c)
{
    bool remote = a->store->ext.get_chunks && !a->store->ext.get_parts;
    size_t max = remote ? REMOTE_CHUNKS : LOCAL_CHUNKS;
    uint64_t max_bytes = remote ? REMOTE_BYTES : LOCAL_BYTES, bytes = 0;
    struct request *r = a->open;

    while (r && ((r->claimed == r->n && (!r->only_flush || r->running)) ||
                 (writes(r) && a->writing == a->max_writing)))
        r = r->next;
    if (!r)
        return false;
    *c = (struct claim){.r = r, .first = r->claimed, .first_part = r->claimed_parts};
    while (c->n < max && r->claimed < r->n && bytes < max_bytes) {
        if (r->parts) {
            bytes += bytes_of(r, r->claimed, r->claimed_parts);
            r->claimed_parts += parts_of(r, r->claimed);
        }
        r->claimed++;
        c->n++;
    }
    r->running++;
    a->writing += writes(r);
    if (!r->begin_ns)
        r->begin_ns = kv_now_ns();
    return true;
}

/* With the lock. Add a claim's results to its request, and end that with its last claim. */
static void end_claim(struct kvs_async *a, const struct claim *c, const struct outcome *o)
{
    struct request *r = c->r;
    int rc;

    r->done.n_ok += o->n_ok;
    r->done.bytes += o->bytes;
    if (o->first_error < r->first_error) {
        r->first_error = o->first_error;
        r->done.status = o->error;
    }
    r->n_left_out += o->n_left_out;
    if (o->outage)
        leave_out(r, o->outage);
    if (r->claimed == r->n && r->running == 1 && !r->cancelled && r->flush) {
        r->flushing = true;
        pthread_mutex_unlock(&a->lock);
        rc = kvs_flush(a->store);
        pthread_mutex_lock(&a->lock);
        if (rc < 0)
            r->done.status = rc;
    }
    a->writing -= writes(r);
    if (--r->running == 0 && r->claimed == r->n)
        finish(a, r);
    if (writes(r)) /* another thread may have been kept from writing */
        pthread_cond_signal(&a->work);
}

static void *run(void *arg)
{
    struct kvs_async *a = arg;
    struct claim c;

    pthread_mutex_lock(&a->lock);
    while (!a->stopping || a->open) {
        struct outcome o;

        if (!claim_some(a, &c)) {
            pthread_cond_wait(&a->work, &a->lock);
            continue;
        }
        pthread_cond_signal(&a->work); /* another thread may take the next chunks */
        pthread_mutex_unlock(&a->lock);
        o = run_claim(a->store, &c);
        pthread_mutex_lock(&a->lock);
        end_claim(a, &c, &o);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

/* -- calls ------------------------------------------------------------------------------------- */

static int usable(const struct kvs_async *a)
{
    return !a ? -EINVAL : a->pid == getpid() ? 0 : -ECHILD;
}

static uint32_t threads_by_default(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;

    return (uint32_t)KV_MIN(KV_MAX(n, 2), (int)DEFAULT_THREADS); /* one may hang in a put */
}

int kvs_async_open(struct kvs_store *store, const struct kvs_async_opts *opts,
                   struct kvs_async **ret)
{
    uint32_t n = KV_OPT(opts, threads, 0);
    struct kvs_async *a;
    int rc = 0;

    if (!store || !ret || !kv_sized_or_null(opts, "kvs_async_opts") || n > MAX_THREADS)
        return -EINVAL;
    a = calloc(1, sizeof(*a));
    if (!a)
        return -ENOMEM;
    n = n ? n : threads_by_default();
    a->pid = getpid();
    a->store = store;
    a->max_requests = KV_OPT(opts, max_requests, DEFAULT_REQUESTS);
    a->max_writing = KV_MAX(n / 2, 1u);
    a->done_tail = &a->done;
    pthread_mutex_init(&a->lock, NULL);
    kv_cond_init(&a->work);
    kv_cond_init(&a->ended);
    rc = kv_wake_open(&a->wake);
    while (rc == 0 && a->n_threads < n) {
        rc = kv_thread_start(&a->threads[a->n_threads], "kvs-async", run, a);
        a->n_threads += rc == 0;
    }
    if (rc < 0) {
        kvs_async_close(a, 0);
        return rc;
    }
    *ret = a;
    return 0;
}

static void free_queue(struct kvs_async *a)
{
    for (uint32_t i = 0; i < a->n_threads; i++)
        pthread_join(a->threads[i], NULL);
    for (struct request *r = a->done, *next; r; r = next) {
        next = r->next;
        free_request(r);
    }
    kv_wake_close(&a->wake);
    pthread_cond_destroy(&a->work);
    pthread_cond_destroy(&a->ended);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

/* With the lock. */
static int wait_for_all(struct kvs_async *a, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc = 0;

    while (rc == 0 && a->open)
        rc = kv_cond_wait_until(&a->ended, &a->lock, deadline);
    return a->open ? rc : 0;
}

int kvs_async_close(struct kvs_async *a, uint32_t timeout_ms)
{
    int rc;

    if (!a || a->pid != getpid())
        return 0;
    pthread_mutex_lock(&a->lock);
    a->stopping = true;
    for (struct request *r = a->open, *next; r; r = next) {
        next = r->next;
        cancel(a, r);
    }
    rc = wait_for_all(a, timeout_ms);
    pthread_cond_broadcast(&a->work);
    pthread_mutex_unlock(&a->lock);
    if (rc == 0)
        free_queue(a);
    return rc;
}

static bool parts_ok(const struct kvs_request *q, size_t *ret_parts)
{
    size_t at = 0, len;

    for (size_t i = 0; i < q->n; i++) {
        size_t n = q->n_parts ? q->n_parts[i] : 1;

        if (n > KVS_PARTS_MAX || (n && !q->parts) ||
            !kvs_parts_len(q->parts ? q->parts + at : NULL, n, KVS_VALUE_MAX, &len))
            return false;
        at += n;
    }
    *ret_parts = at;
    return true;
}

/* Copy @n elements of @size bytes; NULL when there are none. */
static bool copy(void *ret, const void *from, size_t n, size_t size)
{
    void *to = from && n ? malloc(n * size) : NULL;

    if (to)
        memcpy(to, from, n * size);
    memcpy(ret, &to, sizeof(to));
    return to || !from || !n;
}

static int make_request(const struct kvs_request *q, struct request **ret)
{
    struct request *r;
    bool moves = q->op == KVS_OP_GET || q->op == KVS_OP_PUT, ok;
    size_t n = q->op == KVS_OP_FLUSH ? 0 : q->n, n_parts = 0;

    if (q->op < KVS_OP_GET || q->op > KVS_OP_FLUSH || n > MAX_CHUNKS ||
        !kvs_hashes_ok(q->hashes, q->hash_len, n) || (moves && !parts_ok(q, &n_parts)))
        return -EINVAL;
    r = calloc(1, sizeof(*r));
    if (!r)
        return -ENOMEM;
    r->done.tag = q->tag;
    r->done.op = q->op;
    r->done.n = r->n = n;
    r->priority = q->priority;
    r->flush = q->op == KVS_OP_FLUSH || (q->op == KVS_OP_PUT && q->flush);
    r->only_flush = r->flush && n == 0;
    r->ret_each = q->ret_each;
    r->hash_len = q->hash_len;
    r->first_error = SIZE_MAX;
    r->submit_ns = kv_now_ns();
    ok = copy(&r->hashes, q->hashes, n, q->hash_len) &&
         copy(&r->parts, moves ? q->parts : NULL, n_parts, sizeof(*q->parts)) &&
         copy(&r->n_parts, moves ? q->n_parts : NULL, n, sizeof(*q->n_parts));
    if (!ok) {
        free_request(r);
        return -ENOMEM;
    }
    *ret = r;
    return 0;
}

/* With the lock. */
static void enqueue(struct kvs_async *a, struct request *r)
{
    struct request **at = &a->open;

    while (*at && (*at)->priority >= r->priority)
        at = &(*at)->next;
    r->next = *at;
    *at = r;
    a->n_requests++;
    if (r->n || r->flush)
        pthread_cond_signal(&a->work);
    else
        finish(a, r);
}

int64_t kvs_async_submit(struct kvs_async *a, const struct kvs_request *request)
{
    struct kvs_request q = KVS_REQUEST_INIT;
    struct request *r;
    int64_t rc = usable(a);

    if (rc < 0 || !kv_sized(request, "kvs_request"))
        return rc < 0 ? rc : -EINVAL;
    memcpy(&q, request, KV_MIN(request->size, sizeof(q)) / 8 * 8); /* whole members */
    rc = make_request(&q, &r);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    if (a->stopping || a->n_requests >= a->max_requests) {
        rc = a->stopping ? -ESHUTDOWN : -EAGAIN;
        free_request(r);
    } else {
        r->done.id = ++a->next_id;
        rc = (int64_t)r->done.id;
        enqueue(a, r);
    }
    pthread_mutex_unlock(&a->lock);
    return rc;
}

int kvs_async_cancel(struct kvs_async *a, uint64_t id)
{
    struct request *r;
    int rc = usable(a);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    for (r = a->open; r && r->done.id != id; r = r->next)
        ;
    if (r)
        cancel(a, r);
    pthread_mutex_unlock(&a->lock);
    return r ? 0 : -ENOENT;
}

long kvs_async_poll(struct kvs_async *a, struct kvs_done *ret, size_t max)
{
    long n = usable(a);

    if (n < 0 || (max && !ret))
        return n < 0 ? n : -EINVAL;
    pthread_mutex_lock(&a->lock);
    for (struct request *r; (size_t)n < max && (r = a->done) != NULL; n++) {
        a->done = r->next;
        ret[n] = r->done;
        free_request(r);
    }
    a->n_requests -= (uint32_t)n;
    if (!a->done) {
        a->done_tail = &a->done;
        kv_wake_clear(&a->wake);
    }
    pthread_mutex_unlock(&a->lock);
    return n;
}

int kvs_async_fd(struct kvs_async *a)
{
    int rc = usable(a);

    return rc < 0 ? rc : a->wake.fd;
}

int kvs_async_drain(struct kvs_async *a, uint32_t timeout_ms)
{
    int rc = usable(a);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&a->lock);
    rc = wait_for_all(a, timeout_ms);
    pthread_mutex_unlock(&a->lock);
    return rc;
}
