// SPDX-License-Identifier: Apache-2.0
/*
 * Registrations shared with peers. Each registration, and each removal within the last hour, has a
 * version: the time in microseconds, or one more than the highest seen. The higher version wins,
 * whichever peer names it and in any order. Peers in rings and chains therefore end up with the
 * same set.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "indexer/registry/tables.h"

#define FUTURE_US (UINT64_C(86400) * 1000000) /* greatest believable lead of a peer's clock */

static uint64_t now_us(void)
{
    return kv_wall_ns() / 1000;
}

uint64_t ki_registry_next_version(struct ki_registry *r)
{
    r->last_version = KV_MAX(now_us(), r->last_version + 1);
    return r->last_version;
}

void ki_registry_changed(struct ki_registry *r)
{
    atomic_fetch_add_explicit(&r->revision, 1, memory_order_relaxed);
}

uint64_t ki_registry_revision(struct ki_registry *registry)
{
    return atomic_load_explicit(&registry->revision, memory_order_relaxed);
}

uint64_t ki_registry_id(struct ki_registry *registry)
{
    return registry->id;
}

/* -- removed ones ------------------------------------------------------------------------------ */

void ki_registry_note_removed(struct ki_registry *r, uint64_t instance, uint32_t rank,
                              uint64_t version, bool by_peer)
{
    struct ki_removed removed = {
        .instance = instance, .rank = rank, .version = version, .by_peer = by_peer};

    if (ki_removals_note(&r->removals, &removed))
        ki_registry_changed(r);
}

long ki_registry_removed(struct ki_registry *registry, struct ki_removed **ret)
{
    long n;

    pthread_mutex_lock(&registry->admin);
    n = ki_removals_list(&registry->removals, ret);
    pthread_mutex_unlock(&registry->admin);
    return n;
}

/* -- what a peer tells ------------------------------------------------------------------------- */

static bool is_of_its_model(const struct ki_listener *l, const struct ki_registration *reg)
{
    return l->model->block_size == reg->block_size &&
           ki_model_compare(l->model, reg->model, reg->tenant) == 0;
}

static bool is_same(const struct ki_listener *l, const struct ki_registration *reg)
{
    const char *replay = reg->replay_endpoint ? reg->replay_endpoint : "";

    return strcmp(l->endpoint, reg->endpoint) == 0 &&
           strcmp(l->replay_endpoint ? l->replay_endpoint : "", replay) == 0 &&
           l->told_blocks == reg->num_blocks && ki_habits_equal(&l->applier.habits, &reg->habits) &&
           is_of_its_model(l, reg);
}

static void set_version(struct ki_listener *l, uint64_t version, bool by_peer)
{
    pthread_mutex_lock(&l->lock);
    l->version = version;
    l->by_peer = by_peer;
    ki_listener_unlock(l);
}

bool ki_registry_is_peers(struct ki_registry *r, const struct ki_registration *reg)
{
    struct ki_listener *l = ki_listener_find(r, reg->instance, reg->rank);

    if (!l || !l->by_peer || !is_same(l, reg))
        return false;
    set_version(l, ki_registry_next_version(r), false);
    ki_registry_changed(r);
    return true;
}

static int check_news(const struct ki_registry *r, const struct ki_registration *reg,
                      struct kv_error *error)
{
    int rc = ki_registry_check(r, reg, error);

    if (rc == 0 && reg->version > now_us() + FUTURE_US)
        rc = kv_fail(error, -EAGAIN, 0, "its version is more than a day ahead of our clock");
    return rc;
}

/* Return true when @reg is newer than what is known of its rank, which @l follows (or NULL). */
static bool is_news(struct ki_registry *r, const struct ki_listener *l,
                    const struct ki_registration *reg)
{
    const struct ki_removed *removed = ki_removals_find(&r->removals, reg->instance, reg->rank);

    if ((removed && removed->version >= reg->version) || (l && l->version >= reg->version))
        return false;
    r->last_version = KV_MAX(r->last_version, reg->version);
    return true;
}

/* Give the same registration its version, or unregister one that @reg replaces. */
static void merge_known_locked(struct ki_registry *r, struct ki_listener *l,
                               const struct ki_registration *reg)
{
    struct kv_error error;

    if (is_same(l, reg)) {
        set_version(l, reg->version, l->by_peer);
        ki_registry_changed(r);
    } else {
        (void)ki_registry_unregister_locked(r, l->instance, l->model->name, l->model->tenant,
                                            &reg->rank, &error);
    }
}

