// SPDX-License-Identifier: Apache-2.0
/* A router's whole decision: cc -std=c11 select_worker.c $(pkg-config --cflags --libs kvindex kvselect) */
#include <kv_hash.h>
#include <kv_index.h>
#include <kv_select.h>
#include <stdio.h>
/* clang-format off */
int main(void)
{
    uint32_t prompt[64] = {1, 2, 3}; /* four blocks of 16 tokens: worker 2 holds three of them */
    uint64_t local[4], names[4], now_ns = 1;
    struct kvi_index *index; struct kvi_matches found = {0}; struct kvsel *selector;
    struct kvsel_worker one = {.size = sizeof(one), .holder = {1, 0}}, two = {.size = sizeof(two), .holder = {2, 0}};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    kve_hash_tokens(KVE_SEED, prompt, 64, 16, 0, local);
    kve_sequence_hashes(local, 4, names);
    struct kv_block blocks[] = {{names[0], local[0]}, {names[1], local[1]}, {names[2], local[2]}};
    if (kvi_create(NULL, &index) || kvsel_create(NULL, &selector) || kvsel_set_worker(selector, &one) ||
        kvsel_set_worker(selector, &two) || kvi_store(index, two.holder, KV_TIER_DEVICE, NULL, blocks, 3, NULL) || kvi_find(index, local, 4, &found))
        return 1;
    struct kvsel_request request = {.size = sizeof(request), .tokens = 64, .hashes = names, .n_hashes = 4, .matches = found.items, .n_matches = found.n};
    if (kvsel_select(selector, &request, now_ns, &choice) || kvsel_book(selector, "r1", 2, &request, &choice, now_ns))
        return 1;
    printf("worker %d computes %d of 64 tokens\n", (int)choice.worker.worker, (int)choice.uncovered);
    /* send the prompt there; then: */
    kvsel_first_token(selector, "r1", 2, now_ns + 1000000);
    kvsel_free(selector, "r1", 2, KVSEL_DONE, now_ns + 2000000);
    kvi_matches_fini(&found); kvsel_destroy(selector); kvi_destroy(index);
}
