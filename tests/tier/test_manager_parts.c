// SPDX-License-Identifier: Apache-2.0
/* Parts of blocks: some of the layers, some of the heads, and an engine's own tensors, one for each
 * layer. */
#include "base/unit.h"
#include "tier/kitchen.h"

#define N 5u

/* Blocks [0, N) of the cache are targets of keys [first, first + N): how the job ended. */
static struct kvbm_done load_into(struct world *w, struct kvbm_cache *cache, uint64_t first,
                                  uint32_t first_layer, uint32_t n_layers)
{
    uint64_t keys[N];
    uint32_t blocks[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = cache,
                           .blocks = blocks,
                           .first_layer = first_layer,
                           .n_layers = n_layers};
    struct kvbm_done done;
    int64_t id;

    world_keys(first, keys, N);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = i;
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, N, NULL, &job.pin), N);
    id = kvbm_manager_submit(w->m, &job);
    assert_true(id > 0);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, 30000, &done), 0);
    return done;
}

/* ---- layers ---- */

static void expect_layers(const struct world *w, uint64_t first, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_true(world_layer_holds(w, i, layer,
                                          layer >= from && layer < to ? first + i : ~UINT64_C(0)));
    }
}

/* An engine that computes layer by layer loads so, too; ranges may overlap, and what isn't asked
 * for stays. */
static void test_layers(void **state)
{
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 12u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, N), N);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    world_wipe(&w);
    assert_int_equal(load_into(&w, w.cache, 100, 1, 1).n_ok, N); /* and from the disk */
    expect_layers(&w, 100, 1, 2);
    assert_int_equal(load_into(&w, w.cache, 100, 1, 2).n_ok, N);
    expect_layers(&w, 100, 1, 3);
    world_wipe(&w);
    assert_int_equal(load_into(&w, w.cache, 100, 2, 0).n_ok, N); /* from there on */
    expect_layers(&w, 100, 2, LAYERS);
    assert_int_equal(load_into(&w, w.cache, 100, 0, 2).n_ok, N);
    expect_layers(&w, 100, 0, LAYERS);
    world_wipe(&w);
    assert_int_equal(load_into(&w, w.cache, 100, 2, 2).status, -EINVAL);
    assert_int_equal(load_into(&w, w.cache, 100, LAYERS, 1).status, -EINVAL);
    assert_int_equal(load_into(&w, w.cache, 100, 1, UINT32_MAX).status, -EINVAL);
    expect_layers(&w, 100, 0, 0);
    world_fini(&w);
}

/* ---- heads ---- */

/* A rank's cache, which has @n of the heads. */
static struct kvbm_layout *rank_layout(const struct world *w, uint32_t n,
                                       enum kvbm_block_order order)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout_config config = w->block;
    struct kvbm_layout *layout;

    config.kind = KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS;
    config.num_heads = n;
    config.inner_dim = n * HEAD_DIM;
    config.order = order;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    return layout;
}

/* Whether block @block of a rank's cache has heads [first, first + n) of the key; @write: makes it
 * so. */
static bool rank_has(const struct kvbm_layout *layout, uint32_t block, uint32_t first, uint32_t n,
                     uint64_t key, bool write)
{
    bool hnd = kvbm_layout_get_config(layout)->order == KVBM_ORDER_HND;
    bool has = true;

    for (uint32_t i = 0; i < LAYERS * 2 * PAGE * n * HEAD_DIM; i++) {
        uint32_t dim = i % HEAD_DIM, head = i / HEAD_DIM % n, token = i / HEAD_DIM / n % PAGE,
                 outer = i / HEAD_DIM / n / PAGE % 2, layer = i / HEAD_DIM / n / PAGE / 2;
        uint16_t *at =
            &world_region(layout, block, layer,
                          outer)[(hnd ? head * PAGE + token : token * n + head) * HEAD_DIM + dim];
        uint16_t want =
            world_element(key, layer, outer, (token * HEADS + first + head) * HEAD_DIM + dim);

        if (write)
            *at = want;
        has &= *at == want;
    }
    return has;
}

/* Whole blocks are read by ranks that have other numbers of heads, in either order: each gets its
 * own. */
static void load_as_rank(struct world *w, uint32_t first, uint32_t n, enum kvbm_block_order order)
{
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .first_head = first};
    struct kvbm_layout *layout = rank_layout(w, n, order);
    struct kvbm_cache *cache;
    struct kvbm_done done;

    opts.layout = layout;
    assert_int_equal(kvbm_cache_attach(w->m, &opts, &cache), 0);
    done = load_into(w, cache, 100, 0, 0);
    assert_int_equal(done.status, 0);
    assert_int_equal(done.n_ok, N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(rank_has(layout, i, first, n, 100 + i, false));
    assert_int_equal(kvbm_cache_detach(cache), 0);
    kvbm_layout_destroy(layout);
}

