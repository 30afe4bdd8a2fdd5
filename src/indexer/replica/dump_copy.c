// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/dump_copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread/thread.h"
#include "indexer/registry/tables.h"

#define ROUNDS 3 /* in which a stream is copied, as long as its blocks change meanwhile */

/* A stream of the group. */
struct stream {
    struct ki_copied copied;      /* snapshot NULL: the stream has brought nothing */
    struct ki_listener *listener; /* held; NULL: nobody follows the stream here */
    uint64_t generation;
};

/* Streams [first, end) of the group are the instance's. */
struct unit {
    uint64_t instance;
    size_t first, end;
    bool is_valid; /* they were copied at one batch each */
};

/* A rank of the group, and the stream that tells its blocks. */
struct rank {
    struct kv_holder holder;
    size_t stream;
    bool is_registered; /* the stream is the rank's own */
};

struct group {
    struct ki_registry *registry;
    const struct ki_model *model;
    struct kv_buf streams, units, ranks;
    uint64_t bytes, largest; /* of blocks, as they will be copied; of one instance */
    const struct rank *last;
};

static struct stream *streams_of(const struct group *g)
{
    return (struct stream *)(void *)g->streams.data;
}

static size_t n_streams(const struct group *g)
{
    return g->streams.len / sizeof(struct stream);
}

static struct unit *last_unit(const struct group *g)
{
    return (struct unit *)(void *)(g->units.data + g->units.len) - 1;
}

/* -- what is copied of blocks ------------------------------------------------------------------ */

struct run_head {
    uint64_t parent;
    uint32_t rank, n;
    uint32_t tier;
    bool has_parent;
};

/* A fact; most are no longer than this head. is_whole: struct kvi_extra and its sources follow. */
struct extra_head {
    uint64_t hash;
    uint32_t rank, group, copies;
    uint8_t kind, tier, part;
    bool is_whole;
};

#define ALIGN(bytes) (((bytes) + 7) / 8 * 8)

bool ki_copied_run(const struct ki_copied *c, size_t *at, struct kvi_dump_run *ret)
{
    const struct run_head *head = (const struct run_head *)(const void *)(c->runs.data + *at);

    if (*at == c->runs.len)
        return false;
    *at += sizeof(*head);
    *ret = (struct kvi_dump_run){
        .holder = {c->snapshot->instance, head->rank},
        .tier = (enum kv_tier)head->tier,
        .parent = head->has_parent ? &head->parent : NULL,
        .blocks = (const struct kv_block *)(const void *)(c->runs.data + *at),
        .n = head->n,
    };
    *at += head->n * sizeof(struct kv_block);
    return true;
}

bool ki_copied_extra(const struct ki_copied *c, size_t *at, struct kvi_extra *ret)
{
    const struct extra_head *head = (const struct extra_head *)(const void *)(c->extras.data + *at);

    if (*at == c->extras.len)
        return false;
    *at += sizeof(*head);
    if (!head->is_whole) {
        *ret = (struct kvi_extra){.holder = {c->snapshot->instance, head->rank},
                                  .kind = (enum kvi_extra_kind)head->kind,
                                  .tier = (enum kv_tier)head->tier,
                                  .hash = head->hash,
                                  .copies = head->copies,
                                  .window = {.group = head->group, .part = head->part}};
        return true;
    }
    memcpy(ret, c->extras.data + *at, sizeof(*ret));
    *at += ALIGN(sizeof(*ret));
    ret->sources = (const struct kvi_source_copies *)(const void *)(c->extras.data + *at);
    *at += ALIGN(ret->n_sources * sizeof(*ret->sources));
    return true;
}

/* Append @len bytes, and zeros up to a multiple of 8. */
static void append(struct kv_buf *to, const void *data, size_t len)
{
    static const char zeros[8];

    kv_buf_append(to, data, len);
    kv_buf_append(to, zeros, ALIGN(len) - len);
}

static int compare_ranks(const void *a, const void *b)
{
    return ki_holder_compare(&((const struct rank *)a)->holder, &((const struct rank *)b)->holder);
}

