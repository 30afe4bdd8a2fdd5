// SPDX-License-Identifier: Apache-2.0
/* Misuse by a connector: no wrong call crashes, hangs, leaks or gives wrong bytes. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/core/clock.h"
#include "base/unit.h"
#include "tier/kitchen.h"

#define MAX_PIN (1u << 20)
#define MANY (1u << 15) /* keys of a pin that has more than any tier */

static void disk_of(struct world *w, uint32_t blocks)
{
    w->opts.disk = w->disk;
    w->opts.disk_bytes = (uint64_t)blocks * HOST_STRIDE;
}

static int64_t submit(struct world *w, struct kvbm_pin *pin, const uint32_t *blocks, uint8_t *ok,
                      int ready_fd)
{
    const struct kvbm_job job = {.size = sizeof(job),
                                 .pin = pin,
                                 .cache = w->cache,
                                 .blocks = blocks,
                                 .ok = ok,
                                 .ready_fd = ready_fd};

    return kvbm_manager_submit(w->m, &job);
}

static struct kvbm_done ended(struct world *w, int64_t id)
{
    struct kvbm_done done;

    assert_true(id > 0);
    assert_int_equal(kvbm_manager_wait(w->m, (uint64_t)id, 30000, &done), 0);
    return done;
}

/* ---- names ---- */

/* However long a fingerprint is, its end counts: what another model has stored is no use to this
 * one. */
static void test_long_fingerprints(void **state)
{
    static char text[3801];
    static char too_long[sizeof(text) + 1];
    struct kvbm_manager *none = NULL;

    (void)state;
    for (int below = 0; below < 2; below++) {
        struct world w;

        memset(text, 'f', sizeof(text) - 1);
        memset(too_long, 'f', sizeof(text));
        world_init(&w, 12);
        if (below == 0)
            disk_of(&w, 20);
        else
            w.opts.object = w.object;
        w.opts.fingerprint = text;
        for (int model = 0; model < 3; model++) {
            text[sizeof(text) - 2] = model == 1 ? 'B' : 'A';
            world_start(&w);
            world_attach(&w, false);
            if (model == 0)
                assert_int_equal(world_store(&w, 100, 5), 5);
            assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
            if (model == 1)
                assert_int_equal(world_load(&w, 100, 5), 0);
            else /* the other one has files of its own */
                assert_int_equal(world_load(&w, 100, 5), 5);
            world_stop(&w);
        }
        w.opts.fingerprint = too_long;
        assert_int_equal(kvbm_manager_create(&w.opts, &none), -EINVAL);
        assert_null(none);
        world_fini(&w);
    }
}

/* The longest keys, which differ in their last byte alone. */
static void test_long_keys(void **state)
{
    uint8_t keys[4][KVBM_MAX_KEY];
    uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_manager *none;
    struct kvbm_pin *pin;
    struct world w;
    uint8_t at[4];

    (void)state;
    world_init(&w, 12);
    disk_of(&w, 20);
    w.opts.object = w.object;
    w.opts.key_len = KVBM_MAX_KEY + 1;
    assert_int_equal(kvbm_manager_create(&w.opts, &none), -EINVAL);
    w.opts.key_len = KVBM_MAX_KEY;
    memset(keys, 0xff, sizeof(keys));
    for (uint8_t i = 0; i < 4; i++)
        keys[i][KVBM_MAX_KEY - 1] = i;
    world_start(&w);
    world_attach(&w, false);
    for (uint32_t i = 0; i < 4; i++)
        world_fill(&w, i, 700 + i);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 4);
    assert_int_equal(ended(&w, submit(&w, pin, blocks, NULL, -1)).n_ok, 4);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_stop(&w);
    world_start(&w);
    world_attach(&w, false);
    world_wipe(&w);
    assert_int_equal(kvbm_manager_lookup(w.m, &chain, 4, at), 4);
    assert_int_equal(at[3], KVBM_ON_DISK);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &pin), 4);
    assert_int_equal(ended(&w, submit(&w, pin, blocks, NULL, -1)).n_ok, 4);
    kvbm_pin_release(pin);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(world_holds(&w, i, 700 + i));
    world_fini(&w);
}

