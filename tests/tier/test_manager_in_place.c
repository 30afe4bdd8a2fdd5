// SPDX-License-Identifier: Apache-2.0
/* Loads that leave blocks of peers where they are (kvbm_pin_opts.in_place): one copy, into any cache. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tier/kitchen.h"
#include "tier/manager/state/manager.h"

#define N 8u
#define OWNED (8 * N) /* blocks of an owner, so that N of them may be leased in place */

static struct node owner, other;
static struct world reader;
static char peers[512];

static void reader_init(const char *at, uint32_t n_peers)
{
    world_init(&reader, 2 * N);
    reader.opts.peers = at;
    reader.opts.peer_timeout_ms = 60000;
    reader.in_place = true;
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, n_peers);
}

static void reader_fini(void)
{
    assert_int_equal(world_stats(&reader).pins_now, 0);
    assert_int_equal(reader.m->pins.n_leased, 0);
    world_fini(&reader);
}

/* Check how many blocks came from peers, and how many of them through host blocks. */
static void expect(uint64_t from_peers, uint64_t through_host)
{
    struct kvbm_manager_stats stats = world_stats(&reader);

    assert_int_equal(stats.peer.blocks_out, from_peers);
    assert_int_equal(stats.peer.bytes_out, from_peers * BLOCK_BYTES);
    assert_int_equal(stats.host.blocks_in, through_host);
    assert_int_equal(stats.peer.bad + stats.peer.failed, 0);
}

static struct kvbm_pin *prepare(uint64_t first, uint32_t n, long expected)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = true};
    uint64_t keys[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    world_keys(first, keys, n);
    assert_true(kvbm_manager_prepare_load(reader.m, &chain, n, &opts, &pin) >= 0);
    assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
    assert_int_equal(kvbm_pin_state(pin, NULL), expected);
    return pin;
}

static struct kvbm_done run(const struct kvbm_job *job)
{
    struct kvbm_done done;
    int64_t id = kvbm_manager_submit(reader.m, job);

    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(reader.m, (uint64_t)id, 60000, &done), 0);
    return done;
}

/* From the owner's host tier and its disk: nothing enters the reader's host tier. */
static void test_loads(void **state)
{
    uint32_t blocks[N];
    struct kvbm_pin *pin;

    (void)state;
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    for (uint64_t first = 1000; first < 11000; first += 1000) {
        assert_int_equal(world_store(&owner.w, first, N), N);
        assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
    }
    reader_init(owner.at, 1);
    assert_int_equal(world_load(&reader, 10000, N), N); /* of its host tier */
    assert_int_equal(world_load(&reader, 1000, N), N);  /* of its disk */
    assert_int_equal(world_load(&reader, 1000, N), N);  /* again, from there */
    expect(3 * N, 0);
    assert_int_equal(world_stats(&reader).host.used, 0);
    assert_int_equal(world_load(&reader, 77000, N), 0);
    pin = prepare(10000, N, N);
    assert_int_equal(kvbm_pin_blocks(pin, blocks), 0);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(blocks[i], UINT32_MAX);
    assert_int_equal(reader.m->pins.n_leased, N);
    kvbm_pin_release(pin);
    reader_fini();
    node_fini(&owner);
}

/* Without shared memory, or beyond what may be leased in place, blocks come through host blocks. */
static void test_falls_back(void **state)
{
    (void)state;
    for (int way = 0; way < 4; way++) {
        node_init(&owner, "owner", way == 2 ? OWNED - 2 : OWNED,
                  way == 1 ? "tcp:127.0.0.1:0" : NULL, way > 0, NULL);
        assert_int_equal(world_store(&owner.w, 1000, N), N);
        if (way == 3) { /* lends fewer blocks than one lease wants */
            kvbm_blockset_destroy(owner.set);
            node_export(&owner, 5);
        }
        reader_init(owner.at, 1);
        assert_int_equal(world_load(&reader, 1000, N), N);
        expect(N, way == 2 ? 1 : N);
        assert_int_equal(reader.m->pins.n_leased, 0);
        reader_fini();
        node_fini(&owner);
    }
}

/* One job from the host tier, two owners in place, and one through a socket, with a hole. */
static void test_sources(void **state)
{
    uint64_t keys[N] = {1000, 2000, 3001, 4000, 77, 2001, 1001, 3000};
    uint32_t blocks[N] = {7, 6, 5, 4, 3, 2, 1, 0};
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = true};
    uint8_t ok[1];
    struct kvbm_job job = {.size = sizeof(job), .blocks = blocks, .ok = ok};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_done done;
    struct node third;

    (void)state;
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    node_init(&other, "other", OWNED, NULL, true, NULL);
    node_init(&third, "third", OWNED, NULL, false, NULL);
    snprintf(peers, sizeof(peers), "%s,%s,%s", owner.at, other.at, third.at);
    assert_int_equal(world_store(&owner.w, 1000, 2), 2);
    assert_int_equal(world_store(&other.w, 2000, 2), 2);
    assert_int_equal(world_store(&third.w, 3000, 2), 2);
    reader_init(peers, 3);
    assert_int_equal(world_store(&reader, 4000, 1), 1);
    chain.scattered = true;
    world_wipe(&reader);
    assert_int_equal(kvbm_manager_prepare_load(reader.m, &chain, N, &opts, &job.pin), N);
    job.cache = reader.cache;
    done = run(&job);
    kvbm_pin_release(job.pin);
    assert_int_equal(done.status, 0);
    assert_int_equal(done.n, N);
    assert_int_equal(done.n_ok, N - 1);
    assert_int_equal(done.bytes, (N - 1) * (uint64_t)BLOCK_BYTES);
    assert_int_equal(ok[0], 0xef);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&reader, blocks[i], i == 4 ? ~UINT64_C(0) : keys[i]));
    expect(6, 1 + 2); /* one stored, two of the third */
    reader_fini();
    node_fini(&third);
    node_fini(&other);
    node_fini(&owner);
}

