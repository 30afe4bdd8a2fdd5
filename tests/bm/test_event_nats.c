// SPDX-License-Identifier: Apache-2.0
/* The NATS sink and a follower beside the registry: whatever is lost between them, after quiet the
 * follower has what kvbm_registry_locate tells. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/xxh.h"
#include "bm/bm.h"
#include "kv_hash.h"
#include "plane/follow.h"
#include "plane/nats_unit.h"
#include "plane/record.h"

#define N_KEYS 600
#define N_BLOCKS 100

static struct nats_server server;

/* The follower's state: tiers by key. Its callbacks run under the follower's lock. */
struct view {
    pthread_mutex_t lock;
    uint8_t tiers[N_KEYS];
    bool whole;
    uint64_t resets, wrong; /* records that contradict what the test publishes */
};

static void reset(void *arg, const char *publisher)
{
    struct view *view = arg;

    assert_string_equal(publisher, "kvasir.c.m.t.w");
    pthread_mutex_lock(&view->lock);
    memset(view->tiers, 0, sizeof(view->tiers));
    view->resets++;
    pthread_mutex_unlock(&view->lock);
}

static void record(void *arg, const struct kvp_header *header, const struct kvp_record *r)
{
    struct view *view = arg;
    uint64_t key;

    (void)header;
    memcpy(&key, r->key, sizeof(key));
    pthread_mutex_lock(&view->lock);
    view->wrong += r->key_len != 8 || key >= N_KEYS || r->block_bytes != 4096;
    view->wrong += r->volume != kvp_volume(r->tier == KV_TIER_HOST ? "shared" : "c/w/device");
    if (r->event == KVP_STORE)
        view->tiers[key % N_KEYS] |= (uint8_t)(1 << r->tier);
    else
        view->tiers[key % N_KEYS] &= (uint8_t) ~(1 << r->tier);
    pthread_mutex_unlock(&view->lock);
}

static void whole(void *arg, const char *publisher, bool is)
{
    struct view *view = arg;

    (void)publisher;
    pthread_mutex_lock(&view->lock);
    view->whole = is;
    pthread_mutex_unlock(&view->lock);
}

static const struct kvp_follow_ops ops = {.reset = reset, .record = record, .whole = whole};

/* A publisher: a registry with pools of two tiers, and its sink. */
struct publisher {
    struct kvbm_events *events;
    struct kvbm_nats_sink *sink;
    struct kvbm_registry *registry;
    struct kvbm_pool *pools[2];
};

static void publisher_open(struct publisher *p, const struct kvbm_nats_opts *more,
                           uint64_t queue_bytes, uint64_t client_bytes)
{
    struct kvbm_events_opts events = {
        .size = sizeof(events), .window_us = 200, .queue_bytes = queue_bytes};
    struct kvp_nats_opts to = {
        .size = sizeof(to), .url = server.url, .reconnect_ms = 20, .queue_bytes = client_bytes};
    struct kvbm_nats_opts opts = *more;

    opts.size = sizeof(opts);
    opts.server = &to;
    opts.cluster = "c", opts.model = "m", opts.tenant = "t", opts.worker = "w";
    opts.volumes[KV_TIER_HOST] = "shared";
    opts.block_bytes = 4096;
    assert_int_equal(kvbm_events_create(&events, &p->events), 0);
    assert_true(kvbm_events_add_nats(p->events, &opts, &p->sink) > 0);
    assert_int_equal(
        kvbm_registry_create(&(struct kvbm_registry_opts){.size = sizeof(struct kvbm_registry_opts),
                                                          .events = p->events},
                             &p->registry),
        0);
    for (int i = 0; i < 2; i++) {
        struct kvbm_pool_opts pool = {.size = sizeof(pool),
                                      .name = i ? "host" : "device",
                                      .tier = i ? KV_TIER_HOST : KV_TIER_DEVICE,
                                      .n_blocks = N_BLOCKS,
                                      .block_size = BM_BLOCK};

        assert_int_equal(kvbm_pool_create(p->registry, &pool, &p->pools[i]), 0);
    }
}

