// SPDX-License-Identifier: Apache-2.0
#include "indexer/small.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define NONE UINT32_MAX
#define MIN_BUCKETS 64u

/* An operation as it is applied. */
struct work {
    struct ki_small *s;
    struct kvi_index *index;
    struct kv_holder holder;
    const struct ki_small_group *group;
};

static uint32_t last_part(const struct work *w)
{
    return w->group->source.parts - 1;
}

void ki_small_init(struct ki_small *s)
{
    *s = (struct ki_small){.free_block = NONE, .free_link = NONE};
}

void ki_small_fini(struct ki_small *s)
{
    free(s->blocks);
    free(s->links);
    free(s->buckets);
    ki_small_init(s);
}

void ki_small_clear(struct ki_small *s)
{
    ki_small_fini(s);
}

/* -- the table --------------------------------------------------------------------------------- */

static size_t bucket_of(const struct ki_small *s, uint32_t rank, uint32_t group, uint64_t hash)
{
    uint64_t x = (hash ^ ((uint64_t)rank << 32 | group)) * UINT64_C(0x9e3779b97f4a7c15);

    return (size_t)(x >> 32) & (s->n_buckets - 1);
}

static uint32_t find(const struct work *w, uint64_t hash)
{
    const struct ki_small *s = w->s;
    uint32_t rank = w->holder.rank, group = w->group->source.group, at = NONE;

    if (s->n_buckets)
        at = s->buckets[bucket_of(s, rank, group, hash)];
    while (at != NONE && (s->blocks[at].hash != hash || s->blocks[at].rank != rank ||
                          s->blocks[at].group != group))
        at = s->blocks[at].next;
    return at;
}

static bool grow_buckets(struct ki_small *s)
{
    size_t n = KV_MAX(2 * s->n_buckets, (size_t)MIN_BUCKETS);
    uint32_t *buckets = malloc(n * sizeof(*buckets));

    if (!buckets)
        return false;
    free(s->buckets);
    s->buckets = buckets;
    s->n_buckets = n;
    memset(buckets, 0xff, n * sizeof(*buckets));
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        struct ki_small_block *b = &s->blocks[i];
        size_t at;

        if (!b->used)
            continue;
        at = bucket_of(s, b->rank, b->group, b->hash);
        b->next = buckets[at];
        buckets[at] = i;
    }
    return true;
}

static bool grow(void **items, size_t *capacity, size_t n, size_t bytes)
{
    size_t more = KV_MAX(2 * *capacity, (size_t)MIN_BUCKETS);
    void *grown;

    if (n < *capacity)
        return true;
    grown = realloc(*items, more * bytes);
    if (!grown)
        return false;
    *items = grown;
    *capacity = more;
    return true;
}

/* A new block without copies, or NONE. */
static uint32_t add_block(struct work *w, uint64_t hash, uint64_t above, uint32_t part)
{
    struct ki_small *s = w->s;
    uint32_t at = s->free_block;
    struct ki_small_block *b;
    size_t bucket;

    if (s->n == KI_MAX_SMALL || (s->n >= s->n_buckets && !grow_buckets(s)))
        return NONE;
    if (at == NONE) {
        if (!grow((void **)(void *)&s->blocks, &s->blocks_capacity, s->n_blocks,
                  sizeof(*s->blocks)))
            return NONE;
        at = (uint32_t)s->n_blocks++;
    } else {
        s->free_block = s->blocks[at].next;
    }
    bucket = bucket_of(s, w->holder.rank, w->group->source.group, hash);
    b = &s->blocks[at];
    *b = (struct ki_small_block){.hash = hash,
                                 .above = above,
                                 .rank = w->holder.rank,
                                 .group = w->group->source.group,
                                 .links = NONE,
                                 .next = s->buckets[bucket],
                                 .part = (uint8_t)part,
                                 .whole = part == last_part(w),
                                 .used = true};
    s->buckets[bucket] = at;
    s->n++;
    s->n_whole += b->whole;
    return at;
}

static void free_block(struct ki_small *s, uint32_t at)
{
    struct ki_small_block *b = &s->blocks[at];
    uint32_t *from = &s->buckets[bucket_of(s, b->rank, b->group, b->hash)];

    while (*from != at)
        from = &s->blocks[*from].next;
    *from = b->next;
    b->used = false;
    s->n_whole -= b->whole;
    b->next = s->free_block;
    s->free_block = at;
    s->n--;
}

/* Returns false for want of memory. */
static bool add_link(struct ki_small *s, uint32_t part, uint32_t whole)
{
    uint32_t at = s->free_link;

    if (at == NONE) {
        if (!grow((void **)(void *)&s->links, &s->links_capacity, s->n_links, sizeof(*s->links)))
            return false;
        at = (uint32_t)s->n_links++;
    } else {
        s->free_link = s->links[at].next_of_whole;
    }
    s->links[at] = (struct ki_small_link){.part = part,
                                          .whole = whole,
                                          .next_of_part = s->blocks[part].links,
                                          .next_of_whole = s->blocks[whole].links};
    s->blocks[part].links = s->blocks[whole].links = at;
    return true;
}

