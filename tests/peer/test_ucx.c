// SPDX-License-Identifier: Apache-2.0
/*
 * Leased blocks by UCX, over its TCP and its shared memory: right bytes, and not one of them late when
 * an owner dies or freezes. Where a side has no UCX, or UCX can't reach, the session brings them.
 */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/log.h"
#include "lend_unit.h"
#include "peer/lease_wire.h"

#define KIB64 512  /* inner_dim of blocks of 64 KiB */
#define MIB2 16384 /* of 2 MiB */
#define MAX_READ 16u
#ifndef HAS_UCX
#define HAS_UCX 0 /* libkvbm_ucx was built */
#endif
#define MAX_LATE_NS (UINT64_C(1500) * KV_NS_PER_MS) /* a dead owner is known within */

static const char *self; /* beside which the library is looked for */
static const char *const transports[] = {"tcp", "posix,sysv,self"};

/* Blocks of 128 * @inner bytes: 64 of 64 KiB, or 16 of 2 MiB. */
static struct kvbm_layout_config config_of(enum kvbm_layout_kind kind, uint32_t inner)
{
    struct kvbm_layout_config config = small_config();

    config.kind = kind;
    config.num_blocks = inner == KIB64 ? N_BLOCKS : MAX_READ;
    config.page_size = 16;
    config.inner_dim = inner;
    return config;
}

static struct kvbm_agent_opts ucx_opts(const char *name, const char *const *endpoint)
{
    struct kvbm_agent_opts opts = session_opts(name, endpoint);

    opts.ucx = KVBM_UCX_REQUIRED;
    return opts;
}

static struct kvbm_agent *ucx_agent(const char *name, const char *endpoint)
{
    struct kvbm_agent_opts opts = ucx_opts(name, &endpoint);

    return agent_of(&opts);
}

static void lend_by_ucx(struct lending *l, const char *name, struct kvbm_layout_config config)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = ucx_opts(name, &endpoint);

    lend_init_with(l, &opts, config, false);
}

static uint64_t pushes_of(const struct lending *l)
{
    struct kvbm_lender_stats stats;

    kvbm_lender_get_stats(l->agent->lender, &stats);
    return stats.pushes;
}

static bool is_by_ucx(struct kvbm_session *session)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;

    assert_int_equal(kvbm_session_get_info(session, &info), 0);
    return info.ucx;
}

/** A read of keys @first, first + 7 ... into the blocks of @to from the last on. */
struct reading {
    struct kvbm_session *session;
    struct kvbm_layout *to;
    uint64_t first;
    uint32_t n;
    uint64_t deadline_ns;
    bool no_checksums, no_ucx;
    uint8_t ok[(MAX_READ + 7) / 8];
};

static uint64_t key_of(const struct reading *r, uint32_t i)
{
    return 1 + (r->first + i * 7) % r->to->config.num_blocks;
}

static uint32_t block_of(const struct reading *r, uint32_t i)
{
    return (uint32_t)r->to->config.num_blocks - 1 - i;
}

/* Lease and read. Returns what kvbm_lease_read does, or the error of the lease. */
static long read_keys(struct reading *r)
{
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = r->to,
                                        .n = r->n,
                                        .deadline_ns = r->deadline_ns,
                                        .ok = r->ok,
                                        .no_checksums = r->no_checksums,
                                        .no_ucx = r->no_ucx};
    uint64_t keys[MAX_READ];
    uint32_t blocks[MAX_READ];
    struct kvbm_lease *lease;
    long rc;

    memset(r->ok, 0, sizeof(r->ok));
    for (uint32_t i = 0; i < r->n; i++) {
        keys[i] = key_of(r, i);
        blocks[i] = block_of(r, i);
    }
    opts.to_blocks = blocks;
    rc = kvbm_session_lease(r->session, 1, 0, keys, r->n, 0, r->deadline_ns, &lease);
    if (rc < 0)
        return rc;
    rc = kvbm_lease_read(lease, &opts);
    kvbm_lease_release(lease);
    return rc;
}

/* Read behind a read that was given up: its blocks may be leased until the owner has noticed. */
static long read_at_last(struct reading *r)
{
    long rc;

    do {
        r->deadline_ns = soon();
        rc = read_keys(r);
    } while (rc == -ENOSPC);
    return rc;
}

