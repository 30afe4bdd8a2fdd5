// SPDX-License-Identifier: Apache-2.0
/*
 * A small libllama for tests: the C functions that libkvasir_llama calls, over a cache of a few
 * tokens. It keeps their contract: states of the same bytes as libllama's, a full check of what a
 * state says before any of it is used, sequences in streams or in one buffer. K and V of a token
 * follow from all tokens before and, in the last bit, from the slot that computed them, as with
 * llama.cpp's kernels.
 *
 *     toy_init(&toy, &(struct toy_kind){.n_streams = 1, .n_layers = 2, .k_row = 12, .v_row = 8});
 *     toy_decode(&toy, seq, tokens, n);
 *     toy_table(&lib);
 */
#ifndef TESTS_LLAMA_TOY_LLAMA_H
#define TESTS_LLAMA_TOY_LLAMA_H

#include "base/unit.h"
#include "kv_llama.h"

enum { TOY_CELLS = 700, TOY_LAYERS = 4, TOY_ROW = 32, TOY_SEQS = 4 };

/*
 * Properties of a memory. v_row 0: no V (MLA). window: a second cache of the last few tokens. n_swa: tokens
 * that its layers read, as the model tells; 0: this libllama can't tell.
 */
struct toy_kind {
    uint32_t n_streams, n_layers, k_row, v_row, k_type, extras, rotations[2], window, n_swa;
    bool v_trans, has_rotations, old_prefix, recurrent, scatter;
};

struct toy_cell {
    int32_t seq; /* -1: free */
    int32_t position;
    uint8_t extras[12];
    uint8_t k[TOY_LAYERS][TOY_ROW], v[TOY_LAYERS][TOY_ROW];
    uint64_t chain; /* hash of the tokens up to here */
};

struct toy_memory {
    struct toy_kind kind;
    struct toy_cell cells[TOY_SEQS][TOY_CELLS]; /* of each stream; one stream: of [0] */
    unsigned gets, sets, refused;
};

/* The type that libllama's names stand for. */
struct llama_context {
    struct toy_memory *memory;
};

static inline void toy_init(struct toy_memory *t, const struct toy_kind *kind)
{
    memset(t, 0, sizeof(*t));
    t->kind = *kind;
    for (int s = 0; s < TOY_SEQS; s++)
        for (int i = 0; i < TOY_CELLS; i++)
            t->cells[s][i].seq = -1;
}

static inline struct toy_cell *toy_stream(struct toy_memory *t, int32_t seq)
{
    return t->cells[t->kind.n_streams > 1 ? seq : 0];
}

static inline struct toy_cell *toy_find(struct toy_memory *t, int32_t seq, int32_t position)
{
    struct toy_cell *cells = toy_stream(t, seq);

    for (int i = 0; i < TOY_CELLS; i++)
        if (cells[i].seq == seq && cells[i].position == position)
            return &cells[i];
    return NULL;
}

static inline int32_t toy_pos_max(struct toy_memory *t, int32_t seq)
{
    struct toy_cell *cells = toy_stream(t, seq);
    int32_t max = -1;

    for (int i = 0; i < TOY_CELLS; i++)
        if (cells[i].seq == seq && cells[i].position > max)
            max = cells[i].position;
    return max;
}

static inline uint64_t toy_mix(uint64_t a, uint64_t b)
{
    uint64_t state = (a ^ (b * UINT64_C(0x9e3779b97f4a7c15))) | 1;

    return unit_random(&state) ^ (a << 7);
}

/* Compute the rows of a cell from its chain; the last bit of each byte is the slot's. */
static inline void toy_rows(struct toy_memory *t, struct toy_cell *cell, int32_t slot)
{
    for (uint32_t l = 0; l < t->kind.n_layers; l++)
        for (uint32_t i = 0; i < TOY_ROW; i++) {
            cell->k[l][i] = (uint8_t)(toy_mix(cell->chain, l * 64 + i) << 1 | (slot & 1));
            cell->v[l][i] = (uint8_t)(toy_mix(cell->chain, 4096 + l * 64 + i) << 1 | (slot & 1));
        }
}