static bool is_linked(const struct ki_small *s, uint32_t part, uint32_t whole)
{
    uint32_t at = s->blocks[whole].links;

    while (at != NONE && s->links[at].part != part)
        at = s->links[at].next_of_whole;
    return at != NONE;
}

static void free_unused(struct ki_small *s, uint32_t at)
{
    const struct ki_small_block *b = &s->blocks[at];

    if (!b->copies && b->links == NONE)
        free_block(s, at);
}

/* Remove the links of a registered block, and parts that nothing needs any more. */
static void unlink_whole(struct ki_small *s, uint32_t whole)
{
    uint32_t at = s->blocks[whole].links, next;

    for (; at != NONE; at = next) {
        uint32_t part = s->links[at].part, *from = &s->blocks[part].links;

        next = s->links[at].next_of_whole;
        while (*from != at)
            from = &s->links[*from].next_of_part;
        *from = s->links[at].next_of_part;
        s->links[at].next_of_whole = s->free_link;
        s->free_link = at;
        free_unused(s, part);
    }
    s->blocks[whole].links = NONE;
    free_unused(s, whole);
}

void ki_small_clear_rank(struct ki_small *s, uint32_t rank)
{
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        if (!s->blocks[i].used || s->blocks[i].rank != rank)
            continue;
        s->blocks[i].copies = 0;
    }
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (s->blocks[i].used && s->blocks[i].rank == rank && s->blocks[i].whole)
            unlink_whole(s, i);
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (s->blocks[i].used && s->blocks[i].rank == rank)
            free_unused(s, i);
}

/* -- the index --------------------------------------------------------------------------------- */

/* Put the registered block into the window of a part, or take it out. */
static int put(const struct work *w, uint64_t whole, uint32_t part, bool in)
{
    static const uint32_t none;
    long rc;

    if (in)
        return kvi_window_add(w->index, w->holder, KV_TIER_DEVICE, w->group->numbers[part], 0,
                              false, &whole, 1);
    rc = kvi_window_take(w->index, w->holder, KV_TIER_DEVICE, w->group->numbers[part], 0, &whole,
                         &none, 1);
    return rc < 0 ? (int)rc : 0;
}

/* Put all registered blocks that have this part into its window, or take them out. */
static int put_all(const struct work *w, uint32_t at, bool in)
{
    const struct ki_small *s = w->s;
    const struct ki_small_block *b = &s->blocks[at];
    int rc = 0;

    if (b->whole)
        return put(w, b->hash, b->part, in);
    for (uint32_t link = b->links; link != NONE && !rc; link = s->links[link].next_of_part)
        rc = put(w, s->blocks[s->links[link].whole].hash, b->part, in);
    return rc;
}

/* -- stores ------------------------------------------------------------------------------------ */

/* The part with which the operation's blocks begin, or -ENOENT when nothing tells it. */
static int first_part(const struct work *w, const struct kve_op *op)
{
    struct kvi_block_info info;
    uint32_t at;

    if (!op->has_parent)
        return 0;
    at = find(w, op->parent);
    if (at != NONE)
        return (int)((w->s->blocks[at].part + 1) % w->group->source.parts);
    /* Without block drop and lookahead a group caches as many blocks as make up registered ones. */
    if ((!w->group->drops && !op->lookahead) ||
        kvi_get_block(w->index, w->holder, KV_TIER_DEVICE, op->parent, &info) == 0)
        return 0;
    return -ENOENT;
}

/* Whether vLLM caches block @i behind the first one: others can't serve a match. */
static bool is_reachable(const struct work *w, const struct kve_op *op, uint32_t first, size_t i)
{
    uint32_t parts = w->group->source.parts, drop = w->group->drops;
    uint64_t need = (uint64_t)w->group->source.need + drop;

    if (need >= parts)
        return true;
    if (drop && !op->has_parent && !i)
        return false;
    return (first + i + parts - drop) % parts >= parts - need;
}

/* One copy more of a block. Returns 0 and *@ret, or an error. */
static int gain(struct work *w, uint64_t hash, uint64_t above, uint32_t part, uint32_t *ret)
{
    uint32_t at = find(w, hash);

    if (at == NONE)
        at = add_block(w, hash, above, part);
    if (at == NONE)
        return -ENOMEM;
    *ret = at;
    return w->s->blocks[at].copies++ ? 0 : put_all(w, at, true);
}

static int link_parts(struct work *w, const uint32_t *parts, uint32_t whole)
{
    struct ki_small *s = w->s;
    int rc = 0;

    for (uint32_t i = 0; i < last_part(w) && !rc; i++) {
        if (parts[i] == NONE || is_linked(s, parts[i], whole))
            continue;
        if (!add_link(s, parts[i], whole))
            return -ENOMEM;
        if (s->blocks[parts[i]].copies)
            rc = put(w, s->blocks[whole].hash, i, true);
    }
    return rc;
}

