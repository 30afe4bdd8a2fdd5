// SPDX-License-Identifier: Apache-2.0
/*
 * An engine's loop without the engine: conversations with a common system prompt, each sent again
 * with its history.
 *
 *     cc -std=c11 kvbm_minimal.c $(pkg-config --cflags --libs kvbm)
 */
#include <kvbm.h>
#include <stdio.h>

enum { BLOCK = 16, POOL = 192, MAX = 64, TALKS = 8, TURNS = 6, SYSTEM = 64, SAID = 40, TOLD = 24 };

/* Register the computed blocks from @at to @end: from here on other requests find them. */
static int share(struct kvbm_pool *pool, const uint64_t *keys, size_t at, size_t end,
                 struct kvbm_mutable *fresh, struct kvbm_immutable *held)
{
    struct kvbm_chain chain = {sizeof(chain), 0,    keys + at, at ? &keys[at - 1] : NULL, at,
                               NULL,          false};
    struct kvbm_complete full[MAX];
    int err = kvbm_pool_complete(pool, fresh + at, end - at, &chain, full);

    return end > at && err == 0 ? kvbm_pool_register(pool, full, end - at, held + at) : err;
}

/* Serve one request: prefill unknown blocks, decode an answer. Returns the number of blocks
 * reused. */
static long serve(struct kvbm_pool *pool, uint32_t *tokens, size_t *len)
{
    struct kvbm_immutable held[MAX] = {0}; /* block i of the text is shared, read only */
    struct kvbm_mutable fresh[MAX] = {0};  /* or this request's own, to be written */
    uint64_t keys[MAX];
    size_t n = kvbm_hash_tokens(tokens, *len, BLOCK, 0, KVBM_CHAIN_SEED_ZERO, NULL, NULL, keys);
    long hit = kvbm_pool_match(pool, 0, keys, n, 0, held), all = (long)(*len + TOLD) / BLOCK + 1;
    int err = hit < 0 ? (int)hit : kvbm_pool_allocate(pool, all - hit, fresh + hit, NULL);

    /* Here the GPU computes the missing blocks: K and V of block i go to fresh[i].handle.block. */
    err = err < 0 ? err : share(pool, keys, hit, n, fresh, held);
    for (uint32_t i = 0; i < TOLD && err == 0; i++)
        tokens[(*len)++] = 1000 + i; /* and here one more token */
    kvbm_hash_tokens(tokens, *len, BLOCK, 0, KVBM_CHAIN_SEED_ZERO, NULL, NULL, keys);
    err = err < 0 ? err : share(pool, keys, n, *len / BLOCK, fresh, held);
    /* not full, so it has no key: its bytes are dropped */
    kvbm_pool_release_mutable(pool, fresh, MAX);
    kvbm_pool_release(pool, held, MAX); /* inactive: found again until it is evicted */
    return err < 0 ? err : hit;         /* -ENOSPC: the request waits, holding no block */
}

int main(void)
{
    struct kvbm_pool_opts opts = {.size = sizeof(opts), .n_blocks = POOL, .block_size = BLOCK};
    static uint32_t tokens[TALKS][MAX * BLOCK];
    static size_t len[TALKS];
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    long reused = 0, blocks = 0, hit;

    if (kvbm_registry_create(NULL, &registry) < 0 || kvbm_pool_create(registry, &opts, &pool) < 0)
        return 1;
    for (uint32_t i = 0, t = 0; i < TURNS * TALKS; t = ++i % TALKS, reused += hit) {
        for (uint32_t k = len[t] ? SYSTEM : 0; k < SYSTEM + SAID; k++)
            tokens[t][len[t]++] = k < SYSTEM ? k : 100 * i + k;
        blocks += (long)(len[t] / BLOCK);
        if ((hit = serve(pool, tokens[t], &len[t])) < 0)
            return 1;
    }
    kvbm_pool_dump(pool, stdout, 5);
    return kvbm_pool_destroy(pool) || kvbm_registry_destroy(registry) || reused * 2 < blocks;
}
