// SPDX-License-Identifier: Apache-2.0
/* The event manager: order, batches, scopes, losses, adding and removing sinks, destruction. */
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "bm/bm.h"
#include "bm/events/event_record.h"
#include "bm/events/events.h"

#define FOREVER_MS 60000
#define FOREVER_US (60u * 1000 * 1000)

/* -- a sink that writes down what it gets, and can be held up ---------------------------------- */

struct call {
    size_t first, n; /* of told */
    uint64_t lost;
    uint64_t when_ns;
};

struct recorder {
    pthread_mutex_t gate; /* whoever holds it holds the manager's thread up */
    pthread_mutex_t lock;
    struct kvbm_event told[4096]; /* key and parent: their first 8 bytes */
    struct call calls[512];
    size_t n_told, n_calls;
    atomic_bool entered;
};

static struct recorder recorders[2];

static void record(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    struct recorder *r = arg;

    atomic_store(&r->entered, true);
    pthread_mutex_lock(&r->gate);
    pthread_mutex_unlock(&r->gate);
    pthread_mutex_lock(&r->lock);
    assert_true(r->n_calls < KV_COUNT(r->calls) && r->n_told + n <= KV_COUNT(r->told));
    r->calls[r->n_calls++] = (struct call){r->n_told, n, lost, kv_now_ns()};
    for (size_t i = 0; i < n; i++) {
        struct kvbm_event *to = &r->told[r->n_told++];
        uint64_t key = 0, parent = 0;

        *to = events[i];
        memcpy(&key, events[i].key, 8);
        if (events[i].parent)
            memcpy(&parent, events[i].parent, 8);
        to->key = (const void *)(uintptr_t)key;
        to->parent = (const void *)(uintptr_t)parent;
        to->tokens = NULL;
    }
    pthread_mutex_unlock(&r->lock);
}

static uint64_t told_key(const struct recorder *r, size_t i)
{
    return (uint64_t)(uintptr_t)r->told[i].key;
}

static size_t n_calls(struct recorder *r)
{
    size_t n;

    pthread_mutex_lock(&r->lock);
    n = r->n_calls;
    pthread_mutex_unlock(&r->lock);
    return n;
}

static void wait_calls(struct recorder *r, size_t n)
{
    wait_until(n_calls(r) >= n);
}

static size_t n_told(struct recorder *r)
{
    size_t n;

    pthread_mutex_lock(&r->lock);
    n = r->n_told;
    pthread_mutex_unlock(&r->lock);
    return n;
}

static void wait_told(struct recorder *r, size_t n)
{
    wait_until(n_told(r) >= n);
}

static int set_up(void **state)
{
    (void)state;
    memset(recorders, 0, sizeof(recorders));
    for (size_t i = 0; i < KV_COUNT(recorders); i++) {
        pthread_mutex_init(&recorders[i].gate, NULL);
        pthread_mutex_init(&recorders[i].lock, NULL);
    }
    return 0;
}

static struct kvbm_events *make(uint32_t max_batch, uint32_t window_us, uint64_t queue_bytes)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts),
                                    .max_batch = max_batch,
                                    .window_us = window_us,
                                    .queue_bytes = queue_bytes};
    struct kvbm_events *events = NULL;

    assert_int_equal(kvbm_events_create(&opts, &events), 0);
    return events;
}

static int listen(struct kvbm_events *events, enum kvbm_event_scope scope, struct recorder *r)
{
    int id = kvbm_events_add_callback(events, scope, record, r);

    assert_true(id > 0);
    return id;
}

/* As a registry does it: @n events under one lock. */
static void put(struct kvbm_events *events, uint64_t key, size_t n)
{
    kvbm_events_begin(events);
    for (size_t i = 0; i < n; i++, key++) {
        struct kvbm_event event = {.type = KVBM_EVENT_STORED, .key_len = 8, .key = &key};

        kvbm_events_put(events, &event);
    }
    kvbm_events_end(events);
}

static void flush(struct kvbm_events *events)
{
    assert_int_equal(kvbm_events_flush(events, FOREVER_MS), 0);
}

static struct kvbm_events_stats stats_of(struct kvbm_events *events)
{
    struct kvbm_events_stats stats = {.size = sizeof(stats)};

    kvbm_events_get_stats(events, &stats);
    return stats;
}

