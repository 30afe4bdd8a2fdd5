// SPDX-License-Identifier: Apache-2.0
/* Announce a block of a cache as vLLM does: cc -std=c11 publish_block.c $(pkg-config --cflags --libs kvevent)
 * A first argument names the endpoint, e.g. tcp://127.0.0.1:5557 (publish_events.c is a longer example). */
#include <kv_event.h>
#include <stdio.h>
/* clang-format off */
int main(int argc, char **argv)
{
    struct kve_publisher_opts opts = {.size = sizeof(opts), .endpoint = argc > 1 ? argv[1] : "tcp://127.0.0.1:*"};
    uint32_t tokens[16] = {1, 2, 3};
    uint64_t name = 42; /* the engine's own name for the block */
    struct kve_event stored = {.size = sizeof(stored), .type = KVE_STORED, .tier = KV_TIER_DEVICE,
        .hashes = &name, .n_hashes = 1, .tokens = tokens, .n_tokens = 16, .block_size = 16, .group = -1};
    struct kve_publisher_stats sent = {.size = sizeof(sent)};
    struct kve_publisher *publisher;
    if (kve_publisher_create(&opts, &publisher) != 0)
        return 1;
    int err = kve_publisher_publish(publisher, &stored, 1) || kve_publisher_flush(publisher, 5000) ||
              kve_publisher_get_stats(publisher, &sent);
    printf("%s: %d event in %d batch\n", kve_publisher_endpoint(publisher), (int)sent.events, (int)sent.batches);
    kve_publisher_destroy(publisher);
    return err || sent.batches != 1;
}
