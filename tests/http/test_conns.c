// SPDX-License-Identifier: Apache-2.0
/* Closing of connections: which ones and when, by pace, by share, by need. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <poll.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "http/budget.h"
#include "http/conns.h"

static struct kh_budget *budget;
static struct kh_conns *conns;

struct peer {
    int ours, theirs;
    struct kh_conn *conn;
};

static void open_all(uint64_t max)
{
    assert_int_equal(kh_budget_create(1 << 20, &budget), 0);
    assert_int_equal(kh_conns_create(max, 3600000, budget, &conns), 0);
}

static struct peer come(uint8_t client)
{
    uint8_t address[16] = {[10] = 0xff, [11] = 0xff, [12] = 10, [15] = client};
    struct peer peer;
    int fds[2];

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    peer.ours = fds[0];
    peer.theirs = fds[1];
    peer.conn = kh_conns_add(conns, fds[0], true, kh_budget_join(budget, address));
    assert_non_null(peer.conn);
    return peer;
}

static void go(struct peer *peer)
{
    struct kh_client *client = peer->conn->client;

    kh_conns_remove(conns, peer->conn);
    kh_budget_leave(budget, client);
    close(peer->ours);
    close(peer->theirs);
}

static void close_all(void)
{
    kh_conns_destroy(conns);
    kh_budget_destroy(budget);
}

static bool is_hung_up(const struct peer *peer, int timeout_ms)
{
    struct pollfd fd = {peer->theirs, POLLIN, 0};

    return poll(&fd, 1, timeout_ms) == 1;
}

/* At the slowest pace it may go on for ever; behind it by more than its patience it is closed. */
static void pace(void **state)
{
    struct peer stalled, dripping, steady, waiting, busy, limited;
    uint64_t start;

    (void)state;
    open_all(64);
    stalled = come(1), dripping = come(1), steady = come(1), waiting = come(1), busy = come(1),
    limited = come(1);
    kh_conn_start(stalled.conn, 300, 0);
    kh_conn_start(dripping.conn, 300, 0);
    kh_conn_start(steady.conn, 5000, 0); /* a busy machine may stop this thread for a while */
    kh_conn_start(waiting.conn, 300, 0);
    kh_conn_wait(waiting.conn);
    kh_conn_busy(busy.conn);
    kh_conn_start(limited.conn, 3600000, 300);
    start = kv_now_ns();
    while (kv_now_ns() - start < 2500 * KV_NS_PER_MS) {
        kh_conn_moved(dripping.conn, 1);
        kh_conn_moved(steady.conn,
                      100000); /* haste buys no sleep later: it never is ahead of the clock */
        assert_true(kh_conn_lag_ns(steady.conn, kv_now_ns()) < 5 * KV_NS_PER_S);
        nanosleep(&(struct timespec){.tv_nsec = 10 * KV_NS_PER_MS}, NULL);
    }
    assert_true(is_hung_up(&stalled, 60000) && is_hung_up(&dripping, 60000) &&
                is_hung_up(&limited, 60000));
    assert_false(is_hung_up(&steady, 0) || is_hung_up(&waiting, 0) || is_hung_up(&busy, 0));
    assert_true(is_hung_up(&steady, 60000)); /* it has stopped */
    assert_int_equal(kh_conn_lag_ns(waiting.conn, kv_now_ns()), 0);
    go(&stalled), go(&dripping), go(&steady), go(&waiting), go(&busy), go(&limited);
    close_all();
}

/* A full table: the client that has most makes room, of its connections the slowest; busy ones
 * stay. */
static void room(void **state)
{
    enum { MAX = 64, MANY = 54 };
    struct kh_conns_stats stats;
    struct peer many[MANY + 8], few[4];
    size_t n = 0, closed = 0;

    (void)state;
    open_all(MAX);
    for (; n < 4; n++)
        few[n] = come(2); /* longer idle than all others */
    nanosleep(&(struct timespec){.tv_nsec = 30 * KV_NS_PER_MS}, NULL);
    for (n = 0; n < MANY + 8; n++) {
        many[n] = come(1);
        if (n < 4)
            kh_conn_busy(many[n].conn);
    }
    for (int i = 0; i < 3000 && closed == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 20 * KV_NS_PER_MS}, NULL);
        kh_conns_get_stats(conns, &stats);
        closed = stats.evicted;
    }
    assert_true(closed > 0);
    for (n = 0; n < 4; n++)
        assert_false(is_hung_up(&few[n], 0) || is_hung_up(&many[n], 0));
    for (n = 0; n < 4; n++)
        go(&few[n]);
    for (n = 0; n < MANY + 8; n++)
        go(&many[n]);
    close_all();
}

/* Of a client's unfinished bodies, the one that lies behind most; no other client's, and none that
 * holds nothing. */
static void slowest_body(void **state)
{
    struct peer slow, slower, idle, other;

    (void)state;
    open_all(64);
    slower = come(1), other = come(2), idle = come(1);
    nanosleep(&(struct timespec){.tv_nsec = 20 * KV_NS_PER_MS}, NULL);
    slow = come(1);
    kh_conn_start(slow.conn, 60000, 0);
    atomic_store(&slow.conn->holds, true);
    atomic_store(&slower.conn->holds, true);
    atomic_store(&other.conn->holds, true);
    nanosleep(&(struct timespec){.tv_nsec = 20 * KV_NS_PER_MS}, NULL);
    assert_false(kh_conns_drop_slowest(conns, slow.conn->client, 60000));
    assert_true(kh_conns_drop_slowest(conns, slow.conn->client, 1));
    assert_true(is_hung_up(&slower, 0) && !is_hung_up(&slow, 0));
    assert_true(kh_conns_drop_slowest(conns, slow.conn->client, 1));
    assert_true(is_hung_up(&slow, 0));
    assert_false(kh_conns_drop_slowest(conns, slow.conn->client, 1));
    assert_false(is_hung_up(&idle, 0) || is_hung_up(&other, 0));
    go(&slow), go(&slower), go(&idle), go(&other);
    close_all();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pace),
        cmocka_unit_test(room),
        cmocka_unit_test(slowest_body),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
