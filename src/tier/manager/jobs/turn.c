// SPDX-License-Identifier: Apache-2.0
/*
 * Turns of blocking calls: a line in the order of their coming, of which the oldest tries most
 * often.
 *
 *   call ─► no host block ─► joins the line ─► waits ─► tries again ─┬─► got blocks: leaves the line
 *                                ▲                                   │
 *                                └─────────── none ──────────────────┘
 *
 * Invariant: a call in the line holds no pin and no block. `waits` says whether it is in the line.
 */
#include <errno.h>

#include "tier/manager/jobs/turn.h"
#include "tier/manager/state/manager.h"

/* interval of looking for room, which not every freed block signals */
#define LOOK_AGAIN_NS (20 * KV_NS_PER_MS)
/* between two tries of a call: each try is a change to other calls, and they would spin */
#define PAUSE_NS (KV_NS_PER_MS / 5)

static void leave_line(struct kvbm_manager *m, struct kvbm_turn *turn)
{
    TAILQ_REMOVE(&m->pins.turns, turn, next);
    turn->waits = false;
    turn->pause_ns = 0;
    pthread_cond_broadcast(&m->changed); /* the next one is the oldest now */
}

/* Time from the last try of a call to its next one. The oldest call tries soon, as a change between
 * its last try and its wait woke nobody. */
static uint64_t pause_of(const struct kvbm_manager *m, const struct kvbm_turn *turn, bool changed)
{
    if (turn->waits && TAILQ_FIRST(&m->pins.turns) != turn)
        return LOOK_AGAIN_NS;
    return changed ? PAUSE_NS : turn->pause_ns;
}

/* Wait in the line, or without a place in it. */
static int wait_for_change(struct kvbm_manager *m, struct kvbm_turn *turn, bool in_line,
                           uint64_t deadline_ns)
{
    uint64_t now = kv_now_ns(), until;
    bool changed = false, ends;

    kvbm_manager_enter(m);
    m->n_waiters++;
    if (in_line && !turn->waits)
        TAILQ_INSERT_TAIL(&m->pins.turns, turn, next);
    else if (!in_line && turn->waits)
        leave_line(m, turn);
    turn->waits = in_line;
    turn->pause_ns = KV_MIN(KV_MAX(2 * turn->pause_ns, PAUSE_NS), LOOK_AGAIN_NS);
    /* until is computed anew after each wake: the call may have become the oldest */
    while (!m->stopping &&
           (until = KV_MIN(deadline_ns, now + pause_of(m, turn, changed))) > kv_now_ns())
        changed |= kvbm_manager_wait_change(m, until) == 0;
    ends = m->stopping;
    if (ends && turn->waits)
        leave_line(m, turn);
    kvbm_waiter_leaves(m);
    return ends ? -ESHUTDOWN : 0;
}

int kvbm_turn_wait(struct kvbm_manager *m, struct kvbm_turn *turn, uint64_t deadline_ns)
{
    return wait_for_change(m, turn, true, deadline_ns);
}

int kvbm_turn_wait_aside(struct kvbm_manager *m, struct kvbm_turn *turn, uint64_t deadline_ns)
{
    return wait_for_change(m, turn, false, deadline_ns);
}

int kvbm_turn_give_way(struct kvbm_manager *m, struct kvbm_turn *turn, uint32_t group,
                       const void *key, uint64_t deadline_ns)
{
    const struct kvbm_turn *first;
    uint8_t tiers = 0;

    kvbm_manager_enter(m);
    first = TAILQ_FIRST(&m->pins.turns);
    /* a key that the host tier has needs no block: there is nothing to wait for */
    if (first && first != turn)
        kvbm_registry_locate(m->registry, group, key, 1, &tiers);
    kvbm_manager_leave(m);
    if (!first || first == turn || tiers >> KV_TIER_HOST & 1)
        return 0;
    return kvbm_turn_wait(m, turn, deadline_ns);
}

void kvbm_turn_end(struct kvbm_manager *m, struct kvbm_turn *turn)
{
    if (!turn->waits)
        return;
    kvbm_manager_enter(m);
    leave_line(m, turn);
    kvbm_manager_leave(m);
}
