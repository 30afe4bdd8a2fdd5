// SPDX-License-Identifier: Apache-2.0
/* The lane of peers by itself: knowledge about keys, and what counts as a peer's failure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdatomic.h>

#include "base/core/clock.h"
#include "shaky_peer.h"
#include "tier/peer/impl.h"

#define LONG_MS 60000u

static struct {
    struct world w;
    struct shaky_peer shaky;
    struct kvbm_agent *reader;
    struct kvbm_session *session;
    struct kvbm_layout *layout;
    struct kvbm_peers *peers;
    uint64_t worker; /* of the shaky peer */
} t;

/* A batch of one key. */
struct one {
    uint64_t key;
    struct kvbm_peer_io io;
    struct kvbm_peer_batch batch;
    _Atomic bool done;
};

static void one_done(struct kvbm_peer_batch *batch)
{
    struct one *one = batch->arg;

    atomic_store(&one->done, true);
}

/* One thread asks at a time, and waits long for an answer. */
static void begin(void)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "reader", .fingerprint = "test"};
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    const struct kvbm_layout_config config = world_block_of(SHAKY_BLOCKS);
    struct kvbm_peers_opts opts = {.size = sizeof(opts),
                                   .key_len = 8,
                                   .n_threads = 2,
                                   .timeout_ms = LONG_MS,
                                   .ask_ms = LONG_MS};
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    uint64_t keys[SHAKY_BLOCKS];
    char at[96];

    world_keys(1000, keys, SHAKY_BLOCKS);
    world_init(&t.w, 8);
    snprintf(at, sizeof(at), "unix:%s/shaky", t.w.dir);
    shaky_init(&t.shaky, at, keys);
    assert_int_equal(kvbm_agent_create(&who, &t.reader), 0);
    assert_int_equal(kvbm_session_open(t.reader, at, NULL, &t.session), 0);
    assert_int_equal(kvbm_session_get_info(t.session, &info), 0);
    t.worker = info.worker;
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &t.layout), 0);
    opts.agent = t.reader;
    opts.like = t.layout;
    assert_int_equal(kvbm_peers_open(&opts, &t.peers), 0);
    assert_true(kvbm_peers_any(t.peers));
}

static void end(void)
{
    kvbm_peers_close(t.peers);
    assert_int_equal(kvbm_session_close(t.session), 0);
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
    kvbm_layout_destroy(t.layout);
    shaky_fini(&t.shaky);
    world_fini(&t.w);
}

static int submit(struct one *one, enum kvbm_peer_op op, uint64_t key, uint32_t group)
{
    *one = (struct one){.key = key};
    one->io = (struct kvbm_peer_io){.key = &one->key, .hash = kvbm_peer_hash(&one->key, 8, group)};
    one->batch = (struct kvbm_peer_batch){.op = op,
                                          .group = group,
                                          .to = t.layout,
                                          .worker = op == KVBM_PEER_GET ? t.worker : 0,
                                          .ios = &one->io,
                                          .n = 1,
                                          .done = one_done,
                                          .arg = one};
    return kvbm_peers_submit(t.peers, &one->batch);
}

static void wait_for(struct one *one)
{
    wait_until(atomic_load(&one->done));
}

static enum kvbm_known known(const struct one *one)
{
    uint64_t worker;

    return kvbm_peers_known(t.peers, one->io.hash, &worker);
}

/* A question that is cancelled, or ends otherwise without an answer, leaves nothing to wait for. */
static void test_cancelled_question(void **state)
{
    struct one first, second, again;

    (void)state;
    begin();
    shaky_be(&t.shaky, SHAKY_DEAF);
    assert_int_equal(submit(&first, KVBM_PEER_ASK, 1000, 0), 0);
    assert_int_equal(submit(&second, KVBM_PEER_ASK, 1001, 0), 0);
    assert_int_equal(submit(&again, KVBM_PEER_ASK, 1001, 0), 0);
    assert_int_equal(known(&second), KVBM_KNOWN_ASKED);
    kvbm_peers_cancel(t.peers, &second.batch);
    wait_for(&second);
    assert_int_equal(second.io.status, -ECANCELED);
    assert_int_equal(known(&second), KVBM_KNOWN_ASKED); /* by the other question */
    kvbm_peers_cancel(t.peers, &again.batch);
    wait_for(&again);
    assert_int_equal(known(&again), KVBM_KNOWN_NOT);
    assert_int_equal(known(&first), KVBM_KNOWN_ASKED);
    shaky_be(&t.shaky, SHAKY_GOOD);
    wait_for(&first);
    assert_int_equal(known(&first), KVBM_KNOWN_THERE);
    assert_int_equal(first.io.worker, t.worker);
    end();
}

/* Calls that this process gets wrong say nothing of the peer. */
static void test_own_mistakes(void **state)
{
    struct kvbm_peers_stats stats;
    struct one one;

    (void)state;
    begin();
    for (int i = 0; i < 6; i++) {
        assert_int_equal(submit(&one, KVBM_PEER_GET, 1000, KVBM_MAX_GROUPS), 0);
        wait_for(&one);
        assert_int_equal(one.io.status, -EINVAL);
    }
    kvbm_peers_get_stats(t.peers, &stats);
    assert_int_equal(stats.down, 0);
    assert_int_equal(submit(&one, KVBM_PEER_GET, 1000, 0), 0);
    wait_for(&one);
    assert_int_equal(one.io.status, 0);
    end();
}

/* A peer that answers each call with an error of its own has failed, whatever the error is. */
static void test_refuses(void **state)
{
    struct kvbm_peers_stats stats;
    struct one one;

    (void)state;
    begin();
    shaky_be(&t.shaky, SHAKY_REFUSES);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(submit(&one, KVBM_PEER_GET, 1000, 0), 0);
        wait_for(&one);
        assert_int_equal(one.io.status, -EINVAL);
    }
    kvbm_peers_get_stats(t.peers, &stats);
    assert_int_equal(stats.down, 1);
    assert_int_equal(submit(&one, KVBM_PEER_GET, 1000, 0), 0);
    wait_for(&one);
    assert_int_equal(one.io.status, -EHOSTDOWN);
    end();
}

/* Forgetting a key that isn't known takes no place of others that are. */
static void test_forgets_only_that_key(void **state)
{
    uint64_t worker = 0, until = kv_now_ns() + 60 * KV_NS_PER_S;

    (void)state;
    begin();
    pthread_mutex_lock(&t.peers->lock);
    for (uint64_t i = 0; i < KVBM_KNOWN_WAYS; i++) /* all of one set of the table */
        kvbm_known_set(t.peers, 7 + i * KVBM_KNOWN_SETS, KVBM_KNOWN_ABSENT, 0, until);
    kvbm_known_set(t.peers, 7 + KVBM_KNOWN_WAYS * KVBM_KNOWN_SETS, KVBM_KNOWN_NOT, 0, 0);
    pthread_mutex_unlock(&t.peers->lock);
    for (uint64_t i = 0; i < KVBM_KNOWN_WAYS; i++)
        assert_int_equal(kvbm_peers_known(t.peers, 7 + i * KVBM_KNOWN_SETS, &worker),
                         KVBM_KNOWN_ABSENT);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancelled_question),
        cmocka_unit_test(test_own_mistakes),
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_forgets_only_that_key),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