/* Count the blocks that a read calls right; each must be. */
static uint32_t right_blocks(const struct reading *r)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r->n; i++) {
        if (!(r->ok[i / 8] >> i % 8 & 1))
            continue;
        n++;
        assert_true(lend_holds(r->to, block_of(r, i), key_of(r, i)));
    }
    return n;
}

static void *memory_of_layout(const struct kvbm_layout *layout, size_t *len)
{
    struct kvbm_view first, last;

    assert_int_equal(layout->n, 1);
    assert_int_equal(kvbm_layout_block(layout, 0, &first), 0);
    assert_int_equal(kvbm_layout_block(layout, (uint32_t)layout->config.num_blocks - 1, &last), 0);
    *len = last.addr + last.len - first.addr;
    return (void *)(uintptr_t)first.addr;
}

/* ---- bytes ---- */

static void compare(enum kvbm_layout_kind theirs, enum kvbm_layout_kind ours, uint32_t inner,
                    bool no_checksums)
{
    const struct kvbm_layout_config config = config_of(ours, inner);
    struct kvbm_agent *agent = ucx_agent("reader", NULL);
    struct reading r = {.n = inner == KIB64 ? 16 : 4, .no_checksums = no_checksums};
    struct lending l;

    lend_by_ucx(&l, "owner", config_of(theirs, inner));
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    r.session = open_session(agent, l.agent, 0);
    assert_true(is_by_ucx(r.session));
    for (r.first = 1; r.first < 4; r.first++) {
        r.deadline_ns = soon();
        assert_int_equal(read_keys(&r), r.n);
        assert_int_equal(right_blocks(&r), r.n);
    }
    assert_true(is_by_ucx(r.session));
    assert_true(pushes_of(&l) >= 3);
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
    kvbm_layout_destroy(r.to);
}

static void test_bytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(transports); i++) {
        setenv("UCX_TLS", transports[i], 1);
        compare(KVBM_FULLY_CONTIGUOUS, KVBM_FULLY_CONTIGUOUS, KIB64, false);
        compare(KVBM_FULLY_CONTIGUOUS, KVBM_FULLY_CONTIGUOUS, MIB2, true);
        compare(KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, KVBM_FULLY_CONTIGUOUS, KIB64, true);
        compare(KVBM_FULLY_CONTIGUOUS, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, KIB64, false);
        compare(KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS, MIB2,
                false);
    }
}

/* Blocks of 2 KiB travel without rendezvous. */
static void test_small_blocks(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(transports); i++) {
        setenv("UCX_TLS", transports[i], 1);
        compare(KVBM_FULLY_CONTIGUOUS, KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS, 16, false);
    }
}

/* ---- both ways ---- */

struct side {
    struct lending *l;
    struct reading r;
    unsigned rounds;
};

static void *read_rounds(void *arg)
{
    struct side *side = arg;

    for (unsigned i = 0; i < side->rounds; i++) {
        side->r.first = i;
        side->r.deadline_ns = soon();
        if (read_keys(&side->r) != side->r.n || right_blocks(&side->r) != side->r.n)
            return "a read has failed";
    }
    return NULL;
}

/* Two agents read each other's blocks: UCX may make one connection of the two. */
static void both_ways(void)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, KIB64);
    struct side sides[2] = {{.rounds = 40, .r.n = 16}, {.rounds = 40, .r.n = 16}};
    struct lending owners[2];
    pthread_t threads[2];

    lend_by_ucx(&owners[0], "one", config);
    lend_by_ucx(&owners[1], "two", config);
    for (int i = 0; i < 2; i++) {
        sides[i].r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
        sides[i].r.session = open_session(owners[i].agent, owners[!i].agent, 0);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_rounds, &sides[i]), 0);
    for (int i = 0; i < 2; i++) {
        void *why = NULL;

        assert_int_equal(pthread_join(threads[i], &why), 0);
        assert_null(why);
    }
    for (int i = 0; i < 2; i++)
        assert_true(pushes_of(&owners[i]) >= 40);
    /* A deadline of one direction may end the other's connection, too. It comes back. */
    sides[0].r.deadline_ns = kv_now_ns() + KV_NS_PER_MS / 2;
    (void)read_keys(&sides[0].r);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(read_at_last(&sides[i].r), 16);
        assert_int_equal(right_blocks(&sides[i].r), 16);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(kvbm_session_close(sides[i].r.session), 0);
    for (int i = 0; i < 2; i++) {
        lend_fini(&owners[i]);
        kvbm_layout_destroy(sides[i].r.to);
    }
}