static void publisher_close(struct publisher *p)
{
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvbm_pool_destroy(p->pools[i]), 0);
    assert_int_equal(kvbm_registry_destroy(p->registry), 0);
    assert_int_equal(kvbm_events_destroy(p->events), 0);
}

static struct kvbm_nats_stats stats_of(const struct publisher *p)
{
    struct kvbm_nats_stats stats = KVBM_NATS_STATS_INIT;

    assert_int_equal(kvbm_nats_get_stats(p->sink, &stats), 0);
    return stats;
}

static void churn(struct publisher *p, uint64_t *seed, size_t n)
{
    while (n--)
        bm_leave(p->pools[unit_below(seed, 2)], unit_below(seed, N_KEYS));
}

static bool agrees(struct publisher *p, struct view *view)
{
    uint64_t keys[N_KEYS];
    uint8_t tiers[N_KEYS];
    bool same;

    for (uint64_t i = 0; i < N_KEYS; i++)
        keys[i] = i;
    assert_int_equal(kvbm_registry_locate(p->registry, 0, keys, N_KEYS, tiers), 0);
    pthread_mutex_lock(&view->lock);
    same = view->whole && memcmp(tiers, view->tiers, sizeof(tiers)) == 0;
    pthread_mutex_unlock(&view->lock);
    return same;
}

static struct kvp_follow *follow(struct view *view)
{
    struct kvp_nats_opts from = {.size = sizeof(from), .url = server.url, .reconnect_ms = 20};
    struct kvp_follow_opts opts = {.server = &from, .retry_ms = 50};
    struct kvp_follow *follow;

    pthread_mutex_init(&view->lock, NULL);
    assert_int_equal(kvp_follow_open(&opts, &ops, view, &follow), 0);
    return follow;
}

static struct kvp_follow_stats follow_stats(struct kvp_follow *follow)
{
    struct kvp_follow_stats stats;

    kvp_follow_get_stats(follow, &stats);
    return stats;
}

static void start(void)
{
    nats_or_skip();
    nats_make(&server, "");
    nats_start(&server);
}

static int stop(void **state)
{
    (void)state;
    nats_end(&server);
    return 0;
}

/* A follower that comes late learns all by one snapshot, and follows from there without another. */
static void agree_in_form(bool json)
{
    struct kvbm_nats_opts opts = {.window_ms = 20, .max_bytes = 2048, .json = json};
    struct view view = {.resets = 0};
    struct kvp_follow *follower;
    uint64_t seed = unit_seed();
    struct publisher p;

    start();
    publisher_open(&p, &opts, 0, 0);
    churn(&p, &seed, 300);
    follower = follow(&view);
    wait_until(agrees(&p, &view));
    for (size_t round = 0; round < unit_rounds(20); round++) {
        churn(&p, &seed, 100);
        wait_until(agrees(&p, &view));
    }
    assert_int_equal(follow_stats(follower).gaps, 0);
    assert_int_equal(view.resets, 1);
    assert_int_equal(view.wrong, 0);
    assert_int_equal(follow_stats(follower).bad, 0);
    assert_int_equal(stats_of(&p).dropped + stats_of(&p).lost, 0);
    assert_int_equal(stats_of(&p).snapshots, 1);
    kvp_follow_close(follower);
    publisher_close(&p);
}

static void test_follow(void **state)
{
    (void)state;
    agree_in_form(false);
}

static void test_follow_json(void **state)
{
    (void)state;
    agree_in_form(true);
}

static void hold_up(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    atomic_bool *held = arg;

    (void)events, (void)n, (void)lost;
    while (atomic_load(held))
        usleep(500);
}

/* Messages are dropped while there is no server: each flush makes one. */
static void lose_messages(struct publisher *p, uint64_t *seed)
{
    nats_kill(&server);
    wait_until(!stats_of(p).connected);
    for (int i = 0; i < 60; i++) {
        churn(p, seed, 10);
        assert_int_equal(kvbm_events_flush(p->events, 60000), 0);
    }
    nats_start(&server);
}

