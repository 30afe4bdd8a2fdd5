// SPDX-License-Identifier: Apache-2.0
/*
 * Calls that meet late, missing and wrong answers: nothing is written after a call has returned, many
 * threads at a time, limits, cancels, descriptors, notes, replies from other threads, ends.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/unit.h"
#include "index/random.h"
#include "peer/session/agent.h"
#include "peer/session/wire.h"
#include "session_unit.h"

#define SMALL 58 /* an answer from the owner's memory that isn't sent in chunks */
#define LATE 61  /* keeps the request until told */
#define SLOW 62  /* a bulk answer, sent as the reader takes it */
#define NOTE 63  /* counts notes */
#define BYTES (8u << 20)
#define POISON 0x5A
#define TEST_SLOT (KVBM_SESSION_SLOTS - 1) /* the first ones are services' */

struct pair {
    struct kvbm_agent *owner, *reader;
    struct kvbm_session *session;
};

/* A request that the owner keeps. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct kvbm_session *session;
    uint64_t ids[64];
    int n;
    atomic_int n_notes, n_done, n_begun, n_ended;
    uint8_t *memory;
} owner = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void serve_late(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    pthread_mutex_lock(&owner.lock);
    if (!owner.session)
        owner.session = kvbm_session_get(session);
    owner.ids[owner.n++] = request->id;
    pthread_cond_broadcast(&owner.changed);
    pthread_mutex_unlock(&owner.lock);
}

static void await_kept(int n)
{
    pthread_mutex_lock(&owner.lock);
    while (owner.n < n)
        pthread_cond_wait(&owner.changed, &owner.lock);
    pthread_mutex_unlock(&owner.lock);
}

static void forget_kept(void)
{
    pthread_mutex_lock(&owner.lock);
    kvbm_session_put(owner.session);
    owner.session = NULL;
    owner.n = 0;
    pthread_mutex_unlock(&owner.lock);
}

static void slow_done(void *arg)
{
    (void)arg;
    owner.n_done++;
}

static void serve_slow(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    const struct iovec from = {owner.memory, BYTES};

    (void)arg;
    (void)kvbm_session_reply_from(session, request->id, 0, &from, 1, slow_done, NULL);
}

static void serve_note(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg, (void)session;
    assert_int_equal(request->id, 0);
    owner.n_notes += (int)request->len;
}

static void watch(void *arg, struct kvbm_session *session, bool begun)
{
    (void)arg;
    *kvbm_session_slot(session, TEST_SLOT) = session;
    if (begun)
        owner.n_begun++;
    else
        owner.n_ended++;
}

static void pair_init(struct pair *p, const char *endpoint, uint32_t max_requests, uint32_t n_data)
{
    struct kvbm_agent_opts opts = session_opts("owner", &endpoint);

    opts.max_requests = max_requests;
    p->owner = agent_of(&opts);
    p->reader = agent_at("reader", NULL);
    assert_int_equal(kvbm_agent_watch(p->owner, watch, NULL), 0);
    assert_int_equal(kvbm_agent_serve(p->owner, ECHO, serve_echo, NULL), 0);
    assert_int_equal(kvbm_agent_serve(p->owner, LATE, serve_late, NULL), 0);
    assert_int_equal(kvbm_agent_serve(p->owner, SLOW, serve_slow, NULL), 0);
    assert_int_equal(kvbm_agent_serve(p->owner, NOTE, serve_note, NULL), 0);
    assert_int_equal(kvbm_agent_serve(p->owner, NOTE, serve_note, NULL), -EEXIST);
    assert_int_equal(kvbm_agent_serve(p->owner, 15, serve_note, NULL), -EINVAL);
    p->session = open_session(p->reader, p->owner, n_data);
}

static void pair_fini(struct pair *p)
{
    assert_int_equal(kvbm_session_close(p->session), 0);
    assert_int_equal(kvbm_agent_destroy(p->reader), 0);
    assert_int_equal(kvbm_agent_destroy(p->owner), 0);
}

static void echo(struct kvbm_session *session)
{
    struct kvbm_reply reply = {0};

    assert_int_equal(kvbm_session_call(session, ECHO, "here", 4, -1, soon(), &reply), 0);
    assert_int_equal(reply.len, 4);
    kvbm_reply_fini(&reply);
}

/* ---- late answers ---- */

