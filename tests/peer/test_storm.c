// SPDX-License-Identifier: Apache-2.0
/*
 * A storm of loads from processes that read one owner, which is killed, frozen and started again at
 * random moments on the same endpoints, with other blocks. Readers are frozen and killed, too.
 *
 * Every block that a reader calls right is compared byte by byte with what its key says. After each
 * call the reader's memory is poisoned and watched: nothing may arrive late.
 */
// clang-format off
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
// clang-format on

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/log.h"
#include "index/random.h"
#include "lend_unit.h"

#define N_READERS 3
#define N_KEYS (3 * N_BLOCKS)
/* Deadlines of a reader's calls: often exceeded, and long enough for any machine. */
#define SHORT_MS 200
#define LONG_MS 20000
#define SLACK_NS (UINT64_C(20) * KV_NS_PER_S) /* for a loaded machine; what hangs, hangs longer */

/* Seen by all processes. */
static struct {
    char unix_endpoint[96];
    atomic_int port; /* of the owner's tcp endpoint */
    atomic_bool stop;
    atomic_uint_fast64_t owner_turns; /* of the running owner */
    atomic_uint_fast64_t shared_right, sent_right, misses, reads;
    atomic_uint_fast64_t wrong, late_bytes, late_calls, odd_errors;
    atomic_uint_fast64_t pinned_at_end; /* what a frozen and killed crowd has left pinned; + 1 */
} * all;

/* Begin a child: it ends with its parent, and at a failed assertion, instead of testing on. */
static void begin_child(void)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
}

static const char *tcp_endpoint(void)
{
    static char text[64];

    snprintf(text, sizeof(text), "tcp:127.0.0.1:%d", atomic_load(&all->port));
    return text;
}

/* Listen where the owner before listened. Its port may have become somebody else's meanwhile. */
static void choose_port(void)
{
    struct kvbm_agent *agent = NULL;
    const char *endpoint = tcp_endpoint();
    struct kvbm_agent_opts opts = session_opts("port", &endpoint);

    if (kvbm_agent_create(&opts, &agent) != 0) {
        atomic_store(&all->port, 0);
        agent = agent_at("port", tcp_endpoint());
    }
    atomic_store(&all->port, atoi(strrchr(endpoint_of(agent), ':') + 1));
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* ---- the owner ---- */

/* Overwrite blocks, as fast as leases allow, until the end; then wait until nothing is leased. */
static void run_owner(uint64_t seed)
{
    const char *endpoints[] = {all->unix_endpoint, NULL};
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    struct rng rng = {seed};
    struct lending owner;

    begin_child();
    (void)unlink(all->unix_endpoint + strlen("unix:"));
    choose_port();
    endpoints[1] = tcp_endpoint();
    opts.listen = endpoints;
    opts.n_listen = 2;
    opts.worker = 7;
    lend_init(&owner, &opts, KVBM_FULLY_CONTIGUOUS, true);
    while (!atomic_load(&all->stop)) {
        (void)lend_store(&owner, 1 + rng_below(&rng, N_KEYS), 1);
        atomic_fetch_add(&all->owner_turns, 1);
        if (rng_below(&rng, 50) == 0)
            (void)kvbm_pool_reset_inactive(owner.pool);
        usleep(rng_below(&rng, 200));
    }
    lend_wait_idle(&owner); /* the readers are gone, or will be at their leases' end */
    atomic_store(&all->pinned_at_end, 1 + lend_pinned(&owner));
    lend_fini(&owner);
    _exit(0);
}

/* ---- readers ---- */

struct reader {
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *to;
    struct rng rng;
    bool tcp;
};

static uint64_t some_deadline(struct reader *r)
{
    return kv_now_ns() + (rng_below(&r->rng, 2) ? SHORT_MS : LONG_MS) * KV_NS_PER_MS;
}

/* A call has ended: compare with its deadline. Freezes are no part of it. */
static void check_time(uint64_t deadline)
{
    if (kv_now_ns() > deadline + SLACK_NS)
        atomic_fetch_add(&all->late_calls, 1);
}

static bool connect_again(struct reader *r)
{
    char why[256];

    (void)kvbm_session_close(r->session);
    r->session = NULL;
    r->tcp = rng_below(&r->rng, 2);
    if (open_with(r->agent, r->tcp ? tcp_endpoint() : all->unix_endpoint, r->tcp, why,
                  &r->session) == 0)
        return true;
    usleep(2000);
    return false;
}

/* Poison the memory that was read to, and look whether anything still arrives. */
static void watch_poison(struct reader *r, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        lend_fill(r->to, i, UINT64_MAX - 1);
    usleep(rng_below(&r->rng, 3) ? 0 : 2000);
    for (uint32_t i = 0; i < n; i++) {
        if (!lend_holds(r->to, i, UINT64_MAX - 1))
            atomic_fetch_add(&all->late_bytes, 1);
    }
}

static void read_lease(struct reader *r, struct kvbm_lease *lease, const uint64_t *keys)
{
    const uint32_t blocks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint8_t ok[1] = {0};
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = r->to,
                                        .to_blocks = blocks,
                                        .n = (uint32_t)kvbm_lease_count(lease),
                                        .deadline_ns = some_deadline(r),
                                        .ok = ok,
                                        .no_shared = rng_below(&r->rng, 2)};
    bool shared = kvbm_lease_is_shared(lease) && !opts.no_shared;
    long n = kvbm_lease_read(lease, &opts);

    check_time(opts.deadline_ns);
    if (n < 0)
        atomic_fetch_add(&all->odd_errors, 1);
    for (uint32_t i = 0; i < opts.n; i++) {
        if (!(ok[0] >> i & 1))
            atomic_fetch_add(&all->misses, 1);
        else if (!lend_holds(r->to, i, keys[i]))
            atomic_fetch_add(&all->wrong, 1);
        else
            atomic_fetch_add(shared ? &all->shared_right : &all->sent_right, 1);
    }
    atomic_fetch_add(&all->reads, 1);
    watch_poison(r, opts.n);
}

