// SPDX-License-Identifier: Apache-2.0
/* llama.cpp sequence states made from the format's description (src/store/object/cut_llama.c). A
 * token's K and V depend only on the token's position, the layer and the seed, as in a growing
 * conversation. */
#ifndef TESTS_STORE_LLAMA_STATE_H
#define TESTS_STORE_LLAMA_STATE_H

#include <stdbool.h>
#include <string.h>

#include "base/core/buf.h"

/* Beginning of a state. */
enum llama_kind {
    LLAMA_FILE,    /* llama_state_seq_save_file */
    LLAMA_BARE,    /* as a file, without its header */
    LLAMA_RAW,     /* llama_state_seq_get_data */
    LLAMA_WHOLE,   /* llama_state_get_data */
    LLAMA_SESSION, /* llama_state_save_file */
    LLAMA_KINDS
};

struct llama_state {
    enum llama_kind kind;
    uint32_t version;  /* of a file; from 4 on (of a session file: 11) with rotation sizes */
    bool rotations;    /* where no version tells */
    uint32_t n_tokens; /* cells */
    uint32_t n_layers;
    uint32_t k_row, v_row; /* bytes; v_row 0: no V */
    bool v_trans;          /* V as v_row / 2 rows of elements of 2 bytes */
    uint32_t ext;          /* bytes more per cell: 0, 8 or 12 */
    uint32_t streams;      /* 0: 1; the cells are in the last, the others are empty */
    uint32_t slot;
    uint64_t seed;
    uint32_t second; /* cells of a second cache behind the first; 0: none */
    uint32_t
        window;     /* tokens of a second cache that slides, in a ring of twice its size; 0: none */
    uint32_t image; /* tokens 100 to 100 + image have one position; 0: none */
    uint32_t recurrent; /* bytes of a row of a recurrent state behind the caches; 0: none */
};

static inline uint64_t llama_mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline void llama_u32(struct kv_buf *b, uint32_t x)
{
    uint8_t le[4] = {(uint8_t)x, (uint8_t)(x >> 8), (uint8_t)(x >> 16), (uint8_t)(x >> 24)};

    kv_buf_append(b, le, 4);
}

/* The row of one token in one layer, of any length. */
static inline void llama_row(struct kv_buf *b, uint64_t seed, uint32_t len)
{
    for (uint32_t at = 0; at < len; at += 8) {
        uint64_t x = llama_mix(seed + at * UINT64_C(0x9e3779b97f4a7c15));

        kv_buf_append(b, &x, KV_MIN(len - at, 8u));
    }
}

static inline uint64_t llama_seed(const struct llama_state *s, uint32_t layer, bool v, uint32_t t)
{
    return llama_mix(llama_mix(s->seed + layer * 2 + v + 1) + t);
}

/* Number of the token in cell @cell, of @cells: the ring keeps token t in cell t % (2 * window). */
static inline uint32_t llama_token(const struct llama_state *s, uint32_t cell, uint32_t cells)
{
    uint32_t first = s->n_tokens - cells, ring = 2 * s->window, wrap;

    if (!s->window || cells == s->n_tokens)
        return cell;
    wrap = (s->n_tokens - 1) / ring * ring; /* the token at the ring's beginning */
    if (wrap <= first)
        return first + cell;
    return cell < s->n_tokens - wrap ? wrap + cell : first + cell - (s->n_tokens - wrap);
}

static inline uint32_t llama_position(const struct llama_state *s, uint32_t token)
{
    return token < 100 || !s->image ? token : token < 100 + s->image ? 100 : token - s->image + 1;
}

static inline void llama_matrix(struct kv_buf *b, const struct llama_state *s, uint32_t layer,
                                bool v, uint32_t row, uint32_t cells)
{
    llama_u32(b, 255); /* a type whose blocks the parser doesn't know */
    llama_u32(b, row);
    llama_u32(b, 0);
    for (uint32_t i = 0; i < cells; i++)
        llama_row(b, llama_seed(s, layer, v, llama_token(s, i, cells)), row);
}

static inline void llama_transposed(struct kv_buf *b, const struct llama_state *s, uint32_t layer,
                                    uint32_t cells)
{
    llama_u32(b, 1);
    llama_u32(b, 2);
    llama_u32(b, s->v_row / 2);
    for (uint32_t e = 0; e < s->v_row / 2; e++)
        for (uint32_t i = 0; i < cells; i++) {
            uint64_t x = llama_mix(llama_seed(s, layer, true, llama_token(s, i, cells)) + e);

            kv_buf_append(b, &x, 2);
        }
}

