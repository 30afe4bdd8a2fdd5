// SPDX-License-Identifier: Apache-2.0
/* Four threads make every call of a manager, in random order, on the same few keys. The tiers have
 * few blocks, and the object store is slow, hangs, fails and lies. Blocks reported present have
 * their bytes, held blocks don't change, each job ends once, and in the end no block is held. From
 * time to time a new manager opens the same disk. */
#define CACHE_BLOCKS 256u
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "index/random.h"
#include "tier/kitchen.h"

#define THREADS 4u
#define PINS 4u
#define JOBS 8u
#define LENGTH 6u
#define CHAINS 14u

/* Keys [from, from + n) of a sequence. */
struct some {
    uint64_t keys[LENGTH + 1]; /* the parent's first */
    uint32_t n;
    struct kvbm_chain chain;
};

struct job {
    _Atomic uint64_t tag; /* 0: none; of the one that hasn't been told of */
    int64_t id;
    struct some what;
    bool store;
    uint32_t base;
    uint8_t ok;
};

struct held {
    struct kvbm_pin *pin;
    struct some what;
    bool store, jobs; /* jobs: some were submitted */
};

struct thread {
    struct party *party;
    uint32_t number;
    struct rng random;
    pthread_t thread;
    struct held pins[PINS];
    struct job jobs[JOBS];
    uint64_t next_tag;
};

struct party {
    struct world w; /* its cache has a pool */
    struct kvbm_layout *layout;
    struct kvbm_cache *cache; /* the jobs': numbered by us */
    struct thread threads[THREADS];
    _Atomic uint64_t loaded, held, wrong, ended_twice;
};

static uint32_t pick(struct thread *t, uint32_t n)
{
    return rng_below(&t->random, n);
}

static struct kvbm_manager *manager(const struct thread *t)
{
    return t->party->w.m;
}

static void choose(struct thread *t, struct some *ret)
{
    uint64_t first = (1 + pick(t, CHAINS)) * UINT64_C(1000);
    uint32_t from = pick(t, 3) ? 0 : pick(t, LENGTH);

    ret->n = 1 + pick(t, LENGTH - from);
    for (uint32_t i = 0; i <= ret->n; i++)
        ret->keys[i] = first + from + i - 1;
    ret->chain = (struct kvbm_chain){.size = sizeof(ret->chain),
                                     .keys = ret->keys + 1,
                                     .parent = from ? ret->keys : NULL,
                                     .position = from};
}

static uint64_t some_deadline(struct thread *t)
{
    uint64_t now = kv_now_ns();

    switch (pick(t, 5)) {
    case 0:
        return 1;
    case 1:
        return now + pick(t, 500) * UINT64_C(1000);
    case 2:
        return now + pick(t, 30) * KV_NS_PER_MS;
    default:
        return 0;
    }
}

static bool bytes_of(const struct kvbm_layout *layout, uint32_t block, uint64_t key, bool write)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            uint16_t *at = world_region(layout, block, layer, outer);

            for (uint32_t i = 0; i < PAGE * HEADS * HEAD_DIM; i++) {
                if (write)
                    at[i] = world_element(key, layer, outer, i);
                else if (at[i] != world_element(key, layer, outer, i))
                    return false;
            }
        }
    }
    return true;
}

/* ---- pins ---- */

static void do_prepare(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];
    struct kvbm_pin_opts opts = {
        .size = sizeof(opts), .deadline_ns = some_deadline(t), .no_fetch = pick(t, 10) == 0};
    struct some what;
    long rc;

    if (held->pin)
        return;
    choose(t, &what);
    held->what = what;
    held->what.chain.keys = held->what.keys + 1;
    held->store = pick(t, 5) < 2;
    held->jobs = false;
    rc = held->store
             ? kvbm_manager_prepare_store(manager(t), &what.chain, what.n, &held->pin)
             : kvbm_manager_prepare_load(manager(t), &what.chain, what.n, &opts, &held->pin);
    assert_true(rc >= 0);
}

