// SPDX-License-Identifier: Apache-2.0
/* llama.cpp sequence states made from the format's description (src/store/cut_llama.c). A
 * token's K and V depend only on the token's position, the layer and the seed, as in a growing
 * conversation. */
#ifndef TESTS_STORE_LLAMA_STATE_H
#define TESTS_STORE_LLAMA_STATE_H

#include <stdbool.h>
#include <string.h>

#include "base/buf.h"

struct llama_state {
    uint32_t version;  /* of the file; 0: a raw state */
    uint32_t n_tokens; /* cells */
    uint32_t n_layers;
    uint32_t k_row, v_row; /* bytes; v_row 0: no V */
    bool v_trans;          /* V as v_row / 2 rows of elements of 2 bytes */
    bool ext;              /* 8 more bytes per cell */
    uint32_t streams;      /* 0: 1; the cells are in the last, the others are empty */
    uint32_t slot;
    uint64_t seed;
    uint32_t second; /* cells of a second cache behind the first; 0: none */
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

static inline void llama_matrix(struct kv_buf *b, const struct llama_state *s, uint32_t layer,
                                bool v, uint32_t row)
{
    llama_u32(b, 1);
    llama_u32(b, row);
    llama_u32(b, 0);
    for (uint32_t t = 0; t < s->n_tokens; t++)
        llama_row(b, llama_seed(s, layer, v, t), row);
}

static inline void llama_transposed(struct kv_buf *b, const struct llama_state *s, uint32_t layer)
{
    llama_u32(b, 1);
    llama_u32(b, 2);
    llama_u32(b, s->v_row / 2);
    for (uint32_t e = 0; e < s->v_row / 2; e++)
        for (uint32_t t = 0; t < s->n_tokens; t++) {
            uint64_t x = llama_mix(llama_seed(s, layer, true, t) + e);

            kv_buf_append(b, &x, 2);
        }
}

static inline void llama_cache(struct kv_buf *b, const struct llama_state *s)
{
    llama_u32(b, KV_MAX(s->streams, 1u));
    for (uint32_t i = 1; i < s->streams; i++)
        llama_u32(b, 0);
    llama_u32(b, s->n_tokens);
    for (uint32_t t = 0; t < s->n_tokens; t++) {
        llama_u32(b, t);
        llama_u32(b, 1);
        if (s->ext) {
            llama_u32(b, t / 7);
            llama_u32(b, t % 7);
        }
        llama_u32(b, s->slot);
    }
    llama_u32(b, s->v_trans);
    llama_u32(b, s->n_layers);
    for (uint32_t i = 0; i < s->n_layers; i++)
        llama_matrix(b, s, i, false, s->k_row);
    for (uint32_t i = 0; s->v_row && i < s->n_layers; i++)
        if (s->v_trans)
            llama_transposed(b, s, i);
        else
            llama_matrix(b, s, i, true, s->v_row);
}

static inline void llama_state_make(const struct llama_state *s, struct kv_buf *b)
{
    *b = (struct kv_buf)KV_BUF_INIT;
    if (s->version) {
        llama_u32(b, 0x67677371);
        llama_u32(b, s->version);
        llama_u32(b, s->n_tokens);
        for (uint32_t t = 0; t < s->n_tokens; t++)
            llama_u32(b, (uint32_t)llama_mix(s->seed + t) & 0x1ffff);
    }
    llama_cache(b, s);
    if (s->second) {
        struct llama_state second = *s;

        second.n_tokens = s->second;
        second.seed++;
        llama_cache(b, &second);
    }
}

#endif