static inline bool llama_rotates(const struct llama_state *s)
{
    return s->kind == LLAMA_FILE      ? s->version >= 4
           : s->kind == LLAMA_SESSION ? s->version >= 11
                                      : s->rotations;
}

static inline void llama_cell(struct kv_buf *b, const struct llama_state *s, uint32_t token)
{
    llama_u32(b, llama_position(s, token));
    llama_u32(b, 1);
    if (s->ext) {
        llama_u32(b, token / 7);
        llama_u32(b, token % 7);
    }
    if (s->ext == 12)
        llama_u32(b, (uint32_t)llama_mix(token) % 100000);
    llama_u32(b, s->slot);
}

static inline void llama_cache(struct kv_buf *b, const struct llama_state *s, uint32_t cells)
{
    llama_u32(b, KV_MAX(s->streams, 1u));
    for (uint32_t i = 1; i < s->streams; i++)
        llama_u32(b, 0);
    llama_u32(b, cells);
    if (!cells)
        return;
    for (uint32_t i = 0; i < cells; i++)
        llama_cell(b, s, llama_token(s, i, cells));
    llama_u32(b, s->v_trans);
    llama_u32(b, s->n_layers);
    for (uint32_t i = 0; llama_rotates(s) && i < 2; i++)
        llama_u32(b, 64);
    for (uint32_t i = 0; i < s->n_layers; i++)
        llama_matrix(b, s, i, false, s->k_row, cells);
    for (uint32_t i = 0; s->v_row && i < s->n_layers; i++)
        if (s->v_trans)
            llama_transposed(b, s, i, cells);
        else
            llama_matrix(b, s, i, true, s->v_row, cells);
}

static inline void llama_head(struct kv_buf *b, const struct llama_state *s)
{
    static const char arch[] = "qwen2-vl";

    if (s->kind == LLAMA_RAW) {
        llama_u32(b, 0xaf143cd8);
        llama_u32(b, s->slot);
    }
    if (s->kind == LLAMA_FILE || s->kind == LLAMA_SESSION) {
        llama_u32(b, s->kind == LLAMA_FILE ? 0x67677371 : 0x6767736e);
        llama_u32(b, s->version);
        llama_u32(b, s->n_tokens);
        for (uint32_t t = 0; t < s->n_tokens; t++)
            llama_u32(b, (uint32_t)llama_mix(s->seed + t) & 0x1ffff);
    }
    if (s->kind == LLAMA_WHOLE || s->kind == LLAMA_SESSION) {
        llama_u32(b, sizeof(arch) - 1);
        kv_buf_append(b, arch, sizeof(arch) - 1);
    }
}

/* A recurrent state of two layers: R has rows of s->recurrent bytes, S of none. */
static inline void llama_recurrent(struct kv_buf *b, const struct llama_state *s)
{
    bool named = s->kind == LLAMA_WHOLE || s->kind == LLAMA_SESSION;

    llama_u32(b, 1);
    llama_u32(b, s->n_tokens - 1);
    llama_u32(b, named); /* sequences of the cell */
    if (named)
        llama_u32(b, s->slot);
    llama_u32(b, 0);
    llama_u32(b, 4); /* layers, two of them recurrent */
    for (uint32_t i = 0; i < 4; i++) {
        llama_u32(b, 0);
        llama_u32(b, i < 2 ? s->recurrent : 0);
        llama_u32(b, 0);
        if (i < 2)
            llama_row(b, llama_mix(s->seed + s->n_tokens) + i, s->recurrent);
    }
}

static inline void llama_state_make(const struct llama_state *s, struct kv_buf *b)
{
    struct llama_state second = *s;

    *b = (struct kv_buf)KV_BUF_INIT;
    llama_head(b, s);
    llama_cache(b, s, s->n_tokens);
    second.seed++;
    if (s->second) {
        second.n_tokens = s->second;
        llama_cache(b, &second, s->second);
    }
    if (s->window)
        llama_cache(b, &second, KV_MIN(s->window, s->n_tokens));
    if (s->recurrent)
        llama_recurrent(b, s);
}

#endif
