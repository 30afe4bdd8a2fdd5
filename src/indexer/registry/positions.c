// SPDX-License-Identifier: Apache-2.0
#include "indexer/registry/positions.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/mix.h"
#include "base/core/xxh.h"
#include "indexer/view/apply.h"

#define N_BUCKETS 16384

void ki_positions_fini(struct ki_positions *p)
{
    for (size_t i = 0; p->buckets && i < N_BUCKETS; i++) {
        while (p->buckets[i]) {
            struct ki_position *item = p->buckets[i];

            p->buckets[i] = item->next;
            ki_snapshot_free(item->snapshot);
            free(item);
        }
    }
    free(p->buckets);
    memset(p, 0, sizeof(*p));
}

static bool open_table(struct ki_positions *p)
{
    if (p->buckets)
        return true;
    p->buckets = calloc(N_BUCKETS, sizeof(struct ki_position *));
    if (!p->buckets)
        return false;
    TAILQ_INIT(&p->with_blocks);
    TAILQ_INIT(&p->without_blocks);
    p->secret = kv_secret();
    return true;
}

static struct ki_position **bucket_of(const struct ki_positions *p, uint64_t worker)
{
    return &p->buckets[kv_xxh64(&worker, sizeof(worker), p->secret) % N_BUCKETS];
}

/* Return the link to @holder's position, or the one that is NULL at the end. */
static struct ki_position **link_of(const struct ki_positions *p, struct kv_holder holder,
                                    uint32_t *ret_ranks)
{
    struct ki_position **link = bucket_of(p, holder.worker);

    for (*ret_ranks = 0; *link; link = &(*link)->next) {
        if ((*link)->mark.holder.worker != holder.worker)
            continue;
        if ((*link)->mark.holder.rank == holder.rank)
            break;
        ++*ret_ranks;
    }
    return link;
}

static struct ki_position *find(const struct ki_positions *p, struct kv_holder holder)
{
    uint32_t ranks;

    return p->buckets ? *link_of(p, holder, &ranks) : NULL;
}

const struct ki_position *ki_positions_find(const struct ki_positions *p, struct kv_holder holder)
{
    return find(p, holder);
}

static struct ki_positions_by_age *list_of(struct ki_positions *p, const struct ki_position *item)
{
    return item->has_blocks ? &p->with_blocks : &p->without_blocks;
}

static void remove_at(struct ki_positions *p, struct ki_position **link)
{
    struct ki_position *item = *link;

    *link = item->next;
    TAILQ_REMOVE(list_of(p, item), item, age);
    p->n_with_blocks -= item->has_blocks;
    p->n--;
    ki_snapshot_free(item->snapshot);
    free(item);
}

/* Without its position nobody would find a rank's blocks again: only others make room. */
static bool make_room(struct ki_positions *p)
{
    struct ki_position *oldest = TAILQ_FIRST(&p->without_blocks);
    uint32_t ranks;

    if (p->n < KI_MAX_POSITIONS)
        return true;
    if (!oldest)
        return false;
    remove_at(p, link_of(p, oldest->mark.holder, &ranks));
    return true;
}

bool ki_positions_note(struct ki_positions *p, const struct ki_mark *mark, bool has_blocks)
{
    struct ki_position *item = open_table(p) ? calloc(1, sizeof(*item)) : NULL;
    struct ki_position **link;
    uint32_t ranks;

    if (!item)
        return false;
    link = link_of(p, mark->holder, &ranks);
    if (*link)
        remove_at(p, link);
    else if (ranks >= KI_MAX_RANKS || !make_room(p)) {
        free(item);
        return false;
    }
    item->mark = *mark;
    item->has_blocks = has_blocks;
    item->noted_ns = kv_now_ns();
    link = bucket_of(p, mark->holder.worker);
    item->next = *link;
    *link = item;
    TAILQ_INSERT_TAIL(list_of(p, item), item, age);
    p->n_with_blocks += item->has_blocks;
    p->n++;
    return true;
}

bool ki_positions_keep(struct ki_positions *p, struct kv_holder holder,
                       struct ki_snapshot *snapshot)
{
    struct ki_position *item = find(p, holder);

    if (!item || !item->has_blocks)
        return false;
    ki_snapshot_free(item->snapshot);
    item->snapshot = snapshot;
    return true;
}

struct ki_snapshot *ki_positions_take_snapshot(struct ki_positions *p, struct kv_holder holder)
{
    struct ki_snapshot *snapshot = NULL;
    struct ki_position *item = find(p, holder);

    if (item) {
        snapshot = item->snapshot;
        item->snapshot = NULL;
    }
    return snapshot;
}

bool ki_positions_take(struct ki_positions *p, struct kv_holder holder, struct ki_mark *ret,
                       bool *ret_has_blocks)
{
    struct ki_position **link;
    uint32_t ranks;

    if (!p->buckets)
        return false;
    link = link_of(p, holder, &ranks);
    if (!*link)
        return false;
    *ret = (*link)->mark;
    *ret_has_blocks = (*link)->has_blocks;
    remove_at(p, link);
    return true;
}

const struct ki_position *ki_positions_next(const struct ki_positions *p, uint64_t worker,
                                            const struct ki_position *after)
{
    const struct ki_position *item;

    if (!p->buckets)
        return NULL;
    item = after ? after->next : *bucket_of(p, worker);
    while (item && item->mark.holder.worker != worker)
        item = item->next;
    return item;
}

void ki_positions_blocks_left(struct ki_positions *p, uint64_t worker, const uint32_t *rank)
{
    if (!p->buckets)
        return;
    for (struct ki_position *item = *bucket_of(p, worker); item; item = item->next) {
        if (item->mark.holder.worker != worker || (rank && item->mark.holder.rank != *rank))
            continue;
        TAILQ_REMOVE(list_of(p, item), item, age);
        item->has_blocks = false;
        p->n_with_blocks--;
        TAILQ_INSERT_TAIL(&p->without_blocks, item, age);
    }
}
