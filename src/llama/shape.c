// SPDX-License-Identifier: Apache-2.0
/*
 * Parsing trusts no value: a reader with a position, where each step checks that its bytes are
 * there. Several versions of llama.cpp write states that differ in two words or in the extras of
 * cells, and nothing at the beginning says which. So each variant is tried, and exactly one must
 * consume the state to its last byte.
 */
#include "llama/shape.h"

#include "base/core/le.h"

#define STATE_MAGIC 0xaf143cd8u

enum { TYPE_MAX = 255, ELEMENT_MAX = 16, N_ROWS_MAX = 1 << 20 };

struct reader {
    const uint8_t *data;
    size_t len, at;
    bool bad;
};

static uint32_t take_u32(struct reader *r)
{
    uint32_t value;

    if (r->bad || r->len - r->at < 4) {
        r->bad = true;
        return 0;
    }
    value = (uint32_t)kv_get_le(r->data + r->at, 4);
    r->at += 4;
    return value;
}

static uint64_t take_u64(struct reader *r)
{
    uint64_t low = take_u32(r);

    return low | (uint64_t)take_u32(r) << 32;
}

static void skip(struct reader *r, uint64_t len)
{
    if (r->bad || len > r->len - r->at)
        r->bad = true;
    else
        r->at += (size_t)len;
}

/* -- shapes ------------------------------------------------------------------------------------ */

void kvl_shape_fini(struct kvl_shape *s)
{
    free(s->rows);
    s->rows = NULL;
}

int kvl_shape_copy(const struct kvl_shape *s, struct kvl_shape *ret)
{
    size_t bytes = kvl_shape_n_rows(s) * sizeof(*s->rows);
    struct kvl_rows *rows = malloc(KV_MAX(bytes, (size_t)1));

    if (!rows)
        return -ENOMEM;
    if (bytes)
        memcpy(rows, s->rows, bytes);
    *ret = *s;
    ret->rows = rows;
    return 0;
}

bool kvl_shape_is_alike(const struct kvl_shape *a, const struct kvl_shape *b)
{
    if (a->v_trans != b->v_trans || a->extras != b->extras || a->n_layers != b->n_layers ||
        a->n_values != b->n_values)
        return false;
    for (size_t i = 0; i < kvl_shape_n_rows(a); i++)
        if (a->rows[i].type != b->rows[i].type || a->rows[i].element != b->rows[i].element ||
            a->rows[i].n != b->rows[i].n || a->rows[i].row != b->rows[i].row)
            return false;
    return true;
}

void kvl_shape_identity(const struct kvl_shape *s, struct kv_buf *ret)
{
    kvl_put_u32(ret, s->v_trans);
    kvl_put_u32(ret, s->extras);
    kvl_put_u32(ret, s->rotations[0]);
    kvl_put_u32(ret, s->rotations[1]);
    kvl_put_u32(ret, s->n_streams > 1); /* slots apart, or unified */
    kvl_put_u32(ret, s->n_layers);
    kvl_put_u32(ret, s->n_values);
    for (size_t i = 0; i < kvl_shape_n_rows(s); i++) {
        kvl_put_u32(ret, s->rows[i].type);
        kvl_put_u32(ret, s->rows[i].element);
        kvl_put_u32(ret, s->rows[i].n);
        kvl_put_u32(ret, (uint32_t)s->rows[i].row);
    }
}

void kvl_shape_encode(const struct kvl_shape *s, struct kv_buf *ret)
{
    kvl_put_u32(ret, s->prefix_len);
    kv_buf_append(ret, s->prefix, s->prefix_len);
    kvl_put_u32(ret, s->n_streams);
    kvl_put_u32(ret, s->has_rotations);
    kvl_shape_identity(s, ret);
}

/* Check the numbers of a shape, and add up the bytes of a token. */
static bool is_sound(struct kvl_shape *s)
{
    uint64_t sum = s->extras;

    if (!s->n_streams || s->n_streams > KVL_STREAMS_MAX || s->v_trans > 1 || !s->n_layers ||
        s->n_layers > KVL_LAYERS_MAX || (s->n_values && s->n_values != s->n_layers) ||
        (s->extras != 0 && s->extras != 8 && s->extras != 12))
        return false;
    for (size_t i = 0; i < kvl_shape_n_rows(s); i++) {
        const struct kvl_rows *r = &s->rows[i];

        if (r->type > TYPE_MAX || !r->row || r->row > KVL_ROW_MAX)
            return false;
        if (kvl_is_transposed(s, i) && (!r->element || r->element > ELEMENT_MAX || !r->n ||
                                        r->n > N_ROWS_MAX || (uint64_t)r->element * r->n != r->row))
            return false;
        sum += r->row;
    }
    s->token_bytes = sum;
    return sum <= KVL_TOKEN_MAX;
}

