// SPDX-License-Identifier: Apache-2.0
/*
 * An engine that publishes its cache's contents. Any KV indexer that follows vLLM can follow this
 * program:
 *
 *     publish_events                                            a short run on free ports
 *     publish_events tcp://127.0.0.1:5557 tcp://127.0.0.1:5558 60     for a minute, on these
 *
 * The program "serves" prompts out of a few conversations: a block that isn't cached is computed
 * and announced as stored; when the cache is full the oldest conversation is evicted.
 *
 *     cc -std=gnu11 publish_events.c $(pkg-config --cflags --libs kvevent)
 */
#include <kv_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { BLOCK = 16, CONVERSATIONS = 8, BLOCKS = 32, CAPACITY = 4 };

/* The engine names the blocks of a conversation: any 64-bit numbers, here rolling hashes. */
static void serve(struct kve_publisher *publisher, uint32_t conversation)
{
    uint32_t tokens[BLOCKS * BLOCK];
    uint64_t local[BLOCKS], names[BLOCKS];

    for (uint32_t i = 0; i < BLOCKS * BLOCK; i++)
        tokens[i] = i < 2 * BLOCK ? i : conversation * 1000 + i; /* all share two blocks */
    kve_hash_tokens(KVE_SEED, tokens, BLOCKS * BLOCK, BLOCK, false, local);
    kve_sequence_hashes(local, BLOCKS, names);

    struct kve_event stored = {.size = sizeof(stored),
                               .type = KVE_STORED,
                               .tier = KV_TIER_DEVICE,
                               .hashes = names,
                               .n_hashes = BLOCKS,
                               .tokens = tokens,
                               .n_tokens = BLOCKS * BLOCK,
                               .block_size = BLOCK,
                               .group = -1};
    if (kve_publisher_publish(publisher, &stored, 1) < 0)
        fprintf(stderr, "the queue is full: followers will see a gap\n");
    if (conversation >= CAPACITY) { /* evict the end of the conversation itself, for simplicity */
        struct kve_event removed = stored;

        removed.type = KVE_REMOVED;
        removed.hashes = names + 2;
        removed.n_hashes = BLOCKS - 2;
        kve_publisher_publish(publisher, &removed, 1);
    }
}

int main(int argc, char **argv)
{
    struct kve_publisher_opts opts = {
        .size = sizeof(opts),
        .endpoint = argc > 1 ? argv[1] : "tcp://127.0.0.1:*",
        .replay_endpoint = argc > 2 ? argv[2] : "tcp://127.0.0.1:*",
    };
    unsigned rounds = argc > 3 ? (unsigned)strtoul(argv[3], NULL, 10) * 10 : 5;
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kve_publisher *publisher;

    if (kve_publisher_create(&opts, &publisher) < 0) {
        fprintf(stderr, "can't publish on %s\n", opts.endpoint);
        return 1;
    }
    printf("events on %s, replay on %s\n", kve_publisher_endpoint(publisher),
           kve_publisher_replay_endpoint(publisher));
    for (unsigned i = 0; i < rounds * CONVERSATIONS; i++) {
        serve(publisher, i % CONVERSATIONS);
        if (i % CONVERSATIONS == CONVERSATIONS - 1)
            usleep(100000);
    }
    kve_publisher_flush(publisher, 1000);
    kve_publisher_get_stats(publisher, &stats);
    kve_publisher_destroy(publisher);
    printf("%llu events in %llu batches\n", (unsigned long long)stats.events,
           (unsigned long long)stats.batches);
    /* Each round announces every conversation and evicts half of them. */
    return stats.events == rounds * (CONVERSATIONS + CONVERSATIONS - CAPACITY) ? 0 : 1;
}