/* ---- numbers ---- */

static void test_no_keys_and_all(void **state)
{
    uint64_t *keys = malloc((MAX_PIN + 1) * sizeof(*keys)), one = 100;
    uint8_t *at = malloc(MANY);
    struct kvbm_chain chain = world_chain(keys), nothing = {.size = sizeof(nothing)};
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    assert_non_null(keys);
    assert_non_null(at);
    world_init(&w, 12);
    disk_of(&w, 20);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(kvbm_manager_lookup(w.m, &nothing, 0, NULL), 0);
    assert_int_equal(kvbm_manager_lookup(w.m, &nothing, 1, NULL), -EINVAL);
    assert_int_equal(kvbm_manager_touch(w.m, 0, NULL, 0), 0);
    assert_int_equal(kvbm_manager_touch(w.m, 0, NULL, 1), -EINVAL);
    assert_int_equal(kvbm_manager_touch(w.m, KVBM_MAX_GROUPS, &one, 1), -EINVAL);
    for (int store = 0; store < 2; store++) {
        assert_int_equal(store ? kvbm_manager_prepare_store(w.m, &nothing, 0, &pin)
                               : kvbm_manager_prepare_load(w.m, &nothing, 0, NULL, &pin),
                         0);
        assert_int_equal(kvbm_pin_state(pin, NULL), 0);
        assert_int_equal(kvbm_pin_wait(pin, 0), 0);
        assert_int_equal(ended(&w, submit(&w, pin, NULL, NULL, -1)).status, 0);
        kvbm_pin_release(pin);
        world_keys(1, keys, MAX_PIN + 1);
        assert_int_equal(store ? kvbm_manager_prepare_store(w.m, &chain, MAX_PIN + 1, &pin)
                               : kvbm_manager_prepare_load(w.m, &chain, MAX_PIN + 1, NULL, &pin),
                         -EINVAL);
    }
    assert_int_equal(world_store(&w, 1, 12), 12);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, MANY, NULL, &pin), 12);
    assert_int_equal(kvbm_pin_wait(pin, 30000), 0);
    assert_int_equal(kvbm_pin_state(pin, at), 12);
    assert_int_equal(at[MANY - 1], KVBM_MISS);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, MANY, &pin),
                     0); /* no room: 12 are held */
    assert_int_equal(kvbm_pin_state(pin, at), 12);
    assert_int_equal(at[12], KVBM_BUSY);
    kvbm_pin_release(pin);
    assert_int_equal(world_load(&w, 1, 12), 12);
    world_fini(&w);
    free(keys);
    free(at);
}

/* ---- the same thing twice ---- */

/* A key twice in a store, which is at two places then: whatever of it is kept is whole, and no
 * block is lost. */
static void test_key_twice_in_a_store(void **state)
{
    const uint64_t keys[4] = {100, 101, 102, 101};
    const uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct world w;
    uint8_t ok = 0;

    (void)state;
    for (int below = 0; below < 2; below++) {
        world_init(&w, below ? 0 : 12);
        disk_of(&w, 20);
        world_start(&w);
        world_attach(&w, false);
        for (uint32_t i = 0; i < 4; i++)
            world_fill(&w, i, i == 3 ? 55555 : keys[i]);
        assert_true(kvbm_manager_prepare_store(w.m, &chain, 4, &pin) >= 3);
        assert_in_range(ended(&w, submit(&w, pin, blocks, &ok, -1)).n_ok, 3, 4);
        kvbm_pin_release(pin);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        assert_true(world_where(&w, 101, 0) == (below ? KVBM_ON_DISK : KVBM_READY));
        world_wipe(&w);
        assert_true(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &pin) >= 0);
        ended(&w, submit(&w, pin, blocks, &ok, -1));
        kvbm_pin_release(pin);
        for (uint32_t i = 0; i < 4; i++) {
            bool whole = world_holds(&w, i, keys[i]) || (i % 2 && world_holds(&w, i, 55555));

            assert_true(ok >> i & 1 ? whole : world_holds(&w, i, ~UINT64_C(0)));
        }
        assert_int_equal(ok & (below ? 1 : 7),
                         below ? 1 : 7); /* what contradicts itself may be lost, the rest isn't */
        if (!below)                      /* nothing of it is held */
            assert_int_equal(kvbm_pool_reset(kvbm_manager_pool(w.m, KV_TIER_HOST)), 0);
        world_fini(&w);
    }
}

