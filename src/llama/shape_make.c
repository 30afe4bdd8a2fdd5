// SPDX-License-Identifier: Apache-2.0
/* Make states of a shape: all of their bytes but extras and rows. Copy these between states. */
#include "base/core/le.h"
#include "llama/shape.h"

enum { LAYER_HEAD = 12 }; /* bytes before the rows of K or V of a layer */

struct writer {
    uint8_t *data;
    size_t at;
};

static void give_u32(struct writer *w, uint32_t value)
{
    uint8_t bytes[8];

    kv_put_le64(bytes, value);
    memcpy(w->data + w->at, bytes, 4);
    w->at += 4;
}

/* Bytes of a cache. At most 2^20 cells of 64 MiB: no overflow. */
static uint64_t cache_bytes(const struct kvl_shape *s, uint32_t n_cells)
{
    return 4 + 4 * (uint64_t)s->n_streams + 8 + (s->has_rotations ? 8 : 0) +
           (uint64_t)n_cells * (12 + s->token_bytes) + LAYER_HEAD * kvl_shape_n_rows(s);
}

static void give_rows(struct writer *w, struct kvl_view *v)
{
    for (size_t i = 0; i < kvl_shape_n_rows(&v->shape); i++) {
        const struct kvl_rows *rows = &v->shape.rows[i];

        give_u32(w, rows->type);
        give_u32(w, kvl_is_transposed(&v->shape, i) ? rows->element : (uint32_t)rows->row);
        give_u32(w, kvl_is_transposed(&v->shape, i) ? rows->n : 0);
        v->rows[i] = w->at;
        w->at += (size_t)rows->row * v->n_cells;
    }
}

static void give_cells(struct writer *w, struct kvl_view *v, int32_t seq)
{
    v->cells = w->at;
    for (uint32_t i = 0; i < v->n_cells; i++) {
        give_u32(w, v->first + i);
        give_u32(w, 1);
        w->at += v->shape.extras;
        give_u32(w, (uint32_t)seq);
    }
}

static void write_prefix(struct writer *w, const struct kvl_shape *s, int32_t seq)
{
    memcpy(w->data, s->prefix, s->prefix_len);
    w->at = s->prefix_len;
    if (s->form == KVL_FORM_SEQUENCE && s->prefix_len == 8) {
        w->at = 4;
        give_u32(w, (uint32_t)seq);
    }
}

static void write_cache(struct writer *w, struct kvl_view *v, int32_t seq)
{
    const struct kvl_shape *s = &v->shape;
    uint32_t stream = seq >= 0 && (uint32_t)seq < s->n_streams ? (uint32_t)seq : 0;

    give_u32(w, s->n_streams);
    for (uint32_t i = 0; i < stream; i++)
        give_u32(w, 0);
    give_u32(w, v->n_cells);
    give_cells(w, v, seq);
    give_u32(w, s->v_trans);
    give_u32(w, s->n_layers);
    if (s->has_rotations) {
        give_u32(w, s->rotations[0]);
        give_u32(w, s->rotations[1]);
    }
    give_rows(w, v);
    for (uint32_t i = stream + 1; i < s->n_streams; i++)
        give_u32(w, 0);
}

/* Make the view of one cache, without data. Returns 0 or -ENOMEM. */
static int make_view(const struct kvl_shape *shape, struct kvl_view *v)
{
    int rc;

    *v = (struct kvl_view){.first = v->first, .n_cells = v->n_cells};
    rc = kvl_shape_copy(shape, &v->shape);
    if (rc)
        return rc;
    v->rows = calloc(KV_MAX(kvl_shape_n_rows(shape), (size_t)1), sizeof(*v->rows));
    if (v->rows)
        return 0;
    kvl_view_fini(v, false);
    return -ENOMEM;
}

int kvl_views_make(const struct kvl_shape *const shapes[], size_t n, int32_t seq,
                   struct kvl_view *views)
{
    uint64_t len = shapes[0]->prefix_len;
    struct writer w = {NULL, 0};
    int rc = 0;

    for (size_t i = 0; i < n; i++)
        len += cache_bytes(shapes[i], views[i].n_cells);
    if (len > SIZE_MAX / 2)
        return -EMSGSIZE;
    for (size_t i = 0; i < n; i++) {
        rc = make_view(shapes[i], &views[i]);
        if (rc) {
            kvl_views_fini(views, i, false);
            return rc;
        }
    }
    w.data = malloc(KV_MAX((size_t)len, (size_t)1));
    if (!w.data) {
        kvl_views_fini(views, n, false);
        return -ENOMEM;
    }
    write_prefix(&w, &views[0].shape, seq);
    for (size_t i = 0; i < n; i++) {
        views[i].data = w.data;
        views[i].len = (size_t)len;
        write_cache(&w, &views[i], seq);
    }
    return 0;
}

/* Copy elements of transposed V of @n positions: row by row. */
static void copy_transposed(const struct kvl_view *to, const struct kvl_view *from, size_t rows,
                            size_t first, size_t n)
{
    const struct kvl_rows *r = &from->shape.rows[rows];
    size_t len = r->element;

    for (size_t row = 0; row < r->n; row++) {
        uint8_t *dst = to->data + to->rows[rows] + row * len * to->n_cells;
        const uint8_t *src = from->data + from->rows[rows] + row * len * from->n_cells;

        for (size_t i = first; i < first + n; i++)
            memcpy(dst + kvl_cell_at(to, i) * len, src + kvl_cell_at(from, i) * len, len);
    }
}

void kvl_copy_cells(const struct kvl_view *to, const struct kvl_view *from, size_t first, size_t n)
{
    const struct kvl_shape *s = &from->shape;

    for (size_t i = first; i < first + n && s->extras; i++)
        memcpy(kvl_extras(to, kvl_cell_at(to, i)), kvl_extras(from, kvl_cell_at(from, i)),
               s->extras);
    for (size_t k = 0; k < kvl_shape_n_rows(s); k++) {
        size_t row = (size_t)s->rows[k].row;

        if (kvl_is_transposed(s, k)) {
            copy_transposed(to, from, k, first, n);
            continue;
        }
        for (size_t i = first; i < first + n; i++)
            memcpy(to->data + to->rows[k] + kvl_cell_at(to, i) * row,
                   from->data + from->rows[k] + kvl_cell_at(from, i) * row, row);
    }
}
