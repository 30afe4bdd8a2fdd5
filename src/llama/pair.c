// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of two caches, for models with sliding windows: layers of full attention, and layers that read
 * the last tokens only. libllama drops cells that no layer can read any more, so a state of n tokens has
 * the second cache's cells of the last tokens alone:
 *
 *     first cache     [  0  ][  1  ][  2  ][  3  ][  4  ][  5  ]░░░   blocks
 *     second cache                  ░░░░░░░[  3  ][  4  ][  5  ]░░░   blocks
 *                                          ▲                    ▲ n
 *     a window of two blocks: a load at the end of block 4 or 5, or
 *     the tail: all of the second cache, and what follows block 5 (░): a load of n tokens, with 0 to 5
 *
 * Blocks of each cache are chained from a root of its own, so saves of one text complete each other. A
 * tail is saved only where the window's beginning is gone, so that no load ends at the last block. It is
 * a state whose first cache begins behind the blocks, stored as a snapshot of its tokens. Which blocks a
 * load needs is the rule of struct kv_cache_group.
 */
#include "base/core/log.h"
#include "llama/cache.h"

/* Keys of the blocks of both caches. */
struct keys {
    uint8_t *of[KVL_CACHES_MAX];
    size_t n;
};

static void keys_fini(struct keys *keys)
{
    for (size_t i = 0; i < KVL_CACHES_MAX; i++)
        free(keys->of[i]);
}

static const uint8_t *root_of(const struct kvl_layout *layout, size_t number)
{
    return number ? layout->second_root : layout->root;
}

/* Make the keys of the whole blocks of @n tokens. Returns 0 or -ENOMEM. */
static int keys_init(struct keys *ret, const struct kvl_cache *c, const struct kvl_layout *layout,
                     const int32_t *tokens, size_t n)
{
    *ret = (struct keys){.n = n / c->block_tokens};
    for (size_t i = 0; i < KVL_CACHES_MAX; i++) {
        ret->of[i] = malloc(KV_MAX(ret->n * KV_PREFIX_KEY, (size_t)1));
        if (!ret->of[i]) {
            keys_fini(ret);
            return -ENOMEM;
        }
        kvl_block_keys(c, root_of(layout, i), tokens, ret->n, ret->of[i]);
    }
    return 0;
}

/* Return the first block of cache @number that a load of @blocks blocks needs. */
static size_t first_of(const struct kvl_cache *c, const struct kvl_layout *layout, size_t number,
                       size_t blocks)
{
    struct kv_cache_group group = number ? kvl_group_of_window(c, layout) : kvl_group_of_all(c);

    return (size_t)kv_cache_group_first(&group, blocks);
}

/* -- find -------------------------------------------------------------------------------------- */

/* Tell which of @n blocks are there. Returns 0 or an error. */
static int look(struct kvl_cache *c, const uint8_t *keys, size_t n, uint8_t *ret)
{
    int rc = kvs_exists(c->store, keys, KV_PREFIX_KEY, n, ret);

    if (rc != -ENOTSUP)
        return KV_MIN(rc, 0);
    for (size_t i = 0; i < n; i++) {
        rc = kvl_is_there(c, keys + i * KV_PREFIX_KEY);
        if (rc < 0)
            return rc;
        ret[i] = rc > 0;
    }
    return 0;
}

/* Find the longest load of at most @blocks blocks. Returns its blocks or an error. */
static int64_t find(struct kvl_cache *c, const struct kvl_layout *layout, const struct keys *keys,
                    size_t blocks)
{
    const struct kv_cache_group group = kvl_group_of_window(c, layout);
    int64_t found = kvl_blocks_present(c, keys->of[0], blocks);
    uint8_t *there;
    int rc;

    if (found <= 0)
        return found;
    there = malloc((size_t)found);
    if (!there)
        return -ENOMEM;
    rc = look(c, keys->of[1], (size_t)found, there);
    if (!rc)
        found = (int64_t)kv_cache_group_longest(&group, there, (uint64_t)found);
    free(there);
    return rc < 0 ? rc : found;
}

/* Return the token with which a tail of @n tokens begins in the first cache: at least one is behind it. */
static size_t tail_first(const struct kvl_cache *c, size_t n)
{
    return (n - 1) / c->block_tokens * c->block_tokens;
}