/* A free cell of a stream: the first, or with scatter one from the end. */
static inline struct toy_cell *toy_free_cell(struct toy_memory *t, int32_t seq, int32_t position)
{
    struct toy_cell *cells = toy_stream(t, seq);

    for (int i = 0; i < TOY_CELLS; i++) {
        int at = t->kind.scatter ? (i * 251 + position * 7) % TOY_CELLS : i;

        if (cells[at].seq < 0)
            return &cells[at];
    }
    fail_msg("no cell is free");
    return NULL;
}

/* Decode tokens [done, n): what a model does with a prompt. */
static inline void toy_decode(struct toy_memory *t, int32_t seq, const int32_t *tokens, size_t n)
{
    int32_t done = toy_pos_max(t, seq) + 1;
    uint64_t chain = done ? toy_find(t, seq, done - 1)->chain : 99;

    for (int32_t i = done; i < (int32_t)n; i++) {
        struct toy_cell *cell = toy_free_cell(t, seq, i);

        chain = toy_mix(chain, (uint32_t)tokens[i]);
        *cell = (struct toy_cell){.seq = seq, .position = i, .chain = chain};
        for (uint32_t e = 0; e < t->kind.extras; e++)
            cell->extras[e] = (uint8_t)(i + (int32_t)e);
        toy_rows(t, cell, seq);
    }
}

/* -- states: written and read here independently of the library --------------------------------- */

struct toy_out {
    uint8_t *at; /* NULL: count only */
    size_t len;
};

static inline void toy_put(struct toy_out *o, const void *data, size_t len)
{
    if (o->at)
        memcpy(o->at + o->len, data, len);
    o->len += len;
}

static inline void toy_put32(struct toy_out *o, uint32_t value)
{
    uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                        (uint8_t)(value >> 24)};

    toy_put(o, bytes, 4);
}

static inline bool toy_in_state(const struct toy_cell *cell, int32_t seq, int32_t from)
{
    return cell->seq == seq && cell->position >= from;
}

static inline void toy_put_kv(struct toy_out *o, struct toy_memory *t, int32_t seq, int32_t from,
                              bool values)
{
    uint32_t row = values ? t->kind.v_row : t->kind.k_row;
    struct toy_cell *cells = toy_stream(t, seq);

    for (uint32_t l = 0; l < t->kind.n_layers && row; l++) {
        toy_put32(o, t->kind.k_type);
        if (values && t->kind.v_trans) { /* elements of 2 bytes */
            toy_put32(o, 2);
            toy_put32(o, row / 2);
            for (uint32_t r = 0; r < row / 2; r++)
                for (int i = 0; i < TOY_CELLS; i++)
                    if (toy_in_state(&cells[i], seq, from))
                        toy_put(o, &cells[i].v[l][2 * r], 2);
            continue;
        }
        toy_put32(o, row);
        toy_put32(o, 0);
        for (int i = 0; i < TOY_CELLS; i++)
            if (toy_in_state(&cells[i], seq, from))
                toy_put(o, values ? cells[i].v[l] : cells[i].k[l], row);
    }
}

static inline void toy_put_cache(struct toy_out *o, struct toy_memory *t, int32_t seq, int32_t from)
{
    struct toy_cell *cells = toy_stream(t, seq);

    toy_put32(o, t->kind.n_streams);
    for (uint32_t s = 0; s < t->kind.n_streams; s++) {
        uint32_t n = 0;

        for (int i = 0; i < TOY_CELLS; i++)
            n += toy_in_state(&cells[i], seq, from) &&
                 (t->kind.n_streams == 1 || s == (uint32_t)seq);
        toy_put32(o, n);
        if (!n)
            continue;
        for (int i = 0; i < TOY_CELLS; i++) {
            if (!toy_in_state(&cells[i], seq, from))
                continue;
            toy_put32(o, (uint32_t)cells[i].position);
            toy_put32(o, 1);
            toy_put(o, cells[i].extras, t->kind.extras);
            toy_put32(o, (uint32_t)seq);
        }
        toy_put32(o, t->kind.v_trans);
        toy_put32(o, t->kind.n_layers);
        if (t->kind.has_rotations) {
            toy_put32(o, t->kind.rotations[0]);
            toy_put32(o, t->kind.rotations[1]);
        }
        toy_put_kv(o, t, seq, from, false);
        toy_put_kv(o, t, seq, from, true);
    }
}

