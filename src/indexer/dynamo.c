// SPDX-License-Identifier: Apache-2.0
/*
 *     discovery ──► workers now ──┐
 *                                 ├─ differ ──► unregister, then register
 *     workers registered here ────┘
 *
 * Both lists are sorted by (worker, rank). A worker whose publisher is another one has restarted: its
 * registration is made anew, so no block of the old process stays. What clients register or unregister
 * is theirs: a follower touches no rank that it hasn't registered.
 */
#include "indexer/dynamo.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"
#include "indexer/configured.h"
#include "plane/discovery.h"

/* A worker's rank as it was registered. */
struct followed {
    struct kvp_dynamo_worker worker; /* its address is owned */
    bool registered;
};

struct ki_dynamo {
    struct ki_dynamo *next;
    const struct ki_options *of;
    struct ki_registry *registry;
    struct ki_habits habits;
    struct kvp_discovery *discovery;
    /* The discovery's thread only: */
    struct followed *items;
    size_t n;
    size_t unreachable;
};

static int compare(const struct kvp_dynamo_worker *a, const struct kvp_dynamo_worker *b)
{
    if (a->worker != b->worker)
        return a->worker < b->worker ? -1 : 1;
    return a->rank == b->rank ? 0 : a->rank < b->rank ? -1 : 1;
}

static bool is_same(const struct kvp_dynamo_worker *a, const struct kvp_dynamo_worker *b)
{
    return a->publisher == b->publisher && strcmp(a->address, b->address) == 0;
}

static void leave(struct ki_dynamo *d, const struct followed *old)
{
    struct kv_error why = {0};

    if (old->registered &&
        ki_registry_unregister(d->registry, old->worker.worker, d->of->model_name, d->of->tenant_id,
                               &old->worker.rank, &why) < 0)
        kv_log_warn("dynamo", "a worker that left was not unregistered", "reason=\"%s\"", why.text);
}

static bool join(struct ki_dynamo *d, const struct kvp_dynamo_worker *worker)
{
    const struct ki_registration registration = {
        .instance = worker->worker,
        .rank = worker->rank,
        .block_size = (uint32_t)d->of->block_size,
        .endpoint = worker->address,
        .has_publisher = true,
        .publisher = worker->publisher,
        .habits = d->habits,
        .model = d->of->model_name,
        .tenant = d->of->tenant_id,
    };
    struct kv_error why = {0};

    if (ki_registry_register(d->registry, &registration, &why) < 0) {
        kv_log_warn("dynamo", "a worker can't be followed",
                    "worker=%" PRIu64 " rank=%" PRIu32 " reason=\"%s\"", worker->worker,
                    worker->rank, why.text);
        return false;
    }
    if (d->of->hash_lookahead)
        ki_registry_note_forms(d->registry, d->of->model_name, d->of->tenant_id,
                               KI_FORM(d->of->hash_lookahead, false));
    return true;
}

/* Find the followed rank of @worker, or NULL. */
static struct followed *find(struct ki_dynamo *d, const struct kvp_dynamo_worker *worker)
{
    size_t low = 0, high = d->n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = compare(&d->items[mid].worker, worker);

        if (order == 0)
            return &d->items[mid];
        if (order < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}

static void items_free(struct followed *items, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free((char *)items[i].worker.address);
    free(items);
}

/* Copy the list of workers. Returns NULL when out of memory. */
static struct followed *copy(const struct kvp_dynamo_worker *workers, size_t n)
{
    struct followed *items = calloc(n + 1, sizeof(*items));
    size_t i = 0;

    for (; items && i < n; i++) {
        items[i].worker = workers[i];
        items[i].worker.address = strdup(workers[i].address);
        if (!items[i].worker.address)
            break;
    }
    if (!items || i == n)
        return items;
    items_free(items, i);
    return NULL;
}

static void note_unreachable(struct ki_dynamo *d, size_t n)
{
    if (n && !d->unreachable)
        kv_log_warn("dynamo", "publishers without a ZMQ channel are not followed", "publishers=%zu",
                    n);
    d->unreachable = n;
}

/* Unregister the ranks that left or changed, before others take their place. */
static void leave_others(struct ki_dynamo *d, const struct kvp_dynamo_worker *workers, size_t n)
{
    size_t k = 0;

    for (size_t i = 0; i < d->n; i++) {
        while (k < n && compare(&workers[k], &d->items[i].worker) < 0)
            k++;
        if (k < n && compare(&workers[k], &d->items[i].worker) == 0 &&
            is_same(&workers[k], &d->items[i].worker))
            continue;
        leave(d, &d->items[i]);
        d->items[i].registered = false;
    }
}

static void on_workers(void *arg, const struct kvp_dynamo_worker *workers, size_t n,
                       size_t unreachable)
{
    struct ki_dynamo *d = arg;
    struct followed *items = copy(workers, n);

    if (!items) {
        kv_log_error("dynamo", "out of memory: workers are not followed", NULL);
        return;
    }
    note_unreachable(d, unreachable);
    leave_others(d, workers, n);
    for (size_t i = 0; i < n; i++) {
        const struct followed *old = find(d, &workers[i]);

        items[i].registered = (old && old->registered) || join(d, &workers[i]);
    }
    items_free(d->items, d->n);
    d->items = items;
    d->n = n;
}

static int start_one(struct ki_dynamo *d, struct kv_error *error)
{
    const struct kvp_discovery_opts opts = {.where = d->of->dynamo, .tls_ca = d->of->cacert};
    struct kv_error why = {0};
    int rc = ki_configured_habits(d->of, &d->habits, error);

    if (rc < 0)
        return rc;
    rc = kvp_discovery_follow(&opts, on_workers, d, &d->discovery, &why);
    return rc < 0 ? kv_fail(error, rc, 0, "--dynamo: %.180s", *why.text ? why.text : strerror(-rc))
                  : 0;
}

int ki_dynamo_start(const struct ki_options *options, struct ki_registry *registry,
                    struct ki_dynamo **ret, struct kv_error *error)
{
    struct ki_dynamo *all = NULL;
    int rc = 0;

    for (const struct ki_options *o = options; o && rc == 0; o = o->next) {
        struct ki_dynamo *d = o->dynamo ? calloc(1, sizeof(*d)) : NULL;

        if (!o->dynamo)
            continue;
        if (!d) {
            rc = kv_fail(error, -ENOMEM, 0, "out of memory");
            break;
        }
        *d = (struct ki_dynamo){.next = all, .of = o, .registry = registry};
        all = d;
        rc = start_one(d, error);
    }
    if (rc < 0)
        ki_dynamo_stop(all);
    else
        *ret = all;
    return rc;
}

void ki_dynamo_stop(struct ki_dynamo *all)
{
    while (all) {
        struct ki_dynamo *d = all;

        all = d->next;
        kvp_discovery_close(d->discovery);
        items_free(d->items, d->n);
        free(d);
    }
}
