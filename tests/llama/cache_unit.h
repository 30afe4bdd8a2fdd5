// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of the prefix cache: a store in memory, and a cache over it that two contexts of
 * the small libllama use. Define URI, the store's name, and N, the number of tokens, before.
 */
#ifndef KV_TESTS_LLAMA_CACHE_UNIT_H
#define KV_TESTS_LLAMA_CACHE_UNIT_H

#include "base/core/error.h"
#include "base/hash/prefix_block.h"
#include "llama/toy_llama.h"
#include "store/memory_backend.h"

static struct {
    struct kvs_store *store;
    struct kvl_cache *cache;
    int32_t tokens[N];
    struct toy_memory *toy, *other; /* of two contexts */
    struct llama_context ctx, ctx2;
} t;

/** Make the two contexts. */
static inline void make_contexts(void)
{
    t.toy = malloc(sizeof(*t.toy));
    t.other = malloc(sizeof(*t.other));
    assert_non_null(t.toy);
    assert_non_null(t.other);
    t.ctx.memory = t.toy;
    t.ctx2.memory = t.other;
    t.cache = NULL;
}

/** Draw the tokens, and open the store. */
static inline void make_store(uint64_t seed)
{
    for (int i = 0; i < N; i++)
        t.tokens[i] = (int32_t)unit_below(&seed, 32000);
    assert_int_equal(kvs_open_with(memory_vtable(), memory_ext(), URI, false, &t.store), 0);
}

static inline int teardown(void **state)
{
    (void)state;
    kvl_close(t.cache);
    kvs_close(t.store);
    memory_forget_all();
    free(t.toy);
    free(t.other);
    return 0;
}

/** Count chunks of a kind; 0: of all kinds. */
static inline size_t n_chunks(char kind)
{
    size_t n = 0;

    for (struct memory_object *o = memory_space(URI)->chunks; o; o = o->next)
        n += o->hash_len == KV_PREFIX_KEY && (!kind || o->hash[3] == (uint8_t)kind);
    return n;
}

#endif