/* Events are lost in the manager's queue, messages in the client's, connections with the server. */
static void test_losses(void **state)
{
    struct kvbm_nats_opts opts = {.window_ms = 5, .max_bytes = 1024};
    struct view view = {.resets = 0};
    struct kvp_follow *follower;
    uint64_t seed = unit_seed();
    atomic_bool held = false;
    struct publisher p;

    (void)state;
    start();
    publisher_open(&p, &opts, 2000, 16000);
    assert_true(kvbm_events_add_callback(p.events, KVBM_EVENTS_PER_TIER, hold_up, &held) > 0);
    follower = follow(&view);
    wait_until(agrees(&p, &view));
    for (size_t round = 0; round < KV_MAX(unit_rounds(15), (size_t)3); round++) {
        churn(&p, &seed, 200);
        if (round % 3 == 1)
            lose_messages(&p, &seed);
        atomic_store(&held, round % 3 == 2);
        churn(&p, &seed, 200);
        atomic_store(&held, false);
        wait_until(agrees(&p, &view));
    }
    assert_true(stats_of(&p).dropped > 0);
    assert_true(stats_of(&p).lost > 0);
    assert_true(follow_stats(follower).gaps > 0);
    assert_true(view.resets > 1);
    assert_int_equal(view.wrong, 0);
    kvp_follow_close(follower);
    publisher_close(&p);
}

/* Store the blocks of keys @from on, those of even keys in the first pool; nothing is lost. */
static void store_slowly(struct publisher *p, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        bm_leave(p->pools[i % 2], i);
        assert_int_equal(kvbm_events_flush(p->events, 60000), 0);
    }
}

/*
 * Lost removals leave blocks in the sink's table, which has just enough room for all that the pools hold.
 * The snapshot that the loss brings about frees them.
 */
static void test_table_after_losses(void **state)
{
    struct kvbm_nats_opts opts = {.window_ms = 5, .max_blocks = 2 * N_BLOCKS};
    struct kvbm_nats_stats before;
    struct view view = {.resets = 0};
    struct kvp_follow *follower;
    uint64_t seed = unit_seed();
    atomic_bool held = false;
    struct publisher p;

    (void)state;
    start();
    publisher_open(&p, &opts, 2000, 0);
    assert_true(kvbm_events_add_callback(p.events, KVBM_EVENTS_PER_TIER, hold_up, &held) > 0);
    follower = follow(&view);
    wait_until(agrees(&p, &view));
    for (int round = 0; round < 10; round++) {
        atomic_store(&held, true);
        for (uint64_t i = 0; i < 400; i++) {
            uint64_t key = unit_below(&seed, 4 * N_BLOCKS); /* twice as many as there is room for */

            bm_leave(p.pools[key % 2], key);
        }
        atomic_store(&held, false);
        wait_until(agrees(&p, &view));
    }
    before = stats_of(&p);
    assert_true(before.lost > 0);
    /* all requests are answered: the table is tidy */
    wait_until(stats_of(&p).snapshots + stats_of(&p).snapshots_failed ==
               follow_stats(follower).asked);
    before = stats_of(&p);
    store_slowly(&p, 4 * N_BLOCKS, 2 * N_BLOCKS); /* the pools are full of these alone */
    assert_int_equal(stats_of(&p).lost, before.lost);
    assert_int_equal(stats_of(&p).forgotten, before.forgotten);
    wait_until(agrees(&p, &view));
    kvp_follow_close(follower);
    publisher_close(&p);
}

/* Another start of a publisher is seen, and what the first one had is forgotten. */
static void test_restart(void **state)
{
    struct kvbm_nats_opts opts = {.window_ms = 5};
    struct view view = {.resets = 0};
    struct kvp_follow *follower;
    uint64_t seed = unit_seed();
    struct publisher p;

    (void)state;
    start();
    follower = follow(&view);
    for (unsigned i = 0; i < 3; i++) {
        publisher_open(&p, &opts, 0, 0);
        churn(&p, &seed, 150);
        wait_until(agrees(&p, &view));
        assert_int_equal(follow_stats(follower).restarts, i);
        publisher_close(&p);
    }
    kvp_follow_close(follower);
}