/* -- order, batches ---------------------------------------------------------------------------- */

static void test_order(void **state)
{
    struct kvbm_events *events = make(0, 0, 0);
    uint64_t before = kv_wall_ns();

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    for (uint64_t i = 0; i < 3000; i++)
        put(events, i, 1);
    flush(events);
    assert_int_equal(recorders[0].n_told, 3000);
    for (size_t i = 0; i < 3000; i++) {
        assert_int_equal(told_key(&recorders[0], i), i);
        assert_int_equal(recorders[0].told[i].sequence, i);
        assert_true(recorders[0].told[i].time_ns >= before);
        assert_true(recorders[0].told[i].time_ns <= kv_wall_ns());
    }
    assert_int_equal(stats_of(events).batches, recorders[0].n_calls);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* A full batch doesn't wait for the window, a smaller one does. */
static void test_batches_by_size(void **state)
{
    struct recorder *r = &recorders[0];
    struct kvbm_events *events = make(4, FOREVER_US, 0);

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, r);
    put(events, 0, 3);
    usleep(100 * 1000);
    assert_int_equal(n_calls(r), 0);
    put(events, 3, 1);
    wait_calls(r, 1);
    put(events, 4, 10);
    wait_calls(r, 4);
    assert_int_equal(r->calls[0].n, 4);
    assert_int_equal(r->calls[1].n, 4);
    assert_int_equal(r->calls[2].n, 4);
    assert_int_equal(r->calls[3].n, 2);
    assert_int_equal(stats_of(events).batches, 4);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static void test_batches_by_window(void **state)
{
    struct recorder *r = &recorders[0];
    struct kvbm_events *events = make(0, 150 * 1000, 0);
    int in_time = 0;

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, r);
    for (size_t round = 0; round < 20 && in_time < 3; round++) {
        size_t calls = n_calls(r);
        uint64_t before = kv_now_ns();
        bool together; /* else a busy machine let the window end in between */

        put(events, 2 * round, 1);
        put(events, 2 * round + 1, 1);
        together = kv_now_ns() - before < 150 * KV_NS_PER_MS;
        wait_told(r, 2 * round + 2);
        assert_true(r->calls[calls].when_ns - before >= 150 * KV_NS_PER_MS);
        if (together)
            assert_int_equal(r->calls[calls].n, 2);
        in_time += together;
    }
    assert_true(in_time > 0);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static void test_nothing_is_no_batch(void **state)
{
    struct kvbm_events *events = make(0, 1000, 0);
    struct bm bm = {0};
    struct kvbm_registry_opts opts = {.size = sizeof(opts), .events = events};
    struct kvbm_mutable block;

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    flush(events);
    assert_int_equal(kvbm_registry_create(&opts, &bm.registry), 0);
    bm.pool = bm_pool(&bm, NULL);
    assert_int_equal(kvbm_pool_allocate(bm.pool, 1, &block, NULL), 0);
    assert_int_equal(kvbm_mutable_release(&block), 0);
    flush(events);
    usleep(20 * 1000);
    assert_int_equal(n_calls(&recorders[0]), 0);
    assert_int_equal(stats_of(events).batches, 0);
    assert_int_equal(kvbm_pool_destroy(bm.pool), 0);
    assert_int_equal(kvbm_registry_destroy(bm.registry), 0);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static void test_flush(void **state)
{
    struct recorder *r = &recorders[0];
    struct kvbm_events *events = make(0, FOREVER_US, 0);

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, r);
    put(events, 0, 5);
    flush(events); /* doesn't wait for the window */
    assert_int_equal(n_calls(r), 1);
    pthread_mutex_lock(&r->gate);
    put(events, 5, 1);
    assert_int_equal(kvbm_events_flush(events, 50), -ETIMEDOUT);
    pthread_mutex_unlock(&r->gate);
    flush(events);
    assert_int_equal(n_calls(r), 2);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* -- what registries write --------------------------------------------------------------------- */

struct two_tiers {
    struct kvbm_events *events;
    struct bm bm;
    struct kvbm_pool *host;
};

static void open_two_tiers(struct two_tiers *t, struct kvbm_events *events)
{
    struct kvbm_registry_opts opts = {.size = sizeof(opts), .events = events};
    struct kvbm_pool_opts host = {.tier = KV_TIER_HOST};

    *t = (struct two_tiers){.events = events};
    assert_int_equal(kvbm_registry_create(&opts, &t->bm.registry), 0);
    t->bm.pool = bm_pool(&t->bm, NULL);
    t->host = bm_pool(&t->bm, &host);
}

static void close_two_tiers(struct two_tiers *t)
{
    assert_int_equal(kvbm_registry_check(t->bm.registry), 0);
    assert_int_equal(kvbm_pool_destroy(t->bm.pool), 0);
    assert_int_equal(kvbm_pool_destroy(t->host), 0);
    assert_int_equal(kvbm_registry_destroy(t->bm.registry), 0);
    assert_int_equal(kvbm_events_destroy(t->events), 0);
}

/* One handle: stored, then removed, once each, however often the block was found in between. */
static void test_single_handle(void **state)
{
    struct recorder *r = &recorders[0];
    struct kvbm_immutable block, again;
    uint64_t key = 77;
    struct two_tiers t;

    (void)state;
    open_two_tiers(&t, make(0, 0, 0));
    listen(t.events, KVBM_EVENTS_PER_TIER, r);
    bm_put(t.bm.pool, &key, 1, &block);
    assert_int_equal(kvbm_pool_match(t.bm.pool, 0, &key, 1, 0, &again), 1);
    assert_int_equal(kvbm_immutable_release(&again), 0);
    bm_put(t.bm.pool, &key, 1, &again); /* a duplicate */
    assert_int_equal(kvbm_immutable_release(&again), 0);
    assert_int_equal(kvbm_immutable_release(&block), 0);
    flush(t.events);
    assert_int_equal(r->n_told, 1);
    bm_churn(t.bm.pool, 7);
    bm_churn(t.bm.pool, 7);
    flush(t.events);
    assert_int_equal(r->n_told, 2);
    assert_int_equal(r->told[0].type, KVBM_EVENT_STORED);
    assert_int_equal(r->told[1].type, KVBM_EVENT_REMOVED);
    assert_true(told_key(r, 0) == 77 && told_key(r, 1) == 77);
    assert_true(r->told[0].first && r->told[1].last);
    close_two_tiers(&t);
}

static void test_one_register_is_one_batch(void **state)
{
    const uint64_t keys[] = {1, 2, 3, 4, 5};
    struct recorder *r = &recorders[0];
    struct kvbm_immutable blocks[5];
    struct two_tiers t;

    (void)state;
    open_two_tiers(&t, make(0, 1, 0)); /* no window to speak of */
    listen(t.events, KVBM_EVENTS_PER_TIER, r);
    bm_put(t.bm.pool, keys, 5, blocks);
    flush(t.events);
    assert_int_equal(r->n_calls, 1);
    assert_int_equal(r->calls[0].n, 5);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(told_key(r, i), keys[i]);
        assert_int_equal((uintptr_t)r->told[i].parent, i ? keys[i - 1] : 0);
        assert_int_equal(r->told[i].position, i);
    }
    assert_int_equal(kvbm_pool_release(t.bm.pool, blocks, 5), 0);
    close_two_tiers(&t);
}

static void expect(const struct recorder *r, size_t i, enum kvbm_event_type type, enum kv_tier tier,
                   bool first, bool last)
{
    assert_true(i < r->n_told);
    assert_int_equal(r->told[i].type, type);
    assert_int_equal(r->told[i].tier, tier);
    assert_int_equal(r->told[i].first, first);
    assert_int_equal(r->told[i].last, last);
}

/* device, host, gone from device, back, gone from host, gone from device */
static void test_scopes(void **state)
{
    struct recorder *all = &recorders[0], *some = &recorders[1];
    const uint64_t key = 5;
    struct two_tiers t;

    (void)state;
    open_two_tiers(&t, make(0, 0, 0));
    listen(t.events, KVBM_EVENTS_PER_TIER, all);
    listen(t.events, KVBM_EVENTS_CONSOLIDATED, some);
    bm_leave(t.bm.pool, key);
    bm_leave(t.host, key);
    bm_churn(t.bm.pool, 7);
    bm_leave(t.bm.pool, key);
    bm_churn(t.host, 7);
    flush(t.events);
    assert_int_equal(some->n_told, 1);
    bm_churn(t.bm.pool, 7);
    flush(t.events);
    assert_int_equal(all->n_told, 6);
    expect(all, 0, KVBM_EVENT_STORED, KV_TIER_DEVICE, true, false);
    expect(all, 1, KVBM_EVENT_STORED, KV_TIER_HOST, false, false);
    expect(all, 2, KVBM_EVENT_REMOVED, KV_TIER_DEVICE, false, false);
    expect(all, 3, KVBM_EVENT_STORED, KV_TIER_DEVICE, false, false);
    expect(all, 4, KVBM_EVENT_REMOVED, KV_TIER_HOST, false, false);
    expect(all, 5, KVBM_EVENT_REMOVED, KV_TIER_DEVICE, false, true);
    assert_int_equal(some->n_told, 2);
    expect(some, 0, KVBM_EVENT_STORED, KV_TIER_DEVICE, true, false);
    expect(some, 1, KVBM_EVENT_REMOVED, KV_TIER_DEVICE, false, true);
    for (size_t i = 0; i < some->n_calls; i++)
        assert_true(some->calls[i].n > 0); /* nothing in its scope: not called */
    close_two_tiers(&t);
}

/* -- losses ------------------------------------------------------------------------------------ */

/* Hold the thread up inside @r's callback, with nothing left in the queue. Release with the
 * gate. */
static void hold_up(struct kvbm_events *events, struct recorder *r, uint64_t key)
{
    atomic_store(&r->entered, false);
    pthread_mutex_lock(&r->gate);
    put(events, key, 1);
    wait_until(atomic_load(&r->entered));
}

/* Dropped events are counted, and every sink gets their number once, before the next event. */
static void test_lost(void **state)
{
    struct kvbm_event one = {.key_len = 8};
    size_t bytes = kvbm_record_bytes(&one);
    struct kvbm_events *events = make(1000, 1000, 10 * bytes);
    struct kvbm_events_stats stats = {.size = sizeof(stats)};

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    listen(events, KVBM_EVENTS_CONSOLIDATED, &recorders[1]); /* nothing here is in its scope */
    for (uint64_t round = 0; round < 3; round++) {
        size_t calls = recorders[0].n_calls, told = recorders[0].n_told;
        uint64_t from = round * 29;

        hold_up(events, &recorders[0], from);
        put(events, from + 1, 4);
        put(events, from + 5, 13); /* 6 fit */
        put(events, from + 18, 1);
        stats = stats_of(events);
        assert_int_equal(stats.queued_bytes, 10 * bytes);
        assert_int_equal(stats.dropped, 8 * (round + 1));
        pthread_mutex_unlock(&recorders[0].gate);
        wait_calls(&recorders[0], calls + 2); /* what was in front of the gap is taken */
        flush(events);
        put(events, from + 19, 10);
        flush(events);
        assert_int_equal(recorders[0].n_told - told, 21);
        for (size_t i = 0; i < 11; i++)
            assert_int_equal(told_key(&recorders[0], told + i), from + i);
        for (size_t i = 11; i < 21; i++) {
            assert_int_equal(told_key(&recorders[0], told + i), from + 8 + i);
            assert_int_equal(recorders[0].told[told + i].sequence, from + 8 + i);
        }
    }
    for (size_t s = 0; s < 2; s++) {
        uint64_t lost = 0, times = 0;

        for (size_t i = 0; i < recorders[s].n_calls; i++) {
            const struct call *call = &recorders[s].calls[i];

            lost += call->lost;
            times += call->lost > 0;
            if (call->lost && s == 0) /* right in front of the 10 */
                assert_int_equal(recorders[0].told[call->first].sequence % 29, 19);
        }
        assert_int_equal(lost, 24);
        assert_int_equal(times, 3);
    }
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* A loss that nothing follows is told all the same, after the window and by a flush. */
static void test_lost_last(void **state)
{
    struct kvbm_events *events = make(0, 20 * 1000, 1);
    struct recorder *r = &recorders[0];

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, r);
    put(events, 0, 3); /* nothing fits */
    wait_calls(r, 1);
    assert_int_equal(r->calls[0].n, 0);
    assert_int_equal(r->calls[0].lost, 3);
    assert_int_equal(kvbm_events_destroy(events), 0);

    events = make(0, FOREVER_US, 1);
    listen(events, KVBM_EVENTS_PER_TIER, r);
    put(events, 0, 2);
    flush(events);
    assert_int_equal(r->n_calls, 2);
    assert_int_equal(r->calls[1].lost, 2);
    put(events, 2, 1);
    assert_int_equal(stats_of(events).batches, 0);
    assert_int_equal(kvbm_events_destroy(events), 0); /* tells it, too */
    assert_int_equal(r->n_calls, 3);
    assert_int_equal(r->calls[2].lost, 1);
}

static void put_again(struct kvbm_events *events, uint64_t key, size_t n)
{
    const uint32_t token = 1;

    for (size_t i = 0; i < n; i++) {
        struct kvbm_event event = {.type = KVBM_EVENT_STORED,
                                   .again = true,
                                   .key_len = 8,
                                   .key = &key,
                                   .n_tokens = 1,
                                   .tokens = &token};

        kvbm_events_put(events, &event);
    }
}

/* A lost change that was told before is no loss to sinks that don't get such changes: their numbers have
 * no gap. The others are told. */
static void test_lost_again(void **state)
{
    static const struct kvbm_sink_ops ops = {.fn = record, .again = true};
    struct kvbm_event one = {.key_len = 8};
    struct kvbm_events *events = make(1000, FOREVER_US, kvbm_record_bytes(&one));
    uint64_t lost[2] = {0};

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    assert_true(kvbm_events_add_sink(events, KVBM_EVENTS_PER_TIER, &ops, &recorders[1]) > 0);
    kvbm_events_begin(events);
    kvbm_events_put(events, &(struct kvbm_event){
                                .type = KVBM_EVENT_STORED, .key_len = 8, .key = &(uint64_t){1}});
    put_again(events, 1, 3);
    kvbm_events_end(events);
    flush(events);
    put(events, 2, 1);
    flush(events);
    for (size_t s = 0; s < 2; s++) {
        assert_int_equal(recorders[s].n_told, 2);
        assert_int_equal(recorders[s].told[1].sequence, 1);
        for (size_t i = 0; i < recorders[s].n_calls; i++)
            lost[s] += recorders[s].calls[i].lost;
    }
    assert_int_equal(lost[0], 0);
    assert_int_equal(lost[1], 3);
    assert_int_equal(stats_of(events).dropped, 3);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* A flush waits for the loss of changes told again, too, however few others there were. */
static void test_flush_tells_lost_again(void **state)
{
    static const struct kvbm_sink_ops ops = {.fn = record, .again = true};

    (void)state;
    for (size_t round = 0; round < 100; round++) {
        struct kvbm_events *events = make(1000, FOREVER_US, 1); /* nothing fits */

        recorders[0].n_calls = 0;
        assert_true(kvbm_events_add_sink(events, KVBM_EVENTS_PER_TIER, &ops, &recorders[0]) > 0);
        kvbm_events_begin(events);
        put_again(events, 1, 3);
        kvbm_events_end(events);
        flush(events);
        assert_int_equal(n_calls(&recorders[0]), 1);
        assert_int_equal(recorders[0].calls[0].lost, 3);
        assert_int_equal(kvbm_events_destroy(events), 0);
    }
}

/* -- sinks that come and go -------------------------------------------------------------------- */

struct removal {
    struct kvbm_events *events;
    int id;
    atomic_bool done;
};

static void *remove_it(void *arg)
{
    struct removal *removal = arg;

    assert_int_equal(kvbm_events_remove_sink(removal->events, removal->id), 0);
    atomic_store(&removal->done, true);
    return NULL;
}

/* Removing waits for the callback that runs; afterwards it isn't called any more. */
static void test_remove_while_running(void **state)
{
    struct kvbm_events *events = make(0, 100, 0);
    struct removal removal = {.events = events};
    pthread_t thread;
    size_t calls;

    (void)state;
    removal.id = listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[1]);
    hold_up(events, &recorders[0], 0);
    assert_int_equal(pthread_create(&thread, NULL, remove_it, &removal), 0);
    usleep(50 * 1000);
    assert_false(atomic_load(&removal.done));
    pthread_mutex_unlock(&recorders[0].gate);
    pthread_join(thread, NULL);
    calls = n_calls(&recorders[0]);
    put(events, 1, 5);
    flush(events);
    assert_int_equal(n_calls(&recorders[0]), calls);
    assert_int_equal(recorders[1].n_told, 6);
    assert_int_equal(kvbm_events_remove_sink(events, removal.id), -ENOENT);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* Invalid numbers return the errors that the header names. */
static void test_numbers_out_of_range(void **state)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts), .max_batch = 65537};
    struct kvbm_events *events = NULL;

    (void)state;
    assert_int_equal(kvbm_events_create(&opts, &events), -EINVAL);
    assert_null(events);
    opts.max_batch = 65536;
    assert_int_equal(kvbm_events_create(&opts, &events), 0);
    assert_int_equal(kvbm_events_remove_sink(events, -1), -EINVAL); /* what a failed add returned */
    assert_int_equal(kvbm_events_remove_sink(events, 0), -EINVAL);
    assert_int_equal(kvbm_events_remove_sink(events, 1), -ENOENT);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static struct kvbm_events *own;
