// SPDX-License-Identifier: Apache-2.0
/*
 * Leased blocks by NIXL, over its UCX's TCP: right bytes, and not one of them late when an owner dies
 * or freezes, nor does a side die of the other. NIXL is the one that KV_NIXL_LIB names.
 */
#include <sys/resource.h>

#define CARRIER nixl
#define CARRIER_REQUIRED KVBM_NIXL_REQUIRED
#include "base/unit.h"
#include "carrier_unit.h"
#include "peer/lease/borrow.h"
#include "peer/nixl/node.h"
#include "peer/session/carrier.h"

#ifndef HAS_UCX
#define HAS_UCX 0 /* libkvbm_ucx was built */
#endif

static struct kvbm_carrier_node *node_of(const struct kvbm_agent *agent)
{
    return agent->carriers[KVBM_BY_NIXL].node;
}

/* Chunks of a node's arena that are lost, of which *@used (may be NULL) are used. */
static uint32_t lost_of(const struct kvbm_agent *agent, uint32_t *used)
{
    struct kvbm_carrier_node *node = node_of(agent);
    uint32_t lost;

    pthread_mutex_lock(&node->lock);
    lost = node->n_lost;
    if (used)
        *used = node->n_used;
    pthread_mutex_unlock(&node->lock);
    return lost;
}

/* ---- bytes ---- */

static void compare(enum kvbm_layout_kind theirs, enum kvbm_layout_kind ours, uint32_t inner,
                    bool no_checksums)
{
    const struct kvbm_layout_config config = config_of(ours, inner);
    struct kvbm_agent *agent = carried_agent("reader", NULL);
    struct reading r = {.n = inner == KIB64 ? 16 : 4, .no_checksums = no_checksums};
    struct lending l;
    uint32_t used;

    lend_carried(&l, "owner", config_of(theirs, inner));
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    open_carried(agent, endpoint_of(l.agent), &r);
    for (r.first = 1; r.first < 4; r.first++) {
        r.deadline_ns = soon();
        assert_int_equal(read_keys(&r), r.n);
        assert_int_equal(right_blocks(&r), r.n);
    }
    assert_true(is_carried(r.session));
    assert_true(pushes_of(&l) >= 3);
    assert_int_equal(lost_of(agent, &used), 0);
    assert_int_equal(used, 0);
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
    kvbm_layout_destroy(r.to);
}

static void test_bytes(void **state)
{
    (void)state;
    compare(KVBM_FULLY_CONTIGUOUS, KVBM_FULLY_CONTIGUOUS, KIB64, false);
    compare(KVBM_FULLY_CONTIGUOUS, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, 16, false);
    compare(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, MIB2, true);
}

/* ---- owners that die or freeze ---- */

/* Freeze, time out, poison, thaw: nothing arrives late, what was given up ends, the next is right. */
static void freeze_once(struct watched *w)
{
    uint64_t late;
    pthread_t thread;

    w->signal = SIGSTOP;
    assert_int_equal(pthread_create(&thread, NULL, hit_later, w), 0);
    do {
        w->r.deadline_ns = in_ms(400);
    } while (read_keys(&w->r) == w->r.n);
    late = kv_now_ns() - w->r.deadline_ns;
    (void)right_blocks(&w->r);
    memset(w->memory, 0x5a, w->len);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(late < SOON_NS / 2);
    assert_int_equal(kill(w->owner, SIGCONT), 0);
    for (uint64_t end = in_ms(300); kv_now_ns() < end;)
        assert_true(is_poisoned(w));
    assert_int_equal(read_at_last(&w->r), w->r.n);
    assert_int_equal(right_blocks(&w->r), w->r.n);
    wait_until(!lost_of(w->agent, NULL)); /* the owner tells */
}

static void test_frozen(void **state)
{
    struct watched w;

    (void)state;
    watch_init(&w);
    for (w.r.first = 1; w.r.first < 5; w.r.first++)
        freeze_once(&w);
    assert_int_equal(waitpid(w.owner, NULL, WNOHANG), 0);
    watch_fini(&w);
}

static void test_killed(void **state)
{
    struct watched w;
    pthread_t thread;
    uint64_t now;

    (void)state;
    watch_init(&w);
    w.signal = SIGKILL;
    assert_int_equal(pthread_create(&thread, NULL, hit_later, &w), 0);
    do {
        w.r.deadline_ns = soon();
    } while (read_keys(&w.r) == w.r.n);
    now = kv_now_ns();
    (void)right_blocks(&w.r);
    memset(w.memory, 0x5a, w.len);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(now - w.hit_ns < SOON_NS / 2); /* long before the deadline */
    assert_int_equal(waitpid(w.owner, NULL, 0), w.owner);
    assert_true(is_poisoned(&w));
    w.owner = 0;
    watch_fini(&w);
}

