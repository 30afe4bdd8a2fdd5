// SPDX-License-Identifier: Apache-2.0
/*
 * Unregistering. A worker's blocks leave the index without the admin lock; the next change of the
 * same instance waits.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"
#include "indexer/registry/tables.h"

#define LOG_LINES 20 /* log lines a second about registrations */

bool ki_registry_is_leaving_locked(const struct ki_registry *r, uint64_t instance)
{
    const struct ki_leaving *leaving = r->leaving;

    while (leaving && leaving->instance != instance)
        leaving = leaving->next;
    return leaving != NULL;
}

/* Changes of one instance run one after the other. */
void ki_registry_lock_for(struct ki_registry *r, uint64_t instance)
{
    pthread_mutex_lock(&r->admin);
    while (ki_registry_is_leaving_locked(r, instance))
        pthread_cond_wait(&r->left, &r->admin);
}

/* Mark @instance as leaving, and release the lock: changes of other instances may run meanwhile. */
static void begin_leaving(struct ki_registry *r, struct ki_leaving *leaving, uint64_t instance)
{
    leaving->instance = instance;
    leaving->next = r->leaving;
    r->leaving = leaving;
    pthread_mutex_unlock(&r->admin);
}

static void end_leaving(struct ki_registry *r, const struct ki_leaving *leaving)
{
    struct ki_leaving **link = &r->leaving;

    pthread_mutex_lock(&r->admin);
    while (*link != leaving)
        link = &(*link)->next;
    *link = leaving->next;
    pthread_cond_broadcast(&r->left);
}

bool ki_registry_is_leaving(struct ki_registry *registry, uint64_t instance)
{
    bool leaving;

    pthread_mutex_lock(&registry->admin);
    leaving = ki_registry_is_leaving_locked(registry, instance);
    pthread_mutex_unlock(&registry->admin);
    return leaving;
}

/*
 * Acquire the listener of an instance behind @l, which is released; NULL @l: the first one. NULL:
 * there is no other.
 */
static struct ki_listener *next_of(struct ki_registry *r, uint64_t instance, struct ki_listener *l)
{
    struct ki_listener *next = NULL;
    size_t at, end;

    pthread_mutex_lock(&r->lock);
    end = ki_instance_range(r, instance, &at);
    while (l && at < end && r->listeners[at]->rank <= l->rank)
        at++;
    if (at < end)
        next = ki_listener_acquire(r->listeners[at]);
    pthread_mutex_unlock(&r->lock);
    ki_listener_release(l);
    return next;
}

/*
 * Remove the blocks of all ranks that a retired listener brought. Nothing tells them from those
 * that another stream of the instance brought for such a rank: it brings them again.
 */
static void remove_brought(struct ki_registry *r, const struct ki_listener *gone)
{
    const uint32_t *ranks = gone->applier.ranks, n = gone->applier.n_ranks;
    struct ki_listener *sibling = NULL;

    /* First: no answer is short without being partial. */
    while ((sibling = next_of(r, gone->instance, sibling)))
        ki_listener_expect_loss(sibling, ranks, n, 0);
    for (uint32_t i = 0; i < n; i++) {
        struct kv_holder holder = {.worker = gone->instance, .rank = ranks[i]};

        kvi_remove_holder(gone->model->index, holder);
    }
    /* Afterwards: a stream that brings such a rank only now is among them. */
    while ((sibling = next_of(r, gone->instance, sibling)))
        if (ki_listener_learn_anew(sibling, ranks, n))
            ki_pump_wake(sibling->pump);
}

/*
 * A purge or a clear has removed the blocks of ranks, and with them those of siblings that bring such
 * a rank, which stay partial: to learn theirs anew they would have to forget the stream's, and so for
 * ever. A sibling at the same endpoint gets the same events, clears and restarts among them. Behind a
 * stream that has lost its publisher nothing is left to forget: siblings learn theirs anew at once.
 */
void ki_registry_note_loss(void *arg, const struct ki_listener *l, const struct ki_loss *loss)
{
    bool one = loss->of == KI_RANKS_ONE;
    const uint32_t *ranks = one ? &loss->rank : l->applier.ranks;
    struct ki_registry *r = arg;
    struct ki_listener *sibling = NULL;

    while ((sibling = next_of(r, l->instance, sibling)))
        if (sibling != l && (loss->own || strcmp(sibling->endpoint, l->endpoint) != 0))
            ki_listener_expect_loss(sibling, ranks, one ? 1 : l->applier.n_ranks, loss->blocks);
    while (loss->absent && (sibling = next_of(r, l->instance, sibling)))
        if (sibling != l && ki_listener_learn_anew(sibling, ranks, l->applier.n_ranks))
            ki_pump_wake(sibling->pump);
}

/* Retire one of several listeners of an instance. The others stay while its blocks leave. */
static void retire_one(struct ki_registry *r, size_t at)
{
    struct ki_listener *l = ki_tables_take_listener(r, at);
    struct ki_leaving leaving;

    ki_pump_wake(l->pump);
    begin_leaving(r, &leaving, l->instance);
    remove_brought(r, l);
    end_leaving(r, &leaving);
    ki_listener_release(l);
}

/* Retire all listeners of an instance, [first, end). */
static void retire_all(struct ki_registry *r, size_t first, size_t end, struct ki_model *model)
{
    uint64_t instance = r->listeners[first]->instance;
    struct ki_leaving leaving;

    for (size_t n = end - first; n; n--) {
        struct ki_listener *l = ki_tables_take_listener(r, first);

        ki_pump_wake(l->pump);
        ki_listener_release(l);
    }
    begin_leaving(r, &leaving, instance);
    kvi_remove_worker(model->index, instance);
    end_leaving(r, &leaving);
    ki_positions_blocks_left(&r->positions, instance, NULL);
}

