// SPDX-License-Identifier: Apache-2.0
/*
 * Holds of peers never wait for what this manager gets from peers. Two managers that each lease what
 * the other one is fetching would otherwise wait for each other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/core/clock.h"
#include "base/stalls.h"
#include "shaky_peer.h"
#include "tier/kitchen.h"

#define N 8u
#define LONG_MS 60000
#define AT_ONCE_NS (4 * KV_NS_PER_S) /* beside stalls; a hold that waits in vain takes 5 s */

/* A manager that lends, follows a peer which hangs, and has a reader. */
static struct {
    struct world w;
    struct shaky_peer shaky;
    char shaky_at[96], at[96];
    struct kvbm_agent *owner, *reader;
    struct kvbm_blockset *set;
    struct kvbm_session *session;
} t;

static uint64_t soon(void)
{
    return kv_now_ns() + LONG_MS * KV_NS_PER_MS;
}

static void open_agents(void)
{
    const char *at = t.at;
    struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "owner", .fingerprint = "test", .listen = &at, .n_listen = 1};

    assert_int_equal(kvbm_agent_create(&who, &t.owner), 0);
    who.name = "reader";
    who.n_listen = 0;
    assert_int_equal(kvbm_agent_create(&who, &t.reader), 0);
}

static void begin(bool object)
{
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 100};
    uint64_t keys[SHAKY_BLOCKS];

    memset(shaky, 0, sizeof(*shaky));
    world_keys(1000, keys, SHAKY_BLOCKS);
    world_init(&t.w, 32);
    snprintf(t.at, sizeof(t.at), "unix:%s/owner", t.w.dir);
    snprintf(t.shaky_at, sizeof(t.shaky_at), "unix:%s/shaky", t.w.dir);
    snprintf(t.w.object, sizeof(t.w.object), "shaky://%s/object", t.w.dir);
    shaky_init(&t.shaky, t.shaky_at, keys);
    shaky_be(&t.shaky, SHAKY_HANGS);
    open_agents();
    t.w.opts.fingerprint = "test";
    t.w.opts.agent = t.owner;
    t.w.opts.peers = t.shaky_at;
    t.w.opts.peer_timeout_ms = LONG_MS;
    t.w.opts.object = object ? t.w.object : NULL;
    world_start(&t.w);
    world_attach(&t.w, false);
    source = kvbm_manager_source(t.w.m);
    what.layout = kvbm_manager_host_layout(t.w.m);
    what.source = &source;
    assert_int_equal(kvbm_blockset_export(t.owner, &what, &t.set), 0);
    assert_int_equal(kvbm_session_open(t.reader, t.at, NULL, &t.session), 0);
    wait_until(world_stats(&t.w).peers_now == 1);
}

static void end(void)
{
    shaky_be(&t.shaky, SHAKY_FAILS);
    assert_int_equal(kvbm_session_close(t.session), 0);
    kvbm_blockset_destroy(t.set);
    wait_until(world_stats(&t.w).pins_now == 0);
    assert_int_equal(kvbm_registry_check(kvbm_manager_registry(t.w.m)), 0);
    world_stop(&t.w);
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
    assert_int_equal(kvbm_agent_destroy(t.owner), 0);
    world_fini(&t.w);
    shaky_fini(&t.shaky);
}

/* Begin to load @n keys which the peer says it has, and doesn't give. */
static struct kvbm_pin *begin_load(uint32_t n)
{
    uint64_t keys[SHAKY_BLOCKS];
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin = NULL;

    world_keys(1000, keys, n);
    assert_int_equal(kvbm_manager_prepare_load(t.w.m, &chain, n, NULL, &pin), n);
    return pin;
}

static uint32_t n_hanging(void)
{
    uint32_t n;

    pthread_mutex_lock(&t.shaky.lock);
    n = t.shaky.n_hanging;
    pthread_mutex_unlock(&t.shaky.lock);
    return n;
}

/* Lease keys, at once. Returns NULL when there is none of them. */
static struct kvbm_lease *lease(const uint64_t *keys, uint32_t n)
{
    struct kvbm_lease *got = NULL;
    struct stalls before = stalls_so_far();
    uint64_t from = kv_now_ns();
    int rc = kvbm_session_lease(t.session, 1, 0, keys, n, LONG_MS, soon(), &got);

    assert_int_equal(rc, got ? 0 : -ENOENT);
    assert_in_range(stalls_lateness(from, &before), 0, AT_ONCE_NS);
    return got;
}

/* A lease leaves out keys that a peer is asked for; the blocks beside them are leased at once. */
static void test_fetched(void **state)
{
    uint64_t keys[2 * N];
    struct kvbm_block_at at;
    struct kvbm_lease *got;
    struct kvbm_pin *pin;

    (void)state;
    begin(false);
    assert_int_equal(world_store(&t.w, 2000, N), N);
    pin = begin_load(N);
    wait_until(n_hanging() == 1);
    world_keys(1000, keys, N);
    world_keys(2000, keys + N, N);
    got = lease(keys, 2 * N);
    for (uint32_t i = 0; i < 2 * N; i++)
        assert_int_equal(kvbm_lease_block(got, i, &at), i < N ? -ENOENT : 0);
    kvbm_lease_release(got);
    kvbm_pin_release(pin);
    end();
}

static void *lease_one(void *arg)
{
    const uint64_t key = 1000;
    struct kvbm_lease *got = NULL;
    uint64_t *ended = arg;

    if (kvbm_session_lease(t.session, 1, 0, &key, 1, LONG_MS, soon(), &got) == -ENOENT)
        *ended = kv_now_ns();
    return NULL;
}

/* A hold waits for a store of the key; when a fetch from a peer takes the store's place, it ends. */
static void test_store_becomes_fetch(void **state)
{
    const uint64_t key = 1000;
    const struct kvbm_chain chain = world_chain(&key);
    struct kvbm_pin *store, *load;
    uint64_t ended = 0, from;
    struct stalls before;
    pthread_t thread;

    (void)state;
    begin(false);
    assert_int_equal(kvbm_manager_prepare_store(t.w.m, &chain, 1, &store), 1);
    assert_int_equal(pthread_create(&thread, NULL, lease_one, &ended), 0);
    wait_until(world_stats(&t.w).pins_now == 2);
    load = begin_load(1);
    before = stalls_so_far();
    from = kv_now_ns();
    kvbm_pin_release(store);
    pthread_join(thread, NULL);
    assert_true(ended >= from);
    assert_in_range(stalls_lateness(from, &before), 0, AT_ONCE_NS);
    kvbm_pin_release(load);
    end();
}

/* Blocks of the object store share host blocks with what comes from peers: a hold waits for no
 * share that peers have. */
static void test_share(void **state)
{
    struct kvbm_pin *pin;
    uint64_t keys[N];

    (void)state;
    begin(true);
    assert_int_equal(world_store(&t.w, 2000, N), N);
    assert_int_equal(kvbm_manager_drain(t.w.m, LONG_MS), 0);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(t.w.m, KV_TIER_HOST)), N);
    pin = begin_load(SHAKY_BLOCKS);
    wait_until(n_hanging() == 1);
    world_keys(2000, keys, N);
    assert_null(lease(keys, N));
    kvbm_pin_release(pin);
    shaky_be(&t.shaky, SHAKY_FAILS); /* the fetch under way ends */
    wait_until(world_stats(&t.w).pins_now == 0);
    kvbm_lease_release(lease(keys, N));
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fetched),
        cmocka_unit_test(test_store_becomes_fetch),
        cmocka_unit_test(test_share),
    };

    find_shaky();
    stalls_begin();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
