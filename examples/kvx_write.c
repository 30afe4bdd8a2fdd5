// SPDX-License-Identifier: Apache-2.0
/* Write a token's K and V to a slot of a paged cache: cc -std=c11 kvx_write.c $(pkg-config --cflags --libs kvx) */
#include <kvx_ext.h>
#include <stdio.h>
/* clang-format off */
enum { BLOCKS = 4, SIZE = 16, HEADS = 2, DIM = 64, SLOT = 2 * SIZE + 5 }; /* block 2, its sixth token */
static float k_pages[BLOCKS * SIZE * HEADS * DIM], v_pages[BLOCKS * SIZE * HEADS * DIM];
int main(void)
{
    float k[HEADS * DIM] = {1, 2, 3}, v[HEADS * DIM] = {4, 5, 6};
    int64_t slot = SLOT;
    kvx_tensor_desc_t row = {.size = sizeof(row), .dtype = KVX_DTYPE_F32, .memory = KVX_MEMORY_HOST,
        .ndim = 3, .shape = {1, HEADS, DIM}, .stride = {HEADS * DIM, DIM, 1}};
    kvx_cache_desc_t cache = {.size = sizeof(cache), .num_blocks = BLOCKS, .block_size = SIZE,
        .num_kv_heads = HEADS, .head_dim = DIM, .k = row, .v = row};
    kvx_write_desc_t write = {.size = sizeof(write), .slots = {sizeof(write.slots), KVX_DTYPE_S64, 1, -1, &slot},
        .io = {.size = sizeof(write.io), .key = row, .value = row, .num_tokens = 1, .num_kv_heads = HEADS,
            .head_dim = DIM}};
    kvx_tensor_canonical(&cache, KVX_LAYOUT_BLOCK_NHD, 0, &cache.k); /* shape and strides of the pages */
    kvx_tensor_canonical(&cache, KVX_LAYOUT_BLOCK_NHD, 0, &cache.v);
    write.io.key.data = k; write.io.value.data = v; cache.k.data = k_pages; cache.v.data = v_pages;
    printf("write: %s\n", kvx_status_name(kvx_write_kv(&cache, &write, NULL)));
    return k_pages[SLOT * HEADS * DIM + 2] != 3 || v_pages[SLOT * HEADS * DIM] != 4;
}