/* Blocks that a tier below has need no store: pin and job report them as there, also without a host
 * tier. */
static void test_stored_already(void **state)
{
    const uint32_t blocks[4] = {0, 1, 2, 3};
    uint64_t keys[4];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    world_keys(100, keys, 4);
    for (int below = 0; below < 2; below++) {
        uint8_t at[4], ok = 0;

        world_init(&w, below ? 0 : 12);
        disk_of(&w, 20);
        world_start(&w);
        world_attach(&w, false);
        assert_int_equal(world_store(&w, 100, 3), 3);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 1);
        assert_int_equal(kvbm_pin_state(pin, at), 3);
        assert_int_equal(at[3], KVBM_PENDING);
        assert_int_equal(ended(&w, submit(&w, pin, blocks, &ok, -1)).n_ok, 1);
        assert_int_equal(ok, 0xf);
        kvbm_pin_release(pin);
        world_fini(&w);
    }
}

/* A block twice: as a source it is read twice, as a target it is refused, and nothing is
 * written. */
static void test_block_twice_in_a_job(void **state)
{
    const uint32_t twice[4] = {5, 6, 5, 7};
    uint64_t keys[4];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct kvbm_done done;
    struct world w;
    uint8_t ok = 0xff;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 4);
    for (uint32_t i = 0; i < 4; i++)
        world_fill(&w, twice[i], 100 + twice[i]);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 4);
    assert_int_equal(ended(&w, submit(&w, pin, twice, NULL, -1)).n_ok, 4);
    kvbm_pin_release(pin);
    world_wipe(&w);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &pin), 4);
    done = ended(&w, submit(&w, pin, twice, &ok, -1));
    assert_int_equal(done.status, -EINVAL);
    assert_int_equal(done.n_ok, 0);
    assert_int_equal(ok & 0xf, 0);
    for (uint32_t i = 0; i < CACHE_BLOCKS; i++)
        assert_true(world_holds(&w, i, ~UINT64_C(0)));
    assert_int_equal(
        ended(&w, submit(&w, pin, (uint32_t[]){0, 1, 2, CACHE_BLOCKS}, &ok, -1)).status, -EINVAL);
    assert_int_equal(ended(&w, submit(&w, pin, (uint32_t[]){0, 1, 2, 3}, &ok, -1)).n_ok, 4);
    kvbm_pin_release(pin);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(world_holds(&w, i, 100 + twice[i]));
    world_fini(&w);
}

struct rival {
    struct world *w;
    struct kvbm_layout *layout;
    struct kvbm_cache *cache;
    uint32_t base;
    uint64_t mark;
};

static void *store_often(void *arg)
{
    struct rival *rival = arg;

    for (uint64_t first = 1000; first < 1300; first += 4) {
        uint64_t keys[4];
        uint32_t blocks[4];
        struct kvbm_chain chain = world_chain(keys);
        struct kvbm_pin *pin;

        world_keys(first, keys, 4);
        for (uint32_t i = 0; i < 4; i++) {
            blocks[i] = rival->base + i;
            world_fill(rival->w, blocks[i], keys[i] + rival->mark);
        }
        assert_true(kvbm_manager_prepare_store(rival->w->m, &chain, 4, &pin) >= 0);
        ended(rival->w, submit(rival->w, pin, blocks, NULL, -1));
        kvbm_pin_release(pin);
    }
    return NULL;
}

/* Two threads store other bytes for the same keys at a time: each block is one's or the other's,
 * never of both. */