/* A deadline passes; the answer comes later, and changes nothing in the caller's memory. */
static void check_late(const char *endpoint, uint32_t n_data)
{
    uint8_t *got = malloc(BYTES);
    struct iovec to = {got, BYTES}, from = {owner.memory, BYTES};
    struct pair p;

    memset(got, POISON, BYTES);
    pair_init(&p, endpoint, 0, n_data);
    assert_int_equal(kvbm_session_call_into(p.session, LATE, "", 0, &to, 1, in_ms(20), NULL),
                     -ETIMEDOUT);
    await_kept(1);
    echo(p.session); /* behind CANCEL: the owner knows */
    owner.n_done = 0;
    assert_int_equal(
        kvbm_session_reply_from(owner.session, owner.ids[0], 0, &from, 1, slow_done, NULL),
        -ECANCELED);
    assert_int_equal(owner.n_done, 1);
    assert_int_equal(kvbm_session_reply(owner.session, owner.ids[0], 0, NULL, 0, -1), -ENOENT);
    echo(p.session);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(got[i], POISON);
    forget_kept();
    pair_fini(&p);
    free(got);
}

static void test_late(void **state)
{
    (void)state;
    check_late(unix_endpoint(), 0);
    check_late("tcp:127.0.0.1:0", 2);
}

/* Calls end in the midst of their bulk answers, at random moments: no byte comes after the end. */
static void check_cut(uint32_t n_data)
{
    struct rng rng = {test_seed()};
    uint8_t *got = malloc(BYTES), *then = malloc(BYTES);
    struct iovec to = {got, BYTES};
    int n_cut = 0;
    struct pair p;

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    pair_init(&p, "tcp:127.0.0.1:0", 0, n_data);
    owner.n_done = 0;
    for (int round = 0; round < 60; round++) {
        uint64_t ns = rng_below(&rng, 3000000);
        long rc = kvbm_session_call_into(p.session, SLOW, "", 0, &to, 1, kv_now_ns() + ns, NULL);

        assert_true(rc == BYTES || rc == -ETIMEDOUT);
        n_cut += rc < 0;
        memcpy(then, got, BYTES);
        if (rc < 0) {
            echo(p.session);
            usleep(rng_below(&rng, 3000));
        } else {
            assert_memory_equal(got, owner.memory, BYTES);
        }
        assert_memory_equal(got, then, BYTES);
    }
    print_message("%d of 60 calls were cut\n", n_cut);
    assert_int_equal(kvbm_session_call_into(p.session, SLOW, "", 0, &to, 1, soon(), NULL), BYTES);
    assert_memory_equal(got, owner.memory, BYTES);
    pair_fini(&p);
    assert_int_equal(owner.n_done, 61);
    free(got);
    free(then);
}

static void test_cut(void **state)
{
    (void)state;
    check_cut(0);
    check_cut(2); /* the end of an answer may overtake its chunks */
}

