// SPDX-License-Identifier: Apache-2.0
/*
 * Running moves: read from the disk when only the disk has the bytes, write, and complete each
 * block.
 *
 *   launch ─► [read ─► go_on ─► launch] ─► write ─► ended ─► registered in the target's pool
 *     └ refused: the entries return to the queue, or end          └ failed: the target is given back
 *
 * A block of the host tier is held until its move ends, so its bytes don't change. A target of a
 * volume that has gone out of use is quarantined: a late write may still reach its slot.
 */
#include <errno.h>
#include <stdlib.h>

#include "bm/registry/registry.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"

/* Release the blocks of a move. @again: kvbm_pool_leaving may list them once more. */
void kvbm_move_release(const struct kvbm_move *move, struct kvbm_immutable *like, bool again)
{
    if (move->leaving)
        kvbm_pool_release_oldest(like, again);
    else
        kvbm_immutable_release(like);
}

/* Release targets, the last first. A failure concerns its own block only. */
static void release_all(struct kvbm_pool *pool, struct kvbm_immutable *blocks, uint32_t n)
{
    if (kvbm_pool_release(pool, blocks, n) == 0)
        return;
    for (uint32_t k = n; k-- > 0;)
        kvbm_immutable_release(&blocks[k]);
}

static void move_done(struct kvbm_manager *m, void *operation);

static void disk_done(struct kvbm_disk_batch *batch)
{
    struct kvbm_move *move = batch->arg;

    kvbm_note(move->manager, move_done, move);
}

static void object_done(struct kvbm_object_batch *batch)
{
    struct kvbm_move *move = batch->arg;

    kvbm_note(move->manager, move_done, move);
}

/* Read the move's blocks from the disk into its bounce blocks. */
static int submit_read(struct kvbm_manager *m, struct kvbm_move *move)
{
    for (uint32_t k = 0; k < move->n; k++)
        move->disk_ios[k] =
            (struct kvbm_disk_io){.slot = move->info[k].block,
                                  .group = move->info[k].group,
                                  .key = move->info[k].key,
                                  .data = kvbm_host_address(m, move->bounce[k].handle.block),
                                  .len = m->stride};
    move->disk = (struct kvbm_disk_batch){
        .ios = move->disk_ios, .n = move->n, .done = disk_done, .arg = move};
    return kvbm_disk_submit(m->disk_store, &move->disk);
}

/* Return the tokens of block @k for its record on the disk; NULL: not known. */
static const uint32_t *tokens_of(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    const struct kvbm_down *from = &move->from[k];
    uint32_t *tokens = move->tokens + (size_t)k * m->block_tokens;

    if (!m->opts.events)
        return NULL;
    if (from->pin) /* a staged block, which the registry doesn't know */
        return kvbm_pin_tokens(from->pin, from->index);
    return kvbm_registry_tokens(m->registry, move->info[k].group, move->info[k].key, tokens)
               ? tokens
               : NULL;
}

/* Hand a move to its executor: the read of a move in two parts, or the write. */
static int submit(struct kvbm_manager *m, struct kvbm_move *move)
{
    if (move->reading)
        return submit_read(m, move);
    for (uint32_t k = 0; k < move->n; k++) {
        const struct kvbm_block_info *info = &move->info[k];
        const struct kvbm_down *from = &move->from[k];
        void *data = from->pin ? kvbm_pin_data(from->pin, from->index)
                               : kvbm_host_address(m, move->from_disk ? move->bounce[k].handle.block
                                                                      : info->block);

        if (move->to == KV_TIER_DISK)
            move->disk_ios[k] =
                (struct kvbm_disk_io){.slot = move->target[k].handle.block,
                                      .group = info->group,
                                      .position = info->position,
                                      .key = info->key,
                                      .parent = info->has_parent ? info->parent : NULL,
                                      .tokens = tokens_of(m, move, k),
                                      .data = data,
                                      .len = m->stride};
        else
            move->object_ios[k] =
                (struct kvbm_object_io){.group = info->group, .key = info->key, .data = data};
    }
    if (move->to == KV_TIER_DISK) {
        move->disk = (struct kvbm_disk_batch){
            .write = true, .ios = move->disk_ios, .n = move->n, .done = disk_done, .arg = move};
        return kvbm_disk_submit(m->disk_store, &move->disk);
    }
    move->object = (struct kvbm_object_batch){.op = KVBM_OBJECT_PUT,
                                              .ios = move->object_ios,
                                              .n = move->n,
                                              .done = object_done,
                                              .arg = move};
    return kvbm_object_submit(m->object_store, &move->object);
}

