// SPDX-License-Identifier: Apache-2.0
/* Blocks from peers: a manager loads what its own tiers lack from the manager of another node. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"
#include "tier/manager/state/manager.h"

#define N 8u

static struct node owner, other;
static struct world reader;
static char peers[256];

static void reader_init(const char *at)
{
    world_init(&reader, 2 * N);
    reader.opts.fingerprint = "test";
    reader.opts.peers = at;
    reader.opts.peer_timeout_ms = 60000;
    world_start(&reader);
    world_attach(&reader, false);
}

static void reader_fini(void)
{
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(reader.m)), 0);
    assert_int_equal(world_stats(&reader).pins_now, 0);
    world_fini(&reader);
}

/* A lookup asks in the background. */
static void wait_where(uint64_t first, uint32_t i, uint8_t expected)
{
    for (uint64_t end = kv_now_ns() + 60 * KV_NS_PER_S;;) {
        uint8_t at = world_where(&reader, first, i);

        if (at == expected)
            return;
        assert_int_equal(at, KVBM_PENDING);
        assert_true(kv_now_ns() < end);
        usleep(1000);
    }
}

/* ---- loads ---- */

/* From shared memory, a unix socket and tcp; from the owner's host tier and its disk. */
static void test_loads(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) {
        struct kvbm_manager_stats stats;

        node_init(&owner, "owner", 2 * N, way == 2 ? "tcp:127.0.0.1:0" : NULL, way == 0, NULL);
        for (uint64_t first = 1000; first < 5000; first += 1000) {
            assert_int_equal(world_store(&owner.w, first, N), N);
            assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
        }
        reader_init(owner.at);
        wait_for_peers(&reader, 1);
        wait_where(4000, N - 1, KVBM_ON_PEER); /* of its host tier */
        wait_where(1000, N - 1, KVBM_ON_PEER); /* of its disk */
        wait_where(9000, 0, KVBM_MISS);
        assert_int_equal(world_load(&reader, 4000, N), N);
        assert_int_equal(world_where(&reader, 4000, N - 1), KVBM_READY);
        assert_int_equal(world_load(&reader, 1000, N), N);
        assert_int_equal(world_load(&reader, 9000, N), 0);
        stats = world_stats(&reader);
        assert_int_equal(stats.peer.hits, 2 * N);
        assert_int_equal(stats.peer.blocks_out, 2 * N);
        assert_int_equal(stats.peer.bytes_out, 2 * N * (uint64_t)BLOCK_BYTES);
        assert_int_equal(stats.peer.bad + stats.peer.failed, 0);
        assert_true(stats.peer_asked >= 2 * N);
        assert_int_equal(stats.peers_down, 0);
        reader_fini();
        node_fini(&owner);
    }
}

/* Only a part of a prompt is at the peer, and only a part of that fits into one lease. */
static void test_parts(void **state)
{
    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N - 3), N - 3);
    kvbm_blockset_destroy(owner.set);
    node_export(&owner, 13); /* 2 blocks at a time */
    reader_init(owner.at);
    wait_for_peers(&reader, 1);
    assert_int_equal(world_load(&reader, 1000, N), N - 3);
    assert_int_equal(world_where(&reader, 1000, N - 4), KVBM_READY);
    assert_int_equal(world_where(&reader, 1000, N - 3), KVBM_MISS);
    /* The rest is computed, and stored: the prompt's blocks are of one chain. */
    assert_int_equal(world_store(&reader, 1000, N), 3);
    assert_int_equal(world_load(&reader, 1000, N), N);
    reader_fini();
    node_fini(&owner);
}

/* Keys of two peers, in no sequence, with holes. */
static void test_scattered(void **state)
{
    uint32_t blocks[3 * N];
    uint64_t keys[3 * N], other_keys[N];
    struct kvbm_chain chain;

    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    node_init(&other, "other", 2 * N, NULL, false, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(world_store(&other.w, 2000, N), N);
    snprintf(peers, sizeof(peers), "%s,%s", owner.at, other.at);
    reader_init(peers);
    wait_for_peers(&reader, 2);
    world_keys(1000, keys, N);
    world_keys(2000, other_keys, N);
    for (uint32_t i = 0; i < N; i++) {
        keys[2 * N + i] = other_keys[N - 1 - i];
        keys[N + i] = 777000 + i; /* nobody's */
    }
    for (uint32_t i = 0; i < 3 * N; i++)
        blocks[i] = i;
    chain = world_chain(keys);
    chain.scattered = true;
    world_wipe(&reader);
    assert_int_equal(kvbm_cache_load(reader.cache, &chain, 3 * N, blocks, 60000), N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&reader, i, keys[i]));
    chain.keys = keys + 2 * N;
    assert_int_equal(kvbm_cache_load(reader.cache, &chain, N, blocks, 60000), N);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&reader, i, keys[2 * N + i]));
    reader_fini();
    node_fini(&owner);
    node_fini(&other);
}