/* Retire listeners [first, end) of one instance: all of them or one of several. */
static void retire_range(struct ki_registry *r, size_t first, size_t end, bool whole)
{
    struct ki_model *model = ki_model_acquire(r->listeners[first]->model);
    struct ki_mark position;

    for (size_t i = first; i < end; i++)
        if (ki_listener_retire(r->listeners[i], &position))
            ki_positions_note(&r->positions, &position, false);
    if (whole)
        retire_all(r, first, end, model);
    else
        retire_one(r, first);
    ki_registry_drop_if_empty(r, model);
    ki_model_release(model);
}

/* Remove the blocks of an instance, or of its one rank, from a model. Returns 0 or -ENOENT. */
static int remove_blocks(struct ki_registry *r, struct ki_model *model, uint64_t instance,
                         const uint32_t *rank)
{
    struct kv_holder holder = {.worker = instance, .rank = rank ? *rank : 0};
    struct ki_leaving leaving;
    int rc;

    begin_leaving(r, &leaving, instance);
    rc = rank ? kvi_remove_holder(model->index, holder) : kvi_remove_worker(model->index, instance);
    end_leaving(r, &leaving);
    if (rc < 0)
        return rc;
    ki_positions_blocks_left(&r->positions, instance, rank);
    ki_registry_drop_if_empty(r, model);
    return 0;
}

/* Remove the blocks of an instance without a listener, which came with a peer's dump. */
static int remove_dumped(struct ki_registry *r, uint64_t instance, const char *name,
                         const char *tenant, const uint32_t *rank)
{
    struct ki_model **models;
    long n = ki_registry_models(r, &models);
    int found = -ENOENT;

    for (long i = 0; i < n; i++) {
        if (strcmp(models[i]->name, name) == 0 &&
            (!tenant || strcmp(models[i]->tenant, tenant) == 0) &&
            remove_blocks(r, models[i], instance, rank) == 0)
            found = 0;
        ki_model_release(models[i]);
    }
    if (n >= 0)
        free(models);
    return n < 0 ? (int)n : found;
}

int ki_registry_unregister_locked(struct ki_registry *r, uint64_t instance, const char *name,
                                  const char *tenant, const uint32_t *rank, struct kv_error *error)
{
    size_t first, end = ki_instance_range(r, instance, &first);
    char text[KI_INSTANCE_TEXT];
    const struct ki_model *owner;
    bool whole;

    if (first == end) {
        int rc = remove_dumped(r, instance, name, tenant, rank);

        return rc == -ENOENT ? kv_fail(error, rc, 0, "instance %.60s not found",
                                       ki_registry_instance_text(r, instance, text))
               : rc < 0      ? kv_fail(error, rc, 0, "%s", strerror(-rc))
                             : 0;
    }
    owner = r->listeners[first]->model;
    if (strcmp(owner->name, name) != 0 || (tenant && strcmp(owner->tenant, tenant) != 0))
        return kv_fail(error, -ENOENT, 0,
                       "instance %.60s is registered for model=%.60s tenant=%.60s",
                       ki_registry_instance_text(r, instance, text), owner->name, owner->tenant);
    whole = !rank || end - first == 1;
    if (rank) {
        if (!ki_listener_find(r, instance, *rank))
            return kv_fail(error, -ENOENT, 0, "instance %.60s dp_rank %" PRIu32 " not found",
                           ki_registry_instance_text(r, instance, text), *rank);
        first = ki_listener_bound(r, instance, *rank);
        end = first + 1;
    }
    retire_range(r, first, end, whole);
    return 0;
}

/*
 * List the registered ranks of an instance, or @rank if it is one. Out of memory: none, and peers
 * aren't told.
 */
static size_t ranks_of(const struct ki_registry *r, uint64_t instance, const uint32_t *rank,
                       uint32_t **ret)
{
    size_t first, end = ki_instance_range(r, instance, &first), n = 0;

    *ret = malloc((end - first + 1) * sizeof(**ret));
    for (; *ret && first < end; first++)
        if (!rank || r->listeners[first]->rank == *rank)
            (*ret)[n++] = r->listeners[first]->rank;
    return n;
}

int ki_registry_unregister(struct ki_registry *registry, uint64_t instance, const char *model,
                           const char *tenant, const uint32_t *rank, struct kv_error *error)
{
    static struct kv_log_rate rate;
    char text[KI_INSTANCE_TEXT], worker[KV_INSTANCE_QUOTED];
    uint32_t *ranks = NULL;
    uint64_t version;
    size_t n;
    int rc;

    ki_registry_lock_for(registry, instance);
    n = ranks_of(registry, instance, rank, &ranks);
    rc = ki_registry_unregister_locked(registry, instance, model, tenant, rank, error);
    version = ki_registry_next_version(registry);
    for (size_t i = 0; rc == 0 && i < n; i++)
        ki_registry_note_removed(registry, instance, ranks[i], version, false);
    if (rc == -ENOENT && n == 0 && ki_removals_take_by_peer(&registry->removals, instance, rank))
        rc = 0; /* a peer has removed it before */
    free(ranks);
    if (rc == 0 && kv_log_allowed(&rate, LOG_LINES))
        kv_log_info("indexer", "worker unregistered", "worker=%s ranks=%zu",
                    kv_log_quote(worker, sizeof(worker),
                                 ki_registry_instance_text(registry, instance, text)),
                    n);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}