static void test_both_ways(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(transports); i++) {
        setenv("UCX_TLS", transports[i], 1);
        both_ways();
    }
}

/* ---- owners that die or freeze ---- */

/* Lend blocks of 2 MiB, as a program of its own: @to gets the endpoint. */
static _Noreturn void owner_main(int to)
{
    char endpoint[128] = "";
    struct lending l;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
    lend_by_ucx(&l, "owner", config_of(KVBM_FULLY_CONTIGUOUS, MIB2));
    assert_true(kvbm_agent_endpoint(l.agent, 0, endpoint, sizeof(endpoint), NULL) > 0);
    assert_int_equal(write(to, endpoint, sizeof(endpoint)), sizeof(endpoint));
    for (;;)
        pause();
}

/* Start an owner. By exec, since UCX in this process has threads, which fork() doesn't copy. */
static pid_t start_owner(char endpoint[128])
{
    char number[16];
    int pipes[2];
    pid_t pid;

    assert_int_equal(pipe(pipes), 0);
    snprintf(number, sizeof(number), "%d", pipes[1]);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", self, "owner", number, NULL);
        _exit(127);
    }
    close(pipes[1]);
    assert_int_equal(read(pipes[0], endpoint, 128), 128);
    close(pipes[0]);
    return pid;
}

struct watched {
    struct kvbm_agent *agent;
    struct reading r;
    pid_t owner;
    uint8_t *memory;
    size_t len;
    int signal; /* that a thread sends to the owner */
    unsigned rounds;
    uint64_t hit_ns;
};

static void watch_init(struct watched *w)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, MIB2);
    char endpoint[128];

    memset(w, 0, sizeof(*w));
    w->owner = start_owner(endpoint);
    w->agent = ucx_agent("reader", NULL);
    w->r.n = 4;
    w->r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    w->memory = memory_of_layout(w->r.to, &w->len);
    assert_int_equal(open_with(w->agent, endpoint, 0, NULL, &w->r.session), 0);
    w->r.deadline_ns = soon();
    assert_int_equal(read_keys(&w->r), w->r.n);
    assert_int_equal(right_blocks(&w->r), w->r.n);
    assert_true(is_by_ucx(w->r.session));
}

static void watch_fini(struct watched *w)
{
    if (w->owner) {
        assert_int_equal(kill(w->owner, SIGKILL), 0);
        assert_int_equal(waitpid(w->owner, NULL, 0), w->owner);
    }
    assert_int_equal(kvbm_session_close(w->r.session), 0);
    assert_int_equal(kvbm_agent_destroy(w->agent), 0);
    kvbm_layout_destroy(w->r.to);
}

static bool is_poisoned(const struct watched *w)
{
    for (size_t i = 0; i < w->len; i++) {
        if (w->memory[i] != 0x5a)
            return false;
    }
    return true;
}

/* Send @signal to the owner in the midst of reads. */
static void *hit_later(void *arg)
{
    struct watched *w = arg;

    usleep(3000 + w->rounds++ % 4 * 700);
    w->hit_ns = kv_now_ns();
    (void)kill(w->owner, w->signal);
    return NULL;
}

/* Freeze, time out, poison, thaw: nothing arrives late, and the next read is right. */
static void freeze_once(struct watched *w)
{
    uint64_t late;
    pthread_t thread;

    w->signal = SIGSTOP;
    assert_int_equal(pthread_create(&thread, NULL, hit_later, w), 0);
    do {
        w->r.deadline_ns = in_ms(200);
    } while (read_keys(&w->r) == w->r.n);
    late = kv_now_ns() - w->r.deadline_ns;
    (void)right_blocks(&w->r);
    memset(w->memory, 0x5a, w->len);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(late < SOON_NS / 2); /* the figure is peer_bench's; here: it returns */
    assert_int_equal(kill(w->owner, SIGCONT), 0);
    for (uint64_t end = in_ms(300); kv_now_ns() < end;)
        assert_true(is_poisoned(w));
    assert_int_equal(read_at_last(&w->r), w->r.n);
    assert_int_equal(right_blocks(&w->r), w->r.n);
}

