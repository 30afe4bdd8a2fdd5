// SPDX-License-Identifier: Apache-2.0
/**
 * The state of one sequence in llama.cpp's memory, taken apart and put together (little-endian; from
 * states that libllama wrote):
 *
 *     prefix:  sequence: u32 0xaf143cd8, i32 sequence (older ones: nothing); context: u32 n, n bytes
 *     cache:   u32 n_streams, then per stream u32 n_cells and, if any:
 *     cells:   per cell i32 position, u32 1, [8 or 12 bytes of extras (M-RoPE)], i32 sequence
 *     head:    u32 v_trans, u32 n_layers, [2 * u32 rotations]
 *     K, V:    per layer i32 type, u64 row_bytes, n_cells rows
 *     V if v_trans: per layer i32 type, u32 element, u32 n_rows, n_rows * n_cells elements
 *
 * A state can be cut at tokens when it is all of this and nothing else: one stream with cells, one
 * cell for each position from 0. So can a pair of caches, of models with sliding windows: behind the
 * first follows a second one from "cache" on, whose cells are of the last positions of the first, one
 * each. Other memories (recurrent state) have other bytes behind, so they don't fit.
 */
#ifndef KVL_SHAPE_H
#define KVL_SHAPE_H

#include "base/core/buf.h"
#include "base/core/le.h"
#include "kv_llama.h"

enum {
    KVL_CACHES_MAX = 2,  /* of a memory that can be cut: full attention; layers with a window */
    KVL_PREFIX_MAX = 72, /* bytes */
    KVL_LAYERS_MAX = 1024,
    KVL_STREAMS_MAX = 256,
    KVL_ROW_MAX = 16 << 20,  /* bytes of one token in one layer's K or V */
    KVL_TOKEN_MAX = 64 << 20 /* bytes of one token in all of them */
};

/** K or V of one layer. Transposed: @n rows of elements of @element bytes. */
struct kvl_rows {
    uint32_t type, element, n;
    uint64_t row; /* bytes per token; of transposed V: n * element */
};

/** All that states of one memory have in common. @rows: of K, then of V. */
struct kvl_shape {
    enum kvl_form form;
    uint8_t prefix[KVL_PREFIX_MAX];
    uint32_t prefix_len;
    uint32_t n_streams, extras, v_trans, n_layers, n_values, rotations[2];
    bool has_rotations;
    uint64_t token_bytes; /* extras and all rows of one token */
    struct kvl_rows *rows;
};

static inline size_t kvl_shape_n_rows(const struct kvl_shape *s)
{
    return (size_t)s->n_layers + s->n_values;
}

static inline bool kvl_is_transposed(const struct kvl_shape *s, size_t rows)
{
    return s->v_trans && rows >= s->n_layers;
}

/** Append a number of 4 bytes. */
static inline void kvl_put_u32(struct kv_buf *buf, uint32_t value)
{
    uint8_t bytes[4];

    kv_put_le32(bytes, value);
    kv_buf_append(buf, bytes, sizeof(bytes));
}

/** One cache of a state in memory, with its parts. */
struct kvl_view {
    struct kvl_shape shape;
    uint8_t *data; /* the whole state. Of a view made by a parse: read-only, the caller's */
    size_t len;    /* of the whole state */
    uint32_t first, n_cells; /* the cells are of positions [first, first + n_cells) */
    size_t cells;            /* offset of the first cell */
    size_t *rows;            /* offset of the rows of each K and V */
    uint32_t *cell_of;       /* [position - first]: its cell; NULL: the same number */
};

/** Return the cell of @position, which the view has. */
static inline size_t kvl_cell_at(const struct kvl_view *v, size_t position)
{
    return v->cell_of ? v->cell_of[position - v->first] : position - v->first;
}

/**
 * Take a state apart. Returns 0: @ret borrows @data until kvl_view_fini. -ENODATA: can't be cut;
 * -ESTALE: could be, but its cells aren't one for each position from 0 of one sequence; -ENOMEM.
 */
int kvl_view_parse(const uint8_t *data, size_t len, enum kvl_form form, struct kvl_view *ret);

/**
 * Take a state of a pair of caches apart, or the tail of one: the first cache has cells from position
 * @first on. @ret[1] has cells of the last positions of @ret[0], one each. Returns 0: both borrow @data
 * until kvl_view_fini. Errors as kvl_view_parse; -ENODATA also where the second cache has other positions.
 */
int kvl_pair_parse(const uint8_t *data, size_t len, enum kvl_form form, uint32_t first,
                   struct kvl_view ret[KVL_CACHES_MAX]);

/**
 * Make a state of @n caches in sequence @seq: all but extras and rows. The caller has set first and
 * n_cells (at least 1) of each @views[i]. Of several streams, cells lie in that of @seq. All views have
 * the malloc'd data; free it with that of the first. Returns 0, -ENOMEM, -EMSGSIZE.
 */
int kvl_views_make(const struct kvl_shape *const shapes[], size_t n, int32_t seq,
                   struct kvl_view *views);

/** Free what a view has, its data only when @made. */
void kvl_view_fini(struct kvl_view *v, bool made);

/** Free what @n views of one state have, the state only when @made. */
static inline void kvl_views_fini(struct kvl_view *views, size_t n, bool made)
{
    for (size_t i = n; i-- > 0;)
        kvl_view_fini(&views[i], made && !i);
}

static inline size_t kvl_cell_bytes(const struct kvl_shape *s)
{
    return 12 + (size_t)s->extras;
}

/** Return true when states of both shapes have the same bytes per token, in the same places. */
bool kvl_shape_is_alike(const struct kvl_shape *a, const struct kvl_shape *b);

/** Copy extras and rows of @n positions from @first on. Both views have them, and are alike. */
void kvl_copy_cells(const struct kvl_view *to, const struct kvl_view *from, size_t first, size_t n);

/** Address of the extras of cell @i. */
static inline uint8_t *kvl_extras(const struct kvl_view *v, size_t i)
{
    return v->data + v->cells + i * kvl_cell_bytes(&v->shape) + 8;
}

/** Append what decides K and V: the bytes of which a root is a hash. */
void kvl_shape_identity(const struct kvl_shape *s, struct kv_buf *ret);

/** Append @s for kvl_shape_decode. */
void kvl_shape_encode(const struct kvl_shape *s, struct kv_buf *ret);

/** Read a shape. Returns 0 (free with kvl_shape_fini); -EBADMSG; -ENOMEM. */
int kvl_shape_decode(const uint8_t *data, size_t len, enum kvl_form form, struct kvl_shape *ret);

/** Copy @s. Returns 0 or -ENOMEM. */
int kvl_shape_copy(const struct kvl_shape *s, struct kvl_shape *ret);
void kvl_shape_fini(struct kvl_shape *s);

/**
 * Tell of a state that can't be cut what all states of its memory have in common, and for how many
 * tokens it is. When it begins with a cache (windows, hybrid models), append version, streams and
 * layers of that to @ret, and set *@ret_tokens to its cells: one for each position from 0. Of other
 * states set it to 0 and append nothing. Returns 0; -ESTALE: the cache's positions are others, so
 * the state isn't that of any tokens; -ENOMEM.
 */
int kvl_whole_identity(const uint8_t *data, size_t len, enum kvl_form form, struct kv_buf *ret,
                       uint32_t *ret_tokens);

/** Read the number of streams of a state of sequence form. Returns 0 when @data is none. */
uint32_t kvl_streams_of(const uint8_t *data, size_t len);

#endif
