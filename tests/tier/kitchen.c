// SPDX-License-Identifier: Apache-2.0
#include "tier/kitchen.h"

struct kvbm_layout_config world_block_of(uint32_t n_blocks)
{
    return (struct kvbm_layout_config){.size = sizeof(struct kvbm_layout_config),
                                       .kind = KVBM_FULLY_CONTIGUOUS,
                                       .num_blocks = n_blocks,
                                       .num_layers = LAYERS,
                                       .outer_dim = 2,
                                       .page_size = PAGE,
                                       .inner_dim = HEADS * HEAD_DIM,
                                       .dtype_width_bytes = 2,
                                       .num_heads = HEADS,
                                       .dtype = KVX_DTYPE_F16};
}

void world_start(struct world *w)
{
    assert_int_equal(kvbm_manager_create(&w->opts, &w->m), 0);
}

void world_attach(struct world *w, bool pool)
{
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = w->layout};
    const struct kvbm_pool_opts pool_opts = {.size = sizeof(pool_opts),
                                             .tier = KV_TIER_DEVICE,
                                             .n_blocks = w->n_cache_blocks,
                                             .block_size = PAGE,
                                             .layout = w->layout,
                                             .reject_duplicates = true};

    if (pool) {
        assert_int_equal(kvbm_pool_create(kvbm_manager_registry(w->m), &pool_opts, &w->pool), 0);
        opts.pool = w->pool;
    }
    assert_int_equal(kvbm_cache_attach(w->m, &opts, &w->cache), 0);
}

void world_init_of(struct world *w, uint32_t host_blocks, uint32_t n_cache_blocks)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);

    assert_true(n_cache_blocks <= WORLD_MAX_BLOCKS);
    memset(w, 0, sizeof(*w));
    w->n_cache_blocks = n_cache_blocks;
    assert_int_equal(temp_dir(w->dir, sizeof(w->dir)), 0);
    w->block = world_block_of(n_cache_blocks);
    snprintf(w->disk, sizeof(w->disk), "%s", w->dir);
    snprintf(w->object, sizeof(w->object), "%s/object", w->dir);
    w->opts = (struct kvbm_manager_opts){.size = sizeof(w->opts),
                                         .block = &w->block,
                                         .fingerprint = "test",
                                         .host_bytes = (uint64_t)host_blocks * HOST_STRIDE,
                                         .copy_threads = 2};
    assert_int_equal(kvbm_layout_allocate(&w->block, &allocator, &w->layout), 0);
}

void world_stop(struct world *w)
{
    if (w->cache)
        assert_int_equal(kvbm_cache_detach(w->cache), 0);
    if (w->pool) {
        kvbm_pool_reset_inactive(w->pool);
        assert_int_equal(kvbm_pool_destroy(w->pool), 0);
    }
    w->cache = NULL;
    w->pool = NULL;
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(w->m)), 0);
    assert_int_equal(kvbm_manager_destroy(w->m, 30000), 0);
    w->m = NULL;
}

int world_destroy(struct world *w, uint32_t timeout_ms)
{
    int rc = kvbm_manager_destroy(w->m, timeout_ms);

    if (rc < 0)
        return rc;
    assert_int_equal(kvbm_cache_detach(w->cache), 0);
    w->cache = NULL;
    w->m = NULL;
    return 0;
}

void world_fini(struct world *w)
{
    if (w->m)
        world_stop(w);
    kvbm_layout_destroy(w->layout);
    (void)remove_dir(w->dir);
}

/* ---- bytes ---- */

static uint64_t world_mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint16_t world_element(uint64_t key, uint32_t layer, uint32_t outer, uint32_t i)
{
    return (uint16_t)world_mix(key * 1315423911u + layer * 7919u + outer * 104729u + i) & 0xbbff;
}

uint16_t *world_region(const struct kvbm_layout *layout, uint32_t block, uint32_t layer,
                       uint32_t outer)
{
    struct kvbm_view view;

    assert_int_equal(kvbm_layout_region(layout, block, layer, outer, &view), 0);
    return (uint16_t *)(uintptr_t)view.addr; // NOLINT(performance-no-int-to-ptr)
}

void world_fill(const struct world *w, uint32_t block, uint64_t key)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            uint16_t *at = world_region(w->layout, block, layer, outer);

            for (uint32_t i = 0; i < PAGE * HEADS * HEAD_DIM; i++)
                at[i] = world_element(key, layer, outer, i);
        }
    }
}

