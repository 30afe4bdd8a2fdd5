// SPDX-License-Identifier: Apache-2.0
/* The event manager, its ring and its ZMQ sink with each allocation refused in turn. A failed
 * creation returns -ENOMEM and leaves nothing behind. A dropped event is reported as lost. */
#include "base/unit.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

#include "bm/bm.h"
#include "bm/events/event_record.h"
#include "bm/events/events.h"
#include "kv_event.h"
#include "starve.h"

static struct kvbm_events *events;

/* Make it, with the first allocation refused, the second, ... Returns how many there are. */
static long starve(int (*make)(void))
{
    long n;
    int rc;

    for (n = 1;; n++) {
        starve_at(n);
        rc = make();
        if (!starved())
            break;
        starve_at(0);
        assert_int_equal(rc, -ENOMEM);
    }
    starve_at(0);
    assert_true(rc >= 0);
    return n - 1;
}

static void nothing(void *arg, const struct kvbm_event *batch, size_t n, uint64_t lost)
{
    (void)arg, (void)batch, (void)n, (void)lost;
}

/* A sink that couldn't be made takes no place. */
static void expect_places(int n)
{
    int ids[17], free = 0;

    while (free < 17 && (ids[free] = kvbm_events_add_callback(events, 0, nothing, NULL)) > 0)
        free++;
    assert_int_equal(free, n);
    while (free)
        assert_int_equal(kvbm_events_remove_sink(events, ids[--free]), 0);
}

static int make_events(void)
{
    return kvbm_events_create(NULL, &events);
}

static struct kvbm_event_ring *ring;

static int make_ring(void)
{
    return kvbm_events_add_ring(events, KVBM_EVENTS_PER_TIER, 4096, &ring);
}

static struct kve_publisher *publisher;

/* Always the same addresses: what a failed one had bound is free again. */
static int make_zmq(void)
{
    static char endpoint[64], replay[64];
    struct kve_publisher_opts opts = {
        .size = sizeof(opts), .endpoint = endpoint, .replay_endpoint = replay, .linger_us = 1000};
    struct kvbm_zmq_opts zmq = {.size = sizeof(zmq),
                                .publisher = &opts,
                                .block_size = BM_BLOCK,
                                .lora_name = "lora",
                                .cache_salt = "salt"};

    snprintf(endpoint, sizeof(endpoint), "ipc://@kvbm-starved-%d", (int)getpid());
    snprintf(replay, sizeof(replay), "ipc://@kvbm-starved-%d-replay", (int)getpid());
    return kvbm_events_add_zmq(events, &zmq, &publisher);
}

