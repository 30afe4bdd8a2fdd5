// SPDX-License-Identifier: Apache-2.0
/* Peers that take of what all sessions share, memory for bodies and places for sets, beside honest ones. */
#include "base/core/log.h"
#include "base/unit.h"
#include "peer/session/net.h"
#include "raw_peer.h"

#define MAX_RECEIVED (4u << 20)
#define BODY (1u << 20)
#define STEP (64u << 10)
#define MAX_SETS 16u

static struct kvbm_agent *owner;
static char at[80];

static void begin(struct kvbm_agent_opts *opts)
{
    static const char *endpoint;

    endpoint = unix_endpoint();
    snprintf(at, sizeof(at), "%s", endpoint);
    opts->listen = &endpoint;
    opts->n_listen = 1;
    owner = agent_of(opts);
    assert_int_equal(kvbm_agent_serve(owner, ECHO, serve_echo, NULL), 0);
}

/* ---- bodies under way ---- */

/* Begin to tell a set, and stop. */
static void half_body(struct raw *raw, unsigned number, size_t len)
{
    const struct kvbm_frame frame = {.type = KVBM_SET, .len = 8u << 20, .total = 8u << 20};
    struct kvbm_hello hello;
    const uint8_t mac[KVBM_MAC_BYTES] = {0};
    uint8_t head[KVBM_FRAME_BYTES], *some = calloc(1, len);
    char name[32];

    snprintf(name, sizeof(name), "greedy%u", number);
    hello = raw_who(name, 1000 + number);
    raw_connect(raw, at);
    raw_hello(raw, KVBM_HELLO, &hello, NULL, 0);
    assert_true(raw_until(raw, KVBM_CHALLENGE));
    raw_say(raw, KVBM_PROOF, 0, mac, sizeof(mac));
    raw_say(raw, KVBM_READY, 0, NULL, 0);
    assert_true(raw_until(raw, KVBM_SETS_TOLD));
    kvbm_frame_write(&frame, head);
    raw_bytes(raw, head, sizeof(head));
    raw_bytes(raw, some, len);
    free(some);
}

/* An honest peer asks for an echo of 1 MiB, several times. */
static void check_honest(void)
{
    struct kvbm_agent *reader = agent_at("reader", NULL);
    struct kvbm_session *session = NULL;
    char *body = calloc(1, BODY);

    assert_int_equal(open_with(reader, at, 0, NULL, &session), 0);
    for (int i = 0; i < 5; i++) {
        struct kvbm_reply reply;

        assert_int_equal(kvbm_session_call(session, ECHO, body, BODY, -1, soon(), &reply), 0);
        assert_int_equal(reply.len, BODY);
        kvbm_reply_fini(&reply);
    }
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    free(body);
}

