// SPDX-License-Identifier: Apache-2.0
#include "indexer/model/chunks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"

void ki_chunks_init(struct ki_chunks *c)
{
    *c = (struct ki_chunks){.items = NULL};
    pthread_rwlock_init(&c->lock, NULL);
    atomic_init(&c->n, 0);
}

void ki_chunks_fini(struct ki_chunks *c)
{
    pthread_rwlock_destroy(&c->lock);
    free(c->items);
}

static size_t length(struct ki_chunks *c)
{
    return atomic_load_explicit(&c->n, memory_order_relaxed);
}

static bool is_before(const struct kv_holder *a, const struct kv_holder *b)
{
    return a->worker != b->worker ? a->worker < b->worker : a->rank < b->rank;
}

/* Return the number of items before @holder's, under the lock. */
static size_t place_of(struct ki_chunks *c, const struct kv_holder *holder)
{
    size_t low = 0, high = length(c);

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (is_before(&c->items[middle].holder, holder))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(struct ki_chunks *c, size_t at, const struct kv_holder *holder)
{
    return at < length(c) && !is_before(holder, &c->items[at].holder);
}

static bool has_room(struct ki_chunks *c)
{
    size_t more = KV_MAX(2 * c->capacity, (size_t)4);
    struct ki_chunk *grown;

    if (length(c) < c->capacity)
        return true;
    grown = realloc(c->items, more * sizeof(*grown));
    if (!grown)
        return false;
    c->items = grown;
    c->capacity = more;
    return true;
}

/* Set or, where nothing has a chunk, remove an item, under the lock. */
static int set(struct ki_chunks *c, struct kv_holder holder, const uint32_t blocks[KV_N_TIERS])
{
    size_t at = place_of(c, &holder), n = length(c);
    bool known = is_at(c, at, &holder), any = false;

    for (int t = 0; t < KV_N_TIERS; t++)
        any |= blocks[t] > 1;
    if (!any && known) {
        memmove(c->items + at, c->items + at + 1, (n - at - 1) * sizeof(c->items[0]));
        atomic_store_explicit(&c->n, n - 1, memory_order_relaxed);
    }
    if (!any)
        return 0;
    if (!known) {
        if (!has_room(c))
            return -ENOMEM;
        memmove(c->items + at + 1, c->items + at, (n - at) * sizeof(c->items[0]));
        c->items[at].holder = holder;
        atomic_store_explicit(&c->n, n + 1, memory_order_relaxed);
    }
    memcpy(c->items[at].blocks, blocks, sizeof(c->items[at].blocks));
    return 0;
}

int ki_chunks_set(struct ki_chunks *c, struct kv_holder holder, const uint32_t blocks[KV_N_TIERS])
{
    int rc;

    pthread_rwlock_wrlock(&c->lock);
    rc = set(c, holder, blocks);
    pthread_rwlock_unlock(&c->lock);
    return rc;
}

/* A tier's reach includes the blocks of nearer tiers: of those it has what is left of them. */
static void cut(const struct ki_chunk *chunk, uint32_t reach[KV_N_TIERS])
{
    uint32_t nearer = reach[0];

    for (int t = 1; t < KV_N_TIERS; t++) {
        uint32_t all = reach[t];

        if (all == nearer)
            reach[t] = 0;
        else if (chunk->blocks[t] > 1)
            reach[t] -= all % chunk->blocks[t];
        reach[t] = KV_MAX(reach[t], reach[t - 1]);
        nearer = all;
    }
}

void ki_chunks_cut(struct ki_chunks *c, struct kvi_matches *matches)
{
    size_t kept = 0;

    if (KV_LIKELY(!length(c)))
        return;
    pthread_rwlock_rdlock(&c->lock);
    for (size_t i = 0; i < matches->n; i++) {
        struct kvi_match *m = &matches->items[i];
        size_t at = place_of(c, &m->holder);

        if (is_at(c, at, &m->holder))
            cut(&c->items[at], m->reach);
        if (m->reach[KV_N_TIERS - 1])
            matches->items[kept++] = *m;
    }
    matches->n = kept;
    pthread_rwlock_unlock(&c->lock);
}