/* Register a target that has its bytes, under the source's key or the staged block's. */
static int becomes_findable(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k,
                            struct kvbm_immutable *held)
{
    struct kvbm_pool *pool = kvbm_target_of(m, move->to);
    struct kvbm_block_info *info = &move->info[k];
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = info->group,
                               .keys = info->key,
                               .parent = info->has_parent ? info->parent : NULL,
                               .position = info->position,
                               .tokens =
                                   move->to == KV_TIER_DISK ? move->disk_ios[k].tokens : NULL};
    struct kvbm_complete complete;
    int rc;

    if (move->like[k].handle.pool)
        return kvbm_pool_adopt(pool, &move->target[k], 1, &move->like[k], held);
    rc = kvbm_pool_complete(pool, &move->target[k], 1, &chain, &complete);
    return rc < 0 ? rc : kvbm_pool_register(pool, &complete, 1, held);
}

/* Status of block @k's write. */
static int status_of(const struct kvbm_move *move, uint32_t k)
{
    return move->to == KV_TIER_DISK ? move->disk_ios[k].status : move->object_ios[k].status;
}

/* Register the blocks that have arrived: all at once, or one by one if that fails. Zeroes their
 * targets. */
static void become_findable(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_immutable held[KVBM_BATCH] = {0};
    bool all = true;

    for (uint32_t k = 0; k < move->n && all; k++)
        all = status_of(move, k) == 0 && move->like[k].handle.pool;
    /* at once in the usual case: one hold of the registry's lock for the batch */
    all = all && kvbm_pool_adopt(kvbm_target_of(m, move->to), move->target, move->n, move->like,
                                 held) == 0;
    for (uint32_t k = 0; k < move->n && !all; k++) {
        if (status_of(move, k) == 0 && becomes_findable(m, move, k, &held[k]) < 0) {
            kvbm_mutable_release(&move->target[k]);
            kvbm_stats_of(m, move->to)->failed++;
        }
    }
    release_all(kvbm_target_of(m, move->to), held, move->n);
}

/* Count the end of one block, remember where it is, and give back what its move held. */
static void one_ended(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    struct kvbm_tier_stats *stats = kvbm_stats_of(m, move->to);
    int status = status_of(move, k);

    if (status == 0) {
        if (move->to == KV_TIER_EXTERNAL)
            kvbm_presence_stored(m, move->info[k].group, move->info[k].key);
        stats->blocks_in++;
        stats->bytes_in += m->block_bytes;
    } else {
        /* the write may still be on its way to a volume that doesn't answer: keep its
         * slot unused */
        if (move->to == KV_TIER_DISK &&
            !kvbm_disk_usable(m->disk_store, move->target[k].handle.block))
            kvbm_quarantine(m, move->target[k]);
        else
            kvbm_mutable_release(&move->target[k]);
        stats->failed += status != -ECANCELED;
        /* a block of write-back stays where it was and is listed again */
        stats->dropped += !move->leaving;
    }
    if (move->leaving) {
        /* After a failure retry only after an eviction: otherwise a full store would be asked
         * without pause. */
        if (status != 0)
            kvbm_write_back_later(m, move->from_disk ? m->disk : m->host);
        kvbm_move_release(move, &move->like[k], status != 0);
    }
    kvbm_down_ended(m, &move->from[k], status == 0);
}