/* Read until killed, as a program of its own: @to gets a byte once blocks come by NIXL. */
static _Noreturn void reader_main(const char *endpoint, int to)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, MIB2);
    struct kvbm_agent *agent = carried_agent("other-reader", NULL);
    struct reading r = {.n = 4};

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    open_carried(agent, endpoint, &r);
    assert_int_equal(write(to, "", 1), 1);
    for (;; r.first++) {
        r.deadline_ns = soon();
        (void)read_keys(&r);
    }
}

static pid_t start_reader(const char *endpoint)
{
    char number[16], byte;
    int pipes[2];
    pid_t pid;

    assert_int_equal(pipe(pipes), 0);
    snprintf(number, sizeof(number), "%d", pipes[1]);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", self, "reader", endpoint, number, NULL);
        _exit(127);
    }
    close(pipes[1]);
    assert_int_equal(read(pipes[0], &byte, 1), 1);
    close(pipes[0]);
    return pid;
}

/* A reader dies in the midst of a read while its owner is frozen: the owner lives, and lends on. */
static void test_reader_dies(void **state)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct watched w;

    (void)state;
    watch_init(&w);
    assert_int_equal(kvbm_session_get_info(w.r.session, &info), 0);
    for (int round = 0; round < 3; round++) {
        pid_t reader = start_reader(info.endpoint);

        usleep(2000 + 1500 * (useconds_t)round);
        assert_int_equal(kill(w.owner, SIGSTOP), 0);
        usleep(20000);
        assert_int_equal(kill(reader, SIGKILL), 0);
        assert_int_equal(waitpid(reader, NULL, 0), reader);
        assert_int_equal(kill(w.owner, SIGCONT), 0);
        assert_int_equal(read_at_last(&w.r), w.r.n);
        assert_int_equal(right_blocks(&w.r), w.r.n);
        assert_int_equal(waitpid(w.owner, NULL, WNOHANG), 0);
    }
    watch_fini(&w);
}

/* ---- a process for both libraries ---- */

/* Read by UCX alone, or by NIXL alone. */
static void read_by(bool ucx)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, KIB64);
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts owner = session_opts("owner", &endpoint);
    struct kvbm_agent_opts reader = session_opts("reader", NULL);
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct reading r = {.n = 16};
    struct kvbm_agent *agent;
    struct lending l;

    owner.ucx = reader.ucx = ucx ? KVBM_UCX_REQUIRED : KVBM_UCX_OFF;
    owner.nixl = reader.nixl = ucx ? KVBM_NIXL_OFF : KVBM_NIXL_REQUIRED;
    lend_init_with(&l, &owner, config, false);
    agent = agent_of(&reader);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    for (uint64_t end = soon(); ucx ? !info.ucx : !info.nixl;) { /* as open_carried */
        assert_true(kv_now_ns() < end);
        r.session = open_session(agent, l.agent, 0);
        r.deadline_ns = soon();
        assert_int_equal(read_keys(&r), r.n);
        assert_int_equal(right_blocks(&r), r.n);
        assert_int_equal(kvbm_session_get_info(r.session, &info), 0);
        assert_int_equal(kvbm_session_close(r.session), 0);
    }
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
    kvbm_layout_destroy(r.to);
}

/* The part of a process of its own: libraries are loaded once. */
static _Noreturn void both_main(bool ucx_first)
{
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
    for (int i = 0; i < 4; i++)
        read_by(ucx_first == (i % 2 == 0));
    fflush(NULL);
    _exit(0); /* the sanitizer's search for leaks has died of two UCX's threads */
}

