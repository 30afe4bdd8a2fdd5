// SPDX-License-Identifier: Apache-2.0
/* Hundreds of jobs at a time through small tiers. Deadlines are past, near or far; cancellations
 * come at any moment; sources are ready at once, later or never; the object store is slow, hangs,
 * fails and lies. Each job ends exactly once and in time, its bitmap is true, and no resource is
 * left over. */
#define CACHE_BLOCKS 1024u
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/unit.h"
#include "index/random.h"
#include "tier/kitchen.h"

#define SUBMITTERS 3u
#define SLOTS 80u /* jobs of one of them at a time */
#define LENGTH 4u
#define CHAINS 60u
#define IN_TIME_NS (15 * KV_NS_PER_S) /* only reached when something is broken */

/* A job, from submit until poll has told of it; then it is its submitter's again. */
struct slot {
    _Atomic bool busy;
    struct kvbm_layout *layout; /* of its cache */
    bool hnd, store;
    int64_t id;
    uint64_t tag, first, deadline_ns, since_ns;
    uint32_t n, base;
    int never; /* its ready_fd, which won't be; or -1 */
    uint8_t ok;
    struct kvbm_done done;
};

struct storm {
    struct world w;
    struct kvbm_layout *hnd_layout;
    struct kvbm_cache *hnd;
    _Atomic bool over, quiet;
    _Atomic uint64_t next_fresh;
    struct slot slots[SUBMITTERS][SLOTS];
    struct worker {
        struct storm *storm;
        uint32_t number;
        struct rng random;
        pthread_t thread;
        uint64_t submitted;
    } workers[SUBMITTERS];
    uint64_t ended, wrong, late, cancelled, whole, failed, told_twice, too_late;
};

/* ---- bytes in either order of heads and tokens ---- */

static uint32_t element_at(bool hnd, uint32_t i)
{
    uint32_t d = i % HEAD_DIM, h = i / HEAD_DIM % HEADS, t = i / HEAD_DIM / HEADS;

    return hnd ? (h * PAGE + t) * HEAD_DIM + d : i;
}

static bool block_is(const struct slot *slot, uint32_t block, uint64_t key, bool write)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t outer = 0; outer < 2; outer++) {
            uint16_t *at = world_region(slot->layout, block, layer, outer);

            for (uint32_t i = 0; i < PAGE * HEADS * HEAD_DIM; i++) {
                uint16_t *element = &at[element_at(slot->hnd, i)];

                if (write)
                    *element = world_element(key, layer, outer, i);
                else if (*element != world_element(key, layer, outer, i))
                    return false;
            }
        }
    }
    return true;
}

/* ---- jobs ---- */

static uint64_t some_deadline(struct rng *random, uint64_t now)
{
    switch (rng_below(random, 6)) {
    case 0:
        return 1;
    case 1:
        return now;
    case 2:
        return now + rng_below(random, 300) * UINT64_C(1000);
    case 3:
        return now + rng_below(random, 20) * KV_NS_PER_MS;
    case 4:
        return now + rng_below(random, 400) * KV_NS_PER_MS;
    default:
        return 0;
    }
}

/* Sources that are never ready hold what nobody stored: whoever finds it is wrong. */
static void fill_slot(struct worker *worker, struct slot *slot)
{
    bool store = slot->store;

    if (store && slot->never >= 0)
        slot->first = atomic_fetch_add(&worker->storm->next_fresh, 1000);
    for (uint32_t i = 0; i < slot->n; i++)
        block_is(slot, slot->base + i, store && slot->never < 0 ? slot->first + i : ~UINT64_C(0),
                 true);
}

static struct kvbm_pin *pin_of(struct worker *worker, const struct slot *slot)
{
    struct kvbm_manager *m = worker->storm->w.m;
    uint64_t keys[LENGTH];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin_opts opts = {.size = sizeof(opts),
                                 .deadline_ns = rng_below(&worker->random, 2)
                                                    ? slot->deadline_ns
                                                    : some_deadline(&worker->random, kv_now_ns()),
                                 .no_fetch = rng_below(&worker->random, 16) == 0};
    struct kvbm_pin *pin = NULL;
    long rc;

