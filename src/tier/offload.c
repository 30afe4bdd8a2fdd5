// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks go down a tier. What waits is a weak reference in a bounded heap (the higher priority first, then the
 * older); it becomes a held block when its move begins, and is dropped when it has gone by then. Without a
 * host tier what waits is a staging buffer, held by its pin.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/log.h"
#include "tier/manager.h"

/* ---- policies ---- */

static const struct kvbm_tier_policy *policy_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_HOST   ? &m->opts.host_policy
           : tier == KV_TIER_DISK ? &m->opts.disk_policy
                                  : &m->opts.object_policy;
}

bool kvbm_policy_passes(struct kvbm_manager *m, enum kv_tier tier, uint64_t hash, uint32_t priority)
{
    const struct kvbm_tier_policy *policy = policy_of(m, tier);
    bool passes = policy->policy != KVBM_POLICY_NEVER && priority >= policy->min_priority;

    if (passes && policy->policy == KVBM_POLICY_FREQUENCY) {
        kvbm_sketch_use(&m->offers[tier], (uint32_t)(hash >> 32));
        passes = kvbm_sketch_count(&m->offers[tier], (uint32_t)(hash >> 32)) >= policy->threshold;
    }
    kvbm_stats_of(m, tier)->filtered += !passes;
    return passes;
}

/* ---- the heap ---- */

static bool before(const struct kvbm_down *a, const struct kvbm_down *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->number < b->number;
}