/* Keys that nobody has evict nothing: peers are asked before host blocks are taken. */
static void test_misses_evict_nothing(void **state)
{
    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    reader_init(owner.at);
    wait_for_peers(&reader, 1);
    assert_int_equal(world_store(&reader, 1000, 2 * N), 2 * N);
    for (uint64_t first = 10000; first < 60000; first += 1000)
        assert_int_equal(world_load(&reader, first, 2 * N), 0);
    for (uint32_t i = 0; i < 2 * N; i++)
        assert_int_equal(world_where(&reader, 1000, i), KVBM_READY);
    reader_fini();
    node_fini(&owner);
}

/* ---- options ---- */

static long prepared(const struct kvbm_pin_opts *opts, uint64_t first, uint64_t *from)
{
    uint64_t keys[N];
    struct kvbm_pin *pin;
    struct kvbm_chain chain = world_chain(keys);
    long ready;

    world_keys(first, keys, N);
    assert_true(kvbm_manager_prepare_load(reader.m, &chain, N, opts, &pin) >= 0);
    assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
    ready = kvbm_pin_state(pin, NULL);
    kvbm_pin_release(pin);
    *from = world_stats(&reader).peer.blocks_out;
    return ready;
}

static void test_pin_opts(void **state)
{
    struct kvbm_hint hint = KVBM_HINT_INIT;
    struct kvbm_pin_opts opts = {.size = sizeof(opts), .no_peers = true};
    uint64_t from;

    (void)state;
    node_init(&owner, "owner", 2 * N, "tcp:127.0.0.1:0", false, NULL);
    node_init(&other, "other", 2 * N, "tcp:127.0.0.1:0", false, NULL);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(world_store(&owner.w, 2000, N), N);
    assert_int_equal(world_store(&other.w, 1000, N), N);
    snprintf(peers, sizeof(peers), "%s,%s", owner.at, other.at);
    reader_init(peers);
    wait_for_peers(&reader, 2);
    assert_int_equal(prepared(&opts, 1000, &from), 0);
    assert_int_equal(from, 0);
    opts.no_peers = false;
    opts.no_fetch = true;
    assert_int_equal(prepared(&opts, 1000, &from), 0);
    opts.no_fetch = false;
    opts.deadline_ns = 1;
    assert_int_equal(prepared(&opts, 1000, &from), 0);
    assert_int_equal(from, 0);
    /* A hint names the one that is to be asked; a wrong one costs nothing. */
    opts.deadline_ns = 0;
    opts.hint = &hint;
    strcpy(hint.host, "127.0.0.1");
    hint.port = (uint16_t)atoi(strrchr(other.at, ':') + 1);
    assert_int_equal(prepared(&opts, 1000, &from), N);
    assert_int_equal(from, N);
    assert_int_equal(world_stats(&other.w).host.hits, N);
    hint.port = 1;
    assert_int_equal(prepared(&opts, 2000, &from), N);
    assert_int_equal(from, 2 * N);
    reader_fini();
    node_fini(&owner);
    node_fini(&other);
}

static void test_options(void **state)
{
    struct kvbm_manager *m;

    (void)state;
    world_init(&reader, N);
    reader.opts.peers = "nonsense";
    assert_int_equal(kvbm_manager_create(&reader.opts, &m), -EINVAL);
    reader.opts.peers = "unix:/nobody/is/here";
    world_start(&reader);
    world_attach(&reader, false);
    assert_int_equal(world_store(&reader, 1000, N), N);
    assert_int_equal(world_load(&reader, 1000, N), N);
    assert_int_equal(world_load(&reader, 2000, N), 0);
    assert_int_equal(world_stats(&reader).peers_now, 0);
    reader_fini();
}

/* ---- both ways ---- */

/* Two managers that follow each other: what neither has is a miss at once, and not asked for in
 * circles. */
