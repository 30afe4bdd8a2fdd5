// SPDX-License-Identifier: Apache-2.0
/*
 * Live batches that wait, in the order of their coming (backlog.h).
 *
 *     put ──► [ oldest | ... | newest ] ──► take ──► applied ──► free
 *             └─ counted in b->bytes and budget->used ─────────┘
 *
 * Invariants: a batch counts until it is freed, so what a turn has taken is bounded, too. And
 * budget->used is the sum of b->bytes over all streams.
 */
#include "indexer/stream/backlog.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

static uint64_t cost(size_t len)
{
    return sizeof(struct ki_backlog_item) + 64 + len; /* 64: overhead of malloc */
}

void ki_backlog_init(struct ki_backlog *b)
{
    STAILQ_INIT(&b->items);
    b->bytes = 0;
    b->lost_reconnect = false;
    b->dropped_next = 0;
}

/*
 * Count @bytes, if both bounds allow. Adding first and taking back lets two threads refuse each
 * other near the bound, but never lets both pass beyond it.
 */
static bool reserve(struct ki_backlog *b, struct ki_backlog_budget *budget, uint64_t bytes)
{
    uint64_t before;

    if (b->bytes + bytes > budget->max_stream_bytes)
        return false;
    before = atomic_fetch_add_explicit(&budget->used, bytes, memory_order_relaxed);
    if (before + bytes > budget->max_bytes) {
        atomic_fetch_sub_explicit(&budget->used, bytes, memory_order_relaxed);
        return false;
    }
    b->bytes += bytes;
    return true;
}

static void give_back(struct ki_backlog *b, struct ki_backlog_budget *budget, uint64_t bytes)
{
    b->bytes -= bytes;
    atomic_fetch_sub_explicit(&budget->used, bytes, memory_order_relaxed);
}

int ki_backlog_put(struct ki_backlog *b, struct ki_backlog_budget *budget,
                   const struct ki_batch_id *id, bool reconnected, const void *data, size_t len)
{
    struct ki_backlog_item *item = NULL;
    bool fits = reserve(b, budget, cost(len));

    /*
     * A dropped batch hands the news of its connection on to the next one that is kept. Else that
     * one would pass for a batch of the old connection, whose process may be another.
     */
    b->lost_reconnect |= reconnected;
    b->dropped_next = id->sequence + 1;
    if (!fits)
        return -ENOBUFS;
    item = malloc(sizeof(*item) + len);
    if (!item) {
        give_back(b, budget, cost(len));
        return -ENOMEM;
    }
    item->id = *id;
    item->reconnected = b->lost_reconnect;
    item->bytes = cost(len);
    item->len = len;
    if (len)
        memcpy(item->data, data, len);
    b->lost_reconnect = false;
    b->dropped_next = 0;
    STAILQ_INSERT_TAIL(&b->items, item, next);
    return 0;
}

struct ki_backlog_item *ki_backlog_take(struct ki_backlog *b)
{
    struct ki_backlog_item *item = STAILQ_FIRST(&b->items);

    if (item)
        STAILQ_REMOVE_HEAD(&b->items, next);
    return item;
}

void ki_backlog_free(struct ki_backlog *b, struct ki_backlog_budget *budget,
                     struct ki_backlog_item *item)
{
    give_back(b, budget, item->bytes);
    free(item);
}

void ki_backlog_clear(struct ki_backlog *b, struct ki_backlog_budget *budget)
{
    struct ki_backlog_item *item;

    while ((item = ki_backlog_take(b)) != NULL)
        ki_backlog_free(b, budget, item);
    b->lost_reconnect = false;
    b->dropped_next = 0;
}