/* Peers that hold all the memory lose it, the one with most first: not who needs some now. */
static void bodies_of(unsigned n, size_t len, size_t longest)
{
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    static struct raw greedy[64];

    opts.max_received_bytes = MAX_RECEIVED;
    begin(&opts);
    for (unsigned i = 0; i < n; i++)
        half_body(&greedy[i], i, i == 1 ? longest : len);
    usleep(200000); /* they don't go on */
    check_honest();
    raw_expect_end(&greedy[1]);
    for (unsigned i = 0; i < n; i++) {
        if (i != 1)
            close(greedy[i].fd);
    }
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

static void test_bodies(void **state)
{
    (void)state;
    bodies_of(5, 600u << 10, 900u << 10);
    bodies_of(25, 100u << 10, 200u << 10); /* each has less than the honest one needs */
}

/* Send a long body a step each 30 ms beside others that stop; true when it may go on all the time. */
static bool goes_on(void)
{
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    static struct raw greedy[12];
    char *some = calloc(1, STEP);
    struct pollfd polled;
    bool ended = false;
    struct raw honest;
    unsigned n = 0;

    opts.max_received_bytes = MAX_RECEIVED;
    begin(&opts);
    half_body(&honest, 100, STEP);
    polled = (struct pollfd){.fd = honest.fd, .events = POLLIN};
    for (unsigned i = 0; i < 29 && !ended; i++) { /* 1.9 MiB of 8 MiB, 2 MiB/s */
        usleep(30000);
        if (i >= 18 && n < KV_COUNT(greedy))
            half_body(&greedy[n], n, 300u << 10), n++;
        ended = poll(&polled, 1, 0) != 0;
        if (!ended)
            raw_bytes(&honest, some, STEP);
    }
    close(honest.fd);
    while (n)
        close(greedy[--n].fd);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    free(some);
    return !ended;
}

/* The longest body is spared while it goes on. On a busy machine it may seem to stop. */
static void test_steady_body(void **state)
{
    bool went_on = false;

    (void)state;
    for (int i = 0; i < 5 && !went_on; i++)
        went_on = goes_on();
    assert_true(went_on);
}

/* A long body by bytes now and then is no body: its memory is given back. */
static void test_drip(void **state)
{
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    struct raw raw;
    struct pollfd polled;

    (void)state;
    opts.keepalive_ms = 400;
    begin(&opts);
    half_body(&raw, 1, 200u << 10);
    polled = (struct pollfd){.fd = raw.fd, .events = POLLIN};
    for (uint64_t end = soon();;) {
        char byte[4096];

        assert_true(kv_now_ns() < end);
        raw_bytes(&raw, "", 1);
        if (poll(&polled, 1, 20) > 0 && recv(raw.fd, byte, sizeof(byte), 0) <= 0)
            break;
    }
    close(raw.fd);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

/* ---- sets ---- */

struct teller {
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *layout;
    struct kvbm_blockset *sets[2 * MAX_SETS];
    unsigned n;
};

static void tell(struct teller *t, const char *name, uint64_t worker, unsigned n)
{
    if (!t->agent) {
        t->agent = agent_named(name, worker);
        t->layout = small_layout();
        assert_int_equal(open_with(t->agent, at, 0, NULL, &t->session), 0);
    }
    for (unsigned i = 0; i < n; i++) {
        const struct kvbm_blockset_opts what = {
            .size = sizeof(what), .id = 1 + t->n, .layout = t->layout};

        assert_int_equal(kvbm_blockset_export(t->agent, &what, &t->sets[t->n++]), 0);
    }
}

/* Count a peer's sets that the owner knows, once it has heard all. */
static unsigned known(const struct teller *t, uint64_t worker)
{
    struct kvbm_remote_set *set;
    struct kvbm_reply reply;
    unsigned n = 0;

    assert_int_equal(kvbm_session_call(t->session, ECHO, NULL, 0, -1, soon(), &reply), 0);
    kvbm_reply_fini(&reply);
    for (uint32_t id = 1; id <= t->n; id++) {
        if (kvbm_remote_set_find(owner, worker, id, &set) != 0)
            continue;
        kvbm_remote_set_release(set);
        n++;
    }
    return n;
}

static void end_teller(struct teller *t)
{
    for (unsigned i = 0; i < t->n; i++)
        kvbm_blockset_destroy(t->sets[i]);
    assert_int_equal(kvbm_session_close(t->session), 0);
    assert_int_equal(kvbm_agent_destroy(t->agent), 0);
    kvbm_layout_destroy(t->layout);
}

/* A peer that takes all places gives some back, as many as others need to have as many as it has. */
static void places_of(const struct kvbm_agent_opts *limits)
{
    struct kvbm_agent_opts opts = *limits;
    struct teller greedy = {0}, honest = {0}, other = {0};

    begin(&opts);
    tell(&greedy, "greedy", 1, 2 * MAX_SETS);
    assert_int_equal(known(&greedy, 1), MAX_SETS);
    tell(&honest, "honest", 2, 4);
    assert_int_equal(known(&honest, 2), 4);
    assert_int_equal(known(&greedy, 1), MAX_SETS - 4);
    tell(&other, "other", 3, 2 * MAX_SETS);
    assert_int_equal(known(&other, 3), (MAX_SETS - 4) / 2);
    assert_int_equal(known(&honest, 2), 4);
    assert_int_equal(known(&greedy, 1), (MAX_SETS - 4) / 2);
    end_teller(&greedy);
    end_teller(&honest);
    end_teller(&other);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

static void test_sets(void **state)
{
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    struct owner set = {.agent = agent_named("measured", 9)};
    const struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1};
    struct kvbm_blockset_opts with = what;

    (void)state;
    opts.max_sets = MAX_SETS;
    places_of(&opts);
    set.layout = small_layout();
    with.layout = set.layout;
    assert_int_equal(kvbm_blockset_export(set.agent, &with, &set.set), 0);
    opts.max_sets = 0;
    opts.max_bytes = MAX_SETS * bytes_of(set.set, set.bytes) + 64; /* names have other lengths */
    places_of(&opts);
    owner_fini(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_steady_body),
        cmocka_unit_test(test_drip),
        cmocka_unit_test(test_sets),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