/* Calls that were given up count until the peer has answered: limits hold on both sides. */
static void test_limit(void **state)
{
    struct kvbm_reply reply = {0};
    struct kvbm_call *calls[4], *more;
    struct pair p;

    (void)state;
    pair_init(&p, unix_endpoint(), 4, 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(kvbm_call_start(p.session, LATE, "", 0, -1, NULL, 0, &calls[i]), 0);
    assert_int_equal(kvbm_call_start(p.session, LATE, "", 0, -1, NULL, 0, &more), -EAGAIN);
    kvbm_call_cancel(calls[0]);
    assert_int_equal(kvbm_call_wait(calls[0], soon(), &reply), -ECANCELED);
    assert_int_equal(kvbm_call_wait(calls[1], in_ms(5), &reply), -ETIMEDOUT);
    assert_int_equal(kvbm_call_start(p.session, LATE, "", 0, -1, NULL, 0, &more), -EAGAIN);
    await_kept(4);
    for (int i = 0; i < 4; i++)
        (void)kvbm_session_reply(owner.session, owner.ids[i], i, "answer", 6, -1);
    for (int i = 2; i < 4; i++) {
        assert_int_equal(kvbm_call_wait(calls[i], soon(), &reply), 6);
        assert_int_equal(reply.status, i);
        kvbm_reply_fini(&reply);
    }
    echo(p.session); /* all of the earlier answers have come */
    forget_kept();
    pair_fini(&p);
}

/* ---- threads ---- */

static struct pair crowd;

static void *call_often(void *arg)
{
    struct rng rng = {test_seed() + (uintptr_t)arg};
    uint8_t *body = malloc(100000), *got = malloc(BYTES);
    struct iovec to = {got, BYTES};

    for (int i = 0; i < 150; i++) {
        size_t len = rng_below(&rng, 4) ? rng_below(&rng, 200) : rng_below(&rng, 100000);
        struct kvbm_reply reply = {0};
        long rc;

        memset(body, i, len);
        if (rng_below(&rng, 20) == 0) {
            rc = kvbm_session_call_into(crowd.session, SLOW, "", 0, &to, 1, soon(), NULL);
            assert_int_equal(rc, BYTES);
            assert_memory_equal(got, owner.memory, BYTES);
        }
        if (rng_below(&rng, 10) == 0)
            assert_int_equal(kvbm_session_note(crowd.session, NOTE, body, 1), 0);
        assert_int_equal(kvbm_session_call(crowd.session, ECHO, body, len, -1, soon(), &reply), 0);
        assert_int_equal(reply.len, len);
        assert_memory_equal(len ? reply.body : body, body, len);
        kvbm_reply_fini(&reply);
    }
    free(body);
    free(got);
    return NULL;
}

static void check_crowd(const char *endpoint, uint32_t n_data)
{
    pthread_t threads[6];

    pair_init(&crowd, endpoint, 0, n_data);
    for (uintptr_t i = 0; i < KV_COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, (void *)i), 0);
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        pthread_join(threads[i], NULL);
    pair_fini(&crowd);
}

static void test_crowd(void **state)
{
    (void)state;
    check_crowd(unix_endpoint(), 0);
    check_crowd("tcp:127.0.0.1:0", 2);
}

/* ---- ends of messages ---- */

static _Thread_local bool in_call; /* of this thread: it sends something of its own */
static atomic_int n_small_done, n_foreign;

static void small_done(void *arg)
{
    (void)arg;
    n_foreign += in_call;
    n_small_done++;
}

static void serve_small(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    const struct iovec from = {owner.memory, 40000};

    (void)arg;
    (void)kvbm_session_reply_from(session, request->id, 0, &from, 1, small_done, NULL);
}

static void *ask_small(void *arg)
{
    uint8_t *got = malloc(40000);
    struct iovec to = {got, 40000};

    while (n_small_done < 4000)
        assert_int_equal(kvbm_session_call_into(crowd.session, SMALL, "", 0, &to, 1, soon(), NULL),
                         40000);
    free(got);
    return arg;
}

/*
 * A thread that sends a note, perhaps with locks of its program held, doesn't end other messages: their
 * `done` may take the same locks.
 */
static void test_ends_of_others(void **state)
{
    pthread_t threads[3];
    struct kvbm_session *back;

    (void)state;
    n_small_done = n_foreign = 0;
    pair_init(&crowd, unix_endpoint(), 0, 0);
    assert_int_equal(kvbm_agent_serve(crowd.owner, SMALL, serve_small, NULL), 0);
    back = kvbm_session_find(crowd.owner, crowd.reader->worker);
    assert_non_null(back);
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_small, NULL), 0);
    while (n_small_done < 4000) {
        int err;

        in_call = true;
        err = kvbm_session_note(back, NOTE, "here", 4);
        in_call = false;
        assert_int_equal(err, 0);
        usleep(10);
    }
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        pthread_join(threads[i], NULL);
    kvbm_session_put(back);
    pair_fini(&crowd);
    assert_true(n_small_done >= 4000); /* each once, before the agent's end */
    assert_int_equal(n_foreign, 0);
}