int kvl_shape_decode(const uint8_t *data, size_t len, enum kvl_form form, struct kvl_shape *ret)
{
    struct kvl_shape s = {.form = form};
    struct reader r = {.data = data, .len = len};
    int rc = -EBADMSG;

    s.prefix_len = take_u32(&r);
    if (r.bad || s.prefix_len > KVL_PREFIX_MAX || s.prefix_len > r.len - r.at)
        return -EBADMSG;
    memcpy(s.prefix, r.data + r.at, s.prefix_len);
    skip(&r, s.prefix_len);
    s.n_streams = take_u32(&r);
    s.has_rotations = take_u32(&r) != 0;
    s.v_trans = take_u32(&r);
    s.extras = take_u32(&r);
    s.rotations[0] = take_u32(&r);
    s.rotations[1] = take_u32(&r);
    take_u32(&r); /* slots or unified: n_streams says so */
    s.n_layers = take_u32(&r);
    s.n_values = take_u32(&r);
    if (r.bad || s.n_layers > KVL_LAYERS_MAX || s.n_values > KVL_LAYERS_MAX ||
        (r.len - r.at) != kvl_shape_n_rows(&s) * 16)
        return -EBADMSG;
    s.rows = calloc(KV_MAX(kvl_shape_n_rows(&s), (size_t)1), sizeof(*s.rows));
    if (!s.rows)
        return -ENOMEM;
    for (size_t i = 0; i < kvl_shape_n_rows(&s); i++) {
        s.rows[i].type = take_u32(&r);
        s.rows[i].element = take_u32(&r);
        s.rows[i].n = take_u32(&r);
        s.rows[i].row = take_u32(&r);
    }
    if (!is_sound(&s))
        goto fail;
    *ret = s;
    return 0;
fail:
    kvl_shape_fini(&s);
    return rc;
}

/* -- taking apart ------------------------------------------------------------------------------ */

/* Variant of the format that an attempt assumes. */
struct variant {
    uint32_t extras;
    bool rotations, values;
};

static const uint32_t extras_known[] = {0, 8, 12};

static void take_prefix(struct reader *r, struct kvl_shape *s)
{
    uint32_t n;

    if (s->form == KVL_FORM_SEQUENCE) {
        s->prefix_len = r->len >= 8 && kv_get_le(r->data, 4) == STATE_MAGIC ? 8 : 0;
    } else {
        n = take_u32(r);
        if (r->bad || n > KVL_PREFIX_MAX - 4) {
            r->bad = true;
            return;
        }
        s->prefix_len = 4 + n;
        r->at = 0;
    }
    skip(r, s->prefix_len);
    if (!r->bad)
        memcpy(s->prefix, r->data, s->prefix_len);
}

/* Read K or V of all layers. Offsets go to @offsets. */
static void take_rows(struct reader *r, struct kvl_view *v, size_t first, size_t n)
{
    for (size_t i = first; i < first + n && !r->bad; i++) {
        struct kvl_rows *rows = &v->shape.rows[i];

        rows->type = take_u32(r);
        if (kvl_is_transposed(&v->shape, i)) {
            rows->element = take_u32(r);
            rows->n = take_u32(r);
            if (rows->element > ELEMENT_MAX || rows->n > N_ROWS_MAX)
                r->bad = true;
            rows->row = (uint64_t)rows->element * rows->n;
        } else {
            rows->row = take_u64(r);
        }
        if (rows->type > TYPE_MAX || !rows->row || rows->row > KVL_ROW_MAX)
            r->bad = true;
        v->rows[i] = r->at;
        skip(r, rows->row * v->n_cells);
    }
}

/* Read the number of cells of the streams up to the first with any. */
static uint32_t take_empty_streams(struct reader *r, uint32_t n_streams)
{
    uint32_t stream = 0;

    while (!r->bad && stream < n_streams && take_u32(r) == 0)
        stream++;
    return stream;
}

static bool make_rows(struct kvl_view *v)
{
    size_t n = 2 * (size_t)v->shape.n_layers;

    v->shape.rows = calloc(n, sizeof(*v->shape.rows));
    v->rows = calloc(n, sizeof(*v->rows));
    return v->shape.rows && v->rows;
}

/*
 * Read a cache up to its K, behind the state's prefix. Returns 0 or -ENODATA. Sets *@ret_after to the
 * streams that follow.
 */