/* Into a cache whose heads come first, layer by layer, by jobs of one pin at the same time. */
static void test_converts(void **state)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout_config config = world_block_of(N);
    struct kvbm_cache_opts opts = {.size = sizeof(opts)};
    struct kvbm_layout *layout;
    struct kvbm_job job = {.size = sizeof(job), .n_layers = 1};
    uint32_t blocks[N];
    int64_t ids[LAYERS];

    (void)state;
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    reader_init(owner.at, 1);
    config.kind = KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS;
    config.order = KVBM_ORDER_HND;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
    opts.layout = layout;
    assert_int_equal(kvbm_cache_attach(reader.m, &opts, &job.cache), 0);
    for (uint32_t i = 0; i < N; i++)
        blocks[i] = N - 1 - i;
    job.blocks = blocks;
    job.pin = prepare(1000, N, N);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        job.first_layer = layer;
        ids[layer] = kvbm_manager_submit(reader.m, &job);
        assert_true(ids[layer] > 0);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct kvbm_done done;

        assert_int_equal(kvbm_manager_wait(reader.m, (uint64_t)ids[layer], 60000, &done), 0);
        assert_int_equal(done.n_ok, N);
    }
    kvbm_pin_release(job.pin);
    for (uint32_t i = 0; i < N; i++) {
        const uint16_t *hnd = world_region(layout, blocks[i], LAYERS - 1, 1);

        for (uint32_t at = 0; at < PAGE * HEADS * HEAD_DIM; at++) {
            uint32_t token = at / (HEADS * HEAD_DIM), head = at / HEAD_DIM % HEADS;
            uint32_t there = (head * PAGE + token) * HEAD_DIM + at % HEAD_DIM;

            assert_int_equal(hnd[there], world_element(1000 + i, LAYERS - 1, 1, at));
        }
    }
    assert_int_equal(world_stats(&reader).host.blocks_in, 0);
    assert_int_equal(kvbm_cache_detach(job.cache), 0);
    kvbm_layout_destroy(layout);
    reader_fini();
    node_fini(&owner);
}

/* Pins together lease no more than an eighth of an owner's blocks; the next one's blocks are copied. */
static void test_bound(void **state)
{
    struct kvbm_pin *first, *second;

    (void)state;
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(world_store(&owner.w, 2000, N), N);
    reader_init(owner.at, 1);
    first = prepare(1000, N, N);
    second = prepare(2000, N, N);
    assert_int_equal(reader.m->pins.n_leased, N);
    assert_int_equal(world_stats(&reader).host.blocks_in, N);
    kvbm_pin_release(first);
    assert_int_equal(reader.m->pins.n_leased, 0);
    kvbm_pin_release(second);
    assert_int_equal(world_load(&reader, 1000, N), N);
    assert_int_equal(world_stats(&reader).host.blocks_in, N);
    reader_fini();
    node_fini(&owner);
}

/* The options that keep a pin to this node, and to its host tier, do so. */
static void test_opts(void **state)
{
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = true, .no_peers = true};
    const uint64_t key = 1000;
    const struct kvbm_chain chain = world_chain(&key);
    struct kvbm_pin *pin;

    (void)state;
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    assert_int_equal(world_store(&owner.w, 1000, 1), 1);
    reader_init(owner.at, 1);
    for (int way = 0; way < 3; way++) {
        opts.no_peers = way == 0;
        opts.no_fetch = way == 1;
        if (way == 2) /* of an older version */
            opts.size = offsetof(struct kvbm_pin_opts, in_place);
        assert_true(kvbm_manager_prepare_load(reader.m, &chain, 1, &opts, &pin) >= 0);
        assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
        assert_int_equal(kvbm_pin_state(pin, NULL), way == 2);
        assert_int_equal(reader.m->pins.n_leased, 0);
        kvbm_pin_release(pin);
    }
    reader_fini();
    node_fini(&owner);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loads),   cmocka_unit_test(test_falls_back),
        cmocka_unit_test(test_sources), cmocka_unit_test(test_converts),
        cmocka_unit_test(test_bound),   cmocka_unit_test(test_opts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