static void sift_up(struct kvbm_down *heap, uint32_t i)
{
    struct kvbm_down down = heap[i];

    for (; i && before(&down, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = down;
}

static struct kvbm_down pop(struct kvbm_queue *q)
{
    struct kvbm_down first = q->heap[0], last = q->heap[--q->n];
    uint32_t i = 0;

    for (uint32_t kid; (kid = 2 * i + 1) < q->n; i = kid) {
        kid += kid + 1 < q->n && before(&q->heap[kid + 1], &q->heap[kid]);
        if (!before(&q->heap[kid], &last))
            break;
        q->heap[i] = q->heap[kid];
    }
    q->heap[i] = last;
    return first;
}

static int queue_grow(struct kvbm_manager *m, struct kvbm_queue *q)
{
    uint32_t capacity = KV_MIN(KV_MAX(q->capacity * 2, 256u), m->opts.max_offload);
    struct kvbm_down *heap;

    if (q->n >= m->opts.max_offload)
        return -ENOSPC;
    heap = realloc(q->heap, capacity * sizeof(*heap));
    if (!heap)
        return -ENOMEM;
    q->heap = heap;
    q->capacity = capacity;
    return 0;
}

/* It isn't kept, or it is. What it held or was waited for by is told. */
static void down_ended(struct kvbm_manager *m, struct kvbm_down *down, bool arrived)
{
    if (down->through)
        kvbm_job_through(down->through, arrived);
    if (down->cache)
        down->cache->n_jobs--;
    if (down->pin)
        kvbm_pin_put(down->pin);
    (void)m;
}

int kvbm_queue_push(struct kvbm_manager *m, enum kv_tier to, struct kvbm_down down)
{
    struct kvbm_queue *q = &m->down[to];
    int rc = m->mover_ends ? -ESHUTDOWN : q->n == q->capacity ? queue_grow(m, q) : 0;

    if (!down.number)
        down.number = ++m->next_number;
    if (rc < 0) {
        kvbm_stats_of(m, to)->dropped++;
        down_ended(m, &down, false);
        return rc;
    }
    q->heap[q->n] = down;
    sift_up(q->heap, q->n++);
    return 0;
}

/* ---- what goes down ---- */

static void offer(struct kvbm_pin *pin, uint32_t i, struct kvbm_job_ *through,
                  const struct kvbm_weak *weak, const struct kvbm_block_info *info)
{
    struct kvbm_manager *m = pin->manager;

    for (enum kv_tier to = KV_TIER_DISK; to <= KV_TIER_EXTERNAL; to++) {
        struct kvbm_down down = {.priority = info->priority, .weak = *weak};

        if (!(to == KV_TIER_DISK ? m->disk : m->object) || info->tiers >> to & 1 ||
            (to == KV_TIER_EXTERNAL && m->leaving) /* not before it is evicted */ ||
            !kvbm_policy_passes(m, to, kvbm_pin_hash(pin, i), info->priority))
            continue;
        if (!weak->handle.pool) { /* staged */
            down.pin = pin;
            down.index = i;
            pin->refs++;
        }
        if (to == KV_TIER_EXTERNAL && through) {
            down.through = through;
            through->n_through++;
        }
        kvbm_queue_push(m, to, down);
    }
}

static void offer_some(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through)
{
    struct kvbm_manager *m = pin->manager;
    struct kvbm_immutable held[KVBM_BATCH] = {0};
    struct kvbm_block_info info[KVBM_BATCH];
    struct kvbm_weak weak[KVBM_BATCH] = {0};
    uint8_t tiers[KVBM_BATCH];

    if (kvbm_staging(m)) {
        kvbm_registry_locate(m->registry, pin->group, kvbm_pin_key(pin, i), n, tiers);
    } else {
        for (uint32_t k = 0; k < n; k++) {
            if (pin->items[i + k].state == ITEM_HELD)
                held[k].handle = pin->items[i + k].host;
        }
        kvbm_pool_downgrade(m->host, held, n, weak, info);
    }
    for (uint32_t k = 0; k < n; k++) {
        if (pin->items[i + k].state == ITEM_STAGED)
            info[k] = (struct kvbm_block_info){.priority = pin->retain, .tiers = tiers[k]};
        else if (!weak[k].handle.pool)
            continue;
        offer(pin, i + k, through, &weak[k], &info[k]);
    }
}

void kvbm_offload_items(struct kvbm_pin *pin, uint32_t i, uint32_t n, struct kvbm_job_ *through)
{
    const struct kvbm_manager *m = pin->manager;

    if (!m->disk && (!m->object || m->leaving)) /* nowhere, or not now */
        return;
    for (uint32_t done = 0, some; done < n; done += some) {
        some = KV_MIN(n - done, (uint32_t)KVBM_BATCH);
        offer_some(pin, i + done, some, through);
    }
}

long kvbm_manager_offload(struct kvbm_cache *cache, const struct kvbm_immutable *blocks, size_t n,
                          int32_t priority)
{
    struct kvbm_manager *m = cache ? cache->manager : NULL;
    long queued = cache ? kvbm_manager_usable(m) : -EINVAL;

    if (queued < 0)
        return queued;
    if (!cache->pool || (n && !blocks))
        return -EINVAL;
    if (cache->partial)
        return -ENOTSUP;
    kvbm_manager_enter(m);
    for (size_t i = 0; i < n; i++) {
        struct kvbm_down down = {.priority = priority, .cache = cache};

        if (blocks[i].handle.pool != cache->pool ||
            kvbm_immutable_downgrade(&blocks[i], &down.weak) < 0)
            continue;
        cache->n_jobs++;
        queued += kvbm_queue_push(m, KV_TIER_HOST, down) == 0;
    }
    kvbm_offload_pump(m);
    kvbm_manager_leave(m);
    return queued;
}

/* ---- to disk and object store ---- */

static struct kvbm_pool *pool_of(const struct kvbm_manager *m, enum kv_tier tier)
{
    return tier == KV_TIER_DISK ? m->disk : m->object;
}

/* @again: what was leaving may be told of once more. */
static void like_released(const struct kvbm_move *move, struct kvbm_immutable *like, bool again)
{
    if (move->leaving)
        kvbm_pool_release_oldest(like, again);
    else
        kvbm_immutable_release(like);
}

/* The last first; one that can't be is no other's concern. */
static void release_all(struct kvbm_pool *pool, struct kvbm_immutable *blocks, uint32_t n)
{
    if (kvbm_pool_release(pool, blocks, n) == 0)
        return;
    for (uint32_t k = n; k-- > 0;)
        kvbm_immutable_release(&blocks[k]);
}

/* Blocks that leave were asked about when they came in for nothing but the object store. */
static bool may_leave(struct kvbm_manager *m, const struct kvbm_move *move,
                      const struct kvbm_block_info *info)
{
    return !move->leaving ||
           kvbm_policy_passes(m, KV_TIER_EXTERNAL, kvbm_key_hash(m, info->group, info->key),
                              info->priority);
}

/* What a staged block is, of which the registry knows nothing. */
static void tell_staged(struct kvbm_manager *m, const struct kvbm_down *down,
                        struct kvbm_block_info *info)
{
    const struct kvbm_pin *pin = down->pin;

    *info = (struct kvbm_block_info){.block = pin->items[down->index].host.block,
                                     .group = pin->group,
                                     .position = pin->position + down->index};
    info->has_parent = down->index || pin->has_parent;
    memcpy(info->key, kvbm_pin_key(pin, down->index), m->key_len);
    if (info->has_parent)
        memcpy(info->parent, kvbm_pin_key(pin, down->index) - m->key_len, m->key_len);
    kvbm_registry_locate(m->registry, info->group, info->key, 1, &info->tiers);
}

/* Number @k, which is held if it is there. False: it isn't moved. */
static bool moves(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    struct kvbm_block_info *info = &move->info[k];
    struct kvbm_immutable *like = &move->like[k];
    bool there;

    if (move->from[k].pin) {
        tell_staged(m, &move->from[k], info);
    } else if (!like->handle.pool) {
        kvbm_stats_of(m, move->to)->dropped++;
        down_ended(m, &move->from[k], false);
        return false;
    }
    there = info->tiers >> move->to & 1;
    if (!there && may_leave(m, move, info))
        return true;
    like_released(move, like, false);
    down_ended(m, &move->from[k], there);
    return false;
}

static void quarantine(struct kvbm_manager *m, struct kvbm_mutable block)
{
    struct kvbm_mutable *more =
        realloc(m->quarantine, (m->n_quarantine + 1) * sizeof(*m->quarantine));

    if (!more) { /* it comes up again, then */
        kvbm_mutable_release(&block);
        return;
    }
    m->quarantine = more;
    m->quarantine[m->n_quarantine++] = block;
}

/* Up to @n blocks of the target, on volumes that work. */
static uint32_t take_usable(struct kvbm_manager *m, enum kv_tier to, struct kvbm_mutable *ret,
                            uint32_t n)
{
    uint32_t usable = 0, got;

    while (usable < n && (got = kvbm_take_blocks(pool_of(m, to), ret + usable, n - usable)) > 0) {
        for (uint32_t k = usable, end = usable + got; k < end; k++) {
            if (to != KV_TIER_DISK || kvbm_disk_usable(m->disk_store, ret[k].handle.block))
                ret[usable++] = ret[k];
            else
                quarantine(m, ret[k]);
        }
    }
    return usable;
}

static void give_up(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    like_released(move, &move->like[k], true);
    down_ended(m, &move->from[k], false);
}

/* Number @k becomes number @n, and @n one more: the others are left behind. */
static void keep(struct kvbm_move *move, uint32_t k, uint32_t *n)
{
    move->from[*n] = move->from[k];
    move->like[*n] = move->like[k];
    move->info[*n] = move->info[k];
    move->target[*n] = move->target[k];
    move->bounce[*n] = move->bounce[k];
    ++*n;
}

static void take_targets(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t got = take_usable(m, move->to, move->target, move->n);

    for (uint32_t k = got; k < move->n; k++) {
        kvbm_stats_of(m, move->to)->dropped++;
        give_up(m, move, k);
    }
    move->n = got;
}

static void move_done(struct kvbm_manager *m, struct kvbm_note *note);

static void disk_done(struct kvbm_disk_batch *batch)
{
    struct kvbm_move *move = batch->arg;

    kvbm_note(move->manager, &move->note, move_done);
}

static void object_done(struct kvbm_object_batch *batch)
{
    struct kvbm_move *move = batch->arg;

    kvbm_note(move->manager, &move->note, move_done);
}

/* From the disk into the bounce blocks. */
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

static int submit(struct kvbm_manager *m, struct kvbm_move *move)
{
    if (move->reading)
        return submit_read(m, move);
    for (uint32_t k = 0; k < move->n; k++) {
        const struct kvbm_block_info *info = &move->info[k];
        void *data =
            kvbm_host_address(m, move->from_disk ? move->bounce[k].handle.block : info->block);

        if (move->to == KV_TIER_DISK)
            move->disk_ios[k] =
                (struct kvbm_disk_io){.slot = move->target[k].handle.block,
                                      .group = info->group,
                                      .position = info->position,
                                      .key = info->key,
                                      .parent = info->has_parent ? info->parent : NULL,
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

/* The target has its bytes: it becomes what its like is, or the staged block. */
static int becomes_findable(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k,
                            struct kvbm_immutable *held)
{
    struct kvbm_pool *pool = pool_of(m, move->to);
    struct kvbm_block_info *info = &move->info[k];
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = info->group,
                               .keys = info->key,
                               .parent = info->has_parent ? info->parent : NULL,
                               .position = info->position};
    struct kvbm_complete complete;
    int rc;

    if (move->like[k].handle.pool)
        return kvbm_pool_adopt(pool, &move->target[k], 1, &move->like[k], held);
    rc = kvbm_pool_complete(pool, &move->target[k], 1, &chain, &complete);
    return rc < 0 ? rc : kvbm_pool_register(pool, &complete, 1, held);
}

static int status_of(const struct kvbm_move *move, uint32_t k)
{
    return move->to == KV_TIER_DISK ? move->disk_ios[k].status : move->object_ios[k].status;
}

/* Those that have arrived: all at once, which is the rule, or each by itself. Their targets are zeroed then. */
static void become_findable(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_immutable held[KVBM_BATCH] = {0};
    bool all = true;

    for (uint32_t k = 0; k < move->n && all; k++)
        all = status_of(move, k) == 0 && move->like[k].handle.pool;
    all =
        all && kvbm_pool_adopt(pool_of(m, move->to), move->target, move->n, move->like, held) == 0;
    for (uint32_t k = 0; k < move->n && !all; k++) {
        if (status_of(move, k) == 0 && becomes_findable(m, move, k, &held[k]) < 0) {
            kvbm_mutable_release(&move->target[k]);
            kvbm_stats_of(m, move->to)->failed++;
        }
    }
    release_all(pool_of(m, move->to), held, move->n);
}

static void one_ended(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k)
{
    struct kvbm_tier_stats *stats = kvbm_stats_of(m, move->to);
    int status = status_of(move, k);

    if (status == 0) {
        if (move->to == KV_TIER_EXTERNAL)
            kvbm_object_put(m, move->info[k].group, move->info[k].key);
        stats->blocks_in++;
        stats->bytes_in += m->block_bytes;
    } else {
        if (move->to == KV_TIER_DISK &&
            !kvbm_disk_usable(m->disk_store, move->target[k].handle.block))
            quarantine(m, move->target[k]);
        else
            kvbm_mutable_release(&move->target[k]);
        stats->failed += status != -ECANCELED;
        stats->dropped += !move->leaving; /* it is where it was, and will be told of again */
    }
    if (move->leaving)
        like_released(move, &move->like[k], status != 0);
    down_ended(m, &move->from[k], status == 0);
}

/* Leaves first: they are released before their parents. What leaves keeps its order. */
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

static void launch(struct kvbm_manager *m, struct kvbm_move *move);

/*
 * It can't be read. A record that lies, or a volume that is left alone, won't be better for another attempt; else there is one
 * at the next look at what leaves, so that what can't be read at all is tried a few times before it has gone.
 */
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
    like_released(move, &move->like[k], again);
    down_ended(m, &move->from[k], false);
}

/* The bytes have come up from the disk: those that did go on to the object store. */
static void go_on(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t n = 0;

    move->reading = false;
    for (uint32_t k = 0; k < move->n; k++) {
        int status = m->mover_ends ? -ECANCELED : move->disk_ios[k].status;

        if (status == 0) {
            m->stats.disk.blocks_out++;
            m->stats.disk.bytes_out += m->block_bytes;
            keep(move, k, &n);
            continue;
        }
        not_read(m, move, k, status);
    }
    move->n = n;
    if (n)
        launch(m, move);
    else
        free(move);
}

static void move_done(struct kvbm_manager *m, struct kvbm_note *note)
{
    struct kvbm_move *move = (struct kvbm_move *)note, **at = &m->moves;

    m->running--;
    m->down[move->to].in_flight--;
    while (*at != move)
        at = &(*at)->next;
    *at = move->next;
    if (move->reading) {
        go_on(m, move);
        kvbm_offload_pump(m);
        return;
    }
    all_ended(m, move);
    free(move);
    kvbm_offload_pump(m);
    pthread_cond_broadcast(&m->changed);
}

/* The mover tries again when something ends or a moment has passed, and has to know that. */
static void stall(struct kvbm_manager *m, struct kvbm_queue *q, bool stalled)
{
    q->stalled = stalled;
    if (stalled)
        pthread_cond_signal(&m->work);
}

static void launch(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_queue *q = &m->down[move->to];
    int rc = submit(m, move);

    if (rc == 0) {
        q->in_flight++;
        m->running++;
        move->next = m->moves;
        m->moves = move;
        return;
    }
    stall(m, q, rc == -EAGAIN);
    for (uint32_t k = 0; k < move->n; k++) {
        kvbm_mutable_release(&move->target[k]);
        kvbm_mutable_release(&move->bounce[k]);
        like_released(move, &move->like[k], rc != -EAGAIN);
        if (rc == -EAGAIN) { /* later */
            kvbm_queue_push(m, move->to, move->from[k]);
        } else {
            kvbm_stats_of(m, move->to)->dropped += !move->leaving; /* those will be told of again */
            down_ended(m, &move->from[k], false);
        }
    }
    free(move);
}

/* Host blocks for what is on the disk. What there are none for waits. */
static void take_bounces(struct kvbm_manager *m, struct kvbm_move *move)
{
    uint32_t got = kvbm_take_blocks(m->host, move->bounce, move->n);

    stall(m, &m->down[move->to], got < move->n);
    for (uint32_t k = got; k < move->n; k++) {
        kvbm_mutable_release(&move->target[k]);
        like_released(move, &move->like[k], false);
        kvbm_queue_push(m, move->to, move->from[k]);
    }
    move->n = got;
}

/* As number @k: a move of blocks that leave is of one tier's. */
static bool fits(struct kvbm_manager *m, struct kvbm_move *move, uint32_t k,
                 const struct kvbm_down *down)
{
    bool from_disk = move->leaving && down->weak.handle.pool == m->disk;

    if (k == 0)
        move->from_disk = move->reading = from_disk;
    return move->from_disk == from_disk;
}

/* As many of the queue's first as there is room for; those that are there still stay in the move, held. */
static void hold_some(struct kvbm_manager *m, struct kvbm_move *move)
{
    struct kvbm_queue *q = &m->down[move->to];
    struct kvbm_weak weak[KVBM_BATCH] = {0};
    uint32_t first = move->n, end = first;

    for (; q->n && end < m->move_blocks && fits(m, move, end, &q->heap[0]); end++) {
        move->from[end] = pop(q);
        weak[end] = move->from[end].weak;
    }
    kvbm_pool_upgrade(move->from_disk ? m->disk : m->host, weak + first, end - first,
                      move->like + first, move->info + first);
    for (uint32_t k = first; k < end; k++) {
        if (moves(m, move, k))
            keep(move, k, &move->n);
    }
}

static void move_some(struct kvbm_manager *m, enum kv_tier to)
{
    struct kvbm_queue *q = &m->down[to];
    struct kvbm_move *move = calloc(1, sizeof(*move));

    if (!move) {
        stall(m, q, true);
        return;
    }
    move->manager = m;
    move->to = to;
    move->leaving = m->leaving && to == KV_TIER_EXTERNAL;
    while (q->n && move->n < m->move_blocks && fits(m, move, move->n, &q->heap[0]))
        hold_some(m, move);
    take_targets(m, move);
    if (move->from_disk && move->n)
        take_bounces(m, move);
    if (move->n)
        launch(m, move);
    else
        free(move);
}

/* ---- from a cache to the host tier ---- */

struct run {
    struct kvbm_cache *cache;
    uint32_t n, group, position;
    bool has_parent;
    uint8_t priority;
    uint64_t priority_until_ns;
    struct kvbm_immutable sources[KVBM_BATCH];
    uint32_t blocks[KVBM_BATCH];
    uint8_t keys[(KVBM_BATCH + 1) * KVBM_MAX_KEY]; /* the parent's, theirs */
};

/* Whether a block comes right behind the run's last. */
static bool continues(const struct kvbm_manager *m, const struct run *run,
                      const struct kvbm_down *down, const struct kvbm_block_info *info)
{
    return down->cache == run->cache && info->group == run->group && info->has_parent &&
           info->priority == run->priority && info->priority_until_ns == run->priority_until_ns &&
           info->position == run->position + run->n &&
           !memcmp(info->parent, run->keys + (size_t)run->n * m->key_len, m->key_len);
}

static void add_to_run(const struct kvbm_manager *m, struct run *run,
                       const struct kvbm_immutable *block, const struct kvbm_block_info *info)
{
    if (run->n == 0) {
        run->group = info->group;
        run->position = info->position;
        run->has_parent = info->has_parent;
        run->priority = info->priority;
        run->priority_until_ns = info->priority_until_ns;
        memcpy(run->keys, info->parent, m->key_len);
    }
    run->sources[run->n] = *block;
    run->blocks[run->n++] = info->block;
    memcpy(run->keys + (size_t)run->n * m->key_len, info->key, m->key_len);
}

/* The first of the queue, and what follows it in its sequence, as long as that is next in the queue, too. */
static void gather_run(struct kvbm_manager *m, struct run *run)
{
    struct kvbm_queue *q = &m->down[KV_TIER_HOST];

    while (q->n && run->n < m->move_blocks) {
        struct kvbm_down down = pop(q);
        struct kvbm_block_info info = {.size = sizeof(info)};
        struct kvbm_immutable block;

        if (kvbm_weak_upgrade(&down.weak, &block) < 0) {
            m->stats.host.dropped++;
            down_ended(m, &down, false);
            continue;
        }
        kvbm_immutable_info(&block, &info);
        if (info.tiers >> KV_TIER_HOST & 1) {
            kvbm_immutable_release(&block);
            down_ended(m, &down, true);
        } else if (run->n && !continues(m, run, &down, &info)) {
            kvbm_immutable_release(&block);
            kvbm_queue_push(m, KV_TIER_HOST, down);
            return;
        } else {
            run->cache = down.cache;
            add_to_run(m, run, &block, &info);
            down_ended(m, &down, true); /* the job counts from here on */
        }
    }
}

/* A store like anybody's, whose job holds the blocks it reads. */
static int store_run(struct kvbm_manager *m, struct run *run)
{
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .group = run->group,
                               .keys = run->keys + m->key_len,
                               .parent = run->has_parent ? run->keys : NULL,
                               .position = run->position};
    struct kvbm_job job = {.size = sizeof(job), .cache = run->cache, .blocks = run->blocks};
    struct kvbm_immutable *sources = malloc(run->n * sizeof(*sources));
    struct kvbm_pin *pin = NULL;
    int64_t rc = sources ? 0 : -ENOMEM;

    if (rc == 0)
        rc = kvbm_pin_new(m, &chain, run->n, true, &pin);
    if (rc == 0) {
        pin->released = true;
        pin->retain = run->priority;
        pin->retain_until_ns = run->priority_until_ns;
        memcpy(sources, run->sources, run->n * sizeof(*sources));
        kvbm_pin_reserve(pin);
        job.pin = pin;
        rc = kvbm_job_submit(m, &job, sources, false);
        kvbm_pin_put(pin); /* the job has it */
    }
    if (rc < 0)
        free(sources);
    return rc < 0 ? (int)rc : 0;
}

static void store_some(struct kvbm_manager *m)
{
    struct run run = {0};

    gather_run(m, &run);
    if (!run.n)
        return;
    if (store_run(m, &run) < 0) {
        m->stats.host.dropped += run.n;
        for (uint32_t k = run.n; k-- > 0;)
            kvbm_immutable_release(&run.sources[k]);
    } else {
        m->down[KV_TIER_HOST].in_flight++;
    }
}

/* ---- the pump ---- */

static bool may_move(const struct kvbm_manager *m, enum kv_tier to)
{
    const struct kvbm_queue *q = &m->down[to];

    if (!q->n || q->stalled || q->in_flight >= q->max_in_flight)
        return false;
    return to != KV_TIER_HOST || m->n_jobs + m->n_done < m->opts.max_jobs;
}

/* The host's queue comes last: what is dropped from the others ends jobs, which it may have waited for. */
void kvbm_offload_pump(struct kvbm_manager *m)
{
    kvbm_write_back(m);
    while (may_move(m, KV_TIER_DISK))
        move_some(m, KV_TIER_DISK);
    while (may_move(m, KV_TIER_EXTERNAL))
        move_some(m, KV_TIER_EXTERNAL);
    while (may_move(m, KV_TIER_HOST))
        store_some(m);
    if (kvbm_offload_idle(m)) /* by dropping, perhaps: nothing else tells drain */
        pthread_cond_broadcast(&m->changed);
}

bool kvbm_offload_idle(const struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        if (m->down[to].n || m->down[to].in_flight)
            return false;
    }
    return true;
}

void kvbm_offload_drop_all(struct kvbm_manager *m)
{
    for (enum kv_tier to = KV_TIER_HOST; to < KV_N_TIERS; to++) {
        while (m->down[to].n) {
            struct kvbm_down down = pop(&m->down[to]);

            kvbm_stats_of(m, to)->dropped++;
            down_ended(m, &down, false);
        }
    }
    for (struct kvbm_move *move = m->moves; move; move = move->next) {
        if (move->to == KV_TIER_DISK || move->reading)
            kvbm_disk_cancel(m->disk_store, &move->disk);
        else
            kvbm_object_cancel(m->object_store, &move->object);
    }
}

int kvbm_manager_drain(struct kvbm_manager *m, uint32_t timeout_ms)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    struct timespec until = {(time_t)(deadline / KV_NS_PER_S), (long)(deadline % KV_NS_PER_S)};
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    while (rc == 0 && !kvbm_offload_idle(m))
        rc = -pthread_cond_timedwait(&m->changed, &m->lock, &until);
    kvbm_manager_leave(m);
    return rc;
}
