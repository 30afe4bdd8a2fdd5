// SPDX-License-Identifier: Apache-2.0
/* The public calls: which layouts to look at, and what libllama is asked and given. */
#include "base/core/log.h"
#include "llama/cache.h"

enum { REFUSED_MAX = 4 }; /* snapshots of one layout that a load reads in vain */

/* A stored prefix: tokens of it under one layout. */
struct candidate {
    const struct kvl_layout *layout;
    int64_t tokens;
};

static bool are_tokens(const int32_t *tokens, size_t n)
{
    return (tokens || !n) && n <= KVL_TOKENS_MAX;
}

/* Count the tokens before the first negative one: images and other media, whose K and V no token names. */
static size_t n_known(const int32_t *tokens, size_t n)
{
    size_t i = 0;

    while (i < n && tokens[i] >= 0)
        i++;
    return i;
}

/* Keys of the blocks of @n tokens, malloc'd. */
static uint8_t *keys_of(const struct kvl_cache *c, const struct kvl_layout *layout,
                        const int32_t *tokens, size_t n)
{
    size_t blocks = n / c->block_tokens;
    uint8_t *keys = malloc(KV_MAX(blocks * KV_PREFIX_KEY, (size_t)1));

    if (keys)
        kvl_block_keys(c, layout->root, tokens, blocks, keys);
    return keys;
}

static int64_t find_in(struct kvl_cache *c, const struct kvl_layout *layout, const int32_t *tokens,
                       size_t n)
{
    uint8_t *keys;
    int64_t found;

    if (layout->cut == KVL_CUT_SNAPSHOT)
        return kvl_snapshot_find(c, layout->root, tokens, n);
    if (layout->cut == KVL_CUT_PAIR)
        return kvl_pair_find(c, layout, tokens, n);
    keys = keys_of(c, layout, tokens, n);
    if (!keys)
        return -ENOMEM;
    found = kvl_blocks_present(c, keys, n / c->block_tokens);
    free(keys);
    return found < 0 ? found : found * c->block_tokens;
}

/* Find prefixes under all layouts, the longest first. Returns 0 or an error. */
static int find_all(struct kvl_cache *c, const struct kvl_layouts *layouts, const int32_t *tokens,
                    size_t n, struct candidate *ret)
{
    for (size_t i = 0; i < layouts->n; i++) {
        struct candidate new = {&layouts->at[i], find_in(c, &layouts->at[i], tokens, n)};
        size_t at = i;

        if (new.tokens < 0)
            return (int)new.tokens;
        for (; at && ret[at - 1].tokens <= new.tokens; at--) /* of equal ones, the later layout */
            ret[at] = ret[at - 1];
        ret[at] = new;
    }
    return 0;
}

int64_t kvl_find(struct kvl_cache *cache, const int32_t *tokens, size_t n)
{
    struct candidate found[KVL_LAYOUTS_MAX] = {{0}};
    struct kvl_layouts layouts;
    int64_t longest = 0;

    if (!cache || !are_tokens(tokens, n))
        return -EINVAL;
    n = n_known(tokens, n);
    for (int form = 0; form < KVL_N_FORMS && longest >= 0; form++) {
        int rc = kvl_layouts_read(cache, (enum kvl_form)form, &layouts);

        if (!rc)
            rc = find_all(cache, &layouts, tokens, n, found);
        if (rc < 0)
            longest = rc;
        else if (layouts.n)
            longest = KV_MAX(longest, found[0].tokens);
        kvl_layouts_fini(&layouts);
    }
    return longest;
}

/* -- states ------------------------------------------------------------------------------------ */

/* Load the longest whole snapshot of at most @found->tokens. As make_state. */
static int64_t make_snapshot(struct kvl_cache *c, const struct candidate *found,
                             const int32_t *tokens, uint8_t **ret, size_t *ret_len,
                             struct kvl_result *result)
{
    int64_t got = found->tokens;
    int rc;

