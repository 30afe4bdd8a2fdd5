// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions of two agents in one process: opening, calls and replies over unix sockets and tcp, with
 * and without data connections, descriptors, notes, and the end of either side.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/unit.h"
#include "index/random.h"
#include "session_unit.h"

struct pair {
    struct kvbm_agent *owner, *reader;
    struct kvbm_session *session;
};

static void pair_init(struct pair *p, const char *endpoint, uint32_t n_data)
{
    p->owner = agent_at("owner", endpoint);
    p->reader = agent_at("reader", NULL);
    assert_int_equal(kvbm_agent_serve(p->owner, ECHO, serve_echo, NULL), 0);
    p->session = open_session(p->reader, p->owner, n_data);
}

static void pair_fini(struct pair *p)
{
    assert_int_equal(kvbm_session_close(p->session), 0);
    assert_int_equal(kvbm_agent_destroy(p->reader), 0);
    assert_int_equal(kvbm_agent_destroy(p->owner), 0);
}

static void echo(struct kvbm_session *session, const void *body, size_t len)
{
    struct kvbm_reply reply = {0};

    assert_int_equal(kvbm_session_call(session, ECHO, body, len, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, len);
    assert_int_equal(reply.len, len);
    assert_memory_equal(reply.body ? reply.body : "", len ? body : "", len);
    assert_int_equal(reply.fd, -1);
    kvbm_reply_fini(&reply);
}

static void check_calls(const char *endpoint, uint32_t n_data)
{
    static uint8_t body[KVBM_MAX_REQUEST_BYTES];
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct pair p;

    for (size_t i = 0; i < sizeof(body); i++)
        body[i] = (uint8_t)(i * 31 + i / 256);
    pair_init(&p, endpoint, n_data);
    assert_int_equal(kvbm_session_get_info(p.session, &info), 0);
    assert_true(info.open);
    assert_false(info.tls);
    assert_string_equal(info.agent, "owner");
    assert_int_not_equal(info.incarnation, 0);
    assert_int_equal(info.n_data, n_data);
    for (size_t len = 0; len <= sizeof(body); len = len * 3 + 1)
        echo(p.session, body, len);
    echo(p.session, body, sizeof(body));
    pair_fini(&p);
}

static void test_unix(void **state)
{
    (void)state;
    check_calls(unix_endpoint(), 0);
    check_calls(unix_endpoint(), 2);
}

static void test_tcp(void **state)
{
    (void)state;
    check_calls("tcp:127.0.0.1:0", 0);
    check_calls("tcp:localhost:0", 3);
}

/* ---- bulk ---- */

#define BULK 61
#define BULK_PIECES 40
#define BULK_PIECE 300007 /* no multiple of a chunk or page */

static struct {
    uint8_t *memory;
    atomic_int n_done;
} bulk;

static void bulk_done(void *arg)
{
    (void)arg;
    bulk.n_done++;
}

static void serve_bulk(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct iovec from[BULK_PIECES];

    (void)arg;
    for (size_t i = 0; i < BULK_PIECES; i++) /* backwards, so that pieces aren't one run */
        from[i] = (struct iovec){bulk.memory + (BULK_PIECES - 1 - i) * BULK_PIECE, BULK_PIECE};
    (void)kvbm_session_reply_from(session, request->id, 7, from, BULK_PIECES, bulk_done, NULL);
}

static void check_bulk(const char *endpoint, uint32_t n_data)
{
    size_t len = (size_t)BULK_PIECES * BULK_PIECE, n = 0;
    uint8_t *got = malloc(len + 1);
    struct iovec to[1000];
    int32_t status = 0;
    struct pair p;

    bulk.memory = malloc(len);
    bulk.n_done = 0;
    for (size_t i = 0; i < len; i++)
        bulk.memory[i] = (uint8_t)(i * 7 + i / 4096 * 13);
    pair_init(&p, endpoint, n_data);
    assert_int_equal(kvbm_agent_serve(p.owner, BULK, serve_bulk, NULL), 0);
    for (size_t at = 0; at < len; n++) { /* pieces of other sizes, some of them empty */
        size_t piece = n % 5 == 0 ? 0 : KV_MIN(len - at, (size_t)30011);

        to[n] = (struct iovec){got + at, piece};
        at += piece;
    }
    for (int round = 0; round < 3; round++) {
        memset(got, 0xAA, len + 1);
        assert_int_equal(kvbm_session_call_into(p.session, BULK, "", 0, to, n, soon(), &status),
                         len);
        assert_int_equal(status, 7);
        for (size_t i = 0; i < BULK_PIECES; i++)
            assert_memory_equal(got + i * BULK_PIECE,
                                bulk.memory + (BULK_PIECES - 1 - i) * BULK_PIECE, BULK_PIECE);
        assert_int_equal(got[len], 0xAA);
    }
    assert_int_equal(kvbm_session_call_into(p.session, BULK, "", 0, to, n - 1, soon(), &status),
                     -EMSGSIZE);
    echo(p.session, "still", 5);
    pair_fini(&p);
    assert_int_equal(bulk.n_done, 4);
    free(bulk.memory);
    free(got);
}

static void test_bulk(void **state)
{
    (void)state;
    check_bulk(unix_endpoint(), 0);
    check_bulk("tcp:127.0.0.1:0", 0);
    check_bulk("tcp:127.0.0.1:0", 3);
}

/* Sessions that may or may not open in time: each is 0, or the reason is there in words. */
static void test_hurried_opens(void **state)
{
    struct rng rng = {test_seed()};
    struct kvbm_agent *owner = agent_at("owner", "tcp:127.0.0.1:0");
    struct kvbm_agent *reader = agent_at("reader", NULL);
    long n_open = 0, n_late = 0;

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    for (long i = test_rounds(300); i > 0 || n_open == 0; i--) {
        char why[256] = "";
        const struct kvbm_session_opts opts = {.size = sizeof(opts),
                                               .timeout_ms = 1 + rng_below(&rng, i > 0 ? 2 : 60000),
                                               .n_data = rng_below(&rng, 3),
                                               .why = why,
                                               .why_size = sizeof(why)};
        struct kvbm_session *session = NULL;
        int rc = kvbm_session_open(reader, endpoint_of(owner), &opts, &session);

        if (rc == 0) {
            n_open++;
            assert_int_equal(kvbm_session_close(session), 0);
            continue;
        }
        n_late++;
        assert_int_equal(rc, -ETIMEDOUT);
        assert_true(strlen(why) > 0);
        assert_null(session);
    }
    print_message("%ld opened, %ld not in time\n", n_open, n_late);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unix),
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_bulk),
        cmocka_unit_test(test_hurried_opens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
