// SPDX-License-Identifier: Apache-2.0
/* The lane of peers with an indexer: whom it asks when the indexer names peers, lies, or doesn't answer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdatomic.h>

#include "base/core/clock.h"
#include "peer/lying_indexer.h"
#include "tier/kitchen.h"
#include "tier/peer/peer.h"

#define N_OWNERS 3u
#define LONG_MS 60000u

/* A peer that has keys 1000 * worker + i, and counts the lookups at it. */
struct owner {
    uint64_t worker;
    struct kvbm_agent *agent;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    struct kvbm_session *session; /* of the reader */
    atomic_uint n_lookups;
};

static struct owner owners[N_OWNERS]; /* workers 1, 2, 3 */
static struct lying_indexer indexer;
static struct world w;
static struct kvbm_agent *reader;
static struct kvbm_peers *peers;

static void count_lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    struct owner *owner = arg;

    (void)group;
    atomic_fetch_add(&owner->n_lookups, 1);
    for (size_t i = 0; i < n; i++) {
        uint64_t key;

        memcpy(&key, (const uint8_t *)keys + i * 8, 8);
        tiers[i] = key / 1000 == owner->worker ? KV_TIER_HOST : KVBM_NO_TIER;
    }
}

static void hold_nothing(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                         void *to)
{
    (void)arg, (void)group, (void)keys, (void)n;
    held(to, -EIO, NULL, NULL);
}

static void unhold(void *arg, void *hold)
{
    (void)arg, (void)hold;
}

static void owner_init(struct owner *owner, uint64_t worker, struct kvbm_allocator *allocator)
{
    char name[16], path[96];
    const char *at = path;
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .worker = worker,
                                        .fingerprint = "test",
                                        .listen = &at,
                                        .n_listen = 1};
    struct kvbm_block_source source = {.size = sizeof(source),
                                       .arg = owner,
                                       .lookup = count_lookup,
                                       .hold = hold_nothing,
                                       .unhold = unhold};
    const struct kvbm_layout_config config = world_block_of(4);
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .source = &source};

    *owner = (struct owner){.worker = worker};
    snprintf(name, sizeof(name), "owner-%u", (unsigned)worker);
    snprintf(path, sizeof(path), "unix:%s/%s", w.dir, name);
    assert_int_equal(kvbm_layout_allocate(&config, allocator, &owner->layout), 0);
    what.layout = owner->layout;
    assert_int_equal(kvbm_agent_create(&who, &owner->agent), 0);
    assert_int_equal(kvbm_blockset_export(owner->agent, &what, &owner->set), 0);
    assert_int_equal(kvbm_session_open(reader, path, NULL, &owner->session), 0);
}

static void owner_fini(struct owner *owner)
{
    assert_int_equal(kvbm_session_close(owner->session), 0);
    kvbm_blockset_destroy(owner->set);
    assert_int_equal(kvbm_agent_destroy(owner->agent), 0);
    kvbm_layout_destroy(owner->layout);
}

static int begin_with(uint32_t timeout_ms)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "reader", .worker = 99, .fingerprint = "test"};
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_indexer_opts asked = {.model = "m", .timeout_ms = timeout_ms};
    struct kvbm_peers_opts opts = {.size = sizeof(opts),
                                   .key_len = 8,
                                   .timeout_ms = LONG_MS,
                                   .ask_ms = LONG_MS,
                                   .indexer = &asked};

    world_init(&w, 8);
    lying_indexer_init(&indexer);
    asked.url = indexer.url;
    assert_int_equal(kvbm_agent_create(&who, &reader), 0);
    for (uint32_t i = 0; i < N_OWNERS; i++)
        owner_init(&owners[i], i + 1, &allocator);
    opts.agent = reader;
    opts.like = owners[0].layout;
    return kvbm_peers_open(&opts, &peers);
}

static int begin(void **state)
{
    (void)state;
    return begin_with(LONG_MS);
}

static int begin_hasty(void **state)
{
    (void)state;
    return begin_with(100);
}

static int end(void **state)
{
    (void)state;
    kvbm_peers_close(peers);
    for (uint32_t i = 0; i < N_OWNERS; i++)
        owner_fini(&owners[i]);
    lying_indexer_fini(&indexer);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    world_fini(&w);
    return 0;
}

static void note_done(struct kvbm_peer_batch *batch)
{
    atomic_store((_Atomic bool *)batch->arg, true);
}

/* Ask for a key. Returns the worker that has it, 0 for none. */
static uint64_t ask(uint64_t key, uint32_t group, uint64_t hinted)
{
    _Atomic bool done = false;
    struct kvbm_peer_io io = {.key = &key, .hash = kvbm_peer_hash(&key, 8, group)};
    struct kvbm_peer_batch batch = {.op = KVBM_PEER_ASK,
                                    .group = group,
                                    .worker = hinted,
                                    .ios = &io,
                                    .n = 1,
                                    .done = note_done,
                                    .arg = &done};

    assert_int_equal(kvbm_peers_submit(peers, &batch), 0);
    wait_until(atomic_load(&done));
    return io.status == 0 ? io.worker : 0;
}

