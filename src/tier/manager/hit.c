// SPDX-License-Identifier: Apache-2.0
/*
 * The longest hit of several cache groups.
 *
 *   full attention   forward from the first block to the first miss: no hit is longer
 *   other groups     downward from the hit that may be, over the blocks that it needs:
 *
 *       first       miss         end                  all there: the next group
 *         ▼          ▼            ▼                   a miss: every shorter hit needs that block, too,
 *         [ there? ][ ][  there  ]                    unless it ends before the block. So go on there,
 *                   ▲                                 with the first group
 *                   the next hit that may be
 *
 * The array `from` keeps how far down from the end a group's blocks are known to be there. So each block
 * is tested once in a search, however often the hit that may be falls.
 *
 * The search runs twice when blocks are PENDING: first they count as there, then as misses. Places are
 * looked up when the search comes to them, KVBM_LOOK at a time, and kept in the caller's arrays.
 */
#include <errno.h>

#include "base/core/cache_group.h"
#include "base/core/error.h"
#include "kvbm_hit.h"
#include "tier/manager/state/manager.h"
#include "tier/manager/where.h"

struct search {
    struct kvbm_look looks[KVBM_MAX_GROUPS]; /* a lookup in each manager, ordered by address */
    size_t n_looks;
    uint8_t in[KVBM_MAX_GROUPS]; /* of each group: its manager's lookup */
    const struct kvbm_hit_group *groups;
    size_t n_groups;
    uint64_t computed;
    uint32_t unit;
    bool sure;                    /* PENDING counts as a miss */
    size_t from[KVBM_MAX_GROUPS]; /* blocks from here to the end of the hit that may be are there */
};

/* ---- the formula ---- */

/* Return the blocks of a group that a hit of @tokens needs beyond @computed ones. */
static struct kvbm_hit_blocks needed(const struct kv_cache_group *group, uint64_t tokens,
                                     uint64_t computed)
{
    uint64_t end = tokens / group->block_size,
             first = KV_MAX(kv_cache_group_first(group, end), computed / group->block_size);

    first = KV_MIN(first, end);
    return (struct kvbm_hit_blocks){.first = first, .n = end - first};
}

int kvbm_hit_needs(const struct kv_cache_group *group, uint64_t tokens, uint64_t computed,
                   struct kvbm_hit_blocks *ret)
{
    if (!group || !ret || !kv_cache_group_is_valid(group) || tokens % group->block_size)
        return -EINVAL;
    *ret = needed(group, tokens, computed);
    return 0;
}

/* ---- places ---- */

static bool is_there(const struct search *s, uint8_t where)
{
    return where != KVBM_MISS && !(s->sure && where == KVBM_PENDING);
}

/* Look at @n blocks of a group from @i on. */
static void look(struct search *s, const struct kvbm_hit_group *g, size_t i, uint32_t n,
                 bool past_gaps)
{
    struct kvbm_look *in = &s->looks[s->in[g - s->groups]];

    kvbm_look_in(in, g->chain, past_gaps);
    kvbm_look_at(in, i, n);
    memcpy(g->where + i, in->at, n);
}

/* Return whether a block is there. Looks at those before it, too: shorter hits need these. */
static bool has(struct search *s, const struct kvbm_hit_group *g, size_t block)
{
    size_t least = (size_t)(s->computed / g->group.block_size), i = block;

    if (g->where[block] == KVBM_NOT_LOOKED) {
        while (i > least && block - i + 1 < KVBM_LOOK && g->where[i - 1] == KVBM_NOT_LOOKED)
            i--;
        look(s, g, i, (uint32_t)(block - i + 1), true);
    }
    return is_there(s, g->where[block]);
}

/* Return the tokens before the first block below @tokens that a group of full attention lacks. */
static uint64_t serve_full(struct search *s, const struct kvbm_hit_group *g, uint64_t tokens)
{
    struct kvbm_hit_blocks need = needed(&g->group, tokens, s->computed);
    size_t end = need.first + need.n;

    for (size_t i = need.first; i < end; i++) {
        if (g->where[i] == KVBM_NOT_LOOKED)
            look(s, g, i, (uint32_t)KV_MIN(end - i, (size_t)KVBM_LOOK), false);
        if (!is_there(s, g->where[i]))
            return (uint64_t)i * g->group.block_size;
    }
    return tokens;
}

/* Return @tokens, or where to go on: at the start of the last block that the group needs and lacks. */
static uint64_t serve(struct search *s, size_t number, uint64_t tokens)
{
    const struct kvbm_hit_group *g = &s->groups[number];
    struct kvbm_hit_blocks need = needed(&g->group, tokens, s->computed);
    size_t *from = &s->from[number];

    *from = KV_MIN(*from, need.first + need.n);
    while (*from > need.first) {
        --*from;
        if (!has(s, g, *from))
            return (uint64_t)*from * g->group.block_size;
    }
    return tokens;
}

