// SPDX-License-Identifier: Apache-2.0
#include "indexer/registry/tables.h"

#include <stdlib.h>
#include <string.h>

/*
 * Grow an array of pointers to hold one more than @n. NULL: out of memory, and the array is
 * unchanged.
 */
static void *grow(void *items, size_t n, size_t *capacity)
{
    size_t more = *capacity ? *capacity * 2 : 16;
    void *grown;

    if (n < *capacity)
        return items;
    grown = realloc(items, more * sizeof(void *));
    if (grown)
        *capacity = more;
    return grown;
}

size_t ki_model_bound(const struct ki_registry *r, const char *name, const char *tenant)
{
    size_t lo = 0, hi = r->n_models;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (ki_model_compare(r->models[mid], name, tenant) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct ki_model *ki_model_find(const struct ki_registry *r, const char *name, const char *tenant)
{
    size_t at = ki_model_bound(r, name, tenant);

    if (at < r->n_models && ki_model_compare(r->models[at], name, tenant) == 0)
        return r->models[at];
    return NULL;
}

size_t ki_listener_bound(const struct ki_registry *r, uint64_t instance, uint32_t rank)
{
    size_t lo = 0, hi = r->n_listeners;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct ki_listener *l = r->listeners[mid];

        if (l->instance < instance || (l->instance == instance && l->rank < rank))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

size_t ki_instance_range(const struct ki_registry *r, uint64_t instance, size_t *ret_first)
{
    size_t at = ki_listener_bound(r, instance, 0);

    *ret_first = at;
    while (at < r->n_listeners && r->listeners[at]->instance == instance)
        at++;
    return at;
}

struct ki_listener *ki_listener_find(const struct ki_registry *r, uint64_t instance, uint32_t rank)
{
    size_t at = ki_listener_bound(r, instance, rank);

    if (at < r->n_listeners && r->listeners[at]->instance == instance &&
        r->listeners[at]->rank == rank)
        return r->listeners[at];
    return NULL;
}

/* Reserve room. The caller holds `lock`: readers use the arrays that realloc moves. */
int ki_tables_reserve(struct ki_registry *r)
{
    void *models, *listeners = NULL;

    pthread_mutex_lock(&r->lock);
    models = grow(r->models, r->n_models, &r->models_capacity);
    if (models) {
        r->models = models;
        listeners = grow(r->listeners, r->n_listeners, &r->listeners_capacity);
        if (listeners)
            r->listeners = listeners;
    }
    pthread_mutex_unlock(&r->lock);
    return listeners ? 0 : -ENOMEM;
}

/* Make room at @at of a reserved array of @n pointers. */
static void open_slot(void *items, size_t at, size_t n)
{
    char *p = items;

    memmove(p + (at + 1) * sizeof(void *), p + at * sizeof(void *), (n - at) * sizeof(void *));
}

static void close_slot(void *items, size_t at, size_t n)
{
    char *p = items;

    memmove(p + at * sizeof(void *), p + (at + 1) * sizeof(void *), (n - at - 1) * sizeof(void *));
}

void ki_tables_put_model(struct ki_registry *r, struct ki_model *model)
{
    size_t at = ki_model_bound(r, model->name, model->tenant);

    pthread_mutex_lock(&r->lock);
    open_slot(r->models, at, r->n_models++);
    r->models[at] = model;
    pthread_mutex_unlock(&r->lock);
}

void ki_tables_replace_model(struct ki_registry *r, struct ki_model *model)
{
    size_t at = ki_model_bound(r, model->name, model->tenant);

    pthread_mutex_lock(&r->lock);
    r->models[at] = model;
    pthread_mutex_unlock(&r->lock);
}

void ki_tables_take_model(struct ki_registry *r, const struct ki_model *model)
{
    size_t at = ki_model_bound(r, model->name, model->tenant);

    pthread_mutex_lock(&r->lock);
    close_slot(r->models, at, r->n_models--);
    pthread_mutex_unlock(&r->lock);
}

void ki_tables_put_listener(struct ki_registry *r, struct ki_listener *l)
{
    size_t at = ki_listener_bound(r, l->instance, l->rank);

    pthread_mutex_lock(&r->lock);
    open_slot(r->listeners, at, r->n_listeners++);
    r->listeners[at] = l;
    pthread_mutex_unlock(&r->lock);
}

struct ki_listener *ki_tables_take_listener(struct ki_registry *r, size_t at)
{
    struct ki_listener *l = r->listeners[at];

    pthread_mutex_lock(&r->lock);
    close_slot(r->listeners, at, r->n_listeners--);
    pthread_mutex_unlock(&r->lock);
    return l;
}

long ki_tables_snapshot(struct ki_registry *r, struct ki_listener ***ret)
{
    struct ki_listener **listeners;
    size_t n;

    pthread_mutex_lock(&r->lock);
    n = r->n_listeners;
    listeners = calloc(n + 1, sizeof(struct ki_listener *));
    for (size_t i = 0; listeners && i < n; i++)
        listeners[i] = ki_listener_acquire(r->listeners[i]);
    pthread_mutex_unlock(&r->lock);
    if (!listeners)
        return -ENOMEM;
    *ret = listeners;
    return (long)n;
}

void ki_tables_snapshot_free(struct ki_listener **listeners, long n)
{
    for (long i = 0; i < n; i++)
        ki_listener_release(listeners[i]);
    free(listeners);
}

void ki_registry_wake(struct ki_registry *r)
{
    for (uint32_t i = 0; i < r->n_pumps; i++)
        ki_pump_wake(r->pumps[i]);
}