static void test_rivals(void **state)
{
    struct world w;
    struct rival rivals[2] = {{.w = &w, .base = 0}, {.w = &w, .base = 8, .mark = 1u << 20}};
    pthread_t thread[2];
    uint32_t found = 0;

    (void)state;
    world_init(&w, 320);
    world_start(&w);
    world_attach(&w, false);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, store_often, &rivals[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    for (uint64_t first = 1000; first < 1300; first += 4) {
        uint64_t keys[4];
        const uint32_t blocks[4] = {0, 1, 2, 3};
        struct kvbm_chain chain = world_chain(keys);
        struct kvbm_pin *pin;
        uint8_t ok = 0;

        world_keys(first, keys, 4);
        world_wipe(&w);
        assert_true(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &pin) >= 0);
        ended(&w, submit(&w, pin, blocks, &ok, -1));
        kvbm_pin_release(pin);
        for (uint32_t i = 0; i < 4; i++) {
            found += ok >> i & 1;
            assert_true(world_holds(&w, i, ok >> i & 1 ? keys[i] : ~UINT64_C(0)) ||
                        world_holds(&w, i, keys[i] + rivals[1].mark));
        }
    }
    assert_int_equal(found, 300);
    world_fini(&w);
}

/* As many jobs as were asked for, waiting, running or not told of yet; whoever has more is to come
 * again. */
static void test_too_many_jobs(void **state)
{
    uint64_t keys[3];
    const uint32_t blocks[3] = {0, 1, 2};
    int gate = eventfd(0, EFD_CLOEXEC);
    struct kvbm_pin *pins[3];
    struct kvbm_done done[3];
    struct world w;
    int64_t ids[2];

    (void)state;
    world_init(&w, 12);
    w.opts.max_jobs = 2;
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 3);
    for (uint32_t i = 0; i < 3; i++) {
        const struct kvbm_chain chain = world_chain(&keys[i]);

        world_fill(&w, i, keys[i]);
        assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &pins[i]), 1);
    }
    for (uint32_t i = 0; i < 2; i++)
        assert_true((ids[i] = submit(&w, pins[i], &blocks[i], NULL, gate)) > 0);
    assert_int_equal(submit(&w, pins[2], &blocks[2], NULL, -1), -EAGAIN);
    assert_int_equal(eventfd_write(gate, 1), 0);
    assert_int_equal(ended(&w, ids[0]).n_ok, 1);
    wait_until(world_where(&w, keys[1], 0) == KVBM_READY);
    assert_int_equal(ended(&w, submit(&w, pins[2], &blocks[2], NULL, -1)).n_ok, 1);
    assert_int_equal(kvbm_manager_poll(w.m, done, 3), 1);
    assert_int_equal(done[0].id, ids[1]);
    for (uint32_t i = 0; i < 3; i++) {
        kvbm_pin_release(pins[i]);
        assert_int_equal(world_load(&w, keys[i], 1), 1);
    }
    close(gate);
    world_fini(&w);
}

/* Six jobs that become ready at once: the order in which they are copied. */
static void order_of_six(struct world *w, const int32_t *priorities, uint64_t first,
                         uint32_t *order)
{
    int gate = eventfd(0, EFD_CLOEXEC);
    const uint32_t block = 0;
    struct kvbm_done done[6];

    for (uint32_t i = 0; i < 6; i++) {
        const uint64_t key = first + i;
        const struct kvbm_chain chain = world_chain(&key);
        struct kvbm_job job = {.size = sizeof(job),
                               .cache = w->cache,
                               .blocks = &block,
                               .priority = priorities[i],
                               .ready_fd = gate,
                               .tag = i};

        assert_int_equal(kvbm_manager_prepare_store(w->m, &chain, 1, &job.pin), 1);
        assert_true(kvbm_manager_submit(w->m, &job) > 0);
        kvbm_pin_release(job.pin);
    }
    assert_int_equal(eventfd_write(gate, 1), 0);
    for (uint32_t n = 0; n < 6;) {
        long some = kvbm_manager_poll(w->m, &done[n], 6 - n);

        assert_true(some >= 0);
        for (; some > 0; some--, n++)
            order[n] = (uint32_t)done[n].tag;
        usleep(1000);
    }
    close(gate);
}