/* Require how often each owner was asked since the last call. */
static void expect_lookups(uint32_t first, uint32_t second, uint32_t third)
{
    const uint32_t expected[N_OWNERS] = {first, second, third};

    for (uint32_t i = 0; i < N_OWNERS; i++)
        assert_int_equal(atomic_exchange(&owners[i].n_lookups, 0), expected[i]);
}

static struct kvbm_peers_stats stats(void)
{
    struct kvbm_peers_stats ret;

    kvbm_peers_get_stats(peers, &ret);
    return ret;
}

static void test_named(void **state)
{
    (void)state;
    lying_indexer_set(&indexer, "{\"instances\":{\"2\":{\"longest_matched\":8}}}");
    assert_int_equal(ask(2001, 0, 0), 2); /* it alone is asked */
    expect_lookups(0, 1, 0);
    assert_int_equal(stats().named, 1);
    assert_int_equal(stats().indexer_asked, 1);
    assert_int_equal(ask(2002, 0, 3), 2); /* a hint needs no indexer */
    expect_lookups(1, 1, 1);
    assert_int_equal(ask(2003, 1, 0), 2); /* nor does another group */
    expect_lookups(1, 1, 1);
    assert_int_equal(stats().indexer_asked, 1);
}

/* The indexer is wrong: names who hasn't the key, who has no session, or nobody. */
static void test_wrong(void **state)
{
    (void)state;
    lying_indexer_set(&indexer, "{\"instances\":{\"1\":{\"longest_matched\":8}}}");
    assert_int_equal(ask(2001, 0, 0), 2);
    expect_lookups(2, 1, 1);
    lying_indexer_set(&indexer, "{\"instances\":{\"7\":{\"longest_matched\":8},"
                                "\"99\":{\"longest_matched\":80}}}");
    assert_int_equal(ask(2002, 0, 0), 2);
    expect_lookups(1, 1, 1);
    lying_indexer_set(&indexer, "{\"instances\":{}}");
    assert_int_equal(ask(2003, 0, 0), 2);
    expect_lookups(1, 1, 1);
    assert_int_equal(ask(9000, 0, 0), 0);
    assert_int_equal(stats().named, 0);
    assert_int_equal(stats().indexer_failed, 0);
}

/* The indexer answers rubbish: peers are asked without it; later it isn't asked. */
static void test_rubbish(void **state)
{
    (void)state;
    atomic_store(&indexer.lie, INDEXER_NOT_JSON);
    for (uint64_t i = 0; i < 5; i++)
        assert_int_equal(ask(2000 + i, 0, 0), 2);
    expect_lookups(5, 5, 5);
    assert_int_equal(stats().indexer_failed, 3);
    assert_int_equal(stats().indexer_asked, 3);
    assert_true(stats().indexer_down);
}

/* The indexer is frozen: one deadline, then nothing until it answers a probe. */
static void test_frozen(void **state)
{
    (void)state;
    atomic_store(&indexer.lie, INDEXER_SILENT);
    for (uint64_t i = 0; i < 5; i++)
        assert_int_equal(ask(2000 + i, 0, 0), 2);
    assert_int_equal(stats().indexer_asked, 1);
    assert_true(stats().indexer_down);
    atomic_store(&indexer.lie, INDEXER_HONEST);
    lying_indexer_set(&indexer, "{\"instances\":{\"3\":{\"longest_matched\":8}}}");
    for (uint64_t i = 0; stats().indexer_down; i++) {
        assert_int_equal(ask(3000 + i, 0, 0), 3);
        usleep(20000);
    }
    expect_lookups(5 + stats().asked - 6, 5 + stats().asked - 6, stats().asked);
}

/* The end of the tier doesn't wait for an indexer that doesn't answer. */
static void test_close(void **state)
{
    uint64_t key = 2001, begun = kv_now_ns();
    _Atomic bool done = false;
    struct kvbm_peer_io io = {.key = &key, .hash = 1};
    struct kvbm_peer_batch batch = {
        .op = KVBM_PEER_ASK, .ios = &io, .n = 1, .done = note_done, .arg = &done};

    (void)state;
    atomic_store(&indexer.lie, INDEXER_SILENT);
    assert_int_equal(kvbm_peers_submit(peers, &batch), 0);
    wait_until(atomic_load(&indexer.n_requests));
    kvbm_peers_cancel_all(peers);
    wait_until(atomic_load(&done));
    assert_true(kv_now_ns() - begun < LONG_MS / 4 * KV_NS_PER_MS);
    kvbm_peers_resume(peers);
    atomic_store(&indexer.lie, INDEXER_HONEST);
    lying_indexer_set(&indexer, "{\"instances\":{\"2\":{\"longest_matched\":8}}}");
    assert_int_equal(ask(2002, 0, 0), 2);
    assert_int_equal(stats().named, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_named, begin, end),
        cmocka_unit_test_setup_teardown(test_wrong, begin, end),
        cmocka_unit_test_setup_teardown(test_rubbish, begin, end),
        cmocka_unit_test_setup_teardown(test_frozen, begin_hasty, end),
        cmocka_unit_test_setup_teardown(test_close, begin, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