/* Of blocks that we hold by handles, from any pool. */
static void do_prepare_blocks(struct thread *t)
{
    static const enum kv_tier tiers[] = {KV_TIER_HOST, KV_TIER_DISK, KV_TIER_EXTERNAL};
    struct held *held = &t->pins[pick(t, PINS)];
    struct kvbm_pool *pool = kvbm_manager_pool(manager(t), tiers[pick(t, 3)]);
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = some_deadline(t)};
    struct kvbm_immutable blocks[LENGTH];
    long n;

    if (held->pin || !pool)
        return;
    choose(t, &held->what);
    n = kvbm_pool_match(pool, 0, held->what.chain.keys, held->what.n, 0, blocks);
    assert_true(n >= 0);
    if (n == 0)
        return;
    held->what.n = (uint32_t)n;
    held->store = held->jobs = false;
    assert_true(
        kvbm_manager_prepare_load_blocks(manager(t), blocks, (size_t)n, &opts, &held->pin) >= 0);
    assert_int_equal(kvbm_pool_release(pool, blocks, (size_t)n), 0);
}

/* READY blocks have the right bytes, and keep them. */
static void do_look_at_pin(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];
    uint32_t blocks[LENGTH];
    uint8_t at[LENGTH];
    long ready;

    if (!held->pin)
        return;
    ready = kvbm_pin_state(held->pin, at);
    assert_in_range(ready, 0, held->what.n);
    assert_true(kvbm_pin_blocks(held->pin, blocks) >= 0);
    for (uint32_t i = 0; !held->store && i < held->what.n; i++) {
        if (at[i] == KVBM_READY) {
            t->party->held++;
            t->party->wrong +=
                blocks[i] == UINT32_MAX || !bytes_of(kvbm_manager_host_layout(manager(t)),
                                                     blocks[i], held->what.keys[i + 1], false);
        }
    }
}

static void do_wait_for_pin(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];

    if (held->pin && !held->store)
        kvbm_pin_wait(held->pin, pick(t, 6));
}

/* As an engine does that copies itself; some of the blocks it gives back. */
static void do_commit(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];
    uint32_t blocks[LENGTH];
    uint8_t ok = 0;

    if (!held->pin || !held->store || held->jobs)
        return;
    assert_true(kvbm_pin_blocks(held->pin, blocks) >= 0);
    for (uint32_t i = 0; i < held->what.n; i++) {
        if (blocks[i] == UINT32_MAX || pick(t, 4) == 0)
            continue;
        bytes_of(kvbm_manager_host_layout(manager(t)), blocks[i], held->what.keys[i + 1], true);
        ok |= (uint8_t)(1u << i);
    }
    assert_true(kvbm_pin_commit(held->pin, &ok) >= 0);
}

static void do_release(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];

    kvbm_pin_release(held->pin);
    held->pin = NULL;
}

/* ---- jobs ---- */

static void job_ended(struct party *party, uint64_t tag, const struct kvbm_done *done)
{
    struct job *job = &party->threads[tag >> 8 & 0xff].jobs[tag & 0xff];
    uint32_t there = 0;

    if (atomic_load(&job->tag) != tag) {
        party->ended_twice++;
        return;
    }
    for (uint32_t i = 0; i < LENGTH; i++) {
        if (!(job->ok >> i & 1))
            continue;
        there++;
        party->wrong += i >= job->what.n ||
                        !bytes_of(party->layout, job->base + i, job->what.keys[i + 1], false);
    }
    party->wrong += !job->store && there != done->n_ok;
    party->loaded += job->store ? 0 : there;
    atomic_store(&job->tag, 0);
}

