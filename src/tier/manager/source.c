// SPDX-License-Identifier: Apache-2.0
/*
 * Source of a manager for block sets: peers lease blocks of the host tier, and of the tiers below
 * it, which are fetched first. A hold is a pin.
 *
 *   hold ──► prepare_load ──► all READY: held at once
 *                        └──► some PENDING: waiting[] ──► thread: held when none is any more
 *
 * A hold asks no peer and waits for no fetch from one, not even for another pin's: two managers
 * that lease from each other would wait in a circle. Keys that peers are asked for aren't there
 * yet.
 *
 * The thread runs from the first hold that has to wait until the manager's end. A set is destroyed
 * before its manager, and waits for its holds: none is left then.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/core/log.h"
#include "base/thread/thread.h"
#include "kvbm_lease.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

#define FETCH_NS (5 * KV_NS_PER_S) /* after which a block that isn't there yet is left out */

struct kvbm_waiting {
    struct kvbm_waiting *next;
    struct kvbm_manager *m;
    struct kvbm_pin *pin;
    uint64_t deadline_ns;
    size_t n;
    kvbm_held_fn held;
    void *to;
};

/* ---- lookups ---- */

static uint8_t tier_of(uint8_t where)
{
    switch (where) {
    case KVBM_READY:
        return KV_TIER_HOST;
    case KVBM_ON_DISK:
        return KV_TIER_DISK;
    case KVBM_REMOTE:
        return KV_TIER_EXTERNAL;
    default: /* not there, or not known yet: a reader may ask again */
        return KVBM_NO_TIER;
    }
}

static struct kvbm_chain chain_of(uint32_t group, const void *keys)
{
    return (struct kvbm_chain){
        .size = sizeof(struct kvbm_chain), .group = group, .keys = keys, .scattered = true};
}

static void lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    const struct kvbm_chain chain = chain_of(group, keys);

    if (kvbm_lookup_own(arg, &chain, n, tiers) < 0) {
        memset(tiers, KVBM_NO_TIER, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        tiers[i] = tier_of(tiers[i]);
}

/* ---- holds ---- */

/* Hand a pin with what it has now to the set. Frees @w. */
static void finish(struct kvbm_waiting *w)
{
    uint32_t *blocks = malloc(w->n * sizeof(*blocks));

    if (blocks && kvbm_pin_blocks(w->pin, blocks) >= 0) {
        w->held(w->to, 0, blocks, w->pin);
    } else {
        kvbm_pin_release(w->pin);
        w->held(w->to, -ENOMEM, NULL, NULL);
    }
    free(blocks);
    free(w);
}

/* Return true when nothing is on its way for the hold any more, or its time is over. */
static bool is_settled(const struct kvbm_waiting *w)
{
    return (!w->pin->n_fetched && !w->pin->n_waits) || kv_now_ns() >= w->deadline_ns;
}

/* Take the holds that wait no longer, with the manager entered. *@next becomes the
 * next deadline. */
static struct kvbm_waiting *take_settled(struct kvbm_manager *m, uint64_t *next)
{
    struct kvbm_waiting **at = &m->lending.waiting, *settled = NULL;

    *next = UINT64_MAX;
    while (*at) {
        struct kvbm_waiting *w = *at;

        if (!is_settled(w)) {
            *next = KV_MIN(*next, w->deadline_ns);
            at = &w->next;
            continue;
        }
        *at = w->next;
        w->next = settled;
        settled = w;
    }
    return settled;
}

/* The thread. It finishes holds without the lock, which reading and releasing their pins takes. It
 * ends only when no hold waits: each has a set that waits for it. */
static void *finish_holds(void *arg)
{
    struct kvbm_manager *m = arg;

    kvbm_manager_enter(m);
    while (!m->lending.stopping || m->lending.waiting) {
        uint64_t next;
        struct kvbm_waiting *settled = take_settled(m, &next), *w;

        if (!settled && next == UINT64_MAX)
            pthread_cond_wait(&m->changed, &m->lock);
        else if (!settled)
            (void)kv_cond_wait_until(&m->changed, &m->lock, next);
        if (!settled)
            continue;
        kvbm_manager_leave(m);
        while ((w = settled) != NULL) {
            settled = w->next;
            finish(w);
        }
        kvbm_manager_enter(m);
    }
    kvbm_manager_leave(m);
    return NULL;
}

/* Leave a hold to the thread. Returns 0, or a negative errno without a thread. */
static int wait_for(struct kvbm_waiting *w)
{
    struct kvbm_manager *m = w->m;
    int rc = 0;

    kvbm_manager_enter(m);
    if (!m->lending.started)
        rc = kv_thread_start(&m->lending.thread, "kvbm-lend", finish_holds, m);
    if (rc == 0) {
        m->lending.started = true;
        w->next = m->lending.waiting;
        m->lending.waiting = w;
        pthread_cond_broadcast(&m->changed);
    }
    kvbm_manager_leave(m);
    return rc;
}

static void hold(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held, void *to)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = kv_now_ns() + FETCH_NS};
    const struct kvbm_chain chain = chain_of(group, keys);
    struct kvbm_waiting *w = calloc(1, sizeof(*w));
    struct kvbm_manager *m = arg;
    long rc = w ? kvbm_pin_lend(m, &chain, n, &opts, &w->pin) : -ENOMEM;
    bool settled;

    if (rc < 0) {
        free(w);
        held(to, (int)rc, NULL, NULL);
        return;
    }
    w->m = m;
    w->deadline_ns = opts.deadline_ns;
    w->n = n;
    w->held = held;
    w->to = to;
    kvbm_manager_enter(m);
    settled = is_settled(w);
    kvbm_manager_leave(m);
    if (settled || wait_for(w) < 0)
        finish(w); /* without a thread: what is there at once */
}

static void unhold(void *arg, void *pin)
{
    (void)arg;
    kvbm_pin_release(pin);
}

struct kvbm_block_source kvbm_manager_source(struct kvbm_manager *manager)
{
    return (struct kvbm_block_source){.size = sizeof(struct kvbm_block_source),
                                      .arg = manager,
                                      .lookup = lookup,
                                      .hold = hold,
                                      .unhold = unhold,
                                      .registry = kvbm_manager_registry(manager)};
}

void kvbm_lending_stop(struct kvbm_manager *m)
{
    if (!m->lending.started)
        return;
    kvbm_manager_enter(m);
    m->lending.stopping = true;
    pthread_cond_broadcast(&m->changed);
    kvbm_manager_leave(m);
    pthread_join(m->lending.thread, NULL);
}