/* Find the longest tail of at most @n tokens before which all blocks are. Returns its tokens, 0, or an
 * error. */
static int64_t find_tail(struct kvl_cache *c, const struct kvl_layout *layout,
                         const struct keys *keys, const int32_t *tokens, size_t n)
{
    int64_t blocks = kvl_blocks_present(c, keys->of[0], KV_MIN(keys->n, n / c->block_tokens));

    if (blocks < 0)
        return blocks;
    return kvl_snapshot_find(c, layout->tail_root, tokens,
                             KV_MIN(n, ((size_t)blocks + 1) * c->block_tokens));
}

int64_t kvl_pair_find(struct kvl_cache *c, const struct kvl_layout *layout, const int32_t *tokens,
                      size_t n)
{
    struct keys keys;
    int64_t found = keys_init(&keys, c, layout, tokens, n), tail;

    if (found < 0)
        return found;
    found = find(c, layout, &keys, keys.n);
    tail = found < 0 ? found : find_tail(c, layout, &keys, tokens, n);
    keys_fini(&keys);
    return tail < 0 ? tail : KV_MAX(found * c->block_tokens, tail);
}

/* -- save -------------------------------------------------------------------------------------- */

/* Mark the blocks that a load of @blocks needs as used. */
static void touch(struct kvl_cache *c, const struct kvl_layout *layout, const struct keys *keys,
                  size_t blocks)
{
    for (size_t i = 0; i < KVL_CACHES_MAX; i++) {
        size_t first = first_of(c, layout, i, blocks);

        kvl_blocks_touch(c, keys->of[i] + first * KV_PREFIX_KEY, blocks - first);
    }
}

/* Save the tail of a state. Returns its tokens or an error. */
static int64_t save_tail(struct kvl_cache *c, const struct kvl_view views[KVL_CACHES_MAX],
                         const struct kvl_layout *layout, const int32_t *tokens,
                         struct kvl_result *ret)
{
    struct kvl_shape plain = layout->shape; /* both forms share tails, so these have no prefix */
    const struct kvl_shape *shapes[KVL_CACHES_MAX] = {&plain, &layout->second};
    uint32_t n = views[0].n_cells, first[] = {(uint32_t)tail_first(c, n), views[1].first};
    struct kvl_view tail[KVL_CACHES_MAX];
    struct kvl_layout under = *layout;
    int64_t saved;
    int rc;

    plain.form = KVL_FORM_SEQUENCE;
    plain.prefix_len = 0;
    for (size_t i = 0; i < KVL_CACHES_MAX; i++)
        tail[i] = (struct kvl_view){.first = first[i], .n_cells = n - first[i]};
    rc = kvl_views_make(shapes, KVL_CACHES_MAX, 0, tail);
    if (rc)
        return rc;
    for (size_t i = 0; i < KVL_CACHES_MAX; i++)
        kvl_copy_cells(&tail[i], &views[i], first[i], n - first[i]);
    memcpy(under.root, layout->tail_root, sizeof(under.root));
    saved = kvl_snapshot_save(c, &under, tokens, n, tail[0].data, tail[0].len, ret);
    kvl_views_fini(tail, KVL_CACHES_MAX, true);
    return saved;
}

/* Put the blocks of both caches. Returns 0 or an error. */
static int put_blocks(struct kvl_cache *c, const struct kvl_view views[KVL_CACHES_MAX],
                      const struct kvl_layout *layout, const struct keys *keys,
                      const int32_t *tokens, struct kvl_result *ret)
{
    int rc = 0;

    for (size_t i = 0; i < KVL_CACHES_MAX && rc >= 0; i++) {
        size_t whole = ((size_t)views[i].first + c->block_tokens - 1) / c->block_tokens;

        rc = kvl_blocks_put(c, &views[i], root_of(layout, i), keys->of[i], tokens, whole, keys->n,
                            ret);
    }
    return rc;
}