    do {
        rc = kvl_snapshot_load(c, found->layout->root, tokens, (size_t)got, ret, ret_len);
        if (!rc)
            got = kvl_snapshot_find(c, found->layout->root, tokens, (size_t)got - 1);
    } while (!rc && got > 0);
    if (rc == 1)
        kvs_touch(c->store, found->layout->key, KV_PREFIX_KEY, 1);
    *result = (struct kvl_result){.blocks = 1, .snapshot = true};
    return rc < 0 ? rc : got;
}

/* Put a pair's state together. As make_state. */
static int64_t make_pair(struct kvl_cache *c, const struct candidate *found, int32_t seq,
                         const int32_t *tokens, uint8_t **ret, size_t *ret_len,
                         struct kvl_result *result)
{
    struct kvl_view views[KVL_CACHES_MAX];
    int64_t got =
        kvl_pair_load(c, found->layout, seq, tokens, (size_t)found->tokens, views, result);

    if (got <= 0)
        return got;
    *ret_len = views[0].len;
    *ret = KV_STEAL(views[0].data);
    kvl_views_fini(views, KVL_CACHES_MAX, true);
    return got;
}

/* Make the state of @found, as much as is good of it. Returns its tokens, 0, or an error. */
static int64_t make_state(struct kvl_cache *c, const struct candidate *found, int32_t seq,
                          const int32_t *tokens, uint8_t **ret, size_t *ret_len,
                          struct kvl_result *result)
{
    size_t blocks = (size_t)found->tokens / c->block_tokens;
    struct kvl_view v;
    uint8_t *keys;
    int64_t got;

    if (found->layout->cut == KVL_CUT_SNAPSHOT)
        return make_snapshot(c, found, tokens, ret, ret_len, result);
    if (found->layout->cut == KVL_CUT_PAIR)
        return make_pair(c, found, seq, tokens, ret, ret_len, result);
    keys = keys_of(c, found->layout, tokens, (size_t)found->tokens);
    if (!keys)
        return -ENOMEM;
    got = kvl_blocks_load(c, found->layout, seq, keys, tokens, blocks, &v);
    free(keys);
    if (got <= 0)
        return got;
    *ret = KV_STEAL(v.data);
    *ret_len = v.len;
    kvl_view_fini(&v, true);
    *result = (struct kvl_result){.blocks = (uint64_t)got};
    return got * c->block_tokens;
}

static int64_t give(int64_t tokens, size_t state_bytes, const struct kvl_result *result,
                    struct kvl_result *ret)
{
    struct kvl_result r = tokens ? *result : (struct kvl_result){0};

    if (tokens < 0 || !ret)
        return tokens;
    r.size = ret->size;
    r.n_tokens = (uint64_t)tokens;
    r.state_bytes = state_bytes;
    memcpy(ret, &r, KV_MIN(ret->size, sizeof(r)));
    return tokens;
}

int64_t kvl_load_state(struct kvl_cache *cache, const int32_t *tokens, size_t n, enum kvl_form form,
                       void **ret, size_t *ret_len, struct kvl_result *result)
{
    struct candidate found[KVL_LAYOUTS_MAX] = {{0}};
    struct kvl_result r = {0};
    struct kvl_layouts layouts;
    uint8_t *state = NULL;
    size_t len = 0;
    int64_t got;

    if (!cache || !are_tokens(tokens, n) || !ret || !ret_len || (int)form >= KVL_N_FORMS ||
        !kv_sized_or_null(result, "kvl_result"))
        return -EINVAL;
    n = n_known(tokens, n);
    got = kvl_layouts_read(cache, form, &layouts);
    if (got < 0)
        return got;
    got = find_all(cache, &layouts, tokens, n, found);
    for (size_t i = 0; i < layouts.n && !got && found[i].tokens; i++)
        got = make_state(cache, &found[i], 0, tokens, &state, &len, &r);
    kvl_layouts_fini(&layouts);
    if (got > 0) {
        *ret = state;
        *ret_len = len;
    }
    return give(got, len, &r, result);
}