/* Find the copy that a holder's blocks belong to; NULL: it isn't of the group. */
static struct ki_copied *copy_of(struct group *g, struct kv_holder holder)
{
    const struct rank key = {.holder = holder};

    if (!g->last || ki_holder_compare(&g->last->holder, &holder) != 0)
        g->last =
            bsearch(&key, g->ranks.data, g->ranks.len / sizeof(key), sizeof(key), compare_ranks);
    return g->last ? &streams_of(g)[g->last->stream].copied : NULL;
}

static int copy_run(void *arg, const struct kvi_dump_run *run)
{
    struct ki_copied *c = copy_of(arg, run->holder);
    const struct run_head head = {.parent = run->parent ? *run->parent : 0,
                                  .has_parent = run->parent != NULL,
                                  .rank = run->holder.rank,
                                  .n = (uint32_t)run->n,
                                  .tier = (uint32_t)run->tier};

    if (!c)
        return 0;
    kv_buf_append(&c->runs, &head, sizeof(head));
    kv_buf_append(&c->runs, run->blocks, run->n * sizeof(*run->blocks));
    return c->runs.error;
}

static int copy_extra(void *arg, const struct kvi_extra *extra)
{
    struct ki_copied *c = copy_of(arg, extra->holder);
    const struct extra_head head = {.hash = extra->hash,
                                    .rank = extra->holder.rank,
                                    .group = extra->window.group,
                                    .copies = extra->copies,
                                    .kind = (uint8_t)extra->kind,
                                    .tier = (uint8_t)extra->tier,
                                    .part = (uint8_t)extra->window.part,
                                    .is_whole = extra->kind != KVI_EXTRA_WINDOW_BLOCK &&
                                                (extra->kind != KVI_EXTRA_BLOCK || extra->tiers)};

    if (!c)
        return 0;
    kv_buf_append(&c->extras, &head, sizeof(head));
    if (head.is_whole) {
        append(&c->extras, extra, sizeof(*extra));
        append(&c->extras, extra->sources, extra->n_sources * sizeof(*extra->sources));
    }
    return c->extras.error;
}

/* -- a group ----------------------------------------------------------------------------------- */

static struct stream *add_stream(struct group *g, struct ki_listener *l)
{
    const struct stream fresh = {.listener = l};

    kv_buf_append(&g->streams, &fresh, sizeof(fresh));
    return g->streams.error ? NULL : &streams_of(g)[n_streams(g) - 1];
}

/* Hold a listener, and copy what its stream knows. Returns 0 or -ENOMEM. */
static int hold(struct group *g, struct ki_listener *l)
{
    struct stream *s = add_stream(g, l);
    int rc = s ? ki_listener_hold(l, &s->copied.snapshot, &s->generation) : -ENOMEM;

    if (!rc)
        ki_listener_acquire(l);
    else if (s)
        g->streams.len -= sizeof(*s);
    return rc == -ENODATA ? 0 : rc; /* it has been retired: the blocks are leaving */
}

/* Copy the snapshot of a stream that nobody follows here. Without one, only its ranks are known. */
static int add_kept_stream(struct group *g, uint64_t instance, uint32_t rank, struct stream **ret)
{
    const struct ki_position *p =
        ki_positions_find(&g->registry->positions, (struct kv_holder){instance, rank});
    struct stream *s = add_stream(g, NULL);
    struct ki_snapshot *snapshot = NULL;
    int rc = s ? 0 : -ENOMEM;

    if (!rc && p && p->snapshot)
        rc = ki_snapshot_copy(p->snapshot, &snapshot);
    else if (!rc)
        rc = ki_snapshot_create(&snapshot);
    if (rc) {
        g->streams.len -= s ? sizeof(*s) : 0;
        return rc;
    }
    snapshot->instance = instance;
    snapshot->rank = rank;
    snapshot->state.facts |= KI_FACT_ADRIFT;
    kv_buf_clear(&snapshot->ranks); /* those that are still here follow */
    s->copied.snapshot = snapshot;
    *ret = s;
    return 0;
}