static inline void toy_put_state(struct toy_out *o, struct toy_memory *t, int32_t seq)
{
    int32_t max = toy_pos_max(t, seq);
    struct toy_cell *last = max >= 0 ? toy_find(t, seq, max) : NULL;

    if (!t->kind.old_prefix) {
        toy_put32(o, 0xaf143cd8u);
        toy_put32(o, (uint32_t)seq);
    }
    if (t->kind.recurrent) { /* one state: of the last token */
        toy_put32(o, last != NULL);
        if (last) {
            toy_put32(o, (uint32_t)max);
            toy_put(o, &last->chain, sizeof(last->chain));
            toy_put(o, last->k, sizeof(last->k));
        }
        return;
    }
    toy_put_cache(o, t, seq, 0);
    if (t->kind.window)
        toy_put_cache(o, t, seq, max + 1 - (int32_t)t->kind.window);
}

static inline size_t toy_get_size(struct llama_context *ctx, int32_t seq)
{
    struct toy_out o = {NULL, 0};

    toy_put_state(&o, ctx->memory, seq);
    return o.len;
}

static inline size_t toy_get_data(struct llama_context *ctx, uint8_t *dst, size_t len, int32_t seq)
{
    struct toy_out o = {dst, 0};

    if (toy_get_size(ctx, seq) > len)
        return 0;
    ctx->memory->gets++;
    toy_put_state(&o, ctx->memory, seq);
    return o.len;
}

static inline bool toy_rm(struct llama_memory_i *memory, int32_t seq, int32_t p0, int32_t p1)
{
    struct toy_memory *t = (struct toy_memory *)memory;
    struct toy_cell *cells = toy_stream(t, seq);

    assert_true(p0 < 0 && p1 < 0);
    for (int i = 0; i < TOY_CELLS; i++)
        if (cells[i].seq == seq)
            cells[i].seq = -1;
    return true;
}

struct toy_in {
    const uint8_t *at;
    size_t left;
    bool bad;
};

static inline void toy_take(struct toy_in *in, void *ret, size_t len)
{
    memset(ret, 0, len);
    if (in->bad || in->left < len) {
        in->bad = true;
        return;
    }
    memcpy(ret, in->at, len);
    in->at += len;
    in->left -= len;
}