/* Returns false when the session is of no use any more. */
static bool read_once(struct reader *r)
{
    uint64_t keys[8], deadline = some_deadline(r);
    struct kvbm_lease *lease = NULL;
    int err;

    for (uint32_t i = 0; i < 8; i++)
        keys[i] = 1 + rng_below(&r->rng, N_KEYS);
    err = kvbm_session_lease(r->session, 1, 0, keys, 8, rng_below(&r->rng, 2) ? 3 : 30000, deadline,
                             &lease);
    check_time(deadline);
    if (err < 0)
        return err == -ENOENT || err == -ENOSPC;
    for (uint32_t again = rng_below(&r->rng, 3) + 1; again > 0; again--)
        read_lease(r, lease, keys);
    kvbm_lease_release(lease);
    return true;
}

static void run_reader(int i, uint64_t seed)
{
    const struct kvbm_layout_config config =
        lend_config(i % 2 ? KVBM_FULLY_CONTIGUOUS : KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS);
    struct reader r = {.rng = {seed}};
    char name[40];

    begin_child();
    snprintf(name, sizeof(name), "reader%d-%d", i, (int)getpid());
    r.agent = agent_at(name, NULL);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    while (!atomic_load(&all->stop)) {
        if ((!r.session && !connect_again(&r)) || !read_once(&r) || rng_below(&r.rng, 40) == 0) {
            (void)kvbm_session_close(r.session);
            r.session = NULL;
        }
    }
    (void)kvbm_session_close(r.session);
    _exit(kvbm_agent_destroy(r.agent) == 0 ? 0 : 3);
}

/* ---- the storm ---- */

static pid_t start_owner(struct rng *rng)
{
    uint64_t seed = rng_next(rng);
    pid_t pid;

    atomic_store(&all->owner_turns, 0);
    pid = fork();
    if (pid == 0)
        run_owner(seed);
    assert_true(pid > 0);
    return pid;
}

static pid_t start_reader(int i, struct rng *rng)
{
    uint64_t seed = rng_next(rng);
    pid_t pid = fork();

    if (pid == 0)
        run_reader(i, seed);
    assert_true(pid > 0);
    return pid;
}