    world_keys(slot->first, keys, slot->n);
    rc = slot->store ? kvbm_manager_prepare_store(m, &chain, slot->n, &pin)
                     : kvbm_manager_prepare_load(m, &chain, slot->n, &opts, &pin);
    assert_true(rc >= 0);
    return pin;
}

static void begin(struct worker *worker, struct slot *slot)
{
    struct storm *storm = worker->storm;
    struct rng *random = &worker->random;
    uint32_t blocks[LENGTH], number = (uint32_t)(slot - storm->slots[worker->number]);
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = slot->hnd ? storm->hnd : storm->w.cache,
                           .blocks = blocks,
                           .priority = (int32_t)rng_below(random, 5),
                           .ok = &slot->ok,
                           .tag = ++slot->tag << 16 | worker->number << 8 | number};
    int64_t id;

    slot->store = rng_below(random, 8) < 3;
    slot->n = 1 + rng_below(random, LENGTH);
    slot->first = (1 + rng_below(random, CHAINS)) * UINT64_C(1000);
    slot->deadline_ns = job.deadline_ns = some_deadline(random, kv_now_ns());
    slot->never =
        slot->store && rng_below(random, 4) == 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    slot->ok = 0;
    slot->since_ns = kv_now_ns();
    if (slot->never >= 0 && !slot->deadline_ns) /* somebody has to end it */
        slot->deadline_ns = job.deadline_ns = kv_now_ns() + 30 * KV_NS_PER_MS;
    job.ready_fd = slot->never;
    fill_slot(worker, slot);
    for (uint32_t i = 0; i < slot->n; i++)
        blocks[i] = slot->base + i;
    job.pin = pin_of(worker, slot);
    atomic_store(&slot->busy, true);
    id = kvbm_manager_submit(storm->w.m, &job);
    kvbm_pin_release(job.pin);
    assert_true(id > 0 || id == -EAGAIN);
    if (id > 0) {
        worker->submitted++;
        slot->id = id;
    } else {
        atomic_store(&slot->busy, false);
    }
    if (slot->never >= 0)
        close(slot->never); /* the manager has its own */
}

static void *submitter(void *arg)
{
    struct worker *worker = arg;
    struct storm *storm = worker->storm;

    for (long round = test_rounds(4000); round > 0; round--) {
        struct slot *slot = &storm->slots[worker->number][rng_below(&worker->random, SLOTS)];

        if (!atomic_load(&slot->busy))
            begin(worker, slot);
        slot = &storm->slots[worker->number][rng_below(&worker->random, SLOTS)];
        if (rng_below(&worker->random, 3) == 0 && slot->id)
            kvbm_manager_cancel(storm->w.m, (uint64_t)slot->id);
        if (rng_below(&worker->random, 64) == 0)
            usleep(rng_below(&worker->random, 3000));
    }
    return NULL;
}

static void check_end(struct storm *storm, struct slot *slot, const struct kvbm_done *done)
{
    uint32_t there = 0;

    for (uint32_t i = 0; i < LENGTH; i++) {
        bool ok = slot->ok >> i & 1;

        there += ok;
        storm->wrong += ok && (i >= slot->n || slot->never >= 0);
        storm->wrong +=
            ok && i < slot->n && !block_is(slot, slot->base + i, slot->first + i, false);
    }
    storm->wrong += !slot->store && done->n_ok != there;
    storm->too_late += kv_now_ns() > KV_MAX(slot->deadline_ns, slot->since_ns) + IN_TIME_NS;
    storm->whole += done->status == 0;
    storm->late += done->status == -ETIMEDOUT;
    storm->cancelled += done->status == -ECANCELED;
    storm->failed += done->status && done->status != -ETIMEDOUT && done->status != -ECANCELED &&
                     done->status != -ENOENT && done->status != -EREMOTEIO;
}