/* Higher priorities first, the older first among equals. The kernel may tell of some descriptors a
 * moment before others, so that one round in very many has another order. */
static void test_order_of_jobs(void **state)
{
    static const int32_t priorities[6] = {1, 5, -2, 1, 5, 0};
    static const uint32_t want[6] = {1, 4, 0, 3, 5, 2};
    uint32_t order[6], right = 0;
    struct world w;

    (void)state;
    world_init(&w, 12);
    w.opts.copy_threads = 1;
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t round = 0; round < 10; round++) {
        order_of_six(&w, priorities, 100 * (round + 1), order);
        right += memcmp(order, want, sizeof(want)) == 0;
    }
    assert_in_range(right, 5, 10);
    world_fini(&w);
}

/* With no_fetch a pin gets the host tier's blocks at once, and no tier is read. */
static void test_no_fetch(void **state)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .no_fetch = true};
    uint64_t keys[6];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;
    struct world w;

    (void)state;
    world_init(&w, 12);
    disk_of(&w, 20);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 6);
    assert_int_equal(world_store(&w, 100, 6), 6);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    assert_int_equal(
        kvbm_pool_reset_keys(kvbm_manager_pool(w.m, KV_TIER_HOST), 0, keys + 4, 2, NULL), 0);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 6, &opts, &pin), 4);
    assert_int_equal(kvbm_pin_wait(pin, 0), 0);
    assert_int_equal(kvbm_pin_state(pin, NULL), 4);
    kvbm_pin_release(pin);
    assert_int_equal(world_stats(&w).disk.blocks_out, 0);
    assert_int_equal(world_load(&w, 100, 6), 6);
    world_fini(&w);
}

/* ---- at the wrong time ---- */

static void test_while_jobs_run(void **state)
{
    uint64_t keys[4];
    const uint32_t blocks[4] = {0, 1, 2, 3};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin, *again;
    int gate = eventfd(0, EFD_CLOEXEC);
    struct world w;
    int64_t id;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_keys(100, keys, 4);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &pin), 4);
    for (uint32_t i = 0; i < 4; i++)
        world_fill(&w, i, keys[i]);
    id = submit(&w, pin, blocks, NULL, gate);
    assert_true(id > 0);
    assert_int_equal(kvbm_cache_detach(w.cache), -EBUSY);
    assert_int_equal(submit(&w, pin, blocks, NULL, -1), -EBUSY);
    assert_int_equal(kvbm_pin_commit(pin, NULL), -EBUSY);
    assert_int_equal(kvbm_manager_destroy(w.m, 0), -EBUSY);
    kvbm_pin_release(pin); /* the job goes on */
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 4, &again), 0);
    kvbm_pin_release(again);
    assert_int_equal(world_where(&w, 100, 3), KVBM_PENDING);
    assert_int_equal(eventfd_write(gate, 1), 0);
    assert_int_equal(ended(&w, id).n_ok, 4);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)id, 0, NULL), -ENOENT); /* told of once */
    assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)id), -ENOENT);
    assert_int_equal(world_load(&w, 100, 4), 4);
    close(gate);
    world_fini(&w);
}

/* Descriptors that aren't any, or that can't be waited for. */
static void test_ready_descriptors(void **state)
{
    const uint32_t block = 0;
    uint64_t key = 100;
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_pin *pin;
    struct world w;
    int fd;

    (void)state;
    world_init(&w, 12);
    world_start(&w);
    world_attach(&w, false);
    world_fill(&w, 0, key);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &pin), 1);
    fd = eventfd(0, EFD_CLOEXEC);
    close(fd);
    assert_int_equal(ended(&w, submit(&w, pin, &block, NULL, fd)).status, -EBADF);
    assert_int_equal(kvbm_pin_commit(pin, NULL), 0); /* its blocks were given back */
    kvbm_pin_release(pin);
    assert_int_equal(world_where(&w, key, 0), KVBM_MISS);
    assert_int_equal(kvbm_manager_prepare_store(w.m, &chain, 1, &pin), 1);
    fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_int_equal(ended(&w, submit(&w, pin, &block, NULL, fd)).n_ok, 1);
    close(fd);
    kvbm_pin_release(pin);
    assert_int_equal(world_load(&w, key, 1), 1);
    world_fini(&w);
}

