// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_sample.h: one small valid cache with a valid write and valid gathers, for tests to modify.
 */
#ifndef KVX_SAMPLE_H
#define KVX_SAMPLE_H

#include <stdint.h>
#include <string.h>

#include "kvx_abi.h"
#include "kvx_ext.h"

enum {
    SAMPLE_BLOCKS = 4,
    SAMPLE_SIZE = 4,
    SAMPLE_HEADS = 2,
    SAMPLE_DIM = 8,
    SAMPLE_TOKENS = 6,
    SAMPLE_ROW = SAMPLE_HEADS * SAMPLE_DIM,
    SAMPLE_SEQS = 2,
    SAMPLE_MAX_LEN = 6,
    SAMPLE_MAX_BLOCKS = 2
};

struct sample {
    float k[SAMPLE_BLOCKS * SAMPLE_SIZE * SAMPLE_ROW];
    float v[SAMPLE_BLOCKS * SAMPLE_SIZE * SAMPLE_ROW];
    float key[SAMPLE_SEQS * 2 * SAMPLE_MAX_LEN * SAMPLE_ROW];
    float value[SAMPLE_SEQS * 2 * SAMPLE_MAX_LEN * SAMPLE_ROW];
    int64_t slots[SAMPLE_TOKENS];
    int32_t indices[SAMPLE_SEQS * 2 * SAMPLE_MAX_BLOCKS * 2];
    int32_t indptr[SAMPLE_SEQS + 1];
    int32_t lengths[SAMPLE_SEQS];
    kvx_cache_desc_t cache;
    kvx_write_desc_t write;
    kvx_gather_desc_t gather;
};

static inline kvx_tensor_desc_t sample_io(float *data, int64_t tokens)
{
    kvx_tensor_desc_t t = {.size = sizeof(t),
                           .dtype = KVX_DTYPE_F32,
                           .layout = KVX_LAYOUT_BLOCK_CUSTOM,
                           .memory = KVX_MEMORY_HOST,
                           .ndim = 3,
                           .shape = {tokens, SAMPLE_HEADS, SAMPLE_DIM},
                           .stride = {SAMPLE_ROW, SAMPLE_DIM, 1},
                           .data = data};

    return t;
}

static inline void sample_cache(struct sample *s)
{
    kvx_tensor_desc_t t = {.size = sizeof(t),
                           .dtype = KVX_DTYPE_F32,
                           .layout = KVX_LAYOUT_BLOCK_NHD,
                           .memory = KVX_MEMORY_HOST,
                           .ndim = 4,
                           .shape = {SAMPLE_BLOCKS, SAMPLE_SIZE, SAMPLE_HEADS, SAMPLE_DIM},
                           .stride = {SAMPLE_SIZE * SAMPLE_ROW, SAMPLE_ROW, SAMPLE_DIM, 1}};

    s->cache.size = sizeof(s->cache);
    s->cache.num_blocks = SAMPLE_BLOCKS;
    s->cache.block_size = SAMPLE_SIZE;
    s->cache.num_kv_heads = SAMPLE_HEADS;
    s->cache.head_dim = SAMPLE_DIM;
    s->cache.k = t;
    s->cache.v = t;
    s->cache.k.data = s->k;
    s->cache.v.data = s->v;
}

static inline void sample_init(struct sample *s)
{
    const int64_t slots[SAMPLE_TOKENS] = {0, 1, 5, -1, 15, 8};
    const int32_t indices[] = {2, 0, 3, 1};

    memset(s, 0, sizeof(*s));
    for (size_t i = 0; i < sizeof(s->key) / sizeof(s->key[0]); i++) {
        s->key[i] = (float)i + 0.5F;
        s->value[i] = -(float)i - 0.25F;
    }
    memcpy(s->slots, slots, sizeof(slots));
    memcpy(s->indices, indices, sizeof(indices));
    s->lengths[0] = 5;
    s->lengths[1] = 6;
    sample_cache(s);

    s->write.size = sizeof(s->write);
    s->write.io.size = sizeof(s->write.io);
    s->write.io.num_tokens = SAMPLE_TOKENS;
    s->write.io.num_kv_heads = SAMPLE_HEADS;
    s->write.io.head_dim = SAMPLE_DIM;
    s->write.io.key = sample_io(s->key, SAMPLE_TOKENS);
    s->write.io.value = sample_io(s->value, SAMPLE_TOKENS);
    s->write.slots.size = sizeof(s->write.slots);
    s->write.slots.dtype = KVX_DTYPE_S64;
    s->write.slots.token_count = SAMPLE_TOKENS;
    s->write.slots.invalid_slot = -1;
    s->write.slots.slots = s->slots;

    s->gather.size = sizeof(s->gather);
    s->gather.io = s->write.io;
    s->gather.io.num_tokens = SAMPLE_SEQS * SAMPLE_MAX_LEN;
    s->gather.io.key = sample_io(s->key, SAMPLE_SEQS * SAMPLE_MAX_LEN);
    s->gather.io.value = sample_io(s->value, SAMPLE_SEQS * SAMPLE_MAX_LEN);
    s->gather.max_seq_len = SAMPLE_MAX_LEN;
    s->gather.seq_lens =
        (kvx_seq_lens_t){sizeof(kvx_seq_lens_t), KVX_DTYPE_S32, SAMPLE_SEQS, s->lengths};
    s->gather.block_table = (kvx_block_table_t){.size = sizeof(kvx_block_table_t),
                                                .format = KVX_BLOCK_TABLE_PACKED,
                                                .index_dtype = KVX_DTYPE_S32,
                                                .seq_count = SAMPLE_SEQS,
                                                .beam_width = 1,
                                                .max_blocks_per_seq = SAMPLE_MAX_BLOCKS,
                                                .indices = s->indices,
                                                .indices_count = SAMPLE_SEQS * SAMPLE_MAX_BLOCKS};
}

/** The gather, made RAGGED: the same blocks, said once per token. */
static inline void sample_ragged(struct sample *s)
{
    const int32_t indices[] = {2, 2, 2, 2, 0, 3, 3, 3, 3, 1, 1};
    kvx_block_table_t *t = &s->gather.block_table;

    memcpy(s->indices, indices, sizeof(indices));
    s->indptr[1] = 5;
    s->indptr[2] = 11;
    t->format = KVX_BLOCK_TABLE_RAGGED;
    t->indptr_dtype = KVX_DTYPE_S32;
    t->indptr = s->indptr;
    t->indptr_count = SAMPLE_SEQS + 1;
    t->indices_count = 11;
}

/** The gather, made KV_OFFSETS: one pool, the cache's K memory then V's; two blocks in the second
 * one. */
static inline void sample_offsets(struct sample *s)
{
    const int32_t indices[] = {2, 0, 2 + SAMPLE_BLOCKS, 0, 3, 1, INT32_MIN + 1, INT32_MIN};
    kvx_block_table_t *t = &s->gather.block_table;

    memcpy(s->indices, indices, sizeof(indices));
    t->format = KVX_BLOCK_TABLE_KV_OFFSETS;
    t->flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
    t->indices_count = SAMPLE_SEQS * 2 * SAMPLE_MAX_BLOCKS;
    s->cache.pool.size = sizeof(s->cache.pool);
    s->cache.pool.memory = KVX_MEMORY_HOST;
    s->cache.pool.bytes_per_block = SAMPLE_SIZE * SAMPLE_ROW * sizeof(float);
    s->cache.pool.primary = s->k; /* k and v lie next to each other */
    s->cache.pool.secondary = s->v;
}

#endif
