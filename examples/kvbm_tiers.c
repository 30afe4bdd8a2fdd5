// SPDX-License-Identifier: Apache-2.0
/* Store blocks by their keys: cc -std=gnu11 kvbm_tiers.c $(pkg-config --cflags --libs kvbm) */
#include <kvbm.h>
#include <stdio.h>
/* clang-format off */
int main(void)
{
    struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    struct kvbm_layout_config block = {.size = sizeof(block), .kind = KVBM_FULLY_CONTIGUOUS,
        .num_blocks = 8, .num_layers = 2, .outer_dim = 2, .page_size = 16, .inner_dim = 64};
    struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_manager_opts tiers = {.size = sizeof(tiers), .block = &block, .host_bytes = 1 << 20};
    struct kvbm_cache_opts tensors = {.size = sizeof(tensors)};
    uint64_t keys[4] = {11, 12, 13, 14};
    struct kvbm_chain prompt = {.size = sizeof(prompt), .keys = keys};
    struct kvbm_layout *layout; struct kvbm_manager *manager; struct kvbm_cache *cache;
    if (kvbm_layout_allocate(&block, &allocator, &layout) || !(tensors.layout = layout) ||
        kvbm_manager_create(&tiers, &manager) || kvbm_cache_attach(manager, &tensors, &cache))
        return 1;
    printf("stored %ld of 4\n", kvbm_cache_store(cache, &prompt, 4, (uint32_t[]){0, 1, 2, 3}, 1000));
    printf("loaded %ld of 4\n", kvbm_cache_load(cache, &prompt, 4, (uint32_t[]){4, 5, 6, 7}, 1000));
    if (kvbm_cache_detach(cache) || kvbm_manager_destroy(manager, 1000))
        return 1;
    kvbm_layout_destroy(layout);
}
