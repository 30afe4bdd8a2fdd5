// SPDX-License-Identifier: Apache-2.0
/**
 * kvx_layers.h: many layers in one call give what one call per layer on host memory gives, and drop
 * each bad token once. So do blocks copied from many caches to many. For any kind of memory (struct kvx_place_hooks).
 */
#ifndef KVX_LAYERS_H
#define KVX_LAYERS_H

#include "kvx/kvx_cases.h"

enum {
    LAYERS_MAX = 70,
    LAYERS_TOKENS = 21,
    LAYERS_BLOCKS = 3,
    LAYERS_SIZE = 8,
    LAYERS_HEADS = 3,
    LAYERS_DIM = 16,
    LAYERS_ROW = LAYERS_HEADS * LAYERS_DIM,
    LAYERS_CACHE = LAYERS_BLOCKS * LAYERS_SIZE * LAYERS_ROW,
    LAYERS_SEQS = 2,
    LAYERS_LEN = 13
};

/* One layer's memory: K, V, keys, values, outputs; on the host and where the library sees it. */
struct layers_memory {
    char *host[6], *placed[6];
};

static const unsigned layers_elements[6] = {LAYERS_CACHE,
                                            LAYERS_CACHE,
                                            LAYERS_TOKENS *LAYERS_ROW,
                                            LAYERS_TOKENS *LAYERS_ROW,
                                            LAYERS_SEQS *LAYERS_LEN *LAYERS_ROW,
                                            LAYERS_SEQS *LAYERS_LEN *LAYERS_ROW};

struct layers_call {
    kvx_cache_desc_t cache;
    kvx_write_desc_t write;
    kvx_gather_desc_t gather;
};

static inline kvx_tensor_desc_t layers_tensor(kvx_dtype_t dtype, kvx_layout_t layout,
                                              kvx_memory_type_t memory, uint32_t ndim,
                                              const int64_t *shape, void *data)
{
    kvx_tensor_desc_t t = new_tensor(dtype, layout);

    t.memory = memory;
    t.ndim = ndim;
    t.data = data;
    memcpy(t.shape, shape, ndim * sizeof(*shape));
    t.stride[ndim - 1] = 1;
    for (uint32_t i = ndim - 1; i > 0; i--)
        t.stride[i - 1] = t.stride[i] * t.shape[i];
    return t;
}

static inline void layers_describe(struct layers_call *c, char *const *m, kvx_memory_type_t memory,
                                   unsigned kind, const void *slots, const void *table,
                                   const void *lengths)
{
    static const kvx_layout_t layouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND};
    const int64_t nhd[] = {LAYERS_BLOCKS, LAYERS_SIZE, LAYERS_HEADS, LAYERS_DIM};
    const int64_t hnd[] = {LAYERS_BLOCKS, LAYERS_HEADS, LAYERS_SIZE, LAYERS_DIM};
    const int64_t in[] = {LAYERS_TOKENS, LAYERS_HEADS, LAYERS_DIM};
    const int64_t out[] = {LAYERS_SEQS, LAYERS_LEN, LAYERS_HEADS, LAYERS_DIM};
    kvx_dtype_t dtype = kind & 2 ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_BF16;
    kvx_layout_t layout = layouts[kind & 1];

    memset(c, 0, sizeof(*c));
    c->cache.size = sizeof(c->cache);
    c->cache.num_blocks = LAYERS_BLOCKS;
    c->cache.block_size = LAYERS_SIZE;
    c->cache.num_kv_heads = LAYERS_HEADS;
    c->cache.head_dim = LAYERS_DIM;
    c->cache.k = layers_tensor(dtype, layout, memory, 4, kind & 1 ? hnd : nhd, m[0]);
    c->cache.v = layers_tensor(dtype, layout, memory, 4, kind & 1 ? hnd : nhd, m[1]);
    c->write.size = sizeof(c->write);
    c->write.io.size = sizeof(c->write.io);
    c->write.io.num_kv_heads = LAYERS_HEADS;
    c->write.io.head_dim = LAYERS_DIM;
    c->gather.io = c->write.io;
    c->write.io.num_tokens = LAYERS_TOKENS;
    c->write.io.key = layers_tensor(KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_CUSTOM, memory, 3, in, m[2]);
    c->write.io.value = layers_tensor(KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_CUSTOM, memory, 3, in, m[3]);
    c->write.slots =
        (kvx_slot_mapping_t){sizeof(kvx_slot_mapping_t), KVX_DTYPE_S64, LAYERS_TOKENS, -1, slots};
    c->gather.size = sizeof(c->gather);
    c->gather.io.num_tokens = LAYERS_SEQS * LAYERS_LEN;
    c->gather.io.key = layers_tensor(KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_CUSTOM, memory, 4, out, m[4]);
    c->gather.io.value =
        layers_tensor(KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_CUSTOM, memory, 4, out, m[5]);
    c->gather.block_table = (kvx_block_table_t){.size = sizeof(kvx_block_table_t),
                                                .format = KVX_BLOCK_TABLE_PACKED,
                                                .index_dtype = KVX_DTYPE_S32,
                                                .seq_count = LAYERS_SEQS,
                                                .beam_width = 1,
                                                .max_blocks_per_seq = 2,
                                                .indices = table,
                                                .indices_count = LAYERS_SEQS * 2};
    c->gather.seq_lens =
        (kvx_seq_lens_t){sizeof(kvx_seq_lens_t), KVX_DTYPE_S32, LAYERS_SEQS, lengths};
    c->gather.max_seq_len = LAYERS_LEN;
}