static void test_beside_ucx(void **state)
{
    (void)state;
    if (!HAS_UCX) {
        printf("skipped: this build has no libkvbm_ucx (libucx-dev)\n");
        return;
    }
    for (int ucx_first = 0; ucx_first < 2; ucx_first++) {
        int status;
        pid_t pid = fork();

        assert_true(pid >= 0);
        if (pid == 0) {
            (void)execl("/proc/self/exe", self, "both", ucx_first ? "1" : "0", NULL);
            _exit(127);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
}

/* ---- the arena ---- */

static uint32_t turn_of(struct kvbm_carrier_node *node)
{
    uint32_t turn;

    pthread_mutex_lock(&node->lock);
    turn = node->turn;
    pthread_mutex_unlock(&node->lock);
    return turn;
}

/* Memory of what was given up comes back when NIXL is begun anew, and reads go on. */
static void test_worn(void **state)
{
    struct kvbm_carrier_node *node;
    struct watched w;
    uint32_t turn;

    (void)state;
    watch_init(&w);
    node = node_of(w.agent);
    turn = turn_of(node);
    for (uint64_t end = soon();
         turn_of(node) == turn;) { /* an owner that never says that it is over */
        struct kvbm_carrier_message message;
        struct kvbm_carrier_receive *receive;
        static uint8_t bytes[8 << 20];
        const struct iovec piece = {bytes, sizeof(bytes)};
        uint64_t tag;

        message = (struct kvbm_carrier_message){&piece, 1};
        assert_true(kv_now_ns() < end);
        if (kvbm_nixl_receive_start(node, &message, 1, &tag, &receive) == 0)
            assert_int_equal(kvbm_nixl_receive_end(receive, false, 0), -ETIMEDOUT);
        usleep(1000);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(read_at_last(&w.r), w.r.n);
        assert_int_equal(right_blocks(&w.r), w.r.n);
    }
    watch_fini(&w);
}

/* Others use all of the arena: a read goes through the session, and the link stays. */
static void test_full(void **state)
{
    static uint8_t bytes[8 << 20];
    const struct iovec piece = {bytes, sizeof(bytes)};
    const struct kvbm_carrier_message message = {&piece, 1};
    struct kvbm_carrier_receive *receives[KVBM_NIXL_CHUNKS / 8];
    uint64_t tags[KVBM_NIXL_CHUNKS / 8];
    uint32_t used, lost, n = 0;
    struct watched w;

    (void)state;
    watch_init(&w);
    lost = lost_of(w.agent, NULL); /* on a machine with other work; see open_carried */
    while (n < KV_COUNT(receives) &&
           kvbm_nixl_receive_start(node_of(w.agent), &message, 1, &tags[n], &receives[n]) == 0)
        n++;
    assert_true(n + (lost + 7) / 8 >= KV_COUNT(receives));
    w.r.deadline_ns = soon();
    assert_int_equal(read_keys(&w.r), w.r.n);
    assert_int_equal(right_blocks(&w.r), w.r.n);
    assert_true(is_carried(w.r.session));
    for (uint32_t i = 0; i < n; i++) {
        if (i % 2) /* told before or after it is given up */
            kvbm_nixl_receive_over(node_of(w.agent), tags[i]);
        assert_int_equal(kvbm_nixl_receive_end(receives[i], false, 0), -ETIMEDOUT);
        kvbm_nixl_receive_over(node_of(w.agent), tags[i]);
    }
    assert_true(lost_of(w.agent, &used) <= lost);
    assert_true(used <= lost);
    watch_fini(&w);
}

/* ---- manners ---- */

static uint64_t cpu_ns(void)
{
    struct rusage used;

    assert_int_equal(getrusage(RUSAGE_SELF, &used), 0);
    return (uint64_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * KV_NS_PER_S +
           (uint64_t)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000;
}

static void test_idle(void **state)
{
    struct watched w;
    uint64_t before, from;

    (void)state;
    watch_init(&w);
    before = cpu_ns();
    from = kv_now_ns();
    usleep(500000); /* or longer, on a busy machine */
    assert_true((cpu_ns() - before) * 10 < kv_now_ns() - from);
    watch_fini(&w);
}

static void test_signals(void **state)
{
    static const int signals[] = {SIGHUP, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGUSR1};
    struct sigaction before[KV_COUNT(signals)], now;
    struct kvbm_agent *agent;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(signals); i++)
        assert_int_equal(sigaction(signals[i], NULL, &before[i]), 0);
    agent = carried_agent("first", NULL);
    for (size_t i = 0; i < KV_COUNT(signals); i++) {
        assert_int_equal(sigaction(signals[i], NULL, &now), 0);
        assert_ptr_equal(now.sa_handler, before[i].sa_handler);
    }
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* Requests that no reader of ours sends. */
static void test_odd_requests(void **state)
{
    static uint8_t address[KVBM_NIXL_HEAD + 40];
    struct kvbm_agent_opts opts = session_opts("odd", NULL);
    struct kvbm_agent *agent = agent_of(&opts);
    struct kvbm_session *session;
    struct kvbm_reply reply;
    struct kvbm_lease *lease;
    struct kv_buf body = KV_BUF_INIT;
    const uint32_t places[] = {0};
    const uint64_t key = 1;
    struct lending l;

    (void)state;
    lend_carried(&l, "owner", config_of(KVBM_FULLY_CONTIGUOUS, KIB64));
    session = open_session(agent, l.agent, 0);
    for (size_t len = 1; len <= sizeof(address); len++) {
        int32_t status = len <= KVBM_NIXL_HEAD ? -EPROTO : 0;

        assert_int_equal(
            kvbm_session_call(session, KVBM_ASK_NIXL, address, len, -1, soon(), &reply), 0);
        assert_int_equal(reply.status, status);
        kvbm_reply_fini(&reply);
    }
    assert_int_equal(kvbm_session_lease(session, 1, 0, &key, 1, 0, soon(), &lease), 0);
    kvbm_pushed_write(&body, lease->id, true, 1, places, 1); /* beyond an arena of 0 bytes */
    assert_int_equal(
        kvbm_session_call(session, KVBM_ASK_NIXL_PUSH, body.data, body.len, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, -EPROTO);
    kvbm_reply_fini(&reply);
    memset(address, 1, sizeof(address)); /* metadata that NIXL can't read */
    assert_int_equal(
        kvbm_session_call(session, KVBM_ASK_NIXL, address, sizeof(address), -1, soon(), &reply), 0);
    assert_int_equal(reply.status, 0);
    kvbm_reply_fini(&reply);
    assert_int_equal(
        kvbm_session_call(session, KVBM_ASK_NIXL_PUSH, body.data, body.len, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, -ENOTCONN);
    kvbm_reply_fini(&reply);
    assert_int_equal(kvbm_session_call(session, KVBM_TELL_PUSHED, body.data, 8, -1, soon(), &reply),
                     0);
    assert_int_equal(reply.status, -EPROTO);
    kvbm_reply_fini(&reply);
    assert_int_equal(kvbm_session_note(session, KVBM_TELL_PUSHED, body.data, 8), 0);
    assert_int_equal(kvbm_session_note(session, KVBM_TELL_PUSHED, body.data, 7), 0);
    kvbm_lease_release(lease);
    kv_buf_fini(&body);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
}

/* ---- without NIXL ---- */

/* In a process of its own, since a library is opened once. */
static int without_library(void)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = carried_opts("reader", NULL);
    struct kvbm_agent_opts owner = session_opts("owner", &endpoint);
    struct kvbm_agent *agent;
    struct lending l;

    setenv("KV_NIXL_LIB", "/nonexistent/libnixl_capi.so", 1);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -ENOTSUP);
    assert_int_equal(lines_with("\n"), 1);
    assert_int_equal(lines_with("NIXL needs libnixl_capi.so"), 1);
    opts.nixl = owner.nixl = KVBM_NIXL_IF_THERE;
    lend_init_with(&l, &owner, config_of(KVBM_FULLY_CONTIGUOUS, KIB64), false);
    reads_by_session(&l, &opts);
    lend_fini(&l);
    assert_int_equal(lines_with("NIXL"), 1);
    opts.nixl = KVBM_NIXL_REQUIRED + 1;
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    return 0;
}

/* A library of that name that isn't NIXL's. */
static int other_library(void)
{
    struct kvbm_agent_opts opts = carried_opts("reader", NULL);
    struct kvbm_agent *agent;

    setenv("KV_NIXL_LIB", "libc.so.6", 1);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -ENOTSUP);
    assert_int_equal(lines_with("\n"), 1);
    assert_int_equal(lines_with("it has no nixl_capi_"), 1);
    return 0;
}

static void in_process(int (*fn)(void))
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
        lines[0] = '\0';
        _exit(fn());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void test_no_library(void **state)
{
    (void)state;
    in_process(without_library);
    in_process(other_library);
}

static void test_peer_without(void **state)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = carried_opts("reader", NULL);
    struct kvbm_agent_opts owner = session_opts("owner", &endpoint);
    struct lending l;

    (void)state;
    lines[0] = '\0';
    lend_init_with(&l, &owner, config_of(KVBM_FULLY_CONTIGUOUS, KIB64), false);
    reads_by_session(&l, &opts);
    assert_int_equal(lines_with("a peer has no NIXL"), 1);
    lend_fini(&l);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_signals),      cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_peer_without), cmocka_unit_test(test_odd_requests),
        cmocka_unit_test(test_idle),         cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_killed),       cmocka_unit_test(test_worn),
        cmocka_unit_test(test_reader_dies),  cmocka_unit_test(test_full),
        cmocka_unit_test(test_beside_ucx),
    };
    const struct CMUnitTest without[] = {cmocka_unit_test(test_no_library)};
    int failed;

    self = argv[0];
    setenv("UCX_TLS", "tcp", 0);
    setenv("UCX_NET_DEVICES", "lo", 0);
#ifdef __SANITIZE_THREAD__
    setenv("UCX_MEM_EVENTS", "no", 0); /* UCX's hooks of mmap and the sanitizer's collide */
#endif
    if (argc == 3 && strcmp(argv[1], "both") == 0)
        both_main(argv[2][0] == '1');
    if (argc == 4)
        reader_main(argv[2], atoi(argv[3]));
    if (argc == 3)
        owner_main(atoi(argv[2]));
    kv_log_set_user(keep_line, NULL);
    failed = cmocka_run_group_tests(without, NULL, NULL); /* before this process opens it */
    if (!getenv("KV_NIXL_LIB")) {
        printf("skipped: the other tests, since KV_NIXL_LIB names no libnixl_capi.so\n");
        return failed;
    }
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