static void do_submit(struct thread *t)
{
    struct held *held = &t->pins[pick(t, PINS)];
    struct job *job = &t->jobs[pick(t, JOBS)];
    uint32_t blocks[LENGTH];
    struct kvbm_job opts = {.size = sizeof(opts),
                            .pin = held->pin,
                            .cache = t->party->cache,
                            .blocks = blocks,
                            .ok = &job->ok,
                            .priority = (int32_t)pick(t, 3),
                            .deadline_ns = some_deadline(t)};
    int64_t id;

    if (!held->pin || atomic_load(&job->tag))
        return;
    job->what = held->what;
    job->store = held->store;
    job->ok = 0;
    for (uint32_t i = 0; i < job->what.n; i++) {
        blocks[i] = job->base + i;
        bytes_of(t->party->layout, blocks[i], job->store ? job->what.keys[i + 1] : 0, true);
    }
    opts.tag = ++t->next_tag << 16 | t->number << 8 | (uint32_t)(job - t->jobs);
    atomic_store(&job->tag, opts.tag);
    id = kvbm_manager_submit(manager(t), &opts);
    assert_true(id > 0 || id == -EAGAIN || (job->store && held->jobs && id == -EBUSY));
    if (id > 0) {
        job->id = id;
        held->jobs = true;
    } else {
        atomic_store(&job->tag, 0);
    }
}

static void do_cancel(struct thread *t)
{
    struct job *job = &t->jobs[pick(t, JOBS)];

    if (job->id)
        kvbm_manager_cancel(manager(t), (uint64_t)job->id);
}

static void do_wait(struct thread *t)
{
    struct job *job = &t->jobs[pick(t, JOBS)];
    struct kvbm_done done;

    if (job->id && kvbm_manager_wait(manager(t), (uint64_t)job->id, pick(t, 4), &done) == 0)
        job_ended(t->party, done.tag, &done);
}

/* Anybody's. */
static void do_poll(struct thread *t)
{
    struct kvbm_done done[8];
    long n = kvbm_manager_poll(manager(t), done, 1 + pick(t, KV_COUNT(done)));

    assert_true(n >= 0);
    for (long i = 0; i < n; i++)
        job_ended(t->party, done[i].tag, &done[i]);
}

/* ---- a cache with a pool ---- */

static void do_offload(struct thread *t)
{
    struct world *w = &t->party->w;
    struct kvbm_mutable blocks[LENGTH];
    struct kvbm_complete complete[LENGTH];
    struct kvbm_immutable registered[LENGTH];
    struct some what;

    choose(t, &what);
    if (kvbm_pool_allocate(w->pool, what.n, blocks, NULL) < 0)
        return;
    for (uint32_t i = 0; i < what.n; i++)
        bytes_of(w->layout, blocks[i].handle.block, what.keys[i + 1], true);
    assert_int_equal(kvbm_pool_complete(w->pool, blocks, what.n, &what.chain, complete), 0);
    assert_int_equal(kvbm_pool_register(w->pool, complete, what.n, registered), 0);
    assert_true(kvbm_manager_offload(w->cache, registered, what.n, (int32_t)pick(t, 3)) >= 0);
    kvbm_pool_release(w->pool, registered, what.n);
}

static void do_onboard(struct thread *t)
{
    struct world *w = &t->party->w;
    struct kvbm_immutable blocks[LENGTH];
    struct kvbm_block_info info = {.size = sizeof(info)};
    struct some what;
    long n;

    choose(t, &what);
    n = kvbm_manager_onboard(w->cache, &what.chain, what.n, pick(t, 20), blocks);
    for (long i = 0; i < n; i++) {
        assert_int_equal(kvbm_immutable_info(&blocks[i], &info), 0);
        t->party->wrong += !bytes_of(w->layout, info.block, what.keys[i + 1], false);
    }
    if (n > 0)
        kvbm_pool_release(w->pool, blocks, (size_t)n);
}

/* ---- the rest ---- */