static inline unsigned layers_bytes(unsigned kind, unsigned i)
{
    return layers_elements[i] * (i < 2 && kind & 2 ? 1 : 2);
}

/** Write, then gather. @n calls of one layer, or one call of @n layers. */
static inline kvx_status_t layers_run(struct layers_call *calls, uint32_t n, bool together,
                                      const kvx_options_t *options, void *stream)
{
    const kvx_cache_desc_t *caches[LAYERS_MAX];
    const kvx_write_desc_t *writes[LAYERS_MAX];
    const kvx_gather_desc_t *gathers[LAYERS_MAX];
    uint32_t step = together ? n : 1;
    kvx_status_t status = KVX_STATUS_OK;

    for (uint32_t i = 0; i < n; i++) {
        caches[i] = &calls[i].cache;
        writes[i] = &calls[i].write;
        gathers[i] = &calls[i].gather;
    }
    for (uint32_t i = 0; i < n && status == KVX_STATUS_OK; i += step)
        status = kvx_write_kv_layers(caches + i, writes + i, step, options, stream);
    for (uint32_t i = 0; i < n && status == KVX_STATUS_OK; i += step)
        status = kvx_gather_kv_layers(caches + i, gathers + i, step, options, stream);
    return status;
}

/** Bit 0 of @kind: HND instead of NHD; bit 1: an FP8 cache. */
static inline bool layers_agree(const struct kvx_place_hooks *hooks, uint32_t n, unsigned kind)
{
    struct layers_call *calls = calloc(LAYERS_MAX, sizeof(*calls));
    struct layers_memory memory[LAYERS_MAX];
    struct dice d = {n * 31 + kind + 1};
    int64_t slots[LAYERS_TOKENS];
    int32_t table[LAYERS_SEQS * 2] = {2, 0, 1, LAYERS_BLOCKS}, lengths[LAYERS_SEQS] = {9, 12};
    uint64_t dropped[2] = {0, 0}, zero = 0;
    kvx_options_t options = {.size = sizeof(options),
                             .flags = KVX_OPTION_ZERO_PADDING | KVX_OPTION_DROP_OUT_OF_RANGE};
    void *placed[4] = {NULL};
    bool good = true;

    if (!calls)
        abort();
    for (int i = 0; i < LAYERS_TOKENS; i++)
        slots[i] = i * 5 % (LAYERS_BLOCKS * LAYERS_SIZE);
    slots[3] = -7;
    slots[8] = (int64_t)1 << 40;
    placed[0] = hooks->put(slots, sizeof(slots));
    placed[1] = hooks->put(table, sizeof(table));
    placed[2] = hooks->put(lengths, sizeof(lengths));
    placed[3] = hooks->put(&zero, sizeof(zero));
    for (uint32_t l = 0; l < n; l++) {
        for (unsigned i = 0; i < 6; i++) {
            memory[l].host[i] = malloc(layers_bytes(kind, i));
            if (!memory[l].host[i])
                abort();
            random_bytes(&d, memory[l].host[i], layers_bytes(kind, i));
            memory[l].placed[i] = hooks->put(memory[l].host[i], layers_bytes(kind, i));
        }
        layers_describe(&calls[l], memory[l].placed, hooks->memory, kind, placed[0], placed[1],
                        placed[2]);
    }
    options.dropped = placed[3];
    good = layers_run(calls, n, true, &options, hooks->stream) == KVX_STATUS_OK;
    for (uint32_t l = 0; l < n; l++) {
        layers_describe(&calls[l], memory[l].host, KVX_MEMORY_HOST, kind, slots, table, lengths);
        options.dropped = l ? NULL : &dropped[0];
        good = good && layers_run(&calls[l], 1, true, &options, NULL) == KVX_STATUS_OK;
        for (unsigned i = 0; i < 6; i++) {
            char *found = malloc(layers_bytes(kind, i));

            hooks->get(found, memory[l].placed[i], layers_bytes(kind, i));
            good = good && memcmp(found, memory[l].host[i], layers_bytes(kind, i)) == 0;
            hooks->drop(memory[l].placed[i]);
            free(found);
            free(memory[l].host[i]);
        }
    }
    free(calls);
    hooks->get(&dropped[1], placed[3], sizeof(dropped[1]));
    for (int i = 0; i < 4; i++)
        hooks->drop(placed[i]);
    if (!good || dropped[0] != dropped[1] || dropped[0] != 5)
        fprintf(stderr, "%u layers, kind %u: %s, dropped %llu, expected %llu\n", n, kind,
                good ? "same" : "different", (unsigned long long)dropped[1],
                (unsigned long long)dropped[0]);
    return good && dropped[0] == dropped[1] && dropped[0] == 5;
}