static void test_both_ways(void **state)
{
    char at[96];

    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    snprintf(at, sizeof(at), "%s", owner.at);
    node_init(&other, "other", 2 * N, NULL, true, at);
    /* The first one uses the session that the other has opened. */
    kvbm_blockset_destroy(owner.set);
    world_stop(&owner.w);
    owner.w.opts.agent = owner.agent;
    world_start(&owner.w);
    world_attach(&owner.w, false);
    node_export(&owner, 100);
    wait_for_peers(&other.w, 1);
    wait_for_peers(&owner.w, 1);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(world_store(&other.w, 2000, N), N);
    assert_int_equal(world_load(&other.w, 1000, N), N);
    assert_int_equal(world_load(&owner.w, 2000, N), N);
    assert_int_equal(world_load(&owner.w, 3000, N), 0);
    assert_int_equal(world_load(&other.w, 3000, N), 0);
    assert_true(world_stats(&owner.w).peer_asked <= 3 * N);
    assert_true(world_stats(&other.w).peer_asked <= 3 * N);
    kvbm_blockset_destroy(other.set);
    other.set = NULL;
    world_stop(&other.w); /* closes its sessions */
    world_start(&other.w);
    world_attach(&other.w, false);
    node_export(&other, 100);
    node_fini(&other);
    node_fini(&owner);
}

/* ---- ranks ---- */

static _Atomic uint32_t n_told;

static void take_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    n_told += strstr(line, "heads of another rank") != NULL;
}

static struct kvbm_shard shard_of(uint32_t rank)
{
    return (struct kvbm_shard){.rank = rank,
                               .n_ranks = 2,
                               .axis = KVBM_SHARD_HEADS,
                               .first_head = rank * HEADS,
                               .total_heads = 2 * HEADS};
}

static void export_rank(struct node *node, uint32_t rank)
{
    kvbm_blockset_destroy(node->set);
    node->shard = shard_of(rank);
    node_export(node, 100);
}

/* Two ranks under one fingerprint have the same keys, and other bytes: neither takes the other's. */
static void test_another_rank(void **state)
{
    char at[96];

    (void)state;
    kvbm_set_log(take_line, NULL);
    n_told = 0;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    export_rank(&owner, 0);
    snprintf(at, sizeof(at), "%s", owner.at);
    node_init(&other, "other", 2 * N, NULL, true, at);
    export_rank(&other, 1);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    for (uint64_t end = kv_now_ns() + 60 * KV_NS_PER_S; n_told == 0;) {
        assert_int_equal(world_load(&other.w, 1000, N), 0);
        assert_true(kv_now_ns() < end);
    }
    assert_int_equal(world_load(&other.w, 1000, N), 0);
    export_rank(&other, 0); /* a replica of the same rank */
    wait_for_peers(&other.w, 1);
    assert_int_equal(world_load(&other.w, 1000, N), N);
    node_fini(&other);
    node_fini(&owner);
    kvbm_set_log(NULL, NULL);
}

/* A manager that lends nothing has its shard in its options. */
static void test_another_rank_that_lends_nothing(void **state)
{
    struct world w;

    (void)state;
    kvbm_set_log(take_line, NULL);
    n_told = 0;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    export_rank(&owner, 0);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    world_init(&w, 2 * N);
    w.opts.peers = owner.at;
    w.opts.shard = shard_of(1);
    world_start(&w);
    world_attach(&w, false);
    for (uint64_t end = kv_now_ns() + 60 * KV_NS_PER_S; n_told == 0;) {
        assert_int_equal(world_load(&w, 1000, N), 0);
        assert_true(kv_now_ns() < end);
    }
    world_stop(&w);
    w.opts.shard = shard_of(0);
    world_start(&w);
    world_attach(&w, false);
    wait_for_peers(&w, 1);
    assert_int_equal(world_load(&w, 1000, N), N);
    world_fini(&w);
    node_fini(&owner);
    kvbm_set_log(NULL, NULL);
}

/* ---- what is gone ---- */

static uint64_t keys_told(void)
{
    struct kvbm_peers_stats stats;

    kvbm_peers_get_stats(reader.m->peers, &stats);
    return stats.gone;
}

static void wait_told(uint64_t n)
{
    wait_until(keys_told() >= n);
    assert_int_equal(keys_told(), n);
}

/* Readers hear of keys that the owner's last tier drops: by a reset, a removal, an eviction. */
static void test_gone(void **state)
{
    uint64_t keys[N];

    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    reader_init(owner.at);
    wait_for_peers(&reader, 1);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    assert_int_equal(world_store(&owner.w, 2000, N), N);
    assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
    for (uint32_t i = 0; i < N; i++)
        wait_where(1000, i, KVBM_ON_PEER);
    wait_where(2000, 0, KVBM_ON_PEER); /* asks for this one alone, as its prefix */
    /* The disk still has what leaves the host tier. */
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(owner.w.m, KV_TIER_HOST)), 2 * N);
    assert_int_equal(world_where(&reader, 1000, 0), KVBM_ON_PEER);
    assert_int_equal(keys_told(), 0);
    world_keys(1000, keys, N);
    assert_int_equal(kvbm_manager_remove(owner.w.m, 0, keys, N, 60000, NULL), 0);
    wait_told(N);
    wait_where(1000, 0, KVBM_MISS);
    assert_int_equal(world_load(&reader, 1000, N), 0);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(owner.w.m, KV_TIER_DISK)), N);
    wait_told(N + 1); /* the others were never asked for */
    /* Stored and asked for again, they are told of again. */
    assert_int_equal(world_store(&owner.w, 2000, 1), 1);
    assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
    wait_until(world_where(&reader, 2000, 0) ==
               KVBM_ON_PEER); /* "absent" is believed for a second */
    world_keys(2000, keys, 1);
    assert_int_equal(kvbm_manager_remove(owner.w.m, 0, keys, 1, 60000, NULL), 0);
    wait_told(N + 2);
    /* A program's own source tells by a call. */
    assert_int_equal(kvbm_blockset_gone(owner.set, 0, keys, 1), 0);
    wait_told(N + 3);
    assert_int_equal(kvbm_blockset_gone(NULL, 0, keys, 1), -EINVAL);
    reader_fini();
    node_fini(&owner);
}