static void *poller(void *arg)
{
    struct storm *storm = arg;
    struct kvbm_done done[32];

    while (!atomic_load(&storm->over)) {
        long n = kvbm_manager_poll(storm->w.m, done, KV_COUNT(done));

        assert_true(n >= 0);
        for (long i = 0; i < n; i++) {
            struct slot *slot = &storm->slots[done[i].tag >> 8 & 0xff][done[i].tag & 0xff];

            if (!atomic_load(&slot->busy) || slot->tag != done[i].tag >> 16) {
                storm->told_twice++;
                continue;
            }
            check_end(storm, slot, &done[i]);
            storm->ended++;
            atomic_store(&slot->busy, false);
        }
        if (n == 0)
            usleep(500);
    }
    return NULL;
}

/* The object store's. */
static void *weather(void *arg)
{
    struct storm *storm = arg;
    struct rng random = {test_seed() + 99};

    while (!atomic_load(&storm->quiet)) {
        shaky->delay_us = (int)rng_below(&random, 4) * 3000;
        shaky->hang = rng_below(&random, 6) == 0;
        shaky->hang_puts = rng_below(&random, 6) == 0;
        shaky->fail_rc = rng_below(&random, 40) == 0 ? -EIO : 0;
        shaky->lie = (int)KV_MIN(rng_below(&random, 12), 3u);
        usleep(10000 + rng_below(&random, 40000));
    }
    shaky->hang = shaky->hang_puts = false;
    shaky->delay_us = shaky->fail_rc = shaky->lie = 0;
    return NULL;
}

/* ---- a storm ---- */

static void make_hnd_layout(struct storm *storm)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout_config config = storm->w.block;

    config.order = KVBM_ORDER_HND;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &storm->hnd_layout), 0);
}

static void attach_both(struct storm *storm)
{
    const struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = storm->hnd_layout};

    world_attach(&storm->w, false);
    assert_int_equal(kvbm_cache_attach(storm->w.m, &opts, &storm->hnd), 0);
}

static void prepare(struct storm *storm)
{
    for (uint32_t i = 0; i < SUBMITTERS; i++) {
        storm->workers[i] =
            (struct worker){.storm = storm, .number = i, .random = {test_seed() + i}};
        for (uint32_t k = 0; k < SLOTS; k++) {
            struct slot *slot = &storm->slots[i][k];

            slot->hnd = k % 2;
            slot->layout = slot->hnd ? storm->hnd_layout : storm->w.layout;
            slot->base = (i * SLOTS + k) * LENGTH;
        }
    }
    atomic_store(&storm->next_fresh, 1000000);
}

/* Until all that was submitted has been told of. */
static void wait_for_ends(struct storm *storm)
{
    uint64_t until = kv_now_ns() + 4 * IN_TIME_NS;

    for (uint32_t i = 0; i < SUBMITTERS; i++) {
        for (uint32_t k = 0; k < SLOTS; k++) {
            while (atomic_load(&storm->slots[i][k].busy)) {
                assert_true(kv_now_ns() < until); /* a job that never ends */
                usleep(1000);
            }
        }
    }
}

static void nothing_left(struct storm *storm)
{
    uint64_t until = kv_now_ns() + IN_TIME_NS;
    struct kvbm_pool *host = kvbm_manager_pool(storm->w.m, KV_TIER_HOST);
    struct kvbm_pool_stats pool = {.size = sizeof(pool)};

    assert_int_equal(world_stats(&storm->w).jobs_now, 0);
    /* A released pin goes when the disk has answered its last request, which a full disk queue delays. */
    while (world_stats(&storm->w).pins_now) {
        assert_true(kv_now_ns() < until);
        usleep(1000);
    }
    if (host) {
        kvbm_pool_get_stats(host, &pool);
        assert_int_equal(pool.inflight_immutable, 0);
        assert_int_equal(pool.inflight_mutable, 0);
    }
}