void ki_registry_merge_known(struct ki_registry *registry,
                             const struct ki_registration *registration)
{
    struct ki_listener *l;
    struct kv_error error;

    if (check_news(registry, registration, &error) < 0)
        return;
    ki_registry_lock_for(registry, registration->instance);
    l = ki_listener_find(registry, registration->instance, registration->rank);
    /* One with other endpoints stays until ki_registry_merge replaces it: it may take a while. */
    if (l && (is_same(l, registration) || !is_of_its_model(l, registration)) &&
        is_news(registry, l, registration))
        merge_known_locked(registry, l, registration);
    pthread_mutex_unlock(&registry->admin);
}

static int merge_locked(struct ki_registry *r, const struct ki_registration *reg,
                        struct kv_error *error)
{
    struct ki_listener *l = ki_listener_find(r, reg->instance, reg->rank);

    if (l && ki_registry_note_name(r, reg->instance, reg->name, error) < 0)
        return error->code; /* also of a registration that is known: it may lack its name */
    if (!is_news(r, l, reg))
        return 0;
    if (l) {
        merge_known_locked(r, l, reg);
        if (ki_listener_find(r, reg->instance, reg->rank))
            return 0;
    }
    return ki_registry_register_locked(r, reg, error);
}

int ki_registry_merge(struct ki_registry *registry, const struct ki_registration *registration,
                      struct kv_error *error)
{
    int rc = check_news(registry, registration, error);

    if (rc < 0)
        return rc;
    ki_registry_lock_for(registry, registration->instance);
    rc = merge_locked(registry, registration, error);
    pthread_mutex_unlock(&registry->admin);
    return rc;
}

void ki_registry_merge_removed(struct ki_registry *registry, uint64_t instance, uint32_t rank,
                               uint64_t version)
{
    uint64_t now = now_us();
    struct kv_error error;
    struct ki_listener *l;

    if (version + KI_REMOVED_US <= now || version > now + FUTURE_US)
        return;
    ki_registry_lock_for(registry, instance);
    l = ki_listener_find(registry, instance, rank);
    if (!l || l->version < version) {
        registry->last_version = KV_MAX(registry->last_version, version);
        if (l)
            (void)ki_registry_unregister_locked(registry, instance, l->model->name,
                                                l->model->tenant, &rank, &error);
        ki_registry_note_removed(registry, instance, rank, version, true);
    }
    pthread_mutex_unlock(&registry->admin);
}

/* -- blocks that no stream keeps true ---------------------------------------------------------- */

uint64_t ki_registry_unfollowed(struct ki_registry *registry, const struct ki_model *model)
{
    const struct ki_position *p;
    uint64_t n = 0;

    pthread_mutex_lock(&registry->admin);
    if (registry->positions.buckets) {
        TAILQ_FOREACH(p, &registry->positions.with_blocks, age)
        n += kvi_holder_blocks(model->index, p->mark.holder) > 0;
    }
    pthread_mutex_unlock(&registry->admin);
    return n;
}

/* A stream may bring the rank by now: nothing tells its blocks from the others. */
static void forget_position(struct ki_registry *r, struct kv_holder holder)
{
    size_t at, end = ki_instance_range(r, holder.worker, &at);

    ki_positions_blocks_left(&r->positions, holder.worker, &holder.rank);
    for (size_t i = at; i < end; i++)
        ki_listener_expect_loss(r->listeners[i], &holder.rank, 1, 0);
    for (size_t i = r->n_models; i-- > 0;)
        if (kvi_remove_holder(r->models[i]->index, holder) == 0)
            ki_registry_drop_if_empty(r, r->models[i]);
    for (; at < end; at++)
        (void)ki_listener_learn_anew(r->listeners[at], &holder.rank, 1);
}

uint64_t ki_registry_forget_unfollowed(struct ki_registry *registry, uint64_t age_ns)
{
    uint64_t now_ns = kv_now_ns(), n = 0;
    struct ki_position *p;

    pthread_mutex_lock(&registry->admin);
    if (registry->positions.buckets) {
        while ((p = TAILQ_FIRST(&registry->positions.with_blocks))) {
            if (p->noted_ns + age_ns > now_ns)
                break; /* all others are younger */
            forget_position(registry, p->mark.holder);
            n++;
        }
    }
    if (n) /* only now: one replay brings all of a stream's ranks */
        ki_registry_wake(registry);
    pthread_mutex_unlock(&registry->admin);
    return n;
}
