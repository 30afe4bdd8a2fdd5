// SPDX-License-Identifier: Apache-2.0
/** For tests of batches of keys of no sequence. Include after cmocka.h. */
#ifndef KV_TEST_MANAGER_SCATTERED_H
#define KV_TEST_MANAGER_SCATTERED_H

#include "tier/kitchen.h"

enum { N = CACHE_BLOCKS, LONG_MS = 100000 };

static inline struct kvbm_chain scattered(const uint64_t *keys)
{
    struct kvbm_chain chain = KVBM_CHAIN_INIT;

    chain.keys = keys;
    chain.scattered = true;
    return chain;
}

/* One pin and one job for all of them. Returns the number copied; @ok tells which. */
static inline uint32_t job(struct world *w, bool store, const uint64_t *keys, uint32_t n,
                           uint8_t *ok)
{
    struct kvbm_chain chain = scattered(keys);
    struct kvbm_job job = KVBM_JOB_INIT;
    struct kvbm_done done;
    uint32_t blocks[N];
    int64_t id;

    memset(ok, 0, N / 8);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = (i * 7) % N; /* neither are the blocks in order */
        world_fill(w, blocks[i], store ? keys[i] : ~UINT64_C(0));
    }
    job.cache = w->cache;
    job.blocks = blocks;
    job.ok = ok;
    if (store)
        assert_true(kvbm_manager_prepare_store(w->m, &chain, n, &job.pin) >= 0);
    else
        assert_true(kvbm_manager_prepare_load(w->m, &chain, n, NULL, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, LONG_MS, &done), 0);
    for (uint32_t i = 0; i < n && !store; i++)
        assert_true(world_holds(w, blocks[i], ok[i / 8] >> (i % 8) & 1 ? keys[i] : ~UINT64_C(0)));
    return done.n_ok;
}

static inline bool bit(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> (i % 8) & 1;
}

static inline void with_object(struct world *w)
{
    w->opts.object = w->object;
    w->opts.object_timeout_ms = LONG_MS;
}

/* Look up until no key is PENDING. */
static inline void lookup(struct world *w, const uint64_t *keys, uint32_t n, uint8_t *at)
{
    struct kvbm_chain chain = scattered(keys);
    bool pending = true;

    while (pending) {
        pending = false;
        assert_true(kvbm_manager_lookup(w->m, &chain, n, at) >= 0);
        for (uint32_t i = 0; i < n; i++)
            pending |= at[i] == KVBM_PENDING;
    }
}

static inline void restart(struct world *w)
{
    world_stop(w);
    world_start(w);
    world_attach(w, false);
}

static inline struct kvbm_remove_result remove_keys(struct world *w, const uint64_t *keys,
                                                    uint32_t n)
{
    struct kvbm_remove_result ret = KVBM_REMOVE_RESULT_INIT;

    assert_int_equal(kvbm_manager_remove(w->m, 0, keys, n, LONG_MS, &ret), 0);
    return ret;
}

#endif