static void do_look(struct thread *t)
{
    struct some what;
    uint8_t at[LENGTH];

    choose(t, &what);
    assert_in_range(kvbm_manager_lookup(manager(t), &what.chain, what.n, at), 0, what.n);
    if (pick(t, 2))
        assert_in_range(kvbm_manager_touch(manager(t), 0, what.chain.keys, what.n), 0, what.n);
}

static void do_forget(struct thread *t)
{
    static const enum kv_tier tiers[] = {KV_TIER_HOST, KV_TIER_DISK, KV_TIER_EXTERNAL};
    struct kvbm_pool *pool = kvbm_manager_pool(manager(t), tiers[pick(t, 3)]);
    struct some what;

    if (!pool || pick(t, 4))
        return;
    choose(t, &what);
    switch (pick(t, 3)) {
    case 0:
        kvbm_pool_reset_keys(pool, 0, what.chain.keys, what.n, NULL);
        break;
    case 1:
        kvbm_pool_retain(pool, 0, what.chain.keys, what.n, pick(t, KVBM_PRIORITY_MAX), pick(t, 9));
        break;
    default:
        if (pick(t, 8) == 0)
            kvbm_pool_reset_inactive(pool);
    }
}

static void do_rest(struct thread *t)
{
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = t->party->layout};
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};
    struct kvbm_cache *cache;
    char text[400];

    switch (pick(t, 6)) {
    case 0:
        assert_true(kvbm_manager_metrics(manager(t), text, sizeof(text)) > 0);
        break;
    case 1:
        kvbm_manager_drain(manager(t), pick(t, 3));
        break;
    case 2:
        assert_int_equal(kvbm_cache_attach(manager(t), &opts, &cache), 0);
        assert_int_equal(kvbm_cache_detach(cache), 0);
        break;
    case 3:
        assert_int_equal(kvbm_manager_destroy(manager(t), 0), -EBUSY); /* there is a pool of ours */
        break;
    case 4:
        shaky->delay_us = (int)pick(t, 3) * 2000;
        shaky->hang = pick(t, 8) == 0;
        shaky->hang_puts = pick(t, 8) == 0;
        shaky->fail_rc = pick(t, 40) ? 0 : -EIO;
        shaky->lie = (int)KV_MIN(pick(t, 12), 3u);
        break;
    default:
        assert_int_equal(kvbm_manager_get_stats(manager(t), &stats), 0);
        assert_true(stats.pins_now < 10000);
    }
}

static void *work(void *arg)
{
    static void (*const calls[])(struct thread *) = {
        do_prepare,      do_prepare, do_prepare, do_prepare_blocks, do_look_at_pin,
        do_wait_for_pin, do_commit,  do_release, do_submit,         do_submit,
        do_submit,       do_cancel,  do_wait,    do_poll,           do_poll,
        do_offload,      do_onboard, do_look,    do_forget,         do_rest};
    struct thread *t = arg;

    for (long i = test_rounds(6000); i > 0; i--)
        calls[pick(t, KV_COUNT(calls))](t);
    for (uint32_t i = 0; i < PINS; i++) {
        kvbm_pin_release(t->pins[i].pin);
        t->pins[i].pin = NULL;
    }
    return NULL;
}

/* ---- a party ---- */

static void wait_for_jobs(struct party *party)
{
    uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S;

    for (uint32_t i = 0; i < THREADS; i++) {
        for (uint32_t k = 0; k < JOBS; k++) {
            while (atomic_load(&party->threads[i].jobs[k].tag)) {
                assert_true(kv_now_ns() < until);
                do_poll(&party->threads[0]);
                usleep(500);
            }
            party->threads[i].jobs[k].id = 0; /* the next manager counts anew */
        }
    }
}

static void no_handles(struct party *party, enum kv_tier tier)
{
    struct kvbm_pool *pool = kvbm_manager_pool(party->w.m, tier);
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    if (!pool)
        return;
    kvbm_pool_get_stats(pool, &stats);
    assert_int_equal(stats.inflight_immutable, 0);
    assert_int_equal(stats.inflight_mutable, 0);
}