static void wait_all_there(void)
{
    wait_until(world_where(&reader, 1000, N - 1) ==
               KVBM_ON_PEER); /* "absent" is believed for a second */
}

/* Look keys up at one lender, and wait for its answer: the lender tells of them from then on. */
static void ask_for(const char *at, const uint64_t *keys)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "asker", .fingerprint = "test"};
    struct kvbm_session *session;
    struct kvbm_agent *agent;
    uint8_t tiers[N];

    assert_int_equal(kvbm_agent_create(&who, &agent), 0);
    assert_int_equal(kvbm_session_open(agent, at, NULL, &session), 0);
    assert_int_equal(
        kvbm_session_lookup(session, 1, 0, keys, N, kv_now_ns() + 60 * KV_NS_PER_S, tiers), 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* Two agents lend the same blocks: each tells its own readers, also when an earlier agent has ended. */
static void test_gone_of_two(void **state)
{
    char at[96];
    const char *listen = at;
    const struct kvbm_agent_opts second = {.size = sizeof(second),
                                           .name = "second",
                                           .fingerprint = "test",
                                           .listen = &listen,
                                           .n_listen = 1};
    uint64_t keys[N];

    (void)state;
    world_keys(1000, keys, N);
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    snprintf(at, sizeof(at), "unix:%s/second", owner.w.dir);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    for (int round = 0; round < 2; round++) {
        struct node two = owner;

        assert_int_equal(kvbm_agent_create(&second, &two.agent), 0);
        node_export(&two, 100);
        ask_for(owner.at, keys); /* the first agent tells of the keys, and then the second, too */
        reader_init(at);
        wait_for_peers(&reader, 1);
        wait_all_there();
        if (round == 0) { /* the second agent ends, and another one takes its place */
            reader_fini();
            kvbm_blockset_destroy(two.set);
            assert_int_equal(kvbm_agent_destroy(two.agent), 0);
            continue;
        }
        /* an offload under way would leave its blocks to the tier below */
        assert_int_equal(kvbm_manager_drain(owner.w.m, 60000), 0);
        assert_int_equal(kvbm_manager_remove(owner.w.m, 0, keys, N, 60000, NULL), 0);
        wait_told(N);
        reader_fini();
        kvbm_blockset_destroy(two.set);
        assert_int_equal(kvbm_agent_destroy(two.agent), 0);
    }
    node_fini(&owner);
}

/* An owner that withdraws its set, or ends, has nothing at once. */
static void test_owner_ends(void **state)
{
    (void)state;
    node_init(&owner, "owner", 2 * N, NULL, true, NULL);
    reader_init(owner.at);
    wait_for_peers(&reader, 1);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    wait_where(1000, 0, KVBM_ON_PEER);
    kvbm_blockset_destroy(owner.set);
    wait_for_peers(&reader, 0);
    wait_where(1000, 0, KVBM_MISS); /* who lends is looked at again after 10 ms */
    assert_int_equal(world_load(&reader, 1000, N), 0);
    node_export(&owner, 100);
    wait_for_peers(&reader, 1);
    wait_until(world_load(&reader, 1000, N) == N);
    node_fini(&owner);
    wait_for_peers(&reader, 0);
    assert_int_equal(world_load(&reader, 1000, N), N); /* in its own host tier */
    assert_int_equal(world_load(&reader, 2000, N), 0);
    reader_fini();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loads),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_scattered),
        cmocka_unit_test(test_misses_evict_nothing),
        cmocka_unit_test(test_pin_opts),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_both_ways),
        cmocka_unit_test(test_another_rank),
        cmocka_unit_test(test_another_rank_that_lends_nothing),
        cmocka_unit_test(test_gone),
        cmocka_unit_test(test_gone_of_two),
        cmocka_unit_test(test_owner_ends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