/* Save what isn't in blocks, where a load needs it, and make all durable. Returns as kvl_pair_save. */
static int64_t end_save(struct kvl_cache *c, const struct kvl_view views[KVL_CACHES_MAX],
                        const struct kvl_layout *layout, const struct keys *keys,
                        const int32_t *tokens, size_t n, struct kvl_result *ret)
{
    int64_t found = find(c, layout, keys, keys->n), tail;
    int rc;

    if (found < 0)
        return found;
    if ((size_t)found < keys->n && views[0].n_cells <= n) {
        kvl_blocks_touch(c, keys->of[0], keys->n);
        found = save_tail(c, views, layout, tokens, ret); /* and makes the blocks durable, too */
        ret->blocks = keys->n + 1;
        return found;
    }
    rc = kvl_make_durable(c, layout->is_new || ret->new_blocks);
    if (rc < 0)
        return rc;
    touch(c, layout, keys, (size_t)found);
    ret->blocks = 2 * (uint64_t)found - first_of(c, layout, 1, (size_t)found);
    /* a tail of an earlier save, when fewer blocks of the window were there */
    tail = find_tail(c, layout, keys, tokens, KV_MIN(n, (size_t)views[0].n_cells));
    return tail < 0 ? tail : KV_MAX(found * c->block_tokens, tail);
}

int64_t kvl_pair_save(struct kvl_cache *c, const struct kvl_view views[KVL_CACHES_MAX],
                      const struct kvl_layout *layout, const int32_t *tokens, size_t n,
                      struct kvl_result *ret)
{
    struct keys keys;
    int64_t saved = keys_init(&keys, c, layout, tokens, KV_MIN(n, (size_t)views[0].n_cells));

    if (saved < 0)
        return saved;
    saved = put_blocks(c, views, layout, &keys, tokens, ret);
    if (!saved)
        saved = end_save(c, views, layout, &keys, tokens, n, ret);
    keys_fini(&keys);
    return saved;
}

/* -- load -------------------------------------------------------------------------------------- */

/* Make a state of @n tokens: of the second cache those from @second on. As kvl_views_make. */
static int make(const struct kvl_layout *layout, int32_t seq, size_t n, size_t second,
                struct kvl_view views[KVL_CACHES_MAX])
{
    const struct kvl_shape *shapes[KVL_CACHES_MAX] = {&layout->shape, &layout->second};

    views[0] = (struct kvl_view){.n_cells = (uint32_t)n};
    views[1] = (struct kvl_view){.first = (uint32_t)second, .n_cells = (uint32_t)(n - second)};
    return kvl_views_make(shapes, KVL_CACHES_MAX, seq, views);
}

/* A load that goes on. */
struct load {
    struct kvl_cache *c;
    const struct kvl_layout *layout;
    const struct keys *keys;
    const int32_t *tokens;
    int32_t seq;
    size_t limit; /* tokens: nothing longer can be loaded */
};

/* Read the blocks that a load of @blocks needs. Returns as kvl_blocks_fill. */
static int64_t fill(const struct load *l, size_t blocks, struct kvl_view views[KVL_CACHES_MAX])
{
    int64_t got = (int64_t)blocks;

    for (size_t i = 0; i < KVL_CACHES_MAX && got == (int64_t)blocks; i++) {
        size_t first = first_of(l->c, l->layout, i, blocks);

        kvs_prefetch(l->c->store, l->keys->of[i] + first * KV_PREFIX_KEY, KV_PREFIX_KEY,
                     blocks - first);
        got = kvl_blocks_fill(l->c, &views[i], root_of(l->layout, i), l->keys->of[i], l->tokens,
                              first, blocks);
    }
    return got;
}

/* Load @blocks blocks. Returns 1; 0 and a lower limit: one of them was missing or damaged; an error. */
static int load_blocks(struct load *l, size_t blocks, struct kvl_view ret[KVL_CACHES_MAX],
                       struct kvl_result *result)
{
    size_t first = first_of(l->c, l->layout, 1, blocks), step = l->c->block_tokens;
    int64_t got;
    int rc = make(l->layout, l->seq, blocks * step, first * step, ret);

    if (rc)
        return rc;
    got = fill(l, blocks, ret);
    if (got == (int64_t)blocks) {
        touch(l->c, l->layout, l->keys, blocks);
        *result = (struct kvl_result){.blocks = 2 * blocks - first};
        return 1;
    }
    kvl_views_fini(ret, KVL_CACHES_MAX, true);
    if (got < 0)
        return (int)got;
    l->limit = (size_t)got * step; /* a longer load of at most @blocks needs that one, too */
    return 0;
}

