// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks between a state in memory and the store. The payload of a block is one token range of
 * everything that a state has per token, part after part:
 *
 *     state     cells ……   K of layer 0 ………………………   K of layer 1 ………………………   V …
 *     block 0   extras     │ 64 rows │                │ 64 rows │
 *     block 1                        │ 64 rows │                │ 64 rows │
 *
 * Rows of consecutive cells go between store and state without a copy. Those of transposed V, of
 * extras, and of cells out of order go through a buffer.
 */
#include "base/core/log.h"
#include "base/hash/hash.h"
#include "llama/cache.h"

enum { WINDOW_BYTES = 4 << 20, WINDOW_BLOCKS = 64 };

/* Memory that several blocks need during one call of the store. */
struct window {
    size_t first, n; /* blocks */
    size_t max;      /* blocks, at most */
    size_t header_bytes, payload_bytes, n_parts;
    size_t buffer_bytes; /* of a block, for what isn't copied directly */
    uint8_t *headers, *buffers;
    struct iovec *parts;
    uint32_t *counts;
    int64_t *got; /* results of a get, and of a put */
    int *put;
};

static void window_fini(struct window *w)
{
    free(w->headers);
    free(w->buffers);
    free(w->parts);
    free(w->counts);
    free(w->got);
    free(w->put);
}

static bool is_direct(const struct kvl_view *v, size_t rows)
{
    return !v->cell_of && !kvl_is_transposed(&v->shape, rows);
}

static int window_init(struct window *w, const struct kvl_cache *c, const struct kvl_view *v)
{
    const struct kvl_shape *s = &v->shape;

    w->header_bytes = kv_prefix_header_bytes(c->block_tokens);
    w->payload_bytes = (size_t)s->token_bytes * c->block_tokens;
    w->n_parts = 1 + (s->extras != 0) + kvl_shape_n_rows(s);
    w->buffer_bytes = (size_t)s->extras * c->block_tokens;
    for (size_t i = 0; i < kvl_shape_n_rows(s); i++)
        w->buffer_bytes += is_direct(v, i) ? 0 : (size_t)s->rows[i].row * c->block_tokens;
    w->max = KV_MAX((size_t)1, KV_MIN((size_t)WINDOW_BLOCKS, WINDOW_BYTES / w->payload_bytes));
    w->headers = malloc(w->max * w->header_bytes);
    w->buffers = malloc(KV_MAX(w->max * w->buffer_bytes, (size_t)1));
    w->parts = calloc(w->max * w->n_parts, sizeof(*w->parts));
    w->counts = calloc(w->max, sizeof(*w->counts));
    w->got = calloc(w->max, sizeof(*w->got));
    w->put = calloc(w->max, sizeof(*w->put));
    if (w->headers && w->buffers && w->parts && w->counts && w->got && w->put)
        return 0;
    window_fini(w);
    return -ENOMEM;
}

static uint8_t *header_of(const struct window *w, size_t block)
{
    return w->headers + (block - w->first) * w->header_bytes;
}

/* List the parts of a block, header first. */
static void list_parts(struct window *w, const struct kvl_cache *c, const struct kvl_view *v,
                       size_t block)
{
    const struct kvl_shape *s = &v->shape;
    struct iovec *part = w->parts + (block - w->first) * w->n_parts;
    uint8_t *buffer = w->buffers + (block - w->first) * w->buffer_bytes;

    w->counts[block - w->first] = (uint32_t)w->n_parts;
    *part++ = (struct iovec){header_of(w, block), w->header_bytes};
    if (s->extras) {
        *part++ = (struct iovec){buffer, (size_t)s->extras * c->block_tokens};
        buffer += (size_t)s->extras * c->block_tokens;
    }
    for (size_t i = 0; i < kvl_shape_n_rows(s); i++) {
        size_t len = (size_t)s->rows[i].row * c->block_tokens;

        if (is_direct(v, i)) {
            *part++ = (struct iovec){
                v->data + v->rows[i] + block * len - (size_t)s->rows[i].row * v->first, len};
        } else {
            *part++ = (struct iovec){buffer, len};
            buffer += len;
        }
    }
}