/* A cache of kind @kind over K and V at @m, or its other form: the other order, and FP8 or not. */
static inline kvx_cache_desc_t copies_cache(char *const *m, kvx_memory_type_t memory, unsigned kind)
{
    struct layers_call c;
    char *all[6] = {m[0], m[1], m[0], m[0], m[0], m[0]};

    layers_describe(&c, all, memory, kind, NULL, NULL, NULL);
    return c.cache;
}

/**
 * The same for blocks from caches to caches of the other form. Every seventh layer has pairs of its
 * own, so that layers fall into many plans.
 */
static inline bool copies_agree(const struct kvx_place_hooks *hooks, uint32_t n, unsigned kind)
{
    static const int32_t ids[2][2][4] = {{{0, -1, 2, LAYERS_BLOCKS}, {1, 0, 2, 0}},
                                         {{2, 1, 0, -5}, {0, 1, 2, 0}}};
    struct dice d = {n * 37 + kind + 1};
    kvx_cache_desc_t caches[2][LAYERS_MAX];
    const kvx_cache_desc_t *list[2][LAYERS_MAX];
    kvx_block_copy_t pairs[2];
    const kvx_block_copy_t *copies[LAYERS_MAX];
    char *host[LAYERS_MAX][4], *placed[LAYERS_MAX][4];
    kvx_options_t options = {.size = sizeof(options), .flags = KVX_OPTION_DROP_OUT_OF_RANGE};
    void *blocks[2][2];
    bool good;

    for (int i = 0; i < 2; i++) {
        for (int end = 0; end < 2; end++)
            blocks[i][end] = hooks->put(ids[i][end], sizeof(ids[i][end]));
        pairs[i] = (kvx_block_copy_t){.size = sizeof(pairs[i]),
                                      .index_dtype = KVX_DTYPE_S32,
                                      .count = 4,
                                      .src_blocks = blocks[i][0],
                                      .dst_blocks = blocks[i][1]};
    }
    for (uint32_t l = 0; l < n; l++) {
        for (int i = 0; i < 4; i++) {
            host[l][i] = malloc(LAYERS_CACHE * 2);
            if (!host[l][i])
                abort();
            random_bytes(&d, host[l][i], LAYERS_CACHE * 2);
            placed[l][i] = hooks->put(host[l][i], LAYERS_CACHE * 2);
        }
        caches[0][l] = copies_cache(placed[l], hooks->memory, kind);
        caches[1][l] = copies_cache(placed[l] + 2, hooks->memory, kind ^ 1 ^ (kind & 4) >> 1);
        list[0][l] = &caches[0][l];
        list[1][l] = &caches[1][l];
        copies[l] = &pairs[l % 7 == 6];
    }
    good = kvx_copy_blocks_layers(list[0], list[1], copies, n, &options, hooks->stream) ==
           KVX_STATUS_OK;
    for (uint32_t l = 0; l < n; l++) {
        kvx_block_copy_t pair = pairs[l % 7 == 6];

        pair.src_blocks = ids[l % 7 == 6][0];
        pair.dst_blocks = ids[l % 7 == 6][1];
        caches[0][l] = copies_cache(host[l], KVX_MEMORY_HOST, kind);
        caches[1][l] = copies_cache(host[l] + 2, KVX_MEMORY_HOST, kind ^ 1 ^ (kind & 4) >> 1);
        good = good && kvx_copy_blocks(&caches[0][l], &caches[1][l], &pair, &options, NULL) ==
                           KVX_STATUS_OK;
        for (int i = 0; i < 4; i++) {
            char *found = malloc(LAYERS_CACHE * 2);

            if (!found)
                abort();
            hooks->get(found, placed[l][i], LAYERS_CACHE * 2);
            good = good && memcmp(found, host[l][i], LAYERS_CACHE * 2) == 0;
            hooks->drop(placed[l][i]);
            free(found);
            free(host[l][i]);
        }
    }
    for (int i = 0; i < 4; i++)
        hooks->drop(blocks[i / 2][i % 2]);
    if (!good)
        fprintf(stderr, "copies of %u layers, kind %u: different\n", n, kind);
    return good;
}

#endif