int64_t kvl_discard(struct kvl_cache *cache, const int32_t *tokens, size_t n, enum kvl_form form)
{
    struct kvl_layouts layouts;
    int64_t found;

    if (!cache || !are_tokens(tokens, n) || (int)form >= KVL_N_FORMS)
        return -EINVAL;
    if (!n || n_known(tokens, n) < n)
        return 0;
    found = kvl_layouts_read(cache, form, &layouts);
    if (found < 0)
        return found;
    for (size_t i = 0; i < layouts.n && found >= 0; i++) {
        int rc = 0;

        if (layouts.at[i].cut == KVL_CUT_PAIR)
            rc = kvl_snapshot_discard(cache, layouts.at[i].tail_root, tokens, n);
        else if (layouts.at[i].cut == KVL_CUT_SNAPSHOT)
            rc = kvl_snapshot_discard(cache, layouts.at[i].root, tokens, n);
        found = rc < 0 ? rc : KV_MAX(found, (int64_t)rc);
    }
    kvl_layouts_fini(&layouts);
    return found;
}

/* A state to save, of the first of @n tokens. */
struct given {
    const int32_t *tokens;
    size_t n;
    bool exact; /* of all tokens, where the state doesn't tell */
    enum kvl_form form;
    const uint8_t *data;
    size_t len;
    uint32_t window; /* tokens of the model's windows; 0: unknown, or there are none */
};

/* Save a state that can't be cut. */
static int64_t save_whole(struct kvl_cache *c, const struct given *g, struct kvl_result *ret)
{
    struct kv_buf identity = KV_BUF_INIT;
    struct kvl_layout layout = {.cut = KVL_CUT_SNAPSHOT, .form = g->form};
    uint32_t cells = 0;
    int64_t saved = kvl_whole_identity(g->data, g->len, g->form, &identity, &cells);

    if (saved == -ESTALE || (!saved && (cells ? cells > g->n : !g->exact))) {
        kv_buf_fini(&identity);
        return 0; /* tokens don't describe it */
    }
    layout.whole = identity.data;
    layout.whole_len = identity.len;
    if (!saved)
        saved = kvl_layout_note(c, &layout);
    if (!saved)
        saved =
            kvl_snapshot_save(c, &layout, g->tokens, cells ? cells : g->n, g->data, g->len, ret);
    kv_buf_fini(&identity);
    return saved;
}

/* Save a pair of caches. Returns -ENODATA for states of other memories. */
static int64_t save_pair(struct kvl_cache *c, const struct given *g, struct kvl_result *ret)
{
    struct kvl_layout layout = {.cut = KVL_CUT_PAIR, .form = g->form, .span = g->window};
    struct kvl_view views[KVL_CACHES_MAX];
    int64_t saved = kvl_pair_parse(g->data, g->len, g->form, 0, views);

    if (saved)
        return saved == -ESTALE ? 0 : saved;
    layout.shape = views[0].shape;
    layout.second = views[1].shape;
    saved = kvl_layout_note(c, &layout);
    if (!saved)
        saved = kvl_pair_save(c, views, &layout, g->tokens, g->n, ret);
    kvl_views_fini(views, KVL_CACHES_MAX, false);
    return saved;
}

/* Save one cache. Returns as save_pair. */
static int64_t save_one(struct kvl_cache *c, const struct given *g, struct kvl_result *ret)
{
    struct kvl_layout layout = {.cut = KVL_CUT_BLOCKS, .form = g->form};
    struct kvl_view v;
    int64_t saved = kvl_view_parse(g->data, g->len, g->form, &v);

    if (saved)
        return saved == -ESTALE ? 0 : saved;
    layout.shape = v.shape;
    saved = kvl_layout_note(c, &layout);
    if (!saved)
        saved = kvl_blocks_save(c, &v, &layout, g->tokens, g->n, ret);
    kvl_view_fini(&v, false);
    return saved;
}

static int64_t save_state(struct kvl_cache *c, const struct given *g, struct kvl_result *ret)
{
    int64_t saved = save_one(c, g, ret);

    if (saved == -ENODATA && g->window > 1)
        saved = save_pair(c, g, ret);
    return saved == -ENODATA ? save_whole(c, g, ret) : saved;
}