/* Hash the payload of a block: all its parts but the header. */
static void sum_parts(const struct window *w, size_t block, uint8_t ret[KV_PREFIX_HASH])
{
    const struct iovec *parts = w->parts + (block - w->first) * w->n_parts;
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    for (size_t i = 1; i < w->n_parts; i++)
        kv_hash_update(&state, parts[i].iov_base, parts[i].iov_len);
    kv_hash_done(&state, ret);
}

/* -- through the buffer ------------------------------------------------------------------------ */

/* Copy elements of transposed V from position @first on: row by row, in the block as in the state. */
static void copy_transposed(const struct kvl_view *v, size_t rows, size_t first, size_t n,
                            uint8_t *buffer, bool to_state)
{
    const struct kvl_rows *r = &v->shape.rows[rows];
    size_t element = r->element;

    for (size_t row = 0; row < r->n; row++) {
        uint8_t *at = v->data + v->rows[rows] + row * element * v->n_cells;

        if (!v->cell_of && to_state)
            memcpy(at + kvl_cell_at(v, first) * element, buffer, n * element);
        else if (!v->cell_of)
            memcpy(buffer, at + kvl_cell_at(v, first) * element, n * element);
        else
            for (size_t i = 0; i < n; i++)
                memcpy(buffer + i * element, at + kvl_cell_at(v, first + i) * element, element);
        buffer += n * element;
    }
}

/* Copy what isn't direct of a block. States that are made have their cells in order. */
static void copy_block(const struct window *w, const struct kvl_cache *c, const struct kvl_view *v,
                       size_t block, bool to_state)
{
    const struct kvl_shape *s = &v->shape;
    size_t first = block * c->block_tokens, n = c->block_tokens;
    uint8_t *buffer = w->buffers + (block - w->first) * w->buffer_bytes;

    for (size_t i = 0; i < n && s->extras; i++, buffer += s->extras) {
        uint8_t *extras = kvl_extras(v, kvl_cell_at(v, first + i));

        if (to_state)
            memcpy(extras, buffer, s->extras);
        else
            memcpy(buffer, extras, s->extras);
    }
    for (size_t i = 0; i < kvl_shape_n_rows(s); i++) {
        size_t row = (size_t)s->rows[i].row;

        if (is_direct(v, i))
            continue;
        if (kvl_is_transposed(s, i))
            copy_transposed(v, i, first, n, buffer, to_state);
        else
            for (size_t j = 0; j < n; j++)
                memcpy(buffer + j * row, v->data + v->rows[i] + kvl_cell_at(v, first + j) * row,
                       row);
        buffer += n * row;
    }
}

/* -- save -------------------------------------------------------------------------------------- */

/* Count the blocks at the beginning by reading each. */
static int64_t present_by_gets(struct kvl_cache *c, const uint8_t *keys, size_t n)
{
    size_t i = 0;
    int rc = 1;

    while (i < n && (rc = kvl_is_there(c, keys + i * KV_PREFIX_KEY)) == 1)
        i++;
    return rc < 0 ? rc : (int64_t)i;
}

int64_t kvl_blocks_present(struct kvl_cache *c, const uint8_t *keys, size_t n)
{
    uint8_t *present = malloc(KV_MAX(n, (size_t)1));
    size_t i = 0;
    int rc;

    if (!present)
        return -ENOMEM;
    rc = n ? kvs_exists(c->store, keys, KV_PREFIX_KEY, n, present) : 0;
    while (!rc && i < n && present[i])
        i++;
    free(present);
    if (rc == -ENOTSUP)
        return present_by_gets(c, keys, n);
    return rc < 0 ? rc : (int64_t)i;
}

static void make_header(const struct window *w, const struct kvl_cache *c, const uint8_t *root,
                        const uint8_t *keys, const int32_t *tokens, size_t block)
{
    struct kv_prefix_header h = {.first_token = (uint32_t)(block * c->block_tokens),
                                 .n_tokens = c->block_tokens,
                                 .payload_bytes = w->payload_bytes};

    memcpy(h.key, keys + block * KV_PREFIX_KEY, sizeof(h.key));
    memcpy(h.parent, kvl_parent(root, keys, block), sizeof(h.parent));
    sum_parts(w, block, h.payload_sum);
    kv_prefix_encode(&h, tokens + block * c->block_tokens, header_of(w, block));
}