/* Of blocks that nobody has stored before. */
static int store_status(struct storm *storm, uint64_t first)
{
    uint64_t keys[LENGTH];
    uint32_t blocks[LENGTH];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_job job = {.size = sizeof(job), .cache = storm->w.cache, .blocks = blocks};
    struct kvbm_done done;
    int64_t id;

    world_keys(first, keys, LENGTH);
    for (uint32_t i = 0; i < LENGTH; i++) {
        blocks[i] = i;
        world_fill(&storm->w, i, keys[i]);
    }
    assert_int_equal(kvbm_manager_prepare_store(storm->w.m, &chain, LENGTH, &job.pin), LENGTH);
    id = kvbm_manager_submit(storm->w.m, &job);
    kvbm_pin_release(job.pin);
    assert_int_equal(kvbm_manager_wait(storm->w.m, (uint64_t)id, 30000, &done), 0);
    assert_int_equal(done.n_ok, LENGTH);
    return done.status;
}

/* Blocks stored now come back; with write-through once the object store's breaker has closed. */
static void works_again(struct storm *storm)
{
    uint64_t until = kv_now_ns() + 2 * IN_TIME_NS, first = 500000;
    int rc;

    while ((rc = store_status(storm, first)) != 0) {
        assert_int_equal(rc, -EREMOTEIO);
        assert_true(kv_now_ns() < until);
        usleep(20000);
        first += 1000;
    }
    assert_int_equal(kvbm_manager_drain(storm->w.m, 60000), 0);
    assert_int_equal(world_load(&storm->w, first, LENGTH), LENGTH);
}

static void run(struct storm *storm)
{
    pthread_t poll_thread, weather_thread;
    uint64_t submitted = 0;

    make_hnd_layout(storm);
    prepare(storm);
    world_start(&storm->w);
    attach_both(storm);
    assert_int_equal(pthread_create(&poll_thread, NULL, poller, storm), 0);
    assert_int_equal(pthread_create(&weather_thread, NULL, weather, storm), 0);
    for (uint32_t i = 0; i < SUBMITTERS; i++)
        assert_int_equal(
            pthread_create(&storm->workers[i].thread, NULL, submitter, &storm->workers[i]), 0);
    for (uint32_t i = 0; i < SUBMITTERS; i++) {
        pthread_join(storm->workers[i].thread, NULL);
        submitted += storm->workers[i].submitted;
    }
    atomic_store(&storm->quiet, true);
    pthread_join(weather_thread, NULL);
    wait_for_ends(storm);
    assert_int_equal(kvbm_manager_drain(storm->w.m, 60000), 0);
    atomic_store(&storm->over, true);
    pthread_join(poll_thread, NULL);
    print_message("%d jobs: %d whole, %d late, %d cancelled\n", (int)submitted, (int)storm->whole,
                  (int)storm->late, (int)storm->cancelled);
    assert_int_equal(storm->wrong, 0);
    assert_int_equal(storm->told_twice, 0);
    assert_int_equal(storm->too_late, 0);
    assert_int_equal(storm->failed, 0);
    assert_int_equal(storm->ended, submitted);
    assert_true(storm->whole && storm->late && storm->cancelled);
    for (uint64_t first = 1000000; first < atomic_load(&storm->next_fresh); first += 1000)
        assert_true(world_where(&storm->w, first, 0) != KVBM_READY); /* was never ready */
    nothing_left(storm);
    works_again(storm);
    assert_int_equal(kvbm_cache_detach(storm->hnd), 0);
    world_fini(&storm->w);
    kvbm_layout_destroy(storm->hnd_layout);
}

