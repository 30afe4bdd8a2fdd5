// SPDX-License-Identifier: Apache-2.0
/*
 * Owners that undo something while their sessions go on: requests that their reader gives up
 * when they are answered already, and reads of a set that is updated.
 */
#include <stdatomic.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "lend_unit.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend_impl.h"
#include "raw_peer.h"

#define LEASED 16u /* blocks of 64 KiB: the owner's share */
#define N_READS 8u
#define N_UPDATES 24u
#define BLOCK_BYTES 65536u

static struct lending owner;
static struct raw raw;

static void begin(const char *endpoint)
{
    const struct kvbm_agent_opts opts = session_opts("owner", &endpoint);
    struct kvbm_layout_config config = small_config();

    config.num_blocks = N_BLOCKS;
    config.page_size = 16;
    config.inner_dim = 512;
    lend_init_with(&owner, &opts, config, false);
}

/* ---- by a plain socket, which says several things in one breath ---- */

static void say_lease(uint64_t request, uint32_t time_ms)
{
    struct kvbm_asked asked = {.set = 1, .n = LEASED, .time_ms = time_ms, .generation = 1};
    struct kv_buf body = KV_BUF_INIT;
    uint64_t keys[LEASED];

    for (uint32_t i = 0; i < LEASED; i++)
        keys[i] = 1 + i;
    asked.keys = (const uint8_t *)keys;
    kvbm_asked_write(&body, &asked, 8);
    raw_say(&raw, KVBM_ASK_LEASE, request, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
}

static void say_renew(uint64_t request, uint64_t id, uint32_t time_ms)
{
    struct kv_buf body = KV_BUF_INIT;

    kvbm_renewal_write(&body, id, time_ms);
    raw_say(&raw, KVBM_ASK_RENEW, request, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
}

/* Wait until the owner has served all that was said. */
static void await_owner(void)
{
    raw_say(&raw, KVBM_PING, 0, NULL, 0);
    assert_true(raw_until(&raw, KVBM_PONG));
}

static uint64_t lease_all(uint64_t request, uint32_t time_ms)
{
    struct kvbm_told told;

    say_lease(request, time_ms);
    assert_true(raw_until(&raw, KVBM_ASK_LEASE));
    assert_int_equal(raw.frame.status, 0);
    assert_int_equal(kvbm_told_read(raw.body, raw.frame.len, LEASED, &told), 0);
    return told.id;
}

/* Return when the only lease of the owner ends. */
static uint64_t lease_end(void)
{
    struct kvbm_lender *lender = owner.agent->lender;
    uint64_t ns;

    pthread_mutex_lock(&lender->lock);
    assert_int_equal(lender->offers->leases.n_leases, 1);
    ns = lender->offers->leases.heap[0]->expires_ns;
    pthread_mutex_unlock(&lender->lock);
    return ns;
}

/* An owner that stood still reads a request and its CANCEL at once: nobody knows of the lease. */
static void test_lease_given_up(void **state)
{
    (void)state;
    begin(unix_endpoint());
    raw_open(&raw, endpoint_of(owner.agent), "raw");
    for (uint64_t request = 1; request < 2000; request++) {
        say_lease(request, 60000);
        raw_say(&raw, KVBM_CANCEL, request, NULL, 0);
        if (request % 100 == 1) {
            await_owner();
            assert_int_equal(lend_pinned(&owner), 0);
        }
    }
    await_owner();
    assert_int_equal(lend_pinned(&owner), 0);
    (void)lease_all(3000, 60000); /* a lease that nobody gives up stays */
    raw_say(&raw, KVBM_CANCEL, 1, NULL, 0);
    await_owner();
    assert_int_equal(lend_pinned(&owner), LEASED);
    close(raw.fd);
    lend_wait_idle(&owner);
    lend_fini(&owner);
}

/* A renewal that was given up changes nothing; others never make a lease end earlier. */
static void test_renewal_given_up(void **state)
{
    uint64_t id, first, second;

    (void)state;
    begin(unix_endpoint());
    raw_open(&raw, endpoint_of(owner.agent), "raw");
    id = lease_all(1, 30000);
    first = lease_end();
    say_renew(2, id, 60000);
    raw_say(&raw, KVBM_CANCEL, 2, NULL, 0);
    say_renew(3, id, 1);
    raw_say(&raw, KVBM_CANCEL, 3, NULL, 0);
    await_owner();
    assert_true(lease_end() == first);
    say_renew(4, id, 1); /* its reader still has what it was told before */
    await_owner();
    assert_true(lease_end() == first);
    say_renew(5, id, 60000);
    await_owner();
    second = lease_end();
    assert_true(second > first);
    raw_say(&raw, KVBM_CANCEL, 4, NULL, 0);
    await_owner();
    assert_true(lease_end() == second);
    assert_int_equal(lend_pinned(&owner), LEASED);
    close(raw.fd);
    lend_wait_idle(&owner);
    lend_fini(&owner);
}

/* Renewals that are not given up hold, also when an earlier one is given up after them. */
static void test_renewal_holds(void **state)
{
    uint64_t id, end, before;

    (void)state;
    begin(unix_endpoint());
    raw_open(&raw, endpoint_of(owner.agent), "raw");
    id = lease_all(1, 1000);
    say_renew(2, id, 20000);
    before = kv_now_ns();
    say_renew(3, id, 40000); /* extends it */
    raw_say(&raw, KVBM_CANCEL, 2, NULL, 0);
    await_owner();
    assert_true(lease_end() >= before + 40000 * KV_NS_PER_MS);
    say_renew(4, id, 60000);
    before = kv_now_ns();
    say_renew(5, id, 50000); /* the lease ends later already */
    raw_say(&raw, KVBM_CANCEL, 4, NULL, 0);
    await_owner();
    end = lease_end();
    assert_true(end >= before + 50000 * KV_NS_PER_MS);
    assert_true(end < before + 60000 * KV_NS_PER_MS);
    close(raw.fd);
    lend_wait_idle(&owner);
    lend_fini(&owner);
}

/* ---- by the reader's functions ---- */

/*
 * The reader's deadline is over before the owner can have answered, while the answer is read, or a
 * little behind it: a lease that the reader doesn't know is released in each case.
 */
static void test_reader_gives_up(void **state)
{
    const uint64_t keys[] = {1, 2, 3};
    struct kvbm_agent *reader;
    struct kvbm_session *session;
    uint64_t took = 0;
    uint8_t tiers[3];

    (void)state;
    begin(unix_endpoint());
    reader = agent_at("reader", NULL);
    session = open_session(reader, owner.agent, 0);
    for (uint64_t i = 0; i < 2000; i++) {
        uint64_t before = kv_now_ns(), left = took / 4 + took * (i % 64) / 64;
        struct kvbm_lease *lease = NULL;

        if (kvbm_session_lease(session, 1, 0, keys, 3, 60000, before + left, &lease) == 0) {
            took = kv_now_ns() - before;
            kvbm_lease_release(lease);
        } else {
            took += took / 16 + 100;
        }
        assert_int_equal(kvbm_session_lookup(session, 1, 0, keys, 3, soon(), tiers), 0);
        assert_int_equal(lend_pinned(&owner), 0);
    }
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    lend_fini(&owner);
}

/* ---- updates ---- */

static int update(void)
{
    const struct kvbm_block_source source = kvbm_pool_source(owner.pool);
    const struct kvbm_blockset_opts opts = {
        .size = sizeof(opts), .id = 1, .layout = owner.layout, .source = &source};

    return kvbm_blockset_update(owner.set, &opts);
}

/* Wait until the owner has begun to answer so many reads. */
static void await_reads(uint64_t n)
{
    struct kvbm_lender *lender = owner.agent->lender;
    uint64_t reads = 0;

    for (uint64_t end = soon(); reads < n;) {
        pthread_mutex_lock(&lender->lock);
        reads = lender->stats.reads;
        pthread_mutex_unlock(&lender->lock);
        assert_true(kv_now_ns() < end);
    }
}

/* Copy what a reply with the blocks of @keys consists of. */
static void expected(const uint32_t *blocks, uint8_t *to)
{
    for (uint32_t i = 0; i < LEASED; i++) {
        struct kvbm_view view;

        assert_int_equal(kvbm_layout_block(owner.layout, blocks[i], &view), 0);
        assert_int_equal(view.len, BLOCK_BYTES);
        memcpy(to + (size_t)i * BLOCK_BYTES, (const void *)(uintptr_t)view.addr, view.len);
    }
}

/*
 * The reader has taken a part of the first reply when the owner updates its set and overwrites all: the
 * owner doesn't wait for the reader. Each reply ends, cut or whole, and none has a new byte.
 */
static void test_update_beside_a_reader_that_waits(void **state)
{
    uint32_t places[LEASED], blocks[LEASED], n_ended = 0, n_cut = 0;
    uint8_t *want = malloc((size_t)LEASED * BLOCK_BYTES);
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_told told;

    (void)state;
    begin(unix_endpoint());
    raw_open(&raw, endpoint_of(owner.agent), "raw");
    say_lease(1, 60000);
    assert_true(raw_until(&raw, KVBM_ASK_LEASE));
    assert_int_equal(kvbm_told_read(raw.body, raw.frame.len, LEASED, &told), 0);
    for (uint32_t i = 0; i < LEASED; i++) {
        places[i] = i;
        blocks[i] = told.blocks[(size_t)i * 4]; /* below 256 */
    }
    expected(blocks, want);
    kvbm_wanted_write(&body, told.id, false, places, LEASED);
    for (uint64_t i = 0; i < N_READS; i++)
        raw_say(&raw, KVBM_ASK_READ, 2 + i, body.data, (uint32_t)body.len);
    kv_buf_fini(&body);
    await_reads(N_READS);
    assert_int_equal(update(), 0);
    assert_int_equal(lend_pinned(&owner), 0);
    assert_true(lend_store(&owner, 500, N_BLOCKS));
    raw_say(&raw, KVBM_PING, 0, NULL, 0);
    while (n_ended < N_READS) {
        const struct kvbm_frame *frame = &raw.frame;

        assert_true(raw_next(&raw));
        if (frame->type != KVBM_ASK_READ)
            continue;
        n_cut += frame->flags & KVBM_FRAME_CUT ? 1 : 0;
        n_ended += frame->flags & KVBM_FRAME_CUT || frame->status < 0 ||
                   frame->offset + frame->len == frame->total;
        assert_memory_equal(raw.body, want + frame->offset, frame->len);
    }
    assert_true(n_cut > 0);
    await_owner();
    close(raw.fd);
    lend_fini(&owner);
    free(want);
}

static atomic_bool stop;
static atomic_uint n_right;

struct reading {
    struct kvbm_session *session;
    struct kvbm_layout *to;
};

/* Lease and read, again and again, whatever becomes of it. */
static void *read_on(void *arg)
{
    const struct reading *r = arg;
    uint64_t keys[LEASED];
    uint32_t blocks[LEASED];
    uint8_t ok[LEASED / 8];
    struct kvbm_lease_read_opts opts = {
        .size = sizeof(opts), .to = r->to, .to_blocks = blocks, .n = LEASED, .ok = ok};

    for (uint32_t i = 0; i < LEASED; i++) {
        keys[i] = 1 + i;
        blocks[i] = i;
    }
    while (!atomic_load(&stop)) {
        struct kvbm_lease *lease = NULL;

        if (kvbm_session_lease(r->session, 1, 0, keys, LEASED, 60000, soon(), &lease) < 0)
            continue;
        opts.deadline_ns = soon();
        opts.n = (uint32_t)kvbm_lease_count(lease);
        memset(ok, 0, sizeof(ok));
        (void)kvbm_lease_read(lease, &opts);
        for (uint32_t i = 0; i < opts.n; i++) {
            if (!(ok[i / 8] & 1u << i % 8))
                continue;
            assert_true(lend_holds(r->to, i, keys[i]));
            atomic_fetch_add(&n_right, 1);
        }
        kvbm_lease_release(lease);
    }
    return NULL;
}

/* A set is updated while a reader copies: what it lacks is a miss, and the session goes on. */
static void updates_beside_reads(const char *endpoint, uint32_t n_data)
{
    struct kvbm_layout_config config;
    struct kvbm_agent *reader;
    struct reading r;
    pthread_t thread;

    begin(endpoint);
    config = owner.layout->config;
    reader = agent_at("reader", NULL);
    r.session = open_session(reader, owner.agent, n_data);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    atomic_store(&stop, false);
    atomic_store(&n_right, 0);
    assert_int_equal(pthread_create(&thread, NULL, read_on, &r), 0);
    for (uint32_t i = 0; i < N_UPDATES; i++) {
        uint32_t before = atomic_load(&n_right);

        for (uint64_t end = soon(); atomic_load(&n_right) - before < LEASED + i;) {
            assert_true(kvbm_session_is_open(r.session));
            assert_true(kv_now_ns() < end);
        }
        assert_int_equal(update(), 0);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    assert_true(kvbm_session_is_open(r.session));
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    kvbm_layout_destroy(r.to);
    lend_wait_idle(&owner);
    lend_fini(&owner);
}

static void test_updates_beside_reads(void **state)
{
    (void)state;
    updates_beside_reads(unix_endpoint(), 0);
    updates_beside_reads("tcp:127.0.0.1:0", 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lease_given_up),
        cmocka_unit_test(test_renewal_given_up),
        cmocka_unit_test(test_renewal_holds),
        cmocka_unit_test(test_reader_gives_up),
        cmocka_unit_test(test_update_beside_a_reader_that_waits),
        cmocka_unit_test(test_updates_beside_reads),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
