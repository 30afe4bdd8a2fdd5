// SPDX-License-Identifier: Apache-2.0
/* kvbm_bench's yardstick: a simple pool. A chained hash table of malloc'ed nodes, one block each.
 * Inactive ones are in a doubly linked list (LRU), or in a binary heap by time of release, as a
 * policy beyond arrival order needs. One lock per call. No detection of stale handles, no tiers,
 * priorities, duplicates, parents or counters. */
#ifndef KV_BENCH_KVBM_NAIVE_H
#define KV_BENCH_KVBM_NAIVE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct naive_node {
    uint64_t key, tick;
    struct naive_node *chain;
    struct naive_node *prev, *next; /* in the list */
    size_t at;                      /* in the heap */
    uint32_t block, refs;
};

struct naive {
    pthread_mutex_t lock;
    struct naive_node **buckets;
    size_t mask;
    struct naive_node head; /* of the list, a ring */
    bool ordered;
    struct naive_node **heap;
    size_t n_heap;
    uint64_t tick;
    uint32_t *free;
    size_t n_free;
};

static inline void naive_init(struct naive *pool, uint32_t n_blocks, bool ordered)
{
    size_t n = 1;

    while (n < (size_t)n_blocks * 4 / 3)
        n *= 2;
    *pool = (struct naive){.mask = n - 1, .ordered = ordered, .n_free = n_blocks};
    pthread_mutex_init(&pool->lock, NULL);
    pool->buckets = calloc(n, sizeof(*pool->buckets));
    pool->free = malloc(n_blocks * sizeof(*pool->free));
    pool->heap = ordered ? malloc((n_blocks + 1) * sizeof(struct naive_node *)) : NULL;
    if (!pool->buckets || !pool->free || (ordered && !pool->heap))
        abort();
    for (uint32_t i = 0; i < n_blocks; i++)
        pool->free[i] = n_blocks - 1 - i;
    pool->head.prev = pool->head.next = &pool->head;
}

static inline void naive_fini(struct naive *pool)
{
    for (size_t i = 0; i <= pool->mask; i++) {
        for (struct naive_node *node = pool->buckets[i], *next; node; node = next) {
            next = node->chain;
            free(node);
        }
    }
    free(pool->buckets);
    free(pool->free);
    free(pool->heap);
    pthread_mutex_destroy(&pool->lock);
}

/* Keys are random, so their low bits choose the bucket. */
static inline struct naive_node **naive_find(struct naive *pool, uint64_t key)
{
    struct naive_node **at = &pool->buckets[key & pool->mask];

    while (*at && (*at)->key != key)
        at = &(*at)->chain;
    return at;
}

static inline void naive_place(struct naive *pool, struct naive_node *node, size_t at)
{
    pool->heap[at] = node;
    node->at = at;
}

static inline void naive_sift(struct naive *pool, struct naive_node *node, size_t at)
{
    for (; at > 1 && pool->heap[at / 2]->tick > node->tick; at /= 2)
        naive_place(pool, pool->heap[at / 2], at);
    for (size_t child; (child = 2 * at) <= pool->n_heap; at = child) {
        if (child < pool->n_heap && pool->heap[child + 1]->tick < pool->heap[child]->tick)
            child++;
        if (pool->heap[child]->tick >= node->tick)
            break;
        naive_place(pool, pool->heap[child], at);
    }
    naive_place(pool, node, at);
}

static inline void naive_insert(struct naive *pool, struct naive_node *node)
{
    node->tick = ++pool->tick;
    if (pool->ordered) {
        naive_sift(pool, node, ++pool->n_heap);
        return;
    }
    node->prev = pool->head.prev;
    node->next = &pool->head;
    node->prev->next = pool->head.prev = node;
}

static inline void naive_remove(struct naive *pool, struct naive_node *node)
{
    if (pool->ordered) {
        struct naive_node *last = pool->heap[pool->n_heap--];

        if (last != node)
            naive_sift(pool, last, node->at);
        return;
    }
    node->prev->next = node->next;
    node->next->prev = node->prev;
}

static inline uint32_t naive_evict(struct naive *pool)
{
    struct naive_node *node = pool->ordered ? pool->heap[1] : pool->head.next;
    uint32_t block = node->block;

    naive_remove(pool, node);
    *naive_find(pool, node->key) = node->chain;
    free(node);
    return block;
}

static inline void naive_allocate(struct naive *pool, size_t n, uint32_t *ret)
{
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < n; i++)
        ret[i] = pool->n_free ? pool->free[--pool->n_free] : naive_evict(pool);
    pthread_mutex_unlock(&pool->lock);
}

static inline void naive_register(struct naive *pool, const uint64_t *keys, size_t n,
                                  const uint32_t *blocks, struct naive_node **ret)
{
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < n; i++) {
        struct naive_node **at = naive_find(pool, keys[i]), *node = malloc(sizeof(*node));

        if (!node || *at)
            abort();
        *node = (struct naive_node){.key = keys[i], .block = blocks[i], .refs = 1};
        *at = ret[i] = node;
    }
    pthread_mutex_unlock(&pool->lock);
}

static inline void naive_release(struct naive *pool, struct naive_node **nodes, size_t n)
{
    pthread_mutex_lock(&pool->lock);
    for (size_t i = n; i-- > 0;) {
        if (--nodes[i]->refs == 0)
            naive_insert(pool, nodes[i]);
    }
    pthread_mutex_unlock(&pool->lock);
}

static inline size_t naive_match(struct naive *pool, const uint64_t *keys, size_t n,
                                 struct naive_node **ret)
{
    size_t i;

    pthread_mutex_lock(&pool->lock);
    for (i = 0; i < n; i++) {
        struct naive_node *node = *naive_find(pool, keys[i]);

        if (!node)
            break;
        if (node->refs++ == 0)
            naive_remove(pool, node);
        ret[i] = node;
    }
    pthread_mutex_unlock(&pool->lock);
    return i;
}

#endif