/* Add a rank with blocks that no listener brings. */
static int add_kept_rank(struct group *g, size_t first, const struct ki_mark *mark)
{
    uint32_t rank = mark->has_position ? mark->stream_rank : mark->holder.rank;
    struct stream *s = NULL;
    int rc = 0;

    if (ki_listener_find(g->registry, mark->holder.worker, rank))
        return 0;
    for (size_t i = first; i < n_streams(g) && !s; i++)
        if (!streams_of(g)[i].listener && streams_of(g)[i].copied.snapshot->rank == rank)
            s = &streams_of(g)[i];
    if (!s)
        rc = add_kept_stream(g, mark->holder.worker, rank, &s);
    if (rc)
        return rc;
    s->copied.snapshot->torn |= mark->torn;
    kv_buf_append(&s->copied.snapshot->ranks, &mark->holder.rank, sizeof(mark->holder.rank));
    return s->copied.snapshot->ranks.error;
}

/* Note the ranks of a stream, and how much is to be copied of them. */
static void add_ranks(struct group *g, size_t at)
{
    const struct ki_snapshot *snapshot = streams_of(g)[at].copied.snapshot;
    struct kvi_window windows[KVI_MAX_WINDOWS];

    for (size_t i = 0; snapshot && i < ki_snapshot_n_ranks(snapshot); i++) {
        const struct rank rank = {.holder = {snapshot->instance, ki_snapshot_rank(snapshot, i)},
                                  .stream = at,
                                  .is_registered = ki_snapshot_rank(snapshot, i) == snapshot->rank};
        int n_windows = kvi_get_windows(g->model->index, rank.holder, windows);

        kv_buf_append(&g->ranks, &rank, sizeof(rank));
        g->bytes +=
            kvi_holder_blocks(g->model->index, rank.holder) *
            (sizeof(struct kv_block) + (uint64_t)KV_MAX(n_windows, 0) * sizeof(struct extra_head));
    }
}

/* Hold the streams of an instance, and add them and those that are kept of it. */
static int add_instance(struct group *g, uint64_t instance)
{
    struct ki_registry *r = g->registry;
    const struct unit unit = {.instance = instance, .first = n_streams(g), .end = n_streams(g)};
    const struct ki_position *p = NULL;
    uint64_t before;
    size_t at, end;
    int rc = 0;

    kv_buf_append(&g->units, &unit, sizeof(unit)); /* first: its streams are let go on by it */
    if (g->units.error)
        return g->units.error;
    pthread_mutex_lock(&r->admin);
    end = ki_instance_range(r, instance, &at);
    for (; at < end && !rc; at++)
        if (r->listeners[at]->model == g->model)
            rc = hold(g, r->listeners[at]);
    while (!rc && (p = ki_positions_next(&r->positions, instance, p)))
        if (p->has_blocks && kvi_holder_blocks(g->model->index, p->mark.holder))
            rc = add_kept_rank(g, unit.first, &p->mark);
    pthread_mutex_unlock(&r->admin);
    last_unit(g)->end = n_streams(g);
    before = g->bytes;
    for (size_t i = unit.first; i < n_streams(g); i++)
        add_ranks(g, i);
    g->largest = KV_MAX(g->largest, g->bytes - before);
    return rc ? rc : g->ranks.error;
}

/* Sort the ranks; of several streams with one rank, the rank's own tells the blocks, or the first. */
static size_t sort_ranks(struct group *g)
{
    struct rank *ranks = (struct rank *)(void *)g->ranks.data;
    size_t n = g->ranks.len / sizeof(*ranks), kept = 0;

    if (n)
        qsort(ranks, n, sizeof(*ranks), compare_ranks);
    for (size_t i = 0; i < n; i++) {
        if (!kept || compare_ranks(&ranks[kept - 1], &ranks[i]) != 0)
            ranks[kept++] = ranks[i];
        else if (ranks[i].is_registered)
            ranks[kept - 1] = ranks[i];
    }
    g->ranks.len = kept * sizeof(*ranks);
    return kept;
}

/* Copy the blocks of the group's ranks. */
static int copy_blocks(struct group *g)
{
    size_t n = sort_ranks(g);
    const struct rank *ranks = (const struct rank *)(const void *)g->ranks.data;
    struct kv_holder *holders = malloc((n + 1) * sizeof(*holders));
    int rc;

    if (!holders)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        holders[i] = ranks[i].holder;
    rc = kvi_dump_holders(g->model->index, holders, n, copy_run, copy_extra, g);
    free(holders);
    return rc;
}

