// SPDX-License-Identifier: Apache-2.0
/* A source that holds blocks on a thread of its own, and a set that is withdrawn meanwhile. */
#include "base/core/log.h"
#include "base/unit.h"
#include "lend_unit.h"
#include "peer/session/net.h"
#include "peer/set/blockset.h"

#define READER 7

static struct {
    struct kvbm_agent *owner, *reader;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    struct kvbm_session *session; /* the reader's */
    kvbm_held_fn held;
    void *to;
    atomic_bool asked, ended;
    atomic_int n_unheld;
} t;

static void look_up(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    (void)arg, (void)group, (void)keys;
    memset(tiers, KV_TIER_DISK, n);
}

static void hold(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held, void *to)
{
    (void)arg, (void)group, (void)keys, (void)n;
    t.held = held;
    t.to = to;
    atomic_store(&t.asked, true);
}

static void unhold(void *arg, void *held)
{
    (void)arg, (void)held;
    atomic_fetch_add(&t.n_unheld, 1);
}

static void begin(void)
{
    const struct kvbm_block_source source = {
        .size = sizeof(source), .lookup = look_up, .hold = hold, .unhold = unhold};
    const char *endpoint = unix_endpoint();
    struct kvbm_agent_opts opts = session_opts("owner", &endpoint);
    struct kvbm_blockset_opts what = {
        .size = sizeof(what), .id = 1, .source = &source, .lease_share = 100};

    memset(&t, 0, sizeof(t));
    t.owner = agent_of(&opts);
    t.layout = small_layout();
    what.layout = t.layout;
    assert_int_equal(kvbm_blockset_export(t.owner, &what, &t.set), 0);
    opts = session_opts("reader", NULL);
    opts.worker = READER;
    t.reader = agent_of(&opts);
    t.session = open_session(t.reader, t.owner, 0);
}

static void end(void)
{
    kvbm_blockset_destroy(t.set);
    assert_int_equal(kvbm_session_close(t.session), 0);
    assert_int_equal(kvbm_agent_destroy(t.owner), 0);
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
    kvbm_layout_destroy(t.layout);
}

static void await(const atomic_bool *what)
{
    wait_until(atomic_load(what));
}

/* The source's thread: its blocks are there. */
static void *finish_hold(void *arg)
{
    const uint32_t block = 3;

    t.held(t.to, *(int *)arg, &block, &t);
    return NULL;
}

static void *lease_one(void *arg)
{
    const uint64_t key = 1;
    struct kvbm_lease *lease = NULL;

    (void)arg;
    (void)kvbm_session_lease(t.session, 1, 0, &key, 1, 60000, soon(), &lease);
    kvbm_lease_release(lease);
    return NULL;
}

static void *end_offer(void *arg)
{
    kvbm_offer_destroy(KV_STEAL(t.set->offer));
    atomic_store(&t.ended, true);
    return arg;
}

static uint64_t answers(void)
{
    struct kvbm_lender_stats stats;

    kvbm_lender_get_stats(t.owner->lender, &stats);
    return stats.leases;
}

/*
 * The source's thread stops before the reply: this one has the lock of the owner's session. The offer
 * must not end before that thread has let go of the lender: then the agent is free to end.
 */
static void test_withdrawn_before_the_reply(void **state)
{
    struct kvbm_session *session;
    pthread_t source, reader, ender;
    int status = 0;

    (void)state;
    begin();
    assert_int_equal(pthread_create(&reader, NULL, lease_one, NULL), 0);
    await(&t.asked);
    session = kvbm_session_find(t.owner, READER);
    assert_non_null(session);
    pthread_mutex_lock(&session->lock);
    assert_int_equal(pthread_create(&source, NULL, finish_hold, &status), 0);
    wait_until(answers());
    assert_int_equal(pthread_create(&ender, NULL, end_offer, NULL), 0);
    wait_until(atomic_load(&t.n_unheld)); /* the lease itself ends at once */
    usleep(20000);
    assert_false(atomic_load(&t.ended));
    pthread_mutex_unlock(&session->lock);
    pthread_join(source, NULL);
    await(&t.ended);
    pthread_join(ender, NULL);
    pthread_join(reader, NULL);
    kvbm_session_put(session);
    end();
}

/* Sets are withdrawn, and agents end, as soon as the source has answered; also with an error. */
static void test_withdrawn_beside_the_answer(void **state)
{
    (void)state;
    for (long i = test_rounds(100); i > 0; i--) {
        int status = i % 2 ? 0 : -EIO;
        pthread_t source, reader;

        begin();
        assert_int_equal(pthread_create(&reader, NULL, lease_one, NULL), 0);
        await(&t.asked);
        assert_int_equal(pthread_create(&source, NULL, finish_hold, &status), 0);
        kvbm_blockset_destroy(KV_STEAL(t.set));
        assert_int_equal(kvbm_agent_destroy(KV_STEAL(t.owner)), 0);
        pthread_join(source, NULL);
        pthread_join(reader, NULL);
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_withdrawn_before_the_reply),
        cmocka_unit_test(test_withdrawn_beside_the_answer),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
