// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of caches with a struct each: part of test_sizes.c, which includes this header once its own
 * state is declared.
 */
#ifndef TESTS_TIER_SIZES_CACHES_H
#define TESTS_TIER_SIZES_CACHES_H

static struct kvbm_cache_opts cache_ = {.n_heads = HEADS};
static struct kvbm_store_opts store_ = {.timeout_ms = 5};

static int cache(void *opts)
{
    struct kvbm_cache *made = NULL;
    int rc = kvbm_cache_attach(t.w.m, opts, &made);

    return rc < 0 ? rc : kvbm_cache_detach(made);
}

static int store_opts(void *opts)
{
    const struct kvbm_cache_opts attach = {.size = sizeof(attach), .layout = t.w.layout};
    const struct kvbm_chain chain = world_chain(&key_);
    struct kvbm_cache *made = NULL;
    long n;

    assert_int_equal(kvbm_cache_attach(t.w.m, &attach, &made), 0);
    n = kvbm_cache_store_with(made, &chain, 0, NULL, opts);
    assert_int_equal(kvbm_cache_detach(made), 0);
    return (int)n;
}

#endif