static inline uint32_t toy_take32(struct toy_in *in)
{
    uint8_t b[4];

    toy_take(in, b, 4);
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline void toy_expect(struct toy_in *in, uint32_t value)
{
    if (toy_take32(in) != value)
        in->bad = true;
}

static inline void toy_take_kv(struct toy_in *in, struct toy_memory *t, struct toy_cell **cells,
                               uint32_t n, bool values)
{
    uint32_t row = values ? t->kind.v_row : t->kind.k_row;

    for (uint32_t l = 0; l < t->kind.n_layers && row && !in->bad; l++) {
        toy_expect(in, t->kind.k_type);
        if (values && t->kind.v_trans) {
            toy_expect(in, 2);
            toy_expect(in, row / 2);
            for (uint32_t r = 0; r < row / 2 && !in->bad; r++)
                for (uint32_t i = 0; i < n; i++)
                    toy_take(in, &cells[i]->v[l][2 * r], 2);
            continue;
        }
        toy_expect(in, row);
        toy_expect(in, 0);
        for (uint32_t i = 0; i < n && !in->bad; i++)
            toy_take(in, values ? cells[i]->v[l] : cells[i]->k[l], row);
    }
}

static inline void toy_take_cells(struct toy_in *in, struct toy_memory *t, int32_t seq, uint32_t n)
{
    struct toy_cell *cells[TOY_CELLS];

    if (n > TOY_CELLS) {
        in->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n && !in->bad; i++) {
        int32_t position = (int32_t)toy_take32(in);

        cells[i] = toy_free_cell(t, seq, position);
        *cells[i] = (struct toy_cell){.seq = seq, .position = position};
        toy_expect(in, 1);
        toy_take(in, cells[i]->extras, t->kind.extras);
        toy_take32(in);
    }
    toy_expect(in, t->kind.v_trans);
    toy_expect(in, t->kind.n_layers);
    if (t->kind.has_rotations) {
        toy_expect(in, t->kind.rotations[0]);
        toy_expect(in, t->kind.rotations[1]);
    }
    if (in->bad)
        return;
    toy_take_kv(in, t, cells, n, false);
    toy_take_kv(in, t, cells, n, true);
}

static inline void toy_take_cache(struct toy_in *in, struct toy_memory *t, int32_t seq)
{
    toy_expect(in, t->kind.n_streams);
    for (uint32_t s = 0; s < t->kind.n_streams && !in->bad; s++) {
        uint32_t n = toy_take32(in);

        if (n && !in->bad)
            toy_take_cells(in, t, seq, n);
    }
}

/*
 * Check that @second has what layers with a window read behind the last token, with the bytes that stand in
 * the first cache; nothing from the future, and no position twice.
 */
static inline void toy_check_second(struct toy_in *in, struct toy_memory *first,
                                    struct toy_memory *second, int32_t seq)
{
    int32_t n = toy_pos_max(first, seq) + 1;
    int32_t from = KV_MAX(n - (int32_t)first->kind.n_swa + 1, 0);
    struct toy_cell *cells = toy_stream(second, seq);
    int32_t count = 0, least = n;

    if (in->bad)
        return;
    for (int i = 0; i < TOY_CELLS; i++) {
        const struct toy_cell *is = &cells[i], *want = toy_find(first, seq, cells[i].position);

        if (is->seq != seq)
            continue;
        count++;
        least = KV_MIN(least, is->position);
        if (!want || memcmp(is->extras, want->extras, sizeof(is->extras)) != 0 ||
            memcmp(is->k, want->k, sizeof(is->k)) != 0 ||
            memcmp(is->v, want->v, sizeof(is->v)) != 0)
            in->bad = true;
    }
    if (n && (least > from || count != n - least))
        in->bad = true;
}

static inline size_t toy_set_data(struct llama_context *ctx, const uint8_t *src, size_t len,
                                  int32_t seq)
{
    struct toy_memory *t = ctx->memory;
    struct toy_in in = {src, len, false};

    t->sets++;
    toy_rm((struct llama_memory_i *)t, seq, -1, -1);
    if (!t->kind.old_prefix) {
        toy_expect(&in, 0xaf143cd8u);
        toy_take32(&in);
    }
    if (t->kind.recurrent) {
        if (!in.bad && toy_take32(&in)) {
            struct toy_cell *cell = toy_free_cell(t, seq, 0);

            *cell = (struct toy_cell){.seq = seq, .position = (int32_t)toy_take32(&in)};
            toy_take(&in, &cell->chain, sizeof(cell->chain));
            toy_take(&in, cell->k, sizeof(cell->k));
        }
    } else {
        toy_take_cache(&in, t, seq);
        if (t->kind.window) {
            struct toy_memory *second =
                malloc(sizeof(*second)); /* the toy computes from the first */

            assert_non_null(second);
            toy_init(second, &t->kind);
            toy_take_cache(&in, second, seq);
            if (t->kind.n_swa)
                toy_check_second(&in, t, second, seq);
            free(second);
        }
    }
    if (!in.bad && !in.left)
        return len;
    toy_rm((struct llama_memory_i *)t, seq, -1, -1);
    t->refused++;
    return 0;
}

static inline struct llama_memory_i *toy_get_memory(const struct llama_context *ctx)
{
    return (struct llama_memory_i *)ctx->memory;
}

static inline int32_t toy_seq_pos_max(struct llama_memory_i *memory, int32_t seq)
{
    return toy_pos_max((struct toy_memory *)memory, seq);
}

static inline const struct llama_model *toy_get_model(const struct llama_context *ctx)
{
    return (const struct llama_model *)ctx->memory;
}

static inline int32_t toy_n_swa(const struct llama_model *model)
{
    return (int32_t)((const struct toy_memory *)model)->kind.n_swa;
}

static const struct kvl_libllama toy_table = {.size = sizeof(toy_table),
                                              .state_seq_get_size = toy_get_size,
                                              .state_seq_get_data = toy_get_data,
                                              .state_seq_set_data = toy_set_data,
                                              .get_memory = toy_get_memory,
                                              .memory_seq_rm = toy_rm,
                                              .memory_seq_pos_max = toy_seq_pos_max,
                                              .get_model = toy_get_model,
                                              .model_n_swa = toy_n_swa};

#endif