/* A deadline holds for a job, too, that the copier has no room for: it isn't there to watch it. */
static void test_deadline_without_room(void **state)
{
    uint64_t key = 500, *keys = malloc(MAX_PIN * sizeof(*keys));
    uint32_t *blocks = malloc(MAX_PIN * sizeof(*blocks));
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_cache_opts opts = {.size = sizeof(opts)};
    struct kvbm_chain chain = world_chain(keys), one = world_chain(&key);
    struct kvbm_job job = {.size = sizeof(job)};
    int gate = eventfd(0, EFD_CLOEXEC);
    struct kvbm_layout *layout;
    struct kvbm_pin *large, *small;
    struct kvbm_done done;
    int64_t first, late;
    struct world w;

    (void)state;
    assert_true(keys && blocks);
    world_init(&w, 8);
    w.block.num_layers = w.block.outer_dim = w.block.page_size = w.block.num_heads = 1;
    w.block.inner_dim = 32;
    w.block.num_blocks = MAX_PIN;
    assert_int_equal(kvbm_layout_allocate(&w.block, &allocator, &layout), 0);
    world_start(&w);
    opts.layout = layout;
    assert_int_equal(kvbm_cache_attach(w.m, &opts, &w.cache), 0);
    for (uint32_t i = 0; i < MAX_PIN; i++) {
        keys[i] = key;
        blocks[i] = i;
    }
    assert_int_equal(kvbm_manager_prepare_store(w.m, &one, 1, &small), 1);
    ended(&w, submit(&w, small, blocks, NULL, -1));
    kvbm_pin_release(small);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, MAX_PIN, NULL, &large), MAX_PIN);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &one, 1, NULL, &small), 1);
    first = submit(&w, large, blocks, NULL, gate); /* as many blocks as the copier takes */
    job = (struct kvbm_job){.size = sizeof(job),
                            .pin = small,
                            .cache = w.cache,
                            .blocks = blocks,
                            .deadline_ns = kv_now_ns() + 50 * KV_NS_PER_MS};
    late = kvbm_manager_submit(w.m, &job);
    assert_true(first > 0 && late > 0);
    assert_int_equal(kvbm_manager_wait(w.m, (uint64_t)late, 5000, &done), 0);
    assert_int_equal(done.status, -ETIMEDOUT);
    kvbm_pin_release(large);
    kvbm_pin_release(small);
    assert_int_equal(kvbm_manager_cancel(w.m, (uint64_t)first), 0);
    assert_int_equal(ended(&w, first).status, -ECANCELED);
    close(gate);
    world_fini(&w);
    kvbm_layout_destroy(layout);
    free(blocks);
    free(keys);
}

/* ---- the smallest of everything ---- */

static void smallest(uint32_t host, uint32_t staging, uint32_t disk, uint32_t object)
{
    struct world w;

    world_init(&w, host);
    w.opts.staging_blocks = staging;
    if (disk)
        disk_of(&w, disk);
    w.opts.object = object ? w.object : NULL;
    w.opts.object_blocks = object;
    w.opts.disk_volatile = true;
    w.opts.max_offload = w.opts.max_jobs = w.opts.copy_threads = w.opts.io_depth = 1;
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t first = 1000; first < 1008; first++) {
        assert_int_equal(world_store(&w, first, 1), 1);
        assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
        assert_int_equal(world_load(&w, first, 1), 1);
    }
    for (uint64_t first = 1000; first < 1008; first++) {
        long found = world_load(&w, first, 1);

        assert_true(found == 1 || (!object && found == 0));
        assert_int_equal(kvbm_manager_drain(w.m, 30000),
                         0); /* what goes down holds the only block */
    }
    world_store(&w, 5000, 20); /* more than there is room for */
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    world_load(&w, 5000, 20);
    world_fini(&w);
}

