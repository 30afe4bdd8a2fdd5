// SPDX-License-Identifier: Apache-2.0
/* Sessions beside one whose requests keep the event thread busy, or stop it for a while. */
#include <stdatomic.h>

#include "base/unit.h"
#include "session_unit.h"

#define WORK 61 /* a note: the event thread is busy for longer than a turn */
#define MARK 62 /* tells how many notes were served before */
#define NOTES 40
#define KEEPALIVE_MS 700

static struct {
    struct kvbm_agent *owner, *good_agent, *bad_agent;
    struct kvbm_session *good, *bad;
    atomic_bool go;
    atomic_int n_worked;
    useconds_t work_us; /* that each note takes */
} t;

static void serve_work(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg, (void)session, (void)request;
    atomic_fetch_add(&t.n_worked, 1);
    while (!atomic_load(&t.go))
        usleep(100);
    usleep(t.work_us);
}

static void serve_mark(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    (void)kvbm_session_reply(session, request->id, atomic_load(&t.n_worked), NULL, 0, -1);
}

static void begin(const char *endpoint, uint32_t keepalive_ms, uint32_t handshake_ms)
{
    struct kvbm_agent_opts opts = session_opts("owner", &endpoint);

    memset(&t, 0, sizeof(t));
    t.work_us = 6000;
    opts.keepalive_ms = keepalive_ms ? keepalive_ms : opts.keepalive_ms;
    opts.handshake_ms = handshake_ms;
    t.owner = agent_of(&opts);
    assert_int_equal(kvbm_agent_serve(t.owner, WORK, serve_work, NULL), 0);
    assert_int_equal(kvbm_agent_serve(t.owner, MARK, serve_mark, NULL), 0);
    t.good_agent = agent_at("good", NULL);
    t.bad_agent = agent_at("bad", NULL);
    t.good = open_session(t.good_agent, t.owner, 0);
    t.bad = open_session(t.bad_agent, t.owner, 0);
}

static void end(void)
{
    assert_int_equal(kvbm_session_close(t.bad), 0);
    assert_int_equal(kvbm_session_close(t.good), 0);
    assert_int_equal(kvbm_agent_destroy(t.bad_agent), 0);
    assert_int_equal(kvbm_agent_destroy(t.good_agent), 0);
    assert_int_equal(kvbm_agent_destroy(t.owner), 0);
}

/* Have the owner's event thread stand in the handler of the first of @n notes. */
static void stop_owner(int n)
{
    for (int i = 0; i < n; i++)
        assert_int_equal(kvbm_session_note(t.bad, WORK, "", 0), 0);
    for (uint64_t until = soon(); !atomic_load(&t.n_worked); usleep(100))
        assert_true(kv_now_ns() < until);
}

/* Notes that have come together don't keep the event thread until the last of them. */
static void test_others_have_their_turn(void **state)
{
    const char *endpoints[] = {"tcp:127.0.0.1:0", unix_endpoint()};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(endpoints); i++) {
        struct kvbm_reply reply;
        struct kvbm_call *call;

        begin(endpoints[i], 0, 0);
        stop_owner(NOTES);
        assert_int_equal(kvbm_call_start(t.good, MARK, "", 0, -1, NULL, 0, &call), 0);
        atomic_store(&t.go, true);
        assert_int_equal(kvbm_call_wait(call, soon(), &reply), 0);
        assert_in_range(reply.status, 1, 9);
        kvbm_reply_fini(&reply);
        assert_int_equal(kvbm_session_call(t.bad, MARK, "", 0, -1, soon(), &reply), 0);
        assert_int_equal(reply.status, NOTES); /* and none is lost */
        kvbm_reply_fini(&reply);
        end();
    }
}

/* The event thread stands still for longer than the keepalive. What a peer has said meanwhile counts. */
static void test_standstill_is_no_silence(void **state)
{
    const char *endpoints[] = {"tcp:127.0.0.1:0", unix_endpoint()};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(endpoints); i++) {
        struct kvbm_reply reply;
        struct kvbm_call *call;

        begin(endpoints[i], KEEPALIVE_MS, 0);
        stop_owner(1);
        assert_int_equal(kvbm_call_start(t.good, MARK, "", 0, -1, NULL, 0, &call), 0);
        usleep(KEEPALIVE_MS * 1100);
        atomic_store(&t.go, true);
        assert_int_equal(kvbm_call_wait(call, soon(), &reply), 0);
        assert_int_equal(reply.status, 1);
        kvbm_reply_fini(&reply);
        assert_true(kvbm_session_is_open(t.bad));
        end();
    }
}

/* Notes that have come together take longer than the keepalive. Their peer isn't silent meanwhile. */
static void test_waiting_is_no_silence(void **state)
{
    struct kvbm_reply reply;

    (void)state;
    begin("tcp:127.0.0.1:0", KEEPALIVE_MS, 0);
    t.work_us = 2 * KEEPALIVE_MS * 1000 / NOTES;
    atomic_store(&t.go, true);
    stop_owner(NOTES);
    assert_int_equal(kvbm_session_call(t.bad, MARK, "", 0, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, NOTES);
    kvbm_reply_fini(&reply);
    end();
}

/* Each turn of the event thread takes longer than a handshake may. A newcomer isn't ended unread. */
static void test_handshake_in_long_turns(void **state)
{
    struct kvbm_agent *agent = agent_at("new", NULL);
    struct kvbm_session *session;

    (void)state;
    begin("tcp:127.0.0.1:0", 0, 150);
    t.work_us = 220000;
    atomic_store(&t.go, true);
    stop_owner(5);
    session = open_session(agent, t.owner, 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_others_have_their_turn),
        cmocka_unit_test(test_standstill_is_no_silence),
        cmocka_unit_test(test_waiting_is_no_silence),
        cmocka_unit_test(test_handshake_in_long_turns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
