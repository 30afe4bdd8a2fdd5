// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks by handles: a scheduler holds the blocks that it has found in any tier while their request
 * waits. Then it brings all of them into the engine's pool in one batch.
 *
 *     cc -std=gnu11 kvbm_handles.c $(pkg-config --cflags --libs kvbm)
 */
#include <kvbm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE = 16, PROMPT = 6, WAIT_MS = 60000 };

struct engine {
    struct kvbm_layout *layout;
    struct kvbm_manager *manager;
    struct kvbm_pool *pool; /* of the engine's own cache */
    struct kvbm_cache *cache;
};

static const uint64_t keys[PROMPT] = {11, 12, 13, 14, 15, 16};

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* K of layer 0 of a block. */
static struct kvbm_view k_of(const struct engine *e, uint32_t block)
{
    struct kvbm_view view;

    must(kvbm_pool_view(e->pool, block, 0, 0, &view), "view");
    return view;
}

static void start(struct engine *e)
{
    const struct kvbm_layout_config block = {.size = sizeof(block),
                                             .kind = KVBM_FULLY_CONTIGUOUS,
                                             .num_blocks = CACHE,
                                             .num_layers = 2,
                                             .outer_dim = 2,
                                             .page_size = 16,
                                             .inner_dim = 64};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    const struct kvbm_manager_opts tiers = {
        .size = sizeof(tiers), .block = &block, .host_bytes = 1 << 20};
    struct kvbm_pool_opts pool = {.size = sizeof(pool), .n_blocks = CACHE, .block_size = 16};
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};

    must(kvbm_layout_allocate(&block, &allocator, &e->layout), "layout");
    must(kvbm_manager_create(&tiers, &e->manager), "manager");
    pool.layout = e->layout;
    must(kvbm_pool_create(kvbm_manager_registry(e->manager), &pool, &e->pool), "pool");
    cache.layout = e->layout;
    cache.pool = e->pool;
    must(kvbm_cache_attach(e->manager, &cache, &e->cache), "cache");
}

static void stop(struct engine *e)
{
    must(kvbm_cache_detach(e->cache), "detach");
    must(kvbm_pool_destroy(e->pool), "pool");
    must(kvbm_manager_destroy(e->manager, WAIT_MS), "manager");
    kvbm_layout_destroy(e->layout);
}

/* A request has been served: its blocks go to the tiers, and the engine forgets them. */
static void serve(struct engine *e)
{
    const struct kvbm_chain prompt = {.size = sizeof(prompt), .keys = keys};
    struct kvbm_mutable blocks[PROMPT];
    struct kvbm_immutable held[PROMPT];
    uint32_t at[PROMPT];

    must(kvbm_pool_allocate(e->pool, PROMPT, blocks, NULL), "allocate");
    for (uint32_t i = 0; i < PROMPT; i++) {
        struct kvbm_view k = k_of(e, blocks[i].handle.block);

        at[i] = blocks[i].handle.block;
        memset((void *)(uintptr_t)k.addr, (int)keys[i], k.len); /* the engine writes it */
    }
    must(kvbm_pool_register_chain(e->pool, blocks, PROMPT, &prompt, held), "register");
    must(kvbm_cache_store(e->cache, &prompt, PROMPT, at, WAIT_MS), "store");
    must(kvbm_pool_release(e->pool, held, PROMPT), "release");
    must(kvbm_pool_reset_inactive(e->pool), "reset");
}

int main(void)
{
    struct engine e;
    struct kvbm_pool *host;
    struct kvbm_immutable found[PROMPT], mine[PROMPT];
    struct kvbm_pin *pin;
    long n, ready;

    start(&e);
    serve(&e);
    host = kvbm_manager_pool(e.manager, KV_TIER_HOST);
    n = kvbm_pool_match(host, 0, keys, PROMPT, 0, found);
    must(n, "match");

    /* The request waits: blocks of lower tiers come up to the host tier meanwhile. */
    ready = kvbm_manager_prepare_load_blocks(e.manager, found, (size_t)n, NULL, &pin);
    must(ready, "prepare");
    must(kvbm_pin_wait(pin, WAIT_MS), "wait");
    kvbm_pin_release(pin);

    /* The request is scheduled. */
    n = kvbm_manager_onboard_blocks(e.cache, found, (size_t)n, WAIT_MS, mine);
    must(n, "onboard");
    printf("%ld blocks found and pinned, %ld onboarded\n", ready, n);
    for (long i = 0; i < n; i++)
        if (*(const unsigned char *)(uintptr_t)k_of(&e, mine[i].handle.block).addr != keys[i])
            return 1;
    must(kvbm_pool_release(host, found, (size_t)ready), "release");
    must(kvbm_pool_release(e.pool, mine, (size_t)n), "release");
    stop(&e);
    return n != PROMPT;
}
