// SPDX-License-Identifier: Apache-2.0
/* Make states of a shape: all of their bytes but extras and rows. */
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

/* Bytes of a state. At most 2^20 cells of 64 MiB: no overflow. */
static uint64_t state_bytes(const struct kvl_shape *s, uint32_t n_cells)
{
    return s->prefix_len + 4 + 4 * (uint64_t)s->n_streams + 8 + (s->has_rotations ? 8 : 0) +
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
        give_u32(w, i);
        give_u32(w, 1);
        w->at += v->shape.extras;
        give_u32(w, (uint32_t)seq);
    }
}

static void write_state(struct kvl_view *v, int32_t seq)
{
    const struct kvl_shape *s = &v->shape;
    struct writer w = {.data = v->data};
    uint32_t stream = seq >= 0 && (uint32_t)seq < s->n_streams ? (uint32_t)seq : 0;

    memcpy(w.data, s->prefix, s->prefix_len);
    w.at = s->prefix_len;
    if (s->form == KVL_FORM_SEQUENCE && s->prefix_len == 8) {
        w.at = 4;
        give_u32(&w, (uint32_t)seq);
    }
    give_u32(&w, s->n_streams);
    for (uint32_t i = 0; i < stream; i++)
        give_u32(&w, 0);
    give_u32(&w, v->n_cells);
    give_cells(&w, v, seq);
    give_u32(&w, s->v_trans);
    give_u32(&w, s->n_layers);
    if (s->has_rotations) {
        give_u32(&w, s->rotations[0]);
        give_u32(&w, s->rotations[1]);
    }
    give_rows(&w, v);
    for (uint32_t i = stream + 1; i < s->n_streams; i++)
        give_u32(&w, 0);
}

int kvl_view_make(const struct kvl_shape *shape, uint32_t n_cells, int32_t seq,
                  struct kvl_view *ret)
{
    struct kvl_view v = {.n_cells = n_cells};
    uint64_t len = state_bytes(shape, n_cells);
    int rc;

    if (len > SIZE_MAX / 2)
        return -EMSGSIZE;
    rc = kvl_shape_copy(shape, &v.shape);
    if (rc)
        return rc;
    v.len = (size_t)len;
    v.rows = calloc(KV_MAX(kvl_shape_n_rows(shape), (size_t)1), sizeof(*v.rows));
    v.data = malloc(KV_MAX(v.len, (size_t)1));
    if (!v.rows || !v.data) {
        kvl_view_fini(&v, true);
        return -ENOMEM;
    }
    write_state(&v, seq);
    *ret = v;
    return 0;
}
