// SPDX-License-Identifier: Apache-2.0
/* A peer that hangs, fails and lies: misses by the deadline, no wrong byte, and other peers' blocks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/core/clock.h"
#include "shaky_peer.h"

#define N 8u

static struct shaky_peer shaky_one;
static struct world reader, good;
static struct kvbm_agent *good_agent;
static struct kvbm_blockset *good_set;
static char shaky_at[96], good_at[96], peers[256];

static void begin(uint32_t timeout_ms)
{
    uint64_t keys[SHAKY_BLOCKS];

    world_keys(1000, keys, SHAKY_BLOCKS);
    world_init(&reader, 64);
    snprintf(shaky_at, sizeof(shaky_at), "unix:%s/shaky", reader.dir);
    snprintf(good_at, sizeof(good_at), "unix:%s/good", reader.dir);
    shaky_init(&shaky_one, shaky_at, keys);
    snprintf(peers, sizeof(peers), "%s,%s", shaky_at, good_at);
    reader.opts.peers = peers;
    reader.opts.peer_timeout_ms = timeout_ms;
}

static void begin_good(void)
{
    const char *at = good_at;
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "good", .fingerprint = "test", .listen = &at, .n_listen = 1};
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};

    world_init(&good, 2 * N);
    world_start(&good);
    world_attach(&good, false);
    assert_int_equal(world_store(&good, 2000, N), N);
    source = kvbm_manager_source(good.m);
    what.layout = kvbm_manager_host_layout(good.m);
    what.source = &source;
    assert_int_equal(kvbm_agent_create(&who, &good_agent), 0);
    assert_int_equal(kvbm_blockset_export(good_agent, &what, &good_set), 0);
}

static void end_good(void)
{
    kvbm_blockset_destroy(good_set);
    assert_int_equal(kvbm_agent_destroy(good_agent), 0);
    assert_int_equal(world_stats(&good).pins_now, 0);
    world_fini(&good);
}

static void start(uint32_t n_peers)
{
    world_start(&reader);
    world_attach(&reader, false);
    wait_until(world_stats(&reader).peers_now == n_peers);
}

static void end(void)
{
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(reader.m)), 0);
    assert_int_equal(world_stats(&reader).pins_now, 0);
    shaky_be(&shaky_one, SHAKY_FAILS);
    world_fini(&reader);
    shaky_fini(&shaky_one);
}

/* Each fault is a miss; once the peer is good, its blocks come. */
static void test_faults(void **state)
{
    static const long expected[SHAKY_N_MODES] = {[SHAKY_GOOD] = N, [SHAKY_HALF] = 1};

    (void)state;
    for (int mode = SHAKY_LIES; mode < SHAKY_N_MODES; mode++) {
        begin(300);
        start(1);
        shaky_be(&shaky_one, (enum shaky_mode)mode);
        assert_int_equal(world_load(&reader, 1000, N), expected[mode]);
        if (mode == SHAKY_HANGS)
            assert_int_equal(world_stats(&reader).peers_down, 1);
        shaky_be(&shaky_one, SHAKY_GOOD);
        for (uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S;
             world_load(&reader, 1000, N) != N;) { /* a breaker lets a probe through soon */
            assert_true(kv_now_ns() < until);
            usleep(10000);
        }
        assert_int_equal(world_stats(&reader).peers_down, 0);
        end();
    }
}

/* Wait until so many calls hang at the shaky peer. */
static void wait_hanging(uint32_t most)
{
    for (uint64_t until = kv_now_ns() + 60 * KV_NS_PER_S;; usleep(1000)) {
        uint32_t n;

        pthread_mutex_lock(&shaky_one.lock);
        n = shaky_one.n_hanging;
        pthread_mutex_unlock(&shaky_one.lock);
        if (n >= most)
            return;
        assert_true(kv_now_ns() < until);
    }
}

/* While one peer hangs, another one's blocks come, and a manager can be destroyed. */
static void test_hangs_alone(void **state)
{
    struct kvbm_pin *pins[N];
    uint64_t keys[2 * N];
    uint8_t at[1];

    (void)state;
    begin(60000);
    begin_good();
    start(2);
    shaky_be(&shaky_one, SHAKY_HANGS);
    world_keys(1000, keys, 2 * N);
    for (uint32_t i = 0; i < N; i++) {
        const struct kvbm_chain chain = world_chain(keys + i);

        assert_int_equal(kvbm_manager_prepare_load(reader.m, &chain, 1, NULL, &pins[i]), 1);
    }
    wait_hanging(N / 2); /* half of the threads wait; the other batches are queued */
    assert_int_equal(world_load(&reader, 2000, N), N);
    assert_int_equal(kvbm_pin_state(pins[0], at), 0);
    assert_int_equal(at[0], KVBM_PENDING);
    for (uint32_t i = 0; i < N; i++)
        kvbm_pin_release(pins[i]);
    end_good();
    {
        uint64_t begun = kv_now_ns();

        assert_int_equal(kvbm_cache_detach(reader.cache), 0);
        reader.cache = NULL;
        assert_int_equal(kvbm_manager_destroy(reader.m, 0), 0);
        assert_true(kv_now_ns() - begun < 30 * KV_NS_PER_S); /* its calls had 60 s */
    }
    shaky_be(&shaky_one, SHAKY_FAILS);
    world_start(&reader);
    world_attach(&reader, false);
    end();
}

/* A pin that is released while a peer hangs gives back at once what it has already. */
static void test_released(void **state)
{
    uint64_t keys[2 * N];
    const struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pool *host;
    struct kvbm_pin *pin;

    (void)state;
    begin(60000);
    start(1);
    world_keys(1000, keys, 2 * N);
    host = kvbm_manager_pool(reader.m, KV_TIER_HOST);
    assert_int_equal(world_load(&reader, 1000, N), N);
    assert_int_equal(kvbm_pool_reset_inactive(host), N);
    assert_int_equal(world_load(&reader, 1000, N), N);
    shaky_be(&shaky_one, SHAKY_HANGS);
    assert_int_equal(kvbm_manager_prepare_load(reader.m, &chain, 2 * N, NULL, &pin), 2 * N);
    wait_hanging(1);
    assert_int_equal(kvbm_pool_reset_inactive(host), 0);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_pool_reset_inactive(host), N);
    assert_int_equal(world_stats(&reader).pins_now, 1);
    shaky_be(&shaky_one, SHAKY_FAILS);
    wait_until(!world_stats(&reader).pins_now);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_hangs_alone),
        cmocka_unit_test(test_released),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
