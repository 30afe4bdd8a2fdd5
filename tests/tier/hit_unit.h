// SPDX-License-Identifier: Apache-2.0
/**
 * For tests of hits: a prompt with its blocks in several cache groups, and what a hit needs of them,
 * written out token by token. Include after cmocka.h.
 */
#ifndef KV_TEST_HIT_UNIT_H
#define KV_TEST_HIT_UNIT_H

#include "base/core/error.h"
#include "kvbm_hit.h"
#include "tier/kitchen.h"

enum { GROUPS = 4, BLOCKS = 256, LONG_MS = 100000 };

struct prompt {
    uint32_t n_groups;
    uint64_t keys[BLOCKS]; /* the same in each group: a chain's group tells them apart */
    struct kvbm_chain chains[GROUPS];
    struct kvbm_hit_group groups[GROUPS];
    struct kvbm_hit_blocks need[GROUPS];
    uint8_t where[GROUPS][BLOCKS];
};

/** Begin prompt @number, without groups. */
static inline void prompt_init(struct prompt *p, uint64_t number)
{
    memset(p, 0, sizeof(*p));
    for (uint32_t i = 0; i < BLOCKS; i++)
        p->keys[i] = number * 1000 + i + 1;
}

/** Add a group, of the first @tokens tokens. */
static inline void prompt_add(struct prompt *p, struct kv_cache_group group, uint32_t tokens,
                              bool scattered)
{
    uint32_t i = p->n_groups++;

    assert_true(tokens / group.block_size <= BLOCKS);
    p->chains[i] = (struct kvbm_chain){
        .size = sizeof(struct kvbm_chain), .group = i, .keys = p->keys, .scattered = scattered};
    p->groups[i] = (struct kvbm_hit_group){.group = group,
                                           .chain = &p->chains[i],
                                           .n = tokens / group.block_size,
                                           .where = p->where[i]};
}

/** Return the chain of the blocks of group @i from @first on. */
static inline struct kvbm_chain prompt_chain(const struct prompt *p, uint32_t i, size_t first)
{
    struct kvbm_chain chain = p->chains[i];

    chain.keys = p->keys + first;
    if (first && !chain.scattered) {
        chain.parent = p->keys + first - 1;
        chain.position = (uint32_t)first;
    }
    return chain;
}

/** Return what stands in the bytes of block @block of group @i, for world_fill and world_holds. */
static inline uint64_t prompt_bytes(const struct prompt *p, uint32_t i, size_t block)
{
    return p->keys[block] + ((uint64_t)(i + 1) << 40);
}

/** Store blocks [@first, @end) of group @i. */
static inline void prompt_store(struct world *w, const struct prompt *p, uint32_t i, size_t first,
                                size_t end)
{
    while (first < end) {
        struct kvbm_chain chain = prompt_chain(p, i, first);
        size_t n = KV_MIN(end - first, (size_t)w->n_cache_blocks);
        uint32_t blocks[BLOCKS];

        for (uint32_t k = 0; k < n; k++) {
            blocks[k] = k;
            world_fill(w, k, prompt_bytes(p, i, first + k));
        }
        assert_int_equal(kvbm_cache_store(w->cache, &chain, n, blocks, LONG_MS), n);
        first += n;
    }
}

/** Find the hit of a prompt with options. */
static inline struct kvbm_hit prompt_hit_of(struct world *w, struct prompt *p,
                                            const struct kvbm_hit_opts *opts)
{
    struct kvbm_hit hit = KVBM_HIT_INIT;

    assert_int_equal(kvbm_manager_hit(w->m, p->groups, p->n_groups, opts, &hit, p->need), 0);
    return hit;
}

static inline struct kvbm_hit prompt_hit(struct world *w, struct prompt *p)
{
    return prompt_hit_of(w, p, NULL);
}

/** Ask until nothing that the hit needs is PENDING. */
static inline struct kvbm_hit prompt_settle(struct world *w, struct prompt *p)
{
    struct kvbm_hit hit = prompt_hit(w, p);

    while (hit.pending) {
        assert_true(hit.sure <= hit.tokens);
        usleep(1000);
        hit = prompt_hit(w, p);
    }
    assert_int_equal(hit.sure, hit.tokens);
    return hit;
}

/** Load the blocks of group @i that the hit needs, and compare their bytes. Returns their number. */
static inline size_t prompt_load_group(struct world *w, const struct prompt *p, uint32_t i)
{
    size_t n = p->need[i].n, first = p->need[i].first;
    struct kvbm_chain chain = prompt_chain(p, i, first);
    uint32_t blocks[BLOCKS];

    assert_true(n <= w->n_cache_blocks);
    for (uint32_t k = 0; k < n; k++)
        blocks[k] = k;
    world_wipe(w);
    assert_int_equal(kvbm_cache_load(w->cache, &chain, n, blocks, LONG_MS), n);
    for (uint32_t k = 0; k < n; k++)
        assert_true(world_holds(w, k, prompt_bytes(p, i, first + k)));
    return n;
}

/** Do so for all groups. Returns how many blocks there were. */
static inline size_t prompt_load(struct world *w, const struct prompt *p)
{
    size_t sum = 0;

    for (uint32_t i = 0; i < p->n_groups; i++)
        sum += prompt_load_group(w, p, i);
    return sum;
}

/** Return true when a hit of @n tokens needs the block of token @t. */
static inline bool token_is_needed(const struct kv_cache_group *g, uint64_t n, uint64_t t)
{
    switch (g->needs) {
    case KV_NEEDS_ALL:
        return true;
    case KV_NEEDS_RUN: /* token n attends to itself and the span - 1 tokens before it */
        return n - t < g->span;
    case KV_NEEDS_CHUNK: /* token n attends to its own chunk */
        return t / g->span == n / g->span;
    default:
        return t == n - 1;
    }
}

#endif