/* With JetStream each message of events is in the stream once, also when the server was away. */
static void test_jetstream(void **state)
{
    struct kvbm_nats_opts opts = {.window_ms = 60000, .max_bytes = 1024, .jetstream = true};
    char expect[64];
    uint64_t seed = unit_seed();
    struct kvp_nats *admin;
    struct publisher p;

    (void)state;
    nats_or_skip();
    nats_make_streams(&server);
    nats_start(&server);
    admin = nats_client(&server);
    nats_ask_stream(admin, "CREATE", "{\"name\":\"EVENTS\",\"subjects\":[\"kvasir.*.*.*.*\"]}",
                    "\"created\"");
    publisher_open(&p, &opts, 0, 0);
    churn(&p, &seed, 200);
    /* an acknowledged message is behind the ALIVE one, which nobody acknowledges */
    wait_until(stats_of(&p).messages > 2 && stats_of(&p).queued_bytes == 0);
    nats_kill(&server);
    churn(&p, &seed, 200);
    nats_start(&server);
    assert_int_equal(kvbm_events_flush(p.events, 30000), 0);
    wait_until(stats_of(&p).queued_bytes == 0);
    assert_int_equal(stats_of(&p).dropped + stats_of(&p).lost, 0);
    snprintf(expect, sizeof(expect), "\"messages\":%llu,",
             (unsigned long long)stats_of(&p).messages); /* with one ALIVE message, at the start */
    nats_ask_stream(admin, "INFO", "", expect);
    publisher_close(&p);
    kvp_nats_close(admin, 0);
}

static void test_metrics(void **state)
{
    struct kvbm_nats_opts opts = {.window_ms = 60000};
    char text[8192], expect[100];
    uint64_t seed = unit_seed(), records;
    struct publisher p;
    long len;

    (void)state;
    start();
    publisher_open(&p, &opts, 0, 0);
    churn(&p, &seed, 50);
    assert_int_equal(kvbm_events_flush(p.events, 30000), 0);
    wait_until(stats_of(&p).connected);
    do { /* its thread may still count */
        records = stats_of(&p).records;
        len = kvbm_nats_metrics(p.sink, text, sizeof(text));
    } while (records != stats_of(&p).records);
    assert_true(len > 0 && (size_t)len < sizeof(text) && (size_t)len == strlen(text));
    snprintf(expect, sizeof(expect),
             "\nkvbm_nats_records_total{publisher=\"kvasir.c.m.t.w\"} %llu\n",
             (unsigned long long)records);
    assert_true(records > 0);
    assert_non_null(strstr(text, expect));
    assert_non_null(strstr(text, "\nkvbm_nats_connected{publisher=\"kvasir.c.m.t.w\"} 1\n"));
    assert_int_equal(kvbm_nats_metrics(p.sink, text, 10), len);
    assert_int_equal(strlen(text), 9);
    assert_int_equal(kvbm_nats_metrics(p.sink, NULL, 10), -EINVAL);
    publisher_close(&p);
}

/* ---- what records say ---- */

struct seen {
    pthread_mutex_t lock;
    struct kvp_record records[64];
    uint64_t keys[64], parents[64];
    size_t n;
    uint8_t fingerprint[16];
};

static void note(void *arg, const struct kvp_header *header, const struct kvp_record *r)
{
    struct seen *seen = arg;

    pthread_mutex_lock(&seen->lock);
    memcpy(seen->fingerprint, header->fingerprint, 16);
    if (seen->n < 64) {
        seen->records[seen->n] = *r;
        memcpy(&seen->keys[seen->n], r->key, 8);
        if (r->parent)
            memcpy(&seen->parents[seen->n], r->parent, 8);
        seen->n++;
    }
    pthread_mutex_unlock(&seen->lock);
}

static void on_message(void *arg, const struct kvp_nats_msg *msg)
{
    assert_int_equal(kvp_read(msg->data, msg->len, NULL, note, arg), 0);
}

static size_t n_seen(struct seen *seen)
{
    size_t n;

    pthread_mutex_lock(&seen->lock);
    n = seen->n;
    pthread_mutex_unlock(&seen->lock);
    return n;
}

