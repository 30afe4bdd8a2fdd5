// SPDX-License-Identifier: Apache-2.0
/* Blocks that the disk can't read for write-back, or can't write: some blocks of a move fail, and
 * the rest arrive. */
// clang-format off
#include "base/unit.h"
// clang-format on

#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>

#include "tier/kitchen.h"

/* ---- a disk that can't read: the next so many blocks, or always the first so many slots ---- */

static _Atomic int fail_next, fail_slots, fail_writes, n_failed;

static bool fails(size_t len, off_t at)
{
    if (len < HOST_STRIDE || at < 4096)
        return false;
    if (at < 4096 + (off_t)atomic_load(&fail_slots) * (off_t)HOST_STRIDE) {
        atomic_fetch_add(&n_failed, 1);
        return true;
    }
    if (atomic_load(&fail_next) <= 0 || atomic_fetch_sub(&fail_next, 1) <= 0)
        return false;
    atomic_fetch_add(&n_failed, 1);
    return true;
}

ssize_t pread(int fd, void *to, size_t len, off_t at)
{
    ssize_t (*real)(int, void *, size_t, off_t) =
        (ssize_t(*)(int, void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pread");

    if (fails(len, at)) {
        errno = EIO;
        return -1;
    }
    return real(fd, to, len, at);
}

/* In every third slot. */
ssize_t pwrite(int fd, const void *from, size_t len, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))(uintptr_t)dlsym(RTLD_NEXT, "pwrite");

    if (len == HOST_STRIDE && (at - 4096) / (off_t)HOST_STRIDE % 3 == 0 &&
        atomic_load(&fail_writes)) {
        atomic_fetch_add(&n_failed, 1);
        errno = ENOSPC;
        return -1;
    }
    return real(fd, from, len, at);
}

static void begin(struct world *w)
{
    fail_writes = 0;
    fail_next = fail_slots = n_failed = 0;
    world_init(w, 24);
    w->opts.disk = w->disk;
    w->opts.disk_bytes = 64u * HOST_STRIDE;
    w->opts.disk_volatile = true;
    w->opts.io = KVBM_IO_THREADS;
    w->opts.object = w->object;
    w->opts.object_when_evicted = true;
    world_start(w);
    world_attach(w, false);
}

/* Sequences of 8 blocks, from 1000, 2000 ... on. */
static void store_some(struct world *w, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        assert_int_equal(world_store(w, 1000 * i, 8), 8);
        assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    }
}

static long loaded(struct world *w, uint64_t from, uint64_t n)
{
    long sum = 0;

    for (uint64_t i = from; i < from + n; i++) {
        sum += world_load(w, 1000 * i, 8);
        assert_int_equal(kvbm_manager_drain(w->m, 30000), 0);
    }
    return sum;
}

/* The block is listed and written back again, unless a busy machine lets it be evicted first. */
static void test_once(void **state)
{
    struct world w;
    uint64_t lost;

    (void)state;
    begin(&w);
    store_some(&w, 1, 6);
    fail_next = 5;
    store_some(&w, 7, 14);
    assert_int_equal(n_failed, 5);
    lost = world_stats(&w).object.dropped;
    assert_in_range(lost, 0, 2);
    assert_int_equal(world_stats(&w).disk.failed, 5);
    assert_int_equal(world_stats(&w).volumes_down, 0);
    assert_in_range(loaded(&w, 1, 20), 160 - 8 * lost, 160 - lost);
    world_fini(&w);
}

/* Some blocks can't be read at all: a few attempts, then they have gone, and are counted. The
 * others go. */
static void test_never(void **state)
{
    uint64_t stored = 6, lost;
    struct world w;

    (void)state;
    begin(&w);
    store_some(&w, 1, stored); /* in the order of the slots */
    fail_slots = 3;
    while (world_where(&w, 1000, 0) == KVBM_ON_DISK || world_where(&w, 1000, 1) == KVBM_ON_DISK ||
           world_where(&w, 1000, 2) == KVBM_ON_DISK) {
        assert_true(stored < 14);
        store_some(&w, ++stored, 1);
    }
    assert_in_range(n_failed, 6, 3 * 12);
    fail_slots = 0;
    store_some(&w, stored + 1, 20 - stored);
    lost = world_stats(&w).object.dropped;
    assert_in_range(lost, 3, 5); /* more than these as above */
    assert_int_equal(world_load(&w, 1000, 8), 0);
    assert_in_range(loaded(&w, 2, 19), 19 * 8 - 8 * (lost - 3), 19 * 8);
    world_fini(&w);
}

