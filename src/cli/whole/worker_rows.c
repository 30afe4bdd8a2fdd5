// SPDX-License-Identifier: Apache-2.0
/* The bytes of G1: written by kvx_write_kv, gathered by kvx_gather_kv, compared row by row. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "cli/whole/content.h"
#include "cli/whole/worker.h"

enum {
    AT_ONCE = 8,
    MAX_TOKENS = AT_ONCE * 64
}; /* blocks of a call: their rows stay in the CPU's cache */

static kvx_kv_io_desc_t rows_of(const struct kc_worker *w, uint32_t n_tokens)
{
    const struct kc_shape *s = &w->plan->shape;
    kvx_tensor_desc_t row = {.size = sizeof(row),
                             .dtype = KVX_DTYPE_BF16,
                             .memory = KVX_MEMORY_HOST,
                             .ndim = 3,
                             .shape = {n_tokens, s->heads, s->head_dim},
                             .stride = {(int64_t)s->heads * s->head_dim, s->head_dim, 1},
                             .data = w->rows[0]};
    kvx_kv_io_desc_t io = {.size = sizeof(io),
                           .key = row,
                           .value = row,
                           .num_tokens = n_tokens,
                           .num_kv_heads = s->heads,
                           .head_dim = s->head_dim};

    if (s->parts == 2)
        io.value.data = w->rows[1];
    return io;
}

/* Number of a group's layer among those of all groups: their content differs. */
static uint32_t number_of(const struct kc_worker *w, uint32_t group, uint32_t layer)
{
    return group * w->plan->shape.layers + layer;
}

/* @layer: its number among those of all groups */
static void make_rows(struct kc_worker *w, uint64_t key, uint32_t layer, uint32_t first, uint32_t n,
                      uint32_t to)
{
    uint32_t len = kc_shape_row_bytes(&w->plan->shape);

    for (uint32_t part = 0; part < w->plan->shape.parts; part++)
        for (uint32_t t = 0; t < n; t++)
            kc_content_fill(w->rows[part] + (size_t)(to + t) * len, len,
                            kc_content_seed(key, layer, part, first + t));
}

static int write_slots(struct kc_worker *w, uint32_t layer, const int64_t *slots, uint32_t n)
{
    const kvx_write_desc_t write = {
        .size = sizeof(write),
        .io = rows_of(w, n),
        .slots = {sizeof(kvx_slot_mapping_t), KVX_DTYPE_S64, n, -1, slots}};

    w->done.path_bytes[KC_PATH_WRITE] +=
        (uint64_t)n * w->plan->shape.parts * kc_shape_row_bytes(&w->plan->shape);
    return kvx_write_kv(&w->layers[layer], &write, NULL) == KVX_STATUS_OK ? 0 : -EIO;
}

static uint64_t spent(uint64_t *since)
{
    uint64_t now = kv_now_ns(), ns = now - *since;

    *since = now;
    return ns;
}

static int write_some(struct kc_worker *w, uint32_t group, uint32_t first, uint32_t n)
{
    uint32_t page = w->plan->shape.page_size;
    int64_t slots[MAX_TOKENS];
    uint64_t since = kv_now_ns();
    int rc = 0;

    for (uint32_t t = 0; t < n * page; t++)
        slots[t] = (int64_t)w->fresh[first + t / page].handle.block * page + t % page;
    for (uint32_t layer = 0; layer < w->plan->shape.layers && rc == 0; layer++) {
        for (uint32_t b = 0; b < n; b++)
            make_rows(w, w->keys[first + b], number_of(w, group, layer), 0, page, b * page);
        w->done.phase_ns[KC_PHASE_MAKE] += spent(&since);
        rc = write_slots(w, layer, slots, n * page);
        w->done.phase_ns[KC_PHASE_WRITE] += spent(&since);
    }
    return rc;
}

int kc_rows_write(struct kc_worker *w, uint32_t group, uint32_t first, uint32_t n)
{
    int rc = 0;

    for (uint32_t at = first; at < n && rc == 0; at += AT_ONCE)
        rc = write_some(w, group, at, KV_MIN(n - at, (uint32_t)AT_ONCE));
    return rc;
}

int kc_rows_write_token(struct kc_worker *w, uint32_t group, uint32_t block, uint64_t key,
                        uint32_t at)
{
    int64_t slot = (int64_t)block * w->plan->shape.page_size + at;
    uint64_t since = kv_now_ns();
    int rc = 0;

    for (uint32_t layer = 0; layer < w->plan->shape.layers && rc == 0; layer++) {
        make_rows(w, key, number_of(w, group, layer), at, 1, 0);
        rc = write_slots(w, layer, &slot, 1);
    }
    w->done.phase_ns[KC_PHASE_WRITE] += spent(&since);
    return rc;
}