static void test_smallest(void **state)
{
    (void)state;
    smallest(1, 0, 0, 0);
    smallest(1, 0, 1, 0);
    smallest(1, 0, 1, 1);
    smallest(1, 0, 0, 1);
    smallest(0, 1, 1, 0);
    smallest(0, 1, 0, 1);
    smallest(0, 1, 1, 1);
}

/* ---- directories ---- */

static void test_directories(void **state)
{
    char twice[400], other[200], path[240];
    struct kvbm_manager *second = NULL;
    struct world w;
    FILE *file;

    (void)state;
    world_init(&w, 12);
    disk_of(&w, 20);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 4), 4);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    snprintf(other, sizeof(other), "%s/../%s/.", w.dir, strrchr(w.dir, '/') + 1);
    w.opts.disk = other; /* the same by another name */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    w.opts.disk = w.disk;
    world_stop(&w);

    snprintf(twice, sizeof(twice), "%s:%s", w.dir, other); /* two volumes that are one */
    w.opts.disk = twice;
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EBUSY);
    assert_null(second);
    w.opts.disk = ":"; /* none */
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -EINVAL);
    snprintf(path, sizeof(path), "%s/file", w.dir);
    file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    w.opts.disk = path;
    assert_int_equal(kvbm_manager_create(&w.opts, &second), -ENOTDIR);
    w.opts.disk = "/proc/self";
    assert_true(kvbm_manager_create(&w.opts, &second) < 0);
    w.opts.disk = w.disk; /* none of these cost a block */
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_load(&w, 100, 4), 4);
    world_fini(&w);
}

/* Two managers with an object store in common: what one puts, the other finds. */
static void test_shared_object_store(void **state)
{
    struct world a, b;

    (void)state;
    world_init(&a, 12);
    world_init(&b, 12);
    a.opts.object = b.opts.object = a.object;
    world_start(&a);
    world_start(&b);
    world_attach(&a, false);
    world_attach(&b, false);
    assert_int_equal(world_store(&a, 100, 6), 6);
    assert_int_equal(kvbm_manager_drain(a.m, 30000), 0);
    assert_int_equal(world_load(&b, 100, 6), 6);
    assert_int_equal(world_store(&b, 100, 8), 2);
    assert_int_equal(kvbm_manager_drain(b.m, 30000), 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(a.m, KV_TIER_HOST));
    assert_int_equal(world_load(&a, 100, 8), 8);
    world_fini(&b);
    world_fini(&a);
}

/* ---- children ---- */

static bool child_is_refused(struct world *w, struct kvbm_pin *pin, struct kvbm_immutable *block)
{
    uint64_t key = 100;
    uint32_t number = 0;
    struct kvbm_chain chain = world_chain(&key);
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};
    struct kvbm_job job = {.size = sizeof(job), .pin = pin, .cache = w->cache, .blocks = &number};
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = w->layout};
    struct kvbm_pin *none;
    struct kvbm_cache *cache;
    struct kvbm_immutable ret;
    struct kvbm_done done;
    char text[100];
    const long told[] = {kvbm_manager_lookup(w->m, &chain, 1, NULL),
                         kvbm_manager_touch(w->m, 0, &key, 1),
                         kvbm_manager_prepare_load(w->m, &chain, 1, NULL, &none),
                         kvbm_manager_prepare_load_blocks(w->m, block, 1, NULL, &none),
                         kvbm_manager_prepare_store(w->m, &chain, 1, &none),
                         kvbm_pin_state(pin, NULL),
                         kvbm_pin_blocks(pin, &number),
                         kvbm_pin_wait(pin, 1000),
                         kvbm_pin_commit(pin, NULL),
                         (long)kvbm_manager_submit(w->m, &job),
                         kvbm_manager_cancel(w->m, 1),
                         kvbm_manager_poll(w->m, &done, 1),
                         kvbm_manager_fd(w->m),
                         kvbm_manager_wait(w->m, 1, 1000, &done),
                         kvbm_cache_attach(w->m, &opts, &cache),
                         kvbm_cache_detach(w->cache),
                         kvbm_manager_offload(w->cache, block, 1, 0),
                         kvbm_manager_onboard(w->cache, &chain, 1, 1000, &ret),
                         kvbm_manager_onboard_blocks(w->cache, block, 1, 1000, &ret),
                         kvbm_manager_drain(w->m, 1000),
                         kvbm_manager_get_stats(w->m, &stats),
                         kvbm_manager_metrics(w->m, text, sizeof(text))};

    kvbm_pin_release(pin);
    for (size_t i = 0; i < sizeof(told) / sizeof(told[0]); i++) {
        if (told[i] != -ECHILD)
            return false;
    }
    return kvbm_manager_destroy(w->m, 1000) == 0;
}

