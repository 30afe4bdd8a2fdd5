// SPDX-License-Identifier: Apache-2.0
/*
 * Moves begin here: a batch of blocks goes to the disk or to the object store.
 *
 *   queue ─► hold (evicted ones are dropped) ─► target blocks ─► bounce blocks ─► move_io.c
 *
 * A target block is allocated before the bytes go, and may evict the oldest block of its tier. The
 * object pool's blocks have no bytes: they remember keys. Bounce blocks are host blocks through
 * which write-back reads blocks of the disk.
 *
 * Invariant: after kvbm_move_some each popped entry is in a running move, in the queue again, or
 * ended.
 */
#include <errno.h>
#include <stdlib.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* True when the policy takes a block. For blocks about to be evicted, other tiers' policies decided
 * when the blocks entered; only the object store's decides now. */
static bool may_leave(struct kvbm_manager *m, const struct kvbm_move *move,
                      const struct kvbm_block_info *info)
{
    return !move->leaving ||
           kvbm_policy_passes(m, KV_TIER_EXTERNAL, kvbm_key_hash(m, info->group, info->key),
                              info->priority);
}

/* Describe a staged block, which the registry doesn't know. */
static void tell_staged(struct kvbm_manager *m, const struct kvbm_down *down,
                        struct kvbm_block_info *info)
{
    const struct kvbm_pin *pin = down->pin;

    *info = (struct kvbm_block_info){.block = pin->items[down->index].host.block,
                                     .group = pin->group,
                                     .position = kvbm_pin_position(pin, down->index)};
    info->has_parent = kvbm_pin_parent(pin, down->index) != NULL;
    memcpy(info->key, kvbm_pin_key(pin, down->index), m->key_len);
    if (info->has_parent)
        memcpy(info->parent, kvbm_pin_key(pin, down->index) - m->key_len, m->key_len);
    kvbm_registry_locate(m->registry, info->group, info->key, 1, &info->tiers);
}

/* Prepare block @k of a move: hold it and describe it. False: it is evicted, or its tier has it. */
static bool moves(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    struct kvbm_block_info *info = &move->info[k];
    struct kvbm_immutable *like = &move->like[k];
    bool there;

    if (move->from[k].pin) {
        tell_staged(m, &move->from[k], info);
    } else if (!like->handle.pool) {
        kvbm_stats_of(m, move->to)->dropped++;
        kvbm_down_ended(m, &move->from[k], false);
        return false;
    }
    /* it may have reached the tier by another way since it was queued */
    there = info->tiers >> move->to & 1;
    if (!there && may_leave(m, move, info))
        return true;
    kvbm_move_release(move, like, false);
    kvbm_down_ended(m, &move->from[k], there);
    return false;
}

void kvbm_quarantine(struct kvbm_manager *m, struct kvbm_mutable block)
{
    /* held until the manager's end: a late write can't harm a slot that nobody gets */
    struct kvbm_mutable *more = realloc(m->offload.quarantine, (m->offload.n_quarantine + 1) *
                                                                   sizeof(*m->offload.quarantine));

    if (!more) { /* write-back lists the block again */
        kvbm_mutable_release(&block);
        return;
    }
    m->offload.quarantine = more;
    m->offload.quarantine[m->offload.n_quarantine++] = block;
}

/* Allocate up to @n blocks of the target tier, on volumes in use. */
static uint32_t take_usable(struct kvbm_manager *m, enum kv_tier to, struct kvbm_mutable *ret,
                            uint32_t n)
{
    uint32_t usable = 0, got;

    while (usable < n &&
           (got = kvbm_take_blocks(kvbm_target_of(m, to), ret + usable, n - usable)) > 0) {
        for (uint32_t k = usable, end = usable + got; k < end; k++) {
            if (to != KV_TIER_DISK || kvbm_disk_usable(m->disk_store, ret[k].handle.block))
                ret[usable++] = ret[k];
            else
                kvbm_quarantine(m, ret[k]);
        }
    }
    return usable;
}