/* The parts of the registered block in whose middle the operation begins. Returns false when one of them
 * isn't known. */
static bool find_parts(const struct work *w, const struct kve_op *op, uint32_t first,
                       uint32_t *parts)
{
    uint64_t hash = op->parent;

    memset(parts, 0xff, KVE_MAX_PARTS * sizeof(*parts));
    for (uint32_t i = first; i-- > 0;) {
        parts[i] = find(w, hash);
        if (parts[i] == NONE)
            return !is_reachable(w, op, 0, i);
        hash = w->s->blocks[parts[i]].above;
    }
    return true;
}

static int store(struct work *w, const struct kve_op *op)
{
    uint32_t parts[KVE_MAX_PARTS], n_parts = w->group->source.parts;
    uint64_t above = op->has_parent ? op->parent : 0;
    int first = first_part(w, op), rc = 0;
    size_t n = 0, named = 0;

    for (size_t i = 0; first >= 0 && i < op->n_covered; i++)
        n += is_reachable(w, op, (uint32_t)first, i);
    if (first < 0 || (op->n != n && op->n != op->n_covered) ||
        !find_parts(w, op, (uint32_t)first, parts))
        return -ENOENT;
    for (size_t i = 0; i < op->n_covered && !rc; i++) {
        uint32_t part = (uint32_t)((size_t)first + i) % n_parts;

        if (!part)
            memset(parts, 0xff, sizeof(parts));
        if (op->n != op->n_covered && !is_reachable(w, op, (uint32_t)first, i)) {
            above = 0;
            continue;
        }
        rc = gain(w, op->hashes[named], part ? above : 0, part, &parts[part]);
        above = op->hashes[named++];
        if (!rc && part == n_parts - 1)
            rc = link_parts(w, parts, parts[part]);
    }
    return rc;
}

int ki_small_store(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                   const struct ki_small_group *group, const struct kve_op *op)
{
    struct work w = {.s = s, .index = index, .holder = holder, .group = group};
    int rc = store(&w, op);

    s->lost |= rc < 0;
    return rc == -ENOENT ? 0 : rc;
}

/* -- removals ---------------------------------------------------------------------------------- */

/* Whether a match may need parts of a registered block that the group itself hasn't: with block drop it
 * looks at one part beyond the match. */
static bool may_peek(const struct work *w, uint64_t whole)
{
    struct kvi_block_info info;

    return w->group->drops && kvi_get_block(w->index, w->holder, KV_TIER_DEVICE, whole, &info) == 0;
}

/* Forget the parts of a registered block that the group hasn't any more. */
static int forget_parts(struct work *w, uint32_t whole)
{
    const struct ki_small *s = w->s;
    int rc = 0;

    for (uint32_t link = s->blocks[whole].links; link != NONE && !rc;
         link = s->links[link].next_of_whole) {
        const struct ki_small_block *part = &s->blocks[s->links[link].part];

        if (part->copies)
            rc = put(w, s->blocks[whole].hash, part->part, false);
    }
    unlink_whole(w->s, whole);
    return rc;
}

/* The last copy of a block is gone. */
static int lose(struct work *w, uint32_t at)
{
    struct ki_small *s = w->s;
    int rc = put_all(w, at, false);

    if (!s->blocks[at].whole)
        free_unused(s, at);
    else if (!may_peek(w, s->blocks[at].hash) && !rc)
        rc = forget_parts(w, at);
    return rc;
}

int ki_small_forget(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                    const struct ki_small_group *group, const uint64_t *hashes, size_t n)
{
    struct work w = {.s = s, .index = index, .holder = holder, .group = group};
    int rc = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t at = find(&w, hashes[i]);

        if (at != NONE && s->blocks[at].whole && !s->blocks[at].copies && !rc &&
            !may_peek(&w, hashes[i]))
            rc = forget_parts(&w, at);
    }
    s->lost |= rc < 0;
    return rc;
}

int ki_small_take(struct ki_small *s, struct kvi_index *index, struct kv_holder holder,
                  const struct ki_small_group *group, const struct kve_op *op)
{
    struct work w = {.s = s, .index = index, .holder = holder, .group = group};
    int result = 0;

    for (size_t i = 0; i < op->n; i++) {
        uint32_t at = find(&w, op->hashes[i]);
        int rc;

        if (at == NONE || !s->blocks[at].copies)
            continue;
        s->blocks[at].copies = op->remaining ? op->remaining[i] : s->blocks[at].copies - 1;
        rc = s->blocks[at].copies ? 0 : lose(&w, at);
        if (rc < 0)
            result = rc;
    }
    s->lost |= result < 0;
    return result;
}
