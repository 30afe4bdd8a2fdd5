// SPDX-License-Identifier: Apache-2.0
/* A host tier in shared memory: a reader that maps it finds the blocks that the manager holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kvbm_lease.h"
#include "peer/set/shared.h"
#include "tier/kitchen.h"

#define N 8u

static void start(struct world *w)
{
    world_init(w, N);
    w->opts.host_shared = true;
    w->opts.fingerprint = "test";
    w->opts.disk_buffered = true;
    world_with_disk(w, 64);
    world_start(w);
    world_attach(w, false);
}

/* Map a manager's memory as another process would, from a layout that was serialised. */
static struct kvbm_layout *map(struct world *w, struct kvbm_mapped *mapped)
{
    const struct kvbm_shared *shared = kvbm_manager_shared(w->m);
    struct kvbm_layout *told = NULL;
    uint8_t bytes[4096];
    long len = kvbm_layout_serialise(kvbm_manager_host_layout(w->m), bytes, sizeof(bytes), NULL);

    assert_true(len > 0 && shared);
    assert_int_equal(kvbm_layout_deserialise(bytes, (size_t)len, &told), 0);
    assert_int_equal(kvbm_shared_map(shared->fd, shared->id, told, mapped), 0);
    return told;
}

static void check_block(const struct kvbm_layout *told, const struct kvbm_mapped *mapped,
                        uint32_t block, uint64_t key)
{
    struct kvbm_view view;

    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            const char *at;

            assert_int_equal(kvbm_layout_region(told, block, layer, outer, &view), 0);
            at = mapped->data + (view.addr - mapped->owner_addr);
            for (uint32_t i = 0; i < view.len / 2; i++) {
                uint16_t want = world_element(key, layer, outer, i);

                assert_memory_equal(at + (size_t)i * 2, &want, 2);
            }
        }
    }
}

static void check_reader(struct world *w, uint64_t first)
{
    struct kvbm_mapped mapped;
    struct kvbm_layout *told = map(w, &mapped);
    uint64_t keys[N];
    uint32_t blocks[N];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    world_keys(first, keys, N);
    assert_int_equal(kvbm_manager_prepare_load(w->m, &chain, N, NULL, &pin), N);
    assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
    assert_int_equal(kvbm_pin_blocks(pin, blocks), N);
    for (uint32_t i = 0; i < N; i++)
        check_block(told, &mapped, blocks[i], keys[i]);
    kvbm_pin_release(pin);
    kvbm_shared_unmap(&mapped);
    kvbm_layout_destroy(told);
}

/* Blocks from the cache, and those that come back from the disk. */
static void test_reader_sees_the_host_tier(void **state)
{
    struct world w;

    (void)state;
    start(&w);
    for (uint64_t first = 1000; first < 4000; first += 1000) {
        assert_int_equal(world_store(&w, first, N), N);
        assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    }
    for (uint64_t first = 1000; first < 4000; first += 1000) {
        check_reader(&w, first);
        assert_int_equal(world_load(&w, first, N), N);
    }
    world_fini(&w);
}

static void test_options(void **state)
{
    struct kvbm_manager *made = NULL;
    struct world w;

    (void)state;
    world_init(&w, N);
    assert_null(kvbm_manager_shared(NULL));
    w.opts.host_shared = true;
    w.opts.host_pinned = true;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_pinned = false;
    w.opts.host_memory = (void *)(uintptr_t)4096;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), -EINVAL);
    w.opts.host_memory = NULL;
    w.opts.huge_pages = true;
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_non_null(kvbm_manager_shared(made));
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    w.opts.size = offsetof(struct kvbm_manager_opts, host_shared); /* an older caller */
    assert_int_equal(kvbm_manager_create(&w.opts, &made), 0);
    assert_null(kvbm_manager_shared(made));
    assert_int_equal(kvbm_manager_destroy(made, 10000), 0);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reader_sees_the_host_tier),
        cmocka_unit_test(test_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
