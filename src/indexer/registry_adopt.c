// SPDX-License-Identifier: Apache-2.0
/* Taking over a peer's index before the streams are let go. */
#include <inttypes.h>
#include <string.h>

#include "indexer/tables.h"

static int check_adoptable(const struct ki_registry *r, const struct ki_model *known,
                           uint32_t block_size, struct kv_error *error)
{
    struct kvi_stats stats;

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

static const struct ki_watermark *mark_of(const struct ki_watermark *marks, size_t n,
                                          const struct ki_listener *l)
{
    for (size_t i = 0; i < n; i++)
        if (marks[i].holder.worker == l->instance && marks[i].holder.rank == l->rank)
            return &marks[i];
    return NULL;
}

/* The streams go on where the dump ends. They are held, so none is ahead of it. */
static void move_listener(struct ki_listener *l, struct ki_model *model,
                          const struct ki_watermark *mark)
{
    struct kv_holder holder = {.worker = l->instance, .rank = l->rank};
    struct ki_model *old;

    pthread_mutex_lock(&l->lock);
    old = l->model;
    l->model = ki_model_acquire(model);
    if (mark)
        ki_stream_seed(&l->stream, mark->sequence, mark->timestamp, mark->partial);
    else if (kvi_holder_blocks(model->index, holder))
        ki_stream_seed_cursorless(&l->stream);
    pthread_mutex_unlock(&l->lock);
    ki_model_release(old);
}

/* A rank without a registration: its only feeder's, or of a worker that may register later. */
static void adopt_stray_mark(struct ki_registry *r, const struct ki_watermark *mark)
{
    size_t first, end = ki_instance_range(r, mark->holder.worker, &first);

    if (ki_listener_find(r, mark->holder.worker, mark->holder.rank))
        return;
    if (end - first == 1) {
        pthread_mutex_lock(&r->listeners[first]->lock);
        ki_applier_note_rank(&r->listeners[first]->applier, mark->holder.rank);
        pthread_mutex_unlock(&r->listeners[first]->lock);
        return;
    }
    ki_positions_note(&r->positions, mark, true);
}

static int adopt_locked(struct ki_registry *r, const char *name, const char *tenant,
                        uint32_t block_size, struct kvi_index *index,
                        const struct ki_watermark *marks, size_t n, struct kv_error *error)
{
    struct ki_model *known = ki_model_find(r, name, tenant), *model = NULL;
    int rc = check_adoptable(r, known, block_size, error);

    if (rc < 0)
        return rc;
    rc = ki_tables_reserve(r);
    if (rc == 0)
        rc = ki_model_create(name, tenant, block_size, index, &model);
    if (!model)
        return kv_fail(error, rc, 0, "%s", strerror(-rc));
    for (size_t i = 0; i < r->n_listeners; i++)
        if (r->listeners[i]->model == known)
            move_listener(r->listeners[i], model, mark_of(marks, n, r->listeners[i]));
    for (size_t i = 0; i < n; i++)
        adopt_stray_mark(r, &marks[i]);
    if (known)
        ki_tables_replace_model(r, model);
    else
        ki_tables_put_model(r, model);
    ki_model_release(known);
    return 0;
}

int ki_registry_adopt(struct ki_registry *registry, const char *model, const char *tenant,
                      uint32_t block_size, struct kvi_index *index,
                      const struct ki_watermark *watermarks, size_t n, struct kv_error *error)
{
    int rc;

    if (block_size == 0)
        return kv_fail(error, -EINVAL, 0, "block_size must be at least 1");
    pthread_mutex_lock(&registry->admin);
    rc = adopt_locked(registry, model, tenant, block_size, index, watermarks, n, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}