/* Leave block @k out of a move: there is no target for it. */
static void give_up(struct kvbm_move *move, uint32_t k)
{
    kvbm_move_release(move, &move->like[k], true);
    kvbm_down_ended(move->manager, &move->from[k], false);
}

/* Keep block @k of a move: put it at *@n and count *@n up. The caller drops the others. */
void kvbm_move_keep(struct kvbm_move *move, uint32_t k, uint32_t *n)
{
    move->from[*n] = move->from[k];
    move->like[*n] = move->like[k];
    move->info[*n] = move->info[k];
    move->target[*n] = move->target[k];
    move->bounce[*n] = move->bounce[k];
    ++*n;
}

/* Allocate targets. Blocks without one are dropped: the tier has no block that it may evict. */
static void take_targets(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t got = take_usable(m, move->to, move->target, move->n);

    for (uint32_t k = got; k < move->n; k++) {
        kvbm_stats_of(m, move->to)->dropped++;
        give_up(move, k);
    }
    move->n = got;
}

/* Allocate host blocks for blocks of the disk. Blocks without one return to the queue. */
static void take_bounces(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t got = kvbm_take_blocks(m->host, move->bounce, move->n);

    kvbm_queue_stall(m, &m->offload.queues[move->to], got < move->n);
    for (uint32_t k = got; k < move->n; k++) {
        kvbm_mutable_release(&move->target[k]);
        kvbm_move_release(move, &move->like[k], false);
        kvbm_queue_push(m, move->to, move->from[k]);
    }
    move->n = got;
}

/* True when block @k may join the move: blocks about to be evicted must be of one tier. */
static bool fits(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k,
                 const struct kvbm_down *down)
{
    bool from_disk = move->leaving && down->weak.handle.pool == m->disk;

    if (k == 0)
        move->from_disk = move->reading = from_disk;
    return move->from_disk == from_disk;
}

/* Hold the first blocks of the queue, as many as there is room for. Blocks that still exist stay in
 * the move. */
static void hold_some(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_queue *q = &m->offload.queues[move->to];
    struct kvbm_weak weak[KVBM_BATCH] = {0};
    uint32_t first = move->n, end = first;

    while (q->n && end < m->offload.move_blocks && fits(m, move, end, &q->heap[0])) {
        move->from[end] = kvbm_queue_pop(q);
        weak[end] = move->from[end].weak;
        /* an entry whose key moves already waits aside, and its place is taken by the next */
        end += kvbm_once_begin(q, move->to, &move->from[end]);
    }
    kvbm_pool_upgrade(move->from_disk ? m->disk : m->host, weak + first, end - first,
                      move->like + first, move->info + first);
    for (uint32_t k = first; k < end; k++) {
        if (moves(m, move, k))
            kvbm_move_keep(move, k, &move->n);
    }
}

void kvbm_move_some(struct kvbm_manager *m, enum kv_tier to)
{
    struct kvbm_queue *q = &m->offload.queues[to];
    size_t n_tokens =
        to == KV_TIER_DISK && m->opts.events ? (size_t)KVBM_BATCH * m->block_tokens : 0;
    struct kvbm_move *move = calloc(1, sizeof(*move) + n_tokens * sizeof(move->tokens[0]));

    if (!move) {
        kvbm_queue_stall(m, q, true);
        return;
    }
    move->manager = m;
    move->to = to;
    /* with write-back, all entries of this queue are victims: they are released as the
     * oldest again */
    move->leaving = m->write_back.leaving && to == KV_TIER_EXTERNAL;
    while (q->n && move->n < m->offload.move_blocks && fits(m, move, move->n, &q->heap[0]))
        hold_some(m, move);
    take_targets(m, move);
    if (move->from_disk && move->n)
        take_bounces(m, move);
    if (move->n)
        kvbm_move_launch(m, move);
    else
        free(move);
}