/* Put the blocks [w->first, w->first + w->n). */
static int put_window(struct window *w, struct kvl_cache *c, const struct kvl_view *v,
                      const uint8_t *root, const uint8_t *keys, const int32_t *tokens,
                      struct kvl_result *ret)
{
    int rc;

    for (size_t i = w->first; i < w->first + w->n; i++) {
        list_parts(w, c, v, i);
        copy_block(w, c, v, i, false);
        make_header(w, c, root, keys, tokens, i);
    }
    rc = kvs_put_chunks_from(c->store, keys + w->first * KV_PREFIX_KEY, KV_PREFIX_KEY, w->n,
                             w->parts, w->counts, w->put);
    for (size_t i = 0; i < w->n && !rc; i++) {
        ret->new_blocks += w->put[i] == 0;
        ret->new_bytes += w->put[i] == 0 ? w->header_bytes + w->payload_bytes : 0;
    }
    return rc;
}

void kvl_blocks_touch(struct kvl_cache *c, const uint8_t *keys, size_t n)
{
    uint8_t *reversed = n ? malloc(n * KV_PREFIX_KEY) : NULL;

    if (!reversed)
        return;
    for (size_t i = 0; i < n; i++)
        memcpy(reversed + i * KV_PREFIX_KEY, keys + (n - 1 - i) * KV_PREFIX_KEY, KV_PREFIX_KEY);
    kvs_touch(c->store, reversed, KV_PREFIX_KEY, n);
    free(reversed);
}

/* Put the blocks [first, end) that @present doesn't have; mark the others as used. */
static int put_missing(struct kvl_cache *c, const struct kvl_view *v, const uint8_t *root,
                       const uint8_t *keys, const uint8_t *present, const int32_t *tokens,
                       size_t first, size_t end, struct kvl_result *ret)
{
    struct window w = {0};
    int rc = window_init(&w, c, v);

    if (rc)
        return rc;
    for (size_t i = first; i < end && rc >= 0;) {
        w.first = i;
        while (i < end && present[i] == present[w.first] && (present[i] || i - w.first < w.max))
            i++;
        w.n = i - w.first;
        if (present[w.first])
            kvs_touch(c->store, keys + w.first * KV_PREFIX_KEY, KV_PREFIX_KEY, w.n);
        else
            rc = put_window(&w, c, v, root, keys, tokens, ret);
    }
    window_fini(&w);
    return rc;
}

int kvl_blocks_put(struct kvl_cache *c, const struct kvl_view *view,
                   const uint8_t root[KV_PREFIX_HASH], const uint8_t *keys, const int32_t *tokens,
                   size_t first, size_t end, struct kvl_result *ret)
{
    uint8_t *present = calloc(KV_MAX(end, (size_t)1), 1);
    int rc = 0;

    if (!present)
        return -ENOMEM;
    if (first < end)
        rc = kvs_exists(c->store, keys + first * KV_PREFIX_KEY, KV_PREFIX_KEY, end - first,
                        present + first);
    if (rc == -ENOTSUP) { /* the puts tell which are there */
        memset(present, 0, end);
        rc = 0;
    }
    if (rc >= 0 && first < end)
        rc = put_missing(c, view, root, keys, present, tokens, first, end, ret);
    free(present);
    return KV_MIN(rc, 0);
}

int64_t kvl_blocks_save(struct kvl_cache *c, const struct kvl_view *view,
                        const struct kvl_layout *layout, const int32_t *tokens, size_t n,
                        struct kvl_result *ret)
{
    size_t blocks = KV_MIN(n, (size_t)view->n_cells) / c->block_tokens;
    uint8_t *keys = malloc(KV_MAX(blocks * KV_PREFIX_KEY, (size_t)1));
    int rc;

    if (!keys)
        return -ENOMEM;
    kvl_block_keys(c, layout->root, tokens, blocks, keys);
    rc = kvl_blocks_put(c, view, layout->root, keys, tokens, 0, blocks, ret);
    if (rc >= 0)
        rc = kvl_make_durable(c, layout->is_new || ret->new_blocks);
    if (rc >= 0)
        kvl_blocks_touch(c, keys, blocks);
    free(keys);
    if (rc < 0)
        return rc;
    ret->blocks = blocks;
    return (int64_t)(blocks * c->block_tokens);
}

/* -- load -------------------------------------------------------------------------------------- */

