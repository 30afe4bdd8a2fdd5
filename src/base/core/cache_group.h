// SPDX-License-Identifier: Apache-2.0
/** Cache groups: the formula of struct kv_cache_group, which blocks of a group a hit needs. */
#ifndef KV_BASE_CACHE_GROUP_H
#define KV_BASE_CACHE_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "kv_types.h"

/** Return the least common multiple of two numbers above 0; 0: it has more than 32 bits. */
static inline uint32_t kv_common_multiple(uint32_t a, uint32_t b)
{
    uint64_t x = a, y = b, rest, multiple;

    for (; y; x = y, y = rest)
        rest = x % y;
    multiple = a / x * b;
    return multiple <= UINT32_MAX ? (uint32_t)multiple : 0;
}

/** Compute ceil((window - 1) / block): the blocks before a block's end that attention reads there. */
static inline uint64_t kv_window_blocks(uint64_t window, uint64_t block)
{
    return window > 1 ? (window - 2) / block + 1 : 0;
}

/**
 * The one table of kinds: return the first unit that a hit behind unit @l needs. @span: units of a RUN
 * before the hit's end, or of a CHUNK, 1 or more; else ignored. A unit is whatever the caller counts in.
 */
static inline uint64_t kv_needs_first(enum kv_needs needs, uint64_t span, uint64_t l)
{
    switch (needs) {
    case KV_NEEDS_RUN:
        return l > span ? l - span : 0;
    case KV_NEEDS_STATE:
        return l ? l - 1 : 0;
    case KV_NEEDS_CHUNK:
        return l - l % span;
    case KV_NEEDS_ALL:
        break;
    }
    return 0;
}

/** Return true for a group that can be: a known kind, with a block size and the span that it needs. */
static inline bool kv_cache_group_is_valid(const struct kv_cache_group *group)
{
    switch (group->needs) {
    case KV_NEEDS_RUN:
    case KV_NEEDS_CHUNK:
        return group->block_size && group->span;
    case KV_NEEDS_STATE:
    case KV_NEEDS_ALL:
        return group->block_size;
    default: /* of a caller with other headers */
        return false;
    }
}

/** Return the first block of a valid group that a hit behind its block @l needs; @l: none is needed. */
static inline uint64_t kv_cache_group_first(const struct kv_cache_group *group, uint64_t l)
{
    uint64_t span = group->span, block = group->block_size;

    if (group->needs == KV_NEEDS_CHUNK) /* which may begin inside of a block */
        return kv_needs_first(KV_NEEDS_CHUNK, span, l * block) / block;
    return kv_needs_first(group->needs, kv_window_blocks(span, block), l);
}

/**
 * Return the longest hit of at most @l blocks of a valid group, in blocks. @there: which of the first @l
 * blocks there are.
 *
 *     first   miss      l          the walk tests blocks from l down to the first that a hit at l needs
 *       ▼      ▼        ▼
 *       [there][ ][there]          a miss: each shorter hit that ends behind the block needs it, too.
 *              ▲                   The next hit that may be ends where the block begins
 */
static inline uint64_t kv_cache_group_longest(const struct kv_cache_group *group,
                                              const uint8_t *there, uint64_t l)
{
    uint64_t at = l;

    while (at > kv_cache_group_first(group, l)) {
        at--;
        if (!there[at])
            l = at;
    }
    return l;
}

#endif
