// SPDX-License-Identifier: Apache-2.0
/*
 * Readers that lease and never read: they keep others from the share that is lent, no longer than their
 * leases last, and no memory or block of the owner for longer than it gives a socket that isn't read.
 */
#include "base/core/log.h"
#include "base/unit.h"
#include "lend_unit.h"
#include "peer/lease/lease_wire.h"
#include "raw_peer.h"

#define N_READS 8u
#define LEASED 16u /* blocks of 64 KiB: the owner's share */

static struct lending owner;
static struct raw raw;

static void begin(void)
{
    const char *endpoint = unix_endpoint();
    const struct kvbm_agent_opts opts = session_opts("owner", &endpoint);
    struct kvbm_layout_config config = small_config();

    config.num_blocks = N_BLOCKS;
    config.page_size = 16;
    config.inner_dim = 512;
    kv_log_set_level(KV_LOG_ERROR);
    lend_init_with(&owner, &opts, config, false);
}

static void end(void)
{
    lend_fini(&owner);
    kv_log_set_level(KV_LOG_WARN);
}

/* Lease all that is lent, for @time_ms, by a plain socket. Returns the lease's id. */
static uint64_t lease_all(uint32_t time_ms)
{
    struct kvbm_asked asked = {.set = 1, .n = LEASED, .time_ms = time_ms, .generation = 1};
    struct kv_buf body = KV_BUF_INIT;
    uint64_t keys[LEASED];
    struct kvbm_told told;

    for (uint32_t i = 0; i < LEASED; i++)
        keys[i] = 1 + i;
    asked.keys = (const uint8_t *)keys;
    kvbm_asked_write(&body, &asked, 8);
    raw_say(&raw, KVBM_ASK_LEASE, 1, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
    assert_true(raw_until(&raw, KVBM_ASK_LEASE));
    assert_int_equal(raw.frame.status, 0);
    assert_int_equal(kvbm_told_read(raw.body, raw.frame.len, LEASED, &told), 0);
    assert_int_equal(told.n, LEASED);
    assert_int_equal(lend_pinned(&owner), LEASED);
    return told.id;
}

/* An honest reader gets a block of those that were leased. */
static long read_one(uint32_t *n_refused)
{
    const uint64_t key = 3;
    const uint32_t block = 0;
    struct kvbm_layout *to = allocate(&owner.layout->config, KVBM_STORAGE_SYSTEM);
    struct kvbm_lease_read_opts opts = {
        .size = sizeof(opts), .to = to, .to_blocks = &block, .n = 1, .deadline_ns = soon()};
    struct kvbm_agent *reader = agent_at("reader", NULL);
    struct kvbm_session *session = open_session(reader, owner.agent, 0);
    struct kvbm_lease *lease = NULL;
    uint64_t end = soon();
    int err;
    long rc;

    *n_refused = 0;
    while ((err = kvbm_session_lease(session, 1, 0, &key, 1, 0, soon(), &lease)) == -ENOSPC) {
        assert_true(kv_now_ns() < end);
        ++*n_refused;
        usleep(10000);
    }
    assert_int_equal(err, 0);
    rc = kvbm_lease_read(lease, &opts);
    assert_true(rc != 1 || lend_holds(to, 0, key));
    kvbm_lease_release(lease);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    kvbm_layout_destroy(to);
    return rc;
}

/* The session stays, and its lease ends by itself. */
static void test_never_reads(void **state)
{
    uint32_t n_refused;

    (void)state;
    begin();
    raw_open(&raw, endpoint_of(owner.agent), "deaf");
    (void)lease_all(300);
    assert_int_equal(read_one(&n_refused), 1);
    assert_true(n_refused > 0);
    lend_wait_idle(&owner);
    raw_say(&raw, KVBM_PING, 0, NULL, 0);
    assert_true(raw_until(&raw, KVBM_PONG));
    close(raw.fd);
    end();
}

/* Ask for all blocks of a lease many times, and don't take what is sent. */
static void ask_and_take_nothing(uint64_t id)
{
    struct kv_buf body = KV_BUF_INIT;
    uint32_t places[LEASED];

    for (uint32_t i = 0; i < LEASED; i++)
        places[i] = i;
    kvbm_wanted_write(&body, id, true, places, LEASED);
    for (uint64_t i = 0; i < N_READS; i++)
        raw_say(&raw, KVBM_ASK_READ, 2 + i, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
}

static void release(uint64_t id)
{
    struct kv_buf body = KV_BUF_INIT;

    kvbm_number_write(&body, id);
    raw_say(&raw, KVBM_ASK_RELEASE, 0, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
}

/*
 * The reader doesn't take what is sent: its lease is over, by its time or since the reader releases it, and
 * what is on the way keeps the blocks held. The owner gives that up, with the session.
 */
static void check_deaf(bool releases)
{
    uint32_t n_refused;
    uint64_t id, begun;

    begin();
    raw_open(&raw, endpoint_of(owner.agent), "deaf");
    id = lease_all(releases ? 60000 : 300);
    begun = kv_now_ns();
    ask_and_take_nothing(id);
    for (int i = 0; releases && i < 3; i++)
        release(id);
    assert_int_equal(read_one(&n_refused), 1);
    assert_true(n_refused > 0);
    lend_wait_idle(&owner);
    assert_true(kv_now_ns() - begun < 60 * KV_NS_PER_S);
    raw_expect_end(&raw);
    end();
}

static void test_never_takes_what_is_sent(void **state)
{
    (void)state;
    check_deaf(false);
}

static void test_releases_what_is_sent(void **state)
{
    (void)state;
    check_deaf(true);
}

/* The owner withdraws its set while a lease that was released is still sent from: it doesn't wait for the reader. */
static void test_withdrawn(void **state)
{
    struct kvbm_agent *reader = agent_at("reader", NULL);
    uint64_t id, begun;

    (void)state;
    begin();
    raw_open(&raw, endpoint_of(owner.agent), "deaf");
    id = lease_all(60000);
    ask_and_take_nothing(id);
    release(id);
    /* Behind a handshake the owner has read all that was said before. */
    assert_int_equal(kvbm_session_close(open_session(reader, owner.agent, 0)), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    begun = kv_now_ns();
    end();
    assert_true(kv_now_ns() - begun < SOON_NS / 2); /* the session's own end comes after SOON_NS */
    raw_expect_end(&raw);
}

/* Leases of one block, again and again: each counts, up to the share. */
static void test_many_leases(void **state)
{
    const uint64_t key = 1;
    struct kvbm_agent *reader = agent_at("reader", NULL);
    struct kvbm_lease *leases[LEASED + 1] = {NULL};
    struct kvbm_session *session;
    size_t n = 0;
    int err = 0;

    (void)state;
    begin();
    session = open_session(reader, owner.agent, 0);
    while (err == 0 && n <= LEASED)
        err = kvbm_session_lease(session, 1, 0, &key, 1, 60000, soon(), &leases[n++]);
    assert_int_equal(err, -ENOSPC); /* the share is used up */
    assert_int_equal(n, LEASED + 1);
    for (size_t i = 0; i < n; i++)
        kvbm_lease_release(leases[i]);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_never_reads),
        cmocka_unit_test(test_never_takes_what_is_sent),
        cmocka_unit_test(test_releases_what_is_sent),
        cmocka_unit_test(test_withdrawn),
        cmocka_unit_test(test_many_leases),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