static void test_making(void **state)
{
    (void)state;
    assert_true(starve(make_events) >= 3); /* itself, two batches */
    expect_places(16);
    assert_true(starve(make_ring) >= 3);
    expect_places(15);
    assert_true(starve(make_zmq) >= 4);
    expect_places(14);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* ---- writing ---- */

static struct {
    uint64_t told, lost, next;
} heard;

/* Events received and events lost together are the events written, in order. */
static void hear(void *arg, const struct kvbm_event *batch, size_t n, uint64_t lost)
{
    (void)arg;
    heard.next += lost;
    for (size_t i = 0; i < n; i++)
        assert_int_equal(batch[i].sequence, heard.next++);
    heard.told += n;
    heard.lost += lost;
}

/* A registry's writes never fail: with no memory for the queue the events are lost, counted, and
 * told so. */
static void test_writing(void **state)
{
    struct kvbm_registry_opts opts = {.size = sizeof(opts)};
    struct kvbm_events_stats stats = {.size = sizeof(stats)};
    uint64_t refused = 0, written = 0;
    struct bm bm = {0};
    (void)state;

    memset(&heard, 0, sizeof(heard));
    assert_int_equal(
        kvbm_events_create(&(struct kvbm_events_opts){.size = sizeof(struct kvbm_events_opts),
                                                      .window_us = 60000000,
                                                      .max_batch = 65536},
                           &events),
        0);
    assert_true(kvbm_events_add_callback(events, KVBM_EVENTS_PER_TIER, hear, NULL) > 0);
    opts.events = events;
    assert_int_equal(kvbm_registry_create(&opts, &bm.registry), 0);
    bm.pool = bm_pool(&bm, NULL);
    for (uint64_t key = 1; key <= 20000; key++) { /* each evicts, once the 7 blocks are taken */
        struct kvbm_complete complete;
        struct kvbm_immutable held;

        assert_int_equal(bm_complete_at(bm.pool, 0, NULL, 0, &key, 1, &complete), 0);
        written += 1 + (key > 7);
        starve_at(1);
        assert_int_equal(kvbm_pool_register(bm.pool, &complete, 1, &held), 0);
        refused += starved();
        starve_at(0);
        assert_int_equal(kvbm_immutable_release(&held), 0);
        if (key % 1000 == 0)
            assert_int_equal(kvbm_events_flush(events, 60000), 0);
    }
    assert_int_equal(kvbm_events_flush(events, 60000), 0);
    kvbm_events_get_stats(events, &stats);
    assert_true(refused >= 2); /* the queue's first room, and the next */
    assert_int_equal(stats.written, written);
    assert_true(stats.dropped >= refused && stats.dropped < written / 2);
    assert_int_equal(heard.lost, stats.dropped);
    assert_int_equal(heard.told + heard.lost, written);
    assert_int_equal(kvbm_registry_check(bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(bm.pool), 0);
    assert_int_equal(kvbm_registry_destroy(bm.registry), 0);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* ---- publishing, on the manager's thread ---- */

static struct {
    _Atomic long at;
    atomic_bool happened;
} hunger;

static void before(void *arg, const struct kvbm_event *batch, size_t n, uint64_t lost)
{
    (void)arg, (void)batch, (void)n, (void)lost;
    starve_at(atomic_load(&hunger.at));
}

static void behind(void *arg, const struct kvbm_event *batch, size_t n, uint64_t lost)
{
    (void)arg, (void)batch, (void)n, (void)lost;
    atomic_store(&hunger.happened, starved());
    starve_at(0);
}

/* @n stored blocks, each the next one's parent or all without one. */
static void put(uint64_t key, size_t n, bool chain)
{
    uint64_t parent = 0;

    kvbm_events_begin(events);
    for (size_t i = 0; i < n; i++, parent = key++) {
        struct kvbm_event event = {.type = KVBM_EVENT_STORED,
                                   .key_len = 8,
                                   .key = &key,
                                   .parent = chain && i ? &parent : NULL};

        kvbm_events_put(events, &event);
    }
    kvbm_events_end(events);
    assert_int_equal(kvbm_events_flush(events, 60000), 0);
}

static struct kve_publisher_stats published(void)
{
    struct kve_publisher_stats stats = {.size = sizeof(stats)};

    assert_int_equal(kve_publisher_flush(publisher, 60000), 0);
    kve_publisher_get_stats(publisher, &stats);
    return stats;
}

/*
 * A batch that the sink lacks memory for is lost as a whole or in part. The publisher knows how much,
 * and sends a clear in its place, later when that fails, too.
 */
static void test_publishing(void **state)
{
    struct kve_publisher_stats was = KVE_PUBLISHER_STATS_INIT, is = was;
    long refused = 0;
    (void)state;

    assert_int_equal(make_events(), 0);
    assert_true(kvbm_events_add_callback(events, 0, before, NULL) > 0);
    assert_true(make_zmq() > 0);
    assert_true(kvbm_events_add_callback(events, 0, behind, NULL) > 0);
    for (size_t size = 4; size <= 1024; size *= 4) {
        for (long n = 1;; n++) {
            was = published();
            atomic_store(&hunger.at, n);
            put(1, size, false);
            atomic_store(&hunger.at, 0);
            if (!atomic_load(&hunger.happened))
                break;
            refused++;
            put(5000, 1, false); /* what couldn't be told then is told now */
            is = published();
            assert_true(is.dropped_events > was.dropped_events);
            /* all of the batch is either lost or published; besides it a clear, and the one
             * behind */
            assert_int_equal(is.dropped_events - was.dropped_events + is.events - was.events,
                             size + 2);
        }
        is = published();
        assert_int_equal(is.dropped_events, was.dropped_events);
        assert_int_equal(is.events - was.events, size);
    }
    assert_true(refused >= 4);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* A chain is one event to the publisher: lost, it counts for all its blocks. */
static void test_publishing_chains(void **state)
{
    const uint64_t blocks = 300;
    struct kve_publisher_stats was = KVE_PUBLISHER_STATS_INIT, is = was;
    long refused = 0;
    (void)state;

    assert_int_equal(make_events(), 0);
    assert_true(kvbm_events_add_callback(events, 0, before, NULL) > 0);
    assert_true(make_zmq() > 0);
    assert_true(kvbm_events_add_callback(events, 0, behind, NULL) > 0);
    for (long n = 1;; n++, refused++) {
        was = published();
        atomic_store(&hunger.at, n);
        put(1, blocks, true);
        atomic_store(&hunger.at, 0);
        if (!atomic_load(&hunger.happened))
            break;
        put(5000, 1, false);
        is = published();
        assert_int_equal(is.dropped_events - was.dropped_events, blocks);
        assert_int_equal(is.events - was.events, 2); /* a clear, and the one behind */
    }
    is = published();
    assert_int_equal(is.dropped_events, was.dropped_events);
    assert_int_equal(is.events - was.events, 1);
    assert_true(refused >= 2);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* Losses that can't be told yet add up. */
static void test_publishing_losses(void **state)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts), .queue_bytes = 1}; /* room for none */
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    (void)state;

    assert_int_equal(kvbm_events_create(&opts, &events), 0);
    assert_true(kvbm_events_add_callback(events, 0, before, NULL) > 0);
    assert_true(make_zmq() > 0);
    assert_true(kvbm_events_add_callback(events, 0, behind, NULL) > 0);
    atomic_store(&hunger.at, 1);
    put(1, 7, false);
    assert_true(atomic_load(&hunger.happened));
    stats = published();
    assert_int_equal(stats.events, 0);
    assert_int_equal(stats.dropped_events, 0);
    atomic_store(&hunger.at, 0);
    put(1, 5, false);
    stats = published();
    assert_int_equal(stats.events, 1); /* the clear */
    assert_int_equal(stats.dropped_events, 12);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_making),
        cmocka_unit_test(test_writing),
        cmocka_unit_test(test_publishing),
        cmocka_unit_test(test_publishing_chains),
        cmocka_unit_test(test_publishing_losses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