static void start(struct storm *storm, uint32_t host_blocks)
{
    memset(storm, 0, sizeof(*storm));
    world_init(&storm->w, host_blocks);
    storm->w.opts.disk = storm->w.disk;
    storm->w.opts.disk_bytes = (uint64_t)80 * HOST_STRIDE;
    storm->w.opts.disk_volatile = true;
    storm->w.opts.max_jobs = 200;
}

static void with_shaky(struct storm *storm)
{
    snprintf(storm->w.object, sizeof(storm->w.object), "shaky://%s/object", storm->w.dir);
    storm->w.opts.object = storm->w.object;
    storm->w.opts.object_timeout_ms = 300;
}

static void test_host_and_disk(void **state)
{
    static struct storm storm;

    (void)state;
    start(&storm, 40);
    run(&storm);
}

static void test_all_tiers(void **state)
{
    static struct storm storm;

    (void)state;
    start(&storm, 40);
    with_shaky(&storm);
    run(&storm);
}

static void test_write_through(void **state)
{
    static struct storm storm;

    (void)state;
    start(&storm, 40);
    with_shaky(&storm);
    storm.w.opts.object_write_through = true;
    run(&storm);
}

static void test_without_a_host_tier(void **state)
{
    static struct storm storm;

    (void)state;
    start(&storm, 0);
    with_shaky(&storm);
    run(&storm);
}

/* The store never makes destroy late; a disk that other programs keep busy may, and destroy says so
 * within the second that it gives it. */
static void destroy(struct storm *storm, uint32_t ms)
{
    uint64_t until = kv_now_ns() + 4 * IN_TIME_NS, since;
    int rc;

    do {
        since = kv_now_ns();
        rc = world_destroy(&storm->w, ms);
        assert_true(kv_now_ns() < since + IN_TIME_NS);
        assert_true(rc == 0 || (rc == -ETIMEDOUT && since < until));
    } while (rc < 0);
    assert_int_equal(kvbm_cache_detach(storm->hnd), 0);
}

/* Destroyed with all of it under way, and a store that hangs: in time, and (by the address
 * sanitizer) without a leak. */
static void test_destroyed_in_the_middle(void **state)
{
    static struct storm storm;

    (void)state;
    start(&storm, 40);
    with_shaky(&storm);
    make_hnd_layout(&storm);
    prepare(&storm);
    for (long round = 0; round < test_rounds(15); round++) {
        struct worker *worker = &storm.workers[0];
        uint32_t ms = rng_below(&worker->random, 15);

        shaky->hang = rng_below(&worker->random, 2);
        shaky->delay_us = (int)rng_below(&worker->random, 3) * 1000;
        storm.w.opts.object_write_through = rng_below(&worker->random, 2);
        world_start(&storm.w);
        attach_both(&storm);
        for (uint32_t i = 0; i < SUBMITTERS; i++) {
            for (uint32_t k = 0; k < SLOTS; k++)
                begin(&storm.workers[i], &storm.slots[i][k]);
        }
        destroy(&storm, ms);
        shaky->hang = false;
        for (uint32_t i = 0; i < SUBMITTERS; i++) {
            for (uint32_t k = 0; k < SLOTS; k++)
                atomic_store(&storm.slots[i][k].busy, false);
        }
    }
    shaky->delay_us = 0;
    for (int tries = 0; shaky->opens != shaky->closes && tries < 5000; tries++)
        usleep(2000);
    assert_int_equal(shaky->opens, shaky->closes);
    world_start(&storm.w); /* whatever was cut short: the files are in order */
    world_attach(&storm.w, false);
    works_again(&storm);
    world_fini(&storm.w);
    kvbm_layout_destroy(storm.hnd_layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_and_disk),           cmocka_unit_test(test_all_tiers),
        cmocka_unit_test(test_write_through),           cmocka_unit_test(test_without_a_host_tier),
        cmocka_unit_test(test_destroyed_in_the_middle),
    };

    find_shaky();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