#define TINY 200

static atomic_bool all_asked;
static atomic_int n_tiny, most_waiting;

static void serve_tiny(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    const struct iovec from = {owner.memory, 1};

    (void)arg;
    wait_until(all_asked);
    n_tiny++;
    (void)kvbm_session_reply_from(session, request->id, 0, &from, 1, small_done, NULL);
    most_waiting = KV_MAX(most_waiting, n_tiny - n_small_done);
}

/* Of requests that have come together, each answer that has left ends before the next one is served. */
static void test_ends_between_requests(void **state)
{
    struct kvbm_call *calls[TINY];
    struct pair p;

    (void)state;
    n_small_done = n_tiny = most_waiting = 0;
    all_asked = false;
    pair_init(&p, unix_endpoint(), 0, 0);
    assert_int_equal(kvbm_agent_serve(p.owner, SMALL, serve_tiny, NULL), 0);
    for (int i = 0; i < TINY; i++)
        assert_int_equal(kvbm_call_start(p.session, SMALL, "", 0, -1, NULL, 0, &calls[i]), 0);
    all_asked = true;
    for (int i = 0; i < TINY; i++)
        assert_int_equal(kvbm_call_wait(calls[i], soon(), NULL), 1);
    pair_fini(&p);
    assert_int_equal(n_small_done, TINY);
    assert_int_equal(most_waiting, 1);
}

/* ---- descriptors, notes, ends ---- */

static void test_descriptors(void **state)
{
    struct kvbm_reply reply = {0};
    struct stat a, b;
    struct pair p;
    int fd = memfd_create("test", 0);

    (void)state;
    assert_true(fd >= 0);
    pair_init(&p, unix_endpoint(), 0, 0);
    for (int i = 0; i < 50; i++) {
        int sent = i % 3 ? fd : -1;

        assert_int_equal(kvbm_session_call(p.session, ECHO, "fd", 2, sent, soon(), &reply), 0);
        assert_int_equal(reply.fd >= 0, sent >= 0);
        if (sent >= 0) {
            assert_int_equal(fstat(fd, &a), 0);
            assert_int_equal(fstat(reply.fd, &b), 0);
            assert_int_equal(a.st_ino, b.st_ino);
            assert_int_equal(fcntl(reply.fd, F_GETFD), FD_CLOEXEC);
        }
        kvbm_reply_fini(&reply);
    }
    pair_fini(&p);
    pair_init(&p, "tcp:127.0.0.1:0", 0, 0);
    assert_int_equal(kvbm_session_call(p.session, ECHO, "fd", 2, fd, soon(), &reply), -EINVAL);
    pair_fini(&p);
    close(fd);
}

static void serve_cancel(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    atomic_int *n_cancels = arg;

    (void)session;
    *n_cancels += request->id != 0;
}

/*
 * The owner hears of each call that was given up, also of one whose reply ended meanwhile: it may have
 * done something that nobody else undoes. Deadlines lie all over the time that a reply takes.
 */
static void test_each_giving_up_is_told(void **state)
{
    enum { LEN = 200u << 10 };
    uint8_t *body = calloc(1, LEN);
    static atomic_int n_cancels; /* a failed test leaves its agents behind */
    uint64_t took = 100000;
    int n_given_up = 0;
    struct pair p;

    (void)state;
    n_cancels = 0;
    pair_init(&p, unix_endpoint(), 0, 0);
    assert_int_equal(kvbm_agent_serve(p.owner, KVBM_CANCEL, NULL, NULL),
                     0); /* leases, unused here */
    assert_int_equal(kvbm_agent_serve(p.owner, KVBM_CANCEL, serve_cancel, &n_cancels), 0);
    for (uint64_t i = 0; i < 3000; i++) {
        uint64_t before = kv_now_ns();
        struct kvbm_reply reply = {.fd = -1};
        int err = kvbm_session_call(p.session, ECHO, body, LEN, -1,
                                    before + took / 2 + took * (i % 64) / 64, &reply);

        if (err == 0)
            took = took - took / 16 + (kv_now_ns() - before) / 16;
        assert_true(err == 0 || err == -ETIMEDOUT);
        n_given_up += err != 0;
        if (err != 0)
            echo(p.session); /* else calls whose replies are under way reach the session's limit */
        kvbm_reply_fini(&reply);
    }
    echo(p.session); /* behind all of them */
    assert_true(n_given_up > 0);
    assert_int_equal(n_cancels, n_given_up);
    pair_fini(&p);
    free(body);
}

