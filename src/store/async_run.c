// SPDX-License-Identifier: Apache-2.0
/*
 * Requests on threads: what the threads do. A thread claims some chunks of the first open request
 * that has any left, runs them without the lock, and adds up their results. The thread that ends the
 * last chunk flushes where that is wanted, and moves the request to the done list.
 *
 * A claim goes to the store in steps: of one chunk where the store works on them one by one, so that
 * a cancellation or an outage stops it behind a chunk. An outage leaves out all later chunks of its
 * request, as kvs_get_chunks_into does: else each of them would wait for a dead server.
 */
#include <limits.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "store/async.h"
#include "store/backend/store.h"
#include "store/object/fetch.h"

enum {
    /* Of one claim: small for backends of which a call is cheap, so that threads share a request;
     * large where a call costs a round trip. */
    LOCAL_CHUNKS = 64,
    LOCAL_BYTES = 1 << 20,
    REMOTE_CHUNKS = 256,
    REMOTE_BYTES = 32 << 20
};

/* Chunks [first, first + n) of a request, claimed by one thread. */
struct claim {
    struct kvs_async_request *r;
    size_t first, n, first_part;
};

static bool writes(const struct kvs_async_request *r)
{
    return r->done.op != KVS_OP_GET && r->done.op != KVS_OP_EXISTS;
}

/* With the lock. */
void kvs_async_finish(struct kvs_async *a, struct kvs_async_request *r)
{
    struct kvs_async_request **at = &a->open;
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
size_t kvs_async_leave_out(struct kvs_async_request *r, int result)
{
    size_t n = r->n - r->claimed;

    for (size_t i = r->claimed; r->ret_each && i < r->n; i++)
        r->ret_each[i] = result;
    r->claimed = r->n;
    return n;
}

/* Sums of a claim's results. */
struct outcome {
    size_t n_ok, n_left_out, first_error;
    int error, outage; /* outage: 0, or the error that stopped it */
    uint64_t bytes;
};

static size_t parts_of(const struct kvs_async_request *r, size_t i)
{
    return r->n_parts ? r->n_parts[i] : 1;
}

static uint64_t bytes_of(const struct kvs_async_request *r, size_t i, size_t first_part)
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
    int rc = kvs_look_each(store, hashes, c->r->hash_len, c->n, present);

    for (size_t i = 0; i < c->n; i++)
        each[i] = rc < 0 ? rc : present[i] == KVS_UNKNOWN ? -EIO : present[i] == KVS_THERE;
}

static void run_put(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const struct kvs_async_request *r = c->r;
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
    const struct kvs_async_request *r = c->r;
    int rc = kvs_get_chunks_into(store, r->hashes + c->first * r->hash_len, r->hash_len, c->n,
                                 r->parts + c->first_part,
                                 r->n_parts ? r->n_parts + c->first : NULL, each);

    for (size_t i = 0; rc < 0 && i < c->n; i++)
        each[i] = rc;
}

static void run_delete(struct kvs_store *store, const struct claim *c, int64_t *each)
{
    const struct kvs_async_request *r = c->r;

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
    const struct kvs_async_request *r = step->r;
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
    struct kvs_async_request *r = c->r;
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
    struct kvs_async_request *r = a->open;

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
    a->loose |= r->done.op == KVS_OP_PUT && !r->flush;
    if (!r->begin_ns)
        r->begin_ns = kv_now_ns();
    return true;
}

/*
 * With the lock. A backend tells of lost chunks once for each thread, whose chunks ever they were. So a
 * flush that fails is about all puts that had begun, and a later one that succeeds isn't about these.
 * Returns the flush's result for @r.
 */
static int end_flush(struct kvs_async *a, struct kvs_async_request *r, int rc)
{
    for (struct kvs_async_request *other = a->open; rc < 0 && other; other = other->next) {
        if (other != r && other->flush && other->begin_ns)
            other->lost = rc;
    }
    if (rc < 0 && a->loose)
        a->owed = rc;
    if (rc == 0)
        rc = r->lost;
    if (r->only_flush && rc == 0)
        rc = a->owed;
    if (r->only_flush)
        a->owed = 0;
    return rc;
}

/* With the lock. Add a claim's results to its request, and end that with its last claim. */
static void end_claim(struct kvs_async *a, const struct claim *c, const struct outcome *o)
{
    struct kvs_async_request *r = c->r;
    int rc;

    r->done.n_ok += o->n_ok;
    r->done.bytes += o->bytes;
    if (o->first_error < r->first_error) {
        r->first_error = o->first_error;
        r->done.status = o->error;
    }
    r->n_left_out += o->n_left_out;
    if (o->outage)
        kvs_async_leave_out(r, o->outage);
    if (r->claimed == r->n && r->running == 1 && !r->cancelled && r->flush) {
        r->flushing = true;
        pthread_mutex_unlock(&a->lock);
        rc = kvs_flush(a->store);
        pthread_mutex_lock(&a->lock);
        rc = end_flush(a, r, rc);
        if (rc < 0)
            r->done.status = rc;
    }
    a->writing -= writes(r);
    if (--r->running == 0 && r->claimed == r->n)
        kvs_async_finish(a, r);
    if (writes(r)) /* another thread may have been kept from writing */
        pthread_cond_signal(&a->work);
}

void *kvs_async_run(void *arg)
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