static int take_cells(struct reader *r, struct kvl_view *v, const struct variant *variant,
                      uint32_t *ret_after)
{
    struct kvl_shape *s = &v->shape;
    uint32_t stream;

    s->n_streams = take_u32(r);
    if (r->bad || !s->n_streams || s->n_streams > KVL_STREAMS_MAX)
        return -ENODATA;
    stream = take_empty_streams(r, s->n_streams);
    if (r->bad || stream == s->n_streams)
        return -ENODATA;
    *ret_after = s->n_streams - stream - 1;
    v->n_cells = (uint32_t)kv_get_le(r->data + r->at - 4, 4);
    s->extras = variant->extras;
    v->cells = r->at;
    skip(r, (uint64_t)v->n_cells * kvl_cell_bytes(s));
    s->v_trans = take_u32(r);
    s->n_layers = take_u32(r);
    s->has_rotations = variant->rotations;
    if (variant->rotations) {
        s->rotations[0] = take_u32(r);
        s->rotations[1] = take_u32(r);
    }
    return r->bad || v->n_cells > KVL_TOKENS_MAX || s->v_trans > 1 || s->n_layers > KVL_LAYERS_MAX
               ? -ENODATA
               : 0;
}

/* Read a cache behind the state's prefix. Returns 0, -ENODATA or -ENOMEM. */
static int take_cache(struct reader *r, struct kvl_view *v, const struct variant *variant)
{
    struct kvl_shape *s = &v->shape;
    uint32_t after;

    if (take_cells(r, v, variant, &after) < 0 || !s->n_layers)
        return -ENODATA;
    if (!make_rows(v))
        return -ENOMEM;
    take_rows(r, v, 0, s->n_layers);
    s->n_values = variant->values ? s->n_layers : 0;
    take_rows(r, v, s->n_layers, s->n_values);
    if (take_empty_streams(r, after) != after)
        return -ENODATA;
    return !r->bad && is_sound(s) ? 0 : -ENODATA;
}

/*
 * Try one variant, of a state of @n caches. Returns 0, -ENODATA or -ENOMEM; @views have to be freed in
 * any case.
 */
static int try_variant(struct kvl_view *views, size_t n, const struct variant *variant)
{
    struct reader r = {.data = views->data, .len = views->len};
    int rc = 0;

    take_prefix(&r, &views->shape);
    for (size_t i = 0; i < n && !rc; i++)
        rc = take_cache(&r, &views[i], variant);
    return rc ? rc : r.at == r.len ? 0 : -ENODATA;
}

/* Check that each cell is of one sequence: what cells of another format hardly look like. */
static bool are_cells(const struct kvl_view *v)
{
    for (size_t i = 0; i < v->n_cells; i++)
        if (kv_get_le(v->data + v->cells + i * kvl_cell_bytes(&v->shape) + 4, 4) != 1)
            return false;
    return true;
}

/*
 * Check that the cells are of the n positions from v->first on, once each, in one sequence; note their
 * order. Returns 0; -ENODATA: aren't cells; -ESTALE: of other positions; -ENOMEM.
 */
static int order_cells(struct kvl_view *v)
{
    size_t bytes = kvl_cell_bytes(&v->shape), n = v->n_cells;
    const uint8_t *cell = v->data + v->cells, *seq = cell + bytes - 4;
    bool in_order = true;

    if (!are_cells(v))
        return -ENODATA;
    v->cell_of = malloc(n * sizeof(*v->cell_of));
    if (!v->cell_of)
        return -ENOMEM;
    memset(v->cell_of, 0xff, n * sizeof(*v->cell_of));
    for (size_t i = 0; i < n; i++, cell += bytes) {
        uint64_t position = kv_get_le(cell, 4) - v->first; /* of one before it: above n */

        if (position >= n || v->cell_of[position] != UINT32_MAX ||
            memcmp(cell + bytes - 4, seq, 4) != 0)
            return -ESTALE;
        v->cell_of[position] = (uint32_t)i;
        in_order = in_order && position == i;
    }
    if (in_order) {
        free(v->cell_of);
        v->cell_of = NULL;
    }
    return 0;
}

/*
 * Note the order of all cells, those of the first cache from position @first on. Returns as order_cells;
 * -ENODATA: the second cache's are of other positions.
 */
static int order_all(struct kvl_view *views, size_t n, uint32_t first)
{
    int rc;

    views[0].first = first;
    rc = order_cells(views);
    if (rc || n == 1)
        return rc;
    if (views[1].n_cells > first + views[0].n_cells)
        return -ENODATA;
    views[1].first = first + views[0].n_cells - views[1].n_cells;
    rc = order_cells(&views[1]);
    return rc == -ESTALE ? -ENODATA : rc;
}

