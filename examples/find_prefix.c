// SPDX-License-Identifier: Apache-2.0
/* A router's core: cc -std=c11 find_prefix.c $(pkg-config --cflags --libs kvindex) */
#include <kv_hash.h>
#include <kv_index.h>
#include <stdio.h>
/* clang-format off */
int main(void)
{
    uint32_t prompt[32] = {1, 2, 3}; /* two blocks of 16 tokens: worker 1 has the first, worker 2 both */
    uint64_t local[2], names[2];
    struct kvi_index *index;
    struct kvi_matches found = {0};
    kve_hash_tokens(KVE_SEED, prompt, 32, 16, 0, local);
    kve_sequence_hashes(local, 2, names);
    struct kv_block blocks[] = {{names[0], local[0]}, {names[1], local[1]}};
    if (kvi_create(NULL, &index) != 0 ||
        kvi_store(index, (struct kv_holder){1, 0}, KV_TIER_DEVICE, NULL, blocks, 1, NULL) != 0 ||
        kvi_store(index, (struct kv_holder){2, 0}, KV_TIER_DEVICE, NULL, blocks, 2, NULL) != 0 ||
        kvi_find(index, local, 2, &found) != 0)
        return 1;
    for (size_t i = 0; i < found.n; i++)
        printf("worker %d: %u of 2 blocks\n", (int)found.items[i].holder.worker, found.items[i].reach[0]);
    kvi_matches_fini(&found);
    kvi_destroy(index);
}