/* ---- gathering ---- */

/* Blocks of one call: their numbers in G1, their keys, and the tokens that they have together. */
struct piece {
    uint32_t group;
    int32_t table[AT_ONCE];
    uint64_t keys[AT_ONCE];
    uint32_t n, n_tokens;
};

static int gather(struct kc_worker *w, uint32_t layer, const struct piece *piece)
{
    const int32_t length = (int32_t)piece->n_tokens;
    const kvx_gather_desc_t gather = {
        .size = sizeof(gather),
        .io = rows_of(w, piece->n_tokens),
        .block_table = {.size = sizeof(kvx_block_table_t),
                        .format = KVX_BLOCK_TABLE_PACKED,
                        .index_dtype = KVX_DTYPE_S32,
                        .seq_count = 1,
                        .beam_width = 1,
                        .max_blocks_per_seq = piece->n,
                        .indices = piece->table,
                        .indices_count = piece->n},
        .seq_lens = {sizeof(kvx_seq_lens_t), KVX_DTYPE_S32, 1, &length},
        .max_seq_len = piece->n_tokens};

    return kvx_gather_kv(&w->layers[layer], &gather, NULL) == KVX_STATUS_OK ? 0 : -EIO;
}

static void note_wrong(struct kc_worker *w, const struct piece *piece, uint32_t layer,
                       uint32_t part, uint32_t token)
{
    uint32_t page = w->plan->shape.page_size;

    if (w->done.rows_wrong++ == 0)
        snprintf(w->done.wrong, sizeof(w->done.wrong),
                 "worker %u, request %" PRIu64 ": key %016" PRIx64
                 ", layer %u, %s, token %u of the block",
                 w->number, w->done.number, piece->keys[token / page], layer, part ? "V" : "K",
                 token % page);
}

static void compare(struct kc_worker *w, const struct piece *piece, uint32_t layer)
{
    uint32_t page = w->plan->shape.page_size, len = kc_shape_row_bytes(&w->plan->shape);
    uint32_t number = number_of(w, piece->group, layer);

    if (w->plan->flip == KC_FLIP_GATHERED && !w->flipped) {
        w->rows[0][len / 2] ^= 1;
        w->flipped = true;
    }
    for (uint32_t part = 0; part < w->plan->shape.parts; part++)
        for (uint32_t t = 0; t < piece->n_tokens; t++)
            if (!kc_content_check(w->rows[part] + (size_t)t * len, len,
                                  kc_content_seed(piece->keys[t / page], number, part, t % page)))
                note_wrong(w, piece, number, part, t);
    w->done.bytes_checked += (uint64_t)piece->n_tokens * w->plan->shape.parts * len;
}

static int compare_piece(struct kc_worker *w, const struct piece *piece)
{
    uint64_t since = kv_now_ns();
    int rc = 0;

    for (uint32_t layer = 0; layer < w->plan->shape.layers && rc == 0; layer++) {
        rc = gather(w, layer, piece);
        w->done.phase_ns[KC_PHASE_GATHER] += spent(&since);
        if (rc == 0)
            compare(w, piece, layer);
        w->done.phase_ns[KC_PHASE_COMPARE] += spent(&since);
    }
    w->done.path_bytes[KC_PATH_GATHER] += piece->n_tokens * kc_shape_token_bytes(&w->plan->shape);
    return rc;
}

int kc_rows_compare(struct kc_worker *w, uint32_t group, uint32_t n, uint32_t tail, uint64_t key,
                    uint32_t extra)
{
    uint32_t all = n + (extra > 0), page = w->plan->shape.page_size;
    int rc = 0;

    for (uint32_t at = kc_shape_first(&w->plan->shape, group, n); at < all && rc == 0;
         at += AT_ONCE) {
        struct piece piece = {.group = group, .n = KV_MIN(all - at, (uint32_t)AT_ONCE)};

        for (uint32_t i = 0; i < piece.n; i++) {
            bool is_tail = at + i >= n;

            piece.table[i] = (int32_t)(is_tail ? tail : w->blocks[group][at + i].handle.block);
            piece.keys[i] = is_tail ? key : w->keys[at + i];
            piece.n_tokens += is_tail ? extra : page;
        }
        rc = compare_piece(w, &piece);
    }
    return rc;
}