static int own_id, own_calls;

static void meddle(void *arg, const struct kvbm_event *batch, size_t n, uint64_t lost)
{
    (void)arg, (void)batch, (void)n, (void)lost;
    own_calls++;
    assert_int_equal(kvbm_events_remove_sink(own, own_id), -EDEADLK);
    assert_int_equal(kvbm_events_add_callback(own, KVBM_EVENTS_PER_TIER, meddle, NULL), -EDEADLK);
    assert_int_equal(kvbm_events_flush(own, 10), -EDEADLK);
    assert_int_equal(kvbm_events_destroy(own), -EDEADLK);
}

static void test_from_its_own_callback(void **state)
{
    (void)state;
    own = make(0, 0, 0);
    own_calls = 0;
    own_id = kvbm_events_add_callback(own, KVBM_EVENTS_PER_TIER, meddle, NULL);
    put(own, 0, 1);
    flush(own);
    assert_int_equal(own_calls, 1);
    assert_int_equal(kvbm_events_remove_sink(own, own_id), 0);
    assert_int_equal(kvbm_events_destroy(own), 0);
}

static void test_bad_arguments(void **state)
{
    struct kvbm_events *events = make(65536, 0, 0);
    struct kvbm_event_ring *ring;
    int ids[16];

    (void)state;
    for (size_t i = 0; i < 16; i++)
        ids[i] = listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    assert_int_equal(kvbm_events_add_callback(events, KVBM_EVENTS_PER_TIER, record, NULL), -ENOSPC);
    assert_int_equal(kvbm_events_add_ring(events, KVBM_EVENTS_PER_TIER, 0, &ring), -ENOSPC);
    assert_int_equal(kvbm_events_remove_sink(events, ids[3]), 0);
    assert_int_equal(kvbm_events_remove_sink(events, ids[3]), -ENOENT);
    assert_int_equal(kvbm_events_add_callback(events, 2, record, NULL), -EINVAL);
    assert_int_equal(kvbm_events_add_callback(events, 0, NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_events_add_ring(events, 0, UINT64_MAX, &ring), -ENOMEM);
    assert_int_equal(kvbm_events_remove_sink(events, 0), -EINVAL);
    assert_int_equal(kvbm_events_flush(NULL, 1), -EINVAL);
    assert_int_equal(kvbm_events_create(NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_events_destroy(events), 0);
    assert_int_equal(kvbm_events_destroy(NULL), 0);
}

/* -- the end ----------------------------------------------------------------------------------- */

static void test_destroy_drains(void **state)
{
    struct kvbm_events *events = make(4, FOREVER_US, 0);

    (void)state;
    listen(events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    put(events, 0, 3);
    hold_up(events, &recorders[0], 3); /* a full batch */
    put(events, 4, 3);
    pthread_mutex_unlock(&recorders[0].gate);
    put(events, 7, 3);
    assert_int_equal(kvbm_events_destroy(events), 0);
    assert_int_equal(recorders[0].n_told, 10);
    for (size_t i = 0; i < 10; i++)
        assert_int_equal(told_key(&recorders[0], i), i);
}

static void test_destroy_while_used(void **state)
{
    struct two_tiers t;

    (void)state;
    open_two_tiers(&t, make(0, 0, 0));
    listen(t.events, KVBM_EVENTS_PER_TIER, &recorders[0]);
    assert_int_equal(kvbm_events_destroy(t.events), -EBUSY);
    bm_leave(t.bm.pool, 1);
    flush(t.events);
    assert_int_equal(recorders[0].n_told, 1);
    close_two_tiers(&t); /* forgets it: told before the end */
    assert_int_equal(recorders[0].n_told, 2);
}

/* -- threads ----------------------------------------------------------------------------------- */

enum { WRITERS = 4, KEYS = 64 };
static struct {
    struct kvbm_events *events;
    uint64_t next_sequence;
    uint64_t stored[WRITERS], removed[WRITERS];
    bool there[WRITERS][KEYS];
} shared;

/* Each key comes and goes in turn, whoever else writes. */
static void check_turns(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    (void)arg;
    assert_int_equal(lost, 0);
    for (size_t i = 0; i < n; i++) {
        uint64_t key, who;

        memcpy(&key, events[i].key, 8);
        who = key / KEYS - 1;
        assert_true(who < WRITERS);
        assert_true(events[i].sequence == shared.next_sequence++);
        assert_int_equal(shared.there[who][key % KEYS], events[i].type == KVBM_EVENT_REMOVED);
        shared.there[who][key % KEYS] = events[i].type == KVBM_EVENT_STORED;
        if (events[i].type == KVBM_EVENT_STORED)
            shared.stored[who]++;
        else
            shared.removed[who]++;
    }
}

static void *write_many(void *arg)
{
    uint64_t who = (uint64_t)(uintptr_t)arg, state = who + 1;
    size_t rounds = unit_rounds(20000);
    struct bm bm = {0};
    struct kvbm_registry_opts opts = {.size = sizeof(opts), .events = shared.events};

    assert_int_equal(kvbm_registry_create(&opts, &bm.registry), 0);
    bm.pool = bm_pool(&bm, NULL);
    for (size_t i = 0; i < rounds; i++) {
        bm_leave(bm.pool, who * KEYS + unit_below(&state, KEYS));
        if (i % 1000 == 0)
            flush(shared.events);
    }
    assert_int_equal(kvbm_pool_destroy(bm.pool), 0);
    assert_int_equal(kvbm_registry_destroy(bm.registry), 0);
    return NULL;
}

static void *come_and_go(void *arg)
{
    atomic_bool *stop = arg;

    while (!atomic_load(stop)) {
        struct kvbm_event_ring *ring;
        struct kvbm_event some[16];
        int id = kvbm_events_add_ring(shared.events, KVBM_EVENTS_CONSOLIDATED, 4096, &ring);

        assert_true(id > 0);
        for (int i = 0; i < 20; i++)
            assert_true(kvbm_event_ring_drain(ring, some, 16, NULL) >= 0);
        assert_int_equal(kvbm_events_remove_sink(shared.events, id), 0);
    }
    return NULL;
}

static void test_many_registries(void **state)
{
    pthread_t threads[WRITERS], other;
    atomic_bool stop = false;

    (void)state;
    memset(&shared, 0, sizeof(shared));
    shared.events = make(100, 200, UINT64_C(1) << 30);
    assert_true(kvbm_events_add_callback(shared.events, 0, check_turns, NULL) > 0);
    assert_int_equal(pthread_create(&other, NULL, come_and_go, &stop), 0);
    for (uintptr_t i = 0; i < WRITERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, write_many, (void *)(i + 1)), 0);
    for (size_t i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&stop, true);
    pthread_join(other, NULL);
    assert_int_equal(stats_of(shared.events).dropped, 0);
    assert_int_equal(kvbm_events_destroy(shared.events), 0);
    for (size_t i = 0; i < WRITERS; i++) {
        assert_true(shared.stored[i] > 0);
        assert_true(shared.stored[i] == shared.removed[i]); /* they balance */
    }
}

#define T(name) cmocka_unit_test_setup(name, set_up)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_order),
        T(test_batches_by_size),
        T(test_batches_by_window),
        T(test_nothing_is_no_batch),
        T(test_flush),
        T(test_single_handle),
        T(test_one_register_is_one_batch),
        T(test_scopes),
        T(test_lost),
        T(test_lost_last),
        T(test_lost_again),
        T(test_flush_tells_lost_again),
        T(test_remove_while_running),
        T(test_numbers_out_of_range),
        T(test_from_its_own_callback),
        T(test_bad_arguments),
        T(test_destroy_drains),
        T(test_destroy_while_used),
        T(test_many_registries),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
