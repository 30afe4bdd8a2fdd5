// SPDX-License-Identifier: Apache-2.0
/*
 * A block manager's events over NATS, for storage advisors and kv-indexer --nats, and what a scrape of
 * the engine's /metrics shows of them. docs/event-plane.md has the records.
 *
 *     cc -std=gnu11 kvbm_nats.c $(pkg-config --cflags --libs kvbm)
 *     ./a.out nats://127.0.0.1:4222
 */
#include <errno.h>
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, PROMPT = 4 };

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* A prompt's blocks enter the device's tier, and leave it with their pool. */
static void work(struct kvbm_registry *registry)
{
    static const uint64_t keys[PROMPT] = {11, 12, 13, 14};
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    const struct kvbm_pool_opts opts = {.size = sizeof(opts), .n_blocks = 8, .block_size = BLOCK};
    struct kvbm_mutable blocks[PROMPT];
    struct kvbm_immutable held[PROMPT];
    struct kvbm_pool *pool;

    must(kvbm_pool_create(registry, &opts, &pool), "pool");
    must(kvbm_pool_allocate(pool, PROMPT, blocks, NULL), "allocate");
    must(kvbm_pool_register_chain(pool, blocks, PROMPT, &chain, held), "register");
    must(kvbm_pool_release(pool, held, PROMPT), "release");
    must(kvbm_pool_destroy(pool), "pool");
}

int main(int argc, char **argv)
{
    /* No server delays nobody: messages wait in a queue, and the oldest ones stay. */
    const struct kvp_nats_opts server = {.size = sizeof(server),
                                         .url = argc > 1 ? argv[1] : "nats://127.0.0.1:1",
                                         .timeout_ms = 500};
    const struct kvbm_nats_opts opts = {.size = sizeof(opts),
                                        .server = &server,
                                        .cluster = "example",
                                        .model = "example-model",
                                        .tenant = "default",
                                        .worker = "7"};
    struct kvbm_registry_opts keys = {.size = sizeof(keys)};
    struct kvbm_nats_stats stats = KVBM_NATS_STATS_INIT;
    struct kvbm_registry *registry;
    struct kvbm_nats_sink *sink;
    struct kvbm_events *events;
    char text[8192];
    int rc;

    must(kvbm_events_create(NULL, &events), "events");
    rc = kvbm_events_add_nats(events, &opts, &sink);
    if (rc == -ENOTSUP) {
        printf("libkv_nats isn't there: nothing is published\n");
        return kvbm_events_destroy(events);
    }
    must(rc, "sink");
    keys.events = events;
    must(kvbm_registry_create(&keys, &registry), "registry");
    work(registry);
    must(kvbm_events_flush(events, 60000), "flush");
    must(kvbm_nats_get_stats(sink, &stats), "stats");
    must(kvbm_nats_metrics(sink, text, sizeof(text)), "metrics");
    printf("%s", text);
    must(kvbm_registry_destroy(registry), "registry");
    must(kvbm_events_destroy(events), "events");
    return stats.records != 2 * PROMPT || !strstr(text, "kvasir.example.example-model.default.7");
}
