// SPDX-License-Identifier: Apache-2.0
/* A router's core: of two workers, which holds the longest prefix of a prompt of 64 tokens?
 *     cc -std=c11 find_prefix.c $(pkg-config --cflags --libs kvindex)
 */
#include <kv_hash.h>
#include <kv_index.h>
#include <stdio.h>

int main(void)
{
    uint32_t prompt[64] = {1, 2, 3};
    uint64_t local[4], names[4]; /* of the prompt's 4 blocks of 16 tokens */
    struct kvi_index *index = NULL;
    struct kvi_matches found = {0};

    kve_hash_tokens(KVE_SEED, prompt, 64, 16, 0, local);
    kve_sequence_hashes(local, 4, names);
    struct kv_block blocks[] = {
        {names[0], local[0]}, {names[1], local[1]}, {names[2], local[2]}, {names[3], local[3]}};

    if (kvi_create(NULL, &index) != 0)
        return 1;
    kvi_store(index, (struct kv_holder){1, 0}, KV_TIER_DEVICE, NULL, blocks, 2, NULL);
    kvi_store(index, (struct kv_holder){2, 0}, KV_TIER_DEVICE, NULL, blocks, 4, NULL);
    if (kvi_find(index, local, 4, &found) == 0)
        for (size_t i = 0; i < found.n; i++)
            printf("worker %d: %u of 4 blocks\n", (int)found.items[i].holder.worker,
                   found.items[i].reach[0]);
    kvi_matches_fini(&found);
    kvi_destroy(index);
}