int64_t kvl_save_state(struct kvl_cache *cache, const int32_t *tokens, size_t n, enum kvl_form form,
                       const void *data, size_t len, struct kvl_result *ret)
{
    struct kvl_result r = {0};
    struct given g = {.tokens = tokens, .form = form, .data = data, .len = len};

    if (!cache || !are_tokens(tokens, n) || (!data && len) || (int)form >= KVL_N_FORMS ||
        !kv_sized_or_null(ret, "kvl_result"))
        return -EINVAL;
    g.n = n_known(tokens, n);
    g.exact = g.n == n;
    g.window = cache->window;
    if (!g.n || !len)
        return give(0, len, &r, ret);
    return give(save_state(cache, &g, &r), len, &r, ret);
}

/* -- contexts ---------------------------------------------------------------------------------- */

static void clear(const struct kvl_cache *c, struct llama_context *ctx, int32_t seq)
{
    c->lib.memory_seq_rm(c->lib.get_memory(ctx), seq, -1, -1);
}

/* Get the state of a sequence, malloc'd. Returns 0, -ENOMEM, or -EIO when libllama gives none. */
static int get_state(const struct kvl_cache *c, struct llama_context *ctx, int32_t seq,
                     uint8_t **ret, size_t *ret_len)
{
    size_t size = c->lib.state_seq_get_size(ctx, seq), len;
    uint8_t *state = malloc(KV_MAX(size, (size_t)1));

    if (!state)
        return -ENOMEM;
    len = size ? c->lib.state_seq_get_data(ctx, state, size, seq) : 0;
    if (!len || len > size) {
        free(state);
        return -EIO;
    }
    *ret = state;
    *ret_len = len;
    return 0;
}

/* Tokens of the model's windows. 0: unknown, or there are none. */
static uint32_t window_of(const struct kvl_cache *c, const struct llama_context *ctx)
{
    int32_t n = 0;

    if (!c->window && c->lib.get_model && c->lib.model_n_swa)
        n = c->lib.model_n_swa(c->lib.get_model(ctx));
    return c->window ? c->window : (uint32_t)KV_MAX(n, 0);
}

/* Number of streams of the memory; its sequence @seq is empty. 0 when its states have none. */
static uint32_t streams_of(const struct kvl_cache *c, struct llama_context *ctx, int32_t seq)
{
    uint32_t n = 0;
    uint8_t *state;
    size_t len;

    if (get_state(c, ctx, seq, &state, &len) == 0) {
        n = kvl_streams_of(state, len);
        free(state);
    }
    return n;
}

/* Give libllama a state. Returns whether it took all of it; else the sequence is empty. */
static bool set_state(const struct kvl_cache *c, struct llama_context *ctx, int32_t seq,
                      const uint8_t *state, size_t len)
{
    if (len && c->lib.state_seq_set_data(ctx, state, len, seq) == len)
        return true;
    clear(c, ctx, seq);
    return false;
}

/* Write zeros to all that a made state has of its tokens. */
static void zero_cells(const struct kvl_view *v)
{
    for (size_t i = 0; i < v->n_cells; i++)
        memset(kvl_extras(v, i), 0, v->shape.extras);
    for (size_t i = 0; i < kvl_shape_n_rows(&v->shape); i++)
        memset(v->data + v->rows[i], 0, (size_t)v->shape.rows[i].row * v->n_cells);
}

/*
 * Try a state of one cell of zeros: whether this memory takes states of the layout, before any block
 * is read. libllama compares types, sizes, layers and flash attention.
 */
static bool fits(const struct kvl_cache *c, struct llama_context *ctx, int32_t seq,
                 struct kvl_layout *layout, uint32_t n_streams)
{
    const struct kvl_shape *shapes[KVL_CACHES_MAX] = {&layout->shape, &layout->second};
    struct kvl_view views[KVL_CACHES_MAX] = {{.n_cells = 1}, {.n_cells = 1}};
    size_t n = layout->cut == KVL_CUT_PAIR ? 2 : 1;
    bool took;

    if (layout->cut == KVL_CUT_SNAPSHOT)
        return true;
    if (!n_streams || (n_streams > 1) != (layout->shape.n_streams > 1))
        return false;
    layout->shape.n_streams = n_streams;
    layout->second.n_streams = n_streams;
    if (kvl_views_make(shapes, n, seq, views) < 0)
        return false;
    for (size_t i = 0; i < n; i++)
        zero_cells(&views[i]);
    took = set_state(c, ctx, seq, views[0].data, views[0].len);
    clear(c, ctx, seq);
    kvl_views_fini(views, n, true);
    return took;
}