static void test_frozen(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(transports); i++) {
        struct watched w;

        setenv("UCX_TLS", transports[i], 1);
        watch_init(&w);
        for (w.r.first = 1; w.r.first < 5; w.r.first++)
            freeze_once(&w);
        watch_fini(&w);
    }
}

static void test_killed(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(transports); i++) {
        struct watched w;
        pthread_t thread;
        uint64_t now;

        setenv("UCX_TLS", transports[i], 1);
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
        assert_true(now - w.hit_ns < MAX_LATE_NS);
        assert_int_equal(waitpid(w.owner, NULL, 0), w.owner);
        assert_true(is_poisoned(&w));
        w.owner = 0;
        watch_fini(&w);
    }
}

/* ---- sides without UCX ---- */

static char lines[4096];
static pthread_mutex_t lines_lock = PTHREAD_MUTEX_INITIALIZER; /* both agents' threads log */

static void keep_line(void *arg, int level, const char *text)
{
    size_t used;

    (void)arg, (void)level;
    pthread_mutex_lock(&lines_lock);
    used = strlen(lines);
    snprintf(lines + used, sizeof(lines) - used, "%s\n", text);
    pthread_mutex_unlock(&lines_lock);
}

static unsigned lines_with(const char *words)
{
    unsigned n = 0;

    pthread_mutex_lock(&lines_lock);
    for (const char *at = lines; (at = strstr(at, words)); at++)
        n++;
    pthread_mutex_unlock(&lines_lock);
    return n;
}

/* Read from @l as an agent of @opts: through the session, whatever both sides wanted. */
static void reads_by_session(struct lending *l, const struct kvbm_agent_opts *opts)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, KIB64);
    struct kvbm_agent *agent = agent_of(opts);
    struct reading r = {.n = 16};

    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    r.session = open_session(agent, l->agent, 0);
    for (r.first = 0; r.first < 2; r.first++) {
        r.deadline_ns = soon();
        assert_int_equal(read_keys(&r), 16);
        assert_int_equal(right_blocks(&r), 16);
    }
    assert_false(is_by_ucx(r.session));
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    kvbm_layout_destroy(r.to);
}

/* In a process of its own, since a library is opened once. */
static int without_library(void)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = ucx_opts("reader", NULL);
    struct kvbm_agent_opts owner = session_opts("owner", &endpoint);
    struct kvbm_agent *agent;
    struct lending l;

    setenv("KVBM_UCX_LIBRARY", "/nonexistent/libkvbm_ucx.so.0", 1);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -ENOTSUP);
    assert_int_equal(lines_with("\n"), 1);
    assert_int_equal(lines_with("UCX needs libkvbm_ucx.so.0"), 1);
    opts.ucx = owner.ucx = KVBM_UCX_IF_THERE;
    lend_init_with(&l, &owner, config_of(KVBM_FULLY_CONTIGUOUS, KIB64), false);
    reads_by_session(&l, &opts);
    lend_fini(&l);
    return 0;
}

static void test_no_library(void **state)
{
    int status;
    pid_t pid = fork();

    (void)state;
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
        lines[0] = '\0';
        _exit(without_library());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void test_peer_without(void **state)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = ucx_opts("reader", NULL);
    struct kvbm_agent_opts owner = session_opts("owner", &endpoint);
    struct lending l;

    (void)state;
    setenv("UCX_TLS", "tcp", 1);
    lines[0] = '\0';
    lend_init_with(&l, &owner, config_of(KVBM_FULLY_CONTIGUOUS, KIB64), false);
    reads_by_session(&l, &opts);
    assert_int_equal(lines_with("a peer has no UCX"), 1);
    lend_fini(&l);
}

/* Two sides without a common transport: the call that finds out brings all blocks, too. */
static void test_no_way(void **state)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, KIB64);
    const struct kvbm_agent_opts opts = ucx_opts("reader", NULL);
    struct lending l;

    (void)state;
    setenv("UCX_TLS", "tcp", 1);
    lend_by_ucx(&l, "owner", config);
    setenv("UCX_TLS", "posix,sysv,self", 1);
    lines[0] = '\0';
    reads_by_session(&l, &opts);
    assert_int_equal(lines_with("nothing comes by UCX"), 1);
    lend_fini(&l);
}

/* ---- manners ---- */

static void on_signal(int signal)
{
    (void)signal;
}