static void test_other_widths(void **state)
{
    struct world w;

    (void)state;
    for (int below = 0; below < 2; below++) {
        world_init(&w, below ? 0 : 12);
        w.opts.disk = w.disk;
        w.opts.disk_bytes = 12u * HOST_STRIDE;
        world_start(&w);
        world_attach(&w, false);
        assert_int_equal(world_store(&w, 100, N), N);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        for (uint32_t n = 1; n <= HEADS; n++) {
            for (uint32_t first = 0; first + n <= HEADS; first++) {
                load_as_rank(&w, first, n, KVBM_ORDER_NHD);
                load_as_rank(&w, first, n, KVBM_ORDER_HND);
            }
        }
        world_fini(&w);
    }
}

/* Stored by ranks of one width, through all tiers, and read by those of another. */
static void test_from_four_ranks_to_two(void **state)
{
    uint64_t keys[N];
    uint32_t blocks[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks};
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 12u * HOST_STRIDE;
    world_start(&w);
    world_keys(100, keys, N);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, N, &job.pin), N);
    for (uint32_t rank = 0; rank < HEADS; rank++) {
        struct kvbm_cache_opts opts = {.size = sizeof(opts), .first_head = rank};
        struct kvbm_layout *layout = rank_layout(&w, 1, rank % 2 ? KVBM_ORDER_HND : KVBM_ORDER_NHD);
        struct kvbm_done done;
        int64_t id;

        opts.layout = layout;
        for (uint32_t i = 0; i < N; i++)
            rank_has(layout, blocks[i] = i, rank, 1, keys[i], true);
        assert_int_equal(kvbm_cache_attach(w.m, &opts, &job.cache), 0);
        id = kvbm_manager_submit(w.m, &job);
        assert_true(id > 0);
        assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 30000, &done), 0);
        assert_int_equal(done.n_ok, N);
        assert_int_equal(kvbm_cache_detach(job.cache), 0);
        kvbm_layout_destroy(layout);
    }
    assert_int_equal(world_where(&w, 100, N - 1), KVBM_PENDING);
    assert_int_equal(kvbm_pin_commit(job.pin, NULL), N);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    load_as_rank(&w, 0, 2, KVBM_ORDER_NHD);
    load_as_rank(&w, 2, 2, KVBM_ORDER_HND);
    world_fini(&w);
}

/* ---- an engine's tensors ---- */

/* One tensor for each layer, [2, blocks, page, heads, dim]. */
static kvx_cache_desc_t tensor(uint16_t *data)
{
    const int64_t row = HEADS * HEAD_DIM, page = PAGE * row, outer = CACHE_BLOCKS * page;
    kvx_cache_desc_t cache = {.size = sizeof(cache),
                              .num_blocks = CACHE_BLOCKS,
                              .block_size = PAGE,
                              .num_kv_heads = HEADS,
                              .head_dim = HEAD_DIM};

    cache.k = (kvx_tensor_desc_t){.size = sizeof(cache.k),
                                  .dtype = KVX_DTYPE_F16,
                                  .layout = KVX_LAYOUT_BLOCK_NHD,
                                  .memory = KVX_MEMORY_HOST,
                                  .ndim = 4,
                                  .shape = {CACHE_BLOCKS, PAGE, HEADS, HEAD_DIM},
                                  .stride = {page, row, HEAD_DIM, 1},
                                  .data = data};
    cache.v = cache.k;
    cache.v.data = data + outer;
    return cache;
}

/* A cache as vLLM registers it: pointers and strides of its own tensors. */
static void test_engines_tensors(void **state)
{
    const size_t elements = 2 * CACHE_BLOCKS * PAGE * HEADS * HEAD_DIM;
    const kvx_cache_desc_t *layers[LAYERS];
    kvx_cache_desc_t caches[LAYERS];
    uint16_t *memory[LAYERS];
    struct kvbm_layout *own;
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 40u * HOST_STRIDE;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        memory[layer] = calloc(elements, sizeof(uint16_t));
        assert_non_null(memory[layer]);
        caches[layer] = tensor(memory[layer]);
        layers[layer] = &caches[layer];
    }
    own = w.layout;
    assert_int_equal(kvbm_layout_from_kvx(layers, LAYERS, &w.layout), 0);
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t first = 1000; first < 4000; first += 1000) {
        assert_int_equal(world_store(&w, first, 10), 10);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    }
    for (uint64_t first = 1000; first < 4000; first += 1000)
        assert_int_equal(world_load(&w, first, 10), 10);
    world_fini(&w);
    kvbm_layout_destroy(own);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        free(memory[layer]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_other_widths),
        cmocka_unit_test(test_from_four_ranks_to_two),
        cmocka_unit_test(test_engines_tensors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