/*
 * Load one candidate. A layout of snapshots doesn't tell all that libllama compares, so one that was
 * refused may hide shorter ones of this memory. Returns its tokens, 0, or an error.
 */
static int64_t load_one(struct kvl_cache *c, struct llama_context *ctx, int32_t seq,
                        struct candidate found, const int32_t *tokens, size_t *ret_len,
                        struct kvl_result *ret)
{
    static struct kv_log_rate rate;

    for (int refused = 0; found.tokens > 0 && refused < REFUSED_MAX; refused++) {
        uint8_t *state;
        int64_t got = make_state(c, &found, seq, tokens, &state, ret_len, ret);
        bool took;

        if (got <= 0)
            return got;
        took = set_state(c, ctx, seq, state, *ret_len);
        free(state);
        if (took)
            return got;
        if (kv_log_allowed(&rate, 5))
            kv_log_warn("llama", "libllama refused a stored state", "tokens=%lld", (long long)got);
        if (found.layout->cut != KVL_CUT_SNAPSHOT)
            return 0;
        found.tokens = kvl_snapshot_find(c, found.layout->root, tokens, (size_t)got - 1);
    }
    return KV_MIN(found.tokens, 0);
}

int64_t kvl_load(struct kvl_cache *cache, struct llama_context *ctx, int32_t seq,
                 const int32_t *tokens, size_t n, struct kvl_result *ret)
{
    struct candidate found[KVL_LAYOUTS_MAX] = {{0}};
    struct kvl_result r = {0};
    struct kvl_layouts layouts;
    uint32_t n_streams;
    size_t len = 0;
    int64_t got;

    if (!cache || !ctx || seq < 0 || !are_tokens(tokens, n) || !kv_sized_or_null(ret, "kvl_result"))
        return -EINVAL;
    if (!kvl_has_libllama(cache))
        return -ENOSYS;
    n = n_known(tokens, n);
    got = kvl_layouts_read(cache, KVL_FORM_SEQUENCE, &layouts);
    if (got < 0)
        return got;
    got = find_all(cache, &layouts, tokens, n, found);
    clear(cache, ctx, seq);
    n_streams = layouts.n ? streams_of(cache, ctx, seq) : 0;
    for (size_t i = 0; i < layouts.n && !got && found[i].tokens; i++)
        if (fits(cache, ctx, seq, &layouts.at[found[i].layout - layouts.at], n_streams))
            got = load_one(cache, ctx, seq, found[i], tokens, &len, &r);
    kvl_layouts_fini(&layouts);
    return give(got, got > 0 ? len : 0, &r, ret);
}

int64_t kvl_save(struct kvl_cache *cache, struct llama_context *ctx, int32_t seq,
                 const int32_t *tokens, size_t n, struct kvl_result *ret)
{
    struct given g = {.tokens = tokens, .form = KVL_FORM_SEQUENCE};
    struct kvl_result r = {0};
    uint8_t *state;
    int64_t saved, decoded;

    if (!cache || !ctx || seq < 0 || !are_tokens(tokens, n) || !kv_sized_or_null(ret, "kvl_result"))
        return -EINVAL;
    if (!kvl_has_libllama(cache))
        return -ENOSYS;
    n = n_known(tokens, n);
    decoded = (int64_t)cache->lib.memory_seq_pos_max(cache->lib.get_memory(ctx), seq) + 1;
    if (decoded <= 0 || !n)
        return give(0, 0, &r, ret);
    saved = get_state(cache, ctx, seq, &state, &g.len);
    if (saved < 0)
        return saved;
    g.n = KV_MIN(n, (size_t)decoded);
    g.exact = (size_t)decoded <= n;
    g.data = state;
    g.window = window_of(cache, ctx);
    saved = save_state(cache, &g, &r);
    free(state);
    return give(saved, g.len, &r, ret);
}
