// SPDX-License-Identifier: Apache-2.0
/*
 * An engine's loop around the block manager, without the engine: conversations that share a system prompt
 * and come back with their history. What was computed before is found, the rest is computed and shared.
 */
#include <kvbm.h>
#include <stdio.h>

enum { BLOCK = 16, POOL = 192, MOST = 64, CONVERSATIONS = 8, TURNS = 6, SYSTEM = 64, SAID = 40 };

/* Blocks [at, at + n) of the text have been computed: from here on others find them. */
static int share(struct kvbm_pool *pool, const struct kvbm_sequence *text, size_t at, size_t n,
                 struct kvbm_mutable *fresh, struct kvbm_immutable *held)
{
    const uint64_t *keys = kvbm_sequence_hashes(text);
    const void *parent = at ? &keys[at - 1] : NULL;
    struct kvbm_chain chain = {sizeof(chain), 0, keys + at, parent, (uint32_t)at, NULL};
    struct kvbm_complete full[MOST];
    int err = n ? kvbm_pool_complete(pool, fresh, n, &chain, full) : 0;

    return n && err == 0 ? kvbm_pool_register(pool, full, n, held) : err;
}

/* One request: prefill what isn't known, decode an answer. Returns how many blocks were reused. */
static long serve(struct kvbm_pool *pool, struct kvbm_sequence *text)
{
    struct kvbm_immutable held[MOST]; /* what it reads: full blocks, shared */
    struct kvbm_mutable fresh[MOST];  /* what it writes: its own; the last one is the tail */
    size_t n = kvbm_sequence_n_blocks(text);
    long hit = kvbm_pool_match(pool, 0, kvbm_sequence_hashes(text), n, 0, held);
    size_t at = hit > 0 ? (size_t)hit : 0, missing = n - at;
    int err = hit < 0 ? (int)hit : kvbm_pool_allocate(pool, missing + 1, fresh, NULL);

    if (err < 0) { /* -ENOSPC: an engine lets the request wait, holding nothing */
        kvbm_pool_release(pool, held, at);
        return err;
    }
    /* Here the GPU computes the missing tokens: K and V of block i go to fresh[i].handle.block. */
    err = share(pool, text, at, missing, fresh, held + at);
    for (uint32_t i = 0; i < 24 && err == 0; i++) { /* and here one token more, into the tail */
        if (kvbm_sequence_append(text, 1000 + i) != 1)
            continue;
        err = share(pool, text, n, 1, &fresh[missing], &held[n]); /* it is full */
        n += err == 0;
        err = err == 0 ? kvbm_pool_allocate(pool, 1, &fresh[missing], NULL) : err;
    }
    kvbm_mutable_release(&fresh[missing]); /* not full, so it has no name: its bytes go */
    kvbm_pool_release(pool, held, n);      /* inactive: found again until the room is needed */
    return err < 0 ? err : hit;
}

int main(void)
{
    struct kvbm_sequence_opts texts = {.size = sizeof(texts), .block_size = BLOCK};
    struct kvbm_pool_opts opts = {.size = sizeof(opts), .n_blocks = POOL, .block_size = BLOCK};
    struct kvbm_sequence *text[CONVERSATIONS] = {NULL};
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;

    if (kvbm_registry_create(NULL, &registry) < 0 || kvbm_pool_create(registry, &opts, &pool) < 0)
        return 1;
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        long reused = 0, blocks = 0, hit;

        for (uint32_t c = 0; c < CONVERSATIONS; c++) {
            if (turn == 0 && kvbm_sequence_create(&texts, &text[c]) < 0)
                return 1;
            for (uint32_t i = turn ? SYSTEM : 0; i < SYSTEM + SAID; i++)
                kvbm_sequence_append(text[c], i < SYSTEM ? i : 10000 * c + 100 * turn + i);
            blocks += (long)kvbm_sequence_n_blocks(text[c]);
            if ((hit = serve(pool, text[c])) < 0)
                return 1;
            reused += hit;
        }
        printf("turn %u: %3ld of %3ld prompt blocks reused\n", turn + 1, reused, blocks);
        if (turn && reused * 2 < blocks)
            return 1;
    }
    kvbm_pool_dump(pool, stdout, 5);
    for (uint32_t c = 0; c < CONVERSATIONS; c++)
        kvbm_sequence_destroy(text[c]);
    return kvbm_pool_destroy(pool) < 0 || kvbm_registry_destroy(registry) < 0; /* -EBUSY: a leak */
}