static void test_fields(void **state)
{
    struct kvbm_nats_opts opts = {
        .window_ms = 60000, .fingerprint = "f", .lora_name = "l", .cache_salt = "s"};
    static const uint32_t tokens[3 * BM_BLOCK] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const uint64_t keys[3] = {10, 11, 12}, seed = kve_seed("l", 1, "s", 1);
    struct seen seen = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct kvbm_chain chain = {
        .size = sizeof(chain), .keys = keys, .tokens = tokens, .parent = NULL};
    struct kvbm_mutable blocks[3];
    struct kvbm_complete full[3];
    struct kvbm_immutable held[3];
    struct kvp_nats *nats;
    struct kvp_nats_sub *sub;
    XXH128_canonical_t print;
    struct publisher p;

    (void)state;
    start();
    nats = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(nats, "kvasir.c.m.t.w", 0, on_message, &seen, &sub), 0);
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    publisher_open(&p, &opts, 0, 0);
    assert_int_equal(kvbm_pool_allocate(p.pools[0], 3, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_complete(p.pools[0], blocks, 3, &chain, full), 0);
    assert_int_equal(kvbm_pool_register(p.pools[0], full, 3, held), 0);
    kvbm_pool_release(p.pools[0], held, 3);
    assert_int_equal(kvbm_events_flush(p.events, 30000), 0); /* the window is a minute */
    wait_until(n_seen(&seen) == 3);
    XXH128_canonicalFromHash(&print, XXH3_128bits("f", 1));
    assert_memory_equal(seen.fingerprint, print.digest, 16);
    for (size_t i = 0; i < 3; i++) {
        const struct kvp_record *r = &seen.records[i];

        assert_int_equal(r->event, KVP_STORE);
        assert_true(seen.keys[i] == keys[i] && r->first && r->has_prefix && r->prefix == 10);
        assert_int_equal(r->position, i);
        assert_int_equal(!r->parent, i == 0);
        assert_true(i == 0 || seen.parents[i] == keys[i - 1]);
        assert_true(r->tokens_hash ==
                    kve_hash_block(seed, tokens + i * BM_BLOCK, BM_BLOCK, NULL, 0));
    }
    publisher_close(&p); /* removes all, and sends what waits */
    wait_until(n_seen(&seen) == 6);
    for (size_t i = 3; i < 6; i++)
        assert_true(seen.records[i].event == KVP_REMOVE && seen.records[i].last &&
                    seen.records[i].prefix == 10 && seen.records[i].has_tokens_hash);
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(nats, 0);
}

static void test_options(void **state)
{
    struct kvp_nats_opts to = {.size = sizeof(to), .url = "nats://127.0.0.1:1"};
    struct kvbm_nats_opts opts = KVBM_NATS_OPTS_INIT;
    struct kvbm_events *events;

    (void)state;
    assert_int_equal(kvbm_events_create(NULL, &events), 0);
    assert_int_equal(kvbm_events_add_nats(events, NULL, NULL), -EINVAL);
    opts.worker = "w";
    assert_int_equal(kvbm_events_add_nats(events, &opts, NULL), -EINVAL);
    opts.server = &to;
    opts.worker = NULL;
    assert_int_equal(kvbm_events_add_nats(events, &opts, NULL), -EINVAL);
    opts.worker = "w";
    opts.max_bytes = 1023;
    assert_int_equal(kvbm_events_add_nats(events, &opts, NULL), -EINVAL);
    opts.max_bytes = (512 << 10) + 1;
    assert_int_equal(kvbm_events_add_nats(events, &opts, NULL), -EINVAL);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_fields, stop),
        cmocka_unit_test_teardown(test_follow, stop),
        cmocka_unit_test_teardown(test_follow_json, stop),
        cmocka_unit_test_teardown(test_losses, stop),
        cmocka_unit_test_teardown(test_table_after_losses, stop),
        cmocka_unit_test_teardown(test_restart, stop),
        cmocka_unit_test_teardown(test_jetstream, stop),
        cmocka_unit_test_teardown(test_metrics, stop),
        cmocka_unit_test(test_options),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