bool world_layer_holds(const struct world *w, uint32_t block, uint32_t layer, uint64_t key)
{
    for (uint32_t outer = 0; outer < 2; outer++) {
        const uint16_t *at = world_region(w->layout, block, layer, outer);

        for (uint32_t i = 0; i < PAGE * HEADS * HEAD_DIM; i++) {
            if (at[i] != world_element(key, layer, outer, i))
                return false;
        }
    }
    return true;
}

bool world_holds(const struct world *w, uint32_t block, uint64_t key)
{
    uint32_t layer = 0;

    while (layer < LAYERS && world_layer_holds(w, block, layer, key))
        layer++;
    return layer == LAYERS;
}

void world_wipe(const struct world *w)
{
    for (uint32_t block = 0; block < w->n_cache_blocks; block++)
        world_fill(w, block, ~UINT64_C(0));
}

/* ---- chains: keys from first on, as a sequence of its own ---- */

void world_keys(uint64_t first, uint64_t *keys, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        keys[i] = first + i;
}

long world_store_keys(struct world *w, const uint64_t *keys, uint32_t n)
{
    uint32_t blocks[WORLD_MAX_BLOCKS];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks};
    struct kvbm_done done;
    int64_t id;

    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = i;
        world_fill(w, i, keys[i]);
    }
    assert_true(kvbm_manager_prepare_store(w->m, &chain, n, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.status, 0);
    return done.n_ok;
}

long world_store(struct world *w, uint64_t first, uint32_t n)
{
    uint64_t keys[WORLD_MAX_BLOCKS];

    world_keys(first, keys, n);
    return world_store_keys(w, keys, n);
}

long world_load(struct world *w, uint64_t first, uint32_t n)
{
    uint64_t keys[WORLD_MAX_BLOCKS];
    uint32_t blocks[WORLD_MAX_BLOCKS], prefix = 0;
    uint8_t ok[WORLD_MAX_BLOCKS / 8] = {0};
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = w->in_place};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks, .ok = ok};
    struct kvbm_done done;
    int64_t id;

    world_keys(first, keys, n);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = i;
    world_wipe(w);
    assert_true(kvbm_manager_prepare_load(w->m, &chain, n, &opts, &job.pin) >= 0);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, 30000, &done), 0);
    for (uint32_t i = 0; i < n; i++)
        assert_true(world_holds(w, i, ok[i / 8] >> (i % 8) & 1 ? keys[i] : ~UINT64_C(0)));
    while (prefix < n && ok[prefix / 8] >> (prefix % 8) & 1)
        prefix++;
    return prefix;
}

uint8_t world_where(struct world *w, uint64_t first, uint32_t i)
{
    uint64_t keys[WORLD_MAX_BLOCKS];
    uint8_t at[WORLD_MAX_BLOCKS];
    struct kvbm_chain chain = world_chain(keys);

    world_keys(first, keys, i + 1);
    assert_true(kvbm_manager_lookup(w->m, &chain, i + 1, at) >= 0);
    return at[i];
}

struct kvbm_manager_stats world_stats(struct world *w)
{
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kvbm_manager_get_stats(w->m, &stats), 0);
    return stats;
}

/* ---- a node that lends ---- */

void node_export(struct node *node, uint32_t share)
{
    struct kvbm_block_source source = kvbm_manager_source(node->w.m);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = kvbm_manager_host_layout(node->w.m),
                                            .shard = node->shard,
                                            .source = &source,
                                            .shared = kvbm_manager_shared(node->w.m),
                                            .lease_share = share};

    assert_int_equal(kvbm_blockset_export(node->agent, &what, &node->set), 0);
}

void node_fini(struct node *node)
{
    kvbm_blockset_destroy(node->set);
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(node->w.m)), 0);
    assert_int_equal(world_stats(&node->w).pins_now, 0);
    world_stop(&node->w);
    assert_int_equal(kvbm_agent_destroy(node->agent), 0);
    world_fini(&node->w);
}

void wait_for_peers(struct world *w, uint32_t n)
{
    wait_until(world_stats(w).peers_now == n);
}

/* ---- a store that hangs, fails, is slow and lies ---- */

struct shaky *shaky;

void find_shaky(void)
{
    shaky = shaky_find();
}