/*
 * Return true when the instance still has the streams of the unit, and no other. Blocks that no stream
 * brings may be leaving: their positions tell so only afterwards.
 */
static bool has_same_streams(const struct group *g, const struct unit *unit)
{
    const struct ki_registry *r = g->registry;
    size_t at, end = ki_instance_range(r, unit->instance, &at);

    for (size_t i = unit->first; i < unit->end; i++) {
        const struct stream *s = &streams_of(g)[i];
        const struct ki_snapshot *snapshot = s->copied.snapshot;

        if (s->listener && (at == end || r->listeners[at++] != s->listener))
            return false;
        if (!s->listener && ki_registry_is_leaving_locked(r, unit->instance))
            return false;
        for (size_t k = 0; !s->listener && k < ki_snapshot_n_ranks(snapshot); k++) {
            const struct ki_position *p = ki_positions_find(
                &r->positions, (struct kv_holder){unit->instance, ki_snapshot_rank(snapshot, k)});

            if (!p || !p->has_blocks)
                return false;
        }
    }
    return at == end;
}

/* Let the streams go on, and judge which copies are of one batch. */
static void let_go(struct group *g)
{
    struct unit *units = (struct unit *)(void *)g->units.data;

    pthread_mutex_lock(&g->registry->admin);
    for (size_t u = 0; u < g->units.len / sizeof(*units); u++) {
        units[u].is_valid = has_same_streams(g, &units[u]);
        for (size_t i = units[u].first; i < units[u].end; i++) {
            struct stream *s = &streams_of(g)[i];

            if (s->listener && !ki_listener_let_go(s->listener, s->generation))
                units[u].is_valid = false;
        }
    }
    pthread_mutex_unlock(&g->registry->admin);
    ki_registry_wake(g->registry);
}

static void free_copied(struct ki_copied *c)
{
    ki_snapshot_free(c->snapshot);
    kv_buf_fini(&c->runs);
    kv_buf_fini(&c->extras);
    *c = (struct ki_copied){.snapshot = NULL};
}

static void empty(struct group *g)
{
    for (size_t i = 0; i < n_streams(g); i++) {
        free_copied(&streams_of(g)[i].copied);
        ki_listener_release(streams_of(g)[i].listener);
    }
    kv_buf_clear(&g->streams);
    kv_buf_clear(&g->units);
    kv_buf_clear(&g->ranks);
    g->bytes = g->largest = 0;
    g->last = NULL;
}

/* Return true when another instance as large as those before has room. */
static bool has_room(const struct group *g)
{
    return g->bytes + g->largest <= KI_GROUP_BYTES && n_streams(g) < KI_GROUP_STREAMS;
}

/* Hold instances from *@at on, as many as make a group, and copy them. */
static int copy_group(struct group *g, const uint64_t *instances, size_t n, size_t *at)
{
    int rc = 0;

    empty(g);
    pthread_mutex_lock(&g->registry->copies);
    while (*at < n && !rc && (!n_streams(g) || has_room(g)))
        rc = add_instance(g, instances[(*at)++]);
    if (!rc)
        rc = copy_blocks(g);
    let_go(g);
    pthread_mutex_unlock(&g->registry->copies);
    return rc;
}

/* Hand the copies out, and list the instances that must be copied again. */
static int hand_out(const struct group *g, struct kv_buf *again, ki_copied_fn fn, void *arg)
{
    const struct unit *units = (const struct unit *)(const void *)g->units.data;
    int rc = 0;

    for (size_t u = 0; u < g->units.len / sizeof(*units) && !rc; u++) {
        if (!units[u].is_valid)
            kv_buf_append(again, &units[u].instance, sizeof(units[u].instance));
        for (size_t i = units[u].first; i < units[u].end && units[u].is_valid && !rc; i++) {
            struct ki_copied *c = &streams_of(g)[i].copied;

            rc = c->snapshot ? fn(arg, c) : 0;
            free_copied(c);
        }
    }
    return rc ? rc : again->error;
}