static void kill_and_reap(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* Freeze a process, and wait until all its threads are: the signal alone takes a moment. */
static void freeze_all(pid_t pid)
{
    int status;

    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
}

static void freeze(pid_t pid, struct rng *rng)
{
    assert_int_equal(kill(pid, SIGSTOP), 0);
    usleep(1000 * (1 + rng_below(rng, 120)));
    assert_int_equal(kill(pid, SIGCONT), 0);
}

/* Wait until readers have read so much more. */
static void let_read(uint64_t more)
{
    uint64_t from = atomic_load(&all->reads);

    for (uint64_t end = soon(); atomic_load(&all->reads) < from + more; usleep(1000))
        assert_true(kv_now_ns() < end);
}

static void disturb(pid_t *owner, pid_t *readers, struct rng *rng)
{
    uint32_t i = rng_below(rng, N_READERS);

    switch (rng_below(rng, 5)) {
    case 0:
        kill_and_reap(*owner);
        usleep(1000 * rng_below(rng, 20));
        *owner = start_owner(rng);
        return;
    case 1:
        kill_and_reap(readers[i]);
        readers[i] = start_reader((int)i, rng);
        return;
    case 2:
        freeze(readers[i], rng);
        return;
    default:
        freeze(*owner, rng);
    }
}

static int exit_of(pid_t pid)
{
    int status = -1;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

static void test_storm(void **state)
{
    struct rng rng = {test_seed()};
    pid_t owner, readers[N_READERS];

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(all != MAP_FAILED);
    snprintf(all->unix_endpoint, sizeof(all->unix_endpoint), "%s", unix_endpoint());
    owner = start_owner(&rng);
    for (int i = 0; i < N_READERS; i++)
        readers[i] = start_reader(i, &rng);
    let_read(20);
    for (long i = 0; i < test_rounds(20); i++) {
        disturb(&owner, readers, &rng);
        let_read(10);
    }
    for (uint64_t end = soon(); !atomic_load(&all->shared_right) || !atomic_load(&all->sent_right);
         usleep(1000))
        assert_true(kv_now_ns() < end);
    kill_and_reap(readers[0]); /* with whatever it has leased */
    atomic_store(&all->stop, true);
    for (int i = 1; i < N_READERS; i++)
        assert_int_equal(exit_of(readers[i]), 0);
    assert_int_equal(exit_of(owner), 0);
    print_message("reads %lu right %lu shared, %lu sent; misses %lu\n", (unsigned long)all->reads,
                  (unsigned long)all->shared_right, (unsigned long)all->sent_right,
                  (unsigned long)all->misses);
    assert_int_equal(all->wrong, 0);
    assert_int_equal(all->late_bytes, 0);
    assert_int_equal(all->late_calls, 0);
    assert_int_equal(all->odd_errors, 0);
    assert_int_equal(all->pinned_at_end, 1);
    assert_true(all->shared_right > 0 && all->sent_right > 0);
    (void)unlink(all->unix_endpoint + strlen("unix:"));
    munmap(all, sizeof(*all));
}

/* ---- an owner that is gone or frozen, and its memory ---- */

struct frozen {
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *to;
    pid_t owner;
};

static void frozen_init(struct frozen *f, struct rng *rng)
{
    const struct kvbm_layout_config config = lend_config(KVBM_FULLY_CONTIGUOUS);

    all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(all != MAP_FAILED);
    snprintf(all->unix_endpoint, sizeof(all->unix_endpoint), "%s", unix_endpoint());
    f->owner = start_owner(rng);
    f->agent = agent_at("reader", NULL);
    f->to = allocate(&config, KVBM_STORAGE_SYSTEM);
    for (uint64_t end = soon(); open_with(f->agent, all->unix_endpoint, 0, NULL, &f->session) != 0;
         usleep(1000))
        assert_true(kv_now_ns() < end);
}

static void frozen_fini(struct frozen *f)
{
    assert_int_equal(kvbm_session_close(f->session), 0);
    assert_int_equal(kvbm_agent_destroy(f->agent), 0);
    kvbm_layout_destroy(f->to);
    (void)unlink(all->unix_endpoint + strlen("unix:"));
    munmap(all, sizeof(*all));
}

/* Lease what the owner has now of some keys, for long. */
static struct kvbm_lease *lease_some(struct frozen *f, uint64_t *keys, uint32_t n)
{
    struct kvbm_lease *lease = NULL;
    int err = -ENOENT;

    for (uint64_t end = soon(), first = 1; err == -ENOENT; first = first % N_KEYS + 1) {
        assert_true(kv_now_ns() < end);
        for (uint32_t i = 0; i < n; i++)
            keys[i] = first + i;
        err = kvbm_session_lease(f->session, 1, 0, keys, n, 60000, soon(), &lease);
    }
    assert_int_equal(err, 0);
    return lease;
}

static uint32_t there(struct kvbm_lease *lease)
{
    struct kvbm_block_at at;
    uint32_t n = 0;

    for (size_t i = 0; i < kvbm_lease_count(lease); i++)
        n += kvbm_lease_block(lease, i, &at) == 0;
    return n;
}

/* Shared memory is read on, whether its owner is frozen or dead; what is sent is a miss in time. */
static void test_without_the_owner(void **state)
{
    const uint32_t blocks[] = {0, 1, 2, 3};
    struct rng rng = {test_seed()};

    (void)state;
    for (int dead = 0; dead < 2; dead++) {
        struct kvbm_lease_read_opts opts = {.size = sizeof(opts), .to_blocks = blocks};
        uint64_t keys[4], before;
        struct kvbm_lease *lease;
        uint8_t ok[1];
        struct frozen f;

        frozen_init(&f, &rng);
        lease = lease_some(&f, keys, 4);
        assert_true(kvbm_lease_is_shared(lease));
        opts.to = f.to;
        opts.ok = ok;
        opts.n = (uint32_t)kvbm_lease_count(lease);
        if (dead)
            kill_and_reap(f.owner);
        else
            freeze_all(f.owner);
        for (int again = 0; again < 3; again++) {
            assert_int_equal(kvbm_lease_read(lease, &opts), there(lease));
            for (uint32_t i = 0; i < opts.n; i++)
                assert_true(!(ok[0] >> i & 1) || lend_holds(f.to, i, keys[i]));
        }
        opts.no_shared = true;
        opts.deadline_ns = kv_now_ns() + 50 * KV_NS_PER_MS;
        before = opts.deadline_ns;
        assert_int_equal(kvbm_lease_read(lease, &opts), 0);
        assert_true(kv_now_ns() < before + SLACK_NS);
        kvbm_lease_release(lease);
        if (!dead)
            kill_and_reap(f.owner);
        frozen_fini(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_the_owner),
        cmocka_unit_test(test_storm),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