/* Check a block that was read: it must be the one that was asked for, to the last byte. */
static bool is_right(const struct window *w, const struct kvl_cache *c, const uint8_t *root,
                     const uint8_t *keys, const int32_t *tokens, size_t block)
{
    const uint8_t *data = header_of(w, block);
    uint8_t sum[KV_PREFIX_HASH];
    struct kv_prefix_header h;

    if (w->got[block - w->first] != (int64_t)(w->header_bytes + w->payload_bytes) ||
        kv_prefix_decode(keys + block * KV_PREFIX_KEY, data, w->header_bytes, &h) < 0 ||
        h.n_tokens != c->block_tokens || h.first_token != block * c->block_tokens ||
        h.payload_bytes != w->payload_bytes ||
        memcmp(h.parent, kvl_parent(root, keys, block), KV_PREFIX_HASH) != 0)
        return false;
    for (size_t i = 0; i < c->block_tokens; i++)
        if (kv_prefix_token(data, i) != tokens[block * c->block_tokens + i])
            return false;
    sum_parts(w, block, sum);
    return !memcmp(sum, h.payload_sum, sizeof(sum));
}

/* Return whether a result of a get says that the chunk is there, and bad. */
static bool is_damage(int64_t each)
{
    return each >= 0 || each == -EBADMSG || each == -EMSGSIZE;
}

/* Read one window. Returns the number of good blocks at its beginning, or an error. */
static int64_t get_window(struct window *w, struct kvl_cache *c, const struct kvl_view *v,
                          const uint8_t *root, const uint8_t *keys, const int32_t *tokens)
{
    int rc;

    for (size_t i = w->first; i < w->first + w->n; i++)
        list_parts(w, c, v, i);
    rc = kvs_get_chunks_into(c->store, keys + w->first * KV_PREFIX_KEY, KV_PREFIX_KEY, w->n,
                             w->parts, w->counts, w->got);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < w->n; i++) {
        if (w->got[i] < 0 && w->got[i] != -ENOENT && !is_damage(w->got[i]))
            return i ? (int64_t)i : w->got[i];
        if (w->got[i] < 0 || !is_right(w, c, root, keys, tokens, w->first + i)) {
            if (is_damage(w->got[i]))
                kvl_drop_damaged(c, keys + (w->first + i) * KV_PREFIX_KEY);
            return (int64_t)i;
        }
        copy_block(w, c, v, w->first + i, true);
    }
    return (int64_t)w->n;
}

int64_t kvl_blocks_fill(struct kvl_cache *c, const struct kvl_view *v,
                        const uint8_t root[KV_PREFIX_HASH], const uint8_t *keys,
                        const int32_t *tokens, size_t first, size_t end)
{
    struct window w = {.first = first};
    int64_t got = window_init(&w, c, v);

    if (got < 0)
        return got;
    while (got >= 0 && w.first < end) {
        w.n = KV_MIN(w.max, end - w.first);
        got = get_window(&w, c, v, root, keys, tokens);
        if (got > 0)
            w.first += (size_t)got;
        if (got < (int64_t)w.n)
            break;
    }
    window_fini(&w);
    return got < 0 && w.first == first ? got : (int64_t)w.first;
}

int64_t kvl_blocks_load(struct kvl_cache *c, const struct kvl_layout *layout, int32_t seq,
                        const uint8_t *keys, const int32_t *tokens, size_t n, struct kvl_view *ret)
{
    const struct kvl_shape *shape = &layout->shape;
    struct kvl_view v;
    int64_t got = 0;

    if (n)
        kvs_prefetch(c->store, keys, KV_PREFIX_KEY, n);
    while (n) {
        int rc;

        v = (struct kvl_view){.n_cells = (uint32_t)(n * c->block_tokens)};
        rc = kvl_views_make(&shape, 1, seq, &v);
        if (rc)
            return rc;
        got = kvl_blocks_fill(c, &v, layout->root, keys, tokens, 0, n);
        if (got == (int64_t)n) {
            kvl_blocks_touch(c, keys, n);
            kvs_touch(c->store, layout->key, KV_PREFIX_KEY, 1);
            *ret = v;
            return got;
        }
        kvl_view_fini(&v, true);
        if (got < 0)
            return got;
        n = (size_t)got; /* a state of fewer cells has its rows elsewhere */
    }
    return got;
}