/* UCX sets handlers of signals when it is loaded; this process's stay. */
static void test_signals(void **state)
{
    static const int signals[] = {SIGHUP, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGUSR1};
    struct sigaction action = {.sa_handler = on_signal}, now;
    struct sigaction before[KV_COUNT(signals)];
    struct kvbm_agent *agent;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(signals); i++)
        assert_int_equal(sigaction(signals[i], &action, &before[i]), 0);
    agent = ucx_agent("first", NULL);
    for (size_t i = 0; i < KV_COUNT(signals); i++) {
        assert_int_equal(sigaction(signals[i], &before[i], &now), 0);
        assert_ptr_equal(now.sa_handler, on_signal);
    }
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* Requests that no reader of ours sends. */
static void test_odd_requests(void **state)
{
    struct kvbm_agent_opts opts = session_opts("odd", NULL);
    struct kvbm_agent *agent = agent_of(&opts);
    struct kvbm_session *session;
    struct kv_buf body = KV_BUF_INIT;
    const uint32_t places[] = {0};
    struct kvbm_reply reply;
    struct lending l;

    (void)state;
    lend_by_ucx(&l, "owner", config_of(KVBM_FULLY_CONTIGUOUS, KIB64));
    session = open_session(agent, l.agent, 0);
    kvbm_pushed_write(&body, 12345, true, 1, places, 1);
    assert_int_equal(
        kvbm_session_call(session, KVBM_ASK_PUSH, body.data, body.len, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, -ENOTCONN);
    kvbm_reply_fini(&reply);
    for (size_t len = 0; len < body.len; len++) {
        assert_int_equal(
            kvbm_session_call(session, KVBM_ASK_PUSH, body.data, len, -1, soon(), &reply), 0);
        assert_int_equal(reply.status, -EPROTO);
        kvbm_reply_fini(&reply);
    }
    assert_int_equal(kvbm_session_call(session, KVBM_ASK_UCX, NULL, 0, -1, soon(), &reply), 0);
    assert_int_equal(reply.status, 0); /* disconnecting what isn't connected */
    kvbm_reply_fini(&reply);
    kv_buf_fini(&body);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
}

/* A set is withdrawn, and sessions end, while its blocks are on their way. */
static void *withdraw(void *arg)
{
    struct lending *l = arg;

    usleep(2000);
    kvbm_blockset_destroy(l->set);
    return NULL;
}

static void test_withdrawn(void **state)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, MIB2);
    struct kvbm_agent *agent = ucx_agent("reader", NULL);
    struct reading r = {.n = 4};
    struct lending l;

    (void)state;
    setenv("UCX_TLS", "tcp", 1);
    lend_by_ucx(&l, "owner", config);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    for (int round = 0; round < 5; round++) {
        pthread_t thread;

        r.session = open_session(agent, l.agent, 0);
        assert_int_equal(pthread_create(&thread, NULL, withdraw, &l), 0);
        do {
            r.deadline_ns = soon();
        } while (read_keys(&r) == r.n);
        (void)right_blocks(&r);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(lend_pinned(&l), 0);
        assert_int_equal(lend_export(&l), 0);
        assert_int_equal(kvbm_session_close(r.session), 0);
    }
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    lend_fini(&l);
    kvbm_layout_destroy(r.to);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_signals),      cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_small_blocks), cmocka_unit_test(test_both_ways),
        cmocka_unit_test(test_peer_without), cmocka_unit_test(test_no_way),
        cmocka_unit_test(test_odd_requests), cmocka_unit_test(test_withdrawn),
        cmocka_unit_test(test_frozen),       cmocka_unit_test(test_killed),
    };
    const struct CMUnitTest without[] = {cmocka_unit_test(test_no_library)};
    int failed;

#ifdef __SANITIZE_THREAD__
    setenv("UCX_MEM_EVENTS", "no",
           0); /* UCX's hooks of mmap and the sanitizer's overwrite each other */
#endif
    self = argv[0];
    if (argc == 3)
        owner_main(atoi(argv[2]));
    kv_log_set_user(keep_line, NULL);
    failed = cmocka_run_group_tests(without, NULL, NULL); /* before this process opens it */
    if (!HAS_UCX) {
        printf("skipped: the other tests, since this build has no libkvbm_ucx (libucx-dev)\n");
        return failed;
    }
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
