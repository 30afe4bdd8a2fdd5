// SPDX-License-Identifier: Apache-2.0
/*
 * Publications make put chunks durable. Only one runs at a time. Batches whose puts end during a
 * publication wait and share the next one, which includes the chunks of all of them.
 *
 *   worker 1   put put | publish .. |              5 batches, 3 publications
 *   worker 2   put put put | waits  | publish .. |
 *   worker 3    put put put | waits |            | done as well
 *   worker 1                        | put put put | publish ..
 *
 * A failed publication fails only its own batch; waiting batches try again. A publication that takes
 * longer than a quarter of timeout_ms (TURNS) loses its turn, and the next one begins beside it.
 * Only S3 gains by it: file stores and Redis publish one after the other, so the next one waits
 * inside the store. After -EIO blocks may be lost, so later batches use a new handle.
 */
#include "base/thread/thread.h"
#include "tier/object/impl.h"

enum { EMPTY_CHUNK_BYTES = 4096, TURNS = 4 /* in timeout_ms */ };

static int64_t read_nothing(void *arg, void *buf, size_t cap)
{
    (void)arg, (void)buf, (void)cap;
    return 0;
}

/* Publish an empty snapshot, which names no chunk and fails when any chunk that was put is lost.
 * After a mere flush the backend would keep all chunks pinned for a manifest to follow. */
static int save_nothing(struct kvbm_object_worker *w)
{
    struct kvs_save_opts opts = {.size = sizeof(opts),
                                 .format = KVS_FORMAT_BYTES,
                                 .chunk_bytes = EMPTY_CHUNK_BYTES,
                                 .fingerprint = w->object->fingerprint};
    int rc = kvs_save(w->handle->store, w->object->manifest, read_nothing, NULL, &opts, NULL);

    return KV_MIN(rc, 0);
}

/* True when a publication that began at @number or later has included this worker's puts. A worker
 * with a failed put publishes itself: the store may have dropped its other puts for it, and says so
 * to the threads that publish, once each. With the lock. */
static bool is_covered(const struct kvbm_object_worker *w, uint64_t number)
{
    const struct kvbm_object *o = w->object;

    return !w->put_failed && o->published >= number && o->published_by == w->handle;
}

/* Wait until it is this worker's turn (1), or another worker has published for it (0). With the
 * lock. */
static int take_turn(struct kvbm_object_worker *w, uint64_t until_ns)
{
    struct kvbm_object *o = w->object;
    uint64_t number = o->publications + 1; /* publications begun before may lack some of the puts */
    uint64_t since_ns = kv_now_ns();

    while (o->publisher && !is_covered(w, number)) {
        uint64_t now_ns = kv_now_ns();

        if (w->cancelled)
            return -ECANCELED;
        if (now_ns >= until_ns) {
            w->trouble = now_ns - since_ns < kvbm_object_patience_ns(o) ? 0 : -ETIMEDOUT;
            return -ETIMEDOUT;
        }
        if (now_ns >= o->turn_until)
            break;
        kv_cond_wait_until(&o->turn, &o->lock, KV_MIN(until_ns, o->turn_until));
    }
    if (is_covered(w, number))
        return 0;
    o->publisher = w;
    o->turn_until = kv_now_ns() + o->timeout_ns / TURNS;
    w->publication = ++o->publications;
    return 1;
}

void kvbm_object_end_turn(struct kvbm_object_worker *w, bool published)
{
    struct kvbm_object *o = w->object;

    if (published && w->publication > o->published) {
        o->published = w->publication;
        o->published_by = w->handle;
    }
    if (o->publisher == w) /* else it was lost meanwhile, or its turn was over */
        o->publisher = NULL;
    pthread_cond_broadcast(&o->turn);
}

int kvbm_object_publish(struct kvbm_object_worker *w, uint64_t until_ns)
{
    struct kvbm_object *o = w->object;
    bool wanted = true;
    int rc;

    pthread_mutex_lock(&o->lock);
    rc = take_turn(w, until_ns);
    pthread_mutex_unlock(&o->lock);
    if (rc <= 0)
        return rc;
    rc = kvbm_object_enter(w);
    if (rc == 0) {
        rc = save_nothing(w);
        if (kv_breaker_counts(rc))
            w->trouble = rc;
        wanted = kvbm_object_leave(w);
    }
    pthread_mutex_lock(&o->lock);
    /* a chunk may be lost, which makes later publications of this handle fail, too */
    if (rc == -EIO)
        kvbm_object_retire(o, w->handle);
    kvbm_object_end_turn(w, rc == 0);
    pthread_mutex_unlock(&o->lock);
    return wanted ? rc : -ETIMEDOUT;
}
