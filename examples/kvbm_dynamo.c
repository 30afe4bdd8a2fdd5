// SPDX-License-Identifier: Apache-2.0
/*
 * A block manager's events on Dynamo's event plane: its router, or kv-indexer --dynamo, finds the
 * publisher in the deployment's discovery, a folder here, and follows it over ZMQ.
 * docs/event-plane.md explains both.
 *
 *     cc -std=gnu11 kvbm_dynamo.c $(pkg-config --cflags --libs kvbm)
 */
#define _XOPEN_SOURCE 700 /* for nftw */
#include <ftw.h>
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCK = 4, PROMPT = 3 };

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* An engine has computed a prompt: its blocks are registered, with their tokens for the router. */
static void compute(struct kvbm_registry *registry)
{
    const struct kvbm_pool_opts opts = {.size = sizeof(opts), .n_blocks = 16, .block_size = BLOCK};
    uint32_t tokens[PROMPT * BLOCK];
    uint64_t keys[PROMPT];
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .tokens = tokens};
    struct kvbm_mutable blocks[PROMPT];
    struct kvbm_immutable held[PROMPT];
    struct kvbm_pool *pool;

    for (uint32_t i = 0; i < PROMPT * BLOCK; i++)
        tokens[i] = 100 + i;
    (void)kvbm_hash_tokens(tokens, PROMPT * BLOCK, BLOCK, 0, KVBM_CHAIN_SEED_ZERO, NULL, NULL,
                           keys);
    must(kvbm_pool_create(registry, &opts, &pool), "pool");
    must(kvbm_pool_allocate(pool, PROMPT, blocks, NULL), "allocate");
    must(kvbm_pool_register_chain(pool, blocks, PROMPT, &chain, held), "register");
    must(kvbm_pool_release(pool, held, PROMPT), "release");
    must(kvbm_pool_destroy(pool), "pool"); /* its blocks go: removals follow */
}

int main(void)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    char folder[] = "/tmp/kvbm-dynamo-XXXXXX", discovery[64];
    struct kvbm_dynamo_opts opts = {.size = sizeof(opts),
                                    .discovery = discovery,
                                    .endpoint = "ns1.backend.generate",
                                    .worker = 7,
                                    .block_size = BLOCK,
                                    .address = "tcp://127.0.0.1:*"};
    struct kvbm_dynamo_stats stats = KVBM_DYNAMO_STATS_INIT;
    struct kvbm_registry_opts keys = {.size = sizeof(keys)};
    struct kvbm_registry *registry;
    struct kvbm_dynamo *dynamo;
    struct kvbm_events *events;

    if (!mkdtemp(folder))
        return 1;
    snprintf(discovery, sizeof(discovery), "file://%s", folder);
    must(kvbm_events_create(NULL, &events), "events");
    must(kvbm_events_add_dynamo(events, &opts, &dynamo), "sink");
    keys.events = events;
    must(kvbm_registry_create(&keys, &registry), "registry");
    /* There is no replay: a router knows what is published once it has found the publisher. */
    for (int i = 0; i < 6000 && !stats.announced; i++) {
        must(kvbm_dynamo_get_stats(dynamo, &stats), "stats");
        (void)nanosleep(&pause, NULL);
    }
    compute(registry);
    must(kvbm_events_flush(events, 60000), "flush");
    must(kvbm_dynamo_get_stats(dynamo, &stats), "stats");
    printf("%s: %llu events, %llu left out, %sannounced\n", stats.address,
           (unsigned long long)stats.events, (unsigned long long)stats.left_out,
           stats.announced ? "" : "not ");
    must(kvbm_registry_destroy(registry), "registry");
    must(kvbm_events_destroy(events), "events");
    (void)nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return !stats.announced || stats.left_out || stats.events < 2;
}