/* Return the longest hit of at most @tokens. */
static uint64_t search(struct search *s, uint64_t tokens, bool sure)
{
    s->sure = sure;
    for (size_t i = 0; i < s->n_groups; i++) {
        s->from[i] = SIZE_MAX;
        if (s->groups[i].group.needs == KV_NEEDS_ALL)
            tokens = serve_full(s, &s->groups[i], tokens - tokens % s->unit);
    }
    tokens -= tokens % s->unit;
    for (size_t i = 0; i < s->n_groups && tokens > s->computed;) {
        uint64_t served = s->groups[i].group.needs == KV_NEEDS_ALL ? tokens : serve(s, i, tokens);

        i = served < tokens ? 0 : i + 1;
        tokens = served - served % s->unit;
    }
    return KV_MAX(tokens, s->computed);
}

/* Check the arguments and find the unit. Returns 0 or -EINVAL. */
static int begin(struct search *s, const struct kvbm_hit_opts *opts)
{
    uint32_t least = 1;

    for (size_t i = 0; i < s->n_groups; i++) {
        const struct kvbm_hit_group *g = &s->groups[i];

        if (!kv_cache_group_is_valid(&g->group) || !kvbm_look_is_valid(g->chain, g->n) ||
            g->chain->parent || g->n > UINT32_MAX || (g->n && !g->where))
            return -EINVAL;
        least = kv_common_multiple(least, g->group.block_size);
        if (!least)
            return -EINVAL;
    }
    s->computed = KV_OPT(opts, computed, 0);
    s->unit = KV_OPT(opts, unit, least);
    return s->unit % least ? -EINVAL : 0;
}

/* ---- managers ---- */

/* Note a manager, in the order in which they are locked. Returns 0, or why calls may not use it. */
static int add_manager(struct search *s, struct kvbm_manager *m)
{
    size_t at = s->n_looks;
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    while (at && (uintptr_t)s->looks[at - 1].m > (uintptr_t)m)
        at--;
    if (at && s->looks[at - 1].m == m)
        return 0;
    memmove(&s->looks[at + 1], &s->looks[at], (s->n_looks - at) * sizeof(s->looks[0]));
    s->looks[at].m = m;
    s->n_looks++;
    return 0;
}

/* Find the managers of all groups; @m has those of groups that name none. */
static int find_managers(struct search *s, struct kvbm_manager *m)
{
    int rc = 0;

    for (size_t i = 0; i < s->n_groups && !rc; i++)
        rc = add_manager(s, s->groups[i].manager ? s->groups[i].manager : m);
    for (size_t i = 0; i < s->n_groups && !rc; i++) {
        const struct kvbm_manager *of = s->groups[i].manager ? s->groups[i].manager : m;

        while (s->looks[s->in[i]].m != of)
            s->in[i]++;
    }
    return rc;
}

/*
 * Lock all managers: one hold of all locks, so that all places are of one moment. Every call takes them
 * in the order of their addresses, and nothing else holds two.
 */
static void enter_all(struct search *s)
{
    for (size_t i = 0; i < s->n_looks; i++)
        kvbm_manager_enter(s->looks[i].m);
    for (size_t i = 0; i < s->n_looks; i++)
        kvbm_look_begin(&s->looks[i], s->looks[i].m, false);
}

static void leave_all(const struct search *s)
{
    for (size_t i = s->n_looks; i-- > 0;)
        kvbm_manager_leave(s->looks[i].m);
}

/* ---- the call ---- */

/* Return the tokens up to which all groups have keys, at most @limit. */
static uint64_t tokens_of(const struct search *s, uint64_t limit)
{
    uint64_t tokens = limit;

    for (size_t i = 0; i < s->n_groups; i++)
        tokens = KV_MIN(tokens, (uint64_t)s->groups[i].n * s->groups[i].group.block_size);
    return tokens;
}

/* Tell the blocks that the hit needs. Returns how many of them are PENDING. */
static uint64_t tell(const struct search *s, uint64_t tokens, struct kvbm_hit_blocks *ret)
{
    uint64_t pending = 0;

    for (size_t i = 0; i < s->n_groups; i++) {
        const struct kvbm_hit_group *g = &s->groups[i];
        struct kvbm_hit_blocks need = needed(&g->group, tokens, s->computed);

        for (size_t k = 0; k < need.n; k++)
            pending += g->where[need.first + k] == KVBM_PENDING;
        if (ret)
            ret[i] = need;
    }
    return pending;
}

int kvbm_manager_hit(struct kvbm_manager *m, const struct kvbm_hit_group *groups, size_t n_groups,
                     const struct kvbm_hit_opts *opts, struct kvbm_hit *ret,
                     struct kvbm_hit_blocks *ret_blocks)
{
    struct search s = {.groups = groups, .n_groups = n_groups};
    struct kvbm_hit hit = {.size = sizeof(hit)};
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    if (!groups || !n_groups || n_groups > KVBM_MAX_GROUPS || !kv_sized(ret, "kvbm_hit") ||
        !kv_sized_or_null(opts, "kvbm_hit_opts") || begin(&s, opts) < 0)
        return -EINVAL;
    rc = find_managers(&s, m);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n_groups; i++)
        if (groups[i].n)
            memset(groups[i].where, KVBM_NOT_LOOKED, groups[i].n);
    enter_all(&s);
    hit.tokens = search(&s, tokens_of(&s, KV_OPT(opts, limit, UINT64_MAX)), false);
    hit.pending = tell(&s, hit.tokens, ret_blocks);
    hit.sure = hit.pending ? search(&s, hit.tokens, true) : hit.tokens;
    leave_all(&s);
    KV_GIVE(ret, &hit);
    return 0;
}
