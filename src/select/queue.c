// SPDX-License-Identifier: Apache-2.0
/*
 * Requests held in front of the workers: a heap by their order, and a list by arrival for those that
 * have waited long. A request keeps its place in the heap, so that taking any costs a logarithm.
 */
#include "base/core/clock.h"
#include "select/impl.h"

struct kvsel_held {
    struct kvsel_held *older, *newer;
    uint64_t ticket;
    uint64_t since_ns;
    double key, tokens; /* a smaller key first */
    uint32_t priority;  /* a larger one before all keys */
    uint32_t roles;     /* of the worker that it waits for */
    size_t at;          /* in the heap */
};

static bool before(const struct kvsel_held *a, const struct kvsel_held *b)
{
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return a->key < b->key || (a->key == b->key && a->since_ns < b->since_ns);
}

static void put(struct kvsel_queue *q, struct kvsel_held *held, size_t at)
{
    q->heap[at] = held;
    held->at = at;
}

static void rise(struct kvsel_queue *q, struct kvsel_held *held)
{
    size_t at = held->at;

    for (; at > 0 && before(held, q->heap[(at - 1) / 2]); at = (at - 1) / 2)
        put(q, q->heap[(at - 1) / 2], at);
    put(q, held, at);
}

static void sink(struct kvsel_queue *q, struct kvsel_held *held)
{
    size_t at = held->at, child;

    for (; (child = 2 * at + 1) < q->n; at = child) {
        if (child + 1 < q->n && before(q->heap[child + 1], q->heap[child]))
            child++;
        if (!before(q->heap[child], held))
            break;
        put(q, q->heap[child], at);
    }
    put(q, held, at);
}

static void take(struct kvsel *s, struct kvsel_held *held)
{
    struct kvsel_queue *q = &s->queue;
    struct kvsel_held *last = q->heap[--q->n];

    if (last != held) {
        put(q, last, held->at);
        rise(q, last);
        sink(q, last);
    }
    if (held->older)
        held->older->newer = held->newer;
    else
        q->oldest = held->newer;
    if (held->newer)
        held->newer->older = held->older;
    else
        q->newest = held->older;
    q->tokens = q->n ? q->tokens - held->tokens : 0;
    free(held);
}

/* Return the roles of the worker that computes the request's prompt. */
static uint32_t roles_of(const struct kvsel_request *r)
{
    return r->stage == KVSEL_PAIR ? KVSEL_PREFILL : KVSEL_BOTH;
}

/* Return the fewest tokens that a worker would have to compute of the request. */
static double least_uncovered(struct kvsel *s, const struct kvsel_ask *ask)
{
    double least = (double)ask->r.tokens;

    kvsel_terms(s, ask, roles_of(&ask->r));
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->reason[i] == KVSEL_FITS)
            least = KV_MIN(least, s->uncovered[i]);
    return least;
}

static struct kvsel_held *find(const struct kvsel_queue *q, uint64_t ticket)
{
    struct kvsel_held *at = q->oldest;

    while (at && at->ticket != ticket)
        at = at->newer;
    return at;
}

static int make_room(struct kvsel_queue *q)
{
    size_t capacity = q->capacity ? 2 * q->capacity : 64;
    struct kvsel_held **heap;

    if (q->n < q->capacity)
        return 0;
    heap = realloc(q->heap, capacity * sizeof(struct kvsel_held *));
    if (!heap)
        return -ENOMEM;
    q->heap = heap;
    q->capacity = capacity;
    return 0;
}

int kvsel_queue_put(struct kvsel *s, uint64_t ticket, const struct kvsel_request *request,
                    uint64_t now_ns)
{
    struct kvsel_queue *q = &s->queue;
    struct kvsel_held *held;
    struct kvsel_ask ask;
    double tokens;
    int rc = kvsel_ask(s, request, now_ns, &ask);

    if (rc < 0)
        return rc;
    if (find(q, ticket))
        return -EEXIST;
    if (kvsel_stride(s, &ask.r) < 0)
        return -ENOMEM;
    tokens = least_uncovered(s, &ask);
    if (q->n >= s->opts.queue_max || q->tokens + tokens > (double)s->opts.queue_max_tokens) {
        s->stats.shed++;
        return -ENOBUFS;
    }
    held = make_room(q) == 0 ? calloc(1, sizeof(*held)) : NULL;
    if (!held)
        return -ENOMEM;
    held->ticket = ticket;
    held->since_ns = now_ns;
    held->tokens = tokens;
    held->priority = ask.r.priority;
    held->roles = roles_of(&ask.r);
    held->key = s->opts.queue_order == KVSEL_SHORTEST
                    ? tokens
                    : (double)now_ns - ask.r.jump_s * (double)KV_NS_PER_S;
    held->older = q->newest;
    if (q->newest)
        q->newest->newer = held;
    else
        q->oldest = held;
    q->newest = held;
    held->at = q->n++;
    rise(q, held);
    q->tokens += tokens;
    s->stats.held++;
    return 0;
}

/* True when a worker that is up and has @roles has fewer waiting tokens than the threshold. */
static bool has_room(const struct kvsel *s, uint32_t roles)
{
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->state[i] == KVSEL_FITS && (s->slots[i].roles & roles) == roles &&
            s->waiting[i] < (double)s->opts.queue_waiting &&
            (!s->slots[i].max_requests || s->requests[i] < s->slots[i].max_requests))
            return true;
    return false;
}

static bool has_waited(const struct kvsel_held *held, uint64_t now_ns, uint64_t ns)
{
    return now_ns >= held->since_ns && now_ns - held->since_ns >= ns;
}

/* Return whose turn it is: the first by order, or the oldest of its priority that has waited long. */
static struct kvsel_held *first(const struct kvsel *s, uint64_t now_ns)
{
    struct kvsel_held *first = s->queue.heap[0], *at = s->queue.oldest;

    if (s->opts.queue_order != KVSEL_SHORTEST)
        return first;
    while (at && has_waited(at, now_ns, s->opts.queue_age_ns) && at->priority != first->priority)
        at = at->newer;
    return at && has_waited(at, now_ns, s->opts.queue_age_ns) ? at : first;
}

int kvsel_queue_next(struct kvsel *s, uint64_t now_ns, uint64_t *ticket)
{
    struct kvsel_queue *q = &s->queue;
    struct kvsel_held *next;

    kvsel_slots_heal(s, now_ns);
    if (!q->n)
        return -EAGAIN;
    next = first(s, now_ns);
    if (!has_room(s, next->roles))
        return -EAGAIN;
    *ticket = next->ticket;
    take(s, next);
    return 0;
}

int kvsel_queue_late(struct kvsel *s, uint64_t now_ns, uint64_t *ticket)
{
    struct kvsel_held *oldest = s->queue.oldest;

    if (!oldest || !has_waited(oldest, now_ns, s->opts.queue_max_wait_ns))
        return -EAGAIN;
    *ticket = oldest->ticket;
    take(s, oldest);
    s->stats.late++;
    return 0;
}

int kvsel_queue_drop(struct kvsel *s, uint64_t ticket)
{
    struct kvsel_held *held = find(&s->queue, ticket);

    if (!held)
        return -ENOENT;
    take(s, held);
    return 0;
}

void kvsel_queue_fini(struct kvsel *s)
{
    while (s->queue.oldest)
        take(s, s->queue.oldest);
    free(s->queue.heap);
}