/* Put blocks and a tail of @n tokens together. Returns as load_blocks. */
static int join_tail(struct load *l, const struct kvl_view tail[KVL_CACHES_MAX], size_t n,
                     struct kvl_view ret[KVL_CACHES_MAX])
{
    size_t step = l->c->block_tokens, blocks = tail_first(l->c, n) / step;
    int64_t got;
    int rc = make(l->layout, l->seq, n, tail[1].first, ret);

    if (rc)
        return rc;
    kvs_prefetch(l->c->store, l->keys->of[0], KV_PREFIX_KEY, blocks);
    got = kvl_blocks_fill(l->c, &ret[0], l->layout->root, l->keys->of[0], l->tokens, 0, blocks);
    if (got == (int64_t)blocks) {
        for (size_t i = 0; i < KVL_CACHES_MAX; i++)
            kvl_copy_cells(&ret[i], &tail[i], tail[i].first, tail[i].n_cells);
        kvl_blocks_touch(l->c, l->keys->of[0], blocks);
        return 1;
    }
    kvl_views_fini(ret, KVL_CACHES_MAX, true);
    if (got < 0)
        return (int)got;
    l->limit = ((size_t)got + 1) * step; /* a tail that begins with the bad block may end there */
    return 0;
}

/* Check that a tail is of @n tokens and of this layout. */
static bool is_tail(const struct load *l, const struct kvl_view tail[KVL_CACHES_MAX], size_t n)
{
    return tail[0].first + (size_t)tail[0].n_cells == n &&
           kvl_shape_is_alike(&tail[0].shape, &l->layout->shape) &&
           kvl_shape_is_alike(&tail[1].shape, &l->layout->second);
}

/* Load the tail of @n tokens and the blocks before it. Returns as load_blocks. */
static int load_tail(struct load *l, size_t n, struct kvl_view ret[KVL_CACHES_MAX],
                     struct kvl_result *result)
{
    struct kvl_view tail[KVL_CACHES_MAX];
    uint8_t *state = NULL;
    size_t len = 0;
    int rc = kvl_snapshot_load(l->c, l->layout->tail_root, l->tokens, n, &state, &len), parsed;

    if (rc == 1) {
        parsed = kvl_pair_parse(state, len, KVL_FORM_SEQUENCE, (uint32_t)tail_first(l->c, n), tail);
        rc = parsed == -ENOMEM ? parsed : 0;
        if (!parsed) {
            rc = is_tail(l, tail, n) ? join_tail(l, tail, n, ret) : 0;
            kvl_views_fini(tail, KVL_CACHES_MAX, false);
        }
    }
    free(state);
    if (rc == 1)
        *result = (struct kvl_result){.blocks = tail_first(l->c, n) / l->c->block_tokens + 1,
                                      .snapshot = true};
    else if (!rc)
        l->limit = KV_MIN(l->limit, n - 1);
    return rc;
}

/* Load the longest prefix. Returns its tokens, 0, or an error. */
static int64_t load(struct load *l, struct kvl_view ret[KVL_CACHES_MAX], struct kvl_result *result)
{
    int rc = 0;

    while (!rc && l->limit) {
        int64_t blocks = find(l->c, l->layout, l->keys, l->limit / l->c->block_tokens), tail;

        if (blocks < 0)
            return blocks;
        tail = find_tail(l->c, l->layout, l->keys, l->tokens, l->limit);
        if (tail < 0 || (!tail && !blocks))
            return tail;
        if (tail > blocks * l->c->block_tokens) {
            rc = load_tail(l, (size_t)tail, ret, result);
        } else {
            tail = blocks * l->c->block_tokens;
            rc = load_blocks(l, (size_t)blocks, ret, result);
        }
        if (rc == 1)
            return tail;
    }
    return rc;
}

int64_t kvl_pair_load(struct kvl_cache *c, const struct kvl_layout *layout, int32_t seq,
                      const int32_t *tokens, size_t n, struct kvl_view ret[KVL_CACHES_MAX],
                      struct kvl_result *result)
{
    struct keys keys;
    struct load l = {
        .c = c, .layout = layout, .keys = &keys, .tokens = tokens, .seq = seq, .limit = n};
    int64_t got = keys_init(&keys, c, layout, tokens, n);

    if (got < 0)
        return got;
    got = load(&l, ret, result);
    if (got > 0)
        kvs_touch(c->store, layout->key, KV_PREFIX_KEY, 1);
    keys_fini(&keys);
    return got;
}
