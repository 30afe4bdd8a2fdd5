// SPDX-License-Identifier: Apache-2.0
#include "advisor/index/policy.h"

#include <math.h>
#include <string.h>

#include "base/core/error.h"

static struct kva_block *block_of(const struct kva_order *order, uint32_t at)
{
    return kva_block_at(order->index, at);
}

static void move_to(struct kva_order *order, unsigned list, uint32_t at)
{
    kva_list_take(order, at);
    kva_list_push(order, list, at);
}

/* -- lru --------------------------------------------------------------------------------------- */

static void lru_add(struct kva_order *order, uint32_t at, enum kva_why why)
{
    if (why != KVA_COLD)
        kva_list_push(order, 0, at);
    else
        kva_list_push_old(order, 0, at);
}

static void lru_use(struct kva_order *order, uint32_t at)
{
    move_to(order, 0, at);
}

static uint32_t lru_victim(struct kva_order *order)
{
    return order->lists[0].tail;
}

/* -- lfu --------------------------------------------------------------------------------------- */

/* List of a blob: the logarithm of its uses. */
static unsigned uses_of(const struct kva_order *order, uint32_t at)
{
    unsigned count = block_of(order, at)->count;

    return count ? 31u - (unsigned)__builtin_clz(count) : 0;
}

static void lfu_add(struct kva_order *order, uint32_t at, enum kva_why why)
{
    if (why != KVA_COLD)
        kva_list_push(order, uses_of(order, at), at);
    else
        kva_list_push_old(order, 0, at);
}

static void lfu_use(struct kva_order *order, uint32_t at)
{
    move_to(order, uses_of(order, at), at);
}

static uint32_t lfu_victim(struct kva_order *order)
{
    for (unsigned i = 0; i < KVA_LISTS; i++)
        if (order->lists[i].n)
            return order->lists[i].tail;
    return KVA_NONE;
}

/* -- sieve ------------------------------------------------------------------------------------- */

static void visit(struct kva_order *order, uint32_t at)
{
    block_of(order, at)->flags |= KVA_VISITED;
}

static void sieve_add(struct kva_order *order, uint32_t at, enum kva_why why)
{
    block_of(order, at)->flags &= (uint8_t)~KVA_VISITED;
    lru_add(order, at, why);
}

static uint32_t sieve_victim(struct kva_order *order)
{
    uint32_t at = order->hand == KVA_NONE ? order->lists[0].tail : order->hand;

    while (at != KVA_NONE && block_of(order, at)->flags & KVA_VISITED) {
        block_of(order, at)->flags &= (uint8_t)~KVA_VISITED;
        at = block_of(order, at)->prev == KVA_NONE ? order->lists[0].tail
                                                   : block_of(order, at)->prev;
    }
    order->hand = at; /* kva_list_take moves it on when the blob leaves */
    return at;
}

/* -- s3fifo ------------------------------------------------------------------------------------ */

enum { SMALL, MAIN, SMALL_PERCENT = 10 };

static void s3fifo_add(struct kva_order *order, uint32_t at, enum kva_why why)
{
    struct kva_block *b = block_of(order, at);
    bool ghost = b->flags & KVA_GHOST && why == KVA_USED &&
                 order->evictions - b->stamp <= order->lists[MAIN].n;

    b->flags &= (uint8_t) ~(KVA_VISITED | (why == KVA_USED ? KVA_GHOST : 0));
    if (why != KVA_COLD)
        kva_list_push(order, ghost ? MAIN : SMALL, at);
    else
        kva_list_push_old(order, SMALL, at);
}

/* Return the small queue's victim; blobs used since they came move to the main one. */
static uint32_t small_victim(struct kva_order *order)
{
    while (order->lists[SMALL].n) {
        uint32_t at = order->lists[SMALL].tail;
        struct kva_block *b = block_of(order, at);

        if (!(b->flags & KVA_VISITED)) {
            b->flags |= KVA_GHOST;
            return at;
        }
        b->flags &= (uint8_t)~KVA_VISITED;
        move_to(order, MAIN, at);
    }
    return KVA_NONE;
}

static uint32_t s3fifo_victim(struct kva_order *order)
{
    struct kva_list *main = &order->lists[MAIN];
    uint32_t at = KVA_NONE;

    if (order->lists[SMALL].units * 100 >= order->limit * SMALL_PERCENT || !main->n)
        at = small_victim(order);
    while (at == KVA_NONE && main->n) {
        struct kva_block *b = block_of(order, main->tail);

        if (!(b->flags & KVA_VISITED))
            return main->tail;
        b->flags &= (uint8_t)~KVA_VISITED;
        move_to(order, MAIN, main->tail);
    }
    return at;
}

/* -- cost -------------------------------------------------------------------------------------- */

/* A miss costs a request, and the blob's bytes: as much as a request for each 256 KiB. */
static const double request_units = 262144.0 / KVA_UNIT;

enum { ONCE, AGAIN };

static unsigned again(const struct kva_order *order, uint32_t at)
{
    return block_of(order, at)->count > 1 ? AGAIN : ONCE;
}

static void cost_add(struct kva_order *order, uint32_t at, enum kva_why why)
{
    if (why != KVA_COLD)
        kva_list_push(order, again(order, at), at);
    else
        kva_list_push_old(order, ONCE, at);
}

static void cost_use(struct kva_order *order, uint32_t at)
{
    move_to(order, again(order, at), at);
}

/* Logarithm of what a blob is worth a byte. */
static double worth(const struct kva_order *order, uint32_t at, uint32_t bonus)
{
    const struct kva_block *b = block_of(order, at);
    double age = (double)(uint32_t)(kva_clock(order->index) - b->stamp) - bonus;
    double units = b->units, span = order->n ? (double)order->n : 1;

    return log2((request_units + units) / units) - age / span;
}

static uint32_t cost_victim(struct kva_order *order)
{
    uint32_t once = order->lists[ONCE].tail, more = order->lists[AGAIN].tail;

    if (once == KVA_NONE || more == KVA_NONE)
        return once == KVA_NONE ? more : once;
    return worth(order, once, 0) <= worth(order, more, order->bonus) ? once : more;
}

/* -- all --------------------------------------------------------------------------------------- */

static const struct kva_policy policies[] = {{"cost", 2, cost_add, cost_use, cost_victim},
                                             {"lru", 1, lru_add, lru_use, lru_victim},
                                             {"lfu", KVA_LISTS, lfu_add, lfu_use, lfu_victim},
                                             {"sieve", 1, sieve_add, visit, sieve_victim},
                                             {"s3fifo", 2, s3fifo_add, visit, s3fifo_victim}};
const char kva_policy_names[] = "cost|lru|lfu|sieve|s3fifo";

const struct kva_policy *kva_policy_find(const char *name)
{
    for (size_t i = 0; i < KV_COUNT(policies); i++)
        if (strcmp(policies[i].name, name) == 0)
            return &policies[i];
    return NULL;
}