static void test_notes(void **state)
{
    struct kvbm_reply reply = {0};
    struct pair p;

    (void)state;
    owner.n_notes = owner.n_begun = owner.n_ended = 0;
    pair_init(&p, unix_endpoint(), 0, 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(kvbm_session_note(p.session, NOTE, "abc", 3), 0);
    echo(p.session); /* behind them */
    assert_int_equal(owner.n_notes, 300);
    assert_int_equal(kvbm_session_note(p.session, 70, "abc", 3), -EINVAL);
    assert_int_equal(kvbm_session_note(p.session, 3, "abc", 3), -EINVAL);
    assert_int_equal(kvbm_session_call(p.session, 59, "", 0, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, -EOPNOTSUPP);
    kvbm_reply_fini(&reply);
    assert_int_equal(kvbm_agent_serve(p.owner, ECHO, NULL, NULL), 0);
    assert_int_equal(kvbm_session_call(p.session, ECHO, "", 0, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, -EOPNOTSUPP);
    kvbm_reply_fini(&reply);
    assert_int_equal(owner.n_begun, 1);
    pair_fini(&p);
    assert_int_equal(owner.n_ended, 1);
}

/* The owner ends while calls wait: they return, and the session says so. */
static void test_end(void **state)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct kvbm_call *call;
    struct kvbm_session *found;
    struct pair p;

    (void)state;
    pair_init(&p, unix_endpoint(), 0, 1);
    found = kvbm_session_find(p.reader, kvbm_session_peer(p.session)->worker);
    assert_ptr_equal(found, p.session);
    kvbm_session_put(found);
    assert_null(kvbm_session_find(p.reader, 12345));
    assert_int_equal(kvbm_agent_destroy(p.reader), -EBUSY); /* it has opened a session */
    assert_int_equal(kvbm_call_start(p.session, LATE, "", 0, -1, NULL, 0, &call), 0);
    await_kept(1);
    assert_int_equal(kvbm_agent_destroy(p.owner), 0);
    assert_int_equal(kvbm_session_reply(owner.session, owner.ids[0], 0, NULL, 0, -1), -EPIPE);
    assert_int_equal(kvbm_call_wait(call, soon(), NULL), -EPIPE);
    assert_int_equal(kvbm_session_note(p.session, NOTE, "", 0), -EPIPE);
    assert_int_equal(kvbm_call_start(p.session, LATE, "", 0, -1, NULL, 0, &call), -EPIPE);
    assert_int_equal(kvbm_session_get_info(p.session, &info), 0);
    assert_false(info.open);
    assert_int_equal(info.err, -EPIPE);
    forget_kept();
    assert_int_equal(kvbm_session_close(p.session), 0);
    assert_int_equal(kvbm_agent_destroy(p.reader), 0);
}

static int setup(void **state)
{
    (void)state;
    owner.memory = malloc(BYTES);
    assert_non_null(owner.memory);
    for (size_t i = 0; i < BYTES; i++)
        owner.memory[i] = (uint8_t)(i * 11 + (i >> 12) * 3);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(owner.memory);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_each_giving_up_is_told),
        cmocka_unit_test(test_notes),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_end),
        cmocka_unit_test(test_ends_of_others),
        cmocka_unit_test(test_ends_between_requests),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