/* -- all streams ------------------------------------------------------------------------------- */

static int compare_instances(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* List the instances with streams or kept blocks in the model. */
static int list_instances(struct ki_registry *r, const struct ki_model *model, struct kv_buf *ret)
{
    const struct ki_position *p;
    uint64_t *items;
    size_t n, kept = 0;

    pthread_mutex_lock(&r->admin);
    for (size_t i = 0; i < r->n_listeners; i++)
        if (r->listeners[i]->model == model)
            kv_buf_append(ret, &r->listeners[i]->instance, sizeof(uint64_t));
    if (r->positions.buckets) {
        TAILQ_FOREACH(p, &r->positions.with_blocks, age)
        if (kvi_holder_blocks(model->index, p->mark.holder))
            kv_buf_append(ret, &p->mark.holder.worker, sizeof(uint64_t));
    }
    pthread_mutex_unlock(&r->admin);
    items = (uint64_t *)(void *)ret->data;
    n = ret->len / sizeof(*items);
    if (n)
        qsort(items, n, sizeof(*items), compare_instances);
    for (size_t i = 0; i < n; i++)
        if (!kept || items[kept - 1] != items[i])
            items[kept++] = items[i];
    ret->len = kept * sizeof(*items);
    return ret->error;
}

/* A group, and where the next one begins among the instances. */
struct copying {
    struct group group;
    const uint64_t *instances;
    size_t n, at;
    int rc;
};

static void *copy_next(void *arg)
{
    struct copying *c = arg;

    c->rc = copy_group(&c->group, c->instances, c->n, &c->at);
    return NULL;
}

/*
 * Hand out a group, while a thread copies the next one: the reader at the other end would wait for it.
 * Without a thread the next one is copied afterwards.
 */
static int hand_out_and_copy(struct copying *current, struct copying *next, struct kv_buf *again,
                             ki_copied_fn fn, void *arg)
{
    pthread_t thread;
    bool more, is_ahead;
    int rc;

    next->at = current->at;
    next->rc = 0;
    more = next->at < next->n;
    is_ahead = more && kv_thread_start(&thread, "ki-copy", copy_next, next) == 0;
    rc = hand_out(&current->group, again, fn, arg);
    if (is_ahead)
        pthread_join(thread, NULL);
    else if (more && !rc)
        copy_next(next);
    return rc ? rc : next->rc;
}

/* Copy all of the instances, and list those that must be copied again. */
static int copy_round(struct copying pair[2], const struct kv_buf *instances, struct kv_buf *again,
                      ki_copied_fn fn, void *arg)
{
    struct copying *current = &pair[0], *next = &pair[1], *swap;
    int rc;

    for (int i = 0; i < 2; i++) {
        pair[i].instances = (const uint64_t *)(const void *)instances->data;
        pair[i].n = instances->len / sizeof(uint64_t);
        pair[i].at = 0;
    }
    copy_next(current);
    for (rc = current->rc; !rc && n_streams(&current->group); current = swap) {
        rc = hand_out_and_copy(current, next, again, fn, arg);
        empty(&current->group);
        swap = next;
        next = current;
    }
    return rc;
}

static void fini(struct group *g)
{
    empty(g);
    kv_buf_fini(&g->streams);
    kv_buf_fini(&g->units);
    kv_buf_fini(&g->ranks);
}

int ki_dump_copy(struct ki_registry *registry, const struct ki_model *model, ki_copied_fn fn,
                 void *arg)
{
    struct copying pair[2] = {{.group = {.registry = registry, .model = model}},
                              {.group = {.registry = registry, .model = model}}};
    struct kv_buf instances = KV_BUF_INIT, again = KV_BUF_INIT;
    int rc = list_instances(registry, model, &instances);

    for (int round = 0; round < ROUNDS && instances.len && !rc; round++) {
        rc = copy_round(pair, &instances, &again, fn, arg);
        kv_buf_fini(&instances);
        instances = again;
        again = (struct kv_buf)KV_BUF_INIT;
    }
    fini(&pair[0].group);
    fini(&pair[1].group);
    kv_buf_fini(&instances);
    return rc;
}
