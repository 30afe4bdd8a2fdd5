// SPDX-License-Identifier: Apache-2.0
/* Views of the registry: models, workers; and the two test hooks. */
#include <stdlib.h>

#include "indexer/registry/tables.h"

struct ki_model *ki_registry_model(struct ki_registry *registry, const char *name,
                                   const char *tenant)
{
    struct ki_model *model;

    pthread_mutex_lock(&registry->lock);
    model = ki_model_find(registry, name, tenant);
    if (model)
        ki_model_acquire(model);
    pthread_mutex_unlock(&registry->lock);
    return model;
}

void ki_registry_note_forms(struct ki_registry *registry, const char *name, const char *tenant,
                            uint64_t forms)
{
    struct ki_model *model = ki_registry_model(registry, name, tenant);

    if (model)
        ki_model_note_forms(model, forms);
    ki_model_release(model);
}

long ki_registry_models(struct ki_registry *registry, struct ki_model ***ret)
{
    struct ki_model **models;
    size_t n;

    pthread_mutex_lock(&registry->lock);
    n = registry->n_models;
    models = calloc(n + 1, sizeof(struct ki_model *));
    for (size_t i = 0; models && i < n; i++)
        models[i] = ki_model_acquire(registry->models[i]);
    pthread_mutex_unlock(&registry->lock);
    if (!models)
        return -ENOMEM;
    *ret = models;
    return (long)n;
}

struct ki_listener *ki_registry_listener(struct ki_registry *registry, uint64_t instance,
                                         uint32_t rank)
{
    struct ki_listener *l;

    pthread_mutex_lock(&registry->lock);
    l = ki_listener_find(registry, instance, rank);
    if (l)
        ki_listener_acquire(l);
    pthread_mutex_unlock(&registry->lock);
    return l;
}

const char *ki_listener_status_name(enum ki_listener_status status)
{
    static const char *const names[] = {"pending", "active",    "replaying",   "paused",
                                        "failed",  "withdrawn", "unregistered"};

    return (size_t)status < KV_COUNT(names) ? names[status] : "unknown";
}

long ki_registry_workers(struct ki_registry *registry, struct ki_worker_info **ret)
{
    struct ki_listener **listeners;
    struct ki_worker_info *infos;
    long n = ki_tables_snapshot(registry, &listeners);
    bool complete = true;

    if (n < 0)
        return n;
    infos = calloc((size_t)n + 1, sizeof(*infos));
    for (long i = 0; infos && i < n; i++) {
        ki_listener_info(listeners[i], &infos[i]);
        complete &= infos[i].endpoint && infos[i].model && infos[i].tenant;
    }
    if (infos)
        complete &= ki_registry_name_infos(registry, infos, n);
    ki_tables_snapshot_free(listeners, n);
    if (!infos || !complete) {
        if (infos)
            ki_worker_infos_free(infos, n);
        return -ENOMEM;
    }
    *ret = infos;
    return n;
}

void ki_worker_infos_free(struct ki_worker_info *infos, long n)
{
    for (long i = 0; i < n; i++) {
        free(infos[i].name);
        free(infos[i].endpoint);
        free(infos[i].replay_endpoint);
        free(infos[i].model);
        free(infos[i].tenant);
        free(infos[i].last_error);
        free(infos[i].groups);
    }
    free(infos);
}

static int by_holder(const void *a, const void *b)
{
    return ki_holder_compare(&((const struct ki_view *)a)->holder,
                             &((const struct ki_view *)b)->holder);
}

static void add_unfollowed(struct ki_registry *r, const struct ki_model *model, struct kv_buf *ret)
{
    const struct ki_position *p;

    pthread_mutex_lock(&r->admin);
    for (p = TAILQ_FIRST(&r->positions.with_blocks); p; p = TAILQ_NEXT(p, age)) {
        struct ki_view view = {p->mark.holder, KI_UNREGISTERED, KI_BECAUSE(UNFOLLOWED)};

        if (kvi_holder_blocks(model->index, view.holder))
            kv_buf_append(ret, &view, sizeof(view));
    }
    pthread_mutex_unlock(&r->admin);
    if (ret->len)
        qsort(ret->data, ret->len / sizeof(struct ki_view), sizeof(struct ki_view), by_holder);
}

void ki_registry_views(struct ki_registry *registry, const struct ki_model *model,
                       struct kv_buf *ret)
{
    bool odd = atomic_load_explicit(&model->n_odd, memory_order_acquire);

    if (odd) {
        pthread_mutex_lock(&registry->lock);
        for (size_t i = 0; i < registry->n_listeners; i++) {
            const struct ki_listener *l = registry->listeners[i];
            struct ki_view view = {.holder = {l->instance, l->rank}};

            if (l->model == model && ki_listener_view(l, &view.status, &view.reasons))
                kv_buf_append(ret, &view, sizeof(view));
        }
        pthread_mutex_unlock(&registry->lock);
    }
    if (atomic_load_explicit(&registry->positions.n_with_blocks, memory_order_acquire))
        add_unfollowed(registry, model, ret);
}

int ki_registry_withdraw(struct ki_registry *registry, uint64_t instance, uint32_t rank,
                         bool withdrawn)
{
    struct ki_listener *l = ki_registry_listener(registry, instance, rank);

    if (!l)
        return -ENOENT;
    ki_listener_set_withdrawn(l, withdrawn);
    ki_listener_release(l);
    return 0;
}

static int set_paused(struct ki_registry *r, uint64_t instance, const uint32_t *rank, bool paused)
{
    struct ki_listener **listeners;
    long n = ki_tables_snapshot(r, &listeners);
    int rc = -ENOENT;

    if (n < 0)
        return (int)n;
    for (long i = 0; i < n; i++) {
        int one;

        if (listeners[i]->instance != instance || (rank && listeners[i]->rank != *rank))
            continue;
        one = ki_listener_set_paused(listeners[i], paused);
        if (rc != 0)
            rc = one;
    }
    ki_tables_snapshot_free(listeners, n);
    ki_registry_wake(r);
    return rc;
}

int ki_registry_pause(struct ki_registry *registry, uint64_t instance, const uint32_t *rank)
{
    return set_paused(registry, instance, rank, true);
}

int ki_registry_resume(struct ki_registry *registry, uint64_t instance, const uint32_t *rank)
{
    return set_paused(registry, instance, rank, false);
}

int ki_holder_compare(const struct kv_holder *x, const struct kv_holder *y)
{
    if (x->worker != y->worker)
        return x->worker < y->worker ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

int ki_marks_compare(const void *a, const void *b)
{
    return ki_holder_compare(&((const struct ki_mark *)a)->holder,
                             &((const struct ki_mark *)b)->holder);
}
