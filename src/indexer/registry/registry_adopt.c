// SPDX-License-Identifier: Apache-2.0
/* Adopt a peer's index, before the streams are applied. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/registry/tables.h"

static int check_adoptable(const struct ki_registry *r, const struct ki_model *known,
                           uint32_t block_size, struct kv_error *error)
{
    struct kvi_stats stats = {.size = sizeof(stats)};

    if (!atomic_load_explicit(&r->env.held, memory_order_relaxed))
        return kv_fail(error, -EBUSY, 0, "live events are being applied already");
    if (!known)
        return 0;
    if (known->block_size != block_size)
        return kv_fail(error, -EEXIST, 0,
                       "block_size mismatch for model=%.60s tenant=%.60s: existing=%" PRIu32
                       ", dumped=%" PRIu32,
                       known->name, known->tenant, known->block_size, block_size);
    kvi_get_stats(known->index, &stats);
    if (stats.holder_blocks)
        return kv_fail(error, -EEXIST, 0, "model=%.60s tenant=%.60s has blocks already",
                       known->name, known->tenant);
    return 0;
}

/* A model being adopted from a peer. */
struct adoption {
    /* Known: the empty model, or NULL; model: the one with the peer's index. */
    struct ki_model *known, *model;
    struct ki_mark *marks; /* sorted by holder */
    size_t n;
    struct ki_snapshot **snapshots; /* sorted */
    size_t n_snapshots;
};

static const struct ki_mark *mark_of(const struct adoption *a, const struct ki_listener *l)
{
    struct ki_mark key = {.holder = {.worker = l->instance, .rank = l->rank}};

    return a->n ? bsearch(&key, a->marks, a->n, sizeof(key), ki_marks_compare) : NULL;
}

static struct ki_snapshot *snapshot_of(const struct adoption *a, const struct ki_listener *l)
{
    struct ki_snapshot *s = ki_snapshot_find(a->snapshots, a->n_snapshots, l->instance, l->rank);

    return s && s->has_position ? s : NULL;
}

/* Move a stream to the model. Nothing tells yet what the blocks mean that no snapshot belongs to. */
static void move_listener(struct ki_listener *l, const struct adoption *a)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};
    const struct ki_mark *mark = mark_of(a, l);

    ki_listener_change_model(l, ki_model_acquire(a->model));
    if (snapshot_of(a, l) || !kvi_holder_blocks(a->model->index, holder))
        return;
    pthread_mutex_lock(&l->lock);
    ki_stream_seed_cursorless(&l->stream);
    ki_listener_name_rank(l);
    l->applier.reports.suspects = true; /* the history of its blocks is unknown */
    /* Torn, or fed to the peer by another stream, whose numbers mean nothing here. */
    if (mark && (mark->torn || mark->has_position))
        ki_stream_seed_torn(&l->stream);
    ki_listener_unlock(l);
}

/* Find the listener that brings the blocks of a rank that isn't registered; NULL: unknown. */
static struct ki_listener *feeder_of(const struct ki_registry *r, const struct ki_mark *mark)
{
    size_t first, end = ki_instance_range(r, mark->holder.worker, &first);

    if (mark->has_position)
        return ki_listener_find(r, mark->holder.worker, mark->stream_rank);
    return first < end ? r->listeners[first] : NULL;
}

/* Adopt a holder that has no registration here. */
static void adopt_stray(struct ki_registry *r, const struct adoption *a, const struct ki_mark *mark)
{
    bool has_blocks = kvi_holder_blocks(a->model->index, mark->holder) > 0;
    struct ki_listener *feeder = feeder_of(r, mark);

    if (!has_blocks && !mark->has_position)
        return;
    if (feeder)
        ki_listener_adopt_rank(feeder, mark);
    else if (!ki_positions_note(&r->positions, mark, has_blocks))
        kvi_remove_holder(a->model->index, mark->holder);
}

static void adopt_marks(struct ki_registry *r, const struct adoption *a)
{
    for (size_t i = 0; i < a->n; i++) {
        const struct ki_mark *mark = &a->marks[i];
        size_t first, end = ki_instance_range(r, mark->holder.worker, &first);

        /* Drop blocks of an instance that feeds another model. */
        if (first < end && r->listeners[first]->model != a->model)
            kvi_remove_worker(a->model->index, mark->holder.worker);
        else if (!ki_listener_find(r, mark->holder.worker, mark->holder.rank))
            adopt_stray(r, a, mark);
    }
}

/*
 * Let each stream go on behind its snapshot, or keep the snapshot of a worker that may register. Streams
 * were held until now, so none is ahead of it.
 */
static void adopt_snapshots(struct ki_registry *r, const struct adoption *a)
{
    for (size_t i = 0; i < a->n_snapshots; i++) {
        struct ki_snapshot *s = a->snapshots[i];
        struct ki_listener *l = ki_listener_find(r, s->instance, s->rank);

        if (!s->has_position || (l && l->model != a->model))
            continue;
        if (l)
            ki_snapshot_give(s, l);
        else if (ki_positions_keep(&r->positions, (struct kv_holder){s->instance, s->rank}, s))
            a->snapshots[i] = NULL;
    }
}

static int copy_marks(const struct ki_mark *marks, size_t n, struct ki_mark **ret)
{
    struct ki_mark *copy = malloc((n + 1) * sizeof(*copy));

    if (!copy)
        return -ENOMEM;
    if (n)
        memcpy(copy, marks, n * sizeof(*copy));
    qsort(copy, n, sizeof(*copy), ki_marks_compare);
    *ret = copy;
    return 0;
}

/* Adopt @index with @a's marks and snapshots. */
static int adopt_locked(struct ki_registry *r, const char *name, const char *tenant,
                        uint32_t block_size, struct kvi_index *index, struct adoption *a,
                        struct kv_error *error)
{
    int rc;

    a->known = ki_model_find(r, name, tenant);
    rc = check_adoptable(r, a->known, block_size, error);
    if (rc < 0)
        return rc;
    rc = ki_tables_reserve(r);
    if (rc == 0)
        rc = ki_model_create(name, tenant, block_size, index, &a->model);
    if (!a->model)
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    if (a->known)
        ki_model_note_forms(a->model, ki_model_forms(a->known));
    for (size_t i = 0; i < r->n_listeners; i++)
        if (a->known && r->listeners[i]->model == a->known)
            move_listener(r->listeners[i], a);
    adopt_marks(r, a);
    adopt_snapshots(r, a);
    if (a->known)
        ki_tables_replace_model(r, a->model);
    else
        ki_tables_put_model(r, a->model);
    ki_model_release(a->known);
    return 0;
}

int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index, const struct ki_mark *marks,
                      size_t n, struct ki_snapshot **snapshots, size_t n_snapshots,
                      struct kv_error *error)
{
    struct adoption a = {.n = n, .snapshots = snapshots, .n_snapshots = n_snapshots};
    int rc;

    if (block_size == 0)
        return kv_fail(error, -EINVAL, 0, "block_size must be at least 1");
    if (copy_marks(marks, n, &a.marks) < 0)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_lock(&registry->admin);
    rc = adopt_locked(registry, model, tenant, block_size, index, &a, error);
    pthread_mutex_unlock(&registry->admin);
    free(a.marks);
    return rc;
}
