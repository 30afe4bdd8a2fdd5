// SPDX-License-Identifier: Apache-2.0
/*
 * Offload queues: for each tier the policy that chooses its blocks, and a bounded heap of entries.
 *
 * The entry of the highest priority goes first; of equal ones the one that was offered first. Its
 * number stays when a refused move returns it, so it isn't overtaken by newer ones.
 *
 * Invariant: each entry ends exactly once (kvbm_down_ended), whether its block arrives, is dropped,
 * or is evicted before its turn. Jobs, promises, pins and caches count the entries that concern
 * them.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* ---- policies ---- */

/* The three policies of the options; the device's tier has none. */
static const struct kvbm_tier_policy *policy_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_HOST   ? &m->opts.host_policy
           : tier == KV_TIER_DISK ? &m->opts.disk_policy
                                  : &m->opts.object_policy;
}

bool kvbm_policy_takes(const struct kvbm_manager *m, enum kv_tier tier, uint64_t hash,
                       uint32_t priority)
{
    const struct kvbm_tier_policy *policy = policy_of(m, tier);

    if (policy->policy == KVBM_POLICY_NEVER || priority < policy->min_priority)
        return false;
    return policy->policy != KVBM_POLICY_FREQUENCY ||
           kvbm_sketch_count(&m->offload.offers[tier], (uint32_t)(hash >> 32)) >= policy->threshold;
}

bool kvbm_policy_passes(struct kvbm_manager *m, enum kv_tier tier, uint64_t hash, uint32_t priority)
{
    const struct kvbm_tier_policy *policy = policy_of(m, tier);
    bool passes;

    /* a block below min_priority isn't counted: it couldn't pass whatever its frequency */
    if (policy->policy == KVBM_POLICY_FREQUENCY && priority >= policy->min_priority)
        kvbm_sketch_use(&m->offload.offers[tier], (uint32_t)(hash >> 32));
    passes = kvbm_policy_takes(m, tier, hash, priority);
    kvbm_stats_of(m, tier)->filtered += !passes;
    return passes;
}

/* ---- the heap ---- */

static bool before(const struct kvbm_down *a, const struct kvbm_down *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->number < b->number;
}

/* Move entry @i towards the root until its parent goes first. */
static void sift_up(struct kvbm_down *heap, uint32_t i)
{
    struct kvbm_down down = heap[i];

    for (; i && before(&down, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = down;
}

struct kvbm_down kvbm_queue_pop(struct kvbm_queue *q)
{
    struct kvbm_down first = q->heap[0], last = q->heap[--q->n];
    uint32_t i = 0;

    for (uint32_t kid; (kid = 2 * i + 1) < q->n; i = kid) {
        kid += kid + 1 < q->n && before(&q->heap[kid + 1], &q->heap[kid]);
        if (!before(&q->heap[kid], &last))
            break;
        q->heap[i] = q->heap[kid];
    }
    q->heap[i] = last;
    return first;
}

/* Double the heap: most queues stay far below their limit. */
static int queue_grow(struct kvbm_manager *m, struct kvbm_queue *q)
{
    uint64_t most =
        m->opts.max_offload + m->host_blocks; /* promised blocks are beside the others */
    uint32_t capacity = (uint32_t)KV_MIN(KV_MAX(q->capacity * UINT64_C(2), UINT64_C(256)), most);
    struct kvbm_down *heap;

    heap = realloc(q->heap, capacity * sizeof(*heap));
    if (!heap)
        return -ENOMEM;
    q->heap = heap;
    q->capacity = capacity;
    return 0;
}

/* Make room for an entry. Those aside have their places, too: they will join the queue again.
 * Blocks that are promised find room always: there are no more than the host tier has. */
static int make_room(struct kvbm_manager *m, struct kvbm_queue *q, bool promised)
{
    if (m->mover.ends)
        return -ESHUTDOWN;
    if (!promised && q->n + q->n_aside >= m->opts.max_offload)
        return -ENOSPC;
    return q->n == q->capacity ? queue_grow(m, q) : 0;
}

/* Move the entries that @job waits for behind the others, and order those anew. Returns the number
 * of the others, which the queue has left. */
static uint32_t set_apart(struct kvbm_queue *q, const struct kvbm_job_ *job)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < q->n; i++) {
        struct kvbm_down down = q->heap[i];

        if (down.through == job)
            continue;
        q->heap[i] = q->heap[kept];
        q->heap[kept] = down;
        sift_up(q->heap, kept++);
    }
    return kept;
}

void kvbm_queue_drop_of(struct kvbm_job_ *job)
{
    struct kvbm_manager *m = job->pin->manager;

    for (enum kv_tier to = KV_TIER_DISK; to <= KV_TIER_EXTERNAL; to++) {
        struct kvbm_queue *q = &m->offload.queues[to];
        uint32_t end = q->n;

        q->n = set_apart(q, job);
        for (uint32_t i = q->n; i < end; i++) {
            struct kvbm_down down = q->heap[i];

            kvbm_stats_of(m, to)->dropped++;
            kvbm_down_ended(m, &down, false);
        }
        kvbm_once_drop(m, to, job);
    }
}

/* Tell a job that one of the offloads which it waits for has ended. The last one ends the job. */
static void tell_job(struct kvbm_manager *m, const struct kvbm_down *down, bool arrived)
{
    struct kvbm_job_ *job = down->through;

    if (job->pin->direct && arrived)
        job->ok[down->index / 8] |= (uint8_t)(1u << (down->index % 8));
    if (!job->pin->direct && !arrived && job->done.status == 0)
        job->done.status = -EREMOTEIO;
    if (--job->n_through == 0 && job->copied)
        kvbm_job_is_over(m, job);
}

void kvbm_down_ended(struct kvbm_manager *m, struct kvbm_down *down, bool arrived)
{
    /* the key first: entries aside join the queue before the pin that describes it may go */
    kvbm_once_end(down);
    kvbm_promise_end(m, down, arrived);
    if (down->through)
        tell_job(m, down, arrived);
    if (down->cache)
        down->cache->n_jobs--;
    if (down->pin)
        kvbm_pin_put(down->pin);
}

int kvbm_queue_push(struct kvbm_manager *m, enum kv_tier to, struct kvbm_down down)
{
    struct kvbm_queue *q = &m->offload.queues[to];
    int rc;

    kvbm_once_end(&down); /* its move could not begin; entries aside may join the queue */
    rc = make_room(m, q, down.promise != 0);
    /* an entry that returns keeps its number, and with it its place */
    if (!down.number)
        down.number = ++m->offload.next_number;
    if (rc < 0) {
        kvbm_stats_of(m, to)->dropped++;
        kvbm_down_ended(m, &down, false);
        return rc;
    }
    q->heap[q->n] = down;
    sift_up(q->heap, q->n++);
    return 0;
}

/* Mark a queue as stalled: the mover retries it when an operation ends, or after a pause. */
void kvbm_queue_stall(struct kvbm_manager *m, struct kvbm_queue *q, bool stalled)
{
    q->stalled = stalled;
    if (stalled)
        pthread_cond_signal(&m->work);
}
