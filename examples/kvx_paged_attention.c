// SPDX-License-Identifier: Apache-2.0
/*
 * Attention over a paged cache equals attention over contiguous K and V.
 *
 * Two sequences share a cache of HND blocks. Their keys and values are written token by token to
 * slots in scattered blocks (kvx_write_kv), and gathered back through a block table
 * (kvx_gather_kv). One query per head attends over the result. The same query over the original
 * rows must give the same numbers.
 *
 *     cc -std=c11 kvx_paged_attention.c $(pkg-config --cflags --libs kvx) -lm
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvx_abi.h>
#include <kvx_ext.h>

enum {
    BLOCKS = 8,
    SIZE = 4,
    HEADS = 2,
    DIM = 16,
    SEQS = 2,
    MAX_LEN = 12,
    MAX_BLOCKS = MAX_LEN / SIZE
};

static const int32_t lengths[SEQS] = {11, 6};
static const int32_t table[SEQS * MAX_BLOCKS] = {5, 0, 7, 2, 6, -1};

typedef float rows_t[SEQS][MAX_LEN][HEADS][DIM];
static rows_t key, value, found_key, found_value;
static float cache_k[BLOCKS * HEADS * SIZE * DIM], cache_v[BLOCKS * HEADS * SIZE * DIM];

/* One query of one head over the first @n rows: softmax(q k / sqrt(d)) v. */
static void attend(const float *q, float (*k)[HEADS][DIM], float (*v)[HEADS][DIM], int n, int head,
                   float *out)
{
    float weight[MAX_LEN], largest = -INFINITY, sum = 0;

    for (int t = 0; t < n; t++) {
        weight[t] = 0;
        for (int d = 0; d < DIM; d++)
            weight[t] += q[d] * k[t][head][d];
        weight[t] /= sqrtf(DIM);
        largest = fmaxf(largest, weight[t]);
    }
    memset(out, 0, DIM * sizeof(*out));
    for (int t = 0; t < n; t++) {
        weight[t] = expf(weight[t] - largest);
        sum += weight[t];
    }
    for (int t = 0; t < n; t++) {
        for (int d = 0; d < DIM; d++)
            out[d] += weight[t] / sum * v[t][head][d];
    }
}

static kvx_tensor_desc_t rows(void *data)
{
    return (kvx_tensor_desc_t){.size = sizeof(kvx_tensor_desc_t),
                               .dtype = KVX_DTYPE_F32,
                               .memory = KVX_MEMORY_HOST,
                               .ndim = 3,
                               .shape = {SEQS * MAX_LEN, HEADS, DIM},
                               .stride = {HEADS * DIM, DIM, 1},
                               .data = data};
}

static kvx_kv_io_desc_t io(rows_t *k, rows_t *v)
{
    return (kvx_kv_io_desc_t){.size = sizeof(kvx_kv_io_desc_t),
                              .key = rows(k),
                              .value = rows(v),
                              .num_tokens = SEQS * MAX_LEN,
                              .num_kv_heads = HEADS,
                              .head_dim = DIM};
}

static kvx_cache_desc_t describe_cache(void)
{
    kvx_cache_desc_t cache = {.size = sizeof(cache),
                              .num_blocks = BLOCKS,
                              .block_size = SIZE,
                              .num_kv_heads = HEADS,
                              .head_dim = DIM};

    cache.k.dtype = KVX_DTYPE_F32;
    cache.k.memory = KVX_MEMORY_HOST;
    (void)kvx_tensor_canonical(&cache, KVX_LAYOUT_BLOCK_HND, 0, &cache.k);
    cache.v = cache.k;
    cache.k.data = cache_k;
    cache.v.data = cache_v;
    return cache;
}

static kvx_status_t write_all(const kvx_cache_desc_t *cache)
{
    int64_t slots[SEQS * MAX_LEN];
    kvx_write_desc_t write = {.size = sizeof(write), .io = io(&key, &value)};

    for (int s = 0; s < SEQS; s++) {
        for (int t = 0; t < MAX_LEN; t++) {
            int32_t block = table[s * MAX_BLOCKS + t / SIZE];

            slots[s * MAX_LEN + t] = t < lengths[s] ? (int64_t)block * SIZE + t % SIZE : -1;
        }
    }
    write.slots =
        (kvx_slot_mapping_t){sizeof(write.slots), KVX_DTYPE_S64, SEQS * MAX_LEN, -1, slots};
    return kvx_write_kv(cache, &write, NULL);
}

static kvx_status_t gather_all(const kvx_cache_desc_t *cache)
{
    kvx_gather_desc_t gather = {
        .size = sizeof(gather), .io = io(&found_key, &found_value), .max_seq_len = MAX_LEN};

    gather.block_table = (kvx_block_table_t){.size = sizeof(gather.block_table),
                                             .format = KVX_BLOCK_TABLE_PACKED,
                                             .index_dtype = KVX_DTYPE_S32,
                                             .seq_count = SEQS,
                                             .beam_width = 1,
                                             .max_blocks_per_seq = MAX_BLOCKS,
                                             .indices = table,
                                             .indices_count = SEQS * MAX_BLOCKS};
    gather.seq_lens = (kvx_seq_lens_t){sizeof(gather.seq_lens), KVX_DTYPE_S32, SEQS, lengths};
    return kvx_gather_kv(cache, &gather, NULL);
}

int main(void)
{
    kvx_cache_desc_t cache = describe_cache();
    float query[DIM], paged[DIM], plain[DIM], *k = &key[0][0][0][0], *v = &value[0][0][0][0];

    for (int i = 0; i < SEQS * MAX_LEN * HEADS * DIM; i++) {
        k[i] = sinf((float)i * 0.37F);
        v[i] = cosf((float)i * 0.11F);
    }
    if (kvx_validate_cache_desc(&cache) != KVX_STATUS_OK || write_all(&cache) != KVX_STATUS_OK ||
        gather_all(&cache) != KVX_STATUS_OK) {
        fputs("kvx refused the call\n", stderr);
        return EXIT_FAILURE;
    }
    for (int s = 0; s < SEQS; s++) {
        for (int h = 0; h < HEADS; h++) {
            for (int d = 0; d < DIM; d++)
                query[d] = cosf((float)(s + h + d));
            attend(query, found_key[s], found_value[s], lengths[s], h, paged);
            attend(query, key[s], value[s], lengths[s], h, plain);
            if (memcmp(paged, plain, sizeof(paged)) != 0) {
                fprintf(stderr, "sequence %d, head %d: paged attention differs\n", s, h);
                return EXIT_FAILURE;
            }
        }
    }
    printf("paged attention over %d sequences equals attention over contiguous rows\n", SEQS);
    return EXIT_SUCCESS;
}