/* Take a state of @n caches apart: the one variant that fits. */
static int parse(const uint8_t *data, size_t len, enum kvl_form form, size_t n, uint32_t first,
                 struct kvl_view *ret)
{
    struct kvl_view found[KVL_CACHES_MAX];
    size_t n_found = 0;
    int rc = 0;

    for (size_t i = 0; i < 4 * KV_COUNT(extras_known) && rc != -ENOMEM; i++) {
        struct variant variant = {extras_known[i / 4], i & 1, !(i & 2)};
        struct kvl_view views[KVL_CACHES_MAX];

        memset(views, 0, sizeof(views));
        for (size_t k = 0; k < n; k++)
            views[k] = (struct kvl_view){
                .data = (uint8_t *)(uintptr_t)data, .len = len, .shape.form = form};
        rc = try_variant(views, n, &variant);
        if (!rc && !n_found++)
            memcpy(found, views, sizeof(found));
        else
            kvl_views_fini(views, n, false);
    }
    if (rc != -ENOMEM)
        rc = n_found == 1 ? order_all(found, n, first) : -ENODATA;
    if (!rc)
        memcpy(ret, found, n * sizeof(*ret));
    else if (n_found)
        kvl_views_fini(found, n, false);
    return rc;
}

int kvl_view_parse(const uint8_t *data, size_t len, enum kvl_form form, struct kvl_view *ret)
{
    return parse(data, len, form, 1, 0, ret);
}

int kvl_pair_parse(const uint8_t *data, size_t len, enum kvl_form form, uint32_t first,
                   struct kvl_view ret[KVL_CACHES_MAX])
{
    return first > KVL_TOKENS_MAX ? -ENODATA : parse(data, len, form, KVL_CACHES_MAX, first, ret);
}

void kvl_view_fini(struct kvl_view *v, bool made)
{
    kvl_shape_fini(&v->shape);
    free(v->rows);
    free(v->cell_of);
    if (made)
        free(v->data);
    *v = (struct kvl_view){0};
}

/* Read V behind K, where there is any: a model without V has another cache's bytes there. */
static void take_values(struct reader r, struct kvl_view *v)
{
    struct kvl_shape *s = &v->shape;

    s->n_values = s->n_layers;
    take_rows(&r, v, s->n_layers, s->n_layers);
    s->n_values = r.bad ? 0 : s->n_layers;
}

/*
 * Read the cache that a state begins with. Several variants may fit, as nothing is known
 * of the rest: @ret then holds the first. Returns 0, -ENODATA, -ESTALE or -ENOMEM.
 */
static int take_first(struct kvl_view *v, const struct variant *variant)
{
    struct reader r = {.data = v->data, .len = v->len};
    uint32_t after;
    int rc;

    take_prefix(&r, &v->shape);
    rc = take_cells(&r, v, variant, &after);
    if (rc)
        return rc;
    if (v->shape.n_layers) { /* else all layers have windows */
        if (!make_rows(v))
            return -ENOMEM;
        take_rows(&r, v, 0, v->shape.n_layers);
        take_values(r, v);
    }
    return r.bad ? -ENODATA : order_cells(v);
}

static void put_first(const struct kvl_view *v, struct kv_buf *ret)
{
    const struct kvl_shape *s = &v->shape;

    kvl_put_u32(ret, s->form == KVL_FORM_SEQUENCE ? s->prefix_len : 0);
    kvl_put_u32(ret, s->has_rotations);
    kvl_put_u32(ret, s->n_streams);
    kvl_shape_identity(s, ret);
}

int kvl_whole_identity(const uint8_t *data, size_t len, enum kvl_form form, struct kv_buf *ret,
                       uint32_t *ret_tokens)
{
    bool is_stale = false;

    *ret_tokens = 0;
    for (size_t i = 0; i < 2 * KV_COUNT(extras_known) && !*ret_tokens; i++) {
        struct variant variant = {extras_known[i / 2], i & 1, false};
        struct kvl_view v = {.data = (uint8_t *)(uintptr_t)data, .len = len, .shape.form = form};
        int rc = take_first(&v, &variant);

        if (!rc) {
            *ret_tokens = v.n_cells;
            put_first(&v, ret);
        }
        kvl_view_fini(&v, false);
        if (rc == -ENOMEM || ret->error)
            return -ENOMEM;
        is_stale = is_stale || rc == -ESTALE;
    }
    return is_stale && !*ret_tokens ? -ESTALE : 0;
}

uint32_t kvl_streams_of(const uint8_t *data, size_t len)
{
    struct reader r = {.data = data, .len = len};
    struct kvl_shape s = {.form = KVL_FORM_SEQUENCE};
    uint32_t n;

    take_prefix(&r, &s);
    n = take_u32(&r);
    return !r.bad && n <= KVL_STREAMS_MAX ? n : 0;
}