/* A volume that is given up is asked for nothing more, and nothing is told of for ever. */
static void test_volume_down(void **state)
{
    struct world w;

    (void)state;
    begin(&w);
    store_some(&w, 1, 6);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    fail_slots = 64;
    assert_int_equal(world_load(&w, 3000, 8), 0);
    assert_int_equal(n_failed, 8);
    assert_int_equal(world_stats(&w).volumes_down, 1);
    store_some(&w, 7, 10);
    assert_int_equal(n_failed, 8);
    assert_true(world_stats(&w).object.dropped < 200);
    world_fini(&w);
}

/* One block of a move is no other's concern: those that were written are there, the others' slots
 * are free again. */
static void test_some_not_written(void **state)
{
    uint64_t keys[30];
    uint8_t tiers[30];
    uint32_t there = 0;
    struct world w;

    (void)state;
    fail_slots = fail_next = n_failed = 0;
    world_init(&w, 512); /* so that a move has 32 blocks */
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 64u * HOST_STRIDE;
    w.opts.disk_volatile = true;
    w.opts.io = KVBM_IO_THREADS;
    world_start(&w);
    world_attach(&w, false);
    fail_writes = 1;
    assert_int_equal(world_store(&w, 1000, 30), 30);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(n_failed, 10);
    assert_int_equal(world_stats(&w).disk.blocks_in, 20);
    assert_int_equal(world_stats(&w).disk.failed, 10);
    assert_int_equal(world_stats(&w).disk.dropped, 10);
    assert_int_equal(world_stats(&w).disk.used, 20);
    world_keys(1000, keys, 30);
    assert_int_equal(kvbm_registry_locate(kvbm_manager_registry(w.m), 0, keys, 30, tiers), 0);
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(tiers[i] >> KV_TIER_DISK & 1, i % 3 != 0);
        there += tiers[i] >> KV_TIER_HOST & 1;
    }
    assert_int_equal(there, 30);
    fail_writes = 0;
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    for (uint32_t i = 0; i < 30; i++)
        assert_int_equal(world_load(&w, 1000 + i, 1), i % 3 != 0);
    world_fini(&w);
}

static void damage_slots(const struct world *w, off_t n)
{
    char path[200];
    uint8_t byte;
    int fd;

    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", w->disk);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    for (off_t i = 0; i < n; i++) {
        if (pread(fd, &byte, 1, 4096 + i * HOST_STRIDE + 9) != 1)
            break;
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, 4096 + i * HOST_STRIDE + 9), 1);
    }
    close(fd);
}

/* Blocks found damaged on their way from the disk to the object store aren't found on the disk any
 * more. */
static void test_damaged_leaves(void **state)
{
    uint64_t stored = 6, there = 0;
    struct world w;

    (void)state;
    begin(&w);
    store_some(&w, 1, stored);
    damage_slots(&w, 64);
    while (world_stats(&w).disk.bad == 0) {
        assert_true(stored < 20);
        store_some(&w, ++stored, 1);
    }
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    for (uint64_t i = 0; i < 48; i++) {
        uint64_t key = 1000 * (1 + i / 8) + i % 8;

        there += kvbm_pool_probe(kvbm_manager_pool(w.m, KV_TIER_DISK), 0, &key, 1) == 1;
    }
    assert_true(there <= 48 - world_stats(&w).disk.bad);
    world_fini(&w);
}

/* Blocks damaged on the disk are missed once; stored again, they are found after a restart. */
static void test_stored_again(void **state)
{
    struct world w;

    (void)state;
    fail_slots = fail_next = fail_writes = n_failed = 0;
    world_init(&w, 24);
    w.opts.disk = w.disk;
    w.opts.disk_bytes = 16u * HOST_STRIDE;
    world_start(&w);
    world_attach(&w, false);
    store_some(&w, 1, 1);
    damage_slots(&w, 16);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(loaded(&w, 1, 1), 0);
    assert_int_equal(world_stats(&w).disk.bad, 8);
    store_some(&w, 1, 1);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
    assert_int_equal(loaded(&w, 1, 1), 8);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(loaded(&w, 1, 1), 8);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_some_not_written),
        cmocka_unit_test(test_once),
        cmocka_unit_test(test_never),
        cmocka_unit_test(test_volume_down),
        cmocka_unit_test(test_stored_again),
        cmocka_unit_test(test_damaged_leaves),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