/* Release leaves before their parents. Blocks about to be evicted keep their order. */
static void all_ended(struct kvbm_manager *m, struct kvbm_move *move)
{
    become_findable(m, move);
    if (move->from_disk)
        kvbm_pool_release_mutable(m->host, move->bounce, move->n);
    if (!move->leaving)
        release_all(m->host, move->like, move->n);
    for (uint32_t i = 0; i < move->n; i++)
        one_ended(m, move, move->leaving ? i : move->n - 1 - i);
}

/* Handle a block that can't be read. Don't retry a damaged record or a volume out of use. Retry
 * other blocks when write-back next lists victims, until they are evicted. */
static void not_read(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k, int status)
{
    bool lies = status == -EBADMSG || status == -ENOENT;
    bool again = !lies && kvbm_disk_usable(m->disk_store, move->info[k].block);

    m->stats.disk.bad += status == -EBADMSG;
    m->stats.disk.failed += !lies && status != -ECANCELED;
    kvbm_stats_of(m, move->to)->dropped += !again;
    if (again)
        kvbm_write_back_later(m, m->disk);
    kvbm_mutable_release(&move->target[k]);
    kvbm_mutable_release(&move->bounce[k]);
    kvbm_move_release(move, &move->like[k], again);
    if (lies) /* the slot's record has been removed */
        kvbm_pool_reset_keys(m->disk, move->info[k].group, move->info[k].key, 1, NULL);
    kvbm_down_ended(m, &move->from[k], false);
}

/* Send the blocks that the disk has delivered on to the object store. */
static void go_on(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t n = 0;

    move->reading = false;
    for (uint32_t k = 0; k < move->n; k++) {
        /* a manager that ends writes nothing more */
        int status = m->mover.ends ? -ECANCELED : move->disk_ios[k].status;

        if (status == 0) {
            m->stats.disk.blocks_out++;
            m->stats.disk.bytes_out += m->block_bytes;
            kvbm_move_keep(move, k, &n);
            continue;
        }
        not_read(m, move, k, status);
    }
    move->n = n;
    if (n)
        kvbm_move_launch(m, move);
    else
        free(move);
}

static void move_done(struct kvbm_manager *m, void *operation)
{
    struct kvbm_move *move = operation, **at = &m->offload.moves;

    m->mover.running--;
    m->offload.queues[move->to].in_flight--;
    while (*at != move)
        at = &(*at)->next;
    *at = move->next;
    kvbm_step_due(m, KVBM_STEP_PUMP);
    if (move->reading) {
        go_on(m, move);
        return;
    }
    all_ended(m, move);
    free(move);
    pthread_cond_broadcast(&m->changed);
}

void kvbm_move_launch(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_queue *q = &m->offload.queues[move->to];
    int rc = submit(m, move);

    if (rc == 0) {
        q->in_flight++;
        m->mover.running++;
        move->next = m->offload.moves;
        m->offload.moves = move;
        return;
    }
    /* -EAGAIN: the executor's queue is full, and the entries keep their numbers. Other errors are
     * final. */
    kvbm_queue_stall(m, q, rc == -EAGAIN);
    for (uint32_t k = 0; k < move->n; k++) {
        kvbm_mutable_release(&move->target[k]);
        kvbm_mutable_release(&move->bounce[k]);
        kvbm_move_release(move, &move->like[k], rc != -EAGAIN);
        if (rc == -EAGAIN) { /* try again later */
            kvbm_queue_push(m, move->to, move->from[k]);
        } else {
            /* blocks of write-back are listed again */
            kvbm_stats_of(m, move->to)->dropped += !move->leaving;
            kvbm_down_ended(m, &move->from[k], false);
        }
    }
    free(move);
}