struct busy {
    struct world *w;
    _Atomic bool stop;
};

static void *look_all_the_time(void *arg)
{
    struct busy *busy = arg;
    uint64_t keys[8];
    struct kvbm_chain chain = world_chain(keys);

    world_keys(100, keys, 8);
    while (!atomic_load(&busy->stop))
        kvbm_manager_lookup(busy->w->m, &chain, 8, NULL);
    return NULL;
}

/* At whatever moment the fork comes, with the lock held by another thread too: a child's calls
 * return. */
static void test_children(void **state)
{
    uint64_t keys[4];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_immutable held;
    struct busy busy = {0};
    struct kvbm_pin *pin;
    pthread_t thread;
    struct world w;

    (void)state;
    world_init(&w, 12);
    disk_of(&w, 20);
    world_start(&w);
    world_attach(&w, true);
    world_keys(100, keys, 4);
    assert_int_equal(world_store(&w, 100, 4), 4);
    assert_int_equal(kvbm_manager_prepare_load(w.m, &chain, 4, NULL, &pin), 4);
    assert_int_equal(kvbm_pool_match(kvbm_manager_pool(w.m, KV_TIER_HOST), 0, keys, 1, 0, &held),
                     1);
    busy.w = &w;
    assert_int_equal(pthread_create(&thread, NULL, look_all_the_time, &busy), 0);
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        int status;

        if (child == 0) {
            alarm(20);
            _exit(child_is_refused(&w, pin, &held) ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
    atomic_store(&busy.stop, true);
    pthread_join(thread, NULL);
    kvbm_immutable_release(&held);
    kvbm_pin_release(pin);
    assert_int_equal(world_load(&w, 100, 4), 4);
    world_fini(&w);
}

/* Directories are free again once their manager is gone, whatever children of its process go on. */
static void test_child_that_stays(void **state)
{
    struct world w;
    pid_t child;
    int status;

    (void)state;
    world_init(&w, 12);
    disk_of(&w, 20);
    world_start(&w);
    world_attach(&w, false);
    assert_int_equal(world_store(&w, 100, 4), 4);
    assert_int_equal(kvbm_manager_drain(w.m, 30000), 0);
    child = fork();
    if (child == 0) {
        alarm(60);
        pause();
        _exit(0);
    }
    world_stop(&w);
    world_start(&w); /* or -EBUSY */
    world_attach(&w, false);
    assert_int_equal(world_load(&w, 100, 4), 4);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    world_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long_fingerprints),
        cmocka_unit_test(test_long_keys),
        cmocka_unit_test(test_no_keys_and_all),
        cmocka_unit_test(test_key_twice_in_a_store),
        cmocka_unit_test(test_stored_already),
        cmocka_unit_test(test_block_twice_in_a_job),
        cmocka_unit_test(test_rivals),
        cmocka_unit_test(test_too_many_jobs),
        cmocka_unit_test(test_order_of_jobs),
        cmocka_unit_test(test_no_fetch),
        cmocka_unit_test(test_while_jobs_run),
        cmocka_unit_test(test_ready_descriptors),
        cmocka_unit_test(test_deadline_without_room),
        cmocka_unit_test(test_smallest),
        cmocka_unit_test(test_directories),
        cmocka_unit_test(test_shared_object_store),
        cmocka_unit_test(test_children),
        cmocka_unit_test(test_child_that_stays),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