static void celebrate(struct party *party)
{
    struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = party->layout};
    struct kvbm_manager_stats stats;

    world_start(&party->w);
    world_attach(&party->w, true);
    assert_int_equal(kvbm_cache_attach(party->w.m, &opts, &party->cache), 0);
    for (uint32_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&party->threads[i].thread, NULL, work, &party->threads[i]),
                         0);
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(party->threads[i].thread, NULL);
    shaky->hang = shaky->hang_puts = false;
    shaky->delay_us = shaky->fail_rc = shaky->lie = 0;
    wait_for_jobs(party);
    assert_int_equal(kvbm_manager_drain(party->w.m, 60000), 0);
    for (int tries = 0; (stats = world_stats(&party->w)).pins_now && tries < 5000; tries++)
        usleep(2000); /* of fetches that nobody wants any more */
    assert_int_equal(stats.pins_now, 0);
    assert_int_equal(stats.jobs_now, 0);
    no_handles(party, KV_TIER_HOST);
    no_handles(party, KV_TIER_DISK);
    no_handles(party, KV_TIER_EXTERNAL);
    assert_int_equal(kvbm_cache_detach(party->cache), 0);
    world_stop(&party->w);
}

static void run(uint32_t host_blocks, bool disk, bool object, bool through, bool when_evicted)
{
    static struct party party;
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);

    memset(&party, 0, sizeof(party));
    world_init(&party.w, host_blocks);
    assert_int_equal(kvbm_layout_allocate(&party.w.block, &allocator, &party.layout), 0);
    party.w.opts.max_jobs = 24;
    party.w.opts.max_offload = 40;
    party.w.opts.staging_blocks = 40;
    if (disk) {
        party.w.opts.disk = party.w.disk;
        party.w.opts.disk_bytes = (uint64_t)48 * HOST_STRIDE;
        party.w.opts.disk_volatile = true;
    }
    if (object) {
        snprintf(party.w.object, sizeof(party.w.object), "shaky://%s/object", party.w.dir);
        party.w.opts.object = party.w.object;
        party.w.opts.object_timeout_ms = 200;
        party.w.opts.object_blocks = 32;
        party.w.opts.object_write_through = through;
        party.w.opts.object_when_evicted = when_evicted;
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        struct thread *t = &party.threads[i];

        t->party = &party;
        t->number = i;
        t->random.state = test_seed() * 16 + i;
        for (uint32_t k = 0; k < JOBS; k++)
            t->jobs[k].base = (i * JOBS + k) * LENGTH;
    }
    for (int round = 0; round < 3; round++)
        celebrate(&party);
    print_message("%d loaded, %d held\n", (int)party.loaded, (int)party.held);
    assert_int_equal(party.wrong, 0);
    assert_int_equal(party.ended_twice, 0);
    assert_true(party.loaded > 0 && party.held > 0);
    kvbm_layout_destroy(party.layout);
    party.w.m = NULL;
    kvbm_layout_destroy(party.w.layout);
    (void)remove_dir(party.w.dir);
}

static void test_host(void **state)
{
    (void)state;
    run(32, false, false, false, false);
}

static void test_host_and_disk(void **state)
{
    (void)state;
    run(32, true, false, false, false);
}

static void test_all_tiers(void **state)
{
    (void)state;
    run(32, true, true, false, false);
}

static void test_object_through(void **state)
{
    (void)state;
    run(32, false, true, true, false);
}

static void test_when_evicted(void **state)
{
    (void)state;
    run(32, true, true, false, true);
}

static void test_without_a_host_tier(void **state)
{
    (void)state;
    run(0, true, true, false, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),         cmocka_unit_test(test_host_and_disk),
        cmocka_unit_test(test_all_tiers),    cmocka_unit_test(test_object_through),
        cmocka_unit_test(test_when_evicted), cmocka_unit_test(test_without_a_host_tier),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
